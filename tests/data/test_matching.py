"""The compiled search changes no verdict: what it leaves is compared word by word, and it leaves too much rather than too little."""

import random
import unicodedata

import numpy as np
import pytest
from sweeps import nightly_after

from pedigree.configs.base.problems import PedigreeError
from pedigree.data.contamination import candidates, decontamination, matching
from pedigree.data.contamination.coverage import Coverage, searched
from pedigree.data.contamination.decontamination import Index
from pedigree.data.records.messages import ROLES

ALPHABETS = {
    "latin": "abcXYZ",
    "digits and operators": "0123 +-*/^%=<>(",
    "punctuation": " .,;:!?'\"()[]$\\{}_",
    "Markdown": "*_`>-+\\) \n12(a×",
    "accents": "éÉüñøßﬁİı",
    "cyrillic": "абвАВСеорху",
    "greek": "αβγΑΒΝονρ",
    "cjk": "我喜欢ひらがなカタカナ",
    "korean, put together and in parts": "한국어" + unicodedata.normalize("NFD", "한국어"),
    "half-width kana with marks": "ｶﾞﾊﾟか\u3099",
    "invisible": "\u200b\u200d\u00ad\ufeff\u2060\ufe0f\u3164\U000e0061",
    "marks": "\u0301\u0308\u20dd\u0489",
    "other operators": "−×÷·⁄➕",
    "white space and controls": "\t\n\r\x0b\x0c\x1c\x1f\x00\x08\x7f\x85\xa0\u3000\u2028",
    "beyond the basic plane": "𝐚𝐁𝟗😀𐊠𑣊",
    "arabic": "٠١٢ﷺ عربي",
    "no characters": "\ud800\udfff",
    "long words": "abcdefgh",
}


class Texts:
    """Draws texts and items that often share words."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        names = self.draw.sample(sorted(ALPHABETS), 4)
        self.letters = "".join(ALPHABETS[name] for name in names) + " ab"
        self.words = [self.word() for _ in range(6)]

    def word(self) -> str:
        return "".join(self.draw.choice(self.letters) for _ in range(self.draw.choice([1, 1, 2, 3, 8, 9, 17])))

    def text(self, longest: int) -> str:
        words = (self.draw.choice(self.words) if self.draw.random() < 0.9 else self.word() for _ in range(self.draw.randint(0, longest)))
        return "".join(word + self.draw.choice([" ", " ", "  ", "\n", ", ", "-", ""]) for word in words)

    def items(self) -> list[dict]:
        items = []
        for number in range(self.draw.randint(1, 12)):
            turns = [self.text(12) for _ in range(self.draw.randint(1, 3))]
            turns[0] += "x"
            items.append({"id": f"q{number}", "messages": [{"role": "user", "content": text} for text in turns]})
        return items

    def row(self) -> dict:
        return {"messages": [{"role": self.draw.choice(ROLES), "content": self.text(14)} for _ in range(self.draw.randint(1, 2))]}


def both(items: list[dict], rows: list[dict], ngram: int, threshold: float) -> tuple[list, list]:
    """What the compiled search and then the exact comparison find, and what the exact one finds alone."""
    index = Index({"suite": items}, ngram)
    index.compile()
    alone = Coverage({"suite": items}, ngram)
    return index.overlaps(rows, threshold), [alone.overlaps(searched(row, frozenset(ROLES)), threshold) for row in rows]


@pytest.mark.parametrize("seed", nightly_after(24, range(120)))
def test_the_same_is_found_in_every_script(seed):
    texts = Texts(seed)
    items, rows = texts.items(), [texts.row() for _ in range(40)]
    ours, exact = both(items, rows, texts.draw.choice([2, 3, 5, 8, 13]), texts.draw.choice([1e-9, 0.3, 0.5, 0.8]))
    assert ours == exact


def test_the_cases_are_not_void():
    found = []
    for texts in map(Texts, range(24)):
        _, exact = both(texts.items(), [texts.row() for _ in range(20)], 8, 0.5)
        found += map(bool, exact)
    assert 0.1 < np.mean(found) < 0.9


def test_next_to_nothing_is_compared_in_vain():
    texts = Texts(0)
    texts.letters = "abcdefghijklmnop"
    texts.words = [texts.word() for _ in range(400)]
    search = candidates.Candidates({"suite": [texts.row() | {"id": "q", "question": texts.text(60) + "x"} for _ in range(200)]}, 3)
    rows = [[texts.text(300)] for _ in range(500)]
    assert not search.of(rows, 0.5)
    assert search.of([*rows, [f"see: {search.items[7][1]['question']}!"]], 0.5).keys() == {500}


@pytest.mark.parametrize("plane", [0, 1, 2, 14])
@pytest.mark.parametrize("step", nightly_after(1, [211, 11]))
def test_every_character_alone_is_read_as_the_exact_comparison_reads_it(plane, step):
    """Between words, which it may join or part; other ones in small letters than in capitals. Those of Latin are all among them."""
    codes = {*range(plane << 16, plane + 1 << 16, step), *(range(0x250) if plane == 0 else ())}
    codes = sorted(code for code in codes if not 0xD800 <= code < 0xE000)
    texts = [f"one t{chr(code)}wo 3{chr(code)}4 -{chr(code)}(five{code % 19}" for code in codes]
    items = [{"id": str(code), "question": text} for code, text in zip(codes, texts, strict=True)]
    rows = [{"messages": [{"role": "user", "content": text}]} for one in texts for text in (one, one.upper())]
    for start in range(0, len(items), 500):
        ours, exact = both(items[start : start + 500], rows[2 * start : 2 * start + 1000], 3, 0.75)
        assert ours == exact


def test_what_has_a_hash_in_common_by_chance_is_no_overlap(monkeypatch):
    """With a search that finds every n-gram everywhere verdicts stay what they are."""
    texts = Texts(5)
    items, rows = texts.items(), [texts.row() for _ in range(20)]

    def everything(given, table, abstracted):
        count = int((table.numbers >= 0).sum())
        return np.array([(text, number) for text in range(len(given)) for number in range(count)], np.int32).T

    monkeypatch.setattr(candidates, "search", everything)
    ours, exact = both(items, rows, 3, 0.5)
    assert ours == exact and any(exact) and not all(exact)


def test_texts_longer_than_any_buffer_are_searched_whole():
    words = [f"w{number}" for number in range(30)]
    noise = "other words " * 1000
    items = [{"id": "q", "question": " ".join(words)}]
    for place in range(0, 200, 13):
        text = noise[: -place or None] + " " + " ".join(words) + " " + noise
        (ours,), (exact,) = both(items, [{"messages": [{"role": "user", "content": text}]}], 8, 0.5)
        assert ours == exact and [one.score for one in ours] == [1.0]


def test_more_is_found_than_there_was_room_for(monkeypatch):
    monkeypatch.setattr(matching, "HITS", 1)
    monkeypatch.setattr(matching, "STRANGE", 1)
    monkeypatch.setattr(matching, "CHARACTERS", matching.Characters())
    for seed in range(8):
        texts = Texts(seed)
        ours, exact = both(texts.items(), [texts.row() for _ in range(10)], 2, 0.3)
        assert ours == exact


def test_characters_that_are_read_as_many_fit():
    item = {"id": "q", "question": "ﷺ " * 40}
    (ours,), (exact,) = both([item], [{"messages": [{"role": "user", "content": "ﷺ " * 3000}]}], 8, 0.5)
    assert ours == exact and [one.score for one in ours] == [1.0]


@pytest.mark.parametrize("marks", ["*", "*_", ">", "> ", "- ", "-\n> ", ">\n", "* 5 "])
def test_endless_marks_are_read_in_linear_time(marks):
    """If each were compared with all others, this would take minutes."""
    text = marks * 100_000 + "\none two 3"
    (ours,), (exact,) = both([{"id": "q", "question": "one two 3"}], [{"messages": [{"role": "user", "content": text}]}], 8, 0.5)
    assert ours == exact and [one.score for one in ours] == [1.0]


def test_an_item_without_any_word_is_refused_by_the_compiled_index_too():
    with pytest.raises(PedigreeError, match="item q of suite has no word"):
        candidates.Candidates({"suite": [{"id": "q", "question": "?!"}]}, 8)


def test_machine_code_is_loaded_from_some_size_on_only(monkeypatch):
    index = Index({"suite": [{"id": "q", "question": "a b c"}]}, 8)
    rows = [{"messages": [{"role": "user", "content": "x" * 100}]}] * 10
    made = []
    monkeypatch.setattr(decontamination, "LITTLE", 2500)
    monkeypatch.setattr(Index, "compile", lambda self, really=Index.compile: (made.append(self), really(self)))
    index.overlaps(rows, 0.5)
    index.overlaps(rows, 0.5)
    assert not made
    index.overlaps(rows, 0.5)
    assert made == [index]
