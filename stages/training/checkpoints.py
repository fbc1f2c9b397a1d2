"""Checkpoints of a running stage: written atomically, and loaded only if every byte matches the manifest.

    checkpoints/step-000040/   engine/... (a folder per model), random_RANK.pt, state.json (the caller's), manifest.json (sha256 of
                               all; written last)

Training pauses while the ranks write; hashing, the manifest and the rename run in parallel with the next steps.
DeepSpeed's files are pickles, so files that are not verified by our manifest are never opened.
"""

import json
import os
import shutil
import signal
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pedigree.configs.language.execution import FORMERLY
from pedigree.data.artifacts.artifacts import scan, write_json
from pedigree.data.host.faults import fault_point
from pedigree.data.store.durable import rename, sync_file, sync_tree
from pedigree.stages.job.failures import Preempted, StageError
from pedigree.stages.job.job import Job, checkpoint_names
from pedigree.stages.job.mirroring import open_mirror
from pedigree.stages.training.trainer import Trainer

RESHAPING = ("world_size", "zero_stage")
"""Numerics that determine how the optimizer state is split into files."""
COST_SHARE = 0.03
"""Maximum share of the time of a run that training pauses for periodic checkpoints."""


def period_s(cost_s: float, minimum_s: float) -> float:
    """Seconds of training between two checkpoints: the least x ≥ `minimum_s` with cost / (cost + x) ≤ `COST_SHARE`."""
    return max(minimum_s, cost_s * (1 - COST_SHARE) / COST_SHARE)


class Checkpoints:
    """Writes, prunes and loads checkpoints; one instance per job and rank."""

    def __init__(self, job: Job, trainer: Trainer, *others: Trainer) -> None:
        self.job, self.trainer, self.trainers = job, trainer, (trainer, *others)
        self.folder = job.checkpoints
        self.mirror = open_mirror(job)
        self.last_write = time.monotonic()
        self.period_s = period_s(0, job.placement.checkpoint_every_s)
        self.stop_asked = False
        self._sealer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._sealing: Future[None] | None = None
        job.settle = self._settle
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._ask_stop)

    def _ask_stop(self, *_: Any) -> None:
        self.stop_asked = True

    def resume(self) -> dict[str, Any] | None:
        """Load the newest sound checkpoint; return the state passed to `after_step`, or None if there is no checkpoint.

        Raises:
            StageError: the checkpoint belongs to another key; it has other numerics, without `--allow-numerics-change`; or there is none,
                with `--require-checkpoint`.
        """
        chosen = self.trainer.broadcast(self._chosen() if self.trainer.rank == 0 else None)
        if self.job.numerics.world_size > 1:
            self._note_hosts(chosen)
        if chosen is None:
            self.job.rewind(0)
            if self.job.require_checkpoint:
                remedy = "omit the option to start from the beginning"
                raise StageError(f"--require-checkpoint: {self.job.address} has no undamaged checkpoint: {remedy}")
            self.job.doing("training")
            return None
        saved = json.loads((self.folder / chosen / "state.json").read_text())
        changes = self._changes(chosen, saved["guard"])
        self.job.note_code(saved.get("code"), f"step {saved['step']}")
        self.job.marks = list(dict.fromkeys([*saved["marks"], *self.job.marks]))
        if changes:
            self.job.marks.append(f"numerics changed at step {saved['step']}: {', '.join(changes.values())}")
        with self.job.busy("loading the checkpoint"):
            for trainer in self.trainers:
                trainer.load_state(self.folder / chosen, resharded=bool(changes.keys() & set(RESHAPING)))
        self.job.rewind(saved["step"])
        self.job.resumed_from = chosen
        if self.trainer.rank == 0:
            print(f"resumed from {chosen}", flush=True)
        self.job.doing("training")
        return saved["state"]

    def _note_hosts(self, chosen: str | None) -> None:
        """Write the hosts of the ranks as evidence; before the checkpoint, the job may have had others."""
        hosts = self.trainer.from_all_ranks(os.uname().nodename)
        if self.trainer.rank == 0:
            after = int(chosen.removeprefix("step-")) if chosen else 0
            write_json(self.job.evidence / "ranks.json", {"after_step": after, "hosts": hosts})

    def after_step(self, step: int, state: dict[str, Any]) -> None:
        """Write a checkpoint if one is due; call after each optimizer step, on all ranks.

        Raises:
            Preempted: the job received a stop signal, and has written a checkpoint.
        """
        placement = self.job.placement
        due = time.monotonic() - self.last_write >= self.period_s
        due = due or (placement.checkpoint_every_steps is not None and step % placement.checkpoint_every_steps == 0)
        stopping, due_anywhere = self.trainer.sum(float(self.stop_asked), float(due))
        if stopping or due_anywhere:
            self.write(step, state)
        if stopping:
            self._settle()
            if self.mirror is not None:
                self.mirror.flush()
            self.trainer.barrier()
            raise Preempted(f"received a stop signal and wrote a checkpoint after step {step}")

    def write(self, step: int, state: dict[str, Any]) -> None:
        began = time.monotonic()
        self._settle()
        temporary, final = self.folder / f".step-{step:06d}", self.folder / f"step-{step:06d}"
        if self.trainer.rank == 0:
            self.job.seal()
            for left in self.folder.glob(".step-*"):  # after a kill
                shutil.rmtree(left)
            temporary.mkdir(parents=True)
        self.trainer.barrier()
        with self.job.busy("writing the checkpoint"):
            for trainer in self.trainers:
                trainer.save_state(temporary)
        self.trainer.barrier()
        if self.trainer.rank == 0:
            if self.mirror is not None and (self.job.folder / "curve.jsonl").exists():  # its next line may be written at any time
                shutil.copyfile(self.job.folder / "curve.jsonl", temporary / "curve.jsonl")
            described = {"step": step, "guard": self._guard(), "code": self.job.code, "marks": self.job.marks, "state": state}
            self._sealing = self._sealer.submit(self._seal, temporary, final, described)
        cost = self.job.checkpoint_cost
        self.last_write = time.monotonic()
        spent = self.last_write - began
        self.period_s = period_s(spent, self.job.placement.checkpoint_every_s)
        cost["written"] += 1
        cost["seconds"] += spent
        cost["period_s"] = self.period_s

    def _seal(self, temporary: Path, final: Path, described: dict[str, Any]) -> None:
        write_json(temporary / "state.json", described)
        files = scan(temporary)  # in parallel with training, whose steps send heartbeats
        write_json(temporary / "manifest.json", {entry.path: entry.sha256 for entry in files})
        sync_tree(temporary)
        curve = self.job.folder / "curve.jsonl"
        if curve.exists():  # a resume continues after its lines
            sync_file(curve)
        fault_point("checkpoint written")
        self.job.seal()
        shutil.rmtree(final, ignore_errors=True)
        rename(temporary, final)
        fault_point("checkpoint renamed")
        self.job.checkpoint_cost["bytes"] = sum(entry.size for entry in files)
        if self.mirror is not None:
            self.mirror.offer(final)
        for old in self._written()[: -self.job.placement.keep_checkpoints]:
            if self.mirror is None or self.mirror.busy != old.name:
                shutil.rmtree(old)

    def _settle(self) -> None:
        """Wait for the checkpoint being sealed; raises its error, if any."""
        if self._sealing is not None:
            sealing, self._sealing = self._sealing, None
            with self.job.busy("writing the checkpoint", flushing=True):
                sealing.result()

    def _written(self) -> list[Path]:
        return [self.folder / name for name in checkpoint_names(self.job.folder)]

    def _chosen(self) -> str | None:
        """The newest sound checkpoint, downloaded from the mirror if that has a newer one."""
        local = self._newest_sound()
        return local if self.mirror is None else self.mirror.fetch_newer(local, self.folder) or local

    def _newest_sound(self) -> str | None:
        for path in reversed(self._written()):
            try:
                promised = json.loads((path / "manifest.json").read_text())
                checked = scan(path, lambda done, size: self.job.doing("checking the checkpoint", done / 1e9, size / 1e9, "GB"))
                found = {entry.path: entry.sha256 for entry in checked if entry.path != "manifest.json"}
            except (OSError, ValueError) as error:
                print(f"checkpoint {path.name} is unreadable ({error}): using the previous one", flush=True)
                continue
            if found == promised:
                return path.name
            wrong = sorted(name for name in promised.keys() | found.keys() if promised.get(name) != found.get(name))
            print(f"checkpoint {path.name} is damaged ({', '.join(wrong)}): using the previous one", flush=True)
        return None

    def _changes(self, chosen: str, guard: dict[str, Any]) -> dict[str, str]:
        """Numerics that differ from a checkpoint's: name → description with both values."""
        guard = FORMERLY | guard
        if guard["key"] != self.job.key:
            raise StageError(f"{chosen} belongs to key {guard['key'][:12]}, but {self.job.address} has key {self.job.key[:12]}: delete it")
        now = self._guard()
        changes = {name: f"{name} {guard.get(name)} -> {now[name]}" for name in sorted(now) if guard.get(name) != now[name]}
        if changes and not self.job.allow_numerics_change:
            raise StageError(
                f"{chosen} of {self.job.address} was written under other numerics ({', '.join(changes.values())}): restore those, continue "
                f"under the new ones with --allow-numerics-change (which marks the record), or start over with --force"
            )
        stages = {guard["zero_stage"], now["zero_stage"]}
        if len(stages) > 1 and stages & {0, 3}:
            raise StageError(
                f"{chosen} of {self.job.address} has zero_stage {guard['zero_stage']}, and DeepSpeed cannot load it under zero_stage "
                f"{now['zero_stage']}: keep the stage, or change only between 1 and 2"
            )
        return changes

    def _guard(self) -> dict[str, Any]:
        return {"key": self.job.key, **self.job.numerics.deciding()}
