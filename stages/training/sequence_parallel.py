"""Sequence parallelism: several ranks compute one packed row together, each a slice of its tokens.

    layers     rank p of n has the tokens [p·t, (p + 1)·t) of the row, t = ⌈T/n⌉; the last slice is padded
    attention  an exchange gives each rank all tokens of 1/n of the heads, and another one brings its tokens back with all heads
               (DeepSpeed Ulysses, arXiv 2309.14509, section 3.1)
    results    log-probabilities and scores are computed on the rank of their token, and added up: all n ranks get those of the whole row

So the n ranks act as one: they compute the same loss, whose gradient reaches the tokens of each rank once, and the sum of gradients over
all ranks, which the trainer takes anyway, is that of one rank with the whole row. Sums of metrics over all ranks count each row n times
(`Trainer.totals`). ZeRO is not aware of it.

Shapes: T tokens of the row, t of this rank, H heads, h = H/n, D width of a head, N results of the row, M of this rank's tokens.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from pedigree.stages.core.batches import MicroBatch
from pedigree.stages.core.spans import Spans
from pedigree.stages.job.failures import StageError
from pedigree.stages.training.ranks import PATIENCE


def refuse_undivided(payload: Path, size: int) -> None:
    """Check that ranks can share a model's heads, before it is loaded.

    Raises:
        StageError: they cannot; or a token's result depends on the other tokens of its rank.
    """
    from transformers import AutoConfig

    config: Any = AutoConfig.from_pretrained(payload, local_files_only=True, trust_remote_code=False).get_text_config()
    for name in ("num_attention_heads", "num_key_value_heads"):
        if (heads := getattr(config, name, None) or size) % size:
            raise StageError(f"sequence_parallel {size} does not divide the model's {name} {heads}: set it to a divisor of {heads}")
    scaling = (getattr(config, "rope_parameters", None) or {}).get("rope_type")
    if scaling in ("dynamic", "longrope"):
        raise StageError(f"the model's rope_type {scaling} depends on the longest document of a rank: set sequence_parallel to 1")
    if getattr(config, "router_aux_loss_coef", None) is not None:
        raise StageError(f"a {config.model_type} balances its experts over whole rows: set sequence_parallel to 1")


@cache
def _team(size: int) -> Any:
    """The ranks that compute rows with this one: neighbors, which share a machine's fast links. First called on all ranks at once."""
    ranks = torch.distributed.get_world_size()
    teams = [torch.distributed.new_group(list(range(first, first + size)), timeout=PATIENCE) for first in range(0, ranks, size)]
    return teams[torch.distributed.get_rank() // size]


def _place(size: int) -> int:
    return torch.distributed.get_rank() % size


def slice_of(row_1T: Tensor, size: int) -> Tensor:
    """This rank's tokens of a row, shape (1, t); the whole row if it computes alone."""
    if size == 1:
        return row_1T
    length = -(-row_1T.shape[1] // size)
    return pad(row_1T, (0, length * size - row_1T.shape[1])).split(length, dim=1)[_place(size)]


class _Exchange(torch.autograd.Function):
    """(t, H, D) → (T, h, D), or `back`. Each direction is the gradient of the other."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, size: int, back: bool) -> Tensor:
        ctx.size, ctx.back = size, back
        sent = (given.unflatten(0, (size, -1)) if back else given.unflatten(1, (size, -1)).transpose(0, 1)).contiguous()
        received = torch.empty_like(sent)
        torch.distributed.all_to_all_single(received, sent, group=_team(size))
        return received.transpose(0, 1).flatten(1, 2) if back else received.flatten(0, 1)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        return _Exchange.apply(grad_outputs[0], ctx.size, not ctx.back), None, None  # pyright: ignore[reportReturnType]


def all_tokens(tensor_tHD: Tensor, spans: Spans) -> Tensor:
    """All tokens of the row for this rank's heads, without padding, shape (T, h, D)."""
    found: Any = _Exchange.apply(tensor_tHD, spans.sequence_parallel, False)
    return found[: sum(span.length for span in spans.all)]


def all_heads(tensor_ThD: Tensor, spans: Spans) -> Tensor:
    """All heads for this rank's tokens, shape (t, H, D)."""
    missing = -len(tensor_ThD) % spans.sequence_parallel
    found: Any = _Exchange.apply(pad(tensor_ThD, (0, 0, 0, 0, 0, missing)), spans.sequence_parallel, True)
    return found


def own_heads(values_H: Tensor, spans: Spans) -> Tensor:
    """The values of this rank's heads, shape (h,)."""
    return values_H.chunk(spans.sequence_parallel)[_place(spans.sequence_parallel)]


class _Whole(torch.autograd.Function):
    """Results of this rank's tokens → those of the row. Every rank computes the same loss of them, so its own have their whole gradient."""

    @staticmethod
    def forward(ctx: Any, own_M: Tensor, chosen_M: Tensor, count: int, size: int) -> Tensor:
        ctx.save_for_backward(chosen_M)
        whole_N = own_M.new_zeros(count).index_copy(0, chosen_M, own_M)
        torch.distributed.all_reduce(whole_N, group=_team(size))
        return whole_N

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None, None]:
        (chosen_M,) = ctx.saved_tensors
        return grad_outputs[0][chosen_M], None, None, None


@dataclass(frozen=True)
class OwnTokens:
    """Which results of a row this rank computes."""

    places: Tensor
    """Their positions in the slice, shape (M,)."""
    chosen_M: Tensor | None
    """Their indices among those of the row; None if it computes alone."""
    count: int
    size: int

    @classmethod
    def of(cls, batch: MicroBatch, places_N: Tensor) -> "OwnTokens":
        size = batch.spans.sequence_parallel if batch.spans else 1
        if size == 1:
            return cls(places_N, None, len(places_N), 1)
        length = -(-batch.input_ids_BT.shape[1] // size)
        chosen_M = (places_N // length == _place(size)).nonzero()[:, 0]
        return cls(places_N[chosen_M] % length, chosen_M, len(places_N), size)

    def choose(self, values_N: Tensor) -> Tensor:
        return values_N if self.chosen_M is None else values_N[self.chosen_M]

    def whole(self, values_M: Tensor) -> Tensor:
        """The results of the whole row, shape (N,)."""
        if self.chosen_M is None:
            return values_M
        return _Whole.apply(values_M, self.chosen_M, self.count, self.size)  # pyright: ignore[reportReturnType]
