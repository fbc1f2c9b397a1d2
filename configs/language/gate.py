"""The decontamination gate: whatever is trained on was checked against every suite that the recipe reports, and every unseen one."""

from collections.abc import Iterator, Mapping

from pedigree.configs.base.kind import DATASETS
from pedigree.configs.language.graph import Complaint, Node
from pedigree.configs.language.suites import unseen_suites
from pedigree.configs.rows.datasets import PrepareData

ROWS = DATASETS - {"item"} | {"completion", "judgment"}


def complaints(nodes: Mapping[str, Node]) -> Iterator[Complaint]:
    """Inputs of training that are not decontaminated against a suite. `nodes` has parents before children."""
    reported = {edge.source for node in nodes.values() if node.output == "scores" for edge in node.edges if edge.port == "suites"}
    reported.update(unseen_suites(nodes))
    covered = _covered(nodes)
    for node in nodes.values():
        for edge in node.edges:
            if edge.port in node.declaration.trains_on:
                for missing in sorted(reported - covered[edge.source]):
                    what = f"trains on {edge.source}, which is not decontaminated against {missing}"
                    yield node, ("in", edge.port), f"{what}: put a `decontaminate` stage with that benchmark before it"


def _covered(nodes: Mapping[str, Node]) -> dict[str, set[str]]:
    """By address, the suites against which every row that led to this dataset was checked."""
    found: dict[str, set[str]] = {}
    for node in nodes.values():
        covers = [found[edge.source] for edge in node.edges if nodes[edge.source].output in ROWS]
        if node.declaration.unchecked or (isinstance(node.config, PrepareData) and node.config.brings_in):
            covers.append(set())
        checked = {edge.source for edge in node.edges if edge.port == "benchmarks"} if node.declaration.decontaminates else set()
        found[node.address] = (set.intersection(*covers) if covers else set()) | checked
    return found
