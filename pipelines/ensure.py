"""Making one stage current: the heart of the project. `pedigree run`, the Prefect flow and `dvc repro` all come through here.

1. Ask DVC whether the stage is stale.
2. Restore it from the run cache or the remote, proven by its record.
3. Take the stage's lease; note the hashes of its dependencies *now*.
4. Look for its job: alive → re-attach, ended unseen → take its result, otherwise submit one.
5. Wait, holding no lock of DVC's.
6. Verify, compare the dependencies with what was noted, publish by rename, commit.
"""

import csv
import json
import math
import os
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, Protocol

from configs.execution import Execution, Numerics, Placement
from configs.graph import Graph, Node
from configs.project import Project
from data.artifacts import (
    PARTS,
    Artifact,
    ArtifactError,
    FileEntry,
    Input,
    Record,
    content_hash,
    open_artifact,
    read_rows,
    scan,
    sha256_path,
    stage_key,
    write_json,
    write_text,
)
from pipelines import provenance
from pipelines.launcher import RESUME_ME, Handle, Launcher, LocalLauncher, Status, read_done
from pipelines.lease import Cancelled, Holder, lease, slots
from pipelines.ledger import InputsMoved, Ledger, LedgerError, is_complete
from stages.job import JobSpec

Outcome = Literal["unchanged", "restored", "ran", "attached"]
RETRIED = frozenset({"crashed", "out_of_memory", "storage", "lost", "heartbeat"})
"""Causes that may pass by themselves. `refused` and `timeout` would end the same way."""
POLL_S = 0.1
LINGER_S = 60.0
"""A job that has reported its end but does not exit is ended after so long."""
BACKOFF_S = (1.0, 5.0, 30.0)
"""Pauses before the further attempts."""
LINEAGE_SCHEMA = 1


class StageFailed(Exception):
    """A stage could not be made current; everything that existed before still does."""

    def __init__(self, address: str, cause: str, message: str, log: str | None = None) -> None:
        self.address, self.cause, self.message, self.log = address, cause, message, log
        super().__init__(f"{address} failed ({cause}): {message}" + (f"; its log is {log}" if log else ""))


class Watch(Protocol):
    """Told what changes, from any thread. States: checking, waiting, running, and those of `Outcome`, and failed."""

    def __call__(self, address: str, state: str, detail: str = "", *, folder: Path | None = None, seconds: float | None = None) -> None: ...


def unwatched(address: str, state: str, detail: str = "", *, folder: Path | None = None, seconds: float | None = None) -> None:
    """Tells nobody."""


@dataclass
class RunContext:
    """One run of a recipe: what `ensure` needs to know of the outside."""

    project: Project
    graph: Graph
    execution: Execution
    ledger: Ledger
    watch: Watch = unwatched
    cancelled: threading.Event = field(default_factory=threading.Event)
    launcher: Launcher | None = None
    """The local one when absent."""
    keep_jobs: bool = False
    """Jobs go on when the run is interrupted; the next run re-attaches to them."""

    @property
    def title(self) -> str:
        return f"pedigree run {self.graph.recipe}"

    def jobs(self) -> Launcher:
        if self.launcher is None:
            self.launcher = LocalLauncher(self.project)
        return self.launcher


@dataclass(frozen=True)
class Result:
    """A stage that is current now."""

    address: str
    outcome: Outcome
    key: str
    seconds: float


@dataclass(frozen=True)
class Need:
    """What a stage run is made from."""

    key: str
    inputs: tuple[Input, ...]
    folders: Mapping[str, Mapping[str, Path]]
    """Port → label → folder of the artifact."""
    source_files: Mapping[str, str]
    """Project file → sha256."""


def ensure(run: RunContext, node: Node, *, force: bool = False) -> Result:
    """Makes a stage current, by whatever is cheapest. Its parents are current already.

    Raises:
        StageFailed: with one line why.
    """
    started = time.monotonic()
    with _failures(run, node):
        run.watch(node.address, "checking")
        outcome: Outcome = "unchanged"
        if force or run.ledger.reasons(node):
            recover(run.project, node.address)
            need = identify(run.project, node)
            with _alone(run, node, need) as waited:
                if force or not waited or run.ledger.reasons(node):
                    outcome = _make_current(run, node, need, force)
        key = open_artifact(run.project.artifact(node.address)).record.key
        result = Result(node.address, outcome, key, time.monotonic() - started)
        run.watch(node.address, outcome, seconds=result.seconds)
        return result


def run_under_dvc(run: RunContext, node: Node) -> Result:
    """The same for the command of a stage in `dvc.yaml`: DVC has asked, restored and deleted before, and commits afterwards."""
    started = time.monotonic()
    with _failures(run, node):
        recover(run.project, node.address)
        need = identify(run.project, node)
        with _alone(run, node, need):
            outcome: Outcome = "restored"
            if not _is_in_place(run.project.artifact(node.address), need.key):  # else another runner has published meanwhile
                outcome, before = _produce(run, node, need, force=False)
                _publish(run, node, need, before)
                _clear(run.project, node, need.key)
        result = Result(node.address, outcome, need.key, time.monotonic() - started)
        run.watch(node.address, outcome, seconds=result.seconds)
        return result


def identify(project: Project, node: Node) -> Need:
    """The stage's key, from the records of its inputs.

    Raises:
        StageFailed: an input or a project file is missing.
    """
    inputs, folders = [], {}
    for edge in node.edges:
        folder = project.artifact(edge.source)
        try:
            record = open_artifact(folder).record
        except ArtifactError as error:
            raise StageFailed(node.address, "refused", f"input {edge.source}: {_inside(project, str(error))}") from error
        inputs.append(Input(port=edge.port, label=edge.label, content=record.content, producer=record.id))
        folders.setdefault(edge.port, {})[edge.label] = folder
    missing = [name for name in node.files if not (project.root / name).exists()]
    if missing:
        raise StageFailed(node.address, "refused", f"{', '.join(missing)} does not exist in the project: its config names it")
    files = {name: sha256_path(project.root / name) for name in node.files}
    edges = [(given.port, given.label, given.content) for given in inputs]
    config = node.config.model_dump(mode="json")
    key = stage_key(node.kind, node.declaration.version, config, edges, files)
    return Need(key, tuple(inputs), folders, files)


def recover(project: Project, address: str) -> None:
    """Finishes or takes back a publication that a kill interrupted."""
    aside = _aside(project, address)
    if aside.exists():
        if project.artifact(address).exists():
            shutil.rmtree(aside)
        else:
            os.rename(aside, project.artifact(address))


def log_file(project: Project, address: str) -> Path:
    """Where the log of a finished stage is kept; a running job's is `log.txt` in its scratch folder."""
    return project.private / "logs" / f"{address}.log"


# --- steps 2 to 6 ------------------------------------------------------------------------------------------------------


def _make_current(run: RunContext, node: Node, need: Need, force: bool) -> Outcome:
    if not force and (run.ledger.restore(node, need.key) or run.ledger.adopt(node, need.key)):
        _clear(run.project, node, need.key)
        return "restored"
    outcome, before = _produce(run, node, need, force)
    _publish(run, node, need, before)
    run.ledger.commit(node, before)
    _clear(run.project, node, need.key)
    return outcome


def _produce(run: RunContext, node: Node, need: Need, force: bool) -> tuple[Outcome, dict[str, Any]]:
    """A finished, verified job in the scratch folder; returns how it got there and the dependencies at its start."""
    scratch, jobs = run.project.scratch(need.key), run.jobs()
    handle = jobs.find(scratch)
    alive = handle is not None and jobs.poll(handle).state == "running"
    if not alive and not force and _took_unseen(scratch):
        return "attached", _read(scratch / "snapshot.json")
    numerics, placement = run.execution.of(node.kind, node.name)
    if "deepspeed" not in node.declaration.engine:
        numerics = numerics.model_copy(update={"world_size": 1})
    if alive:
        placement = JobSpec.model_validate(_read(scratch / "spec.json")).placement
    elif force and scratch.exists():
        shutil.rmtree(scratch)
    with _slots(run, node, need, placement) as numbers:
        if not alive:
            _prepare(run, node, need, numerics, placement)
        _attempts(run, node, scratch, handle if alive else None, placement, numbers)
    return ("attached" if alive else "ran"), _read(scratch / "snapshot.json")


def _prepare(run: RunContext, node: Node, need: Need, numerics: Numerics, placement: Placement) -> None:
    """Writes what the job reads; refuses to resume checkpoints that were made under other numerics."""
    scratch = run.project.scratch(need.key)
    scratch.mkdir(parents=True, exist_ok=True)
    if (scratch / "spec.json").exists() and _checkpoints(scratch):
        before = JobSpec.model_validate(_read(scratch / "spec.json")).numerics
        differing = [f"{name} {old} -> {new}" for (name, old), (_, new) in zip(before, numerics, strict=True) if old != new]
        if differing:
            message = f"its checkpoints were made under other numerics ({', '.join(differing)}): resume under those, or start it afresh"
            raise StageFailed(node.address, "refused", f"{message} with --force {node.name}")
    write_json(scratch / "snapshot.json", run.ledger.snapshot(node))
    spec = JobSpec(
        address=node.address,
        kind=node.kind,
        key=need.key,
        config=node.config.model_dump(mode="json"),
        inputs={port: {label: str(folder) for label, folder in labelled.items()} for port, labelled in need.folders.items()},
        source_files={name: str(run.project.root / name) for name in need.source_files},
        numerics=numerics,
        placement=placement,
    )
    write_text(scratch / "spec.json", spec.model_dump_json(indent=1) + "\n")  # inputs in the recipe's order


def _attempts(run: RunContext, node: Node, scratch: Path, handle: Handle | None, placement: Placement, numbers: list[int]) -> None:
    """Runs the job until it succeeds; failures that may pass are tried again, and every attempt is noted.

    Raises:
        StageFailed: a cause that will not pass, or no retry left.
    """
    numerics = JobSpec.model_validate(_read(scratch / "spec.json")).numerics
    history = scratch / "attempts.json"
    attempts: list[dict[str, Any]] = _read(history) if history.exists() else []
    failures = 0
    detail = "re-attached to the job of an earlier run" if handle else ""
    while True:
        if handle is None:
            for left in ("done.json", "progress.json", "cancelled.json"):
                (scratch / left).unlink(missing_ok=True)
            _remove_output(scratch)
            attempts.append(_attempt(scratch, node))
            write_json(history, attempts)
            handle = run.jobs().submit(scratch, numerics, len(attempts), numbers)
        run.watch(node.address, "running", detail, folder=scratch)
        began = time.monotonic()
        failure = _wait(run, node, handle, placement)
        if failure is None:
            failure = _verify(scratch)
        if attempts:
            attempts[-1] |= {"ended_at": _now(), "cause": failure[0] if failure else "succeeded"}
            write_json(history, attempts)
        if failure is None:
            return
        cause, message = failure
        resumable = cause == "preempted" and time.monotonic() - began > BACKOFF_S[0]
        failures += not resumable
        if cause not in RETRIED | {"preempted"} or failures > placement.retries:
            tried = f" (attempt {failures} of {placement.retries + 1})" if cause in RETRIED else ""
            raise StageFailed(node.address, cause, f"{message}{tried}", _shown_log(run, scratch))
        detail = f"attempt {len(attempts) + 1} after: {message}"
        run.watch(node.address, "waiting", detail)
        if not resumable and run.cancelled.wait(BACKOFF_S[min(failures, len(BACKOFF_S)) - 1]):
            raise Cancelled("cancelled before a further attempt")
        handle = None


def _wait(run: RunContext, node: Node, handle: Handle, placement: Placement) -> tuple[str, str] | None:
    """Until the job has ended; returns (cause, message) of a failure. On every other way out the job is ended first."""
    jobs, scratch = run.jobs(), Path(handle.scratch)
    try:
        while True:
            status = jobs.poll(handle)
            if status.state != "running":
                jobs.cancel(handle, grace_s=0.0)  # children that it has left behind
                return _failure(status, scratch)
            late = _overdue(handle, placement)
            if late:
                jobs.cancel(handle)
                return None if late[0] == "lingers" else late
            if run.cancelled.wait(POLL_S):
                raise Cancelled("its job goes on" if run.keep_jobs else "cancelled; its checkpoints are kept")
    except BaseException:
        if not run.keep_jobs:
            jobs.cancel(handle)
        raise


def _failure(status: Status, scratch: Path) -> tuple[str, str] | None:
    done = read_done(scratch)
    if status.state == "succeeded":
        return None
    if (scratch / "cancelled.json").exists():  # left by `pedigree cancel`
        return "cancelled", "cancelled; its checkpoints are kept"
    if done is not None:
        return str(done.get("cause", "crashed")), _first_line(str(done.get("message", "it gave no reason")))
    if status.state == "lost":
        return "lost", "its process is gone and left no result"
    if status.exit_code == RESUME_ME:
        return "preempted", "it was asked to stop and wrote a checkpoint"
    if status.exit_code is not None and status.exit_code < 0:
        hint = " (the kernel does that when memory runs out)" if status.exit_code == -9 else ""
        return "crashed", f"it was killed by signal {-status.exit_code}{hint}"
    return "crashed", f"it exited with code {status.exit_code} and left no result: {_last_line(scratch / 'log.txt')}"


def _overdue(handle: Handle, placement: Placement) -> tuple[str, str] | None:
    scratch, now = Path(handle.scratch), time.time()
    beat = max(_modified(scratch / "progress.json"), handle.submitted_at)
    done = _modified(scratch / "done.json")
    if done and now - done > LINGER_S:
        finished = read_done(scratch) or {}
        return ("lingers", "") if finished.get("ok") else ("crashed", _first_line(str(finished.get("message"))))
    if now - beat > placement.heartbeat_timeout_s:
        allowed = f"placement.heartbeat_timeout_s allows {placement.heartbeat_timeout_s:g}"
        return "heartbeat", f"no sign of life for {now - beat:.0f} s; {allowed}"
    if placement.timeout_s is not None and now - handle.submitted_at > placement.timeout_s:
        return "timeout", f"still running after {now - handle.submitted_at:.0f} s; placement.timeout_s allows {placement.timeout_s:g}"
    return None


def _took_unseen(scratch: Path) -> bool:
    """Whether the last job succeeded while nobody watched, and its output is what it says."""
    if not (scratch / "snapshot.json").exists() or _verify(scratch) is not None:
        return False
    history = scratch / "attempts.json"
    attempts = _read(history) if history.exists() else []
    if attempts and "ended_at" not in attempts[-1]:
        ended = datetime.fromtimestamp(_modified(scratch / "done.json"), UTC).isoformat(timespec="seconds")
        attempts[-1] |= {"ended_at": ended, "cause": "succeeded"}
        write_json(history, attempts)
    return True


def _verify(scratch: Path) -> tuple[str, str] | None:
    """Success is proved: the payload is there, is what the job reported, and its metrics are numbers."""
    done = read_done(scratch)
    if done is None or done.get("ok") is not True:
        return "lost", "it left no result"
    payload = scratch / "out" / "payload"
    if not payload.is_dir():
        return "lost", "its output is gone"
    try:
        files = scan(payload)
    except ArtifactError as error:
        return "refused", str(error)
    if not files:
        return "refused", "it ended without an error and without output"
    if content_hash(files) != done["content"]:
        return "storage", "its output has changed since it reported it"
    strange = sorted(path.name for path in (scratch / "out").iterdir() if path.name not in PARTS)
    if strange:
        return "refused", f"it wrote {', '.join(strange)} beside payload/ and evidence/"
    wrong = [name for name, value in _numbers(done["metrics"]) if not math.isfinite(value)]
    return ("refused", f"metric {wrong[0]} is not finite") if wrong else None


def _publish(run: RunContext, node: Node, need: Need, before: dict[str, Any]) -> None:
    """Record, evidence, run and lineage into the output; then the old artifact aside, the new one in, the old one away."""
    moved = run.ledger.moved(node, before)
    if moved:
        raise _moved(node, moved)
    scratch = run.project.scratch(need.key)
    out, done = scratch / "out", read_done(scratch)
    assert done is not None
    record = Record(
        kind=node.kind,
        version=node.declaration.version,
        type=node.output,
        config=node.config.model_dump(mode="json"),
        inputs=need.inputs,
        source_files=dict(need.source_files),
        key=need.key,
        content=done["content"],
        files=tuple(FileEntry.model_validate(entry) for entry in done["files"]),
        metrics=done["metrics"],
        marks=tuple(done.get("marks", ())),
    )
    write_json(out / "evidence" / "metrics.json", record.metrics)
    _write_curve(scratch / "curve.jsonl", out / "evidence" / "curve.csv")
    write_json(out / "run.json", _run_record(node, scratch))
    write_json(out / "lineage.json", _lineage(need))
    write_json(out / "record.json", record.model_dump(mode="json"))
    target, aside = run.project.artifact(node.address), _aside(run.project, node.address)
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.exists():
        aside.parent.mkdir(parents=True, exist_ok=True)
        os.rename(target, aside)
    os.rename(out, target)
    shutil.rmtree(aside, ignore_errors=True)


def _run_record(node: Node, scratch: Path) -> dict[str, Any]:
    spec = JobSpec.model_validate(_read(scratch / "spec.json"))
    history = scratch / "attempts.json"
    return {
        "schema_version": 1,
        "address": node.address,
        "numerics": spec.numerics.model_dump(mode="json"),
        "placement": spec.placement.model_dump(mode="json"),
        "attempts": _read(history) if history.exists() else [],
        "fingerprint": provenance.fingerprint(node.kind),
        "environment": provenance.environment(),
        "hardware": provenance.hardware(),
    }


def _lineage(need: Need) -> dict[str, Any]:
    """Records and runs of all ancestors, by artifact id; each input brings its own."""
    found: dict[str, Any] = {}
    for labelled in need.folders.values():
        for folder in labelled.values():
            artifact = open_artifact(folder)
            found |= _read(folder / "lineage.json")["artifacts"]
            found[artifact.record.id] = {"record": artifact.record.model_dump(mode="json"), "run": _read(folder / "run.json")}
    return {"schema_version": LINEAGE_SCHEMA, "artifacts": dict(sorted(found.items()))}


def _write_curve(source: Path, target: Path) -> None:
    """The training curve as CSV, one column per number that was ever logged."""
    if not source.exists():
        return
    rows = read_rows(source)
    columns = list(dict.fromkeys(name for row in rows for name in row))
    with target.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, columns)
        writer.writeheader()
        writer.writerows(rows)


def _clear(project: Project, node: Node, key: str) -> None:
    """Removes the scratch folder of a stage that is done; its log stays."""
    scratch = project.scratch(key)
    if (scratch / "log.txt").exists():
        kept = log_file(project, node.address)
        kept.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(scratch / "log.txt", kept)
    shutil.rmtree(scratch, ignore_errors=True)


# --- leases, slots, words ----------------------------------------------------------------------------------------------


@contextmanager
def _failures(run: RunContext, node: Node) -> Iterator[None]:
    """Every way to fail becomes one StageFailed, and is told to who watches."""
    try:
        yield
    except StageFailed as error:
        run.watch(node.address, "failed", error.message)
        raise
    except InputsMoved as error:
        run.watch(node.address, "failed", f"inputs moved: {error}")
        raise _moved(node, error.moved) from error
    except Cancelled as error:
        run.watch(node.address, "failed", str(error))
        raise StageFailed(node.address, "cancelled", str(error)) from error
    except (OSError, LedgerError) as error:
        message = _inside(run.project, str(error))
        run.watch(node.address, "failed", message)
        raise StageFailed(node.address, "storage", message) from error


@contextmanager
def _alone(run: RunContext, node: Node, need: Need) -> Iterator[bool]:
    """The only writer of this artifact folder, and the only one of this scratch folder; yields whether it had to wait."""

    def waiting(holder: Holder) -> None:
        run.watch(node.address, "waiting", str(holder))

    name = node.address.replace("/", "--")
    with ExitStack() as stack:
        waits = [
            stack.enter_context(lease(run.project.lease(name), run.title, waiting=waiting, cancelled=run.cancelled)),
            stack.enter_context(lease(run.project.lease(need.key), run.title, waiting=waiting, cancelled=run.cancelled)),
        ]
        yield any(waits)


def _slots(run: RunContext, node: Node, need: Need, placement: Placement):
    def waiting(names: list[str]) -> None:
        run.watch(node.address, "waiting", f"for {placement.slots} of {run.execution.slots} slots")

    return slots(
        run.project.private / "slots",
        need.key,
        placement.slots,
        run.execution.slots,
        job=run.project.scratch(need.key) / "job.json",
        waiting=waiting,
        cancelled=run.cancelled,
    )


def _moved(node: Node, moved: list[str]) -> StageFailed:
    return StageFailed(
        node.address,
        "inputs_moved",
        f"{', '.join(moved)} changed while it ran: its result is not recorded under what stands there now, "
        "but kept, and taken at once when the old state comes back; type the command again",
    )


def _is_in_place(folder: Path, key: str) -> bool:
    try:
        artifact: Artifact = open_artifact(folder, verify=True)
    except ArtifactError:
        return False
    return artifact.record.key == key and is_complete(artifact)


def _attempt(scratch: Path, node: Node) -> dict[str, Any]:
    found = _checkpoints(scratch)
    return {"started_at": _now(), "resumed_from": found[-1] if found else None, "code": provenance.code_state()}


def _checkpoints(scratch: Path) -> list[str]:
    """Names of the job's checkpoints, the latest last."""
    folder = scratch / "checkpoints"
    if not folder.is_dir():
        return []
    return [path.name for path in sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns) if path.is_dir()]


def _remove_output(scratch: Path) -> None:
    shutil.rmtree(scratch / "out", ignore_errors=True)


def _aside(project: Project, address: str) -> Path:
    return project.private / "aside" / address


def _numbers(value: Any, place: str = "") -> Iterator[tuple[str, float]]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _numbers(inner, f"{place}.{name}" if place else str(name))
    elif isinstance(value, float):
        yield place, value


def _read(path: Path) -> Any:
    return json.loads(path.read_text())


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else "it gave no reason"


def _last_line(log: Path) -> str:
    try:
        lines = log.read_text(errors="replace").strip().splitlines()
    except FileNotFoundError:
        lines = []
    return lines[-1][:300] if lines else "its log is empty"


def _shown_log(run: RunContext, scratch: Path) -> str:
    return (scratch / "log.txt").relative_to(run.project.root).as_posix()


def _inside(project: Project, text: str) -> str:
    return text.replace(f"{project.root}/", "")
