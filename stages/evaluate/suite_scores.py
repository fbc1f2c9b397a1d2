"""Scores of an answer by every metric, of an item over its answers, and of a task with intervals."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from pedigree.configs.base.frozen import digest
from pedigree.configs.methods.environment_programs import AnyEvaluated
from pedigree.configs.rows.suite_forms import Form, Metric
from pedigree.data.records.records import AnswerScore, ItemScore
from pedigree.stages.core.statistics import bootstrap_average
from pedigree.stages.evaluate.pass_at_k import pass_at_k
from pedigree.stages.sampling.conversations import Transcript
from pedigree.stages.verifiers import Verdict, VerifierError, verify, version
from pedigree.stages.verifiers.choices import decide

PLAIN: Mapping[str, Metric] = {"score": Metric(verifier="")}
"""Metric of a suite without a form: the score of each item's own verifier."""
BY_PROGRAM = Metric(verifier="")
"""Metric of a function of the project."""


@dataclass(frozen=True)
class Draws:
    """Bootstrap settings."""

    resamples: int
    seed: int


def metrics_of(form: Form | None) -> Mapping[str, Metric]:
    """Metrics by verifiers by name, the primary one first."""
    return form.metrics if form else PLAIN


def task_hash(form: Form | None, rows_sha256: str, verifiers: Sequence[str], **settings: Any) -> str:
    """Hash that must be equal for two scores of a task to be comparable: form, rows with their prompts, verifiers' versions, settings."""
    versions = {name: version(name) for name in sorted(set(verifiers))}
    return digest({"form": form.sha256 if form else None, "rows": rows_sha256, "verifiers": versions, **settings})


def verifiers_of(item: Mapping[str, Any], metrics: Mapping[str, Metric]) -> dict[str, dict[str, Any]]:
    """Metric → the item's verifier for it."""
    return {name: item.get("others", {}).get(name, item["verifier"]) for name in metrics}


def cut(text: str, stop: Sequence[str]) -> str:
    """An answer up to its first stop text."""
    return text[: min([place for place in (text.find(one) for one in stop) if place >= 0], default=len(text))]


def score_answer(item: Mapping[str, Any], metrics: Mapping[str, Metric], text: str) -> AnswerScore:
    """Score one answer by every metric; null with a reason if a verifier cannot decide. Equal verifiers run once."""
    return _scored(item, metrics, text, lambda verifier: verify(verifier, text))


def score_choices(item: Mapping[str, Any], metrics: Mapping[str, Metric], logprobs: Sequence[Sequence[float]]) -> AnswerScore:
    """Score choices by likelihood, by every metric; the text is the choice selected by the first metric. `logprobs` is [C][tokens]."""
    sums = [sum(own) for own in logprobs]
    likeliest = item["choices"][sums.index(max(sums))]
    found = _scored(item, metrics, likeliest, lambda verifier: decide(verifier, item["choices"], logprobs))
    return {**found, "text": likeliest if found["answer"] is None else found["answer"]}


def _scored(item: Mapping[str, Any], metrics: Mapping[str, Metric], text: str, ask: Callable[[Mapping[str, Any]], Verdict]) -> AnswerScore:
    """Score by every metric. The answer is the one extracted by the first metric; the reason is that of the first metric with an unknown
    score, or else the first metric's."""
    by_verifier: dict[str, Verdict | VerifierError] = {}
    found: dict[str, Verdict | VerifierError] = {}
    for name, verifier in verifiers_of(item, metrics).items():
        key = digest(verifier)
        if key not in by_verifier:
            try:
                by_verifier[key] = ask(verifier)
            except VerifierError as error:
                by_verifier[key] = error
        found[name] = by_verifier[key]
    scores = {name: None if isinstance(one, VerifierError) else one.score for name, one in found.items()}
    first = next(iter(found.values()), None)
    unknown = next((f"unknown: {one}" for one in found.values() if isinstance(one, VerifierError)), None)
    answer, reason = (first.answer, first.reason) if isinstance(first, Verdict) else (None, "")
    return {"text": text, "answer": answer, "scores": scores, "reason": unknown or reason}


def metrics_of_environment(environment: AnyEvaluated) -> Mapping[str, Metric]:
    """Its metrics by name."""
    at = {f"pass_at_{k}": k for k in environment.pass_at}
    return {name: Metric(verifier="", at=at.get(name)) for name in environment.metrics}


def score_transcript(item: Mapping[str, Any], metrics: Mapping[str, Metric], environment: AnyEvaluated, given: Transcript) -> AnswerScore:
    """Score a conversation by its last answer, by `metrics`, or by what the environment gave; all is unknown if the environment failed."""
    found, rewarded = score_answer(item, metrics, given.text), environment.scored_by == "reward"
    score = given.reward if rewarded or given.failed else next(iter(found["scores"].values()))
    if isinstance(score, str):
        unknown = dict.fromkeys((*found["scores"], *environment.metrics))
        return {**found, "scores": unknown, "reason": f"unknown: {score}", "messages": given.messages}
    success = None if score is None else float(score >= environment.success)
    scores = found["scores"] | dict.fromkeys(environment.metrics, success)
    scores |= {"turns": float(given.turns), "truncated": float(given.finish_reason == "length")} | ({"reward": score} if rewarded else {})
    return {**found, "scores": scores, "messages": given.messages}


def with_number(score: AnswerScore, name: str, value: float | str | None) -> AnswerScore:
    """Add the number of a function to the scores of an answer; a text is the cause of an unknown one."""
    known = isinstance(value, float)
    cause = f"unknown: {name}: {value or 'left the answer out'}"
    reason = score["reason"] if known or None in score["scores"].values() else cause
    return {**score, "scores": {**score["scores"], name: value if isinstance(value, float) else None}, "reason": reason}


def score_item(
    policy: str, item: Mapping[str, Any], metrics: Mapping[str, Metric], answers: Sequence[AnswerScore], *, macro: bool = False
) -> ItemScore:
    """An item's scores: pass@k or the mean over its answers with known scores; with its category if the task averages over categories."""
    scores = {name: _over_answers(metric, [answer["scores"][name] for answer in answers]) for name, metric in metrics.items()}
    first = answers[0]
    row: ItemScore = {
        "id": item["id"],
        "task": item["task"],
        "policy": policy,
        "text": first["text"],
        "answer": first["answer"],
        "score": scores[next(iter(metrics))],
        "reason": first["reason"],
        "scores": scores,
    }
    if macro:
        row["category"] = item["category"]
    if "messages" in first:
        row["messages"] = first["messages"]
    if len(answers) > 1:
        row["answers"] = [*answers]
    return row


def answers_of(row: ItemScore) -> Sequence[AnswerScore | ItemScore]:
    """All answers of a row: its list of answers, or the row itself."""
    return row.get("answers", [row])


def _over_answers(metric: Metric, scores: Sequence[float | None]) -> float | None:
    known = [score for score in scores if score is not None]
    if metric.at is not None:
        return pass_at_k(len(known), sum(score == 1 for score in known), metric.at) if len(known) >= metric.at else None
    return sum(known) / len(known) if known else None


@dataclass(frozen=True)
class Task:
    """A task of a suite."""

    suite: str
    """Label of the suite."""
    hash: str
    """See `task_hash`."""
    form: Form | None
    items: Mapping[str, Mapping[str, Any]]
    """Items by id."""
    metrics: Mapping[str, Metric]
    """By name, the primary one first."""
    samples: int = 1
    """Answers per item."""

    @property
    def primary(self) -> str:
        return next(iter(self.metrics))

    @property
    def compared(self) -> list[str]:
        """Metrics by which policies are compared in pairs."""
        return [name for name, metric in self.metrics.items() if name == self.primary or metric is BY_PROGRAM]

    def estimate(self, metric: str, scores: Mapping[str, float], draws: Draws) -> dict[str, float]:
        """Average and 95 % interval over items (id → score), micro or macro according to the form."""
        items = [self.items[name] for name in scores]
        groups = [item["category"] for item in items] if self.form and self.form.average == "macro" else None
        weighted = self.metrics[metric].weight is not None
        weights = [item["weights"][metric] for item in items] if weighted else None
        found = bootstrap_average(list(scores.values()), groups=groups, weights=weights, resamples=draws.resamples, seed=draws.seed)
        return {"n": len(scores), **found._asdict()}

    def description(self) -> dict[str, Any]:
        """Description of the task in the table of scores."""
        return {
            "suite": self.suite,
            "hash": self.hash,
            "metric": self.primary,
            "average": self.form.average if self.form else "micro",
            "samples": self.samples,
            "categories": dict(sorted(Counter(item["category"] for item in self.items.values() if "category" in item).items())),
        }


def tabulate(
    rows: Sequence[ItemScore], labels: Sequence[str], tasks: Mapping[str, Task], comparisons: Sequence[tuple[str, str]], draws: Draws
) -> dict[str, Any]:
    """Averages with intervals, and paired differences for each (baseline, candidate) of `comparisons`; unknown scores are excluded and
    counted.

    Returns:
        {"tasks": {task: {suite, hash, metric, average, samples, categories}},
         "policies": {label: {"tasks": {task: {n, mean, low, high}}, "mean": mean over tasks,
                              "metrics": {task: {metric: {n, unknown, unknown_answers, mean, low, high}}},
                              "categories": {task: {category: mean}}}},
         "differences": [{candidate, baseline, task, n, mean, low, high}], if at least one item is known for both; with `metric` for
                        functions of the project that are not the primary metric}
    """
    by_policy: dict[str, dict[str, list[ItemScore]]] = {label: {} for label in labels}
    for row in rows:
        by_policy[row["policy"]].setdefault(row["task"], []).append(row)
    policies: dict[str, Any] = {}
    primary: dict[str, dict[str, dict[str, float]]] = {}
    for label, by_task in by_policy.items():
        metrics = {name: _metrics(tasks[name], own, draws) for name, own in by_task.items()}
        primary[label] = {name: _known(own, tasks[name].primary) for name, own in by_task.items()}
        best = {name: {key: metrics[name][tasks[name].primary][key] for key in ("n", "mean", "low", "high")} for name in by_task}
        policies[label] = {
            "tasks": best,
            "mean": fmean(entry["mean"] for entry in best.values()),  # equal in any order of the tasks, so that ties are ties
            "metrics": metrics,
            "categories": {name: _categories(tasks[name], primary[label][name]) for name in by_task},
        }
    differences = [
        {"candidate": candidate, "baseline": baseline, "task": name, **named, **task.estimate(metric, both, draws)}
        for baseline, candidate in comparisons
        for name, task in ((name, tasks[name]) for name in by_policy[candidate])
        for metric in task.compared
        if (both := _differences(*(_known(by_policy[label][name], metric) for label in (candidate, baseline))))
        for named in [{} if metric == task.primary else {"metric": metric}]
    ]
    return {"tasks": {name: task.description() for name, task in tasks.items()}, "policies": policies, "differences": differences}


def _known(rows: Sequence[ItemScore], metric: str) -> dict[str, float]:
    """Id → known score by a metric."""
    return {row["id"]: score for row in rows if (score := row["scores"][metric]) is not None}


def _metrics(task: Task, rows: Sequence[ItemScore], draws: Draws) -> dict[str, dict[str, float]]:
    found = {}
    for metric in task.metrics:
        known = _known(rows, metric)
        unknown_answers = sum(answer["scores"][metric] is None for row in rows for answer in answers_of(row))
        counts = {"unknown": len(rows) - len(known), "unknown_answers": unknown_answers}
        found[metric] = {**counts, **task.estimate(metric, known, draws)}
    return found


def _categories(task: Task, scores: Mapping[str, float]) -> dict[str, float]:
    """Category → mean by the primary metric."""
    by_category: dict[str, list[float]] = {}
    for name, score in scores.items():
        category = task.items[name].get("category")
        if category is not None:
            by_category.setdefault(category, []).append(score)
    return {category: sum(own) / len(own) for category, own in sorted(by_category.items())}


def _differences(candidate: Mapping[str, float], baseline: Mapping[str, float]) -> dict[str, float]:
    """Id → difference, for items with known scores of both."""
    return {name: score - baseline[name] for name, score in candidate.items() if name in baseline}
