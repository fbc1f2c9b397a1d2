"""Config of an environment: a Python file of the project that answers the policy between its turns."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from pedigree.configs.base.frozen import Frozen, Many
from pedigree.configs.base.python_files import FunctionName, PythonFile, keyword_arguments

RESET_COLUMNS = ("seed", "messages", "id", "source", "verifier", "template_arguments")
"""Keyword arguments of `reset`, before those of the rows' verifiers."""


class EnvironmentProgram(Frozen):
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
    max_turns: int = Field(ge=1)
    """Maximum answers of the policy in a conversation, each of at most `sampling.max_tokens`."""
    max_observation: int = Field(default=256, ge=1)
    """Maximum tokens between two answers: what the environment says, with the chat template's own. More end the conversation as
    truncated."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Additional keyword arguments of `reset`, as JSON values."""
    seconds: float = Field(default=60.0, gt=0)
    """Time limit of a `reset` or `step`."""
    trusted: bool = False
    """Run the file outside the sandbox, with the network, the files and the packages of this environment."""

    @property
    def called(self) -> str:
        return "environment"

    def longest_answer(self, max_tokens: int) -> int:
        """Maximum tokens after a prompt, of all answers and of what is between them."""
        return self.max_turns * max_tokens + (self.max_turns - 1) * self.max_observation

    @model_validator(mode="after")
    def _check_arguments(self) -> "EnvironmentProgram":
        keyword_arguments(self.arguments, RESET_COLUMNS)
        return self


class PlayedEnvironment(EnvironmentProgram):
    """An environment in which policies are sampled or evaluated: as in `rlvr`, whose rollouts are the same conversations. With what `reset`
    adds, a prompt has at most `max_observation` tokens more than the longest one has without."""

    scored_by: Literal["reward", "verifier"] = "reward"
    """The score of a conversation: `reward`, the sum of what the environment gave for its turns; `verifier`, the score of its last answer
    by the verifier of the prompt, for tools; rewards are ignored then."""

    def longest_answer(self, max_tokens: int) -> int:
        """With what `reset` adds."""
        return super().longest_answer(max_tokens) + self.max_observation


class EvaluatedEnvironment(PlayedEnvironment):
    """An environment in which policies are evaluated: a `PlayedEnvironment` with the metrics `success`, `pass_at_K`, `turns` and
    `truncated`."""

    samples: int = Field(default=1, ge=1)
    """Conversations per item."""
    pass_at: Many[Annotated[int, Field(ge=1)]] = ()
    """Each k of a metric `pass_at_K`: the probability that at least one of k conversations succeeds, estimated from `samples`."""
    success: float = 1.0
    """A conversation succeeds if its score is at least this."""

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of its metrics, besides those of verifiers; the first one is primary if there is none of these."""
        reward = ("reward",) if self.scored_by == "reward" else ()
        return (*reward, "success", *(f"pass_at_{k}" for k in self.pass_at), "turns", "truncated")

    @model_validator(mode="after")
    def _check_pass_at(self) -> "EvaluatedEnvironment":
        if self.pass_at and max(self.pass_at) > self.samples:
            raise ValueError(f"pass_at is {max(self.pass_at)}, more than samples {self.samples}: raise samples, or lower pass_at")
        return self


def programs_of(config: Frozen) -> list[Any]:
    """The Python files of the project that score or converse in a stage, with a function each."""
    environment = getattr(config, "environment", None)
    return [*getattr(config, "programs", ()), *([environment] if environment else [])]
