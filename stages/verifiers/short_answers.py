"""Short answers compared word by word.

`exact_match` {answer}       the whole reply is the answer, or one of a list of them, without white space around it. `ignore_case`,
                             `ignore_punctuation` and `ignore_whitespace` (any run of it is one space) are false by default, as in lm-eval;
                             signs and separators of numbers count nevertheless: "3.5" is not "35".
`mentions` {answers}         the reply contains one of the answers, unchanged, in lower case or capitalized: PopQA's rule
                             (Mallen et al. 2023, arXiv 2212.10511).
`drop` {answers [, score]}   DROP's F1 between the words of the reply and of the best of several answers (Dua et al. 2019, arXiv
                             1903.00161, §5), each a list of spans; `score: exact_match` requires exactly these spans.
"""

import re
import string
import unicodedata
from collections.abc import Mapping
from typing import Any

from pedigree.stages.verifiers.ifeval import visible
from pedigree.stages.verifiers.verdict import Verdict, VerifierError, exactly

SCORES = ("f1", "exact_match")
ARTICLES = re.compile(r"\b(a|an|the)\b")

OPTIONS = ("ignore_case", "ignore_punctuation", "ignore_whitespace")


def check_exact(verifier: Mapping[str, Any]) -> None:
    """Raise VerifierError if an answer is no text, or empty in the form that is compared, or an option is not true or false."""
    exactly(verifier, {"name", "answer"}, OPTIONS)
    for option in OPTIONS:
        if not isinstance(verifier.get(option, False), bool):
            raise VerifierError(f"verifier exact_match: {option} is {verifier[option]!r:.80}; it must be true or false")
    answers = _answers(verifier)
    if not _texts(answers) or not all(_compared(one, verifier) for one in answers):
        raise VerifierError(f"verifier exact_match: answer {verifier['answer']!r:.80} must be a text that is not empty, or a list of such")


def exact_match(verifier: Mapping[str, Any], text: str) -> Verdict:
    found = _compared(text, verifier)
    right = any(found == _compared(one, verifier) for one in _answers(verifier))
    return Verdict(float(right), found[:80] or None, "right" if right else f"{found[:80]} is none of {', '.join(_answers(verifier))[:80]}")


def _answers(verifier: Mapping[str, Any]) -> Any:
    return [verifier["answer"]] if isinstance(verifier["answer"], str) else verifier["answer"]


def _compared(text: str, options: Mapping[str, Any]) -> str:
    """A text in the form that `exact_match` compares; characters that Unicode can write in several ways are written in one, and
    invisible ones are left out."""
    text = visible(text)
    if options.get("ignore_case"):
        text = unicodedata.normalize("NFC", text.casefold())
    if options.get("ignore_punctuation"):
        text = "".join(letter for place, letter in enumerate(text) if unicodedata.category(letter)[0] != "P" or _of_number(text, place))
    return " ".join(text.split()) if options.get("ignore_whitespace") else text.strip()


def _of_number(text: str, place: int) -> bool:
    """Whether a character is between two digits, a sign or point before a number, or belongs to what is before it ("50%", "C#")."""
    before, after = text[place - 1 : place], text[place + 1 : place + 2]
    if text[place] in "%‰#" and before.isalnum():
        return True
    return after.isdigit() and (before.isdigit() or (text[place] in "-‐‑–." and not before.isalnum()))


def check_mentions(verifier: Mapping[str, Any]) -> None:
    """Raise VerifierError if the answers are not texts."""
    exactly(verifier, {"name", "answers"})
    if not _texts(verifier["answers"]):
        raise VerifierError(f"verifier {dict(verifier)!r}: answers must be a list of at least one text")


def mentions(verifier: Mapping[str, Any], text: str) -> Verdict:
    for answer in verifier["answers"]:
        if any(form in text for form in (answer, answer.lower(), answer.capitalize())):
            return Verdict(1.0, answer, "right")
    return Verdict(0.0, None, f"none of {', '.join(verifier['answers'])[:80]}")


def check_drop(verifier: Mapping[str, Any]) -> None:
    """Raise VerifierError if the answers are not lists of spans, or the score is unknown."""
    exactly(verifier, {"name", "answers"}, {"score"})
    answers = verifier["answers"]
    if not isinstance(answers, (list, tuple)) or not answers or not all(_texts(spans) for spans in answers):
        raise VerifierError(f"verifier {dict(verifier)!r}: answers must be a list of lists of spans, e.g. [['3'], ['three']]")
    if verifier.get("score", "f1") not in SCORES:
        raise VerifierError(f"score {verifier['score']!r} is none of {', '.join(SCORES)}")


def drop(verifier: Mapping[str, Any], text: str) -> Verdict:
    found = normalised(text)
    compare = span_f1 if verifier.get("score", "f1") == "f1" else _exact
    score, best = max(((compare(found, spans), spans) for spans in verifier["answers"]), key=lambda one: one[0])
    return Verdict(score, text.strip()[:80] or None, "right" if score == 1 else f"{found[:80]} instead of {', '.join(best)[:80]}")


def span_f1(found: str, spans: list[str]) -> float:
    """F1 of the bags of words of the reply and the best span, divided by the number of spans, to two digits.

    2PR / (P + R) with P = |r ∩ s| / |r| and R = |r ∩ s| / |s|; 0 if the span has numbers and the reply has none of them. A reply is a
    single span, so it can match only one of several. The rounding is that of the authors' program.

    Args:
        found: a normalized reply.
        spans: an answer.
    """
    reply = set(found.split())
    best = 0.0
    for span in spans:
        wanted = set(normalised(span).split())
        numbers = {word for word in wanted if _is_number(word)}
        if numbers and not numbers & reply:
            continue
        shared = len(reply & wanted)
        precision = shared / len(reply) if reply else 1.0
        recall = shared / len(wanted) if wanted else 1.0
        best = max(best, 2 * precision * recall / (precision + recall) if precision + recall else 0.0)
    return round(best / len(spans), 2)


def _exact(found: str, spans: list[str]) -> float:
    return float([found] == [normalised(span) for span in spans])


def normalised(text: str) -> str:
    """Lower-case words without punctuation and articles, with numbers in Python's float format."""
    words = []
    for word in re.split(r" |-", text.lower()):
        bare = word if _is_number(word) else "".join(letter for letter in word if letter not in string.punctuation)
        bare = str(float(bare)) if _is_number(bare) else bare
        words += ARTICLES.sub(" ", bare).split()
    return " ".join(words)


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _texts(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(one, str) and one.strip() for one in value)
