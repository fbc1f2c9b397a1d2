"""Durable writes and renames: a rename survives a power cut only if the renamed files and their folder are on disk."""

import os
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


def rename(source: Path, target: Path) -> None:
    """Rename durably; the source must already be on disk (`sync_tree`)."""
    os.rename(source, target)
    sync_folder(target.parent)
    if source.parent != target.parent:
        sync_folder(source.parent)
