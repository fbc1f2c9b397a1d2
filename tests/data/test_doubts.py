"""Copies with other people, other numbers and typos are found; what is said by chance is none."""

import random
import re

import pytest
from sweeps import nightly_after
from test_matching import Texts

from pedigree.configs.rows.overlap_criteria import Abstracted, Decontaminate, ShortItems
from pedigree.data.contamination.coverage import Coverage, searched
from pedigree.data.contamination.decontamination import Comparison, Index
from pedigree.data.contamination.reading import readings
from pedigree.data.contamination.spelling import corrected
from pedigree.data.records.messages import ROLES

PROBLEM = (
    "Mrs. Smith from Ohio has 12 red marbles and gives 3/4 of them to her nephew Tom, who loses 2 every day. "
    "After 1,000 games, how many marbles are left for Tom and his sister?"
)
OTHER = (
    "Ms. Ødegård from Berlin has 98 red marbles and gives 1/2 of them to her nephew Иван, who loses 31 every day. "
    "After 50 games, how many marbles are left for Иван and his sister?"
)


def row(text: str, source: str = "web") -> dict:
    return {"id": "r", "source": source, "messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "Yes."}]}


def item(text: str, name: str = "q") -> dict:
    return {"id": name, "question": text}


def found(config: Decontaminate, items: list[str], text: str) -> dict[str, str]:
    """Item → doubt, of the overlaps of a row."""
    comparison = Comparison({"suite": [item(question, f"q{number}") for number, question in enumerate(items)]}, config)
    (overlaps,) = comparison.overlaps([row(text)])
    return {one.item["id"]: one.doubt for one in overlaps}


@pytest.mark.parametrize(
    ("words", "further", "unmended"),
    [
        (("from", "marbles and", "nephew", "loses", "every", "many", "left"), {"report": 0.3}, "below the threshold"),
        (("games", "marbles are"), {"common": 2}, "common words"),
    ],
)
def test_what_is_told_besides_and_what_is_common_keep_no_typo_from_being_mended(words, further, unmended):
    """`typos` found such copies without the other field, and not beside it."""
    alike = [PROBLEM, PROBLEM.replace("After 1,000 games, how many marbles are left", "When school is over, what has been saved")]
    text = PROBLEM
    for word in words:
        text = text.replace(word, word[:2] + word[3:])
    assert found(Decontaminate(ngram=4, threshold=0.7, **further), alike, text)["q0"] == unmended
    assert found(Decontaminate(ngram=4, threshold=0.7, typos=True, **further), alike, text)["q0"] == ""


def test_a_word_of_a_hundred_thousand_letters_is_read_at_once():
    assert corrected([b"acgt" * 25_000 + b" marbels"], [b"marbles", b"acgt" * 25_000]) == [b"acgt" * 25_000 + b" marbles"]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("Tom Lee's dog ate 2 bones", b"@ s dog ate # bones"),
        ("ate 1,027.50 - 3 of", b"ate # - # of"),
        ("the 2nd of 16GB", b"the # of #"),
        ("ÉMILE et ángel et Иван", b"@ et angel et @"),
        ("ate &#36;5 &amp; more", b"ate # more"),
        ("Twenty-five of ONE hundred Ones, seventeen or a thousandth", b"# of # @ # or a thousandth"),
    ],
)
def test_an_abstracted_text_says_that_there_are_names_and_numbers_and_not_which(text, line):
    assert readings([text], abstracted=True)[0] == [line]


@pytest.mark.parametrize("text", ["cost &#36;5&#44; &quot;now&quot;", "cost &dollar;5, &#x22;now&#x22;", 'cost $5, "now"'])
def test_references_of_html_are_read_as_what_they_stand_for(text):
    assert readings([text])[0][0].split() == b"cost 5 now".split()


@pytest.mark.parametrize("text", [r"\(\frac{1}{3}\) of it", r"$\dfrac13$ of it", r"\tfrac {1} 3 of it"])
def test_fractions_of_latex_are_read_as_what_they_stand_for(text):
    assert readings([text])[0][0].split() == b"1 / 3 of it".split()


def test_what_only_looks_like_a_reference_stays():
    assert readings(["AT&T; fish &chips &nosuchname; 5 &lt 6"])[0][0].split() == b"at t fish chips nosuchname 5 lt 6".split()


def test_a_copy_with_other_people_and_numbers_is_found_by_the_second_comparison_only():
    assert found(Decontaminate(), [PROBLEM], OTHER) == {}
    assert found(Decontaminate(abstracted=Abstracted()), [PROBLEM], OTHER) == {"q0": ""}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("numbers", [("twelve", "two", "One Thousand"), ("tWELVE", "twO", "OnE thoUSAnd")])
def test_a_copy_with_its_numbers_in_words_is_found_by_the_second_comparison(numbers, compiled):
    twelve, two, thousand = numbers
    text = PROBLEM.replace("12", twelve).replace("loses 2", f"loses {two}").replace("1,000", thousand)
    comparison = Comparison({"suite": [item(PROBLEM)]}, Decontaminate(ngram=4, threshold=0.9, abstracted=Abstracted()))
    if compiled:
        comparison.compile()
    ((overlap,),) = comparison.overlaps([row(text)])
    assert (overlap.way, overlap.score, overlap.doubt) == ("abstracted", 1.0, "")


@pytest.mark.parametrize(
    ("middle", "doubt"), [("Cy sold half as many as Dan. Dan sold", "said less often"), ("Cy sold 7 cakes more than Dan. Dan sold", "")]
)
def test_what_the_item_says_twice_the_row_must_say_twice(middle, doubt):
    """Without names and numbers one sentence of the row covers both of the item's: 15 of its 18 other words are said as often."""
    question = "Ada sold 9 cakes more than Bo. Bo sold 5 cakes more than Cy. Cy sold 14 cakes, so how many cakes did Ada sell at the fair?"
    text = f"Eve sold 3 cakes more than Cy. {middle} 28 cakes, so how many cakes did Eve sell at the fair?"
    assert found(Decontaminate(threshold=0.9, abstracted=Abstracted()), [question], text) == {"q0": doubt}


def test_a_letter_that_looks_like_another_makes_no_word_said_twice():
    """A row is read in several ways then, each of which says a word as often as it stands there."""
    question = "Ada sold 9 cakes more than Bo. Bo sold 5 cakes more than Cy. Cy sold 14 cakes, so how many cakes did Ada sell at the fair?"
    text = "Eve sold 3 cakes more than Cy. Cy sold half as many as Dan. Dan sold 28 cakes, so how many cakes did Eve sell at the fair?"
    config = Decontaminate(threshold=0.9, abstracted=Abstracted())
    assert found(config, [question], text) == found(config, [question], f"{text} \u0430") == {"q0": "said less often"}


def test_typos_and_other_people_together_hide_no_copy():
    """Some words with a letter wrong, which the row must say as often as the item, in a sentence that another one covers."""
    buys = "buys {} red {} at the {} every morning."
    question = f"Anna {buys.format(3, 'apples', 'market')} Ben {buys.format(5, 'apples', 'market')} How many apples do they have?"
    text = f"Carl {buys.format(8, 'apples', 'market')} Dora {buys.format(2, 'appels', 'markte')} How many apples do they have?"
    assert found(Decontaminate(ngram=4, threshold=0.9, typos=True, abstracted=Abstracted()), [question], text) == {"q0": ""}


def test_of_an_item_that_both_comparisons_find_the_first_is_told():
    comparison = Comparison({"suite": [item(PROBLEM)]}, Decontaminate(abstracted=Abstracted()))
    ((same,), (other,)) = comparison.overlaps([row(PROBLEM), row(OTHER)])
    assert (same.way, other.way) == ("words", "abstracted")
    assert same.matched.startswith("mrs smith from ohio") and other.matched.startswith("@ from @ has # red")


def test_sums_are_not_all_alike():
    """Without names and numbers next to nothing is left of them, so that they are compared by their words alone."""
    every = Decontaminate(abstracted=Abstracted())
    assert found(every, ["What is 17 + 25?"], "What is 3 + 4?") == {}
    assert found(every, ["What is 17 + 25?", PROBLEM], "What is 17 + 25?") == {"q0": ""}


@pytest.mark.parametrize("seed", nightly_after(8, range(40)))
@pytest.mark.parametrize("typos", [False, True])
def test_the_compiled_search_changes_no_verdict_of_abstracted_and_mended_texts_either(seed, typos):
    texts = Texts(seed)
    texts.words += texts.draw.sample(["7", "seven", "Seven", "HUNDRED", "sEven", "sevens", "seVENs"], 3)
    items, rows = texts.items(), [texts.row() for _ in range(30)]
    ngram, threshold = texts.draw.choice([2, 3, 5, 8]), texts.draw.choice([0.3, 0.5, 0.8])
    index = Index({"suite": items}, ngram, abstracted=True, typos=typos)
    index.compile()
    alone = Coverage({"suite": items}, ngram, abstracted=True)
    assert index.overlaps(rows, threshold) == [alone.overlaps(searched(one, frozenset(ROLES)), threshold, typos) for one in rows]


def abstracted(text: str) -> str:
    """The definition for ASCII without operators, by another way."""
    text = re.sub(r"\b(one|twelve|\d\w*)\b", "#", text, flags=re.IGNORECASE)
    return re.sub(r"([@#])( \1)+", r"\1", re.sub(r"\b[A-Z]\w*", "@", text))


@pytest.mark.parametrize("seed", nightly_after(3, range(10)))
def test_an_abstracted_text_is_that_of_the_definition(seed):
    draw = random.Random(seed)
    text = " ".join(draw.choice(["Ann", "B", "12", "3rd", "one", "Twelve", "x2", "iPhone", "a"]) for _ in range(3000))
    assert readings([text], abstracted=True)[0][0].decode() == abstracted(text)


WORDS = "several painters carried twelve heavy wooden ladders across another narrow garden while their younger brothers watched"


def test_words_with_a_letter_wrong_are_read_as_the_item_has_them():
    """Left out, added, exchanged and moved; 4 of 15 words, so that no 3-gram of the second half is left."""
    text = WORDS.replace("ladders", "laders").replace("narrow", "narroww").replace("while", "whale").replace("watched", "wacthed")
    index = {typos: Index({"suite": [item(WORDS)]}, 3, typos=typos) for typos in (False, True)}
    assert [[one.score for one in some] for some in index[True].overlaps([row(text)], 0.8)] == [[1.0]]
    assert index[False].overlaps([row(text)], 0.8) == [[]]


@pytest.mark.parametrize("seed", nightly_after(5, range(20)))
def test_what_is_not_mended_since_the_row_lacks_the_words_would_not_be_found_mended_either(seed, monkeypatch):
    draw = random.Random(seed)
    words = ["".join(draw.choices("abcd", k=draw.randint(3, 7))) for _ in range(40)]
    items = [item(" ".join(draw.choices(words, k=draw.randint(3, 12))), f"q{number}") for number in range(30)]

    def changed(word: str) -> str:
        return draw.choice([word, word, word.replace(draw.choice(word), "", 1), draw.choice(words)])

    rows = [[" ".join(map(changed, one["question"].split()))] for one in items]
    coverage = Coverage({"suite": items}, 2)
    found = {least: [coverage.overlaps(row, 0.6, typos=True, least=least) for row in rows] for least in (0.3, 0.6)}
    monkeypatch.setattr(Coverage, "_upper_bound", lambda *_: 1.0)
    assert found == {least: [coverage.overlaps(row, 0.6, typos=True, least=least) for row in rows] for least in (0.3, 0.6)}
    assert 0 < sum(map(len, found[0.6])) < sum(map(len, found[0.3]))


def test_what_the_item_says_too_short_words_and_numbers_are_not_mended():
    line = b"hat house mouse 1235 other"
    assert corrected([line], [b"cat", b"house", b"mouse", b"1234", b"others"]) == [b"hat house mouse 1235 others"]


SHORT = ShortItems(below=10, more=5)


@pytest.mark.parametrize(
    ("text", "doubt"),
    [
        ("Write a rude poem!", ""),
        ("Please: write a rude poem, will you now, dear?", ""),  # 5 more
        ("Please: write a rude poem, will you now, dear friend?", "short item"),  # 6 more
        ("She asked me to " + "think again and " * 20 + "write a rude poem.", "short item"),
    ],
)
def test_a_short_item_counts_where_a_turn_is_little_else(text, doubt):
    assert found(Decontaminate(), ["Write a rude poem."], text) == {"q0": ""}
    assert found(Decontaminate(short_items=SHORT), ["Write a rude poem."], text) == {"q0": doubt}
    assert found(Decontaminate(short_items=SHORT), [PROBLEM], f"{text} {PROBLEM}") == {"q0": ""}  # is none


STEM = "Which of the following statements about this is correct"


@pytest.mark.parametrize(("many", "doubt"), [(3, ""), (2, "common words")])
def test_words_that_many_items_begin_with_are_no_evidence(many, doubt):
    """The stem, which two items have, is 9 of 11 tokens of the first."""
    items = [f"{STEM}: tin melts?", f"{STEM}? A long tale of kings and queens of old {'and more ' * 9}", PROBLEM]
    assert found(Decontaminate(common=many), items, f"{STEM}?") == {"q0": doubt}
    assert found(Decontaminate(common=many), items, f"{STEM}: tin melts?") == {"q0": ""}


def test_an_item_that_many_items_say_whole_is_no_evidence_of_one():
    config = Decontaminate(common=3)
    assert set(found(config, [STEM] * 3, STEM).values()) == {"common words"}
    assert set(found(config, [STEM] * 2, STEM).values()) == {""}


def test_what_stays_is_told_from_the_share_on_that_is_asked_for():
    half = " ".join(PROBLEM.split()[:18])  # 19 of 36 tokens
    assert found(Decontaminate(threshold=0.8), [PROBLEM], half) == {}
    assert found(Decontaminate(threshold=0.8, report=0.5), [PROBLEM], half) == {"q0": "below the threshold"}
    with pytest.raises(ValueError, match=r"report 0\.6 is above threshold 0\.5"):
        Decontaminate(report=0.6)
