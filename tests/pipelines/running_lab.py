"""A small project of its own in a temporary folder: real git, real DVC, real jobs of tiny stages that obey `knobs.json`.

The stages stand under the names of real kinds, in a copy of our code: `prepare_data` writes `count` rows, `decontaminate`
passes rows on. Knobs of a stage: `seconds` (works so long, step by step, with a checkpoint per step), `fail` (message of a
refusal), `errors` (of its first attempts: `memory`, or a number of errno), `crash` (dies by signal in its first attempts),
`child` (starts a process that ignores SIGTERM), `constant` (same output whatever the config), `silent` (no heartbeat), `preempt` (asks
itself to stop in its first attempts), `bytes` (of payload beside the rows), `drawn` (other output at each attempt), `nan` (it
reports NaN), `note` (what users of the result should know),
`hold` (after opening its inputs it waits for a file of this name in the project before it reads them), `pause` (the same, in the middle
of its steps).
"""

import json
import os
import shutil
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from dvc.repo import Repo
from in_process import InProcessLauncher
from waiting import deadline

from pedigree.configs.base.project import Project
from pedigree.pipelines.jobs.context import RunContext
from pedigree.pipelines.jobs.events import Notice, RunEnded, RunEvent, StageProgressed, StageView, Watch, unwatched
from pedigree.pipelines.jobs.launchers import Launchers
from pedigree.pipelines.run.ensure import Result
from pedigree.pipelines.run.opening import Request, open_run
from pedigree.pipelines.run.runs import run_graph

REPOSITORY = Path(__file__).resolve().parents[2]
CLEAN = "Data and pipelines are up to date."
"""What `dvc status` says where nothing is stale."""
RECIPE = """
description: Four tiny stages.
execution: lab
stages:
  suite:
    kind: prepare_data
    record: item
    task: arithmetic
    sources: [{type: arithmetic, operations: [add], digits: [1], count: 3, seed: 1}]
  raw:
    kind: prepare_data
    record: conversation
    sources: [{type: arithmetic, operations: [add], digits: [1], count: 5, seed: 2}]
  clean:
    kind: decontaminate
    in: {data: raw, benchmarks: [suite]}
  cleaner:
    kind: decontaminate
    in: {data: clean, benchmarks: [suite]}
    ngram: 5
"""
RANKS = """
execution: lab
stages:
  suite: {kind: prepare_data, record: item, task: a, sources: [{type: arithmetic, operations: [add], digits: [1], count: 3, seed: 1}]}
  raw: {kind: prepare_data, record: conversation, sources: [{type: arithmetic, operations: [add], digits: [1], count: 5, seed: 2}]}
  clean: {kind: decontaminate, in: {data: raw, benchmarks: [suite]}}
  base:
    kind: source_model
    in: {corpus: [clean]}
    source: {type: random_llama, layers: 1, hidden: 8, heads: 1, kv_heads: 1, ffn: 8, vocabulary: 300, context: 16}
  sft: {kind: sft, in: {policy: base, data: [clean]}, global_batch: 2, max_length: 8, optimizer: {learning_rate: 0.1}}
"""
PROFILE = """
slots: 2
numerics: {threads: 1}
placement: {slots: 1, retries: 1, heartbeat_timeout_s: 120}
"""
STAGE = '''
"""Rows without meaning."""

import json
import os
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

from pedigree.data.records.records import load, save
from pedigree.stages.job.failures import StageError
from pedigree.stages.job.job import only


def project(job):
    """A process works in the project's folder; a thread gets it as `job.root`."""
    return getattr(job, "root", Path())


def knobs_of(job):
    knobs = json.loads((project(job) / "knobs.json").read_text()).get(job.address, {})
    assert not hasattr(job, "root") or not knobs.keys() & {"child", "crash"}, "that takes a process: Lab(folder, processes=True)"
    return knobs


def work(job, rows):
    knobs = knobs_of(job)
    runs = project(job) / "runs.log"
    with runs.open("a") as stream:
        stream.write(job.address + "\\n")
    attempt = runs.read_text().split().count(job.address)
    found = sorted(job.checkpoints.glob("step-[0-9]*"), key=lambda path: int(path.name[5:]))
    job.resumed_from = found[-1].name if found else None
    if knobs.get("child"):
        code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(300)"
        subprocess.Popen([sys.executable, "-c", code])
    if attempt <= knobs.get("crash", 0):
        os.kill(os.getpid(), signal.SIGKILL)
    if attempt <= knobs.get("preempt", 0):
        os.kill(os.getpid(), signal.SIGTERM) if not hasattr(job, "root") else setattr(job, "stopped", True)
    for error in knobs.get("errors", [])[attempt - 1 : attempt]:
        raise MemoryError("cannot allocate") if error == "memory" else OSError(error, os.strerror(error))
    if "bug" in knobs:
        raise KeyError(knobs["bug"])
    if "fail" in knobs:
        raise StageError(knobs["fail"])
    if "note" in knobs:
        job.note(knobs["note"])
    total = max(1, round(knobs.get("seconds", 0) / 0.1))
    for step in range(1, total + 1):
        folder = job.checkpoints / f"step-{step}"
        folder.mkdir(parents=True, exist_ok=True)
        if knobs.get("seconds"):
            time.sleep(0.1)
        if not knobs.get("silent"):
            job.progress(step, total, rows=float("nan") if knobs.get("nan") else len(rows))
        job.log(step, rows=len(rows))
        if "pause" in knobs and step == (total + 1) // 2:
            wait_for(job, knobs["pause"])
    rows = [{"constant": True}] if knobs.get("constant") else rows
    rows = [{"attempt": attempt}] if knobs.get("drawn") else rows
    save(job.out, "report", rows)
    if knobs.get("bytes"):
        (job.out / "payload" / "noise").write_bytes(os.urandom(knobs["bytes"]))
    return {"rows": len(rows)}


def hold(job):
    asked = knobs_of(job).get("hold")
    if asked:
        wait_for(job, asked)


def wait_for(job, name):
    (project(job) / f"{name}.waiting").touch()
    while not (project(job) / name).exists():
        job.progress(0, 0)
        time.sleep(0.02)


def work_model(job, weight):
    """A model of one weight."""
    hold(job)
    numbers = work(job, [{"weights": 1}])
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (job.out / "payload" / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + struct.pack("<f", weight))
    for name in ("config.json", "tokenizer.json"):
        (job.out / "payload" / name).write_text("{}")
    return numbers


def work_beside(job):
    knobs = knobs_of(job)
    with (project(job) / "runs.log").open("a") as stream:
        stream.write(job.address + "\\n")
    time.sleep(knobs.get("seconds", 0))
    return {}
'''
KINDS = {
    "source_model": """
        def run(config, inputs, job):
            return work_model(job, 1.0)
        """,
    "sft": """
        def run(config, inputs, job):
            return work_model(job, 2.0) if job.rank == 0 else work_beside(job)
        """,
    "prepare_data": """
        def run(config, inputs, job):
            hold(job)
            source = config.sources[0]
            if source.type == "files":
                return work(job, [{"line": line} for line in job.source_files[source.path].read_text().splitlines()])
            return work(job, [{"n": n, "seed": source.seed} for n in range(source.count)])
        """,
    "decontaminate": """
        def run(config, inputs, job):
            hold(job)
            return work(job, load(only(inputs, "data")))
        """,
}
SHIM = """#!{python}
import sys
sys.path.insert(0, {code!r})
from pedigree.configs.base.project import Project
from pedigree.pipelines.jobs.context import StageFailed
from pedigree.pipelines.run.runs import stage_under_dvc
try:
    print(stage_under_dvc(Project.find(), sys.argv[2]))
except StageFailed as error:
    sys.exit(str(error))
"""


JOB_CODE = {
    "__init__",
    "__main__",
    "kind",
    "job",
    "spec",
    "outcome",
    "failures",
    "inputs",
    "postconditions",
    "statistics",
    "updates",
    "ranks",
    "nodes",
    "meeting",
}
"""Modules of `stages` behind every job."""


def unneeded(folder: str, names: list[str]) -> set[str]:
    """What of our packages no job of a lab's stages reads, for `shutil.copytree`."""
    path = Path(folder).relative_to(REPOSITORY)
    if path == Path("configs/rehearsal"):
        return {"hub", "models"}
    return {name for name in names if path.parts[0] == "stages" and ".py" in name and name.partition(".")[0] not in JOB_CODE}


def told_in_words(watch: Callable[[str, str, str], None]) -> Watch:
    """Passes on a stage's new states: address, state, detail."""

    def listen(event: RunEvent) -> None:
        if not isinstance(event, StageProgressed | Notice | RunEnded):
            view = StageView().after(event)
            watch(event.address, view.state, view.detail)

    return listen


class Died(BaseException):
    """A kill, as far as the code can tell: nothing of ours catches it."""


class Lab:
    """The project, its copy of our code, and what tests do with them."""

    processes = False
    """Whether runs of this process start their jobs as processes too, instead of as threads."""

    def __init__(self, folder: Path, *, processes: bool = False, whole: bool = False) -> None:
        """`whole`: with the code of all stages and the rows of rehearsals, which are copied and hashed again and again."""
        self.processes = processes
        self._settle(folder)
        for package in ("configs", "data", "pipelines", "stages"):  # with its bytecode, which every process would make anew
            shutil.copytree(REPOSITORY / package, self.code / package, ignore=None if whole else unneeded)
        shutil.copytree(REPOSITORY / "pedigree", self.code / "pedigree", symlinks=True)
        for kind, body in KINDS.items():
            (self.code / "stages" / kind / "run.py").write_text(STAGE + textwrap.dedent(body))
        for name in (".gitignore", ".dvcignore", ".dvc/config", ".dvc/.gitignore"):
            self.write(name, (REPOSITORY / name).read_text())
        self.configure_dvc()
        self.write("configs/recipes/lab.yaml", RECIPE)
        self.write("configs/execution/lab.yaml", PROFILE)
        self.knobs()
        self.shell("git init -q && git add -A && git -c user.name=lab -c user.email=lab@example.org commit -qm lab")

    def twin(self, folder: Path) -> "Lab":
        """A copy, in the same state and with code of its own."""
        twin = object.__new__(Lab)
        twin.processes = self.processes
        twin._settle(folder)
        for source, target in ((self.code, twin.code), (self.root, twin.root)):
            subprocess.run(["cp", "-a", source, target], check=True)
        twin.configure_dvc()
        return twin

    def elsewhere(self, folder: Path) -> "Lab":
        """A copy of the project alone, at another place, where DVC knows no file yet."""
        copy = object.__new__(Lab)
        copy.code, copy.root, copy.environment = self.code, folder / "project", self.environment
        subprocess.run(["cp", "-r", self.root, copy.root], check=True)
        copy.configure_dvc()
        copy.forget_runs()
        return copy

    def _settle(self, folder: Path) -> None:
        self.code, self.root = folder / "code", folder / "project"
        shim = folder / "bin" / "pedigree"
        shim.parent.mkdir(parents=True)
        shim.write_text(SHIM.format(python=sys.executable, code=str(self.code)))
        shim.chmod(0o755)
        self.environment = os.environ | {
            "PATH": f"{shim.parent}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(self.code),
            "DVC_NO_ANALYTICS": "1",
        }

    def configure_dvc(self, remote: Path | str | None = None) -> None:
        """With a cache of its own and, optionally, a remote."""
        store = f"    remote = store\n['remote \"store\"']\n    url = {remote}\n" if remote else ""
        self.write(".dvc/config.local", f"[core]\n    site_cache_dir = {self.root.parent / 'site'}\n{store}")

    @property
    def project(self) -> Project:
        return Project(self.root)

    @property
    def launcher(self) -> Launchers:
        return Launchers(self.project, None if self.processes else InProcessLauncher(self.project))

    def write(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def edit(self, name: str, old: str, new: str) -> None:
        text = (self.root / name).read_text()
        assert old in text
        self.write(name, text.replace(old, new))

    def knobs(self, **stages: dict[str, Any]) -> None:
        self.write("knobs.json", json.dumps({f"lab/{name}": knobs for name, knobs in stages.items()}))

    def run(self, *overrides: str, cancelled: threading.Event | None = None, watch: Any = None) -> RunContext:
        run = open_run(self.project, Request("lab", overrides), watch=told_in_words(watch) if watch else unwatched)
        run.code_root, run.launcher = self.code, self.launcher
        run.cancelled = cancelled or run.cancelled
        return run

    def runs(self) -> list[str]:
        """Names of the stages whose code has run, in order of their start."""
        log = self.root / "runs.log"
        return [line.removeprefix("lab/") for line in log.read_text().split()] if log.exists() else []

    def forget_runs(self) -> None:
        (self.root / "runs.log").unlink(missing_ok=True)

    def shell(self, command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(command, shell=True, cwd=self.root, env=getattr(self, "environment", None), capture_output=True, text=True)
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done

    def orchestrator(self, code: str) -> subprocess.Popen[str]:
        """Another process that runs `code` after `run` was opened with this lab's code and project."""
        start = "from pedigree.configs.base.project import Project; from pedigree.pipelines.run.runs import *\n"
        start += "from pedigree.pipelines.run.opening import Request, open_run\nrun = open_run(Project.find(), Request('lab'))\n"
        return subprocess.Popen([sys.executable, "-c", start + code], cwd=self.root, env=self.environment, text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip

    def contents(self) -> dict[str, str]:
        """Stage name → content hash of its artifact."""
        found = sorted(self.root.glob("artifacts/lab/*/record.json"))
        return {path.parent.name: json.loads(path.read_text())["content"] for path in found}


@contextmanager
def goes_on(lab: Lab) -> Iterator[None]:
    """After a minute, a job with the knob `hold: go` goes on in any case: else what waits for the test to let it would never end."""
    bound = threading.Timer(deadline(60), (lab.root / "go").touch)
    bound.start()
    try:
        yield
    finally:
        bound.cancel()


def outcomes(lab: Lab, *overrides: str, forced: tuple[str, ...] = ()) -> dict[str, str]:
    ends = run_graph(lab.run(*overrides), forced={f"lab/{name}" for name in forced})
    return {end.address.partition("/")[2]: end.outcome if isinstance(end, Result) else type(end).__name__ for end in ends}


def running_scratch(lab: Lab | Project, name: str) -> Path | None:
    """The scratch folder of the stage's job, once the stage's code has begun."""
    for spec in lab.root.glob(".pedigree/scratch/*/spec.json"):
        with suppress(FileNotFoundError):  # a job that ended since
            if json.loads(spec.read_text())["address"] == f"lab/{name}" and (spec.parent / "curve.jsonl").exists():
                return spec.parent
    return None


def status(lab: Lab) -> str:
    """What `dvc status` says, without a process of its own."""
    with closing(Repo(str(lab.root))) as repo:
        found = repo.status()
    return json.dumps(found) if found else CLEAN


def read(lab: Lab, name: str, file: str) -> dict[str, Any]:
    """A file of a stage's artifact."""
    return json.loads((lab.root / "artifacts/lab" / name / file).read_text())
