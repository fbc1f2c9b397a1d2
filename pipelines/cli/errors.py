"""How the command ends when an exception leaves it: a clean message for errors that people meet, a report for bugs of ours."""

import errno
import os
import shlex
import sys
import tempfile
import time
import traceback
from pathlib import Path

from configs.base.problems import PedigreeError
from configs.base.secrets import find_secrets
from pipelines.cli.console import say
from pipelines.cli.version import version_text

BUG = 70
"""Exit code of a bug (`EX_SOFTWARE` in sysexits.h)."""
DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)
"""What a disk refuses, wherever it happens; no other OSError is expected to get here."""


def end(error: Exception) -> int:
    """Says on stderr what happened; returns the exit code."""
    if isinstance(error, PedigreeError):
        say(error, file=sys.stderr)
        return error.exit_code
    if isinstance(error, OSError) and error.errno in DISK:
        where = Path(os.fsdecode(error.filename)).parent if isinstance(error.filename, (str, bytes)) else "the project's folder"
        say(f"{error.strerror}: {where} must be writable, and its disk must have room.", file=sys.stderr)
        say("Nothing that was finished is lost: free some space or mend the permissions, then type the command again.", file=sys.stderr)
        return 1
    _report(error)
    return BUG


def _report(error: Exception) -> None:
    text = f"{version_text()}\n{_command()}\n\n{''.join(traceback.format_exception(error))}"
    say(f"This is a bug of Pedigree, not a mistake of yours: {type(error).__name__}: {error}", file=sys.stderr)
    path = _keep(text)
    if path is None:
        say(f"The report could not be saved, so here it is:\n\n{text}", file=sys.stderr)
    else:
        say(f"The traceback is in {path}. Please report it with that file; look first at what it tells of your machine.", file=sys.stderr)
    say("Finished stages and checkpoints are kept: `pedigree run` goes on from them.", file=sys.stderr)


def _command() -> str:
    """What was typed, without anything that looks like a secret."""
    return shlex.join(["pedigree", *("(left out: it looks like a secret)" if find_secrets(word) else word for word in sys.argv[1:])])


def _keep(text: str) -> Path | None:
    """Saves the report in the project, or in a temporary folder outside of one; None where neither is writable."""
    root = next((folder for folder in (Path.cwd(), *Path.cwd().parents) if (folder / ".dvc").is_dir()), None)
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.txt"
    if root is not None:
        try:
            path = root / ".pedigree" / "bugs" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            return path.relative_to(root)
        except OSError:
            pass
    try:
        handle, temporary = tempfile.mkstemp(prefix="pedigree-bug-", suffix=".txt")
        with os.fdopen(handle, "w") as stream:
            stream.write(text)
        return Path(temporary)
    except OSError:
        return None
