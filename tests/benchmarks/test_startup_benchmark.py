"""What the benchmark of starts and orchestration makes of the moments that it sees."""

import pytest

from benchmarks import report, startup, table
from benchmarks.report import Reading
from pedigree.configs.language.recipe import load_recipe


def test_a_start_is_cut_into_its_parts():
    moments = {"imported": 102.5, "engine begun": 103.0, "engine made": 104.25, "ready": 105.0}
    assert startup.parts(100.0, moments) == {"all": 5.0, "imports": 2.5, "engine": 1.25, "rest": 1.25}


def test_orchestration_is_what_is_left_between_two_ends_without_the_job():
    """a ends at 3; b, begun at once, ends at 6, its job lived from 3.5 to 5: 1.5 s; c ends at 8, its job from 6.25 to 7.5: 0.75 s."""
    events = [
        (0.0, "checking", "x/a"), (0.5, "job started", "x/a"), (2.0, "job ended", "x/a"), (3.0, "ran", "x/a"),
        (3.0, "checking", "x/b"), (3.5, "job started", "x/b"), (5.0, "job ended", "x/b"), (6.0, "ran", "x/b"),
        (6.25, "job started", "x/c"), (7.5, "job ended", "x/c"), (8.0, "ran", "x/c"),
    ]  # fmt: skip
    assert startup.per_stage(events) == pytest.approx([1.5, 0.75])


def test_the_chain_is_a_recipe_in_which_each_stage_needs_the_one_before(tmp_path):
    (tmp_path / "chain.yaml").write_text(startup.chain(5))
    graph = load_recipe(tmp_path, "chain")
    assert list(graph.nodes) == ["chain/suite", *(f"chain/link_{number}" for number in range(1, 5))]
    for before, node in zip(graph.nodes, list(graph.nodes.values())[1:], strict=False):
        assert before in node.parents


def test_the_page_says_what_a_reading_is_made_of(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    monkeypatch.setattr(table, "RESULTS", tmp_path)
    reading = Reading("start", [4.0] * 3, [6.0, 5.0, 7.0], "s", higher_is_better=False, goal=1.0, notes={"text": "imports 3.0 s"})
    report.write("startup", [reading], ("torch",), {"load_before": 0.5, "stolen": 0.01})
    page = table.page()
    assert "| start | 4 [4, 4] | 6 [5, 7] | s | **1.50** [1.25, 1.75] | 1 |" in page
    assert "- start: imports 3.0 s; load 0.5 before, 1.0% given to others." in page
