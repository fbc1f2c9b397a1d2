"""Prints the modules whose types `make quick` checks: those that have changed since a commit, and those that import them.

python tests/affected.py COMMIT
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("configs", "data", "stages", "pipelines")


def changed(root: Path, commit: str) -> set[str]:
    """Python files of the packages that differ from the commit, new and deleted ones among them."""
    listed = ""
    for command in (["diff", "--name-only", "--no-renames", commit], ["ls-files", "--others", "--exclude-standard"]):
        listed += subprocess.run(["git", *command, "--", *PACKAGES], cwd=root, capture_output=True, text=True, check=True).stdout
    return {name for name in listed.splitlines() if name.endswith(".py")}


def imported(path: Path) -> Iterator[str]:
    """`from a import b` may mean the module `a` or `a.b`."""
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Import(names=names):
                yield from (alias.name.removeprefix("pedigree.") for alias in names)
            case ast.ImportFrom(module=str(module), names=names):
                module = module.removeprefix("pedigree.")
                yield module
                yield from (f"{module}.{alias.name}" for alias in names)


def affected(root: Path, commit: str) -> set[str]:
    found = changed(root, commit)
    modules = {name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in found}
    paths = [path for package in PACKAGES for path in (root / package).rglob("*.py")] if modules else []
    importing = {path.relative_to(root).as_posix() for path in paths if not modules.isdisjoint(imported(path))}
    return {name for name in found if (root / name).exists()} | importing


if __name__ == "__main__":
    print(*sorted(affected(ROOT, sys.argv[1])))
