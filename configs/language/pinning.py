"""Find open revisions (`revision: pin me`) in a recipe file and replace them with commits."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import yaml

from pedigree.configs.base.document import ConfigError, Loader, Problem, parse_value
from pedigree.configs.base.hub_names import PIN_ME

MERGE = "tag:yaml.org,2002:merge"
BESIDE = f"write `revision: {PIN_ME}` next to its `repo`"
"""Remedy where one repository would receive the commit of another."""


@dataclass(frozen=True)
class OpenRevision:
    """One `pin me` in a file."""

    repo: str
    is_dataset: bool
    line: int
    start: int
    """Start of the value, in characters of the text."""
    end: int


def open_revisions(text: str, file: str) -> list[OpenRevision]:
    """Every `pin me` in the text of a loadable recipe, in file order; one repeated through aliases counts once.

    Raises:
        ConfigError: a `pin me` is in a mapping without a repository, or is merged into a mapping that names another repository.
    """
    found: dict[int, OpenRevision] = {}
    problems = []
    for mapping in _mappings(yaml.compose(text, Loader=Loader)):
        merged, own = _merged(mapping), _own(mapping)
        revision, repo = (own.get(name, merged.get(name)) for name in ("revision", "repo"))
        if not isinstance(revision, yaml.ScalarNode) or revision.value != PIN_ME:
            continue
        if "revision" not in own:
            if "repo" in own and "repo" in merged and own["repo"].value != merged["repo"].value:
                what = f"{own['repo'].value} merges the `{PIN_ME}` of {merged['repo'].value} through `<<`: {BESIDE}"
                problems.append(Problem(file, own["repo"].start_mark.line + 1, what))
            continue
        line = revision.start_mark.line + 1
        if repo is None:
            problems.append(Problem(file, line, f"`{PIN_ME}` without a repository: write `repo` next to it"))
            continue
        start = revision.start_mark.index
        found[start] = OpenRevision(str(repo.value), "split" in merged | own, line, start, revision.end_mark.index)
    if problems:
        raise ConfigError(problems)
    return [found[start] for start in sorted(found)]


def without_revision(text: str) -> list[tuple[str, int]]:
    """(repository, line) of each mapping that names a repository but inherits its revision from an extended recipe."""
    found = []
    for mapping in _mappings(yaml.compose(text, Loader=Loader)):
        fields = _fields(mapping)
        if isinstance(fields.get("repo"), yaml.ScalarNode) and "revision" not in fields:
            found.append((str(fields["repo"].value), fields["repo"].start_mark.line + 1))
    return found


def pinned(text: str, commits: Mapping[OpenRevision, str]) -> str:
    """The text with each `pin me` replaced by its commit."""
    for revision in sorted(commits, key=lambda revision: revision.start, reverse=True):
        commit = commits[revision]
        written = commit if parse_value(commit) == commit else f'"{commit}"'  # YAML would parse 40 digits as a number
        text = text[: revision.start] + written + text[revision.end :]
    return text


def _mappings(node: yaml.Node | None, above: tuple[int, ...] = ()) -> Iterator[yaml.MappingNode]:
    if node is None or id(node) in above:
        return
    if isinstance(node, yaml.MappingNode):
        yield node
    if isinstance(node, yaml.MappingNode | yaml.SequenceNode):
        inner = [value for _, value in node.value] if isinstance(node, yaml.MappingNode) else node.value
        for value in inner:
            yield from _mappings(value, (*above, id(node)))


def _fields(mapping: yaml.MappingNode) -> dict[str, yaml.Node]:
    """Values by key, including those merged in with `<<`."""
    return _merged(mapping) | _own(mapping)


def _own(mapping: yaml.MappingNode) -> dict[str, yaml.Node]:
    return {str(key.value): value for key, value in mapping.value if key.tag != MERGE}


def _merged(mapping: yaml.MappingNode) -> dict[str, yaml.Node]:
    merged: dict[str, yaml.Node] = {}
    for key, value in mapping.value:
        if key.tag == MERGE:
            for part in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                merged = _fields(part) | merged
    return merged
