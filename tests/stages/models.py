"""A tiny policy and jobs around it, for tests of the stages that train and sample."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from configs.declarations import DECLARATIONS
from configs.execution import Numerics, Placement
from data import records
from data.artifacts import Artifact, Record, content_hash, open_artifact, scan, write_json
from pipelines.launcher import MARK, kill_all
from stages.job import Job, JobSpec


def publish(folder: Path, kind: str, artifact_type: str) -> Artifact:
    """Turns a folder with a payload into an artifact."""
    files = scan(folder / "payload")
    record = Record(
        kind=kind, version=1, type=artifact_type, config={}, inputs=(), key="k", content=content_hash(files), files=files, metrics={}
    )
    write_json(folder / "record.json", record.model_dump(mode="json"))
    return open_artifact(folder)


def dataset(folder: Path, artifact_type: str, rows: list[Any]) -> Artifact:
    records.save(folder, rows)
    return publish(folder, "prepare_data", artifact_type)


def a_job(folder: Path, numerics: Numerics | None = None, **placement: Any) -> Job:
    folder.mkdir(parents=True, exist_ok=True)
    placed = Placement(**placement)
    return Job(folder=folder, address="r/s", key="k", numerics=numerics or Numerics(), placement=placed, source_files={})


def config_of(kind: str, **fields: Any) -> Any:
    return DECLARATIONS[kind].config.model_validate(fields)


def arithmetic(count: int) -> list[dict[str, Any]]:
    """Conversations of unequal length."""
    rows = []
    for i in range(count):
        a, b = 7 * i % 97, 13 * i % (10 if i % 3 else 1000)
        messages = [{"role": "user", "content": f"What is {a} + {b}?"}, {"role": "assistant", "content": str(a + b)}]
        rows.append({"id": f"row-{i}", "source": "test", "messages": messages})
    return rows


def sums_or_not_known(count: int) -> list[dict[str, Any]]:
    """Certain pairs, short enough for documents of 64 tokens: the sum is better than "not known"."""
    rows = []
    for row in arithmetic(count):
        question, answer = row["messages"]
        answers = [{"text": text, "score": None} for text in (answer["content"], "not known")]
        rows.append({**row, "messages": [question], "answers": answers, "strength": None})
    return rows


def tiny_policy(folder: Path, seed: int = 0, hidden: int = 32) -> Artifact:
    """The policy that `source_model` makes of a few rows: two layers, its own tokenizer."""
    from stages import source_model

    corpus = dataset(folder / "corpus", "conversation", arithmetic(60))
    sizes = {"layers": 2, "hidden": hidden, "heads": 4, "kv_heads": 2, "ffn": 64, "vocabulary": 300, "context": 128, "seed": seed}
    config = config_of("source_model", source={"type": "random_llama", **sizes})
    job = a_job(folder / "job")
    source_model.run(config, {"corpus": {"corpus": corpus}}, job)
    return publish(job.out, "source_model", "policy")


def curve(job: Job) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (job.folder / "curve.jsonl").read_text().splitlines()]


Given = dict[str, dict[str, Artifact]]


def start_job(
    folder: Path,
    kind: str,
    config: dict[str, Any],
    inputs: Given,
    numerics: Numerics,
    asked: dict[str, Any] | None = None,
    **placement: Any,
):
    """Starts a stage as the launcher does: a process of its own, under torchrun for several ranks."""
    folder.mkdir(parents=True, exist_ok=True)
    spec = JobSpec(
        address=f"test/{kind}",
        kind=kind,
        key="k",
        config=config_of(kind, **config).model_dump(mode="json"),
        inputs={port: {label: str(artifact.path) for label, artifact in given.items()} for port, given in inputs.items()},
        source_files={},
        numerics=numerics,
        placement=Placement(**placement),
        **(asked or {}),
    )
    (folder / "spec.json").write_text(spec.model_dump_json())  # inputs in the order given
    ranks = ["-m", "stages.engines.ranks", "--standalone", "--nproc-per-node", str(numerics.world_size)] if numerics.world_size > 1 else []
    command = [sys.executable, *ranks, "-m", "stages", str(folder)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2]), MARK: str(folder)}
    with (folder / "log.txt").open("a") as log:
        return subprocess.Popen(command, cwd=folder, env=env, stdout=log, stderr=log, start_new_session=True)


def kill(job: "subprocess.Popen[bytes]", folder: Path) -> None:
    """SIGKILL for the job and all its ranks at once, which torchrun starts in sessions of their own."""
    kill_all(folder)
    job.wait()


def run_job(folder: Path, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Runs a stage to its end; returns done.json."""
    process = start_job(folder, *args, **kwargs)
    process.wait(timeout=300)
    assert (folder / "done.json").exists(), (folder / "log.txt").read_text()[-3000:]
    return json.loads((folder / "done.json").read_text())
