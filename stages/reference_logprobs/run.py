"""Reference log-probabilities: policy + preferences → Σ_t log π₀(y_t) of every answer, keyed by the content of its tokens.

    payload/rows.jsonl    {id: hash of the prompt's and the answer's token ids, source, logp, length in tokens}

Computed once, they serve every training run on the same rows, which then needs one model in memory instead of two. Rows are processed
in chunks; finished chunks are on disk and survive a crash.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import cached_property, partial
from typing import Any

import torch

from pedigree.configs.language.execution import Numerics
from pedigree.configs.methods.training import ReferenceLogprobs
from pedigree.data.artifacts.artifacts import Artifact
from pedigree.data.chat.chat import Chat
from pedigree.data.chat.documents import SingleAnswers
from pedigree.data.records import records
from pedigree.stages.core.batches import Unit, share_prompts
from pedigree.stages.job.failures import NotFinite
from pedigree.stages.job.job import Inputs, Job, only
from pedigree.stages.sampling.answer_log import keys_of
from pedigree.stages.sampling.frozen_copies import FrozenModel, Part, in_parts
from pedigree.stages.training.feed import GlobalBatch, feed
from pedigree.stages.training.logprobs import PolicyModule
from pedigree.stages.training.models import frozen, load_policy
from pedigree.stages.training.probe import probe
from pedigree.stages.training.reference import content_key, document_logps
from pedigree.stages.training.token_cache import units_of
from pedigree.stages.training.trainer import TORCH_DTYPES
from pedigree.stages.training.training_rows import Row, every_answer, fitting, gather, report_rows

CHUNK_ROWS = 256


def run(config: ReferenceLogprobs, inputs: Inputs, job: Job) -> dict[str, Any]:
    """Score every answer of every row once.

    Raises:
        NotFinite: a log-probability is NaN or infinite.
    """
    policy = only(inputs, "policy")
    chat = Chat(policy.payload)
    with job.busy("reading rows"):
        answers = every_answer(gather(inputs["preferences"].values()))
    every = units_of(answers, SingleAnswers(taken="every_answer"), chat, job, policy, inputs["preferences"].values())
    kept, units = fitting(answers, every, config.max_length, job, config.too_long)
    report_rows(answers, len(kept), 0, every, config, job, "answers")
    grouped = by_row(kept, units, job.numerics)
    chunks = [grouped[start : start + CHUNK_ROWS] for start in range(0, len(grouped), CHUNK_ROWS)]
    parts = (Part(chunk_keys(chunk, policy.record.content, config, job), [unit for _, unit in chunk]) for chunk in chunks)
    rows: dict[str, dict[str, Any]] = {}
    found = in_parts(partial(FrozenPolicy, policy, config, chat.pad_id), parts, job, lambda done: job.progress(done, len(grouped)))
    with closing(found):
        for chunk, scored in zip(chunks, found, strict=True):
            for (source, unit), logps in zip(chunk, scored, strict=True):
                for doc, logp in zip(unit, logps, strict=True):
                    key = content_key(doc)
                    rows.setdefault(key, {"id": key, "source": source, "logp": logp, "length": doc.num_trained})
    records.save(job.out, "logprobs", list(rows.values()))
    tokens = sum(row["length"] for row in rows.values())
    return {"rows": len(rows), "tokens": tokens, "mean_logp": sum(row["logp"] for row in rows.values()) / tokens}


def by_row(kept: Sequence[Row], units: Sequence[Unit], numerics: Numerics) -> list[tuple[str, Unit]]:
    """(source, answers that share their prompt in one forward pass) of each row."""
    found: dict[tuple[str, str], Unit] = {}
    for row, unit in zip(kept, units, strict=True):
        place = (row["source"], row["id"])
        found[place] = (*found.get(place, ()), *unit)
    return [(source, unit) for (source, _), answers in found.items() for unit in share_prompts(answers, numerics)]


def chunk_keys(chunk: Sequence[tuple[str, Unit]], weights: str, config: ReferenceLogprobs, job: Job) -> list[str]:
    """Keys of a chunk's units, from everything that determines their log-probabilities."""
    decides = {
        "weights": weights,
        "documents": [[content_key(doc) for doc in unit] for _, unit in chunk],
        "dtype": config.dtype,
        "head": config.head,
        "numerics": job.numerics.deciding(),
    }
    return keys_of(decides, len(chunk))


class FrozenPolicy(FrozenModel):
    """The policy, loaded at the first units."""

    def __init__(self, policy: Artifact, config: ReferenceLogprobs, pad_id: int, job: Job) -> None:
        super().__init__(job)
        self._policy, self._config, self._pad_id = policy, config, pad_id

    @cached_property
    def _module(self) -> PolicyModule:
        with self._job.busy("loading the model"):
            module = load_policy(self._policy, self._job.numerics, head=self._config.head)
            module = frozen(module, self._device, TORCH_DTYPES[self._config.dtype])
            probe(module, self._job.numerics, self._device)
        return module

    def score(self, rows: Sequence[Unit], progress: Callable[[int], None]) -> list[list[float]]:
        """log π₀ of each answer of each unit."""
        module, order, sums = self._module, list[int](), list[torch.Tensor]()
        with feed([GlobalBatch(rows)], 0, 1, self._job.numerics, self._pad_id, self._device) as fed:
            for micro_batch in fed.micro_batches():
                order += micro_batch.units
                sums.append(document_logps(module, micro_batch.batch))
                progress(len(order))
        logps = iter(torch.cat(sums).tolist())
        found = {place: [next(logps) for _ in rows[place]] for place in order}
        if not all(math.isfinite(logp) for answers in found.values() for logp in answers):
            raise NotFinite("a log-probability of the policy is NaN or infinite: its weights are damaged, or bf16 is too narrow: try fp32")
        return [found[place] for place in range(len(rows))]
