"""Export: an artifact as a flat folder that travels.

The payload stands at the top, as transformers and vLLM load it; beside it `README.md`, a model card with the metadata that
model hubs read, and `pedigree/` with the records of the artifact and of its whole ancestry and its provenance in SLSA's words. Data
has a `croissant.json` beside the card. `pedigree/SHA256SUMS` vouches for every file: `sha256sum -c pedigree/SHA256SUMS` checks the
folder where there is no Pedigree. On demand `pedigree/model.sig` is a signature of the whole folder (`pipelines/publish/signing.py`).
"""

import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from configs.base.problems import UsageProblem
from configs.base.project import Project
from data.artifacts.artifacts import SUMS, Artifact, ArtifactError, content_hash, open_artifact, scan, sha256_file, write_json
from data.store.durable import rename, sync_tree
from data.store.hashing import Beat, silent
from pipelines.lineage import openlineage
from pipelines.lineage.ancestry import Pedigree, read_pedigree
from pipelines.lineage.evaluations import Evaluation, evaluations_of
from pipelines.lineage.standards import croissant, slsa
from pipelines.publish.attribution import handed_on, origins
from pipelines.publish.card import CARD, MODELS, card
from pipelines.publish.signing import Signer

CROISSANT = "croissant.json"
RECORDS = ("record.json", "run.json", "lineage.json")
FORMATS = ("openlineage", "slsa", "card", "croissant")


class ExportError(UsageProblem):
    """The folder cannot take the export."""


class UnknownFormat(UsageProblem):
    """There is no such standard here."""


def in_standard(pedigree: Pedigree, form: str, project: Project | None) -> str:
    """A pedigree in the words of a standard, ending in a new line; OpenLineage is sent where a server is configured.

    Raises:
        UnknownFormat: `form` is none of those there are.
        ArtifactError: the standard needs files that cannot be had, or describes other types of artifacts.
    """
    if form == "openlineage":
        events = openlineage.events(pedigree)
        if os.environ.get("OPENLINEAGE_URL"):
            return f"sent {len(events)} events to {openlineage.send(events)}\n"
        return openlineage.as_lines(events)
    if form == "slsa":
        return json.dumps(slsa(pedigree), indent=1, ensure_ascii=False) + "\n"
    if form == "croissant":
        return json.dumps(data_card(pedigree, project), indent=1, ensure_ascii=False) + "\n"
    if form == "card":
        return card(pedigree, pedigree.address, evaluations_of(project, pedigree.record.content), origins(pedigree, project))
    raise UnknownFormat(f"--format {form} is none of {', '.join(FORMATS)}")


def export(
    artifact_path: Path,
    name: str,
    target: Path,
    evaluations: Sequence[Evaluation] = (),
    *,
    project: Project | None = None,
    signer: Signer | None = None,
    told: Callable[[str], Beat] = lambda what: silent,
) -> Path:
    """Copies an artifact into a new or empty folder, whole or not at all, and proves the copy.

    Args:
        artifact_path: folder of a published artifact.
        name: its address, for the title of the card.
        target: a folder that does not exist or is empty.
        evaluations: that scored it, for the card.
        project: whose recipes may say more of licences than the records do.
        signer: signs the finished folder.
        told: gives, for what is being done, who is told how far it is.

    Raises:
        ExportError: the target holds something, or the payload has a file where the card or the records belong.
        ArtifactError: the artifact is damaged, or the copy is not what the record says.
    """
    artifact, pedigree = open_artifact(artifact_path, verify=True, beat=told("checking")), read_pedigree(artifact_path)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ExportError(f"{target} is not empty: name a folder that does not exist yet, or empty it first")
    taken = {entry.path.split("/")[0] for entry in artifact.record.files} & {"pedigree", CARD, CROISSANT}
    if taken:
        raise ExportError(f"the payload of {name} holds {', '.join(sorted(taken))}, where the export writes its own")
    target.parent.mkdir(parents=True, exist_ok=True)
    building = target.with_name(f".{target.name}.{os.getpid()}") / target.name  # a signature holds the folder's name
    try:
        building.parent.mkdir()
        _copy(artifact, building, told("copying"))
        _prove(building, artifact, told("checking the copy"))
        (building / "pedigree").mkdir()
        for record in RECORDS:
            shutil.copyfile(artifact.path / record, building / "pedigree" / record)
        (building / CARD).write_text(card(pedigree, name, evaluations, origins(pedigree, project)))
        if artifact.type in MODELS:
            write_json(building / "pedigree" / "provenance.slsa.json", slsa(pedigree))
        if is_data(pedigree):
            write_json(building / CROISSANT, data_card(pedigree, project))
        (building / SUMS).write_text(_sums(building, artifact))
        for path in building.rglob("*"):  # a DVC cache may have handed out read-only files
            path.chmod(path.stat().st_mode | 0o600)
        if signer is not None:
            told("signing")(0, sum(entry.size for entry in artifact.record.files))
            signer.sign(building)
        if target.exists():
            target.rmdir()
        told("writing to the disk")(0, sum(entry.size for entry in artifact.record.files))
        sync_tree(building)
        rename(building, target)
    finally:
        shutil.rmtree(building.parent, ignore_errors=True)
    return target


def is_data(pedigree: Pedigree) -> bool:
    """Whether its payload is rows."""
    return bool(pedigree.row_files())


def data_card(pedigree: Pedigree, project: Project | None = None) -> dict[str, Any]:
    """Croissant metadata of an artifact of rows.

    Raises:
        ArtifactError: it holds no rows, or they cannot be had.
    """
    if not is_data(pedigree):
        raise ArtifactError(f"{pedigree.address} is a {pedigree.record.type}: Croissant describes artifacts of rows")
    licences = {licence for origin in handed_on(origins(pedigree, project)) for licence in origin.licences}
    return croissant(pedigree, pedigree.rows(), licences)


def _copy(artifact: Artifact, target: Path, beat: Beat) -> None:
    total, done = sum(entry.size for entry in artifact.record.files), 0

    def copy(source: str, place: str) -> str:
        nonlocal done
        beat(done, total)
        done += os.stat(source).st_size
        return shutil.copy2(source, place)

    shutil.copytree(artifact.payload, target, copy_function=copy)


def _prove(folder: Path, artifact: Artifact, beat: Beat = silent) -> None:
    files = scan(folder, beat)
    if content_hash(files) != artifact.record.content:
        recorded = {entry.path: entry.sha256 for entry in artifact.record.files}
        wrong = sorted(entry.path for entry in files if recorded.get(entry.path) != entry.sha256)
        raise ArtifactError(f"the copy differs from the record in {', '.join(wrong) or 'a missing file'}: is the disk full or failing?")


def _sums(folder: Path, artifact: Artifact) -> str:
    """The sha256 of every file as `sha256sum` writes them; those of the payload have just been proved."""
    found = {entry.path: entry.sha256 for entry in artifact.record.files}
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name not in found:
            found[name] = sha256_file(path)
    return "".join(f"{sha256}  {name}\n" for name, sha256 in sorted(found.items()))
