"""Unit tests start no process and no engine and do not sleep: one that does fails, with the marker that it needs."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

PROCESSES = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec", "os.system"}
ENGINES = {"vllm", "deepspeed"}
REMEDY = "mark it `integration`, or do without"


class NotAUnitTest(BaseException):
    """Not an `Exception`, which the code under test might swallow."""


_running: list[list[str]] = []
"""What the unit test that is running has done wrong; empty while none runs."""


def _forbid(what: str) -> None:
    if _running:
        _running[-1].append(what)
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
    _running.append([])
    try:
        yield
    finally:
        wrong = _running.pop()
    if wrong:
        raise NotAUnitTest(f"{'; '.join(dict.fromkeys(wrong))}: {REMEDY}")
