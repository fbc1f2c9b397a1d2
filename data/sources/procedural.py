"""Rule-generated rows, each with one answer that the verifier accepts and one that it rejects."""

import random
from collections.abc import Callable
from typing import Any

from pedigree.configs.base.frozen import digest
from pedigree.configs.base.problems import PedigreeError
from pedigree.configs.rows.row_sources import Arithmetic, Constraints
from pedigree.data.sources.examples import Example, unscored

Problem = tuple[str, int, int]
"""Operation and operands."""

SYMBOLS = {"add": "+", "subtract": "-", "multiply": "*"}
RESULTS: dict[str, Callable[[int, int], int]] = {
    "add": lambda a, b: a + b,
    "subtract": lambda a, b: a - b,
    "multiply": lambda a, b: a * b,
}
PHRASES = ("What is {}?", "Calculate {}.", "{} = ?")


def arithmetic(config: Arithmetic) -> list[Example]:
    """`count` distinct problems; operand lengths and operations are drawn uniformly.

    The problem determines its wording, so that the same problem has the same text in two datasets and decontamination finds it.
    Raises PedigreeError if there are fewer than `count` distinct problems.
    """
    possible = len(set(config.operations)) * sum(_numbers(length) for length in set(config.digits)) ** 2
    if config.count > possible:
        raise PedigreeError(
            f"arithmetic: count {config.count} > {possible}, the number of different problems with operations "
            f"{list(config.operations)} and digits {list(config.digits)}: lower count or allow more digits"
        )
    draw = random.Random(f"{config.seed}/arithmetic")
    problems: dict[Problem, None] = {}
    while len(problems) < config.count:
        problems[(draw.choice(config.operations), _operand(draw, config.digits), _operand(draw, config.digits))] = None
    return [_arithmetic_example(problem, config.style, draw) for problem in problems]


def _numbers(length: int) -> int:
    return 10 if length == 1 else 9 * 10 ** (length - 1)


def _operand(draw: random.Random, digits: tuple[int, ...]) -> int:
    length = draw.choice(digits)
    return draw.randrange(0 if length == 1 else 10 ** (length - 1), 10**length)


def _arithmetic_example(problem: Problem, style: str, draw: random.Random) -> Example:
    operation, a, b = problem
    term = f"{a} {SYMBOLS[operation]} {b}"
    result = RESULTS[operation](a, b)
    slip = _slip(problem, result, draw)
    phrase = PHRASES[int(digest([operation, a, b])[:8], 16) % len(PHRASES)].format(term)
    if style == "plain":
        return _asked(phrase, str(result), str(slip), {"name": "arithmetic", "answer": str(result)})
    return _asked(
        f"{phrase} Show your working.",
        f"{term} = {result}\n#### {result}",
        f"{term} = {slip}\n#### {slip}",
        {"name": "gsm", "answer": str(result)},
    )


def _slip(problem: Problem, result: int, draw: random.Random) -> int:
    """A plausible wrong result: a lost or extra carry, off by one, swapped operands, or the wrong operation."""
    operation, a, b = problem
    slips = {result + 10, result - 10, result + 1, result - 1}
    slips |= {b - a} if operation == "subtract" else {a + b} if operation == "multiply" else {abs(a - b)}
    return draw.choice(sorted(slips - {result}))


def _asked(question: str, answer: str, rejected: str, verifier: dict[str, Any]) -> Example:
    return Example([{"role": "user", "content": question}], unscored(answer, rejected), verifier)


# One-word plural nouns. Prompts are short, with the topic in the middle, so that prompts on different topics never share half of
# their 8-grams.
TOPICS = tuple(
    """apples autumns bakeries beaches bees bicycles birds boats books bridges butterflies cameras candles castles cats clocks
    clouds coins deserts dogs dolphins dreams engines farms festivals fires flowers forests friends games gardens glaciers
    gloves guitars hats holidays horses houses islands jackets kitchens kites ladders lakes lamps languages letters libraries
    lighthouses machines maps markets mirrors mountains mushrooms museums neighbours oceans orchards owls painters parks
    pencils pianos planets poems rabbits radios rainbows rivers robots roses ships shoes shops songs spoons stars stations
    storms summers teachers telescopes tents theatres trains trees turtles umbrellas valleys villages violins volcanoes
    watches whales windmills winters wolves""".split()
)
OPENINGS = ("Write one sentence about {}", "Tell a friend something about {}", "Say something nice about {}")
SENTENCE = "{} are part of daily life for many people in towns and in the country."
WITH_COMMAS = "{}, as most people know, are part of daily life."
SHORT = "{} are useful."
LEAST, MOST = (6, 8, 10, 12), (5, 6, 7, 8)


def constraints(config: Constraints) -> list[Example]:
    """`count` distinct instructions; checks are drawn uniformly. Raises PedigreeError if there are fewer."""
    possible = sum(len(OPENINGS) * len(TOPICS) * (len(LEAST) + len(MOST) if name == "word_count" else 1) for name in set(config.checks))
    if config.count > possible:
        raise PedigreeError(f"constraints: count {config.count} > {possible}, the number of different instructions: lower count")
    draw = random.Random(f"{config.seed}/constraints")
    made: dict[str, Example] = {}
    while len(made) < config.count:
        check, opening, topic = draw.choice(config.checks), draw.choice(OPENINGS), draw.choice(TOPICS)
        example = _word_count(opening.format(topic), topic, draw) if check == "word_count" else _formatted(check, opening, topic)
        made.setdefault(example.messages[0]["content"], example)
    return list(made.values())


IDS = {
    "lowercase": "change_case:english_lowercase",
    "no_comma": "punctuation:no_comma",
    "quotation": "startend:quotation",
    "title": "detectable_format:title",
    "word_count": "length_constraints:number_words",
}
"""Name of a check → IFEval's id."""


def _formatted(check: str, opening: str, topic: str) -> Example:
    name = topic.capitalize()
    sentence = SENTENCE.format(name)
    instruction, good, bad = {
        "lowercase": ("{}. Use lowercase letters only.", sentence.lower(), sentence),
        "no_comma": ("{} without any commas.", sentence, WITH_COMMAS.format(name)),
        "quotation": ("{} and wrap it in double quotation marks.", f'"{sentence}"', sentence),
        "title": ("{} with a title in double angular brackets.", f"<<{name}>>\n{sentence}", f"{name}\n{sentence}"),
    }[check]
    return _asked(instruction.format(opening.format(topic)), good, bad, {"name": "ifeval", "instructions": [{"id": IDS[check]}]})


def _word_count(opening: str, topic: str, draw: random.Random) -> Example:
    relation = draw.choice(("at least", "at most"))
    words = draw.choice(LEAST if relation == "at least" else MOST)
    long, short = SENTENCE.format(topic.capitalize()), SHORT.format(topic.capitalize())
    good, bad = (long, short) if relation == "at least" else (short, long)
    bound = ("at least", words) if relation == "at least" else ("less than", words + 1)
    check = {"id": IDS["word_count"], "relation": bound[0], "num_words": bound[1]}
    return _asked(f"{opening} in {relation} {words} words.", good, bad, {"name": "ifeval", "instructions": [check]})
