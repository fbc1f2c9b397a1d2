"""The style sheet of CONTRIBUTING, as far as patterns can check it: pages, docstrings, comments and messages in plain American English."""

import io
import re
import tokenize
from collections.abc import Iterable, Iterator

import pytest
from test_architecture import NAMES, ROOT

pytestmark = pytest.mark.unit
INSTEAD = {
    r"\b(is|are|was|were) told\b": "is reported, receives",
    r"\bwhat (it|a job|one|they) (is|are) told\b": "name the thing",
    r"\bof now\b": "current",
    r"\bwhoever\b": "users, callers",
    r"\bmend(s|ed|ing)?\b": "fix",
    r"\b(goes|gone) on\b": "continues, resumes",
    r"\blies\b": "is, is stored in",
    r"\blaid down\b": "written",
    r"\bmade? anew\b": "rebuild, recompute",
    r"\bnone of ours\b": "name the thing",
    r"\b(token|optim|normal|summar|initial|serial)is(e|es|ed|ing|ation)\b(?= \w)": "American spelling",
}
PATTERN = re.compile("|".join(f"(?:{pattern})" for pattern in INSTEAD), re.IGNORECASE)
NAMED_INSTEAD = {"told": "reported, private", "said": "message, text, output", "heard": "listener, last_heartbeat"}
"""Names of variables, fields and functions."""
PAGES = sorted({*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")} - {ROOT / "CHANGELOG.md", ROOT / "docs" / "benchmarks.md"})
"""The changelog and recorded readings keep the words of their time."""


def prose(text: str) -> Iterator[str]:
    """Strings and comments of a module."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.STRING, tokenize.COMMENT):
            yield token.string


def wrong(texts: Iterable[str]) -> list[str]:
    return [text[max(0, match.start() - 40) : match.end() + 20] for text in texts for match in PATTERN.finditer(text)]


def test_the_patterns_find_what_they_should():
    assert len(wrong(["What a job is told, by whoever mends it"])) == 3 and not wrong(["sources that cannot be told apart"])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_is_in_plain_english(page):
    lines = (line for line in page.read_text().split("\n") if not line.startswith("|") or page.name != "CONTRIBUTING.md")  # its style sheet
    assert not wrong(lines), INSTEAD


def test_code_speaks_plain_english():
    found = {name: bad for name in NAMES if (bad := wrong(prose((ROOT / name).read_text())))}
    assert not found, INSTEAD


def test_variables_are_named_after_what_they_hold():
    found = []
    for name in NAMES:
        text = (ROOT / name).read_text()
        refused = NAMED_INSTEAD.keys() - ({"told"} if "Handle" in text else ())  # its field, which `job.json` has
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        found += [f"{name}:{token.start[0]}: {token.string}" for token in tokens if token.type == tokenize.NAME and token.string in refused]
    assert not found, NAMED_INSTEAD
