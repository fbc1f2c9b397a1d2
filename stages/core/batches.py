"""Documents to micro-batches: how one step's global batch is cut, exactly, into ranks and forward passes.

Shapes: B rows, T tokens per row, D documents, N trained tokens.

Packed (the default): the documents of a micro-batch stand side by side in one row (B = 1) without padding; `position_ids`
restart at each, which is what isolates them (see `stages/core/logprobs.py`). Padded: one document per row, right-padded, with
a mask made from lengths, never from a token id: the padding id may be the end-of-turn id.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from configs.execution import Numerics


@dataclass(frozen=True)
class Document:
    """One sequence.

    Example: prompt ids [5, 6], answer ids [7, 2] → ids (5, 6, 7, 2), trained (False, False, True, True).
    """

    ids: tuple[int, ...]
    trained: tuple[bool, ...]
    """Tokens whose log-probability counts; the first token has none."""

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def num_trained(self) -> int:
        return sum(self.trained[1:])


def document(prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> Document:
    return Document((*prompt_ids, *answer_ids), (False,) * len(prompt_ids) + (True,) * len(answer_ids))


Unit = tuple[Document, ...]
"""Documents that must share a forward pass: one for SFT, chosen and rejected for pairs."""


@dataclass(frozen=True)
class Micro:
    """One forward pass of one rank: places of its units in the step's global batch."""

    units: tuple[int, ...]
    weight: float = 1.0
    """0 for a pass that only keeps ranks in step: collectives must match, its gradient must not count."""


@dataclass(frozen=True)
class MicroBatch:
    """Tensors of one forward pass."""

    input_ids_BT: Tensor
    position_ids_BT: Tensor
    attention_mask_BT: Tensor | None
    """None when packed."""
    places_N: Tensor
    """Flat places (b * T + t) whose hidden state predicts a trained token."""
    targets_N: Tensor
    documents_N: Tensor
    """Which document each trained token belongs to."""
    last_D: Tensor
    """Flat place of each document's last token."""
    num_documents: int

    def to(self, device: torch.device) -> "MicroBatch":
        moved = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **moved)

    def sum_by_document(self, values_N: Tensor) -> Tensor:
        """Σ over each document's trained tokens, shape (D,)."""
        zeros = torch.zeros(self.num_documents, dtype=values_N.dtype, device=values_N.device)
        return zeros.index_add(0, self.documents_N, values_N)


def epoch_order(num_rows: int, seed: int, epoch: int) -> list[int]:
    """The rows of an epoch in training order: a shuffle that (seed, epoch) decides, so that no state needs saving."""
    order = list(range(num_rows))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return order


def steps_per_epoch(num_rows: int, global_batch: int) -> int:
    return -(-num_rows // global_batch)


def step_rows(step: int, num_rows: int, global_batch: int, seed: int) -> list[int]:
    """Rows of optimizer step `step` (0-based); the last batch of an epoch may be smaller."""
    epoch, within = divmod(step, steps_per_epoch(num_rows, global_batch))
    return epoch_order(num_rows, seed, epoch)[within * global_batch : (within + 1) * global_batch]


def plan_step(units: Sequence[Unit], rank: int, world_size: int, numerics: Numerics) -> list[Micro]:
    """The forward passes of one rank for one global batch; every rank gets equally many.

    Unit i goes to rank i mod world_size. A rank with fewer passes repeats a small unit with weight 0.
    """
    lengths = [sum(len(doc) for doc in unit) for unit in units]
    by_rank = [_cut([i for i in range(len(units)) if i % world_size == r], lengths, units, numerics) for r in range(world_size)]
    passes = max(len(micros) for micros in by_rank)
    shortest = min(range(len(units)), key=lambda i: (lengths[i], i))
    idle = Micro((shortest,), weight=0.0)
    return by_rank[rank] + [idle] * (passes - len(by_rank[rank]))


def _cut(mine: list[int], lengths: list[int], units: Sequence[Unit], numerics: Numerics) -> list[Micro]:
    if numerics.packing:
        return [Micro(tuple(sorted(bin_))) for bin_ in best_fit(mine, lengths, numerics.micro_batch_tokens)]
    rows = max((len(unit) for unit in units), default=1)
    size = max(1, numerics.micro_batch_sequences // rows)
    return [Micro(tuple(mine[start : start + size])) for start in range(0, len(mine), size)]


def best_fit(indices: Sequence[int], lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Best-fit decreasing bin packing; what exceeds `capacity` alone gets a bin of its own. Deterministic."""
    bins: list[list[int]] = []
    free: list[int] = []
    for index in sorted(indices, key=lambda i: (-lengths[i], i)):
        fitting = [b for b in range(len(bins)) if free[b] >= lengths[index]]
        if fitting:
            best = min(fitting, key=lambda b: (free[b], b))
            bins[best].append(index)
            free[best] -= lengths[index]
        else:
            bins.append([index])
            free.append(capacity - lengths[index])
    return bins


def collate(documents: Sequence[Document], numerics: Numerics, pad_id: int) -> MicroBatch:
    """Documents of one forward pass as tensors."""
    if numerics.packing:
        width = sum(len(doc) for doc in documents)
        starts = [0]
        for doc in documents[:-1]:
            starts.append(starts[-1] + len(doc))
        ids = [token for doc in documents for token in doc.ids]
        positions = [t for doc in documents for t in range(len(doc))]
        input_ids, position_ids, attention = torch.tensor([ids]), torch.tensor([positions]), None
    else:
        width = max(len(doc) for doc in documents)
        starts = [row * width for row in range(len(documents))]
        input_ids = torch.tensor([[*doc.ids, *[pad_id] * (width - len(doc))] for doc in documents])
        position_ids = torch.arange(width).expand(len(documents), width).clone()
        lengths = torch.tensor([len(doc) for doc in documents])
        attention = (torch.arange(width)[None, :] < lengths[:, None]).long()
    places, targets, owners = [], [], []
    for owner, (start, doc) in enumerate(zip(starts, documents, strict=True)):
        for t in range(1, len(doc)):
            if doc.trained[t]:
                places.append(start + t - 1)
                targets.append(doc.ids[t])
                owners.append(owner)
    return MicroBatch(
        input_ids_BT=input_ids,
        position_ids_BT=position_ids,
        attention_mask_BT=attention,
        places_N=torch.tensor(places, dtype=torch.long),
        targets_N=torch.tensor(targets, dtype=torch.long),
        documents_N=torch.tensor(owners, dtype=torch.long),
        last_D=torch.tensor([start + len(doc) - 1 for start, doc in zip(starts, documents, strict=True)]),
        num_documents=len(documents),
    )
