"""Losses of SFT and reward models: pure functions of log-probabilities, in the papers' symbols.

Each returns a SUM over its tokens or pairs and the sums behind its metrics; the caller divides once, by the count of the
global batch over all ranks, so that splitting a batch into micro-batches does not change the gradient. All inputs are fp32.
"""

from torch import Tensor
from torch.nn.functional import logsigmoid

Sums = dict[str, Tensor]


def sft(logps_N: Tensor) -> Tensor:
    """Σ_t -log π(y_t)."""
    return -logps_N.sum()


def bradley_terry(chosen_P: Tensor, rejected_P: Tensor, margin_P: Tensor, strength_P: Tensor, centering: float) -> tuple[Tensor, Sums]:
    """Σ -p log σ(z) - (1 - p) log σ(-z) + c (s_w + s_l)², z = s_w - s_l - m  (Bradley & Terry 1952; margin m: Llama 2, arXiv
    2307.09288, eq. 2; centering c: arXiv 2312.09244, eq. 2).

    With p = P(w is better) = 1 it is -log σ(z). A pair read backwards (w and l exchanged, 1 - p, -m) has the same loss.
    """
    gap_P = chosen_P - rejected_P
    z_P = gap_P - margin_P
    loss = -strength_P * logsigmoid(z_P) - (1 - strength_P) * logsigmoid(-z_P) + centering * (chosen_P + rejected_P) ** 2
    return loss.sum(), {"accuracy": (gap_P > 0).float().sum().detach(), "margin": gap_P.sum().detach()}
