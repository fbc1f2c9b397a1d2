"""Artifacts recorded in the `dvc.lock` files of the working tree or of a git revision."""

import os
from dataclasses import dataclass
from pathlib import Path

from pedigree.configs.base.project import Project
from pedigree.data.store.untrusted import ArtifactError, LockOut, inside, parse_lock
from pedigree.pipelines.ledger.git import names_at, text_at
from pedigree.pipelines.ledger.lock_files import read_lock
from pedigree.pipelines.ledger.transfers import LedgerError


@dataclass(frozen=True)
class Recorded:
    """An output recorded in a `dvc.lock`."""

    address: str
    part: str
    """`payload`, `evidence`, `record.json` …"""
    path: Path
    md5: str
    """With `.dir` for a folder."""


def recorded(project: Project) -> list[Recorded]:
    """All parts of artifacts recorded in the working tree, sorted by address and part.

    Raises:
        LedgerError: a file is damaged.
    """
    paths = (project.root / "dvc.lock", *sorted(project.artifacts.glob("*/dvc.lock")))
    try:
        return _sorted(project, {path: read_lock(path) for path in paths})
    except ArtifactError as error:
        raise LedgerError(str(error)) from error


def recorded_at(project: Project, revision: str) -> list[Recorded]:
    """All parts of artifacts recorded in a git revision, sorted by address and part.

    Raises:
        LedgerError: git knows no such revision, or one of the files is damaged.
    """
    names = names_at(project, revision)
    if names is None:
        raise LedgerError(f"{revision!r} is not a commit, branch or tag of this git repository: `git log` lists commits")
    return _sorted(project, {project.root / name: text_at(project, revision, name) for name in names if Path(name).name == "dvc.lock"})


def _sorted(project: Project, texts: dict[Path, str]) -> list[Recorded]:
    found = []
    for path, text in texts.items():
        try:
            outs = [out for entry in parse_lock(text, "it").values() for out in entry.outs]
            found += filter(None, (_output(project, path.parent, out) for out in outs))
        except ArtifactError as error:
            remedy = "restore it from git, or delete it and `pedigree run` rebuilds it from the cache"
            raise LedgerError(f"{path.relative_to(project.root)} is damaged ({error}): {remedy}") from error
    return sorted(found, key=lambda entry: (entry.address, entry.part))


def _output(project: Project, folder: Path, out: LockOut) -> Recorded | None:
    """An output of a `dvc.lock` in `folder`; None for one outside the artifacts, where a user's own stage may write."""
    place = Path(os.path.normpath(folder / out.path))
    if not place.is_relative_to(project.artifacts):
        return None
    name = place.relative_to(project.artifacts).as_posix()
    address, _, part = inside(project.artifacts, name).relative_to(project.artifacts).as_posix().rpartition("/")
    if out.md5 is None or address.count("/") != 1:
        raise ArtifactError(f"output {name} has no md5, or is not part of an artifact RECIPE/STAGE")
    return Recorded(address, part, place, out.md5)
