"""`rlvr` as recipes, plans, rehearsals and reports see it."""

from configs.base.kind import Kind, gives, port
from configs.base.shrink import TOKENS, Cut, even
from configs.methods.policy_gradient import Ppo
from configs.methods.training import Rlvr, rlvr_problem

STEPS, PROMPTS, SAMPLES = 2, 4, 8
"""Prompts of a step, answers to each."""


def shrink(cut: Cut) -> None:
    config = cut.config
    assert isinstance(config, Rlvr)
    warmup = 0
    if isinstance(config.algorithm, Ppo):
        warmup = min(config.algorithm.critic.warmup_steps, 1)
        cut.most("algorithm.critic.warmup_steps", 1, "batches")
        cut.learning_rate("algorithm.critic.optimizer.learning_rate")
    cut.most("steps", STEPS + warmup, "batches")
    cut.learning_rate("optimizer.learning_rate")
    prompts = min(config.prompts_per_step, PROMPTS)
    cut.set("prompts_per_step", even(max(config.algorithm.mini_batches, prompts)), "batches")
    if config.samples_per_prompt > 1:
        cut.set("samples_per_prompt", even(min(config.samples_per_prompt, SAMPLES)), "samples")
    cut.most("sampling.max_tokens", TOKENS, "lengths")


KIND = Kind(
    name="rlvr",
    version=3,
    config=Rlvr,
    inputs={
        "policy": port("policy"),
        "prompts": port("prompt"),
        "reference": port("policy", optional=True),
        "value": port("reward_model", optional=True),
    },
    output=gives("policy"),
    engine="deepspeed+vllm",
    trains_on=frozenset({"prompts"}),
    problem=rlvr_problem,
    shrink=shrink,
    family="training",
    curve="reward",
)
