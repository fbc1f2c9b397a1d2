"""Run git in the project's folder. The only module that runs it."""

import os
import subprocess
from collections.abc import Collection
from pathlib import Path

from pedigree.configs.base.problems import PedigreeError, UsageProblem
from pedigree.configs.base.project import Project

TIMEOUT_S = 300.0
"""For queries; fetching, checking out and running a user's hooks have no timeout."""
ABSENT = 127
"""The shell's exit code for a missing command."""
NO_REPOSITORY = b"git repository (or any "
"""In git's answer if neither the folder nor one above it is a repository. A broken link to a repository has other words."""
KEPT = {
    *(f"GIT_{who}_{what}" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")),
    *("GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM", "GIT_CONFIG_NOSYSTEM", "GIT_CEILING_DIRECTORIES"),
    *("GIT_SSH", "GIT_SSH_COMMAND", "GIT_ASKPASS"),
}
"""Git variables for identity and server access, none of them specific to a repository."""


def run_git(
    folder: Path, *arguments: str, given: bytes | None = None, timeout_s: float | None = TIMEOUT_S
) -> subprocess.CompletedProcess[bytes]:
    """Run git in a folder, without prompting, and return its result whatever the exit code.

    Raises:
        PedigreeError: it takes longer than `timeout_s`.
    """
    words = ["git", *arguments]
    try:
        return subprocess.run(
            words, cwd=folder, env=git_environment(), input=given or b"", capture_output=True, check=False, timeout=timeout_s
        )
    except FileNotFoundError:
        return subprocess.CompletedProcess(words, ABSENT, b"", b"git cannot be run: install it")
    except subprocess.TimeoutExpired as error:
        remedy = f"run `git status` in {folder} to see what blocks it"
        raise PedigreeError(f"`git {arguments[0]}` did not finish within {timeout_s:g} s: {remedy}") from error


def short_commit(folder: Path) -> str | None:
    """The abbreviated commit of a work tree; None if git fails."""
    try:
        return run_git(folder, "rev-parse", "--short=12", "HEAD", timeout_s=5.0).stdout.decode().strip() or None
    except (OSError, PedigreeError):
        return None


def in_repository(folder: Path) -> bool:
    """Whether a folder is in a git repository; no without git.

    Raises:
        UsageProblem: git refuses to read the repository, for example because it belongs to another user; with git's words and remedy.
    """
    answer = run_git(folder, "rev-parse", "--git-dir")
    if answer.returncode in (0, ABSENT) or NO_REPOSITORY in answer.stderr:
        return answer.returncode == 0
    raise UsageProblem(f"git cannot read the repository of {folder}: {' '.join(answer.stderr.decode(errors='replace').split())}")


def is_work_tree(folder: Path) -> bool:
    """Whether a folder is the top of a git work tree. Inside one, e.g. in `site-packages`, git would answer for another repository."""
    return (folder / ".git").exists()


def git_environment() -> dict[str, str]:
    """The environment without repository-specific git variables, which a calling hook would set for another repository."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("GIT_") or name in KEPT}
    return ours | {"GIT_TERMINAL_PROMPT": "0", "LANGUAGE": "C"}


def git(
    project: Project, *arguments: str, given: str | None = None, timeout_s: float | None = TIMEOUT_S
) -> subprocess.CompletedProcess[str]:
    """Run git in the project's folder, as `run_git`, and return its result as text."""
    sent = None if given is None else given.encode()
    answer = run_git(project.root, *arguments, given=sent, timeout_s=timeout_s)
    out, err = (data.decode(errors="surrogateescape") for data in (answer.stdout, answer.stderr))
    return subprocess.CompletedProcess(answer.args, answer.returncode, out, err)


def refused(project: Project, names: Collection[str]) -> dict[str, str]:
    """Untracked file, existing or not → why `git add` would refuse it: `FILE:LINE: PATTERN` of the rule that ignores it, or git's words."""
    answer = git(project, "check-ignore", "--verbose", "-z", "--stdin", given="\0".join(names))
    if answer.returncode > 1:  # behind a symbolic link, for example
        return dict.fromkeys(names, answer.stderr.strip())
    fields = answer.stdout.split("\0")
    found = zip(fields[::4], fields[1::4], fields[2::4], fields[3::4], strict=False)
    return {name: f"{file}:{line}: {pattern}" for file, line, pattern, name in found if not pattern.startswith("!")}


def names_at(project: Project, revision: str) -> list[str] | None:
    """Paths of all files below the root in a commit; None if git does not know the commit."""
    answer = git(project, "ls-tree", "-r", "--name-only", "-z", "--end-of-options", revision, "--", ".")
    return None if answer.returncode else [name for name in answer.stdout.split("\0") if name]


def text_at(project: Project, revision: str, name: str) -> str:
    """The text of a file in a commit; empty if the commit does not contain it."""
    return git(project, "show", "--end-of-options", f"{revision}:./{name}").stdout
