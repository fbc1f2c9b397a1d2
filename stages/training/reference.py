"""The reference of preference training: a frozen policy in memory, or log-probabilities computed by an earlier stage."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pedigree.configs.base.frozen import digest
from pedigree.data.artifacts.artifacts import Artifact
from pedigree.data.records import records
from pedigree.stages.core.batches import Document, MicroBatch, Unit
from pedigree.stages.job.failures import StageError
from pedigree.stages.training.feed import PreparedMicroBatch
from pedigree.stages.training.logprobs import PolicyModule

Reference = Callable[[PreparedMicroBatch], Tensor]
"""A micro-batch → Σ_t log π₀(y_t) of each document, shape (D,), without gradient."""


def content_key(doc: Document) -> str:
    """Key of a cached log-probability: a hash of the prompt's and answer's ids and the prompt's length."""
    return digest([doc.ids.tolist(), doc.prompt_length])


def online(module: PolicyModule) -> Reference:
    """A frozen policy, run on the same micro-batches as training, so that rounding cancels in the first step."""

    return lambda micro_batch: document_logps(module, micro_batch.batch)


@torch.no_grad()
def document_logps(module: PolicyModule, batch: MicroBatch) -> Tensor:
    """Σ_t log π of each document's trained tokens, shape (D,)."""
    logps_N, _ = module(batch)
    return batch.sum_by_document(logps_N)


class Cached:
    """Log-probabilities from a `reference_logprobs` artifact: no second model in memory."""

    def __init__(self, artifact: Artifact) -> None:
        self.logps: dict[str, float] = {row["id"]: row["logp"] for row in records.load(artifact)}

    def refuse_missing(self, rows: Sequence[dict[str, Any]], units: Sequence[Unit], max_length: int) -> None:
        """Check for missing log-probabilities before any model is loaded.

        Raises:
            StageError: a document of these rows has no log-probability.
        """
        missing = [row["id"] for row, unit in zip(rows, units, strict=True) if any(content_key(doc) not in self.logps for doc in unit)]
        if missing:
            raise StageError(
                f"{len(missing)} of {len(rows)} rows have no log-probability in `reference`, e.g. {missing[0]}: it was computed with "
                f"other rows, tokenizer or chat template, or a max_length other than {max_length}; use the same preferences, max_length "
                "and tokenizer for both stages"
            )

    def tensors(self, documents: Sequence[Document]) -> dict[str, Tensor]:
        """Extra tensors for a micro-batch of these documents (`GlobalBatch.extras`)."""
        return {"reference": torch.tensor([self.logps[content_key(doc)] for doc in documents])}

    def __call__(self, micro_batch: PreparedMicroBatch) -> Tensor:
        return micro_batch.extras["reference"]
