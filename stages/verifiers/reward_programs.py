"""Rewards by a Python function of the project, in processes of its own: in sandboxes, or outside if the recipe trusts the file.

A function gets the answers to one prompt per call, so that its rewards do not depend on the batches in which answers arrive. What it
cannot reward is unknown with its cause, never 0. Each process is started once and answers line by line; one that exceeds its time limit
is replaced.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import local
from typing import Any, NamedTuple

from pedigree.configs.methods.reward_terms import COLUMNS, VERL_ARGUMENTS, RewardProgram
from pedigree.stages.verifiers import ended, sandbox
from pedigree.stages.verifiers.project_programs import LoadedProgram, LoadedPrograms, ProgramFailed, cause_of

Value = float | None | str
"""A reward; None where the function leaves an answer out; a text is the cause of an unknown reward."""


class Answered(NamedTuple):
    """A finished answer."""

    prompt: Mapping[str, Any]
    text: str
    ids: Sequence[int]
    """Tokens, with the end-of-turn token, if it has one."""
    finish_reason: str
    score: float | None
    """The verifier's; None if it is unknown, or no term needs it."""
    earned: Value = None
    """Sum of the rewards that an environment gave for the turns."""


class _Call(NamedTuple):
    size: int | None
    """Answers; None for a single one that is not in a list."""
    arguments: dict[str, Any]

    def message(self, program: LoadedProgram) -> dict[str, Any]:
        return {"size": self.size, "arguments": program.accepted(self.arguments)}


class RewardFunction:
    """A reward function in its processes; the first one starts immediately, so that what cannot run is refused early.

    Args:
        term: of the recipe.
        file: the program.
        verifiers: verifiers of all prompts; the names of their arguments are columns.
        threads: processes of a sandboxed function. A trusted one has a single process, which may hold a model.
        beat: called while waiting.
        without: columns that the answers lack.

    Raises:
        PedigreeError: the file raises, has no such function, or requires other arguments; or there is no sandbox.
    """

    def __init__(
        self,
        term: RewardProgram,
        file: Path,
        verifiers: Iterable[Mapping[str, Any] | None],
        threads: int,
        beat: Callable[[], None],
        without: Collection[str] = (),
    ) -> None:
        self.term, self.beat = term, beat
        self._columns = [name for name in COLUMNS if name not in without]
        self._fields = sorted({name for verifier in verifiers if verifier for name in verifier} - {"name", *COLUMNS, *term.arguments})
        passed = VERL_ARGUMENTS if term.form == "verl" else (*self._columns, *self._fields)
        self._programs = LoadedPrograms("rewards", term, file, [*passed, *term.arguments])
        self._threads = ThreadPoolExecutor(1 if term.trusted else min(threads, sandbox.AT_ONCE), "rewards")  # processes end with them
        self._own = local()
        try:
            ended(self._threads.submit(self._program), beat)
        except BaseException:
            self.close()
            raise

    def values(self, groups: Sequence[Sequence[Answered]]) -> list[list[Value]]:
        """The reward of each answer; each group has the answers to one prompt.

        Raises:
            PedigreeError: a sandbox failed to start.
        """
        batches = [self._calls(group) for group in groups]
        parts = [batches] if self.term.trusted else [[batch] for batch in batches]
        waiting = [self._threads.submit(self._values, part) for part in parts]
        return [values for future in waiting for values in ended(future, self.beat)]

    def close(self) -> None:
        self._programs.close([self._threads])

    def _program(self) -> LoadedProgram:
        """This thread's process."""
        if not hasattr(self._own, "program"):
            self._own.program = self._programs.start()
        return self._own.program

    def _values(self, batches: Sequence[Sequence[_Call]]) -> list[list[Value]]:
        """The rewards of each batch. After a failure another process gets the batches that are left."""
        found: list[list[Value]] = []
        while len(found) < len(batches):
            together = False
            try:
                program = self._program()
                together, left = program.ready["concurrent"], batches[len(found) :]
                program.send([[call.message(program) for call in calls] for calls in left], self.term.seconds)
                for calls in left:
                    found.append(_rewards(program, calls))
                    program.deadline.begin(self.term.seconds)
            except ProgramFailed as error:
                cause = cause_of(error, "function", self.term.seconds)
                lost = batches[len(found) : None if together else len(found) + 1]
                found.extend([cause] * _size(calls) for calls in lost)
                self._drop()
        return found

    def _drop(self) -> None:
        """End this thread's process, so that the next call starts another."""
        if hasattr(self._own, "program"):
            self._programs.end(self._own.program)
            del self._own.program

    def _calls(self, group: Sequence[Answered]) -> list[_Call]:
        if self.term.form == "verl":
            return [_Call(None, {**self._verl(answer), **self.term.arguments}) for answer in group]
        rows = [_columns(answer) for answer in group]
        columns = {name: [row[name] for row in rows] for name in self._columns}
        fields = {name: [(answer.prompt["verifier"] or {}).get(name) for answer in group] for name in self._fields}
        return [_Call(len(group), {**columns, **fields, **self.term.arguments})]

    def _verl(self, answer: Answered) -> dict[str, Any]:
        verifier, columns = answer.prompt["verifier"] or {}, _columns(answer)
        return {
            "data_source": answer.prompt["source"],
            "solution_str": answer.text,
            "ground_truth": verifier.get("answer", verifier or None),
            "extra_info": {name: columns[name] for name in self._columns},
        }


def _columns(answer: Answered) -> dict[str, Any]:
    prompt = answer.prompt
    return {
        "prompts": prompt["messages"],
        "completions": [{"role": "assistant", "content": answer.text}],
        "completion_ids": list(answer.ids),
        "id": prompt["id"],
        "source": prompt["source"],
        "verifier": prompt["verifier"],
        "verifier_score": answer.score,
        "finish_reason": answer.finish_reason,
        "template_arguments": prompt.get("template_arguments"),
    }


def _size(calls: Sequence[_Call]) -> int:
    return sum(call.size or 1 for call in calls)


def _rewards(program: LoadedProgram, calls: Sequence[_Call]) -> list[Value]:
    values = program.reply(("rewards",))["rewards"]
    if not isinstance(values, list) or len(values) != _size(calls) or not all(isinstance(one, float | str | None) for one in values):
        raise ProgramFailed("wrote into the stream of its results")
    return values
