"""Tokenize rows into packed documents on all cores, in forked processes that end with this one.

The bytes do not depend on the number of processes: chunks of rows are the same and return in order.
"""

import gc
import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np

from pedigree.data.chat.chat import Chat
from pedigree.data.chat.documents import Documents, Packed, Row, tokenised
from pedigree.data.chat.encoding import Encoder
from pedigree.data.host.process import die_with

CHUNK_ROWS, CHUNK_CHARACTERS = 256, 1 << 20
"""Maximum rows and characters of a chunk."""
ROWS_OF_A_PROCESS = 1000
"""Rows per process; fewer are tokenized before another process has started."""
MOST_PROCESSES = 16
"""Maximum processes; more would wait for the process that hands out rows."""
WORTH_WORDS = 64
"""Minimum rows for splitting into words; with fewer, the verification takes longer than it saves."""


def processes_for(rows: int) -> int:
    """Number of processes for this many rows; 1 means this process alone."""
    return max(1, min(rows // ROWS_OF_A_PROCESS, len(os.sched_getaffinity(0)), MOST_PROCESSES))


def chunks(rows: Iterable[Row], documents: Documents) -> Iterator[list[Row]]:
    """Split rows into chunks, in order."""
    chunk: list[Row] = []
    characters = 0
    for row in rows:
        chunk.append(row)
        characters += documents.characters(row)
        if len(chunk) == CHUNK_ROWS or characters >= CHUNK_CHARACTERS:
            yield chunk
            chunk, characters = [], 0
    if chunk:
        yield chunk


class Worker:
    """Tokenizes chunks in one process."""

    def __init__(self, chat: Chat, documents: Documents, dtype: np.dtype[Any], fast: bool) -> None:
        self._documents = documents
        self._encoder = Encoder(chat, dtype, fast)

    def pack(self, chunk: list[Row]) -> tuple[int, Packed]:
        """(number of rows, their documents)."""
        return len(chunk), tokenised(chunk, self._documents, self._encoder)


def packed(
    rows: Iterable[Row], chat: Chat, documents: Documents, dtype: np.dtype[Any], fast: bool, processes: int
) -> Iterator[tuple[int, Packed]]:
    """Tokenize rows; yields (number of rows, their documents) chunk by chunk, in order.

    Args:
        rows: consumed at most a few chunks ahead.
        chat: tokenizer and template.
        documents: how rows become documents.
        dtype: dtype of ids.
        fast: whether texts may be split into words here (`data/chat/encoding.py`).
        processes: number of processes; 1 means this process.

    Raises:
        ChatError: a row cannot be trained on; reports the first such row.
        EncodingMismatch: the fast path gives different ids.
    """
    if processes == 1:
        yield from map(Worker(chat, documents, dtype, fast).pack, chunks(rows, documents))
        return
    fork = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(processes, fork, initializer=_begin, initargs=(os.getpid(), chat, documents, dtype, fast))
    try:
        waiting = deque()
        for chunk in chunks(rows, documents):
            waiting.append(pool.submit(_pack, chunk))
            if len(waiting) > 2 * processes:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


_worker: list[Worker] = []
"""This process's worker, if it was forked to tokenize."""


def _begin(parent: int, *given: Any) -> None:
    die_with(parent)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):  # handled by the parent
        signal.signal(number, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    gc.freeze()  # keeps the collector from touching, and so copying, the parent's rows
    _worker.append(Worker(*given))


def _pack(chunk: list[Row]) -> tuple[int, Packed]:
    return _worker[0].pack(chunk)
