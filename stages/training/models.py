"""Load a payload as a transformers model for training, for scoring, or as a frozen reference."""

from pathlib import Path
from typing import Any

import torch

from pedigree.configs.base.frozen import HeadPrecision
from pedigree.configs.language.execution import Numerics
from pedigree.configs.methods.training import NO_SCORES, Lora
from pedigree.data.artifacts.artifacts import Artifact
from pedigree.data.host.machine import settled
from pedigree.stages.job.failures import StageError
from pedigree.stages.training import attention
from pedigree.stages.training.adapters import add_adapters
from pedigree.stages.training.kernels import Module, fuse, refuse
from pedigree.stages.training.logprobs import PolicyModule, RewardModule, ValueModule
from pedigree.stages.training.products import through_fp32
from pedigree.stages.training.sequence_parallel import refuse_undivided
from pedigree.stages.training.stored_dtypes import is_stored_in_bf16


def load_policy(
    artifact: Artifact, numerics: Numerics, lora: Lora | None = None, seed: int = 0, head: HeadPrecision = "model"
) -> PolicyModule:
    """Load a policy, ready for a `Trainer`; with adapters, only those are trained."""
    from transformers import AutoModelForCausalLM

    model = _load(AutoModelForCausalLM, artifact.payload, numerics)
    if lora is not None:
        add_adapters(model, lora, seed)
    return fuse(PolicyModule(model, numerics.logprob_chunk, head), numerics)


def load_reward_model(payload: Path, numerics: Numerics, lora: Lora | None = None, seed: int = 0, **changes: Any) -> RewardModule:
    """Load a sequence classifier with one label; from a policy's payload, its head is new and must be initialized.

    As a regression, vLLM and pipelines of transformers give its score; of any other classifier with one label they give σ(score).

    With adapters, those and the head are trained.
    """
    from transformers import AutoModelForSequenceClassification

    named = {"id2label": {0: "reward"}, "label2id": {"reward": 0}, "problem_type": "regression"}
    model = _load(AutoModelForSequenceClassification, payload, numerics, **named, **changes)
    if lora is not None:
        add_adapters(model, lora, seed)
        model.score.requires_grad_(True)
    return fuse(RewardModule(model), numerics)


def load_value_model(start: Artifact, numerics: Numerics, pad_id: int) -> ValueModule:
    """Load PPO's value model: from a reward model with its head, or from a policy with a zero-initialized head, so that values start at
    0."""
    from transformers import AutoModelForSequenceClassification

    model = _load(AutoModelForSequenceClassification, start.payload, numerics, num_labels=1, pad_token_id=pad_id)
    if start.record.type == "policy":
        torch.nn.init.zeros_(model.score.weight)
    return fuse(ValueModule(model), numerics)


def refuse_without_scores(payload: Path) -> None:
    """Refuse to make a model that scores of a policy that has none in transformers.

    Raises:
        StageError: it has no sequence classifier for such models.
    """
    from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, AutoConfig

    config = AutoConfig.from_pretrained(payload, local_files_only=True, trust_remote_code=False)
    if type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        raise StageError(NO_SCORES.format(config.model_type))


def _load(auto: Any, payload: Path, numerics: Numerics, **changes: Any) -> Any:
    refuse(payload, numerics)
    if numerics.sequence_parallel > 1:
        refuse_undivided(payload, numerics.sequence_parallel)
    attention.register()
    through_fp32(settled(numerics).bf16_products == "fp32")
    kernel = numerics.attention if numerics.packing or numerics.attention != attention.NAME else "sdpa"
    given = {"attn_implementation": kernel, "local_files_only": True, "trust_remote_code": False, **changes}
    try:
        model = auto.from_pretrained(payload, dtype=torch.bfloat16 if is_stored_in_bf16(payload, auto) else torch.float32, **given)
        if any(buffer.dtype == torch.bfloat16 for buffer in model.buffers()):  # Gemma's scale of embeddings would be rounded
            model = auto.from_pretrained(payload, dtype=torch.float32, **given)
    except (ValueError, ImportError, KeyError) as error:  # the model does not support this attention
        raise StageError(
            f"transformers cannot load the model with attention {kernel} ({type(error).__name__}: {error}): set another `attention` in the "
            "execution profile; every model supports `eager` with `packing: false`"
        ) from error
    model.get_input_embeddings().padding_idx = None  # else its row has no gradient; models imported before 0.2 may pad with BOS
    return model


def frozen(module: Module, device: torch.device, dtype: torch.dtype) -> Module:
    """Prepare a module for use without gradients, with its weights in the dtype in which a `Trainer` computes.

    Buffers stay in fp32, as in a `Trainer`: rotary frequencies rounded to bf16 rotate late tokens by wrong angles (off by a radian after
    a few hundred tokens), so that reference and judge would differ from the policy and vLLM.
    """
    for parameter in module.parameters():
        parameter.requires_grad_(False)
        parameter.data = parameter.data.to(dtype)
    return module.to(device).eval()


def same_weights(first: Artifact, second: Artifact) -> bool:
    """Whether two payloads have byte-equal weights, by their records; other files may differ."""

    def weights(artifact: Artifact) -> dict[str, str]:
        return {file.path: file.sha256 for file in artifact.record.files if file.path.endswith(".safetensors")}

    return weights(first) == weights(second)
