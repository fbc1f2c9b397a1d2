r"""Answers that are mathematical expressions, as in MATH (Hendrycks et al. 2021, arXiv 2103.03874) and similar datasets.

`strict_math` {answer}   the answer is in the sentence of Minerva's prompts: "Final Answer: The final answer is $x$. I hope it is correct."
                         Without this sentence the whole reply is compared, but only as text, because algebra finds an answer in any prose.
`math` {answer}          "flex": the last `\boxed{}` or Minerva's sentence; without both, the last pair of dollar signs; without these, the
                         whole reply. One candidate that equals the answer is enough.

These are the rules of the Tülu 3 evaluation and of open-instruct's verifier. Two expressions are equal if they are equal after the
normalization of Lewkowycz et al. 2022 (arXiv 2206.14858, appendix D) and Hendrycks et al., or if math-verify considers them equal, in a
separate process, because a computer algebra system may run forever or use all memory on a model's output.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from pedigree.configs.base.problems import PedigreeError
from pedigree.data.sources.golds import last_boxed
from pedigree.stages.verifiers.verdict import Verdict, VerifierError, exactly
from pedigree.stages.verifiers.worker import ask

SECONDS = 5.0
"""Time limit for one comparison."""
LONGEST = 1000
"""Maximum characters of an expression for comparison by algebra; a longer one is prose."""


def check(verifier: Mapping[str, Any]) -> None:
    """Raise VerifierError if the answer is missing or empty."""
    exactly(verifier, {"name", "answer"})
    if not isinstance(verifier["answer"], str) or not verifier["answer"].strip():
        raise VerifierError(f"verifier {dict(verifier)!r}: the answer must be an expression written as a text, e.g. '\\frac{{1}}{{2}}'")


def strict(verifier: Mapping[str, Any], text: str) -> Verdict:
    found = in_minervas_place(text)
    if found is None and normalised(text) == normalised(verifier["answer"]):
        return Verdict(1.0, text.strip(), "right")
    return _verdict([] if found is None else [found], verifier["answer"])


def flexible(verifier: Mapping[str, Any], text: str) -> Verdict:
    return _verdict(list(candidates(text)), verifier["answer"])


def _verdict(found: list[str], answer: str) -> Verdict:
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


def candidates(text: str) -> Iterator[str]:
    boxed, minerva = last_boxed(text), in_minervas_place(text)
    yield from (one for one in (boxed, minerva) if one is not None)
    if boxed is None and minerva is None:
        *_, last = [None, *re.findall(r"\$([^$]*)\$", _after_odd_dollar(text))]
        yield text if last is None else last


def _after_odd_dollar(text: str) -> str:
    """The text without its first dollar sign if their number is odd, so that the last two form a pair."""
    return text.replace("$", "", 1) if text.count("$") % 2 else text


BEGIN, END = "Final Answer: The final answer is", ". I hope it is correct."


def in_minervas_place(text: str) -> str | None:
    """The text between `BEGIN` and `END` in the first line with both."""
    for line in text.split("\n"):
        found, end, _ = line.partition(BEGIN)[2].partition(END)
        if end:
            return found.strip().strip("$")
    return None


def equal(one: str, other: str) -> bool:
    """Whether two expressions are equal.

    Raises:
        PedigreeError: algebra exceeded its time or memory limit.
    """
    if normalised(one) == normalised(other):
        return True
    if not one.strip() or max(len(one), len(other)) > LONGEST:
        return False
    return ask("pedigree.stages.verifiers.algebra:equal", (one, other), SECONDS)


REMOVED = (r"\!", r"\left", r"\right", r"^{\circ}", r"^\circ", r"\$", "$", r"\%", "%", r"\ ", r"\;", r"\,", "{,}", '"', r"\ldots", r"\dots")
UNITS = (
    "square|ways|integers|dollars|mph|inches|ft|hours|km|units|points|feet|minutes|digits|cents|degrees|cm|gm|pounds|meters|meals|edges"
    "|students|multiples"
)


def normalised(expression: str) -> str:
    """Normalize an expression, so that equal ones are usually equal texts; see the sources above."""
    text = expression.replace("\n", "").replace("\\\\", "\\").replace("tfrac", "frac").replace("dfrac", "frac")
    if text.count("=") == 1 and len(text.partition("=")[0].strip()) <= 2:
        text = text.partition("=")[2]  # "x = 5"
    for removed in REMOVED:
        text = text.replace(removed, "")
    text = in_braces(r"\\(?:text|mbox)\{ [^}]*\}", "", text)  # a unit
    text = in_braces(r"\\(?:text|textbf|mathrm|mbox|overline)\{([^}]*)\}", r"\1", text)
    text = re.sub(rf"\b(?:{UNITS})\b", "", text)
    text = re.sub(r"\b(?:an?) ", "", text).replace(" ", "").rstrip(".")
    text = re.sub(r"(?<![\d])\.(?=\d)", "0.", text)
    text = re.sub(r"\\frac(?!\{)(\w)(\w)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\frac(?!\{)(\w)\{", r"\\frac{\1}{", text)
    text = re.sub(r"\\sqrt(?![{\[])(\w)", r"\\sqrt{\1}", text)
    text = re.sub(r"^(-?)(\d+)/(\d+)$", r"\1\\frac{\2}{\3}", text)
    if text.replace(",", "").isdigit():
        text = text.replace(",", "")
    return r"\frac{1}{2}" if text == "0.5" else text


def in_braces(pattern: str, by: str, text: str) -> str:
    """`re.sub` for a pattern that ends with a brace, applied only up to the last one: many open braces would take quadratic time."""
    head, brace, tail = text.rpartition("}")
    return re.sub(pattern, by, head + brace) + tail
