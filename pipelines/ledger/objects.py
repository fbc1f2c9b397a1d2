"""Objects behind DVC's outputs: names, sizes, and verification of their bytes."""

import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pedigree.data.store.hashing import LONG_BYTES, Beat, pieces, silent
from pedigree.pipelines.ledger.transfers import Bytes


def damaged(out: Any, beat: Beat = silent) -> list[Path]:
    """Cache objects behind an output whose bytes do not match their name; `beat` reports bytes hashed and total bytes."""
    from dvc_data.hashfile.tree import Tree

    obj: Any = out.obj or out.get_obj()
    members: Any = obj if isinstance(obj, Tree) else ()
    oids = {str(hash_info.value) for _, _, hash_info in members}
    paths = {oid: Path(out.cache.oid_to_path(oid)) for oid in sorted({*oids, str(obj.oid)})}
    tell = Bytes(beat, sum(path.stat().st_size for path in paths.values() if path.exists())).add
    return [path for oid, path in paths.items() if md5_of(path, tell) != oid.removesuffix(".dir")]


def hash_unknown(state: Any, parts: Iterable[Any], beat: Beat) -> tuple[dict[Path, str], dict[Path, dict[str, Any]]]:
    """MD5 of files of DVC's outputs and dependencies that its database does not know, if there is much to hash.

    Args:
        state: the database.
        parts: the outputs and dependencies.
        beat: reports bytes hashed and total bytes.

    Returns:
        (MD5 of each file, metadata of each file before it was read)
    """
    from dvc_objects.fs.local import LocalFileSystem

    fs = LocalFileSystem()
    looks = {path: fs.info(str(path)) for part in parts for path in files_of(Path(part.fs_path))}
    if sum(look["size"] for look in looks.values()) < LONG_BYTES:
        return {}, looks
    asked = state.get_many(list(map(str, looks)), fs, {str(path): look for path, look in looks.items()})
    unknown = [Path(path) for path, _, known in asked if known is None]
    size = sum(looks[path]["size"] for path in unknown)
    if size < LONG_BYTES:
        return {}, looks
    tell = Bytes(beat, size).add
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        found = dict(zip(unknown, pool.map(lambda path: md5_of(path, tell), unknown), strict=True))
    return {path: md5 for path, md5 in found.items() if md5}, looks


def plain(value: Any) -> Any:
    """Convert ordered and commented mappings to plain ones, to compare by content."""
    if isinstance(value, Mapping):
        return {str(name): plain(inner) for name, inner in value.items()}
    return [plain(inner) for inner in value] if isinstance(value, (list, tuple)) else value


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


def remove(path: Path) -> None:
    """Remove a file or a folder, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def hash_info(oid: str | None) -> Any:
    """An object's name as a DVC HashInfo."""
    from dvc_data.hashfile.hash_info import HashInfo

    return HashInfo("md5", oid) if oid else HashInfo()


def set_hash(dep: Any, md5: str) -> None:
    """Set the known hash of a dependency. DVC would treat one that is missing from the stage's entry in `dvc.lock` as a dependency of
    DVC 2, under another hash name.
    """
    dep.hash_name, dep.hash_info, dep.files, dep.obj = "md5", hash_info(md5), None, None


def oid_of(out: Any) -> str:
    return str(out.hash_info.value) if out.hash_info else ""


def size_of(stage: Any) -> int:
    return sum((out.meta.size if out.meta else 0) or 0 for out in stage.outs)


def files_of(place: Path) -> Iterator[Path]:
    """The files of a folder, or a file itself; none if the path does not exist."""
    if place.is_dir():
        yield from (path for path in place.rglob("*") if path.is_file())
    elif place.is_file():
        yield place
