"""Names, ancestors and descendants in the graph of a recipe."""

import pytest

from pedigree.configs.base.problems import UsageProblem
from pedigree.configs.language.graph import Graph
from pedigree.configs.language.recipe import load_recipe


@pytest.fixture(scope="module")
def tiny(request) -> Graph:
    return load_recipe(request.config.rootpath / "configs" / "recipes", "tiny")


def test_parents_come_before_children_and_children_are_their_reverse(tiny):
    seen: set[str] = set()
    for node in tiny.nodes.values():
        assert set(node.parents) <= seen
        seen.add(node.address)
    edges = {(parent, node.address) for node in tiny.nodes.values() for parent in node.parents}
    assert {(parent, child) for parent, children in tiny.children.items() for child in children} == edges


def test_ancestors_and_descendants_include_the_stage_itself(tiny):
    assert tiny.ancestors(["tiny/base"]) == {"tiny/base", "tiny/chat", "tiny/chat_raw", "tiny/arithmetic_suite", "tiny/unseen_suite"}
    assert tiny.descendants(["tiny/scores"]) == {"tiny/scores", "tiny/best", "tiny/unseen"}


def test_a_stage_is_found_by_name_and_by_address(tiny):
    assert tiny.find("sft") is tiny.find("tiny/sft")
    with pytest.raises(UsageProblem, match="no stage 'stf': it has arithmetic_suite, "):
        tiny.find("stf")
