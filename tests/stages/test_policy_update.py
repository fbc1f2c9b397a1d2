"""The update of every policy-gradient algorithm on made rollouts, with the real engine and without a sampler."""

import json
import math
from contextlib import nullcontext
from dataclasses import replace

import models
import policy_lab
import pytest
import torch
from sweeps import nightly_unless

from pedigree.configs.language.execution import Numerics
from pedigree.data.chat.chat import Chat
from pedigree.stages.core.batches import collate, document
from pedigree.stages.job.failures import NotFinite, StageError
from pedigree.stages.rlvr.run import make_learner
from pedigree.stages.training.models import load_policy, load_reward_model
from pedigree.stages.training.policy_update import (
    accumulate_policy_gradient,
    check_logprob_gap,
    compute_advantages,
    initial_state,
    micro_batches,
    update_policy,
    weigh_by_entropy,
)
from pedigree.stages.training.rollout_batches import mini_batches, prompt_sharing_units

pytestmark = pytest.mark.slow
TYPES = ["grpo", "dr_grpo", "dapo", "gspo", "cispo", "dcpo", "rloo", "remax", "reinforce_pp", "reinforce_pp_baseline", "ppo"]
SEVERAL = {"updates_per_rollout": 2, "inner_epochs": 2}
CORRECTED = {"correction": {"level": "sequence", "mode": "mask", "low": 0.5}}
IN_REWARD = {"kl": {"estimator": "k1", "where": "reward", "coefficient": 0.1, "adaptive": {}}}


@pytest.fixture(scope="module")
def answers(policy):
    return policy_lab.made_answers(load_policy(policy, Numerics()))


def likelihoods(module, answers):
    """log π of each answer."""
    found = []
    for answer in answers:
        with torch.no_grad():
            batch = collate([(document(answer.prompt_ids, answer.ids),)], Numerics(), 0)
            found.append(module(batch, temperature=policy_lab.TEMPERATURE)[0].sum().item())
    return found


def preference_for_good(made, answers):
    """Mean log π of rewarded answers over that of the others, in groups that have both."""
    values = likelihoods(made.trainer.module, answers[:12])
    good = [value for value, answer in zip(values, answers, strict=False) if answer.reward == 1]
    bad = [value for value, answer in zip(values, answers, strict=False) if answer.reward == 0]
    return sum(good) / len(good) - sum(bad) / len(bad)


@pytest.mark.parametrize("type", TYPES)
def test_every_algorithm_trains_without_surprises(policy, answers, type):
    """At the first update the policy is the one that answered and the reference; later rewarded answers have become likelier."""
    made = policy_lab.learner(policy_lab.algorithm(type, **({} if type == "remax" else SEVERAL)), policy)
    before = preference_for_good(made, answers)
    done = policy_lab.steps(made, answers, 5)
    first, last = done[0].metrics, done[-1].metrics
    assert all(math.isfinite(value) for one in done for value in one.metrics.values())
    assert first["logprob_gap"] < 1e-5  # the made answers carry the policy's own log-probs
    assert all(value == 0 for name, value in first.items() if name.startswith("kl_k"))
    assert [one.updates for one in done] == [1 if type == "remax" else 4] * 5
    assert preference_for_good(made, answers) > before + 0.1
    assert last["grad_norm"] > 0 and last["entropy"] == pytest.approx(first["entropy"], rel=0.3)
    # in the last group all rewards are equal: it is computed where a KL, whitening or advantages per token give it a gradient
    everything = type in ("grpo", "rloo", "remax", "reinforce_pp", "reinforce_pp_baseline", "ppo")
    assert [first["kept_groups"], first["kept_answers"]] == ([4, 16] if everything else [3, 12])
    assert first["informative_groups"] == (4 if type in ("remax", "reinforce_pp", "ppo") else 3)
    policy_lab.close(made)


@pytest.mark.parametrize("type", ["grpo", "gspo", "rloo"])
def test_the_first_update_has_ratio_one_of_a_token_and_of_an_answer(policy, answers, type):
    """Each answer counts alike, and advantages sum to 0."""
    made = policy_lab.learner(policy_lab.algorithm(type, updates_per_rollout=1), policy)
    numbers = policy_lab.steps(made, answers, 1)[0].metrics
    assert (numbers["ratio_mean"], numbers["ratio_max"], numbers["clip_low"], numbers["clip_high"]) == (1, 1, 0, 0)
    assert numbers["loss"] == pytest.approx(0, abs=1e-6)
    policy_lab.close(made)


def test_old_log_probs_come_from_the_very_passes_that_are_trained_on(policy, answers):
    """With two mini-batches the first of the two updates sees ratios of exactly one: recomputed ones, not a rounding away."""
    made = policy_lab.learner(policy_lab.algorithm("dapo", updates_per_rollout=2), policy, Numerics(threads=1, micro_batch_tokens=24))
    (batch, _) = micro_batches(made, answers, mini_batches([list(range(i, i + 4)) for i in (0, 4, 8)], 2, "0/0"), old_logprobs=True)
    assert len(batch) > 1
    for one in batch:
        _, sums = accumulate_policy_gradient(made, replace(one, advantages_N=torch.ones_like(one.sampler_logps_N)), None)
        assert sums["ratio_max"].item() == 1 and sums["ratio_mean"].item() == len(one.sampler_logps_N)
    policy_lab.close(made)


def test_the_weight_of_an_unbiased_kl_is_the_tokens_own_ratio(policy, answers):
    """Without advantages the loss is the penalty: Σ_t k3_t ρ_t / (answers · tokens), whatever ratio the objective is made of."""
    kl = {"estimator": "k3", "coefficient": 0.5, "unbiased": True}
    for type in ("gspo", "grpo"):
        made = policy_lab.learner(policy_lab.algorithm(type, kl=kl), policy)
        ((seen,),) = micro_batches(made, answers, [[[0, 1, 2, 3]]], old_logprobs=True)
        assert seen.old_logps_N is not None and seen.reference_logps_N is not None
        shift_N = torch.linspace(-0.4, 0.4, len(seen.old_logps_N))
        shifted = {"old_logps_N": seen.old_logps_N - shift_N, "reference_logps_N": seen.reference_logps_N + 0.3}
        seen = replace(seen, **shifted, advantages_N=torch.zeros_like(shift_N))
        _, sums = accumulate_policy_gradient(made, seen, 0.5)
        expected = 0.5 * (math.exp(0.3) - 1 - 0.3) * (seen.token_weights_N * shift_N.exp()).sum()
        assert sums["loss"].item() == pytest.approx(expected.item(), rel=1e-4), type
        policy_lab.close(made)


ALL_CUTS = {
    "small packs": {"micro_batch_tokens": 20},
    "padded": {"packing": False, "micro_batch_sequences": 3},
    "ZeRO 3": {"zero_stage": 3},
    "small chunks, prompts not shared": {"logprob_chunk": 5, "attention": "sdpa"},
}
CASES = [
    *({"type": type, **({} if type == "remax" else SEVERAL), **CORRECTED} for type in TYPES if type != "dapo"),
    {"type": "grpo", **SEVERAL, **IN_REWARD},
    {"type": "dapo", "kl": {"estimator": "k3", "coefficient": 0.1, "unbiased": True}, "inner_epochs": 3, "dual_clip": 3.0},
    {"type": "dapo", "aggregation": "token-sum"},
    {"type": "grpo", **SEVERAL, "top_entropy": 0.3, "entropy": {"coefficient": 0.1, "adaptive": {"target": 10.0}}},
    {"type": "grpo", "kl": {"coefficient": 0.1}, "turns": 2},
    {"type": "gspo", "updates_per_rollout": 2, "turns": 2},
    {"type": "dapo", "correction": {"level": "sequence"}, "turns": 2},
    {"type": "ppo", "kl": {"estimator": "k1", "where": "reward", "coefficient": 0.1}, "turns": 2},
]


@pytest.fixture(scope="module")
def whole(policy):
    """The numbers of each case in one pass on one rank."""
    return [policy_lab.numbers_of(policy, case, Numerics(threads=1)) for case in CASES]


def agree(found, expected):
    """Of the second step: its gradient is at weights that the first step's updates made."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=2e-3, abs=2e-4), name


@pytest.mark.parametrize("cut", nightly_unless([ALL_CUTS["small packs"]], ALL_CUTS.values()), ids=ALL_CUTS.keys())
def test_no_cut_into_micro_batches_changes_anything(policy, whole, cut):
    for case, expected in zip(CASES, whole, strict=True):
        for ours, theirs in zip(policy_lab.numbers_of(policy, case, Numerics(threads=1, **cut)), expected, strict=True):
            agree(ours, theirs)


def test_two_ranks_change_nothing(policy, whole, tmp_path):
    """Ratios of answers, exchanged penalties, whitening, two engines: all that more than a sum of gradients."""
    asked = [i for i, case in enumerate(CASES) if case["type"] in ("grpo", "gspo", "rloo", "reinforce_pp_baseline", "ppo")]
    measured = models.measuring(policy_lab.__file__, policy, tmp_path, {str(i): (CASES[i], {"threads": 1, "world_size": 2}) for i in asked})
    for i in asked:
        for ours, theirs in zip(measured(str(i)), whole[i], strict=True):
            agree(ours, theirs)


REMEMBERING = {
    "a value model, an adaptive coefficient": {"type": "ppo", "kl": {"where": "reward", "coefficient": 0.1, "adaptive": {"target": 0.01}}},
    "visits to prompts, an adaptive bonus": {"type": "dcpo", **SEVERAL, "entropy": {"coefficient": 0.1, "adaptive": {"target": 10.0}}},
}


@pytest.mark.parametrize("fields", REMEMBERING.values(), ids=REMEMBERING.keys())
def test_what_goes_on_from_a_checkpoint_ends_in_the_same_bits(policy, tmp_path, fields):
    numerics = Numerics(threads=1)
    rows, weights = policy_lab.interrupted(policy, fields, tmp_path / "whole", 0, 3, (numerics, numerics))
    again, resumed = policy_lab.interrupted(policy, fields, tmp_path / "cut", 2, 3, (numerics, numerics))
    assert again == rows[2:] and all(torch.equal(a, b) for a, b in zip(weights, resumed, strict=True))
    # Adam's moments of every model have come along too: under another ZeRO stage the third step is the same but for rounding
    other, _ = policy_lab.interrupted(policy, fields, tmp_path / "other", 2, 3, (numerics, Numerics(threads=1, zero_stage=2)))
    agree(other[0], rows[2])


def test_mini_batches_hold_every_group_once_in_an_order_that_the_step_decides():
    groups = [[i] for i in range(7)]
    parts = mini_batches(groups, 3, "0/0")
    assert sorted(i for part in parts for (i,) in part) == list(range(7)) and [len(part) for part in parts] == [2, 2, 3]
    assert parts == mini_batches(groups, 3, "0/0") != mini_batches(groups, 3, "0/1")
    assert len(mini_batches(groups[:2], 3, "0/0")) == 2 and mini_batches(groups, 1, "x") == [groups]


def test_dcpo_remembers_and_uses_a_group_without_differences(policy, answers):
    made = policy_lab.learner(policy_lab.algorithm("dcpo"), policy)
    first = update_policy(made, answers, 4, 0, initial_state(made.algorithm))
    assert first.state["prompts"]["p1"] == [1, 4, 0.5, 1.0]
    state = json.loads(json.dumps(first.state))  # by way of a checkpoint
    equal = [replace(answer, reward=1.0) for answer in answers]
    second = update_policy(made, equal, 4, 1, state)
    assert second.metrics["kept_groups"] == 3 and second.state["prompts"]["p1"][:3] == [2, 8, 0.75]
    fresh = update_policy(made, equal, 4, 1, initial_state(made.algorithm))
    assert fresh.metrics["kept_groups"] == 0 and fresh.updates == 0 and "grad_norm" not in fresh.metrics
    policy_lab.close(made)


def test_a_bonus_trains_where_rewards_do_not_differ_and_raises_the_entropy(policy, answers):
    """Without it the step has no update; an adaptive one has no effect before the first measurement."""
    equal = [replace(answer, reward=1.0) for answer in answers]
    made = policy_lab.learner(policy_lab.algorithm("dapo", entropy={"coefficient": 0.5}), policy)
    first, second = policy_lab.steps(made, equal, 2)
    assert first.updates == 1 and first.metrics["kept_answers"] == 16 and first.metrics["entropy_coefficient"] == 0.5
    assert first.metrics["loss"] == pytest.approx(-0.5 * first.metrics["entropy"], rel=1e-5)
    assert second.metrics["entropy"] > first.metrics["entropy"]
    policy_lab.close(made)
    low = {"coefficient": 0.5, "adaptive": {"target": 10.0, "step": 0.25}}
    made = policy_lab.learner(policy_lab.algorithm("dapo", entropy=low), policy)
    assert [one.updates for one in policy_lab.steps(made, equal, 2)] == [0, 1]
    policy_lab.close(made)


def test_only_the_top_tokens_have_advantages_and_the_bonus(policy, answers):
    """The threshold is that of all micro-batches of the mini-batch."""
    numerics = Numerics(threads=1, micro_batch_tokens=24)
    made = policy_lab.learner(policy_lab.algorithm("dapo", top_entropy=0.25), policy, numerics)
    (batch,) = micro_batches(made, answers, [[[*range(4)], [*range(4, 8)]]], old_logprobs=True)
    entropies_N = torch.cat([one.entropy_N for one in batch])
    found = weigh_by_entropy(made, [replace(one, advantages_N=torch.ones_like(one.sampler_logps_N)) for one in batch], 2.0)
    kept_N = torch.cat([one.advantages_N for one in found])
    number, quarter, least = kept_N.sum(), 1 + (len(entropies_N) - 1) // 4, entropies_N[kept_N == 1].min()
    # first tokens of answers to one prompt have the same entropy, which may be the threshold
    assert len(batch) > 1 and (entropies_N > least).sum() < quarter <= number
    assert least > entropies_N[kept_N == 0].max()
    assert torch.allclose(torch.cat([one.bonus_N for one in found]), 2 / number * kept_N)
    policy_lab.close(made)


def test_a_critic_warms_up_while_the_policy_rests(policy, answers):
    critic = {"optimizer": {"learning_rate": 1e-2, "schedule": "constant"}, "warmup_steps": 3}
    made = policy_lab.learner(policy_lab.algorithm("ppo", critic=critic, kl=None), policy)
    before = likelihoods(made.trainer.module, answers)
    state, explained = initial_state(made.algorithm), []
    for step in range(4):
        done = update_policy(made, answers, 4, step, state)
        explained.append(done.metrics["explained_variance"])
        assert done.updates == (0 if step < 3 else 4) and ("grad_norm" in done.metrics) == (step == 3)
        assert (likelihoods(made.trainer.module, answers) == before) == (step < 3)
    assert explained[0] == 0 and explained[3] > 0.25  # values begin at 0, and have learned what these answers get
    policy_lab.close(made)


def test_the_coefficient_adapts_to_the_kl(policy, answers):
    """At the first step the KL is 0: β falls by 0.2 n / horizon; the second update uses it."""
    kl = {"estimator": "k1", "where": "reward", "coefficient": 0.1, "adaptive": {"target": 1.0, "horizon": 64}}
    made = policy_lab.learner(policy_lab.algorithm("reinforce_pp", kl=kl), policy)
    first, second = policy_lab.steps(made, answers, 2)
    assert first.metrics["kl_coefficient"] == 0.1
    assert second.metrics["kl_coefficient"] == first.state["coefficient"] == pytest.approx(0.1 * (1 - 0.2 * 16 / 64))
    policy_lab.close(made)


def shaken(policy):
    """Another policy of the same vocabulary."""
    other = load_policy(policy, Numerics())
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    return other


def test_rewards_are_what_the_kl_takes_off(policy, answers):
    """RLOO against a reference that is another model: the advantages are those of R - β Σ k1, worked out here from log-probs."""
    made = policy_lab.learner(policy_lab.algorithm("rloo"), policy)
    other = shaken(policy)
    ours, theirs = likelihoods(made.trainer.module, answers), likelihoods(other, answers)
    shaped = torch.tensor([answer.reward - 0.05 * (a - b) for answer, a, b in zip(answers, ours, theirs, strict=True)]).view(4, 4)
    advantages = (shaped - (shaped.sum(1, keepdim=True) - shaped) / 3).flatten()
    lengths = torch.tensor([float(len(answer.ids)) for answer in answers])
    done = update_policy(replace(made, reference=other), answers, 4, 0, initial_state(made.algorithm))
    assert done.metrics["advantage_size"] == pytest.approx(((advantages.abs() * lengths).sum() / lengths.sum()).item(), rel=1e-4)
    policy_lab.close(made)


def test_a_teacher_alone_distills_by_reverse_kl(policy, answers):
    """-1/N Σ_t sg(log π_T - log π) log π by autograd; equal rewards are trained on, too, and rewards do not matter."""
    made, teacher = policy_lab.learner(policy_lab.algorithm("dapo", teacher={"alone": True}), policy), shaken(policy)
    batch = collate([(document(one.prompt_ids, one.ids),) for one in answers], Numerics(), 0)
    own = load_policy(policy, Numerics())
    logps_N, _ = own(batch, temperature=policy_lab.TEMPERATURE)
    with torch.no_grad():
        gap_N = teacher(batch, temperature=policy_lab.TEMPERATURE)[0] - logps_N
    gradients = torch.autograd.grad(-(gap_N * logps_N).sum() / len(logps_N), list(own.parameters()))
    for rewards in ([answer.reward for answer in answers], [0.0] * len(answers)):
        given = [replace(answer, reward=reward) for answer, reward in zip(answers, rewards, strict=True)]
        twin = policy_lab.learner(made.algorithm, policy, teacher=teacher)
        done = update_policy(twin, given, 4, 0, initial_state(made.algorithm)).metrics
        assert done["teacher_reward"] == pytest.approx(gap_N.mean().item(), rel=1e-4) and done["informative_groups"] == 4
        assert done["loss"] == pytest.approx(-gap_N.mean().item(), rel=1e-4)
        norm = torch.cat([gradient.flatten() for gradient in gradients]).norm().item()
        assert done["grad_norm"] == pytest.approx(norm, rel=1e-3)
        policy_lab.close(twin)
    policy_lab.close(made)


def test_a_teachers_rewards_enter_returns_and_answers_advantages(policy, answers):
    """w (log π_T - log π_ref) of each token: added to what comes after it, or to the answer's advantage."""
    rewards_PG = torch.tensor([answer.reward for answer in answers]).view(4, 4)
    for type, fields in (("reinforce_pp", {"kl": None}), ("dr_grpo", {})):
        made = policy_lab.learner(policy_lab.algorithm(type, teacher={"weight": 0.5, "against": "reference"}, **fields), policy)
        ((one,),) = micro_batches(made, answers, [[list(range(p * 4, p * 4 + 4)) for p in range(4)]], old_logprobs=True)
        assert one.old_logps_N is not None
        gap_N = torch.linspace(-1, 1, len(one.old_logps_N))
        seen = replace(one, reference_logps_N=one.old_logps_N, teacher_logps_N=one.old_logps_N + gap_N)
        state = initial_state(made.algorithm)
        (((found,),), _) = compute_advantages(made, answers, [[seen]], rewards_PG, state, state, None)
        expected, start = [], 0
        for number in one.sample_D.tolist():
            answer, group = answers[number], rewards_PG[number // 4]
            taught = 0.5 * gap_N[start : (start := start + len(answer.ids))]
            if type == "reinforce_pp":
                expected += [(taught[t:].sum() + answer.reward).item() for t in range(len(taught))]
            else:
                expected += (taught + answer.reward - group.mean()).tolist()
        wanted_N = torch.tensor(expected)
        assert torch.allclose(found.advantages_N, masked_whiten(wanted_N) if type == "reinforce_pp" else wanted_N, atol=1e-4), type
        policy_lab.close(made)


def masked_whiten(values_N: torch.Tensor) -> torch.Tensor:
    """The whitening of TRL's and open-instruct's PPO: `(values - mean) * rsqrt(var + 1e-8)`, var with Bessel's correction."""
    mean, count = values_N.sum() / len(values_N), len(values_N)
    variance = ((values_N - mean) ** 2).sum() / count * (count / (count - 1))
    return (values_N - mean) * torch.rsqrt(variance + 1e-8)


def test_a_single_token_is_whitened_to_0(policy, answers):
    """Its variance would be 0/0."""
    made = policy_lab.learner(policy_lab.algorithm("reinforce_pp_baseline", kl=None), policy)
    alone = [replace(answer, ids=answer.ids[:1], logprobs=answer.logprobs[:1]) for answer in answers[:1]]
    ((one,),) = micro_batches(made, alone, [[[0]]], old_logprobs=False)
    state = initial_state(made.algorithm)
    (((found,),), _) = compute_advantages(made, alone, [[one]], torch.ones(1, 1), state, state, None)
    assert found.advantages_N is not None and found.advantages_N.tolist() == [0.0]
    policy_lab.close(made)


@pytest.mark.parametrize("type", ["reinforce_pp", "ppo"])
def test_the_advantage_of_a_token_is_made_of_what_comes_after_it(policy, answers, type):
    """One answer after the other, token by token from its end, as the papers write it; then mean 0 and variance 1 over all."""
    kl = {"estimator": "k1", "where": "reward", "coefficient": 0.5}
    made = policy_lab.learner(policy_lab.algorithm(type, gamma=0.9, kl=kl, **({"gae_lambda": 0.7} if type == "ppo" else {})), policy)
    rewards_PG = torch.tensor([answer.reward for answer in answers]).view(4, 4)
    ((one,),) = micro_batches(made, answers, [[list(range(p * 4, p * 4 + 4)) for p in range(4)]], old_logprobs=True)
    assert one.old_logps_N is not None
    gap_N, values_N = torch.linspace(-1, 1, len(one.old_logps_N)), torch.linspace(2, -1, len(one.old_logps_N))
    seen = replace(one, reference_logps_N=one.old_logps_N - gap_N, values_N=values_N if type == "ppo" else None)
    state = initial_state(made.algorithm)
    (((found,),), _) = compute_advantages(made, answers, [[seen]], rewards_PG, state, state, None)
    expected, returns, place = [], [], 0
    for index in one.sample_D.tolist():
        length, later, following, own = len(answers[index].ids), 0.0, 0.0, []
        for t in reversed(range(length)):
            reward = -0.5 * gap_N[place + t].item() + (answers[index].reward if t == length - 1 else 0.0)
            value = values_N[place + t].item() if type == "ppo" else 0.0
            later = reward + 0.9 * following - value + 0.9 * (0.7 if type == "ppo" else 1.0) * later
            following = value
            own.insert(0, later)
        returns += [a + (values_N[place + t].item() if type == "ppo" else 0.0) for t, a in enumerate(own)]
        expected += own
        place += length
    exact = torch.tensor(expected, dtype=torch.float64)
    white = masked_whiten(exact)
    assert found.advantages_N is not None and found.advantages_N.tolist() == pytest.approx(white.tolist(), abs=1e-4)
    if type == "ppo":
        assert found.returns_N is not None and found.returns_N.tolist() == pytest.approx(returns, abs=1e-4)
    policy_lab.close(made)


def test_groups_without_differences_are_values_like_any_other_where_advantages_are_whitened(policy, answers):
    """REINFORCE++-baseline: R minus its group's mean, the last group's zeros included, over all tokens to mean 0 and variance 1."""
    made = policy_lab.learner(policy_lab.algorithm("reinforce_pp_baseline", kl=None), policy)
    rewards_PG = torch.tensor([answer.reward for answer in answers]).view(4, 4)
    centred = (rewards_PG - rewards_PG.mean(1, keepdim=True)).flatten().tolist()
    assert centred[12:] == [0, 0, 0, 0]
    tokens = torch.tensor([value for value, answer in zip(centred, answers, strict=True) for _ in answer.ids], dtype=torch.float64)
    white = masked_whiten(tokens)
    done = update_policy(made, answers, 4, 0, initial_state(made.algorithm))
    assert done.metrics["advantage_size"] == pytest.approx(white.abs().mean().item(), rel=1e-5)
    assert done.metrics["loss"] == pytest.approx(0, abs=1e-6)  # whitened over the very tokens that the mean is over
    policy_lab.close(made)


def test_a_mini_batch_without_any_gradient_makes_no_update(policy, answers):
    """Four groups cut into four mini-batches, as if all were computed; that of equal rewards has none."""
    made = policy_lab.learner(policy_lab.algorithm("dapo", updates_per_rollout=4), policy)
    done = update_policy(made, answers, 4, 0, initial_state(made.algorithm))
    assert done.updates == 3 and done.metrics["informative_groups"] == 3
    assert done.metrics["trained_tokens"] == sum(len(answer.ids) for answer in answers[:12])
    policy_lab.close(made)


def test_corrections_are_measured(policy):
    """A sampler that is off by +log 2 on every token: w = ½ for each, which a lower bound of 0.6 masks."""
    answers = policy_lab.made_answers(load_policy(policy, Numerics()))
    answers = [replace(answer, logprobs=[logp + math.log(2) for logp in answer.logprobs]) for answer in answers]
    for low, mean, share in ((0.0, 0.5, 0.0), (0.6, 0.0, 1.0)):
        made = policy_lab.learner(policy_lab.algorithm("dapo", correction={"mode": "mask", "low": low}), policy)
        numbers = policy_lab.steps(made, answers, 1)[0].metrics
        assert (numbers["correction_mean"], numbers["correction_cut"]) == pytest.approx((mean, share), abs=1e-5)
        assert numbers["logprob_gap"] == pytest.approx(math.log(2), abs=1e-5) and (numbers["grad_norm"] == 0) == (share == 1)
        policy_lab.close(made)


def test_wrong_weights_in_the_sampler_stop_the_run_before_the_policy_moves(policy):
    answers = policy_lab.made_answers(load_policy(policy, Numerics()), noise=1.0)
    made = policy_lab.learner(policy_lab.algorithm("dapo"), policy, max_gap=0.01)
    before = likelihoods(made.trainer.module, answers)
    with pytest.raises(StageError, match=r"step 1 .*bound max_logprob_gap 0.01.*wrong weights"):
        policy_lab.steps(made, answers, 1)
    assert likelihoods(made.trainer.module, answers) == before
    policy_lab.close(made)


@pytest.mark.parametrize(
    ("gaps", "refuses"),
    [
        ([0.03] * 99 + [8.0], False),  # mean 0.11: one token, and no evidence of the others
        ([0.11] * 100, True),
        ([0.05] * 500 + [0.25] * 500, True),  # mean 0.15, standard error 0.003
        ([0.0] * 40 + [0.3] * 20, False),  # mean 0.1
        ([0.0] * 99 + [math.nan], True),
        ([0.0] * 99 + [math.inf], True),
    ],
)
def test_a_mean_gap_is_refused_only_where_it_is_no_chance(gaps, refuses):
    sums = {"gap": sum(gaps), "gap_squares": sum(gap**2 for gap in gaps), "tokens": len(gaps)}
    with pytest.raises(StageError, match="the log-probs of sampler and trainer differ") if refuses else nullcontext():
        check_logprob_gap(sums, 0, 0.1)


def test_a_gradient_that_is_no_number_ends_the_run(policy, answers):
    made = policy_lab.learner(policy_lab.algorithm("dapo"), policy)
    broken = [replace(answers[0], reward=math.inf), *answers[1:]]
    with pytest.raises(NotFinite, match="of step 1 is nan"):
        policy_lab.steps(made, broken, 1)
    policy_lab.close(made)


def test_answers_to_one_prompt_share_a_unit_and_every_rank_has_work():
    """A prompt of 6 and answers of 4 tokens: alone 10, two together 14, three 18, four 22."""
    documents = [document([10 * p + t for t in range(3, 9)], [g, g, g, 2]) for p in (1, 2) for g in range(4)]
    assert [len(unit) for unit in prompt_sharing_units(documents, [4, 4], 1, Numerics())] == [4, 4]
    assert [len(unit) for unit in prompt_sharing_units(documents, [4, 4], 1, Numerics(micro_batch_tokens=18))] == [3, 1, 3, 1]
    assert [len(unit) for unit in prompt_sharing_units(documents, [4, 4], 4, Numerics())] == [2, 2, 2, 2]  # one group a rank would idle two
    for numerics, ranks in ((Numerics(micro_batch_tokens=18), 1), (Numerics(), 4), (Numerics(packing=False), 2)):
        assert [doc for unit in prompt_sharing_units(documents, [4, 4], ranks, numerics) for doc in unit] == documents


def test_the_stage_builds_what_its_config_and_inputs_say(policy, answers, tmp_path):
    """PPO of adapters, with a reference of its own and a value model that begins as a reward model."""
    chat = Chat(policy.payload)
    scorer = load_reward_model(policy.payload, Numerics(), pad_token_id=chat.pad_id).model
    scorer.save_pretrained(tmp_path / "reward" / "payload")
    given = {
        "policy": {"p": policy},
        "reference": {"p": models.tiny_policy(tmp_path / "other", seed=1)},
        "teacher": {"t": models.tiny_policy(tmp_path / "teacher", seed=2)},
        "value": {"r": models.publish(tmp_path / "reward", "reward_model", "reward_model")},
    }
    rate = {"learning_rate": 1e-3}
    fields = {"steps": 5, "prompts_per_step": 4, "samples_per_prompt": 4, "sampling": {"max_tokens": 8, "temperature": 0.8}}
    ppo = {"type": "ppo", "critic": {"optimizer": rate, "warmup_steps": 2}, "inner_epochs": 3, "teacher": {"against": "reference"}}
    rest = {"max_prompt_length": 60, "dtype": "fp32", "lora": {"rank": 2}, "optimizer": rate, "max_logprob_gap": 1.0}
    config = models.config_of("rlvr", algorithm=ppo, **fields, **rest)
    made = make_learner(config, given, chat, models.a_job(tmp_path / "job", Numerics(threads=1)))
    assert made.critic is not None
    assert torch.equal(made.critic.module.module.model.score.weight, scorer.score.weight) and scorer.score.weight.any()
    assert (made.trainer.total_steps, made.critic.total_steps) == (9, 15)
    before = {name: value.detach().clone() for name, value in made.trainer.module.module.named_parameters()}
    done = update_policy(made, answers, 4, 2, initial_state(config.algorithm))
    assert made.teacher is not None and abs(done.metrics["teacher_reward"]) > 1e-3
    assert done.metrics["kl_k2"] > 1e-6 and done.updates == 3
    moved = {name for name, value in made.trainer.module.module.named_parameters() if not torch.equal(value, before[name])}
    assert moved and all("lora" in name for name in moved)
    policy_lab.close(made)
