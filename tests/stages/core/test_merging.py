"""Arithmetic on weights, against numbers worked out by hand; folders of files, against the arithmetic."""

import math

import pytest
import torch
from safetensors.torch import load_file, save_file

from pedigree.configs.base.problems import PedigreeError
from pedigree.stages.merge.weights import Weights, difference, header, merge_folders, slerp, weighted_mean

X, Y = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])


def test_the_mean_is_weighted_and_normalised():
    # (1·(2, 0) + 3·(0, 4)) / 4 = (0.5, 3)
    assert weighted_mean([2 * X, 4 * Y], [1.0, 3.0]).tolist() == [0.5, 3.0]


def test_the_mean_of_bf16_weights_is_taken_in_fp32():
    # 1 + 2^-7 is the next bf16 after 1; the mean of the two, 1 + 2^-8, is no bf16 number
    low, high = torch.tensor([1.0], dtype=torch.bfloat16), torch.tensor([1 + 2**-7], dtype=torch.bfloat16)
    assert weighted_mean([low, high], [1.0, 1.0]).tolist() == [1 + 2**-8]


def test_the_mean_takes_one_tensor_at_a_time():
    alive = []

    def tensors():
        for value in (1.0, 2.0, 6.0):
            alive.append(value)
            yield torch.tensor([value])

    assert weighted_mean(tensors(), [1.0, 1.0, 1.0]).tolist() == pytest.approx([3.0]) and alive == [1.0, 2.0, 6.0]


@pytest.mark.parametrize(
    ("t", "expected"),
    [
        (0.0, [1.0, 0.0]),
        (0.5, [math.sqrt(0.5), math.sqrt(0.5)]),  # half of a right angle
        (1 / 3, [math.cos(math.pi / 6), math.sin(math.pi / 6)]),
        (1.0, [0.0, 1.0]),
    ],
)
def test_slerp_of_orthogonal_unit_vectors_walks_the_arc(t, expected):
    assert slerp(X, Y, t).tolist() == pytest.approx(expected, abs=1e-6)


def test_slerp_of_unequal_lengths_by_hand():
    # Ω = π/2: sin(π/4) (2, 0) + sin(π/4) (0, 4) = (√2, 2√2)
    assert slerp(2 * X, 4 * Y, 0.5).tolist() == pytest.approx([math.sqrt(2), 2 * math.sqrt(2)], abs=1e-6)


def test_slerp_at_a_small_angle_by_hand():
    # Ω = 0.01 between unit vectors; at t = 0.3 the angle is 0.003
    second = torch.tensor([math.cos(0.01), math.sin(0.01)])
    assert slerp(X, second, 0.3).tolist() == pytest.approx([math.cos(0.003), math.sin(0.003)], abs=1e-7)


@pytest.mark.parametrize(
    ("second", "expected"),
    [([3.0, 0.0], [2.0, 0.0]), ([-3.0, 0.0], [-1.0, 0.0]), ([0.0, 0.0], [0.5, 0.0])],
    ids=["parallel", "opposite", "zero"],
)
def test_where_no_arc_is_defined_slerp_is_linear(second, expected):
    assert slerp(X, torch.tensor(second), 0.5).tolist() == pytest.approx(expected)


def folder(path, **files):
    path.mkdir()
    for name, tensors in files.items():
        save_file(tensors, path / f"{name}.safetensors", metadata={"format": "pt"})
    return Weights(path)


def test_folders_merge_across_other_cuts_into_files_and_keep_the_firsts_layout_and_dtype(tmp_path):
    a, b, ids = torch.tensor([[1.0, 3.0]]), torch.tensor(2.0), torch.tensor([7])
    first = folder(tmp_path / "1", one={"a": a.bfloat16(), "c": a[0, :1].bfloat16(), "ids": ids}, two={"b": b})
    other = folder(tmp_path / "2", all={"b": 3 * b, "ids": ids, "a": 3 * a, "c": a[0, 1:]})
    assert difference(first, other) is None
    (tmp_path / "out").mkdir()
    seen = []
    merge_folders([first, other], lambda tensors: weighted_mean(tensors, [1.0, 1.0]), tmp_path / "out", seen.append)
    one, two = (load_file(tmp_path / "out" / f"{name}.safetensors") for name in ("one", "two"))
    assert (
        one["a"].dtype == torch.bfloat16 and one["a"].tolist() == [[2.0, 6.0]] and one["c"].tolist() == [2.0] and one["ids"].tolist() == [7]
    )
    assert two["b"].shape == () and two["b"].item() == 4.0 and seen == [1, 2, 3, 4]
    assert header(tmp_path / "out" / "one.safetensors") == header(tmp_path / "1" / "one.safetensors")


def test_what_cannot_be_merged_is_named(tmp_path):
    given = {"a": torch.ones(2), "b": torch.ones(3)}
    first = folder(tmp_path / "1", model=given)
    assert "b is in one" in str(difference(first, folder(tmp_path / "2", model={"a": torch.ones(2)})))
    assert "a has shape [2] in one and [4]" in str(difference(first, folder(tmp_path / "3", model=given | {"a": torch.ones(4)})))
    with pytest.raises(PedigreeError, match="contains a twice"):
        folder(tmp_path / "4", one=given, two=given)
    whole = [folder(tmp_path / name, model={"ids": torch.tensor([value])}) for name, value in (("5", 1), ("6", 2))]
    with pytest.raises(PedigreeError, match=r"ids has torch.int64 values, which differ"):
        merge_folders(whole, lambda tensors: weighted_mean(tensors, [1.0, 1.0]), tmp_path / "1")
