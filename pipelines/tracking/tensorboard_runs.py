"""Interface to TensorBoard: an event file for each run of a stage."""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pedigree.configs.language.trackers import TensorBoard
from pedigree.pipelines.tracking.tracked_stage import Row, TrackedStage, numbers_in


class TensorBoardRun:
    """Event files of a stage in one folder; each process that continues it writes another file."""

    def __init__(self, tracker: TensorBoard, stage: TrackedStage) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        folder = Path(tracker.folder) / stage.address / stage.id
        known = folder.exists()
        self.place, self._writer, self._step = str(folder), EventFileWriter(str(folder)), 0
        if not known:
            self._text("lineage", stage.config)

    def log(self, rows: list[Row]) -> None:
        for self._step, numbers in rows:
            self._scalars(numbers)
        self._writer.flush()

    def finish(self, outcome: str, results: Mapping[str, Any]) -> None:
        if results:
            self._scalars({f"result/{name}": value for name, value in numbers_in(results).items()})
            self._text("result", results)
        self._writer.close()

    def _scalars(self, numbers: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

        self._write(Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in numbers.items()]))

    def _text(self, name: str, value: Mapping[str, Any]) -> None:
        from tensorboard.plugins.text.summary_v2 import text_pb

        indented = json.dumps(value, indent=1, default=str).replace("\n", "\n    ")
        self._write(text_pb(name, f"    {indented}"))  # indented: Markdown shows it as it is

    def _write(self, summary: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]

        self._writer.add_event(Event(wall_time=time.time(), step=self._step, summary=summary))
