"""Select the rows whose answers score best.

    payload/rows-*.parquet   the kept rows, unchanged and in order
    evidence/scores.jsonl    every row: its score with its terms, and why it was dropped
    evidence/drops.jsonl     the dropped rows, with the reason
    evidence/counts.json     rows read, kept and dropped by reason, and score statistics, in total and per source
    evidence/questions.jsonl the language model's questions and replies for the first rows

    score = reward_weight * ensemble((reward_i - mean_i) / std_i) + rating_weight * mean_aspects(rating) + Σ_k weight_k * program_k, as
    `judge` scores answers

The score is that of the last (assistant) turn of a conversation in its context, or of the best answer of a preference.
Language models rate a turn that ends with tool calls, shown as JSON; reward models and functions of the project cannot score it.
Rows are read on demand; only ids, sources, scores and the language model's replies stay in memory.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np

from pedigree.configs.base.frozen import canonical_json
from pedigree.configs.judging.selection import SelectRows
from pedigree.data.artifacts.artifacts import Artifact, write_json
from pedigree.data.records import records
from pedigree.data.records.messages import CALL, divided
from pedigree.data.records.scattered import Scattered
from pedigree.data.records.sequences import Mapped
from pedigree.stages.core.ensembles import Member, combine, model_terms, of_all, program_terms, total
from pedigree.stages.core.keeping import NO_SCORE, Scored, left_out
from pedigree.stages.core.rating import mean_rating
from pedigree.stages.job.failures import StageError
from pedigree.stages.job.job import Inputs, Job, only, only_or_none
from pedigree.stages.sampling.functions import opened, values_of
from pedigree.stages.verifiers.reward_programs import Answered, RewardFunction, Value

if TYPE_CHECKING:
    from pedigree.stages.sampling.raters import Ratings

LACKING = ("completion_ids", "verifier", "verifier_score")
"""Columns of a function that rows do not have."""
LEFT_OUT = "every function left it out"
"""Why a row without a problem has no score."""


@dataclass
class Opinions:
    """Scores of all rows by all scorers."""

    members: dict[str, Member] = field(default_factory=dict)
    """Label → rewards of a reward model."""
    rated: "Ratings | None" = None
    programs: dict[str, list[Value]] = field(default_factory=dict)
    """Name → values of a function."""
    problems: dict[int, str] = field(default_factory=dict)
    """Place → the first reason why a scorer could not score the row."""

    def reward(self, place: int, config: SelectRows) -> float | None:
        rewards = of_all(self.members.values(), place)
        return combine(rewards, config.ensemble) if rewards else None

    def rating(self, place: int) -> float | None:
        return mean_rating(one["rating"] for one in self.rated.by_answer[place].values()) if self.rated else None

    def score(self, place: int, config: SelectRows) -> float | None:
        models = model_terms(config, self.reward(place, config), self.rating(place))
        return total([*models, *program_terms(config.programs, self.programs, place)])


def run(config: SelectRows, inputs: Inputs, job: Job) -> dict[str, Any]:
    """Score all rows and keep the best.

    Raises:
        StageError: too many rows have no score, or fewer than `min_rows` are kept; the message counts the reasons.
        EngineLost: the language model is down; its replies are kept.
        PedigreeError: a row is there twice, or a function cannot be used.
    """
    data = only(inputs, "data")
    with job.busy("reading rows"):
        names, sizes = ids_and_sizes(data)
    opinions = ask(config, inputs, Mapped(records.opened(data), answer_of), (name for name, _ in names), job)
    rows = [Scored(name, source, opinions.score(place, config)) for place, (name, source) in enumerate(names)]
    unscored = [place for place, row in enumerate(rows) if row.score is None]
    for place in unscored:
        opinions.problems.setdefault(place, LEFT_OUT)
    refuse_unscored(len(unscored), len(rows), opinions.problems, config)
    reasons = left_out(rows, config.keep)
    counts = counted(rows, reasons)
    write_json(job.evidence / "counts.json", counts)
    with job.busy("writing evidence"):
        write_evidence(rows, reasons, opinions, config, job)
    kept = np.array([place for place, reason in enumerate(reasons) if reason is None], np.int64)
    if len(kept) < config.min_rows:
        raise StageError(
            f"{len(kept)} rows < min_rows {config.min_rows} of {len(rows)} ({counts['drops']}): lower keep.min_score, raise keep.share, "
            "add rows, or lower min_rows"
        )
    for done in Scattered.of(data, sizes).write(job.out / "payload", kept, job.numerics.threads):
        job.doing("writing rows", done, len(kept), "rows")
    return {
        "rows": len(kept),
        "read": len(rows),
        "dropped": counts["drops"],
        "unscored": counts["drops"].get(NO_SCORE, 0),
        "sources": counts["sources"],
        "mean_score": {"all": counts["scores"]["mean"], "kept": fmean(_scores(rows[place] for place in kept.tolist()))},
        "lowest_kept": min(_scores(rows[place] for place in kept.tolist())),
        **(opinions.rated.metrics() if opinions.rated else {}),
    }


def ids_and_sizes(data: Artifact) -> tuple[list[tuple[str, str]], list[int]]:
    """((id, source) of each row; characters of each, see `records.bulk_of`)."""
    same: dict[str, str] = {}
    names, sizes = [], []
    for row in records.stream(data.payload):
        names.append((row["id"], same.setdefault(row["source"], row["source"])))
        sizes.append(records.bulk_of(row))
    records.check_ids(name for name, _ in names)
    return names, sizes


def answer_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """The answer to score of a row: its last turn or best answer, with the messages before it; `calls` marks a turn that ends with tool
    calls."""
    if "answers" in row:
        before, last, text = row["messages"], row["answers"][0], row["answers"][0]["text"]
    else:
        before, turn = divided(row["messages"])
        last, text = turn[-1], "\n".join(message["content"] for message in turn)
    messages = [{"role": message["role"], "content": message["content"]} for message in before]
    ending = "stop" if records.ended(last) else "length"
    calls = {"calls": True} if last.get("role") == CALL else {}
    return {
        "id": row["id"],
        "source": row["source"],
        "messages": messages,
        "text": text,
        "finish_reason": ending,
        **calls,
        **records.context_of(row),
    }


def ask(config: SelectRows, inputs: Inputs, rows: Sequence[dict[str, Any]], ids: Iterable[str], job: Job) -> Opinions:
    """Score all rows with all scorers, one after the other.

    Raises:
        StageError: one cannot score too many rows; the remaining ones are skipped.
    """
    found = Opinions()

    def note(label: str, reasons: dict[int, str]) -> None:
        for place, reason in reasons.items():
            found.problems.setdefault(place, f"{label}: {reason}")
        refuse_unscored(len(found.problems), len(rows), found.problems, config)

    with opened(config.programs, (), job, LACKING) as functions:
        for name, function in functions.items():
            found.programs[name] = ask_function(function, rows)
            note(name, {place: value for place, value in enumerate(found.programs[name]) if isinstance(value, str)})
    if config.reward_weight > 0:
        from pedigree.stages.sampling.rewards import ask_all

        found.members = ask_all(inputs["reward_models"], rows, config.dtype, job, note)
    if config.rating is not None:
        from pedigree.stages.sampling.raters import rate

        found.rated = rate(config.rating, only_or_none(inputs, "judge"), rows, job, max_unanswered_share=config.max_unscored_share)
        reasons = {one["id"]: f"{one['judge']}: {one['reason']}" for one in reversed(found.rated.failures)}
        for place, name in enumerate(ids):
            if name in reasons:
                found.problems.setdefault(place, reasons[name])
    return found


def ask_function(function: RewardFunction, rows: Sequence[dict[str, Any]]) -> list[Value]:
    """The values of a function for all rows, each the only answer to its prompt."""
    groups = ([Answered(row | {"verifier": None}, row["text"], (), row["finish_reason"], None)] for row in rows)
    found = [value for (value,) in values_of(function, groups)]
    return ["the answer calls tools" if row.get("calls") else value for row, value in zip(rows, found, strict=True)]


def refuse_unscored(unscored: int, rows: int, problems: Mapping[int, str], config: SelectRows) -> None:
    """Raise StageError if more rows lack a score than allowed, even if not all rows have been scored yet."""
    if unscored > config.max_unscored_share * rows:
        reason = problems[min(problems)]
        raise StageError(
            f"{unscored} of {rows} rows have no score, more than {config.max_unscored_share:.0%} ({reason}): use models that can read "
            "them, filter them out first, or raise max_unscored_share"
        )


def counted(rows: Sequence[Scored], reasons: Sequence[str | None]) -> dict[str, Any]:
    """Rows read, dropped and kept, and score statistics, in total and per source by name."""
    by_source: dict[str, list[int]] = defaultdict(list)
    for place, row in enumerate(rows):
        by_source[row.source].append(place)
    per_source = [{"source": source, **_counted(rows, reasons, by_source[source], "in")} for source in sorted(by_source)]
    return {
        **_counted(rows, reasons, range(len(rows)), "read"),
        "sources": {one["source"]: one["kept"] for one in per_source if one["kept"]},
        "per_source": per_source,
    }


def _counted(rows: Sequence[Scored], reasons: Sequence[str | None], places: Sequence[int], read: str) -> dict[str, Any]:
    drops = Counter(reason for place in places if (reason := reasons[place]) is not None)
    kept = [rows[place] for place in places if reasons[place] is None]
    return {
        read: len(places),
        "kept": len(kept),
        "drops": dict(sorted(drops.items())),
        "scores": summary(rows[place] for place in places),
        "kept_scores": summary(kept),
    }


def summary(rows: Iterable[Scored]) -> dict[str, float | int | None]:
    """Statistics of the known scores; each percentile is an actual score."""
    scores = np.sort(np.array(_scores(rows), np.float64))
    if not len(scores):
        return {"rows": 0, "mean": None, "std": None, "min": None, "p10": None, "p50": None, "p90": None, "max": None}
    at = {f"p{share}": float(scores[(len(scores) - 1) * share // 100]) for share in (10, 50, 90)}
    return {"rows": len(scores), "mean": fmean(scores), "std": float(scores.std()), "min": float(scores[0]), **at, "max": float(scores[-1])}


def _scores(rows: Iterable[Scored]) -> list[float]:
    return [row.score for row in rows if row.score is not None]


def write_evidence(rows: Sequence[Scored], reasons: Sequence[str | None], opinions: Opinions, config: SelectRows, job: Job) -> None:
    """Write the scores of all rows, and the dropped rows with the reason."""
    scored, dropped = job.evidence / "scores.jsonl", job.evidence / "drops.jsonl"
    with scored.open("w", encoding="utf-8") as scores, dropped.open("w", encoding="utf-8") as drops:
        for place, (row, reason) in enumerate(zip(rows, reasons, strict=True)):
            scores.write(canonical_json(line(place, row, reason, opinions, config)) + "\n")
            if reason is not None:
                why = opinions.problems[place] if row.score is None else f"{row.score:.4g}"
                drops.write(canonical_json({"id": row.id, "source": row.source, "reason": reason, "evidence": why}) + "\n")


def line(place: int, row: Scored, reason: str | None, opinions: Opinions, config: SelectRows) -> dict[str, Any]:
    """A line of evidence for one row."""
    found: dict[str, Any] = {"id": row.id, "source": row.source, "score": row.score, "kept": reason is None}
    if reason is not None:
        found["reason"] = reason
    if opinions.members:
        found["rewards"] = {label: member.raw[place] for label, member in opinions.members.items()}
        found["reward"] = opinions.reward(place, config)
    if opinions.rated is not None:
        found["ratings"], found["rating"] = opinions.rated.by_answer[place], opinions.rating(place)
    if opinions.programs:
        found["programs"] = {name: None if isinstance(values[place], str) else values[place] for name, values in opinions.programs.items()}
    if row.score is None:
        found["problem"] = opinions.problems[place]
    return found
