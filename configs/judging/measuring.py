"""Configs of the stages that measure policies and choose one."""

from pydantic import Field, field_validator, model_validator

from pedigree.configs.base.frozen import Arrived, Dtype, Frozen, Many, added
from pedigree.configs.methods.environment_programs import AnyEvaluated
from pedigree.configs.methods.language_model import Sampling
from pedigree.configs.methods.reward_terms import RewardProgram, distinct
from pedigree.configs.rows.datasets import PrepareData, form_of
from pedigree.configs.rows.suite_forms import Form


class Evaluate(Frozen):
    """Scores policies on suites, with one engine, item by item."""

    sampling: Sampling | None = None
    """Sampling parameters for suites without a form, which require it; forms define their own."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Upper bound on the answer length of forms, in tokens: for rehearsals and small models. Part of the task's hash."""
    max_unknown: float = Field(default=0.05, ge=0, lt=1)
    """The stage fails if more than this share of a policy's answers on a task has an unknown score."""
    chunk_size: int = Field(default=64, ge=1)
    """Requests submitted together: the unit of generation and resume."""
    resamples: int = Field(default=2000, ge=100)
    """Bootstrap resamples of items for each 95 % interval."""
    dtype: Dtype = "bf16"
    """Dtype for inference."""
    seed: int = Field(default=0, ge=0)
    """Seed of sampling and of the bootstrap."""
    programs: Many[RewardProgram] = added(())
    """Functions of the project, as in the reward of `rlvr`. Each is a metric of every suite; of a suite whose items have the verifier
    `facts`, the first one is the score."""

    environment: AnyEvaluated | None = added(None)
    """A class of the project, or a simulated user, that answers the policies between several turns; the suites have no forms. Verifiers and
    programs see the last answer, in the conversation before it."""

    @model_validator(mode="after")
    def _check_samples(self) -> "Evaluate":
        if self.environment and self.environment.samples > 1 and self.sampling and self.sampling.temperature == 0:
            raise ValueError(
                f"environment.samples is {self.environment.samples} at temperature 0, where all samples are equal: raise "
                "sampling.temperature, or set samples to 1"
            )
        return self

    @model_validator(mode="after")
    def _check_programs(self) -> "Evaluate":
        distinct(self.programs, "programs")
        for program in self.programs:
            if program.weight != 1:
                raise ValueError(f"the weight of {program.called} is {program.weight:g}, but a metric has none: remove weight")
        return self

    def sampling_of(self, form: Form | None) -> Sampling | None:
        """Sampling parameters for a suite: those of its form, else of this evaluation; None if choices are compared."""
        if form is None:
            return self.sampling
        if form.draw is None:
            return None
        longest = min(form.draw.max_tokens, self.max_tokens or form.draw.max_tokens)
        return Sampling(temperature=form.draw.temperature, top_p=form.draw.top_p, max_tokens=longest)


def evaluate_problem(config: Evaluate, arrived: Arrived) -> str | None:
    """Error message if these suites do not fit the config, else None."""
    made = {label: given.config for label, given in arrived.get("suites", {}).items() if isinstance(given.config, PrepareData)}
    formed = next((label for label, suite in made.items() if suite.form), None)
    if config.environment and formed:
        return f"suite {formed} has a form, but an environment plays prompts without one: evaluate it in a stage without environment"
    without = [label for label, suite in made.items() if suite.form is None]
    for label, suite in made.items():
        twin = next((other for other, given in made.items() if other != label and given.task == suite.task), None)
        if twin and suite.form:
            return f"task {suite.task} is in the suites {label} and {twin}: give each suite its own task name"
    if without and config.sampling is None:
        return f"suite {without[0]} has no form, so the sampling parameters are undefined: set sampling"
    if made and not without and config.sampling is not None:
        return f"all suites have forms ({', '.join(made)}), which define the sampling parameters: remove sampling"
    if made and len(without) == len(made) and config.max_tokens is not None:
        return "max_tokens applies only to suites with a form, and there are none: set sampling.max_tokens instead"
    for label, suite in made.items() if config.programs else ():
        form = form_of(suite)
        if form and form.choose:
            return f"suite {label} compares choices, but programs score texts: evaluate it in a stage without programs"
        taken = config.environment.metrics if config.environment else ()
        for name in {program.called for program in config.programs} & {*taken, *(form.metrics if form else ["score"])}:
            return f"suite {label} has a metric {name} already: give the program another name"
    return None


class Select(Frozen):
    """Selects the candidate with the highest development score; the earlier one in a tie."""

    task: str | Many[str] | None = None
    """One task, or a list of tasks whose mean decides; by default the mean over all tasks."""

    @field_validator("task")
    @classmethod
    def _check_task(cls, value: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
        if isinstance(value, tuple) and (not value or len(set(value)) < len(value)):
            raise ValueError(f"task {list(value)} must name one task or several distinct ones: gsm8k, or [minerva_math, ifeval]")
        return value
