"""How far two models are apart."""

import pytest
import torch
from safetensors.torch import save_file

from pedigree.configs.base.problems import PedigreeError
from pedigree.pipelines.reproduce import verdicts
from pedigree.pipelines.reproduce.verdicts import weights_distance
from pedigree.stages.merge.distance import relative_l2


def test_the_distance_is_relative_and_over_all_tensors_of_all_files(tmp_path):
    # ‖(1, 0, 0)‖ / ‖(3, 0, 4)‖ = 1/5, in bf16, spread over files in another way
    before, after = tmp_path / "before", tmp_path / "after"
    before.mkdir()
    after.mkdir()
    save_file({"a": torch.tensor([3.0, 0.0], dtype=torch.bfloat16)}, before / "1.safetensors")
    save_file({"b": torch.tensor([4.0])}, before / "2.safetensors")
    save_file({"b": torch.tensor([4.0]), "a": torch.tensor([4.0, 0.0], dtype=torch.bfloat16)}, after / "model.safetensors")
    assert relative_l2(before, after) == pytest.approx(0.2)
    assert weights_distance(before, after) == pytest.approx(0.2)
    save_file({"b": torch.tensor([4.0])}, after / "model.safetensors")
    with pytest.raises(PedigreeError, match="two different models"):
        relative_l2(before, after)


def test_weights_that_take_too_long_to_read_have_no_distance(tmp_path, monkeypatch):
    monkeypatch.setattr(verdicts, "WEIGHTS_TIMEOUT_S", 0.01)
    assert weights_distance(tmp_path, tmp_path) is None
