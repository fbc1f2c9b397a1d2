"""A small project of its own in a temporary folder: real git, real DVC, real jobs of tiny stages that obey `knobs.json`.

The stages stand under the names of real kinds, in a copy of our code: `prepare_data` writes `count` rows, `decontaminate`
passes rows on. Knobs of a stage: `seconds` (works so long, step by step, with a checkpoint per step), `fail` (message of a
refusal), `errors` (of its first attempts: `memory`, or a number of errno), `crash` (dies by signal in its first attempts),
`child` (starts a process that ignores SIGTERM), `constant` (same output whatever the config), `silent` (no heartbeat), `preempt` (asks
itself to stop in its first attempts), `bytes` (of payload beside the rows), `drawn` (other output at each attempt), `nan` (the
numbers that it reports are none), `hold` (after opening its inputs it waits for a file of this name in the project before it reads them).
"""

import json
import os
import shutil
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from configs.project import Project
from pipelines.ensure import Result
from pipelines.jobs.context import RunContext
from pipelines.runs import open_run, run_graph

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
placement: {slots: 1, retries: 1, heartbeat_timeout_s: 20}
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

from data.records import load, save
from stages.job import StageError, only


def work(job, rows):
    knobs = json.loads(Path("knobs.json").read_text()).get(job.address, {})
    runs = Path("runs.log")
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
        os.kill(os.getpid(), signal.SIGTERM)
    for error in knobs.get("errors", [])[attempt - 1 : attempt]:
        raise MemoryError("cannot allocate") if error == "memory" else OSError(error, os.strerror(error))
    if "bug" in knobs:
        raise KeyError(knobs["bug"])
    if "fail" in knobs:
        raise StageError(knobs["fail"])
    total = max(1, round(knobs.get("seconds", 0) / 0.1))
    for step in range(1, total + 1):
        folder = job.checkpoints / f"step-{step}"
        folder.mkdir(parents=True, exist_ok=True)
        if knobs.get("seconds"):
            time.sleep(0.1)
        if not knobs.get("silent"):
            job.progress(step, total, rows=float("nan") if knobs.get("nan") else len(rows))
        job.log(step, rows=len(rows))
    rows = [{"constant": True}] if knobs.get("constant") else rows
    rows = [{"attempt": attempt}] if knobs.get("drawn") else rows
    save(job.out, "report", rows)
    if knobs.get("bytes"):
        (job.out / "payload" / "noise").write_bytes(os.urandom(knobs["bytes"]))
    return {"rows": len(rows)}


def hold(job):
    asked = json.loads(Path("knobs.json").read_text()).get(job.address, {}).get("hold")
    if asked:
        Path(f"{asked}.waiting").touch()
        while not Path(asked).exists():
            job.progress(0, 0)
            time.sleep(0.02)


def work_model(job, weight):
    """A model of one weight."""
    numbers = work(job, [{"weights": 1}])
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (job.out / "payload" / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + struct.pack("<f", weight))
    for name in ("config.json", "tokenizer.json"):
        (job.out / "payload" / name).write_text("{}")
    return numbers


def work_beside(job):
    knobs = json.loads(Path("knobs.json").read_text()).get(job.address, {})
    with Path("runs.log").open("a") as stream:
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
            return work(job, [{"n": n, "seed": config.sources[0].seed} for n in range(config.sources[0].count)])
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
from configs.project import Project
from pipelines.jobs.context import StageFailed
from pipelines.runs import stage_under_dvc
try:
    print(stage_under_dvc(Project.find(), sys.argv[2]))
except StageFailed as error:
    sys.exit(str(error))
"""


class Lab:
    """The project, its copy of our code, and what tests do with them."""

    def __init__(self, folder: Path) -> None:
        self.code, self.root = folder / "code", folder / "project"
        for package in ("configs", "data", "pipelines", "stages"):
            shutil.copytree(REPOSITORY / package, self.code / package)  # with its bytecode, which every process would make anew
        for kind, body in KINDS.items():
            (self.code / "stages" / f"{kind}.py").write_text(STAGE + textwrap.dedent(body))
        self.root.mkdir()
        for name in (".gitignore", ".dvcignore", ".dvc/config", ".dvc/.gitignore"):
            self.write(name, (REPOSITORY / name).read_text())
        self.write(".dvc/config.local", f"[core]\n    site_cache_dir = {folder / 'site'}\n")
        self.write("configs/recipes/lab.yaml", RECIPE)
        self.write("configs/execution/lab.yaml", PROFILE)
        self.knobs()
        shim = folder / "bin" / "pedigree"
        shim.parent.mkdir()
        shim.write_text(SHIM.format(python=sys.executable, code=str(self.code)))
        shim.chmod(0o755)
        self.environment = os.environ | {
            "PATH": f"{shim.parent}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(self.code),
            "DVC_NO_ANALYTICS": "1",
        }
        self.shell("git init -q && git add -A && git -c user.name=lab -c user.email=lab@example.org commit -qm lab")

    @property
    def project(self) -> Project:
        return Project(self.root)

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
        told = {"watch": watch} if watch else {}
        run = open_run(self.project, "lab", overrides, cancelled=cancelled, **told)
        run.code_root = self.code
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
        start = "from configs.project import Project\nfrom pipelines.runs import *\nrun = open_run(Project.find(), 'lab')\n"
        return subprocess.Popen([sys.executable, "-c", start + code], cwd=self.root, env=self.environment, text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip

    def contents(self) -> dict[str, str]:
        """Stage name → content hash of its artifact."""
        found = sorted(self.root.glob("artifacts/lab/*/record.json"))
        return {path.parent.name: json.loads(path.read_text())["content"] for path in found}


def outcomes(lab: Lab, *overrides: str, forced: tuple[str, ...] = ()) -> dict[str, str]:
    ends = run_graph(lab.run(*overrides), forced={f"lab/{name}" for name in forced})
    return {end.address.partition("/")[2]: end.outcome if isinstance(end, Result) else type(end).__name__ for end in ends}


def until(condition: Callable[[], Any], seconds: float = 40.0) -> Any:
    """Waits for something true, and returns it."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)
    return found


def running_scratch(lab: Lab | Project, name: str) -> Path | None:
    """The scratch folder of the stage's job, once the stage's code has begun."""
    for spec in lab.root.glob(".pedigree/scratch/*/spec.json"):
        with suppress(FileNotFoundError):  # a job that ended since
            if json.loads(spec.read_text())["address"] == f"lab/{name}" and (spec.parent / "curve.jsonl").exists():
                return spec.parent
    return None


def status(lab: Lab) -> str:
    return lab.shell("dvc status").stdout.strip()


def read(lab: Lab, name: str, file: str) -> dict[str, Any]:
    """A file of a stage's artifact."""
    return json.loads((lab.root / "artifacts/lab" / name / file).read_text())
