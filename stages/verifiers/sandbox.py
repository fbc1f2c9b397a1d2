"""Python programs that nobody trusts, each in a bubblewrap sandbox of its own: tested by a process that they cannot reach, or asked for
rows.

In the sandbox there is no network, and nothing of this machine but its programs and libraries (`/usr`, `/bin`, `/lib`), the interpreter
and numpy, which some tests import, read-only; the only place to write is a small `/tmp` in memory that goes away with it. The memory of
each process, CPU time, files, processes and time are limited; when the tests have ended or the time is up, all in the sandbox is killed.

No process that has the pipe of the verdict is open to the program, and the verdict repeats a random word that no program sees.

A program that breaks a limit is wrong. A sandbox that did not come up says nothing about the program, and that is an error.

A program that makes rows has a sandbox without numpy, and no limit to its time but to that of one row. Hashes of texts are the same in all
of its runs, so that sets have one order.
"""

import importlib.util
import json
import os
import random
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from configs.base.problems import PedigreeError
from data.host.pipes import readable

RUNNER = Path(__file__).with_name("sandboxed.py")
RUNNER_INSIDE, PYTHON = Path("/runner.py"), Path("/python")
"""Where the runner and the interpreter are in the sandbox."""
ENVIRONMENT = {
    "PATH": "/usr/bin", "HOME": "/tmp", "LANG": "C.UTF-8", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0",
}  # fmt: skip
ISOLATED, REPEATABLE = ("-I", "-S", "-B"), ("-P", "-s", "-S", "-B")
"""Flags of the interpreter; `-I` would have it leave PYTHONHASHSEED out."""
LIMITS = {
    "RLIMIT_AS": 2**30,
    "RLIMIT_FSIZE": 16 * 2**20,
    "RLIMIT_NOFILE": 64,
    "RLIMIT_NPROC": 8,
    "RLIMIT_CORE": 0,
}
"""Of each process; the number of processes is that of the sandbox."""
TMP_BYTES = 64 * 2**20
SLACK = 10
"""Wall-clock seconds that are waited per second of CPU time, for machines that do other things too."""
STARTUP_SECONDS = 20.0
LONGEST_LINE = 32 * 2**20
"""Bytes of a row with what it is wrapped in; the runner bounds rows to half of it."""
SAID_BYTES = 64 * 2**10
"""Of what a sandbox says as much is read; a verdict is shorter."""
FIRST_USER = 200_000
"""Root gives each sandbox a user of its own, at random from here on: limits to processes count by user, and root has none."""
USERS = 1_000_000_000
IMPORTED = {ISOLATED: ("numpy",), REPEATABLE: ()}
"""Packages that programs of each kind see."""
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
REMEDY = "install bubblewrap (`apt-get install bubblewrap`)"


class NoSandbox(PedigreeError):
    """Programs cannot be run here, since they could not be locked in; the message says why and the remedy."""


class SandboxFailed(PedigreeError):
    """A sandbox did not come up, so that nothing is known of the program."""


class Fell(PedigreeError):
    """A program that is asked for rows was silent for too long, or ended before its rows did; the message says which."""


class Outcome(NamedTuple):
    """What the tests found."""

    right: bool
    reason: str


def program() -> str | None:
    """Where bubblewrap is: on the path, or in the environment that `make setup` has made."""
    return shutil.which("bwrap") or shutil.which("bwrap", path=str(Path(sys.executable).parent))


@cache
def require(what: str = "programs that models write", instead: str = "leave suites with programs out") -> None:
    """Checks once per process that a sandbox comes up.

    Args:
        what: is to be run in it.
        instead: what to do where there is none.

    Raises:
        NoSandbox: bubblewrap is not there, or may not make namespaces on this machine.
    """
    if program() is None:
        raise NoSandbox(f"{what} are run in a sandbox only, and `bwrap` is not on the path: {REMEDY}, or {instead}")
    try:
        outcome = run("", "def double(x):\n    return 2 * x\n", "assert double(21) == 42", "double", seconds=5)
    except SandboxFailed as error:
        raise NoSandbox(f"{what} are run in a sandbox only, and none comes up here: {error}; {REMEDY}, or {instead}") from error
    if not outcome.right:
        raise NoSandbox(f"the sandbox does not run a program that is right ({outcome.reason}); {REMEDY}, or {instead}")


def run(before: str, program: str, tests: str, entry: str, seconds: int) -> Outcome:
    """Runs tests against a function of a program, in a sandbox.

    Args:
        before: what stands before the program and is known to be good: imports, helpers, the head of the function.
        program: what somebody wrote.
        tests: code that calls the function by its name, or as `candidate`; where it defines `check(candidate)`, that is called.
        entry: name of the function.
        seconds: CPU time of the program, and of its tests.

    Raises:
        SandboxFailed: the sandbox did not come up, so that nothing is known of the program.
    """
    order: dict[str, Any] = {
        "before": before,
        "program": program,
        "tests": tests,
        "entry": entry,
        "user": _user(),
        "word": secrets.token_hex(16),
        "limits": {**LIMITS, "RLIMIT_CPU": seconds},
    }
    allowed = STARTUP_SECONDS + SLACK * seconds
    # No pipes: whoever is left behind could keep one open, or fill it without end.
    with open(os.memfd_create("said"), "rb+") as said, open(os.memfd_create("complaints"), "rb+") as complaints:
        process = _start(ISOLATED, "tests", stdin=subprocess.PIPE, stdout=said, stderr=complaints)
        late = False
        try:
            process.communicate(json.dumps(order).encode(), timeout=allowed)
        except subprocess.TimeoutExpired:
            late = True
        finally:
            _end(process)
        lines = [line.removeprefix(order["word"]) for line in _text(said).splitlines() if line.startswith(order["word"])]
        if not lines:
            raise _not_up(complaints)
    if len(lines) < 2:
        return Outcome(False, f"no verdict within {allowed:g} s" if late else "ended before its tests did")
    verdict = json.loads(lines[1])
    return Outcome("right" in verdict, verdict.get("wrong", "right"))


class Wait:
    """How long a row is waited for, by all who make it."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.begin()

    def begin(self) -> None:
        """From now on for the next row."""
        self._until = time.monotonic() + self.seconds

    def left(self) -> float:
        return max(0.0, self._until - time.monotonic())


@contextmanager
def rows(call: Mapping[str, Any], wait: Wait) -> Iterator[Iterator[bytes]]:
    """What a program gives, which is running at once: a line of JSON for each row, `{"row": ...}` or `{"bad": why, "text": ...}`, and last
    `{"end": true}` or `{"raised": traceback}`. It is killed with the block.

    Args:
        call: `program`, its text; `name` of its file; `function`; `count`, `seed` and `arguments` that it is called with.
        wait: a line has to be whole within it; the first one with the time that the sandbox takes to come up.

    Raises:
        Fell: a line was not.
        SandboxFailed: the sandbox did not come up.
    """
    order = {**call, "user": _user(), "word": "", "limits": LIMITS}
    with open(os.memfd_create("complaints"), "rb+") as complaints, open(os.memfd_create("order"), "rb+") as asked:
        asked.write(json.dumps(order).encode())
        asked.seek(0)
        process = _start(REPEATABLE, "rows", stdin=asked, stdout=subprocess.PIPE, stderr=complaints)
        try:
            assert process.stdout is not None
            lines = _lines(process.stdout.fileno(), wait)
            if next(lines, None) is None:
                raise _not_up(complaints)
            yield lines
        finally:
            _end(process)


def _lines(pipe: int, wait: Wait) -> Iterator[bytes]:
    """The lines that come through a pipe, up to its end."""
    pending = b""
    while readable(pipe, wait.left()):
        read = os.read(pipe, 2**20)
        if not read:
            return
        *whole, pending = (pending + read).split(b"\n")
        yield from whole
        if len(pending) > LONGEST_LINE:
            raise Fell(f"gave a row of more than {LONGEST_LINE} bytes")
    raise Fell(f"gave no whole row for {wait.seconds:g} s")


def _user() -> int | None:
    """Whom the sandbox runs as."""
    return FIRST_USER + random.SystemRandom().randrange(USERS) if os.geteuid() == 0 else None


def _not_up(complaints: BinaryIO) -> SandboxFailed:
    return SandboxFailed(f"the sandbox did not come up: {_text(complaints).strip()[-300:] or 'no word from it'}")


def _text(stream: BinaryIO) -> str:
    stream.seek(0)
    return stream.read(SAID_BYTES).decode(errors="replace")


def _start(flags: tuple[str, ...], mode: str, stdin: BinaryIO | int, stdout: BinaryIO | int, stderr: BinaryIO) -> "subprocess.Popen[bytes]":
    """A sandbox with the runner in it, which comes through a descriptor, so that no mount says where the project lies."""
    with RUNNER.open("rb") as runner:
        before, after = _command(flags)
        given = ("--perms", "0444", "--ro-bind-data", str(runner.fileno()), str(RUNNER_INSIDE))
        command = [*before, *given, *after, str(RUNNER_INSIDE), mode]
        return subprocess.Popen(command, stdin=stdin, stdout=stdout, stderr=stderr, pass_fds=[runner.fileno()], process_group=0)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Kills a sandbox that still runs. Its processes die with bubblewrap, but for one that bubblewrap has only begun to set up, which
    would wait for it forever, with our pipes: that one is still of its group."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(BrokenPipeError):
                pipe.close()
    process.wait()


@cache
def _command(flags: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The call of bubblewrap up to the runner's own arguments, in two parts between which the runner itself is given."""
    python, prefix = Path(os.path.realpath(sys.executable)), Path(os.path.realpath(sys.base_prefix))
    libraries = {}
    command = [program() or "bwrap", "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
    command += ["--die-with-parent", "--new-session", "--clearenv", "--hostname", "sandbox"]
    if os.geteuid() == 0:
        command += ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        # The tests' process is the first one of the sandbox: bubblewrap's own would be another of the program's user, with the verdict's
        # pipe, and open to it. For root it is not, and of another user it could not be ended.
        command += ["--unshare-user", "--disable-userns", "--as-pid-1"]
    for folder in map(Path, SYSTEM):
        if folder.is_symlink():
            command += ["--symlink", os.readlink(folder), str(folder)]
        elif folder.is_dir():
            command += ["--ro-bind", str(folder), str(folder)]
    command += ["--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"]
    if not prefix.is_relative_to("/usr"):  # in a home that nobody but its owner may enter, perhaps
        command += ["--ro-bind", str(prefix), str(PYTHON)]
        python, libraries = PYTHON / python.relative_to(prefix), {"LD_LIBRARY_PATH": str(PYTHON / "lib")}
    for name in IMPORTED[flags]:
        for folder in _folders(name):
            command += ["--perms", "0755", "--dir", "/packages", "--ro-bind", str(folder), f"/packages/{folder.name}"]
    after = ["--proc", "/proc", "--dev", "/dev", "--size", str(TMP_BYTES), "--tmpfs", "/tmp", "--chmod", "1777", "/tmp"]
    after += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp"]
    for name, value in {**ENVIRONMENT, **libraries}.items():
        after += ["--setenv", name, value]
    return tuple(command), (*after, "--", str(python), *flags)


def _folders(name: str) -> list[Path]:
    """Where a package lies, and the libraries that its wheel came with."""
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None:
        return []
    package = Path(found.origin).parent
    return [folder for folder in (package, package.with_name(f"{name}.libs")) if folder.is_dir()]
