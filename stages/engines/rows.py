"""Rows to documents, for every stage that trains: rows that do not fit are dropped, counted and listed in the evidence."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import combinations, pairwise
from typing import Any

from configs.training import Lists, TooLong, TrainOn
from data import records
from data.artifacts import Artifact, write_json, write_rows
from data.chat import Chat
from stages.core.batches import Document, Unit, document
from stages.job import Job, StageError


def gather(artifacts: Iterable[Artifact]) -> list[dict[str, Any]]:
    """All rows of several data sets, in the recipe's order."""
    return [row for artifact in artifacts for row in records.load(artifact)]


def pairs(rows: Sequence[dict[str, Any]], lists: Lists) -> list[dict[str, Any]]:
    """The pairs of preferences: {id, list, source, messages, chosen, rejected, ended, win_rates, strength, margin}.

    A pair is taken as it is, whatever its scores; of a ranked list, the pairs that `lists` selects, if their scores differ or are
    unknown. `list` is the id of the preference, which all its pairs share; `margin` the score gap where both have one; `ended` and
    `win_rates` are of (chosen, rejected), the latter None where one of them is unknown.

    Raises:
        StageError: none is left.
    """
    made = []
    for row in rows:
        answers = row["answers"]
        for i, j in chosen_places(len(answers), lists):
            margin = gap(answers[i]["score"], answers[j]["score"])
            if len(answers) > 2 and margin == 0:
                continue
            common = {"id": row["id"] if len(answers) == 2 else f"{row['id']}/{i}-{j}", "list": row["id"], "source": row["source"]}
            texts = {"chosen": answers[i]["text"], "rejected": answers[j]["text"]}
            wins = (answers[i].get("win_rate"), answers[j].get("win_rate"))
            facts = {"ended": (records.ended(answers[i]), records.ended(answers[j])), "win_rates": None if None in wins else wins}
            made.append({**common, "messages": row["messages"], **texts, **facts, "strength": row["strength"], "margin": margin})
    if not made:
        raise StageError(f"none of {len(rows)} preferences gives a pair: they are single answers, or lists of equal scores")
    return made


def chosen_places(count: int, lists: Lists) -> list[tuple[int, int]]:
    """Which places of a ranked list of `count` answers are compared, the better one first."""
    if count < 2:
        return []
    match lists:
        case "best_vs_worst":
            return [(0, count - 1)]
        case "adjacent":
            return list(pairwise(range(count)))
        case "all":
            return list(combinations(range(count), 2))


def gap(better: float | None, worse: float | None) -> float | None:
    return None if better is None or worse is None else better - worse


def to_units(
    rows: list[dict[str, Any]], make: Callable[[dict[str, Any]], Unit], max_length: int, job: Job, too_long: TooLong = "drop"
) -> tuple[list[dict[str, Any]], list[Unit]]:
    """The rows that fit, or are cut to fit, and their documents.

    Raises:
        StageError: none is left.
    """
    kept, units, drops, cut = [], [], [], 0
    for number, row in enumerate(rows):
        job.doing("tokenising", number, len(rows), "rows")
        unit = make(row)
        longest = max(len(doc) for doc in unit)
        reason = None
        if longest > max_length and too_long == "truncate":
            unit, cut = tuple(Document(doc.ids[:max_length], doc.trained[:max_length]) for doc in unit), cut + 1
        elif longest > max_length:
            reason = f"longer than max_length {max_length}"
        if reason is None and any(doc.num_trained == 0 for doc in unit):
            reason = "no trained token"
        if reason:
            drops.append({"id": row["id"], "source": row["source"], "reason": reason, "length": longest})
        else:
            kept.append(row)
            units.append(unit)
    if job.rank == 0:
        write_rows(job.evidence / "drops.jsonl", drops)
        counts = Counter((drop["source"], drop["reason"]) for drop in drops)
        summary = [{"source": source, "reason": reason, "rows": count} for (source, reason), count in sorted(counts.items())]
        write_json(job.evidence / "counts.json", {"rows": len(rows), "kept": len(kept), "truncated": cut, "dropped": summary})
    if not units:
        raise StageError(f"none of {len(rows)} rows is left: all are longer than max_length {max_length} or train no token")
    return kept, units


def conversation(chat: Chat, train_on: TrainOn) -> Callable[[dict[str, Any]], Unit]:
    def make(row: dict[str, Any]) -> Unit:
        ids, mask = chat.training(row["messages"], train_on)
        end = max((i for i, trained in enumerate(mask) if trained), default=len(mask) - 1) + 1  # later tokens have no effect
        return (Document(tuple(ids[:end]), tuple(mask[:end])),)

    return make


def preference(chat: Chat) -> Callable[[dict[str, Any]], Unit]:
    """(chosen, rejected)."""

    def make(row: dict[str, Any]) -> Unit:
        texts = zip((row["chosen"], row["rejected"]), row["ended"], strict=True)
        chosen, rejected = (document(*chat.answer(row["messages"], text, ended=ended)) for text, ended in texts)
        return chosen, rejected

    return make


def single_answer(chat: Chat) -> Callable[[dict[str, Any]], Unit]:
    """Of a row {messages, text, ended}."""
    return lambda row: (document(*chat.answer(row["messages"], row["text"], ended=row["ended"])),)
