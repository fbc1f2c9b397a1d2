"""When steps are rolled out: in turn with the updates, or ahead of them by a thread of rank 0 (`asynchronous`).

    thread:   roll out 0 │ roll out 1        │ roll out 2        │ …          step s begins once the trainer
    trainer:      wait   │ update 0 · load W1 │ update 1 · load W2 │ …         has done s - max_staleness steps

Step s begins with weights W of at least s - max_staleness steps. With `in_flight` (interruptible generation, arXiv 2505.24298, §4.1) the
engines load new weights while answers run; without, the trainer loads them once the step being rolled out is complete.

Each step's answers are recorded as they arrive (`rolling.RECORDS`), so an interrupted run has those of the steps ahead, too.
"""

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Self, cast

from pedigree.configs.methods.training import Asynchronous, Rlvr
from pedigree.stages.job.failures import StageError
from pedigree.stages.job.job import Job
from pedigree.stages.rlvr.group_selection import Cursor
from pedigree.stages.rlvr.handover import awake, sleep_level
from pedigree.stages.rlvr.rolling import Roller, StepRollouts, record_of
from pedigree.stages.sampling.answer_log import AnswerLog
from pedigree.stages.sampling.engines import Fleet
from pedigree.stages.sampling.sampler import Generation
from pedigree.stages.training.trainer import Trainer

NEWER = "newer weights"
"""Key in a step's record: its answers were sampled again, with newer weights."""
ENDING_S = 10.0
"""Longest wait for the thread at the end: a verifier or a judge may take minutes, and a stop has little time."""


def open_pace(roller: Roller | None, trainer: Trainer, config: Rlvr, step: int, cursor: Cursor) -> "Pace":
    """Return how a rank gets its rollouts, beginning at a step and where its prompts begin. Only rank 0 has a roller."""
    if config.asynchronous is None:
        return InTurn(roller, trainer, config)
    return Ahead(roller, config.asynchronous, step, cursor) if roller else Pace()


def note_other_weights(config: Rlvr, job: Job, step: int) -> None:
    """Mark the result of a run that continues after a checkpoint if the answers of the step ahead, which had the weights before it, are not
    here, e.g. on another machine: they get newer weights. In flight, each run has other weights, and is marked for that."""
    ahead = config.asynchronous
    if job.rank != 0 or step == 0 or ahead is None or ahead.in_flight or not ahead.max_staleness:
        return
    with AnswerLog(job, record_of(job, step)) as record:
        if record.empty:
            record.keep({NEWER: True})  # for the attempt after the next kill, which finds answers
        if NEWER in record:
            mark = f"the answers of step {step + 1} of an interrupted attempt were lost: it was sampled again with newer weights"
            job.marks += [mark] if mark not in job.marks else []


class Pace:
    """The pace of a rank that only receives rollouts."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None: ...

    def take(self, cursor: Cursor, step: int) -> StepRollouts | None:
        """The rollouts of a step whose prompts begin at a cursor; only on rank 0."""
        return None

    def before_load(self) -> None:
        """Wait until the engines may get new weights."""

    def done(self, steps: int) -> None:
        """The engines have the weights after so many steps."""


class InTurn(Pace):
    """Rolls out a step while the trainer waits; used on all ranks."""

    def __init__(self, roller: Roller | None, trainer: Trainer, config: Rlvr) -> None:
        self._roller, self._trainer, self._config = roller, trainer, config

    def take(self, cursor: Cursor, step: int) -> StepRollouts | None:
        with awake(self._roller.engines if self._roller else None, self._trainer, sleep_level(self._config, step)):
            return self._roller.step(cursor, step) if self._roller else None


class Ahead(Pace):
    """Rolls out steps in a thread. Leaving it ends the engines that still work."""

    def __init__(self, roller: Roller, given: Asynchronous, step: int, cursor: Cursor) -> None:
        """Begin at a step and where its prompts begin."""
        self._roller, self._given = roller, given
        self._coming, self._done = step, step
        """The step to roll out next, or now; steps after which the engines have the trainer's weights."""
        self._changed = threading.Condition()
        self._rolled: deque[StepRollouts] = deque()
        self._closed = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(cursor,), daemon=True, name="rollouts")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            if self._begins():
                self._roller.engines.abandon()
        self._thread.join(ENDING_S)

    def take(self, cursor: Cursor, step: int) -> StepRollouts:
        """The rollouts of the next step, as soon as they are complete; raises the error of the thread."""
        with self._changed:
            self._changed.wait_for(lambda: self._rolled or self._error)
            if not self._rolled:
                raise cast(BaseException, self._error)
            return self._rolled.popleft()

    def before_load(self) -> None:
        """Wait until the engines may get new weights; raises the error of the thread."""
        with self._changed:
            self._changed.wait_for(lambda: self._given.in_flight or self._error or not self._begins())
            if self._error:
                raise self._error

    def done(self, steps: int) -> None:
        with self._changed:
            self._done = steps
            self._changed.notify_all()

    def _begins(self) -> bool:
        """Whether a step may be rolled out, or is."""
        return self._coming < self._roller.config.steps and self._coming - self._done <= self._given.max_staleness

    def _run(self, cursor: Cursor) -> None:
        try:
            while self._coming < self._roller.config.steps:
                with self._changed:
                    self._changed.wait_for(lambda: self._closed or self._begins())
                    if self._closed:
                        return
                rolled = self._roller.step(cursor, self._coming)
                cursor = rolled.cursor
                with self._changed:
                    self._rolled.append(rolled)
                    self._coming += 1
                    self._changed.notify_all()
        except BaseException as error:  # the boundary of the thread: `take` raises it
            with self._changed:
                self._error = error
                self._changed.notify_all()


class Clock:
    """Measures a step from now on: how long the trainer waits for rollouts, and the engines for weights or permission."""

    def __init__(self, engines: Fleet | None) -> None:
        self._began, self._waited = time.monotonic(), 0.0
        self._busy_share = engines.busy_share() if engines else None

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The trainer waits for rollouts in this block."""
        began = time.monotonic()
        yield
        self._waited += time.monotonic() - began

    def idle(self) -> dict[str, float]:
        """Shares of the step in which trainer and engines were idle; only rank 0 knows them."""
        if self._busy_share is None:
            return {}
        return {"trainer_idle": self._waited / self.seconds, "sampler_idle": max(0.0, 1 - self._busy_share())}


def staleness(answers: Sequence[Generation], updates: int) -> float:
    """Updates by which the weights that sampled a token are behind the trainer's; mean over all tokens."""
    spans = [span for answer in answers for span in answer.versions]
    return sum((updates - version) * tokens for version, tokens in spans) / sum(tokens for _, tokens in spans)


def refuse_stale(answers: Sequence[Generation], updates_after: Sequence[int], max_staleness: int, step: int) -> float:
    """Check that all answers were sampled with the trainer's weights, or those of the allowed steps before it; returns their `staleness`.
    One update may move log-probs by less than rounding does, so their gap alone cannot tell.

    Args:
        updates_after: number of updates after each of the last steps, the current one last.

    Raises:
        StageError: they were not.
    """
    oldest, updates = updates_after[max(0, len(updates_after) - 1 - max_staleness)], updates_after[-1]
    found = {version for answer in answers for version, _ in answer.versions}
    if wrong := sorted(version for version in found if not oldest <= version <= updates):
        allowed = f"those after {oldest} to {updates} may" if oldest < updates else f"the trainer has made {updates}"
        raise StageError(
            f"answers of step {step + 1} were sampled with weights after {wrong[0]} updates, but {allowed}: the "
            "sampler did not load the trainer's weights. Run the stage again, and report the error if it returns"
        )
    return staleness(answers, updates)
