"""Leases: one writer per stage, on any number of machines that share a file system.

A lease is a folder of claims. A claim is created if absent and never overwritten, its number is higher than all before, and the
highest holds; giving it back is a mark beside it. So a number is never used twice, and whoever was overtaken without knowing it sees
that by its number (`Hold.check`).

    000007.json       who claimed: process, since when, what for
    000007.beat       its pulse (`data/store/heartbeat.py`)
    000007.released   it has been given back
    fence-000007-0001 what was submitted under it (`data/store/fence.py`)

Whether a holder lives is told by the process table where that is the holder's own; from elsewhere (another machine, a container, an
earlier boot) only its pulse tells. A claim of a form that this version does not know is somebody's elsewhere. No clock is compared
with another.
"""

import json
import os
import re
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from configs.base.frozen import Frozen
from configs.base.problems import PedigreeError
from data.store import heartbeat
from data.store.durable import sync_folder
from data.store.fence import fresh_names
from data.store.heartbeat import Listener, Pulse
from data.store.untrusted import ArtifactError, Line, read_json
from pipelines.jobs.processes import Process, is_seen_at

POLL_S = 0.2
CLAIM_BYTES = 64 << 10
_CLAIM, _OURS = re.compile(r"([0-9]{6,})\.json"), re.compile(r"([0-9]{6,})\.(?:json|beat|released)")
_UNKNOWN = Process(0, 0, "unknown")
"""Who has left a claim that cannot be read."""
_HELD: set[str] = set()
"""Tokens of the leases that this process holds: its own end of one must not depend on a disk that takes the mark."""


class Cancelled(Exception):
    """The run was cancelled while it waited."""


class NoLease(PedigreeError):
    """Nothing can be claimed where the lease should be."""


class LeaseLost(PedigreeError):
    """Another runner has taken over what this one held: nothing more may be written."""


@dataclass(frozen=True)
class Holder:
    """Who holds a lease, since when, and what for."""

    number: int
    process: Process
    since: float
    """For people: by the holder's clock."""
    what: str
    token: str
    folder: str | None = None
    """Of the lease, as the holder sees it."""

    def holds(self, folder: Path) -> bool:
        """Whether a holder of this machine lives, and holds this lease: a project may have been copied with its leases."""
        if self.folder is not None and is_seen_at(self.process.pid, self.folder, folder) is False:
            return False
        return self.token in _HELD if self.process == Process.here() else self.process.alive

    def __str__(self) -> str:
        if self.process == _UNKNOWN:
            return f"held by {self.what}, to be taken over when silent for {heartbeat.SILENCE_S:g} s"
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        elsewhere = f" on another machine or before a reboot, to be taken over when silent for {heartbeat.SILENCE_S:g} s"
        where = "" if self.process.is_local else elsewhere
        return f"held by process {self.process.pid}{where} since {since} ({self.what})"


@dataclass(frozen=True)
class Hold:
    """A lease that is held."""

    folder: Path
    number: int
    waited: bool
    """Whether another holder had to be waited for."""

    def check(self) -> None:
        """Call just before anything that lasts.

        Raises:
            LeaseLost: a higher number exists, or the lease is gone.
        """
        highest = _highest(fresh_names(self.folder))
        if highest != self.number:
            told = _claim_of(self.folder, highest)
            by = f"process {told.process.pid} ({told.what}) has taken it over" if told else "its folder is gone"
            raise LeaseLost(
                f"the lease {self.folder.name} of this run has number {self.number} and the latest is {highest}: this run was stopped or "
                f"could not reach the disk for longer than {heartbeat.SILENCE_S:g} s, and {by}; nothing more is written here"
            )


@contextmanager
def lease(
    folder: Path,
    what: str,
    *,
    waiting: Callable[[Holder], None] = lambda holder: None,
    cancelled: threading.Event | None = None,
    listener: Listener | None = None,
    beside: Callable[[], object] = lambda: None,
) -> Iterator[Hold]:
    """Holds a lease for the block.

    Args:
        folder: the lease's.
        what: for whoever waits, e.g. `pedigree run tiny`.
        waiting: called once per holder that is waited for.
        cancelled: ends the wait.
        listener: one that has listened to this lease already (`listen`), while another one was waited for.
        beside: called again and again while waiting, e.g. to listen to what will be waited for next.

    Raises:
        Cancelled: the event was set while waiting.
        NoLease: a file stands where the lease's folder should.
    """
    _make_folder(folder)
    listener, seen, token = listener or Listener(), None, uuid.uuid4().hex
    while True:
        highest = _highest(_names(folder))
        if _is_over(folder, highest, listener):
            if _claim(folder, Holder(highest + 1, Process.here(), time.time(), what, token, str(folder))):
                break
            continue
        other = _claim_of(folder, highest)
        if other is not None and other != seen:
            seen = other
            waiting(other)
        beside()
        pause(cancelled, POLL_S)
    number = highest + 1
    try:
        with Pulse(folder / f"{number:06d}.beat"):
            yield Hold(folder, number, seen is not None)
    finally:
        _HELD.discard(token)
        with suppress(OSError):  # a full disk, or somebody has removed it all: our end is told by the process table, too
            (folder / f"{number:06d}.released").touch()


def holder_of(folder: Path, listener: Listener | None = None) -> Holder | None:
    """The holder of a lease; one elsewhere counts until the listener has heard nothing for long enough, so one look cannot tell."""
    highest = _highest(_names(folder))
    return None if _is_over(folder, highest, listener or Listener()) else _claim_of(folder, highest)


def listen(folder: Path, listener: Listener) -> None:
    """Lets a listener hear whether the holder of a lease, if there is one elsewhere, gives signs of life."""
    listener.silent_s(_sign(folder, _highest(_names(folder))))


def pause(cancelled: threading.Event | None, seconds: float) -> None:
    """Raises Cancelled when that happens meanwhile."""
    if cancelled is None:
        time.sleep(seconds)
    elif cancelled.wait(seconds):
        raise Cancelled("cancelled while waiting")


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        wrong = next(path for path in (folder, *folder.parents) if path.exists() and not path.is_dir())
        raise NoLease(f"{wrong} is a file, and leases are held in folders: remove it and type the command again") from error


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _highest(names: Iterable[str]) -> int:
    return max((int(found[1]) for name in names if (found := _CLAIM.fullmatch(name))), default=0)


def _is_over(folder: Path, number: int, listener: Listener) -> bool:
    """Whether the next number may be claimed."""
    if number == 0 or (folder / f"{number:06d}.released").exists():
        return True
    holder = _claim_of(folder, number)
    if holder is not None and holder.process.is_local:
        return not holder.holds(folder)
    return listener.silent_s(_sign(folder, number)) > heartbeat.SILENCE_S


def _sign(folder: Path, number: int) -> tuple[object, ...]:
    return (number, *heartbeat.sign(folder / f"{number:06d}.beat"))


def _claim(folder: Path, mine: Holder) -> bool:
    """Whether this number became ours. The file appears whole, and the listing after it shows that no higher one was there."""
    target, temporary = folder / f"{mine.number:06d}.json", folder / f".{mine.token}"
    _HELD.add(mine.token)  # before anybody can see the claim
    with temporary.open("w") as stream:
        stream.write(json.dumps(asdict(mine)))
        stream.flush()
        os.fsync(stream.fileno())
    try:
        os.link(temporary, target)
    except FileExistsError:
        if temporary.stat().st_nlink != 2:  # NFS sends a request again whose answer was lost: then the link is ours
            return False
    except OSError:  # no hard links here
        try:
            with target.open("x") as stream:
                stream.write(temporary.read_text())
        except FileExistsError:
            return False
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(folder)
    if _highest(fresh_names(folder)) != mine.number:  # a stale listing had made us believe in a number of long ago
        target.unlink(missing_ok=True)
        return False
    for path in folder.iterdir():
        found = _OURS.fullmatch(path.name)
        if found and int(found[1]) < mine.number - 1:
            _remove(path)
    return True


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except (IsADirectoryError, PermissionError):  # a folder: Linux and POSIX have a word each for it
        shutil.rmtree(path, ignore_errors=True)


class _Told(Frozen):
    """A claim, as it stands in its file."""

    number: int
    process: dict[str, Any]
    since: Annotated[float, Field(ge=0, le=1e11)]
    what: Annotated[str, Field(max_length=1000)]
    token: Line
    folder: Annotated[str, Field(max_length=4096)] | None = None


def _claim_of(folder: Path, number: int) -> Holder | None:
    """Who has claimed a number; None where nobody has."""
    path = folder / f"{number:06d}.json"
    if not path.exists():
        return None
    try:
        told = _Told.model_validate(read_json(path, CLAIM_BYTES))
    except (ArtifactError, ValidationError):
        told = None
    process = Process.told(told.process) if told else None
    if told is None or process is None:
        return Holder(number, _UNKNOWN, 0.0, f"{path.name}, a claim that is damaged or of another version of Pedigree", "")
    return Holder(number, process, told.since, told.what, told.token, told.folder)
