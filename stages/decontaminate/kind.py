"""`decontaminate` as recipes, plans, rehearsals and reports see it."""

from pedigree.configs.base.kind import Kind, port
from pedigree.configs.base.work import rows_at, tokens_at
from pedigree.configs.rows.overlap_criteria import Decontaminate, shrink_comparison

KIND = Kind(
    name="decontaminate",
    version=7,
    config=Decontaminate,
    inputs={"data": port("conversation", "prompt", "preference"), "benchmarks": port("item", many=True)},
    output=lambda config, inputs: inputs["data"][0],
    decided_by=lambda config: ("data/contamination",),
    rows=lambda stage: rows_at(stage, "data"),
    row_tokens=tokens_at("data"),
    shrink=shrink_comparison,
    family="data",
    subset_of="data",
    decontaminates=True,
    removes_overlaps=True,
)
