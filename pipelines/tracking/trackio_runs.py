"""Interface to trackio."""

from collections.abc import Mapping
from typing import Any

from pedigree.configs.language.trackers import Trackio
from pedigree.pipelines.tracking.tracked_stage import Row, TrackedStage, numbers_in


class TrackioRun:
    """A run of trackio in its database on this machine: trackio's own `Run.log` drops, with a warning, what it fails to store."""

    def __init__(self, tracker: Trackio, stage: TrackedStage) -> None:
        from trackio.sqlite_storage import SQLiteStorage  # pyright: ignore[reportMissingImports]

        self._storage: Any = SQLiteStorage
        self._project, self._stage = tracker.project, stage
        self.place = str(SQLiteStorage.get_project_db_path(tracker.project))

    def log(self, rows: list[Row]) -> None:
        self._store([numbers for _, numbers in rows], steps=[step for step, _ in rows], log_ids=[str(step) for step, _ in rows])

    def finish(self, outcome: str, results: Mapping[str, Any]) -> None:
        metrics = {f"result/{name}": value for name, value in numbers_in(results).items()}
        self._store([metrics], steps=[None], log_ids=[outcome], outcome=outcome, **results)

    def _store(self, metrics: list[dict[str, float]], *, steps: list[Any], log_ids: list[str], **config: Any) -> None:
        """Row by row, with the run's config; a row whose ID it has already is left out, and one without a step follows the last."""
        stage = self._stage
        self._storage.bulk_log(
            self._project, stage.address, metrics, steps=steps, run_id=stage.id, log_ids=[f"{stage.id}-{one}" for one in log_ids],
            config={**stage.config, **config, "_Group": stage.recipe},
        )  # fmt: skip
