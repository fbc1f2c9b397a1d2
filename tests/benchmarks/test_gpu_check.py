"""The checks for GPU machines run, on a CPU and tiny; what fails is said and decides the exit code."""

import json

import pytest
import torch

from benchmarks import gpu_check
from benchmarks.gpu_check import SHAPES, Failed, Shape, Skip, flops_per_token, made_policy, main, parameters_of

IN_PROCESS = [name for name in gpu_check.CHECKS if name != "deepspeed_zero"]


@pytest.mark.slow
@pytest.mark.nightly
def test_every_check_passes_on_a_cpu(tmp_path):
    assert main([str(tmp_path), "--device", "cpu", "--only", ",".join(IN_PROCESS)]) == 0
    written = json.loads((tmp_path / "gpu_check.json").read_text())
    found = {row["check"]: row for row in written["outcomes"]}
    assert list(found) == IN_PROCESS and [row["check"] for row in found.values() if row["status"] != "passed"] == ["liger_kernels"]
    assert (found["liger_kernels"]["status"], found["liger_kernels"]["why"]) == ("skipped", "kernels liger run on GPUs only")
    assert found["compiled_kernels"]["numbers"]["ratio"] > 0
    assert found["utilisation"]["numbers"]["cases"][0]["tokens_per_second"] > 0
    assert found["chunked_loss"]["numbers"]["memory"] == "measured on GPUs only"
    assert written["versions"]["torch"] == torch.__version__


def test_a_check_that_fails_ends_in_1_and_stops_no_other(tmp_path, monkeypatch, capsys):
    def too_far(setting):
        raise Failed("0.3 from fp32")

    def absent(setting):
        raise Skip("deepspeed is not installed")

    def broken(setting):
        raise RuntimeError("no kernel image")

    checks = {"packing": too_far, "deepspeed_zero": absent, "chunked_loss": broken, "utilisation": lambda setting: {"mfu": 0.5}}
    monkeypatch.setattr(gpu_check, "CHECKS", checks)
    assert main([str(tmp_path), "--device", "cpu"]) == 1
    said = {row["check"]: (row["status"], row["why"]) for row in json.loads((tmp_path / "gpu_check.json").read_text())["outcomes"]}
    assert said == {
        "packing": ("failed", "0.3 from fp32"),
        "deepspeed_zero": ("skipped", "deepspeed is not installed"),
        "chunked_loss": ("failed", "RuntimeError: no kernel image"),
        "utilisation": ("passed", ""),
    }
    assert main([str(tmp_path), "--device", "cpu", "--only", "deepspeed_zero"]) == 0
    assert "deepspeed is not installed" in capsys.readouterr().out


def test_flops_count_what_the_model_multiplies():
    shape = Shape("by hand", 2, 8, 2, 1, 12, 20, 4)
    # a layer: q and o 8 × 8, k and v 8 × 4, gate, up and down 8 × 12, two norms of 8; then a norm of 8 and the output 8 × 20
    assert parameters_of(shape) == 2 * (2 * 64 + 2 * 32 + 3 * 96 + 16) + 8 + 160
    # attention: 6 × 2 layers × (2 heads × 4) × 100 tokens of a document
    assert flops_per_token(shape, 100) == 6 * parameters_of(shape) + 6 * 2 * 8 * 100
    model = made_policy(shape, torch.device("cpu"), torch.float32, "sdpa").model
    assert sum(p.numel() for p in model.parameters()) - model.get_input_embeddings().weight.numel() == parameters_of(shape)


def test_shapes_are_of_the_sizes_that_they_are_named_after():
    for shape in SHAPES:
        assert parameters_of(shape) / 1e9 == pytest.approx(float(shape.name[:-1]), rel=0.12), shape.name
