from pydantic import TypeAdapter

from configs.datasets import Filter
from data import filters


def row(name, *texts, **more):
    roles = ("user", "assistant")
    return {"id": name, "messages": [{"role": roles[place % 2], "content": text} for place, text in enumerate(texts)], **more}


def apply(rows, *configs):
    kept, dropped = filters.apply([TypeAdapter(Filter).validate_python(config) for config in configs], rows)
    return [one["id"] for one in kept], [(one.row["id"], one.drop.reason, one.drop.evidence) for one in dropped]


def test_length_is_that_of_all_texts_the_answers_of_a_preference_included():
    rows = [row("a", "12345", "67890"), row("b", "12345", "678901"), row("c", "1234", answers=[{"text": "567"}, {"text": "890x"}])]
    assert apply(rows, {"type": "max_characters", "limit": 10}) == (
        ["a"],
        [("b", "max_characters", "11 > 10"), ("c", "max_characters", "11 > 10")],
    )


def test_duplicates_fold_case_and_space_but_not_words_or_borders():
    rows = [row("a", "Say it.", "Yes"), row("b", "say\n it.", "yes "), row("c", "Say it. Yes", ""), row("d", "Say it.", "No")]
    assert apply(rows, {"type": "exact_duplicates"}) == (["a", "c", "d"], [("b", "exact_duplicates", "same text as a")])


def test_keywords_are_whole_words():
    rows = [row("a", "As an AI, no"), row("b", "rain"), row("c", "c++ is fine"), row("d", "c+ is not")]
    assert apply(rows, {"type": "keywords", "words": ["ai", "C++"]}) == (["b", "d"], [("a", "keywords", "ai"), ("c", "keywords", "c++")])


def test_a_row_is_dropped_once_and_is_no_duplicate_of_a_row_that_is_gone_already():
    rows = [row("long", "x", "y" * 20), row("twin", "X", "y" * 20), row("kept", "x", "y")]
    configs = [{"type": "max_characters", "limit": 10}, {"type": "exact_duplicates"}]
    assert apply(rows, *configs)[1] == [("long", "max_characters", "21 > 10"), ("twin", "max_characters", "21 > 10")]
    assert [reason for _, reason, _ in apply(rows, *reversed(configs))[1]] == ["max_characters", "exact_duplicates"]
