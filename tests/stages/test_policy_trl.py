"""An independent implementation gets the same policy-gradient losses and gradients from the same tokens, advantages and old log-probs."""

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import policy_lab
import pytest
import torch
from datasets import Dataset

from pedigree.configs.language.execution import Numerics
from pedigree.configs.methods.policy_gradient import AdaptiveEntropy
from pedigree.data.chat.chat import Chat
from pedigree.stages.core.batches import collate, document
from pedigree.stages.core.policy_losses import adapted_entropy, token_weights
from pedigree.stages.training.models import load_policy
from pedigree.stages.training.policy_update import (
    RolloutMicroBatch,
    TrainingSample,
    accumulate_policy_gradient,
    initial_state,
    update_policy,
    weigh_by_entropy,
)
from pedigree.stages.training.router_loss import RouterLoss

pytestmark = pytest.mark.slow
PROMPTS, ANSWERS = [[5, 6, 7], [8, 9, 10, 11, 12]], [[20, 21, 22, 23, 24, 25], [30], [40, 41, 42], [50, 51, 52, 53]]
"""Two prompts, two answers to each, of unequal lengths."""
IN_ARGS = ("delta", "use_bias_correction_kl", "entropy_target")
"""Settings that TRL reads from its config."""
ADVANTAGES = [1.3, -0.4, -1.1, 0.7]


def distances(seed: int, size: float) -> list[list[float]]:
    """What the old policy's or the reference's log-probs differ by from the policy's, per token."""
    draw = random.Random(seed)
    return [[size * draw.gauss(0, 1) for _ in answer] for answer in ANSWERS]


@pytest.fixture(scope="module")
def ours(policy):
    """The trainer that all cases share: (loss, gradient) of one pass with its weights left alone."""
    made = policy_lab.learner(policy_lab.algorithm("dapo"), policy)
    documents = [document(PROMPTS[i // 2], answer) for i, answer in enumerate(ANSWERS)]
    batch = collate([(documents[0], documents[1]), (documents[2], documents[3])], made.numerics, 0)
    with torch.no_grad():
        logps_N, entropy_N = made.trainer.module(batch, temperature=policy_lab.TEMPERATURE, entropy=True)

    def loss(fields: dict[str, Any], old: list[list[float]], reference: list[list[float]]) -> tuple[float, torch.Tensor]:
        algorithm = policy_lab.algorithm(**fields)
        lengths = torch.tensor([len(answer) for answer in ANSWERS])
        one = RolloutMicroBatch(
            batch=batch,
            weight=1.0,
            mini_batch_tokens=int(lengths.sum()),
            max_length=int(lengths.max()),
            sample_D=torch.arange(4),
            token_weights_N=token_weights(algorithm.aggregation, lengths, 2, policy_lab.LONGEST)[batch.documents_N],
            sampler_logps_N=logps_N,
            old_logps_N=logps_N + torch.tensor([value for row in old for value in row]),
            reference_logps_N=logps_N + torch.tensor([value for row in reference for value in row]),
            advantages_N=torch.tensor(ADVANTAGES)[batch.documents_N],
            entropy_N=entropy_N,
        )
        parameters = list(made.trainer.module.module.parameters())
        gradients: list[torch.Tensor] = []

        def grab(value: torch.Tensor) -> None:
            gradients.extend(torch.autograd.grad(value, parameters))

        trainer = Watched(made.trainer, grab)
        watched = replace(made, algorithm=algorithm, trainer=trainer, router_loss=RouterLoss(trainer, None))
        (one,) = weigh_by_entropy(watched, [one], algorithm.entropy.coefficient if algorithm.entropy else 0.0)
        _, sums = accumulate_policy_gradient(watched, one, algorithm.kl.coefficient if algorithm.kl else None)
        return sums["loss"].item(), torch.cat([gradient.flatten() for gradient in gradients])

    yield loss
    policy_lab.close(made)


class Watched:
    """A trainer whose loss is differentiated here instead of adding to its gradient."""

    def __init__(self, trainer, backward):
        self.module, self.backward, self.gathered, self.device = trainer.module, backward, trainer.gathered, trainer.device


@pytest.fixture(scope="module")
def theirs(policy, tmp_path_factory):
    """TRL's trainers on a copy of the policy: (loss, gradient) for the same inputs."""
    from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

    common: dict[str, Any] = {
        "output_dir": str(tmp_path_factory.mktemp("trl")),
        "per_device_train_batch_size": 4,
        "num_generations": 2,
        "max_completion_length": policy_lab.LONGEST,
        "temperature": policy_lab.TEMPERATURE,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": "none",
        "beta": 0.1,
    }
    rest: dict[str, Any] = {
        "reward_funcs": lambda completions, **_: [0.0] * len(completions),
        "train_dataset": Dataset.from_list([{"prompt": "x"}] * 4),
        "processing_class": Chat(policy.payload).tokenizer,
    }
    model = load_policy(policy, Numerics(attention="sdpa")).model
    made = {
        "grpo": GRPOTrainer(model=model, args=GRPOConfig(**common), **rest),
        "rloo": RLOOTrainer(model=model, args=RLOOConfig(**common), **rest),
    }
    inputs = padded()
    with torch.no_grad():
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        logps_BT = made["grpo"]._get_per_token_logps_and_entropies(model.eval(), ids, mask, inputs["completion_ids"].shape[1])[0]

    def loss(
        settings: dict[str, Any],
        old: list[list[float]],
        reference: list[list[float]],
        advantages: list[float] = ADVANTAGES,
        training: bool = False,
        masked: Sequence[int] = (),
    ) -> tuple[float, torch.Tensor]:
        trainer = made["rloo" if settings.pop("rloo", False) else "grpo"]
        for name, value in settings.items():
            setattr(trainer.args if name in IN_ARGS or name.startswith("entropy_coef_") else trainer, name, value)
        model.train(training)
        old_BT, reference_BT = (logps_BT + table(rows) for rows in (old, reference))
        mask = inputs["completion_mask"].clone()
        mask[list(masked)] = 0
        given = {
            **inputs,
            "completion_mask": mask,
            "advantages": torch.tensor(advantages),
            "old_per_token_logps": old_BT,
            "old_logps": (old_BT * inputs["completion_mask"]).sum(1),
            "ref_per_token_logps": reference_BT,
            "num_items_in_batch": mask.sum(),
        }
        value = trainer._compute_loss(model, given)
        return value.item(), torch.cat([gradient.flatten() for gradient in torch.autograd.grad(value, list(model.parameters()))])

    return loss


def table(rows: list[list[float]]) -> torch.Tensor:
    width = max(len(answer) for answer in ANSWERS)
    return torch.tensor([row + [0.0] * (width - len(row)) for row in rows])


def padded() -> dict[str, torch.Tensor]:
    """Prompts padded on the left, answers on the right."""
    prompts = [PROMPTS[i // 2] for i in range(4)]
    width = max(len(prompt) for prompt in prompts)
    return {
        "prompt_ids": torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts]),
        "prompt_mask": torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]),
        "completion_ids": table(ANSWERS).long(),
        "completion_mask": table([[1.0] * len(answer) for answer in ANSWERS]).long(),
    }


PLAIN: dict[str, Any] = {"beta": 0.0, "epsilon_low": 0.2, "epsilon_high": 0.2, "delta": None, "importance_sampling_level": "token"}
PLAIN |= {"top_entropy_quantile": 1.0, "entropy_coef": 0.0, "_entropy_bonus_enabled": False}
BONUS = {"entropy_coef": 0.3, "_entropy_bonus_enabled": True}
KL = {"beta": 0.1, "use_bias_correction_kl": False}
CASES = {
    "grpo": ({"type": "grpo", "kl": None}, {**PLAIN, "loss_type": "grpo"}),
    "grpo, k3 in the loss": ({"type": "grpo", "kl": {"coefficient": 0.1}}, {**PLAIN, **KL, "loss_type": "grpo"}),
    "grpo, unbiased k3": (
        {"type": "grpo", "kl": {"coefficient": 0.1, "unbiased": True}},
        {**PLAIN, **KL, "use_bias_correction_kl": True, "loss_type": "grpo"},
    ),
    "dual clip": ({"type": "grpo", "kl": None, "dual_clip": 1.3}, {**PLAIN, "delta": 1.3, "loss_type": "grpo"}),
    "dr_grpo": ({"type": "dr_grpo"}, {**PLAIN, "loss_type": "dr_grpo"}),
    "dapo": ({"type": "dapo"}, {**PLAIN, "epsilon_high": 0.28, "loss_type": "dapo"}),
    "bnpo": ({"type": "dapo", "clip_high": 0.2}, {**PLAIN, "loss_type": "bnpo"}),
    "gspo": (
        {"type": "gspo", "clip_low": 0.03, "clip_high": 0.04},
        {**PLAIN, "epsilon_low": 0.03, "epsilon_high": 0.04, "loss_type": "grpo", "importance_sampling_level": "sequence"},
    ),
    "entropy bonus": ({"type": "grpo", "kl": None, "entropy": {"coefficient": 0.3}}, {**PLAIN, **BONUS, "loss_type": "grpo"}),
    "top tokens": ({"type": "dapo", "top_entropy": 0.4}, {**PLAIN, "top_entropy_quantile": 0.4, "epsilon_high": 0.28, "loss_type": "dapo"}),
    "top tokens, k3, entropy bonus": (
        {"type": "grpo", "kl": {"coefficient": 0.1}, "top_entropy": 0.7, "entropy": {"coefficient": 0.3}},
        {**PLAIN, **KL, **BONUS, "top_entropy_quantile": 0.7, "loss_type": "grpo"},
    ),
    "gspo, top tokens": (
        {"type": "gspo", "clip_low": 0.03, "clip_high": 0.04, "top_entropy": 0.4},
        {**PLAIN, "epsilon_low": 0.03, "epsilon_high": 0.04, "top_entropy_quantile": 0.4, "loss_type": "grpo"}
        | {"importance_sampling_level": "sequence"},
    ),
    "cispo": ({"type": "cispo", "clip_max": 1.2}, {**PLAIN, "epsilon_high": 1.2, "loss_type": "cispo"}),
    "rloo": ({"type": "rloo", "kl": None}, {"rloo": True, "epsilon_low": 0.2, "epsilon_high": 0.2}),
}


@pytest.mark.parametrize("size", [0.0, 0.3])
@pytest.mark.parametrize(("fields", "settings"), CASES.values(), ids=CASES.keys())
def test_losses_and_gradients_are_trls(ours, theirs, fields, settings, size):
    """With old log-probs that are the policy's, and with ratios on both sides of every bound."""
    old, reference = distances(1, size), distances(2, 0.5)
    loss, gradient = ours(fields, old, reference)
    expected, expected_gradient = theirs(dict(settings), old, reference)
    assert loss == pytest.approx(expected, abs=1e-5)
    assert torch.allclose(gradient, expected_gradient, atol=1e-5) and expected_gradient.abs().max() > 1e-3


@pytest.mark.parametrize("above", [0.5, -0.5], ids=["low entropy", "high entropy"])
def test_an_adaptive_bonus_moves_as_trls(theirs, above):
    """Three steps of the same entropy on either side of the target, with a bound in reach; the first step has no bonus."""
    still, grpo = distances(1, 0.0), {**PLAIN, "loss_type": "grpo"}
    loss, _ = theirs(dict(grpo), still, still)
    entropy = (loss - theirs({**grpo, **BONUS}, still, still)[0]) / 0.3
    adaptive = AdaptiveEntropy(target=entropy + above, step=0.1, low=0.15, high=0.45)
    bounds = {"entropy_target": adaptive.target, "entropy_coef_delta": 0.1, "entropy_coef_min": 0.15, "entropy_coef_max": 0.45}
    start = {**bounds, "use_adaptive_entropy": True, "_last_world_entropy": math.inf, "current_gradient_accumulation_steps": 1}
    coefficient, applied, given = 0.3, 0.0, {**grpo, **BONUS, **start}
    for _ in range(3):
        found, _ = theirs(given, still, still, training=True)
        assert found == pytest.approx(loss - applied * entropy, abs=1e-5)
        coefficient, applied = adapted_entropy(coefficient, entropy, adaptive)
        given = {}
    assert coefficient == (0.45 if above > 0 else 0.15)
    theirs({"use_adaptive_entropy": False}, still, still)


def test_the_cases_differ(ours):
    """Every bound, ratio and aggregation matters to these inputs, or agreement would say little."""
    found = [ours(fields, distances(1, 0.3), distances(2, 0.5))[0] for fields, _ in CASES.values()]
    assert len({round(value, 5) for value in found}) == len(found)


@pytest.mark.parametrize("name", ["grpo, k3 in the loss", "dr_grpo", "bnpo", "gspo"])
def test_a_group_of_equal_rewards_keeps_its_kl_and_its_place_in_the_divisor(policy, theirs, name):
    """TRL computes all four answers; rewards 1, 0 and 1, 1 give the second group advantages of 0."""
    fields, settings = CASES[name]
    # mean ½, standard deviation √½ with G - 1; Dr.GRPO does not divide by it
    size = 0.5 if name == "dr_grpo" else 0.5 / (0.5**0.5 + 1e-4)
    made = policy_lab.learner(policy_lab.algorithm(**{**fields, "updates_per_rollout": 1}), policy)
    other = load_policy(policy, made.numerics)
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=draw)

    def logps(module: Any) -> list[list[float]]:
        found = []
        for i, answer in enumerate(ANSWERS):
            batch = collate([(document(PROMPTS[i // 2], answer),)], made.numerics, 0)
            with torch.no_grad():
                found.append(module(batch, temperature=policy_lab.TEMPERATURE)[0].tolist())
        return found

    own = logps(made.trainer.module)
    reference = [[b - a for a, b in zip(*rows, strict=True)] for rows in zip(own, logps(other), strict=True)]
    rewards = [1.0, 0.0, 1.0, 1.0]
    samples = [TrainingSample(f"p{i // 2}", PROMPTS[i // 2], ANSWERS[i], own[i], rewards[i]) for i in range(4)]
    expected, gradient = theirs(dict(settings), distances(1, 0.0), reference, [size, -size, 0.0, 0.0])
    done = update_policy(replace(made, reference=other if made.algorithm.kl else None), samples, 2, 0, initial_state(made.algorithm))
    assert done.metrics["loss"] == pytest.approx(expected, abs=1e-5)
    assert done.metrics["grad_norm"] == pytest.approx(gradient.norm().item(), rel=1e-4)
    assert done.metrics["kept_answers"] == (4 if made.algorithm.kl else 2)
    policy_lab.close(made)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "bnpo"])
def test_a_masked_answer_leaves_the_loss_but_not_its_groups_advantages(policy, theirs, name):
    """A mean over answers counts it, a mean over tokens does not."""
    fields, settings = CASES[name]
    size = 0.5 if name == "dr_grpo" else 0.5 / (0.5**0.5 + 1e-4)
    made = policy_lab.learner(policy_lab.algorithm(**fields), policy)
    own = [[-1.0] * len(answer) for answer in ANSWERS]
    samples = [TrainingSample(f"p{i // 2}", PROMPTS[i // 2], ANSWERS[i], own[i], float(i % 2 == 0), masked=i == 3) for i in range(4)]
    still = distances(1, 0.0)
    expected, gradient = theirs(dict(settings), still, still, [size, -size, size, -size], masked=[3])
    done = update_policy(made, samples, 2, 0, initial_state(made.algorithm))
    assert done.metrics["loss"] == pytest.approx(expected, abs=1e-5) and done.metrics["kept_answers"] == 3
    assert done.metrics["grad_norm"] == pytest.approx(gradient.norm().item(), rel=1e-4)
    policy_lab.close(made)
