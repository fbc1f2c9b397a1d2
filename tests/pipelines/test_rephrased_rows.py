"""Rows that a language model took for benchmark items: what is said of them afterwards."""

import json

import pytest
from handmade import CONTENT, build, project_at

from pedigree.configs.language.recipe import load_recipe
from pedigree.pipelines.lineage.ancestry import read_pedigree
from pedigree.pipelines.lineage.trace import RowQuery, trace
from pedigree.pipelines.lineage.waivers import waived_of
from pedigree.pipelines.maintain.forget import forget
from pedigree.pipelines.publish.card import card
from pedigree.pipelines.publish.report import gather, tables, write_report
from pedigree.pipelines.rehearsal.judge import answer
from pedigree.pipelines.rehearsal.proof import proof_of
from pedigree.stages.find_rephrased.run import parse_same, same_task_question

RECIPE = """
description: Rows that a language model compares with a suite.
execution: cpu
stages:
  suite: {kind: prepare_data, record: item, task: t, sources: [{type: files, path: suite.jsonl}]}
  talks: {kind: prepare_data, record: conversation, sources: [{type: files, path: talks.jsonl}]}
  corpus: {kind: decontaminate, in: {data: talks, benchmarks: [suite]}}
  clean:
    kind: find_rephrased
    in: {data: corpus, benchmarks: [suite]}
    by: {type: endpoint, base_url: "https://judge.example/v1", model: m}
    waivers: [{benchmark: suite, items: [suite-00000000000000b7], because: "shared <on purpose>"}]
  again: {kind: prepare_data, in: {rows: [clean]}, record: conversation, sources: [{type: artifact, input: clean}]}
  base: {kind: source_model, source: {type: hub, repo: lab/model, revision: REVISION}}
  sft: {kind: sft, in: {policy: base, data: [again]}, global_batch: 2, max_length: 8, optimizer: {learning_rate: 1e-4}}
""".replace("REVISION", "a" * 40)
ITEM, GONE, KEPT = f"suite-{0xB6:016x}", f"talks-{0xA1:016x}", f"talks-{0xA2:016x}"


def line(row, item, verdict):
    return {"id": row, "source": "talks", "benchmark": "suite", "task": "t", "item": item, "score": 0.7312,
            "matched": "Which <gas>?", "pass": "rephrased", "verdict": verdict}  # fmt: skip


WAIVED = {"benchmark": "suite", "because": "shared <on purpose>", "rows": 1, "items": {"t": [f"suite-{0xB7:016x}"]}}
METRICS = {
    "rows": 1, "removed": 1, "turns": ["user"], "pairs": 7, "questions": 5, "rows_unanswered": 2, "waivers": [WAIVED],
    "unanswered": {"no reply": 1, "no line states a verdict": 1},
    "benchmarks": {"suite": {"items": 2, "items_overlapped": 2, "share_overlapped": 1.0, "rows_removed": 1, "items_waived": 1,
                             "pairs": 7, "unanswered": 2}},
}  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    project = project_at(tmp_path_factory.mktemp("rephrased"))
    (project.recipes / "lab.yaml").write_text(RECIPE)
    graph = load_recipe(project.recipes, "lab")
    said = [{"role": "user", "content": "Which gas?"}]
    rows = {"suite": [ITEM], "talks": [GONE, KEPT], "corpus": [GONE, KEPT], "clean": [KEPT], "again": [KEPT]}
    manifest = [line(GONE, ITEM, "removed"), line(KEPT, f"suite-{0xB7:016x}", "waived")]
    for index, node in enumerate(graph.nodes.values()):
        payload, evidence, metrics = CONTENT[node.kind](node, index)
        if node.name in rows:
            payload = {"rows.jsonl": "".join(json.dumps({"id": name, "messages": said}) + "\n" for name in rows[node.name])}
            evidence = {}
        if node.name == "clean":
            evidence, metrics = {"manifest.jsonl": manifest, "report.json": {"read": 2, **METRICS}}, METRICS
        build(project, graph, node, payload, evidence, metrics)
    return project, graph


def test_a_trace_says_for_which_item_a_row_went_and_who_said_so(made):
    mine = trace(made[0], RowQuery(id=GONE))
    (drop,) = mine.dropped
    assert (drop.address, drop.reason, drop.by) == ("lab/clean", "overlap", "")
    assert drop.detail == f"judged by a language model as a rephrasing (cosine 0.7312) of item {ITEM} of suite"
    assert not mine.models
    assert [(one.id, one.by) for one in trace(made[0], RowQuery(id=ITEM)).dropped] == [(GONE, ITEM)]


def test_rows_keep_their_ids_on_the_way_to_a_model_and_what_it_takes_to_forget_one_has_all_of_it(made):
    kept = trace(made[0], RowQuery(id=KEPT))
    (model,) = kept.models
    assert (model.way, model.certain) == (("lab/talks", "lab/corpus", "lab/clean", "lab/again", "lab/sft"), True) and not kept.dropped
    again = {one.address: one.part for one in forget(made[0], kept).again}
    assert again["lab/clean"] == "data" and again["lab/sft"] == "models"


def test_the_report_tells_it_beside_what_shared_text(made):
    page = write_report(*made).read_text()
    assert "1 of 2 rows removed; a judge compared 7 row-item pairs in 5 questions, 2 of them without a verdict" in page
    assert "Which &lt;gas&gt;?" in page and "73%" in page
    (row,) = tables(*made, made[1].find("clean"))["contamination"]
    assert ("training rows after decontamination", "1") in gather(*made).facts  # what `corpus` kept has been read again
    assert (row["items overlapped"], row["rows removed"], row["items waived"]) == (2, 1, 1)


def test_the_card_of_a_model_names_what_was_waived(made):
    pedigree = read_pedigree(made[0].artifact("lab/sft"))
    (waived,) = waived_of(pedigree)
    assert (waived.rows, waived.items) == (1, {("t", f"suite-{0xB7:016x}")})
    assert "| suite | 1 | 1 | shared &lt;on purpose> |" in card(pedigree, "sft")


def test_a_rehearsal_has_a_verdict_on_every_question_and_tells_what_went(made):
    said = answer(same_task_question("Which gas do plants take up?", "What do plants breathe?"))
    assert parse_same(said) is False
    found = {one["stage"]: one for one in proof_of(*made, [])["decontamination"]}
    assert (found["clean"]["rows"], found["clean"]["by"]) == (1, {"suite": 1}) and "corpus" in found
