"""Make one stage current. `pedigree run`, the Prefect flow and `dvc repro` all end here.

1. Compare the stage's key, its entry in `dvc.lock` and its files, to decide whether the stage is stale.
2. Acquire the stage's lease; compute its identity then, and again after every wait.
3. Restore it from the run cache or the remote, verified against its record, also if it was made under another name.
4. Look for its job: re-attach to a live one, take the result of one that finished unwatched, otherwise submit a new one with private
   copies of its inputs and code.
5. Wait without holding any DVC lock.
6. Verify, publish by rename, and commit under the state that the job started from, even if the recipe has changed since.
"""

import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from pedigree.configs.base.problems import PedigreeError
from pedigree.configs.base.project import Project
from pedigree.configs.base.texts import command
from pedigree.configs.language.execution import Local, Numerics, Placement
from pedigree.configs.language.graph import Node
from pedigree.data.artifacts.artifacts import Artifact, ArtifactError, open_artifact, read_json, write_json
from pedigree.data.store import heartbeat
from pedigree.data.store.hashing import Beat
from pedigree.data.store.heartbeat import Listener
from pedigree.pipelines.jobs import attempts, checkpoint_store, scratch_state
from pedigree.pipelines.jobs.context import RunContext, StageFailed
from pedigree.pipelines.jobs.events import Outcome, StageBusy, StageEnded, StageStarted, StageWaiting
from pedigree.pipelines.jobs.lease import Cancelled, HeldLease, LeaseHolder, LeaseLost, lease, listen
from pedigree.pipelines.jobs.preparation import InputsGone, began_with_other_code, prepare, take_over
from pedigree.pipelines.jobs.scratch_state import Damaged
from pedigree.pipelines.jobs.slots import Pool, slots
from pedigree.pipelines.ledger import raw_inputs
from pedigree.pipelines.ledger.identity import Identities, InputReplaced, StageInputs
from pedigree.pipelines.ledger.ledger import has_all_parts
from pedigree.pipelines.ledger.transfers import LedgerError, RemoteError, TransferProgress
from pedigree.pipelines.quantities import counted
from pedigree.pipelines.run.publication import clear, publish, recover, result_of
from pedigree.stages.job.failures import storage_cause
from pedigree.stages.job.job import PULSES


@dataclass(frozen=True)
class Result:
    """A stage that is current."""

    address: str
    outcome: Outcome
    seconds: float


@dataclass(frozen=True)
class StageLeases:
    """A stage's leases: on its artifact folder and on the scratch folder of its key."""

    artifact: HeldLease
    scratch: HeldLease
    listener: Listener
    """Has followed the heartbeat of the stage's job on another machine, if any, since the leases were requested."""

    @property
    def waited(self) -> bool:
        """Whether this run had to wait for another runner."""
        return self.artifact.waited or self.scratch.waited

    def check(self) -> None:
        """Raise LeaseLost if another runner has taken over a lease. Call it right before any lasting change."""
        self.artifact.check()
        self.scratch.check()


def ensure(run: RunContext, node: Node, *, force: bool = False, needed: bool = False, stale: bool = False) -> Result:
    """Make a stage current in the cheapest way possible. Its parents must already be current.

    `force`: run it even if it is current. `needed`: its files must be local, even if they could stay in the remote. `stale`: this run has
    already decided that it is not current.

    Raises:
        StageFailed: with a one-line reason.
    """
    started, progress = time.monotonic(), run.transfer_progress(node.address)
    with closing(run.ledger), _failures(run, node):
        run.watch(StageBusy(node.address, "checking"))
        now = run.identities()
        outcome = None if force or stale else at_rest(run, node, now, needed)
        if node.address in run.require_checkpoint:
            _refuse_to_begin(run, node, now, outcome is None)
        lacked: tuple[str, str] | None = None
        while outcome is None:
            if run.cancelled.is_set():
                raise Cancelled("canceled before its job started")
            need = identify(run, node, now)
            try:
                with _alone(run, node, need) as alone:
                    if alone.waited:
                        now = _confirm(run, node, need)
                    if not force and (stale or alone.waited) and _made_since(run, node, need, now):
                        outcome = "unchanged"
                    elif not force and _reused(run, node, need, progress, alone):
                        outcome = "restored"
                    else:
                        _bring_inputs(run, node, need)
                        outcome, before = _produce(run, node, need, force, alone)
                        _publish(run, node, need, alone)
                        done = result_of(run.project.scratch(need.key))
                        run.ledger.commit(node, before, attempts.seen_files(done), progress.hashed, check=alone.check)
                    if outcome != "unchanged":
                        clear(run.project, node, need.key)
            except InputsGone as error:
                if lacked == (need.key, str(error)):  # another round would end the same way
                    message = f"{_inside(run.project, str(error))}: restore it, or rerun the stage that makes it"
                    raise StageFailed(node.address, "inputs_moved", message) from error
                lacked, now = (need.key, str(error)), run.identities()
        if outcome == "unchanged":
            clear_leftovers(run, [node])
        if outcome != "remote":
            open_artifact(run.project.artifact(node.address))
        result = Result(node.address, outcome, time.monotonic() - started)
        run.watch(StageEnded(node.address, outcome, seconds=result.seconds))
        return result


def at_rest(run: RunContext, node: Node, now: Identities, needed: bool = False) -> Literal["unchanged", "remote"] | None:
    """Whether a stage with current parents needs no work: it is here, or may stay in the remote.

    Raises:
        StageFailed: recorded as done, but the files are not here and the remote cannot be reached.
        LedgerError: `dvc.lock`, the cache or a file cannot be read.
    """
    try:
        reasons, remote = now.standing(node, run.transfer_progress(node.address).hashed)
    except RemoteError as error:
        message = f"cannot determine whether it is up to date: {error}. Or rerun it with --force {node.name}"
        raise StageFailed(node.address, "remote", message) from error
    if reasons:
        return None
    if remote:
        return None if needed or run.fetch else "remote"
    return "unchanged"


def clear_leftovers(run: RunContext, current: Iterable[Node]) -> None:
    """Clear the scratch folders of stages that are up to date, which a kill right after the commit leaves with all checkpoints.

    Without waiting for anything: a folder that is in use stays, as does one in which `--force` has begun to replace the artifact.
    """
    left = {folder.name for folder in scratch_state.scratch_folders(run.project)}
    if not left:
        return
    never = threading.Event()
    never.set()
    for node in current:
        artifact = run.project.artifact(node.address)
        with suppress(ArtifactError, Cancelled):
            key = read_json(artifact / "record.json").get("key")
            if key not in left or attempts.will_replace(run.project.scratch(key), artifact):
                continue
            with lease(run.project.lease(key), run.title, cancelled=never):
                if attempts.working(run.jobs(), run.project.scratch(key)) is None:
                    clear(run.project, node, key)


def run_under_dvc(run: RunContext, node: Node) -> Result:
    """`ensure` for the command of a stage in `dvc.yaml`: DVC has already checked, restored and deleted, and commits afterwards."""
    started = time.monotonic()
    with _failures(run, node):
        need = identify(run, node, run.identities())
        with _alone(run, node, need) as alone:
            outcome: Outcome = "restored"
            # another runner may have published in the meantime
            if not _is_in_place(run.project.artifact(node.address), need.key, run.transfer_progress(node.address).hashed):
                try:
                    outcome, before = _produce(run, node, need, False, alone)
                except InputsGone as error:  # DVC checked a different state
                    message = "its inputs changed while it waited; run the command again"
                    raise StageFailed(node.address, "inputs_moved", message) from error
                moved = run.ledger.moved(node, before)
                if moved:  # DVC would record the changed files
                    message = f"{', '.join(moved)} changed while it ran, so its result is not recorded for the new inputs. The result is "
                    message += "kept and reused if the old inputs are restored; run the command again"
                    raise StageFailed(node.address, "inputs_moved", message)
                _publish(run, node, need, alone)
                clear(run.project, node, need.key)
        result = Result(node.address, outcome, time.monotonic() - started)
        run.watch(StageEnded(node.address, outcome, seconds=result.seconds))
        return result


def identify(run: RunContext, node: Node, now: Identities) -> StageInputs:
    """Return the identity of the stage at this moment.

    Raises:
        StageFailed: an input or a project file is missing, or an input was not made by this run's recipe.
    """
    try:
        return now.need(node, run.transfer_progress(node.address).hashed)
    except ArtifactError as error:
        raise StageFailed(node.address, "refused", _inside(run.project, str(error))) from error
    except InputReplaced as error:
        again = command("run", run.graph.source or node.recipe)
        message = f"{error}. Stages of different recipe versions are never mixed: {again} makes every stage from the current recipe"
        raise StageFailed(node.address, "inputs_moved", message) from error


def _confirm(run: RunContext, node: Node, need: StageInputs) -> Identities:
    """Return the keys at this moment; raise InputsGone if the stage's has changed."""
    now = run.identities()
    if identify(run, node, now).key != need.key:
        raise InputsGone("its inputs changed while it waited")
    return now


def _made_since(run: RunContext, node: Node, need: StageInputs, now: Identities) -> bool:
    """Whether another runner has made the stage since this run decided that it must run."""
    with suppress(ArtifactError):
        if open_artifact(run.project.artifact(node.address)).record.key == need.key:
            return at_rest(run, node, now, needed=True) is not None
    return False


# --- steps 2 to 6 ------------------------------------------------------------------------------------------------------


def _reused(run: RunContext, node: Node, need: StageInputs, progress: TransferProgress, alone: StageLeases) -> bool:
    """Whether an existing artifact was reused. A fresh result of this key's job wins over the cache: `--force` may have requested it."""
    scratch = run.project.scratch(need.key)

    def adopted() -> bool:
        return run.ledger.adopt(node, need.key, progress.hashed, still)

    def still() -> None:  # it is recorded under the current inputs, which must be those of the key
        alone.check()
        _confirm(run, node, need)

    if attempts.is_unrecorded(scratch, run.project.artifact(node.address)) and adopted():
        return True
    if attempts.is_forced(scratch) and _has_work(run, scratch):
        return False
    if run.ledger.restore(node, need.key, progress, alone.check) or adopted():
        return True
    return run.ledger.take(node, run.ledger.equals_of(node, lambda: need), progress, still)


def _has_work(run: RunContext, scratch: Path) -> bool:
    """Whether a scratch folder holds a result, something to resume from, or a job."""
    return bool(scratch_state.reported_success(scratch) or attempts.resumable(scratch) or attempts.working(run.jobs(), scratch))


def _bring_inputs(run: RunContext, node: Node, need: StageInputs) -> None:
    """Fetch the files of parents left in the remote or partly restored, rebuild what the remote has lost, and fetch raw inputs that are
    not here."""
    if not run.make:
        what = "neither the cache nor the remote has it as recipe, inputs and stage version now describe it; `pedigree run` makes it"
        raise StageFailed(node.address, "not_finished", what)
    for edge in node.edges:
        if not has_all_parts(run.project.artifact(edge.source)):
            ensure(run, run.graph.nodes[edge.source], needed=True)
    for raw in raw_inputs.lacking(run.project, node, need.source_files):
        if not raw_inputs.fetch(run.project, run.ledger.remote, raw.sha256, raw.target):
            raise StageFailed(node.address, "refused", f"{raw} is not on this machine, nor in the remote: {raw_inputs.REMEDY}")


def _produce(run: RunContext, node: Node, need: StageInputs, force: bool, alone: StageLeases) -> tuple[Outcome, dict[str, Any]]:
    """Produce a finished, verified job in the scratch folder; return how, and the dependencies at its start."""
    scratch = run.project.scratch(need.key)
    handle = attempts.working(run.jobs(), scratch)
    if handle and force and scratch_state.known_spec(scratch) is None:  # without its spec the result is unusable
        run.jobs().cancel(handle)
        handle = None
    if handle:
        _take_over(run, node, need, scratch)
    if handle and (run.jobs().poll(handle).state == "unknown" or _is_of_another_scheduler(run, node, handle)):
        placement = scratch_state.read_spec(scratch).placement
        if attempts.await_elsewhere(run, node, handle, placement, alone.scratch, alone.listener):
            return "attached", scratch_state.read_dependencies(scratch)
        handle = None
    alive = handle is not None
    outdated = run.on_code_change == "rerun" and began_with_other_code(run, node, scratch)
    if not alive and not outdated and (not force or attempts.is_forced(scratch)) and _finished_unwatched(run, node, scratch, force):
        _take_over(run, node, need, scratch)
        run.watch(StageStarted(node.address, scratch, "its job ended while no run watched"))
        return "attached", scratch_state.read_dependencies(scratch)
    numerics, placement = run.settings(node)
    if alive:
        placement = scratch_state.read_spec(scratch).placement.model_copy(update={"launcher": placement.launcher})
        if outdated:
            first = command("cancel", node.name)
            run.ledger.notice(f"{node.address}: its job continues with its original code; to start over, end it with {first}")
    elif force:
        checkpoint_store.clear(placement.checkpoint_url, scratch)
        attempts.begin_again(scratch)
    if not alive and node.address in run.too_large:
        unfit = f"its cached result is unusable, and its job needs more memory than is available: {run.too_large[node.address]}"
        raise StageFailed(node.address, "refused", unfit)
    waited: list[str] = []
    with _place(run, node, need, numerics, placement, waited) as place:
        if not alive:
            if waited:
                _confirm(run, node, need)
            prepare(run, node, need, numerics, placement)
            _confirm(run, node, need)
        attempts.run_job(run, node, scratch, handle, placement, place, alone.scratch)
    return ("attached" if alive else "ran"), scratch_state.read_dependencies(scratch)


def _is_of_another_scheduler(run: RunContext, node: Node, handle: scratch_state.Handle) -> bool:
    """Whether a scheduler runs the job that the profile no longer names, so that it holds none of the slots that the profile gives."""
    return handle.launcher not in ("local", run.settings(node)[1].launcher.type)


def _take_over(run: RunContext, node: Node, need: StageInputs, scratch: Path) -> None:
    """Assign work under this key to this stage; another recipe or variant may have started it."""
    if take_over(run, node, scratch):
        _confirm(run, node, need)  # the dependencies just recorded must be those of the key


def _refuse_to_begin(run: RunContext, node: Node, now: Identities, stale: bool) -> None:
    """`--require-checkpoint STAGE`: refuse to start a stage from the beginning."""
    if not stale:
        raise StageFailed(node.address, "refused", "--require-checkpoint: it is up to date, so there is nothing to resume; omit the option")
    scratch = run.project.scratch(identify(run, node, now).key)
    mirrored = checkpoint_store.has_work(run.execution.of(node.kind, node.name)[1], scratch.name)
    if not (attempts.resumable(scratch) or mirrored or attempts.working(run.jobs(), scratch)):
        remedy = "omit the option to start from the beginning"
        raise StageFailed(node.address, "refused", f"--require-checkpoint: there is no checkpoint to resume from; {remedy}")


def _finished_unwatched(run: RunContext, node: Node, scratch: Path, force: bool) -> bool:
    """Whether the last job succeeded while unwatched, with verified output. With `force`, an unreadable report counts as no success."""
    try:
        scratch_state.read_spec(scratch)
        scratch_state.read_dependencies(scratch)
        if attempts.unproven(scratch, thorough=True, beat=run.transfer_progress(node.address).hashed) is not None:
            return False
    except Damaged:
        return False
    except ArtifactError:
        if force:
            return False
        raise
    made = scratch_state.attempts_here(scratch)
    if made and "ended_at" not in made[-1]:
        ended = datetime.fromtimestamp((scratch / "done.json").stat().st_mtime, UTC)
        began = attempts.left_queue(scratch_state.read_job(scratch), ended, attempts.reported_s(scratch))
        made[-1] = began | made[-1] | {"ended_at": ended.isoformat(timespec="seconds"), "cause": "succeeded"}
        write_json(scratch / scratch_state.ATTEMPTS, made)
    return True


def _publish(run: RunContext, node: Node, need: StageInputs, alone: StageLeases) -> None:
    for mark in publish(run.project, node, run.project.scratch(need.key), alone.check).marks:
        run.ledger.notice(f"{node.address}: {mark}")


# --- leases, slots, errors ---------------------------------------------------------------------------------------------


@contextmanager
def _failures(run: RunContext, node: Node) -> Iterator[None]:
    """Convert every failure to StageFailed and report it."""
    try:
        yield
    except (Cancelled, OSError, PedigreeError) as error:
        failed = error if isinstance(error, StageFailed) else StageFailed(node.address, *_cause(run, node, error))
        run.watch(StageEnded(node.address, "failed", failed.message, failed.cause))
        if failed is error:
            raise
        raise failed from error


def _cause(run: RunContext, node: Node, error: Exception) -> tuple[str, str]:
    message = _inside(run.project, str(error))
    match error:
        case Cancelled():
            return "cancelled", str(error)
        case LeaseLost():
            return "overtaken", str(error)
        case OSError() | LedgerError():
            cause = storage_cause(error) if isinstance(error, OSError) else "storage"
            return cause, message + (f": {attempts.REMEDIES[cause]}" if cause in attempts.REMEDIES else "")
        case Damaged():
            return "refused", f"{message}: {_fresh_start(node, error)}"
    return "refused", message


def _fresh_start(node: Node, damaged: Damaged) -> str:
    """Remedy for a scratch folder whose work cannot be resumed."""
    clean = command("scratch", f"{node.name}/{damaged.scratch.name[:12]}", "--clean")
    again = command("run", node.recipe, "--force", node.name)
    return f"resume with the version of Pedigree that wrote it, or discard the unfinished work: {clean} deletes it, and {again} starts over"


@contextmanager
def _alone(run: RunContext, node: Node, need: StageInputs) -> Iterator[StageLeases]:
    """Hold exclusive write access to this artifact folder and this scratch folder."""

    def waiting(holder: LeaseHolder) -> None:
        run.watch(StageWaiting(node.address, str(holder)))

    def held(name: str, **listening: Any) -> AbstractContextManager[HeldLease]:
        return lease(run.project.lease(name), run.title, waiting=waiting, cancelled=run.cancelled, **listening)

    def listen_to_job() -> None:
        job.silent_s(heartbeat.sign(run.project.scratch(need.key) / PULSES))

    def listen_to_all() -> None:  # time all of a lost machine's heartbeats in parallel, so that the timeout is waited for once
        listen_to_job()
        listen(run.project.lease(need.key), key)

    job, key = Listener(), Listener()
    with (
        held(node.address.replace("/", "--"), beside=listen_to_all) as artifact,
        held(need.key, listener=key, beside=listen_to_job) as scratch,
    ):
        recover(run.project, node.address)
        yield StageLeases(artifact, scratch, job)


def _place(run: RunContext, node: Node, need: StageInputs, numerics: Numerics, placement: Placement, waited: list[str]):
    """Hold the job's slots on this machine, unless a scheduler places it; `waited` receives the jobs that had to end first."""
    if not isinstance(placement.launcher, Local):
        return nullcontext(placement.launcher)
    pool = Pool.of(numerics, run.execution.slots)

    def waiting(holders: list[str]) -> None:
        waited.extend(holders)
        of = Counter(job.partition("/.pedigree/")[0] for job in holders)  # job.json is in the scratch folder of its project
        jobs = [f"{counted(number, 'job')} of {'this project' if root == str(run.project.root) else root}" for root, number in of.items()]
        run.watch(StageWaiting(node.address, f"for {counted(placement.slots, 'slot')} of {len(pool.names)}; {' and '.join(jobs)} running"))

    job = run.project.scratch(need.key) / "job.json"
    return slots(pool, placement.slots, job=job, waiting=waiting, cancelled=run.cancelled)


def _is_in_place(folder: Path, key: str, beat: Beat) -> bool:
    try:
        artifact: Artifact = open_artifact(folder, verify=True, beat=beat)
    except ArtifactError:
        return False
    return artifact.record.key == key and has_all_parts(folder)


def _inside(project: Project, text: str) -> str:
    return text.replace(f"{project.root}/", "")
