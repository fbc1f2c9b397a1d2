"""Verdicts of expectations, as JSON for record and evidence, and as text for errors.

A verdict is {"suite", "success", "rows", "expectations"}. Each expectation has its name, its column and whether it is met. A recipe's
expectations, and those not met, also have `arguments` and `severity`; `rows`, the number examined, and `of`, the total, if that was a
sample; `nulls` and the number of `unexpected` values, or the `observed` value of a column; and `examples` of violations, {"id", "place",
"value"}.
"""

import json
from collections.abc import Mapping
from typing import Any

from pedigree.configs.base.problems import PedigreeError
from pedigree.configs.base.texts import shown

Verdict = dict[str, Any]
Entry = Mapping[str, Any]

SHOWN = 5
"""Number of examples shown in an error."""
LONGEST = 300
"""Maximum characters of arguments in a line."""


def refuse(verdict: Verdict) -> None:
    """Raise PedigreeError if a mandatory expectation is not met.

    The first line has the first violated expectation with one row, the others all of them with five rows each.
    """
    broken = [entry for entry in verdict["expectations"] if fails(entry)]
    if broken:
        details = [line for entry in broken for line in _lines(entry)]
        rows = [f", as {example['id']}{_place(example)}" for example in broken[0].get("examples", [])[:1]]
        others = f"; and {len(broken) - 1} more" if len(broken) > 1 else ""
        first = f"{title(broken[0])}: {finding(broken[0])}{''.join(rows)}{others}"
        raise PedigreeError("\n".join([f"{verdict['suite']} rows are not as expected: {first}", *details]))


def fails(entry: Entry) -> bool:
    return not entry["success"] and entry.get("severity") != "warn"


def warnings(verdict: Verdict) -> list[str]:
    """One line for each expectation that is not met."""
    return [f"not as expected: {title(entry)}: {finding(entry)}" for entry in verdict["expectations"] if not entry["success"]]


def recorded(verdict: Verdict) -> Verdict:
    """A verdict without its examples, for the record."""
    entries = [{name: value for name, value in entry.items() if name != "examples"} for entry in verdict["expectations"]]
    return verdict | {"expectations": entries}


def title(entry: Entry) -> str:
    """An expectation with its column and arguments, on one line."""
    arguments = ", ".join(f"{name} {json.dumps(value, ensure_ascii=False)}" for name, value in entry.get("arguments", {}).items())
    if len(arguments) > LONGEST:
        arguments = f"{arguments[:LONGEST]} …"
    inside = ", ".join(filter(None, (entry["column"] or "rows", shown(arguments))))
    return f"{entry['expectation'].removeprefix('expect_')}({inside})"


def finding(entry: Entry) -> str:
    """An expectation's finding, on one line."""
    if "unexpected" not in entry:
        return f"{shown(json.dumps(entry['observed'], ensure_ascii=False))[:LONGEST]} observed{_sample(entry)}"
    values = entry["rows"] - entry["nulls"]
    nulls = f", without the {entry['nulls']:,} nulls" if entry["nulls"] else ""
    share = f" ({100 * entry['unexpected'] / values:.3g} % of {values:,}{nulls})" if values else ""
    return f"{entry['unexpected']:,} rows unexpected{share}{_sample(entry)}"


def _sample(entry: Entry) -> str:
    return f", in a sample of {entry['rows']:,} of {entry['of']:,} rows" if "of" in entry else ""


def _lines(entry: Entry) -> list[str]:
    lines = [f"  {title(entry)}: {finding(entry)}"]
    examples = entry.get("examples", [])[:SHOWN]
    lines += [f"    {example['id']}{_place(example)}: {' '.join(str(example['value']).split())}" for example in examples]
    more = entry.get("unexpected", 0) - len(examples)
    return [*lines, f"    ... and {more:,} more"] if examples and more else lines


def _place(example: Mapping[str, Any]) -> str:
    return f" at {example['place']}" if example["place"] else ""
