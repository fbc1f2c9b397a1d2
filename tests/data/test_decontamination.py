import random

import pytest

from pedigree.configs.base.problems import PedigreeError
from pedigree.data.contamination.coverage import Overlap
from pedigree.data.contamination.decontamination import Index
from pedigree.data.contamination.reading import readings


def tokens(text: str) -> list[str]:
    return readings([text])[0][0].decode().split()


def row(*turns: str, name: str = "r") -> dict:
    roles = ("user", "assistant")
    return {"id": name, "messages": [{"role": roles[place % 2], "content": text} for place, text in enumerate(turns)]}


def overlaps(index: Index, row: dict, threshold: float) -> list[Overlap]:
    (found,) = index.overlaps([row], threshold)
    return found


def scores(items: dict[str, str], text: str, ngram: int = 8, threshold: float = 0.5) -> dict[str, float]:
    index = Index({"suite": [row(question, name=name) for name, question in items.items()]}, ngram)
    return {overlap.item["id"]: overlap.score for overlap in overlaps(index, row(text), threshold)}


SAME = [
    ("What is 17 + 25?", "WHAT  IS\n17\t+ 25"),
    ("What is 17 - 25?", "what is 17 − 25"),
    ("17 × 4", "17 * 4"),
    ("Straße ﬁn", "STRASSE fin"),
    ("a well-known fact", "a well known fact"),
    ("don’t", "don't"),
    ("48 apples and 1/2 pear", "**48** apples and **1**/**2** pear"),
    ("What is 17 * 25?", "What is *17* * *25*?"),
    ("17 - 25", "_17_ - `25`"),
    ("total: 48", "**Total:** 48"),
    ("17 * 25", "17 \\* 25"),
    ("17 × 25", "17 *\n25"),
    ("17 × 25", "17 ×25"),
    ("2 cups, 3 eggs or 4", "- 2 cups\n- 3 eggs\n  or\n+ 4"),
    ("2 cups, 3 eggs", "* 2 cups\r\n* 3 eggs"),
    ("2 cups, 3 eggs", "> > 2 cups\n>3 eggs"),
    ("What is 17 - 25?", "> What is 17\n> - 25?"),
    ("What is 17 - 25?", "> What is 17 -\n> 25?"),
    ("The ____ is 5", "The ________ is 5"),
    ("The ____ is 5", "The ... is 5"),
    ("What is the capital of France?", "_What is the capital of France?_"),
    ("def is_even(n)", "def is\\_even(n)"),
]
OTHER = [
    ("2 * 3", "2 3"),
    ("2*3", "2**3"),
    ("x > 5", "x < 5"),
    ("17 + 25", "17 - 25"),
    ("17 + 25", "1 7 + 25"),
    ("-4 + 3", "4 + 3"),
    ("2 * (3 + 4)", "2 + (3 + 4)"),
    ("我喜欢", "我欢喜"),
    ("it is\n-4", "it is\n4"),
]


@pytest.mark.parametrize(("one", "other"), SAME)
def test_layout_case_and_form_make_no_difference(one, other):
    assert tokens(one) == tokens(other)


@pytest.mark.parametrize(("one", "other"), OTHER)
def test_operators_numbers_and_order_do(one, other):
    assert tokens(one) != tokens(other)


QUESTION = "one two three four five six seven eight nine ten eleven twelve"


def test_the_threshold_is_exceeded_not_reached():
    item = " ".join(f"w{place}" for place in range(16))
    half, more = (" ".join(f"w{place}" for place in range(length)) for length in (8, 9))
    assert scores({"q": item}, half) == {}  # 8 of 16
    assert scores({"q": item}, more) == {"q": 9 / 16}


def test_a_short_item_matches_as_one_unbroken_sequence():
    item = {"q": "What is 17 + 25?"}
    assert scores(item, "Tell me: what is 17 + 25, please?") == {"q": 1.0}
    assert scores(item, "What is 17 + 250?") == {}
    assert scores(item, "What is, well, 17 + 25?") == {}
    assert scores(item, "What is 17 - 25?") == {}


def test_every_place_of_a_repeated_ngram_counts():
    """With one place per n-gram, a b a b a b would be covered by a third only."""
    assert scores({"q": "a b a b a b c d"}, "a b", ngram=2) == {"q": 6 / 8}


def test_of_an_item_and_where_it_is_wanted_of_a_row_only_what_users_say_counts():
    index = Index({"suite": [row("what is this", QUESTION, name="q")]}, 8, ["user"])
    assert overlaps(index, row(QUESTION), 0.1) == []
    assert overlaps(index, row("hello", "what is this", "bye"), 0.1) == []
    assert [one.score for one in overlaps(index, row("hello", "yes", "what is this"), 0.1)] == [1.0]


def test_hints_are_searched_as_what_the_user_says():
    hinted = row("hello") | {"verifier": {"name": "gsm", "answer": "4", "hints": ["Think.", QUESTION]}}
    found = [overlaps(Index({"suite": [row(QUESTION, name="q")]}, 8, [turns]), hinted, 0.1) for turns in ("user", "assistant")]
    assert [len(own) for own in found] == [1, 0]


def test_ngrams_do_not_run_across_turns():
    index = Index({"suite": [row("a b", "-", "c d", name="q")]}, 4)
    assert [one.score for one in overlaps(index, row("a b c d"), 0.1)] == [1.0]  # both short turns stand in it
    assert overlaps(index, row("b c"), 0.1) == []


def test_an_item_without_any_word_is_refused():
    with pytest.raises(PedigreeError, match="no word"):
        Index({"suite": [row("?!", name="q")]}, 8)


def test_the_matched_text_shows_where_the_item_differs():
    index = Index({"suite": [row("a b c d e f", name="q")]}, 2)
    (overlap,) = overlaps(index, row("x b c y e f"), 0.1)
    assert (overlap.matched, overlap.score) == ("… b c … e f", 4 / 6)


def brute_force(item: str, text: str, ngram: int) -> float:
    """The definition, word by word: text of single letters needs no tokeniser."""
    question, other = item.split(), text.split()
    length = min(ngram, len(question))
    covered = set()
    for start in range(len(question) - length + 1):
        for place in range(len(other) - length + 1):
            if question[start : start + length] == other[place : place + length]:
                covered |= set(range(start, start + length))
    return len(covered) / len(question)


@pytest.mark.parametrize("seed", range(20))
def test_scores_are_those_of_the_definition(seed):
    draw = random.Random(seed)

    def text(longest: int) -> str:
        return " ".join(draw.choice("abc") for _ in range(draw.randint(1, longest)))

    items = {f"q{number}": text(12) for number in range(8)}
    for _ in range(10):
        other = text(40)
        expected = {name: brute_force(item, other, 4) for name, item in items.items()}
        assert scores(items, other, ngram=4, threshold=0.3) == {name: score for name, score in expected.items() if score > 0.3}
