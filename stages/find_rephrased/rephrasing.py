"""Whether a training row sets the task of a benchmark item, by a language model: the question that is put, and what its words come to.

A verdict is read from one line only, and a text in which that line cannot be told for certain has none: nothing is taken from words that
the judge may have quoted.
"""

import re
from string import Template

from configs.judging.rephrasing import FRAME, SAME
from data.records.records import Message
from stages.core.rating import unused_mark
from stages.core.stated import stated_line

STATED = re.compile(rf"{SAME}\s*[:=]", re.IGNORECASE)
EXACT = re.compile(f"{SAME}: *(yes|no)")


def same_task_question(turn: str, item: str) -> list[Message]:
    """What the judge is asked about a turn of a row and the question of an item: one user's turn, so that templates without a system turn
    will do."""
    content = Template(FRAME).substitute(mark=unused_mark(turn, item), first=turn, second=item)
    return [{"role": "user", "content": content}]


def parse_same(text: str, *, ended: bool = True) -> bool | str:
    """Whether the judge says that both set the same task, or why its words say neither: the last line must be `Same: yes` or `Same: no`,
    and the only one that begins so."""
    found = stated_line(text, "verdict", STATED, EXACT, ended=ended, otherwise="is neither yes nor no")
    return found if isinstance(found, str) else found[1] == "yes"
