"""Command line reference generated from the commands: `python -m docs.generate` writes `docs/cli.md`."""

import inspect
from collections.abc import Iterator
from typing import Any

from typer.main import get_command

from docs import results
from pedigree.pipelines.cli.main import GROUPS, app

HEAD = """# The command line

<!-- Written by `python -m docs.generate`; do not edit. -->

`pedigree COMMAND --help` shows the same in the terminal. `pedigree --version` prints the version, commit and Python version.
`pedigree --install-completion` enables tab completion of commands, recipes, stages, profiles and artifacts (bash, zsh, fish, PowerShell);
`pedigree --show-completion` prints the script for manual installation. Terms: [how it works](how-it-works.md#terms).

| exit code | meaning |
|---|---|
| 0 | done |
| 1 | something failed, differs or was interrupted; finished work is kept |
| 2 | usage error in an option, recipe, profile or file; the message names it |
| 70 | a bug in Pedigree: the message gives the path of the traceback (in `.pedigree/bugs/`); please report it with that file |
| 130 | interrupted by Ctrl-C or SIGTERM |
"""
DOCUMENTS = """## Output for programs

`run`, `rehearse`, `plan`, `status`, `jobs`, `trace` and `forget` accept `--json`: one JSON document is printed to stdout at the end, and
everything else goes to stderr. Exit codes do not change. If a command exits with 2 or 70, or with 1 or 130 before it has a result (for
example because a remote does not answer), stdout is empty. `schema_version` is raised when a field changes its name or meaning; new fields
may appear without a new version.

All documents begin with `schema_version` (1) and `command`; all but `jobs`, `trace` and `forget` continue with `recipe` (for a variant,
`RECIPE+HASH`), `source` (as typed) and `overrides` (a list of `STAGE.FIELD=JSON`). Sizes are in bytes, times in seconds, and `address` is
`RECIPE/STAGE`. `rehearse` has the fields of `run` for the rehearsal; its `recipe`, `source` and `overrides` are those of the real recipe.
"""


def page() -> str:
    """The page: exit codes, JSON documents, and every visible command."""
    commands: dict[str, Any] = get_command(app).commands  # pyright: ignore[reportAttributeAccessIssue]
    parts = [HEAD, DOCUMENTS, "\n".join(results.tables())]
    for title, names in GROUPS.items():
        parts += [f"## {title}\n", *("\n".join(_command(*one)) for name in names for one in _with_subcommands(name, commands[name]))]
    return "\n".join(parts).rstrip() + "\n"


def _with_subcommands(name: str, command: Any) -> list[tuple[str, Any]]:
    inner: dict[str, Any] = getattr(command, "commands", {})
    return [(f"{name} {word}", one) for word, one in inner.items()] or [(name, command)]


def _command(name: str, command: Any) -> Iterator[str]:
    arguments = [parameter for parameter in command.params if parameter.param_type_name == "argument"]
    usage = " ".join(["pedigree", name, *(_argument(argument) for argument in arguments), "[OPTIONS]"])
    yield from (f"### {name}", "", f"`{usage}`", "", inspect.cleandoc(command.help or ""), "")
    rows = [(_argument(argument), argument.help or "") for argument in arguments]
    options = [parameter for parameter in command.params if parameter.param_type_name == "option"]
    rows += [(_option(option), option.help or "") for option in options if not option.hidden and option.name != "help"]
    if rows:
        yield from ("| | |", "|---|---|")
        yield from (f"| `{shown}` | {help_text} |".replace("\n", " ") for shown, help_text in rows)
        yield ""


def _argument(argument: Any) -> str:
    name = (argument.metavar or str(argument.name).upper()).strip("[].")
    many = "..." if argument.nargs == -1 or argument.multiple else ""
    return f"{name}{many}" if argument.required else f"[{name}{many}]"


def _option(option: Any) -> str:
    value = "" if option.is_flag else f" {option.metavar or 'VALUE'}".replace("|", "\\|")
    return ", ".join(option.opts) + value
