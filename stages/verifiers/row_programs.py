"""Rows that a program of the project makes, in a sandbox. It runs twice side by side: what gives other rows the second time is refused.

Whoever gets the project gets its programs too, and a reproduction runs them: so they are trusted no more than what models write.
"""

import json
from collections.abc import Callable, Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

from configs.rows.datasets import RowProgram
from data.sources.procedural import SourceError
from data.sources.row_files import Unreadable
from stages.verifiers import sandbox

SHOWN = 200
"""Characters of a row that an error shows."""
REMEDY = "draw from random.Random(seed), and let no time, process, thread or place in memory decide"
"""Against rows that differ from run to run."""


def require() -> None:
    """Checks that a program can be run.

    Raises:
        NoSandbox: bubblewrap is not there, or may not make namespaces on this machine.
    """
    sandbox.require("programs that make rows", "read its rows from a file instead (`type: files`)")


def rows_of(source: RowProgram, file: Path, silent: float, told: Callable[[int], None]) -> Iterator[tuple[str, Any]]:
    """(place, row) of each row, as they are made; `Unreadable` for what is no row.

    Args:
        source: what is called, and how.
        file: where the program lies.
        silent: seconds that are waited for a row, by both runs together.
        told: called with the number of rows that are made so far.

    Raises:
        SourceError: the program raises, dies, is silent for so long, or gives fewer or more rows than `count`, or other ones the second
            time.
        SandboxFailed: a sandbox did not come up.
    """
    name = file.name
    call = {**source.model_dump(mode="json", include={"function", "count", "seed", "arguments"}), "name": name, "program": _text(file)}
    made, wait = 0, sandbox.Wait(silent)
    try:
        with sandbox.rows(call, wait) as first, sandbox.rows(call, wait) as second:
            for one, other in zip_longest(first, second):
                found = _agreed(source, made, one, other)
                if "end" in found:
                    break
                if made == source.count:
                    raise SourceError(
                        f"{source.path}: {source.function} gave more rows than count, {made}: let it write to nothing that it did not open"
                    )
                yield f"{name}[{made}]", found["row"] if "row" in found else Unreadable(str(found["text"]), str(found["bad"]))
                made += 1
                told(made)
                wait.begin()
            else:
                raise sandbox.Fell("ended")
    except sandbox.Fell as error:
        raise SourceError(
            f"{source.path}: {source.function} {error} after {made} rows of {source.count} (a program has 1 GiB of memory, 8 processes "
            f"and {silent:g} s for each row, nine tenths of the profile's heartbeat_timeout_s): let it take less, or raise the time-out"
        ) from error
    if made < source.count:
        raise SourceError(f"{source.path}: {source.function} gave {made} rows, and count is {source.count}: lower it, or let it give more")


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise SourceError(f"{file.name} is not UTF-8: {error}") from error


def _agreed(source: RowProgram, made: int, one: bytes | None, other: bytes | None) -> dict[str, Any]:
    """What both runs say; the program's own error first, which may differ in what it says."""
    for said in (one, other):
        if said is not None and said.startswith(b'{"raised"'):
            words = str(_parsed(said)["raised"]).replace("\n", "\n  ")
            raise SourceError(f"{source.path}: {source.function} raised after {made} rows of {source.count}:\n  {words}")
    if one is None or other is None:
        raise sandbox.Fell("ended")
    if one != other:
        shown = " and ".join(said.decode(errors="replace")[:SHOWN] for said in (one, other))
        raise SourceError(
            f"{source.path}: {source.function} gave different rows for the same count, seed and arguments; row {made} is {shown}: {REMEDY}"
        )
    return _parsed(one)


def _parsed(said: bytes) -> dict[str, Any]:
    """A line of a sandbox. The program can write to its pipe, too."""
    try:
        found = json.loads(said)
    except (ValueError, RecursionError) as error:
        raise sandbox.Fell("wrote among its rows") from error
    if not isinstance(found, dict) or not any(keys <= found.keys() for keys in ({"row"}, {"bad", "text"}, {"end"}, {"raised"})):
        raise sandbox.Fell("wrote among its rows")
    return found
