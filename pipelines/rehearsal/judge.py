"""A judge and writer on loopback for the rehearsal of recipes that ask an endpoint: it speaks as much of OpenAI's protocol as it is asked
by, and what it says follows from what it is asked, so that the same rehearsal ends in the same bytes."""

import json
import threading
from collections.abc import Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from configs.base.frozen import digest
from configs.judging.rephrasing import SAME
from configs.judging.rubrics import HIGHEST
from configs.judging.writing import CLOSE, OPEN
from data.artifacts.artifacts import write_text

PORT = "judge.port"
LONGEST = 4 << 20
"""Bytes of a request."""


def rating(messages: Any) -> int:
    """From 1 on, the same for the same question."""
    return 1 + int(digest(messages)[:8], 16) % HIGHEST


def answer(messages: Any) -> str:
    """A prompt where one is asked for, in words that no other one has; that two tasks differ where that is asked; else a line with a
    rating."""
    if f"{SAME}: no" in str(messages):
        return f"{SAME}: no"
    if OPEN not in str(messages):
        return f"Rating: {rating(messages)}"
    word = digest(messages)
    return f"{OPEN}\nTell me {word[:4]} {word[4:8]} {word[8:12]} {word[12:16]}\n{CLOSE}"


class Answering(BaseHTTPRequestHandler):
    """Whatever is asked is answered."""

    def do_POST(self) -> None:
        length = min(int(self.headers.get("Content-Length") or 0), LONGEST)
        try:
            asked: Any = json.loads(self.rfile.read(length))
        except ValueError:
            asked = {}
        asked = asked if isinstance(asked, Mapping) else {}
        message = {"role": "assistant", "content": answer(asked.get("messages"))}
        body = {"model": asked.get("model"), "choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}
        sent = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(sent)))
        self.end_headers()
        self.wfile.write(sent)

    def log_message(self, format: str, *args: Any) -> None:
        """Tells nobody."""


def serve(folder: Path) -> str:
    """Starts the judge in this process; returns its URL, which stays the same from one rehearsal to the next where its port is free."""
    kept, known = folder / PORT, 0
    with suppress(OSError, ValueError):
        known = int(kept.read_text())
    try:
        server = ThreadingHTTPServer(("127.0.0.1", known if 0 < known < 1 << 16 else 0), Answering)
    except OSError:  # another rehearsal has it
        server = ThreadingHTTPServer(("127.0.0.1", 0), Answering)
    write_text(kept, str(server.server_port))
    threading.Thread(target=server.serve_forever, daemon=True, name="judge").start()
    return f"http://127.0.0.1:{server.server_port}/v1"
