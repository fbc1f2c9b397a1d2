"""Parallel file hashing: one read per byte for both SHA-256 and MD5.

Pedigree's records use SHA-256; DVC names objects by MD5. `hashlib` releases the GIL.
"""

import hashlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from io import FileIO
from pathlib import Path
from typing import Any

Beat = Callable[[int, int], None]
"""Progress callback: (bytes done, total bytes)."""
PIECE_BYTES = 4 << 20
SMALL_BYTES = 1 << 20
"""Pieces up to this size are hashed in the same thread, because handing them over costs more."""
LONG_BYTES = 256 << 20
"""Progress is reported only for hashing or copying more than this."""


@dataclass(frozen=True)
class Hashed:
    """A file's hashes, and its stat fields from just before it was read."""

    size: int
    mtime_ns: int
    inode: int
    sha256: str
    md5: str = ""
    """Empty if not requested."""

    def is_of(self, path: Path) -> bool:
        """Whether the file's size, mtime and inode are unchanged."""
        try:
            found = path.stat()
        except FileNotFoundError:
            return False
        return (found.st_size, found.st_mtime_ns, found.st_ino) == (self.size, self.mtime_ns, self.inode)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def silent(done: int, size: int) -> None:
    """Report nothing."""


def pieces(path: Path) -> Iterator[memoryview]:
    """A file's bytes, piece by piece in one reused buffer."""
    with path.open("rb", buffering=0) as stream:
        yield from _pieces_of(stream)


def _pieces_of(stream: FileIO) -> Iterator[memoryview]:
    buffer = memoryview(bytearray(PIECE_BYTES))
    while count := stream.readinto(buffer):
        yield buffer[:count]


def hash_files(paths: Iterable[Path], *, md5: bool = False, beat: Beat = silent) -> dict[Path, Hashed]:
    """SHA-256 and optionally MD5 of every file; `beat` is called after each piece."""
    paths, cores = list(paths), len(os.sched_getaffinity(0))
    size, done, guard = (sum(path.stat().st_size for path in paths) if beat is not silent else 0), 0, threading.Lock()

    def report(count: int) -> None:
        nonlocal done
        with guard:
            done += count
            beat(done, size)

    with ThreadPoolExecutor(cores) as readers, ThreadPoolExecutor(cores) as helpers:
        return dict(zip(paths, readers.map(lambda path: _hash(path, md5, helpers, report), paths), strict=True))


def _hash(path: Path, with_md5: bool, helpers: ThreadPoolExecutor, report: Callable[[int], None]) -> Hashed:
    sha256, md5 = hashlib.sha256(), hashlib.md5(usedforsecurity=False)
    with path.open("rb", buffering=0) as stream:
        found = os.fstat(stream.fileno())  # of the file that is read, also where another one has just taken its place
        for piece in _pieces_of(stream):
            pending = helpers.submit(md5.update, piece) if with_md5 and len(piece) > SMALL_BYTES else None
            sha256.update(piece)
            if pending is not None:
                pending.result()
            elif with_md5:
                md5.update(piece)
            report(len(piece))
    return Hashed(found.st_size, found.st_mtime_ns, found.st_ino, sha256.hexdigest(), md5.hexdigest() if with_md5 else "")
