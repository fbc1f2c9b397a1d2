"""Engines that stay open for the jobs of a file, each of which would take ten seconds to start its own; killed jobs start theirs."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import models
import pytest

from pedigree.configs.language.execution import Numerics
from pedigree.stages.rlvr import handover
from pedigree.stages.sampling import engines, generate
from pedigree.stages.sampling.sampler import Child, architecture, engine_settings

MOST = 2
"""Open engines at a time: each takes a gigabyte."""


class Pool:
    """Open engines with their settings, the latest last."""

    def __init__(self) -> None:
        self._open: list[tuple[dict[str, Any], Child]] = []

    def close(self) -> None:
        for _, engine in self._open:
            engine.close()
        self._open.clear()

    def run(self, folder: Path, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """As `models.run`, with these engines."""
        with pytest.MonkeyPatch.context() as patch:
            self.serve(patch)
            return models.run(folder, *args, **kwargs)

    def serve(self, patch: pytest.MonkeyPatch) -> None:
        """Give stages in this process these engines instead of new ones."""

        @contextmanager
        def sampler(model_folder: Path, *, inline: bool, **settings: Any) -> Iterator[Child]:
            with self._rented(engine_settings(model_folder, **settings), 1) as (engine,):
                yield engine

        start, idle = engines.start, SimpleNamespace(kill=lambda: None, communicate=lambda: None)

        def rent(settings: dict[str, Any], count: int, ahead: Any) -> Any:
            return self._rented(settings, count)

        self._start = start
        patch.setattr(engines, "start", lambda *_: idle)
        patch.setattr(handover, "open_sampler", sampler)
        for module in (handover, generate):
            patch.setattr(module, "open_engines", rent)

    @contextmanager
    def _rented(self, settings: dict[str, Any], count: int) -> Iterator[list[Child]]:
        wanted = _fixed(settings)
        alike = [one for one in self._open if one[0] == wanted][:count]
        while len(alike) < count:
            others = [one for one in self._open if one not in alike]
            if others and len(self._open) >= MOST:
                self._open.remove(others[0])
                others[0][1].close()
            alike.append((wanted, Child(settings, self._start(Numerics.model_validate(settings["numerics"])))))
            self._open.append(alike[-1])
        try:
            for _, engine in alike:
                engine.load(Path(settings["model_folder"]))
            yield [engine for _, engine in alike]
        except BaseException:
            self._drop(alike)
            raise
        if settings["adapter_rank"] is not None or any(engine._process.poll() is not None for _, engine in alike):
            self._drop(alike)

    def _drop(self, ended: list[tuple[dict[str, Any], Child]]) -> None:
        for one in ended:
            self._open.remove(one)
            one[1].close()


def _fixed(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings that cannot change once an engine is open."""
    memory = settings["placement"]["sampler_memory_gb"]
    return settings | {"model_folder": architecture(Path(settings["model_folder"])), "placement": memory}
