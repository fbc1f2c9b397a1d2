"""The Python interface: what `import pedigree` gives."""

import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from in_process import InProcessLauncher
from projects import fresh_project
from waiting import InThread

import pedigree
from pedigree import Project, Recipe, RunFailed, StageEnded
from pedigree.configs.base.document import ConfigError
from pedigree.configs.base.problems import UsageProblem
from pedigree.configs.language.compile import write_compiled
from pedigree.configs.language.recipe import load_recipe, load_recipes
from pedigree.configs.language.recipe_files import recipe_names
from pedigree.configs.methods.training import Sft
from pedigree.pipelines.jobs import launchers
from pedigree.pipelines.jobs.events import RunEnded
from pedigree.pipelines.run.runs import NotRun

ROOT = Path(__file__).parents[2]
SUM = {"type": "arithmetic", "operations": ["add"], "digits": [1], "count": 5, "seed": 1}
ROWS = {"kind": "prepare_data", "record": "conversation", "sources": [SUM]}


@pytest.fixture
def project(tmp_path: Path) -> Project:
    shutil.copytree(ROOT / "configs" / "recipes", tmp_path / "configs" / "recipes")
    return Project(tmp_path)


@pytest.mark.unit
@pytest.mark.parametrize("name", recipe_names(ROOT / "configs" / "recipes"))
def test_a_recipe_is_the_same_after_it_was_printed_and_loaded(project: Project, name: str) -> None:
    recipe, graph = Recipe.load(project, name), load_recipe(project.recipes, name)
    (project.recipes / f"{name}.yaml").write_text(recipe.yaml())
    assert Recipe.load(project, name) == recipe
    assert load_recipe(project.recipes, name) == graph


@pytest.mark.unit
def test_a_recipe_keeps_the_profile_that_it_names_though_it_is_the_usual_one(project: Project) -> None:
    Recipe("parent", execution="gpu8", stages={"rows": ROWS}).save(project)
    for name, execution, expected in (("mine", "cpu", "cpu"), ("other", None, "gpu8")):
        Recipe(name, extends="parent", execution=execution).save(project)
        Recipe.load(project, name).save(project, replace=True)
        assert load_recipe(project.recipes, name).execution == expected


@pytest.mark.unit
def test_a_variant_is_loaded_by_its_name(project: Project) -> None:
    graphs = load_recipes(project.recipes, "tiny", ["sft.epochs=3"])
    write_compiled(project.root, graphs)
    found = Recipe.load(project, graphs[-1].recipe)
    assert found == Recipe.load(project, "tiny", ["sft.epochs=3"]) and found.overrides == ("sft.epochs=3",)


@pytest.mark.unit
def test_a_stage_of_a_typed_config_is_the_mapping_that_says_the_same() -> None:
    config = Sft.model_validate({"global_batch": 2, "max_length": 8, "optimizer": {"learning_rate": 0.1}})
    stage = Recipe.stage(config, policy="base", data=("rows",))
    fields = {"global_batch": 2, "max_length": 8, "optimizer": {"learning_rate": 0.1}}
    mapping = {"kind": "sft", "in": {"policy": "base", "data": ["rows"]}, **fields}
    assert Recipe("x", stages={"sft": stage}) == Recipe("x", stages={"sft": mapping})


@pytest.mark.unit
def test_saving_replaces_no_other_recipe_unless_asked_and_writes_none_with_problems(project: Project) -> None:
    before = (project.recipes / "tiny.yaml").read_text()
    with pytest.raises(UsageProblem, match=r"tiny\.yaml exists and differs"):
        Recipe("tiny", stages={"rows": ROWS}).save(project)
    for name in ("tiny", "new"):
        with pytest.raises(ConfigError, match=r"stage rows: .*count: must be at least"):
            Recipe(name, stages={"rows": {**ROWS, "sources": [SUM | {"count": 0}]}}).save(project, replace=True)
    assert (project.recipes / "tiny.yaml").read_text() == before and not (project.recipes / "new.yaml").exists()
    recipe = Recipe("tiny", stages={"rows": ROWS})
    assert recipe.save(project, replace=True) == recipe.save(project) and Recipe.load(project, "tiny") == recipe


@pytest.mark.unit
def test_a_variant_is_saved_again_since_overrides_are_not_in_its_file(project: Project) -> None:
    recipe = Recipe("mine", stages={"rows": ROWS}, overrides=("rows.seed=3",))
    assert recipe.save(project) == recipe.save(project)
    with pytest.raises(UsageProblem, match=r"mine\.yaml exists and differs"):
        Recipe("mine", stages={"other": ROWS}, overrides=("other.seed=3",)).save(project)


@pytest.mark.unit
def test_what_runs_is_the_recipe_in_hand_and_no_other(project: Project) -> None:
    recipe = Recipe("rows", stages={"rows": ROWS})
    with pytest.raises(UsageProblem, match=r"not saved, or its file has changed: recipe\.save"):
        pedigree.plan(project, recipe)
    recipe.save(project)
    Recipe("rows", stages={"others": ROWS}).save(project, replace=True)
    with pytest.raises(UsageProblem, match=r"not saved, or its file has changed: recipe\.save"):
        pedigree.run(project, recipe)


def test_the_package_loads_nothing_before_a_name_is_used_and_every_name_then() -> None:
    code = "import sys, pedigree; assert not [name for name in sys.modules if name.startswith('pedigree.')]; print(*pedigree._HOMES)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert all(getattr(pedigree, name) for name in done.stdout.split()) and {*done.stdout.split()} <= {*dir(pedigree)}
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        pedigree.nothing  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.slow
def test_a_failure_in_a_thread_is_raised_with_every_end_and_a_broken_callback_is_not_the_end(tmp_path: Path, monkeypatch, caplog) -> None:
    monkeypatch.setattr(launchers, "LocalLauncher", InProcessLauncher)
    project = Project(fresh_project(tmp_path))
    strict = {**ROWS, "filters": [{"type": "max_characters", "limit": 1}]}
    below = {"kind": "decontaminate", "in": {"data": "strict", "benchmarks": ["suite"]}}
    suite = {**ROWS, "record": "item", "task": "sums"}
    Recipe("rows", stages={"suite": suite, "strict": strict, "below": below}).save(project)
    events = []

    def listen(event: pedigree.RunEvent) -> None:
        events.append(event)
        raise ZeroDivisionError("an answer to nothing")

    with pytest.raises(RunFailed) as raised:
        InThread(partial(pedigree.run, project, "rows", on_event=listen)).join()
    suite, strict, below = raised.value.ends
    assert suite.outcome == "ran" and strict.cause == "refused" and below == NotRun("rows/below", "rows/strict failed")
    assert str(raised.value) == str(strict)
    assert {event.address: event.outcome for event in events if isinstance(event, StageEnded)} == {
        "rows/suite": "ran", "rows/strict": "failed", "rows/below": "skipped",
    }  # fmt: skip
    assert events[-1] == RunEnded("failed", str(strict)) and "an answer to nothing" in caplog.text
    assert len([*pedigree.Artifact.open(project, "rows/suite").rows()]) == 5
    again: list[pedigree.RunEvent] = []
    (end,) = pedigree.run(project, "rows", targets=["suite"], on_event=again.append)
    assert end.outcome == "unchanged" and again[-1] == RunEnded("completed")
