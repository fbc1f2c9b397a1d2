"""State of the Pedigree code in git, or its installed version, recorded in `run.json` with every attempt."""

import hashlib
import os
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from pedigree.configs.base.secrets import find_secrets
from pedigree.data.artifacts.provenance import CODE_ROOT, added_kinds
from pedigree.pipelines.ledger.git import is_work_tree, run_git

PATCH_LIMIT = 2**20
"""Maximum bytes of a dirty tree's patch stored with an artifact."""
DIFF = (
    "-c", "core.quotePath=true", "diff", "--no-ext-diff", "--no-textconv", "--no-color", "--no-renames", "--full-index", "--binary",
    "--diff-algorithm=myers", "--indent-heuristic", "--unified=3", "--inter-hunk-context=0", "--no-relative", "-O/dev/null",
    "--src-prefix=a/", "--dst-prefix=b/",
)  # fmt: skip
"""Diff options that override user settings, so that equal trees have equal patches."""
GENERATED = (":(exclude,top)dvc.yaml", ":(exclude,top)dvc.lock", ":(exclude,top)artifacts", ":(exclude,glob,top)**/.gitignore")


def code_state(root: Path = CODE_ROOT, *, new_files: bool = False) -> dict[str, Any]:
    """Commit of the code and the working tree's changes; generated files are ignored, and untracked ones only counted without `new_files`.

    Returns `commit` (None outside git), `dirty`, `patch_sha256`. For a dirty tree also `patch`, from which `git apply` rebuilds the tree,
    or `patch_left_out`, the reason why it is not stored. `new_files` is the number of untracked files left out; `version`, instead of a
    commit, that of an installed package.
    """
    commit = _top(root, "rev-parse", "HEAD").decode().strip() or None
    patch = _top(root, *DIFF, "HEAD", "--", ".", *GENERATED)
    untracked = os.fsdecode(_top(root, "ls-files", "--others", "--exclude-standard", "-z", "--", ".", *GENERATED)).split("\0")
    names = [name for name in sorted(filter(None, untracked)) if (root / name).is_file()]
    kept = [(root, name, "") for name in names if new_files]
    for name, path in added_kinds(root).items():
        kept.append((path.parents[name.count("/") - 1], name.removeprefix("stages/"), "stages/"))
    kept.sort(key=lambda one: one[2] + one[1])
    state: dict[str, Any] = {"commit": commit, "dirty": bool(patch or kept), "patch_sha256": None}
    if state["dirty"]:
        state |= _kept(patch, kept)
    if not is_work_tree(root):
        for found in distributions(name="pedigree", path=[str(root)]):
            state["version"] = found.version
    return state | ({"new_files": len(names)} if names and not new_files else {})


def _kept(patch: bytes, new: list[tuple[Path, str, str]]) -> dict[str, str]:
    """The patch as text with its sha256, when it is small, is text and holds nothing secret.

    `new` adds files that git does not know: (folder, path in it, where that folder belongs in the repository).
    """
    size = len(patch) + sum((folder / name).stat().st_size for folder, name, _ in new)
    if size > PATCH_LIMIT:
        return {"patch_left_out": f"it has {size} bytes, more than {PATCH_LIMIT}: commit the changes before you run"}
    whole = patch
    for folder, name, place in new:
        prefixes = (f"--src-prefix=a/{place}", f"--dst-prefix=b/{place}")
        whole += _git(folder, *DIFF, *prefixes, "--no-index", "--", os.devnull, name, differs=1)
    try:
        text = whole.decode()
    except UnicodeDecodeError:
        return {"patch_left_out": "it is not UTF-8: commit the changes before you run"}
    found = find_secrets(text)
    if found:
        return {"patch_left_out": f"it seems to hold secrets ({', '.join(sorted(set(found)))}): take them out, and commit the changes"}
    return {"patch": text, "patch_sha256": hashlib.sha256(whole).hexdigest()}


def _top(root: Path, *arguments: str) -> bytes:
    """Output of a git command about a work tree with this top; empty elsewhere, even inside another repository."""
    return _git(root, *arguments) if is_work_tree(root) else b""


def _git(root: Path, *arguments: str, differs: int = 0) -> bytes:
    """Output of a git command in a folder; empty without a git repository. `differs`: an additional exit code that means success."""
    answer = run_git(root, *arguments)
    return answer.stdout if answer.returncode in (0, differs) else b""
