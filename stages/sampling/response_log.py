"""Append-only response log; a resumed job does not repeat requests.

the log            in the job's scratch folder: one line per value, written immediately; a truncated line is ignored
chunks/HASH.json   the same values in parts, for resuming on another machine (`stages.job.mirroring`). Values missing from the log are
                   added to it; values missing from the parts after a kill are uploaded by the next attempt

Only line offsets and values not yet uploaded stay in memory.
"""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Generic, TypeVar

from pedigree.configs.base.frozen import canonical_json, digest
from pedigree.data.artifacts.artifacts import write_text
from pedigree.data.host.faults import fault_point
from pedigree.stages.job.job import Job
from pedigree.stages.job.mirroring import open_mirror

PART = 64
"""Values per uploaded part, and between two syncs of the log; a power failure or lost machine loses fewer than that."""
READING = "reading the response log"
"""Activity reported while the log is read, which may take minutes."""

T = TypeVar("T")


class ResponseLog(Generic[T]):
    """This job's values, by the key of their request, read on demand. A context manager whose end uploads the remaining values; nothing
    can be added afterwards."""

    def __init__(self, job: Job, log: Path, what: str, write: Callable[[T], Any], read: Callable[[Any], T]) -> None:
        """
        Args:
            job: the job.
            log: the log file.
            what: name of a value, for fault points.
            write: converts a value to JSON.
            read: the inverse; raises ValueError or TypeError for an invalid value.
        """
        self._job, self._mirror, self._what, self._write, self._read = job, open_mirror(job), what, write, read
        self._log = log
        self._places: dict[str, int] = {}
        """Key → offset of its line."""
        self._unsent: dict[str, T] = {}
        folder = job.folder / "chunks"
        if self._mirror is not None:
            self._mirror.fetch_all_chunks(folder)
        log.parent.mkdir(parents=True, exist_ok=True)
        self._stream = log.open("ab+")
        self._stream.write(b"\n" * _is_torn(self._stream))
        self._stream.flush()
        for key, place in self._lines():
            self._places[key] = place
        self._take_parts(sorted(folder.glob("[0-9a-f]*.json")))  # also if they came from a mirror that is no longer configured

    def __enter__(self) -> "ResponseLog[T]":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._send()
        self._stream.close()

    def __contains__(self, key: str) -> bool:
        return key in self._places

    def __getitem__(self, key: str) -> T:
        with self._log.open("rb") as stream:
            stream.seek(self._places[key])
            return self._entry(json.loads(stream.readline()))[1]

    def get(self, key: str) -> T | None:
        return self[key] if key in self else None

    def keep(self, key: str, value: T) -> None:
        """Append a value immediately."""
        self._job.seal()
        self._add(key, value)
        fault_point(f"{self._what} kept")
        self._to_send(key, value)

    def _take_parts(self, parts: Sequence[Path]) -> None:
        """Add values of the parts that the log lacks. Values that the parts lack were not uploaded before a kill, and are uploaded now."""
        lacking = set(self._places) if self._mirror is not None else set[str]()
        for number, part in enumerate(parts):
            self._job.doing(READING, number, len(parts), "parts")
            for key, value in self._part(part):
                lacking.discard(key)
                if key not in self:
                    self._add(key, value)
        for key in filter(lacking.__contains__, self._places):  # in the order of the log
            self._job.doing(READING)
            self._to_send(key, self[key])

    def _to_send(self, key: str, value: T) -> None:
        self._unsent[key] = value
        if len(self._unsent) >= PART:
            os.fsync(self._stream.fileno())
            self._send()

    def _add(self, key: str, value: T) -> None:
        line = canonical_json([key, self._write(value)]).encode() + b"\n"
        self._stream.write(line)
        self._stream.flush()
        end = os.lseek(self._stream.fileno(), 0, os.SEEK_CUR)  # the actual position, even if another process has just appended
        self._places[key] = end - len(line)

    def _send(self) -> None:
        unsent, self._unsent = self._unsent, {}
        if self._mirror is None or not unsent:
            return
        text = canonical_json([[key, self._write(value)] for key, value in unsent.items()])
        part = self._job.folder / "chunks" / f"{digest(text)[:32]}.json"
        self._job.seal()
        write_text(part, text)
        self._mirror.offer_chunk(part)

    def _part(self, part: Path) -> list[tuple[str, T]]:
        """The values of a part; empty for other files in the folder, such as chunks of answers or rewards."""
        try:
            return [self._entry(entry) for entry in json.loads(part.read_text())]
        except (ValueError, TypeError):
            return []

    def _lines(self) -> Iterator[tuple[str, int]]:
        """(key, offset) of all complete lines."""
        place, size = 0, self._log.stat().st_size
        with self._log.open("rb") as stream:
            for line in stream:
                self._job.doing(READING, place / 1e6, size / 1e6, "MB")
                with suppress(ValueError, TypeError):  # truncated
                    yield self._entry(json.loads(line))[0], place
                place += len(line)

    def _entry(self, entry: Any) -> tuple[str, T]:
        key, value = entry
        return key, self._read(value)


def _is_torn(stream: BinaryIO) -> bool:
    """Whether a file, positioned at its end, ends without a newline."""
    if stream.tell() == 0:
        return False
    stream.seek(-1, os.SEEK_END)
    return stream.read(1) != b"\n"
