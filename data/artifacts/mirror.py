"""Checkpoint mirror: a running job's state in a store, so that another machine can resume it.

URL/KEY/step-000040/...          checkpoint; complete once its manifest.json (sha256 of all other files) exists, which is written last
URL/KEY/chunks/NAME.SHA256.json  finished chunks of generation
URL/KEY/attempts.json            attempts of the job so far
URL/KEY/made.json                code that produced the newest state
URL/KEY/code/SHA256.json         that code, once
URL/KEY/lease/000001.json        writer's claim (`data/store/claims.py`); `beat-TOKEN` is its heartbeat
"""

import json
import os
import re
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from pedigree.configs.base.frozen import Frozen
from pedigree.data.artifacts.artifacts import sha256_file, write_json
from pedigree.data.artifacts.provenance import CODE_BYTES, packed, unpacked
from pedigree.data.artifacts.run_record import PortableCode, parse_attempts
from pedigree.data.store import storage
from pedigree.data.store.claims import Claims, Remote
from pedigree.data.store.heartbeat import Listener
from pedigree.data.store.storage import ContentChanged, Missing, StoreError
from pedigree.data.store.untrusted import (
    LIST_BYTES,
    RUN_BYTES,
    ArtifactError,
    Line,
    Sha256,
    described,
    inside,
    parse_json,
    parse_manifest,
    read_json,
)

MANIFEST = "manifest.json"
STEP, SHA256 = re.compile(r"(step-[0-9]{1,12})/(.+)"), re.compile(r"[0-9a-f]{64}")
CLAIM_BYTES = 16 << 10
TOKEN, ELSEWHERE = "mirror.json", "attempts-elsewhere.json"
"""Files in the scratch folder: token with which a later attempt keeps the lease; attempts on other machines."""
POLL_S = 0.5
CLEARING_S = 60.0
"""Heartbeat timeout of a command that removes a mirror."""
SIGNS_OF_LIFE = 2
"""New heartbeats needed before a holder counts as alive: one may have been in flight when its machine died."""


Token = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
"""Lease token; part of an object's name."""


class MirrorState(Frozen):
    """Content of `mirror.json` in a scratch folder."""

    token: Token
    folder: Line | None = None
    """File system and inode of that folder, which a copy of it does not share. None: stored before 0.2, and valid in any folder."""


class Claim(Frozen):
    """Content of a lease claim."""

    token: Token
    what: Line
    silence_s: float = Field(ge=0, le=86_400)


def save_token(scratch: Path, token: str) -> None:
    """Store the token with which the next attempt of a scratch folder keeps the lease."""
    write_json(scratch / TOKEN, MirrorState(token=token, folder=_identity(scratch)).model_dump())


def saved_token(scratch: Path) -> str | None:
    """The token with which the next attempt of a scratch folder keeps the lease; None if there is none, or if the folder is a copy, whose
    original may be in use. Raises ArtifactError.
    """
    path = scratch / TOKEN
    if not path.exists():
        return None
    try:
        state = MirrorState.model_validate(read_json(path, CLAIM_BYTES))
        return state.token if state.folder in (None, _identity(scratch)) else None
    except (ArtifactError, ValidationError) as error:
        remedy = "delete it; the next attempt takes over once the lease has timed out"
        raise ArtifactError(f"{path} is invalid ({described(error)}): {remedy}") from error


def _identity(folder: Path) -> str:
    """Distinguishes a folder from its copies. It survives a move, a reboot and another mount point; a device number would not."""
    return f"{os.statvfs(folder).f_fsid:x}:{folder.stat().st_ino:x}"


class Producer(Frozen):
    """Code that produced the newest state of a mirror."""

    code: Sha256
    state: PortableCode | None = None
    """Git state of that code."""
    marks: tuple[Line, ...] = Field(default=(), strict=False)
    """Caveats about the state, to be recorded with the result."""


class LeaseTaken(StoreError):
    """Another live job holds the lease."""


@dataclass(frozen=True)
class Mirror:
    """The mirror of one stage key."""

    url: str

    @classmethod
    def of(cls, url: str, key: str) -> "Mirror":
        return cls(f"{url}/{key}")

    def checkpoints(self) -> list[str]:
        """Names of complete checkpoints, latest last."""
        return [name for name, files in self._steps().items() if MANIFEST in files]

    def upload_checkpoint(self, folder: Path, go_on: Callable[[], bool]) -> int:
        """Upload a sealed checkpoint, its manifest last; returns its size in bytes.

        Raises InterruptedError if `go_on` returns False between two files; the upload is then incomplete and not a checkpoint.
        """
        target, size = f"{self.url}/{folder.name}", 0
        storage.remove(f"{target}/{MANIFEST}")
        for file in sorted((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path == folder / MANIFEST):
            if not go_on():
                raise InterruptedError(f"{folder.name} is no longer needed")
            storage.upload(file, f"{target}/{file.relative_to(folder).as_posix()}")
            size += file.stat().st_size
        return size

    def keep_latest(self, count: int) -> None:
        """Remove older checkpoints and unfinished uploads, but never the latest complete checkpoint."""
        complete = self.checkpoints()
        for name in takewhile(lambda name: name != complete[-1], self._steps() if complete else ()):
            if name not in complete[-count:]:
                self.discard(name)

    def _steps(self) -> dict[str, set[str]]:
        """Checkpoint, complete or not → its files; latest last."""
        found: dict[str, set[str]] = {}
        for entry in storage.entries(self.url):
            if part := STEP.fullmatch(entry.name):
                found.setdefault(part[1], set()).add(part[2])
        return dict(sorted(found.items(), key=lambda item: int(item[0].removeprefix("step-"))))

    def discard(self, name: str) -> None:
        """Remove a checkpoint, its manifest first."""
        storage.remove(f"{self.url}/{name}/{MANIFEST}")
        storage.remove(f"{self.url}/{name}")

    def download_checkpoint(self, name: str, target: Path, beat: Callable[[], None]) -> int:
        """Download a checkpoint into an empty folder and verify each file; returns its size in bytes.

        Raises ContentChanged if the manifest is invalid, or a file does not match it.
        """
        source = f"{self.url}/{name}"
        try:
            manifest = parse_manifest(storage.read(f"{source}/{MANIFEST}", LIST_BYTES), f"{source}/{MANIFEST}")
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
        """Download a chunk; raises ContentChanged if it does not match its hash."""
        storage.download(f"{self.url}/chunks/{file.stem}.{sha256}.json", file, sha256)

    def attempts(self) -> list[dict[str, Any]]:
        """Attempts of the job on any machine; empty if unknown."""
        try:
            return parse_attempts(parse_json(storage.read(f"{self.url}/attempts.json", RUN_BYTES), "attempts.json", RUN_BYTES))
        except (Missing, ContentChanged, ArtifactError, ValueError):
            return []

    def note_attempts(self, attempts: list[dict[str, Any]]) -> None:
        storage.write(f"{self.url}/attempts.json", json.dumps(attempts, indent=1).encode())

    def producer(self) -> Producer | None:
        """Code that produced the newest state; None if not recorded. Raises ContentChanged if made.json is invalid."""
        place = f"{self.url}/made.json"
        try:
            return Producer.model_validate(parse_json(storage.read(place, RUN_BYTES), place, RUN_BYTES))
        except Missing:
            return None
        except (ArtifactError, ValidationError) as error:
            raise ContentChanged(f"{place} is not what a job writes there ({described(error)})") from error

    def record_producer(self, made: Producer, files: Mapping[str, Path]) -> None:
        """Record the code (`files`). Call this before uploading the first state that it produced."""
        if f"{made.code}.json" not in {entry.name for entry in storage.entries(f"{self.url}/code")}:
            storage.write(f"{self.url}/code/{made.code}.json", packed(files))
        storage.write(f"{self.url}/made.json", made.model_dump_json(exclude_unset=True).encode())

    def code(self, sha256: str) -> dict[str, bytes]:
        """Path → content of recorded code. Raises Missing if it was never uploaded, ContentChanged if it is invalid or other code."""
        place = f"{self.url}/code/{sha256}.json"
        try:
            return unpacked(storage.read(place, CODE_BYTES), sha256, place)
        except ArtifactError as error:
            raise ContentChanged(str(error)) from error

    def clear(self, token: str | None) -> bool:
        """Remove everything unless another live job holds the lease; returns whether it was removed.

        Waits for a foreign holder's heartbeat until its timeout.
        """
        if not storage.entries(self.url):
            return True
        try:
            Lease(self.url, token or uuid.uuid4().hex, "a command that removes what was mirrored", CLEARING_S).acquire(lambda text: None)
        except LeaseTaken:
            return False
        storage.remove(self.url)
        return True


@dataclass
class Lease:
    """The exclusive right to write to a mirror: numbered claims (`data/store/claims.py`), whose holder increments a counter.

    A waiter measures on its own clock how long the counter has not changed (`data/store/heartbeat.py`).
    """

    url: str
    """URL of the mirror."""
    token: str
    """Identifies the holder; stored in the scratch folder, so that the next attempt keeps the lease."""
    what: str
    """Description of the holder, shown to jobs that have to wait."""
    silence_s: float
    """Heartbeat timeout in seconds, after which another job may take over."""
    number: int = 0
    beats: int = 0

    def acquire(self, notify: Callable[[str], None], beat: Callable[[], None] = lambda: None) -> None:
        """Acquire the lease; if another job holds it, wait for its heartbeat timeout. Raises LeaseTaken if that job is alive."""
        mine = Claim(token=self.token, what=self.what, silence_s=self.silence_s).model_dump_json().encode()
        listener, seen = Listener(), set[tuple[int, bytes]]()
        while True:
            number, holder = self._top()
            sign = (number, self._beat_of(holder) if holder else b"")
            if holder is not None and holder.token == self.token:
                self.number = number
                break
            if holder is None or listener.silent_s(sign) > holder.silence_s:
                if holder is not None:
                    notify(f"takes over from {holder.what}, which had no heartbeat for {holder.silence_s:.0f} s")
                self.number = number + 1
                if self._claims.take(self.number, mine):
                    if holder is not None:
                        storage.remove(self._pulse(holder.token))
                    break
                continue
            if not seen:
                notify(f"waits: {holder.what} writes to {self.url}; takeover after {holder.silence_s:g} s without a heartbeat")
            seen.add(sign)
            if len(seen) > SIGNS_OF_LIFE:
                remedy = "Wait for it, or cancel it there; it can be taken over once its heartbeat stops"
                raise LeaseTaken(f"{holder.what} is running the same stage. {remedy}")
            beat()
            time.sleep(min(POLL_S, holder.silence_s))
        self.beat()

    def beat(self) -> None:
        self.beats += 1
        storage.write(self._pulse(self.token), f"{self.beats} {uuid.uuid4().hex}".encode())  # differs from those of earlier attempts

    def still_ours(self) -> bool:
        """Write a heartbeat and check that no other job has taken over, or finished the stage and cleared the mirror."""
        self.beat()
        number, holder = self._top()
        return holder is not None and (number, holder.token) == (self.number, self.token)

    def release(self) -> None:
        self._claims.release(self.number)
        storage.remove(self._pulse(self.token))

    @property
    def _claims(self) -> Claims:
        return Claims(Remote(f"{self.url}/lease"))

    def _pulse(self, token: str) -> str:
        return f"{self.url}/lease/beat-{token}"

    def _beat_of(self, holder: Claim) -> bytes:
        try:
            return storage.read(self._pulse(holder.token), CLAIM_BYTES)
        except Missing:
            return b""

    def _top(self) -> tuple[int, Claim | None]:
        """(highest number ever claimed, its holder if not released)"""
        number, is_held = self._claims.top()
        if not is_held:
            return number, None
        place = f"{self.url}/lease/{number:06d}.json"
        try:
            return number, Claim.model_validate(parse_json(storage.read(place, CLAIM_BYTES), place, CLAIM_BYTES))
        except Missing:  # cleared since the listing
            return self._top()
        except (ArtifactError, ContentChanged, ValidationError) as error:
            raise ContentChanged(
                f"{place} is not a valid lease claim ({described(error)}): make sure that no job of this stage is running on any "
                f"machine, remove {self.url}/lease and run the command again"
            ) from error
