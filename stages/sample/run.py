"""Sample answers to a window of a prompt pool from one or several policies: all of them per prompt, or some drawn per prompt.

    payload/rows-*.parquet    completions, by policy, then prompt, then index; of conversations with an environment, judgments
    evidence/samples.jsonl    the answers to the first prompts

Every answer has its own seed, from (config.seed, policy label, prompt id, index); its index determines its temperature.

Prompts, requests and answers are read from disk on demand; only a few hundred bytes of each stay in memory.
"""

from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from pedigree.configs.judging.pools import Sample, Window
from pedigree.configs.methods.environment_programs import AnyPlayed, served_user
from pedigree.data.artifacts.artifacts import Artifact, write_rows
from pedigree.data.chat.chat import Chat
from pedigree.data.records import records
from pedigree.data.records.records import Completion, Judgment
from pedigree.data.records.sequences import Mapped
from pedigree.stages.core.drawing import draw_policies
from pedigree.stages.job.failures import StageError
from pedigree.stages.job.job import Inputs, Job, only
from pedigree.stages.sampling.conversations import Transcript
from pedigree.stages.sampling.engines import WarmEngines
from pedigree.stages.sampling.generate import Ask, Episodes, Opening, generate
from pedigree.stages.sampling.partners import open_environments
from pedigree.stages.sampling.policy_servers import serving
from pedigree.stages.sampling.prepared import prepared
from pedigree.stages.sampling.sampler import Generation, Request, seed_of
from pedigree.stages.verifiers import Verdict, verify_each
from pedigree.stages.verifiers.environments import Environments

SHOWN_PROMPTS = 8
SHOWN_FIELDS = ("id", "policy", "messages", "text", "finish_reason")


@dataclass(frozen=True)
class Draw:
    """An answer to generate."""

    prompt: dict[str, Any]
    index: int
    seed: int
    temperature: float | None
    """Set if the answers to a prompt have different temperatures."""


def run(config: Sample, inputs: Inputs, job: Job) -> dict[str, Any]:
    """Sample `samples_per_prompt` answers per prompt and policy drawn for it.

    Raises:
        StageError: the pool is shorter than the window, a prompt does not fit into a policy's context, or no conversation has a score.
        PedigreeError: the environment cannot be used.
        EngineLost: an engine died or stopped responding; finished chunks, or answers, are kept.
    """
    with job.busy("reading rows"):
        prompts = window(records.opened(only(inputs, "prompts")), config.prompts)
        draws = draws_of(config, list(inputs["policies"]), prompts)
    total, tokenized = sum(map(len, draws.values())), count()

    def beat() -> None:
        job.doing("tokenizing", next(tokenized), total, "answers")

    policies = {label: inputs["policies"][label] for label in draws}
    with (
        WarmEngines(job.numerics, job.placement.engines) as ahead,
        serving(served_user(config), inputs, job) as servers,
        open_environments(config.environment, prompts, (chats := chats_of(policies)).values(), servers, job) as environments,
    ):
        asks = {label: ask(config, policies[label], chats[label], drawn, environments, job.folder, beat) for label, drawn in draws.items()}
        answers = generate(asks, chunk_size=config.chunk_size, dtype=config.dtype, job=job, ahead=ahead)
    own = config.on_policy.policies if config.on_policy else ()
    tally = Tally({prompt["id"] for prompt in prompts[:SHOWN_PROMPTS]})
    failures: list[dict[str, Any]] = []

    def decoding() -> None:
        job.doing("decoding", tally.rows, total, "answers")

    def rows() -> Iterator[Completion | Judgment]:
        for label, drawn in draws.items():
            for one, request, answer in zip(drawn, asks[label].requests, answers[label], strict=True):
                decoding()
                row = completion(one, label, label in own, asks[label], request, answer)
                tally.note(row)
                yield row

    def played(environment: AnyPlayed) -> Iterator[Judgment]:
        for label, drawn in draws.items():
            for row in judgments(environment, drawn, label, label in own, policies[label], answers[label], failures, decoding):
                decoding()
                tally.note(row)
                yield row

    records.save(job.out, *(("judgment", played(config.environment)) if config.environment else ("completion", rows())))
    write_rows(job.evidence / "samples.jsonl", tally.samples)
    if config.environment:
        write_rows(job.evidence / "failures.jsonl", failures)
        if len(failures) == tally.rows:
            raise StageError(f"none of {tally.rows} conversations has a score, e.g. because {failures[0]['reason']}")
    return {
        "rows": tally.rows,
        "prompts": len(prompts),
        "policies": len(asks),
        "answers": {label: len(draws.get(label, ())) for label in inputs["policies"]},
        **({"on_policy": tally.on_policy_shares()} if own else {}),
        "finish_reasons": dict(sorted(tally.finish_reasons.items())),
        "empty": tally.empty,
        "mean_response_length": tally.tokens / tally.rows,
        **({"unscored": len(failures)} if config.environment else {}),
    }


@dataclass
class Tally:
    """Statistics of the rows, collected as they are written."""

    shown: Set[str]
    """Prompts whose answers go into the evidence."""
    samples: list[dict[str, Any]] = field(default_factory=list)
    rows: int = 0
    tokens: int = 0
    empty: int = 0
    finish_reasons: Counter[str] = field(default_factory=Counter)
    prompts: set[str] = field(default_factory=set)
    on_policy: Counter[str] = field(default_factory=Counter)
    """Prompt → number of on-policy answers."""

    def note(self, row: Completion | Judgment) -> None:
        self.rows += 1
        self.tokens += len(row["response_ids"]) if "response_ids" in row else row["response_length"]
        self.empty += not row["text"].strip()
        self.finish_reasons[row["finish_reason"]] += 1
        self.prompts.add(row["prompt_id"])
        if row["on_policy"]:
            self.on_policy[row["prompt_id"]] += 1
        if row["prompt_id"] in self.shown:
            self.samples.append({name: row[name] for name in SHOWN_FIELDS} | records.context_of(row))

    def on_policy_shares(self) -> dict[str, float]:
        """Shares of the prompts with on-policy answers, and of on-policy answers."""
        return {"prompts": len(self.on_policy) / len(self.prompts), "answers": self.on_policy.total() / self.rows}


def draws_of(config: Sample, labels: list[str], prompts: Sequence[dict[str, Any]]) -> dict[str, Sequence[Draw]]:
    """Label → its answers by prompt, then index; policies without any are omitted."""
    share = config.on_policy.share if config.on_policy else None
    own = config.on_policy.policies if config.on_policy else ()
    chosen = {label: array("q") for label in labels}
    for number, prompt in enumerate(prompts):
        for label in draw_policies(labels, prompt["id"], seed=config.seed, count=config.policies_per_prompt, on_policy=own, share=share):
            chosen[label].append(number)
    return {label: drawn_of(config, label, Mapped(numbers, prompts.__getitem__)) for label, numbers in chosen.items() if numbers}


def drawn_of(config: Sample, label: str, prompts: Sequence[dict[str, Any]]) -> Sequence[Draw]:
    """The draws of one policy for its prompts."""
    temperatures = config.sampling.temperatures if len(config.sampling.temperatures) > 1 else (None,)

    def drawn(number: int) -> Draw:
        place, index = divmod(number, config.samples_per_prompt)
        prompt = prompts[place]
        return Draw(prompt, index, seed_of(config.seed, label, prompt["id"], index), temperatures[index % len(temperatures)])

    return Mapped(range(len(prompts) * config.samples_per_prompt), drawn)


def chats_of(policies: Mapping[str, Artifact]) -> dict[str, Chat]:
    return {label: Chat(policy.payload) for label, policy in policies.items()}


def ask(
    config: Sample,
    policy: Artifact,
    chat: Chat,
    drawn: Sequence[Draw],
    environments: Environments | None,
    folder: Path,
    beat: Callable[[], None],
) -> Ask:
    """The requests to one policy, in the order of its draws, stored in a folder; `beat` is called before each."""

    def requests() -> Iterator[Request]:
        ids: list[int] = []
        for one in drawn:
            beat()
            if one.index == 0:
                ids = chat.prompt(one.prompt["messages"], one.prompt.get("template_arguments"))
            yield Request(ids, one.seed, one.temperature)

    stored = prepared(requests(), folder)
    if environments is None:
        return Ask(policy, chat, stored, config.sampling.first)

    def opening(number: int) -> Opening:
        prompt = drawn[number].prompt
        return Opening(**vars(stored[number]), prompt=prompt, environment_seed=seed_of("environment", config.seed, prompt["id"]))

    return Episodes(policy, chat, Mapped(range(len(stored)), opening), config.sampling.first, environments)


def completion(drawn: Draw, label: str, on_policy: bool, asked: Ask, request: Request, answer: Generation) -> Completion:
    """One answer with its provenance."""
    row: Completion = {
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
    if drawn.temperature is not None:
        row["temperature"] = drawn.temperature
    return row


def judgments(
    environment: AnyPlayed,
    drawn: Sequence[Draw],
    label: str,
    on_policy: bool,
    policy: Artifact,
    answers: Sequence[Transcript],
    failures: list[dict[str, Any]],
    beat: Callable[[], None],
) -> Iterator[Judgment]:
    """Conversations of one policy with their scores; why others have none is appended to `failures`. `beat` is called while waiting."""
    by_verifier = environment.scored_by == "verifier"
    asked = ((one.prompt["verifier"] if by_verifier else None, answer.text) for one, answer in zip(drawn, answers, strict=True))
    for one, answer, verdict in zip(drawn, answers, verify_each(asked, beat), strict=True):
        row: Judgment = {
            "id": f"{one.prompt['id']}/{label}/{one.index}",
            "prompt_id": one.prompt["id"],
            "source": one.prompt["source"],
            "messages": answer.messages,
            "policy": label,
            "policy_content": policy.record.content,
            "on_policy": on_policy,
            "text": answer.text,
            "finish_reason": answer.finish_reason,
            "response_length": answer.tokens,
            "verifier_score": None,
            "rewards": {},
            "reward": None,
            "disagreement": None,
            "ratings": {},
            "rating": None,
            "score": None,
            "win_rate": None,
            **records.context_of(one.prompt),
        }
        score = verdict.score if isinstance(verdict, Verdict) else str(verdict or "its prompt has no verifier")
        score = answer.reward if not by_verifier or answer.failed else score
        if isinstance(score, str):
            failures.append({"id": row["id"], "judge": environment.scored_by, "reason": score})
        else:
            row["score"] = score
            row["verifier_score"] = score if by_verifier else None
        if one.temperature is not None:
            row["temperature"] = one.temperature
        yield row


def window(pool: Sequence[dict[str, Any]], wanted: Window) -> Sequence[dict[str, Any]]:
    """Rows [index * count, (index + 1) * count) of the pool.

    Raises:
        StageError: the pool is too short.
    """
    start, end = wanted.index * wanted.count, (wanted.index + 1) * wanted.count
    if end > len(pool):
        raise StageError(
            f"prompts {start} to {end} are configured (count {wanted.count}, index {wanted.index}), but the pool has {len(pool)}: "
            f"lower prompts.count or prompts.index, or add prompts to the pool"
        )
    return Mapped(range(start, end), pool.__getitem__)
