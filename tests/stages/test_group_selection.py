"""Which prompts a step draws, and which groups and answers it trains on, by hand; the engine is a function here."""

import json
import math
import random
import statistics
from collections import Counter
from collections.abc import Callable
from itertools import combinations
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from models import a_job
from pydantic import ValidationError
from rollout_lab import engine, plan, roller

from pedigree.configs.base.shrink import Cut, StandIns
from pedigree.configs.base.work import PlannedStage
from pedigree.configs.language.kinds import KINDS, kind_of
from pedigree.configs.methods.policy_gradient import Keep, Resampling
from pedigree.configs.methods.training import Rlvr
from pedigree.stages.core import policy_losses as pg
from pedigree.stages.rlvr.group_selection import Choice, Cursor, choose, kept, solved, upcoming
from pedigree.stages.rlvr.rolling import Group, Rollout, StepRollouts
from pedigree.stages.rlvr.run import training_samples
from pedigree.stages.sampling.sampler import Generation, Request
from pedigree.stages.verifiers import Verifying

pytestmark = pytest.mark.unit
YES, NO = True, False
START = Cursor(0)


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


def test_no_later_batch_has_more_prompts_than_the_first():
    resampling = Resampling(batch_multiplier=1.5)
    assert (resampling.batch(64), resampling.batch(3)) == (96, 4)
    assert choose([NO] * 96, [YES] * 96, 64, 1, resampling).more == 96  # by the rate so far, any number
    assert choose([NO] * 64 + [YES] * 32, [YES] * 96, 64, 1, resampling).more == 96  # 32 are missing: 96 by the rate so far
    assert choose([NO] * 32 + [YES] * 48, [YES] * 80, 64, 2, resampling).more == 27  # 16 are missing: ⌈16 · 80 / 48⌉


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


def test_prompts_that_are_set_aside_are_passed_over_and_all_others_come_once():
    every = list(upcoming(3, 5, seed=7))
    assert list(upcoming(3, 5, seed=7, set_aside=[1, 4])) == [(place, row) for place, row in every if row not in (1, 4)]
    assert not list(upcoming(3, 5, seed=7, set_aside=range(5)))


@pytest.mark.parametrize(
    ("before", "pass_rates", "threshold", "set_aside"),
    [
        ([7, 2], {5: 0.875, 0: 1.0, 1: 0.75}, 0.875, [0, 2, 5, 7]),
        ([2, 7], {3: 0.0}, 0.875, [2, 7]),
        ([2], {2: 0.25}, 0.875, [2]),
        ([0, 1, 2, 3], {4: 1.0, 5: 1.0}, 1.0, [0, 1, 2, 3, 4, 5]),  # four of ten are left, which a step requires
        ([0, 1, 2, 3], {4: 1.0, 5: 1.0, 6: 1.0}, 1.0, []),
        ([], {4: 1.0}, None, []),
    ],
)
def test_solved_prompts_are_set_aside_until_fewer_than_a_step_requires_would_be_left(before, pass_rates, threshold, set_aside):
    assert solved(before, pass_rates, threshold, num_prompts=10, wanted=4) == set_aside


ANSWER = {"name": "exact_match", "answer": "right"}


def rolled(right: Callable[[int, int], bool], pool: int, tmp_path, cursor: Cursor = START, **fields: Any) -> tuple[StepRollouts, list[int]]:
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
        step = roller(verifying, config, [engine(answer, asked)], prompts, chat, a_job(tmp_path)).step(cursor, 0)
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
    assert asked == [4, 4] and first.cursor == (4, [])  # one of two had a signal, so two were drawn for the missing one
    assert (first.numbers["generated_batches"], first.numbers["resampled_prompts"], first.numbers["reward"]) == (2, 2, 0.25)
    second, _ = rolled(lambda number, index: number in good and half(number, index), 8, tmp_path, cursor=first.cursor)
    assert second.rollouts[0].prompt["id"] == f"p{order[5]}"


def test_a_larger_first_batch_spares_a_second_one_and_its_surplus_is_drawn_again(tmp_path):
    order = [row for _, row in upcoming(0, 8, 0)]
    good = set(order[1:8:2])
    fields: dict[str, Any] = {"algorithm": {"type": "dapo", "resampling": {"batch_multiplier": 2.5}}}
    step, asked = rolled(lambda number, index: number in good and half(number, index), 8, tmp_path, **fields)
    assert [one.prompt["id"] for one in step.rollouts[::2]] == [f"p{order[1]}", f"p{order[3]}"]
    assert asked == [5 * 2] and step.cursor.position == 4
    assert (step.numbers["generated_batches"], step.numbers["resampled_prompts"], step.tokens) == (1, 3, 100)


def test_a_plan_counts_the_prompts_of_the_first_batch():
    config = plan(algorithm={"type": "dapo", "resampling": {"batch_multiplier": 2}}, steps=5, prompts_per_step=3, samples_per_prompt=2)
    kind, stage = kind_of(config), cast(PlannedStage, SimpleNamespace(config=config, inputs={}))
    sampling, training, requests = kind.sampling_plan(config), kind.training_plan(config), kind.work(stage).requests
    assert sampling and (sampling.together, sampling.chunk) == (12, 12)
    assert requests and (requests.value, requests.how) == (5 * 12, "at least")
    assert training and training.batch == 6


def steps_of(right: Callable[[int, int], bool], number: int, tmp_path, **fields: Any) -> list[tuple[list[str], float, list[int]]]:
    """(prompts, metric, rows set aside) of steps with eight prompts, each from where the one before ended, as a checkpoint keeps it."""
    found, cursor = [], START
    for _ in range(number):
        step, _ = rolled(right, 8, tmp_path, cursor, **fields)
        cursor = Cursor(**json.loads(json.dumps(step.cursor._asdict())))
        found.append(([one.prompt["id"] for one in step.rollouts[::2]], step.numbers["set_aside_prompts"], cursor.set_aside))
    return found


def test_a_prompt_whose_answers_reach_the_pass_rate_is_drawn_by_no_later_step(tmp_path):
    """Eight prompts, two a step: one of each step of the first epoch is solved, and the other four are drawn on."""
    order = [row for _, row in upcoming(0, 8, 0)]
    fields = {"algorithm": {"type": "grpo"}, "no_resampling_pass_rate": 0.5}
    easy = sorted(order[::2])
    steps = steps_of(lambda number, index: number in easy and half(number, index), 7, tmp_path, **fields)
    drawn = [int(name[1:]) for prompts, _, _ in steps for name in prompts]
    assert [metric for _, metric, _ in steps] == [1, 2, 3, 4, 4, 4, 4] and steps[3][2] == steps[-1][2] == easy
    assert drawn[:8] == order and set(drawn[8:]) == set(order) - set(easy)


def test_groups_that_the_next_step_draws_again_are_no_visit(tmp_path):
    """The first two of five have a signal and are half right, so the step needs no more; the others are solved, too."""
    order = [row for _, row in upcoming(0, 8, 0)]
    fields = {"algorithm": {"type": "dapo", "resampling": {"batch_multiplier": 2.5}}, "no_resampling_pass_rate": 0.5}
    ((_, metric, set_aside),) = steps_of(lambda number, index: number not in order[:2] or half(number, index), 1, tmp_path, **fields)
    assert metric == 2 and set_aside == sorted(order[:2])


def test_a_pass_rate_is_the_mean_score_of_the_answers_that_have_one():
    def group(*scores: float) -> Group:
        return Group([Rollout({}, [], Generation([1], [-1.0], "stop"), "", score, 5.0, {}) for score in scores])

    assert [group(1.0, 1.0, 0.0, 0.5).pass_rate, group(1.0, math.nan, 0.5).pass_rate, group(math.nan).pass_rate] == [0.625, 0.75, 0]


def test_a_pass_rate_without_scores_is_refused_and_old_recipes_keep_their_key():
    terms = [{"type": "repetition", "ngram": 1}]
    with pytest.raises(ValidationError, match=r"_pass_rate 0.9 bounds verifier scores.*: remove it, or set reward.right above 0"):
        plan(reward={"right": 0, "terms": terms}, no_resampling_pass_rate=0.9)
    assert "no_resampling_pass_rate" not in plan().model_dump()
    assert plan(algorithm={"type": "dapo"}).model_dump()["algorithm"]["resampling"] == {"max_batches": 10}


def test_the_bound_ends_a_step_with_what_it_has(tmp_path):
    fields: dict[str, Any] = {"algorithm": {"type": "grpo", "resampling": {"max_batches": 3}}}
    order = [row for _, row in upcoming(0, 20, 0)]
    step, asked = rolled(lambda number, index: number == order[0] and half(number, index), 20, tmp_path, **fields)
    assert asked == [4, 4, 4] and step.cursor.position == 6 and [one.prompt["id"] for one in step.rollouts] == [f"p{order[0]}"] * 2
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
    assert Group(rollouts).informative(None) == informative


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


def test_a_rehearsal_draws_at_most_two_batches_first():
    cut = Cut("r/rlvr", plan(algorithm={"type": "grpo", "resampling": {"batch_multiplier": 3}}), {}, StandIns())
    KINDS["rlvr"].shrink(cut)
    assert Rlvr.model_validate(cut.written).algorithm.resampling == Resampling(max_batches=2, batch_multiplier=2)


@pytest.mark.parametrize("answers", [1, 4])
def test_a_choice_that_leaves_nothing_to_compare_or_exceeds_the_group_is_refused(answers):
    with pytest.raises(ValidationError, match=f"keep.answers is {answers}, but must be from 2 to samples_per_prompt 3"):
        plan(algorithm={"type": "grpo", "keep": {"answers": answers}}, samples_per_prompt=3)
