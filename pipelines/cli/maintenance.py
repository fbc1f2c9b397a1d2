"""Commands related to git: named models, garbage collection, and merging of `dvc.lock`."""

from pathlib import Path
from typing import Annotated

import typer

from pedigree.pipelines.cli.console import echo, echo_json, print_table, project_here
from pedigree.pipelines.quantities import counted, size

commands = typer.Typer()


@commands.command()
def models(as_json: Annotated[bool, typer.Option("--json", help="Print the models as JSON, with all details.")] = False) -> None:
    """List the named models: artifact, state, scores, versions.

    A model's name is accepted wherever an artifact is expected.
    """
    from pedigree.pipelines.cli.status_line import StatusLine
    from pedigree.pipelines.publish.catalog import registry

    with StatusLine() as telling:
        rows = registry(project_here(), telling.watch)
    if as_json:
        echo_json([row.as_json() for row in rows])
        return
    if not rows:
        echo("no named models: compile a recipe that declares one with `pedigree compile RECIPE`")
        return
    cells = []
    for row in rows:
        record = row.record
        known = (record.id[:12], record.content[:12], record.kind) if record else ("", "", "")
        cells.append((row.model.name, row.model.address, row.state, *known, row.scored(), ", ".join(row.versions)))
    print_table(("model", "artifact", "state", "id", "content", "kind", "scores", "versions"), cells)


@commands.command()
def gc(
    remote: Annotated[bool, typer.Option("--remote", help="Also clean the DVC remote; run `git fetch --all --tags` first.")] = False,
    workspace: Annotated[bool, typer.Option("--workspace", help="Keep only objects that the working tree needs.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Delete the objects instead of listing them.")] = False,
) -> None:
    """Delete unreferenced objects from the DVC cache.

    Artifacts of any branch, tag or stash are kept, along with all their ancestors.
    """
    from pedigree.pipelines.cli.removal import print_waiting
    from pedigree.pipelines.maintain.gc import collect

    sweep = collect(project_here(), workspace=workspace, remote=remote, delete=yes, listening=print_waiting)
    for place, objects in (("cache", sweep.objects), ("remote", sweep.remote_objects)):
        sizes: dict[str, list[int]] = {}
        for oid, count in objects.items():
            sizes.setdefault(sweep.owners.get(oid, "(unknown)"), []).append(count)
        if sizes:
            print_table(("made by", "objects", place), [(name, str(len(found)), size(sum(found))) for name, found in sorted(sizes.items())])
            echo()
    here, away = sum(sweep.objects.values()), sum(sweep.remote_objects.values())
    total = f"{counted(len(sweep.objects), 'object')}, {size(here)}, from the cache"
    total += f" and {counted(len(sweep.remote_objects), 'object')}, {size(away)}, from the remote" if remote else ""
    total += f", {counted(len(sweep.snapshots), 'code snapshot')}" if sweep.snapshots else ""
    tokens = f"{counted(len(sweep.tokens), 'tokenized file')}, {size(sum(sweep.tokens.values()))}"
    total += f", {tokens}" if sweep.tokens else ""
    verb = "deleted" if yes else "would be deleted"
    echo(f"{verb}: {total}; {counted(sweep.artifacts, 'artifact')} kept with all ancestors")
    if not yes and (sweep.objects or sweep.remote_objects or sweep.snapshots or sweep.tokens):
        echo(f"`pedigree gc{' --remote' * remote}{' --workspace' * workspace} --yes` deletes them.")


@commands.command(hidden=True)
def merge_lock(base: Path, ours: Path, theirs: Path) -> None:
    """Merge two `dvc.lock` files stage by stage (git merge driver)."""
    from pedigree.pipelines.ledger.lock_merge import merge_files

    raise typer.Exit(merge_files(base, ours, theirs))
