"""Split a step's global batch of documents into ranks and micro-batches, and build their tensors.

Shapes: B rows, T tokens per row, D documents, N trained tokens.

Packed (the default): the documents of a micro-batch are concatenated in one row (B = 1) without padding, and do not attend to each
other. With `attention: varlen` the documents of a unit share their common prompt, which is in the row once
(see `stages/training/attention.py`). Other attention implementations isolate documents by `position_ids` that restart at each. Padded: one
document per row, right-padded, with a mask from lengths, never from a token id, because the padding id may equal the end-of-turn id.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from pedigree.configs.language.execution import Numerics
from pedigree.stages.core.spans import Span, Spans, spans_of


@dataclass(frozen=True, eq=False)
class Document:
    """One sequence of T tokens. Its arrays may be views into a file that all ranks share (`stages/training/token_cache.py`).

    Example: prompt ids [5, 6], answer ids [7, 2] → ids [5, 6, 7, 2], trained [False, False, True, True].
    """

    ids: np.ndarray
    """Shape (T,), integers of any width."""
    trained_bits: np.ndarray
    """`trained`, eight tokens per byte, from `np.packbits`."""
    num_trained: int
    """Number of trained tokens in `trained[1:]`; the first token has no log-probability."""

    @classmethod
    def of(cls, ids: Sequence[int], trained: Sequence[bool]) -> "Document":
        """Create a document from sequences."""
        trained_T = np.asarray(trained, dtype=np.bool_)
        return cls(np.asarray(ids, dtype=np.int64), np.packbits(trained_T), int(np.count_nonzero(trained_T[1:])))

    def __len__(self) -> int:
        return len(self.ids)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Document):
            return NotImplemented
        return np.array_equal(self.ids, other.ids) and np.array_equal(self.trained, other.trained)

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    @property
    def trained(self) -> np.ndarray:
        """Tokens whose log-probability counts, shape (T,), bool; unpacked at each call."""
        return np.unpackbits(self.trained_bits, count=len(self)).view(np.bool_)

    @property
    def prompt_length(self) -> int:
        """Number of tokens before the first trained one; all, if none is trained."""
        trained_T = self.trained
        return int(trained_T.argmax()) if trained_T.any() else len(self)

    def cut(self, length: int) -> "Document":
        """The first tokens, as a view."""
        if len(self) <= length:
            return self
        return Document(self.ids[:length], self.trained_bits[: -(-length // 8)], int(np.count_nonzero(self.trained[1:length])))


def document(prompt_ids: Sequence[int], answer_ids: Sequence[int], trained: Sequence[bool] | None = None) -> Document:
    """A document of a prompt and an answer, whose tokens are `trained`; None: all."""
    return Document.of([*prompt_ids, *answer_ids], [False] * len(prompt_ids) + list(trained or [True] * len(answer_ids)))


Unit = tuple[Document, ...]
"""Documents that must share a forward pass: one for SFT, chosen and rejected for pairs, several answers to one prompt."""


def shared_prefix(unit: Unit) -> int:
    """Length of the common prefix of a unit's documents, without trained tokens and without a document's last token."""
    if len(unit) < 2:
        return 0
    first, *others = unit
    shared = min(min(len(doc) - 1, doc.prompt_length) for doc in unit)
    for doc in others:
        differing = np.flatnonzero(first.ids[:shared] != doc.ids[:shared])
        shared = int(differing[0]) if len(differing) else shared
    return shared


def unit_tokens(unit: Unit, numerics: Numerics) -> int:
    """Tokens of the unit in a forward pass."""
    shared = shared_prefix(unit) if numerics.shares_prompts else 0
    return sum(len(doc) for doc in unit) - shared * (len(unit) - 1)


def share_prompts(documents: Sequence[Document], numerics: Numerics) -> list[Unit]:
    """Group answers to the same prompt into units that fit a micro-batch, in order."""
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
class MicroBatchPlan:
    """One planned forward pass of one rank: indices of its units in the step's global batch."""

    units: tuple[int, ...]
    weight: float = 1.0
    """0 for a repeated pass that only keeps ranks in step: collectives must match, but its gradient must not count."""


@dataclass(frozen=True)
class MicroBatch:
    """Tensors of one forward pass."""

    input_ids_BT: Tensor
    position_ids_BT: Tensor
    attention_mask_BT: Tensor | None
    """None if packed."""
    spans: Spans | None
    """Spans of a packed row, for attention `varlen`."""
    places_N: Tensor
    """Flat positions (b * T + t) whose hidden state predicts a trained token."""
    targets_N: Tensor
    documents_N: Tensor
    """Document of each trained token."""
    last_D: Tensor
    """Flat position of each document's last token."""
    copies_T: Tensor
    """For each flat position the number of documents that contain its token: several for a shared prompt, 0 for padding. Shape (B * T,)."""
    num_documents: int

    def each(self, change: Callable[[Tensor], Tensor]) -> "MicroBatch":
        """Apply a function to every tensor."""
        changed = {name: change(value) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **changed, spans=self.spans.each(change) if self.spans else None)

    def to(self, device: torch.device) -> "MicroBatch":
        """Copy to a device; copies from pinned memory do not block the host."""
        return self.each(lambda tensor: tensor.to(device, non_blocking=True))

    def sum_by_document(self, values_N: Tensor) -> Tensor:
        """Σ over each document's trained tokens, shape (D,)."""
        return sum_by_document(values_N, self.documents_N, self.num_documents)


def sum_by_document(values_N: Tensor, documents_N: Tensor, num_documents: int) -> Tensor:
    """Σ over each document's tokens, shape (D,)."""
    return values_N.new_zeros(num_documents).index_add(0, documents_N, values_N)


@lru_cache(maxsize=2)
def _shuffled(num_rows: int, seed: int, epoch: int) -> tuple[int, ...]:
    """Determined by (seed, epoch), so that no state needs saving. Cached between steps: shuffling a million rows takes most of a second."""
    order = list(range(num_rows))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return tuple(order)


def steps_per_epoch(num_rows: int, global_batch: int) -> int:
    return -(-num_rows // global_batch)


def total_steps(num_rows: int, global_batch: int, epochs: int, max_steps: int | None) -> int:
    """Optimizer steps of all epochs, at most `max_steps`."""
    steps = epochs * steps_per_epoch(num_rows, global_batch)
    return steps if max_steps is None else min(steps, max_steps)


def step_rows(step: int, num_rows: int, global_batch: int, seed: int | None) -> list[int]:
    """Rows of optimizer step `step` (0-based), reshuffled each epoch, or in their original order without a seed; the last batch of an epoch
    may be smaller."""
    epoch, within = divmod(step, steps_per_epoch(num_rows, global_batch))
    rows = range(num_rows) if seed is None else _shuffled(num_rows, seed, epoch)
    return list(rows[within * global_batch : (within + 1) * global_batch])


def plan_step(units: Sequence[Unit], rank: int, world_size: int, numerics: Numerics) -> list[MicroBatchPlan]:
    """The forward passes of one rank for one global batch; the number is the same for all ranks.

    Units are dealt by length. A rank with fewer passes repeats a small unit with weight 0.
    """
    lengths = [unit_tokens(unit, numerics) for unit in units]
    size = max(1, numerics.micro_batch_sequences // max((len(unit) for unit in units), default=1))
    most = len(units) if numerics.packing else -(-len(units) // (world_size * size)) * size
    by_rank = [_cut(mine, lengths, size, numerics) for mine in deal(lengths, world_size, most)]
    passes = max(len(micros) for micros in by_rank)
    shortest = min(range(len(units)), key=lambda i: (lengths[i], i))
    idle = MicroBatchPlan((shortest,), weight=0.0)
    return by_rank[rank] + [idle] * (passes - len(by_rank[rank]))


def deal(lengths: Sequence[int], ranks: int, most: int) -> list[list[int]]:
    """Places of units by rank, each rank's in order: the longest unit first, each to the rank that has the fewest tokens so far and fewer
    than `most` units. Ranks differ by at most the last unit dealt to the busiest (Graham 1969, doi 10.1137/0117039).

    Tokens stand for cost: attention adds less than a tenth to 4096 tokens of a model with 8B parameters.
    """
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    tokens = [0] * ranks
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        rank = min((rank for rank in range(ranks) if len(dealt[rank]) < most), key=lambda rank: tokens[rank])
        dealt[rank].append(place)
        tokens[rank] += lengths[place]
    return [sorted(places) for places in dealt]


def _cut(mine: list[int], lengths: list[int], size: int, numerics: Numerics) -> list[MicroBatchPlan]:
    """A rank's passes: packed into `micro_batch_tokens`, or of `size` units each."""
    if numerics.packing:
        return [MicroBatchPlan(tuple(sorted(bin_))) for bin_ in best_fit(mine, lengths, numerics.micro_batch_tokens)]
    return [MicroBatchPlan(tuple(mine[start : start + size])) for start in range(0, len(mine), size)]


def best_fit(indices: Sequence[int], lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Best-fit decreasing bin packing; an item larger than `capacity` gets its own bin. Deterministic."""
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
    """A document's position in the flat row: its first `shared` tokens at `prefix`, the others from `start`."""

    doc: Document
    ids_T: np.ndarray
    prefix: int
    shared: int
    start: int

    def places(self, times: np.ndarray) -> np.ndarray:
        """Flat positions of the document's tokens."""
        return times + np.where(times < self.shared, self.prefix, self.start - self.shared)


def collate(units: Sequence[Unit], numerics: Numerics, pad_id: int) -> MicroBatch:
    """Build the tensors of one forward pass; documents keep their order."""
    spans = attention = None
    if numerics.packing:
        pieces, runs = _row(units, numerics)
        input_ids = torch.from_numpy(np.concatenate([run.ids_T for run in runs]))[None]
        position_ids = torch.from_numpy(np.concatenate([np.arange(run.position, run.position + len(run.ids_T)) for run in runs]))[None]
        copies = torch.from_numpy(np.repeat([run.copies for run in runs], [len(run.ids_T) for run in runs]))
        if numerics.attention == "varlen":
            spans = spans_of([run.span for run in runs], numerics.sequence_parallel)
    else:
        documents = [doc for unit in units for doc in unit]
        width = max(len(doc) for doc in documents)
        pieces = [_Piece(doc, _ids(doc), 0, 0, row * width) for row, doc in enumerate(documents)]
        input_ids = torch.full((len(documents), width), pad_id)
        for row, piece in enumerate(pieces):
            input_ids[row, : len(piece.doc)] = torch.from_numpy(piece.ids_T)
        position_ids = torch.arange(width).expand(len(documents), width).clone()
        lengths = torch.tensor([len(doc) for doc in documents])
        attention = (torch.arange(width)[None, :] < lengths[:, None]).long()
        copies = attention.flatten()
    trained = [np.flatnonzero(piece.doc.trained[1:]) + 1 for piece in pieces]  # the first token has no log-probability
    counts, both = [len(times) for times in trained], list(zip(pieces, trained, strict=True))
    return MicroBatch(
        input_ids_BT=input_ids,
        position_ids_BT=position_ids,
        attention_mask_BT=attention,
        spans=spans,
        places_N=_joined([piece.places(times - 1) for piece, times in both]),
        targets_N=_joined([piece.ids_T[times] for piece, times in both]),
        documents_N=torch.from_numpy(np.repeat(np.arange(len(pieces)), counts)),
        last_D=_joined([piece.places(np.array([len(piece.doc) - 1])) for piece in pieces]),
        copies_T=copies,
        num_documents=len(pieces),
    )


@dataclass(frozen=True)
class _Run:
    """Consecutive tokens of a packed row, starting at `position` of their document."""

    ids_T: np.ndarray
    position: int
    span: Span
    copies: int
    """Number of documents that contain them."""


def _row(units: Sequence[Unit], numerics: Numerics) -> tuple[list[_Piece], list[_Run]]:
    """(position of each document in a packed row, the row's runs of tokens)."""
    pieces: list[_Piece] = []
    runs: list[_Run] = []
    end = 0

    def append(ids_T: np.ndarray, position: int, prefix: int, shared: int, copies: int = 1) -> int:
        nonlocal end
        start, end = end, end + len(ids_T)
        runs.append(_Run(ids_T, position, Span(start, len(ids_T), prefix, shared), copies))
        return start

    for unit in units:
        shared = shared_prefix(unit) if numerics.shares_prompts else 0
        ids = [_ids(doc) for doc in unit]
        prefix = append(ids[0][:shared], 0, 0, 0, len(unit)) if shared else 0
        for doc, ids_T in zip(unit, ids, strict=True):
            pieces.append(_Piece(doc, ids_T, prefix, shared, append(ids_T[shared:], shared, prefix, shared)))
    return pieces, runs


def _ids(doc: Document) -> np.ndarray:
    return doc.ids.astype(np.int64)


def _joined(parts: Sequence[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.concatenate(parts).astype(np.int64, copy=False))
