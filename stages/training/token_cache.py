"""Rows tokenised once: files of token ids below `.pedigree/tokens`, which all ranks and all later jobs read without a copy.

A file is named after everything that decides its bytes: the data, the tokenizer with its template, how rows become documents, our code that
does it and the versions of the libraries. Not `max_length`: what does not fit is left out when documents are taken
(`stages/training/training_rows.py`). So a resumed job, another rank or another run on the same data finds what is there and tokenises
nothing.

Of several processes of a machine that need the same file one makes it, and the others wait: the kernel releases the lock of one that
dies, and the next goes on in its place. Several machines on one disk do not wait for each other: they make equal files, and the last
one stays. Whoever has a file open keeps it, whatever happens to its name.
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

from configs.base.frozen import digest
from data.artifacts.artifacts import Artifact, sha256_file, write_json
from data.chat.chat import Chat
from data.chat.documents import Documents, Row
from data.chat.encoding import NotEqual
from data.chat.token_files import SUFFIX, Damaged, TokenFile, written
from data.chat.tokenizing import WORTH_WORDS, packed, processes_for
from stages.core.batches import Document, Unit
from stages.job.job import TOKENS, Job

POLL_S = 0.1
TELL_S = 1.0
"""Seconds between two words to those who wait."""
TOLD_BYTES = 48
MOST_TRIES = 10
"""A file may be damaged, be deleted just now, or be another process's turn that then dies."""
DOING = "tokenizing"
LIBRARIES = ("transformers", "tokenizers", "jinja2", "regex")
CODE = (
    "data/chat/chat.py", "data/records/columns.py", "data/chat/documents.py", "data/chat/encoding.py", "data/records/messages.py",
    "data/records/records.py", "data/records/sequences.py", "data/chat/token_files.py", "data/chat/tokenizing.py", "data/chat/tools.py",
    "stages/training/training_rows.py", "stages/training/token_cache.py",
)  # fmt: skip
"""Our files that decide which rows there are, and what they become."""
NOT_OF_TOKENIZERS = re.compile(r".*\.(safetensors|safetensors\.index\.json|bin|gguf|md)|(config|generation_config|reward_stats)\.json")
"""Files of a model folder by which no text is tokenised otherwise; every other file counts."""


class Units(Sequence[Unit]):
    """The documents of rows, read when they are asked for; those of one row are a unit."""

    def __init__(self, file: TokenFile, per_row: int, rows: np.ndarray | None = None, max_length: int | None = None) -> None:
        """
        Args:
            file: with the documents of all rows.
            per_row: documents of each row.
            rows: which rows to take; all by default.
            max_length: documents are cut there.
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
        """Tokens of the documents of each row, before any is cut; nothing but the index is read."""
        return self._file.lengths_D.reshape(-1, self._per_row)[self._rows]

    @property
    def trained_RD(self) -> np.ndarray:
        """Their trained tokens, the first token left out."""
        return self._file.trained_D.reshape(-1, self._per_row)[self._rows]

    def taken(self, rows: np.ndarray, max_length: int) -> "Units":
        """Some of them, none longer than `max_length`."""
        return Units(self._file, self._per_row, self._rows[rows], max_length)

    def _document(self, number: int) -> Document:
        try:
            ids, bits = self._file.document(number)
        except Damaged as error:
            self._file.path.unlink(missing_ok=True)  # the next attempt makes it again
            raise OSError(errno.EIO, f"{self._file.path}: {error}, and was deleted") from error
        doc = Document(ids, bits, int(self._file.trained_D[number]))
        return doc if self._max_length is None else doc.cut(self._max_length)


def units_of(rows: Sequence[Row], documents: Documents, chat: Chat, job: Job, policy: Artifact, data: Iterable[Artifact]) -> Units:
    """The documents of all rows: read where they have been made before, else made.

    Args:
        rows: what `documents` says was taken from the data.
        documents: how a row becomes documents.
        chat: tokenizer and template of the policy.
        job: whose folder of tokens is used.
        policy: the model folder of `chat`.
        data: the artifacts that the rows come from, in their order.

    Raises:
        ChatError: a row cannot be trained on.
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
    raise OSError(errno.EIO, f"{path} was made and could not be read, {MOST_TRIES} times: look whether its disk is sound")


def key_of(documents: Documents, chat: Chat, policy: Artifact, data: Iterable[Artifact]) -> str:
    """What names a file of tokens: a hash of all that decides its bytes."""
    tokenizer = [[entry.path, entry.sha256] for entry in policy.record.files if not NOT_OF_TOKENIZERS.fullmatch(entry.path)]
    return digest(
        {
            "data": [artifact.record.content for artifact in data],
            "tokenizer": sorted(tokenizer),
            "documents": documents.said,
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
    """The file; None where it is not there, or is not what it should be: then it is deleted, and made again."""
    try:
        return TokenFile(path, key, rows, per_row)
    except FileNotFoundError:
        return None
    except Damaged as error:
        print(f"{path} is not used: {error}; the rows are tokenised again", flush=True)
        path.unlink(missing_ok=True)
        return None


def _make(path: Path, key: str, rows: Sequence[Row], documents: Documents, chat: Chat, turn: "Turn") -> None:
    """Writes a file; by the tokenizer alone where the fast way turns out to give other ids."""
    dtype = np.dtype("<u2" if chat.highest_id < 1 << 16 else "<u4")
    for fast in (len(rows) >= WORTH_WORDS, False):
        turn.tell(0, len(rows))
        done = 0
        try:
            with written(path, key, len(rows), documents.per_row, dtype, turn.name) as file:
                for count, some in packed(rows, chat, documents, dtype, fast, processes_for(len(rows))):
                    file.append(some)
                    done += count
                    turn.tell(done, len(rows))
            return
        except NotEqual as error:
            print(f"the tokenizer in {chat.folder} cuts words otherwise than it seemed to ({error}): it tokenises all rows", flush=True)


class Turn:
    """The right to make a file, held by one process of a machine."""

    def __init__(self, name: str, path: Path, lock: int, job: Job) -> None:
        """
        Args:
            name: no other living process that makes this file has it.
            path: the file that is locked.
            lock: its descriptor.
            job: of this process.
        """
        self.name, self._path, self._lock, self._job, self._told = name, path, lock, job, float("-inf")

    def tell(self, done: int, of: int) -> None:
        """Says how far it is, also to those who wait."""
        self._job.doing(DOING, done, of, "rows")
        if time.monotonic() - self._told >= TELL_S:
            self._told = time.monotonic()
            os.pwrite(self._lock, f"{done} {of}".ljust(TOLD_BYTES).encode(), 0)

    def over(self) -> None:
        """The file is there, so that nobody needs a turn any more; who waits for this one has the lock open."""
        self._path.unlink(missing_ok=True)


@contextmanager
def _turn(folder: Path, key: str, job: Job) -> Iterator[Turn | None]:
    """The right to make a file; None after waiting until nobody had it: then it is there, or its maker is dead."""
    host = re.sub(r"\W", "-", socket.gethostname())
    path = folder / f".{key}.{host}.lock"
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    with os.fdopen(lock):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            name = host
        except BlockingIOError:
            name = None
        except OSError:  # a file system without locks: what two processes make is equal
            name = uuid.uuid4().hex
        if name is None:
            _wait(lock, job)
            yield None
        else:
            yield Turn(name, path, lock, job)


def _wait(lock: int, job: Job) -> None:
    """Waits for another process as long as that lives, and passes on how far it is: one that hangs is not taken for work."""
    heard = b""
    while True:
        told = os.pread(lock, TOLD_BYTES, 0)
        if told != heard:
            heard = told
            done, of = map(int, told.split())
            job.doing(DOING, done, of, "rows")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(POLL_S)
        else:
            fcntl.flock(lock, fcntl.LOCK_UN)
            return
