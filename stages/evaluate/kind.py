"""`evaluate` as recipes, plans, rehearsals and reports see it."""

from collections.abc import Sequence

from pedigree.configs.base.kind import FUNCTIONS, RENDERING, Kind, gives, port
from pedigree.configs.base.shrink import MAX_UNKNOWN, RESAMPLES, TOKENS, Cut
from pedigree.configs.base.work import PROMPT_TOKENS, Amount, Amounts, PlannedStage, SamplingPlan
from pedigree.configs.judging.measuring import Evaluate, evaluate_problem
from pedigree.configs.rows.datasets import PrepareData, form_of
from pedigree.configs.rows.suite_forms import Form


def shrink(cut: Cut) -> None:
    suites = cut.inputs["suites"].values()
    if any(isinstance(suite, PrepareData) and suite.form for suite in suites):
        cut.set("max_tokens", min(cut.get("max_tokens") or TOKENS, TOKENS), "lengths")
    cut.most("sampling.max_tokens", TOKENS, "lengths")
    cut.most("resamples", RESAMPLES, "samples")
    cut.set("max_unknown", MAX_UNKNOWN, "thresholds")


CHOICES = 4
"""Of a question whose choices are compared, in most benchmarks."""


def sampling_plan(config: Evaluate, forms: Sequence[Form | None] = (None,)) -> SamplingPlan:
    longest = max((sampling.max_tokens for form in forms if (sampling := config.sampling_of(form))), default=0)
    return SamplingPlan("policies", config.dtype, config.chunk_size, longest, chunk_field="chunk_size")


def work(stage: PlannedStage) -> Amounts:
    """All policies on all suites: each suite is asked in its form's way, with prompts and answers of its own length."""
    config, suites = stage.config, stage.inputs["suites"].values()
    forms = [form_of(suite.config) for suite in suites]
    how, requests, prompts, answers = sampling_plan(config, forms), Amount(0, "counted"), 0.0, 0.0
    for suite, form in zip(suites, forms, strict=True):
        if suite.rows is None:
            return Amounts(plan=how)
        each = 1 if form is None else form.draw.samples if form.draw else CHOICES
        asked = suite.rows.times(each * len(stage.inputs["policies"]))
        requests = Amount(requests.value + asked.value, requests.times(asked).how)
        prompts += asked.value * (suite.row_tokens or PROMPT_TOKENS * (1 + (form.prompt.shots if form else 0)))
        sampling = config.sampling_of(form)
        answers += asked.value * (sampling.max_tokens if sampling else 0)
    if not requests.value:
        return Amounts(plan=how)
    return Amounts(
        rows=requests, prompt=Amount(prompts / requests.value, "estimated"), requests=requests, plan=how,
        tokens=Amount(prompts + answers, "at most"), answer=answers / requests.value,
    )  # fmt: skip


def decided_by(config: Evaluate) -> tuple[str, ...]:
    functions = FUNCTIONS if config.programs else ()
    return (*RENDERING, "stages/core/statistics.py", "stages/evaluate/pass_at_k.py", "stages/evaluate/suite_scores.py", *functions)


KIND = Kind(
    name="evaluate",
    version=3,
    config=Evaluate,
    inputs={"policies": port("policy", many=True), "suites": port("item", many=True)},
    output=gives("scores"),
    engine="vllm",
    verified=frozenset({"suites"}),
    decided_by=decided_by,
    problem=evaluate_problem,
    work=work,
    sampling_plan=sampling_plan,
    shrink=shrink,
    family="measuring",
)
