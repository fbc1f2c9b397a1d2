import numpy as np
import pytest
from pydantic import TypeAdapter, ValidationError

from pedigree.configs.rows.filters import Filter
from pedigree.data.filters import filtering


def row(name, *texts, **more):
    roles = ("user", "assistant")
    return {"id": name, "messages": [{"role": roles[place % 2], "content": text} for place, text in enumerate(texts)], **more}


def apply(rows, *configs):
    """The same whatever parts the rows are looked at in."""
    chosen, ids = [TypeAdapter(Filter).validate_python(config) for config in configs], [one["id"] for one in rows]
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
    rows = [row("a", "12345", "67890"), row("b", "12345", "678901"), row("c", "1234", answers=[{"text": "567"}, {"text": "890x"}])]
    assert apply(rows, {"type": "max_characters", "limit": 10}) == (
        ["a"],
        [("b", "max_characters", "11 > 10"), ("c", "max_characters", "11 > 10")],
    )


def test_duplicates_fold_case_and_space_but_not_words_or_borders():
    rows = [row("a", "Say it.", "Yes"), row("b", "say\n it.", "yes "), row("c", "Say it. Yes", ""), row("d", "Say it.", "No")]
    assert apply(rows, {"type": "exact_duplicates"}) == (["a", "c", "d"], [("b", "exact_duplicates", "same text as a")])


@pytest.mark.parametrize("kind", [{"type": "exact_duplicates"}, *({"type": "near_duplicates", "shingle": size} for size in (1, 5))])
@pytest.mark.parametrize("text", ["one two three four five six seven", "我们在这里讨论如何", ""])
def test_rows_under_other_template_arguments_are_no_duplicates(kind, text):
    arguments = [{}, {"enable_thinking": True, "k": 1}, {"enable_thinking": False, "k": 1}, {"k": 1, "enable_thinking": True}, {}]
    rows = [row(str(place), text, template_arguments=given) if given else row(str(place), text) for place, given in enumerate(arguments)]
    assert apply(rows, kind)[0] == ["0", "1", "2"]


def test_keywords_are_whole_words():
    rows = [row("a", "As an AI, no"), row("b", "rain"), row("c", "c++ is fine"), row("d", "c+ is not")]
    assert apply(rows, {"type": "keywords", "words": ["ai", "C++"]}) == (["b", "d"], [("a", "keywords", "ai"), ("c", "keywords", "c++")])


def test_a_row_is_dropped_once_and_is_no_duplicate_of_a_row_that_is_gone_already():
    rows = [row("long", "x", "y" * 20), row("twin", "X", "y" * 20), row("kept", "x", "y")]
    configs = [{"type": "max_characters", "limit": 10}, {"type": "exact_duplicates"}]
    assert apply(rows, *configs)[1] == [("long", "max_characters", "21 > 10"), ("twin", "max_characters", "21 > 10")]
    assert [reason for _, reason, _ in apply(rows, *reversed(configs))[1]] == ["max_characters", "exact_duplicates"]


def test_all_of_many_equal_rows_are_repeated_by_the_first_that_is_left():
    rows = [row(str(number), "x" if number % 3 else "y" * 30) for number in range(12)]
    kept, dropped = apply(rows, {"type": "max_characters", "limit": 10}, {"type": "exact_duplicates"})
    assert kept == ["1"]
    assert [one for one in dropped if one[1] == "exact_duplicates"] == [
        (name, "exact_duplicates", "same text as 1") for name in ("2", "4", "5", "7", "8", "10", "11")
    ]


def test_nothing_is_dropped_of_nothing():
    assert filtering.decide([], [], [], list) == {}
    assert apply([row("a", "x")], {"type": "exact_duplicates"}, {"type": "exact_duplicates"}) == (["a"], [])


def test_ids_drop_all_rows_of_the_same_content_and_name_no_others():
    rows = [row("a-0123456789abcdef", "x"), row("b-0123456789abcdef", "x"), row("a-0123456789abcdef", "x")]
    chosen = [TypeAdapter(Filter).validate_python({"type": "ids", "ids": ["a-0123456789abcdef", "c"]})]
    facts = filtering.look(chosen, rows)
    assert sorted(filtering.decide(chosen, facts, [one["id"] for one in rows], list)) == [0, 2]
    assert filtering.unknown_ids(chosen, facts) == ["c"]
    with pytest.raises(ValidationError, match="ends in a copy number, but all copies are dropped: write 'a-0123456789abcdef'"):
        TypeAdapter(Filter).validate_python({"type": "ids", "ids": ["a-0123456789abcdef-2"]})
