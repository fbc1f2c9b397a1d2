"""Environments of the project: a Python file that answers the policy between its turns, in processes of its own.

The file has a class `Environment`. Each conversation has an object of it, created without arguments:

    class Environment:
        def reset(self, seed, messages, answer): ...
        def step(self, answer): return "what the user says next", 0.5, False

`reset` begins a conversation. It receives the keyword arguments that it declares: `seed`, equal for all answers to a prompt in a step; the
prompt's `messages`, `id`, `source`, `verifier` and `template_arguments`; each argument of the verifier under its own name; and the
`arguments` of the recipe. It returns None to ask the prompt as it is, a text to append to its last message (as TRL's `reset`), or other
messages to ask instead.

`step` receives the text of an answer. It returns (observation, reward, done): the text of the user's next message, or a list of messages
`{"role": "user" or "tool", "content": ...}`; the reward of this turn, or None for none; and whether the conversation has ended, in which
case the observation is ignored. It is also called for the last answer that `max_turns` allows and for one that was cut off.

All randomness must come from `seed`: a conversation whose process was lost to another one is repeated from its beginning.
"""

import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from pedigree.configs.methods.environment_programs import RESET_COLUMNS, EnvironmentProgram, Partner
from pedigree.data.artifacts.artifacts import sha256_file
from pedigree.data.records.records import Message
from pedigree.stages.verifiers import sandbox
from pedigree.stages.verifiers.project_programs import LoadedProgram, LoadedPrograms, ProgramFailed, cause_of


class Reaction(NamedTuple):
    """What an environment returns."""

    messages: list[Message] | str | None
    """After `step` those that follow the answer; after `reset` those to ask, or a text to append to the prompt's, or neither."""
    reward: float | None = None
    done: bool = False
    seconds: float = 0.0
    """That it took."""


Outcome = Reaction | str
"""A reaction; a text is the cause of a failure."""


class Environments(Protocol):
    """An environment in all conversations of a job, each of which is an `episode`."""

    @property
    def config(self) -> Partner: ...
    def identity(self) -> dict[str, Any]: ...
    def reset(self, prompt: Mapping[str, Any], seed: int) -> "tuple[Any, Future[Outcome]]": ...
    def step(self, episode: Any, answer: str) -> "Future[Outcome]": ...
    def end(self, episode: Any) -> None: ...
    def close(self) -> None: ...


@dataclass(eq=False)
class Episode:
    """One conversation with an environment."""

    process: "_Process"
    number: int
    """Among those of its process."""
    start: Mapping[str, Any]
    """Arguments of `reset`."""
    answers: list[str] = field(default_factory=list)


class ProgramEnvironments:
    """A program in its processes, each of which has a thread that its calls wait for; the first one starts immediately, so that what cannot
    run is refused early.

    Args:
        config: of the recipe.
        file: the program.
        verifiers: verifiers of all prompts; the names of their arguments are columns.
        threads: maximum number of processes.

    Raises:
        PedigreeError: the file raises, lacks the class or one of its methods, or requires other arguments; or there is no sandbox.
    """

    def __init__(self, config: EnvironmentProgram, file: Path, verifiers: Iterable[Mapping[str, Any] | None], threads: int) -> None:
        self.config, self._numbers = config, count(1)
        names = {name for verifier in verifiers if verifier for name in verifier} - {"name", *RESET_COLUMNS, *config.arguments}
        passed = [*RESET_COLUMNS, *sorted(names), *config.arguments]
        self._file = file
        self._programs = LoadedPrograms("environment", config, file, passed)
        self._processes = [_Process(config, self._programs) for _ in range(min(threads, sandbox.AT_ONCE))]
        try:
            self._processes[0].thread.submit(self._processes[0].program).result()
        except BaseException:
            self.close()
            raise

    def identity(self) -> dict[str, Any]:
        """Everything besides prompts and answers that determines its reactions."""
        return {**self.config.model_dump(mode="json"), "sha256": sha256_file(self._file)}

    def reset(self, prompt: Mapping[str, Any], seed: int) -> "tuple[Episode, Future[Outcome]]":
        """Begin a conversation on a prompt."""
        known = {name: prompt.get(name) for name in RESET_COLUMNS if name != "seed"}
        start = {**(prompt["verifier"] or {}), **known, **self.config.arguments, "seed": seed}
        number = next(self._numbers)  # threads of several engines may call this together
        process = self._processes[number % len(self._processes)]
        episode = Episode(process, number, start)
        return episode, process.thread.submit(process.call, episode)

    def step(self, episode: Episode, answer: str) -> "Future[Outcome]":
        """Pass on an answer."""
        return episode.process.thread.submit(episode.process.call, episode, answer)

    def end(self, episode: Episode) -> None:
        """Forget a conversation."""
        episode.process.ended.append(episode.number)

    def close(self) -> None:
        self._programs.close([process.thread for process in self._processes])


class _Process:
    """A process that is started when it is needed, and replaced after a failure."""

    def __init__(self, config: EnvironmentProgram, programs: LoadedPrograms) -> None:
        self.config, self._programs = config, programs
        self.thread = ThreadPoolExecutor(1, "environment")
        self.ended: list[int] = []
        """Conversations to forget."""
        self._program: LoadedProgram | None = None
        self._alive: set[int] = set()
        """Conversations that the process remembers."""

    def program(self) -> LoadedProgram:
        self._program = self._program or self._programs.start()
        return self._program

    def call(self, episode: Episode, answer: str | None = None) -> Outcome:
        """The reaction to an answer, or to the beginning of a conversation. What the process does not remember is repeated.

        Raises:
            PedigreeError: a sandbox failed to start.
        """
        begun = time.monotonic()
        episode.answers += [] if answer is None else [answer]
        try:
            program = self.program()
            unknown = episode.answers[-1:] if episode.number in self._alive else [None, *episode.answers]
            found = [self._reaction(program, episode, one) for one in unknown][-1]
        except ProgramFailed as error:
            self.drop()
            return cause_of(error, "environment", self.config.seconds)
        self._alive.add(episode.number)
        if "raised" in found:
            return f"the environment raised:\n{found['raised']}"
        return Reaction(found["messages"], found.get("reward"), found.get("done", False), time.monotonic() - begun)

    def _reaction(self, program: LoadedProgram, episode: Episode, answer: str | None) -> dict[str, Any]:
        start = program.accepted(episode.start) if answer is None else None
        ended, self.ended = self.ended, []
        self._alive.difference_update(ended)
        program.send({"number": episode.number, "start": start, "answer": answer, "ended": ended}, self.config.seconds)
        return program.reply(("messages",), ("raised",))

    def drop(self) -> None:
        """End the process, so that the next call starts another."""
        if self._program is not None:
            self._programs.end(self._program)
        self._program, self._alive = None, set()
