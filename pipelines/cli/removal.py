"""Safe removal of project folders that a concurrent run might use, and folder ages."""

import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from pedigree.configs.base.problems import UsageProblem
from pedigree.configs.base.project import Project
from pedigree.data.store import heartbeat
from pedigree.pipelines.cli.console import echo
from pedigree.pipelines.jobs.lease import LeaseHolder, lease
from pedigree.pipelines.jobs.live import Signs, live_jobs


def listened(project: Project, leases: Iterable[str]) -> Signs:
    """Wait until the liveness of every job and lease holder on other machines is known: a heartbeat arrived or timed out."""
    signs, names = Signs(project), list(leases)

    def look() -> None:
        live_jobs(project, signs)
        for name in names:
            signs.holder(name)

    signs.listen(look, waiting=print_waiting)
    return signs


def print_waiting() -> None:
    echo(f"waiting up to {heartbeat.SILENCE_S:g} s for heartbeats from other machines", flush=True)


def remove(signs: Signs, folder: Path, leases: Iterable[str], command: str, check: Callable[[], None] = lambda: None) -> None:
    """Remove a folder that no other process uses. It is renamed away first, so an interruption never leaves a partial folder in place.

    `leases` are those that a run takes before it uses the folder; processes that wait for one see `command`. `check`, called with the
    leases held, raises if the folder must not be removed.
    """
    aside = signs.project.private / "removed" / uuid.uuid4().hex
    aside.parent.mkdir(parents=True, exist_ok=True)
    with exclusive_leases(signs, leases, command, folder.name):
        check()
        os.rename(folder, aside)
    shutil.rmtree(aside.parent, ignore_errors=True)  # also removes leftovers of earlier, interrupted removals


@contextmanager
def exclusive_leases(signs: Signs, leases: Iterable[str], command: str, what: str) -> Iterator[None]:
    """Hold leases without waiting for them; UsageProblem if another process holds one."""

    def refuse(holder: LeaseHolder) -> None:
        raise UsageProblem(f"{what} is in use, {holder}; wait until that process ends, or end it, and retry")

    with ExitStack() as stack:
        for name in leases:
            folder = signs.project.lease(name)
            stack.enter_context(lease(folder, command, waiting=refuse, listener=signs.listener(folder)))
        yield


def disk_time(folder: Path) -> float:
    """Return the current time on the clock that sets a folder's mtimes, which on a network disk is the file server's."""
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            return os.fstat(probe.fileno()).st_mtime
    except OSError:  # full, or not writable
        return time.time()
