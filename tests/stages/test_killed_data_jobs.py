"""Data stages killed with -9, while they read by several processes and while they write: no process stays, and the next attempt, by more or
fewer processes, ends in the same bytes."""

import multiprocessing
import shutil
import signal
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import pytest
from data_lab import run_stage
from models import alive, dataset, run, start_job
from sweeps import nightly_unless
from waiting import deadline, until

from pedigree.configs.language.execution import Numerics
from pedigree.data.artifacts.artifacts import Artifact, content_hash, scan
from pedigree.data.host.faults import FAULTS
from pedigree.data.records import columns, records
from pedigree.pipelines.jobs.attempts import RETRIED
from pedigree.stages.__main__ import cause_of

TWO = Numerics(threads=2)
PREPARE = {
    "record": "conversation",
    "sources": [{"type": "arithmetic", "count": 6_000, "digits": [3, 4], "operations": ["add"], "seed": 0}],
    "filters": [{"type": "exact_duplicates"}],
}


def children(pid: int) -> list[int]:
    try:
        return [int(name) for name in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def payload(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "out" / "payload").iterdir()}


def killed(folder: Path, *args: Any) -> None:
    """Starts a job and kills its first process, and no other, once it has two more; again, where it had ended before this process got a
    processor to see that."""
    for _ in range(5):
        process, workers = start_job(folder, *args), list[int]()

        def is_seen(process: Any = process, workers: list[int] = workers) -> bool:
            workers[:] = children(process.pid)
            return len(workers) >= 2 or process.poll() is not None

        until(is_seen)
        process.send_signal(signal.SIGKILL)
        process.wait()
        until(lambda workers=workers: not any(map(alive, workers)))
        if not (folder / "done.json").exists():
            assert len(workers) >= 2, (folder / "log.txt").read_text()[-3000:]
            return
        shutil.rmtree(folder)
    pytest.fail("it ends too soon")


@pytest.mark.slow
def test_rows_that_are_prepared_again_are_the_same(tmp_path: Path) -> None:
    assert run(tmp_path / "quiet", "prepare_data", PREPARE, {}, Numerics(threads=1))["ok"]
    killed(tmp_path / "job", "prepare_data", PREPARE, {}, TWO)
    assert run(tmp_path / "job", "prepare_data", PREPARE, {}, TWO)["ok"]
    assert payload(tmp_path / "job") == payload(tmp_path / "quiet") and not (tmp_path / "job" / "drafts").exists()


# --- while they write --------------------------------------------------------------------------------------------------

SUMS = {"type": "arithmetic", "count": 60, "digits": [2], "operations": ["add"], "seed": 0}
KINDS = {
    "prepare_data": {"record": "conversation", "sources": [SUMS], "filters": [{"type": "exact_duplicates"}]},
    "decontaminate": {"max_contaminated_share": 1.0},
    "judge": {},
    "pair": {"strategy": {"type": "all_pairs"}},
    "best_answers": {"keep": {"type": "all_above", "min_score": 0.5}},
    "select_prompts": {"max_mean": 0.9},
}
"""Kind → config of the stages that write records and ask no model."""


def completion(prompt: dict[str, Any], number: int) -> dict[str, Any]:
    """Of three answers to a prompt the second is wrong, and every tenth prompt has no other."""
    wrong = number % 3 == 1 or number % 30 < 3
    return {
        "id": f"{prompt['id']}/a/{number % 3}", "prompt_id": prompt["id"], "source": "s", "messages": prompt["messages"],
        "verifier": prompt["verifier"], "policy": "a", "policy_content": "content of a", "on_policy": True, "index": number % 3, "seed": 1,
        "prompt_ids": [1], "response_ids": [5], "logprobs": [-1.0], "finish_reason": "stop",
        "text": "It is 7 or not." if wrong else f"It is {number} less {number}, and so {prompt['verifier']['answer']}",
    }  # fmt: skip


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Artifact]]:
    """Kind → port → artifact."""
    folder = tmp_path_factory.mktemp("given")
    prompts = run_stage(folder / "prompts", "prepare_data", {"record": "prompt", "sources": [SUMS]})
    rows = records.load(prompts)
    completions = dataset(folder / "completions", "completion", [completion(rows[number // 3], number) for number in range(3 * len(rows))])
    judgments = run_stage(folder / "judgments", "judge", {}, completions=completions)
    items = [{**row, "id": f"item-{number}", "task": "t"} for number, row in enumerate(rows[:9])]
    return {
        "prepare_data": {},
        "decontaminate": {"data": run_stage(folder / "raw", "prepare_data", KINDS["prepare_data"]),
                          "benchmarks": dataset(folder / "suite", "item", items)},
        "judge": {"completions": completions},
        "pair": {"judgments": judgments},
        "best_answers": {"judgments": judgments},
        "select_prompts": {"prompts": prompts, "judgments": judgments},
    }  # fmt: skip


def attempted(folder: Path, kind: str, threads: int, ports: dict[str, Artifact]) -> int | None:
    """Exit code of an attempt that finds what the one before it has left but for its output, as the orchestrator has it."""
    shutil.rmtree(folder / "out", ignore_errors=True)
    args = (folder, kind, KINDS[kind], None, threads)
    process = multiprocessing.get_context("fork").Process(target=run_stage, args=args, kwargs=ports)
    process.start()
    process.join(deadline(60))
    return process.exitcode


DAILY = [("decontaminate", 1, 2), ("pair", 1, 2), ("prepare_data", 3, 0)]
EVERY = [*((kind, 1, 2) for kind in KINDS), *((kind, 3, 0) for kind in ("prepare_data", "decontaminate", "select_prompts"))]


@pytest.mark.parametrize(("kind", "threads", "written"), nightly_unless(DAILY, EVERY))
def test_killed_between_two_files_it_ends_in_the_same_bytes(given, tmp_path, monkeypatch, kind, threads, written):
    """With three threads a worker is killed, as for want of memory, or several that come to that point at once."""
    monkeypatch.setattr(columns, "ROWS_PER_FILE", 7)
    quiet = run_stage(tmp_path / "quiet", kind, KINDS[kind], threads=2, **given[kind])
    assert len(quiet.record.files) >= 4
    (tmp_path / "rows written").write_text(str(written))
    monkeypatch.setenv(FAULTS, str(tmp_path))
    assert attempted(tmp_path / "job", kind, threads, given[kind]) == (-signal.SIGKILL if threads == 1 else 1)
    assert set((tmp_path / "died.log").read_text().splitlines()) == {"rows written"}
    left = list((tmp_path / "job" / "out" / "payload").glob("*.parquet"))
    assert len(left) < len(quiet.record.files) and (threads > 1 or len(left) == written)
    assert attempted(tmp_path / "job", kind, 4 - threads, given[kind]) == 0
    assert content_hash(scan(tmp_path / "job" / "out" / "payload")) == quiet.record.content
    assert not (tmp_path / "job" / "drafts").exists()


def test_a_worker_that_was_killed_is_no_bug_and_the_job_is_tried_again(tmp_path: Path) -> None:
    assert cause_of(BrokenProcessPool("A process in the process pool was terminated abruptly"), tmp_path) in RETRIED
