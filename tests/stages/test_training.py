"""The training stages as jobs: one gradient for every cut of the batch, and exact resume. Of two ranks: `test_two_ranks.py`."""

import json
import math
import os
import shutil
import signal
from types import SimpleNamespace

import models
import pytest
from effects_lab import trainer_of
from waiting import deadline, until

from pedigree.configs.language.execution import Numerics
from pedigree.stages.job.job import checkpoint_names
from pedigree.stages.training import checkpoints
from pedigree.stages.training.checkpoints import Checkpoints

pytestmark = pytest.mark.slow
SFT = {"global_batch": 8, "epochs": 1, "max_length": 64, "dtype": "fp32", "optimizer": {"learning_rate": 1e-3}}
LONG = {**SFT, "epochs": 4}
PAIRS = {"global_batch": 8, "epochs": 4, "max_length": 64, "optimizer": {"learning_rate": 1e-3, "schedule": "cosine"}}
DPO = {**PAIRS, "loss": {"type": "dpo"}, "lora": {"rank": 4}}
CUTS = {"small packs": {"micro_batch_tokens": 48}, "padded": {"packing": False, "micro_batch_sequences": 3, "deterministic": True}}
KILLED = {
    "dpo bf16 with adapters": ("preference_train", DPO, {}),
    "dpo bf16 with adapters, two ranks ZeRO 3": ("preference_train", DPO, {"world_size": 2, "zero_stage": 3}),
    "sft two ranks ZeRO 3": ("sft", LONG, {"world_size": 2, "zero_stage": 3}),
    "reward model": ("reward_model", PAIRS, {}),
    "sft bf16": ("sft", {**LONG, "dtype": "bf16"}, {}),
    "sft with adapters, two ranks ZeRO 2": ("sft", {**LONG, "dtype": "bf16", "lora": {"rank": 4}}, {"world_size": 2, "zero_stage": 2}),
    "sft compiled": ("sft", {**LONG, "dtype": "bf16"}, {"kernels": "compiled"}),
    "kto fp32 two ranks ZeRO 2": (
        "preference_train",
        {**PAIRS, "loss": {"type": "kto"}, "dtype": "fp32"},
        {"world_size": 2, "zero_stage": 2},
    ),
    "reward model two ranks": ("reward_model", PAIRS, {"world_size": 2}),
}


@pytest.fixture(scope="module")
def args_of(policy, conversations, preferences):
    """What a job takes: kind, config, inputs and numerics."""

    def args(kind, config, numerics):
        given = {"data": {"d": conversations}} if kind == "sft" else {"preferences": {"d": preferences}}
        return kind, config, {"policy": {"p": policy}, **given}, Numerics(threads=1, **numerics)

    return args


def ran(folder, args, numerics, **placement):
    """Runs what `args_of` gives; returns done.json."""
    models.write_spec(folder, *args, **placement)
    (done,) = models.run_written([folder], apart="kernels" in numerics)
    return done


@pytest.fixture(scope="module")
def quiet(tmp_path_factory, args_of):
    """Runs a stage that nobody disturbs, each case once: (folder, done.json)."""
    known = {}

    def run(kind, config, numerics):
        case = str((kind, config, numerics))
        if case not in known:
            folder = tmp_path_factory.mktemp("quiet")
            known[case] = folder, ran(folder, args_of(kind, config, numerics), numerics)
            assert known[case][1]["ok"], known[case]
        return known[case]

    return run


def rows_of(folder):
    return [json.loads(line) for line in (folder / "curve.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_the_configured_batch_is_the_batch(quiet, cut):
    """Losses follow gradients: equal losses over all steps are equal gradients, to rounding."""
    found, expected = (
        [row[column] for row in rows_of(quiet("sft", SFT, numerics)[0]) for column in ("loss", "grad_norm", "trained_tokens")]
        for numerics in (cut, {})
    )
    assert len(expected) == 3 * 4  # 28 rows by 8: the last batch holds 4
    assert found == pytest.approx(expected, rel=2e-4)


def test_the_first_loss_of_an_untrained_model_is_log_v(quiet, policy):
    vocabulary = json.loads((policy.payload / "config.json").read_text())["vocab_size"]
    assert rows_of(quiet("sft", SFT, {})[0])[0]["loss"] == pytest.approx(math.log(vocabulary), rel=0.05)


def resumable(folder, made, step):
    """A job's folder as it is left by one that ended when it had written this checkpoint."""
    shutil.copytree(made / f"checkpoints/step-{step:06d}", folder / f"checkpoints/step-{step:06d}")
    shutil.copy(made / "curve.jsonl", folder)  # with lines of later steps
    return folder


def test_a_job_resumes_from_a_checkpoint_and_ends_in_the_same_bytes(tmp_path, args_of):
    args = args_of("preference_train", DPO, {})
    undisturbed = models.run(tmp_path / "whole", *args, checkpoint_every_steps=10)
    done = models.run(resumable(tmp_path / "again", tmp_path / "whole", 10), *args)
    assert (undisturbed["resumed_from"], done["resumed_from"]) == (None, "step-000010")
    assert done["content"] == undisturbed["content"] and done["metrics"] == undisturbed["metrics"]
    assert [row["step"] for row in rows_of(tmp_path / "again")] == list(range(1, 21))


@pytest.mark.nightly
@pytest.mark.parametrize("case", KILLED.values(), ids=KILLED)
def test_a_killed_job_goes_on_and_ends_in_the_same_bytes(tmp_path, quiet, args_of, case):
    _, undisturbed = quiet(*case)
    models.killed_at("checkpoint renamed", 1, tmp_path, *args_of(*case), checkpoint_every_steps=5)
    done = ran(tmp_path, args_of(*case), case[2])
    assert done["resumed_from"] == "step-000010"
    assert done["content"] == undisturbed["content"] and done["metrics"] == undisturbed["metrics"]
    assert [row["step"] for row in rows_of(tmp_path)] == list(range(1, undisturbed["metrics"]["steps"] + 1))


def test_pre_emption_writes_a_checkpoint_and_damage_falls_back_loudly(tmp_path, monkeypatch, quiet, args_of):
    _, undisturbed = quiet("sft", LONG, {})
    args, after_step = args_of("sft", LONG, {}), Checkpoints.after_step

    def asked_to_stop(written, step, state):
        if step == 7:
            signal.raise_signal(signal.SIGTERM)
        after_step(written, step, state)

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "after_step", asked_to_stop)
        told = models.run(tmp_path, *args, checkpoint_every_steps=5)
    assert told["cause"] == "preempted" and told["checkpoints"]["written"] == 2 and told["checkpoints"]["bytes"] > 0
    random_state = tmp_path / "checkpoints" / "step-000007" / "random_0.pt"
    data = bytearray(random_state.read_bytes())
    data[len(data) // 2] ^= 1
    random_state.write_bytes(data)
    resumed = models.run(tmp_path, *args)
    assert "step-000007 is damaged (random_0.pt)" in (tmp_path / "log.txt").read_text()
    assert resumed["resumed_from"] == "step-000005" and resumed["content"] == undisturbed["content"]


@pytest.mark.nightly
@pytest.mark.parametrize(("ranks", "number", "code"), [(1, signal.SIGTERM, 75), (2, signal.SIGUSR1, 1)])
def test_a_process_that_is_asked_to_stop_resumes_to_the_same_bytes(tmp_path, quiet, args_of, ranks, number, code):
    """Of two ranks torchrun alone hears it, and keeps their exit codes to itself."""
    case = ("sft", {**SFT, "epochs": 24}, {"world_size": 2} if ranks == 2 else {})
    _, undisturbed = quiet(*case)
    job = models.start_job(tmp_path, *args_of(*case), checkpoint_every_steps=5)
    until(lambda: max(checkpoint_names(tmp_path), default="") >= "step-000010", alive=lambda: job.poll() is None)
    os.kill(job.pid, number)
    assert job.wait(timeout=deadline(60)) == code and models.told(tmp_path)["cause"] == "preempted"
    (tmp_path / "done.json").unlink()
    assert models.run(tmp_path, *args_of(*case))["content"] == undisturbed["content"]


@pytest.mark.parametrize(
    ("change", "said"),
    [({"micro_batch_tokens": 64}, "micro_batch_tokens 1024 -> 64"), pytest.param(
        {"world_size": 2}, "world_size 1 -> 2", marks=pytest.mark.nightly
    )],
)  # fmt: skip
def test_other_numerics_than_a_checkpoints_are_refused_unless_they_are_allowed_and_recorded(tmp_path, quiet, args_of, change, said):
    """The loss goes on as if nothing had happened."""
    whole, _ = quiet("sft", LONG, {})
    assert models.run(tmp_path / "old", *args_of("sft", LONG, {}), checkpoint_every_steps=9)["ok"]
    args, folder = args_of("sft", LONG, change), resumable(tmp_path / "new", tmp_path / "old", 9)
    done = models.run(folder, *args)
    assert not done["ok"] and done["cause"] == "refused" and said in done["message"]
    done = models.run(folder, *args, {"allow_numerics_change": True})
    assert done["ok"] and done["marks"] == [f"numerics changed at step 9: {said}"], done
    found, expected = ([row["loss"] for row in rows_of(folder)] for folder in (folder, whole))
    assert found == pytest.approx(expected, rel=2e-4)


def test_a_loss_that_is_no_number_ends_the_job_and_leaves_no_checkpoint_of_it(tmp_path, args_of):
    config = {**LONG, "optimizer": {"learning_rate": 1.0, "weight_decay": 1e3, "schedule": "constant"}}
    done = models.run(tmp_path, *args_of("sft", config, {}), checkpoint_every_steps=1)
    assert not done["ok"] and done["cause"] == "not_finite" and "lower optimizer.learning_rate (1.0)" in done["message"]
    logged = (tmp_path / "curve.jsonl").read_text().splitlines()
    assert max(int(path.name[5:]) for path in (tmp_path / "checkpoints").glob("step-*")) <= len(logged)


@pytest.mark.proves("placement.checkpoint_every_steps")
def test_what_a_killed_job_leaves_behind_holds_up_nobody(tmp_path, args_of):
    """A curve without a checkpoint, and a half-written checkpoint."""
    (tmp_path / "checkpoints" / ".step-000002").mkdir(parents=True)
    (tmp_path / "curve.jsonl").write_text('{"step": 1, "loss": 9.0}\n')
    done = models.run(tmp_path, *args_of("sft", SFT, {}), checkpoint_every_steps=3)
    assert done["ok"], done
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


def test_rows_that_do_not_fit_are_counted_and_none_left_is_an_error(tmp_path, args_of):
    done = models.run(tmp_path, *args_of("sft", {**SFT, "max_length": 8}, {}))
    assert not done["ok"] and "none of 28 rows is left" in done["message"]
