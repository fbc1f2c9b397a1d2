"""Bubblewrap sandboxes for untrusted Python programs: each has its own, in which a process that it cannot reach tests it, or in which it
generates rows, rewards answers, or answers a policy (`project_programs`).

The sandbox has no network and sees only this machine's programs and libraries (`/usr`, `/bin`, `/lib`), the interpreter and numpy, which
some tests import, all read-only; the only writable place is a small `/tmp` in memory. Memory per process, CPU time, files, processes,
wall-clock time and time without work are limited; when the tests have ended or the time is up, everything in the sandbox is killed.

No process that holds the pipe of the verdict is accessible to the program, and the verdict repeats a random word that no program sees.

A program that exceeds a limit is wrong. If the sandbox fails to start, nothing is known about the program, which is an error.

A program that generates rows has a sandbox without numpy, and a time limit only per row; one that rewards answers, only per batch. String
hashes are the same in all of their runs, so that sets have a fixed order.
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
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from pedigree.configs.base.problems import PedigreeError
from pedigree.configs.base.texts import encodable

RUNNER = Path(__file__).with_name("sandboxed.py")
RUNNER_INSIDE, PYTHON = Path("/runner.py"), Path("/python")
"""Paths of the runner and the interpreter in the sandbox."""
ENVIRONMENT = {
    "PATH": "/usr/bin", "HOME": "/tmp", "LANG": "C.UTF-8", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0",
}  # fmt: skip
ISOLATED, REPEATABLE = ("-I", "-S", "-B"), ("-P", "-s", "-S", "-B")
"""Flags of the interpreter; `-I` would ignore PYTHONHASHSEED."""
MODES = {
    "tests": (ISOLATED, ("numpy",)),
    "rows": (REPEATABLE, ()),
    **dict.fromkeys(("rewards", "environment"), (REPEATABLE, ("numpy",))),
}
"""What a sandbox runs → flags, and the packages available to it."""
LIMITS = {
    "RLIMIT_AS": 2**30,
    "RLIMIT_FSIZE": 16 * 2**20,
    "RLIMIT_NOFILE": 64,
    "RLIMIT_NPROC": 8,
    "RLIMIT_CORE": 0,
}
"""Limits per process, except that RLIMIT_NPROC is for the whole sandbox."""
TMP_BYTES = 64 * 2**20
SLACK = 10
"""Wall-clock seconds allowed per second of CPU time, for machines with other load."""
IDLE_SECONDS = 5.0
"""Time that a program may sleep, or wait for something that does not come; it would otherwise do so for all of its wall-clock time."""
AT_ONCE = 8
"""Programs that run in parallel; most of a batch of sleeping ones then costs no time."""
LOOK_SECONDS = 0.2
"""Interval at which limits are checked."""
STARTUP_SECONDS = 20.0
OUTPUT_BYTES = 64 * 2**10
"""Maximum bytes read from a sandbox's output; a verdict is shorter."""
FIRST_USER = 200_000
"""First user id for sandboxes. Root gives each sandbox a random user, because process limits count per user and root has none."""
USERS = 1_000_000_000
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
REMEDY = "install bubblewrap (`apt-get install bubblewrap`)"


class Outcome(NamedTuple):
    """Result of the tests."""

    right: bool
    reason: str


def program() -> str | None:
    """Path of bubblewrap: on the path, or in the environment created by `make setup`."""
    return shutil.which("bwrap") or shutil.which("bwrap", path=str(Path(sys.executable).parent))


@cache
def require(what: str = "programs written by models", instead: str = "remove suites with programs") -> None:
    """Check once per process that a sandbox works.

    Args:
        what: kind of programs to run in it.
        instead: alternative to a sandbox.

    Raises:
        PedigreeError: bubblewrap is not installed, or may not create namespaces on this machine.
    """
    if program() is None:
        raise PedigreeError(f"{what} run only in a sandbox, and `bwrap` is not on the path: {REMEDY}, or {instead}")
    try:
        outcome = run("", "def double(x):\n    return 2 * x\n", "assert double(21) == 42", "double", seconds=5)
    except PedigreeError as error:
        raise PedigreeError(f"{what} run only in a sandbox, and none can start here: {error}; {REMEDY}, or {instead}") from error
    if not outcome.right:
        raise PedigreeError(f"the sandbox fails on a correct program ({outcome.reason}); {REMEDY}, or {instead}")


def run(before: str, program: str, tests: str, entry: str, seconds: int, examples: Sequence[Mapping[str, str]] = ()) -> Outcome:
    """Run tests against a function of a program, in a sandbox; or the program itself on examples.

    Args:
        before: trusted code before the program: imports, helpers, the head of the function.
        program: the untrusted code.
        tests: code that calls the function by its name, or as `candidate`; if it defines `check(candidate)`, that is called.
        entry: name of the function.
        seconds: CPU time limit of the program, and of its tests.
        examples: `input` and `output`; the program must print the output for each input, within the time limit for all of them.

    Raises:
        PedigreeError: the sandbox failed to start, so nothing is known about the program.
    """
    order: dict[str, Any] = {
        "before": before,
        "program": program,
        "tests": tests,
        "entry": entry,
        "examples": [dict(one) for one in examples],
        "word": secrets.token_hex(16),
    }
    # No pipes: a leftover process could keep one open, or fill it endlessly.
    files = (open(os.memfd_create(name), "rb+") for name in ("order", "output", "complaints"))
    with next(files) as asked, next(files) as output, next(files) as complaints:
        asked.write(json.dumps(order).encode())
        asked.seek(0)
        process = start("tests", {**LIMITS, "RLIMIT_CPU": seconds}, stdin=asked, stdout=output, stderr=complaints)
        try:
            late = _late(process, output, seconds)
        finally:
            end(process)
        lines = [line.removeprefix(order["word"]) for line in _text(output).splitlines() if line.startswith(order["word"])]
        if not lines:
            raise not_up(complaints)
    if len(lines) < 2:
        return Outcome(False, late or "ended before its tests did")
    verdict = json.loads(lines[1])
    return Outcome("right" in verdict, encodable(verdict.get("wrong", "right")))


def _late(process: "subprocess.Popen[bytes]", output: BinaryIO, seconds: int) -> str | None:
    """Wait until a sandbox has ended, or exceeds a limit: then which."""
    begun, work = time.monotonic(), _Work(process.pid)
    started = before = 0.0
    while True:
        with suppress(subprocess.TimeoutExpired):
            process.wait(LOOK_SECONDS)
            return None
        now = time.monotonic()
        if started:
            if now - started > SLACK * seconds:
                return f"no verdict within {SLACK * seconds:g} s"
            if now - started - (work.seconds() - before) > IDLE_SECONDS:
                return f"waited for {IDLE_SECONDS:g} s without work"
        elif os.fstat(output.fileno()).st_size:
            started, before = now, work.seconds()
        elif now - begun > STARTUP_SECONDS:
            return "did not start"


class _Work:
    """Work of a process and its descendants: their CPU time, and the time that they were ready while other processes had the CPU."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.ready: dict[int, int] = {}

    def seconds(self) -> float:
        """Up to now; the CPU time of processes that have ended is part of their parents'."""
        ticks, left = 0, [self.pid]
        while left:
            folder = Path(f"/proc/{left.pop()}")
            with suppress(OSError):  # it may end at any time
                ticks += sum(map(int, (folder / "stat").read_bytes().rpartition(b")")[2].split()[11:15]))
                left += [int(child) for file in folder.glob("task/*/children") for child in file.read_text().split()]
                self.ready[int(folder.name)] = int((folder / "schedstat").read_text().split()[1])  # some kernels have none
        return ticks / os.sysconf("SC_CLK_TCK") + sum(self.ready.values()) / 1e9


def _user() -> int | None:
    """User id of the sandbox; None for the current user."""
    return FIRST_USER + random.SystemRandom().randrange(USERS) if os.geteuid() == 0 else None


def not_up(complaints: BinaryIO) -> PedigreeError:
    return PedigreeError(f"the sandbox did not come up: {_text(complaints).strip()[-300:] or 'no word from it'}")


def _text(stream: BinaryIO) -> str:
    stream.seek(0)
    return stream.read(OUTPUT_BYTES).decode(errors="replace")


def start(
    mode: str, limits: Mapping[str, int], stdin: BinaryIO | int, stdout: BinaryIO | int, stderr: BinaryIO
) -> "subprocess.Popen[bytes]":
    """Start a sandbox. The runner is passed through a file descriptor, so that no mount reveals the project's path."""
    with RUNNER.open("rb") as runner:
        before, after = _command(mode)
        given = ("--perms", "0444", "--ro-bind-data", str(runner.fileno()), str(RUNNER_INSIDE))
        command = [*before, *given, *after, str(RUNNER_INSIDE), mode, json.dumps([_user(), limits])]
        return subprocess.Popen(command, stdin=stdin, stdout=stdout, stderr=stderr, pass_fds=[runner.fileno()], process_group=0)


def end(process: "subprocess.Popen[bytes]") -> None:
    """Kill a sandbox that still runs, and close its pipes, which no other thread may use."""
    kill(process)
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(BrokenPipeError):
                pipe.close()
    process.wait()


def kill(process: "subprocess.Popen[bytes]") -> None:
    """Kill a sandbox that still runs. Its processes die with bubblewrap, except one that bubblewrap is still setting up, which would wait
    for it forever, holding our pipes; that one is still in its process group."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


@cache
def _command(mode: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The bubblewrap command up to the runner's arguments, in two parts between which the runner itself is passed."""
    python, prefix = Path(os.path.realpath(sys.executable)), Path(os.path.realpath(sys.base_prefix))
    libraries, (flags, packages) = {}, MODES[mode]
    command = [program() or "bwrap", "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
    command += ["--die-with-parent", "--new-session", "--clearenv", "--hostname", "sandbox"]
    if os.geteuid() == 0:
        command += ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        # The tests' process is PID 1 of the sandbox: bubblewrap's own init would run as the program's user, hold the verdict's pipe, and be
        # accessible to the program. For root it is not accessible, and a PID 1 of another user could not be killed.
        command += ["--unshare-user", "--disable-userns", "--as-pid-1"]
    for folder in map(Path, SYSTEM):
        if folder.is_symlink():
            command += ["--symlink", os.readlink(folder), str(folder)]
        elif folder.is_dir():
            command += ["--ro-bind", str(folder), str(folder)]
    command += ["--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"]
    if not prefix.is_relative_to("/usr"):  # possibly in a home directory that only its owner may enter
        command += ["--ro-bind", str(prefix), str(PYTHON)]
        python, libraries = PYTHON / python.relative_to(prefix), {"LD_LIBRARY_PATH": str(PYTHON / "lib")}
    for name in packages:
        for folder in _folders(name):
            command += ["--perms", "0755", "--dir", "/packages", "--ro-bind", str(folder), f"/packages/{folder.name}"]
    after = ["--proc", "/proc", "--dev", "/dev", "--size", str(TMP_BYTES), "--tmpfs", "/tmp", "--chmod", "1777", "/tmp"]
    after += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp"]
    for name, value in {**ENVIRONMENT, **libraries}.items():
        after += ["--setenv", name, value]
    return tuple(command), (*after, "--", str(python), *flags)


def _folders(name: str) -> list[Path]:
    """Folders of a package and of the libraries bundled with its wheel."""
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None:
        return []
    package = Path(found.origin).parent
    return [folder for folder in (package, package.with_name(f"{name}.libs")) if folder.is_dir()]
