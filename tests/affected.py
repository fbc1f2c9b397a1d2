"""Prints the modules whose types `make quick` checks: those that have changed since a commit, and those that import them.

python -m tests.affected COMMIT
"""

import subprocess
import sys
from pathlib import Path

from docs.rooms import PACKAGES, ROOT, imports


def changed(root: Path, commit: str) -> set[str]:
    """Python files of the packages that differ from the commit, new and deleted ones among them."""
    listed = ""
    for command in (["diff", "--name-only", "--no-renames", commit], ["ls-files", "--others", "--exclude-standard"]):
        listed += subprocess.run(["git", *command, "--", *PACKAGES], cwd=root, capture_output=True, text=True, check=True).stdout
    return {name for name in listed.splitlines() if name.endswith(".py")}


def affected(root: Path, commit: str) -> set[str]:
    found = changed(root, commit)
    modules = {name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in found}
    paths = [path for package in PACKAGES for path in (root / package).rglob("*.py")] if modules else []
    importing = {path.relative_to(root).as_posix() for path in paths if not modules.isdisjoint(imports(path))}
    return {name for name in found if (root / name).exists()} | importing


if __name__ == "__main__":
    print(*sorted(affected(ROOT, sys.argv[1])))
