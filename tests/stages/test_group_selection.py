"""Which prompts a step draws, and which groups and answers it trains on, by hand; the engine is a function here."""

import math
import random
import statistics
from collections import Counter
from collections.abc import Callable
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models import a_job
from pydantic import ValidationError
from rollout_lab import engine, plan, roller

from pedigree.configs.base.shrink import Cut, StandIns
from pedigree.configs.language.kinds import KINDS
from pedigree.configs.methods.policy_gradient import Keep, Resampling
from pedigree.configs.methods.training import Rlvr
from pedigree.stages.core import policy_losses as pg
from pedigree.stages.rlvr.group_selection import Choice, choose, kept, upcoming
from pedigree.stages.rlvr.rolling import Group, Rollout, StepRollouts
from pedigree.stages.rlvr.run import training_samples
from pedigree.stages.sampling.sampler import Generation, Request
from pedigree.stages.verifiers import Verifying

pytestmark = pytest.mark.unit
YES, NO = True, False


@pytest.mark.parametrize(
    ("informative", "batches", "choice"),
    [
        ([YES, NO, YES, YES], 1, Choice([0, 2, 3], 4, 0)),
        ([YES, YES, NO, YES, YES, NO], 2, Choice([0, 1, 3], 4, 0)),  # the surplus is drawn again by the next step
        ([YES, NO, NO], 1, Choice([0], 3, 3)),  # two are missing: six prompts by the rate so far, of which three fit a batch
        ([YES, YES, NO], 1, Choice([0, 1], 3, 2)),  # one is missing: ⌈3 / 2⌉
        ([NO, NO, NO], 1, Choice([0, 1, 2], 3, 3)),
        ([NO, YES, NO], 4, Choice([1], 3, 0)),  # the bound
        ([NO, NO, NO, NO], 4, Choice([0, 1, 2], 4, 0)),
    ],
)
def test_groups_without_a_signal_are_replaced_until_the_step_is_full_or_the_bound_is_reached(informative, batches, choice):
    assert choose(informative, [True] * len(informative), 3, batches, Resampling(max_batches=4)) == choice


def test_without_resampling_all_groups_are_trained_on():
    assert choose([NO, YES, NO], [NO, YES, YES], 3, 1, None) == Choice([0, 1, 2], 3, 0)


@pytest.mark.parametrize(
    ("known", "kept"), [([NO, NO, NO, YES, NO, YES], [3, 5]), ([NO, YES, YES, YES, YES, NO], [1, 2, 3]), ([NO] * 6, [0, 1, 2])]
)
def test_without_any_signal_groups_with_a_reward_are_kept(known, kept):
    assert choose([NO] * 6, known, 3, 4, Resampling(max_batches=4)) == Choice(kept, 6, 0)


def test_prompts_come_in_one_order_over_all_epochs_and_each_once_in_a_step():
    order = [row for start in range(0, 15, 5) for _, row in upcoming(start, 5, seed=7)]
    epochs = [order[start : start + 5] for start in range(0, 15, 5)]
    assert all(sorted(epoch) == list(range(5)) for epoch in epochs) and len({tuple(epoch) for epoch in epochs}) > 1
    across = list(upcoming(3, 5, seed=7))
    assert [row for _, row in across[:2]] == order[3:5] and sorted(row for _, row in across) == list(range(5))
    assert all(order[place] == row for place, row in across)


ANSWER = {"name": "exact_match", "answer": "right"}


def rolled(right: Callable[[int, int], bool], pool: int, tmp_path, position: int = 0, **fields: Any) -> tuple[StepRollouts, list[int]]:
    """A step of an engine whose answer number `index` to prompt `number` is right or not, ten tokens each; the calls' sizes."""
    prompts: list[Any] = [({"id": f"p{number}", "verifier": ANSWER}, [number]) for number in range(pool)]
    asked, visits = list[Any](), Counter[int]()

    def answer(place: int, request: Request) -> Generation:
        (number,) = request.prompt_ids
        visits[number] += 1
        return Generation([int(right(number, visits[number]))] * 10, [-1.0] * 10, "stop")

    chat: Any = SimpleNamespace(eos_id=2, decode=lambda ids: "right" if ids[0] else "wrong")
    with Verifying() as verifying:
        config = plan(**{"algorithm": {"type": "dapo"}, "prompts_per_step": 2, **fields})
        step = roller(verifying, config, [engine(answer, asked)], prompts, chat, a_job(tmp_path)).step(position, 0)
    return step, [len(requests) for requests, _ in asked]


def half(number: int, index: int) -> bool:
    return index % 2 == 0


def test_dapos_divisor_counts_kept_groups_only(tmp_path):
    """Rewards [1, 0] and [1, 1], ten tokens each: DAPO divides by 20, and not by 40."""
    step, _ = rolled(lambda number, index: number == 1 or half(number, index), 2, tmp_path)
    assert [(one.prompt["id"], one.reward) for one in step.rollouts] == [("p0", 1.0), ("p0", 0.0)]
    lengths = torch.tensor([len(one.answer.response_ids) for one in step.rollouts])
    assert pg.token_weights("token-mean", lengths, 1, 10).tolist() == pytest.approx([1 / 20] * 2)
    assert step.numbers["reward"] == 0.75  # of all answers: the kept ones are always in the middle
    assert (step.numbers["generated_batches"], step.numbers["resampled_prompts"], step.tokens) == (1, 0, 40)


def test_a_step_draws_on_until_it_is_full_and_the_next_one_continues_there(tmp_path):
    order = [row for _, row in upcoming(0, 8, 0)]
    good = {order[1], order[3], order[5]}
    first, asked = rolled(lambda number, index: number in good and half(number, index), 8, tmp_path)
    assert [one.prompt["id"] for one in first.rollouts[::2]] == [f"p{order[1]}", f"p{order[3]}"]
    assert asked == [4, 4] and first.position == 4  # one of two had a signal, so two were drawn for the missing one
    assert (first.numbers["generated_batches"], first.numbers["resampled_prompts"], first.numbers["reward"]) == (2, 2, 0.25)
    second, _ = rolled(lambda number, index: number in good and half(number, index), 8, tmp_path, position=first.position)
    assert second.rollouts[0].prompt["id"] == f"p{order[5]}"


def test_the_bound_ends_a_step_with_what_it_has(tmp_path):
    fields: dict[str, Any] = {"algorithm": {"type": "grpo", "resampling": {"max_batches": 3}}}
    order = [row for _, row in upcoming(0, 20, 0)]
    step, asked = rolled(lambda number, index: number == order[0] and half(number, index), 20, tmp_path, **fields)
    assert asked == [4, 4, 4] and step.position == 6 and [one.prompt["id"] for one in step.rollouts] == [f"p{order[0]}"] * 2
    hopeless, asked = rolled(lambda number, index: False, 20, tmp_path, **fields)
    assert asked == [4, 4, 4] and [one.prompt["id"] for one in hopeless.rollouts[::2]] == [f"p{row}" for row in order[:2]]


@pytest.mark.parametrize(("algorithm", "batches"), [("grpo", 2), ("reinforce_pp", 1)])
def test_groups_whose_kept_answers_are_equal_are_replaced_where_answers_are_compared(tmp_path, algorithm, batches):
    """Of four answers, the first prompts have two right ones and the others one; the two best are trained on."""
    order = [row for _, row in upcoming(0, 8, 0)]
    fields = {"type": algorithm, "keep": {"answers": 2, "by": "top"}, "resampling": {"max_batches": 3}}
    step, _ = rolled(lambda number, index: index <= (2 if number in order[:2] else 1), 8, tmp_path, algorithm=fields, samples_per_prompt=4)
    first = 0 if batches == 1 else 2
    assert [one.prompt["id"] for one in step.rollouts[::4]] == [f"p{row}" for row in order[first : first + 2]]
    assert step.numbers["generated_batches"] == batches


def test_no_prompt_is_drawn_twice_in_a_step(tmp_path):
    step, asked = rolled(lambda number, index: False, 5, tmp_path)
    assert asked == [4, 4, 2] and step.numbers["resampled_prompts"] == 3


@pytest.mark.parametrize(
    ("scores", "rewards", "informative"),
    [
        ([1.0, 0.0], [1.0, 0.0], True),
        ([0.0, 0.0], [0.0, -10.0], False),  # both wrong, one also without an end: eq. 11 asks for right and wrong ones
        ([1.0, 0.0], [-10.0, -10.0], False),  # neither has an end, so their advantages are 0
        ([math.nan, math.nan], [0.3, 0.4], True),  # nothing verified them
        ([1.0, math.nan], [1.0, math.nan], False),
    ],
)
def test_a_group_is_informative_if_right_and_wrong_answers_have_unequal_rewards(scores, rewards, informative):
    answer = Generation([1], [-1.0], "stop")
    rollouts = [Rollout({}, [], answer, "", score, reward, {}) for score, reward in zip(scores, rewards, strict=True)]
    assert Group(0, rollouts).informative(None) == informative


def test_groups_of_one_cannot_be_informative():
    with pytest.raises(ValidationError, match="resampling keeps prompts whose answers differ, so samples_per_prompt must be at least 2"):
        plan(samples_per_prompt=1, algorithm={"type": "ppo", "resampling": {}})


# --- answers of a group ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("by", "rewards", "chosen"),
    [
        ("top", [0.1, 0.9, 0.5, 0.7], {1, 3}),
        ("extremes", [0.1, 0.9, 0.5, 0.7], {0, 1}),
        ("variance", [0.4, 0.9, 0.5, 0.0], {1, 3}),
        ("variance", [1.0, 1.0, 0.0, 1.0], {2, 3}),  # one of each; of three equal ones the last in order of reward
        ("variance", [1.0, math.nan, math.nan, math.nan], {0}),
        ("top", [math.nan, 0.2, 0.1, math.nan], {1, 2}),
    ],
)
def test_two_answers_are_chosen_by_their_rewards(by, rewards, chosen):
    assert kept(rewards, Keep(answers=2, by=by)) == chosen


def test_no_subset_has_more_variance():
    draw = random.Random(0)
    for size in (2, 3, 5):
        for _ in range(20):
            rewards = [draw.choice([0.0, 1.0, draw.random()]) for _ in range(7)]
            best = max(statistics.pvariance(subset) for subset in combinations(rewards, size))
            assert statistics.pvariance(rewards[place] for place in kept(rewards, Keep(answers=size))) == pytest.approx(best)


def test_other_answers_have_no_reward_and_cut_off_ones_are_masked():
    rewards, ends = [0.5, 1.0, 0.0, 0.0, 1.0, 0.2], ["stop", "length", "stop", "stop", "stop", "length"]
    rollouts = [
        Rollout({"id": f"p{place // 3}"}, [1], Generation([5], [-1.0], end), "", reward, reward, {})
        for place, (reward, end) in enumerate(zip(rewards, ends, strict=True))
    ]
    algorithm = {"type": "grpo", "keep": {"answers": 2}, "mask_truncated": True}
    samples = training_samples(rollouts, plan(algorithm=algorithm, samples_per_prompt=3))
    assert [sample.reward for sample in samples] == pytest.approx([math.nan, 1.0, 0.0, 0.0, 1.0, math.nan], nan_ok=True)
    assert [sample.masked for sample in samples] == [False, True, False, False, False, True]
    plain = training_samples(rollouts, plan(samples_per_prompt=3))
    assert [sample.reward for sample in plain] == rewards and not any(sample.masked for sample in plain)


def test_a_rehearsal_keeps_some_of_its_fewer_answers():
    algorithm = {"type": "grpo", "keep": {"answers": 16}}
    config = plan(algorithm=algorithm, samples_per_prompt=64)
    cut = Cut("r/rlvr", config, {}, StandIns())
    KINDS["rlvr"].shrink(cut)
    rehearsed = Rlvr.model_validate(cut.written)
    assert (rehearsed.samples_per_prompt, rehearsed.algorithm.keep) == (8, Keep(answers=4))


@pytest.mark.parametrize("answers", [1, 4])
def test_a_choice_that_leaves_nothing_to_compare_or_exceeds_the_group_is_refused(answers):
    with pytest.raises(ValidationError, match=f"keep.answers is {answers}, but must be from 2 to samples_per_prompt 3"):
        plan(algorithm={"type": "grpo", "keep": {"answers": answers}}, samples_per_prompt=3)
