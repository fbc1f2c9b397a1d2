"""Updates on conversations of several turns: only what the policy sampled is trained, whatever an environment said between its turns."""

from dataclasses import replace

import policy_lab
import pytest
import torch

from pedigree.configs.language.execution import Numerics
from pedigree.stages.core.batches import collate, document
from pedigree.stages.training.models import load_policy
from pedigree.stages.training.policy_update import compute_advantages, initial_state, micro_batches, update_policy

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def answers(policy):
    return policy_lab.two_turns(load_policy(policy, Numerics()))


def gradient_bits(policy, answers, type="grpo", **fields):
    made = policy_lab.learner(policy_lab.algorithm(type, **fields), policy)
    done = policy_lab.steps(made, answers, 2)
    weights = torch.cat([parameter.detach().flatten() for parameter in made.trainer.module.parameters()]).clone()
    policy_lab.close(made)
    return [one.metrics for one in done], weights


def test_answers_of_one_turn_have_the_same_bits_with_and_without_a_mask(policy):
    one = policy_lab.made_answers(load_policy(policy, Numerics()))
    numbers, weights = gradient_bits(policy, one)
    again, masked = gradient_bits(policy, [replace(answer, sampled=[True] * len(answer.ids)) for answer in one])
    assert numbers == again and torch.equal(weights, masked)


def test_credit_of_turns_is_that_of_the_conversation_where_there_is_one_turn(policy):
    one = policy_lab.made_answers(load_policy(policy, Numerics()))
    numbers, weights = gradient_bits(policy, one)
    again, by_turn = gradient_bits(policy, [replace(answer, turn_rewards=[answer.reward]) for answer in one])
    assert numbers == again and torch.equal(weights, by_turn)


def test_tokens_have_the_advantage_of_their_turn(policy, answers):
    """Turns of rewards 0 and 1, and of one of reward 1 besides: mean 2/3, std √(1/3); A = (-2/3 + 1/3) / std, 1/3 / std. The totals are
    equal, so that the conversations have none."""
    several = replace(answers[0], ids=[5, 6, 7, 8, 9], logprobs=[-1.0] * 5, sampled=[True, True, False, False, True], reward=1.0)
    pair = [replace(several, turn_rewards=[0.0, 1.0]), replace(several, turn_rewards=[1.0], sampled=[True] * 5)]
    made = policy_lab.learner(policy_lab.algorithm("grpo", kl=None), policy)
    ((seen,),) = micro_batches(made, pair, [[[0, 1]]], old_logprobs=True)
    state, rewards_PG = initial_state(made.algorithm), torch.ones(1, 2)
    (((found,),), _) = compute_advantages(made, pair, [[seen]], rewards_PG, state, state, None)
    scale = (1 / 3) ** 0.5 + 1e-4
    expected = [-1 / 3 / scale, -1 / 3 / scale, 1 / 3 / scale, *[1 / 3 / scale] * 5]
    assert found.advantages_N is not None and found.advantages_N.tolist() == pytest.approx(expected, rel=1e-5)
    assert update_policy(made, pair, 2, 0, state).updates == 1
    whole = [replace(one, turn_rewards=None) for one in pair]
    assert update_policy(made, whole, 2, 0, state).updates == 0
    unknown = [pair[0], replace(pair[1], reward=float("nan"))]  # its turns count nowhere
    ((alone,),) = micro_batches(made, unknown, [[[0]]], old_logprobs=True)
    (((found,),), _) = compute_advantages(made, unknown, [[alone]], torch.tensor([[1.0, torch.nan]]), state, state, None)
    assert found.advantages_N is not None and found.advantages_N.tolist()[0] == pytest.approx(0.0, abs=1e-6)
    assert found.advantages_N.tolist()[2] == pytest.approx(0.5 / (0.5**0.5 + 1e-4))
    policy_lab.close(made)


@pytest.mark.parametrize("type", ["grpo", "ppo"])
def test_log_probs_of_what_the_environment_said_are_no_part_of_anything(policy, answers, type):
    other = [
        replace(one, logprobs=[logp if own else -50.0 for logp, own in zip(one.logprobs, one.sampled, strict=True)]) for one in answers
    ]
    (numbers, weights), (again, changed) = (gradient_bits(policy, some, type, correction={}) for some in (answers, other))
    assert numbers == again and torch.equal(weights, changed)
    assert numbers[0]["logprob_gap"] < 1e-5 and numbers[0]["trained_tokens"] == sum(sum(one.sampled) for one in answers)


def test_the_loss_is_that_of_the_sampled_tokens_in_their_whole_context(policy, answers):
    """Two conversations with rewards r and r - 1, so advantages ±½: Σ_t -A log π(y_t | all before) / Σ_t 1 over the sampled tokens."""
    pair = [answers[0], replace(answers[1], reward=answers[0].reward - 1)]
    made = policy_lab.learner(policy_lab.algorithm("dr_grpo", aggregation="token-mean"), policy)
    numbers = update_policy(made, pair, 2, 0, initial_state(made.algorithm)).metrics
    policy_lab.close(made)
    module = load_policy(policy, Numerics())
    loss, count = torch.zeros(()), 0
    for one, advantage in zip(pair, (0.5, -0.5), strict=True):
        logps_N, _ = module(collate([(document(one.prompt_ids, one.ids),)], Numerics(), 0), temperature=policy_lab.TEMPERATURE)
        loss = loss - advantage * logps_N[torch.tensor(one.sampled)].sum()
        count += sum(one.sampled)
    (loss / count).backward()
    norm = torch.cat([parameter.grad.flatten() for parameter in module.parameters() if parameter.grad is not None]).norm()
    assert numbers["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)


def test_generalized_advantages_go_from_turn_to_turn_as_if_nothing_were_between(policy, answers):
    """One conversation of 2 and 1 sampled tokens around two others, values 1, 2, 4, reward 10, γ = 0.5, λ = 0.5:
    δ = -1 + 0.5·2 = 0, -2 + 0.5·4 = 0, 10 - 4 = 6; A = 6/16, 6/4, 6 (verl, `compute_gae_advantage_return`, skips masked tokens)."""
    one = replace(answers[0], ids=[5, 6, 7, 8, 9], logprobs=[-1.0] * 5, sampled=[True, True, False, False, True], reward=10.0)
    made = policy_lab.learner(policy_lab.algorithm("ppo", gamma=0.5, gae_lambda=0.5, kl=None), policy)
    ((seen,),) = micro_batches(made, [one], [[[0]]], old_logprobs=True)
    values_N = torch.tensor([1.0, 2.0, 4.0])
    seen = replace(seen, values_N=values_N)
    state = initial_state(made.algorithm)
    (((found,),), _) = compute_advantages(made, [one], [[seen]], torch.tensor([[10.0]]), state, state, None)
    assert found.returns_N is not None and (found.returns_N - values_N).tolist() == [0.375, 1.5, 6.0]  # before whitening
    policy_lab.close(made)
