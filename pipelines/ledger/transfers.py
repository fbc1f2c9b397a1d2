"""Progress of transfers to and from a remote, and remedies for failed ones."""

import hashlib
import logging
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from tempfile import TemporaryFile
from typing import Any, BinaryIO

from fsspec.callbacks import Callback

from pedigree.configs.base.problems import PedigreeError
from pedigree.data.store.hashing import PIECE_BYTES, silent

ProgressCallback = Callable[[int, int], None]
"""Called with bytes transferred and total bytes."""


class LedgerError(PedigreeError):
    """A damaged `dvc.lock`, an output that git tracks, a missing object, or an error of DVC."""


class RemoteError(LedgerError):
    """The remote cannot be used; local files are unchanged."""


@dataclass(frozen=True)
class TransferProgress:
    """Progress callbacks for lengthy operations."""

    fetched: ProgressCallback = silent
    """Bytes fetched from the remote."""
    placed: ProgressCallback = silent
    """Files put into place."""
    hashed: ProgressCallback = silent
    """Bytes read and hashed."""


class Sum(Callback):
    """Sums what several threads move, bytes of each file or whole files, and reports the progress."""

    def __init__(self, progress: ProgressCallback, total: int) -> None:
        super().__init__()
        self.progress, self.total = progress, total
        self.moved, self.mutex = 0, threading.Lock()

    def add(self, count: int) -> None:
        with self.mutex:
            self.moved += count
            self.progress(min(self.moved, self.total), self.total)

    def branched(self, path_1: Any, path_2: Any, **_: Any) -> Callback:
        return Part(self)


class Part(Callback):
    """One file of a transfer, or a folder of files that are put into place."""

    def __init__(self, whole: Sum) -> None:
        super().__init__()
        self.whole = whole

    def relative_update(self, inc: int = 1) -> None:
        self.whole.add(inc)

    def absolute_update(self, value: int) -> None:
        self.whole.add(value - self.value)
        self.value = value


def remedy(error: BaseException) -> str:
    """Remedy for an error of a remote's storage."""
    name, text = type(error).__name__, str(error)
    if isinstance(error, PermissionError) or any(
        word in text or word in name for word in ("Credential", "AccessDenied", "Signature", "403")
    ):
        return "Check its credentials (AWS_ACCESS_KEY_ID and the like in the environment, or `dvc remote modify --local`)"
    if isinstance(error, FileNotFoundError):
        return "Create the bucket, or correct the URL with `dvc remote modify NAME url URL`"
    if any(word in text for word in ("SlowDown", "Throttl", "TooManyRequests", "503")):
        return "It is overloaded: wait, then run the command again"
    return "Check the network and its URL (`dvc remote list`), then run the command again"


def without_passwords(text: str) -> str:
    """Remove user and password from URLs in a text."""
    return re.sub(r"//[^/@\s]*@", "//", text)


def one_line(error: BaseException) -> str:
    """The message of an exception, in one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if isinstance(error, OSError) or type(error).__name__ in text else f"{type(error).__name__}: {text}"


@dataclass(frozen=True)
class RemoteObjects:
    """The objects of a DVC remote, by md5."""

    name: str
    odb: Any

    def exists(self, md5: str) -> bool:
        """Whether the remote holds an object; raises the library's errors if unreachable (fsspec's `exists` returns False then)."""
        try:
            self.odb.fs.info(self.odb.oid_to_path(md5))
        except FileNotFoundError:
            return False
        return True

    def open(self, md5: str) -> BinaryIO:
        return self.odb.fs.open(self.odb.oid_to_path(md5), "rb")

    def fetch(self, md5: str, limit: int | None) -> BinaryIO:
        """The verified bytes of an object, in a temporary file. Errors of the remote's library are left to the caller.

        Raises:
            RemoteError: it has more bytes than `limit`, or bytes that do not match its name.
        """
        found, size, held = hashlib.md5(usedforsecurity=False), 0, TemporaryFile()
        with self.open(md5) as stream:
            while piece := stream.read(PIECE_BYTES):
                found.update(piece)
                size += len(piece)
                if limit is not None and size > limit:
                    raise RemoteError(f"object {md5} of the remote {self.name!r} is too large (> {limit} bytes) to be a Pedigree file")
                held.write(piece)
        if found.hexdigest() != md5.removesuffix(".dir"):
            remedy = "`pedigree verify` lists all such objects"
            raise RemoteError(f"object {md5} of the remote {self.name!r} does not match its hash: {remedy}")
        held.seek(0)
        return held


@contextmanager
def last_error() -> Iterator[list[BaseException]]:
    """Collect the errors that DVC's transfer logs, instead of raising, for objects that it gives up."""
    found: list[BaseException] = []
    thread = threading.get_ident()

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.exc_info and record.exc_info[1] is not None and record.thread == thread:
                found.append(record.exc_info[1])

    logger, handler = logging.getLogger("dvc_data.hashfile.transfer"), Keep(logging.ERROR)
    logger.setLevel(logging.ERROR)
    logger.propagate = False
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)
