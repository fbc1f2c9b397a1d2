"""Interface to MLflow."""

import json
import re
import time
from collections.abc import Mapping
from typing import Any

from pedigree.configs.language.trackers import Mlflow
from pedigree.pipelines.tracking.tracked_stage import Row, TrackedStage, numbers_in

STATUS = {"done": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}
BATCH = 1000
"""Most metrics that MLflow takes at a time."""
LONGEST = 6000
"""Characters of a parameter in MLflow."""
TAG = "pedigree.run"


class MlflowRun:
    """A run of MLflow, found again by a tag."""

    def __init__(self, tracker: Mlflow, stage: TrackedStage) -> None:
        from mlflow import MlflowClient  # pyright: ignore[reportMissingImports]

        self._client: Any = MlflowClient(tracking_uri=tracker.uri)
        found = self._client.get_experiment_by_name(tracker.experiment)
        experiment = found.experiment_id if found else self._client.create_experiment(tracker.experiment)
        runs = self._client.search_runs([experiment], filter_string=f"tags.`{TAG}` = '{stage.id}'")
        if runs:
            self._id = runs[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
        else:
            tags = {TAG: stage.id, "pedigree.recipe": stage.recipe, "pedigree.kind": stage.kind}
            self._id = self._client.create_run(experiment, tags=tags, run_name=stage.address).info.run_id
            for name, value in stage.config.items():  # only now: MLflow refuses changes, and a resumed job may have other numerics
                text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
                self._client.log_param(self._id, name, text[:LONGEST])
        self.place, self._step = f"{tracker.uri} run {self._id}", 0

    def log(self, rows: list[Row]) -> None:
        from mlflow.entities import Metric  # pyright: ignore[reportMissingImports]

        now = int(time.time() * 1000)
        metrics = [Metric(re.sub(r"[^\w./ :-]", "_", name), value, now, step) for step, found in rows for name, value in found.items()]
        for start in range(0, len(metrics), BATCH):
            self._client.log_batch(self._id, metrics=metrics[start : start + BATCH])
        self._step = rows[-1][0]

    def finish(self, outcome: str, results: Mapping[str, Any]) -> None:
        if results:
            self._client.set_tag(self._id, "pedigree.artifact", results["artifact"])
            self.log([(self._step, {f"result/{name}": value for name, value in numbers_in(results).items()})])
        self._client.set_terminated(self._id, STATUS[outcome])
