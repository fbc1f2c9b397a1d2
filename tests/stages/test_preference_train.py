"""Preference training around its losses: one gradient for every cut of the batch, references of every kind, refusals."""

import math

import models
import pytest
import torch

from configs import preference as configs
from configs.execution import Numerics
from data.chat import Chat
from stages import preference_train, reference_logprobs
from stages.core.batches import plan_step
from stages.engines.models import load_policy
from stages.engines.reference import Cached, frozen
from stages.engines.rows import to_units
from stages.job import StageError
from stages.preference_train import Example, Objective, comparisons, documents_of


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return models.tiny_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    return models.tiny_policy(tmp_path_factory.mktemp("other"), seed=1)


def answers(*given):
    return [{"text": text, "score": score} for text, score in given]


def rows(count):
    """Pairs, every third of them uncertain, whose answers are of unequal length."""
    made = []
    for i, row in enumerate(models.arithmetic(count)):
        given = answers((row["messages"][1]["content"], None), ("not known " * (1 + i % 4), None))
        made.append({**row, "messages": row["messages"][:1], "answers": given, "strength": 0.8 if i % 3 == 0 else None})
    return made


def certain(count):
    return [{**row, "strength": None} for row in rows(count)]


def config(loss, **changed):
    fields = {"global_batch": 8, "max_length": 64, "dtype": "fp32", "optimizer": {"learning_rate": 1e-3}, "loss": loss}
    return models.config_of("preference_train", **{**fields, **changed})


CUTS = {
    "whole": (1, {"micro_batch_tokens": 4096}),
    "small packs": (1, {"micro_batch_tokens": 48}),
    "packs without shared prompts": (1, {"micro_batch_tokens": 64, "attention": "sdpa"}),
    "padded": (1, {"packing": False, "micro_batch_sequences": 4}),
    "two ranks": (2, {"micro_batch_tokens": 96}),
    "three ranks, padded": (3, {"packing": False, "micro_batch_sequences": 2}),
    "five ranks": (5, {"micro_batch_tokens": 48}),
}
METHODS = {"dpo": {"type": "dpo"}, "rpo": {"type": "rpo"}, "simpo": {"type": "simpo"}, "orpo": {"type": "orpo"}, "kto": {"type": "kto", "beta": 0.5}}  # fmt: skip


@pytest.fixture(scope="module")
def gradient(tmp_path_factory, policy, other):
    """Loss, z₀ and flat gradient of one global batch of a method under one cut: what each rank adds, added up."""
    chat, known = Chat(policy.payload), {}

    def of(name, cut):
        if (name, cut) not in known:
            ranks, changed = CUTS[cut]
            numerics = Numerics(**changed)
            wanted = config(METHODS[name])
            labelled = comparisons(wanted, certain(6) if name == "kto" else rows(6))
            kept, units = to_units(labelled, documents_of(wanted.loss, chat), 64, models.a_job(tmp_path_factory.mktemp("job")))
            batch = [Example(unit, row["label"]) for row, unit in zip(kept, units, strict=True)]
            module = load_policy(policy, numerics)
            reference = None if wanted.loss.reference_free else frozen(load_policy(other, numerics))
            objective = Objective(wanted.loss, module, reference, numerics, chat.pad_id, 64, torch.device("cpu"))
            z0 = 0.0
            if name == "kto":
                parts = [objective.mismatched_ratios(batch, rank, ranks) for rank in range(ranks)]
                assert {count for _, count in parts} == {len(batch)}
                z0 = max(0.0, sum(own for own, _ in parts) / len(batch))
            total = 0.0
            for rank in range(ranks):
                for micro in plan_step(units, rank, ranks, numerics):
                    given = objective.answers([units[i] for i in micro.units])
                    loss, _ = objective.measure(given, [batch[i].label for i in micro.units], z0)
                    (loss * micro.weight / len(batch)).backward()
                    total += loss.item() * micro.weight / len(batch)
            flat = torch.cat([parameter.grad.flatten() for parameter in module.parameters() if parameter.grad is not None])
            known[name, cut] = total, z0, flat
        return known[name, cut]

    return of


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("cut", [cut for cut in CUTS if cut != "whole"])
def test_every_cut_of_the_batch_gives_one_gradient(gradient, name, cut):
    (loss, z0, found), (whole_loss, whole_z0, expected) = gradient(name, cut), gradient(name, "whole")
    assert loss == pytest.approx(whole_loss, rel=1e-5) and z0 == pytest.approx(whole_z0, rel=1e-4)
    assert expected.norm() > 1e-3
    assert (found - expected).norm() < 1e-4 * expected.norm()


def test_the_estimate_of_the_kl_is_positive_where_the_cuts_are_compared(gradient):
    assert gradient("kto", "whole")[1] > 0.01


def given(policy, data, **reference):
    ports = {"policy": {"policy": policy}, "preferences": {"data": data}}
    return ports | {port: {"it": artifact} for port, artifact in reference.items()}


def run(folder, data, policy, loss, numerics=None, reference=None, **changed):
    """(metrics, curve) of the stage, run in this process."""
    job = models.a_job(folder, numerics or Numerics(threads=1))
    ports = given(policy, data, **({"reference": reference} if reference else {}))
    metrics = preference_train.run(config(loss, **changed), ports, job)
    return metrics, models.curve(job)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    return models.dataset(tmp_path_factory.mktemp("pairs"), "preference", rows(12))


def logprobs(folder, policy, data, **changed):
    job = models.a_job(folder, Numerics(threads=1, micro_batch_tokens=128))
    fields = {"max_length": 64, "dtype": "fp32", **changed}
    reference_logprobs.run(models.config_of("reference_logprobs", **fields), given(policy, data), job)
    return models.publish(job.out, "reference_logprobs", "logprobs")


def test_cached_and_online_references_train_alike(tmp_path, policy, other, pairs):
    online, curve = run(tmp_path / "online", pairs, policy, {"type": "dpo"}, reference=other)
    cached, cached_curve = run(tmp_path / "cached", pairs, policy, {"type": "dpo"}, reference=logprobs(tmp_path / "it", other, pairs))
    assert online["steps"] == 2 and abs(online["first_loss"] - math.log(2)) > 1e-3
    for name in ("loss", "grad_norm", "chosen_ratio", "rejected_ratio", "chosen_logp", "chosen_length", "margin", "accuracy"):
        assert [row[name] for row in cached_curve] == pytest.approx([row[name] for row in curve], rel=1e-3, abs=1e-4), name
