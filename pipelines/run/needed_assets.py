"""Packaged assets that the jobs of stages open, and those of them that are missing on this machine."""

from collections.abc import Collection, Iterator

from pedigree.configs.base.frozen import Frozen
from pedigree.configs.base.packaged import EMBEDDER
from pedigree.configs.base.problems import PedigreeError
from pedigree.configs.judging.constraining import Constrain
from pedigree.configs.judging.rephrased import FindRephrased
from pedigree.configs.language.execution import Execution
from pedigree.configs.language.graph import Graph, Node
from pedigree.configs.language.stated_sources import stated_sources
from pedigree.configs.rows.datasets import PrepareData
from pedigree.configs.rows.overlap_criteria import Decontaminate
from pedigree.configs.rows.row_sources import Packaged, Read, RowProgram
from pedigree.data.artifacts import assets

IFEVAL = "ifeval"
SENTENCES = "punkt"
"""The asset with which IFEval's checks tell sentences apart."""


def missing_assets(graph: Graph, addresses: Collection[str], execution: Execution) -> Iterator[tuple[Node, str, str]]:
    """Each of these stages with an asset that it needs, and what is wrong with that asset on this machine."""
    for node in (node for address, node in graph.nodes.items() if address in addresses):
        launcher = execution.of(node.kind, node.name)[1].launcher
        if launcher.type == "kubernetes" and launcher.python:
            continue  # the image has assets of its own
        for name in _needed(graph, node):
            if problem := _problem(name):
                yield node, name, problem


def _problem(name: str) -> str:
    try:
        assets.verified(name)
    except PedigreeError as error:
        return str(error)
    return ""


def _needed(graph: Graph, node: Node) -> Iterator[str]:
    config = node.config
    yield from dict.fromkeys(source["asset"] for source in stated_sources(config) if source.get("type") == "packaged")
    if isinstance(config, FindRephrased) or (isinstance(config, Decontaminate) and config.embedded is not None):
        yield from EMBEDDER.values()
    scored = [edge.source for edge in node.edges if edge.port in node.declaration.verified(config)]
    if any(_may_name_ifeval(graph.nodes[address].config) for address in graph.ancestors(scored)):
        yield SENTENCES


def _may_name_ifeval(config: Frozen) -> bool:
    """Whether rows of a stage can name the verifier of IFEval: where a column names it, the rows are not here yet."""
    if isinstance(config, Constrain):
        return True
    if not isinstance(config, PrepareData):
        return False
    if config.the_form:
        return any(metric.verifier == IFEVAL for metric in config.the_form.metrics.values())
    return config.record in ("prompt", "item") and any(
        source.verifier is None if isinstance(source, Read) else isinstance(source, RowProgram) or _is_ifeval(source)
        for source in config.sources
    )


def _is_ifeval(source: object) -> bool:
    return isinstance(source, Packaged) and source.asset == IFEVAL
