"""The size of an update by hand, from files."""

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pedigree.stages.job import updates
from pedigree.stages.job.postconditions import not_trained
from pedigree.stages.job.updates import Update, measure


def folder(path: Path, *files: dict[str, torch.Tensor]) -> Path:
    path.mkdir()
    for number, tensors in enumerate(files):
        save_file(tensors, path / f"model-{number}.safetensors")
    return path


@pytest.mark.parametrize("piece", [1, 64 << 20])
def test_by_hand_over_several_files_and_pieces(tmp_path, monkeypatch, piece):
    """a moves by (3, 0), (0, 4) and b stays; ‖θ‖² = 4 · 1 + 3 · 4 = 16. The head is new."""
    monkeypatch.setattr(updates, "PIECE_BYTES", piece)
    start = folder(tmp_path / "start", {"a": torch.ones(2, 2)}, {"b": torch.full((3,), 2.0)})
    moved = torch.tensor([[4.0, 1.0], [1.0, 5.0]])
    made = folder(tmp_path / "made", {"b": torch.full((3,), 2.0), "score": torch.ones(1, 2)}, {"a": moved})
    assert measure(start, made) == Update(tensors=2, changed=1, norm=5.0, start_norm=4.0, values=7, dtype="float32")
    assert measure(start, made).metrics() == {"update_norm": 5.0, "update_relative": 1.25}


def test_saving_in_another_dtype_is_no_update(tmp_path):
    """1 + 2^-9 is 1 in bf16, whose numbers above 1 are 2^-7 apart."""
    start = folder(tmp_path / "start", {"a": torch.tensor([1 + 2**-9, 2.0])})
    same = measure(start, folder(tmp_path / "same", {"a": torch.tensor([1.0, 2.0], dtype=torch.bfloat16)}))
    assert (same.changed, same.norm, same.dtype) == (0, 0.0, "bfloat16")
    found = not_trained(same, {"trained_tokens": 7})
    assert found and "by 0 in total, less than the rounding error of one weight in bfloat16: raise optimizer.learning_rate" in found
    next_one = measure(start, folder(tmp_path / "next", {"a": torch.tensor([1 + 2**-7, 2.0], dtype=torch.bfloat16)}))
    assert (next_one.changed, next_one.norm) == (1, 2**-7) and not_trained(next_one, {}) is None
    assert math.isclose(next_one.start_norm, math.sqrt(5))


def test_what_weights_next_to_zero_move_by_is_nothing(tmp_path):
    """Four weights, of root mean square 1: bf16 rounds such a one by up to 2^-8, and 0 may become 2^-30."""
    start = folder(tmp_path / "start", {"a": torch.tensor([2.0, 0.0, 0.0, 0.0], dtype=torch.bfloat16)})
    for number, (size, vanished) in enumerate(((2.0**-30, True), (2.0**-8, True), (2.0**-7, False))):
        made = folder(tmp_path / str(number), {"a": torch.tensor([2.0, size, 0.0, 0.0], dtype=torch.bfloat16)})
        found = measure(start, made)
        assert (found.changed, found.norm, found.vanished) == (1, size, vanished)


def test_without_tokens_or_differences_nothing_was_trained():
    moved = Update(tensors=2, changed=1, norm=1.0, start_norm=1.0, values=2, dtype="float32")
    assert "no token contributed to a gradient" in str(not_trained(moved, {"trained_tokens": 0}))
    assert "all groups have equal rewards" in str(not_trained(moved, {"informative_groups": 0}))
    assert not_trained(moved, {"trained_tokens": 1, "informative_groups": 1}) is None


def test_a_few_values_in_fp32_do_not_decide_what_rounding_is(tmp_path):
    """The last tensor is a router's correction in fp32; the others are bf16."""
    bias = {"a": torch.ones(64, dtype=torch.bfloat16), "z.e_score_correction_bias": torch.ones(4)}
    start, made = (folder(tmp_path / name, bias) for name in ("start", "made"))
    found = measure(start, made)
    assert (found.dtype, found.values, found.start_norm) == ("bfloat16", 68, math.sqrt(68))
