"""Jobs that fail, hang, are killed, cancelled or pre-empted, and what the next attempt or run makes of them."""

import errno
import json
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from elsewhere import ListenersClock
from running_lab import CLEAN, RANKS, Lab, goes_on, outcomes, read, running_scratch, status
from waiting import InThread, deadline, until

from pedigree.pipelines.jobs.context import StageFailed
from pedigree.pipelines.jobs.live import live_jobs
from pedigree.pipelines.jobs.processes import processes_of
from pedigree.pipelines.run.ensure import Result, ensure, identify
from pedigree.pipelines.run.runs import NotRun, run_graph


@pytest.fixture
def processes(lab: Lab) -> None:
    """Its jobs are processes."""
    lab.processes = True


def test_a_bug_inside_a_job_is_no_refusal_and_is_not_tried_again(lab: Lab) -> None:
    lab.knobs(raw={"bug": "no such\nfield"})
    ends = {end.address: end for end in run_graph(lab.run())}
    failed = ends["lab/raw"]
    assert isinstance(failed, StageFailed) and failed.cause == "bug" and lab.runs().count("raw") == 1
    assert failed.message == "KeyError: 'no such\\nfield': a bug in Pedigree; please report it with the traceback at the end of the log"
    assert failed.log is not None and "in work\n" in (lab.root / failed.log).read_text()
    assert isinstance(ends["lab/suite"], Result) and ends["lab/clean"] == NotRun("lab/clean", "lab/raw failed")


def test_failed_stage_spoils_only_what_is_below(lab: Lab) -> None:
    lab.knobs(raw={"fail": "no rows\nat all"}, suite={"hold": "go"})
    told: list[tuple[str, str]] = []

    def watch(address: str, state: str, *_: Any, **__: Any) -> None:
        told.append((address, state))
        if (address, state) == ("lab/cleaner", "skipped"):
            (lab.root / "go").touch()

    with goes_on(lab):
        ends = run_graph(lab.run(watch=watch))
    suite, raw, clean, cleaner = ends
    assert isinstance(suite, Result) and isinstance(raw, StageFailed)
    assert (raw.cause, raw.message) == ("refused", "no rows\nat all")
    assert raw.log and "refused: no rows\nat all" in (lab.root / raw.log).read_text()
    assert (clean, cleaner) == (NotRun("lab/clean", "lab/raw failed"), NotRun("lab/cleaner", "lab/clean failed"))
    assert told.index(("lab/clean", "skipped")) < told.index(("lab/suite", "ran"))  # it is told at once
    assert lab.runs().count("raw") == 1  # a refusal is not tried again
    lab.knobs()
    assert outcomes(lab) == {"suite": "unchanged", "raw": "ran", "clean": "ran", "cleaner": "ran"}


@pytest.mark.proves("placement.retries")
def test_retries_end(lab: Lab) -> None:
    lab.knobs(raw={"errors": [5, 5, 5]})
    run = lab.run()
    with pytest.raises(StageFailed, match=r"Input/output error .*attempt 2 of 2"):
        ensure(run, run.graph.find("raw"))
    assert lab.runs() == ["raw", "raw"]


@pytest.mark.usefixtures("processes")
@pytest.mark.proves("placement.heartbeat_timeout_s")
def test_a_hung_job_is_ended_and_says_where_it_stood(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    lab.knobs(raw={"seconds": 600, "silent": True})
    lab.edit("configs/execution/lab.yaml", "retries: 1, heartbeat_timeout_s: 120", "retries: 0, heartbeat_timeout_s: 60")
    run, clock = lab.run(), ListenersClock(monkeypatch)
    thread = InThread(ensure, run, run.graph.find("raw"))
    until(lambda: "raw" in lab.runs(), alive=thread.alive)
    said = r"no heartbeat for \d+ s although its process is alive; placement.heartbeat_timeout_s allows 60\b"
    with pytest.raises(StageFailed, match=said) as failed:
        clock.silent(lambda: not thread.alive())
    scratch = running_scratch(lab, "raw")
    assert scratch and not list(processes_of(scratch))
    assert "the stack of each thread is at the end of its log" in str(failed.value)
    log = (scratch / "log.txt").read_text()
    # of the main thread alone, which nothing can disturb; it comes first unless both signals were pending together
    assert 'prepare_data/run.py", line' in log.partition("Stack (most recent call first):")[2].partition("Thread 0x")[0]


@pytest.mark.usefixtures("processes")
@pytest.mark.proves("placement.timeout_s")
def test_a_job_that_takes_too_long_is_ended_though_it_works(lab: Lab) -> None:
    lab.knobs(raw={"seconds": 600})
    lab.edit("configs/execution/lab.yaml", "retries: 1,", "retries: 0, timeout_s: 2,")
    run = lab.run()
    with pytest.raises(StageFailed, match=r"still running after \d+ s; placement.timeout_s allows 2"):
        ensure(run, run.graph.find("raw"))
    (scratch,) = (lab.root / ".pedigree" / "scratch").iterdir()  # it may not have come to the stage's code
    assert not list(processes_of(scratch))


@pytest.mark.usefixtures("processes")
def test_cancel_leaves_no_process_and_the_next_run_resumes(lab: Lab) -> None:
    lab.knobs(raw={"seconds": 60, "child": True})
    cancelled = threading.Event()
    run = lab.run(cancelled=cancelled)
    thread = InThread(ensure, run, run.graph.find("raw"))
    until(lambda: running_scratch(lab, "raw"), alive=thread.alive)
    scratch = running_scratch(lab, "raw")
    assert scratch and len(list(processes_of(scratch))) == 2
    cancelled.set()
    with pytest.raises(StageFailed) as failed:
        thread.join(60)
    assert failed.value.cause == "cancelled"
    assert not list(processes_of(scratch)) and (scratch / "checkpoints").exists()
    lab.knobs()
    lab.processes = False
    run = lab.run()
    assert ensure(run, run.graph.find("raw")).outcome == "ran"
    attempts = json.loads((lab.root / "artifacts/lab/raw/run.json").read_text())["attempts"]
    assert attempts[1]["resumed_from"].startswith("step-")


def test_ctrl_c_ends_the_jobs(lab: Lab) -> None:
    lab.knobs(raw={"seconds": 600})
    orchestrator = lab.orchestrator("run_graph(run, {'lab/raw'})")
    until(lambda: running_scratch(lab, "raw"))
    scratch = running_scratch(lab, "raw")
    orchestrator.send_signal(2)
    orchestrator.communicate(timeout=deadline(30))
    assert scratch and not list(processes_of(scratch))


def held_by_a_killed_orchestrator(lab: Lab) -> None:
    """Leaves the job of `raw` at work, which waits for the file `go`."""
    lab.knobs(raw={"hold": "go"})
    orchestrator = lab.orchestrator("run_graph(run, {'lab/raw'})")
    until((lab.root / "go.waiting").exists, alive=lambda: orchestrator.poll() is None)
    orchestrator.kill()
    orchestrator.communicate()


def releases(lab: Lab) -> Callable[..., None]:
    """A watcher that lets the job of `raw` go on when the run has re-attached to it."""

    def watch(address: str, state: str, detail: str = "", **_: object) -> None:
        if "re-attached" in detail:
            (lab.root / "go").touch()

    return watch


def test_job_of_a_killed_orchestrator_is_joined_even_without_its_job_file(lab: Lab) -> None:
    held_by_a_killed_orchestrator(lab)
    (scratch,) = (lab.root / ".pedigree/scratch").iterdir()
    (scratch / "job.json").unlink(missing_ok=True)  # written after the job has started
    assert "lab/raw" in {job.address for job in live_jobs(lab.project)}
    assert not (scratch / "job.json").exists()  # who looks writes nothing
    run = lab.run(watch=releases(lab))
    assert ensure(run, run.graph.find("raw")).outcome == "attached"
    assert lab.runs().count("raw") == 1
    outcomes(lab)
    assert status(lab) == CLEAN and sorted(lab.runs()) == ["clean", "cleaner", "raw", "suite"]


def test_two_runs_at_once_do_the_work_once(lab: Lab) -> None:
    lab.knobs(raw={"hold": "go"})
    told: list[str] = []

    def watch(address: str, state: str, detail: str = "", **_: object) -> None:
        if (address, state) == ("lab/raw", "waiting"):
            told.append(detail)
            (lab.root / "go").touch()

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(run_graph, lab.run(), {"lab/raw"})
        until((lab.root / "go.waiting").exists)
        ends = run_graph(lab.run(watch=watch))
        assert all(isinstance(end, Result) for end in (*ends, *first.result()))
    assert sorted(lab.runs()) == ["clean", "cleaner", "raw", "suite"]
    assert told[0].startswith(f"held by process {os.getpid()} since") and status(lab) == CLEAN


def test_other_numerics_do_not_resume_checkpoints(lab: Lab) -> None:
    """How products of bf16 are computed is no matter here: a job refuses checkpoints that were made the other way."""
    lab.edit("configs/execution/lab.yaml", "threads: 1", "threads: 1, bf16_products: units")
    lab.knobs(raw={"errors": [5, 5]})
    run = lab.run()
    with pytest.raises(StageFailed):
        ensure(run, run.graph.find("raw"))
    (scratch,) = (lab.root / ".pedigree" / "scratch").iterdir()
    (scratch / "checkpoints" / "step-1").mkdir(parents=True)
    lab.edit("configs/execution/lab.yaml", "threads: 1, bf16_products: units", "threads: 2, bf16_products: fp32")
    lab.knobs()
    run = lab.run()
    with pytest.raises(StageFailed, match=r"other numerics \(threads 1 -> 2\)\. Restore those \(set a number in the profile instead of"):
        ensure(run, run.graph.find("raw"))
    run.allow_numerics_change = True
    assert ensure(run, run.graph.find("raw")).outcome == "ran"
    assert read(lab, "raw", "run.json")["numerics"]["threads"] == 2


def test_out_of_memory_goes_on_with_smaller_micro_batches_and_says_so(lab: Lab) -> None:
    lab.write("configs/recipes/lab.yaml", RANKS)
    lab.knobs(sft={"errors": ["memory", "memory"]})
    lab.edit("configs/execution/lab.yaml", "retries: 1", "retries: 2")
    assert outcomes(lab)["sft"] == "ran"
    run, record = read(lab, "sft", "run.json"), read(lab, "sft", "record.json")
    assert [attempt["cause"] for attempt in run["attempts"]] == ["out_of_memory", "out_of_memory", "succeeded"]
    assert run["numerics"]["micro_batch_tokens"] == 256
    assert record["marks"] == [
        "micro_batch_tokens 1024 -> 512: memory had run out",
        "micro_batch_tokens 512 -> 256: memory had run out",
    ]
    assert status(lab) == CLEAN and outcomes(lab)["sft"] == "unchanged"


def test_out_of_memory_ends_a_stage_without_micro_batches_with_a_remedy_that_it_has(lab: Lab) -> None:
    lab.knobs(raw={"errors": ["memory"]})
    ends = {end.address: end for end in run_graph(lab.run())}
    failed = ends["lab/raw"]
    assert isinstance(failed, StageFailed) and failed.cause == "out_of_memory" and lab.runs().count("raw") == 1
    remedy = "use a larger machine, or a profile with fewer threads or engines for this stage"
    assert failed.message == f"cannot allocate, and nothing is left to shrink: {remedy}"


def test_a_later_run_goes_on_with_what_fitted_into_memory(lab: Lab) -> None:
    lab.write("configs/recipes/lab.yaml", RANKS)
    lab.knobs(sft={"errors": ["memory"]})
    lab.edit("configs/execution/lab.yaml", "retries: 1", "retries: 0")
    assert outcomes(lab)["sft"] == "StageFailed"
    lab.edit("configs/execution/lab.yaml", "retries: 0", "retries: 1")
    lab.forget_runs()
    lab.knobs(sft={"errors": ["memory", 5]})  # after the smaller micro-batch an unlucky disk: this run ends there
    assert outcomes(lab)["sft"] == "StageFailed"
    (scratch,) = (lab.root / ".pedigree" / "scratch").iterdir()
    (scratch / "checkpoints" / "step-1").mkdir(parents=True)
    lab.knobs()
    assert outcomes(lab)["sft"] == "ran"
    assert read(lab, "sft", "run.json")["numerics"]["micro_batch_tokens"] == 512


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (errno.ENOSPC, r"No space left on device.*: free some space and run the command again"),
        (errno.EROFS, r"Read-only file system.*must be writable"),
    ],
)
def test_what_a_disk_refuses_is_not_tried_again(lab: Lab, number: int, said: str) -> None:
    lab.knobs(raw={"errors": [number]})
    run = lab.run()
    with pytest.raises(StageFailed, match=said):
        ensure(run, run.graph.find("raw"))
    assert lab.runs() == ["raw"]


def test_explicit_resume_is_an_error_where_there_is_nothing_to_go_on_from(lab: Lab) -> None:
    run = lab.run()
    raw = run.graph.find("raw")
    run.require_checkpoint = frozenset({"lab/raw"})
    with pytest.raises(StageFailed, match="--require-checkpoint: there is no checkpoint"):
        ensure(run, raw)
    lab.knobs(raw={"seconds": 0.3, "errors": [5, 5]})
    run.require_checkpoint = frozenset()
    with pytest.raises(StageFailed, match=r"attempt 2 of 2"):
        ensure(run, raw)
    lab.knobs()
    (scratch,) = (lab.root / ".pedigree" / "scratch").iterdir()
    (scratch / "checkpoints" / "step-1").mkdir(parents=True)
    run.require_checkpoint = frozenset({"lab/raw"})
    assert ensure(run, raw).outcome == "ran"
    with pytest.raises(StageFailed, match="--require-checkpoint: it is up to date"):
        ensure(run, raw)


@pytest.mark.parametrize(("text", "begins"), [("", False), ('["0123", {}]\n', True)])
def test_explicit_resume_goes_on_from_answers_and_not_from_an_empty_log(lab: Lab, text: str, begins: bool) -> None:
    run = lab.run()
    raw = run.graph.find("raw")
    scratch = run.project.scratch(identify(run, raw, run.identities()).key)
    (scratch / "chunks").mkdir(parents=True)
    (scratch / "chunks" / "answers.jsonl").write_text(text)
    run.require_checkpoint = frozenset({"lab/raw"})
    if begins:
        assert ensure(run, raw).outcome == "ran"
    else:
        with pytest.raises(StageFailed, match="--require-checkpoint: there is no checkpoint"):
            ensure(run, raw)


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("number", [signal.SIGUSR1, pytest.param(signal.SIGTERM, marks=pytest.mark.nightly)])
def test_a_pre_empted_job_is_resumed_and_counts_as_no_failure(lab: Lab, number: int) -> None:
    lab.knobs(raw={"seconds": 60})
    lab.edit("configs/execution/lab.yaml", "retries: 1", "retries: 0")
    run = lab.run()
    with ThreadPoolExecutor(1) as pool:
        end = pool.submit(ensure, run, run.graph.find("raw"))
        until(lambda: running_scratch(lab, "raw"))
        scratch = running_scratch(lab, "raw")
        assert scratch
        until(lambda: json.loads((scratch / "progress.json").read_text())["step"] > 15)  # pre-empted at once, it would count
        lab.knobs()
        os.kill(json.loads((scratch / "job.json").read_text())["told"]["process"]["pid"], number)
        assert end.result().outcome == "ran"
    causes = [attempt["cause"] for attempt in read(lab, "raw", "run.json")["attempts"]]
    assert causes == ["preempted", "succeeded"]
