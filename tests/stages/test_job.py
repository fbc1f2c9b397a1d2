import errno
import json

import models
import pytest
from waiting import deadline, until

from pedigree.configs.language.execution import Numerics, Placement
from pedigree.data.store.fence import FENCE, OVERTAKEN, Fence
from pedigree.stages import __main__ as job_process
from pedigree.stages.job.failures import Preempted
from pedigree.stages.job.job import Job, read_curve


def job(folder):
    return Job(folder=folder, address="r/s", key="k", numerics=Numerics(), placement=Placement(), source_files={})


def test_a_resumed_curve_has_no_repeats_and_no_gaps(tmp_path):
    first = job(tmp_path)
    for step in (1, 2, 3, 4):
        first.log(step, loss=float(step))
    resumed = job(tmp_path)
    resumed.rewind(2)  # the checkpoint was written after step 2
    for step in (3, 4, 5):
        resumed.log(step, loss=10.0 + step)
    rows = [json.loads(line) for line in (tmp_path / "curve.jsonl").read_text().splitlines()]
    assert [(row["step"], row["loss"]) for row in rows] == [(1, 1.0), (2, 2.0), (3, 13.0), (4, 14.0), (5, 15.0)]


@pytest.mark.parametrize("torn", ['{"step": 3, "lo', '{"step"', "\0" * 40, "{}\n[1]\n"])
def test_a_line_that_a_full_disk_has_torn_costs_that_line(tmp_path, torn):
    for step in (1, 2):
        job(tmp_path).log(step, loss=float(step))
    curve = tmp_path / "curve.jsonl"
    with curve.open("a") as stream:
        stream.write(torn)
    whole = curve.read_text()
    job(tmp_path).log(3, loss=3.0)  # a stage without checkpoints does not rewind
    assert [row["step"] for row in read_curve(curve)] == [1, 2, 3]
    curve.write_text(whole)
    resumed = job(tmp_path)
    resumed.rewind(2)
    resumed.log(3, loss=13.0)
    assert curve.read_text() == '{"step": 1, "loss": 1.0}\n{"step": 2, "loss": 2.0}\n{"step": 3, "loss": 13.0}\n'


def test_only_rank_zero_reports(tmp_path):
    other = Job(folder=tmp_path, address="r/s", key="k", numerics=Numerics(), placement=Placement(), source_files={}, rank=1)
    other.log(1, loss=1.0)
    other.progress(1, 1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_a_job_that_is_overtaken_ends_at_once_and_seals_nothing_more(tmp_path, monkeypatch, policy, conversations, ranks):
    """Each rank looks for itself. What was sealed before is whole, and nothing comes after it."""
    monkeypatch.setenv(FENCE, str(Fence.raised(tmp_path / "lease", 1).path))
    config = {"global_batch": 8, "epochs": 5000, "max_length": 64, "dtype": "fp32", "optimizer": {"learning_rate": 1e-3}}
    inputs = {"policy": {"policy": policy}, "data": {"data": conversations}}
    numerics = Numerics(threads=1, world_size=ranks)
    running = models.start_job(tmp_path / "job", "sft", config, inputs, numerics, checkpoint_every_steps=5, keep_checkpoints=99)
    checkpoints = tmp_path / "job" / "checkpoints"
    until(lambda: list(checkpoints.glob("step-*")), alive=lambda: running.poll() is None)
    assert sorted(path.name for path in (tmp_path / "job" / "pulses").glob("[0-9]*")) == ["0", "1"][:ranks]
    Fence.raised(tmp_path / "lease", 2)
    sealed = {path.name for path in checkpoints.glob("step-*")}
    code = running.wait(timeout=deadline(60))
    later = {path.name for path in checkpoints.glob("step-*")} - sealed
    assert len(later) <= 1 and not (tmp_path / "job" / "done.json").exists()  # one may have been between its look and its rename
    log = (tmp_path / "job" / "log.txt").read_text()
    assert "test/sft was taken over: this is submission 1.1 of its job, and the latest is 2.1" in log
    assert code == OVERTAKEN if ranks == 1 else code and str(OVERTAKEN) in log  # torchrun keeps exit codes to itself


ROWS = {"record": "conversation", "sources": [{"type": "arithmetic", "operations": ["add"], "digits": [1], "count": 3, "seed": 1}]}


@pytest.mark.parametrize(
    ("raised", "cause"), [(Preempted("asked to stop by SIGTERM"), "preempted"), (OSError(errno.ENOSPC, "full"), "disk_full")]
)
def test_what_goes_wrong_while_a_finished_result_is_written_to_the_disk_is_reported(tmp_path, monkeypatch, raised, cause):
    def fails(*_):
        raise raised

    monkeypatch.setattr(job_process, "sync_tree", fails)
    done = models.run(tmp_path, "prepare_data", ROWS, {}, Numerics(threads=1))
    assert (done["ok"], done["cause"]) == (False, cause)


def test_a_job_that_was_told_what_code_is_behind_it_does_not_read_all_of_it_again(tmp_path, monkeypatch):
    looks, code = [], {"sha256": "1" * 64, "files": {"stages/pair/run.py": "2" * 64}}
    monkeypatch.setattr(job_process, "fingerprint", lambda kind: looks.append(kind) or {"sha256": "3" * 64, "files": {}})
    told = [
        models.run(tmp_path / name, "prepare_data", ROWS, {}, Numerics(threads=1), asked)["made_by"]["fingerprint"]
        for name, asked in {"a": {"fingerprint": code}, "b": {"fingerprint": None}}.items()
    ]
    assert told == [code, {"sha256": "3" * 64, "files": {}}] and looks == ["prepare_data"]


def test_who_is_asked_to_stop_after_the_result_was_reported_has_ended_well(tmp_path, monkeypatch):
    def late(*given, **said):
        end(*given, **said)
        raise Preempted("asked to stop by SIGTERM")

    end = job_process.end
    monkeypatch.setattr(job_process, "end", late)
    assert models.run(tmp_path, "prepare_data", ROWS, {}, Numerics(threads=1))["ok"] is True
