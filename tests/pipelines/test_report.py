"""The report of a recipe, on artifacts written by hand."""

import html
import re
import shutil
from html.parser import HTMLParser
from types import SimpleNamespace
from typing import Any

import pytest
from handmade import CONTENT, build, made_at, project_at

from pedigree.configs.language.recipe import load_recipe
from pedigree.data.artifacts.artifacts import open_artifact
from pedigree.pipelines.cli import running
from pedigree.pipelines.cli.run_results import run_result
from pedigree.pipelines.publish.commits import message
from pedigree.pipelines.publish.report import SECTIONS, _prompt, _said, gather, idle_shares, slow_rank, tables, write_report
from pedigree.pipelines.publish.shown_stages import scores_of
from pedigree.pipelines.run.ensure import Result
from pedigree.pipelines.run.runs import NotRun, current_among


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return made_at(tmp_path_factory.mktemp("report"))


@pytest.fixture(scope="module")
def page(made) -> str:
    return write_report(*made).read_text()


class Outline(HTMLParser):
    """Tags that are open, ids, and links out of the page."""

    VOID = frozenset({"meta", "br", "img", "link", "input"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.targets: list[str] = []
        self.wrong: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        if tag not in self.VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name in ("href", "src"):
                self.targets.append(value or "")

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)


def test_the_page_is_well_formed_and_every_link_stays_inside(made, page):
    outline = Outline(page)
    assert not outline.wrong and not outline.open
    assert [target.removeprefix("#") for target in outline.targets] == [id for id, _ in SECTIONS]
    assert set(outline.ids) >= {id for id, _ in SECTIONS}
    assert write_report(*made).read_text() == page, "the same artifacts gave another page"


def test_looks_at_unseen_suites_are_counted(page):
    assert page.count('<span class="tag">unseen</span>') == 1 and "This recipe evaluates on unseen_suite 1 time, counting" in page


def test_nothing_is_loaded_nothing_runs_and_there_is_a_dark_page(page):
    assert "<script" not in page and "@import" not in page and "url(" not in page
    assert not re.search(r"https?://", page) and "prefers-color-scheme: dark" in page


def test_every_stage_stands_in_graph_and_lineage(made, page):
    for node in made[1].nodes.values():
        assert page.count(f">{node.name}<") >= 2, node.name


def test_scores_have_intervals_and_paired_differences(page):
    assert "0.100 <span" in page and "[0.050, 0.200]" in page
    assert "sft − base" in page and "+0.150" in page


def test_samples_show_losses_and_ties_too_and_are_escaped(page):
    assert "What is 0 + 4? &lt;b&gt;&amp;" in page and "<b>" not in page
    assert "✗" in page and "✓" in page


def test_conversations_are_shown_from_the_turn_in_which_they_differ():
    asked, said = {"role": "user", "content": "Guess."}, {"role": "user", "content": "No."}
    rows = [{"messages": [asked, {"role": "assistant", "content": text}, said], "text": "7"} for text in ("4", "5")]
    assert _prompt(rows) == "Guess." and _said(rows[1], rows) == "assistant: 5\nuser: No.\n7"


def test_data_contamination_and_validation_are_told(page):
    assert (
        "3 exact_duplicates" in page and "1 too odd" in page and "(2 with same_role: join)" in page and "<td>31 / 907 / 1,234</td>" in page
    )
    assert "2 of 24 rows removed; 2 of 2 planted leaks found" in page and "&lt;i&gt;what is" in page
    assert page.count(">passed<") == 4  # the four data sets of `tiny`


def test_policies_that_were_judged_are_shown_against_each_other(page):
    text = " ".join(page.split())
    assert "judge_0: pairwise win rates" in text and "<th>against &lt;i&gt;base</th>" in text
    assert "<td>0.750 [0.650, 0.850] of 40</td>" in text and "<td>0.250 [0.150, 0.350] of 40</td>" in text


def test_what_a_recipe_expects_is_told_with_rows_that_are_not_so(tmp_path):
    project = project_at(tmp_path)
    graph = load_recipe(project.recipes, "tiny")
    told = {"expectation": "expect_column_values_to_not_match_regex", "column": "answer", "arguments": {"regex": "<b>"}, "severity": "warn"}
    found = {"success": False, "rows": 100, "of": 1450, "nulls": 0, "unexpected": 9}
    rows = [{"id": f"chat-{n}", "place": f"chat.jsonl:{n}", "value": f"<b>{n}"} for n in range(10, 19)]
    plain = {"expectation": "expect_column_values_to_be_unique", "column": "id", "success": True}
    mean = {"expectation": "expect_column_mean_to_be_between", "column": "turns", "success": True, "observed": 2.5, "rows": 1450}
    mean |= {"arguments": {"min_value": 2}, "severity": "fail"}
    verdict = {"suite": "conversation", "success": True, "rows": 1450, "expectations": [plain, mean, told | found]}
    evidence = {"validation.json": verdict | {"expectations": [plain, mean, told | found | {"examples": rows}]}}
    build(project, graph, graph.find("arithmetic_suite"), {"rows.jsonl": "{}\n"}, evidence, {"rows": 1450, "validation": verdict})
    text = write_report(project, graph).read_text()
    assert "passed, with warnings" in text and "Recipe expectations for arithmetic_suite" in text
    assert "column_values_to_not_match_regex(answer, regex &#34;&lt;b&gt;&#34;)" in text
    assert "9 rows unexpected (9 % of 100), in a sample of 100 of 1,450 rows" in text and "2.5 observed" in text
    assert text.count("chat.jsonl:") == 5 and "chat.jsonl:10: <code>&lt;b&gt;10" in text
    assert not Outline(text).wrong and text.count(">met<") == 1


def test_wall_time_numerics_and_environment(page):
    assert "2m 05s" in page and "cpu, 2 threads" in page and "2.13.0" in page and "0123456789ab" in page


def test_what_users_of_a_result_should_know_stands_in_its_line(tmp_path):
    """A replaced template, rows that were dropped: whatever a job noted, escaped."""
    project = project_at(tmp_path)
    graph = load_recipe(project.recipes, "tiny")
    marks = ("the model's own chat template was replaced by chatml", "75 of 300 rows were dropped (longer than max_length 8)", "<b>x</b>")
    node = next(node for node in graph.nodes.values() if not node.edges)
    build(project, graph, node, *CONTENT[node.kind](node, 0), marks=marks)
    page = write_report(project, graph).read_text()
    told = [html.unescape(text) for text in re.findall(r'class="text warning">(.*?)</td>', page)]
    assert [text for text in told if text in marks] == list(marks) and "<b>x</b>" not in page


def test_what_is_missing_is_said(tmp_path):
    project = project_at(tmp_path)
    graph = load_recipe(project.recipes, "tiny")
    suite = graph.find("arithmetic_suite")
    build(project, graph, suite, {"rows.jsonl": "{}\n"}, {}, {"rows": 1})
    text = write_report(project, graph).read_text()
    for words in ("not built yet", "No evaluation has run yet", "No sampled answers are available: no evaluation has run", "not recorded"):
        assert words in text, words
    assert f"{len(graph.nodes) - 1} of {len(graph.nodes)} stages have no artifact" in text


def test_a_damaged_artifact_shows_its_problem_and_no_number(made, tmp_path):
    project = project_at(tmp_path / "damaged")
    shutil.copytree(made[0].artifacts, project.artifacts)
    (project.artifact("tiny/sft") / "payload" / "model.safetensors").write_text("other weights")
    found = {stage.shown: stage for stage in gather(project, made[1]).stages}
    assert found["sft"].artifact is None and "bytes instead of" in found["sft"].problem
    text = write_report(project, made[1]).read_text()
    assert "bytes instead of" in text and str(project.root) not in text


def test_a_curve_that_leads_out_of_its_artifact_is_not_read(tmp_path):
    (tmp_path / "outside.csv").write_text("step,secret_column\n1,2\n2,3\n")
    project, graph = made_at(tmp_path / "project")
    curve = project.artifact("tiny/sft") / "evidence" / "curve.csv"
    curve.unlink()
    curve.symlink_to(tmp_path / "outside.csv")
    text = write_report(project, graph).read_text()
    assert "secret column" not in text and "sft: its metrics or evidence cannot be shown" in text


def test_scores_and_tables_for_other_displays(made):
    project, graph = made
    assert list(scores_of(project, graph)) == ["scores", "unseen"]
    rows = tables(project, graph, graph.find("scores"))["scores"]
    assert rows[0] == {"policy": "base", "task": "arithmetic", "n": 40, "mean": 0.1, "low": 0.05, "high": 0.2}
    assert tables(project, graph, graph.find("chat"))["contamination"][0]["rows removed"] == 2
    assert tables(project, graph, graph.find("sft")) == {}


def test_scores_of_an_earlier_version_are_no_result_of_a_run(made, capsys):
    """`sft` was trained anew and `dpo_1` failed: the artifact of the evaluation is still that of the models before."""
    project, graph = made
    ends = [Result("tiny/sft", "ran", 1.0), NotRun("tiny/scores", "tiny/dpo_1 failed"), Result("tiny/unseen", "unchanged", 0.1)]
    run: Any = SimpleNamespace(project=project, graph=graph, ledger=SimpleNamespace(record=open_record(project), notices=()))
    running._print_scores(run, current_among(ends))
    printed = capsys.readouterr().out
    assert printed.index("\nunseen\n") < printed.index("\nscores: not measured in this run") and "\nscores\n" not in printed
    assert list(run_result(run, ends, 1.0, None).scores) == ["unseen"] and run_result(run, None, 1.0, None).scores == {}
    mark = "scores: not measured in the last run; the scores below may be of an earlier version"
    assert mark in write_report(project, graph, current_among(ends)).read_text()
    assert "not measured in the last run" not in write_report(project, graph, graph.nodes).read_text()
    assert "best of scores" not in message(project, graph, {"tiny/sft", "tiny/unseen"})


def open_record(project):
    return lambda address: open_artifact(project.artifact(address)).record


def test_idle_shares_of_rlvr_are_means_over_its_steps():
    assert idle_shares({"trainer_idle": [0.5, 0.25, None], "sampler_idle": [0.1]}) == ", trainer idle 38% and sampler idle 10% of a step"
    assert idle_shares({"loss": [1.0]}) == ""


def test_the_slowest_rank_of_a_training_is_the_most_frequent_one_since_its_ranks_have_their_hosts():
    """Steps 1 and 2 ran on other hosts; the mean of the others is (1.2 + 1.4 + 1.3) / 3."""
    ranks = {"after_step": 2, "hosts": ["node-1", "node-1", "node-7"]}
    slowdown, slowest = [None, 2.0, None, 1.2, 1.4, 1.3], [None, 0.0, None, 2.0, 1.0, 2.0]
    columns = {"step": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], "slowdown": slowdown, "slowest_rank": slowest}
    assert slow_rank(columns, ranks) == ", slowest rank 1.30 times the mean, in 67% of steps rank 2 on node-7"
    assert slow_rank(columns, {**ranks, "after_step": 6}) == slow_rank({"step": [1.0], "loss": [1.0]}, {}) == ""
