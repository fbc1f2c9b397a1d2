"""The start and the end of processes: of a job's, which take seconds where Python does as it always does, and of its helpers'."""

import atexit
import ctypes
import gc
import os
import signal
import sys
import threading
from contextlib import AbstractContextManager
from typing import NoReturn

SET_PARENT_DEATH_SIGNAL = 1
"""`PR_SET_PDEATHSIG` of `prctl(2)`."""


def die_with(parent: int) -> None:
    """Makes Linux kill this process when the *thread* that has started it ends, however it ends; ends it if `parent` is gone already."""
    ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


class _Uncollected:
    """Switches the collector off when the first enters, of whatever thread, and on again, if it was, when the last one leaves."""

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
    """A block without the garbage collector: of imports, or of parsing.

    What an import makes stays as long as the process; looking for garbage in it is a sixth of its time. While Python 3.11 parses, the
    collector may run finalizers and so let another thread in, and two that parse at once end in a SystemError: the depth of recursion is
    counted for all threads together (gh-106905).
    """
    return _UNCOLLECTED


def leave(code: int) -> NoReturn:
    """Ends this process: exit handlers run, and what was printed is written.

    Threads are not waited for, and modules not taken apart, which takes a second with torch among them.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    ctypes.CDLL(None).fflush(None)  # what libraries in C have printed
    os._exit(code)
