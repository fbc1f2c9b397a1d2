from pathlib import Path

import pytest

from configs.document import ConfigError
from configs.execution import Execution
from configs.recipe import load_recipe
from pipelines import runs

ON_A_GPU = Execution.model_validate({"slots": 1, "numerics": {"device": "cuda", "kernels": "liger"}})
RECIPES = Path(__file__).parents[2] / "configs" / "recipes"


def test_an_engine_that_is_not_installed_is_named_before_anything_runs(monkeypatch):
    monkeypatch.setattr(runs, "find_spec", lambda name: None if name == "vllm" else object())
    graph = load_recipe(RECIPES, "tiny")
    runs.refuse_missing_engines(graph, ["tiny/chat", "tiny/sft"], Execution(slots=1))
    with pytest.raises(ConfigError, match=r"sample_0, rlvr: needs vllm, not installed: run `make setup`"):
        runs.refuse_missing_engines(graph, ["tiny/sft", "tiny/sample_0", "tiny/rlvr"], Execution(slots=1))


def test_kernels_that_are_not_installed_are_named_for_the_stages_that_compute(monkeypatch):
    monkeypatch.setattr(runs, "find_spec", lambda name: None if name == "liger_kernel" else object())
    graph, addresses = load_recipe(RECIPES, "tiny"), ["tiny/chat", "tiny/sample_0", "tiny/sft"]
    runs.refuse_missing_engines(graph, addresses, Execution(slots=1))
    with pytest.raises(ConfigError, match=r"tiny: sft: needs liger_kernel, not installed: run `make setup`"):
        runs.refuse_missing_engines(graph, addresses, ON_A_GPU)


def test_every_engine_of_a_declaration_is_known():
    graph = load_recipe(RECIPES, "demo")
    runs.refuse_missing_engines(graph, list(graph.nodes), Execution(slots=1))
    assert {node.declaration.engine for node in graph.nodes.values()} == set(runs.ENGINES)
