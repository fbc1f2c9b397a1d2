"""A CPU without bf16 units multiplies bf16 matrices through fp32: training, scoring and vLLM, at the speed of fp32."""

import json
import os
import subprocess
import sys
from pathlib import Path

import models
import pytest
import torch
from effects_lab import trainer_of

from pedigree.configs.language.execution import Numerics
from pedigree.data.artifacts.artifacts import Artifact
from pedigree.data.host import machine
from pedigree.data.host.machine import ONEDNN_LIMITS, has_bf16_units, settled
from pedigree.stages.core.batches import collate, document
from pedigree.stages.training.models import frozen, load_policy
from pedigree.stages.training.products import through_fp32

ROOT = Path(__file__).parents[2]
AVX2 = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
"""Makes oneDNN and torch compute as on a CPU that has AVX2 and no more."""
RATES = """
import json, sys, time
from pathlib import Path
import torch
from pedigree.configs.language.execution import Numerics
from pedigree.data.artifacts.artifacts import open_artifact
from pedigree.data.host.machine import has_bf16_units
from pedigree.stages.training.models import load_policy

load_policy(open_artifact(Path(sys.argv[1])), Numerics(threads=1))
torch.set_num_threads(1)

def seconds(dtype):
    x = torch.randn(256, 512).to(dtype).requires_grad_()
    w = torch.randn(1024, 512).to(dtype).requires_grad_()
    taken = []
    for _ in range(6):
        began = time.process_time()
        torch.nn.functional.linear(x, w).sum().backward()
        taken.append(time.process_time() - began)
    return min(taken)

print(json.dumps({"units": has_bf16_units(), "ratio": seconds(torch.bfloat16) / seconds(torch.float32)}))
"""


@pytest.fixture(autouse=True)
def torchs_own_kernels_afterwards():
    yield
    through_fp32(False)


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> Artifact:
    return models.tiny_policy(tmp_path_factory.mktemp("policy"), hidden=128)


def run(code: str, *arguments: str, **environment: str) -> dict:
    """What a fresh process prints last, as JSON."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", **environment}
    done = subprocess.run([sys.executable, "-c", code, *arguments], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_cpu_with_avx2_alone_multiplies_bf16_matrices_about_as_fast_as_fp32_ones(policy):
    """By processor time: through fp32, 1.2 times as long as fp32 ones; torch's own kernels take 10 to 60 times as long there."""
    found = run(RATES, str(policy.path), **AVX2)
    assert not found["units"] and found["ratio"] < 4


def test_what_we_read_of_the_processor_is_what_torch_asks(monkeypatch):
    for name in ONEDNN_LIMITS:
        monkeypatch.delenv(name, raising=False)
    capable = torch.cpu.get_capabilities()
    intel = "GenuineIntel" in Path("/proc/cpuinfo").read_text()  # whose AVX-512 BF16 is slower than fp32
    assert has_bf16_units() == any(capable.get(name) for name in ("amx_bf16", "bf16", *([] if intel else ["avx512_bf16"])))


@pytest.mark.proves("numerics.bf16_products")
def test_the_profile_decides_how_a_model_multiplies_or_else_the_processor(policy, monkeypatch):
    for way, replaced in (("fp32", True), ("units", False)):
        load_policy(policy, Numerics(bf16_products=way))
        assert ("products.py" in torch._C._dispatch_dump("aten::mm")) == replaced
    with monkeypatch.context() as limited:
        limited.setattr(machine, "instruction_sets", lambda *_: ("avx2", "avx512_bf16"))
        limited.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
        load_policy(policy, Numerics())
        assert "products.py" in torch._C._dispatch_dump("aten::mm")
    assert settled(Numerics()).bf16_products == ("units" if has_bf16_units() else "fp32")
    assert settled(Numerics(device="cuda", bf16_products="fp32")).bf16_products == "units"  # a GPU has some


def test_a_step_taken_either_way_is_as_near_to_fp32(policy):
    documents = [document(range(5, 15), range(20 + number, 44 + number)) for number in range(6)]
    found = {}
    for way, dtype in (("fp32", "bf16"), ("units", "bf16"), ("units", "fp32")):
        trainer = trainer_of(policy, {"bf16_products": way}, dtype=dtype)
        logps, _ = trainer.module(collate([(one,) for one in documents], trainer.numerics, 0))
        trainer.backward(-logps.sum() / len(logps))
        found[way, dtype] = logps.detach(), float(trainer.step().grad_norm)
        trainer.close()
    truth, norm = found["units", "fp32"]
    off = {way: float((found[way, "bf16"][0] - truth).abs().mean()) for way in ("fp32", "units")}
    assert off["fp32"] <= 1.5 * off["units"] and off["fp32"] < 0.02
    assert found["fp32", "bf16"][1] == pytest.approx(found["units", "bf16"][1], rel=0.01) == pytest.approx(norm, rel=0.02)


ENGINE = """
import json, sys
from pathlib import Path
import torch
from pedigree.configs.language.execution import Numerics, Placement
from pedigree.configs.methods.training import Sampling
from pedigree.stages.sampling.engines import open_sampler
from pedigree.stages.sampling.sampler import Request

with open_sampler(
    Path(sys.argv[1]), dtype="bf16", context=64, numerics=Numerics(threads=1, bf16_products="fp32"),
    placement=Placement(sampler_memory_gb=0.05), inline=True,
) as sampler:
    (answer,) = sampler.generate([Request(list(range(5, 21)), 0)], Sampling(temperature=1.0, max_tokens=16), [])
    config = sampler._engine.vllm_config
    print(json.dumps({"dtype": str(config.model_config.dtype), "blocks": config.cache_config.num_gpu_blocks,
                      "block": config.cache_config.block_size, "ids": answer.response_ids, "logps": answer.logprobs}))
"""


@pytest.mark.nightly
def test_vllm_computes_in_fp32_with_the_bf16_weights_and_has_room_for_as_many_tokens(tmp_path, policy):
    numerics = Numerics(threads=1)
    model = load_policy(policy, numerics)
    frozen(model, torch.device("cpu"), torch.bfloat16).model.save_pretrained(tmp_path / "model")
    exact = frozen(model, torch.device("cpu"), torch.float32)  # bf16 values in fp32, as vLLM has them
    found = run(ENGINE, str(tmp_path / "model"))
    assert found["dtype"] == "torch.float32"
    with torch.no_grad():
        logps, _ = exact(collate([(document(range(5, 21), found["ids"]),)], numerics, 0))
    assert (logps - torch.tensor(found["logps"])).abs().max() < 1e-4
    width = 2 * 2 * 2 * 32 * 2  # keys and values, layers, key heads, their width, bytes of bf16
    assert found["blocks"] == pytest.approx(0.05 * 2**30 / (width * found["block"]), rel=0.1)
