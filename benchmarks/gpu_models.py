"""Shared by the checks of `gpu_check.py`: how they end, where they run, and Llama-shaped models with generated weights."""

from dataclasses import dataclass
from pathlib import Path

import torch

from pedigree.stages.training import attention
from pedigree.stages.training.logprobs import PolicyModule


class Skip(Exception):
    """The check does not apply here; the message says why."""


class Failed(Exception):
    """The check failed."""


@dataclass(frozen=True)
class Shape:
    """Shape of a Llama."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocabulary: int
    head_dim: int
    tied: bool = False


SHAPES = (
    Shape("0.5B", 28, 1024, 16, 8, 4096, 49152, 64, tied=True),
    Shape("1.5B", 28, 1536, 12, 2, 8960, 151936, 128, tied=True),
    Shape("4B", 36, 2560, 32, 8, 9728, 151936, 128, tied=True),
    Shape("8B", 32, 4096, 32, 8, 14336, 128256, 128),
)
"""Shapes of SmolLM2 widened, Qwen2.5, Qwen3 and Llama 3.1."""
TINY = Shape("tiny", 2, 64, 4, 2, 128, 320, 16, tied=True)
SERVABLE = Shape("tiny", 2, 128, 4, 2, 128, 320, 32, tied=True)
"""Its heads have a size that vLLM's attention supports on a CPU."""


@dataclass(frozen=True)
class Setting:
    """Where checks run, and how large their models are."""

    device: torch.device
    peak_tflops: float | None
    folder: Path

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def shape(self) -> Shape:
        """The model for checks of correctness."""
        return SHAPES[0] if self.on_gpu else TINY

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()


def made_policy(shape: Shape, device: torch.device, dtype: torch.dtype, kernel: str, chunk: int = 1024) -> PolicyModule:
    """A policy with generated weights, the same for every dtype and kernel."""
    from transformers import LlamaConfig, LlamaForCausalLM

    attention.register()
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=32768,
        tie_word_embeddings=shape.tied,
        attn_implementation=kernel,
    )
    torch.manual_seed(0)
    with device:
        model = LlamaForCausalLM(config)
    for parameter in model.parameters():  # fp32 beside bf16 must compute with the same numbers; buffers stay in fp32
        parameter.data = parameter.data.to(torch.bfloat16).to(dtype)
    return PolicyModule(model, chunk)


def made_ids(length: int, seed: int, vocabulary: int) -> list[int]:
    return torch.randint(3, vocabulary, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
