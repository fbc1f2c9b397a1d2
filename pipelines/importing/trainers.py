"""The keys of other trainers: our names for them, conversions, and defaults where ours differ.

Sources: the argument classes of TRL 1.16 and transformers; axolotl's schemas; LLaMA-Factory's `hparams`; the scripts of open-instruct
(`finetune.py`, `dpo_tune_cache.py`, `reward_modeling.py`, `grpo_fast.py`).
"""

import re
from collections.abc import Mapping
from typing import Any

from pedigree.configs.rows.source_models import OWN, shipped_templates
from pedigree.pipelines.importing.description import Convert, Unfit, count, listed, number, on

LEFT_OUT = re.compile("|".join((
    "attention$", "attn_implementation", "average_tokens", "bf16", "cache_", "checkpoint", "dataloader", "dataset_cache", "dataset_eval",
    "dataset_local_cache", "dataset_mix_dir", "dataset_mixer_eval", "dataset_num_proc", "dataset_prepared", "dataset_skip",
    "dataset_test_split", "ddp_", "debug", "deepspeed", "disable_dropout", "do_eval", "do_train", "ds3_", "dtype", "eval", "exp_name",
    "flash_attn", "flash_attention", "fsdp", "fused_optimizer", "gather_whole", "gradient_checkpointing", "hf_", "hub_", "keep_last_n",
    "liger_", "local_", "log_", "logging_", "lora_mlp_kernel", "lora_o_kernel", "lora_qkv_kernel", "low_cpu_mem", "mlflow_", "model_type",
    "num_evals", "num_learners", "oe_eval", "output_dir", "overwrite_", "pack_length", "pad_to",
    "padding_free", "per_device_eval", "plot_loss", "precompute_ref", "preprocessing_", "push_to_hub", "ray_", "remove_unused",
    "report_to", "resume_from", "run_name", "save_", "saves_per", "sdp_attention", "single_gpu_mode", "strict",
    "swanlab_", "tensor_parallel", "test_datasets", "tf32", "timeout", "tokenizer_type", "torch_", "trackio", "trust_remote", "try_",
    "use_fast_tokenizer", "use_flash", "use_liger", "use_reentrant", "use_slow_tokenizer", "vllm$",
    "vllm_(?!importance|top_p|structured)", "wandb_", "with_tracking", "xformers",
)))  # fmt: skip
"""Beginnings of keys that concern how and where it runs and how it is measured, not the model that results."""


def choice(**names: Any) -> Convert:
    """A conversion of names."""

    def chosen(name: Any) -> Any:
        if (known := str(name).lower()) in names:
            return names[known]
        raise Unfit(f"not available here; available are {', '.join(names)}")

    return chosen


def wanted(value: Any) -> bool | None:
    return on(value) or None


def schedule(name: Any) -> str:
    if name in ("linear", "cosine", "constant", "constant_with_warmup"):
        return name
    near = "cosine" if str(name).startswith("cosine") else "linear"
    raise Unfit(f"not available here; {near} decays to zero", near)


def clipping(norm: Any) -> float:
    if number(norm) > 0:
        return number(norm)
    raise Unfit("no clipping would be `max_grad_norm: null`; DeepSpeed's own config may clip")


def adamw(name: Any) -> None:
    if "adamw" not in str(name) or "bit" in str(name).replace("32bit", ""):
        raise Unfit("the optimizer is AdamW with fp32 states here")


def epochs(passes: Any) -> int:
    if number(passes) != int(number(passes)):
        raise Unfit("epochs are whole numbers here; `max_steps` ends within one", max(1, round(number(passes))))
    return count(passes)


def limit(steps: Any) -> int | None:
    """-1 and 0 mean no limit there."""
    return count(steps) if number(steps) > 0 else None


def template(name: Any) -> str | None:
    """The template of ours that has this name; None for the model's own."""
    if name == "tokenizer_default":
        return None
    if name in shipped_templates():
        return name
    raise Unfit("no template of that name here, so the model's own (docs/chat-templates.md)", OWN)


def template_of_llama_factory(name: Any) -> str | None:
    if name in ("mistral", "qwen", "zephyr"):
        raise Unfit("another template has this name here, so the model's own (docs/chat-templates.md)", OWN)
    return template(name)


def held_out(size: Any) -> float | None:
    if number(size) >= 1:
        raise Unfit("a number of rows; `holdout` is a share of them")
    return number(size) or None


def unchanged(value: Any) -> None:
    if number(value) != 1:
        raise Unfit("rollouts must follow the distribution that is trained, so it is 1 here")


LOSSES = choice(sigmoid="dpo", dpo="dpo", sigmoid_norm="dpo_norm", dpo_norm="dpo_norm", robust="robust", hinge="hinge", ipo="ipo_mean",
                apo_zero="apo_zero", apo_down="apo_down", sppo_hard="sppo_hard", simpo="simpo", orpo="orpo", kto="kto")  # fmt: skip


def loss(names: Any) -> str:
    """A preference loss; TRL adds several."""
    first, *others = listed(names) or [""]
    if others and (LOSSES(first), others) != ("dpo", ["sft"]):
        raise Unfit("no such sum of losses here", LOSSES(first))
    return "rpo" if others else LOSSES(first)


Names = Mapping[str, tuple[str, Convert | None]]
FIELDS: Names = {
    "model.name": ("model_name_or_path base_model", None),
    "model.revision": ("model_revision revision_of_model", None),
    "model.template": ("chat_template chat_template_path chat_template_name", template),
    "model.add_bos": ("add_bos", wanted),
    "batch.device": ("per_device_train_batch_size micro_batch_size", count),
    "batch.accumulation": ("gradient_accumulation_steps", count),
    "epochs": ("num_train_epochs num_epochs", epochs),
    "max_steps": ("max_steps max_train_steps", limit),
    "max_length": ("max_length max_seq_length max_token_length cutoff_len sequence_len", count),
    "max_prompt_length": ("max_prompt_length max_prompt_token_length", count),
    "too_long": ("excess_length_strategy", choice(drop="drop", truncate="truncate")),
    "seed": ("seed", lambda seed: int(number(seed))),
    "optimizer.learning_rate": ("learning_rate", number),
    "optimizer.schedule": ("lr_scheduler_type lr_scheduler", schedule),
    "optimizer.warmup_ratio": ("warmup_ratio", number),
    "optimizer.warmup_steps": ("warmup_steps warm_up_steps", number),
    "optimizer.weight_decay": ("weight_decay", number),
    "optimizer.decayed": ("set_weight_decay_on_bias_and_norm", choice(true="matrices", false="all")),
    "optimizer.beta1": ("adam_beta1", number),
    "optimizer.beta2": ("adam_beta2", number),
    "optimizer.epsilon": ("adam_epsilon eps", number),
    "optimizer.max_grad_norm": ("max_grad_norm clip_grad_norm", clipping),
    "optimizer.adamw": ("optim optimizer", adamw),
    "lora": ("use_peft use_lora adapter finetuning_type", choice(true=True, lora=True, qlora=True, false=False, full=False)),
    "lora.rank": ("lora_r lora_rank", count),
    "lora.alpha": ("lora_alpha", number),
    "lora.targets": ("lora_target_modules lora_target", listed),
    "lora.linear": ("lora_target_linear", wanted),
    "lora.rslora": ("use_rslora peft_use_rslora", wanted),
    "router_aux_loss_coef": ("router_aux_loss_coef moe_aux_loss_coef", number),
    "holdout": ("val_set_size val_size test_split_size", held_out),
    "measure_every": ("eval_steps", limit),
    "assistant_only": ("assistant_only_loss", wanted),
    "last_turn_only": ("completion_only_loss mask_history", wanted),
    "every_token": ("train_on_inputs train_on_prompt", wanted),
    "packed": ("packing sample_packing neat_packing", wanted),
    "loss_reduction": ("reduce_loss", choice(mean="mean", sum="sum")),
    "loss": ("loss_type pref_loss dpo_loss_type", loss),
    "beta": ("beta pref_beta rl_beta dpo_beta orpo_alpha", number),
    "smoothing": ("label_smoothing dpo_label_smoothing", number),
    "likelihood": ("pref_ftx", number),
    "gamma": ("simpo_gamma", number),
    "gamma_ratio": ("dpo_gamma_beta_ratio", number),
    "desirable_weight": ("desirable_weight kto_desirable_weight kto_chosen_weight", number),
    "undesirable_weight": ("undesirable_weight kto_undesirable_weight kto_rejected_weight", number),
    "centering": ("center_rewards_coefficient", number),
}
"""Our name → keys of the trainers, and conversion of their values."""
OF_LLAMA_FACTORY: Names = {"model.template": ("template", template_of_llama_factory)}
"""The key that only LLaMA-Factory has; its ChatML, Gemma and Llama 3 are ours."""
OF_GRPO: Names = {
    "samples_per_prompt": ("num_generations num_samples_per_prompt_rollout", count),
    "prompts_per_step": ("num_unique_prompts_rollout", count),
    "no_resampling_pass_rate": ("no_resampling_pass_rate", number),
    "episodes": ("total_episodes", count),
    "sampling.max_tokens": ("max_completion_length response_length", count),
    "sampling.temperature": ("temperature", number),
    "top_p": ("top_p vllm_top_p", unchanged),
    "kl": ("beta", number),
    "kl_estimator": ("kl_estimator", choice(kl1="k1", kl2="k2", kl3="k3", **{"0": "k1", "1": "k2", "2": "k3"})),
    "unbiased": ("use_bias_correction_kl", on),
    "algorithm.type": (
        "loss_type advantage_normalization_type",
        choice(dapo="dapo", grpo="grpo", dr_grpo="dr_grpo", cispo="cispo", standard="grpo", centered="dr_grpo"),
    ),
    "ratio": ("importance_sampling_level", choice(token=None, sequence="gspo")),
    "algorithm.clip_low": ("epsilon clip_lower", number),
    "algorithm.clip_high": ("epsilon_high clip_higher", number),
    "algorithm.dual_clip": ("delta", number),
    "algorithm.resampling": ("active_sampling", lambda value: {} if on(value) else None),
    "algorithm.updates_per_rollout": ("num_mini_batches", count),
    "algorithm.mask_truncated": ("mask_truncated_completions", wanted),
    "scale": ("scale_rewards", lambda value: str(value).lower()),
    "corrected": ("use_vllm", on),
    "correction": ("vllm_importance_sampling_correction", on),
    "rewards": ("reward_funcs", listed),
    "reward_weights": ("reward_weights", lambda weights: [float(number(one)) for one in listed(weights)]),
    "reward.right": ("verification_reward", number),
    "reward.truncated": ("non_stop_penalty_value", number),
    "penalty": ("non_stop_penalty", wanted),
    "verified": ("apply_verifiable_reward", choice(true=None)),
}
"""The same for GRPO, whose keys have another meaning than those of the same name in `FIELDS`."""


def names_of(trainer: str, method: str) -> dict[str, tuple[str, Convert | None]]:
    """Key → our name, and conversion."""
    inner = "num_epochs" if trainer == "open-instruct" else "num_iterations"
    tables: list[Names] = [FIELDS, OF_LLAMA_FACTORY]
    tables += [{**OF_GRPO, "algorithm.inner_epochs": (inner, count)}] if method == "grpo" else []
    return {key: (name, convert) for table in tables for name, (keys, convert) in table.items() for key in keys.split()}


EVERY: Mapping[str, Mapping[str, Any]] = {
    "TRL": {"batch.device": 8, "epochs": 3, "lora.rank": 16, "lora.alpha": 32, "lora.targets": ["q_proj", "v_proj"]},
    "LLaMA-Factory": {"batch.device": 8, "epochs": 3, "optimizer.learning_rate": 5e-5, "lora": True, "lora.rank": 8, "max_length": 2048,
                      "too_long": "truncate"},
    "axolotl": {"batch.device": 1, "max_length": 512, "optimizer.schedule": "cosine", "optimizer.warmup_ratio": 0.03},
    "open-instruct": {"batch.device": 8, "epochs": 2, "optimizer.learning_rate": 2e-5, "lora.rank": 64, "lora.alpha": 16,
                      "model.template": "tulu"},
}  # fmt: skip
PAIRS = {"loss": "dpo", "beta": 0.1, "gamma": 0.5}
OF_TRL_PAIRS = PAIRS | {"optimizer.learning_rate": 1e-6, "max_length": 1024, "too_long": "truncate"}
ROLLOUTS = {"samples_per_prompt": 8, "sampling.max_tokens": 512, "algorithm.type": "dapo", "algorithm.clip_low": 0.2, "kl": 0.0,
            "unbiased": True}  # fmt: skip
DEFAULTS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "TRL": {
        "sft": {"optimizer.learning_rate": 2e-5, "max_length": 1024, "too_long": "truncate", "train_on": "all"},
        "dpo": OF_TRL_PAIRS, "orpo": OF_TRL_PAIRS, "kto": OF_TRL_PAIRS,
        "reward": {"optimizer.learning_rate": 1e-4, "max_length": 1024},
        "grpo": ROLLOUTS | {"optimizer.learning_rate": 1e-6},
    },
    "LLaMA-Factory": {"sft": {}, "dpo": PAIRS, "kto": PAIRS, "reward": {}},
    "axolotl": {"sft": {}, "dpo": PAIRS, "orpo": PAIRS, "kto": PAIRS, "reward": {}, "grpo": ROLLOUTS},
    "open-instruct": {
        "sft": {"max_length": 4096, "too_long": "truncate", "optimizer.warmup_ratio": 0.03},
        "dpo": PAIRS | {"max_length": 2048, "too_long": "truncate", "optimizer.warmup_ratio": 0.03, "gamma_ratio": 0.3},
        "reward": {"max_length": 512, "batch.device": 1, "batch.accumulation": 8, "epochs": 1, "optimizer.epsilon": 1e-5,
                   "optimizer.weight_decay": 0.01, "optimizer.decayed": "all"},
        "grpo": {"max_prompt_length": 256, "sampling.max_tokens": 256, "sampling.temperature": 0.7, "prompts_per_step": 16,
                 "samples_per_prompt": 4, "episodes": 100_000, "algorithm.type": "grpo", "algorithm.aggregation": "token-mean", "kl": 0.05,
                 "reward.right": 10.0, "reward.truncated": 0.0},
    },
}  # fmt: skip
"""Trainer → method that it has → our name → default where ours differs; `EVERY` has those of all methods of a trainer."""
