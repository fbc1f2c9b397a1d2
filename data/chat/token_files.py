"""Memory-mapped files of token ids, read without copying.

    header    format, key and sizes (`_Header`)
    index     for each document: tokens, trained tokens, CRC-32 (`data.chat.documents.Packed`)
    data      concatenated documents

Files are written under a temporary name and renamed once complete and on disk. Numbers are little-endian. An id takes 2 bytes if the
vocabulary allows it, else 4; the training mask takes one bit per token, and a document 12 bytes plus padding of less than an id.

Checks: on opening, key, rows, format, size, and the CRC-32 of header and index; on first use of a document, its CRC-32. They detect disk
errors and incomplete copies, but not an attacker with write access to `.pedigree` (docs/trust.md). Truncating a mapped file kills its
readers with SIGBUS.
"""

import mmap
import os
import struct
import uuid
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pedigree.data.artifacts.artifacts import ArtifactError
from pedigree.data.chat.documents import Packed, record_bytes
from pedigree.data.host.faults import fault_point
from pedigree.data.store.durable import rename, sync_file
from pedigree.data.store.untrusted import open_plain

SUFFIX, UNFINISHED = ".tokens", ".unfinished"
MAGIC = b"pedigree tokens\0"
FORMAT = 1
ABANDONED_S = 3600.0
"""Age at which an unfinished file that no longer grows counts as abandoned."""
_STRUCT = struct.Struct("<16s32sHHIQQI")
_CRC = struct.Struct("<I")
_HEADER_BYTES = 96


class _Header(NamedTuple):
    magic: bytes
    key: bytes
    format: int
    item_bytes: int
    """Bytes per id."""
    per_row: int
    """Documents per row."""
    rows: int
    data_bytes: int
    index_crc: int

    def packed(self) -> bytes:
        fields = _STRUCT.pack(*self)
        return (fields + _CRC.pack(zlib.crc32(fields))).ljust(_HEADER_BYTES, b"\0")

    @classmethod
    def read(cls, data: bytes) -> "_Header":
        fields = data[: _STRUCT.size]
        if len(data) < _HEADER_BYTES or _CRC.unpack_from(data, _STRUCT.size)[0] != zlib.crc32(fields):
            raise ArtifactError("its header is damaged")
        return cls(*_STRUCT.unpack(fields))


class TokenFile:
    """An opened, complete file. Row r has the documents r · per_row, r · per_row + 1, and so on."""

    def __init__(self, path: Path, key: str, rows: int, per_row: int) -> None:
        """
        Raises:
            FileNotFoundError: the file does not exist.
            ArtifactError: it is not the requested file, not a plain file, or damaged.
        """
        with open_plain(path) as stream:
            size = os.fstat(stream.fileno()).st_size
            header = _Header.read(stream.read(_HEADER_BYTES))
            self._map = mmap.mmap(stream.fileno(), size, access=mmap.ACCESS_READ)
        if (header.magic, header.format) != (MAGIC, FORMAT) or header.item_bytes not in (2, 4):
            raise ArtifactError("it has another format")
        if (header.key, header.rows, header.per_row) != (bytes.fromhex(key), rows, per_row):
            held = f"{header.per_row} documents for each of {header.rows} rows under the key {header.key.hex()[:12]}"
            raise ArtifactError(f"it has {held}, instead of {per_row} for {rows} under {key[:12]}")
        index_bytes = 12 * rows * per_row
        if size != _HEADER_BYTES + index_bytes + header.data_bytes:
            raise ArtifactError(f"it has a wrong size of {size} bytes")
        index = memoryview(self._map)[_HEADER_BYTES : _HEADER_BYTES + index_bytes]
        if zlib.crc32(index) != header.index_crc:
            raise ArtifactError("its index is damaged")
        self.path = path
        self._dtype = np.dtype(f"<u{header.item_bytes}")
        self._index_D3 = np.frombuffer(index, dtype="<u4").reshape(-1, 3)
        sizes_D = record_bytes(self._index_D3[:, 0].astype(np.int64), header.item_bytes)
        if sizes_D.sum() != header.data_bytes:
            raise ArtifactError("the sizes of its documents do not add up")
        ends_D = np.cumsum(sizes_D) + _HEADER_BYTES + index_bytes
        self._begins_D, self._sizes_D = ends_D - sizes_D, sizes_D
        self._proven_D = np.zeros(len(sizes_D), dtype=np.bool_)

    @property
    def lengths_D(self) -> np.ndarray:
        """Number of tokens of each document."""
        return self._index_D3[:, 0]

    @property
    def trained_D(self) -> np.ndarray:
        """Number of trained tokens of each document, except the first token."""
        return self._index_D3[:, 1]

    def document(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """(ids, packed training mask), as views into the file.

        Raises:
            ArtifactError: the checksum differs.
        """
        begin, size, (length, _, crc) = int(self._begins_D[number]), int(self._sizes_D[number]), self._index_D3[number].tolist()
        record = np.frombuffer(self._map, dtype=np.uint8, count=size, offset=begin)
        if not self._proven_D[number]:
            if zlib.crc32(record.data) != crc:
                raise ArtifactError(f"document {number} is damaged")
            self._proven_D[number] = True
        border = length * self._dtype.itemsize
        return record[:border].view(self._dtype), record[border : border + -(-length // 8)]


class TokenWriter:
    """Writes a file, document by document."""

    def __init__(self, path: Path, key: str, rows: int, per_row: int, dtype: np.dtype[Any]) -> None:
        self._key, self._rows, self._per_row, self._dtype = key, rows, per_row, dtype
        self._index_D3 = np.zeros((rows * per_row, 3), dtype="<u4")
        self._written, self._data_bytes = 0, 0
        self._stream = path.open("xb")
        self._stream.seek(_HEADER_BYTES + self._index_D3.nbytes)

    def append(self, packed: Packed) -> None:
        self._index_D3[self._written : self._written + len(packed.index_D3)] = packed.index_D3
        self._written += len(packed.index_D3)
        self._data_bytes += len(packed.data)
        self._stream.write(packed.data)
        self._stream.flush()

    def finish(self) -> None:
        """Write header and index."""
        assert self._written == len(self._index_D3), f"{self._written} of {len(self._index_D3)} documents"
        index = self._index_D3.tobytes()
        fields = (MAGIC, bytes.fromhex(self._key), FORMAT, self._dtype.itemsize, self._per_row, self._rows, self._data_bytes)
        self._stream.seek(0)
        self._stream.write(_Header(*fields, zlib.crc32(index)).packed() + index)
        self._stream.close()

    def close(self) -> None:
        self._stream.close()


@contextmanager
def written(path: Path, key: str, rows: int, per_row: int, dtype: np.dtype[Any], writer: str) -> Iterator[TokenWriter]:
    """Write a file that appears only if the block succeeds. Also removes files left by killed writers.

    Args:
        path, key, rows, per_row, dtype: of the file.
        writer: name that no other live writer of this file has.
    """
    prefix = f".{path.stem}.{writer}."
    unfinished = path.with_name(f"{prefix}{uuid.uuid4().hex}{UNFINISHED}")
    growing = TokenWriter(unfinished, key, rows, per_row, dtype)
    try:
        _sweep(unfinished, prefix)
        yield growing
        growing.finish()
        fault_point("tokens written")
        sync_file(unfinished)
        rename(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
        growing.close()  # may fail, too, if the disk is full


def _sweep(own: Path, prefix: str) -> None:
    """Delete unfinished files of writers with this name, and abandoned ones by the file system's clock."""
    now = own.stat().st_mtime
    for path in own.parent.glob(f".*{UNFINISHED}"):
        with suppress(FileNotFoundError):
            if path != own and (path.name.startswith(prefix) or now - path.stat().st_mtime > ABANDONED_S):
                path.unlink()
