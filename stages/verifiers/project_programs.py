"""Processes that run programs of the project: functions that generate rows or reward answers, and environments of conversations.

They run in a sandbox, or outside it if the recipe trusts the file. A process receives lines of JSON and outputs others. Its program can
write to the same pipe, so every line is checked.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from pathlib import Path
from threading import Lock
from typing import Any

from pedigree.configs.base.problems import PedigreeError
from pedigree.configs.base.texts import encodable
from pedigree.configs.methods.environment_programs import EnvironmentProgram
from pedigree.configs.methods.reward_terms import RewardProgram
from pedigree.data.host.pipes import readable, writable
from pedigree.stages.verifiers import sandbox

LOADING_SECONDS = 300.0
"""Time limit for the imports of a file, which may load a model if it is trusted."""
LONGEST_LINE = 32 * 2**20
"""Maximum bytes of a row with its wrapper; the runner limits rows to half of it."""
NAMES = {"rewards": "reward functions", "environment": "environments"}
"""What a process runs → its name in messages."""


class ProgramFailed(PedigreeError):
    """A program exceeded its time limit, ended early, or wrote into its own output; the message says which."""


class NotLoaded(ProgramFailed):
    """A program failed before its function could be used; the message is complete."""


class Deadline:
    """The deadline for the next line, which several processes may share."""

    def __init__(self, seconds: float) -> None:
        self.begin(seconds)

    def begin(self, seconds: float) -> None:
        """Restart it."""
        self.seconds, self._until = seconds, time.monotonic() + seconds

    def left(self) -> float:
        return max(0.0, self._until - time.monotonic())


class ProgramProcess:
    """A process that runs a program; a context manager that kills it at the end."""

    def __init__(self, mode: str, order: Mapping[str, Any], deadline: Deadline, *, confined: bool = True) -> None:
        """Start it, which counts towards the deadline for the first line.

        Args:
            mode: `rows`, `rewards` or `environment`.
            order: what it reads: the `program_of` a file, and how to use it.
            confined: whether it runs in a sandbox.

        Raises:
            ProgramFailed: it exceeded the deadline.
            PedigreeError: the sandbox failed to start.
        """
        self.deadline = deadline
        with open(os.memfd_create("complaints"), "rb+") as complaints:
            if confined:
                self._process = sandbox.start(mode, sandbox.LIMITS, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=complaints)
            else:
                variables = {**os.environ, "PYTHONHASHSEED": "0"}
                command = [sys.executable, "-P", "-B", str(sandbox.RUNNER), mode, json.dumps([None, None])]
                self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=variables, process_group=0)
            assert self._process.stdin is not None and self._process.stdout is not None
            self._requests = self._process.stdin.fileno()
            os.set_blocking(self._requests, False)
            self.lines = _lines(self._process.stdout.fileno(), deadline)
            try:
                if not self._has_started({**order, "word": ""}):
                    raise sandbox.not_up(complaints)
            except BaseException:
                self.end()
                raise

    def __enter__(self) -> "ProgramProcess":
        return self

    def __exit__(self, *exception: object) -> None:
        self.end()

    def _has_started(self, order: Mapping[str, Any]) -> bool:
        try:
            self._write(order)
        except BrokenPipeError:
            return False
        return next(self.lines, None) is not None

    def send(self, message: Any, seconds: float) -> None:
        """Send a line; the next one from the process must come within this time.

        Raises:
            ProgramFailed: the process has ended, or did not read the line within this time.
        """
        self.deadline.begin(seconds)
        try:
            self._write(message)
        except BrokenPipeError as error:
            raise ProgramFailed("ended") from error

    def _write(self, message: Any) -> None:
        line = json.dumps(message).encode() + b"\n"
        while line:
            if not writable(self._requests, self.deadline.left()):
                raise ProgramFailed(f"read nothing for {self.deadline.seconds:g} s")
            line = line[os.write(self._requests, line) :]

    def reply(self, *forms: Collection[str]) -> dict[str, Any]:
        """The next line, see `parsed`.

        Raises:
            ProgramFailed: there is no valid one before the deadline.
        """
        return parsed(next(self.lines, None), *forms, replace=True)

    def end(self) -> None:
        sandbox.end(self._process)

    def kill(self) -> None:
        """Kill it, as any thread may: one that waits for a reply then gets none."""
        sandbox.kill(self._process)


class LoadedProgram(ProgramProcess):
    """A process that loads a reward function or an environment, and then replies to each line with one or several."""

    def load(self, config: RewardProgram | EnvironmentProgram) -> None:
        """Wait until the function can be used.

        Raises:
            NotLoaded: it cannot.
        """
        try:
            self.ready = self.reply(("taken",), ("raised",))
        except ProgramFailed as error:
            raise NotLoaded(f"{config.path} {error} before {config.function} could be used") from error
        if "raised" in self.ready:
            raise NotLoaded(f"{config.path}: {config.function} cannot be used:\n{self.ready['raised']}")

    def accepted(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Those of the arguments that the function has."""
        return {name: arguments.get(name) for name in self.ready["taken"]}


class LoadedPrograms:
    """The processes of a reward function or an environment; `close` ends all of them, also those that still load.

    Args:
        passed: names of the arguments that the function may have.

    Raises:
        PedigreeError: the file is not UTF-8, or there is no sandbox.
    """

    def __init__(self, mode: str, config: RewardProgram | EnvironmentProgram, file: Path, passed: Sequence[str]) -> None:
        if not config.trusted:
            sandbox.require(NAMES[mode], f"set `trusted: true` for {config.path}, which runs it without a sandbox")
        self._mode, self._config = mode, config
        self._order = {**program_of(file), "function": config.function, "passed": passed}
        self._lock = Lock()
        self._open: list[LoadedProgram] = []
        self._closed = False

    def start(self) -> LoadedProgram:
        """Start another process, and wait until it has loaded the file.

        Raises:
            ProgramFailed: the program failed.
            PedigreeError: the sandbox failed to start, or `close` was called.
        """
        self._refuse_if_closed()
        program = LoadedProgram(self._mode, self._order, Deadline(LOADING_SECONDS), confined=not self._config.trusted)
        try:
            with self._lock:  # `close` either finds the process in the list, or has been called
                self._refuse_if_closed()
                self._open.append(program)
            program.load(self._config)
        except BaseException:
            self.end(program)
            raise
        return program

    def end(self, program: LoadedProgram) -> None:
        with self._lock:
            self._open = [one for one in self._open if one is not program]
        program.end()

    def close(self, threads: Iterable[Executor]) -> None:
        """End all processes, start no other, and end the threads that use them."""
        with self._lock:
            self._closed = True
            left = self._open
        for program in left:
            program.kill()
        for one in threads:
            one.shutdown(cancel_futures=True)
        for program in left:
            program.end()

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise PedigreeError(f"{self._config.path} is no longer used: its stage ends")


def cause_of(error: ProgramFailed, what: str, seconds: float) -> str:
    """Why a call failed."""
    return str(error) if isinstance(error, NotLoaded) else f"the {what} {error} (seconds: {seconds:g})"


def parsed(line: bytes | None, *forms: Collection[str], replace: bool = False) -> dict[str, Any]:
    """Parse a line of a process; it must have all fields of one of the forms. `replace` makes its texts `encodable`.

    Raises:
        ProgramFailed: it has not, or there is none.
    """
    if line is None:
        raise ProgramFailed("ended")
    try:
        found = json.loads(line, parse_constant=lambda name: f"returned {name}")
        found = json.loads(encodable(json.dumps(found, ensure_ascii=False))) if replace else found
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or not any(found.keys() >= {*form} for form in forms):
        raise ProgramFailed("wrote into the stream of its results")
    return found


def program_of(file: Path) -> dict[str, str]:
    """What a process is given of a file. All processes of a stage run the text that was read first.

    Raises:
        PedigreeError: the file is not UTF-8.
    """
    try:
        return {"name": file.name, "program": file.read_text(encoding="utf-8")}
    except UnicodeDecodeError as error:
        raise PedigreeError(f"{file.name} is not UTF-8: {error}") from error


def _lines(pipe: int, deadline: Deadline) -> Iterator[bytes]:
    """The lines from a pipe, up to its end."""
    pending = b""
    while readable(pipe, deadline.left()):
        read = os.read(pipe, 2**20)
        if not read:
            return
        *whole, pending = (pending + read).split(b"\n")
        yield from whole
        if len(pending) > LONGEST_LINE:
            raise ProgramFailed(f"output a line of more than {LONGEST_LINE} bytes")
    raise ProgramFailed(f"output no complete line for {deadline.seconds:g} s")
