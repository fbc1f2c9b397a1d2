"""Unit tests start no process and no engine and do not sleep: one that does fails, with the marker that it needs."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

PROCESSES = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec", "os.system"}
ENGINES = {"vllm", "deepspeed"}
REMEDY = "mark it `integration`, or do without"


class NotAUnitTest(BaseException):
    """No `Exception`: the code under test must not swallow it."""


_running: list[list[str]] = []
"""What the unit test that is running has done wrong; empty while none runs."""


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if not _running:
        return
    if event in PROCESSES:
        wrong = f"it starts a process ({event})"
    elif event == "time.sleep":
        wrong = "it sleeps"
    elif event == "import" and arguments[0] in ENGINES:
        wrong = f"it imports {arguments[0]}"
    else:
        return
    _running[-1].append(wrong)
    raise NotAUnitTest(f"{wrong}: {REMEDY}")


@contextmanager
def unit_test() -> Iterator[None]:
    """Also fails where the code under test has swallowed the exception, or another thread got it."""
    _install()
    _running.append([])
    try:
        yield
    finally:
        wrong = _running.pop()
    if wrong:
        raise NotAUnitTest(f"{'; '.join(dict.fromkeys(wrong))}: {REMEDY}")


@cache
def _install() -> None:
    """Once: Python has no way to take an audit hook away."""
    sys.addaudithook(_audit)
