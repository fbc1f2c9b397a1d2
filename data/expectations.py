"""The only door to Great Expectations: what each type of record must satisfy before anything reads it.

The verdict goes into the artifact's record, so it holds no time and no random id: equal rows give equal verdicts.
"""

import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from configs.problems import PedigreeError
from data.messages import FINISH_REASONS, is_unicode, message_problem
from data.process import uncollected

if TYPE_CHECKING:
    from pyarrow import Table

SHOWN = 5
COLUMNS: dict[str, tuple[str, ...]] = {
    "conversation": ("id", "source", "messages"),
    "prompt": ("id", "source", "messages", "verifier"),
    "item": ("id", "source", "task", "messages", "verifier"),
    "preference": ("id", "source", "messages", "answers", "strength"),
}
OF_FORMS = {"question", "category", "prefix", "choices", "others", "weights"}
"""Columns that an item may have besides, see `data/records.py`,"""
OF_OTHERS = {"template_arguments"}
"""and all other records."""
OPTIONAL = {"finish_reason", "win_rate", "policy", "policy_content", "on_policy"}
"""What an answer may have besides its text and score."""
UNUSED = ("scipy.stats", "altair", "boto3")
"""What Great Expectations imports for charts, distributions and secrets in half of its time. Nothing here asks for any of it."""
LAST_TURN = {"conversation": "assistant", "prompt": "user", "item": "user", "preference": "user"}


class ValidationError(PedigreeError):
    """Rows break an expectation; the message shows them."""


def validate(rows: Sequence[dict[str, Any]], record_type: str, check_verifier: Callable[[Any], None]) -> dict[str, Any]:
    """Holds rows against the suite of their type.

    Args:
        rows: records, see `data/records.py`.
        record_type: conversation, prompt, item or preference.
        check_verifier: raises an error that people meet for a malformed verifier (`stages.core.verifiers.check`).

    Returns:
        {"suite", "success", "rows", "expectations": [{"expectation", "column", "success"}]}.

    Raises:
        ValidationError: an expectation fails; the message names the first five offending rows of each.
    """
    return hold(facts_of(rows, record_type, check_verifier), record_type)


def facts_of(rows: Sequence[dict[str, Any]], record_type: str, check_verifier: Callable[[Any], None]) -> "Table":
    """What the expectations look at: a line for each row, of texts. A problem is a sentence, or null where there is none."""
    from pyarrow import Table, schema, string

    names = _facts({}, record_type, lambda verifier: None)
    facts = [_facts(row, record_type, check_verifier) for row in rows]
    return Table.from_pylist(facts, schema=schema([(name, string()) for name in names]))


def hold(facts: "Table", record_type: str) -> dict[str, Any]:
    """Holds the facts of rows (`facts_of`) against the suite of their type; as `validate`."""
    results = _run_suite(facts, record_type)
    failures = [_describe(result, facts) for result in results if not result["success"]]
    if failures:
        raise ValidationError(f"{record_type} rows break {len(failures)} expectations:\n" + "\n".join(failures))
    return {
        "suite": record_type,
        "success": True,
        "rows": len(facts),
        "expectations": [
            {"expectation": result["expectation"], "column": result["column"], "success": result["success"]} for result in results
        ],
    }


def row_problem(row: dict[str, Any], record_type: str, check_verifier: Callable[[Any], None]) -> str | None:
    """What a row by itself breaks, in one sentence, or None; its id and what it shares with other rows are not looked at."""
    facts = _facts(row, record_type, check_verifier)
    found = next((facts[column] for column in ("messages", "verifier", "answers") if facts.get(column)), None)
    if found is None and not is_unicode(json.dumps([row[name] for name in row if name not in ("messages", "answers")], ensure_ascii=False)):
        return "a text holds half of a surrogate pair, which is no character"
    return found


def _facts(row: dict[str, Any], record_type: str, check_verifier: Callable[[Any], None]) -> dict[str, Any]:
    """One flat line of a table: what the expectations look at. A problem is a sentence, or None where there is none."""
    columns = COLUMNS[record_type]
    facts = {
        "id": row.get("id"),
        "source": row.get("source"),
        "columns": ",".join(sorted(set(row) - (OF_FORMS if record_type == "item" else OF_OTHERS))),
        "messages": message_problem(row.get("messages"), LAST_TURN[record_type]),
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
    """A policy may answer with nothing, and be taught not to: only the best answer must have text."""
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
        return f"strength {strength!r} stands beside {len(answers)} answers: it is of pairs"
    return None if _is_number(strength) and 0 <= strength <= 1 else f"strength {strength!r} is no probability"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _run_suite(facts: "Table", record_type: str) -> list[dict[str, Any]]:
    """One entry per expectation: its name, column, success, and the places of the first offending rows."""
    os.environ["GX_ANALYTICS_ENABLED"] = "false"
    with uncollected(), _imported_on_use(UNUSED):
        import great_expectations as gx
    import pandas as pd

    expect: Any = gx.expectations
    suite = gx.ExpectationSuite(
        name=record_type,
        expectations=[
            expect.ExpectTableRowCountToBeBetween(min_value=1),
            expect.ExpectColumnValuesToNotBeNull(column="id"),
            expect.ExpectColumnValuesToBeUnique(column="id"),
            expect.ExpectColumnValuesToNotBeNull(column="source"),
            expect.ExpectColumnValuesToBeInSet(column="columns", value_set=[",".join(sorted(COLUMNS[record_type]))]),
            expect.ExpectColumnValuesToBeNull(column="messages"),
            *([expect.ExpectColumnValuesToBeNull(column="verifier")] if "verifier" in COLUMNS[record_type] else []),
            *([expect.ExpectColumnValuesToNotBeNull(column="task")] if "task" in COLUMNS[record_type] else []),
            *([expect.ExpectColumnValuesToBeNull(column="answers")] if record_type == "preference" else []),
        ],
    )
    context: Any = gx.get_context(mode="ephemeral")
    context.variables.progress_bars = {"globally": False, "metric_calculations": False}
    source = context.data_sources.add_pandas("rows")
    batch = source.add_dataframe_asset("rows").add_batch_definition_whole_dataframe("rows")
    table = facts.to_pandas(types_mapper=pd.ArrowDtype)
    outcome = batch.get_batch({"dataframe": table}).validate(suite, result_format="COMPLETE")
    return [
        {
            "expectation": result.expectation_config.type,
            "column": result.expectation_config.kwargs.get("column"),
            "success": bool(result.success),
            "offending": sorted(result.result.get("unexpected_index_list") or []),
            "observed": result.result.get("observed_value"),
        }
        for result in outcome.results
    ]


class _OnUse(ModuleType):
    """Stands in for a module, which is imported when one of its names is asked for."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # the import system asks for some
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(import_module(self.__name__), name)


@contextmanager
def _imported_on_use(names: Sequence[str]) -> Iterator[None]:
    """Whoever imports one of these modules within the block keeps a stand-in; whoever does later gets the module."""
    stand_ins = [_OnUse(name) for name in names if name not in sys.modules]
    sys.modules.update({one.__name__: one for one in stand_ins})
    try:
        yield
    finally:
        for one in stand_ins:
            if sys.modules.get(one.__name__) is one:
                del sys.modules[one.__name__]


def _describe(result: dict[str, Any], facts: "Table") -> str:
    places = result["offending"]
    lines = [f"  {result['expectation']}({result['column'] or 'rows'}): {len(places) or result['observed']} rows"]
    shown = [fact for place in places[:SHOWN] for fact in facts.slice(place, 1).to_pylist()]
    lines += [f"    {fact['id']}: {fact.get(result['column'])}" for fact in shown]
    return "\n".join([*lines, f"    ... and {len(places) - SHOWN} more"] if len(places) > SHOWN else lines)
