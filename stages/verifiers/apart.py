"""Questions to a process apart, with a limit to their time and memory.

The process is started by the first question and answers all of them in turn; one that exceeds a limit is killed, and the next question
starts another. A limit of Python's own (`signal.alarm`) works in main threads only, and not inside C.

The kernel ends the process with the *thread* that started it (`PR_SET_PDEATHSIG`), so that a thread of its own does, which lives as long
as this process; those that ask may come and go.
"""

import atexit
import contextlib
import importlib
import multiprocessing
import resource
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from threading import Lock
from typing import Any

from configs.base.problems import PedigreeError
from data.host.process import die_with

MEMORY_BYTES = 4 * 2**30
START_SECONDS = 60.0
"""For the imports of the first question."""


class Unanswered(PedigreeError):
    """A question exceeded its limit of time or memory, raised an exception, or its process ended over it."""


class _Process:
    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_answer, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()
        self.known: set[str] = set()

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


_lock = Lock()
_running: list[_Process] = []
_starter = ThreadPoolExecutor(1, "apart")


def ask(function: str, arguments: tuple[Any, ...], seconds: float) -> Any:
    """What a function answers, given as `MODULE:NAME`.

    Raises:
        Unanswered: it took longer, too much memory, it raised an exception, or its process ended over it.
    """
    with _lock:
        if _running and not _running[0].process.is_alive():  # between questions, which says nothing about this one
            end()
        if not _running:
            _running.append(_starter.submit(_Process).result())
        process = _running[0]
        try:
            if function not in process.known:
                _reply(process, (function, None), START_SECONDS)
                process.known.add(function)
            return _reply(process, (function, arguments), seconds)
        except Unanswered:
            end()
            raise


def _reply(process: _Process, question: tuple[str, tuple[Any, ...] | None], seconds: float) -> Any:
    try:
        process.pipe.send(question)
        if not process.pipe.poll(seconds):
            raise Unanswered(f"no answer within {seconds:g} s")
        answer, problem = process.pipe.recv()
    except (EOFError, OSError) as error:
        raise Unanswered("its process ended") from error
    if problem is not None:
        raise Unanswered(problem)
    return answer


def end() -> None:
    """Ends the process, where there is one."""
    while _running:
        _running.pop().end()


atexit.register(end)


def _answer(pipe: Connection) -> None:
    """In the process: answers until nobody asks any more. A question without arguments only imports what it needs."""
    asker = multiprocessing.parent_process()
    assert asker is not None and asker.pid is not None
    die_with(asker.pid)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            function, arguments = pipe.recv()
            module, _, name = function.partition(":")
            try:
                known = getattr(importlib.import_module(module), name)
                pipe.send((None if arguments is None else known(*arguments), None))
            except Exception as error:  # whatever it is, whoever asked is to hear it
                pipe.send((None, f"{type(error).__name__}: {error}"[:300]))
