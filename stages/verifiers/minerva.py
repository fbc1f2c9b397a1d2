"""MATH by the rule of the Tülu 3 evaluation and of open-instruct's verifier, for scores that compare with published ones.

`minerva_math`, `strict_minerva_math` {answer}   an answer in the places of the Tülu 3 evaluation, see `maths`. Dollar signs of money
                                                 count as those of LaTeX; without Minerva's sentence, a reply is compared as text.

Two expressions are equal if they are equal after the normalization of Lewkowycz et al. 2022 (arXiv 2206.14858, appendix D) and Hendrycks et
al., or if math-verify considers them equal. Both consider some different answers equal, such as 1,2 and 12, so rewards use `maths`.
"""

import re
from collections.abc import Mapping
from typing import Any

from pedigree.stages.verifiers.maths import LONGEST, SECONDS, in_minervas_place, last_formula, marked, verdict
from pedigree.stages.verifiers.verdict import Verdict
from pedigree.stages.verifiers.worker import ask


def strict(verifier: Mapping[str, Any], text: str) -> Verdict:
    found = in_minervas_place(text)
    if found is None and normalised(text) == normalised(verifier["answer"]):
        return Verdict(1.0, text.strip(), "right")
    return verdict([] if found is None else [found], verifier["answer"], equal)


def flexible(verifier: Mapping[str, Any], text: str) -> Verdict:
    return verdict(marked(text) or [last_formula(text, r"\$")], verifier["answer"], equal)


def equal(one: str, other: str) -> bool:
    """Whether two expressions are equal.

    Raises:
        PedigreeError: algebra exceeded its time or memory limit.
    """
    if normalised(one) == normalised(other):
        return True
    if not one.strip() or max(len(one), len(other)) > LONGEST:
        return False
    return ask("pedigree.stages.verifiers.math_verified:equal", (one, other), SECONDS)


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
