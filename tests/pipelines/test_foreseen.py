"""What must fail is refused before the first stage runs, and the plan states it: files, rows, prompts, models that a stage cannot use."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from handmade import build, project_at

from pedigree.configs.base.document import ConfigError
from pedigree.pipelines.estimate.estimates import Estimates
from pedigree.pipelines.run.checks import refuse_what_must_fail
from pedigree.pipelines.run.foreseen import must_fail
from pedigree.pipelines.run.opening import Request, open_run
from pedigree.pipelines.run.planning import rows_of
from pedigree.pipelines.run.plans import plan

RECIPES = Path(__file__).parents[2] / "configs" / "recipes"
OTHER = {
    "kind": "source_model",
    "in": {"corpus": ["chat"]},
    "source": {"type": "random_llama", "layers": 1, "hidden": 64, "heads": 2, "kv_heads": 2, "ffn": 64, "vocabulary": 400, "context": 256},
}
ROWS = "".join(json.dumps({"prompt": f"question {number}", "completion": "answer"}) + "\n" for number in range(10))
DPO, SAMPLE = "online.stages.dpo", "online.stages.sample"


def opened(folder: Path, changes: dict[str, Any], files: dict[str, str | bytes] | None = None, profile: dict[str, Any] | None = None):
    """A run of `tiny` with changed fields, by dotted places."""
    project = project_at(folder)
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    for name, content in (files or {}).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    document = yaml.safe_load((RECIPES / "tiny.yaml").read_text())
    for place, value in changes.items():
        *above, last = place.split(".")
        inside = document["stages"]
        for name in above:
            inside = inside[name]
        inside[last] = value
    (project.recipes / "wrong.yaml").write_text(yaml.safe_dump(document, sort_keys=False))
    numerics = {"numerics": {"device": "cpu", **(profile or {})}}
    (folder / "it.yaml").write_text(yaml.safe_dump({"slots": 4, **numerics}))
    return open_run(project, Request("wrong", profile=str(folder / "it.yaml")), looking=True)


def refused(run) -> list[str]:
    """The messages; and the plan states the same."""
    try:
        refuse_what_must_fail(run, set(run.graph.nodes))
    except ConfigError as error:
        found = [problem.message for problem in error.problems]
    else:
        found = []
    stated = [f"stage {row.shown}: {text}" for row in rows_of(run, plan(run, lenient=True), rates=lambda: None) for text in row.warnings]
    assert set(found) <= set(stated)
    return found


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "layers": (
        {f"{DPO}.lora": {"targets": ["q_proj", "w1"]}},
        "stage dpo_1: lora.targets: the model has no linear layer 'w1'; it has q_proj",
    ),
    "answer": ({"scores.sampling": {"max_tokens": 256}}, "stage scores: a prompt and max_tokens 256 exceed the model's context of 256"),
    "rollout": (
        {"rlvr.max_prompt_length": 249},
        "stage rlvr: max_prompt_length 249 and max_tokens 8 exceed the model's context of 256 tokens: lower one of them",
    ),
    "prompts": ({"rlvr.prompts_per_step": 201}, "stage rlvr: a step requires 201 prompts, but the pool has at most 200: lower"),
    "window": (
        {f"{SAMPLE}.prompts.count": 67},
        "stage sample_2: prompts 134 to 201 are configured (count 67, index 2), but the pool has at",
    ),
    "answers": ({f"{SAMPLE}.samples_per_prompt": 1}, "stage pair_1: it compares 2 answers to a prompt, but there is 1: raise"),
    "best of n": (
        {"over": {"kind": "overoptimization", "in": {"judgments": "judge_1"}, "max_n": 5}},
        "stage over: it compares 5 answers to a prompt, but there is 4",
    ),
    "task": ({"best.task": "gsm8k"}, "stage best: scores does not score the task 'gsm8k'; its suites have the tasks arithmetic"),
    "candidate": ({"scores.in.policies": ["sft", "rlvr"]}, "stage best: scores does not evaluate the candidate wrong/dpo_2: add it"),
    "delta": (
        {"pair_0": {"kind": "pair", "in": {"completions": "sample_0"}, "strategy": {"type": "delta", "strong": "sft", "weak": "bse"}}},
        "stage pair_0: strategy.weak is 'bse', but the completions are from sft, base",
    ),
    "reference": (
        {"other": OTHER, f"{DPO}.in.reference": "other"},
        "stage dpo_2: the reference has a vocabulary of 400 and the policy one of 512: use one of the same base model",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_stage_that_cannot_succeed_is_refused(tmp_path, case):
    changes, message = WRONG[case]
    found = refused(opened(tmp_path, changes))
    assert any(text.startswith(message) for text in found), found


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rlvr.max_prompt_length": 248, "rlvr.prompts_per_step": 200, "rlvr.steps": 1, f"{SAMPLE}.prompts.count": 66},
        {f"{DPO}.lora": {"targets": ["self_attn.q_proj", "down_proj"]}, "scores.sampling": {"max_tokens": 255}},
        {"over": {"kind": "overoptimization", "in": {"judgments": "judge_1"}, "max_n": 4}},
    ],
)
def test_a_stage_at_its_bounds_is_not_refused(tmp_path, changes):
    assert refused(opened(tmp_path, changes)) == []


@pytest.mark.parametrize(
    ("files", "fields", "message"),
    [
        ({}, {}, "rows.jsonl does not exist"),
        ({"rows.jsonl": ""}, {}, "rows: empty, without any row: add rows, or name another source"),
        ({"rows.jsonl/README.md": "text"}, {}, "rows.jsonl holds no .json, .jsonl, .jsonl.gz, .parquet file"),
        (
            {"rows.jsonl": ROWS},
            {"columns": {"prompt": "question", "completion": "completion"}},
            "rows has no column question: its first row",
        ),
        ({"rows.jsonl": '{"text": "no turns"}\n'}, {}, "rows: 1 malformed rows of 1, and max_bad_rows 0 allows 0: fix the rows"),
        ({"rows.jsonl": ROWS}, {"count": 11}, "rows: count 11 > 10 rows: take fewer"),
    ],
)
def test_rows_that_cannot_be_read_are_refused(tmp_path, files, fields, message):
    source = {"type": "files", "path": "rows.jsonl", **fields}
    (found,) = refused(opened(tmp_path, {"chat_raw.sources": [source]}, files))
    assert found.startswith(f"stage chat_raw: {message}")


@pytest.mark.parametrize(
    ("name", "rows", "fields"),
    [
        ("rows.jsonl", ROWS, {"count": 10}),
        ("rows.jsonl", ROWS.replace("\n", "\r").encode("utf-16"), {}),
        ("rows.json", json.dumps([json.loads(line) for line in ROWS.splitlines()]), {}),
        ("rows.jsonl", f"{ROWS}broken\n", {"max_bad_rows": 1}),
    ],
)
def test_rows_that_can_be_read_are_counted(tmp_path, name, rows, fields):
    """Ten prompts: a window of ten is there, one of twelve is not."""
    source = {"type": "files", "path": name, **fields}
    bound = 10 + fields.get("max_bad_rows", 0)
    changes = {"prompts_raw.sources": [source], "sample_0.prompts.count": bound, f"{SAMPLE}.prompts": {"count": bound + 1}}
    found = refused(opened(tmp_path, changes, {name: rows}))
    assert found == [
        f"stage sample_{index}: prompts 0 to {bound + 1} are configured (count {bound + 1}, index 0), but the pool has at most {bound}: "
        "lower prompts.count or prompts.index, or add prompts"
        for index in (1, 2)
    ]


@pytest.mark.parametrize(("text", "problem"), [("def rows(:\n", "is not Python: "), ("def row():\n  pass\n", "has no function rows: ")])
def test_a_program_that_cannot_run_is_refused(tmp_path, text, problem):
    source = {"type": "program", "path": "made.py", "count": 300, "seed": 1}
    (found,) = refused(opened(tmp_path, {"chat_raw.sources": [source]}, {"made.py": text}))
    assert found.startswith(f"stage chat_raw: made.py {problem}")


@pytest.mark.parametrize(
    ("model", "ranks", "problem"),
    [
        ({"heads": 6}, 4, "tensor_parallel 4 does not divide the model's 6 attention heads: "),
        ({"ffn": 510}, 4, "tensor_parallel 4 does not divide the model's 510 columns of its MLP: "),
        ({"heads": 6, "kv_heads": 6, "ffn": 768}, 3, None),
        (
            {"heads": 6, "kv_heads": 2, "ffn": 768},
            3,
            "tensor_parallel 3 is neither a divisor nor a multiple of the model's 2 key-value heads",
        ),
    ],
)
def test_ranks_that_do_not_divide_the_model_are_refused(tmp_path, model, ranks, problem):
    source = {"layers": 3, "hidden": 192, "heads": 4, "kv_heads": 2, "ffn": 512, "vocabulary": 512, "context": 256, "type": "random_llama"}
    found = refused(opened(tmp_path, {"base.source": source | model}, profile={"tensor_parallel": ranks}))
    assert all(text.partition(": ")[2].startswith(problem or "?") for text in found)
    assert bool(found) == (problem is not None)


def test_the_shape_is_that_of_the_recipe_where_an_earlier_model_will_be_replaced(tmp_path):
    """Its heads have 16 columns, which vLLM does not serve on a CPU; those of the artifact have 32."""
    run = opened(tmp_path, {"base.source.heads": 12})
    old = {"model_type": "llama", "hidden_size": 192, "num_attention_heads": 6, "num_hidden_layers": 1, "intermediate_size": 64}
    for address in run.graph.nodes:
        if address in run.graph.ancestors(["wrong/base"]):
            build(run.project, run.graph, run.graph.nodes[address], {"config.json": json.dumps(old | {"vocab_size": 512})}, {}, {})
    estimates = Estimates(run.project, run.graph, run.execution, due=set(run.graph.nodes))
    found = [*must_fail(run, run.graph.find("scores"), set(run.graph.nodes), estimates)]
    assert [text.partition(",")[0] for text in found] == ["the model's head size is 16"]


def test_prompts_that_no_round_uses_and_rows_beyond_the_context_are_stated(tmp_path):
    changes = {"sample_0.prompts": {"count": 24, "index": 1}, "rlvr.in.prompts": "more", "sft.max_length": 512}
    more = {
        "kind": "prepare_data",
        "record": "prompt",
        "sources": [{"type": "arithmetic", "operations": ["add"], "digits": [2], "count": 200, "seed": 9}],
    }
    clean = {"kind": "decontaminate", "in": {"data": "more_raw", "benchmarks": ["arithmetic_suite", "unseen_suite"]}}
    run = opened(tmp_path, {**changes, "more_raw": more, "more": clean})
    stated = {row.shown: row.warnings for row in rows_of(run, plan(run, lenient=True), rates=lambda: None)}
    assert stated["sft"] == ("max_length 512 exceeds the model's context of 256 tokens: longer rows train positions unknown to it",)
    unused = "no stage uses the first 24 prompts: windows count from 0, so that rounds begin with `index: $round-1`"
    assert stated["sample_0"] == stated["sample_1"] == (unused,)
    assert stated["sample_2"] == stated["dpo_1"] == ()
