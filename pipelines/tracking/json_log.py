"""The states of a run's stages as lines of JSON, for collectors of logs."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pedigree.configs.language.trackers import JsonLog

FIELDS = ("state", "cause", "detail")


class JsonLines:
    """Appends a line whenever a stage changes its state."""

    def __init__(self, tracker: JsonLog, header: dict[str, Any]) -> None:
        self._path, self._recipe = Path(tracker.file), header["recipe"]
        self._lines: list[str] = []

    def take(self, line: dict[str, Any]) -> None:
        """Note a stage's new state."""
        stage = line["address"].partition("/")[2]
        known = {"time": datetime.fromtimestamp(line["time"], UTC).isoformat(), "recipe": self._recipe, "stage": stage}
        self._lines.append(json.dumps(known | {name: line[name] for name in FIELDS if line[name]}) + "\n")

    def poll(self, ended: bool) -> None:
        """Write what was noted."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as log:
            log.writelines(self._lines)
        self._lines.clear()
