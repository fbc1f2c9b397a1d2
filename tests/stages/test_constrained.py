"""Prompts that get constraints, and pairs of answers that knew of them with answers that did not: from artifacts to artifacts."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
from data_lab import parents_of, publish, rows_of, run_stage

from pedigree.data.records import columns
from pedigree.stages.job.failures import StageError
from pedigree.stages.pair import run as pair
from pedigree.stages.verifiers import verify

NO_COMMA = {"name": "ifeval", "instructions": [{"id": "punctuation:no_comma"}]}


def prompt(name: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"Tell me about {name}."}]
    return {"id": name, "source": "s", "messages": messages, "verifier": None, **more}


def evidence(artifact, name):
    return json.loads((artifact.path / "evidence" / name).read_text())


POOL = [prompt(f"p{number}") for number in range(40)]


def constrained(folder, rows, **config):
    return run_stage(folder / "made", "constrain", config, prompts=publish(folder / "pool", "prompt", rows))


def test_prompts_keep_their_order_and_their_source_and_name_what_they_were_made_of(tmp_path):
    odd = prompt("odd", verifier={"name": "arithmetic", "answer": "4"})
    full = prompt("full", verifier={"name": "ifeval", "instructions": [{"id": "combination:repeat_prompt", "prompt_to_repeat": "x"}]})
    narrow = ["punctuation:no_comma", "startend:quotation"]
    made = constrained(tmp_path, [*POOL, odd, full], instructions=narrow, max_constraints=2, score="share")
    rows = rows_of(made)
    assert [(row["id"], row["source"]) for row in rows] == [(f"p{number}/constrained", "s") for number in range(40)]
    assert parents_of(made) == {f"p{number}/constrained": [f"p{number}"] for number in range(40)}
    for row, given in zip(rows, POOL, strict=True):
        assert row["messages"][0]["content"].startswith(f"{given['messages'][0]['content']}\n\n") and row["verifier"]["score"] == "share"
        assert verify(row["verifier"], '"No"').score == 1.0 and verify(row["verifier"], "Yes, no").score == 0.0
    metrics = made.record.metrics
    assert metrics["dropped"] == {"it has the verifier arithmetic": 1, "too few constraints fit it": 1}
    one = metrics["with"]["1"]
    assert metrics["with"] == {"1": one, "2": 40 - one} and 10 < one < 30 and metrics["prompts"] == 42
    assert metrics["constraints"] == one + 2 * (40 - one) == sum(metrics["added"].values())
    assert evidence(made, "counts.json") == {"read": 42, "kept": 40, "drops": metrics["dropped"]}
    assert evidence(made, "constraints.json") == {"added": metrics["added"], "with": metrics["with"]}
    with pytest.raises(StageError, match=r"0 prompts < min_rows 1 of 1 \(\{'it has the verifier arithmetic': 1\}\): use prompts"):
        constrained(tmp_path / "none", [odd])


def test_neither_files_nor_blocks_nor_other_prompts_change_what_a_prompt_gets(tmp_path, monkeypatch):
    whole = constrained(tmp_path / "whole", POOL, max_constraints=3)
    monkeypatch.setattr(columns, "ROWS_PER_FILE", 7)
    monkeypatch.setattr(columns, "BLOCK", 3)
    cut = constrained(tmp_path / "cut", POOL[::-1], max_constraints=3)
    assert len(list(cut.payload.iterdir())) == 6 and rows_of(cut) == rows_of(whole)[::-1]
    monkeypatch.undo()
    assert publish(tmp_path / "again", "prompt", rows_of(whole)).record.content == whole.record.content


# --- pairs ---------------------------------------------------------------------------------------------------------------


def answer(prompt_id: str, text: str, number: int = 0, verifier: Any = None, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Without commas: go." if verifier else "Go."}]
    return {
        "id": f"{prompt_id}/sft/{number}", "prompt_id": prompt_id, "source": "s", "messages": messages, "verifier": verifier,
        "policy": "sft", "policy_content": "c", "on_policy": False, "index": number, "seed": 1, "prompt_ids": [1], "response_ids": [5],
        "logprobs": [-1.0], "text": text, "finish_reason": "stop", **more,
    }  # fmt: skip


def under(base: str, text: str, number: int = 0, **more: Any) -> dict[str, Any]:
    return answer(f"{base}/constrained", text, number, **{"verifier": NO_COMMA, **more})


def paired(folder, constrained, relaxed, **config):
    own, others = publish(folder / "own", "completion", constrained), publish(folder / "others", "completion", relaxed)
    return run_stage(folder / "made", "pair", {"strategy": {"type": "relaxed"}} | config, completions=own, relaxed=others)


OWN = [
    under("good", "No commas"),
    under("wrong", "Well, no"),
    under("easy", "No commas"),
    under("alone", "No commas"),
    under("same", "a, b", verifier=None),
    answer("plain", "No commas", verifier=NO_COMMA),
]
OTHERS = [
    answer("same", "a, b"),
    answer("good", "One, two"),
    answer("wrong", "One, two"),
    answer("easy", "One two"),
    answer("stray", "One, two"),
    answer("stray", "Two, three", 1),
    answer("plain", "One, two"),
]


def test_the_answer_that_did_not_know_of_the_constraint_is_rejected_under_the_prompt_that_has_it(tmp_path):
    preferences = paired(tmp_path, OWN, OTHERS)
    (row,) = rows_of(preferences)
    assert (row["id"], row["messages"]) == ("good/constrained/relaxed", OWN[0]["messages"])
    assert parents_of(preferences) == {row["id"]: ["good/constrained"]}
    assert [(one["text"], one["score"]) for one in row["answers"]] == [("No commas", 1.0), ("One, two", 0.0)]
    assert preferences.record.metrics["dropped"] == {
        "no answer follows the constraints": 2,  # `same` has no verifier
        "answers without the constraints follow them, too": 1,
        "no answer to the prompt that it was made of": 1,
        "made of no other prompt": 1,
        "no prompt was made of it": 2,  # `stray` and `plain`
    }
    assert preferences.record.metrics["mean_margin"] == 1.0


def test_no_verifier_runs_for_a_prompt_that_was_made_of_no_other(tmp_path, monkeypatch):
    """Of those that no pair is made of, a program or a proof may take seconds each."""
    asked = []
    monkeypatch.setattr(pair, "verify", lambda verifier, text: asked.append(text) or SimpleNamespace(score=1.0 if text == "a" else 0.0))
    given = [under("good", "a"), answer("plain", "b", verifier=NO_COMMA)], [answer("good", "c"), answer("plain", "d")]
    read = [publish(tmp_path / name, "completion", rows) for name, rows in zip("xy", given, strict=True)]
    pair.with_relaxed(*read, verified=True)
    assert sorted(asked) == ["a", "c"]


def test_unverified_any_two_different_texts_do_and_nobody_gives_a_score(tmp_path):
    rows = rows_of(paired(tmp_path, OWN, OTHERS, strategy={"type": "relaxed", "verified": False}))
    assert [(row["id"].partition("/")[0], [one["text"] for one in row["answers"]]) for row in rows] == [
        ("easy", ["No commas", "One two"]), ("good", ["No commas", "One, two"]), ("wrong", ["Well, no", "One, two"]),
    ]  # fmt: skip
    assert {one["score"] for row in rows for one in row["answers"]} == {None}


def test_answers_are_joined_by_their_prompts_and_not_by_where_they_stand(tmp_path, monkeypatch):
    """Each other prompt has a constraint that the answers to its neighbours would follow."""
    quoted = {"name": "ifeval", "instructions": [{"id": "startend:quotation"}]}
    numbers = [(number, index) for number in range(9) for index in range(3)]
    own = [
        under(f"q{number}", f'"{number}, no {index}"', index, verifier=quoted) if number % 2 else under(f"q{number}", f"{number} no", index)
        for number, index in numbers
    ]
    others = [
        answer(f"q{number}", f"{number} yes {index}" if number % 2 else f'"{number}, yes {index}"', index) for number, index in numbers
    ]
    whole = paired(tmp_path / "whole", own, others)
    assert len(rows_of(whole)) == 9
    for row in rows_of(whole):
        assert {one["text"].strip('"')[0] for one in row["answers"]} == {row["id"][1]}
    monkeypatch.setattr(columns, "ROWS_PER_FILE", 4)
    turned = paired(tmp_path / "turned", own[::-1], others[5:] + others[:5])
    assert rows_of(turned) == rows_of(whole)


def test_an_answer_that_was_cut_off_may_be_left_out(tmp_path):
    own, others = [under("q", "No")], [answer("q", "One, two", finish_reason="length")]
    assert rows_of(paired(tmp_path / "kept", own, others))[0]["answers"][1]["finish_reason"] == "length"
    with pytest.raises(StageError, match="'no answer of one side that came to its end': 1"):
        paired(tmp_path / "dropped", own, others, truncated="drop")
