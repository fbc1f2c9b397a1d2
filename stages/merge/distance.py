"""Relative distance between the weights of two model folders: `python -m pedigree.stages.merge.distance BEFORE AFTER`.

Prints ‖after - before‖₂ / ‖before‖₂ over all tensors. A separate process, because planning does not load torch.
"""

import sys
from pathlib import Path

from torch import float64

from pedigree.configs.base.problems import PedigreeError
from pedigree.stages.merge.weights import Weights, difference


def relative_l2(before: Path, after: Path) -> float:
    """Relative L2 distance over the safetensors of two folders, in fp64, one tensor at a time.

    Raises:
        PedigreeError: the folders differ in tensor names or shapes.
    """
    old, new = Weights(before), Weights(after)
    problem = difference(old, new)
    if problem:
        raise PedigreeError(f"these are two different models: {problem}")
    squared_distance = squared_norm = 0.0
    for name in sorted(old.entries):
        tensor = old.tensor(name).to(float64)
        squared_distance += (new.tensor(name).to(float64) - tensor).square().sum().item()
        squared_norm += tensor.square().sum().item()
    if squared_norm == 0.0:
        raise PedigreeError(f"all weights in {before} are zero, so the relative distance is undefined")
    return (squared_distance / squared_norm) ** 0.5


if __name__ == "__main__":
    print(repr(relative_l2(Path(sys.argv[1]), Path(sys.argv[2]))))
