"""Version of Pedigree, with minimal imports."""

import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pedigree.configs.base.problems import PedigreeError

CODE_ROOT = Path(__file__).absolute().parents[3]


def version_text() -> str:
    """Return `pedigree 0.1.0, commit 1a2b3c4d5e6f, Python 3.11.9`; the commit only if the code is a git clone."""
    try:
        number = version("pedigree")
    except PackageNotFoundError:
        number = "(not installed)"
    commit = _commit()
    return f"pedigree {number}{f', commit {commit}' if commit else ''}, Python {platform.python_version()}"


def _commit() -> str | None:
    if not (CODE_ROOT / ".git").exists():  # git would report the commit of an enclosing repository
        return None
    from pedigree.pipelines.ledger.git import run_git

    try:
        return run_git(CODE_ROOT, "rev-parse", "--short=12", "HEAD", timeout_s=5).stdout.decode().strip() or None
    except (OSError, PedigreeError):
        return None
