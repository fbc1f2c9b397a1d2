"""The reference of preference training: a frozen policy beside the trained one, or log-probabilities that were computed before."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from configs.frozen import digest
from data import records
from data.artifacts import Artifact
from stages.core.batches import Document, MicroBatch, Unit
from stages.core.logprobs import PolicyModule
from stages.engines.feed import Prepared
from stages.job import StageError

Reference = Callable[[Prepared], Tensor]
"""A pass → Σ_t log π₀(y_t) of each document, shape (D,), without gradient."""


def content_key(doc: Document) -> str:
    """What a cached log-probability is filed under: the ids of prompt and answer, and the border between them."""
    return digest([list(doc.ids), doc.trained.index(True)])


def online(module: PolicyModule) -> Reference:
    """A policy that is asked anew each time, on the very micro-batches of training: rounding cancels in the first step."""

    return lambda made: sums_of(module, made.batch)


@torch.no_grad()
def sums_of(module: PolicyModule, batch: MicroBatch) -> Tensor:
    """log π of each document's trained tokens together."""
    logps_N, _ = module(batch)
    return batch.sum_by_document(logps_N)


class Cached:
    """Log-probabilities from an artifact: no second model is in memory."""

    def __init__(self, artifact: Artifact) -> None:
        self.logps: dict[str, float] = {row["id"]: row["logp"] for row in records.load(artifact)}

    def refuse_missing(self, rows: Sequence[dict[str, Any]], units: Sequence[Unit], max_length: int) -> None:
        """Before anything is loaded.

        Raises:
            StageError: a document of these rows has no log-probability here.
        """
        missing = [row["id"] for row, unit in zip(rows, units, strict=True) if any(content_key(doc) not in self.logps for doc in unit)]
        if missing:
            raise StageError(
                f"{len(missing)} of {len(rows)} rows have no log-probability in `reference`, the first of them {missing[0]}: its stage saw "
                f"other rows, another tokenizer or chat template, or a max_length below {max_length}; give it the same preferences and "
                "max_length, and a policy with the tokenizer of this one"
            )

    def beside(self, documents: Sequence[Document]) -> Mapping[str, Tensor]:
        """What a pass over these documents is to bring along."""
        return {"reference": torch.tensor([self.logps[content_key(doc)] for doc in documents])}

    def __call__(self, made: Prepared) -> Tensor:
        return made.beside["reference"]
