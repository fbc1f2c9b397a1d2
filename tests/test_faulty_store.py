"""The faulty store itself: each fault is met by exactly the requests it is for, and the server keeps nothing of a cut upload."""

from collections.abc import Iterator
from typing import Any

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError, ConnectionError, HTTPClientError
from faulty_store import KEYS, FaultyStore, faulty_store, s3_server


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyStore]:
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    with s3_server("bucket") as url, faulty_store(url) as store:
        yield store


def client(store: FaultyStore, attempts: int = 1) -> Any:
    return boto3.client("s3", endpoint_url=store.url, config=Config(retries={"total_max_attempts": attempts}))


def keys(store: FaultyStore) -> list[str]:
    return [entry["Key"] for entry in client(store).list_objects_v2(Bucket="bucket").get("Contents", [])]


def test_it_passes_on_what_it_is_given(store):
    body = bytes(range(256)) * 4096
    client(store).put_object(Bucket="bucket", Key="a b/c", Body=body)
    assert client(store).get_object(Bucket="bucket", Key="a b/c")["Body"].read() == body
    assert client(store).head_object(Bucket="bucket", Key="a b/c")["ContentLength"] == len(body) and keys(store) == ["a b/c"]
    with pytest.raises(ClientError, match="NoSuchKey"):
        client(store).get_object(Bucket="bucket", Key="none")


def test_throttling_counts_down(store):
    store.throttle(2)
    for _ in range(2):
        with pytest.raises(ClientError, match="SlowDown"):
            client(store).put_object(Bucket="bucket", Key="k", Body=b"1234")
    assert keys(store) == [] and store.pending == 0
    client(store).put_object(Bucket="bucket", Key="k", Body=b"1234")
    store.throttle(1, matching="PUT ")
    assert keys(store) == ["k"] and store.pending == 1
    client(store, attempts=3).put_object(Bucket="bucket", Key="k", Body=b"5678")
    assert client(store).get_object(Bucket="bucket", Key="k")["Body"].read() == b"5678" and store.pending == 0


def test_a_cut_upload_leaves_nothing_behind(store):
    store.cut_uploads(1)
    with pytest.raises((ConnectionError, HTTPClientError)):
        client(store).put_object(Bucket="bucket", Key="k", Body=b"x" * 100_000)
    assert keys(store) == []


def test_a_cut_part_of_a_multipart_upload_is_one_request(store):
    store.cut_uploads(1, matching="partNumber=2")
    upload = client(store).create_multipart_upload(Bucket="bucket", Key="k")["UploadId"]
    part = {"Bucket": "bucket", "Key": "k", "UploadId": upload, "Body": b"x" * (5 << 20)}
    client(store).upload_part(PartNumber=1, **part)
    with pytest.raises((ConnectionError, HTTPClientError)):
        client(store).upload_part(PartNumber=2, **part)
    assert keys(store) == [] and store.pending == 0


def test_a_cut_download_gives_half_a_body_and_a_reset(store):
    client(store).put_object(Bucket="bucket", Key="k", Body=b"x" * 1_000_000)
    store.cut_downloads(1, at_least=1000)
    with pytest.raises((ConnectionError, HTTPClientError)):
        client(store).get_object(Bucket="bucket", Key="k")["Body"].read()


def test_a_lost_answer_is_of_a_request_that_was_obeyed(store):
    store.lose_answers(1)
    with pytest.raises((ConnectionError, HTTPClientError)):
        client(store).put_object(Bucket="bucket", Key="k", Body=b"1234")
    assert keys(store) == ["k"]


def test_a_strict_server_refuses_keys(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "someone")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "else")
    with s3_server("bucket", strict=True) as url, faulty_store(url) as store:
        with pytest.raises(ClientError, match="InvalidAccessKeyId"):
            keys(store)
