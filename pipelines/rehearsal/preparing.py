"""Before a rehearsal: its project, the made repositories, and the recipes and the profile as they are rehearsed.

The project lies in `.pedigree/rehearsals/PROFILE/` of the real one, with a DVC of its own that has no remote, so that nothing of a
rehearsal meets anything real. Recipes that refer to each other lie there side by side. Every file is written whole or not at all, and
what is made follows from its contents, so that a rehearsal that was killed goes on when it is typed again.
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

from configs.base.document import ConfigError, Problem
from configs.base.problems import PedigreeError
from configs.base.project import Project
from configs.base.shrink import RULE_ROWS, Reduced, StandIns, model_repo, rehearsed_name
from configs.judging.answers import Scorers
from configs.judging.asking import ByEndpoint
from configs.judging.rephrasing import FindRephrased
from configs.judging.synthesis import Synthesize
from configs.language.graph import Graph, Node
from configs.language.recipe import load_recipes
from configs.rehearsal.families import Dialogue, ModelFamily, ModelPlan, families, family_of
from configs.rehearsal.shrinking import FILE_ROWS, rehearsed, rehearsed_profile
from configs.rows.datasets import (
    OWN,
    TEMPLATES,
    Arithmetic,
    Constraints,
    Files,
    FolderModel,
    Hub,
    HubModel,
    PackagedModel,
    PrepareData,
    RowProgram,
    SourceModel,
    Stored,
)
from data.artifacts.artifacts import write_bytes, write_text
from data.artifacts.provenance import CODE_ROOT
from data.host import machine
from data.sources import hub, rehearsal_hub, row_files
from pipelines.estimate.shapes import known_shape
from pipelines.jobs.context import RunContext, Watch, unwatched
from pipelines.rehearsal.judge import serve
from pipelines.run.runs import load_execution, load_run

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
"""Layers of a made model, and its steps of learning. Where reinforcement learning may begin with it, some answers must be right; of a pool
that is sampled from it is enough that they come to an end, and a judge reads many long questions that its answers do not depend on."""

Tell = Callable[[str], None]


def nobody(words: str) -> None:
    """Is told nothing."""


@dataclass(frozen=True)
class Rehearsal:
    """A recipe, ready to be rehearsed."""

    real: Graph
    project: Project
    """Of the rehearsal."""
    recipe: str
    """Name of the recipe in that project."""
    profile: str
    """Name of the profile there."""
    mirror: Path
    """What stands for the hub."""
    changes: tuple[Reduced, ...]
    """All that is otherwise than in the recipe and its profile, of the stages of this recipe's graph."""

    def opened(self, watch: Watch = unwatched) -> RunContext:
        """Its run. From here on this process and its jobs take the mirror for the hub.

        Raises:
            ConfigError: problems of the recipe or of the profile.
        """
        os.environ[hub.FOLDER] = str(self.mirror)
        run = load_run(self.project, self.recipe, profile=self.profile, compiled=True, watch=watch)
        run.on_code_change, run.changes = "rerun", self.changes
        return run


class Unmade(PedigreeError):
    """The process that makes tiny models ended before it could say what is wrong; the message has its last words."""


class CannotRehearse(ConfigError):
    """Something that the recipe takes from outside has nothing that could stand for it."""


def check(real: Project, graphs: Sequence[Graph]) -> None:
    """Looks whether everything from outside has something that stands for it.

    Raises:
        CannotRehearse: with all that has not, and where it belongs.
    """
    folders, problems = rehearsal_hub.places(real.root), []
    known = families([folder / "models" for folder in folders])
    for graph in graphs:
        for node in graph.own:
            for source in _sources(node):
                problem = _missing(real.root, node, source, folders, known)
                if problem:
                    problems.append(Problem(graph.recipe, None, f"stage {node.name}: {problem}"))
    if problems:
        raise CannotRehearse(list(dict.fromkeys(problems)))


def prepare(real: Project, recipe: str, overrides: Sequence[str] = (), profile: str | None = None, tell: Tell = nobody) -> Rehearsal:
    """Makes what a rehearsal needs, or finds it made.

    Raises:
        ConfigError: problems of the recipe or of the profile; something from outside has nothing that stands for it.
    """
    graphs = load_recipes(real.recipes, recipe, overrides)
    graph = graphs[-1]
    name = profile or graph.execution
    execution = load_execution(real, name)
    check(real, graphs)
    project = real.rehearsal(name)
    lay_project(project)
    stand, mirror = _stand(real, project, graphs, tell)
    text, changes = rehearsed_profile(execution, Path(name).stem, machine.cores())
    write_text(project.executions / f"{Path(name).stem}.yaml", text)
    written = {one.recipe: one.written for one in graphs}
    for one in graphs:
        text, changed = rehearsed(one, Path(name).stem, stand, written.get(one.extends, ()))
        write_text(project.recipes / f"{rehearsed_name(one.recipe)}.yaml", text)
        changed += [change for node in one.own for change in _lay_files(real, project, node)]
        changes += [change for change in changed if change.where in graph.nodes]
    return Rehearsal(graph, project, rehearsed_name(graph.recipe), Path(name).stem, mirror, tuple(changes))


def lay_project(project: Project) -> None:
    """The folders and settings of a project, where they are not there yet."""
    for folder in (project.recipes, project.executions):
        folder.mkdir(parents=True, exist_ok=True)
    config = project.root / ".dvc" / "config"
    if not config.is_file() or config.read_text() != DVC_CONFIG:
        config.parent.mkdir(exist_ok=True)
        write_text(config, DVC_CONFIG)


# --- the outside -------------------------------------------------------------------------------------------------------


def _sources(node: Node) -> list[Any]:
    return [source for _, source in _placed_sources(node)]


def _placed_sources(node: Node) -> Iterator[tuple[str, Any]]:
    """(path of the field, source) of whatever a stage takes from outside."""
    if isinstance(node.config, PrepareData):
        yield from ((f"sources.{number}", source) for number, source in enumerate(node.config.sources))
        if node.config.shots:
            yield "shots.source", node.config.shots.source
    elif isinstance(node.config, SourceModel):
        yield "source", node.config.source


def _missing(root: Path, node: Node, source: Any, folders: Sequence[Path], known: Mapping[str, ModelFamily]) -> str | None:
    try:
        if isinstance(source, Hub):
            rehearsal_hub.data_set(source.repo, folders)
        elif isinstance(source, Stored):
            rehearsal_hub.stored_rows(source, folders)
        elif isinstance(source, Files | RowProgram) and not (root / source.path).exists():
            return f"{source.path} does not exist in the project: put it there, or change the config that names it"
        elif isinstance(node.config, SourceModel) and family_of(_family_name(source), known) is None:
            return (
                f"nobody has described the model {_family_name(source)}, so that none of its kind can be made: write its architecture and "
                f"tokenizer into {folders[0] / 'models' / 'NAME.yaml'}; docs/rehearse.md says how"
            )
    except hub.HubError as error:
        return str(error)
    return None


def _family_name(source: Any) -> str:
    """By what the family of a model is looked up."""
    match source:
        case HubModel():
            return source.repo
        case PackagedModel():
            return source.asset
        case FolderModel():
            return source.path
        case _:
            return source.type


def _repo(node: Node) -> str:
    """The repository of the tiny model that replaces the one of a `source_model` stage."""
    assert isinstance(node.config, SourceModel)
    return model_repo(node.address, node.config.source)


def _stand(real: Project, project: Project, graphs: Sequence[Graph], tell: Tell) -> tuple[StandIns, Path]:
    """What stands for the outside of these recipes, and the mirror that it lies in."""
    folders = rehearsal_hub.places(real.root)
    nodes = {node.address: node for graph in graphs for node in graph.own}
    repositories, files = {}, {}
    for node in nodes.values():
        for source in _sources(node):
            if isinstance(source, Hub):
                repositories[f"datasets/{source.repo}"] = rehearsal_hub.data_set(source.repo, folders)
            elif isinstance(source, Stored):
                files[source.name] = rehearsal_hub.lay_stored(source, rehearsal_hub.stored_rows(source, folders))
    repositories |= _made_models(nodes, folders, tell)
    commits = {
        (place.partition("s/")[0], place.partition("/")[2]): rehearsal_hub.commit_of(folder) for place, folder in repositories.items()
    }
    judge_url = serve(project.root) if any(_is_answered_here(node) for node in nodes.values()) else ""
    return StandIns(commits, files, judge_url), rehearsal_hub.mirror(repositories)


def _is_answered_here(node: Node) -> bool:
    """Whether what the stage asks is asked of the made endpoint."""
    match node.config:
        case Scorers(rating=rating):
            return rating is not None and isinstance(rating.by, ByEndpoint)
        case Synthesize() | FindRephrased():  # whoever is asked in the recipe
            return True
    return False


def _ruled(nodes: Iterable[Node]) -> list[Arithmetic | Constraints]:
    """The rules by which the recipe makes training rows, as many as are rehearsed."""
    configs = [node.config for node in nodes if isinstance(node.config, PrepareData) and node.config.record != "item"]
    found = [source for config in configs for source in config.sources if isinstance(source, Arithmetic | Constraints)]
    return [source.model_copy(update={"count": min(source.count, RULE_ROWS)}) for source in found]


def _family(node: Node, folders: Sequence[Path]) -> ModelFamily:
    """Of a model that comes from outside; its heads are those of its own size, where that is known."""
    assert isinstance(node.config, SourceModel)
    name = _family_name(node.config.source)
    family = family_of(name, families([folder / "models" for folder in folders]))
    assert family is not None
    shape = known_shape(name)
    sizes = {"heads": shape.heads, "kv_heads": shape.kv_heads, "tied": shape.tied} if shape else {}
    return family.model_copy(update=sizes)


def _made_models(nodes: Mapping[str, Node], folders: Sequence[Path], tell: Tell) -> dict[str, Path]:
    """Place in a mirror → folder, of a small model for each that the recipes bring in."""
    texts, dialogues = rehearsal_hub.texts_and_dialogues(folders, _ruled(nodes.values()))
    brought = [node for node in nodes.values() if isinstance(node.config, SourceModel)]
    asked = {edge.source for node in nodes.values() for edge in node.edges if edge.port == "judge"}
    judges = {_repo(node) for node in brought if node.address in asked}
    trained = {_repo(node) for node in brought if node.address in not_only_sampled(nodes.values())}
    wanted = {_repo(node): node for node in reversed(brought)}
    plans = {}
    for repo, node in wanted.items():
        size = JUDGE if repo in judges else TRAINED if repo in trained else SAMPLED
        plans[repo] = _plan(node, _family(node, folders), texts, None if size is JUDGE else dialogues, *size)
    names = {repo: f"models/{rehearsal_hub.fingerprint(plan)[:40]}" for repo, plan in plans.items()}
    of = {name: repo for repo, name in names.items()}

    def make(building: dict[str, Path]) -> None:
        places: list[str] = []
        for name, folder in building.items():
            tell(f"making a tiny model in the place of {of[name]}, once for all rehearsals")
            file = folder.with_name("plan.json")
            write_text(file, plans[of[name]])
            places += [str(file), str(folder)]
        paths = os.pathsep.join([str(CODE_ROOT), os.environ.get("PYTHONPATH", "")])
        environment = os.environ | {"PYTHONPATH": paths, "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}  # our code, and no folder's here
        words = [sys.executable, "-m", "stages.training.made_models", *places]
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise Unmade(f"the process that makes tiny models ended with exit code {done.returncode}: {done.stderr[-2000:]}")
        found = zip(building, json.loads(done.stdout.splitlines()[-1]), strict=True)
        problems = [Problem(wanted[of[name]].recipe, None, _unmade(of[name], problem)) for name, problem in found if problem is not None]
        if problems:
            raise CannotRehearse(problems)

    made = rehearsal_hub.made_once(names.values(), make)
    return {f"models/{repo}": made[name] for repo, name in names.items()}


def _unmade(repo: str, problem: str) -> str:
    return f"no tiny model could be made in the place of {repo}: {problem}; mend what configs/rehearsal/models says of its family"


def not_only_sampled(nodes: Iterable[Node]) -> set[str]:
    """Addresses of what serves as more than one of the policies that a pool is sampled from."""
    return {edge.source for node in nodes for edge in node.edges if not (node.kind == "sample" and edge.port == "policies")}


def _plan(node: Node, family: ModelFamily, texts: list[str], dialogues: list[dict[str, Any]] | None, layers: int, steps: int) -> str:
    """Of a small model in the place of a real one, which learns these dialogues; without any it learns to rate."""
    config = node.config
    assert isinstance(config, SourceModel)
    named = family.template or "chatml" if config.chat_template == OWN else config.chat_template
    return ModelPlan(
        family=family,
        template=(TEMPLATES / f"{named}.jinja").read_text(),
        comes_with_template=family.template is not None,
        texts=tuple(texts),
        reads=dialogues is not None,
        dialogues=tuple(Dialogue.model_validate(one) for one in (rehearsal_hub.judging() if dialogues is None else dialogues)),
        layers=layers,
        steps=steps,
    ).model_dump_json()


def _lay_files(real: Project, project: Project, node: Node) -> Iterator[Reduced]:
    """Puts the project's own files there, cut to a few rows; gives the sources that lost some."""
    for place, source in _placed_sources(node):
        if isinstance(source, Files | RowProgram) and _cut(real.root / source.path, project.root / source.path):
            yield Reduced(node.address, f"{place}.path", source.path, f"the first {FILE_ROWS} rows of {source.path}", "data")


def _cut(source: Path, target: Path) -> bool:
    """Whether something was left out."""
    if source.is_dir():
        return any([_cut(file, target / file.relative_to(source)) for file in source.rglob("*.*") if file.is_file()])
    rows = row_files.first_rows(source, FILE_ROWS)
    if rows is not None:
        write_bytes(target, rows)
        return True
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    return False
