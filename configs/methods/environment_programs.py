"""Config of an environment, which answers the policy between its turns: a Python file of the project, or a simulated user."""

from collections.abc import Mapping
from string import Template
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from pedigree.configs.base.frozen import Frozen, Many
from pedigree.configs.base.problems import PedigreeError
from pedigree.configs.base.python_files import FunctionName, PythonFile, keyword_arguments
from pedigree.configs.base.shrink import TURNS, Cut
from pedigree.configs.base.work import SamplingPlan
from pedigree.configs.methods.language_model import Sampling, Served, served_plan, shrink_asking

RESET_COLUMNS = ("seed", "messages", "id", "source", "verifier", "template_arguments")
"""Keyword arguments of `reset`, before those of the rows' verifiers."""


class Partner(Frozen):
    """What answers the policy between its turns."""

    max_turns: int = Field(ge=1)
    """Maximum answers of the policy in a conversation, each of at most `sampling.max_tokens`."""
    max_observation: int = Field(default=256, ge=1)
    """Maximum tokens between two answers: what the environment says, with the chat template's own. More end the conversation as
    truncated."""

    def longest_answer(self, max_tokens: int, lengthens: bool = False) -> int:
        """Maximum tokens after a prompt, of all answers and of what is between them; also of what `reset` adds, where it `lengthens`."""
        return self.max_turns * max_tokens + (self.max_turns - 1 + lengthens) * self.max_observation


class EnvironmentProgram(Partner):
    """A class in a Python file of the project with `reset` and `step`, which makes an answer a conversation of several turns. The file is a
    dependency of the stage.

    It runs in a sandbox with Python's standard library and numpy: no network, no files except a small `/tmp`, 1 GiB of memory per process.
    An exception or a time limit makes the reward of that conversation unknown.
    """

    formula: ClassVar[str] = "a_t ~ π(· | x, a_1, o_1, ..., a_{t-1}, o_{t-1}); o_t, r_t, done = step(a_t)"
    source: ClassVar[str] = "verl, BaseInteraction.generate_response; the tokens of o_t are context alone (TRL, tool_mask)"
    type: Literal["program"] = "program"
    """A Python file."""
    path: PythonFile
    """A `.py` file, relative to the project root."""
    function: FunctionName = "Environment"
    """Name of the class, or of a function that returns an object with its methods."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Additional keyword arguments of `reset`, as JSON values."""
    seconds: float = Field(default=60.0, gt=0)
    """Time limit of a `reset` or `step`."""
    trusted: bool = False
    """Run the file outside the sandbox, with the network, the files and the packages of this environment."""

    @property
    def called(self) -> str:
        return "environment"

    @model_validator(mode="after")
    def _check_arguments(self) -> "EnvironmentProgram":
        keyword_arguments(self.arguments, RESET_COLUMNS)
        return self


class SimulatedUser(Partner):
    """A language model that plays the user: it sees the conversation with roles exchanged, the policy's answers as those of
    the user. It gives no rewards: verifiers score the last answer.

    Replies are stored, so that an interrupted run asks nothing twice. A conversation without a reply has no reward; if the model is down,
    the attempt ends.
    """

    formula: ClassVar[str] = "a_t ~ π(· | x, a_1, o_1, ..., a_{t-1}, o_{t-1}); o_t ~ user(· | instructions, x, a_1, o_1, ..., a_t)"
    source: ClassVar[str] = "Yao et al. 2024, arXiv 2406.12045 (τ-bench), user simulation"
    scored_by: ClassVar[str] = "verifier"
    type: Literal["user"]
    """A language model that plays the user."""
    by: Served
    """That model: a policy at the input `user`, or a server."""
    instructions: str = Field(min_length=1)
    """Its system message. `$prompt` is the last message of the prompt, `$NAME` an argument of the prompt's verifier, `$$` a dollar sign."""
    opens: bool = False
    """The user also says the first message; the prompt's last message is then known to the user alone, as `$prompt`."""
    stop: str | None = Field(default="###STOP###", min_length=1)
    """A reply that contains this text ends the conversation, and the policy does not see it; `null`: only `max_turns` ends it."""
    sampling: Sampling = Sampling(temperature=1.0, max_tokens=256)
    """Sampling parameters of the user."""

    def system_text(self, prompt: Mapping[str, Any]) -> str:
        """Its system message for a prompt.

        Raises:
            PedigreeError: the prompt lacks what the instructions name.
        """
        given = {**(prompt["verifier"] or {}), "prompt": prompt["messages"][-1]["content"]}
        try:
            return Template(self.instructions).substitute(given)
        except KeyError as error:
            names = ", ".join(sorted(given.keys() - {"name"}))
            problem = f"instructions names ${error.args[0]}, but prompt {prompt['id']} has only {names}: use one of these"
            raise PedigreeError(problem) from error

    @model_validator(mode="after")
    def _check_instructions(self) -> "SimulatedUser":
        if not Template(self.instructions).is_valid():
            raise ValueError("instructions has a `$` that begins no name: write `$$` for a dollar sign")
        if self.stop is not None and self.stop not in self.instructions:
            raise ValueError(f"instructions does not contain stop {self.stop!r}: say when to reply with it, or set `stop: null`")
        return self


def _typed(value: Any) -> Any:
    return {"type": "program", **value} if isinstance(value, dict) else value


AnyEnvironment = Annotated[EnvironmentProgram | SimulatedUser, Field(discriminator="type"), BeforeValidator(_typed)]


class PlayedEnvironment(EnvironmentProgram):
    """An environment in which policies are sampled or evaluated: as in `rlvr`, whose rollouts are the same conversations. With what `reset`
    adds, a prompt has at most `max_observation` tokens more than the longest one has without."""

    scored_by: Literal["reward", "verifier"] = "reward"
    """The score of a conversation: `reward`, the sum of what the environment gave for its turns; `verifier`, the score of its last answer
    by the verifier of the prompt, for tools; rewards are ignored then."""


class Evaluated(Frozen):
    """How conversations are measured."""

    samples: int = Field(default=1, ge=1)
    """Conversations per item."""
    pass_at: Many[Annotated[int, Field(ge=1)]] = ()
    """Each k of a metric `pass_at_K`: the probability that at least one of k conversations succeeds, estimated from `samples`."""
    success: float = 1.0
    """A conversation succeeds if its score is at least this."""

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of its metrics, besides those of verifiers; the first one is primary if there is none of these."""
        return ("success", *(f"pass_at_{k}" for k in self.pass_at), "turns", "truncated")

    @model_validator(mode="after")
    def _check_pass_at(self) -> "Evaluated":
        if self.pass_at and max(self.pass_at) > self.samples:
            raise ValueError(f"pass_at is {max(self.pass_at)}, more than samples {self.samples}: raise samples, or lower pass_at")
        return self


class EvaluatedEnvironment(Evaluated, PlayedEnvironment):
    """An environment in which policies are evaluated: a `PlayedEnvironment` with the metrics `success`, `pass_at_K`, `turns` and
    `truncated`."""

    @property
    def metrics(self) -> tuple[str, ...]:
        return (*(("reward",) if self.scored_by == "reward" else ()), *super().metrics)


class EvaluatedUser(Evaluated, SimulatedUser):
    """A `SimulatedUser` with the metrics `success`, `pass_at_K`, `turns` and `truncated`."""


AnyPlayed = Annotated[PlayedEnvironment | SimulatedUser, Field(discriminator="type"), BeforeValidator(_typed)]
AnyEvaluated = Annotated[EvaluatedEnvironment | EvaluatedUser, Field(discriminator="type"), BeforeValidator(_typed)]


def served_user(config: Any) -> tuple[SamplingPlan, ...]:
    """How a policy that plays the user in a stage is queried; empty if none does."""
    user = config.environment
    return served_plan(user.by, "user", config.dtype, user.sampling.max_tokens) if isinstance(user, SimulatedUser) else ()


def programs_of(config: Frozen) -> list[Any]:
    """The Python files of the project that score or converse in a stage, with a function each."""
    environment = getattr(config, "environment", None)
    return [*getattr(config, "programs", ()), *([environment] if isinstance(environment, EnvironmentProgram) else [])]


def shrink_environment(cut: Cut) -> None:
    """Shorten the conversations of a config, if it has any; a user is played by the rehearsal's own server."""
    cut.most("environment.max_turns", TURNS, "lengths")
    if cut.get("environment.type") == "user":
        shrink_asking(cut, "user", "environment.by")
