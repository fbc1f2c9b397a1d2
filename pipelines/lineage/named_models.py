"""Named models from the `artifacts` sections of compiled files, in the working tree or at a git revision.

A tag `NAME@vX.Y.Z` (`FOLDER=NAME@vX.Y.Z` for a `dvc.yaml` in a folder) marks a model version, following the GTO convention of
`dvc artifacts get`.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from posixpath import normpath
from typing import Any

from pedigree.configs.base.project import Project
from pedigree.configs.language.compile import DEFAULT_RECIPE
from pedigree.data.store.untrusted import ArtifactError, parse_yaml
from pedigree.pipelines.ledger.git import git, names_at, text_at
from pedigree.pipelines.ledger.lock_files import read_lock


@dataclass(frozen=True)
class Named:
    """A model name and the stage that produces the model."""

    name: str
    recipe: str
    address: str
    desc: str
    labels: tuple[str, ...]

    @property
    def full(self) -> str:
        """Its name in `dvc artifacts get`."""
        return self.name if self.recipe == DEFAULT_RECIPE else f"artifacts/{self.recipe}:{self.name}"

    @property
    def tag(self) -> str:
        """Prefix of its tags."""
        return self.full.replace(":", "=")


def named_models(project: Project, revision: str | None = None) -> list[Named]:
    """All named models of the working tree or a commit, sorted by recipe, then in recipe order."""
    found = []
    for name, read in _compiled(project, revision):
        try:
            section = (parse_yaml(read(), name) or {}).get("artifacts") or {}
            found += [model for label, body in section.items() if (model := _named(name, str(label), body))]
        except (ArtifactError, AttributeError, TypeError) as error:
            where = f"{name} at {revision}" if revision else name
            raise ArtifactError(f"{where} cannot be read: run `pedigree compile RECIPE` to regenerate it") from error
    return sorted(found, key=lambda model: model.recipe)


def find_named(models: list[Named], text: str) -> Named | None:
    """Find a model by `NAME`, `RECIPE/NAME`, or DVC's `artifacts/RECIPE:NAME`; the recipe is preferred over its variants.

    Raises:
        ArtifactError: several models match.
    """
    found = [model for model in models if text in (model.name, f"{model.recipe}/{model.name}", model.full)]
    found = [model for model in found if "+" not in model.recipe] or found
    if len(found) > 1:
        several = ", ".join(f"{model.recipe}/{model.name}" for model in found)
        raise ArtifactError(f"{text!r} matches several models; choose one of {several}")
    return found[0] if found else None


def versions(project: Project, model: Named) -> list[str]:
    """Versions of a model from git tags, oldest first."""
    tags = git(project, "tag", "--list", "--sort=version:refname", "--end-of-options", f"{model.tag}@v*").stdout.split()
    return [tag.removeprefix(f"{model.tag}@") for tag in tags]


def revision_of(project: Project, name: str, revision: str) -> str:
    """Resolve `NAME@REVISION` to a git revision or to the tag of this model version."""
    if git(project, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}").returncode == 0:
        return revision
    tags = git(project, "tag", "--list", "--end-of-options", f"*@{revision}").stdout.split()
    spelt = {f"{name}@{revision}", f"{name.replace(':', '=')}@{revision}"}
    recipe, _, model = name.rpartition("/")
    spelt |= {f"artifacts/{recipe}={model}@{revision}"} if recipe else set()
    found = [tag for tag in tags if tag in spelt or (not recipe and tag.endswith(f"={name}@{revision}"))]
    if len(found) > 1:
        raise ArtifactError(f"{name}@{revision} matches several tags: {', '.join(found)}; specify one of them as the revision")
    return f"refs/tags/{found[0]}" if found else revision


def _compiled(project: Project, revision: str | None) -> Iterator[tuple[str, Callable[[], str]]]:
    """(path, function that reads its text) of every `dvc.yaml` with stages of a recipe."""
    if revision is None:
        paths = [project.root / "dvc.yaml", *sorted(project.artifacts.glob("*/dvc.yaml"))]
        found = [path for path in paths if os.path.lexists(path)]
        yield from ((path.relative_to(project.root).as_posix(), partial(read_lock, path)) for path in found)
        return
    for name in names_at(project, revision) or []:
        path = PurePosixPath(name)
        if path.name == "dvc.yaml" and (len(path.parts) == 1 or (path.parts[0] == "artifacts" and len(path.parts) == 3)):
            yield name, partial(text_at, project, revision, name)


def _named(file: str, name: str, body: Any) -> Named | None:
    """None for a user-defined artifact that no recipe stage produces."""
    folder = PurePosixPath(file).parent
    parts = Path(normpath((folder / str(body.get("path"))).as_posix())).parts
    if body.get("type") != "model" or len(parts) != 4 or parts[0] != "artifacts" or parts[3] != "payload":
        return None
    recipe = DEFAULT_RECIPE if folder == PurePosixPath(".") else folder.name
    return Named(name, recipe, f"{parts[1]}/{parts[2]}", str(body.get("desc", "")), tuple(map(str, body.get("labels", []))))
