"""Folders that a stranger might hand over: sound ones made by hand, and what tests change in them; every forged record has true hashes."""

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pedigree.configs.base.frozen import digest
from pedigree.configs.language.kinds import KINDS
from pedigree.configs.rows.datasets import PrepareData
from pedigree.data.artifacts.artifacts import stage_key

COMMIT = "0123456789abcdef0123456789abcdef01234567"
RUN = {
    "schema_version": 1,
    "address": "lab/raw",
    "numerics": {"device": "cpu", "threads": 1, "world_size": 1},
    "placement": {"slots": 1},
    "attempts": [
        {
            "started_at": "2026-01-02T03:04:05+00:00",
            "ended_at": "2026-01-02T03:06:10+00:00",
            "cause": "succeeded",
            "code": {"commit": COMMIT, "dirty": False, "patch_sha256": None},
        }
    ],
    "environment": {"python": "3.11.7", "libraries": {"torch": "2.13.0"}, "locks": {}},
    "hardware": {"cpu": "A processor", "cores": 2, "memory_gib": 23.5},
}
SOURCE = {"type": "arithmetic", "operations": ["add"], "digits": [1], "count": 3, "seed": 1, "style": "plain"}
CONFIG = PrepareData.model_validate({"record": "conversation", "sources": [SOURCE]}).model_dump(mode="json")
ROWS = b"".join(b'{"id":"r%d","n":%d}\n' % (n, n) for n in range(3))


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def sealed(record: dict[str, Any]) -> dict[str, Any]:
    """The record with its key and content made true, whatever it says."""
    edges = [(given["port"], given["label"], given["content"]) for given in record["inputs"]]
    key = stage_key(record["kind"], record["version"], record["config"], edges, record["source_files"])
    files = sorted(([entry["path"], entry["sha256"]] for entry in record["files"]), key=lambda entry: entry[0])
    return record | {"key": key, "content": digest(files)}


def record_of(files: Mapping[str, bytes], **changes: Any) -> dict[str, Any]:
    """A sealed record of a data stage."""
    entries = [{"path": name, "size": len(data), "sha256": sha256(data)} for name, data in sorted(files.items())]
    body = {
        "schema_version": 1, "kind": "prepare_data", "version": KINDS["prepare_data"].version, "type": "conversation",
        "config": CONFIG, "inputs": [], "source_files": {}, "key": "", "content": "", "files": entries, "metrics": {"rows": 3}, "marks": [],
    }  # fmt: skip
    return sealed(body | changes)


class Folder:
    """An exported folder or an artifact, as parts that a test may change before it is written."""

    def __init__(self, exported: bool = True) -> None:
        self.exported = exported
        self.files: dict[str, bytes] = {"rows.jsonl": ROWS}
        self.record: Any = record_of(self.files)
        self.run: Any = json.loads(json.dumps(RUN))
        self.lineage: Any = {"schema_version": 1, "artifacts": {}}
        self.sums: str | None = None
        self.raw: dict[str, bytes] = {}
        """Text that stands in place of record.json, run.json or lineage.json."""
        self.after: list[Callable[[Path], object]] = []
        """Done to the written folder."""

    def reseal(self, **changes: Any) -> "Folder":
        self.record = sealed(self.record | changes)
        return self

    def hold(self, **files: bytes) -> "Folder":
        """Payload files, and the record that says so."""
        self.files |= {name.replace("__", "."): data for name, data in files.items()}
        entries = [{"path": name, "size": len(data), "sha256": sha256(data)} for name, data in sorted(self.files.items())]
        return self.reseal(files=entries)

    def write(self, folder: Path) -> Path:
        records, payload = (folder / "pedigree", folder) if self.exported else (folder, folder / "payload")
        for place in (records, payload, *(() if self.exported else (folder / "evidence",))):
            place.mkdir(parents=True, exist_ok=True)
        for name, data in self.files.items():
            (payload / name).parent.mkdir(parents=True, exist_ok=True)
            (payload / name).write_bytes(data)
        for name, value in (("record.json", self.record), ("run.json", self.run), ("lineage.json", self.lineage)):
            data = self.raw.get(name, json.dumps(value).encode())
            (records / name).write_bytes(data)
        if self.exported:
            found = {path.relative_to(folder).as_posix(): sha256(path.read_bytes()) for path in folder.rglob("*") if path.is_file()}
            lines = "".join(f"{value}  {name}\n" for name, value in sorted(found.items()))
            (records / "SHA256SUMS").write_text(lines if self.sums is None else self.sums)
        for change in self.after:
            change(folder)
        return folder


def snapshot(root: Path) -> dict[str, tuple[Any, ...]]:
    """Everything below a folder: kind, mode, bytes, targets of links, times of change."""
    found = {}
    for path in sorted([root, *root.rglob("*")]):
        state = path.lstat()
        data = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else ""
        found[path.relative_to(root).as_posix()] = (state.st_mode, state.st_mtime_ns, data)
    return found
