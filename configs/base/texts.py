"""Safe display of untrusted text in terminals and shells. Imports nothing heavy, because every command uses it."""

import re
import shlex

UNSEEN = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")
"""Characters that a terminal would interpret instead of display: control characters, direction changes, surrogates."""


def shown(text: str) -> str:
    """Escape untrusted text for a terminal: control characters become `\\u001b` and the like; newlines and tabs are kept."""
    return UNSEEN.sub(lambda found: found[0] if found[0] in "\n\t" else f"\\u{ord(found[0]):04x}", text)


def encodable(text: str) -> str:
    """A text with question marks for lone surrogates, which JSON can contain but UTF-8 files and tokenizers cannot."""
    return text.encode("utf-8", "replace").decode()


def command(*words: object) -> str:
    """A `pedigree` command line in backquotes, quoted for the shell."""
    return f"`{shlex.join(['pedigree', *map(str, words)])}`"
