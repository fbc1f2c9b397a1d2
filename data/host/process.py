"""Faster start and exit of job processes, their peak memory, and child processes that die with their parent."""

import atexit
import ctypes
import gc
import os
import resource
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import NoReturn

SET_PARENT_DEATH_SIGNAL = 1
"""`PR_SET_PDEATHSIG` of `prctl(2)`."""


def die_with(parent: int) -> None:
    """Have Linux kill this process when the *thread* that started it ends; exit if `parent` is already gone."""
    ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


class _Uncollected:
    """Disables the collector while any thread is inside; afterwards re-enables it if it was enabled."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._was = False

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._was = gc.isenabled()
                gc.disable()
            self._inside += 1

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside and self._was:
                gc.enable()


_UNCOLLECTED = _Uncollected()


def uncollected() -> AbstractContextManager[None]:
    """Disable the garbage collector for a block of imports or parsing.

    Imported objects are permanent, and scanning them takes a sixth of the import time. In Python 3.11, finalizers that run during parsing
    may switch threads, and two threads that parse at the same time raise SystemError, because they share a recursion counter (gh-106905).
    """
    return _UNCOLLECTED


@contextmanager
def without(*modules: str) -> Iterator[None]:
    """Let imports in this block find these modules missing; those that are loaded already stay. For a process of one thread."""
    missing = [name for name in modules if name not in sys.modules]
    sys.modules.update(dict.fromkeys(missing))  # type: ignore[arg-type]  # None is what the import system takes for missing
    try:
        yield
    finally:
        for name in missing:
            del sys.modules[name]


def peak_memory() -> dict[str, int]:
    """Peak bytes of this process so far: `host` resident, `gpu` allocated by torch, `child` of the largest child waited for. Zeros are
    omitted."""
    found = {"host": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}
    found["child"] = 1024 * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        found["gpu"] = torch.cuda.max_memory_allocated()
    return {name: count for name, count in found.items() if count}


def leave(code: int) -> NoReturn:
    """Exit this process after running exit handlers and flushing output.

    Skips joining threads and tearing down modules, which takes a second with torch.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    ctypes.CDLL(None).fflush(None)  # output of C libraries
    os._exit(code)
