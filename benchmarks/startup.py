"""What a job costs before its first step, and what a stage costs besides its job.

    python -m benchmarks.startup

Start-up: seconds from the start of the process of an SFT job until its first optimizer step can begin, as the launcher starts it,
against TRL's SFTTrainer on the same tiny model and rows, and against the bare imports of torch, transformers and deepspeed.

Orchestration: `pedigree run` on a chain of stages that do next to nothing. From the end of one stage to the end of the next, less the
life of its job's process (which includes hashing), is what planning, leases, publishing and DVC take. The peer is `dvc repro` on a
chain of as many copies of a file. The same runs say how long a command takes until its first job is submitted, until that job gives
its first sign of life, and when there is nothing to do. No Prefect server is configured.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.report import RUNS, Reading, Watch, write
from benchmarks.workloads import THREADS, Workload, read

JOB = Workload("sft", "llama-tiny", 256, 4, 3, 2, "start of a training job", 1.0)
STARTS, STAGES = 3, 8
ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("torch", "transformers", "deepspeed", "trl", "dvc", "prefect")
GOAL_S = 1.0
"""Of orchestration, for one stage."""
GOAL_FIRST_S, GOAL_NOTHING_S = 3.0, 2.0
"""Of a command until its first job is submitted, and of one that has nothing to do."""
PROFILE = "slots: 1\nnumerics: {device: cpu, threads: 1}\n"

Event = tuple[float, str, str]
"""(when, what, address of the stage); what is `job started`, `first sign`, `job ended` or a state of the stage."""


# --- a job until its first step ------------------------------------------------------------------------------------------


class Marks:
    """Moments of this process, written down when the last of them has come."""

    def __init__(self, folder: Path) -> None:
        self.path, self.moments = folder / "marks.json", {}

    def add(self, name: str) -> None:
        self.moments[name] = time.time()

    def finish(self) -> None:
        self.add("ready")
        self.path.write_text(json.dumps(self.moments))
        os._exit(0)


def job(folder: Path) -> None:
    """Our side: what `python -m pedigree.stages` does, up to the first pass of its first step."""
    marks = Marks(folder)
    import deepspeed  # noqa: F401
    import transformers  # noqa: F401

    import pedigree.stages.__main__ as entry
    from pedigree.stages.sft import run as sft
    from pedigree.stages.training.feed import Feed

    marks.add("imported")
    construct = sft.Trainer

    def timed(*args: Any, **kwargs: Any) -> Any:
        marks.add("engine begun")
        made = construct(*args, **kwargs)
        marks.add("engine made")
        return made

    sft.Trainer = timed  # pyright: ignore
    Feed.micro_batches = lambda _: marks.finish()  # pyright: ignore
    entry.main(folder / "job")


def peer(folder: Path) -> None:
    """TRL's side."""
    marks = Marks(folder)
    import torch  # noqa: F401
    from transformers import TrainerCallback
    from trl import SFTTrainer  # noqa: F401

    from benchmarks.peer import trainer_of

    marks.add("imported")

    class Ready(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            marks.finish()

    marks.add("engine begun")
    made = trainer_of(read(folder), folder, [Ready()])
    marks.add("engine made")
    made.train()


def prepare(folder: Path) -> dict[str, str]:
    """Model, rows and the job's spec; returns the environment that the launcher gives a job."""
    from benchmarks.ours import config_of
    from pedigree.configs.language.execution import Numerics, Placement
    from pedigree.configs.language.kinds import KINDS
    from pedigree.data.artifacts.artifacts import open_artifact
    from pedigree.data.artifacts.provenance import CODE_ROOT, code_files, code_sha256
    from pedigree.pipelines.jobs.launcher import job_environment
    from pedigree.stages.job.job import GivenInput, JobSpec

    folder.mkdir()
    JOB.write(folder)
    subprocess.run([sys.executable, "-m", "benchmarks.workloads", str(folder)], check=True)
    scratch, numerics = folder / "job", Numerics(threads=THREADS)
    scratch.mkdir()
    spec = JobSpec(
        address="bench/sft",
        kind="sft",
        key="k",
        config=config_of(JOB).model_dump(mode="json"),
        version=KINDS["sft"].version,
        inputs={name: {name: GivenInput.of(open_artifact(folder / name), scratch)} for name in ("policy", "data")},
        source_files={},
        code=code_sha256(code_files()),
        numerics=numerics,
        placement=Placement(),
    )
    (scratch / "spec.json").write_text(spec.model_dump_json())
    return job_environment(scratch, numerics, CODE_ROOT, [0]) | {"HF_HUB_OFFLINE": "1"}


def started(side: str, folder: Path, environment: Mapping[str, str]) -> dict[str, float]:
    """Seconds of one start, in its parts."""
    (folder / "marks.json").unlink(missing_ok=True)
    began = time.time()
    command = [sys.executable, "-m", "benchmarks.startup", side, str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if not (folder / "marks.json").exists():
        raise RuntimeError(f"{side} did not come to its first step:\n{done.stdout[-1500:]}{done.stderr[-1500:]}")
    return parts(began, json.loads((folder / "marks.json").read_text()))


def parts(began: float, moments: Mapping[str, float]) -> dict[str, float]:
    """Imports, engine and the rest of a start, which together are all of it."""
    whole, imports = moments["ready"] - began, moments["imported"] - began
    engine = moments["engine made"] - moments["engine begun"]
    return {"all": whole, "imports": imports, "engine": engine, "rest": whole - imports - engine}


def bare(environment: Mapping[str, str]) -> float:
    began = time.time()
    subprocess.run([sys.executable, "-c", "import torch, transformers, deepspeed"], env=environment, capture_output=True, check=True)
    return time.time() - began


def median_parts(starts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: statistics.median(start[name] for start in starts) for name in starts[0]}


def startup(folder: Path) -> list[Reading]:
    environment = prepare(folder)
    sides: dict[str, list[dict[str, float]]] = {"job": [], "peer": []}
    imports = []
    for number in range(STARTS + 1):
        taken = {side: started(side, folder, environment) for side in (sides if number % 2 else reversed(sides))}
        floor = bare(environment)
        if number:  # the first reads from the disk what the others find in memory
            imports.append(floor)
            for side, found in taken.items():
                sides[side].append(found)
    ours, theirs = (median_parts(sides[side]) for side in ("job", "peer"))
    whole = {side: [start["all"] for start in starts] for side, starts in sides.items()}
    return [
        Reading(
            "start of an SFT job until its first step, against TRL",
            whole["job"],
            whole["peer"],
            "s",
            higher_is_better=False,
            goal=1.0,
            notes={"text": f"ours: {told(ours)}; TRL: {told(theirs)}", "ours": rounded(ours), "peer": rounded(theirs)},
        ),
        Reading(
            "start of an SFT job until its first step, against its bare imports",
            whole["job"],
            imports,
            "s",
            higher_is_better=False,
            notes={"text": "the peer is `import torch, transformers, deepspeed` and nothing else"},
        ),
    ]


def rounded(values: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value, 3) for name, value in values.items()}


def told(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {values[name]:.1f} s" for name in ("imports", "engine", "rest"))


# --- a stage without its job ---------------------------------------------------------------------------------------------


def chain(count: int) -> str:
    """A recipe of `count` stages, each of which needs the one before."""
    first = "sources: [{type: arithmetic, operations: [add], digits: [1], count: 20, seed: 2}]"
    suite = "sources: [{type: arithmetic, operations: [subtract], digits: [3], count: 5, seed: 3}]"
    lines = ["description: A chain of cheap stages.", "execution: bench", "stages:"]
    lines += [f"  suite: {{kind: prepare_data, record: item, task: bench, {suite}}}"]
    lines += [f"  link_1: {{kind: prepare_data, in: {{leak_from: [suite]}}, record: conversation, {first}}}"]
    for number in range(2, count):
        lines += [f"  link_{number}: {{kind: decontaminate, in: {{data: link_{number - 1}, benchmarks: [suite]}}}}"]
    return "\n".join(lines) + "\n"


def project_in(folder: Path, recipe: str) -> Path:
    """A git and DVC repository with the recipe `chain`."""
    for name, text in (("recipes/chain.yaml", recipe), ("execution/bench.yaml", PROFILE)):
        path = folder / "configs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    repository(folder)
    return folder


def repository(folder: Path) -> None:
    """With the DVC settings and ignored files of this project."""
    for command in (["git", "init", "-q"], ["dvc", "init", "-q"]):
        subprocess.run(command, cwd=folder, check=True)
    for name in (".dvc/config", ".dvcignore", ".gitignore"):
        shutil.copy(ROOT / name, folder / name)
    subprocess.run(["dvc", "config", "core.site_cache_dir", str(folder / ".dvc" / "site")], cwd=folder, check=True)


def run(target: Path) -> None:
    """`pedigree run chain` in this process, its events written down."""
    from pedigree.pipelines.cli import main as cli
    from pedigree.pipelines.cli.progress import Board
    from pedigree.pipelines.jobs.launcher import LocalLauncher

    events: list[Event] = []
    submit, tell = LocalLauncher.submit, Board.update

    def submitted(self: Any, scratch: Path, *args: Any) -> Any:
        address = json.loads((scratch / "spec.json").read_text())["address"]
        events.append((time.time(), "job started", address))
        handle = submit(self, scratch, *args)

        def wait() -> None:
            with suppress(ChildProcessError):  # the launcher has seen it end first
                os.waitid(os.P_PID, handle.told["process"]["pid"], os.WEXITED | os.WNOWAIT)
            events.append((time.time(), "job ended", address))

        def listen() -> None:
            while not (scratch / "progress.json").exists():
                time.sleep(0.002)
            events.append((time.time(), "first sign", address))

        for watcher in (wait, listen):
            threading.Thread(target=watcher, daemon=True).start()
        return handle

    def watched(self: Any, address: str, state: str, *args: Any, **kwargs: Any) -> None:
        events.append((time.time(), state, address))
        tell(self, address, state, *args, **kwargs)

    LocalLauncher.submit, Board.update = submitted, watched  # pyright: ignore
    sys.argv = ["pedigree", "run", "chain"]
    try:
        cli.main()
    finally:
        target.write_text(json.dumps(events))


def per_stage(events: Sequence[Event]) -> list[float]:
    """Seconds of each stage but the first: from the end of the one before to its own, less the life of its job."""
    began = {address: when for when, what, address in events if what == "job started"}
    ended = {address: when for when, what, address in events if what == "job ended"}
    ends = [(when, address) for when, what, address in sorted(events) if what == "ran"]
    return [when - before - (ended[address] - began[address]) for (before, _), (when, address) in pairwise(ends)]


def orchestrated(folder: Path) -> dict[str, float]:
    """Seconds: per stage (median), until the first job, until its first sign, after the last stage, and with nothing to do."""
    project, target = project_in(folder, chain(STAGES)), folder / "events.json"
    command = [sys.executable, "-m", "benchmarks.startup", "run", str(target)]
    whole, began = timed(command, project)
    events: list[Event] = [tuple(event) for event in json.loads(target.read_text())]
    last = max(when for when, what, _ in events if what == "ran")
    first = {what: min(when for when, found, _ in events if found == what) - began for what in ("job started", "first sign")}
    nothing, _ = timed(command, project)
    found = {"stage": statistics.median(per_stage(events)), "first job": first["job started"], "first sign": first["first sign"]}
    return found | {"after": began + whole - last, "nothing": nothing}


def timed(command: Sequence[str], folder: Path) -> tuple[float, float]:
    """Seconds that a command took, and when it began."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PEDIGREE_PREFECT": "never"}
    began = time.time()
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    seconds = time.time() - began
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return seconds, began


def reproduced(folder: Path) -> dict[str, float]:
    """Seconds of `dvc repro`: per stage, from chains of two lengths (its own start is none of it); until the first; with nothing to do."""
    seconds, first, nothing = [], 0.0, 0.0
    for count in (2, STAGES + 2):
        place = folder / str(count)
        place.mkdir(parents=True)
        repository(place)
        (place / "file_0").write_text("x")
        stage = "  s{0}: {{cmd: cp file_{1} file_{0}, deps: [file_{1}], outs: [file_{0}]}}"
        (place / "dvc.yaml").write_text("stages:\n" + "".join(stage.format(n, n - 1) + "\n" for n in range(1, count + 1)))
        spent, began = timed(["dvc", "repro", "-q"], place)
        seconds.append(spent)
        first = (place / "file_1").stat().st_mtime - began
        nothing, _ = timed(["dvc", "repro", "-q"], place)
    return {"stage": (seconds[1] - seconds[0]) / STAGES, "first job": first, "nothing": nothing}


def orchestration(folder: Path) -> list[Reading]:
    ours: list[dict[str, float]] = []
    theirs: list[dict[str, float]] = []
    for number in range(RUNS):
        ours.append(orchestrated(folder / f"ours-{number}"))
        theirs.append(reproduced(folder / f"peer-{number}"))
    found = median_parts(ours)

    def reading(name: str, part: str, goal_s: float, more: str = "") -> Reading:
        taken, peer = ([one[part] for one in side] for side in (ours, theirs))
        held = "held" if max(taken) < goal_s else "missed"
        notes = {"text": f"the goal is below {goal_s:g} s, {held}{more}"} | rounded(found)
        return Reading(f"{name}, against `dvc repro`", taken, peer, "s", higher_is_better=False, notes=notes)

    sign = f"; the job's first sign of life after {found['first sign']:.1f} s"
    return [
        reading("orchestration of a stage", "stage", GOAL_S, f"; once per command {found['after']:.1f} s after the last stage"),
        reading("command until its first job", "first job", GOAL_FIRST_S, sign),
        reading("command with nothing to do", "nothing", GOAL_NOTHING_S),
    ]


WORKERS: dict[str, Callable[[Path], None]] = {"job": job, "peer": peer, "run": run}


def main(arguments: Sequence[str]) -> None:
    if arguments:
        side, place = arguments
        WORKERS[side](Path(place))
        return
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_FOLDER")) as temporary:
        folder = Path(temporary)
        watch = Watch()
        write("startup", [*startup(folder / "start"), *orchestration(folder)], PACKAGES, watch.read())


if __name__ == "__main__":
    main(sys.argv[1:])
