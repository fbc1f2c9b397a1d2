"""Commands on recipes and what they left behind: recipes, new, import, show, validate, pin, compile, variants, scratch, gc, merge-lock."""

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from pedigree.configs.base.problems import UsageProblem
from pedigree.configs.base.project import Project
from pedigree.configs.base.texts import command
from pedigree.pipelines.cli import completion, options
from pedigree.pipelines.cli.console import echo, print_table
from pedigree.pipelines.quantities import counted, duration, size

commands = typer.Typer()
STARTERS = Path(__file__).parents[2] / "configs" / "starters"


@commands.command("recipes")
def list_recipes() -> None:
    """List all recipes, including invalid ones with their problem."""
    from pedigree.configs.base.document import ConfigError
    from pedigree.configs.language.recipe import load_recipe
    from pedigree.configs.language.recipe_files import recipe_names

    project, cells, broken = Project.find(), [], []
    for name in recipe_names(project.recipes):
        try:
            graph = load_recipe(project.recipes, name)
            cells.append((name, str(len(graph.nodes)), graph.description))
        except ConfigError as error:
            more = f" (and {len(error.problems) - 1} more)" if len(error.problems) > 1 else ""
            cells.append((name, "-", f"invalid: {error.problems[0]}{more}"))
            broken.append(name)
    print_table(("recipe", "stages", "description"), cells)
    if broken:
        echo(f"\n{command('validate', *broken)} lists all problems.")


class Starter(StrEnum):
    """The recipes of `configs/starters`."""

    sft = "sft"
    dpo = "dpo"
    grpo = "grpo"
    full = "full"


@commands.command()
def new(
    name: Annotated[str, typer.Argument(help="Name of the recipe.", show_default=False)],
    starter: Annotated[
        Starter, typer.Option("--from", help="What to start from; full: SFT, online DPO and RLVR.", show_default=True)
    ] = Starter.sft,
) -> None:
    """Write a commented recipe to start from.

    It runs as it is, on packaged data and a small model; its comments state what to replace.
    """
    path = _write_recipe(Project.find(), name, (STARTERS / f"{starter}.yaml").read_bytes().decode())
    echo(f"wrote {path}; next: {command('plan', name)}")


@commands.command("import")
def import_(
    file: Annotated[Path, typer.Argument(help="A YAML config, or a file with a command line.", show_default=False)],
    name: Annotated[str | None, typer.Argument(help="Name of the recipe; by default that of the file.", show_default=False)] = None,
    method: Annotated[
        str | None,
        typer.Option("--method", metavar="METHOD", help="sft, dpo, orpo, kto, reward or grpo, where the file does not say it."),
    ] = None,
    devices: Annotated[int | None, typer.Option("--devices", min=1, help="Devices it trains on, where the file does not say it.")] = None,
) -> None:
    """Translate a config of another trainer into a recipe.

    Reads those of TRL, alignment-handbook, axolotl, LLaMA-Factory and open-instruct. Comments mark the lines to look at: settings that have
    no equivalent, or another meaning here (docs/import.md).
    """
    from tempfile import TemporaryDirectory

    from pedigree.configs.base.document import ConfigError
    from pedigree.configs.language.recipe import load_recipe
    from pedigree.pipelines.importing.config_files import read_config
    from pedigree.pipelines.importing.imported_recipe import recipe_text

    project, name = Project.find(), name or file.stem.lower()
    text, checks = recipe_text(read_config(file, method, devices), file.name)
    with TemporaryDirectory() as folder:
        (Path(folder) / "imported.yaml").write_text(text)
        try:
            load_recipe(Path(folder), "imported")
        except ConfigError as error:
            found = "\n".join(problem.message for problem in error.problems)
            raise UsageProblem(f"{file} has values that a recipe cannot have:\n{found}") from error
    path = _write_recipe(project, name, text)
    echo(f"wrote {path}; lines to look at, marked `# check:`: {checks}; next: {command('plan', name)}")


@commands.command()
def show(
    recipe: options.Recipe,
    stage: Annotated[
        str | None,
        typer.Argument(help="One stage to show, with numerics and placement.", show_default=False, autocompletion=completion.stages),
    ] = None,
    overrides: options.Overrides = None,
    execution: options.Profile = None,
) -> None:
    """Print a fully resolved recipe as runnable YAML.

    `extends`, rounds, defaults and --set are resolved.
    """
    from pedigree.configs.language.compile import yaml_text
    from pedigree.configs.language.recipe import load_recipe
    from pedigree.pipelines.cli.resolved import resolved_recipe, resolved_stage

    project = Project.find()
    graph = load_recipe(project.recipes, recipe, overrides or ())
    value = resolved_stage(project, graph, stage, execution) if stage else resolved_recipe(project, graph, execution)
    echo(yaml_text(value), end="")


@commands.command()
def validate(
    recipe: Annotated[
        list[str] | None, typer.Argument(help="Recipe names or paths.", show_default=False, autocompletion=completion.recipes)
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Check all recipes and profiles of the project.")] = False,
    overrides: options.Overrides = None,
    execution: options.Profile = None,
) -> None:
    """Check recipes and their profiles for errors.

    Lists all problems with file and line, and stages that cannot succeed under their profile; writes nothing. Exit code 2 if there are
    problems. Files that are not on this machine are no problem.
    """
    from pedigree.configs.base.document import ConfigError
    from pedigree.configs.language.recipe_files import recipe_names
    from pedigree.pipelines.cli.resolved import problems_of, profile_problems

    project = Project.find()
    if every == bool(recipe):
        raise UsageProblem("specify either recipes or --all: `pedigree validate tiny`, `pedigree validate --all`")
    names = recipe_names(project.recipes) if every else recipe or []
    checked = [problems_of(project, name, overrides or (), execution) for name in names]
    found = {problem: None for problems, _ in checked for problem in problems}
    profiles = sorted(path.stem for path in project.executions.glob("*.yaml")) if every else []
    found |= {problem: None for name in profiles for problem in profile_problems(project, name)}
    for file in dict.fromkeys(file for _, files in checked for file in files):
        echo(f"note: {file} is not on this machine, so it was not checked; `plan` and `run` require it", file=sys.stderr)
    if found:
        raise ConfigError(sorted(found, key=lambda problem: (problem.file, problem.line or 0)))
    also = f" and {counted(len(profiles), 'profile')}" if profiles else ""
    echo(f"{counted(len(names), 'recipe')}{also}: no problems")


@commands.command()
def pin(recipe: options.Recipe) -> None:
    """Replace every `revision: pin me` with a commit of the hub.

    Writes the newest commit of each repository on the hub (HF_ENDPOINT, or the mirror in PEDIGREE_HUB) into the recipe and into the
    recipes that it extends or takes stages from. Comments and layout are preserved.
    """
    import os

    from pedigree.pipelines.run.pins import pin as write_pins

    found = write_pins(Project.find(), recipe)
    if not found:
        echo(f"nothing to pin: {recipe} specifies a commit for every hub repository")
        return
    for one in found:
        result = one.commit or f"not pinned: {one.problem}"
        echo(f"{os.path.relpath(one.file)}:{one.line}: {one.repo}: {result}")
    left = sum(one.commit is None for one in found)
    echo(f"{counted(len(found) - left, 'revision')} pinned" + (f", {left} not pinned" if left else f"; next: {command('plan', recipe)}"))
    if left:
        raise typer.Exit(1)


@commands.command("compile")
def compile_(
    recipe: Annotated[
        list[str], typer.Argument(help="Recipe names or paths.", show_default=False, autocompletion=completion.recipes)
    ],
    overrides: options.Overrides = None,
) -> None:  # fmt: skip
    """Write dvc.yaml and params.yaml for use with `dvc repro`."""
    from pedigree.configs.language.compile import write_compiled
    from pedigree.configs.language.recipe import load_recipes

    project = Project.find()
    graphs = [graph for name in recipe for graph in load_recipes(project.recipes, name, overrides or ())]
    changed = write_compiled(project.root, {graph.recipe: graph for graph in graphs}.values())
    echo("\n".join(changed) if changed else "nothing changed")


@commands.command()
def variants(
    recipe: Annotated[
        str | None, typer.Argument(help="Only variants of this recipe.", show_default=False, autocompletion=completion.recipes)
    ] = None,
    remove: Annotated[
        str | None,
        typer.Option(
            "--remove", metavar="NAME", help="Remove a variant's artifacts; cached objects remain until `pedigree gc`.",
            autocompletion=completion.variants,
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Remove without confirmation.")] = False,
) -> None:  # fmt: skip
    """List variants made with --set, or remove one.

    Shows the overrides, progress, size and age of each variant.
    """
    from pedigree.configs.language.recipe_files import recipe_names
    from pedigree.pipelines.cli import variants as made

    project = Project.find()
    if remove is not None:
        if recipe is not None:
            raise UsageProblem(f"--remove takes no RECIPE: {command('variants', '--remove', remove)}")
        _remove_variant(made.find_variant(project, remove), yes)
        return
    if recipe is not None and recipe not in recipe_names(project.recipes) and not Path(recipe).exists():
        raise UsageProblem(f"no recipe {recipe!r}; `pedigree recipes` lists all recipes")
    found = [variant for variant in made.variants(project) if recipe in (None, variant.recipe)]
    if not found:
        echo("no variants; `pedigree run RECIPE --set STAGE.FIELD=VALUE` makes one")
        return
    cells = [
        (one.name, f"{one.done} of {one.stages}", size(one.size), f"{duration(one.age_s)} ago", "  ".join(one.overrides)) for one in found
    ]
    print_table(("variant", "own stages done", "size", "last change", "overrides"), cells)
    echo("\n`pedigree variants --remove NAME` removes a variant.")


@commands.command()
def scratch(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[STAGE/KEY]...", help="Only these folders, even if they could be resumed.", show_default=False),
    ] = None,
    clean: Annotated[bool, typer.Option("--clean", help="Delete folders instead of listing them.")] = False,
) -> None:
    """List or delete scratch folders of unfinished work.

    --clean deletes the folders that no current recipe or variant would resume.
    """
    from pedigree.pipelines.cli.scratch import list_or_clean

    list_or_clean(Project.find(), names or [], clean)


@commands.command()
def gc(
    remote: Annotated[bool, typer.Option("--remote", help="Also clean the DVC remote; run `git fetch --all --tags` first.")] = False,
    workspace: Annotated[bool, typer.Option("--workspace", help="Keep only objects that the working tree needs.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Delete the objects instead of listing them.")] = False,
) -> None:
    """Delete unreferenced objects from the DVC cache.

    Artifacts of any branch, tag or stash are kept, along with all their ancestors.
    """
    from pedigree.pipelines.cli.removal import print_waiting
    from pedigree.pipelines.maintain.gc import collect

    sweep = collect(Project.find(), workspace=workspace, remote=remote, delete=yes, listening=print_waiting)
    for place, objects in (("cache", sweep.objects), ("remote", sweep.remote_objects)):
        sizes: dict[str, list[int]] = {}
        for oid, count in objects.items():
            sizes.setdefault(sweep.owners.get(oid, "(unknown)"), []).append(count)
        if sizes:
            print_table(("made by", "objects", place), [(name, str(len(found)), size(sum(found))) for name, found in sorted(sizes.items())])
            echo()
    here, away = sum(sweep.objects.values()), sum(sweep.remote_objects.values())
    total = f"{counted(len(sweep.objects), 'object')}, {size(here)}, from the cache"
    total += f" and {counted(len(sweep.remote_objects), 'object')}, {size(away)}, from the remote" if remote else ""
    total += f", {counted(len(sweep.snapshots), 'code snapshot')}" if sweep.snapshots else ""
    tokens = f"{counted(len(sweep.tokens), 'tokenized file')}, {size(sum(sweep.tokens.values()))}"
    total += f", {tokens}" if sweep.tokens else ""
    verb = "deleted" if yes else "would be deleted"
    echo(f"{verb}: {total}; {counted(sweep.artifacts, 'artifact')} kept with all ancestors")
    if not yes and (sweep.objects or sweep.remote_objects or sweep.snapshots or sweep.tokens):
        echo(f"`pedigree gc{' --remote' * remote}{' --workspace' * workspace} --yes` deletes them.")


@commands.command(hidden=True)
def merge_lock(base: Path, ours: Path, theirs: Path) -> None:
    """Merge two `dvc.lock` files stage by stage (git merge driver)."""
    from pedigree.pipelines.ledger.lock_merge import merge_files

    raise typer.Exit(merge_files(base, ours, theirs))


def _write_recipe(project: Project, name: str, text: str) -> Path:
    """Write a new recipe, and return its path in the project; an existing recipe is kept."""
    from pedigree.configs.language.recipe_files import RECIPE_NAME

    if not RECIPE_NAME.fullmatch(name):
        raise UsageProblem(f"{name!r} is not a valid recipe name: begin with a lower-case letter; digits, `_` and `-` may follow")
    path = project.recipes / f"{name}.yaml"
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UsageProblem(f"{path.relative_to(project.root)} exists: choose another name, or remove the file") from None
    return path.relative_to(project.root)


def _remove_variant(variant, yes: bool) -> None:
    from pedigree.pipelines.cli import variants as made

    signs = made.refuse_while_in_use(variant)
    echo(f"{variant.name}: {' '.join(variant.overrides)}")
    echo(f"{counted(variant.done, 'artifact')}, {size(variant.size)}, in {variant.folder.relative_to(variant.project.root)}")
    if not yes and not typer.confirm("Remove them?"):
        echo("nothing removed")
        raise typer.Exit(1)
    made.remove(variant, signs)
    echo("removed. The DVC cache still has its objects, so re-running the variant restores it from there.")
    free = made.collectable(variant)
    if isinstance(free, str):
        echo(f"Cannot determine what `pedigree gc` would free: {free}")
    elif free:
        echo(f"`pedigree gc --yes` would delete {counted(len(free), 'object')} of this variant, {size(sum(free.values()))}.")
    else:
        echo("`pedigree gc` would free none of its objects: git or other recipes still reference them.")
