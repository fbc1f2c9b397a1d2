"""Words with a letter wrong, read as the ones that were meant."""

from collections.abc import Collection, Iterator, Sequence

SHORTEST, LONGEST = 4, 40
"""Letters of a word that may be meant by another: shorter ones differ in one letter by themselves, and longer ones are none."""


def mended(lines: Sequence[bytes], words: Collection[bytes]) -> list[bytes]:
    """Lines of tokens in which words that are none of `words` stand for the one of them that they equal but for a letter: one that is left
    out, added, exchanged or moved. Where several are, the first that is found decides, always the same one."""
    meant: dict[str, str] = {}
    for word in sorted(one.decode() for one in words):
        if SHORTEST <= len(word) <= LONGEST and word.isalpha():
            for less in _less(word):
                meant.setdefault(less, word)
    others = {token for line in lines for token in line.split()}.difference(words)
    changed = {token: other for token in others if (other := _meant(token, meant)) != token}
    return [b" ".join(changed.get(token, token) for token in line.split()) for line in lines] if changed else list(lines)


def _meant(token: bytes, meant: dict[str, str]) -> bytes:
    word = token.decode()
    if not SHORTEST - 1 <= len(word) <= LONGEST + 1 or not word.isalpha():
        return token
    return next((meant[less].encode() for less in _less(word) if less in meant), token)


def _less(word: str) -> Iterator[str]:
    """The word, and what is left of it without one letter."""
    yield word
    for place in range(len(word)):
        yield word[:place] + word[place + 1 :]
