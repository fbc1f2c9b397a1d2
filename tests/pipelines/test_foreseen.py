"""What must fail is refused before the first stage runs, and the plan states it: files, rows, prompts, models that a stage cannot use."""

import json
import subprocess
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from commands import in_project
from handmade import build, project_at
from safetensors.numpy import save

from pedigree.configs.base.document import ConfigError, Problem
from pedigree.configs.language.execution import Numerics
from pedigree.configs.methods.training import RewardModel, training_plan
from pedigree.data.host.machine import has_gpu
from pedigree.pipelines.estimate.estimates import Estimates
from pedigree.pipelines.estimate.needs import Facts
from pedigree.pipelines.estimate.shapes import shape_of_config
from pedigree.pipelines.run import checks, foreseen
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
MODEL = {
    "config.json": '{"model_type": "llama", "vocab_size": 3}',
    "tokenizer.json": '{"model": {"vocab": {"a": 0, "b": 1, "c": 2}}}',
}
DPO, SAMPLE = "online.stages.dpo", "online.stages.sample"


COMMANDS = {"plan": 1, "validate": 2, "rehearse": 2, "run": 2}
"""With the exit code of a recipe that cannot succeed."""


@dataclass(frozen=True)
class Case:
    """A recipe in which a stage cannot succeed, and what is said of it."""

    changes: dict[str, Any]
    message: str
    files: dict[str, str | bytes] = field(default_factory=dict)
    ranks: int = 1
    """Of each engine."""


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
    """What a run refuses; a plan and `validate` state the same, except that what lies on another machine is no matter of a recipe."""
    due = set(run.graph.nodes)
    found = told(lambda: checks.refuse_what_must_fail(run, due))
    planned = rows_of(run, plan(run, lenient=True), rates=lambda: None)
    assert {f"stage {row.shown}: {text}" for row in planned for text in row.problems} == set(found)
    stated = told(lambda: checks.refuse_contradictions(run.project, run.graph, run.execution, due))
    assert stated == [text for text in found if " does not exist" not in text]
    return found


def told(check: Callable[[], None]) -> list[str]:
    try:
        check()
    except ConfigError as error:
        return [f"stage {name}: {text}" for names, text in map(divided, error.problems) for name in names]
    return []


def divided(problem: Problem) -> tuple[list[str], str]:
    """(stages, what is wrong) of a message."""
    which, _, text = problem.message.partition(": ")
    return which.partition(" ")[2].split(", "), text


def writing(shots: int) -> dict[str, Any]:
    method = {"type": "self_instruct", "requests": 5, "shots": shots}
    return {"kind": "synthesize", "in": {"prompts": "prompts", "writer": "sft"}, "method": method, "by": {"type": "policy"},
            "sampling": {"max_tokens": 8}}  # fmt: skip


def rows(files: dict[str, str | bytes], message: str, **fields: Any) -> Case:
    return Case({"chat_raw.sources": [{"type": "files", "path": "rows.jsonl", **fields}]}, f"stage chat_raw: {message}", files)


def suite(message: str, question: str = "{{ prompt }}", **metric: Any) -> Case:
    """A suite with a form of its own over rows with a prompt and a completion; `metric` is how it is scored."""
    form = {
        "description": "d", "origin": "o", "split": "dev", "draw": {"max_tokens": 4}, "prompt": {"ask": "{{ question }}"},
        "rows": {"question": question, "answer": "completion"},
        "metrics": {"score": {"verifier": "exact_match", **metric}},
    }  # fmt: skip
    source = {"type": "files", "path": "rows.jsonl"}
    mine = {"kind": "prepare_data", "record": "item", "task": "mine", "sources": [source], "form": form}
    return Case({"mine": mine}, f"rows.jsonl:1, rows.jsonl:2, rows.jsonl:3 and 7 more: {message}", {"rows.jsonl": ROWS})


def program(text: str, message: str) -> Case:
    source = {"type": "program", "path": "made.py", "count": 300, "seed": 1}
    return Case({"chat_raw.sources": [source]}, f"stage chat_raw: made.py {message}", {"made.py": text})


def reward(text: str, message: str, **others: str) -> Case:
    terms = [{"type": "program", "path": "mine.py"}]
    files = {"mine.py": text, **{f"{name}.py": other for name, other in others.items()}}
    return Case({"rlvr.reward": {"terms": terms}}, f"stage rlvr: mine.py {message}", files)


def model(message: str, ranks: int = 1, **sizes: int) -> Case:
    source = {"layers": 3, "hidden": 192, "heads": 4, "kv_heads": 2, "ffn": 512, "vocabulary": 512, "context": 256, "type": "random_llama"}
    return Case({"base.source": source | sizes}, f"stages sample_0, sample_1, sample_2, rlvr, scores, unseen: {message}", {}, ranks)


def folder(message: str, template: str | None = "{{ messages }}", **files: str) -> Case:
    """A model of three words with changed files."""
    made = {
        **MODEL,
        "model.safetensors": save({}),
        **{f"{name}.json": text for name, text in files.items()},
    }
    if template:
        made["chat_template.jinja"] = template
    return Case(
        {"theirs": {"kind": "source_model", "source": {"type": "folder", "path": "their"}}},
        f"stage theirs: their: {message}",
        {f"their/{name}": text for name, text in made.items() if text},
    )


def own(message: str, **files: str) -> Case:
    """A template and a rubric of the project."""
    rating = {"rubrics": ["mine/brevity.yaml"], "by": {"type": "endpoint", "base_url": "https://judge.example/v1", "model": "m"}}
    given = {"mine/house.jinja": "{{ messages }}", "mine/brevity.yaml": "version: 1\naspect: a\nquestion: q\nscale: [a, b, c, d, e]\n"}
    changes = {"base.chat_template": "mine/house.jinja", "judge_0.rating": rating, "judge_0.rating_weight": 1.0}
    return Case(changes, message, given | {name.replace("_", "."): text for name, text in files.items()})


WRONG: dict[str, Case] = {
    "template": own("stage base: mine/house.jinja is not a Jinja template, line 1", **{"mine/house_jinja": "{% if %}"}),
    "rubric": own("stage judge_0: mine/brevity.yaml:1: aspect: required, but missing", **{"mine/brevity_yaml": "version: 1"}),
    "layers": Case(
        {f"{DPO}.lora": {"targets": ["q_proj", "w1"]}},
        "stages dpo_1, dpo_2: lora.targets: the model has no linear layer 'w1'; it has q_proj",
    ),
    "experts": Case(
        {f"{DPO}.router_aux_loss_coef": 0.01},
        "stages dpo_1, dpo_2: router_aux_loss_coef is 0.01, but the model has no experts: remove the field",
    ),
    "answer": Case({"scores.sampling": {"max_tokens": 256}}, "stage scores: a prompt and max_tokens 256 exceed the model's context of 256"),
    "rollout": Case(
        {"rlvr.max_prompt_length": 249},
        "stage rlvr: max_prompt_length 249 and max_tokens 8 exceed the model's context of 256 tokens: lower one of them",
    ),
    "prompts": Case({"rlvr.prompts_per_step": 201}, "stage rlvr: a step requires 201 prompts, but the pool has at most 200: lower"),
    "window": Case(
        {f"{SAMPLE}.prompts.count": 67},
        "stage sample_2: prompts 134 to 201 are configured (count 67, index 2), but the pool has at",
    ),
    "answers": Case({f"{SAMPLE}.samples_per_prompt": 1}, "stages pair_1, pair_2: it compares 2 answers to a prompt, but there is 1: raise"),
    "best of n": Case(
        {"over": {"kind": "overoptimization", "in": {"judgments": "judge_1"}, "max_n": 5}},
        "stage over: it compares 5 answers to a prompt, but there is 4",
    ),
    "task": Case({"best.task": "gsm8k"}, "stage best: scores does not score the task 'gsm8k'; its suites have the tasks arithmetic"),
    "candidate": Case({"scores.in.policies": ["sft", "rlvr"]}, "stage best: scores does not evaluate the candidate dpo_2: add it"),
    "delta": Case(
        {"pair_0": {"kind": "pair", "in": {"completions": "sample_0"}, "strategy": {"type": "delta", "strong": "sft", "weak": "bse"}}},
        "stage pair_0: strategy.weak is 'bse', but the completions are from sft, base",
    ),
    "reference": Case(
        {"other": OTHER, f"{DPO}.in.reference": "other"},
        "stages dpo_1, dpo_2: the reference has a vocabulary of 400 and the policy one of 512: use one of the same base model",
    ),
    "value model": Case(
        {"other": OTHER, "reward.in.policy": "other", "rlvr.algorithm": {"type": "ppo"}, "rlvr.in.value": "reward"},
        "stage rlvr: the value has a vocabulary of 400 and the policy one of 512: use one of the same base model",
    ),
    "other tokens": Case(
        {
            "theirs": {"kind": "source_model", "source": {"type": "folder", "path": "their"}},
            "ours": {"kind": "source_model", "source": {"type": "folder", "path": "our"}},
            "rlvr.in": {"policy": "ours", "prompts": "prompts", "teacher": "theirs"},
            "rlvr.algorithm": {"type": "dapo", "teacher": {}},
        },
        "stage rlvr: the teacher has another tokenizer than the policy: token 1 is 'c' in it and 'b' in the policy: use",
        {
            f"{name}/{file}": text if name == "our" else text.replace('"b": 1, "c": 2', '"c": 1, "b": 2')
            for name in ("our", "their")
            for file, text in MODEL.items()
        },
    ),
    "pairs": Case({"pair_0.min_pairs": 49}, "stage pair_0: min_pairs is 49, but it can have at most 48: lower min_pairs, or give it more"),
    "kept prompts": Case(
        {"kept": {"kind": "select_prompts", "in": {"prompts": "prompts", "judgments": "judge_1"}, "min_mean": 0.1, "min_rows": 25}},
        "stage kept: min_rows is 25, but it can have at most 24",
    ),
    "shots": Case({"made": writing(201)}, "stage made: shots is 201, but there are at most 200 prompts: lower it, or add prompts"),
    "disagreement": Case(
        {"pair_x": {"kind": "pair", "in": {"judgments": "judge_1"}, "budget": {"pairs": 3, "choose": "disagreement"}}},
        "stage pair_x: budget.choose disagreement requires two or more reward models, but its answers have 1: add some to the judge",
    ),
    "merged": Case(
        {"other": OTHER, "both": {"kind": "merge", "in": {"policies": ["sft", "other"]}}},
        "stage both: sft and other cannot be merged: layers is 3 and 1; merge policies with a common base model",
    ),
    "no rows": rows({"rows.jsonl": ""}, "rows: empty, without any row: add rows, or name another source"),
    "no files": rows({"rows.jsonl/README.md": "text"}, "rows.jsonl holds no .json, .jsonl, .jsonl.gz, .parquet file"),
    "column": rows(
        {"rows.jsonl": ROWS},
        "rows has no column question: its first row",
        columns={"prompt": "question", "completion": "completion"},
    ),
    "bad rows": rows({"rows.jsonl": '{"text": "no turns"}\n'}, "rows: 1 malformed rows of 1, and max_bad_rows 0 allows 0: fix the rows"),
    "a form's column": suite("'{{ title }}': 'title' is undefined", question="{{ title }}"),
    "a form's expression": suite("'reply': the row has no such column", fields={"answer": "reply"}),
    "a form's verifier": suite("verifier 'exact_mach' is not one of arithmetic, ", verifier="exact_mach"),
    "a form's option": suite(
        "{'name': 'exact_match', 'answer': 'answer', 'ignore_caps': True} must have the fields answer, name, may have ",
        options={"ignore_caps": True},
    ),
    "too few rows": rows({"rows.jsonl": ROWS}, "rows: count 11 > 10 rows: take fewer", count=11),
    "no Python": program("def rows(:\n", "is not Python: "),
    "no function": program("def row():\n  pass\n", "has no function rows: "),
    "a reward that imports its neighbor": reward(
        "from other import one\ndef reward():\n  pass\n", "imports other.one from the", other="one = 1"
    ),
    "no reward function": reward("def score():\n  pass\n", "has no function reward: "),
    "heads of 16": model("the model's head size is 16, but vLLM on a CPU serves 32, 64", heads=12),
    "heads": model("tensor_parallel 4 does not divide the model's 6 attention heads: ", 4, heads=6),
    "columns": model("tensor_parallel 4 does not divide the model's 510 columns of its MLP: ", 4, ffn=510),
    "key heads": model(
        "tensor_parallel 3 is neither a divisor nor a multiple of the model's 2 key-value heads", 3, heads=6, kv_heads=2, ffn=768
    ),
    "a script": Case(
        {"tuned": {"kind": "external", "command": ["sh", "scripts/train.sh", "{output}"], "output": "policy"}},
        "stage tuned: its command names scripts/train.sh, which it does not get: add it to files",
        {"scripts/train.sh": "true"},
    ),
    "a script beside a long one": Case(
        {"tuned": {"kind": "external", "command": ["sh", "-c", f": {'x' * 300} a/b", "scripts/train.sh", "{output}"], "output": "policy"}},
        "stage tuned: its command names scripts/train.sh, which it does not get: add it to files",
        {"scripts/train.sh": "true"},
    ),
    "a file": Case(
        {"theirs": {"kind": "source_model", "source": {"type": "folder", "path": "their.gguf"}}},
        "stage theirs: their.gguf: it is a file, not a model folder: name the folder of transformers with config.json",
        {"their.gguf": "GGUF"},
    ),
    "no tokenizer": folder("it has no tokenizer (tokenizer.json)", tokenizer=""),
    "other tokenizer": folder("the tokenizer has 3 tokens, but the model embeds 9", config='{"model_type": "llama", "vocab_size": 9}'),
    "no template": folder("it has no chat template, as base models have none", template=None),
    "no Jinja": folder("its chat template is not Jinja, ", template="{% if %}"),
    "an artifact": folder("it is an artifact of a Pedigree project", **{"record": "{}", "payload/config": "{}"}),
}
"""What `plan`, `validate` and `run` say, each in its way."""


@pytest.mark.parametrize("case", WRONG)
def test_a_stage_that_cannot_succeed_is_foreseen(tmp_path, case):
    wrong = WRONG[case]
    run = opened(tmp_path, wrong.changes, wrong.files, {"tensor_parallel": wrong.ranks})
    with pytest.raises(ConfigError) as error:
        checks.refuse_what_must_fail(run, set(run.graph.nodes))
    assert wrong.message in str(error.value)


@pytest.mark.parametrize("case", ["answer", "a form's column"])
def test_every_command_tells_that_a_stage_cannot_succeed(tmp_path, case):
    wrong = WRONG[case]
    made = opened(tmp_path, wrong.changes, wrong.files, {"tensor_parallel": wrong.ranks}).project
    for command, code in COMMANDS.items():
        out, err = in_project(made.root).said(command, "wrong", "--execution", "it.yaml", code=code)
        assert wrong.message in err, (command, err)
        assert wrong.message not in out
    assert not made.artifacts.exists() or not list(made.artifacts.rglob("record.json"))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rlvr.max_prompt_length": 248, "rlvr.prompts_per_step": 200, "rlvr.steps": 1, f"{SAMPLE}.prompts.count": 66},
        {f"{DPO}.lora": {"targets": ["self_attn.q_proj", "down_proj"]}, "scores.sampling": {"max_tokens": 255}},
        {"over": {"kind": "overoptimization", "in": {"judgments": "judge_1"}, "max_n": 4}},
        {
            "pair_0.min_pairs": 48,
            "kept": {"kind": "select_prompts", "in": {"prompts": "prompts", "judgments": "judge_1"}, "min_mean": 0.1, "min_rows": 24},
            "made": writing(200),
            "both": {"kind": "merge", "in": {"policies": ["base", "sft"]}},
        },
    ],
)
def test_a_stage_at_its_bounds_is_not_refused(tmp_path, changes):
    assert refused(opened(tmp_path, changes)) == []


def test_ranks_that_divide_the_model_are_not_refused(tmp_path):
    case = model("", 3, heads=6, kv_heads=6, ffn=768)
    assert refused(opened(tmp_path, case.changes, profile={"tensor_parallel": case.ranks})) == []


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


@pytest.mark.parametrize(("ranks", "refuses"), [(1, False), (2, True)])
def test_an_inline_sampler_has_one_rank(tmp_path, ranks, refuses):
    run = opened(tmp_path, {})
    rlvr = {"numerics": {"world_size": ranks}, "placement": {"sampler_process": "inline"}}
    (tmp_path / "it.yaml").write_text(yaml.safe_dump({"slots": 4, "numerics": {"device": "cpu"}, "kinds": {"rlvr": rlvr}}))
    run = open_run(run.project, Request("wrong", profile=str(tmp_path / "it.yaml")), looking=True)
    problem = "stage rlvr: sampler_process inline requires world_size 1, not 2: set `sampler_process: own`"
    assert refused(run) == ([problem] if refuses else [])


def test_the_shape_is_that_of_the_recipe_where_an_earlier_model_will_be_replaced(tmp_path):
    """Its heads have 16 columns, which vLLM does not serve on a CPU; those of the artifact have 32."""
    run = opened(tmp_path, {"base.source.heads": 12})
    old = {"model_type": "llama", "hidden_size": 192, "num_attention_heads": 6, "num_hidden_layers": 1, "intermediate_size": 64}
    for address in run.graph.nodes:
        if address in run.graph.ancestors(["wrong/base"]):
            build(run.project, run.graph, run.graph.nodes[address], {"config.json": json.dumps(old | {"vocab_size": 512})}, {}, {})
    estimates = Estimates(run.project, run.graph, run.execution, due=set(run.graph.nodes))
    found = [*must_fail(run, run.graph.find("scores"), estimates)]
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


def missing(run) -> list[tuple[list[str], str]]:
    try:
        checks.refuse_what_is_not_there(run, set(run.graph.nodes))
    except ConfigError as error:
        return [divided(problem) for problem in error.problems]
    return []


class Locked(BaseHTTPRequestHandler):
    """A server that answers those with the right key only."""

    def do_GET(self) -> None:
        self.send_response(200 if self.headers["Authorization"] == "Bearer right" else 401)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def rated_by(url: str) -> dict[str, Any]:
    by = {"type": "endpoint", "base_url": url, "model": "m"}
    return {
        "judge_0": {
            "kind": "judge",
            "in": {"completions": "sample_0"},
            "rating": {"by": by, "rubrics": ["helpfulness"]},
            "rating_weight": 1,
        }
    }


def test_a_server_that_is_not_there_or_rejects_the_key_is_refused(tmp_path, monkeypatch):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Locked)
    url = f"http://127.0.0.1:{server.server_port}/v1"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    run = opened(tmp_path, rated_by(url))
    assert missing(run) == [
        (["judge_0"], f"{url} rejects requests without a key (HTTP Error 401: Unauthorized): set PEDIGREE_127_0_0_1_KEY")
    ]
    monkeypatch.setenv("PEDIGREE_127_0_0_1_KEY", "right")
    assert missing(run) == []
    server.shutdown()
    server.server_close()
    ((stages, problem),) = missing(run)
    assert stages == ["judge_0"] and problem.startswith(f"no server is at {url} ") and problem.endswith(": start it, or correct base_url")


def test_a_store_that_cannot_be_used_is_refused_once(tmp_path):
    (tmp_path / "file").write_text("no folder")
    run = opened(tmp_path, {})
    (tmp_path / "it.yaml").write_text(f"slots: 4\nplacement: {{checkpoint_url: 'file://{tmp_path}/file/store'}}\n")
    run = open_run(run.project, Request("wrong", profile=str(tmp_path / "it.yaml")), looking=True)
    ((stages, problem),) = missing(run)
    assert {"sft", "rlvr"} < set(stages) and problem.startswith(f"placement.checkpoint_url file://{tmp_path}/file/store")


def test_a_profile_for_gpus_is_refused_without_one_and_data_stages_need_none(tmp_path):
    assert not has_gpu(tmp_path)
    run = opened(tmp_path, {}, profile={"device": "cuda"})
    problem = "the profile's device is cuda, but this machine has no GPU: use another profile, e.g. `--execution cpu`"
    computing = ["sft", "sample_0", "reward", "sample_1", "judge_1", "dpo_1", "sample_2", "judge_2", "dpo_2", "rlvr", "scores", "unseen"]
    assert missing(run) == ([] if has_gpu() else [(computing, problem)])
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidia0").touch()
    assert has_gpu(tmp_path)


def test_more_slots_than_visible_gpus_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, 5")
    run = opened(tmp_path, {}, profile={"device": "cuda"})
    (tmp_path / "it.yaml").write_text(
        "slots: 8\nnumerics: {device: cuda}\nstages: {sft: {placement: {slots: 3}}, rlvr: {placement: {slots: 2}}}\n"
    )
    run = open_run(run.project, Request("wrong", profile=str(tmp_path / "it.yaml")), looking=True)
    said = "placement.slots is 3, but CUDA_VISIBLE_DEVICES lists 2 GPUs (4,5): make more GPUs visible, or lower placement.slots"
    assert (["sft"], said) in missing(run)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    assert not [text for _, text in missing(run) if "placement.slots" in text]


def test_models_that_exceed_the_disk_are_refused(tmp_path, monkeypatch):
    """Of 1,279,296 parameters in fp32 for the base, and in bf16 for `sft` and `reward`: 10,234,368 bytes."""
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda place: SimpleNamespace(free=10_000_000))
    ((stages, problem),) = missing(opened(tmp_path, {}))
    assert (stages, problem) == (["reward"], "the models up to here need 10.2 MB of disk, but 10.0 MB are free: free some")


@pytest.mark.parametrize("kind", ["granite", "olmoe", "llama"])
def test_a_reward_or_value_model_that_transformers_lacks_is_foreseen(kind):
    sizes = {
        "model_type": kind, "hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 2,
        "intermediate_size": 16, "vocab_size": 100, "num_experts": 4, "num_experts_per_tok": 2,
    }  # fmt: skip
    shape = shape_of_config(sizes)
    assert shape
    training = training_plan(
        RewardModel.model_validate({"global_batch": 8, "max_length": 64, "optimizer": {"learning_rate": 1e-5}}), "pairs", scalar_head=True
    )
    expected = [] if kind == "llama" else [f"transformers has no reward or value model for {kind}: use another base model"]
    node: Any = SimpleNamespace(config=None)
    for one in (training, replace(training, scalar_head=False, value=True)):
        assert list(foreseen._unfit(Facts(policy=shape, training=one), node, Numerics())) == expected
    assert not list(foreseen._unfit(Facts(policy=shape, training=replace(training, scalar_head=False)), node, Numerics()))
