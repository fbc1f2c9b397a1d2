"""The commands on recipes: recipes, show, validate, pin, compile, variants."""

from pathlib import Path
from typing import Annotated

import typer

from configs.base.texts import command
from pipelines.cli import completion
from pipelines.cli.console import Overrides, Profile, Recipe, print_table, project_here, say

commands = typer.Typer()


@commands.command("recipes")
def list_recipes() -> None:
    """List the recipes; one that cannot be read is listed with its problem."""
    from configs.base.document import ConfigError
    from configs.language.recipe import load_recipe, recipe_names

    project, cells, broken = project_here(), [], []
    for name in recipe_names(project.recipes):
        try:
            graph = load_recipe(project.recipes, name)
            cells.append((name, str(len(graph.nodes)), graph.description))
        except ConfigError as error:
            more = f" (and {len(error.problems) - 1} more problems)" if len(error.problems) > 1 else ""
            cells.append((name, "-", f"cannot be read: {error.problems[0]}{more}"))
            broken.append(name)
    print_table(("recipe", "stages", "what it is"), cells)
    if broken:
        say(f"\n{command('validate', *broken)} lists all problems.")


@commands.command()
def show(
    recipe: Recipe,
    stage: Annotated[
        str | None, typer.Argument(help="One stage with its numerics and placement.", show_default=False, autocompletion=completion.stages)
    ] = None,
    overrides: Overrides = None,
    execution: Profile = None,
) -> None:
    """Print a recipe as it is understood: `extends`, rounds, defaults and --set resolved, as YAML that can be run again."""
    from configs.language.compile import yaml_text
    from configs.language.recipe import load_recipe
    from pipelines.cli.resolved import resolved_recipe, resolved_stage

    project = project_here()
    graph = load_recipe(project.recipes, recipe, overrides or ())
    value = resolved_stage(project, graph, stage, execution) if stage else resolved_recipe(project, graph, execution)
    say(yaml_text(value), end="")


@commands.command()
def validate(
    recipe: Annotated[
        list[str] | None, typer.Argument(help="Recipes: names or paths.", show_default=False, autocompletion=completion.recipes)
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="All recipes and profiles of the project.")] = False,
    overrides: Overrides = None,
    execution: Profile = None,
) -> None:
    """Check recipes and their profiles: all problems at once, each with file and line. Writes nothing; exit code 2 on problems."""
    from configs.base.document import ConfigError
    from configs.base.problems import UsageProblem
    from configs.language.recipe import recipe_names
    from pipelines.cli.resolved import problems_of, profile_problems
    from pipelines.quantities import counted

    project = project_here()
    if every == bool(recipe):
        raise UsageProblem("name recipes to check, or give --all: `pedigree validate tiny`, `pedigree validate --all`")
    names = recipe_names(project.recipes) if every else recipe or []
    found = {problem: None for name in names for problem in problems_of(project, name, overrides or (), execution)}
    profiles = sorted(path.stem for path in project.executions.glob("*.yaml")) if every else []
    found |= {problem: None for name in profiles for problem in profile_problems(project, name)}
    if found:
        raise ConfigError(sorted(found, key=lambda problem: (problem.file, problem.line or 0)))
    also = f" and {counted(len(profiles), 'profile')}" if profiles else ""
    say(f"{counted(len(names), 'recipe')}{also}: no problems")


@commands.command()
def pin(recipe: Recipe) -> None:
    """Write the newest commit of the hub (HF_ENDPOINT, or the mirror PEDIGREE_HUB) in the place of every `revision: pin me`.

    Comments and layout of the file stay. Recipes that it extends or takes stages from are pinned too.
    """
    import os

    from pipelines.quantities import counted
    from pipelines.run.pins import pin as write_pins

    found = write_pins(project_here(), recipe)
    if not found:
        say(f"nothing to pin: {recipe} names a commit wherever it names a repository of the hub")
        return
    for one in found:
        said = one.commit or f"still `pin me`: {one.problem}"
        say(f"{os.path.relpath(one.file)}:{one.line}: {one.repo}: {said}")
    left = sum(one.commit is None for one in found)
    say(f"{counted(len(found) - left, 'revision')} written" + (f", {left} left open" if left else f"; {command('plan', recipe)} goes on"))
    if left:
        raise typer.Exit(1)


@commands.command("compile")
def compile_(
    recipe: Annotated[
        list[str], typer.Argument(help="Recipes: names or paths.", show_default=False, autocompletion=completion.recipes)
    ],
    overrides: Overrides = None,
) -> None:  # fmt: skip
    """Write the dvc.yaml and params.yaml of recipes, for use with plain `dvc repro`."""
    from configs.language.compile import write_compiled
    from configs.language.recipe import load_recipes

    project = project_here()
    graphs = [graph for name in recipe for graph in load_recipes(project.recipes, name, overrides or ())]
    changed = write_compiled(project.root, {graph.recipe: graph for graph in graphs}.values())
    say("\n".join(changed) if changed else "nothing has changed")


@commands.command()
def variants(
    recipe: Annotated[
        str | None, typer.Argument(help="Only those of this recipe.", show_default=False, autocompletion=completion.recipes)
    ] = None,
    remove: Annotated[
        str | None,
        typer.Option(
            "--remove", metavar="NAME", help="Remove the artifacts of one variant; the cache keeps its objects until `pedigree gc`.",
            autocompletion=completion.variants,
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Remove without asking.")] = False,
) -> None:  # fmt: skip
    """List what was made with --set: the overrides, how much is done, size and age. --remove NAME removes one."""
    from configs.base.problems import UsageProblem
    from configs.language.recipe import recipe_names
    from pipelines.cli import variants as made
    from pipelines.quantities import duration, size

    project = project_here()
    if remove is not None:
        if recipe is not None:
            raise UsageProblem(f"name either a recipe to list or a variant to remove: {command('variants', '--remove', remove)}")
        _remove_variant(made.find_variant(project, remove), yes)
        return
    if recipe is not None and recipe not in recipe_names(project.recipes) and not Path(recipe).exists():
        raise UsageProblem(f"there is no recipe {recipe!r}: `pedigree recipes` lists those there are")
    found = [variant for variant in made.variants(project) if recipe in (None, variant.recipe)]
    if not found:
        say("no variant has been made: `pedigree run RECIPE --set STAGE.FIELD=VALUE` makes one")
        return
    cells = [
        (one.name, f"{one.done} of {one.stages}", size(one.size), f"{duration(one.age_s)} ago", "  ".join(one.overrides)) for one in found
    ]
    print_table(("variant", "own stages done", "size", "last change", "overrides"), cells)
    say("\n`pedigree variants --remove NAME` removes one.")


def _remove_variant(variant, yes: bool) -> None:
    from pipelines.cli import variants as made
    from pipelines.quantities import counted, size

    signs = made.refuse_while_in_use(variant)
    say(f"{variant.name}: {' '.join(variant.overrides)}")
    say(f"{counted(variant.done, 'artifact')}, {size(variant.size)}, in {variant.folder.relative_to(variant.project.root)}")
    if not yes and not typer.confirm("Remove them?"):
        say("nothing is removed")
        raise typer.Exit(1)
    made.remove(variant, signs)
    say("removed. Objects in the DVC cache are kept: the same command makes it again from there at once.")
    free = made.collectable(variant)
    if isinstance(free, str):
        say(f"What `pedigree gc` could free is not known: {free}")
    elif free:
        say(f"`pedigree gc` would now delete {counted(len(free), 'object')} of it, {size(sum(free.values()))}; `pedigree gc --yes` does.")
    else:
        say("`pedigree gc` would free nothing of it: git still names these artifacts, or other recipes share them.")
