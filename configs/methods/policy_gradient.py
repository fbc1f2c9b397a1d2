"""Policy-gradient algorithms, one class each: defaults are those of the paper, and fixed components are class variables.

In the formulas: ρ_t = π_θ(y_t) / π_old(y_t); δ_t = log π_θ(y_t) - log π_ref(y_t); A the advantage; R the reward of an answer; G answers to
each of P prompts; C(ρ, A) = min(ρA, clip(ρ, 1 - ε_low, 1 + ε_high)A). All losses are minimized.

An answer without a reward (its verifier could not run) is excluded from everything. A group (the answers to one prompt) whose advantages
are all 0 still counts in every denominator, in the statistics of whitened advantages, and in the KL, unless `resampling` replaces it. If
nothing gives it a gradient (no KL, entropy bonus, teacher or whitening; advantages per answer), its forward pass is skipped, which
changes no other number. A mini-batch without any gradient makes no update, because the optimizer would only apply momentum.
"""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from pedigree.configs.base.frozen import Frozen, added
from pedigree.configs.methods.optimizer import Optimizer

Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "token-sum"]
"""How token losses are aggregated into one loss, over all D answers of an update that have a reward; names as in verl."""
Advantage = Literal["normalised", "centred", "leave_one_out", "greedy", "smoothed", "return_to_go", "gae"]
Ratio = Literal["token", "sequence_mean", "sequence_sum"]


class AdaptiveKl(Frozen):
    """Adapts the coefficient to the measured KL, after every batch of n answers."""

    formula: ClassVar[str] = "β ← β (1 + n / horizon · clip(KL / target - 1, ±0.2)), KL = mean_i Σ_t k1_t"
    source: ClassVar[str] = "Ziegler et al. 2019, arXiv 1909.08593, §2.2"
    most_change: ClassVar[float] = 0.2
    """Bound of |KL / target - 1|."""

    target: float = Field(default=6.0, gt=0)
    """Target KL of a whole answer, in nats: the mean over answers of Σ_t δ_t."""
    horizon: float = Field(default=10000, gt=0)
    """Number of answers over which the coefficient may change by a fifth; more than a fifth of the answers of a step."""


class Kl(Frozen):
    """A penalty on divergence from the reference, in the reward or in the token loss."""

    formula: ClassVar[str] = "β k_t; k1 = δ, k2 = δ² / 2, k3 = e^(-δ) - 1 + δ, δ_t = log π_θ(y_t) - log π₀(y_t); unbiased: β ρ_t k_t"
    source: ClassVar[str] = "Schulman 2020, joschu.net/blog/kl-approx.html; unbiased: DeepSeek-AI 2025, arXiv 2512.02556, §3.1"

    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of KL(policy ‖ reference) per token; |δ| is capped at 20. In the loss, the gradient of k2 is that of the KL, the gradient
    of k3 is biased, and that of k1 is 0 on average."""
    where: Literal["reward", "loss"] = "loss"
    """`reward`: subtracted from the reward, per token if advantages are per token, else summed over the answer; `loss`: added to each
    token's loss."""
    coefficient: float = Field(gt=0)
    """β; the initial value if it is adaptive."""
    unbiased: bool = False
    """In the loss: multiply k1 or k3 by the token's ρ, so that the gradient is that of the KL."""
    adaptive: AdaptiveKl | None = None
    """Adapt the coefficient; fixed by default."""

    @model_validator(mode="after")
    def _check_estimator(self) -> "Kl":
        if self.unbiased and (self.where == "reward" or self.estimator == "k2"):
            raise ValueError("unbiased applies only to k1 and k3 in the loss: remove it")
        if self.where == "loss" and self.estimator == "k1" and not self.unbiased:
            raise ValueError("k1 in the loss has no gradient on average: use k2 or k3, set `unbiased: true`, or set `where: reward`")
        return self


class AdaptiveEntropy(Frozen):
    """Adapts the coefficient to the measured entropy after every batch of rollouts. No bonus before the first measurement."""

    formula: ClassVar[str] = "c ← min(c + step, high) if H ≤ target, else max(c - step, low); α = c if H ≤ target, else 0"
    source: ClassVar[str] = "Skywork 2025, arXiv 2505.22312; as in TRL 1.16"

    target: float = Field(gt=0)
    """Entropy in nats per token, at or below which the bonus applies: the mean over the tokens that the bonus acts on."""
    step: float = Field(default=0.005, gt=0)
    """Change of the coefficient per batch of rollouts."""
    low: float = Field(default=0.0, ge=0)
    """Minimum coefficient."""
    high: float = Field(default=1.0, gt=0)
    """Maximum coefficient."""


class EntropyBonus(Frozen):
    """A bonus for the policy's entropy, with its exact gradient. All aggregations have the same bonus."""

    formula: ClassVar[str] = "loss - α mean_t H_t over the tokens of a mini-batch; H_t = -Σ_v π_θ(v) log π_θ(v)"
    source: ClassVar[str] = "Mnih et al. 2016, arXiv 1602.01783, §4; as in TRL 1.16"

    coefficient: float = Field(ge=0)
    """α; the initial c if it is adaptive."""
    adaptive: AdaptiveEntropy | None = None
    """Adapt the coefficient; fixed by default."""

    @model_validator(mode="after")
    def _check_coefficient(self) -> "EntropyBonus":
        if self.adaptive is None and self.coefficient == 0:
            raise ValueError("coefficient is 0, so there is no bonus: raise it, or remove `entropy`")
        if self.adaptive is not None and not self.adaptive.low <= self.coefficient <= self.adaptive.high:
            raise ValueError(f"coefficient {self.coefficient} is outside low {self.adaptive.low} and high {self.adaptive.high}: change one")
        return self


class Correction(Frozen):
    """Weights a token's loss by w, bounded, to correct for numerical differences between sampler and trainer."""

    formula: ClassVar[str] = "w = π_old(trainer) / π(sampler) of a token or an answer; min(max(w, low), high), or 0 out of bounds"
    source: ClassVar[str] = "truncated: Yao et al. 2025 (TIS); masked: Ling Team 2025, arXiv 2510.18855 (IcePop)"

    level: Literal["token", "sequence"] = "token"
    """`sequence`: the product of the ratios of an answer, applied to all its tokens."""
    mode: Literal["truncate", "mask"] = "truncate"
    """`truncate`: clamp w to the bounds; `mask`: set w to 0 outside the bounds."""
    low: float = Field(default=0.0, ge=0, lt=1)
    """Lower bound of w."""
    high: float = Field(default=2.0, gt=1)
    """Upper bound of w."""


class Resampling(Frozen):
    """Dynamic sampling: a step draws further prompts in place of those whose answers are all right or all wrong.

    Only groups whose scores and rewards differ are trained on and count in divisors. The mean reward of the curve is that of all answers.
    """

    formula: ClassVar[str] = "train on prompts with 0 < |{i : o_i is right}| < G only"
    source: ClassVar[str] = "Yu et al. 2025, arXiv 2503.14476, §3.2 and eq. 11"

    max_batches: int = Field(default=10, ge=1)
    """Maximum batches of rollouts per step, each of at most `batch_multiplier` times `prompts_per_step` prompts. A step that reaches it
    trains on the groups that it has; without any, it is as without resampling. No prompt is drawn twice in a step."""
    batch_multiplier: float = added(1.0, ge=1)
    """Over-sampling (NeMo-RL's name): the first batch has this times `prompts_per_step` prompts, rounded, so that few steps need a second
    one. The first informative groups in the order of prompts are kept, not the first to finish, which would be those of short answers; the
    prompts after them are drawn again by the next step."""

    def batch(self, prompts: int) -> int:
        """Prompts of the first batch of a step that requires so many groups; no later one has more."""
        return round(self.batch_multiplier * prompts)


class Teacher(Frozen):
    """Rewards each token by the log-ratio of the policy at the port `teacher` to another."""

    formula: ClassVar[str] = "r_t = w (log π_T(y_t) - log π_b(y_t)), |log-ratio| ≤ 20; with advantages per answer, A_t = A_i + r_t"
    source: ClassVar[str] = (
        "`policy`: on-policy distillation by reverse KL, Agarwal et al. 2023, arXiv 2306.13649; `reference`: Zhong et al. 2024, arXiv "
        "2404.18922 (RTO, with a DPO policy), Cui et al. 2025, arXiv 2502.01456 (PRIME)"
    )

    weight: float = Field(default=1.0, gt=0)
    """w."""
    against: Literal["policy", "reference"] = "policy"
    """π_b: the policy that answered, or the fixed reference."""
    alone: bool = False
    """Whether nothing else is rewarded: the rewards of answers are measured, but take no part in advantages."""


class Keep(Frozen):
    """Trains on some of the answers to each prompt. Advantages and divisors are those of the chosen answers alone."""

    formula: ClassVar[str] = "S ⊂ {1..G}, |S| = m; by variance: S maximizes Var{R_i : i ∈ S}, which k lowest and m - k highest rewards do"
    source: ClassVar[str] = (
        "Xu et al. 2025, arXiv 2504.13818 (PODS); extremes: Shen and Zhang 2024, arXiv 2409.06957 (PF-PPO, best and worst)"
    )

    answers: int = Field(ge=1)
    """m: answers per prompt to train on, of `samples_per_prompt`."""
    by: Literal["variance", "extremes", "top"] = "variance"
    """`variance`: the m answers whose rewards vary most; `extremes`: ⌊m/2⌋ with the lowest rewards and the others with the highest; `top`:
    the m with the highest rewards. Of equal rewards, that of the later answer counts as higher."""


class PolicyGradient(Frozen):
    """Fields common to all algorithms."""

    resampling: Resampling | None = added(None)
    """Replace groups without a learning signal by those of further prompts; by default all groups are trained on."""
    kl: Kl | None = None
    """Penalty on divergence from the reference."""
    correction: Correction | None = None
    """Weights that correct for the mismatch between sampler and trainer; by default the mismatch is only measured."""
    teacher: Teacher | None = added(None)
    """Reward tokens by another policy; by default only answers have rewards."""
    keep: Keep | None = added(None)
    """Train on some of the answers to each prompt; by default on all with a reward."""
    mask_truncated: bool = added(False)
    """Exclude answers that `max_tokens` cut off from the loss and from the divisors that count tokens (DAPO's overlong filtering, arXiv
    2503.14476, §3.4; TRL's `mask_truncated_completions`). Their rewards count in the advantages of their group, and they count where a loss
    is a mean over answers. By default they are trained on."""
    entropy: EntropyBonus | None = added(None)
    """Bonus for the policy's entropy; by default it is only measured."""
    top_entropy: float | None = added(None, gt=0, lt=1)
    """Share of tokens, those with the highest entropy, whose objective has a gradient (0.2 in Wang et al. 2025, arXiv 2506.01939):
    the 1 + ⌊share · (N - 1)⌋ highest of the N tokens of a mini-batch, under the policy that answered. The others count in divisors, in the
    KL and in whitening, not in the entropy bonus. By default all tokens have one."""

    @model_validator(mode="after")
    def _check_alone(self) -> "PolicyGradient":
        if self.teacher is not None and self.teacher.alone and self.advantage == "smoothed":
            raise ValueError("teacher.alone leaves out rewards, but the advantages are those of all visits to a prompt: set it to false")
        return self

    formula: ClassVar[str]
    source: ClassVar[str]
    advantage: ClassVar[Advantage]
    ratio: ClassVar[Ratio] = "token"
    whitened: ClassVar[bool] = False
    """Normalize advantages to mean 0 and variance 1 over all tokens of the rollout batch."""

    @property
    def updates(self) -> int:
        """Optimizer updates per batch of rollouts."""
        return 1

    @property
    def mini_batches(self) -> int:
        """Mini-batches per pass over the rollouts, one update each."""
        return 1

    @property
    def looks(self) -> bool:
        """Whether old log-probs and entropies are computed before the first update."""
        in_reward = self.kl is not None and self.kl.where == "reward"
        return self.updates > 1 or in_reward or self.top_entropy is not None or self.teacher is not None

    @property
    def refers(self) -> bool:
        """Whether log-probs of the reference are computed."""
        return self.kl is not None or (self.teacher is not None and self.teacher.against == "reference")

    @property
    def per_token(self) -> bool:
        """Whether advantages differ within an answer."""
        return self.advantage in ("return_to_go", "gae")

    @property
    def compares(self) -> bool:
        """Whether advantages depend on the other answers to the same prompt."""
        return self.advantage in ("normalised", "centred", "leave_one_out", "smoothed")


class Repeated(PolicyGradient):
    """An algorithm that bounds ρ and can therefore make several updates per batch of rollouts."""

    updates_per_rollout: int = Field(default=1, ge=1)
    """Number of mini-batches, split by prompt, into which a batch of rollouts is shuffled; each makes one optimizer update. Old log-probs
    are computed before the first update."""
    inner_epochs: int = Field(default=1, ge=1)
    """Passes over the mini-batches."""

    @property
    def updates(self) -> int:
        return self.updates_per_rollout * self.inner_epochs

    @property
    def mini_batches(self) -> int:
        return self.updates_per_rollout


class Clipped(Repeated):
    """An algorithm with PPO's clipping."""

    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """ε_low: with a negative advantage, ρ below 1 - ε_low has no gradient."""
    clip_high: float = Field(default=0.2, gt=0)
    """ε_high: with a positive advantage, ρ above 1 + ε_high has no gradient."""
    dual_clip: float | None = Field(default=None, gt=1)
    """c: with a negative advantage the objective is at least cA (Ye et al. 2020, arXiv 1912.09729, eq. 5); typically 3."""


class Grpo(Clipped):
    """Group-relative policy optimization: advantages are relative to the other answers to the same prompt, in standard deviations."""

    type: Literal["grpo"]
    kl: Kl | None = Kl(coefficient=0.04)
    """Penalty on divergence from the reference; `null` disables it."""
    aggregation: Aggregation = "seq-mean-token-mean"
    """How token losses are aggregated."""

    formula: ClassVar[str] = "mean_i mean_t -C(ρ_t, A_i) + β k3_t; A_i = (R_i - mean R) / (std R + 1e-4)"
    source: ClassVar[str] = "Shao et al. 2024, arXiv 2402.03300, eq. 3 and 4"
    advantage: ClassVar[Advantage] = "normalised"


class DrGrpo(Clipped):
    """GRPO without division by the group's standard deviation and by answer length, both of which bias the gradient."""

    type: Literal["dr_grpo"]
    aggregation: Aggregation = "seq-mean-token-sum-norm"
    """How token losses are aggregated."""

    formula: ClassVar[str] = "mean_i 1/max_tokens Σ_t -C(ρ_t, A_i); A_i = R_i - mean R"
    source: ClassVar[str] = "Liu et al. 2025, arXiv 2503.20783, §3.2"
    advantage: ClassVar[Advantage] = "centred"


class Dapo(Clipped):
    """GRPO's advantages with a higher upper clip, equal weight for every token, groups with a learning signal only, and no KL."""

    type: Literal["dapo"]
    resampling: Resampling | None = Resampling()
    """Replace groups without a learning signal by those of further prompts; `null` trains on all groups."""
    clip_high: float = Field(default=0.28, gt=0)
    """ε_high: with a positive advantage, ρ above 1 + ε_high has no gradient."""
    aggregation: Aggregation = "token-mean"
    """How token losses are aggregated."""

    formula: ClassVar[str] = "1/Σ|y_i| Σ_i Σ_t -C(ρ_t, A_i); A_i = (R_i - mean R) / (std R + 1e-4)"
    source: ClassVar[str] = "Yu et al. 2025, arXiv 2503.14476, eq. 8, 9 and 11"
    advantage: ClassVar[Advantage] = "normalised"


class Gspo(Clipped):
    """GRPO with one ratio per answer, the geometric mean of its token ratios, clipped as a whole."""

    type: Literal["gspo"]
    clip_low: float = Field(default=3e-4, gt=0, lt=1)
    """ε_low for the answer's ratio."""
    clip_high: float = Field(default=4e-4, gt=0)
    """ε_high for the answer's ratio."""
    updates_per_rollout: int = Field(default=4, ge=1)
    """Number of mini-batches, split by prompt, into which a batch of rollouts is shuffled; each makes one optimizer update."""
    aggregation: Aggregation = "seq-mean-token-mean"
    """How token losses are aggregated; all tokens of an answer have the same loss."""

    formula: ClassVar[str] = "mean_i -C(s_i, A_i); s_i = exp(mean_t log ρ_t); A_i as in GRPO"
    source: ClassVar[str] = "Zheng et al. 2025, arXiv 2507.18071, eq. 5 to 7"
    advantage: ClassVar[Advantage] = "normalised"
    ratio: ClassVar[Ratio] = "sequence_mean"


class Cispo(Repeated):
    """REINFORCE with a truncated importance weight: the weight is clipped, but no token loses its gradient."""

    type: Literal["cispo"]
    clip_max: float = Field(default=5.0, gt=1)
    """Maximum weight ρ (5: Khatri et al. 2025, arXiv 2510.13786)."""
    aggregation: Aggregation = "token-mean"
    """How token losses are aggregated."""

    formula: ClassVar[str] = "1/Σ|y_i| Σ_i Σ_t -sg(min(ρ_t, ε_max)) A_i log π_θ(y_t); A_i as in GRPO"
    source: ClassVar[str] = "MiniMax 2025, arXiv 2506.13585, eq. 4 and 5"
    advantage: ClassVar[Advantage] = "normalised"


class Dcpo(Repeated):
    """Dynamic clipping, with wider bounds for rare tokens; advantages are smoothed over all visits to a prompt.

    Statistics of earlier visits to a prompt are part of the checkpoint. A group with equal rewards still has advantages if earlier rewards
    differed.
    """

    type: Literal["dcpo"]
    clip_low: float = Field(default=0.16, gt=0, lt=1)
    """ε_low for |ρ - 1| π_θ(y_t)."""
    clip_high: float = Field(default=0.2, gt=0)
    """ε_high for |ρ - 1| π_θ(y_t)."""
    max_ratio: float = Field(default=10.0, gt=1)
    """Upper bound on ρ, for positive advantages (upper clip) and negative ones (dual clip)."""

    formula: ClassVar[str] = (
        "mean over prompts Σ_i mean_t -min(ρA, clip(ρ, ½ + ½√max(1 - 4ε_low/q, 0), ½ + ½√(1 + 4ε_high/q))A) with ρ ≤ 10, "
        "q = π_old(y_t); "
        "A: of A_total/v + (v-1)/v A_new and (v-1)/v A_total + A_new/v at the v-th visit, the smaller one"
    )
    source: ClassVar[str] = "Yang et al. 2025, arXiv 2509.02333, eqs. 4 to 8"
    advantage: ClassVar[Advantage] = "smoothed"
    aggregation: ClassVar[str] = "seq-sum-token-mean"


class Rloo(Clipped):
    """REINFORCE with the mean reward of the other answers as baseline; a whole answer is one action."""

    type: Literal["rloo"]
    kl: Kl | None = Kl(estimator="k1", where="reward", coefficient=0.05)
    """Penalty on divergence from the reference; `null` disables it."""

    formula: ClassVar[str] = "mean_i -C(Π_t ρ_t, A_i); A_i = R_i - mean_{j≠i} R_j; R_i includes -β Σ_t k1_t"
    source: ClassVar[str] = "Ahmadian et al. 2024, arXiv 2402.14740, §2.3; Kool et al. 2019"
    advantage: ClassVar[Advantage] = "leave_one_out"
    ratio: ClassVar[Ratio] = "sequence_sum"
    aggregation: ClassVar[Aggregation] = "seq-mean-token-mean"


class Remax(PolicyGradient):
    """REINFORCE with the reward of the greedy answer as baseline: one additional rollout per prompt, one update per batch."""

    type: Literal["remax"]
    aggregation: Aggregation = "seq-mean-token-sum"
    """How token losses are aggregated."""

    formula: ClassVar[str] = "mean_i Σ_t -A_i log π_θ(y_t); A_i = R_i - R(greedy answer)"
    source: ClassVar[str] = "Li et al. 2023, arXiv 2310.10505"
    advantage: ClassVar[Advantage] = "greedy"


class ReinforcePp(Clipped):
    """REINFORCE++: per-token returns, whitened over the whole batch, with PPO's clip; no critic and no groups."""

    type: Literal["reinforce_pp"]
    kl: Kl | None = Kl(estimator="k1", where="reward", coefficient=0.01)
    """Penalty on divergence from the reference; `null` disables it."""
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount per token of later rewards."""
    aggregation: Aggregation = "token-mean"
    """How token losses are aggregated."""

    formula: ClassVar[str] = "1/Σ|y_i| Σ_i Σ_t -C(ρ_t, A_t); A_t = whiten(Σ_{k≥t} γ^{k-t} r_k); r_t = -β k1_t, + R at the last token"
    source: ClassVar[str] = "Hu et al. 2025, arXiv 2501.03262, eqs. 4 and 5"
    advantage: ClassVar[Advantage] = "return_to_go"
    whitened: ClassVar[bool] = True


class ReinforcePpBaseline(Clipped):
    """REINFORCE++ for groups: rewards are centered within their group and whitened over the whole batch."""

    type: Literal["reinforce_pp_baseline"]
    kl: Kl | None = Kl(estimator="k2", where="loss", coefficient=0.01)
    """Penalty on divergence from the reference; `null` disables it."""
    aggregation: Aggregation = "token-mean"
    """How token losses are aggregated."""

    formula: ClassVar[str] = "1/Σ|y_i| Σ_i Σ_t -C(ρ_t, A_i) + β k2_t; A_i = whiten(R_i - mean R)"
    source: ClassVar[str] = "Hu et al. 2025, arXiv 2501.03262, eqs. 6 to 8"
    advantage: ClassVar[Advantage] = "centred"
    whitened: ClassVar[bool] = True


class Critic(Frozen):
    """PPO's value model: a scalar head, computed in fp32, on its own transformer body.

    It is initialized from the reward model at the port `value`, or else from the policy with a new head.
    """

    optimizer: Optimizer = Optimizer(learning_rate=9e-6)
    """Separate optimizer; OpenRLHF trains critics of 8B parameters with learning rate 9e-6."""
    clip: float | None = Field(default=0.2, gt=0)
    """Loss ½ max((V - R̂)², (clip(V, V_old ± clip) - R̂)²); `null`: ½ (V - R̂)²."""
    warmup_steps: int = Field(default=0, ge=0)
    """Initial steps that train only the value model."""


class Ppo(Clipped):
    """Proximal policy optimization: a value model estimates the return at each token."""

    type: Literal["ppo"]
    critic: Critic = Critic()
    """The value model."""
    kl: Kl | None = Kl(estimator="k1", where="reward", coefficient=0.05)
    """Penalty on divergence from the reference; `null` disables it."""
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount per token of later rewards."""
    gae_lambda: float = Field(default=0.95, ge=0, le=1)
    """λ: 1 is the full return minus the value, 0 is one-step."""
    inner_epochs: int = Field(default=4, ge=1)
    """Passes over the mini-batches."""
    aggregation: Aggregation = "token-mean"
    """How token losses are aggregated."""

    formula: ClassVar[str] = (
        "1/Σ|y_i| Σ_i Σ_t -C(ρ_t, A_t); A = whiten(Σ_k (γλ)^k δ_{t+k}); δ_t = r_t + γV_{t+1} - V_t; r_t = -β k1_t, + R at the last token"
    )
    source: ClassVar[str] = "Schulman et al. 2017, arXiv 1707.06347, eq. 7; advantages: arXiv 1506.02438, eq. 16"
    advantage: ClassVar[Advantage] = "gae"
    whitened: ClassVar[bool] = True


Algorithm = Annotated[
    Grpo | DrGrpo | Dapo | Gspo | Cispo | Dcpo | Rloo | Remax | ReinforcePp | ReinforcePpBaseline | Ppo, Field(discriminator="type")
]
