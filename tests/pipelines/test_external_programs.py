"""The recipe of docs/external.md: TRL trains, lm-evaluation-harness measures, and a kill in between is resumed."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import deadline, until

from pedigree.pipelines.jobs.processes import kill_all

pytestmark = [pytest.mark.slow, pytest.mark.nightly]
ROOT = Path(__file__).resolve().parents[2]
TASK = """
task: sums
dataset_path: json
dataset_kwargs: {data_files: {test: scripts/tasks/sums.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: ["2", "3", "4"]
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}]
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name in ("configs/execution/cpu.yaml", "configs/recipes/tiny.yaml", ".gitignore", ".dvcignore", ".dvc/config"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    page = (ROOT / "docs/external.md").read_text()
    recipe, script = (re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)[0] for language in ("yaml", "python"))
    rows = "".join(json.dumps({"question": f"What is 1 + {number + 1}?", "answer": number}) + "\n" for number in range(3))
    files = {"configs/recipes/mine.yaml": recipe, "scripts/measure.py": script}
    for name, text in (files | {"scripts/tasks/sums.yaml": TASK, "scripts/tasks/sums.jsonl": rows}).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    return tmp_path


def start(project: Path, *arguments: str) -> "subprocess.Popen[str]":
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "PEDIGREE_PREFECT": "never",
        "DVC_NO_ANALYTICS": "1",
        "HF_HOME": str(project / "hf"),
    }
    command = [sys.executable, "-P", "-m", "pedigree.pipelines.cli", *arguments]
    return subprocess.Popen(command, cwd=project, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def said(project: Path, *arguments: str) -> str:
    process = start(project, *arguments)
    out, _ = process.communicate(timeout=deadline(900))
    assert process.returncode == 0, out
    return out


def test_trl_trains_and_the_harness_measures_and_a_kill_in_between_is_resumed(project):
    running = start(project, "run", "mine", "--until", "harness")
    state = until(
        lambda: next(project.glob(".pedigree/scratch/*/output/checkpoint-4/trainer_state.json"), None),
        900,
        alive=lambda: running.poll() is None,
    )
    running.kill()
    running.communicate()
    assert not kill_all(state.parents[2])
    said(project, "run", "mine", "--until", "harness")

    tuned = project / "artifacts/mine/tuned"
    attempts = json.loads((tuned / "run.json").read_text())["attempts"]
    assert attempts[-1]["resumed_from"].startswith("output/checkpoint-")
    assert "trl" in json.loads((tuned / "run.json").read_text())["command_environment"]["libraries"]
    record = json.loads((tuned / "record.json").read_text())
    assert record["type"] == "policy" and {entry["path"] for entry in record["files"]} >= {"model.safetensors", "chat_template.jinja"}
    metrics = json.loads((project / "artifacts/mine/harness/evidence/metrics.json").read_text())
    assert 0 <= metrics["measured"]["sums.acc,none"] <= 1

    assert "up to date, nothing to do" in said(project, "run", "mine", "--until", "harness")
    said(project, "run", "mine", "--until", "further")
    assert (project / "artifacts/mine/further/payload/model.safetensors").exists()
    assert "external command trl" in said(project, "lineage", "mine/further", "--format", "card")
