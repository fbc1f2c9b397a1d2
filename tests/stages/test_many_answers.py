"""`sample` of many answers: what it holds of each, and that its rows are what was answered. Answers are made by hand, without an engine."""

import gc
import threading
import tracemalloc
from collections.abc import Iterator
from contextlib import nullcontext
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest
from models import a_job, config_of, dataset, publish
from tiny_models import make

from pedigree.data.artifacts.artifacts import Artifact
from pedigree.data.records import columns, records
from pedigree.stages.job.job import Job
from pedigree.stages.sample import run as sample
from pedigree.stages.sampling import answer_log, generate
from pedigree.stages.sampling.prepared import prepared
from pedigree.stages.sampling.sampler import Generation, Request

TOKENS = 100
"""Of an answer."""
SAMPLES = 2


def said(request: Request) -> Generation:
    """An answer of the request's own, of numbers that Python holds as objects."""
    ids = [260 + (request.seed + place) % 35 for place in range(TOKENS)]
    return Generation(ids, [-(request.seed % 1009 + place) / 1009 for place in range(TOKENS)], "length" if request.seed % 3 else "stop")


class Engine:
    def generate(self, requests: Any, *_: Any) -> list[Generation]:
        return [said(request) for request in requests]

    def stream(self, requests: Any, sampling: Any, stop_ids: Any, arrived: Any, beat: Any) -> None:
        for number, request in enumerate(requests):
            arrived(number, said(request))

    def load(self, folder: Any) -> None: ...


def worked(work: Any, number: int, engine: Any, put: Any) -> None:
    try:
        work(number, engine, put)
    except Exception as error:
        put(error)
    put(None)


def in_turn(engines: Any, work: Any) -> Iterator[Any]:
    """An engine is slower than the disk: each answer is kept before the next ones are there."""
    for number, engine in enumerate(engines):
        reports: Queue[Any] = Queue(1)
        threading.Thread(target=worked, args=(work, number, engine, reports.put), daemon=True).start()
        for report in iter(reports.get, None):
            if isinstance(report, Exception):
                raise report
            yield report


@pytest.fixture(autouse=True)
def without_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample, "WarmEngines", lambda *_: nullcontext(SimpleNamespace(expect=lambda _: None)))
    monkeypatch.setattr(generate, "open_engines", lambda *_: nullcontext([Engine()]))
    monkeypatch.setattr(generate, "side_by_side", in_turn)
    for name in ("BLOCK", "ROWS_PER_GROUP"):
        monkeypatch.setattr(columns, name, 8)
    monkeypatch.setattr(answer_log, "PART", 8)


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Artifact]:
    folder = tmp_path_factory.mktemp("policies")
    for seed, name in enumerate("ab"):
        make(folder / name / "payload", seed=seed, context=1024)
    return {name: publish(folder / name, "source_model", "policy") for name in "ab"}


def prompts(folder: Any, count: int) -> Artifact:
    rows = [
        {
            "id": f"p{number}", "source": "test", "verifier": None,
            "messages": [{"role": "user", "content": f"What is {number} + 1? " + "2 + 3 " * 30}],
        }
        for number in range(count)
    ]  # fmt: skip
    return dataset(folder, "prompt", rows)


def sampled(job: Job, policies: dict[str, Artifact], pool: Artifact, count: int, chunk_size: int | str) -> dict[str, Any]:
    config = config_of(
        "sample",
        sampling={"max_tokens": TOKENS},
        samples_per_prompt=SAMPLES,
        prompts={"count": count},
        chunk_size=chunk_size,
        dtype="fp32",
    )
    return sample.run(config, {"policies": policies, "prompts": {"pool": pool}}, job)


@pytest.mark.parametrize("chunk_size", [8, "continuous"])
def test_of_an_answer_some_hundred_bytes_are_in_memory(tmp_path, policies, chunk_size):
    """As lists, its 100 tokens would take 7,000 bytes, and those of its prompt thousands more."""
    peaks, counts = [], (10, 10, 50)  # the first for what is loaded once
    pool = prompts(tmp_path / "pool", max(counts))
    for number, count in enumerate(counts):
        gc.collect()
        tracemalloc.start()
        metrics = sampled(a_job(tmp_path / str(number)), policies, pool, count, chunk_size)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert metrics["rows"] == 2 * SAMPLES * count and metrics["mean_response_length"] == TOKENS
    assert (peaks[2] - peaks[1]) / (2 * SAMPLES * (counts[2] - counts[1])) < 600, peaks


def test_rows_are_what_was_answered_however_they_were_asked_for_and_written(tmp_path, policies, monkeypatch):
    pool, contents = prompts(tmp_path / "pool", 30), []
    for chunk_size, block in ((7, 16), ("continuous", 3), (64, 1000)):
        monkeypatch.setattr(columns, "BLOCK", block)
        job = a_job(tmp_path / str(chunk_size))
        metrics = sampled(job, policies, pool, 30, chunk_size)
        contents.append([path.read_bytes() for path in sorted((job.out / "payload").iterdir())])
    assert contents[0] == contents[1] == contents[2]
    rows = list(records.stream(job.out / "payload"))
    for row in rows:
        answer = said(Request(row["prompt_ids"], row["seed"]))
        assert (row["response_ids"], row["logprobs"], row["finish_reason"]) == (answer.response_ids, answer.logprobs, answer.finish_reason)
    assert [row["id"] for row in rows] == [f"p{n}/{label}/{index}" for label in "ab" for n in range(30) for index in range(SAMPLES)]
    assert metrics["finish_reasons"] == {name: sum(row["finish_reason"] == name for row in rows) for name in ("length", "stop")}
    own, given = tmp_path / "own", [{**row} for row in rows]
    records.save(own, "completion", given)
    assert [path.read_bytes() for path in sorted((own / "payload").iterdir())] == contents[0]


def test_requests_that_wait_on_the_disk_are_those_that_were_put_there(tmp_path):
    given = [Request([number // 2, 100_000 * number // 2][: number % 3], 7 * number, [None, 0.0, 0.6][number % 3]) for number in range(10)]
    found = prepared(iter(given), tmp_path)
    assert list(found) == given and found[-1] == given[-1] and len(found) == 10
    assert list(found[3:8]) == given[3:8]
    with pytest.raises(IndexError):
        found[10]
    assert not list(tmp_path.iterdir()) and not prepared([], tmp_path)
