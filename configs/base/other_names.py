"""Names of settings in TRL, axolotl and open-instruct, and what they are called here; `docs/from-trl.md` shows the same table."""

BATCH = "`global_batch`, the sequences of one step on all devices (rlvr: `prompts_per_step` times `samples_per_prompt`)"
LENGTH = "`max_length` (rlvr: `max_prompt_length` and `sampling: {max_tokens: ...}`)"
MICRO = (
    "the profile's `numerics: {micro_batch_tokens: ...}`, or `micro_batch_sequences` without packing; the batch itself is `global_batch`"
)
HELD_OUT = "`holdout`, a share of the rows, and `measure_every`; for tasks with a score, a stage `kind: evaluate`"
DATASETS = "a stage `kind: prepare_data` with `sources`, which the trainer takes as an input: `in: {data: [STAGE]}`"
KL = "`loss: {type: dpo, beta: ...}` (rlvr: `algorithm: {type: grpo, kl: {coefficient: ...}}`)"
MODEL = "a stage `kind: source_model` with `source`, which the trainer takes as an input: `in: {policy: STAGE}`"
ADAPTERS = "`lora: {rank: 16, alpha: 32.0}`"
ELSEWHERE = {
    "adapter": ADAPTERS,
    "attn_implementation": "the profile's `numerics: {attention: ...}`",
    "base_model": MODEL,
    "batch_size": BATCH,
    "beta": KL,
    "bf16": "`dtype: bf16`",
    "chat_template_name": "`chat_template` of the stage `kind: source_model`",
    "cutoff_len": LENGTH,
    "dataset_mixer_list": DATASETS,
    "dataset_name": DATASETS,
    "datasets": DATASETS,
    "deepspeed": "the profile's `numerics: {zero_stage: ...}`",
    "eval_steps": HELD_OUT,
    "flash_attention": "the profile's `numerics: {attention: flash_attention_2}`",
    "gradient_accumulation_steps": "nothing: it follows from `global_batch` and the profile's micro-batches",
    "kl_coef": KL,
    "learning_rate": "`optimizer: {learning_rate: ...}`",
    "lora_alpha": "`lora: {alpha: ...}`",
    "lora_r": "`lora: {rank: ...}`",
    "lora_rank": "`lora: {rank: ...}`",
    "lora_target_modules": "`lora: {targets: ...}`",
    "loss_type": "`loss: {type: ...}` (rlvr: `algorithm: {type: ...}`)",
    "lr": "`optimizer: {learning_rate: ...}`",
    "lr_scheduler": "`optimizer: {schedule: ...}`",
    "lr_scheduler_type": "`optimizer: {schedule: ...}`",
    "max_completion_length": "`sampling: {max_tokens: ...}`",
    "max_grad_norm": "`optimizer: {max_grad_norm: ...}`",
    "max_new_tokens": "`sampling: {max_tokens: ...}`",
    "max_seq_length": LENGTH,
    "max_token_length": LENGTH,
    "micro_batch_size": MICRO,
    "model_name_or_path": MODEL,
    "num_epochs": "`epochs`",
    "num_generations": "`samples_per_prompt`",
    "num_samples_per_prompt_rollout": "`samples_per_prompt`",
    "num_train_epochs": "`epochs`",
    "num_unique_prompts_rollout": "`prompts_per_step`",
    "packing": "the profile's `numerics: {packing: ...}`",
    "peft_config": ADAPTERS,
    "per_device_eval_batch_size": HELD_OUT,
    "per_device_train_batch_size": MICRO,
    "r": "`lora: {rank: ...}`",
    "reduce_loss": "`loss_reduction`",
    "response_length": "`sampling: {max_tokens: ...}`",
    "reward_funcs": "the verifiers of the prompts, or a stage `kind: judge`",
    "sample_packing": "the profile's `numerics: {packing: ...}`",
    "sequence_len": LENGTH,
    "target_modules": "`lora: {targets: ...}`",
    "val_set_size": HELD_OUT,
    "warmup_ratio": "`optimizer: {warmup_ratio: ...}`",
    "weight_decay": "`optimizer: {weight_decay: ...}`",
}
"""Name elsewhere → what to write here. It is consulted only for keys that are unknown where they are written."""
