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
from waiting import deadline, until

from pedigree.configs.base.project import Project
from pedigree.data.artifacts.artifacts import write_json
from pedigree.data.store import heartbeat
from pedigree.pipelines.jobs import attempts, ray_launcher
from pedigree.pipelines.jobs.live import Signs, live_jobs
from pedigree.pipelines.jobs.ray_launcher import RayLauncher, problem_of
from pedigree.pipelines.jobs.scratch_state import Handle
from pedigree.pipelines.run.runs import run_graph

PROFILE = "configs/execution/lab.yaml"


class Ray(ThreadingHTTPServer):
    """Accepts jobs unless it is `full`, and never starts them."""

    full = False
    status = "PENDING"
    """Of every job."""
    nodes: tuple[str, ...] = ()
    """States of its nodes of eight GPUs."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.address = f"http://127.0.0.1:{self.server_port}"
        self.launcher = f"{{type: ray, address: '{self.address}'}}"
        self.jobs, self.asked = list[str](), list[str]()
        threading.Thread(target=self.serve_forever, args=(0.01,)).start()

    def leave(self) -> None:
        self.shutdown()
        self.server_close()


class Answer(BaseHTTPRequestHandler):
    server: Ray

    def do_POST(self) -> None:
        body, full = json.loads(self.rfile.read(int(self.headers["Content-Length"]))), self.server.full
        if self.path.endswith("/stop"):
            self.server.status = "STOPPED"
        elif not full:
            self.server.jobs.append(body["submission_id"])
        self.answer(500 if full else 200, b"No available agent to submit job, please try again later." if full else b"{}")

    def do_GET(self) -> None:
        nodes = [{"state": state, "labels": {}, "resources_total": {"GPU": 8.0}} for state in self.server.nodes]
        found: Any = {"data": {"result": {"result": nodes if "/nodes" in self.path else []}}}
        if self.path == "/api/jobs/":
            job = {"status": self.server.status, "driver_exit_code": 1 if self.server.status == "FAILED" else None, "message": ""}
            found = [{"submission_id": name, **job} for name in self.server.jobs]
        self.server.asked.append(self.path.partition("?")[0])
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
    monkeypatch.setattr(ray_launcher, "SILENCE_S", 0.5)
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


def test_a_cluster_that_leaves_while_a_job_waits_in_its_queue_costs_no_retry(lab: Lab, ray: Ray) -> None:
    lab.edit(PROFILE, "retries: 1", "retries: 0")
    with at_work(lab) as work:
        until(lambda: work.shows("in Ray's queue as job "))
        ray.leave()
        until(lambda: work.shows("to accept its job: "))


def test_a_job_of_another_cluster_than_the_profiles_takes_no_slots_here(lab: Lab, ray: Ray) -> None:
    lab.edit(PROFILE, "slots: 1,", "slots: 9,")
    with at_work(lab) as work:
        until(lambda: work.shows("in Ray's queue as job "))
        work.leave()
    lab.edit(PROFILE, f"slots: 9, launcher: {ray.launcher}", "slots: 1")
    with at_work(lab) as work:
        until(lambda: work.shows("in Ray's queue as job "))


def test_what_is_canceled_before_its_scheduler_lists_it_leaves_the_queue(lab: Lab, ray: Ray) -> None:
    with at_work(lab) as work:
        until(lambda: work.shows("in Ray's queue as job "))
        (scratch,) = lab.root.glob(".pedigree/scratch/*")
        write_json(scratch / attempts.CANCELLED, {"by": "a test"})
        assert work.failure().cause == "cancelled"
    assert ray.status == "STOPPED"


def test_a_job_that_ended_without_a_report_is_gone_once_that_was_waited_for(lab: Lab, ray: Ray) -> None:
    with at_work(lab) as work:
        until(lambda: work.shows("in Ray's queue as job "))
        work.leave()
    ray.status, signs = "FAILED", Signs(lab.project)
    assert [job.address for job in live_jobs(lab.project, signs)] == ["lab/raw"]
    assert signs.listen(lambda: live_jobs(lab.project, signs)) == []


def test_stages_in_a_queue_keep_none_of_this_machine_from_starting(lab: Lab) -> None:
    """As many as the profile has slots wait in the queue for good."""
    source = "{type: arithmetic, operations: [add], digits: [1], count: 1, seed: 3}"
    other = f"  other: {{kind: prepare_data, record: item, task: a, sources: [{source}]}}\n"
    lab.edit("configs/recipes/lab.yaml", "  clean:\n", f"{other}  clean:\n")
    lab.write(PROFILE, (lab.root / PROFILE).read_text() + "stages: {other: {placement: {launcher: {type: local}}}}\n")
    cancelled, seen = threading.Event(), list[tuple[str, str]]()
    run = lab.run(cancelled=cancelled, watch=lambda address, state, detail: seen.append((address, state)))
    thread = threading.Thread(target=run_graph, args=(run,))
    thread.start()
    try:
        until(lambda: {("lab/suite", "waiting"), ("lab/raw", "waiting"), ("lab/other", "ran")} <= set(seen))
    finally:
        cancelled.set()
        thread.join(deadline(60))


def test_one_query_shows_the_states_of_all_jobs(tmp_path: Path, ray: Ray, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_launcher, "ASK_S", float("inf"))
    ray.jobs = [f"{number:032x}" for number in range(3)]
    launcher, told = RayLauncher(Project(tmp_path)), {"address": ray.address}
    handles = [Handle(launcher="ray", scratch=str(tmp_path), attempt=1, told=told | {"token": job}) for job in ray.jobs]
    assert [launcher.poll(handle).state for handle in handles * 2] == ["queued"] * 6
    assert ray.asked == ["/api/jobs/", "/api/v0/placement_groups"]


def test_lost_nodes_of_a_cluster_are_none(ray: Ray) -> None:
    ray.nodes = ("ALIVE", "DEAD", "DEAD", "DEAD")
    assert problem_of(ray.address, 1, (("GPU", 8),)) is None
    said = problem_of(ray.address, 4, (("GPU", 8),))
    assert said and "has 1 of 4 nodes with {GPU: 8}" in said
