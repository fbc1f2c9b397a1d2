"""Compile a graph to `dvc.yaml` and `params.yaml`, which are usable with plain DVC.

The default recipe compiles to the `dvc.yaml` at the root of the repository, every other to `artifacts/RECIPE/dvc.yaml`. Each file lists the
stages that its recipe owns; a stage of another recipe is a dependency by path. The command of a stage never states where it runs, because
any change to the command is a new stage to DVC.
"""

import json
import os
import posixpath
import re
import shlex
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from pedigree.configs.base.document import ConfigError, Problem
from pedigree.configs.base.kind import MODELS
from pedigree.configs.base.naming import Model
from pedigree.configs.language.graph import Graph, Node

DEFAULT_RECIPE = "demo"
OUTPUTS = ("payload", "evidence", "record.json", "run.json", "lineage.json")
METRICS = "evidence/metrics.json"
CURVE = "evidence/curve.csv"


def pipeline_file(recipe: str) -> str:
    """Path of a recipe's `dvc.yaml`, relative to the project root."""
    return "dvc.yaml" if recipe == DEFAULT_RECIPE else f"artifacts/{recipe}/dvc.yaml"


def params_file(recipe: str) -> str:
    return f"artifacts/{recipe}/params.yaml"


def source_file(recipe: str) -> str:
    """Records the origin of a variant or of a recipe outside `configs/recipes`; other recipes do not have this file."""
    return f"artifacts/{recipe}/source.json"


def overrides_of(graph: Graph) -> list[str]:
    """The graph's `--set` arguments; parsing them reproduces the graph."""
    return [f"{place}={json.dumps(value)}" for place, value in graph.overrides.items()]


def compile_recipe(graph: Graph) -> dict[str, str]:
    """Path relative to the project root → text, for the stages that the recipe owns; empty if it owns none."""
    if not graph.own:
        return {}
    files = {
        pipeline_file(graph.recipe): _header(graph) + yaml_text(_pipeline(graph)),
        params_file(graph.recipe): _header(graph) + yaml_text({node.name: node.identity() for node in graph.own}),
    }
    if graph.overrides or _is_path(graph.source):
        source = {"recipe": graph.source, "set": overrides_of(graph)}
        files[source_file(graph.recipe)] = json.dumps(source, indent=1) + "\n"
    return files


def write_compiled(root: Path, graphs: Iterable[Graph]) -> list[str]:
    """Write each file whose text changed, atomically; return their paths.

    Raises:
        ConfigError: a recipe outside of `configs/recipes` has the name of one there, or the user's own `dvc.yaml` would be replaced.
    """
    texts: dict[str, str] = {}
    for graph in graphs:
        name = f"configs/recipes/{Path(graph.source).stem}.yaml"
        if _is_path(graph.source) and (root / name).exists():
            raise ConfigError([Problem(graph.source, None, f"has the name of {name}, whose artifacts it would replace: rename it")])
        compiled = compile_recipe(graph)
        texts |= compiled
        if compiled and source_file(graph.recipe) not in compiled:
            (root / source_file(graph.recipe)).unlink(missing_ok=True)  # of a file that has been moved into `configs/recipes` since
    changed = [name for name, text in texts.items() if not _holds(root / name, text.encode())]
    shared = pipeline_file(DEFAULT_RECIPE)  # a project may have a pipeline of its own at its root; `artifacts/RECIPE` is the recipe's
    if shared in changed and not _is_compiled(root / shared):
        raise ConfigError([Problem(shared, None, "is not a compiled file, and would be replaced by one: move it, or rename the recipe")])
    for name in changed:
        _replace(root / name, texts[name])
    return changed


def compiled_stage(node: Node) -> dict[str, Any]:
    """The stage's entry in `dvc.yaml`."""

    def inside(path: str) -> str:
        return _relative(node.recipe, path)

    entry = {
        "desc": f"{node.kind}: {node.output}",
        "cmd": f"pedigree stage {node.address}",
        "deps": [inside(f"artifacts/{parent}/payload") for parent in node.parents] + [inside(file) for file in node.files],
        "params": [{inside(params_file(node.recipe)): [node.name]}],
        "outs": [inside(f"artifacts/{node.address}/{part}") for part in OUTPUTS],
    }
    return {name: part for name, part in entry.items() if part}


def _relative(recipe: str, path: str) -> str:
    """A project path relative to the recipe's `dvc.yaml`."""
    base = posixpath.dirname(pipeline_file(recipe))
    return posixpath.relpath(path, base) if base else path


def _pipeline(graph: Graph) -> dict[str, Any]:
    def inside(node: Node, part: str) -> str:
        return _relative(graph.recipe, f"artifacts/{node.address}/{part}")

    pipeline: dict[str, Any] = {"stages": {node.name: compiled_stage(node) for node in graph.own}}
    pipeline["metrics"] = [inside(node, METRICS) for node in graph.own]
    plots = [{inside(node, CURVE): {"x": "step", "y": curve}} for node in graph.own if (curve := node.declaration.curve)]
    models = {name: _artifact(model, inside(graph.nodes[model.stage], "payload")) for name, model in named_models(graph).items()}
    return pipeline | ({"plots": plots} if plots else {}) | ({"artifacts": models} if models else {})


def named_models(graph: Graph) -> dict[str, Model]:
    """Name → model, for the models made by the recipe's own stages: the recipe's names, else the stage names.

    A model of an extended recipe has its name there.
    """
    own = {node.address: node for node in graph.own if node.output in MODELS}
    by_stage = {node.name.replace("_", "-"): Model(stage=node.address) for node in own.values()}
    found = {name: model for name, model in (graph.models or by_stage).items() if model.stage in own}
    described = {name: model.desc or f"{own[model.stage].output} of {model.stage}" for name, model in found.items()}
    return {name: model.model_copy(update={"desc": described[name]}) for name, model in found.items()}


def _artifact(model: Model, path: str) -> dict[str, Any]:
    """The model's entry in DVC's `artifacts` section."""
    return {"path": path, "type": "model", "desc": model.desc} | ({"labels": list(model.labels)} if model.labels else {})


def _header(graph: Graph) -> str:
    file = graph.source if _is_path(graph.source) else f"configs/recipes/{graph.source}.yaml"
    changes = "".join(f" --set {shlex.quote(change)}" for change in overrides_of(graph))
    return f"# Written by `pedigree compile {graph.source}{changes}` from {file}: edit the recipe, not this file.\n"


_HEADER = re.compile(rb"^# (Written by `pedigree compile|Compiled from) ", re.MULTILINE)
"""Start of the header, now and in version 0.1. A merge conflict may precede it by a line."""


def _is_compiled(path: Path) -> bool:
    """Whether a file may be replaced by a compiled one, because it is one or does not exist."""
    if not os.path.lexists(path):
        return True
    if not stat.S_ISREG(path.lstat().st_mode):
        return False
    with path.open("rb") as file:
        return bool(_HEADER.search(file.read(1024)))


def _is_path(source: str) -> bool:
    return source.endswith((".yaml", ".yml"))


_PLAIN = re.compile(r"(?!\.[\d_])[A-Za-z_./][\w ./+-]*")


class _Dumper(yaml.SafeDumper):
    """Quotes every string that is not a plain word: DVC reads YAML 1.2, which differs from 1.1 in the words that it parses as numbers."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_text(self, text: str) -> yaml.Node:
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=None if _PLAIN.fullmatch(text) else '"')


_Dumper.add_representer(str, _Dumper.represent_text)


def yaml_text(value: Any) -> str:
    """YAML that DVC and the recipe loader both read back as the same value."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, width=1000, allow_unicode=True)


def _holds(path: Path, data: bytes) -> bool:
    """Whether the file contains these bytes; anything but a regular file of the same size is not read."""
    try:
        found = path.lstat()
        return stat.S_ISREG(found.st_mode) and found.st_size == len(data) and path.read_bytes() == data
    except FileNotFoundError:
        return False


def _replace(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(text.encode())
    os.replace(temporary, path)
