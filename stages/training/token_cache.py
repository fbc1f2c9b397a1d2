"""Cache of tokenized rows: files of token ids below `.pedigree/tokens`, memory-mapped by all ranks and later jobs.

A file is named by a hash of everything that determines its bytes: data, tokenizer with template, conversion of rows to documents, our code
and library versions; but not `max_length`, which is applied when documents are read (`stages/training/training_rows.py`). A resumed job,
another rank or another run on the same data reuses the file.

If several processes on a machine need the same file, one writes it and the others wait. The kernel releases the lock of a process that
dies, and another takes over. Machines on a shared disk do not wait for each other: they write equal files, and the last one wins. Readers
keep an open file even if it is deleted or replaced.
"""

import errno
import fcntl
import functools
import importlib.metadata
import os
import re
import socket
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import overload

import numpy as np

from pedigree.configs.base.frozen import digest
from pedigree.data.artifacts.artifacts import Artifact, sha256_file, write_json
from pedigree.data.chat.chat import Chat
from pedigree.data.chat.documents import Documents, Row
from pedigree.data.chat.encoding import EncodingMismatch
from pedigree.data.chat.token_files import SUFFIX, TokenFile, written
from pedigree.data.chat.tokenizing import WORTH_WORDS, packed, processes_for
from pedigree.data.store.untrusted import ArtifactError
from pedigree.stages.core.batches import Document, Unit
from pedigree.stages.job.job import TOKENS, Job

POLL_S = 0.1
TELL_S = 1.0
"""Interval of progress updates to waiting processes, in seconds."""
TOLD_BYTES = 48
MOST_TRIES = 10
"""Attempts, because a file may be damaged or just deleted, or the process writing it may die."""
DOING = "tokenizing"
LIBRARIES = ("transformers", "tokenizers", "jinja2", "regex")
CODE = (
    "data/chat/chat.py", "data/records/columns.py", "data/chat/documents.py", "data/chat/encoding.py", "data/records/messages.py",
    "data/records/records.py", "data/records/sequences.py", "data/chat/token_files.py", "data/chat/tokenizing.py", "data/chat/tools.py",
    "stages/training/training_rows.py", "stages/training/token_cache.py",
)  # fmt: skip
"""Our files that determine which rows are used and how they are converted."""
NOT_OF_TOKENIZERS = re.compile(r".*\.(safetensors|safetensors\.index\.json|bin|gguf|md)|(config|generation_config|reward_stats)\.json")
"""Files of a model folder that do not affect tokenization; all others count."""


class Units(Sequence[Unit]):
    """The documents of rows, read on demand; those of one row form a unit."""

    def __init__(self, file: TokenFile, per_row: int, rows: np.ndarray | None = None, max_length: int | None = None) -> None:
        """
        Args:
            file: the documents of all rows.
            per_row: number of documents per row.
            rows: rows to use; all by default.
            max_length: documents are truncated to this length.
        """
        self._file, self._per_row, self._max_length = file, per_row, max_length
        self._rows = np.arange(len(file.lengths_D) // per_row) if rows is None else rows

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, place: int) -> Unit: ...
    @overload
    def __getitem__(self, place: slice) -> list[Unit]: ...
    def __getitem__(self, place: int | slice) -> Unit | list[Unit]:
        if isinstance(place, slice):
            return [self[number] for number in range(len(self))[place]]
        first = int(self._rows[place]) * self._per_row
        return tuple(self._document(number) for number in range(first, first + self._per_row))

    @property
    def lengths_RD(self) -> np.ndarray:
        """Tokens of each row's documents before truncation; reads only the index."""
        return self._file.lengths_D.reshape(-1, self._per_row)[self._rows]

    @property
    def trained_RD(self) -> np.ndarray:
        """Trained tokens of each row's documents, without the first token."""
        return self._file.trained_D.reshape(-1, self._per_row)[self._rows]

    def taken(self, rows: np.ndarray, max_length: int) -> "Units":
        """A subset of rows, with documents truncated to `max_length`."""
        return Units(self._file, self._per_row, self._rows[rows], max_length)

    def _document(self, number: int) -> Document:
        try:
            ids, bits = self._file.document(number)
        except ArtifactError as error:
            self._file.path.unlink(missing_ok=True)  # the next attempt rebuilds it
            raise OSError(errno.EIO, f"{self._file.path}: {error}, and was deleted") from error
        doc = Document(ids, bits, int(self._file.trained_D[number]))
        return doc if self._max_length is None else doc.cut(self._max_length)


def units_of(rows: Sequence[Row], documents: Documents, chat: Chat, job: Job, policy: Artifact, data: Iterable[Artifact]) -> Units:
    """The documents of all rows, from the cache or newly tokenized.

    Args:
        rows: rows derived from the data as specified by `documents`.
        documents: conversion of a row to documents.
        chat: tokenizer and template of the policy.
        job: the job, whose token folder is used.
        policy: the model of `chat`.
        data: the rows' artifacts, in order.

    Raises:
        ChatError: a row cannot be used for training.
    """
    folder = job.tokens or job.folder / "tokens"
    key = key_of(documents, chat, policy, data)
    path = folder / f"{key}{SUFFIX}"
    if job.rank == 0:
        write_json(job.folder / TOKENS, {"file": path.name})
    for _ in range(MOST_TRIES):
        file = _opened(path, key, len(rows), documents.per_row)
        if file is not None:
            return Units(file, documents.per_row)
        folder.mkdir(parents=True, exist_ok=True)
        with _turn(folder, key, job) as turn:
            if turn is not None and not path.exists():
                _make(path, key, rows, documents, chat, turn)
                turn.over()
    raise OSError(errno.EIO, f"{path} was written but could not be read, {MOST_TRIES} times: check the disk")


def key_of(documents: Documents, chat: Chat, policy: Artifact, data: Iterable[Artifact]) -> str:
    """Name of a token file: a hash of everything that determines its bytes."""
    tokenizer = [[entry.path, entry.sha256] for entry in policy.record.files if not NOT_OF_TOKENIZERS.fullmatch(entry.path)]
    return digest(
        {
            "data": [artifact.record.content for artifact in data],
            "tokenizer": sorted(tokenizer),
            "documents": documents.key,
            "day": date.today().isoformat() if "strftime_now" in chat.template else None,  # which it renders
            "code": _code(),
            "libraries": {name: importlib.metadata.version(name) for name in LIBRARIES},
        }
    )


@functools.cache
def _code() -> dict[str, str]:
    root = Path(__file__).parents[2]
    return {name: sha256_file(root / name) for name in CODE}


def _opened(path: Path, key: str, rows: int, per_row: int) -> TokenFile | None:
    """Open the file; None if it does not exist, or if it was damaged and therefore deleted."""
    try:
        return TokenFile(path, key, rows, per_row)
    except FileNotFoundError:
        return None
    except ArtifactError as error:
        print(f"{path} is not used: {error}; tokenizing the rows again", flush=True)
        path.unlink(missing_ok=True)
        return None


def _make(path: Path, key: str, rows: Sequence[Row], documents: Documents, chat: Chat, turn: "BuildLock") -> None:
    """Write a file, falling back to the tokenizer if fast tokenization gives different ids."""
    dtype = np.dtype("<u2" if chat.highest_id < 1 << 16 else "<u4")
    for fast in (len(rows) >= WORTH_WORDS, False):
        turn.report(0, len(rows))
        done = 0
        try:
            with written(path, key, len(rows), documents.per_row, dtype, turn.name) as file:
                for count, some in packed(rows, chat, documents, dtype, fast, processes_for(len(rows))):
                    file.append(some)
                    done += count
                    turn.report(done, len(rows))
            return
        except EncodingMismatch as error:
            print(f"fast tokenization disagrees with the tokenizer in {chat.folder} ({error}): using only the tokenizer", flush=True)


class BuildLock:
    """The lock for writing a file, held by one process of a machine."""

    def __init__(self, name: str, path: Path, lock: int, job: Job) -> None:
        """
        Args:
            name: unique among living processes that write this file.
            path: the lock file.
            lock: its file descriptor.
            job: this process's job.
        """
        self.name, self._path, self._lock, self._job, self._told = name, path, lock, job, float("-inf")

    def report(self, done: int, of: int) -> None:
        """Report progress, also to waiting processes."""
        self._job.doing(DOING, done, of, "rows")
        if time.monotonic() - self._told >= TELL_S:
            self._told = time.monotonic()
            os.pwrite(self._lock, f"{done} {of}".ljust(TOLD_BYTES).encode(), 0)

    def over(self) -> None:
        """Remove the lock file once the token file exists; waiting processes have the lock file open."""
        self._path.unlink(missing_ok=True)


@contextmanager
def _turn(folder: Path, key: str, job: Job) -> Iterator[BuildLock | None]:
    """Acquire the lock for writing a file. None after waiting for another process: then the file exists, or its writer died."""
    host = re.sub(r"\W", "-", socket.gethostname())
    path = folder / f".{key}.{host}.lock"
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    with os.fdopen(lock):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            name = host
        except BlockingIOError:
            name = None
        except OSError:  # a file system without locks: two processes write equal files
            name = uuid.uuid4().hex
        if name is None:
            _wait(lock, job)
            yield None
        else:
            yield BuildLock(name, path, lock, job)


def _wait(lock: int, job: Job) -> None:
    """Wait for another process while it lives, and forward its progress; a process that hangs does not count as progress."""
    last = b""
    while True:
        current = os.pread(lock, TOLD_BYTES, 0)
        if current != last:
            last = current
            done, of = map(int, current.split())
            job.doing(DOING, done, of, "rows")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(POLL_S)
        else:
            fcntl.flock(lock, fcntl.LOCK_UN)
            return
