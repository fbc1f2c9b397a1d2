"""A server on loopback that speaks chat completions, and does what a test tells it to."""

import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from models import start_job
from waiting import deadline, until

Handler = BaseHTTPRequestHandler


class Chats:
    """What arrived, and how it is answered."""

    def __init__(self, act: "Callable[[Chats, Handler, dict[str, Any]], None]") -> None:
        self.act = act
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.open = self.most_open = self.connections = 0
        self.lock = threading.Lock()
        self.ended = threading.Event()
        """Set at the end: whatever hangs may go."""
        self.base_url = ""

    def text(self, body: dict[str, Any]) -> str:
        return body["messages"][0]["content"]


class Gate:
    """What a server does that answers so many requests, and no more until the gate is opened."""

    def __init__(self, count: int, answer: "Callable[[Chats, Handler, dict[str, Any]], None]") -> None:
        self.count, self.answer = count, answer
        self.waited_at, self.opened = threading.Event(), threading.Event()
        self.lock, self.taken = threading.Lock(), 0
        self.answered: list[dict[str, Any]] = []
        """Questions, in this order; they need not have arrived in it."""

    def __call__(self, chats: Chats, handler: Handler, body: dict[str, Any]) -> None:
        with self.lock:
            self.taken += 1
            late = self.taken > self.count and not self.opened.is_set()
            self.answered += [] if late else [body]
        if late:
            self.waited_at.set()
            chats.ended.wait()
        else:
            self.answer(chats, handler, body)

    def end_job(self, chats: Chats, number: int, folder: Path, *args: Any, **placed: Any) -> int:
        """Starts a job, ends it by a signal when it waits here and has kept what it was answered, and opens the gate when all that it has
        asked has arrived; its exit code."""
        process = start_job(folder, *args, **placed)
        assert self.waited_at.wait(deadline(120))
        until(lambda: (folder / "chunks" / "answers.jsonl").read_text().count("\n") >= self.count, alive=lambda: process.poll() is None)
        os.killpg(process.pid, number)
        code = process.wait(timeout=deadline(60))
        until(lambda: chats.connections == chats.open)  # those left hang in a question; another may yet be read from one that was closed
        self.opened.set()
        return code


def send(handler: Handler, status: int, body: bytes, **headers: str) -> None:
    handler.send_response(status)
    for name, value in headers.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


def completion_of(text: str | None, **more: Any) -> bytes:
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": more.pop("finish_reason", "stop")}
    return json.dumps({"model": "judge-2024-08-06", "system_fingerprint": "fp_1", "choices": [choice], **more}).encode()


def say(handler: Handler, text: str | None, **more: Any) -> None:
    send(handler, 200, completion_of(text, **more))


@contextmanager
def chat_server(act: Callable[[Chats, Handler, dict[str, Any]], None]) -> Iterator[Chats]:
    """A server for the time of a `with` block."""
    chats = Chats(act)

    class Asked(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def setup(self) -> None:
            super().setup()
            with chats.lock:
                chats.connections += 1

        def finish(self) -> None:
            with chats.lock:
                chats.connections -= 1
            super().finish()

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with chats.lock:
                chats.bodies.append(body)
                chats.headers.append({**dict(self.headers), ":path": self.path})
                chats.open += 1
                chats.most_open = max(chats.most_open, chats.open)
            try:
                chats.act(chats, self, body)
            except (BrokenPipeError, ConnectionResetError):  # who asked has gone
                self.close_connection = True
            finally:
                with chats.lock:
                    chats.open -= 1

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Asked)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    chats.base_url = f"http://127.0.0.1:{server.server_port}/v1"
    try:
        yield chats
    finally:
        chats.ended.set()
        server.shutdown()
        server.server_close()
        thread.join()
