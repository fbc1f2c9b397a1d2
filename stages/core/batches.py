"""Documents to micro-batches: how one step's global batch is cut, exactly, into ranks and forward passes.

Shapes: B rows, T tokens per row, D documents, N trained tokens.

Packed (the default): the documents of a micro-batch stand side by side in one row (B = 1) without padding, and do not see each
other. With `attention: varlen` the documents of a unit share the prompt that they have in common: it stands in the row once
(see `stages/core/attention.py`). Other attentions isolate documents by `position_ids` that restart at each. Padded: one document
per row, right-padded, with a mask made from lengths, never from a token id: the padding id may be the end-of-turn id.
"""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from configs.execution import Numerics
from stages.core.attention import Span, Spans, spans_of


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
"""Documents that must share a forward pass: one for SFT, chosen and rejected for pairs, several answers to one prompt."""


def shared_prefix(unit: Unit) -> int:
    """How many first tokens all documents of the unit have in common, none of them trained or a document's last."""
    if len(unit) < 2:
        return 0
    first, *others = unit
    most = min(min(len(doc) - 1, doc.trained.index(True) if True in doc.trained else len(doc)) for doc in unit)
    return next((t for t in range(most) if any(doc.ids[t] != first.ids[t] for doc in others)), most)


def unit_tokens(unit: Unit, numerics: Numerics) -> int:
    """Tokens that the unit takes in a forward pass."""
    shared = shared_prefix(unit) if numerics.shares_prompts else 0
    return sum(len(doc) for doc in unit) - shared * (len(unit) - 1)


def share_prompts(documents: Sequence[Document], numerics: Numerics) -> list[Unit]:
    """Answers to one prompt as units that fit a micro-batch: all of them where they do, in their order."""
    if not numerics.shares_prompts:
        return [(doc,) for doc in documents]
    units: list[Unit] = []
    for doc in documents:
        grown = (*units[-1], doc) if units else (doc,)
        if units and unit_tokens(grown, numerics) <= numerics.micro_batch_tokens:
            units[-1] = grown
        else:
            units.append((doc,))
    return units


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
    spans: Spans | None
    """Of a packed row, for attention `varlen`."""
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
        return replace(self, **moved, spans=self.spans.to(device) if self.spans else None)

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
    lengths = [unit_tokens(unit, numerics) for unit in units]
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


@dataclass(frozen=True)
class _Piece:
    """A document's place in the flat row: its first `shared` tokens at `prefix`, the others from `start`."""

    doc: Document
    prefix: int
    shared: int
    start: int

    def place(self, t: int) -> int:
        """Flat place of the document's token t."""
        return self.prefix + t if t < self.shared else self.start + t - self.shared


def collate(units: Sequence[Unit], numerics: Numerics, pad_id: int) -> MicroBatch:
    """Units of one forward pass as tensors; documents keep their order."""
    documents = [doc for unit in units for doc in unit]
    spans = attention = None
    if numerics.packing:
        pieces, runs = _row(units, numerics)
        ids = [token for run in runs for token in run.ids]
        positions = [t for run in runs for t in range(run.position, run.position + len(run.ids))]
        input_ids, position_ids = torch.tensor([ids]), torch.tensor([positions])
        if numerics.attention == "varlen":
            spans = spans_of([run.span for run in runs])
    else:
        width = max(len(doc) for doc in documents)
        pieces = [_Piece(doc, 0, 0, row * width) for row, doc in enumerate(documents)]
        input_ids = torch.tensor([[*doc.ids, *[pad_id] * (width - len(doc))] for doc in documents])
        position_ids = torch.arange(width).expand(len(documents), width).clone()
        lengths = torch.tensor([len(doc) for doc in documents])
        attention = (torch.arange(width)[None, :] < lengths[:, None]).long()
    trained = [[t for t in range(1, len(piece.doc)) if piece.doc.trained[t]] for piece in pieces]
    return MicroBatch(
        input_ids_BT=input_ids,
        position_ids_BT=position_ids,
        attention_mask_BT=attention,
        spans=spans,
        places_N=_indices(piece.place(t - 1) for piece, ts in zip(pieces, trained, strict=True) for t in ts),
        targets_N=_indices(piece.doc.ids[t] for piece, ts in zip(pieces, trained, strict=True) for t in ts),
        documents_N=_indices(owner for owner, ts in enumerate(trained) for _ in ts),
        last_D=_indices(piece.place(len(piece.doc) - 1) for piece in pieces),
        num_documents=len(documents),
    )


@dataclass(frozen=True)
class _Run:
    """Tokens of a packed row that stand together, the first of them at `position` of its document."""

    ids: tuple[int, ...]
    position: int
    span: Span


def _row(units: Sequence[Unit], numerics: Numerics) -> tuple[list[_Piece], list[_Run]]:
    """Where each document stands in a packed row, and what the row is made of."""
    pieces: list[_Piece] = []
    runs: list[_Run] = []
    end = 0

    def append(ids: tuple[int, ...], position: int, prefix: int, shared: int) -> int:
        nonlocal end
        start, end = end, end + len(ids)
        runs.append(_Run(ids, position, Span(start, len(ids), prefix, shared)))
        return start

    for unit in units:
        shared = shared_prefix(unit) if numerics.shares_prompts else 0
        prefix = append(unit[0].ids[:shared], 0, 0, 0) if shared else 0
        pieces += [_Piece(doc, prefix, shared, append(doc.ids[shared:], shared, prefix, shared)) for doc in unit]
    return pieces, runs


def _indices(values: Iterable[int]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.long)
