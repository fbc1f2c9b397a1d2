"""Call functions in separate processes, with limits on time and memory.

A call takes an idle process, or starts one; calls of several threads run in parallel, in at most as many processes as this one has
processors. If a call exceeds a limit, its process is killed. Python's own limit (`signal.alarm`) works only in the main thread, and not
inside C.

The kernel ends a process with the *thread* that started it (`PR_SET_PDEATHSIG`), so a dedicated thread starts them, which lives as long as
this process, while calling threads may come and go.
"""

import atexit
import importlib
import os
import resource
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from threading import Semaphore
from typing import Any

from pedigree.configs.base.problems import PedigreeError
from pedigree.data.host.process import die_with

MEMORY_BYTES = 4 * 2**30
START_SECONDS = 60.0
"""Time limit for the imports of the first call."""


class _Process:
    def __init__(self) -> None:
        self.pipe, theirs = Pipe()
        with theirs:
            command = [sys.executable, "-c", f"from {__name__} import answer; answer({theirs.fileno()}, {os.getpid()})"]
            path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, env={**os.environ, **path}, pass_fds=[theirs.fileno()])
        self.known: set[str] = set()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.pipe.close()


_places = Semaphore(len(os.sched_getaffinity(0)))
_idle: list[_Process] = []
_starter = ThreadPoolExecutor(1, "apart")


def ask(function: str, arguments: tuple[Any, ...], seconds: float) -> Any:
    """Call a function, given as `MODULE:NAME`.

    Raises:
        PedigreeError: it exceeded a limit, raised an exception, or ended its process.
    """
    with _places:
        process = _taken()
        try:
            if function not in process.known:
                _reply(process, (function, None), START_SECONDS)
                process.known.add(function)
            found = _reply(process, (function, arguments), seconds)
        except BaseException:
            process.end()
            raise
        _idle.append(process)
        return found


def _taken() -> _Process:
    """An idle process, or another one."""
    with suppress(IndexError):
        while True:
            process = _idle.pop()
            if process.process.poll() is None:
                return process
            process.end()  # it ended between calls, so this call is not the cause
    return _starter.submit(_Process).result()


def _reply(process: _Process, question: tuple[str, tuple[Any, ...] | None], seconds: float) -> Any:
    try:
        process.pipe.send(question)
        if not process.pipe.poll(seconds):
            raise PedigreeError(f"no answer within {seconds:g} s")
        answer, problem = process.pipe.recv()
    except (EOFError, OSError) as error:
        raise PedigreeError("its process ended") from error
    if problem is not None:
        raise PedigreeError(problem)
    return answer


def end() -> None:
    """End all idle processes."""
    with suppress(IndexError):
        while True:
            _idle.pop().end()


atexit.register(end)


def answer(descriptor: int, asker: int) -> None:
    """Main loop of the process: handle calls until the pipe closes. A call without arguments only imports the function."""
    die_with(asker)
    pipe: Connection[Any, Any] = Connection(descriptor)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    with suppress(EOFError, KeyboardInterrupt):
        while True:
            function, arguments = pipe.recv()
            module, _, name = function.partition(":")
            try:
                known = getattr(importlib.import_module(module), name)
                pipe.send((None if arguments is None else known(*arguments), None))
            except Exception as error:  # the boundary of the process: reported to the caller
                pipe.send((None, f"{type(error).__name__}: {error}"[:300]))
