"""Prompts whose answers are all equally wrong get their hints, by hand; the engine is a function here, and a prompt's text its tokens."""

import math
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from models import a_job
from pydantic import ValidationError
from rollout_lab import engine, plan, roller

from pedigree.configs.base.work import Amount
from pedigree.configs.language.kinds import KINDS
from pedigree.stages.job.failures import StageError
from pedigree.stages.rlvr.group_selection import Cursor
from pedigree.stages.rlvr.hints import hinted, hopeless, refuse_unhinted
from pedigree.stages.rlvr.rolling import StepRollouts
from pedigree.stages.rlvr.run import training_samples
from pedigree.stages.sampling.sampler import Generation, Request
from pedigree.stages.verifiers import Verifying

pytestmark = pytest.mark.unit
CHAT: Any = SimpleNamespace(
    eos_id=2,
    decode=lambda ids: "right" if ids[0] else "wrong",
    prompt=lambda messages, arguments: [int(word) for message in messages for word in message["content"].split()],
)
HINTS = {"text": " {hint}"}
RIGHT = {(0,): 1, (1, 7): 1, (2, 7, 8): 2, (4, 7): 3, (6,): 2}
"""Prompt → how many of its first answers are right: one to 0 without a hint, to 1 with the first, two to 2 with the second, none to 3."""


def prompt(number: int, *hints: str) -> Any:
    verifier = {"name": "exact_match", "answer": "right", **({"hints": list(hints)} if hints else {})}
    return {"id": f"p{number}", "messages": [{"role": "user", "content": str(number)}], "verifier": verifier}


ROWS = [prompt(number, "7", "7 8") for number in range(4)]


class Killed(Exception):
    pass


def rolled(tmp_path, asked: list[Any], rows: Sequence[Any] = ROWS, lasts: int = 99, **fields: Any) -> StepRollouts:
    """A step of an engine that ends after some answers."""
    visits, config = Counter[tuple[int, ...]](), plan(**{"prompts_per_step": len(rows), "hints": HINTS, **fields})

    def answer(place: int, request: Request) -> Generation:
        asking = tuple(request.prompt_ids)
        visits[asking] += 1
        if visits.total() > lasts:
            raise Killed
        return Generation([int(visits[asking] <= RIGHT.get(asking, 0)), *range(len(asking))], [-1.0] * (1 + len(asking)), "stop")

    prompts = [(row, CHAT.prompt(row["messages"], None)) for row in rows]
    with Verifying() as verifying:
        return roller(verifying, config, [engine(answer, asked)], prompts, CHAT, a_job(tmp_path)).step(Cursor(0), 0)


def groups_of(step: StepRollouts) -> dict[str, list[float]]:
    return {one.prompt["id"]: [each.reward for each in step.rollouts if each.prompt["id"] == one.prompt["id"]] for one in step.rollouts}


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ([0.0, 0.0], True),
        ([0.5, 0.5], True),  # nothing to learn from, and none is right
        ([0.5, 0.0], False),
        ([1.0, 1.0], False),
        ([0.0, math.nan], False),
        ([math.nan, float("nan")], False),
    ],
)
def test_a_group_is_hopeless_if_all_answers_are_known_to_be_equally_wrong(scores, expected):
    assert hopeless(scores) == expected


def test_each_hopeless_prompt_gets_the_first_hint_that_helps_and_is_trained_on_with_it(tmp_path):
    asked = []
    step = rolled(tmp_path, asked)
    assert [sorted({tuple(one.prompt_ids) for one in requests}) for requests, _ in asked] == [
        [(0,), (1,), (2,), (3,)], [(1, 7), (2, 7), (3, 7)], [(2, 7, 8), (3, 7, 8)],
    ]  # fmt: skip
    assert {name: sum(rewards) for name, rewards in groups_of(step).items()} == {"p0": 1, "p1/hint-1": 1, "p2/hint-2": 2, "p3": 0}
    samples = {sample.prompt: sample for sample in training_samples(step.rollouts, plan())}
    assert samples["p1/hint-1"].prompt_ids == [1, 7] and samples["p3"].prompt_ids == [3]
    numbers = step.numbers
    assert (numbers["hopeless_groups"], numbers["hinted_groups"]) == (3, 2)
    assert numbers["reward"] == numbers["score_exact_match"] == 1 / 8 and numbers["response_length"] == 2  # without hints
    assert step.tokens == 8 * 2 + 6 * 3 + 4 * 4  # of all answers
    seeds = [one.seed for requests, _ in asked for one in requests]
    assert len({*seeds}) == len(seeds) == 18


def test_without_the_setting_hints_are_not_used(tmp_path):
    asked = []
    step = rolled(tmp_path, asked, hints=None)
    assert len(asked) == 1 and sorted(groups_of(step)) == ["p0", "p1", "p2", "p3"] and "hinted_groups" not in step.numbers


def test_greedy_baselines_are_those_of_the_prompt_with_its_hint(tmp_path):
    step = rolled(tmp_path, [], rows=[prompt(3, "7"), prompt(4, "7")], algorithm={"type": "remax"})
    greedy = dict(zip(groups_of(step), step.greedy or [], strict=True))
    assert greedy == {"p3": 0, "p4/hint-1": 1} and step.numbers["greedy_reward"] == 0


def test_a_prompt_whose_hint_helps_is_not_resampled(tmp_path):
    asked, fields = [], {"algorithm": {"type": "dapo"}, "prompts_per_step": 1}
    step = rolled(tmp_path, asked, rows=[ROWS[1]], **fields)
    assert [*groups_of(step)] == ["p1/hint-1"] and len(asked) == 2 and step.numbers["generated_batches"] == 1


def test_a_prompt_that_is_solved_with_a_hint_only_is_not_set_aside(tmp_path):
    rows = [ROWS[2], ROWS[3], prompt(5), prompt(6)]
    step = rolled(tmp_path, [], rows=rows, prompts_per_step=3, no_resampling_pass_rate=1.0)
    assert [*groups_of(step)] == ["p2/hint-2", "p6", "p3"] and step.cursor.set_aside == [3]


def test_a_hint_that_is_too_long_is_left_out(tmp_path):
    config = plan(hints=HINTS, max_prompt_length=2)
    row = prompt(2, "7 8", "9")
    assert [(made["id"], ids) for made, ids in hinted(row, config, CHAT)] == [("p2/hint-2", [2, 9])]
    step = rolled(tmp_path, asked := [], rows=[prompt(2, "7 8")], max_prompt_length=2)
    assert len(asked) == 1 and [*groups_of(step)] == ["p2"]


def test_a_hint_ends_the_last_user_turn():
    turns = [("system", "1"), ("user", "2"), ("assistant", "3"), ("user", "4"), ("call", "5"), ("tool", "6")]
    row = {**prompt(0, "9"), "messages": [{"role": role, "content": text} for role, text in turns]}
    ((made, ids),) = hinted(row, plan(hints={}, max_prompt_length=99), SimpleNamespace(prompt=lambda messages, _: [1]))  # pyright: ignore
    assert [message["content"] for message in made["messages"]] == ["1", "2", "3", "4\n\nHint: 9", "5", "6"] and ids == [1]


def test_a_killed_step_goes_on_with_its_recorded_answers_to_the_same_groups(tmp_path):
    """It ends at the 16th answer: the second of those with the second hint."""
    whole = groups_of(rolled(tmp_path / "whole", []))
    with pytest.raises(Killed):
        rolled(tmp_path / "job", [], replay="recorded", lasts=15)
    again = rolled(tmp_path / "job", asked := [], replay="recorded")
    assert groups_of(again) == whole and [len(requests) for requests, _ in asked] == [3]
    assert groups_of(rolled(tmp_path / "job", asked := [], replay="recorded")) == whole and not asked


def test_hints_that_cannot_be_given_are_refused(tmp_path):
    job = a_job(tmp_path)
    refuse_unhinted([prompt(0), prompt(1, "7")], plan(hints=HINTS), CHAT, job)
    refuse_unhinted([prompt(0)], plan(), CHAT, job)
    facts = {**prompt(1), "verifier": {"name": "facts", "hints": ["7"]}}
    with pytest.raises(StageError, match="hints is set, but none of 2 prompts has any: add `hints` to their verifiers"):
        refuse_unhinted([prompt(0), facts], plan(hints={}), CHAT, job)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"environment": {"path": "environments/mine.py", "max_turns": 2}}, "an environment may replace them: remove hints or environment"),
        ({"reward": {"right": 0, "terms": [{"type": "majority"}]}}, "the reward asks no verifier: set reward.right"),
        ({"algorithm": {"type": "ppo"}, "samples_per_prompt": 1}, "samples_per_prompt must be at least 2: raise it"),
        ({"hints": {"text": "Look it up."}}, "has no place for a hint: write {hint} in it"),
    ],
)
def test_settings_without_a_meaning_are_refused(fields, message):
    with pytest.raises(ValidationError, match=message):
        plan(**{"hints": {}, **fields})


def test_a_plan_counts_at_least_the_answers_without_hints_after_prompts_of_any_length():
    prompts: Any = SimpleNamespace(rows=Amount(5, "counted"), row_tokens=3.0)
    stages: Any = [SimpleNamespace(config=plan(hints=hints), inputs={"prompts": {"p": prompts}}) for hints in (None, {})]
    told: list[Any] = [KINDS["rlvr"].work(stage) for stage in stages]
    assert [(one.requests.value, one.requests.how) for one in told] == [(54, "counted"), (54, "at least")]
    assert [one.prompt.value for one in told] == [3, 8]
