"""Engines and their processes, each with its own GPUs: opened one by one or several of one model, and started ahead of time."""

import os
import subprocess
import sys
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from itertools import groupby
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any, Literal, TypeVar, cast

from pedigree.configs.language.execution import Numerics
from pedigree.configs.methods.training import Sampling
from pedigree.stages.job.failures import StageError
from pedigree.stages.sampling.sampler import Arrived, Beat, Child, Continuation, Generation, Request, Sampler, WeightPart, engine_settings
from pedigree.stages.sampling.vllm_engine import ALLOCATOR, Inline, allocator

GPUS = "CUDA_VISIBLE_DEVICES"
T = TypeVar("T")


class WarmEngines:
    """Pool of engine processes that import vLLM before they are needed: enough for all parallel engines while requests are prepared, and
    each further expected one while the previous ones work. A context manager that kills unused processes at its end.

    Each parallel engine sees only its own GPUs.
    """

    def __init__(self, numerics: Numerics, engines: int = 1, ranks: int = 0) -> None:
        """
        Args:
            ranks: of the job's trainer, which have its first GPUs.

        Raises:
            StageError: the job sees too few GPUs.
        """
        self._numerics = numerics
        self._gpus = [gpus_of(numerics, engine, ranks) if engines > 1 or ranks else None for engine in range(engines)]
        self._waiting: deque[subprocess.Popen[bytes]] = deque()
        self._started = 0
        self._expected = engines
        self._start()

    def __enter__(self) -> "WarmEngines":
        return self

    def __exit__(self, *exception: object) -> None:
        for process in self._waiting:
            process.kill()
            process.communicate()
        self._waiting.clear()

    def expect(self, engines: int) -> None:
        """Set the maximum number of engines still to be opened."""
        self._expected = engines

    def take(self) -> "subprocess.Popen[bytes]":
        """Take the oldest waiting process; start another one if more engines are expected."""
        self._start(at_least=1)
        process = self._waiting.popleft()
        self._expected -= 1
        self._start()
        return process

    def _start(self, at_least: int = 0) -> None:
        while len(self._waiting) < max(at_least, min(len(self._gpus), self._expected)):
            self._waiting.append(start(self._numerics, self._gpus[self._started % len(self._gpus)]))
            self._started += 1


@contextmanager
def open_engines(settings: dict[str, Any], count: int, ahead: WarmEngines) -> Iterator[list[Child]]:
    """Open engines with equal settings (`stages.sampling.sampler.engine_settings`) for a `with` block."""
    with ExitStack() as opened:
        yield [opened.enter_context(closing(Child(settings, ahead.take()))) for _ in range(count)]


@contextmanager
def open_sampler(model_folder: Path, *, inline: bool, **settings: Any) -> Iterator[Sampler]:
    """Open an engine for a `with` block, in this process (`inline`) or in a child, which starts in the background and dies with the caller.

    Raises:
        StageError: vLLM is not installed or cannot serve the model.
    """
    given = engine_settings(model_folder, **settings)
    with closing(Inline(given) if inline else Child(given, start(settings["numerics"]))) as sampler:
        yield sampler


def side_by_side(engines: Sequence[Child], work: Callable[[int, Child, Callable[[T], None]], None]) -> Iterator[T]:
    """Run `work` in a thread per engine, with its number, the engine, and a function that reports; yield all reports here.

    If an engine fails, or the iterator is closed, all engines are ended; after an engine's failure, the other reports are still yielded.

    Raises:
        Exception: the error of the first engine that failed.
    """
    reports: SimpleQueue[T | BaseException | None] = SimpleQueue()

    def run(number: int, engine: Child) -> None:
        try:
            work(number, engine, reports.put)
        except BaseException as error:  # the boundary of the thread: raised again by the caller
            reports.put(error)
        else:
            reports.put(None)

    threads = [Thread(target=run, args=one, daemon=True, name="engine") for one in enumerate(engines)]
    for thread in threads:
        thread.start()
    at_work, failure = len(threads), None
    try:
        while at_work:
            report = reports.get()
            if report is not None and not isinstance(report, BaseException):
                yield report
                continue
            at_work -= 1
            if report is not None and failure is None:
                failure = report
                for engine in engines:
                    engine.abandon()
        if failure is not None:
            raise failure
    finally:  # also if the caller fails
        for engine in engines if at_work else ():
            engine.abandon()
        for thread in threads:
            thread.join()


class Fleet:
    """Engines with equal weights, which share the requests of a call."""

    def __init__(self, engines: Sequence[Sampler]) -> None:
        self._engines = engines
        self._worked = [0.0] * len(engines)
        self._since: list[float | None] = [None] * len(engines)

    def busy_share(self) -> Callable[[], float]:
        """Begin to measure: gives the share of the time since then in which the engines had requests."""
        began, before = time.monotonic(), self._busy_s()
        return lambda: (self._busy_s() - before) / (len(self._engines) * (time.monotonic() - began))

    def _busy_s(self) -> float:
        now = time.monotonic()
        return sum(self._worked) + sum(now - since for since in self._since if since is not None)

    def answer(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        stop_ids: Sequence[int],
        arrived: Arrived,
        beat: Beat,
        chunk_size: int | None,
    ) -> None:
        """Answer requests; arguments as for `Sampler.stream`. `arrived` and `beat` are called in this thread.

        Args:
            chunk_size: requests of a call of an engine; chunks go to the engines in turn, and their bits are the same on any. None: an
                engine gets all of its requests together, those with the same prompt next to each other.
        """
        count, everything = len(self._engines), range(len(requests))
        if chunk_size is None:
            queues = [[share] if share else [] for share in dealt(everything, requests, count)]
        else:
            chunks = [everything[start : start + chunk_size] for start in range(0, len(requests), chunk_size)]
            queues = [chunks[engine::count] for engine in range(count)]

        def work(number: int, engine: Sampler, report: Callable[[Callable[[], None]], None]) -> None:
            for places in queues[number]:

                def found(place: int, answer: Generation, places: Sequence[int] = places) -> None:
                    report(partial(arrived, places[place], answer))

                own = [requests[place] for place in places]
                self._since[number] = began = time.monotonic()
                try:
                    engine.stream(own, sampling, stop_ids, found, lambda count: report(partial(beat, count)), chunk=chunk_size is not None)
                finally:
                    self._since[number] = None
                    self._worked[number] += time.monotonic() - began

        self._each(work)

    def abandon(self) -> None:
        """End the engines immediately, if they have processes; their open requests fail."""
        for engine in self._engines:
            if isinstance(engine, Child):
                engine.abandon()

    def ready(self) -> None:
        self._each(lambda _, engine, report: engine.ready())

    def sleep(self, level: Literal[1, 2]) -> None:
        self._each(lambda _, engine, report: engine.sleep(level))

    def wake(self) -> None:
        self._each(lambda _, engine, report: engine.wake())

    def update(self, part: WeightPart) -> None:
        self._each(lambda _, engine, report: engine.update(part))

    def load_adapters(self, folder: Path) -> None:
        self._each(lambda _, engine, report: engine.load_adapters(folder))

    def _each(self, work: Callable[[int, Any, Callable[[Callable[[], None]], None]], None]) -> None:
        """Let all engines work in parallel; what they report is called in this thread."""
        if len(self._engines) == 1:
            work(0, self._engines[0], lambda act: act())
            return
        for act in side_by_side(cast(Sequence[Child], self._engines), work):
            act()


def dealt(places: Iterable[int], requests: Sequence[Request | Continuation], engines: int) -> "list[array[int]]":
    """For each engine the places of its requests. Those with the same prompt that are next to each other go to one engine, which computes
    the prompt once. The assignment is static: assigning requests to idle engines would change the batches from run to run.
    """
    shares = [array("q") for _ in range(engines)]
    for number, (_, alike) in enumerate(groupby(places, key=lambda place: requests[place].prompt_ids)):
        shares[number % engines].extend(alike)
    return shares


def gpus_of(numerics: Numerics, engine: int, ranks: int = 0) -> list[str] | None:
    """Names of an engine's own GPUs among those of the job, after those of the trainer's `ranks`; None on a CPU.

    Raises:
        StageError: the job sees too few GPUs.
    """
    if numerics.device == "cpu":
        return None
    end = ranks + (engine + 1) * numerics.tensor_parallel
    visible = [name for name in os.environ.get(GPUS, "").split(",") if name]
    if GPUS in os.environ and len(visible) < end:
        raise StageError(
            f"engine {engine + 1} needs GPU {end} of the job, which has {len(visible)}: raise placement.slots, or lower engines"
        )
    return (visible or [str(number) for number in range(end)])[end - numerics.tensor_parallel : end]


def start(numerics: Numerics, gpus: list[str] | None = None) -> "subprocess.Popen[bytes]":
    """Start a process that becomes an engine when it receives its settings. Its environment lacks the variables of torchrun and DeepSpeed,
    whose process group vLLM would try to join, and expandable segments, with which vLLM's all-reduce ends a worker (vllm issue 42609)."""
    ranks = ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE")
    prefixes = ("MASTER_", "TORCHELASTIC_", "TORCH_NCCL_", "DS_")
    kept = {name: value for name, value in os.environ.items() if name not in ranks and not name.startswith(prefixes)}
    if (settings := allocator(expandable=False)) is not None:
        kept = {name: value for name, value in kept.items() if name not in ALLOCATOR} | {ALLOCATOR[0]: settings}
    quiet = {"PYTHONWARNINGS": "ignore", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    threads = {"OMP_NUM_THREADS": str(numerics.threads)} if numerics.device == "cpu" else {}
    return subprocess.Popen(
        [sys.executable, "-m", "pedigree.stages.sampling.vllm_engine", str(os.getpid()), numerics.model_dump_json()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=kept | quiet | threads | ({GPUS: ",".join(gpus)} if gpus else {}),
        cwd=Path(__file__).parents[3],
    )
