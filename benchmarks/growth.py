"""What stages of data cost as their rows grow: seconds, CPU-seconds and memory of a whole job, from its process's start to its end.

    python -m benchmarks.growth [--sizes 10000,100000,1000000] [--only rows|answers|pairs]

Rows are of chat, of about 1,300 characters, made of made sentences; one in two hundred stands there twice, and one with another end.
They are read from JSONL, put into records, filtered, freed of exact and near duplicates, validated, shuffled and written (prepare_data),
and then compared with forty benchmarks of made problems (decontaminate), each by two processes. As many answers, four to a prompt, are
verified (judge), the best of each prompt becomes a conversation (best_answers), and prompts with both right and wrong answers are kept
(select_prompts); as many prompts get constraints (constrain); and as many judged answers become pairs (pair). These take one process.
Memory is the most that all processes of the job held together, looked at ten times a second; pages of files, which the system may take
back, do not count.

Of the largest number all are made a second time, by one process after a first try by three that was killed (-9) on its way; what
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
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.disguises import chat, problems, prose, shuffled
from benchmarks.report import RESULTS, RUNS, Interval, Watch, described
from benchmarks.workloads import seal
from pedigree.configs.language.execution import Numerics, Placement
from pedigree.configs.language.kinds import KINDS
from pedigree.data.artifacts.artifacts import open_artifact, sha256_file
from pedigree.data.artifacts.provenance import code_files, code_sha256, hardware
from pedigree.data.records import columns, records
from pedigree.stages.job.spec import GivenFile, GivenInput, JobSpec

ROOT = Path(__file__).resolve().parents[1]
FOUND = RESULTS / "growth" / "rows.json"
SIZES = (10_000, 100_000, 1_000_000)
SUITES, ITEMS, COPIES, PART, ANSWERS = 40, 500, 200, 10_000, 4
END = 20
"""Characters that a near copy lacks."""
FILTERS = [{"type": one} for one in ("empty_or_repeated_turns", "control_tokens", "exact_duplicates", "near_duplicates")]
WORKERS, OTHERS = 2, 3
LOOK_S = 0.1


class Cost(NamedTuple):
    """Cost of a job."""

    seconds: float
    cpu_seconds: float
    mib: float
    """Peak memory of all its processes together."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="numbers of rows")
    parser.add_argument("--only", choices=JOBS, action="append", help="what is measured; what else was measured before stays")
    told = parser.parse_args()
    sizes = [int(size) for size in told.sizes.split(",")]
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_FOLDER")) as folder:
        for name in told.only or JOBS:
            run, watch, costs = JOBS[name], Watch(), {}
            for number in range(RUNS):
                for size in sizes:
                    for stage, cost in run(Path(folder) / f"{size}-{number}", size):
                        costs.setdefault(stage, {}).setdefault(size, []).append(cost)
                        print(f"{stage}, {size} rows: {cost.seconds:.1f} s, {cost.cpu_seconds:.1f} CPU-s, {cost.mib:.0f} MiB", flush=True)
            prove_equal(Path(folder), max(sizes), run)
            keep(costs, {"hardware": hardware(), "machine": watch.read(), "date": date.today().isoformat()})


def keep(costs: dict[str, dict[int, list[Cost]]], measured: dict[str, Any]) -> None:
    """Add the costs of stages to those measured before; `measured` records where and when."""
    seen = json.loads(FOUND.read_text()) if FOUND.exists() else {"stages": {}, "measured": {}}
    for stage, sized in costs.items():
        seen["stages"].setdefault(stage, {}).update({str(size): summary(size, found) for size, found in sized.items()})
        seen["measured"][stage] = measured
    FOUND.parent.mkdir(parents=True, exist_ok=True)
    FOUND.write_text(json.dumps(seen, indent=1, sort_keys=True) + "\n")


def summary(size: int, costs: Sequence[Cost]) -> dict[str, Any]:
    columns = {name: [getattr(cost, name) for cost in costs] for name in Cost._fields}
    columns["rows_per_cpu_second"] = [size / seconds for seconds in columns["cpu_seconds"]]
    return {name: described(Interval.of(values)) for name, values in columns.items()}


def rows_in(path: Path, count: int) -> Path:
    """A file with this many rows; written if missing."""
    if path.exists():
        return path
    said, draw = prose(PART, 0), random.Random(count)
    with path.open("w") as stream:
        for start in range(0, count, PART):
            for text in shuffled(said, min(PART, count - start), start):
                chance = COPIES * draw.random()
                stream.write(line(text) + (line(text) if chance < 1 else line(text[:-END]) if chance < 2 else ""))
    return path


def line(text: str) -> str:
    return json.dumps(chat(text[: len(text) // 3] or "Go on.", text[len(text) // 3 :] or "Well.")) + "\n"


def judged(folder: Path, count: int) -> Path:
    """An artifact with this many judged answers; made if missing."""
    draw = random.Random(count)
    return stored(folder, "judgment", count, lambda place, text: judgment(place, text, draw.random()))


def stored(folder: Path, artifact_type: str, count: int, row: Callable[[int, str], dict[str, Any]]) -> Path:
    """An artifact with this many rows, each made from its position and a text; made if missing."""
    if folder.exists():
        return folder
    said = prose(PART // ANSWERS, 1)
    texts = [text for start in range(0, count, PART) for text in shuffled(said, min(PART, count - start), start)]
    sizes = [len(text) for text in texts]
    for number, part in enumerate(columns.file_cuts(sizes)):
        rows = [row(place, texts[place]) for place in range(count)[part]]
        columns.write(folder / "payload" / records.file_name(number), columns.to_table(rows, records.RECORDS[artifact_type]), sizes[part])
    seal(folder, artifact_type)
    return folder


def prompt(place: int, text: str) -> dict[str, Any]:
    """A row of `prepare_data`."""
    return {"id": f"p{place}", "source": "made", "messages": asked(place, text[: len(text) // 3]), "verifier": None}


def asked(place: int, text: str = "") -> list[dict[str, Any]]:
    return [{"role": "user", "content": f"Go on, for the {place}th time. {text}".strip()}]


def answered(place: int) -> dict[str, Any]:
    """Fields shared by the rows of `sample` and of `judge`."""
    number, index = divmod(place, ANSWERS)
    named = {"id": f"p{number}/sft/{index}", "prompt_id": f"p{number}", "source": "made", "messages": asked(number)}
    return named | {"policy": "sft", "policy_content": "0" * 64, "on_policy": True, "finish_reason": "stop"}


def completion(place: int, text: str, right: bool) -> dict[str, Any]:
    """A row of `sample`."""
    number, answer = place // ANSWERS, text[len(text) // 3 :]
    return answered(place) | {
        "messages": asked(number, text[: len(text) // 3]),
        "verifier": {"name": "gsm8k", "answer": str(number)},
        "index": place % ANSWERS,
        "seed": place,
        "prompt_ids": list(range(len(text) // 12)),
        "response_ids": list(range(len(text) // 6)),
        "logprobs": [-0.5] * (len(text) // 6),
        "text": f"{answer} The answer is {number if right else number + 1}.",
    }


def judgment(place: int, text: str, score: float) -> dict[str, Any]:
    """A row of `judge`."""
    nobody = {"verifier_score": None, "rewards": {}, "reward": None, "disagreement": None, "ratings": {}, "rating": None, "win_rate": None}
    words = {"text": text[len(text) // 3 :] or "Well.", "response_length": len(text) // 4}
    return answered(place) | words | {"score": score, **nobody}


def of_rows(folder: Path, size: int, measured: "Measured | None" = None) -> Iterator[tuple[str, Cost]]:
    """`prepare_data` on a file with this many rows, and `decontaminate` on its output."""
    measured, rows = measured or job, rows_in(folder.parent / f"{size}.jsonl", size)
    prepare = {"record": "conversation", "sources": [{"type": "files", "path": rows.name}], "filters": FILTERS}
    yield "prepare_data", measured(folder / "prepare_data", "prepare_data", prepare, {}, {rows.name: rows})
    seal(folder / "prepare_data" / "out", "conversation")
    inputs = {"data": {"d": folder / "prepare_data" / "out"}, "benchmarks": suites(folder / "suites")}
    yield "decontaminate", measured(folder / "decontaminate", "decontaminate", {}, inputs, {})


def of_answers(folder: Path, size: int, measured: "Measured | None" = None) -> Iterator[tuple[str, Cost]]:
    """The stages without a model, on this many answers and prompts."""
    measured, draw = measured or job, random.Random(size)
    completions = stored(folder.parent / f"{size}-answers", "completion", size, lambda *given: completion(*given, draw.random() < 0.5))
    prompts = {"p": stored(folder.parent / f"{size}-prompts", "prompt", size, prompt)}
    yield "judge", measured(folder / "judge", "judge", {}, {"completions": {"c": completions}}, {})
    seal(folder / "judge" / "out", "judgment")
    judgments = {"j": folder / "judge" / "out"}
    yield "best_answers", measured(folder / "best_answers", "best_answers", {"keep": "best_of_n"}, {"judgments": judgments}, {})
    bounds, given = {"min_mean": 0.2, "max_mean": 0.8}, {"prompts": prompts, "judgments": judgments}
    yield "select_prompts", measured(folder / "select_prompts", "select_prompts", bounds, given, {})
    yield "constrain", measured(folder / "constrain", "constrain", {}, {"prompts": prompts}, {})


def of_pairs(folder: Path, size: int, measured: "Measured | None" = None) -> Iterator[tuple[str, Cost]]:
    """`pair` on this many judged answers."""
    inputs = {"judgments": {"j": judged(folder.parent / f"{size}-judgments", size)}}
    yield "pair", (measured or job)(folder / "pair", "pair", {}, inputs, {})


Measured = Callable[..., Cost]
"""Runs a job: `job`, or `job_that_was_killed`."""
JOBS = {"rows": of_rows, "answers": of_answers, "pairs": of_pairs}


def prove_equal(folder: Path, size: int, run: Callable[..., Iterator[tuple[str, Cost]]]) -> None:
    """Makes all of it again in another way.

    Raises:
        RuntimeError: something else comes out.
    """
    again = folder / f"{size}-again"
    for stage, cost in run(again, size, job_that_was_killed):
        if hashes(again / stage) != hashes(folder / f"{size}-0" / stage):
            raise RuntimeError(f"{stage} of {size} rows gives other bytes by one process after a kill than by {WORKERS}")
        print(f"{stage}, {size} rows: the same bytes by one process after a kill, in {cost.seconds:.1f} s", flush=True)


def hashes(job: Path) -> dict[str, str]:
    """Hashes of the files that a job has made."""
    return {path.name: sha256_file(path) for path in (job / "out" / "payload").iterdir()}


def suites(folder: Path) -> dict[str, Path]:
    """Benchmarks of synthetic problems."""
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
    """Number of rows that a job reports as done."""
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
        version=KINDS[kind].version,
        config=KINDS[kind].config.model_validate(config).model_dump(mode="json"),
        inputs=given,
        source_files={name: GivenFile(path=os.path.relpath(path, folder), sha256=sha256_file(path)) for name, path in files.items()},
        code=code_sha256(code_files()),
        numerics=Numerics(threads=workers),
        placement=Placement(),
    )
    (folder / "spec.json").write_text(spec.model_dump_json())


def start(folder: Path) -> "subprocess.Popen[bytes]":
    with (folder / "log.txt").open("w") as log:
        command = [sys.executable, "-m", "pedigree.stages", str(folder)]
        return subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)


class Watched:
    """Sample the memory of a process and its descendants until the process ends."""

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
    """KiB of a process, with its share of shared pages."""
    with suppress(OSError):
        lines = (line.split() for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines())
        return sum(int(line[1]) for line in lines if line[0] in ("Pss_Anon:", "Pss_Shmem:"))
    return 0


if __name__ == "__main__":
    main()
