"""What stages cost: slots, nodes and all attempts of their jobs, with what they were made from."""

from pathlib import Path
from typing import Any, cast

import pytest
from handmade import RUN, build, project_at

from pedigree.configs.base.work import Amount, Amounts
from pedigree.configs.language.execution import Numerics
from pedigree.configs.language.graph import Node
from pedigree.configs.language.kinds import kind_of
from pedigree.configs.language.recipe import load_recipe
from pedigree.configs.methods.training import Sft
from pedigree.data.artifacts.artifacts import Run, write_json
from pedigree.pipelines.estimate.estimates import Estimate
from pedigree.pipelines.estimate.machines import Hardware
from pedigree.pipelines.estimate.needs import Facts
from pedigree.pipelines.estimate.reality import mfu_of
from pedigree.pipelines.estimate.shapes import Shape
from pedigree.pipelines.lineage import costs
from pedigree.pipelines.lineage.ancestry import read_pedigree

SHAPE = Shape(layers=2, hidden=8, heads=2, kv_heads=2, head_dim=4, ffn=16, vocabulary=100)


def attempt(hours: tuple[int, int], cause: str) -> dict[str, str]:
    return {"started_at": f"2026-01-02T{hours[0]:02}:00:00+00:00", "ended_at": f"2026-01-02T{hours[1]:02}:00:00+00:00", "cause": cause}


def test_failed_attempts_nodes_and_ancestors_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = project_at(tmp_path)
    graph = load_recipe(project.recipes, "tiny")
    child = next(node for node in graph.nodes.values() if len(node.parents) == 1 and not graph.nodes[next(iter(node.parents))].parents)
    parent = graph.nodes[next(iter(child.parents))]
    build(project, graph, parent, {"rows.jsonl": "{}\n"}, {}, {})
    parent_run: dict[str, Any] = RUN | {"placement": {"slots": 4}, "attempts": [attempt((1, 3), "lost"), attempt((4, 5), "succeeded")]}
    write_json(project.artifact(parent.address) / "run.json", parent_run)
    build(project, graph, child, {"rows.jsonl": "{}\n"}, {}, {})
    numerics = RUN["numerics"] | {"nodes": 2}
    child_run: dict[str, Any] = RUN | {"placement": {"slots": 2}, "numerics": numerics, "attempts": [attempt((6, 7), "succeeded")]}
    write_json(project.artifact(child.address) / "run.json", child_run)
    # parent: (2 h + 1 h) x 4 slots; child: 1 h x 2 slots x 2 nodes
    parsed: list[Path] = []
    monkeypatch.setattr(costs, "read_pedigree", lambda folder: parsed.append(folder) or read_pedigree(folder))
    addresses = [parent.address, child.address, "tiny/missing"]
    assert costs.costs_of(project, addresses, 2.5) == {
        parent.address: costs.Cost(12.0, 12.0, 30.0, 30.0),
        child.address: costs.Cost(4.0, 16.0, 10.0, 40.0),
    }
    assert parsed == [project.artifact(child.address)], "the child's lineage has the records of the parent"
    assert costs.costs_of(project, [parent.address], None) == {parent.address: costs.Cost(12.0, 12.0, None, None)}


def test_model_flops_utilization_by_hand() -> None:
    # parameters per token: two layers of 4 x 8 x 8 (attention) + 3 x 8 x 16 (MLP), five norms of 8, a head of 8 x 100: 2120
    # a forward pass of a document of 10 tokens: 2 x 2120 + 2 x 2 layers x 8 x 10 = 4560 a token; training: three times that
    # two steps of 1000 tokens at 500 and 1000 tokens per second: 2000 tokens in 3 s, on two GPUs of 989e12
    config = Sft.model_validate({"global_batch": 2, "max_length": 16, "optimizer": {"learning_rate": 1e-4}})
    facts = Facts(SHAPE, training=kind_of(config).training_plan(config))
    amounts = Amounts(document=Amount(10, "estimated"), tokens=Amount(1, "at most"))
    estimate = Estimate(node=cast(Node, None), hardware=Hardware("cuda"), amounts=amounts, facts=facts, needs=None)
    run = Run.model_validate(RUN | {"hardware": {"gpus": ["NVIDIA H100 80GB HBM3, 81559 MiB, 9.0, 550.54"]}})
    numerics = Numerics(device="cuda", world_size=2, gradient_checkpointing=True)
    found = mfu_of(run, estimate, numerics, [1000, 1000], [500, 1000])
    assert found == pytest.approx(3 * 4560 * 2000 / (3 * 2 * 989e12))
