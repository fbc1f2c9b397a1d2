"""A Prefect server on loopback, asked over its API, and labs whose recipe is deployed on it."""

import http.server
import json
import os
import queue
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
from chaos_prefect import PrefectServer
from commands import Command
from prefect.settings import PREFECT_API_URL, temporary_settings
from running_lab import Lab
from typer.testing import CliRunner
from waiting import deadline, until

from pedigree.configs.base.problems import PedigreeError
from pedigree.pipelines.cli.main import app
from pedigree.pipelines.deployments import Terms, deploy
from pedigree.pipelines.run.opening import Request, open_run

STAGES = 4
POOL = "here"
PATIENCE_S = 120.0
T = TypeVar("T")


def seen(condition: Callable[[], T]) -> T:
    """Asks the server a question, after a pause that leaves it time for other work: it has no way to call back."""
    time.sleep(0.2)  # between two questions
    return condition()


def until_seen(condition: Callable[[], T], seconds: float = PATIENCE_S) -> T:
    """Waits until the server answers yes."""
    return until(lambda: seen(condition), seconds)


class Server(PrefectServer):
    """A Prefect server, and what it knows of labs."""

    def ask(self, what: str, **filters: Any) -> list[dict[str, Any]]:
        return self.post(f"{what}/filter", {name: {"id": {"any_": [value]}} for name, value in filters.items()})

    def post(self, path: str, body: Any) -> Any:
        return json.loads(self.call("POST", path, json.dumps(body).encode()))

    def get(self, path: str) -> Any:
        return json.loads(self.call("GET", path))

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

        return (answer() or until_seen(answer))[0]

    def set_state(self, run: str, state: str) -> dict[str, Any]:
        """Its answer."""
        return self.post(f"flow_runs/{run}/set_state", {"state": {"type": state}})

    def cancel(self, run: str) -> None:
        """As somebody does who clicks on Cancel."""
        self.post(f"flow_runs/{run}/set_state", {"state": {"type": "CANCELLING", "name": "Cancelling"}, "force": True})

    def last_run(self, command: Command) -> dict[str, Any]:
        """The last flow run of a lab: its first one comes when Prefect has been imported, a while after the first job has started."""

        def found() -> list[dict[str, Any]]:
            runs = self.post("flow_runs/filter", {"sort": "START_TIME_DESC", "limit": 10})
            return [run for run in runs if run["parameters"]["project"] == str(command.lab.root)]

        return until_seen(found)[0]

    def states(self, run: dict[str, Any]) -> dict[str, str]:
        """Task name → state, once Prefect has stored the last event of each of a lab's stages."""

        def found() -> dict[str, str]:
            states = {task["name"]: task["state_name"] for task in self.ask("task_runs", flow_runs=run["id"])}
            return states if len(states) == STAGES and not {"Pending", "Running"} & set(states.values()) else {}

        return until_seen(found)

    def artifacts(self, command: Command) -> dict[str, dict[str, Any]]:
        """Those of a lab's last flow run, by key."""
        found = self.post("artifacts/filter", {"artifacts": {"flow_run_id": {"any_": [self.last_run(command)["id"]]}}})
        return {row["key"]: row for row in found}

    def messages(self, run: str) -> str:
        rows = self.post("logs/filter", {"logs": {"flow_run_id": {"any_": [run]}}, "limit": 200})
        return "\n".join(row["message"] for row in rows)

    def state(self, run: str) -> dict[str, Any]:
        return self.ask("flow_runs", flow_runs=run)[0]["state"]


class Shown(Command):
    """A lab whose runs are shown on the server of these tests."""

    def __init__(self, folder: Path, server: Server) -> None:
        super().__init__(Lab(folder))
        observer = self.lab.code / "pipelines/prefect/observer.py"
        text, end_s = observer.read_text(), "\nEND_S, END_ATTEMPTS = 15.0,"
        assert end_s in text
        observer.write_text(text.replace(end_s, end_s.replace("15.0", str(deadline(30)))))  # a busy server takes its time
        self.server = server
        self.environment |= server.environment

    def is_waiting(self) -> bool:
        """Whether its job holds at `go`."""
        return (self.lab.root / "go.waiting").exists()

    def go(self) -> None:
        (self.lab.root / "go").touch()


class Deployed(Shown):
    """A lab whose recipe is deployed on the server of these tests.

    Calling it types a command into a shell of its own, `here` types one in this process, which has imported Prefect already.
    """

    def __init__(self, folder: Path, server: Server) -> None:
        super().__init__(folder, server)
        self.name = folder.name
        """Of the deployment: labs share a server."""

    def deploy_here(self, pool: str = POOL, **terms: Any) -> None:
        """`pedigree deploy`, without a shell."""
        request, project = Request("lab"), self.lab.project
        with temporary_settings({PREFECT_API_URL: self.server.url}):
            graph = open_run(project, request, looking=True).graph
            deploy(project, graph, request, Terms(pool, name=self.name, **terms), self.lab.code)

    def here(self, *arguments: str, code: int = 0) -> str:
        with pytest.MonkeyPatch.context() as patch, temporary_settings({PREFECT_API_URL: self.server.url}):
            patch.chdir(self.lab.root)
            patch.setenv("PREFECT_API_URL", self.server.url)
            patch.setenv("COLUMNS", "200")
            done = CliRunner().invoke(app, arguments)
        problem = done.exception if isinstance(done.exception, PedigreeError) else None
        assert problem or isinstance(done.exception, SystemExit | None), done.exc_info
        assert (problem.exit_code if problem else done.exit_code) == code, done.output
        return f"{done.output}{problem or ''}"

    @property
    def deployment(self) -> dict[str, Any]:
        return self.server.get(f"deployments/name/post-train/{self.name}")

    def start_run(self, **parameters: Any) -> str:
        """As somebody does who clicks on Run; returns its id."""
        return self.server.post(f"deployments/{self.deployment['id']}/create_flow_run", {"parameters": parameters})["id"]

    def begin(self) -> str:
        """A run that takes the slot of its deployment, as a worker would start it; returns its id."""
        run = self.start_run()
        for state in ("PENDING", "RUNNING"):
            assert self.server.set_state(run, state)["status"] == "ACCEPT"
        return run

    def flow_runs(self, *states: str) -> list[dict[str, Any]]:
        """The oldest first."""
        wanted = {"deployments": {"name": {"any_": [self.name]}}, "sort": "EXPECTED_START_TIME_ASC"}
        found = self.server.post("flow_runs/filter", wanted)
        return [run for run in found if run["state_type"] in states] if states else found

    def ended(self, run: str) -> dict[str, Any]:
        """The state in which a flow run ends."""
        final = ("COMPLETED", "FAILED", "CANCELLED")  # crashed ones are started again
        until_seen(lambda: self.server.state(run)["type"] in final)
        return self.server.state(run)


class Listener:
    """Somebody who is notified: a web server on loopback, and the Prefect block that names it."""

    def __init__(self, server: Server) -> None:
        self.heard: queue.Queue[str] = queue.Queue()
        heard = self.heard

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                heard.put(self.rfile.read(int(self.headers["Content-Length"])).decode())
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None: ...

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        kind = server.get("block_types/slug/custom-webhook")
        schema = server.post("block_schemas/filter", {"block_schemas": {"block_type_id": {"any_": [kind["id"]]}}})[0]
        url = f"http://127.0.0.1:{self.server.server_address[1]}/"
        data = {"name": "team", "url": url, "method": "POST", "json_data": {"subject": "{{subject}}", "body": "{{body}}"}}
        made = {"name": "team", "data": data, "block_type_id": kind["id"], "block_schema_id": schema["id"]}
        server.post("block_documents/", made)

    def until_heard(self, text: str) -> str:
        """The next call with this text; Prefect may make a call twice."""
        while text not in (heard := self.heard.get(timeout=deadline(PATIENCE_S))):
            pass
        return heard


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


def flow_process(run: str) -> int:
    """The process that a worker has started for a flow run."""
    (pid,) = [int(line.split()[0]) for line in processes_with(run) if "prefect.engine" in line or "prefect.flow_engine" in line]
    return pid
