"""Which step may be rolled out when, and which weights its answers may have; the roller is a function here."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from models import a_job
from pydantic import ValidationError
from rollout_lab import plan

from pedigree.configs.language.execution import Numerics
from pedigree.configs.methods.training import Asynchronous
from pedigree.stages.job.failures import StageError
from pedigree.stages.rlvr.group_selection import Cursor
from pedigree.stages.rlvr.pacing import Ahead, Clock, note_other_weights, open_pace, refuse_stale, staleness
from pedigree.stages.rlvr.rolling import record_of
from pedigree.stages.sampling.answer_log import AnswerLog
from pedigree.stages.sampling.engines import Fleet, gpus_of
from pedigree.stages.sampling.sampler import Generation

pytestmark = pytest.mark.unit
FIELDS: dict[str, Any] = {"algorithm": {"type": "grpo", "correction": {}}, "replay": "recorded", "asynchronous": {}}


def answer(version: int, *changes: list[int], tokens: int = 4) -> Generation:
    return Generation([5] * tokens, [-1.0] * tokens, "stop", version, list(changes))


def test_answers_may_have_weights_of_the_allowed_steps_only():
    updates_after = [0, 2, 2, 4]  # after 4 to 7 steps; the seventh made none
    for most, oldest in enumerate([4, 2, 2, 0, 0, 0]):
        assert refuse_stale([answer(oldest)], updates_after, most, 7) == 4 - oldest
    assert refuse_stale([answer(2, [4, 3]), answer(4, tokens=6)], updates_after, 1, 7) == pytest.approx(3 * 2 / 10)
    with pytest.raises(StageError, match=r"of step 3 were sampled with weights after 2 updates, but the trainer has made 4"):
        refuse_stale([answer(4), answer(2)], updates_after, 0, 2)
    with pytest.raises(StageError, match=r"weights after 0 updates, but those after 2 to 4 may"):
        refuse_stale([answer(0)], updates_after, 2, 7)
    with pytest.raises(StageError, match=r"weights after 6 updates"):  # also of a later load
        refuse_stale([answer(4, [6, 2])], updates_after, 2, 7)


def test_staleness_is_a_mean_over_tokens_and_old_records_have_one_version():
    assert Generation(**{"response_ids": [5, 2], "logprobs": [-1.0, -1.0], "finish_reason": "stop", "version": 3}).versions == [(3, 2)]
    assert answer(1, [2, 1], [4, 3]).versions == [(1, 1), (2, 2), (4, 1)]
    assert staleness([answer(1, [2, 1], [4, 3])], 4) == (3 + 2 + 2 + 0) / 4


LOST = "the answers of step 3 of an interrupted attempt were lost: it was sampled again with newer weights"


@pytest.mark.parametrize(
    ("given", "step", "marks"),
    [
        ({"in_flight": False}, 2, [LOST]),
        ({"in_flight": False}, 0, []),  # the first weights either way
        ({"in_flight": False, "max_staleness": 0}, 2, []),
        ({}, 2, []),  # in flight, which has a mark of its own
    ],
)
def test_a_step_ahead_whose_answers_are_not_here_is_marked_also_after_another_kill(tmp_path, given, step, marks):
    config = plan(**FIELDS | {"asynchronous": given})
    for _ in range(2):
        job = a_job(tmp_path)
        note_other_weights(config, job, step)
        assert job.marks == marks
        with AnswerLog(job, record_of(job, step)) as record:
            record.keep({"answer": 1})


def test_a_step_ahead_whose_answers_are_here_is_not_marked(tmp_path):
    job = a_job(tmp_path)
    with AnswerLog(job, record_of(job, 2)) as record:
        record.keep({"answer": 1})
    note_other_weights(plan(**FIELDS | {"asynchronous": {"in_flight": False}}), job, 2)
    assert not job.marks


class Rolled:
    """A roller that gives the numbers of steps, each when it is allowed to. Each has a prompt less than the one before."""

    def __init__(self, steps: int = 9) -> None:
        self.config, self.engines = SimpleNamespace(steps=steps), SimpleNamespace(abandon=self.end)
        self.begun, self.go, self.ended = [threading.Event() for _ in range(steps)], [threading.Event() for _ in range(steps)], False

    def step(self, cursor: Cursor, step: int) -> Any:
        assert cursor == cursor_at(step)
        self.begun[step].set()
        self.go[step].wait()
        if self.ended:
            raise StageError("lost engine")
        return SimpleNamespace(number=step, cursor=cursor_at(step + 1))

    def end(self) -> None:
        self.ended = True
        for one in self.go:
            one.set()


def cursor_at(step: int) -> Cursor:
    return Cursor(10 * step, [*range(step)])


def ahead(roller: Rolled, first: int = 0, **given: Any) -> Ahead:
    one: Any = roller
    return Ahead(one, Asynchronous(**given), first, cursor_at(first))


def taken(rolling: Ahead) -> int:
    one: Any = rolling.take(Cursor(0), 0)
    return one.number


@pytest.mark.parametrize("most", [0, 1, 3])
def test_steps_are_rolled_out_in_order_and_no_further_than_allowed(most):
    roller = Rolled(5)
    with ahead(roller, max_staleness=most) as rolling:
        for one in roller.go:
            one.set()
        for step in range(5):
            assert taken(rolling) == step
            if step + most + 1 < 5:
                assert roller.begun[step + most].wait(60) and not roller.begun[step + most + 1].is_set()
            rolling.done(step + 1)


def test_a_resumed_run_begins_where_its_checkpoint_is():
    roller = Rolled(9)
    with ahead(roller, first=7, max_staleness=1) as rolling:
        for one in roller.go:
            one.set()
        assert [taken(rolling), taken(rolling)] == [7, 8]


def test_without_in_flight_new_weights_wait_for_the_step_being_rolled_out():
    roller = Rolled(3)
    with ahead(roller, in_flight=False) as rolling:
        roller.go[0].set()
        rolling.take(Cursor(0), 0)
        waiting = threading.Thread(target=rolling.before_load)
        waiting.start()
        assert roller.begun[1].wait(60) and waiting.is_alive()
        roller.go[1].set()
        waiting.join(60)
        assert not waiting.is_alive() and not roller.begun[2].is_set()


def test_the_error_of_the_thread_is_that_of_the_trainer_after_the_complete_steps():
    roller = Rolled(3)
    with ahead(roller) as rolling:
        roller.go[0].set()
        assert taken(rolling) == 0
        roller.end()
        with pytest.raises(StageError, match="lost engine"):
            rolling.take(Cursor(0), 0)
        with pytest.raises(StageError, match="lost engine"):
            rolling.before_load()


def test_the_end_of_the_trainer_ends_engines_at_work_and_only_those():
    busy, waiting = Rolled(3), Rolled(1)
    with ahead(busy):
        assert busy.begun[0].wait(60)
    assert busy.ended
    waiting.go[0].set()
    with ahead(waiting) as rolling:
        rolling.take(Cursor(0), 0)
    assert not waiting.ended


def test_a_rank_that_receives_rollouts_waits_for_no_engine():
    trainer: Any = None
    with open_pace(None, trainer, plan(**FIELDS), 0, Cursor(0)) as pace:
        assert pace.take(Cursor(0), 0) is None
        pace.before_load()
        pace.done(1)


def test_idle_shares_are_those_of_the_step():
    working = threading.Event()

    def stream(*_: Any, **__: Any) -> None:
        working.set()

    engines: Any = [SimpleNamespace(stream=stream)]
    clock = Clock(Fleet(engines))
    with clock.waiting():
        pass
    idle = clock.idle()
    assert 0 <= idle["trainer_idle"] < 1 and idle["sampler_idle"] == 1
    share = Fleet(engines).busy_share()
    assert share() == 0 and not Clock(None).idle()


def test_engines_of_a_split_job_have_the_gpus_after_those_of_the_ranks(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4,5,6")
    assert [gpus_of(Numerics(device="cuda", world_size=2), engine, ranks=2) for engine in (0, 1)] == [["5"], ["6"]]
    with pytest.raises(StageError, match="needs GPU 5 of the job, which has 4"):
        gpus_of(Numerics(device="cuda", world_size=2), 2, ranks=2)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"replay": "exact"}, "replay is exact: set `replay: recorded`"),
        ({"algorithm": {"type": "grpo"}}, r"max_staleness 1 trains on answers of older weights.*set `algorithm.correction: \{\}`"),
        ({"lora": {}}, "set `asynchronous.in_flight: false`"),
        ({"asynchronous": {"max_staleness": 2, "in_flight": False}}, "set max_staleness to 1, or in_flight to true"),
    ],
)
def test_what_cannot_be_asynchronous_is_refused_with_the_remedy(changed, said):
    with pytest.raises(ValidationError, match=said):
        plan(**FIELDS | changed)


def test_the_synchronous_schedule_needs_no_correction_and_old_recipes_keep_their_key():
    assert plan(replay="recorded", asynchronous={"max_staleness": 0}).asynchronous is not None
    assert "asynchronous" not in plan(asynchronous=None).model_dump()
