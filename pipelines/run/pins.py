"""Hugging Face Hub references of a recipe: unpinned revisions, availability checks, and `pedigree pin`.

Each `refuse_*` raises ConfigError with every problem: the stages, and the remedy.
"""

import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pedigree.configs.base.document import ConfigError, Problem
from pedigree.configs.base.hub_names import PIN_ME
from pedigree.configs.base.problems import UsageProblem
from pedigree.configs.base.project import Project
from pedigree.configs.base.texts import command
from pedigree.configs.language.graph import Graph, Node
from pedigree.configs.language.pinning import BESIDE, OpenRevision, open_revisions, pinned, without_revision
from pedigree.configs.language.recipe import load_recipes, recipe_file
from pedigree.configs.language.stated_sources import hub_sources
from pedigree.data.sources import hub
from pedigree.data.sources.hub import Repository
from pedigree.data.sources.model_folders import DESCRIBING
from pedigree.data.store.durable import replacing
from pedigree.data.store.storage import StoreError


@dataclass(frozen=True)
class Pinned:
    """The outcome of pinning one open revision."""

    file: Path
    line: int
    repo: str
    commit: str | None
    """The commit now written there; None if it could not be determined."""
    problem: str = ""
    """Why it could not be determined."""


def repositories(graph: Graph, addresses: Collection[str]) -> dict[Repository, list[str]]:
    """Hub repositories that these stages use → names of those stages, in the order of the graph."""
    found: dict[Repository, list[str]] = {}
    for node in (node for address, node in graph.nodes.items() if address in addresses):
        for repo in repositories_of(node):
            found.setdefault(repo, []).append(node.name)
    return found


def repositories_of(node: Node) -> list[Repository]:
    """Hub repositories that a stage uses, each once."""
    found: dict[Repository, None] = {}
    for source in hub_sources(node.config):
        kind = "dataset" if source.get("split") is not None else "model"
        found[Repository(kind, source["repo"], source["revision"])] = None
    return list(found)


def unpinned(graph: Graph, addresses: Collection[str]) -> dict[Repository, list[str]]:
    """The repositories among them whose revision is still `pin me`."""
    return {repo: stages for repo, stages in repositories(graph, addresses).items() if repo.revision == PIN_ME}


def refuse_unpinned(graph: Graph, addresses: Collection[str]) -> None:
    remedy = f"{command('pin', graph.source or graph.recipe)} writes the newest commit into the recipe"
    problems = [
        Problem(graph.recipe, None, f"{', '.join(stages)}: {repo} has no revision yet (`{PIN_ME}`); {remedy}")
        for repo, stages in unpinned(graph, addresses).items()
    ]
    if problems:
        raise ConfigError(problems)


def refuse_unreachable(graph: Graph, addresses: Collection[str]) -> None:
    """Refuse to start if a repository is unavailable: gated, missing, moved, without the commit, or not in the mirror.

    Fetches the small files of models, which are checked before the first stage runs.
    """
    problems = []
    for repo, stages in repositories(graph, addresses).items():
        try:
            if hub.check(repo) and repo.kind == "model":
                hub.fetch(repo, DESCRIBING)
        except StoreError as error:
            problems.append(Problem(graph.recipe, None, f"{', '.join(stages)}: {error}"))
    if problems:
        raise ConfigError(problems)


def pin(project: Project, recipe: str) -> list[Pinned]:
    """Replace every `pin me` with the newest commit, in a recipe and in those that it extends or takes stages from.

    Comments and layout are preserved; each file is replaced atomically. Revisions that cannot be determined stay open and are returned with
    the reason.

    Raises:
        ConfigError: the recipe cannot be loaded, or a repository would get another repository's commit.
        UsageProblem: a file cannot be written, or was edited in the meantime.
    """
    graphs = load_recipes(project.recipes, recipe)
    files = {file: file.read_bytes() for file in (recipe_file(project.recipes, graph.source).resolve() for graph in graphs)}
    _refuse_inherited(files, {repo.name for graph in graphs for repo in unpinned(graph, graph.nodes)})
    revisions = {file: open_revisions(before.decode(), file.name) for file, before in files.items()}
    known: dict[Repository, tuple[str | None, str]] = {}
    return [found for file, before in files.items() for found in _pin_file(file, before, revisions[file], known)]


def _refuse_inherited(files: Mapping[Path, bytes], repos: Collection[str]) -> None:
    """Refuse where one of these repositories replaces its parent's and inherits that one's `pin me`."""
    problems = [
        Problem(file.name, line, f"{repo} has no revision of its own here and would get another repository's commit: {BESIDE}")
        for file, text in files.items()
        for repo, line in without_revision(text.decode())
        if repo in repos
    ]
    if problems:
        raise ConfigError(problems)


def _pin_file(
    file: Path, before: bytes, revisions: Sequence[OpenRevision], known: dict[Repository, tuple[str | None, str]]
) -> list[Pinned]:
    found: dict[OpenRevision, Pinned] = {}
    for revision in revisions:
        repo = Repository("dataset" if revision.is_dataset else "model", revision.repo, PIN_ME)
        if repo not in known:
            try:
                known[repo] = hub.newest(repo), ""
            except StoreError as error:
                known[repo] = None, str(error)
        found[revision] = Pinned(file, revision.line, repo.name, *known[repo])
    commits = {revision: one.commit for revision, one in found.items() if one.commit}
    if commits:
        _write(file, before, pinned(before.decode(), commits).encode())
    return list(found.values())


def _write(file: Path, before: bytes, after: bytes) -> None:
    """Replace a file atomically, unless it was edited in the meantime."""
    try:
        with replacing(file) as temporary:
            temporary.write_bytes(after)
            shutil.copymode(file, temporary)
            if file.read_bytes() != before:
                raise UsageProblem(f"{file.name} was edited in the meantime; run the command again")
    except OSError as error:
        raise UsageProblem(f"{file} cannot be written ({error.strerror}): fix its permissions, or those of its folder") from error
