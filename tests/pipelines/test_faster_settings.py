"""`plan --faster`: the settings that the search finds fit, are valid, and are faster by formulas worked out by hand."""

import json

import pytest
from typer.testing import CliRunner

from pedigree.configs.base.project import Project
from pedigree.configs.language.execution import Execution, Numerics
from pedigree.configs.language.recipe import load_recipe
from pedigree.pipelines.cli.main import app
from pedigree.pipelines.estimate import search
from pedigree.pipelines.estimate.estimates import Estimates
from pedigree.pipelines.estimate.fit import Trial, lacks
from pedigree.pipelines.estimate.needs import Facts
from pedigree.pipelines.run.opening import load_execution

PSI = 8_030_261_248


@pytest.mark.parametrize(
    "zero, recomputed, bytes_of_an_update",
    [
        (1, False, 7 / 8 * (4 * PSI + 2 * PSI)),
        (2, True, 7 / 8 * (3 * 4 * PSI + 2 * PSI)),  # gradients after each of three passes
        (3, False, 7 / 8 * 3 * (4 * PSI + 2 * 2 * PSI)),  # and the weights for each forward and backward pass
        (3, True, 7 / 8 * 3 * (4 * PSI + 3 * 2 * PSI)),
    ],
)
def test_bytes_that_a_rank_receives_per_update(zero, recomputed, bytes_of_an_update):
    numerics = Numerics(device="cuda", world_size=8, zero_stage=zero, gradient_checkpointing=recomputed)
    assert search.exchanged_bytes(PSI, 2, numerics, passes=3) == pytest.approx(bytes_of_an_update)


def test_one_rank_exchanges_nothing():
    assert search.exchanged_bytes(PSI, 2, Numerics(device="cuda", zero_stage=3), passes=3) == 0


def test_frozen_weights_under_adapters_are_gathered_without_gradients():
    assert search.gathered_bytes(PSI, 2, Numerics(device="cuda", world_size=8, zero_stage=3), passes=2) == 7 / 8 * 2 * 2 * 2 * PSI
    assert search.gathered_bytes(PSI, 2, Numerics(device="cuda", world_size=8, zero_stage=2), passes=2) == 0


def estimates_of(root, recipe: str, **profile) -> Estimates:
    project = Project(root)
    execution = load_execution(project, "gpu8")
    return Estimates(project, load_recipe(project.recipes, recipe), Execution.model_validate(execution.model_dump() | profile))


def checked(estimates: Estimates, stage: str) -> search.Faster:
    """The settings found for a stage, which the profile accepts and which fit."""
    node = next(node for node in estimates.graph.nodes.values() if node.name == stage)
    found = search.faster(estimates, node)
    assert found is not None
    given = estimates.execution.model_dump()
    own = given["stages"].setdefault(stage, {"numerics": {}, "placement": {}})
    own["numerics"] |= found.numerics
    own["placement"] |= found.placement
    numerics, placement = Execution.model_validate(given).of(node.kind, node.name)
    hardware, facts = estimates.of(node).hardware, estimates.work_of(node)[1]
    assert isinstance(facts, Facts) and not lacks(Trial(facts, numerics, placement, hardware))
    assert hardware.gpu_bytes and found.peak_bytes <= search.ROOM * hardware.gpu_bytes
    return found


def test_sft_of_8b_on_eight_gpus_of_80_gb_need_not_recompute_its_layers(root):
    found = checked(estimates_of(root, "tulu3_8b"), "sft")
    assert found.numerics == {"zero_stage": 2, "gradient_checkpointing": False, "micro_batch_tokens": 2048}
    assert found.time_share and 0.7 < found.time_share < 0.85  # three passes' worth of operations instead of four, and more exchanges


def test_gpus_with_more_memory_let_passes_be_longer(root):
    found = checked(estimates_of(root, "tulu3_8b", machine={"gpu": "b200"}), "sft")
    assert found.numerics["gradient_checkpointing"] is False
    assert found.numerics.get("micro_batch_tokens", 16384) > 2048


def test_a_stage_that_does_not_fit_gets_settings_under_which_it_does(root):
    whole = load_execution(Project(root), "gpu8").numerics.model_dump() | {"zero_stage": 1}
    found = checked(estimates_of(root, "tulu3_8b", numerics=whole, machine={"gpu": "a100-40gb"}), "sft")
    assert found.time_share is None and found.numerics["zero_stage"] in (2, 3)


def test_engines_that_generate_beside_the_ranks_share_the_gpus_with_them(root, tmp_path):
    recipe = tmp_path / "ahead.yaml"
    ahead = {"extends": "tulu31_8b", "description": "asynchronous", "stages": {"rlvr_grpo": {
        "replay": "recorded", "asynchronous": {"max_staleness": 1}, "algorithm": {"correction": {}}}}}  # fmt: skip
    recipe.write_text(json.dumps(ahead))
    project = Project(root)
    execution = load_execution(project, "gpu8").model_dump()
    execution["stages"]["rlvr_grpo"] = {"numerics": {"world_size": 2, "tensor_parallel": 4}, "placement": {"gpu_memory_utilization": 0.85}}
    execution["machine"] = {"gpu": "h200"}
    estimates = Estimates(project, load_recipe(project.recipes, str(recipe)), Execution.model_validate(execution))
    found = checked(estimates, "rlvr_grpo")
    assert found.numerics["world_size"] == 4 and found.time_share and found.time_share < 0.95
    assert 4 + found.placement.get("engines", 1) * found.numerics.get("tensor_parallel", 4) <= 8


@pytest.mark.parametrize(("profile", "line"), [("gpu8", "stages:\n  sft: {numerics: {"), ("cpu", "GPUs, which no stage to run has")])
def test_the_command_prints_lines_for_the_profile_or_why_there_are_none(root, monkeypatch, profile, line):
    monkeypatch.chdir(root)
    assert line in CliRunner().invoke(app, ["plan", "tulu3_8b", "--only", "sft", "--execution", profile, "--faster"]).stdout


def test_a_profile_on_a_cpu_is_not_searched(root):
    project = Project(root)
    graph = load_recipe(project.recipes, "tiny")
    estimates = Estimates(project, graph, load_execution(project, "cpu"))
    assert all(search.faster(estimates, node) is None for node in graph.nodes.values())
