"""Prepare a job's private inputs: links to artifacts, source files, a snapshot of the code, and its spec.

Later changes to the project do not affect the job. Inputs are hard links to the artifacts' files (copies where the file system has no
links), so replacing, restoring or removing an artifact leaves the job's inputs intact. The job verifies by hash what it reads, and that
nobody has written to it (`stages/job/inputs.py`).
"""

import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pedigree.configs.base.paths import place_of
from pedigree.configs.language.execution import Numerics, Placement
from pedigree.configs.language.graph import Node
from pedigree.configs.methods.external import ENDED, OUTPUT
from pedigree.data.artifacts.artifacts import intact, open_artifact, sha256_path, write_json
from pedigree.data.artifacts.provenance import fingerprint
from pedigree.data.artifacts.run_record import Fingerprint
from pedigree.data.store.storage import StoreError
from pedigree.pipelines.jobs import checkpoint_store
from pedigree.pipelines.jobs.attempts import numerics_changes, resumable
from pedigree.pipelines.jobs.code import Code, differing, receive, snapshot
from pedigree.pipelines.jobs.context import RunContext, StageFailed
from pedigree.pipelines.jobs.scratch_state import (
    CODE,
    DEPENDENCIES,
    SPEC,
    Damaged,
    answers_size,
    checkpoints_here,
    known_spec,
    make_way,
    read_spec,
    write_spec,
)
from pedigree.pipelines.ledger.cache import remove
from pedigree.pipelines.ledger.identity import StageInputs
from pedigree.stages.job.job import CODE_CHANGED, checkpoint_names
from pedigree.stages.job.spec import GivenFile, GivenInput, JobSpec, place_in

INPUTS = "inputs"
MOST_NAMED = 20
"""Maximum number of changed files listed in a mark."""
LINKED_ABOVE_BYTES = 64 << 20
"""Source files are copied, so that an editor that writes in place does not affect the job; larger ones are linked and watched."""


class InputsGone(Exception):
    """An input was replaced while it was being prepared for the job."""


def prepare(run: RunContext, node: Node, need: StageInputs, numerics: Numerics, placement: Placement) -> None:
    """Write what the job reads; refuse to resume checkpoints made under other numerics.

    Raises:
        StageFailed: its checkpoints do not fit, or its store cannot be used.
        Damaged: the numerics of its checkpoints are unreadable.
        InputsGone: an input is being replaced at this moment.
        PedigreeError: the code keeps changing.
    """
    checkpoint_store.prove(node, placement)
    scratch = run.project.scratch(need.key)
    scratch.mkdir(parents=True, exist_ok=True)
    before = _spec_before(scratch)
    make_way(scratch)
    asked, allow_numerics_change = None, run.allow_numerics_change
    if before is not None:
        if before.asked == numerics:  # the profile's setting ran out of memory: keep the reduced one
            asked, numerics, allow_numerics_change = before.asked, before.numerics, True
        changes = numerics_changes(before.numerics, numerics)
        if changes and checkpoint_names(scratch) and not allow_numerics_change:
            how = " (set a number in the profile instead of `auto`)" if before.numerics.threads != numerics.threads else ""
            message = f"its checkpoints were made under other numerics ({', '.join(changes)}). Restore those{how}, resume under the"
            remedy = f"new ones with --allow-numerics-change (noted in the record), or start over with --force {node.name}"
            raise StageFailed(node.address, "refused", f"{message} {remedy}")
    code, marks = _choose_code(run, node, scratch, placement, before)
    inputs, files = _give_inputs(run, node, need, scratch)
    write_json(scratch / DEPENDENCIES, run.ledger.dependencies(node, run.transfer_progress(node.address).hashed))
    spec = JobSpec(
        address=node.address,
        kind=node.kind,
        version=node.declaration.version,
        key=need.key,
        config=node.config.model_dump(mode="json"),
        inputs=inputs,
        source_files=files,
        code=code,
        fingerprint=Fingerprint.model_validate(fingerprint(node.kind, run.project.code(code))),
        numerics=numerics,
        asked=asked,
        placement=placement,
        tokens=os.path.relpath(run.project.tokens, scratch),
        allow_numerics_change=allow_numerics_change,
        require_checkpoint=node.address in run.require_checkpoint,
        marks=marks,
    )
    write_spec(scratch, spec)


def take_over(run: RunContext, node: Node, scratch: Path) -> bool:
    """Assign another recipe's or variant's job to this stage, with its address and dependencies; False if it is already assigned."""
    spec = read_spec(scratch)
    if spec.address == node.address and (scratch / DEPENDENCIES).exists():
        return False
    (scratch / DEPENDENCIES).unlink(missing_ok=True)  # even if killed in between, address and dependencies never mix two stages
    write_spec(scratch, spec.model_copy(update={"address": node.address}))
    write_json(scratch / DEPENDENCIES, run.ledger.dependencies(node, run.transfer_progress(node.address).hashed))
    return True


def _spec_before(scratch: Path) -> JobSpec | None:
    """The spec of the last attempt; required to be readable only if there is something to resume."""
    if not (scratch / SPEC).exists():
        return None
    return read_spec(scratch) if resumable(scratch) else known_spec(scratch)


def began_with_other_code(run: RunContext, node: Node, scratch: Path) -> bool:
    """Whether the job of a scratch folder, running or ended, was given code that differs, as far as is known, from the current code."""
    if not (scratch / SPEC).exists():
        return False
    try:
        return bool(_changed_code(run, node, snapshot(run.project, run.code_root), read_spec(scratch).code))
    except Damaged:
        return True


# --- code --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Begun:
    """Unfinished work that the job resumes."""

    code: str
    """Hash of its code; empty if unknown."""
    marks: tuple[str, ...]
    reached: str
    state: Mapping[str, Any] | None = None
    """Git state of the code, if another machine has recorded it."""
    elsewhere: bool = False
    problem: str = ""
    """Why the code of another machine is not available."""


def _choose_code(run: RunContext, node: Node, scratch: Path, placement: Placement, before: JobSpec | None) -> tuple[str, tuple[str, ...]]:
    """Choose the code snapshot that the job runs; return its hash and the marks that the record needs.

    A job that resumes from a checkpoint keeps its original code, here or from another machine, unless the run specifies otherwise.

    Raises:
        StageFailed: the required code is not available, or the store cannot be used.
    """
    now = snapshot(run.project, run.code_root, new_files=run.record_new_files)
    begun = _begun(run, node, scratch, placement, before, now)
    if begun is None:
        _note_state(scratch, now)
        return now.sha256, before.marks if before is not None else ()
    changed = _changed_code(run, node, now, begun.code)
    if not changed:
        if begun.state is not None:
            write_json(scratch / CODE, begun.state)
        return begun.code, begun.marks
    if run.on_code_change == "rerun":
        for name in ("checkpoints", "chunks", OUTPUT):
            shutil.rmtree(scratch / name, ignore_errors=True)
        for name in ("curve.jsonl", ENDED):
            (scratch / name).unlink(missing_ok=True)
        checkpoint_store.clear(placement.checkpoint_url, scratch)
        _note_state(scratch, now)
        return now.sha256, tuple(mark for mark in begun.marks if not mark.startswith(CODE_CHANGED))
    named = ", ".join(changed[:MOST_NAMED]) + (f" and {len(changed) - MOST_NAMED} more" if len(changed) > MOST_NAMED else "")
    if run.on_code_change == "take":
        _note_state(scratch, now)
        return now.sha256, (*begun.marks, f"{CODE_CHANGED} {begun.reached}: {named}")
    if not begun.code or not run.project.code(begun.code).is_dir():
        why = f"its original code, .pedigree/code/{begun.code[:12]}, has been deleted"
        if begun.elsewhere:
            why = f"it would resume from {begun.reached} of another machine, whose code is not available ({begun.problem})"
        raise StageFailed(node.address, "refused", f"{why}: resume with the current code with --on-code-change take (noted in the "
                          "record), or start over with --on-code-change rerun")  # fmt: skip
    run.ledger.notice(
        f"{node.address} resumes from {begun.reached}{' of another machine' if begun.elsewhere else ''} with its original code; "
        f"the working tree {'here differs' if begun.elsewhere else 'has changed since'} ({named}): --on-code-change take resumes with "
        "the current code, rerun starts over with it"
    )
    if begun.state is not None:
        write_json(scratch / CODE, begun.state)
    return begun.code, begun.marks


def _begun(run: RunContext, node: Node, scratch: Path, placement: Placement, before: JobSpec | None, now: Code) -> _Begun | None:
    """The work to resume: the local one, or another machine's if that is further ahead; None to start from the beginning."""
    here, own = checkpoints_here(scratch), before.marks if before is not None else ()
    ahead = checkpoint_store.ahead(node, placement, scratch, checkpoint_names(scratch))
    if ahead is None:
        reached = _reached_text(here[-1]) if here else "kept answers" if answers_size(scratch) else ""
        return _Begun(before.code, own, reached) if before is not None and reached else None
    if ahead.producer is None:
        return _Begun("", own, _reached_text(ahead.reached), elsewhere=True, problem=ahead.problem)
    code, marks, problem = ahead.producer.code, tuple(dict.fromkeys((*own, *ahead.producer.marks))), ""
    if code != now.sha256 and not run.project.code(code).is_dir():
        try:
            receive(run.project, code, ahead.mirror.code(code))
        except StoreError as error:
            problem = str(error)
    state = ahead.producer.state.model_dump(mode="json", exclude_unset=True) if ahead.producer.state else {}
    return _Begun(code, marks, _reached_text(ahead.reached), {**state, "snapshot": code}, elsewhere=True, problem=problem)


def _reached_text(checkpoint: str) -> str:
    return checkpoint.replace("step-", "step ") or "finished chunks"


def _changed_code(run: RunContext, node: Node, now: Code, before: str) -> list[str]:
    """Source files of the stage that have changed; both hashes if they cannot be compared."""
    then = run.project.code(before)
    if before == now.sha256:
        return []
    return differing(node.kind, then, now.folder) if before and then.is_dir() else [f"{before[:12] or 'unknown'} -> {now.sha256[:12]}"]


def _note_state(scratch: Path, code: Code) -> None:
    """Store the snapshot's git state for the attempts that run it."""
    write_json(scratch / CODE, {"snapshot": code.sha256, **code.state})


# --- inputs ------------------------------------------------------------------------------------------------------------


def _give_inputs(
    run: RunContext, node: Node, need: StageInputs, scratch: Path
) -> tuple[dict[str, dict[str, GivenInput]], dict[str, GivenFile]]:
    """Give the job private inputs and source files, unless an earlier attempt left them undamaged."""
    folder, ports = scratch / INPUTS, [(given.port, given.label) for given in need.inputs]
    places = {(port, label): folder / f"{port}-{number}" for number, (port, label) in enumerate(ports)}
    files = {name: folder / f"file-{number}" / Path(name).name for number, name in enumerate(need.source_files)}
    if not folder.is_dir() or not _all_given(places.values(), files.values()):
        remove(folder)
        building = scratch / f".{INPUTS}"
        shutil.rmtree(building, ignore_errors=True)
        try:
            for (port, label), place in places.items():
                _give_artifact(need.folders[port][label], building / place.name)
            for name, place in files.items():
                copy = building / place.parent.name / place.name
                source = next(file for file in node.files if file == name)
                _give_file(place_of(run.project.root, source), copy)
                if sha256_path(copy) != need.source_files[name]:
                    raise InputsGone(f"{name} was written to")
        except FileNotFoundError as error:
            raise InputsGone(f"{error.filename} does not exist") from error
        building.mkdir(exist_ok=True)
        os.rename(building, folder)
    inputs: dict[str, dict[str, GivenInput]] = {}
    for given in need.inputs:
        place = places[given.port, given.label]
        artifact = open_artifact(place)
        if artifact.record.content != given.content:
            shutil.rmtree(folder)
            raise InputsGone(f"{given.port} {given.label}")
        inputs.setdefault(given.port, {})[given.label] = GivenInput.of(artifact, scratch)
    return inputs, {name: GivenFile(path=place_in(scratch, place), sha256=need.source_files[name]) for name, place in files.items()}


def _all_given(artifacts: Iterable[Path], files: Iterable[Path]) -> bool:
    """Whether the inputs' records are readable and the files exist; the job itself verifies their bytes."""
    return all(map(intact, artifacts)) and all(path.exists() for path in files)


def _give_artifact(source: Path, target: Path) -> None:
    target.mkdir(parents=True)
    for name in ("record.json", "run.json", "lineage.json"):
        shutil.copyfile(source / name, target / name)
    shutil.copytree(source / "payload", target / "payload", copy_function=_link)


def _give_file(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True)
    if source.is_dir():
        shutil.copytree(source, target, copy_function=_copy_or_link)
    else:
        _copy_or_link(source, target)


def _copy_or_link(source: Any, target: Any) -> None:
    (_link if os.stat(source).st_size > LINKED_ABOVE_BYTES else shutil.copy2)(source, target)


def _link(source: Any, target: Any) -> None:
    """Make a hard link, or a copy where the file system has none (or across disks)."""
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copy2(source, target)
