"""Published hours and scores beside ours: in the plan, in its document, in the report."""

import json
import subprocess

import pytest
from handmade import everything, project_at
from typer.testing import CliRunner

from pedigree.configs.language.graph import Graph
from pedigree.configs.language.recipe import load_recipe
from pedigree.pipelines.cli.main import app
from pedigree.pipelines.publish import comparison
from pedigree.pipelines.publish.report import write_report

BLOCK = """
published:
  sources: [{title: A paper, url: "https://arxiv.org/abs/1"}]
  harness: by hand
  scores:
    arithmetic: {metric: exact_match, items: 471, samples: 2, of: {base: 10, sft: 30.5, rlvr: 99}}
    words: {metric: other, items: 3, of: {sft: 50}}
  hardware:
    sft: {gpus: 8, gpu: H100, hours: 9}
    rlvr: {gpus: 16, gpu: H100, hours: 2.5}
  differs: [It is smaller.]
  lacks: [A judge.]
"""
SUITE = """
  words:
    kind: prepare_data
    record: item
    task: words
    sources: [{type: arithmetic, operations: [add], digits: [1], count: 3, seed: 9}]
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    project = project_at(tmp_path_factory.mktemp("following"))
    path = project.recipes / "tiny.yaml"
    head, _, stages = path.read_text().partition("\nstages:\n")
    path.write_text(head + "\nstages:" + SUITE + stages + BLOCK)
    subprocess.run(["git", "init", "-q"], cwd=project.root, check=True)
    return project, everything(project)


@pytest.fixture
def graph(made) -> Graph:
    return made[1]


def scores(**means: float) -> dict[str, dict]:
    metrics = {label: {"arithmetic": {"exact_match": {"mean": mean}, "other": {"mean": 0.9}}} for label, mean in means.items()}
    return {"scores": {"policies": {label: {"metrics": found} for label, found in metrics.items()}}}


def test_hours_stand_beside_the_estimated_ones(graph):
    cells = comparison.hardware_cells(graph, {"tiny/sft": 81.4, "tiny/rlvr": None})
    assert cells == [("sft", "8 H100, 9 h", "72", "81"), ("rlvr", "16 H100, 2.5 h", "40", "?")]


def test_scores_are_a_row_for_each_task_and_a_column_for_each_stage(graph):
    assert comparison.score_cells(graph) == (
        ("task", "metric", "items", "base", "sft", "rlvr", "tolerance"),
        [("arithmetic", "exact_match", "471 x 2", "10", "30.5", "99", "±6"), ("words", "other", "3", "", "50", "", "±81.6")],
    )


def test_a_measured_score_is_that_of_the_same_metric(graph):
    found = {(one.task, one.stage): (one.measured, one.verdict) for one in comparison.comparisons(graph, scores(base=0.12, sft=0.2))}
    assert found == {
        ("arithmetic", "base"): (pytest.approx(12), "as published"),
        ("arithmetic", "sft"): (pytest.approx(20), "below"),
        ("arithmetic", "rlvr"): (None, "not measured"),
        ("words", "sft"): (None, "not measured"),
    }
    (above,) = [one for one in comparison.comparisons(graph, scores(sft=0.4)) if one.task == "arithmetic" and one.stage == "sft"]
    assert above.verdict == "above"


def test_a_stage_of_another_recipe_goes_by_its_name_or_address(made):
    project, _ = made
    (project.recipes / "heir.yaml").write_text("extends: tiny\nstages:\n  unseen: {resamples: 100}\n")
    graph = load_recipe(project.recipes, "heir")
    assert comparison.hardware_cells(graph, {"tiny/sft": 5.0})[0] == ("sft", "8 H100, 9 h", "72", "5")
    found = [one.measured for one in comparison.comparisons(graph, scores(**{"tiny/sft": 0.3})) if one.stage == "sft"]
    assert found == [pytest.approx(30), None]


def test_the_report_has_published_beside_measured(made):
    text = write_report(*made).read_text()
    assert "Published and measured" in text and "In percent; by hand." in text
    assert "<th>arithmetic</th><td>sft</td><td>exact_match</td><td>30.5</td><td>6.0</td>" in text


def plan(project, monkeypatch, *words: str) -> str:
    monkeypatch.chdir(project.root)
    done = CliRunner().invoke(app, ["plan", "tiny", *words], env={"COLUMNS": "160", "PEDIGREE_PREFECT": "never"})
    assert done.exit_code == 0, done.output
    return done.stdout


def test_plan_shows_what_the_recipe_follows_and_its_document_has_all_of_it(made, monkeypatch):
    said = plan(made[0], monkeypatch)
    assert "8 H100, 9 h" in said and "Published scores, in percent (by hand):" in said
    assert "Differences from the original:\n- It is smaller." in said and "Not yet supported:\n- A judge." in said
    assert "This recipe follows A paper (https://arxiv.org/abs/1)." in said
    published = json.loads(plan(made[0], monkeypatch, "--json"))["published"]
    assert published["scores"]["arithmetic"]["of"] == {"base": 10.0, "sft": 30.5, "rlvr": 99.0}
    assert published["hardware"]["rlvr"] == {"gpus": 16, "gpu": "H100", "hours": 2.5}
    assert published["lacks"] == ["A judge."] and published["sources"][0]["commit"] is None
