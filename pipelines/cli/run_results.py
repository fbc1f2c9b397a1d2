"""Results of `run` and `rehearse`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pedigree.data.artifacts.artifacts import ArtifactError
from pedigree.pipelines.jobs.context import RunContext, StageFailed
from pedigree.pipelines.jobs.events import Outcome
from pedigree.pipelines.json_documents import rounded
from pedigree.pipelines.ledger.transfers import LedgerError
from pedigree.pipelines.lineage.waivers import Split
from pedigree.pipelines.publish.commits import Commit
from pedigree.pipelines.publish.shown_stages import report_path, scores_of, waived_in
from pedigree.pipelines.run.ensure import Result
from pedigree.pipelines.run.runs import StageEnd, current_among


@dataclass(frozen=True)
class CurrentStage:
    """A stage that is up to date."""

    address: str
    kind: str
    outcome: Outcome
    """`remote`: done, its files are in the remote; `attached`: done by a job of an earlier run."""
    seconds: Annotated[float, rounded(3)]
    id: str | None
    content: str | None


@dataclass(frozen=True)
class FailedStage:
    """A stage that failed."""

    address: str
    kind: str
    outcome: Literal["failed"]
    cause: str
    message: str
    log: str | None


@dataclass(frozen=True)
class SkippedStage:
    """A stage that was not attempted."""

    address: str
    kind: str
    outcome: Literal["not_run"]
    message: str


@dataclass(frozen=True)
class RunResult:
    """How a run ended."""

    outcome: Literal["done", "failed", "interrupted"]
    seconds: Annotated[float, rounded(3)]
    """Duration of the command."""
    stages: tuple[CurrentStage | FailedStage | SkippedStage, ...]
    """Empty if the run was interrupted."""
    scores: Mapping[str, Any]
    """Evaluation that is up to date after this run → scores, as in `payload/scores.json`."""
    waived: Mapping[str, list[Split]]
    """Evaluation → its scores affected by a waiver."""
    report: str | None
    """Path of the report."""
    commit: Commit | None
    """Made by `--commit`."""
    notes: tuple[str, ...]


@dataclass(frozen=True)
class RehearsalResult(RunResult):
    """How a rehearsal ended, and what it checked."""

    project: str
    """Folder of the rehearsal project."""
    profile: str
    proved: Mapping[str, Any]
    """`rows`, `decontamination`, `models`, `training`, `suites` (lists), `verifiers` (name → `right`, `wrong`, `unknown`), `not_proved`
    (each with `what` and `changes`: `where` (address or profile), `setting`, `real`, `rehearsed`, `reason`)."""


def run_result(run: RunContext, ends: Sequence[StageEnd] | None, seconds: float, commit: Commit | None) -> RunResult:
    """Sum up a run; `ends` is None if it was interrupted."""
    report, current = report_path(run.project, run.graph.recipe), current_among(ends or ())
    return RunResult(
        outcome="interrupted" if ends is None else "done" if all(isinstance(end, Result) for end in ends) else "failed",
        seconds=seconds,
        stages=tuple(_stage(run, end) for end in ends or ()),
        scores=scores_of(run.project, run.graph, current),
        waived=waived_in(run.project, run.graph, current),
        report=report.relative_to(run.project.root).as_posix() if report.exists() else None,
        commit=commit,
        notes=tuple(run.ledger.notices),
    )


def _stage(run: RunContext, end: StageEnd) -> CurrentStage | FailedStage | SkippedStage:
    kind = run.graph.nodes[end.address].kind
    if isinstance(end, StageFailed):
        return FailedStage(end.address, kind, "failed", end.cause, end.message, end.log)
    if not isinstance(end, Result):
        return SkippedStage(end.address, kind, "not_run", end.because)
    try:
        record = run.ledger.record(end.address)
    except (ArtifactError, LedgerError):  # its files may be only in the remote
        return CurrentStage(end.address, kind, end.outcome, end.seconds, None, None)
    return CurrentStage(end.address, kind, end.outcome, end.seconds, record.id, record.content)
