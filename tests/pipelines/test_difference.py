"""How two artifacts differ: expected numbers are counted by hand."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from handmade import build, project_at

from pedigree.configs.base.project import Project
from pedigree.configs.language.recipe import load_recipe
from pedigree.pipelines.lineage.ancestry import read_pedigree
from pedigree.pipelines.lineage.difference import _paired, compare, row_changes, text
from pedigree.pipelines.lineage.evaluations import Evaluation

SUITE = (
    "{kind: prepare_data, record: item, task: arithmetic, sources: [{type: arithmetic, operations: [add], digits: [1], count: 4, seed: 1}]}"
)
RECIPE = """
description: A policy and its scores.
execution: cpu
stages:
  suite: SUITE
  raw: {kind: prepare_data, record: conversation, sources: [{type: arithmetic, operations: [add], digits: [1], count: COUNT, seed: 2}]}
  clean: {kind: decontaminate, in: {data: raw, benchmarks: [suite]}}
  base: {kind: source_model, source: {type: packaged, asset: smollm2-135m-instruct}}
  sft: {kind: sft, in: {policy: base, data: clean}, optimizer: {learning_rate: 0.001}, epochs: 1, global_batch: 8, max_length: 64}
  scores: {kind: evaluate, in: {policies: [base, sft], suites: [suite]}, sampling: {max_tokens: 8}, seed: 0}
"""


def publish(
    project: Project, name: str, *, count: int = 3, scores: list[float], label: str = "sft", run: dict[str, Any] | None = None
) -> None:
    """A recipe with its artifacts; `count` decides the rows of `raw`, the rows of `clean` and the weights of `sft`."""
    recipe = RECIPE.replace("SUITE", SUITE).replace("COUNT", str(count))
    (project.recipes / f"{name}.yaml").write_text(recipe.replace("sft:", f"{label}:").replace("base, sft", f"base, {label}"))
    graph = load_recipe(project.recipes, name)
    for node in graph.nodes.values():
        rows = [{"id": f"r{i}", "text": f"row {i}"} for i in range(count if node.name in ("raw", "clean") else 4)]
        payload = {"rows.jsonl": "".join(json.dumps(row) + "\n" for row in rows)}
        if node.kind in ("sft", "source_model"):
            payload = {"model.safetensors": f"weights after {count if node.kind == 'sft' else 0}"}
        if node.kind == "evaluate":
            items = [{"id": f"i{i}", "task": "arithmetic", "policy": label, "score": score} for i, score in enumerate(scores)]
            items += [{**item, "policy": "base", "score": 0.0} for item in items]
            payload = {"rows.jsonl": "".join(json.dumps(row) + "\n" for row in items), "scores.json": "{}"}
        build(project, graph, node, payload, {}, {"rows": len(rows)})
        record = project.artifact(node.address) / "run.json"
        record.write_text(json.dumps({**json.loads(record.read_text()), "address": node.address, **(run or {})}))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Project:
    made = project_at(tmp_path_factory.mktemp("difference"))
    publish(made, "one", scores=[0.0, 0.0, 1.0, 0.0])
    publish(made, "two", count=4, scores=[1.0, 1.0, 1.0, 1.0])
    return made


@pytest.fixture
def project(made: Project, tmp_path: Path) -> Project:
    """A copy, to which a test may add."""
    return Project(shutil.copytree(made.root, tmp_path / "project"))


@pytest.fixture
def diff(project: Project) -> Callable[..., Any]:
    return lambda one, two: compare(read_pedigree(project.artifact(one)), read_pedigree(project.artifact(two)), project)


def test_an_artifact_is_identical_to_itself_whoever_made_it(project, diff):
    publish(project, "again", scores=[0.0, 0.0, 1.0, 0.0], run={"numerics": {"device": "cuda"}, "environment": {"python": "3.12"}})
    found = diff("one/sft", "again/sft")
    assert found.same and not (found.config or found.rows or found.files or found.parents or found.origins or found.scores)
    words = text(found, "one/sft", "again/sft")
    assert words == f"identical: one/sft and again/sft are {found.ids[0][:12]} (made with different environment and numerics)"
    assert text(diff("one/sft", "one/sft"), "a", "b") == f"identical: a and b are {found.ids[0][:12]}"


def test_the_change_far_up_is_where_the_ancestry_parts(diff):
    found = diff("one/sft", "two/sft")
    assert not found.same and found.config == []
    assert [(change.name, change.first == change.second) for change in found.parents] == [("data clean", False)]
    assert [(origin.path, origin.first, origin.second, origin.why) for origin in found.origins] == [
        ("data < data", "one/raw", "two/raw", ["sources[0].count: 3 -> 4"])
    ]
    assert [change.name for change in found.files] == ["model.safetensors"]


def test_fields_rows_and_code_are_told(project, diff):
    code = {
        "attempts": [{"code": {"commit": "f" * 40, "dirty": False, "patch_sha256": None}}],
        "fingerprint": {"files": {"stages/sft/run.py": "0" * 64}},
    }
    publish(project, "coded", count=4, scores=[1.0] * 4, run=code)
    found = diff("one/raw", "coded/raw")
    assert [(change.name, change.first, change.second) for change in found.config] == [("sources[0].count", 3, 4)]
    assert (found.rows.by, found.rows.added, found.rows.removed, found.rows.changed, found.rows.kept) == ("id", 1, 0, 0, 3)
    assert {change.name for change in found.code} == {"commit", "file stages/sft/run.py"}
    words = text(found, "one/raw", "coded/raw")
    assert "  sources[0].count: 3 -> 4" in words and "  3 -> 4, by id: 1 added, 0 removed, 0 changed, 3 equal\n  added: r3" in words
    assert "  commit: 0123456789ab -> ffffffffffff" in words


def test_equal_bytes_from_another_config_are_the_same_content_and_not_identical(project, diff):
    """The suite is four rows under any seed here."""
    recipe = RECIPE.replace("SUITE", SUITE.replace("seed: 1", "seed: 9")).replace("COUNT", "3")
    (project.recipes / "three.yaml").write_text(recipe)
    graph = load_recipe(project.recipes, "three")
    node = graph.nodes["three/suite"]
    rows = "".join(json.dumps({"id": f"r{i}", "text": f"row {i}"}) + "\n" for i in range(4))
    build(project, graph, node, {"rows.jsonl": rows}, {}, {"rows": 4})
    found = diff("one/suite", "three/suite")
    assert not found.same and found.same_content and found.rows is None
    assert "same content" in text(found, "a", "b") and "sources[0].seed: 1 -> 9" in text(found, "a", "b")


def test_scores_stand_beside_it_with_the_paired_interval(diff):
    """Items 0, 1 and 3 rose by 1: the mean rose by 0.75, and every resample's lies in [0, 1]."""
    for found in (diff("one/sft", "two/sft"), diff("one/scores", "two/scores")):
        change = found.scores[-1]
        assert (change.task, change.policies, change.items) == ("arithmetic", "sft", 4)
        assert (change.first, change.second, change.mean) == (0.25, 1.0, 0.75)
        assert 0.0 <= change.low < 0.75 < change.high == 1.0
    base = diff("one/scores", "two/scores").scores[0]
    assert (base.policies, base.mean, base.low, base.high) == ("base", 0.0, 0.0, 0.0)
    assert diff("one/raw", "two/raw").scores == []


def test_scores_under_other_settings_are_not_compared(project, diff, monkeypatch):
    monkeypatch.setitem(globals(), "RECIPE", RECIPE.replace("max_tokens: 8", "max_tokens: 9"))
    publish(project, "longer", count=5, scores=[1.0] * 4)
    assert diff("one/sft", "longer/sft").scores == [] and diff("one/sft", "two/sft").scores


def test_another_kind_of_stage_is_where_an_ancestry_parts(diff):
    """`sft` reads clean rows, `clean` raw ones."""
    (origin,) = [origin for origin in diff("one/sft", "two/clean").origins if origin.path.startswith("data")]
    assert (origin.path, origin.why) == ("data", ["different stage kinds: decontaminate -> prepare_data"])


def rows_of(*rows: dict[str, Any]) -> Callable[[], Any]:
    return lambda: iter(rows)


def test_rows_with_a_key_are_matched_by_it_whatever_their_order():
    before = rows_of({"id": "a", "n": 1}, {"id": "b", "n": 1, "of": ["x", "y"]}, {"id": "c", "n": 1})
    after = rows_of({"id": "c", "n": 1}, {"id": "b", "n": 2, "of": ["x", "z"]}, {"id": "d", "n": 1})
    found = row_changes(before, after)
    assert (found.added, found.removed, found.changed, found.kept) == (1, 1, 1, 1)
    assert found.examples == {"added": ["d"], "removed": ["a"], "changed": ["b: n: 1 -> 2, of[1]: y -> z"]}
    assert row_changes(before, before).kept == 3


def test_rows_without_a_key_of_their_own_are_a_multiset():
    before, after = rows_of({"id": "a"}, {"id": "a"}, {"id": "b"}), rows_of({"id": "a"}, {"id": "b"}, {"id": "b"}, {"id": "c"})
    found = row_changes(before, after)
    assert (found.by, found.before, found.after) == ("", 3, 4)
    assert (found.added, found.removed, found.changed, found.kept) == (2, 1, 0, 2)
    assert found.examples["added"] == ['{"id":"b"}', '{"id":"c"}'] and found.examples["removed"] == ['{"id":"a"}']


def test_scores_of_a_task_that_averages_over_categories_are_compared_so():
    def evaluation(*scores: float, macro: bool) -> Evaluation:
        rows = [{"task": "t", "policy": "p", "id": name, "score": score} for name, score in zip("abcd", scores, strict=True)]
        rows = [row | ({"category": category} if macro else {}) for row, category in zip(rows, "xxxy", strict=True)]
        record = SimpleNamespace(config={"resamples": 100, "seed": 0})
        return Evaluation(SimpleNamespace(record=record, rows=lambda: rows), "p")  # type: ignore[arg-type]

    for macro, (first, second) in {False: (0.75, 1.0), True: (0.5, 1.0)}.items():
        (found,) = _paired(evaluation(1, 1, 1, 0, macro=macro), evaluation(1, 1, 1, 1, macro=macro))
        assert (found.first, found.second, found.mean) == (first, second, second - first)


def test_scores_are_matched_by_task_policy_and_item():
    row = {"id": "i", "task": "t", "policy": "p", "score": 0.0}
    found = row_changes(rows_of(row, {**row, "policy": "q"}), rows_of({**row, "score": 1.0}, {**row, "policy": "q"}))
    assert (found.by, found.changed, found.kept) == ("task/policy/id", 1, 1)
    assert found.examples["changed"] == ["t/p/i: score: 0.0 -> 1.0"]
