"""Why a stage cannot use what it takes from outside the recipe, as far as that is on this machine: models, rows, programs."""

import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

from pedigree.configs.base.paths import place_of, written_of
from pedigree.configs.base.project import Project
from pedigree.configs.base.python_files import problem_of_program
from pedigree.configs.rows.row_sources import Files
from pedigree.configs.rows.source_models import FolderModel, HubModel
from pedigree.data.artifacts.exports import checked_records, is_export
from pedigree.data.sources import hub
from pedigree.data.sources.model_folders import DESCRIBING, problem_of
from pedigree.data.store.untrusted import ArtifactError
from pedigree.pipelines.estimate.facts import folder_of, snapshot_of
from pedigree.pipelines.ledger.identity import HASHES


def problem_of_source(project: Project, config: Any, source: Any) -> str | None:
    """Why a config cannot use one of its sources or programs; None where nothing shows that it cannot."""
    if isinstance(source, FolderModel | HubModel):
        return _problem_of_model(project, config, source)
    path = getattr(source, "path", None)
    if path is None or not (place := place_of(project.root, path)).exists():
        return None
    if isinstance(source, Files):
        from pedigree.data.sources.sources import Outside, problem_of_first_rows  # loads what parses rows
        from pedigree.stages.verifiers import check

        return problem_of_first_rows(config, source, Outside(files={path: place}, check_verifier=check))
    return problem_of_program(project.root, path, source.function)


def fetched(repo: hub.Repository) -> Collection[str] | None:
    """Names of all files of a model on the hub, if those that describe it are in the hub's cache."""
    folder, names = snapshot_of(repo.name, repo.revision), hub.listed(repo)
    return names if names and all((folder / name).exists() for name in DESCRIBING if name in names) else None


def _problem_of_model(project: Project, config: Any, source: FolderModel | HubModel) -> str | None:
    """Why the files of a model do not belong together, once those that describe it are here."""
    folder, coming = folder_of(project, source), ()
    if isinstance(source, HubModel) and not os.environ.get(hub.FOLDER):
        coming = fetched(hub.Repository("model", source.repo, source.revision))
    if coming is None or not folder.exists():
        return None
    problem = (_problem_of_export(folder) if isinstance(source, FolderModel) else None) or problem_of(folder, config, coming)
    return problem and f"{written_of(source.path) if isinstance(source, FolderModel) else f'hub model {source.repo}'}: {problem}"


def _problem_of_export(folder: Path) -> str | None:
    for artifact in (folder, folder.resolve().parent):
        if (artifact / "record.json").exists() and (artifact / "payload").exists():
            return (
                "it is an artifact of a Pedigree project, whose lineage would be lost: name the folder that `pedigree export` writes there"
            )
    if is_export(folder):
        try:
            checked_records(folder, HASHES.files(folder))
        except ArtifactError as error:
            return str(error)
    return None
