import random

import pytest

from data.screening import Screen

WORDS = [b"a", b"b", b"ab", b"a-very-long-word-of-one-kind", b"a-very-long-word-of-my-kind", "wörter".encode(), b"12345678", b"123456789"]


def holds(line: bytes, gram: tuple[bytes, ...]) -> bool:
    return b" %b " % b" ".join(gram) in b" %b " % b" ".join(line.split())


@pytest.mark.parametrize("seed", range(20))
def test_it_lets_through_what_holds_a_sequence_and_next_to_nothing_else(seed):
    draw = random.Random(seed)

    def text(shortest: int, longest: int) -> tuple[bytes, ...]:
        return tuple(draw.choice(WORDS) for _ in range(draw.randint(shortest, longest)))

    grams = [text(1 + seed % 3, 13) for _ in range(draw.randint(1, 6))]
    groups = [[b"  ".join(text(0, 20)) for _ in range(draw.randint(0, 4))] for _ in range(100)]
    held, begun = ([any(holds(line, gram[:most]) for line in group for gram in grams) for group in groups] for most in (13, 4))
    passed = Screen(grams).passes(groups)
    assert not any(there and not let for there, let in zip(held, passed, strict=True))
    assert sum(passed) <= sum(begun) + 1


def test_a_sequence_does_not_run_from_one_text_into_the_next(monkeypatch):
    screen = Screen([(b"a", b"b")])
    assert screen.passes([[b"x a"], [b"b x"], [b"a b"], [], [b""], [b"a", b"b"]]) == [False, False, True, False, False, False]
    monkeypatch.setattr("data.screening.BATCH_BYTES", 1)
    assert screen.passes([[b"x a"], [b"b a b"], [b"a"], []]) == [False, True, False, False]


def test_of_no_sequences_nothing_passes():
    assert Screen([]).passes([[b"a b c"], [b""]]) == [False, False]


def test_an_empty_sequence_is_in_every_text():
    assert Screen([(), (b"a", b"b")]).passes([[b"c"], []]) == [True, True]
