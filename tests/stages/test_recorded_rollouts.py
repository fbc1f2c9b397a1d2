"""Answers of several engines, and those of an interrupted attempt; an engine is a function here."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from models import a_job
from rollout_lab import engine, plan, roller

from pedigree.configs.language.execution import Numerics
from pedigree.configs.methods.training import Sampling
from pedigree.stages.rlvr.group_selection import Cursor
from pedigree.stages.sampling.engines import Fleet, dealt
from pedigree.stages.sampling.sampler import Generation, Request, WeightPart
from pedigree.stages.verifiers import Verifying

pytestmark = pytest.mark.unit


class Killed(Exception):
    pass


def of_attempt(attempt: int, asked: list[Any], lasts: int = 99) -> Any:
    """An engine that answers with the number of its attempt, and ends after some answers."""

    def answer(place: int, request: Request) -> Generation:
        if place < len(asked[-1][0]) - lasts:
            raise Killed
        return Generation([attempt], [-1 / 3], "stop")

    return engine(answer, asked)


def numbers(requests: Sequence[Request]) -> list[int]:
    """The prompts of requests."""
    return [one.prompt_ids[0] for one in requests]


def answers(job, engines: list[Any], step: int, **fields: Any) -> list[tuple[str, int]]:
    """(prompt, attempt) of each answer of a step."""
    prompts = [({"id": f"p{number}", "verifier": {"name": "exact_match", "answer": "x"}}, [number]) for number in range(3)]
    chat: Any = SimpleNamespace(eos_id=2, decode=lambda ids: "y")
    with Verifying() as verifying:
        step_of = roller(verifying, plan(**{"replay": "recorded", **fields}), engines, prompts, chat, job).step(Cursor(0), step)
    assert all(one.answer.logprobs == [-1 / 3] for one in step_of.rollouts)
    return [(one.prompt["id"], one.answer.response_ids[0]) for one in step_of.rollouts]


def test_recorded_answers_are_not_sampled_again_and_a_mixed_step_is_marked(tmp_path):
    job, asked = a_job(tmp_path), []
    with pytest.raises(Killed):
        answers(job, [of_attempt(1, asked, lasts=2)], 0)
    mixed = answers(job, [of_attempt(2, asked)], 0)
    (first, _), (second, chunk) = asked
    assert len(first) == 6 and second == first[:4] and not chunk  # continuously, in the same order
    assert mixed == [(f"p{number}", attempt) for number, attempt in zip(numbers(first), [2, 2, 2, 2, 1, 1], strict=True)]
    mark = "some answers of step 1 are those of an interrupted attempt: the others ran in other company, and may round otherwise"
    assert job.marks == [mark]
    again = a_job(tmp_path)  # killed before a checkpoint had the mark
    assert answers(again, [of_attempt(3, asked)], 0) == mixed and len(asked) == 2  # all are recorded, and still of two attempts
    assert again.marks == [mark]
    assert {attempt for _, attempt in answers(again, [of_attempt(4, asked)], 1)} == {4}  # another step's are its own


def test_a_step_that_one_attempt_recorded_has_no_mark(tmp_path):
    asked = []
    whole = answers(a_job(tmp_path), [of_attempt(1, asked)], 0)
    again = a_job(tmp_path)
    assert answers(again, [of_attempt(2, asked)], 0) == whole and len(asked) == 1 and not again.marks


@pytest.mark.parametrize(("device", "found"), [("cuda", 1), ("cpu", 2)])
def test_recorded_answers_are_found_under_another_number_of_threads_where_threads_change_no_bit(tmp_path, device, found):
    for attempt, threads in enumerate((4, 8), 1):
        job = a_job(tmp_path, Numerics(device=device, threads=threads))
        last = answers(job, [of_attempt(attempt, [])], 0)
    assert {attempt for _, attempt in last} == {found}


def test_exact_answers_are_sampled_again_in_chunks(tmp_path):
    job, asked = a_job(tmp_path), []
    for attempt in (1, 2):
        assert {found for _, found in answers(job, [of_attempt(attempt, asked)], 0, replay="exact")} == {attempt}
    assert [(len(one), chunk) for one, chunk in asked] == [(6, True)] * 2 and not (tmp_path / "rollouts").exists()


def test_records_before_the_oldest_checkpoint_are_deleted(tmp_path):
    job = a_job(tmp_path)
    for step in range(3):
        answers(job, [of_attempt(1, [])], step)
    (job.folder / "checkpoints" / "step-000002").mkdir(parents=True)
    answers(job, [of_attempt(1, [])], 3)
    assert sorted(path.name for path in (job.folder / "rollouts").iterdir()) == ["step-000002", "step-000003"]


def test_prompts_are_dealt_to_engines_in_turn_with_all_their_answers_and_chunks_as_a_whole():
    requests = [Request([prompt], seed) for prompt in (7, 8, 9) for seed in (0, 1)]
    assert [[*places] for places in dealt(range(6), requests, 2)] == [[0, 1, 4, 5], [2, 3]]
    assert [[*places] for places in dealt([0, 1], requests, 2)] == [[0, 1], []]
    asked: tuple[list[Any], list[Any]] = ([], [])
    fleet = Fleet([of_attempt(number, own) for number, own in enumerate(asked)])
    fleet.answer(requests, Sampling(max_tokens=8), [2], lambda *_: None, lambda _: None, 4)
    assert [[(numbers(own), chunk) for own, chunk in calls] for calls in asked] == [[([7, 7, 8, 8], True)], [([9, 9], True)]]


def test_two_engines_share_a_step_and_answers_come_back_in_the_order_of_prompts(tmp_path):
    asked: tuple[list[Any], list[Any]] = ([], [])
    found = answers(a_job(tmp_path), [of_attempt(number, own) for number, own in enumerate(asked)], 0)
    assert [attempt for _, attempt in found] == [0, 0, 1, 1, 0, 0]
    assert [len(own[0][0]) for own in asked] == [4, 2]


def test_an_engine_that_fails_ends_the_others(tmp_path):
    with pytest.raises(Killed):
        answers(a_job(tmp_path), [of_attempt(0, []), of_attempt(1, [], lasts=1)], 0)


def test_loads_reach_every_engine(tmp_path):
    loaded = []
    one = SimpleNamespace(update=lambda part: loaded.append(part), load_adapters=lambda folder: loaded.append(folder), abandon=None)
    engines: Any = [one, one]
    Fleet(engines).update(WeightPart([], True, 1))
    Fleet(engines).load_adapters(tmp_path)
    assert loaded == [WeightPart([], True, 1)] * 2 + [tmp_path] * 2


def test_greedy_answers_are_recorded_beside_the_sampled_ones(tmp_path):
    job, asked = a_job(tmp_path), []
    for _ in range(2):
        answers(job, [of_attempt(1, asked)], 0, algorithm={"type": "remax"})
    assert [len(one) for one, _ in asked] == [6, 3]
