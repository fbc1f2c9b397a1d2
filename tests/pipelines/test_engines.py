from pathlib import Path

import pytest

from configs.document import ConfigError
from configs.recipe import load_recipe
from pipelines import runs

RECIPES = Path(__file__).parents[2] / "configs" / "recipes"


def test_an_engine_that_is_not_installed_is_named_before_anything_runs(monkeypatch):
    monkeypatch.setattr(runs, "find_spec", lambda name: None if name == "vllm" else object())
    graph = load_recipe(RECIPES, "tiny")
    runs.refuse_missing_engines(graph, ["tiny/chat", "tiny/sft"])
    with pytest.raises(ConfigError, match=r"sample_0, rlvr: needs vllm, not installed: run `make setup`"):
        runs.refuse_missing_engines(graph, ["tiny/sft", "tiny/sample_0", "tiny/rlvr"])


def test_every_engine_of_a_declaration_is_known():
    graph = load_recipe(RECIPES, "demo")
    runs.refuse_missing_engines(graph, list(graph.nodes))
    assert {node.declaration.engine for node in graph.nodes.values()} == set(runs.ENGINES)
