"""The process that reports a run to one tracker: `python -m pedigree.pipelines.tracking.follower EVENTS PLACE`.

EVENTS is a file of JSON lines that the run extends (`pipelines/tracking/tracking.py`), PLACE the tracker's index in its first line. Only
this process talks to the tracker and imports its library, so that neither can stop or slow the run. What a tracker fails to take is
offered to it again. Lines on stdout are notices of the run; all other output is the log.
"""

import json
import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import TypeAdapter

from pedigree.configs.base.frozen import digest
from pedigree.configs.base.project import Project
from pedigree.configs.language.trackers import JsonLog, Mlflow, Prometheus, TensorBoard, Tracker, Trackio, Wandb
from pedigree.data.artifacts.artifacts import open_artifact, write_text
from pedigree.pipelines.telemetry import no_telemetry
from pedigree.pipelines.tracking.json_log import JsonLines
from pedigree.pipelines.tracking.mlflow_runs import MlflowRun
from pedigree.pipelines.tracking.prometheus_file import PrometheusFile
from pedigree.pipelines.tracking.tensorboard_runs import TensorBoardRun
from pedigree.pipelines.tracking.tracked_stage import END_S, INTERRUPTED, Curve, Row, TrackedStage, TrackerRun, rows_of
from pedigree.pipelines.tracking.trackio_runs import TrackioRun
from pedigree.pipelines.tracking.wandb_runs import WandbRun

POLL_S = 1.0
AWAY_S = 5.0
"""Pause before retrying a tracker that failed."""
MADE = ("ran", "attached")
"""States of a stage whose job has succeeded."""


@dataclass
class _Following:
    stage: TrackedStage
    scratch: Path
    curve: Curve
    step: int
    """Last step that the tracker has."""
    rows: list[Row] = field(default_factory=list)
    """Rows that it does not have yet."""
    outcome: str = ""
    results: Mapping[str, Any] = field(default_factory=dict)
    run: TrackerRun | None = None


class Curves:
    """Reports stages with a curve, and evaluations, to a tracker."""

    def __init__(self, project: Project, tracker: Tracker) -> None:
        self._project, self._tracker = project, tracker
        self._steps = project.private / "trackers" / f"{tracker.type}-{digest(tracker.model_dump())[:8]}"
        """Folder with the last step of each unfinished run."""
        self._following: dict[str, _Following] = {}

    def take(self, line: dict[str, Any]) -> None:
        """Note a stage's new state; asks nothing of the tracker."""
        address, following = line["address"], self._following.get(line["address"])
        if "work" in line and following is None:
            stage = TrackedStage(**line["work"])
            scratch, last = self._project.scratch(stage.key), self._steps / stage.id
            step = int(last.read_text()) if last.exists() else 0
            self._following[address] = _Following(stage, scratch, Curve(scratch / "curve.jsonl"), step)
        elif following and line["state"] in (*MADE, "failed"):
            following.outcome = "done" if line["state"] in MADE else "interrupted" if line["cause"] in INTERRUPTED else "failed"

    def poll(self, ended: bool) -> None:
        """Report what is new of every stage. Raises the first error of the tracker; the next call resumes where stages failed."""
        errors = []
        for address in list(self._following):
            try:
                self._report(address, ended)
            except Exception as error:  # boundary: whatever fails in a tracker or its library
                errors.append(error)
        if errors:
            raise errors[0]

    def _report(self, address: str, ended: bool) -> None:
        following = self._following[address]
        outcome = following.outcome or ("interrupted" if ended else "")
        self._read(following)
        if following.run is None:
            following.run = self._opened(following.stage)
            with suppress(OSError), (following.scratch / "log.txt").open("a") as log:
                log.write(f"{self._tracker.type}: {following.run.place}\n")
        if following.rows:
            following.run.log(following.rows)
            following.step = following.rows[-1][0]
            following.rows.clear()
            write_text(self._steps / following.stage.id, str(following.step))
        if outcome:
            following.run.finish(outcome, following.results)
            del self._following[address]
            if outcome == "done":
                (self._steps / following.stage.id).unlink(missing_ok=True)

    def _read(self, following: _Following) -> None:
        found = list(following.curve.rows())
        if following.outcome == "done" and not following.results:
            artifact = open_artifact(self._project.artifact(following.stage.address))
            found += rows_of(artifact)
            following.results = {"artifact": artifact.record.id, **artifact.record.metrics}
        last = following.rows[-1][0] if following.rows else following.step
        for step, numbers in found:
            if step > last:
                following.rows.append((step, numbers))
                last = step

    def _opened(self, stage: TrackedStage) -> TrackerRun:
        match self._tracker:
            case TensorBoard():
                return TensorBoardRun(self._tracker, stage)
            case Wandb():
                return WandbRun(self._tracker, stage)
            case Mlflow():
                return MlflowRun(self._tracker, stage)
            case Trackio():
                return TrackioRun(self._tracker, stage)
            case Prometheus() | JsonLog():
                raise AssertionError("a file of states has no runs")


def reported_to(tracker: Tracker, header: dict[str, Any]) -> Curves | PrometheusFile | JsonLines:
    """What takes the states of the stages."""
    match tracker:
        case Prometheus():
            return PrometheusFile(tracker, header)
        case JsonLog():
            return JsonLines(tracker, header)
        case _:
            return Curves(Project(Path.cwd()), tracker)


def follow(events: BinaryIO, place: int, warn: Callable[[str], None]) -> None:
    """Report a run until it ends, or until its process has died, and then what is left, for `END_S` at most. `say` gets a notice when the
    tracker begins to fail.
    """
    header = json.loads(events.readline())
    tracker: Tracker = TypeAdapter(Tracker).validate_python(header["trackers"][place])
    reported = reported_to(tracker, header)
    away, ended, rest, until = False, False, b"", math.inf
    while True:
        alone = os.getppid() != header["process"]
        *lines, rest = (rest + events.read()).split(b"\n")  # the last may not be whole yet
        for line in map(json.loads, lines):
            if line.get("ended"):
                ended = True
            else:
                reported.take(line)
        if alone and not ended and isinstance(reported, PrometheusFile):
            return  # the file of an active run that grows old tells that the run was killed
        ended = ended or alone
        until = min(until, time.monotonic() + END_S) if ended else until
        failing = away
        try:
            reported.poll(ended)
            away = False
        except Exception as error:  # boundary: whatever fails in a tracker or its library
            traceback.print_exc()
            if not failing:
                reason = (str(error).strip().splitlines() or [""])[0]
                warn(f"tracker {tracker.type}: {type(error).__name__}: {reason}; the run continues without it")
            away = True
        if ended and (not away or time.monotonic() >= until):
            return
        time.sleep(AWAY_S if away and not ended else POLL_S)


def main() -> None:
    notices = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries print to the log
    no_telemetry()
    with open(sys.argv[1], "rb") as events:
        follow(events, int(sys.argv[2]), lambda text: print(text, file=notices))


if __name__ == "__main__":
    main()
