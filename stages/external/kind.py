"""`external` as recipes, plans, rehearsals and reports see it."""

import os
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any

from pedigree.configs.base.kind import Kind, port
from pedigree.configs.base.shrink import Cut
from pedigree.configs.base.work import PlannedStage
from pedigree.configs.methods.external import External, external_problem, title_of


def sources(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Its program, which may bring in anything. Numbers have no license."""
    if config.get("output") == "report":
        return []
    return [{"type": "command", "name": f"external command {title_of(config)}", "licence": config.get("licence")}]


def shrink(cut: Cut) -> None:
    assert isinstance(cut.config, External)
    cut.set("command", [*cut.config.command, *cut.config.rehearse], "batches")


def preflight(stage: PlannedStage) -> Iterator[str]:
    """Files of the project that the command names, and that would not be where it runs."""
    for word in stage.config.command:
        path = PurePosixPath(word)
        if len(path.parts) > 1 and not path.is_absolute() and os.path.isfile(stage.place(word)):
            if not any(path.is_relative_to(name) for name in stage.config.files):
                yield f"its command names {word}, which it does not get: add it to files"


KIND = Kind(
    name="external",
    version=1,
    config=External,
    inputs={
        "models": port("policy", "reward_model", many=True, optional=True),
        "data": port("conversation", "prompt", "preference", "completion", "judgment", "scores", "report", many=True, optional=True),
    },
    output=lambda config, inputs: config.output,
    engine="torch",
    problem=external_problem,
    preflight=preflight,
    warnings=lambda stage: ("its time, memory and tokens are unknown: what a command of other software needs is not estimated",),
    trains_on=frozenset({"data"}),
    sources=sources,
    shrink=shrink,
    family="training",
)
