"""An answer's rating by a language model: the question that is put, and what its words come to.

A rating is read from one line only, and a text in which that line cannot be told for certain has none: no number is ever made up, and none
is taken from words that the judge may have quoted from the answer.
"""

import re
from collections.abc import Iterable, Sequence
from statistics import fmean
from string import Template

from configs.base.frozen import digest
from configs.judging.rubrics import CUT_OFF, FRAME, HIGHEST, Rubric
from data.records.records import Message
from stages.core.stated import stated_line

STATED = re.compile(r"rating\s*[:=]", re.IGNORECASE)
EXACT = re.compile(rf"Rating: *([1-{HIGHEST}])")
MARK_LENGTH = 12


def question(messages: Sequence[Message], answer: str, rubric: Rubric, *, ended: bool) -> list[Message]:
    """What the judge is asked about one answer: one user's turn, so that templates without a system turn will do.

    Args:
        messages: the conversation, which ends with the user's turn.
        answer: what was said to it.
        rubric: what to look at.
        ended: whether the answer came to its end; the judge is told where it was cut off.
    """
    conversation = "\n\n".join(f"[{message['role']}]\n{message['content']}" for message in messages)
    content = Template(FRAME).substitute(
        mark=unused_mark(conversation, answer),
        conversation=conversation,
        answer=answer,
        ending="" if ended else CUT_OFF,
        aspect=rubric.aspect,
        question=rubric.question,
        scale="\n".join(f"{rating}: {meaning}" for rating, meaning in enumerate(rubric.scale, 1)),
    )
    return [{"role": "user", "content": content}]


def unused_mark(*texts: str) -> str:
    """A word that stands in none of the texts and follows from them: who writes an answer cannot know it, and so cannot end the stretch
    that the answer stands in."""
    salt = 0
    while (mark := digest([salt, *texts])[:MARK_LENGTH]) in "\n".join(texts):
        salt += 1
    return mark


def parse_rating(text: str, *, ended: bool = True) -> int | str:
    """The rating that a judge's words end with, 1 to 5, or why they have none: the last line must be `Rating: N`, and the only one that
    begins so."""
    found = stated_line(text, "rating", STATED, EXACT, ended=ended, otherwise=f"is none of 1 to {HIGHEST}")
    return found if isinstance(found, str) else int(found[1])


def mean_rating(ratings: Iterable[int | None]) -> float | None:
    """The mean over all aspects; None where one of them has no rating: a mean of the others would be another measure."""
    found = list(ratings)
    known = [rating for rating in found if rating is not None]
    return fmean(known) if known and len(known) == len(found) else None
