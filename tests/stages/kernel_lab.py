"""Models whose kernels are compared. `TRITON_INTERPRET=1 python kernel_lab.py CASES` prints how far liger's kernels are from torch's:
they run on a CPU then, slowly. CASES is a JSON list of [architecture, kind]; the answer is a JSON object, case → {what: largest error}.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from pedigree.configs.language.execution import Numerics
from pedigree.configs.methods.training import Lora
from pedigree.stages.core.batches import MicroBatch, collate, document
from pedigree.stages.training import attention
from pedigree.stages.training.adapters import add_adapters
from pedigree.stages.training.kernels import ACTIVATIONS, fuse
from pedigree.stages.training.logprobs import PolicyModule, RewardModule, ValueModule

TORCH = Numerics(threads=1)
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "num_labels": 1,
}
UNITS = [
    (document([5, 6, 7], [8, 9, 2]), document([5, 6, 7], [8, 2])),
    (document([11], [12, 2]), document([11], [13, 14, 2])),
]


def made(architecture: str, kind: str = "policy", dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A module of random weights: a policy, the same with adapters, a reward or a value model."""
    attention.register()
    config = AutoConfig.for_model(architecture, **{**SIZES, **changes})
    torch.manual_seed(0)
    if kind in ("reward", "value"):
        model = AutoModelForSequenceClassification.from_config(config, attn_implementation="varlen")
        module: Any = (ValueModule if kind == "value" else RewardModule)(model)
    else:
        model = AutoModelForCausalLM.from_config(config, attn_implementation="varlen")
        if kind == "adapters":
            add_adapters(model, Lora(rank=4), 0)
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    torch.nn.init.normal_(parameter, std=0.1)
        module = PolicyModule(model, 1024)
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)
    return module


def row(units: list[Any] | None = None, numerics: Numerics = TORCH) -> MicroBatch:
    return collate(units or UNITS, numerics, 0)


def outputs(module: Any, batch: MicroBatch) -> torch.Tensor:
    """Log-probs and entropies, or scores."""
    if isinstance(module, PolicyModule):
        return torch.cat(module(batch, temperature=0.7, entropy=True))
    return module(batch)


def gradients(module: Any, batch: MicroBatch) -> torch.Tensor:
    """Of a loss that weighs each output differently."""
    module.zero_grad()
    found = outputs(module, batch)
    (found * torch.linspace(-1, 2, len(found))).sum().backward()
    return torch.cat([p.grad.float().flatten() for p in module.parameters() if p.grad is not None])


def apart(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def compared(plain: Any, fused: Any, batch: MicroBatch) -> dict[str, float]:
    with torch.no_grad():
        values = apart(outputs(fused, batch), outputs(plain, batch))
    return {"values": values, "gradients": apart(gradients(fused, batch), gradients(plain, batch))}


def teach_the_interpreter() -> None:
    """What the compiler does: floats arrive as tensors, and there is a library of functions."""
    import numpy
    from liger_kernel.ops import geglu, rms_norm
    from triton import language
    from triton.runtime import interpreter

    plain = interpreter._implicit_cvt

    def converted(given: Any) -> Any:
        if not isinstance(given, float):
            return plain(given)
        handle = interpreter.TensorHandle(numpy.array([given], dtype=numpy.float32), language.float32)
        return language.tensor(handle, language.float32)

    interpreter._implicit_cvt = converted
    rms_norm.rsqrt = lambda x: language.rsqrt(x)
    geglu.tanh = lambda x: 2 * language.sigmoid(2 * x) - 1


ALL_CASES = [*((architecture, "policy") for architecture in ACTIVATIONS), *(("llama", kind) for kind in ("adapters", "reward", "value"))]
SOME_CASES = [("gemma", "policy"), ("phi3", "policy")]
"""Both activations, and weights of several projections in one."""


def main(cases: list[tuple[str, str]]) -> dict[str, dict[str, float]]:
    numerics = Numerics().model_copy(update={"kernels": "liger"})  # which no recipe can ask for on a CPU
    found = {}
    for architecture, kind in cases:
        plain, fused = made(architecture, kind), made(architecture, kind)
        outputs(plain, row())  # torch may round otherwise in the first pass of a process
        before = outputs(plain, row())
        fuse(fused, numerics)
        names = [part._get_name() for part in fused.modules()]
        counts = {"norms": sum("RMSNorm" in name and "Liger" in name for name in names), "mlps": sum("GLU" in name for name in names)}
        rotated = sum(("forward" in vars(part) and hasattr(part, "q_proj")) or hasattr(part, "qkv_proj") for part in fused.modules())
        again = made(architecture, kind)
        untouched = torch.equal(before, outputs(plain, row())) and torch.equal(before, outputs(again, row()))
        found[f"{architecture} {kind}"] = {**compared(plain, fused, row()), **counts, "rotated": rotated, "untouched": untouched}
    return found


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    torch.set_num_threads(1)
    teach_the_interpreter()
    print(json.dumps(main(json.loads(sys.argv[1]))))
