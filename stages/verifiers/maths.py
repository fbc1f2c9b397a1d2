r"""Answers that are mathematical expressions, as in MATH (Hendrycks et al. 2021, arXiv 2103.03874) and similar datasets.

`strict_math` {answer}   the answer is in the sentence of Minerva's prompts: "Final Answer: The final answer is $x$. I hope it is correct."
                         Without this sentence it is the whole reply.
`math` {answer}          "flex": the last `\boxed{}` or Minerva's sentence (one that equals the answer is enough); without both, what the
                         last "answer is" or "Answer:" states, or the last formula if it comes later; without these, the whole reply.

The places are those of the Tülu 3 evaluation, and the stated answer. `math` also takes what is found there without words that only lead to
it ("therefore $7$", "simply 7"), without its number in words ("$7$ (seven)"), and the letter of a choice ("(A) Paris").

Two answers are equal if both are read to their end and are equal as what they are (`expressions`, `algebra`), or if they are the same text.
A separate process decides this, because a computer algebra system may run forever or use all memory on a model's output.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from pedigree.configs.base.problems import PedigreeError
from pedigree.data.sources.golds import last_boxed
from pedigree.stages.verifiers.verdict import Verdict, VerifierError, exactly
from pedigree.stages.verifiers.worker import ask

SECONDS = 5.0
"""Time limit for one comparison."""
LONGEST = 1000
"""Maximum characters of an expression for comparison by algebra; a longer one is prose."""
DOLLAR = r"(?<!\\)\$"
"""A dollar sign of LaTeX, not of money."""
DELIMITER = re.compile(r"(?<!\\)(?:\$\$|\\[()\[\]])")
"""Of a formula, as is `$`."""
STATED = re.compile(r"\banswer\**+[ \t]*+(?:is|would be|[:=\n])\s*+:?+\s*+(?=\S)", re.IGNORECASE)
ASIDE = re.compile(r"(?<!\s)[,;]?\s++(?:because|since|so|which|that|in total|altogether)\b|\.\s++(?=[A-Z])")
"""What follows a stated answer in its line."""
LEADING = re.compile(
    r"(?:[\s,:]*\b(?:therefore|thus|then|hence|so|just|indeed|again|now|still|always|also|only|of course|in fact|in this case|as follows"
    r"|(?!(?:(?:approximate|near|rough|hard|unlike|trip|on)ly|doubly)\b)[a-z]+ly|equal to|equals|given by|found to be|going to be|that"
    r"|(?:the )?(?:number|value|integer|fraction|expression|option|choice|letter|set|interval|pair|point|vector|matrix|function))\b)+"
    r"[\s,:]+(?=\S)",
    re.IGNORECASE,
)
"""Words before an answer that do not change it."""
IN_WORDS = re.compile(
    r"(?<!\s)\s*+\((?:(?:zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|(?:thir|four|fif|six|seven|eigh|nine)teen"
    r"|(?:twen|thir|for|fif|six|seven|eigh|nine)ty|hundred|thousand|million|and|minus|point)[\s-]*)+\)(?=[.\s]*\Z)",
    re.IGNORECASE,
)
CHOSEN = re.compile(
    r"\(?([A-J])\)\s+(?!(?:and|or|nor|not|if|but|plus|minus|times|is|are)\b|.*\([A-J]\)|.*\b(?:and|or|nor|not) [A-J]\b)[A-Za-z].*"
)
"""The letter of a choice before its text."""


def check(verifier: Mapping[str, Any]) -> None:
    """Raise VerifierError if the answer is missing or empty."""
    exactly(verifier, {"name", "answer"})
    if not isinstance(verifier["answer"], str) or not verifier["answer"].strip():
        raise VerifierError(f"verifier {dict(verifier)!r}: the answer must be an expression written as a text, e.g. '\\frac{{1}}{{2}}'")


def strict(verifier: Mapping[str, Any], text: str) -> Verdict:
    found = in_minervas_place(text)
    return verdict([text.strip() if found is None else found], gold(verifier), equal)


def flexible(verifier: Mapping[str, Any], text: str) -> Verdict:
    found = candidates(text)
    return verdict(list(dict.fromkeys([*found, *map(bare, found)])), gold(verifier), equal)


def gold(verifier: Mapping[str, Any]) -> str:
    """The answer alone, where a dataset gives it in `\\boxed{}` or with the whole solution."""
    boxed = last_boxed(verifier["answer"])
    return verifier["answer"] if boxed is None else boxed


def verdict(found: list[str], answer: str, equal: Callable[[str, str], bool]) -> Verdict:
    """Right if a candidate equals the answer.

    Raises:
        VerifierError: no candidate was found equal, and a comparison failed.
    """
    unanswered = None
    for one in found:
        try:
            if equal(one, answer):
                return Verdict(1.0, one, "right")
        except PedigreeError as error:
            unanswered = error
    if unanswered:
        raise VerifierError(f"{found[0][:80]!r} could not be compared with {answer!r}: {unanswered}") from unanswered
    return Verdict(0.0, found[0] if found else None, f"{found[0][:80]} instead of {answer}" if found else "no answer in its place")


def candidates(text: str) -> list[str]:
    return marked(text) or [stated(DELIMITER.sub("$", text))]


def marked(text: str) -> list[str]:
    return [one for one in (last_boxed(text), in_minervas_place(text)) if one is not None]


def stated(text: str) -> str:
    *_, found = [None, *STATED.finditer(text)]
    line, _, later = text[found.end() :].partition("\n") if found else ("", "", text)
    if not line or re.search(DOLLAR, later):
        return last_formula(text, DOLLAR)
    return re.sub(r"\*+(?=\.?\Z)", "", ASIDE.split(line)[0].strip("* "))


def bare(found: str) -> str:
    """An answer without words around it that do not change it; of a choice its letter."""
    leading = LEADING.match(found)
    text = IN_WORDS.sub("", found[leading.end() :].strip("* ") if leading else found)
    chosen = CHOSEN.fullmatch(text)
    return chosen[1] if chosen else text


def last_formula(text: str, dollar: str) -> str:
    """The text between the last pair of dollar signs, or all of it; an odd dollar sign at the beginning pairs with none."""
    between = re.split(dollar, text)
    *_, last = [text, *between[1 if len(between) % 2 else 2 :: 2]]
    return last


BEGIN, END = "Final Answer: The final answer is", ". I hope it is correct."


def in_minervas_place(text: str) -> str | None:
    """The text between `BEGIN` and `END` in the first line with both."""
    for line in text.split("\n"):
        found, end, _ = line.partition(BEGIN)[2].partition(END)
        if end:
            return found.strip().strip("$")
    return None


def equal(one: str, other: str) -> bool:
    """Whether two answers are equal.

    Raises:
        PedigreeError: only the question can tell, a number is too large to compute, or algebra exceeded its time or memory limit.
    """
    if one.strip() == other.strip():
        return True
    if not one.strip() or max(len(one), len(other)) > LONGEST:
        return False
    found = ask("pedigree.stages.verifiers.algebra:equal", (one, other), SECONDS)
    if found is None:
        raise PedigreeError("whether order, brackets or a percent sign matter depends on the question, or algebra finds no proof")
    return found
