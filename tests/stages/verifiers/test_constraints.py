"""Each function of RLVR-IFeval's rows, on what open-instruct's own accepts and refuses."""

import pytest

from pedigree.stages.verifiers import VerifierError, check, verify
from pedigree.stages.verifiers.constraints import FUNCTIONS

CASES = [
    ("validate_choice", {"options": ["yes", "no"]}, "I say yes", "maybe"),
    ("validate_end", {"end_phrase": "bye."}, "so bye. \n", "bye. So"),
    ("validate_forbidden_words", {"forbidden_words": ["sea"]}, "the river", "OverSEAs"),  # inside of words, too
    ("validate_frequency_capital_words", {"N": 10, "quantifier": "around"}, "A " * 11, "A " * 12),
    ("validate_highlighted_sections", {"N": 2}, "*a* *b*", "*a*"),
    ("validate_json_format", {}, '{"a": 1}', '```json\n{"a": 1}\n```'),
    ("validate_lowercase", {}, "il fait beau 1", "A"),
    ("validate_no_commas", {}, "a b", "a, b"),
    ("validate_paragraphs", {"N": 2, "first_word": "Then", "i": 2}, "A\n\nThen b", "A\n\nthen b"),
    ("validate_placeholders", {"N": 1}, "[name]", "name"),
    ("validate_quotation", {}, ' "a"\n', '"a" b'),
    ("validate_repeat_prompt", {"original_prompt": "Say it"}, "Say it: yes", "say it: yes"),
    ("validate_response_language", {"language": "fr"}, "Il fait beau aujourd'hui et nous allons à la mer.", "The weather is good today."),
    ("validate_sections", {"N": 1, "section_splitter": "SECTION"}, " SECTION 1 a", "a SECTION 1 b"),  # nothing before the first
    ("validate_sections", {"N": 2, "section_splitter": "SECTION"}, "SECTION 1 a SECTION 2 b", "SECTION 1 a"),
    ("validate_title", {}, "<<>>", "<a>"),
    ("validate_two_responses", {}, "a******b", "a******b******c"),
    ("validate_uppercase", {}, "A 1", "a 1"),
    ("validate_word_constraint", {"N": 20, "quantifier": "around"}, "a-b " * 22, "a " * 23),
    ("validate_word_constraint", {"N": 2, "quantifier": "at most"}, "a b", "a b c"),
    ("verify_bullet_points", {"N": 2}, "* a\n - b", "* a\n** b\n- c"),
    ("verify_keyword_frequency", {"word": "sea", "N": 2}, "Sea, sea and seas", "sea"),
    ("verify_keywords", {"keyword_list": ["sea", "sky"]}, "SEAS under the sky", "sea"),
    ("verify_letter_frequency", {"letter": "a", "N": 2}, "Aaa", "aaa"),
    ("verify_paragraph_count", {"N": 2}, "a\n * * * \nb", "a\n* * *\n"),
    ("verify_postscript", {"postscript_marker": "P.S."}, "a P.S. b", "a P.S. "),
    ("verify_sentence_constraint", {"N": 3, "quantifier": "at least"}, "A. B? C!", "A. B?"),
    ("verify_sentence_constraint", {"N": 4, "quantifier": "around"}, "A b. B c? C d!", "A b. B c?"),
]


@pytest.mark.parametrize(("function", "arguments", "good", "bad"), CASES)
def test_an_answer_meets_a_constraint_or_does_not(function, arguments, good, bad):
    verifier = {"name": "constraint", "function": function, "arguments": arguments}
    assert (verify(verifier, good).score, verify(verifier, bad).score) == (1.0, 0.0)


def test_all_25_functions_are_there_and_have_a_case():
    assert len(FUNCTIONS) == 25 == len({function for function, *_ in CASES})


def test_a_language_that_cannot_be_told_is_no_verdict():
    verifier = {"name": "constraint", "function": "validate_response_language", "arguments": {"language": "fr"}}
    with pytest.raises(VerifierError, match="cannot be told"):
        verify(verifier, "12 34")


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        ("validate_all", {}),
        ("validate_no_commas", {"N": 1}),
        ("validate_no_commas", None),
        ("verify_keywords", {"keyword_list": "sea"}),
        ("verify_bullet_points", {"N": "2"}),
        ("validate_word_constraint", {"N": 2, "quantifier": "exactly"}),
    ],
)
def test_a_malformed_constraint_is_an_error(function, arguments):
    with pytest.raises(VerifierError):
        check({"name": "constraint", "function": function, "arguments": arguments})


WRONG = [
    ("validate_choice", {"options": ["yes", "no"]}, "yes or no"),
    ("validate_choice", {"options": ["yes", "no"]}, "I know"),
    ("validate_choice", {"options": ["My answer is yes.", "My answer is no."]}, "My answer is yes. My answer is no."),
    ("validate_no_commas", {}, ""),
    ("validate_no_commas", {}, "你好，世界"),
    ("validate_no_commas", {}, "مرحبا، عالم"),
    ("validate_lowercase", {}, " "),
    ("validate_uppercase", {}, ""),
    ("validate_word_constraint", {"N": 10, "quantifier": "at most"}, "\u200b"),
    ("validate_forbidden_words", {"forbidden_words": ["sea"]}, ""),
    ("validate_forbidden_words", {"forbidden_words": ["sea"]}, "the s\u200bea"),
    ("validate_forbidden_words", {"forbidden_words": ["caf\u00e9"]}, "the cafe\u0301"),
    ("validate_forbidden_words", {"forbidden_words": ["cafe\u0301"]}, "the caf\u00e9"),
    ("validate_quotation", {}, '"'),
    ("validate_two_responses", {}, "******a"),
    ("validate_quotation", {}, '""'),
    ("validate_highlighted_sections", {"N": 1}, "****"),
    ("validate_highlighted_sections", {"N": 2}, "**a**"),
    ("validate_highlighted_sections", {"N": 1}, "* a\n* b"),
    ("validate_placeholders", {"N": 2}, "[][ ]"),
    ("validate_sections", {"N": 2, "section_splitter": "SECTION"}, "SECTION SECTION"),
    ("validate_paragraphs", {"N": 2, "first_word": "be", "i": 2}, "Hello\n\nbest"),
    ("validate_json_format", {}, "NaN"),
    ("validate_json_format", {}, '{"a": Infinity}'),
]
RIGHT = [
    ("validate_choice", {"options": ["yes", "no"]}, "I say yes."),
    ("validate_choice", {"options": ["yes", "yes indeed"]}, "yes indeed"),
    ("validate_choice", {"options": ["My answer is yes.", "My answer is no."]}, "Yes or no? My answer is no."),
    ("validate_no_commas", {}, "no comma; none"),
    ("validate_quotation", {}, '"a"'),
    ("validate_highlighted_sections", {"N": 3}, "*a* **b**\nand * c *"),
    ("validate_placeholders", {"N": 2}, "[name] [[date]]"),
    ("validate_paragraphs", {"N": 2, "first_word": "be", "i": 2}, "Hello\n\nbe, or not"),
    ("verify_keyword_frequency", {"word": "New York", "N": 2}, "New York, new york; New Yorker"),
    ("verify_keyword_frequency", {"word": "don't", "N": 1}, "Don't"),
    ("validate_json_format", {}, '{"a": null}'),
]


@pytest.mark.parametrize(("name", "arguments", "text", "score"), [*((*one, 0) for one in WRONG), *((*one, 1) for one in RIGHT)])
def test_what_the_published_functions_let_pass_is_wrong(name, arguments, text, score):
    assert verify({"name": "constraint", "function": name, "arguments": arguments}, text).score == score
