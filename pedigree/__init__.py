"""Pedigree: end-to-end LLM post-training whose every model carries the record of how it was made.

`docs/python.md` is a tour of this interface. Names load on first use: jobs import this package too and have no `pipelines`.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pedigree.configs.base.project import Project as Project
    from pedigree.pipelines.api import Artifact as Artifact
    from pedigree.pipelines.api import Recipe as Recipe
    from pedigree.pipelines.api import RunFailed as RunFailed
    from pedigree.pipelines.api import plan as plan
    from pedigree.pipelines.api import run as run
    from pedigree.pipelines.jobs.events import RunEvent as RunEvent
    from pedigree.pipelines.jobs.events import StageEnded as StageEnded
    from pedigree.pipelines.jobs.events import StageProgressed as StageProgressed
    from pedigree.pipelines.jobs.events import StageStarted as StageStarted

_HOMES = {
    "Artifact": "pipelines.api",
    "Project": "configs.base.project",
    "Recipe": "pipelines.api",
    "RunEvent": "pipelines.jobs.events",
    "RunFailed": "pipelines.api",
    "StageEnded": "pipelines.jobs.events",
    "StageProgressed": "pipelines.jobs.events",
    "StageStarted": "pipelines.jobs.events",
    "plan": "pipelines.api",
    "run": "pipelines.api",
}
"""Public name → the module that defines it."""


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'pedigree' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"pedigree.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
