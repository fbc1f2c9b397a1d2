"""Removing a folder of a project that a run might want at the same moment, and telling how old one is."""

import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from configs.base.problems import UsageProblem
from configs.base.project import Project
from data.store import heartbeat
from pipelines.cli.console import say
from pipelines.jobs.lease import Holder, lease
from pipelines.jobs.live import live_jobs
from pipelines.jobs.liveness import Signs


def listened(project: Project, leases: Iterable[str]) -> Signs:
    """Listens until each job, and each holder of these leases, that may live on another machine was heard or has been silent."""
    signs, names = Signs(project), list(leases)

    def look() -> None:
        live_jobs(project, signs)
        for name in names:
            signs.holder(name)

    signs.listen(look, waiting=say_listening)
    return signs


def say_listening() -> None:
    say(f"listening to other machines, for up to {heartbeat.SILENCE_S:g} s: what lives there gives signs of life", flush=True)


def remove(signs: Signs, folder: Path, leases: Iterable[str], command: str, check: Callable[[], None] = lambda: None) -> None:
    """Removes a folder: out of the way first, at once, so that a kill leaves no half of it where somebody looks.

    Args:
        signs: of the project that it belongs to (`listened`).
        folder: what to remove.
        leases: names of the leases that a run would take before it used the folder.
        command: who removes it, for whoever waits for a lease.
        check: raises where it must stay after all; called with the leases held.

    Raises:
        UsageProblem: a lease is held by somebody else.
    """
    aside = signs.project.private / "removed" / uuid.uuid4().hex
    aside.parent.mkdir(parents=True, exist_ok=True)
    with alone(signs, leases, command, folder.name):
        check()
        os.rename(folder, aside)
    shutil.rmtree(aside.parent, ignore_errors=True)  # with what an earlier removal may have left


@contextmanager
def alone(signs: Signs, leases: Iterable[str], command: str, what: str) -> Iterator[None]:
    """Holds leases, waiting for none of them.

    Raises:
        UsageProblem: one is held by somebody else.
    """

    def refuse(holder: Holder) -> None:
        raise UsageProblem(f"{what} is in use, {holder}: wait until that has ended, or end it, then type this again")

    with ExitStack() as stack:
        for name in leases:
            folder = signs.project.lease(name)
            stack.enter_context(lease(folder, command, waiting=refuse, listener=signs.listener(folder)))
        yield


def disk_time(folder: Path) -> float:
    """What time it is by the clock that dates a folder's files, which is a file server's on a network disk: to tell their ages by."""
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            return os.fstat(probe.fileno()).st_mtime
    except OSError:  # full, or not writable
        return time.time()
