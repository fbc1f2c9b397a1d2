"""What this machine and its environment have, what is missing, and how to get it. Loads no engine: it reads what is installed."""

import configparser
import importlib.metadata
import importlib.util
import platform
import re
import shutil
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement

from configs.base.packaged import ASSETS
from configs.base.project import Project
from configs.base.texts import command
from configs.language.recipe import load_recipe
from data.artifacts import assets
from data.artifacts.provenance import gpus
from data.host import machine
from pipelines.cli.console import say
from pipelines.cli.plan import slow_text, time_text
from pipelines.estimate.estimates import Estimates
from pipelines.estimate.rates import known
from pipelines.estimate.schedule import outlook
from pipelines.quantities import counted
from pipelines.run.runs import load_execution

DEMO = "demo"
LIBRARIES = ("torch", "transformers", "deepspeed", "vllm", "datasets", "great_expectations", "dvc", "prefect")
SET_UP = "run `make setup`"
FEW_GB = 20
"""Free disk below this ends many a run: the demo's models and checkpoints take about half of it."""


@dataclass(frozen=True)
class Diagnosis:
    """One line of the examination; the remedy is empty where nothing need be done."""

    name: str
    ok: bool
    value: str
    remedy: str = ""


def main() -> int:
    """Prints what `examine` finds; 1 when something is missing."""
    findings = examine(Project.find())
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        say(f"{'ok' if finding.ok else '!!'}  {finding.name:<{width}}  {finding.value}")
        if finding.remedy:
            say(f"    {'':<{width}}  -> {finding.remedy}")
    return 0 if all(finding.ok for finding in findings) else 1


def examine(project: Project) -> list[Diagnosis]:
    """All checks, in the order in which one would mend them. None raises: a check that fails is a finding."""
    found = gpus()
    checks: tuple[Callable[[], list[Diagnosis]], ...] = (
        _python,
        _tools,
        lambda: [_lock(project, bool(found))],
        lambda: [_torch(bool(found))],
        lambda: [_library(name) for name in LIBRARIES if name != "torch"],
        lambda: [_engine(bool(found))],
        lambda: [_asset(name) for name in ASSETS],
        lambda: [Diagnosis("GPUs", True, "; ".join(found) or "none: stages run on the CPU")],
        lambda: [_determinism(bool(found)), _cpu()],
        lambda: _demo(project),
        lambda: [_disk(project.root), _remote(project.root)],
    )
    return [finding for check in checks for finding in _safely(check)]


def _safely(check: Callable[[], list[Diagnosis]]) -> list[Diagnosis]:
    try:
        return check()
    except Exception as error:  # a broken installation may break in any way; the other checks still tell something
        return [Diagnosis("check", False, f"{type(error).__name__}: {error}", SET_UP)]


def _python() -> list[Diagnosis]:
    right = (3, 11) <= sys.version_info[:2] <= (3, 13)
    remedy = "" if right else "make the environment anew with Python 3.11, 3.12 or 3.13: `make setup PYTHON=...`"
    return [Diagnosis("python", right, platform.python_version(), remedy)]


def _tools() -> list[Diagnosis]:
    header = Path(sysconfig.get_path("include")) / "Python.h"
    found = {"git": shutil.which("git"), "C++ compiler": shutil.which("c++"), "Python headers": str(header) if header.exists() else None}
    python = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = {"git": ("git", "git"), "C++ compiler": ("g++", "gcc-c++"), "Python headers": (f"{python}-dev", f"{python}-devel")}

    def remedy(name: str) -> str:
        return "`sudo apt-get install {}` on Debian and Ubuntu, `sudo dnf install {}` on Fedora".format(*packages[name])

    return [Diagnosis(name, path is not None, path or "missing", "" if path else remedy(name)) for name, path in found.items()]


def _lock(project: Project, gpu: bool) -> Diagnosis:
    """Whether the installed packages are those of the lock; local versions (`+cpu`) do not count."""
    lock = project.root / "requirements" / ("gpu.txt" if gpu else "cpu.txt")
    lines = [Requirement(line) for line in lock.read_text().splitlines() if line and not line.startswith("#")]
    pins = {one.name: str(one.specifier).removeprefix("==") for one in lines if one.marker is None or one.marker.evaluate()}
    installed = {_normal(found.metadata["Name"]): found.version.partition("+")[0] for found in importlib.metadata.distributions()}
    differing = [f"{name} {installed.get(_normal(name), 'missing')} instead of {pin}" for name, pin in pins.items()
                 if installed.get(_normal(name)) != pin]  # fmt: skip
    if not differing:
        return Diagnosis("packages", True, f"all {len(pins)} of {lock.name}")
    shown = ", ".join(differing[:5]) + (", ..." if len(differing) > 5 else "")
    return Diagnosis("packages", False, f"{len(differing)} of {len(pins)} differ from {lock.name}: {shown}", SET_UP)


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _torch(gpu: bool) -> Diagnosis:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return Diagnosis("torch", False, "missing", SET_UP)
    version = importlib.metadata.version("torch")
    built = re.search(r"^cuda\b[^=]*= *['\"]([^'\"]+)", (Path(spec.origin).parent / "version.py").read_text(), re.MULTILINE)
    value = f"{version}, built for {'CUDA ' + built[1] if built else 'the CPU'}"
    if gpu and not built:
        return Diagnosis("torch", False, f"{value}; this machine has a GPU", "run `make clean`, then `make setup`")
    return Diagnosis("torch", True, value)


def _library(name: str) -> Diagnosis:
    if importlib.util.find_spec(name) is None:
        return Diagnosis(name, False, "missing", SET_UP)
    for package in (name, f"{name}-cpu"):
        try:
            return Diagnosis(name, True, f"{importlib.metadata.version(package)}{' for the CPU' if package != name else ''}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return Diagnosis(name, False, "can be imported but was not installed by pip", SET_UP)


def _engine(gpu: bool) -> Diagnosis:
    """DeepSpeed's communication operation for CPUs, which is compiled once a machine."""
    if gpu:
        return Diagnosis("training engine", True, "NCCL")
    if (assets.extensions_folder() / "deepspeed_shm_comm" / "whole").exists():
        return Diagnosis("training engine", True, "CPU operation is compiled")
    return Diagnosis("training engine", True, "CPU operation is not compiled: the first training stage takes minutes longer", SET_UP)


def _asset(name: str) -> Diagnosis:
    try:
        size = assets.path(name).stat().st_size
    except assets.AssetError as error:
        return Diagnosis(f"asset {name}", False, str(error), SET_UP)
    return Diagnosis(f"asset {name}", True, f"{size / 1e6:.1f} MB, {ASSETS[name].licence}")


def _determinism(gpu: bool) -> Diagnosis:
    """What equal numerics promise on this machine, and what they cannot."""
    if not gpu:
        return Diagnosis("determinism", True, "equal numerics give equal bits; other processor types, thread counts and versions may not")
    value = "equal bits need `numerics: {deterministic: true}`; never across GPU types, drivers, CUDA versions or numbers of ranks"
    return Diagnosis("determinism", True, value)


def _cpu() -> Diagnosis:
    """Cores and memory that jobs may use, and how fast the cores multiply, once a plan has measured it."""
    total, rates = machine.memory(), known()
    memory = f", {total / machine.GIB:.1f} GiB memory" if total else ""
    units = "with bf16 units" if machine.has_bf16_units() else "without bf16 units: products of bf16 go through fp32"
    speed = f"; a core computes {rates.fp32 / 1e9:.0f} GFLOP/s in fp32, {rates.bf16 / 1e9:.0f} in bf16" if rates else ""
    return Diagnosis("CPU", True, f"{counted(machine.cores(), 'core')}{memory}; {units}{speed}")


def _demo(project: Project) -> list[Diagnosis]:
    """How long the demo takes here from its beginning, where that can be told without measuring."""
    if not (project.recipes / f"{DEMO}.yaml").exists():
        return []
    if known() is None:
        return [Diagnosis("demo", True, f"how long it takes is not measured yet: {command('plan', DEMO)} measures it")]
    graph = load_recipe(project.recipes, DEMO)
    execution = load_execution(project, graph.execution)
    estimates = Estimates(project, graph, execution, known)
    found = outlook(graph, execution, {address: estimates.anew(node).time for address, node in graph.nodes.items()})
    return [Diagnosis("demo", True, time_text(found, execution.numerics.device), slow_text(found, execution.numerics.device))]


def _disk(root: Path) -> Diagnosis:
    free = shutil.disk_usage(root).free / 1e9
    return Diagnosis("disk", free >= FEW_GB, f"{free:.0f} GB free", "" if free >= FEW_GB else f"make room: a run wants {FEW_GB} GB")


def _remote(root: Path) -> Diagnosis:
    names = [f"{name} ({url})" for name, url in _remotes(root)]
    if names:
        return Diagnosis("DVC remote", True, ", ".join(names))
    hint = "to share artifacts: `dvc remote add --default NAME URL`, with an S3 URL or a folder"
    return Diagnosis("DVC remote", True, "none: artifacts stay on this machine", hint)


def _remotes(root: Path) -> Iterator[tuple[str, str]]:
    """Name and URL (without user and password) of each remote; the later file wins, as for DVC."""
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.read([root / ".dvc" / "config", root / ".dvc" / "config.local"])
    for section in parser.sections():
        name = re.fullmatch(r"'?remote \"(.+)\"'?", section)
        if name:
            yield name[1], re.sub(r"//[^/@]*@", "//", parser[section].get("url", "no URL"))
