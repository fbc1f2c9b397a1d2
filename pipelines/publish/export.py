"""Export an artifact as a self-contained, flat folder.

The payload is at the top level, where transformers and vLLM load it, next to a model card `README.md` with hub metadata. `pedigree/`
holds the records of the artifact and all its ancestors, and SLSA provenance for models. Datasets also get a `croissant.json`.
`sha256sum -c pedigree/SHA256SUMS` verifies every file without Pedigree. `pedigree/model.sig` optionally signs the whole folder
(`pipelines/publish/signing.py`).
"""

import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pedigree.configs.base.kind import MODELS
from pedigree.configs.base.problems import UsageProblem
from pedigree.configs.base.project import Project
from pedigree.data.artifacts.artifacts import SUMS, Artifact, ArtifactError, content_hash, open_artifact, scan, sha256_file, write_json
from pedigree.data.artifacts.exports import RECORDS
from pedigree.data.chat.reward_stats import reads_closed
from pedigree.data.store.durable import rename, sync_tree
from pedigree.data.store.hashing import Beat, silent
from pedigree.pipelines.lineage import openlineage
from pedigree.pipelines.lineage.ancestry import Pedigree, read_pedigree
from pedigree.pipelines.lineage.evaluations import Evaluation, evaluations_of
from pedigree.pipelines.lineage.standards import croissant, slsa
from pedigree.pipelines.publish.attribution import all_licences, origins
from pedigree.pipelines.publish.card import CARD, card
from pedigree.pipelines.publish.signing import Signer

CROISSANT = "croissant.json"
FORMATS = ("openlineage", "slsa", "card", "croissant")


def in_standard(pedigree: Pedigree, form: str, project: Project | None) -> str:
    """Render a pedigree in a standard format, ending in a newline; OpenLineage events are sent if a server is configured.

    Raises:
        UsageProblem: `form` is not supported.
        ArtifactError: the format needs unavailable files or does not apply to this type of artifact.
    """
    if form == "openlineage":
        events = openlineage.events(pedigree)
        if os.environ.get("OPENLINEAGE_URL"):
            return f"sent {len(events)} events to {openlineage.send(events)}\n"
        return "".join(json.dumps(event, sort_keys=True, ensure_ascii=False) + "\n" for event in events)
    if form == "slsa":
        return json.dumps(slsa(pedigree), indent=1, ensure_ascii=False) + "\n"
    if form == "croissant":
        return json.dumps(data_card(pedigree, project), indent=1, ensure_ascii=False) + "\n"
    if form == "card":
        return card(pedigree, pedigree.address, evaluations_of(project, pedigree.record.content), origins(pedigree, project))
    raise UsageProblem(f"unknown --format {form!r}; choose from {', '.join(FORMATS)}")


def export(
    artifact_path: Path,
    name: str,
    target: Path,
    evaluations: Sequence[Evaluation] = (),
    *,
    project: Project | None = None,
    signer: Signer | None = None,
    progress: Callable[[str], Beat] = lambda what: silent,
) -> Path:
    """Copy an artifact into a new or empty folder and verify the copy. A new folder appears whole; one that exists, which may be a mount
    point or the working directory, gets the records last.

    `name` is its address, for the title of the card, as are `evaluations`; the recipes of `project` may state more licenses than the
    records. `progress` maps the name of a step to its progress callback.

    Raises:
        UsageProblem: the target is not empty, a payload file has the name of an export file, or other libraries would read other scores.
        ArtifactError: the artifact is damaged, or the copy does not match the record.
    """
    if open_artifact(artifact_path).type == "reward_model" and not reads_closed(artifact_path / "payload"):
        raise UsageProblem(
            f"{name} was trained with an earlier version of Pedigree and reads scores at the answer's last token; transformers and vLLM "
            "read the conversation's last token and would give others. Train it again with `pedigree run`, then export it"
        )
    artifact, pedigree = open_artifact(artifact_path, verify=True, beat=progress("checking")), read_pedigree(artifact_path)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UsageProblem(f"{target} is not an empty folder: choose a new folder or empty this one")
    taken = {entry.path.split("/")[0] for entry in artifact.record.files} & {"pedigree", CARD, CROISSANT}
    if taken:
        raise UsageProblem(f"the payload of {name} contains {', '.join(sorted(taken))}, a name that the export reserves for its own files")
    full = Path(os.path.abspath(target))
    place = full if full.exists() else full.parent
    place.mkdir(parents=True, exist_ok=True)
    building = place / f".{full.name}.{os.getpid()}" / full.name  # the signature includes the folder's name
    try:
        building.parent.mkdir()
        _copy(artifact, building, progress("copying"))
        _prove(building, artifact, progress("checking the copy"))
        (building / "pedigree").mkdir()
        for record in RECORDS:
            shutil.copyfile(artifact.path / record, building / "pedigree" / record)
        (building / CARD).write_text(card(pedigree, name, evaluations, origins(pedigree, project)))
        if artifact.type in MODELS:
            write_json(building / "pedigree" / "provenance.slsa.json", slsa(pedigree))
        if pedigree.row_files():
            write_json(building / CROISSANT, data_card(pedigree, project))
        (building / SUMS).write_text(_sums(building, artifact))
        for path in building.rglob("*"):  # files from a DVC cache may be read-only
            path.chmod(path.stat().st_mode | 0o600)
        if signer is not None:
            progress("signing")(0, sum(entry.size for entry in artifact.record.files))
            signer.sign(building)
        progress("writing to the disk")(0, sum(entry.size for entry in artifact.record.files))
        sync_tree(building)
        if place == full:
            for path in sorted(building.iterdir(), key=lambda path: path.name == "pedigree"):
                rename(path, full / path.name)
        else:
            rename(building, full)
    finally:
        shutil.rmtree(building.parent, ignore_errors=True)
    return target


def data_card(pedigree: Pedigree, project: Project | None = None) -> dict[str, Any]:
    if not pedigree.row_files():
        raise ArtifactError(f"{pedigree.address} has type {pedigree.record.type}: Croissant describes only datasets")
    return croissant(pedigree, pedigree.rows(), all_licences(origins(pedigree, project)))


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
        raise ArtifactError(f"the copy differs from the record in {', '.join(wrong) or 'a missing file'}; the disk may be full or failing")


def _sums(folder: Path, artifact: Artifact) -> str:
    """SHA-256 of every file in `sha256sum` format; `_prove` has already verified the recorded hashes of the payload."""
    found = {entry.path: entry.sha256 for entry in artifact.record.files}
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name not in found:
            found[name] = sha256_file(path)
    return "".join(f"{sha256}  {name}\n" for name, sha256 in sorted(found.items()))
