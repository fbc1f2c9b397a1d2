"""Losses of preference optimisation, each a class with its formula, its source and the paper's defaults.

S(y) = Σ_t log π_θ(y_t | x, y_<t) over the answer's n tokens (its end-of-turn token included), S₀ the same under the reference,
r = S - S₀; w is the better answer of a pair, l the worse; σ the logistic function, ℓ(z) = -log σ(z). The functions themselves are
in `stages/core/preference.py`.

A pair may be uncertain: P = P(w is better than l). A loss without a form of its own for that becomes its expectation
P f(w, l) + (1 - P) f(l, w); `sppo_hard` and `kto`, which ask for a verdict, refuse.
"""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from configs.base.frozen import Frozen


class ReverseKl(Frozen):
    """Reverse KL, KL(π_θ ‖ π₀): DPO as it was published."""

    formula: ClassVar[str] = "s = r"
    source: ClassVar[str] = "Wang et al. 2023, arXiv 2309.16240, table 1"
    type: Literal["reverse_kl"]


class ForwardKl(Frozen):
    """Forward KL, KL(π₀ ‖ π_θ), which keeps mass wherever the reference has some."""

    formula: ClassVar[str] = "s = 1 - e^(-r)"
    source: ClassVar[str] = "Wang et al. 2023, arXiv 2309.16240, table 1"
    type: Literal["forward_kl"]


class JensenShannon(Frozen):
    """Jensen-Shannon divergence, bounded and between the two KLs."""

    formula: ClassVar[str] = "s = log 2 + log σ(r)"
    source: ClassVar[str] = "Wang et al. 2023, arXiv 2309.16240, table 1"
    type: Literal["js"]


class Alpha(Frozen):
    """α-divergence: reverse KL for α → 0, forward KL at α = 1."""

    formula: ClassVar[str] = "s = (1 - e^(-α r)) / α"
    source: ClassVar[str] = "Wang et al. 2023, arXiv 2309.16240, table 1"
    type: Literal["alpha"]
    alpha: float = Field(default=0.5, gt=0, le=1)
    """The paper's α; e^(-α r) is computed in fp32 with its exponent held below 80."""


Divergence = Annotated[ReverseKl | ForwardKl | JensenShannon | Alpha, Field(discriminator="type")]
"""What holds the policy to its reference: r is replaced by s = f'(π_θ / π₀), up to a constant that pairs cancel."""


class PairLoss(Frozen):
    """A loss of one pair of answers."""

    reference_free: ClassVar[bool] = False
    """It reads no reference, and refuses one."""
    takes_strength: ClassVar[bool] = True
    """It can be asked about uncertain pairs."""


class DivergenceLoss(PairLoss):
    """A loss of s_w - s_l alone, in which the unknown β log Z of every f-divergence cancels."""

    beta: float = Field(default=0.1, gt=0)
    """Strength of the hold on the reference."""
    divergence: Divergence = ReverseKl(type="reverse_kl")
    """Which one holds; s in the formula is r for reverse KL."""


class Dpo(DivergenceLoss):
    """Direct preference optimisation: logistic loss of the difference of log-ratios."""

    formula: ClassVar[str] = "ℓ(β(s_w - s_l))"
    source: ClassVar[str] = "Rafailov et al. 2023, arXiv 2305.18290, eq. 7; other divergences: Wang et al. 2023, arXiv 2309.16240"
    type: Literal["dpo"]


class Rpo(DivergenceLoss):
    """DPO plus the chosen answer's negative log-likelihood per token, against likelihood displacement (iterative reasoning)."""

    formula: ClassVar[str] = "ℓ(β(s_w - s_l)) - α S_w / n_w"
    source: ClassVar[str] = "Pang et al. 2024, arXiv 2404.19733, eq. 1"
    type: Literal["rpo"]
    nll_weight: float = Field(default=1.0, gt=0)
    """α: weight of the chosen answer's negative log-likelihood per token."""


class Cdpo(DivergenceLoss):
    """Conservative DPO: labels are wrong with probability ε."""

    formula: ClassVar[str] = "(1 - ε) ℓ(β(s_w - s_l)) + ε ℓ(-β(s_w - s_l))"
    source: ClassVar[str] = "Mitchell 2023, A note on DPO with noisy preferences & relationship to IPO, eq. 3"
    type: Literal["cdpo"]
    epsilon: float = Field(default=0.1, ge=0, lt=0.5)
    """Share of pairs whose order is taken to be wrong."""


class Robust(DivergenceLoss):
    """Provably robust DPO: an unbiased estimate of the loss under true labels, when a share ε is flipped."""

    formula: ClassVar[str] = "((1 - ε) ℓ(β(s_w - s_l)) - ε ℓ(-β(s_w - s_l))) / (1 - 2ε)"
    source: ClassVar[str] = "Chowdhury et al. 2024, arXiv 2403.00409"
    type: Literal["robust"]
    epsilon: float = Field(default=0.1, ge=0, lt=0.5)
    """Share of pairs whose order is taken to be wrong."""


class Hinge(DivergenceLoss):
    """Hinge loss of the difference of log-ratios, as in statistical rejection sampling (RSO) after SLiC."""

    formula: ClassVar[str] = "max(0, 1 - β(s_w - s_l))"
    source: ClassVar[str] = "Liu et al. 2023, arXiv 2309.06657 (RSO), after Zhao et al. 2023, arXiv 2305.10425 (SLiC-HF)"
    type: Literal["hinge"]
    beta: float = Field(default=0.05, gt=0)
    """The paper's γ."""


class DpoNorm(PairLoss):
    """DPO of log-ratios per token, so that long answers weigh no more than short ones."""

    formula: ClassVar[str] = "ℓ(β(r_w / n_w - r_l / n_l))"
    source: ClassVar[str] = "Lambert et al. 2024, arXiv 2411.15124 (Tülu 3), eq. 6"
    type: Literal["dpo_norm"]
    beta: float = Field(default=5.0, gt=0)
    """Strength of the hold on the reference, for log-ratios per token."""


class IpoMean(PairLoss):
    """Identity preference optimisation of log-ratios per token, the form that TRL computes."""

    formula: ClassVar[str] = "(r_w / n_w - r_l / n_l - 1 / (2β))²"
    source: ClassVar[str] = "Azar et al. 2023, arXiv 2310.12036, eq. 17, per token"
    type: Literal["ipo_mean"]
    beta: float = Field(default=0.1, gt=0)
    """The paper's τ; 1 / (2β) is the wanted gap in nats per token."""


class IpoSum(PairLoss):
    """Identity preference optimisation of summed log-ratios, as the paper's equation reads."""

    formula: ClassVar[str] = "(r_w - r_l - 1 / (2β))²"
    source: ClassVar[str] = "Azar et al. 2023, arXiv 2310.12036, eq. 17"
    type: Literal["ipo_sum"]
    beta: float = Field(default=0.1, gt=0)
    """The paper's τ; 1 / (2β) is the wanted gap in nats per answer: no value suits `ipo_mean` too."""


class ApoZero(PairLoss):
    """Anchored preference optimisation where chosen answers are better than the policy's: raises them, lowers the rejected."""

    formula: ClassVar[str] = "(1 - σ(β r_w)) + σ(β r_l)"
    source: ClassVar[str] = "D'Oosterlinck et al. 2024, arXiv 2408.06266, eq. 7"
    type: Literal["apo_zero"]
    beta: float = Field(default=0.1, gt=0)


class ApoDown(PairLoss):
    """Anchored preference optimisation where the policy is better than both answers: lowers both, the rejected more."""

    formula: ClassVar[str] = "σ(β r_w) + (1 - σ(β(r_w - r_l)))"
    source: ClassVar[str] = "D'Oosterlinck et al. 2024, arXiv 2408.06266, eq. 8"
    type: Literal["apo_down"]
    beta: float = Field(default=0.1, gt=0)


class SppoHard(PairLoss):
    """Self-play preference optimisation with a verdict: the chosen answer wins with probability 1."""

    formula: ClassVar[str] = "(r_w - 1 / (2β))² + (r_l + 1 / (2β))²"
    source: ClassVar[str] = "Wu et al. 2024, arXiv 2405.00675, eq. 4.7 with P = 1"
    takes_strength: ClassVar[bool] = False
    type: Literal["sppo_hard"]
    beta: float = Field(default=1e-3, gt=0)
    """1 / η of the paper."""


class SppoSoft(PairLoss):
    """Self-play preference optimisation: each log-ratio goes to how much more often than not its answer wins.

    P_w and P_l are the answers' `win_rate`, which `judge` estimates over all answers to the prompt and `pair` hands on; of a pair that has
    a `strength` alone they are P and 1 - P. A pair with neither is refused.
    """

    formula: ClassVar[str] = "(r_w - (P_w - ½) / β)² + (r_l - (P_l - ½) / β)²"
    source: ClassVar[str] = "Wu et al. 2024, arXiv 2405.00675, eq. 4.7; P over K sampled answers: algorithm 1"
    type: Literal["sppo_soft"]
    beta: float = Field(default=1e-3, gt=0)
    """1 / η of the paper."""


class Simpo(PairLoss):
    """SimPO: log-probabilities per token with a target margin, without a reference."""

    formula: ClassVar[str] = "ℓ(β(S_w / n_w - S_l / n_l) - γ)"
    source: ClassVar[str] = "Meng et al. 2024, arXiv 2405.14734, eq. 6"
    reference_free: ClassVar[bool] = True
    type: Literal["simpo"]
    beta: float = Field(default=2.0, gt=0)
    """Scale of the log-probabilities per token."""
    gamma: float = Field(default=1.0, ge=0)
    """Target margin; the paper takes 0.3 to 1.6 for β of 2 to 2.5."""


class Cpo(PairLoss):
    """Contrastive preference optimisation: DPO without a reference, plus the chosen answer's negative log-likelihood per token."""

    formula: ClassVar[str] = "ℓ(β(S_w - S_l)) - α S_w / n_w"
    source: ClassVar[str] = "Xu et al. 2024, arXiv 2401.08417, eq. 3 and the likelihood that it adds, here per token"
    reference_free: ClassVar[bool] = True
    type: Literal["cpo"]
    beta: float = Field(default=0.1, gt=0)
    """Scale of the log-probabilities."""
    nll_weight: float = Field(default=1.0, gt=0)
    """α: weight of the chosen answer's negative log-likelihood per token."""


class Orpo(PairLoss):
    """Odds-ratio preference optimisation: the likelihood of the chosen answer, and its odds against the rejected one."""

    formula: ClassVar[str] = "-S_w / n_w + λ ℓ(o_w - o_l),  o = p - log(1 - e^p),  p = S / n"
    source: ClassVar[str] = "Hong et al. 2024, arXiv 2403.07691, eqs. 6 and 7"
    reference_free: ClassVar[bool] = True
    type: Literal["orpo"]
    odds_weight: float = Field(default=0.1, gt=0)
    """λ: weight of the odds-ratio term."""


class Kto(Frozen):
    """Kahneman-Tversky optimisation of single answers that are good (D) or bad (U), against an estimate z₀ of the KL.

    z₀ is the mean log-ratio of the batch's answers after other prompts of the batch, at least 0, and carries no gradient.
    A pair gives one good and one bad answer; a scored single is good above `threshold`.
    """

    formula: ClassVar[str] = "λ_D (1 - σ(β(r - z₀))) for good answers, λ_U (1 - σ(β(z₀ - r))) for bad ones"
    source: ClassVar[str] = "Ethayarajh et al. 2024, arXiv 2402.01306, eq. 8 (eq. 7 of its first version)"
    reference_free: ClassVar[bool] = False
    takes_strength: ClassVar[bool] = False
    type: Literal["kto"]
    beta: float = Field(default=0.1, gt=0)
    """Strength of the hold on the reference."""
    desirable_weight: float = Field(default=1.0, gt=0)
    """λ_D; the paper keeps λ_D n_D / (λ_U n_U) between 1 and 3/2 (its first version: 4/3)."""
    undesirable_weight: float = Field(default=1.0, gt=0)
    """λ_U."""
    threshold: float = 0.5
    """An answer given alone is good when its score is above."""


PreferenceLoss = Annotated[
    Dpo | DpoNorm | Rpo | Cdpo | Robust | Hinge | IpoMean | IpoSum | ApoZero | ApoDown | SppoHard | SppoSoft | Simpo | Cpo | Orpo | Kto,
    Field(discriminator="type"),
]
"""The losses of `preference_train`."""
