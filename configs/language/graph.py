"""A resolved recipe: a directed acyclic graph of stages, each with its identity."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from pedigree.configs.base.document import Place
from pedigree.configs.base.frozen import Frozen
from pedigree.configs.base.kind import MODELS
from pedigree.configs.base.mistakes import nearest
from pedigree.configs.base.naming import Model
from pedigree.configs.base.problems import UsageProblem
from pedigree.configs.base.published import Published
from pedigree.configs.language.kinds import KINDS, Kind


def postorder(names: Iterable[str], parents: Callable[[str], Iterable[str]]) -> list[str]:
    """Names and all their ancestors, each once, parents first and otherwise in the given order, on which compiled files rely (`graphlib`
    does not preserve it). The graph must be acyclic."""
    found: dict[str, None] = {}
    waiting = list(names)[::-1]
    while waiting:
        missing = [parent for parent in parents(waiting[-1]) if parent not in found] if waiting[-1] not in found else []
        if missing:
            waiting += missing[::-1]
        else:
            found.setdefault(waiting.pop())
    return list(found)


@dataclass(frozen=True)
class Edge:
    """One input artifact: its port, its label there, and the stage that makes it."""

    port: str
    label: str
    source: str
    """Address `RECIPE/STAGE`."""


@dataclass(frozen=True)
class Node:
    """One stage of a recipe."""

    recipe: str
    """The recipe that owns it; the artifact is built in `artifacts/RECIPE/NAME`."""
    name: str
    kind: str
    config: Frozen
    edges: tuple[Edge, ...]
    output: str
    """Artifact type."""
    files: tuple[str, ...]
    """Project files referenced by the config (relative to the root); their content is an input."""
    spec: str
    """Digest of kind, version, config and the specs of all ancestors; nodes with equal specs are the same stage."""

    @property
    def address(self) -> str:
        return f"{self.recipe}/{self.name}"

    @property
    def declaration(self) -> Kind:
        return KINDS[self.kind]

    @property
    def parents(self) -> tuple[str, ...]:
        """Addresses of its input stages, each once, in order."""
        return tuple(dict.fromkeys(edge.source for edge in self.edges))

    @property
    def trains_on(self) -> frozenset[str]:
        """Ports whose rows reach a gradient."""
        return self.declaration.trains_on if self.output in MODELS else frozenset()

    def identity(self) -> dict[str, object]:
        """Its entry in `params.yaml`: everything that determines the result except the content of its inputs."""
        return {
            "kind": self.kind,
            "version": self.declaration.version,
            "config": self.config.model_dump(mode="json"),
            "inputs": {
                port: [edge.label for edge in self.edges if edge.port == port] for port in sorted({edge.port for edge in self.edges})
            },
        }


Complaint = tuple[Node, Place, str]
"""A stage, the place of the fault in its body, and what is wrong."""


@dataclass(frozen=True)
class Graph:
    """All stages that a recipe needs, parents before children; some may belong to other recipes."""

    recipe: str
    description: str
    execution: str
    """Name of the default execution profile."""
    nodes: Mapping[str, Node]
    """By address, in topological order."""
    overrides: Mapping[str, object]
    """The `--set` values of this variant; empty for a committed recipe."""
    source: str = ""
    """The recipe name or the path as given to the loader."""
    extends: str = ""
    """The recipe that it extends; for a variant, its base recipe. Empty if none."""
    written: tuple[str, ...] = ()
    """Names of its stages, inherited ones included; stages that it only reads from other recipes are not."""
    models: Mapping[str, Model] = field(default_factory=dict)
    """Model names given by the recipe or one that it extends; if empty, each model has the name of its stage."""
    published: Published | None = None
    """The published work that the recipe reproduces."""

    @property
    def own(self) -> list[Node]:
        return [node for node in self.nodes.values() if node.recipe == self.recipe]

    @cached_property
    def children(self) -> Mapping[str, tuple[str, ...]]:
        found: dict[str, list[str]] = {address: [] for address in self.nodes}
        for node in self.nodes.values():
            for parent in node.parents:
                found[parent].append(node.address)
        return {address: tuple(below) for address, below in found.items()}

    def find(self, name: str) -> Node:
        """Look up a stage by name or address.

        Raises:
            UsageProblem: no such stage; the message lists the existing ones.
        """
        for address in (f"{self.recipe}/{name}", name):
            if address in self.nodes:
                return self.nodes[address]
        matches = [node for node in self.nodes.values() if node.name == name]
        if len(matches) == 1:
            return matches[0]
        names = [node.name for node in self.nodes.values()]
        raise UsageProblem(f"recipe {self.recipe} has no stage {name!r}: it has {', '.join(names)}{nearest(name, names)}")

    def ancestors(self, addresses: Iterable[str]) -> set[str]:
        """The stages and everything they are made from."""
        return set(postorder(addresses, lambda address: self.nodes[address].parents))

    def descendants(self, addresses: Iterable[str]) -> set[str]:
        """The stages and everything made from them."""
        return set(postorder(addresses, lambda address: self.children[address]))


def shown_name(graph: Graph, node: Node) -> str:
    """The stage's name, or its address if it belongs to another recipe."""
    return node.name if node.recipe == graph.recipe else node.address
