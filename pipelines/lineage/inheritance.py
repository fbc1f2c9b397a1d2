"""Write `run.json` and `lineage.json` of a new artifact: its own run, and the records, runs, and patches of its ancestors."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pedigree.data.artifacts.artifacts import ADOPTED, LINEAGE_SCHEMA, RUN_SCHEMA, Input, write_json
from pedigree.data.artifacts.lineage import folded, split
from pedigree.pipelines.lineage.ancestry import Entry, expanded, read_pedigree


def write_origin(out: Path, run: Mapping[str, Any], inputs: Iterable[Path]) -> None:
    """Write `run.json` and `lineage.json` of an artifact made from those in the folders `inputs`; `run` has the texts of patches."""
    own, patches = split_run(run)
    write_json(out / "run.json", own)
    write_json(out / "lineage.json", lineage_of(inputs, patches))


def adopted(out: Path) -> tuple[Input, ...]:
    """The artifact of another project that an imported model was exported from, as an input; none for other artifacts."""
    folder = out / "evidence" / ADOPTED
    if not folder.exists():
        return ()
    made = read_pedigree(folder)
    return (Input(port=ADOPTED, label=made.address.rpartition("/")[2], content=made.record.content, producer=made.id),)


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
        entries |= {identifier: _with_licences(entry, entries.get(identifier)) for identifier, entry in pedigree.entries.items()}
        texts |= pedigree.patches
    return {"schema_version": LINEAGE_SCHEMA, **folded(expanded(entries), texts)}


def _with_licences(entry: Entry, other: Entry | None) -> Entry:
    """The entry with the licenses in another of the same artifact, which another project may have stated differently."""
    if other is None or other[1].licences == entry[1].licences:
        return entry
    record, run = entry
    theirs = other[1].licences
    known = {name: tuple(sorted({*run.licences.get(name, ()), *theirs.get(name, ())})) for name in {**run.licences, **theirs}}
    return record, run.model_copy(update={"licences": known})
