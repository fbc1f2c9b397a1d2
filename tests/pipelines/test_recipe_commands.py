"""`show`, `validate`, `variants`: what a recipe means, what is wrong with it, and what was made of it with --set."""

import json
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
import yaml
from running_lab import Lab

from pedigree.configs.base.problems import UsageProblem
from pedigree.configs.base.project import Project
from pedigree.configs.language.compile import yaml_text
from pedigree.configs.language.recipe import load_recipe
from pedigree.configs.language.recipe_files import recipe_names
from pedigree.pipelines.cli import main as cli
from pedigree.pipelines.cli import variants as made
from pedigree.pipelines.cli.resolved import resolved_recipe
from pedigree.pipelines.jobs.lease import lease
from pedigree.pipelines.ledger.ledger import Ledger
from pedigree.pipelines.run.runs import run_graph

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "configs" / "recipes"


def files(root: Path) -> dict[str, bytes]:
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file() and ".git" not in path.parts}


@pytest.fixture
def type_(monkeypatch, capsys):
    """Types a command in a project; returns (exit code, stdout, stderr)."""

    def typed(root: Path, *arguments: str) -> tuple[int, str, str]:
        monkeypatch.chdir(root)
        monkeypatch.setattr(sys, "argv", ["pedigree", *arguments])
        with pytest.raises(SystemExit) as end:
            cli.main()
        return int(end.value.code or 0), *capsys.readouterr()

    return typed


@pytest.fixture
def root(tmp_path) -> Path:
    """A project with our recipes and profiles."""
    for folder in ("recipes", "execution"):
        shutil.copytree(ROOT / "configs" / folder, tmp_path / "clone" / "configs" / folder)
    (tmp_path / "clone" / ".dvc").mkdir()
    return tmp_path / "clone"


# --- show --------------------------------------------------------------------------------------------------------------

CHANGES = {"tiny": [[], ["online.rounds=3", "sft.seed=3"]], "demo": [[], ["sft.optimizer.learning_rate=1e-7"]]}


@pytest.mark.parametrize(("recipe", "changes"), [(name, one) for name in recipe_names(RECIPES) for one in CHANGES.get(name, [[]])])
def test_what_is_shown_loads_again_as_the_same_stages(tmp_path, recipe, changes):
    graph = load_recipe(RECIPES, recipe, changes)
    (tmp_path / "again.yaml").write_text(yaml_text(resolved_recipe(Project(ROOT), graph)))
    again = load_recipe(tmp_path, "again")
    assert {node.name: node.spec for node in again.nodes.values()} == {node.name: node.spec for node in graph.nodes.values()}
    assert (again.execution, again.description) == (graph.execution, graph.description)
    assert {name: again.nodes[model.stage].spec for name, model in again.models.items()} == {
        name: graph.nodes[model.stage].spec for name, model in graph.models.items()
    }


def test_a_source_outside_the_project_is_shown_with_its_path(tmp_path):
    source = "{type: files, path: /data/house/rows.jsonl}"
    text = f"reproduce: {{score_tolerance: 0.05}}\nstages:\n  rows: {{kind: prepare_data, record: prompt, sources: [{source}]}}\n"
    (tmp_path / "mine.yaml").write_text(text)
    shown = resolved_recipe(Project(ROOT), load_recipe(ROOT / "configs/recipes", str(tmp_path / "mine.yaml")))
    assert shown["stages"]["rows"]["sources"][0]["path"] == "/data/house/rows.jsonl"
    assert shown["reproduce"] == {"score_tolerance": 0.05}


def test_a_recipe_that_extends_another_is_shown_whole(root, type_):
    (root / "configs" / "recipes" / "more.yaml").write_text("extends: tiny\nstages:\n  rlvr: {steps: 3}\n")
    before = files(root)
    code, out, _ = type_(root, "show", "more")
    value = yaml.safe_load(out)
    assert code == 0 and "extends" not in value and value["stages"]["rlvr"]["steps"] == 3
    assert value["stages"]["sft"]["optimizer"]["beta2"] == 0.999  # a default
    code, out, _ = type_(root, "show", "more", "rlvr", "--execution", "gpu8")
    value = yaml.safe_load(out)
    assert (value["stage"], value["kind"], value["config"]["steps"]) == ("more/rlvr", "rlvr", 3)
    assert value["in"]["policy"] == {"dpo_2": "tiny/dpo_2"} and value["numerics"]["world_size"] == 8 and value["placement"]["slots"] == 8
    code, out, _ = type_(root, "show", "more", "chat", "--execution", "gpu8")
    assert yaml.safe_load(out)["numerics"]["world_size"] == 1  # a stage without ranks
    assert files(root) == before


# --- validate ----------------------------------------------------------------------------------------------------------


def test_validate_tells_all_problems_of_recipes_and_profiles_and_writes_nothing(root, type_):
    recipes, profiles = root / "configs" / "recipes", root / "configs" / "execution"
    assert type_(root, "validate", "tiny") == (0, "1 recipe: no problems\n", "")
    assert type_(root, "validate", "--all")[1] == f"{len(recipe_names(recipes))} recipes and 5 profiles: no problems\n"
    (recipes / "bad.yaml").write_text("execution: odd\nstages:\n  a: {kind: nonsense}\n  b: {kind: pair, in: {judgments: c}}\n")
    (recipes / "worse.yaml").write_text("stages:\n  a: {kind: prepare_data, record: item}\n")
    (profiles / "odd.yaml").write_text("slots: 0\nnumerics:\n  threads: none\n")
    before = files(root)
    code, out, err = type_(root, "validate", "bad", "worse", "tiny")
    assert code == 2 and out == ""
    for line in (r"bad.yaml:3: .*nonsense", r"bad.yaml:4: .*'c'", r"odd.yaml:1: slots", r"odd.yaml:3: numerics.threads", r"worse.yaml:2: "):
        assert re.search(line, err), line
    code, _, every = type_(root, "validate", "--all")
    assert code == 2 and sorted(every.splitlines()) == sorted(err.splitlines())  # each problem once
    code, _, err = type_(root, "validate", "tiny", "--set", "sft.global_batch=7", "--execution", "gpu8")
    assert code == 2 and "global_batch 7 is not divisible by 8 ranks" in err
    assert files(root) == before


# --- variants ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lab(tmp_path_factory) -> Lab:
    """A lab with a recipe and a variant of it that have been run."""
    lab = Lab(tmp_path_factory.mktemp("variants"))
    for overrides in ((), ("cleaner.ngram=7",)):
        run_graph(lab.run(*overrides))
    return lab


@pytest.fixture
def variant(lab: Lab) -> made.Variant:
    run_graph(lab.run("cleaner.ngram=7"))  # a test before may have removed it
    (found,) = made.variants(lab.project)
    return found


def objects(lab: Lab) -> set[str]:
    return {path.name for path in (lab.root / ".dvc" / "cache").rglob("*") if path.is_file()}


def test_variants_are_listed_with_what_they_were_made_from(lab: Lab, variant, type_):
    code, out, _ = type_(lab.root, "variants")
    row = out.splitlines()[1].split()
    assert code == 0 and row[:5] == [variant.name, "1", "of", "1", f"{variant.size / 1000:.1f}"] and row[-1] == "cleaner.ngram=7"
    assert variant.size == sum(path.stat().st_size for path in variant.folder.rglob("*") if path.is_file())
    assert variant.name in type_(lab.root, "variants", "lab")[1]
    assert type_(lab.root, "variants", "lob")[::2] == (2, "no recipe 'lob'; `pedigree recipes` lists all recipes\n")


def test_removing_a_variant_takes_its_folder_and_nothing_else(lab: Lab, variant, type_, monkeypatch):
    cached, others = objects(lab), files(lab.root / "artifacts" / "lab")
    monkeypatch.setattr("typer.confirm", lambda text: False)
    code, out, _ = type_(lab.root, "variants", "--remove", variant.name)
    assert code == 1 and "nothing removed" in out and variant.folder.exists()
    code, out, _ = type_(lab.root, "variants", "--remove", variant.name, "--yes")
    assert code == 0 and not variant.folder.exists() and not (lab.project.private / "removed").exists()
    assert objects(lab) == cached and files(lab.root / "artifacts" / "lab") == others
    assert re.search(r"`pedigree gc --yes` would delete \d+ objects? of this variant, ", out)
    lab.forget_runs()
    run_graph(lab.run("cleaner.ngram=7"))
    assert lab.runs() == [] and (variant.folder / "cleaner" / "record.json").exists()  # out of the cache


def test_a_variant_that_is_in_use_is_not_removed(lab: Lab, variant, type_):
    before = files(variant.folder)
    with lease(lab.project.lease(f"{variant.name}--cleaner"), "pedigree run lab"):
        code, _, err = type_(lab.root, "variants", "--remove", variant.name, "--yes")
    assert code == 2 and "is in use, held by process" in err and "(pedigree run lab)" in err and files(variant.folder) == before


def test_what_is_no_variant_is_not_removed(lab: Lab, type_, tmp_path):
    before = files(lab.root / "artifacts")
    for name in ("lab", "lab+00000000", "../lab", ""):
        with pytest.raises(UsageProblem, match="no variant"):
            made.find_variant(lab.project, name)
    outside = tmp_path / "mine.yaml"  # a recipe of another folder keeps a source.json too, and is no variant
    outside.write_text((lab.root / "configs/recipes/lab.yaml").read_text())
    assert type_(lab.root, "compile", str(outside))[0] == 0
    assert json.loads((lab.root / "artifacts/mine/source.json").read_text())["set"] == []
    assert [one.recipe for one in made.variants(lab.project)] in ([], ["lab"])
    shutil.rmtree(lab.root / "artifacts" / "mine")
    assert files(lab.root / "artifacts") == before and Ledger(lab.project)


def test_compiled_files_name_the_command_that_writes_them(lab: Lab, variant, type_):
    for file in [*variant.folder.glob("*.yaml"), lab.root / "artifacts/lab/dvc.yaml"]:
        text = file.read_text()
        (named,) = re.findall(r"`pedigree (.+?)` from", text.splitlines()[0])
        file.unlink()
        assert type_(lab.root, *shlex.split(named))[0] == 0 and file.read_text() == text


def test_a_mistake_in_the_head_of_a_recipe_hides_none_in_its_stages(root, type_):
    text = "colour: red\nreproduce: {score_tolerance: 7}\nmodels: {m: {stage: nowhere}}\nstages:\n  a: {kind: nonsense}\n"
    (root / "configs" / "recipes" / "bad.yaml").write_text(text)
    (root / "configs" / "recipes" / "child.yaml").write_text("extends: bad\nshape: round\nstages:\n  b: {kind: folly}\n")
    _, _, err = type_(root, "validate", "bad")
    for line in ("bad.yaml:1: colour: unknown key", "bad.yaml:2: reproduce", "bad.yaml:3: model m", "bad.yaml:5: stage a"):
        assert line in err, err
    _, _, err = type_(root, "validate", "child")
    for line in ("bad.yaml:1: colour: unknown key", "bad.yaml:5: stage a", "child.yaml:2: shape: unknown key", "child.yaml:4: stage b"):
        assert line in err, err
