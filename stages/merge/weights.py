"""Merge the weights of several models, tensor by tensor.

All arithmetic is fp32. A folder's weights may be in any number of safetensors files; only a few tensors are in memory at a time, so
that the models together may exceed it.
"""

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pedigree.configs.base.problems import PedigreeError

PARALLEL = 1e-4
"""Sine of the angle below which slerp is linear, because the two differ by less than fp32 precision."""


def weighted_mean(tensors: Iterable[Tensor], weights: Sequence[float]) -> Tensor:
    """Σ w_i W_i / Σ w_i in fp32 (Wortsman et al. 2022, arXiv 2203.05482); `tensors` are consumed one at a time."""
    total = math.fsum(weights)
    return reduce(Tensor.add_, (tensor.float() * (weight / total) for tensor, weight in zip(tensors, weights, strict=True)))


def slerp(first: Tensor, second: Tensor, t: float) -> Tensor:
    """sin((1-t)Ω)/sin Ω · W_1 + sin(tΩ)/sin Ω · W_2 in fp32, Ω the angle between the two as vectors (Shoemake 1985).

    Linear if the two are nearly parallel, opposite, or zero, where no arc is defined.
    """
    a, b = first.float(), second.float()
    norms = a.norm(), b.norm()
    if min(norms) > 0:
        u, v = a / norms[0], b / norms[1]
        omega = 2 * math.atan2(float((u - v).norm()), float((u + v).norm()))  # arccos of the product is inaccurate for small angles
        if math.sin(omega) > PARALLEL:
            return (math.sin((1 - t) * omega) * a + math.sin(t * omega) * b) / math.sin(omega)
    return (1 - t) * a + t * b


@dataclass(frozen=True)
class TensorEntry:
    """A tensor's file, dtype and shape."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


class Weights:
    """The tensors of a model folder, by name."""

    def __init__(self, folder: Path) -> None:
        """Read the headers of all safetensors files.

        Raises:
            PedigreeError: there are none, or a tensor is in two of them.
        """
        self.folder = folder
        self.files = sorted(folder.glob("*.safetensors"))
        self.entries: dict[str, TensorEntry] = {}
        for file in self.files:
            for name, entry in header(file).items():
                if name in self.entries:
                    raise PedigreeError(f"{folder} contains {name} twice, in {self.entries[name].file.name} and {file.name}")
                self.entries[name] = TensorEntry(file, entry["dtype"], tuple(entry["shape"]))
        if not self.entries:
            raise PedigreeError(f"{folder} has no safetensors weights")

    def tensor(self, name: str) -> Tensor:
        from safetensors import safe_open

        with safe_open(self.entries[name].file, framework="pt") as stream:
            return stream.get_tensor(name)


def header(file: Path) -> dict[str, dict[str, Any]]:
    """Tensors of a safetensors file, in file order."""
    with file.open("rb") as stream:
        read = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    entries = {name: entry for name, entry in read.items() if name != "__metadata__"}
    return dict(sorted(entries.items(), key=lambda item: item[1]["data_offsets"]))


def difference(first: Weights, other: Weights) -> str | None:
    """The first reason why two folders' weights cannot be merged, or None."""
    for names, holder, lacking in ((first.entries, first, other), (other.entries, other, first)):
        missing = next((name for name in names if name not in lacking.entries), None)
        if missing is not None:
            return f"{missing} is in one ({holder.folder}) but not in the other ({lacking.folder})"
    for name, entry in first.entries.items():
        if entry.shape != other.entries[name].shape:
            return f"{name} has shape {list(entry.shape)} in one and {list(other.entries[name].shape)} in the other"
    return None


def merge_folders(
    inputs: Sequence[Weights], combine: Callable[[Iterable[Tensor]], Tensor], out: Path, beat: Callable[[int], None] = lambda _: None
) -> None:
    """Write files like those of the first input (same names, order and dtypes) with the merged tensors.

    Args:
        inputs: folders with equal tensor names and shapes (`difference`).
        combine: merges the inputs' tensors of the same name, in order and read one at a time, in fp32.
        beat: called with the number of tensors written.

    Raises:
        PedigreeError: integer or boolean tensors differ between the inputs.
    """
    first, written = inputs[0], 0
    for file in first.files:
        with file.open("rb") as source, (out / file.name).open("wb") as stream:
            length = source.read(8)
            stream.write(length + source.read(int.from_bytes(length, "little")))
            for name in header(file):
                kept = first.tensor(name)
                if kept.is_floating_point():
                    merged = combine(weights.tensor(name) for weights in inputs).to(kept.dtype)
                elif all(torch.equal(kept, weights.tensor(name)) for weights in inputs):
                    merged = kept
                else:
                    raise PedigreeError(f"{name} has {kept.dtype} values, which differ between the inputs and cannot be averaged")
                stream.write(merged.contiguous().reshape(-1).view(torch.uint8).numpy().data)
                written += 1
                beat(written)
