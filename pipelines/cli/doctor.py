"""Installation checks, with a fix for each problem. Inspects installed packages without importing an engine."""

import configparser
import importlib.metadata
import importlib.util
import platform
import re
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from pedigree.configs.base.document import ConfigError
from pedigree.configs.base.installation import is_clone, missing, set_up
from pedigree.configs.base.packaged import ASSETS
from pedigree.configs.base.problems import PedigreeError
from pedigree.configs.base.project import Project
from pedigree.configs.base.texts import command
from pedigree.configs.language.recipe import load_recipe
from pedigree.data.artifacts import assets
from pedigree.data.artifacts.provenance import CODE_ROOT, gpus
from pedigree.data.host import machine
from pedigree.pipelines.cli.console import echo
from pedigree.pipelines.cli.diagnosis import Diagnosis
from pedigree.pipelines.cli.kubernetes_doctor import examine_kubernetes
from pedigree.pipelines.cli.plan import slow_text, time_text
from pedigree.pipelines.cli.slurm_doctor import examine_slurm
from pedigree.pipelines.estimate.estimates import Estimates
from pedigree.pipelines.estimate.rates import known
from pedigree.pipelines.estimate.schedule import outlook
from pedigree.pipelines.jobs.job_environment import can_link, cuda_of_wheels
from pedigree.pipelines.quantities import counted
from pedigree.pipelines.run.opening import load_execution

DEMO = "demo"
LIBRARIES = ("torch", "transformers", "deepspeed", "vllm", "datasets", "great_expectations", "dvc", "prefect")
LOCKS = CODE_ROOT / "pedigree" / "requirements"
REBUILD = "run `make clean`, then `make setup`"
CUDA, LEAST_DRIVER = "13.0", 580
"""Of requirements/gpu.txt, and the driver that NVIDIA's release notes require for it."""
FEW_GB = 20
"""Minimum free disk, in GB; the demo's models and checkpoints need about half of it."""


ON_GPUS = "bit-identical results need `numerics: {deterministic: true}` and the same GPU type, driver, CUDA version and number of ranks"
ON_CPUS = "identical numerics give bit-identical results for the same CPU type, threads and versions"


def main(profile: str | None = None) -> int:
    """Print all findings, or those about the cluster of a profile; return 1 if any check failed."""
    project = Project.find()
    findings = examine(project) if profile is None else examine_cluster(project, profile)
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        echo(f"{'ok' if finding.ok else '!!'}  {finding.name:<{width}}  {finding.value}")
        if finding.remedy:
            echo(f"    {'':<{width}}  -> {finding.remedy}")
    return 0 if all(finding.ok for finding in findings) else 1


def examine(project: Project) -> list[Diagnosis]:
    """Run all checks, in the order in which to fix them. A check that raises becomes a finding."""
    found = gpus()
    checks: tuple[Callable[[], list[Diagnosis]], ...] = (
        _python,
        _tools,
        lambda: [_lock(bool(found))],
        lambda: [_torch(bool(found))],
        lambda: [_library(name, bool(found)) for name in LIBRARIES if name != "torch"],
        lambda: [_asset(name) for name in ASSETS],
        lambda: [_gpus(found), *_cuda()],
        lambda: [Diagnosis("determinism", True, ON_GPUS if found else ON_CPUS), _cpu()],
        lambda: _demo(project),
        lambda: [_disk(project.root), _remote(project.root)],
    )
    findings = []
    for check in checks:
        try:
            findings += check()
        except Exception as error:  # a broken installation can raise anything; the other checks are still useful
            findings.append(Diagnosis("check", False, f"{type(error).__name__}: {error}", missing("train,serve", gpu=bool(found))))
    return findings


def examine_cluster(project: Project, profile: str) -> list[Diagnosis]:
    """Check the cluster in which a profile places stages. Submits small jobs."""
    execution = load_execution(project, profile)
    project.private.mkdir(exist_ok=True)
    cache = _cache(project.root)
    nothing = Diagnosis("launcher", True, "the profile places no stage in Slurm or Kubernetes: nothing else is checked")
    return [*examine_slurm(project, execution, cache), *examine_kubernetes(project, execution, cache)] or [nothing]


def _python() -> list[Diagnosis]:
    right = (3, 11) <= sys.version_info[:2] <= (3, 13)
    how = ": `make setup PYTHON=...`" if is_clone() else ""
    remedy = "" if right else f"recreate the environment with Python 3.11, 3.12 or 3.13{how}"
    return [Diagnosis("python", right, platform.python_version(), remedy)]


def _tools() -> list[Diagnosis]:
    header = Path(sysconfig.get_path("include")) / "Python.h"
    found = {"git": shutil.which("git"), "C++ compiler": shutil.which("c++"), "Python headers": str(header) if header.exists() else None}
    python = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = {"git": ("git", "git"), "C++ compiler": ("g++", "gcc-c++"), "Python headers": (f"{python}-dev", f"{python}-devel")}

    def remedy(name: str) -> str:
        return "`sudo apt-get install {}` on Debian and Ubuntu, `sudo dnf install {}` on Fedora".format(*packages[name])

    return [Diagnosis(name, path is not None, path or "missing", "" if path else remedy(name)) for name, path in found.items()]


def _lock(gpu: bool) -> Diagnosis:
    """Compare installed packages with the lock file, ignoring local version suffixes (`+cpu`). Only a clone must match it."""
    lock = LOCKS / ("gpu.txt" if gpu else "cpu.txt")
    lines = [Requirement(line) for line in lock.read_text().splitlines() if line and not line.startswith("#")]
    pins = {one.name: str(one.specifier).removeprefix("==") for one in lines if one.marker is None or one.marker.evaluate()}
    installed = {canonicalize_name(found.name): found.version.partition("+")[0] for found in importlib.metadata.distributions()}
    found = {name: installed.get(canonicalize_name(name), "missing") for name in pins}
    differing = [f"{name} {found[name]} instead of {pin}" for name, pin in pins.items() if found[name] != pin]
    if not differing:
        return Diagnosis("packages", True, f"all {len(pins)} of {lock.name}")
    shown = ", ".join(differing[:5]) + (", ..." if len(differing) > 5 else "")
    value = f"{len(differing)} of {len(pins)} differ from {lock.name}: {shown}"
    return Diagnosis("packages", not is_clone(), value, "run `make setup`" if is_clone() else "")


def _torch(gpu: bool) -> Diagnosis:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return Diagnosis("torch", False, "missing", missing("train", gpu=gpu))
    version = importlib.metadata.version("torch")
    built = re.search(r"^cuda\b[^=]*= *['\"]([^'\"]+)", (Path(spec.origin).parent / "version.py").read_text(), re.MULTILINE)
    value = f"{version}, built for {'CUDA ' + built[1] if built else 'the CPU'}"
    if gpu and not built:
        return Diagnosis("torch", False, f"{value}; this machine has a GPU", REBUILD if is_clone() else "install torch with CUDA")
    return Diagnosis("torch", True, value)


def _gpus(found: Sequence[str]) -> Diagnosis:
    """Check that the driver is new enough for the CUDA of the lock."""
    drivers = [int(major[1]) for line in found if (major := re.search(r", (\d+)[.\d]*$", line))]
    if not drivers or min(drivers) >= LEAST_DRIVER:
        return Diagnosis("GPUs", True, "; ".join(found) or "none: stages run on the CPU")
    remedy = f"the lock's CUDA {CUDA} needs driver {LEAST_DRIVER} or later: update the driver"
    return Diagnosis("GPUs", False, "; ".join(found), remedy)


def _cuda() -> list[Diagnosis]:
    """Check that kernels can be compiled at run time, where NVIDIA's wheels are installed."""
    home = cuda_of_wheels()
    if home is None:
        return []
    if can_link(home):
        return [Diagnosis("CUDA", True, str(home))]
    remedy = set_up(f"python {shlex.quote(str(LOCKS / 'cuda_links.py'))}")
    return [Diagnosis("CUDA", False, f"{home} has no lib64/libcudart.so: vLLM runs without flashinfer's kernels", remedy)]


def _library(name: str, gpu: bool) -> Diagnosis:
    if importlib.util.find_spec(name) is None:
        return Diagnosis(name, False, "missing", missing("train,serve", gpu=gpu))
    for package in (name, f"{name}-cpu"):
        try:
            return Diagnosis(name, True, f"{importlib.metadata.version(package)}{' for the CPU' if package != name else ''}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return Diagnosis(name, False, "importable, but not installed by pip", missing("train,serve", gpu=gpu))


def _asset(name: str) -> Diagnosis:
    try:
        size = assets.path(name).stat().st_size
    except PedigreeError as error:
        return Diagnosis(f"asset {name}", False, str(error), set_up("python -m pedigree.data.artifacts.assets"))
    return Diagnosis(f"asset {name}", True, f"{size / 1e6:.1f} MB, {ASSETS[name].licence}")


def _cpu() -> Diagnosis:
    """Report the cores and memory available to jobs, and the matmul speed if a plan has measured it."""
    total, rates = machine.memory(), known()
    memory = f", {total / machine.GIB:.1f} GiB memory" if total else ""
    units = "with bf16 units" if machine.has_bf16_units() else "no bf16 units: bf16 matmuls run in fp32"
    speed = f"; {rates.fp32 / 1e9:.0f} GFLOP/s per core in fp32, {rates.bf16 / 1e9:.0f} in bf16" if rates else ""
    return Diagnosis("CPU", True, f"{counted(machine.cores(), 'core')}{memory}; {units}{speed}")


def _demo(project: Project) -> list[Diagnosis]:
    """Estimate how long the whole demo takes here, if the machine's speed was measured."""
    if not (project.recipes / f"{DEMO}.yaml").exists():
        return []
    if known() is None:
        return [Diagnosis("demo", True, f"no time estimate yet: {command('plan', DEMO)} measures this machine")]
    try:
        graph = load_recipe(project.recipes, DEMO)
        execution = load_execution(project, graph.execution)
    except ConfigError as error:
        return [Diagnosis("demo", False, str(error), f"correct it: {command('validate', DEMO)} lists all problems")]
    estimates = Estimates(project, graph, execution, known)
    found = outlook(graph, execution, {address: estimates.from_scratch(node).time for address, node in graph.nodes.items()})
    return [Diagnosis("demo", True, time_text(found, execution.numerics.device), slow_text(found, execution.numerics.device))]


def _disk(root: Path) -> Diagnosis:
    free = shutil.disk_usage(root).free / 1e9
    return Diagnosis("disk", free >= FEW_GB, f"{free:.0f} GB free", "" if free >= FEW_GB else f"free some space: a run needs {FEW_GB} GB")


def _remote(root: Path) -> Diagnosis:
    names = [f"{name} ({url})" for name, url in _remotes(root)]
    if names:
        return Diagnosis("DVC remote", True, ", ".join(names))
    hint = "to share artifacts: `dvc remote add --default NAME URL`, with an S3 URL or a folder"
    return Diagnosis("DVC remote", True, "none: artifacts stay on this machine", hint)


def _cache(root: Path) -> Path:
    """The folder of the DVC cache; a relative path is relative to the configuration."""
    return root / ".dvc" / _dvc_config(root).get("cache", "dir", fallback="cache")


def _dvc_config(root: Path) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.read([root / ".dvc" / "config", root / ".dvc" / "config.local"])
    return parser


def _remotes(root: Path) -> Iterator[tuple[str, str]]:
    """Yield the name and URL (without credentials) of each remote; config.local overrides config, as in DVC."""
    parser = _dvc_config(root)
    for section in parser.sections():
        name = re.fullmatch(r"'?remote \"(.+)\"'?", section)
        if name:
            yield name[1], re.sub(r"//[^/@]*@", "//", parser[section].get("url", "no URL"))
