"""The examination names what is missing and how to get it, loads no engine, and never shows a password."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from projects import pin_threads

from pedigree.configs.base.packaged import ASSETS
from pedigree.configs.base.project import Project
from pedigree.pipelines.cli import doctor, plan
from pedigree.pipelines.estimate.rates import Rates


@pytest.fixture
def project(tmp_path, monkeypatch) -> Project:
    monkeypatch.setenv("PEDIGREE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))  # no GPU, no compiler, whatever the machine has
    for folder in (".dvc", "requirements"):
        (tmp_path / folder).mkdir()
    monkeypatch.setattr(doctor, "LOCKS", tmp_path / "requirements")
    (tmp_path / "requirements" / "cpu.txt").write_text("# comment\npyyaml==6.0.3\n")
    doctor.assets.verified.cache_clear()
    return Project(tmp_path)


def finding(project: Project, name: str) -> doctor.Diagnosis:
    (found,) = [finding for finding in doctor.examine(project) if finding.name == name]
    return found


def test_each_absent_asset_is_a_finding_with_a_remedy(project):
    absent = [found for found in doctor.examine(project) if found.name.startswith("asset ")]
    assert len(absent) == len(ASSETS)
    assert all(not found.ok and "make setup" in found.remedy for found in absent)


def test_a_missing_compiler_is_a_finding_with_a_remedy(project):
    found = finding(project, "C++ compiler")
    assert (found.ok, found.value) == (False, "missing")
    assert "apt-get install g++`" in found.remedy and "dnf install gcc-c++`" in found.remedy


def test_cuda_that_a_linker_does_not_find_is_a_finding(project, monkeypatch):
    assert not [found for found in doctor.examine(project) if found.name == "CUDA"]  # this machine has no such wheels
    monkeypatch.setattr(doctor, "cuda_of_wheels", lambda: project.root / "cu13")
    found = finding(project, "CUDA")
    assert not found.ok and found.value.endswith("cu13 has no lib64/libcudart.so: vLLM runs without flashinfer's kernels")
    (project.root / "cu13" / "lib64").mkdir(parents=True)
    (project.root / "cu13" / "lib64" / "libcudart.so").touch()
    assert finding(project, "CUDA").ok


def test_packages_are_compared_with_the_lock(project):
    assert finding(project, "packages").ok
    (project.root / "requirements" / "cpu.txt").write_text(
        'PyYAML==1.0\nno-such-package==2.0 ; python_version >= "3.11"\ntyper==0.29.2\nintel-openmp==1.0 ; platform_machine == "z80"\n'
    )
    found = finding(project, "packages")
    assert not found.ok
    assert found.value.startswith("2 of 3 differ from cpu.txt: PyYAML 6.0.3 instead of 1.0, no-such-package missing instead of 2.0")


@pytest.mark.parametrize(("driver", "right"), [("470.82.01", False), ("570.86.15", False), ("580.65.06", True)])
def test_a_driver_too_old_for_the_cuda_of_the_lock_is_a_finding(project, driver, right):
    smi = project.root / "bin" / "nvidia-smi"
    smi.parent.mkdir()
    older = 'case "$1" in *compute_cap*) exit 2;; esac\n' if driver.startswith("4") else ""
    smi.write_text(f"#!/bin/sh\n{older}echo NVIDIA H100 80GB HBM3, 81559 MiB, 9.0, {driver}\n")
    smi.chmod(0o755)
    found = finding(project, "GPUs")
    assert found.ok == right and driver in found.value
    assert found.remedy == ("" if right else "the lock's CUDA 13.0 needs driver 580 or later: update the driver")
    assert f"cuda-toolkit=={doctor.CUDA}." in (Path(__file__).parents[2] / "requirements" / "gpu.txt").read_text()


def test_a_missing_lock_is_a_finding_and_not_the_end(project):
    (project.root / "requirements" / "cpu.txt").unlink()
    findings = doctor.examine(project)
    assert any(not found.ok and "cpu.txt" in found.value for found in findings)
    assert any(found.name == "disk" for found in findings)


def test_remotes_are_listed_without_their_passwords(project):
    assert finding(project, "DVC remote").value.startswith("none")
    (project.root / ".dvc" / "config").write_text(
        "[core]\n    remote = store\n['remote \"store\"']\n    url = https://user:secret@host/path\n    jobs = 3\n"
    )
    assert finding(project, "DVC remote").value == "store (https://host/path)"


def test_the_cpu_is_told_with_what_it_lacks(project, monkeypatch):
    monkeypatch.setattr(doctor.machine, "cores", lambda: 4)
    monkeypatch.setattr(doctor.machine, "memory", lambda: 8 << 30)
    monkeypatch.setattr(doctor.machine, "has_bf16_units", lambda: False)
    said = "4 cores, 8.0 GiB memory; no bf16 units: bf16 matmuls run in fp32"
    assert finding(project, "CPU").value == said  # nobody has measured its rates in this cache
    monkeypatch.setattr(doctor, "known", lambda: Rates(fp32=38.4e9, bf16=6e9, bandwidth=1e10))
    assert finding(project, "CPU").value == f"{said}; 38 GFLOP/s per core in fp32, 6 in bf16"


def test_a_machine_on_which_the_demo_takes_long_is_told_what_helps(project, root, monkeypatch):
    assert not [found for found in doctor.examine(project) if found.name == "demo"]
    for name in ("recipes", "execution"):
        shutil.copytree(root / "configs" / name, project.root / "configs" / name)
    pin_threads(project.root)
    monkeypatch.setattr(plan, "has_bf16_units", lambda: False)
    assert finding(project, "demo").value.endswith("no time estimate yet: `pedigree plan demo` measures this machine")
    for rate, slow in ((1e9, True), (1e12, False)):
        rates = Rates(fp32=rate, bf16=rate, bandwidth=rate)
        monkeypatch.setattr(doctor, "known", lambda rates=rates: rates)
        found = finding(project, "demo")
        assert found.ok and "on this machine" in found.value
        assert bool(found.remedy) == slow == ("hours" in found.value) and (not slow or "bf16 units" in found.remedy)


def test_a_mistake_in_the_demo_is_told_as_one(project, root, monkeypatch):
    shutil.copytree(root / "configs" / "recipes", project.root / "configs" / "recipes")
    (project.recipes / "demo.yaml").write_text("stages: {base: {kind: sourcemodel}}\n")
    monkeypatch.setattr(doctor, "known", lambda: Rates(fp32=1e9, bf16=1e9, bandwidth=1e9))
    found = finding(project, "demo")
    assert not found.ok and "kind 'sourcemodel'" in found.value and "`pedigree validate demo`" in found.remedy


def test_the_examination_loads_no_engine(root):
    script = (
        "import json, sys; from pedigree.pipelines.cli.doctor import examine; from pedigree.configs.base.project import Project;"
        "from pathlib import Path; examine(Project(Path.cwd())); print(json.dumps(sorted(sys.modules)))"
    )
    answer = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, check=True)
    loaded = set(json.loads(answer.stdout))
    assert not loaded & {"torch", "transformers", "deepspeed", "vllm", "datasets", "great_expectations", "dvc", "prefect"}
