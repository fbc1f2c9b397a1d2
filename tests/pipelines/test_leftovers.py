"""What a run that was killed, canceled or abandoned has left: it is completed, taken or cleared, and nobody waits for ever."""

import re
import shutil
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

import pytest
from commands import InProcessCommand
from running_lab import CLEAN, Died, Lab, outcomes, status
from waiting import until

from pedigree.configs.language.graph import Node
from pedigree.pipelines.cli.running import run_what_is_due
from pedigree.pipelines.cli.scratch import survey
from pedigree.pipelines.jobs import attempts
from pedigree.pipelines.jobs.context import RunContext, StageFailed
from pedigree.pipelines.jobs.lease import lease
from pedigree.pipelines.jobs.preparation import InputsGone
from pedigree.pipelines.ledger import lock_files
from pedigree.pipelines.run import ensure as ensure_module
from pedigree.pipelines.run import runs as runs_module
from pedigree.pipelines.run.ensure import Result, ensure, identify
from pedigree.pipelines.run.runs import run_graph


def test_a_parent_that_a_killed_restore_left_incomplete_is_completed(finished: Lab) -> None:
    """The record comes first, so that the parent looks finished to a run that has not selected it."""
    finished.edit("configs/recipes/lab.yaml", "ngram: 5", "ngram: 6")
    artifact, before = finished.root / "artifacts/lab/clean", finished.contents()
    (artifact / "lineage.json").unlink()
    finished.forget_runs()
    (end,) = run_graph(finished.run(), {"lab/cleaner"})
    assert isinstance(end, Result) and end.outcome == "ran" and finished.runs() == ["cleaner"]
    (artifact / "run.json").unlink()
    assert outcomes(finished)["clean"] == "restored"
    assert finished.contents()["clean"] == before["clean"] and status(finished) == CLEAN


def test_an_input_that_is_removed_again_and_again_ends_the_stage_with_its_name(finished: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    finished.edit("configs/recipes/lab.yaml", "ngram: 5", "ngram: 6")
    prepare = ensure_module.prepare

    def removes(*given: Any) -> None:
        (finished.root / "artifacts/lab/clean/lineage.json").unlink()
        prepare(*given)

    monkeypatch.setattr(ensure_module, "prepare", removes)
    (end,) = run_graph(finished.run(), {"lab/cleaner"})
    assert isinstance(end, StageFailed) and end.cause == "inputs_moved"
    assert re.fullmatch(r"artifacts/lab/clean/lineage.json does not exist: restore it, or rerun the stage that makes it", end.message)


def test_a_canceled_run_prepares_no_further_round(finished: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    finished.edit("configs/recipes/lab.yaml", "ngram: 5", "ngram: 6")
    run = finished.run()

    def gone(*given: Any) -> None:
        run.cancelled.set()
        raise InputsGone("replaced")

    monkeypatch.setattr(ensure_module, "prepare", gone)
    with pytest.raises(StageFailed) as end:
        ensure(run, run.graph.find("cleaner"))
    assert end.value.cause == "cancelled"


def dies_once_recorded(lab: Lab, **options: Any) -> Path:
    """A run of `clean` that is killed between the commit and the removal of its scratch folder, which it returns."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Died):
        patch.setattr(lock_files, "fault_point", lambda name: throw(Died()) if name == "lock replaced" else None)
        run = lab.run()
        ensure(run, run.graph.find("clean"), **options)
    (scratch,) = (lab.root / ".pedigree/scratch").iterdir()
    return scratch


def throw(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize("forced", [False, True])
def test_what_a_kill_right_after_the_commit_has_left_goes_with_the_next_run(finished: Lab, forced: bool) -> None:
    if not forced:
        finished.edit(
            "configs/recipes/lab.yaml", "in: {data: raw, benchmarks: [suite]}\n", "in: {data: raw, benchmarks: [suite]}\n    ngram: 9\n"
        )
    scratch, run = dies_once_recorded(finished, force=forced), finished.run()
    (found,) = survey(finished.project)[0]
    assert (found.state, found.address) == ("up to date", "lab/clean") and list((scratch / "checkpoints").iterdir())
    type_ = InProcessCommand(finished)
    assert "would delete 1 folder" in type_("scratch")
    if forced:  # each way to end without a job
        type_("run", "lab")
    else:
        assert ensure(run, run.graph.find("clean")).outcome == "unchanged"
    assert not scratch.exists() and finished.runs()[4:] == ["clean"]


def test_what_is_in_use_or_will_replace_an_artifact_is_left_though_the_stage_is_up_to_date(finished: Lab) -> None:
    scratch = dies_once_recorded(finished, force=True)
    with lease(finished.project.lease(scratch.name), "pedigree run lab"):
        assert set(outcomes(finished).values()) == {"unchanged"} and scratch.exists()
    (scratch / "done.json").unlink()  # as if `--force` had just begun
    assert set(outcomes(finished).values()) == {"unchanged"} and scratch.exists()
    assert survey(finished.project)[0][0].state == "would be resumed"


@pytest.mark.parametrize("reached", [False, True])
def test_an_abandoned_force_gives_way_to_the_cache_unless_it_got_somewhere(finished: Lab, reached: bool) -> None:
    run = finished.run()
    scratch = finished.project.scratch(identify(run, run.graph.find("clean"), run.identities()).key)
    attempts.begin_again(scratch)
    if reached:
        (scratch / "checkpoints/step-1").mkdir(parents=True)
    shutil.rmtree(finished.root / "artifacts/lab/clean")
    finished.forget_runs()
    assert outcomes(finished)["clean"] == ("ran" if reached else "restored")
    assert finished.runs() == (["clean"] if reached else []) and not scratch.exists()


def test_a_second_ctrl_c_does_not_claim_that_the_jobs_have_ended(
    finished: Lab, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ended, runner = threading.Event(), threading.main_thread()

    def ensured(run: RunContext, node: Node, **_: Any) -> Any:
        until(lambda: "wait" in called_by(runner) and "submit" not in called_by(runner))
        signal.pthread_kill(runner.ident or 0, signal.SIGINT)
        until(lambda: "shutdown" in called_by(runner))  # it waits for this thread
        signal.pthread_kill(runner.ident or 0, signal.SIGINT)
        ended.wait()
        raise StageFailed(node.address, "cancelled", "ended at last")

    monkeypatch.setattr(runs_module, "ensure", ensured)
    run = finished.run()
    try:
        assert run_what_is_due(run, frozenset({"lab/cleaner"}), frozenset({"lab/cleaner"}), "never") is None
    finally:
        ended.set()
        until(lambda: not runs_module.still_ending())
    out = capsys.readouterr().out
    assert "interrupted twice; jobs are still being ended" in out and "all jobs ended" not in out


def called_by(thread: threading.Thread) -> list[str]:
    """Names of the functions that a thread is in."""
    return [frame.name for frame in traceback.extract_stack(sys._current_frames()[thread.ident or 0])]
