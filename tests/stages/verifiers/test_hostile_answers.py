"""Answers that no sound model gives, as policies do that a reward has led astray: each has a verdict, and soon."""

import gc
import random
import re
import time
from collections.abc import Iterator

import pytest

from pedigree.stages.verifiers import Verdict, VerifierError, verify
from pedigree.stages.verifiers.ifeval import CHECKS, placeholders
from pedigree.stages.verifiers.maths import in_minervas_place
from pedigree.stages.verifiers.minerva import in_braces

LENGTH = 50_000
SECONDS = 0.8
"""Of the processor for one verdict. What took the square of the length took 1.3 to 15."""
BEGUN = (
    "[", "<<", "*", "- ", "\n", " \n", "7", "1,", "$", '"', "{", "(", "####", "1e9", r"\text{ ", r"\text{x ", r"\boxed{", r"\frac", "\x00",
    "Final Answer: The final answer is ", "P. ", "e\u0301", "\u202e", "\U0001f468\u200d", "```json\n[", "<|im_end|>", "the a ", "\\", "x=",
    "therefore ", "(A) ", " (seven-",
)  # fmt: skip
"""Repeated without end."""
FIELDS = {
    "change_case:capital_word_frequency": {"capital_frequency": 1, "capital_relation": "at least"},
    "combination:repeat_prompt": {"prompt_to_repeat": "x"},
    "detectable_content:number_placeholders": {"num_placeholders": 1},
    "detectable_content:postscript": {"postscript_marker": "P.P.S"},
    "detectable_format:multiple_sections": {"section_spliter": "Section", "num_sections": 1},
    "detectable_format:number_bullet_lists": {"num_bullets": 1},
    "detectable_format:number_highlighted_sections": {"num_highlights": 1},
    "keywords:existence": {"keywords": ["x+x"]},
    "keywords:forbidden_words": {"forbidden_words": ["x"]},
    "keywords:frequency": {"keyword": "x", "frequency": 1, "relation": "at least"},
    "keywords:letter_frequency": {"letter": "x", "let_frequency": 1, "let_relation": "at least"},
    "language:response_language": {"language": "de"},
    "length_constraints:nth_paragraph_first_word": {"num_paragraphs": 1, "nth_paragraph": 1, "first_word": "x"},
    "length_constraints:number_paragraphs": {"num_paragraphs": 1},
    "length_constraints:number_sentences": {"num_sentences": 1, "relation": "at least"},
    "length_constraints:number_words": {"num_words": 1, "relation": "at least"},
    "startend:end_checker": {"end_phrase": "x"},
}
OF_LIBRARIES = {
    "change_case:capital_word_frequency", "change_case:english_capital", "change_case:english_lowercase", "language:response_language",
    "length_constraints:number_sentences",
}  # fmt: skip
"""NLTK and langdetect take some seconds for so long a text."""
VERIFIERS = {
    **{name: {"answer": "4"} for name in ("arithmetic", "gsm", "gsm8k", "math", "strict_math", "minerva_math", "strict_minerva_math")},
    "extracted": {"answer": "A", "patterns": [r"answer is \(?([A-Z])", r"(?:a|a)*b(.)"]}, "mentions": {"answers": ["Paris"]},
    "drop": {"answers": [["4", "four"]]},
    **{f"constraint {name}": {"function": name, "arguments": given} for name, given in (
        ("validate_placeholders", {"N": 1}), ("validate_title", {}), ("validate_highlighted_sections", {"N": 1}),
        ("verify_bullet_points", {"N": 1}), ("validate_json_format", {}), ("validate_word_constraint", {"N": 1, "quantifier": "at least"}),
    )},
    **{f"ifeval {name}": {"instructions": [{"id": name, **FIELDS.get(name, {})}]} for name in sorted(CHECKS.keys() - OF_LIBRARIES)},
}  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def little_garbage() -> Iterator[None]:
    """What earlier tests have loaded is not looked through at the cost of a verdict."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.parametrize("name", VERIFIERS)
def test_whatever_is_repeated_without_end_has_a_verdict_soon(name: str) -> None:
    verifier = {"name": name.split()[0], **VERIFIERS[name]}
    for begun in BEGUN:
        text = begun * (LENGTH // len(begun))
        began = time.thread_time()
        try:
            verdict = verify(verifier, text)
        except VerifierError as error:
            assert len(str(error)) < 500
        else:
            assert isinstance(verdict, Verdict) and 0 <= verdict.score <= 1
        assert time.thread_time() - began < SECONDS, begun


def test_what_is_found_is_what_the_published_patterns_find() -> None:
    """Theirs, as they are written there, on short texts made of what they look for."""
    draw = random.Random(0)
    words = ("[", "]", "<<", "<", ">>", ">", "*", "-", " ", "\n", "\n\n", "a", r"\text{ ", r"\mbox{", "}",
             "Final Answer: The final answer is", ". I hope it is correct.", "\x1c", "\u2028", "\r")  # fmt: skip
    for _ in range(3000):
        text = "".join(draw.choices(words, k=draw.randrange(1, 14)))
        assert placeholders(text) == len(re.findall(r"\[.*?\]", text))
        bullets = len(re.findall(r"^\s*\*[^\*].*$", text, re.MULTILINE)) + len(re.findall(r"^\s*-.*$", text, re.MULTILINE))
        counted = {"id": "detectable_format:number_bullet_lists", "num_bullets": bullets}
        titled = any(title.lstrip("<").rstrip(">").strip() for title in re.findall(r"<<[^\n]+>>", text))
        if text.strip():  # a blank text follows nothing
            assert CHECKS[counted["id"]].holds(counted, text), text
            assert CHECKS["detectable_format:title"].holds({}, text) == titled, text
        function = {"name": "constraint", "function": "validate_title", "arguments": {}}
        assert verify(function, text).score == bool(re.search(r"<<.*?>>", text.strip()))
        place = re.search(r"Final Answer: The final answer is(.*?)\. I hope it is correct\.", text)
        assert in_minervas_place(text) == (place and place.group(1).strip().strip("$"))
        for pattern, by in ((r"\\(?:text|mbox)\{ [^}]*\}", ""), (r"\\(?:text|mbox)\{([^}]*)\}", r"\1")):
            assert in_braces(pattern, by, text) == re.sub(pattern, by, text), text
