"""Build the graph of a recipe from its raw stages: configs, references, types, cycles, and the rules on whole graphs."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from typing import Any

from pydantic import ValidationError

from pedigree.configs.base.document import ConfigError, Place, Problem
from pedigree.configs.base.frozen import Frozen, PortInput, digest
from pedigree.configs.base.kind import MODELS, Kind, Port
from pedigree.configs.base.mistakes import mistakes, nearest, not_one_of, tags
from pedigree.configs.base.naming import Model
from pedigree.configs.base.paths import written_of
from pedigree.configs.base.problems import UsageProblem
from pedigree.configs.language import suites
from pedigree.configs.language.graph import Complaint, Edge, Graph, Node, postorder
from pedigree.configs.language.kinds import KINDS
from pedigree.configs.language.recipe_files import RecipeFile
from pedigree.configs.methods.rubrics import own_rubrics
from pedigree.configs.methods.training import Training
from pedigree.configs.rows.datasets import PrepareData

MEANT = {"kind": {"type", "stage", "kinds", "kid", "kin", "knd"}, "in": {"input", "inputs", "from", "inn", "ins"}}
"""Key of every stage → what else users write for it; no kind has a field of such a name."""


class Building:
    """Turns raw stages into nodes, parents first, and collects all problems."""

    def __init__(
        self, load: Callable[[str], Graph], recipe: str, file: RecipeFile, shared: list[Graph], overrides: Mapping[str, Any]
    ) -> None:
        """
        Args:
            load: another recipe, by name.
            shared: recipes whose equal stages are taken from them.
            overrides: dotted paths and values; a variant has some.
        """
        self.load, self.recipe, self.file, self.overrides = load, recipe, file, overrides
        self.known = {(node.name, node.spec): node for graph in shared for node in graph.nodes.values()}
        self.foreign = {node.address: node for graph in shared for node in graph.nodes.values()}
        self.nodes: dict[str, Node] = {}
        self.built: dict[str, Node | None] = {}
        self.problems = list(file.problems)
        self.reported: dict[Place, Problem] = {}

    def graph(self) -> Graph:
        before = len(self.problems)
        for name in self._parents_first():
            self.built[name] = self._build(name)
        if len(self.problems) == before:
            for node, place, message in (fault for check in (suites.complaints, lost_orders) for fault in check(self.nodes)):
                self._complain_about(node, place, message)
        models = self._models()
        self._check_published()
        if self.problems:
            unique = list(dict.fromkeys(self.problems))
            raise ConfigError(sorted(unique, key=lambda problem: (problem.file, problem.line or 0)))
        return Graph(
            recipe=self.recipe,
            description=str(self.file.document.value.get("description", "")),
            execution=self.file.execution,
            nodes=self.nodes,
            overrides=dict(self.overrides),
            models=models,
            written=tuple(self.file.stages),
            published=self.file.published,
        )

    def _models(self) -> dict[str, Model]:
        """The named models, each with the address of its stage."""
        found: dict[str, Model] = {}
        for name, (document, model) in self.file.models.items():
            stage = self.file.stage_of(model.stage)
            node, problem = self.built.get(stage), None
            if stage not in self.file.stages:
                problem = f"there is no stage {model.stage!r}; available: {', '.join(self.file.stages)}"
            elif node is not None and node.output not in MODELS:
                problem = f"stage {stage} has output {node.output}: name a stage with output {_any_of(MODELS)}"
            elif name.replace("-", "_") in self.file.stages.keys() - {stage}:
                problem = f"the stage {name.replace('-', '_')} already has this name: choose another"
            if problem:
                self.problems.append(document.problem(("models", name), f"model {name}: {problem}"))
            elif node is not None:
                found[name] = model.model_copy(update={"stage": node.address})
        return found

    def _check_published(self) -> None:
        """Check the stages and tasks named in the file's `published` block."""
        document, published = self.file.document, self.file.published
        if published is None or "published" not in document.value:
            return
        tasks = {node.config.task for node in self.nodes.values() if isinstance(node.config, PrepareData) and node.config.task}
        named: list[tuple[Place, str]] = [(("published", "hardware", stage), stage) for stage in published.hardware]
        for task, expected in published.scores.items():
            if task not in tasks:
                known = ", ".join(sorted(tasks))
                message = f"published: no suite has the task {task!r}; available: {known}"
                self.problems.append(document.problem(("published", "scores", task), message))
            named += [(("published", "scores", task, "of", stage), stage) for stage in expected.of]
        for place, stage in named:
            if stage not in self.file.stages:
                known = ", ".join(self.file.stages)
                self.problems.append(document.problem(place, f"published: there is no stage {stage!r}; available: {known}"))

    def _complain(self, name: str, place: Place, message: str) -> None:
        raw = self.file.stages[name]
        shared = (raw.document.file, *raw.place, *place, message)  # by the rounds of a group
        self.problems.append(self.reported.setdefault(shared, raw.problem(place, f"stage {name}: {message}")))

    def _parents_first(self) -> list[str]:
        """The stages in topological order, otherwise in file order. The first cycle is reported, and all cycles are broken."""
        stages = self.file.stages
        reads = {name: [source for source in self._references(name) if source in stages] for name in stages}
        found = False
        while True:
            try:
                TopologicalSorter(reads).prepare()
                return postorder(stages, reads.__getitem__)
            except CycleError as error:
                cycle = error.args[1][::-1]
            if not found:  # report only one: cycles usually overlap
                self._complain(cycle[0], ("in",), f"stages form a cycle: {' -> '.join(cycle)}")
            found = True
            for name in cycle:
                reads[name] = [source for source in reads[name] if source not in cycle]

    def _references(self, name: str) -> list[str]:
        """The stages that a stage references; groups of rounds by their last stage."""
        given = self.file.stages[name].body.get("in")
        ports = given.values() if isinstance(given, dict) else ()
        named = [str(reference) for value in ports if value is not None for _, reference in _labeled(value)]
        return list(map(self.file.stage_of, named))

    def _build(self, name: str) -> Node | None:
        """The node of a stage whose parents are built; None if it has problems, which are collected."""
        body = dict(self.file.stages[name].body)
        for word in MEANT.keys() - body.keys():
            for key in MEANT[word] & body.keys():
                self._complain(name, (key,), f"{key}: unknown key; did you mean {word}?")
                return None
        kind = body.pop("kind", None)
        declaration = KINDS.get(str(kind))
        if declaration is None:
            missing = f"is missing: write one of {', '.join(KINDS)}"
            self._complain(name, ("kind",), f"kind {not_one_of(kind, [*KINDS], _kind_of(kind)) if kind else missing}")
            return None
        sources = self._sources(name, declaration, body.pop("in", None) or {})
        config = self._config(name, declaration, body)
        if sources is None or config is None:
            return None
        missing = declaration.required(config) - {edge.port for edge, _ in sources}
        for port_name in sorted(missing):
            makes = _any_of(declaration.inputs[port_name].types)
            self._complain(name, ("in",), f"this config requires input {port_name!r}: name a stage with output {makes}")
        by_label: dict[str, dict[str, PortInput]] = {}
        for edge, source in sources:
            by_label.setdefault(edge.port, {})[edge.label] = PortInput(source.output, source.config)
        problem = None if missing else declaration.problem(config, by_label)
        if problem:
            self._complain(name, ("in",), problem)
        dumped = config.model_dump()
        files = [*_files(dumped), *own_rubrics(dumped), *getattr(config, "files", ())]
        twins = _of_one_name(files)
        if twins:
            self._complain(name, (), twins)
        if missing or problem or twins:
            return None
        spec = digest(
            {
                "kind": kind,
                "version": declaration.version,
                "config": config.model_dump(mode="json"),
                # the order within a port matters: `evaluate` compares each policy with the preceding one
                "inputs": sorted(([edge.port, edge.label, source.spec] for edge, source in sources), key=lambda given: given[0]),
            }
        )
        shared = self.known.get((name, spec))
        if shared is not None:
            self._adopt(shared)
            return shared
        arrived: dict[str, list[str]] = {}
        for edge, source in sources:
            arrived.setdefault(edge.port, []).append(source.output)
        node = Node(
            recipe=self.recipe,
            name=name,
            kind=declaration.name,
            config=config,
            edges=tuple(edge for edge, _ in sources),
            output=declaration.output(config, arrived),
            files=tuple(dict.fromkeys(files)),
            spec=spec,
        )
        self.nodes[node.address] = node
        return node

    def _adopt(self, node: Node) -> None:
        """Add a stage of another recipe, with all its ancestors, to this graph."""
        for address in postorder([node.address], lambda address: () if address in self.nodes else self.foreign[address].parents):
            self.nodes.setdefault(address, self.foreign[address])

    def _sources(self, name: str, declaration: Kind, given: Any) -> list[tuple[Edge, Node]] | None:
        """The stage's inputs, each with the node that makes it; None if one has a problem."""
        ports, before = declaration.inputs, len(self.problems)
        if not isinstance(given, dict):
            self._complain(name, ("in",), f"`in` must map ports to stages; its ports are {', '.join(ports) or 'none'}")
            return None
        unknown = [port_name for port_name in given if port_name not in ports]
        for port_name in unknown:
            takes = (", ".join(ports) or "none") + nearest(port_name, [*ports])
            self._complain(name, ("in", port_name), f"no input {port_name!r}; inputs of {declaration.name}: {takes}")
        empty = [name for name in ports if given.get(name) is None or not _labeled(given[name])]
        missing = {name: _any_of(ports[name].types) for name in empty if not ports[name].optional}
        if missing and not unknown:
            inputs = f"input {' and '.join(map(repr, missing))} {'is' if len(missing) == 1 else 'are'} missing"
            self._complain(name, ("in",), f"{inputs}: name a stage with output {', and one with '.join(missing.values())}")
        found: list[tuple[Edge, Node]] = []
        complete = True
        for port_name in (port_name for port_name in given if port_name in ports and given[port_name] is not None):
            arrived = self._at_port(name, port_name, ports[port_name], given[port_name])
            complete = complete and arrived is not None
            found.extend(arrived or [])
        return found if complete and len(self.problems) == before else None

    def _at_port(self, name: str, port_name: str, port: Port, value: Any) -> list[tuple[Edge, Node]] | None:
        place: Place = ("in", port_name)
        found: list[tuple[Edge, Node]] = []
        complete = True
        for label, reference in _labeled(value):
            source = self._source(name, port_name, reference)
            if source is None:
                complete = False
                continue
            if source.output not in port.types:
                self._complain(name, place, f"input {port_name!r} is {reference} of type {source.output}; it must be {_any_of(port.types)}")
            found.append((Edge(port_name, label or source.name, source.address), source))
        labels = [edge.label for edge, _ in found]
        if len(labels) != len(set(labels)):
            self._complain(name, place, f"input {port_name!r} has a duplicate label: {', '.join(labels)}")
        elif not port.many and len(labels) > 1:
            self._complain(name, place, f"input {port_name!r} takes one stage, not {len(labels)}")
        return found if complete else None

    def _source(self, name: str, port_name: str, reference: Any) -> Node | None:
        """The node that a reference names: a stage, a group of rounds, or RECIPE/STAGE."""
        reference = self.file.stage_of(str(reference))
        if reference in self.file.stages:
            return self.built.get(reference)  # not built if part of a cycle
        if "/" in reference:
            recipe, _, stage = reference.partition("/")
            try:
                other = self.load(recipe)
                node = other.find(stage)
            except UsageProblem as error:
                self._complain(name, ("in", port_name), f"input {port_name!r}: {error.args[0]}")
                return None
            self.foreign.update(other.nodes)
            self._adopt(node)
            return node
        names = [*self.file.stages, *self.file.groups]
        known = ", ".join(names) + ("; @ refers to rounds only inside their group" if "@" in reference else "") + nearest(reference, names)
        self._complain(name, ("in", port_name), f"input {port_name!r} names {reference!r}, which does not exist; available: {known}")
        return None

    def _config(self, name: str, declaration: Kind, body: dict[str, Any]) -> Frozen | None:
        try:
            return declaration.config.model_validate(body)
        except ValidationError as error:
            for place, message in mistakes(error, declaration.config, body, declaration.name):
                self._complain(name, place, message)
            return None

    def _complain_about(self, node: Node, place: Place, message: str) -> None:
        if node.recipe == self.recipe:
            self._complain(node.name, place, message)
        else:  # a stage of another recipe has no line in this file
            self.problems.append(Problem(self.file.document.file, None, f"stage {node.address}: {message}"))


def lost_orders(nodes: Mapping[str, Node]) -> Iterator[Complaint]:
    """Ordered datasets whose every consumer in training shuffles them, with the field at fault. A stage that only drops rows preserves
    order. `nodes` has parents before children."""
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


def _kind_of(method: Any) -> str:
    """The kind of stage that has a method, as a remedy."""
    for kind, field in (("preference_train", "loss"), ("rlvr", "algorithm")):
        if method in tags(KINDS[kind].config, (field,)):
            return f"write kind: {kind} with {field}: {{type: {method}}}"
    return ""


def _any_of(types: frozenset[str]) -> str:
    return " or ".join(sorted(types))


def _labeled(value: Any) -> list[tuple[str | None, Any]]:
    """(label or None, reference) of each input at a port; a label of null removes the one that a parent recipe gives."""
    if isinstance(value, dict):
        return [(str(label), reference) for label, reference in value.items() if reference is not None]
    if isinstance(value, list):
        return [(None, reference) for reference in value]
    return [(None, value)]


def _files(value: Any) -> Iterator[str]:
    """Project files referenced anywhere in a dumped config (field `path` of `files`, `folder` and `program` sources)."""
    if isinstance(value, dict):
        if value.get("type") in ("files", "folder", "program"):
            yield value["path"]
        value = list(value.values())
    for inner in value if isinstance(value, (list, tuple)) else ():
        yield from _files(inner)


def _of_one_name(files: Iterable[str]) -> str | None:
    """The problem with two sources outside the project that would have one name; None without."""
    places: dict[str, set[str]] = {}
    for file in files:
        places.setdefault(file, set()).add(written_of(file))
    for name, written in places.items():
        if len(written) > 1:
            last, several = name.rpartition("/")[2], " and ".join(sorted(written))
            return f"two sources outside the project are named {last}, {several}: rename one, or name a link to it"
    return None
