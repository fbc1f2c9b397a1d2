"""What developers rely on: unit tests cannot start processes, `make quick` finds what a change affects, hooks find what they are for."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import tomllib
from pathlib import Path

import pytest
import yaml
from affected import affected
from packaging.specifiers import SpecifierSet
from unit_guard import NotAUnitTest, unit_test
from waiting import deadline

from docs.release import notes

ROOT = Path(__file__).resolve().parents[1]


def git(root: Path, *arguments: str) -> None:
    subprocess.run(["git", "-c", "user.name=t", "-c", "user.email=t@t", *arguments], cwd=root, check=True, capture_output=True)


def import_an_engine() -> None:
    import deepspeed  # noqa: F401


@pytest.mark.parametrize(
    ("forbidden", "named"),
    [
        (lambda: subprocess.run(["true"], check=True), "starts a process"),
        (os.fork, "starts a process"),
        (lambda: os.system("true"), "starts a process"),
        (lambda: time.sleep(0.001), "sleeps"),  # which is noticed
        (import_an_engine, "imports deepspeed"),
    ],
    ids=["subprocess", "fork", "shell", "sleep", "engine"],
)
def test_a_unit_test_that_is_none_fails(monkeypatch, forbidden, named):
    monkeypatch.delitem(sys.modules, "deepspeed", raising=False)  # an earlier test may have imported it
    with pytest.raises(NotAUnitTest, match=named), unit_test():
        forbidden()
    swallowed = []
    with pytest.raises(NotAUnitTest, match=named), unit_test():
        try:
            forbidden()
        except BaseException as error:
            swallowed.append(error)
    assert swallowed


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # it is what the second sleeper ends by
def test_nothing_is_forbidden_beside_unit_tests_nor_in_threads_that_others_have_left():
    time.sleep(0)  # allowed here
    subprocess.run(["true"], check=True)
    inside = threading.Event()

    def sleeper():
        inside.wait(deadline(60))
        time.sleep(0)  # allowed here

    left = threading.Thread(target=sleeper)
    left.start()
    with unit_test():
        inside.set()
        left.join()
    with pytest.raises(NotAUnitTest, match="sleeps"), unit_test():
        own = threading.Thread(target=sleeper)
        own.start()
        own.join()


def test_a_test_that_sleeps_says_why():
    """Events are awaited (`waiting.py`); what sleeps in a program that a test starts is not meant."""
    silent = []
    for path in (ROOT / "tests").rglob("*.py"):
        text = path.read_text()
        calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)] if "time.sleep(" in text else []
        sleeps = [call.lineno for call in calls if ast.unparse(call.func) == "time.sleep"]
        silent += [f"{path.name}:{line}" for line in sleeps if "#" not in text.splitlines()[line - 1]]
    assert silent == []


def test_what_a_change_affects_is_itself_and_who_imports_it(tmp_path):
    files = {
        "configs/__init__.py": "",
        "configs/changed.py": "FIELD = 1",
        "configs/other.py": "FIELD = 1",
        "data/reads.py": "from pedigree.configs import changed",
        "stages/reads.py": "def run():\n    from pedigree.configs.changed import FIELD",
        "stages/reads_other.py": "import pedigree.configs.other",
        "pipelines/indirectly.py": "import pedigree.data.reads",
        "tests/reads.py": "import pedigree.configs.changed",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-qm", "start")
    assert affected(tmp_path, "HEAD") == set()
    (tmp_path / "configs/changed.py").write_text("FIELD = ''")
    (tmp_path / "pipelines/new.py").write_text("")
    (tmp_path / "configs/other.py").unlink()
    expected = {"configs/changed.py", "data/reads.py", "stages/reads.py", "stages/reads_other.py", "pipelines/new.py"}
    assert affected(tmp_path, "HEAD") == expected


def test_the_devcontainer_is_a_stage_of_the_dockerfile():
    container = json.loads((ROOT / ".devcontainer/devcontainer.json").read_text())
    dockerfile = (ROOT / ".devcontainer" / container["build"]["dockerfile"]).read_text()
    stage = dockerfile.split(f" AS {container['build']['target']}\n")[1].split("\nFROM ")[0]
    assert f"useradd --create-home --uid 1000 {container['remoteUser']}" in stage


def test_hooks_find_what_they_are_for_with_the_tools_of_the_lock(tmp_path):
    shutil.copy(ROOT / ".pre-commit-config.yaml", tmp_path)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    (tmp_path / "page.md").write_text("Fine.\n")
    (tmp_path / "module.py").write_text("import os\n\nprint( os )\n")
    git(tmp_path, "init", "-q")

    def failing_hooks() -> set[str]:
        git(tmp_path, "add", "page.md", "module.py", ".pre-commit-config.yaml")
        command = [f"{sys.prefix}/bin/pre-commit", "run"]
        environment = os.environ | {"PRE_COMMIT_HOME": str(tmp_path / ".cache")}
        shown = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False).stdout
        assert shown.count("\n") >= 5 and "large files" in shown
        return {line.partition("...")[0] for line in shown.splitlines() if line.endswith("Failed")}

    assert failing_hooks() == {"ruff format"}
    (tmp_path / "page.md").write_text("Teh page.\n" * 60_000)
    (tmp_path / "module.py").write_text("import os\n")
    assert failing_hooks() == {"ruff check", "spelling", "large files"}


def test_a_change_is_checked_on_every_python_that_the_package_takes():
    job = yaml.safe_load((ROOT / ".github/workflows/checks.yml").read_text())["jobs"]["checks"]
    versions = job["strategy"]["matrix"]["python"].split("'")[3]  # of a pull request
    spoken = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    assert json.loads(versions) == [f"3.{minor}" for minor in range(30) if f"3.{minor}.0" in SpecifierSet(spoken)]
    assert job["env"]["PYTHON"] == "python${{ matrix.python }}"
    steps = {step["run"]: step.get("if", "") for step in job["steps"] if "run" in step}
    assert steps["make setup"] == "" and steps["make quick BASE=origin/${{ github.base_ref }}"] == "github.event_name == 'pull_request'"


def test_a_release_has_the_notes_of_its_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    version, changelog = project["version"], (ROOT / "CHANGELOG.md").read_text()
    with pytest.raises(SystemExit, match=rf"says that {version} is unreleased: write its date, `## {version} \(date\)`"):
        notes(f"v{version}", version, changelog.replace(f"## {version} (2026-12-01)", f"## {version} (unreleased)"))
    found = notes(f"v{version}", version, changelog.replace("(unreleased)", "(2026-12-01)"))
    assert found.startswith("### Added") and "\n## " not in found
    with pytest.raises(SystemExit, match=r"the tag is v9, but pyproject\.toml has version 1: the tag must be v1"):
        notes("v9", "1", "")
    with pytest.raises(SystemExit, match="no section for 1: add"):
        notes("v1", "1", "## 1.2 (2026-01-01)\n\n- x\n")


def test_a_change_is_one_line_of_a_section():
    text = (ROOT / "CHANGELOG.md").read_text()
    sections = re.findall(r"^### (\w+)\n(.*?)(?=^##|\Z)", text, re.MULTILINE | re.DOTALL)
    assert {title for title, _ in sections} <= {"Added", "Changed", "Fixed", "Removed"} and sections
    assert not [line for _, body in sections for line in body.splitlines() if line and not line.startswith("- ")]
