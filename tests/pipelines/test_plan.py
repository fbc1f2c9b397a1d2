"""What a plan says of a batch, and of what stages need, before anything runs; what cannot fit is refused before anything starts."""

import json
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import in_project
from handmade import build, made_at, project_at
from projects import CODE, fresh_project
from safetensors.numpy import save_file
from sweeps import nightly_after
from waiting import deadline

from pedigree.configs.base.project import Project
from pedigree.configs.base.work import Amount
from pedigree.configs.language.execution import Numerics
from pedigree.configs.language.graph import Node
from pedigree.configs.language.kinds import KINDS
from pedigree.configs.language.recipe import load_recipe
from pedigree.data.artifacts import assets
from pedigree.data.artifacts.artifacts import Input, Record
from pedigree.data.artifacts.run_record import Run
from pedigree.pipelines.cli.plan import _amount
from pedigree.pipelines.estimate import rates
from pedigree.pipelines.estimate.estimates import Estimates
from pedigree.pipelines.lineage.ancestry import Pedigree
from pedigree.pipelines.publish.card import card
from pedigree.pipelines.publish.report import write_report
from pedigree.pipelines.run.opening import Request, load_execution, open_run
from pedigree.pipelines.run.planning import batch_text, rows_of
from pedigree.pipelines.run.plans import plan


@pytest.mark.parametrize(
    ("loss", "numerics", "text"),
    [
        ({"type": "dpo"}, {}, "8 pairs per step: 1 rank, packed to 1024 tokens per pass, 3 steps"),
        # a preference gives kto one or two answers, so its steps are not known before the rows are read
        ({"type": "kto"}, {"world_size": 2}, "8 answers per step: 2 ranks, packed to 1024 tokens per pass"),
    ],
)
def test_a_step_is_told_in_what_its_loss_counts(loss, numerics, text):
    fields = {"global_batch": 8, "max_length": 64, "loss": loss, "optimizer": {"learning_rate": 1e-4}}
    config = KINDS["preference_train"].config.model_validate(fields)
    node = Node("r", "it", "preference_train", config, (), "policy", (), "spec")
    assert batch_text(node, Numerics(**numerics), 20) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(9994, "9994"), (9999.6, "10k"), (12_345, "12.3k"), (999_400, "999k"), (999_600, "1M"), (1.5e6, "1.5M"), (999_600_000, "1G"),
     (7.7e12, "7.7e+03G")],
)  # fmt: skip
def test_an_amount_is_told_in_the_unit_of_its_rounded_value(value, text):
    assert _amount(Amount(value, "estimated")) == f"~{text}"


LENGTHS = """
execution: cpu
stages:
  raw: {kind: prepare_data, record: conversation, sources: [{type: arithmetic, operations: [add], digits: [1], count: 8, seed: 1}]}
  items: {kind: prepare_data, record: item, task: a, sources: [{type: arithmetic, operations: [add], digits: [1], count: 3, seed: 1}]}
  clean: {kind: decontaminate, in: {data: raw, benchmarks: [items]}}
  base: {kind: source_model, source: {type: packaged, asset: smollm2-135m-instruct}}
  sft: {kind: sft, in: {policy: base, data: [clean]}, global_batch: 16, max_length: 64, optimizer: {learning_rate: 1e-5}}
"""


def test_rows_that_will_be_dropped_and_a_batch_larger_than_the_data_are_told_before_anything_trains(tmp_path):
    """Six of eight conversations have about 250 tokens."""
    project = project_at(tmp_path)
    (project.recipes / "lengths.yaml").write_text(LENGTHS)
    graph = load_recipe(project.recipes, "lengths")
    rows = [
        {"id": str(number), "source": "s", "messages": [{"role": "user", "content": "word " * (200 if number < 6 else 2)},
         {"role": "assistant", "content": "yes"}]}
        for number in range(8)
    ]  # fmt: skip
    text = "".join(json.dumps(row) + "\n" for row in rows)
    for name in ("raw", "items", "clean"):
        build(project, graph, graph.find(name), {"rows.jsonl": text}, {}, {"rows": 8})
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    run = open_run(project, Request("lengths"))
    (row,) = [row for row in rows_of(run, plan(run, lenient=True)) if row.shown == "sft"]
    assert row.warnings == (
        "about 75% of its rows are longer than max_length 64 and will be dropped, and the stage will fail",
        "global_batch 16 exceeds its 8 rows, so that an epoch is one step",
    )


POOL = """
execution: cpu
stages:
  pool: {kind: prepare_data, record: prompt, sources: [{type: arithmetic, operations: [add], digits: [2], count: 40, seed: 1}]}
  base: {kind: source_model, in: {corpus: [rows]}, source: {type: random_llama, layers: 1, hidden: 32, heads: 2, kv_heads: 2, ffn: 64,
    vocabulary: 300, context: 64, seed: 1}}
  rows: {kind: prepare_data, record: conversation, sources: [{type: files, path: gone.jsonl}]}
  sample: {kind: sample, in: {policies: [base], prompts: pool}, sampling: {max_tokens: 8}, samples_per_prompt: 1,
    prompts: {count: 30, index: 1}}
"""


def test_what_must_fail_is_refused_before_the_first_stage_runs(pedigree, project, monkeypatch):
    """Prompts 30 to 60 of 40, heads of 16 and a file that is not there."""
    recipe = project / "configs" / "recipes" / "pool.yaml"
    recipe.write_text(POOL)
    wrong = [
        "stage sample: prompts 30 to 60 are configured (count 30, index 1), but the pool has at most 40: lower prompts.count",
        "stage rows: gone.jsonl does not exist: add it",
        "stage sample: the model's head size is 16, but vLLM on a CPU serves 32, 64",
    ]
    _, said = pedigree("run", "pool", code=2)
    assert all(text in said for text in wrong)
    out, err = pedigree("plan", "pool", code=1)
    assert all(f"cannot succeed: {text}" in err and text.removeprefix("stage ") not in out for text in wrong)
    assert "To run these stages" not in out
    stages = {stage["address"]: stage for stage in json.loads(pedigree("plan", "pool", "--json", code=1)[0])["stages"]}
    assert stages["pool/rows"]["problems"] == ["gone.jsonl does not exist: add it, or change the config that names it"]
    assert stages["pool/pool"]["problems"] == [] and len(stages["pool/sample"]["problems"]) == 2
    assert [text.partition(":")[0] for text in stages["pool/sample"]["warnings"]] == ["no stage uses the first 30 prompts"]
    _, said = pedigree("validate", "pool", code=2)
    assert all((text in said) == ("gone" not in text) for text in wrong)
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")  # where nobody is asked
    for arguments in (["deploy", "pool", "--work-pool", "here"], ["serve", "pool"], ["serve", "pool", "--rehearse"]):
        _, said = pedigree(*arguments, code=2)
        assert all((text in said) == ("gone" not in text) for text in wrong)
    assert not (project / "artifacts" / "pool" / "pool").exists()


def test_a_recipe_is_valid_where_its_files_are_not(pedigree, project):
    recipe = POOL.replace("{count: 30, index: 1}", "{count: 30}").replace("heads: 2, kv_heads: 2", "heads: 1, kv_heads: 1")
    (project / "configs" / "recipes" / "away.yaml").write_text(recipe)
    out, err = pedigree("validate", "away")
    assert out == "1 recipe: no problems\n"
    assert "note: gone.jsonl is not on this machine, so it was not checked; `plan` and `run` require it\n" in err
    assert "stage rows: gone.jsonl does not exist" in pedigree("plan", "away", code=1)[1]
    assert "stage rows: gone.jsonl does not exist" in pedigree("run", "away", code=2)[1]


LLAMA = """
description: A model of eight billion parameters.
execution: gpu8
stages:
  suite:
    {kind: prepare_data, record: item, task: sums, sources: [{type: arithmetic, operations: [add], digits: [2], count: 9, seed: 1}]}
  raw:
    kind: prepare_data
    record: conversation
    sources: [{type: hub, repo: allenai/tulu-3-sft-mixture, revision: 55e9fd6d41c3cd1a98270dff07557bc2a1e1ba91, split: train}]
  data: {kind: decontaminate, in: {data: raw, benchmarks: [suite]}}
  base:
    kind: source_model
    source: {type: hub, repo: meta-llama/Llama-3.1-8B, revision: d04e592bb4f6aa9cfee91e2e20afa771667e1d4b}
    dtype: bf16
  sft:
    kind: sft
    in: {policy: base, data: [data]}
    global_batch: 128
    epochs: 2
    max_length: 4096
    too_long: truncate
    optimizer: {learning_rate: 5.0e-6}
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    root = fresh_project(tmp_path_factory.mktemp("plan"))
    (root / "configs" / "recipes" / "llama.yaml").write_text(LLAMA)
    profile = "slots: 2\nmachine: {host_memory_gb: 0.5}\nnumerics: {zero_stage: 1, threads: 1}\n"
    (root / "configs" / "execution" / "narrow.yaml").write_text(profile)
    return root


MODELS = """
execution: cpu
stages:
  packaged: {kind: source_model, source: {type: packaged, asset: smollm2-135m-instruct}, chat_template: tulu}
  kept: {kind: source_model, source: {type: packaged, asset: smollm2-135m-instruct}}
  far: {kind: source_model, source: {type: hub, repo: lab/far, revision: pin me}, chat_template: tulu}
  bare: {kind: source_model, source: {type: folder, path: models/bare}, chat_template: tulu}
  full: {kind: source_model, source: {type: folder, path: models/full}, chat_template: tulu}
"""


def model_folder(root: Path, name: str) -> Path:
    """The files of a model; its weights are none of any."""
    folder = root / "models" / name
    folder.mkdir(parents=True)
    save_file({}, folder / "model.safetensors")
    (folder / "config.json").write_text('{"model_type": "llama", "vocab_size": 3}')
    (folder / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0, "b": 1, "c": 2}}}')
    return folder


def test_a_replaced_template_is_told_and_a_folder_whose_files_do_not_belong_together_refused(project, pedigree):
    """By plan and validate, before anything is loaded; whether a model has a template is told where it is known."""
    (project / "configs" / "recipes" / "models.yaml").write_text(MODELS)
    bare, full = (model_folder(project, name) for name in ("bare", "full"))
    (full / "chat_template.jinja").write_text("{{ messages }}")
    out, _ = pedigree("plan", "models")
    told = [line for line in out.splitlines() if "replaces" in line]
    assert told == [
        "packaged: tulu replaces the model's own chat template",
        "far: tulu replaces the model's own chat template, if it has one",
        "full: tulu replaces the model's own chat template",
    ]
    (full / "tokenizer.json").unlink()
    (bare / "config.json").write_text('{"model_type": "llama", "vocab_size": 49152}')
    for command, code in (("plan", 1), ("validate", 2)):
        _, err = pedigree(command, "models", code=code)
        assert "stage full: models/full: it has no tokenizer (tokenizer.json)" in err
        assert "stage bare: models/bare: the tokenizer has 3 tokens, but the model embeds 49152" in err


def test_a_card_notes_that_the_base_models_template_was_replaced():
    key, mark = "0" * 64, "the model's own chat template was replaced by chatml"
    config = {"source": {"type": "packaged", "asset": "smollm2-135m-instruct"}}
    base = Record(
        kind="source_model", version=3, type="policy", config=config, inputs=(), key=key, content=key, files=(), metrics={}, marks=(mark,)
    )
    edge = Input(port="policy", label="policy", content=key, producer=base.id)
    sft = base.model_copy(update={"kind": "sft", "inputs": (edge,), "key": "1" * 64, "marks": ()})
    entries = {record.id: (record, Run(schema_version=2)) for record in (base, sft)}
    assert f"> **Note:** {mark}" in card(Pedigree(sft.id, entries), "sft")


@pytest.fixture(autouse=True)
def unmeasured(tmp_path, monkeypatch) -> None:
    """No rates that this machine was once measured to have."""
    monkeypatch.setattr(rates, "_place", lambda: tmp_path / "rates.json")


@pytest.fixture
def pedigree(project, tmp_path) -> Callable[..., tuple[str, str]]:
    """Types a command on a machine whose rates are known; what it prints, and what it prints as errors."""
    (tmp_path / "rates.json").write_text(rates.Rates(fp32=50e9, bf16=5e9, bandwidth=1e10).model_dump_json())

    return lambda *arguments, code=0: in_project(project).said(*arguments, code=code)


def test_a_plan_states_memory_steps_and_hours_of_a_model_that_is_not_here(pedigree):
    out, _ = pedigree("plan", "llama")
    (line,) = [line for line in out.splitlines() if line.startswith("sft ") and " x " in line and "GB" in line]
    memory, share = line.split("8 x ")[1].split(" GB, ")
    assert 30 < float(memory) < 45 and share.startswith(("3", "4", "5"))
    # 939,343 rows / 128, rounded up, twice; the data are not here, so that it is a bound, as are tokens: 4096 each
    assert "<14.7k" in line and "<7.7G" in line and line.count("<") == 2 and re.search(r" ~\d+h \d\dm +~4\d\d\.\d\d ", line)
    # as root, and on a file system without reflinks, one output is two files
    assert re.search(r"Disk: about [\d.]+ GB .*, excluding DVC's cache; .* free\.", out)
    assert "DVC's cache doubles the disk usage" in out and "reflinks" in out


def test_imported_recipes_are_planned(project, pedigree):
    recipes = re.findall("^```yaml\n(.*?)^```", (CODE / "docs" / "import.md").read_text(), re.MULTILINE | re.DOTALL)
    (project / "data").mkdir()
    (project / "data" / "pairs.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
    path = project / "configs" / "recipes" / "imported.yaml"
    for recipe, row in zip(recipes, ("sft", "dpo", "reward", "grpo"), strict=True):
        path.write_text(recipe)
        assert f"\n{row} " in pedigree("plan", "imported")[0]
    path.unlink()


def test_the_document_has_every_term(pedigree):
    found = json.loads(pedigree("plan", "llama", "--json")[0])
    (sft,) = [stage for stage in found["stages"] if stage["address"] == "llama/sft"]
    estimate = sft["estimate"]
    assert estimate["parameters"] == 8_030_261_248 and estimate["memory"]["ranks"] == 8
    assert estimate["memory"]["per_rank"]["optimizer"] == 12 * 8_030_261_248 // 8
    assert set(estimate["memory"]["per_rank"]) == {
        "weights", "gradients", "optimizer", "buckets", "activations", "working", "logits", "runtime"
    }  # fmt: skip
    assert estimate["memory"]["peak_bytes"] == sum(estimate["memory"]["per_rank"].values()) < estimate["memory"]["bound_bytes"]
    assert estimate["amounts"]["tokens"] == {"value": 2 * 939_343 * 4096, "how": "at_most"} and estimate["misfit"] is None
    assert sft["disk_bytes"] == 2 * 8_030_261_248 and estimate["checkpoint_bytes"] == 3 * 14 * 8_030_261_248
    hours = estimate["time"]["seconds"] / 3600 * 8
    assert estimate["gpu_hours"] == pytest.approx(hours, abs=0.01) and found["fits"] is True


def test_what_cannot_fit_is_refused_before_anything_starts(project, pedigree):
    out, err = pedigree("plan", "tiny", "--execution", "narrow", code=1)
    assert "24 of 24 stages to run" in out and "does not fit: sft: memory needs" in err and "but has 536.9 MB" in err
    assert json.loads(pedigree("plan", "tiny", "--execution", "narrow", "--json", code=1)[0])["fits"] is False
    _, err = pedigree("run", "tiny", "--execution", "narrow", code=2)
    assert "stage sft: memory needs" in err and "too little" in err
    assert not (project / ".pedigree" / "scratch").exists() and not list((project / "artifacts").glob("*/*/record.json"))


RATED = """
description: Answers that a small reward model and a large language model judge.
execution: gpu8
extends: tiny
stages:
  judge_model:
    kind: source_model
    source: {type: hub, repo: meta-llama/Llama-3.1-70B, revision: d04e592bb4f6aa9cfee91e2e20afa771667e1d4b}
    dtype: bf16
  rated:
    kind: judge
    in: {completions: sample_0, reward_models: [reward], judge: judge_model}
    reward_weight: 1
    rating_weight: 1
    rating: {rubrics: [helpfulness], by: {type: policy}}
"""


def test_a_reward_model_is_not_as_large_as_the_language_model_that_rates_beside_it(project):
    """In torch and in fp32 is the reward model; the judge is in its engine, on four GPUs by the profile."""
    (project / "configs" / "recipes" / "both.yaml").write_text(RATED)
    there = Project(project)
    graph = load_recipe(there.recipes, "both")
    found = Estimates(there, graph, load_execution(there, "gpu8")).of(graph.nodes["both/rated"])
    assert found.facts is not None and found.facts.served is not None and found.misfit is None
    assert found.facts.policy.parameters < 1e7 < found.facts.served.parameters


def test_a_shape_that_nobody_knows_is_said_and_refuses_nothing(project, pedigree):
    recipe = LLAMA.replace("meta-llama/Llama-3.1-8B", "somebody/something")
    (project / "configs" / "recipes" / "unheard.yaml").write_text(recipe)
    out, _ = pedigree("plan", "unheard")
    assert "sft: memory and time are unknown: the shape of somebody/something is unknown until it is downloaded or built" in out


def test_the_report_has_plan_beside_run(tmp_path):
    project, graph = made_at(tmp_path)
    node = next(node for node in graph.nodes.values() if node.kind == "sft")
    folder = project.artifact(node.address)
    run = json.loads((folder / "run.json").read_text())
    run["attempts"][0]["peak"] = {"host": 1_234_000_000}
    (folder / "run.json").write_text(json.dumps(run))
    (folder / "evidence" / "curve.csv").write_text("step,loss,tokens\n1,2.0,700\n2,1.0,811\n")
    page = write_report(project, graph).read_text()
    row = page.split('<section id="plan">')[1].split("<th>sft</th>")[1].split("</tr>")[0]
    assert "1.2 GB" in row and "1,511" in row and "2m 05s" in row


@pytest.mark.parametrize("cell", nightly_after(2, ["inf", "many", "nan", "9" * 140_000, ""]))
def test_a_curve_that_cannot_be_summed_leaves_only_its_cell_empty(tmp_path, cell):
    """Evidence may be others' work: what it says of one stage ends neither the report nor the run that writes it."""
    project, graph = made_at(tmp_path)
    node = next(node for node in graph.nodes.values() if node.kind == "sft")
    (project.artifact(node.address) / "evidence" / "curve.csv").write_text(f"step,loss,tokens\n1,2.0,{cell}\n")
    page = write_report(project, graph).read_text()
    plan = page.split('<section id="plan">')[1]
    assert "2m 05s" in plan.split("<th>sft</th>")[1].split("</tr>")[0] and "<th>dpo_1</th>" in plan


def test_a_record_of_a_run_that_cannot_be_understood_leaves_only_its_row_out(tmp_path):
    project, graph = made_at(tmp_path)
    node = next(node for node in graph.nodes.values() if node.kind == "sft")
    run = project.artifact(node.address) / "run.json"
    said = json.loads(run.read_text())
    said["attempts"][0]["started_at"] = "yesterday"
    run.write_text(json.dumps(said))
    page = write_report(project, graph).read_text()
    assert "<th>dpo_1</th>" in page.split('<section id="plan">')[1]


def test_a_merge_is_as_large_as_what_it_merges(root):
    run = open_run(Project(root), Request("methods"), looking=True)
    rows = {row.shown: row for row in rows_of(run, plan(run))}
    assert rows["soup"].disk_bytes == rows["slerp"].disk_bytes == rows["sft_all"].disk_bytes


def test_a_plan_is_made_in_no_time(project):
    there = project_at(project / "again")
    graph, execution = load_recipe(there.recipes, "demo"), load_execution(there, "gpu8")
    began = time.process_time()
    estimates = Estimates(there, graph, execution)
    for node in graph.nodes.values():
        estimates.of(node)
    assert time.process_time() - began < deadline(1)


def test_packaged_data_that_is_not_here_is_told_with_the_command_that_fetches_it(project, pedigree, monkeypatch, tmp_path):
    """Also that of a stage which waits for others."""
    monkeypatch.setenv("PEDIGREE_CACHE", str(tmp_path / "empty"))
    assets.verified.cache_clear()
    text = """stages:
  first: {kind: prepare_data, record: prompt, sources: [{type: arithmetic, operations: [add], digits: [1], count: 9, seed: 1}]}
  second: {kind: prepare_data, record: prompt, in: {rows: [first]},
    sources: [{type: artifact, input: first}, {type: packaged, asset: ifeval}]}
"""
    (project / "configs" / "recipes" / "bare.yaml").write_text(text)
    said, _ = pedigree("plan", "bare")
    assert f"Not on this machine yet: ifeval. To fetch them, {assets.remedy(['ifeval'])}; `run` requires it.\n" in said
