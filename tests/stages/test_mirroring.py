"""A job whose machine is gone goes on elsewhere, from what it had sent to a store; and a store that fails ends no job."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import models
import pytest
import tiny_models
from faulty_store import FaultyStore, store_in_environment
from waiting import until

from pedigree.configs.language.execution import Numerics
from pedigree.data.artifacts.mirror import Mirror
from pedigree.data.store import storage

pytestmark = pytest.mark.slow
SFT = {"global_batch": 8, "epochs": 24, "max_length": 64, "dtype": "bf16", "optimizer": {"learning_rate": 1e-3}}
SAMPLE = {
    "sampling": {"temperature": 1.0, "max_tokens": 12},
    "samples_per_prompt": 3,
    "prompts": {"count": 12, "index": 0},
    "chunk_size": 4,
    "dtype": "fp32",
}
ONE = Numerics(threads=1)


@pytest.fixture(scope="module")
def sft(tmp_path_factory, policy, conversations) -> tuple[Any, ...]:
    """What an SFT job takes, and what it ends in when nobody disturbs it."""
    args = ("sft", SFT, {"policy": {"policy": policy}, "data": {"data": conversations}}, ONE)
    return args, models.run(tmp_path_factory.mktemp("undisturbed"), *args)


@pytest.fixture
def store() -> Iterator[FaultyStore]:
    with store_in_environment("bucket") as found:
        yield found


@pytest.fixture(params=["s3", pytest.param("folder", marks=pytest.mark.nightly)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "folder":
        return f"file://{tmp_path}/store"
    request.getfixturevalue("store")
    return "s3://bucket/runs"


def placed(url: str, **more: Any) -> dict[str, Any]:
    return {"checkpoint_url": url, "checkpoint_every_steps": 5, "heartbeat_timeout_s": 3, **more}


def killed_with_its_machine(folder: Path, url: str, args: Any, count: int) -> None:
    """A job that has sent so many checkpoints, killed; its folder is gone with it. Another, where it had ended before this process got a
    processor to see that."""
    for _ in range(5):
        job = models.start_job(folder, *args, **placed(url))
        until(lambda job=job: len(Mirror.of(url, "k").checkpoints()) >= count or job.poll() is not None, 120)
        models.kill(job, folder)
        ended = (folder / "done.json").exists()
        shutil.rmtree(folder)
        if not ended:
            return
        storage.remove(f"{url}/k")
    pytest.fail("it ends too soon: make it longer")


def test_another_machine_goes_on_and_ends_in_the_same_bytes(tmp_path, url, sft):
    args, undisturbed = sft
    killed_with_its_machine(tmp_path / "gone", url, args, 2)
    resumed = models.run(tmp_path / "other", *args, **placed(url))
    log = (tmp_path / "other" / "log.txt").read_text()
    assert "takes over from process" in log and "fetched step-" in log and "resumed from step-" in log, log
    assert resumed["content"] == undisturbed["content"] and resumed["metrics"] == undisturbed["metrics"]
    assert resumed["resumed_from"] >= "step-000010" and resumed["checkpoints"]["mirrored"] >= 1
    steps = [json.loads(line)["step"] for line in (tmp_path / "other" / "curve.jsonl").read_text().splitlines()]
    assert steps == list(range(1, undisturbed["metrics"]["steps"] + 1))
    kept = Mirror.of(url, "k").checkpoints()
    assert len(kept) == 2 and storage.entries(f"{url}/k/lease")[-1].name == "000002.released"


@pytest.mark.nightly
def test_what_lies_here_is_taken_where_the_mirror_has_nothing_newer(tmp_path, sft):
    args, undisturbed = sft
    url = f"file://{tmp_path}/store"
    job = models.start_job(tmp_path / "a", *args, **placed(url))
    until(lambda: Mirror.of(url, "k").checkpoints(), alive=lambda: job.poll() is None)
    models.kill(job, tmp_path / "a")
    resumed = models.run(tmp_path / "a", *args, **placed(url, heartbeat_timeout_s=600))
    log = (tmp_path / "a" / "log.txt").read_text()
    assert "takes over" not in log and "fetched" not in log  # its own lease, no waiting
    assert resumed["resumed_from"] and resumed["content"] == undisturbed["content"]


@pytest.mark.nightly
def test_a_slow_store_gets_the_checkpoint_that_training_has_long_left_behind(tmp_path, store, sft):
    args, _ = sft
    url, longer = "s3://bucket/runs", ("sft", {**SFT, "epochs": 500}, *args[2:])
    store.delay(5.0, 1, matching="PUT /bucket/runs/k/step-000005/")
    job = models.start_job(tmp_path / "a", *longer, **placed(url, heartbeat_timeout_s=60, keep_checkpoints=1))
    try:
        until(lambda: Mirror.of(url, "k").checkpoints(), alive=lambda: job.poll() is None)
        assert Mirror.of(url, "k").checkpoints()[0] == "step-000005"
        # the newest came after it
        until(lambda: "step-000005" not in Mirror.of(url, "k").checkpoints(), alive=lambda: job.poll() is None)
        here = {path.name for path in (tmp_path / "a" / "checkpoints").glob("step-*")}
        assert "step-000005" not in here and "WARNING" not in (tmp_path / "a" / "log.txt").read_text()
    finally:
        models.kill(job, tmp_path / "a")


@pytest.mark.nightly
def test_finished_chunks_are_not_generated_again_elsewhere(tmp_path, store):
    url = "s3://bucket/runs"
    for name, seed in (("a", 0), ("b", 1)):
        tiny_models.make(tmp_path / name / "payload", seed=seed)
    policies = {name: models.publish(tmp_path / name, "source_model", "policy") for name in "ab"}
    prompts = [
        {"id": f"p{n}", "source": "test", "messages": [{"role": "user", "content": f"What is {n} + 1?"}], "verifier": None}
        for n in range(12)
    ]
    pool = models.dataset(tmp_path / "pool", "prompt", prompts)
    args = ("sample", SAMPLE, {"policies": policies, "prompts": {"pool": pool}}, ONE)
    patient = placed(url, heartbeat_timeout_s=120)  # the engine takes its time before it first speaks
    whole = models.run(tmp_path / "gone", *args, **patient)
    assert whole["ok"], whole
    shutil.rmtree(tmp_path / "gone")
    sent = storage.entries(f"{url}/k/chunks")
    for entry in sent[3:]:  # as if the machine had gone before it sent them
        storage.remove(f"{url}/k/chunks/{entry.name}")
    resumed = models.run(tmp_path / "other", *args, **patient)
    assert "fetched 3 finished chunks" in (tmp_path / "other" / "log.txt").read_text()
    assert resumed["content"] == whole["content"] and resumed["checkpoints"]["mirrored"] == len(sent) - 3 > 0
