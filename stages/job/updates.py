"""What training has changed: the weights that a stage wrote against those that it began with, read from the files of both."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

PIECE_BYTES = 64 << 20


@dataclass(frozen=True)
class Update:
    """θ' - θ over the tensors that both models have, in the dtype in which θ' was saved."""

    tensors: int
    """Compared."""
    changed: int
    """Of them, those that differ in at least one value."""
    norm: float
    """‖θ' - θ‖₂."""
    start_norm: float
    """‖θ‖₂."""
    values: int
    """Numbers compared."""
    dtype: str
    """Of θ', e.g. `bfloat16`."""

    @property
    def vanished(self) -> bool:
        """Whether it is less than the rounding of a single weight of average size: what a few weights next to zero move by is nothing."""
        if not self.values:
            return False
        roundoff = torch.finfo(getattr(torch, self.dtype)).eps / 2
        return self.norm <= roundoff * self.start_norm / math.sqrt(self.values)

    def metrics(self) -> dict[str, float]:
        """Rounded to six digits, which do not depend on the number of threads that added them up."""
        relative = self.norm / self.start_norm if self.start_norm else 0.0
        return {"update_norm": float(f"{self.norm:.6g}"), "update_relative": float(f"{relative:.6g}")}


def measure(start: Path, made: Path) -> Update:
    """Compares two folders of safetensors. θ is rounded to the dtype of θ' first, so that saving in another dtype is no update.

    A head that only one of the models has (a reward model's begins at random) is not compared.
    """
    before, after = _tensors(start), _tensors(made)
    shared = [name for name in after if name in before]
    changed, values, squares, start_squares, dtype = 0, 0, 0.0, 0.0, ""
    for name in shared:
        different = False
        for old, new in _pieces(before[name], after[name], name):
            if not new.is_floating_point():
                continue
            dtype = str(new.dtype).removeprefix("torch.")
            old = old.to(new.dtype)
            values += new.numel()
            start_squares += old.double().square().sum().item()
            if not torch.equal(old, new):
                different = True
                squares += (new.double() - old.double()).square().sum().item()
        changed += different
    return Update(len(shared), changed, math.sqrt(squares), math.sqrt(start_squares), values, dtype)


def _tensors(folder: Path) -> dict[str, Path]:
    """Name of each tensor → the file that holds it."""
    from safetensors import safe_open

    found: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found |= dict.fromkeys(file.keys(), path)
    return found


def _pieces(old_file: Path, new_file: Path, name: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Rows of a tensor in both files, few at a time: the largest tensors of a model have gigabytes."""
    from safetensors import safe_open

    with safe_open(old_file, framework="pt") as old, safe_open(new_file, framework="pt") as new:
        slices: tuple[Any, Any] = old.get_slice(name), new.get_slice(name)
        shape = slices[1].get_shape()
        if not shape or slices[0].get_shape() != shape:
            if not shape:
                yield old.get_tensor(name), new.get_tensor(name)
            return
        rows = max(1, PIECE_BYTES // (8 * max(1, math.prod(shape[1:]))))
        for begin in range(0, shape[0], rows):
            yield slices[0][begin : begin + rows], slices[1][begin : begin + rows]
