"""What a running job keeps in a store, so that another machine goes on with it when its own is gone.

URL/KEY/step-000040/...          a checkpoint: its manifest.json (sha256 of all other files) is written last, without it there is none
URL/KEY/chunks/NAME.SHA256.json  finished chunks of generation
URL/KEY/attempts.json            how the job was tried so far
URL/KEY/lease/000001.json        who writes; the highest number holds, `beat-TOKEN` beside it is its heartbeat
"""

import json
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from data import storage
from data.artifacts import sha256_file, write_json
from data.storage import ContentChanged, Missing, StoreError

MANIFEST = "manifest.json"
TOKEN, ELSEWHERE = "mirror.json", "attempts-elsewhere.json"
"""In the scratch folder: by which a further attempt goes on holding the lease; how the job was tried on other machines."""
POLL_S = 0.5
SIGNS_OF_LIFE = 2
"""Heartbeats that must be seen before a holder is believed to live: one may have been on its way when its machine went."""


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
            there = {PurePosixPath(entry.name).parts[0] for entry in storage.entries(self.url) if entry.name.startswith("step-")}
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
            manifest = dict(json.loads(storage.read(f"{source}/{MANIFEST}")))
        except (ValueError, TypeError) as error:
            raise ContentChanged(f"{source}/{MANIFEST} is unreadable ({error})") from error
        for file, sha256 in manifest.items():
            if PurePosixPath(file).is_absolute() or ".." in PurePosixPath(file).parts:
                raise ContentChanged(f"{source}/{MANIFEST} names {file!r}, which lies outside")
            storage.download(f"{source}/{file}", target / file, str(sha256), beat)
        write_json(target / MANIFEST, manifest)
        return sum((target / file).stat().st_size for file in manifest)

    def chunks(self) -> dict[str, str]:
        """Name of each finished chunk → sha256 of its file."""
        names = (entry.name.removesuffix(".json").rpartition(".") for entry in storage.entries(f"{self.url}/chunks"))
        return {name: sha256 for name, dot, sha256 in names if dot}

    def upload_chunk(self, file: Path) -> int:
        storage.upload(file, f"{self.url}/chunks/{file.stem}.{sha256_file(file)}.json")
        return file.stat().st_size

    def download_chunk(self, file: Path, sha256: str) -> None:
        """Raises ContentChanged where the bytes are not those that were sent."""
        storage.download(f"{self.url}/chunks/{file.stem}.{sha256}.json", file, sha256)

    def attempts(self) -> list[dict[str, Any]]:
        """How the job was tried so far, wherever; empty where nothing is known."""
        try:
            return list(json.loads(storage.read(f"{self.url}/attempts.json")))
        except (Missing, ValueError, TypeError):
            return []

    def note_attempts(self, attempts: list[dict[str, Any]]) -> None:
        storage.write(f"{self.url}/attempts.json", json.dumps(attempts, indent=1).encode())

    def clear(self, token: str | None) -> bool:
        """Removes everything, unless another job that lives writes there; returns whether it did."""
        if not storage.entries(self.url):
            return True
        lease = Lease(self.url, f"clear-{uuid.uuid4().hex}", "", 0.0)
        lease.beat()
        top = lease.top()
        if top is not None and top.token != token and not top.silent:
            storage.remove(lease.pulse)
            return False
        storage.remove(self.url)
        return True


@dataclass(frozen=True)
class Holder:
    """Who holds a lease, as seen from the store."""

    number: int
    token: str
    what: str
    silent_s: float
    """Since its last heartbeat, by the store's own clock."""
    allowed_s: float
    last_beat: float

    @property
    def silent(self) -> bool:
        return self.silent_s > self.allowed_s


@dataclass
class Lease:
    """The right to write to one mirror. Leases are created if absent and never overwritten; the highest number holds.

    Two machines share no clock: how long a holder has been silent is told by the store, which times its heartbeat and ours.
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

    @property
    def pulse(self) -> str:
        return f"{self.url}/lease/beat-{self.token}"

    def acquire(self, say: Callable[[str], None], beat: Callable[[], None] = lambda: None) -> None:
        """Takes the lease; where another has it, waits until that is silent for long enough.

        Raises:
            Held: the other one lives.
        """
        seen: list[float] = []
        while True:
            self.beat()
            top = self.top()
            if top is not None and top.token == self.token:
                self.number = top.number
                return
            if top is None or top.silent:
                if top is not None:
                    say(f"takes over from {top.what}, which has been silent for {top.silent_s:.0f} s")
                self.number = top.number + 1 if top else 1
                if self._create():
                    if top is not None:
                        storage.remove(f"{self.url}/lease/{top.number:06d}.json")
                        storage.remove(f"{self.url}/lease/beat-{top.token}")
                    return
                continue
            if not seen:
                say(f"waits: {top.what} writes to {self.url}; it is taken over from when silent for {top.allowed_s:g} s")
            if top.last_beat not in seen:
                seen.append(top.last_beat)
            if len(seen) > SIGNS_OF_LIFE:
                storage.remove(self.pulse)
                raise Held(
                    f"{top.what} is at work on the same stage and lives: two machines would train one model. Wait for it, or cancel it "
                    "there; it is taken over from when it falls silent"
                )
            beat()
            time.sleep(POLL_S)

    def top(self) -> Holder | None:
        """The holder, when there is one. Our own heartbeat must have been written just before."""
        found = {entry.name: entry for entry in storage.entries(f"{self.url}/lease")}
        numbers = sorted(int(name.removesuffix(".json")) for name in found if name.removesuffix(".json").isdigit())
        if not numbers:
            return None
        name = f"{numbers[-1]:06d}.json"
        try:
            told = json.loads(storage.read(f"{self.url}/lease/{name}"))
        except Missing:  # given back just now
            return self.top()
        beats = [found[beat].modified for beat in (name, f"beat-{told['token']}") if beat in found]
        now = found[f"beat-{self.token}"].modified if f"beat-{self.token}" in found else time.time()
        return Holder(numbers[-1], told["token"], told["what"], now - max(beats), told["silence_s"], max(beats))

    def beat(self) -> None:
        storage.write(self.pulse, b"")

    def still_ours(self) -> bool:
        """Says that we live, and looks whether another has taken over meanwhile."""
        self.beat()
        top = self.top()
        if top is None:  # whoever had finished the stage has cleared everything away
            self.number = 1
            return self._create()
        return top.token == self.token

    def release(self) -> None:
        storage.remove(f"{self.url}/lease/{self.number:06d}.json")
        storage.remove(self.pulse)

    def _create(self) -> bool:
        told = {"token": self.token, "what": self.what, "silence_s": self.silence_s}
        return storage.create(f"{self.url}/lease/{self.number:06d}.json", json.dumps(told).encode())


def _files(folder: Path) -> Iterable[str]:
    names = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return (name for name in names if name != MANIFEST)


def _is_manifest(name: str) -> bool:
    parts = PurePosixPath(name).parts
    return len(parts) == 2 and parts[0].startswith("step-") and parts[1] == MANIFEST


def _by_step(names: Iterable[str]) -> list[str]:
    return sorted(names, key=_step)


def _step(name: str) -> int:
    return int(name.removeprefix("step-"))
