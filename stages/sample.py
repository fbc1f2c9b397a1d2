"""Answers of one or several policies to a window of a prompt pool: of all of them to each prompt, or of some that are drawn for it.

    payload/rows-*.parquet    completions: by policy, then prompt, then index
    evidence/samples.jsonl    the answers to the first prompts

Every answer has a seed of its own, from (config.seed, policy label, prompt id, index).
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any

from configs.answers import Sample, Window
from configs.training import Sampling
from data import records
from data.artifacts import Artifact, write_rows
from data.chat import Chat
from data.records import Completion
from stages.core.drawing import draw_policies
from stages.engines.chunks import Ask, generate
from stages.engines.sampler import Ahead, Generation, Request, seed_of
from stages.job import Inputs, Job, StageError, only

SHOWN_PROMPTS = 8


@dataclass(frozen=True)
class Draw:
    """One answer to be generated."""

    prompt: dict[str, Any]
    index: int
    seed: int


def run(config: Sample, inputs: Inputs, job: Job) -> dict[str, Any]:
    """Samples `samples_per_prompt` answers per prompt and policy that is drawn for it.

    Raises:
        StageError: the pool ends before the window does, or a prompt does not fit into a policy's context.
        EngineLost: the engine died or stopped responding; finished chunks are kept.
    """
    with job.busy("reading rows"):
        prompts = window(records.load(only(inputs, "prompts")), config.prompts)
    draws = draws_of(config, list(inputs["policies"]), prompts)
    total, tokenised = sum(map(len, draws.values())), count()

    def beat() -> None:
        job.doing("tokenising", next(tokenised), total, "answers")

    with Ahead(job.numerics) as ahead:
        asks = {label: ask(inputs["policies"][label], drawn, config.sampling, beat) for label, drawn in draws.items()}
        answers = generate(asks, chunk_size=config.chunk_size, dtype=config.dtype, job=job, ahead=ahead)
    own = config.on_policy.policies if config.on_policy else ()
    rows: list[Completion] = []
    for label, drawn in draws.items():
        for one, request, answer in zip(drawn, asks[label].requests, answers[label], strict=True):
            job.doing("decoding", len(rows), total, "answers")
            rows.append(completion(one, label, label in own, asks[label], request, answer))
    with job.busy("writing rows"):
        records.save(job.out, "completion", rows)
    shown = {prompt["id"] for prompt in prompts[:SHOWN_PROMPTS]}
    fields = ("id", "policy", "messages", "text", "finish_reason")
    samples = [{name: row[name] for name in fields} | records.context_of(row) for row in rows if row["prompt_id"] in shown]
    write_rows(job.evidence / "samples.jsonl", samples)
    return {
        "rows": len(rows),
        "prompts": len(prompts),
        "policies": len(asks),
        "answers": {label: len(draws.get(label, [])) for label in inputs["policies"]},
        **({"on_policy": on_policy_shares(rows)} if own else {}),
        "finish_reasons": dict(sorted(Counter(row["finish_reason"] for row in rows).items())),
        "empty": sum(not row["text"].strip() for row in rows),
        "mean_response_length": sum(len(row["response_ids"]) for row in rows) / len(rows),
    }


def draws_of(config: Sample, labels: list[str], prompts: list[dict[str, Any]]) -> dict[str, list[Draw]]:
    """Label → its answers by prompt, then index; policies that nobody has drawn are left out."""
    share = config.on_policy.share if config.on_policy else None
    own = config.on_policy.policies if config.on_policy else ()
    found: dict[str, list[Draw]] = {label: [] for label in labels}
    for prompt in prompts:
        name = prompt["id"]
        for label in draw_policies(labels, name, seed=config.seed, count=config.policies_per_prompt, on_policy=own, share=share):
            found[label] += [
                Draw(prompt, index, seed_of(config.seed, label, name, index)) for index in range(config.samples_per_prompt)
            ]
    return {label: drawn for label, drawn in found.items() if drawn}


def ask(policy: Artifact, drawn: list[Draw], sampling: Sampling, beat: Callable[[], None]) -> Ask:
    """The requests to one policy, in the order of its draws; `beat` is called before each."""
    chat, requests = Chat(policy.payload), []
    ids: list[int] = []
    for one in drawn:
        beat()
        if one.index == 0:
            ids = chat.prompt(one.prompt["messages"], one.prompt.get("template_arguments"))
        requests.append(Request(ids, one.seed))
    return Ask(policy, chat, requests, sampling)


def completion(drawn: Draw, label: str, on_policy: bool, asked: Ask, request: Request, answer: Generation) -> Completion:
    """One answer, with all that says where it came from."""
    return {
        "id": f"{drawn.prompt['id']}/{label}/{drawn.index}",
        "prompt_id": drawn.prompt["id"],
        "source": drawn.prompt["source"],
        "messages": drawn.prompt["messages"],
        "verifier": drawn.prompt["verifier"],
        "policy": label,
        "policy_content": asked.policy.record.content,
        "on_policy": on_policy,
        "index": drawn.index,
        "seed": request.seed,
        "prompt_ids": request.prompt_ids,
        "response_ids": answer.response_ids,
        "logprobs": answer.logprobs,
        "text": asked.chat.decode(answer.response_ids),
        "finish_reason": answer.finish_reason,
        **records.context_of(drawn.prompt),
    }


def on_policy_shares(rows: list[Completion]) -> dict[str, float]:
    """Share of the prompts that the policy to be trained has answered, and of the answers that are its own."""
    prompts, own = {row["prompt_id"] for row in rows}, {row["prompt_id"] for row in rows if row["on_policy"]}
    return {"prompts": len(own) / len(prompts), "answers": sum(row["on_policy"] for row in rows) / len(rows)}


def window(pool: list[dict[str, Any]], wanted: Window) -> list[dict[str, Any]]:
    """Rows [index * count, (index + 1) * count) of the pool.

    Raises:
        StageError: the pool is too short: a truncated window would not be the recipe's.
    """
    start, end = wanted.index * wanted.count, (wanted.index + 1) * wanted.count
    if end > len(pool):
        raise StageError(
            f"prompts {start} to {end} are configured (count {wanted.count}, index {wanted.index}), the pool has {len(pool)}: "
            f"lower prompts.count or prompts.index, or add prompts to the pool"
        )
    return pool[start:end]
