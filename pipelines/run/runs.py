"""Run a recipe: make every stage current, independent stages in parallel."""

import sys
import threading
import traceback
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from pedigree.configs.base.document import read_document
from pedigree.configs.base.project import Project
from pedigree.configs.base.texts import command, shown
from pedigree.configs.language.compile import overrides_of, params_file
from pedigree.configs.language.graph import Graph, Node
from pedigree.pipelines.jobs.attempts import BUG
from pedigree.pipelines.jobs.context import RunContext, StageFailed
from pedigree.pipelines.jobs.events import RunEnded, RunEvent, StageEnded, Watch, unwatched
from pedigree.pipelines.jobs.scratch_state import address_of
from pedigree.pipelines.run.ensure import Result, clear_leftovers, ensure, run_under_dvc
from pedigree.pipelines.run.opening import compiled_request, open_run
from pedigree.pipelines.run.pins import refuse_unpinned
from pedigree.pipelines.run.plans import Plan, plan
from pedigree.pipelines.run.publication import log_file
from pedigree.pipelines.tracking.tracking import tracked


@dataclass(frozen=True)
class NotRun:
    """A stage that was not attempted: a stage that it depends on failed, or the run was canceled."""

    address: str
    because: str


StageEnd = Result | StageFailed | NotRun


def current_among(ends: Iterable[StageEnd]) -> frozenset[str]:
    """Addresses of the stages that a run left current. The artifact of another stage may be of an earlier version."""
    return frozenset(end.address for end in ends if isinstance(end, Result))


THREADS = "stage"
"""Prefix of the names of a run's threads."""


@dataclass
class Progress:
    """Scheduling state of a run's stages, in the order of the graph."""

    planned: Mapping[str, Plan]
    watch: Watch
    ends: dict[str, StageEnd] = field(default_factory=dict)
    started: set[str] = field(default_factory=set)

    def ready(self) -> list[Plan]:
        """Stages whose parents are all current; stages below a failed one are skipped."""
        found = []
        for address, entry in self.planned.items():
            if address in self.started or address in self.ends:
                continue
            parents = [parent for parent in entry.node.parents if parent in self.planned]
            lost = [parent for parent in parents if isinstance(self.ends.get(parent), (StageFailed, NotRun))]
            if lost:
                self.leave_out(address, f"{lost[0]} failed")
            elif all(isinstance(self.ends.get(parent), Result) for parent in parents):
                found.append(entry)
        return found

    def leave_out(self, address: str, because: str) -> None:
        self.ends[address] = NotRun(address, because)
        _report(self.watch, StageEnded(address, "skipped", because))


def _report(watch: Watch, event: RunEvent) -> None:
    with suppress(Exception):  # a bug in a consumer must not end the run
        watch(event)


def stage_under_dvc(project: Project, address: str, watch: Watch = unwatched) -> Result:
    """Implement `pedigree stage RECIPE/STAGE`, the command in `dvc.yaml`; raises StageFailed with a one-line reason."""
    recipe, _, name = address.partition("/")
    run = open_run(project, compiled_request(project, recipe), watch=watch)
    node = run.graph.nodes.get(address)
    if node is None:
        raise StageFailed(address, "refused", f"recipe {recipe} has changed and has no stage {name!r}; {_recompile(run.graph)}")
    compiled = read_document(project.root / params_file(recipe), params_file(recipe)).value
    if compiled.get(name) != node.identity():
        message = f"{params_file(recipe)} does not match the current recipe; {_recompile(run.graph)}"
        raise StageFailed(address, "refused", message)
    refuse_unpinned(run.graph, [address])
    return run_under_dvc(run, node)


def settled(planned: Iterable[Plan]) -> list[Result]:
    """The results of planned stages that are up to date."""
    done = (entry for entry in planned if entry.decided and not entry.reasons)
    return [Result(entry.node.address, "remote" if entry.remote else "unchanged", 0.0) for entry in done]


def clear_settled(run: RunContext, planned: Iterable[Plan]) -> None:
    """Clear what killed runs have left of the stages that are up to date."""
    clear_leftovers(run, [entry.node for entry in planned if entry.decided and not entry.reasons and not entry.remote])


def run_graph(
    run: RunContext, selection: Collection[str] | None = None, forced: Collection[str] = (), planned: Collection[Plan] | None = None
) -> list[StageEnd]:
    """Make the selected stages (default: all) current; return how each ended, in the order of the graph.

    The only scheduling loop, observed (`pipelines/prefect/observer.py`) or not. If a stage fails, only its descendants are skipped. On
    Ctrl-C, running jobs are stopped and their checkpoints kept. `planned` is the plan of the same stages, if it has just been made.
    """
    elsewhere = sum(run.settings(node)[1].launcher.type != "local" for node in run.graph.nodes.values())  # they may wait for days
    with (
        _reported(run) as ends,
        tracked(run, selection),
        ThreadPoolExecutor(max(2, run.execution.slots) + elsewhere, thread_name_prefix=THREADS) as pool,
    ):
        planned = plan(run, selection, forced, lenient=True) if planned is None else planned
        progress = Progress({entry.node.address: entry for entry in planned}, run.watch)
        for result in settled(planned):
            progress.ends[result.address] = result
            _report(run.watch, StageEnded(result.address, result.outcome, seconds=result.seconds))
        clear_settled(run, planned)
        running: dict[Future[Result], Node] = {}
        try:
            while True:
                for entry in progress.ready():
                    address = entry.node.address
                    if run.cancelled.is_set():
                        progress.leave_out(address, "the run was canceled")
                    else:
                        progress.started.add(address)
                        stale = entry.decided and bool(entry.reasons)
                        running[pool.submit(ensure, run, entry.node, force=address in forced, stale=stale)] = entry.node
                if not running:
                    break
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    node = running.pop(future)
                    progress.ends[node.address] = _end_of(run, node, future)
        except BaseException:
            run.cancelled.set()
            raise
        ends += [progress.ends[address] for address in progress.planned]
    return ends


def still_ending() -> bool:
    """Whether threads of an interrupted run are still ending its jobs, because a second Ctrl-C ended the wait for them."""
    return any(thread.name.startswith(THREADS) for thread in threading.enumerate())


@contextmanager
def _reported(run: RunContext) -> Iterator[list[StageEnd]]:
    """Report how a run ended: by the block's exception, or by the stages' ends, which the block adds to the list."""
    ends: list[StageEnd] = []
    try:
        yield ends
    except BaseException as error:
        _report(run.watch, RunEnded.by(error, run.keep_jobs))
        raise
    failed = [str(end) for end in ends if isinstance(end, StageFailed)]
    _report(run.watch, RunEnded("failed", "; ".join(failed)) if failed else RunEnded("completed"))


def _end_of(run: RunContext, node: Node, future: "Future[Result]") -> Result | StageFailed:
    """How a stage ended; even a bug in Pedigree fails only this stage, because others running in parallel must not be affected."""
    error = future.exception()
    if error is None or isinstance(error, StageFailed):
        return error or future.result()
    message = f"{type(error).__name__}: {error}: {BUG}"
    failed = StageFailed(node.address, "bug", message, _keep_traceback(run, node, error))
    _report(run.watch, StageEnded(node.address, "failed", failed.message, failed.cause))
    return failed


def _keep_traceback(run: RunContext, node: Node, error: BaseException) -> str | None:
    """Append the traceback to the stage's log; return the log's path within the project."""
    text = "".join(traceback.format_exception(error))
    with suppress(Exception):  # a full disk, or another bug, must not affect other stages
        log = _open_log(run.project, node.address)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a") as stream:
            stream.write(text)
        return log.relative_to(run.project.root).as_posix()
    sys.stderr.write(shown(text))
    return None


def _open_log(project: Project, address: str) -> Path:
    """The log of the stage's unfinished job if there is one, else of its last finished one."""
    for log in (project.private / "scratch").glob("*/log.txt"):
        if address_of(log.parent) == address:
            return log
    return log_file(project, address)


def _recompile(graph: Graph) -> str:
    changes = [word for change in overrides_of(graph) for word in ("--set", change)]
    return f"recompile it with {command('compile', graph.source or Path(graph.recipe).name, *changes)}"
