"""Object stores and shared folders, `s3://BUCKET/KEY` and `file:///PATH`; the only user of s3fs.

Credentials come from the usual AWS places (AWS_ACCESS_KEY_ID, AWS_PROFILE, AWS_ENDPOINT_URL, ~/.aws), never from a URL. Transient
errors (throttling, lost connections) are retried with growing pauses; every other error is raised with its remedy.
"""

import errno
import hashlib
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

from pedigree.configs.base.installation import set_up
from pedigree.configs.base.problems import PedigreeError
from pedigree.data.store import durable

PAUSES_S = (1.0, 5.0, 20.0)
"""Pauses before retries of transient errors; s3fs itself makes a few quick tries each time."""
CHECK_PAUSES_S = (1.0,)
"""Pauses for interactive checks."""
PIECE = 16 << 20
"""Bytes per ranged request."""

NOTHING = "there is no such object"
KEYS = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
REFUSED = {
    "NoSuchBucket": "the bucket does not exist: create it, or correct the URL or AWS_ENDPOINT_URL",
    "AccessDenied": "these credentials lack permission: grant list, read, write and delete, or use other credentials",
    **dict.fromkeys(
        ("InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "ExpiredToken", "AuthFailure"),
        f"the credentials are wrong or expired: {KEYS}",
    ),
    "403": f"the credentials are wrong or lack permission: {KEYS}",
    "PermanentRedirect": "the bucket is in another region: set AWS_DEFAULT_REGION",
    "AuthorizationHeaderMalformed": "the bucket is in another region: set AWS_DEFAULT_REGION",
}
"""Code of a permanent S3 error → message."""
BUSY = {"SlowDown", "Throttling", "ThrottlingException", "TooManyRequests", "RequestLimitExceeded", "ServiceUnavailable", "503"}
PASSING = BUSY | {"InternalError", "500", "502", "504", "RequestTimeout", "BadDigest", "IncompleteBody", "OperationAborted"}

LASTING = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG}

T = TypeVar("T")


class StoreError(PedigreeError):
    """A store cannot be used; the message names the URL and the remedy."""

    def __init__(self, message: str, passing: bool = False) -> None:
        self.passing = passing
        """Whether the error may be transient."""
        super().__init__(message)


class Missing(StoreError):
    """The object does not exist."""


class ContentChanged(StoreError):
    """The stored content is not the expected one."""


@dataclass(frozen=True)
class StoredObject:
    """One listed object."""

    name: str
    """Relative to the listed URL."""
    size: int


@dataclass(frozen=True)
class _Bucket:
    filesystem: Any

    def pieces(self, path: str) -> Iterator[bytes]:
        size = self.filesystem.info(path)["size"]
        for start in range(0, size, PIECE):
            yield self.filesystem.cat_file(path, start=start, end=min(start + PIECE, size))

    def write(self, path: str, data: bytes) -> None:
        self.filesystem.pipe_file(path, data)

    def create(self, path: str, data: bytes) -> bool:
        try:
            self.filesystem.pipe_file(path, data, mode="create")  # If-None-Match: *
        except FileExistsError:
            # after a lost response, the retry finds the object written by the first request
            return self.filesystem.cat_file(path) == data
        return True

    def upload(self, file: Path, path: str) -> None:
        largest = max(PIECE, file.stat().st_size // 9000)  # at most 10,000 parts
        self.filesystem.put_file(str(file), path, chunksize=largest, max_concurrency=4)

    def entries(self, path: str) -> list[StoredObject]:
        bucket, _, prefix = path.partition("/")
        found, more = [], {}
        while True:
            answer = self.filesystem.call_s3("list_objects_v2", Bucket=bucket, Prefix=f"{prefix}/" if prefix else "", **more)
            for entry in answer.get("Contents", ()):
                name = entry["Key"].removeprefix(prefix).lstrip("/")
                found.append(StoredObject(name, entry["Size"]))
            if not answer.get("IsTruncated"):
                return found
            more = {"ContinuationToken": answer["NextContinuationToken"]}

    def remove(self, path: str) -> None:
        for entry in self.entries(path):
            self.filesystem.rm_file(f"{path}/{entry.name}")
        self.filesystem.rm_file(path)


class _Folder:
    def pieces(self, path: str) -> Iterator[bytes]:
        with Path(path).open("rb") as stream:
            while piece := stream.read(PIECE):
                yield piece

    def write(self, path: str, data: bytes) -> None:
        with durable.replacing(Path(path)) as temporary:
            temporary.write_bytes(data)

    def create(self, path: str, data: bytes) -> bool:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        return durable.create(Path(path), data)

    def upload(self, file: Path, path: str) -> None:
        with durable.replacing(Path(path)) as temporary:
            shutil.copyfile(file, temporary)

    def entries(self, path: str) -> list[StoredObject]:
        root, found = Path(path), []
        for file in root.rglob("*"):
            if not file.name.startswith("."):
                try:
                    status = file.stat()
                except FileNotFoundError:  # removed in the meantime
                    continue
                if file.is_file():
                    found.append(StoredObject(file.relative_to(root).as_posix(), status.st_size))
        return found

    def remove(self, path: str) -> None:
        if Path(path).is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            Path(path).unlink(missing_ok=True)


Backend = _Bucket | _Folder
"""Paths are `BUCKET/KEY` or absolute file paths."""


def read(url: str, limit: int) -> bytes:
    """Read a small object. Raises Missing, or ContentChanged if it has more than `limit` bytes; reading stops there."""

    def bounded(backend: Backend, path: str) -> bytes:
        found = bytearray()
        for piece in backend.pieces(path):
            found += piece
            if len(found) > limit:
                raise ContentChanged(f"{url} is too large (more than {limit} bytes) to be a Pedigree file")
        return bytes(found)

    return _patiently(url, bounded)


def write(url: str, data: bytes) -> None:
    """Atomically write a small object, replacing any existing one."""
    _patiently(url, lambda backend, path: backend.write(path, data))


def create(url: str, data: bytes) -> bool:
    """Create a small object exclusively; False if it exists. Exactly one of several concurrent callers succeeds."""
    return _patiently(url, lambda backend, path: backend.create(path, data))


def upload(file: Path, url: str) -> None:
    """Upload a file atomically."""
    _patiently(url, lambda backend, path: backend.upload(file, path))


def download(url: str, file: Path, sha256: str, beat: Callable[[], None] = lambda: None) -> None:
    """Download an object of known hash into a file, whose folder is created; `beat` is called after each piece.

    Raises ContentChanged if the hash differs, and then leaves no file, or Missing.
    """

    def stream(backend: Backend, path: str) -> str:
        found = hashlib.sha256()
        with temporary.open("wb") as target:
            for piece in backend.pieces(path):
                found.update(piece)
                target.write(piece)
                beat()
        return found.hexdigest()

    with durable.replacing(file) as temporary:
        found = _patiently(url, stream)
        if found != sha256:
            raise ContentChanged(f"{url} has sha256 {found}, not {sha256}: it was changed or replaced; restore the original")


def entries(url: str) -> list[StoredObject]:
    """All objects below a URL, sorted by name; empty if there are none."""
    return sorted(_patiently(url, lambda backend, path: backend.entries(path)), key=lambda entry: entry.name)


def remove(url: str) -> None:
    """Remove an object, or all objects below a URL."""
    _patiently(url, lambda backend, path: backend.remove(path))


def check(url: str) -> None:
    """Check that objects can be written, listed and removed below a URL, by doing so."""

    def prove(backend: Backend, path: str) -> None:
        probe = f"{path}/probe-{uuid.uuid4().hex}"
        backend.write(probe, b"written by pedigree to see whether it may\n")
        backend.entries(probe)
        backend.remove(probe)

    _patiently(url, prove, CHECK_PAUSES_S)


# --- errors ------------------------------------------------------------------------------------------------------------


def _patiently(url: str, call: Callable[[Backend, str], T], pauses: tuple[float, ...] | None = None) -> T:
    for pause in (*(PAUSES_S if pauses is None else pauses), None):
        try:
            with _explained(url):
                return call(*_open(url))
        except StoreError as error:
            if pause is None or not error.passing:
                raise
            time.sleep(pause)
    raise AssertionError("the last try returns or raises")


@contextmanager
def _explained(url: str) -> Iterator[None]:
    """Turn client exceptions into a StoreError that names the URL, which never contains credentials."""
    try:
        yield
    except StoreError:
        raise
    except Exception as error:  # boundary to botocore, aiohttp, s3fs and the file system, each with its own exceptions
        message, passing = _reason(error)
        if message == NOTHING:
            raise Missing(f"{url}: {message}") from error
        raise StoreError(f"{url}: {message}", passing) from error


def _reason(error: BaseException) -> tuple[str, bool]:
    """(problem and remedy, whether it may be transient)"""
    code = next((found for link in _chain(error) if (found := _code(link))), "")
    name = type(error).__name__
    if code in REFUSED:
        return REFUSED[code], False
    if code in PASSING:
        return ("the store is busy (throttled)" if code in BUSY else f"the store failed ({code})") + ": retry later", True
    if isinstance(error, ImportError):
        return f"s3fs is not installed ({error}): {set_up('pip install s3fs')}", False
    if name in ("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "TokenRetrievalError"):
        return f"there are no credentials ({error}): {KEYS}", False
    if isinstance(error, FileNotFoundError):
        return NOTHING, False
    if isinstance(error, PermissionError):
        return f"permission denied ({error}): grant this user read and write access", False
    modules = ("botocore", "aiobotocore", "aiohttp")
    if isinstance(error, (ConnectionError, TimeoutError)) or type(error).__module__.split(".")[0] in modules:
        where = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        return f"the store cannot be reached{f' at {where}' if where else ''} ({name}): check the network and AWS_ENDPOINT_URL", True
    return f"{name}: {error}", isinstance(error, OSError) and error.errno not in LASTING


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _code(error: BaseException) -> str:
    answer = getattr(error, "response", None)
    return str(answer.get("Error", {}).get("Code", "")) if isinstance(answer, dict) else ""


def _open(url: str) -> tuple[Backend, str]:
    parts = urlsplit(url)
    if parts.scheme == "file":
        return _Folder(), unquote(parts.path)
    settings = tuple(sorted((name, value) for name, value in os.environ.items() if name.startswith("AWS_")))
    return _Bucket(_filesystem(os.getpid(), settings)), f"{parts.netloc}{parts.path}"


@cache
def _filesystem(pid: int, settings: tuple[tuple[str, str], ...]) -> Any:
    """One client per environment and process (its event loop does not survive a fork)."""
    import s3fs

    environment = dict(settings)
    retries = {"mode": "standard", "total_max_attempts": 1}  # s3fs tries five times itself, and `_patiently` retries
    return s3fs.S3FileSystem(
        endpoint_url=environment.get("AWS_ENDPOINT_URL_S3") or environment.get("AWS_ENDPOINT_URL"),
        config_kwargs={"connect_timeout": 10, "read_timeout": 60, "retries": retries},
        use_listings_cache=False,
        skip_instance_cache=True,
    )
