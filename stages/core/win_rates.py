"""How often an answer wins against the answers that were sampled to the same prompt."""

import math
from collections.abc import Sequence


def win_rates(scores: Sequence[float], scale: float | None) -> list[float]:
    """P(y_i beats the policy) = 1/K Σ_k P(y_i beats y_k) over the K answers to a prompt, with P(y_i beats y_k) = σ(scale (s_i - s_k)).

    Wu et al. 2024, arXiv 2405.00675, algorithm 1; that y_i itself is among the K is from the authors' program (uclaml/SPPO,
    scripts/compute_prob.py). The probability of one answer against another is that of Bradley & Terry 1952.

    Args:
        scores: s_1 … s_K.
        scale: logits per unit of score; None where scores are verdicts, so that the higher one wins for certain.
    """
    return [sum(_wins(own - other, scale) for other in scores) / len(scores) for own in scores]


def _wins(gap: float, scale: float | None) -> float:
    if scale is None:
        return 0.5 if gap == 0 else float(gap > 0)
    return 0.5 * (1 + math.tanh(0.5 * scale * gap))  # σ(x), without overflow
