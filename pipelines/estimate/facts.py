"""Find the shapes of a stage's models before it runs, from artifacts, folders, the hub cache, or a table of known models."""

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pedigree.configs.base.frozen import Dtype
from pedigree.configs.base.kind import MODELS
from pedigree.configs.base.paths import place_of
from pedigree.configs.base.project import Project
from pedigree.configs.base.work import Amounts
from pedigree.configs.language.graph import Graph, Node
from pedigree.configs.rows.source_models import FolderModel, HubModel, PackagedModel, RandomLlama, SourceModel, named
from pedigree.data.sources.hub import FOLDER
from pedigree.data.store.untrusted import SOURCE_BYTES, ArtifactError, read_json
from pedigree.pipelines.estimate.needs import Facts
from pedigree.pipelines.estimate.shapes import PACKAGED, Shape, known_shape, shape_of_config
from pedigree.pipelines.lineage.ancestry import opened


def facts_of(project: Project, graph: Graph, node: Node, amounts: Amounts, due: Collection[str] = ()) -> Facts | str | None:
    """Facts of one stage, or why its memory cannot be estimated; None if it uses no model. The models of `due` stages are taken from the
    recipe, not from existing artifacts."""
    kind, config = node.declaration, node.config
    training, scoring, sampling = kind.training_plan(config), kind.scoring_plan(config), amounts.plan or kind.sampling_plan(config)
    beside = [port for port in ("reference", "teacher", "value") if training and getattr(training, port)]
    queried = kind.served(config)
    ports = [*(["policy"] if training else ()), *(plan.port for plan in (scoring, sampling, *queried) if plan), *beside]
    largest: dict[str, Shape] = {}
    for port, source in _models(graph, node, ports):
        shape = shape_of(project, graph, source, due)
        if shape is None:
            return f"the shape of {_origin(graph, source)} is unknown until it is downloaded or built"
        largest[port] = max(largest.get(port, shape), shape, key=lambda shape: shape.parameters)
    if not largest:
        return None
    policy, above = next(iter(largest.values())), _above(graph, node)
    given = {edge.port for edge in node.edges}  # inputs that are not models, such as log-probabilities, take no memory
    held = {port: largest.get(port, None if port in given else policy) for port in beside}
    return Facts(
        policy=policy,
        training=training,
        scoring=scoring,
        sampling=sampling,
        served=largest.get(sampling.port) if sampling else None,
        queried=tuple((plan, largest[plan.port]) for plan in queried if plan.port in largest),
        reference=held.get("reference"),
        reference_is_policy=_sources(node, "reference") <= _sources(node, "policy"),
        teacher=held.get("teacher"),
        value=held.get("value"),
        rewarding=largest.get(scoring.port) if training and scoring else None,
        rewarding_models=len(_sources(node, scoring.port)) if training and scoring else 0,
        finer=above is not None and _dtype(above) == "fp32",
        document=amounts.document.value if amounts.document and amounts.document.how != "at most" else None,
        prompt=amounts.prompt.value if amounts.prompt and amounts.prompt.how != "at most" else None,
        requests=amounts.requests.value if amounts.requests else None,
        dtype=_dtype(node),
        imported=isinstance(config, SourceModel),
    )


def _sources(node: Node, port: str) -> set[str]:
    return {edge.source for edge in node.edges if edge.port == port}


def _dtype(node: Node) -> Dtype:
    """Compute dtype of a stage in torch, or dtype of the model that it imports."""
    plan = node.declaration.training_plan(node.config) or node.declaration.scoring_plan(node.config)
    return plan.dtype if plan else getattr(node.config, "dtype", "bf16")


def _models(graph: Graph, node: Node, ports: Sequence[str]) -> Iterator[tuple[str, Node]]:
    """(port, source) of the models that a stage uses at these ports, in their order; without ports, of all models that it loads."""
    if isinstance(node.config, SourceModel):
        yield "", node
    for port in ports or (node.declaration.inputs if node.declaration.engine != "none" else ()):
        sources = [graph.nodes[edge.source] for edge in node.edges if edge.port == port]
        yield from ((port, source) for source in sources if source.output in MODELS)


def _above(graph: Graph, node: Node) -> Node | None:
    """The stage whose model this one changes or passes on: the first input at the first port with a model."""
    return next((source for _, source in _models(graph, node, tuple(node.declaration.inputs))), None)


def shape_of(project: Project, graph: Graph, node: Node, due: Collection[str] = ()) -> Shape | None:
    """The shape of the model that a stage produces; None if not known yet."""
    artifact = None if node.address in due else opened(project, node)
    if artifact is not None:
        shape = _read(artifact.payload / "config.json")
        if shape is not None:
            counted = artifact.record.metrics.get("parameters")
            return replace(shape, stated=counted) if isinstance(counted, int) and counted > 0 else shape
    if isinstance(node.config, SourceModel):
        return _of_source(project, node.config)
    above = _above(graph, node)
    return shape_of(project, graph, above, due) if above else None


def files_of(project: Project, graph: Graph, node: Node, due: Collection[str] = ()) -> tuple[Path, bool] | None:
    """(a folder with configuration and tokenizer of the model that a stage produces, whether its import may still add tokens); None if not
    known yet."""
    artifact = None if node.address in due else opened(project, node)
    if artifact is not None:
        return artifact.payload, False
    if isinstance(node.config, SourceModel):
        source = node.config.source
        return (folder_of(project, source), True) if isinstance(source, FolderModel | HubModel) else None
    above = _above(graph, node)
    return files_of(project, graph, above, due) if above else None


def _of_source(project: Project, config: SourceModel) -> Shape | None:
    match config.source:
        case PackagedModel(asset=asset):
            return PACKAGED.get(asset)
        case RandomLlama() as made:
            return Shape(
                layers=made.layers, hidden=made.hidden, heads=made.heads, kv_heads=made.kv_heads, head_dim=made.hidden // made.heads,
                ffn=made.ffn, vocabulary=made.vocabulary, tied=True, context=made.context,
            )  # fmt: skip
        case FolderModel():
            return _read(folder_of(project, config.source) / "config.json")
        case HubModel(repo=repo):
            return _read(folder_of(project, config.source) / "config.json") or (None if os.environ.get(FOLDER) else known_shape(repo))


def folder_of(project: Project, source: FolderModel | HubModel) -> Path:
    """Where the files of a model are, or will be once downloaded."""
    if isinstance(source, FolderModel):
        return place_of(project.root, source.path)
    mirror = os.environ.get(FOLDER)
    if mirror:
        return Path(mirror).expanduser() / "models" / source.repo
    return snapshot_of(source.repo, source.revision)


def snapshot_of(repo: str, revision: str) -> Path:
    return hub_cache() / f"models--{repo.replace('/', '--')}" / "snapshots" / revision


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


def _origin(graph: Graph, node: Node) -> str:
    """Display name of the source of a model."""
    while not isinstance(node.config, SourceModel):
        above = _above(graph, node)
        if above is None:
            return node.name
        node = above
    return named(node.config.source) or node.name
