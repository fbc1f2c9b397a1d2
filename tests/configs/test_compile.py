import re
import shutil
from pathlib import Path

import pytest
import yaml
from ruamel.yaml import YAML

from pedigree.configs.base.document import ConfigError, parse_value
from pedigree.configs.language.compile import compile_recipe, overrides_of, write_compiled, yaml_text
from pedigree.configs.language.recipe import load_recipe, load_recipes
from pedigree.configs.language.recipe_files import recipe_names

FIRST = """
stages:
  suite: {kind: prepare_data, record: item, task: a, sources: [{type: arithmetic, operations: [add], digits: [1], count: 3, seed: 1}]}
  raw:
    kind: prepare_data
    record: conversation
    sources: [{type: files, path: rows/chat.jsonl}]
"""
SECOND = """
stages:
  clean: {kind: decontaminate, in: {data: first/raw, benchmarks: [first/suite]}, threshold: 1e-5}
"""


@pytest.fixture
def recipes(tmp_path: Path) -> Path:
    folder = tmp_path / "configs" / "recipes"
    folder.mkdir(parents=True)
    (folder / "first.yaml").write_text(FIRST)
    (folder / "second.yaml").write_text(SECOND)
    (folder / "demo.yaml").write_text(SECOND)
    return folder


def test_paths_are_relative_to_the_file_that_holds_them_which_for_the_default_recipe_stands_at_the_root(recipes: Path) -> None:
    first, second = load_recipes(recipes, "second")
    raw = yaml.safe_load(compile_recipe(first)["artifacts/first/dvc.yaml"])["stages"]["raw"]
    assert raw["deps"] == ["../../rows/chat.jsonl"] and raw["params"] == [{"params.yaml": ["raw"]}]
    compiled = yaml.safe_load(compile_recipe(second)["artifacts/second/dvc.yaml"])
    assert list(compiled["stages"]) == ["clean"]
    assert compiled["stages"]["clean"]["deps"] == ["../first/raw/payload", "../first/suite/payload"]
    assert compiled["stages"]["clean"]["cmd"] == "pedigree stage second/clean"
    assert compiled["metrics"] == ["clean/evidence/metrics.json"]
    stage = yaml.safe_load(compile_recipe(load_recipes(recipes, "demo")[-1])["dvc.yaml"])["stages"]["clean"]
    assert stage["deps"] == ["artifacts/first/raw/payload", "artifacts/first/suite/payload"]
    assert stage["params"] == [{"artifacts/demo/params.yaml": ["clean"]}]
    assert stage["outs"][0] == "artifacts/demo/clean/payload"


def test_params_hold_the_identity_also_for_readers_of_yaml_1_2(recipes: Path) -> None:
    graph = load_recipes(recipes, "second")[-1]
    text = compile_recipe(graph)["artifacts/second/params.yaml"]
    assert yaml.safe_load(text) == {"clean": graph.find("clean").identity()}
    ruamel = pytest.importorskip("ruamel.yaml")  # what DVC reads with
    assert ruamel.YAML(typ="safe").load(text) == {"clean": graph.find("clean").identity()}


def test_variant_holds_only_what_differs_and_can_be_loaded_again(recipes: Path) -> None:
    graphs = load_recipes(recipes, "second", ["clean.threshold=1e-4"])
    compiled = compile_recipe(graphs[-1])
    source = yaml.safe_load(compiled[f"artifacts/{graphs[-1].recipe}/source.json"])
    assert load_recipes(recipes, source["recipe"], source["set"])[-1] == graphs[-1]
    assert overrides_of(graphs[-1]) == ["clean.threshold=0.0001"]
    # one without effect
    assert compile_recipe(load_recipes(recipes, "second", ["clean.threshold=1e-5"])[-1]) == {}


def test_files_are_written_only_when_their_text_changes(recipes: Path, tmp_path: Path) -> None:
    graphs = load_recipes(recipes, "second")
    assert len(write_compiled(tmp_path, graphs)) == 4
    assert write_compiled(tmp_path, graphs) == []
    (recipes / "second.yaml").write_text(SECOND.replace("1e-5", "1e-3"))
    assert write_compiled(tmp_path, load_recipes(recipes, "second")) == ["artifacts/second/params.yaml"]


@pytest.mark.parametrize("overrides", [[], ["clean.threshold=0.7"]])
def test_a_recipe_of_the_folder_is_the_same_by_path_and_a_path_of_this_machine_stands_nowhere(
    recipes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    by_name = list(map(compile_recipe, load_recipes(recipes, "second", overrides)))
    for path in (recipes / "second.yaml", "configs/recipes/second.yaml", "configs/../configs/recipes/second.yaml"):
        found = list(map(compile_recipe, load_recipes(recipes, str(path), overrides)))
        assert found == by_name and str(tmp_path) not in str(found)
    shutil.copy(recipes / "first.yaml", tmp_path / "third.yaml")
    other = compile_recipe(load_recipes(recipes, "third.yaml")[-1])["artifacts/third/dvc.yaml"]
    assert "by `pedigree compile third.yaml` from third.yaml" in other


def test_a_recipe_that_has_moved_into_the_folder_is_compiled_as_one_of_it(recipes: Path, tmp_path: Path) -> None:
    root, draft = recipes.parents[1], tmp_path / "third.yaml"
    shutil.copy(recipes / "first.yaml", draft)
    write_compiled(root, load_recipes(recipes, str(draft)))
    assert (root / "artifacts/third/source.json").exists()
    shutil.move(draft, recipes / "third.yaml")
    write_compiled(root, load_recipes(recipes, "third"))
    assert not (root / "artifacts/third/source.json").exists()


def test_two_recipes_of_one_name_do_not_write_the_same_artifacts(recipes: Path, tmp_path: Path) -> None:
    (tmp_path / "second.yaml").write_text(SECOND.replace("1e-5", "1e-3"))
    with pytest.raises(ConfigError, match=r"has the name of configs/recipes/second.yaml, whose artifacts it would replace: rename it"):
        write_compiled(recipes.parents[1], load_recipes(recipes, str(tmp_path / "second.yaml")))


def test_a_pipeline_of_the_user_is_not_replaced(recipes: Path, tmp_path: Path) -> None:
    own = tmp_path / "dvc.yaml"
    own.write_text("stages: {own: {cmd: ./train.sh}}\n")
    graphs = load_recipes(recipes, "demo")
    with pytest.raises(ConfigError, match=r"dvc\.yaml: is not a compiled file, and would be replaced by one: move it, or rename"):
        write_compiled(tmp_path, graphs)
    assert own.read_text() == "stages: {own: {cmd: ./train.sh}}\n"
    assert [path for path in tmp_path.rglob("*") if path.is_file() and path.parent != recipes] == [own], "nothing is begun"
    own.unlink()
    own.symlink_to(recipes / "first.yaml")
    with pytest.raises(ConfigError, match="is not a compiled file"):
        write_compiled(tmp_path, graphs)


@pytest.mark.parametrize("before", ["# Compiled from configs/recipes/demo.yaml by `pedigree plan demo`: edit it\n", "<<<<<<< HEAD\n{}"])
def test_a_compiled_file_is_replaced_also_that_of_0_1_and_in_a_merge_conflict(recipes: Path, tmp_path: Path, before: str) -> None:
    graphs = load_recipes(recipes, "demo")
    write_compiled(tmp_path, graphs)
    text = (tmp_path / "dvc.yaml").read_text()
    (tmp_path / "dvc.yaml").write_text(before.format(text))
    assert write_compiled(tmp_path, graphs) == ["dvc.yaml"]
    assert (tmp_path / "dvc.yaml").read_text() == text


def test_committed_compiled_files_are_current() -> None:
    root = Path(__file__).parents[2]
    for recipe in recipe_names(root / "configs" / "recipes"):
        for name, text in compile_recipe(load_recipe(root / "configs" / "recipes", recipe)).items():
            assert (root / name).read_text() == text, f"{name} is not what {recipe}.yaml says: `pedigree compile {recipe}`"


def test_a_variant_is_a_recipe_by_its_name(recipes, tmp_path):
    graphs = load_recipes(recipes, "first", ["raw.seed=5"])
    write_compiled(recipes.parents[1], graphs)
    name = graphs[-1].recipe
    again = load_recipe(recipes, name)
    assert (again.recipe, again.source, dict(again.overrides)) == (name, "first", {"raw.seed": 5})
    assert compile_recipe(again) == compile_recipe(graphs[-1])
    further = load_recipe(recipes, name, ["raw.seed=6"])
    assert further.recipe == load_recipe(recipes, "first", ["raw.seed=6"]).recipe != name
    (recipes / "reader.yaml").write_text(f"stages:\n  kept: {{kind: decontaminate, in: {{data: {name}/raw, benchmarks: [first/suite]}}}}\n")
    assert f"{name}/raw" in [graph for graph in load_recipes(recipes, "reader")][-1].nodes
    with pytest.raises(ConfigError, match=rf"there is no variant 'first\+00000000'; available: {re.escape(name)}"):
        load_recipe(recipes, "first+00000000")
    source = recipes.parents[1] / "artifacts" / name / "source.json"
    for text, problem in (("{}", "must have `recipe`"), ('{"recipe": "first", "set": ["raw.seed=7"]}', "describes first")):
        source.write_text(text)
        with pytest.raises(ConfigError, match=problem):
            load_recipe(recipes, name)


ODD_TEXTS = [
    "no",
    "Yes",
    "on",
    "y",
    "010",
    "0o10",
    "1e5",
    ".5e3",
    "._1",
    ".inf",
    ".",
    "..",
    "12:30",
    "2024-01-01",
    "1_000",
    "~",
    "null",
    "<<",
    "=",
]


@pytest.mark.parametrize("text", ODD_TEXTS)
def test_texts_that_look_like_numbers_are_texts_to_dvc_and_to_recipes(text: str) -> None:
    written = yaml_text({"a": text})
    assert parse_value(written) == YAML(typ="safe").load(written) == {"a": text}
