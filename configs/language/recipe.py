"""Load recipe files into graphs: extends, overrides, rounds, references, types, cycles, the decontamination gate.

A recipe is YAML:

    description: one line
    execution: cpu                      # default profile
    reproduce: {score_tolerance: 0.02}  # optional: tolerance on scores if `pedigree reproduce` cannot get identical bits
    extends: other                      # optional: inherit another recipe's stages; `STAGE: null` removes one of them
    models: {final: {stage: rlvr}}      # optional: names for models, with `desc` and `labels`
    published: {sources: [...]}         # optional: the work that it reproduces, see `configs/base/published.py`
    stages:
      sft:
        kind: sft
        in: {policy: base, data: clean} # a stage, RECIPE/STAGE, a list, or {label: stage}
        global_batch: 32                # the remaining keys are the stage's config
      online:
        rounds: 2                       # unrolled: sample_1, pair_1, dpo_1, sample_2, ...
        first: sft                      # the value of `previous` in round 1
        stages: {...}                   # `$round` is 1, 2, ...; `previous` the last stage of the preceding round; see `rounds.py`

Elsewhere `online` refers to the last stage of the last round. All problems are reported together.
"""

import copy
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field, ValidationError

from pedigree.configs.base.document import ConfigError, Place, Problem, YamlDocument, parse_value, read_document, secret_problem
from pedigree.configs.base.frozen import Frozen, PortInput, digest
from pedigree.configs.base.kind import DATASETS, MODELS, Kind, Port
from pedigree.configs.base.naming import MODEL_NAME, Model
from pedigree.configs.base.problems import UsageProblem
from pedigree.configs.base.published import Published
from pedigree.configs.language import orders, suites
from pedigree.configs.language.graph import Edge, Graph, Node, postorder
from pedigree.configs.language.kinds import KINDS
from pedigree.configs.language.rounds import is_stage, unroll
from pedigree.configs.rows.datasets import PrepareData

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

RECIPE_NAME = re.compile(r"[a-z][a-z0-9_-]*")
RECIPE_KEYS = {"description", "execution", "extends", "models", "published", "reproduce", "stages"}


class Reproduce(Frozen):
    """Tolerances for reproduction where bits cannot agree, e.g. on another processor. Not part of any identity."""

    score_tolerance: float = Field(ge=0, le=1)
    """Maximum difference of a policy's mean score on a task between the recorded and the repeated evaluation."""


def load_recipe(folder: Path, name: str, overrides: Sequence[str] = ()) -> Graph:
    """Load a recipe, by name in `folder` or by path, with `--set` overrides (which make a variant).

    Raises:
        ConfigError: lists every problem with its line.
    """
    return _Loading(folder).graph(name, overrides)


def load_recipes(folder: Path, name: str, overrides: Sequence[str] = ()) -> list[Graph]:
    """Load a recipe and all recipes that it extends or reads from; the requested one is last.

    Raises:
        ConfigError: lists every problem with its line.
    """
    loading = _Loading(folder)
    graph = loading.graph(name, overrides)
    return [*(other for other in loading.graphs.values() if other is not graph), graph]


def score_tolerance(folder: Path, recipe: str) -> float | None:
    """The score tolerance of a recipe (or of the recipe of a variant `RECIPE+HASH`), its own or inherited.

    Raises:
        ConfigError: the file cannot be read, or the value is invalid.
    """
    name: Any = recipe.partition("+")[0]
    seen: set[str] = set()
    while isinstance(name, str) and RECIPE_NAME.fullmatch(name) and name not in seen and (folder / f"{name}.yaml").exists():
        seen.add(name)
        document = read_document(folder / f"{name}.yaml")
        if "reproduce" in document.value:
            problems = _reproduce_problems(document)
            if problems:
                raise ConfigError(problems)
            return Reproduce.model_validate(document.value["reproduce"]).score_tolerance
        name = document.value.get("extends")
    return None


def _reproduce_problems(document: YamlDocument) -> list[Problem]:
    try:
        Reproduce.model_validate(document.value.get("reproduce", {"score_tolerance": 0.0}))
    except ValidationError as error:
        return [
            document.problem(("reproduce",), f"reproduce{''.join(f'.{part}' for part in detail['loc'])}: {detail['msg']}")
            for detail in error.errors()
        ]
    return []


def _models(document: YamlDocument, problems: list[Problem]) -> dict[str, tuple[YamlDocument, Model]]:
    """The named models of a file; problems are collected."""
    given = document.value.get("models", {})
    if not isinstance(given, dict):
        problems.append(document.problem(("models",), "`models` must map names to stages: {NAME: {stage: STAGE}}"))
        return {}
    found = {}
    for name, body in given.items():
        place: Place = ("models", name)
        if not isinstance(name, str) or not MODEL_NAME.fullmatch(name):
            problems.append(document.problem(place, f"model name {name!r} must match {MODEL_NAME.pattern}"))
            continue
        try:
            found[name] = (document, Model.model_validate(body))
        except ValidationError as error:
            for detail in error.errors():
                where = ".".join(map(str, detail["loc"]))
                problems.append(document.problem((*place, *detail["loc"]), f"model {name}: {where + ': ' if where else ''}{detail['msg']}"))
    return found


def _published(document: YamlDocument, problems: list[Problem]) -> Published | None:
    """The file's `published` block; problems are collected."""
    if "published" not in document.value:
        return None
    try:
        return Published.model_validate(document.value["published"])
    except ValidationError as error:
        for detail in error.errors():
            place: Place = ("published", *detail["loc"])
            problems.append(document.problem(place, f"{'.'.join(map(str, place))}: {detail['msg'].removeprefix('Value error, ')}"))
        return None


def recipe_file(folder: Path, name: str) -> Path:
    """File of a recipe, by name in `folder` or by path."""
    return Path(name) if name.endswith((".yaml", ".yml")) else folder / f"{name}.yaml"


def recipe_names(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.glob("*.yaml"))


@dataclass(frozen=True)
class _Raw:
    """A stage body after unrolling, before validation."""

    body: dict[str, Any]
    document: YamlDocument
    place: Place

    def problem(self, inner: Place, message: str) -> Problem:
        return self.document.problem((*self.place, *inner), message)


@dataclass(frozen=True)
class _Written:
    """A recipe's raw stages, with its parents' merged in and its rounds unrolled."""

    document: YamlDocument
    extends: str | None
    stages: dict[str, _Raw]
    groups: dict[str, str]
    """Group of rounds → the last stage of its last round."""
    models: dict[str, tuple[YamlDocument, Model]]
    """Name → file that defines it, and model."""
    published: Published | None
    """Its own block, or that of the recipe that it extends."""
    problems: tuple[Problem, ...]
    """Problems outside the stages."""

    def setting(self, key: str, default: str) -> str:
        return str(self.document.value.get(key, default))


class _Loading:
    """Loads one recipe and those it refers to."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.graphs: dict[str, Graph] = {}
        self.open: list[str] = []

    def graph(self, name: str, overrides: Sequence[str] = ()) -> Graph:
        path = recipe_file(self.folder, name)
        recipe = path.stem
        if recipe in self.graphs and not overrides:
            return self.graphs[recipe]
        if recipe in self.open:
            cycle = " -> ".join([*self.open, recipe])
            raise ConfigError([Problem(path.name, None, f"recipes refer to each other in a cycle: {cycle}")])
        changes = _parse_overrides(overrides)
        base = self.graph(name) if overrides else None
        self.open.append(recipe)
        try:
            written = self._written(path, changes)
            shared, problems = [base] if base else [], list(written.problems)
            if written.extends:
                try:
                    shared.append(self.graph(written.extends))
                except ConfigError as error:  # report this recipe's own problems along with them
                    problems += error.problems
            variant = f"{recipe}+{digest(changes)[:8]}" if changes else recipe
            built = _Building(self, variant, written, shared, changes, problems).graph()
            inside = self.folder / f"{recipe}.yaml"
            named = recipe if inside.exists() and inside.samefile(path) else name  # a recipe of the folder is the same by path or by name
            graph = replace(built, source=named, extends=recipe if changes else written.extends or "")
        finally:
            self.open.pop()
        if not overrides:
            self.graphs[recipe] = graph
        return graph

    def _written(self, path: Path, changes: Mapping[str, Any], below: tuple[str, ...] = ()) -> _Written:
        """Read a recipe file; `changes` (dotted paths) apply to groups before and to stages after unrolling."""
        if path.stem in below:
            cycle = " -> ".join([*below, path.stem])
            raise ConfigError([Problem(path.name, None, f"recipes extend each other in a cycle: {cycle}")])
        if not os.path.exists(path):  # `exists` also handles invalid file names
            known = ", ".join(recipe_names(self.folder)) or "none"
            raise ConfigError([Problem(path.name, None, f"there is no recipe {path.stem!r}; available: {known}")])
        document = read_document(path)
        problems: list[Problem] = []
        if not RECIPE_NAME.fullmatch(path.stem):
            problems.append(Problem(path.name, None, f"recipe name {path.stem!r} must match {RECIPE_NAME.pattern}"))
        for key in set(document.value) - RECIPE_KEYS:
            problems.append(document.problem((key,), f"unknown key {key!r}: a recipe has {', '.join(sorted(RECIPE_KEYS))}"))
        problems += _reproduce_problems(document)
        own = document.value.get("stages", {})
        if not isinstance(own, dict) or not (own or document.value.get("extends")):
            raise ConfigError([*problems, document.problem(("stages",), "`stages` must be a mapping with at least one stage")])
        own = copy.deepcopy(own)
        left = {}
        for place, value in changes.items():
            group = own.get(place.split(".")[0])
            if isinstance(group, dict) and "rounds" in group:
                _set(own, place.split("."), value)
            else:
                left[place] = value

        stages: dict[str, _Raw] = {}
        groups: dict[str, str] = {}
        models: dict[str, tuple[YamlDocument, Model]] = {}
        published = _published(document, problems)
        extends = document.value.get("extends")
        if extends is not None and not (isinstance(extends, str) and RECIPE_NAME.fullmatch(extends)):
            problems.append(document.problem(("extends",), f"extends {extends!r}: it must be the name of a recipe in {self.folder.name}/"))
            extends = None  # never look outside the folder
        elif extends is not None:
            parent = self._written(self.folder / f"{extends}.yaml", {}, (*below, path.stem))
            stages, groups, models = dict(parent.stages), dict(parent.groups), dict(parent.models)
            published = published.over(parent.published) if published else parent.published
            problems += parent.problems
        before = len(problems)
        for name in [name for name, body in own.items() if body is None]:
            del own[name]
            if stages.pop(name, None) is None:
                what = f"{extends} has {', '.join(stages)}" if extends else "this recipe extends no other"
                problems.append(document.problem(("stages", name), f"stage {name} is null, which removes an inherited stage: {what}"))
        unrolled, last = _unroll(document, own, problems)
        if len(problems) > before:  # stages are missing: references to them would cause follow-up errors
            raise ConfigError(problems)
        for name, raw in unrolled.items():
            stages[name] = replace(raw, body=_merged(stages[name].body, raw.body)) if name in stages else raw
        models |= _models(document, problems)
        for place, value in left.items():
            name = place.split(".")[0]
            if name not in stages:
                known = ", ".join(stages)
                problems.append(Problem("--set", None, f"{place}: recipe {path.stem} has no stage {name!r}: it has {known}"))
                continue
            body = copy.deepcopy(stages[name].body)
            _set(body, place.split(".")[1:], value)
            stages[name] = replace(stages[name], body=body)
        return _Written(document, extends, stages, groups | last, models, published, tuple(problems))


class _Building:
    """Turns raw stages into nodes, parents first, and collects all problems."""

    def __init__(
        self, loading: _Loading, recipe: str, written: _Written, shared: list[Graph], changes: Mapping[str, Any], problems: list[Problem]
    ) -> None:
        self.loading, self.recipe, self.written, self.changes = loading, recipe, written, changes
        self.known = {(node.name, node.spec): node for graph in shared for node in graph.nodes.values()}
        self.foreign = {node.address: node for graph in shared for node in graph.nodes.values()}
        self.nodes: dict[str, Node] = {}
        self.built: dict[str, Node | None] = {}
        self.problems = problems

    def graph(self) -> Graph:
        before = len(self.problems)
        for name in self._parents_first():
            self.built[name] = self._build(name)
        if len(self.problems) == before:
            self._gate()
            self._unseen()
            self._orders()
        models = self._models()
        self._check_published()
        if self.problems:
            unique = list(dict.fromkeys(self.problems))
            raise ConfigError(sorted(unique, key=lambda problem: (problem.file, problem.line or 0)))
        written = self.written
        return Graph(
            recipe=self.recipe,
            description=written.setting("description", ""),
            execution=written.setting("execution", "cpu"),
            nodes=self.nodes,
            overrides=dict(self.changes),
            models=models,
            written=tuple(written.stages),
            published=written.published,
        )

    def _models(self) -> dict[str, Model]:
        """The named models, each with the address of its stage."""
        found: dict[str, Model] = {}
        for name, (document, model) in self.written.models.items():
            stage = self.written.groups.get(model.stage, model.stage)
            node, problem = self.built.get(stage), None
            if stage not in self.written.stages:
                problem = f"there is no stage {model.stage!r}; available: {', '.join(self.written.stages)}"
            elif node is not None and node.output not in MODELS:
                problem = f"stage {stage} has output {node.output}: name a stage with output {_any_of(MODELS)}"
            elif name.replace("-", "_") in self.written.stages.keys() - {stage}:
                problem = f"the stage {name.replace('-', '_')} already has this name: choose another"
            if problem:
                self.problems.append(document.problem(("models", name), f"model {name}: {problem}"))
            elif node is not None:
                found[name] = model.model_copy(update={"stage": node.address})
        return found

    def _check_published(self) -> None:
        """Check the stages and tasks named in the file's `published` block."""
        document, published = self.written.document, self.written.published
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
            if stage not in self.written.stages:
                known = ", ".join(self.written.stages)
                self.problems.append(document.problem(place, f"published: there is no stage {stage!r}; available: {known}"))

    def _complain(self, name: str, place: Place, message: str) -> None:
        self.problems.append(self.written.stages[name].problem(place, f"stage {name}: {message}"))

    def _parents_first(self) -> list[str]:
        """The stages in topological order, otherwise in file order. The first cycle is reported, and all cycles are broken."""
        stages = self.written.stages
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
        given = self.written.stages[name].body.get("in")
        ports = given.values() if isinstance(given, dict) else ()
        named = [str(reference) for value in ports if value is not None for _, reference in _labeled(value)]
        return [self.written.groups.get(reference, reference) for reference in named]

    def _build(self, name: str) -> Node | None:
        """The node of a stage whose parents are built; None if it has problems, which are collected."""
        body = dict(self.written.stages[name].body)
        kind = body.pop("kind", None)
        declaration = KINDS.get(str(kind))
        if declaration is None:
            self._complain(name, ("kind",), f"kind {kind!r} is not one of {', '.join(KINDS)}")
            return None
        sources = self._sources(name, declaration, body.pop("in", None) or {})
        config = self._config(name, declaration, body)
        if sources is None or config is None:
            return None
        missing = declaration.needs(config) - {edge.port for edge, _ in sources}
        for port_name in sorted(missing):
            makes = _any_of(declaration.inputs[port_name].types)
            self._complain(name, ("in",), f"this config requires input {port_name!r}: name a stage with output {makes}")
        by_label: dict[str, dict[str, PortInput]] = {}
        for edge, source in sources:
            by_label.setdefault(edge.port, {})[edge.label] = PortInput(source.output, source.config)
        problem = None if missing else declaration.problem(config, by_label)
        if problem:
            self._complain(name, ("in",), problem)
        if missing or problem:
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
            files=_files(config),
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
        for port_name in given:
            if port_name not in ports:
                takes = ", ".join(ports) or "none"
                self._complain(name, ("in", port_name), f"no input {port_name!r}; inputs of {declaration.name}: {takes}")
        for port_name, port in ports.items():
            if not port.optional and given.get(port_name) in (None, [], {}):
                self._complain(name, ("in",), f"input {port_name!r} is missing: name a stage with output {_any_of(port.types)}")
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
        if not port.many and len(labels) > 1:
            self._complain(name, place, f"input {port_name!r} takes one stage, not {len(labels)}")
        return found if complete else None

    def _source(self, name: str, port_name: str, reference: Any) -> Node | None:
        """The node that a reference names: a stage, a group of rounds, or RECIPE/STAGE."""
        reference = self.written.groups.get(str(reference), str(reference))
        if reference in self.written.stages:
            return self.built.get(reference)  # not built if part of a cycle
        if "/" in reference:
            recipe, _, stage = reference.partition("/")
            try:
                other = self.loading.graph(recipe)
                node = other.find(stage)
            except UsageProblem as error:
                self._complain(name, ("in", port_name), f"input {port_name!r}: {error.args[0]}")
                return None
            self.foreign.update(other.nodes)
            self._adopt(node)
            return node
        known = ", ".join([*self.written.stages, *self.written.groups])
        known += "; @ refers to rounds only inside their group" if "@" in reference else ""
        self._complain(name, ("in", port_name), f"input {port_name!r} names {reference!r}, which does not exist; available: {known}")
        return None

    def _config(self, name: str, declaration: Kind, body: dict[str, Any]) -> Frozen | None:
        try:
            return declaration.config.model_validate(body)
        except ValidationError as error:
            details = error.errors()
            for detail in details:
                loc = detail["loc"]
                if detail["type"] == "too_short" and any(other["loc"][: len(loc)] == loc != other["loc"] for other in details):
                    continue  # pydantic also reports a list as too short if its items are invalid
                place = tuple(part for part in detail["loc"] if part in _parts(body))
                shown = ".".join(map(str, detail["loc"]))
                has = f"; fields of {declaration.name}: {', '.join(declaration.config.model_fields)}" if len(detail["loc"]) == 1 else ""
                self._complain(name, place, f"{shown}: {_message(detail, has)}" if shown else _message(detail, has))
            return None

    def _gate(self) -> None:
        """Training rows must be decontaminated against every suite that the recipe reports, and every unseen one."""
        reported = {edge.source for node in self.nodes.values() if node.output == "scores" for edge in node.edges if edge.port == "suites"}
        reported.update(suites.unseen_suites(self.nodes))
        covered = self._covered()
        for node in self.nodes.values():
            for edge in node.edges:
                if edge.port in node.declaration.trains_on:
                    for missing in sorted(reported - covered[edge.source]):
                        self._complain_about(
                            node,
                            ("in", edge.port),
                            f"trains on {edge.source}, which is not decontaminated against {missing}: "
                            "put a `decontaminate` stage with that benchmark before it",
                        )

    def _unseen(self) -> None:
        """Unseen suites are for frozen candidates: nothing may be trained, tuned or selected on them."""
        for node, place, message in suites.complaints(self.nodes):
            self._complain_about(node, place, message)

    def _orders(self) -> None:
        for node, place, message in orders.complaints(self.nodes):
            self._complain_about(node, place, message)

    def _complain_about(self, node: Node, place: Place, message: str) -> None:
        if node.recipe == self.recipe:
            self._complain(node.name, place, message)
        else:  # a stage of another recipe has no line in this file
            self.problems.append(Problem(self.written.document.file, None, f"stage {node.address}: {message}"))

    def _covered(self) -> dict[str, set[str]]:
        """By address, the suites against which every row that led to this dataset was checked."""
        rows = DATASETS - {"item"} | {"completion", "judgment"}
        found: dict[str, set[str]] = {}
        for node in self.nodes.values():  # parents come first
            covers = [found[edge.source] for edge in node.edges if self.nodes[edge.source].output in rows]
            anew = node.declaration.unchecked or (isinstance(node.config, PrepareData) and node.config.brings_in)
            covers += [set()] if anew else []
            checked = {edge.source for edge in node.edges if edge.port == "benchmarks"} if node.declaration.removes_overlaps else set()
            found[node.address] = (set.intersection(*covers) if covers else set()) | checked
        return found


def _parse_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    for text in overrides:
        place, equals, value = text.partition("=")
        secret = secret_problem(place if equals else "the override", text)
        if secret:
            raise ConfigError([Problem("--set", None, secret)])
        if not equals or "." not in place:
            raise ConfigError([Problem("--set", None, f"{text!r} must be STAGE.FIELD=VALUE, e.g. sft.optimizer.learning_rate=1e-4")])
        try:
            changes[place.strip()] = parse_value(value)
        except ValueError as error:
            raise ConfigError([Problem("--set", None, f"{text!r}: {error}")]) from error
    return dict(sorted(changes.items()))


def _set(target: dict[str, Any], place: Sequence[str], value: Any) -> None:
    for part in place[:-1]:
        inner = target.get(part)
        if not isinstance(inner, dict):
            inner = target[part] = {}
        target = inner
    target[place[-1]] = value


def _merged(parent: dict[str, Any], child: dict[str, Any]) -> dict[str, Any]:
    """Merge a child's stage into the parent's: mappings merge, everything else replaces. A different `kind` or `type` replaces the parent's
    mapping."""
    if child.get("kind", parent.get("kind")) != parent.get("kind"):
        return child
    merged = dict(parent)
    for key, value in child.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        tagged = both and value.get("type", merged[key].get("type")) != merged[key].get("type")
        merged[key] = _merged(merged[key], value) if both and not tagged else value
    return merged


def _unroll(document: YamlDocument, stages: dict[str, Any], problems: list[Problem]) -> tuple[dict[str, _Raw], dict[str, str]]:
    """Stages with all groups of rounds unrolled, and the stage that each group refers to."""
    found: dict[str, _Raw] = {}
    groups: dict[str, str] = {}
    for name, body in stages.items():
        place: Place = ("stages", name)
        if not is_stage(document, place, body, problems):
            continue
        if "rounds" in body:
            bodies = unroll(document, name, body, problems)
            unrolled = {stage: _Raw(inner, document, (*place, "stages", template)) for stage, (template, inner) in bodies.items()}
            groups |= {name: list(unrolled)[-1]} if unrolled else {}
        else:
            unrolled = {name: _Raw(body, document, place)}
        for twice in sorted(unrolled.keys() & found.keys()):
            problems.append(document.problem(place, f"two stages are named {twice}, one of them in a group of rounds: rename one"))
        found |= unrolled
    return found, groups


def _message(detail: "ErrorDetails", has: str) -> str:
    """Pydantic's error in terms of a recipe; `has` is appended for an unknown key."""
    given = detail["input"]
    match detail["type"]:
        case "extra_forbidden":
            return f"unknown key{has}"
        case "union_tag_invalid":
            known = detail.get("ctx", {})
            return f"type {known.get('tag')!r} is not one of {str(known.get('expected_tags')).replace(chr(39), '')}"
        case "union_tag_not_found":
            return "`type` is missing: write {type: ...}"
        case "model_type" | "model_attributes_type" if isinstance(given, str):
            return f"expected a mapping, not {given!r}: write {{type: {given}, ...}}, or its fields"
        case "model_type" | "model_attributes_type":
            return f"expected a mapping, not {given!r}: write its fields in braces, or remove it"
    message = detail["msg"].removeprefix("Value error, ")
    return message if detail["type"] == "missing" or isinstance(given, dict) else f"{message} (it is {given!r})"


def _any_of(types: frozenset[str]) -> str:
    return " or ".join(sorted(types))


def _labeled(value: Any) -> list[tuple[str | None, Any]]:
    if isinstance(value, dict):
        return [(str(label), reference) for label, reference in value.items()]
    if isinstance(value, list):
        return [(None, reference) for reference in value]
    return [(None, value)]


def _files(config: Frozen) -> tuple[str, ...]:
    """Project files referenced anywhere in a config (field `path` of `files`, `folder` and `program` sources)."""
    found = []

    def walk(value: Any) -> None:
        if isinstance(value, dict):
            if value.get("type") in ("files", "folder", "program"):
                found.append(value["path"])
            for inner in value.values():
                walk(inner)
        elif isinstance(value, list):
            for inner in value:
                walk(inner)

    walk(config.model_dump(mode="json"))
    return tuple(dict.fromkeys(found))


def _parts(value: Any) -> set[str | int]:
    """All keys and indices in a value: possible parts of a place in the file."""
    if isinstance(value, dict):
        return set(value).union(*(_parts(inner) for inner in value.values()))
    if isinstance(value, list):
        return set(range(len(value))).union(*(_parts(inner) for inner in value))
    return set()
