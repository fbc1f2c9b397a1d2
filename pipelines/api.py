"""The Python interface: what `import pedigree` gives. Recipes are loaded, planned and run by the code behind the commands."""

import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pydantic_core import to_jsonable_python

from pedigree.configs.base.document import read_document
from pedigree.configs.base.frozen import Frozen
from pedigree.configs.base.problems import PedigreeError, UsageProblem
from pedigree.configs.base.project import Project
from pedigree.configs.language.compile import overrides_of, yaml_text
from pedigree.configs.language.kinds import kind_of
from pedigree.configs.language.recipe import load_recipe, recipe_file
from pedigree.data.artifacts import artifacts
from pedigree.data.artifacts.artifacts import write_text
from pedigree.data.records import records
from pedigree.pipelines.estimate.rates import measured
from pedigree.pipelines.jobs.events import RunEvent
from pedigree.pipelines.publish.report import write_report
from pedigree.pipelines.run import plans
from pedigree.pipelines.run.checks import checked_plan
from pedigree.pipelines.run.ensure import Result
from pedigree.pipelines.run.opening import Request, open_run
from pedigree.pipelines.run.planning import PlannedStage, rows_of
from pedigree.pipelines.run.plans import selection
from pedigree.pipelines.run.runs import StageEnd, current_among, run_graph
from pedigree.pipelines.telemetry import no_telemetry

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Recipe:
    """A recipe, as in its file: `extends` and rounds are not resolved. Two recipes with equal fields make the same artifacts.

    `Recipe.load` reads the file of a recipe. A recipe written in Python becomes usable when `save` has written its file, because DVC and
    later commands read it from there.
    """

    name: str
    """Name in `configs/recipes`, or path of a file."""
    description: str = ""
    execution: str | None = None
    """Default execution profile; None: that of the recipe it extends, else `cpu`."""
    extends: str | None = None
    models: Mapping[str, Any] = field(default_factory=dict)
    published: Mapping[str, Any] | None = None
    reproduce: Mapping[str, Any] | None = None
    stages: Mapping[str, Any] = field(default_factory=dict)
    """Name → stage, as in YAML; `Recipe.stage` makes one from a typed config."""
    overrides: tuple[str, ...] = ()
    """STAGE.FIELD=VALUE, as with `--set`; they make a variant and are not part of the file."""

    def __post_init__(self) -> None:
        for name in ("stages", "models", "published", "reproduce"):  # tuples become lists, as in YAML
            object.__setattr__(self, name, to_jsonable_python(getattr(self, name)))
        object.__setattr__(self, "overrides", tuple(self.overrides))

    @classmethod
    def load(cls, project: Project, name: str, overrides: Sequence[str] = ()) -> "Recipe":
        """Load and check a recipe, by name or by the path of its file; the name of a variant gives its recipe with its overrides.

        Raises:
            ConfigError: lists every problem with its line.
        """
        graph = load_recipe(project.recipes, name, overrides)
        if "+" in name and not name.endswith((".yaml", ".yml")):
            name, overrides = graph.source, overrides_of(graph)
        return cls(name, **read_document(recipe_file(project.recipes, name)).value, overrides=tuple(overrides))

    @staticmethod
    def stage(config: Frozen, **inputs: Any) -> dict[str, Any]:
        """A stage from the typed config of its kind, e.g. `Recipe.stage(Sft(...), policy="base", data=["rows"])`.

        Args:
            config: an instance of the config class of a kind, which determines the kind.
            inputs: port → stage, list of stages, or mapping of labels to stages.
        """
        given = {"in": inputs} if inputs else {}
        return {"kind": kind_of(config).name, **given, **config.model_dump(mode="json", exclude_unset=True)}

    def yaml(self) -> str:
        """The recipe's file."""
        defaults = Recipe(self.name, overrides=self.overrides)
        values = {one.name: getattr(self, one.name) for one in fields(self) if getattr(self, one.name) != getattr(defaults, one.name)}
        return yaml_text(values)

    def save(self, project: Project, *, replace: bool = False) -> Path:
        """Check the recipe and write its file.

        Args:
            project: the project that gets the file.
            replace: replace an existing file with other content, and its comments.

        Raises:
            UsageProblem: the file exists with other content.
            ConfigError: lists every problem of the recipe.
        """
        path = recipe_file(project.recipes, self.name)
        if path.exists() and not replace and Recipe.load(project, self.name) != dataclasses.replace(self, overrides=()):
            raise UsageProblem(f"{path} exists and differs from this recipe: choose another name, or replace it with save(replace=True)")
        with TemporaryDirectory() as folder:
            draft = Path(folder) / path.name
            write_text(draft, self.yaml())
            load_recipe(project.recipes, str(draft), self.overrides)
        write_text(path, self.yaml())
        return path


@dataclass(frozen=True)
class Artifact(artifacts.Artifact):
    """The finished output of a stage."""

    @classmethod
    def open(cls, project: Project, address: str) -> "Artifact":
        """Open the artifact of `RECIPE/STAGE`.

        Raises:
            ArtifactError: it is not here, or differs from its record.
        """
        found = artifacts.open_artifact(project.artifact(address))
        return cls(found.path, found.record)

    @property
    def metrics(self) -> Mapping[str, Any]:
        """The numbers that define its result."""
        return self.record.metrics

    def rows(self) -> Iterator[dict[str, Any]]:
        """Its records, one at a time; of a dataset, a completion, a judgment or another type with rows."""
        return records.stream(self.payload)


class RunFailed(PedigreeError):
    """Some stages were not made current; `ends` has the end of each one. Everything that existed before still exists."""

    def __init__(self, ends: Sequence[StageEnd]) -> None:
        self.ends = tuple(ends)
        super().__init__("\n".join(str(end) for end in ends if isinstance(end, PedigreeError)))


def plan(
    project: Project, recipe: Recipe | str, *, targets: Sequence[str] = (), force: Sequence[str] = (), execution: str | None = None
) -> list[PlannedStage]:
    """What `run` would do with each stage, why, and what it needs. Writes nothing.

    Args:
        project: the project of the recipe.
        recipe: a saved recipe, or the name of one.
        targets: only these stages and their ancestors; all stages if empty.
        force: stages to rerun even if they are up to date.
        execution: execution profile to use instead of the recipe's.
    """
    request = _request(project, recipe, targets, force, execution)
    context = open_run(project, request, looking=True)
    chosen, forced = selection(context, request)
    planned = plans.plan(context, chosen, forced)
    return rows_of(context, planned, forced, measured)


def run(
    project: Project,
    recipe: Recipe | str,
    *,
    targets: Sequence[str] = (),
    force: Sequence[str] = (),
    execution: str | None = None,
    on_event: Callable[[RunEvent], None] | None = None,
) -> list[Result]:
    """Bring the stages of a recipe up to date, as `pedigree run` does, and write its report. Resumes unfinished work.

    Works in any thread and changes no signal handler. Ctrl-C in the main thread ends the jobs; checkpoints are kept. It does not report to
    Prefect.

    Args:
        project: the project of the recipe.
        recipe: a saved recipe, or the name of one.
        targets: only these stages and their ancestors; all stages if empty.
        force: stages to rerun even if they are up to date.
        execution: execution profile to use instead of the recipe's.
        on_event: called with every event of the run, from several threads. An exception in it is logged and does not affect the run.

    Returns:
        How each stage became current, in the order of the recipe.

    Raises:
        RunFailed: a stage failed.
        ConfigError: the recipe or the profile is invalid, or a required job cannot run here.
    """

    def listen(event: RunEvent) -> None:
        if on_event is not None:
            try:
                on_event(event)
            except Exception:  # boundary: the caller's code
                LOG.exception("on_event failed")

    no_telemetry()
    request = _request(project, recipe, targets, force, execution)
    context = open_run(project, request, watch=listen)
    chosen, forced = selection(context, request)
    planned = checked_plan(context, chosen, forced)
    ends = run_graph(context, chosen, forced, planned)
    if any(entry.reasons for entry in planned):
        write_report(project, context.graph, current_among(ends))
    current = [end for end in ends if isinstance(end, Result)]
    if len(current) < len(ends):
        raise RunFailed(ends)
    return current


def _request(project: Project, recipe: Recipe | str, targets: Sequence[str], force: Sequence[str], execution: str | None) -> Request:
    """
    Raises:
        UsageProblem: the recipe is not saved.
    """
    if isinstance(recipe, str):
        recipe = Recipe(recipe)
    elif not recipe_file(project.recipes, recipe.name).exists() or Recipe.load(project, recipe.name, recipe.overrides) != recipe:
        raise UsageProblem(f"recipe {recipe.name} is not saved, or its file has changed: recipe.save(project) writes it")
    return Request(recipe.name, recipe.overrides, execution, until=tuple(targets), force=tuple(force))
