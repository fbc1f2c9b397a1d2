"""Append-only log of answers: what a job received from models, which its next attempt neither computes nor requests again.

chunks/answers.jsonl  [key, value] per line, written immediately; a truncated line is ignored
chunks/HASH.json      the same pairs in parts, for resuming on another machine (`stages.job.mirroring`). Values missing from the log are
                      added to it; values missing from the parts after a kill are uploaded by the next attempt

A key is a hash of everything that determines the value. Only line offsets, and values not yet uploaded, stay in memory.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from pedigree.configs.base.frozen import digest
from pedigree.data.artifacts.artifacts import write_text
from pedigree.data.host.faults import fault_point
from pedigree.stages.job.job import Job, is_torn
from pedigree.stages.job.mirroring import open_mirror

PART = 64
"""Single values per uploaded part, and between two syncs of the log; a power failure or lost machine loses fewer than that."""
READING = "reading the response log"
"""Activity reported while the log is read, which may take minutes."""


def keys_of(decides: Mapping[str, Any], count: int) -> list[str]:
    """Keys of values that are computed together, from everything that determines them."""
    name = digest(decides)[:32]
    return [f"{name}/{number}" for number in range(count)]


class AnswerLog:
    """This job's values as JSON, by key, read on demand. A context manager whose end uploads the remaining values; nothing can be added
    afterwards."""

    def __init__(self, job: Job, folder: Path | None = None) -> None:
        """
        Args:
            folder: of a log of its own, which stays on this machine.
        """
        self._job, self._mirror = job, open_mirror(job) if folder is None else None
        self._folder = folder or job.folder / "chunks"
        self._log = self._folder / "answers.jsonl"
        self._places: dict[str, int] = {}
        """Key → offset of its line."""
        self._unsent: dict[str, Any] = {}
        if self._mirror is not None:
            self._mirror.fetch_chunks(self._folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._stream = self._log.open("ab+")
        self._stream.write(b"\n" * is_torn(self._stream))
        self._stream.flush()
        for key, place in self._lines():
            self._places[key] = place
        self._take_parts(sorted(self._folder.glob("[0-9a-f]*.json")))  # also if they came from a mirror that is no longer configured

    def __enter__(self) -> "AnswerLog":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._send()
        self._stream.close()

    def __contains__(self, key: str) -> bool:
        return key in self._places

    def __iter__(self) -> Iterator[str]:
        return iter([*self._places])

    @property
    def empty(self) -> bool:
        return not self._places

    def __getitem__(self, key: str) -> Any:
        with self._log.open("rb") as stream:
            stream.seek(self._places[key])
            return json.loads(stream.readline())[1]

    def keep(self, values: Mapping[str, Any]) -> None:
        """Append values immediately; several are also uploaded immediately."""
        self._job.seal()
        self._add(values)
        fault_point("answers kept")
        self._to_send(values)

    def together(self, keys: Sequence[str], compute: Callable[[], Sequence[Any]]) -> list[Any]:
        """Values that are computed together, unless all of them are known."""
        if not all(map(self.__contains__, keys)):
            self.keep(dict(zip(keys, compute(), strict=True)))
        return [self[key] for key in keys]

    def _take_parts(self, parts: Sequence[Path]) -> None:
        """Add values of the parts that the log lacks. Values that the parts lack were not uploaded before a kill, and are uploaded now."""
        lacking = set(self._places) if self._mirror is not None else set[str]()
        for number, part in enumerate(parts):
            self._job.doing(READING, number, len(parts), "parts")
            values = _values(part)
            lacking -= values.keys()
            self._add({key: value for key, value in values.items() if key not in self})
        for key in filter(lacking.__contains__, self._places):  # in the order of the log
            self._job.doing(READING)
            self._to_send({key: self[key]})

    def _to_send(self, values: Mapping[str, Any]) -> None:
        self._unsent |= values
        if len(values) > 1 or len(self._unsent) >= PART:
            os.fsync(self._stream.fileno())
            self._send()

    def _add(self, values: Mapping[str, Any]) -> None:
        lines = {key: _line([key, value]).encode() + b"\n" for key, value in values.items()}
        self._stream.write(b"".join(lines.values()))
        self._stream.flush()
        place = os.lseek(self._stream.fileno(), 0, os.SEEK_CUR)  # the actual position, even if another process has just appended
        for key, line in reversed(lines.items()):
            place -= len(line)
            self._places[key] = place

    def _send(self) -> None:
        unsent, self._unsent = self._unsent, {}
        if self._mirror is None or not unsent:
            return
        text = _line(list(unsent.items()))
        part = self._folder / f"{digest(text)[:32]}.json"
        self._job.seal()
        write_text(part, text)
        self._mirror.offer_chunk(part)

    def _lines(self) -> Iterator[tuple[str, int]]:
        """(key, offset) of all complete lines."""
        place, size = 0, self._log.stat().st_size
        with self._log.open("rb") as stream:
            for line in stream:
                self._job.doing(READING, place / 1e6, size / 1e6, "MB")
                with suppress(ValueError):  # truncated
                    for key in _pairs([json.loads(line)]):
                        yield key, place
                place += len(line)


def _line(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _values(part: Path) -> dict[str, Any]:
    """The values of a part; empty for other files."""
    with suppress(ValueError):
        return _pairs(json.loads(part.read_text()))
    return {}


def _pairs(read: Any) -> dict[str, Any]:
    """Key → value of the pairs of JSON; anything else is from another version, or damaged."""
    found = {}
    for one in read if isinstance(read, list) else ():
        match one:
            case [str() as key, value]:
                found[key] = value
    return found
