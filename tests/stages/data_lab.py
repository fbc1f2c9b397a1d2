"""Runs one stage's code in a scratch folder and opens what it made, without an orchestrator."""

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pedigree.configs.language.execution import Numerics, Placement
from pedigree.configs.language.kinds import KINDS
from pedigree.data.artifacts.artifacts import Artifact, Input, Record, content_hash, open_artifact, scan, write_json
from pedigree.data.records import parents, records
from pedigree.stages.job.job import Job


def run_stage(
    folder: Path, kind: str, config: dict[str, Any], files: dict[str, Path] | None = None, threads: int = 2, **ports: Any
) -> Artifact:
    """`ports`: port → artifact, or label → artifact. An attempt in the folder of another goes on in what that has left."""
    declaration = KINDS[kind]
    typed = declaration.config.model_validate(config)
    inputs = {port: given if isinstance(given, dict) else {"it": given} for port, given in ports.items()}
    folder.mkdir(parents=True, exist_ok=True)
    job = Job(folder, address=f"r/{kind}", key="k", numerics=Numerics(threads=threads), placement=Placement(), source_files=files or {})
    metrics = importlib.import_module(f"pedigree.stages.{kind}.run").run(typed, inputs, job)
    kinds = {port: [artifact.type for artifact in labelled.values()] for port, labelled in inputs.items()}
    edges = [
        Input(port=port, label=label, content=artifact.record.content, producer=artifact.record.id)
        for port, labelled in inputs.items()
        for label, artifact in labelled.items()
    ]
    return seal(job.out, kind, declaration.output(typed, kinds), typed.model_dump(mode="json"), edges, metrics, job.marks)


def publish(folder: Path, artifact_type: str, rows: list[Any]) -> Artifact:
    """A hand-made data artifact."""
    records.save(folder, artifact_type, rows)
    return seal(folder, "by_hand", artifact_type, {}, [], {})


def seal(
    folder: Path,
    kind: str,
    artifact_type: str,
    config: dict[str, Any],
    edges: list[Input],
    metrics: dict[str, Any],
    marks: Sequence[str] = (),
) -> Artifact:
    entries = scan(folder / "payload")
    record = Record(
        kind=kind,
        version=1,
        type=artifact_type,
        config=config,
        inputs=tuple(edges),
        key="0" * 64,
        content=content_hash(entries),
        files=entries,
        metrics=metrics,
        marks=tuple(marks),
    )
    write_json(folder / "record.json", record.model_dump(mode="json"))
    return open_artifact(folder)


def rows_of(artifact: Artifact) -> list[dict[str, Any]]:
    return records.load(artifact)


def parents_of(artifact: Artifact) -> dict[str, list[str]]:
    """Row → the rows that its stage names as those it was made from."""
    return dict(parents.read(artifact.evidence))
