"""Each of the 25 checks on answers that follow and do not follow it, decided by reading the paper's table 4 and the authors' program."""

import json

import pytest

from pedigree.data.artifacts import assets
from pedigree.data.sources.verifiable import instructions_of
from pedigree.stages.verifiers import VerifierError, check, verify
from pedigree.stages.verifiers.ifeval import CHECKS, following, loosened

ENGLISH = "rivers are long and carry much water from the mountains down to the sea"
FRENCH = "Les rivières sont longues et portent beaucoup d'eau des montagnes vers la mer."
NTH = "length_constraints:nth_paragraph_first_word"
CASES = [
    ("change_case:capital_word_frequency", {"capital_frequency": 2, "capital_relation": "at least"}, "NASA met the EU.", "NASA met Eu."),
    ("change_case:capital_word_frequency", {"capital_frequency": 2, "capital_relation": "less than"}, "NASA-HQ is far.", "A and B"),
    ("change_case:english_capital", {}, ENGLISH.upper(), ENGLISH),
    ("change_case:english_capital", {}, "THE RIVER IS LONG AND IT FLOWS TO THE SEA", FRENCH.upper()),
    ("change_case:english_lowercase", {}, ENGLISH, ENGLISH.capitalize()),
    ("change_case:english_lowercase", {}, ENGLISH + ".", FRENCH.lower()),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say it. "}, "say IT. Yes", "Sure. Say it."),
    ("combination:two_responses", {}, "one\n******\ntwo", "one******one"),
    ("combination:two_responses", {}, "******one******two******", "one******two******three"),
    ("combination:two_responses", {}, "one ****** One", "one************two"),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[a] to []", "[a to b]"),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "Bye\np. s. more", "Bye PS more"),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, "P.P.S more", "P.S. more"),
    ("detectable_content:postscript", {"postscript_marker": "PS:"}, "x ps: more", "x p.s. more"),
    ("detectable_format:constrained_response", {}, "Well. My answer is maybe.", "My answer is perhaps."),
    ("detectable_format:json_format", {}, '```json\n{"a": 1}\n```', "{a: 1}"),
    ("detectable_format:multiple_sections", {"section_spliter": "PART ", "num_sections": 2}, "PART 1 a\nPART 2 b", "Part 1\nPART two"),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* a\n - b\n** c **", "* a\n* b\n- c"),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*a* and *b*", "*a* and * *"),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 1}, "**a**", "**a\nb**"),
    ("detectable_format:title", {}, "<<Rivers>>\nthey flow", "<< >>\nthey flow"),
    ("detectable_format:title", {}, "x <<A b>>", "<<A\nb>>"),
    ("keywords:existence", {"keywords": ["river", "sea"]}, "RIVERS to the sea", "rivers"),
    ("keywords:forbidden_words", {"forbidden_words": ["sea"]}, "seas", "the SEA."),
    ("keywords:frequency", {"keyword": "sea", "frequency": 2, "relation": "at least"}, "Seas of the sea", "sea"),
    ("keywords:frequency", {"keyword": "sea", "frequency": 2, "relation": "less than"}, "sea", "oversea sea"),
    ("keywords:letter_frequency", {"letter": "A", "let_frequency": 3, "let_relation": "at least"}, "Banana", "Ban"),
    ("keywords:letter_frequency", {"letter": "#", "let_frequency": 2, "let_relation": "at least"}, "# and #", "#"),
    ("language:response_language", {"language": "fr"}, FRENCH, ENGLISH),
    ("language:response_language", {"language": "hi"}, "12 34", ENGLISH),  # nobody can tell
    (NTH, {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Then"}, "A\n\n'then, b", "A\n\nb"),
    (NTH, {"num_paragraphs": 1, "nth_paragraph": 1, "first_word": "a"}, "A! b\n\n ", "A b\n\nc"),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "***\na\n***\nb", "a\n***\n\n***\nb"),
    ("length_constraints:number_sentences", {"num_sentences": 2, "relation": "at least"}, "Go. Mr. Fox left.", "Mr. Fox left"),
    ("length_constraints:number_sentences", {"num_sentences": 2, "relation": "less than"}, "Dr. Fox left.", "Go. Now."),
    ("length_constraints:number_words", {"num_words": 3, "relation": "at least"}, "a b-c", "a b"),
    ("length_constraints:number_words", {"num_words": 3, "relation": "less than"}, "a b", "a b c"),
    ("punctuation:no_comma", {}, "one and two", "one, two"),
    ("startend:end_checker", {"end_phrase": "The End."}, '"So be it. the end."\n', "The end. Bye"),
    ("startend:quotation", {}, ' "said so" ', '"said" so'),
    ("startend:quotation", {}, '""', '"'),
]


@pytest.mark.parametrize(("name", "arguments", "good", "bad"), CASES)
def test_an_answer_follows_an_instruction_or_does_not(name, arguments, good, bad):
    verifier = {"name": "ifeval", "instructions": [{"id": name, **arguments}]}
    assert (verify(verifier, good).score, verify(verifier, bad).score) == (1.0, 0.0)


def test_all_25_checks_are_there_and_have_a_case():
    assert len(CHECKS) == 25 == len({name for name, *_ in CASES})


def test_the_541_prompts_are_read_and_none_of_their_instructions_is_malformed():
    rows = [json.loads(line) for line in assets.path("ifeval").read_text().splitlines()]
    found = [instructions_of(row["instruction_id_list"], row["kwargs"]) for row in rows]
    for instructions in found:
        check({"name": "ifeval", "instructions": instructions})
    assert (len(rows), sum(map(len, found)), len({one["id"] for given in found for one in given})) == (541, 834, 25)


def test_an_empty_answer_follows_nothing():
    assert verify({"name": "ifeval", "instructions": [{"id": "punctuation:no_comma"}]}, " \n").score == 0.0


def test_every_instruction_must_be_followed_and_the_reason_names_those_that_are_not():
    verifier = {"name": "ifeval", "instructions": [{"id": "detectable_format:title"}, {"id": "punctuation:no_comma"}]}
    assert verify(verifier, "Two, three").reason == "not detectable_format:title, punctuation:no_comma"
    assert verify(verifier, "<<Two>>, three").reason == "not punctuation:no_comma"


def test_the_score_may_be_the_share_that_is_followed():
    verifier = {"name": "ifeval", "instructions": [{"id": "detectable_format:title"}, {"id": "punctuation:no_comma"}], "score": "share"}
    assert [verify(verifier, text).score for text in ("Two, three", "Two", "<<Two>>")] == [0.0, 0.5, 1.0]


def test_loosely_first_and_last_lines_and_asterisks_may_be_left_out():
    verifier = {"name": "ifeval", "instructions": [{"id": "startend:quotation"}]}
    text = 'Sure, here it is:\n**"Rivers"**\nAnything else?'
    assert verify(verifier, text).score == verify(verifier | {"mode": "strict"}, text).score == 0.0
    assert verify(verifier | {"mode": "loose"}, text).score == 1.0
    assert loosened("a\nb*\nc") == ["a\nb*\nc", "b*\nc", "a\nb*", "b*", "a\nb\nc", "b\nc", "a\nb", "b"]


def test_each_instruction_may_be_followed_in_a_form_of_its_own():
    instructions = [{"id": "startend:quotation"}, {"id": "detectable_format:number_highlighted_sections", "num_highlights": 1}]
    assert following(instructions, 'Sure:\n*"Rivers"*', "loose") == [True, True]


def test_a_language_is_told_alike_every_time():
    verifier = {"name": "ifeval", "instructions": [{"id": "language:response_language", "language": "it"}]}
    assert len({verify(verifier, "no me gusta la casa di Maria e va bene").score for _ in range(20)}) == 1


def test_a_pattern_that_takes_for_ever_is_no_verdict(monkeypatch):
    monkeypatch.setattr("pedigree.stages.verifiers.timed_patterns.SEARCH_SECONDS", 0.05)
    verifier = {"name": "ifeval", "instructions": [{"id": "keywords:existence", "keywords": ["(a|aa)+$"]}]}
    with pytest.raises(VerifierError, match=r"more than 0\.05 s"):
        verify(verifier, "a" * 60 + "!")


WORDS = {"id": "length_constraints:number_words"}
LETTERS = {"id": "keywords:letter_frequency", "let_frequency": 1, "let_relation": "at least"}
MALFORMED = [
    {"name": "ifeval", "instructions": []},
    {"name": "ifeval", "instructions": [{"id": "lower"}]},
    {"name": "ifeval", "instructions": [{"id": "punctuation:no_comma"}], "mode": "lenient"},
    {"name": "ifeval", "instructions": [{"id": "punctuation:no_comma", "num_words": 3}]},
    {"name": "ifeval", "instructions": [{"id": "punctuation:no_comma"}], "score": "mean"},
    {"name": "ifeval", "instructions": [WORDS | {"relation": "about", "num_words": 3}]},
    {"name": "ifeval", "instructions": [WORDS | {"relation": "at least", "num_words": True}]},
    {"name": "ifeval", "instructions": [WORDS | {"relation": "at least"}]},
    {"name": "ifeval", "instructions": [{"id": "keywords:existence", "keywords": ["("]}]},
    {"name": "ifeval", "instructions": [LETTERS | {"letter": "ab"}]},
]


@pytest.mark.parametrize("verifier", MALFORMED)
def test_a_malformed_verifier_is_an_error_and_not_a_zero(verifier):
    with pytest.raises(VerifierError):
        check(verifier)


UNICODE = [
    ({"id": "keywords:forbidden_words", "forbidden_words": ["caf\u00e9"]}, "the cafe\u0301", 0),
    ({"id": "keywords:forbidden_words", "forbidden_words": ["sea"]}, "the s\u200bea", 0),
    ({"id": "keywords:forbidden_words", "forbidden_words": ["sea"]}, "the seal", 1),
    ({"id": "keywords:existence", "keywords": ["caf\u00e9"]}, "the cafe\u0301", 1),
    ({"id": "keywords:existence", "keywords": ["cafe\u0301"]}, "the caf\u00e9", 1),
    ({"id": "length_constraints:number_words", "relation": "at least", "num_words": 2}, "nai\u0308ve", 0),
    ({"id": "length_constraints:number_words", "relation": "at least", "num_words": 2}, "o\u200bne", 0),
    ({"id": "punctuation:no_comma"}, "你好，世界", 0),
    ({"id": "punctuation:no_comma"}, "مرحبا، عالم", 0),
    ({"id": "punctuation:no_comma"}, "甲、乙", 0),
    ({"id": "punctuation:no_comma"}, "no comma; none", 1),
    ({"id": "startend:quotation"}, '\ufeff"a"', 1),
    ({"id": "combination:repeat_prompt", "prompt_to_repeat": "Cafe\u0301 culture"}, "Cafe\u0301 culture\nIt began", 1),
    ({"id": "combination:repeat_prompt", "prompt_to_repeat": "\ufeffTell me of ri\u00advers."}, "Tell me of rivers. Rivers", 1),
    ({"id": "startend:end_checker", "end_phrase": "au cafe\u0301"}, "On va au café", 1),
    ({"id": NTH, "num_paragraphs": 1, "nth_paragraph": 1, "first_word": "cafe\u0301"}, "Café au lait", 1),
]


@pytest.mark.parametrize(("instruction", "text", "score"), UNICODE)
def test_characters_hide_nothing(instruction, text, score):
    assert verify({"name": "ifeval", "instructions": [instruction]}, text).score == score
