"""Relative distance between the weights of two model folders: `python -m pedigree.stages.merge.distance BEFORE AFTER`.

Prints ‖after - before‖₂ / ‖before‖₂ over all tensors. A separate process, because planning does not load torch.
"""

import sys
from pathlib import Path

from pedigree.configs.base.problems import PedigreeError
from pedigree.stages.job.updates import measure
from pedigree.stages.merge.weights import Weights, difference


def relative_l2(before: Path, after: Path) -> float:
    """Relative L2 distance over the safetensors of two folders, in fp64.

    Raises:
        PedigreeError: the folders differ in tensor names or shapes.
    """
    if problem := difference(Weights(before), Weights(after)):
        raise PedigreeError(f"these are two different models: {problem}")
    update = measure(before, after)
    if update.start_norm == 0.0:
        raise PedigreeError(f"all weights in {before} are zero, so the relative distance is undefined")
    return update.norm / update.start_norm


if __name__ == "__main__":
    print(repr(relative_l2(Path(sys.argv[1]), Path(sys.argv[2]))))
