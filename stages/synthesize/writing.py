"""Generate prompts with a language model: build the request, and parse the reply.

Prompts are parsed only from between their marks. A reply whose marks do not alternate has none: nothing is guessed.
"""

import re
from collections.abc import Sequence
from string import Template

from pedigree.configs.judging.synthesis import CLOSE, FRAME, MANNERS, OPEN, Persona, Rewrite, SelfInstruct, load_writing
from pedigree.data.records.records import Message
from pedigree.stages.core.rating import unused_mark

MARKS = re.compile(f"{re.escape(OPEN)}|{re.escape(CLOSE)}")


def writing_question(method: Persona | SelfInstruct | Rewrite, material: Sequence[str]) -> list[Message]:
    """The request to the writer: a single user turn, to support templates without a system turn."""
    name, manner = MANNERS[method.type]
    mark = unused_mark(*material)
    shown = "\n\n".join(f"<{name}-{mark}>\n{text}\n</{name}-{mark}>" for text in material)
    number = "one prompt" if method.prompts == 1 else f"{method.prompts} prompts that differ from each other"
    words = load_writing(method.type, method.task).words
    content = Template(FRAME).substitute(number=number, manner=manner, words=words, material=shown)
    return [{"role": "user", "content": content}]


def read_prompts(text: str, most: int, *, ended: bool = True) -> list[str] | str:
    """Parse the prompts of a writer's reply, or return why there are none."""
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
