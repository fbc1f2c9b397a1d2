"""Prefect deployments of the flow `post_train`, each for one recipe or variant of a project."""

import socket
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Literal
from uuid import UUID

import httpx
from prefect.automations import AutomationCore, EventTrigger
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import DeploymentScheduleCreate, WorkPoolCreate
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
from prefect.client.schemas.sorting import DeploymentSort, FlowRunSort
from prefect.events.actions import ChangeFlowRunState, SendNotification
from prefect.events.schemas.automations import Posture
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from prefect.states import AwaitingConcurrencySlot, Cancelled, Cancelling
from prefect.utilities.callables import parameter_schema
from prefect.workers.process import ProcessWorker

from pedigree.configs.base.frozen import digest
from pedigree.configs.base.problems import PedigreeError, UsageProblem
from pedigree.configs.base.project import Project
from pedigree.configs.base.texts import command
from pedigree.configs.language.execution import profile_names
from pedigree.configs.language.graph import Graph
from pedigree.data.artifacts.provenance import CODE_ROOT
from pedigree.pipelines.flow import post_train
from pedigree.pipelines.ledger.git import short_commit
from pedigree.pipelines.prefect.recurrence import Schedule, describe
from pedigree.pipelines.prefect.shown import FELL, FLOW_NAME, REHEARSAL, TAG, tags_of
from pedigree.pipelines.run.opening import Request

ENTRYPOINT = "pedigree/pipelines/flow.py:post_train"
CALL_S = 30.0
PAUSES = 3
PAGE = 200
"""Maximum page size of the server."""
SILENCE = timedelta(minutes=10)
"""Prefect marks a run without a heartbeat for this long as crashed, which frees its slot. The interval is three minutes
(`PREFECT_FLOWS_HEARTBEAT_FREQUENCY`)."""
ALIVE = "prefect.flow-run.heartbeat"
ENDED = {f"prefect.flow-run.{name}" for name in ("Completed", "Failed", "Cancelled", "Crashed", "AwaitingRetry")}
ENDED_BADLY = {"prefect.flow-run.Failed", "prefect.flow-run.Crashed", "prefect.flow-run.TimedOut"}
WHEN_BUSY = {"skip": ConcurrencyLimitStrategy.CANCEL_NEW, "wait": ConcurrencyLimitStrategy.ENQUEUE}
QUIET = {"stream_output": False}
"""Job variables: without streaming, a flow run survives its worker, whose pipe would break. Prefect still gets the log."""


@dataclass(frozen=True)
class Terms:
    """Settings of a deployment."""

    pool: str | None = None
    """Name of the work pool; None for that of `pedigree serve` on this machine."""
    schedule: Schedule | None = None
    """None if runs are started manually."""
    name: str | None = None
    """Name of the deployment; defaults to the recipe or variant."""
    when_busy: Literal["skip", "wait"] = "skip"
    gpu_pool: str | None = None
    gpu_slots: int | None = None
    """Number of slots of the GPU pool; None leaves it unchanged."""
    notify: str | None = None
    """Notification block (`TYPE/NAME`) for failures and score regressions."""


@dataclass(frozen=True)
class Listed:
    """A deployment as listed by `pedigree schedules list`."""

    name: str
    schedule: str
    pool: str
    paused: bool
    workers: int
    """Number of online workers of its pool."""
    next: datetime | None
    last: str
    """State of its last run; empty if there was none."""
    tags: Sequence[str]


# --- deploying ----------------------------------------------------------------------------------------------------------


def deploy(project: Project, graph: Graph, request: Request, terms: Terms, code: Path = CODE_ROOT) -> tuple[Listed, list[str]]:
    """Create or update the deployment of a recipe. A paused deployment stays paused.

    Args:
        project: the recipe's project; runs execute there, so workers need access to its folder.
        graph: the loaded recipe.
        request: default parameters of its runs.
        terms: work pool, schedule and other settings.
        code: folder of the Pedigree packages that its runs import.

    Returns:
        The deployment, and notes for the user.

    Raises:
        UsageProblem: the work pool, the block or the GPU pool does not exist, or the name is taken.
        PedigreeError: the server is unreachable.
    """
    default = f"{graph.recipe}-{REHEARSAL}" if request.rehearse else graph.recipe  # so that rehearsals can coexist with runs
    name = _checked_name(terms.name or default)
    with _connected() as client:
        there = _deployed(client, project, name)
        pool = _process_pool(client, terms.pool) if terms.pool else _own_pool(client, project)
        block = _block(client, terms.notify)
        if terms.gpu_pool:
            _set_gpu_pool(client, terms.gpu_pool, terms.gpu_slots)
        deployment = client.create_deployment(
            client.create_flow_from_name(FLOW_NAME),
            name,
            version=short_commit(project.root),
            description=f"{graph.description}\n\n`{project.root}`",
            tags=[*tags_of(project, graph.recipe), *([REHEARSAL] if request.rehearse else [])],
            schedules=[DeploymentScheduleCreate(schedule=terms.schedule, active=not _is_inactive(there))] if terms.schedule else [],
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
        _set_automations(client, deployment, name, block)
        listed = _listed(client, client.read_deployment(deployment))
    notes = []
    if not listed.workers:
        notes.append(f"no worker of {pool} is online: start one here with `prefect worker start --pool {pool}`")
    if listed.paused:
        notes.append(f"{name} is still paused; {command('schedules', 'resume', name)} resumes its schedule")
    return listed, notes


def parameters_of(project: Project, graph: Graph, request: Request, gpu_pool: str | None) -> dict[str, Any]:
    """Return the default parameters of `post_train`."""

    def unique(texts: Sequence[str]) -> list[str]:
        """Remove duplicates, as the schema requires; the last occurrence wins, as for overrides."""
        return list(dict.fromkeys(texts[::-1]))[::-1]

    words = _form_names(graph)
    lists = {name: unique([words[graph.find(stage).address] for stage in getattr(request, name)]) for name in ("start", "until", "force")}
    one = {"recipe": request.recipe, "project": str(project.root), "profile": request.profile, "gpu_pool": gpu_pool}
    return one | lists | {"overrides": unique(request.overrides), "rehearse": request.rehearse}


def _form_names(graph: Graph) -> dict[str, str]:
    """Map each address to its name in the form: the stage name if unique, because it is valid for every variant."""
    names = Counter(node.name for node in graph.nodes.values())
    return {address: node.name if names[node.name] == 1 else address for address, node in graph.nodes.items()}


def form_of(project: Project, graph: Graph, request: Request) -> dict[str, Any]:
    """Return the JSON schema of `post_train`'s parameters, restricted to the choices of this project and recipe.

    Prefect renders it as a form, and its API validates parameters against it.
    """
    schema = parameter_schema(post_train).model_dump_for_openapi()
    stages = list(_form_names(graph).values())
    profiles = sorted({*profile_names(project.executions), *filter(None, [request.profile])})
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
        why = f"deployment names cannot contain {' '.join(wrong)}" if wrong else "the name is empty"
        raise UsageProblem(f"--name {name!r}: {why}")
    return name


def _deployed(client: SyncPrefectClient, project: Project, name: str) -> DeploymentResponse | None:
    """Return this project's deployment with a name, if any.

    Raises:
        UsageProblem: the name is taken by another project.
    """
    try:
        there = client.read_deployment_by_name(f"{FLOW_NAME}/{name}")
    except ObjectNotFound:
        return None
    if there.parameters.get("project") != str(project.root):
        owner = there.parameters.get("project") or "something else"
        raise UsageProblem(f"{name} is already deployed on this server for {owner}: remove it there, or choose another --name")
    return there


def _is_inactive(deployment: DeploymentResponse | None) -> bool:
    """Whether all its schedules are inactive, as set in the dashboard; `pause` and the API pause the whole deployment."""
    return deployment is not None and bool(deployment.schedules) and not any(one.active for one in deployment.schedules)


def _process_pool(client: SyncPrefectClient, name: str) -> str:
    try:
        pool = client.read_work_pool(name)
    except ObjectNotFound as error:
        there = ", ".join(sorted(pool.name for pool in client.read_work_pools())) or "none"
        remedy = f"create it with `prefect work-pool create --type process {name}`"
        raise UsageProblem(f"--work-pool {name}: no such work pool (existing: {there}); {remedy}") from error
    if pool.type != "process":
        remedy = "use a pool of type process; the execution profile controls where jobs run"
        raise UsageProblem(f"--work-pool {name} is of type {pool.type}, but runs must start in this project's folder: {remedy}")
    return pool.name


def _own_pool(client: SyncPrefectClient, project: Project) -> str:
    """Return the work pool of `pedigree serve` for this project and machine; create it if needed."""
    name = f"pedigree-serve-{digest([socket.gethostname(), str(project.root)])[:8]}"
    try:
        client.read_work_pool(name)
    except ObjectNotFound:
        template = ProcessWorker.get_default_base_job_template()
        client.create_work_pool(WorkPoolCreate(name=name, type="process", base_job_template=template, description=str(project.root)))
    return name


def _block(client: SyncPrefectClient, name: str | None) -> UUID | None:
    if name is None:
        return None
    kind, _, own = name.partition("/")
    try:
        return client.read_block_document_by_name(own, kind).id
    except ObjectNotFound as error:
        remedy = "create it in Prefect's dashboard under Blocks and specify TYPE/NAME, e.g. slack-webhook/team"
        raise UsageProblem(f"--notify {name}: no such notification block; {remedy}") from error


def _set_gpu_pool(client: SyncPrefectClient, name: str, slots: int | None) -> None:
    if slots is not None:
        client.upsert_global_concurrency_limit_by_name(name, slots)
        return
    try:
        client.read_global_concurrency_limit_by_name(name)
    except ObjectNotFound as error:
        raise UsageProblem(f"--gpu-pool {name}: no such pool; --gpu-pool {name}=N creates one with N slots") from error


def _set_automations(client: SyncPrefectClient, deployment: UUID, name: str, block: UUID | None) -> None:
    """Create the server-side automations of a deployment, which are deleted along with it.

    Without them, two kinds of runs would hold the deployment's only slot forever: runs that died with their worker (a reboot) if the server
    restarted too, because it keeps leases in memory, and runs whose worker died before starting them.
    """

    def crashed(why: str) -> ChangeFlowRunState:
        return ChangeFlowRunState(name=None, force=False, state=StateType.CRASHED, message=why)

    owner = f"prefect.deployment.{deployment}"
    client.delete_resource_owned_automations(owner)
    related: dict[str, Any] = {"prefect.resource.role": "deployment", "prefect.resource.id": owner}
    ours: dict[str, Any] = {"match": {"prefect.resource.id": "prefect.flow-run.*"}, "match_related": related}
    absent: dict[str, Any] = ours | {"posture": Posture.Proactive, "within": SILENCE, "for_each": {"prefect.resource.id"}}
    silent = EventTrigger(after={ALIVE}, expect={ALIVE, *ENDED}, **absent)
    stuck = EventTrigger(after={"prefect.flow-run.Pending"}, expect={"prefect.flow-run.Running", *ENDED}, **absent)
    found: dict[str, tuple[EventTrigger, Any]] = {
        "heartbeat lost": (silent, crashed("no heartbeat; the next run takes over")),
        "never started": (stuck, crashed("its worker accepted it but never started it")),
    }
    if block is not None:
        failed = EventTrigger(expect=ENDED_BADLY, **ours)
        fell = EventTrigger(expect={FELL}, match={"prefect.resource.id": "pedigree.score.*"}, match_related=related)
        state, body = "{{ flow_run.name }}: {{ flow_run.state.name }}", "{{ flow_run.state.message }}\n{{ flow_run|ui_url }}"
        score = "{{ event.resource.name }}"
        found["failed"] = failed, SendNotification(block_document_id=block, subject=state, body=body)
        found["score regression"] = fell, SendNotification(block_document_id=block, subject=score, body=score + "\n{{ event.payload }}")
    for what, (trigger, action) in found.items():
        client.create_automation(
            AutomationCore(name=f"{name}: {what}", trigger=trigger, actions=[action], owner_resource=owner, tags=[TAG])
        )


# --- managing deployments -----------------------------------------------------------------------------------------------


def deployments(project: Project) -> list[Listed]:
    """Return the deployments of a project, sorted by name.

    Raises:
        PedigreeError: the server is unreachable.
    """
    with _connected() as client:
        return [_listed(client, deployment) for deployment in _of(client, project)]


def pause(project: Project, name: str) -> list[FlowRun]:
    """Pause a deployment: delete its scheduled runs and cancel the queued ones. Runs in progress continue.

    Returns:
        Manually planned runs, which will still start.

    Raises:
        UsageProblem: this project has no such deployment.
        PedigreeError: the server is unreachable.
    """
    with _deployment(project, name) as (client, deployment):
        planned: list[FlowRun] = []
        for _ in range(PAUSES):
            client.pause_deployment(deployment)  # deletes scheduled runs, but the scheduler may add more concurrently
            found = _runs(client, deployment, (StateType.SCHEDULED,))
            for run in found:
                if _awaits_slot(run) and not run.run_count:
                    _cancel(client, run)
            planned = [run for run in found if not _awaits_slot(run) and not run.run_count]
            if not any(run.auto_scheduled for run in planned):
                break
        return [run for run in planned if not run.auto_scheduled]


def resume(project: Project, name: str) -> None:
    """Resume a deployment and reactivate its schedules, even if turned off in the dashboard. Raises as `pause`."""
    with _deployment(project, name) as (client, deployment):
        client.resume_deployment(deployment)
        for one in client.read_deployment(deployment).schedules:
            client.update_deployment_schedule(deployment, one.id, active=True)


def remove(project: Project, name: str) -> None:
    """Delete a deployment, its scheduled runs and its automations; artifacts and past runs are kept. Raises as `pause`."""
    with _deployment(project, name) as (client, deployment):
        client.delete_resource_owned_automations(f"prefect.deployment.{deployment}")
        client.delete_deployment(deployment)


def cancel_runs(project: Project, name: str) -> int:
    """Cancel the active and queued runs of a deployment and return their number; 0 if there is no such deployment.

    Raises:
        PedigreeError: the server is unreachable.
    """
    with _connected() as client:
        found = [deployment for deployment in _of(client, project) if _is_called(deployment, name)]
        types = (StateType.RUNNING, StateType.PENDING, StateType.SCHEDULED)
        runs = [run for deployment in found for run in _runs(client, deployment.id, types)]
        under_way = [run for run in runs if run.state_type != StateType.SCHEDULED or run.run_count or _awaits_slot(run)]
        return sum(_cancel(client, run) for run in under_way)  # the rest are only scheduled


def _awaits_slot(run: FlowRun) -> bool:
    """Whether a due run is queued behind the previous one (`--when-busy wait`)."""
    return run.state_name == AwaitingConcurrencySlot().name


def _cancel(client: SyncPrefectClient, run: FlowRun) -> bool:
    """Cancel a run; return False if it had already ended."""
    is_between_attempts = run.state_type == StateType.SCHEDULED and run.run_count  # no process exists that would complete the cancellation
    try:
        answer = client.set_flow_run_state(run.id, Cancelled() if is_between_attempts else Cancelling())
    except ObjectNotFound:
        return False
    # a run that has not started needs no cleanup, so the server reports it as canceled immediately
    return answer.status == SetStateStatus.ACCEPT or (answer.state is not None and answer.state.is_cancelled())


def _is_called(deployment: DeploymentResponse, name: str) -> bool:
    """Whether a name is the deployment's or its recipe's."""
    is_other = REHEARSAL in deployment.tags or any(tag.startswith("variant:") for tag in deployment.tags)
    return deployment.name == name or (f"recipe:{name}" in deployment.tags and not is_other)


@contextmanager
def _deployment(project: Project, name: str) -> Iterator[tuple[SyncPrefectClient, UUID]]:
    with _connected() as client:
        known = {deployment.name: deployment.id for deployment in _of(client, project)}
        if name not in known:
            there = ", ".join(known) or "none"
            raise UsageProblem(f"{name} is not deployed for this project (deployed: {there}); deploy it with {command('deploy', name)}")
        yield client, known[name]


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
    planned = _runs(client, deployment.id, (StateType.SCHEDULED,), FlowRunSort.EXPECTED_START_TIME_ASC, limit=1)
    past = _runs(client, deployment.id, tuple(set(StateType) - {StateType.SCHEDULED}), FlowRunSort.EXPECTED_START_TIME_DESC)
    pool = deployment.work_pool_name or ""
    workers = client.read_workers_for_work_pool(pool) if pool else []
    state = next((run.state for run in past if run.run_count), None)  # skipped runs have no run count
    paused = deployment.paused or _is_inactive(deployment)
    return Listed(
        name=deployment.name,
        schedule="; ".join(describe(one.schedule) for one in deployment.schedules) or describe(None),
        pool=pool,
        paused=paused,
        workers=sum(str(getattr(worker.status, "value", worker.status)) == "ONLINE" for worker in workers),
        next=planned[0].expected_start_time if planned and not paused else None,
        last=f"{state.name}{f': {state.message}' if state.message else ''}" if state else "",
        tags=deployment.tags,
    )


def _runs(
    client: SyncPrefectClient,
    deployment: UUID,
    types: Sequence[StateType],
    sort: FlowRunSort = FlowRunSort.EXPECTED_START_TIME_ASC,
    limit: int = PAGE,
) -> list[FlowRun]:
    return client.read_flow_runs(
        deployment_filter=DeploymentFilter(id=DeploymentFilterId(any_=[deployment])),
        flow_run_filter=FlowRunFilter(state=FlowRunFilterState(type=FlowRunFilterStateType(any_=list(types)))),
        sort=sort,
        limit=limit,
    )


@contextmanager
def _connected() -> Iterator[SyncPrefectClient]:
    """Open a client for a command: an unreachable server is an immediate error; calls to a busy server are retried.

    Raises:
        PedigreeError: the server is unreachable or rejects a request.
    """
    address = str(PREFECT_API_URL.value()).rpartition("@")[2]
    try:
        with get_client({"timeout": CALL_S}, sync_client=True) as client:
            with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}):
                client.request("GET", "/health")
            yield client
    except httpx.HTTPStatusError as error:
        answer = error.response.text.strip()[:300]
        raise PedigreeError(f"the Prefect server {address} rejected the request ({error.response.status_code}): {answer}") from error
    except (httpx.HTTPError, RuntimeError) as error:
        remedy = "check that it is running; `prefect server start` starts one"
        raise PedigreeError(f"the Prefect server {address} does not respond ({error}): {remedy}") from error
