"""Parse the line that states a judge's verdict."""

import re

EMPHASIS = str.maketrans("", "", "*`_#")
"""Markdown characters that some models put around the line."""


def stated_line(
    text: str, what: str, begins: re.Pattern[str], exact: re.Pattern[str], *, ended: bool, otherwise: str
) -> re.Match[str] | str:
    """Match the line that states a verdict, or return why there is no unambiguous one.

    It must be the last line and the only one that begins with `begins`: with a second one, even if equal, the judge may be quoting.

    Args:
        text: the judge's full reply.
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
