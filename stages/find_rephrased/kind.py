"""`find_rephrased` as recipes, plans, rehearsals and reports see it."""

from configs.base.kind import Kind, port
from configs.base.shrink import TOKENS, Cut
from configs.judging.asking import shrink_asking
from configs.judging.rephrasing import FindRephrased, rephrased_needs, rephrased_problem
from configs.rows.decontamination import shrink_comparison


def shrink(cut: Cut) -> None:
    shrink_comparison(cut)
    cut.most("sampling.max_tokens", TOKENS, "lengths")
    shrink_asking(cut, "judge")


KIND = Kind(
    name="find_rephrased",
    version=1,
    config=FindRephrased,
    inputs={
        "data": port("conversation", "prompt", "preference"),
        "benchmarks": port("item", many=True),
        "judge": port("policy", optional=True),
    },
    output=lambda config, inputs: inputs["data"][0],
    engine="vllm",
    needs=rephrased_needs,
    problem=rephrased_problem,
    shrink=shrink,
    family="judging",
    subset_of="data",
    removes_overlaps=True,
)
