"""The disguises of the decontamination benchmark are what they are called, and its counts are what a tool finds."""

import random
import re
import sys

import pytest

from benchmarks import decontamination
from benchmarks.decontamination import TWINS, Texts, drawn
from benchmarks.disguises import DISGUISES, LOOKALIKES, latex, planted, problems, prose, renamed, renumbered
from benchmarks.paraphrases import paraphrased
from benchmarks.twins import distance, twins
from pedigree.data.contamination.reading import readings

TEXT = "Noor has $1,250 and 3/4 of a cake. She gave Peter 20% of 7.50 dollars. How much has Noor left?"


def tokens(text: str) -> list[str]:
    return readings([text])[0][0].decode().split()


def draw() -> random.Random:
    return random.Random(0)


def test_names_and_nothing_else_are_exchanged():
    other = renamed(TEXT, draw())
    changed = [(one, two) for one, two in zip(TEXT.split(), other.split(), strict=True) if one != two]
    assert [one for one, _ in changed] == ["Noor", "Peter", "Noor"]
    assert changed[0][1] == changed[2][1] != changed[1][1]


def test_all_numbers_come_into_formulas():
    said = r"has \$\(1{,}250\) and \(\frac{3}{4}\) of a cake. She gave Peter \(20\)\% of \(7.50\) dollars"
    assert said in latex(TEXT, draw())


def test_other_numbers_leave_the_words():
    words = [token for token in tokens(TEXT) if token.isalpha()]
    other = tokens(renumbered(TEXT, draw()))
    assert [token for token in other if token.isalpha()] == words and other != tokens(TEXT)


def test_what_is_said_in_other_words_has_names_and_numbers_and_few_words_in_a_row():
    item = "On Monday, Noor bought 3 books for $12 each. If she sold half of them, how many books does Noor have?"
    said = "Noor purchased three volumes in return for $12 every single upon Monday. Suppose that she disposed of one half of them. "
    assert paraphrased(item, draw()) == said + "Please work out the count of volumes that Noor have."


def test_a_twin_has_other_people_and_numbers_and_one_other_word_in_ten():
    item = "Noor has 3 red books and buys 5 more each week from an old man. How many books has she got after 8 weeks?"  # 18 ordinary words
    renamed, reworded = item.replace("Noor", "Ugo").replace("8", "12"), item.replace("old", "odd")
    assert twins([item], [renamed, reworded, reworded.replace("weeks", "days"), "Bees hum.", ""]) == [True, True, False, False, False]
    assert distance("a b c d".split(), "b c x d e".split()) == 3


def test_clean_problems_that_are_an_item_otherwise_are_counted_apart(monkeypatch):
    monkeypatch.setattr(decontamination, "ITEMS", 30)
    monkeypatch.setattr(decontamination, "CLEAN", 30)
    every, texts = problems(30, 5), Texts(None)
    texts.problems = [*every, *(renumbered(one, draw()) for one in every)]
    items, cases = drawn(texts, 1)
    asked = [row["messages"][0]["content"] for kind, row in cases if kind == TWINS]
    numberless = {re.sub(r"\d+", "", one) for one in items}
    assert asked and all(re.sub(r"\d+", "", one) in numberless for one in asked)


@pytest.mark.parametrize("disguise", sorted(DISGUISES.keys() - {"verbatim"}))
def test_no_disguise_is_void(disguise):
    plain = DISGUISES["verbatim"](problems(1, 3)[0], draw())
    assert DISGUISES[disguise](problems(1, 3)[0], draw()) != plain


def test_made_texts_are_those_of_their_seed():
    assert problems(50, 1) == problems(50, 1) != problems(50, 2)
    assert prose(5, 1) == prose(5, 1) != prose(5, 2)
    assert planted(problems(50, 1), 3, 1) == planted(problems(50, 1), 3, 1)
    assert "а" in "banana".translate(LOOKALIKES)


def test_ours_is_asked_in_a_process_of_its_own_and_finds_the_copy_and_strict_the_one_with_other_numbers(tmp_path):
    item, other = problems(1, 1)[0], prose(1, 1)[0]
    rows = [{"messages": [{"role": "user", "content": text}]} for text in (other, item.upper(), other)]
    answer = decontamination.search("ours", sys.executable, [item], rows, tmp_path)
    assert answer["found"] == [1] and answer["seconds"] > 0 and answer["peak"] > 1 << 20
    rows.append({"messages": [{"role": "user", "content": re.sub(r"\d+", "77", item)}]})
    assert decontamination.search("ours, strict", sys.executable, [item], rows, tmp_path)["found"] == [1, 3]
