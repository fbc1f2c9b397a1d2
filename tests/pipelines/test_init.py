"""`pedigree init` completes a folder and replaces nothing in it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from pedigree.configs.base.document import ConfigError
from pedigree.configs.base.problems import UsageProblem
from pedigree.configs.base.project import PACKAGED, Project
from pedigree.configs.language.execution import profile_path
from pedigree.configs.language.recipe import load_recipe
from pedigree.configs.language.recipe_files import recipe_names
from pedigree.pipelines.cli.init import DVC_CONFIG, LINES, create
from pedigree.pipelines.cli.main import app
from pedigree.pipelines.ledger.git import git_environment, run_git
from pedigree.pipelines.ledger.lock_merge import DRIVER
from pedigree.pipelines.publish.commits import check_commit
from pedigree.pipelines.run.opening import load_execution

ROOT = Path(__file__).resolve().parents[2]


def files(folder: Path) -> dict[str, str]:
    paths = [path for path in folder.rglob("*") if path.is_file() and ".git" not in path.relative_to(folder).parts]
    return {path.relative_to(folder).as_posix(): path.read_text() for path in paths}


def test_a_new_project_has_the_settings_of_the_clone_and_the_example(tmp_path):
    project, made = create(tmp_path / "new" / "project")
    assert set(made) == {"a git repository", *files(project.root)}
    assert run_git(project.root, "config", f"merge.{DRIVER}.driver").stdout
    assert (project.recipes / "tiny.yaml").read_text() == (ROOT / "configs/recipes/tiny.yaml").read_text()
    for name, lines in LINES.items():
        assert set(lines) <= set((ROOT / name).read_text().splitlines()), name
    own, clone = ([line for line in text.splitlines() if "#" not in line] for text in (DVC_CONFIG, (ROOT / ".dvc/config").read_text()))
    assert own == clone
    assert load_recipe(project.recipes, "tiny").nodes and load_execution(project, "cpu").slots
    assert create(project.root) == (project, [])


def test_what_exists_stays_and_gets_what_it_lacks(tmp_path):
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, env=git_environment(), check=True)
    folder = tmp_path / "inside"
    before = {".gitignore": "*.log\n/.pedigree/", ".dvc/config": "[core]\n    remote = mine\n", "configs/recipes/mine.yaml": "stages: {}\n"}
    for name, text in before.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    made = create(folder)[1]
    assert not (folder / ".git").exists() and {"a git repository", *before} & set(made) == {".gitignore"}
    after = files(folder)
    assert after[".gitignore"].startswith("*.log\n/.pedigree/\n") and after[".gitignore"].count("/.pedigree/") == 1
    assert {name: after[name] for name in before if name != ".gitignore"} == {n: t for n, t in before.items() if n != ".gitignore"}
    assert not (folder / "configs/recipes/tiny.yaml").exists(), "it has a recipe"
    assert create(folder, "tiny")[1] == ["configs/recipes/tiny.yaml"]


def test_a_recipe_comes_with_those_that_it_builds_on(tmp_path):
    project, _ = create(tmp_path, "tulu31_8b")
    assert recipe_names(project.recipes) == ["tulu31_8b", "tulu3_8b", "tulu3_suites"]
    assert load_recipe(project.recipes, "tulu31_8b").nodes


@pytest.mark.parametrize("recipe", recipe_names(PACKAGED.recipes))
def test_a_packaged_recipe_needs_no_other_file_of_the_clone(recipe):
    assert not [node.address for node in load_recipe(PACKAGED.recipes, recipe).nodes.values() if node.files]


@pytest.mark.parametrize(
    ("name", "recipe", "said"),
    [
        ("configs/recipes/tiny.yaml", "tiny", "tiny.yaml exists and differs from the packaged recipe tiny: rename one of them"),
        ("dvc.yaml", "demo", "dvc.yaml exists, and the recipe demo would be compiled there: move it"),
        ("above", None, r"above/project cannot be written \(Not a directory\): choose another folder"),
    ],
)
def test_nothing_is_replaced_and_nothing_begun(tmp_path, name, recipe, said):
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text("mine: {}\n")
    before = files(tmp_path)
    with pytest.raises(UsageProblem, match=said):
        create(tmp_path / "above" / "project" if recipe is None else tmp_path, recipe)
    assert files(tmp_path) == before and not (tmp_path / ".git").exists()


@pytest.mark.parametrize(
    ("git_file", "said"),
    [
        ({".git/config": "[core]\n\trepositoryformatversion = 99\n"}, "found 99"),
        ({".git": "gitdir: /nowhere\n"}, "git repository: /nowhere"),
    ],
)
def test_no_repository_is_made_inside_one_that_git_cannot_read(tmp_path, git_file, said):
    subprocess.run(["git", "init", "-q", "other"], cwd=tmp_path, env=git_environment(), check=True)
    for name, text in git_file.items():
        if name == ".git":
            shutil.rmtree(tmp_path / "other/.git")
        (tmp_path / "other" / name).write_text(text)
    with pytest.raises(UsageProblem, match=f"git cannot read the repository of {tmp_path}/other/inner: fatal: .*{said}"):
        create(tmp_path / "other/inner")
    assert not list((tmp_path / "other/inner").iterdir())
    with pytest.raises(UsageProblem, match=said):  # rather than a remedy that makes one
        check_commit(Project(tmp_path / "other/inner"))


def test_lines_of_a_file_in_another_encoding_stay(tmp_path):
    (tmp_path / ".gitignore").write_bytes(b"caf\xe9\n/.venv\n")
    create(tmp_path)
    data = (tmp_path / ".gitignore").read_bytes()
    assert data.startswith(b"caf\xe9\n/.venv\n/.pedigree/\n") and data.count(b"/.venv\n") == 1


def test_text_is_utf8_in_any_locale(tmp_path):
    create(tmp_path)
    (tmp_path / "café.yaml").write_text("model_name_or_path: org/base\nlearning_rate: 1.0e-5\ndataset_name: org/rows\n")
    words = [sys.executable, "-m", "pedigree.pipelines.cli", "import", "café.yaml", "mine", "--method", "sft"]
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(words, cwd=tmp_path, env=os.environ | ascii_only, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert "café.yaml" in (tmp_path / "configs/recipes/mine.yaml").read_bytes().decode()


def test_a_recipe_by_path_is_refused(tmp_path):
    (tmp_path / "tiny.yaml").write_text("stages: {}\n")
    with pytest.raises(UsageProblem, match=r"takes the name of a packaged recipe, not a path: omit it, then copy ./tiny.yaml to .*recipes"):
        create(tmp_path / "new", "./tiny.yaml")
    assert not (tmp_path / "new").exists()


def test_results_that_git_would_ignore_are_named(tmp_path):
    (tmp_path / ".gitignore").write_text("*.lock\nartifacts/\n!dvc.yaml\n")
    said = CliRunner().invoke(app, ["init", str(tmp_path)]).output
    assert "Git would not add artifacts/tiny/dvc.yaml, artifacts/tiny/dvc.lock" in said and "(.gitignore:2: artifacts/)" in said
    (tmp_path / ".gitignore").write_text("*.lock\n!dvc.lock\n")
    assert "Git would not add" not in CliRunner().invoke(app, ["init", str(tmp_path)]).output


def test_an_unknown_recipe_is_refused_with_the_known_ones(tmp_path):
    with pytest.raises(ConfigError, match=r"there is no recipe 'nope'; available: .*tiny"):
        create(tmp_path / "new", "nope")
    assert not (tmp_path / "new").exists()


def test_a_project_in_a_project_is_refused(tmp_path):
    create(tmp_path)
    with pytest.raises(UsageProblem, match="is inside the project"):
        create(tmp_path / "inner")


def test_an_own_profile_wins_over_the_packaged_one(tmp_path):
    project, _ = create(tmp_path)
    assert profile_path(project.executions, "cpu") == PACKAGED.executions / "cpu.yaml"
    project.executions.mkdir()
    (project.executions / "cpu.yaml").write_text(yaml.safe_dump({"slots": 7}))
    assert load_execution(project, "cpu").slots == 7
