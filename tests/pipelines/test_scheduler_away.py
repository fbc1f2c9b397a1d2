"""A scheduler that accepts no job for now, or is gone for good. The API of Ray's jobs is a small server here; `test_ray.py` has a Ray."""

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from commands import InProcessCommand
from running_lab import Lab
from sites import at_work
from waiting import until

from pedigree.data.store import heartbeat
from pedigree.pipelines.jobs import attempts, ray_launcher

PROFILE = "configs/execution/lab.yaml"


class Ray(ThreadingHTTPServer):
    """Accepts jobs unless it is `full`, and never starts them."""

    full = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.launcher = f"{{type: ray, address: 'http://127.0.0.1:{self.server_port}'}}"
        threading.Thread(target=self.serve_forever, args=(0.01,)).start()

    def leave(self) -> None:
        self.shutdown()
        self.server_close()


class Answer(BaseHTTPRequestHandler):
    server: Ray

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        full = self.server.full
        self.answer(500 if full else 200, b"No available agent to submit job, please try again later." if full else b"{}")

    def do_GET(self) -> None:
        found: dict[str, Any] = {"status": "PENDING"} if self.path.startswith("/api/jobs/") else {"data": {"result": {"result": []}}}
        self.answer(200, json.dumps(found).encode())

    def answer(self, code: int, body: bytes) -> None:
        self.send_response(code)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def ray() -> Iterator[Ray]:
    server = Ray()
    yield server
    server.leave()


@pytest.fixture
def lab(tmp_path: Path, ray: Ray, monkeypatch: pytest.MonkeyPatch) -> Lab:
    monkeypatch.setattr(attempts, "BACKOFF_S", (0.05,))
    monkeypatch.setattr(heartbeat, "SILENCE_S", 0.5)
    for name in ("ASK_S", "AWAY_S"):
        monkeypatch.setattr(ray_launcher, name, 0.05)
    lab = Lab(tmp_path)
    lab.edit(PROFILE, "slots: 1,", f"slots: 1, launcher: {ray.launcher},")
    return lab


def test_a_stage_whose_job_is_not_accepted_yet_is_listed_submitted_again_and_canceled(
    lab: Lab, ray: Ray, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray.full, type_ = True, InProcessCommand(lab)
    with at_work(lab) as work:
        until(lambda: work.shows("to accept its job: No available agent to submit job"))
        until(lambda: re.search(r"lab/raw +prepare_data +not submitted +queued +for Ray at ", type_("jobs")))  # between two tries
        ray.full = False
        until(lambda: work.shows("in Ray's queue as job "))
        work.leave()
        ray.full = True
    ray.leave()
    monkeypatch.setattr(attempts, "BACKOFF_S", (600.0,))  # between two tries when it is canceled
    with at_work(lab) as work:
        until(lambda: work.shows("to accept its job: "))
        assert "lab/raw" in type_("cancel", "raw")
        assert work.failure().cause == "cancelled"
    assert type_("jobs") == "no job is running\n"


def test_a_cluster_that_is_gone_holds_no_stage(lab: Lab, ray: Ray) -> None:
    with at_work(lab) as work:
        until(lambda: work.shows("in Ray's queue as job "))
        work.leave()
    ray.leave()
    lab.edit(PROFILE, f", launcher: {ray.launcher}", "")
    with at_work(lab) as work:
        assert work.outcome() == "ran"
