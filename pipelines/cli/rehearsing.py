"""The `rehearse` command."""

import sys
import time

import typer

from pedigree.pipelines.cli.console import AsJson, Overrides, Profile, Recipe, echo, for_programs, project_here
from pedigree.pipelines.cli.running import ShowInPrefect, failed, run_what_is_due

commands = typer.Typer()


@commands.command()
def rehearse(
    recipe: Recipe,
    overrides: Overrides = None,
    profile: Profile = None,
    prefect: ShowInPrefect = "auto",
    as_json: AsJson = False,
) -> None:
    """Test-run a recipe on the CPU with tiny models.

    Uses the same graph, code, formats and templates, but synthetic rows, and takes minutes. Ends with a list of what was and was not
    checked. Results go to a separate project, `.pedigree/rehearsals/PROFILE`.
    """
    from pedigree.pipelines.cli.run_results import rehearsal_result, run_result
    from pedigree.pipelines.cli.status_line import StatusLine
    from pedigree.pipelines.rehearsal.preparing import prepare
    from pedigree.pipelines.rehearsal.proof import proof_of, sentences
    from pedigree.pipelines.run.opening import Request
    from pedigree.pipelines.run.plans import selection

    began = time.monotonic()
    with for_programs(as_json) as emit:
        project = project_here()
        with StatusLine() as telling:
            rehearsal = prepare(project, recipe, tuple(overrides or ()), profile, telling)
        run = rehearsal.opened()
        ends = run_what_is_due(run, *selection(run, Request(rehearsal.recipe)), prefect)
        seconds = time.monotonic() - began
        proof = proof_of(rehearsal.project, run.graph, rehearsal.changes)
        emit("rehearse", rehearsal_result(run_result(run, ends, seconds, None), rehearsal, proof), rehearsal.real)
        if ends is None:
            raise typer.Exit(130)
        if failed(ends):
            echo(f"rehearsal of {rehearsal.real.recipe} failed after {seconds:.0f} s", file=sys.stderr)
            raise typer.Exit(1)
        echo(f"\nRehearsed {rehearsal.real.recipe} under {rehearsal.profile}: {len(ends)} stages in {seconds:.0f} s.")
        for line in sentences(proof):
            echo(line)
        echo(f"Results are in {rehearsal.project.root.relative_to(project.root)}.")
