"""Identity of the stages that train: SFT, reward model, preference optimisation, RLVR.

Quantities are effective ones: a global batch is the number of sequences (or pairs, or prompts) per optimizer step over all
ranks. How a batch is cut into ranks and micro-batches is execution (`configs/language/execution.py`) and changes no field here.
"""

from math import ceil
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from configs.base.frozen import Arrived, Dtype, Frozen, Many
from configs.base.shrink import Cut, even
from configs.base.work import Amount, Amounts, PlannedStage, at_ports
from configs.methods.optimizer import Optimizer
from configs.methods.policy_gradient import Algorithm, Ppo
from configs.methods.preference import Kto, PreferenceLoss


class Lora(Frozen):
    """Low-rank adapters: the weights stay as they are, and a product of two thin matrices is trained beside each of them.

    The result is merged: an ordinary model, without adapters.
    """

    formula: ClassVar[str] = "W' = W + α/r · B A; with rslora α/√r"
    source: ClassVar[str] = "Hu et al. 2021, arXiv 2106.09685, §4.1; rslora: arXiv 2312.03732"

    rank: int = Field(default=16, ge=1)
    """r, the columns of B and rows of A."""
    alpha: float = Field(default=32.0, gt=0)
    """α: the product is multiplied by alpha / rank."""
    targets: Literal["all-linear"] | Many[str] = "all-linear"
    """Linear layers to adapt, by the end of their names (`[q_proj, v_proj]`), or all but the vocabulary projection and heads."""
    rslora: bool = False
    """Divides alpha by the square root of the rank instead, so that the step does not shrink with it."""

    @field_validator("targets")
    @classmethod
    def something_is_adapted(cls, value: Any) -> Any:
        if value == ():
            raise ValueError("targets is empty: name at least one layer, or leave it out for all")
        return value


TooLong = Literal["drop", "truncate"]
"""What becomes of rows that are longer than `max_length`: they are dropped, or lose their end, and with it what tells an answer's end.
Both are counted. Open-instruct, and so Tülu 3 and OLMo 2, truncate."""


class Training(Frozen):
    """What every trained model states. Weights are kept in fp32 by the optimizer whatever the compute dtype."""

    global_batch: int = Field(ge=1)
    """Sequences (SFT) or pairs (reward model, preference training) per optimizer step, over all ranks."""
    epochs: int = Field(default=1, ge=1)
    """Passes over the data. The last, incomplete batch of an epoch is trained on."""
    order: Literal["shuffled", "given"] = "shuffled"
    """Of the rows in each epoch: shuffled by (seed, epoch), or as the data has them, one input after the other."""
    max_length: int = Field(ge=8)
    """Longest sequence in tokens, prompt and answer together."""
    too_long: TooLong = "drop"
    """Rows with a longer one."""
    dtype: Dtype = "bf16"
    """Compute dtype of forward and backward."""
    optimizer: Optimizer
    lora: Lora | None = None
    """Trains adapters instead of all weights."""
    seed: int = Field(default=0, ge=0)

    @property
    def shuffled_by(self) -> int | None:
        """The seed of the order of rows; None where they stay as they are."""
        return self.seed if self.order == "shuffled" else None


TrainOn = Literal["assistant", "last_turn", "marked", "all"]


class Sft(Training):
    """Supervised fine-tuning on what the assistant says: the likelihood of every trained token of the global batch."""

    formula: ClassVar[str] = "-Σ_i Σ_t log π_θ(y_t) / Σ_i n_i over the global batch; reduction sum: / global_batch"
    source: ClassVar[str] = "the mean over tokens: usual; the sum: Lambert et al. 2024, arXiv 2411.15124 (Tülu 3), §4.3.2"

    train_on: TrainOn = "assistant"
    """Tokens with a loss: `assistant`, all its turns with their end-of-turn tokens; `last_turn`, its last one (completion only);
    `marked`, its turns with `train: true`; `all`, every token of the conversation. Rows without any are dropped and counted."""
    loss_reduction: Literal["mean", "sum"] = "mean"
    """`mean`: over all trained tokens of the global batch; `sum`: of each sequence's tokens, divided by `global_batch` (also in the last,
    incomplete batch of an epoch), so that a token weighs the same in every batch. It is open-instruct's `--reduce_loss sum`, by which Tülu
    3 was made: the sum over a micro-batch, averaged over accumulation steps and ranks, with one sequence in each micro-batch. It is
    hundreds of times the mean, and nearly always above `max_grad_norm` unless that is raised with it."""


class BradleyTerry(Frozen):
    """The better answer's score is higher by a logistic difference; p is a pair's `strength`, 1 where it has none."""

    formula: ClassVar[str] = "−p log σ(z) − (1 − p) log σ(−z) + c (s_w + s_l)², z = s_w − s_l − margin_weight · (score gap)"
    source: ClassVar[str] = (
        "Bradley & Terry 1952; margin: Touvron et al. 2023, arXiv 2307.09288, eq. 2; centering: Eisenstein et al. 2023, "
        "arXiv 2312.09244, eq. 2"
    )

    type: Literal["bradley_terry"]
    centering: float = Field(default=0.0, ge=0)
    """c, which keeps the sum of the two scores near zero; 0.01 is usual."""
    margin_weight: float = Field(default=0.0, ge=0)
    """Of the gap between the scores of the two answers, where both have one; pairs without keep margin 0."""


Lists = Literal["best_vs_worst", "adjacent", "all"]
"""Which answers of a ranked list are compared: the first with the last, each with the next, or each with each."""


class RewardModel(Training):
    """A scalar head on a policy, trained on preference pairs."""

    lists: Lists = "all"
    """Pairs of a ranked list of preferences: the best with the worst answer, each with the next, or each with each (Ouyang et al.
    2022, arXiv 2203.02155, §3.5)."""
    loss: BradleyTerry = BradleyTerry(type="bradley_terry")
    holdout: float = Field(default=0.1, ge=0, lt=0.9)
    """Share of pairs (by hash of their id) kept aside to measure accuracy."""


class PreferenceTrain(Training):
    """Preference optimisation against a fixed reference: the `reference` input, or the policy as it came.

    `global_batch` counts pairs, and single answers for KTO.
    """

    lists: Lists = "best_vs_worst"
    """Pairs of a ranked list of preferences: the best with the worst answer, each with the next, or each with each."""
    loss: PreferenceLoss

    @model_validator(mode="after")
    def an_answer_is_good_or_bad(self) -> Self:
        if isinstance(self.loss, Kto) and self.lists != "best_vs_worst":
            raise ValueError(f"lists: {self.lists} would make one answer good and bad, which kto cannot learn from: use best_vs_worst")
        return self


def reference_problem(config: PreferenceTrain, arrived: Arrived) -> str | None:
    """Why the loss cannot take its `reference`, or None."""
    for given in arrived.get("reference", {}).values():
        if config.loss.reference_free:
            return f"the loss {config.loss.type} has no reference: leave the input `reference` out"
        if not isinstance(given.config, ReferenceLogprobs):
            continue
        if isinstance(config.loss, Kto):
            return (
                "kto estimates its KL on answers after prompts that are not their own, which `reference_logprobs` has not seen: "
                "name a policy as the reference"
            )
        if given.config.dtype != config.dtype:
            return (
                f"`reference` is computed in {given.config.dtype} and the training in {config.dtype}, so that rounding would pass for "
                "preference: give both one dtype"
            )
    return None


class ReferenceLogprobs(Frozen):
    """Log-probabilities of all answers under a fixed policy, for `preference_train` to take as its `reference`."""

    max_length: int = Field(ge=8)
    """Longest sequence in tokens, prompt and answer together."""
    too_long: TooLong = "drop"
    """Longer answers; as the training says it."""
    dtype: Dtype = "bf16"
    """Compute dtype; that of the training, so that rounding is alike."""


MAX_SERVED_RANK = 512
"""Of adapters, in vLLM."""


class Sampling(Frozen):
    """How answers are drawn. Temperature 0 is greedy."""

    temperature: float = Field(default=1.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    max_tokens: int = Field(ge=1)
    """Longest answer, in tokens."""


class Reward(Frozen):
    """What an answer is worth to the policy, given its verifier's score."""

    formula: ClassVar[str] = "R = right · score; R = truncated for an answer without an end, where that is given"
    source: ClassVar[str] = "Lambert et al. 2024, arXiv 2411.15124 (Tülu 3), §6.2: right 10; open-instruct, non_stop_penalty: truncated −10"

    right: float = Field(default=1.0, gt=0)
    """Reward of a score of 1. It weighs rewards against a KL penalty, and leaves normalised advantages as they are."""
    truncated: float | None = None
    """Reward of an answer that was cut off by `max_tokens`, whatever its score; `null`: that of its score."""


class Rlvr(Frozen):
    """Reinforcement learning from verifiable rewards: rollouts, rewards and updates in one job."""

    algorithm: Algorithm
    steps: int = Field(ge=1)
    """Batches of rollouts, each drawn from the current weights; an algorithm makes one or several optimizer updates with each."""
    prompts_per_step: int = Field(ge=1)
    samples_per_prompt: int = Field(ge=1)
    """Answers to each prompt: a group."""
    sampling: Sampling
    reward: Reward = Reward()
    """What an answer earns beside what its verifier says."""
    max_prompt_length: int = Field(ge=1)
    """Longest prompt in tokens; longer prompts are dropped and counted."""
    max_logprob_gap: float = Field(default=0.1, gt=0)
    """Agreement probe after each weight load: mean |log-prob(sampler) - log-prob(trainer)| per token must not exceed this."""
    dtype: Dtype = "bf16"
    optimizer: Optimizer
    lora: Lora | None = None
    """Trains adapters of the policy instead of all its weights; the sampler gets the adapters as they are, not merged into weights whose
    dtype would round their first updates away (rank 512 at most); a value model is trained whole."""
    seed: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def rollouts_are_of_the_trained_distribution(self) -> "Rlvr":
        if self.sampling.temperature == 0:
            raise ValueError("sampling.temperature is 0: all answers to a prompt would be equal; it must be above 0, e.g. 1.0")
        if self.sampling.top_p != 1:
            raise ValueError(
                f"sampling.top_p is {self.sampling.top_p}: it must be 1, or rollouts come from another distribution than is trained"
            )
        return self

    @model_validator(mode="after")
    def adapters_fit_the_sampler(self) -> "Rlvr":
        if self.lora is not None and self.lora.rank > MAX_SERVED_RANK:
            raise ValueError(f"lora.rank is {self.lora.rank}, and vLLM serves adapters of rank {MAX_SERVED_RANK} at most: lower it")
        return self

    @model_validator(mode="after")
    def batch_is_enough(self) -> "Rlvr":
        algorithm = self.algorithm
        if algorithm.compares and self.samples_per_prompt < 2:
            raise ValueError(f"{algorithm.type} compares the answers to a prompt: samples_per_prompt must be at least 2")
        cuts = algorithm.mini_batches
        if cuts > self.prompts_per_step:
            raise ValueError(
                f"updates_per_rollout {cuts} mini-batches cannot be cut from prompts_per_step {self.prompts_per_step}: lower the first"
            )
        if isinstance(algorithm, Ppo) and algorithm.critic.warmup_steps >= self.steps:
            raise ValueError(
                f"critic.warmup_steps {algorithm.critic.warmup_steps} leaves none of {self.steps} steps to the policy: lower it"
            )
        return self


def rlvr_problem(config: Rlvr, arrived: Arrived) -> str | None:
    """Why the algorithm has no use for an input, or None."""
    algorithm = config.algorithm
    if arrived.get("reference") and algorithm.kl is None:
        return f"a reference is given, and {algorithm.type} has no kl to measure to it: set algorithm.kl, or leave the input out"
    if arrived.get("value") and not isinstance(algorithm, Ppo):
        return f"a value model is given, and {algorithm.type} has none: take algorithm ppo, or leave the input out"
    return None


REHEARSED_BATCH, REHEARSED_EPOCHS = 4, 2


def shrink_training(cut: Cut) -> None:
    """Small batches, few epochs."""
    cut.set("global_batch", even(min(cut.get("global_batch"), REHEARSED_BATCH)), "batches")
    cut.most("epochs", REHEARSED_EPOCHS, "batches")
    cut.learning_rate("optimizer.learning_rate")
    if cut.get("loss.margin_weight"):  # relaxed pairs have no scores where nothing verifies them
        cut.set("loss.margin_weight", 0.0, "thresholds")


def training_work(stage: PlannedStage, port: str, *, answers: int, share: float = 1, examples: int = 1) -> Amounts:
    """The work of training on the rows at a port.

    Args:
        stage: that trains.
        port: of its rows.
        answers: of a row, each with up to `max_length` tokens.
        share: of the rows that is trained on.
        examples: that a row becomes, at most.
    """
    config = stage.config
    rows, document = at_ports(stage, (port,), answers * config.max_length)
    rows = rows.times(share) if rows else None
    steps = None
    if rows:
        steps = Amount(ceil(rows.value * examples / config.global_batch) * config.epochs, rows.how if examples == 1 else "at most")
    tokens = rows.times(document).times(config.epochs) if rows and document else None
    return Amounts(rows=rows, document=document, steps=steps, tokens=tokens)
