"""Numbered claims: one writer at a time, on a disk that machines share or in an object store.

    000007.json       a claim: created only if absent, never changed; its content identifies the holder
    000007.released   marks its release

The highest number holds. Numbers are never reused, so a holder that was overtaken without noticing, e.g. while suspended, sees a higher
one. Whether a holder without a release is still alive is up to the user of the claims: `pipelines/jobs/lease.py` for runners,
`data/artifacts/mirror.py` for jobs that upload.
"""

import os
import re
import shutil
import threading
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pedigree.data.store import storage
from pedigree.data.store.durable import create

_CLAIM, _OURS = (re.compile(rf"([0-9]{{6}}|[1-9][0-9]{{6,11}})\.{suffix}") for suffix in ("json", "(?:json|beat|released)"))


@dataclass(frozen=True)
class Folder:
    """A folder, which may be on a network file system."""

    path: Path

    def names(self, *, fresh: bool = False) -> list[str]:
        """Names in the folder; `fresh`: uncached, since a change of the folder makes a network file system ask its server."""
        if fresh:
            look = self.path / f".look-{os.getpid()}-{threading.get_ident()}"
            with suppress(OSError):  # gone, full or read-only: list it anyway
                look.touch()
                look.unlink()
        try:
            return os.listdir(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return []

    def create(self, name: str, data: bytes) -> bool:
        return create(self.path / name, data)

    def write(self, name: str, data: bytes) -> None:
        (self.path / name).write_bytes(data)

    def remove(self, name: str) -> None:
        path = self.path / name
        try:
            path.unlink(missing_ok=True)
        except (IsADirectoryError, PermissionError):  # a folder: Linux and POSIX raise different errors
            shutil.rmtree(path, ignore_errors=True)


@dataclass(frozen=True)
class Remote:
    """A URL of `data/store/storage.py`."""

    url: str

    def names(self, *, fresh: bool = False) -> list[str]:
        return [entry.name for entry in storage.entries(self.url)]

    def create(self, name: str, data: bytes) -> bool:
        return storage.create(f"{self.url}/{name}", data)

    def write(self, name: str, data: bytes) -> None:
        storage.write(f"{self.url}/{name}", data)

    def remove(self, name: str) -> None:
        storage.remove(f"{self.url}/{name}")


@dataclass(frozen=True)
class Claims:
    """The claims of one place."""

    store: Folder | Remote

    def top(self) -> tuple[int, bool]:
        """(highest number, 0 if there is none; whether it is held, i.e. not released)"""
        names = self.store.names()
        number = _highest(names)
        return number, number > 0 and f"{number:06d}.released" not in names

    def highest(self) -> int:
        """The highest number, uncached."""
        return _highest(self.store.names(fresh=True))

    def take(self, number: int, data: bytes) -> bool:
        """Try to claim a number that follows the highest."""
        if not self.store.create(f"{number:06d}.json", data):
            return False
        names = self.store.names(fresh=True)
        if _highest(names) != number:  # a stale listing gave an outdated number
            self.store.remove(f"{number:06d}.json")
            return False
        for name in names:  # the claim before stays: a concurrent listing may lack this one, and an empty one would restart the numbering
            found = _OURS.fullmatch(name)
            if found and int(found[1]) < number - 1:
                self.store.remove(name)
        return True

    def release(self, number: int) -> None:
        self.store.write(f"{number:06d}.released", b"")


def _highest(names: Iterable[str]) -> int:
    return max((int(found[1]) for name in names if (found := _CLAIM.fullmatch(name))), default=0)
