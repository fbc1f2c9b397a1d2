"""All recipes that may still use an artifact: those of the project, and what was compiled with `--set` or from another folder."""

from pathlib import Path

from pedigree.configs.base.document import ConfigError, Problem
from pedigree.configs.base.project import Project
from pedigree.configs.language.compile import source_file
from pedigree.configs.language.graph import Graph
from pedigree.configs.language.recipe import load_recipe
from pedigree.configs.language.recipe_files import recipe_names
from pedigree.data.artifacts.artifacts import ArtifactError
from pedigree.data.store.untrusted import read_source


def every_graph(project: Project, *, both: bool) -> tuple[list[Graph], dict[str, str]]:
    """Load them; also return the name of each one that cannot be read, with the first line of the reason.

    `both`: where a recipe's name also has a `source.json`, load both; else only the latter, which was compiled.
    """
    graphs: list[Graph] = []
    unread: dict[str, str] = {}
    compiled = {path.parent.name: path for path in sorted(project.artifacts.glob("*/source.json"))}
    recipes = [name for name in recipe_names(project.recipes) if both or name not in compiled]
    for name, source in [*((name, None) for name in recipes), *compiled.items()]:
        try:
            graphs.append(_load(project, source) if source else load_recipe(project.recipes, name))
        except (ArtifactError, ConfigError) as error:
            unread[name] = str(error).partition("\n")[0]
    return graphs, unread


def _load(project: Project, path: Path) -> Graph:
    source = read_source(path)
    is_file = source.recipe.endswith((".yaml", ".yml"))
    graph = load_recipe(project.recipes, str(project.root / source.recipe) if is_file else source.recipe, source.overrides)
    name = path.parent.name
    if graph.recipe != name:
        raise ConfigError([Problem(source_file(name), None, f"describes {graph.recipe}, not {name}: restore it from git")])
    return graph
