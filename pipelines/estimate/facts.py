"""Find the shapes of a stage's models before it runs, from artifacts, folders, the hub cache, or a table of known models."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pedigree.configs.base.project import Project
from pedigree.configs.base.work import Amounts
from pedigree.configs.language.graph import Graph, Node
from pedigree.configs.methods.merging import Merge
from pedigree.configs.methods.policy_gradient import Ppo
from pedigree.configs.methods.training import PreferenceTrain, Rlvr
from pedigree.configs.rows.datasets import FolderModel, HubModel, PackagedModel, RandomLlama, SourceModel
from pedigree.data.sources.hub import FOLDER
from pedigree.data.store.untrusted import SOURCE_BYTES, ArtifactError, read_json
from pedigree.pipelines.estimate.amounts import forms_of
from pedigree.pipelines.estimate.needs import Facts
from pedigree.pipelines.estimate.shapes import PACKAGED, Shape, known_shape, shape_of_config
from pedigree.pipelines.lineage.ancestry import opened

POLICY_PORTS = ("policy", "policies", "candidates", "reward_models", "writer")


@dataclass(frozen=True)
class Unknown:
    """Why a stage's memory cannot be estimated."""

    why: str


def facts_of(project: Project, graph: Graph, node: Node, amounts: Amounts) -> Facts | Unknown | None:
    """Facts of one stage; None if it uses no model."""
    if isinstance(node.config, SourceModel):
        return _facts(project, graph, node, amounts, [node])
    sources = [graph.nodes[edge.source] for edge in node.edges if edge.port in (*POLICY_PORTS, "judge")]
    if not sources or node.kind == "select":
        return None
    return _facts(project, graph, node, amounts, sources)


def _facts(project: Project, graph: Graph, node: Node, amounts: Amounts, sources: list[Node]) -> Facts | Unknown:
    shapes = [shape_of(project, graph, source) for source in sources]
    for source, shape in zip(sources, shapes, strict=True):
        if shape is None:
            return Unknown(f"the shape of {_origin(graph, source)} is unknown until it is downloaded or built")
    beside = [shape for source, shape in zip(sources, shapes, strict=True) if shape and source is not _at(graph, node, "judge")]
    largest = max(beside or [shape for shape in shapes if shape], key=lambda shape: shape.parameters)
    config = node.config
    reference = value = None
    rater = _at(graph, node, "judge")
    if isinstance(config, PreferenceTrain) and not config.loss.reference_free:
        given = _at(graph, node, "reference")
        reference = largest if given is None else None if given.output == "logprobs" else shape_of(project, graph, given)
    if isinstance(config, Rlvr):
        given = _at(graph, node, "reference")
        reference = None if config.algorithm.kl is None else shape_of(project, graph, given) if given else largest
        given = _at(graph, node, "value")
        value = (shape_of(project, graph, given) if given else largest) if isinstance(config.algorithm, Ppo) else None
    return Facts(
        config=config,
        policy=largest,
        reference=reference,
        value=value,
        finer=getattr(sources[0].config, "dtype", "bf16") == "fp32",
        document=amounts.document.value if amounts.document and amounts.document.how != "at most" else None,
        prompt=amounts.prompt.value if amounts.prompt and amounts.prompt.how != "at most" else None,
        requests=amounts.requests.value if amounts.requests else None,
        suites=forms_of(graph, node),
        judge=shape_of(project, graph, rater) if rater else None,
    )


def shape_of(project: Project, graph: Graph, node: Node) -> Shape | None:
    """The shape of the model that a stage produces; None if not known yet."""
    artifact = opened(project, node)
    if artifact is not None:
        shape = _read(artifact.payload / "config.json")
        if shape is not None:
            counted = artifact.record.metrics.get("parameters")
            return shape.counted(counted) if isinstance(counted, int) and counted > 0 else shape
    if isinstance(node.config, SourceModel):
        return _of_source(project, node.config)
    sources = [graph.nodes[edge.source] for edge in node.edges if edge.port in POLICY_PORTS]
    return shape_of(project, graph, sources[0]) if sources else None


def _of_source(project: Project, config: SourceModel) -> Shape | None:
    match config.source:
        case PackagedModel(asset=asset):
            return PACKAGED.get(asset)
        case RandomLlama() as made:
            return Shape(
                layers=made.layers, hidden=made.hidden, heads=made.heads, kv_heads=made.kv_heads, head_dim=made.hidden // made.heads,
                ffn=made.ffn, vocabulary=made.vocabulary, tied=True,
            )  # fmt: skip
        case FolderModel(path=path):
            return _read(project.root / path / "config.json")
        case HubModel(repo=repo, revision=revision):
            mirror = os.environ.get(FOLDER)
            if mirror:
                return _read(Path(mirror) / "models" / repo / "config.json")
            return _read(hub_cache() / f"models--{repo.replace('/', '--')}" / "snapshots" / revision / "config.json") or known_shape(repo)


def hub_cache(environment: Mapping[str, str] = os.environ) -> Path:
    """Cache folder of `huggingface_hub`."""
    home = Path(environment.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    return Path(environment.get("HF_HUB_CACHE") or home / "hub")


def _read(path: Path) -> Shape | None:
    try:
        found: Any = read_json(path.resolve(), SOURCE_BYTES)  # the hub cache uses symlinks
    except (ArtifactError, OSError):
        return None
    return shape_of_config(found) if isinstance(found, dict) else None


def _at(graph: Graph, node: Node, port: str) -> Node | None:
    return next((graph.nodes[edge.source] for edge in node.edges if edge.port == port), None)


def _origin(graph: Graph, node: Node) -> str:
    """Display name of the source of a model."""
    while not isinstance(node.config, SourceModel):
        above = [graph.nodes[edge.source] for edge in node.edges if edge.port in POLICY_PORTS]
        if not above or isinstance(node.config, Merge):
            return node.name
        node = above[0]
    source = node.config.source
    return str(getattr(source, "repo", None) or getattr(source, "path", None) or getattr(source, "asset", None) or node.name)
