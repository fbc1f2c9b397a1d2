"""Report a run to the trackers of its profile, without depending on them.

The run appends the states of its stages to a file. One process for each tracker (`pipelines/tracking/follower.py`) reads that file and what
jobs write anyway. The run waits for them only after its last stage.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO

from pedigree.configs.base.problems import PedigreeError
from pedigree.configs.language.graph import Node
from pedigree.data.artifacts import provenance
from pedigree.pipelines.jobs.context import RunContext
from pedigree.pipelines.jobs.events import Notice, RunEnded, RunEvent, StageProgressed, StageStarted, StageView
from pedigree.pipelines.tracking.tracked_stage import END_S, TrackedStage


@contextmanager
def tracked(run: RunContext, selection: Collection[str] | None) -> Iterator[None]:
    """Report the block's run of the selected stages (default: all) to the trackers of its profile."""
    if not run.execution.trackers:
        yield
        return
    logs = run.project.private / "trackers" / run.graph.recipe
    logs.mkdir(parents=True, exist_ok=True)
    watch = run.watch
    with NamedTemporaryFile("w", dir=logs, prefix="events-", suffix=".jsonl") as events:
        written = _Events(run, selection, events)
        followers: dict[int, subprocess.Popen[str]] = {}
        for place in range(len(run.execution.trackers)):
            try:
                followers[place] = _started(run, place, Path(events.name), logs)
            except OSError as error:  # e.g. the machine has no further process
                run.ledger.notice(f"tracker {_name(run, place)} cannot start ({error}); the run continues without it", urgent=True)
        run.watch = written.watch
        try:
            yield
        finally:
            run.watch = watch
            written.append({"ended": True})
            _wait(run, followers)


class _Events:
    """The file of states, which each thread of the run extends."""

    def __init__(self, run: RunContext, selection: Collection[str] | None, stream: IO[str]) -> None:
        self._stream, self._watch, self._writing = stream, run.watch, threading.Lock()
        chosen = [node for address, node in run.graph.nodes.items() if selection is None or address in selection]
        self._views = {node.address: StageView() for node in chosen}
        self._tracked = {node.address for node in chosen if node.declaration.curve or node.output == "scores"}
        slots = {node.address: _slots(run, node) for node in chosen}
        trackers = [tracker.model_dump(mode="json") for tracker in run.execution.trackers]
        header = {"process": os.getpid(), "recipe": run.graph.recipe, "slots": run.execution.slots, "stages": slots}
        self.append(header | {"trackers": trackers})

    def append(self, line: Mapping[str, object]) -> None:
        with suppress(OSError):  # jobs themselves report a full disk
            self._stream.write(json.dumps(line) + "\n")
            self._stream.flush()

    def watch(self, event: RunEvent) -> None:
        """Write a stage's state if it has changed, and pass the event on."""
        if not isinstance(event, Notice | RunEnded | StageProgressed) and event.address in self._views:
            with self._writing:
                before = self._views[event.address]
                view = self._views[event.address] = before.after(event)
                if (view.state, view.folder) != (before.state, before.folder):
                    line = {"address": event.address, "time": time.time()}
                    line |= {"state": view.state, "cause": view.cause, "detail": view.detail}
                    self.append(line | self._work(event))
        self._watch(event)

    def _work(self, event: RunEvent) -> dict[str, object]:
        """The work that a job begins or resumes, if trackers show its kind; read now, since a published stage has no scratch folder."""
        if isinstance(event, StageStarted) and event.address in self._tracked:
            with suppress(PedigreeError):  # a damaged spec, which the run itself reports
                return {"work": asdict(TrackedStage.read(event.folder))}
        return {}


def _slots(run: RunContext, node: Node) -> tuple[int, int]:
    """Slots that the job of a stage holds on this machine, and on others."""
    numerics, placement = run.execution.of(node.kind, node.name)
    here = placement.slots if placement.launcher.type == "local" else 0
    return here, placement.slots * numerics.nodes - here


def _started(run: RunContext, place: int, events: Path, logs: Path) -> "subprocess.Popen[str]":
    """The follower of a tracker, in a session of its own: Ctrl-C ends the run, which then ends it."""
    command = [sys.executable, "-m", "pedigree.pipelines.tracking.follower", str(events), str(place)]
    environment = os.environ | {"PYTHONPATH": provenance.python_path(provenance.CODE_ROOT), "PYTHONSAFEPATH": "1"}
    with (logs / f"{_name(run, place)}.log").open("w") as log:
        process = subprocess.Popen(
            command, cwd=run.project.root, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log,
            text=True, start_new_session=True,
        )  # fmt: skip
    threading.Thread(target=_pass_on, args=(run, process), daemon=True, name="tracker").start()
    return process


def _name(run: RunContext, place: int) -> str:
    """The type of a tracker, numbered from the second one of the type."""
    types = [tracker.type for tracker in run.execution.trackers[: place + 1]]
    return types[-1] + (f"-{number}" if (number := types.count(types[-1])) > 1 else "")


def _pass_on(run: RunContext, process: "subprocess.Popen[str]") -> None:
    assert process.stdout is not None
    for line in process.stdout:
        run.ledger.notice(line.strip(), urgent=True)


def _wait(run: RunContext, followers: "dict[int, subprocess.Popen[str]]") -> None:
    """Wait until all followers have ended, and end those that do not."""
    until = time.monotonic() + END_S
    try:
        for place, follower in followers.items():
            with suppress(subprocess.TimeoutExpired):
                follower.wait(max(0.0, until - time.monotonic()))
            if follower.returncode != 0:
                how = f"did not end within {END_S:g} s of the run" if follower.returncode is None else "crashed"
                if run.execution.trackers[place].type == "wandb":
                    how += ", and `wandb sync .pedigree/wandb/RUN` uploads the runs it has kept"
                log = f".pedigree/trackers/{run.graph.recipe}/{_name(run, place)}.log"
                run.ledger.notice(f"tracker {_name(run, place)} {how}, so it may lack metrics; its log is {log}", urgent=True)
    finally:
        for follower in followers.values():
            if follower.poll() is None:
                os.killpg(follower.pid, signal.SIGKILL)
                follower.wait()
