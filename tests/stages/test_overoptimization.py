import json
import math

import pytest
from data_lab import publish, rows_of, run_stage
from models import told_while
from row_reading import read_rows

from pedigree.stages.job.failures import StageError
from pedigree.stages.overoptimization import run as overoptimization


def judgment(prompt, index, reward, verifier=None):
    return {
        "id": f"{prompt}/p/{index}", "prompt_id": prompt, "source": "s", "messages": [{"role": "user", "content": "?"}], "policy": "p",
        "text": f"{index}", "finish_reason": "stop", "response_length": 1, "verifier_score": verifier, "rewards": {"rm": reward},
        "reward": reward, "disagreement": None, "score": reward,
    }  # fmt: skip


def measured(folder, rows, gold=None, **config):
    ports = {"judgments": publish(folder / "in", "judgment", rows)}
    if gold is not None:
        ports["gold"] = publish(folder / "gold", "judgment", gold)
    return run_stage(folder / "made", "overoptimization", config, **ports)


# The proxy likes 3 > 2 > 1 > 0; the gold rises with it up to 2 and falls at 3.
GOLD = [0.0, 0.5, 1.0, 0.0]
ROWS = [judgment(f"q{number}", index, float(index), GOLD[index]) for number in range(5) for index in range(4)]


def test_gold_peaks_where_it_does_and_falls_behind_the_proxy(tmp_path):
    made = measured(tmp_path, ROWS)
    rows, metrics = rows_of(made), made.record.metrics
    # n = 1: mean of GOLD. n = 2: bests of the six pairs: 1 once, 2 twice, 3 three times. n = 3: 2 once, 3 three times. n = 4: 3.
    assert [row["gold"] for row in rows] == pytest.approx([1.5 / 4, (0.5 + 2 * 1.0) / 6, 1.0 / 4, 0.0])
    assert [row["proxy"] for row in rows] == pytest.approx([1.5, (1 + 4 + 9) / 6, (2 + 9) / 4, 3.0])
    assert [row["n"] for row in rows] == [1, 2, 3, 4] and rows[1]["kl"] == pytest.approx(math.log(2) - 0.5)
    assert all(row["gold_low"] == pytest.approx(row["gold_high"]) for row in rows)  # all prompts are alike
    assert (metrics["peak_n"], metrics["gold_peak"], metrics["gold_last"], metrics["prompts"]) == (2, pytest.approx(2.5 / 6), 0.0, 5)
    assert metrics["gold_after_peak"]["mean"] == pytest.approx(-2.5 / 6) and metrics["rows"] == 4
    curve = [json.loads(line) for line in (made.path.parent / "curve.jsonl").read_text().splitlines()]
    assert [(row["step"], row["gold"]) for row in curve] == [(row["n"], row["gold"]) for row in rows]


def test_gold_may_come_from_other_judgments_of_the_same_answers(tmp_path):
    gold = [judgment(row["prompt_id"], int(row["text"]), 10 * row["verifier_score"]) for row in reversed(ROWS)]
    made = measured(tmp_path, [row | {"verifier_score": None} for row in ROWS], gold)
    assert rows_of(made)[0]["gold"] == pytest.approx(3.75) and made.record.metrics["peak_n"] == 2


def test_prompts_with_too_few_answers_are_left_out_and_counted(tmp_path):
    few = [judgment("few", 0, 1.0, 1.0), judgment("few", 1, 2.0, 1.0), judgment("few", 2, None, 1.0), judgment("few", 3, 2.0, None)]
    made = measured(tmp_path / "a", ROWS + few, max_n=3)
    assert (made.record.metrics["prompts"], made.record.metrics["left_out"], len(rows_of(made))) == (5, 1, 3)
    assert read_rows(made.evidence / "left_out.jsonl") == [{"prompt_id": "few", "answers": 2}]
    assert len(rows_of(measured(tmp_path / "b", ROWS + few))) == 2  # what every prompt has
    with pytest.raises(StageError, match=r"best of 5 requires .* 0 of 5 prompts have 5, and the maximum is 4"):
        measured(tmp_path / "c", ROWS, max_n=5)
    with pytest.raises(StageError, match="best of 1 requires"):
        measured(tmp_path / "d", ROWS[:1])


def test_without_both_rewards_it_says_what_to_do(tmp_path):
    with pytest.raises(StageError, match=r"none of 20 answers has a `reward` and a `verifier_score`: .* reward_weight"):
        measured(tmp_path, [row | {"verifier_score": None} for row in ROWS])


def test_the_order_of_judgments_changes_nothing(tmp_path):
    rows = [row | {"verifier_score": row["verifier_score"] * int(row["prompt_id"][1:])} for row in ROWS]
    one, other = measured(tmp_path / "a", rows), measured(tmp_path / "b", rows[::-1])
    assert rows_of(one)[0]["gold_low"] < rows_of(one)[0]["gold"] < rows_of(one)[0]["gold_high"]
    assert one.record.content == other.record.content and one.record.metrics == other.record.metrics


def test_gold_of_other_answers_with_the_same_ids_is_refused(tmp_path):
    """Ids number the answers to a prompt, so that another sample of it has the same."""
    gold = [row | {"text": f"another {row['text']}"} for row in ROWS]
    with pytest.raises(StageError, match=r"`gold` judged another text under the id q0/p/0 than `judgments`: judge the completions of one"):
        measured(tmp_path, ROWS, gold)


def test_a_job_is_not_silent_while_it_computes_curves(tmp_path, monkeypatch):
    told_while(monkeypatch, overoptimization, "best_of_n", "measuring")
    measured(tmp_path, ROWS, resamples=100)
