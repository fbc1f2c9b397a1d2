"""Rollouts ahead of the trainer: a thread of rank 0 rolls out the coming steps in order, while all ranks update the policy.

    thread:   roll out 0 │ roll out 1        │ roll out 2        │ …          step s begins once the trainer
    trainer:      wait   │ update 0 · load W1 │ update 1 · load W2 │ …         has done s - max_staleness steps

Step s begins with weights W of at least s - max_staleness steps. With `in_flight` (interruptible generation, arXiv 2505.24298, §4.1) the
engines load new weights while answers run; without, the trainer loads them once the step being rolled out is complete.

Each step's answers are recorded as they arrive (`rolling.RECORDS`), so an interrupted run has those of the steps ahead, too.
"""

import threading
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import cast

from pedigree.configs.methods.training import Asynchronous
from pedigree.stages.rlvr.rolling import Roller, StepRollouts
from pedigree.stages.sampling.sampler import Generation

ENDING_S = 10.0
"""Longest wait for the thread at the end: a verifier or a judge may take minutes, and a stop has little time."""


def may_begin(step: int, done: int, max_staleness: int) -> bool:
    """Whether a step may be rolled out after the trainer has done so many steps: it is then at most `max_staleness` steps behind when it
    is trained on."""
    return done >= step - max_staleness


def oldest_update(updates_after: Sequence[int], max_staleness: int) -> int:
    """Version of the oldest weights that may have begun an answer of the next step.

    Args:
        updates_after: number of updates after each of the last steps done, the current one last.
    """
    return updates_after[max(0, len(updates_after) - 1 - max_staleness)]


def staleness(answers: Sequence[Generation], updates: int) -> float:
    """Updates by which the weights that sampled a token are behind the trainer's; mean over all tokens."""
    spans = [span for answer in answers for span in answer.versions]
    return sum((updates - version) * tokens for version, tokens in spans) / sum(tokens for _, tokens in spans)


class Ahead:
    """Rolls out steps in a thread. A context manager, whose end ends the engines if they still work."""

    def __init__(self, roller: Roller, given: Asynchronous, step: int, position: int) -> None:
        """Begin at a step and its position in the order of prompts."""
        self._roller, self._given = roller, given
        self._coming, self._done = step, step
        """The step to roll out next, or now; steps after which the engines have the trainer's weights."""
        self._changed = threading.Condition()
        self._rolled: deque[StepRollouts] = deque()
        self._closed = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(position,), daemon=True, name="rollouts")

    def __enter__(self) -> "Ahead":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            if self._begins():
                self._roller.engines.abandon()
        self._thread.join(ENDING_S)

    def take(self) -> StepRollouts:
        """The next step's rollouts, as soon as they are complete; raises the error of the thread."""
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
        """The engines have the weights after so many steps."""
        with self._changed:
            self._done = steps
            self._changed.notify_all()

    def _begins(self) -> bool:
        """Whether a step may be rolled out, or is."""
        return self._coming < self._roller.config.steps and may_begin(self._coming, self._done, self._given.max_staleness)

    def _run(self, position: int) -> None:
        try:
            while self._coming < self._roller.config.steps:
                with self._changed:
                    self._changed.wait_for(lambda: self._closed or self._begins())
                    if self._closed:
                        return
                rolled = self._roller.step(position, self._coming)
                position = rolled.position
                with self._changed:
                    self._rolled.append(rolled)
                    self._coming += 1
                    self._changed.notify_all()
        except BaseException as error:  # the boundary of the thread: `take` raises it
            with self._changed:
                self._error = error
                self._changed.notify_all()
