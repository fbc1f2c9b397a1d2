"""The recipes of published work, each rehearsed whole: real jobs of every stage, from a fresh clone."""

import json
import subprocess

import pytest
from projects import call, fresh_project

from configs.graph import Graph
from configs.recipe import load_recipe

RECIPES = ("olmo2_1b", "tulu3_8b", "tulu31_8b", "tulu3_8b_onpolicy")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.rotated(4)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_of_published_work_is_rehearsed_whole(tmp_path, recipe):
    project = fresh_project(tmp_path / "clone")
    graph: Graph = load_recipe(project / "configs" / "recipes", recipe)
    printed = call(project, "pedigree", "rehearse", recipe, "--json")
    document, _ = json.JSONDecoder().raw_decode(printed)  # what stands before the progress that went to stderr
    assert document["outcome"] == "done" and len(document["stages"]) == len(graph.nodes)
    proved = document["proved"]
    assert sum(len(one["refused"]) for one in proved["rows"]) >= 5
    assert all(one["rows"] >= 1 for one in proved["decontamination"])  # the leak that was put into each set
    trained = [one for one in proved["models"] if one["kind"] in ("sft", "preference_train", "rlvr")]
    assert len({one["template"] for one in trained}) == 1
    assert {(one["ranks"], one["zero_stage"]) for one in proved["training"]} == {(2, 3)}
    outcomes = [counts.get("right", 0) for counts in proved["verifiers"].values()]
    assert {"gsm8k", "math", "ifeval", "python"} <= set(proved["verifiers"]) and any(outcomes)
    assert {one["task"] for one in proved["suites"]} == {node.name for node in graph.nodes.values() if node.output == "item"}
    assert not (project / "artifacts").exists()
    assert subprocess.run(["git", "status", "--short"], cwd=project, capture_output=True, text=True, check=True).stdout == ""
