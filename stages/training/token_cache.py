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
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import overload

import numpy as np

from pedigree.configs.base.frozen import digest
from pedigree.data.artifacts.artifacts import Artifact, sha256_file, write_json
from pedigree.data.chat.chat import Chat
from pedigree.data.chat.documents import Documents, Row, schema, tokenized
from pedigree.data.chat.token_files import SUFFIX, UNFINISHED, TokenFile, written
from pedigree.data.host.parallel import mapped
from pedigree.data.records.records import bulk_of
from pedigree.data.store.untrusted import ArtifactError
from pedigree.stages.core.batches import Document, Unit
from pedigree.stages.job.job import TOKENS, Job

POLL_S = 0.1
PROGRESS_BYTES = 48
MOST_TRIES = 10
"""Attempts, because a file may be damaged or just deleted, or the process writing it may die."""
DOING = "tokenizing"
CHUNK_ROWS, CHUNK_CHARACTERS = 256, 1 << 20
"""Maximum rows and characters that a process tokenizes together. While it encodes, a token takes about 100 bytes; in an opened file, each
chunk takes about 3 kB."""
ROWS_OF_A_PROCESS = 1000
"""Rows per process; fewer are tokenized before another process has started."""
MOST_PROCESSES = 16
"""Maximum processes; more would wait for the process that hands out rows."""
LIBRARIES = ("transformers", "tokenizers", "jinja2")
CODE = (
    "data/chat/chat.py", "data/chat/chat_template.py", "data/records/columns.py", "data/chat/documents.py", "data/records/messages.py",
    "data/records/records.py", "data/records/sequences.py", "data/chat/token_files.py", "data/chat/tools.py",
    "stages/training/training_rows.py", "stages/training/token_cache.py",
)  # fmt: skip
"""Our files that determine which rows are used and how they are converted."""
NOT_OF_TOKENIZERS = re.compile(r".*\.(safetensors|safetensors\.index\.json|bin|gguf|md)|(config|generation_config|reward_stats)\.json")
"""Files of a model folder that do not affect tokenization; all others count."""


class Units(Sequence[Unit]):
    """The documents of rows, read on demand; those of one row form a unit."""

    def __init__(self, file: TokenFile, per_row: int, rows: np.ndarray | None = None, max_length: int | None = None) -> None:
        """Of the file's rows, `per_row` documents each, those in `rows` (all by default), truncated to `max_length`."""
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
        doc = Document(*self._file.document(number), int(self._file.trained_D[number]))
        return doc if self._max_length is None else doc.cut(self._max_length)


def units_of(rows: Sequence[Row], documents: Documents, chat: Chat, job: Job, policy: Artifact, data: Iterable[Artifact]) -> Units:
    """The documents of all rows, from the cache or newly tokenized.

    Args:
        rows: rows derived from the data as specified by `documents`.
        job: its token folder is used.
        policy: the model of `chat`.
        data: the rows' artifacts, in order.

    Raises:
        ChatError: a row cannot be used for training.
    """
    folder = job.tokens or job.folder / "tokens"
    key = key_of(documents, policy, data)
    path = folder / f"{key}{SUFFIX}"
    if job.rank == 0:
        write_json(job.folder / TOKENS, {"file": path.name})
    for _ in range(MOST_TRIES):
        with job.busy("checking tokens"):
            file = _opened(path)
        if file is not None:
            return Units(file, documents.per_row)
        folder.mkdir(parents=True, exist_ok=True)
        with _turn(folder, key, job) as turn:
            if turn is not None and not path.exists():
                _write(path, rows, documents, chat, job, *turn)
    raise OSError(errno.EIO, f"{path} was written but could not be read, {MOST_TRIES} times: check the disk")


def key_of(documents: Documents, policy: Artifact, data: Iterable[Artifact]) -> str:
    """Name of a token file: a hash of everything that determines its bytes."""
    tokenizer = [[entry.path, entry.sha256] for entry in policy.record.files if not NOT_OF_TOKENIZERS.fullmatch(entry.path)]
    return digest(
        {
            "data": [artifact.record.content for artifact in data],
            "tokenizer": sorted(tokenizer),
            "documents": documents.key,
            "code": _code(),
            "libraries": {name: importlib.metadata.version(name) for name in LIBRARIES},
        }
    )


@functools.cache
def _code() -> dict[str, str]:
    root = Path(__file__).parents[2]
    return {name: sha256_file(root / name) for name in CODE}


def _opened(path: Path) -> TokenFile | None:
    """Open the file; None if it does not exist, or if it was damaged and therefore deleted."""
    try:
        return TokenFile(path)
    except FileNotFoundError:
        return None
    except ArtifactError as error:
        print(f"{path} is not used: {error}; tokenizing the rows again", flush=True)
        path.unlink(missing_ok=True)
        return None


def _write(path: Path, rows: Sequence[Row], documents: Documents, chat: Chat, job: Job, lock: int, prefix: str) -> None:
    """Tokenize rows, in several processes if there are many. The bytes do not depend on their number. `lock` and `prefix`, of unfinished
    files, are those of `_turn`; the lock file receives the progress, for waiting processes."""

    def report(done: int) -> None:
        job.doing(DOING, done, len(rows), "rows")
        os.pwrite(lock, f"{done} {len(rows)}".ljust(PROGRESS_BYTES).encode(), 0)

    for left in path.parent.glob(f"{prefix}*{UNFINISHED}"):  # of killed writers
        left.unlink(missing_ok=True)
    form, done = schema(chat.highest_id), 0
    report(0)
    with ExitStack() as ending:
        file = ending.enter_context(written(path, path.with_name(f"{prefix}{uuid.uuid4().hex}{UNFINISHED}"), form))
        for batch in mapped(lambda chunk: tokenized(chunk, documents, chat, form), _chunks(rows), processes_for(len(rows))):
            file.write_batch(batch)
            done += len(batch) // documents.per_row
            report(done)
        with job.busy("checking tokens", flushing=True):
            ending.close()


def _chunks(rows: Iterable[Row]) -> Iterator[list[Row]]:
    chunk: list[Row] = []
    characters = 0
    for row in rows:
        chunk.append(row)
        characters += bulk_of(row)
        if len(chunk) == CHUNK_ROWS or characters >= CHUNK_CHARACTERS:
            yield chunk
            chunk, characters = [], 0
    if chunk:
        yield chunk


def processes_for(rows: int) -> int:
    """Number of processes for this many rows; 1 means this process alone."""
    return max(1, min(rows // ROWS_OF_A_PROCESS, len(os.sched_getaffinity(0)), MOST_PROCESSES))


@contextmanager
def _turn(folder: Path, key: str, job: Job) -> Iterator[tuple[int, str] | None]:
    """Acquire the lock for writing a file: (descriptor, prefix of names that no other living process writes). None after waiting for
    another process: then the file exists, or its writer died."""
    host = re.sub(r"\W", "-", socket.gethostname())
    path = folder / f".{key}.{host}.lock"
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    with os.fdopen(lock):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _wait(lock, job)
            yield None
            return
        except OSError:  # a file system without locks: two processes write equal files
            host = uuid.uuid4().hex
        yield lock, f".{key}.{host}."
        path.unlink(missing_ok=True)  # waiting processes have it open


def _wait(lock: int, job: Job) -> None:
    """Wait for another process while it lives, and forward its progress; a process that hangs does not count as progress."""
    last = b""
    while True:
        current = os.pread(lock, PROGRESS_BYTES, 0)
        if current != last:
            last = current
            done, of = map(int, current.split())
            job.doing(DOING, done, of, "rows")
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(POLL_S)
