"""Imports of libraries that take seconds, which every job begins with."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


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
