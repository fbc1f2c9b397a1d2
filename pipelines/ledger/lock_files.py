"""Read DVC files that a branch or a remote may have supplied: lock files and run cache entries."""

import fcntl
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from pedigree.data.store.untrusted import LOCK_BYTES, ArtifactError, open_plain, parse_entry, parse_yaml, read_plain

RUN_ENTRY = re.compile(r"runs/[0-9a-f]{2}/[0-9a-f]{64}/[0-9a-f]{64}")
"""Path of a run cache entry, in the cache and in the remote."""


def read_lock(path: Path) -> str:
    """The text of a `dvc.lock`, a `dvc.yaml` or a `.dvc` file; empty if there is none.

    Raises:
        ArtifactError: it is not a regular file, or far too long.
    """
    return read_plain(path, LOCK_BYTES).decode(errors="replace") if os.path.lexists(path) else ""


def read_run_entry(path: Path) -> Mapping[str, Any] | None:
    """A run cache entry that DVC would accept; None for anything else, such as a partial entry left by a kill."""
    try:
        value = parse_yaml(read_plain(path, LOCK_BYTES).decode(), path.name)
        parse_entry(value, path.name)
    except (ArtifactError, UnicodeDecodeError):
        return None
    return value if isinstance(value, dict) else None


@contextmanager
def shared(lock: Path) -> Iterator[None]:
    """Hold DVC's repository lock as one of many readers, once no writer holds it. Writes nothing, not even the lock file.

    Without a lock file, nothing has been written yet. Where it cannot be locked (`core.hardlink_lock`, some network disks), readers run
    unprotected: Pedigree replaces `dvc.lock` by rename, but DVC's own commands truncate it first.
    """
    with ExitStack() as stack:
        with suppress(OSError, ArtifactError):
            fcntl.flock(stack.enter_context(open_plain(lock)), fcntl.LOCK_SH)
        yield


def state_of(path: Path) -> tuple[int, int, int] | None:
    """File metadata that changes whenever the file does; None if there is no file."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size
