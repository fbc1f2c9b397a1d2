"""Publish the verified result of a job: complete the artifact with its records, rename it into place, clear the scratch folder.

Everything is derived from the job's spec, not from the current state of the project.
"""

import csv
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pedigree.configs.base.project import Project
from pedigree.configs.language.graph import Node
from pedigree.configs.language.stated_sources import generators_of, licences_of
from pedigree.data.artifacts.artifacts import ADOPTED, Record, write_json
from pedigree.data.host.faults import fault_point
from pedigree.data.store.durable import rename, sync_tree
from pedigree.pipelines.jobs import checkpoint_store
from pedigree.pipelines.jobs.scratch_state import all_attempts, known_spec, read_spec
from pedigree.pipelines.ledger.cache import files_of
from pedigree.pipelines.ledger.deciding import decided_by
from pedigree.pipelines.lineage.inheritance import adopted, write_origin
from pedigree.stages.job.job import read_curve
from pedigree.stages.job.outcome import Success, read_done
from pedigree.stages.job.spec import JobSpec

PRIVATE = {"checkpoint_url", "launcher", "environment"}
"""Placement that is not recorded: a bucket, accounts, a path of this machine."""


def publish(project: Project, node: Node, scratch: Path, check: Callable[[], None]) -> Record:
    """Add record, evidence, run and lineage to the output; move the old artifact aside, move the new one in, delete the old one.

    `check` is called right before anything in the project is replaced. Returns the record.
    """
    spec, out, done = read_spec(scratch), scratch / "out", result_of(scratch)
    record = Record(
        kind=spec.kind,
        version=spec.version,
        type=node.output,
        config=spec.config,
        inputs=(*spec.lineage_inputs(), *adopted(out)),
        source_files={name: given.sha256 for name, given in spec.source_files.items()},
        key=spec.key,
        content=done.content,
        files=done.files,
        metrics=done.metrics,
        marks=done.marks,
    )
    _complete(project, node, spec, scratch, record)
    target, aside = project.artifact(node.address), _aside(project, node.address)
    target.parent.mkdir(parents=True, exist_ok=True)
    sync_tree(out)
    check()
    if target.exists():
        aside.parent.mkdir(parents=True, exist_ok=True)
        rename(target, aside)
    fault_point("publish set aside")
    rename(out, target)
    fault_point("publish renamed")
    shutil.rmtree(aside, ignore_errors=True)
    return record


def recover(project: Project, address: str) -> None:
    """Finish or roll back a publication that a kill interrupted."""
    aside = _aside(project, address)
    if aside.exists():
        if project.artifact(address).exists():
            shutil.rmtree(aside)
        else:
            rename(aside, project.artifact(address))


def clear(project: Project, node: Node, key: str) -> None:
    """Remove the scratch folder of a finished stage, but save its logs."""
    scratch = project.scratch(key)
    if (scratch / "log.txt").exists():
        kept = log_file(project, node.address)
        kept.parent.mkdir(parents=True, exist_ok=True)
        for old in node_logs(kept).values():
            old.unlink()
        shutil.copyfile(scratch / "log.txt", kept)
        for host, log in node_logs(scratch / "log.txt").items():
            shutil.copyfile(log, kept.with_name(f"{kept.stem}-{host}.txt"))
    spec = known_spec(scratch)
    if spec is not None:
        checkpoint_store.clear(spec.placement.checkpoint_url, scratch)
    shutil.rmtree(scratch, ignore_errors=True)


def log_file(project: Project, address: str) -> Path:
    """Log of a finished stage; a running job writes `log.txt` in its scratch folder."""
    return project.private / "logs" / f"{address}.log"


def node_logs(log: Path) -> dict[str, Path]:
    """Host name → log of each further node of a job, next to the job's own `log`."""
    return {path.stem.removeprefix(f"{log.stem}-"): path for path in sorted(log.parent.glob(f"{log.stem}-*.txt"))}


def result_of(scratch: Path) -> Success:
    """The report of a job whose success has been verified."""
    done = read_done(scratch)
    assert isinstance(done, Success)
    return done


def _complete(project: Project, node: Node, spec: JobSpec, scratch: Path, record: Record) -> None:
    """Add evidence, run, lineage and record to the output.

    The files are renamed into place: a partial file next to the payload, left by a kill or a full disk, would count as the job's own and
    make the job look failed.
    """
    out, records = scratch / "out", scratch / "records"
    shutil.rmtree(records, ignore_errors=True)
    write_json(records / "evidence" / "metrics.json", record.metrics)
    _write_curve(scratch / "curve.jsonl", records / "evidence" / "curve.csv")
    inputs = [scratch / given.folder for labelled in spec.inputs.values() for given in labelled.values()]
    inputs += [out / "evidence" / ADOPTED] * bool(adopted(out))
    write_origin(records, _run_record(project, node, spec, scratch), inputs)
    write_json(records / "record.json", record.model_dump(mode="json"))
    (out / "evidence").mkdir(exist_ok=True)
    for path in sorted(files_of(records)):
        path.rename(out / path.relative_to(records))


def _run_record(project: Project, node: Node, spec: JobSpec, scratch: Path) -> dict[str, Any]:
    """Contents of `run.json`: code, environment, hardware and numerics as recorded by the job where it ran."""
    folders = [(port, scratch / given.folder) for port, labelled in spec.inputs.items() for given in labelled.values()]
    return {
        "address": node.address,
        "numerics": spec.numerics.model_dump(mode="json"),
        "placement": spec.placement.model_dump(mode="json", exclude=PRIVATE),
        "licences": licences_of(node.config),
        "generators": generators_of(node.config),
        "attempts": all_attempts(scratch),
        **decided_by(node, folders, project.code(spec.code)),
        **result_of(scratch).made_by.model_dump(mode="json", exclude_unset=True),
    }


def _write_curve(source: Path, target: Path) -> None:
    """Write the training curve as CSV, one column per logged metric."""
    if not source.exists():
        return
    rows = read_curve(source)
    columns = list(dict.fromkeys(name for row in rows for name in row))
    with target.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, columns)
        writer.writeheader()
        writer.writerows(rows)


def _aside(project: Project, address: str) -> Path:
    return project.private / "aside" / address
