"""Nothing long is silent: what a job says while it loads, tokenises, packs, checks, hashes and writes; and what it does not say."""

import json
import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from models import a_job, config_of, dataset, publish
from tiny_models import make
from waiting import until

from pedigree.configs.language.execution import Numerics
from pedigree.data.artifacts.artifacts import survey
from pedigree.data.records import records
from pedigree.data.store import hashing
from pedigree.pipelines.cli.progress import Row, doing
from pedigree.pipelines.jobs.events import StageProgressed
from pedigree.pipelines.jobs.scratch_state import read_heartbeat
from pedigree.pipelines.quantities import reported
from pedigree.stages.evaluate import run as evaluate
from pedigree.stages.job import job as jobs
from pedigree.stages.job.inputs import open_inputs
from pedigree.stages.job.job import Inputs, Job
from pedigree.stages.job.spec import GivenInput, JobSpec
from pedigree.stages.judge import run as judge
from pedigree.stages.overoptimization import run as overoptimization
from pedigree.stages.sample import run as sample
from pedigree.stages.sampling import rewards
from pedigree.stages.sampling.sampler import Generation
from pedigree.stages.training import models
from pedigree.stages.training.checkpoints import Checkpoints


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "HEARTBEAT_INTERVAL_S", 0.05)


def said(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "progress.json").read_text()) if (folder / "progress.json").exists() else {"beat": 0}


def beats(folder: Path, count: int, work: Any = lambda: None) -> None:
    """Works until the job has beaten so often."""
    before = said(folder)["beat"]
    until(lambda: (work(), said(folder)["beat"] - before >= count)[1])


def test_a_library_that_says_nothing_is_heard_while_it_computes_or_moves_bytes(tmp_path: Path, quick: None) -> None:
    job = a_job(tmp_path)
    job.progress(3, 10)
    with job.busy("loading the model"):
        beats(tmp_path, 5, lambda: sum(range(100_000)))
        assert (said(tmp_path)["step"], said(tmp_path)["doing"]["what"]) == (3, "loading the model")
        with (tmp_path / "x").open("wb") as stream:
            beats(tmp_path, 5, lambda: (stream.write(bytes(1 << 20)), stream.seek(0)))


def test_a_checkpoint_beats_while_it_is_written_and_while_it_is_loaded_or_converted(tmp_path: Path, quick: None, monkeypatch: Any) -> None:
    """Large states take minutes, and one process converts them to other ranks."""
    monkeypatch.setattr("signal.signal", lambda *_: None)
    job, found = a_job(tmp_path), []

    def slow(*_: Any, **__: Any) -> None:
        beats(tmp_path, 2, lambda: sum(range(100_000)))
        found.append(said(tmp_path)["doing"]["what"])

    alone = {"rank": 0, "barrier": lambda _: None, "broadcast": lambda _, value: value, "save_state": slow, "load_state": slow}
    checkpoints = Checkpoints(job, type("Alone", (), alone)())  # pyright: ignore[reportArgumentType]
    checkpoints.write(1, {"step": 1})
    checkpoints._settle()
    assert checkpoints.resume() == {"step": 1} and found == ["writing the checkpoint", "loading the checkpoint"]
    assert said(tmp_path)["doing"]["what"] == "training"


def test_a_call_that_hangs_is_not_taken_for_work(tmp_path: Path, quick: None) -> None:
    job = a_job(tmp_path)
    with job.busy("loading the model"):
        time.sleep(0.3)  # what came before counts once
        before = said(tmp_path)["beat"]
        time.sleep(1.0)  # nothing is to happen, in the time of twenty beats
        assert said(tmp_path)["beat"] - before <= 1
    assert threading.active_count() == len([thread for thread in threading.enumerate() if thread.name != "loading the model"])


def test_a_disk_that_takes_its_time_is_waited_for(tmp_path: Path, quick: None) -> None:
    """Nothing of it can be seen in this process, and a kill would not end it."""
    job = a_job(tmp_path)
    with job.busy("writing to the disk", flushing=True):
        beats(tmp_path, 5)


def test_hashing_tells_how_far_it_is(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "large").write_bytes(os.urandom(10 << 20))
    (tmp_path / "a" / "small").write_bytes(b"x")
    told: list[tuple[int, int]] = []
    survey(tmp_path / "a", md5=True, beat=lambda done, size: told.append((done, size)))
    assert len(told) == 4 and {size for _, size in told} == {(10 << 20) + 1}  # pieces of 4 MiB
    assert [done for done, _ in told] == sorted(done for done, _ in told) and told[-1][0] == (10 << 20) + 1


def test_something_new_is_said_at_once_and_the_same_from_time_to_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What follows may be silent for minutes, and would stand under the name of what was before."""
    monkeypatch.setattr(jobs, "HEARTBEAT_INTERVAL_S", 3600.0)  # however slow this machine is, it has not come
    job = a_job(tmp_path)
    job.progress(0, 0)
    job.doing("tokenizing", 0, 100)
    assert said(tmp_path)["doing"]["what"] == "tokenizing"
    before = said(tmp_path)["beat"]
    for number in range(100):
        job.doing("tokenizing", number, 100)
    assert said(tmp_path)["beat"] == before
    monkeypatch.setattr(jobs, "HEARTBEAT_INTERVAL_S", 0.0)
    job.doing("tokenizing", 100, 100)
    assert said(tmp_path)["beat"] == before + 1 and said(tmp_path)["doing"]["done"] == 100
    monkeypatch.setattr(jobs, "HEARTBEAT_INTERVAL_S", 3600.0)
    job.doing("loading weights")
    assert said(tmp_path)["doing"]["what"] == "loading weights"
    job.progress(1, 1)
    job.doing("loading weights")
    assert said(tmp_path)["doing"]["what"] == "loading weights"


def shown(folder: Path) -> str:
    beat = read_heartbeat(folder)
    progressed = StageProgressed("tiny/s", beat.step, beat.total, reported(beat.numbers), beat.work)
    return doing(Row("running").at(progressed, 0.0), 0.0)


def test_what_is_done_beside_the_steps_is_shown(tmp_path: Path, quick: None) -> None:
    job = a_job(tmp_path)
    job.doing("hashing", 12, 100, "GB")
    assert shown(tmp_path) == "hashing 12.0 GB of 100.0 GB"
    job.doing("checking inputs", 0, 0.0129, "GB")
    assert shown(tmp_path) == "checking inputs 0 bytes of 12.9 MB"
    job.progress(10, 10, loss=1.0)
    time.sleep(0.06)  # longer than between two beats
    job.doing("writing the model")
    assert shown(tmp_path) == "step 10/10  loss 1  writing the model"
    job.progress(10, 10)
    assert "writing" not in shown(tmp_path)


# --- stages ------------------------------------------------------------------------------------------------------------

PROMPTS: list[Any] = [
    {
        "id": f"p{number}", "source": "test", "messages": [{"role": "user", "content": f"What is {number} + 1?"}], "task": "sums",
        "verifier": {"name": "arithmetic", "answer": str(number + 1)},
    }
    for number in range(6)
]  # fmt: skip


def computing(told: list[tuple[str, float, float]], what: str) -> None:
    """Works until a job has said twice what it is busy with, if it is: how long that takes is for the machine to decide."""
    enough = times(told, what) + 2

    def heard() -> bool:
        sum(range(1_000_000))
        return times(told, what) >= enough or what not in [thread.name for thread in threading.enumerate()]

    until(heard)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, float, float]]:
    """What jobs say beside their steps, while reading rows takes a while."""
    heard: list[tuple[str, float, float]] = []

    def hear(job: Job, what: str, done: float = 0, of: float = 0, unit: str = "") -> None:
        heard.append((what, done, of))

    monkeypatch.setattr(Job, "doing", hear)
    monkeypatch.setattr(jobs, "HEARTBEAT_INTERVAL_S", 0.05)
    for name in ("stream", "opened"):
        read = getattr(records, name)
        monkeypatch.setattr(records, name, lambda *given, read=read: (computing(heard, "reading rows"), read(*given))[1])
    return heard


def counted(told: list[tuple[str, float, float]], what: str) -> list[tuple[float, float]]:
    return [(done, of) for said, done, of in told if said == what]


def times(told: list[tuple[str, float, float]], what: str) -> int:
    return len(counted(told, what))


def generated(asks: Any, *_: Any, arrived: Any = lambda *_: None, **__: Any) -> dict[Any, list[Generation]]:
    answers = {label: [Generation([5, 2], [-1.0, -1.0], "stop") for _ in ask.requests] for label, ask in asks.items()}
    for label, given in answers.items():
        arrived(label, given)
    return answers


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("policy")
    make(folder / "payload")
    return publish(folder, "source_model", "policy")


def test_sampling_shows_how_rows_are_read_tokenised_and_decoded(tmp_path: Path, policy: Any, told: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(sample, "generate", generated)
    asked = [{name: value for name, value in item.items() if name != "task"} for item in PROMPTS]
    inputs: Inputs = {"policies": {"a": policy, "b": policy}, "prompts": {"pool": dataset(tmp_path / "pool", "prompt", asked)}}
    config = config_of("sample", sampling={"max_tokens": 4}, samples_per_prompt=2, prompts={"count": 6, "index": 0})
    assert sample.run(config, inputs, a_job(tmp_path / "job"))["rows"] == 24
    assert times(told, "reading rows") >= 2
    assert counted(told, "tokenizing") == [(n, 24) for n in range(24)] and counted(told, "decoding") == [(n, 24) for n in range(24)]


def test_evaluation_shows_how_rows_are_read_tokenised_verified_and_compared(
    tmp_path: Path, policy: Any, told: Any, monkeypatch: Any
) -> None:
    real = evaluate.tabulate
    monkeypatch.setattr(evaluate, "generate", generated)
    # thousands of bootstraps take a while
    monkeypatch.setattr(evaluate, "tabulate", lambda *args: (computing(told, "comparing policies"), real(*args))[1])
    inputs: Inputs = {"policies": {"a": policy, "b": policy}, "suites": {"s": dataset(tmp_path / "suite", "item", PROMPTS)}}
    config = config_of("evaluate", sampling={"max_tokens": 4}, resamples=200)
    assert evaluate.run(config, inputs, a_job(tmp_path / "job"))["rows"] == 12
    assert times(told, "reading rows") >= 2 and times(told, "comparing policies") >= 2
    assert counted(told, "tokenizing") == [(n, 12) for n in range(12)] and counted(told, "verifying") == [(n, 12) for n in range(12)]


def test_an_evaluation_on_an_unseen_suite_says_how_many_models_it_looked_at(tmp_path: Path, policy: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(evaluate, "generate", generated)
    suite = dataset(tmp_path / "suite", "item", PROMPTS)
    secret = replace(suite, record=suite.record.model_copy(update={"config": {"split": "unseen"}}))
    inputs: Inputs = {"policies": {"a": policy, "again": policy}, "suites": {"s": secret}}
    config = config_of("evaluate", sampling={"max_tokens": 4}, resamples=200)
    metrics = evaluate.run(config, inputs, a_job(tmp_path / "job"))
    assert (metrics["split"], metrics["looks"]) == ("unseen", 1)  # twice the same bytes


def test_judging_shows_how_rows_are_read_verified_and_tokenised_and_the_model_loaded(tmp_path: Path, told: Any, monkeypatch: Any) -> None:
    from test_judge import a_reward_model, completion, sum_of

    model = a_reward_model(tmp_path / "model", seed=0, mean=0.0, std=1.0)
    rows = [completion(number, str(number + 1), sum_of(number)) for number in range(6)]
    inputs: Inputs = {"completions": {"c": dataset(tmp_path / "c", "completion", rows)}, "reward_models": {"rm": model}}
    job = a_job(tmp_path / "job", numerics=Numerics(threads=1))
    real = models.load_reward_model
    monkeypatch.setattr(rewards, "load_reward_model", lambda *args: (computing(told, "loading the model"), real(*args))[1])  # of gigabytes
    assert judge.run(config_of("judge", reward_weight=1.0), inputs, job)["rows"] == 6
    assert times(told, "reading rows") >= 2 and times(told, "loading the model") >= 1
    assert counted(told, "verifying") == counted(told, "tokenizing") == [(n, 6) for n in range(6)]


def test_measuring_how_real_a_reward_is_tells_how_far_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from test_overoptimization import ROWS

    steps: list[tuple[int, int]] = []
    monkeypatch.setattr(Job, "progress", lambda job, step, total, **_: steps.append((step, total)))
    inputs: Inputs = {"judgments": {"j": dataset(tmp_path / "j", "judgment", ROWS)}}
    assert overoptimization.run(config_of("overoptimization"), inputs, a_job(tmp_path / "job"))["rows"] == 4
    assert steps == [(n, 4) for n in range(5)]


def test_a_job_that_proves_its_inputs_tells_how_far_it_is(tmp_path: Path, told: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashing, "PIECE_BYTES", 1 << 8)
    given = dataset(tmp_path / "data", "item", PROMPTS * 20)
    size = (given.payload / "rows-00000.parquet").stat().st_size
    spec = JobSpec(
        address="r/s", kind="sample", version=1, key="k", config={}, source_files={}, code="",
        inputs={"prompts": {"pool": GivenInput.of(given, tmp_path / "job")}},
        numerics=Numerics(), placement=a_job(tmp_path / "job").placement,
    )  # fmt: skip
    open_inputs(spec, a_job(tmp_path / "job"))
    found = counted(told, "checking inputs")
    assert len(found) == -(-size // 256) >= 10 and found[-1] == (size / 1e9, size / 1e9)


def test_two_threads_that_beat_at_once_do_not_trip_over_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library inside a `busy` block calls back, and both say that the work goes on."""
    monkeypatch.setattr(jobs, "HEARTBEAT_INTERVAL_S", 0.0)
    job, failures = a_job(tmp_path), []

    def beat() -> None:
        try:
            for number in range(500):
                job.progress(number, 1000)
        except OSError as error:
            failures.append(error)

    threads = [threading.Thread(target=beat) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == [] and [path.name for path in tmp_path.iterdir()] == ["progress.json"]
