"""Schedules: deployments of the flow `post_train` on a Prefect server, each for one recipe or variant of one project."""

import json
import re
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Literal, TypeVar
from uuid import UUID

import httpx
from prefect.automations import AutomationCore, EventTrigger
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import DeploymentScheduleCreate, GlobalConcurrencyLimitCreate, WorkPoolCreate
from prefect.client.schemas.filters import (
    DeploymentFilter,
    DeploymentFilterId,
    DeploymentFilterTags,
    FlowFilter,
    FlowFilterName,
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import ConcurrencyLimitStrategy, ConcurrencyOptions, FlowRun, StateType
from prefect.client.schemas.responses import DeploymentResponse, SetStateStatus
from prefect.client.schemas.schedules import CronSchedule, IntervalSchedule, RRuleSchedule
from prefect.client.schemas.sorting import DeploymentSort, FlowRunSort
from prefect.events.actions import ChangeFlowRunState, SendNotification
from prefect.events.schemas.automations import Posture
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from prefect.states import AwaitingConcurrencySlot, Cancelled, Cancelling
from prefect.utilities.callables import parameter_schema
from prefect.workers.process import ProcessWorker
from pydantic import ValidationError

from configs.base.frozen import digest
from configs.base.problems import PedigreeError, UsageProblem
from configs.base.project import Project
from configs.base.texts import command
from configs.language.graph import Graph
from data.artifacts.provenance import CODE_ROOT
from pipelines.flow import FELL, FLOW_NAME, REHEARSAL, TAG, commit_of, post_train, tags_of
from pipelines.request import Request

ENTRYPOINT = "pipelines/flow.py:post_train"
CALL_S = 30.0
PAUSES = 3
PAGE = 200
"""So many deployments or runs the server tells at once, at most."""
T = TypeVar("T")
AWAITS_SLOT = AwaitingConcurrencySlot().name
Schedule = CronSchedule | IntervalSchedule | RRuleSchedule
SILENCE = timedelta(minutes=10)
"""A run gives signs of life every three minutes (`PREFECT_FLOWS_HEARTBEAT_FREQUENCY`); one that is silent for so long has died."""
ALIVE = "prefect.flow-run.heartbeat"
ENDED = {f"prefect.flow-run.{name}" for name in ("Completed", "Failed", "Cancelled", "Crashed", "AwaitingRetry")}
ENDED_BADLY = {"prefect.flow-run.Failed", "prefect.flow-run.Crashed", "prefect.flow-run.TimedOut"}
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
FORMS = {
    "--cron": 'five fields: minute, hour, day, month, weekday; "0 3 * * *" is 3:00 every night',
    "--interval": "a positive number with a unit: 90s, 15m, 6h, 1d",
    "--rrule": '"FREQ=WEEKLY;BYDAY=MO;BYHOUR=3;BYMINUTE=0", as in RFC 5545',
}
SEARCH_S = 10
"""Seconds of a processor within which a schedule has to say when it fires next; Prefect's server stands still while it looks."""
SEARCH = """
import asyncio, resource, time
from prefect.server.schemas.actions import DeploymentScheduleCreate
until = int(time.process_time()) + 1 + {limit}  # the import, which takes many seconds on a slow machine, is not the search
resource.setrlimit(resource.RLIMIT_CPU, (until, until + 1))
try:
    made = DeploymentScheduleCreate.model_validate_json({made!r})  # a rule that has no begin is given one
    dates = asyncio.run(made.schedule.get_dates(n=3))
except Exception as error:  # whatever it is, the server would meet it too
    print(error)
else:
    print("fires" if dates else "there is no date that it fits")
"""
"""Looks for as many dates as the server's scheduler wants at least, by the server's code: it may raise, and may go on for ever."""
WHEN_BUSY = {"skip": ConcurrencyLimitStrategy.CANCEL_NEW, "wait": ConcurrencyLimitStrategy.ENQUEUE}
QUIET = {"stream_output": False}
"""Job variables: a flow run that writes to its worker's pipe would die of a broken one when the worker is killed. Prefect has its log."""


class ServerAway(PedigreeError):
    """The Prefect server does not answer, or not as it should."""


@dataclass(frozen=True)
class Terms:
    """How a deployment is run."""

    pool: str
    """Work pool."""
    schedule: Schedule | None = None
    """None: runs are started by hand."""
    name: str | None = None
    """Of the deployment; the recipe's (with its variant) when None."""
    when_busy: Literal["skip", "wait"] = "skip"
    gpu_pool: str | None = None
    gpu_slots: int | None = None
    """How many runs may hold a slot of the GPU pool; None: as it is."""
    notify: str | None = None
    """Name of the notification block that is told of failures and of scores that fell, `TYPE/NAME`."""
    silence: timedelta = SILENCE
    """How long a run may give no sign of life before Prefect takes it for crashed, which frees its slot."""


@dataclass(frozen=True)
class Planned:
    """A run that has not begun."""

    name: str
    id: UUID
    when: datetime | None


@dataclass(frozen=True)
class Listed:
    """A deployment as `pedigree deployments` shows it."""

    name: str
    schedule: str
    pool: str
    paused: bool
    workers: int
    """Workers of its pool that give signs of life."""
    next: datetime | None
    last: str
    """State of its last run, in words; empty where it has had none."""
    tags: Sequence[str]


def schedule_of(cron: str | None, interval: str | None, rrule: str | None, timezone: str | None) -> Schedule | None:
    """The schedule that options ask for.

    Raises:
        UsageProblem: more than one, one that cannot be read or never fires; a time zone that does not exist, or without a schedule.
    """
    given = {"--cron": cron, "--interval": interval, "--rrule": rrule}
    asked = [name for name, value in given.items() if value is not None]
    if len(asked) > 1:
        raise UsageProblem(f"{' and '.join(asked)}: a deployment has one schedule; leave out all but one")
    if not asked:
        if timezone is not None:
            raise UsageProblem(f"--timezone {timezone}: there is no schedule; add --cron, --interval or --rrule")
        return None
    option = asked[0]
    if rrule is not None and re.search(r"INTERVAL=[+-]?0+\b", rrule, re.IGNORECASE):
        raise UsageProblem(f"--rrule {rrule!r} never fires (INTERVAL is 0). It is {FORMS['--rrule']}")
    try:
        if cron is not None:
            schedule = CronSchedule(cron=cron, timezone=timezone or "UTC")
        elif interval is not None:
            schedule = IntervalSchedule(interval=_span(interval), timezone=timezone or "UTC")
        else:
            schedule = RRuleSchedule(rrule=str(rrule), timezone=timezone or "UTC")
    except ValidationError as error:
        raise UsageProblem(_said_of_schedule(error, given, option, timezone)) from error
    why = _why_never(schedule)
    if why:
        raise UsageProblem(f"{option} {given[option]!r} never fires ({why}). It is {FORMS[option]}")
    return schedule


def _said_of_schedule(error: ValidationError, given: dict[str, str | None], option: str, timezone: str | None) -> str:
    if "timezone" in str(error).lower() and timezone is not None:
        return f"--timezone {timezone}: no such time zone; the IANA data base has names like Europe/Berlin, America/New_York and UTC"
    why = error.errors()[0]["msg"].removeprefix("Value error, ")
    return f"{option} {given[option]!r} cannot be read ({why}). It is {FORMS[option]}"


def _why_never(schedule: Schedule) -> str:
    """Why a schedule would not fire on the server; empty where it does. What never finds a date is ended in a process of its own."""
    code = SEARCH.format(limit=SEARCH_S, made=json.dumps({"schedule": schedule.model_dump(mode="json")}))
    done = subprocess.run([sys.executable, "-P", "-c", code], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode < 0:  # ended by its limit
        return f"{SEARCH_S} s are not enough to find its next dates, and Prefect's server would stand still meanwhile"
    said = (done.stdout or done.stderr).strip().splitlines() or [f"the search for its next dates ended with {done.returncode}"]
    return "" if said[-1] == "fires" else said[-1]


def _span(text: str) -> timedelta:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhd]?)", text.strip())
    seconds = float(match[1]) * UNITS[match[2] or "s"] if match else 0.0
    if not 0 < seconds < timedelta.max.total_seconds():
        raise UsageProblem(f"--interval {text!r} cannot be read. It is {FORMS['--interval']}")
    return timedelta(seconds=seconds)


def said(schedule: Any) -> str:
    """A schedule in words."""
    zone = getattr(schedule, "timezone", None) or "UTC"
    if isinstance(schedule, CronSchedule):
        return f"cron {schedule.cron} ({zone})"
    if isinstance(schedule, IntervalSchedule):
        seconds = schedule.interval.total_seconds()
        unit, size = next((unit, size) for unit, size in reversed(UNITS.items()) if seconds % size == 0 or size == 1)
        return f"every {seconds / size:g} {unit}"
    return f"rrule {schedule.rrule} ({zone})" if isinstance(schedule, RRuleSchedule) else "by hand"


# --- deploying ----------------------------------------------------------------------------------------------------------


def deploy(project: Project, graph: Graph, request: Request, terms: Terms, code: Path = CODE_ROOT) -> tuple[Listed, list[str]]:
    """Makes or changes the deployment of a recipe. A paused one stays paused.

    Args:
        project: that of the recipe; its runs work there, so workers need that folder.
        graph: the recipe, loaded.
        request: what its runs are asked for, unless the form says otherwise.
        terms: where and when.
        code: folder of our packages that its runs load.

    Returns:
        The deployment as it is now, and what its owner should know.

    Raises:
        UsageProblem: the pool, the block or the GPU pool does not exist, or the name is taken.
        ServerAway: the server does not answer.
    """
    name = _checked_name(terms.name or name_of(graph, request))
    with _asking() as client:
        there = _deployed(client, project, name)
        pool = _process_pool(client, terms.pool)
        block = _block(client, terms.notify)
        if terms.gpu_pool:
            _set_gpu_pool(client, terms.gpu_pool, terms.gpu_slots)
        deployment = client.create_deployment(
            client.create_flow_from_name(FLOW_NAME),
            name,
            version=commit_of(project),
            description=f"{graph.description}\n\n`{project.root}`",
            tags=[*tags_of(project, graph.recipe), *([REHEARSAL] if request.rehearse else [])],
            schedules=[DeploymentScheduleCreate(schedule=terms.schedule, active=not _sleeps(there))] if terms.schedule else [],
            concurrency_limit=1,
            concurrency_options=ConcurrencyOptions(collision_strategy=WHEN_BUSY[terms.when_busy]),
            parameters=parameters_of(project, graph, request, terms.gpu_pool),
            parameter_openapi_schema=form_of(project, graph, request),
            enforce_parameter_schema=True,
            entrypoint=ENTRYPOINT,
            pull_steps=[{"prefect.deployments.steps.set_working_directory": {"directory": str(code)}}],
            work_pool_name=pool,
            job_variables=QUIET,
        )
        _set_automations(client, deployment, name, block, terms.silence)
        listed = _listed(client, client.read_deployment(deployment))
    notes = []
    if not listed.workers:
        notes.append(f"no worker of {pool} gives signs of life: runs wait until `prefect worker start --pool {pool}` has been typed here")
    if listed.paused:
        notes.append(f"{name} is paused and stays so: {command('resume', name)} lets its schedule start runs again")
    return listed, notes


def name_of(graph: Graph, request: Request) -> str:
    """What a deployment is called where nobody gives it a name: rehearsals of a recipe stand beside its runs."""
    return f"{graph.recipe}-{REHEARSAL}" if request.rehearse else graph.recipe


def parameters_of(project: Project, graph: Graph, request: Request, gpu_pool: str | None) -> dict[str, Any]:
    """What `post_train` is called with, unless the form says otherwise."""
    words = _words(graph)
    lists = {name: _once(words[graph.find(stage).address] for stage in getattr(request, name)) for name in ("start", "until", "force")}
    lists["overrides"] = _once(request.overrides)
    one = {"recipe": request.recipe, "project": str(project.root), "profile": request.profile, "gpu_pool": gpu_pool,
           "rehearse": request.rehearse}  # fmt: skip
    return one | lists


def _once(texts: Iterable[str]) -> list[str]:
    """Each once, as the form wants them; of two overrides of a field the later one counts."""
    return list(dict.fromkeys(reversed(list(texts))))[::-1]


def _words(graph: Graph) -> dict[str, str]:
    """Address → how the form calls a stage: by name where that is enough, so that it fits every variant."""
    names = Counter(node.name for node in graph.nodes.values())
    return {address: node.name if names[node.name] == 1 else address for address, node in graph.nodes.items()}


def form_of(project: Project, graph: Graph, request: Request) -> dict[str, Any]:
    """The parameters of `post_train` as a JSON schema, with what this project and this recipe have to choose from.

    Prefect shows it as a form, and its API refuses what does not fit.
    """
    schema = parameter_schema(post_train).model_dump_for_openapi()
    stages = list(_words(graph).values())
    profiles = sorted({path.stem for path in project.executions.glob("*.yaml")} | ({request.profile} if request.profile else set()))
    texts = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
    narrowed: dict[str, dict[str, Any]] = {
        "recipe": {"type": "string", "enum": [request.recipe]},
        "project": {"type": "string", "enum": [str(project.root)], "readOnly": True},
        "overrides": texts | {"items": {"type": "string", "pattern": r"^\s*[^=\s]+\s*="}},
        "profile": {"anyOf": [{"type": "string", "enum": profiles}, {"type": "null"}]},
        "start": texts | {"items": {"type": "string", "enum": stages}, "title": "from"},
        "until": texts | {"items": {"type": "string", "enum": stages}},
        "force": texts | {"items": {"type": "string", "enum": stages}},
    }
    for name, shape in narrowed.items():
        kept = {key: value for key, value in schema["properties"][name].items() if key in ("title", "description", "position")}
        schema["properties"][name] = kept | shape
    return schema | {"additionalProperties": False}


def _checked_name(name: str) -> str:
    wrong = sorted(set("/%&<>") & set(name))
    if wrong or not name.strip():
        why = f"Prefect takes no {' '.join(wrong)} in names of deployments" if wrong else "it is empty"
        raise UsageProblem(f"--name {name!r}: {why}; give another")
    return name


def _deployed(client: SyncPrefectClient, project: Project, name: str) -> DeploymentResponse | None:
    """What this project has deployed under the name.

    Raises:
        UsageProblem: the name is taken by another one's.
    """
    try:
        there = client.read_deployment_by_name(f"{FLOW_NAME}/{name}")
    except ObjectNotFound:
        return None
    if there.parameters.get("project") != str(project.root):
        owner = there.parameters.get("project") or "something else"
        raise UsageProblem(f"{name} is deployed on this server for {owner}: remove it there, or give this one another name with --name")
    return there


def _sleeps(deployment: DeploymentResponse | None) -> bool:
    """Whether its schedule was switched off, as the dashboard does; `pause` and the API pause the whole deployment."""
    return deployment is not None and bool(deployment.schedules) and not any(one.active for one in deployment.schedules)


def _process_pool(client: SyncPrefectClient, name: str) -> str:
    try:
        pool = client.read_work_pool(name)
    except ObjectNotFound as error:
        there = ", ".join(sorted(pool.name for pool in client.read_work_pools())) or "none"
        made = f"`prefect work-pool create --type process {name}` makes it"
        raise UsageProblem(f"--work-pool {name}: there is no such work pool (there are: {there}); {made}") from error
    if pool.type != "process":
        remedy = "name a pool of type process; what a run starts elsewhere is said by its execution profile"
        raise UsageProblem(f"--work-pool {name}: it is of type {pool.type}, and runs begin in the folder of this project: {remedy}")
    return pool.name


def _block(client: SyncPrefectClient, name: str | None) -> UUID | None:
    if name is None:
        return None
    kind, _, own = name.partition("/")
    try:
        return client.read_block_document_by_name(own, kind).id
    except ObjectNotFound as error:
        how = "make it in Prefect's dashboard under Blocks, and name it TYPE/NAME, e.g. slack-webhook/team"
        raise UsageProblem(f"--notify {name}: there is no such notification block; {how}") from error


def _set_gpu_pool(client: SyncPrefectClient, name: str, slots: int | None) -> None:
    if slots is not None:
        try:
            limit = client.read_global_concurrency_limit_by_name(name)
        except ObjectNotFound:
            client.create_global_concurrency_limit(GlobalConcurrencyLimitCreate(name=name, limit=slots))
            return
        if limit.limit != slots:
            client.upsert_global_concurrency_limit_by_name(name, slots)
        return
    try:
        client.read_global_concurrency_limit_by_name(name)
    except ObjectNotFound as error:
        raise UsageProblem(f"--gpu-pool {name}: there is no such limit; --gpu-pool {name}=N makes one of N runs at a time") from error


def _set_automations(client: SyncPrefectClient, deployment: UUID, name: str, block: UUID | None, silence: timedelta) -> None:
    """What the server does by itself; it goes when the deployment goes.

    A run that died with its worker (a reboot) would hold the one slot of its deployment for ever where the server was started anew since:
    it keeps leases in memory. A run that starts and never runs (its worker died in between) holds it as well.
    """
    owner = f"prefect.deployment.{deployment}"
    client.delete_resource_owned_automations(owner)
    related: dict[str, Any] = {"prefect.resource.role": "deployment", "prefect.resource.id": owner}
    ours: dict[str, Any] = {"match": {"prefect.resource.id": "prefect.flow-run.*"}, "match_related": related}
    absent: dict[str, Any] = ours | {"posture": Posture.Proactive, "within": silence, "for_each": {"prefect.resource.id"}}
    silent = EventTrigger(after={ALIVE}, expect={ALIVE, *ENDED}, **absent)
    stuck = EventTrigger(after={"prefect.flow-run.Pending"}, expect={"prefect.flow-run.Running", *ENDED}, **absent)
    found: dict[str, tuple[EventTrigger, Any]] = {
        "died in silence": (silent, _crashed("no sign of life; the next run takes over")),
        "never began": (stuck, _crashed("its worker took it and never started it")),
    }
    if block is not None:
        failed = EventTrigger(expect=ENDED_BADLY, **ours)
        fell = EventTrigger(expect={FELL}, match={"prefect.resource.id": "pedigree.score.*"}, match_related=related)
        state, body = "{{ flow_run.name }}: {{ flow_run.state.name }}", "{{ flow_run.state.message }}\n{{ flow_run|ui_url }}"
        score = "{{ event.resource.name }}"
        found["failed"] = failed, SendNotification(block_document_id=block, subject=state, body=body)
        found["a score fell"] = fell, SendNotification(block_document_id=block, subject=score, body=score + "\n{{ event.payload }}")
    for what, (trigger, action) in found.items():
        client.create_automation(
            AutomationCore(name=f"{name}: {what}", trigger=trigger, actions=[action], owner_resource=owner, tags=[TAG])
        )


def _crashed(why: str) -> ChangeFlowRunState:
    return ChangeFlowRunState(name=None, force=False, state=StateType.CRASHED, message=why)


def own_pool(project: Project) -> str:
    """The work pool of `pedigree serve` in this project on this machine, made where there is none yet."""
    name = f"pedigree-serve-{digest([socket.gethostname(), str(project.root)])[:8]}"
    with _asking() as client:
        try:
            client.read_work_pool(name)
        except ObjectNotFound:
            template = ProcessWorker.get_default_base_job_template()
            client.create_work_pool(WorkPoolCreate(name=name, type="process", base_job_template=template, description=str(project.root)))
    return name


# --- what is deployed ---------------------------------------------------------------------------------------------------


def deployments(project: Project) -> list[Listed]:
    """The deployments of a project, by name.

    Raises:
        ServerAway: the server does not answer.
    """
    with _asking() as client:
        return [_listed(client, deployment) for deployment in _of(client, project)]


def pause(project: Project, name: str) -> list[Planned]:
    """Its schedule starts no runs any more; those it had planned are forgotten, those that wait for their turn cancelled.

    A run that has begun goes on.

    Returns:
        What was planned by hand, and begins all the same.

    Raises:
        UsageProblem: nothing of this project is deployed under this name.
        ServerAway: the server does not answer.
    """

    def stop(client: SyncPrefectClient, deployment: UUID) -> list[Planned]:
        planned: list[FlowRun] = []
        for _ in range(PAUSES):
            client.pause_deployment(deployment)  # forgets what is planned; the scheduler may have been at work on it
            found = _runs(client, client.read_deployment(deployment), (StateType.SCHEDULED,))
            for run in found:
                if _awaits_slot(run) and not run.run_count:
                    _cancel(client, run)
            planned = [run for run in found if not _awaits_slot(run) and not run.run_count]
            if not any(run.auto_scheduled for run in planned):
                break
        return [Planned(run.name, run.id, run.expected_start_time) for run in planned if not run.auto_scheduled]

    return _change(project, name, stop)


def resume(project: Project, name: str) -> None:
    """Its schedule starts runs again, also where it was switched off in the dashboard. Raises as `pause`."""

    def start(client: SyncPrefectClient, deployment: UUID) -> None:
        client.resume_deployment(deployment)
        for one in client.read_deployment(deployment).schedules:
            client.update_deployment_schedule(deployment, one.id, active=True)

    _change(project, name, start)


def remove(project: Project, name: str) -> None:
    """Takes the deployment, its planned runs and its automations off the server; artifacts and runs that were stay. Raises as `pause`."""

    def forget(client: SyncPrefectClient, deployment: UUID) -> None:
        client.delete_resource_owned_automations(f"prefect.deployment.{deployment}")
        client.delete_deployment(deployment)

    _change(project, name, forget)


def cancel_runs(project: Project, name: str) -> int:
    """Cancels the runs of a deployment that run, or are about to; returns how many. Nothing deployed under this name: 0.

    Raises:
        ServerAway: the server does not answer.
    """
    with _asking() as client:
        found = [deployment for deployment in _of(client, project) if _is_called(deployment, name)]
        types = (StateType.RUNNING, StateType.PENDING, StateType.SCHEDULED)
        runs = [run for deployment in found for run in _runs(client, deployment, types)]
        under_way = [run for run in runs if run.state_type != StateType.SCHEDULED or run.run_count or _awaits_slot(run)]
        return sum(_cancel(client, run) for run in under_way)  # others are merely planned


def _awaits_slot(run: FlowRun) -> bool:
    """Whether its time has come, and only the run before it keeps it from beginning (`--when-busy wait`)."""
    return run.state_name == AWAITS_SLOT


def _cancel(client: SyncPrefectClient, run: FlowRun) -> bool:
    """Cancels a run; returns whether it had not ended by itself meanwhile."""
    is_between_attempts = run.state_type == StateType.SCHEDULED and run.run_count  # its process is gone: nobody would end the cancelling
    try:
        answer = client.set_flow_run_state(run.id, Cancelled() if is_between_attempts else Cancelling())
    except ObjectNotFound:
        return False
    # one that has not begun has nothing that would have to be ended: the server answers that it is cancelled already
    return answer.status == SetStateStatus.ACCEPT or (answer.state is not None and answer.state.is_cancelled())


def _is_called(deployment: DeploymentResponse, name: str) -> bool:
    """By its own name or by that of its recipe."""
    is_other = REHEARSAL in deployment.tags or any(tag.startswith("variant:") for tag in deployment.tags)
    return deployment.name == name or (f"recipe:{name}" in deployment.tags and not is_other)


def _change(project: Project, name: str, change: Callable[[SyncPrefectClient, UUID], T]) -> T:
    with _asking() as client:
        known = {deployment.name: deployment.id for deployment in _of(client, project)}
        if name not in known:
            there = ", ".join(known) or "none"
            raise UsageProblem(f"{name} is not deployed for this project (deployed: {there}); {command('deploy', name)} would deploy it")
        return change(client, known[name])


def _of(client: SyncPrefectClient, project: Project) -> list[DeploymentResponse]:
    found: list[DeploymentResponse] = []
    while len(found) % PAGE == 0:
        page = client.read_deployments(
            flow_filter=FlowFilter(name=FlowFilterName(any_=[FLOW_NAME])),
            deployment_filter=DeploymentFilter(tags=DeploymentFilterTags(all_=[TAG])),
            sort=DeploymentSort.NAME_ASC,
            limit=PAGE,
            offset=len(found),
        )
        if not page:
            break
        found += page
    return sorted((one for one in found if one.parameters.get("project") == str(project.root)), key=lambda one: one.name)


def _listed(client: SyncPrefectClient, deployment: DeploymentResponse) -> Listed:
    planned = _runs(client, deployment, (StateType.SCHEDULED,), FlowRunSort.EXPECTED_START_TIME_ASC, limit=1)
    past = _runs(client, deployment, tuple(set(StateType) - {StateType.SCHEDULED}), FlowRunSort.EXPECTED_START_TIME_DESC, limit=20)
    pool = deployment.work_pool_name or ""
    workers = client.read_workers_for_work_pool(pool) if pool else []
    state = next((run.state for run in past if run.run_count), None)  # those that were left out have not run
    paused = deployment.paused or _sleeps(deployment)
    return Listed(
        name=deployment.name,
        schedule="; ".join(said(one.schedule) for one in deployment.schedules) or said(None),
        pool=pool,
        paused=paused,
        workers=sum(str(getattr(worker.status, "value", worker.status)) == "ONLINE" for worker in workers),
        next=planned[0].expected_start_time if planned and not paused else None,
        last=f"{state.name}{f': {state.message}' if state.message else ''}" if state else "",
        tags=deployment.tags,
    )


def _runs(
    client: SyncPrefectClient,
    deployment: DeploymentResponse,
    types: Sequence[StateType],
    sort: FlowRunSort = FlowRunSort.EXPECTED_START_TIME_ASC,
    limit: int = PAGE,
) -> list[FlowRun]:
    return client.read_flow_runs(
        deployment_filter=DeploymentFilter(id=DeploymentFilterId(any_=[deployment.id])),
        flow_run_filter=FlowRunFilter(state=FlowRunFilterState(type=FlowRunFilterStateType(any_=list(types)))),
        sort=sort,
        limit=limit,
    )


@contextmanager
def _asking() -> Iterator[SyncPrefectClient]:
    """The way to the server, for commands: one that is away is said at once, one that is busy is asked again.

    Raises:
        ServerAway: it does not answer, or refuses.
    """
    address = str(PREFECT_API_URL.value()).rpartition("@")[2]
    try:
        with get_client({"timeout": CALL_S}, sync_client=True) as client:
            with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}):
                client.request("GET", "/health")
            yield client
    except httpx.HTTPStatusError as error:
        answer = error.response.text.strip()[:300]
        raise ServerAway(f"the Prefect server {address} refuses ({error.response.status_code}): {answer}") from error
    except (httpx.HTTPError, RuntimeError) as error:
        remedy = "is it running? `prefect server start` starts one"
        raise ServerAway(f"the Prefect server {address} does not answer ({error}): {remedy}") from error
