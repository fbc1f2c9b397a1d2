"""Mixtures of experts of random weights, and the gradient of a step of one with its router loss."""

import json
import shutil
from pathlib import Path
from typing import Any

import models
import torch
from torch import Tensor

from pedigree.configs.language.execution import Numerics
from pedigree.configs.methods.optimizer import Optimizer
from pedigree.configs.methods.training import Lora
from pedigree.data.artifacts.artifacts import Artifact
from pedigree.stages.core.batches import Unit, document
from pedigree.stages.training.feed import GlobalBatch
from pedigree.stages.training.models import load_policy
from pedigree.stages.training.router_loss import RouterLoss, routers_of
from pedigree.stages.training.trainer import Trainer

COEFFICIENT = 0.5
SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "num_experts_per_tok": 2, "max_position_embeddings": 128, "router_aux_loss_coef": COEFFICIENT, "tie_word_embeddings": False,
}  # fmt: skip
MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 24, "mlp_only_layers": [0]},
    "qwen2_moe": {"num_experts": 4, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24},
    "olmoe": {"num_experts": 4},
    "granitemoe": {"num_local_experts": 4, "logits_scaling": 2.0},
    "phimoe": {"num_local_experts": 4},
    "qwen3_next": {
        "num_experts": 4, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24, "linear_num_value_heads": 4,
        "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention", "full_attention"],
    },
    "gpt_oss": {"num_local_experts": 4, "layer_types": ["full_attention"] * 3},
    "deepseek_v3": {
        "n_routed_experts": 4, "n_shared_experts": 1, "moe_intermediate_size": 24, "first_k_dense_replace": 1, "n_group": 1,
        "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16,
        "num_key_value_heads": 4, "router_aux_loss_coef": None,
    },
}  # fmt: skip


def mixture(folder: Path, name: str, tokenizer: Artifact) -> Artifact:
    """A mixture of random weights with unbalanced routers."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    payload = folder / "payload"
    shutil.copytree(tokenizer.payload, payload, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    base = json.loads((tokenizer.payload / "config.json").read_text())
    kept = {field: base[field] for field in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")}
    fields = {field: value for field, value in (SIZES | MIXTURES[name] | kept).items() if value is not None}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[name](**fields), dtype=torch.float32)
        for weight in (weight for weight in model.parameters() if weight.dim() > 1):  # new weights are nearly uniform over tokens
            weight.data.normal_(std=0.3)
    model.save_pretrained(payload)
    return models.publish(folder, "source_model", "policy")


def units() -> list[Unit]:
    """Answers to four prompts, of unequal number and length; the prompts are long, so that it matters how often they count."""
    draw = torch.Generator().manual_seed(9)

    def ids(length: int) -> list[int]:
        return torch.randint(3, 250, (length,), generator=draw).tolist()

    made = []
    for prompt, answers in ((17, (4, 9, 2)), (3, (6,)), (11, (5, 5)), (6, (12, 1))):
        start = ids(prompt)
        made.append(tuple(document(start, ids(length)) for length in answers))
    return made


def trained(policy: Artifact, numerics: Numerics, *, lora: bool = False, coefficient: float | None = None) -> dict[str, Any]:
    """The gradient of one step of SFT and what the step counts: `gradient` of each weight, `passes` of the model, `ROUTER_METRICS`."""
    from deepspeed.utils import safe_get_full_optimizer_state

    optimizer = Optimizer(learning_rate=1e-3, schedule="constant", max_grad_norm=None)
    module = load_policy(policy, numerics, Lora(rank=4) if lora else None)
    trainer = Trainer(module, optimizer=optimizer, total_steps=1, dtype="fp32", numerics=numerics, seed=0)
    router_loss = RouterLoss(trainer, routers_of(policy.payload, coefficient))
    batch, passes, loss = GlobalBatch(units()), {"all": 0, "gradient": 0}, 0.0
    count = sum(doc.num_trained for unit in batch.units for doc in unit)

    def note(*_: Any) -> None:
        passes["all"] += 1
        passes["gradient"] += torch.is_grad_enabled()

    module.register_forward_pre_hook(note)
    with trainer.feed([batch], 0) as feed:
        for micro_batch in router_loss.over(feed.micro_batches()):
            part = -trainer.module(micro_batch.batch)[0].sum() / count
            loss += part.item() * micro_batch.weight
            router_loss.backward(part, micro_batch)
    trainer.step()
    routed = router_loss.metrics()
    found = trainer.totals({"loss": loss}, routed)
    named = [(name, weight) for name, weight in module.model.named_parameters() if weight.requires_grad]
    moments: dict[str, Any] = {name: safe_get_full_optimizer_state(weight, "exp_avg") for name, weight in named}
    gradient = {name: moment.clone() / (1 - optimizer.beta1) for name, moment in moments.items()}
    trainer.close()
    return {**found, "passes": passes, "gradient": gradient}


def sketch(gradient: dict[str, Tensor]) -> dict[str, list[float]]:
    """The norm of each gradient and its products with two fixed vectors: differ unless gradients are equal."""
    found = {}
    for name, value in gradient.items():
        draw = torch.Generator().manual_seed(1)
        products = [(value * torch.randn(value.shape, generator=draw)).sum().item() for _ in range(2)]
        found[name] = [value.norm().item(), *products]
    return found
