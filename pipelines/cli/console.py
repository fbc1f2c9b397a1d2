"""Shared CLI code: tables, JSON output, signals."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from pedigree.configs.base.texts import shown

if TYPE_CHECKING:
    from rich.console import Console

    from pedigree.pipelines.run.opening import Request


def requested(
    recipe: str,
    overrides: Sequence[str] | None = None,
    profile: str | None = None,
    only: Sequence[str] | None = None,
    start: Sequence[str] | None = None,
    until: Sequence[str] | None = None,
    force: Sequence[str] | None = None,
) -> "Request":
    """Return the request that a command's options make."""
    from pedigree.pipelines.run.opening import Request

    sets, chosen, starts, ends, forced = (tuple(given or ()) for given in (overrides, only, start, until, force))
    return Request(recipe, sets, profile, chosen, starts, ends, forced)


def interrupt_on_sigterm() -> None:
    """Handle SIGTERM (preemption, `timeout`) like Ctrl-C: jobs end, checkpoints are kept."""
    import signal

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)


def echo(*words: object, end: str = "\n", file: TextIO | None = None, flush: bool = False) -> None:
    """Print possibly untrusted text, with terminal control characters escaped."""
    print(shown(" ".join(map(str, words))), end=end, file=file, flush=flush)


def discard(stream: TextIO, error: OSError) -> None:
    """Drop what is written to a stream from now on: its reader is gone, or its disk full. Says so on stderr, if that can be written."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
    if stream is not sys.stderr:
        try:
            echo(f"the output cannot be written ({error.strerror}); the run continues without it", file=sys.stderr, flush=True)
        except OSError as further:
            discard(sys.stderr, further)


def redraws(console: "Console") -> bool:
    """Whether a console is a terminal that can redraw. Rich also counts dumb ones, and files if FORCE_COLOR is set."""
    return console.file.isatty() and not console.is_dumb_terminal


def echo_json(value: Any, *, sort_keys: bool = False) -> None:
    """Print a JSON document: non-finite numbers become null, and terminal control characters are escaped."""
    import json

    from pedigree.configs.base.frozen import finite

    echo(json.dumps(finite(value), indent=1, sort_keys=sort_keys, ensure_ascii=False, allow_nan=False))


@contextlib.contextmanager
def for_programs(wanted: bool) -> Iterator[Callable[..., None]]:
    """Yield a function that emits a document (`json_documents.document`); redirect all other output, including child processes', to stderr.

    Without `--json`, nothing is redirected and no document is printed.
    """
    if not wanted:
        yield lambda *given: None
        return
    results: list[Any] = []
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield lambda *given: results.append(given)
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        for given in results:
            from pedigree.pipelines.json_documents import document

            echo_json(document(*given))


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, whole: Sequence[str] = ()) -> None:
    """Print columns as wide as their content. On a terminal, long cells wrap; with columns `whole`, each row is one line, in which the
    other columns are cut first. Rich markup in cells is not interpreted."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    wraps = redraws(console)
    if not wraps:
        console = Console(highlight=False, width=10_000)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    one_row = bool(whole) or not wraps
    overflow = "ellipsis" if whole else "fold"
    for name in header:  # rich narrows columns with `no_wrap` last
        table.add_column(Text(name, no_wrap=one_row), no_wrap=name in whole or not wraps, overflow=overflow)
    for row in rows:
        cells = [one_line(cell) for cell in row]
        table.add_row(*(Text(cell, style=_STYLES.get(cell, ""), no_wrap=one_row) for cell in cells))
    console.print(table)


def one_line(text: str) -> str:
    """Return possibly untrusted text as one line."""
    return shown(text).replace("\n", "\\n")


_STYLES = {
    "up to date": "green",
    "done": "green",
    "in the remote": "green",
    "will run": "yellow",
    "cached": "cyan",
    "stale": "yellow",
    "depends": "dim",
}
