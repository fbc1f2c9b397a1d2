"""The load-balancing loss of a mixture of experts, and how evenly its routers load the experts.

    L + c · E Σ_i f_i P_i        Fedus et al. 2021, arXiv 2101.03961, eq. 4-6

E experts, of which a token takes k; over all tokens in all mixture layers, f_i is the number of choices of expert i per token (Σ f = k, no
gradient), and P_i the mean probability that the router gives it. All layers are one sum, as in transformers' `load_balancing_loss_func`.

f and P are those of the global batch (as in Qiu et al. 2025, arXiv 2501.11873). P is a mean, so micro-batches add up; f must be known
before the first backward pass. A step of several passes per rank therefore computes all but the first of them once more, beforehand and
without a gradient, and ranks exchange counts.

A token counts once for each document that contains it, so a prompt that answers share counts as often as if each repeated it. Padding does
not count, nor do idle passes; a layer that is recomputed in the backward pass is not recorded again.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from pedigree.stages.core.batches import MicroBatch
from pedigree.stages.job.failures import StageError
from pedigree.stages.training.trainer import Trainer

AUX_LOSS, LOAD_MAX, LOAD_MIN = "aux_loss", "expert_load_max", "expert_load_min"
ROUTER_METRICS = (AUX_LOSS, LOAD_MAX, LOAD_MIN)
"""E Σ f P, and the most and least loaded expert of any layer relative to the mean of its layer."""


class Pass(Protocol):
    """A micro-batch of any trainer."""

    @property
    def batch(self) -> MicroBatch: ...
    @property
    def weight(self) -> float: ...


P = TypeVar("P", bound=Pass)


@dataclass(frozen=True)
class Routers:
    """Of a model for which transformers defines the loss."""

    top_k: int
    """Experts per token, k."""
    coefficient: float
    """c; 0 without the loss."""


def routers_of(payload: Path, coefficient: float | None) -> Routers | None:
    """The routers of a model, without loading its weights; None where transformers defines no such loss.

    Args:
        payload: of the model.
        coefficient: `router_aux_loss_coef` of the stage.

    Raises:
        StageError: a coefficient for a model without the loss.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    config = AutoConfig.from_pretrained(payload, local_files_only=True, trust_remote_code=False)
    model = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    own, top_k = (getattr(config, name, None) for name in ("router_aux_loss_coef", "num_experts_per_tok"))
    if model is not None and hasattr(sys.modules[model.__module__], "load_balancing_loss_func") and own is not None and top_k is not None:
        return Routers(top_k, own if coefficient is None else coefficient)
    if coefficient is not None:
        raise StageError(
            f"router_aux_loss_coef is {coefficient}, but a {config.model_type} has no load-balancing loss in transformers: remove the field"
        )
    return None


def routing(router_logits: Sequence[Tensor], copies_T: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """(choices of each expert in each layer, shape (L, E); Σ of its probabilities over all layers, shape (E,), with a gradient).

    Args:
        router_logits: of each layer, shape (T, E).
        copies_T: how often each token counts.
        top_k: experts per token.
    """
    weights_T = copies_T.float()
    counts, sums = [], []
    for logits_TE in router_logits:
        probabilities_TE = logits_TE.float().softmax(-1)
        chosen_Tk = probabilities_TE.detach().topk(top_k, -1).indices
        none_E = weights_T.new_zeros(logits_TE.shape[-1])
        counts.append(none_E.index_add(0, chosen_Tk.flatten(), weights_T.repeat_interleave(top_k)))
        sums.append(weights_T @ probabilities_TE)
    return torch.stack(counts), torch.stack(sums).sum(0)


def balancing_loss(counts_LE: Tensor, probabilities_E: Tensor, top_k: int) -> Tensor:
    """E Σ_i f_i P_i, where `probabilities_E` may be the sums over a part of the tokens that `counts_LE` counts."""
    tokens = counts_LE.sum() / top_k  # of all layers
    return counts_LE.shape[1] * (counts_LE.sum(0) / tokens * probabilities_E / tokens).sum()


def loads(counts_LE: Tensor) -> tuple[Tensor, Tensor]:
    """Load of (the busiest, the idlest) expert of any layer relative to its layer's mean: 1 if balanced, at most E / k and at least 0."""
    relative_LE = counts_LE / counts_LE.mean(-1, keepdim=True)
    return relative_LE.amax(), relative_LE.amin()


class RouterLoss:
    """Backward passes of a trainer whose loss includes that of the routers, if its model has any.

    Per optimizer step: `over` the micro-batches, for each a forward pass and then `backward`; `metrics` at the end.
    """

    def __init__(self, trainer: Trainer, routers: Routers | None, steady: Callable[[Iterable[Any]], Iterator[Any]] = iter) -> None:
        """`steady` iterates over the micro-batches of a step, e.g. with heartbeats (`Job.steady`)."""
        self._trainer, self._routers, self._steady = trainer, routers, steady
        self._ahead_LE: Tensor | float = 0.0
        """Choices in passes computed beforehand, on this rank."""
        self._total_LE: Tensor | None = None
        """Choices in all passes of the step, on all ranks."""
        self._seen_LE: Tensor | float = 0.0
        """Choices in the passes that `backward` has had, on this rank."""
        self._loss: Tensor | float = 0.0

    @property
    def trains(self) -> bool:
        """Whether the routers' loss has a gradient, which then every token of a batch contributes to."""
        return self._routers is not None and self._routers.coefficient > 0

    def over(self, micro_batches: Iterable[P]) -> Iterator[P]:
        """The micro-batches of an optimizer step, after those passes that must be known beforehand."""
        if self._routers is None:
            yield from self._steady(micro_batches)
            return
        passes = list(micro_batches)
        self._ahead_LE = self._seen_LE = self._loss = 0.0
        self._total_LE = None
        model = self._trainer.module.module.model
        model.router_logits = ()  # the model's body stores them there as long as it is not None
        try:
            if self.trains:
                for one in self._steady(passes[1:]):
                    self._ahead_LE = self._ahead_LE + self._count(one)
            yield from self._steady(passes)
        finally:
            model.router_logits = None

    def backward(self, loss: Tensor, micro_batch: Pass) -> None:
        """Accumulate the gradient of a micro-batch's part of the global loss, directly after its forward pass; idle passes add nothing."""
        if self._routers is None:
            self._trainer.backward(loss * micro_batch.weight)
            return
        counts_LE, probabilities_E = self._routing(micro_batch)
        counts_LE = counts_LE * micro_batch.weight
        self._seen_LE = self._seen_LE + counts_LE
        if self.trains:
            if self._total_LE is None:
                self._total_LE = self._summed(counts_LE + self._ahead_LE)
            router_loss = balancing_loss(self._total_LE, probabilities_E, self._routers.top_k)
            self._loss = self._loss + router_loss.detach() * micro_batch.weight
            loss = loss + self._routers.coefficient * router_loss
        self._trainer.backward(loss * micro_batch.weight)

    def metrics(self) -> dict[str, Tensor]:
        """`ROUTER_METRICS` of the passes since `over`, on the device and equal on all ranks; empty without any. Called once a step."""
        if not isinstance(self._seen_LE, Tensor):
            return {}
        busiest, idlest = loads(self._summed(self._seen_LE))
        found = {LOAD_MAX: busiest, LOAD_MIN: idlest}
        if isinstance(self._loss, Tensor):
            found = {AUX_LOSS: self._trainer.summed(self._loss[None])[0], **found}
        self._seen_LE = self._loss = 0.0
        return found

    @torch.no_grad()
    def _count(self, micro_batch: Pass) -> Tensor:
        """The choices in a pass of the body; the head gets no tokens."""
        batch = micro_batch.batch
        empty = {name: getattr(batch, name)[:0] for name in ("places_N", "targets_N", "documents_N")}
        self._trainer.module(replace(batch, **empty))
        return self._routing(micro_batch)[0] * micro_batch.weight

    def _routing(self, micro_batch: Pass) -> tuple[Tensor, Tensor]:
        """Of the last forward pass."""
        assert self._routers is not None
        model = self._trainer.module.module.model
        router_logits, model.router_logits = model.router_logits, ()
        return routing(router_logits, micro_batch.batch.copies_T, self._routers.top_k)

    def _summed(self, counts_LE: Tensor) -> Tensor:
        return self._trainer.summed(counts_LE.flatten()).view_as(counts_LE)
