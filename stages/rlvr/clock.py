"""How long the trainer waits for rollouts, and the engines for weights or permission."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from pedigree.stages.sampling.engines import Fleet


class Clock:
    """Measures a step from now on."""

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
