"""Top-level error handling, with minimal imports: a short message for expected errors, a saved report with the version for bugs."""

import errno
import os
import platform
import shlex
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pedigree.configs.base.problems import PedigreeError
from pedigree.configs.base.secrets import find_secrets
from pedigree.pipelines.cli.console import echo

BUG = 70
"""Exit code for a bug (`EX_SOFTWARE` in sysexits.h)."""
DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)
"""Disk errors, which can occur anywhere; any other OSError that gets here is a bug."""


def version_text() -> str:
    """Return `pedigree 0.1.0, commit 1a2b3c4d5e6f, Python 3.11.9`; the commit only if the code is a git clone."""
    try:
        number = version("pedigree")
    except PackageNotFoundError:
        number = "(not installed)"
    code, commit = Path(__file__).absolute().parents[3], None
    if (code / ".git").exists():  # else git would report the commit of an enclosing repository
        from pedigree.pipelines.ledger.git import short_commit

        commit = short_commit(code)
    return f"pedigree {number}{f', commit {commit}' if commit else ''}, Python {platform.python_version()}"


def end(error: Exception) -> int:
    """Report an error on stderr and return the exit code."""
    if isinstance(error, PedigreeError):
        echo(error, file=sys.stderr)
        return error.exit_code
    if isinstance(error, OSError) and error.errno in DISK:
        where = Path(os.fsdecode(error.filename)).parent if isinstance(error.filename, (str, bytes)) else "the project's folder"
        echo(f"{error.strerror}: {where} must be writable and have free disk space.", file=sys.stderr)
        echo("Finished work is kept. Free disk space or fix the permissions, then run the command again.", file=sys.stderr)
        return 1
    _report(error)
    return BUG


def _report(error: Exception) -> None:
    line = shlex.join(["pedigree", *("(removed: possible secret)" if find_secrets(word) else word for word in sys.argv[1:])])
    text = f"{version_text()}\n{line}\n\n{''.join(traceback.format_exception(error))}"
    echo(f"This is a bug in Pedigree: {type(error).__name__}: {error}", file=sys.stderr)
    path = _keep(text)
    if path is None:
        echo(f"The bug report could not be saved:\n\n{text}", file=sys.stderr)
    else:
        echo(f"The traceback is in {path}. Please attach it to a bug report; first check it for private information.", file=sys.stderr)
    echo("Finished stages and checkpoints are kept; `pedigree run` resumes from them.", file=sys.stderr)


def _keep(text: str) -> Path | None:
    """Save the report in the project or, failing that, in a temporary file; return its path, or None if neither is writable."""
    root = next((folder for folder in (Path.cwd(), *Path.cwd().parents) if (folder / ".dvc").is_dir()), None)
    with suppress(OSError):
        if root:
            path = root / ".pedigree" / "bugs" / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.txt"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            return path.relative_to(root)
    with suppress(OSError):
        handle, temporary = tempfile.mkstemp(prefix="pedigree-bug-", suffix=".txt")
        with os.fdopen(handle, "w") as stream:
            stream.write(text)
        return Path(temporary)
    return None
