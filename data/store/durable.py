"""What a power cut must not take back: a rename is a promise only once the files it names and the folder itself are on the disk."""

import os
from pathlib import Path


def sync_folder(folder: Path) -> None:
    """Writes a folder's list of names to the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError:  # some network file systems cannot do it for folders, and do it for the rename itself
        pass
    finally:
        os.close(descriptor)


def sync_file(path: Path) -> None:
    """Writes a file to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Writes all files and folders below, and the folder, to the disk."""
    for path, _, names in os.walk(folder):
        for name in names:
            sync_file(Path(path) / name)
        sync_folder(Path(path))


def replace(source: Path, target: Path) -> None:
    """Puts a finished file into the place of another so that it lasts."""
    sync_file(source)
    os.replace(source, target)
    sync_folder(target.parent)


def rename(source: Path, target: Path) -> None:
    """Renames so that it lasts; what is renamed must be on the disk already (`sync_tree`)."""
    os.rename(source, target)
    sync_folder(target.parent)
    if source.parent != target.parent:
        sync_folder(source.parent)
