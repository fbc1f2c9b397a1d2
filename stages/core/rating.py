"""Rate an answer with a language model: build the question, and parse the line of the reply that states a verdict.

A rating is parsed from a single line, and an ambiguous reply has none: ratings are never guessed, nor taken from text that the judge may
have quoted from the answer.
"""

import re
from collections.abc import Iterable, Sequence
from statistics import fmean
from string import Template

from pedigree.configs.base.frozen import digest
from pedigree.configs.methods.rubrics import CUT_OFF, FRAME, HIGHEST, Rubric
from pedigree.data.records.records import Message
from pedigree.stages.core.ensembles import all_known

STATED = re.compile(r"rating\s*[:=]", re.IGNORECASE)
EXACT = re.compile(rf"Rating: *([1-{HIGHEST}])")
MARK_LENGTH = 12
EMPHASIS = str.maketrans("", "", "*`_#")
"""Markdown characters that some models put around the line."""


def question(messages: Sequence[Message], answer: str, rubric: Rubric, *, ended: bool) -> list[Message]:
    """The judge's question about one answer: a single user turn, to support templates without a system turn.

    `messages` end with the user's turn. If the answer has not `ended`, the question says that it was cut off.
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
    """A word that is in none of the texts, derived from a hash of them: the author of an answer cannot predict it, and so cannot forge the
    end of the answer's section."""
    salt = 0
    while (mark := digest([salt, *texts])[:MARK_LENGTH]) in "\n".join(texts):
        salt += 1
    return mark


def stated_line(
    text: str, what: str, begins: re.Pattern[str], exact: re.Pattern[str], *, ended: bool, otherwise: str
) -> re.Match[str] | str:
    """Match the line that states a verdict, or return why there is no unambiguous one.

    It must be the last line and the only one that begins with `begins`: with a second one, even if equal, the judge may be quoting.

    Args:
        what: name of the verdict, e.g. `rating`.
        begins: beginning of such a line.
        exact: the whole line.
        ended: whether the reply is complete.
        otherwise: reason if the line does not match `exact`, e.g. `is neither yes nor no`.
    """
    if not ended:
        return "the judge's words were cut off"
    lines = [line for line in (line.translate(EMPHASIS).strip() for line in text.splitlines()) if line]
    stated = [line for line in lines if begins.match(line)]
    if not stated:
        return f"no line states a {what}"
    if len(stated) > 1:
        return f"{len(stated)} lines state a {what}"
    if lines[-1] != stated[0]:
        return f"the {what} is not the last line"
    return exact.fullmatch(stated[0]) or f"the {what} {otherwise}"


def parse_rating(text: str, *, ended: bool = True) -> int | str:
    """Parse a rating from 1 to 5, or return why there is none: the last line must be `Rating: N`, and the only one that begins with that
    label."""
    found = stated_line(text, "rating", STATED, EXACT, ended=ended, otherwise=f"is none of 1 to {HIGHEST}")
    return found if isinstance(found, str) else int(found[1])


def mean_rating(ratings: Iterable[int | None]) -> float | None:
    """The mean over all aspects; None if one has no rating, because the mean of the others would be a different measure."""
    known = all_known(ratings)
    return None if known is None else fmean(known)
