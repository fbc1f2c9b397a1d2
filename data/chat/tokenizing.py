"""Rows to packed documents on all cores: by processes that share what this one has loaded, and die with it.

The bytes do not depend on how many processes there are: chunks of rows are the same ones, and come back in their order.
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

from data.chat.chat import Chat
from data.chat.documents import Documents, Packed, Row, tokenised
from data.chat.encoding import Encoder
from data.host.process import die_with

CHUNK_ROWS, CHUNK_CHARACTERS = 256, 1 << 20
"""Rows that are tokenised at once: so many, or fewer where they are long."""
ROWS_OF_A_PROCESS = 1000
"""Fewer are tokenised before another process has begun."""
MOST_PROCESSES = 16
"""More than so many wait for the one that hands out rows."""
WORTH_WORDS = 64
"""With fewer rows, to prove how words are cut takes longer than it saves."""


def processes_for(rows: int) -> int:
    """How many processes tokenise so many rows; 1: this one alone."""
    return max(1, min(rows // ROWS_OF_A_PROCESS, len(os.sched_getaffinity(0)), MOST_PROCESSES))


def chunks(rows: Iterable[Row], documents: Documents) -> Iterator[list[Row]]:
    """The rows in their order, as many at a time as take a moment."""
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
    """Tokenises chunk after chunk, in one process."""

    def __init__(self, chat: Chat, documents: Documents, dtype: np.dtype[Any], fast: bool) -> None:
        self._documents = documents
        self._encoder = Encoder(chat, dtype, fast)

    def pack(self, chunk: list[Row]) -> tuple[int, Packed]:
        """(rows, their documents)."""
        return len(chunk), tokenised(chunk, self._documents, self._encoder)


def packed(
    rows: Iterable[Row], chat: Chat, documents: Documents, dtype: np.dtype[Any], fast: bool, processes: int
) -> Iterator[tuple[int, Packed]]:
    """(number of rows, their documents), chunk by chunk in the order of the rows.

    Args:
        rows: taken one after the other, no more than a few chunks ahead.
        chat: tokenizer and template.
        documents: what a row becomes.
        dtype: of ids.
        fast: whether texts may be cut into words here (`data/chat/encoding.py`).
        processes: 1: in this one.

    Raises:
        ChatError: a row cannot be trained on; the first such row is the one that is told.
        NotEqual: the fast way is not to be taken.
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
"""Of this process, where it was started to tokenise."""


def _begin(parent: int, *given: Any) -> None:
    die_with(parent)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):  # the parent hears them
        signal.signal(number, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    gc.freeze()  # the rows of the parent, if it holds them, are not looked through, which would copy them
    _worker.append(Worker(*given))


def _pack(chunk: list[Row]) -> tuple[int, Packed]:
    return _worker[0].pack(chunk)
