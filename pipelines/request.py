"""Run requests and the checks before a run's first job; shared by the command line and schedules."""

import logging
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from pedigree.configs.base.problems import UsageProblem
from pedigree.configs.base.project import Project
from pedigree.configs.base.texts import command
from pedigree.configs.language.graph import Graph
from pedigree.configs.language.recipe import load_recipes
from pedigree.pipelines.jobs.context import RunContext
from pedigree.pipelines.jobs.events import Watch, unwatched
from pedigree.pipelines.ledger.lock_merge import refuse_conflicts
from pedigree.pipelines.quantities import counted
from pedigree.pipelines.rehearsal.preparing import check as check_rehearsal
from pedigree.pipelines.rehearsal.preparing import prepare
from pedigree.pipelines.run.ensure import Result
from pedigree.pipelines.run.pins import refuse_missing_assets, refuse_unpinned, refuse_unreachable
from pedigree.pipelines.run.runs import drift, load_run, refuse_missing_engines, refuse_what_cannot_fit, selected, unchanged

LOG = logging.getLogger(__name__)


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


def opened(project: Project, request: Request, *, compiled: bool = True, watch: Watch = unwatched) -> RunContext:
    """Open the run of a recipe. `compiled=False` writes nothing, for read-only callers; `watch` receives progress of slow operations.

    Raises:
        ConfigError: the recipe or the profile is invalid.
        UsageProblem: `compiled`, but the project is not writable.
    """
    if compiled:
        refuse_read_only(project)
    if request.rehearse:
        return _opened_rehearsal(project, request, compiled, watch)
    run = load_run(project, request.recipe, request.overrides, profile=request.profile, compiled=compiled, watch=watch)
    refuse_conflicts(project, run.graph)
    return run


def _opened_rehearsal(project: Project, request: Request, compiled: bool, watch: Watch) -> RunContext:
    """Open a rehearsal; for read-only callers, check that the recipe can be rehearsed and open the real run."""
    if not compiled:
        check_rehearsal(project, load_recipes(project.recipes, request.recipe, request.overrides))
        return load_run(project, request.recipe, request.overrides, profile=request.profile, watch=watch)
    return prepare(project, request.recipe, request.overrides, request.profile, LOG.info).opened(watch)


def selection(graph: Graph, request: Request) -> tuple[frozenset[str], frozenset[str]]:
    """Return the addresses of the selected stages and of the stages to re-run.

    Raises:
        UsageProblem: a stage does not exist, or a stage to re-run is not selected.
    """
    chosen = selected(graph, only=request.only, start=request.start, until=request.until)
    return chosen, named("--force", graph, request.force, chosen)


def wanted(run: RunContext, request: Request) -> tuple[frozenset[str], frozenset[str]]:
    """Like `selection`, but with `on_code_change="rerun"` also re-run stages whose code changed.

    Raises:
        UsageProblem: see `selection`.
    """
    chosen, forced = selection(run.graph, request)
    return chosen, forced | (whose_code_has_changed(run, chosen) if run.on_code_change == "rerun" else frozenset())


def whose_code_has_changed(run: RunContext, chosen: Collection[str]) -> frozenset[str]:
    """Return the addresses of finished stages whose code changed since."""
    return frozenset(address for address in chosen if drift(run, run.graph.nodes[address]))


def named(option: str, graph: Graph, names: Sequence[str], chosen: Collection[str]) -> frozenset[str]:
    """Return the addresses of the stages named by an option.

    Raises:
        UsageProblem: a stage does not exist or is not selected.
    """
    found = frozenset(graph.find(name).address for name in names)
    left = sorted(found - set(chosen))
    if left:
        remedy = f"drop {option} or widen the selection"
        raise UsageProblem(f"{option} names {', '.join(left)}, which --only, --from and --until exclude: {remedy}")
    return found


def up_to_date_results(run: RunContext, chosen: frozenset[str], forced: frozenset[str]) -> list[Result] | None:
    """Return the results if all selected stages are up to date. Else check that the required jobs can run, and return None.

    Raises:
        ConfigError: a revision is not pinned, a package is missing, a repository or an asset is unavailable, or a stage does not fit into
            memory; the message names the stages.
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
    """Summary line of a recipe that is up to date."""
    text = f"{counted(count, 'stage')} up to date, nothing to do"
    return f"{text}; the files of {away} are only in the remote; {command('pull', recipe)} downloads them" if away else text


def refuse_read_only(project: Project) -> None:
    """Check early that the project is writable, because later failures to write would be silent or look like bugs.

    Raises:
        UsageProblem: a folder is not writable.
    """
    for folder in (project.root, project.root / ".dvc", project.private, project.artifacts):
        if folder.exists() and not os.access(folder, os.W_OK | os.X_OK):
            remedy = "remount it or fix its permissions. `pedigree plan`, `status` and `verify` work without write access"
            raise UsageProblem(f"{folder} must be writable: {remedy}")
