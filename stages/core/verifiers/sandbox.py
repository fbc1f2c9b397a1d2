"""Python programs that nobody trusts, each in a bubblewrap sandbox of its own, tested by a process that they cannot reach.

In the sandbox there is no network, and nothing of this machine but its programs and libraries (`/usr`, `/bin`, `/lib`), the interpreter
and numpy, which some tests import, read-only; the only place to write is a small `/tmp` in memory that goes away with it. Memory, CPU
time, files, processes and time are limited; when the tests have ended or the time is up, everything in the sandbox is killed.

No process that has the pipe of the verdict is open to the program, and the verdict repeats a random word that no program sees.

A program that breaks a limit is wrong. A sandbox that did not come up says nothing about the program, and that is an error.
"""

import importlib.util
import json
import os
import random
import secrets
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from configs.problems import PedigreeError

RUNNER = Path(__file__).with_name("sandboxed.py")
RUNNER_INSIDE, PYTHON = Path("/runner.py"), Path("/python")
"""Where the runner and the interpreter are in the sandbox."""
ENVIRONMENT = {"PATH": "/usr/bin", "HOME": "/tmp", "LANG": "C.UTF-8", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
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
SAID_BYTES = 64 * 2**10
"""Of what a sandbox says as much is read; a verdict is shorter."""
FIRST_USER = 200_000
"""Root gives each sandbox a user of its own, at random from here on: limits to processes count by user, and root has none."""
USERS = 1_000_000_000
IMPORTED = ("numpy",)
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
REMEDY = "install bubblewrap (`apt-get install bubblewrap`), or leave suites with programs out"


class NoSandbox(PedigreeError):
    """Programs cannot be run here, since they could not be locked in; the message says why and the remedy."""


class SandboxFailed(PedigreeError):
    """A sandbox did not come up, so that nothing is known of the program."""


class Outcome(NamedTuple):
    """What the tests found."""

    right: bool
    reason: str


def program() -> str | None:
    """Where bubblewrap is: on the path, or in the environment that `make setup` has made."""
    return shutil.which("bwrap") or shutil.which("bwrap", path=str(Path(sys.executable).parent))


@cache
def require() -> None:
    """Checks once per process that a sandbox comes up.

    Raises:
        NoSandbox: bubblewrap is not there, or may not make namespaces on this machine.
    """
    if program() is None:
        raise NoSandbox(f"programs that models write are run in a sandbox only, and `bwrap` is not on the path: {REMEDY}")
    try:
        outcome = run("", "def double(x):\n    return 2 * x\n", "assert double(21) == 42", "double", seconds=5)
    except SandboxFailed as error:
        raise NoSandbox(f"programs that models write are run in a sandbox only, and none comes up here: {error}; {REMEDY}") from error
    if not outcome.right:
        raise NoSandbox(f"the sandbox does not run a program that is right ({outcome.reason}); {REMEDY}")


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
    user = FIRST_USER + random.SystemRandom().randrange(USERS) if os.geteuid() == 0 else None
    order: dict[str, Any] = {
        "before": before,
        "program": program,
        "tests": tests,
        "entry": entry,
        "user": user,
        "word": secrets.token_hex(16),
        "seconds": seconds,
        "limits": {**LIMITS, "RLIMIT_CPU": seconds},
    }
    allowed = STARTUP_SECONDS + SLACK * seconds
    # No pipes: whoever is left behind could keep one open, or fill it without end.
    with open(os.memfd_create("said"), "rb+") as said, open(os.memfd_create("complaints"), "rb+") as complaints:
        process = subprocess.Popen([*_command(), str(RUNNER_INSIDE), "tests"], stdin=subprocess.PIPE, stdout=said, stderr=complaints)
        late = False
        try:
            process.communicate(json.dumps(order).encode(), timeout=allowed)
        except subprocess.TimeoutExpired:
            process.kill()  # the sandbox dies with it
            process.communicate()
            late = True
        lines = [line.removeprefix(order["word"]) for line in _text(said).splitlines() if line.startswith(order["word"])]
        if not lines:
            raise SandboxFailed(f"the sandbox did not come up: {_text(complaints).strip()[-300:] or 'no word from it'}")
    if len(lines) < 2:
        return Outcome(False, f"no verdict within {allowed:g} s" if late else "ended before its tests did")
    verdict = json.loads(lines[1])
    return Outcome("right" in verdict, verdict.get("wrong", "right"))


def _text(stream: BinaryIO) -> str:
    stream.seek(0)
    return stream.read(SAID_BYTES).decode(errors="replace")


@cache
def _command() -> tuple[str, ...]:
    """The call of bubblewrap up to the runner's own arguments."""
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
    command += ["--perms", "0755", "--dir", "/packages"]
    for name in IMPORTED:
        for folder in _folders(name):
            command += ["--ro-bind", str(folder), f"/packages/{folder.name}"]
    command += ["--ro-bind", str(RUNNER), str(RUNNER_INSIDE), "--proc", "/proc", "--dev", "/dev"]
    command += ["--size", str(TMP_BYTES), "--tmpfs", "/tmp", "--chmod", "1777", "/tmp"]
    command += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp"]
    for name, value in {**ENVIRONMENT, **libraries}.items():
        command += ["--setenv", name, value]
    return (*command, "--", str(python), "-I", "-S", "-B")


def _folders(name: str) -> list[Path]:
    """Where a package lies, and the libraries that its wheel came with."""
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None:
        return []
    package = Path(found.origin).parent
    return [folder for folder in (package, package.with_name(f"{name}.libs")) if folder.is_dir()]
