"""Settings of TRL, axolotl, open-instruct, LLaMA-Factory, NeMo-RL, OpenRLHF, slime and verl, and their names here; `docs/from-trl.md` shows
the table."""

_NAMES = {
    "active_sampling dynamic_filtering filter_groups use_dynamic_sampling": "`algorithm: {resampling: {max_batches: ...}}`",
    "actor_learning_rate learning_rate lr": "`optimizer: {learning_rate: ...}`",
    "actor_rollout_ref": "the fields of a stage `kind: rlvr`: `algorithm`, `optimizer`, `sampling` and others",
    "adam_beta1": "`optimizer: {beta1: ...}`",
    "adam_beta2": "`optimizer: {beta2: ...}`",
    "adam_epsilon": "`optimizer: {epsilon: ...}`",
    "adapter finetuning_type peft_config use_peft": "`lora: {rank: 16, alpha: 32.0}`",
    "assistant_only_loss": "`train_on: assistant`, the default",
    "attention_dropout disable_dropout lora_dropout": "nothing: dropout is off",
    "attn_implementation": "the profile's `numerics: {attention: ...}`",
    "base_model model_name_or_path pretrain": (
        "a stage `kind: source_model` with `source`, which the trainer takes as an input: `in: {policy: STAGE}`"
    ),
    "batch_size train_batch_size": (
        "`global_batch`, the sequences of one step on all devices (rlvr: `prompts_per_step` times `samples_per_prompt`)"
    ),
    "beta init_kl_coef kl_coef kl_loss_coef pref_beta": (
        "`loss: {type: dpo, beta: ...}` (rlvr: `algorithm: {type: grpo, kl: {coefficient: ...}}`)"
    ),
    "bf16": "`dtype: bf16`",
    "bnb_4bit_quant_type load_in_4bit load_in_8bit quantization_bit quantization_config": (
        "nothing: adapters are trained on the exact weights"
    ),
    "chat_template chat_template_name chat_template_path template": (
        "a stage `kind: source_model` with `chat_template`, which the trainer takes as an input: `in: {policy: STAGE}`"
    ),
    "clip_ratio clip_ratio_high clip_ratio_low epsilon epsilon_high": "`algorithm: {clip_low: ..., clip_high: ...}`",
    "completion_only_loss": "`train_on: last_turn`",
    "custom_reward_function remote_rm_url reward_funcs reward_weights": (
        "`reward: {terms: [{type: program, path: ..., function: ..., weight: ...}]}`, or the verifiers of the prompts"
    ),
    "cutoff_len max_len max_seq_length max_token_length sequence_len": (
        "`max_length` (rlvr: `max_prompt_length` and `sampling: {max_tokens: ...}`)"
    ),
    "dataset dataset_mixer_list dataset_name datasets train_dataset": (
        "a stage `kind: prepare_data` with `sources`, which the trainer takes as an input: `in: {data: [STAGE]}`"
    ),
    "dataset_text_field": "a stage `kind: prepare_data` whose source has `columns`",
    "deepspeed zero_stage": "the profile's `numerics: {zero_stage: ...}`",
    "early_stopping_patience load_best_model_at_end metric_for_best_model": (
        "a stage `kind: select`, which takes the best of several models by its scores"
    ),
    "entropy_coef entropy_coeff": "`algorithm: {entropy: {coefficient: ...}}`",
    "eval_dataset eval_on_start eval_steps eval_strategy evaluation_strategy per_device_eval_batch_size val_set_size": (
        "`holdout`, a share of the rows, and `measure_every`; for tasks with a score, a stage `kind: evaluate`"
    ),
    "flash_attention": "the profile's `numerics: {attention: varlen}`",
    "fp16": "`dtype: bf16` or `dtype: fp32`",
    "gen_batch_size over_sampling_batch_size": "`algorithm: {resampling: {batch_multiplier: ...}}`, a factor of `prompts_per_step`",
    "generate_max_len max_completion_length max_new_tokens response_length": "`sampling: {max_tokens: ...}`",
    "gradient_accumulation_steps": "nothing: it follows from `global_batch` and the profile's micro-batches",
    "gradient_checkpointing": "the profile's `numerics: {gradient_checkpointing: ...}`",
    "gradient_clipping max_grad_norm": "`optimizer: {max_grad_norm: ...}`",
    "hub_model_id push_to_hub": "nothing: `pedigree export` writes the folder that docs/hub.md uploads",
    "logging_steps": "nothing: every step is logged",
    "load_balancing_loss load_balancing_weight moe_aux_loss_coef": (
        "`router_aux_loss_coef`; the coefficient of the model's config applies by default"
    ),
    "lora_alpha": "`lora: {alpha: ...}`",
    "lora_r lora_rank r": "`lora: {rank: ...}`",
    "lora_target lora_target_modules target_modules": "`lora: {targets: ...}`",
    "lora_target_linear": "`lora: {targets: all-linear}`",
    "loss_type": "`loss: {type: ...}` (rlvr: `algorithm: {type: ...}`)",
    "lr_scheduler lr_scheduler_type": "`optimizer: {schedule: ...}`",
    "mask_truncated_completions": "`algorithm: {mask_truncated: true}`",
    "max_prompt_token_length prompt_max_len": "`max_prompt_length`",
    "micro_batch_size micro_train_batch_size per_device_train_batch_size": (
        "the profile's `numerics: {micro_batch_tokens: ...}`, or `micro_batch_sequences` without packing; "
        "the batch itself is `global_batch`"
    ),
    "n_samples_per_prompt num_generations num_samples_per_prompt_rollout": "`samples_per_prompt`",
    "neftune_noise_alpha noisy_embedding_alpha": "nothing: no forward pass adds noise",
    "num_epochs num_train_epochs": "`epochs`",
    "num_iterations": "`algorithm: {inner_epochs: ...}`",
    "num_unique_prompts_rollout rollout_batch_size": "`prompts_per_step`",
    "optim": "`optimizer`, which is AdamW",
    "output_dir": "nothing: results are in artifacts/RECIPE/STAGE, and `pedigree export` copies a model",
    "overlong_buffer": "`reward: {terms: [{type: overlong, buffer: ...}]}`",
    "packing sample_packing": "the profile's `numerics: {packing: ...}`",
    "ppo_mini_batch_size": "`algorithm: {updates_per_rollout: ...}`, the updates from one rollout",
    "pref_loss": "`loss: {type: ...}`",
    "reduce_loss": "`loss_reduction`",
    "report_to run_name wandb_project": "nothing: every run writes its curves and a report",
    "resume_from_checkpoint": "nothing: the same command resumes from the last checkpoint",
    "save_steps save_strategy": "the profile's `placement: {checkpoint_every_steps: ...}`",
    "temperature": "`sampling: {temperature: ...}`",
    "top_p": "`sampling: {top_p: ...}`",
    "total_episodes": "`steps`, each of `prompts_per_step` times `samples_per_prompt`",
    "use_dora": "nothing: vLLM serves no DoRA adapters",
    "use_vllm": "nothing: vLLM draws all samples",
    "warmup_ratio": "`optimizer: {warmup_ratio: ...}`",
    "warmup_steps": "`optimizer: {warmup_steps: ...}`",
    "weight_decay": "`optimizer: {weight_decay: ...}`",
}
ELSEWHERE = {name: here for names, here in _NAMES.items() for name in names.split()}
"""Name elsewhere → what to write here. It is consulted only for keys that are unknown where they are written."""
