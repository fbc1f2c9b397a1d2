"""Files of token ids that processes map into memory and read without a copy.

    header    what the file is (`_Header`)
    index     of each document: tokens, trained tokens, CRC-32 (`data.chat.documents.Packed`)
    data      the documents one after the other

A file is written beside its place and renamed once it is whole and on the disk, so a reader finds all of it or nothing. Numbers are
little-endian. An id takes 2 bytes where the vocabulary allows it, else 4; a trained token a bit more, a document 12 bytes and less than
an id for its end.

What is checked: at opening, that the file is what was asked for (key, rows, format), that its size is what header and index say, and
the CRC-32 of both; at the first use of a document its own CRC-32. That finds what disks and half-copied folders do to files. It is no
proof against somebody who can write below `.pedigree` and means harm (docs/trust.md), and a file that is cut short while it is mapped
ends its readers with SIGBUS.
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

from data.artifacts.artifacts import ArtifactError
from data.chat.documents import Packed, record_bytes
from data.host.faults import fault_point
from data.store.durable import rename, sync_file
from data.store.untrusted import open_plain

SUFFIX, UNFINISHED = ".tokens", ".unfinished"
MAGIC = b"pedigree tokens\0"
FORMAT = 1
ABANDONED_S = 3600.0
"""An unfinished file that has not grown for so long has lost its writer."""
_STRUCT = struct.Struct("<16s32sHHIQQI")
_CRC = struct.Struct("<I")
_HEADER_BYTES = 96


class Damaged(Exception):
    """A file is not what it should be; it is made again."""


class _Header(NamedTuple):
    magic: bytes
    key: bytes
    format: int
    item_bytes: int
    """Of an id."""
    per_row: int
    """Documents that each row became."""
    rows: int
    data_bytes: int
    index_crc: int

    def packed(self) -> bytes:
        told = _STRUCT.pack(*self)
        return (told + _CRC.pack(zlib.crc32(told))).ljust(_HEADER_BYTES, b"\0")

    @classmethod
    def read(cls, data: bytes) -> "_Header":
        told = data[: _STRUCT.size]
        if len(data) < _HEADER_BYTES or _CRC.unpack_from(data, _STRUCT.size)[0] != zlib.crc32(told):
            raise Damaged("its header is damaged")
        return cls(*_STRUCT.unpack(told))


class TokenFile:
    """A whole file, opened. Indices of documents: those of row r are r · per_row, r · per_row + 1, and so on."""

    def __init__(self, path: Path, key: str, rows: int, per_row: int) -> None:
        """
        Raises:
            FileNotFoundError: there is none.
            Damaged: it is another one than was asked for, or not whole.
        """
        try:
            with open_plain(path) as stream:
                size = os.fstat(stream.fileno()).st_size
                header = _Header.read(stream.read(_HEADER_BYTES))
                self._map = mmap.mmap(stream.fileno(), size, access=mmap.ACCESS_READ)
        except ArtifactError as error:  # a link, a folder
            raise Damaged(str(error)) from error
        if (header.magic, header.format) != (MAGIC, FORMAT) or header.item_bytes not in (2, 4):
            raise Damaged("it is of another format")
        if (header.key, header.rows, header.per_row) != (bytes.fromhex(key), rows, per_row):
            raise Damaged(f"it holds {header.per_row} documents of {header.rows} rows each under the key {header.key.hex()[:12]}, and not "
                          f"{per_row} of {rows} under {key[:12]}")  # fmt: skip
        index_bytes = 12 * rows * per_row
        if size != _HEADER_BYTES + index_bytes + header.data_bytes:
            raise Damaged(f"it has {size} bytes")
        index = memoryview(self._map)[_HEADER_BYTES : _HEADER_BYTES + index_bytes]
        if zlib.crc32(index) != header.index_crc:
            raise Damaged("its index is damaged")
        self.path = path
        self._dtype = np.dtype(f"<u{header.item_bytes}")
        self._index_D3 = np.frombuffer(index, dtype="<u4").reshape(-1, 3)
        sizes_D = record_bytes(self._index_D3[:, 0].astype(np.int64), header.item_bytes)
        if sizes_D.sum() != header.data_bytes:
            raise Damaged("its documents do not add up to its size")
        ends_D = np.cumsum(sizes_D) + _HEADER_BYTES + index_bytes
        self._begins_D, self._sizes_D = ends_D - sizes_D, sizes_D
        self._proven_D = np.zeros(len(sizes_D), dtype=np.bool_)

    @property
    def lengths_D(self) -> np.ndarray:
        """Tokens of each document."""
        return self._index_D3[:, 0]

    @property
    def trained_D(self) -> np.ndarray:
        """Trained tokens of each document, the first token left out."""
        return self._index_D3[:, 1]

    def document(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """(ids, packed bits of what is trained): views into the file.

        Raises:
            Damaged: they are not what was written.
        """
        begin, size, (length, _, crc) = int(self._begins_D[number]), int(self._sizes_D[number]), self._index_D3[number].tolist()
        record = np.frombuffer(self._map, dtype=np.uint8, count=size, offset=begin)
        if not self._proven_D[number]:
            if zlib.crc32(record.data) != crc:
                raise Damaged(f"document {number} is damaged")
            self._proven_D[number] = True
        border = length * self._dtype.itemsize
        return record[:border].view(self._dtype), record[border : border + -(-length // 8)]


class TokenWriter:
    """A file that grows by documents."""

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
        """Writes what stands before the data."""
        assert self._written == len(self._index_D3), f"{self._written} of {len(self._index_D3)} documents"
        index = self._index_D3.tobytes()
        told = (MAGIC, bytes.fromhex(self._key), FORMAT, self._dtype.itemsize, self._per_row, self._rows, self._data_bytes)
        self._stream.seek(0)
        self._stream.write(_Header(*told, zlib.crc32(index)).packed() + index)
        self._stream.close()

    def close(self) -> None:
        self._stream.close()


@contextmanager
def written(path: Path, key: str, rows: int, per_row: int, dtype: np.dtype[Any], writer: str) -> Iterator[TokenWriter]:
    """A file that is in its place after the block, and not there at all where the block raises. What killed writers have left goes.

    Args:
        path, key, rows, per_row, dtype: of the file.
        writer: a name that no other living writer of this file has.
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
        growing.close()  # which may fail too, where the disk is full


def _sweep(own: Path, prefix: str) -> None:
    """Deletes unfinished files of writers with this one's name, and those that have not grown for long by the clock of the disk."""
    now = own.stat().st_mtime
    for path in own.parent.glob(f".*{UNFINISHED}"):
        with suppress(FileNotFoundError):
            if path != own and (path.name.startswith(prefix) or now - path.stat().st_mtime > ABANDONED_S):
                path.unlink()
