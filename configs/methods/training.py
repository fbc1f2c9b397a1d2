"""Configs of the stages that train: SFT, reward model, preference optimization, RLVR.

Quantities are effective: a global batch is the number of sequences (or pairs, or prompts) per optimizer step over all ranks. Splitting a
batch into ranks and micro-batches is part of execution (`configs/language/execution.py`) and changes no field here.
"""

from dataclasses import replace
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from pedigree.configs.base.frozen import Arrived, Dtype, Frozen, HeadPrecision, Many, added
from pedigree.configs.base.shrink import Cut, even
from pedigree.configs.base.work import Adapters, Amount, Amounts, PlannedStage, TrainingPlan, at_ports
from pedigree.configs.methods.environment_programs import AnyEnvironment, EnvironmentProgram
from pedigree.configs.methods.language_model import Sampling
from pedigree.configs.methods.optimizer import Optimizer
from pedigree.configs.methods.policy_gradient import Algorithm, Ppo
from pedigree.configs.methods.preference import Kto, PreferenceLoss
from pedigree.configs.methods.reward_terms import EnvironmentReward, Reward, RewardProgram, model_problem, reward_problem


class Lora(Frozen):
    """Low-rank adapters: weights are frozen, and a product of two low-rank matrices is trained in parallel to each.

    The adapters are merged afterwards: the result is an ordinary model.
    """

    formula: ClassVar[str] = "W' = W + α/r · B A; with rslora α/√r"
    source: ClassVar[str] = "Hu et al. 2021, arXiv 2106.09685, §4.1; rslora: arXiv 2312.03732"

    rank: int = Field(default=16, ge=1)
    """r, the number of columns of B and rows of A."""
    alpha: float = Field(default=32.0, gt=0)
    """α: the product is scaled by alpha / rank."""
    targets: Literal["all-linear"] | Many[str] = "all-linear"
    """Linear layers to adapt, by suffix of their names (`[q_proj, v_proj]`), or all except the vocabulary projection and heads."""
    rslora: bool = False
    """Divide alpha by the square root of the rank instead, so that updates do not shrink with the rank."""

    @property
    def adapters(self) -> Adapters:
        """Their size."""
        return Adapters(self.rank) if self.targets == "all-linear" else Adapters(self.rank, min(len(self.targets), 7))

    @field_validator("targets")
    @classmethod
    def _check_targets(cls, value: Any) -> Any:
        if value == ():
            raise ValueError("targets is empty: name at least one layer, or remove it to adapt all")
        return value


TooLong = Literal["drop", "truncate"]
"""Handling of rows longer than `max_length`: dropped, or truncated and thus without an end-of-turn token. Both are counted. Open-instruct,
and therefore Tülu 3 and OLMo 2, truncate."""


REPORTED_SHARE, REFUSED_SHARE = 0.01, 0.5
"""Shares of dropped rows from which on a stage reports them, and by default fails."""


class Training(Frozen):
    """Fields common to all trained models. The optimizer keeps weights in fp32 whatever the compute dtype."""

    global_batch: int = Field(ge=1)
    """Sequences (SFT) or pairs (reward model, preference training) per optimizer step, over all ranks."""
    epochs: int = Field(default=1, ge=1)
    """Passes over the data, including the last, incomplete batch of each epoch."""
    max_steps: int | None = added(None, ge=1)
    """Stop after this many optimizer steps if the epochs have more. The learning-rate schedule ends there, too."""
    order: Literal["shuffled", "given"] = "shuffled"
    """Row order in each epoch: shuffled by (seed, epoch), or as in the data, one input after another."""
    max_length: int = Field(ge=8)
    """Maximum sequence length in tokens, including the prompt."""
    too_long: TooLong = "drop"
    """Handling of longer rows."""
    refuse_dropped: float = added(REFUSED_SHARE, gt=0, le=1)
    """Share of dropped rows (too long, or without a trained token) at which the stage fails before it trains; 1 accepts any. From 1 % on,
    the terminal, `plan`, the report and the record state it."""
    dtype: Dtype = "bf16"
    """Compute dtype of the forward and backward passes."""
    optimizer: Optimizer
    """Optimizer and learning-rate schedule."""
    lora: Lora | None = None
    """Train adapters instead of all weights."""
    seed: int = Field(default=0, ge=0)
    """Seed of the row order and of newly initialized weights."""

    @property
    def shuffled_by(self) -> int | None:
        """Seed of the row order; None if rows keep their order."""
        return self.seed if self.order == "shuffled" else None


class HeldOutTraining(Training):
    """Training of a policy on rows, which can measure its loss on rows that it holds out."""

    router_aux_loss_coef: float | None = added(None, ge=0)
    """Coefficient of the load-balancing loss of a mixture of experts, added to the loss; `null`: that of the model's config; 0: none."""
    holdout: float = added(0.0, ge=0, lt=0.9)
    """Share of rows held out, by hash of (seed, id). Their loss is measured after the last step and is in the record and the curve."""
    measure_every: int | None = added(None, ge=1)
    """Optimizer steps between further measurements of the held-out loss."""

    @model_validator(mode="after")
    def _check_holdout(self) -> Self:
        if self.measure_every and not self.holdout:
            raise ValueError(f"measure_every is {self.measure_every}, but no rows are held out: set holdout, e.g. to 0.02")
        return self


TrainOn = Literal["assistant", "last_turn", "marked", "all"]


class Sft(HeldOutTraining):
    """Supervised fine-tuning on assistant turns: the likelihood of all trained tokens in the global batch."""

    formula: ClassVar[str] = "-Σ_i Σ_t log π_θ(y_t) / Σ_i n_i over the global batch; reduction sum: / global_batch"
    source: ClassVar[str] = "mean over tokens: standard; sum: Lambert et al. 2024, arXiv 2411.15124 (Tülu 3), §4.3.2"

    train_on: TrainOn = "assistant"
    """Tokens in the loss: `assistant`, all assistant turns with their end-of-turn tokens; `last_turn`, only the last one (completion only);
    `marked`, assistant turns with `train: true`; `all`, every token of the conversation. Rows without trained tokens are dropped and
    counted."""
    loss_reduction: Literal["mean", "sum"] = "mean"
    """`mean`: over all trained tokens of the global batch. `sum`: the sum over each sequence's tokens, divided by `global_batch` (also in
    the last, incomplete batch of an epoch), so that a token has the same weight in every batch. This is open-instruct's `--reduce_loss
    sum`, used for Tülu 3: the sum over a micro-batch, averaged over accumulation steps and ranks, with one sequence per micro-batch. Its
    gradients are hundreds of times those of the mean and are nearly always clipped unless `max_grad_norm` is raised accordingly."""


class BradleyTerry(Frozen):
    """Logistic loss on the score difference of the two answers; p is the pair's `strength`, by default 1."""

    formula: ClassVar[str] = "−p log σ(z) − (1 − p) log σ(−z) + c (s_w + s_l)², z = s_w − s_l − margin_weight · (score gap)"
    source: ClassVar[str] = (
        "Bradley & Terry 1952; margin: Touvron et al. 2023, arXiv 2307.09288, eq. 2; centering: Eisenstein et al. 2023, "
        "arXiv 2312.09244, eq. 2"
    )

    type: Literal["bradley_terry"]
    centering: float = Field(default=0.0, ge=0)
    """c, which keeps the sum of the two scores near zero; typically 0.01."""
    margin_weight: float = Field(default=0.0, ge=0)
    """Weight of the gap between the answers' scores, for pairs in which both have one; other pairs have margin 0."""


Lists = Literal["best_vs_worst", "adjacent", "all"]
"""Pairs from a ranked list: first and last, each with the next, or all."""


NO_SCORES = "transformers has no reward or value model for {}: use another base model"


class RewardModel(Training):
    """Trains a scalar head on a policy with preference pairs."""

    lists: Lists = "all"
    """Pairs from a ranked list of preferences: best and worst, each with the next, or all (Ouyang et al. 2022, arXiv 2203.02155, §3.5)."""
    loss: BradleyTerry = BradleyTerry(type="bradley_terry")
    """Loss on the scores of a pair."""
    holdout: float = Field(default=0.1, ge=0, lt=0.9)
    """Share of pairs held out to measure accuracy, by hash of (seed, id); all pairs of a list stay together."""


class PreferenceTrain(HeldOutTraining):
    """Preference optimization against a fixed reference: the `reference` input, or else the initial policy.

    `global_batch` counts pairs, or single answers for KTO.
    """

    lists: Lists = "best_vs_worst"
    """Pairs from a ranked list of preferences: best and worst, each with the next, or all."""
    loss: PreferenceLoss
    """Preference loss."""
    head: HeadPrecision = "fp32"
    """Products of the output head where `dtype` is bf16. `fp32`: of the bf16 operands, summed and kept in fp32, logit_v = Σ_h x_h W_vh
    (MiniMax-M1, arXiv 2506.13585, §3.2; ScaleRL, arXiv 2510.13786, §3.2; TRL's `cast_lm_head_to_fp32`). `model`: rounded to bf16, which
    moves a log-prob by 0.02 nats on average."""

    @model_validator(mode="after")
    def _check_kto(self) -> Self:
        if isinstance(self.loss, Kto) and self.global_batch == 1:
            raise ValueError(
                "global_batch is 1, but kto estimates its KL on answers to other prompts of the global batch: use at least 2, better 8 or "
                "more"
            )
        if isinstance(self.loss, Kto) and self.lists != "best_vs_worst":
            raise ValueError(f"lists: {self.lists} would label the same answer desirable and undesirable for kto: use best_vs_worst")
        return self

    @model_validator(mode="after")
    def _check_kto_holdout(self) -> Self:
        if isinstance(self.loss, Kto) and self.holdout:
            raise ValueError("holdout measures the loss of pairs, but kto trains on single answers: remove it")
        return self


def reference_problem(config: PreferenceTrain, arrived: Arrived) -> str | None:
    """Error message if the loss cannot use its `reference`, else None."""
    for given in arrived.get("reference", {}).values():
        if config.loss.reference_free:
            return f"the loss {config.loss.type} uses no reference: remove the input `reference`"
        if not isinstance(given.config, ReferenceLogprobs):
            continue
        if isinstance(config.loss, Kto):
            return (
                "kto estimates its KL on mismatched prompts and answers, which `reference_logprobs` does not cover: use a policy as the "
                "reference"
            )
        for name in ("dtype", "head"):
            theirs, ours = getattr(given.config, name), getattr(config, name)
            if theirs != ours:
                return (
                    f"`reference` has {name} {theirs} but the training {ours}, so rounding would look like preference: use the same {name} "
                    "for both"
                )
    return None


class ReferenceLogprobs(Frozen):
    """Log-probabilities of all answers under a fixed policy, for use as `reference` in `preference_train`."""

    max_length: int = Field(ge=8)
    """Maximum sequence length in tokens, including the prompt."""
    too_long: TooLong = "drop"
    """Handling of longer answers; must match the training."""
    refuse_dropped: float = added(REFUSED_SHARE, gt=0, le=1)
    """Share of dropped answers at which the stage fails; 1 accepts any."""
    dtype: Dtype = "bf16"
    """Compute dtype; must match the training, so that rounding is the same."""
    head: HeadPrecision = "fp32"
    """Products of the output head, as in `preference_train`; must match the training."""


SERVED_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Adapter ranks for which vLLM can reserve memory; adapters of a lower rank fit."""
MAX_SERVED_RANK = SERVED_RANKS[-1]


def served_rank(rank: int) -> int:
    """The rank for which vLLM reserves memory to serve adapters of this rank, at most `MAX_SERVED_RANK`."""
    return min(served for served in SERVED_RANKS if served >= rank)


class Asynchronous(Frozen):
    """Rollouts of the next steps while the trainer updates the policy.

    The loss is that of AReaL's decoupled objective: `algorithm.correction` weights a token by π_old(trainer) / π(sampler), where π_old is
    the policy at the beginning of the update and π(sampler) that of the weights that sampled the token.
    """

    formula: ClassVar[str] = "step s begins its rollouts with weights of step s - max_staleness or a later one"
    source: ClassVar[str] = "Fu et al. 2025, arXiv 2505.24298, §4 and eq. 5; in flight: also Piché et al. 2025, arXiv 2509.19128"

    max_staleness: int = Field(default=1, ge=0)
    """Maximum steps by which the weights that begin an answer are older than those that train on it. 1: one step off policy; 0: the
    synchronous schedule."""
    in_flight: bool = True
    """Engines load new weights between two tokens: running answers keep their tokens, their KV cache is recomputed, and the record has the
    version of each token. `false`: between two steps, so that all answers of a step have the same weights; with `max_staleness` 1 those of
    the step before the last one."""

    @model_validator(mode="after")
    def _check_between(self) -> "Asynchronous":
        if self.max_staleness > 1 and not self.in_flight:
            raise ValueError(
                f"max_staleness {self.max_staleness} without in_flight would make the trainer wait for rollouts that it does not need: set "
                "max_staleness to 1, or in_flight to true"
            )
        return self


class Hints(Frozen):
    """Prompts whose answers are all equally wrong are asked again with a hint of their own, the weakest first.

    The answers to the first prompt with a hint that are not all equally wrong replace those without one. They are trained on as answers
    to that longer prompt, which sampled them, so they are on-policy. Rewards and lengths of the curve are those without hints.
    """

    formula: ClassVar[str] = "x ← x ⊕ h_k for the first k of which not v_1 = ... = v_G < 1, by the verifier; without any, x is kept"
    source: ClassVar[str] = (
        "hints from abstract to concrete: Zhang et al. 2025, arXiv 2510.19807 (Scaf-GRPO), which replaces one answer; whole groups with "
        "parts of the solution: Liu et al. 2025, arXiv 2507.10628 (GHPO)"
    )

    text: str = "\n\nHint: {hint}"
    """Appended to the last user turn, with the hint for `{hint}`."""

    @field_validator("text")
    @classmethod
    def _check_text(cls, value: str) -> str:
        if "{hint}" not in value:
            raise ValueError(f"text {value!r} has no place for a hint: write {{hint}} in it")
        return value


class Rlvr(Frozen):
    """Reinforcement learning from verifiable rewards: rollouts, rewards and updates in one job."""

    algorithm: Algorithm
    """Policy-gradient algorithm."""
    steps: int = Field(ge=1)
    """Batches of rollouts, each sampled from the current weights; depending on the algorithm, each leads to one or several optimizer
    updates."""
    prompts_per_step: int = Field(ge=1)
    """Prompts per batch of rollouts."""
    samples_per_prompt: int = Field(ge=1)
    """Answers per prompt (the group size)."""
    no_resampling_pass_rate: float | None = added(None, gt=0, le=1)
    """Set solved prompts aside (open-instruct, with 0.875 for OLMo 3): once the mean verifier score of a prompt's answers in a step is at
    least this, no later step draws it. If fewer than `prompts_per_step` would be left, all are drawn again. Off by default."""
    sampling: Sampling
    """Sampling parameters of rollouts."""
    reward: Reward = Reward()
    """Rewards of answers: by verifiers, functions of the project, reward models, language models, and terms such as length."""
    environment: AnyEnvironment | None = added(None)
    """A class of the project, or a simulated user, that answers the policy between several turns; the term `environment` of the reward is
    what a class gives for them. Verifiers and all other terms see the last answer, in the conversation before it."""
    credit: Literal["conversation", "turn"] = added("conversation")
    """`conversation`: all tokens of a conversation have one advantage, that of its reward R. `turn`, for grpo, dapo and cispo: what the
    environment gave for a turn is its reward r_k, all else of R belongs to the last turn, and the tokens of turn k have the advantage
    A_k = Σ_{l≥k} (r_l - mean r) / (std r + 1e-4), mean and std over all turns of all answers to the prompt (process supervision, Shao et
    al. 2024, arXiv 2402.03300, §4.1.3). With one turn both are equal."""
    hints: Hints | None = added(None)
    """Ask prompts whose answers are all equally wrong again, with a hint of their own (`hints` of their verifiers); `{}` for the defaults.
    By default they are left as they are."""
    replay_successes: bool = added(False)
    """Store the latest right answer to each prompt (v = 1, by its verifier). If a later step has none to the same prompt, the stored one
    replaces the last wrong answer before advantages are computed (Lu et al. 2025, arXiv 2505.16282, ARPO). It is off policy: its tokens are
    weighted by `algorithm.correction`, which is required, with the log-probabilities that they were sampled with."""
    replay: Literal["exact", "recorded"] = added("exact")
    """How an interrupted run repeats its answers. `exact`: it samples them again, with equal bits, in fixed chunks of 256 answers, each of
    which must fit into the KV cache of an engine. `recorded`: engines run as many answers as fit, and each is stored as it finishes, with
    its log-probabilities; an interrupted run trains on the stored ones, may sample other tokens for the rest, and is then marked."""
    asynchronous: Asynchronous | None = added(None)
    """Roll out the next steps while the trainer updates; requires `replay: recorded` and, on GPUs, separate ones for the engines.
    `null`: rollouts and updates take turns."""
    max_prompt_length: int = Field(ge=1)
    """Maximum prompt length in tokens; longer prompts are dropped and counted."""
    refuse_dropped: float = added(REFUSED_SHARE, gt=0, le=1)
    """Share of dropped prompts (too long, or without a verifier) at which the stage fails before the first step; 1 accepts any."""
    max_logprob_gap: float = Field(default=0.1, gt=0)
    """Bound for the consistency check after each weight sync: mean |log-prob(sampler) - log-prob(trainer)| per token,
    less three standard errors. Steps with answers of older weights are not checked."""
    dtype: Dtype = "bf16"
    """Compute dtype of the trainer and the sampler."""
    router_aux_loss_coef: float | None = added(None, ge=0)
    """Coefficient of the load-balancing loss of a mixture of experts, added to the policy's loss; `null`: that of the model's config;
    0: none."""
    head: HeadPrecision = "fp32"
    """Products of the output head where `dtype` is bf16. `fp32`: of the bf16 operands, summed and kept in fp32, logit_v = Σ_h x_h W_vh
    (MiniMax-M1, arXiv 2506.13585, §3.2; ScaleRL, arXiv 2510.13786, §3.2; TRL's `cast_lm_head_to_fp32`). `model`: rounded to bf16, which
    moves a log-prob by 0.02 nats on average. Trainer, reference and sampler compute it alike."""
    optimizer: Optimizer
    """Optimizer of the policy, with its learning-rate schedule."""
    lora: Lora | None = None
    """Train adapters of the policy instead of all weights. The sampler receives the adapters unmerged, because merging would round their
    first updates away (maximum rank 512). A value model is trained in full."""
    seed: int = Field(default=0, ge=0)
    """Seed of prompt order, sampling and newly initialized weights."""

    @property
    def first_batch(self) -> int:
        """Prompts that a step draws first."""
        resampling = self.algorithm.resampling
        return resampling.batch(self.prompts_per_step) if resampling else self.prompts_per_step

    @property
    def turns(self) -> int:
        """Maximum answers of the policy in a conversation."""
        return self.environment.max_turns if self.environment else 1

    @property
    def longest_answer(self) -> int:
        """Maximum tokens after a prompt: of all turns and of what is between them."""
        longest = self.sampling.max_tokens
        return self.environment.longest_answer(longest) if self.environment else longest

    @property
    def programs(self) -> list[RewardProgram]:
        return self.reward.programs

    @model_validator(mode="after")
    def _check_sampling(self) -> "Rlvr":
        if self.sampling.temperature == 0:
            raise ValueError("sampling.temperature is 0, so all answers to a prompt would be equal: raise it, e.g. to 1.0")
        if self.sampling.top_p != 1:
            raise ValueError(
                f"sampling.top_p is {self.sampling.top_p}, but must be 1: otherwise rollouts do not follow the trained distribution"
            )
        return self

    @model_validator(mode="after")
    def _check_asynchronous(self) -> "Rlvr":
        if self.asynchronous is None:
            return self
        if self.replay != "recorded":
            raise ValueError(f"asynchronous trains on answers that no run can repeat, but replay is {self.replay}: set `replay: recorded`")
        if self.asynchronous.max_staleness and self.algorithm.correction is None:
            raise ValueError(
                f"asynchronous.max_staleness {self.asynchronous.max_staleness} trains on answers of older weights, for which the algorithm "
                "must correct: set `algorithm.correction: {}`"
            )
        if self.lora is not None and self.asynchronous.in_flight:
            raise ValueError("lora cannot be replaced under running answers in vLLM: set `asynchronous.in_flight: false`")
        return self

    @model_validator(mode="after")
    def _check_reward(self) -> "Rlvr":
        greedy = self.algorithm.advantage == "greedy"
        if problem := reward_problem(self.reward, self.sampling.max_tokens, self.samples_per_prompt, greedy):
            raise ValueError(problem)
        if not isinstance(self.environment, EnvironmentProgram) and any(isinstance(term, EnvironmentReward) for term in self.reward.terms):
            raise ValueError("reward.terms has the term environment, but there is none with rewards: set `environment: {path: ...}`")
        if self.no_resampling_pass_rate is not None and not self.reward.verifies:
            raise ValueError(
                f"no_resampling_pass_rate {self.no_resampling_pass_rate} bounds verifier scores, but nothing of the reward requires them: "
                "remove it, or set reward.right above 0"
            )
        return self

    @model_validator(mode="after")
    def _check_hints(self) -> "Rlvr":
        if self.hints is None:
            return self
        if self.environment is not None:
            raise ValueError("hints are added to prompts of one answer, and an environment may replace them: remove hints or environment")
        if not self.reward.verifies:
            raise ValueError("hints are given where the verifier's scores are equal, but the reward asks no verifier: set reward.right")
        if self.samples_per_prompt < 2:
            raise ValueError("hints are given where all answers to a prompt are wrong, so samples_per_prompt must be at least 2: raise it")
        return self

    @model_validator(mode="after")
    def _check_replay(self) -> "Rlvr":
        if not self.replay_successes:
            return self
        if self.algorithm.correction is None:
            raise ValueError("replay_successes trains on answers of older weights: set `algorithm.correction: {}`")
        if not self.reward.verifies:
            raise ValueError("replay_successes stores what a verifier found right, but the reward asks no verifier: set reward.right")
        if self.samples_per_prompt < 2:
            raise ValueError("replay_successes replaces one answer of several, so samples_per_prompt must be at least 2: raise it")
        return self

    @model_validator(mode="after")
    def _check_credit(self) -> "Rlvr":
        if self.credit == "conversation":
            return self
        if self.environment is None:
            raise ValueError("credit is turn, but answers have one turn without an environment: set environment, or remove credit")
        algorithm = self.algorithm
        if algorithm.advantage != "normalised" or algorithm.ratio != "token":
            raise ValueError(f"credit is turn, which grpo, dapo and cispo support, but not {algorithm.type}: use one of them")
        if (algorithm.kl and algorithm.kl.where == "reward") or (algorithm.teacher and algorithm.teacher.alone):
            raise ValueError("credit is turn, but kl.where reward and teacher.alone change the rewards of whole answers: remove them")
        return self

    @model_validator(mode="after")
    def _check_lora(self) -> "Rlvr":
        if self.lora is not None and self.lora.rank > MAX_SERVED_RANK:
            raise ValueError(f"lora.rank is {self.lora.rank}, but vLLM supports at most {MAX_SERVED_RANK}: lower it")
        return self

    @model_validator(mode="after")
    def _check_batch(self) -> "Rlvr":
        algorithm = self.algorithm
        if algorithm.compares and self.samples_per_prompt < 2:
            raise ValueError(f"{algorithm.type} compares the answers to a prompt, so samples_per_prompt must be at least 2: raise it")
        if algorithm.resampling and self.samples_per_prompt < 2:
            raise ValueError("resampling keeps prompts whose answers differ, so samples_per_prompt must be at least 2: raise it")
        if algorithm.keep is not None and not 1 + algorithm.compares <= algorithm.keep.answers <= self.samples_per_prompt:
            raise ValueError(
                f"keep.answers is {algorithm.keep.answers}, but must be from {1 + algorithm.compares} to samples_per_prompt "
                f"{self.samples_per_prompt}: change it, or raise samples_per_prompt"
            )
        adaptive, trained = algorithm.kl and algorithm.kl.adaptive, algorithm.keep.answers if algorithm.keep else self.samples_per_prompt
        if adaptive and (change := adaptive.most_change * (answers := self.prompts_per_step * trained)) >= adaptive.horizon:
            raise ValueError(
                f"kl.adaptive.horizon is {adaptive.horizon:g}, but a step of {answers} answers may take {change:g} / horizon of the "
                f"coefficient, which would reach 0: set it above {change:g}, e.g. to {10 * change:g}"
            )
        cuts = algorithm.mini_batches
        if cuts > self.prompts_per_step:
            raise ValueError(f"updates_per_rollout {cuts} exceeds prompts_per_step {self.prompts_per_step}: lower it")
        if isinstance(algorithm, Ppo) and algorithm.critic.warmup_steps >= self.steps:
            raise ValueError(
                f"critic.warmup_steps {algorithm.critic.warmup_steps} leaves none of the {self.steps} steps for the policy: lower it"
            )
        return self


def rlvr_problem(config: Rlvr, arrived: Arrived) -> str | None:
    """Error message if the algorithm has no use for an input, else None."""
    algorithm = config.algorithm
    if arrived.get("reference") and not algorithm.refers:
        return f"the input reference is set, but {algorithm.type} has no kl: set algorithm.kl, or remove the input"
    if arrived.get("teacher") and algorithm.teacher is None:
        return "the input teacher is set, but algorithm.teacher is not: set it, e.g. to {}, or remove the input"
    if algorithm.teacher is not None and not arrived.get("teacher"):
        return "algorithm.teacher is set, but the input teacher is missing: add it, or remove algorithm.teacher"
    if arrived.get("value") and not isinstance(algorithm, Ppo):
        return f"the input value is set, but {algorithm.type} has no value model: use algorithm ppo, or remove the input"
    return model_problem(config.reward, arrived)


REHEARSED_BATCH, REHEARSED_EPOCHS = 4, 2


def shrink_training(cut: Cut) -> None:
    """Small batches, few epochs."""
    cut.set("global_batch", even(min(cut.get("global_batch"), REHEARSED_BATCH)), "batches")
    cut.most("epochs", REHEARSED_EPOCHS, "batches")
    if cut.get("too_long") == "drop":
        cut.set("refuse_dropped", 1.0, "thresholds")  # a tiny model's tokens are more
    if cut.get("measure_every"):
        cut.set("measure_every", 1, "batches")
    cut.set("router_aux_loss_coef", None, "weights")  # tiny models have no experts
    cut.optimizer("optimizer")
    if cut.get("loss.margin_weight"):  # relaxed pairs have no scores where nothing verifies them
        cut.set("loss.margin_weight", 0.0, "thresholds")


def training_plan(config: Training, unit: str, *, answers: int = 1, **others: Any) -> TrainingPlan:
    """The plan of a stage that trains on rows.

    Args:
        config: of the stage.
        unit: name of its rows.
        answers: of a row, each with up to `max_length` tokens.
        others: further fields of the plan.
    """
    common = TrainingPlan(
        config.dtype, config.global_batch, "global_batch", unit, answers * config.max_length, epochs=config.epochs,
        max_steps=config.max_steps, share=1 - getattr(config, "holdout", 0.0),
        adapters=config.lora and config.lora.adapters, adaptable=True,
    )  # fmt: skip
    return replace(common, **others)


def training_work(stage: PlannedStage, port: str, plan: TrainingPlan) -> Amounts:
    """The work of training on the rows at a port."""
    read, document = at_ports(stage, (port,), plan.longest)
    if read is None:
        return Amounts(document=document)
    rows, steps = read.times(plan.share), Amount(plan.steps_for(read.value), read.how if plan.examples == 1 else "at most")
    passes = min(plan.epochs, steps.value * plan.batch / (rows.value * plan.examples)) if plan.max_steps else plan.epochs
    return Amounts(rows=rows, document=document, steps=steps, tokens=rows.times(document).times(passes) if document else None)
