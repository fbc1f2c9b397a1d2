"""What comes of holding rows against expectations, in words and as JSON: for the record, the evidence, and whoever reads an error.

A verdict is {"suite", "success", "rows", "expectations"}. Each expectation has its name, its column and whether it is met. One of a
recipe, and one that is not met, says besides: `arguments` and `severity`; `rows`, how many were looked at, and where that is a sample, `of`
how many; of single values `nulls` and how many others are `unexpected`, of a column what was `observed`; and `examples`, rows that are not
as expected, {"id", "place", "value"}.
"""

import json
from collections.abc import Mapping
from typing import Any

from configs.base.problems import PedigreeError
from configs.base.texts import shown

Verdict = dict[str, Any]
Entry = Mapping[str, Any]

SHOWN = 5
"""Examples that an error shows."""
LONGEST = 300
"""Characters of the arguments that a line shows."""


class ValidationError(PedigreeError):
    """Rows break an expectation; the message shows them."""


def refuse(verdict: Verdict) -> None:
    """Raises ValidationError where an expectation is not met that must be.

    The message's first line says the first of them and a row, the others all of them with five rows each.
    """
    broken = [entry for entry in verdict["expectations"] if fails(entry)]
    if broken:
        told = [line for entry in broken for line in _lines(entry)]
        rows = [f", as {example['id']}{_place(example)}" for example in broken[0].get("examples", [])[:1]]
        others = f"; and {len(broken) - 1} more" if len(broken) > 1 else ""
        first = f"{title(broken[0])}: {finding(broken[0])}{''.join(rows)}{others}"
        raise ValidationError("\n".join([f"{verdict['suite']} rows are not as expected: {first}", *told]))


def fails(entry: Entry) -> bool:
    return not entry["success"] and entry.get("severity") != "warn"


def warnings(verdict: Verdict) -> list[str]:
    """What is not as expected, and only warned of: a line each."""
    return [f"not as expected: {title(entry)}: {finding(entry)}" for entry in verdict["expectations"] if not entry["success"]]


def recorded(verdict: Verdict) -> Verdict:
    """A verdict without its examples, which are for people."""
    entries = [{name: value for name, value in entry.items() if name != "examples"} for entry in verdict["expectations"]]
    return verdict | {"expectations": entries}


def title(entry: Entry) -> str:
    """An expectation, its column and its arguments, in one line."""
    arguments = ", ".join(f"{name} {json.dumps(value, ensure_ascii=False)}" for name, value in entry.get("arguments", {}).items())
    if len(arguments) > LONGEST:
        arguments = f"{arguments[:LONGEST]} …"
    inside = ", ".join(filter(None, (entry["column"] or "rows", shown(arguments))))
    return f"{entry['expectation'].removeprefix('expect_')}({inside})"


def finding(entry: Entry) -> str:
    """How the rows were found to be, in one line."""
    if "unexpected" not in entry:
        return f"{shown(json.dumps(entry['observed'], ensure_ascii=False))[:LONGEST]} observed{_sample(entry)}"
    values = entry["rows"] - entry["nulls"]
    nulls = f", {entry['nulls']:,} nulls apart" if entry["nulls"] else ""
    share = f" ({_percent(entry['unexpected'], values)} of {values:,}{nulls})" if values else ""
    return f"{entry['unexpected']:,} rows unexpected{share}{_sample(entry)}"


def _sample(entry: Entry) -> str:
    return f", in a sample of {entry['rows']:,} of {entry['of']:,} rows" if "of" in entry else ""


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.3g} %"


def _lines(entry: Entry) -> list[str]:
    lines = [f"  {title(entry)}: {finding(entry)}"]
    examples = entry.get("examples", [])[:SHOWN]
    lines += [f"    {example['id']}{_place(example)}: {' '.join(str(example['value']).split())}" for example in examples]
    more = entry.get("unexpected", 0) - len(examples)
    return [*lines, f"    ... and {more:,} more"] if examples and more else lines


def _place(example: Mapping[str, Any]) -> str:
    return f" at {example['place']}" if example["place"] else ""
