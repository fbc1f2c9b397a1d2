"""DVC's repository of a project: opened once per thread, its lock, and its errors.

DVC's lock is held while an already hashed output goes into the cache and while `dvc.lock` is written. It is shared while DVC's files are
read, which writes nothing, and never held while a job runs. DVC's per-path locks are not taken, because their holder may be a `dvc repro`
that waits for this process; the stage's lease takes their place.
"""

import errno
import fcntl
import logging
import os
import sqlite3
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pedigree.configs.base.project import Project
from pedigree.data.store.untrusted import ArtifactError, open_plain
from pedigree.pipelines.ledger.dvc_private import untouched_repo, waiting_repo
from pedigree.pipelines.ledger.transfers import LedgerError

if TYPE_CHECKING:
    from dvc.repo import Repo


@contextmanager
def dvc_errors() -> Iterator[None]:
    """Convert DVC's various exceptions to one type."""
    from dvc.exceptions import DvcException
    from scmrepo.exceptions import SCMError

    try:
        yield
    except (DvcException, SCMError) as error:
        text = str(error).rstrip(".")
        look = "`git diff -- dvc.yaml .dvc artifacts` shows changes to its files, `dvc status -v` gives details"
        remedy = "run `git init` there, then the command again" if text.endswith("is not a git repository") else look
        raise LedgerError(f"DVC reports: {text}: {remedy}") from error
    except RecursionError as error:
        raise LedgerError("a file that DVC reads is nested too deeply, so DVC did not write it: restore it from git") from error
    except sqlite3.OperationalError as error:  # from its hash database
        if "full" in str(error):
            raise OSError(errno.ENOSPC, "DVC cannot update its hash database, the disk is full") from error
        raise LedgerError(f"DVC's hash database (core.site_cache_dir) failed: {error}") from error


class Repository:
    """DVC in one project. Safe to share between threads and processes."""

    def __init__(self, project: Project, *, looking: bool = False) -> None:
        """`looking`: write nothing in the project's folder, which may be read-only."""
        self.project, self.looking = project, looking
        self.mutex = threading.RLock()  # DVC's own lock polls every half second, even between threads
        self._local = threading.local()

    @property
    def repo(self) -> "Repo":
        """A repo per thread: DVC's objects are not thread-safe."""
        repo = getattr(self._local, "repo", None)
        if repo is None:
            for name in ("dvc", "dvc_data", "dvc_objects"):
                logging.getLogger(name).setLevel(logging.CRITICAL)  # no progress bars or notices from DVC
            repo = self._local.repo = self._opened()
        return repo

    def close(self) -> None:
        """Close what this thread has opened, at the end of the thread or of its work; it is reopened on demand.

        DVC's objects form reference cycles, so without this its databases stay open until garbage collection, and no other thread can close
        them.
        """
        repo = self._local.__dict__.pop("repo", None)
        if repo is not None:
            repo.close()

    @dvc_errors()
    def _opened(self) -> "Repo":
        # for root, a read-only hard link is no protection: one write in place would damage the cache too
        links = ["reflink", "copy"] if os.geteuid() == 0 else ["reflink", "hardlink", "copy"]
        config: dict[str, Any] = {"cache": {"type": links}}
        if not self.looking:
            return waiting_repo(self.project.root, config)
        private = None
        if not (self._private / "btime").exists():  # DVC has not been used here: it would create its folder, and knows no hashes yet
            self._elsewhere = tempfile.TemporaryDirectory(prefix="pedigree-dvc-")
            private = self._elsewhere.name
            config["core"] = {"site_cache_dir": private}
        repo = untouched_repo(self.project.root, config, private)
        repo.scm  # noqa: B018 - fails early if there is no git, as every other command does
        return repo

    @property
    def _private(self) -> Path:
        """Folder of DVC's locks."""
        return self.project.root / ".dvc" / "tmp"

    @contextmanager
    def locked(self) -> "Iterator[Repo]":
        """Hold DVC's lock for writing."""
        with self.mutex:
            repo = self.repo
            if repo.lock.is_locked:
                yield repo
            else:
                with repo.lock:
                    yield repo

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Share DVC's lock for reading, without touching anything."""
        with self.mutex, nullcontext() if self.repo.lock.is_locked else _shared(self._private / "lock"):
            yield


@contextmanager
def _shared(lock: Path) -> Iterator[None]:
    """Hold DVC's repository lock as one of many readers, once no writer holds it. Writes nothing, not even the lock file.

    Without a lock file, nothing has been written yet. Where it cannot be locked (`core.hardlink_lock`, some network disks), readers run
    unprotected: Pedigree replaces `dvc.lock` by rename, but DVC's own commands truncate it first.
    """
    with ExitStack() as stack:
        with suppress(OSError, ArtifactError):
            fcntl.flock(stack.enter_context(open_plain(lock)), fcntl.LOCK_SH)
        yield
