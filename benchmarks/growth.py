"""What stages of data cost as their rows grow: seconds, CPU-seconds and memory of a whole job, from its process's start to its end.

    python -m benchmarks.growth [--sizes 10000,100000,1000000]

Rows are of chat, of about 1,300 characters, made of made sentences; one in two hundred stands there twice, and one with another end.
They are read from JSONL, put into records, filtered, freed of exact and near duplicates, validated, shuffled and written (prepare_data),
and then compared with forty benchmarks of made problems (decontaminate), each by two processes. Memory is the most that all processes of
the job held together, looked at ten times a second; pages of files, which the system may take back, do not count.

Of the largest number, both are made a second time, by one process after a first try by three that was killed (-9) on its way; what
comes out must be the same, byte for byte, or nothing is written.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.disguises import chat, problems, prose, shuffled
from benchmarks.report import RESULTS, RUNS, Interval, Watch, described
from benchmarks.workloads import seal
from configs.declarations import DECLARATIONS
from configs.execution import Numerics, Placement
from data import records
from data.artifacts import open_artifact, sha256_file
from data.provenance import code_files, code_sha256, hardware
from stages.job import GivenFile, GivenInput, JobSpec

ROOT = Path(__file__).resolve().parents[1]
FOUND = RESULTS / "growth" / "rows.json"
SIZES = (10_000, 100_000, 1_000_000)
SUITES, ITEMS, COPIES, PART = 40, 500, 200, 10_000
END = 20
"""Characters that a near copy lacks."""
FILTERS = [{"type": one} for one in ("empty_or_repeated_turns", "control_tokens", "exact_duplicates", "near_duplicates")]
WORKERS, OTHERS = 2, 3
LOOK_S = 0.1


class Cost(NamedTuple):
    """Of a job."""

    seconds: float
    cpu_seconds: float
    mib: float
    """The most that its processes held together."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="numbers of rows")
    sizes = [int(size) for size in parser.parse_args().sizes.split(",")]
    watch, costs = Watch(), {stage: {size: [] for size in sizes} for stage in ("prepare_data", "decontaminate")}
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_FOLDER")) as folder:
        files = {size: rows_in(Path(folder) / f"{size}.jsonl", size) for size in sizes}
        for number in range(RUNS):
            for size in sizes:
                for stage, cost in run(Path(folder) / f"{size}-{number}", files[size]):
                    costs[stage][size].append(cost)
                    print(f"{stage}, {size} rows: {cost.seconds:.1f} s, {cost.cpu_seconds:.1f} CPU-s, {cost.mib:.0f} MiB", flush=True)
        prove_equal(Path(folder), max(sizes), files[max(sizes)])
    measured = {stage: {str(size): summary(size, found) for size, found in sized.items()} for stage, sized in costs.items()}
    FOUND.parent.mkdir(parents=True, exist_ok=True)
    FOUND.write_text(json.dumps({"stages": measured, "hardware": hardware(), "machine": watch.read()}, indent=1, sort_keys=True) + "\n")


def summary(size: int, costs: Sequence[Cost]) -> dict[str, Any]:
    columns = {name: [getattr(cost, name) for cost in costs] for name in Cost._fields}
    columns["rows_per_cpu_second"] = [size / seconds for seconds in columns["cpu_seconds"]]
    return {name: described(Interval.of(values)) for name, values in columns.items()}


def rows_in(path: Path, count: int) -> Path:
    """A file of so many rows."""
    said, draw = prose(PART, 0), random.Random(count)
    with path.open("w") as stream:
        for start in range(0, count, PART):
            for text in shuffled(said, min(PART, count - start), start):
                chance = COPIES * draw.random()
                stream.write(line(text) + (line(text) if chance < 1 else line(text[:-END]) if chance < 2 else ""))
    return path


def line(text: str) -> str:
    return json.dumps(chat(text[: len(text) // 3] or "Go on.", text[len(text) // 3 :] or "Well.")) + "\n"


def run(folder: Path, rows: Path, measured: Callable[..., Cost] | None = None) -> Iterator[tuple[str, Cost]]:
    """The stages one after the other, each on what the one before it made.

    Args:
        folder: of the jobs.
        rows: the file.
        measured: runs a job; `job` by default.
    """
    measured = measured or job
    prepare = {"record": "conversation", "sources": [{"type": "files", "path": rows.name}], "filters": FILTERS}
    yield "prepare_data", measured(folder / "prepare_data", "prepare_data", prepare, {}, {rows.name: rows})
    seal(folder / "prepare_data" / "out", "conversation")
    inputs = {"data": {"d": folder / "prepare_data" / "out"}, "benchmarks": suites(folder / "suites")}
    yield "decontaminate", measured(folder / "decontaminate", "decontaminate", {}, inputs, {})


def prove_equal(folder: Path, size: int, rows: Path) -> None:
    """Makes all of it again in another way.

    Raises:
        RuntimeError: something else comes out.
    """
    again = folder / f"{size}-again"
    for stage, cost in run(again, rows, job_that_was_killed):
        if hashes(again / stage) != hashes(folder / f"{size}-0" / stage):
            raise RuntimeError(f"{stage} of {size} rows gives other bytes by one process after a kill than by {WORKERS}")
        print(f"{stage}, {size} rows: the same bytes by one process after a kill, in {cost.seconds:.1f} s", flush=True)


def hashes(job: Path) -> dict[str, str]:
    """Of the files that a job has made."""
    return {path.name: sha256_file(path) for path in (job / "out" / "payload").iterdir()}


def suites(folder: Path) -> dict[str, Path]:
    """Benchmarks of made problems."""
    texts, found = problems(SUITES * ITEMS, 0), {}
    for number in range(SUITES):
        asked = [[{"role": "user", "content": text}] for text in texts[number::SUITES]]
        shared = {"source": "made", "task": f"made_{number}", "verifier": {"name": "gsm8k", "answer": "1"}}
        items = [{"id": f"made_{number}-{place}", "messages": messages, **shared} for place, messages in enumerate(asked)]
        found[f"b{number}"] = folder / str(number)
        records.save(found[f"b{number}"], "item", items)
        seal(found[f"b{number}"], "item")
    return found


def job(
    folder: Path, kind: str, config: dict[str, Any], inputs: dict[str, dict[str, Path]], files: dict[str, Path], workers: int = WORKERS
) -> Cost:
    """Runs a stage as the launcher does, and measures it.

    Raises:
        RuntimeError: it failed; the message is the end of its log.
    """
    write_spec(folder, kind, config, inputs, files, workers)
    began = time.monotonic()
    process = start(folder)
    watched = Watched(process.pid)
    _, status, used = os.wait4(process.pid, 0)
    seconds = time.monotonic() - began
    if status:
        raise RuntimeError((folder / "log.txt").read_text()[-2000:])
    return Cost(seconds, used.ru_utime + used.ru_stime, watched.most() / 1024)


def job_that_was_killed(folder: Path, kind: str, *given: Any) -> Cost:
    """The same by one process, after a try by more of them that was killed with rows behind it.

    Raises:
        RuntimeError: it was over before, or failed.
    """
    write_spec(folder, kind, *given, OTHERS)
    process = start(folder)
    while process.poll() is None and not rows_behind(folder):
        time.sleep(LOOK_S)
    os.killpg(process.pid, signal.SIGKILL)
    if process.wait() != -signal.SIGKILL:
        raise RuntimeError(f"{kind} was over before it could be killed: take more rows")
    return job(folder, kind, *given, workers=1)


def rows_behind(folder: Path) -> int:
    """How many rows a job says that it has done."""
    with suppress(OSError, ValueError):
        told = json.loads((folder / "progress.json").read_text())
        return max(told["step"], (told["doing"] or {"done": 0})["done"])
    return 0


def write_spec(
    folder: Path, kind: str, config: dict[str, Any], inputs: dict[str, dict[str, Path]], files: dict[str, Path], workers: int
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    given = {port: {label: GivenInput.of(open_artifact(one), folder) for label, one in some.items()} for port, some in inputs.items()}
    spec = JobSpec(
        address=f"bench/{kind}",
        kind=kind,
        key="k",
        version=DECLARATIONS[kind].version,
        config=DECLARATIONS[kind].config.model_validate(config).model_dump(mode="json"),
        inputs=given,
        source_files={name: GivenFile(path=os.path.relpath(path, folder), sha256=sha256_file(path)) for name, path in files.items()},
        code=code_sha256(code_files()),
        numerics=Numerics(threads=workers),
        placement=Placement(),
    )
    (folder / "spec.json").write_text(spec.model_dump_json())


def start(folder: Path) -> "subprocess.Popen[bytes]":
    with (folder / "log.txt").open("w") as log:
        command = [sys.executable, "-m", "stages", str(folder)]
        return subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)


class Watched:
    """The memory of a process and all that it has started, looked at until the process ends."""

    def __init__(self, pid: int) -> None:
        self._pid, self._most, self._ended = pid, 0, threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def most(self) -> int:
        """KiB."""
        self._ended.set()
        self._thread.join()
        return self._most

    def _look(self) -> None:
        while not self._ended.wait(LOOK_S):
            self._most = max(self._most, sum(map(held, family(self._pid))))


def family(pid: int) -> Iterator[int]:
    yield pid
    with suppress(OSError):
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            yield from family(int(child))


def held(pid: int) -> int:
    """KiB of a process, shared ones by its share."""
    with suppress(OSError):
        lines = (line.split() for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines())
        return sum(int(line[1]) for line in lines if line[0] in ("Pss_Anon:", "Pss_Shmem:"))
    return 0


if __name__ == "__main__":
    main()
