"""The loss on rows that a stage holds out, measured without a gradient."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pedigree.configs.methods.training import HeldOutTraining
from pedigree.stages.job.job import Job
from pedigree.stages.training.feed import GlobalBatch, PreparedMicroBatch
from pedigree.stages.training.trainer import MetricSums, Trainer


@dataclass(frozen=True)
class HeldOut:
    """Held-out rows and when to measure them: every `measure_every` steps and after the last."""

    batch: GlobalBatch
    """All held-out rows; measured in passes of the same size as training."""
    config: HeldOutTraining
    last_step: int

    def measure(
        self, step: int, trainer: Trainer, pad_id: int, job: Job, sums_of: Callable[[PreparedMicroBatch], Mapping[str, Tensor]]
    ) -> dict[str, float]:
        """Sums over all held-out rows after a 1-based step, equal on all ranks; empty if none is due.

        Args:
            sums_of: the sums over one micro-batch.
        """
        every = self.config.measure_every
        if not self.batch.units or (step < self.last_step and (every is None or step % every)):
            return {}
        sums = MetricSums()
        with torch.no_grad(), trainer.feed([self.batch], pad_id) as feed:
            for micro_batch in feed.micro_batches():
                job.doing("measuring held-out rows")
                sums.add(sums_of(micro_batch), micro_batch.weight)
        return trainer.totals(sums.sums())
