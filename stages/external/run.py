"""Run a command of other software, and make an artifact of what it writes.

    given/LABEL/              copies of the inputs, which the command may change: a model folder, or `rows.jsonl`
    work/                     where it runs: copies of its files at their paths in the project
    output/                   what it writes, kept between attempts if it can resume
    command.json              written when it has ended with success; another attempt then only imports the output

Below them in the scratch folder, and in the artifact:

    payload/                  of a policy as `stages/training/imported_models.py` writes it; otherwise rows
    evidence/validation.json  for rows: whether each expectation was met
"""

import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pedigree.configs.base.kind import MODELS
from pedigree.configs.base.problems import PedigreeError
from pedigree.configs.methods.external import (
    CHECKPOINT,
    ENDED,
    OUTPUT,
    External,
    filled,
    left_by_command,
    missing_program,
    title_of,
)
from pedigree.configs.rows.row_sources import Files
from pedigree.configs.rows.source_models import SourceModel
from pedigree.data.artifacts.artifacts import read_json, write_json, write_rows
from pedigree.data.expectations.validation import validate_facts
from pedigree.data.host.faults import fault_point
from pedigree.data.records import records
from pedigree.data.sources import sources
from pedigree.data.sources.dataset_builder import DatasetBuilder
from pedigree.data.sources.model_folders import own_template
from pedigree.data.sources.plain_rows import plain
from pedigree.data.sources.sources import Outside
from pedigree.data.store.durable import sync_file
from pedigree.data.store.untrusted import ArtifactError
from pedigree.stages.external.commands import packages, run_command, variables
from pedigree.stages.job.failures import StageError
from pedigree.stages.job.job import Inputs, Job
from pedigree.stages.verifiers import check

METRICS = "metrics.json"
WRITTEN = f"the command wrote to {{{OUTPUT}}}"


def run(config: External, inputs: Inputs, job: Job) -> dict[str, Any]:
    """Run the command, unless it ended in an earlier attempt, and import its output.

    Raises:
        StageError: the program is missing or failed, or wrote nothing, or something else than `output`.
        RuntimeError: a signal ended it.
        PedigreeError: its rows are malformed, or violate an expectation of their type.
    """
    output, ended, left = job.folder / OUTPUT, job.folder / ENDED, left_by_command(job.folder, config.resume)
    job.resumed_from = f"{left.relative_to(job.folder)} of an earlier attempt" if left else None
    if left and ended.exists():
        job.command_environment = read_json(ended)["environment"]
    else:
        execute(config, inputs, left, job)
        job.seal()
        write_json(ended, {"environment": job.command_environment})
        fault_point("command ended")
    job.note(f"made by an external command ({title_of(config.model_dump())}), of which only the form of its output was checked")
    try:
        match config.output:
            case "policy":
                return policy_in(output, job)
            case "report":
                return numbers_in(output, job)
            case rows:
                return rows_in(output, rows, title_of(config.model_dump()), job)
    except PedigreeError:
        ended.unlink()  # it may write something else next time
        raise


def execute(config: External, inputs: Inputs, left: Path | None, job: Job) -> None:
    """Run the command, in what an earlier attempt has left or in an empty folder; what it wrote is on the disk afterwards."""
    environment = Path(job.placement.environment).expanduser().absolute() if job.placement.environment else None
    if problem := missing_program(config, environment):
        raise StageError(problem)
    output, words = job.folder / OUTPUT, config.command
    with job.busy("copying inputs"):
        folders = given(inputs, job.folder / "given") | {OUTPUT: str(output)}
        work = copied(config, job)
    if left is None:
        shutil.rmtree(output, ignore_errors=True)
        output.mkdir()
    else:
        words += config.resume or ()
        folders[CHECKPOINT] = str(left)
    named = variables(environment)
    with job.busy("listing packages"):
        job.command_environment = packages(named)
    run_command(filled(words, folders), work, named, job)
    if not any(output.iterdir()):
        raise StageError(f"the command ended without an error, but wrote nothing to {{{OUTPUT}}}: check where it writes")
    with job.busy("writing to the disk", flushing=True):
        for path in output.rglob("*"):
            if path.is_file() and not path.is_symlink():
                sync_file(path)


def given(inputs: Inputs, place: Path) -> dict[str, str]:
    """Label → folder with a copy of the input. A link would let the command write into the artifact."""
    shutil.rmtree(place, ignore_errors=True)
    folders = {}
    for label, artifact in ((label, artifact) for port in inputs.values() for label, artifact in port.items()):
        folders[label] = str(place / label)
        if artifact.type in MODELS:
            shutil.copytree(artifact.payload, place / label, copy_function=shutil.copyfile)  # which is writable, unlike the file
        else:
            write_rows(place / label / "rows.jsonl", (plain(row, artifact.type) for row in records.stream(artifact.payload)))
    return folders


def copied(config: External, job: Job) -> Path:
    """The folder in which the command runs, with copies of its files. Programs become executable, as a fetched file is not."""
    work = job.folder / "work"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    for name in config.files:
        source, target = job.source_files[name], work / name
        target.parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if source.is_dir() else shutil.copy2)(source, target)
    for path in work.rglob("*"):
        if path.is_file() and _is_program(path):
            path.chmod(path.stat().st_mode | 0o111)
    return work


def _is_program(path: Path) -> bool:
    """Whether the kernel starts it: a script with its interpreter, or compiled."""
    with path.open("rb") as stream:
        return stream.read(4).startswith((b"#!", b"\x7fELF"))


def policy_in(output: Path, job: Job) -> dict[str, Any]:
    from transformers.utils.logging import disable_progress_bar  # other outputs need no torch

    from pedigree.stages.training.imported_models import imported, load_folder

    disable_progress_bar()
    try:
        template, stated = own_template(output), read_json(output / "config.json") if (output / "config.json").exists() else {}
    except ArtifactError as error:
        raise StageError(f"{WRITTEN} a model that cannot be read ({error})") from error
    if template is None and stated:
        raise StageError(f"{WRITTEN} a model without a chat template: save the tokenizer of a model that has one next to the weights")
    bf16 = "bfloat16" in (stated.get("dtype"), stated.get("torch_dtype"))
    source = {"type": "folder", "path": OUTPUT}
    config = SourceModel.model_validate({"source": source, "dtype": "bf16" if bf16 else "fp32"})  # fp32 holds fp16 exactly
    with job.busy("loading the model"):
        model, tokenizer = load_folder(f"the folder {{{OUTPUT}}}", output, config, job)
    return imported(model, tokenizer, config, job)


def rows_in(output: Path, record: Any, title: str, job: Job) -> dict[str, Any]:
    """Read rows as `prepare_data` reads those of files, in their order."""
    source = Files(type="files", path=title)
    outside = Outside(files={title: output}, check_verifier=check)
    with DatasetBuilder(job.folder / "drafts", record, (), 0, check, job.numerics.threads) as builder:
        with job.busy("reading rows"):
            for done in builder.take(sources.opened(source, record, None, outside)):
                job.doing("reading rows", done, unit="rows")
            rows = builder.table()
        if not len(rows):
            raise StageError(f"{WRITTEN} no rows")
        verdict = validate_facts(rows.index, record)
        write_json(job.evidence / "validation.json", verdict)
        for done in rows.write(job.out / "payload", np.arange(len(rows)), job.numerics.threads):
            job.doing("writing rows", done, len(rows), "rows")
    return {"rows": len(rows)}


def numbers_in(output: Path, job: Job) -> dict[str, Any]:
    try:
        leaves = list(_leaves(read_json(output / METRICS)))
    except (OSError, ArtifactError) as error:
        raise StageError(f"{WRITTEN} no {METRICS} that can be read ({error}): write numbers by name there") from error
    found = dict(leaves)
    if len(found) < len(leaves):
        raise StageError(f"{WRITTEN} a {METRICS} in which two numbers have one name with dots: rename one")
    wrong = next((name for name, value in found.items() if not _is_finite(value)), None)
    if wrong is not None or not found:
        what = "no numbers" if wrong is None else f"{wrong} {found[wrong]!r:.80}, which is not a finite number"
        raise StageError(f"{WRITTEN} a {METRICS} with {what}: write an object of numbers by name, which may be nested")
    records.save(job.out, "report", [{"metric": name, "value": value} for name, value in found.items()])
    return {"rows": len(found), "measured": found}


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """(name with dots, value) of everything in nested objects."""
    if not isinstance(value, Mapping):
        yield name, value
        return
    for key, inner in value.items():
        yield from _leaves(inner, f"{name}.{key}" if name else key)


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
