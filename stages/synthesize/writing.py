"""Prompts by a language model: the question that is put, and what its words come to.

A prompt is read from between its marks only. A reply in which these do not stand in turn has none: nothing is guessed.
"""

import re
from collections.abc import Sequence
from string import Template

from configs.judging.synthesis import Persona, Rewrite, SelfInstruct
from configs.judging.writing import CLOSE, FRAME, MANNERS, OPEN, load_writing
from data.records.records import Message
from stages.core.rating import unused_mark

MARKS = re.compile(f"{re.escape(OPEN)}|{re.escape(CLOSE)}")


def writing_question(method: Persona | SelfInstruct | Rewrite, material: Sequence[str]) -> list[Message]:
    """What the writer is asked: one user's turn, so that templates without a system turn will do.

    Args:
        method: how it writes.
        material: what it is shown: a persona, a prompt, or examples.
    """
    name, manner = MANNERS[method.type]
    mark = unused_mark(*material)
    shown = "\n\n".join(f"<{name}-{mark}>\n{text}\n</{name}-{mark}>" for text in material)
    number = "one prompt" if method.prompts == 1 else f"{method.prompts} prompts that differ from each other"
    words = load_writing(method.type, method.task).words
    content = Template(FRAME).substitute(number=number, manner=manner, words=words, material=shown)
    return [{"role": "user", "content": content}]


def read_prompts(text: str, most: int, *, ended: bool = True) -> list[str] | str:
    """The prompts that a writer's words hold, or why none can be read.

    Args:
        text: all that it said.
        most: how many it was asked for.
        ended: whether it came to its end.
    """
    if not ended:
        return "the writer's words were cut off"
    marks = [found.group() for found in MARKS.finditer(text)]
    if not marks:
        return "no prompt stands between marks"
    if marks != [OPEN, CLOSE] * (len(marks) // 2):
        return "the marks do not stand in turn"
    if len(marks) // 2 > most:
        return "more prompts than were asked for"
    found = [part.strip() for part in MARKS.split(text)[1::2]]
    return found if all(found) else "a prompt is empty"
