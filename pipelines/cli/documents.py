"""JSON documents printed by `--json`; docs/cli.md describes their schemas.

Renaming a field or changing its meaning requires a new `schema_version`; adding a field does not.
"""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from pedigree.configs.language.compile import overrides_of
from pedigree.data.artifacts.artifacts import ArtifactError
from pedigree.pipelines.cli.plan import SETTLED, PlanRow, beforehand, disk_total, misfits, totals
from pedigree.pipelines.cli.status import StageStatus
from pedigree.pipelines.estimate.estimates import document_of
from pedigree.pipelines.jobs.context import RunContext, StageFailed
from pedigree.pipelines.jobs.live import LiveJob
from pedigree.pipelines.ledger.transfers import LedgerError
from pedigree.pipelines.lineage.waivers import Split
from pedigree.pipelines.publish.commits import Commit
from pedigree.pipelines.publish.report import report_path, scores_of, waived_in
from pedigree.pipelines.rehearsal.preparing import Rehearsal
from pedigree.pipelines.run.ensure import Result
from pedigree.pipelines.run.runs import NotRun, StageEnd

if TYPE_CHECKING:  # tracing imports more than a plan needs
    from pedigree.pipelines.lineage.trace import Trace
    from pedigree.pipelines.maintain.forget import Forgetting
    from pedigree.pipelines.publish.attribution import Origin

SCHEMA_VERSION = 1


def plan_document(run: RunContext, rows: Sequence[PlanRow]) -> dict[str, Any]:
    """`pedigree plan --json`."""
    known, unknown = disk_total(rows)
    stages = [
        {
            "address": row.node.address,
            "kind": row.node.kind,
            "state": row.state.replace(" ", "_"),
            "reasons": list(row.reasons),
            "disk_bytes": row.disk,
            "batch": row.batch or None,
            "estimate": document_of(row.estimate),
        }
        for row in rows
    ]
    seconds, hours, untimed = totals(rows)
    free = shutil.disk_usage(run.project.root).free
    return _head("plan", run) | {
        "stages": stages,
        "to_run": sum(row.state not in SETTLED for row in rows),
        "disk": {"needed_bytes": known, "stages_of_unknown_size": unknown, "free_bytes": free},
        "time": {
            "seconds": round(seconds, 1),
            "wall_seconds": round(beforehand(run, rows).seconds, 1),
            "gpu_hours": round(hours, 3),
            "stages_of_unknown_time": untimed,
        },
        "slots": run.execution.slots,
        "fits": not misfits(rows),
        "published": run.graph.published.model_dump(mode="json") if run.graph.published else None,
    }


def status_document(run: RunContext, stages: Sequence[StageStatus], uncommitted: Sequence[str]) -> dict[str, Any]:
    """`pedigree status --json`."""
    documents = [
        {
            "address": stage.node.address,
            "kind": stage.node.kind,
            "state": stage.state.replace(" ", "_"),
            "reasons": list(stage.reasons),
            "changed_code": list(stage.changed_code),
            "job": _job(stage.job) if stage.job else None,
        }
        for stage in stages
    ]
    return _head("status", run) | {"stages": documents, "uncommitted": list(uncommitted)}


def jobs_document(jobs: Sequence[LiveJob]) -> dict[str, Any]:
    """`pedigree jobs --json`."""
    return {"schema_version": SCHEMA_VERSION, "command": "jobs", "jobs": [_job(job) for job in jobs]}


def run_document(run: RunContext, ends: Sequence[StageEnd] | None, seconds: float, commit: Commit | None) -> dict[str, Any]:
    """`pedigree run --json`; `ends` is None if the run was interrupted."""
    report = report_path(run.project, run.graph.recipe)
    outcome = "interrupted" if ends is None else "done" if all(isinstance(end, Result) for end in ends) else "failed"
    return _head("run", run) | {
        "outcome": outcome,
        "seconds": round(seconds, 3),
        "stages": [_end(run, end) for end in ends or ()],
        "scores": scores_of(run.project, run.graph),
        "waived": {name: [_split(one) for one in splits] for name, splits in waived_in(run.project, run.graph).items()},
        "report": report.relative_to(run.project.root).as_posix() if report.exists() else None,
        "commit": {"id": commit.id, "title": commit.title} if commit else None,
        "notes": list(run.ledger.notices),
    }


def _split(split: Split) -> dict[str, Any]:
    waivers = [{name: getattr(one, name) for name in ("stage", "benchmark", "because", "rows")} for one in split.waivers]
    return {"policy": split.label, "task": split.task, "contaminated": split.contaminated, "clean": split.clean, "waivers": waivers}


def rehearse_document(
    run: RunContext, rehearsal: Rehearsal, ends: Sequence[StageEnd] | None, proof: dict[str, Any], seconds: float
) -> dict[str, Any]:
    """`pedigree rehearse --json`: the `run` document of the rehearsal, plus what it checked."""
    about = {"recipe": rehearsal.real.recipe, "source": rehearsal.real.source, "overrides": overrides_of(rehearsal.real)}
    where = {"project": rehearsal.project.root.as_posix(), "profile": rehearsal.profile}
    return run_document(run, ends, seconds, None) | {"command": "rehearse"} | about | where | {"proved": proof}


def trace_document(found: "Trace", origins: "Mapping[tuple[str, str], Sequence[Origin]]") -> dict[str, Any]:
    """`pedigree trace --json`."""
    scores = ("task", "policy", "score")
    policies = ("label", "address", "content")
    places = [
        {
            **asdict(place),
            "policies": [dict(zip(policies, one, strict=True)) for one in place.policies],
            "scores": [dict(zip(scores, one, strict=True)) for one in place.scores],
        }
        for place in found.places
    ]
    fields = ("name", "licences", "generators")
    brought = [
        {"address": address, "source": source, "origins": [{name: getattr(one, name) for name in fields} for one in some]}
        for (address, source), some in origins.items()
    ]
    return {
        "schema_version": SCHEMA_VERSION,
        "command": "trace",
        "ids": list(found.ids),
        "looked_in": found.looked_in,
        "places": places,
        "brought_in": brought,
        "dropped": [asdict(drop) for drop in found.dropped],
        "reached": [asdict(one) for one in found.reached],
        "not_looked_in": dict(found.not_looked_in),
    }


def forget_document(found: "Trace", answer: "Forgetting") -> dict[str, Any]:
    """`pedigree forget --json`."""
    rows = {"ids": list(found.ids), "copies": found.copies, "not_looked_in": dict(found.not_looked_in)}
    return {"schema_version": SCHEMA_VERSION, "command": "forget", **rows} | asdict(answer)


def _head(command: str, run: RunContext) -> dict[str, Any]:
    source = {"recipe": run.graph.recipe, "source": run.graph.source, "overrides": overrides_of(run.graph)}
    return {"schema_version": SCHEMA_VERSION, "command": command, **source}


def _job(job: LiveJob) -> dict[str, Any]:
    return {
        "address": job.address,
        "kind": job.kind,
        "pid": job.pid,
        "elsewhere": job.elsewhere,
        "host": job.host,
        "alive": True if job.heard else None,
        "step": job.step,
        "total_steps": job.total,
        "numbers": dict(job.numbers),
        "seconds_since_heartbeat": round(max(job.silent_s, 0.0), 1),
        "waited_for_by": job.holder.what if job.holder else None,
    }


def _end(run: RunContext, end: StageEnd) -> dict[str, Any]:
    stage: dict[str, Any] = {"address": end.address, "kind": run.graph.nodes[end.address].kind}
    match end:
        case Result():
            return stage | {"outcome": end.outcome, "seconds": round(end.seconds, 3), **_made(run, end.address)}
        case StageFailed():
            return stage | {"outcome": "failed", "cause": end.cause, "message": end.message, "log": end.log}
        case NotRun():
            return stage | {"outcome": "not_run", "message": end.because}


def _made(run: RunContext, address: str) -> Mapping[str, str | None]:
    """Return the id and content hash of a stage's artifact; its files may be only in the remote."""
    try:
        record = run.ledger.record(address)
    except (ArtifactError, LedgerError):
        return {"id": None, "content": None}
    return {"id": record.id, "content": record.content}
