"""Local stand-in for the endpoint of a judge or writer in rehearsals.

Implements the part of OpenAI's protocol that Pedigree uses. Responses are a deterministic function of the request, so that rehearsals are
reproducible.
"""

import json
import threading
from collections.abc import Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from pedigree.configs.base.frozen import digest
from pedigree.configs.judging.rephrased import SAME
from pedigree.configs.judging.synthesis import CLOSE, OPEN
from pedigree.configs.methods.rubrics import HIGHEST
from pedigree.data.artifacts.artifacts import write_text

PORT = "judge.port"
LONGEST = 4 << 20
"""Maximum bytes read of a request."""


def rating(messages: Any) -> int:
    """Deterministic rating, starting at 1."""
    return 1 + int(digest(messages)[:8], 16) % HIGHEST


def answer(messages: Any) -> str:
    """Respond to a writing request with a unique prompt, to a same-task question with no, and to anything else with a rating."""
    if f"{SAME}: no" in str(messages):
        return f"{SAME}: no"
    if OPEN not in str(messages):
        return f"Rating: {rating(messages)}"
    word = digest(messages)
    return f"{OPEN}\nTell me {word[:4]} {word[4:8]} {word[8:12]} {word[12:16]}\n{CLOSE}"


class Answering(BaseHTTPRequestHandler):
    """Answers every request."""

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
        """Suppress request logs."""


def serve(folder: Path) -> str:
    """Start the judge in this process; returns its URL, which is stable across rehearsals if the port is free."""
    port_file, known = folder / PORT, 0
    with suppress(OSError, ValueError):
        known = int(port_file.read_text())
    try:
        server = ThreadingHTTPServer(("127.0.0.1", known if 0 < known < 1 << 16 else 0), Answering)
    except OSError:  # the port is in use, e.g. by another rehearsal
        server = ThreadingHTTPServer(("127.0.0.1", 0), Answering)
    write_text(port_file, str(server.server_port))
    threading.Thread(target=server.serve_forever, daemon=True, name="judge").start()
    return f"http://127.0.0.1:{server.server_port}/v1"
