"""Files of DVC's that a branch or a remote may have brought: lock files and entries of the run cache."""

import fcntl
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from data.store.untrusted import LOCK_BYTES, ArtifactError, open_plain, parse_entry, parse_yaml, read_plain

RUN_ENTRY = re.compile(r"runs/[0-9a-f]{2}/[0-9a-f]{64}/[0-9a-f]{64}")
"""Where an entry of the run cache lies, in the cache and in the remote."""


def read_lock(path: Path) -> str:
    """The text of a `dvc.lock`, a `dvc.yaml` or a `.dvc` file; empty where there is none.

    Raises:
        ArtifactError: it is no plain file, or far too long.
    """
    return read_plain(path, LOCK_BYTES).decode(errors="replace") if os.path.lexists(path) else ""


def read_run_entry(path: Path) -> Mapping[str, Any] | None:
    """An entry of the run cache as DVC takes it; None for what is none: half of one, left by a kill, or another's work."""
    try:
        value = parse_yaml(read_plain(path, LOCK_BYTES).decode(), path.name)
        parse_entry(value, path.name)
    except (ArtifactError, UnicodeDecodeError):
        return None
    return value if isinstance(value, dict) else None


@contextmanager
def shared(lock: Path) -> Iterator[None]:
    """Holds DVC's repository lock with others who read, once nobody holds it who writes. Nothing is written, not even the lock file.

    Where there is none, nobody has written yet. Where it cannot be locked (`core.hardlink_lock`, some network disks), who reads takes its
    chance: we replace a `dvc.lock` by rename, DVC's own commands truncate it first.
    """
    with ExitStack() as stack:
        with suppress(OSError, ArtifactError):
            fcntl.flock(stack.enter_context(open_plain(lock)), fcntl.LOCK_SH)
        yield


def state_of(path: Path) -> tuple[int, int, int] | None:
    """What changes when a file does; None where there is none."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size
