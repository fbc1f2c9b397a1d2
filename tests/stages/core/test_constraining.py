"""Constraints that are drawn for prompts can be followed together, and are not followed by whoever ignores them: told by answers that are
put together here from what IFEval's paper says of each instruction, not from the code that checks them."""

import json
from itertools import combinations
from typing import Any

import pytest
from pydantic import ValidationError

from pedigree.configs.judging import constraining
from pedigree.configs.judging.constraining import Constrain, load_constraints
from pedigree.stages.core.added_constraints import constrained
from pedigree.stages.verifiers import check, verify
from pedigree.stages.verifiers.ifeval import CHECKS

RULES = load_constraints()
ENGLISH = "the road is long and it leads slowly from the old town over the hills and through the fields to where they all live"
SPOKEN = {
    "de": "der Fluss ist lang und fließt langsam durch die Stadt bis zum Meer",
    "es": "el río es largo y corre despacio por la ciudad hasta llegar al mar",
    "fr": "la rivière est longue et elle coule doucement à travers la ville jusqu'à la mer",
    "it": "il fiume è lungo e scorre lentamente attraverso la città fino al mare",
    "pt": "o rio é longo e corre devagar pela cidade até chegar ao mar",
    "nl": "de rivier is lang en stroomt langzaam door de stad naar de zee toe",
    "pl": "rzeka jest długa i płynie powoli przez miasto aż do samego morza",
    "ru": "река очень длинная и медленно течёт через город до самого моря",
    "sv": "floden är lång och rinner långsamt genom staden ända ut till havet",
    "tr": "nehir çok uzun ve şehrin içinden yavaşça denize kadar akıyor",
    "vi": "con sông rất dài và chảy chậm qua thành phố cho đến tận biển",
    "ar": "النهر طويل ويجري ببطء عبر المدينة حتى يصل إلى البحر",
    "hi": "नदी बहुत लंबी है और शहर से होकर धीरे धीरे समुद्र तक बहती है",
    "ko": "강은 아주 길고 도시를 지나 바다까지 천천히 흐른다",
}


def answer_to(instructions):
    """A text that follows all of them."""
    given = {one["id"].partition(":")[2]: one for one in instructions}
    least = {name: one for name, one in given.items() if "at least" in one.values()}
    language = given.get("response_language", {}).get("language")
    sentence = SPOKEN[language] if language else ENGLISH
    words = list(given.get("existence", {}).get("keywords", ()))
    words += [least["frequency"]["keyword"]] * least["frequency"]["frequency"] if "frequency" in least else []
    words += [least["letter_frequency"]["letter"] * least["letter_frequency"]["let_frequency"]] if "letter_frequency" in least else []
    words += ["NASA"] * least["capital_word_frequency"]["capital_frequency"] if "capital_word_frequency" in least else []
    words += ["[name]"] * given.get("number_placeholders", {}).get("num_placeholders", 0)
    words += ["*so*"] * given.get("number_highlighted_sections", {}).get("num_highlights", 0)
    body = " ".join([sentence, *words])
    if "number_words" in least:
        body = " ".join([body] + [sentence] * (least["number_words"]["num_words"] // 8))
    if "number_sentences" in least:
        body = f"{body}!" + f" {ENGLISH}!" * least["number_sentences"]["num_sentences"]
    if "constrained_response" in given:
        body += " My answer is yes."
    return _framed(given, body, " ".join(sentence.split()[:5]))


def _framed(given, text, more):
    sections = given.get("multiple_sections", {})
    for number in range(1, sections.get("num_sections", 0) + 1):
        text += f"\n{sections['section_spliter']} {number} {more}"
    text += f"\n* {more}" * given.get("number_bullet_lists", {}).get("num_bullets", 0)
    if "nth_paragraph_first_word" in given:
        one = given["nth_paragraph_first_word"]
        paragraphs = [text, *[more] * (one["num_paragraphs"] - 1)]
        paragraphs[one["nth_paragraph"] - 1] = f"{one['first_word']} {paragraphs[one['nth_paragraph'] - 1]}"
        text = "\n\n".join(paragraphs)
    if "number_paragraphs" in given:
        text = "\n***\n".join([text, *[more] * (given["number_paragraphs"]["num_paragraphs"] - 1)])
    text += f"\n<<{more}>>" if "title" in given else ""
    text += f"\n******\n{more}" if "two_responses" in given else ""
    text += f"\n{given['postscript']['postscript_marker']} {more}" if "postscript" in given else ""
    text += f" {given['end_checker']['end_phrase']}" if "end_checker" in given else ""
    text = f"{given['repeat_prompt']['prompt_to_repeat']}\n{text}" if "repeat_prompt" in given else text
    text = f'"{text}"' if "quotation" in given else text
    text = json.dumps(text, ensure_ascii=False) if "json_format" in given else text
    return text.lower() if "english_lowercase" in given else text.upper() if "english_capital" in given else text


def against(one):
    """A text that does not follow it."""
    match one:
        case {"id": "change_case:english_lowercase"}:
            return "The River"
        case {"id": "keywords:forbidden_words", "forbidden_words": [word, *_]}:
            return f"it is {word}"
        case {"id": "punctuation:no_comma"}:
            return "here, there"
        case {"capital_relation": "less than", "capital_frequency": number}:
            return "NASA " * number
        case {"let_relation": "less than", "let_frequency": number, "letter": letter}:
            return letter * number
        case {"relation": "less than", "frequency": number, "keyword": word}:
            return f"{word} " * number
        case {"relation": "less than", "num_sentences": number}:
            return "Go on! " * number
        case {"relation": "less than", "num_words": number}:
            return "on " * number
    return "It is what it is"


def prompt(number, **more):
    messages = [{"role": "user", "content": f"Tell me about river {number}."}]
    return {"id": f"p-{number}", "source": "s", "messages": messages, "verifier": None, **more}


def made(number, **config) -> Any:
    found = constrained(prompt(number), Constrain.model_validate(config), RULES)
    assert not isinstance(found, str), found
    return found


def test_all_25_instructions_are_there_and_take_the_arguments_that_are_drawn():
    assert set(RULES.instructions) == set(CHECKS)
    for name in CHECKS:
        rows = [made(number, instructions=[name]) for number in range(12)]
        for row in rows:
            check(row["verifier"])
        assert len({row["messages"][-1]["content"].partition("\n\n")[2] for row in rows}) > 1  # never the same words only


@pytest.mark.parametrize("name", CHECKS)
def test_who_follows_a_constraint_is_right_and_who_ignores_it_is_wrong(name):
    for number in range(6):
        verifier = made(number, instructions=[name])["verifier"]
        (one,) = verifier["instructions"]
        assert verify(verifier, answer_to([one])).score == 1.0, (one, answer_to([one]))
        assert [verify(verifier, text).score for text in (against(one), "", " \n")] == [0.0] * 3, one


def test_any_two_that_are_drawn_together_can_be_followed_together():
    """What `excludes` leaves: some 200 pairs, each in several forms."""
    together = 0
    for pair in combinations(RULES.instructions, 2):
        if pair[1] in RULES.incompatible[pair[0]]:
            continue
        together += 1
        for number in range(2):
            row = made(number, instructions=list(pair), min_constraints=2, max_constraints=2)
            instructions = row["verifier"]["instructions"]
            assert {one["id"] for one in instructions} == set(pair)
            told = verify(row["verifier"], answer_to(instructions))
            assert told.score == 1.0, (instructions, told.reason, answer_to(instructions))
    assert together > 150


def test_five_at_once_are_never_apart_and_can_be_followed():
    for number in range(40):
        row = made(number, min_constraints=5, max_constraints=5)
        instructions = row["verifier"]["instructions"]
        names = {one["id"] for one in instructions}
        assert len(names) == 5 and all(RULES.incompatible[name] & names == {name} for name in names)
        told = verify(row["verifier"], answer_to(instructions))
        assert told.score == 1.0, (instructions, told.reason, answer_to(instructions))


def test_the_number_is_drawn_between_the_bounds_and_fewer_are_a_part_of_more():
    counts = [len(made(number, min_constraints=1, max_constraints=3)["verifier"]["instructions"]) for number in range(300)]
    assert set(counts) == {1, 2, 3} and all(70 < counts.count(count) < 130 for count in (1, 2, 3))
    for number in range(20):
        few, many = (made(number, min_constraints=n, max_constraints=n)["verifier"]["instructions"] for n in (2, 4))
        assert many[:2] == few


def test_what_the_prompt_asks_for_already_stays_and_what_excludes_it_is_not_added():
    given = {"name": "ifeval", "mode": "loose", "instructions": [{"id": "change_case:english_capital"}]}
    seen = set()
    for number in range(40):
        row = constrained(prompt(number, verifier=given), Constrain(min_constraints=2, max_constraints=2, score="share"), RULES)
        assert not isinstance(row, str) and row["verifier"] is not None
        first, *added = row["verifier"]["instructions"]
        assert first == given["instructions"][0] and (row["verifier"]["mode"], row["verifier"]["score"]) == ("loose", "share")
        seen |= {one["id"] for one in added}
    assert len(seen) > 10 and not seen & RULES.incompatible["change_case:english_capital"]
    config = Constrain(instructions=("change_case:english_lowercase",))
    assert constrained(prompt(0, verifier=given), config, RULES) == "too few constraints fit it"
    assert constrained(prompt(0, verifier={"name": "math", "answer": "4"}), config, RULES) == "it has the verifier math"
    shared = constrained(prompt(0, verifier={"name": "ifeval", "instructions": [], "score": "share"}), config, RULES)
    assert not isinstance(shared, str) and shared["verifier"] and "score" not in shared["verifier"]  # as the stage says


def test_what_a_tool_has_said_gets_no_constraints():
    called = {"role": "call", "content": '{"name": "length", "arguments": {}}'}
    talk = [*prompt(1)["messages"], called, {"role": "tool", "content": "1230 km"}]
    assert constrained(prompt(1, messages=talk), Constrain(), RULES) == "it ends with the result of a call"


def test_the_last_turn_of_a_talk_gets_them_and_the_others_stay():
    talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hello!"}]
    messages = [*talk, {"role": "user", "content": " Name a river. "}]
    arguments = {"enable_thinking": False}
    row = constrained(
        prompt(1, messages=messages, template_arguments=arguments), Constrain(instructions=("combination:repeat_prompt",)), RULES
    )
    assert not isinstance(row, str) and row["verifier"] is not None
    assert row["id"] == "p-1/constrained" and row["messages"][:3] == talk and row.get("template_arguments") == arguments
    assert row["messages"][3]["content"].startswith(" Name a river. \n\n")
    assert row["verifier"]["instructions"] == [{"id": "combination:repeat_prompt", "prompt_to_repeat": "Name a river."}]


def test_the_words_are_identity_and_what_cannot_be_meant_is_told(tmp_path, monkeypatch):
    before = Constrain().model_dump(mode="json")
    text = constraining.CONSTRAINTS.read_text()
    monkeypatch.setattr(constraining, "CONSTRAINTS", tmp_path / "constraints.yaml")
    constraining.CONSTRAINTS.write_text(text.replace("Do not use any commas.", "Use no commas."))
    assert Constrain().model_dump(mode="json")["wording_sha256"] != before["wording_sha256"]
    with pytest.raises(ValidationError, match="has changed"):
        Constrain.model_validate(before)
    for given, problem in (
        ({"instructions": ["punctuation:no_coma"]}, "instruction 'punctuation:no_coma' is not one of change_case"),
        ({"instructions": ["punctuation:no_comma"] * 2}, "or several distinct ones"),
        ({"min_constraints": 3}, "max_constraints 1 is below min_constraints 3"),
        (
            {"instructions": ["punctuation:no_comma"], "min_constraints": 2, "max_constraints": 2},
            "min_constraints is 2, but instructions lists only 1",
        ),
    ):
        with pytest.raises(ValidationError, match=problem):
            Constrain.model_validate(given)


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("Write at least $num_words words.", "Write many words.", "must contain num_words"),
        ("Write at least $num_words words.", "Write at least $num_words of $words.", "and no other argument"),
        ("Write at least $num_words words.", "Write at least $ $num_words words.", "must contain num_words"),
        ("excludes: [combination:two_responses]", "excludes: [combination:three_responses]", "quotation excludes combination:three"),
        ("version: 1", "version: one", "version"),
    ],
)
def test_a_file_that_does_not_say_what_is_drawn_is_refused(tmp_path, monkeypatch, old, new, problem):
    text = constraining.CONSTRAINTS.read_text()
    assert old in text
    monkeypatch.setattr(constraining, "CONSTRAINTS", tmp_path / "constraints.yaml")
    constraining.CONSTRAINTS.write_text(text.replace(old, new))
    load_constraints.cache_clear()
    with pytest.raises(ValueError, match=f"(?s)constraints.yaml(:[0-9]+)?: .*{problem}"):
        load_constraints()
    load_constraints.cache_clear()
