"""Objects of DVC: their names, and the files that they are made of."""

import hashlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pedigree.data.store.hashing import pieces


def md5_of(path: Path, tell: Callable[[int], None] = lambda count: None) -> str | None:
    """MD5 of a file's current bytes, reporting the size of each piece read; None if there is no file."""
    found = hashlib.md5(usedforsecurity=False)
    try:
        for piece in pieces(path):
            found.update(piece)
            tell(len(piece))
    except FileNotFoundError:
        return None
    return found.hexdigest()


def md5_of_bytes(data: bytes) -> str:
    """The name of the object with these bytes."""
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


def hash_info(oid: str) -> Any:
    """An object's name as a DVC HashInfo."""
    from dvc_data.hashfile.hash_info import HashInfo

    return HashInfo("md5", oid)


def remove(path: Path) -> None:
    """Remove a file or a folder, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def files_of(place: Path) -> Iterator[Path]:
    """The files of a folder, or a file itself; none if the path does not exist."""
    if place.is_dir():
        yield from (path for path in place.rglob("*") if path.is_file())
    elif place.is_file():
        yield place
