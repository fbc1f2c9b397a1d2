"""Two ranks: what fields of `numerics` do there, and that two ranks train as one. All daily cases share one start of the processes."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import effects_lab
import models
import pytest
import router_lab
import torch
from safetensors.torch import load_file
from sweeps import nightly_unless

from pedigree.configs.language.execution import Numerics
from pedigree.data.artifacts.artifacts import read_json
from pedigree.stages.job.job import read_curve
from pedigree.stages.training.router_loss import ROUTER_METRICS

pytestmark = [pytest.mark.slow, pytest.mark.integration]
TWO = {"world_size": 2}
Cases = dict[str, tuple[str, dict[str, Any]]]

# --- effects of numerics -----------------------------------------------------------------------------------------------

STAGES = (1, 2, 3)
DAILY: Cases = {}
NIGHTLY: Cases = {}


def case(name: str, function: str, daily: bool = True, **fields: Any) -> None:
    """A case that `effects_lab` measures."""
    (DAILY if daily else NIGHTLY)[name] = (function, {**TWO, **fields})


case("head gathers", "head_gathers", zero_stage=3, logprob_chunk=8)
case("arriving", "arriving", zero_stage=3)
case("waits", "waits")
case("routers, sharded weights", "routers", zero_stage=3, micro_batch_tokens=32, gradient_checkpointing=True)
case("routers, an idle pass", "routers", packing=False, attention="sdpa", micro_batch_sequences=1)
case("slowed, ZeRO 2", "slowed", zero_stage=2)
case("slowed, ZeRO 3", "slowed", zero_stage=3)
for stage in STAGES:
    case(f"parts {stage}", "parts", zero_stage=stage)
    case(f"updating {stage}", "updating", stage == 2, zero_stage=stage)
    case(f"offloading {stage}", "updating", stage == 2, zero_stage=stage, offload=True)
for stage in STAGES[1:]:
    case(f"overlapping {stage}", "updating", stage == 2, zero_stage=stage, like_on_gpus=True)
    case(f"shared rows {stage}", "shared_rows", stage == 2, zero_stage=stage, logprob_chunk=8)

# --- jobs --------------------------------------------------------------------------------------------------------------

SFT = {"global_batch": 8, "epochs": 1, "max_length": 64, "dtype": "fp32", "optimizer": {"learning_rate": 1e-3}}
THREE = {**SFT, "epochs": 3}
UNEQUAL = {**SFT, "global_batch": 2, "epochs": 3}
PAIRS = {name: value for name, value in SFT.items() if name != "optimizer"} | {"optimizer": {"learning_rate": 1e-3, "schedule": "cosine"}}
KTO = {**PAIRS, "loss": {"type": "kto", "undesirable_weight": 0.001}, "global_batch": 14, "order": "given"}
"""72 answers: the last of six steps has both sides of one pair alone. Good ones are lifted, and with them the mismatched ones: z₀ > 0."""
DPO = {**PAIRS, "loss": {"type": "dpo"}, "epochs": 4, "lora": {"rank": 4}}
PARTED, SHARED = {**TWO, "zero_stage": 3}, {**TWO, "zero_stage": 3, "sequence_parallel": 2}
HALFWAY, OFTEN = {"checkpoint_every_steps": 10}, {"checkpoint_every_steps": 5}
Job = tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]
"""Kind, config, numerics and placement."""
CUTS: dict[str, Job] = {
    "ZeRO 3, padded": ("sft", THREE, {**PARTED, "packing": False}, OFTEN),
    "ranks share rows, ZeRO 1, small packs": ("sft", SFT, {**TWO, "sequence_parallel": 2, "micro_batch_tokens": 48}, {}),
}
CUTS_AT_NIGHT: dict[str, Job] = {
    "ZeRO 0": ("sft", SFT, {**TWO, "zero_stage": 0}, {}),
    "ZeRO 1": ("sft", THREE, TWO, OFTEN),
    "ZeRO 2, small packs": ("sft", SFT, {**TWO, "zero_stage": 2, "micro_batch_tokens": 48}, {}),
}
JOBS: dict[str, Job] = {
    **CUTS,
    "kto": ("preference_train", KTO, TWO, {}),
    "kto, shared rows": ("preference_train", KTO, SHARED, {}),
    "reward model, shared rows": ("reward_model", PAIRS, SHARED, {}),
    "unequal": ("sft", UNEQUAL, {**PARTED, "logprob_chunk": 8}, {}),
    "whole": ("preference_train", DPO, PARTED, HALFWAY),
    "resumed": ("preference_train", DPO, PARTED, {}),
}


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A policy whose largest matrices are above what ZeRO-3 leaves on every rank."""
    return models.tiny_policy(tmp_path_factory.mktemp("large"), hidden=512)


@pytest.fixture(scope="module")
def mixture(policy, tmp_path_factory):
    return router_lab.mixture(tmp_path_factory.mktemp("mixture"), "mixtral", policy)


@pytest.fixture(scope="module")
def args_of(tmp_path_factory, policy, conversations, preferences, large):
    """What a job takes: kind, config, inputs and numerics. Of the answers of `UNEQUAL`, one is much longer than the other."""
    rows = models.arithmetic(2)
    rows[0]["messages"][1]["content"] = "1 2 3 4 5 6 7 8 9 " * 2
    unequal = models.dataset(tmp_path_factory.mktemp("unequal"), "conversation", rows)

    def args(kind, config, numerics):
        given = {"preferences": {"d": preferences}} if kind != "sft" else {"data": {"d": unequal if config is UNEQUAL else conversations}}
        return kind, config, {"policy": {"p": large if config is UNEQUAL else policy}, **given}, Numerics(threads=1, **numerics)

    return args


@pytest.fixture(scope="module")
def measured(tmp_path_factory, args_of, large, mixture) -> Callable[[str], Any]:
    """What a case measures; of a job, its folder."""
    folder = tmp_path_factory.mktemp("two")
    for name, (kind, config, numerics, placement) in (JOBS | CUTS_AT_NIGHT).items():
        models.write_spec(folder / name, *args_of(kind, config, numerics), **placement)
    for name in ("checkpoints", "curve.jsonl"):  # the only checkpoint is the one halfway
        (folder / "resumed" / name).symlink_to(folder / "whole" / name)

    def cases(effects: Cases, jobs: dict[str, Job]) -> Cases:
        others = {name: (kind, {**fields, "mixture": str(mixture.path)}) for name, (kind, fields) in effects.items() if kind == "routers"}
        return effects | others | {name: ("job", {"folder": str(folder / name)}) for name in jobs}

    return models.measuring(effects_lab.__file__, large, folder, cases(DAILY, JOBS), cases(NIGHTLY, CUTS_AT_NIGHT))


@pytest.fixture(scope="module")
def done(measured) -> Callable[[str], tuple[Path, dict[str, Any]]]:
    """(folder, done.json) of a job on two ranks."""

    def of(name):
        folder = Path(measured(name))
        found = models.told(folder)
        assert found["ok"], found
        return folder, found

    return of


@pytest.fixture(scope="module")
def alone(tmp_path_factory, args_of) -> Callable[..., tuple[Path, dict[str, Any]]]:
    """The same of a job on one rank, run once."""
    known: dict[str, tuple[Path, dict[str, Any]]] = {}

    def of(kind, config, **numerics):
        name = str((kind, config, numerics))
        if name not in known:
            folder = tmp_path_factory.mktemp("alone")
            known[name] = folder, models.run(folder, *args_of(kind, config, numerics))
            assert known[name][1]["ok"], known[name]
        return known[name]

    return of


def rows_of(folder, *columns):
    rows = [json.loads(line) for line in (folder / "curve.jsonl").read_text().splitlines()]
    return [row[column] for row in rows for column in columns]


@pytest.mark.proves("numerics.zero_stage")
def test_each_zero_stage_parts_one_thing_more(measured):
    """Moments from 1 on, gradients from 2 on, weights with 3: half of them on each of two ranks, up to what fills the last block. Up to 1,
    gradients are exchanged once a step, and from 2 on after each micro-batch."""
    for stage in STAGES:
        found = measured(f"parts {stage}")
        shares = {"moments": 0.5, "gradients": 0.5 if stage > 1 else 1.0, "weights": 0.5 if stage > 2 else 1.0}
        assert found["held"] == pytest.approx(shares, rel=2e-3), stage
        assert found["exchanges"]["step"] and [count > 0 for count in found["exchanges"]["backward"]] == [stage > 1] * 2, stage


@pytest.mark.proves("numerics.sequence_parallel")
@pytest.mark.parametrize("stage", nightly_unless([2], STAGES[1:]))
def test_two_ranks_compute_a_row_together_with_the_gradient_of_one_and_half_of_its_activations(measured, stage):
    found = measured(f"shared rows {stage}")
    assert found["logps"] < 1e-6 and found["gradients"] < 1e-5, found
    assert stage == 3 or found["kept"] < 0.6, found  # with ZeRO-3, autograd keeps gathered weights too


def test_under_zero_3_no_rank_ever_has_a_whole_policy_or_reference_on_its_device(measured):
    """Parameters arrive one by one; of a reference, too, each of two ranks holds half, and it computes the same bits."""
    found = measured("arriving")
    assert found["whole"] == [0.0, 0.0] and found["equal"] and found["held"] == pytest.approx(0.5, rel=2e-3)


@pytest.mark.parametrize("stage", nightly_unless([2], STAGES[1:]))
def test_gradients_reduced_during_the_backward_pass_are_the_same(measured, stage):
    expected, found = measured(f"updating {stage}"), measured(f"overlapping {stage}")
    assert not expected["overlaps"] and found == {**expected, "overlaps": True}


@pytest.mark.proves("numerics.offload_optimizer", on_gpus="that the bytes leave the GPU: here all memory is the host's")
@pytest.mark.parametrize("stage", nightly_unless([2], STAGES))
def test_an_offloaded_optimizer_is_deepspeeds_on_the_host_and_makes_the_same_update(measured, stage):
    expected, found = measured(f"updating {stage}"), measured(f"offloading {stage}")
    assert (expected["on_host"], found["on_host"]) == (False, True)
    assert found["norms"] == pytest.approx(expected["norms"], rel=1e-3)


@pytest.mark.parametrize("stage", STAGES[1:])
def test_all_ranks_know_the_slowest_without_another_collective(measured, stage):
    """Twice as slow as the other is 2 over a mean of 1.5."""
    found = measured(f"slowed, ZeRO {stage}")
    assert found["found"] == {"slowdown": pytest.approx(4 / 3), "slowest_rank": 1}
    assert found["totals"] == {"loss": 2.0, "norm": 1.0} and found["exchanges"] == [1, 1]


def test_no_rank_waits_for_the_first_in_a_group_that_ends_or_spins(measured):
    """Rollouts, checks of checkpoints and exports may take rank 0 hours: a hang is found by its heartbeat."""
    found = measured("waits")
    assert (found["heard"], found["collectives"]) == (1, 0)
    assert found["timeout_s"] > 24 * 3600  # ranks may also join each other late


def test_zero_3_gathers_the_head_once_a_pass_and_knows_the_modules_of_passes_of_any_length(measured):
    """DeepSpeed records the modules of the first pass, and prefetches by that record as long as it holds."""
    found = measured("head gathers")
    assert found["complete"] == [False] + 11 * [True]
    assert found["head"][1:] == 11 * [1]


@pytest.mark.parametrize("case", [name for name in DAILY if name.startswith("routers")])
def test_the_routers_of_a_mixture_have_the_gradient_of_one_rank(measured, mixture, case):
    expected, found = router_lab.trained(mixture, Numerics(threads=1)), measured(case)
    for name in ("loss", *ROUTER_METRICS):
        assert found[name] == pytest.approx(expected[name], rel=1e-5), name
    for name, (norm, *products) in router_lab.sketch(expected["gradient"]).items():
        assert found["gradient"][name] == pytest.approx([norm, *products], abs=1e-4 * norm), name


@pytest.mark.parametrize("name", nightly_unless(CUTS, CUTS | CUTS_AT_NIGHT))
def test_the_configured_batch_is_the_batch_of_all_ranks(done, alone, name):
    """Losses follow gradients: equal losses over all steps are equal gradients, to rounding."""
    kind, config, *_ = (CUTS | CUTS_AT_NIGHT)[name]
    columns = ("loss", "grad_norm", "trained_tokens")
    expected = rows_of(alone(kind, config)[0], *columns)
    assert len(expected) == 3 * 4 * config["epochs"]  # 28 rows by 8: the last batch of an epoch holds 4
    assert rows_of(done(name)[0], *columns) == pytest.approx(expected, rel=2e-4)


def test_ranks_with_unequal_answers_make_equally_many_collectives_under_zero_3(done, alone):
    """Logits of 40 tokens are 5 chunks, those of 3 are one; the head is called once for either."""
    assert rows_of(done("unequal")[0], "loss") == pytest.approx(rows_of(alone("sft", UNEQUAL, logprob_chunk=8)[0], "loss"), rel=2e-4)


def test_adapters_are_trained_alike_on_ranks_that_hold_parts_of_them(done, alone):
    folders = done("whole")[0], alone("preference_train", DPO)[0]
    two, one = (rows_of(folder, "loss") for folder in folders)
    assert two == pytest.approx(one, rel=1e-3)
    two, one = (load_file(folder / "out" / "payload" / "model.safetensors") for folder in folders)
    assert one.keys() == two.keys() and all(torch.allclose(one[name], two[name], atol=1e-3) for name in one)


def test_kto_estimates_its_kl_on_the_answers_of_all_ranks(done, alone):
    (one, single), (two, together) = alone("preference_train", KTO), done("kto")
    kl, kl_of_two = (rows_of(folder, "kl") for folder in (one, two))
    assert kl_of_two == pytest.approx(kl, rel=2e-3, abs=1e-5) and max(kl) > 1e-3 and kl[-1] == kl_of_two[-1] == 0
    assert single["metrics"]["steps_without_kl"] == together["metrics"]["steps_without_kl"] == 1


@pytest.mark.parametrize("name", ["kto, shared rows", "reward model, shared rows"])
def test_pairs_are_trained_alike_where_two_ranks_share_rows(done, alone, name):
    kind, config, *_ = JOBS[name]
    (one, single), (two, together) = alone(kind, config), done(name)
    assert rows_of(two, "loss", "grad_norm") == pytest.approx(rows_of(one, "loss", "grad_norm"), rel=2e-3)
    assert single["metrics"].keys() == together["metrics"].keys()


@pytest.mark.parametrize(
    ("name", "after"), [("ZeRO 3, padded", 0), ("kto, shared rows", 0), ("reward model, shared rows", 0), ("resumed", 10)]
)
def test_curves_of_several_ranks_name_the_slowest_and_their_hosts_are_evidence(done, alone, name, after):
    """From the second step of an attempt on: metrics travel with those of the step after."""
    folder, _ = done(name)
    rows = [row for row in read_curve(folder / "curve.jsonl") if row["step"] > after]
    assert all(1 <= row["slowdown"] <= 2 and row["slowest_rank"] in (0, 1) for row in rows[1:]) and len(rows) > 2
    assert "slowdown" not in rows[0]
    assert read_json(folder / "out" / "evidence" / "ranks.json") == {"after_step": after, "hosts": 2 * [os.uname().nodename]}
    single, _ = alone("sft", THREE)
    assert "slowdown" not in read_curve(single / "curve.jsonl")[-1] and not (single / "out" / "evidence" / "ranks.json").exists()


def test_ranks_resume_from_a_checkpoint_and_end_in_the_same_bytes(done):
    (_, whole), (folder, resumed) = done("whole"), done("resumed")
    assert resumed["resumed_from"] == "step-000010" and whole["resumed_from"] is None
    assert resumed["content"] == whole["content"] and resumed["metrics"] == whole["metrics"]
    assert rows_of(folder, "step") == list(range(1, 21))


@pytest.mark.parametrize(
    ("before", "after"), [("ZeRO 3, padded", {"zero_stage": 3}), pytest.param("ZeRO 1", {"zero_stage": 2}, marks=pytest.mark.nightly)]
)
def test_one_rank_continues_from_a_checkpoint_of_two_and_the_record_says_so(tmp_path, done, alone, args_of, before, after):
    """The loss goes on as if nothing had happened: weights, moments and step of Adam have all come along."""
    made, _ = done(before)
    shutil.copytree(made / "checkpoints" / "step-000005", tmp_path / "checkpoints" / "step-000005")
    shutil.copy(made / "curve.jsonl", tmp_path)
    found = models.run(tmp_path, *args_of("sft", THREE, after), {"allow_numerics_change": True})
    assert found["ok"], found
    (mark,) = found["marks"]
    assert mark.startswith("numerics changed at step 5: ") and "world_size 2 -> 1" in mark
    losses = rows_of(tmp_path, "loss")
    assert len(losses) == 12 and losses == pytest.approx(rows_of(alone("sft", THREE)[0], "loss"), rel=2e-4)
