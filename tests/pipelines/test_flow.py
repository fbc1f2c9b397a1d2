"""A run as a Prefect flow: a real server, real jobs, real kills."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import pytest
from chaos_prefect import PREFECT, PrefectServer
from commands import Command, step_of
from running_lab import REPOSITORY, Lab
from waiting import deadline, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
STAGES = 4
T = TypeVar("T")


def seen(condition: Callable[[], T]) -> T:
    """Asks the server a question, after a pause that leaves it time for other work: it has no way to call back."""
    time.sleep(0.2)
    return condition()


class Server(PrefectServer):
    """A Prefect server on loopback, asked over its API."""

    def ask(self, what: str, **filters: Any) -> list[dict[str, Any]]:
        return self.post(f"{what}/filter", {name: {"id": {"any_": [value]}} for name, value in filters.items()})

    def post(self, path: str, body: Any) -> Any:
        return json.loads(self.call("POST", path, json.dumps(body).encode()))

    def call(self, method: str, path: str, data: bytes | None = None) -> bytes:
        request = urllib.request.Request(f"{self.url}/{path}", data, {"Content-Type": "application/json"}, method=method)

        def answer() -> list[bytes]:
            try:
                with urllib.request.urlopen(request, timeout=deadline(60)) as found:
                    return [found.read()]
            except urllib.error.HTTPError as error:  # its database is locked for a moment, now and then
                if error.code != 503:
                    raise
                return []
            except TimeoutError as error:
                stacks = self.stacks()
                self.start()  # for the other tests
                raise AssertionError(f"the Prefect server hangs at {method} {path}\n{stacks}") from error

        return (answer() or until(lambda: seen(answer)))[0]

    def until_shown(self, run: dict[str, Any], stages: int) -> None:
        """Waits until a flow run has all its task runs."""
        until(lambda: seen(lambda: len(self.ask("task_runs", flow_runs=run["id"])) == stages))

    def last_run(self, command: Command) -> dict[str, Any]:
        """The last flow run of a lab: its first one comes when Prefect has been imported, a while after the first job has started."""

        def found() -> list[dict[str, Any]]:
            runs = self.post("flow_runs/filter", {"sort": "START_TIME_DESC", "limit": 10})
            return [run for run in runs if run["parameters"]["project"] == str(command.lab.root)]

        return until(lambda: seen(found))[0]

    def states(self, run: dict[str, Any]) -> dict[str, str]:
        """Task name → state, once Prefect has stored the last event of each of a lab's stages."""

        def found() -> dict[str, str]:
            states = {task["name"]: task["state_name"] for task in self.ask("task_runs", flow_runs=run["id"])}
            return states if len(states) == STAGES and not {"Pending", "Running"} & set(states.values()) else {}

        return until(lambda: seen(found))

    def artifacts(self, command: Command) -> dict[str, dict[str, Any]]:
        """Those of a lab's last flow run, by key."""
        found = self.post("artifacts/filter", {"artifacts": {"flow_run_id": {"any_": [self.last_run(command)["id"]]}}})
        return {row["key"]: row for row in found}

    def messages(self, run: dict[str, Any]) -> str:
        rows = self.post("logs/filter", {"logs": {"flow_run_id": {"any_": [run["id"]]}}, "limit": 200})
        return "\n".join(row["message"] for row in rows)

    def state(self, flow_run: str) -> dict[str, Any]:
        return self.ask("flow_runs", flow_runs=flow_run)[0]["state"]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    made = Server(tmp_path_factory.mktemp("prefect") / "home")
    yield made
    made.stop()


@pytest.fixture
def command(tmp_path, server) -> Command:
    made = Command(Lab(tmp_path))
    made.environment |= server.environment
    return made


def show_progress_at_once(lab: Lab) -> None:
    """Otherwise only a stage that runs for long has its progress shown."""
    shown = lab.code / "pipelines/prefect/shown.py"
    text, count = re.subn(r"^ARTIFACT_INTERVAL_S = .*$", "ARTIFACT_INTERVAL_S = 0.1", shown.read_text(), flags=re.MULTILINE)
    assert count == 1
    shown.write_text(text)


def test_a_failed_stage_fails_the_flow_says_why_and_lets_the_others_finish(command, server):
    stage = command.lab.code / "stages" / "prepare_data" / "run.py"
    counting = '(job.evidence / "counts.json").write_text(json.dumps({"read": 9, "kept": 9}))'
    stage.write_text(stage.read_text().replace("    hold(job)\n    return", f"    hold(job)\n    {counting}\n    return"))
    command.lab.knobs(raw={"fail": "these rows are bad"})
    text = command("run", "lab", code=1)
    assert "lab/raw failed (refused): these rows are bad" in text
    run = server.last_run(command)
    assert run["name"] == "lab" and run["state_type"] == "FAILED" and "these rows are bad" in run["state"]["message"]
    assert server.states(run) == {"suite": "Completed", "raw": "Failed", "clean": "NotReady", "cleaner": "NotReady"}
    until(lambda: seen(lambda: "last lines of its log" in (log := server.messages(run)) and "StageError: these rows are bad" in log))

    show_progress_at_once(command.lab)
    command.lab.knobs(clean={"hold": "go"})
    process = command.until("run", "lab", ready=lambda: seen(lambda: "lab-clean" in server.artifacts(command)))
    (command.lab.root / "go").touch()
    out, err = process.communicate(timeout=deadline(120))
    assert process.returncode == 0, out + err
    run = server.last_run(command)
    assert run["state_type"] == "COMPLETED"
    assert server.states(run) == {"suite": "Cached", "raw": "Completed", "clean": "Completed", "cleaner": "Completed"}
    artifacts = server.artifacts(command)
    assert artifacts["lab-clean"]["type"] == "progress" and float(artifacts["lab-clean"]["data"]) == 100.0
    assert artifacts["lab-raw-counts"]["type"] == "table"
    assert "nothing to do" in command("run", "lab")
    assert server.last_run(command)["id"] == run["id"]  # nothing to do is no flow run


@pytest.mark.nightly
def test_a_retry_is_told_with_its_reason(command, server):
    command.lab.knobs(raw={"crash": 1})
    text = command("run", "lab", "--until", "raw")
    assert "attempt 2 after: the job was killed by signal 9" in text
    until(lambda: seen(lambda: "attempt 2 after: the job was killed by signal 9" in server.messages(server.last_run(command))))


def test_ctrl_c_cancels_the_flow_run_and_leaves_no_process(command, server):
    command.lab.knobs(clean={"seconds": 60, "child": True})
    process = command.until("run", "lab", ready=lambda: step_of(command.lab, "clean") > 1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=deadline(60))
    assert process.returncode == 130 and "Run the same command again to resume" in out and "Traceback" not in err
    run = server.last_run(command)
    assert not command.jobs() and run["state_type"] == "CANCELLED" and run["state"]["message"].startswith("interrupted")
    assert not list((command.lab.root / ".pedigree" / "flows").glob("*.json"))


def test_cancelling_in_prefect_ends_the_jobs(command, server):
    command.lab.knobs(clean={"seconds": 60})
    process = command.until("run", "lab", ready=lambda: step_of(command.lab, "clean") > 1)
    run = server.last_run(command)
    server.post(f"flow_runs/{run['id']}/set_state", {"state": {"type": "CANCELLING", "name": "Cancelling"}, "force": True})
    _, err = process.communicate(timeout=deadline(60))
    assert process.returncode == 1 and "lab/clean failed (cancelled)" in err
    assert not command.jobs() and server.last_run(command)["state_type"] == "CANCELLED"


def test_a_run_that_was_killed_is_told_to_have_crashed_and_its_job_is_taken_over(command, server):
    command.lab.knobs(clean={"hold": "go"})
    process = command.until("run", "lab", ready=(command.lab.root / "go.waiting").exists)
    killed = server.last_run(command)
    process.kill()
    process.communicate()
    assert killed["state_type"] == "RUNNING" and command.jobs()
    (command.lab.root / "go").touch()
    assert "job of an earlier run" in command("run", "lab")
    assert command.lab.runs().count("clean") == 1
    (found,) = server.ask("flow_runs", flow_runs=killed["id"])
    assert found["state_type"] == "CRASHED" and "died unexpectedly" in found["state"]["message"]
    assert server.last_run(command)["state_type"] == "COMPLETED"


# --- a server that goes away --------------------------------------------------------------------------------------------


def test_a_server_that_is_killed_ends_no_job_and_is_told_all_when_it_is_back(command, server, tmp_path):
    text = tmp_path / "said"
    command.environment["PYTHONUNBUFFERED"] = "1"
    command.lab.knobs(raw={"hold": "raw goes"}, clean={"hold": "clean goes"})
    with text.open("w") as stdout:
        process = command.until("run", "lab", ready=(command.lab.root / "raw goes.waiting").exists, stdout=stdout)
    run = server.last_run(command)
    server.kill()
    try:
        (command.lab.root / "raw goes").touch()
        until((command.lab.root / "clean goes.waiting").exists)  # a stage has ended and another has begun meanwhile
        until(lambda: "Prefect does not answer" in text.read_text())
    finally:
        server.start()
    until(lambda: "Prefect is reachable again" in text.read_text())
    (command.lab.root / "clean goes").touch()
    _, err = process.communicate(timeout=deadline(120))
    out = text.read_text()
    assert process.returncode == 0, out + err
    assert out.count("Prefect does not answer") == 1 and out.count("Prefect is reachable again") == 1 and "Traceback" not in out + err
    assert sorted(command.lab.runs()) == ["clean", "cleaner", "raw", "suite"]  # each once
    assert server.last_run(command)["id"] == run["id"] and server.state(run["id"])["type"] == "COMPLETED"
    assert set(server.states(run).values()) == {"Completed"} and len(server.states(run)) == 4


@pytest.mark.nightly
def test_a_server_that_hangs_holds_nothing_up_and_the_next_run_tells_it_the_end(command, server):
    command.lab.knobs(clean={"seconds": 10})
    process = command.until("run", "lab", ready=lambda: step_of(command.lab, "clean") > 1)
    run = server.last_run(command)
    server.until_shown(run, 4)
    server.signal(signal.SIGSTOP)
    try:
        out, err = process.communicate(timeout=deadline(90))
    finally:
        server.kill()  # with the requests that it has not read
        server.start()
    assert process.returncode == 0 and out.count("✓") == 4, out + err
    assert "the end of this run could not be reported to Prefect; the next run will report it" in out + err
    assert server.state(run["id"])["type"] == "RUNNING"
    command("run", "lab", "--force", "cleaner")
    assert server.state(run["id"])["type"] == "COMPLETED" and set(server.states(run).values()) == {"Completed"}
    assert not list((command.lab.root / ".pedigree" / "flows").glob("*.json"))


@pytest.mark.nightly
def test_a_server_that_has_lost_its_memory_is_told_the_run_anew(command, server):
    command.lab.knobs(clean={"hold": "go"})
    process = command.until("run", "lab", ready=(command.lab.root / "go.waiting").exists)
    lost = server.last_run(command)["id"]
    server.call("DELETE", f"flow_runs/{lost}")
    until(lambda: server.last_run(command)["id"] != lost)
    (command.lab.root / "go").touch()
    out, err = process.communicate(timeout=deadline(120))
    assert process.returncode == 0, out + err
    run = server.last_run(command)
    assert run["id"] != lost and run["state_type"] == "COMPLETED" and set(server.states(run).values()) == {"Completed"}


def test_no_server_there_at_all_is_said_once_and_the_run_is_made(tmp_path):
    command = Command(Lab(tmp_path))
    command.environment |= {"PREFECT_API_URL": "http://127.0.0.1:9/api", "PEDIGREE_PREFECT": "auto", "PREFECT_HOME": str(tmp_path / "home")}
    text = command("run", "lab", "--until", "suite")
    assert "note: Prefect does not answer ([Errno 111] Connection refused); the run continues without it (http://127.0.0.1:9/api)" in text
    text = command("run", "lab", "--prefect", "always", code=1)
    assert "--prefect always: " in text and "Nothing was run" in text and command.lab.runs() == ["suite"]


# --- under a worker -----------------------------------------------------------------------------------------------------


@pytest.fixture
def worker(command, server):
    """Starts a flow run of a deployment as a worker does; returns its id and the worker's process."""
    started: list[subprocess.Popen[bytes]] = []

    def start() -> tuple[str, subprocess.Popen[bytes]]:
        pull = [{"prefect.deployments.steps.set_working_directory": {"directory": str(command.lab.code)}}]
        flow = server.post("flows/", {"name": "post-train"})["id"]
        about = {"name": command.lab.root.parent.name, "flow_id": flow, "entrypoint": "pipelines/flow.py:post_train", "pull_steps": pull}
        deployment = server.post("deployments/", about)["id"]
        parameters = {"recipe": "lab", "project": str(command.lab.root)}
        run = server.post(f"deployments/{deployment}/create_flow_run", {"parameters": parameters})["id"]
        process = subprocess.Popen(
            [PREFECT, "flow-run", "execute", run],
            cwd=command.lab.code, env=command.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        started.append(process)
        until(lambda: is_at_work(command) or process.poll() is not None, 90)
        assert process.poll() is None, process.communicate()[0].decode()
        return run, process

    yield start
    for process in started:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def is_at_work(command: Command) -> bool:
    return step_of(command.lab, "clean") > 1 or (command.lab.root / "go.waiting").exists()


def flow_process(run: str) -> int:
    """The process that a worker has started for a flow run."""
    (pid,) = [int(line.split()[0]) for line in processes_with(run) if "prefect.engine" in line or "prefect.flow_engine" in line]
    return pid


@pytest.mark.nightly
def test_a_deployments_run_is_cancelled_with_its_jobs(command, server, worker):
    command.lab.knobs(clean={"seconds": 60})
    run, process = worker()
    server.post(f"flow_runs/{run}/set_state", {"state": {"type": "CANCELLING", "name": "Cancelling"}, "force": True})
    process.communicate(timeout=deadline(90))
    assert not command.jobs() and server.state(run)["type"] == "CANCELLED"


@pytest.mark.nightly
def test_a_worker_that_is_killed_ends_no_job(command, server, worker):
    """What its flow run writes to then is a broken pipe."""
    command.lab.knobs(clean={"seconds": 8})
    run, process = worker()
    process.kill()
    assert process.stdout is not None
    process.stdout.close()
    until(lambda: seen(lambda: server.state(run)["type"] not in ("RUNNING", "PENDING")), 90)
    assert server.state(run)["type"] == "COMPLETED" and command.lab.runs().count("clean") == 1


@pytest.mark.nightly
def test_a_server_that_is_killed_under_a_worker_ends_no_job_and_is_told_all_when_it_is_back(command, server, worker):
    """The process of the worker and that of the flow run lose it; a stage ends and another begins meanwhile."""
    command.lab.knobs(clean={"seconds": 5}, cleaner={"hold": "go"})
    run, process = worker()
    server.kill()
    try:
        until((command.lab.root / "go.waiting").exists, 60)
        assert process.poll() is None and command.jobs()
    finally:
        server.start()
    (command.lab.root / "go").touch()
    said = process.communicate(timeout=deadline(120))[0].decode()
    assert process.returncode == 0 and "Prefect does not answer" in said and "Prefect is reachable again" in said, said
    assert server.state(run)["type"] == "COMPLETED" and set(server.states({"id": run}).values()) == {"Completed"}
    assert sorted(command.lab.runs()) == ["clean", "cleaner", "raw", "suite"]  # each once


@pytest.mark.nightly
def test_a_flow_process_that_is_killed_ends_no_job_and_the_next_run_goes_on_with_it(command, server, worker):
    command.lab.knobs(clean={"hold": "go"})
    run, process = worker()
    os.kill(flow_process(run), signal.SIGTERM)
    process.communicate(timeout=deadline(60))
    assert server.state(run)["name"] == "AwaitingRetry" and command.jobs()
    (command.lab.root / "go").touch()
    assert "job of an earlier run" in command("run", "lab")
    assert command.lab.runs().count("clean") == 1


# --- no server ----------------------------------------------------------------------------------------------------------


def test_without_a_server_no_server_is_started_and_prefect_is_not_imported(tmp_path):
    command = Command(Lab(tmp_path))
    for name in [name for name in command.environment if name.startswith(("PREFECT_", "PEDIGREE_PREFECT"))]:
        del command.environment[name]
    command.environment |= {"HOME": str(tmp_path / "home"), "PYTHONPROFILEIMPORTTIME": "1"}
    command.lab.knobs(clean={"seconds": 4})
    with (tmp_path / "imports").open("w") as imports:  # more than fits into a pipe that nobody reads
        process = command.until("run", "lab", ready=lambda: step_of(command.lab, "clean") > 1, stderr=imports)
        ours = [line for line in processes_with(str(command.lab.code)) if " -m " in line]
        assert sorted(line.split(" -m ")[1].split()[0] for line in ours) == ["pedigree.pipelines.cli", "pedigree.stages"]
        out, _ = process.communicate(timeout=deadline(60))
    lines = (tmp_path / "imports").read_text().splitlines()
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in lines if line.startswith("import time:")}
    assert process.returncode == 0 and out.count("✓") == 4
    assert "pedigree" in imported and not imported & {"prefect", "httpx", "sqlalchemy", "fastapi"}
    command.environment.pop("PYTHONPROFILEIMPORTTIME")
    text = command("run", "lab", "--prefect", "always", "--force", "cleaner", code=2)
    assert "no Prefect server is configured" in text and "prefect config set PREFECT_API_URL" in text


WAYS: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "nothing": ({}, {}),
    "environment": ({"PREFECT_API_URL": "http://a/api"}, {".env": "PREFECT_API_URL=http://b/api"}),
    "dotenv": ({}, {".env": 'PREFECT_API_URL="http://b/api"', "prefect.toml": '[api]\nurl = "http://c/api"'}),
    "toml": ({}, {"prefect.toml": '[api]\nurl = "http://c/api"', "pyproject.toml": '[tool.prefect.api]\nurl = "http://d/api"'}),
    "pyproject": ({}, {"pyproject.toml": '[tool.prefect.api]\nurl = "http://d/api"'}),
    "profile": ({}, {"home/profiles.toml": 'active = "x"\n[profiles.x]\nPREFECT_API_URL = "http://e/api"'}),
    "another profile": (
        {"PREFECT_PROFILE": "y"},
        {"home/profiles.toml": 'active = "x"\n[profiles.x]\nPREFECT_API_URL = "http://e/api"\n[profiles.y]'},
    ),
    "no such profile": ({"PREFECT_PROFILE": "z"}, {"home/profiles.toml": '[profiles.x]\nPREFECT_API_URL = "http://e/api"'}),
}


@pytest.mark.nightly
def test_a_configured_server_is_found_where_prefect_finds_it(tmp_path):
    script = (
        "from pedigree.pipelines.cli.quiet import prefect_server; ours = prefect_server()\n"
        "from prefect.settings import get_current_settings; theirs = get_current_settings().api.url\n"
        "print(ours, theirs)"
    )
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    found = {}
    for name, (environment, files) in WAYS.items():
        folder = tmp_path / name
        for file, text in files.items():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_text(text + "\n")
        (folder / "home").mkdir(parents=True, exist_ok=True)
        paths = {"PYTHONPATH": str(REPOSITORY), "PREFECT_HOME": str(folder / "home")}
        command = [sys.executable, "-c", script]
        done = subprocess.run(command, cwd=folder, env=kept | paths | environment, capture_output=True, text=True, check=True)
        ours, theirs = done.stdout.split()
        assert ours == theirs, name
        found[name] = ours[-5] if ours != "None" else None
    assert found == dict(zip(WAYS, [None, "a", "b", "c", "d", "e", None, None], strict=True))


def processes_with(text: str) -> list[str]:
    """Number and command line of the processes whose environment holds the text."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                if text.encode() in (folder / "environ").read_bytes():
                    found.append(f"{folder.name} " + (folder / "cmdline").read_text().replace("\0", " "))
            except OSError:
                continue
    return found
