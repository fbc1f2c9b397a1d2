"""Copies of benchmark items that nobody is meant to see are found: real items, disguised by tables that the product does not have."""

import random
import re
from collections.abc import Callable
from functools import cache
from itertools import cycle

import pytest
from row_reading import load

from pedigree.configs.rows.overlap_criteria import Decontaminate
from pedigree.configs.rows.row_sources import Arithmetic, Constraints, Packaged
from pedigree.data.contamination.decontamination import Index
from pedigree.data.contamination.reading import readings
from pedigree.data.sources.examples import Example
from pedigree.data.sources.procedural import arithmetic, constraints
from pedigree.data.sources.sources import Outside

CYRILLIC = str.maketrans("aceopxyijsdhqwABCEHIJKMOPSTXY", "асеорхуіјѕԁһԛԝАВСЕНІЈКМОРЅТХҮ")
CYRILLIC_SMALL = str.maketrans("abcehkmoptxy", "авсенкмортху")
GREEK = str.maketrans("oviapnutxkABEHIKMNOPTXYZ", "ονιαρηυτχκΑΒΕΗΙΚΜΝΟΡΤΧΥΖ")
ARMENIAN_AND_CHEROKEE = str.maketrans("oughnqABCDEGHIJKLMPRSTVWYZ", "օսցհոգᎪᏴᏟᎠᎬᏀᎻᎥᎫᏦᏞᎷᏢᎡᏚᎢᏙᎳᎩᏃ")
FULL_WIDTH = {code: chr(code + 0xFEE0) for code in range(0x21, 0x7F)} | {0x20: "\u3000"}
BOLD = {ord("a") + place: chr(0x1D41A + place) for place in range(26)} | {ord("A") + place: chr(0x1D400 + place) for place in range(26)}
CIRCLED = {ord("a") + place: chr(0x24D0 + place) for place in range(26)} | {ord("A") + place: chr(0x24B6 + place) for place in range(26)}
ACCENTS = str.maketrans("aeiouycnszAEIOUYCNSZ", "äéîøůÿçñşžÅÉÎØÛÝĆÑŠŻ")
SMALL_CAPITALS = str.maketrans("abcdefghijklmnoprstuvwyz", "ᴀʙᴄᴅᴇꜰɢʜɪᴊᴋʟᴍɴᴏᴘʀꜱᴛᴜᴠᴡʏᴢ")
DIGITS = str.maketrans("0123456789", "٠١٢٣٤٥٦٧٨٩")


def sown(*characters: str) -> Callable[[str], str]:
    """One of the characters after each letter and digit."""

    def sow(text: str) -> str:
        given = cycle(characters)
        return "".join(char + next(given) if char.isalnum() else char for char in text)

    return sow


def zalgo(text: str) -> str:
    draw = random.Random(0)
    return "".join(
        char + "".join(chr(draw.randrange(0x300, 0x370)) for _ in range(draw.randrange(4))) if char.isalnum() else char for char in text
    )


DISGUISES: dict[str, Callable[[str], str]] = {
    "zero-width inside words": sown("\u200b", "\u200c", "\u200d", "\u2060", "\ufeff"),
    "zero-width for spaces": lambda text: text.replace(" ", "\u200b"),
    "soft hyphens": sown("\u00ad"),
    "variation selectors": sown("\ufe0f", "\U000e0101", "\u180b"),
    "bidi controls": lambda text: f"\u202d{sown(chr(0x2066), chr(0x2069), chr(0x200E))(text)}\u202c",
    "tag characters": sown("\U000e0061", "\U000e0020", "\U000e007f"),
    "fillers and joiners": sown("\u034f", "\u115f", "\u3164", "\u17b4"),
    "control characters": sown("\x08", "\x00", "\x7f", "\x9d"),
    "combining marks": zalgo,
    "marks that enclose": sown("\u20dd", "\u0336", "\u0489"[:0] or "\u035c"),
    "accents": lambda text: text.translate(ACCENTS),
    "Cyrillic": lambda text: text.translate(CYRILLIC),
    "Cyrillic capitals": lambda text: text.upper().translate(CYRILLIC),
    "Cyrillic small letters": lambda text: text.translate(CYRILLIC_SMALL),
    "Greek": lambda text: text.translate(GREEK),
    "Greek capitals": lambda text: text.upper().translate(GREEK),
    "Armenian and Cherokee": lambda text: text.translate(ARMENIAN_AND_CHEROKEE),
    "full width": lambda text: text.translate(FULL_WIDTH),
    "mathematical letters": lambda text: text.translate(BOLD),
    "circled letters": lambda text: text.translate(CIRCLED),
    "small capitals": lambda text: text.translate(SMALL_CAPITALS),
    "Arabic digits": lambda text: text.translate(DIGITS),
    "other spaces": lambda text: text.replace(" ", "\u00a0\u2003"),
    "numbers in bold": lambda text: re.sub(r"\d+", r"**\g<0>**", text),
    "numbers in italics": lambda text: re.sub(r"\d+", r"*\g<0>*", text),
    "numbers in code": lambda text: re.sub(r"\d+", r"`\g<0>`", text),
    "words and numbers in italics": lambda text: re.sub(r"[A-Za-z0-9]+", r"_\g<0>_", text),
    "Markdown escaped": lambda text: re.sub(r"[*_`+>-]", r"\\\g<0>", text),
    "a quotation of short lines": lambda text: "> " + re.sub(r"((?:\S+\s+){2}\S+)\s+", r"\1\n> ", text),
    "all at once": lambda text: zalgo(sown("\u200b")(text.upper().translate(CYRILLIC))),
}
ITEMS = 30


def prompts(examples: list[Example]) -> list[str]:
    return [example.messages[0]["content"] for example in examples]


@cache
def suite() -> list[dict]:
    """Ten items each of IFEval, of sums and of constraints."""
    ifeval = [row["messages"][0]["content"] for row in load(Packaged(type="packaged", asset="ifeval"), "prompt", None, Outside()).rows]
    sums = prompts(arithmetic(Arithmetic(type="arithmetic", operations=("add", "subtract"), digits=(1, 2), count=10, seed=9001)))
    wishes = prompts(constraints(Constraints(type="constraints", checks=("lowercase", "word_count"), count=10, seed=9002)))
    texts = [*random.Random(7).sample(ifeval, 10), *sums, *wishes]
    return [{"id": f"q{number}", "messages": [{"role": "user", "content": text}]} for number, text in enumerate(texts)]


def said(text: str) -> dict:
    return {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "Yes."}]}


PLACES: dict[str, Callable[[str], dict]] = {
    "user": said,
    "second user turn": lambda text: {"messages": [*said("Hello.")["messages"], {"role": "user", "content": text}]},
    "assistant": lambda text: {"messages": [{"role": "user", "content": "Go on."}, {"role": "assistant", "content": f"Sure. {text}"}]},
    "system": lambda text: {"messages": [{"role": "system", "content": text}, *said("Go on.")["messages"]]},
    "chosen answer": lambda text: said("Go on.") | {"answers": [{"text": text, "score": None}, {"text": "No.", "score": None}]},
    "rejected answer": lambda text: said("Go on.") | {"answers": [{"text": "No.", "score": None}, {"text": text, "score": None}]},
}


def found(rows: list[dict], config: Decontaminate | None = None) -> int:
    """How many of the items are found, each in the row made of it."""
    config = config or Decontaminate()
    index = Index({"suite": suite()}, config.ngram, config.turns)
    overlaps = index.overlaps(rows, config.threshold)
    return sum(item["id"] in {one.item["id"] for one in each} for item, each in zip(suite(), overlaps, strict=True))


def texts() -> list[str]:
    return [item["messages"][0]["content"] for item in suite()]


@pytest.mark.parametrize("disguise", DISGUISES)
def test_a_disguised_copy_is_found(disguise):
    disguised = [DISGUISES[disguise](text) for text in texts()]
    assert any(one != text for one, text in zip(disguised, texts(), strict=True)), "the case is void"
    assert found([said(f"My brother asked me this: {text} Do you know?") for text in disguised]) == ITEMS


@pytest.mark.parametrize("place", PLACES)
def test_a_copy_is_found_whoever_says_it(place):
    assert found([PLACES[place](text) for text in texts()]) == ITEMS


@pytest.mark.parametrize("turns", [("user",), ("system", "user", "assistant")])
@pytest.mark.parametrize("threshold", [1e-9, 0.9])
@pytest.mark.parametrize("ngram", [2, 8, 13])
def test_under_every_setting_that_is_accepted_whole_copies_are_found(ngram, threshold, turns):
    config = Decontaminate(ngram=ngram, threshold=threshold, turns=turns)
    for place in ("user", "assistant", "system"):
        if place in turns:
            around = [PLACES[place](f"As my aunt says: «{text}» and so on; 7 + 8 and the rest of it.") for text in texts()]
            assert found(around, config) == ITEMS


def test_what_is_written_in_another_script_stays_itself():
    """Greek capitals look like other Latin letters than the small ones do: each reading by itself minds no case."""
    (written, *_), (capitals, *_) = readings(["Νηφάλιος υπνος"]), readings(["ΝΗΦΆΛΙΟΣ ΥΠΝΟΣ"])
    assert written == capitals
    assert readings(["кот и пёс"])[0] == readings(["КОТ И ПЕС"])[0] != readings(["ток и пес"])[0]


@pytest.mark.parametrize("text", ["plain words, 17 + 25", "it’s a “café”", "naïve – but fine…"])
def test_ordinary_text_is_read_once_or_as_one_thing(text):
    assert len(readings([text])) == 1
