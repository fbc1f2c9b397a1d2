"""What `forget` says would be made again is what a plan shows once the row is left out, and nothing is changed by asking."""

import json
import textwrap

import pytest
import yaml
from running_lab import RANKS, STAGE, Lab, outcomes

from configs.datasets import PrepareData
from data.artifacts import read_run
from pipelines.forget import forget, gpu_hours, without
from pipelines.lineage.trace import Wanted, trace
from pipelines.runs import plan

ROWS = """
    def run(config, inputs, job):
        return work(job, [{"id": f"{config.record}-{n:016x}"} for n in range(config.sources[0].count)])
"""
CHILD = """
extends: lab
stages:
  again: {kind: sft, in: {policy: base, data: [clean]}, global_batch: 4, max_length: 8, optimizer: {learning_rate: 0.2}}
"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """Rows with ids, and models that only stand for such; all is made but one recipe's stage below."""
    lab = Lab(tmp_path_factory.mktemp("forget"))
    (lab.code / "stages/prepare_data.py").write_text(STAGE + textwrap.dedent(ROWS))
    lab.write("configs/recipes/lab.yaml", "description: Rows and a model.\n" + RANKS)
    lab.write("configs/recipes/child.yaml", "description: One more.\nexecution: lab" + CHILD)
    assert set(outcomes(lab).values()) == {"ran"}
    return lab


def state(lab):
    return {path: path.stat().st_mtime_ns for path in lab.root.rglob("*") if path.is_file() and ".pedigree" not in path.parts}


def test_forget_names_what_a_plan_shows_after_the_change(lab):
    rows = [json.loads(line) for line in (lab.root / "artifacts/lab/clean/payload/rows.jsonl").read_text().splitlines()]
    wanted = rows[0]["id"]
    before = state(lab)
    found = forget(lab.project, trace(lab.project, Wanted(id=wanted)))
    assert state(lab) == before
    assert [(one.address, one.part, one.why) for one in found.again] == [
        ("lab/raw", "data", "holds it"),
        ("lab/clean", "data", "holds it"),
        ("lab/base", "models", "goes back to it"),  # its tokenizer
        ("lab/sft", "models", "trained on it"),
    ]
    assert found.unmade == ("child/again",) and not found.strays and not found.unread
    assert all(one.seconds is not None and one.gpu_hours is None for one in found.again)
    assert [one.names for one in found.again if one.part == "models"] == [("artifacts/lab:base",), ("artifacts/lab:sft",)]
    (change,) = found.changes
    assert (change.recipe, change.stage, change.text) == ("lab", "raw", f"filters: [{{type: ids, ids: [{wanted}]}}]")
    recipe = lab.root / "configs/recipes/lab.yaml"
    value = yaml.safe_load(recipe.read_text())
    value["stages"]["raw"] |= yaml.safe_load(change.text)
    kept = recipe.read_text()
    try:
        recipe.write_text(yaml.safe_dump(value))
        planned = [entry.node.address for entry in plan(lab.run()) if entry.reasons]
    finally:
        recipe.write_text(kept)
    assert planned == [one.address for one in found.again]


def test_what_no_recipe_makes_any_more_and_what_cannot_be_read_is_said(lab):
    wanted = json.loads((lab.root / "artifacts/lab/clean/payload/rows.jsonl").read_text().splitlines()[0])["id"]
    recipe = lab.root / "configs/recipes/lab.yaml"
    kept = recipe.read_text()
    try:
        recipe.write_text(kept.replace("  sft: {kind: sft", "  other: {kind: sft"))
        lab.write("configs/recipes/broken.yaml", "stages: 3\n")
        found = forget(lab.project, trace(lab.project, Wanted(id=wanted)))
    finally:
        recipe.write_text(kept)
        (lab.root / "configs/recipes/broken.yaml").unlink()
    assert found.strays == ("lab/sft",) and "lab/other" in found.unmade and list(found.unread) == ["broken"]


def test_gpu_hours_are_those_of_all_ranks_and_of_stages_that_use_them(lab):
    run = read_run(lab.root / "artifacts/lab/sft/run.json")
    attempt = run.attempts[0].model_copy(update={"started_at": "2026-01-02T03:00:00+00:00", "ended_at": "2026-01-02T03:30:00+00:00"})
    nodes = lab.run().graph.nodes
    on_gpus = run.model_copy(update={"attempts": (attempt, attempt), "numerics": {"device": "cuda", "world_size": 8}})
    assert gpu_hours(nodes["lab/sft"], on_gpus) == 8.0  # two tries of half an hour
    assert gpu_hours(nodes["lab/raw"], on_gpus) is None


def test_ids_join_those_that_a_filter_has_and_stand_last():
    source = {"type": "arithmetic", "operations": ["add"], "digits": [1], "count": 3, "seed": 1}
    filters = [{"type": "ids", "ids": ["b"]}, {"type": "exact_duplicates"}]
    config = PrepareData.model_validate({"record": "prompt", "sources": [source], "filters": filters})
    assert without(config, {"c", "a"}) == ({"type": "exact_duplicates"}, {"type": "ids", "ids": ["a", "b", "c"]})
