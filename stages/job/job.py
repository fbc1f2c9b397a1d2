"""A running stage: its interface to the outside, and what it reports.

A job works in a scratch folder named after the stage's key:

    spec.json       the job's specification, written by the orchestrator before the start
    progress.json   progress: step, total, current metrics, current activity
    pulses/RANK     heartbeat of each process; see data/store/heartbeat.py
    curve.jsonl     one line per logged step; survives a resume without gaps or repeats
    tokens.json     the file of tokenized rows that it reads; see stages/training/token_cache.py
    checkpoints/    the stage's checkpoints
    out/            the unpublished artifact: payload/ and evidence/
    done.json       written last: the result, or the failure and its cause
"""

import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Protocol, Self, TypeVar

from pedigree.configs.base.frozen import finite
from pedigree.configs.language.execution import Numerics, Placement
from pedigree.configs.language.kinds import KINDS
from pedigree.data.artifacts.artifacts import Artifact, write_text
from pedigree.data.host.effort import Effort
from pedigree.data.host.machine import free_memory_share, settled
from pedigree.data.store.fence import OVERTAKEN, Fence, Superseded
from pedigree.data.store.heartbeat import Pulse
from pedigree.stages.job.spec import JobSpec

T = TypeVar("T")
HEARTBEAT_INTERVAL_S = 1.0
TOKENS = "tokens.json"
PULSES = "pulses"
"""Folder in the scratch folder with the heartbeats of the job's processes."""
CODE_CHANGED = "code changed at"
"""Prefix of the mark on a result that was started by different code."""
_CHECKPOINT = re.compile(r"step-[0-9]+")


def checkpoint_names(scratch: Path) -> list[str]:
    """Names of the complete checkpoints in a scratch folder, latest last."""
    names = (path.name for path in (scratch / "checkpoints").glob("step-*"))
    return sorted((name for name in names if _CHECKPOINT.fullmatch(name)), key=lambda name: int(name.removeprefix("step-")))


def read_curve(path: Path) -> list[dict[str, Any]]:
    """Rows of a training curve. Lines truncated by a full disk or a power cut are skipped."""
    rows = []
    with path.open("rb") as stream:
        for line in stream:
            with suppress(ValueError):
                row = json.loads(line)
                if isinstance(row, dict) and isinstance(row.get("step"), int):
                    rows.append(row)
    return rows


def is_torn(stream: BinaryIO) -> bool:
    """Whether a file, positioned at its end, ends without a newline, after a full disk or a power cut."""
    if size := stream.tell():
        stream.seek(size - 1)
    return stream.read(1) not in (b"\n", b"")


class Companion(Protocol):
    """A background service that ends with the stage (`stages.job.mirroring`)."""

    def close(self, finished: bool) -> None: ...


@dataclass
class Job:
    """Runtime context of a stage run on one rank."""

    folder: Path
    address: str
    key: str
    numerics: Numerics
    placement: Placement
    source_files: dict[str, Path]
    code: str = ""
    """Hash of the running code."""
    rank: int = 0
    tokens: Path | None = None
    """Folder of tokenized rows shared by jobs; None: below the job's own folder."""
    allow_numerics_change: bool = False
    require_checkpoint: bool = False
    marks: list[str] = field(default_factory=list)
    """Notes for the record."""
    checkpoint_cost: dict[str, float] = field(default_factory=lambda: {"written": 0, "seconds": 0.0, "bytes": 0})
    """For this attempt: number of checkpoints, training time spent on them, size of the last."""
    resumed_from: str | None = None
    """Name of the checkpoint that this attempt resumed from."""
    command_environment: dict[str, Any] | None = None
    """As in `RunConditions`."""
    mirror: Companion | None = field(default=None, repr=False)
    """Checkpoint mirror (`stages.job.mirroring.open_mirror`)."""
    settle: Callable[[], None] | None = field(default=None, repr=False)
    """Waits for the checkpoint being sealed (`stages.training.checkpoints`)."""
    fence: Fence | None = field(default_factory=Fence.of_environment)
    """Fencing token of this submission; None: started manually, with no other writer."""
    _beats: int = field(default=0, repr=False)
    _last_beat: float = field(default=float("-inf"), repr=False)
    _last_step: float = field(default=float("-inf"), repr=False)
    _report: dict[str, Any] = field(default_factory=dict, repr=False)
    _doing: str = field(default="", repr=False)

    @classmethod
    def of(cls, spec: JobSpec, folder: Path, **more: Any) -> Self:
        """Create the job of a spec on the current machine."""
        computes = KINDS[spec.kind].engine != "none"
        return cls(
            folder=folder,
            address=spec.address,
            key=spec.key,
            numerics=settled(spec.numerics) if computes else spec.numerics,
            placement=spec.placement,
            source_files={name: folder / given.path for name, given in spec.source_files.items()},
            code=spec.code,
            tokens=folder / spec.tokens,
            allow_numerics_change=spec.allow_numerics_change,
            require_checkpoint=spec.require_checkpoint,
            marks=list(spec.marks),
            **more,
        )

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if kind is not None and issubclass(kind, Exception) and self.settle is not None:  # the next attempt resumes from it
            try:
                self.settle()
            except Exception as error:  # the failure itself is what is reported
                print(f"the last checkpoint could not be written: {error}", flush=True)
        if self.mirror is not None:
            self.mirror.close(finished=kind is None)

    @contextmanager
    def beating(self) -> Iterator[None]:
        """Send heartbeats, and end this process if a later submission of the job exists."""

        def state() -> dict[str, Any]:
            return {"pid": os.getpid(), "host": os.uname().nodename, "memory_share": free_memory_share()}

        self.seal()
        with Pulse(self.folder / PULSES / str(self.rank), extra=state, look=self.seal):
            yield

    def seal(self, check: Callable[[Fence], None] = Fence.check) -> None:
        """Check the fence before a write that others rely on. Ends this process if another submission has taken over."""
        try:
            if self.fence is not None:
                check(self.fence)
        except Superseded as error:
            self._end(error)

    def _go_on(self) -> None:
        """Check the fence if this process may have been suspended since the last check."""
        self.seal(Fence.check_after_pause)

    def _end(self, error: Superseded) -> None:
        """Exit without `finally` or `atexit`: cleanup code would write where another job now writes."""
        print(f"{self.address} was taken over: {error}; this process exits without further writes", flush=True)
        for name in filter(str.isdigit, os.listdir("/proc")):  # the engines and commands it started
            with suppress(OSError):
                if int(name) != os.getpid() == os.getsid(int(name)):
                    os.kill(int(name), signal.SIGTERM)
        os._exit(OVERTAKEN)

    @property
    def out(self) -> Path:
        self._go_on()
        return self.folder / "out"

    @property
    def evidence(self) -> Path:
        """Folder of curves, manifests and samples for human readers; no stage reads it."""
        path = self.out / "evidence"
        path.mkdir(parents=True, exist_ok=True)
        return path

    @property
    def checkpoints(self) -> Path:
        self._go_on()
        return self.folder / "checkpoints"

    def note_code(self, made_by: str | None, reached: str) -> None:
        """Mark the result if the work it resumes from was produced by different code and no mark says so yet. That happens if the work
        was uploaded after this job was prepared, or if the runner could not check."""
        marked = any(mark.startswith(CODE_CHANGED) for mark in self.marks)
        if made_by and self.code and made_by != self.code and not marked:
            mark = f"{CODE_CHANGED} {reached}: {made_by[:12]} -> {self.code[:12]}"
            self.marks.append(mark)
            print(mark, flush=True)

    def note(self, text: str) -> None:
        """Mark the result with something that its users should know."""
        self.marks.append(text)
        print(text, flush=True)

    def progress(self, step: int, total: int, **numbers: float) -> None:
        """Report progress. Cheap: at most one write per second."""
        self._doing, now = "", time.monotonic()
        next_one = step != self._report.get("step") and now - self._last_step >= HEARTBEAT_INTERVAL_S  # another thread may beat, too
        self._last_step = now if next_one else self._last_step
        self._beat({"step": step, "total": total, "numbers": numbers}, at_once=step == total or next_one)

    def doing(self, what: str, done: float = 0, of: float = 0, unit: str = "") -> None:
        """Report an activity outside the steps: loading, packing, hashing. The step count does not change.

        A new activity is written immediately, because a long silent call may follow.
        """
        new, self._doing = what != self._doing, what
        if new or time.monotonic() - self._last_beat >= HEARTBEAT_INTERVAL_S:
            self._beat({**self._report, "doing": {"what": what, "done": done, "of": of, "unit": unit}}, at_once=new)

    def steady(self, micro_batches: Iterable[T]) -> Iterator[T]:
        """Iterate over the micro-batches of a step, with a heartbeat between them whenever one is due."""
        for micro_batch in micro_batches:
            if self.rank == 0 and time.monotonic() - self._last_beat >= HEARTBEAT_INTERVAL_S:
                self.doing("training")
            yield micro_batch

    @contextmanager
    def busy(self, what: str, *, flushing: bool = False) -> Iterator[None]:
        """Report an activity for a block that cannot report itself: library calls that load, filter or write for minutes.

        Reports while this process computes or moves bytes, or always with `flushing`: a wait for the disk is not observable from
        here, and no kill would end it. Do not use it for blocks that wait for other processes, possibly forever.
        """
        ended = threading.Event()

        def report() -> None:
            effort = Effort()
            while not ended.wait(HEARTBEAT_INTERVAL_S):
                if flushing or effort.progressed():
                    self.doing(what)

        reporter = threading.Thread(target=report, daemon=True, name=what)
        reporter.start()
        try:
            yield
        finally:
            ended.set()
            reporter.join()

    def _beat(self, report: dict[str, Any], at_once: bool) -> None:
        self._go_on()
        report = {"doing": None} | report
        self._report = {"step": 0, "total": 0, "numbers": {}} | {name: value for name, value in report.items() if name != "doing"}
        now = time.monotonic()
        if self.rank == 0 and (at_once or now - self._last_beat >= HEARTBEAT_INTERVAL_S):
            self._last_beat, self._beats = now, self._beats + 1
            beat = self._report | report | {"beat": self._beats, "time": time.time()}  # the time is for human readers
            temporary = self.folder / f".progress.{os.getpid()}.{threading.get_ident()}"  # the thread of `busy` writes concurrently
            temporary.write_text(json.dumps(finite(beat)))
            os.replace(temporary, self.folder / "progress.json")
            if report["doing"] is None and self._report["step"]:
                numbers = "".join(f"  {name.replace('_', ' ')} {value:.4g}" for name, value in self._report["numbers"].items())
                print(f"step {self._report['step']}/{self._report['total']}{numbers}", flush=True)

    def log(self, step: int, **numbers: float) -> None:
        """Append a line to the training curve; rank 0 writes it once per step."""
        self._go_on()
        if self.rank == 0:
            with (self.folder / "curve.jsonl").open("ab+") as stream:
                stream.write(b"\n" * is_torn(stream) + json.dumps({"step": step, **numbers}).encode() + b"\n")

    def rewind(self, step: int) -> None:
        """Remove curve lines after `step`; the resumed run writes them again."""
        self._go_on()
        path = self.folder / "curve.jsonl"
        if self.rank == 0 and path.exists():
            kept = [row for row in read_curve(path) if row["step"] <= step]
            write_text(path, "".join(json.dumps(row) + "\n" for row in kept))


Inputs = dict[str, dict[str, Artifact]]
"""Port → label → artifact, in recipe order."""


def only(inputs: Inputs, port: str) -> Artifact:
    """The single artifact at a port."""
    (artifact,) = inputs[port].values()
    return artifact


def only_or_none(inputs: Inputs, port: str) -> Artifact | None:
    return only(inputs, port) if inputs.get(port) else None
