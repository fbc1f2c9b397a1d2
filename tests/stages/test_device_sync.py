"""No device synchronisation between the first and the last micro-batch of a step: each one waits for all queued work.

A CPU has no queue, but the operations that would synchronise a GPU are detected there too: values read by the host, shapes that
depend on values, tensors made of host numbers. On a GPU torch itself reports them (`gpu`).
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import models
import policy_lab
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from pedigree.configs.language.execution import Numerics
from pedigree.stages.core.spans import Span, spans_of
from pedigree.stages.preference_train import run as preference_train
from pedigree.stages.reference_logprobs import run as reference_logprobs
from pedigree.stages.reward_model import run as reward_model
from pedigree.stages.sft import run as sft
from pedigree.stages.training import policy_update
from pedigree.stages.training.feed import Feed
from pedigree.stages.training.flex_attention import block_mask
from pedigree.stages.training.models import load_policy

STAGES = str(Path(sft.__file__).parents[1])
READS = {"_local_scalar_dense", "nonzero", "masked_select", "bincount", "equal", "_unique2", "unique_dim", "unique_consecutive"}
MAKES = {"lift_fresh", "lift"}
"""Tensors of the host's numbers: on a GPU a copy that waits."""
METHODS = {"item", "tolist", "numpy", "cpu", "__bool__", "__float__", "__int__", "__index__", "__array__", "__contains__"}
OTHERS = ("deepspeed", "transformers")
"""Libraries whose own synchronisations do not count: the innermost frame of the call stack tells."""


def culprit() -> str | None:
    """File and line of ours that synchronised, or None where another library did by itself."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(STAGES):
            return f"{name.removeprefix(STAGES)}:{frame.f_lineno}"
        if any(f"/site-packages/{other}/" in name for other in OTHERS):
            return None
        frame = frame.f_back
    return "somebody"


class Syncs:
    """Synchronising operations while it is on."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.batches = 0

    def note(self, what: str) -> None:
        where = culprit()
        if where is not None:
            self.seen.append(f"{what} at {where}")

    def on(self, what):
        """The function, with synchronisations recorded while it runs."""

        def during(*args, **kwargs):
            with _Dispatch(self), _Methods(self):
                return what(*args, **kwargs)

        return during

    def micro_batches(self, fed: Feed) -> Iterator:
        self.batches += 1
        for made in MICRO_BATCHES(fed):
            with _Dispatch(self), _Methods(self):
                yield made


MICRO_BATCHES = Feed.micro_batches


class _Dispatch(TorchDispatchMode):
    def __init__(self, syncs: Syncs) -> None:
        super().__init__()
        self.syncs = syncs

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        by_mask = name in ("index", "index_put", "index_put_") and any(
            place is not None and place.dtype in (torch.bool, torch.uint8) for place in args[1]
        )
        if name in READS | MAKES or by_mask:
            self.syncs.note(name)
        return func(*args, **(kwargs or {}))


class _Methods(TorchFunctionMode):
    def __init__(self, syncs: Syncs) -> None:
        super().__init__()
        self.syncs = syncs

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") in METHODS:
            self.syncs.note(func.__name__)
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return models.tiny_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture
def syncs(monkeypatch):
    """Synchronisations during every micro-batch of this test."""
    found = Syncs()
    monkeypatch.setattr(Feed, "micro_batches", lambda fed: found.micro_batches(fed))
    for name in (
        "accumulate_policy_gradient",
        "accumulate_value_gradient",
        "rollout_sums",
        "_with_token_advantages",
        "_with_answer_advantages",
    ):
        monkeypatch.setattr(policy_update, name, found.on(getattr(policy_update, name)))
    return found


SYNCHRONISING = {
    "item": lambda values: values[0].item(),
    "float": lambda values: float(values[0]),
    "if": lambda values: bool(values[0] > 0),
    "tolist": lambda values: values.tolist(),
    "numpy": lambda values: values.numpy(),
    "mask": lambda values: values[values > 0],
    "write by mask": lambda values: values.clone().index_put_((values > 0,), torch.zeros(())),
    "nonzero": lambda values: (values > 0).nonzero(),
    "bincount": lambda values: torch.bincount(values.long()),
    "tensor": lambda values: torch.tensor([1.0, 2.0]),
}


@pytest.mark.parametrize("operation", SYNCHRONISING.values(), ids=SYNCHRONISING.keys())
def test_a_synchronisation_is_detected(operation):
    found, values = Syncs(), torch.tensor([1.0, 2.0])
    found.on(operation)(values)
    assert found.seen
    harmless = Syncs()
    harmless.on(lambda: values[torch.arange(2)].sum() * 2.0 + values.new_full((), 3))()
    assert not harmless.seen


@pytest.mark.parametrize("window", [None, 7])
def test_the_mask_of_flex_attention_is_made_on_the_device(window):
    found, spans = Syncs(), spans_of([Span(0, 30), Span(30, 200, 0, 30), Span(230, 26)])
    found.on(block_mask)(spans, window, 256)
    assert not found.seen


def preferences(folder, count=8, **fields):
    rows = []
    for i, row in enumerate(models.arithmetic(count)):
        given = [{"text": row["messages"][1]["content"], "score": 2.0}, {"text": "not known " * (1 + i % 3), "score": 1.0}]
        rows.append({**row, "messages": row["messages"][:1], "answers": given, "strength": None, **fields})
    return models.dataset(folder, "preference", rows)


COMMON = {"global_batch": 4, "max_length": 96, "dtype": "fp32", "optimizer": {"learning_rate": 1e-3}}
SMALL = Numerics(threads=1, micro_batch_tokens=64)


def test_sft_synchronises_once_a_step(tmp_path, policy, syncs):
    data = models.dataset(tmp_path / "data", "conversation", models.arithmetic(8))
    job = models.a_job(tmp_path / "job", SMALL)
    sft.run(models.config_of("sft", **COMMON), {"policy": {"p": policy}, "data": {"d": data}}, job)
    assert syncs.batches == 2 and not syncs.seen


def test_reward_models_synchronise_once_a_step(tmp_path, policy, syncs):
    job = models.a_job(tmp_path / "job", SMALL)
    loss = {"type": "bradley_terry", "centering": 0.01, "margin_weight": 0.5}
    config = models.config_of("reward_model", **COMMON, loss=loss, holdout=0.3, seed=1)
    given = preferences(tmp_path / "data", 12, strength=0.9)
    reward_model.run(config, {"policy": {"p": policy}, "preferences": {"d": given}}, job)
    assert syncs.batches >= 2 and not syncs.seen  # held-out pairs are scored without one, too


@pytest.mark.parametrize(
    ("loss", "strength"),
    [({"type": "dpo"}, 0.8), ({"type": "orpo"}, None), ({"type": "kto"}, None)],
    ids=lambda value: value["type"] if isinstance(value, dict) else "",
)
def test_preference_training_synchronises_once_a_step(tmp_path, policy, syncs, loss, strength):
    job = models.a_job(tmp_path / "job", SMALL)
    data = preferences(tmp_path / "data", strength=strength)
    config = models.config_of("preference_train", **COMMON, loss=loss)
    preference_train.run(config, {"policy": {"p": policy}, "preferences": {"d": data}}, job)
    assert syncs.batches >= 2 and not syncs.seen


def test_cached_references_are_prefetched(tmp_path, policy, syncs):
    data = preferences(tmp_path / "data")
    job = models.a_job(tmp_path / "reference", SMALL)
    fields = models.config_of("reference_logprobs", max_length=96, dtype="fp32")
    reference_logprobs.run(fields, {"policy": {"p": policy}, "preferences": {"d": data}}, job)
    cached = models.publish(job.out, "reference_logprobs", "logprobs")
    config = models.config_of("preference_train", **COMMON, loss={"type": "dpo"})
    inputs = {"policy": {"p": policy}, "preferences": {"d": data}, "reference": {"r": cached}}
    preference_train.run(config, inputs, models.a_job(tmp_path / "job", SMALL))
    assert syncs.batches >= 3 and not syncs.seen


UPDATES = {
    "dapo": {"type": "dapo", "correction": {"level": "sequence", "mode": "mask"}, "dual_clip": 3.0},
    "gspo, several updates": {"type": "gspo", "updates_per_rollout": 2, "inner_epochs": 2},
    "dcpo": {"type": "dcpo"},
    "ppo, kl in the reward": {"type": "ppo", "kl": {"estimator": "k1", "where": "reward", "coefficient": 0.1}},
    "reinforce++, whitened": {"type": "reinforce_pp"},
    "grpo, kl in the loss": {"type": "grpo", "kl": {"estimator": "k3", "coefficient": 0.1}},
}


@pytest.mark.parametrize("fields", UPDATES.values(), ids=UPDATES.keys())
def test_policy_updates_do_not_synchronise_within_a_mini_batch(policy, syncs, fields):
    answers = policy_lab.made_answers(load_policy(policy, Numerics()), noise=0.1)
    made = policy_lab.learner(policy_lab.algorithm(**fields), policy, SMALL)
    try:
        done = policy_lab.steps(made, answers, 1)
    finally:
        policy_lab.close(made)
    assert done[0].updates and syncs.batches and not syncs.seen


@pytest.mark.gpu
def test_torch_reports_no_synchronisation_on_a_gpu(tmp_path, policy, monkeypatch):
    def without_syncs(fed: Feed) -> Iterator:
        for made in MICRO_BATCHES(fed):
            torch.cuda.set_sync_debug_mode("error")
            try:
                yield made
            finally:
                torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(Feed, "micro_batches", without_syncs)
    numerics = SMALL.model_copy(update={"device": "cuda"})
    config = {**COMMON, "dtype": "bf16"}
    data = models.dataset(tmp_path / "data", "conversation", models.arithmetic(8))
    sft.run(models.config_of("sft", **config), {"policy": {"p": policy}, "data": {"d": data}}, models.a_job(tmp_path / "sft", numerics))
    pairs = {"policy": {"p": policy}, "preferences": {"d": preferences(tmp_path / "pairs", strength=0.8)}}
    for loss in ({"type": "dpo"}, {"type": "orpo"}):
        job = models.a_job(tmp_path / loss["type"], numerics)
        preference_train.run(models.config_of("preference_train", **config, loss=loss), pairs, job)
    reward_model.run(models.config_of("reward_model", **config), pairs, models.a_job(tmp_path / "reward", numerics))
