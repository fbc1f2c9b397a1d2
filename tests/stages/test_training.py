"""The training stages as jobs: one gradient for every cut of the batch, and exact resume."""

import json
import math
import os
import shutil
import signal
from types import SimpleNamespace

import models
import pytest
import torch
from effects_lab import trainer_of
from safetensors.torch import load_file
from sweeps import nightly_unless
from waiting import deadline, until

from pedigree.configs.language.execution import Numerics
from pedigree.data.artifacts.assets import extensions_folder
from pedigree.stages.job.job import checkpoint_names
from pedigree.stages.training import checkpoints
from pedigree.stages.training.checkpoints import Checkpoints

pytestmark = pytest.mark.slow
SFT = {"global_batch": 8, "epochs": 1, "max_length": 64, "dtype": "fp32", "optimizer": {"learning_rate": 1e-3}}


def inputs(policy, conversations):
    return {"policy": {"policy": policy}, "data": {"data": conversations}}


def dpo(**changed):
    rate = {"learning_rate": 1e-3, "schedule": "cosine"}
    return {"global_batch": 8, "max_length": 64, "loss": {"type": "dpo"}, "epochs": 4, "optimizer": rate, **changed}


CUTS = {
    "small packs": {"micro_batch_tokens": 48},
    "padded": {"packing": False, "micro_batch_sequences": 3},
    "gradient checkpointing": {"gradient_checkpointing": True},
    "deterministic": {"deterministic": True},
    "ZeRO 3": {"zero_stage": 3},
    "two ranks, ZeRO 0": {"world_size": 2, "zero_stage": 0},
    "two ranks, ZeRO 1": {"world_size": 2},
    "two ranks, ZeRO 2, small packs": {"world_size": 2, "zero_stage": 2, "micro_batch_tokens": 48},
    "two ranks share rows, ZeRO 1, small packs": {"world_size": 2, "sequence_parallel": 2, "micro_batch_tokens": 48},
    "two ranks, ZeRO 3, padded": {"world_size": 2, "zero_stage": 3, "packing": False},
}
CUTS_AT_NIGHT = {"two ranks, ZeRO 1", "two ranks, ZeRO 2, small packs"}
LONG = {**SFT, "epochs": 4}
WITHOUT_LOSS = {name: value for name, value in dpo().items() if name != "loss"}
KILLED = {
    "dpo bf16 with adapters, two ranks ZeRO 3": ("preference_train", dpo(lora={"rank": 4}), {"world_size": 2, "zero_stage": 3}),
}
KILLED_AT_NIGHT = {
    "sft two ranks ZeRO 3": ("sft", LONG, {"world_size": 2, "zero_stage": 3}),
    "dpo bf16 with adapters": ("preference_train", dpo(lora={"rank": 4}), {}),
    "reward model": ("reward_model", WITHOUT_LOSS, {}),
    "sft bf16": ("sft", {**LONG, "dtype": "bf16"}, {}),
    "sft with adapters, two ranks ZeRO 2": ("sft", {**LONG, "dtype": "bf16", "lora": {"rank": 4}}, {"world_size": 2, "zero_stage": 2}),
    "sft compiled": ("sft", {**LONG, "dtype": "bf16"}, {"kernels": "compiled"}),
    "kto fp32 two ranks ZeRO 2": (
        "preference_train",
        dpo(loss={"type": "kto"}, dtype="fp32"),
        {"world_size": 2, "zero_stage": 2},
    ),
    "reward model two ranks": ("reward_model", WITHOUT_LOSS, {"world_size": 2}),
}
THREE = {**SFT, "epochs": 3}
WITH_CHECKPOINTS = {"checkpoint_every_steps": 5}
RESHAPES = {
    "one rank to two": ({}, {"world_size": 2}),
    "two ranks to one, ZeRO 1 to 2": ({"world_size": 2}, {"zero_stage": 2}),
    "two ranks to one, ZeRO 3": ({"world_size": 2, "zero_stage": 3}, {"zero_stage": 3}),
    "smaller micro-batches": ({}, {"micro_batch_tokens": 48}),
}
UNEQUAL = {**SFT, "global_batch": 2, "epochs": 3}
CALLED_IN_PIECES = {"world_size": 2, "zero_stage": 3, "logprob_chunk": 8}
ADAPTERS = {**SFT, "epochs": 2, "lora": {"rank": 4, "alpha": 8.0}}
PARTED = {"world_size": 2, "zero_stage": 3}
KTO = dpo(loss={"type": "kto", "undesirable_weight": 0.001}, dtype="fp32", global_batch=14, epochs=1, order="given")
"""72 answers: the last of six steps has both sides of one pair alone. Good ones are lifted, and with them the mismatched ones: z₀ > 0."""
SHARED = {"world_size": 2, "zero_stage": 3, "sequence_parallel": 2}
PAIRS = {**WITHOUT_LOSS, "dtype": "fp32", "epochs": 1}
TWO_RANKS = [
    *(("sft", SFT, cut) for name, cut in CUTS.items() if "world_size" in cut and name not in CUTS_AT_NIGHT),
    ("sft", ADAPTERS, PARTED),
    ("preference_train", KTO, {"world_size": 2}),
    ("preference_train", KTO, SHARED),
    ("reward_model", PAIRS, SHARED),
    *KILLED.values(),
    *(("sft", THREE, before, WITH_CHECKPOINTS) for before, _ in RESHAPES.values() if before),
    ("sft", UNEQUAL, CALLED_IN_PIECES),
]
"""Kind, config, numerics and placement of runs of two ranks that nobody disturbs: they share one start."""


@pytest.fixture(scope="module")
def unequal(tmp_path_factory):
    """What SFT takes whose head is large enough to be partitioned; one answer is much longer than the other."""
    folder = tmp_path_factory.mktemp("unequal")
    rows = models.arithmetic(2)
    rows[0]["messages"][1]["content"] = "1 2 3 4 5 6 7 8 9 " * 2
    return inputs(models.tiny_policy(folder / "policy", hidden=512), models.dataset(folder / "data", "conversation", rows))


@pytest.fixture(scope="module")
def args_of(policy, conversations, preferences, unequal):
    """What a job takes: kind, config, inputs and numerics."""

    def args(kind, config, numerics):
        given = inputs(policy, conversations) if kind == "sft" else {"policy": {"p": policy}, "preferences": {"d": preferences}}
        return kind, config, unequal if config is UNEQUAL else given, Numerics(threads=1, **numerics)

    return args


@pytest.fixture(scope="module")
def quiet(tmp_path_factory, args_of):
    """Runs a stage that nobody disturbs, each case once: (folder, done.json); those of `KILLED` also killed and resumed."""
    known = {}

    def run(*case):
        if str(case) not in known:
            cases = TWO_RANKS if case in TWO_RANKS else [case]
            folders = [tmp_path_factory.mktemp("quiet") for _ in cases]
            for folder, (kind, config, numerics, *placed) in zip(folders, cases, strict=True):
                models.write_spec(folder, *args_of(kind, config, numerics), **dict(*placed))
            for killed in KILLED.values() if cases is TWO_RANKS else ():  # they go on in the same processes
                folders.append(tmp_path_factory.mktemp("killed"))
                models.killed_at("checkpoint renamed", 1, folders[-1], *args_of(*killed), checkpoint_every_steps=5)
                cases = [*cases, ("killed", *killed)]
            done = models.run_written(folders, apart="kernels" in case[2])
            assert all(one["ok"] for one in done), done
            known.update(zip(map(str, cases), zip(folders, done, strict=True), strict=True))
        return known[str(case)]

    return run


@pytest.fixture(scope="module")
def sft_curve(quiet):
    """Loss and gradient norm of four steps, for one way to run the same recipe."""

    def curve(**numerics):
        folder, _ = quiet("sft", SFT, numerics)
        return [(row["loss"], row["grad_norm"], row["trained_tokens"]) for row in rows_of(folder)]

    return curve


def rows_of(folder):
    return [json.loads(line) for line in (folder / "curve.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", nightly_unless(CUTS.keys() - CUTS_AT_NIGHT, CUTS))
def test_the_configured_batch_is_the_batch(sft_curve, name):
    """Losses follow gradients: equal losses over all steps are equal gradients, to rounding."""
    assert len(sft_curve()) == 4  # 28 rows by 8: the last batch holds 4
    for ours, reference in zip(sft_curve(**CUTS[name]), sft_curve(), strict=True):
        assert ours == pytest.approx(reference, rel=2e-4)


def test_ranks_with_unequal_answers_make_equally_many_collectives_under_zero_3(quiet):
    """Logits of 40 tokens are 5 chunks, those of 3 are one; the head is called once for either."""
    losses = [[row["loss"] for row in rows_of(quiet("sft", UNEQUAL, ranks)[0])] for ranks in ({"logprob_chunk": 8}, CALLED_IN_PIECES)]
    assert losses[1] == pytest.approx(losses[0], rel=2e-4)


def test_adapters_are_trained_alike_on_ranks_that_hold_parts_of_them(quiet):
    losses, weights = [], []
    for numerics in ({}, PARTED):
        folder, _ = quiet("sft", ADAPTERS, numerics)
        losses.append([row["loss"] for row in rows_of(folder)])
        weights.append(load_file(folder / "out" / "payload" / "model.safetensors"))
    assert losses[1] == pytest.approx(losses[0], rel=2e-4)
    one, two = weights
    assert one.keys() == two.keys() and all(torch.allclose(one[name], two[name], atol=1e-3) for name in one)


def test_kto_estimates_its_kl_on_the_answers_of_all_ranks(quiet):
    (one, alone), (two, together) = (quiet("preference_train", KTO, ranks) for ranks in ({}, {"world_size": 2}))
    kl, kl_of_two = ([row["kl"] for row in rows_of(folder)] for folder in (one, two))
    assert kl_of_two == pytest.approx(kl, rel=2e-3, abs=1e-5) and max(kl) > 1e-3 and kl[-1] == kl_of_two[-1] == 0
    assert alone["metrics"]["steps_without_kl"] == together["metrics"]["steps_without_kl"] == 1


@pytest.mark.parametrize(("kind", "config"), [("preference_train", KTO), ("reward_model", PAIRS)])
def test_pairs_are_trained_alike_where_two_ranks_share_rows(quiet, kind, config):
    (alone, one), (together, two) = (quiet(kind, config, numerics) for numerics in ({}, SHARED))
    for row, shared in zip(rows_of(alone), rows_of(together), strict=True):
        assert (shared["loss"], shared["grad_norm"]) == pytest.approx((row["loss"], row["grad_norm"]), rel=2e-3)
    assert one["metrics"].keys() == two["metrics"].keys()


def test_the_first_loss_of_an_untrained_model_is_log_v(sft_curve, policy):
    vocabulary = json.loads((policy.payload / "config.json").read_text())["vocab_size"]
    assert sft_curve()[0][0] == pytest.approx(math.log(vocabulary), rel=0.05)


@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(case, id=name) for name, case in KILLED.items()),
        *(pytest.param(case, id=name, marks=pytest.mark.nightly) for name, case in KILLED_AT_NIGHT.items()),
    ],
)
def test_a_killed_job_goes_on_and_ends_in_the_same_bytes(tmp_path, quiet, args_of, case):
    _, undisturbed = quiet(*case)
    if case in KILLED.values():
        folder, done = quiet("killed", *case)
    else:
        folder = tmp_path
        models.killed_at("checkpoint renamed", 1, folder, *args_of(*case), checkpoint_every_steps=5)
        (done,) = models.run_written([folder], apart="kernels" in case[2])
    assert done["resumed_from"] == "step-000010"
    assert done["content"] == undisturbed["content"] and done["metrics"] == undisturbed["metrics"]
    assert [row["step"] for row in rows_of(folder)] == list(range(1, undisturbed["metrics"]["steps"] + 1))


@pytest.mark.parametrize(("ranks", "number"), [(1, signal.SIGTERM), pytest.param(2, signal.SIGUSR1, marks=pytest.mark.nightly)])
def test_pre_emption_writes_a_checkpoint_and_damage_falls_back_loudly(tmp_path, quiet, args_of, ranks, number):
    case = ("sft", {**SFT, "epochs": 24}, {"world_size": 2} if ranks == 2 else {})
    args = args_of(*case)
    _, undisturbed = quiet(*case)
    job = models.start_job(tmp_path / "b", *args, checkpoint_every_steps=5)
    until(lambda: max(checkpoint_names(tmp_path / "b"), default="") >= "step-000010", alive=lambda: job.poll() is None)
    os.kill(job.pid, number)  # of two ranks torchrun alone hears it
    assert job.wait(timeout=deadline(60)) == (75 if ranks == 1 else 1)  # torchrun keeps exit codes to itself
    told = json.loads((tmp_path / "b" / "done.json").read_text())
    assert told["cause"] == "preempted" and told["checkpoints"]["written"] > 1 and told["checkpoints"]["bytes"] > 0
    newest = max((tmp_path / "b" / "checkpoints").glob("step-*"))
    random_state = newest / "random_0.pt"
    data = bytearray(random_state.read_bytes())
    data[len(data) // 2] ^= 1
    random_state.write_bytes(data)
    (tmp_path / "b" / "done.json").unlink()
    resumed = models.run(tmp_path / "b", *args, checkpoint_every_steps=5)
    assert f"{newest.name} is damaged (random_0.pt)" in (tmp_path / "b" / "log.txt").read_text()
    assert resumed["content"] == undisturbed["content"]


def test_a_checkpoint_of_other_numerics_is_refused_with_what_changed(tmp_path, policy, conversations):
    args = ("sft", SFT, inputs(policy, conversations))
    assert models.run(tmp_path, *args, Numerics(threads=1), checkpoint_every_steps=2)["ok"]
    done = models.run(tmp_path, *args, Numerics(threads=1, micro_batch_tokens=64))
    assert not done["ok"] and done["cause"] == "refused" and "micro_batch_tokens 1024 -> 64" in done["message"]


@pytest.mark.parametrize(
    ("before", "after"),
    nightly_unless([case for case in RESHAPES.values() if "world_size" not in case[1]], RESHAPES.values()),
    ids=RESHAPES.keys(),
)
def test_a_checkpoint_is_resharded_when_asked_and_the_record_says_so(tmp_path, quiet, args_of, before, after):
    """The loss goes on as if nothing had happened: weights, moments and step of Adam have all come along."""
    whole, _ = quiet("sft", THREE, {}, WITH_CHECKPOINTS)
    made, _ = quiet("sft", THREE, before, WITH_CHECKPOINTS)
    shutil.copytree(made / "checkpoints" / "step-000005", tmp_path / "checkpoints" / "step-000005")
    shutil.copy(made / "curve.jsonl", tmp_path)
    done = models.run(tmp_path, *args_of("sft", THREE, after), {"allow_numerics_change": True})
    assert done["ok"], done
    (mark,) = done["marks"]
    changed = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    assert mark.startswith("numerics changed at step 5: ") and all(f"{name} " in mark for name in changed)
    curves = [[row["loss"] for row in rows_of(folder)] for folder in (whole, tmp_path)]
    assert len(curves[1]) == 12 and curves[1] == pytest.approx(curves[0], rel=2e-4)


def test_a_loss_that_is_no_number_ends_the_job_and_leaves_no_checkpoint_of_it(tmp_path, policy, conversations):
    config = {**LONG, "optimizer": {"learning_rate": 1.0, "weight_decay": 1e3, "schedule": "constant"}}
    done = models.run(tmp_path, "sft", config, inputs(policy, conversations), Numerics(threads=1), checkpoint_every_steps=1)
    assert not done["ok"] and done["cause"] == "not_finite" and "lower optimizer.learning_rate (1.0)" in done["message"]
    logged = (tmp_path / "curve.jsonl").read_text().splitlines()
    assert max(int(path.name[5:]) for path in (tmp_path / "checkpoints").glob("step-*")) <= len(logged)


@pytest.mark.proves("placement.checkpoint_every_steps")
def test_what_a_killed_job_leaves_behind_holds_up_nobody(tmp_path, policy, conversations):
    """A curve without a checkpoint, a half-written checkpoint, and the file by which torch guards a compiled operation."""
    guard = extensions_folder() / "deepspeed_shm_comm" / "lock"
    guard.touch()
    (tmp_path / "checkpoints" / ".step-000002").mkdir(parents=True)
    (tmp_path / "curve.jsonl").write_text('{"step": 1, "loss": 9.0}\n')
    done = models.run(tmp_path, "sft", SFT, inputs(policy, conversations), Numerics(threads=1), checkpoint_every_steps=3)
    assert done["ok"] and not guard.exists(), done
    assert [row["step"] for row in rows_of(tmp_path)] == [1, 2, 3, 4]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000003"]


@pytest.mark.proves("placement.checkpoint_every_s")
def test_checkpoints_are_as_rare_as_their_measured_cost_demands(tmp_path, policy, monkeypatch):
    """Steps of 100 s, and saves that take 60 s: the first is due after 300 s, the others after 60 · 0.97 / 0.03 = 1940 s, 20 steps."""
    now = [0.0]
    monkeypatch.setattr(checkpoints, "time", SimpleNamespace(monotonic=lambda: now[0]))
    trainer = trainer_of(policy, {})
    job = models.a_job(tmp_path, trainer.numerics, checkpoint_every_s=300, keep_checkpoints=9)
    written, save = Checkpoints(job, trainer), trainer.save_state
    monkeypatch.setattr(trainer, "save_state", lambda folder: (save(folder), now.__setitem__(0, now[0] + 60)))
    for step in range(1, 50):
        now[0] += 100
        written.after_step(step, {})
    written._settle()
    trainer.close()
    assert sorted(path.name for path in job.checkpoints.iterdir()) == ["step-000003", "step-000023", "step-000043"]
    assert job.checkpoint_cost["seconds"] == 180 and job.checkpoint_cost["period_s"] == pytest.approx(1940)
    assert 180 / now[0] < checkpoints.COST_SHARE + 0.01
    assert checkpoints.period_s(1.0, 300) == 300


@pytest.mark.proves("placement.keep_checkpoints")
@pytest.mark.parametrize(("count", "kept"), [(1, ["step-000006"]), (2, ["step-000004", "step-000006"])])
def test_as_many_checkpoints_are_kept_as_asked_for(tmp_path, policy, count, kept):
    trainer = trainer_of(policy, {})
    job = models.a_job(tmp_path, trainer.numerics, keep_checkpoints=count)
    checkpoints = Checkpoints(job, trainer)
    for step in (2, 4, 6):
        checkpoints.write(step, {})
    checkpoints._settle()
    trainer.close()
    assert sorted(path.name for path in job.checkpoints.iterdir()) == kept


def test_rows_that_do_not_fit_are_counted_and_none_left_is_an_error(tmp_path, policy, conversations):
    done = models.run(tmp_path, "sft", {**SFT, "max_length": 8}, inputs(policy, conversations), Numerics(threads=1))
    assert not done["ok"] and "none of 28 rows is left" in done["message"]
