"""Texts that others wrote, as a terminal and a shell may have them. Nothing heavy is imported: every command needs it."""

import re
import shlex

UNSEEN = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")
"""What a terminal obeys instead of showing it: control characters, changes of direction, and halves of characters."""


def shown(text: str) -> str:
    """A text that others wrote as a terminal may have it: what would be obeyed stands there as `\\u001b`; line ends and tabs stay."""
    return UNSEEN.sub(lambda found: found[0] if found[0] in "\n\t" else f"\\u{ord(found[0]):04x}", text)


def command(*words: object) -> str:
    """What a person may type, in backquotes: `pedigree` with these words, quoted where a shell would read them otherwise."""
    return f"`{shlex.join(['pedigree', *map(str, words)])}`"
