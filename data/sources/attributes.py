"""Responses with attribute ratings, one per row, as in HelpSteer2 (Wang et al. 2024, arXiv 2406.08673).

A response's score is Σ wₐ rₐ over its ratings r, with the recipe's weights w. Adjacent rows are compared if all that their responses answer
is the same: the turns before, the system's included, the offered tools and the template arguments.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction
from itertools import groupby
from typing import Any

from pedigree.data.chat.tools import ARGUMENT_COLUMNS, OFFERS, is_there
from pedigree.data.chat.turns import OF_ROWS
from pedigree.data.records.decimals import as_written
from pedigree.data.sources.dialogues import MARK, marked
from pedigree.data.sources.layouts import BEGINNINGS, BESIDE, instruction
from pedigree.data.sources.row_files import Unreadable, text_of

ASKED = (*BEGINNINGS, *BESIDE, *OF_ROWS, *OFFERS, *ARGUMENT_COLUMNS)
"""Columns that a response depends on, or by which its row is refused."""


def grouped(rows: Iterable[tuple[str, Any]], weights: Mapping[str, float]) -> Iterator[tuple[str, Any]]:
    """Merge adjacent rows with one prompt into (place of the first, row with `answers` and their scores).

    Rows with invalid ratings or without a prompt, and responses that tie, are yielded as `Unreadable` with the reason.
    """
    prompted = ((place, _prompted(row)) for place, row in rows)
    for _, group in groupby(prompted, key=lambda one: _asked(one[1])):
        responses: list[tuple[str, Any, Fraction]] = []
        for place, row in group:
            try:
                responses.append((place, row, _score(row, weights)))
            except ValueError as error:
                yield place, Unreadable(text_of(row), str(error))
        if responses:
            yield responses[0][0], _compared(responses)


def _prompted(row: Any) -> Any:
    """The row, if its prompt is an instruction with that as `prompt`."""
    if not isinstance(row, dict) or not row.get("instruction") or any(row.get(column) is not None for column in BEGINNINGS):
        return row
    try:
        return {name: value for name, value in row.items() if name != "instruction"} | {"prompt": instruction(row)}
    except ValueError as error:
        return Unreadable(text_of(row), str(error))


def _compared(responses: list[tuple[str, Any, Fraction]]) -> Any:
    first = responses[0][1]
    prompt = first.get("prompt")
    try:
        turns = marked(prompt) if isinstance(prompt, str) and MARK in prompt else prompt
    except ValueError as error:
        return Unreadable(text_of(first), str(error))
    if len(responses) == 1:
        return {**first, "prompt": turns, "score": float(responses[0][2])}
    if len({score for *_, score in responses}) == 1:
        score = float(responses[0][2])
        return Unreadable(text_of(first), f"all {len(responses)} responses have the score {score:g}: none is the better one")
    rest = {name: value for name, value in first.items() if name != "response"}
    answers = [{"text": row["response"], "score": float(score), "finish_reason": row.get("finish_reason")} for _, row, score in responses]
    return {**rest, "prompt": turns, "answers": answers}


def _asked(row: Any) -> tuple[Any, ...]:
    """What a row's response answers; null and blank columns are equal to missing ones."""
    if not isinstance(row, dict):
        return ()
    return tuple(value if is_there(value := row.get(column)) else None for column in ASKED)


def _score(row: Any, weights: Mapping[str, float]) -> Fraction:
    """Exact score, so that equal sums compare as equal."""
    if isinstance(row, Unreadable):
        raise ValueError(row.reason)
    if not isinstance(row, dict) or "response" not in row:
        raise ValueError("the row has no response")
    if all(row.get(column) is None for column in BEGINNINGS):
        raise ValueError(f"the row has no prompt: none of {', '.join(BEGINNINGS)}")
    total = Fraction(0)
    for name, weight in weights.items():
        total += Fraction(str(weight)) * _rating(row, name)
    try:
        float(total)
    except OverflowError as error:
        raise ValueError("the score is larger than any float") from error
    return total


def _rating(row: dict[str, Any], name: str) -> Fraction:
    """A number, possibly as text (`"0.25"` in a column that also has `n/a`)."""
    given = row.get(name)
    try:
        if not isinstance(given, bool) and isinstance(given, (int, float, str)) and math.isfinite(float(given)):
            return Fraction(given if isinstance(given, int) else as_written(float(given)))  # a text may have any number of digits
    except (ValueError, OverflowError):  # e.g. an integer of 400 digits
        pass
    raise ValueError(f"{name} {given!r:.80} is no number")
