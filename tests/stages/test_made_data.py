"""Pairs, conversations and prompts that are made of judged answers: from artifacts to artifacts."""

import json
from typing import Any

import pytest
from data_lab import parents_of, publish, rows_of, run_stage

from pedigree.configs.base.problems import PedigreeError
from pedigree.data.records import columns, records
from pedigree.stages.job.failures import StageError

PROMPTS = [f"q{number}" for number in range(9)]


def asked(prompt: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"Say {prompt}!"}]


def judgment(prompt: str, label: str, score: float | None, **more: Any) -> dict[str, Any]:
    return {
        "id": f"{prompt}/{label}/0", "prompt_id": prompt, "source": "s", "messages": asked(prompt), "policy": label,
        "policy_content": f"content of {label}", "on_policy": label == "a", "text": f"{prompt} by {label}", "finish_reason": "stop",
        "response_length": 3, "verifier_score": score, "rewards": {}, "reward": None, "disagreement": None, "ratings": {}, "rating": None,
        "score": score, "win_rate": None, **more,
    }  # fmt: skip


def completion(prompt: str, label: str, **more: Any) -> dict[str, Any]:
    return {
        "id": f"{prompt}/{label}/0", "prompt_id": prompt, "source": "s", "messages": asked(prompt), "verifier": None, "policy": label,
        "policy_content": f"content of {label}", "on_policy": label == "a", "index": 0, "seed": 1, "prompt_ids": [1], "response_ids": [5],
        "logprobs": [-1.0], "text": f"{prompt} by {label}", "finish_reason": "stop", **more,
    }  # fmt: skip


def made(folder, kind, rows, record="judgment", port="judgments", others=None, **config):
    given = publish(folder / "in", record, rows)
    return run_stage(folder / "made", kind, config, **{port: given}, **(others or {}))


def evidence(artifact, name):
    return json.loads((artifact.path / "evidence" / name).read_text())


# --- pairs ---------------------------------------------------------------------------------------------------------------


def test_rows_that_lie_in_many_files_make_the_same_preferences_in_many_files(tmp_path, monkeypatch):
    rows = [judgment(prompt, label, score) for label, score in (("a", 2.0), ("b", 1.0), ("c", 0.0)) for prompt in PROMPTS]
    config = {"strategy": {"type": "all_pairs"}, "seed": 3}
    whole = made(tmp_path / "whole", "pair", rows, **config)
    monkeypatch.setattr(columns, "ROWS_PER_FILE", 4)
    parts = made(tmp_path / "parts", "pair", rows, **config)
    assert [records.count(parts.payload / name) for name in sorted(path.name for path in parts.payload.iterdir())] == [4] * 6 + [3]
    assert rows_of(parts) == rows_of(whole) and len(rows_of(whole)) == 27
    monkeypatch.setattr(columns, "CHARACTERS_PER_FILE", 60)
    monkeypatch.setattr(columns, "BLOCK", 2)
    cut = made(tmp_path / "cut", "pair", rows, **config)
    assert len(list(cut.payload.iterdir())) > 8  # and each file is as whoever has all rows at once would write it
    assert publish(tmp_path / "again", "preference", rows_of(whole)).record.content == cut.record.content
    for row in rows_of(whole):
        prompt = row["id"].split("/")[0]
        assert row["messages"] == asked(prompt) and all(one["text"] == f"{prompt} by {one['policy']}" for one in row["answers"])


def test_a_delta_is_made_of_completions_that_nobody_judged(tmp_path):
    rows = [completion(prompt, label) for prompt in PROMPTS[:3] for label in ("weak", "a")] + [completion("alone", "a")]
    config = {"strategy": {"type": "delta", "strong": "a", "weak": "weak"}}
    preferences = made(tmp_path, "pair", rows, "completion", "completions", **config)
    assert [(row["id"], [(one["policy"], one["score"]) for one in row["answers"]]) for row in rows_of(preferences)] == [
        (f"{prompt}/delta", [("a", None), ("weak", None)]) for prompt in PROMPTS[:3]
    ]
    metrics = preferences.record.metrics
    assert (metrics["dropped"], metrics["unscored"]) == ({"no answer of weak": 1}, 0) and "mean_margin" not in metrics
    assert metrics["on_policy"] == {"any": 1.0, "best": 1.0, "worse": 0.0} and metrics["mean_length"] == {"best": 7.0, "worst": 10.0}
    with pytest.raises(StageError, match=r"strategy\.weak is 'week', but the completions are from a, weak: use one of them"):
        made(tmp_path / "x", "pair", rows, "completion", "completions", strategy={"type": "delta", "strong": "a", "weak": "week"})


def test_the_score_is_what_was_compared_by(tmp_path):
    rows = [judgment("q", "a", 1.0, win_rate=0.25, rating=4.0), judgment("q", "b", 0.0, win_rate=0.75, rating=1.0)]
    found = {"score": [("a", 1.0), ("b", 0.0)], "win_rate": [("b", 0.75), ("a", 0.25)], "rating": [("a", 4.0), ("b", 1.0)]}
    for by, expected in found.items():
        (row,) = rows_of(made(tmp_path / by, "pair", rows, by=by))
        assert [(one["policy"], one["score"]) for one in row["answers"]] == expected
        assert [one["win_rate"] for one in row["answers"]] == [{"a": 0.25, "b": 0.75}[name] for name, _ in expected]
    with pytest.raises(StageError, match="'fewer than two scored answers': 1"):
        made(tmp_path / "reward", "pair", rows, by="reward")


def test_ties_become_uncertain_pairs(tmp_path):
    rows = [judgment("q", "a", 1.0), judgment("q", "b", 1.0), judgment("r", "a", 1.0), judgment("r", "b", 0.0)]
    tied, certain = rows_of(made(tmp_path, "pair", rows, ties="keep"))
    assert (tied["strength"], certain["strength"]) == (0.5, None) and {one["score"] for one in tied["answers"]} == {1.0}


def test_a_budget_needs_an_ensemble_to_disagree(tmp_path):
    rows = [judgment(prompt, label, score, rewards={"r": score}) for prompt in ("q", "r") for label, score in (("a", 1.0), ("b", 0.0))]
    budget = {"pairs": 1, "choose": "disagreement"}
    with pytest.raises(StageError, match="requires two or more reward models, and the judgments have 1"):
        made(tmp_path / "one", "pair", rows, budget=budget)
    more = [row | {"rewards": {"r": row["score"], "t": -row["score"] if row["prompt_id"] == "r" else row["score"]}} for row in rows]
    preferences = made(tmp_path / "two", "pair", more, budget=budget)
    assert [row["id"] for row in rows_of(preferences)] == ["r/best_vs_worst"]
    assert evidence(preferences, "counts.json")["drops"] == {"over budget": 1} == preferences.record.metrics["dropped"]


# --- answers worth imitating ---------------------------------------------------------------------------------------------


def test_good_answers_become_conversations_with_their_prompt(tmp_path):
    rows = [judgment("q", "a", 1.0), judgment("q", "b", 1.0), judgment("q", "c", 0.0), judgment("r", "b", 0.0), judgment("s", "a", None)]
    rows += [judgment("t", "b", 1.0, finish_reason="length"), judgment("t", "a", 1.0, text=" ")]
    kept = made(tmp_path, "best_answers", rows, keep={"type": "all_above", "min_score": 1.0})
    assert sorted((row["id"], row["source"], row["messages"]) for row in rows_of(kept)) == [
        (f"q/{label}/0", "s", [*asked("q"), {"role": "assistant", "content": f"q by {label}"}]) for label in "ab"
    ]
    assert parents_of(kept) == {"q/a/0": ["q"], "q/b/0": ["q"]}
    metrics = kept.record.metrics
    assert metrics["dropped"] == {"no answer above min_score": 1, "no scored answer": 1, "empty answers": 1}
    assert (metrics["rows"], metrics["prompts"], metrics["prompts_kept"], metrics["on_policy"]) == (2, 4, 1, 0.5)
    # q: 2 of 3; r: none; t: both, however they ended
    assert metrics["pass_rates"] == {"none": 1, "0.6": 1, "all": 1} and metrics["pass_rate"] == pytest.approx((2 / 3 + 0 + 1) / 3)
    assert metrics["truncated"] == {"read": 1, "kept": 0} and metrics["mean_score"] == 1.0 and metrics["validation"]["rows"] == 2
    assert evidence(kept, "counts.json")["drops"] == metrics["dropped"]


def test_an_answer_without_an_end_is_imitated_without_one(tmp_path):
    rows = [judgment("q", "a", 1.0, finish_reason="length"), judgment("r", "a", 1.0)]
    cut, whole = rows_of(made(tmp_path, "best_answers", rows, keep="best_of_n", truncated="keep"))
    assert cut["messages"][-1]["finish_reason"] == "length" and "finish_reason" not in whole["messages"][-1]


def test_too_few_good_answers_say_why_there_are_no_more(tmp_path):
    rows = [judgment("q", "a", 0.0), judgment("r", "a", 1.0)]
    with pytest.raises(StageError, match=r"1 answers < min_rows 2 from 2 prompts \(\{'no answer above min_score': 1\}\): sample more"):
        made(tmp_path / "a", "best_answers", rows, keep={"type": "best_of_n", "min_score": 0.5}, min_rows=2)
    with pytest.raises(PedigreeError, match="the rows have 1 duplicate ids"):
        made(tmp_path / "b", "best_answers", [*rows, rows[0]], keep="best_of_n")


def test_conversations_lie_as_whoever_has_all_of_them_would_write_them(tmp_path, monkeypatch):
    monkeypatch.setattr(columns, "CHARACTERS_PER_FILE", 60)
    rows = [judgment(prompt, label, 1.0) for label in "ab" for prompt in PROMPTS]
    kept = made(tmp_path / "a", "best_answers", rows, keep="best_of_n")
    assert len(list(kept.payload.iterdir())) > 1
    assert publish(tmp_path / "b", "conversation", rows_of(kept)).record.content == kept.record.content
    assert [row["id"].split("/")[0] for row in rows_of(kept)] == PROMPTS


# --- prompts -------------------------------------------------------------------------------------------------------------

RATES = {"none": (0.0, 0.0), "half": (1.0, 0.0), "all": (1.0, 1.0), "few": (1.0, None), "dark": (None, None)}


def selected(folder, order=1, **config):
    names = [*RATES, "new"]
    prompts = [{"id": name, "source": "s", "messages": asked(name), "verifier": {"name": "arithmetic", "answer": "4"}} for name in names]
    rows = [judgment(name, label, score) for name, scores in RATES.items() for label, score in zip("ab", scores, strict=True)]
    pool = publish(folder / "pool", "prompt", prompts)
    return prompts, made(folder, "select_prompts", rows[::order], others={"prompts": pool}, **config)


def test_prompts_between_the_bounds_stay_as_they_are(tmp_path):
    prompts, kept = selected(tmp_path / "a", min_mean=0.5, max_mean=0.5)
    assert rows_of(kept) == [prompts[1]]
    assert kept.record.metrics["dropped"] == {"below min_mean": 1, "above max_mean": 2, "no scored answer": 1, "not judged": 1}
    assert (kept.record.metrics["judged"], kept.record.metrics["rates"]) == (4, {"none": 1, "0.5": 1, "all": 2})
    assert kept.record.metrics["mean"] == {"judged": 0.625, "kept": 0.5}
    lines = [json.loads(line) for line in (kept.path / "evidence" / "rates.jsonl").read_text().splitlines()]
    assert lines[1] == {"id": "half", "mean": 0.5, "answers": 2, "kept": True} and [line["kept"] for line in lines].count(True) == 1
    _, again = selected(tmp_path / "b", order=-1, min_mean=0.5, max_mean=0.5)
    assert again.record.content == kept.record.content


def test_a_rate_of_few_answers_is_none(tmp_path):
    prompts, kept = selected(tmp_path / "a", min_mean=1.0)
    assert rows_of(kept) == [prompts[2], prompts[3]]
    _, kept = selected(tmp_path / "b", min_mean=1.0, min_answers=2)
    assert rows_of(kept) == [prompts[2]] and kept.record.metrics["dropped"]["fewer than min_answers"] == 1
    with pytest.raises(StageError, match=r"0 prompts < min_rows 1 of 6 .*'below min_mean': 4.*widen min_mean and max_mean"):
        selected(tmp_path / "c", min_mean=1.5)
