"""Rewards of `rlvr` by reward models and by a language model: the scores of `judge`, unknown with a cause, and asked once."""

import math
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from threading import current_thread, main_thread
from typing import Any

import pytest
from chat_lab import chat_server, say, send
from models import a_job, config_of, curve, dataset, killed_at, publish, run
from rollout_lab import engine
from row_reading import read_rows
from test_rlvr import FIELDS, ONE_THREAD, goes_on, prompt
from tiny_models import make, make_reward_model

from pedigree.configs.methods.language_model import ByEndpoint
from pedigree.configs.methods.reward_terms import ModelReward, RatedReward
from pedigree.data.artifacts.artifacts import Artifact
from pedigree.data.records import records
from pedigree.stages.job.failures import EngineLost, StageError
from pedigree.stages.judge import run as judge
from pedigree.stages.rlvr import handover
from pedigree.stages.rlvr.model_rewards import ModelRewards, RatedRewards
from pedigree.stages.rlvr.rewarding import open_rewards
from pedigree.stages.sampling.answer_log import AnswerLog
from pedigree.stages.sampling.asking import Endpoint
from pedigree.stages.sampling.rewards import FrozenRewardModel
from pedigree.stages.sampling.sampler import Generation
from pedigree.stages.training.models import load_reward_model
from pedigree.stages.verifiers.reward_programs import Answered

RUBRICS = ("helpfulness", "honesty")
LONG = "word " * 300
"""Longer than the models' context."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Artifact]:
    found = {}
    for seed, (label, std) in enumerate({"a": 2.0, "b": 0.5}.items()):
        folder = tmp_path_factory.mktemp(label)
        make_reward_model(folder / "payload", seed=seed, mean=0.25, std=std)
        found[label] = publish(folder, "reward_model", "reward_model")
    return found


def answered(texts: dict[str, list[str]], finish: str = "stop") -> list[list[Answered]]:
    return [[Answered(prompt(int(name[1:]), None), text, [1], finish, None) for text in own] for name, own in texts.items()]


TEXTS = {"p1": ["yes", "no", LONG], "p2": ["maybe", "yes"]}


def judged(folder: Path, models: dict[str, Artifact], **fields: Any) -> list[Any]:
    """The rewards of `judge` for the same answers."""
    rows = [
        {
            "id": f"{group[0].prompt['id']}/{place}", "prompt_id": group[0].prompt["id"], "source": "test", "policy": "p", "index": place,
            "policy_content": "c", "on_policy": True, "messages": group[0].prompt["messages"], "text": one.text, "seed": 0,
            "finish_reason": "stop", "prompt_ids": [1], "response_ids": [1], "logprobs": [-1.0], "verifier": None,
        }
        for group in answered(TEXTS) for place, one in enumerate(group)
    ]  # fmt: skip
    job = a_job(folder / "judge", ONE_THREAD)
    config = config_of("judge", reward_weight=1.0, max_unscored_share=0.5, **fields)
    judge.run(config, {"completions": {"c": dataset(folder / "rows", "completion", rows)}, "reward_models": models}, job)
    return [row["reward"] for row in records.stream(job.out / "payload", ("reward",))]


def test_reward_models_give_what_judge_gives_and_rest_after_each_batch(models, tmp_path, monkeypatch):
    rested, ensemble = [], {"type": "uncertainty_weighted", "weight": 0.1}
    rest = FrozenRewardModel.rest
    monkeypatch.setattr(FrozenRewardModel, "rest", lambda self: rested.append(1) or rest(self))
    expected = judged(tmp_path, models, ensemble=ensemble, dtype="fp32")
    assert not rested
    term, job = (
        ModelReward.model_validate({"type": "reward_model", "ensemble": ensemble, "dtype": "fp32"}),
        a_job(tmp_path / "rl", ONE_THREAD),
    )
    with AnswerLog(job) as log:
        rewards = ModelRewards(term, models, job, log)
        (yes, no, unread), (maybe, also) = rewards.values(answered(TEXTS))
        assert [yes, no, maybe, also] == pytest.approx([expected[0], expected[1], *expected[3:]], rel=1e-5) and expected[2] is None
        assert isinstance(unread, str) and unread.startswith("a: prompt and answer have") and "the reward model's context is 256" in unread
        assert rewards.values(answered({"p3": ["no"]}))[0][0] != no  # another prompt
        rewards.close()
    assert rested == [1] * 4


def test_a_term_may_use_some_of_the_models(models, tmp_path):
    job = a_job(tmp_path, ONE_THREAD)
    with AnswerLog(job) as log:
        terms = [ModelReward(type="reward_model", models=labels, dtype="fp32") for labels in (None, ("a",), ("b",))]
        found: list[Any] = [ModelRewards(term, models, job, log).values(answered({"p1": ["yes"]}))[0][0] for term in terms]
    assert found[0] == pytest.approx((found[1] + found[2]) / 2) and found[1] != found[2]


@pytest.mark.parametrize(("fields", "own"), [({}, True), ({"asynchronous": {"max_staleness": 0}, "replay": "recorded"}, False)])
def test_beside_a_trainer_reward_models_are_loaded_before_its_first_step(models, tmp_path, monkeypatch, fields, own):
    """Loading changes torch's default dtype for all threads: tensors that the trainer made meanwhile were bf16."""
    loads = list[bool]()

    def load(payload: Path, numerics: Any) -> Any:
        loads.append(current_thread() is not main_thread())
        return load_reward_model(payload, numerics)

    monkeypatch.setattr("pedigree.stages.sampling.rewards.load_reward_model", load)
    config = config_of("rlvr", **{**FIELDS, "reward": {"right": 0, "terms": [{"type": "reward_model", "dtype": "fp32"}]}, **fields})
    with open_rewards(config, [], models, {}, a_job(tmp_path, ONE_THREAD)) as rewards, ThreadPoolExecutor(1) as thread:
        assert rewards and len(loads) == (0 if own else 2)
        found = thread.submit(rewards.of, answered({"p1": ["yes"]})[0], 1).result()
    assert not math.isnan(found[0].reward) and loads == [own] * 2


def rated(base_url: str, job: Any, groups: list[list[Answered]], **fields: Any) -> list[list[Any]]:
    by = {"type": "endpoint", "base_url": base_url, "model": "judge"}
    term = RatedReward.model_validate({"type": "rating", "rubrics": [*RUBRICS], "by": by, **fields})
    with AnswerLog(job) as log:
        rewards = RatedRewards(term, Endpoint(ByEndpoint.model_validate(by), job.placement), job, log)
        found = rewards.values(groups)
        rewards.close()
    return found


def of_aspect(chats: Any, handler: Any, body: dict[str, Any]) -> None:
    """5 for honesty, 2 for others; no rating for an answer that is "odd"."""
    text = chats.text(body)
    say(handler, "Hm." if "\nodd\n" in text else f"Rating: {5 if 'The aspect is honesty' in text else 2}")


def test_a_rating_is_the_mean_over_rubrics_or_unknown_and_replies_are_asked_for_once(tmp_path):
    groups = answered({"p1": ["yes", "odd", "yes"], "p2": ["no"]})
    with chat_server(of_aspect) as chats:
        job = a_job(tmp_path, ONE_THREAD)
        (yes, odd, again), (no,) = rated(chats.base_url, job, groups)
        assert (yes, again, no) == (3.5, 3.5, 3.5) and odd == "rating/helpfulness: no line states a rating"
        assert len(chats.bodies) == 6  # equal questions about equal answers are one
        assert rated(chats.base_url, a_job(tmp_path, ONE_THREAD), groups) == [[3.5, odd, 3.5], [3.5]] and len(chats.bodies) == 6
    shown = read_rows(job.evidence / "questions_rating.jsonl")
    assert [row["rubric"] for row in shown[:2]] == [*RUBRICS] and "yes" in shown[0]["question"]


def test_a_server_that_is_down_ends_the_attempt_and_leaves_no_reward(tmp_path):
    groups = answered({f"p{number}": ["yes", "no"] for number in range(4)})
    with chat_server(lambda chats, handler, body: send(handler, 500, b"")) as chats:
        down = a_job(tmp_path / "down", ONE_THREAD, endpoint_retries=0)
        with pytest.raises(EngineLost, match="lost engine: the model at"):
            rated(chats.base_url, down, groups)
    with chat_server(lambda chats, handler, body: send(handler, 400, b"no")) as chats:
        with pytest.raises(StageError, match=r"no rating for 1 of 8 answers, more than 10%.*max_unanswered_share"):
            rated(chats.base_url, a_job(tmp_path / "refused", ONE_THREAD), groups)


def test_a_judge_that_changed_between_two_attempts_is_marked(tmp_path, monkeypatch):
    """The first attempt fails in its second step, after a checkpoint; the server has another model from then on."""
    make(tmp_path / "policy" / "payload")
    given = {
        "policy": {"sft": publish(tmp_path / "policy", "source_model", "policy")},
        "prompts": {"pool": dataset(tmp_path / "pool", "prompt", [prompt(number, None) for number in range(10)])},
    }
    asked, loaded, fails = list[Any](), [0], [True]

    def answer(place: int, request: Any) -> Generation:
        if len(asked) > 1 and fails[0]:
            raise StageError("the engine has no more answers")
        return Generation([10 * len(asked) + place, 2], [-5.0, -5.0], "stop", loaded[-1])

    always = engine(answer, asked, update=lambda part: loaded.append(part.version))
    monkeypatch.setattr(handover, "open_sampler", lambda *_, **__: nullcontext(always))

    def by_model(chats: Any, handler: Any, body: dict[str, Any]) -> None:
        say(handler, f"Rating: {1 + len(chats.bodies) % 5}", model="judge-1" if fails[0] else "judge-2")

    with chat_server(by_model) as chats:
        by = {"type": "endpoint", "base_url": chats.base_url, "model": "judge"}
        reward = {"right": 0, "terms": [{"type": "rating", "rubrics": ["helpfulness"], "by": by}]}
        fields = FIELDS | {"algorithm": {"type": "dr_grpo"}, "steps": 2, "max_logprob_gap": 100.0, "reward": reward}
        for fails[0] in (True, False):
            done = run(tmp_path / "job", "rlvr", fields, given, ONE_THREAD, checkpoint_every_steps=1)
    assert done["ok"] and done["resumed_from"] == "step-000001", done
    assert done["marks"] == ["rewarded (rating) by 2 models: judge-1, judge-2"]


@pytest.mark.slow
@pytest.mark.nightly
def test_a_killed_run_with_rewards_by_models_resumes_to_the_same_weights(models, tmp_path, shared_engines):
    """A reward model, and a judge that rates otherwise when asked again. The run is killed after a checkpoint; the judge's replies of
    before are in the log."""
    make(tmp_path / "policy" / "payload")
    given = {
        "policy": {"sft": publish(tmp_path / "policy", "source_model", "policy")},
        "prompts": {"pool": dataset(tmp_path / "pool", "prompt", [prompt(number, None) for number in range(10)])},
        "reward_models": models,
    }
    asked: list[str] = []

    def by_text(chats: Any, handler: Any, body: dict[str, Any]) -> None:
        asked.append(chats.text(body))
        say(handler, f"Rating: {1 + sum(map(ord, chats.text(body))) % 5 if asked.count(asked[-1]) == 1 else 1}")

    def fields_of(base_url: str) -> dict[str, Any]:
        by = {"type": "endpoint", "base_url": base_url, "model": "judge"}
        terms = [
            {"type": "reward_model", "ensemble": {"type": "worst_case"}, "dtype": "fp32"},
            {"type": "rating", "rubrics": ["helpfulness"], "by": by, "weight": 0.2},
        ]
        return FIELDS | {"algorithm": {"type": "dr_grpo"}, "steps": 3, "reward": {"right": 0, "terms": terms}}

    with chat_server(by_text) as chats:
        fields = fields_of(chats.base_url)
        done = shared_engines.run(tmp_path / "whole", "rlvr", fields, given, ONE_THREAD)
        assert done["ok"], done
        rows = curve(a_job(tmp_path / "whole"))
        assert all(row["missing_rewards"] == 0 and row["updates"] > 0 for row in rows)
        assert all(1 <= row["reward_rating"] <= 5 and row["reward_reward_model"] != 0 for row in rows)
        for row in read_rows(tmp_path / "whole" / "out" / "evidence" / "rollouts.jsonl"):
            terms = zip(row["terms"]["reward_model"], row["terms"]["rating"], strict=True)
            assert row["rewards"] == [pytest.approx(a + 0.2 * b) for a, b in terms]
        asked.clear()
        killed_at("checkpoint renamed", 1, tmp_path / "job", "rlvr", fields, given, ONE_THREAD, checkpoint_every_steps=1)
        goes_on(shared_engines, tmp_path / "job", fields, given, tmp_path / "whole")
        assert len(asked) == len(set(asked)), "no question was asked twice"
