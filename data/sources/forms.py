"""Convert benchmark rows to items by a form, which defines prompt and scoring."""

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from string import ascii_uppercase
from typing import Any

from jinja2 import StrictUndefined, TemplateError, Undefined
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pedigree.configs.base.frozen import digest
from pedigree.configs.base.problems import PedigreeError
from pedigree.configs.rows.suite_forms import Form, Metric
from pedigree.data.records.records import Message
from pedigree.data.sources.golds import FUNCTIONS
from pedigree.data.sources.row_files import BadRow, Unreadable, listed

NOT_ASKED = "not asked"
"""Reason for omitting a row that fails the form's `where`."""
OVER = "over per_category"


class RowProblem(ValueError):
    """A row lacks something that the form reads."""


@dataclass(frozen=True)
class Question:
    """A row as read by the form."""

    row: dict[str, Any]
    text: str
    """The bare question."""
    facts: dict[str, Any]
    """Variables of templates and expressions."""

    @property
    def category(self) -> str | None:
        return self.facts.get("category")


@dataclass(frozen=True)
class ParsedItems:
    """Items, and the reasons why other rows were omitted."""

    items: list[dict[str, Any]]
    left_out: dict[str, int] = field(default_factory=dict)
    bad: tuple[BadRow, ...] = ()


def make(
    form: Form,
    rows: Iterable[tuple[str, Any]],
    *,
    task: str,
    source: str,
    shots: Sequence[tuple[str, Any]] | None = None,
    seed: int | None = None,
    problem: Callable[[dict[str, Any]], str | None] = lambda item: None,
) -> ParsedItems:
    """Convert all rows to items without ids, in order.

    Args:
        form: prompt and scoring.
        rows: (place, row) in the benchmark's own columns.
        task, source: of the items.
        shots: rows with worked examples; by default the form's own.
        seed: draws worked examples by hash; by default the first ones are taken.
        problem: returns what is wrong with an item, in one sentence, or None.

    Raises PedigreeError if worked examples are too few, or do not fit the form (the first five are shown).
    """
    questions, left_out, bad = _questions(form, rows)
    examples = shots if shots is not None else [(f"example {number}", row) for number, row in enumerate(form.examples, start=1)]
    given, _, unfit = _questions(form, examples, asked=True) if form.prompt.shots else ([], {}, [])
    if unfit:
        raise PedigreeError(f"{len(unfit)} worked examples do not fit the form; fix or remove them:\n  {listed(unfit)}")
    shots_of = _shots(form, given, {question.text for _, question in questions}, seed)
    items = []
    for place, question in questions:
        worked = shots_of(question)
        try:
            item = _item(form, question, worked, task, source)
            if wrong := problem(item):
                raise RowProblem(wrong)
            items.append(item)
        except RowProblem as error:
            bad.append(BadRow.of(place, str(error), question.row))
    return ParsedItems(items, left_out, tuple(bad))


def _questions(
    form: Form, rows: Iterable[tuple[str, Any]], asked: bool = False
) -> tuple[list[tuple[str, Question]], dict[str, int], list[BadRow]]:
    """((place, question) pairs, number of omitted rows by reason, bad rows).

    `asked`: ignore `where` and `per_category`.
    """
    questions: list[tuple[str, Question]] = []
    bad: list[BadRow] = []
    left_out: Counter[str] = Counter()
    taken: Counter[str | None] = Counter()
    for number, (place, row) in enumerate(rows):
        try:
            if isinstance(row, Unreadable):
                raise RowProblem(row.reason)
            if not isinstance(row, Mapping):
                raise RowProblem("the row is not an object with named fields")
            if not asked and form.rows.where is not None and not _evaluated(form.rows.where, _seen(row)):
                left_out[NOT_ASKED] += 1
                continue
            question = _question(form, row, number)
        except RowProblem as error:
            bad.append(BadRow.of(place, str(error), row))
            continue
        taken[question.category] += 1
        if not asked and form.rows.per_category is not None and taken[question.category] > form.rows.per_category:
            left_out[OVER] += 1
            continue
        questions.append((place, question))
    return questions, dict(left_out), bad


def _seen(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row's columns as variables; columns that are not identifiers are only in `row`."""
    return {**{name: value for name, value in row.items() if isinstance(name, str) and name.isidentifier()}, "row": row}


def _question(form: Form, row: Mapping[str, Any], number: int) -> Question:
    facts = _seen(row)
    answer = _evaluated(form.rows.answer, facts)
    if form.rows.choices:
        choices = _evaluated(form.rows.choices, facts)
        if not isinstance(choices, (list, tuple)) or not 2 <= len(choices) <= len(ascii_uppercase):
            raise RowProblem(f"choices {choices!r:.80} are no list of 2 to {len(ascii_uppercase)} texts")
        order = list(range(len(choices)))
        if form.rows.shuffle is not None:
            random.Random(form.rows.shuffle + number).shuffle(order)
        choices = [str(choices[place]) for place in order]
        facts |= {"choices": choices, "labels": list(ascii_uppercase[: len(choices)])}
        facts["options"] = "".join(
            _rendered(form.prompt.option, {**facts, "label": label, "text": text})
            for label, text in zip(facts["labels"], choices, strict=True)
        )
        if type(answer) is int:
            if not 0 <= answer < len(choices):
                raise RowProblem(f"answer {answer} is no place among {len(choices)} choices")
            answer = order.index(answer)
            facts["letter"] = facts["labels"][answer]
        elif form.rows.shuffle is not None:
            if not isinstance(answer, (list, tuple)) or len(answer) != len(order):
                raise RowProblem(f"choices are mixed, and answer {answer!r:.80} is neither a place among them nor a list of their length")
            answer = [answer[place] for place in order]
    facts["answer"] = answer
    if answer is None or answer == "" or answer == []:
        raise RowProblem("there is no answer")
    if form.rows.category:
        facts["category"] = str(_evaluated(form.rows.category, facts))
    text = _rendered(form.rows.question, facts)
    if not text.strip():
        raise RowProblem("the question is empty")
    return Question(dict(row), text, {**facts, "question": text})


def _shots(form: Form, given: list[tuple[str, Question]], items: set[str], seed: int | None) -> Callable[[Question], list[Question]]:
    """A function that selects the worked examples of each question."""
    count = form.prompt.shots
    kept = [question for _, question in given if question.text not in items]
    if seed is not None:
        kept.sort(key=lambda question: digest([seed, question.row]))

    def category_of(question: Question) -> str | None:
        return question.category if form.prompt.shots_of == "category" else None

    by_category: dict[str | None, list[Question]] = defaultdict(list)
    for question in kept:
        by_category[category_of(question)].append(question)

    def shots_of(question: Question) -> list[Question]:
        category = category_of(question)
        found = by_category[category][:count]
        if len(found) < count:
            of = f" of category {category}" if category else ""
            items = f"{len(given) - len(kept)} are items themselves"
            raise PedigreeError(f"{len(found)} worked examples{of}, but the form shows {count} ({items}): provide more")
        return found

    return shots_of


def _item(form: Form, question: Question, shots: Sequence[Question], task: str, source: str) -> dict[str, Any]:
    item: dict[str, Any] = {"source": source, "task": task, "messages": messages_of(form, question, shots), "question": question.text}
    if question.category is not None:
        item["category"] = question.category
    if form.prompt.prefix is not None:
        item["prefix"] = _rendered(form.prompt.prefix, question.facts)
    if form.choose:
        item["choices"] = [
            _rendered(form.choose.continuation, {**question.facts, "label": label, "text": text})
            for label, text in zip(question.facts["labels"], question.facts["choices"], strict=True)
        ]
        if "" in item["choices"]:
            raise RowProblem(f"choice {question.facts['labels'][item['choices'].index('')]} is empty, and has no likelihood")
    verifiers = {name: _verifier(metric, question.facts) for name, metric in form.metrics.items()}
    primary = next(iter(verifiers))
    item["verifier"] = verifiers[primary]
    others = {name: one for name, one in verifiers.items() if one != verifiers[primary]}
    if others:
        item["others"] = others
    weights = {name: _weight(metric.weight, question.facts) for name, metric in form.metrics.items() if metric.weight is not None}
    if weights:
        item["weights"] = weights
    return item


def messages_of(form: Form, question: Question, shots: Sequence[Question]) -> list[Message]:
    """The turns of a question with its worked examples; the last turn is the user's."""
    prompt = form.prompt
    before, after = _rendered(prompt.before, question.facts), _rendered(prompt.after, question.facts)
    examples = [(_rendered(prompt.ask, shot.facts), _rendered(form.rows.worked or "", shot.facts)) for shot in shots]
    last = _rendered(prompt.ask, question.facts)
    messages: list[Message] = [{"role": "system", "content": prompt.system}] if prompt.system else []
    if prompt.shots_as == "text":
        worked = [f"{asked} {answered}" for asked, answered in examples]
        return [*messages, {"role": "user", "content": before + prompt.between.join([*worked, last]) + after}]
    turns = [turn for asked, answered in examples for turn in (("user", asked), ("assistant", answered))] + [("user", last)]
    turns[0] = (turns[0][0], before + turns[0][1])
    turns[-1] = (turns[-1][0], turns[-1][1] + after)
    return [*messages, *({"role": role, "content": content} for role, content in turns)]


def _verifier(metric: Metric, facts: dict[str, Any]) -> dict[str, Any]:
    return {"name": metric.verifier, **{name: _evaluated(text, facts) for name, text in metric.fields.items()}, **metric.options}


def _weight(expression: str, facts: dict[str, Any]) -> float:
    value = _evaluated(expression, facts)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
        raise RowProblem(f"the weight {value!r} is no number above 0")
    return float(value)


# --- templates and expressions -----------------------------------------------------------------------------------------


@cache
def _environment() -> ImmutableSandboxedEnvironment:
    """Sandbox for forms, without access to Python internals or anything outside."""
    environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)
    environment.globals.update(FUNCTIONS)
    return environment


@cache
def _template(text: str) -> Any:
    return _environment().from_string(text)


@cache
def _expression(text: str) -> Any:
    return _environment().compile_expression(text, undefined_to_none=False)


def _rendered(text: str, facts: Mapping[str, Any]) -> str:
    """Render a template. Raises as `_explained`."""
    with _explained(text):
        return _template(text).render(facts)


def _evaluated(text: str, facts: Mapping[str, Any]) -> Any:
    """Evaluate an expression. Raises as `_explained`."""
    with _explained(text):
        value = _expression(text)(**facts)
        if isinstance(value, Undefined):
            raise ValueError("the row has no such column")
        return value


@contextmanager
def _explained(text: str) -> Iterator[None]:
    """Raise RowProblem where a row lacks something, or a function finds no answer in it."""
    try:
        yield
    except (TemplateError, SecurityError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise RowProblem(f"{text[:80]!r}: {error}") from error
