"""Words with a letter wrong, read as the ones that were meant."""

from collections.abc import Collection, Sequence
from functools import cached_property, lru_cache

SHORTEST, LONGEST = 4, 40
"""Letters of a word that may be meant by another: shorter ones differ in one letter by themselves, and longer ones are none."""
REMEMBERED = 1 << 14
"""Words of which is known what is left of them without a letter: rows have the same ones again and again."""


def mended(lines: Sequence[bytes], words: Collection[bytes]) -> list[bytes]:
    """Lines of tokens in which words that are none of `words` stand for the one of them that they equal but for a letter: one that is left
    out, added, exchanged or moved. Where several are, the first that is found decides, always the same one."""
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
    """The words of lines, to ask quickly which others they may mean."""

    def __init__(self, lines: Sequence[bytes]) -> None:
        self._words = {token for line in lines for token in line.split()}

    @cached_property
    def _nearly(self) -> set[str]:
        return {form for token in self._words for form in _forms(token)}

    def perhaps(self, word: bytes) -> bool:
        """Whether a word stands there, or may after the lines are mended; no mended line has another."""
        return word in self._words or not self._nearly.isdisjoint(_forms(word))


@lru_cache(REMEMBERED)
def _forms(token: bytes) -> tuple[str, ...]:
    """A word, and what is left of it without one letter; nothing of what is no word, or so long or short that it cannot be meant by one."""
    word = token.decode()
    if not SHORTEST - 1 <= len(word) <= LONGEST + 1 or not word.isalpha():
        return ()
    return (word, *(word[:place] + word[place + 1 :] for place in range(len(word))))
