"""A run as Prefect shows it: one flow run, each stage one task run of it; and the flow that schedules start.

Prefect shows, schedules and cancels; it decides nothing about what is done. Stages are worked off by `runs.run_graph`, with Prefect
or without; what Prefect is told goes through an observer, so a server that is slow, away or forgetful holds nothing up.
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

from configs.base.frozen import finite
from configs.base.project import Project
from configs.base.texts import command
from configs.language.compile import overrides_of
from configs.language.graph import Node
from data.artifacts.artifacts import ArtifactError, write_json
from data.store import heartbeat
from data.store.heartbeat import Listener, Pulse
from pipelines.jobs.attempts import CANCELLED
from pipelines.jobs.context import RunContext, StageFailed
from pipelines.jobs.launcher import LocalLauncher
from pipelines.jobs.processes import Process
from pipelines.ledger.git import GitSilent, run_git
from pipelines.publish.regressions import Fall, fallen, measured, remember, remembered
from pipelines.publish.report import report_path, tables, write_report
from pipelines.rehearsal.proof import proof_of, said
from pipelines.request import Request, all_done, already_made, opened, wanted
from pipelines.run.ensure import log_file
from pipelines.run.observer import End, Forgotten, Note, StageView, run_observed
from pipelines.run.runs import StageEnd

LOG = logging.getLogger(__name__)
T = TypeVar("T")
FLOW_NAME = "post-train"
TAG, REHEARSAL = "pedigree", "rehearsal"
FELL = "pedigree.score.fell"
"""Event: a score lies below the interval of the one before it."""
RETRIES, RETRY_S = 3, 10.0
"""A deployment's run whose process died is started again so often, after a pause."""
CALL_S = 5.0
"""A call that takes longer has failed: the server hangs."""
ARTIFACT_INTERVAL_S = 5.0
LONG_STAGE_S = 10.0
"""Stages that run longer get a progress artifact."""
LAST_LINES = 100
READ_BYTES = 65536
"""What is looked at of a log that has grown."""

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
"""State of a stage → type and name of the state that Prefect shows; all others are running."""
RUNNING = (StateType.RUNNING, "Running")
ENDS = {"completed": StateType.COMPLETED, "failed": StateType.FAILED, "cancelled": StateType.CANCELLED, "crashed": StateType.CRASHED}


class StagesFailed(Exception):
    """Some stages failed: the state of the whole flow run."""


def end_jobs(flow: Flow[Any, Any], flow_run: FlowRun, state: State) -> None:
    """Hook: ends the jobs of a cancelled flow run. It runs in the worker's process: that of the flow run may have been killed."""
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
    """Hook: a flow run whose process died is started again and takes over the jobs that outlived it. It runs in the worker's process."""
    if flow_run.deployment_id is None:
        return
    with get_client(sync_client=True) as client:
        deaths = sum(past.type == StateType.CRASHED for past in client.read_flow_run_states(flow_run.id))
        if deaths <= RETRIES:
            when = datetime.now(UTC) + timedelta(seconds=RETRY_S)
            client.set_flow_run_state(
                flow_run.id, AwaitingRetry(scheduled_time=when, message="its process died; the next one takes its jobs over")
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
    """Makes the stages of a recipe current: the entry point of deployments and schedules, for `pedigree deploy` to fill in.

    Only a cancellation ends its jobs. Whatever else befalls this process or its worker, they go on, and the next attempt re-attaches.

    Args:
        recipe: Name or path.
        project: Folder of the project, absolute.
        overrides: STAGE.FIELD=VALUE, as with `--set`: makes a variant.
        profile: Execution profile; the recipe's own when absent.
        start: These stages and all below them, as with `--from`.
        until: These stages and all they need, as with `--until`.
        force: Stages to run again although they are up to date, as with `--force`.
        gpu_pool: Global concurrency limit of which this run holds a slot while jobs run.
        rehearse: Made rows and tiny models on the CPU, in a project of its own, as with `pedigree rehearse`. No slot of a GPU pool is held.
    """
    wishes = (tuple(names or ()) for names in (start, until, force))
    request = Request(recipe, tuple(overrides or ()), profile, (), *wishes, rehearse=rehearse)
    run = opened(Project(Path(project)), request)
    run.keep_jobs = True
    chosen, forced = wanted(run, request)
    flow_run_id = UUID(str(current_flow_run.get_id()))
    introduce(run, flow_run_id)
    done = already_made(run, chosen, forced)
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
        get_run_logger().info("%s", "\n".join(said(proof_of(run.project, run.graph, run.changes))))
    return _outcome(run, ends)


BY_COMMAND = "cancelled by `pedigree cancel`; finished stages and checkpoints are kept"


def _outcome(run: RunContext, ends: Collection[StageEnd]) -> State:
    if run.cancelled.is_set():
        return Cancelled(message="cancelled in Prefect; finished stages and checkpoints are kept")
    failed = [end for end in ends if isinstance(end, StageFailed)]
    if failed and all(end.cause == "cancelled" for end in failed):
        return Cancelled(message=BY_COMMAND)
    if failed:
        raise StagesFailed("; ".join(map(str, failed)))
    return Completed(message=f"{len(ends)} stages are current")


def _is_cancelled_by_command(run: RunContext, flow_run_id: UUID) -> bool:
    return any((folder / CANCELLED).exists() for folder in FlowRecord.read(run.project, str(flow_run_id)).folders)


def _undisturbed(run: RunContext, work: Callable[[], T]) -> T:
    """Does the work in a thread of its own; what ends this process ends it.

    Prefect throws an error into the flow's thread when it cannot renew the lease of a concurrency limit (its server was away, or has
    forgotten it). That ends no run here: two runs of a recipe do each other no harm, as stages have leases of their own.
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
            LOG.warning("Prefect has lost the slot of this run, which goes on")
        except BaseException:
            run.cancelled.set()
            wait([future])
            raise


def _fulfil(future: "Future[T]", context: Context, work: Callable[[], T]) -> None:
    try:
        future.set_result(context.run(work))
    except BaseException as error:  # whoever waits for it raises it
        future.set_exception(error)


@contextmanager
def _slot_of(pool: str | None) -> Iterator[None]:
    """Holds a slot of a pool that several recipes share, where one is named."""
    if pool is None:
        yield
        return
    get_run_logger().info("Waiting for a slot of %s", pool)
    with concurrency(pool, strict=True, raise_on_lease_renewal_failure=False):
        get_run_logger().info("It has a slot of %s", pool)
        yield


def tags_of(project: Project, recipe: str) -> list[str]:
    """By which runs and deployments are found: recipe, variant, and the commit that the project is at."""
    name, _, variant = recipe.partition("+")
    commit = commit_of(project)
    kind = [REHEARSAL] if project.is_rehearsal else []
    return [TAG, *kind, f"recipe:{name}", *([f"variant:{variant}"] if variant else []), *([f"commit:{commit}"] if commit else [])]


def shown_recipe(run: RunContext) -> str:
    """What a run is called: a rehearsal has another name than what it rehearses."""
    return f"{run.graph.recipe}-{REHEARSAL}" if run.project.is_rehearsal else run.graph.recipe


def commit_of(project: Project) -> str | None:
    """The commit that the project is at, in short; None where git does not tell."""
    try:
        return run_git(project.root, "rev-parse", "--short=12", "HEAD", timeout_s=CALL_S).stdout.decode().strip() or None
    except (OSError, GitSilent):
        return None


def introduce(run: RunContext, flow_run_id: UUID) -> None:
    """Gives a flow run that a schedule has made the name and the tags of what it runs now; those of its deployment may be older."""
    with suppress(Exception), get_client({"timeout": CALL_S}, sync_client=True) as client:
        about = {"name": shown_recipe(run), "tags": tags_of(run.project, run.graph.recipe)}
        client.request("PATCH", "/flow_runs/{id}", json=about, path_params={"id": flow_run_id})


@dataclass
class _Told:
    """What Prefect has of a stage."""

    task: UUID
    since: float = field(default_factory=time.monotonic)
    offset: int = 0
    """Bytes of its log that were looked at."""
    bar: UUID | None = None
    bar_told: float = 0.0
    tabled: bool = False
    tailed: bool = False


@contextmanager
def connected(run: RunContext, addresses: Collection[str], flow_run_id: UUID | None = None) -> Iterator["PrefectRun"]:
    """A run for Prefect to show. Works in the thread that opens it.

    Args:
        run: the run.
        addresses: its stages, in the order of the graph.
        flow_run_id: the flow run that Prefect has started and will end itself; None: one is made.
    """
    with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}):  # the observer tries again, and knows more by then
        with get_client({"timeout": CALL_S}, sync_client=True) as client:
            shown = PrefectRun(client, run, addresses, flow_run_id)
            with shown.record.beating():
                yield shown


class PrefectRun:
    """A run as Prefect shows it: the `Audience` of an observer. Calls may raise anything, and can be made again."""

    def __init__(self, client: SyncPrefectClient, run: RunContext, addresses: Collection[str], flow_run_id: UUID | None) -> None:
        self._client, self.run, self.addresses = client, run, addresses
        self.own = flow_run_id is None
        self.record = FlowRecord(run.project, str(flow_run_id or uuid4()), flow_run_id)
        self._stages: dict[str, _Told] = {}
        self._heard: dict[str, Listener] = {}
        """Name of a flow run of another machine → who listens to its runner."""
        self._begun = self._summed_up = False

    @property
    def flow_run_id(self) -> UUID:
        assert self.record.flow_run_id is not None
        return self.record.flow_run_id

    def begin(self) -> None:
        if self._begun:
            return
        self.record.write()  # first of all: a kill from here on is found by the next run
        if self.record.flow_run_id is None:
            self.record.flow_run_id = self._create()
            self.record.write()
        else:
            self._flow_run()  # an attempt that failed may have made it, and the server may have lost it since
        self.sweep()
        for address in self.addresses:
            self._stages[address] = _Told(self._create_task(self.run.graph.nodes[address]))
        self._begun = True

    def keep(self, views: dict[str, StageView], end: End | None) -> None:
        self.record.views, self.record.end = views, end
        self.record.write()

    def tell(self, address: str, view: StageView) -> None:
        told = self._stages[address]
        kind, name = STATES.get(view.state, RUNNING)
        if view.state in ("failed", "cancelled") and not told.tailed:
            self._log_last_lines(told, view)
            told.tailed = True
        _set_state(self._client, "task_runs", told.task, _state(kind, name, _message(view)))
        if view.state in ("ran", "attached", "restored") and not told.tabled:
            with _for_show():
                for title, rows in tables(self.run.project, self.run.graph, self.run.graph.nodes[address]).items():
                    data = json.dumps(finite(rows))
                    self._artifact(told, key=_slug(f"{address}-{title}"), type="table", description=f"{title} of {address}", data=data)
            told.tabled = True
        if kind == StateType.COMPLETED and told.bar is not None:
            self._move_bar(told.bar, 100.0)

    def note(self, note: Note) -> None:
        self._log(self._stages[note.address], logging.WARNING, note.text, note.when)

    def follow(self, address: str, folder: Path) -> None:
        """The last new line of its log, one a second at most (Prefect stores each as a row), and a progress bar."""
        told = self._stages[address]
        line, offset = _last_line(folder / "log.txt", told.offset)
        if line:
            self._log(told, logging.INFO, line)
        told.offset = offset
        now = time.monotonic()
        if now - told.since < LONG_STAGE_S or now - told.bar_told < ARTIFACT_INTERVAL_S:
            return
        with _for_show():
            share = _share(folder / "progress.json")
            if told.bar is None:
                told.bar = self._artifact(told, key=_slug(address), type="progress", description=address, data=share)
            else:
                self._move_bar(told.bar, share)
        told.bar_told = now

    def cancelling(self) -> bool:
        state = self._flow_run().state
        return state is not None and (state.is_cancelling() or state.is_cancelled())

    def sweep(self) -> None:
        sweep(self.run.project, self._client, self._heard)

    def end(self, end: End) -> None:
        if not self._summed_up:
            with _for_show():
                self._sum_up()
            self._summed_up = True
        if self.own:  # else Prefect ends it; should it fail to, the next run does
            _set_state(self._client, "flow_runs", self.flow_run_id, _state(ENDS[end[0]], None, end[1]))
            self.record.remove()

    def _sum_up(self) -> None:
        """Where to read on, and which scores fell since the last run. Those of a rehearsal say nothing, and fall as chance has it."""
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
            "id": str(uuid5(NAMESPACE_URL, f"{flow_run.id}/{name}")),  # told again after an answer that was lost, it is the same event
            "occurred": datetime.now(UTC).isoformat(),
            "event": FELL,
            "resource": {"prefect.resource.id": f"pedigree.score.{name}", "prefect.resource.name": f"{recipe}: {fall}"},
            "related": [
                {"prefect.resource.id": f"prefect.{role}.{id_}", "prefect.resource.role": role} for role, id_ in related.items() if id_
            ],
            "payload": fall.as_json() | {"recipe": recipe},
        }
        self._client.request("POST", "/events", json=[event])  # pyright: ignore[reportArgumentType]

    # --- requests that can be made again ---------------------------------------------------------------------------------

    def _flow_run(self) -> FlowRun:
        try:
            return self._client.read_flow_run(self.flow_run_id)
        except ObjectNotFound as error:
            self.record.remove()
            raise Forgotten(str(self.flow_run_id)) from error

    def _create(self) -> UUID:
        parameters = {"recipe": self.run.graph.source or self.run.graph.recipe, "overrides": overrides_of(self.run.graph)}
        made = FlowRunCreate(
            name=shown_recipe(self.run),
            flow_id=self._client.create_flow_from_name(FLOW_NAME),
            parameters=parameters | {"project": str(self.run.project.root)},
            tags=tags_of(self.run.project, self.run.graph.recipe),
            state=_state(*RUNNING),
            idempotency_key=self.record.name,  # a request that was answered too late, made again, makes no second flow run
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

    def _log(self, told: _Told, level: int, message: str, when: datetime | None = None) -> None:
        row = LogCreate(name="pedigree", level=level, message=message, timestamp=when or datetime.now(UTC),  # pyright: ignore
                        flow_run_id=self.flow_run_id, task_run_id=told.task)  # fmt: skip
        with _for_show():
            self._client.create_logs([row])

    def _log_last_lines(self, told: _Told, view: StageView) -> None:
        log = view.folder / "log.txt" if view.folder else None
        if log is not None and log.is_file():
            lines = log.read_text(errors="replace").splitlines()
            self._log(told, logging.ERROR, "last lines of its log:\n" + "\n".join(lines[-LAST_LINES:]))

    # Prefect's own calls for artifacts send an event besides, over a connection for which the process waits when it ends.

    def _artifact(self, told: _Told, **fields: Any) -> UUID:
        made = ArtifactCreate(flow_run_id=self.flow_run_id, task_run_id=told.task, **fields)
        return UUID(_post(self._client, "/artifacts/", made.model_dump(mode="json", exclude_unset=True))["id"])

    def _move_bar(self, bar: UUID, share: float) -> None:
        self._client.request("PATCH", "/artifacts/{id}", json={"data": share}, path_params={"id": bar})


def _summary(run: RunContext, addresses: Collection[str], falls: Collection[Fall]) -> str:
    """Markdown: scores that fell, and where report and logs lie."""
    lines = [f"**{run.graph.recipe}** at commit `{commit_of(run.project) or 'unknown'}`, in `{run.project.root}`", ""]
    lines += [f"- fell: {fall}" for fall in falls]
    lines += ["", f"Report: `{report_path(run.project, run.graph.recipe)}`", "", "| stage | log | prints it |", "|---|---|---|"]
    lines += [f"| {address} | `{log_file(run.project, address)}` | {command('logs', address)} |" for address in addresses]
    return "\n".join(lines)


def sweep(project: Project, client: SyncPrefectClient, heard: dict[str, Listener]) -> None:
    """Tells Prefect how those of our flow runs ended which it shows as running, although their process is gone.

    Args:
        project: theirs.
        client: the way to Prefect.
        heard: listeners to the runners of other machines, by name of the record; kept by the caller between two sweeps.
    """
    for record in FlowRecord.all(project):
        if record.lives(heard.setdefault(record.name, Listener())):
            continue
        made = FlowRunFilterIdempotencyKey(any_=[record.name]) if record.flow_run_id is None else None
        known = FlowRunFilterId(any_=[record.flow_run_id]) if record.flow_run_id is not None else None
        for found in client.read_flow_runs(flow_run_filter=FlowRunFilter(id=known, idempotency_key=made)):  # none: on another server
            state = found.state
            if state is None or not (state.is_final() or state.is_scheduled() or state.is_pending()):  # those are about to be tried again
                _end_for(client, found.id, record)
        record.remove()


def _end_for(client: SyncPrefectClient, flow_run_id: UUID, record: "FlowRecord") -> None:
    """The end of a flow run, told by another process than its own."""
    end: End = record.end or ("crashed", "its process died without a word; found by the next run")
    for task in client.read_task_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[flow_run_id]))):
        if task.state is None or not task.state.is_final():
            kind, name, message = record.states.get(task.dynamic_key, (StateType.CRASHED, "Crashed", end[1]))
            _set_state(client, "task_runs", task.id, _state(StateType(kind), name, message))
    _set_state(client, "flow_runs", flow_run_id, _state(ENDS[end[0]], None, end[1]))


class FlowRecord:
    """What outlives the process of a flow run, on disk: who it was, the scratch folders of its jobs, and how it ended."""

    def __init__(self, project: Project, name: str, flow_run_id: UUID | None = None) -> None:
        """`flow_run_id` is None until Prefect has made one under `name`."""
        self.path, self.name, self.flow_run_id = project.private / "flows" / f"{name}.json", name, flow_run_id
        self._beat = self.path.with_suffix(".beat")
        self.process: Process | None = Process.here()
        self.views: dict[str, StageView] = {}
        self.end: End | None = None
        self.folders: list[Path] = []
        self.states: dict[str, tuple[str, str, str]] = {}
        """Address → type, name and message of the state in which a stage ended, as read from disk."""
        self._removed, self._writing = False, threading.Lock()

    @classmethod
    def all(cls, project: Project) -> "list[FlowRecord]":
        folder = project.private / "flows"
        for beat in folder.glob("[!.]*.beat"):
            if not beat.with_suffix(".json").exists():  # raised once more after its record was removed
                beat.unlink(missing_ok=True)
        return [cls.read(project, path.stem) for path in sorted(folder.glob("[!.]*.json"))]

    @classmethod
    def read(cls, project: Project, name: str) -> "FlowRecord":
        record = cls(project, name)
        record.process = None
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):  # removed meanwhile, or of another version
            raw = json.loads(record.path.read_text())
            record.flow_run_id = UUID(raw["flow_run"]) if raw["flow_run"] else None
            record.folders = [Path(folder) for folder in raw["folders"]]
            record.end = tuple(raw["end"]) if raw["end"] else None  # pyright: ignore[reportAttributeAccessIssue]
            record.states = {address: tuple(state) for address, state in raw["states"].items()}
            record.process = Process(**raw["process"])
        return record

    @contextmanager
    def beating(self) -> Iterator[None]:
        """Lets other machines hear that the runner of this flow run lives, while the block runs."""
        try:
            with Pulse(self._beat):
                yield
        finally:
            if not self.path.exists():
                self._beat.unlink(missing_ok=True)

    def lives(self, listener: Listener) -> bool:
        """Whether its runner lives: the process table of this machine tells at once, of a runner elsewhere only silence tells."""
        if self.process is not None and self.process.is_local:
            return self.process.alive
        return listener.silent_s(heartbeat.sign(self._beat)) <= heartbeat.SILENCE_S

    def write(self) -> None:
        """Safe to call from several threads."""
        with self._writing:
            if self._removed:
                return
            states = {address: (*STATES.get(view.state, RUNNING), _message(view)) for address, view in self.views.items()}
            done = {address for address, state in states.items() if state[0] == StateType.COMPLETED}
            folders = [str(view.folder) for address, view in self.views.items() if view.folder and address not in done]
            told = {"flow_run": str(self.flow_run_id) if self.flow_run_id else None, "end": self.end}
            # a stage may end before its job: folders are those of all that are not done
            process = asdict(self.process) if self.process else None
            write_json(self.path, {"process": process, "folders": folders, "states": states if self.end else {}} | told)

    def remove(self) -> None:
        with self._writing:
            self._removed = True
            self.path.unlink(missing_ok=True)
            self._beat.unlink(missing_ok=True)


@contextmanager
def _for_show() -> Iterator[None]:
    """What is only to look at is left out when it cannot be made or Prefect refuses it; a server that is away is still an error."""
    try:
        yield
    except PrefectHTTPStatusError as error:
        if error.response.status_code not in (400, 409, 413, 422):
            raise
        LOG.warning("Prefect refuses a log line or an artifact: %s", error)
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
    """The last line of what a log has grown by, and its size."""
    try:
        with log.open("rb") as stream:
            size = stream.seek(0, 2)
            begin = offset if offset <= size else 0  # a new attempt may have begun it anew
            stream.seek(max(begin, size - READ_BYTES))
            lines = stream.read(READ_BYTES).decode(errors="replace").strip().splitlines()
    except OSError:
        return "", offset
    return (lines[-1] if lines else ""), size


def _share(path: Path) -> float:
    try:
        beat = json.loads(path.read_text())
    except (OSError, ValueError):  # not there yet, or of a job that is being replaced
        return 0.0
    return 100.0 * beat["step"] / beat["total"] if beat["total"] else 0.0


def _slug(text: str) -> str:
    """A key as Prefect's artifacts want it: lowercase letters, digits and dashes."""
    return "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in text.lower()).strip("-")
