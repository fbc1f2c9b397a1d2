import gc
import itertools
import json
import statistics
import tracemalloc

import pytest
import torch
from models import a_job, config_of, dataset, publish
from row_reading import read_rows
from tiny_models import make_reward_model
from transformers import AutoModelForSequenceClassification

from pedigree.configs.language.execution import Numerics
from pedigree.data.chat.chat import Chat
from pedigree.data.records import columns, records
from pedigree.stages.job.failures import StageError
from pedigree.stages.judge import run as judge


def completion(number: int, text: str, verifier):
    messages = [{"role": "user", "content": f"What is {number} + 1?"}]
    return {
        "id": f"p{number}/a/0", "prompt_id": f"p{number}", "source": "test", "messages": messages, "verifier": verifier, "policy": "a",
        "policy_content": "c", "on_policy": False, "index": 0, "seed": 1, "prompt_ids": [1], "response_ids": [5, 2],
        "logprobs": [-1.0, -1.0], "text": text, "finish_reason": "stop",
    }  # fmt: skip


def sum_of(number: int):
    return {"name": "arithmetic", "answer": str(number + 1)}


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory):
    return a_reward_model(tmp_path_factory.mktemp("reward"), seed=0, mean=0.5, std=2.0)


def a_reward_model(folder, seed, mean, std):
    make_reward_model(folder / "payload", seed=seed, mean=mean, std=std)
    return publish(folder, "reward_model", "reward_model")


def judged(tmp_path, rows, config, **ports):
    job = a_job(tmp_path / "job", numerics=Numerics(threads=1))
    inputs = {"completions": {"c": dataset(tmp_path / "completions", "completion", rows)}} | ports
    metrics = judge.run(config_of("judge", **config), inputs, job)
    return metrics, list(records.stream(job.out / "payload"))


def test_policies_are_compared_on_the_prompts_that_both_have_answered(tmp_path):
    """p1: a is right, b wrong; p2: both are wrong; p3: b alone, and p4, where nobody can say, are nobody's win."""
    said = [(1, "a", "2"), (1, "b", "3"), (2, "a", "4"), (2, "b", "5"), (3, "b", "4"), (4, "a", "5"), (4, "b", "6")]
    rows = [
        completion(number, text, sum_of(number) if number < 4 else None) | {"id": f"p{number}/{label}/0", "policy": label}
        for number, label, text in said
    ]
    judged(tmp_path, rows, {"max_unscored_share": 0.5})
    table = json.loads((tmp_path / "job" / "out" / "evidence" / "win_rates.json").read_text())
    assert [(one["policy"], one["against"], one["prompts"], one["mean"]) for one in table] == [("a", "b", 2, 0.75), ("b", "a", 2, 0.25)]
    assert (table[0]["low"], table[0]["high"]) == (0.5, 1.0)
    judged(tmp_path / "alone", rows[:1], {})
    assert not (tmp_path / "alone" / "job" / "out" / "evidence" / "win_rates.json").exists()


def test_verifier_scores_are_kept_and_weighted(tmp_path):
    rows = [completion(1, "It is 2.", sum_of(1)), completion(2, "It is 4.", sum_of(2))]
    metrics, found = judged(tmp_path, rows, {"verifier_weight": 2.0})
    assert [(row["verifier_score"], row["reward"], row["score"]) for row in found] == [(1.0, None, 2.0), (0.0, None, 0.0)]
    assert (metrics["mean_verifier"], metrics["mean_score/a"], metrics["unscored"]) == (0.5, 1.0, 0)


def test_rewards_are_read_at_the_end_of_turn_and_normalised_before_weighting(tmp_path, reward_model):
    rows = [completion(number, "ha " * number + "2", sum_of(number) if number != 3 else None) for number in range(1, 8)]
    _, found = judged(tmp_path, rows, {"verifier_weight": 1.0, "reward_weight": 0.1}, reward_models={"rm": reward_model})
    model, chat = AutoModelForSequenceClassification.from_pretrained(reward_model.payload, dtype=torch.float32), Chat(reward_model.payload)
    for row, given in zip(found, rows, strict=True):
        conversation = [*given["messages"], {"role": "assistant", "content": given["text"]}]
        ids, mask = chat.training(conversation)
        ids = ids[: max(place for place, said in enumerate(mask) if said) + 1]
        assert ids[-1] == chat.eos_id
        with torch.no_grad():
            alone = model.score(model.model(torch.tensor([ids])).last_hidden_state[0, -1]).item()  # one at a time, no padding, no packing
        assert row["rewards"] == {"rm": pytest.approx(alone, abs=1e-4)} and row["disagreement"] is None
        assert row["reward"] == pytest.approx((alone - 0.5) / 2.0, abs=1e-4)
        verified = 0.0 if given["verifier"] is None else row["verifier_score"]
        assert row["score"] == pytest.approx(verified + 0.1 * (alone - 0.5) / 2.0, abs=1e-4)


def test_an_answer_that_was_cut_off_is_judged_without_an_end(tmp_path, reward_model):
    """Its reward is read at the last token of its text, by transformers as by us; half a character or nothing at all has none."""
    rows = [completion(number, "It is 2 and", sum_of(number)) | {"finish_reason": "length"} for number in range(12)]
    rows[1]["text"] = ""
    metrics, found = judged(tmp_path, rows, {"reward_weight": 1.0, "verifier_weight": 0.0}, reward_models={"rm": reward_model})
    model, chat = AutoModelForSequenceClassification.from_pretrained(reward_model.payload, dtype=torch.float32), Chat(reward_model.payload)
    prompt, answer = chat.answer(rows[0]["messages"], "It is 2 and")
    ids = [*prompt, *answer[:-1]]
    with torch.no_grad():
        alone = model.score(model.model(torch.tensor([ids])).last_hidden_state[0, -1]).item()
    assert found[0]["rewards"]["rm"] == pytest.approx(alone, abs=1e-4)
    assert found[1]["reward"] is None and metrics["failures"] == 1


def test_win_rates_are_bradley_terrys_of_raw_rewards_whatever_their_weight(tmp_path, reward_model):
    """P(i beats k) = σ(s_i - s_k) of one reward model's raw scores, averaged over all answers to the prompt; None without a score. For
    several models see `test_members_are_normalised_each_by_its_own_and_combined`."""
    rows = [completion(1, "ha " * index + "2", sum_of(1)) | {"id": f"p1/a/{index}"} for index in range(4)]
    rows += [completion(number, "1" * (400 if number == 2 else 3), sum_of(number)) for number in range(2, 9)]
    config = {"reward_weight": 0.3, "verifier_weight": 0.0}
    _, found = judged(tmp_path, rows, config, reward_models={"rm": reward_model})
    raw = torch.tensor([row["rewards"]["rm"] for row in found[:4]], dtype=torch.float64)
    expected = torch.sigmoid(raw[:, None] - raw[None]).mean(1)
    assert [row["win_rate"] for row in found[:4]] == pytest.approx(expected.tolist(), abs=1e-6)
    assert [row["win_rate"] for row in found[4:]] == [None, *[0.5] * 6]  # alone, an answer has itself for an opponent


def test_a_verifier_is_certain_who_wins(tmp_path):
    rows = [completion(1, text, sum_of(1)) | {"id": f"p1/a/{index}"} for index, text in enumerate(("2", "3", "4"))]
    _, found = judged(tmp_path, rows, {})
    assert [row["win_rate"] for row in found] == pytest.approx([5 / 6, 1 / 3, 1 / 3])


def test_a_judge_that_cannot_score_leaves_null_and_is_counted(tmp_path):
    rows = [completion(number, str(number + 1), sum_of(number)) for number in range(20)]
    rows[3]["verifier"] = {"name": "nobody"}
    metrics, found = judged(tmp_path, rows, {})
    assert (found[3]["verifier_score"], found[3]["score"]) == (None, None)
    assert (metrics["unscored"], metrics["failures"], metrics["mean_score"]) == (1, 1, 1.0)  # a missing score is no zero
    failures = read_rows(tmp_path / "job" / "out" / "evidence" / "failures.jsonl")
    assert [(one["id"], one["judge"]) for one in failures] == [("p3/a/0", "verifier")]


def test_of_an_answer_some_hundred_bytes_are_in_memory(tmp_path, monkeypatch):
    """As lists, the 1,000 tokens of each and their logarithms would take 60,000 bytes."""
    for name in ("BLOCK", "ROWS_PER_GROUP"):
        monkeypatch.setattr(columns, name, 8)
    peaks, counts = [], (40, 40, 240)  # the first for what is loaded once
    for number, count in enumerate(counts):
        rows = [
            completion(answer // 2, str(answer) * 300, sum_of(answer // 2))
            | {"id": f"p{answer}/a/0", "response_ids": list(range(1000, 2000)), "logprobs": [-place / 1009 for place in range(1000)]}
            for answer in range(count)
        ]
        given, job = dataset(tmp_path / f"c{number}", "completion", rows), a_job(tmp_path / str(number))
        del rows
        gc.collect()
        tracemalloc.start()
        assert judge.run(config_of("judge"), {"completions": {"c": given}}, job)["rows"] == count
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert (peaks[2] - peaks[1]) / (counts[2] - counts[1]) < 1000, peaks


def test_too_many_answers_without_a_score_fail_the_stage(tmp_path):
    rows = [completion(number, "x", sum_of(number) if number > 1 else None) for number in range(10)]
    with pytest.raises(StageError, match=r"2 of 10 answers have no score, more than 10%.*reward_weight"):
        judged(tmp_path, rows, {})


def test_a_reward_model_without_statistics_is_refused(tmp_path, reward_model):
    statistics = reward_model.payload / "reward_stats.json"
    kept = statistics.read_text()
    try:
        statistics.write_text('{"mean": 0.0, "std": 0.0}')
        with pytest.raises(StageError, match="std > 0"):
            judged(tmp_path, [completion(1, "2", sum_of(1))], {"reward_weight": 1.0}, reward_models={"rm": reward_model})
    finally:
        statistics.write_text(kept)


@pytest.fixture(scope="module")
def members(tmp_path_factory, reward_model):
    second, third = (
        a_reward_model(tmp_path_factory.mktemp("member"), seed, mean, std) for seed, mean, std in ((1, -0.3, 0.5), (2, 0.0, 1.0))
    )
    return {"a": reward_model, "b": second, "c": third}


NORMS = {"a": (0.5, 2.0), "b": (-0.3, 0.5), "c": (0.0, 1.0)}


def test_members_are_normalised_each_by_its_own_and_combined(tmp_path, members):
    """How the other ensembles combine is shown by `core/test_ensembles.py`."""
    ensemble = {"type": "uncertainty_weighted", "weight": 2.0}
    rows = [completion(number // 3, "ha " * number, None) | {"id": f"r{number}"} for number in range(9)]
    metrics, found = judged(tmp_path, rows, {"verifier_weight": 0.0, "reward_weight": 0.5, "ensemble": ensemble}, reward_models=members)
    for row in found:
        normalised = [(row["rewards"][label] - mean) / std for label, (mean, std) in NORMS.items()]
        combined = statistics.fmean(normalised) - 2 * statistics.pvariance(normalised)
        assert row["reward"] == pytest.approx(combined) and row["score"] == pytest.approx(0.5 * row["reward"])
        assert row["disagreement"] == pytest.approx(statistics.pstdev(normalised)) and row["disagreement"] > 0
        logits = torch.tensor([row["reward"] - other["reward"] for other in found if other["prompt_id"] == row["prompt_id"]])
        assert row["win_rate"] == pytest.approx(torch.sigmoid(logits * statistics.fmean(std for _, std in NORMS.values())).mean().item())
    agreed = json.loads((tmp_path / "job" / "out" / "evidence" / "agreement.json").read_text())
    assert [one["members"] for one in agreed] == [["a", "b"], ["a", "c"], ["b", "c"]]
    alike = 0
    for one, other in itertools.combinations(found, 2):
        if one["prompt_id"] == other["prompt_id"]:  # 3 prompts with 3 pairs each
            alike += (one["rewards"]["a"] > other["rewards"]["a"]) == (one["rewards"]["b"] > other["rewards"]["b"])
    assert agreed[0]["agreement"] == pytest.approx(alike / 9)
    assert metrics["agreement"] == pytest.approx(statistics.fmean(one["agreement"] for one in agreed))


def test_what_one_member_cannot_score_has_no_reward_of_the_others(tmp_path, members):
    """Here an answer longer than its context."""
    short = a_reward_model(tmp_path / "short", seed=3, mean=0.0, std=1.0)
    config = json.loads((short.payload / "config.json").read_text())
    (short.payload / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 60}))
    rows = [completion(number, "2", sum_of(number)) for number in range(20)]
    rows[4]["text"] = "1" * 60
    metrics, found = judged(tmp_path, rows, {"reward_weight": 1.0}, reward_models={"a": members["a"], "short": short})
    assert all(row["reward"] is not None for row in (*found[:4], *found[5:]))
    assert found[4]["rewards"]["a"] is not None and found[4]["rewards"]["short"] is None
    assert (found[4]["reward"], found[4]["disagreement"], found[4]["score"], metrics["failures"]) == (None, None, None, 1)
    (failure,) = read_rows(tmp_path / "job" / "out" / "evidence" / "failures.jsonl")
    assert (failure["id"], failure["judge"]) == ("p4/a/0", "short")


def test_what_would_ask_nobody_is_refused():
    with pytest.raises(ValueError, match="verifier_weight, reward_weight, rating_weight and the weights of programs are all 0"):
        config_of("judge", verifier_weight=0.0)
    with pytest.raises(ValueError, match="ensemble worst_case has no effect, because reward_weight is 0"):
        config_of("judge", ensemble={"type": "worst_case"})
