"""`evaluate` as recipes, plans, rehearsals and reports see it."""

from collections.abc import Sequence

from pedigree.configs.base.kind import CONVERSATIONS, FUNCTIONS, RENDERING, Kind, gives, port
from pedigree.configs.base.shrink import MAX_UNKNOWN, RESAMPLES, TOKENS, Cut
from pedigree.configs.base.work import PROMPT_TOKENS, Amount, Amounts, PlannedStage, SamplingPlan
from pedigree.configs.judging.measuring import Evaluate, evaluate_problem
from pedigree.configs.methods.environment_programs import served_user, shrink_environment
from pedigree.configs.methods.language_model import unserved_problem
from pedigree.configs.rows.datasets import PrepareData, form_of
from pedigree.configs.rows.suite_forms import Form


def shrink(cut: Cut) -> None:
    assert isinstance(cut.config, Evaluate)
    suites = cut.inputs["suites"].values()
    if any(isinstance(suite, PrepareData) and suite.form for suite in suites):
        cut.set("max_tokens", min(cut.get("max_tokens") or TOKENS, TOKENS), "lengths")
    cut.most("sampling.max_tokens", TOKENS, "lengths")
    cut.most("resamples", RESAMPLES, "samples")
    cut.set("max_unknown", MAX_UNKNOWN, "thresholds")
    shrink_environment(cut)


CHOICES = 4
"""Of a question whose choices are compared, in most benchmarks."""


def longest_answer(config: Evaluate, form: Form | None) -> int:
    """Tokens after a prompt; 0 where choices are compared, or `sampling` is missing."""
    sampling = config.sampling_of(form)
    if sampling is None:
        return 0
    return config.environment.longest_answer(sampling.max_tokens, lengthens=True) if config.environment else sampling.max_tokens


def sampling_plan(config: Evaluate, forms: Sequence[Form | None] = (None,)) -> SamplingPlan:
    longest = max((longest_answer(config, form) for form in forms), default=0)
    return SamplingPlan("policies", config.dtype, config.chunk_size, longest, chunk_field="chunk_size")


def work(stage: PlannedStage) -> Amounts:
    """All policies on all suites: each suite is asked in its form's way, with prompts and answers of its own length."""
    config, suites = stage.config, stage.inputs["suites"].values()
    forms = [form_of(suite.config) for suite in suites]
    how, requests, prompts, answers = sampling_plan(config, forms), Amount(0, "counted"), 0.0, 0.0
    for suite, form in zip(suites, forms, strict=True):
        if suite.rows is None:
            return Amounts(plan=how)
        drawn = config.environment.samples if config.environment else 1
        each = drawn if form is None else form.draw.samples if form.draw else CHOICES
        asked = suite.rows.times(each * len(stage.inputs["policies"]))
        requests = Amount(requests.value + asked.value, requests.times(asked).how)
        prompts += asked.value * (suite.row_tokens or PROMPT_TOKENS * (1 + (form.prompt.shots if form else 0)))
        answers += asked.value * longest_answer(config, form)
    if not requests.value:
        return Amounts(plan=how)
    found = Amounts(
        rows=requests, prompt=Amount(prompts / requests.value, "estimated"), requests=requests, plan=how,
        tokens=Amount(prompts + answers, "at most"), answer=answers / requests.value,
    )  # fmt: skip
    if config.environment is None or config.sampling is None:
        return found
    return found.in_turns(config.environment.max_turns, config.sampling.max_tokens)


def decided_by(config: Evaluate) -> tuple[str, ...]:
    functions = CONVERSATIONS if config.environment else FUNCTIONS if config.programs else ()
    return (*RENDERING, "stages/core/statistics.py", "stages/evaluate/pass_at_k.py", "stages/evaluate/suite_scores.py", *functions)


KIND = Kind(
    name="evaluate",
    version=3,
    config=Evaluate,
    inputs={"policies": port("policy", many=True), "suites": port("item", many=True), "user": port("policy", optional=True)},
    output=gives("scores"),
    engine="vllm",
    verified=lambda config: frozenset({"suites"}),
    decided_by=decided_by,
    problem=lambda config, arrived: evaluate_problem(config, arrived) or unserved_problem(served_user(config), arrived, "user"),
    work=work,
    sampling_plan=sampling_plan,
    served=served_user,
    shrink=shrink,
    family="measuring",
)
