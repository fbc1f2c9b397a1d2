"""A git merge driver for `dvc.lock` that merges by stage.

Git merges lines, so two branches that each ran a different stage conflict. Each entry of `dvc.lock` is an independent fact about one
stage and is merged separately. Entries that neither branch can supply for the merged recipe are dropped: `pedigree run` restores
them from the run cache, or rebuilds them.

`python -m pedigree.pipelines.ledger.lock_merge` registers the driver with git, as do `make setup` and `pedigree init`;
`.gitattributes` selects its files.
"""

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from pedigree.configs.base.document import ConfigError, Problem
from pedigree.configs.base.project import Project
from pedigree.configs.base.texts import shown
from pedigree.configs.language.compile import pipeline_file
from pedigree.configs.language.graph import Graph
from pedigree.data.store.untrusted import ArtifactError, parse_yaml
from pedigree.pipelines.ledger.git import run_git

DRIVER = "pedigree-lock"
COMMAND = (
    'PATH="$PWD/.venv/bin:$PATH"; if command -v pedigree >/dev/null; then exec pedigree merge-lock %O %A %B; '
    "else exec git merge-file -L ours -L base -L theirs %A %O %B; fi"
)
"""A clone without an environment falls back to merging lines: git treats a missing driver as success and keeps one side."""
MARK = re.compile(r"^(?:<{7}|>{7})(?: |$)")
NAME = re.compile(r"  \S.*:\s*")
RESULT = ("payload", "record.json")
"""Parts of an artifact that define it; the others contain times and differ between runs with equal results."""


@dataclass(frozen=True)
class Merged:
    """The result of merging two versions of a `dvc.lock`."""

    text: str
    conflicts: tuple[str, ...]
    """Stages with equal inputs and different results: both entries are in the text, between conflict markers."""
    dropped: tuple[str, ...]
    """Stages whose inputs both branches changed, so that neither entry can be right."""


def merge_locks(base: str, ours: str, theirs: str) -> Merged:
    """Merge two versions of a `dvc.lock` with a common base; empty text means that the file did not exist.

    An entry that only one side changed is taken from that side. If both did: the side that alone changed the inputs (command, dependencies,
    parameters); either side, if the results are equal.

    Raises:
        ValueError: a text is not a single `dvc.lock`.
    """
    (_, before), (header, mine), (other_header, yours) = _blocks(base), _blocks(ours), _blocks(theirs)
    if header and other_header and header != other_header:
        raise ValueError("the two files begin differently")
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
    """Run the driver: write the merged file over `ours` and return git's exit code, 0 merged, 1 conflict."""
    try:
        merged = merge_locks(base.read_text(), ours.read_text(), theirs.read_text())
    except (ValueError, OSError) as error:  # unknown format: merge lines, as git does
        _report(f"dvc.lock is merged line by line: {error}")
        labels = ("-L", "ours", "-L", "base", "-L", "theirs")
        return min(1, run_git(Path.cwd(), "merge-file", *labels, str(ours), str(base), str(theirs)).returncode)
    ours.write_text(merged.text)
    if merged.dropped:
        _report(f"dvc.lock: both branches changed {', '.join(merged.dropped)}: `pedigree run` restores or rebuilds it")
    if merged.conflicts:
        _report(f"dvc.lock: both branches have a result for {', '.join(merged.conflicts)}: keep one of them, then `git add` the file")
    return 1 if merged.conflicts else 0


def refuse_conflicts(project: Project, graph: Graph) -> None:
    """Refuse `dvc.lock` files needed by a recipe that contain conflict markers: ConfigError with the line of the first in each."""
    problems = []
    for recipe in dict.fromkeys([graph.recipe, *(node.recipe for node in graph.nodes.values())]):
        name = Path(pipeline_file(recipe)).with_suffix(".lock")
        lines = (project.root / name).read_text(errors="replace").splitlines() if (project.root / name).is_file() else []
        marked = next((number for number, line in enumerate(lines, 1) if MARK.match(line)), None)
        if marked is not None:
            remedy = f"Keep either side (`git checkout --ours -- {name}`), then run the command again"
            why = "results of both branches are restored from the run cache"
            problems.append(Problem(name.as_posix(), marked, f"a merge left conflict markers here. {remedy}; {why}"))
    if problems:
        raise ConfigError(problems)


def _chosen(before: str | None, one: str | None, other: str | None) -> str | None:
    """The entry that is certainly right; None if there is none."""
    if one is None or other is None:
        kept = other if one is None else one
        return None if kept == before else kept  # deleted on one side; keeping the other side's change is harmless
    if one == other or other == before:
        return one
    if one == before:
        return other
    if _inputs(one) == _inputs(other):
        return one if _result(one) == _result(other) else None
    base = before and _inputs(before)
    return other if _inputs(one) == base else one if _inputs(other) == base else None


def _entry(block: str) -> Mapping[str, Any]:
    try:
        (entry,) = parse_yaml(block, "an entry").values()
    except ArtifactError as error:
        raise ValueError("an entry cannot be parsed on its own") from error
    return entry


def _inputs(block: str) -> dict[str, Any]:
    return {part: value for part, value in _entry(block).items() if part != "outs"}


def _result(block: str) -> dict[str, Any]:
    """Hashes of a stage's results: only the parts that define an artifact, or all outputs for a user's own stage."""
    outs = {PurePosixPath(out["path"]).name: out.get("md5") for out in _entry(block).get("outs", [])}
    return {name: outs[name] for name in RESULT} if all(name in outs for name in RESULT) else outs


def _blocks(text: str) -> tuple[str, dict[str, str]]:
    """The text before the stages, and the lines of each stage."""
    if not text.strip():
        return "", {}
    try:
        stages = list((parse_yaml(text, "dvc.lock").get("stages") or {}).items())
    except (ArtifactError, AttributeError) as error:
        raise ValueError("it cannot be parsed") from error
    header, *lines = re.split(r"(?m)(?<=^stages:$\n)", text, maxsplit=1)
    blocks: list[str] = []
    for line in "".join(lines).splitlines():
        if NAME.fullmatch(line):
            blocks.append("")
        if not blocks or not line.startswith("  "):
            raise ValueError(f"it has a line that belongs to no stage: {line.strip()!r}")
        blocks[-1] += f"{line}\n"
    if [_entry(block) for block in blocks] != [entry for _, entry in stages]:  # by name, a stage could appear twice
        raise ValueError("its layout is not the one that DVC writes")
    return header, {name: block for (name, _), block in zip(stages, blocks, strict=True)}


def _report(text: str) -> None:
    """Report the result of a merge on stderr; stage names from the other branch are untrusted."""
    sys.stderr.write(f"{shown(text)}\n")


def register(folder: Path) -> bool:
    """Register the driver in the clone that holds a folder; returns False outside git."""
    settings = (("name", "dvc.lock, stage by stage"), ("driver", COMMAND))
    return not any(run_git(folder, "config", f"merge.{DRIVER}.{key}", value).returncode for key, value in settings)


def main() -> None:
    """Register the driver in the current clone."""
    if not register(Path.cwd()):
        _report("    this folder is not a git repository: the merge driver is not registered")


if __name__ == "__main__":
    main()
