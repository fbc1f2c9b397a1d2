"""The recipes of published work, each rehearsed whole with real jobs of every stage; what several of them share is made once."""

import json
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
from projects import BIN, call, contents, environment, fresh_project
from sweeps import nightly_after
from waiting import until

from pedigree.configs.language.graph import Graph
from pedigree.configs.language.recipe import load_recipe
from pedigree.pipelines.jobs.processes import kill_all

FEWER = """
description: Tülu 3.1 8B with three of its suites, on which one model is evaluated
extends: tulu31_8b
stages:
  minerva_math: null
  humaneval: null
  humanevalplus: null
  mmlu: null
  popqa: null
  truthfulqa: null
  bbh: null
  drop: null
  agieval: null
  gpqa: null
  deepmind_math: null
  conversations: {in: {benchmarks: &suites [gsm8k, ifeval, mmlu_pro]}}
  preferences: {in: {benchmarks: *suites}}
  prompts: {in: {benchmarks: *suites}}
  scores: {in: {policies: [rlvr_grpo], suites: [gsm8k, ifeval]}}
  chosen: {in: {candidates: [rlvr_grpo]}, task: [gsm8k, ifeval]}
  unseen_scores: {in: {suites: [mmlu_pro]}}
"""
REHEARSED = Path(".pedigree") / "rehearsals" / "gpu8"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh clone in which one recipe after the other is rehearsed."""
    root = fresh_project(tmp_path_factory.mktemp("rehearsals") / "clone")
    (root / "configs/recipes/fewer.yaml").write_text(FEWER)
    subprocess.run("git add -A && git -c user.name=t -c user.email=t@t commit -qm fewer", shell=True, cwd=root, check=True)
    return root


@pytest.mark.parametrize("recipe", nightly_after(1, ["fewer", "tulu3_8b", "tulu3_8b_onpolicy", "olmo2_1b", "tulu31_8b"]))
def test_a_recipe_of_published_work_is_rehearsed_whole(project, recipe):
    graph: Graph = load_recipe(project / "configs" / "recipes", recipe)
    printed = call(project, "pedigree", "rehearse", recipe, "--json")
    document, _ = json.JSONDecoder().raw_decode(printed)  # what stands before the progress that went to stderr
    assert document["outcome"] == "done" and len(document["stages"]) == len(graph.nodes)
    proved = document["proved"]
    assert sum(len(one["refused"]) for one in proved["rows"]) >= 5
    assert all(one["rows"] >= 1 for one in proved["decontamination"])  # the leak that was put into each set
    trained = [one for one in proved["models"] if one["kind"] in ("sft", "preference_train", "rlvr")]
    assert len({one["template"] for one in trained}) == 1
    assert {(one["ranks"], one["zero_stage"]) for one in proved["training"]} == {(2, 3)}
    outcomes = [counts.get("right", 0) for counts in proved["verifiers"].values()]
    assert {"gsm8k", "ifeval"} | (set() if recipe == "fewer" else {"math", "python"}) <= set(proved["verifiers"]) and any(outcomes)
    assert {one["task"] for one in proved["suites"]} == {node.name for node in graph.nodes.values() if node.output == "item"}
    assert not (project / "artifacts").exists()
    assert subprocess.run(["git", "status", "--short"], cwd=project, capture_output=True, text=True, check=True).stdout == ""


@pytest.mark.nightly
def test_a_recipe_of_data_alone_is_rehearsed_too(project):
    graph = load_recipe(project / "configs" / "recipes", "tulu3_data")
    document, _ = json.JSONDecoder().raw_decode(call(project, "pedigree", "rehearse", "tulu3_data", "--json"))
    assert document["outcome"] == "done" and len(document["stages"]) == len(graph.nodes) and not document["proved"]["models"]
    removed = {one["stage"]: one["rows"] for one in document["proved"]["decontamination"]}
    assert [removed.pop(name) for name in ("written_clean", "written")] == [0, 0]  # a leak is put into sets, not into what is written
    assert len(removed) == 3 and all(removed.values())
    assert "expectations.0.severity" in json.dumps(document["proved"]["not_proved"])


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("recipe", "stage", "made"),
    [
        ("tulu3_8b", "rlvr_ppo", "checkpoints/step-*"),
        ("tulu3_8b_onpolicy", "scores", "chunks/*.json"),
        ("olmo2_1b", "sft", "checkpoints/step-*"),
    ],
)
def test_killed_while_its_jobs_compute_and_typed_again_it_ends_in_the_same_bytes(project, tmp_path, recipe, stage, made):
    call(project, "pedigree", "rehearse", recipe)
    other = shutil.copytree(project, tmp_path / "clone", symlinks=True)
    command = ["rehearse", recipe, "--set", f"{stage}.seed=9"]
    call(project, "pedigree", *command)

    process = subprocess.Popen([str(BIN / "pedigree"), *command], cwd=other, env=environment(), stderr=subprocess.DEVNULL)
    scratch = at_work(other / REHEARSED, stage, made, process)
    process.kill()
    process.wait()
    kill_all(scratch)
    assert not (scratch / "done.json").exists()
    printed = call(other, "pedigree", *command)
    assert f"{stage} " in printed and "up to date" in printed

    (variant,) = {path.parent.parent.name for path in (project / REHEARSED / "artifacts").glob(f"{recipe}-*/*/record.json")}
    assert contents(other / REHEARSED, variant) == contents(project / REHEARSED, variant) != {}


def at_work(project: Path, stage: str, made: str, process: "subprocess.Popen[bytes]") -> Path:
    """The folder of a stage's job, once it has kept a first part of its work."""

    def found() -> Path | None:
        for spec in project.glob(".pedigree/scratch/*/spec.json"):
            with suppress(FileNotFoundError):  # a job that has ended since
                if json.loads(spec.read_text())["address"].endswith(f"/{stage}") and any(spec.parent.glob(made)):
                    return spec.parent
        return None

    scratch = until(found, 600, alive=lambda: process.poll() is None)
    assert scratch is not None
    return scratch
