"""What a new artifact takes along: its own run, and the records, runs and patches of all that its inputs were made from."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from data.artifacts.artifacts import LINEAGE_SCHEMA, RUN_SCHEMA, write_json
from data.artifacts.lineage import folded, split
from pipelines.lineage.ancestry import Entry, as_told, read_pedigree


def write_origin(out: Path, run: Mapping[str, Any], inputs: Iterable[Path]) -> None:
    """Writes `run.json` and `lineage.json` of an artifact.

    Args:
        out: its folder.
        run: how it came about; the texts of patches stand in the attempts.
        inputs: folders of the artifacts that it read.

    Raises:
        ArtifactError: an input or its lineage is damaged.
    """
    own, patches = split_run(run)
    write_json(out / "run.json", own)
    write_json(out / "lineage.json", lineage_of(inputs, patches))


def split_run(run: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """What `run.json` holds, and its patches by sha256: those stand in `lineage.json`, with the ancestors'."""
    own, patches = split(run)
    return {"schema_version": RUN_SCHEMA, **own}, patches


def lineage_of(inputs: Iterable[Path], patches: Mapping[str, str]) -> dict[str, Any]:
    """What `lineage.json` holds of an artifact that was made from these folders under these patches."""
    entries: dict[str, Entry] = {}
    texts = dict(patches)
    for folder in inputs:
        pedigree = read_pedigree(folder)
        entries |= pedigree.entries
        texts |= pedigree.patches
    return {"schema_version": LINEAGE_SCHEMA, **folded(as_told(entries), texts)}
