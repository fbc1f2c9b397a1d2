"""Preference-optimization losses, one class each, with formula, source and the paper's defaults.

S(y) = Σ_t log π_θ(y_t | x, y_<t) over the answer's n tokens (including its end-of-turn token), S₀ the same under the reference, r = S - S₀;
w is the better answer of a pair, l the worse; σ the logistic function, ℓ(z) = -log σ(z). The implementations are in
`stages/core/preference_losses.py`.

A pair may be uncertain: P = P(w is better than l). A loss without its own form for that case becomes the expectation P f(w, l) + (1 - P)
f(l, w); `sppo_hard` and `kto`, which require a verdict, reject uncertain pairs.
"""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from pedigree.configs.base.frozen import Frozen


class ReverseKl(Frozen):
    """Reverse KL, KL(π_θ ‖ π₀): the original DPO."""

    formula: ClassVar[str] = "s = r"
    source: ClassVar[str] = "Wang et al. 2023, arXiv 2309.16240, table 1"
    type: Literal["reverse_kl"]


class ForwardKl(Frozen):
    """Forward KL, KL(π₀ ‖ π_θ): mass-covering with respect to the reference."""

    formula: ClassVar[str] = "s = 1 - e^(-r)"
    source: ClassVar[str] = "Wang et al. 2023, arXiv 2309.16240, table 1"
    type: Literal["forward_kl"]


class JensenShannon(Frozen):
    """Jensen-Shannon divergence: bounded, between the two KLs."""

    formula: ClassVar[str] = "s = log 2 + log σ(r)"
    source: ClassVar[str] = "Wang et al. 2023, arXiv 2309.16240, table 1"
    type: Literal["js"]


class Alpha(Frozen):
    """α-divergence: reverse KL as α → 0, forward KL at α = 1."""

    formula: ClassVar[str] = "s = (1 - e^(-α r)) / α"
    source: ClassVar[str] = "Wang et al. 2023, arXiv 2309.16240, table 1"
    type: Literal["alpha"]
    alpha: float = Field(default=0.5, gt=0, le=1)
    """The paper's α; e^(-α r) is computed in fp32 with the exponent capped below 80."""


Divergence = Annotated[ReverseKl | ForwardKl | JensenShannon | Alpha, Field(discriminator="type")]
"""Divergence from the reference: r is replaced by s = f'(π_θ / π₀), up to a constant that cancels in pairs."""


class PairLoss(Frozen):
    """A loss of one pair of answers."""

    reference_free: ClassVar[bool] = False
    """Uses no reference and rejects one."""
    takes_strength: ClassVar[bool] = True
    """Supports uncertain pairs."""


class DivergenceLoss(PairLoss):
    """A loss of s_w - s_l only, in which the unknown β log Z of every f-divergence cancels."""

    beta: float = Field(default=0.1, gt=0)
    """Strength of regularization toward the reference."""
    divergence: Divergence = ReverseKl(type="reverse_kl")
    """Type of divergence; for reverse KL, s in the formula is r."""


class Dpo(DivergenceLoss):
    """Direct preference optimization: logistic loss of the difference of log-ratios."""

    formula: ClassVar[str] = "ℓ(β(s_w - s_l))"
    source: ClassVar[str] = "Rafailov et al. 2023, arXiv 2305.18290, eq. 7; other divergences: Wang et al. 2023, arXiv 2309.16240"
    type: Literal["dpo"]


class Rpo(DivergenceLoss):
    """DPO plus the negative log-likelihood per token of the chosen answer, against likelihood displacement (iterative reasoning)."""

    formula: ClassVar[str] = "ℓ(β(s_w - s_l)) - α S_w / n_w"
    source: ClassVar[str] = "Pang et al. 2024, arXiv 2404.19733, eq. 1"
    type: Literal["rpo"]
    nll_weight: float = Field(default=1.0, gt=0)
    """α: weight of the chosen answer's negative log-likelihood per token."""


class Cdpo(DivergenceLoss):
    """Conservative DPO: assumes that labels are wrong with probability ε."""

    formula: ClassVar[str] = "(1 - ε) ℓ(β(s_w - s_l)) + ε ℓ(-β(s_w - s_l))"
    source: ClassVar[str] = "Mitchell 2023, A note on DPO with noisy preferences & relationship to IPO, eq. 3"
    type: Literal["cdpo"]
    epsilon: float = Field(default=0.1, ge=0, lt=0.5)
    """Assumed share of pairs in the wrong order."""


class Robust(DivergenceLoss):
    """Provably robust DPO: an unbiased estimate of the loss under true labels when a share ε of labels is flipped."""

    formula: ClassVar[str] = "((1 - ε) ℓ(β(s_w - s_l)) - ε ℓ(-β(s_w - s_l))) / (1 - 2ε)"
    source: ClassVar[str] = "Chowdhury et al. 2024, arXiv 2403.00409"
    type: Literal["robust"]
    epsilon: float = Field(default=0.1, ge=0, lt=0.5)
    """Assumed share of pairs in the wrong order."""


class Hinge(DivergenceLoss):
    """Hinge loss of the difference of log-ratios, as in statistical rejection sampling (RSO) after SLiC."""

    formula: ClassVar[str] = "max(0, 1 - β(s_w - s_l))"
    source: ClassVar[str] = "Liu et al. 2023, arXiv 2309.06657 (RSO), after Zhao et al. 2023, arXiv 2305.10425 (SLiC-HF)"
    type: Literal["hinge"]
    beta: float = Field(default=0.05, gt=0)
    """The paper's γ."""


class DpoNorm(PairLoss):
    """DPO with log-ratios per token, so that long answers have no more weight than short ones."""

    formula: ClassVar[str] = "ℓ(β(r_w / n_w - r_l / n_l))"
    source: ClassVar[str] = "Lambert et al. 2024, arXiv 2411.15124 (Tülu 3), eq. 6"
    type: Literal["dpo_norm"]
    beta: float = Field(default=5.0, gt=0)
    """Strength of regularization toward the reference, for log-ratios per token."""


class IpoMean(PairLoss):
    """Identity preference optimization with log-ratios per token, as in TRL."""

    formula: ClassVar[str] = "(r_w / n_w - r_l / n_l - 1 / (2β))²"
    source: ClassVar[str] = "Azar et al. 2023, arXiv 2310.12036, eq. 17, per token"
    type: Literal["ipo_mean"]
    beta: float = Field(default=0.1, gt=0)
    """The paper's τ; 1 / (2β) is the target gap in nats per token."""


class IpoSum(PairLoss):
    """Identity preference optimization with summed log-ratios, as in the paper."""

    formula: ClassVar[str] = "(r_w - r_l - 1 / (2β))²"
    source: ClassVar[str] = "Azar et al. 2023, arXiv 2310.12036, eq. 17"
    type: Literal["ipo_sum"]
    beta: float = Field(default=0.1, gt=0)
    """The paper's τ; 1 / (2β) is the target gap in nats per answer, so values do not carry over to `ipo_mean`."""


class ApoZero(PairLoss):
    """Anchored preference optimization for chosen answers better than the policy's: raises the chosen, lowers the rejected."""

    formula: ClassVar[str] = "(1 - σ(β r_w)) + σ(β r_l)"
    source: ClassVar[str] = "D'Oosterlinck et al. 2024, arXiv 2408.06266, eq. 7"
    type: Literal["apo_zero"]
    beta: float = Field(default=0.1, gt=0)
    """Scale of the log-ratios."""


class ApoDown(PairLoss):
    """Anchored preference optimization for a policy better than both answers: lowers both, the rejected more."""

    formula: ClassVar[str] = "σ(β r_w) + (1 - σ(β(r_w - r_l)))"
    source: ClassVar[str] = "D'Oosterlinck et al. 2024, arXiv 2408.06266, eq. 8"
    type: Literal["apo_down"]
    beta: float = Field(default=0.1, gt=0)
    """Scale of the log-ratios."""


class SppoHard(PairLoss):
    """Self-play preference optimization with a hard verdict: the chosen answer wins with probability 1."""

    formula: ClassVar[str] = "(r_w - 1 / (2β))² + (r_l + 1 / (2β))²"
    source: ClassVar[str] = "Wu et al. 2024, arXiv 2405.00675, eq. 4.7 with P = 1"
    takes_strength: ClassVar[bool] = False
    type: Literal["sppo_hard"]
    beta: float = Field(default=1e-3, gt=0)
    """1 / η in the paper."""


class SppoSoft(PairLoss):
    """Self-play preference optimization: each log-ratio is regressed on the margin of its answer's win rate over ½.

    P_w and P_l are the answers' `win_rate`, which `judge` estimates over all answers to the prompt and `pair` passes on; for a pair with
    only a `strength` they are P and 1 - P. A pair with neither is an error.
    """

    formula: ClassVar[str] = "(r_w - (P_w - ½) / β)² + (r_l - (P_l - ½) / β)²"
    source: ClassVar[str] = "Wu et al. 2024, arXiv 2405.00675, eq. 4.7; P over K sampled answers: algorithm 1"
    type: Literal["sppo_soft"]
    beta: float = Field(default=1e-3, gt=0)
    """1 / η in the paper."""


class Simpo(PairLoss):
    """SimPO: log-probabilities per token with a target margin, reference-free."""

    formula: ClassVar[str] = "ℓ(β(S_w / n_w - S_l / n_l) - γ)"
    source: ClassVar[str] = "Meng et al. 2024, arXiv 2405.14734, eq. 6"
    reference_free: ClassVar[bool] = True
    type: Literal["simpo"]
    beta: float = Field(default=2.0, gt=0)
    """Scale of the log-probabilities per token."""
    gamma: float = Field(default=1.0, ge=0)
    """Target margin; the paper uses 0.3 to 1.6 for β of 2 to 2.5."""


class Cpo(PairLoss):
    """Contrastive preference optimization: DPO without a reference, plus the negative log-likelihood per token of the chosen answer."""

    formula: ClassVar[str] = "ℓ(β(S_w - S_l)) - α S_w / n_w"
    source: ClassVar[str] = "Xu et al. 2024, arXiv 2401.08417, eq. 3 and the likelihood that it adds, here per token"
    reference_free: ClassVar[bool] = True
    type: Literal["cpo"]
    beta: float = Field(default=0.1, gt=0)
    """Scale of the log-probabilities."""
    nll_weight: float = Field(default=1.0, gt=0)
    """α: weight of the chosen answer's negative log-likelihood per token."""


class Orpo(PairLoss):
    """Odds-ratio preference optimization: the likelihood of the chosen answer, plus its odds ratio against the rejected one."""

    formula: ClassVar[str] = "-S_w / n_w + λ ℓ(o_w - o_l),  o = p - log(1 - e^p),  p = S / n"
    source: ClassVar[str] = "Hong et al. 2024, arXiv 2403.07691, eqs. 6 and 7"
    reference_free: ClassVar[bool] = True
    type: Literal["orpo"]
    odds_weight: float = Field(default=0.1, gt=0)
    """λ: weight of the odds-ratio term."""


class Kto(Frozen):
    """Kahneman-Tversky optimization of single answers, desirable (D) or undesirable (U), against an estimate z₀ of the KL.

    z₀ is the mean log-ratio of the batch's answers paired with other prompts of the batch, clamped at 0, without gradient. A pair yields
    one desirable and one undesirable answer; a single scored answer is desirable above `threshold`. A step whose answers all have one
    prompt has z₀ = 0: `steps_without_kl` counts them in the metrics, and training with only such steps is refused.
    """

    formula: ClassVar[str] = "λ_D (1 - σ(β(r - z₀))) for desirable answers, λ_U (1 - σ(β(z₀ - r))) for undesirable ones"
    source: ClassVar[str] = "Ethayarajh et al. 2024, arXiv 2402.01306, eq. 8 (eq. 7 of its first version)"
    reference_free: ClassVar[bool] = False
    takes_strength: ClassVar[bool] = False
    type: Literal["kto"]
    beta: float = Field(default=0.1, gt=0)
    """Strength of regularization toward the reference."""
    desirable_weight: float = Field(default=1.0, gt=0)
    """λ_D; the paper keeps λ_D n_D / (λ_U n_U) between 1 and 3/2 (its first version: 4/3)."""
    undesirable_weight: float = Field(default=1.0, gt=0)
    """λ_U."""
    threshold: float = 0.5
    """Score above which a single answer is desirable."""


PreferenceLoss = Annotated[
    Dpo | DpoNorm | Rpo | Cdpo | Robust | Hinge | IpoMean | IpoSum | ApoZero | ApoDown | SppoHard | SppoSoft | Simpo | Cpo | Orpo | Kto,
    Field(discriminator="type"),
]
"""The losses of `preference_train`."""
