"""`evaluate` as recipes, plans, rehearsals and reports see it."""

from configs.base.kind import Kind, gives, port
from configs.base.shrink import MAX_UNKNOWN, RESAMPLES, TOKENS, Cut
from configs.judging.answers import Evaluate, evaluate_problem
from configs.rows.datasets import PrepareData


def shrink(cut: Cut) -> None:
    suites = cut.inputs["suites"].values()
    if any(isinstance(suite, PrepareData) and suite.form for suite in suites):
        cut.set("max_tokens", min(cut.get("max_tokens") or TOKENS, TOKENS), "lengths")
    cut.most("sampling.max_tokens", TOKENS, "lengths")
    cut.most("resamples", RESAMPLES, "samples")
    cut.set("max_unknown", MAX_UNKNOWN, "thresholds")


KIND = Kind(
    name="evaluate",
    version=3,
    config=Evaluate,
    inputs={"policies": port("policy", many=True), "suites": port("item", many=True)},
    output=gives("scores"),
    engine="vllm",
    problem=evaluate_problem,
    shrink=shrink,
    family="measuring",
)
