"""How far the weights of one model folder are from those of another: `python -m stages.core.distance BEFORE AFTER`.

A process of its own, because planning loads no torch. It prints ‖after - before‖₂ / ‖before‖₂ over all tensors together.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor, float64


def relative_l2(before: Path, after: Path) -> float:
    """Relative L2 distance over the safetensors of two folders, in fp64, one tensor at a time.

    Raises:
        ValueError: the folders hold other tensors, or tensors of other shapes.
    """
    square = norm = 0.0
    for (name, old), (other, new) in zip(_tensors(before), _tensors(after), strict=True):
        if name != other or old.shape != new.shape:
            raise ValueError(f"{name} {tuple(old.shape)} stands against {other} {tuple(new.shape)}: these are other models")
        square += (new.to(float64) - old.to(float64)).square().sum().item()
        norm += old.to(float64).square().sum().item()
    if norm == 0.0:
        raise ValueError(f"{before} holds no weights other than zero")
    return (square / norm) ** 0.5


def _tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """All tensors by name, however many files they are spread over."""
    from safetensors import safe_open

    places = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            places |= dict.fromkeys(file.keys(), path)
    for name in sorted(places):
        with safe_open(places[name], framework="pt") as file:
            yield name, file.get_tensor(name)


if __name__ == "__main__":
    print(repr(relative_l2(Path(sys.argv[1]), Path(sys.argv[2]))))
