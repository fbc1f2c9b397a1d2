"""Word problems, chat rows, and copies of the problems as people and programs disguise them; made by seed, of no data set."""

import random
import re
from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any

import numpy as np

from benchmarks.paraphrases import SMALL, TENS, paraphrased

NAMES = (
    "Ada Bruno Carla Dmitri Elena Farid Greta Hiro Ines Jonas Kira Lars Mina Noor Olga Pablo Quinn Rosa Samir Tara Ugo Vera Wanda Yusuf Zoe"
).split()
THINGS = "apples pencils stamps marbles tickets books candles shells buttons cards flowers coins stickers bottles bricks lamps".split()
PLACES = "the market,the school fair,a farm near the river,her uncle's shop,the harbour,the library,the old mill,the station".split(",")
PEOPLE = "neighbour teacher cousin grandmother coach baker driver gardener nurse carpenter painter fisherman".split()
SYLLABLES = "ba ce di fo gu ha je ki lo mu na pe ri so tu va we xi yo zu tra ste pli gro kna sha che phi".split()
FUNCTION_WORDS = (
    "the of and to a in is that it was for on are as with his they be at one have this from by not but what all were when we there can an "
    "your which their said if do will each about how up out them then she many some so these would other into has more"
).split()
SHORT = 0.35
"""Share of function words in a text, about that of English prose."""


def problems(count: int, seed: int) -> list[str]:
    """Word problems of three to five sentences, all different."""
    draw, found = random.Random(f"{seed}/problems"), {}
    while len(found) < count:
        name, other = draw.sample(NAMES, 2)
        thing, more = draw.sample(THINGS, 2)
        one, two, three = (draw.randint(2, 98) for _ in range(3))
        opening = draw.choice(
            [
                f"{name} bought {one} {thing} at {draw.choice(PLACES)} and {two} {more} the day after.",
                f"After a week at {draw.choice(PLACES)}, {name} has {one} boxes with {two} {thing} in each of them.",
                f"A {draw.choice(PEOPLE)} pays {name} ${one} an hour and ${two}.50 for every crate of {thing}.",
                f"{name} reads {one} pages on Monday, twice as many on Tuesday, and {two} on the way to {draw.choice(PLACES)}.",
                f"Of {one * 10} {thing} that the {draw.choice(PEOPLE)} had, {two}% were broken when {name} came.",
            ]
        )
        middles = [
            f"Then {other} gave away {three} of the {more} to a {draw.choice(PEOPLE)}.",
            f"{other} needs {three} {thing} for the party, but only 1/{draw.randint(2, 9)} of them can be used.",
            f"The {draw.choice(PEOPLE)} wants {three} cents less for each of the {more} than {other} did last year.",
            f"On the way home {other} lost {three} {thing}, found half of them again, and sold the rest for $1,{three + 100} in all.",
        ]
        closing = draw.choice(
            [
                f"How many {thing} do {name} and {other} have together?",
                f"How much money does {name} have left when the {draw.choice(PEOPLE)} has been paid?",
                f"If {name} goes on like this for {draw.randint(2, 30)} days, how many {more} will {other} need?",
            ]
        )
        found[" ".join([opening, *draw.sample(middles, draw.randint(1, 3)), closing])] = None
    return list(found)


def prose(count: int, seed: int, words: int = 220) -> list[str]:
    """Texts of about this many words, with rare and common ones as in a language: function words, and made-up ones by Zipf's law."""
    made = random.Random(f"{seed}/words")
    vocabulary = np.array(["".join(made.choices(SYLLABLES, k=made.choice((1, 2, 2, 3, 3, 4)))) for _ in range(30_000)], object)
    draw = np.random.default_rng(seed)
    found = []
    for length in draw.poisson(words, count):
        rare = vocabulary[np.minimum(draw.zipf(1.2, length) - 1, len(vocabulary) - 1) % len(vocabulary)]
        short = np.array(FUNCTION_WORDS, object)[draw.integers(0, len(FUNCTION_WORDS), length)]
        text = np.where(draw.random(length) < SHORT, short, rare)
        stops = np.flatnonzero(draw.random(length) < 0.08)
        text[stops] += np.where(draw.random(len(stops)) < 0.6, ".", ",").astype(object)
        found.append(" ".join(text).capitalize())
    return found


def shuffled(texts: Sequence[str], count: int, seed: int, length: int = 1300) -> list[str]:
    """Texts of about this many characters, each with the given sentences in another order."""
    sentences = [one for text in texts for one in re.split(r"(?<=[.?!:]) |\n+", text) if one]
    draw, found = random.Random(f"{seed}/shuffled"), []
    while len(found) < count:
        size, chosen = draw.expovariate(1 / length), []
        while size > 0:
            chosen.append(draw.choice(sentences))
            size -= len(chosen[-1]) + 1
        found.append(" ".join(chosen))
    return found


def chat(asked: str, answer: str, system: str = "") -> dict[str, Any]:
    turns = [("system", system), ("user", asked), ("assistant", answer)]
    return {"messages": [{"role": role, "content": text} for role, text in turns if text]}


LOOKALIKES = str.maketrans("aceopxyijsABCEHKMOPTX", "асеорхуіјѕАВСЕНКМОРТХ")
"""Latin → Cyrillic."""
ENTITIES = str.maketrans({"'": "&#39;", '"': "&quot;", "$": "&#36;", "%": "&#37;", ",": "&#44;"})


def renamed(text: str, draw: random.Random) -> str:
    """Replace all names of people: words with a capital inside a sentence, and the names in our list."""
    inside = re.findall(r"(?<=[a-z,] )[A-Z][a-z]+", text)
    names = dict.fromkeys([*inside, *(word for word in re.findall(r"\b[A-Z][a-z]+", text) if word in NAMES)])
    others = draw.sample(["Alistair", "Beatrix", "Cosimo", "Delphine", "Evander", "Fenella", "Gideon", "Hortense", "Ivor"], 9)
    for name, other in zip(names, cycle(others), strict=False):
        text = re.sub(rf"\b{name}\b", other, text)
    return text


def latex(text: str, draw: random.Random) -> str:
    """Write all numbers as formulas."""
    text = text.replace("$", r"\$").replace("%", r"\%")
    text = re.sub(r"\b(\d+)/(\d+)\b", r"\\(\\frac{\1}{\2}\\)", text)
    return re.sub(r"(?<![{\d.])\b\d[\d,]*(?:\.\d+)?\b(?!})", lambda one: rf"\({one[0].replace(',', '{,}')}\)", text)


def renumbered(text: str, draw: random.Random) -> str:
    return re.sub(r"\d+", lambda one: str(int(one[0]) + draw.randint(1, 9)), text)


def spelled(number: int) -> str:
    """A whole number below 10,000 in words."""
    if number <= 20:
        return SMALL[number]
    for size, name in ((1000, "thousand"), (100, "hundred")):
        if number >= size:
            return f"{spelled(number // size)} {name}" + (f" {spelled(number % size)}" if number % size else "")
    return TENS[number // 10 - 2] + (f"-{SMALL[number % 10]}" if number % 10 else "")


def in_words(text: str, draw: random.Random) -> str:
    """Write all whole numbers in words, except money and percentages."""
    return re.sub(r"(?<![\d.,$/%])\b\d{1,4}\b(?![.,]?\d|[/%])", lambda one: spelled(int(one[0])), text)


def typos(text: str, draw: random.Random) -> str:
    """Leave out a letter of one word in ten."""
    words = text.split(" ")
    for place in draw.sample(range(len(words)), max(1, len(words) // 10)):
        if len(words[place]) > 3:
            at = draw.randrange(1, len(words[place]) - 1)
            words[place] = words[place][:at] + words[place][at + 1 :]
    return " ".join(words)


def quoted(text: str, draw: random.Random) -> str:
    words, lines = text.split(), []
    while words:
        lines.append("> " + " ".join(words[:7]))
        words = words[7:]
    return "\n".join(lines)


def italic(text: str, draw: random.Random) -> str:
    """One word in five between underscores."""
    return re.sub(r"\b[A-Za-z]+\b", lambda one: f"_{one[0]}_" if draw.random() < 0.2 else one[0], text)


def backwards(text: str) -> str:
    return " ".join(reversed(re.split(r"(?<=[.?!]) ", text)))


def embedded(text: str, draw: random.Random) -> str:
    before, after = prose(2, draw.randrange(1 << 30), 300)
    return f"{before} {text} {after}"


Disguise = Callable[[str, random.Random], dict[str, Any]]
REPLY = "Let me think about this."


def _asked(change: Callable[[str, random.Random], str]) -> Disguise:
    return lambda text, draw: chat(change(text, draw), REPLY)


def _halves(text: str, draw: random.Random) -> dict[str, Any]:
    words = text.split(" ")
    first, second = " ".join(words[: len(words) // 2]), " ".join(words[len(words) // 2 :])
    return {"messages": [*chat(first, "Go on.")["messages"], *chat(second, REPLY)["messages"]]}


DISGUISES: dict[str, Disguise] = {
    "verbatim": _asked(lambda text, draw: text),
    "in capitals": _asked(lambda text, draw: text.upper()),
    "quoted, other line breaks": _asked(quoted),
    "inside a long text": _asked(embedded),
    "HTML entities": _asked(lambda text, draw: f"<p>{text.translate(ENTITIES)}</p>"),
    "sentences in reverse": _asked(lambda text, draw: backwards(text)),
    "over two turns": _halves,
    "typos in 10 % of words": _asked(typos),
    "people renamed": _asked(renamed),
    "other numbers": _asked(renumbered),
    "numbers in LaTeX": _asked(latex),
    "zero-width characters": _asked(lambda text, draw: "\u200b".join(text)),
    "Cyrillic look-alikes": _asked(lambda text, draw: text.translate(LOOKALIKES)),
    "said by the assistant": lambda text, draw: chat("Give me a problem.", text),
    "said by the system": lambda text, draw: chat("Hello.", REPLY, system=text),
    "said in other words": _asked(paraphrased),
    "whole numbers in words": _asked(in_words),
    "the first 70 % of the words": _asked(lambda text, draw: " ".join(text.split(" ")[: -(-7 * len(text.split(" ")) // 10)])),
    "numbers in bold": _asked(lambda text, draw: re.sub(r"\b\d+\b", r"**\g<0>**", text)),
    "words in italics": _asked(italic),
}


def planted(items: Sequence[str], count: int, seed: int) -> list[tuple[str, dict[str, Any]]]:
    """(disguise, row): `count` other items for each disguise."""
    draw = random.Random(f"{seed}/planted")
    return [(name, disguise(text, draw)) for name, disguise in DISGUISES.items() for text in draw.sample(list(items), count)]
