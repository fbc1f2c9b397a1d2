"""What the modules of the command line share: arguments, the project at hand, tables, output for programs."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from configs.base.texts import shown
from pipelines.cli import completion

if TYPE_CHECKING:
    from configs.base.project import Project
    from pipelines.jobs.context import RunContext, Watch

Recipe = Annotated[
    str,
    typer.Argument(
        help="Name of a recipe in configs/recipes, or path of a recipe file.", show_default=False, autocompletion=completion.recipes
    ),
]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="STAGE.FIELD=VALUE", help="Change the recipe: makes a variant. Repeatable.")
]
Only = Annotated[
    list[str] | None,
    typer.Option("--only", metavar="STAGE", help="This stage alone. Repeatable.", autocompletion=completion.stages),
]
From = Annotated[
    list[str] | None,
    typer.Option("--from", metavar="STAGE", help="This stage and all below it. Repeatable.", autocompletion=completion.stages),
]
Until = Annotated[
    list[str] | None,
    typer.Option("--until", metavar="STAGE", help="This stage and all it needs. Repeatable.", autocompletion=completion.stages),
]
Force = Annotated[
    list[str] | None,
    typer.Option(
        "--force", metavar="STAGE", help="Run this stage again, even if it is up to date. Repeatable.", autocompletion=completion.stages
    ),
]
Profile = Annotated[
    str | None,
    typer.Option("--execution", "--profile", metavar="PROFILE", help="Execution profile: name or path; else the recipe's.",
                 autocompletion=completion.profiles),
]  # fmt: skip
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document (docs/cli.md) on stdout; everything else goes to stderr.")]


def project_here() -> "Project":
    from configs.base.project import Project

    return Project.find()


def opened_run(
    project: "Project",
    recipe: str,
    overrides: Sequence[str] | None,
    execution: str | None,
    *,
    compiled: bool = True,
    watch: "Watch | None" = None,
) -> "RunContext":
    """The run of a recipe; `compiled=False` for commands that only look: they write nothing. `watch` is told what takes long."""
    from pipelines.jobs.context import unwatched
    from pipelines.request import Request, opened

    return opened(project, Request(recipe, tuple(overrides or ()), execution), compiled=compiled, watch=watch or unwatched)


def selection(
    context: "RunContext",
    only: Sequence[str] | None,
    start: Sequence[str] | None,
    until: Sequence[str] | None,
    force: Sequence[str] | None,
) -> tuple[frozenset[str], frozenset[str]]:
    """Addresses of the stages that the options choose, and of those to run again."""
    from pipelines.request import Request, selection

    given = (tuple(stages or ()) for stages in (only, start, until, force))
    wishes = dict(zip(("only", "start", "until", "force"), given, strict=True))
    return selection(context.graph, Request(context.graph.recipe, **wishes))


def interrupt_on_sigterm() -> None:
    """A polite kill (pre-emption, `timeout`) ends a run like Ctrl-C: jobs are ended, checkpoints kept."""
    import signal

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)


def say(*words: object, end: str = "\n", file: TextIO | None = None, flush: bool = False) -> None:
    """Prints words that others may have written: what a terminal would obey is shown instead."""
    print(shown(" ".join(map(str, words))), end=end, file=file, flush=flush)


def say_json(value: Any, *, sort_keys: bool = False) -> None:
    """Prints a JSON document: numbers that JSON has no form for are null, and what a terminal would obey is escaped, as JSON escapes it."""
    import json

    from configs.base.frozen import finite

    say(json.dumps(finite(value), indent=1, sort_keys=sort_keys, ensure_ascii=False, allow_nan=False))


@contextlib.contextmanager
def for_programs(wanted: bool) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Yields what prints the command's JSON document; whatever else the block prints, child processes included, goes to stderr.

    Without `--json` nothing is changed, and no document is printed.
    """
    if not wanted:
        yield lambda document: None
        return
    documents: list[dict[str, Any]] = []
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield documents.append
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        for document in documents:
            say_json(document)


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns as wide as their content; on a terminal the last but wide ones wrap. Texts are shown as they are: markup is not read."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in header:
        table.add_column(Text(name), overflow="fold", no_wrap=not sys.stdout.isatty())
    for row in rows:
        table.add_row(*(Text(one_line(cell), style=_STYLES.get(cell, "")) for cell in row))
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=10_000)
    console.print(table)


def one_line(text: str) -> str:
    """A text that others wrote, as one line."""
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
