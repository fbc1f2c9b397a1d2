"""Judge whether a training row rephrases a benchmark item: build the question for a language model, and parse the reply.

A verdict is parsed from a single line, and an ambiguous reply has none: verdicts are never taken from text that the judge may have quoted.
"""

import re
from string import Template

from pedigree.configs.judging.rephrased import FRAME, SAME
from pedigree.data.records.records import Message
from pedigree.stages.core.rating import stated_line, unused_mark

STATED = re.compile(rf"{SAME}\s*[:=]", re.IGNORECASE)
EXACT = re.compile(f"{SAME}: *(yes|no)")


def same_task_question(turn: str, item: str) -> list[Message]:
    """The judge's question about a row's turn and an item's question: a single user turn, to support templates without a system turn."""
    content = Template(FRAME).substitute(mark=unused_mark(turn, item), first=turn, second=item)
    return [{"role": "user", "content": content}]


def parse_same(text: str, *, ended: bool = True) -> bool | str:
    """Parse whether both are the same task, or return why there is no verdict: the last line must be `Same: yes` or `Same: no`, and the
    only one that begins with that label."""
    found = stated_line(text, "verdict", STATED, EXACT, ended=ended, otherwise="is neither yes nor no")
    return found if isinstance(found, str) else found[1] == "yes"
