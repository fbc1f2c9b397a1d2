"""Start a project outside the clone: `pedigree init`. Never replaces a file."""

import shlex
from collections.abc import Collection
from pathlib import Path
from typing import Annotated

import typer

from pedigree.configs.base.problems import UsageProblem
from pedigree.configs.base.project import PACKAGED, Project
from pedigree.pipelines.cli import completion
from pedigree.pipelines.cli.console import echo

EXAMPLE = "tiny"
DVC_CONFIG = """\
[core]
    analytics = false
    autostage = false
    check_update = false
    checksum_jobs = 4
    # `true` in .dvc/config.local where `flock` does not work across machines, as on some NFS servers
    hardlink_lock = false
[cache]
    # No hard links: for root they are writable, and a write in place would change the cached object too.
    type = "reflink,copy"
    slow_link_warning = false
"""
SETTINGS = {".dvc/config": DVC_CONFIG, ".dvc/.gitignore": "/config.local\n/tmp\n/cache\n"}
"""File → text. An existing file stays as it is."""
LINES = {
    ".gitignore": (
        "/.venv", "/.pedigree/", "__pycache__/", "/artifacts/*/*/payload", "/artifacts/*/*/evidence", "/artifacts/*/*/record.json",
        "/artifacts/*/*/run.json", "/artifacts/*/*/lineage.json", "/artifacts/*/report.html", "/dvc_plots/", "/outside/",
    ),
    ".dvcignore": ("/.venv", "/.pedigree", "/.git", "__pycache__"),
    ".gitattributes": ("dvc.lock merge=pedigree-lock",),
}  # fmt: skip
"""File → lines. An existing file keeps its own and gets those that it lacks."""

commands = typer.Typer()


@commands.command()
def init(
    folder: Annotated[Path, typer.Argument(help="The project's folder; created if missing.")] = Path("."),
    recipe: Annotated[
        str | None,
        typer.Option(
            "--recipe", metavar="RECIPE", autocompletion=completion.packaged,
            help=f"Copy this packaged recipe, with those it builds on; {EXAMPLE} if the project has no recipe.",
        ),
    ] = None,
) -> None:  # fmt: skip
    """Start a project in a folder, or complete its settings.

    Makes a git repository (unless the folder is in one), the settings of DVC and git, and configs/recipes with an example. Existing files
    are never replaced, so the command can be repeated, for example in a fresh clone of a project.
    """
    from pedigree.configs.language.recipe_files import recipe_names
    from pedigree.pipelines.ledger.git import refused
    from pedigree.pipelines.publish.commits import ledger_names, with_reasons

    project, made = create(folder, recipe)
    echo(f"{project.root}: {'made ' + ', '.join(made) if made else 'complete, nothing to do'}")
    started = recipe or (EXAMPLE if (project.recipes / f"{EXAMPLE}.yaml").exists() else next(iter(recipe_names(project.recipes))))
    refusals = refused(project, ledger_names(started))
    if refusals:
        echo(f"\nGit would not add {with_reasons(refusals)}, which will record the results of {started}: remove the rule or link.")
    echo("\nNext:")
    if project.root != Path.cwd():
        echo(f"  cd {shlex.quote(str(folder))}")
    echo(f"  pedigree plan {started}\n  pedigree run {started}")


def create(folder: Path, recipe: str | None = None) -> "tuple[Project, list[str]]":
    """Create a project, or what it lacks; return it, and the files that were created or extended.

    `recipe` is a packaged recipe to copy; by default `tiny` if the project has no recipe.

    Raises:
        ConfigError: there is no such recipe.
        UsageProblem: `recipe` is a path, a recipe would be replaced, the folder is part of another project or not a folder, or git is
            missing or refuses to read the repository that the folder is in.
    """
    from pedigree.configs.language.recipe_files import recipe_names
    from pedigree.data.artifacts.artifacts import write_text
    from pedigree.pipelines.ledger.lock_merge import register

    project = Project(folder.resolve())
    try:
        above = Project.find(project.root)
    except UsageProblem:
        above = project
    if above != project:
        raise UsageProblem(f"{project.root} is inside the project {above.root}: choose a folder outside it, or add recipes to that one")
    copied = _recipes(project, recipe or EXAMPLE) if recipe or not recipe_names(project.recipes) else {}
    try:
        project.root.mkdir(parents=True, exist_ok=True)
        made = ["a git repository"] if _start_git(project.root) else []
        for name, text in (SETTINGS | copied).items():
            if not (project.root / name).exists():
                write_text(project.root / name, text)
                made.append(name)
        made += [name for name, lines in LINES.items() if _complete(project.root / name, lines)]
    except OSError as error:
        raise UsageProblem(f"{error.filename or folder} cannot be written ({error.strerror}): choose another folder, or free it") from error
    register(project.root)
    return project, made


def _recipes(project: "Project", recipe: str) -> dict[str, str]:
    """File → text of a packaged recipe and of those that it extends or takes stages from."""
    from pedigree.configs.language.compile import pipeline_file
    from pedigree.configs.language.recipe import load_recipes

    if recipe.endswith((".yaml", ".yml")):
        raise UsageProblem(f"--recipe takes the name of a packaged recipe, not a path: omit it, then copy {recipe} to {project.recipes}")
    found = {}
    for graph in load_recipes(PACKAGED.recipes, recipe):
        file = PACKAGED.recipes / f"{graph.recipe}.yaml"
        name = file.relative_to(PACKAGED.root).as_posix()
        own, data = project.root / name, file.read_bytes()
        if own.exists() and own.read_bytes() != data:
            raise UsageProblem(f"{own} exists and differs from the packaged recipe {graph.recipe}: rename one of them, or omit --recipe")
        pipeline = project.root / pipeline_file(graph.recipe)
        if pipeline.exists() and not own.exists():
            raise UsageProblem(f"{pipeline} exists, and the recipe {graph.recipe} would be compiled there: move it, or omit --recipe")
        found[name] = data.decode()
    return found


def _start_git(folder: Path) -> bool:
    """Make a git repository unless the folder is in one; returns whether it was made."""
    from pedigree.pipelines.ledger.git import ABSENT, in_repository, run_git

    if in_repository(folder):
        return False
    made = run_git(folder, "init", "--quiet")
    if made.returncode:
        remedy = "install it" if made.returncode == ABSENT else "fix it, then run the command again"
        raise UsageProblem(f"git cannot make a repository in {folder} ({made.stderr.decode(errors='replace').strip()}): {remedy}")
    return True


def _complete(file: Path, lines: Collection[str]) -> bool:
    """Append missing lines to a file; returns whether there were any."""
    from pedigree.data.artifacts.artifacts import write_bytes

    data = file.read_bytes() if file.exists() else b""  # the user's lines may have any encoding
    lacking = [line for line in map(str.encode, lines) if line not in data.splitlines()]
    if lacking:
        write_bytes(file, data + b"\n" * (bool(data) and not data.endswith(b"\n")) + b"\n".join(lacking) + b"\n")
    return bool(lacking)
