"""Replies of an endpoint, kept as they arrive: what a job has been told once, neither it nor its next attempt asks again.

    replies.jsonl      in the job's scratch folder: a line per reply, written at once; a line that a kill has torn is none
    chunks/HASH.json   the same in parts, for another machine to go on with (`stages.engines.mirroring`)
"""

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from configs.frozen import canonical_json, digest
from data.artifacts import write_text
from data.faults import fault_point
from stages.engines.endpoint import Reply
from stages.engines.mirroring import open_mirror
from stages.job import Job

PART = 64
"""Replies in one file that is sent to other machines: what a lost machine takes with it is less."""


class KeptReplies:
    """All replies that this job has, by the hash of what was asked. A context manager; its end sends what was not sent yet."""

    def __init__(self, job: Job) -> None:
        self._job, self._mirror = job, open_mirror(job)
        self._found: dict[str, Reply] = {}
        self._unsent: dict[str, Reply] = {}
        folder = job.folder / "chunks"
        if self._mirror is not None:
            self._mirror.fetch_all_chunks(folder)
            for part in sorted(folder.glob("*.json")):
                self._found |= dict(_read(entry) for entry in json.loads(part.read_text()))
        self._found |= dict(_lines(job.folder / "replies.jsonl"))
        path = job.folder / "replies.jsonl"
        torn = path.exists() and not path.read_bytes().endswith(b"\n") and path.stat().st_size > 0
        self._stream = path.open("a")
        self._stream.write("\n" * torn)

    def __enter__(self) -> "KeptReplies":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._send()
        self._stream.close()

    def __len__(self) -> int:
        return len(self._found)

    def get(self, key: str) -> Reply | None:
        return self._found.get(key)

    def keep(self, key: str, reply: Reply) -> None:
        """Writes a reply down before anything else happens."""
        self._job.seal()
        self._stream.write(canonical_json([key, asdict(reply)]) + "\n")
        self._stream.flush()
        fault_point("reply kept")
        self._found[key] = self._unsent[key] = reply
        if len(self._unsent) >= PART:
            self._send()

    def _send(self) -> None:
        if self._mirror is None or not self._unsent:
            return
        text = canonical_json([[key, asdict(reply)] for key, reply in self._unsent.items()])
        part = self._job.folder / "chunks" / f"{digest(text)[:32]}.json"
        self._job.seal()
        write_text(part, text)
        self._mirror.offer_chunk(part)
        self._unsent = {}


def _lines(path: Path) -> Iterator[tuple[str, Reply]]:
    if not path.exists():
        return
    with path.open(errors="replace") as stream:
        for line in stream:
            try:
                yield _read(json.loads(line))
            except (ValueError, TypeError):  # torn
                continue


def _read(entry: Any) -> tuple[str, Reply]:
    key, reply = entry
    return key, Reply(**reply)
