"""What a tracker learns of a stage: who it is, and the rows of its curve, read from files that its job writes anyway."""

import csv
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

from pedigree.data.artifacts.artifacts import Artifact
from pedigree.pipelines.jobs.scratch_state import all_attempts, read_spec

END_S = 30.0
"""How long a finished run waits for a tracker to take what it has not taken yet."""
INTERRUPTED = ("cancelled", "overtaken", "not_finished")
"""Causes of stages that this run has left without their having failed."""
Row = tuple[int, dict[str, float]]
"""Step and metrics."""


@dataclass(frozen=True)
class TrackedStage:
    """The work of a stage, over all attempts and resumed runs."""

    id: str
    """Key and start: the same work keeps its ID when it resumes; `--force` begins another, and so does other code without a checkpoint."""
    address: str
    kind: str
    config: Mapping[str, Any]
    """Its lineage: recipe, stage, key, config, inputs, commit."""

    @property
    def recipe(self) -> str:
        return self.config["recipe"]

    @property
    def key(self) -> str:
        return self.config["key"]

    @classmethod
    def read(cls, scratch: Path) -> "TrackedStage":
        """Read it from the scratch folder of a job that has been submitted.

        Raises:
            Damaged: the spec cannot be read.
        """
        spec, attempts = read_spec(scratch), all_attempts(scratch)
        again = [now for then, now in pairwise(attempts) if not now.get("resumed_from") and _code(then) != _code(now)]
        first = [*attempts[:1], *again][-1:]
        began = "".join(character for one in first for character in str(one.get("started_at", "")) if character.isalnum())
        recipe, _, stage = spec.address.partition("/")
        config = {
            "recipe": recipe,
            "stage": stage,
            "kind": spec.kind,
            "key": spec.key,
            "config": spec.config,
            "inputs": {f"{one.port}/{one.label}": one.producer for one in spec.lineage_inputs()},
            "numerics": spec.numerics.model_dump(mode="json"),
            "commit": _code(attempts[-1]).get("commit") if attempts else None,
        }
        return cls(f"{spec.key[:12]}-{began[:15]}", spec.address, spec.kind, config)


def _code(attempt: Mapping[str, Any]) -> Mapping[str, Any]:
    return attempt.get("code") or {}


class TrackerRun(Protocol):
    """A tracker's run of a stage."""

    place: str
    """URL or folder."""

    def log(self, rows: list[Row]) -> None:
        """Record rows durably, or raise."""
        ...

    def finish(self, outcome: str, results: Mapping[str, Any]) -> None:
        """End the run: `done`, `failed`, or `interrupted`, which a later one resumes. `results`: the artifact's ID and metrics."""
        ...


class Curve:
    """The new rows of a `curve.jsonl` that a job extends, or replaces when it resumes from a checkpoint."""

    def __init__(self, path: Path) -> None:
        self._path, self._inode, self._read = path, 0, 0

    def rows(self) -> Iterator[Row]:
        """Complete lines since the last call."""
        with suppress(FileNotFoundError), self._path.open("rb") as stream:
            if (inode := os.fstat(stream.fileno()).st_ino) != self._inode:
                self._inode, self._read = inode, 0
            stream.seek(self._read)
            for line in stream:
                if not line.endswith(b"\n"):
                    break
                self._read += len(line)
                with suppress(ValueError, KeyError, TypeError):  # truncated by a full disk or a power cut
                    row = json.loads(line)
                    yield int(row.pop("step")), numbers_in(row)


def rows_of(artifact: Artifact) -> Iterator[Row]:
    """The curve of a finished stage."""
    with suppress(FileNotFoundError), (artifact.evidence / "curve.csv").open(newline="") as stream:
        for row in csv.DictReader(stream):
            yield int(row.pop("step")), {name: float(cell) for name, cell in row.items() if cell}


def numbers_in(values: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """All finite numbers in nested mappings: `a/b/c` → number."""
    found: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found |= numbers_in(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and math.isfinite(value):
            found[f"{prefix}{name}"] = float(value)
    return found
