"""Fused kernels: one function, one gradient; only the model at hand is changed; compiled once for rows of any length."""

import json
import os
import subprocess
import sys

import kernel_lab
import models
import pytest
import torch
from kernel_lab import TORCH, apart, compared, gradients, made, outputs, row

from pedigree.configs.language.execution import Numerics
from pedigree.configs.methods.training import Optimizer
from pedigree.stages.core.batches import document
from pedigree.stages.job.failures import StageError
from pedigree.stages.training import kernels
from pedigree.stages.training.kernels import ACTIVATIONS, fuse, refuse
from pedigree.stages.training.models import load_policy
from pedigree.stages.training.trainer import Trainer

COMPILED = Numerics(kernels="compiled", threads=1)
IN_PARTS = COMPILED.model_copy(update={"device": "cuda"})
"""What is compiled for a GPU; it computes on a CPU as well."""
LIGER = Numerics().model_copy(update={"kernels": "liger"})
nightly = pytest.mark.nightly


@pytest.fixture(autouse=True)
def fresh_compiler():
    """What one test has compiled counts for no other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


def fused(architecture, kind="policy", numerics=COMPILED, **fields):
    module = made(architecture, kind, **fields)
    fuse(module, numerics)
    return module


@pytest.mark.slow
@nightly
@pytest.mark.parametrize(
    ("architecture", "kind", "numerics"),
    [
        ("qwen3", "value", IN_PARTS),
        ("qwen3", "policy", COMPILED),
        ("llama", "adapters", COMPILED),
        ("gemma2", "value", COMPILED),
        ("qwen3_moe", "policy", COMPILED),
        ("llama", "adapters", IN_PARTS),
    ],
)
def test_compiled_kernels_give_the_same_values_and_gradients(architecture, kind, numerics):
    found = compared(made(architecture, kind), fused(architecture, kind, numerics), row())
    assert found["values"] < 1e-5 and found["gradients"] < 1e-5


@pytest.mark.slow
@nightly
def test_compiled_kernels_in_bf16_are_as_near_to_fp32_as_torchs():
    exact = made("llama")
    for parameter in exact.parameters():
        parameter.data = parameter.data.to(torch.bfloat16).float()
    errors = []
    for module in (made("llama", dtype=torch.bfloat16), fused("llama", dtype=torch.bfloat16)):
        with torch.no_grad():
            values = (outputs(module, row()) - outputs(exact, row())).abs().mean().item()
        errors.append((values, (gradients(module, row()) - gradients(exact, row())).norm().item()))
    assert errors[1][0] < 1.5 * errors[0][0] and errors[1][1] < 1.5 * errors[0][1]


def lengths_of(seed):
    """A packed row of documents of random lengths."""
    draw = torch.Generator().manual_seed(seed)
    sizes = [int(n) for n in torch.randint(2, 30, (1 + seed % 5,), generator=draw)]
    return row([(document([3, 4], list(range(5, 5 + size))),) for size in sizes])


@pytest.mark.slow
@nightly
def test_rows_of_all_lengths_run_the_parts_that_were_compiled_for_the_first():
    plain, module = made("llama"), fused("llama", numerics=IN_PARTS)
    for batch in (lengths_of(0), lengths_of(1)):  # with one document and with several
        gradients(module, batch)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for seed in range(2, 14):
            found = gradients(module, lengths_of(seed))
            assert apart(found, gradients(plain, lengths_of(seed))) < 1e-5


@pytest.mark.proves("numerics.kernels")
@pytest.mark.slow
def test_what_training_computes_is_compiled_before_the_first_step_for_rows_of_all_lengths_and_for_this_model_alone(tmp_path):
    """All layers are one graph each way; besides them there are the last norm and the two passes of the log-softmax."""
    policy = models.tiny_policy(tmp_path / "policy")
    settings = {"optimizer": Optimizer(learning_rate=1e-3), "total_steps": 3, "numerics": COMPILED, "seed": 0}
    plain = load_policy(policy, TORCH)
    before = outputs(plain, row())
    torch._dynamo.utils.counters.clear()
    compiled = torch._dynamo.utils.counters["stats"]
    trainer = Trainer(load_policy(policy, COMPILED), dtype="bf16", **settings)
    try:
        assert compiled["unique_graphs"] == 4 and trainer.engine.get_global_grad_norm() is None
        with torch._dynamo.config.patch(error_on_recompile=True):
            for seed in range(3, 8):
                loss = -trainer.module(lengths_of(seed))[0].sum()
                trainer.backward(loss)
                expected = -plain(lengths_of(seed))[0].sum()
                expected.backward()
                assert loss.item() == pytest.approx(expected.item(), rel=0.01)
        assert compiled["unique_graphs"] == 4 and not torch._dynamo.utils.counters["graph_break"]
        norm = torch.cat([p.grad.flatten() for p in plain.parameters()]).norm()
        assert trainer.step().grad_norm == pytest.approx(float(norm), rel=0.02)
    finally:
        trainer.close()
    assert torch.equal(before, outputs(plain, row())) and torch.equal(before, outputs(load_policy(policy, TORCH), row()))


def test_a_model_without_known_parts_is_not_compiled_in_silence():
    model = torch.nn.Module()
    model.base_model = torch.nn.Linear(2, 2)
    module = torch.nn.Module()
    module.model = model
    with pytest.raises(StageError, match="a Linear has no layer, norm or gated MLP to compile: set kernels to torch"):
        fuse(module, COMPILED)


def written(folder, **fields):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def test_models_that_liger_does_not_know_are_refused_before_they_are_loaded(tmp_path, monkeypatch):
    present, found = [object()], kernels.importlib.util.find_spec
    monkeypatch.setattr(kernels.importlib.util, "find_spec", lambda name, *of: present[0] if name == "liger_kernel" else found(name, *of))
    gpt2 = written(tmp_path / "gpt2", model_type="gpt2")
    with pytest.raises(StageError, match=r"kernels liger supports gemma, llama, .* this model is a gpt2: set kernels to compiled or torch"):
        refuse(gpt2, LIGER)
    refuse(gpt2, COMPILED)
    with pytest.raises(StageError, match="kernels liger computes silu in a llama, but this model's activation is gelu"):
        refuse(written(tmp_path / "gelu", model_type="llama", hidden_act="gelu"), LIGER)
    for architecture in ACTIVATIONS:
        refuse(written(tmp_path / architecture, model_type=architecture), LIGER)
    present[0] = None
    with pytest.raises(StageError, match="liger-kernel is not installed: run `make setup`, or set kernels to torch"):
        refuse(written(tmp_path / "plain", model_type="llama"), LIGER)


@pytest.mark.slow
@pytest.mark.proves("numerics.kernels", on_gpus="liger outside of Triton's interpreter: `make gpu-check`")
@pytest.mark.parametrize("cases", [kernel_lab.SOME_CASES, pytest.param(kernel_lab.ALL_CASES, marks=nightly)], ids=["some", "all"])
def test_ligers_kernels_give_the_same_values_and_gradients(cases):
    """In Triton's interpreter, which a process has to be started with."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": models.IMPORTS}
    command = [sys.executable, kernel_lab.__file__, json.dumps(cases)]
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr[-3000:]
    found = json.loads(answer.stdout.splitlines()[-1])
    assert set(found) == {" ".join(case) for case in cases}
    for case, numbers in found.items():
        assert numbers["values"] < 1e-5 and numbers["gradients"] < 1e-5, case
        assert numbers["norms"] >= 4 and numbers["mlps"] == 2 and numbers["rotated"] == 2 and numbers["untouched"], case
