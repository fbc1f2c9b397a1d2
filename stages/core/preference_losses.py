"""Losses of preference optimization and reward models: pure functions of log-probabilities and scores, in the symbols of
`configs/methods/preference.py`.

Each returns a SUM over its pairs or answers and the sums behind its metrics; the caller divides once, by the count of the
global batch over all ranks, so that splitting a batch into micro-batches does not change the gradient. All inputs are fp32.
Shapes: P pairs, A answers.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, softplus

from pedigree.configs.methods import preference as losses
from pedigree.stages.core.batches import Document, document

Sums = dict[str, Tensor]
MAX_EXPONENT = 80.0
"""e^80 = 5.5e34 is still a float32."""


@dataclass(frozen=True)
class Answers:
    """One answer of each pair, or single answers."""

    logps: Tensor
    """S = Σ_t log π_θ(y_t)."""
    reference: Tensor | None
    """S₀, the same under the reference; None for losses without one."""
    lengths: Tensor
    """n, in tokens."""
    entropies: Tensor | None = None
    """Σ_t of the entropy of π_θ(· | y_<t) in nats, without gradient; None unless computed."""

    @property
    def ratios(self) -> Tensor:
        """r = S - S₀."""
        if self.reference is None:
            raise ValueError("the loss requires reference log-probabilities, which these answers lack")
        return self.logps - self.reference

    @property
    def mean_ratios(self) -> Tensor:
        """r / n."""
        return self.ratios / self.lengths

    @property
    def mean_logps(self) -> Tensor:
        """S / n."""
        return self.logps / self.lengths

    def select(self, places: slice | Tensor) -> "Answers":
        reference = None if self.reference is None else self.reference[places]
        entropies = None if self.entropies is None else self.entropies[places]
        return Answers(self.logps[places], reference, self.lengths[places], entropies)

    def at_reference(self) -> "Answers":
        """The answers as if the policy equaled the reference, without gradient."""
        return self if self.reference is None else replace(self, logps=self.reference)


def pair_loss(
    loss: losses.PairLoss,
    chosen: Answers,
    rejected: Answers,
    strength_P: Tensor | None = None,
    win_rates_P2: Tensor | None = None,
) -> tuple[Tensor, Sums]:
    """Σ over pairs of a loss, and the sums behind its metrics.

    Args:
        chosen: the better answers, with reference log-probabilities unless the loss is reference-free.
        rejected: the worse answers.
        strength_P: P(chosen is better than rejected); None if all are certain.
        win_rates_P2: SPPO: P(better than the policy's answers) of chosen and rejected.

    Raises:
        ValueError: strengths for a loss that takes only certain pairs, or no win rates for a loss that requires them.
    """
    if isinstance(loss, losses.SppoSoft):
        if win_rates_P2 is None:
            raise ValueError("sppo_soft requires win rates")
        loss_P, margin_P = sppo_soft(loss, chosen, rejected, win_rates_P2)
    else:
        loss_P, margin_P = PAIR_LOSSES[type(loss)](loss, chosen, rejected)
        if strength_P is not None:
            if not loss.takes_strength:
                raise ValueError(f"{type(loss).__name__} takes no uncertain pairs")
            swapped_P, _ = PAIR_LOSSES[type(loss)](loss, rejected, chosen)
            loss_P = strength_P * loss_P + (1 - strength_P) * swapped_P
    sums = {"accuracy": (margin_P > 0).float().sum(), "margin": margin_P.sum(), **_sums("chosen", chosen), **_sums("rejected", rejected)}
    return loss_P.sum(), {name: value.detach() for name, value in sums.items()}


def bradley_terry(chosen_P: Tensor, rejected_P: Tensor, margin_P: Tensor, strength_P: Tensor, centering: float) -> tuple[Tensor, Sums]:
    """Σ -p log σ(z) - (1 - p) log σ(-z) + c (s_w + s_l)², z = s_w - s_l - m  (Bradley & Terry 1952; margin m: Llama 2, arXiv
    2307.09288, eq. 2; centering c: arXiv 2312.09244, eq. 2).

    With p = P(w is better) = 1 it is -log σ(z). A pair read backwards (w and l exchanged, 1 - p, -m) has the same loss.
    """
    gap_P = chosen_P - rejected_P
    z_P = gap_P - margin_P
    loss = -strength_P * logsigmoid(z_P) - (1 - strength_P) * logsigmoid(-z_P) + centering * (chosen_P + rejected_P) ** 2
    return loss.sum(), {"accuracy": (gap_P > 0).float().sum().detach(), "margin": gap_P.sum().detach()}


def kto(loss: losses.Kto, answers: Answers, desirable_A: Tensor, z0: Tensor | float) -> tuple[Tensor, Sums]:
    """Σ λ_D (1 - σ(β(r - z₀))) over good answers + λ_U (1 - σ(β(z₀ - r))) over bad ones  (arXiv 2402.01306, eq. 8).

    Args:
        desirable_A: which are good (bool).
        z0: estimate of the KL over the global batch, see `mismatched`; at least 0, without gradient.
    """
    sign_A = torch.where(desirable_A, 1.0, -1.0)
    weight_A = torch.where(desirable_A, loss.desirable_weight, loss.undesirable_weight)
    gain_A = sign_A * (answers.ratios - z0)
    loss_sum = (weight_A * torch.sigmoid(-loss.beta * gain_A)).sum()
    sums = {
        "accuracy": (gain_A > 0).float().sum(),
        **_sums("chosen", answers, desirable_A.float()),
        **_sums("rejected", answers, (~desirable_A).float()),
    }
    return loss_sum, {name: value.detach() for name, value in sums.items()}


def mismatched(documents: Sequence[Document], max_length: int) -> list[Document]:
    """Answers paired with the prompts of other documents, on which KTO estimates its KL.

    Documents are grouped by prompt, and the answers rotated by the largest number of answers to one prompt, so that each answer follows
    exactly one prompt that is not its own. If one prompt has more than half of the answers, those that would still follow it are
    dropped; a batch with a single prompt gives none. Documents are truncated at `max_length`.
    """
    by_prompt: dict[tuple[int, ...], list[Document]] = {}
    for doc in documents:
        by_prompt.setdefault(_split(doc)[0], []).append(doc)
    ordered = [_split(doc) for docs in by_prompt.values() for doc in docs]
    turn = max((len(docs) for docs in by_prompt.values()), default=0)
    found = []
    for place, (prompt, _) in enumerate(ordered):
        own, answer = ordered[place - turn]
        if own != prompt:
            found.append(document(prompt, answer).cut(max_length))
    return found


def _split(doc: Document) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(prompt ids, answer ids)."""
    ids, border = tuple(doc.ids.tolist()), doc.prompt_length
    return ids[:border], ids[border:]


def means(sums: Mapping[str, float], count: int, counts: Mapping[str, int]) -> dict[str, float]:
    """Metrics of a global batch: sums divided by `count`, and those of one side ("chosen_...") by that side's count in `counts`.

    A side without answers is omitted.
    """
    shares = {name: counts.get(name.partition("_")[0], count) for name in sums}
    return {name: value / shares[name] for name, value in sums.items() if shares[name]}


def _sums(side: str, answers: Answers, weight_A: Tensor | None = None) -> Sums:
    """Log-probabilities of each side, so that the curve shows if both fall (likelihood displacement); entropy per token."""
    values = {"logp": answers.logps, "length": answers.lengths}
    if answers.reference is not None:
        values["ratio"] = answers.ratios
    if answers.entropies is not None:
        values["entropy"] = answers.entropies / answers.lengths
    return {f"{side}_{name}": (value if weight_A is None else value * weight_A).sum() for name, value in values.items()}


def log1mexp(x: Tensor) -> Tensor:
    """log(1 - e^x) for x < 0, exact near both ends (Mächler 2012, eq. 7); x is clamped to at most -1.2e-7."""
    x = x.clamp(max=-torch.finfo(x.dtype).eps)
    return torch.where(x > -math.log(2), torch.log(-torch.expm1(x)), torch.log1p(-torch.exp(x)))


def divergence_score(divergence: losses.Divergence, ratios: Tensor) -> Tensor:
    """s = f'(e^r) - f'(1), which replaces r for a divergence other than reverse KL (arXiv 2309.16240, table 1)."""
    match divergence:
        case losses.ReverseKl():
            return ratios
        case losses.ForwardKl():
            return -torch.expm1((-ratios).clamp(max=MAX_EXPONENT))
        case losses.JensenShannon():
            return math.log(2) + logsigmoid(ratios)
        case losses.Alpha(alpha=alpha):
            return -torch.expm1((-alpha * ratios).clamp(max=MAX_EXPONENT)) / alpha


def _divergence_margin(loss: losses.DivergenceLoss, chosen: Answers, rejected: Answers) -> Tensor:
    return loss.beta * (divergence_score(loss.divergence, chosen.ratios) - divergence_score(loss.divergence, rejected.ratios))


Pairwise = tuple[Tensor, Tensor]
"""(loss of each pair, margin of each pair: positive if the policy prefers the chosen answer), both (P,)."""


def dpo(loss: losses.Dpo, chosen: Answers, rejected: Answers) -> Pairwise:
    margin = _divergence_margin(loss, chosen, rejected)
    return softplus(-margin), margin


def rpo(loss: losses.Rpo, chosen: Answers, rejected: Answers) -> Pairwise:
    margin = _divergence_margin(loss, chosen, rejected)
    return softplus(-margin) - loss.nll_weight * chosen.mean_logps, margin


def cdpo(loss: losses.Cdpo, chosen: Answers, rejected: Answers) -> Pairwise:
    margin = _divergence_margin(loss, chosen, rejected)
    return (1 - loss.epsilon) * softplus(-margin) + loss.epsilon * softplus(margin), margin


def robust(loss: losses.Robust, chosen: Answers, rejected: Answers) -> Pairwise:
    margin = _divergence_margin(loss, chosen, rejected)
    return ((1 - loss.epsilon) * softplus(-margin) - loss.epsilon * softplus(margin)) / (1 - 2 * loss.epsilon), margin


def hinge(loss: losses.Hinge, chosen: Answers, rejected: Answers) -> Pairwise:
    margin = _divergence_margin(loss, chosen, rejected)
    return torch.relu(1 - margin), margin


def dpo_norm(loss: losses.DpoNorm, chosen: Answers, rejected: Answers) -> Pairwise:
    margin = loss.beta * (chosen.mean_ratios - rejected.mean_ratios)
    return softplus(-margin), margin


def ipo_mean(loss: losses.IpoMean, chosen: Answers, rejected: Answers) -> Pairwise:
    gap = chosen.mean_ratios - rejected.mean_ratios
    return (gap - 1 / (2 * loss.beta)) ** 2, loss.beta * gap


def ipo_sum(loss: losses.IpoSum, chosen: Answers, rejected: Answers) -> Pairwise:
    gap = chosen.ratios - rejected.ratios
    return (gap - 1 / (2 * loss.beta)) ** 2, loss.beta * gap


def apo_zero(loss: losses.ApoZero, chosen: Answers, rejected: Answers) -> Pairwise:
    up, down = loss.beta * chosen.ratios, loss.beta * rejected.ratios
    return torch.sigmoid(-up) + torch.sigmoid(down), up - down


def apo_down(loss: losses.ApoDown, chosen: Answers, rejected: Answers) -> Pairwise:
    margin = loss.beta * (chosen.ratios - rejected.ratios)
    return torch.sigmoid(loss.beta * chosen.ratios) + torch.sigmoid(-margin), margin


def sppo_hard(loss: losses.SppoHard, chosen: Answers, rejected: Answers) -> Pairwise:
    goal = 1 / (2 * loss.beta)
    return (chosen.ratios - goal) ** 2 + (rejected.ratios + goal) ** 2, loss.beta * (chosen.ratios - rejected.ratios)


def sppo_soft(loss: losses.SppoSoft, chosen: Answers, rejected: Answers, win_rates_P2: Tensor) -> Pairwise:
    goal_P2 = (win_rates_P2 - 0.5) / loss.beta
    loss_P = (chosen.ratios - goal_P2[:, 0]) ** 2 + (rejected.ratios - goal_P2[:, 1]) ** 2
    return loss_P, loss.beta * (chosen.ratios - rejected.ratios)


def simpo(loss: losses.Simpo, chosen: Answers, rejected: Answers) -> Pairwise:
    margin = loss.beta * (chosen.mean_logps - rejected.mean_logps)
    return softplus(loss.gamma - margin), margin


def cpo(loss: losses.Cpo, chosen: Answers, rejected: Answers) -> Pairwise:
    margin = loss.beta * (chosen.logps - rejected.logps)
    return softplus(-margin) - loss.nll_weight * chosen.mean_logps, margin


def orpo(loss: losses.Orpo, chosen: Answers, rejected: Answers) -> Pairwise:
    p_w, p_l = chosen.mean_logps, rejected.mean_logps
    log_odds_ratio = (p_w - p_l) - (log1mexp(p_w) - log1mexp(p_l))
    return -p_w + loss.odds_weight * softplus(-log_odds_ratio), log_odds_ratio


PAIR_LOSSES: dict[type[losses.PairLoss], Callable[[Any, Answers, Answers], Pairwise]] = {
    losses.Dpo: dpo,
    losses.Rpo: rpo,
    losses.Cdpo: cdpo,
    losses.Robust: robust,
    losses.Hinge: hinge,
    losses.DpoNorm: dpo_norm,
    losses.IpoMean: ipo_mean,
    losses.IpoSum: ipo_sum,
    losses.ApoZero: apo_zero,
    losses.ApoDown: apo_down,
    losses.SppoHard: sppo_hard,
    losses.Simpo: simpo,
    losses.Cpo: cpo,
    losses.Orpo: orpo,
}
