"""The optimizer by what it does to weights: what decays, what is clipped, and at which learning rate."""

import math
from dataclasses import replace

import models
import policy_lab
import pytest
import torch
from effects_lab import DOCUMENTS, decay, trainer_of, weights_of
from sweeps import nightly_unless
from torch import nn
from transformers import TrainingArguments, get_scheduler

from pedigree.configs.language.execution import Numerics
from pedigree.configs.methods.optimizer import Optimizer
from pedigree.data.chat.chat import Chat
from pedigree.stages.core.batches import collate
from pedigree.stages.job.failures import StageError
from pedigree.stages.rlvr import run as rlvr
from pedigree.stages.training.models import load_policy
from pedigree.stages.training.policy_update import Learner, TrainingSample, initial_state, update_policy
from pedigree.stages.training.trainer import Trainer, learning_rate, parameter_groups

STAGES = [0, 1, 2, 3]
DECAY = {"weight_decay": 0.1, "learning_rate": 0.01}


def test_what_has_fewer_than_two_dimensions_does_not_decay():
    parts = nn.ModuleList([nn.Linear(3, 2), nn.LayerNorm(2), nn.Embedding(4, 2)])
    groups = parameter_groups(parts.parameters(), Optimizer(**DECAY))
    dimensions = {group["weight_decay"]: [parameter.ndim for parameter in group["params"]] for group in groups}
    assert dimensions == {0.1: [2, 2], 0.0: [1, 1, 1]}
    (everything,) = parameter_groups(parts.parameters(), Optimizer(**DECAY, decayed="all"))
    assert everything["weight_decay"] == 0.1 and len(everything["params"]) == 5
    (undecayed,) = parameter_groups(parts.parameters(), Optimizer(learning_rate=0.01))
    assert undecayed["weight_decay"] == 0.0 and len(undecayed["params"]) == 5


PEERS = {"constant": "constant_with_warmup", "linear": "linear", "cosine": "cosine"}
"""Our schedules → those of transformers, whose schedules also train in open-instruct and TRL."""


@pytest.mark.parametrize("schedule", PEERS)
@pytest.mark.parametrize(("warmup", "total"), [({}, 7), ({"warmup_steps": 0}, 1), ({"warmup_steps": 1}, 7), ({"warmup_steps": 4}, 9),
    ({"warmup_steps": 8}, 3), ({"warmup_ratio": 0.1}, 25), ({"warmup_ratio": 0.03}, 3)])  # fmt: skip
def test_every_step_has_the_learning_rate_of_transformers(schedule, warmup, total):
    optimizer = Optimizer(learning_rate=3e-4, schedule=schedule, **warmup)
    peer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=3e-4)
    ratio, steps = warmup.get("warmup_ratio", 0.0), warmup.get("warmup_steps", 0)
    counted = TrainingArguments(warmup_steps=ratio or steps).get_warmup_steps(total)
    scheduler = get_scheduler(PEERS[schedule], peer, num_warmup_steps=counted, num_training_steps=total)
    for step in range(total):
        assert learning_rate(step, total, optimizer) == scheduler.get_last_lr()[0], step
        peer.step()
        scheduler.step()


def test_a_warmup_that_trains_nothing_is_refused(policy):
    module = load_policy(policy, Numerics(threads=1))
    with pytest.raises(StageError, match="in warm-up, with learning rate 0: plan more updates, or set warmup_steps: 0"):
        Trainer(
            module,
            optimizer=Optimizer(learning_rate=0.1, warmup_ratio=0.1), total_steps=1, dtype="fp32", numerics=Numerics(threads=1), seed=0,
        )  # fmt: skip


def test_a_warmup_is_written_once():
    with pytest.raises(ValueError, match="both set: remove one"):
        Optimizer(learning_rate=1.0, warmup_ratio=0.1, warmup_steps=4)


def take_step(trainer: Trainer, scale: float = 1.0) -> float:
    trainer.backward(-scale * trainer.module(collate(DOCUMENTS, trainer.numerics, 0))[0].sum())
    return float(trainer.step().grad_norm)


def gradient_seen(trainer: Trainer) -> float:
    """L2 norm of the gradient that AdamW is given in a step."""
    adamw = getattr(trainer.engine.optimizer, "optimizer", trainer.engine.optimizer)
    found: list[float] = []

    def look(optimizer: torch.optim.Optimizer, *_: object) -> None:
        gradients = [p.grad.flatten() for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        found.append(float(torch.cat(gradients).norm()))

    adamw.register_step_pre_hook(look)
    take_step(trainer)
    return math.hypot(*found)  # ZeRO steps group by group


DECAYS = [(3, False, "matrices"), (2, True, "matrices"), (1, False, "all")]


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "lora", "decayed"), nightly_unless(DECAYS[:1], DECAYS))
def test_norms_do_not_decay_and_matrices_do(policy, stage, lora, decayed):
    """A step with zero gradient at learning rate 0.5 and decay 0.1 leaves 0.95 of what decays. Adapters are matrices. ZeRO-3 has replaced
    weights by their parts when the optimizer is made."""
    vectors = [] if lora else [1.0 if decayed == "matrices" else 0.95]
    assert decay(policy, lora, decayed, zero_stage=stage) == {"vectors": vectors, "matrices": [0.95]}


@pytest.mark.slow
@pytest.mark.parametrize("zero_stage", nightly_unless([0, 3], STAGES))
def test_gradients_are_clipped_to_the_norm_or_not_at_all(policy, zero_stage):
    seen = {}
    for bound in (0.5, None):
        trainer = trainer_of(policy, {"zero_stage": zero_stage}, max_grad_norm=bound, **DECAY)
        seen[bound] = gradient_seen(trainer)
        norm = take_step(trainer)
        trainer.close()
        assert norm > 5  # before clipping, in either case
    assert seen[0.5] == pytest.approx(0.5, rel=1e-4) and seen[None] > 5


def test_a_bound_of_zero_is_refused_with_what_turns_clipping_off():
    with pytest.raises(ValueError, match=r"must be greater than 0, not 0(\.0)?, which would zero every gradient: write null"):
        Optimizer(learning_rate=0.1, max_grad_norm=0)


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), nightly_unless([(0, 0), (3, 3), (1, 2)], [(0, 0), (1, 1), (2, 2), (3, 3), (1, 2)]))
def test_a_checkpoint_goes_on_with_what_decays_and_what_does_not(tmp_path, policy, before, after):
    """Two groups of parameters, of which one does not decay: in the next step each is where it was."""
    first = trainer_of(policy, {"zero_stage": before}, **DECAY)
    take_step(first)
    (tmp_path / "state").mkdir()
    first.save_state(tmp_path / "state")
    take_step(first)
    expected = weights_of(first)
    first.close()
    second = trainer_of(policy, {"zero_stage": after}, **DECAY)
    second.load_state(tmp_path / "state", resharded=before != after)
    assert sorted(group["weight_decay"] for group in second.engine.optimizer.param_groups) == [0.0, 0.1]
    take_step(second)
    found = weights_of(second)
    second.close()
    assert found.keys() == expected.keys() and any(weight.ndim < 2 for weight in found.values())
    for name, weight in found.items():
        if before == after:
            assert torch.equal(weight, expected[name]), name
        else:
            torch.testing.assert_close(weight, expected[name], atol=1e-6, rtol=1e-5)


def learner_of(tmp_path, policy, algorithm) -> tuple[Learner, list[TrainingSample]]:
    config = policy_lab.config(algorithm, optimizer={"learning_rate": 1e-6})
    made = rlvr.make_learner(config, {"policy": {"p": policy}}, Chat(policy.payload), models.a_job(tmp_path, Numerics(threads=1)))
    return made, policy_lab.made_answers(made.trainer.module)


def rates(made: Learner, by_step: list[list[TrainingSample]], name: str = "learning_rate") -> list[float | None]:
    """The share of the peak learning rate of the last update of each step, None where there was none."""
    found = []
    for step, answers in enumerate(by_step):
        rate = update_policy(made, answers, policy_lab.GROUP, step, initial_state(made.algorithm)).metrics.get(name)
        found.append(rate and rate / 1e-6)
    policy_lab.close(made)
    return found


@pytest.mark.slow
def test_a_step_without_a_signal_moves_the_schedule(tmp_path, policy):
    """Linear from 1 to 0 over four steps, whatever becomes of the second and the third."""
    made, answers = learner_of(tmp_path, policy, {"type": "grpo", "kl": None})
    solved = [replace(answer, reward=1.0) for answer in answers]
    assert rates(made, [answers, solved, solved, answers]) == pytest.approx([1.0, None, None, 0.25])


@pytest.mark.slow
def test_a_step_with_fewer_mini_batches_moves_the_schedule_as_planned(tmp_path, policy):
    """Two updates a step are planned, eight in all: the last of steps 1 and 3 are the second and the sixth. Step 2 has one prompt with
    a signal, so a single update, the third."""
    made, answers = learner_of(tmp_path, policy, {"type": "grpo", "kl": None, "updates_per_rollout": 2})
    one = [answer if answer.prompt == "p1" else replace(answer, reward=1.0) for answer in answers]
    assert rates(made, [answers, one, answers]) == pytest.approx([1 - 1 / 8, 1 - 2 / 8, 1 - 5 / 8])


@pytest.mark.slow
def test_the_value_model_follows_its_own_plan(tmp_path, policy):
    """It is trained from the first step on, and the policy from the second of four on: each plans its own number of updates."""
    critic = {"optimizer": {"learning_rate": 1e-6}, "warmup_steps": 1}
    plan = {"type": "ppo", "updates_per_rollout": 2, "inner_epochs": 1, "critic": critic}
    for name, expected in (("value_learning_rate", [1 - 1 / 8, 1 - 2 / 8, 1 - 5 / 8]), ("learning_rate", [None, 1.0, 1 - 3 / 6])):
        made, answers = learner_of(tmp_path, policy, plan)
        one = [answer if answer.prompt == "p1" else replace(answer, reward=math.nan) for answer in answers]
        found = rates(made, [answers, one, answers], name)
        assert [rate is None for rate in found] == [rate is None for rate in expected]
        assert [rate for rate in found if rate] == pytest.approx([rate for rate in expected if rate])
