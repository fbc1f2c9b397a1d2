"""A policy that Pedigree exported, as the base model of another project: its records are checked, and handed on with the model.

The import keeps them in `evidence/adopted-from/pedigree/`, from where they enter the lineage of the new artifact.
"""

from collections.abc import Mapping
from pathlib import Path

from pedigree.data.artifacts.artifacts import ArtifactError, parse_lineage, parse_patches, parse_record, parse_run
from pedigree.data.artifacts.chain import lineage_problems, record_problems
from pedigree.data.store.hashing import Hashed
from pedigree.data.store.untrusted import LINEAGE_BYTES, RECORD_BYTES, RUN_BYTES, parse_json, read_plain

FOLDER = "pedigree"
"""Folder of the records in an export."""
RECORDS = {"record.json": RECORD_BYTES, "run.json": RUN_BYTES, "lineage.json": LINEAGE_BYTES}
"""Its files → largest size in bytes."""
LOADED = (".json", ".jinja", ".safetensors", ".model", ".tiktoken", "vocab.txt", "merges.txt")
"""Ends of the names of files from which a model is loaded."""
PLAIN = f"export it again, or delete {FOLDER}/ in a copy to import a model of unknown origin"


def is_export(folder: Path) -> bool:
    return any((folder / FOLDER / name).exists() for name in RECORDS)


def checked_records(folder: Path, hashed: Mapping[str, Hashed]) -> dict[str, bytes]:
    """The `RECORDS` of an exported policy, by name, if they agree with each other and with its files, of which `hashed` has the hashes.

    Raises:
        ArtifactError: they do not, or it is no policy; with the remedy.
    """
    try:
        found = {name: read_plain((folder / FOLDER / name).resolve(), most) for name, most in RECORDS.items()}  # the hub's cache has links
        record = parse_record(found["record.json"], "record.json")
        run, raw = (parse_json(found[name], name) for name in ("run.json", "lineage.json"))
        parse_run(run, "run.json")
        parse_patches(run, raw, "lineage.json")
        problems = [*record_problems(record), *lineage_problems(record, parse_lineage(raw, "lineage.json"))]
    except ArtifactError as error:
        raise ArtifactError(f"it was exported by Pedigree, but its lineage is damaged ({error}): {PLAIN}") from error
    if record.type != "policy":
        raise ArtifactError(f"it is an exported {record.type}, and source_model imports policies: name the export of a policy")
    recorded = {entry.path: entry.sha256 for entry in record.files}
    present = {name: file.sha256 for name, file in hashed.items() if not name.startswith((".", f"{FOLDER}/"))}
    problems += [f"{name} is not as recorded" for name, sha256 in recorded.items() if present.get(name) != sha256]
    problems += [f"{name} was added" for name in present.keys() - recorded.keys() if name.endswith(LOADED)]
    if problems:
        raise ArtifactError(f"it was exported by Pedigree and has changed since ({'; '.join(sorted(problems)[:3])}): {PLAIN}")
    return found
