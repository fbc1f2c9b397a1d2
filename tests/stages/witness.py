"""A model without weights, in a module that a process imports quickly."""

import os
import signal
from collections.abc import Callable
from typing import Any

import torch

from pedigree.stages.job.failures import StageError
from pedigree.stages.sampling.frozen_copies import FrozenModel


class Witness(FrozenModel):
    """Gives back each row with its process and its GPUs."""

    def score(self, rows: Any, progress: Callable[[int], None]) -> list[Any]:
        if "die" in rows:
            os.kill(os.getpid(), signal.SIGKILL)
        if "refuse" in rows:
            raise StageError("the model cannot read this: use another")
        progress(1)
        return [[row, os.getpid(), os.environ.get("CUDA_VISIBLE_DEVICES"), torch.get_num_threads()] for row in rows]
