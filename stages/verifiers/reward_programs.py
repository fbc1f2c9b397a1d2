"""Rewards by a Python function of the project, in processes of its own: in sandboxes, or outside if the recipe trusts the file.

A function gets the answers to one prompt per call, so that its rewards do not depend on the batches in which answers arrive. What it
cannot reward is unknown with its cause, never 0. Each process is started once and answers line by line; one that exceeds its time limit
is replaced.
"""

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from threading import local
from typing import Any, NamedTuple

from pedigree.configs.base.problems import PedigreeError
from pedigree.configs.methods.reward_terms import COLUMNS, VERL_ARGUMENTS, RewardProgram
from pedigree.stages.verifiers import sandbox

BEAT_SECONDS = 1.0
LOADING_SECONDS = 300.0
"""Time limit for the imports of a file, which may load a model if it is trusted."""
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


@dataclass(eq=False)
class _Process:
    runner: sandbox.Runner
    taken: Sequence[str] = ()
    """Arguments of the function."""
    concurrent: bool = False
    """Whether it takes batches together, because it is async."""

    def tell(self, batches: Sequence[Sequence[_Call]], seconds: float) -> None:
        self.runner.wait.seconds = seconds
        self.runner.wait.begin()
        self.runner.tell(
            [[{"size": call.size, "arguments": {name: call.arguments[name] for name in self.taken}} for call in calls] for calls in batches]
        )


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
        if not term.trusted:
            sandbox.require("reward functions", f"set `trusted: true` for {term.path}, which runs it without a sandbox")
        self.term, self.beat = term, beat
        self._columns = [name for name in COLUMNS if name not in without]
        self._fields = sorted({name for verifier in verifiers if verifier for name in verifier} - {"name", *COLUMNS, *term.arguments})
        passed = VERL_ARGUMENTS if term.form == "verl" else (*self._columns, *self._fields)
        self._order = {
            "name": file.name,
            "program": sandbox.text_of(file),
            "function": term.function,
            "passed": [*passed, *term.arguments],
        }
        self._threads = ThreadPoolExecutor(1 if term.trusted else min(threads, sandbox.AT_ONCE), "rewards")  # processes end with them
        self._own = local()
        self._open: list[_Process] = []
        try:
            self._ended(self._threads.submit(self._process))
        except BaseException:
            self.close()
            raise

    def values(self, groups: Sequence[Sequence[Answered]]) -> list[list[Value]]:
        """The reward of each answer; each group has the answers to one prompt."""
        batches = [self._calls(group) for group in groups]
        parts = [batches] if self.term.trusted else [[batch] for batch in batches]
        waiting = [self._threads.submit(self._values, part) for part in parts]
        return [values for future in waiting for values in self._ended(future)]

    def close(self) -> None:
        for process in self._open:
            process.runner.end()
        self._threads.shutdown(cancel_futures=True)

    def _ended(self, future: "Future[Any]") -> Any:
        while not wait([future], timeout=BEAT_SECONDS).done:
            self.beat()
        return future.result()

    def _process(self) -> _Process:
        """This thread's process."""
        if not hasattr(self._own, "process"):
            process = _Process(sandbox.Runner("rewards", self._order, sandbox.Wait(LOADING_SECONDS), confined=not self.term.trusted))
            self._open.append(process)
            self._own.process = process
            try:
                ready = parsed(next(process.runner.lines, None), ("taken", "raised"))
            except sandbox.ProgramFailed as error:
                raise PedigreeError(f"{self.term.path} {error} before {self.term.function} could be called") from error
            if "raised" in ready:
                raise PedigreeError(f"{self.term.path}: {self.term.function} cannot be used:\n{ready['raised']}")
            process.taken, process.concurrent = ready["taken"], ready["concurrent"]
        return self._own.process

    def _values(self, batches: list[list[_Call]]) -> list[list[Value]]:
        found: list[list[Value]] = []
        while len(found) < len(batches):
            try:
                process = self._process()
                process.tell(batches[len(found) :], self.term.seconds)
                for calls in batches[len(found) :]:
                    found.append(_rewards(next(process.runner.lines, None), calls))
                    process.runner.wait.begin()
            except (PedigreeError, BrokenPipeError) as error:
                why = str(error) if isinstance(error, sandbox.ProgramFailed) else "ended"
                cause = f"the function {why} (seconds: {self.term.seconds:g})"
                lost = batches[len(found) :] if self._own.process.concurrent else batches[len(found) : len(found) + 1]
                found += [_unknown(calls, cause) for calls in lost]
                self._drop()
        return found

    def _drop(self) -> None:
        """End this thread's process, so that the next call starts another."""
        self._own.process.runner.end()
        self._open.remove(self._own.process)
        del self._own.process

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


def _unknown(calls: Sequence[_Call], cause: str) -> list[Value]:
    return [cause] * _size(calls)


def _rewards(line: bytes | None, calls: Sequence[_Call]) -> list[Value]:
    values = parsed(line, ("rewards",))["rewards"]
    if not isinstance(values, list) or len(values) != _size(calls) or not all(isinstance(one, float | str | None) for one in values):
        raise sandbox.ProgramFailed("wrote into the stream of rewards")
    return values


def parsed(line: bytes | None, names: Sequence[str]) -> dict[str, Any]:
    """Parse a line of a process, whose pipe the program can also write to."""
    if line is None:
        raise sandbox.ProgramFailed("ended")
    try:
        found = json.loads(line, parse_constant=lambda name: f"returned {name}")
    except (ValueError, RecursionError) as error:
        raise sandbox.ProgramFailed("wrote into the stream of rewards") from error
    if not isinstance(found, dict) or not any(name in found for name in names):
        raise sandbox.ProgramFailed("wrote into the stream of rewards")
    return found
