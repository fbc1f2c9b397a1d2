"""A row is found wherever it went, by what the artifacts hold and their records say; what is not known is not said."""

import json
import shutil

import pytest
import yaml
from handmade import RUN, build, in_lines, made_of, project_at
from typer.testing import CliRunner

from pedigree.configs.base.problems import UsageProblem
from pedigree.configs.base.project import Project
from pedigree.configs.language.recipe import load_recipe
from pedigree.data.artifacts.artifacts import open_artifact
from pedigree.pipelines.cli.main import app
from pedigree.pipelines.cli.rows import _way
from pedigree.pipelines.lineage.trace import ItemScore, RowQuery, trace

RECIPE = """
description: Prompts on their way into a policy.
execution: cpu
stages:
  suite: {kind: prepare_data, record: item, task: t, sources: [{type: files, path: suite.jsonl}]}
  raw:
    kind: prepare_data
    record: prompt
    sources: [{type: files, path: asked.jsonl, licence: odc-by}, {type: arithmetic, operations: [add], digits: [1], count: 3, seed: 2}]
    filters: [{type: exact_duplicates}]
  prompts: {kind: decontaminate, in: {data: raw, benchmarks: [suite]}}
  talks: {kind: prepare_data, record: conversation, sources: [{type: files, path: talks.jsonl, generator: gpt-4o}]}
  corpus: {kind: decontaminate, in: {data: talks, benchmarks: [suite]}}
  base: {kind: source_model, source: {type: hub, repo: lab/model, revision: REVISION}}
  sft: {kind: sft, in: {policy: base, data: [corpus]}, global_batch: 2, max_length: 8, optimizer: {learning_rate: 1e-4}}
  sample:
    kind: sample
    in: {policies: [sft, base], prompts: prompts}
    sampling: {max_tokens: 4}
    samples_per_prompt: 1
    prompts: {count: 2}
  judge: {kind: judge, in: {completions: sample}}
  pair: {kind: pair, in: {judgments: judge}}
  good: {kind: best_answers, in: {judgments: judge}, keep: best_of_n}
  mixed: {kind: prepare_data, in: {rows: [good]}, record: conversation, sources: [{type: artifact, input: good}]}
  checked: {kind: decontaminate, in: {data: mixed, benchmarks: [suite]}}
  imitated: {kind: sft, in: {policy: base, data: [checked]}, global_batch: 2, max_length: 8, optimizer: {learning_rate: 1e-4}}
  mine:
    kind: synthesize
    in: {prompts: prompts, writer: sft}
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
  dpo:
    kind: preference_train
    in: {policy: base, preferences: [pair]}
    loss: {type: dpo, beta: 0.1}
    global_batch: 2
    max_length: 8
    optimizer: {learning_rate: 1e-4}
  scores: {kind: evaluate, in: {policies: [base, dpo], suites: [suite]}, sampling: {max_tokens: 4}}
  best: {kind: select, in: {candidates: [sft, dpo], scores: scores}}
""".replace("REVISION", "a" * 40)


def name(source, number):
    return f"{source}-{number:016x}"


ITEM, KEPT, LEAKED, TWIN, ALONE, TALK = (
    name("suite", 1), name("asked", 2), name("asked", 3), name("asked", 4), name("arithmetic", 5), name("talks", 6),
)  # fmt: skip
QUESTION = "How many rivers flow into the Aral Sea?"


def row(identifier, question, **more):
    return {"id": identifier, "messages": [{"role": "user", "content": question}], **more}


def answers(weights):
    return [
        row(f"{prompt}/{label}/0", text, prompt_id=prompt, policy=label, policy_content=weights[label], text="Two.")
        for label in ("sft", "base")
        for prompt, text in ((KEPT, QUESTION), (ALONE, "1 + 1"))
    ]


ROWS = {
    "suite": [row(ITEM, "What is the capital of Chad?")],
    "raw": [row(KEPT, QUESTION), row(f"{KEPT}-2", QUESTION), row(LEAKED, "The capital of Chad?"), row(ALONE, "1 + 1")],
    "prompts": [row(KEPT, QUESTION), row(f"{KEPT}-2", QUESTION), row(ALONE, "1 + 1")],
    "talks": [row(TALK, "Say it."), row(name("talks", 8), "Say no more.")],
    "corpus": [row(TALK, "Say it.")],
    "pair": [row(f"{KEPT}/best_vs_worst", QUESTION, answers=[{"text": "Two."}, {"text": "None."}])],
    "good": [row(f"{KEPT}/sft/0", QUESTION)],
    "mine": [row(name("self_instruct/instructions", 11), "Name a river in Peru.")],
    "own": [row(name("self_instruct/instructions", 11), "Name a river in Peru.")],
    "checked": [row(name("mixed", 9), "An answer, and its question.")],
    "mixed": [row(name("mixed", 9), "An answer, and its question.")],
    "scores": [{"id": ITEM, "task": "t", "policy": "base", "score": 0.0}, {"id": ITEM, "task": "t", "policy": "dpo", "score": 1.0}],
}
EVIDENCE = {
    "raw": {
        "drops.jsonl": [
            {"id": TWIN, "source": "asked", "reason": "exact_duplicates", "evidence": f"same text as {KEPT}", "text": QUESTION.upper()}
        ],
        "bad_rows.jsonl": [{"source": "asked", "place": "asked.jsonl:9", "reason": "no answer", "text": '{"q": "Name each lake in Mali"}'}],
    },
    "prompts": {
        "manifest.jsonl": [
            {"id": LEAKED, "source": "asked", "benchmark": "suite", "task": "t", "item": ITEM, "score": 0.83, "verdict": "removed"},
            {"id": KEPT, "source": "asked", "benchmark": "suite", "task": "t", "item": ITEM, "score": 0.3, "verdict": "short item"},
        ]
    },
}


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    project = project_at(tmp_path_factory.mktemp("trace"))
    for path in project.recipes.glob("*.yaml"):
        path.unlink()
    (project.recipes / "lab.yaml").write_text(RECIPE)
    graph = load_recipe(project.recipes, "lab")
    weights = {}
    for node in graph.nodes.values():
        rows = ROWS.get(node.name, answers(weights) if node.name in ("sample", "judge") else None)
        payload = {"model.safetensors": "dpo" if node.name == "best" else node.name, "config.json": "{}"}
        if rows is not None:
            payload = {"rows.jsonl": in_lines(rows)}
        counted = {"sources": {"asked": 3, "arithmetic": 1}} if node.name == "raw" else {"sources": {"talks": 1}}
        build(project, graph, node, payload, EVIDENCE.get(node.name, {}), counted if node.kind == "prepare_data" else {})
        run = project.artifact(node.address) / "run.json"
        run.write_text(json.dumps({**RUN, "address": node.address}))
        weights[node.name] = open_artifact(project.artifact(node.address)).record.content
    return project


@pytest.fixture
def project(lab, tmp_path):
    """A copy that a test may damage."""
    return Project(shutil.copytree(lab.root, tmp_path / "project"))


def pedigree(project, monkeypatch, *words):
    monkeypatch.chdir(project.root)
    done = CliRunner().invoke(app, list(words))
    return done.exit_code, done.stdout


def holders(found):
    return {place.address.removeprefix("lab/"): place.ids for place in found.places}


def models(found):
    return {one.address.removeprefix("lab/"): (one.how, _way(one.way), one.certain) for one in found.models}


def test_a_prompt_is_followed_through_answers_and_pairs_into_the_policies_that_learned_from_them(lab):
    found = trace(lab, RowQuery(id=KEPT))
    assert holders(found) == {
        "raw": (KEPT, f"{KEPT}-2"), "prompts": (KEPT, f"{KEPT}-2"), "sample": (f"{KEPT}/sft/0", f"{KEPT}/base/0"),
        "judge": (f"{KEPT}/sft/0", f"{KEPT}/base/0"), "pair": (f"{KEPT}/best_vs_worst",), "good": (f"{KEPT}/sft/0",),
    }  # fmt: skip
    assert models(found) == {
        "dpo": ("trained on it", "lab/raw > prompts > sample > judge > pair > dpo", True),
        "best": ("goes back to it", "lab/raw > prompts > sample > judge > pair > dpo > best", True),
        "imitated": ("trained on it", "lab/raw > prompts > sample > judge > good > mixed > checked > imitated", False),  # by another id
        "taught": ("goes back to it", "lab/raw > prompts > mine > own > taught", True),  # by prompts that were made after its example
    }
    (sampled,) = [place for place in found.places if place.kind == "sample"]
    assert [(one.label, one.address) for one in sampled.policies] == [("sft", "lab/sft"), ("base", "lab/base")]
    assert [one.address for one in found.reached if one.type == "scores"] == ["lab/scores"]


def test_what_learned_from_the_answers_of_a_policy_goes_back_to_what_that_policy_learned_from(lab):
    found = trace(lab, RowQuery(id=TALK))
    assert holders(found) == {"talks": (TALK,), "corpus": (TALK,)}
    assert models(found)["sft"] == ("trained on it", "lab/talks > corpus > sft", True)
    assert models(found)["taught"] == ("goes back to it", "lab/talks > corpus > sft > mine > own > taught", True)
    assert models(found)["dpo"] == ("goes back to it", "lab/talks > corpus > sft > sample > judge > pair > dpo", True)


def test_a_stage_that_takes_all_its_rows_from_others_brings_none_in(lab):
    mixed, kept = trace(lab, RowQuery(id=name("mixed", 9))), trace(lab, RowQuery(id=KEPT))
    assert {place.address: place.handed_on for place in mixed.places} == {"lab/mixed": True, "lab/checked": False}
    assert mixed.sources() == [] and kept.sources() == [("lab/raw", "asked")]
    assert not any(place.handed_on for place in kept.places)


def test_a_row_that_gave_no_pair_has_reached_no_model_but_by_what_was_written_after_its_example(lab):
    found = trace(lab, RowQuery(id=ALONE))
    assert set(holders(found)) == {"raw", "prompts", "sample", "judge"} and set(models(found)) == {"taught"}


def test_a_row_that_decontamination_took_out_is_told_with_the_item_and_reached_nothing(lab):
    found = trace(lab, RowQuery(id=LEAKED))
    assert set(holders(found)) == {"raw"} and not found.reached
    assert [(drop.address, drop.reason, drop.detail) for drop in found.dropped] == [
        ("lab/prompts", "overlap", f"0.83 of item {ITEM} of suite")
    ]


def test_an_item_names_its_suites_the_rows_that_matched_it_and_who_was_scored(lab):
    found = trace(lab, RowQuery(id=ITEM))
    assert [(drop.id, drop.by) for drop in found.dropped] == [(LEAKED, ITEM)]
    (scored,) = [place for place in found.places if place.type == "scores"]
    assert scored.scores == (ItemScore("t", "base", 0.0), ItemScore("t", "dpo", 1.0)) and not found.models


def test_a_dropped_copy_is_told_from_both_sides(lab):
    twin, kept = trace(lab, RowQuery(id=TWIN)), trace(lab, RowQuery(id=KEPT))
    assert not twin.places and [(drop.id, drop.by) for drop in twin.dropped] == [(TWIN, "")]
    assert [(drop.id, drop.by) for drop in kept.dropped] == [(TWIN, KEPT)]


def test_a_text_in_place_of_an_id_is_told_how_to_find_it(project, monkeypatch):
    code, out = pedigree(project, monkeypatch, "trace", "Aral Sea")
    assert code == 1 and out.startswith("row not found: ") and out.endswith("; --text finds a row by its text\n")


def test_a_text_is_found_in_other_case_and_space_and_no_other_text_is(lab):
    assert trace(lab, RowQuery(text="  how many RIVERS\nflow into the aral sea? ")).ids == (KEPT, TWIN)
    assert trace(lab, RowQuery(text="How many rivers flow into the Aral")).ids == ()
    assert trace(lab, RowQuery(text="rivers flow into the Aral", contains=True)).ids == (KEPT, TWIN)
    assert trace(lab, RowQuery(text="Two.")).ids == (ALONE, KEPT)  # an answer stands for its prompt
    with pytest.raises(UsageProblem, match="at least 20 characters, but the text has 13"):
        RowQuery(text="the  Aral Sea?", contains=True)
    with pytest.raises(UsageProblem, match="specify a row id"):
        RowQuery(text=" \n")


def test_a_row_that_could_not_be_read_is_found_by_its_words(lab):
    found = trace(lab, RowQuery(text="name each lake in mali"))
    assert found.ids == () and [drop.detail for drop in found.dropped] == ["asked.jsonl:9: no answer"]


def test_the_start_of_an_id_is_enough_where_one_row_has_it(lab):
    for start in (KEPT, f"{KEPT}-2", f"{KEPT}/sft/0", f"{KEPT}/best_vs_worst"):
        assert trace(lab, RowQuery(id=start)).ids == (KEPT,)
    assert trace(lab, RowQuery(id="arith")).ids == (ALONE,)
    with pytest.raises(UsageProblem, match=f"'asked-' is a prefix of 3 ids: {KEPT}, {LEAKED}, {TWIN}"):
        trace(lab, RowQuery(id="asked-"))


def test_where_an_artifact_is_not_here_it_is_named_and_what_it_may_have_passed_on_is_doubted(lab, project):
    shutil.rmtree(project.artifact("lab/corpus"))
    found = trace(project, RowQuery(id=TALK))
    assert models(found)["sft"] == ("trained on it", "lab/talks > corpus > sft", False)
    assert models(trace(lab, RowQuery(id=name("talks", 8)))) == {}  # which decontamination left out
    assert models(trace(project, RowQuery(id=name("talks", 8))))["sft"][2] is False
    ((named, why),) = found.not_looked_in.items()
    assert named.startswith("lab/corpus ") and "only its records are here" in why
    (project.artifact("lab/pair") / "payload" / "rows.jsonl").write_text("{}\n")
    assert "payload" in trace(project, RowQuery(id=TALK)).not_looked_in["lab/pair"]


@pytest.mark.parametrize(("old", "new"), [('{"id": "talks', '["id": "talks'), ('"content"', '"contant"')])
def test_an_artifact_that_cannot_be_read_hides_no_other_and_counts_for_nothing(project, old, new):
    rows = project.artifact("lab/corpus") / "payload/rows.jsonl"
    rows.write_text(rows.read_text().replace(old, new))
    found = trace(project, RowQuery(text="Say it."))
    assert holders(found)["talks"] == (TALK,) and "row" in found.not_looked_in["lab/corpus"]
    assert models(found)["sft"][2] is (new == '"contant"')  # its ids could be read


def test_what_a_lock_names_and_is_not_here_is_not_passed_over(project):
    outs = [{"path": "gone/payload", "md5": f"{'0' * 32}.dir"}, {"path": "raw/payload", "md5": f"{'0' * 32}.dir"}]
    stages = {name: {"cmd": "pedigree", "outs": [out]} for name, out in zip(("gone", "raw"), outs, strict=True)}
    (project.artifacts / "lab/dvc.lock").write_text(yaml.safe_dump({"schema": "2.0", "stages": stages}))
    assert trace(project, RowQuery(id=KEPT)).not_looked_in == {"lab/gone": "not available locally: try `pedigree pull lab`"}


def test_an_artifact_that_lies_in_two_recipes_is_named_twice(project):
    shutil.copytree(project.artifact("lab/sft"), project.artifact("other/sft"))
    assert [one.address for one in trace(project, RowQuery(id=TALK)).models][:2] == ["lab/sft", "other/sft"]


def test_looking_in_some_artifacts_says_nothing_certain_of_others(lab):
    found = trace(lab, RowQuery(id=KEPT), within=["lab/raw"])
    assert holders(found) == {"raw": (KEPT, f"{KEPT}-2")} and found.looked_in == 1
    assert models(found)["dpo"][2] is False


def test_the_command_tells_ways_licences_and_writers(lab, monkeypatch):
    code, said = pedigree(lab, monkeypatch, "trace", KEPT)
    assert code == 0 and "lab/raw imported it from asked.jsonl (license odc-by)" in said
    assert "answers of sft (lab/sft, " in said and "lab/raw > prompts > sample > judge > pair > dpo" in said
    assert "(license unknown, written by gpt-4o)" in pedigree(lab, monkeypatch, "trace", TALK)[1]
    assert "lab/raw imported it from arithmetic, generated in this project" in pedigree(lab, monkeypatch, "trace", ALONE)[1]
    assert "lab/prompts imported it" not in pedigree(lab, monkeypatch, "trace", LEAKED)[1]
    code, said = pedigree(lab, monkeypatch, "trace", "--text", "nobody has said this", "--json")
    assert code == 1 and json.loads(said)["places"] == []
    assert pedigree(lab, monkeypatch, "trace", "\udcff")[0] == 1  # what a terminal gives that knows no UTF-8


@pytest.mark.parametrize("words", [[], [KEPT, "--file", "x"], [KEPT, "--contains"], ["--file", "nowhere"], ["--file", "model"]])
def test_what_names_no_row_is_told_and_is_no_bug(lab, monkeypatch, words):
    (lab.root / "model").write_bytes(b"\xff\xfe\x00")
    monkeypatch.chdir(lab.root)
    for name in ("trace", "forget"):
        assert isinstance(CliRunner().invoke(app, [name, *words]).exception, UsageProblem)


def test_words_of_rows_reach_the_terminal_as_they_look(project, monkeypatch):
    evil = f"\x1b]0;mine\x07[red]-{7:016x}"
    line = {"id": evil, "reason": "\x1b[2J", "evidence": "\u202eodd\nline", "text": "t"}
    with (project.artifact("lab/raw") / "evidence" / "drops.jsonl").open("a") as stream:
        stream.write(json.dumps(line, ensure_ascii=False) + "\n")
    code, said = pedigree(project, monkeypatch, "trace", evil)
    assert code == 0 and "\x1b" not in said and "\u202e" not in said and "\x07" not in said
    assert "\\u001b]0;mine" in said and "[red]" in said


SELECTION = """
description: Rows that a language model rates, mixed again.
execution: cpu
stages:
  suite: {kind: prepare_data, record: item, task: t, sources: [{type: files, path: suite.jsonl}]}
  talks: {kind: prepare_data, record: conversation, sources: [{type: files, path: talks.jsonl}]}
  corpus: {kind: decontaminate, in: {data: talks, benchmarks: [suite]}}
  base: {kind: source_model, source: {type: hub, repo: lab/model, revision: REVISION}}
  liked:
    kind: select_rows
    in: {data: corpus, judge: base}
    rating: {rubrics: [honesty], by: {type: policy}}
    rating_weight: 1.0
    keep: {type: above, min_score: 4}
  again: {kind: prepare_data, in: {rows: [liked]}, record: conversation, sources: [{type: artifact, input: liked}]}
  sft: {kind: sft, in: {policy: base, data: [again]}, global_batch: 2, max_length: 8, optimizer: {learning_rate: 1e-4}}
""".replace("REVISION", "a" * 40)


def test_a_row_that_models_did_not_like_is_told_with_its_score_and_reached_nothing_for_certain(tmp_path):
    """Rows keep their ids on the way through a selection and a mixture of what it left."""
    everything = loved, spurned, undrawn = [row(name("talks", place), f"Say {place}.") for place in (6, 8, 9)]
    rows = {"suite": [row(ITEM, "?")], "talks": everything, "corpus": everything, "liked": [loved, undrawn], "again": [loved]}
    drop = {"id": spurned["id"], "source": "talks", "reason": "below min_score", "evidence": "3"}
    project, _ = made_of(tmp_path, SELECTION, rows, {"liked": {"drops.jsonl": [drop]}})
    found = trace(project, RowQuery(id=spurned["id"]))
    assert [(one.address, one.reason, one.detail) for one in found.dropped] == [("lab/liked", "below min_score", "3")]
    assert not found.models and not trace(project, RowQuery(id=undrawn["id"])).models
    assert models(trace(project, RowQuery(id=TALK)))["sft"] == ("trained on it", "lab/talks > corpus > liked > again > sft", True)


MEASURED = """
description: Rows that are counted by the tokens of a model, which is made of others.
execution: cpu
stages:
  suite: {kind: prepare_data, record: item, task: t, sources: [{type: files, path: suite.jsonl}]}
  talks: {kind: prepare_data, record: conversation, sources: [{type: files, path: talks.jsonl}]}
  corpus: {kind: decontaminate, in: {data: talks, benchmarks: [suite]}}
  base:
    kind: source_model
    in: {corpus: [corpus]}
    source: {type: random_llama, layers: 1, hidden: 16, heads: 2, kv_heads: 1, ffn: 16, vocabulary: 300, context: 64}
  more: {kind: prepare_data, in: {tokenizer: base}, record: conversation, sources: [{type: files, path: more.jsonl}]}
"""


def test_rows_that_a_model_only_counts_the_tokens_of_go_back_to_nothing_that_it_is_made_of(tmp_path):
    held = {"suite": [row(ITEM, "Who?")], "talks": [row(TALK, QUESTION)], "corpus": [row(TALK, QUESTION)], "more": [row(TWIN, "Why?")]}
    project, _ = made_of(tmp_path, MEASURED, held)
    assert [one.kind for one in trace(project, RowQuery(id=TALK)).reached] == ["source_model"]
