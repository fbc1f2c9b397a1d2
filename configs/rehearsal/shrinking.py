"""Shrink a recipe for rehearsal on a CPU in minutes: the same graph, with few rows, few steps, short answers and tiny models.

Each kind of stage reduces its own config (`Kind.shrink`). Settings without a recorded change are as in the recipe.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from pedigree.configs.base.frozen import Frozen
from pedigree.configs.base.naming import Model
from pedigree.configs.base.shrink import INPUT, Cut, Reduced, StandIns, rehearsed_name
from pedigree.configs.language.compile import yaml_text
from pedigree.configs.language.execution import Execution
from pedigree.configs.language.graph import Edge, Graph, Node
from pedigree.configs.language.kinds import KINDS

FILE_ROWS = 16
"""Rows of a file of the project, of which some may be bad."""
MOST_SLOTS = 4


# --- stages ------------------------------------------------------------------------------------------------------------


def reduced(node: Node, nodes: Mapping[str, Node], stand_ins: StandIns) -> tuple[dict[str, Any], list[Reduced]]:
    """(fields of a stage's config as a recipe would have them, what was changed)."""
    inputs: dict[str, dict[str, Frozen]] = {}
    for edge in node.edges:
        inputs.setdefault(edge.port, {})[edge.source] = nodes[edge.source].config
    cut = Cut(node.address, node.config, inputs, stand_ins)
    node.declaration.shrink(cut)
    return cut.written, cut.changes


# --- recipes -----------------------------------------------------------------------------------------------------------


def rehearsed(graph: Graph, profile: str, stand_ins: StandIns, inherited: Collection[str] = ()) -> tuple[str, list[Reduced]]:
    """(text of the recipe as it is rehearsed, what was changed in the stages that it owns).

    `profile` is the name of the rehearsal's profile, and `inherited` has the names of the stages of the recipe that it extends.
    """
    stages: dict[str, Any] = {name: None for name in inherited if name not in graph.written}
    changes: list[Reduced] = []
    for node in graph.own:
        body, changed = reduced(node, graph.nodes, stand_ins)
        left_out = {change.setting.removeprefix(INPUT) for change in changed if change.setting.startswith(INPUT)}
        inputs = {"in": _inputs(node, left_out)} if node.edges else {}
        stages[node.name] = {"kind": node.kind} | inputs | body
        changes += changed
    recipe: dict[str, Any] = {"description": f"Rehearsal of {graph.recipe}: {graph.description}", "execution": profile}
    if graph.extends:
        recipe["extends"] = rehearsed_name(graph.extends)
    models = {name: _named(model) for name, model in graph.models.items() if model.stage.startswith(f"{graph.recipe}/")}
    return yaml_text(_filled(recipe | {"models": models}) | ({"stages": stages} if stages else {})), changes


def _named(model: Model) -> dict[str, Any]:
    found = {"stage": model.stage.partition("/")[2], "desc": model.desc, "labels": list(model.labels)}
    return {name: value for name, value in found.items() if value}


def _inputs(node: Node, left_out: Collection[str]) -> dict[str, Any]:
    """The inputs of a stage as written in a recipe, without those at the given ports."""
    ports: dict[str, list[Edge]] = {}
    for edge in (edge for edge in node.edges if edge.port not in left_out):
        ports.setdefault(edge.port, []).append(edge)
    return {port: _at_port(node, edges, node.declaration.inputs[port].many) for port, edges in ports.items()}


def _at_port(node: Node, edges: Sequence[Edge], many: bool) -> Any:
    named = {edge.label: _reference(node, edge) for edge in edges}
    if all(edge.label == edge.source.partition("/")[2] for edge in edges):
        return list(named.values()) if many else next(iter(named.values()))
    return named


def _reference(node: Node, edge: Edge) -> str:
    recipe, _, stage = edge.source.partition("/")
    return stage if recipe == node.recipe else f"{rehearsed_name(recipe)}/{stage}"


# --- profiles ----------------------------------------------------------------------------------------------------------


RANKS, MICRO_TOKENS, MICRO_SEQUENCES = 2, 512, 2
NUMERICS: dict[str, Callable[[Any], Any]] = {
    "device": lambda _: "cpu",
    "world_size": lambda ranks: min(ranks, RANKS),
    "nodes": lambda _: 1,
    "sequence_parallel": lambda _: 1,
    "micro_batch_tokens": lambda tokens: min(tokens, MICRO_TOKENS),
    "micro_batch_sequences": lambda sequences: min(sequences, MICRO_SEQUENCES),
    "offload_optimizer": lambda _: False,
    "kernels": lambda kernels: "torch" if kernels == "liger" else kernels,
    "threads": lambda _: 1,
    "tensor_parallel": lambda _: 1,
    "deterministic": lambda _: False,
}
"""Setting → its value on a two-core CPU; all others are unchanged: ZeRO stage, packing, recomputation, chunks of log-probabilities."""
PLACEMENT = {"engines": 1, "sampler_memory_gb": 0.5, "checkpoint_every_steps": 1}
"""Placement settings that are the same in all rehearsals, which also exercise checkpoints."""
OF_MACHINE = ("slots", "gpu_memory_utilization", "launcher")
"""Placement settings that depend on this machine."""


def rehearsed_profile(execution: Execution, name: str, cores: int, root: Path) -> tuple[str, list[Reduced]]:
    """(text of the profile `name` of the real project in `root` for a CPU with these cores, the changes made)."""
    changes: list[Reduced] = []
    numerics = execution.numerics.model_dump(mode="json", exclude_defaults=True)
    placement = execution.placement.model_dump(mode="json", exclude_defaults=True)
    numerics |= {"threads": execution.numerics.threads}  # changed even if it is the default
    placement |= {setting: getattr(execution.placement, setting) for setting in PLACEMENT}
    found: dict[str, Any] = {"slots": max(RANKS, min(cores, MOST_SLOTS))}
    found |= _on_cpu({"numerics": numerics, "placement": placement}, name, changes)
    found["placement"] |= PLACEMENT
    for part in ("kinds", "stages"):
        overrides = getattr(execution, part)
        found[part] = {key: _on_cpu(override.model_dump(), f"{name}: {key}", changes) for key, override in overrides.items()}
    for kind, declaration in KINDS.items():
        if declaration.engine.startswith("deepspeed"):  # one core per rank; other jobs have one process
            override = found["kinds"].setdefault(kind, {"numerics": {}, "placement": {}})
            override["placement"]["slots"] = (found["numerics"] | override["numerics"]).get("world_size", 1)
    for override in found["stages"].values():
        if "world_size" in override["numerics"]:
            override["placement"]["slots"] = override["numerics"]["world_size"]
    for placed in (found, *found["kinds"].values(), *found["stages"].values()):
        if environment := placed["placement"].get("environment"):
            placed["placement"]["environment"] = str(root / Path(environment).expanduser())
    return yaml_text(_filled(found)), changes


def _on_cpu(given: Mapping[str, Any], where: str, changes: list[Reduced]) -> dict[str, dict[str, Any]]:
    numerics, placement = dict(given.get("numerics", {})), given.get("placement", {})
    for setting, rule in NUMERICS.items():
        if setting in numerics and rule(numerics[setting]) != numerics[setting]:
            changes.append(Reduced(where, setting, numerics[setting], rule(numerics[setting]), "machine"))
            numerics[setting] = rule(numerics[setting])
    for setting, value in PLACEMENT.items():
        if placement.get(setting, value) != value:
            changes.append(Reduced(where, setting, placement[setting], value, "machine"))
    kept = {setting: value for setting, value in placement.items() if setting not in (*PLACEMENT, *OF_MACHINE)}
    return {"numerics": numerics, "placement": kept}


def _filled(given: Mapping[str, Any]) -> dict[str, Any]:
    """The same without empty sections."""
    inner = {name: _filled(value) if isinstance(value, dict) else value for name, value in given.items()}
    return {name: value for name, value in inner.items() if value != {}}
