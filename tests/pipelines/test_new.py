"""`pedigree new`: a recipe to start from."""

import re
import shutil
from pathlib import Path

import pytest
import yaml
from pydantic import TypeAdapter

from pedigree.configs.base.problems import UsageProblem
from pedigree.configs.language.recipe import load_recipe
from pedigree.configs.rows import row_sources, source_models
from pedigree.pipelines.cli.recipes import STARTERS, Starter, new

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    (tmp_path / ".dvc").mkdir()
    (tmp_path / "configs" / "recipes").mkdir(parents=True)
    shutil.copytree(ROOT / "configs" / "execution", tmp_path / "configs" / "execution")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_each_starter_can_be_chosen():
    assert {path.stem for path in STARTERS.glob("*.yaml")} == set(Starter)


@pytest.mark.parametrize("starter", Starter)
def test_a_new_recipe_loads_and_is_checked_against_its_suite(project, capsys, starter):
    new("mine", starter)
    assert capsys.readouterr().out == "wrote configs/recipes/mine.yaml; next: `pedigree plan mine`\n"
    graph = load_recipe(project / "configs" / "recipes", "mine")
    assert {"mine/base", "mine/suite", "mine/scores"} <= graph.nodes.keys() and graph.execution == "cpu"


@pytest.mark.parametrize("path", sorted(STARTERS.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_sources_that_comments_name_are_valid(path):
    named = [match for line in path.read_text().splitlines() for match in re.findall(r"\{type: [^}]*\}", line.partition("#")[2])]
    sources = [yaml.safe_load(one) for one in named]
    for source in sources:
        if source["type"] in {"hub", "files"}:
            of_model = source["type"] == "hub" and "split" not in source
            TypeAdapter(source_models.HubModel if of_model else row_sources.RowSource).validate_python(source)
    assert {source["type"] for source in sources} & {"hub", "files"}


def test_an_existing_recipe_is_kept(project):
    path = project / "configs" / "recipes" / "mine.yaml"
    path.write_text("mine")
    with pytest.raises(UsageProblem, match=r"configs/recipes/mine\.yaml exists: choose another name, or remove the file"):
        new("mine", Starter.sft)
    assert path.read_text() == "mine"


@pytest.mark.parametrize("name", ["../mine", "Mine", "", "mine.yaml"])
def test_a_name_that_no_recipe_can_have_is_refused(project, name):
    with pytest.raises(UsageProblem, match="not a valid recipe name"):
        new(name, Starter.sft)
    assert not list(project.rglob("*mine*"))
