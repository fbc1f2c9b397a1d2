"""The right answers of benchmarks, out of the columns that they come in: the functions that forms may call."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from data.sources.verifiable import instructions_of


def last_boxed(text: str) -> str | None:
    r"""What is in the braces of the last `\boxed` or, without one, `\fbox`; None where braces do not close."""
    for command in (r"\boxed", r"\fbox"):
        _, found, after = text.rpartition(command)
        if not found:
            continue
        if not after.lstrip().startswith("{"):
            return after.split("$")[0].strip() or None
        after = after.lstrip()
        depth = 0
        for place, letter in enumerate(after):
            depth += (letter == "{") - (letter == "}")
            if depth == 0:
                return after[1:place]
        return None
    return None


def after_hashes(text: str) -> str:
    """GSM8K's number: what stands after the last `####`, without thousands commas.

    Raises:
        ValueError: there are no hashes.
    """
    _, found, after = text.rpartition("####")
    if not found:
        raise ValueError(f"{text[-80:]!r} has no number after `####`")
    return after.strip().replace(",", "")


def without_calculations(text: str) -> str:
    """GSM8K's working without the marks of its calculator, `<<48/2=24>>`, and without the line of the number."""
    return re.sub(r"<<.*?>>", "", text).rpartition("####")[0].strip()


def tidied(text: Any) -> str:
    """GPQA's texts without its marks, as OLMES and lm-eval have them: titles become sentences, brackets and double spaces go."""
    if text is None:
        return " "
    text = re.sub(r"\[.*?\]", "", str(text).strip().replace(" [title]", ". "))
    return text.replace("  ", " ")


def unlabelled(choices: Sequence[str]) -> list[str]:
    """AGIEval's choices without the letters that they come with, `(A)`."""
    return [re.sub(r"^\([A-Z]\)\s*", "", choice) for choice in choices]


def spans(row: Mapping[str, Any]) -> list[list[str]]:
    """DROP's answers, each a list of spans: the first and those of further annotators.

    Raises:
        ValueError: no answer is there, or one has another form.
    """
    further: Any = row.get("validated_answers") or []
    if isinstance(further, Mapping):  # a table by columns
        columns = [further.get(name) or [] for name in ("number", "date", "spans")]
        further = [{"number": number, "date": date, "spans": found} for number, date, found in zip(*columns, strict=True)]
    try:
        return _different([found for one in (row["answer"], *further) if (found := _span(one))])
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"the answer {row.get('answer')!r:.80} is none of DROP's") from error


def _span(answer: Mapping[str, Any]) -> list[str]:
    if str(answer.get("number") or "").strip():
        return [str(answer["number"])]
    if answer.get("spans"):
        return [str(one) for one in answer["spans"]]
    date = answer.get("date") or {}
    text = " ".join(str(date.get(part) or "") for part in ("day", "month", "year")).split()
    return [" ".join(text)] if text else []


def _different(answers: list[list[str]]) -> list[list[str]]:
    found = [list(one) for one in dict.fromkeys(tuple(answer) for answer in answers)]
    if not found:
        raise ValueError("there is no answer")
    return found


def literal(value: Any) -> Any:
    """A list that a table holds as a text in JSON, as PopQA's possible answers.

    Raises:
        ValueError: the text is no JSON.
    """
    try:
        return json.loads(value) if isinstance(value, str) else value
    except RecursionError as error:
        raise ValueError(f"{value[:80]!r} is nested too deep") from error


FUNCTIONS = {
    "after_hashes": after_hashes,
    "instructions": instructions_of,
    "last_boxed": last_boxed,
    "literal": literal,
    "spans": spans,
    "tidied": tidied,
    "unlabelled": unlabelled,
    "without_calculations": without_calculations,
}
"""By the names under which forms call them."""
