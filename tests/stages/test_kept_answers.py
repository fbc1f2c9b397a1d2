"""Which answers of a group are trained on, by hand and against all subsets."""

import math
import random
import statistics
from itertools import combinations

import pytest
from models import config_of
from pydantic import ValidationError

from pedigree.configs.base.shrink import Cut, StandIns
from pedigree.configs.language.kinds import KINDS
from pedigree.configs.methods.policy_gradient import Keep
from pedigree.configs.methods.training import Rlvr
from pedigree.stages.rlvr.kept_answers import kept
from pedigree.stages.rlvr.rolling import Rollout
from pedigree.stages.rlvr.run import training_samples
from pedigree.stages.sampling.sampler import Generation

pytestmark = pytest.mark.unit
NAN = math.nan
PLAN = {
    "steps": 2,
    "prompts_per_step": 2,
    "samples_per_prompt": 3,
    "sampling": {"max_tokens": 10},
    "max_prompt_length": 8,
    "optimizer": {"learning_rate": 1e-3},
}


@pytest.mark.parametrize(
    ("by", "rewards", "chosen"),
    [
        ("top", [0.1, 0.9, 0.5, 0.7], {1, 3}),
        ("extremes", [0.1, 0.9, 0.5, 0.7], {0, 1}),
        ("variance", [0.4, 0.9, 0.5, 0.0], {1, 3}),
        ("variance", [1.0, 1.0, 0.0, 1.0], {2, 3}),  # one of each; of three equal ones the last in order of reward
        ("variance", [1.0, NAN, NAN, NAN], {0}),
        ("top", [NAN, 0.2, 0.1, NAN], {1, 2}),
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
    samples = training_samples(rollouts, config_of("rlvr", algorithm=algorithm, **PLAN))
    assert [sample.reward for sample in samples] == pytest.approx([NAN, 1.0, 0.0, 0.0, 1.0, NAN], nan_ok=True)
    assert [sample.masked for sample in samples] == [False, True, False, False, False, True]
    plain = training_samples(rollouts, config_of("rlvr", algorithm={"type": "grpo"}, **PLAN))
    assert [sample.reward for sample in plain] == rewards and not any(sample.masked for sample in plain)


def test_a_rehearsal_keeps_some_of_its_fewer_answers():
    algorithm = {"type": "grpo", "keep": {"answers": 16}}
    config = config_of("rlvr", algorithm=algorithm, **PLAN | {"samples_per_prompt": 64})
    cut = Cut("r/rlvr", config, {}, StandIns())
    KINDS["rlvr"].shrink(cut)
    rehearsed = Rlvr.model_validate(cut.written)
    assert (rehearsed.samples_per_prompt, rehearsed.algorithm.keep) == (8, Keep(answers=4))


@pytest.mark.parametrize("answers", [1, 4])
def test_a_choice_that_leaves_nothing_to_compare_or_exceeds_the_group_is_refused(answers):
    with pytest.raises(ValidationError, match=f"keep.answers is {answers}, but must be from 2 to samples_per_prompt 3"):
        config_of("rlvr", algorithm={"type": "grpo", "keep": {"answers": answers}}, **PLAN)
