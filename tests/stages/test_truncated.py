"""An answer that its length limit cut off is never taught to stop: from the sampler's row to the tokens of every stage that trains."""

import models
import pytest
from data_lab import publish, rows_of, run_stage

from pedigree.configs.language.execution import Numerics
from pedigree.data.chat.chat import Chat
from pedigree.data.chat.documents import Conversations, Pairs
from pedigree.stages.core.batches import document
from pedigree.stages.preference_train.run import comparisons, documents_of
from pedigree.stages.reference_logprobs import run as reference_logprobs
from pedigree.stages.training.reference import content_key
from pedigree.stages.training.rollout_batches import MiniBatchPlan, TrainingSample
from pedigree.stages.training.training_rows import pairs

pytestmark = pytest.mark.slow
ASKED = [{"role": "user", "content": "What is 20 + 22?"}]


def completion(prompt: str, index: int, text: str, finish_reason: str) -> dict:
    return {
        "id": f"{prompt}/p/{index}", "prompt_id": prompt, "source": "s", "messages": ASKED, "policy": "p", "policy_content": "c",
        "on_policy": False, "verifier": {"name": "arithmetic", "answer": "42"}, "index": index, "seed": 1, "prompt_ids": [1],
        "response_ids": [5, 6], "logprobs": [-1.0, -1.0], "text": text, "finish_reason": finish_reason,
    }  # fmt: skip


COMPLETIONS = [
    completion("loser", 0, "42", "stop"),
    completion("loser", 1, "It is 7 and then", "length"),
    completion("winner", 0, "It is 42", "length"),
    completion("winner", 1, "7", "stop"),
    completion("both", 0, "I say 42", "length"),
    completion("both", 1, "Let me think", "length"),
    completion("three", 0, "42", "stop"),
    completion("three", 1, "7", "stop"),
    completion("three", 2, "8 or", "length"),
]


@pytest.fixture(scope="module")
def judgments(tmp_path_factory):
    folder = tmp_path_factory.mktemp("judged")
    return run_stage(folder / "judge", "judge", {}, completions=publish(folder / "completions", "completion", COMPLETIONS))


@pytest.fixture(scope="module")
def preferences(judgments, tmp_path_factory):
    return run_stage(tmp_path_factory.mktemp("paired") / "pair", "pair", {}, judgments=judgments)


def test_pairs_say_which_answers_were_cut_off_and_how_many(preferences):
    found = {row["id"].split("/")[0]: [one["finish_reason"] for one in row["answers"]] for row in rows_of(preferences)}
    assert {name: found[name] for name in ("loser", "winner", "both")} == {
        "loser": ["stop", "length"], "winner": ["length", "stop"], "both": ["length", "length"],
    }  # fmt: skip
    in_three = found["three"][1] == "length"  # the judge finds its two wrong answers equally bad
    assert preferences.record.metrics["truncated"] == {"read": 5, "best": 2, "worse": 2 + in_three}


def test_they_can_be_dropped(judgments, tmp_path):
    made = run_stage(tmp_path / "pair", "pair", {"truncated": "drop"}, judgments=judgments)
    (row,) = rows_of(made)
    assert [one["text"] for one in row["answers"]] == ["42", "7"]
    assert made.record.metrics["dropped"] == {"fewer than two answers that came to their end": 3}
    assert made.record.metrics["truncated"] == {"read": 5, "best": 0, "worse": 0}


def test_label_noise_exchanges_the_ends_with_the_texts(judgments, tmp_path):
    """Scores and win rates stay in place, as if the judge had confused the answers."""
    made = run_stage(tmp_path / "pair", "pair", {"label_noise": 0.5, "seed": 1}, judgments=judgments)
    assert 0 < made.record.metrics["exchanged"] < 4
    truth = {row["text"]: row["finish_reason"] for row in COMPLETIONS}
    for row in rows_of(made):
        assert all(truth[one["text"]] == one["finish_reason"] for one in row["answers"])
        assert [one["score"] for one in row["answers"]] == [1.0, 0.0]
        assert row["answers"][0]["win_rate"] > row["answers"][1]["win_rate"]


def expected(chat: Chat, text: str, finish_reason: str):
    prompt, whole = chat.answer(ASKED, text)
    assert whole[-1] == chat.eos_id
    return document(prompt, whole if finish_reason == "stop" else whole[:-1])


def test_no_training_adds_an_end(preferences, policy):
    chat, rows = Chat(policy.payload), rows_of(preferences)
    truth = {row["text"]: row["finish_reason"] for row in COMPLETIONS}
    compared = pairs(rows, "all")  # what reward models and pair losses read
    for row, unit in zip(compared, models.units(compared, Pairs("all"), chat), strict=True):
        for doc, side in zip(unit, ("chosen", "rejected"), strict=True):
            assert doc == expected(chat, row[side], truth[row[side]])
    kto = models.config_of("preference_train", global_batch=2, max_length=64, optimizer={"learning_rate": 1e-3}, loss={"type": "kto"})
    single = {**rows[0], "answers": [{"text": "alone", "score": 0.0, "finish_reason": "length"}]}
    answers = comparisons(kto, [*rows, single])
    for row, unit in zip(answers, models.units(answers, documents_of(kto), chat), strict=True):
        assert unit == (expected(chat, row["text"], (truth | {"alone": "length"})[row["text"]]),)
    for text, finish_reason in truth.items():  # the best samples as conversations: rejection sampling
        said = {"role": "assistant", "content": text, "finish_reason": finish_reason}
        ((doc,),) = models.units([{"messages": [*ASKED, said]}], Conversations("assistant"), chat)
        assert doc == expected(chat, text, finish_reason)


def test_cached_log_probabilities_are_of_the_same_tokens(preferences, policy, tmp_path):
    config = models.config_of("reference_logprobs", max_length=64, dtype="fp32")
    job = models.a_job(tmp_path / "job")
    reference_logprobs.run(config, {"policy": {"p": policy}, "preferences": {"d": preferences}}, job)
    found = {row["id"]: row["length"] for row in rows_of(models.publish(job.out, "reference_logprobs", "logprobs"))}
    chat, truth = Chat(policy.payload), {row["text"]: row["finish_reason"] for row in COMPLETIONS}
    for row in rows_of(preferences):
        for answer in row["answers"]:
            doc = expected(chat, answer["text"], truth[answer["text"]])
            assert found[content_key(doc)] == doc.num_trained


def test_policy_gradients_train_the_very_tokens_that_were_sampled():
    samples = [TrainingSample("p", [5, 6], ids, [-1.0] * len(ids), float(i)) for i, ids in enumerate(([7, 8, 2], [7, 8, 9, 10]))]
    plan = MiniBatchPlan.of(samples, [[0, 1]], frozenset(), "token-mean", 8, 1, Numerics())
    assert [doc.ids.tolist() for unit in plan.units for doc in unit] == [[5, 6, 7, 8, 2], [5, 6, 7, 8, 9, 10]]
