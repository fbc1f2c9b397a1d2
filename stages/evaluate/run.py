"""Scores of policies on suites, item by item, all by one engine.

    payload/rows.jsonl        one line per policy and item: its score by every metric, what the verifier read and why; all of several
                              answers
    payload/scores.json       per policy and task: n, mean and 95 % interval by every metric; paired differences between policies; per task
                              its hash, which says what scores may be compared with it
    evidence/samples.jsonl    the first items of each task with every policy's answer, side by side

The record says whether the suites are dev or unseen and, of unseen ones, how many looks this evaluation took: one for each different
model. It knows of itself and of what its models are made from; how often a whole recipe looks is counted in its report.

A suite with a form (`configs/rows/suite_forms.py`) says itself how its answers are drawn, or its choices compared. Policies answer the same
items with the same seeds, so their differences are paired; intervals are percentile bootstraps over items, within categories where the
average is over these. A score that nobody could tell is null, counted, and left out; the answers behind an item's score are counted each.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import count, pairwise, product
from pathlib import Path
from typing import Any

from configs.judging.answers import Evaluate
from configs.methods.training import Sampling
from configs.rows.suite_forms import Form
from data.artifacts.artifacts import Artifact, read_lineage, write_json, write_rows
from data.chat.chat import Chat
from data.records import records
from data.records.records import AnswerScore, ItemScore
from stages.evaluate.suite_scores import (
    Draws,
    Task,
    answers_of,
    cut,
    metrics_of,
    score_answer,
    score_choices,
    score_item,
    tabulate,
    task_hash,
    verifiers_of,
)
from stages.job.job import Inputs, Job, StageError
from stages.sampling.chunks import Ask, Score, generate
from stages.sampling.engine_processes import Ahead
from stages.sampling.prepared import Prepared
from stages.sampling.sampler import Continuation, Generation, Request, seed_of
from stages.verifiers import sandbox

FROZEN = ("select", "source_model")
"""Stages whose models unseen suites may be run on."""
SHOWN_ITEMS = 8
"""Items per task in the evidence."""
LOOK_SECONDS = 1.0
"""Between two looks whether an answer is verified."""


@dataclass(frozen=True)
class Suite:
    """Items that are asked and scored alike."""

    label: str
    items: list[dict[str, Any]]
    form: Form | None
    sampling: Sampling | None
    """None where choices are compared."""
    hash: str

    @property
    def samples(self) -> int:
        return self.form.draw.samples if self.form and self.form.draw else 1

    @property
    def stop(self) -> tuple[str, ...]:
        """Texts that end an answer."""
        return tuple(self.form.draw.stop) if self.form and self.form.draw else ()

    @property
    def has_programs(self) -> bool:
        return any(one["name"] == "python" for item in self.items for one in verifiers_of(item, metrics_of(self.form)).values())


def run(config: Evaluate, inputs: Inputs, job: Job) -> dict[str, Any]:
    """Generates, verifies, and compares.

    Raises:
        StageError: a suite is empty, two items have one name, an item does not fit into a policy's context, an unseen suite is
            evaluated together with a dev suite or with a model that was not frozen or that it had a part in, or too many scores
            are unknown.
        NoSandbox: a suite has programs, and they cannot be locked in on this machine.
        EngineLost: the engine died or stopped responding; finished chunks are kept.
    """
    split = split_of(inputs)
    with job.busy("reading rows"):
        suites = gather(config, inputs)
        tasks = tasks_of(suites)
        if any(suite.has_programs for suite in suites):
            sandbox.require()
    total, tokenised = sum(len(suite.items) for suite in suites) * len(inputs["policies"]), count()

    def beat() -> None:
        job.doing("tokenising", next(tokenised), total, "items")

    with Ahead(job.numerics, job.placement.engines) as ahead, Scoring(job.numerics.threads) as scoring:
        chats = {label: Chat(policy.payload) for label, policy in inputs["policies"].items()}
        asks = {
            (label, suite.label): asked(config, suite, policy, chats[label], job.folder, beat)
            for label, policy in inputs["policies"].items()
            for suite in suites
        }
        by_label = {suite.label: suite for suite in suites}

        def tell(of: tuple[str, str], given: Sequence[Any]) -> None:
            scoring.begin(of[0], by_label[of[1]], given, chats[of[0]])

        answers = generate(asks, chunk_size=config.chunk_size, dtype=config.dtype, job=job, ahead=ahead, tell=tell)
        rows: list[ItemScore] = []

        def verifying() -> None:
            job.doing("verifying", len(rows), total, "items")

        for label, suite in product(chats, suites):
            for row in scoring.rows(label, suite, verifying):
                verifying()
                rows.append(row)
    refuse_unknown(config, rows)
    with job.busy("comparing policies"):
        labels = list(chats)
        table = tabulate(rows, labels, tasks, comparisons(labels), Draws(config.resamples, config.seed))
    for label, policy in inputs["policies"].items():
        table["policies"][label]["content"] = policy.record.content
    with job.busy("writing rows"):
        records.save(job.out, "scores", rows)
    write_json(job.out / "payload" / "scores.json", table)
    items = [item for suite in suites for item in suite.items]
    write_rows(job.evidence / "samples.jsonl", samples(rows, items))
    cut_off = [
        is_cut_off(answer, suite, chat)
        for label, chat in chats.items()
        for suite in suites
        for answer in answers[label, suite.label]
        if isinstance(answer, Generation)
    ]
    means: dict[str, float] = {}
    for label, policy in table["policies"].items():
        means |= {f"{label}/{task}": entry["mean"] for task, entry in policy["tasks"].items()}
        means[f"{label}/mean"] = policy["mean"]
    taken = {"looks": len({policy.record.content for policy in inputs["policies"].values()})} if split == "unseen" else {}
    return {
        "split": split,
        **taken,
        "items": len(items),
        "rows": len(rows),
        "truncated_share": sum(cut_off) / len(cut_off) if cut_off else 0.0,
        "unknown": sum(row["score"] is None for row in rows),
        "unknown_answers": sum(is_unknown(answer) for row in rows for answer in answers_of(row)),
        "hashes": {name: task.hash for name, task in tasks.items()},
        **means,
    }


def asked(config: Evaluate, suite: Suite, policy: Artifact, chat: Chat, folder: Path, beat: Callable[[], None]) -> Ask | Score:
    """The requests of a suite to a policy, kept in a folder: each item as often as it is answered, or with each of its choices, which are
    in memory. `beat` is called at each item."""

    def prompts() -> Iterator[tuple[dict[str, Any], list[int]]]:
        for item in suite.items:
            beat()
            yield item, prompt_ids(suite, item, chat)

    if suite.sampling is None:
        return Score(policy, [Continuation(prompt, chat.response_ids(choice)) for item, prompt in prompts() for choice in item["choices"]])
    requests = (Request(prompt, seed_of(*seed_parts(config, item, index))) for item, prompt in prompts() for index in range(suite.samples))
    return Ask(policy, chat, Prepared(requests, folder), suite.sampling)


def seed_parts(config: Evaluate, item: dict[str, Any], index: int) -> list[str | int]:
    """What an answer's seed is made of; the first of several has that of a single one."""
    return [config.seed, item["task"], item["id"], *([index] if index else [])]


def prompt_ids(suite: Suite, item: dict[str, Any], chat: Chat) -> list[int]:
    if suite.form and not suite.form.prompt.chat:
        return chat.plain(item["messages"][-1]["content"] + item.get("prefix", ""))
    return chat.prefilled(item["messages"], item["prefix"]) if "prefix" in item else chat.prompt(item["messages"])


Place = int | slice
"""Of what is scored by itself among the answers to a suite: one answer, or the log-probabilities of each choice of an item."""


def places(suite: Suite) -> Iterator[tuple[dict[str, Any], Sequence[Place]]]:
    """Each item with the places of the answers to it."""
    start = 0
    for item in suite.items:
        end = start + (len(item["choices"]) if suite.sampling is None else suite.samples)
        yield item, [slice(start, end)] if suite.sampling is None else range(start, end)
        start = end


class Scoring:
    """Scores answers in threads of its own, which read them, while the engine makes others; a context manager, whose end gives up what is
    not done.

    Programs run in their sandboxes side by side, by so many `workers`.
    """

    def __init__(self, workers: int) -> None:
        self._programs, self._others = ThreadPoolExecutor(workers, "programs"), ThreadPoolExecutor(1, "verifiers")
        self._begun: dict[tuple[str, str], tuple[Sequence[Any], list[list[Future[AnswerScore]]]]] = {}

    def __enter__(self) -> "Scoring":
        return self

    def __exit__(self, *exception: object) -> None:
        for threads in (self._programs, self._others):
            threads.shutdown(wait=False, cancel_futures=True)

    def begin(self, label: str, suite: Suite, answers: Sequence[Any], chat: Chat) -> None:
        """Puts a policy's answers to a suite at the end of what is to be scored."""
        threads = self._programs if suite.has_programs else self._others
        futures = [[threads.submit(score, suite, item, answers, place, chat) for place in own] for item, own in places(suite)]
        self._begun[label, suite.label] = answers, futures

    def rows(self, label: str, suite: Suite, beat: Callable[[], None]) -> Iterator[ItemScore]:
        """A policy's rows of a suite, in its order.

        A program may wait for minutes, and many of one item for longer than a job may be silent; each has its limit of time, so that
        `beat` is called as long as one is waited for.
        """
        macro = suite.form is not None and suite.form.average == "macro"
        answers, futures = self._begun.pop((label, suite.label))
        for (item, own), begun in zip(places(suite), futures, strict=True):
            scores: list[AnswerScore] = []
            for future in begun:
                while not wait([future], timeout=LOOK_SECONDS).done:
                    beat()
                scores.append(future.result())
            row = score_item(label, item, metrics_of(suite.form), scores, macro=macro)
            yield {**row, "logprobs": [sum(choice) for choice in answers[own[0]]]} if suite.sampling is None else row


def score(suite: Suite, item: dict[str, Any], answers: Sequence[Any], place: Place, chat: Chat) -> AnswerScore:
    """One answer by every metric; where choices are compared, the one among them."""
    given: Any = answers[place]
    if suite.sampling is None:
        return score_choices(item, metrics_of(suite.form), given)
    return score_answer(item, metrics_of(suite.form), cut(chat.decode(given.response_ids), suite.stop))


def is_cut_off(answer: Generation, suite: Suite, chat: Chat) -> bool:
    """Whether an answer ended for want of tokens, and at none of the texts that end it before."""
    if answer.finish_reason != "length":
        return False
    text = chat.decode(answer.response_ids) if suite.stop else ""
    return cut(text, suite.stop) == text


def tasks_of(suites: list[Suite]) -> dict[str, Task]:
    """By name, in order of first appearance.

    Raises:
        StageError: a task's items are in two suites, which may be asked in two ways.
    """
    items: dict[str, dict[str, Any]] = {}
    found: dict[str, Suite] = {}
    for suite in suites:
        for item in suite.items:
            first = found.setdefault(item["task"], suite)
            if first is not suite and (first.form or suite.form):
                raise StageError(f"task {item['task']} is in the suites {first.label} and {suite.label}: give each a task name of its own")
            items.setdefault(item["task"], {})[item["id"]] = item
    return {name: Task(suite.label, suite.hash, suite.form, items[name]) for name, suite in found.items()}


def is_unknown(answer: AnswerScore | ItemScore) -> bool:
    return None in answer["scores"].values()


def refuse_unknown(config: Evaluate, rows: list[ItemScore]) -> None:
    """Raises StageError when so many of a policy's answers on a task have an unknown score that the others say little, or a metric is
    known of no item."""
    by_task: dict[tuple[str, str], list[ItemScore]] = {}
    for row in rows:
        by_task.setdefault((row["policy"], row["task"]), []).append(row)
    for (policy, task), own in by_task.items():
        answers = [answer for row in own for answer in answers_of(row)]
        unknown = [answer for answer in answers if is_unknown(answer)]
        unmeasured = [metric for metric in own[0]["scores"] if all(row["scores"][metric] is None for row in own)]
        if len(unknown) / len(answers) > config.max_unknown or unmeasured:
            found = f"the scores of {len(unknown)} of {len(answers)} answers of {policy} on {task} are unknown"
            mend = f"e.g. {unknown[0]['reason']}; mend what keeps them from being told"
            if unmeasured:
                raise StageError(f"{found}, so that no item has {', '.join(unmeasured)}: {mend}")
            raise StageError(f"{found}, more than max_unknown {config.max_unknown:g}: {mend}, or raise max_unknown")


def split_of(inputs: Inputs) -> str:
    """Whether the suites are dev or unseen.

    Raises:
        StageError: they are both, or a suite is unseen and a policy is not frozen or comes from what was done with that suite.
    """
    splits = {label: str(suite.record.config.get("split", "dev")) for label, suite in inputs["suites"].items()}
    if len(set(splits.values())) > 1:
        raise StageError(f"suites must be all dev or all unseen, not {splits}: evaluate them in two stages")
    split = next(iter(splits.values()))
    if split == "unseen":
        for label, policy in inputs["policies"].items():
            if policy.record.kind not in FROZEN:
                raise StageError(f"{label} comes from {policy.record.kind} and is not frozen: name the `select` stage that chose it")
            refuse_seen(label, policy, {suite.record.content: name for name, suite in inputs["suites"].items()})
    return split


def refuse_seen(label: str, policy: Artifact, unseen: dict[str, str]) -> None:
    """Looks through a model's lineage for unseen suites (content → label), under whatever name and split."""
    file = policy.path / "lineage.json"
    for record, _ in read_lineage(file).values() if file.is_file() else ():
        for given in record.inputs:
            if given.content in unseen and given.port != "benchmarks":
                raise StageError(
                    f"{unseen[given.content]} is no unseen suite for {label}: in its lineage a {record.kind} stage had it as {given.port} "
                    f"{given.label}; measure it on a suite that nothing was made with"
                )


def gather(config: Evaluate, inputs: Inputs) -> list[Suite]:
    """The suites with their items, in the recipe's order.

    Raises:
        StageError: a suite is empty or needs `sampling`, or an item is there twice.
    """
    suites = []
    seen: set[tuple[str, str]] = set()
    for label, artifact in inputs["suites"].items():
        items, form = records.load(artifact), records.form_of(artifact)
        if not items:
            raise StageError(f"suite {label} has no items: nothing can be measured on it")
        for item in items:
            name = (item["task"], item["id"])
            if name in seen:
                raise StageError(f"item {item['id']} of task {item['task']} is in the suites twice: give each suite a task name of its own")
            seen.add(name)
        sampling = sampling_of(config, label, form)
        rows = records.digest_of(items)
        names = {verifier["name"] for item in items for verifier in (item["verifier"], *item.get("others", {}).values())}
        drawn = sampling.model_dump(mode="json") if sampling else None
        suites.append(Suite(label, items, form, sampling, task_hash(form, rows, sorted(names), sampling=drawn)))
    return suites


def sampling_of(config: Evaluate, label: str, form: Form | None) -> Sampling | None:
    """How a suite's answers are drawn; None where its choices are compared."""
    if form is None and config.sampling is None:
        raise StageError(f"suite {label} has no form, which would say how answers are drawn: set sampling")
    return config.sampling_of(form)


def comparisons(labels: list[str]) -> list[tuple[str, str]]:
    """(baseline, candidate): each with the one before it, then each with the first."""
    neighbours = list(pairwise(labels))
    return neighbours + [(labels[0], label) for label in labels[2:]]


def samples(rows: list[ItemScore], items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first items of each task: one line per policy, an item's lines together."""
    of_item: dict[tuple[str, str], list[ItemScore]] = {}
    for row in rows:
        of_item.setdefault((row["task"], row["id"]), []).append(row)
    shown: dict[str, int] = {}
    found = []
    for item in items:
        shown[item["task"]] = shown.get(item["task"], 0) + 1
        if shown[item["task"]] <= SHOWN_ITEMS:
            shown_rows = [{name: value for name, value in row.items() if name != "answers"} for row in of_item[item["task"], item["id"]]]
            found += [{**row, "messages": item["messages"]} for row in shown_rows]
    return found
