"""The training stages as jobs: one gradient for every cut of the batch, and exact resume."""

import json
import math
import os
import shutil
import signal
import time

import models
import pytest

from configs.execution import Numerics
from data.assets import extensions_folder

pytestmark = pytest.mark.slow
SFT = {"global_batch": 8, "epochs": 1, "max_length": 64, "dtype": "fp32", "optimizer": {"learning_rate": 1e-3}}


@pytest.fixture(scope="module")
def sft_curve(tmp_path_factory, policy, conversations):
    """Loss and gradient norm of four steps, for one way to run the same recipe."""
    seen = {}

    def run(reduction="mean", **numerics):
        name = json.dumps([reduction, numerics])
        if name not in seen:
            folder = tmp_path_factory.mktemp("sft")
            config = {**SFT, "loss_reduction": reduction}
            done = models.run_job(folder, "sft", config, inputs(policy, conversations), Numerics(threads=1, **numerics))
            assert done["ok"], done
            curve = [json.loads(line) for line in (folder / "curve.jsonl").read_text().splitlines()]
            seen[name] = [(row["loss"], row["grad_norm"], row["trained_tokens"]) for row in curve]
        return seen[name]

    return run


def inputs(policy, conversations):
    return {"policy": {"policy": policy}, "data": {"data": conversations}}


CUTS = {
    "small packs": {"micro_batch_tokens": 48},
    "padded": {"packing": False, "micro_batch_sequences": 3},
    "gradient checkpointing": {"gradient_checkpointing": True},
    "deterministic": {"deterministic": True},
    "ZeRO 3": {"zero_stage": 3},
    "two ranks, ZeRO 0": {"world_size": 2, "zero_stage": 0},
    "two ranks, ZeRO 1": {"world_size": 2},
    "two ranks, ZeRO 2, small packs": {"world_size": 2, "zero_stage": 2, "micro_batch_tokens": 48},
    "two ranks, ZeRO 3, padded": {"world_size": 2, "zero_stage": 3, "packing": False},
}


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS.keys())
def test_the_configured_batch_is_the_batch(sft_curve, cut):
    """Losses follow gradients: equal losses over all steps are equal gradients, to rounding."""
    assert len(sft_curve()) == 4  # 28 rows by 8: the last batch holds 4
    for ours, reference in zip(sft_curve(**cut), sft_curve(), strict=True):
        assert ours == pytest.approx(reference, rel=2e-4)


def test_the_sum_loss_has_no_denominator(sft_curve):
    """The first gradient is that of the mean times the trained tokens; Adam hides the factor from the weights, not from the norm."""
    (_, norm, tokens), (_, sum_norm, _) = sft_curve()[0], sft_curve("sum")[0]
    assert sum_norm == pytest.approx(norm * tokens, rel=1e-4)


def test_ranks_with_unequal_answers_make_equally_many_collectives_under_zero_3(tmp_path):
    """The head is large enough to be partitioned, and is called once per piece of logits: 40 tokens are 5 pieces, 3 are one."""
    policy = models.tiny_policy(tmp_path / "policy", hidden=512)
    rows = models.arithmetic(2)
    rows[0]["messages"][1]["content"] = "1 2 3 4 5 6 7 8 9 " * 2
    data = models.dataset(tmp_path / "data", "conversation", rows)
    losses = []
    for name, numerics in (("one", {}), ("two", {"world_size": 2, "zero_stage": 3})):
        config = {**SFT, "global_batch": 2, "epochs": 3}
        done = models.run_job(tmp_path / name, "sft", config, inputs(policy, data), Numerics(threads=1, logprob_chunk=8, **numerics))
        assert done["ok"], done
        losses.append([json.loads(line)["loss"] for line in (tmp_path / name / "curve.jsonl").read_text().splitlines()])
    assert losses[1] == pytest.approx(losses[0], rel=2e-4)


def test_the_first_loss_of_an_untrained_model_is_log_v(sft_curve, policy):
    vocabulary = json.loads((policy.payload / "config.json").read_text())["vocab_size"]
    assert sft_curve()[0][0] == pytest.approx(math.log(vocabulary), rel=0.05)


def resume_cases():
    dpo = {"global_batch": 8, "max_length": 64, "loss": {"type": "dpo"}, "optimizer": {"learning_rate": 1e-3, "schedule": "cosine"}}
    return {
        "sft bf16": ("sft", {**SFT, "dtype": "bf16", "epochs": 12}, {}),
        "sft two ranks ZeRO 3": ("sft", {**SFT, "epochs": 12}, {"world_size": 2, "zero_stage": 3}),
        "sft with adapters, two ranks ZeRO 2": (
            "sft",
            {**SFT, "dtype": "bf16", "epochs": 12, "lora": {"rank": 4}},
            {"world_size": 2, "zero_stage": 2},
        ),
        "sft compiled": ("sft", {**SFT, "dtype": "bf16", "epochs": 12}, {"kernels": "compiled"}),
        "dpo bf16": ("preference_train", {**dpo, "epochs": 12}, {}),
        "kto fp32 two ranks ZeRO 2": (
            "preference_train",
            {**dpo, "loss": {"type": "kto"}, "dtype": "fp32", "epochs": 12},
            {"world_size": 2, "zero_stage": 2},
        ),
        "reward model two ranks": ("reward_model", {**{k: dpo[k] for k in dpo if k != "loss"}, "epochs": 12}, {"world_size": 2}),
    }


@pytest.mark.parametrize(("kind", "config", "numerics"), resume_cases().values(), ids=resume_cases().keys())
def test_a_killed_job_goes_on_and_ends_in_the_same_bytes(tmp_path, policy, conversations, preferences, kind, config, numerics):
    given = inputs(policy, conversations) if kind == "sft" else {"policy": {"p": policy}, "preferences": {"d": preferences}}
    args = (kind, config, given, Numerics(threads=1, **numerics))
    undisturbed = models.run_job(tmp_path / "a", *args)
    victim = models.start_job(tmp_path / "b", *args, checkpoint_every_steps=5)
    wait_until(lambda: any((tmp_path / "b" / "checkpoints").glob("step-*1[05]")), victim)
    models.kill(victim, tmp_path / "b")
    assert not (tmp_path / "b" / "done.json").exists(), "the job ended before it was killed: make it longer"
    resumed = models.run_job(tmp_path / "b", *args, checkpoint_every_steps=5)
    assert "resumed from step-" in (tmp_path / "b" / "log.txt").read_text()
    assert resumed["content"] == undisturbed["content"] and resumed["metrics"] == undisturbed["metrics"]
    steps = [json.loads(line)["step"] for line in (tmp_path / "b" / "curve.jsonl").read_text().splitlines()]
    assert steps == list(range(1, undisturbed["metrics"]["steps"] + 1))


@pytest.mark.parametrize(("ranks", "number"), [(1, signal.SIGTERM), (2, signal.SIGUSR1)])
def test_pre_emption_writes_a_checkpoint_and_damage_falls_back_loudly(tmp_path, policy, conversations, ranks, number):
    args = ("sft", {**SFT, "epochs": 12}, inputs(policy, conversations), Numerics(threads=1, world_size=ranks))
    undisturbed = models.run_job(tmp_path / "a", *args)
    job = models.start_job(tmp_path / "b", *args, checkpoint_every_steps=5)
    wait_until(lambda: any((tmp_path / "b" / "checkpoints").glob("step-*10")), job)
    os.kill(job.pid, number)  # of two ranks torchrun alone hears it
    assert job.wait(timeout=60) == (75 if ranks == 1 else 1)  # torchrun keeps exit codes to itself
    told = json.loads((tmp_path / "b" / "done.json").read_text())
    assert told["cause"] == "preempted" and told["checkpoints"]["written"] > 1 and told["checkpoints"]["bytes"] > 0
    newest = max((tmp_path / "b" / "checkpoints").glob("step-*"))
    random_state = newest / "random_0.pt"
    data = bytearray(random_state.read_bytes())
    data[len(data) // 2] ^= 1
    random_state.write_bytes(data)
    (tmp_path / "b" / "done.json").unlink()
    resumed = models.run_job(tmp_path / "b", *args, checkpoint_every_steps=5)
    assert f"{newest.name} is damaged (random_0.pt)" in (tmp_path / "b" / "log.txt").read_text()
    assert resumed["content"] == undisturbed["content"]


def test_a_checkpoint_of_other_numerics_is_refused_with_what_changed(tmp_path, policy, conversations):
    args = ("sft", {**SFT, "epochs": 12}, inputs(policy, conversations))
    job = models.start_job(tmp_path, *args, Numerics(threads=1), checkpoint_every_steps=5)
    wait_until(lambda: any((tmp_path / "checkpoints").glob("step-*10")), job)
    models.kill(job, tmp_path)
    done = models.run_job(tmp_path, *args, Numerics(threads=1, micro_batch_tokens=64))
    assert not done["ok"] and done["cause"] == "refused" and "micro_batch_tokens 1024 -> 64" in done["message"]


RESHAPES = {
    "one rank to two": ({}, {"world_size": 2}),
    "two ranks to one, ZeRO 1 to 2": ({"world_size": 2}, {"zero_stage": 2}),
    "two ranks to one, ZeRO 3": ({"world_size": 2, "zero_stage": 3}, {"zero_stage": 3}),
    "smaller micro-batches": ({}, {"micro_batch_tokens": 48}),
}


@pytest.mark.parametrize(("before", "after"), RESHAPES.values(), ids=RESHAPES.keys())
def test_a_checkpoint_is_resharded_when_asked_and_the_record_says_so(tmp_path, policy, conversations, before, after):
    """The loss goes on as if nothing had happened: weights, moments and step of Adam have all come along."""
    config, given = {**SFT, "epochs": 3}, inputs(policy, conversations)
    whole = models.run_job(tmp_path / "a", "sft", config, given, Numerics(threads=1))
    job = models.start_job(tmp_path / "b", "sft", config, given, Numerics(threads=1, **before), checkpoint_every_steps=5)
    wait_until(lambda: any((tmp_path / "b" / "checkpoints").glob("step-*05")), job)
    models.kill(job, tmp_path / "b")
    (tmp_path / "b" / "done.json").unlink(missing_ok=True)
    for newer in (tmp_path / "b" / "checkpoints").glob("step-*10"):
        shutil.rmtree(newer)
    done = models.run_job(tmp_path / "b", "sft", config, given, Numerics(threads=1, **after), {"reshard": True})
    assert done["ok"], done
    (mark,) = done["marks"]
    changed = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    assert mark.startswith("numerics changed at step 5: ") and all(f"{name} " in mark for name in changed)
    curves = [[json.loads(line)["loss"] for line in (tmp_path / x / "curve.jsonl").read_text().splitlines()] for x in "ab"]
    assert len(curves[1]) == whole["metrics"]["steps"] == 12
    assert curves[1] == pytest.approx(curves[0], rel=2e-4)


def test_dpo_begins_at_log_two_and_bradley_terry_separates(tmp_path, policy, preferences):
    given = {"policy": {"p": policy}, "preferences": {"d": preferences}}
    common = {"global_batch": 8, "max_length": 64, "dtype": "fp32", "optimizer": {"learning_rate": 3e-3}}
    dpo = models.run_job(tmp_path / "a", "preference_train", {**common, "loss": {"type": "dpo_norm"}}, given, Numerics(threads=1))
    assert dpo["metrics"]["first_loss"] == pytest.approx(math.log(2), abs=1e-5) and dpo["metrics"]["loss"] < 0.6
    reward = models.run_job(tmp_path / "b", "reward_model", {**common, "epochs": 4, "holdout": 0.3}, given, Numerics(threads=1))
    assert reward["metrics"]["held_out_pairs"] > 3 and reward["metrics"]["held_out_accuracy"] == 1.0


def test_a_loss_that_is_no_number_ends_the_job_and_leaves_no_checkpoint_of_it(tmp_path, policy, conversations):
    config = {**SFT, "epochs": 12, "optimizer": {"learning_rate": 1.0, "weight_decay": 1e3, "schedule": "constant"}}
    done = models.run_job(tmp_path, "sft", config, inputs(policy, conversations), Numerics(threads=1), checkpoint_every_steps=1)
    assert not done["ok"] and done["cause"] == "not_finite" and "lower optimizer.learning_rate (1.0)" in done["message"]
    logged = (tmp_path / "curve.jsonl").read_text().splitlines()
    assert max(int(path.name[5:]) for path in (tmp_path / "checkpoints").glob("step-*")) <= len(logged)


def test_what_a_killed_job_leaves_behind_holds_up_nobody(tmp_path, policy, conversations):
    """A curve without a checkpoint, a half-written checkpoint, and the file by which torch guards a compiled operation."""
    guard = extensions_folder() / "deepspeed_shm_comm" / "lock"
    guard.touch()
    (tmp_path / "checkpoints" / ".step-000002").mkdir(parents=True)
    (tmp_path / "curve.jsonl").write_text('{"step": 1, "loss": 9.0}\n')
    done = models.run_job(tmp_path, "sft", SFT, inputs(policy, conversations), Numerics(threads=1), checkpoint_every_steps=3)
    assert done["ok"] and not guard.exists(), done
    assert [json.loads(line)["step"] for line in (tmp_path / "curve.jsonl").read_text().splitlines()] == [1, 2, 3, 4]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000003"]


def test_rows_that_do_not_fit_are_counted_and_none_left_is_an_error(tmp_path, policy, conversations):
    done = models.run_job(tmp_path, "sft", {**SFT, "max_length": 8}, inputs(policy, conversations), Numerics(threads=1))
    assert not done["ok"] and "none of 28 rows is left" in done["message"]


def wait_until(condition, process):
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, "the job ended too early"
        assert time.monotonic() < deadline
        time.sleep(0.01)
