"""Prepare a rehearsal: its project, the generated repositories, and the reduced recipes and profile.

The project is `.pedigree/rehearsals/PROFILE/` in the real one and has its own DVC without a remote, so a rehearsal cannot affect real
artifacts. Recipes that refer to each other share it. Files are written atomically and generated content is deterministic, so an
interrupted rehearsal resumes when rerun.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pedigree.configs.base.document import ConfigError, Problem
from pedigree.configs.base.paths import place_of, written_of
from pedigree.configs.base.problems import PedigreeError
from pedigree.configs.base.project import Project
from pedigree.configs.base.shrink import RULE_ROWS, Reduced, StandIns, model_repo, rehearsed_name
from pedigree.configs.language.execution import Execution
from pedigree.configs.language.graph import Graph, Node
from pedigree.configs.language.recipe import load_recipes
from pedigree.configs.methods.environment_programs import EnvironmentProgram, programs_of
from pedigree.configs.methods.language_model import asks_endpoint
from pedigree.configs.methods.reward_terms import RewardProgram
from pedigree.configs.methods.rubrics import own_rubrics
from pedigree.configs.rehearsal.families import Dialogue, ModelFamily, ModelPlan, families, family_of
from pedigree.configs.rehearsal.shrinking import FILE_ROWS, rehearsed, rehearsed_profile
from pedigree.configs.rows.datasets import PrepareData
from pedigree.configs.rows.row_sources import Arithmetic, Constraints, Files, Hub, RowProgram, Stored
from pedigree.configs.rows.source_models import OWN, SourceModel, named, template_text
from pedigree.data.artifacts.artifacts import write_bytes, write_text
from pedigree.data.artifacts.provenance import CODE_ROOT
from pedigree.data.host import machine
from pedigree.data.sources import hub, rehearsal_hub, row_files
from pedigree.data.store.storage import StoreError
from pedigree.pipelines.estimate.shapes import known_shape
from pedigree.pipelines.jobs.context import RunContext
from pedigree.pipelines.jobs.events import Watch, unwatched
from pedigree.pipelines.rehearsal.judge import serve
from pedigree.pipelines.run.checks import refuse_contradictions, refuse_missing_engines
from pedigree.pipelines.run.opening import Request, load_execution, open_run, refuse_read_only

DVC_CONFIG = """[core]
    no_scm = true
    analytics = false
    autostage = false
    check_update = false
    checksum_jobs = 4
[cache]
    type = "reflink,copy"
    slow_link_warning = false
"""


TRAINED, SAMPLED, JUDGE = (2, 300), (1, 60), (1, 200)
"""(layers, training steps) of a tiny model, by use.

A model that may start reinforcement learning must give some correct answers. A model that is only sampled needs only to end its answers.
A judge reads many long questions, and its answers need not depend on them.
"""

Notify = Callable[[str], None]
"""Called with progress messages."""


@dataclass(frozen=True)
class Rehearsal:
    """A recipe prepared for rehearsal."""

    real: Graph
    project: Project
    """Project of the rehearsal."""
    recipe: str
    """Name of the recipe in that project."""
    profile: str
    """Name of the profile in that project."""
    mirror: Path
    """Folder that replaces the hub."""
    changes: tuple[Reduced, ...]
    """All changes to the recipe and its profile, for the stages of this recipe's graph."""

    def opened(self, watch: Watch = unwatched) -> RunContext:
        """Open the run. From now on, this process and its jobs use the mirror as the hub.

        Raises:
            ConfigError: problems of the recipe or of the profile.
        """
        os.environ[hub.FOLDER] = str(self.mirror)
        run = open_run(self.project, Request(self.recipe, profile=self.profile), watch=watch)
        run.on_code_change, run.changes = "rerun", self.changes
        return run


def check(real: Project, graphs: Sequence[Graph]) -> None:
    """Check that every external source has a replacement.

    Raises:
        ConfigError: lists all sources without one, and where to add it.
    """
    folders, problems = rehearsal_hub.places(real.root), []
    known = families([folder / "models" for folder in folders])
    for graph in graphs:
        for node in graph.own:
            found = [_missing(real.root, node, source, folders, known) for _, source in _sources(node)]
            found += [_absent(name) for name in _given(node) if not (real.root / name).exists()]
            problems += [Problem(graph.recipe, None, f"stage {node.name}: {problem}") for problem in found if problem]
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))


def prepare(
    real: Project, recipe: str, overrides: Sequence[str] = (), profile: str | None = None, notify: Notify = lambda words: None
) -> Rehearsal:
    """Prepare a rehearsal, reusing existing files.

    Raises:
        ConfigError: problems of the recipe or the profile, a stage that cannot succeed, an external source has no replacement, or the
            packages that build tiny models are missing.
        UsageProblem: the project is not writable.
    """
    refuse_read_only(real)
    graphs = load_recipes(real.recipes, recipe, overrides)
    graph = graphs[-1]
    name = profile or graph.execution
    execution = load_execution(real, name)
    refuse_contradictions(real, graph, execution, graph.nodes)
    check(real, graphs)
    for one in graphs:  # the packages that build the tiny models, on this machine
        models = [node.address for node in one.own if isinstance(node.config, SourceModel)]
        refuse_missing_engines(one, models, Execution(slots=1), instead="")
    project = real.rehearsal(name)
    create_project(project)
    stand, mirror = _stand(real, project, graphs, notify)
    text, changes = rehearsed_profile(execution, Path(name).stem, machine.cores(), real.root)
    write_text(project.executions / f"{Path(name).stem}.yaml", text)
    written = {one.recipe: one.written for one in graphs}
    for one in graphs:
        text, changed = rehearsed(one, Path(name).stem, stand, written.get(one.extends, ()))
        write_text(project.recipes / f"{rehearsed_name(one.recipe)}.yaml", text)
        changed += [change for node in one.own for change in _lay_files(real, project, node)]
        changes += [change for change in changed if change.where in graph.nodes]
    return Rehearsal(graph, project, rehearsed_name(graph.recipe), Path(name).stem, mirror, tuple(changes))


def create_project(project: Project) -> None:
    """Create the folders and settings of a project if missing."""
    for folder in (project.recipes, project.executions):
        folder.mkdir(parents=True, exist_ok=True)
    config = project.root / ".dvc" / "config"
    if not config.is_file() or config.read_text() != DVC_CONFIG:
        config.parent.mkdir(exist_ok=True)
        write_text(config, DVC_CONFIG)


# --- external sources --------------------------------------------------------------------------------------------------


def _sources(node: Node) -> Iterator[tuple[str, Any]]:
    """(field path, source) of each external source of a stage."""
    if isinstance(node.config, PrepareData):
        yield from ((f"sources.{number}", source) for number, source in enumerate(node.config.sources))
        if node.config.shots:
            yield "shots.source", node.config.shots.source
    elif isinstance(node.config, SourceModel):
        yield "source", node.config.source
    yield from ((f"programs.{term.called}", term) for term in programs_of(node.config))


def _given(node: Node) -> tuple[str, ...]:
    """Files of the project that a stage of a rehearsal gets as they are."""
    return (*getattr(node.config, "files", ()), *own_rubrics(node.config.model_dump()))


def _missing(root: Path, node: Node, source: Any, folders: Sequence[Path], known: Mapping[str, ModelFamily]) -> str | None:
    try:
        if isinstance(source, Hub):
            rehearsal_hub.data_set(source.repo, folders)
        elif isinstance(source, Stored):
            rehearsal_hub.stored_rows(source, folders)
        elif isinstance(source, Files | RowProgram | RewardProgram | EnvironmentProgram) and not place_of(root, source.path).exists():
            return _absent(source.path)
        elif isinstance(node.config, SourceModel) and family_of(_family_name(source), known) is None:
            return (
                f"the model {_family_name(source)} has no description, so no tiny model can replace it: describe its architecture and "
                f"tokenizer in {folders[0] / 'models' / 'NAME.yaml'} (see docs/rehearse.md)"
            )
    except StoreError as error:
        return str(error)
    return None


def _absent(path: str) -> str:
    return f"{written_of(path)} does not exist: add it, or change the config that refers to it"


def _family_name(source: Any) -> str:
    """Name by which a model's family is looked up."""
    return named(source) or source.type


def _repo(node: Node) -> str:
    """The repository of the tiny model that replaces the one of a `source_model` stage."""
    assert isinstance(node.config, SourceModel)
    return model_repo(node.address, node.config.source)


def _stand(real: Project, project: Project, graphs: Sequence[Graph], notify: Notify) -> tuple[StandIns, Path]:
    """Replacements for the external sources of these recipes, and the mirror that holds them."""
    folders = rehearsal_hub.places(real.root)
    nodes = {node.address: node for graph in graphs for node in graph.own}
    repositories, files = {}, {}
    for node in nodes.values():
        for _, source in _sources(node):
            if isinstance(source, Hub):
                repositories[f"datasets/{source.repo}"] = rehearsal_hub.data_set(source.repo, folders)
            elif isinstance(source, Stored):
                files[source.name] = rehearsal_hub.place_stored(source, rehearsal_hub.stored_rows(source, folders))
    repositories |= _made_models(real.root, nodes, folders, notify)
    commits = {
        (place.partition("s/")[0], place.partition("/")[2]): rehearsal_hub.commit_of(folder) for place, folder in repositories.items()
    }
    # `shrink_asking` replaces a policy by an endpoint
    answers = any(hasattr(node.config, "by") or asks_endpoint(node.config) for node in nodes.values())
    judge_url = serve(project.root) if answers else ""
    return StandIns(commits, files, judge_url), rehearsal_hub.mirror(repositories)


def _ruled(nodes: Iterable[Node]) -> list[Arithmetic | Constraints]:
    """Procedural sources of training rows, with counts reduced for the rehearsal."""
    configs = [node.config for node in nodes if isinstance(node.config, PrepareData) and node.config.record != "item"]
    found = [source for config in configs for source in config.sources if isinstance(source, Arithmetic | Constraints)]
    return [source.model_copy(update={"count": min(source.count, RULE_ROWS)}) for source in found]


def _family(node: Node, folders: Sequence[Path]) -> ModelFamily:
    """Family of an external model, with the heads of its actual size if known."""
    assert isinstance(node.config, SourceModel)
    name = _family_name(node.config.source)
    family = family_of(name, families([folder / "models" for folder in folders]))
    assert family is not None
    shape = known_shape(name)
    sizes = {"heads": shape.heads, "kv_heads": shape.kv_heads, "tied": shape.tied} if shape else {}
    return family.model_copy(update=sizes)


def _made_models(root: Path, nodes: Mapping[str, Node], folders: Sequence[Path], notify: Notify) -> dict[str, Path]:
    """Path in the mirror → folder of a tiny model, for each model that the recipes import."""
    texts, dialogues = rehearsal_hub.texts_and_dialogues(folders, _ruled(nodes.values()))
    brought = [node for node in nodes.values() if isinstance(node.config, SourceModel)]
    asked = {edge.source for node in nodes.values() for edge in node.edges if edge.port == "judge"}
    judges = {_repo(node) for node in brought if node.address in asked}
    trained = {_repo(node) for node in brought if node.address in not_only_sampled(nodes.values())}
    wanted = {_repo(node): node for node in reversed(brought)}
    plans = {}
    for repo, node in wanted.items():
        size = JUDGE if repo in judges else TRAINED if repo in trained else SAMPLED
        plans[repo] = _plan(root, node, _family(node, folders), texts, None if size is JUDGE else dialogues, *size)
    names = {repo: f"models/{rehearsal_hub.fingerprint(plan)[:40]}" for repo, plan in plans.items()}
    of = {name: repo for repo, name in names.items()}

    def make(building: dict[str, Path]) -> None:
        places: list[str] = []
        for name, folder in building.items():
            notify(f"building a tiny model to replace {of[name]}, once for all rehearsals")
            file = folder.with_name("plan.json")
            write_text(file, plans[of[name]])
            places += [str(file), str(folder)]
        paths = os.pathsep.join([str(CODE_ROOT), os.environ.get("PYTHONPATH", "")])
        environment = os.environ | {"PYTHONPATH": paths, "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}  # ignore the current folder
        words = [sys.executable, "-m", "pedigree.stages.training.made_models", *places]
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise PedigreeError(f"building tiny models failed with exit code {done.returncode}: {done.stderr[-2000:]}")
        found = zip(building, json.loads(done.stdout.splitlines()[-1]), strict=True)
        remedy = "fix the description of its family in configs/rehearsal/models"
        problems = [
            Problem(wanted[of[name]].recipe, None, f"cannot build a tiny model to replace {of[name]}: {problem}; {remedy}")
            for name, problem in found
            if problem is not None
        ]
        if problems:
            raise ConfigError(problems)

    made = rehearsal_hub.build_once(names.values(), make)
    return {f"models/{repo}": made[name] for repo, name in names.items()}


def not_only_sampled(nodes: Iterable[Node]) -> set[str]:
    """Addresses of stages with a use other than as a policy of a `sample` stage."""
    return {edge.source for node in nodes for edge in node.edges if not (node.kind == "sample" and edge.port == "policies")}


def _plan(
    root: Path, node: Node, family: ModelFamily, texts: list[str], dialogues: list[dict[str, Any]] | None, layers: int, steps: int
) -> str:
    """Plan of a tiny model that is trained on these dialogues; None: on ratings."""
    config = node.config
    assert isinstance(config, SourceModel)
    named = family.template or "chatml" if config.chat_template == OWN else config.chat_template
    return ModelPlan(
        family=family,
        template=template_text(named, {name: root / name for name in config.files}),
        comes_with_template=family.template is not None,
        texts=tuple(texts),
        reads=dialogues is not None,
        dialogues=tuple(Dialogue.model_validate(one) for one in (rehearsal_hub.judging() if dialogues is None else dialogues)),
        layers=layers,
        steps=steps,
    ).model_dump_json()


def _lay_files(real: Project, project: Project, node: Node) -> Iterator[Reduced]:
    """Copy the project's own files, truncated to a few rows; yields a change for each truncated source."""
    for place, source in _sources(node):
        own = isinstance(source, Files | RowProgram | RewardProgram | EnvironmentProgram)
        if own and _cut(place_of(real.root, source.path), project.root / source.path):
            yield Reduced(node.address, f"{place}.path", source.path, f"the first {FILE_ROWS} rows of {source.path}", "data")
    for name in _given(node):
        source, target = real.root / name, project.root / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(source, target, dirs_exist_ok=True) if source.is_dir() else shutil.copy2(source, target)


def _cut(source: Path, target: Path) -> bool:
    """Copy a truncated file or folder; returns whether anything was cut."""
    if source.is_dir():
        return any([_cut(file, target / file.relative_to(source)) for file in source.rglob("*.*") if file.is_file()])
    rows = row_files.first_rows(source, FILE_ROWS)
    if rows is not None:
        write_bytes(target, rows)
        return True
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    return False
