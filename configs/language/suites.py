"""Dev and unseen suites: permitted uses of each, the decontamination gate, and the number of looks that a recipe takes at an unseen suite.

Whatever is trained on was checked against every suite that the recipe reports, and every unseen one. Models are chosen on dev suites. An
unseen suite only measures the chosen model; no decision may depend on it. A look is one model scored on the suite by one evaluation;
counting looks shows how many chances there were to pick a lucky model.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from pedigree.configs.base.frozen import canonical_json
from pedigree.configs.base.kind import DATASETS
from pedigree.configs.language.graph import Complaint, Node
from pedigree.configs.language.kinds import imports_rows
from pedigree.configs.rows.datasets import PrepareData, title
from pedigree.configs.rows.mixing import DRAWING
from pedigree.configs.rows.overlap_criteria import Waiver
from pedigree.configs.rows.row_sources import Hub

DRAWN = ("packaged", "files", "stored", "hub")
"""Source types with stored rows: two draws of them may contain the same rows."""
DRAW = {"columns", "config", "config_as", *DRAWING, "generator", "licence", "max_bad_rows", "revision", "seed", "split", "split_as", "url"}
"""Fields of those sources that do not identify the location. Each configuration and split of a dataset is its own location, at any
commit."""

CHECKED = DATASETS - {"item"} | {"completion", "judgment"}
"""Types of artifacts whose rows the gate follows."""
AMOUNT = ("count", "licence", "max_bad_rows")
"""Fields of a program source under which it may produce the same rows."""


def unseen_suites(nodes: Mapping[str, Node]) -> list[str]:
    """Addresses of the stages that make unseen suites."""
    return [address for address, node in nodes.items() if isinstance(node.config, PrepareData) and node.config.split == "unseen"]


def looks(nodes: Mapping[str, Node]) -> dict[str, list[tuple[str, str]]]:
    """Unseen suite → (evaluation, model) of each look at it, by address; suites without looks are included."""
    found: dict[str, list[tuple[str, str]]] = {suite: [] for suite in unseen_suites(nodes)}
    for node in nodes.values():
        if node.output == "scores":
            for suite in _at(node, "suites"):
                if suite in found:
                    found[suite] += [(node.address, policy) for policy in _at(node, "policies")]
    return found


def complaints(nodes: Mapping[str, Node]) -> Iterator[Complaint]:
    """Every use of an unseen suite that would turn it into a dev suite, and rows of training that a suite may repeat, with the field at
    fault."""
    unseen = set(unseen_suites(nodes))
    yield from _trained(nodes, unseen)
    for node in nodes.values():
        if node.output == "scores":
            yield from _evaluated(node, nodes, unseen)
        for edge in node.edges:
            if edge.port == "scores":
                for suite in sorted(unseen.intersection(_at(nodes[edge.source], "suites"))):
                    yield node, ("in", "scores"), f"{edge.source} scores the unseen suite {suite}: select by an evaluation on dev suites"
            if edge.port == "leak_from" and edge.source in unseen:
                yield node, ("in", "leak_from"), f"plants items of the unseen suite {edge.source} in rows: use a dev suite"
        yield from _waived(node, getattr(node.config, "waivers", ()), unseen)
        if isinstance(node.config, PrepareData) and node.address not in unseen:
            yield from _shares(node, nodes, unseen)


def _trained(nodes: Mapping[str, Node], unseen: set[str]) -> Iterator[Complaint]:
    """Inputs of training that are not decontaminated against a suite."""
    reported = unseen.union(*(_at(node, "suites") for node in nodes.values() if node.output == "scores"))
    covered = _covered(nodes)
    for node in nodes.values():
        for edge in node.edges:
            if edge.port in node.trains_on:
                for missing in sorted(reported - covered[edge.source]):
                    what = f"trains on {edge.source}, which is not decontaminated against {missing}"
                    yield node, ("in", edge.port), f"{what}: put a `decontaminate` stage with that benchmark before it"


def _covered(nodes: Mapping[str, Node]) -> dict[str, set[str]]:
    """By address, the suites against which every row that led to this dataset was checked. `nodes` has parents before children."""
    found: dict[str, set[str]] = {}
    for node in nodes.values():
        covers = [found[edge.source] for edge in node.edges if nodes[edge.source].output in CHECKED]
        if node.declaration.unchecked or imports_rows(node.declaration.name, node.config.model_dump(mode="json")):
            covers.append(set())
        checked = {edge.source for edge in node.edges if edge.port == "benchmarks"} if node.declaration.decontaminates else set()
        found[node.address] = (set.intersection(*covers) if covers else set()) | checked
    return found


def _evaluated(node: Node, nodes: Mapping[str, Node], unseen: set[str]) -> Iterator[Complaint]:
    suites = _at(node, "suites")
    here = [suite for suite in suites if suite in unseen]
    if not here:
        return
    others = [suite for suite in suites if suite not in unseen]
    if others:
        yield node, ("in", "suites"), f"{here[0]} is an unseen suite and {others[0]} a dev suite: evaluate them in separate stages"
    for policy in _at(node, "policies"):
        if not nodes[policy].declaration.frozen:
            takes = "takes only models of frozen kinds: the output of a `select` stage or a base model"
            message = f"{policy} is not frozen: the unseen suite {here[0]} {takes}"
            yield node, ("in", "policies"), message


def _waived(node: Node, waivers: Sequence[Waiver], unseen: set[str]) -> Iterator[Complaint]:
    """Waivers that would keep rows overlapping with an unseen suite."""
    labels = {edge.label: edge.source for edge in node.edges if edge.port == "benchmarks"}
    for number, waiver in enumerate(waivers):
        suite = labels.get(waiver.benchmark)
        if suite in unseen:
            yield node, ("waivers", number), f"keeps rows that overlap with the unseen suite {suite}: remove the waiver"


def _shares(node: Node, nodes: Mapping[str, Node], unseen: set[str]) -> Iterator[Complaint]:
    """Dev suites and training rows drawn from the source of an unseen suite."""
    own = dict(_origins(node, shots=True))
    for suite in sorted(unseen):
        for origin, name in _origins(nodes[suite]):
            if origin in own:
                what = "is a dev suite" if node.output == "item" else f"makes {node.output} rows"
                yield node, ("sources",), f"{what} from {name}, which the unseen suite {suite} also uses: give one of them another source"


def _origins(node: Node, shots: bool = False) -> Iterator[tuple[str, str]]:
    """(identity of the rows' origin, its name) for each source of a stage; optionally including those of worked examples."""
    config = node.config
    if not isinstance(config, PrepareData):
        return
    for source in (*config.sources, *([config.shots.source] if shots and config.shots else [])):
        given: dict[str, Any] = source.model_dump(mode="json")
        if given["type"] in ("leaks", "artifact"):  # rows of other stages, which are checked there
            continue
        drawn = given["type"] in DRAWN
        idle = DRAW if drawn else AMOUNT if given["type"] == "program" else ()
        where = {name: value for name, value in given.items() if name not in idle}
        named = f"the {given['type']} source {title(given)}" if drawn else f"the same {given['type']} source"
        places = product(source.configs, source.splits) if isinstance(source, Hub) else [(None, None)]
        for config, split in places:
            yield canonical_json([where, config, split]), named


def _at(node: Node, port: str) -> list[str]:
    return [edge.source for edge in node.edges if edge.port == port]
