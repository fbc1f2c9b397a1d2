"""Reports a run to Prefect as one flow run with a task run per stage."""

import json
import logging
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import NAMESPACE_URL, UUID, uuid4, uuid5

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import ArtifactCreate, FlowRunCreate, LogCreate, StateCreate, TaskRunCreate
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId, FlowRunFilterIdempotencyKey
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.client.schemas.objects import TaskRunResult as Parent
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings

from pedigree.configs.base.frozen import finite
from pedigree.configs.base.project import Project
from pedigree.configs.base.texts import command
from pedigree.configs.language.compile import overrides_of
from pedigree.configs.language.graph import Node
from pedigree.data.artifacts.artifacts import ArtifactError
from pedigree.data.store.heartbeat import Listener
from pedigree.pipelines.jobs.context import RunContext
from pedigree.pipelines.jobs.events import RunEnded, StageView
from pedigree.pipelines.ledger.git import short_commit
from pedigree.pipelines.prefect.record import FlowRecord, FlowRunLost
from pedigree.pipelines.publish.regressions import Fall, fallen, measured, remember, remembered
from pedigree.pipelines.publish.report import tables
from pedigree.pipelines.publish.shown_stages import report_path
from pedigree.pipelines.run.publication import log_file

LOG = logging.getLogger(__name__)
FLOW_NAME = "post-train"
TAG, REHEARSAL = "pedigree", "rehearsal"
FELL = "pedigree.score.fell"
"""Event: a score is below the confidence interval of the previous one."""
CALL_S = 5.0
"""Timeout of a call to the server, in seconds."""
ARTIFACT_INTERVAL_S = 5.0
"""Between updates of a stage's progress artifact, the first this long after it was first followed."""
LAST_LINES = 100
READ_BYTES = 65536
"""Maximum bytes read from the end of a log."""

STATES: dict[str, tuple[StateType, str]] = {
    "pending": (StateType.PENDING, "Pending"),
    "waiting": (StateType.PENDING, "Pending"),
    "skipped": (StateType.PENDING, "NotReady"),
    "failed": (StateType.FAILED, "Failed"),
    "cancelled": (StateType.CANCELLED, "Cancelled"),
    "ran": (StateType.COMPLETED, "Completed"),
    "attached": (StateType.COMPLETED, "Completed"),
    "unchanged": (StateType.COMPLETED, "Cached"),
    "remote": (StateType.COMPLETED, "Cached"),
    "restored": (StateType.COMPLETED, "Cached"),
}
"""Stage state → type and name of the Prefect state; all other states map to running."""
RUNNING = (StateType.RUNNING, "Running")


def tags_of(project: Project, recipe: str) -> list[str]:
    """Return the tags of a run or deployment: recipe, variant and the project's commit."""
    name, _, variant = recipe.partition("+")
    commit = short_commit(project.root)
    kind = [REHEARSAL] if project.is_rehearsal else []
    return [TAG, *kind, f"recipe:{name}", *([f"variant:{variant}"] if variant else []), *([f"commit:{commit}"] if commit else [])]


def shown_recipe(run: RunContext) -> str:
    """Return the display name of a run; rehearsals get a suffix."""
    return f"{run.graph.recipe}-{REHEARSAL}" if run.project.is_rehearsal else run.graph.recipe


@dataclass
class _Reported:
    """What was reported to Prefect about a stage."""

    task: UUID
    view: StageView = field(default_factory=StageView)
    offset: int = 0
    """Bytes of its log read so far."""
    bar: UUID | None = None
    """Its progress artifact."""
    bar_updated: float | None = None
    tabled: bool = False
    tailed: bool = False


@contextmanager
def connected(run: RunContext, addresses: Collection[str], flow_run_id: UUID | None = None) -> Iterator["PrefectRun"]:
    """Connect a run to Prefect. Use it only in the thread that opened it.

    `flow_run_id` is a flow run that Prefect started and will end itself; None creates one.
    """
    with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}):  # the observer retries with newer state
        with get_client({"timeout": CALL_S}, sync_client=True) as client:
            shown = PrefectRun(client, run, addresses, flow_run_id)
            with shown.record.beating():
                yield shown


class PrefectRun:
    """Reports a run to Prefect. Any call but `keep` may raise anything and may block; all can be retried."""

    def __init__(self, client: SyncPrefectClient, run: RunContext, addresses: Collection[str], flow_run_id: UUID | None) -> None:
        self._client, self.run, self.addresses = client, run, addresses
        self.own = flow_run_id is None
        self.record = FlowRecord(run.project, str(flow_run_id or uuid4()), flow_run_id)
        self._stages: dict[str, _Reported] = {}
        self._heard: dict[str, Listener] = {}
        """Record name of a flow run → heartbeat listener of its runner."""
        self._begun = self._summed_up = False

    @property
    def flow_run_id(self) -> UUID:
        assert self.record.flow_run_id is not None
        return self.record.flow_run_id

    def begin(self) -> None:
        """Register the run, once."""
        if self._begun:
            return
        self.record.write()  # first, so that the next run finds this one if it is killed
        if self.record.flow_run_id is None:
            self.record.flow_run_id = self._create()
            self.record.write()
        else:
            self._flow_run()  # raises if the server has lost the flow run made by an earlier attempt
        self.sweep()
        for address in self.addresses:
            self._stages[address] = _Reported(self._create_task(self.run.graph.nodes[address]))
        self._begun = True

    def keep(self, views: dict[str, StageView], end: RunEnded | None) -> None:
        """Immediately record on this machine what must survive this process: the folders of jobs, and the end. Thread-safe."""
        states: dict[str, tuple[str, str, str]] = {address: _prefect_state(view) for address, view in views.items()}
        self.record.end, self.record.states = end, states if end else {}
        # a stage may end before its job, so folders of all stages that are not done are included
        self.record.folders = [view.folder for address, view in views.items() if view.folder and states[address][0] != StateType.COMPLETED]
        self.record.write()

    def update(self, address: str, view: StageView) -> None:
        stage = self._stages[address]
        if view == stage.view:
            return
        kind, name, message = _prefect_state(view)
        if view.state == "failed" and not stage.tailed:
            lines, _ = _new_lines(view.folder) if view.folder else ([], 0)
            if lines:
                self._log(stage, logging.ERROR, "last lines of its log:\n" + "\n".join(lines[-LAST_LINES:]))
            stage.tailed = True
        self._set_state("task_runs", stage.task, _state(kind, name, message))
        if view.state in ("ran", "attached", "restored") and not stage.tabled:
            with _display_only():
                for title, rows in tables(self.run.project, self.run.graph, self.run.graph.nodes[address]).items():
                    data = json.dumps(finite(rows))
                    self._artifact(stage, key=_slug(f"{address}-{title}"), type="table", description=f"{title} of {address}", data=data)
            stage.tabled = True
        if kind == StateType.COMPLETED and stage.bar is not None:
            self._move_bar(stage.bar, 100.0)
        stage.view = view

    def note(self, when: datetime, address: str, text: str) -> None:
        self._log(self._stages[address], logging.WARNING, text, when)

    def follow(self, address: str, view: StageView) -> None:
        """Send the newest log line (at most one per call, because Prefect stores each as a row) and update the progress bar."""
        stage = self._stages[address]
        assert view.folder is not None
        lines, offset = _new_lines(view.folder, stage.offset)
        if lines:
            self._log(stage, logging.INFO, lines[-1])
        stage.offset = offset
        now = time.monotonic()
        if stage.bar_updated is None:
            stage.bar_updated = now
        if now - stage.bar_updated < ARTIFACT_INTERVAL_S:
            return
        with _display_only():
            share = 100.0 * view.progress.step / view.progress.total if view.progress.total else 0.0
            if stage.bar is None:
                stage.bar = self._artifact(stage, key=_slug(address), type="progress", description=address, data=share)
            else:
                self._move_bar(stage.bar, share)
        stage.bar_updated = now

    def cancelling(self) -> bool:
        """Whether the run was canceled in Prefect."""
        state = self._flow_run().state
        return state is not None and (state.is_cancelling() or state.is_cancelled())

    def sweep(self) -> None:
        """End flow runs of this project that Prefect shows as running although their process is dead."""
        with suppress(Exception):  # boundary: what other runs left behind must not disturb the reports of this one
            for record in FlowRecord.all(self.run.project):
                if record.lives(self._heard.setdefault(record.name, Listener())):
                    continue
                made = FlowRunFilterIdempotencyKey(any_=[record.name]) if record.flow_run_id is None else None
                known = FlowRunFilterId(any_=[record.flow_run_id]) if record.flow_run_id is not None else None
                # none is found if another server had it
                for found in self._client.read_flow_runs(flow_run_filter=FlowRunFilter(id=known, idempotency_key=made)):
                    state = found.state
                    if state is None or not (state.is_final() or state.is_scheduled() or state.is_pending()):  # else about to be retried
                        self._end_for(found.id, record)
                record.remove()

    def _end_for(self, flow_run_id: UUID, record: FlowRecord) -> None:
        """End a flow run and its tasks on behalf of its dead process."""
        end = record.end or RunEnded("crashed", "its process died unexpectedly; detected by a later run")
        for task in self._client.read_task_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[flow_run_id]))):
            if task.state is None or not task.state.is_final():
                kind, name, message = record.states.get(task.dynamic_key, (StateType.CRASHED, "Crashed", end.detail))
                self._set_state("task_runs", task.id, _state(StateType(kind), name, message))
        self._set_state("flow_runs", flow_run_id, _end_state(end))

    def end(self, end: RunEnded) -> None:
        if not self._summed_up:
            with _display_only():
                self._sum_up()
            self._summed_up = True
        if self.own:  # otherwise Prefect ends it, or the next run does
            self._set_state("flow_runs", self.flow_run_id, _end_state(end))
            self.record.remove()

    def _sum_up(self) -> None:
        """Publish links to report and logs, and score regressions since the last run. Rehearsal scores are random and are not compared."""
        project, recipe = self.run.project, self.run.graph.recipe
        now, before = measured(project, self.run.graph), remembered(project, recipe)
        falls = [] if project.is_rehearsal else fallen(before or {}, now)
        for fall in falls:
            self._show_fall(fall)
        text = _summary(self.run, self.addresses, falls)
        self._post("/artifacts/", {
            "key": _slug(f"{shown_recipe(self.run)}-report"), "type": "markdown", "description": f"report and logs of {recipe}",
            "data": text, "flow_run_id": str(self.flow_run_id),
        })  # fmt: skip
        remember(project, recipe, now)

    def _show_fall(self, fall: Fall) -> None:
        recipe, flow_run = self.run.graph.recipe, self._flow_run()
        related = {"flow-run": flow_run.id, "flow": flow_run.flow_id, "deployment": flow_run.deployment_id}
        name = f"{recipe}.{fall.evaluation}.{fall.policy}.{fall.task}"
        event = {
            "id": str(uuid5(NAMESPACE_URL, f"{flow_run.id}/{name}")),  # deterministic, so a retry sends the same event
            "occurred": datetime.now(UTC).isoformat(),
            "event": FELL,
            "resource": {"prefect.resource.id": f"pedigree.score.{name}", "prefect.resource.name": f"{recipe}: {fall}"},
            "related": [
                {"prefect.resource.id": f"prefect.{role}.{id_}", "prefect.resource.role": role} for role, id_ in related.items() if id_
            ],
            "payload": asdict(fall) | {"recipe": recipe},
        }
        self._client.request("POST", "/events", json=[event])  # pyright: ignore[reportArgumentType]

    # --- retryable requests -----------------------------------------------------------------------------------------------

    def _flow_run(self) -> FlowRun:
        try:
            return self._client.read_flow_run(self.flow_run_id)
        except ObjectNotFound as error:
            self.record.remove()
            raise FlowRunLost(str(self.flow_run_id)) from error

    def _create(self) -> UUID:
        parameters = {"recipe": self.run.graph.source or self.run.graph.recipe, "overrides": overrides_of(self.run.graph)}
        made = FlowRunCreate(
            name=shown_recipe(self.run),
            flow_id=self._client.create_flow_from_name(FLOW_NAME),
            parameters=parameters | {"project": str(self.run.project.root)},
            tags=tags_of(self.run.project, self.run.graph.recipe),
            state=_state(*RUNNING),
            idempotency_key=self.record.name,  # a retry after a timeout makes no second flow run
        )
        return UUID(self._post("/flow_runs/", made.model_dump(mode="json", exclude_unset=True))["id"])

    def _create_task(self, node: Node) -> UUID:
        parents = [Parent(id=self._stages[parent].task) for parent in node.parents if parent in self._stages]
        made = TaskRunCreate(
            id=None,
            name=node.name,
            flow_run_id=self.flow_run_id,
            task_key=f"pedigree.{node.kind}",
            dynamic_key=node.address,
            state=_state(*STATES["pending"]),
            task_inputs={"wait_for": list(parents)},
        )
        return UUID(self._post("/task_runs/", made.model_dump(mode="json", exclude={"id"}))["id"])

    def _log(self, stage: _Reported, level: int, message: str, when: datetime | None = None) -> None:
        row = LogCreate(name="pedigree", level=level, message=message, timestamp=when or datetime.now(UTC),  # pyright: ignore
                        flow_run_id=self.flow_run_id, task_run_id=stage.task)  # fmt: skip
        with _display_only():
            self._client.create_logs([row])

    # Prefect's own artifact calls also send an event, over a connection that delays process exit.

    def _artifact(self, stage: _Reported, **fields: Any) -> UUID:
        made = ArtifactCreate(flow_run_id=self.flow_run_id, task_run_id=stage.task, **fields)
        return UUID(self._post("/artifacts/", made.model_dump(mode="json", exclude_unset=True))["id"])

    def _post(self, path: str, body: Any) -> Any:
        return self._client.request("POST", path, json=body).json()  # pyright: ignore[reportArgumentType]

    def _set_state(self, what: str, which: UUID, state: StateCreate) -> None:
        self._post(f"/{what}/{which}/set_state", {"state": state.model_dump(mode="json"), "force": True})

    def _move_bar(self, bar: UUID, share: float) -> None:
        self._client.request("PATCH", "/artifacts/{id}", json={"data": share}, path_params={"id": bar})


def _summary(run: RunContext, addresses: Collection[str], falls: Collection[Fall]) -> str:
    """Return a Markdown summary: score regressions, and the paths of the report and logs."""
    lines = [f"**{run.graph.recipe}** at commit `{short_commit(run.project.root) or 'unknown'}`, in `{run.project.root}`", ""]
    lines += [f"- regression: {fall}" for fall in falls]
    lines += ["", f"Report: `{report_path(run.project, run.graph.recipe)}`", "", "| stage | log | command |", "|---|---|---|"]
    lines += [f"| {address} | `{log_file(run.project, address)}` | {command('logs', address)} |" for address in addresses]
    return "\n".join(lines)


@contextmanager
def _display_only() -> Iterator[None]:
    """Skip display-only data that cannot be made or that Prefect rejects; an unreachable server still raises."""
    try:
        yield
    except PrefectHTTPStatusError as error:
        if error.response.status_code not in (400, 409, 413, 422):
            raise
        LOG.warning("Prefect rejected a log line or an artifact: %s", error)
    except (ArtifactError, KeyError, TypeError, ValueError) as error:
        LOG.warning("not shown in Prefect: %s", error)


def _state(kind: StateType, name: str, message: str = "") -> StateCreate:
    return StateCreate(type=kind, name=name, message=message or None)


def _end_state(end: RunEnded) -> StateCreate:
    return _state(StateType(end.outcome.upper()), end.outcome.capitalize(), end.detail)


def _prefect_state(view: StageView) -> tuple[StateType, str, str]:
    """Return type, name and message of a stage's state."""
    message = view.detail or (f"{view.state} in {view.seconds:.1f} s" if view.seconds is not None else "")
    return *STATES.get("cancelled" if view.cause == "cancelled" else view.state, RUNNING), message


def _new_lines(folder: Path, offset: int = 0) -> tuple[list[str], int]:
    """Return the last lines that the log of a job gained since `offset`, and the log's size."""
    try:
        with (folder / "log.txt").open("rb") as stream:
            size = stream.seek(0, 2)
            begin = offset if offset <= size else 0  # a new attempt may have truncated it
            stream.seek(max(begin, size - READ_BYTES))
            return stream.read(READ_BYTES).decode(errors="replace").strip().splitlines(), size
    except OSError:
        return [], offset


def _slug(text: str) -> str:
    """Convert text to a Prefect artifact key: lowercase letters, digits and dashes."""
    return "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in text.lower()).strip("-")
