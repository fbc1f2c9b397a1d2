"""Reference log-probabilities: policy + preferences → Σ_t log π₀(y_t) of every answer, keyed by the content of its tokens.

    payload/rows.jsonl    {id: hash of the prompt's and the answer's token ids, source, logp, length in tokens}

Computed once, they serve every training run on the same rows, which then needs one model in memory instead of two. Rows are processed
in chunks; finished chunks are on disk and survive a crash.
"""

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from pedigree.configs.language.execution import Numerics
from pedigree.configs.methods.training import ReferenceLogprobs
from pedigree.data.chat.chat import Chat
from pedigree.data.chat.documents import SingleAnswers
from pedigree.data.records import records
from pedigree.stages.core.batches import Unit, share_prompts
from pedigree.stages.job.failures import NotFinite
from pedigree.stages.job.job import Inputs, Job, only
from pedigree.stages.sampling.answer_log import AnswerLog, keys_of
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

    @cache
    def module() -> PolicyModule:
        with job.busy("loading the model"):
            return ready(load_policy(policy, job.numerics, head=config.head), config, job)

    rows: dict[str, dict[str, Any]] = {}
    with AnswerLog(job) as log:
        for number, chunk in enumerate(chunks):
            job.progress(number, len(chunks))
            keys = chunk_keys(chunk, policy.record.content, config, job)
            found = log.together(keys, lambda chunk=chunk: score(module(), [unit for _, unit in chunk], job, chat.pad_id))
            for (source, unit), logps in zip(chunk, found, strict=True):
                for doc, logp in zip(unit, logps, strict=True):
                    key = content_key(doc)
                    rows.setdefault(key, {"id": key, "source": source, "logp": logp, "length": doc.num_trained})
    job.progress(len(chunks), len(chunks))
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
        "numerics": job.numerics.model_dump(),
    }
    return keys_of(decides, len(chunk))


def ready(module: PolicyModule, config: ReferenceLogprobs, job: Job) -> PolicyModule:
    device = torch.device(job.numerics.device)
    module = frozen(module, device, TORCH_DTYPES[config.dtype])
    probe(module, job.numerics, device)
    return module


def score(module: PolicyModule, units: Sequence[Unit], job: Job, pad_id: int) -> list[list[float]]:
    """log π₀ of each answer of each unit."""
    device, order, sums = torch.device(job.numerics.device), list[int](), list[torch.Tensor]()
    with feed([GlobalBatch(units)], 0, 1, job.numerics, pad_id, device) as fed:
        for micro_batch in fed.micro_batches():
            order += micro_batch.units
            sums.append(document_logps(module, micro_batch.batch))
    logps = iter(torch.cat(sums).tolist())
    found = {place: [next(logps) for _ in units[place]] for place in order}
    if not all(math.isfinite(logp) for answers in found.values() for logp in answers):
        raise NotFinite("a log-probability of the policy is NaN or infinite: its weights are damaged, or bf16 is too narrow: try fp32")
    return [found[place] for place in range(len(units))]
