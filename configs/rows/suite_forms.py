"""The forms in which benchmarks are asked and scored, as data: `configs/forms/NAME.yaml`, one file a form.

A form says how a row of the benchmark becomes a question with its right answer, how the question is put to a model, how answers are drawn
and scored, and how scores are averaged. Two kinds of texts in it are Jinja: *templates*, texts with `{{ ... }}` in them, and *expressions*,
what stands between such braces. Both see the columns of the row, the whole row as `row`, and the functions of `data/sources/golds.py`; once
they are known also `question`, `answer`, `choices`, `labels` (A, B, ...), `options` (the choices, one after another) and `category`.
"""

import re
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, ValidationError, model_validator

from configs.base.frozen import Frozen, Many, digest

FORMS = Path(__file__).parents[1] / "forms"
NAME = re.compile(r"[a-z][a-z0-9_]*")


class Columns(Frozen):
    """How a row becomes a question and its answer."""

    question: str
    """Template: the question alone, without instructions or worked examples. Decontamination compares it with training rows."""
    answer: str = "answer"
    """Expression: the right answer; of choices its place, from 0."""
    choices: str | None = None
    """Expression: a list of texts to choose from."""
    shuffle: int | None = Field(default=None, ge=0)
    """Mixes the choices of the i-th row (from 0) by `random.Random(shuffle + i)`, as OLMES does, so that letters never change.
    An answer is the place of one of them, or a list with a value for each, which is mixed alike."""
    category: str | None = None
    """Expression: what the row belongs to, for macro averages and worked examples of its own kind."""
    per_category: int | None = Field(default=None, ge=1)
    """Takes the first so many rows of each category."""
    where: str | None = None
    """Expression: takes rows for which it holds; the others are counted."""
    worked: str | None = None
    """Template: what the assistant says to the question where the row is a worked example."""


class Asking(Frozen):
    """How a question is put to a model."""

    chat: bool = True
    """By the model's chat template; otherwise as plain text, which the model goes on with."""
    system: str | None = None
    """Text of the system's turn."""
    before: str = ""
    """Template: instruction before the first question, in the same turn."""
    ask: str
    """Template: each question, of worked examples too."""
    after: str = ""
    """Template: instruction after the last question, in the same turn."""
    option: str = " ({{ label }}) {{ text }}\n"
    """Template: one choice, of `label` and `text`."""
    shots: int = Field(default=0, ge=0)
    """Worked examples before the question."""
    shots_as: Literal["turns", "text"] = "turns"
    """Each as a turn of the user and one of the assistant, or all in the text of the last turn."""
    shots_of: Literal["all", "category"] = "all"
    """The same for all questions, or of the question's category."""
    between: str = "\n\n"
    """Text between worked examples in one turn, and between them and the question; in each, one space divides question and answer."""
    prefix: str | None = None
    """Template: how the assistant's turn begins; the model goes on from there."""


class Drawing(Frozen):
    """How answers are drawn."""

    temperature: float = Field(default=0.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    max_tokens: int = Field(ge=1)
    """Longest answer, in tokens."""
    samples: int = Field(default=1, ge=1)
    """Answers to each item."""
    stop: Many[str] = ()
    """An answer ends before the first of these texts in it. The engine stops at the end-of-turn token and `max_tokens` only, and answers
    are cut afterwards."""

    @model_validator(mode="after")
    def samples_differ(self) -> "Drawing":
        if self.samples > 1 and self.temperature == 0:
            raise ValueError(f"samples is {self.samples} at temperature 0, where all would be equal: raise temperature, or take 1 sample")
        return self


class Choosing(Frozen):
    """How the likelihoods of choices are compared instead of drawing answers."""

    continuation: str = "{{ text }}"
    """Template: what the assistant says for a choice of `label` and `text`."""


class Metric(Frozen):
    """One way to score an answer."""

    verifier: str
    """Name of a verifier."""
    fields: dict[str, str] = Field(default_factory=lambda: {"answer": "answer"})
    """Field of the verifier → expression over the row."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Further fields of the verifier, the same for all rows."""
    at: int | None = Field(default=None, ge=1)
    """k of pass@k, over all samples of an item; without it, an item's score is the mean over its samples."""
    weight: str | None = None
    """Expression: how much an item counts, e.g. its number of instructions; all count alike when absent."""


class Form(Frozen):
    """One form of one benchmark."""

    description: str
    """What it measures and in which form, in a line."""
    origin: str
    """Where the form is published, and where this one departs from it."""
    split: Literal["dev", "unseen"]
    """What suites of this form are unless a recipe says otherwise."""
    rows: Columns
    """How a row becomes a question."""
    prompt: Asking
    """How questions are put."""
    draw: Drawing | None = None
    """Answers are drawn and verified; or `choose`."""
    choose: Choosing | None = None
    """Given choices are compared; or `draw`."""
    metrics: dict[str, Metric] = Field(min_length=1)
    """Name → how it scores; the first is primary: the suite's score."""
    average: Literal["micro", "macro"] = "micro"
    """Over items, or over the averages of categories."""
    examples: Many[dict[str, Any]] = ()
    """Worked examples, as rows in the columns of the benchmark; a recipe may name others."""

    @model_validator(mode="after")
    def one_way_to_answer(self) -> "Form":
        if (self.draw is None) == (self.choose is None):
            raise ValueError("a form has `draw` (answers are drawn) or `choose` (choices are compared), one of them")
        if self.choose and (not self.rows.choices or self.prompt.prefix):
            raise ValueError("choose compares choices: give rows.choices, and no prompt.prefix, which continuations would come after")
        return self

    @model_validator(mode="after")
    def what_is_asked_for_is_there(self) -> "Form":
        for name, metric in self.metrics.items():
            samples = self.draw.samples if self.draw else 1
            if metric.at is not None and metric.at > samples:
                raise ValueError(f"metric {name} is pass@{metric.at}, and {samples} samples are drawn: raise draw.samples, or lower `at`")
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
            raise ValueError(f"{needs_category[0]} needs rows.category")
        if self.rows.shuffle is not None and not self.rows.choices:
            raise ValueError("rows.shuffle mixes choices: give rows.choices, or leave it out")
        if self.prompt.shots and not self.rows.worked:
            raise ValueError(f"prompt.shots is {self.prompt.shots}: say by rows.worked what the assistant says in a worked example")
        if not self.prompt.chat and (self.prompt.system or (self.prompt.shots_as == "turns" and self.prompt.shots)):
            raise ValueError("prompt.chat: false is plain text: it has no system turn, and worked examples as text")
        return self

    @property
    def sha256(self) -> str:
        """Of all that decides about items and scores."""
        return digest(self.deciding())

    def deciding(self) -> dict[str, Any]:
        """What it says, its descriptions aside."""
        return self.model_dump(mode="json", exclude={"description", "origin"})


def form_names() -> list[str]:
    return sorted(path.stem for path in FORMS.glob("*.yaml"))


@cache
def load_form(name: str) -> Form:
    """A form by name, as it was when it was first asked for.

    Raises:
        ValueError: there is none of that name, or its file is wrong; the message says where.
    """
    if not NAME.fullmatch(name) or name not in form_names():
        raise ValueError(f"form {name!r} is none of {', '.join(form_names())}: add configs/forms/{name}.yaml")
    try:
        given = yaml.safe_load((FORMS / f"{name}.yaml").read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"configs/forms/{name}.yaml is not YAML: {error}") from error
    try:
        return Form.model_validate(given)
    except ValidationError as error:
        said = "; ".join(f"{'.'.join(map(str, one['loc'])) or 'the form'}: {one['msg']}" for one in error.errors())
        raise ValueError(f"configs/forms/{name}.yaml: {said}") from error
