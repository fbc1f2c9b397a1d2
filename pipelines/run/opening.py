"""Open the run of a recipe: the only way, for commands, schedules, `dvc repro`, rehearsals and tests."""

import os
from dataclasses import dataclass

from pedigree.configs.base.document import ConfigError, Problem, read_document
from pedigree.configs.base.mistakes import nearest, validated
from pedigree.configs.base.problems import UsageProblem
from pedigree.configs.base.project import Project
from pedigree.configs.base.texts import command
from pedigree.configs.language.compile import pipeline_file, source_file, write_compiled
from pedigree.configs.language.execution import (
    Execution,
    batch_problem,
    engines_problem,
    fitted,
    profile_names,
    profile_path,
    ranks_problem,
    served_problem,
)
from pedigree.configs.language.graph import Graph, Node
from pedigree.configs.language.recipe import load_recipes
from pedigree.data.host import machine
from pedigree.data.store.untrusted import RESTORE, ArtifactError, read_source
from pedigree.pipelines.jobs.context import RunContext
from pedigree.pipelines.jobs.events import Watch, unwatched
from pedigree.pipelines.ledger.ledger import Ledger
from pedigree.pipelines.ledger.lock_merge import refuse_conflicts


@dataclass(frozen=True)
class Request:
    """What to run. A new field here also needs an option of `pedigree run` and a parameter of the flow."""

    recipe: str
    """Name or path."""
    overrides: tuple[str, ...] = ()
    """`--set` values."""
    profile: str | None = None
    """Execution profile; the recipe's if None."""
    only: tuple[str, ...] = ()
    start: tuple[str, ...] = ()
    """These stages and all their descendants: `--from`."""
    until: tuple[str, ...] = ()
    force: tuple[str, ...] = ()
    rehearse: bool = False
    """Rehearse the recipe with synthetic rows and tiny models, in a separate project."""
    compiled: str | None = None
    """The name of its existing compiled files, e.g. `tiny+1a2b3c4d`, which are then not written again."""


def open_run(project: Project, request: Request, *, looking: bool = False, watch: Watch = unwatched) -> RunContext:
    """Load a recipe and its profile, and compile it for plain DVC. Later edits do not affect the run, which has all stages of the recipe.

    `looking`: write nothing, now or later, for commands that only read. `watch` is called on every change.

    Raises:
        ConfigError: problems of the recipe or of the profile.
        UsageProblem: the project is not writable, or a merge left conflicts.
    """
    if not looking:
        refuse_read_only(project)
    graphs = load_recipes(project.recipes, request.recipe, request.overrides)
    graph = graphs[-1]
    if request.compiled not in (None, graph.recipe):
        problem = f"compiles to {graph.recipe}, not {request.compiled}; {_rewrite_remedy(request.compiled)}"
        raise ConfigError([Problem(source_file(request.compiled), None, problem)])
    execution = profile_for(project, graph, request.profile)
    if request.compiled is None:
        if not looking:
            write_compiled(project.root, graphs)
        refuse_conflicts(project, graph)
    return RunContext(project, graph, execution, Ledger(project, looking=looking), watch)


def compiled_request(project: Project, recipe: str) -> Request:
    """The request that compiles to a name, from its `source.json`. That file may come from git, so it is untrusted.

    Raises:
        ConfigError: the file cannot be read.
    """
    path = project.root / source_file(recipe)
    if not os.path.lexists(path):
        return Request(recipe, compiled=recipe)
    try:
        source = read_source(path)
    except ArtifactError as error:
        problem = f"{error}".removeprefix(f"{path} ").removesuffix(f": {RESTORE}").removesuffix(f"; {RESTORE}")
        raise ConfigError([Problem(source_file(recipe), None, f"{problem}; {_rewrite_remedy(recipe)}")]) from error
    name = str(project.root / source.recipe) if source.recipe.endswith((".yaml", ".yml")) else source.recipe
    return Request(name, tuple(source.overrides), compiled=recipe)


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
    except ValueError as error:
        return f"{error}".removeprefix(f"{node.name}: ")
    plan, opens = node.declaration.sampling_plan(node.config), node.declaration.opens_engines(node.config)
    ranks = ranks_problem(numerics, placement) if "deepspeed" in node.declaration.engine else None
    beside = plan is not None and plan.beside
    engines = engines_problem(numerics, placement, beside=beside) if opens else None
    if beside and numerics.device == "cuda" and node.declaration.scoring_plan(node.config):
        return "asynchronous training has no GPUs for reward models, which would share those of its ranks: remove one of the two"
    served = served_problem(numerics, placement, [one.port for one in node.declaration.served(node.config)], beside=beside)
    return ranks or engines or served or batch_problem(node.config, numerics)


def load_execution(project: Project, name: str) -> Execution:
    """Load an execution profile by name or path, or raise ConfigError with all of its problems; `auto` becomes this machine's numbers."""
    path = profile_path(project.executions, name)
    if not os.path.exists(path):  # `exists` also handles invalid file names
        names = profile_names(project.executions)
        available = ", ".join(names) + nearest(path.stem, names)
        raise ConfigError([Problem(path.name, None, f"there is no profile {path.stem!r}; available: {available}")])
    document = read_document(path)
    profile = fitted(document.value, machine.cores(), machine.memory())
    return validated(Execution, document, (), profile, "a profile")


def refuse_read_only(project: Project) -> None:
    """Raise UsageProblem early if the project is not writable, because later failures to write would be silent or look like bugs."""
    for folder in (project.root, project.root / ".dvc", project.private, project.artifacts):
        if folder.exists() and not os.access(folder, os.W_OK | os.X_OK):
            remedy = "remount it or fix its permissions. `pedigree plan`, `status` and `verify` work without write access"
            raise UsageProblem(f"{folder} must be writable: {remedy}")
