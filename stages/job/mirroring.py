"""Upload a job's checkpoints and chunks to `placement.checkpoint_url` in the background.

Training never waits for the store: the newest sealed checkpoint is uploaded when the previous upload finishes. Failures are logged, counted
and retried; the job continues with its scratch folder. Chunks that an earlier attempt did not upload are uploaded first. Only the job that
holds the lease writes; a thread here renews it.
"""

import os
import platform
import shutil
import threading
import time
import uuid
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pedigree.data.artifacts.artifacts import read_json, write_json, write_text
from pedigree.data.artifacts.mirror import ELSEWHERE, Lease, LeaseTaken, Mirror, Producer, save_token, saved_token
from pedigree.data.artifacts.provenance import code_files
from pedigree.data.artifacts.run_record import PortableCode, read_attempts
from pedigree.data.host.faults import fault_point
from pedigree.data.store.durable import rename, sync_tree
from pedigree.data.store.storage import ContentChanged, Missing, StoreError
from pedigree.data.store.untrusted import ArtifactError
from pedigree.stages.job.failures import StageError
from pedigree.stages.job.job import Job

SILENCE_S = 60.0
"""Silence after which another machine may take over the lease; `heartbeat_timeout_s`, if that is shorter."""
BEATS = 6
"""Heartbeats within that time."""
AGAIN_S = 30.0
"""Pause after a store failure, on top of the store's own retries."""
FLUSH_S = 25.0
"""Time limit for pending uploads when a job is preempted."""
LINGER_S = 5.0
"""Time limit for a request in flight when the job has ended."""


def open_mirror(job: Job) -> "Mirroring | None":
    """Open the job's mirror once; None if the profile has no `checkpoint_url`, and on all ranks but the first.

    Ranks share their scratch folder, so all see what rank 0 downloads. Nothing else relies on that.

    Raises:
        StageError: another machine is working on the stage.
        StoreError: the store cannot be used.
    """
    if isinstance(job.mirror, Mirroring):
        return job.mirror
    if job.placement.checkpoint_url is None or job.rank != 0:
        return None
    job.mirror = mirror = Mirroring(job, job.placement.checkpoint_url)
    return mirror


class Mirroring:
    """Upload and heartbeat threads of one job, and access to work found in the mirror at the start."""

    def __init__(self, job: Job, url: str) -> None:
        self.job, self.mirror = job, Mirror.of(url, job.key)
        self.busy: str | None = None
        """Name of the checkpoint being uploaded, which must not be deleted."""
        self._noted: Producer | None = None
        self._lease = self._take_lease()
        self._wanted: Path | None = None
        self._chunks = deque(sorted((job.folder / "chunks").glob("[!.]*.json")))
        self._left = set(self._chunks)
        """Chunks of earlier attempts, which may not have been uploaded."""
        self._there: set[str] | None = None
        """Names of the chunks in the store; None until listed."""
        self._changed = threading.Condition()
        self._failing = self._lost = self._ended = False
        self._looked = time.monotonic()
        self._heart = threading.Thread(target=self._beat, daemon=True, name="mirror heartbeat")
        self._heart.start()
        threading.Thread(target=self._send, daemon=True, name="mirror upload").start()

    # --- at the start: work of other attempts ---------------------------------------------------------------------------

    def _take_lease(self) -> Lease:
        try:
            token = saved_token(self.job.folder)
        except ArtifactError as error:
            raise StageError(str(error)) from error
        self._known = token is not None
        token = token or uuid.uuid4().hex
        what = f"process {os.getpid()} on {platform.node() or 'an unnamed machine'}, since {time.strftime('%Y-%m-%d %H:%M:%S')}"
        lease = Lease(self.mirror.url, token, what, min(SILENCE_S, self.job.placement.heartbeat_timeout_s))
        with self._or_local("with local files", self._known):  # the lease was ours, and nobody else could take it
            try:
                lease.acquire(_log, lambda: self.job.progress(0, 0))
            except (LeaseTaken, ContentChanged) as error:
                raise StageError(str(error)) from error
            self._exchange_attempts()
        save_token(self.job.folder, token)
        return lease

    def _exchange_attempts(self) -> None:
        elsewhere, here = self.job.folder / ELSEWHERE, read_attempts(self.job.folder / "attempts.json")
        if not self._known and (found := self.mirror.attempts()):
            own = {attempt.get("started_at") for attempt in here}  # a copied folder holds those before the copy
            write_json(elsewhere, [attempt for attempt in found if attempt.get("started_at") not in own])
        self.mirror.note_attempts(read_attempts(elsewhere) + here)

    @contextmanager
    def _or_local(self, continuing: str, has_local: bool) -> Iterator[None]:
        """Continue without the store if it fails and this machine has work of its own."""
        try:
            yield
        except StoreError as error:
            if not has_local:
                raise
            _log(f"store unavailable, continuing {continuing}: {error}")

    def fetch_newer(self, than: str | None, folder: Path) -> str | None:
        """Download the newest sound checkpoint after `than`, with its curve; return its name.

        A damaged checkpoint is logged and removed, and the previous one is tried. If the store fails, local files are used.
        """
        with self._or_local(f"from {than or 'the beginning'}", than is not None or self._known):
            for name in reversed(self.mirror.checkpoints()):
                if than is not None and int(name[5:]) <= int(than[5:]):
                    return None
                began, temporary = time.monotonic(), folder / f".{name}"
                size = self._fetched(name, temporary)
                if size is not None:
                    self._put_in_place(temporary, folder / name)
                    _log(f"fetched {name} from {self.mirror.url}: {size / 1e6:.1f} MB in {time.monotonic() - began:.1f} s")
                    return name
                shutil.rmtree(temporary, ignore_errors=True)
                self.mirror.discard(name)
        return None

    def _put_in_place(self, temporary: Path, checkpoint: Path) -> None:
        fault_point("checkpoint fetched")
        curve = temporary / "curve.jsonl"
        write_text(self.job.folder / "curve.jsonl", curve.read_text() if curve.exists() else "")
        self.job.seal()
        shutil.rmtree(checkpoint, ignore_errors=True)
        sync_tree(temporary)
        rename(temporary, checkpoint)

    def _fetched(self, name: str, target: Path) -> int | None:
        """Download a checkpoint and return its size in bytes; None if it did not match its manifest twice."""
        for last in (False, True):
            shutil.rmtree(target, ignore_errors=True)
            try:
                return self.mirror.download_checkpoint(name, target, lambda: self.job.progress(0, 0))
            except (ContentChanged, Missing) as error:
                _log(f"mirrored checkpoint {name} is damaged ({error}): {'using the previous one' if last else 'retrying'}")
        return None

    def fetch_chunks(self, folder: Path) -> None:
        """Download the chunks that a folder lacks; a damaged one is generated again.

        Raises:
            StoreError: the store fails, and this machine has no local work yet.
        """
        with self._or_local("with local files", self._known):
            there, fetched = self.mirror.chunks(), 0
            for name in sorted(there):
                file = folder / f"{name}.json"
                if not file.exists():
                    self.job.progress(0, 0)
                    try:
                        self.mirror.download_chunk(file, there[name])
                        fetched += 1
                    except ContentChanged as error:
                        _log(f"a mirrored chunk is damaged and will be generated again: {error}")
            if fetched:
                self._note_other_code()
                _log(f"fetched {fetched} finished chunks from {self.mirror.url}")

    def _note_other_code(self) -> None:
        try:
            made = self.mirror.producer()
        except ContentChanged as error:
            _log(f"the code that generated the fetched chunks is unknown: {error}")
        else:
            self.job.note_code(made.code if made else None, "finished chunks")

    # --- during the run -------------------------------------------------------------------------------------------------

    def offer(self, checkpoint: Path) -> None:
        """Upload a sealed checkpoint after the previous upload, unless a newer one is offered first."""
        with self._changed:
            self._wanted = checkpoint
            self._changed.notify_all()

    def offer_chunk(self, file: Path) -> None:
        with self._changed:
            self._left.discard(file)
            self._chunks.append(file)
            self._changed.notify_all()

    def flush(self, seconds: float = FLUSH_S) -> None:
        """Wait for pending uploads, at most `seconds`."""
        with self._changed:
            idle = self._changed.wait_for(lambda: self._lost or not (self._wanted or self._chunks or self.busy), seconds)
        if not idle:
            _log(f"the newest work was not uploaded to {self.mirror.url} within {seconds:g} s: another machine would resume without it")

    def close(self, finished: bool) -> None:
        """Stop the threads and release the lease. A finished job drops its pending uploads."""
        if not finished:
            self.flush()
        with self._changed:
            self._ended = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self.busy is None, LINGER_S)
        self._heart.join(LINGER_S)
        if not (self._lost or self._failing):  # otherwise the lease expires
            try:
                self._lease.release()
            except StoreError as error:
                _log(f"could not release the lease, which will expire: {error}")

    def _send(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ended or self._wanted or self._chunks)
                if self._ended:
                    return
                task = self._wanted or self._chunks.popleft()
                if task is self._wanted:
                    self._wanted = None
                self.busy = task.name
            arrived = self._lost or self._sent(task)
            with self._changed:
                self.busy = None
                if not arrived and task.is_dir():
                    self._wanted = self._wanted or task
                elif not arrived and task.exists():
                    self._chunks.append(task)
                self._changed.notify_all()
                if not arrived:
                    self._changed.wait_for(lambda: self._ended, AGAIN_S)

    def _sent(self, task: Path) -> bool:
        began, cost = time.monotonic(), self.job.checkpoint_cost
        try:
            if task in self._left and self._is_there(task):
                return True
            self._note_made()
            if task.is_dir():
                size = self.mirror.upload_checkpoint(task, self._may_send)
                fault_point("checkpoint mirrored")
                self.mirror.keep_latest(self.job.placement.keep_checkpoints)
            else:
                size = self.mirror.upload_chunk(task)
        except InterruptedError:
            return True
        except (StoreError, OSError) as error:
            cost["mirror_failures"] = cost.get("mirror_failures", 0) + 1
            if not self._failing:
                _log(f"WARNING: {task.name} could not be mirrored; the job continues, but only this machine can resume it: {error}")
            self._failing = True
            return False
        if self._failing:
            _log(f"mirrored {task.name}: the store works again")
        self._failing = False
        cost["mirrored"] = cost.get("mirrored", 0) + 1
        cost["mirror_seconds"] = cost.get("mirror_seconds", 0.0) + time.monotonic() - began
        cost["mirror_bytes"] = cost.get("mirror_bytes", 0) + size
        return True

    def _is_there(self, chunk: Path) -> bool:
        """Whether a chunk of an earlier attempt is in the store."""
        if self._there is None:
            self._there = set(self.mirror.chunks())
        return chunk.stem in self._there

    def _note_made(self) -> None:
        """Upload the code behind the uploaded work, so that another machine can resume with it."""
        if not self.job.code:  # started manually
            return
        file = self.job.folder / "code.json"
        state = PortableCode.model_validate(read_json(file)) if file.exists() else None
        made = Producer(code=self.job.code, state=state, marks=tuple(self.job.marks))
        if made != self._noted:
            self.mirror.record_producer(made, code_files())
            self._noted = made

    def _may_send(self) -> bool:
        """Whether an upload may continue; checks the lease first if the last check is old, e.g. after a suspension."""
        if not (self._ended or self._lost) and time.monotonic() - self._looked > self._lease.silence_s / 2:
            self._look()
        return not (self._ended or self._lost)

    def _look(self) -> None:
        """Renew the lease and check that it is still ours."""
        lost = not self._lease.still_ours()
        self._looked = time.monotonic()
        if lost and not self._ended:
            _log("WARNING: another machine took over this stage after this one missed its heartbeats: mirroring stops here")
            with self._changed:
                self._lost = True
                self._changed.notify_all()

    def _beat(self) -> None:
        while not self._ended:
            with self._changed:
                if self._changed.wait_for(lambda: self._ended, self._lease.silence_s / BEATS):
                    return
            try:
                self._look()
            except StoreError:  # the upload thread reports it; a short gap is harmless
                continue
            if self._lost:
                return


def _log(text: str) -> None:
    print(f"mirror: {text}", flush=True)
