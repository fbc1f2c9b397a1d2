"""Interface to Weights & Biases."""

from collections.abc import Mapping
from typing import Any

from pedigree.configs.language.trackers import Wandb
from pedigree.pipelines.tracking.tracked_stage import Row, TrackedStage, numbers_in


class WandbRun:
    """A run of wandb, in the group of its recipe."""

    def __init__(self, tracker: Wandb, stage: TrackedStage) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        # the statistics and the command would be those of the follower, not of the job
        settings = wandb.Settings(silent=True, console="off", disable_git=True, x_disable_stats=True, x_disable_meta=True)
        self._run = wandb.init(
            project=tracker.project, entity=tracker.entity, mode=tracker.mode, dir=".pedigree",
            id=stage.id, resume="allow" if tracker.mode == "online" else None, reinit="create_new", settings=settings,
            name=stage.address, group=stage.recipe, job_type=stage.kind, config=dict(stage.config),
        )  # fmt: skip
        self.place = str(self._run.url if tracker.mode == "online" else self._run.dir)

    def log(self, rows: list[Row]) -> None:
        for step, numbers in rows:
            self._run.log(numbers, step=step)

    def finish(self, outcome: str, results: Mapping[str, Any]) -> None:
        self._run.summary.update({"outcome": outcome, **results, **numbers_in(results)})
        self._run.finish(exit_code=0 if outcome == "done" else 1)
