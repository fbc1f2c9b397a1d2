"""A kind of stage in a folder of its own, outside the repository: the example of CONTRIBUTING, through every command that reads kinds."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import deadline

from pedigree import stages
from pedigree.configs.base.problems import UsageProblem
from pedigree.configs.language import kinds

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
RECIPE = """
description: Short answers.
execution: cpu
stages:
  sums:
    kind: prepare_data
    record: conversation
    sources: [{type: arithmetic, operations: [add, subtract], digits: [1, 2, 3], count: 40, seed: 1}]
  short: {kind: keep_short, in: {data: sums}, max_characters: 2}
"""
IMITATE = """
from pedigree.configs.base.kind import Kind, gives, port
from pedigree.configs.methods.training import Training, training_plan, training_work


class Imitate(Training):
    "Trains on conversations."


def plan(config):
    return training_plan(config, "conversations")


KIND = Kind(
    name="imitate", version=1, config=Imitate, inputs={"policy": port("policy"), "data": port("conversation")}, output=gives("policy"),
    engine="deepspeed", trains_on=frozenset({"data"}), work=lambda stage: training_work(stage, "data", plan(stage.config)),
    training_plan=plan, family="training",
)
"""
ASK = """
from pedigree.configs.base.frozen import Frozen
from pedigree.configs.base.kind import Kind, gives, port
from pedigree.configs.base.work import SamplingPlan, at_ports, fewer_at, generation, only


class Ask(Frozen):
    "Answers each prompt once."

    longest: int
    prompts: int = 1


def preflight(stage):
    if there := fewer_at(stage, "prompts", stage.config.prompts):
        yield f"prompts is {stage.config.prompts}, but there are {there}"


def plan(config):
    return SamplingPlan("model", "bf16", together=64, answer=config.longest)


KIND = Kind(
    name="ask", version=1, config=Ask, inputs={"prompts": port("prompt"), "model": port("policy")}, output=gives("completion"),
    preflight=preflight, warnings=lambda stage: ["its answers are read by nobody"] * (not stage.readers),
    engine="vllm", work=lambda stage: generation(*at_ports(stage, ("prompts",)), plan(stage.config)), sampling_plan=plan, family="sampling",
    rows=lambda stage: only(stage, "prompts").rows,
)
"""
OF_MODELS = """
description: Stages that use a model, of kinds of ours and of others.
execution: cpu
stages:
  sums:
    kind: prepare_data
    record: conversation
    sources: [{type: arithmetic, operations: [add], digits: [3], count: 40, seed: 1}]
  asked:
    kind: prepare_data
    record: prompt
    sources: [{type: arithmetic, operations: [add], digits: [3], count: 40, seed: 1}]
  base: {kind: source_model, source: {type: packaged, asset: smollm2-135m-instruct}}
  sft: {kind: sft, in: {policy: base, data: sums}, global_batch: 16, max_length: 64, optimizer: {learning_rate: 1e-5}, lora: {rank: 8}}
  imitate:
    {kind: imitate, in: {policy: base, data: sums}, global_batch: 16, max_length: 64, optimizer: {learning_rate: 1e-5}, lora: {rank: 8}}
  sample: {kind: sample, in: {policies: [imitate], prompts: asked}, sampling: {max_tokens: 32}, samples_per_prompt: 1, prompts: {count: 40}}
  ask: {kind: ask, in: {model: imitate, prompts: asked}, longest: 32}
"""
ASKING = """
description: Stages that read answers of a kind of others.
execution: cpu
stages:
  asked:
    kind: prepare_data
    record: prompt
    sources: [{type: arithmetic, operations: [add], digits: [3], count: 40, seed: 1}]
  base: {kind: source_model, source: {type: packaged, asset: smollm2-135m-instruct}}
  ask: {kind: ask, in: {model: base, prompts: asked}, longest: 32}
  judge: {kind: judge, in: {completions: ask}}
  pair: {kind: pair, in: {judgments: judge}}
  best: {kind: best_answers, in: {judgments: judge}, keep: best_of_n}
  kept: {kind: select_prompts, in: {prompts: asked, judgments: judge}, min_mean: 0.1}
"""

MEASURE = """
from pedigree.configs.base.frozen import Frozen
from pedigree.configs.base.kind import Kind, gives, port


class Measure(Frozen):
    "Scores policies in a way of its own."


KIND = Kind(
    name="measure", version=1, config=Measure, inputs={"policies": port("policy", many=True), "suites": port("item", many=True)},
    output=gives("scores"), family="measuring",
)
"""
ADD_ROWS = """
from pedigree.configs.base.frozen import Frozen
from pedigree.configs.base.kind import Kind, gives, port


class AddRows(Frozen):
    "Adds rows of its own to those of another stage."


KIND = Kind(
    name="add_rows", version=1, config=AddRows, inputs={"data": port("conversation")}, output=gives("conversation"), family="data",
    sources=lambda config: [{"type": "files", "path": "more.jsonl"}],
)
"""
ADDED = """
description: Rows that join after decontamination.
execution: cpu
stages:
  base: {kind: source_model, source: {type: packaged, asset: smollm2-135m-instruct}}
  suite:
    kind: prepare_data
    record: item
    task: sums
    sources: [{type: arithmetic, operations: [add], digits: [1], count: 10, seed: 2}]
  sums:
    kind: prepare_data
    record: conversation
    sources: [{type: arithmetic, operations: [subtract], digits: [1], count: 10, seed: 1}]
  clean: {kind: decontaminate, in: {data: sums, benchmarks: [suite]}}
  more: {kind: add_rows, in: {data: clean}}
  sft: {kind: sft, in: {policy: base, data: [more]}, global_batch: 8, max_length: 64, optimizer: {learning_rate: 1e-4}}
  scores: {kind: evaluate, in: {policies: [sft], suites: [suite]}, sampling: {temperature: 0.0, max_tokens: 8}}
"""
MEASURED = """
description: Trains on rows that its evaluation may ask.
execution: cpu
stages:
  sums:
    kind: prepare_data
    record: conversation
    sources: [{type: arithmetic, operations: [add], digits: [3], count: 40, seed: 1}]
  suite: {kind: prepare_data, record: item, task: sums, sources: [{type: arithmetic, operations: [add], digits: [3], count: 9, seed: 2}]}
  base: {kind: source_model, source: {type: packaged, asset: smollm2-135m-instruct}}
  sft: {kind: sft, in: {policy: base, data: sums}, global_batch: 16, max_length: 64, optimizer: {learning_rate: 1e-5}}
  scores: {kind: measure, in: {policies: [sft], suites: [suite]}}
"""


class Project:
    def __init__(self, folder: Path) -> None:
        self.root, kinds = folder / "project", folder / "kinds"
        for block in re.findall(r"```python\n(# keep_short/.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL):
            path = kinds / block.split("\n")[0].removeprefix("# ")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block)
        for name in ("configs/execution/cpu.yaml", ".gitignore", ".dvcignore", ".dvc/config"):
            path = self.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes((ROOT / name).read_bytes())
        (self.root / "configs/recipes").mkdir()
        (self.root / "configs/recipes/short.yaml").write_text(RECIPE)
        subprocess.run(["git", "init", "-q"], cwd=self.root, check=True)
        self.kind = kinds / "keep_short" / "kind.py"
        self.environment = os.environ | {
            "PYTHONPATH": str(ROOT), "PEDIGREE_STAGES": str(kinds), "PEDIGREE_PREFECT": "never", "DVC_NO_ANALYTICS": "1", "COLUMNS": "200",
        }  # fmt: skip

    def __call__(self, *arguments: str, code: int = 0) -> str:
        command = [sys.executable, "-P", "-m", "pedigree.pipelines.cli", *arguments]
        done = subprocess.run(command, cwd=self.root, env=self.environment, capture_output=True, text=True, timeout=deadline(300))
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout or done.stderr


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """Planned, and then run."""
    project = Project(tmp_path_factory.mktemp("added"))
    (_, short) = json.loads(project("plan", "short", "--json"))["stages"]
    assert short["estimate"]["amounts"]["rows"] == {"value": 40, "how": "at_most"}
    ran = json.loads(project("run", "short", "--json"))
    assert {stage["address"]: stage["outcome"] for stage in ran["stages"]} == {"short/sums": "ran", "short/short": "ran"}
    assert {stage["outcome"] for stage in json.loads(project("run", "short", "--json"))["stages"]} == {"unchanged"}
    return project


def test_it_is_planned_rehearsed_run_reported_and_traced(project):
    assert json.loads(project("rehearse", "short", "--json"))["outcome"] == "done"
    metrics = json.loads((project.root / "artifacts/short/short/record.json").read_text())["metrics"]
    assert metrics["rows"] + metrics["dropped"]["long"] == 40 and min(metrics["rows"], metrics["dropped"]["long"]) > 0

    project("report", "short")
    report = (project.root / "artifacts/short/report.html").read_text()
    assert "keep_short" in report and "long" in report

    drops = [json.loads(line) for line in (project.root / "artifacts/short/short/evidence/drops.jsonl").read_text().splitlines()]
    assert "3 characters" in project("trace", drops[0]["id"])


def test_one_that_trains_or_samples_is_estimated_by_what_it_declares(tmp_path):
    """As one of ours that does the same."""
    project = Project(tmp_path)
    for name, text in (("imitate", IMITATE), ("ask", ASK)):
        (project.kind.parents[1] / name).mkdir()
        (project.kind.parents[1] / name / "kind.py").write_text(text)
    (project.root / "configs/recipes/of_models.yaml").write_text(OF_MODELS)
    stages = {stage["kind"]: stage for stage in json.loads(project("plan", "of_models", "--json"))["stages"]}
    for ours, theirs in (("sft", "imitate"), ("sample", "ask")):
        known, found = stages[ours]["estimate"], stages[theirs]["estimate"]
        assert found["memory"] == known["memory"] and found["memory"]["peak_bytes"] > 2 * 134_515_008
        assert (found["time"], found["parameters"]) == (known["time"], 134_515_008)
    assert stages["imitate"]["estimate"]["checkpoint_bytes"] == stages["sft"]["estimate"]["checkpoint_bytes"] > 0
    assert stages["ask"]["warnings"] == ["its answers are read by nobody"]
    assert stages["imitate"]["batch"] == stages["sft"]["batch"].replace("sequences", "conversations")


def test_one_that_cannot_succeed_is_refused_and_what_reads_its_answers_is_planned(tmp_path):
    project = Project(tmp_path)
    (project.kind.parents[1] / "ask").mkdir()
    (project.kind.parents[1] / "ask" / "kind.py").write_text(ASK)
    recipe = project.root / "configs/recipes/asking.yaml"
    recipe.write_text(ASKING)
    rows = {stage["address"]: stage["estimate"]["amounts"]["rows"] for stage in json.loads(project("plan", "asking", "--json"))["stages"]}
    assert rows["asking/best"] == rows["asking/kept"] == {"value": 40, "how": "at_most"} and rows["asking/pair"] is None
    recipe.write_text(ASKING.replace("longest: 32", "longest: 32, prompts: 41"))
    assert "stage ask: prompts is 41, but there are at most 40" in project("run", "asking", code=2)


def test_suites_of_one_that_evaluates_are_kept_from_training_rows(tmp_path):
    project = Project(tmp_path)
    (project.kind.parents[1] / "measure").mkdir()
    (project.kind.parents[1] / "measure" / "kind.py").write_text(MEASURE)
    (project.root / "configs/recipes/measured.yaml").write_text(MEASURED)
    assert "trains on measured/sums, which is not decontaminated against measured/suite" in project("plan", "measured", code=2)


def test_rows_that_one_adds_after_decontamination_are_not_trained_on_unchecked(tmp_path):
    project = Project(tmp_path)
    (project.kind.parents[1] / "add_rows").mkdir()
    (project.kind.parents[1] / "add_rows" / "kind.py").write_text(ADD_ROWS)
    (project.root / "configs/recipes/added.yaml").write_text(ADDED)
    assert "trains on added/more, which is not decontaminated against added/suite" in project("plan", "added", code=2)


def test_its_code_is_in_the_record(project):
    """As a patch against the commit of ours, from which `reproduce` checks it out."""
    lineage = (project.root / "artifacts/short/short/lineage.json").read_text()
    assert "b/stages/keep_short/kind.py" in lineage and "b/stages/keep_short/run.py" in lineage
    assert "stages/keep_short/run.py" in (project.root / "artifacts/short/short/run.json").read_text()


@pytest.mark.nightly
def test_it_is_reproduced_from_its_records_alone(project):
    """Without the folder: the code comes out of the record."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(project.environment, "PEDIGREE_STAGES")
        project("reproduce", str(project.root / "artifacts/short/short"))
    (report,) = (project.root / ".pedigree/reproductions").glob("*.json")
    assert {stage["verdict"] for stage in json.loads(report.read_text())["stages"]} == {"identical"}


def test_a_kind_that_cannot_be_used_is_named(tmp_path):
    project = Project(tmp_path)
    project.kind.write_text(project.kind.read_text().replace("KIND = ", "OTHER = "))
    assert "keep_short/kind.py cannot be used: AttributeError" in project("plan", "short", code=2)


def test_a_kind_of_ours_is_not_replaced(tmp_path, monkeypatch):
    (tmp_path / "sft").mkdir()
    (tmp_path / "sft" / "kind.py").touch()
    monkeypatch.setattr(stages, "__path__", [*stages.__path__, str(tmp_path)])
    with pytest.raises(UsageProblem, match="the kind sft exists already; rename the folder"):
        list(kinds._found())
