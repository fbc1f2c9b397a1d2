"""Rows are traced by the parents that stages name, whatever their ids look like; earlier artifacts by their ids."""

import shutil
from dataclasses import replace

import pyarrow as pa
import pytest
from handmade import build, project_at
from test_trace import ITEM, QUESTION, TALK, holders, models, name, row

from pedigree.configs.base.problems import UsageProblem
from pedigree.configs.base.project import Project
from pedigree.configs.language.kinds import KINDS
from pedigree.configs.language.recipe import load_recipe
from pedigree.data.records import columns, parents, records
from pedigree.pipelines.lineage.row_parents import spelled_parent
from pedigree.pipelines.lineage.trace import RowQuery, trace
from pedigree.pipelines.maintain.forget import forget

pytestmark = pytest.mark.unit
RECIPE = """
description: Conversations that an added kind of stage rewrites, and prompts that become conversations.
execution: cpu
stages:
  suite: {kind: prepare_data, record: item, task: t, sources: [{type: files, path: suite.jsonl}]}
  talks: {kind: prepare_data, record: conversation, sources: [{type: files, path: talks.jsonl}]}
  loud: {kind: decontaminate, in: {data: talks, benchmarks: [suite]}}
  corpus: {kind: decontaminate, in: {data: loud, benchmarks: [suite]}}
  base: {kind: source_model, source: {type: hub, repo: lab/model, revision: REVISION}}
  sft: {kind: sft, in: {policy: base, data: [corpus]}, global_batch: 2, max_length: 8, optimizer: {learning_rate: 1e-4}}
  asked: {kind: prepare_data, record: prompt, sources: [{type: files, path: asked.jsonl}]}
  prompts: {kind: decontaminate, in: {data: asked, benchmarks: [suite]}}
  sample:
    kind: sample
    in: {policies: [base], prompts: prompts}
    sampling: {max_tokens: 4}
    samples_per_prompt: 1
    prompts: {count: 2}
  judge: {kind: judge, in: {completions: sample}}
  good: {kind: best_answers, in: {judgments: judge}, keep: best_of_n}
  mixed:
    kind: prepare_data
    in: {rows: [good]}
    record: conversation
    sources: [{type: artifact, input: good}, {type: files, path: more.jsonl}]
  checked: {kind: decontaminate, in: {data: mixed, benchmarks: [suite]}}
  imitated: {kind: sft, in: {policy: base, data: [checked]}, global_batch: 2, max_length: 8, optimizer: {learning_rate: 1e-4}}
  mine:
    kind: synthesize
    in: {prompts: prompts, writer: base}
    method: {type: self_instruct, requests: 2, shots: 2}
    by: {type: policy}
  own: {kind: decontaminate, in: {data: mine, benchmarks: [suite]}}
  taught:
    kind: rlvr
    in: {policy: base, prompts: own}
    algorithm: {type: grpo}
    steps: 1
    prompts_per_step: 1
    samples_per_prompt: 2
    sampling: {max_tokens: 4}
    max_prompt_length: 8
    optimizer: {learning_rate: 1e-5}
""".replace("REVISION", "a" * 40)
KEPT, ALONE, MIXED, LOST, OTHER = name("asked", 1), name("asked", 2), name("asked", 3), name("asked", 4), name("more", 5)
WRITTEN = name("self_instruct/instructions", 6)
ANSWER = f"{KEPT}/sft/0"
CHATS = ["faq/ranked", "faq/delta", f"{TALK}/faq", f"{TALK}/sft/0"]
"""Ids that look like those of preferences and answers, but are of rows that no stage made from others."""
ROWS = {
    "suite": [row(ITEM, "Who?")],
    "talks": [row(one, f"Say {one}.") for one in (*CHATS, TALK)],
    "loud": [row(f"LOUD {one}", f"SAY {one}.") for one in CHATS],
    "corpus": [row(f"LOUD {one}", f"SAY {one}.") for one in CHATS[1:]],
    "asked": [row(KEPT, QUESTION), row(ALONE, "1 + 1")],
    "prompts": [row(KEPT, QUESTION), row(ALONE, "1 + 1")],
    "sample": [row(ANSWER, QUESTION, prompt_id=KEPT)],
    "judge": [row(ANSWER, QUESTION, prompt_id=KEPT)],
    "good": [row(ANSWER, QUESTION)],
    "mixed": [row(MIXED, QUESTION), row(OTHER, "More?")],
    "checked": [row(f"{MIXED}-2", QUESTION), row(OTHER, "More?")],
    "mine": [row(WRITTEN, "Name a river.")],
    "own": [row(WRITTEN, "Name a river.")],
}
PARENTS = {
    "loud": [(f"LOUD {one}", [one]) for one in CHATS],
    "good": [(ANSWER, [KEPT])],
    "mixed": [(MIXED, [ANSWER]), (LOST, [ANSWER])],
    "mine": [(WRITTEN, [KEPT, name("asked", 9)])],
}
DROPS = {"mixed": [{"id": LOST, "source": "asked", "reason": "too long", "evidence": "9"}]}


def made(folder, without=()):
    """A project whose artifacts name the parents of their rows, but those of some stages."""
    project = project_at(folder)
    for path in project.recipes.glob("*.yaml"):
        path.unlink()
    (project.recipes / "lab.yaml").write_text(RECIPE)
    graph = load_recipe(project.recipes, "lab")
    for node in graph.nodes.values():
        payload = {"model.safetensors": node.name, "config.json": "{}"}
        if node.name in ROWS:
            payload = {"rows.jsonl": "".join(f"{records.canonical_json(one)}\n" for one in ROWS[node.name])}
        evidence = {"drops.jsonl": DROPS[node.name]} if node.name in DROPS else {}
        build(project, graph, replace(node, kind="shout") if node.name == "loud" else node, payload, evidence, {})
        if node.name in PARENTS and node.name not in without:
            parents.write(project.artifact(node.address) / "evidence", PARENTS[node.name])
    return project


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    return made(tmp_path_factory.mktemp("parents"))


def copied(lab, folder):
    shutil.copytree(lab.root, folder / "project")
    return Project(folder / "project")


@pytest.mark.parametrize("one", CHATS[1:])
def test_rows_of_an_added_kind_are_found_by_the_row_they_were_made_from(lab, one):
    for asked in (one, f"LOUD {one}"):
        found = trace(lab, RowQuery(id=asked))
        assert found.ids == (one,)
        assert holders(found) == {"talks": (one,), "loud": (f"LOUD {one}",), "corpus": (f"LOUD {one}",)}
        assert models(found) == {"sft": ("trained on it", "lab/talks > loud > corpus > sft", True)}
    (change,) = forget(lab, trace(lab, RowQuery(id=one))).changes
    assert (change.stage, change.filters) == ("talks", ({"type": "ids", "ids": [one]},))


def test_a_row_that_an_added_kind_passed_on_and_another_stage_left_out_reached_nothing(lab):
    found = trace(lab, RowQuery(id=CHATS[0]))
    assert set(holders(found)) == {"talks", "loud"} and not found.models
    assert not trace(lab, RowQuery(id=TALK)).models  # which the added kind left out


def test_an_added_kind_that_names_no_parents_leaves_it_uncertain_unless_it_keeps_ids(tmp_path, monkeypatch):
    project = made(tmp_path, without=["loud"])
    assert models(trace(project, RowQuery(id=TALK))) == {"sft": ("trained on it", "lab/talks > loud > corpus > sft", False)}
    monkeypatch.setitem(KINDS, "shout", replace(KINDS["decontaminate"], name="shout", subset_of=None, ids="kept"))
    assert models(trace(project, RowQuery(id=TALK))) == {}
    kept = {name for name, kind in KINDS.items() if kind.ids == "kept"}  # or named, by all versions of these kinds
    assert kept == {"shout", "select_prompts", "pair", "best_answers", "constrain", "synthesize"}


def test_ids_that_share_a_start_are_of_different_rows(lab):
    with pytest.raises(UsageProblem, match="'faq/' is a prefix of 2 ids: faq/delta, faq/ranked"):
        trace(lab, RowQuery(id="faq/"))


def test_a_row_is_followed_into_a_stage_that_gives_it_another_id(lab):
    for asked in (KEPT, MIXED, LOST, ANSWER):
        found = trace(lab, RowQuery(id=asked))
        assert found.ids == (KEPT,) and found.sources() == [("lab/asked", "asked")]
        assert holders(found)["mixed"] == (MIXED,) and holders(found)["checked"] == (f"{MIXED}-2",)
        way = "lab/asked > prompts > sample > judge > good > mixed > checked > imitated"
        assert models(found)["imitated"] == ("trained on it", way, True)
        assert [(drop.address, drop.id) for drop in found.dropped] == [("lab/mixed", LOST)]
    (change,) = forget(lab, trace(lab, RowQuery(id=MIXED))).changes
    assert (change.stage, change.filters) == ("asked", ({"type": "ids", "ids": [KEPT]},))  # not the stage that gave the other id
    (change,) = forget(lab, trace(lab, RowQuery(id=OTHER))).changes
    assert (change.stage, change.filters) == ("mixed", ({"type": "ids", "ids": [OTHER]},))


def test_what_was_written_after_several_rows_goes_back_to_each_of_them_and_to_no_other(lab):
    assert models(trace(lab, RowQuery(id=KEPT)))["taught"] == ("goes back to it", "lab/asked > prompts > mine > own > taught", True)
    assert models(trace(lab, RowQuery(id=ALONE))) == {}
    written = trace(lab, RowQuery(id=WRITTEN))
    assert written.ids == (WRITTEN,) and models(written) == {"taught": ("trained on it", "lab/mine > own > taught", True)}


def test_earlier_artifacts_are_read_by_their_ids(tmp_path):
    project = made(tmp_path, without=["good", "mixed", "mine"])
    found = trace(project, RowQuery(id=ANSWER))
    assert found.ids == (KEPT,) and holders(found)["good"] == (ANSWER,) and "mixed" not in holders(found)
    assert [certain for *_, certain in models(found).values()] == [False, True]  # by another id; written after some of all examples
    assert models(trace(project, RowQuery(id=ALONE)))["taught"][0] == "goes back to it"


def test_an_earlier_id_is_read_through_all_its_parts():
    earlier = f"a/b-{3:016x}"
    for made in ("constrained", "constrained/constrained", "constrained/relaxed", "constrained/sft/0", "best_vs_worst", "all_pairs/3"):
        assert spelled_parent(f"{earlier}-2/{made}") == earlier


def test_parents_that_an_earlier_artifact_named_are_followed_by_later_ones(tmp_path):
    found = trace(made(tmp_path, without=["good"]), RowQuery(id=KEPT))
    assert models(found)["imitated"][2] and holders(found)["checked"] == (f"{MIXED}-2",)


def test_where_the_stage_that_named_parents_is_gone_ids_are_read(lab, tmp_path):
    project = copied(lab, tmp_path)
    shutil.rmtree(project.artifact("lab/good"))
    found = trace(project, RowQuery(id=KEPT))
    assert holders(found)["mixed"] == (MIXED,) and models(found)["imitated"][0] == "trained on it"


DAMAGED = {
    "no file of rows": None,
    "other columns": pa.table({"id": [MIXED], "parents": [3]}),
    "no parent": pa.table([[MIXED], [[None]]], columns.schema_of(parents.Parents)),
    "no text": pa.table(
        [pa.array([b"\xff"]).view(pa.string()), pa.array([[ANSWER]], columns.schema_of(parents.Parents).field("parents").type)],
        columns.schema_of(parents.Parents),
    ),
}


@pytest.mark.parametrize("damaged", DAMAGED.values(), ids=DAMAGED)
def test_damaged_parents_hide_no_other_artifact_and_leave_it_uncertain(lab, tmp_path, damaged):
    project = copied(lab, tmp_path)
    file = project.artifact("lab/mixed") / "evidence" / parents.FILE
    if damaged is None:
        file.write_bytes(b"PAR1")
    else:
        columns.write(file, damaged, [0])
    found = trace(project, RowQuery(id=KEPT))
    assert holders(found)["good"] == (ANSWER,) and "parents.parquet" in found.not_looked_in["lab/mixed"]
    assert models(found)["imitated"][0] == "trained on it" and not models(found)["imitated"][2]
