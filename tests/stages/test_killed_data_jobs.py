"""Data stages over several processes, killed with -9 while they read: no process stays, and the next attempt ends in the same bytes."""

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from models import dataset, run_job, start_job

from configs.execution import Numerics
from data import records
from data.artifacts import Artifact

TWO = Numerics(threads=2)
PREPARE = {
    "record": "conversation",
    "sources": [{"type": "arithmetic", "count": 12_000, "digits": [3, 4], "operations": ["add"], "seed": 0}],
    "filters": [{"type": "exact_duplicates"}],
}


def children(pid: int) -> list[int]:
    try:
        return [int(name) for name in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def awaited(what: Callable[[], Any], seconds: float = 120) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := what()) and time.monotonic() < deadline:
        time.sleep(0.002)
    assert found, "it did not happen in time"
    return found


def payload(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "out" / "payload").iterdir()}


def killed(folder: Path, *args: Any) -> None:
    """Starts a job and kills its first process, and no other, once it has two more."""
    process = start_job(folder, *args)
    workers = awaited(lambda: found if len(found := children(process.pid)) >= 2 else [])
    process.send_signal(signal.SIGKILL)
    process.wait()
    awaited(lambda: not any(map(alive, workers)), 20)
    assert not (folder / "done.json").exists()


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Artifact]:
    """(the folder of a quiet job that prepared rows, an artifact of them)."""
    folder = tmp_path_factory.mktemp("raw")
    assert run_job(folder / "quiet", "prepare_data", PREPARE, {}, Numerics(threads=1))["ok"]
    return folder / "quiet", dataset(folder / "rows", "conversation", list(records.stream(folder / "quiet" / "out" / "payload")))


@pytest.mark.slow
def test_rows_that_are_prepared_again_are_the_same(raw: tuple[Path, Artifact], tmp_path: Path) -> None:
    killed(tmp_path / "job", "prepare_data", PREPARE, {}, TWO)
    assert run_job(tmp_path / "job", "prepare_data", PREPARE, {}, TWO)["ok"]
    assert payload(tmp_path / "job") == payload(raw[0]) and not (tmp_path / "job" / "drafts").exists()


@pytest.mark.slow
def test_rows_that_are_compared_again_are_the_same(raw: tuple[Path, Artifact], tmp_path: Path) -> None:
    asked = [row["messages"][:1] for row in records.load(raw[1])[:20]]
    items = [
        {"id": str(number), "source": "s", "task": "t", "messages": messages, "verifier": {"name": "gsm8k", "answer": "1"}}
        for number, messages in enumerate(asked)
    ]
    inputs = {"data": {"d": raw[1]}, "benchmarks": {"b": dataset(tmp_path / "suite", "item", items)}}
    config = {"max_contaminated_share": 1.0}
    assert run_job(tmp_path / "quiet", "decontaminate", config, inputs, Numerics(threads=1))["metrics"]["removed"] >= 20
    killed(tmp_path / "job", "decontaminate", config, inputs, TWO)
    assert run_job(tmp_path / "job", "decontaminate", config, inputs, TWO)["ok"]
    assert payload(tmp_path / "job") == payload(tmp_path / "quiet")
