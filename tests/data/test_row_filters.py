"""What each filter drops and what it leaves, with what it saw. Rows are conversations of a user and an assistant, by their texts."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter, ValidationError

from pedigree.configs.base.wordings import worded, wordings
from pedigree.configs.rows.filters import LANGUAGES, Filter
from pedigree.data.expectations import row_facts
from pedigree.data.filters import filtering, row_filters

TEMPLATES = Path(__file__).parents[2] / "configs" / "templates"
ROLES = ("user", "assistant")


def row(*texts: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": ROLES[place % 2], "content": text} for place, text in enumerate(texts)], **more}


def made(config: dict[str, Any]) -> Any:
    return TypeAdapter(Filter).validate_python(config)


def dropped(config: dict[str, Any], *rows: dict[str, Any]) -> dict[int, str]:
    """Place → evidence."""
    chosen = [made(config)]
    drops = filtering.decide(chosen, filtering.look(chosen, rows), [str(place) for place in range(len(rows))], lambda at: [])
    assert {drop.reason for drop in drops.values()} <= {config["type"]}
    return {place: drop.evidence for place, drop in drops.items()}


def refused(config: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(said)):
        made(config)


def test_turns_are_those_of_user_and_assistant_and_the_answers_of_a_preference_are_one():
    system = {"role": "system", "content": "s"}
    rows = [
        row("a"),
        row("a", "b"),
        {"messages": [system, *row("a", "b", "c")["messages"]]},
        row("a", answers=[{"text": "b"}, {"text": "c"}]),
    ]
    assert dropped({"type": "turns", "min": 2, "max": 2}, *rows) == {0: "1 < 2", 2: "3 > 2"}
    assert dropped({"type": "turns", "max": 3}, *rows) == {}
    assert row_facts.look(["turns"], rows)["turns"].to_pylist() == [1, 2, 3, 2]  # what expectations look at
    refused({"type": "turns", "min": 3, "max": 2}, "min 3 exceeds max 2 turns")
    refused({"type": "turns"}, "min is 1 and max is not set, so no row is dropped: raise min, or set max")


def test_empty_and_repeated_turns():
    rows = [
        row("Say it.", "\u200b \u2060\n"),
        row("Say it!", " say  IT!"),
        row("a", "Sure.", "b", "sure."),
        row("a", "Sure.", "b", "No.", "c", "Sure."),  # not one after the other
        row("go on", "One.", "go on", "Two."),  # users may
        row("Say it.", answers=[{"text": "it"}, {"text": "Say it."}]),
        row("One.", "Two.", "Three.", answers=[{"text": "Two."}, {"text": "Four."}]),
    ]
    assert dropped({"type": "empty_or_repeated_turns"}, *rows) == {
        0: "nothing visible in a turn of the assistant",
        1: "the answer repeats the question: say it!",
        2: "the answer repeats the answer before it: sure.",
        5: "the answer repeats the question: say it.",
        6: "the answer repeats the answer before it: two.",
    }


def test_a_pattern_is_searched_in_the_turns_of_the_roles_and_drops_or_keeps():
    rows = [row("A B", "c"), row("c", "a b"), row("c", "d", answers=[{"text": "x"}, {"text": "a  b"}])]
    assert dropped({"type": "pattern", "regex": r"a\s+b"}, *rows) == {1: "a b", 2: "a  b"}
    assert dropped({"type": "pattern", "regex": r"(?i)a\s+b", "roles": ["user"]}, *rows) == {0: "A B"}
    assert dropped({"type": "pattern", "regex": r"(?i)a\s+b", "roles": ["user"], "keep": "matching"}, *rows) == {
        1: "no match",
        2: "no match",
    }


def test_texts_in_template_arguments_are_the_systems():
    rows = [row("c", "d", template_arguments={"tools": ["a b"]}), row("c", "d")]
    assert dropped({"type": "pattern", "regex": "a b"}, *rows) == {0: "a b"}
    assert dropped({"type": "pattern", "regex": "a b", "roles": ["user", "assistant"]}, *rows) == {}


@pytest.mark.parametrize(
    ("regex", "said"),
    [("(a", "'(a' is not a valid Python regular expression: missing ), unterminated subpattern"), ("a*", "matches the empty string")],
)
def test_a_regex_that_is_none_or_matches_all_is_refused_when_the_recipe_is_read(regex, said):
    refused({"type": "pattern", "regex": regex}, said)
    refused({"type": "cutoff_dates", "patterns": [regex]}, said)
    refused({"type": "identity", "claims": [regex]}, said)


def test_a_regex_that_python_cannot_hold_is_refused_and_so_is_a_word_of_nothing():
    refused(
        {"type": "pattern", "regex": "a{99999999999}"}, "'a{99999999999}' is not a valid Python regular expression: the repetition number"
    )
    refused({"type": "pattern", "regex": "(" * 5000 + "a" + ")" * 5000}, "is not a valid Python regular expression: maximum recursion")
    refused({"type": "keywords", "words": ["a", ""]}, "a search text is empty")


def test_control_tokens_of_every_shipped_template_are_found_wherever_they_stand():
    spelt = {token for file in TEMPLATES.glob("*.jinja") for token in re.findall(r"<\|[^|>\s]+\|>", file.read_text())}
    assert spelt <= set(wordings("control_tokens")) and len(spelt) >= 7
    for place, token in enumerate(sorted(spelt)):
        texts = ["a", "b"]
        texts[place % 2] += f"{token}user"
        assert dropped({"type": "control_tokens"}, row(*texts), row("a", answers=[{"text": f"x{token}"}])) == {0: token, 1: token}
    assert dropped({"type": "control_tokens"}, row("a < b | c > d", "[inst] <|>")) == {}
    assert dropped({"type": "control_tokens", "tokens": ["</s>"]}, row("a</s>", "<|im_end|>"), row("a", "<|im_end|>")) == {0: "</s>"}


REFUSALS = [
    "I'm sorry, but I can't help with that.",
    "I’m sorry, but I cannot do this.",
    "  **I cannot assist** with it.",
    '"As an AI language model, I …',
    "I\ncan't provide that.",
    "Unfortunately, I am unable to browse.",
    "SORRY, BUT I CAN'T SAY.",
]
ANSWERS = [
    "I'm sorry to hear that. Have you tried turning it off?",
    "I cannot recommend this book enough!",
    "I can help.",
    "As an AI researcher I read.",
    "Say: I'm sorry, but I can't help.",
    "Apologies are due: I cannot help it is a phrase.",
]


def test_refusals_are_beginnings_of_the_assistants_turns():
    rows = [row("a", text) for text in (*REFUSALS, *ANSWERS)] + [row(REFUSALS[0], "ok")]
    assert set(dropped({"type": "refusals"}, *rows)) == set(range(len(REFUSALS)))
    assert dropped({"type": "refusals"}, row("a", "ok", "b", REFUSALS[0])) == {0: REFUSALS[0].casefold()}
    best, worst = [{"text": REFUSALS[0]}, {"text": "ok"}], [{"text": "ok"}, {"text": REFUSALS[0]}]
    assert set(dropped({"type": "refusals"}, row("a", answers=best), row("a", answers=worst))) == {0}
    assert set(dropped({"type": "refusals", "phrases": ["No Way"]}, row("a", "no  way!"), row("a", "no ways"), row("a", REFUSALS[0]))) == {
        0
    }
    refused({"type": "refusals", "phrases": [" "]}, "a search text is empty")


CLAIMS = [
    "I am ChatGPT.",
    "Hello! I'm Claude, an assistant.",
    "I’m a large language model trained by OpenAI.",
    "My name is Gemini.",
    "I am an AI assistant called Qwen2.",
    "As an AI model developed by OpenAI, I have no opinions.",
    "OpenAI created me.",
    "I was created by a team of researchers at the firm and trained by Mistral AI.",
    "I am an AI language model, GPT-4.",
    "As ChatGPT, I can.",
    "My developer is Anthropic.",
    "I am a language model trained by OpenAI.",
    "I was created by Anthropic.",
    "I'm an AI assistant developed by Google.",
    "I am Assistant, a large language model that was trained by OpenAI.",
]
NO_CLAIMS = [
    "GPT-4 was developed by OpenAI.",
    "I am a Gemini, and my moon is in Leo.",
    "I am claudication's worst enemy.",
    "Claude Monet painted it.",
    "I read that Anthropic made a model. It is large.",
    "You can ask ChatGPT.",
    "I am an assistant trained by your company.",
    "I am writing to apply for the certificate provided by Google.",
    "I've been using Word, which is developed by Microsoft.",
    "I'm using a phone made by Google.",
]


def test_identity_is_what_the_assistant_claims_and_not_what_it_speaks_of():
    names = [*wordings("names"), "Qwen2"]
    rows = [row("Who are you?", text) for text in (*CLAIMS, *NO_CLAIMS)] + [row("I am ChatGPT.", "Hello.")]
    found = dropped({"type": "identity", "names": names}, *rows)
    assert [place for place in range(len(rows)) if place in found] == list(range(len(CLAIMS)))
    assert found[1] == "I'm Claude"
    own = {"type": "identity", "names": names, "allow": ["ChatGPT", "OpenAI"]}
    assert set(dropped(own, *rows[:3])) == {1}
    for allowed, other in (("GPT", "GPT-4"), ("GPT-4", "GPT")):
        mine = {"type": "identity", "names": ["GPT", "GPT-4"], "allow": [allowed]}
        assert dropped(mine, row("a", f"I am {allowed}."), row("a", f"I am {other}.")) == {1: f"I am {other}"}


def test_an_allowed_name_must_be_one_and_leave_others():
    refused({"type": "identity", "allow": ["Hal"]}, "allow Hal is not one of the names: Alibaba")
    refused({"type": "identity", "names": ["Hal"], "allow": ["Hal"]}, "allow contains all of the names")
    refused({"type": "identity", "claims": ["I am Hal"]}, "'I am Hal' must contain {name} exactly once")
    refused({"type": "identity", "claims": ["(?P<name>i) am {name}"]}, "redefinition of group name")


def test_a_claim_that_matches_without_a_name_is_none():
    claim = {"type": "identity", "names": ["Hal"], "claims": ["i am a bot|answer (?:3|{name})"]}
    assert dropped(claim, row("a", "I am a bot. Answer 3"), row("a", "I am a bot. Answer Hal")) == {1: "Answer Hal"}


CUTOFFS = [
    "As of my last update in September 2021, it was so.",
    "As of my last knowledge update, no.",
    "My knowledge cutoff is 2023.",
    "The training data's cut-off was then.",
    "My training data only goes up to 2021.",
    "I was last updated in April.",
    "As of my knowledge, so.",
]
NO_CUTOFFS = [
    "As of 2021 the law holds.",
    "The last update came in September 2021.",
    "My knowledge of 1920s jazz is small.",
    "Cut off the data here.",
    "The data cutoff for the trial was May 2020.",
]


def test_cutoff_dates_are_those_of_the_speaker():
    rows = [row("a", text) for text in (*CUTOFFS, *NO_CUTOFFS)] + [row(CUTOFFS[0], "ok")]
    found = dropped({"type": "cutoff_dates"}, *rows)
    assert list(found) == list(range(len(CUTOFFS))) and found[0] == "As of my last update"


def test_each_pattern_of_cutoff_dates_is_one_by_itself():
    patterns = ["(?i)as of my", r"(a)x\1", r"(b)x\1"]  # of joined ones, a flag stands amidst, and the third looks for bxa
    assert dropped({"type": "cutoff_dates", "patterns": patterns}, row("a", "As of MY day"), row("a", "bxb"), row("a", "bxa")) == {
        0: "As of MY",
        1: "bxb",
    }


def test_shares_of_repeated_parts_by_hand():
    assert row_filters.repeated_share(["ab", "c", "ab", "ab"]) == pytest.approx(4 / 7)  # of ab's three, two
    assert row_filters.repeated_share([]) == 0 == row_filters.repeated_share(["a", "b"])
    # "a bc" twice, "bc d" twice: of equal count the one of more characters, of equal ones the later letter; 2 * 3 of 9 characters
    assert row_filters.most_frequent("a bc d a bc d e".split(), 2) == ("bc d", 2, pytest.approx(6 / 9))
    assert row_filters.most_frequent("ha ha ha ha".split(), 2) == ("ha ha", 3, 1.0)  # 3 * 4 of 8, and no more than all
    assert row_filters.most_frequent("a b c".split(), 2)[2] == 0 == row_filters.most_frequent(["a"], 2)[2]


def test_repetition_by_lines_paragraphs_and_ngrams_in_texts_that_are_long_enough():
    words = [f"w{number:02d}" for number in range(60)]
    fine, twice = " ".join(words), "\n".join([" ".join(words[:20]), " ".join(words[20:]), " ".join(words[:20])])
    verse = f"{' '.join(words[:20])}\n\n{' '.join(words[20:])}\n\n{' '.join(words[:20])}"
    phrase = " ".join(word if number % 3 else "again and" for number, word in enumerate(words))
    rows = [row(twice, fine), row("a", twice), row("a", verse), row("a", phrase), row("a", "no no no no no no")]
    rows += [row("a", answers=[{"text": fine}, {"text": twice}])]
    assert dropped({"type": "repetition"}, *rows) == {
        1: "0.25 in repeated lines > 0.2",  # 79 of 79 + 159 + 79
        2: "0.25 in repeated lines > 0.2",
        3: "0.57 in 20 times 'again and' > 0.2",  # 20 * 8 of 20 * 8 + 40 * 3
    }
    loose = {"type": "repetition", "lines": 1.0, "ngrams": [1.0]}
    assert dropped(loose, *rows) == {2: "0.25 in repeated paragraphs > 0.2"}
    assert set(dropped({**loose, "paragraphs": 1.0, "ngrams": [0.5], "min_words": 5}, *rows)) == {3, 4}
    refused({"type": "repetition", "ngrams": [0.2, 1.5]}, "ngrams 1.5 must be above 0 and at most 1")


ENGLISH, GERMAN = (
    "This is a sentence of plain English words about the weather.",
    "Das ist ein Satz aus einfachen deutschen Wörtern über das Wetter.",
)


def test_languages_that_stay_are_listed_and_what_is_none_stays_or_goes():
    code = "```python\n" + "for wort in sätze: drucke(wort, mit, noch, einem, wort)\n" * 20 + "```\n"
    rows = [
        row("Tell me.", ENGLISH),
        row("Sag es mir.", GERMAN),
        row("2 + 2 = ?", "4"),
        row("Please explain this code to me.", code + ENGLISH),
    ]
    assert dropped({"type": "language", "codes": ["en"]}, *rows) == {1: "de"}
    assert dropped({"type": "language", "codes": ["en", "de"], "unknown": "drop"}, *rows) == {2: "unknown"}
    assert (
        dropped({"type": "language", "codes": ["de"], "characters": 60}, row("Das ist ein Satz, der lang genug ist. " * 2, ENGLISH * 9))
        == {}
    )
    refused({"type": "language", "codes": ["zh"]}, "unsupported language zh; supported: af, ar,")


def test_the_languages_are_langdetects():
    import langdetect

    assert set(LANGUAGES) == {path.name for path in (Path(langdetect.__file__).parent / "profiles").iterdir()}


SPOKEN = {
    "ar": (
        ["عذرًا، لا يمكنني مساعدتك في ذلك.", "عذرًا على التأخير، إليك الإجابة."],
        ["أنا نموذج لغوي تم تدريبه من قبل OpenAI.", "أنا أستخدم Google كل يوم."],
    ),
    "de": (
        ["Es tut mir leid, aber ich kann dir dabei nicht helfen.", "Es tut mir leid, das zu hören! Wie geht es dir?"],
        ["Ich bin ein Sprachmodell, das von OpenAI entwickelt wurde.", "Ich bin überzeugt, dass die von Google entwickelte App hilft."],
    ),
    "es": (
        ["¡Lo siento, pero no puedo ayudarte con eso!", "Lo siento mucho por tu pérdida."],
        ["Soy ChatGPT, un modelo de lenguaje.", "Soy usuario de ChatGPT."],
    ),
    "fr": (
        ["Je suis désolé, mais je ne peux pas répondre à cette question.", "Je suis désolé d’apprendre cela."],
        ["J’ai été créé par OpenAI.", "Je suis un assistant qui utilise Google."],
    ),
    "it": (
        ["Mi dispiace, ma non posso rispondere a questa domanda.", "Mi dispiace molto per la tua perdita."],
        ["Sono stato sviluppato da OpenAI.", "Sono un cliente di Google."],
    ),
    "ja": (
        ["申し訳ありませんが、その質問にはお答えできません。", "申し訳ありませんでした。訂正します。"],
        ["私はChatGPTです。", "私はGoogleの社員です。"],
    ),
    "ko": (
        ["죄송하지만 그 요청은 도와드릴 수 없습니다.", "죄송하지만 역이 어디에 있나요?"],
        ["저는 OpenAI에서 개발한 언어 모델입니다.", "저는 Google에서 개발자로 일합니다."],
    ),
    "pt": (
        ["Desculpe, mas não posso ajudar com isso.", "Desculpe o atraso! Segue o resumo."],
        ["Eu sou um modelo de linguagem treinado pela OpenAI.", "Eu sou fã do trabalho feito pela Google."],
    ),
    "ru": (
        ["Извините, но я не могу помочь с этим.", "Извините за задержку. Вот ответ."],
        ["Я — языковая модель, созданная OpenAI.", "Я пользуюсь моделью, созданной OpenAI."],
    ),
    "zh-cn": (["很抱歉，我无法回答这个问题。", "很抱歉听到这个消息。"], ["我是由OpenAI开发的人工智能。", "我是ChatGPT的用户。"]),
    "zh-tw": (["很抱歉，我無法回答這個問題。", "很抱歉聽到這個消息。"], ["我是阿里雲開發的通義千問。", "我是ChatGPT的用戶。"]),
}
"""Language → (a refusal and none, a claim and none)."""


@pytest.mark.parametrize(("place", "kind"), enumerate(("refusals", "identity")))
def test_each_language_has_lists_and_english_alone_is_looked_for_where_none_is_named(place, kind):
    assert set(worded()) - {"en"} == set(SPOKEN) <= set(LANGUAGES)
    said = {language: [row("a", text) for text in texts[place]] for language, texts in SPOKEN.items()}
    for language, rows in said.items():
        assert set(dropped({"type": kind, "languages": [language]}, *rows)) == {0}, language
    everything = [one for rows in said.values() for one in rows]
    assert set(dropped({"type": kind, "languages": list(SPOKEN)}, *everything)) == set(range(0, len(everything), 2))
    assert dropped({"type": kind}, *everything) == {} == dropped({"type": kind, "languages": ["en"]}, *everything)


def test_languages_are_no_identity_but_what_they_stand_for_is():
    plain, several = made({"type": "refusals"}).model_dump(), made({"type": "refusals", "languages": ["de", "en"]}).model_dump()
    assert plain == {"type": "refusals", "phrases": wordings("refusals")} and plain["phrases"][0] == "as a language model"
    assert several["phrases"] == (*wordings("refusals", ("de",)), *wordings("refusals")) and made(several).model_dump() == several
    assert "千问" in made({"type": "identity", "languages": ["zh-cn"]}).model_dump()["names"]
    assert made({"type": "identity", "languages": ["de"]}).model_dump()["names"] == wordings("names")
    refused({"type": "refusals", "languages": ["en", "tlh"]}, "no lists for tlh: use en, ar, de, es, fr, it, ja, ko,")
    refused(
        {"type": "refusals", "languages": ["de"], "phrases": ["nein"]}, "languages has no effect together with phrases: remove one of them"
    )
    refused(
        {"type": "identity", "languages": ["de"], "names": ["Hal"], "claims": ["bin {name}"]}, "no effect together with names and claims"
    )


def test_lists_that_a_filter_takes_from_the_project_stand_in_the_dump_of_its_config():
    """So the key of what is filtered changes with them, and an old record says what was looked for."""
    for kind, field in (("refusals", "phrases"), ("control_tokens", "tokens"), ("identity", "claims"), ("cutoff_dates", "patterns")):
        one = made({"type": kind})
        assert len(one.model_dump(mode="json")[field]) > 4 and made(one.model_dump(mode="json")) == one
    for language in worded():
        phrases, every = wordings("refusals", (language,)), made({"type": "identity", "languages": [language]}).model_dump()
        assert list(phrases) == sorted(set(phrases)) and len(wordings("claims", (language,))) > 1 and made(every).model_dump() == every


# --- filters together --------------------------------------------------------------------------------------------------


def named(name: str, *texts: str, **more: Any) -> dict[str, Any]:
    return {"id": name, **row(*texts, **more)}


def apply(rows, *configs):
    """The same whatever parts the rows are looked at in."""
    chosen, ids = [made(config) for config in configs], [one["id"] for one in rows]
    found = []
    for size in (len(rows), 1, 2):
        parts = [rows[start : start + size] for start in range(0, len(rows), size)]
        seen = [filtering.look(chosen, part) for part in parts]
        facts = [np.concatenate(noted) for noted in zip(*seen, strict=True)]
        found.append(filtering.decide(chosen, facts, ids, lambda places: [rows[place] for place in places]))
    assert found[0] == found[1] == found[2]
    dropped = [(ids[place], one.reason, one.evidence) for place, one in sorted(found[0].items())]
    return [name for place, name in enumerate(ids) if place not in found[0]], dropped


def test_length_is_that_of_all_texts_the_answers_of_a_preference_included():
    rows = [named("a", "12345", "67890"), named("b", "12345", "678901"), named("c", "1234", answers=[{"text": "567"}, {"text": "890x"}])]
    assert apply(rows, {"type": "max_characters", "limit": 10}) == (
        ["a"],
        [("b", "max_characters", "11 > 10"), ("c", "max_characters", "11 > 10")],
    )


def test_duplicates_fold_case_and_space_but_not_words_or_borders():
    rows = [named("a", "Say it.", "Yes"), named("b", "say\n it.", "yes "), named("c", "Say it. Yes", ""), named("d", "Say it.", "No")]
    assert apply(rows, {"type": "exact_duplicates"}) == (["a", "c", "d"], [("b", "exact_duplicates", "same text as a")])


@pytest.mark.parametrize("kind", [{"type": "exact_duplicates"}, *({"type": "near_duplicates", "shingle": size} for size in (1, 5))])
@pytest.mark.parametrize("text", ["one two three four five six seven", "我们在这里讨论如何", ""])
def test_rows_under_other_template_arguments_are_no_duplicates(kind, text):
    arguments = [{}, {"enable_thinking": True, "k": 1}, {"enable_thinking": False, "k": 1}, {"k": 1, "enable_thinking": True}, {}]
    rows = [named(str(place), text, **({"template_arguments": given} if given else {})) for place, given in enumerate(arguments)]
    assert apply(rows, kind)[0] == ["0", "1", "2"]


def test_keywords_are_whole_words():
    rows = [named("a", "As an AI, no"), named("b", "rain"), named("c", "c++ is fine"), named("d", "c+ is not")]
    assert apply(rows, {"type": "keywords", "words": ["ai", "C++"]}) == (["b", "d"], [("a", "keywords", "ai"), ("c", "keywords", "c++")])


@pytest.mark.parametrize(
    ("word", "text"),
    [
        ("机器人", "我是机器人。"), ("ロボット", "私はロボットです"), ("人", "人々"), ("로봇", "저는 로봇입니다"),
        ("หุ่นยนต์", "ฉันเป็นหุ่นยนต์ครับ"), ("delve", "用delve这个词"),
        ("cafe\u0301", "Ein CAFÉ."), ("café", "Ein Cafe\u0301."), ("straße", "STRASSE"),
    ],
)  # fmt: skip
def test_keywords_are_found_where_words_have_no_spaces_and_accents_are_written_apart(word, text):
    assert list(dropped({"type": "keywords", "words": [word]}, row("Hello.", text), row("Hello.", "Hello!"))) == [0]


@pytest.mark.parametrize(("word", "text"), [("delve", "delves"), ("delve", "updelve"), ("cafe", "Ein Cafe\u0301."), ("7", "机器人17")])
def test_parts_of_words_are_no_keywords(word, text):
    assert not dropped({"type": "keywords", "words": [word]}, row("Hello.", text))


def test_a_row_is_dropped_once_and_is_no_duplicate_of_a_row_that_is_gone_already():
    rows = [named("long", "x", "y" * 20), named("twin", "X", "y" * 20), named("kept", "x", "y")]
    configs = [{"type": "max_characters", "limit": 10}, {"type": "exact_duplicates"}]
    assert apply(rows, *configs)[1] == [("long", "max_characters", "21 > 10"), ("twin", "max_characters", "21 > 10")]
    assert [reason for _, reason, _ in apply(rows, *reversed(configs))[1]] == ["max_characters", "exact_duplicates"]


def test_all_of_many_equal_rows_are_repeated_by_the_first_that_is_left():
    rows = [named(str(number), "x" if number % 3 else "y" * 30) for number in range(12)]
    kept, dropped = apply(rows, {"type": "max_characters", "limit": 10}, {"type": "exact_duplicates"})
    assert kept == ["1"]
    assert [one for one in dropped if one[1] == "exact_duplicates"] == [
        (name, "exact_duplicates", "same text as 1") for name in ("2", "4", "5", "7", "8", "10", "11")
    ]


def test_ids_drop_all_rows_of_the_same_content_and_name_no_others():
    rows = [named("a-0123456789abcdef", "x"), named("b-0123456789abcdef", "x"), named("a-0123456789abcdef", "x")]
    chosen = [made({"type": "ids", "ids": ["a-0123456789abcdef", "c"]})]
    facts = filtering.look(chosen, rows)
    assert sorted(filtering.decide(chosen, facts, [one["id"] for one in rows], list)) == [0, 2]
    assert filtering.unknown_ids(chosen, facts) == ["c"]
    with pytest.raises(ValidationError, match="ends in a copy number, but all copies are dropped: write 'a-0123456789abcdef'"):
        made({"type": "ids", "ids": ["a-0123456789abcdef-2"]})
