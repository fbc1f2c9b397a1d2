"""The reference of RL and preference training: a fixed policy, or log-probabilities computed by an earlier stage."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pedigree.configs.base.frozen import digest
from pedigree.configs.language.execution import Numerics
from pedigree.data.artifacts.artifacts import Artifact
from pedigree.data.records import records
from pedigree.data.sources.model_folders import SAME_BASE, unlike_tokens
from pedigree.stages.core.batches import Document, MicroBatch, Unit
from pedigree.stages.job.failures import StageError
from pedigree.stages.training.adapters import adapted_layers, switched_off
from pedigree.stages.training.feed import PreparedMicroBatch
from pedigree.stages.training.models import load_policy
from pedigree.stages.training.trainer import Trainer

FixedPolicy = Callable[..., tuple[Tensor, Tensor]]
"""As `PolicyModule`: a micro-batch → (log-probabilities, entropies)."""
Reference = Callable[[PreparedMicroBatch], Tensor]
"""A micro-batch → Σ_t log π₀(y_t) of each document, shape (D,), without gradient."""


def refuse_unlike_tokens(port: str, other: Artifact, policy: Artifact) -> None:
    """Check before any model is loaded that a model at a port takes the policy's tokens for the same ones.

    Raises:
        StageError: it does not.
    """
    problem = unlike_tokens(policy.payload, other.payload)
    if problem:
        raise StageError(f"the {port} {problem}: {SAME_BASE}")


def fixed_policy(start: Artifact, policy: Artifact, trainer: Trainer, numerics: Numerics) -> FixedPolicy:
    """The policy `start`, which training does not change, for use without gradient.

    If adapters of `policy` are trained and `start` is that policy, it is the trained model with its adapters switched off: no second
    model is loaded (at 8B in bf16, 16 GB on each rank).
    """
    model = trainer.module.model
    if not adapted_layers(model) or start.record.content != policy.record.content:
        return trainer.fixed(load_policy(start, numerics, head=trainer.module.head))

    def unadapted(*given: Any, **settings: Any) -> tuple[Tensor, Tensor]:
        with torch.no_grad(), switched_off(model):
            return trainer.module(*given, **settings)

    return unadapted


def content_key(doc: Document) -> str:
    """Key of a cached log-probability: a hash of the prompt's and answer's ids and the prompt's length."""
    return digest([doc.ids.tolist(), doc.prompt_length])


def online(module: FixedPolicy) -> Reference:
    """A fixed policy, run on the same micro-batches as training, so that rounding cancels in the first step."""

    return lambda micro_batch: document_logps(module, micro_batch.batch)


@torch.no_grad()
def document_logps(module: FixedPolicy, batch: MicroBatch) -> Tensor:
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
