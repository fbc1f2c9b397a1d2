"""What a running job keeps in a store, so that another machine goes on with it when its own is gone.

URL/KEY/step-000040/...          a checkpoint: its manifest.json (sha256 of all other files) is written last, without it there is none
URL/KEY/chunks/NAME.SHA256.json  finished chunks of generation
URL/KEY/attempts.json            how the job was tried so far
URL/KEY/made.json                by which code the newest work there was made
URL/KEY/code/SHA256.json         that code, once
URL/KEY/lease/000001.json        who writes; the highest number holds until `000001.released`, `beat-TOKEN` is its heartbeat
"""

import json
import re
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

from pydantic import Field, ValidationError

from configs.base.frozen import Frozen
from data.artifacts.artifacts import sha256_file, write_json
from data.artifacts.provenance import CODE_BYTES, packed, unpacked
from data.artifacts.run_record import ToldCode, parse_attempts
from data.store import storage
from data.store.heartbeat import Listener
from data.store.storage import ContentChanged, Missing, StoreError
from data.store.untrusted import RUN_BYTES, ArtifactError, Line, Sha256, described, inside, parse_json, parse_manifest, read_json

MANIFEST = "manifest.json"
STEP, SHA256, CLAIM = re.compile(r"step-[0-9]{1,12}/"), re.compile(r"[0-9a-f]{64}"), re.compile(r"([0-9]{6,12})\.json")
CLAIM_BYTES = 16 << 10
TOKEN, ELSEWHERE = "mirror.json", "attempts-elsewhere.json"
"""In the scratch folder: by which a further attempt goes on holding the lease; how the job was tried on other machines."""
POLL_S = 0.5
SIGNS_OF_LIFE = 2
"""Heartbeats that must be seen before a holder is believed to live: one may have been on its way when its machine went."""


Token = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
"""It is part of an object's name."""


class Kept(Frozen):
    """What `mirror.json` in a scratch folder holds."""

    token: Token


class Claim(Frozen):
    """What a claim of a lease holds."""

    token: Token
    what: Line
    silence_s: float = Field(ge=0, le=86_400)


def kept_token(scratch: Path) -> str | None:
    """By which a further attempt of a scratch folder goes on holding the lease; None where there was none.

    Raises:
        ArtifactError: the file is not what a job keeps there.
    """
    path = scratch / TOKEN
    if not path.exists():
        return None
    try:
        return Kept.model_validate(read_json(path, CLAIM_BYTES)).token
    except (ArtifactError, ValidationError) as error:
        said = described(error) if isinstance(error, ValidationError) else error
        remedy = "delete it: the next attempt takes over from this one when that has been silent for long enough"
        raise ArtifactError(f"{path} is not what a job keeps there ({said}): {remedy}") from error


class Made(Frozen):
    """By what the newest work of a mirror was made."""

    code: Sha256
    state: ToldCode | None = None
    """What git said of that code."""
    marks: tuple[Line, ...] = Field(default=(), strict=False)
    """What a reader of the result must know of how the work has come about."""


class Held(StoreError):
    """Another job that lives writes there."""


@dataclass(frozen=True)
class Mirror:
    """The place of one stage key."""

    url: str

    @classmethod
    def of(cls, url: str, key: str) -> "Mirror":
        return cls(f"{url}/{key}")

    def checkpoints(self) -> list[str]:
        """Names of the complete ones, the latest last."""
        return _by_step(PurePosixPath(entry.name).parts[0] for entry in storage.entries(self.url) if _is_manifest(entry.name))

    def upload_checkpoint(self, folder: Path, go_on: Callable[[], bool]) -> int:
        """Sends a sealed checkpoint, its manifest last; returns its bytes.

        Raises:
            InterruptedError: `go_on` said no between two files; what was sent is no checkpoint.
        """
        target, size = f"{self.url}/{folder.name}", 0
        storage.remove(f"{target}/{MANIFEST}")
        for name in [*sorted(_files(folder)), MANIFEST]:
            if not go_on():
                raise InterruptedError(f"{folder.name} is not wanted any more")
            storage.upload(folder / name, f"{target}/{name}")
            size += (folder / name).stat().st_size
        return size

    def keep_latest(self, count: int) -> None:
        """Removes older checkpoints, and what is left of uploads that were never finished; never the latest complete one."""
        complete = self.checkpoints()
        if complete:
            there = {PurePosixPath(entry.name).parts[0] for entry in storage.entries(self.url) if STEP.match(entry.name)}
            for name in _by_step(there - set(complete[-count:])):
                if _step(name) < _step(complete[-1]):
                    self.discard(name)

    def discard(self, name: str) -> None:
        """Removes a checkpoint, its manifest first."""
        storage.remove(f"{self.url}/{name}/{MANIFEST}")
        storage.remove(f"{self.url}/{name}")

    def download_checkpoint(self, name: str, target: Path, beat: Callable[[], None]) -> int:
        """Fetches a checkpoint into an empty folder, each file by its hash; returns its bytes.

        Raises:
            ContentChanged: a file is not what the manifest says, or is gone.
        """
        source = f"{self.url}/{name}"
        try:
            manifest = parse_manifest(storage.read(f"{source}/{MANIFEST}"), f"{source}/{MANIFEST}")
            places = {file: inside(target, file) for file in manifest}
        except ArtifactError as error:
            raise ContentChanged(f"{source}/{MANIFEST} is unreadable ({error})") from error
        for file, sha256 in manifest.items():
            storage.download(f"{source}/{file}", places[file], sha256, beat)
        write_json(target / MANIFEST, manifest)
        return sum((target / file).stat().st_size for file in manifest)

    def chunks(self) -> dict[str, str]:
        """Name of each finished chunk → sha256 of its file."""
        names = (entry.name.removesuffix(".json").rpartition(".") for entry in storage.entries(f"{self.url}/chunks"))
        return {name: sha256 for name, dot, sha256 in names if dot and SHA256.fullmatch(sha256)}

    def upload_chunk(self, file: Path) -> int:
        storage.upload(file, f"{self.url}/chunks/{file.stem}.{sha256_file(file)}.json")
        return file.stat().st_size

    def download_chunk(self, file: Path, sha256: str) -> None:
        """Raises ContentChanged where the bytes are not those that were sent."""
        storage.download(f"{self.url}/chunks/{file.stem}.{sha256}.json", file, sha256)

    def attempts(self) -> list[dict[str, Any]]:
        """How the job was tried so far, wherever; empty where nothing is known."""
        try:
            return parse_attempts(parse_json(storage.read(f"{self.url}/attempts.json", RUN_BYTES), "attempts.json", RUN_BYTES))
        except (Missing, ContentChanged, ArtifactError, ValueError, TypeError):
            return []

    def note_attempts(self, attempts: list[dict[str, Any]]) -> None:
        storage.write(f"{self.url}/attempts.json", json.dumps(attempts, indent=1).encode())

    def made(self) -> Made | None:
        """By what the newest work there was made; None where nobody has said.

        Raises:
            ContentChanged: what says so is not what a job writes.
        """
        place = f"{self.url}/made.json"
        try:
            return Made.model_validate(parse_json(storage.read(place, RUN_BYTES), place, RUN_BYTES))
        except Missing:
            return None
        except (ArtifactError, ValidationError) as error:
            said = described(error) if isinstance(error, ValidationError) else error
            raise ContentChanged(f"{place} is not what a job writes there ({said})") from error

    def note_made(self, made: Made, files: Mapping[str, Path]) -> None:
        """Call before the first work is sent that was made by this code; `files` are its files."""
        if f"{made.code}.json" not in {entry.name for entry in storage.entries(f"{self.url}/code")}:
            storage.write(f"{self.url}/code/{made.code}.json", packed(files))
        storage.write(f"{self.url}/made.json", made.model_dump_json(exclude_unset=True).encode())

    def code(self, sha256: str) -> dict[str, bytes]:
        """The files of code by which work there was made, by path.

        Raises:
            Missing: nobody has sent it.
            ContentChanged: what lies there is other code, or none.
        """
        place = f"{self.url}/code/{sha256}.json"
        try:
            return unpacked(storage.read(place, CODE_BYTES), sha256, place)
        except ArtifactError as error:
            raise ContentChanged(str(error)) from error

    def clear(self, token: str | None) -> bool:
        """Removes everything, unless another job that lives writes there; returns whether it did.

        A holder who is not ours is listened to, for as long as it may be silent.
        """
        if not storage.entries(self.url):
            return True
        lease = Lease(self.url, token or uuid.uuid4().hex, "", 0.0)
        listener, first, top = Listener(), None, lease.top()
        while top is not None and top.token != lease.token and listener.silent_s(top) <= top.allowed_s:
            first = first or top
            if top != first:
                return False
            time.sleep(min(POLL_S, top.allowed_s))
            top = lease.top()
        storage.remove(self.url)
        return True


@dataclass(frozen=True)
class Holder:
    """Who holds a lease. Another number or beat is a sign of life."""

    number: int
    token: str
    what: str
    allowed_s: float
    """It promises a beat in this time."""
    beat: bytes


@dataclass
class Lease:
    """The right to write to one mirror. Claims are created if absent and never overwritten, each with a higher number; the highest
    holds until a mark beside it says that it was given back.

    Two machines share no clock, and the store's may be wrong, too: a holder writes a counter that grows, and who waits times by its
    own clock how long that has not changed (`data/store/heartbeat.py`).
    """

    url: str
    """Of the mirror."""
    token: str
    """Whoever has it is the holder: kept in the scratch folder, so that a further attempt there goes on holding."""
    what: str
    """For whoever is refused: who and where."""
    silence_s: float
    """The holder promises heartbeats; after so long without one it may be taken over from."""
    number: int = 0
    beats: int = 0

    @property
    def pulse(self) -> str:
        return f"{self.url}/lease/beat-{self.token}"

    def acquire(self, say: Callable[[str], None], beat: Callable[[], None] = lambda: None) -> None:
        """Takes the lease; where another has it, listens until that has been silent for long enough.

        Raises:
            Held: the other one lives.
        """
        listener, seen = Listener(), set[tuple[int, bytes]]()
        while True:
            number, top = self._top()
            silent = top is not None and listener.silent_s(top) > top.allowed_s
            if top is not None and top.token == self.token:
                self.number = number
                self.beat()
                return
            if top is None or silent:
                if top is not None:
                    say(f"takes over from {top.what}, which has been silent for {top.allowed_s:.0f} s")
                self.number = number + 1
                if self._create():
                    self.beat()
                    self._tidy()
                    return
                continue
            if not seen:
                say(f"waits: {top.what} writes to {self.url}; it is taken over from when silent for {top.allowed_s:g} s")
            seen.add((top.number, top.beat))
            if len(seen) > SIGNS_OF_LIFE:
                raise Held(
                    f"{top.what} is at work on the same stage and lives: two machines would train one model. Wait for it, or cancel it "
                    "there; it is taken over from when it falls silent"
                )
            beat()
            time.sleep(min(POLL_S, top.allowed_s))

    def top(self) -> Holder | None:
        """The holder, when there is one."""
        return self._top()[1]

    def beat(self) -> None:
        self.beats += 1
        storage.write(self.pulse, f"{self.beats} {uuid.uuid4().hex}".encode())  # other than in an earlier attempt with the same token

    def still_ours(self) -> bool:
        """Says that we live, and looks whether another has taken over meanwhile, or has finished the stage and cleared everything away."""
        self.beat()
        top = self.top()
        return top is not None and (top.number, top.token) == (self.number, self.token)

    def release(self) -> None:
        storage.write(f"{self.url}/lease/{self.number:06d}.released", b"")
        storage.remove(self.pulse)

    def _top(self) -> tuple[int, Holder | None]:
        """The highest number that was ever claimed, and who holds it."""
        sizes = {entry.name: entry.size for entry in storage.entries(f"{self.url}/lease")}
        numbers = [int(found[1]) for found in map(CLAIM.fullmatch, sizes) if found]
        number = max((number for number in numbers if f"{number:06d}.json" in sizes), default=0)
        if number == 0 or f"{number:06d}.released" in sizes:
            return number, None
        try:
            told = self._claim(f"{number:06d}.json", sizes)
            beat = self._read(f"beat-{told.token}", sizes) if f"beat-{told.token}" in sizes else b""
        except Missing:  # cleared away, or given back just now
            return self._top()
        return number, Holder(number, told.token, told.what, told.silence_s, beat)

    def _claim(self, name: str, sizes: Mapping[str, int]) -> Claim:
        try:
            return Claim.model_validate(parse_json(self._read(name, sizes), name, CLAIM_BYTES))
        except (ArtifactError, ValidationError) as error:
            said = described(error) if isinstance(error, ValidationError) else error
            raise ContentChanged(
                f"{self.url}/lease/{name} is no claim of a job ({said}), so nobody can tell who writes there: when no job of this stage "
                f"is at work on any machine, remove {self.url}/lease and type the command again"
            ) from error

    def _read(self, name: str, sizes: Mapping[str, int]) -> bytes:
        if sizes.get(name, 0) > CLAIM_BYTES:
            raise ArtifactError(f"{name} has {sizes[name]} bytes, more than {CLAIM_BYTES}")
        return storage.read(f"{self.url}/lease/{name}")

    def _create(self) -> bool:
        told = Claim(token=self.token, what=self.what, silence_s=self.silence_s)
        return storage.create(f"{self.url}/lease/{self.number:06d}.json", told.model_dump_json().encode())

    def _tidy(self) -> None:
        """Removes what is left of earlier holders; never the highest number, nor the one before it: whoever lists a folder just now may
        not see yet what has come, and would begin with the first number if all else were gone."""
        for entry in storage.entries(f"{self.url}/lease"):
            number = re.match(r"[0-9]{6,12}\.", entry.name)
            earlier = number is not None and int(number[0][:-1]) < self.number - 1
            if earlier or (entry.name.startswith("beat-") and entry.name != f"beat-{self.token}"):
                storage.remove(f"{self.url}/lease/{entry.name}")


def _files(folder: Path) -> Iterable[str]:
    names = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return (name for name in names if name != MANIFEST)


def _is_manifest(name: str) -> bool:
    parts = PurePosixPath(name).parts
    return len(parts) == 2 and STEP.fullmatch(f"{parts[0]}/") is not None and parts[1] == MANIFEST


def _by_step(names: Iterable[str]) -> list[str]:
    return sorted(names, key=_step)


def _step(name: str) -> int:
    return int(name.removeprefix("step-"))
