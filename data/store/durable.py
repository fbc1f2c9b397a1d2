"""Durable writes and renames: a rename survives a power cut only if the renamed files and their folder are on disk."""

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def sync_folder(folder: Path) -> None:
    """Fsync a folder's entries."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError:  # some network file systems cannot fsync folders; they persist renames on their own
        pass
    finally:
        os.close(descriptor)


def sync_file(path: Path) -> None:
    """Fsync a file."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Fsync a folder and all files and folders below it."""
    for path, _, names in os.walk(folder):
        for name in names:
            sync_file(Path(path) / name)
        sync_folder(Path(path))


def replace(source: Path, target: Path) -> None:
    """Durably replace a file with a finished one."""
    sync_file(source)
    os.replace(source, target)
    sync_folder(target.parent)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path to write to in the same folder, which is created. The file there durably replaces `path` if the block succeeds."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        yield temporary
        replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def rename(source: Path, target: Path) -> None:
    """Rename durably; the source must already be on disk (`sync_tree`)."""
    os.rename(source, target)
    sync_folder(target.parent)
    if source.parent != target.parent:
        sync_folder(source.parent)


def create(path: Path, data: bytes) -> bool:
    """Durably create a file, which appears with all its content; False if it exists. Exactly one of several concurrent callers succeeds."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    temporary.write_bytes(data)
    sync_file(temporary)
    try:
        os.link(temporary, path)
    except FileExistsError:
        if temporary.stat().st_nlink != 2:  # NFS repeats a request whose response was lost: then the link is ours
            return False
    except OSError:  # no hard links here
        try:
            with path.open("xb") as stream:
                stream.write(data)
        except FileExistsError:
            return False
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)
    return True
