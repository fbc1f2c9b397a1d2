"""Orders of rows: one that a recipe asks for, and that every stage which trains on the rows would shuffle away, says what is not so."""

from collections.abc import Iterator, Mapping

from configs.base.document import Place
from configs.language.graph import Node
from configs.methods.training import Training
from configs.rows.datasets import PrepareData


def complaints(nodes: Mapping[str, Node]) -> Iterator[tuple[Node, Place, str]]:
    """Every set of rows whose order nothing keeps that trains on them, with the field that it is about. Stages that leave rows out keep it.

    Args:
        nodes: parents before children.
    """
    readers: dict[str, list[Node]] = {}
    for node in reversed(list(nodes.values())):
        below = readers.get(node.address, [])
        for edge in node.edges:
            kept = edge.port == node.declaration.subset_of
            readers.setdefault(edge.source, []).extend([node, *(below if kept else [])])
        if not isinstance(node.config, PrepareData) or node.config.order == "shuffled":
            continue
        trained = [reader for reader in below if reader.declaration.trains]
        if trained and not any(isinstance(reader.config, Training) and reader.config.order == "given" for reader in trained):
            remedy = f"set `order: given` there if it has this field, or leave order of {node.name} out"
            yield node, ("order",), f"puts its rows in an order, and {trained[0].name} shuffles them: {remedy}"
