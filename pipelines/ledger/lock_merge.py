"""`dvc.lock` of two branches made one, stage by stage: a merge driver for git.

Git merges lines; two branches that each ran another stage collide in them. An entry of `dvc.lock` is a fact about one stage, so
each is merged by itself. What neither branch can say of the merged recipe is left out: `pedigree run` restores it from the run
cache, or makes it.

`python -m pipelines.ledger.lock_merge` tells git of the driver (`make setup` does it); `.gitattributes` says which files are merged so.
"""

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from configs.base.document import ConfigError, Problem
from configs.base.project import Project
from configs.base.texts import shown
from configs.language.compile import pipeline_file
from configs.language.graph import Graph
from data.store.untrusted import ArtifactError, parse_yaml
from pipelines.ledger.git import run_git

DRIVER = "pedigree-lock"
COMMAND = (
    'PATH="$PWD/.venv/bin:$PATH"; if command -v pedigree >/dev/null; then exec pedigree merge-lock %O %A %B; '
    "else exec git merge-file -L ours -L base -L theirs %A %O %B; fi"
)
"""A clone without an environment merges lines as before: a driver that is not found would leave one side, as if all were well."""
MARK = re.compile(r"^(?:<{7}|>{7})(?: |$)")
NAME = re.compile(r"  \S.*:\s*")
RESULT = ("payload", "record.json")
"""Parts of an artifact that say what it is; the others hold times, and differ between two runs with one result."""


@dataclass(frozen=True)
class Merged:
    """A `dvc.lock` out of two."""

    text: str
    conflicts: tuple[str, ...]
    """Stages with one input and two results: both entries stand in the text, between marks."""
    dropped: tuple[str, ...]
    """Stages whose inputs both branches changed: no entry can be right."""


def merge_locks(base: str, ours: str, theirs: str) -> Merged:
    """Merges two `dvc.lock`s that come from one; empty text stands for a file that was not there.

    An entry that one side changed is that side's. Where both did: the side that alone has other inputs (command, dependencies,
    parameters) than before; either, when the results are equal.

    Raises:
        ValueError: one of the texts is no `dvc.lock`, or holds more than one.
    """
    (_, before), (header, mine), (other_header, yours) = _blocks(base), _blocks(ours), _blocks(theirs)
    if header and other_header and header != other_header:
        raise ValueError("the two begin differently")
    parts, conflicts, dropped = [header or other_header], [], []
    for name in [*mine, *(name for name in yours if name not in mine)]:
        one, other = mine.get(name), yours.get(name)
        chosen = _chosen(before.get(name), one, other)
        if chosen is None and one is not None and other is not None:
            if _inputs(one) == _inputs(other):
                conflicts.append(name)
                chosen = f"<<<<<<< ours\n{one}=======\n{other}>>>>>>> theirs\n"
            else:
                dropped.append(name)
        parts.append(chosen or "")
    return Merged("".join(parts), tuple(conflicts), tuple(dropped))


def merge_files(base: Path, ours: Path, theirs: Path) -> int:
    """The driver: writes the merged file over `ours` and returns git's exit code, 0 merged, 1 conflict."""
    try:
        merged = merge_locks(base.read_text(), ours.read_text(), theirs.read_text())
    except (ValueError, OSError) as error:  # not ours to understand: lines, as git does it
        _tell(f"dvc.lock is merged line by line: {error}")
        labels = ("-L", "ours", "-L", "base", "-L", "theirs")
        return min(1, run_git(Path.cwd(), "merge-file", *labels, str(ours), str(base), str(theirs)).returncode)
    ours.write_text(merged.text)
    if merged.dropped:
        _tell(f"dvc.lock: both branches changed {', '.join(merged.dropped)}: `pedigree run` restores it or makes it again")
    if merged.conflicts:
        doubled = ", ".join(merged.conflicts)
        _tell(f"dvc.lock: both branches have a result of {doubled}: keep one of them, then `git add` the file")
    return 1 if merged.conflicts else 0


def refuse_conflicts(project: Project, graph: Graph) -> None:
    """Says where a merge has left its marks in the `dvc.lock`s that a recipe needs.

    Raises:
        ConfigError: with file and line of the first marks of each.
    """
    problems = []
    for recipe in dict.fromkeys([graph.recipe, *(node.recipe for node in graph.nodes.values())]):
        name = Path(pipeline_file(recipe)).with_suffix(".lock")
        lines = (project.root / name).read_text(errors="replace").splitlines() if (project.root / name).is_file() else []
        marked = next((number for number, line in enumerate(lines, 1) if MARK.match(line)), None)
        if marked is not None:
            remedy = f"keep one side, either will do (`git checkout --ours -- {name}`), then type this again"
            why = "what both branches made is restored from the run cache"
            problems.append(Problem(name.as_posix(), marked, f"a merge has left both sides here: {remedy}: {why}"))
    if problems:
        raise ConfigError(problems)


def _chosen(before: str | None, one: str | None, other: str | None) -> str | None:
    """The entry that is right for sure; None where none is."""
    if one is None or other is None:
        kept = other if one is None else one
        return None if kept == before else kept  # deleted on one side; what the other changed meanwhile is no loss to keep
    if one == other or other == before:
        return one
    if one == before:
        return other
    if before is not None and _inputs(one) == _inputs(before) != _inputs(other):
        return other
    if before is not None and _inputs(other) == _inputs(before) != _inputs(one):
        return one
    return one if _inputs(one) == _inputs(other) and _result(one) == _result(other) else None


def _entry(block: str) -> Mapping[str, Any]:
    try:
        (entry,) = parse_yaml(block, "an entry").values()
    except ArtifactError as error:
        raise ValueError("an entry cannot be read without the others") from error
    return entry


def _inputs(block: str) -> dict[str, Any]:
    return {part: value for part, value in _entry(block).items() if part != "outs"}


def _result(block: str) -> dict[str, Any]:
    """Hashes of what the stage made: of what defines an artifact; of everything, where the stage is somebody's own."""
    outs = {PurePosixPath(out["path"]).name: out.get("md5") for out in _entry(block).get("outs", [])}
    return {name: outs[name] for name in RESULT} if all(name in outs for name in RESULT) else outs


def _blocks(text: str) -> tuple[str, dict[str, str]]:
    """What stands before the stages, and the lines of each stage."""
    if not text.strip():
        return "", {}
    try:
        stages = list((parse_yaml(text, "dvc.lock").get("stages") or {}).items())
    except (ArtifactError, AttributeError) as error:
        raise ValueError("it cannot be read") from error
    header, *lines = re.split(r"(?m)(?<=^stages:$\n)", text, maxsplit=1)
    blocks: list[str] = []
    for line in "".join(lines).splitlines():
        if NAME.fullmatch(line):
            blocks.append("")
        if not blocks or not line.startswith("  "):
            raise ValueError(f"it has a line that belongs to no stage: {line.strip()!r}")
        blocks[-1] += f"{line}\n"
    if [_entry(block) for block in blocks] != [entry for _, entry in stages]:  # by name a stage may stand there twice
        raise ValueError("its lines are not laid out as DVC writes them")
    return header, {name: block for (name, _), block in zip(stages, blocks, strict=True)}


def _tell(text: str) -> None:
    """Says on stderr what became of a merge; stages may have been named by whoever wrote the other branch."""
    sys.stderr.write(f"{shown(text)}\n")


def main() -> None:
    """Tells git of the driver, in the clone at hand."""
    for key, value in (("name", "dvc.lock, stage by stage"), ("driver", COMMAND)):
        if run_git(Path.cwd(), "config", f"merge.{DRIVER}.{key}", value).returncode:
            _tell("    this folder is not a git repository: the merge driver is not registered")
            return


if __name__ == "__main__":
    main()
