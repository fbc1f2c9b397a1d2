"""The commands that go with git: named models, merging of `dvc.lock`."""

from pathlib import Path
from typing import Annotated

import typer

from pipelines.console import print_table, project_here

commands = typer.Typer()


@commands.command()
def models(as_json: Annotated[bool, typer.Option("--json", help="All that is known of them, as JSON.")] = False) -> None:
    """List the named models: artifact, state, scores, versions. Their names work wherever an artifact's does."""
    import json

    from pipelines.registry import registry

    rows = registry(project_here())
    if as_json:
        print(json.dumps([row.as_json() for row in rows], indent=1, ensure_ascii=False))
        return
    if not rows:
        print("no recipe that makes a model is compiled: `pedigree compile RECIPE`")
        return
    cells = []
    for row in rows:
        record = row.record
        known = (record.id[:12], record.content[:12], record.kind) if record else ("", "", "")
        cells.append((row.model.name, row.model.address, row.state, *known, row.scored(), ", ".join(row.versions)))
    print_table(("model", "artifact", "state", "id", "content", "kind", "scores", "versions"), cells)


@commands.command(hidden=True)
def merge_lock(base: Path, ours: Path, theirs: Path) -> None:
    """Merge two `dvc.lock`s stage by stage: the command of git's merge driver."""
    from pipelines.locks import merge_files

    raise typer.Exit(merge_files(base, ours, theirs))
