"""Run a recipe: make every stage current, independent stages in parallel."""

import sys
import traceback
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from pedigree.configs.base.document import read_document
from pedigree.configs.base.paths import place_of, written_of
from pedigree.configs.base.project import Project
from pedigree.configs.base.texts import command, shown
from pedigree.configs.language.compile import overrides_of, params_file
from pedigree.configs.language.graph import Graph, Node
from pedigree.data.artifacts.artifacts import ArtifactError
from pedigree.data.artifacts.source_files import sha256_of
from pedigree.pipelines.jobs.attempts import BUG
from pedigree.pipelines.jobs.context import RunContext, StageFailed
from pedigree.pipelines.jobs.events import RunEnded, RunEvent, StageEnded, Watch, unwatched
from pedigree.pipelines.jobs.scratch_state import address_of
from pedigree.pipelines.ledger import raw_inputs
from pedigree.pipelines.ledger.identity import HASHES
from pedigree.pipelines.ledger.transfers import RemoteError
from pedigree.pipelines.quantities import counted
from pedigree.pipelines.run.ensure import Result, ensure, log_file, run_under_dvc
from pedigree.pipelines.run.opening import compiled_request, open_run
from pedigree.pipelines.run.pins import refuse_unpinned
from pedigree.pipelines.run.plans import Plan, plan


@dataclass(frozen=True)
class NotRun:
    """A stage that was not attempted: a stage that it depends on failed, or the run was canceled."""

    address: str
    because: str


StageEnd = Result | StageFailed | NotRun


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

    def settle(self, result: Result) -> None:
        """Report a stage that needs no work."""
        self.ends[result.address] = result
        _report(self.watch, StageEnded(result.address, result.outcome, seconds=result.seconds))

    def leave_out(self, address: str, because: str) -> None:
        """Skip a stage and report it immediately."""
        self.ends[address] = NotRun(address, because)
        _report(self.watch, StageEnded(address, "skipped", because))


def _report(watch: Watch, event: RunEvent) -> None:
    with suppress(Exception):  # a bug in a consumer must not end the run
        watch(event)


def stage_under_dvc(project: Project, address: str, watch: Watch = unwatched) -> Result:
    """Implement `pedigree stage RECIPE/STAGE`, the command in `dvc.yaml`.

    Raises:
        StageFailed: with a one-line reason.
        ConfigError: the recipe cannot be loaded.
    """
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


def run_graph(
    run: RunContext, selection: Collection[str] | None = None, forced: Collection[str] = (), planned: Collection[Plan] | None = None
) -> list[StageEnd]:
    """Make the selected stages (default: all) current; return how each ended, in the order of the graph.

    The only scheduling loop, observed (`pipelines/prefect/observer.py`) or not. If a stage fails, only its descendants are skipped. On
    Ctrl-C, running jobs are stopped and their checkpoints kept. `planned` is the plan of the same stages, if it has just been made.
    """
    with _reported(run) as ends, ThreadPoolExecutor(max(2, run.execution.slots), thread_name_prefix="stage") as pool:
        planned = plan(run, selection, forced, lenient=True) if planned is None else planned
        progress = Progress({entry.node.address: entry for entry in planned}, run.watch)
        for result in settled(planned):
            progress.settle(result)
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


def pull(run: RunContext, selection: Collection[str] | None = None) -> list[StageEnd]:
    """Fetch the files of all finished stages from the cache and the remote without running any; unfinished stages fail.

    Raises:
        RemoteError: there is no remote, or it cannot be used.
    """
    run.ledger.remote.require("pull from")
    run.fetch, run.make = True, False
    run.ledger.any_code = True
    return run_graph(run, selection)


@dataclass(frozen=True)
class RawInputs:
    """What became of the raw inputs of finished stages."""

    moved: int
    """Number of files that were sent or fetched."""
    left: tuple[str, ...]
    """One line for each of the others that are not on both sides: what it is, and why."""


def _finished(run: RunContext, selection: Collection[str]) -> Iterator[tuple[Node, Mapping[str, str]]]:
    """Stages with raw inputs that have a record, with the hashes there."""
    for address, node in run.graph.nodes.items():
        if node.files and address in selection:
            with suppress(ArtifactError, RemoteError):
                yield node, run.ledger.record(address).source_files


def push_inputs(run: RunContext) -> RawInputs:
    """Send the raw inputs of a recipe's finished stages to the remote.

    Raises:
        RemoteError: the remote cannot be used.
    """
    sent, left = 0, dict[str, None]()
    with closing(run.ledger):
        run.ledger.remote.require("push to")
        for node, recorded in _finished(run, run.graph.nodes):
            before = sent
            for file in node.files:
                place, tell = place_of(run.project.root, file), run.transferring(node.address, "sending")
                if not place.exists():
                    left[f"{written_of(file)} is not on this machine"] = None
                    continue
                hashed = HASHES.files(place, run.transfer_progress(node.address).hashed)
                if sha256_of(hashed) != recorded.get(file):
                    left[f"{written_of(file)} has changed since {node.address} was made: run it, then push again"] = None
                else:
                    sent += raw_inputs.send(run.project, run.ledger.remote, place, hashed, tell)
            new = f"{counted(sent - before, 'file')} of raw inputs were new there" if sent > before else "raw inputs: nothing new"
            run.watch(StageEnded(node.address, "sent", new))
    return RawInputs(sent, tuple(left))


def pull_inputs(run: RunContext, selection: Collection[str], *, fetch: bool) -> RawInputs:
    """Fetch, or only list, the raw inputs of finished stages that are not on this machine.

    Raises:
        RemoteError: the remote cannot be used, or what it has is damaged.
    """
    found, left = 0, dict[str, None]()
    with closing(run.ledger):
        for node, recorded in _finished(run, selection):
            for raw in raw_inputs.lacking(run.project, node, recorded):
                if fetch and raw_inputs.fetch(run.project, run.ledger.remote, raw.sha256, raw.target):
                    found += 1
                else:
                    where = f"nor in the remote: {raw_inputs.REMEDY}" if fetch else "which a stage that must run again needs"
                    left[f"{raw} is not on this machine, {where}"] = None
    return RawInputs(found, tuple(left))


def push(run: RunContext) -> tuple[int, int]:
    """Send a recipe's recorded artifacts and the run cache to the remote; return how many objects and entries were new there.

    Raises:
        RemoteError: there is no remote, it cannot be used, or not everything arrived.
    """
    with closing(run.ledger):
        run.ledger.remote.require("push to")
        objects = 0
        for node in run.graph.nodes.values():
            sent = run.ledger.push(node, run.transferring(node.address, "sending"))
            if run.ledger.locks.entry(node.address) is None:
                run.watch(StageEnded(node.address, "skipped", "there is no result to send"))
            else:
                run.watch(StageEnded(node.address, "sent", f"{sent} objects were new there" if sent else "nothing new"))
            objects += sent
        return objects, run.ledger.remote.send_past()


def _recompile(graph: Graph) -> str:
    changes = [word for change in overrides_of(graph) for word in ("--set", change)]
    return f"recompile it with {command('plan', graph.source or Path(graph.recipe).name, *changes)}"
