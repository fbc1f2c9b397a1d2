"""Terms of a reward: numbers by hand, TRL's functions of the same formulas, and what becomes of unknown parts."""

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from pydantic import ValidationError

from pedigree.configs.base.frozen import PortInput
from pedigree.configs.base.shrink import TOKENS, Cut, StandIns
from pedigree.configs.language.kinds import KINDS
from pedigree.configs.methods.language_model import endpoints
from pedigree.configs.methods.reward_terms import Reward
from pedigree.configs.methods.training import Rlvr
from pedigree.stages.core.advantages import normalised
from pedigree.stages.rlvr.rewarding import LARGEST, Rewards, reward
from pedigree.stages.verifiers.reward_programs import Answered

pytestmark = pytest.mark.unit


def answered(tokens: int | list[int], text: str = "x", score: float | None = 1.0, finish: str = "stop", prompt: str = "p") -> Answered:
    row = {"id": prompt, "source": "s", "messages": [{"role": "user", "content": "?"}], "verifier": {"name": "gsm", "answer": "1"}}
    return Answered(row, text, [1] * tokens if isinstance(tokens, int) else tokens, finish, score)


def term_of(term: dict[str, Any], answers: list[Answered], max_tokens: int = 100) -> list[Any]:
    given = Reward.model_validate({"right": 0, "terms": [term]})
    return [one.terms[given.terms[0].called] for one in Rewards(given, max_tokens, {}).of(answers, len(answers))]


def trl() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("trl.rewards")


LENGTHS = [1, 79, 80, 81, 90, 99, 100]


def test_overlong_answers_lose_up_to_one_within_the_buffer():
    found = term_of({"type": "overlong", "buffer": 20}, [answered(tokens) for tokens in LENGTHS])
    assert found == [0, 0, 0, -0.05, -0.5, -0.95, -1]
    assert found == trl().get_soft_overlong_punishment(100, 20)(completion_ids=[[1] * tokens for tokens in LENGTHS])


def test_repeated_ngrams_cost_their_share():
    ids = [[1, 2, 3, 4], [5, 5, 5, 5, 5], [1, 2, 1, 2, 1], [7], []]
    found = term_of({"type": "repetition", "ngram": 2}, [answered(one) for one in ids])
    assert found == [0, pytest.approx(-0.75), pytest.approx(-0.5), 0, 0]  # (1 2) and (2 1) twice each: 2 of 4
    assert found == pytest.approx(trl().get_repetition_penalty_reward(2, -1.0)(completion_ids=ids))


def test_the_cosine_of_the_length_favors_short_right_and_long_wrong_answers():
    term = {"type": "cosine", "right_short": 1.0, "right_long": 0.5, "wrong_short": -1.0, "wrong_long": -0.5, "exceeded": None}
    right, wrong = (term_of(term, [answered(tokens, score=score) for tokens in (0, 50, 100)]) for score in (1.0, 0.0))
    assert right == pytest.approx([1.0, 0.75, 0.5]) and wrong == pytest.approx([-1.0, -0.75, -0.5])
    pytest.importorskip("math_verify")
    texts = [[{"content": rf"\boxed{{{answer}}}"}] for answer in (3, 3, 3, 4, 4, 4)]
    ids = [[1] * tokens for tokens in (0, 50, 100) * 2]
    assert right + wrong == pytest.approx(trl().get_cosine_scaled_reward(max_len=100)(texts, [r"\boxed{3}"] * 6, ids))
    assert term_of({"type": "cosine"}, [answered(0), answered(100), answered(0, score=0.0)]) == [2, -10, -10]


def test_the_shortest_right_answers_gain_a_half_and_wrong_ones_never():
    answers = [answered(10), answered(20), answered(30), answered(10, score=0.0), answered(30, score=0.0)]
    assert term_of({"type": "length"}, answers) == [0.5, 0, -0.5, 0, -0.5]
    assert term_of({"type": "length"}, [answered(7), answered(7, score=0.0)]) == [0, 0]


def test_a_format_matches_from_the_beginning_as_in_trl():
    texts = ["<think>\na\n</think>\nb", "<think>\na\nb", "x <think>a</think>", "<think>a<think>b</think>"]
    pattern = r"^<think>(?!.*<think>)(.*?)</think>.*$"
    found = term_of({"type": "format", "pattern": pattern}, [answered(1, text) for text in texts])
    assert found == [1, 0, 0, 0] == trl().think_format_reward([[{"content": text}] for text in texts])


def in_the_manual(name: str) -> list[dict[str, Any]]:
    """The terms of the recipe beside a reward function of TRL in docs/from-trl.md."""
    page = (Path(__file__).parents[2] / "docs" / "from-trl.md").read_text()
    row = next(line for line in page.splitlines() if name in line.split(" | ")[0])
    return yaml.safe_load(row.split(" | ")[1].strip("`"))["reward"]["terms"]


def test_the_terms_beside_rewards_of_trl_in_the_manual_give_the_same_numbers():
    (overlong,) = in_the_manual("get_soft_overlong_punishment(256, 64)")
    ids = [[1] * tokens for tokens in (192, 193, 224, 256)]
    found = term_of(overlong, [answered(one) for one in ids], max_tokens=256)
    assert found == [0, -1 / 64, -0.5, -1] == trl().get_soft_overlong_punishment(256, 64)(completion_ids=ids)
    (pattern,) = in_the_manual("think_format_reward")
    texts = ["<think>\na\n</think>\nb", "<think>never closed", "b"]
    found = term_of(pattern, [answered(1, text) for text in texts])
    assert found == [1, 0, 0] == trl().think_format_reward([[{"content": text}] for text in texts])
    cosine, repetition = in_the_manual("get_cosine_scaled_reward(256)")
    right, wrong = (term_of(cosine, [answered(tokens, score=score) for tokens in (0, 128, 256)], max_tokens=256) for score in (1.0, 0.0))
    assert right == pytest.approx([1.0, 0.75, 0.5]) and wrong == pytest.approx([-1.0, -0.75, -0.5])  # TRL's default bounds
    assert term_of(repetition, [answered([1, 2, 3, 1, 2, 3])]) == pytest.approx([-0.25])  # four trigrams, of which three differ


def test_a_pattern_that_takes_forever_makes_the_reward_unknown(monkeypatch):
    monkeypatch.setattr("pedigree.stages.rlvr.rewarding.SEARCH_SECONDS", 0.05)
    given = Reward.model_validate({"right": 1, "terms": [{"type": "format", "pattern": "(a|aa)+$", "weight": 0.5}]})
    slow, quick = Rewards(given, 8, {}).of([answered(1, "a" * 60 + "b"), answered(1, "aa")], 2)
    assert math.isnan(slow.reward) and "took more than 0.05 s on an answer of 61 characters" in slow.cause
    assert quick.reward == 1.5


def test_each_answer_to_which_a_pattern_is_applied_is_a_sign_of_work():
    given, told = Reward.model_validate({"right": 0, "terms": [{"type": "format", "pattern": "x", "name": "tags"}]}), []
    Rewards(given, 8, {}, told.append).of([answered(1)] * 6, 3)
    assert told == ["rewarding by tags"] * 6


@pytest.mark.parametrize("size", [1.5e15, 3e19, 1e39])
def test_a_reward_whose_square_fp32_cannot_hold_is_unknown(size, capsys):
    huge, small = Rewards(Reward(right=size), 8, {}).of([answered(1, score=-1.0), answered(1, score=0.0)], 2)
    assert math.isnan(huge.reward) and small.reward == 0
    assert huge.cause == f"the reward is {-size:g}, beyond ±1e+15: scale its terms down, or set reward.clip"
    assert f"no reward for an answer to p: {huge.cause}" in capsys.readouterr().out
    bounded = Reward.model_validate({"right": 3e19, "clip": [-1.0, 1.0]})
    assert [one.reward for one in Rewards(bounded, 8, {}).of([answered(1), answered(1, score=0.0)], 2)] == [1, 0]


def test_advantages_of_the_largest_rewards_are_finite():
    rewards = torch.tensor([[LARGEST, -LARGEST] * 512])
    assert normalised(rewards)[0, 0].item() == pytest.approx((1023 / 1024) ** 0.5)


def test_the_reward_is_the_weighted_sum_within_its_bounds():
    terms = [{"type": "overlong", "buffer": 20, "weight": 2.0}, {"type": "format", "pattern": "x", "weight": 0.25, "name": "starts"}]
    given = Reward.model_validate({"right": 3.0, "terms": terms, "clip": [-1.5, 3.1]})
    answers = [answered(90), answered(100, score=0.0), answered(1), answered(1, score=None)]
    found = Rewards(given, 100, {}).of(answers, 4)
    assert [one.reward for one in found[:3]] == [3.0 - 1.0 + 0.25, -1.5, 3.1]  # -2 + 0.25 and 3.25 are cut
    assert found[0].terms == {"overlong": -0.5, "starts": 1.0}
    assert math.isnan(found[3].reward)  # a bound is no reward of an answer whose score is unknown


def test_a_term_left_out_by_a_function_counts_nothing_and_an_unknown_one_everything():
    given = Reward.model_validate({"right": 0, "terms": [{"type": "program", "path": "mine.py", "weight": 2}, {"type": "repetition"}]})
    assert reward(math.nan, "stop", given, {"mine": None, "repetition": -0.5}) == -0.5
    assert reward(math.nan, "stop", given, {"mine": 1.0, "repetition": -0.5}) == 1.5
    assert math.isnan(reward(math.nan, "stop", given, {"mine": math.nan, "repetition": -0.5}))
    assert math.isnan(reward(math.nan, "stop", given, {"mine": None, "repetition": None}))
    measured = Reward.model_validate({"terms": [{"type": "program", "path": "mine.py", "weight": 0}]})
    assert reward(1.0, "stop", measured, {"mine": math.nan}) == 1.0


RLVR = {
    "algorithm": {"type": "dapo"}, "steps": 1, "prompts_per_step": 4, "samples_per_prompt": 2, "sampling": {"max_tokens": 8},
    "max_prompt_length": 8, "optimizer": {"learning_rate": 1e-6},
}  # fmt: skip
PROGRAM = {"type": "program", "path": "rewards/mine.py"}
BY = {"type": "endpoint", "base_url": "https://example.org/v1", "model": "m"}
RATING = {"type": "rating", "rubrics": ["helpfulness"], "by": BY, "sampling": {"temperature": 0.0, "max_tokens": 512}}


@pytest.mark.parametrize(
    ("given", "more", "told"),
    [
        ({"right": 0}, {}, "right is 0 and no term has a weight"),
        ({"terms": [PROGRAM, PROGRAM]}, {}, "two terms called mine: give one of them another `name`"),
        ({"clip": [1.0, -1.0]}, {}, r"clip is \[1.0, -1.0\], but must be two bounds"),
        ({"terms": [{"type": "overlong", "buffer": 9}]}, {}, "buffer of overlong is 9, more than max_tokens 8"),
        ({"terms": [{"type": "length"}]}, {"algorithm": {"type": "remax"}}, "length compares the answers to a prompt, but remax"),
        ({"terms": [{"type": "format", "pattern": "("}]}, {}, r"'\(' is not a regular expression"),
        (
            {"terms": [{"type": "majority"}]},
            {"samples_per_prompt": 1, "algorithm": {"type": "reinforce_pp"}},
            "majority compares the answers",
        ),
        ({"terms": [RATING | {"rubrics": ["wit"]}]}, {}, "rubric 'wit' is not one of"),
        ({"terms": [PROGRAM | {"path": "mine.txt"}]}, {}, "'mine.txt' is not a Python file"),
        ({"terms": [PROGRAM | {"function": "my reward"}]}, {}, "'my reward' is not a function name"),
        ({"terms": [PROGRAM | {"arguments": {"completions": 1}}]}, {}, "'completions' is not a valid argument name"),
    ],
)
def test_a_reward_that_cannot_be_is_refused_with_the_recipe(given, more, told):
    with pytest.raises(ValidationError, match=told):
        Rlvr.model_validate(RLVR | more | {"reward": given})


def test_a_recipe_without_terms_keeps_its_identity():
    assert Rlvr.model_validate(RLVR).model_dump()["reward"] == {"right": 1.0, "truncated": None}


def test_a_rehearsal_cuts_the_buffer_with_the_answers():
    terms = [{"type": "format", "pattern": "x"}, {"type": "overlong", "buffer": 4096}]
    config = Rlvr.model_validate(RLVR | {"sampling": {"max_tokens": 20480}, "reward": {"terms": terms}})
    cut = Cut("r/rlvr", config, {}, StandIns())
    KINDS["rlvr"].shrink(cut)
    rehearsed = Rlvr.model_validate(cut.written)
    assert rehearsed.sampling.max_tokens == TOKENS and rehearsed.reward.terms[1].model_dump()["buffer"] == TOKENS


@pytest.mark.parametrize(
    ("terms", "given", "told"),
    [
        ([{"type": "reward_model"}], ["a"], None),
        ([{"type": "reward_model", "ensemble": {"type": "worst_case"}}], ["a", "b"], None),
        ([{"type": "reward_model", "models": ["a"]}, {"type": "reward_model", "models": ["b"], "name": "safe"}], ["a", "b"], None),
        ([], ["a"], "reward_models has a, which no term of reward uses"),
        ([{"type": "reward_model", "models": ["a"]}], ["a", "b"], "reward_models has b, which no term of reward uses"),
        ([{"type": "reward_model", "models": ["c"]}], ["a", "b"], "uses the reward model c, but reward_models has a, b: use one of these"),
        ([{"type": "reward_model", "models": []}], ["a"], "models of reward_model is empty: name some of a"),
        (
            [{"type": "reward_model", "ensemble": {"type": "worst_case"}}],
            ["a"],
            "worst_case of reward_model needs at least 2 reward models",
        ),
    ],
)
def test_reward_models_that_do_not_fit_the_terms_are_refused(terms, given, told):
    kind, config = KINDS["rlvr"], Rlvr.model_validate(RLVR | {"reward": {"terms": terms}})
    found = kind.problem(config, {"reward_models": {label: PortInput("reward_model", config) for label in given}})
    assert (found is None) if told is None else (found is not None and told in found)
    assert kind.needs(config) == ({"reward_models"} if terms else set())


def test_a_rehearsal_asks_its_own_judge():
    config = Rlvr.model_validate(RLVR | {"reward": {"terms": [{"type": "majority"}, RATING]}})
    assert [by.base_url for by in endpoints(config)] == ["https://example.org/v1"]
    cut = Cut("r/rlvr", config, {}, StandIns(judge_url="http://127.0.0.1:1/v1"))
    KINDS["rlvr"].shrink(cut)
    term = Rlvr.model_validate(cut.written).reward.terms[1].model_dump()
    assert (term["by"]["base_url"], term["sampling"]["max_tokens"], term["max_unanswered_share"]) == ("http://127.0.0.1:1/v1", TOKENS, 0.5)
    assert {change.setting for change in cut.changes} >= {"reward.terms.1.by.base_url", "reward.terms.1.sampling.max_tokens"}
