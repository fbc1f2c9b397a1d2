"""On-disk record that outlives a flow run's process."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import UUID

from pedigree.configs.base.project import Project
from pedigree.data.artifacts.artifacts import write_json
from pedigree.data.store import heartbeat
from pedigree.data.store.heartbeat import Listener, Pulse
from pedigree.pipelines.jobs.events import RunEnded
from pedigree.pipelines.jobs.processes import Process


class FlowRunLost(Exception):
    """The server has lost its record of this run; everything must be reported again from the beginning."""


class FlowRecord:
    """The process of a flow run, the scratch folders of its jobs, and its outcome."""

    def __init__(self, project: Project, name: str, flow_run_id: UUID | None = None) -> None:
        """`flow_run_id` is None until Prefect has created the flow run with idempotency key `name`."""
        self.path, self.name, self.flow_run_id = project.private / "flows" / f"{name}.json", name, flow_run_id
        self._beat = self.path.with_suffix(".beat")
        self.process: Process | None = Process.here()
        self.end: RunEnded | None = None
        self.folders: list[Path] = []
        self.states: dict[str, tuple[str, str, str]] = {}
        """Address → type, name and message of a stage's Prefect state, once the run has ended."""
        self._removed, self._writing = False, threading.Lock()

    @classmethod
    def all(cls, project: Project) -> "list[FlowRecord]":
        folder = project.private / "flows"
        for beat in folder.glob("[!.]*.beat"):
            if not beat.with_suffix(".json").exists():  # a last heartbeat was written after the record was removed
                beat.unlink(missing_ok=True)
        return [cls.read(project, path.stem) for path in sorted(folder.glob("[!.]*.json"))]

    @classmethod
    def read(cls, project: Project, name: str) -> "FlowRecord":
        record = cls(project, name)
        record.process = None
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):  # removed meanwhile, or written by another version
            raw = json.loads(record.path.read_text())
            record.flow_run_id = UUID(raw["flow_run"]) if raw["flow_run"] else None
            record.folders = [Path(folder) for folder in raw["folders"]]
            record.end = RunEnded(*raw["end"]) if raw["end"] else None
            record.states = {address: tuple(state) for address, state in raw["states"].items()}
            record.process = Process(**raw["process"])
        return record

    @contextmanager
    def beating(self) -> Iterator[None]:
        """Write heartbeats of this flow run's runner for other machines while the block runs."""
        try:
            with Pulse(self._beat):
                yield
        finally:
            if not self.path.exists():
                self._beat.unlink(missing_ok=True)

    def lives(self, listener: Listener) -> bool:
        """Whether its runner is alive: from the process table for local runners, from heartbeats for remote ones."""
        if self.process is not None and self.process.is_local:
            return self.process.alive
        return listener.silent_s(heartbeat.sign(self._beat)) <= heartbeat.SILENCE_S

    def write(self) -> None:
        """Write the record, unless it was removed; thread-safe."""
        with self._writing:
            if not self._removed:
                write_json(self.path, {
                    "process": self.process.model_dump() if self.process else None,
                    "folders": [str(folder) for folder in self.folders],
                    "states": self.states,
                    "flow_run": str(self.flow_run_id) if self.flow_run_id else None,
                    "end": (self.end.outcome, self.end.detail) if self.end else None,
                })  # fmt: skip

    def remove(self) -> None:
        with self._writing:
            self._removed = True
            self.path.unlink(missing_ok=True)
            self._beat.unlink(missing_ok=True)
