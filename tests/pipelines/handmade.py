"""A project with artifacts written by hand: what the report, the plan and the export read, without running a stage."""

import atexit
import json
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from projects import pin_threads

from pedigree.configs.base.project import Project
from pedigree.configs.language.graph import Graph, Node
from pedigree.configs.language.recipe import load_recipe
from pedigree.configs.language.stated_sources import licences_of
from pedigree.data.artifacts.artifacts import (
    Input,
    Record,
    content_hash,
    open_artifact,
    read_json,
    scan,
    stage_key,
    write_json,
    write_rows,
)
from pedigree.pipelines.estimate import machines
from pedigree.pipelines.publish.export import export

ROOT = Path(__file__).parents[2]


RUN = {
    "schema_version": 1,
    "numerics": {"device": "cpu", "threads": 2, "world_size": 1, "zero_stage": 1},
    "attempts": [
        {
            "started_at": "2026-01-02T03:04:05+00:00",
            "ended_at": "2026-01-02T03:06:10+00:00",
            "code": {"commit": "0123456789abcdef0123456789abcdef01234567", "dirty": False, "patch_sha256": None},
        }
    ],
    "environment": {"python": "3.11.7", "libraries": {"torch": "2.13.0"}, "locks": {}},
    "hardware": {"cpu": "A processor", "cores": 2, "memory_gib": 23.5},
}


def project_at(folder: Path) -> Project:
    """An empty project with the shipped recipes and profiles."""
    (folder / ".dvc").mkdir(parents=True)
    for name in ("recipes", "execution"):
        target = folder / "configs" / name
        target.mkdir(parents=True)
        for path in (ROOT / "configs" / name).glob("*.yaml"):
            (target / path.name).write_text(path.read_text())
    pin_threads(folder)
    return Project(folder)


def build(
    project: Project,
    graph: Graph,
    node: Node,
    payload: dict[str, str],
    evidence: dict[str, Any],
    metrics: dict[str, Any],
    marks: Sequence[str] = (),
) -> None:
    """Publishes one artifact; its parents must be there."""
    folder = project.artifact(node.address)
    for name, text in payload.items():
        (folder / "payload" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "payload" / name).write_text(text)
    (folder / "evidence").mkdir(parents=True)
    for name, value in evidence.items():
        if isinstance(value, str):
            (folder / "evidence" / name).write_text(value)
        elif name.endswith(".jsonl"):
            write_rows(folder / "evidence" / name, value)
        else:
            write_json(folder / "evidence" / name, value)
    inputs = []
    for edge in node.edges:
        record = open_artifact(project.artifact(edge.source)).record
        inputs.append(Input(port=edge.port, label=edge.label, content=record.content, producer=record.id))
    files = scan(folder / "payload")
    config = node.config.model_dump(mode="json")
    key = stage_key(node.kind, 1, config, [(edge.port, edge.label, edge.content) for edge in inputs], {})
    record = Record(
        kind=node.kind, version=1, type=node.output, config=config, inputs=tuple(inputs), key=key,
        content=content_hash(files), files=files, metrics=metrics, marks=tuple(marks),
    )  # fmt: skip
    artifacts: dict[str, Any] = {}
    for edge in node.edges:
        parent = open_artifact(project.artifact(edge.source))
        artifacts |= json.loads((parent.path / "lineage.json").read_text())["artifacts"]
        run = json.loads((parent.path / "run.json").read_text())
        artifacts[parent.record.id] = {"record": parent.record.model_dump(mode="json"), "run": run}
    write_json(folder / "lineage.json", {"schema_version": 1, "artifacts": artifacts})
    write_json(folder / "run.json", RUN)
    write_json(folder / "record.json", record.model_dump(mode="json"))


def everything(project: Project, recipe: str = "tiny") -> Graph:
    """All stages of a recipe, with plausible content of each kind."""
    graph = load_recipe(project.recipes, recipe)
    for index, node in enumerate(graph.nodes.values()):
        payload, evidence, metrics = CONTENT[node.kind](node, index)
        build(project, graph, node, payload, evidence, metrics)
    return graph


def made_at(folder: Path, recipe: str = "tiny") -> tuple[Project, Graph]:
    """A project with `everything` of a recipe."""
    project = project_at(folder)
    shutil.copytree(_artifacts_of(recipe), project.artifacts)
    return project, load_recipe(project.recipes, recipe)


@cache
def _artifacts_of(recipe: str) -> Path:
    """Made once in this process."""
    folder = Path(tempfile.mkdtemp(prefix="pedigree-handmade-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    project = project_at(folder)
    everything(project, recipe)
    return project.artifacts


def ran_here(project: Project, numerics: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on all artifacts were made on this machine, under these numerics."""
    monkeypatch.setattr(machines, "this_cpu", lambda: ("A processor", 2))
    for path in project.artifacts.glob("*/*/run.json"):
        path.write_text(json.dumps(read_json(path) | {"numerics": numerics}))


def in_lines(rows: Iterable[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def made_of(
    folder: Path, recipe: str, rows: Mapping[str, Iterable[dict[str, Any]]], evidence: Mapping[str, dict[str, Any]] | None = None
) -> tuple[Project, Graph]:
    """A project with no recipe but this one, `lab`: the rows of its stages by name, and weights in the others; evidence by name."""
    project = project_at(folder)
    for path in project.recipes.glob("*.yaml"):
        path.unlink()
    (project.recipes / "lab.yaml").write_text(recipe)
    graph = load_recipe(project.recipes, "lab")
    for node in graph.nodes.values():
        weights = {"model.safetensors": node.name, "config.json": "{}"}
        payload = {"rows.jsonl": in_lines(rows[node.name])} if node.name in rows else weights
        build(project, graph, node, payload, (evidence or {}).get(node.name, {}), {})
    return project, graph


WON = [
    {"policy": one, "against": other, "prompts": 40, "mean": mean, "low": mean - 0.1, "high": mean + 0.1}
    for one, other, mean in (("sft", "<i>base", 0.75), ("<i>base", "sft", 0.25))
]


def _rows(node: Node, index: int):
    said = [{"role": "user", "content": f"What is {index} + 4?"}]
    rows = "".join(json.dumps({"id": f"{node.name}-{i}", "messages": said}) + "\n" for i in range(20 + index))
    counts = {
        "read": 24 + index,
        "kept": 20 + index,
        "drops": {"exact_duplicates": 3},
        "out_of_turn": {"same_role: join": 2},
        "sources": {"arithmetic": 20 + index},
        "per_source": [{"source": "arithmetic", "left_out": {"too odd": 1}, "in": 24, "dropped": {}, "kept": 20}],
    }
    report = {
        "read": 24,
        "rows": 22,
        "removed": 2,
        "planted_leaks": 2,
        "leaks_found": 2,
        "benchmarks": {"suite": {"items": 40, "items_overlapped": 1, "share_overlapped": 0.025, "rows_removed": 2}},
    }
    manifest = [{"id": "r1", "source": "leaks", "benchmark": "suite", "task": "t", "item": "i1", "score": 0.83, "matched": "<i>what is"}]
    verdict = {"suite": "x", "success": True, "rows": 20, "expectations": [{"expectation": "unique", "column": "id", "success": True}]}
    evidence = {
        "prepare_data": {"counts.json": counts, "statistics.json": {"all": {"characters": {"p50": 31, "p99": 907, "max": 1234}}}},
        "judge": {"win_rates.json": WON},
        "decontaminate": {"report.json": report, "manifest.jsonl": manifest},
    }.get(node.kind, {})
    metrics = {"rows": 20 + index} | ({"validation": verdict} if node.kind == "prepare_data" else {})
    return {"rows.jsonl": rows}, evidence, metrics


def _model(node: Node, index: int):
    lines = [f"{step},{4 / step + index / 10},{1 + (step * 7 % 5) / 9},{1e-4}" for step in range(1, 60)]
    curve = "\n".join(["step,loss,grad_norm,learning_rate", *lines])
    if node.kind == "rlvr":
        curve = "step,reward,kl\n" + "".join(f"{s},{0.3 + s / 100},{s / 1e4}\n" for s in range(1, 41))
    files = {"model.safetensors": f"weights of {node.name}", "config.json": "{}"}
    if node.kind == "reward_model":
        files["reward_stats.json"] = json.dumps({"mean": 0.0, "std": 1.0, "read_at": "conversation"})
    return files, {"curve.csv": curve}, {"steps": 59}


def _scores(node: Node, index: int):
    labels = [edge.label for edge in node.edges if edge.port == "policies"]
    task = "arithmetic"
    policies = {
        label: {"content": "0" * 64, "tasks": {task: {"n": 40, "mean": 0.1 + 0.15 * i, "low": 0.05 + 0.15 * i, "high": 0.2 + 0.15 * i}},
                "mean": 0.1 + 0.15 * i}
        for i, label in enumerate(labels)
    }  # fmt: skip
    differences = [
        {"candidate": b, "baseline": a, "task": task, "mean": 0.15, "low": -0.02 if i % 2 else 0.06, "high": 0.24, "n": 40}
        for i, (a, b) in enumerate(pairwise(labels))
    ]
    samples = [
        {"id": f"i{i}", "task": task, "policy": label, "messages": [{"role": "user", "content": f"What is {i} + 4? <b>&"}],
         "text": f"{i + 4}" if (n + i) % 3 else "banana", "answer": None, "score": 1.0 if (n + i) % 3 else 0.0, "reason": "no number"}
        for i in range(9) for n, label in enumerate(labels)
    ]  # fmt: skip
    return {"scores.json": json.dumps({"policies": policies, "differences": differences})}, {"samples.jsonl": samples}, {"items": 40}


MADE_OF_ROWS = """prepare_data decontaminate find_rephrased constrain synthesize sample judge pair best_answers select_prompts select_rows
overoptimization reference_logprobs"""
CONTENT = dict.fromkeys(MADE_OF_ROWS.split(), _rows)
CONTENT |= dict.fromkeys(("source_model", "sft", "reward_model", "preference_train", "rlvr", "select"), _model)
CONTENT |= {"evaluate": _scores}


THEIRS = """
execution: cpu
stages:
  suite: {kind: prepare_data, record: item, task: t, sources: [{type: arithmetic, operations: [add], digits: [1], count: 3, seed: 2}]}
  rows: {kind: prepare_data, record: conversation, sources: [{type: files, path: rows.jsonl, licence: cc-by-nc-4.0}]}
  clean: {kind: decontaminate, in: {data: rows, benchmarks: [suite]}}
  base: {kind: source_model, source: {type: hub, repo: lab/model, revision: REVISION, licence: llama3.1}}
  sft: {kind: sft, in: {policy: base, data: [clean]}, global_batch: 2, max_length: 8, optimizer: {learning_rate: 1e-4}}
""".replace("REVISION", "a" * 40)
WEIGHTS = {"model.safetensors": "w", "config.json": "{}"}


def exported(folder: Path) -> Path:
    """The export of a model of another project."""
    project = project_at(folder / "theirs")
    (project.recipes / "lab.yaml").write_text(THEIRS)
    graph = load_recipe(project.recipes, "lab")
    for node in graph.nodes.values():
        build(project, graph, node, WEIGHTS if node.output == "policy" else {"rows.jsonl": in_lines([{"id": "a"}])}, {}, {})
        run = project.artifact(node.address) / "run.json"
        write_json(run, read_json(run) | {"address": node.address, "licences": licences_of(node.config)})
    return export(project.artifact("lab/sft"), "lab/sft", folder / "exported")
