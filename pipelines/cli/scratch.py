"""Scratch folders of unfinished jobs: which ones a run would resume, and which are abandoned."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pedigree.configs.base.problems import UsageProblem
from pedigree.configs.base.project import Project
from pedigree.configs.base.texts import command
from pedigree.configs.language.compile import source_file
from pedigree.configs.language.graph import Graph, Node
from pedigree.data.artifacts.artifacts import ArtifactError
from pedigree.data.store.fence import Fence
from pedigree.pipelines.cli.console import echo, print_table
from pedigree.pipelines.cli.removal import disk_time, listened, remove
from pedigree.pipelines.jobs.attempts import will_replace
from pedigree.pipelines.jobs.live import Signs, live_jobs
from pedigree.pipelines.jobs.scratch_state import (
    SPEC,
    UNKNOWN,
    address_of,
    checkpoints_here,
    number_of_answers,
    read_mapping,
    scratch_folders,
)
from pedigree.pipelines.ledger.identity import Identities, InputReplaced
from pedigree.pipelines.ledger.ledger import Ledger
from pedigree.pipelines.ledger.transfers import RemoteError
from pedigree.pipelines.maintain.every_graph import every_graph
from pedigree.pipelines.quantities import counted, duration, size

State = Literal["running", "elsewhere", "in use", "would be resumed", "inputs not made", "up to date", "abandoned"]
STATE_TEXTS = {
    "running": "its job is running; `pedigree cancel` ends it",
    "elsewhere": "its job may be running on another machine; `pedigree cancel` ends it",
    "in use": "in use by another command",
    "would be resumed": "`pedigree run` resumes from it",
    "inputs not made": "`pedigree run` may resume from it once its inputs are built",
    "up to date": "left by a killed run; its stage needs nothing from it",
    "abandoned": "no recipe uses it anymore",
}
HELD: tuple[State, ...] = ("running", "elsewhere", "in use")
UNNEEDED: tuple[State, ...] = ("up to date", "abandoned")


@dataclass(frozen=True)
class Scratch:
    """One scratch folder."""

    folder: Path
    address: str
    """`RECIPE/STAGE` that created it."""
    state: State
    recipe: str | None
    """Recipe or variant that would resume from it."""
    checkpoints: tuple[str, ...]
    answers: int
    """Number of kept answers."""
    size: int
    age_s: float
    """Seconds since the last change."""
    url: str | None
    """Where its checkpoints are mirrored."""

    @property
    def key(self) -> str:
        return self.folder.name

    @property
    def label(self) -> str:
        """`STAGE/KEY` with a shortened key, as accepted by the command."""
        return f"{self.address.partition('/')[2]}/{self.key[:12]}"


def list_or_clean(project: Project, names: Sequence[str], clean: bool) -> None:
    """Print the scratch folders, or those with these names, and delete the unneeded or named ones on request."""
    signs = listened(project, [name for folder in scratch_folders(project) for name in _leases(folder)]) if clean else Signs(project)
    found, unreadable = survey(project, signs)
    chosen = _named(found, names) if names else found
    if not chosen:
        echo("no scratch folders")
        return
    cells = [
        (one.label, one.address, _progress(one), size(one.size), f"{duration(one.age_s)} ago", one.state, STATE_TEXTS[one.state])
        for one in chosen
    ]  # fmt: skip
    print_table(("scratch", "stage", "contents", "size", "last change", "state", ""), cells)
    for problem in unreadable:
        echo(f"note: {problem}; it might resume a folder, so `--clean` requires a name")
    going = chosen if names else [one for one in chosen if one.state in UNNEEDED]
    echo()
    if clean:
        _clean(signs, going, unreadable, bool(names))
        for one in (one for one in chosen if one not in going and one.state in HELD):
            echo(f"kept {one.label}: {STATE_TEXTS[one.state]}")
    elif going:
        what = f"{counted(len(going), 'folder')}, {size(sum(one.size for one in going))}"
        echo(f"{command('scratch', *names, '--clean')} would delete {what}.")
    else:
        echo("No folder is abandoned or left over. `pedigree scratch STAGE/KEY --clean` deletes a folder anyway and loses its work.")


def survey(project: Project, signs: Signs | None = None) -> tuple[list[Scratch], list[str]]:
    """Return all scratch folders, sorted by address, and the recipes that cannot be read and might resume one.

    Folders held by another machine count as held unless `signs` shows that its heartbeat timed out.
    """
    signs = signs or Signs(project)
    folders = scratch_folders(project)
    graphs, unread = every_graph(project, both=True) if folders else ([], {})
    wanted = _Resumable(project, graphs)
    running: dict[Path, State] = {job.scratch: "elsewhere" if job.elsewhere else "running" for job in live_jobs(project, signs)}
    found = []
    for folder in folders:
        spec = read_mapping(folder / SPEC)
        state, recipe = wanted.state(folder, spec)
        if folder in running or any(signs.holder(name) for name in _leases(folder)):
            state = running.get(folder, "in use")
        found.append(_scratch(folder, state, recipe, spec))
    unreadable = [_unread_text(project, name, reason) for name, reason in unread.items()]
    return sorted(found, key=lambda one: (one.address, one.key)), unreadable


def clean_folder(signs: Signs, one: Scratch) -> None:
    """Delete a scratch folder that nothing uses. A suspended or disconnected job ends itself when it resumes.

    Raises:
        UsageProblem: something uses it.
    """

    def refuse_live_job() -> None:
        if any(job.scratch == one.folder for job in live_jobs(signs.project, signs)):
            raise UsageProblem(f"the job of {one.label} is running: end it with {command('cancel', one.address)}, then retry")
        Fence.closed(signs.project.lease(one.key))

    remove(signs, one.folder, _leases(one.folder), "pedigree scratch --clean", check=refuse_live_job)


def _leases(folder: Path) -> tuple[str, str]:
    """Return the names of the leases that a run takes before it uses a scratch folder."""
    return address_of(folder).replace("/", "--"), folder.name


class _Resumable:
    """Stages of the current recipes: keys where the inputs are known, configs where inputs are not built yet."""

    def __init__(self, project: Project, graphs: Iterable[Graph]) -> None:
        ledger = Ledger(project, looking=True)
        self.keys: dict[str, tuple[Node, Identities]] = {}
        self.open: list[tuple[Node, str]] = []
        known: dict[str, str | None] = {}
        for graph in graphs:
            identities = Identities(project, graph, ledger)
            for node in graph.nodes.values():
                if node.address not in known:
                    try:
                        known[node.address] = identities.need(node).key
                    except (ArtifactError, InputReplaced, RemoteError):  # an input is not built, out of date, or out of reach
                        known[node.address] = None
                key = known[node.address]
                if key is None:
                    self.open.append((node, graph.recipe))
                else:
                    self.keys.setdefault(key, (node, identities))

    def state(self, folder: Path, spec: dict[str, Any]) -> tuple[State, str | None]:
        if folder.name in self.keys:
            node, identities = self.keys[folder.name]
            return "up to date" if _is_left(folder, node, identities) else "would be resumed", identities.graph.recipe
        for node, recipe in self.open:
            if node.kind == spec.get("kind") and node.config.model_dump(mode="json") == spec.get("config"):
                return "inputs not made", recipe
        return "abandoned", None


def _is_left(folder: Path, node: Node, identities: Identities) -> bool:
    """Whether the stage of a scratch folder is up to date without it."""
    try:
        current = not identities.standing(node)[0]
        return current and not will_replace(folder, identities.project.artifact(node.address))
    except (ArtifactError, RemoteError):
        return False


def _unread_text(project: Project, name: str, reason: str) -> str:
    """Name a recipe or variant that cannot be read, and the remedy."""
    if (project.recipes / f"{name}.yaml").exists():
        return f"recipe {name} cannot be read ({reason}): {command('validate', name)} lists all problems"
    if "+" in name:
        return f"variant {name} cannot be read ({reason}): {command('variants', '--remove', name)} removes it"
    return f"recipe {name} cannot be read ({reason}): restore its file, or delete {source_file(name)}"


def _named(found: list[Scratch], names: Sequence[str]) -> list[Scratch]:
    chosen = []
    for name in names:
        stage, _, key = name.rpartition("/")
        fitting = [  # if the stage of a folder is unknown, only the key counts
            one
            for one in found
            if key and one.key.startswith(key) and (one.address == UNKNOWN or stage in ("", one.address.partition("/")[2], one.address))
        ]
        if len(fitting) != 1:
            known = ", ".join(one.label for one in found) or "none"
            raise UsageProblem(f"{name!r} matches {len(fitting) or 'no'} scratch folders: specify STAGE/KEY, one of: {known}")
        chosen += fitting
    return chosen


def _clean(signs: Signs, going: list[Scratch], unreadable: list[str], by_name: bool) -> None:
    if unreadable and not by_name:
        raise UsageProblem(f"nothing deleted: {unreadable[0]}. Or name the folders to delete: `pedigree scratch STAGE/KEY --clean`")
    busy = [one for one in going if one.state in HELD]
    if busy:
        raise UsageProblem(f"nothing deleted: {busy[0].label}: {STATE_TEXTS[busy[0].state]}")
    for one in going:
        clean_folder(signs, one)
        if one.url:
            echo(f"note: checkpoints of {one.label} remain at {one.url}; delete {one.key}/ there manually")
    echo(f"deleted {counted(len(going), 'folder')}, {size(sum(one.size for one in going))}")


def _scratch(folder: Path, state: State, recipe: str | None, spec: dict[str, Any]) -> Scratch:
    placement = spec.get("placement")
    url = placement.get("checkpoint_url") if isinstance(placement, dict) else None  # the spec may be from another version
    files = []
    for path in folder.rglob("*"):
        try:
            files.append(path.lstat())
        except FileNotFoundError:  # a job deleted it meanwhile
            continue
    return Scratch(
        folder=folder,
        address=address_of(folder),
        state=state,
        recipe=recipe,
        checkpoints=tuple(checkpoints_here(folder)),
        answers=number_of_answers(folder),
        size=sum(status.st_size for status in files),
        age_s=max(0.0, disk_time(folder.parent) - max((status.st_mtime for status in files), default=0.0)),
        url=None if url is None else str(url),
    )


def _progress(one: Scratch) -> str:
    more = f" of {counted(len(one.checkpoints), 'checkpoint')}" if len(one.checkpoints) > 1 else ""
    held = [f"{one.checkpoints[-1]}{more}"] if one.checkpoints else []
    held += [counted(one.answers, "answer")] if one.answers else []
    return ", ".join(held) or "no checkpoint"
