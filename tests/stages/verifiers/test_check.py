"""Whatever a row has in a verifier's place: it is a verifier, or a `VerifierError` says what is wrong."""

from typing import Any

import pytest

from pedigree.stages.verifiers import _VERIFIERS, VerifierError, check

SOUND: dict[str, dict[str, Any]] = {
    "arithmetic": {"answer": "4"},
    "gsm": {"answer": "4"},
    "gsm8k": {"answer": "4"},
    "math": {"answer": "4"},
    "strict_math": {"answer": "4"},
    "minerva_math": {"answer": "4"},
    "strict_minerva_math": {"answer": "4"},
    "ifeval": {"instructions": [{"id": "length_constraints:number_words", "relation": "at least", "num_words": 3}], "mode": "loose"},
    "constraint": {"function": "validate_word_constraint", "arguments": {"N": 2, "quantifier": "at most"}},
    "extracted": {"answer": "A", "patterns": ["(.)"], "compare": "text"},
    "mentions": {"answers": ["a"]},
    "drop": {"answers": [["a"]], "score": "f1"},
    "python": {"before": "", "tests": "f()", "entry": "f", "seconds": 1, "opened": True},
    "choice": {"answer": 0, "normalise": "tokens"},
    "mc2": {"labels": [0, 1]},
}
ODD: list[Any] = [None, True, -1, 1.5, "", "x", [], ["a"], [None], [["a"]], [[1], 0], {}, {"id": ["x"]}, [{"id": ["x"]}]]


def changed(value: Any) -> list[Any]:
    """A value with any part of it replaced by each of the odd ones."""
    found = [*ODD]
    if isinstance(value, dict):
        found += [{**value, name: other} for name, inner in value.items() for other in changed(inner)]
    if isinstance(value, list):
        found += [[*value[:place], other, *value[place + 1 :]] for place, inner in enumerate(value) for other in changed(inner)]
    return found


def test_every_verifier_is_here():
    assert set(SOUND) == set(_VERIFIERS)


@pytest.mark.parametrize("name", SOUND)
def test_odd_values_are_refused_by_name_and_never_crash(name):
    sound = {"name": name, **SOUND[name]}
    check(sound)
    refused = 0
    for verifier in changed(sound):
        try:
            check(verifier)
        except VerifierError as error:
            refused += bool(str(error))
    assert refused >= len(ODD)
