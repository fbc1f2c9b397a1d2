"""Status of a recipe's stages: what is done, stale or running, and code that changed since."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pedigree.configs.base.texts import command
from pedigree.pipelines.cli.console import echo, print_table
from pedigree.pipelines.cli.running_jobs import Job, running_word
from pedigree.pipelines.jobs.context import RunContext
from pedigree.pipelines.jobs.live import jobs_now
from pedigree.pipelines.json_documents import ONE_WORD
from pedigree.pipelines.lineage.ancestry import opened
from pedigree.pipelines.lineage.costs import Cost, costs_of
from pedigree.pipelines.publish.commits import uncommitted
from pedigree.pipelines.quantities import counted
from pedigree.pipelines.run.plans import StageSummary, drift, plan

COSTS = {"slot_hours": "slot-hours", "total_slot_hours": "with ancestors", "cost": "cost", "total_cost": "with ancestors"}


@dataclass(frozen=True, kw_only=True)
class StageStatus(StageSummary):
    """Status of one stage."""

    state: Annotated[Literal["done", "in the remote", "stale", "not built", "running"], ONE_WORD]
    changed_code: tuple[str, ...]
    """Source files that changed since its artifact was built."""
    job: Job | None
    cost: Cost | None
    """Of its artifact."""

    @property
    def words(self) -> str:
        return running_word(self.job) if self.job else self.state


@dataclass(frozen=True)
class RecipeStatus:
    """Status of a recipe."""

    stages: tuple[StageStatus, ...]
    uncommitted: tuple[str, ...]
    """Ledger files that are not committed to git."""


def status(run: RunContext) -> RecipeStatus:
    """Return the status of a recipe, with its stages in order; read-only."""
    jobs = {job.address: job for job in jobs_now(run.project) if job.seen_alive}
    costs = costs_of(run.project, list(run.graph.nodes), run.execution.machine.slot_hour_price)
    found = []
    for entry in plan(run):
        node, job = entry.node, jobs.get(entry.node.address)
        done = "in the remote" if entry.remote else "done"
        state = "running" if job else done if not entry.reasons else "stale" if opened(run.project, node) else "not built"
        found.append(StageStatus.of(run.graph, entry, state, changed_code=tuple(drift(run, node)), job=job, cost=costs.get(node.address)))
    return RecipeStatus(tuple(found), tuple(uncommitted(run.project, run.graph)))


def _number(cost: Cost | None, column: str) -> str:
    return f"{getattr(cost, column):.2f}" if cost else ""


def print_status(recipe: str, status: RecipeStatus) -> None:
    """Print the stages of a recipe, code that has changed, and what to do next."""
    stages = status.stages
    costs = [column for column in COSTS if any(getattr(stage.cost, column, None) is not None for stage in stages)]
    cells = [(stage.shown, stage.kind, stage.words, *(_number(stage.cost, column) for column in costs), stage.why) for stage in stages]
    print_table(("stage", "kind", "state", *(COSTS[column] for column in costs), "why"), cells)
    drifted = sum(bool(stage.changed_code) for stage in stages)
    if drifted:
        built = "it was built" if drifted == 1 else "they were built"
        echo(f"\nThe code of {counted(drifted, 'stage')} changed since {built}; {command('status', recipe, '--json')} lists the files.")
        echo("Code makes a stage stale only if it decides what rows are kept or how answers are scored. If other code would change")
        echo(f"results, raise the stage's `version` in its kind.py, or re-run with {command('run', recipe, '--on-code-change', 'rerun')}.")
    if status.uncommitted:
        echo(f"\nNot committed to git: {', '.join(status.uncommitted)}.")
        echo(f"{command('run', recipe, '--commit')} commits them, with ids and scores in the message.")
    if any(stage.state in ("stale", "not built") for stage in stages):
        echo(f"\n{command('plan', recipe)} shows what a run would do; {command('run', recipe)} does it.")
