"""Rows for training stages: derived from the data, and filtered by length; dropped rows are counted and listed in the evidence.

Rows are sequences that recompute their items on each access; a stage keeps only the few facts of a row that it needs besides its tokens.
"""

import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import combinations, pairwise
from typing import Any

import numpy as np

from pedigree.configs.methods.training import REPORTED_SHARE, Lists, ReferenceLogprobs, Rlvr, TooLong, Training
from pedigree.data.artifacts.artifacts import Artifact, write_json, write_rows
from pedigree.data.records import records
from pedigree.data.records.sequences import Mapped, chained
from pedigree.stages.job.failures import StageError
from pedigree.stages.job.job import Job
from pedigree.stages.training.token_cache import Units

Row = dict[str, Any]
EQUAL, EQUAL_CUT = "equal answers", "equal answers after truncation"
"""Reasons for dropping pairs that differ in no token."""


def gather(artifacts: Iterable[Artifact]) -> Sequence[Row]:
    """All rows of several datasets, in recipe order; read from disk on demand."""
    return chained([records.opened(artifact) for artifact in artifacts])


def split(rows: Sequence[Row], share: float, seed: int) -> tuple[Sequence[int], Sequence[int]]:
    """(places of rows to train on, places of rows held out); all pairs of a list stay together. Without a share, no row is read.

    Raises:
        StageError: all rows are held out.
    """
    if not share:
        return range(len(rows)), ()
    sides: dict[bool, list[int]] = {True: [], False: []}
    for place, row in enumerate(rows):
        sides[is_held_out(held_together(row), share, seed)].append(place)
    if not sides[False]:
        raise StageError(f"all {len(rows)} rows are held out: lower holdout ({share}) or add rows")
    return sides[False], sides[True]


def held_together(row: Row) -> str:
    """Id that a row shares with those that stay on its side of the split."""
    return row["list"] if "list" in row else row["id"]


def is_held_out(row_id: str, share: float, seed: int) -> bool:
    """Depends only on the row's id, so that added data moves no row between splits."""
    number = int(hashlib.sha256(f"{seed}/{row_id}".encode()).hexdigest()[:12], 16)
    return number / 16**12 < share


def pairs(rows: Sequence[Row], lists: Lists) -> Sequence[Row]:
    """The pairs of preferences: {id, list, source, messages, chosen, rejected, ended, win_rates, strength, margin}, with
    `template_arguments` if the preference has them.

    A preference of two answers is one pair, regardless of scores; a ranked list gives the pairs that `lists` selects, if their scores
    differ or are unknown. `list` is the id of the preference, shared by all its pairs; `margin` is the score gap if both have scores;
    `ended` and `win_rates` are for (chosen, rejected), the latter None if one is unknown.

    Raises:
        StageError: there are no pairs.
    """
    places = []
    for number, row in enumerate(rows):
        answers = row["answers"]
        for i, j in chosen_places(len(answers), lists):
            if len(answers) == 2 or gap(answers[i]["score"], answers[j]["score"]) != 0:
                places.append((number, i, j))
    if not places:
        raise StageError(f"none of {len(rows)} preferences yields a pair: they are single answers, or lists with equal scores")
    return Mapped(places, lambda place: _pair(rows[place[0]], place[1], place[2]))


def _pair(row: Row, i: int, j: int) -> Row:
    answers = row["answers"]
    better, worse = answers[i], answers[j]
    name = row["id"] if len(answers) == 2 else f"{row['id']}/{i}-{j}"
    common = {"id": name, "list": row["id"], "source": row["source"], **records.context_of(row)}
    texts = {"chosen": better["text"], "rejected": worse["text"]}
    wins = (better.get("win_rate"), worse.get("win_rate"))
    facts = {"ended": (records.ended(better), records.ended(worse)), "win_rates": None if None in wins else wins}
    margin = gap(better["score"], worse["score"])
    return {**common, "messages": row["messages"], **texts, **facts, "strength": row["strength"], "margin": margin}


def chosen_places(count: int, lists: Lists) -> list[tuple[int, int]]:
    """Pairs of places to compare in a ranked list of `count` answers, the better one first."""
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


def single_answers(rows: Sequence[Row], threshold: float) -> Sequence[Row]:
    """Good and bad answers, as {..., text, ended, label}, with label 1.0 or 0.0.

    First the best (good) and worst (bad) answer of each preference; then single answers, good if their score is above `threshold`.

    Raises:
        StageError: a single answer has no score, or no preference with several answers yields a pair.
    """
    several = [number for number, row in enumerate(rows) if len(row["answers"]) > 1]
    alone = [number for number, row in enumerate(rows) if len(row["answers"]) == 1]
    unscored = next((rows[number]["id"] for number in alone if rows[number]["answers"][0]["score"] is None), None)
    if unscored is not None:
        raise StageError(f"preference {unscored} is a single answer without a score, which kto requires: score or drop it")
    judged = pairs(Mapped(several, lambda number: rows[number]), "best_vs_worst") if several else []
    sides = [(number, side) for number in range(len(judged)) for side in (0, 1)]
    return chained([
        Mapped(sides, lambda place: _side(judged[place[0]], place[1])),
        Mapped(alone, lambda number: _alone(rows[number], threshold)),
    ])  # fmt: skip


def _side(pair: Row, side: int) -> Row:
    return {**pair, "text": pair[("chosen", "rejected")[side]], "ended": pair["ended"][side], "label": 1.0 - side}


def _alone(row: Row, threshold: float) -> Row:
    (answer,) = row["answers"]
    return {**row, "text": answer["text"], "ended": records.ended(answer), "label": float(answer["score"] > threshold)}


def every_answer(rows: Sequence[Row]) -> Sequence[Row]:
    """All answers of preferences, one by one: {id, source, messages, text, ended}."""
    places = [(number, place) for number, row in enumerate(rows) for place in range(len(row["answers"]))]
    return Mapped(places, lambda place: _answer(rows[place[0]], place[1]))


def _answer(row: Row, place: int) -> Row:
    answer = row["answers"][place]
    fields = {"text": answer["text"], "ended": records.ended(answer)}
    return {name: row[name] for name in ("id", "source", "messages")} | fields | records.context_of(row)


def indistinguishable(rows: Sequence[Row], units: Units, labelled: bool) -> list[int]:
    """Places of pairs of equal documents and, if `labelled`, of different answers that have become equal documents, good and bad.

    One and the same answer, labelled good and bad, remains: judgments may disagree.
    """
    if not labelled:
        return [place for place, unit in enumerate(units) if len(unit) > 1 and unit[0] == unit[1]] if units.lengths_RD.shape[1] > 1 else []
    places: dict[tuple[bytes, int], list[int]] = defaultdict(list)
    for place, (doc,) in enumerate(units):
        places[hashed(doc.ids), doc.prompt_length].append(place)
    found = []
    for group in places.values():
        answers = [rows[place] for place in group] if len(group) > 1 else []
        if len({row["label"] for row in answers}) > 1 and len({(row["text"], row["ended"]) for row in answers}) > 1:
            found += group
    return sorted(found)


def hashed(ids_T: np.ndarray) -> bytes:
    """Hash of token ids, for comparisons within a job."""
    return hashlib.sha256(ids_T.tobytes()).digest()


def fitting(
    rows: Sequence[Row], units: Units, max_length: int, job: Job, too_long: TooLong = "drop", labelled: bool = False
) -> tuple[Sequence[Row], Units]:
    """The rows whose documents fit, after truncation if configured, and differ where they are compared, with their documents. Dropped rows
    are counted and listed in the evidence. Only they, and answers with equal tokens, are read.

    `labelled`: rows are single answers with a `label`.

    Raises:
        StageError: no row is left.
    """
    longest_R = units.lengths_RD.max(axis=1, initial=0)
    long_R = longest_R > max_length
    untrained_R = (units.trained_RD == 0).any(axis=1)
    if too_long == "truncate":
        for row in np.flatnonzero(long_R & ~untrained_R):
            untrained_R[row] = any(doc.cut(max_length).num_trained == 0 for doc in units[int(row)])
    dropped_R = untrained_R if too_long == "truncate" else long_R | untrained_R
    fit, equal_R = np.flatnonzero(~dropped_R), np.zeros(len(rows), dtype=np.bool_)
    equal_R[fit[indistinguishable(Mapped(fit, lambda place: rows[int(place)]), units.taken(fit, max_length), labelled)]] = True
    dropped_R |= equal_R
    if job.rank == 0:
        drops = []
        for place in np.flatnonzero(dropped_R).tolist():
            if equal_R[place]:
                reason = EQUAL_CUT if long_R[place] else EQUAL
            else:
                reason = "no trained token" if too_long == "truncate" or not long_R[place] else f"longer than max_length {max_length}"
            row = rows[place]
            drops.append({"id": row["id"], "source": row["source"], "reason": reason, "length": int(longest_R[place])})
        write_rows(job.evidence / "drops.jsonl", drops)
        counts = Counter((drop["source"], drop["reason"]) for drop in drops)
        summary = [{"source": source, "reason": reason, "rows": count} for (source, reason), count in sorted(counts.items())]
        cut = int(np.count_nonzero(long_R)) if too_long == "truncate" else 0
        counted = {"rows": len(rows), "kept": len(rows) - len(drops), "truncated": cut, "dropped": summary}
        write_json(job.evidence / "counts.json", counted)
    kept = np.flatnonzero(~dropped_R)
    if not len(kept):
        raise StageError(
            f"none of {len(rows)} rows is left: all are longer than max_length {max_length}, train no token, or compare answers that are "
            "equal after truncation"
        )
    if equal_R.any():
        what = "answers" if labelled else "pairs"
        job.marks.append(
            f"{np.count_nonzero(equal_R)} of {len(rows)} {what} were not trained or measured: better and worse answer have the same tokens "
            f"within max_length {max_length}"
        )
    return Mapped(kept, lambda place: rows[int(place)]), units.taken(kept, max_length)


def report_rows(
    given: Sequence[Row],
    trained: int,
    held: int,
    every: Units,
    config: Training | ReferenceLogprobs,
    job: Job,
    what: str = "rows",
) -> None:
    """Note in the record that rows were dropped, also of those held out, that none are held out, or that a global batch exceeds the others.

    Raises:
        StageError: too many were dropped, or all that are held out, which may be a handful.
    """
    report_drops(len(given) - trained - held, len(given), what, *_why(every, len(given) - trained - held, config), config, job)
    if not isinstance(config, Training):
        return
    share = getattr(config, "holdout", 0.0)
    if share and len(given) > trained + held:
        places = [place for place, row in enumerate(given) if is_held_out(held_together(row), share, config.seed)]
        why, remedy = _why(every.taken(np.array(places, dtype=np.int64), config.max_length), len(places) - held, config)
        summary = f"{len(places) - held} of {len(places)} held-out {what} were dropped ({why})"
        if places and not held:
            raise StageError(f"{summary}, so that nothing would be measured: {remedy}, or set holdout: 0")
        if len(places) - held >= REPORTED_SHARE * len(places) and len(places) > held:
            job.note(summary)
    if share and not held:
        job.note(f"holdout {share} holds out none of {trained} {what}, so that nothing is measured on them: add {what}, or raise it")
    if trained < config.global_batch:
        job.note(f"global_batch {config.global_batch} exceeds the {trained} {what}, so that an epoch is one step: lower it")


def _why(every: Units, dropped: int, config: Training | ReferenceLogprobs) -> tuple[str, str]:
    """(reasons why rows were dropped with their numbers, remedy)."""
    lengths_R = every.lengths_RD.max(axis=1, initial=0)
    raised = f"raise max_length (99 % have at most {math.ceil(np.quantile(lengths_R, 0.99)) if len(lengths_R) else 0} tokens)"
    if config.too_long == "truncate":
        return f"no trained token within max_length {config.max_length}, or equal answers", raised
    long_R = lengths_R > config.max_length
    numbers = {
        f"longer than max_length {config.max_length}": int(long_R.sum()),
        "no trained token": int(((every.trained_RD == 0).any(axis=1) & ~long_R).sum()),
    }
    numbers["equal answers"] = dropped - sum(numbers.values())
    reasons = [(reason, number) for reason, number in numbers.items() if number]
    why = reasons[0][0] if len(reasons) == 1 else ", ".join(f"{number} {reason}" for reason, number in reasons)
    return why, f"{raised}, set `too_long: truncate`" if long_R.any() else "change the rows or what is trained of them"


def report_drops(dropped: int, given: int, what: str, why: str, remedy: str, config: Training | ReferenceLogprobs | Rlvr, job: Job) -> None:
    """Note a share of dropped rows in the record.

    Raises:
        StageError: it is too large.
    """
    summary = f"{dropped} of {given} {what} were dropped ({why})"
    if dropped and dropped / given >= config.refuse_dropped:
        raise StageError(f"{summary}, at least refuse_dropped {config.refuse_dropped}: {remedy}, or raise refuse_dropped")
    if dropped and dropped / given >= REPORTED_SHARE:
        job.note(summary)
