"""`constrain` as recipes, plans, rehearsals and reports see it."""

from pedigree.configs.base.kind import Kind, gives, port
from pedigree.configs.base.shrink import Cut
from pedigree.configs.base.work import rows_at, tokens_at
from pedigree.configs.judging.constraining import Constrain


def shrink(cut: Cut) -> None:
    cut.most("min_rows", 1, "thresholds")


KIND = Kind(
    name="constrain",
    version=2,
    config=Constrain,
    inputs={"prompts": port("prompt")},
    output=gives("prompt"),
    ids="kept",
    rows=lambda stage: rows_at(stage, "prompts"),
    row_tokens=tokens_at("prompts"),
    shrink=shrink,
    family="data",
    reports_drops=True,
)
