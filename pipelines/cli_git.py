"""The commands that go with git: merging of `dvc.lock`."""

from pathlib import Path

import typer

commands = typer.Typer()


@commands.command(hidden=True)
def merge_lock(base: Path, ours: Path, theirs: Path) -> None:
    """Merge two `dvc.lock`s stage by stage: the command of git's merge driver."""
    from pipelines.locks import merge_files

    raise typer.Exit(merge_files(base, ours, theirs))
