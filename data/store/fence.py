"""Fencing tokens: submissions of a job are numbered in increasing order, and only the highest may write.

A job that was cut off, stopped or presumed dead may resume at any time, on any machine. It therefore checks for a later submission
every two seconds and before each durable step, and exits if there is one. Numbers are files that are created exclusively and never
changed, so a stale writer cannot lower the highest.

    fence-000007-0002   the second submission under lease 7
"""

import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pedigree.data.store.claims import Folder
from pedigree.data.store.heartbeat import BEAT_S

FENCE = "PEDIGREE_FENCE"
"""Environment variable with the path of a job's fencing token. A file rewritten at each attempt would give an old process the new
number."""
OVERTAKEN = 76
"""Exit code of a superseded job."""
_NAME = re.compile(r"fence-(\d+)-(\d+)")


class Superseded(Exception):
    """A later submission exists; this one must not write anymore."""


@dataclass
class Fence:
    """One submission's right to write."""

    path: Path
    looked: float = 0.0

    @classmethod
    def raised(cls, folder: Path, lease: int) -> "Fence":
        """Create the token of the next submission under a lease; all earlier tokens become invalid.

        Raises Superseded if the holder of a higher lease number has already submitted.
        """
        folder.mkdir(parents=True, exist_ok=True)
        while True:
            highest = max(_numbers(folder), default=(0, 0))
            mine = max((lease, 1), (lease, highest[1] + 1) if highest[0] == lease else (lease, 1))
            fence = cls(folder / f"fence-{mine[0]:06d}-{mine[1]:04d}")
            if highest > mine:
                raise fence._overtaken(highest)
            try:
                fence.path.open("x").close()
            except FileExistsError:
                continue
            fence.check()
            for old in sorted(_numbers(folder))[:-1]:
                (folder / f"fence-{old[0]:06d}-{old[1]:04d}").unlink(missing_ok=True)
            return fence

    @classmethod
    def closed(cls, folder: Path) -> "Fence":
        """Take the next number without submitting under it, so that every job submitted before exits with `OVERTAKEN`.

        Raises Superseded if another submission happened at the same time.
        """
        return cls.raised(folder, max(_numbers(folder), default=(0, 0))[0])

    @classmethod
    def of_environment(cls) -> "Fence | None":
        """This process's token; None outside of a job."""
        path = os.environ.get(FENCE)
        return cls(Path(path)) if path else None

    def check(self) -> None:
        """Raise Superseded unless this is the latest submission."""
        highest = max(_numbers(self.path.parent), default=(0, 0))
        if highest != self._number:
            raise self._overtaken(highest)
        self.looked = _now()

    def check_after_pause(self) -> None:
        """Check again if the last check is old because the process was stopped or its machine slept; otherwise free."""
        if _now() - self.looked > 2 * BEAT_S:
            self.check()

    @property
    def _number(self) -> tuple[int, int]:
        found = _NAME.fullmatch(self.path.name)
        assert found is not None, self.path
        return int(found[1]), int(found[2])

    def _overtaken(self, highest: tuple[int, int]) -> Superseded:
        later = "{}.{}".format(*highest) if any(highest) else "gone with its folder"
        return Superseded(f"this is submission {'{}.{}'.format(*self._number)} of its job, and the latest is {later}")


def _numbers(folder: Path) -> Iterator[tuple[int, int]]:
    for name in Folder(folder).names(fresh=True):
        found = _NAME.fullmatch(name)
        if found:
            yield int(found[1]), int(found[2])


def _now() -> float:
    """Seconds since boot, including suspend."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
