"""Correction of words with one wrong letter."""

from collections.abc import Collection, Sequence
from functools import cached_property, lru_cache

SHORTEST, LONGEST = 4, 40
"""Length range of words that others are corrected to: shorter words are too similar, and longer ones are not words."""
REMEMBERED = 1 << 14
"""Size of the cache of `_forms`, since rows repeat words."""


def corrected(lines: Sequence[bytes], words: Collection[bytes]) -> list[bytes]:
    """Lines of tokens in which unknown words are replaced by the one of `words` that differs by one letter: omitted, added, replaced or
    moved. If several match, the choice is deterministic."""
    meant: dict[str, str] = {}
    for token in sorted(words):
        forms = _forms(token)
        if forms and SHORTEST <= len(forms[0]) <= LONGEST:
            for less in forms:
                meant.setdefault(less, forms[0])
    known = meant.keys()
    others = {token for line in lines for token in line.split()}.difference(words)
    near = [token for token in others if not known.isdisjoint(_forms(token))]
    changed = {token: next(meant[less] for less in _forms(token) if less in meant).encode() for token in near}
    return [b" ".join(changed.get(token, token) for token in line.split()) for line in lines] if changed else list(lines)


class Vocabulary:
    """The words of lines, for fast tests of whether they may be corrected to another word."""

    def __init__(self, lines: Sequence[bytes]) -> None:
        self._words = {token for line in lines for token in line.split()}

    @cached_property
    def _nearly(self) -> set[str]:
        return {form for token in self._words for form in _forms(token)}

    def perhaps(self, word: bytes) -> bool:
        """Whether a word occurs, or may occur in the corrected lines; has no false negatives."""
        return word in self._words or not self._nearly.isdisjoint(_forms(word))


@lru_cache(REMEMBERED)
def _forms(token: bytes) -> tuple[str, ...]:
    """A word and its variants with one letter removed; empty if it is not a word of suitable length."""
    word = token.decode()
    if not SHORTEST - 1 <= len(word) <= LONGEST + 1 or not word.isalpha():
        return ()
    return (word, *(word[:place] + word[place + 1 :] for place in range(len(word))))
