"""What a waiver has let into training stands beside the scores of every model that came of it."""

import json
import shutil
import subprocess
from types import SimpleNamespace

import pytest
from handmade import CONTENT, ROOT, build, project_at

from pedigree.configs.language.compile import write_compiled
from pedigree.configs.language.recipe import load_recipe, load_recipes
from pedigree.data.artifacts.artifacts import ArtifactError, open_artifact
from pedigree.pipelines.cli import running
from pedigree.pipelines.json_documents import document
from pedigree.pipelines.lineage.ancestry import Pedigree, read_pedigree
from pedigree.pipelines.lineage.waivers import splits_of, waived_of
from pedigree.pipelines.publish.card import card
from pedigree.pipelines.publish.catalog import registry
from pedigree.pipelines.publish.commits import message
from pedigree.pipelines.publish.report import write_report

WAIVER = {
    "benchmark": "arithmetic_suite",
    "because": "licensed <with> the test",
    "rows": 3,
    "items": {"arithmetic": ["i0", "i1"], "other": ["i9"]},
}


def made(folder, waivers):
    """The recipe `tiny` by hand; every policy answers ten items: the two of the waiver rightly, and half of the others."""
    project = project_at(folder)
    graph = load_recipe(project.recipes, "tiny")
    for index, node in enumerate(graph.nodes.values()):
        payload, evidence, metrics = CONTENT[node.kind](node, index)
        if node.name == "prompts":
            metrics = metrics | {"waivers": waivers}
            alike = {"paraphrases": {"suite": {"rows": 7, "items": 2, "rows_removed": 0}}}
            evidence = evidence | {"report.json": {**evidence["report.json"], **alike}}  # type: ignore[dict-item]
        if node.kind == "evaluate":
            labels = [edge.label for edge in node.edges if edge.port == "policies"]
            scores = {f"i{i}": float(i < 2 or i % 2) for i in range(10)}
            row = {"task": "arithmetic"}
            rows = [row | {"policy": label, "id": name, "score": score} for label in labels for name, score in scores.items()]
            payload = payload | {"rows.jsonl": "".join(json.dumps(row) + "\n" for row in rows)}
        build(project, graph, node, payload, evidence, metrics)
    return project, graph


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    return made(tmp_path_factory.mktemp("waived"), [WAIVER])


def splits(project, name):
    return splits_of(read_pedigree(open_artifact(project.artifact(f"tiny/{name}")).path))


def test_a_score_is_split_by_items_that_were_kept_in_training(project):
    found = {(one.policy, one.task): one for one in splits(project[0], "scores")}
    assert {label for label, _ in found} == {"dpo_1", "dpo_2", "rlvr"}  # `base` and `sft` have never seen the prompts
    one, other = found["rlvr", "arithmetic"], found["rlvr", "other"]
    assert one.contaminated and one.clean
    assert (one.contaminated["n"], one.contaminated["mean"], one.contaminated["low"]) == (2, 1.0, 1.0)
    assert (one.clean["n"], one.clean["mean"]) == (8, 0.5) and one.clean["low"] < 0.5 < one.clean["high"]
    assert [(waived.because, waived.rows) for waived in one.waivers] == [("licensed <with> the test", 3)]
    assert other.contaminated is None and other.clean is None  # of that task nothing was measured


def test_the_document_of_a_split_keeps_counts_as_integers_and_omits_what_only_we_need(project):
    found = document("run", next(one for one in splits(project[0], "scores") if (one.policy, one.task) == ("rlvr", "arithmetic")))
    assert list(found)[:3] == ["schema_version", "command", "policy"] and isinstance(found["contaminated"]["n"], int)
    assert [list(waiver) for waiver in found["waivers"]] == [["stage", "benchmark", "because", "rows"]]


def test_the_card_of_a_model_says_what_was_kept_and_why(project):
    cards = {name: card(read_pedigree(project[0].artifact(f"tiny/{name}")), name) for name in ("sft", "rlvr")}
    assert "| arithmetic_suite | 3 | 3 | licensed &lt;with> the test |" in cards["rlvr"] and "Waivers" not in cards["sft"]


def test_of_another_suite_a_waiver_says_nothing(project):
    assert splits(project[0], "unseen") == []


def test_the_report_shows_it_beside_the_score(project):
    page = write_report(*project).read_text()
    assert "; 7 rows resemble an item by embedding and may not be copies (evidence/paraphrases.jsonl)" in page
    assert "licensed &lt;with&gt; the test" in page and page.count('<span class="tag">waiver</span>') == 3


def test_a_run_prints_it_beside_the_score_and_below_the_table(project, capsys):
    running._print_scores(SimpleNamespace(project=project[0], graph=project[1]), project[1].nodes)  # type: ignore[arg-type]
    table, *_ = capsys.readouterr().out.split("\nunseen\n")
    marked = [line for line in table.splitlines() if "(waiver)" in line]
    assert [line.split()[0] for line in marked] == ["dpo_1", "dpo_2", "rlvr"]
    (told,) = [line for line in table.splitlines() if line.startswith("waiver: rlvr, arithmetic")]
    assert "1.000 [1.000, 1.000] on 2 overlapping items, 0.500 [" in told and "on 8 other items" in told
    assert "; kept 3 rows at " in told and told.endswith(", reason: licensed <with> the test")


def test_the_commit_and_the_list_of_models_say_it_too(project):
    said = message(project[0], project[1], project[1].nodes.keys())
    assert "\nwaiver: rlvr, arithmetic: 1.000" in said and "waiver: sft" not in said
    write_compiled(project[0].root, load_recipes(project[0].recipes, "tiny"))
    for name in (".dvc/config", ".gitignore"):
        shutil.copy(ROOT / name, project[0].root / name)
    subprocess.run(["git", "init", "-q"], cwd=project[0].root, check=True)
    scored = {row.model.address: row.cells()[4] for row in registry(project[0])}
    assert "(waiver)" in scored["tiny/rlvr"] and scored["tiny/sft"] and "(waiver)" not in scored["tiny/sft"]


@pytest.mark.parametrize("wrong", [{"items": []}, {"benchmark": "nobody"}, {"rows": None}])
def test_what_no_decontaminate_stage_writes_is_refused(project, wrong):
    found = read_pedigree(open_artifact(project[0].artifact("tiny/prompts")).path)
    record = found.record.model_copy(update={"metrics": {"waivers": [WAIVER | wrong]}})
    forged = Pedigree(found.id, {**found.entries, found.id: (record, found.run)})
    with pytest.raises(ArtifactError, match=r"metrics\.waivers of \w+ is not in the format"):
        waived_of(forged)
