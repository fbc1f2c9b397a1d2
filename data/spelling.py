"""Words with a letter wrong, read as the ones that were meant."""

from collections.abc import Collection, Iterator, Sequence

SHORTEST = 4
"""Letters of a word that may be meant by another: shorter ones differ in one letter by themselves."""


def mended(lines: Sequence[bytes], words: Collection[bytes]) -> list[bytes]:
    """Lines of tokens in which words that are none of `words` stand for the one of them that they equal but for a letter: one that is left
    out, added, exchanged or moved. Where several are, the first that is found decides, always the same one."""
    meant: dict[str, str] = {}
    for word in sorted(one.decode() for one in words):
        if len(word) >= SHORTEST and word.isalpha():
            for less in _less(word):
                meant.setdefault(less, word)
    known = frozenset(words)
    return [b" ".join(token if token in known else _meant(token, meant) for token in line.split()) for line in lines]


def _meant(token: bytes, meant: dict[str, str]) -> bytes:
    word = token.decode()
    if len(word) < SHORTEST - 1 or not word.isalpha():
        return token
    return next((meant[less].encode() for less in _less(word) if less in meant), token)


def _less(word: str) -> Iterator[str]:
    """The word, and what is left of it without one letter."""
    yield word
    for place in range(len(word)):
        yield word[:place] + word[place + 1 :]
