"""Variants of a project: what was made with `--set`. They are listed and removed here; the cache is never touched."""

import re
from dataclasses import dataclass
from pathlib import Path

from configs.base.problems import UsageProblem
from configs.base.project import Project
from configs.base.texts import command
from configs.language.compile import source_file
from data.store.untrusted import LOCK_BYTES, ArtifactError, read_plain, read_source
from pipelines.cli import removal
from pipelines.jobs.live import live_jobs
from pipelines.jobs.liveness import Signs
from pipelines.maintain.gc import GcRefused, collect

COMMAND = "pedigree variants --remove"


@dataclass(frozen=True)
class Variant:
    """One variant, `RECIPE+HASH`."""

    project: Project
    name: str
    recipe: str
    """The recipe, by name or path, that it varies."""
    overrides: tuple[str, ...]
    stages: int
    """How many stages it does not share with the recipe."""
    done: int
    """How many of them have an artifact."""
    size: int
    """Bytes of all its files; they may be linked to the cache."""
    age_s: float
    """Seconds since something in it changed."""

    @property
    def folder(self) -> Path:
        return self.project.recipe_folder(self.name)


def variants(project: Project) -> list[Variant]:
    """All variants that have been compiled, sorted by name."""
    found = (_variant(project, path.parent) for path in sorted(project.artifacts.glob("*/source.json")))
    return [variant for variant in found if variant is not None]


def find_variant(project: Project, name: str) -> Variant:
    """A variant by name.

    Raises:
        UsageProblem: there is none; the message lists those there are.
    """
    known = variants(project)
    for variant in known:
        if variant.name == name:
            return variant
    names = ", ".join(variant.name for variant in known) or "none"
    raise UsageProblem(f"there is no variant {name!r}; there are: {names}. Artifacts of recipes themselves are not removed")


def refuse_while_in_use(variant: Variant) -> Signs:
    """Listens to other machines too; returns what was heard.

    Raises:
        UsageProblem: a job of it runs, or another command works on it.
    """
    signs = removal.listened(variant.project, _leases(variant))
    _refuse_live_jobs(variant, signs)
    with removal.alone(signs, _leases(variant), COMMAND, variant.name):
        return signs


def remove(variant: Variant, signs: Signs) -> None:
    """Removes `artifacts/NAME`; `signs` are those of `refuse_while_in_use`.

    Raises:
        UsageProblem: a job of it runs, or another command works on it.
    """
    removal.remove(signs, variant.folder, _leases(variant), COMMAND, check=lambda: _refuse_live_jobs(variant, signs))


def collectable(variant: Variant) -> dict[str, int] | str:
    """Objects of the removed variant (hash → bytes) that `pedigree gc` would delete; or why it cannot tell."""
    try:
        sweep = collect(variant.project)
    except GcRefused as error:
        return str(error)
    return {oid: size for oid, size in sweep.objects.items() if str(sweep.owners.get(oid, "")).startswith(f"{variant.name}/")}


def _refuse_live_jobs(variant: Variant, signs: Signs) -> None:
    running = [job.address for job in live_jobs(variant.project, signs) if job.address.startswith(f"{variant.name}/")]
    if running:
        raise UsageProblem(f"{', '.join(running)} is running: end it with {command('cancel', running[0])}, then type this again")


def _leases(variant: Variant) -> list[str]:
    return [f"{variant.name}--{stage}" for stage in _stages(variant.folder)]


def _variant(project: Project, folder: Path) -> Variant | None:
    """None for a recipe that merely lies elsewhere: it has no overrides."""
    if "+" not in folder.name:
        return None
    try:
        source = read_source(project.root / source_file(folder.name))
        recipe, overrides = source.recipe, source.overrides
    except ArtifactError:  # it can be looked at and removed
        recipe, overrides = folder.name.partition("+")[0], ("(its source.json cannot be read)",)
    if not overrides:
        return None
    files = [path.stat() for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    stages = _stages(folder)
    return Variant(
        project=project,
        name=folder.name,
        recipe=recipe,
        overrides=overrides,
        stages=len(stages),
        done=sum((folder / stage / "record.json").exists() for stage in stages),
        size=sum(status.st_size for status in files),
        age_s=max(0.0, removal.disk_time(project.artifacts) - max((status.st_mtime for status in files), default=0.0)),
    )


def _stages(folder: Path) -> list[str]:
    try:
        text = read_plain(folder / "params.yaml", LOCK_BYTES).decode(errors="replace")
        return re.findall(r"^([a-z][a-z0-9_]*):", text, re.MULTILINE)
    except ArtifactError:
        return []
