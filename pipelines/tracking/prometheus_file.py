"""The state of a run as a file for the textfile collector of Prometheus' node_exporter."""

import time
from collections import Counter
from pathlib import Path
from typing import Any

from pedigree.configs.language.trackers import Prometheus
from pedigree.data.artifacts.artifacts import write_text
from pedigree.pipelines.tracking.tracked_stage import INTERRUPTED

WRITE_S = 10.0
"""Most seconds between two states of the file; scrapers look several times a minute."""
HELP = {
    "pedigree_run_active": "Whether pedigree run is working on the recipe.",
    "pedigree_stages": "Stages of the recipe by state.",
    "pedigree_slots": "Slots of this machine, from the profile.",
    "pedigree_slots_busy": "Slots of this machine that jobs of the recipe hold.",
    "pedigree_slots_busy_elsewhere": "Slots that jobs of the recipe hold on other machines: nodes of a cluster, or joined ones.",
    "pedigree_stage_waiting_seconds": "How long the stage has waited in this run: for slots, a queue or a retry.",
    "pedigree_stage_running_seconds": "How long jobs of the stage have run in this run.",
    "pedigree_stage_failed": "A stage that failed in this run, by cause.",
}
TIMED = ("waiting", "running")


class PrometheusFile:
    """Keeps the metrics of a run, from the states of its stages."""

    def __init__(self, tracker: Prometheus, header: dict[str, Any]) -> None:
        self._path = Path(tracker.folder) / f"pedigree_{header['recipe']}.prom"
        self._recipe, self._slots, self._stage_slots = header["recipe"], header["slots"], header["stages"]
        self._states = dict.fromkeys(self._stage_slots, "pending")
        self._since: dict[str, float] = {}
        self._seconds: Counter[tuple[str, str]] = Counter()
        self._causes: dict[str, str] = {}
        self._written, self._changed = 0.0, True

    def take(self, line: dict[str, Any]) -> None:
        """Note a stage's new state."""
        address, before = line["address"], self._states[line["address"]]
        if before in TIMED:
            self._seconds[address, before] += line["time"] - self._since[address]
        state = "interrupted" if line["state"] == "failed" and line["cause"] in INTERRUPTED else line["state"]
        self._states[address], self._since[address], self._changed = state, line["time"], True
        self._causes.pop(address, None)
        if state == "failed":
            self._causes[address] = line["cause"]

    def poll(self, ended: bool) -> None:
        """Write the file if a state has changed, or seconds have passed."""
        if ended or self._changed or time.monotonic() - self._written > WRITE_S:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_text(self._path, self._text(time.time(), not ended))
            self._written, self._changed = time.monotonic(), False

    def _text(self, now: float, active: bool) -> str:
        running = [address for address, state in self._states.items() if active and state == "running"]
        samples: list[tuple[str, dict[str, str], float]] = [
            ("pedigree_run_active", {}, int(active)),
            *(("pedigree_stages", {"state": state}, count) for state, count in sorted(Counter(self._states.values()).items())),
            ("pedigree_slots", {}, self._slots),
            ("pedigree_slots_busy", {}, sum(self._stage_slots[address][0] for address in running)),
            ("pedigree_slots_busy_elsewhere", {}, sum(self._stage_slots[address][1] for address in running)),
        ]
        for state in TIMED:
            for address, current in self._states.items():
                seconds = self._seconds[address, state] + (now - self._since[address] if active and current == state else 0.0)
                samples += [(f"pedigree_stage_{state}_seconds", {"stage": address}, round(seconds, 3))] if seconds else []
        samples += [("pedigree_stage_failed", {"stage": address, "cause": cause}, 1) for address, cause in self._causes.items()]
        lines = []
        for name, text in HELP.items():
            lines += [f"# HELP {name} {text}", f"# TYPE {name} gauge"]
            lines += [f"{name}{_labels({'recipe': self._recipe} | labels)} {value}" for found, labels, value in samples if found == name]
        return "\n".join(lines) + "\n"


def _labels(labels: dict[str, str]) -> str:
    """Names of recipes, stages, states and causes contain no character to escape."""
    return "{" + ",".join(f'{name}="{value}"' for name, value in labels.items()) + "}"
