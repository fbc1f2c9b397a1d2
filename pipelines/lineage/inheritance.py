"""Write `run.json` and `lineage.json` of a new artifact: its own run, and the records, runs, and patches of its ancestors."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pedigree.data.artifacts.artifacts import LINEAGE_SCHEMA, RUN_SCHEMA, write_json
from pedigree.data.artifacts.lineage import folded, split
from pedigree.pipelines.lineage.ancestry import Entry, expanded, read_pedigree


def write_origin(out: Path, run: Mapping[str, Any], inputs: Iterable[Path]) -> None:
    """Write `run.json` and `lineage.json` of an artifact.

    Args:
        out: its folder.
        run: its run, with the texts of patches in the attempts.
        inputs: folders of its input artifacts.

    Raises:
        ArtifactError: an input or its lineage is damaged.
    """
    own, patches = split_run(run)
    write_json(out / "run.json", own)
    write_json(out / "lineage.json", lineage_of(inputs, patches))


def split_run(run: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Split a run into the contents of `run.json` and its patches by sha256, which go to `lineage.json`."""
    own, patches = split(run)
    return {"schema_version": RUN_SCHEMA, **own}, patches


def lineage_of(inputs: Iterable[Path], patches: Mapping[str, str]) -> dict[str, Any]:
    """Contents of `lineage.json` for an artifact with these input folders and patches."""
    entries: dict[str, Entry] = {}
    texts = dict(patches)
    for folder in inputs:
        pedigree = read_pedigree(folder)
        entries |= pedigree.entries
        texts |= pedigree.patches
    return {"schema_version": LINEAGE_SCHEMA, **folded(expanded(entries), texts)}
