"""A job's checkpoints and chunks on their way to `placement.checkpoint_url`, beside its work.

Training never waits for the store: the newest sealed checkpoint is sent when the one before has arrived. What fails is said, noted
and tried again; the job goes on with what lies in its scratch folder. Chunks that an earlier attempt had no time to send are sent first.
One job writes: it holds a lease, whose heart beats here.
"""

import os
import platform
import shutil
import threading
import time
import uuid
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from data.artifacts.artifacts import read_json, write_json, write_text
from data.artifacts.mirror import ELSEWHERE, TOKEN, Lease, LeaseTaken, Mirror, MirrorState, Producer, saved_token
from data.artifacts.provenance import code_files
from data.artifacts.run_record import PortableCode, read_attempts
from data.host.faults import fault_point
from data.store.durable import rename, sync_tree
from data.store.storage import ContentChanged, Missing, StoreError
from data.store.untrusted import ArtifactError
from stages.job.job import Job, StageError

SILENCE_S = 60.0
"""A machine that gives no sign for longer may be taken over from (or for `heartbeat_timeout_s`, where that is less)."""
BEATS = 6
"""Heartbeats in that time."""
AGAIN_S = 30.0
"""Pause after a failure of the store, which has been tried a few times by then."""
FLUSH_S = 25.0
"""What is still on its way when a job is asked to stop may take so long."""
LINGER_S = 5.0
"""So long a job that has ended waits for a request that is on its way."""


def open_mirror(job: Job) -> "Mirroring | None":
    """The job's mirror, opened once; None where the profile names none, and on all ranks but the first.

    Ranks share their scratch folder: what the first has fetched is there for all. This is the one place that relies on it.

    Raises:
        StageError: another machine is at work on the stage.
        StoreError: the store cannot be used.
    """
    if isinstance(job.mirror, Mirroring):
        return job.mirror
    if job.placement.checkpoint_url is None or job.rank != 0:
        return None
    job.mirror = mirror = Mirroring(job, job.placement.checkpoint_url)
    return mirror


class Mirroring:
    """The threads of one job that send and beat, and what was there when it began."""

    def __init__(self, job: Job, url: str) -> None:
        self.job, self.mirror = job, Mirror.of(url, job.key)
        self.busy: str | None = None
        """Name of the checkpoint that is being read, and must stay."""
        self._noted: Producer | None = None
        self._lease = self._take_lease()
        self._wanted: Path | None = None
        self._chunks = deque(sorted((job.folder / "chunks").glob("[!.]*.json")))
        self._left = set(self._chunks)
        """Chunks of earlier attempts, which may have been killed before they were sent;"""
        self._there: set[str] | None = None
        """names of those that the store has, once it was asked."""
        self._changed = threading.Condition()
        self._failing = self._lost = self._ended = False
        self._looked = time.monotonic()
        self._heart = threading.Thread(target=self._beat, daemon=True, name="mirror heartbeat")
        self._heart.start()
        threading.Thread(target=self._send, daemon=True, name="mirror upload").start()

    # --- the beginning: what others have left ---------------------------------------------------------------------------

    def _take_lease(self) -> Lease:
        try:
            token = saved_token(self.job.folder)
        except ArtifactError as error:
            raise StageError(str(error)) from error
        self._known = token is not None
        token = token or uuid.uuid4().hex
        what = f"process {os.getpid()} on {platform.node() or 'an unnamed machine'}, since {time.strftime('%Y-%m-%d %H:%M:%S')}"
        lease = Lease(self.mirror.url, token, what, min(SILENCE_S, self.job.placement.heartbeat_timeout_s))
        try:
            lease.acquire(_say, lambda: self.job.progress(0, 0))
            self._exchange_attempts()
        except (LeaseTaken, ContentChanged) as error:
            raise StageError(str(error)) from error
        except StoreError as error:
            if not self._known:
                raise
            _say(f"the store fails, this attempt goes on with what lies here: {error}")  # it was ours, and nobody could tell otherwise
        write_json(self.job.folder / TOKEN, MirrorState(token=token).model_dump())
        return lease

    def _exchange_attempts(self) -> None:
        elsewhere, here = self.job.folder / ELSEWHERE, self.job.folder / "attempts.json"
        if not self._known and (found := self.mirror.attempts()):
            write_json(elsewhere, found)
        self.mirror.note_attempts(read_attempts(elsewhere) + read_attempts(here))

    def fetch_newer(self, than: str | None, folder: Path) -> str | None:
        """Fetches the newest sound checkpoint that is newer than one, with its curve; returns its name.

        A damaged one is named, removed, and the one before is taken. Where the store fails, what lies here has to do.
        """
        try:
            return self._fetch_newer(than, folder)
        except StoreError as error:
            if than is None and not self._known:
                raise
            _say(f"the store fails, and the job goes on from {than or 'the beginning'}: {error}")
            return None

    def _fetch_newer(self, than: str | None, folder: Path) -> str | None:
        for name in reversed(self.mirror.checkpoints()):
            if than is not None and int(name[5:]) <= int(than[5:]):
                return None
            began, temporary = time.monotonic(), folder / f".{name}"
            size = self._fetched(name, temporary)
            if size is None:
                shutil.rmtree(temporary, ignore_errors=True)
                self.mirror.discard(name)
                continue
            fault_point("checkpoint fetched")
            curve = temporary / "curve.jsonl"
            write_text(self.job.folder / "curve.jsonl", curve.read_text() if curve.exists() else "")
            self.job.seal()
            shutil.rmtree(folder / name, ignore_errors=True)
            sync_tree(temporary)
            rename(temporary, folder / name)
            _say(f"fetched {name} from {self.mirror.url}: {size / 1e6:.1f} MB in {time.monotonic() - began:.1f} s")
            return name
        return None

    def _fetched(self, name: str, target: Path) -> int | None:
        """Bytes of a checkpoint that has been fetched; None where twice it was not what its manifest says."""
        for last in (False, True):
            shutil.rmtree(target, ignore_errors=True)
            try:
                return self.mirror.download_checkpoint(name, target, lambda: self.job.progress(0, 0))
            except (ContentChanged, Missing) as error:
                _say(f"mirrored checkpoint {name} is damaged ({error}): {'going back to the one before' if last else 'looking again'}")
        return None

    def fetch_chunks(self, files: Sequence[Path]) -> None:
        """Fetches those of the chunks that were finished elsewhere; a damaged one is generated again.

        Raises:
            StoreError: the store fails, on a machine that has nothing of its own yet.
        """
        try:
            self._fetch_chunks(files)
        except StoreError as error:
            if not self._known:
                raise
            _say(f"the store fails, and the job goes on with the chunks that lie here: {error}")

    def fetch_all_chunks(self, folder: Path) -> None:
        """Fetches every chunk that was finished elsewhere, whatever its name, into a folder.

        Raises:
            StoreError: the store fails, on a machine that has nothing of its own yet.
        """
        try:
            names = self.mirror.chunks()
        except StoreError as error:
            if not self._known:
                raise
            _say(f"the store fails, and the job goes on with what lies here: {error}")
            return
        self.fetch_chunks([folder / f"{name}.json" for name in sorted(names) if not (folder / f"{name}.json").exists()])

    def _fetch_chunks(self, files: Sequence[Path]) -> None:
        there, fetched = self.mirror.chunks(), 0
        for file in dict.fromkeys(files):
            if file.stem in there:
                self.job.progress(0, 0)
                try:
                    self.mirror.download_chunk(file, there[file.stem])
                    fetched += 1
                except ContentChanged as error:
                    _say(f"a mirrored chunk is damaged and generated again: {error}")
        if fetched:
            self._note_other_code()
            _say(f"fetched {fetched} finished chunks from {self.mirror.url}")

    def _note_other_code(self) -> None:
        try:
            made = self.mirror.producer()
        except ContentChanged as error:
            _say(f"nobody can tell by which code the fetched chunks were made: {error}")
        else:
            self.job.note_code(made.code if made else None, "finished chunks")

    # --- while it works -------------------------------------------------------------------------------------------------

    def offer(self, checkpoint: Path) -> None:
        """Sends a sealed checkpoint when the one before has arrived, unless a newer one is offered until then."""
        with self._changed:
            self._wanted = checkpoint
            self._changed.notify_all()

    def offer_chunk(self, file: Path) -> None:
        with self._changed:
            self._left.discard(file)
            self._chunks.append(file)
            self._changed.notify_all()

    def flush(self, seconds: float = FLUSH_S) -> None:
        """Waits until everything has arrived, at most so long."""
        with self._changed:
            idle = self._changed.wait_for(lambda: self._lost or not (self._wanted or self._chunks or self.busy), seconds)
        if not idle:
            _say(f"the newest work has not arrived at {self.mirror.url} within {seconds:g} s: another machine begins before it")

    def close(self, finished: bool) -> None:
        """Ends the threads and gives the lease back; what a finished job has not sent yet is not wanted any more."""
        if not finished:
            self.flush()
        with self._changed:
            self._ended = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self.busy is None, LINGER_S)
        self._heart.join(LINGER_S)
        if not (self._lost or self._failing):  # else it falls silent by itself
            try:
                self._lease.release()
            except StoreError as error:
                _say(f"could not give back its lease, which falls silent by itself: {error}")

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
                _say(f"WARNING: {task.name} could not be mirrored; the job goes on, and only this machine can resume it: {error}")
            self._failing = True
            return False
        if self._failing:
            _say(f"{task.name} has been mirrored: the store works again")
        self._failing = False
        cost["mirrored"] = cost.get("mirrored", 0) + 1
        cost["mirror_seconds"] = cost.get("mirror_seconds", 0.0) + time.monotonic() - began
        cost["mirror_bytes"] = cost.get("mirror_bytes", 0) + size
        return True

    def _is_there(self, chunk: Path) -> bool:
        """Whether a chunk of an earlier attempt had been sent."""
        if self._there is None:
            self._there = set(self.mirror.chunks())
        return chunk.stem in self._there

    def _note_made(self) -> None:
        """Says by which code what is sent was made, and sends that code, so that another machine may go on with it."""
        if not self.job.code:  # run by hand
            return
        told = self.job.folder / "code.json"
        state = PortableCode.model_validate(read_json(told)) if told.exists() else None
        made = Producer(code=self.job.code, state=state, marks=tuple(self.job.marks))
        if made != self._noted:
            self.mirror.record_producer(made, code_files())
            self._noted = made

    def _may_send(self) -> bool:
        """Whether an upload may go on; who has not looked at its lease for a while, e.g. was stopped, looks first."""
        if not (self._ended or self._lost) and time.monotonic() - self._looked > self._lease.silence_s / 2:
            self._look()
        return not (self._ended or self._lost)

    def _look(self) -> None:
        """Beats, and sees whether the lease is still ours."""
        lost = not self._lease.still_ours()
        self._looked = time.monotonic()
        if lost and not self._ended:
            _say("WARNING: another machine has taken over this stage while this one was silent: nothing more is mirrored from here")
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
            except StoreError:  # said by whoever wants to send something; a short silence costs nothing
                continue
            if self._lost:
                return


def _say(text: str) -> None:
    print(f"mirror: {text}", flush=True)
