"""Leases: one writer per stage, on any number of machines that share a file system.

A lease is a folder of numbered claims (`data/store/claims.py`). A holder that lost its lease without noticing detects it by number
(`HeldLease.check`).

    000007.json       the claim: process, start time, purpose
    000007.beat       its heartbeat (`data/store/heartbeat.py`)
    000007.released   marks its release
    fence-000007-0001 fencing token of a submission under it (`data/store/fence.py`)

For a local holder, the process table shows whether it is alive; for one elsewhere (another machine, a container, an earlier boot), only
its heartbeat does. A claim in an unknown format counts as held elsewhere. Clocks of different machines are never compared.
"""

import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from pedigree.configs.base.frozen import Frozen
from pedigree.configs.base.problems import PedigreeError
from pedigree.data.store import heartbeat
from pedigree.data.store.claims import Claims, Folder
from pedigree.data.store.heartbeat import Listener, Pulse
from pedigree.data.store.untrusted import Line, read_as
from pedigree.pipelines.jobs.processes import Process, is_seen_at

POLL_S = 0.2
CLAIM_BYTES = 64 << 10
_UNKNOWN = Process(pid=1, started=0, machine="unknown")
"""Process of an unreadable claim."""
_HELD: set[str] = set()
"""Tokens of leases held by this process, so that releasing one does not depend on a disk that accepts the marker."""


class Cancelled(Exception):
    """The run was canceled while it waited."""


class LeaseLost(PedigreeError):
    """Another runner has taken over this lease: nothing more may be written."""


class LeaseHolder(Frozen):
    """Who holds a lease, since when, and for what purpose: the content of a claim."""

    number: int
    process: Process
    since: Annotated[float, Field(ge=0, le=1e11)]
    """For display: by the holder's clock."""
    what: Annotated[str, Field(max_length=1000)]
    token: Line
    folder: Annotated[str, Field(max_length=4096)] | None = None
    """Path of the lease folder as the holder sees it."""

    def holds(self, folder: Path) -> bool:
        """Whether a local holder is alive and holds this lease, not a copy of it: projects may be copied with their leases."""
        if self.folder is not None and is_seen_at(self.process.pid, self.folder, folder) is False:
            return False
        return self.token in _HELD if self.process == Process.here() else self.process.alive

    def __str__(self) -> str:
        expiry = f"; taken over after {heartbeat.SILENCE_S:g} s without a heartbeat"
        if self.process == _UNKNOWN:
            return f"held by {self.what}{expiry}"
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        if self.process.is_local:
            return f"held by process {self.process.pid} since {since} ({self.what})"
        return f"held by process {self.process.pid} on another machine or before a reboot since {since} ({self.what}){expiry}"


@dataclass(frozen=True)
class HeldLease:
    """A held lease."""

    folder: Path
    number: int
    waited: bool
    """Whether another holder had to be waited for."""

    def check(self) -> None:
        """Call right before any lasting change.

        Raises:
            LeaseLost: a higher number exists, or the lease is gone.
        """
        highest = _claims(self.folder).highest()
        if highest != self.number:
            holder = _claim_of(self.folder, highest)
            by = f"process {holder.process.pid} ({holder.what}) has taken it over" if holder else "its folder is gone"
            raise LeaseLost(
                f"lease {self.folder.name} of this run has number {self.number}, but the latest is {highest}: this run was suspended or "
                f"could not reach the disk for more than {heartbeat.SILENCE_S:g} s, and {by}; it writes nothing more"
            )


@contextmanager
def lease(
    folder: Path,
    what: str,
    *,
    waiting: Callable[[LeaseHolder], None] = lambda holder: None,
    cancelled: threading.Event | None = None,
    listener: Listener | None = None,
    beside: Callable[[], object] = lambda: None,
) -> Iterator[HeldLease]:
    """Hold a lease for the block.

    Args:
        folder: the lease's folder.
        what: purpose shown to others that wait, e.g. `pedigree run tiny`.
        waiting: called once per holder that is waited for.
        cancelled: ends the wait.
        listener: has already followed this lease's heartbeat (`listen`) while another lease was waited for.
        beside: called repeatedly while waiting, e.g. to follow the heartbeat of what will be waited for next.

    Raises:
        Cancelled: the event was set while waiting.
        PedigreeError: a file exists where the lease's folder should be.
    """
    _make_folder(folder)
    claims, listener, seen, token = _claims(folder), listener or Listener(), None, uuid.uuid4().hex
    while True:
        highest, is_held = claims.top()
        if not is_held or _is_gone(folder, highest, listener):
            number = highest + 1
            _HELD.add(token)  # before the claim becomes visible
            process = Process.here()
            mine = LeaseHolder(number=number, process=process, since=time.time(), what=what[:1000], token=token, folder=str(folder))
            if claims.take(number, mine.model_dump_json().encode()):
                break
            continue
        other = _claim_of(folder, highest)
        if other is not None and other != seen:
            seen = other
            waiting(other)
        beside()
        pause(cancelled, POLL_S)
    try:
        with Pulse(folder / f"{number:06d}.beat"):
            yield HeldLease(folder, number, seen is not None)
    finally:
        _HELD.discard(token)
        with suppress(OSError):  # a full disk or a deleted folder: the process table shows our end as well
            claims.release(number)


def holder_of(folder: Path, listener: Listener | None = None) -> LeaseHolder | None:
    """The holder of a lease. One elsewhere counts until the listener has timed out, which a single look cannot decide."""
    number, is_held = _claims(folder).top()
    return _claim_of(folder, number) if is_held and not _is_gone(folder, number, listener or Listener()) else None


def listen(folder: Path, listener: Listener) -> None:
    """Let a listener check the heartbeat of a lease's holder, if it is elsewhere."""
    listener.silent_s(_sign(folder, _claims(folder).top()[0]))


def pause(cancelled: threading.Event | None, seconds: float) -> None:
    """Sleep; raise Cancelled if the event is set in the meantime."""
    if cancelled is None:
        time.sleep(seconds)
    elif cancelled.wait(seconds):
        raise Cancelled("canceled while waiting")


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        wrong = next(path for path in (folder, *folder.parents) if path.exists() and not path.is_dir())
        raise PedigreeError(f"{wrong} is a file, but leases need a folder there; remove it and run the command again") from error


def _claims(folder: Path) -> Claims:
    return Claims(Folder(folder))


def _is_gone(folder: Path, number: int, listener: Listener) -> bool:
    """Whether the holder that claimed a number is no longer alive."""
    holder = _claim_of(folder, number)
    if holder is not None and holder.process.is_local:
        return not holder.holds(folder)
    return listener.silent_s(_sign(folder, number)) > heartbeat.SILENCE_S


def _sign(folder: Path, number: int) -> tuple[object, ...]:
    return (number, *heartbeat.sign(folder / f"{number:06d}.beat"))


def _claim_of(folder: Path, number: int) -> LeaseHolder | None:
    """The holder that claimed a number; None if unclaimed."""
    path = folder / f"{number:06d}.json"
    if not path.exists():
        return None
    what = f"{path.name}, a claim that is damaged or from another version of Pedigree"
    unknown = LeaseHolder(number=number, process=_UNKNOWN, since=0.0, what=what, token="")
    return read_as(LeaseHolder.model_validate, path, CLAIM_BYTES) or unknown
