"""Check out recorded code in a git work tree with its patch, using bundles for commits that the clone lacks.

Without a commit, and for an installed package, which has no git, the running code with the recorded kinds of stages is used, if it is the
recorded code to the byte.
"""

import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from pedigree.configs.base.problems import UsageProblem
from pedigree.data.artifacts.lineage import text_sha256
from pedigree.data.artifacts.provenance import CODE_ROOT, code_files, code_sha256, own_files
from pedigree.data.artifacts.run_record import CodeState, Run
from pedigree.pipelines.ledger.git import ABSENT, is_work_tree, run_git
from pedigree.pipelines.lineage.git_state import code_state
from pedigree.pipelines.quantities import counted

SOUND = ("-c", "fetch.fsckObjects=true", "-c", "protocol.ext.allow=never")
"""Git settings for fetching untrusted objects."""
HERE = "use --here to run with the current code"
Fetch = Callable[[str, Path], bool]
"""(name, target): fetches a file from the remote; False if it does not exist."""


@dataclass(frozen=True)
class RecordedCode:
    """The code of one run, from its `run.json`."""

    commit: str | None
    patch_sha256: str | None = None
    """Hash of the patch text."""
    patch: str | None = None
    left_out: str = ""
    """Why a dirty tree's patch was not stored."""
    new_files: int = field(default=0, compare=False)
    """Number of untracked files missing from the record."""
    snapshot: str | None = None
    """Hash of all code files that the job could import or read."""
    version: str = ""
    """Of the installed package, if it ran from one."""

    @classmethod
    def of(cls, run: Run, patches: Mapping[str, str]) -> "RecordedCode":
        """The code of the run's last attempt, which completed the artifact; `patches`: sha256 → text, from the lineage."""
        state = (run.attempts[-1].code if run.attempts else None) or CodeState()
        sha256 = state.patch_sha256
        left_out = state.patch_left_out or ("its text is not among the records" if sha256 else "")
        patch = patches.get(sha256) if sha256 else None
        return cls(state.commit, sha256, patch, left_out, state.new_files, state.snapshot, state.version)

    def __str__(self) -> str:
        if self.commit is None:
            return f"pedigree {self.version}" if self.version else "no commit"
        patch = f" with patch {self.patch_sha256[:8]}" if self.patch_sha256 else ""
        lost = f" without {counted(self.new_files, 'unrecorded new file')}" if self.new_files else ""
        return self.commit[:12] + patch + lost

    @property
    def folder(self) -> str:
        return (self.commit or self.snapshot or "none")[:12] + (f"-{self.patch_sha256[:8]}" if self.patch_sha256 else "")


def bundle_name(commit: str) -> str:
    """Name in the remote of the bundle of a commit and its history."""
    return f"pedigree/code/{commit}.bundle"


def obstacle(code: RecordedCode, root: Path = CODE_ROOT) -> str | None:
    """Why the code is unavailable, judging by the record and the running code alone."""
    name = code.commit[:12] if code.commit else f"pedigree {code.version}"
    if code.patch is None and code.left_out:
        return f"it was made from a modified working tree of {name}, whose patch was not stored ({code.left_out}): {HERE}"
    if code.patch is not None and text_sha256(code.patch) != code.patch_sha256:
        return f"the sha256 of the patch of {name} differs from the recorded {str(code.patch_sha256)[:12]}: {HERE}"
    tracked = code.commit is not None and is_work_tree(root)
    return None if tracked or code.patch or code.snapshot == _own_sha256(root) else _other_code(code)  # a patch is tried in `_patched`


@cache
def _own_sha256(root: Path) -> str:
    return code_sha256(own_files(root))


def _other_code(code: RecordedCode) -> str:
    """Why recorded code cannot be had without git, and the remedy."""
    if code.version:
        return f"it was made by pedigree {code.version}, whose files differ from the current code: install that version, or {HERE}"
    if code.commit is None:
        return f"the record has no commit (it was made outside git): {HERE}"
    return f"it was made at {code.commit[:12]}, not by this installed package: reproduce it in a clone of Pedigree, or {HERE}"


def check_out(code: RecordedCode, target: Path, fetch: Fetch, root: Path = CODE_ROOT) -> Path:
    """Check out the recorded code at `target`, reusing an existing work tree with exactly this code; returns its folder. UsageProblem:
    commit or patch are unavailable.

    `root` is the clone, or the folder of the installed package. Without git and patch, it is returned: its code is then the recorded one.
    `fetch` brings a bundle if neither the clone nor its git remotes have the commit.
    """
    problem = obstacle(code, root)
    if problem:
        raise UsageProblem(problem)
    if code.commit is None or not is_work_tree(root):
        return _patched(code, target, root) if code.patch else root
    if (target / ".git").exists():
        state = code_state(target, new_files=True)
        if (state["commit"], state["patch_sha256"]) == (code.commit, code.patch_sha256):
            return target
    if target.exists():
        remove(target, root)
    _bring(code.commit, fetch, root)
    target.parent.mkdir(parents=True, exist_ok=True)
    _must(root, "worktree", "add", "--quiet", "--detach", "--force", "--end-of-options", str(target), code.commit)
    if code.patch:
        _must(target, "apply", "--whitespace=nowarn", "-", stdin=code.patch.encode())
    return target  # commit and patch hashes determine the tree, so it need not be verified


def _patched(code: RecordedCode, target: Path, root: Path) -> Path:
    """Copy the running package to `target` and add the recorded patch, which then holds kinds of stages; it must be the recorded code."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(root / "pedigree", target / "pedigree", ignore=shutil.ignore_patterns("__pycache__"))
    _must(target, "init", "--quiet")  # inside another repository, git would apply nothing
    applied = _git(target, "apply", "--whitespace=nowarn", "--directory=pedigree", "-", stdin=str(code.patch).encode())
    shutil.rmtree(target / ".git")
    if applied.returncode or code_sha256(code_files(target)) != code.snapshot:
        shutil.rmtree(target)
        raise UsageProblem(_other_code(code))
    return target


def remove(target: Path, root: Path = CODE_ROOT) -> None:
    """Remove a work tree, even if git no longer tracks it."""
    if is_work_tree(root):
        _git(root, "worktree", "remove", "--force", "--end-of-options", str(target))
    shutil.rmtree(target, ignore_errors=True)
    if is_work_tree(root):
        _git(root, "worktree", "prune")


@contextmanager
def bundle(commit: str, root: Path = CODE_ROOT) -> Iterator[Path | None]:
    """A temporary bundle of a commit and its history; None if the clone lacks the commit."""
    if not has(commit, root):
        yield None
        return
    reference = f"refs/pedigree/{commit}"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "code.bundle"
        _must(root, "update-ref", reference, commit)
        _must(root, "bundle", "create", "--quiet", str(file), reference)
        yield file


def has(commit: str, root: Path = CODE_ROOT) -> bool:
    return is_work_tree(root) and _git(root, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{commit}^{{commit}}").returncode == 0


def _bring(commit: str, fetch: Fetch, root: Path) -> None:
    """Ensure that the clone has the commit, fetching it from its git remotes or from a bundle."""
    if has(commit, root):
        return
    for remote in _git(root, "remote").stdout.decode().split():
        for wanted in ([commit], []):  # a server may refuse unreachable commits
            _git(root, *SOUND, "fetch", "--quiet", "--no-recurse-submodules", "--end-of-options", remote, *wanted)
            if has(commit, root):
                return
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "code.bundle"
        if fetch(bundle_name(commit), file):
            reference = f"refs/pedigree/{commit}"  # without a ref, git would eventually prune it
            options = ("--quiet", "--no-tags", "--no-recurse-submodules", "--no-write-fetch-head", "--end-of-options")
            _must(root, *SOUND, "fetch", *options, str(file), f"{reference}:{reference}")
            if _git(root, "rev-parse", "--verify", "--quiet", "--end-of-options", reference).stdout.decode().strip() != commit:
                _git(root, "update-ref", "-d", reference)
                problem = f"the bundle of commit {commit} in the DVC remote contains a different commit, so it is forged"
                remedy = f"run `pedigree push` where the artifact was made, or {HERE}"
                raise UsageProblem(f"{problem}; delete {bundle_name(commit)} there and {remedy}")
    if not has(commit, root):
        raise UsageProblem(
            f"commit {commit} is not in this clone, its git remotes, or the DVC remote: run `pedigree push` where the artifact was made, "
            f"or {HERE}"
        )


def _must(folder: Path, *arguments: str, stdin: bytes | None = None) -> None:
    answer = _git(folder, *arguments, stdin=stdin)
    if answer.returncode:
        raise UsageProblem(f"`git {' '.join(arguments[:2])}` failed: {answer.stderr.decode(errors='replace').strip()}")


def _git(folder: Path, *arguments: str, stdin: bytes | None = None) -> subprocess.CompletedProcess[bytes]:
    answer = run_git(folder, *arguments, given=stdin, timeout_s=None)  # a large clone is fetched or checked out
    if answer.returncode == ABSENT:
        raise UsageProblem("git is not available: install it, or use --here")
    return answer
