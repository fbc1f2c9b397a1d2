"""The start and the end of processes: of a job's, which take seconds where Python does as it always does, and of its helpers'."""

import atexit
import ctypes
import gc
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

SET_PARENT_DEATH_SIGNAL = 1
"""`PR_SET_PDEATHSIG` of `prctl(2)`."""


def die_with(parent: int) -> None:
    """Makes Linux kill this process when the *thread* that has started it ends, however it ends; ends it if `parent` is gone already."""
    ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


@contextmanager
def uncollected() -> Iterator[None]:
    """A block of imports without the garbage collector, which would look through all that is loaded again and again.

    What an import makes stays as long as the process; looking for garbage in it is a sixth of its time.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def leave(code: int) -> NoReturn:
    """Ends this process: exit handlers run, and what was printed is written.

    Threads are not waited for, and modules not taken apart, which takes a second with torch among them.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    ctypes.CDLL(None).fflush(None)  # what libraries in C have printed
    os._exit(code)
