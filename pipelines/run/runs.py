"""Run a recipe: load, compile, and make every stage current, independent stages in parallel."""

import os
import sys
import threading
import traceback
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import closing, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from pydantic import ValidationError

from pedigree.configs.base.document import ConfigError, Problem, read_document
from pedigree.configs.base.installation import missing
from pedigree.configs.base.project import Project
from pedigree.configs.base.texts import command, shown
from pedigree.configs.language.compile import overrides_of, params_file, pipeline_file, source_file, write_compiled
from pedigree.configs.language.execution import Execution, batch_problem, engines_problem, fitted, profile_path
from pedigree.configs.language.graph import Graph, Node
from pedigree.configs.language.recipe import load_recipes
from pedigree.data.artifacts import provenance
from pedigree.data.artifacts.artifacts import read_run
from pedigree.data.host import machine
from pedigree.data.store.untrusted import RESTORE, ArtifactError, read_source
from pedigree.pipelines.estimate.estimates import refusals
from pedigree.pipelines.estimate.sampling_plan import opens_engines, sampling_plan_of
from pedigree.pipelines.jobs.attempts import BUG
from pedigree.pipelines.jobs.context import RunContext, StageFailed, Watch, unwatched
from pedigree.pipelines.jobs.scratch_state import address_of
from pedigree.pipelines.ledger.identity import standing
from pedigree.pipelines.ledger.ledger import Ledger
from pedigree.pipelines.ledger.store import RemoteError
from pedigree.pipelines.run.ensure import Result, at_rest, ensure, log_file, run_under_dvc
from pedigree.pipelines.run.pins import refuse_unpinned


@dataclass(frozen=True)
class NotRun:
    """A stage that was not attempted: a stage that it depends on failed, or the run was canceled."""

    address: str
    because: str


StageEnd = Result | StageFailed | NotRun


@dataclass(frozen=True)
class Plan:
    """What a run would do with a stage."""

    node: Node
    reasons: tuple[str, ...]
    """Why it must run; empty if up to date. Descendants of a stale stage may still be skipped: only content counts."""
    remote: bool = False
    """Whether it is up to date with its files in the remote."""


@dataclass
class Progress:
    """Scheduling state of a graph."""

    graph: Graph
    selection: frozenset[str]
    watch: Watch
    ends: dict[str, StageEnd] = field(default_factory=dict)
    started: set[str] = field(default_factory=set)

    def ready(self) -> list[Node]:
        """Stages whose parents are all current; stages below a failed one are skipped."""
        found = []
        for address, node in self.graph.nodes.items():
            if address not in self.selection or address in self.started or address in self.ends:
                continue
            parents = [parent for parent in node.parents if parent in self.selection]
            lost = [parent for parent in parents if isinstance(self.ends.get(parent), (StageFailed, NotRun))]
            if lost:
                self.leave_out(address, f"{lost[0]} failed")
            elif all(isinstance(self.ends.get(parent), Result) for parent in parents):
                found.append(node)
        return found

    def leave_out(self, address: str, because: str) -> None:
        """Skip a stage and report it immediately."""
        self.ends[address] = NotRun(address, because)
        with suppress(Exception):  # a bug in the watcher must not end the run
            self.watch(address, "skipped", because)


def load_run(
    project: Project,
    recipe: str,
    overrides: Sequence[str] = (),
    *,
    profile: str | None = None,
    watch: Watch = unwatched,
    cancelled: threading.Event | None = None,
    compiled: bool = False,
) -> RunContext:
    """Load a recipe (name or path, with `--set` overrides) and its profile. Later edits do not affect the run.

    Args:
        project: the project of the recipe.
        recipe: its name or path.
        overrides: as given to `--set`.
        profile: overrides the recipe's profile.
        watch: called on every change.
        cancelled: cancels the run when set.
        compiled: write the `dvc.yaml` and `params.yaml` of the recipe and of all that it refers to; otherwise nothing is written.

    Raises:
        ConfigError: problems of the recipe or of the profile.
    """
    graphs = load_recipes(project.recipes, recipe, overrides)
    execution = profile_for(project, graphs[-1], profile)
    if compiled:
        write_compiled(project.root, graphs)
    return RunContext(project, graphs[-1], execution, Ledger(project, looking=not compiled), watch, cancelled or threading.Event())


def open_run(
    project: Project,
    recipe: str,
    overrides: Sequence[str] = (),
    *,
    profile: str | None = None,
    watch: Watch = unwatched,
    cancelled: threading.Event | None = None,
) -> RunContext:
    """`load_run` for a run that will execute; also compiles the recipe for plain DVC."""
    return load_run(project, recipe, overrides, profile=profile, watch=watch, cancelled=cancelled, compiled=True)


def open_compiled(
    project: Project, recipe: str, *, profile: str | None = None, watch: Watch = unwatched, looking: bool = False
) -> RunContext:
    """Open the run of a recipe by its compiled name, e.g. `tiny+1a2b3c4d`. Writes nothing; the run never writes if `looking`.

    Raises:
        ConfigError: problems of the recipe or of the profile, or no such recipe.
    """
    name, overrides = _compiled_from(project, recipe)
    if name.endswith((".yaml", ".yml")):
        name = str(project.root / name)
    graph = load_recipes(project.recipes, name, overrides)[-1]
    if graph.recipe != recipe:
        raise ConfigError([Problem(source_file(recipe), None, f"compiles to {graph.recipe}, not {recipe}; {_rewrite_remedy(recipe)}")])
    return RunContext(project, graph, profile_for(project, graph, profile), Ledger(project, looking=looking), watch)


def _compiled_from(project: Project, recipe: str) -> tuple[str, tuple[str, ...]]:
    """The recipe's name or path and its overrides, as in `source.json`. That file may come from git, so it is untrusted.

    Raises:
        ConfigError: the file cannot be read.
    """
    path = project.root / source_file(recipe)
    if not os.path.lexists(path):
        return recipe, ()
    try:
        source = read_source(path)
    except ArtifactError as error:
        problem = f"{error}".removeprefix(f"{path} ").removesuffix(f": {RESTORE}").removesuffix(f"; {RESTORE}")
        raise ConfigError([Problem(source_file(recipe), None, f"{problem}; {_rewrite_remedy(recipe)}")]) from error
    return source.recipe, source.overrides


def _rewrite_remedy(recipe: str) -> str:
    name, _, changes = recipe.partition("+")
    how = f", with the --set options in the first line of {pipeline_file(recipe)}," if changes else ""
    return f"{command('compile', name)}{how} rewrites it"


def profile_for(project: Project, graph: Graph, profile: str | None) -> Execution:
    """The execution profile of a run: the requested one, or the recipe's.

    Raises:
        ConfigError: problems of the file, every stage that cannot be placed, and every global batch that the profile cannot hit exactly.
    """
    name = profile or graph.execution
    execution = load_execution(project, name)
    found = ((node, _profile_problem(execution, node)) for node in graph.nodes.values())
    problems = [Problem(f"{graph.recipe} under {name}", None, f"stage {node.name}: {problem}") for node, problem in found if problem]
    if problems:
        raise ConfigError(problems)
    return execution


def _profile_problem(execution: Execution, node: Node) -> str | None:
    """Why a stage cannot run under a profile whose kinds and stages are each valid alone; or None."""
    try:
        numerics, placement = execution.of(node.kind, node.name)
    except ValidationError as error:  # a rule excludes the combination
        return error.errors()[0]["msg"].removeprefix("Value error, ")
    except ValueError as error:
        return f"{error}".removeprefix(f"{node.name}: ")
    return (engines_problem(numerics, placement) if opens_engines(node.config) else None) or batch_problem(node.config, numerics)


ENGINES = {
    "none": (),
    "torch": ("torch", "transformers"),
    "deepspeed": ("torch", "transformers", "deepspeed"),
    "vllm": ("torch", "transformers", "vllm"),
    "deepspeed+vllm": ("torch", "transformers", "deepspeed", "vllm"),
}
"""Packages that a stage's job imports, by engine; the local launcher runs jobs in this environment."""


KERNELS = {"liger": "liger_kernel"}
"""Package required by a value of `Numerics.kernels`, in stages that load a model into torch themselves."""


def _packages(node: Node, kernels: str) -> Iterable[str]:
    """Packages that its job imports: vLLM only if a policy of the recipe rates or writes rather than a server."""
    engine, speaks = node.declaration.engine, sampling_plan_of(node.config) is not None
    if engine == "vllm" and not speaks:
        return ()
    own = (KERNELS[kernels],) if kernels in KERNELS and engine not in ("none", "vllm") else ()
    return dict.fromkeys((*ENGINES[engine], *(("vllm",) if speaks else ()), *own))


def refuse_missing_engines(graph: Graph, addresses: Collection[str], execution: Execution) -> None:
    """Refuse to start if packages that the jobs of these stages need are missing.

    Raises:
        ConfigError: a package is not installed; the stages that need it are named.
    """
    needing: dict[str, list[str]] = {}
    for address in addresses:
        node = graph.nodes[address]
        for package in _packages(node, execution.of(node.kind, node.name)[0].kernels):
            if find_spec(package) is None:
                needing.setdefault(package, []).append(node.name)
    if needing:
        remedy = f"{missing('train,serve')}, or stop before them with --until"
        raise ConfigError(
            [Problem(graph.recipe, None, f"{', '.join(names)}: needs {p}, not installed: {remedy}") for p, names in needing.items()]
        )


def refuse_what_cannot_fit(run: RunContext, due: Collection[str], chosen: Collection[str], forced: Collection[str]) -> None:
    """Refuse to start if a stage that is due needs more memory than the profile's machine has.

    A stage restored from the cache runs no job. If it must be made after all, `ensure` refuses it through `run.too_large`.

    Raises:
        ConfigError: each such stage, what it lacks, by how much, and the settings that would make it fit.
    """
    found = refusals(run.project, run.graph, run.execution, due)
    if not found:
        return
    cached = restorable(run, plan(run, chosen, forced), forced)
    run.too_large = {node.address: str(misfit) for node, misfit in found if node.address in cached}
    problems = [Problem(run.graph.recipe, None, f"stage {node.name}: {misfit}") for node, misfit in found if node.address not in cached]
    if problems:
        raise ConfigError(problems)


def load_execution(project: Project, name: str) -> Execution:
    """Load an execution profile by name or path; `auto` is resolved to this machine's numbers.

    Raises:
        ConfigError: every problem of the file.
    """
    document = read_document(profile_path(project.executions, name))
    try:
        return Execution.model_validate(fitted(document.value, machine.cores(), machine.memory()))
    except ValidationError as error:
        raise ConfigError(
            [
                document.problem(
                    detail["loc"], f"{'.'.join(map(str, detail['loc'])) or 'profile'}: {detail['msg'].removeprefix('Value error, ')}"
                )
                for detail in error.errors()
            ]
        ) from error


def stage_under_dvc(project: Project, address: str, watch: Watch = unwatched) -> Result:
    """Implement `pedigree stage RECIPE/STAGE`, the command in `dvc.yaml`.

    Raises:
        StageFailed: with a one-line reason.
        ConfigError: the recipe cannot be loaded.
    """
    recipe, _, name = address.partition("/")
    run = open_compiled(project, recipe, watch=watch)
    node = run.graph.nodes.get(address)
    if node is None:
        raise StageFailed(address, "refused", f"recipe {recipe} has changed and has no stage {name!r}; {_recompile(run.graph)}")
    compiled = read_document(project.root / params_file(recipe), params_file(recipe)).value
    if compiled.get(name) != node.identity():
        message = f"{params_file(recipe)} does not match the current recipe; {_recompile(run.graph)}"
        raise StageFailed(address, "refused", message)
    refuse_unpinned(run.graph, [address])
    return run_under_dvc(run, node)


def selected(graph: Graph, *, only: Iterable[str] = (), start: Iterable[str] = (), until: Iterable[str] = ()) -> frozenset[str]:
    """Addresses chosen by `--only`, `--from` and `--until`, by name or address; all stages when none is given.

    Raises:
        UsageProblem: a stage that does not exist.
    """
    chosen = set(graph.nodes)
    if only:
        chosen &= {graph.find(name).address for name in only}
    if start:
        chosen &= graph.descendants(graph.find(name).address for name in start)
    if until:
        chosen &= graph.ancestors(graph.find(name).address for name in until)
    return frozenset(chosen)


def plan(run: RunContext, selection: Collection[str] | None = None, forced: Collection[str] = ()) -> list[Plan]:
    """What a run would do, in order. Runs and changes nothing."""
    found: list[Plan] = []
    stale: set[str] = set()
    with closing(run.ledger):
        for address, node in run.graph.nodes.items():
            if selection is not None and address not in selection:
                continue
            above = [parent for parent in node.parents if parent in stale]
            reasons, remote = (["forced"], False) if address in forced else _reasons(run, node, bool(above))
            if above:
                reasons = [reason for reason in reasons if not reason.startswith("input ")]
                reasons.append(f"waits for {', '.join(above)}")
            if reasons:
                stale.add(address)
            found.append(Plan(node, tuple(reasons), remote))
    return found


def restorable(run: RunContext, planned: Iterable[Plan], forced: Collection[str] = ()) -> frozenset[str]:
    """Addresses of planned stages that are due and that this machine's cache can restore.

    Below a stage that is due, a stage counts only if all stages due above it have merely lost their files: then its inputs are known.
    """
    found: set[str] = set()
    due: set[str] = set()
    lost: set[str] = set()
    for entry in planned:
        node = entry.node
        if not entry.reasons:
            continue
        if node.address not in forced and lost.issuperset(due.intersection(node.parents)):
            if run.ledger.is_cached(node, run.transfer_progress(node.address).hashed):
                found.add(node.address)
                if all(reason.startswith(("output ", "waits for ")) for reason in entry.reasons):
                    lost.add(node.address)
        due.add(node.address)
    return frozenset(found)


def _reasons(run: RunContext, node: Node, waits: bool) -> tuple[list[str], bool]:
    """Why a stage must run, and whether it is up to date with its files only in the remote."""
    beat = run.transfer_progress(node.address).hashed
    if waits:  # its parents decide
        return run.ledger.reasons(node, beat), False
    try:
        return standing(run.project, run.graph, run.ledger, node, beat)
    except RemoteError as error:
        return [f"cannot determine whether it is up to date: {error}"], False


def drift(run: RunContext, node: Node) -> list[str]:
    """Source files of Pedigree that changed since the stage's artifact was made, except for comments and formatting."""
    try:
        recorded = read_run(run.project.artifact(node.address) / "run.json").fingerprint.files
    except ArtifactError:  # `verify` reports it
        return []
    now = provenance.fingerprint(node.kind, run.code_root)["files"]
    return sorted(name for name in recorded.keys() | now.keys() if recorded.get(name) != now.get(name)) if recorded else []


def unchanged(run: RunContext, selection: Collection[str] | None = None, forced: Collection[str] = ()) -> list[Result]:
    """Confirm, in one thread, the stages that are up to date (here or in the remote) with all their ancestors; the rest needs a run."""
    done: dict[str, Result] = {}
    chosen = set(run.graph.nodes if selection is None else selection)
    for address, node in run.graph.nodes.items():
        above = all(parent in done or parent not in chosen for parent in node.parents)
        if address in chosen and address not in forced and above and _rests(run, node):
            done[address] = ensure(run, node)
    return list(done.values())


def _rests(run: RunContext, node: Node) -> bool:
    try:
        rests = at_rest(run, node) is not None
        if not rests:
            run.watch(node.address, "pending")
    except Exception:  # the run hits it again and reports it with its stage
        return False
    return rests


def run_graph(run: RunContext, selection: Collection[str] | None = None, forced: Collection[str] = ()) -> list[StageEnd]:
    """Make the selected stages (default: all) current; return how each ended, in the order of the graph.

    The only scheduling loop, observed or not (`pipelines/run/observer.py`). If a stage fails, only its descendants are skipped. On Ctrl-C,
    running jobs are stopped and their checkpoints kept.
    """
    progress = Progress(run.graph, frozenset(run.graph.nodes if selection is None else selection), run.watch)
    with closing(run.ledger):
        progress.ends |= {result.address: result for result in unchanged(run, progress.selection, forced)}
    running: dict[Future[Result | StageFailed], Node] = {}
    with ThreadPoolExecutor(max_workers=max(2, run.execution.slots), thread_name_prefix="stage") as pool:
        try:
            while True:
                for node in progress.ready():
                    if run.cancelled.is_set():
                        progress.leave_out(node.address, "the run was canceled")
                    else:
                        progress.started.add(node.address)
                        running[pool.submit(_end_of, run, node, node.address in forced)] = node
                if not running:
                    break
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    progress.ends[running.pop(future).address] = future.result()
        except BaseException:
            run.cancelled.set()
            raise
    for address in progress.ends.keys() - run.graph.nodes.keys():
        raise AssertionError(f"{address} is not in the graph")
    return [progress.ends[address] for address in run.graph.nodes if address in progress.ends]


def _end_of(run: RunContext, node: Node, force: bool) -> Result | StageFailed:
    """Make one stage current; even a bug in Pedigree fails only this stage."""
    try:
        with closing(run.ledger):
            return ensure(run, node, force=force)
    except StageFailed as error:
        return error
    except BaseException as error:  # boundary between stages: others running in parallel must not be affected
        message = f"{type(error).__name__}: {error}: {BUG}"
        failed = StageFailed(node.address, "bug", message, _keep_traceback(run, node, error))
        with suppress(Exception):  # the bug may be in the watcher
            run.watch(node.address, "failed", failed.message)
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
    run.ledger.store.require_remote("pull from")
    run.fetch, run.make = True, False
    return run_graph(run, selection)


def push(run: RunContext) -> tuple[int, int]:
    """Send a recipe's recorded artifacts and the run cache to the remote; return how many objects and entries were new there.

    Raises:
        RemoteError: there is no remote, it cannot be used, or not everything arrived.
    """
    with closing(run.ledger):
        run.ledger.store.require_remote("push to")
        objects = 0
        for node in run.graph.nodes.values():
            sent = run.ledger.push(node, run.transferring(node.address, "sending"))
            run.watch(node.address, "sent", f"{sent} objects were new there" if sent else "nothing new")
            objects += sent
        return objects, run.ledger.store.send_run_cache()


def _recompile(graph: Graph) -> str:
    changes = [word for change in overrides_of(graph) for word in ("--set", change)]
    return f"recompile it with {command('plan', graph.source or Path(graph.recipe).name, *changes)}"
