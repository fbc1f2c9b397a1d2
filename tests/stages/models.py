"""A tiny policy and jobs around it, for tests of the stages that train and sample."""

import faulthandler
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from waiting import deadline

from pedigree.configs.language.execution import Numerics, Placement
from pedigree.configs.language.kinds import KINDS
from pedigree.data.artifacts.artifacts import Artifact, Record, content_hash, open_artifact, scan, sha256_file, write_json
from pedigree.data.artifacts.provenance import code_files, code_sha256, fingerprint
from pedigree.data.chat.chat import Chat
from pedigree.data.chat.documents import Documents, schema, tokenized
from pedigree.data.chat.token_files import TokenFile, written
from pedigree.data.host.faults import FAULTS
from pedigree.data.records import records
from pedigree.pipelines.jobs.processes import MARK, kill_all
from pedigree.stages.__main__ import main as run_stage
from pedigree.stages.job import job as jobs
from pedigree.stages.job.job import Job
from pedigree.stages.job.spec import GivenFile, GivenInput, JobSpec
from pedigree.stages.training.token_cache import Units

TESTS = Path(__file__).parents[1]
IMPORTS = os.pathsep.join(map(str, (TESTS.parent, TESTS, TESTS / "stages")))
"""`PYTHONPATH` of processes that import what tests do."""


def publish(folder: Path, kind: str, artifact_type: str) -> Artifact:
    """Turns a folder with a payload into an artifact."""
    files = scan(folder / "payload")
    record = Record(
        kind=kind, version=1, type=artifact_type, config={}, inputs=(), key="0" * 64, content=content_hash(files), files=files, metrics={}
    )
    write_json(folder / "record.json", record.model_dump(mode="json"))
    return open_artifact(folder)


def dataset(folder: Path, artifact_type: str, rows: list[Any]) -> Artifact:
    records.save(folder, artifact_type, rows)
    return publish(folder, "prepare_data", artifact_type)


def a_job(folder: Path, numerics: Numerics | None = None, **placement: Any) -> Job:
    folder.mkdir(parents=True, exist_ok=True)
    placed = Placement(**placement)
    return Job(folder=folder, address="r/s", key="k", numerics=numerics or Numerics(), placement=placed, source_files={})


def config_of(kind: str, **fields: Any) -> Any:
    return KINDS[kind].config.model_validate(fields)


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
    from pedigree.stages.source_model import run as source_model

    corpus = dataset(folder / "corpus", "conversation", arithmetic(60))
    sizes = {"layers": 2, "hidden": hidden, "heads": 4, "kv_heads": 2, "ffn": 64, "vocabulary": 300, "context": 128, "seed": seed}
    config = config_of("source_model", source={"type": "random_llama", **sizes})
    job = a_job(folder / "job")
    source_model.run(config, {"corpus": {"corpus": corpus}}, job)
    return publish(job.out, "source_model", "policy")


def units(rows: Sequence[Any], documents: Documents, chat: Chat) -> Units:
    """What rows become, through a file of tokens."""
    return units_of_batch(tokenized(rows, documents, chat, schema(chat.highest_id)), documents.per_row)


def units_of_batch(batch: pa.RecordBatch, per_row: int) -> Units:
    """The units of a file with these documents; it lives as long as they do."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "some.arrow"
        with written(path, Path(folder) / "some.unfinished", batch.schema) as file:
            file.write_batch(batch)
        return Units(TokenFile(path), per_row)


def batch_of(documents: Sequence[tuple[Sequence[int], Sequence[bool]]], form: pa.Schema) -> pa.RecordBatch:
    """Documents (ids, trained), as in a file of tokens."""
    return pa.RecordBatch.from_pylist(
        [{"ids": ids, "trained_bits": np.packbits(trained).tobytes(), "num_trained": sum(trained[1:])} for ids, trained in documents], form
    )


def curve(job: Job) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (job.folder / "curve.jsonl").read_text().splitlines()]


Given = dict[str, dict[str, Artifact]]


def write_spec(
    folder: Path,
    kind: str,
    config: dict[str, Any],
    inputs: Given,
    numerics: Numerics,
    asked: dict[str, Any] | None = None,
    files: dict[str, Path] | None = None,
    **placement: Any,
) -> None:
    """What a job in `folder` is to do; `files` are those of the project that the config names."""
    folder.mkdir(parents=True, exist_ok=True)
    spec = JobSpec(
        address=f"test/{kind}",
        kind=kind,
        key="k",
        config=config_of(kind, **config).model_dump(mode="json"),
        version=KINDS[kind].version,
        inputs={port: {label: GivenInput.of(artifact, folder) for label, artifact in given.items()} for port, given in inputs.items()},
        source_files={name: GivenFile(path=str(place), sha256=sha256_file(place)) for name, place in (files or {}).items()},
        code=code_sha256(code_files()),
        numerics=numerics,
        placement=Placement(**placement),
        **{"fingerprint": fingerprint(kind), **(asked or {})},  # as the launcher does, which parses the code once for all jobs
    )
    (folder / "spec.json").write_text(spec.model_dump_json())  # inputs in the order given


def ranks_of(folder: Path) -> int:
    return json.loads((folder / "spec.json").read_text())["numerics"]["world_size"]


def _start(folder: Path, ranks: int, *command: str, faults: str | None = None) -> "subprocess.Popen[bytes]":
    """Starts a process as the launcher does, under torchrun for several ranks; its log and its mark are those of a job in `folder`."""
    torchrun = ["-m", "pedigree.stages.training.ranks", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": IMPORTS, MARK: str(folder)} | ({FAULTS: faults} if faults else {})
    with (folder / "log.txt").open("a") as log:
        return subprocess.Popen([sys.executable, *torchrun, *command], cwd=folder, env=env, stdout=log, stderr=log, start_new_session=True)


def start_job(folder: Path, *args: Any, **kwargs: Any) -> "subprocess.Popen[bytes]":
    """Starts a stage in a process of its own; arguments are those of `write_spec`."""
    write_spec(folder, *args, **kwargs)
    return _start(folder, ranks_of(folder), "-m", "pedigree.stages", str(folder))


def kill(job: "subprocess.Popen[bytes]", folder: Path) -> None:
    """SIGKILL for the job and all its ranks at once, which torchrun starts in sessions of their own."""
    kill_all(folder)
    job.wait()


def killed_at(point: str, passes: int, folder: Path, *args: Any, **kwargs: Any) -> None:
    """Runs a stage in a process of its own until it dies at a fault point.

    Args:
        point: its name.
        passes: how often the job passes it before.
        folder: of the job, which may go on there.
        args, kwargs: those of `write_spec`.
    """
    write_spec(folder, *args, **kwargs)
    with tempfile.TemporaryDirectory() as faults:
        (Path(faults) / point).write_text(str(passes))
        job = _start(folder, ranks_of(folder), "-m", "pedigree.stages", str(folder), faults=faults)
        try:
            job.wait(timeout=deadline(300))
        finally:
            kill(job, folder)
        assert (Path(faults) / "died.log").exists(), (folder / "log.txt").read_text()[-3000:]
    (folder / "done.json").unlink(missing_ok=True)  # another rank may have written that it lost this one


def run_job(folder: Path, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Runs a stage to its end in a process of its own; returns done.json."""
    process = start_job(folder, *args, **kwargs)
    process.wait(timeout=deadline(300))
    return told(folder)


def run(folder: Path, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Runs a stage to its end where processes are no matter; returns done.json."""
    write_spec(folder, *args, **kwargs)
    (done,) = run_written([folder])
    return done


def run_written(folders: Sequence[Path], apart: bool = False) -> list[dict[str, Any]]:
    """Runs what `write_spec` has written, one after another and without a start of seconds for each: jobs of one rank in this
    process, those of several ranks all in the same ones.

    Args:
        folders: of jobs of equally many ranks.
        apart: in a process of their own also where they have one rank, e.g. because they load a compiler.

    Returns:
        done.json of each.
    """
    (ranks,) = set(map(ranks_of, folders))
    if ranks > 1 or apart:
        _start(folders[0], ranks, __file__, *map(str, folders)).wait(timeout=deadline(600))
    else:
        for folder in folders:
            with (folder / "log.txt").open("a") as log, redirect_stdout(log), redirect_stderr(log), _as_it_was():
                run_stage(folder)
    return [told(folder, folders[0]) for folder in folders]


def measuring(script: str, policy: Artifact, folder: Path, *groups: dict[str, Any]) -> Callable[[str], Any]:
    """What a lab's script measures on two ranks, by the names of its cases: a group's share one start, when the first is asked for."""
    found: dict[str, Any] = {}

    def start(cases: dict[str, Any]) -> None:
        (folder / "cases.json").write_text(json.dumps(list(cases.values())))
        ranks = ["-m", "pedigree.stages.training.ranks", "--standalone", "--nproc-per-node", "2", script]
        command = [sys.executable, *ranks, str(policy.path), str(folder / "cases.json")]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": IMPORTS}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=deadline(600))
        numbers = [json.loads(line.removeprefix("numbers ")) for line in done.stdout.splitlines() if line.startswith("numbers ")]
        assert len(numbers) == len(cases), done.stderr[-3000:]
        found.update(zip(cases, numbers, strict=True))

    def measured(name: str) -> Any:
        if name not in found:
            start(next(cases for cases in groups if name in cases))
        return found[name]

    return measured


def told(folder: Path, log_of: Path | None = None) -> dict[str, Any]:
    assert (folder / "done.json").exists(), ((log_of or folder) / "log.txt").read_text()[-3000:]
    return json.loads((folder / "done.json").read_text())


def alive(pid: int) -> bool:
    """Whether a process runs; who was killed and not waited for is a zombie, where nobody inherits it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@contextmanager
def _as_it_was() -> Iterator[None]:
    """A job is master of its process: its handlers of signals and its environment are not to outlive it here."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    environment = dict(os.environ)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number in (signal.SIGUSR2, signal.SIGRTMIN):
            faulthandler.unregister(number)
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)


if __name__ == "__main__":
    sys.exit(next((code for folder in sys.argv[1:] if (code := run_stage(Path(folder)))), 0))


def told_while(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, activity: str) -> None:
    """Lets a function of a stage's code compute, again and again, until its job has reported the activity; fails if it never does."""
    reports, doing, function = [], jobs.Job.doing, getattr(module, name)
    monkeypatch.setattr(jobs, "HEARTBEAT_INTERVAL_S", 0.0)
    monkeypatch.setattr(jobs.Job, "doing", lambda job, what, *more: (reports.append(what), doing(job, what, *more)))

    def repeated(*given: Any) -> Any:
        end = time.monotonic() + deadline(10)
        while activity not in reports:
            assert time.monotonic() < end, f"{name} is silent; reported were {set(reports)}"
            function(*given)
        return function(*given)

    monkeypatch.setattr(module, name, repeated)
