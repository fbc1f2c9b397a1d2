"""Parts of rows through a frozen model: in this process, or in several that each hold a copy of it, on a GPU of their own.

A part's values depend on the part alone, so they have the same bits in any process.
"""

import gc
import multiprocessing
import os
import signal
import time
import traceback
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

import torch

from pedigree.data.host.process import die_with
from pedigree.stages.job.failures import EngineLost
from pedigree.stages.job.job import HEARTBEAT_INTERVAL_S, Job
from pedigree.stages.sampling.answer_log import AnswerLog
from pedigree.stages.sampling.engines import GPUS, gpus_of

AHEAD = 2
"""Parts for each process that are begun before the first of them is yielded."""


RESTING = "rest"
"""What a copy is sent, and replies, in place of rows."""


class Part(NamedTuple):
    """Rows that pass through the model together."""

    keys: list[str]
    """Of their values in the log."""
    rows: Any


class FrozenModel(ABC):
    """A model for inference. Subclasses load it at the first rows, as `_module`."""

    _module: Any

    def __init__(self, job: Job) -> None:
        self._job, self._device = job, torch.device(job.numerics.device)

    def load(self) -> None:
        """Load it before the first rows, and free the device memory until then."""
        _ = self._module
        self.rest()

    @abstractmethod
    def score(self, rows: Any, progress: Callable[[int], None]) -> list[Any]:
        """The values of a part's rows; `progress` is called with the number of finished ones."""

    def rest(self) -> None:
        """Free the device memory until the next rows."""
        self.close()

    def close(self) -> None:
        """Free the device memory: later engines reserve a share of the total, and fail to start if it is not free."""
        vars(self).pop("_module", None)
        gc.collect()  # for modules with reference cycles
        give_back(self._device)


def give_back(device: torch.device) -> None:
    """Release unused memory from torch's cache to the device."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def in_parts(
    open_model: Callable[[Job], FrozenModel], parts: Iterable[Part], job: Job, progress: Callable[[int], None]
) -> Generator[list[Any], None, None]:
    """Yield the values of each part, in order. Finished parts are kept across restarts.

    Args:
        open_model: called in each process; it must be picklable.
        progress: called with the number of finished rows.

    Raises:
        EngineLost: a process died.
    """
    with AnswerLog(job) as log, closing(copies_of(open_model, job)) as copies:
        yield from copies.values(iter(parts), log, progress)


def copies_of(open_model: Callable[[Job], FrozenModel], job: Job) -> "Alone | Copies":
    """Copies of a model, `placement.engines` times `tensor_parallel` of them; a single one is in this process."""
    count = job.placement.engines * job.numerics.tensor_parallel
    return Copies(open_model, job, count) if count > 1 else Alone(open_model(job))


class Alone:
    """A model in this process."""

    def __init__(self, model: FrozenModel) -> None:
        self._model, self.load, self.rest, self.close = model, model.load, model.rest, model.close

    def values(self, parts: Iterable[Part], log: AnswerLog, progress: Callable[[int], None]) -> Iterator[list[Any]]:
        done = 0
        for part in parts:

            def compute(rows: Any = part.rows, done: int = done) -> list[Any]:
                return self._model.score(rows, lambda scored: progress(done + scored))

            yield log.together(part.keys, compute)
            done += len(part.keys)
            progress(done)


class Copies:
    """Processes with a copy of the model each, started when they have a part."""

    def __init__(self, open_model: Callable[[Job], FrozenModel], job: Job, count: int) -> None:
        self._open, self._job, self._count = open_model, job, count
        self._processes: dict[Connection, BaseProcess] = {}
        self._busy: dict[Connection, tuple[int, Part]] = {}

    def values(self, parts: Iterator[Part], log: AnswerLog, progress: Callable[[int], None]) -> Iterator[list[Any]]:
        begun, waiting, scored = deque[Part](), deque[tuple[int, Part]](), list[int]()
        while True:
            while len(begun) < AHEAD * self._count and (part := next(parts, None)):
                begun.append(part)
                known = all(key in log for key in part.keys)
                waiting.extend([] if known else [(len(scored), part)])
                scored.append(len(part.keys) if known else 0)
            if not begun:
                return
            while waiting and len(self._busy) < self._count:
                self._give(waiting.popleft())
            while begun and all(key in log for key in begun[0].keys):
                yield [log[key] for key in begun.popleft().keys]
            for copy in wait([*self._busy]) if self._busy else []:
                assert isinstance(copy, Connection)
                number, part = self._busy[copy]
                match self._read(copy):
                    case {"values": values}:
                        log.keep(dict(zip(part.keys, values, strict=True)))
                        del self._busy[copy]
                        scored[number] = len(part.keys)
                        progress(sum(scored))
                    case {"doing": dict(activity)}:
                        self._job.doing(**activity)
                    case {"step": int(step)}:
                        scored[number] = step
                        progress(sum(scored))

    def _give(self, work: tuple[int, Part]) -> None:
        idle = next((copy for copy in self._processes if copy not in self._busy), None) or self._start()
        self._busy[idle] = work
        idle.send(work[1].rows)

    def _start(self) -> Connection:
        job, context = self._job, multiprocessing.get_context("spawn")  # a forked process can use neither CUDA nor torch's threads
        own = gpus_of(job.numerics.model_copy(update={"tensor_parallel": 1}), len(self._processes))
        ours, theirs = context.Pipe()
        given = (job.folder, job.address, job.key, job.numerics, job.placement, len(self._processes) + 1)
        process = context.Process(target=_serve, args=(theirs, os.getpid(), self._open, given), daemon=True)
        before = os.environ.get(GPUS)
        try:
            os.environ |= {GPUS: ",".join(own)} if own else {}
            process.start()
        finally:
            if own:
                os.environ.pop(GPUS) if before is None else os.environ.update({GPUS: before})
        theirs.close()
        self._processes[ours] = process
        return ours

    def _read(self, copy: Connection) -> Any:
        try:
            message = copy.recv()
        except (EOFError, ConnectionError) as error:
            process = self._processes[copy]
            process.join(timeout=10)
            raise EngineLost(f"lost engine: process {process.pid} of {self._job.address} ended with {process.exitcode}") from error
        if isinstance(message, BaseException):
            raise message
        return message

    def load(self) -> None:
        """Nothing: models are loaded in processes of their own, at their first rows."""

    def rest(self) -> None:
        for copy in self._processes:
            copy.send(RESTING)
        for copy in self._processes:
            while self._read(copy) != RESTING:
                pass

    def close(self) -> None:
        for copy, process in self._processes.items():
            process.kill()
            process.join()
            copy.close()


@dataclass
class _Reporting(Job):
    """A job that reports to the process that started this one."""

    pipe: Connection | None = None

    def _beat(self, report: dict[str, Any], at_once: bool) -> None:
        self._go_on()
        now = time.monotonic()
        if self.pipe and (at_once or now - self._last_beat >= HEARTBEAT_INTERVAL_S):
            self._last_beat = now
            self.pipe.send(report)


def _serve(pipe: Connection, parent: int, open_model: Callable[[Job], FrozenModel], given: tuple[Any, ...]) -> None:
    """Score parts until the parent ends this process."""
    die_with(parent)
    for number in (signal.SIGTERM, signal.SIGUSR1):  # the parent gets them too
        signal.signal(number, signal.SIG_IGN)
    folder, address, key, numerics, placement, rank = given
    job = _Reporting(folder, address, key, numerics, placement, {}, rank=rank, pipe=pipe)
    torch.set_num_threads(numerics.threads)
    try:
        model = open_model(job)
        while True:
            if (rows := pipe.recv()) == RESTING:
                model.rest()
                pipe.send(RESTING)
            else:
                pipe.send({"values": model.score(rows, lambda scored: job.progress(scored, 0))})
    except Exception as error:  # the boundary of the process: the parent raises it
        error.add_note(traceback.format_exc())
        pipe.send(error)
