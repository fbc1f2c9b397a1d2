"""An S3 server with the faults of a real one: a proxy before it that throttles, cuts connections and answers late on demand.

    with s3_server("bucket") as url, faulty_store(url) as store:
        store.throttle(3)       # the next three requests are answered `503 SlowDown`
        store.cut_uploads(1)    # the next upload is reset in the middle of its body; the server never sees it, as S3 drops it
        ...                     # clients use store.url
        assert store.pending == 0

Faults wait for requests that fit and are used up one by one, in the order of their asking. `matching` is a part of
`METHOD PATH?QUERY`, e.g. `"partNumber=2"`.
"""

import logging
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import boto3
import pytest
from moto.server import ThreadedMotoServer

SLOW_DOWN = (
    b'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>SlowDown</Code>'
    b"<Message>Please reduce your request rate.</Message><RequestId>0</RequestId></Error>"
)
HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade", "proxy-connection", "expect"}

KEYS = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing", "AWS_DEFAULT_REGION": "us-east-1"}
"""For the environment of the server's clients."""

Kind = Literal["throttle", "cut_upload", "cut_download", "lose_answer", "delay"]


@dataclass(frozen=True)
class Fault:
    kind: Kind
    matching: str
    amount: float = 0
    """Seconds of a delay, least size of a body that is cut."""


class FaultyStore:
    """What tests say to the proxy, and what they learn from it."""

    def __init__(self, upstream_url: str) -> None:
        self.upstream = urlsplit(upstream_url)
        self.url = ""
        self.requests: list[str] = []
        """`METHOD PATH?QUERY` of all requests that came, in order."""
        self._faults: list[Fault] = []
        self._lock = threading.Lock()
        self.conditional = threading.Lock()
        """Held while the server obeys `If-None-Match`: unlike S3, moto looks and writes in two steps, and another may write in between."""

    def throttle(self, n: int, matching: str = "") -> None:
        """The next n requests get `503 SlowDown`."""
        self._add(Fault("throttle", matching), n)

    def cut_uploads(self, n: int, matching: str = "", at_least: int = 2) -> None:
        """The next n uploads of at least so many bytes are reset after half of their body; the server sees none of it."""
        self._add(Fault("cut_upload", matching, at_least), n)

    def cut_downloads(self, n: int, matching: str = "", at_least: int = 2) -> None:
        """The next n answers to GET of at least so many bytes are reset after half of their body."""
        self._add(Fault("cut_download", matching or "GET ", at_least), n)

    def lose_answers(self, n: int, matching: str = "") -> None:
        """The server obeys the next n requests; who asked sees a reset instead of the answer."""
        self._add(Fault("lose_answer", matching), n)

    def delay(self, seconds: float, n: int, matching: str = "") -> None:
        """The next n requests wait before they are passed on."""
        self._add(Fault("delay", matching, seconds), n)

    def forget(self) -> None:
        """No fault waits any more."""
        with self._lock:
            self._faults.clear()

    @property
    def pending(self) -> int:
        """Faults that no request has met yet."""
        with self._lock:
            return len(self._faults)

    def _add(self, fault: Fault, n: int) -> None:
        with self._lock:
            self._faults += [fault] * n

    def take(self, request: str, kinds: tuple[Kind, ...], size: int = 0) -> Fault | None:
        """The first fault of these kinds that fits a request; it is used up."""
        with self._lock:
            for fault in self._faults:
                if fault.kind in kinds and fault.matching in request and (fault.kind == "delay" or size >= fault.amount):
                    self._faults.remove(fault)
                    return fault
        return None


@contextmanager
def s3_server(*buckets: str, strict: bool = False) -> Iterator[str]:
    """A moto server on loopback with these empty buckets alone; yields its address.

    Args:
        buckets: names, at least three letters long.
        strict: from now on only keys of its own are accepted, of which there are none: every client has wrong credentials.
    """
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line per request
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    url = "http://{}:{}".format(*server.get_host_and_port())
    try:
        _post(f"{url}/moto-api/reset")  # servers of one process share their state
        client = boto3.client("s3", endpoint_url=url, aws_access_key_id="testing", aws_secret_access_key="testing", region_name="us-east-1")
        for bucket in buckets:
            client.create_bucket(Bucket=bucket)
        if strict:
            _post(f"{url}/moto-api/reset-auth", b"0")
        yield url
    finally:
        _post(f"{url}/moto-api/reset-auth", b"inf")
        server.stop()


def emptied(url: str, *buckets: str) -> None:
    """Leaves a server that several tests share with these empty buckets alone."""
    _post(f"{url}/moto-api/reset")
    for bucket in buckets:
        with urlopen(Request(f"{url}/{bucket}", method="PUT")):
            pass


def _post(url: str, body: bytes = b"") -> None:
    with urlopen(Request(url, data=body, headers={"Content-Type": "text/plain"})):
        pass


@contextmanager
def store_in_environment(*buckets: str) -> Iterator[FaultyStore]:
    """A server behind a proxy that can fail, with its address and its keys in the environment of this process and its children."""
    with pytest.MonkeyPatch.context() as patch, s3_server(*buckets) as url, faulty_store(url) as store:
        for name, value in {**KEYS, "AWS_ENDPOINT_URL": store.url}.items():
            patch.setenv(name, value)
        yield store


@contextmanager
def faulty_store(upstream_url: str) -> Iterator[FaultyStore]:
    """A proxy on loopback before a server; `url` of what it gives is the endpoint for clients."""
    store = FaultyStore(upstream_url)
    handler = type("Handler", (_Handler,), {"store": store})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    store.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield store
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    store: FaultyStore

    def _serve(self) -> None:
        request = f"{self.command} {self.path}"
        self.store.requests.append(request)
        late = self.store.take(request, ("delay",))
        if late:
            time.sleep(late.amount)  # the fault itself
        size = int(self.headers.get("Content-Length") or 0)
        if size and self.store.take(request, ("cut_upload",), size):
            self.rfile.read(size // 2)
            return self._reset()
        body = self._body(size)
        if self.store.take(request, ("throttle",)):
            return self._answer(503, {"Content-Type": "application/xml", "Content-Length": str(len(SLOW_DOWN))}, SLOW_DOWN)
        with self.store.conditional if "If-None-Match" in self.headers else nullcontext():
            status, headers, answer = self._pass_on(body)
        if self.store.take(request, ("lose_answer",)):
            return self._reset()
        if self.store.take(request, ("cut_download",), len(answer)):
            self._answer(status, headers, answer[: len(answer) // 2])
            return self._reset()
        self._answer(status, headers, answer)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _serve

    def _body(self, size: int) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(size)
        chunks = []
        while length := int(self.rfile.readline().split(b";")[0], 16):
            chunks.append(self.rfile.read(length))
            self.rfile.readline()
        while self.rfile.readline() not in (b"\r\n", b""):  # trailers
            pass
        return b"".join(chunks)

    def _pass_on(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
        upstream = HTTPConnection(self.store.upstream.hostname or "", self.store.upstream.port, timeout=60)
        try:
            # the Host header stays that of the client: it is part of what is signed
            headers = {name: value for name, value in self.headers.items() if name.lower() not in HOP_BY_HOP}
            headers["Content-Length"] = str(len(body))
            upstream.request(self.command, self.path, body=body, headers=headers)
            answer = upstream.getresponse()
            content = answer.read()
            kept = {name: value for name, value in answer.getheaders() if name.lower() not in HOP_BY_HOP}
            if self.command != "HEAD":
                kept = {name: value for name, value in kept.items() if name.lower() != "content-length"}
                kept["Content-Length"] = str(len(content))
            return answer.status, kept, content
        finally:
            upstream.close()

    def _answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
        self.wfile.flush()

    def _reset(self) -> None:
        """Ends the connection with a TCP reset."""
        self.close_connection = True
        linger = struct.pack("ii", 1, 0)
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.connection.close()

    def finish(self) -> None:
        try:
            super().finish()
        except (OSError, ValueError):  # after a reset there is nothing to flush to
            pass

    def log_message(self, *_: Any) -> None:
        pass
