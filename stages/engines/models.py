"""Transformers models for training: how a payload becomes a module."""

from pathlib import Path
from typing import Any

import torch

from configs.execution import Numerics
from data.artifacts import Artifact, sha256_file
from stages.core import attention
from stages.core.logprobs import PolicyModule, RewardModule


def load_policy(artifact: Artifact, numerics: Numerics) -> PolicyModule:
    """A policy's payload, in fp32, ready for a `Trainer`."""
    from transformers import AutoModelForCausalLM

    return PolicyModule(_load(AutoModelForCausalLM, artifact.payload, numerics), numerics.logprob_chunk)


def load_reward_model(payload: Path, numerics: Numerics, **changes: Any) -> RewardModule:
    """A sequence classifier with one label; from a policy's payload, its head is new (and must be initialised)."""
    from transformers import AutoModelForSequenceClassification

    return RewardModule(_load(AutoModelForSequenceClassification, payload, numerics, num_labels=1, **changes))


def _load(auto: Any, payload: Path, numerics: Numerics, **changes: Any) -> Any:
    attention.register()
    kernel = numerics.attention if numerics.packing or numerics.attention != attention.NAME else "sdpa"
    return auto.from_pretrained(
        payload, dtype=torch.float32, attn_implementation=kernel, local_files_only=True, trust_remote_code=False, **changes
    )


def same_weights(first: Artifact, second: Artifact) -> bool:
    """Whether two payloads hold byte-equal weights (their other files may differ)."""

    def weights(artifact: Artifact) -> dict[str, str]:
        return {path.name: sha256_file(path) for path in sorted(artifact.payload.glob("*.safetensors"))}

    return weights(first) == weights(second)
