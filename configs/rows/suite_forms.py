"""Benchmark forms: how benchmarks are asked and scored, as data in `configs/forms/NAME.yaml`.

A form defines how a row of the benchmark becomes a question with its correct answer, how the question is presented to a model, how answers
are sampled and scored, and how scores are averaged. Two kinds of strings are Jinja: *templates*, texts that contain `{{ ... }}`, and
*expressions*, the content of such braces. Both see the columns of the row, the whole row as `row`, and the functions of
`data/sources/golds.py`; and once known, `question`, `answer`, `choices`, `labels` (A, B, ...), `options` (the formatted choices) and
`category`.
"""

import re
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from pedigree.configs.base.frozen import Frozen, Many, digest
from pedigree.configs.base.jinja import jinja_problem
from pedigree.configs.base.mistakes import not_one_of, read_packaged


def _parsed(kind: Literal["template", "expression"], text: str) -> str:
    problem = jinja_problem(text if kind == "template" else f"{{{{ {text} }}}}")
    if problem:
        raise ValueError(f"not a Jinja {kind}, {problem}")
    return text


Template = Annotated[str, AfterValidator(partial(_parsed, "template"))]
Expression = Annotated[str, AfterValidator(partial(_parsed, "expression"))]
FORMS = Path(__file__).parents[1] / "forms"
NAME = re.compile(r"[a-z][a-z0-9_]*")


class Columns(Frozen):
    """How a row becomes a question and its answer."""

    question: Template
    """Template: the bare question, without instructions or worked examples. Decontamination compares it with training rows."""
    answer: Expression = "answer"
    """Expression: the correct answer; for choices its index, from 0."""
    choices: Expression | None = None
    """Expression: the list of choices."""
    shuffle: int | None = Field(default=None, ge=0)
    """Shuffle the choices of the i-th row (from 0) with `random.Random(shuffle + i)`, as OLMES does, so that letters are stable. The answer
    is the index of a choice, or a list with one value per choice, which is shuffled along."""
    category: Expression | None = None
    """Expression: the row's category, for macro averages and worked examples by category."""
    per_category: int | None = Field(default=None, ge=1)
    """Use only the first N rows of each category."""
    where: Expression | None = None
    """Expression: use only rows for which it is true; the others are counted."""
    worked: Template | None = None
    """Template: the assistant's answer when the row is a worked example."""


class Asking(Frozen):
    """How a question is presented to a model."""

    chat: bool = True
    """Use the model's chat template; otherwise plain text for the model to continue."""
    system: str | None = None
    """System message."""
    before: Template = ""
    """Template: instruction before the first question, in the same turn."""
    ask: Template
    """Template: each question, including those of worked examples."""
    after: Template = ""
    """Template: instruction after the last question, in the same turn."""
    option: Template = " ({{ label }}) {{ text }}\n"
    """Template: one choice, from `label` and `text`."""
    shots: int = Field(default=0, ge=0)
    """Number of worked examples before the question."""
    shots_as: Literal["turns", "text"] = "turns"
    """Present each as a user and an assistant turn, or all within the text of the last turn."""
    shots_of: Literal["all", "category"] = "all"
    """Use the same examples for all questions, or those of the question's category."""
    between: str = "\n\n"
    """Separator between worked examples in one turn, and before the question; within each, a space separates question and answer."""
    prefix: Template | None = None
    """Template: the beginning of the assistant's turn, which the model continues."""


class Drawing(Frozen):
    """How answers are sampled."""

    temperature: float = Field(default=0.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    max_tokens: int = Field(ge=1)
    """Maximum answer length in tokens."""
    samples: int = Field(default=1, ge=1)
    """Answers per item."""
    stop: Many[str] = ()
    """Truncate an answer before the first occurrence of any of these strings. The engine itself stops only at the end-of-turn token and
    `max_tokens`; truncation happens afterwards."""

    @model_validator(mode="after")
    def _check_samples(self) -> "Drawing":
        if self.samples > 1 and self.temperature == 0:
            raise ValueError(
                f"samples is {self.samples} at temperature 0, where all samples are equal: raise temperature, or set samples to 1"
            )
        return self


class Choosing(Frozen):
    """Compare the likelihoods of choices instead of sampling answers."""

    continuation: Template = "{{ text }}"
    """Template: the assistant's text for a choice, from `label` and `text`."""


class Metric(Frozen):
    """One way to score an answer."""

    verifier: str
    """Name of a verifier."""
    fields: dict[str, str] = Field(default_factory=lambda: {"answer": "answer"})
    """Field of the verifier → expression over the row."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Further fields of the verifier, the same for all rows."""
    at: int | None = Field(default=None, ge=1)
    """k of pass@k, over all samples of an item; by default an item's score is the mean over its samples."""
    weight: Expression | None = None
    """Expression: weight of an item, e.g. its number of instructions; equal weights by default."""


class Form(Frozen):
    """One form of one benchmark."""

    description: str
    """One-line description of the measurement and its form."""
    origin: str
    """Where the form is published, and how this one differs."""
    split: Literal["dev", "unseen"]
    """Default split of suites with this form."""
    items: int | None = Field(default=None, ge=1)
    """Items of the whole benchmark, for plans before it is downloaded."""
    rows: Columns
    """How a row becomes a question."""
    prompt: Asking
    """How questions are presented."""
    draw: Drawing | None = None
    """Sample answers and verify them; exclusive with `choose`."""
    choose: Choosing | None = None
    """Compare given choices; exclusive with `draw`."""
    metrics: dict[str, Metric] = Field(min_length=1)
    """Name → metric; the first is primary and gives the suite's score."""
    average: Literal["micro", "macro"] = "micro"
    """Average over items (`micro`), or over category averages (`macro`)."""
    examples: Many[dict[str, Any]] = ()
    """Worked examples, as rows in the benchmark's columns; a recipe may provide others."""

    @model_validator(mode="after")
    def _check_answering(self) -> "Form":
        if (self.draw is None) == (self.choose is None):
            raise ValueError("a form needs exactly one of `draw` (sample answers) and `choose` (compare choices)")
        if self.choose and (not self.rows.choices or self.prompt.prefix):
            raise ValueError("choose requires rows.choices and does not allow prompt.prefix: set the former and remove the latter")
        return self

    @model_validator(mode="after")
    def _check_requirements(self) -> "Form":
        for name, metric in self.metrics.items():
            samples = self.draw.samples if self.draw else 1
            if metric.at is not None and metric.at > samples:
                raise ValueError(
                    f"metric {name} is pass@{metric.at}, but the number of samples is {samples}: raise draw.samples, or lower `at`"
                )
        needs_category = [
            field
            for field, needed in (
                ("average: macro", self.average == "macro"),
                ("prompt.shots_of: category", self.prompt.shots_of == "category"),
                ("rows.per_category", self.rows.per_category is not None),
            )
            if needed and self.rows.category is None
        ]
        if needs_category:
            raise ValueError(f"{needs_category[0]} requires rows.category")
        if self.rows.shuffle is not None and not self.rows.choices:
            raise ValueError("rows.shuffle requires rows.choices: set it, or remove rows.shuffle")
        if self.prompt.shots and not self.rows.worked:
            raise ValueError(
                f"prompt.shots is {self.prompt.shots}, which requires rows.worked, the assistant's answer in a worked example: set it"
            )
        if not self.prompt.chat and (self.prompt.system or (self.prompt.shots_as == "turns" and self.prompt.shots)):
            raise ValueError("prompt.chat is false, so there are no turns: remove prompt.system, and set prompt.shots_as to text")
        return self

    @property
    def sha256(self) -> str:
        """Hash of everything that affects items and scores."""
        return digest(self.deciding())

    def deciding(self) -> dict[str, Any]:
        """The form without its descriptions."""
        return self.model_dump(mode="json", exclude={"description", "origin", "items"})


def form_names() -> list[str]:
    return sorted(path.stem for path in FORMS.glob("*.yaml"))


@cache
def load_form(name: str) -> Form:
    """Load a form by name; cached on first use.

    Raises:
        ValueError: no such form, or its file is invalid; the message states the location.
    """
    if not NAME.fullmatch(name) or name not in form_names():
        raise ValueError(f"form {not_one_of(name, form_names(), f'add configs/forms/{name}.yaml')}")
    return read_packaged(Form, FORMS / f"{name}.yaml", f"configs/forms/{name}.yaml")
