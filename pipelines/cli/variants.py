"""List and remove variants (artifacts made with `--set`); the DVC cache is not touched."""

import re
from dataclasses import dataclass
from pathlib import Path

from pedigree.configs.base.problems import UsageProblem
from pedigree.configs.base.project import Project
from pedigree.configs.base.texts import command
from pedigree.configs.language.compile import source_file
from pedigree.data.store.untrusted import LOCK_BYTES, ArtifactError, read_plain, read_source
from pedigree.pipelines.cli import removal
from pedigree.pipelines.jobs.live import Signs, live_jobs
from pedigree.pipelines.maintain.gc import collect

COMMAND = "pedigree variants --remove"


@dataclass(frozen=True)
class Variant:
    """One variant, `RECIPE+HASH`."""

    project: Project
    name: str
    recipe: str
    """Name or path of the base recipe."""
    overrides: tuple[str, ...]
    stages: int
    """Number of stages not shared with the recipe."""
    done: int
    """Number of those stages with an artifact."""
    size: int
    """Total bytes of its files, which may be links into the cache."""
    age_s: float
    """Seconds since the last change."""

    @property
    def folder(self) -> Path:
        return self.project.recipe_folder(self.name)


def variants(project: Project) -> list[Variant]:
    """Return all compiled variants, sorted by name."""
    found = (_variant(project, path.parent) for path in sorted(project.artifacts.glob("*/source.json")))
    return [variant for variant in found if variant is not None]


def find_variant(project: Project, name: str) -> Variant:
    known = {variant.name: variant for variant in variants(project)}
    if name not in known:
        raise UsageProblem(f"no variant {name!r}; variants: {', '.join(known) or 'none'}. Artifacts of base recipes cannot be removed")
    return known[name]


def refuse_while_in_use(variant: Variant) -> Signs:
    """Raise UsageProblem if a process uses a variant, including on other machines; return the liveness data."""
    signs = removal.listened(variant.project, _leases(variant))
    _refuse_live_jobs(variant, signs)
    with removal.exclusive_leases(signs, _leases(variant), COMMAND, variant.name):
        return signs


def remove(variant: Variant, signs: Signs) -> None:
    """Remove `artifacts/NAME`; `signs` comes from `refuse_while_in_use`, which is checked again."""
    removal.remove(signs, variant.folder, _leases(variant), COMMAND, check=lambda: _refuse_live_jobs(variant, signs))


def collectable(variant: Variant) -> dict[str, int] | str:
    """Return the objects (hash → bytes) of a removed variant that `pedigree gc` would delete, or why that is unknown."""
    try:
        sweep = collect(variant.project)
    except UsageProblem as error:
        return str(error)
    return {oid: size for oid, size in sweep.objects.items() if str(sweep.owners.get(oid, "")).startswith(f"{variant.name}/")}


def _refuse_live_jobs(variant: Variant, signs: Signs) -> None:
    running = [job.address for job in live_jobs(variant.project, signs) if job.address.startswith(f"{variant.name}/")]
    if running:
        raise UsageProblem(f"{', '.join(running)} is running: end it with {command('cancel', running[0])}, then retry")


def _leases(variant: Variant) -> list[str]:
    return [f"{variant.name}--{stage}" for stage in _stages(variant.folder)]


def _variant(project: Project, folder: Path) -> Variant | None:
    """Return None for a recipe from outside configs/recipes: its folder name also has a hash, but it has no overrides."""
    if "+" not in folder.name:
        return None
    try:
        source = read_source(project.root / source_file(folder.name))
        recipe, overrides = source.recipe, source.overrides
    except ArtifactError:  # still listed, so that it can be removed
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
