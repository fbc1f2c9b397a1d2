"""The door to object stores, against a real S3 server with faults before it, and against a folder."""

import errno
import hashlib
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from faulty_store import KEYS, FaultyStore, emptied, s3_server, store_in_environment

from pedigree.configs.base.stores import s3_object, store_url
from pedigree.data.store import durable, storage
from pedigree.data.store.storage import ContentChanged, StoreError

pytestmark = pytest.mark.integration

BODY = bytes(range(256)) * 1024 * 72
"""18 MB: two parts."""
SHA256 = hashlib.sha256(BODY).hexdigest()


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "PAUSES_S", (0.05, 0.05, 0.05))
    monkeypatch.setattr(storage, "CHECK_PAUSES_S", (0.05,))
    monkeypatch.setattr(storage, "PIECE", 8 << 20)


@pytest.fixture(scope="module", autouse=True)
def server() -> Iterator[FaultyStore]:
    with store_in_environment() as found:
        yield found


@pytest.fixture
def store(server: FaultyStore) -> FaultyStore:
    """An empty bucket and no faults."""
    emptied(server.upstream.geturl(), "bucket")
    server.forget()
    server.requests.clear()
    return server


@pytest.fixture(params=["s3", "folder"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "folder":
        return f"file://{tmp_path}/a folder"
    request.getfixturevalue("store")
    return "s3://bucket/prefix"


def names(url: str) -> list[str]:
    return [entry.name for entry in storage.entries(url)]


def large(folder: Path) -> Path:
    file = folder / "large"
    file.write_bytes(BODY)
    return file


def test_what_is_written_is_read_listed_and_removed(place, tmp_path):
    storage.check(place)
    assert names(place) == []
    storage.write(f"{place}/b/two", b"old")
    storage.write(f"{place}/b/two", b"22")
    storage.upload(large(tmp_path), f"{place}/b/large")
    storage.write(f"{place}/bb", b"1")
    assert [(entry.name, entry.size) for entry in storage.entries(f"{place}/b")] == [("large", len(BODY)), ("two", 2)]
    assert storage.read(f"{place}/b/two", 2) == b"22"
    with pytest.raises(ContentChanged, match="is too large"):
        storage.read(f"{place}/b/two", 1)
    beats = []
    storage.download(f"{place}/b/large", tmp_path / "got" / "large", SHA256, beat=lambda: beats.append(1))
    assert (tmp_path / "got" / "large").read_bytes() == BODY and len(beats) == 3
    storage.remove(f"{place}/b")
    assert names(place) == ["bb"]
    storage.remove(f"{place}/bb")
    assert names(place) == []


def test_of_many_who_create_one_succeeds(place):
    made: list[int] = []
    threads = [
        threading.Thread(target=lambda n=n: made.append(n) if storage.create(f"{place}/lease", f"{n}".encode()) else None) for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1 and storage.read(f"{place}/lease", 1) == f"{made[0]}".encode()


def test_another_content_is_refused_and_leaves_nothing(place, tmp_path):
    storage.write(f"{place}/file", BODY[:-1] + b"x")
    with pytest.raises(ContentChanged, match=f"sha256 .{{64}}, not {SHA256}"):
        storage.download(f"{place}/file", tmp_path / "got" / "file", SHA256)
    assert list((tmp_path / "got").iterdir()) == []
    with pytest.raises(StoreError, match="no such object"):
        storage.download(f"{place}/none", tmp_path / "got" / "file", SHA256)


def test_throttling_and_resets_are_waited_out_and_nothing_half_written_is_there(store, tmp_path):
    store.throttle(12)
    storage.write("s3://bucket/small", b"1")
    store.cut_uploads(7, matching="partNumber=2")
    storage.upload(large(tmp_path), "s3://bucket/large")
    store.cut_downloads(7, at_least=1 << 20)
    storage.download("s3://bucket/large", tmp_path / "got", SHA256)
    assert store.pending == 0 and (tmp_path / "got").read_bytes() == BODY and names("s3://bucket") == ["large", "small"]


def test_an_upload_that_fails_for_good_leaves_the_old_object_and_no_parts(store, tmp_path):
    storage.write("s3://bucket/large", b"old")
    store.cut_uploads(1000, matching="partNumber=2")
    with pytest.raises(StoreError, match=r"cannot be reached at http://127\.0\.0\.1"):
        storage.upload(large(tmp_path), "s3://bucket/large")
    assert storage.read("s3://bucket/large", 3) == b"old"
    assert sum("DELETE" in request and "uploadId" in request for request in store.requests) >= 4  # of each try


def test_a_lost_answer_does_not_make_the_winner_a_loser(store):
    store.lose_answers(1, matching="PUT ")
    assert storage.create("s3://bucket/lease", b"mine") and not storage.create("s3://bucket/lease", b"other")


def test_a_store_that_stays_busy_is_named_and_may_pass(store):
    store.throttle(1000)
    with pytest.raises(StoreError, match="busy") as failure:
        storage.check("s3://bucket/prefix")
    assert failure.value.passing


@pytest.mark.parametrize(
    ("environment", "url", "message"),
    [
        ({}, "s3://no-such-bucket/x", "s3://no-such-bucket/x: the bucket does not exist: create it"),
        ({"AWS_ACCESS_KEY_ID": None, "AWS_SECRET_ACCESS_KEY": None}, "s3://bucket/x", "there are no credentials"),
        ({"AWS_PROFILE": "nobody"}, "s3://bucket/x", "there are no credentials"),
        ({"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, "s3://bucket/x", "cannot be reached at http://127.0.0.1:9"),
    ],
)
def test_a_mistake_is_one_line_with_its_remedy(store, monkeypatch, environment, url, message):
    for name, value in {"AWS_EC2_METADATA_DISABLED": "true", **environment}.items():
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name)
    with pytest.raises(StoreError) as failure:
        storage.check(url)
    assert message in str(failure.value) and "\n" not in str(failure.value)


def test_wrong_keys_are_one_line_without_the_keys(monkeypatch):
    for name, value in {**KEYS, "AWS_ACCESS_KEY_ID": "somebodys-id", "AWS_SECRET_ACCESS_KEY": "somebodys-key"}.items():
        monkeypatch.setenv(name, value)
    with s3_server("bucket", strict=True) as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        with pytest.raises(StoreError, match="credentials are wrong or expired") as failure:
            storage.check("s3://bucket/x")
    assert "somebodys" not in str(failure.value) and not failure.value.passing


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setenv("AWS_NOT_SEEN_BEFORE", "1")  # clients are kept by environment
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(StoreError, match=r"s3fs is not installed .*: run `make setup`"):
        storage.check("s3://bucket/x")


def test_a_folder_that_may_not_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=r"file://.*/file/x: NotADirectoryError"):
        storage.check(f"file://{tmp_path}/file/x")


def test_urls_say_where_and_never_with_which_keys():
    assert store_url("s3://bucket/prefix/") == "s3://bucket/prefix" and store_url("file:///shared/runs") == "file:///shared/runs"
    for wrong in ("/folder", "s3://", "s3://B", "http://host/x", "file://host/x", "file:///"):
        with pytest.raises(ValueError, match=r"neither s3://BUCKET/PREFIX nor file:///FOLDER"):
            store_url(wrong)
    for secret in ("s3://id:key@bucket/x", "s3://bucket/x?secret=1"):
        with pytest.raises(ValueError, match="must not contain credentials") as failure:
            store_url(secret)
        assert secret not in str(failure.value)
    assert s3_object("s3://bucket/a/b.jsonl")
    with pytest.raises(ValueError, match="is not s3://BUCKET/KEY"):
        s3_object("s3://bucket")


def test_one_of_many_creates_a_file_also_without_hard_links_and_where_a_request_is_repeated(tmp_path, monkeypatch):
    link = os.link

    def unknown(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    def repeated(*given: Path) -> None:
        """As NFS does when the first response is lost."""
        link(*given)
        link(*given)

    for number, made in enumerate((link, unknown, repeated)):
        monkeypatch.setattr(os, "link", made)
        file = tmp_path / f"{number}"
        assert durable.create(file, b"mine") and not durable.create(file, b"other")
        assert file.read_bytes() == b"mine"
    assert len(list(tmp_path.iterdir())) == 3
