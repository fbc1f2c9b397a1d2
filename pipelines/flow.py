"""Prefect integration: reports a run as one flow run with a task run per stage, and defines the flow that schedules start.

Prefect displays, schedules and cancels runs. `runs.run_graph` executes the stages, with or without Prefect. All reporting goes through an
observer, so a slow, unreachable or restarted server never delays a run.
"""

import asyncio
import json
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from contextvars import Context, copy_context
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar
from uuid import NAMESPACE_URL, UUID, uuid4, uuid5

from prefect import flow, get_run_logger
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import ArtifactCreate, FlowRunCreate, LogCreate, StateCreate, TaskRunCreate
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId, FlowRunFilterIdempotencyKey
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.client.schemas.objects import TaskRunResult as Parent
from prefect.concurrency.sync import concurrency
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError
from prefect.flows import Flow
from prefect.runtime import flow_run as current_flow_run
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from prefect.states import AwaitingRetry, Cancelled, Completed

from pedigree.configs.base.frozen import finite
from pedigree.configs.base.problems import PedigreeError
from pedigree.configs.base.project import Project
from pedigree.configs.base.texts import command
from pedigree.configs.language.compile import overrides_of
from pedigree.configs.language.graph import Node
from pedigree.data.artifacts.artifacts import ArtifactError, write_json
from pedigree.data.store import heartbeat
from pedigree.data.store.heartbeat import Listener, Pulse
from pedigree.pipelines.jobs.attempts import CANCELLED
from pedigree.pipelines.jobs.context import RunContext, StageFailed
from pedigree.pipelines.jobs.launcher import LocalLauncher
from pedigree.pipelines.jobs.processes import Process
from pedigree.pipelines.ledger.git import run_git
from pedigree.pipelines.publish.regressions import Fall, fallen, measured, remember, remembered
from pedigree.pipelines.publish.report import report_path, tables, write_report
from pedigree.pipelines.rehearsal.proof import proof_of, sentences
from pedigree.pipelines.request import Request, all_done, opened, up_to_date_results, wanted
from pedigree.pipelines.run.ensure import log_file
from pedigree.pipelines.run.observer import AudienceReset, End, Note, StageView, run_observed
from pedigree.pipelines.run.runs import StageEnd

LOG = logging.getLogger(__name__)
T = TypeVar("T")
FLOW_NAME = "post-train"
TAG, REHEARSAL = "pedigree", "rehearsal"
FELL = "pedigree.score.fell"
"""Event: a score is below the confidence interval of the previous one."""
RETRIES, RETRY_S = 3, 10.0
"""Maximum restarts of a deployment's run whose process died, and the delay in seconds."""
CALL_S = 5.0
"""Timeout of a call to the server, in seconds."""
ARTIFACT_INTERVAL_S = 5.0
LONG_STAGE_S = 10.0
"""Stages that run longer than this get a progress artifact."""
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
ENDS = {"completed": StateType.COMPLETED, "failed": StateType.FAILED, "cancelled": StateType.CANCELLED, "crashed": StateType.CRASHED}


def end_jobs(flow: Flow[Any, Any], flow_run: FlowRun, state: State) -> None:
    """Hook: end the jobs of a canceled flow run. Runs in the worker's process, because the flow run's may have been killed."""
    real = Project(Path(flow_run.parameters["project"]))
    for project in (real, *real.rehearsals):
        record = FlowRecord.read(project, str(flow_run.id))
        launcher = LocalLauncher(project)
        for folder in record.folders:
            handle = launcher.find(folder)
            if handle is not None:
                launcher.cancel(handle)
        record.remove()


def go_on(flow: Flow[Any, Any], flow_run: FlowRun, state: State) -> None:
    """Hook: restart a flow run whose process died, which takes over its surviving jobs. Runs in the worker's process."""
    if flow_run.deployment_id is None:
        return
    with get_client(sync_client=True) as client:
        deaths = sum(past.type == StateType.CRASHED for past in client.read_flow_run_states(flow_run.id))
        if deaths <= RETRIES:
            when = datetime.now(UTC) + timedelta(seconds=RETRY_S)
            client.set_flow_run_state(
                flow_run.id, AwaitingRetry(scheduled_time=when, message="the process died; the next one takes over its jobs")
            )


@flow(name=FLOW_NAME, persist_result=False, on_cancellation=[end_jobs], on_crashed=[go_on])
def post_train(
    recipe: str,
    project: str,
    overrides: list[str] | None = None,
    profile: str | None = None,
    start: list[str] | None = None,
    until: list[str] | None = None,
    force: list[str] | None = None,
    gpu_pool: str | None = None,
    rehearse: bool = False,
) -> Any:
    """Bring the stages of a recipe up to date; the entry point of deployments, with parameters set by `pedigree deploy`.

    Only cancellation ends its jobs. If this process or its worker dies, the jobs keep running and the next attempt re-attaches.

    Args:
        recipe: Recipe name or path.
        project: Absolute path of the project folder.
        overrides: STAGE.FIELD=VALUE, as with `--set`; makes a variant.
        profile: Execution profile; defaults to the recipe's.
        start: These stages and all their descendants, as with `--from`.
        until: These stages and all their ancestors, as with `--until`.
        force: Stages to re-run even if they are up to date, as with `--force`.
        gpu_pool: Global concurrency limit; the run holds one of its slots while jobs run.
        rehearse: Use synthetic rows and tiny models on the CPU, in a separate project, as with `pedigree rehearse`. Takes no GPU pool slot.
    """
    lists = (tuple(names or ()) for names in (start, until, force))
    request = Request(recipe, tuple(overrides or ()), profile, (), *lists, rehearse=rehearse)
    run = opened(Project(Path(project)), request)
    run.keep_jobs = True
    chosen, forced = wanted(run, request)
    flow_run_id = UUID(str(current_flow_run.get_id()))
    introduce(run, flow_run_id)
    done = up_to_date_results(run, chosen, forced)
    if done is not None:
        return Completed(message=all_done(len(done), sum(end.outcome == "remote" for end in done), recipe))
    if remembered(run.project, run.graph.recipe) is None:
        remember(run.project, run.graph.recipe, measured(run.project, run.graph))
    try:
        with _slot_of(None if rehearse else gpu_pool):
            ends = _undisturbed(
                run, lambda: run_observed(run, lambda chosen: connected(run, chosen, flow_run_id), LOG.warning, chosen, forced)
            )
    except KeyboardInterrupt:
        if _is_cancelled_by_command(run, flow_run_id):
            return Cancelled(message=BY_COMMAND)
        raise
    write_report(run.project, run.graph)
    if rehearse:
        get_run_logger().info("%s", "\n".join(sentences(proof_of(run.project, run.graph, run.changes))))
    return _outcome(run, ends)


BY_COMMAND = "canceled by `pedigree cancel`; finished stages and checkpoints are kept"


def _outcome(run: RunContext, ends: Collection[StageEnd]) -> State:
    if run.cancelled.is_set():
        return Cancelled(message="canceled in Prefect; finished stages and checkpoints are kept")
    failed = [end for end in ends if isinstance(end, StageFailed)]
    if failed and all(end.cause == "cancelled" for end in failed):
        return Cancelled(message=BY_COMMAND)
    if failed:
        raise PedigreeError("; ".join(map(str, failed)))
    return Completed(message=f"{len(ends)} stages are up to date")


def _is_cancelled_by_command(run: RunContext, flow_run_id: UUID) -> bool:
    return any((folder / CANCELLED).exists() for folder in FlowRecord.read(run.project, str(flow_run_id)).folders)


def _undisturbed(run: RunContext, work: Callable[[], T]) -> T:
    """Do the work in a separate thread, so that it survives Prefect's lease errors but not an interruption of this process.

    Prefect raises an error in the flow's thread if it cannot renew the lease of a concurrency limit, for example after a server restart.
    The run can safely continue: stages have their own leases, so two runs of a recipe do not conflict.
    """
    future: Future[T] = Future()
    thread = threading.Thread(target=_fulfil, args=(future, copy_context(), work), name="run")
    starting = True
    while True:
        try:
            if starting:
                starting = False
                thread.start()
            return future.result()
        except asyncio.CancelledError:
            LOG.warning("Prefect lost the concurrency slot of this run; the run continues")
        except BaseException:
            run.cancelled.set()
            wait([future])
            raise


def _fulfil(future: "Future[T]", context: Context, work: Callable[[], T]) -> None:
    try:
        future.set_result(context.run(work))
    except BaseException as error:  # re-raised by the waiting thread
        future.set_exception(error)


@contextmanager
def _slot_of(pool: str | None) -> Iterator[None]:
    """Hold a slot of a pool shared by several recipes; no-op if `pool` is None."""
    if pool is None:
        yield
        return
    get_run_logger().info("Waiting for a slot of %s", pool)
    with concurrency(pool, strict=True, raise_on_lease_renewal_failure=False):
        get_run_logger().info("Acquired a slot of %s", pool)
        yield


def tags_of(project: Project, recipe: str) -> list[str]:
    """Return the tags of a run or deployment: recipe, variant and the project's commit."""
    name, _, variant = recipe.partition("+")
    commit = commit_of(project)
    kind = [REHEARSAL] if project.is_rehearsal else []
    return [TAG, *kind, f"recipe:{name}", *([f"variant:{variant}"] if variant else []), *([f"commit:{commit}"] if commit else [])]


def shown_recipe(run: RunContext) -> str:
    """Return the display name of a run; rehearsals get a suffix."""
    return f"{run.graph.recipe}-{REHEARSAL}" if run.project.is_rehearsal else run.graph.recipe


def commit_of(project: Project) -> str | None:
    """Return the project's abbreviated commit; None if git fails."""
    try:
        return run_git(project.root, "rev-parse", "--short=12", "HEAD", timeout_s=CALL_S).stdout.decode().strip() or None
    except (OSError, PedigreeError):
        return None


def introduce(run: RunContext, flow_run_id: UUID) -> None:
    """Update the name and tags of a scheduled flow run, because those of its deployment may be out of date."""
    with suppress(Exception), get_client({"timeout": CALL_S}, sync_client=True) as client:
        about = {"name": shown_recipe(run), "tags": tags_of(run.project, run.graph.recipe)}
        client.request("PATCH", "/flow_runs/{id}", json=about, path_params={"id": flow_run_id})


@dataclass
class _Reported:
    """What was reported to Prefect about a stage."""

    task: UUID
    since: float = field(default_factory=time.monotonic)
    offset: int = 0
    """Bytes of its log read so far."""
    bar: UUID | None = None
    bar_updated: float = 0.0
    tabled: bool = False
    tailed: bool = False


@contextmanager
def connected(run: RunContext, addresses: Collection[str], flow_run_id: UUID | None = None) -> Iterator["PrefectRun"]:
    """Connect a run to Prefect. Use it only in the thread that opened it.

    Args:
        run: the run.
        addresses: its stages, in graph order.
        flow_run_id: a flow run that Prefect started and will end itself; None creates one.
    """
    with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}):  # the observer retries with newer state
        with get_client({"timeout": CALL_S}, sync_client=True) as client:
            shown = PrefectRun(client, run, addresses, flow_run_id)
            with shown.record.beating():
                yield shown


class PrefectRun:
    """Reports a run to Prefect; the `Audience` of an observer. Calls may raise anything and can be retried."""

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

    def keep(self, views: dict[str, StageView], end: End | None) -> None:
        self.record.views, self.record.end = views, end
        self.record.write()

    def update(self, address: str, view: StageView) -> None:
        stage = self._stages[address]
        kind, name = STATES.get(view.state, RUNNING)
        if view.state in ("failed", "cancelled") and not stage.tailed:
            self._log_last_lines(stage, view)
            stage.tailed = True
        _set_state(self._client, "task_runs", stage.task, _state(kind, name, _message(view)))
        if view.state in ("ran", "attached", "restored") and not stage.tabled:
            with _display_only():
                for title, rows in tables(self.run.project, self.run.graph, self.run.graph.nodes[address]).items():
                    data = json.dumps(finite(rows))
                    self._artifact(stage, key=_slug(f"{address}-{title}"), type="table", description=f"{title} of {address}", data=data)
            stage.tabled = True
        if kind == StateType.COMPLETED and stage.bar is not None:
            self._move_bar(stage.bar, 100.0)

    def note(self, note: Note) -> None:
        self._log(self._stages[note.address], logging.WARNING, note.text, note.when)

    def follow(self, address: str, folder: Path) -> None:
        """Send the newest log line (at most one per call, because Prefect stores each as a row) and update the progress bar."""
        stage = self._stages[address]
        line, offset = _last_line(folder / "log.txt", stage.offset)
        if line:
            self._log(stage, logging.INFO, line)
        stage.offset = offset
        now = time.monotonic()
        if now - stage.since < LONG_STAGE_S or now - stage.bar_updated < ARTIFACT_INTERVAL_S:
            return
        with _display_only():
            share = _share(folder / "progress.json")
            if stage.bar is None:
                stage.bar = self._artifact(stage, key=_slug(address), type="progress", description=address, data=share)
            else:
                self._move_bar(stage.bar, share)
        stage.bar_updated = now

    def cancelling(self) -> bool:
        state = self._flow_run().state
        return state is not None and (state.is_cancelling() or state.is_cancelled())

    def sweep(self) -> None:
        sweep(self.run.project, self._client, self._heard)

    def end(self, end: End) -> None:
        if not self._summed_up:
            with _display_only():
                self._sum_up()
            self._summed_up = True
        if self.own:  # otherwise Prefect ends it, or the next run does
            _set_state(self._client, "flow_runs", self.flow_run_id, _state(ENDS[end[0]], None, end[1]))
            self.record.remove()

    def _sum_up(self) -> None:
        """Publish links to report and logs, and score regressions since the last run. Rehearsal scores are random and are not compared."""
        project, recipe = self.run.project, self.run.graph.recipe
        now, before = measured(project, self.run.graph), remembered(project, recipe)
        falls = [] if project.is_rehearsal else fallen(before or {}, now)
        for fall in falls:
            self._tell_fall(fall)
        text = _summary(self.run, self.addresses, falls)
        _post(self._client, "/artifacts/", {
            "key": _slug(f"{shown_recipe(self.run)}-report"), "type": "markdown", "description": f"report and logs of {recipe}",
            "data": text, "flow_run_id": str(self.flow_run_id),
        })  # fmt: skip
        remember(project, recipe, now)

    def _tell_fall(self, fall: Fall) -> None:
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
            "payload": fall.as_json() | {"recipe": recipe},
        }
        self._client.request("POST", "/events", json=[event])  # pyright: ignore[reportArgumentType]

    # --- retryable requests -----------------------------------------------------------------------------------------------

    def _flow_run(self) -> FlowRun:
        try:
            return self._client.read_flow_run(self.flow_run_id)
        except ObjectNotFound as error:
            self.record.remove()
            raise AudienceReset(str(self.flow_run_id)) from error

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
        return UUID(_post(self._client, "/flow_runs/", made.model_dump(mode="json", exclude_unset=True))["id"])

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
        return UUID(_post(self._client, "/task_runs/", made.model_dump(mode="json", exclude={"id"}))["id"])

    def _log(self, stage: _Reported, level: int, message: str, when: datetime | None = None) -> None:
        row = LogCreate(name="pedigree", level=level, message=message, timestamp=when or datetime.now(UTC),  # pyright: ignore
                        flow_run_id=self.flow_run_id, task_run_id=stage.task)  # fmt: skip
        with _display_only():
            self._client.create_logs([row])

    def _log_last_lines(self, stage: _Reported, view: StageView) -> None:
        log = view.folder / "log.txt" if view.folder else None
        if log is not None and log.is_file():
            lines = log.read_text(errors="replace").splitlines()
            self._log(stage, logging.ERROR, "last lines of its log:\n" + "\n".join(lines[-LAST_LINES:]))

    # Prefect's own artifact calls also send an event, over a connection that delays process exit.

    def _artifact(self, stage: _Reported, **fields: Any) -> UUID:
        made = ArtifactCreate(flow_run_id=self.flow_run_id, task_run_id=stage.task, **fields)
        return UUID(_post(self._client, "/artifacts/", made.model_dump(mode="json", exclude_unset=True))["id"])

    def _move_bar(self, bar: UUID, share: float) -> None:
        self._client.request("PATCH", "/artifacts/{id}", json={"data": share}, path_params={"id": bar})


def _summary(run: RunContext, addresses: Collection[str], falls: Collection[Fall]) -> str:
    """Return a Markdown summary: score regressions, and the paths of the report and logs."""
    lines = [f"**{run.graph.recipe}** at commit `{commit_of(run.project) or 'unknown'}`, in `{run.project.root}`", ""]
    lines += [f"- regression: {fall}" for fall in falls]
    lines += ["", f"Report: `{report_path(run.project, run.graph.recipe)}`", "", "| stage | log | command |", "|---|---|---|"]
    lines += [f"| {address} | `{log_file(run.project, address)}` | {command('logs', address)} |" for address in addresses]
    return "\n".join(lines)


def sweep(project: Project, client: SyncPrefectClient, heard: dict[str, Listener]) -> None:
    """End flow runs of this project that Prefect shows as running although their process is dead.

    Args:
        project: the project of the flow runs.
        client: the Prefect client.
        heard: heartbeat listeners by record name, which the caller keeps between sweeps.
    """
    for record in FlowRecord.all(project):
        if record.lives(heard.setdefault(record.name, Listener())):
            continue
        made = FlowRunFilterIdempotencyKey(any_=[record.name]) if record.flow_run_id is None else None
        known = FlowRunFilterId(any_=[record.flow_run_id]) if record.flow_run_id is not None else None
        for found in client.read_flow_runs(flow_run_filter=FlowRunFilter(id=known, idempotency_key=made)):  # empty: another server
            state = found.state
            if state is None or not (state.is_final() or state.is_scheduled() or state.is_pending()):  # else about to be retried
                _end_for(client, found.id, record)
        record.remove()


def _end_for(client: SyncPrefectClient, flow_run_id: UUID, record: "FlowRecord") -> None:
    """End a flow run and its tasks on behalf of its dead process."""
    end: End = record.end or ("crashed", "its process died unexpectedly; detected by a later run")
    for task in client.read_task_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[flow_run_id]))):
        if task.state is None or not task.state.is_final():
            kind, name, message = record.states.get(task.dynamic_key, (StateType.CRASHED, "Crashed", end[1]))
            _set_state(client, "task_runs", task.id, _state(StateType(kind), name, message))
    _set_state(client, "flow_runs", flow_run_id, _state(ENDS[end[0]], None, end[1]))


class FlowRecord:
    """On-disk record that outlives a flow run's process: its process, the scratch folders of its jobs, and its outcome."""

    def __init__(self, project: Project, name: str, flow_run_id: UUID | None = None) -> None:
        """`flow_run_id` is None until Prefect has created the flow run with idempotency key `name`."""
        self.path, self.name, self.flow_run_id = project.private / "flows" / f"{name}.json", name, flow_run_id
        self._beat = self.path.with_suffix(".beat")
        self.process: Process | None = Process.here()
        self.views: dict[str, StageView] = {}
        self.end: End | None = None
        self.folders: list[Path] = []
        self.states: dict[str, tuple[str, str, str]] = {}
        """Address → type, name and message of a stage's final state, as read from disk."""
        self._removed, self._writing = False, threading.Lock()

    @classmethod
    def all(cls, project: Project) -> "list[FlowRecord]":
        folder = project.private / "flows"
        for beat in folder.glob("[!.]*.beat"):
            if not beat.with_suffix(".json").exists():  # a last heartbeat was written after the record was removed
                beat.unlink(missing_ok=True)
        return [cls.read(project, path.stem) for path in sorted(folder.glob("[!.]*.json"))]

    @classmethod
    def read(cls, project: Project, name: str) -> "FlowRecord":
        record = cls(project, name)
        record.process = None
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):  # removed meanwhile, or written by another version
            raw = json.loads(record.path.read_text())
            record.flow_run_id = UUID(raw["flow_run"]) if raw["flow_run"] else None
            record.folders = [Path(folder) for folder in raw["folders"]]
            record.end = tuple(raw["end"]) if raw["end"] else None  # pyright: ignore[reportAttributeAccessIssue]
            record.states = {address: tuple(state) for address, state in raw["states"].items()}
            record.process = Process(**raw["process"])
        return record

    @contextmanager
    def beating(self) -> Iterator[None]:
        """Write heartbeats of this flow run's runner for other machines while the block runs."""
        try:
            with Pulse(self._beat):
                yield
        finally:
            if not self.path.exists():
                self._beat.unlink(missing_ok=True)

    def lives(self, listener: Listener) -> bool:
        """Whether its runner is alive: from the process table for local runners, from heartbeats for remote ones."""
        if self.process is not None and self.process.is_local:
            return self.process.alive
        return listener.silent_s(heartbeat.sign(self._beat)) <= heartbeat.SILENCE_S

    def write(self) -> None:
        """Write the record; thread-safe."""
        with self._writing:
            if self._removed:
                return
            states = {address: (*STATES.get(view.state, RUNNING), _message(view)) for address, view in self.views.items()}
            done = {address for address, state in states.items() if state[0] == StateType.COMPLETED}
            folders = [str(view.folder) for address, view in self.views.items() if view.folder and address not in done]
            outcome = {"flow_run": str(self.flow_run_id) if self.flow_run_id else None, "end": self.end}
            # a stage may end before its job, so folders of all stages that are not done are included
            process = asdict(self.process) if self.process else None
            write_json(self.path, {"process": process, "folders": folders, "states": states if self.end else {}} | outcome)

    def remove(self) -> None:
        with self._writing:
            self._removed = True
            self.path.unlink(missing_ok=True)
            self._beat.unlink(missing_ok=True)


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


def _post(client: SyncPrefectClient, path: str, body: Any) -> Any:
    return client.request("POST", path, json=body).json()  # pyright: ignore[reportArgumentType]


def _set_state(client: SyncPrefectClient, what: str, which: UUID, state: StateCreate) -> None:
    _post(client, f"/{what}/{which}/set_state", {"state": state.model_dump(mode="json"), "force": True})


def _state(kind: StateType, name: str | None = None, message: str = "") -> StateCreate:
    return StateCreate(type=kind, name=name or kind.value.capitalize(), message=message or None)


def _message(view: StageView) -> str:
    return view.detail or (f"{view.state} in {view.seconds:.1f} s" if view.seconds is not None else "")


def _last_line(log: Path, offset: int) -> tuple[str, int]:
    """Return the last line that a log gained since `offset`, and the log's size."""
    try:
        with log.open("rb") as stream:
            size = stream.seek(0, 2)
            begin = offset if offset <= size else 0  # a new attempt may have truncated it
            stream.seek(max(begin, size - READ_BYTES))
            lines = stream.read(READ_BYTES).decode(errors="replace").strip().splitlines()
    except OSError:
        return "", offset
    return (lines[-1] if lines else ""), size


def _share(path: Path) -> float:
    try:
        beat = json.loads(path.read_text())
    except (OSError, ValueError):  # not written yet, or being replaced by a new attempt
        return 0.0
    return 100.0 * beat["step"] / beat["total"] if beat["total"] else 0.0


def _slug(text: str) -> str:
    """Convert text to a Prefect artifact key: lowercase letters, digits and dashes."""
    return "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in text.lower()).strip("-")
