"""Turns that say a part of a benchmark item and little else are copies, in whatever part of it; longer ones that quote it are none."""

import pytest
from pydantic import ValidationError

from pedigree.configs.rows.overlap_criteria import CutShort, Decontaminate
from pedigree.data.contamination.coverage import Coverage
from pedigree.data.contamination.decontamination import Comparison

WORDS = [f"w{number}" for number in range(20)]
ITEM = " ".join(WORDS)


def row(*texts: str) -> dict:
    return {"messages": [{"role": "user", "content": text} for text in texts]}


def found(config: Decontaminate, *texts: str, items: tuple[str, ...] = (ITEM,), compiled: bool = False) -> list[tuple]:
    """(item, score, way, doubt) of each overlap of a row."""
    comparison = Comparison({"suite": [{"id": f"q{number}", "question": text} for number, text in enumerate(items)]}, config)
    if compiled:
        comparison.compile()
    (overlaps,) = comparison.overlaps([row(*texts)])
    return [(one.item["id"], one.score, one.way, one.doubt) for one in overlaps]


def strict(**fields) -> Decontaminate:
    return Decontaminate(ngram=4, threshold=0.9, cut_short=CutShort(of_item=0.5), **fields)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("part", [WORDS[:14], WORDS[6:], WORDS[3:17]])
def test_a_part_of_an_item_is_a_copy_where_it_is_all_that_a_turn_says(part, compiled):
    text = " ".join(part)
    assert found(Decontaminate(ngram=4, threshold=0.9), text) == []
    assert found(strict(), "Hello!", text, compiled=compiled) == [("q0", 0.7, "cut short", "")]


def test_it_is_none_in_a_turn_that_says_more_nor_where_it_is_a_small_part():
    part = " ".join(WORDS[:14])
    assert found(strict(), f"{part} and") == []  # 14 of 15 tokens: 0.93
    assert found(strict(), " ".join(WORDS[:10])) == []  # 0.5 of the item, and not more
    assert found(strict(), " ".join(WORDS[:7]), " ".join(WORDS[13:])) == []  # no turn by itself says more than 0.35


def test_a_whole_copy_is_found_as_before():
    assert found(strict(), f"See: {ITEM}") == [("q0", 1.0, "words", "")]


def test_what_is_told_besides_is_as_much_as_report_says():
    part = " ".join(WORDS[:14])
    assert found(strict(), f"{part} and so on") == []
    assert found(strict(report=0.65), f"{part} and so on") == [("q0", 0.7, "words", "below the threshold")]
    assert found(strict(report=0.75), f"{part} and so on") == []


def test_a_part_that_many_items_have_is_no_evidence():
    """Of both items the first 14 words are common, of which nothing is left."""
    other = " ".join([*WORDS[:14], *"abcdef"])
    told = found(strict(common=2), " ".join(WORDS[:14]), items=(ITEM, other))
    assert told == [("q0", 0.7, "cut short", "common words"), ("q1", 0.7, "cut short", "common words")]


@pytest.mark.parametrize(
    ("text", "share"),
    [
        ("", 0.0),
        ("w0 w1 w2 w3", 1.0),
        ("w0 w1 w2 x", 0.0),  # no n-gram of four
        ("x w0 w1 w2 w3 w4 y z w9 w10 w11 w12", 9 / 12),
        ("w\u200b0 w1 w2 w3", 1.0),  # read as w0
    ],
)
def test_the_share_of_a_turn_is_that_of_its_tokens_in_n_grams_of_the_item(text, share):
    assert Coverage({"suite": [{"id": "q", "question": ITEM}]}, 4).share_of(text) == pytest.approx(share)


def test_a_part_that_is_a_copy_anyway_is_refused():
    with pytest.raises(ValidationError, match=r"of_item 0\.5 is not below threshold 0\.5.*lower it"):
        Decontaminate(cut_short=CutShort(of_item=0.5))
    Decontaminate(cut_short=CutShort(of_item=0.4))


def test_how_much_of_an_item_is_enough_must_be_said_since_it_depends_on_the_threshold():
    """No value would do beside every threshold: 0.5, which was the default, was refused beside that of the stage."""
    with pytest.raises(ValidationError, match=r"(?s)of_item.*Field required"):
        Decontaminate.model_validate({"threshold": 0.9, "cut_short": {}})
