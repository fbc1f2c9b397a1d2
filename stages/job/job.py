"""A running stage: what its code may know of the outside, and what it reports.

A job works in a scratch folder named after the stage's key:

    spec.json       what to do (written by the orchestrator before the start)
    progress.json   that its work goes on: step, total, numbers of the moment, what else it does
    pulses/RANK     that its processes live, whatever they do; see data/store/heartbeat.py
    curve.jsonl     one line per logged step; survives a resume without gaps or repeats
    tokens.json     the file of tokenised rows that it reads; see stages/training/token_cache.py
    checkpoints/    the stage's own
    out/            the unpublished artifact: payload/ and evidence/
    done.json       written last: the result, or the failure and its cause
"""

import errno
import json
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal, Protocol, Self

from pydantic import Field, TypeAdapter, ValidationError

from configs.base.frozen import Frozen, finite
from configs.base.paths import RelativePath
from configs.base.problems import PedigreeError
from configs.language.execution import Numerics, Placement
from configs.language.kinds import KINDS
from data.artifacts.artifacts import Artifact, ArtifactError, FileEntry, Input, read_json, write_text
from data.artifacts.run_record import Fingerprint, RunConditions, Setting
from data.host.effort import Effort
from data.host.machine import settled
from data.host.memory import share_left
from data.store.fence import OVERTAKEN, Fence, Superseded
from data.store.hashing import Hashed
from data.store.heartbeat import Pulse
from data.store.untrusted import LIST_BYTES, Line, Md5, Sha256, Size, Word, described

HEARTBEAT_INTERVAL_S = 1.0
TOKENS = "tokens.json"
PULSES = "pulses"
"""In a scratch folder: the signs of life of its job's processes."""
FULL_BELOW_BYTES = 4 << 20
CODE_CHANGED = "code changed at"
"""So begins the mark of a result whose work was begun by other code."""
LONGEST_MESSAGE = 10_000
"""Characters of what a job says of its failure; the log has it all."""


class StageError(PedigreeError):
    """A stage cannot give what it promises; running it again would end the same way."""


BUGS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    NameError,
    NotImplementedError,
    RecursionError,
    TypeError,
    ValueError,
)
"""What Python raises where code is wrong. Whoever calls a library with what users gave, and may get one, says so by a `PedigreeError`."""


class NotFinite(StageError):
    """The loss is no number: the same data and weights would give it again."""


def is_full(folder: Path) -> bool:
    """Whether the disk below a folder has no room to speak of."""
    return shutil.disk_usage(folder).free < FULL_BELOW_BYTES


def storage_cause(error: OSError) -> str:
    """One word for what a disk refuses."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "disk_full"
    return "not_writable" if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM) else "storage"


class Preempted(BaseException):
    """The job was asked to stop and may be resumed. Like a KeyboardInterrupt, no library's `except Exception` may swallow it."""


def place_in(scratch: Path, path: Path) -> str:
    """A path for a file in a scratch folder, to be read from there; one that lies elsewhere stays absolute."""
    return str(path.relative_to(scratch) if path.is_relative_to(scratch) else path)


class GivenInput(Frozen):
    """One input artifact, as the job was given it."""

    folder: str
    """Payload and records of the artifact, the job's own: relative to its scratch folder, which may be moved or seen at other paths."""
    content: str
    producer: str
    """Id of the artifact."""

    @classmethod
    def of(cls, artifact: Artifact, scratch: Path) -> "GivenInput":
        return cls(folder=place_in(scratch, artifact.path), content=artifact.record.content, producer=artifact.record.id)


class GivenFile(Frozen):
    """A file or folder of the project that the config names, as the job was given it."""

    path: str
    """Relative to the job's scratch folder."""
    sha256: str


class JobSpec(Frozen):
    """What the orchestrator asks of a job; a file, so that a job outlives whoever started it."""

    address: str
    kind: str
    version: int
    """Of the kind of stage, as the recipe was loaded with it."""
    key: str
    config: dict[str, Any]
    inputs: dict[str, dict[str, GivenInput]]
    """Port → label → artifact."""
    source_files: dict[str, GivenFile]
    """By the name that the config has for it."""
    code: str
    """Hash of the code that is to run (`data.artifacts.provenance.code_sha256`)."""
    fingerprint: Fingerprint | None = None
    """Of what in that code is behind the kind of stage, which takes a job longer to find than to be told; None: it was not told."""
    numerics: Numerics
    placement: Placement
    asked: Numerics | None = None
    """What the profile says, where `numerics` had to be made smaller to fit into memory."""
    tokens: str = "tokens"
    """Folder of tokenised rows, which jobs share (`stages/training/token_cache.py`), relative to the scratch folder."""
    allow_numerics_change: bool = False
    """Checkpoints that were made under other numerics are taken too, and the result is marked."""
    marks: tuple[str, ...] = Field(default=(), strict=False)
    """What a reader of the record must know of how this run was begun."""
    require_checkpoint: bool = False
    """Without a sound checkpoint the job is refused instead of begun again."""

    def lineage_inputs(self) -> tuple[Input, ...]:
        """Its inputs as a record has them."""
        given = [(port, label, one) for port, labelled in self.inputs.items() for label, one in labelled.items()]
        return tuple(Input(port=port, label=label, content=one.content, producer=one.producer) for port, label, one in given)


Number = Annotated[int, Field(ge=-(1 << 64), le=1 << 64)]


class _Ended(Frozen):
    checkpoints: dict[Word, Setting] = Field(default_factory=dict)
    """What writing and sending them took."""
    peak: dict[Word, Setting] = Field(default_factory=dict)
    """Bytes that the job's first rank had at most."""
    resumed_from: Line | None = None


class Failure(_Ended):
    """A `done.json` of a job that has failed, or was asked to stop."""

    ok: Literal[False]
    cause: Word
    message: Annotated[str, Field(max_length=LONGEST_MESSAGE)]


class Seen(Frozen):
    """A file of the payload, as the job hashed it."""

    size: Size
    mtime_ns: Number
    inode: Number
    sha256: Sha256
    md5: Md5

    def hashed(self) -> Hashed:
        return Hashed(self.size, self.mtime_ns, self.inode, self.sha256, self.md5)


class Success(_Ended):
    """A `done.json` of a job that has succeeded, by its own account."""

    ok: Literal[True]
    content: Sha256
    files: tuple[FileEntry, ...] = Field(strict=False)
    metrics: dict[Line, Any]
    marks: tuple[Line, ...] = Field(default=(), strict=False)
    seen: dict[RelativePath, Seen] = Field(default_factory=dict)
    made_by: RunConditions


Done = Success | Failure
_CHECKPOINT = re.compile(r"step-[0-9]+")
_DONE: TypeAdapter[Done] = TypeAdapter(Annotated[Done, Field(discriminator="ok")])


def read_done(scratch: Path) -> Done | None:
    """What the job of a scratch folder reported as its last act; None while it has not, or where the file is damaged.

    Raises:
        ArtifactError: the file is whole, and not what a job of this version writes; the field is named.
    """
    path = scratch / "done.json"
    try:
        found = read_json(path, LIST_BYTES)
    except ArtifactError:
        return None
    if not isinstance(found, dict):
        return None
    try:
        return _DONE.validate_python(found)
    except ValidationError as error:
        remedy = "delete it and type the command again: the work goes on from the last checkpoint"
        raise ArtifactError(f"{path} is no report of a job of this version ({described(error)}): {remedy}") from error


def checkpoint_names(scratch: Path) -> list[str]:
    """Names of the whole checkpoints in a job's scratch folder, the latest last."""
    names = (path.name for path in (scratch / "checkpoints").glob("step-*"))
    return sorted((name for name in names if _CHECKPOINT.fullmatch(name)), key=lambda name: int(name.removeprefix("step-")))


def read_curve(path: Path) -> list[dict[str, Any]]:
    """Rows of a training curve. A line that a full disk or a power cut has torn is none."""
    rows = []
    with path.open("rb") as stream:
        for line in stream:
            with suppress(ValueError):
                row = json.loads(line)
                if isinstance(row, dict) and isinstance(row.get("step"), int):
                    rows.append(row)
    return rows


class Companion(Protocol):
    """What works beside a stage and ends with it (`stages.job.mirroring`)."""

    def close(self, finished: bool) -> None: ...


@dataclass
class Job:
    """The outside world of one stage run, on one rank."""

    folder: Path
    address: str
    key: str
    numerics: Numerics
    placement: Placement
    source_files: dict[str, Path]
    code: str = ""
    """Hash of the code that runs."""
    rank: int = 0
    tokens: Path | None = None
    """Folder of tokenised rows, which jobs share; None: below its own."""
    allow_numerics_change: bool = False
    require_checkpoint: bool = False
    marks: list[str] = field(default_factory=list)
    """What a reader of the record must know."""
    checkpoint_cost: dict[str, float] = field(default_factory=lambda: {"written": 0, "seconds": 0.0, "bytes": 0})
    """Of this attempt: how many, how long training stood still for them, size of the last."""
    resumed_from: str | None = None
    """Name of the checkpoint that this attempt went on from."""
    mirror: Companion | None = field(default=None, repr=False)
    """Where others find its checkpoints (`stages.job.mirroring.open_mirror`)."""
    fence: Fence | None = field(default_factory=Fence.of_environment)
    """Which submission this is; None: run by hand, nobody else writes."""
    _beats: int = field(default=0, repr=False)
    _last_beat: float = field(default=float("-inf"), repr=False)
    _told: dict[str, Any] = field(default_factory=dict, repr=False)
    _doing: str = field(default="", repr=False)

    @classmethod
    def of(cls, spec: JobSpec, folder: Path, **more: Any) -> Self:
        """The job of a spec, on the machine that runs it."""
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
        if self.mirror is not None:
            self.mirror.close(finished=kind is None)

    @contextmanager
    def beating(self) -> Iterator[None]:
        """Lets others see that this process lives, and ends it when a later submission of the job exists."""

        def told() -> dict[str, Any]:
            return {"pid": os.getpid(), "host": os.uname().nodename, "memory_share": share_left()}

        self.seal()
        with Pulse(self.folder / PULSES / str(self.rank), told=told, look=self.seal):
            yield

    def seal(self) -> None:
        """Call just before a step that others build on. Where another submission has taken over, this process ends here."""
        try:
            if self.fence is not None:
                self.fence.check()
        except Superseded as error:
            self._end(error)

    def _go_on(self) -> None:
        """The same where this process may have been stopped since it last looked."""
        try:
            if self.fence is not None:
                self.fence.check_after_pause()
        except Superseded as error:
            self._end(error)

    def _end(self, error: Superseded) -> None:
        """No `finally`, no `atexit`: whatever still runs in this process would write where another job writes now."""
        print(f"{self.address} was taken over: {error}; this process ends and writes nothing more", flush=True)
        for name in filter(str.isdigit, os.listdir("/proc")):  # engines that it has started
            with suppress(OSError):
                if int(name) != os.getpid() == os.getpgid(int(name)):
                    os.kill(int(name), signal.SIGTERM)
        os._exit(OVERTAKEN)

    @property
    def out(self) -> Path:
        self._go_on()
        return self.folder / "out"

    @property
    def evidence(self) -> Path:
        """For people: curves, manifests, samples. No stage reads it."""
        path = self.out / "evidence"
        path.mkdir(parents=True, exist_ok=True)
        return path

    @property
    def checkpoints(self) -> Path:
        self._go_on()
        return self.folder / "checkpoints"

    def note_code(self, made_by: str | None, reached: str) -> None:
        """Marks the result where the work that it goes on from was made by other code, and nobody has said so: that work was sent
        after this job was prepared, or its runner could not look."""
        said = any(mark.startswith(CODE_CHANGED) for mark in self.marks)
        if made_by and self.code and made_by != self.code and not said:
            mark = f"{CODE_CHANGED} {reached}: {made_by[:12]} -> {self.code[:12]}"
            self.marks.append(mark)
            print(mark, flush=True)

    def progress(self, step: int, total: int, **numbers: float) -> None:
        """Says that the work goes on and how far it is. Cheap: at most one write a second."""
        self._doing = ""
        self._beat({"step": step, "total": total, "numbers": numbers}, at_once=step == total)

    def doing(self, what: str, done: float = 0, of: float = 0, unit: str = "") -> None:
        """Says that something beside the steps goes on: loading, packing, hashing. The steps stay where they were.

        Something new is said at once: what follows may be silent, and would be shown under the old name.
        """
        new, self._doing = what != self._doing, what
        if new or time.monotonic() - self._last_beat >= HEARTBEAT_INTERVAL_S:
            self._beat({**self._told, "doing": {"what": what, "done": done, "of": of, "unit": unit}}, at_once=new)

    @contextmanager
    def busy(self, what: str, *, flushing: bool = False) -> Iterator[None]:
        """Says the same for a block that cannot: calls of libraries that load, filter or write for minutes without a word.

        It counts as work while this process computes or moves bytes, or all the time where it waits for a disk to take them: that
        cannot be seen from here, and no kill would end it. Not for what waits for other processes, and may wait for ever.
        """
        ended = threading.Event()

        def tell() -> None:
            effort = Effort()
            while not ended.wait(HEARTBEAT_INTERVAL_S):
                if flushing or effort.progressed():
                    self.doing(what)

        teller = threading.Thread(target=tell, daemon=True, name=what)
        teller.start()
        try:
            yield
        finally:
            ended.set()
            teller.join()

    def _beat(self, told: dict[str, Any], at_once: bool) -> None:
        self._go_on()
        told = {"doing": None} | told
        self._told = {"step": 0, "total": 0, "numbers": {}} | {name: value for name, value in told.items() if name != "doing"}
        now = time.monotonic()
        if self.rank == 0 and (at_once or now - self._last_beat >= HEARTBEAT_INTERVAL_S):
            self._last_beat, self._beats = now, self._beats + 1
            beat = self._told | told | {"beat": self._beats, "time": time.time()}  # the time is for people
            temporary = self.folder / f".progress.{os.getpid()}.{threading.get_ident()}"  # who is `busy` beats beside what it waits for
            temporary.write_text(json.dumps(finite(beat)))
            os.replace(temporary, self.folder / "progress.json")

    def log(self, step: int, **numbers: float) -> None:
        """Adds a line to the training curve; written by rank 0 once per step."""
        self._go_on()
        if self.rank == 0:
            with (self.folder / "curve.jsonl").open("ab+") as stream:
                torn = stream.tell() > 0 and _last_byte(stream) != b"\n"  # by a full disk or a power cut
                stream.write(b"\n" * torn + json.dumps({"step": step, **numbers}).encode() + b"\n")

    def rewind(self, step: int) -> None:
        """Forgets curve lines after `step`: they will be written again by the resumed run."""
        self._go_on()
        path = self.folder / "curve.jsonl"
        if self.rank == 0 and path.exists():
            kept = [row for row in read_curve(path) if row["step"] <= step]
            write_text(path, "".join(json.dumps(row) + "\n" for row in kept))


def _last_byte(stream: BinaryIO) -> bytes:
    stream.seek(-1, os.SEEK_END)
    return stream.read(1)


Inputs = dict[str, dict[str, Artifact]]
"""Port → label → artifact, in the order of the recipe."""


def only(inputs: Inputs, port: str) -> Artifact:
    """The artifact at a port that takes one."""
    (artifact,) = inputs[port].values()
    return artifact


def only_or_none(inputs: Inputs, port: str) -> Artifact | None:
    return only(inputs, port) if inputs.get(port) else None
