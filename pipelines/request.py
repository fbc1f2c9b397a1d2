"""What is asked of a run, and what comes before its first job: one path for the command line and for schedules."""

import logging
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from configs.base.problems import UsageProblem
from configs.base.project import Project
from configs.base.texts import command
from configs.language.graph import Graph
from configs.language.recipe import load_recipes
from pipelines.jobs.context import RunContext, Watch, unwatched
from pipelines.ledger.lock_merge import refuse_conflicts
from pipelines.quantities import counted
from pipelines.rehearsal.preparing import check as check_rehearsal
from pipelines.rehearsal.preparing import prepare
from pipelines.run.ensure import Result
from pipelines.run.pins import refuse_missing_assets, refuse_unpinned, refuse_unreachable
from pipelines.run.runs import drift, load_run, refuse_missing_engines, refuse_what_cannot_fit, selected, unchanged

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Request:
    """What somebody wants to be made. A further wish is a further field here, an option of `pedigree run`, and a parameter of the flow."""

    recipe: str
    """Name or path."""
    overrides: tuple[str, ...] = ()
    """As `--set` has them."""
    profile: str | None = None
    """Another execution profile than the recipe's."""
    only: tuple[str, ...] = ()
    start: tuple[str, ...] = ()
    """These stages and all below them: `--from`."""
    until: tuple[str, ...] = ()
    force: tuple[str, ...] = ()
    rehearse: bool = False
    """The recipe with made rows and tiny models, in a project of its own."""


def opened(project: Project, request: Request, *, compiled: bool = True, watch: Watch = unwatched) -> RunContext:
    """The run of a recipe; `compiled=False` for those who only look: they write nothing. `watch` is told what takes long.

    Raises:
        ConfigError: problems of the recipe or of the profile.
        UsageProblem: another would have to write, and cannot.
    """
    if compiled:
        refuse_read_only(project)
    if request.rehearse:
        return _opened_rehearsal(project, request, compiled, watch)
    run = load_run(project, request.recipe, request.overrides, profile=request.profile, compiled=compiled, watch=watch)
    refuse_conflicts(project, run.graph)
    return run


def _opened_rehearsal(project: Project, request: Request, compiled: bool, watch: Watch) -> RunContext:
    """The run of a rehearsal; of those who only look the real one, once it is clear that it can be rehearsed."""
    if not compiled:
        check_rehearsal(project, load_recipes(project.recipes, request.recipe, request.overrides))
        return load_run(project, request.recipe, request.overrides, profile=request.profile, watch=watch)
    return prepare(project, request.recipe, request.overrides, request.profile, LOG.info).opened(watch)


def selection(graph: Graph, request: Request) -> tuple[frozenset[str], frozenset[str]]:
    """Addresses of the stages that are asked for, and of those to run again.

    Raises:
        UsageProblem: there is no such stage, or one to run again is not among the chosen ones.
    """
    chosen = selected(graph, only=request.only, start=request.start, until=request.until)
    return chosen, named("--force", graph, request.force, chosen)


def wanted(run: RunContext, request: Request) -> tuple[frozenset[str], frozenset[str]]:
    """As `selection`, of a run: those to run again are also those whose code has changed, where the run is to make them again.

    Raises:
        UsageProblem: as `selection`.
    """
    chosen, forced = selection(run.graph, request)
    return chosen, forced | (whose_code_has_changed(run, chosen) if run.on_code_change == "rerun" else frozenset())


def whose_code_has_changed(run: RunContext, chosen: Collection[str]) -> frozenset[str]:
    """Addresses of the finished stages that other code has made than that of now."""
    return frozenset(address for address in chosen if drift(run, run.graph.nodes[address]))


def named(option: str, graph: Graph, names: Sequence[str], chosen: Collection[str]) -> frozenset[str]:
    """Addresses of the stages that an option names.

    Raises:
        UsageProblem: there is no such stage, or it is not among the chosen ones.
    """
    found = frozenset(graph.find(name).address for name in names)
    left = sorted(found - set(chosen))
    if left:
        remedy = f"leave out {option} for it, or widen the selection"
        raise UsageProblem(f"{option} names {', '.join(left)}, which --only, --from and --until leave out: {remedy}")
    return found


def already_made(run: RunContext, chosen: frozenset[str], forced: frozenset[str]) -> list[Result] | None:
    """The results where all that is asked for is up to date. Else None: jobs have to run, and nothing that is known now stands in
    their way.

    Raises:
        ConfigError: a revision is not chosen yet, a package is not installed, a repository or an asset cannot be had, or a stage needs more
            memory than there is; the stages are named.
    """
    refuse_unpinned(run.graph, chosen)
    done = unchanged(run, chosen, forced)
    if len(done) == len(chosen):
        return done
    due = chosen - {end.address for end in done}
    refuse_missing_engines(run.graph, due, run.execution)
    refuse_unreachable(run.graph, due)
    refuse_missing_assets(run.graph, due)
    refuse_what_cannot_fit(run, due, chosen, forced)
    return None


def all_done(count: int, away: int, recipe: str) -> str:
    """One line on a recipe that needs no run."""
    said = f"{counted(count, 'stage')} up to date, nothing to do"
    return f"{said}; the files of {away} are in the remote: {command('pull', recipe)} brings them" if away else said


def refuse_read_only(project: Project) -> None:
    """Says before any work which folder must be writable; the bug reports and temporary files that could not be written tell nobody.

    Raises:
        UsageProblem: one is not.
    """
    for folder in (project.root, project.root / ".dvc", project.private, project.artifacts):
        if folder.exists() and not os.access(folder, os.W_OK | os.X_OK):
            remedy = "mount it so, or mend its permissions; `pedigree plan`, `status` and `verify` work all the same"
            raise UsageProblem(f"{folder} must be writable, for results and for what is known of them: {remedy}")
