"""Arrow files of token ids, memory-mapped and read without copying.

A file has one row per document (`data.chat.documents.schema`): an id takes 2 bytes if the vocabulary allows it, else 4, the training mask
one bit per token, and a document 12 bytes more. A CRC-32 follows the Arrow data. It is checked when a file is opened, and detects disk
errors and incomplete copies, but not an attacker with write access to `.pedigree` (docs/trust.md). Truncating a mapped file kills its
readers with SIGBUS.

Files are written under a temporary name and renamed once complete and on disk.
"""

import mmap
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyarrow.compute import call_function

from pedigree.data.artifacts.artifacts import ArtifactError
from pedigree.data.host.faults import fault_point
from pedigree.data.store.durable import rename, sync_file
from pedigree.data.store.untrusted import open_plain

SUFFIX, UNFINISHED = ".arrow", ".unfinished"
CRC_BYTES = 4


class TokenFile:
    """An opened, complete file. Row r has the documents r · per_row, r · per_row + 1, and so on."""

    def __init__(self, path: Path) -> None:
        """
        Raises:
            FileNotFoundError: the file does not exist.
            ArtifactError: it is not a plain file, or damaged.
        """
        with open_plain(path) as stream:
            if os.fstat(stream.fileno()).st_size <= CRC_BYTES:
                raise ArtifactError("it is incomplete")
            data = memoryview(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ))
        rows = data[:-CRC_BYTES]
        if _crc(path, rows) != data[-CRC_BYTES:]:
            raise ArtifactError("it is damaged, or another file under its name")
        table = pa.ipc.open_file(pa.py_buffer(rows)).read_all()
        self._ids, self._trained_bits = table["ids"], table["trained_bits"]
        self.lengths_D: np.ndarray = call_function("list_value_length", [self._ids]).to_numpy()
        """Number of tokens of each document."""
        self.trained_D: np.ndarray = table["num_trained"].to_numpy()
        """Number of trained tokens of each document, except the first token."""

    def document(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """(ids, packed training mask), as views into the file."""
        return self._ids[number].values.to_numpy(), np.frombuffer(self._trained_bits[number].as_buffer(), np.uint8)


@contextmanager
def written(path: Path, unfinished: Path, form: pa.Schema) -> Iterator[pa.RecordBatchFileWriter]:
    """Write a file that appears only if the block succeeds; until then it is `unfinished`, in the same folder, which no other live writer
    uses."""
    try:
        with unfinished.open("w+b") as stream:
            with pa.ipc.new_file(stream, form) as file:
                yield file
            stream.flush()
            with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
                stream.write(_crc(path, data))
        fault_point("tokens written")
        sync_file(unfinished)
        rename(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def _crc(path: Path, data: memoryview | mmap.mmap) -> bytes:
    """CRC-32 of a file's name and data: a file under another's name is not taken for it."""
    return zlib.crc32(data, zlib.crc32(path.name.encode())).to_bytes(CRC_BYTES, "little")
