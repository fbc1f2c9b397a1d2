"""Hashes of files: every byte is read once, several files at a time, SHA-256 and MD5 side by side.

SHA-256 stands in our records, MD5 is DVC's name for an object. `hashlib` lets other threads run while it works.
"""

import hashlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

Beat = Callable[[int, int], None]
"""Told of bytes done and bytes in all, from time to time."""
PIECE_BYTES = 4 << 20
SMALL_BYTES = 1 << 20
"""Handing a piece to another thread costs more than hashing this much."""
LONG_BYTES = 256 << 20
"""Hashing or copying less is done before anybody asks how far it is."""


@dataclass(frozen=True)
class Hashed:
    """What a file held, and what it looked like from outside just before it was read."""

    size: int
    mtime_ns: int
    inode: int
    sha256: str
    md5: str = ""
    """Empty where it was not asked for."""

    def is_of(self, path: Path) -> bool:
        """Whether the file still looks so: nothing that goes through the file system's front door has changed it."""
        try:
            found = path.stat()
        except FileNotFoundError:
            return False
        return (found.st_size, found.st_mtime_ns, found.st_ino) == (self.size, self.mtime_ns, self.inode)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def silent(done: int, size: int) -> None:
    """Tells nobody."""


def pieces(path: Path) -> Iterator[memoryview]:
    """A file's bytes, one piece after the other in one buffer."""
    buffer = memoryview(bytearray(PIECE_BYTES))
    with path.open("rb", buffering=0) as stream:
        while count := stream.readinto(buffer):
            yield buffer[:count]


def hash_files(paths: Iterable[Path], *, md5: bool = False, beat: Beat = silent) -> dict[Path, Hashed]:
    """SHA-256 of every file, and on demand MD5 of the same bytes; `beat` is called after each piece of a file."""
    paths, cores = list(paths), len(os.sched_getaffinity(0))
    size, done, guard = (sum(path.stat().st_size for path in paths) if beat is not silent else 0), 0, threading.Lock()

    def tell(count: int) -> None:
        nonlocal done
        with guard:
            done += count
            beat(done, size)

    with ThreadPoolExecutor(cores) as readers, ThreadPoolExecutor(cores) as helpers:
        return dict(zip(paths, readers.map(lambda path: _hash(path, md5, helpers, tell), paths), strict=True))


def _hash(path: Path, with_md5: bool, helpers: ThreadPoolExecutor, tell: Callable[[int], None]) -> Hashed:
    sha256, md5 = hashlib.sha256(), hashlib.md5(usedforsecurity=False)
    buffer = memoryview(bytearray(PIECE_BYTES))
    with path.open("rb", buffering=0) as stream:
        found = os.fstat(stream.fileno())
        while count := stream.readinto(buffer):
            piece = buffer[:count]
            beside = helpers.submit(md5.update, piece) if with_md5 and count > SMALL_BYTES else None
            sha256.update(piece)
            if beside is not None:
                beside.result()
            elif with_md5:
                md5.update(piece)
            tell(count)
    return Hashed(found.st_size, found.st_mtime_ns, found.st_ino, sha256.hexdigest(), md5.hexdigest() if with_md5 else "")
