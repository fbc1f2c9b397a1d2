"""Unit tests start no process and no engine and do not sleep: one that does fails, with the marker that it needs."""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

PROCESSES = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec", "os.system"}
ENGINES = {"vllm", "deepspeed"}
REMEDY = "mark it `integration`, or do without"


class NotAUnitTest(BaseException):
    """Not an `Exception`, which the code under test might swallow."""


@dataclass
class Running:
    """A unit test."""

    bystanders: set[int]
    """Threads that earlier tests have left."""
    wrong: list[str] = field(default_factory=list)


_running: list[Running] = []
"""Empty while no unit test runs."""


def _forbid(what: str) -> None:
    if _running and threading.get_ident() not in _running[-1].bystanders:
        _running[-1].wrong.append(what)
        raise NotAUnitTest(f"{what}: {REMEDY}")


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if event in PROCESSES:
        _forbid(f"it starts a process ({event})")
    elif event == "import" and arguments[0] in ENGINES:
        _forbid(f"it imports {arguments[0]}")


@cache
def _install() -> None:
    """Once and for good: an audit hook cannot be removed, and a test may have replaced `time.sleep` for longer than the guard is on.
    Sleeping is no audit event before Python 3.13."""
    sys.addaudithook(_audit)
    sleep = time.sleep

    def guarded_sleep(seconds: float) -> None:
        _forbid("it sleeps")
        sleep(seconds)

    time.sleep = guarded_sleep


@contextmanager
def unit_test() -> Iterator[None]:
    """Also fails where the exception was swallowed, or ended another thread."""
    _install()
    _running.append(Running({thread.ident for thread in threading.enumerate() if thread.ident} - {threading.get_ident()}))
    try:
        yield
    finally:
        wrong = _running.pop().wrong
    if wrong:
        raise NotAUnitTest(f"{'; '.join(dict.fromkeys(wrong))}: {REMEDY}")
