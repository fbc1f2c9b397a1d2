"""Reject row orders that every training stage would reshuffle."""

from collections.abc import Iterator, Mapping

from pedigree.configs.language.graph import Complaint, Node
from pedigree.configs.methods.training import Training
from pedigree.configs.rows.datasets import PrepareData


def complaints(nodes: Mapping[str, Node]) -> Iterator[Complaint]:
    """Ordered datasets whose every consumer in training shuffles them, with the field at fault. A stage that only drops rows preserves
    order.
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
            remedy = f"set `order: given` there if it has this field, or remove order from {node.name}"
            yield node, ("order",), f"orders its rows, but {trained[0].name} shuffles them: {remedy}"
