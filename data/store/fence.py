"""Fencing tokens: every submission of a job has a number, higher than all before, and only the highest may write.

A job that was cut off, stopped or believed dead may come back to life at any time, on any machine. It cannot be prevented from
running, so it looks whether a later submission exists, every two seconds and before each step that lasts, and ends if so. Numbers are
files that are created if absent and never changed: a late or stale writer cannot lower the highest.

    fence-000007-0002   the second submission under the lease number 7
"""

import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from data.store.heartbeat import BEAT_S

FENCE = "PEDIGREE_FENCE"
"""Environment variable of a job: the path of its fencing token. A file that is written anew per attempt would tell an old process
the new number."""
OVERTAKEN = 76
"""Exit code of a job that was overtaken."""
_NAME = re.compile(r"fence-(\d+)-(\d+)")


class Overtaken(Exception):
    """A later submission exists: this one must write nothing more."""


@dataclass
class Fence:
    """The right of one submission to write."""

    path: Path
    looked: float = 0.0

    @classmethod
    def raised(cls, folder: Path, lease: int) -> "Fence":
        """The token of the next submission under a lease number; all earlier ones are refused from now on.

        Raises:
            Overtaken: somebody with a higher lease number has submitted already.
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
        """The next number, taken so that nothing is submitted under it: every job that was submitted before ends itself, loudly.

        Raises:
            Overtaken: somebody has submitted just now.
        """
        return cls.raised(folder, max(_numbers(folder), default=(0, 0))[0])

    @classmethod
    def of_environment(cls) -> "Fence | None":
        """The token of the job that this process belongs to; None where it is run by hand."""
        path = os.environ.get(FENCE)
        return cls(Path(path)) if path else None

    def check(self) -> None:
        """Raises Overtaken unless this is the latest submission."""
        highest = max(_numbers(self.path.parent), default=(0, 0))
        if highest != self._number:
            raise self._overtaken(highest)
        self.looked = _now()

    def check_after_pause(self) -> None:
        """The same where nobody has looked for a while, because this process was stopped or its machine slept. Costs nothing else."""
        if _now() - self.looked > 2 * BEAT_S:
            self.check()

    @property
    def _number(self) -> tuple[int, int]:
        found = _NAME.fullmatch(self.path.name)
        assert found is not None, self.path
        return int(found[1]), int(found[2])

    def _overtaken(self, highest: tuple[int, int]) -> Overtaken:
        later = "{}.{}".format(*highest) if any(highest) else "gone with its folder"
        return Overtaken(f"this is submission {'{}.{}'.format(*self._number)} of its job, and the latest is {later}")


def fresh_names(folder: Path) -> list[str]:
    """What lies in a folder now. Changing it makes a network file system ask its server, instead of answering from a minute ago."""
    look = folder / f".look-{os.getpid()}-{threading.get_ident()}"
    with suppress(OSError):  # gone, full, or not writable any more: the listing says as much as it can
        look.touch()
        look.unlink()
    try:
        return os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _numbers(folder: Path) -> Iterator[tuple[int, int]]:
    for name in fresh_names(folder):
        found = _NAME.fullmatch(name)
        if found:
            yield int(found[1]), int(found[2])


def _now() -> float:
    """Seconds, the machine's sleep included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
