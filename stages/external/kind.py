"""`external` as recipes, plans, rehearsals and reports see it."""

from collections.abc import Mapping
from typing import Any

from pedigree.configs.base.kind import Kind, port
from pedigree.configs.base.shrink import Cut
from pedigree.configs.methods.external import External, external_problem, title_of


def sources(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Its program, which may bring in anything. Numbers have no license."""
    if config.get("output") == "report":
        return []
    return [{"type": "command", "name": f"external command {title_of(config)}", "licence": config.get("licence")}]


def shrink(cut: Cut) -> None:
    assert isinstance(cut.config, External)
    cut.set("command", [*cut.config.command, *cut.config.rehearse], "batches")


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
    trains_on=frozenset({"data"}),
    sources=sources,
    shrink=shrink,
    family="training",
)
