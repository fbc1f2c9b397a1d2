"""Config of an environment: a Python file of the project that answers the policy between its turns."""

from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from pedigree.configs.base.frozen import Frozen
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

    @model_validator(mode="after")
    def _check_arguments(self) -> "EnvironmentProgram":
        keyword_arguments(self.arguments, RESET_COLUMNS)
        return self
