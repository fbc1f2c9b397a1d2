"""`placement.checkpoint_url` through the whole of `pedigree run`: another machine, another clone, the same command."""

import base64
import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from elsewhere import ListenersClock
from faulty_store import KEYS, s3_server
from running_lab import PROFILE, Lab
from waiting import InThread, deadline, until

from pedigree.data.artifacts import mirror as mirrors
from pedigree.data.artifacts.mirror import Lease, Mirror
from pedigree.data.store import storage
from pedigree.pipelines.jobs.checkpoint_store import clear
from pedigree.pipelines.jobs.context import StageFailed
from pedigree.pipelines.jobs.processes import kill_all
from pedigree.pipelines.run.ensure import Result
from pedigree.pipelines.run.runs import run_graph

CHUNKED = '''
"""Rows that are made chunk by chunk."""

import json
import time
from pathlib import Path

from pedigree.data.artifacts.artifacts import write_text
from pedigree.data.records.records import save
from pedigree.stages.job.mirroring import open_mirror


def run(config, inputs, job):
    mirror, rows = open_mirror(job), []
    files = [job.folder / "chunks" / f"{n}.json" for n in range(config.sources[0].count)]
    if mirror is not None:
        mirror.fetch_chunks(job.folder / "chunks")
    for n, file in enumerate(files):
        if not file.exists():
            with Path("runs.log").open("a") as stream:
                stream.write(f"{job.address}/{n}\\n")
            write_text(file, json.dumps({"n": n}))
            if mirror is not None:
                mirror.offer_chunk(file)
            if Path("slow").exists():
                time.sleep(0.4)
            while n == 2 and Path("wait").exists():
                job.progress(n + 1, len(files))
                time.sleep(0.02)
        job.progress(n + 1, len(files))
        rows.append(json.loads(file.read_text()))
    save(job.out, "report", rows)
    return {"rows": len(rows)}
'''


def lab_with(folder: Path, url: str) -> Lab:
    folder.mkdir()
    lab = Lab(folder, processes=True, whole=True)
    (lab.code / "stages" / "prepare_data" / "run.py").write_text(CHUNKED)
    silence = round(deadline(6))  # it counts as gone then; the start of a job must take less
    placement = f"placement: {{heartbeat_timeout_s: {silence}, checkpoint_url: {json.dumps(url)}, "
    lab.write("configs/execution/lab.yaml", PROFILE.replace("placement: {", placement).replace(", heartbeat_timeout_s: 120", ""))
    lab.shell("git add -A && git -c user.name=lab -c user.email=lab@example.org commit -qm placed")
    return lab


def ran_well(lab: Lab, *forced: str) -> None:
    (end,) = run_graph(lab.run(), {"lab/raw"}, forced)
    assert isinstance(end, Result), end


def killed(lab: Lab, url: str) -> str:
    """The run is killed with all its jobs once three chunks of `lab/raw` have been sent; returns the key."""
    lab.write("wait", "")
    process = lab.orchestrator("run_graph(run, {'lab/raw'})")

    def sent() -> list[str]:
        specs = (lab.root / ".pedigree/scratch").glob("*/spec.json")
        keys = [path.parent.name for path in specs if json.loads(path.read_text())["address"] == "lab/raw"]
        return [key for key in keys if len(Mirror.of(url, key).chunks()) >= 3]

    (key,) = until(sent, alive=lambda: process.poll() is None)
    os.kill(process.pid, signal.SIGKILL)
    for scratch in (lab.root / ".pedigree/scratch").iterdir():
        kill_all(scratch)
    process.communicate()
    return key


@pytest.fixture(params=["folder", pytest.param("s3", marks=pytest.mark.nightly)])
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    if request.param == "folder":
        yield f"file://{tmp_path}/store"
        return
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    with s3_server("bucket") as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server)
        yield "s3://bucket/runs"


@pytest.mark.proves("placement.checkpoint_url")
def test_another_clone_goes_on_with_a_job_whose_machine_is_gone(tmp_path: Path, url: str) -> None:
    key = killed(lab_with(tmp_path / "one", url), url)
    sent = len(Mirror.of(url, key).chunks())
    assert sent == 3
    other = lab_with(tmp_path / "two", url)
    other.write("slow", "")  # what a job has not sent when it ends is not sent any more
    ran_well(other)
    assert rows_of(other) == [{"n": n} for n in range(5)]
    made = [line for line in other.runs() if line.startswith("raw/")]
    assert made == [f"raw/{n}" for n in range(sent, 5)]
    told = json.loads((other.root / "artifacts/lab/raw/run.json").read_text())
    assert [attempt["cause"] for attempt in told["attempts"]] == ["lost", "succeeded"]
    assert told["attempts"][1]["checkpoints"]["mirrored"] >= 1
    for path in (other.root / "artifacts").rglob("*.json"):
        assert url not in path.read_text(), path
    assert storage.entries(f"{url}/{key}") == []


# --- its code ----------------------------------------------------------------------------------------------------------

STAGE = "stages/prepare_data/run.py"


@pytest.fixture
def moved(tmp_path: Path) -> Lab:
    """Another clone, in which somebody has edited the stage since: a job whose machine is gone has sent three of five chunks."""
    url = f"file://{tmp_path}/store"
    killed(lab_with(tmp_path / "one", url), url)
    other = lab_with(tmp_path / "two", url)
    path = other.code / STAGE
    path.write_text(path.read_text().replace('{"n": n}', '{"n": n, "edited": True}'))
    return other


def rows_of(lab: Lab) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (lab.root / "artifacts/lab/raw/payload/rows.jsonl").read_text().splitlines()]


def attempts_of(lab: Lab) -> list[dict[str, Any]]:
    return json.loads((lab.root / "artifacts/lab/raw/run.json").read_text())["attempts"]


def ended(lab: Lab, choice: Any) -> tuple[Any, list[str]]:
    """(how `raw` ended, what people hear after the run)."""
    run = lab.run()
    run.on_code_change = choice
    (end,) = run_graph(run, {"lab/raw"})
    return end, list(run.ledger.notices)


@pytest.mark.nightly
@pytest.mark.parametrize("choice", ["keep", "take", "rerun"])
def test_a_job_that_goes_on_elsewhere_has_the_same_choice_of_code(moved: Lab, choice: str) -> None:
    end, notices = ended(moved, choice)
    assert isinstance(end, Result) and end.outcome == "ran"
    edited = [row.get("edited", False) for row in rows_of(moved)]
    made_here = len([line for line in moved.runs() if line.startswith("raw/")])
    attempts = attempts_of(moved)
    snapshots = [attempt["code"]["snapshot"] for attempt in attempts]
    marks = json.loads((moved.root / "artifacts/lab/raw/record.json").read_text())["marks"]
    said = [notice for notice in notices if STAGE in notice and "--on-code-change take" in notice]
    match choice:
        case "keep":
            assert not any(edited) and 1 <= made_here < 5 and marks == []
            assert said and "resumes from finished chunks of another machine" in said[0]
            assert len(attempts) == 2 and attempts[1]["code"] == attempts[0]["code"]  # with its commit: not that of this clone
        case "take":
            assert edited == [False] * (5 - made_here) + [True] * made_here and 1 <= made_here < 5
            assert marks == [f"code changed at finished chunks: {STAGE}"] and snapshots[0] != snapshots[1]
        case "rerun":
            assert all(edited) and made_here == 5 and marks == []


def test_code_that_another_machine_has_sent_is_proved_before_it_runs(moved: Lab, tmp_path: Path) -> None:
    for sent in (tmp_path / "store").glob("*/code/*.json"):
        files = json.loads(sent.read_text())
        sent.write_text(json.dumps(files | {f"pedigree/{STAGE}": base64.b64encode(b"raise SystemExit('run by a stranger')").decode()}))
    end, _ = ended(moved, "keep")
    assert isinstance(end, StageFailed) and end.cause == "refused" and moved.runs() == []
    assert "of another machine, whose code is not available" in end.message and "is not the code" in end.message
    assert "--on-code-change take" in end.message and "--on-code-change rerun" in end.message
    end, _ = ended(moved, "take")
    (mark,) = json.loads((moved.root / "artifacts/lab/raw/record.json").read_text())["marks"]
    then, now = (attempt["code"]["snapshot"] for attempt in attempts_of(moved))
    assert isinstance(end, Result) and mark == f"code changed at finished chunks: {then[:12]} -> {now[:12]}"


def test_a_mistake_is_told_before_any_job_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "CHECK_PAUSES_S", ())
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    with s3_server("bucket") as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server)
        lab = lab_with(tmp_path / "lab", "s3://no-such-bucket/runs")
        (end,) = run_graph(lab.run(), {"lab/raw"})
    assert isinstance(end, StageFailed) and end.cause == "refused" and lab.runs() == []
    assert "placement.checkpoint_url s3://no-such-bucket/runs: the bucket does not exist: create it" in end.message


def test_force_begins_again_whatever_was_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"file://{tmp_path}/store"
    one = lab_with(tmp_path / "one", url)
    waiting = Lease(f"{url}/{killed(one, url)}", "waiting", "this test", 60.0)
    clock, thread = ListenersClock(monkeypatch), InThread(waiting.acquire, lambda said: None)
    clock.silent(lambda: not thread.alive())  # the job that was killed counts as gone
    waiting.release()
    (one.root / "wait").unlink()
    one.forget_runs()
    ran_well(one, "lab/raw")
    assert [line for line in one.runs() if line.startswith("raw/")] == [f"raw/{n}" for n in range(5)]


def test_what_another_living_machine_has_sent_is_not_cleared_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    monkeypatch.setattr(mirrors, "POLL_S", 0.05)
    url, scratch = f"file://{tmp_path}/store", tmp_path / "scratch" / "key"
    (tmp_path / "chunk.json").write_text("[]")
    Mirror.of(url, scratch.name).upload_chunk(tmp_path / "chunk.json")
    other = Lease(f"{url}/{scratch.name}", "other", "process 1 on elsewhere", 60.0)
    other.acquire(lambda said: None)
    ended = threading.Event()

    def live() -> None:
        while not ended.wait(0.02):
            other.beat()

    heart = threading.Thread(target=live)
    heart.start()
    clear(url, scratch)
    ended.set()
    heart.join()
    assert other.still_ours() and Mirror.of(url, scratch.name).chunks() and "another machine is using it" in caplog.text
