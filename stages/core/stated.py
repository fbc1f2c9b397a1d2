"""What the words of a language model that was asked to judge come to: one line that states it, or nothing."""

import re

EMPHASIS = str.maketrans("", "", "*`_#")
"""Characters that some models put around the line, and that say nothing."""


def stated_line(
    text: str, what: str, begins: re.Pattern[str], exact: re.Pattern[str], *, ended: bool, otherwise: str
) -> re.Match[str] | str:
    """The line that states something, or why there is none that can be told for certain.

    It must be the last one and the only one that begins so. With a second such line, be it the same, nobody can tell the judge's own from
    one that it quotes.

    Args:
        text: all that the judge said.
        what: it is, e.g. `rating`.
        begins: what such a line begins with.
        exact: the whole line.
        ended: whether the text came to its end.
        otherwise: what such a line is that is not exact, e.g. `is neither yes nor no`.
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
