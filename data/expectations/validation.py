"""Validation of each record type with Great Expectations, which only this module uses.

The verdict goes into the artifact's record, so it contains no time or random id: equal rows give equal verdicts.
"""

import json
import math
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from pedigree.configs.base.frozen import finite
from pedigree.configs.base.problems import PedigreeError
from pedigree.configs.rows.expectations import Expectation
from pedigree.data.expectations.results import Verdict, fails, refuse
from pedigree.data.filters.patience import each
from pedigree.data.host.process import uncollected
from pedigree.data.records.messages import FINISH_REASONS, ROW_FAULTS, is_unicode, message_problem

if TYPE_CHECKING:
    from pyarrow import Table

KEPT = 20
"""Maximum examples per expectation in a verdict."""
EXCERPT = 200
"""Maximum characters of an example's value."""
AROUND = 60
"""Characters of context before a forbidden match."""
DIGITS = 9
"""Significant digits of observed values; more would differ between processors."""
COLUMNS: dict[str, tuple[str, ...]] = {
    "conversation": ("id", "source", "messages"),
    "prompt": ("id", "source", "messages", "verifier"),
    "item": ("id", "source", "task", "messages", "verifier"),
    "preference": ("id", "source", "messages", "answers", "strength"),
}
OF_FORMS = {"question", "category", "prefix", "choices", "others", "weights"}
"""Optional columns of items, see `data/records/records.py`."""
OF_OTHERS = {"template_arguments"}
"""Optional columns of all other records."""
OPTIONAL = {"finish_reason", "win_rate", "policy", "policy_content", "on_policy"}
"""Optional fields of an answer."""
UNUSED = ("scipy.stats", "altair", "boto3")
"""Modules that Great Expectations imports for charts, distributions and secrets; unused here, and half of its import time."""
LAST_TURN = {"conversation": "assistant", "prompt": "user", "item": "user", "preference": "user"}


class Asked(NamedTuple):
    """One expectation in the form of Great Expectations."""

    expectation: str
    """Its name, `expect_...`."""
    column: str | None
    arguments: dict[str, Any]
    severity: str | None = None
    """For a recipe's expectations; None for those of the record type, which are mandatory."""


def validate(rows: Sequence[dict[str, Any]], record_type: str, check_verifier: Callable[[Any], None]) -> Verdict:
    """Validate rows against the suite of their type; `check_verifier` raises a user-facing error for a malformed verifier.

    Raises:
        PedigreeError: an expectation fails; the message shows the first five violating rows of each.
    """
    return validate_facts(facts_of(rows, record_type, check_verifier), record_type)


def facts_of(rows: Sequence[dict[str, Any]], record_type: str, check_verifier: Callable[[Any], None]) -> "Table":
    """Facts for the expectations, one line of texts per row. A problem is a sentence, or null if there is none."""
    from pyarrow import Table, schema, string

    names = _facts({}, record_type, lambda verifier: None)
    facts = [_facts(row, record_type, check_verifier) for row in rows]
    return Table.from_pylist(facts, schema=schema([(name, string()) for name in names]))


def validate_facts(facts: "Table", record_type: str) -> Verdict:
    """Like `validate`, from the facts of rows (`facts_of`)."""
    verdict = examine(facts, record_type)
    refuse(verdict)
    return verdict


def examine(
    facts: "Table",
    record_type: str,
    expectations: Sequence[Expectation] = (),
    texts_of: "Callable[[int], Table] | None" = None,
    places_of: Callable[[list[int]], list[str]] = lambda rows: ["" for _ in rows],
) -> Verdict:
    """Evaluate the suite of the rows' type and the recipe's expectations: first those on all rows, then those on samples.

    Args:
        facts: `facts_of` the rows, plus the facts for the recipe's expectations (`data/expectations/row_facts.py`).
        record_type: type of the rows.
        expectations: the recipe's expectations.
        texts_of: n → texts of the first n rows; required if an expectation reads texts.
        places_of: row numbers → where each was read.

    Raises:
        PedigreeError: an expectation cannot be evaluated on the rows, or a regular expression takes too long for a text.
    """
    looks = [(facts, [*_suite(record_type), *(_asked(one) for one in expectations if one.sample is None)])]
    for size in sorted({one.sample for one in expectations if one.sample is not None}):
        assert texts_of is not None
        looks.append((texts_of(size), [_asked(one) for one in expectations if one.sample == size]))
    entries = []
    for table, asked in looks:
        _refuse_slow(asked, table, facts["id"])
        for one, found in zip(asked, _run(asked, table), strict=True):
            entry = _entry(one, found, table, len(facts))
            if not found.success and (rows := sorted(found.result.get("partial_unexpected_index_list") or [])):
                entry["examples"] = _examples(one, table, facts["id"], rows, places_of(rows))
            entries.append(entry)
    return {"suite": record_type, "success": not any(map(fails, entries)), "rows": len(facts), "expectations": entries}


def _refuse_slow(asked: Sequence[Asked], table: "Table", ids: Any) -> None:
    """Raise PedigreeError for a slow pattern. Done here to name the row, since the library matches whole columns."""
    for one in asked:
        for pattern in one.arguments.get("regex_list") or filter(None, [one.arguments.get("regex")]):
            search, what = re.compile(pattern).search, f"{one.expectation} of {one.column}, regex {pattern!r},"
            texts = ((row, text) for row, text in enumerate(table[one.column].to_pylist()) if text)
            each(
                lambda given, search=search: search(given[1]) is None,
                texts,
                lambda given, what=what: f"{what} in row {ids[given[0]].as_py()}",
            )


def _suite(record_type: str) -> list[Asked]:
    """The mandatory expectations of a record type."""
    columns = COLUMNS[record_type]
    null, not_null = "expect_column_values_to_be_null", "expect_column_values_to_not_be_null"
    return [
        Asked("expect_table_row_count_to_be_between", None, {"min_value": 1}),
        Asked(not_null, "id", {}),
        Asked("expect_column_values_to_be_unique", "id", {}),
        Asked(not_null, "source", {}),
        Asked("expect_column_values_to_be_in_set", "columns", {"value_set": [",".join(sorted(columns))]}),
        Asked(null, "messages", {}),
        *([Asked(null, "verifier", {})] if "verifier" in columns else []),
        *([Asked(not_null, "task", {})] if "task" in columns else []),
        *([Asked(null, "answers", {})] if record_type == "preference" else []),
    ]


def _asked(own: Expectation) -> Asked:
    return Asked(f"expect_{own.expect}", own.column, own.arguments(), own.severity)


def _entry(asked: Asked, found: Any, table: "Table", of: int) -> dict[str, Any]:
    """The verdict's entry for one expectation on a table of some of `of` rows."""
    entry: dict[str, Any] = {"expectation": asked.expectation, "column": asked.column, "success": bool(found.success)}
    if asked.severity is None and found.success:
        return entry
    entry |= {"arguments": asked.arguments, "severity": asked.severity or "fail", "rows": len(table)}
    entry |= {"of": of} if len(table) < of else {}
    if "unexpected_percent" in found.result:  # an expectation on single values
        return entry | {"nulls": int(found.result.get("missing_count", 0)), "unexpected": int(found.result["unexpected_count"])}
    return entry | {"observed": _observed(asked, found.result, table)}


def _examples(asked: Asked, table: "Table", ids: Any, rows: Sequence[int], places: Sequence[str]) -> list[dict[str, Any]]:
    """Examples of violating rows."""
    shown = []
    for row, place in zip(rows, places, strict=True):
        value = table[asked.column][row].as_py()
        shown.append({"id": ids[row].as_py(), "place": place, "value": _excerpt(value, asked) if isinstance(value, str) else value})
    return shown


def _excerpt(text: str, asked: Asked) -> str:
    """The beginning of a text, or the context of a forbidden match."""
    found = None
    if asked.expectation.startswith("expect_column_values_to_not_match"):
        patterns = asked.arguments.get("regex_list", [asked.arguments.get("regex")])
        found = next((match for pattern in patterns if (match := re.search(pattern, text))), None)
    start = max(0, found.start() - AROUND) if found else 0
    cut = text[start : start + EXCERPT]
    return f"{'… ' if start else ''}{cut}{' …' if start + EXCERPT < len(text) else ''}"


def _observed(asked: Asked, result: dict[str, Any], table: "Table") -> Any:
    """The observed value of a column or of all rows; for distinct values, the first ones."""
    if asked.expectation.startswith("expect_column_distinct"):
        return sorted(table[asked.column].unique().drop_null().to_pylist())[:KEPT]
    found = result["observed_value"]
    if isinstance(found, list):
        return sorted(map(_plain, found))
    return [_plain(value) for value in found["values"]] if isinstance(found, dict) else _plain(found)


def _plain(value: Any) -> Any:
    """A NumPy number as Python's, rounded."""
    value = value.item() if hasattr(value, "item") else value
    return finite(float(f"{value:.{DIGITS}g}")) if isinstance(value, float) else value


def row_problem(row: dict[str, Any], record_type: str, check_verifier: Callable[[Any], None]) -> str | None:
    """What is wrong with a single row, in one sentence, or None. Ignores its id and relations to other rows."""
    facts = _facts(row, record_type, check_verifier)
    found = next((facts[column] for column in ("messages", "verifier", "answers") if facts.get(column)), None)
    if found is None and not is_unicode(json.dumps([row[name] for name in row if name not in ("messages", "answers")], ensure_ascii=False)):
        return "a text holds half of a surrogate pair, which is no character"
    return found


def _facts(row: dict[str, Any], record_type: str, check_verifier: Callable[[Any], None]) -> dict[str, Any]:
    """Facts of one row for the expectations. A problem is a sentence, or None if there is none."""
    columns = COLUMNS[record_type]
    facts = {
        "id": row.get("id"),
        "source": row.get("source"),
        "columns": ",".join(sorted(set(row) - (OF_FORMS if record_type == "item" else OF_OTHERS))),
        "messages": message_problem(row.get("messages"), LAST_TURN[record_type], kept=ROW_FAULTS),
    }
    if "verifier" in columns:
        verifiers = [row.get("verifier"), *row.get("others", {}).values()]
        found = (_verifier_problem(one, record_type == "prompt", check_verifier) for one in verifiers)
        facts["verifier"] = next((problem for problem in found if problem), None)
    if "task" in columns:
        facts["task"] = row.get("task")
    if record_type == "preference":
        facts["answers"] = _answers_problem(row)
    return facts


def _verifier_problem(verifier: Any, optional: bool, check_verifier: Callable[[Any], None]) -> str | None:
    if verifier is None and optional:
        return None
    try:
        check_verifier(verifier)
    except PedigreeError as error:
        return str(error)
    return None


def _answers_problem(row: dict[str, Any]) -> str | None:
    """What is wrong with a preference's answers. Only the best must have text: policies may give empty answers and learn not to."""
    answers, strength = row.get("answers"), row.get("strength")
    if not isinstance(answers, list) or not answers:
        return "there are no answers"
    if not all(isinstance(one, dict) and set(one) - OPTIONAL == {"text", "score"} and isinstance(one["text"], str) for one in answers):
        return "an answer is not {text, score} with a text"
    if not all(one.get("finish_reason", "stop") in FINISH_REASONS for one in answers):
        return "a finish_reason is neither stop nor length"
    if not all(one.get("win_rate") is None or (_is_number(one["win_rate"]) and 0 <= one["win_rate"] <= 1) for one in answers):
        return "a win_rate is no probability"
    if not all(is_unicode(one["text"]) for one in answers):
        return "an answer holds half of a surrogate pair, which is no character"
    if not answers[0]["text"].strip():
        return "the best answer is empty"
    if len({one["text"] for one in answers}) < len(answers):
        return "two answers are the same"
    if not all(one["score"] is None or _is_number(one["score"]) for one in answers):
        return "a score is no finite number"
    scores = [one["score"] for one in answers if one["score"] is not None]
    if len(answers) == 1 and not scores:
        return "a single answer has no score"
    if scores != sorted(scores, reverse=True):
        return f"scores {scores} are not best first"
    if strength is None:
        return None
    if len(answers) != 2:
        return f"strength {strength!r} needs 2 answers, but there are {len(answers)}: remove it"
    return None if _is_number(strength) and 0 <= strength <= 1 else f"strength {strength!r} is no probability"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _run(asked: Sequence[Asked], table: "Table") -> list[Any]:
    """The library's results of expectations on a table.

    Raises:
        PedigreeError: one of them cannot be evaluated.
    """
    os.environ["GX_ANALYTICS_ENABLED"] = "false"
    with uncollected(), _imported_on_use(UNUSED):
        import great_expectations as gx
    import pandas as pd
    from pyarrow import types

    context: Any = gx.get_context(mode="ephemeral")
    context.variables.progress_bars = {"globally": False, "metric_calculations": False}
    source = context.data_sources.add_pandas("rows")
    batch = source.add_dataframe_asset("rows").add_batch_definition_whole_dataframe("rows")
    frame = table.to_pandas(types_mapper=lambda kind: None if types.is_primitive(kind) else pd.ArrowDtype(kind))
    suite = gx.ExpectationSuite(name="rows", expectations=[_of_library(number, one) for number, one in enumerate(asked)])
    form = {"result_format": "SUMMARY", "partial_unexpected_count": KEPT}
    with pd.option_context("mode.string_storage", "python"), warnings.catch_warnings():  # Python's regular expressions, not Arrow's
        warnings.filterwarnings("ignore", "This pattern is interpreted as a regular expression", UserWarning)
        outcome = batch.get_batch({"dataframe": frame}).validate(suite, result_format=form)
    answers = sorted(outcome.results, key=lambda one: one.expectation_config.meta["number"])
    for one, answer in zip(asked, answers, strict=True):
        info = answer.exception_info
        errors = [info, *info.values()] if isinstance(info, dict) else []
        message = next((error["exception_message"] for error in errors if isinstance(error, dict) and error.get("exception_message")), None)
        if message:
            raise PedigreeError(f"{one.expectation} cannot be evaluated on {one.column or 'rows'}, {one.arguments}: {message}")
    return answers


def _of_library(number: int, asked: Asked) -> Any:
    """The library's object for an expectation, with its number as metadata."""
    import great_expectations.expectations as library

    kind = getattr(library, "".join(map(str.capitalize, asked.expectation.split("_"))))
    column = {} if asked.column is None else {"column": asked.column}
    return kind(**column, **asked.arguments, meta={"number": number})


class _OnUse(ModuleType):
    """Lazy stand-in for a module, which is imported on first attribute access."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # accessed by the import system
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(import_module(self.__name__), name)


@contextmanager
def _imported_on_use(names: Sequence[str]) -> Iterator[None]:
    """Replace these modules by lazy stand-ins for imports within the block; later imports get the module."""
    stand_ins = [_OnUse(name) for name in names if name not in sys.modules]
    sys.modules.update({one.__name__: one for one in stand_ins})
    try:
        yield
    finally:
        for one in stand_ins:
            if sys.modules.get(one.__name__) is one:
                del sys.modules[one.__name__]
