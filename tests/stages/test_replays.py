"""Stored successes in groups without one (`replay_successes`), by hand; the engine is a function here."""

import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from models import a_job
from pydantic import ValidationError
from rollout_lab import engine, plan, roller

from pedigree.stages.rlvr.group_selection import Cursor, replaceable, success
from pedigree.stages.rlvr.rolling import Group, Rollout, StepRollouts
from pedigree.stages.rlvr.run import training_samples
from pedigree.stages.sampling.conversations import SampledTurns
from pedigree.stages.sampling.sampler import Generation, Request
from pedigree.stages.verifiers import Verifying

pytestmark = pytest.mark.unit
NAN = math.nan
CHAT: Any = SimpleNamespace(eos_id=2, decode=lambda ids: "right" if ids[0] else "wrong", prompt=lambda messages, arguments: [7, 8])
REPLAYING: dict[str, Any] = {"replay_successes": True, "algorithm": {"type": "grpo", "correction": {}}, "prompts_per_step": 2}
Right = Callable[[int, int, int], bool]
"""Whether an answer is right: by step, prompt and place in its group."""


@pytest.mark.parametrize(
    ("scores", "rewards", "right", "wrong"),
    [
        ([0.0, 1.0, 1.0], [0.0, 0.5, 0.9], 2, None),
        ([0.0, 1.0, 1.0], [0.0, 0.7, 0.7], 1, None),
        ([1.0, 1.0], [NAN, 0.1], 1, None),  # a reward that is unknown is none
        ([0.0, 0.5, 0.0], [0.0, 0.5, 0.0], None, 2),  # half right is wrong
        ([0.0, 0.0, NAN], [0.0, 0.0, 0.3], None, 1),
        ([0.0, 0.0], [0.0, NAN], None, 0),
        ([NAN, NAN], [0.3, 0.4], None, None),
    ],
)
def test_the_best_right_answer_is_stored_and_the_last_wrong_one_is_replaced_where_none_is_right(scores, rewards, right, wrong):
    assert (success(scores, rewards), replaceable(scores, rewards)) == (right, wrong)


class Steps:
    """Steps of an engine whose answers begin with whether they are right, and end with the number of the step."""

    def __init__(self, right: Right, folder: Any, **fields: Any) -> None:
        verifier = {"name": "exact_match", "answer": "right", "hints": ["Think."]}
        rows = [{"id": f"p{n}", "messages": [{"role": "user", "content": str(n)}], "verifier": verifier} for n in range(2)]
        self.prompts: Any = [(row, [number]) for number, row in enumerate(rows)]
        self.config, self.right, self.job, self.asked = plan(**REPLAYING | fields), right, a_job(folder), list[Any]()
        self.step, self.cursor, self.successes = 0, Cursor(0), dict[str, str]()

    def answer(self, place: int, request: Request) -> Generation:
        right = self.right(self.step, request.prompt_ids[0], place % self.config.samples_per_prompt)
        return Generation([int(right), 5, self.step], [-1 / 3, -0.25, -self.step / 7], "stop", self.step)

    def roll(self, number: int) -> list[StepRollouts]:
        found = []
        with Verifying() as verifying:
            own = roller(verifying, self.config, [engine(self.answer, self.asked)], self.prompts, CHAT, self.job)
            own = replace(own, successes=self.successes)
            for _ in range(number):
                found.append(own.step(self.cursor, self.step))
                self.cursor, self.step = found[-1].cursor, self.step + 1
        return found


def groups_of(step: StepRollouts) -> dict[str, list[tuple[float, int]]]:
    """Prompt → (reward, step that sampled it) of its answers."""
    found: dict[str, list[tuple[float, int]]] = {}
    for one in step.rollouts:
        found.setdefault(one.prompt["id"], []).append((one.reward, one.answer.response_ids[-1]))
    return found


def first_answer_to_p0(step: int, number: int, place: int) -> bool:
    """Right in the first two steps."""
    return step < 2 and number == 0 and place == 0


def test_a_group_that_failed_gets_the_latest_success_with_what_sampled_it(tmp_path):
    *_, last = Steps(first_answer_to_p0, tmp_path).roll(3)
    assert groups_of(last) == {"p0": [(0.0, 2), (1.0, 1)], "p1": [(0.0, 2), (0.0, 2)]}
    (replayed,) = [one for one in last.rollouts if one.replayed]
    assert replayed.answer == Generation([1, 5, 1], [-1 / 3, -0.25, -1 / 7], "stop", 1) and replayed.prompt["id"] == "p0"
    sample = training_samples(last.rollouts, plan(**REPLAYING))[last.rollouts.index(replayed)]
    assert (sample.reward, sample.logprobs) == (1.0, [-1 / 3, -0.25, -1 / 7])
    numbers = last.numbers
    assert (numbers["replayed_answers"], numbers["reward"], numbers["score_exact_match"]) == (1, 0, 0)  # of the step's own answers
    assert last.tokens == 4 * 3 and last.successes == {}


def test_without_the_setting_nothing_is_stored_or_replayed(tmp_path):
    first, _, last = Steps(first_answer_to_p0, tmp_path, replay_successes=False).roll(3)
    assert first.successes == {} and "replayed_answers" not in last.numbers
    assert groups_of(last)["p0"] == [(0.0, 2), (0.0, 2)]


def test_steps_after_a_checkpoint_replay_what_steps_before_it_stored(tmp_path):
    whole = Steps(first_answer_to_p0, tmp_path)
    first, second, third = whole.roll(3)
    assert [[*one.successes] for one in (first, second, third)] == [["p0"], ["p0"], []]
    resumed = Steps(first_answer_to_p0, tmp_path)
    resumed.cursor, resumed.step, resumed.successes = second.cursor, 2, first.successes | second.successes
    assert [one.answer for one in resumed.roll(1)[0].rollouts] == [one.answer for one in third.rollouts]


def test_a_replay_makes_a_group_informative_so_it_is_not_resampled(tmp_path):
    fields = {"algorithm": {"type": "dapo", "correction": {}}, "prompts_per_step": 1}
    *_, last = Steps(lambda step, number, place: place == 0 and step < 2, tmp_path, **fields).roll(3)
    assert [[reward for reward, _ in own] for own in groups_of(last).values()] == [[0.0, 1.0]]
    assert (last.numbers["generated_batches"], last.numbers["replayed_answers"]) == (1, 1)


def test_a_success_is_replayed_before_a_hint_is_given(tmp_path):
    steps = Steps(first_answer_to_p0, tmp_path, hints={})
    *_, last = steps.roll(3)
    assert [[one.prompt_ids for one in requests] for requests, _ in steps.asked[-2:]] == [[[0], [0], [1], [1]], [[7, 8], [7, 8]]]
    assert sorted(groups_of(last)) == ["p0", "p1"]
    assert (last.numbers["hopeless_groups"], last.numbers["hinted_groups"], last.numbers["replayed_answers"]) == (2, 0, 1)


def test_a_prompt_that_is_solved_by_a_replay_only_is_not_set_aside(tmp_path):
    """With the stored answer, half of the answers to p0 are right."""
    steps = Steps(lambda step, number, place: False, tmp_path, prompts_per_step=1, no_resampling_pass_rate=0.5)
    steps.successes = Steps(first_answer_to_p0, tmp_path).roll(1)[0].successes
    found = steps.roll(2)
    assert sum(one.numbers["replayed_answers"] for one in found) == 1 and [one.numbers["set_aside_prompts"] for one in found] == [0, 0]


def test_a_conversation_is_replayed_with_its_turns_where_it_begins_alike():
    turns = SampledTurns([True, False, True], 2, [{"role": "user", "content": "Guess."}], [0.25, 1.0], 0.5)
    answer, row = Generation([5, 6, 2], [-0.1, 0.0, -0.2], "stop", 3, [[4, 2]]), {"id": "p0"}
    right = Rollout(row, [1, 2], answer, "9", 1.0, 1.25, {"environment": 1.25, "mine": NAN}, turns=turns)
    wrong = Rollout(row, [1, 2], Generation([5, 2], [-0.1, -0.2], "stop", 6), "8", 0.0, 0.0, {"environment": 0.0})
    (group,) = Group([wrong, wrong], 0.5).replaying(right.stored())
    assert group.greedy == 0.5 and group.rollouts[0] == wrong
    found = group.rollouts[1]
    assert math.isnan(found.terms.pop("mine") or 0) and found == replace(right, replayed=True, terms={"environment": 1.25})
    config: Any = plan(
        credit="turn", environment={"path": "environments/mine.py", "max_turns": 2},
        reward={"terms": [{"type": "environment"}]}, **REPLAYING,
    )  # fmt: skip
    assert found.turn_rewards(config) == [0.25, 1.0] and found.length == 2
    elsewhere = replace(wrong, prompt_ids=[1, 3])
    assert Group([elsewhere, elsewhere]).replaying(right.stored()) == []  # the environment began otherwise
    assert Group([right, wrong]).replaying(right.stored()) == Group([wrong, wrong]).replaying(None) == []


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"algorithm": {"type": "grpo"}}, r"answers of older weights: set `algorithm.correction: \{\}`"),
        ({"reward": {"right": 0, "terms": [{"type": "majority"}]}}, "the reward asks no verifier: set reward.right"),
        ({"algorithm": {"type": "ppo", "correction": {}}, "samples_per_prompt": 1}, "samples_per_prompt must be at least 2: raise it"),
    ],
)
def test_settings_without_a_meaning_are_refused(fields, message):
    with pytest.raises(ValidationError, match=message):
        plan(**REPLAYING | fields)


def test_recipes_without_it_keep_their_key():
    assert "replay_successes" not in plan().model_dump() and plan(**REPLAYING).model_dump()["replay_successes"]
