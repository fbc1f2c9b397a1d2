"""What Prefect is told of runs that cannot tell it themselves any more. Its server is a list; the other machine a PID namespace."""

import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

import pytest
from elsewhere import needs_elsewhere, python_elsewhere
from waiting import deadline, until

from pedigree.configs.base.project import Project
from pedigree.data.store import heartbeat
from pedigree.pipelines.jobs.events import RunEnded, unwatched
from pedigree.pipelines.jobs.processes import Process
from pedigree.pipelines.prefect import observer, shown
from pedigree.pipelines.prefect.observer import Observer
from pedigree.pipelines.prefect.record import FlowRecord

ROOT = Path(__file__).parents[2]
RUNNER = """
import sys
from pathlib import Path
from uuid import UUID
from pedigree.configs.base.project import Project
from pedigree.data.store import heartbeat
from pedigree.pipelines.prefect.record import FlowRecord
heartbeat.BEAT_S = 0.2
record = FlowRecord(Project(Path(PROJECT)), NAME, UUID(NAME))
record.write()
with record.beating():
    print("runs", flush=True)
    sys.stdin.read()
"""


class Server:
    """A Prefect that has ended no flow run itself, and remembers what it was told of them."""

    def __init__(self) -> None:
        self.told: list[tuple[UUID, str, str]] = []

    def create_flow_from_name(self, name: str) -> UUID:
        return uuid4()

    def read_flow_run(self, flow_run_id: UUID) -> Any:
        return SimpleNamespace(id=flow_run_id, state=None)

    def read_flow_runs(self, *, flow_run_filter: Any) -> list[Any]:
        return [self.read_flow_run(found) for found in flow_run_filter.id.any_]

    def read_task_runs(self, *, flow_run_filter: Any) -> list[Any]:
        return []

    def request(self, method: str, path: str, **options: Any) -> Any:
        if path == "/flow_runs/":
            return SimpleNamespace(json=lambda: {"id": str(uuid4())})
        state = options["json"]["state"]
        self.told.append((UUID(path.split("/")[2]), state["type"], state["message"] or ""))
        return SimpleNamespace(json=dict)


@pytest.fixture(autouse=True)
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    """The server. Silence is over after two seconds, and everything is looked at often."""
    server = Server()
    monkeypatch.setattr(shown, "get_client", lambda *_, **__: nullcontext(server))
    monkeypatch.setattr(heartbeat, "SILENCE_S", deadline(2.0))
    monkeypatch.setattr(heartbeat, "BEAT_S", 0.2)
    monkeypatch.setattr(observer, "TICK_S", 0.1)
    monkeypatch.setattr(observer, "POLL_S", 0.2)
    return server


@contextmanager
def observed(project: Project) -> Iterator[None]:
    """A run that goes on and has nothing to tell but of others."""
    graph = SimpleNamespace(recipe="quiet", source=None, overrides={}, nodes={})
    run: Any = SimpleNamespace(project=project, graph=graph, watch=unwatched, keep_jobs=False, cancelled=threading.Event())
    with Observer(run, []) as watching:
        watching.wait_for_answer()
        yield
        run.watch(RunEnded("completed"))


def test_a_run_is_reported_though_dead_ones_cannot_be_ended(tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: object) -> None:
        raise OSError("a record that cannot be removed")

    monkeypatch.setattr(shown.PrefectRun, "_sweep", fails)
    with observed(Project(tmp_path)):
        pass
    assert [state for _, state, _ in server.told] == ["COMPLETED"]


@needs_elsewhere
def test_a_flow_run_of_another_machine_lives_as_long_as_its_runner_is_heard(tmp_path: Path, server: Server) -> None:
    project, name = Project(tmp_path), uuid4()
    code = RUNNER.replace("PROJECT", repr(str(tmp_path))).replace("NAME", repr(str(name)))
    other = python_elsewhere(code, ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert other.stdout and other.stdout.readline() == "runs\n"
    with observed(project):
        with pytest.raises(subprocess.TimeoutExpired):  # longer than silence may last
            other.wait(2 * heartbeat.SILENCE_S)
        assert server.told == []
        other.kill()
        other.communicate()
        until(lambda: server.told)
    assert server.told[0] == (name, "CRASHED", "its process died unexpectedly; detected by a later run")
    assert [state for _, state, _ in server.told[1:]] == ["COMPLETED"]


def test_a_runner_gives_signs_of_life_to_its_end_and_leaves_none(tmp_path: Path, server: Server) -> None:
    folder = tmp_path / ".pedigree" / "flows"
    with observed(Project(tmp_path)):
        (beat,) = folder.glob("*.beat")
        first = beat.read_text()
        until(lambda: beat.read_text() != first)
    assert [state for _, state, _ in server.told] == ["COMPLETED"]
    until(lambda: not list(folder.iterdir()))


def test_a_flow_run_of_this_machine_is_ended_at_once(tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "SILENCE_S", 90.0)
    project, name, began = Project(tmp_path), uuid4(), time.monotonic()
    record, here = FlowRecord(project, str(name), name), Process.here()
    record.process = Process(here.pid, here.started + 1, here.machine)
    record.write()
    with observed(project):
        until(lambda: server.told)
    assert server.told[0][:2] == (name, "CRASHED") and time.monotonic() - began < deadline(10)
