"""Functions that forms call to extract gold answers from benchmark columns."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pedigree.data.sources.verifiable import instructions_of


def last_boxed(text: str) -> str | None:
    r"""The content of the last `\boxed` or, without one, `\fbox`; None if its braces do not close."""
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
    """GSM8K's answer: the text after the last `####`, without thousands separators. Raises ValueError if there is no `####`."""
    _, found, after = text.rpartition("####")
    if not found:
        raise ValueError(f"{text[-80:]!r} has no number after `####`")
    return after.strip().replace(",", "")


def without_calculations(text: str) -> str:
    """GSM8K's solution without calculator annotations (`<<48/2=24>>`) and without the answer line."""
    return re.sub(r"<<.*?>>", "", text).rpartition("####")[0].strip()


def tidied(text: Any) -> str:
    """Clean up GPQA's texts as OLMES and lm-eval do: titles become sentences; brackets and double spaces are removed."""
    if text is None:
        return " "
    text = re.sub(r"\[.*?\]", "", str(text).strip().replace(" [title]", ". "))
    return text.replace("  ", " ")


def unlabelled(choices: Sequence[str]) -> list[str]:
    """AGIEval's choices without their letters, `(A)`."""
    return [re.sub(r"^\([A-Z]\)\s*", "", choice) for choice in choices]


def spans(row: Mapping[str, Any]) -> list[list[str]]:
    """DROP's answers, each a list of spans: the first annotator's and the others'. Raises ValueError if there are none, or others."""
    further: Any = row.get("validated_answers") or []
    if isinstance(further, Mapping):  # a table stored by columns
        columns = [further.get(name) or [] for name in ("number", "date", "spans")]
        further = [{"number": number, "date": date, "spans": found} for number, date, found in zip(*columns, strict=True)]
    try:
        answers = dict.fromkeys(tuple(found) for one in (row["answer"], *further) if (found := _span(one)))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"the answer {row.get('answer')!r:.80} is none of DROP's") from error
    if not answers:
        raise ValueError("there is no answer")
    return [list(answer) for answer in answers]


def _span(answer: Mapping[str, Any]) -> list[str]:
    if str(answer.get("number") or "").strip():
        return [str(answer["number"])]
    if answer.get("spans"):
        return [str(one) for one in answer["spans"]]
    date = answer.get("date") or {}
    text = " ".join(str(date.get(part) or "") for part in ("day", "month", "year")).split()
    return [" ".join(text)] if text else []


def literal(value: Any) -> Any:
    """Decode a list stored as JSON text, such as PopQA's possible answers. Raises ValueError if it is not JSON."""
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
"""Name in forms → function."""
