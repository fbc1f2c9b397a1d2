"""The checks of RLVR-IFeval's rows, by the names of open-instruct's functions, from `func_name` in `ground_truth`.

They are named like IFEval's but differ: numbers of words or letters must match exactly, words are split at white space, and
paragraphs by `* * *`. White space around an answer is ignored. The rules are those for which the rows were created
(`open_instruct/if_functions.py` and `ground_truth_utils.py` at e6c3044), except that they find more answers wrong: an empty one, and empty
responses, quotations, sections, highlights and placeholders; one that names several of the choices, or one, or a first word, only
as a part of a word; NaN, which is not JSON; commas of other scripts; and words with invisible characters. A highlight in bold is one, and
keywords of several words are found.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from pedigree.data.filters.languages import language
from pedigree.stages.verifiers.ifeval import COMMAS, Arguments, Check, ended_lines, is_count, visible
from pedigree.stages.verifiers.verdict import Verdict, VerifierError, exactly


def verify(verifier: Arguments, text: str) -> Verdict:
    name = verifier["function"]
    text = visible(text).strip()
    if not text:
        return Verdict(0.0, None, "empty")
    right = FUNCTIONS[name].holds({field: _visible(value) for field, value in verifier["arguments"].items()}, text)
    return Verdict(float(right), None, "right" if right else f"not {name}")


def _visible(value: Any) -> Any:
    return visible(value) if isinstance(value, str) else list(map(visible, value)) if isinstance(value, (list, tuple)) else value


def check(verifier: Arguments) -> None:
    """Raise VerifierError if the function is unknown, or an argument is missing, unknown or of the wrong type."""
    exactly(verifier, {"name", "function", "arguments"})
    function, given = verifier["function"], verifier["arguments"]
    if not isinstance(function, str) or function not in FUNCTIONS:
        raise VerifierError(f"function {function!r} is none of {', '.join(sorted(FUNCTIONS))}")
    wanted = FUNCTIONS[function].arguments
    if not isinstance(given, Mapping):
        raise VerifierError(f"arguments {given!r} of {function} are no object with named fields")
    exactly(given, set(wanted))
    wrong = [name for name, fits in wanted.items() if not fits(given[name])]
    if wrong:
        raise VerifierError(f"arguments {dict(given)!r}: {', '.join(wrong)} is not what {function} takes")


def _text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _texts(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(one, str) for one in value)


def _quantifier(value: Any) -> bool:
    return value in ("at least", "around", "at most")


def _compares(found: int, given: Arguments, tolerance: float) -> bool:
    """Compare with the quantifier; `around` allows for the tolerance."""
    match given["quantifier"]:
        case "at least":
            return found >= given["N"]
        case "at most":
            return found <= given["N"]
        case _:
            return abs(found - given["N"]) <= tolerance


def _tenth(given: Arguments) -> int:
    return max(round(given["N"] * 0.1), 1)


def _whole(word: str, text: str) -> list[str]:
    return re.findall(rf"(?<!\w){re.escape(word)}(?!\w)", text)


def _choice(given: Arguments, text: str) -> bool:
    """One of the options is in the text, as whole words, and none of the others, except as a part of it."""
    found = [one for one in given["options"] if _whole(one, text)]
    return bool(found) and all(one in max(found, key=len) for one in found)


def _word_frequency(given: Arguments, text: str) -> bool:
    return len(_whole(given["word"].lower(), text.lower())) == given["N"]


def _language(given: Arguments, text: str) -> bool:
    found = language(text)
    if found is None:
        raise VerifierError(f"the language of an answer of {len(text)} characters cannot be told")
    return found == given["language"]


def _paragraph_count(given: Arguments, text: str) -> bool:
    parts = "\n".join(line.strip() for line in text.splitlines()).split("* * *")
    return len(parts) == given["N"] and all(part.strip() for part in parts)


def _first_word(given: Arguments, text: str) -> bool:
    parts = text.split("\n\n")
    begin = rf"{re.escape(given['first_word'])}(?!\w)"
    return len(parts) == given["N"] and given["i"] <= len(parts) and bool(re.match(begin, parts[given["i"] - 1].strip()))


def _postscript(given: Arguments, text: str) -> bool:
    _, marker, after = text.partition(given["postscript_marker"])
    return bool(marker and after.strip())


def _sections(given: Arguments, text: str) -> bool:
    parts = text.split(given["section_splitter"])
    parts = parts[1:] if parts[0] == "" else parts
    return len(parts) == given["N"] and all(part.strip() for part in parts)


def _refused(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _json(_: Arguments, text: str) -> bool:
    try:
        json.loads(text, parse_constant=_refused)
    except (ValueError, RecursionError):
        return False
    return True


def _two_responses(_: Arguments, text: str) -> bool:
    parts = [part.strip() for part in text.split("******")]
    return len(parts) == 2 and parts[0] != parts[1] and all(parts)


SENTENCE_END = re.compile(r"(?<!\w\.\w.)(?<![A-Z][a-z]\.)(?<=\.|\?|!)\s")
HIGHLIGHT = re.compile(r"(?<!\*)\*++(?!\s*+(?:\*|\Z))[^*\n]++\*")
QUANTITY = {"N": is_count, "quantifier": _quantifier}

FUNCTIONS: dict[str, Check] = {
    "validate_choice": Check({"options": _texts}, _choice),
    "validate_end": Check({"end_phrase": _text}, lambda given, text: text.endswith(given["end_phrase"])),
    "validate_forbidden_words": Check(
        {"forbidden_words": _texts}, lambda given, text: not any(word.lower() in text.lower() for word in given["forbidden_words"])
    ),
    "validate_frequency_capital_words": Check(
        QUANTITY, lambda given, text: _compares(len(re.findall(r"\b[A-Z]+\b", text)), given, _tenth(given))
    ),
    "validate_highlighted_sections": Check({"N": is_count}, lambda given, text: len(HIGHLIGHT.findall(text)) >= given["N"]),
    "validate_json_format": Check({}, _json),
    "validate_lowercase": Check({}, lambda given, text: text == text.lower()),
    "validate_no_commas": Check({}, lambda given, text: not COMMAS.search(text)),
    "validate_paragraphs": Check({"N": is_count, "first_word": _text, "i": lambda value: type(value) is int and value >= 1}, _first_word),
    "validate_placeholders": Check(
        {"N": is_count}, lambda given, text: sum(bool(part.strip()) for part in re.findall(r"\[([^\[\]\n]*)\]", text)) >= given["N"]
    ),
    "validate_quotation": Check({}, lambda given, text: text[0] == '"' == text[-1] and bool(text[1:-1].strip())),
    "validate_repeat_prompt": Check({"original_prompt": _text}, lambda given, text: text.startswith(given["original_prompt"])),
    "validate_response_language": Check({"language": _text}, _language),
    "validate_sections": Check({"N": is_count, "section_splitter": _text}, _sections),
    "validate_title": Check({}, lambda given, text: any("<<" in line for line in ended_lines(text, ">>"))),
    "validate_two_responses": Check({}, _two_responses),
    "validate_uppercase": Check({}, lambda given, text: text == text.upper()),
    "validate_word_constraint": Check(QUANTITY, lambda given, text: _compares(len(text.split()), given, _tenth(given))),
    "verify_bullet_points": Check(
        {"N": is_count}, lambda given, text: sum(line.strip().startswith(("*", "-")) for line in text.split("\n")) == given["N"]
    ),
    "verify_keyword_frequency": Check({"word": _text, "N": is_count}, _word_frequency),
    "verify_keywords": Check(
        {"keyword_list": _texts}, lambda given, text: all(word.lower() in text.lower() for word in given["keyword_list"])
    ),
    "verify_letter_frequency": Check(
        {"letter": lambda value: _text(value) and len(value) == 1, "N": is_count},
        lambda given, text: text.count(given["letter"]) == given["N"],
    ),
    "verify_paragraph_count": Check({"N": is_count}, _paragraph_count),
    "verify_postscript": Check({"postscript_marker": _text}, _postscript),
    "verify_sentence_constraint": Check(QUANTITY, lambda given, text: _compares(len(SENTENCE_END.split(text)), given, 1)),
}
"""Checks by open-instruct's names."""
