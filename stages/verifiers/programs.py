"""Answers that are programs.

`python` {before, tests, entry [, seconds, opened]}   the answer's code, after `before`, passes the tests of the function `entry`,
                                                      in a sandbox (`sandbox`): HumanEval's rule (Chen et al. 2021, arXiv 2107.03374)
`python` {examples [, seconds, opened]}               the answer's code is a program that prints the `output` of each example for its
                                                      `input`

The code is the first fenced block marked as Python, or else the first without a language, or else the whole answer, all after a model's
reasoning (`</think>`). With `opened` the prompt has opened the block, and the code ends at the first fence.
"""

import re
from collections.abc import Mapping
from textwrap import dedent
from typing import Any

from pedigree.configs.base.problems import PedigreeError
from pedigree.stages.verifiers.sandbox import require, run
from pedigree.stages.verifiers.verdict import Verdict, VerifierError, exactly

SECONDS = 3
"""Default CPU time limit, as in the authors' program."""
LONGEST = 100_000
"""Maximum characters of a program."""
BLOCK = re.compile(
    r"""(?:^(?P<margin>(?=[ \t>\-*+\d])[ \t]*+(?:>[ ]?)*+[ \t]*+(?:(?:[-*+]|\d++[.)])[ \t]++)?)?|(?<![\w`~]))  # or after a text in its line
        (?P<fence>(?P<mark>[`~])(?P=mark){2,}+)(?P<language>[^\n`]*)\n
        (?P<code>.*?)
        (?:^(?(margin)[ \t>]*|[ ]{0,3})(?P=fence)(?P=mark)*+(?:[ \t]*|[ \t]+[^ \t\n]+[ \t][^\n]+)$|\Z)  # also before a sentence""",
    re.DOTALL | re.MULTILINE | re.VERBOSE,
)
"""A block with both fences (CommonMark, section 4.5), so that closing fences are not taken for opening ones."""
ENDED = re.compile(r"^([^`\n]*[^`\s])```+[ \t]*$.*", re.DOTALL | re.MULTILINE)
"""Code up to a fence at the end of its last line."""


def check(verifier: Mapping[str, Any]) -> None:
    """Raise VerifierError if a text is missing, `entry` is not an identifier, or `seconds` is not an integer from 1 to 60."""
    what = {"examples"} if "examples" in verifier else {"before", "tests", "entry"}
    exactly(verifier, {"name", *what}, {"seconds", "opened"})
    if "examples" in verifier:
        _check_examples(verifier)
    else:
        _check_tests(verifier)
    if not isinstance(verifier.get("opened", False), bool):
        raise VerifierError(f"verifier {verifier['name']}: opened is {verifier['opened']!r}; it must be true or false")
    seconds = verifier.get("seconds", SECONDS)
    if type(seconds) is not int or not 1 <= seconds <= 60:
        raise VerifierError(f"verifier {verifier['name']}: seconds is {seconds!r}; it must be a whole number from 1 to 60")


def _check_examples(verifier: Mapping[str, Any]) -> None:
    examples = verifier["examples"]
    if not isinstance(examples, (list, tuple)) or not examples:
        raise VerifierError(f"verifier {verifier['name']}: there are no examples, and every program would pass")
    for one in examples:
        if not isinstance(one, Mapping) or set(one) != {"input", "output"} or not all(isinstance(text, str) for text in one.values()):
            raise VerifierError(f"verifier {verifier['name']}: the example {one!r:.80} must have the texts input and output, and no others")
        if not one["output"].strip():
            raise VerifierError(
                f"verifier {verifier['name']}: the output of an example is empty, and any program that prints nothing would pass"
            )


def _check_tests(verifier: Mapping[str, Any]) -> None:
    for field in ("before", "tests", "entry"):
        if not isinstance(verifier[field], str):
            raise VerifierError(f"verifier {verifier['name']}: {field} must be a text, not {verifier[field]!r:.80}")
    if not verifier["entry"].isidentifier():
        raise VerifierError(f"verifier {verifier['name']}: entry {verifier['entry']!r} must be the name of a function")
    if not verifier["tests"].strip():
        raise VerifierError(f"verifier {verifier['name']}: there are no tests, and every program would pass")


def verify(verifier: Mapping[str, Any], text: str) -> Verdict:
    """1.0 if all tests pass.

    Raises:
        PedigreeError: this machine has no sandbox for programs.
        VerifierError: the sandbox failed to start.
    """
    code = code_of(text, opened=verifier.get("opened", False))
    if not code.strip():
        return Verdict(0.0, None, "no code")
    if len(code) > LONGEST:
        return Verdict(0.0, None, f"a program of {len(code)} characters, {LONGEST} at most")
    require()
    try:
        before, tests, entry = (verifier.get(name, "") for name in ("before", "tests", "entry"))
        outcome = run(
            before, code if before else dedent(code), tests, entry, verifier.get("seconds", SECONDS), verifier.get("examples", ())
        )
    except PedigreeError as error:
        raise VerifierError(str(error)) from error
    return Verdict(float(outcome.right), None, outcome.reason)


def code_of(text: str, *, opened: bool) -> str:
    """The code of an answer; with `opened` the answer begins inside a block."""
    text = text.replace("\r\n", "\n").replace("\ufeff", "")
    if opened:
        return text.partition("```")[0]
    text = text.rpartition("</think>")[2]
    blocks = [(block["language"].strip().lower().lstrip("{."), block) for block in BLOCK.finditer(text)]
    marked = [block for name, block in blocks if name.startswith("py") and not name.startswith("pycon")]
    for block in marked or [block for name, block in blocks if not name]:
        code = ENDED.sub(r"\1", _without_margin(block["code"], block["margin"] or ""))
        return code.removesuffix("\n") + "\n" if code else ""
    return text


def _without_margin(code: str, margin: str) -> str:
    """Code without the margin of its fence, a list's or a quotation's; no more is removed than its first line has."""
    lines = re.sub(r"^[ \t]*(?:>[ ]?)+", "", code, flags=re.MULTILINE).split("\n") if ">" in margin else code.split("\n")
    first = next((line for line in lines if line.strip()), "")
    width = min(len(margin.rpartition("> ")[2]), _indentation(first))
    return "\n".join(line[min(width, _indentation(line)) :] for line in lines)


def _indentation(line: str) -> int:
    return len(line) - len(line.lstrip())
