"""The flow that schedules start. It runs a recipe as `pedigree run` does; Prefect displays, schedules and cancels it."""

import asyncio
import logging
import threading
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from contextvars import Context, copy_context
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar
from uuid import UUID

from prefect import flow, get_run_logger
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.concurrency.sync import concurrency
from prefect.flows import Flow
from prefect.runtime import flow_run as current_flow_run
from prefect.states import AwaitingRetry, Cancelled, Completed

from pedigree.configs.base.problems import PedigreeError
from pedigree.configs.base.project import Project
from pedigree.pipelines.jobs.attempts import CANCELLED
from pedigree.pipelines.jobs.context import RunContext, StageFailed
from pedigree.pipelines.jobs.events import Notice, RunEvent
from pedigree.pipelines.jobs.launchers import Launchers
from pedigree.pipelines.prefect.observer import run_observed
from pedigree.pipelines.prefect.record import FlowRecord
from pedigree.pipelines.prefect.shown import CALL_S, FLOW_NAME, shown_recipe, tags_of
from pedigree.pipelines.publish.regressions import measured, remember, remembered
from pedigree.pipelines.publish.report import write_report
from pedigree.pipelines.rehearsal.preparing import prepare
from pedigree.pipelines.rehearsal.proof import proof_of, sentences
from pedigree.pipelines.run.checks import all_done, checked_plan
from pedigree.pipelines.run.opening import Request, open_run
from pedigree.pipelines.run.plans import selection
from pedigree.pipelines.run.runs import StageEnd, clear_settled, current_among, settled

LOG = logging.getLogger(__name__)
T = TypeVar("T")
RETRIES, RETRY_S = 3, 10.0
"""Maximum restarts of a deployment's run whose process died, and the delay in seconds."""


def end_jobs(flow: Flow[Any, Any], flow_run: FlowRun, state: State) -> None:
    """Hook: end the jobs of a canceled flow run. Runs in the worker's process, because the flow run's may have been killed."""
    real = Project(Path(flow_run.parameters["project"]))
    for project in (real, *real.rehearsals):
        record = FlowRecord.read(project, str(flow_run.id))
        launcher = Launchers(project)
        for folder in record.folders:
            handle = launcher.find(folder)
            if handle is not None:
                try:
                    launcher.cancel(handle)
                except PedigreeError as error:  # its scheduler does not answer; the other jobs are ended all the same
                    LOG.warning("%s", error)
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
    real = Project(Path(project))
    if rehearse:
        run = prepare(real, recipe, request.overrides, profile, LOG.info).opened(_warn)
    else:
        run = open_run(real, request, watch=_warn)
    run.keep_jobs = True
    chosen, forced = selection(run, request)
    flow_run_id = UUID(str(current_flow_run.get_id()))
    introduce(run, flow_run_id)
    planned = checked_plan(run, chosen, forced)
    done = settled(planned)
    if len(done) == len(planned):
        clear_settled(run, planned)
        return Completed(message=all_done(len(done), sum(end.outcome == "remote" for end in done), recipe))
    if remembered(run.project, run.graph.recipe) is None:
        remember(run.project, run.graph.recipe, measured(run.project, run.graph))
    pool = None if rehearse else gpu_pool
    now = None if pool else planned  # after the wait for a slot, the run plans again
    try:
        with _slot_of(pool):
            ends = _undisturbed(run, lambda: run_observed(run, chosen, forced, now, flow_run_id=flow_run_id))
    except KeyboardInterrupt:
        if _is_cancelled_by_command(run, flow_run_id):
            return Cancelled(message=BY_COMMAND)
        raise
    write_report(run.project, run.graph, current_among(ends))
    if rehearse:
        get_run_logger().info("%s", "\n".join(sentences(proof_of(run.project, run.graph, run.changes))))
    return _outcome(run, ends)


def _warn(event: RunEvent) -> None:
    if isinstance(event, Notice) and event.urgent:
        LOG.warning(event.text)


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
            if starting:  # an error may arrive in `start`, once the thread runs
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


def introduce(run: RunContext, flow_run_id: UUID) -> None:
    """Update the name and tags of a scheduled flow run, because those of its deployment may be out of date."""
    with suppress(Exception), get_client({"timeout": CALL_S}, sync_client=True) as client:
        about = {"name": shown_recipe(run), "tags": tags_of(run.project, run.graph.recipe)}
        client.request("PATCH", "/flow_runs/{id}", json=about, path_params={"id": flow_run_id})
