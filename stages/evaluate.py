"""Scores of policies on suites, item by item, all by one engine.

    payload/rows.jsonl        one line per policy and item, with what the verifier read and why
    payload/scores.json       per policy and task: n, mean and 95 % interval; paired differences between policies
    evidence/samples.jsonl    the first items of each task with every policy's answer, side by side

The record says whether the suites are dev or unseen and, of unseen ones, how many looks this evaluation took: one for each different
model. It knows of itself and of what its models are made from; how often a whole recipe looks is counted in its report.

Policies answer the same items with the same seeds, so their differences are paired; intervals are percentile bootstraps over items.
"""

from itertools import pairwise
from typing import Any

from configs.datasets import Evaluate
from data import records
from data.artifacts import Artifact, read_lineage, write_json, write_rows
from data.chat import Chat
from data.records import ItemScore
from stages.core.statistics import bootstrap_mean, paired_difference
from stages.core.verifiers import verify
from stages.engines.chunks import Ask, generate
from stages.engines.sampler import Request, seed_of
from stages.job import Inputs, Job, StageError

FROZEN = ("select", "source_model")
"""Stages whose models unseen suites may be run on."""
SHOWN_ITEMS = 8
"""Items per task in the evidence."""


def run(config: Evaluate, inputs: Inputs, job: Job) -> dict[str, Any]:
    """Generates, verifies, and compares.

    Raises:
        StageError: a suite is empty, two items have one name, an item does not fit into a policy's context, or an unseen suite is
            evaluated together with a dev suite or with a model that was not frozen or that it had a part in.
        EngineLost: the engine died or stopped responding; finished chunks are kept.
    """
    split = split_of(inputs)
    with job.busy("reading rows"):
        items = gather(inputs)
    asks: dict[str, Ask] = {}
    total = len(items) * len(inputs["policies"])
    for label, policy in inputs["policies"].items():
        chat, requests = Chat(policy.payload), []
        for number, item in enumerate(items):
            job.doing("tokenising", len(asks) * len(items) + number, total, "prompts")
            requests.append(Request(chat.prompt(item["messages"]), seed_of(config.seed, item["task"], item["id"])))
        asks[label] = Ask(policy, chat, requests)
    answers = generate(asks, config.sampling, chunk_size=config.chunk_size, dtype=config.dtype, job=job)

    rows: list[ItemScore] = []
    for label, ask in asks.items():
        for item, answer in zip(items, answers[label], strict=True):
            job.doing("verifying", len(rows), total, "answers")
            rows.append(score(label, item, ask.chat.decode(answer.response_ids)))
    with job.busy("comparing policies"):
        table = tabulate(rows, list(asks), config)
    for label, ask in asks.items():
        table["policies"][label]["content"] = ask.policy.record.content
    with job.busy("writing rows"):
        records.save(job.out, rows)
    write_json(job.out / "payload" / "scores.json", table)
    write_rows(job.evidence / "samples.jsonl", samples(rows, items))
    truncated = sum(answer.finish_reason == "length" for one in answers.values() for answer in one)
    means: dict[str, float] = {}
    for label, policy in table["policies"].items():
        means |= {f"{label}/{task}": entry["mean"] for task, entry in policy["tasks"].items()}
        means[f"{label}/mean"] = policy["mean"]
    taken = {"looks": len({policy.record.content for policy in inputs["policies"].values()})} if split == "unseen" else {}
    return {"split": split, **taken, "items": len(items), "rows": len(rows), "truncated_share": truncated / len(rows), **means}


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


def gather(inputs: Inputs) -> list[dict[str, Any]]:
    """The items of all suites, in the recipe's order."""
    items = []
    for label, suite in inputs["suites"].items():
        found = records.load(suite)
        if not found:
            raise StageError(f"suite {label} has no items: nothing can be measured on it")
        items += found
    seen: set[tuple[str, str]] = set()
    for item in items:
        name = (item["task"], item["id"])
        if name in seen:
            raise StageError(f"item {item['id']} of task {item['task']} is in the suites twice: give each suite a task name of its own")
        seen.add(name)
    return items


def score(label: str, item: dict[str, Any], text: str) -> ItemScore:
    verdict = verify(item["verifier"], text)
    return {
        "id": item["id"],
        "task": item["task"],
        "policy": label,
        "text": text,
        "answer": verdict.answer,
        "score": verdict.score,
        "reason": verdict.reason,
    }


def tabulate(rows: list[ItemScore], labels: list[str], config: Evaluate) -> dict[str, Any]:
    """Means with intervals, and each policy's paired difference to the first and to the one before it.

    Returns:
        {"policies": {label: {"tasks": {task: {n, mean, low, high}}, "mean": mean over tasks}},
         "differences": [{candidate, baseline, task, n, mean, low, high}]}
    """
    scores: dict[str, dict[str, list[float]]] = {label: {} for label in labels}
    for row in rows:
        scores[row["policy"]].setdefault(row["task"], []).append(row["score"])
    draws: dict[str, Any] = {"resamples": config.resamples, "seed": config.seed}
    policies = {}
    for label, by_task in scores.items():
        tasks = {task: {"n": len(values), **bootstrap_mean(values, **draws)._asdict()} for task, values in by_task.items()}
        policies[label] = {"tasks": tasks, "mean": sum(entry["mean"] for entry in tasks.values()) / len(tasks)}
    differences = [
        {
            "candidate": candidate,
            "baseline": baseline,
            "task": task,
            "n": len(values),
            **paired_difference(values, scores[baseline][task], **draws)._asdict(),
        }
        for baseline, candidate in comparisons(labels)
        for task, values in scores[candidate].items()
    ]
    return {"policies": policies, "differences": differences}


def comparisons(labels: list[str]) -> list[tuple[str, str]]:
    """(baseline, candidate): each with the one before it, then each with the first."""
    neighbours = list(pairwise(labels))
    return neighbours + [(labels[0], label) for label in labels[2:]]


def samples(rows: list[ItemScore], items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first items of each task: one line per policy, an item's lines together."""
    by_item: dict[tuple[str, str], list[ItemScore]] = {}
    for row in rows:
        by_item.setdefault((row["task"], row["id"]), []).append(row)
    shown: dict[str, int] = {}
    found = []
    for item in items:
        shown[item["task"]] = shown.get(item["task"], 0) + 1
        if shown[item["task"]] <= SHOWN_ITEMS:
            found += [{**row, "messages": item["messages"]} for row in by_item[item["task"], item["id"]]]
    return found
