"""Score policies on suites, item by item, all with one engine.

    payload/rows.jsonl        one line per policy and item: score by metric, the answer that the verifier extracted and its reason; all
                              answers if there are several
    payload/scores.json       per policy and task: n, mean and 95 % interval by metric; paired differences between policies; per task
                              its hash: scores with equal hashes are comparable
    evidence/samples.jsonl    the first items of each task with every policy's answer, side by side

The record states whether the suites are dev or unseen and, for unseen ones, how many looks this evaluation took: one per distinct
model. It covers only this evaluation and its models' lineage; the recipe's report counts the looks of all its stages.

A suite with a form (`configs/rows/suite_forms.py`) specifies how answers are drawn or choices compared. Policies answer the same items with
the same seeds, so differences are paired. Intervals are percentile bootstraps over items, stratified by category for macro averages.
Unknown scores are null, counted, and excluded from means.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import count, pairwise, product
from pathlib import Path
from typing import Any

from pedigree.configs.base.frozen import digest
from pedigree.configs.judging.measuring import Evaluate
from pedigree.configs.language.kinds import recorded_kind
from pedigree.configs.methods.environment_programs import AnyEvaluated, EvaluatedUser, served_user
from pedigree.configs.methods.reward_terms import RewardProgram
from pedigree.configs.methods.training import Sampling
from pedigree.configs.rows.suite_forms import Form, Metric
from pedigree.data.artifacts.artifacts import Artifact, read_lineage, sha256_file, write_json, write_rows
from pedigree.data.chat.chat import Chat
from pedigree.data.records import records
from pedigree.data.records.records import AnswerScore, ItemScore
from pedigree.data.records.sequences import Mapped
from pedigree.stages.evaluate.suite_scores import (
    BY_PROGRAM,
    Draws,
    Task,
    answers_of,
    cut,
    metrics_of,
    metrics_of_environment,
    score_answer,
    score_choices,
    score_item,
    score_transcript,
    tabulate,
    task_hash,
    verifiers_of,
    with_number,
)
from pedigree.stages.job.failures import StageError
from pedigree.stages.job.job import Inputs, Job
from pedigree.stages.sampling.conversations import Transcript
from pedigree.stages.sampling.engines import WarmEngines
from pedigree.stages.sampling.functions import opened, values_of
from pedigree.stages.sampling.generate import Ask, Episodes, Opening, Score, generate
from pedigree.stages.sampling.partners import open_environments
from pedigree.stages.sampling.policy_servers import serving
from pedigree.stages.sampling.prepared import prepared
from pedigree.stages.sampling.sampler import Continuation, Generation, Request, seed_of
from pedigree.stages.verifiers import ended, names, sandbox
from pedigree.stages.verifiers.environments import Environments
from pedigree.stages.verifiers.reward_programs import Answered, RewardFunction

SHOWN_ITEMS = 8
"""Items per task in the evidence."""


@dataclass(frozen=True)
class Suite:
    """Items with the same prompting and scoring."""

    label: str
    items: list[dict[str, Any]]
    form: Form | None
    sampling: Sampling | None
    """None if choices are compared."""
    hash: str
    programs: Sequence[str] = ()
    """Names of functions of the project."""
    environment: AnyEvaluated | None = None

    @cached_property
    def verified(self) -> Mapping[str, Metric]:
        """Metrics by verifiers; none if all items have the verifier `facts`, which scores no answer, or if an environment scores them."""
        if self.environment and self.environment.scored_by == "reward":
            return {}
        return metrics_of(self.form) if any(item["verifier"]["name"] != "facts" for item in self.items) else {}

    @property
    def metrics(self) -> Mapping[str, Metric]:
        """All metrics by name, the primary one first."""
        played = metrics_of_environment(self.environment) if self.environment else {}
        return {**self.verified, **played, **dict.fromkeys(self.programs, BY_PROGRAM)}

    @property
    def samples(self) -> int:
        if self.environment:
            return self.environment.samples
        return self.form.draw.samples if self.form and self.form.draw else 1

    @property
    def stop(self) -> tuple[str, ...]:
        """Texts that end an answer."""
        return tuple(self.form.draw.stop) if self.form and self.form.draw else ()

    @property
    def has_programs(self) -> bool:
        return any("python" in names(one) for item in self.items for one in verifiers_of(item, self.verified).values())


def run(config: Evaluate, inputs: Inputs, job: Job) -> dict[str, Any]:
    """Generate and verify answers, and compare policies.

    Raises:
        StageError: a suite is empty, two items have the same name, an item does not fit into a policy's context, an unseen suite is
            evaluated together with a dev suite, with a model that is not frozen, or with one that has the suite in its lineage, or too
            many scores are unknown.
        PedigreeError: this machine has no sandbox for a suite's programs; or a function or environment of the project cannot be used.
        EngineLost: the engine died or stopped responding; finished chunks are kept.
    """
    split = split_of(inputs)
    with job.busy("reading rows"):
        suites = gather(config, inputs, job)
        tasks = tasks_of(suites)
        if any(suite.has_programs for suite in suites):
            sandbox.require()
    items = [item for suite in suites for item in suite.items]
    total, tokenized = len(items) * len(inputs["policies"]), count()

    def beat() -> None:
        job.doing("tokenizing", next(tokenized), total, "items")

    with (
        opened(config.programs, (item["verifier"] for item in items), job) as functions,
        WarmEngines(job.numerics, job.placement.engines) as ahead,
        Scoring(job.numerics.threads * job.placement.engines, functions) as scoring,
        serving(served_user(config), inputs, job) as servers,
        open_environments(config.environment, items, (chats := chats_of(inputs)).values(), servers, job) as environments,
    ):
        asks = {
            (label, suite.label): build_requests(config, suite, policy, chats[label], environments, job.folder, beat)
            for label, policy in inputs["policies"].items()
            for suite in suites
        }
        by_label = {suite.label: suite for suite in suites}

        def arrived(of: tuple[str, str], given: Sequence[Any]) -> None:
            scoring.begin(of[0], by_label[of[1]], given, chats[of[0]])

        answers = generate(asks, chunk_size=config.chunk_size, dtype=config.dtype, job=job, ahead=ahead, arrived=arrived)
        rows: list[ItemScore] = []

        def verifying() -> None:
            job.doing("verifying", len(rows), total, "items")

        for label, suite in product(chats, suites):
            for row in scoring.rows(label, suite, verifying):
                verifying()
                rows.append(row)
    refuse_unknown(config, rows)
    with job.busy("comparing policies"):
        table = tabulate(rows, [*chats], tasks, comparisons([*chats]), Draws(config.resamples, config.seed))
    for label, policy in inputs["policies"].items():
        table["policies"][label]["content"] = policy.record.content
    with job.busy("writing rows"):
        records.save(job.out, "scores", rows)
    write_json(job.out / "payload" / "scores.json", table)
    write_rows(job.evidence / "samples.jsonl", samples(rows, items))
    cut_off = [
        is_cut_off(answer, suite, chat)
        for label, chat in chats.items()
        for suite in suites
        for answer in answers[label, suite.label]
        if isinstance(answer, Generation | Transcript)
    ]
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
        **means_of(table),
    }


def means_of(table: dict[str, Any]) -> dict[str, float]:
    """`POLICY/TASK` and `POLICY/mean` → mean score."""
    means: dict[str, float] = {}
    for label, policy in table["policies"].items():
        means |= {f"{label}/{task}": entry["mean"] for task, entry in policy["tasks"].items()}
        means[f"{label}/mean"] = policy["mean"]
    return means


def chats_of(inputs: Inputs) -> dict[str, Chat]:
    return {label: Chat(policy.payload) for label, policy in inputs["policies"].items()}


def build_requests(
    config: Evaluate,
    suite: Suite,
    policy: Artifact,
    chat: Chat,
    environments: Environments | None,
    folder: Path,
    beat: Callable[[], None],
) -> Ask | Score:
    """The requests of a suite to a policy: each item once per answer, or once per choice. Requests for answers are stored in `folder`;
    choices stay in memory. `beat` is called at each item."""

    def prompts() -> Iterator[tuple[dict[str, Any], list[int]]]:
        for item in suite.items:
            beat()
            yield item, prompt_ids(suite, item, chat)

    if suite.sampling is None:
        return Score(policy, [Continuation(prompt, chat.response_ids(choice)) for item, prompt in prompts() for choice in item["choices"]])
    drawn = (Request(prompt, seed_of(*seed_parts(config, item, index))) for item, prompt in prompts() for index in range(suite.samples))
    requests = prepared(drawn, folder)
    if environments is None:
        return Ask(policy, chat, requests, suite.sampling)

    def opening(number: int) -> Opening:
        item = suite.items[number // suite.samples]
        seed = seed_of("environment", *seed_parts(config, item, 0))
        return Opening(**vars(requests[number]), prompt=item, environment_seed=seed)

    return Episodes(policy, chat, Mapped(range(len(requests)), opening), suite.sampling, environments)


def seed_parts(config: Evaluate, item: dict[str, Any], index: int) -> list[str | int]:
    """The parts of an answer's seed; the first of several answers has the seed of a single one."""
    return [config.seed, item["task"], item["id"], *([index] if index else [])]


def prompt_ids(suite: Suite, item: dict[str, Any], chat: Chat) -> list[int]:
    if suite.form and not suite.form.prompt.chat:
        return chat.plain(item["messages"][-1]["content"] + item.get("prefix", ""))
    return chat.prefilled(item["messages"], item["prefix"]) if "prefix" in item else chat.prompt(item["messages"])


Place = int | slice
"""Position of one scored unit among a suite's answers: an answer, or the log-probabilities of all choices of an item."""


def places(suite: Suite) -> Iterator[tuple[dict[str, Any], Sequence[Place]]]:
    """Each item with the places of its answers."""
    start = 0
    for item in suite.items:
        end = start + (len(item["choices"]) if suite.sampling is None else suite.samples)
        yield item, [slice(start, end)] if suite.sampling is None else range(start, end)
        start = end


class Scoring:
    """Score answers in background threads while the engine generates others. A context manager that cancels pending work at its end.

    Programs run in parallel sandboxes, one per worker and at least `sandbox.AT_ONCE`, since some of them sleep. Functions of the project
    get answers when verifiers have scored them.
    """

    def __init__(self, workers: int, functions: Mapping[str, RewardFunction] | None = None) -> None:
        self.functions = functions or {}
        self._programs, self._others = ThreadPoolExecutor(max(workers, sandbox.AT_ONCE), "programs"), ThreadPoolExecutor(1, "verifiers")
        self._begun: dict[tuple[str, str], tuple[Sequence[Any], list[list[Future[AnswerScore]]]]] = {}

    def __enter__(self) -> "Scoring":
        return self

    def __exit__(self, *exception: object) -> None:
        for threads in (self._programs, self._others):
            threads.shutdown(wait=False, cancel_futures=True)

    def begin(self, label: str, suite: Suite, answers: Sequence[Any], chat: Chat) -> None:
        """Queue a policy's answers to a suite for scoring."""
        threads = self._programs if suite.has_programs else self._others
        futures = [[threads.submit(score, suite, item, answers, place, chat) for place in own] for item, own in places(suite)]
        self._begun[label, suite.label] = answers, futures

    def rows(self, label: str, suite: Suite, beat: Callable[[], None]) -> Iterator[ItemScore]:
        """A policy's rows of a suite, in suite order.

        The programs of one item may take longer than the heartbeat timeout, so `beat` is called while waiting. Each program has its own
        time limit.
        """
        macro = suite.form is not None and suite.form.average == "macro"
        answers, futures = self._begun.pop((label, suite.label))
        scored = ([ended(one, beat) for one in begun] for begun in futures)
        for name, function in self.functions.items():
            scored = numbered(suite, scored, answers, name, function)
        for (item, own), scores in zip(places(suite), scored, strict=True):
            row = score_item(label, item, suite.metrics, scores, macro=macro)
            yield {**row, "logprobs": [sum(choice) for choice in answers[own[0]]]} if suite.sampling is None else row


def numbered(
    suite: Suite, scored: Iterator[list[AnswerScore]], answers: Sequence[Any], name: str, function: RewardFunction
) -> Iterator[list[AnswerScore]]:
    """Add a function's numbers to the scores of each item's answers, which it gets together."""
    primary, ahead = next(iter(suite.verified), ""), deque[tuple[list[AnswerScore], list[Any]]]()

    def groups() -> Iterator[list[Answered]]:
        for (item, own), scores in zip(places(suite), scored, strict=True):
            given: list[Any] = [answers[place] for place in own]
            ahead.append((scores, given))
            yield [answered(item, score, score["scores"].get(primary), answer) for score, answer in zip(scores, given, strict=True)]

    for values in values_of(function, groups()):
        scores, given = ahead.popleft()
        failures = [one.reward if isinstance(one, Transcript) and one.failed else None for one in given]
        found = zip(scores, failures, values, strict=True)
        yield [with_number(score, name, value if failure is None else failure) for score, failure, value in found]


def answered(item: Mapping[str, Any], scored: AnswerScore, score: float | None, given: Generation | Transcript) -> Answered:
    """An answer as functions of the project get it."""
    if isinstance(given, Transcript):
        return given.answered(item, score)
    return Answered(item, scored["text"], given.response_ids, given.finish_reason, score)


def score(suite: Suite, item: dict[str, Any], answers: Sequence[Any], place: Place, chat: Chat) -> AnswerScore:
    """Score one answer by every metric, or the preferred choice where choices are compared."""
    given: Any = answers[place]
    if suite.sampling is None:
        return score_choices(item, suite.verified, given)
    if suite.environment:
        return score_transcript(item, suite.verified, suite.environment, given)
    return score_answer(item, suite.verified, cut(chat.decode(given.response_ids), suite.stop))


def is_cut_off(answer: Generation | Transcript, suite: Suite, chat: Chat) -> bool:
    """Whether an answer reached its token limit without any of the suite's stop texts."""
    if answer.finish_reason != "length":
        return False
    text = chat.decode(answer.response_ids) if suite.stop and isinstance(answer, Generation) else ""
    return cut(text, suite.stop) == text


def tasks_of(suites: list[Suite]) -> dict[str, Task]:
    """Tasks by name, in order of first appearance. The hash of a task of several suites is that of their hashes.

    Raises:
        StageError: a task's items are in two suites, which may be prompted or scored differently.
    """
    items: dict[str, dict[str, Any]] = {}
    found: dict[str, list[Suite]] = {}
    for suite in suites:
        for item in suite.items:
            own = found.setdefault(item["task"], [suite])
            first = own[0]
            if first is not suite and (first.form or suite.form or first.metrics != suite.metrics):
                raise StageError(f"task {item['task']} is in the suites {first.label} and {suite.label}: give each suite its own task name")
            if suite is not own[-1]:
                own.append(suite)
            items.setdefault(item["task"], {})[item["id"]] = item
    tasks = {}
    for name, own in found.items():
        hashes = sorted(suite.hash for suite in own)
        hashed = hashes[0] if len(hashes) == 1 else digest(hashes)
        tasks[name] = Task(own[0].label, hashed, own[0].form, items[name], own[0].metrics, own[0].samples)
    return tasks


def is_unknown(answer: AnswerScore | ItemScore) -> bool:
    return None in answer["scores"].values()


def refuse_unknown(config: Evaluate, rows: list[ItemScore]) -> None:
    """Raise StageError if a policy has more than `max_unknown` unknown scores on a task, or if a metric is unknown for all items."""
    by_task: dict[tuple[str, str], list[ItemScore]] = {}
    for row in rows:
        by_task.setdefault((row["policy"], row["task"]), []).append(row)
    for (policy, task), own in by_task.items():
        answers = [answer for row in own for answer in answers_of(row)]
        unknown = [answer for answer in answers if is_unknown(answer)]
        unmeasured = [metric for metric in own[0]["scores"] if all(row["scores"][metric] is None for row in own)]
        if len(unknown) / len(answers) > config.max_unknown or unmeasured:
            found = f"the scores of {len(unknown)} of {len(answers)} answers of {policy} on {task} are unknown"
            fix = f"e.g. {unknown[0]['reason']}; fix the cause"
            if unmeasured:
                raise StageError(f"{found}, so that no item has {', '.join(unmeasured)}: {fix}")
            raise StageError(f"{found}, more than max_unknown {config.max_unknown:g}: {fix}, or raise max_unknown")


def split_of(inputs: Inputs) -> str:
    """The suites' split: `dev` or `unseen`.

    Raises:
        StageError: the splits are mixed, or a suite is unseen and a policy is not frozen or has the suite in its lineage.
    """
    splits = {label: str(suite.record.config.get("split", "dev")) for label, suite in inputs["suites"].items()}
    if len(set(splits.values())) > 1:
        raise StageError(f"suites must be all dev or all unseen, not {splits}: evaluate them in two stages")
    split = next(iter(splits.values()))
    if split == "unseen":
        for label, policy in inputs["policies"].items():
            if not recorded_kind(policy.record.kind).frozen:
                raise StageError(f"{label} comes from {policy.record.kind} and is not frozen: use the `select` stage that chose it")
            refuse_seen(label, policy, {suite.record.content: name for name, suite in inputs["suites"].items()})
    return split


def refuse_seen(label: str, policy: Artifact, unseen: dict[str, str]) -> None:
    """Reject a model with one of the unseen suites (content → label) in its lineage, under any name and split."""
    file = policy.path / "lineage.json"
    for record, _ in read_lineage(file).values() if file.is_file() else ():
        for given in record.inputs:
            if given.content in unseen and given.port != "benchmarks":
                raise StageError(
                    f"{unseen[given.content]} is not unseen for {label}: in its lineage a {record.kind} stage used it as {given.port} "
                    f"{given.label}; evaluate it on a suite that is not in its lineage"
                )


def gather(config: Evaluate, inputs: Inputs, job: Job) -> list[Suite]:
    """Load the suites, in recipe order.

    Raises:
        StageError: a suite is empty, needs `sampling`, or has no metric; or an item is there twice.
    """
    suites = []
    called = [program.called for program in config.programs]
    settings: dict[str, Any] = {"programs": [with_hash(one, job) for one in config.programs]} if config.programs else {}
    if config.environment:
        settings["environment"] = with_hash(config.environment, job)
    seen: set[tuple[str, str]] = set()
    for label, artifact in inputs["suites"].items():
        items, form = records.load(artifact), records.form_of(artifact)
        if not items:
            raise StageError(f"suite {label} has no items")
        for item in items:
            name = (item["task"], item["id"])
            if name in seen:
                raise StageError(f"item {item['id']} of task {item['task']} is in the suites twice: give each suite its own task name")
            seen.add(name)
        sampling = sampling_of(config, label, form)
        rows = records.digest_of(items)
        verifiers = [verifier for item in items for verifier in (item["verifier"], *item.get("others", {}).values())]
        drawn = sampling.model_dump(mode="json") if sampling else None
        hashed = task_hash(form, rows, sorted(set().union(*map(names, verifiers))), sampling=drawn, **settings)
        suite = Suite(label, items, form, sampling, hashed, called, config.environment)
        if not suite.metrics or (config.environment and config.environment.scored_by == "verifier" and not suite.verified):
            remedy = "give them another, or score by rewards of a program" if config.environment else "add programs to the evaluation"
            raise StageError(f"the items of suite {label} have the verifier facts, which scores no answer: {remedy}")
        suites.append(suite)
    return suites


def with_hash(given: RewardProgram | AnyEvaluated, job: Job) -> dict[str, Any]:
    """Everything about a program or an environment that determines scores."""
    written = given.model_dump(mode="json")
    return written if isinstance(given, EvaluatedUser) else {**written, "sha256": sha256_file(job.source_files[given.path])}


def sampling_of(config: Evaluate, label: str, form: Form | None) -> Sampling | None:
    """Sampling of a suite's answers; None if choices are compared."""
    if form is None and config.sampling is None:
        raise StageError(f"suite {label} has no form that specifies sampling: set sampling")
    return config.sampling_of(form)


def comparisons(labels: list[str]) -> list[tuple[str, str]]:
    """(baseline, candidate): each policy against the previous one, then each against the first."""
    neighbors = list(pairwise(labels))
    return neighbors + [(labels[0], label) for label in labels[2:]]


def samples(rows: list[ItemScore], items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first items of each task: one line per policy, grouped by item."""
    of_item: dict[tuple[str, str], list[ItemScore]] = {}
    for row in rows:
        of_item.setdefault((row["task"], row["id"]), []).append(row)
    shown: dict[str, int] = {}
    found = []
    for item in items:
        shown[item["task"]] = shown.get(item["task"], 0) + 1
        if shown[item["task"]] <= SHOWN_ITEMS:
            shown_rows = [{name: value for name, value in row.items() if name != "answers"} for row in of_item[item["task"], item["id"]]]
            found += [{"messages": item["messages"], **row} for row in shown_rows]
    return found
