"""Call functions in a separate process, with limits on time and memory.

The first call starts the process, which handles all calls in turn. If a call exceeds a limit, the process is killed, and the next call
starts another. Python's own limit (`signal.alarm`) works only in the main thread, and not inside C.

The kernel ends the process with the *thread* that started it (`PR_SET_PDEATHSIG`), so a dedicated thread starts it, which lives as long as
this process, while calling threads may come and go.
"""

import atexit
import contextlib
import importlib
import os
import resource
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection, Pipe
from threading import Lock
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


_lock = Lock()
_running: list[_Process] = []
_starter = ThreadPoolExecutor(1, "apart")


def ask(function: str, arguments: tuple[Any, ...], seconds: float) -> Any:
    """Call a function, given as `MODULE:NAME`.

    Raises:
        PedigreeError: it exceeded a limit, raised an exception, or ended its process.
    """
    with _lock:
        if _running and _running[0].process.poll() is not None:  # it ended between calls, so this call is not the cause
            end()
        if not _running:
            _running.append(_starter.submit(_Process).result())
        process = _running[0]
        try:
            if function not in process.known:
                _reply(process, (function, None), START_SECONDS)
                process.known.add(function)
            return _reply(process, (function, arguments), seconds)
        except PedigreeError:
            end()
            raise


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
    """End the process, if any."""
    while _running:
        _running.pop().end()


atexit.register(end)


def answer(descriptor: int, asker: int) -> None:
    """Main loop of the process: handle calls until the pipe closes. A call without arguments only imports the function."""
    die_with(asker)
    pipe: Connection[Any, Any] = Connection(descriptor)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            function, arguments = pipe.recv()
            module, _, name = function.partition(":")
            try:
                known = getattr(importlib.import_module(module), name)
                pipe.send((None if arguments is None else known(*arguments), None))
            except Exception as error:  # the boundary of the process: reported to the caller
                pipe.send((None, f"{type(error).__name__}: {error}"[:300]))
