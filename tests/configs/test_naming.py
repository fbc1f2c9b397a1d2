"""Names of models: what a recipe may state, and what becomes of them in the compiled file."""

from pathlib import Path

import pytest
import yaml

from pedigree.configs.base.document import ConfigError
from pedigree.configs.language.compile import compile_recipe
from pedigree.configs.language.recipe import load_recipe


@pytest.fixture
def recipes(tmp_path: Path) -> Path:
    shipped = Path(__file__).resolve().parents[2] / "configs" / "recipes" / "tiny.yaml"
    (tmp_path / "tiny.yaml").write_text(shipped.read_text())
    return tmp_path


def write(folder: Path, name: str, text: str) -> None:
    (folder / f"{name}.yaml").write_text(text)


def compiled(folder: Path, recipe: str, *overrides: str) -> dict:
    graph = load_recipe(folder, recipe, overrides)
    return yaml.safe_load(compile_recipe(graph)[f"artifacts/{graph.recipe}/dvc.yaml"]).get("artifacts", {})


def test_without_names_every_model_goes_by_its_stage(recipes: Path) -> None:
    found = compiled(recipes, "tiny")
    assert {"base", "sft", "rlvr"} <= found.keys() and all("_" not in name for name in found)
    assert found["rlvr"] == {"path": "rlvr/payload", "type": "model", "desc": "policy of tiny/rlvr"}


def test_names_replace_those_and_carry_what_is_said_of_them(recipes: Path) -> None:
    write(
        recipes,
        "mine",
        "description: m\nextends: tiny\nmodels:\n  final: {stage: rlvr, desc: the one, labels: [small, new]}\nstages: {rlvr: {steps: 3}}\n",
    )
    final = {"path": "rlvr/payload", "type": "model", "desc": "the one", "labels": ["small", "new"]}
    assert compiled(recipes, "mine") == {"final": final}
    # who extends it has the names too, and may say them anew; a stage that is not its own is named where it is made
    write(
        recipes, "more", "description: m\nextends: mine\nmodels: {first: {stage: sft}, last: {stage: rlvr}}\nstages: {rlvr: {steps: 4}}\n"
    )
    assert compiled(recipes, "more").keys() == {"final", "last"}
    write(recipes, "anew", "description: m\nextends: mine\nmodels: {final: {stage: rlvr, desc: other}}\nstages: {rlvr: {steps: 4}}\n")
    assert compiled(recipes, "anew")["final"]["desc"] == "other"
    assert compiled(recipes, "mine", "rlvr.steps=9") == {"final": final}


PROBLEMS = {
    "models: [rlvr]": "3: `models` must map names to stages",
    "models:\n  final: {stage: nothing}": "4: model final: there is no stage 'nothing'; available: ",
    "models:\n  final: {stage: prompts}": "4: model final: stage prompts has output prompt: name a stage with output policy or",
    "models:\n  Final_1: {stage: rlvr}": "4: model name 'Final_1' must match",
    "models:\n  sft: {stage: rlvr}": "4: model sft: the stage sft already has this name: choose another",
    "models:\n  final: {stage: rlvr, colour: red}": "4: models.final.colour: unknown key; its fields: stage, desc, labels",
    "models:\n  final: {desc: x}": "4: models.final.stage: required, but missing: add it",
}


@pytest.mark.parametrize("text", PROBLEMS)
def test_what_is_wrong_is_said_with_its_line(recipes: Path, text: str) -> None:
    write(recipes, "mine", f"description: m\nextends: tiny\n{text}\n")
    with pytest.raises(ConfigError) as error:
        load_recipe(recipes, "mine")
    assert f"mine.yaml:{PROBLEMS[text]}" in str(error.value) and len(error.value.problems) == 1


def test_names_are_no_part_of_what_a_stage_is(recipes: Path) -> None:
    text = (recipes / "tiny.yaml").read_text()
    plain = load_recipe(recipes, "tiny")
    write(recipes, "tiny", text + "\nmodels: {final: {stage: rlvr}}\n")
    assert load_recipe(recipes, "tiny").nodes == plain.nodes
