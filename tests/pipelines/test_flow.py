"""A run as a Prefect flow: a real server, real jobs, real kills."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from running_lab import Lab
from test_cli import Command, step_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


class Server:
    """A Prefect server on loopback, asked over its API."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}/api"
        folder.mkdir()
        self.environment = {"PREFECT_HOME": str(folder), "PREFECT_SERVER_ANALYTICS_ENABLED": "false", "DO_NOT_TRACK": "1"}
        command = [str(Path(sys.executable).parent / "prefect"), "server", "start", "--host", "127.0.0.1", "--port", str(port)]
        self.process = subprocess.Popen(
            command, env={**os.environ, **self.environment}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        deadline = time.monotonic() + 120
        while not self._healthy():
            assert self.process.poll() is None and time.monotonic() < deadline, "the Prefect server did not start"
            time.sleep(0.5)

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return answer.status == 200
        except OSError:
            return False

    def ask(self, what: str, **filters: Any) -> list[dict[str, Any]]:
        return self.post(f"{what}/filter", {name: {"id": {"any_": [value]}} for name, value in filters.items()})

    def post(self, path: str, body: Any) -> Any:
        data = json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}/{path}", data=data, headers={"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=20) as answer:
            return json.load(answer)

    def last_run(self) -> dict[str, Any]:
        return self.post("flow_runs/filter", {"sort": "START_TIME_DESC", "limit": 1})[0]

    def states(self, run: dict[str, Any]) -> dict[str, str]:
        """Task name → state, once Prefect has stored the last event."""
        found: dict[str, str] = {}
        for _ in range(60):
            found = {task["name"]: task["state_name"] for task in self.ask("task_runs", flow_runs=run["id"])}
            if found and not {"Pending", "Running"} & set(found.values()):
                break
            time.sleep(0.5)
        return found

    def messages(self, run: dict[str, Any]) -> str:
        rows = self.post("logs/filter", {"logs": {"flow_run_id": {"any_": [run["id"]]}}, "limit": 200})
        return "\n".join(row["message"] for row in rows)

    def stop(self) -> None:
        os.killpg(self.process.pid, signal.SIGTERM)
        self.process.wait(30)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    made = Server(tmp_path_factory.mktemp("prefect") / "home")
    yield made
    made.stop()


@pytest.fixture
def command(tmp_path, server) -> Command:
    made = Command(Lab(tmp_path))
    made.environment |= server.environment | {"PREFECT_API_URL": server.url}
    return made


def test_a_failed_stage_fails_the_flow_says_why_and_lets_the_others_finish(command, server):
    command.lab.knobs(raw={"fail": "these rows are bad"})
    text = command("run", "lab", code=1)
    assert "lab/raw failed (refused): these rows are bad" in text
    run = server.last_run()
    assert run["name"] == "lab" and run["state_type"] == "FAILED" and "these rows are bad" in run["state"]["message"]
    assert server.states(run) == {"suite": "Completed", "raw": "Failed", "clean": "NotReady", "cleaner": "NotReady"}
    log = server.messages(run)
    assert "last lines of its log" in log and "StageError: these rows are bad" in log

    command.lab.knobs(clean={"seconds": 14})
    command("run", "lab")
    run = server.last_run()
    assert run["state_type"] == "COMPLETED" and set(server.states(run).values()) == {"Completed"}
    artifacts = {row["key"]: row for row in server.post("artifacts/filter", {"artifacts": {"flow_run_id": {"any_": [run["id"]]}}})}
    assert artifacts["lab-clean"]["type"] == "progress" and float(artifacts["lab-clean"]["data"]) == 100.0
    assert artifacts["lab-raw-counts"]["type"] == "table"
    assert "nothing to do" in command("run", "lab")
    assert server.last_run()["id"] == run["id"]  # nothing to do is no flow run


def test_a_retry_is_told_with_its_reason(command, server):
    command.lab.knobs(raw={"crash": 1})
    text = command("run", "lab", "--until", "raw")
    assert "attempt 2 after: it was killed by signal 9" in text
    assert "attempt 2 after: it was killed by signal 9" in server.messages(server.last_run())


def test_ctrl_c_crashes_the_flow_and_leaves_no_process(command, server):
    command.lab.knobs(clean={"seconds": 60, "child": True})
    process = command.until("run", "lab", ready=lambda: step_of(command.lab, "clean") > 1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "The same command goes on from there" in out and "Traceback" not in err
    assert not command.jobs() and server.last_run()["state_type"] == "CRASHED"
    assert not list((command.lab.root / ".pedigree" / "flows").glob("*.json"))


def test_cancelling_in_prefect_ends_the_jobs(command, server):
    command.lab.knobs(clean={"seconds": 60})
    process = command.until("run", "lab", ready=lambda: step_of(command.lab, "clean") > 1)
    run = server.last_run()
    server.post(f"flow_runs/{run['id']}/set_state", {"state": {"type": "CANCELLING", "name": "Cancelling"}, "force": True})
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1 and "lab/clean failed (cancelled)" in err
    assert not command.jobs() and server.last_run()["state_type"] == "CANCELLED"


def test_a_run_that_was_killed_is_told_to_have_crashed_and_its_job_is_taken_over(command, server):
    command.lab.knobs(clean={"seconds": 25})
    process = command.until("run", "lab", ready=lambda: step_of(command.lab, "clean") > 1)
    process.kill()
    process.communicate(timeout=30)
    killed = server.last_run()
    assert killed["state_type"] == "RUNNING" and command.jobs()
    assert "job of an earlier run" in command("run", "lab")
    assert command.lab.runs().count("clean") == 1
    (found,) = server.ask("flow_runs", flow_runs=killed["id"])
    assert found["state_type"] == "CRASHED" and "died without a word" in found["state"]["message"]
    assert server.last_run()["state_type"] == "COMPLETED"


def test_without_a_server_the_same_run_needs_nothing_but_the_project(tmp_path):
    command = Command(Lab(tmp_path))
    for name in [name for name in command.environment if name.startswith("PREFECT_")]:
        del command.environment[name]
    home = str(command.lab.root / ".pedigree" / "prefect")
    command.lab.knobs(clean={"seconds": 4})
    process = command.until("run", "lab", ready=lambda: step_of(command.lab, "clean") > 1)
    assert any("uvicorn" in line for line in processes_with(home))
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and "starting Prefect" in text and text.count("✓") == 4
    assert (command.lab.root / ".pedigree" / "prefect" / "prefect.db").is_file()
    assert command.lab.contents().keys() == {"suite", "raw", "clean", "cleaner"}
    assert not processes_with(home)


def processes_with(text: str) -> list[str]:
    """Processes whose environment holds the text, e.g. a server that was started for a run."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                if text.encode() in (folder / "environ").read_bytes():
                    found.append((folder / "cmdline").read_text().replace("\0", " "))
            except OSError:
                continue
    return found


def test_the_hook_ends_the_jobs_of_a_flow_run_from_another_process(command, server):
    command.lab.knobs(clean={"seconds": 60})
    process = command.until("run", "lab", ready=lambda: step_of(command.lab, "clean") > 1)
    process.kill()
    process.communicate(timeout=30)
    run = server.last_run()
    hook = (
        "from types import SimpleNamespace as N; from pipelines.flow import end_jobs; import sys\n"
        "end_jobs(None, N(id=sys.argv[1], parameters={'project': sys.argv[2]}), None)"
    )
    arguments = [sys.executable, "-c", hook, run["id"], str(command.lab.root)]
    subprocess.run(arguments, cwd=command.lab.root, env=command.environment, check=True, capture_output=True)
    assert not command.jobs()
