"""What Prefect is told of runs that cannot tell it themselves any more. Its server is a list; the other machine a PID namespace."""

import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

import pytest
from elsewhere import ListenersClock, needs_elsewhere, next_beat, python_elsewhere
from running_lab import Lab
from waiting import InThread, deadline, until

from pedigree.configs.base.problems import PedigreeError
from pedigree.configs.base.project import Project
from pedigree.data.store import heartbeat
from pedigree.pipelines.jobs.events import RunEnded, unwatched
from pedigree.pipelines.prefect import observer, shown
from pedigree.pipelines.prefect.observer import Observer, run_observed

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
    """A Prefect that has ended no flow run itself, and remembers what it was told of them and of their tasks."""

    def __init__(self) -> None:
        self.told: list[tuple[UUID, str, str]] = []
        self.tasks: dict[str, str] = {}
        """Id of a task → address of its stage."""
        self.states: dict[str, str] = {}
        """Address → last state."""
        self.away = self.cancelling = False

    def create_flow_from_name(self, name: str) -> UUID:
        return uuid4()

    def create_logs(self, logs: object) -> None: ...

    def read_flow_run(self, flow_run_id: UUID) -> Any:
        self.answers()
        state = SimpleNamespace(is_cancelling=lambda: True, is_cancelled=lambda: False) if self.cancelling else None
        return SimpleNamespace(id=flow_run_id, state=state)

    def read_flow_runs(self, *, flow_run_filter: Any) -> list[Any]:
        return [self.read_flow_run(found) for found in flow_run_filter.id.any_]

    def read_task_runs(self, *, flow_run_filter: Any) -> list[Any]:
        return []

    def request(self, method: str, path: str, **options: Any) -> Any:
        self.answers()
        told, (what, *rest) = options["json"], path.strip("/").split("/")
        found = uuid4()
        if what == "task_runs" and not rest:
            self.tasks[str(found)] = told["dynamic_key"]
        elif what == "task_runs":
            self.states[self.tasks[rest[0]]] = told["state"]["type"]
        elif what == "flow_runs" and rest:
            self.told.append((UUID(rest[0]), told["state"]["type"], told["state"]["message"] or ""))
        return SimpleNamespace(json=lambda: {"id": str(found)})

    def answers(self) -> None:
        if self.away:
            raise ConnectionError("nobody is there")


@pytest.fixture(autouse=True)
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    """The server. Silence is over after two seconds, and everything is looked at often."""
    server = Server()
    monkeypatch.setattr(shown, "get_client", lambda *_, **__: nullcontext(server))
    monkeypatch.setattr(heartbeat, "SILENCE_S", deadline(2.0))
    monkeypatch.setattr(heartbeat, "BEAT_S", 0.2)
    monkeypatch.setattr(observer, "TICK_S", 0.1)
    monkeypatch.setattr(observer, "END_S", deadline(60))  # a run is not to end before its end is told
    for name in ("POLL_S", "AWAY_S"):
        monkeypatch.setattr(observer, name, 0.2)
    return server


@contextmanager
def observed(project: Project) -> Iterator[Any]:
    """A run that goes on and has nothing to tell but of others."""
    graph = SimpleNamespace(recipe="quiet", source=None, overrides={}, nodes={})
    run: Any = SimpleNamespace(project=project, graph=graph, watch=unwatched, keep_jobs=False, cancelled=threading.Event())
    with Observer(run, []) as watching:
        watching.wait_for_answer()
        yield run
        run.watch(RunEnded("completed"))


def test_a_server_that_goes_away_ends_no_job_and_is_told_all_when_it_is_back(tmp_path: Path, server: Server) -> None:
    lab = Lab(tmp_path)
    lab.knobs(raw={"hold": "raw goes"}, clean={"hold": "clean goes"})
    run = lab.run()
    thread = InThread(run_observed, run)
    until(lambda: (lab.root / "raw goes.waiting").exists() and len(server.tasks) == 4, alive=thread.alive)
    server.away = True
    (lab.root / "raw goes").touch()
    until((lab.root / "clean goes.waiting").exists)  # a stage has ended and another has begun meanwhile
    away, back = "Prefect does not answer (nobody is there); the run continues without it", "Prefect is reachable again"
    until(lambda: away in run.ledger.notices)
    server.away = False
    until(lambda: back in run.ledger.notices)
    (lab.root / "clean goes").touch()
    assert [str(getattr(end, "outcome", end)) for end in thread.join(60)] == ["ran"] * 4
    assert sorted(lab.runs()) == ["clean", "cleaner", "raw", "suite"]
    assert [notice for notice in run.ledger.notices if "Prefect" in notice] == [away, back]
    assert [state for _, state, _ in server.told] == ["COMPLETED"]
    assert server.states == dict.fromkeys(run.graph.nodes, "COMPLETED")


def test_nothing_is_run_if_a_server_is_required_and_does_not_answer(tmp_path: Path, server: Server) -> None:
    lab, server.away = Lab(tmp_path), True
    with pytest.raises(PedigreeError, match=r"--prefect always: nobody is there\. Nothing was run"):
        run_observed(lab.run(), required=True)
    assert lab.runs() == []


def test_a_cancellation_in_prefect_cancels_the_run_and_its_jobs(tmp_path: Path, server: Server) -> None:
    with observed(Project(tmp_path)) as run:
        run.keep_jobs, server.cancelling = True, True
        assert run.cancelled.wait(deadline(20)) and not run.keep_jobs
    (told,) = server.told
    assert told[1:] == ("CANCELLED", "canceled from Prefect; finished stages and checkpoints are kept")


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (KeyboardInterrupt(), ("CANCELLED", "interrupted; its jobs are stopped, finished stages and checkpoints are kept")),
        (ValueError("a bug"), ("CRASHED", "ValueError: a bug")),
    ],
)
def test_a_run_that_an_error_ends_is_told_to_have_ended(tmp_path: Path, server: Server, error: BaseException, told: object) -> None:
    with pytest.raises(type(error)), observed(Project(tmp_path)):
        raise error
    assert [end[1:] for end in server.told] == [told]


def test_a_run_is_reported_though_dead_ones_cannot_be_ended(tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(project: Project) -> None:
        raise OSError("a record that cannot be removed")

    monkeypatch.setattr(shown.FlowRecord, "all", fails)
    with observed(Project(tmp_path)):
        pass
    assert [state for _, state, _ in server.told] == ["COMPLETED"]


@needs_elsewhere
def test_a_flow_run_of_another_machine_lives_as_long_as_its_runner_is_heard(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "SILENCE_S", 8.0)
    clock, project, name = ListenersClock(monkeypatch), Project(tmp_path), uuid4()
    code = RUNNER.replace("PROJECT", repr(str(tmp_path))).replace("NAME", repr(str(name)))
    other = python_elsewhere(code, ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert other.stdout and other.stdout.readline() == "runs\n"
    with observed(project):
        (pulse,) = (tmp_path / ".pedigree" / "flows").glob(f"{name}*.beat")
        clock.beating(lambda: next_beat(pulse))
        assert server.told == [] and other.poll() is None
        other.kill()
        other.communicate()
        clock.silent(lambda: server.told)
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
