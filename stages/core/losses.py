"""Losses of SFT and reward models: pure functions of log-probabilities, in the papers' symbols.

Each returns a SUM over its tokens or pairs and the sums behind its metrics; the caller divides once, by the count of the whole
global batch over all ranks, so that no cut into micro-batches changes the gradient. All inputs are fp32.
"""

from torch import Tensor
from torch.nn.functional import logsigmoid

Sums = dict[str, Tensor]


def sft(logps_N: Tensor) -> Tensor:
    """Σ_t -log π(y_t)."""
    return -logps_N.sum()


def bradley_terry(chosen_P: Tensor, rejected_P: Tensor, centering: float) -> tuple[Tensor, Sums]:
    """Σ -log σ(s_w - s_l) + c (s_w + s_l)²  (Bradley & Terry 1952; centering: arXiv 2312.09244, eq. 2)."""
    margin = chosen_P - rejected_P
    loss = -logsigmoid(margin) + centering * (chosen_P + rejected_P) ** 2
    return loss.sum(), {"accuracy": (margin > 0).float().sum().detach(), "margin": margin.sum().detach()}
