"""Measure how far training moved the weights, from the initial and final safetensors files."""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

PIECE_BYTES = 64 << 20


@dataclass(frozen=True)
class Update:
    """θ' - θ over the tensors that both models share, in the dtype of the saved θ'."""

    tensors: int
    """Tensors compared."""
    changed: int
    """Tensors that differ in at least one value."""
    norm: float
    """‖θ' - θ‖₂."""
    start_norm: float
    """‖θ‖₂."""
    values: int
    """Values compared."""
    dtype: str
    """Dtype of most values of θ', e.g. `bfloat16`; a router's correction of its scores is stored in fp32."""

    @property
    def vanished(self) -> bool:
        """Whether the update is smaller than the rounding error of one weight of average size: tiny moves of a few near-zero weights do
        not count."""
        if not self.values:
            return False
        roundoff = torch.finfo(getattr(torch, self.dtype)).eps / 2
        return self.norm <= roundoff * self.start_norm / math.sqrt(self.values)

    def metrics(self) -> dict[str, float]:
        """Norms rounded to six digits, so that they do not depend on the number of threads."""
        relative = self.norm / self.start_norm if self.start_norm else 0.0
        return {"update_norm": float(f"{self.norm:.6g}"), "update_relative": float(f"{relative:.6g}")}


def measure(start: Path, made: Path) -> Update:
    """Compare two folders of safetensors. θ is first rounded to the dtype of θ', so that saving in another dtype is not an update.

    Tensors in only one of the models are not compared, e.g. the randomly initialized head of a reward model.
    """
    before, after = _tensors(start), _tensors(made)
    shared = [name for name in after if name in before]
    changed, squares, start_squares = 0, 0.0, 0.0
    values: Counter[str] = Counter()
    for name in shared:
        different = False
        for old, new in _pieces(before[name], after[name], name):
            if not new.is_floating_point():
                continue
            values[str(new.dtype).removeprefix("torch.")] += new.numel()
            old = old.to(new.dtype)
            start_squares += old.double().square().sum().item()
            if not torch.equal(old, new):
                different = True
                squares += (new.double() - old.double()).square().sum().item()
        changed += different
    dtype = max(values, key=values.__getitem__, default="")
    return Update(len(shared), changed, math.sqrt(squares), math.sqrt(start_squares), values.total(), dtype)


def _tensors(folder: Path) -> dict[str, Path]:
    """Tensor name → file."""
    from safetensors import safe_open

    found: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found |= dict.fromkeys(file.keys(), path)
    return found


def _pieces(old_file: Path, new_file: Path, name: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Iterate over slices of a tensor in both files; the largest tensors have gigabytes."""
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
