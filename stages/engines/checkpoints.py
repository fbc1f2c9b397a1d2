"""Checkpoints of a running stage: written whole or not at all, loaded only when every byte is the one that was written.

    checkpoints/step-000040/   engine/..., random_RANK.pt, state.json (the caller's), manifest.json (sha256 of all; written last)

DeepSpeed's files are pickles: nothing that our manifest does not vouch for is ever opened.
"""

import json
import shutil
import signal
import time
from pathlib import Path
from typing import Any

from data.artifacts import scan, write_json
from stages.engines.trainer import Trainer
from stages.job import Job, Preempted, StageError


class Checkpoints:
    """When to write, what to keep, where to go on; one per job and rank."""

    def __init__(self, job: Job, trainer: Trainer) -> None:
        self.job, self.trainer = job, trainer
        self.folder = job.checkpoints
        self.last_write = time.monotonic()
        self.stop_asked = False
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._ask_stop)

    def _ask_stop(self, *_: Any) -> None:
        self.stop_asked = True

    def resume(self) -> dict[str, Any] | None:
        """Loads the newest sound checkpoint; returns the state given to `after_step`, or None when there is none.

        Raises:
            StageError: it was made under other numerics.
        """
        chosen = self.trainer.broadcast(self._newest_sound() if self.trainer.rank == 0 else None)
        if chosen is None:
            return None
        saved = json.loads((self.folder / chosen / "state.json").read_text())
        now = self._guard()
        differing = sorted(name for name in now if saved["guard"].get(name) != now[name])
        if differing:
            changes = ", ".join(f"{name} {saved['guard'].get(name)} -> {now[name]}" for name in differing)
            raise StageError(
                f"{chosen} of {self.job.address} was made under other numerics ({changes}): "
                "resume with those, or delete the checkpoints to start again"
            )
        self.trainer.load_state(self.folder / chosen)
        self.job.rewind(saved["step"])
        if self.trainer.rank == 0:
            print(f"resumed from {chosen}", flush=True)
        return saved["state"]

    def after_step(self, step: int, state: dict[str, Any]) -> None:
        """Call after each optimizer step, on all ranks: writes a checkpoint when one is due.

        Raises:
            Preempted: the job was asked to stop, and has written one.
        """
        placement = self.job.placement
        due = time.monotonic() - self.last_write >= placement.checkpoint_every_s
        due = due or (placement.checkpoint_every_steps is not None and step % placement.checkpoint_every_steps == 0)
        stopping, due_anywhere = self.trainer.sum(float(self.stop_asked), float(due))
        if stopping or due_anywhere:
            self.write(step, state)
        if stopping:
            raise Preempted(f"asked to stop after step {step}")

    def write(self, step: int, state: dict[str, Any]) -> None:
        temporary, final = self.folder / f".step-{step:06d}", self.folder / f"step-{step:06d}"
        if self.trainer.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        self.trainer.barrier()
        self.trainer.save_state(temporary)
        self.trainer.barrier()
        if self.trainer.rank == 0:
            write_json(temporary / "state.json", {"step": step, "guard": self._guard(), "state": state})
            files = {entry.path: entry.sha256 for entry in scan(temporary)}
            write_json(temporary / "manifest.json", files)
            shutil.rmtree(final, ignore_errors=True)
            temporary.rename(final)
            for old in self._written()[: -self.job.placement.keep_checkpoints]:
                shutil.rmtree(old)
        self.trainer.barrier()
        self.last_write = time.monotonic()

    def _written(self) -> list[Path]:
        return sorted(self.folder.glob("step-*"))

    def _newest_sound(self) -> str | None:
        for path in reversed(self._written()):
            try:
                promised = json.loads((path / "manifest.json").read_text())
                found = {entry.path: entry.sha256 for entry in scan(path) if entry.path != "manifest.json"}
            except (OSError, ValueError) as error:
                print(f"checkpoint {path.name} is unreadable ({error}): going back to the one before", flush=True)
                continue
            if found == promised:
                return path.name
            wrong = sorted(name for name in promised.keys() | found.keys() if promised.get(name) != found.get(name))
            print(f"checkpoint {path.name} is damaged ({', '.join(wrong)}): going back to the one before", flush=True)
        return None

    def _guard(self) -> dict[str, Any]:
        return {"key": self.job.key, **self.job.numerics.model_dump(mode="json")}
