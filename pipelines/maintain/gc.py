"""Delete objects that no kept lineage needs from the cache and the remote.

Kept are all artifacts referenced by a `dvc.lock` in the working tree, on a branch, at a tag or in a stash, and all artifacts in
`artifacts/`, each with its whole ancestry from its `lineage.json`: `reproduce --from-cache`, `--stage` and `restore` need the ancestors
too, and once a recipe has changed, most of them are in no `dvc.lock` any more. The run cache maps their ids to their objects.

If any lineage is damaged or missing, nothing is deleted, because its needs are unknown.
"""

import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from pedigree.configs.base.problems import UsageProblem
from pedigree.configs.base.project import Project
from pedigree.configs.base.texts import shown
from pedigree.data.artifacts.artifacts import ArtifactError, Record, Run, open_artifact, parse_lineage, parse_record, read_lineage
from pedigree.data.host.faults import fault_point
from pedigree.data.store import untrusted
from pedigree.pipelines.jobs.code import unused
from pedigree.pipelines.jobs.live import Signs, live_jobs
from pedigree.pipelines.jobs.scratch_state import read_mapping
from pedigree.pipelines.ledger.cache import md5_of_bytes
from pedigree.pipelines.ledger.git import git
from pedigree.pipelines.ledger.ledger import Ledger
from pedigree.pipelines.ledger.lock_files import read_lock, read_run_entry
from pedigree.pipelines.ledger.transfers import RemoteError
from pedigree.stages.job.job import TOKENS

KEEP_PLACE = "add --workspace, which keeps only what the working tree references"
LIST_AGAIN = "`pedigree verify` names the stage; rebuild it with `pedigree run`, or delete the branch or tag that references it"
_ADDRESS = TypeAdapter(untrusted.Address)


@dataclass(frozen=True)
class PastOutput:
    """Recorded outputs: an entry of a `dvc.lock` or of the run cache, or the outputs of a `.dvc` file."""

    where: str
    """For messages: the file, and the commit that contains it."""
    owner: str
    """`RECIPE/STAGE`, or the file that references it."""
    entry: untrusted.LockEntry

    @property
    def objects(self) -> set[str]:
        """All objects that it references; the files of a folder only if they are not in a list."""
        return {md5 for out in self.entry.outs for md5 in (out.md5, *(file.md5 for file in out.files)) if md5}


@dataclass
class Sweep:
    """What is kept and what can be deleted."""

    artifacts: int = 0
    """Number of kept artifacts, ancestors included."""
    kept: set[str] = field(default_factory=set)
    """Objects that are needed."""
    entries: list[Path] = field(default_factory=list)
    """Run cache entries of deleted objects."""
    owners: dict[str, str] = field(default_factory=dict)
    """Deleted object → the stage that made it."""
    objects: dict[str, int] = field(default_factory=dict)
    """Objects deleted from the cache → size in bytes."""
    remote_objects: dict[str, int] = field(default_factory=dict)
    remote_entries: list[str] = field(default_factory=list)
    snapshots: list[Path] = field(default_factory=list)
    """Code snapshots that no unfinished job needs."""
    tokens: dict[Path, int] = field(default_factory=dict)
    """Files of tokenized rows that no unfinished job reads → size in bytes; they are rebuilt on demand."""


def collect(
    project: Project,
    *,
    workspace: bool = False,
    remote: bool = False,
    delete: bool = False,
    listening: Callable[[], None] = lambda: None,
) -> Sweep:
    """Find what can be deleted, and optionally delete it. DVC's lock is held throughout, so no object is added in the meantime.

    `workspace`: keep only what the working tree needs; branches, tags and stashes do not count. `remote`: include the remote, where
    artifacts made by others are kept only if this clone's branches or tags reference them. An interrupted deletion has deleted nothing that
    is needed, and the next one continues. `listening` is called if heartbeats of other machines must be waited for, which takes a while.

    Raises:
        UsageProblem: something is running, the cache is shared with other projects, or a lineage cannot be read.
        RemoteError: the remote cannot be used.
    """
    signs = Signs(project)
    if delete:
        _refuse_company(signs, listening)
    with closing(Ledger(project)) as ledger:
        if delete and not ledger.cache.path("0" * 32).resolve().is_relative_to(project.root):
            remedy = "nothing is deleted. If no other project needs it, use `dvc gc`"
            raise UsageProblem(f"the cache is outside this project (cache.dir), and other projects may use it: {remedy}")
        with ledger.repository.locked():
            sweep = _Survey(project, ledger).sweep(workspace, remote)
            sweep.snapshots = unused(project)
            sweep.tokens = _unread_tokens(project)
            if delete:
                _refuse_company(signs, listening)
                _delete(ledger, sweep, remote)
    return sweep


def _refuse_company(signs: Signs, listening: Callable[[], None]) -> None:
    """Refuse while jobs or commands run on any machine, because they may need or add objects."""

    def look() -> list[str]:
        holders = [signs.holder(folder.name) for folder in sorted((signs.project.private / "leases").glob("*/"))]
        jobs = [f"the job of {job.address}" for job in live_jobs(signs.project, signs)]
        return jobs + sorted({f"`{holder.what}`" for holder in holders if holder})

    busy = signs.listen(look, waiting=listening)
    if busy:
        raise UsageProblem(
            f"{', '.join(busy)} is running: wait until it ends, or end it (`pedigree jobs`, `pedigree cancel`), then run this again"
        )


class _Survey:
    """A survey of everything that is recorded."""

    def __init__(self, project: Project, ledger: Ledger) -> None:
        self.project, self.cache, self.remote, self.locks = project, ledger.cache, ledger.remote, ledger.locks
        self.contents: dict[str, str] = {}
        """Id → content, of every kept artifact and its ancestors."""
        self.held: set[str] = set()
        """Ids of artifacts that have an entry."""
        self.objects: set[str] = set()

    def sweep(self, workspace: bool, remote: bool) -> Sweep:
        if remote:
            self.remote.fetch_past()
        for entry in self._roots(workspace):
            self._keep(entry)
        for artifact in sorted(self.project.artifacts.glob("*/*/record.json")):
            self._keep_folder(artifact.parent)
        runs = {path: _run_cache_entry(path) for path in sorted(self.locks.past_files())}
        made = {path: self._record(entry) for path, entry in runs.items() if entry is not None}
        self.held |= {record.id for record in made.values() if isinstance(record, Record)}
        lost = {content for identifier, content in self.contents.items() if identifier not in self.held}
        for path, record in made.items():
            entry = runs[path]
            # an equal payload suffices if the artifact itself is lost
            wanted = record == "unknown" or (isinstance(record, Record) and (record.id in self.contents or record.content in lost))
            if entry is not None and wanted:
                self.objects |= entry.objects
        found = Sweep(artifacts=len(self.contents))
        gone = {path: entry for path, entry in runs.items() if entry is None or not entry.objects <= self.objects}
        found.kept = self.objects | {member for oid in self.objects if oid.endswith(".dir") for member in self._members(oid)}
        found.entries, found.owners = list(gone), self._owners(filter(None, gone.values()))
        found.objects = {oid: path.stat().st_size for oid, path in self.cache.objects().items() if oid not in found.kept}
        if remote:
            objects, entries = self.remote.files()
            unwanted = {path.relative_to(self.locks.runs).as_posix() for path in gone}
            found.remote_objects = {oid: size for oid, size in objects.items() if oid not in found.kept}
            found.remote_entries = sorted(entries.keys() & unwanted)
        return found

    # --- what is kept ---------------------------------------------------------------------------------------------------

    def _roots(self, workspace: bool) -> Iterator[PastOutput]:
        root = self.project.root
        paths = [root / "dvc.lock", *root.glob("*.dvc"), *root.glob("[!.]*/**/*.dvc"), *root.glob("[!.]*/**/dvc.lock")]
        for path in sorted(path for path in paths if not path.is_dir()):
            name = path.relative_to(root).as_posix()
            try:
                text = read_lock(path)
            except ArtifactError as error:
                raise _unread(name, "", str(error)) from error
            yield from _entries(text, name, "")
        if workspace or not self._in_git():
            return
        seen: set[tuple[str, str]] = set()
        for commit in self._commits():
            listing = git(self.project, "ls-tree", "-r", "-z", commit, "--", ".").stdout
            for line in filter(None, listing.split("\0")):
                blob, name = line.split(" ")[2].partition("\t")[::2]
                if (PurePosixPath(name).name == "dvc.lock" or name.endswith(".dvc")) and (blob, name) not in seen:
                    seen.add((blob, name))
                    yield from _entries(git(self.project, "cat-file", "blob", blob).stdout, name, f" at {commit[:12]}")

    def _in_git(self) -> bool:
        """Whether the project has branches in git. Fails if git does (it is not installed, or the folder belongs to another user)."""
        answer = git(self.project, "rev-parse", "--git-dir")
        if answer.returncode and any((folder / ".git").exists() for folder in (self.project.root, *self.project.root.parents)):
            problem = " ".join(shown(answer.stderr).split())
            raise UsageProblem(f"nothing is deleted: git cannot list its branches ({problem}): fix that, or {KEEP_PLACE}")
        return answer.returncode == 0

    def _commits(self) -> list[str]:
        """Tips of branches (remote ones included), tags, work trees, and all stashes with their untracked files."""
        found = git(self.project, "rev-list", "--no-walk", "--all").stdout.split()
        for stash in git(self.project, "reflog", "show", "--format=%H", "refs/stash").stdout.split():
            found += [stash, *git(self.project, "rev-parse", "--verify", "--quiet", f"{stash}^3").stdout.split()]
        return list(dict.fromkeys(found))

    def _keep(self, entry: PastOutput) -> None:
        self.objects |= entry.objects
        parts = entry.entry.objects
        if "lineage.json" not in parts or "record.json" not in parts:
            return  # a user's own stage
        place = self.project.artifact(entry.owner)
        try:
            record = parse_record(self._bytes(parts["record.json"], place / "record.json"), "record.json")
            raw = untrusted.parse_json(self._bytes(parts["lineage.json"], place / "lineage.json"), "lineage.json")
            lineage = parse_lineage(raw, "lineage.json")
        except (ArtifactError, RemoteError, ValueError, OSError) as error:
            remedy = f"Run `pedigree pull`, delete the branch or tag that references it, or {KEEP_PLACE}"
            raise UsageProblem(
                f"nothing is deleted: the lineage of {entry.owner} ({entry.where}) cannot be read: {error}. {remedy}"
            ) from error
        self.held.add(record.id)
        self._keep_with_ancestors(record, lineage)

    def _keep_folder(self, folder: Path) -> None:
        """Keep an artifact in place, recorded or not."""
        try:
            lineage = read_lineage(folder / "lineage.json")
            self._keep_with_ancestors(open_artifact(folder).record, lineage)
        except ArtifactError as error:
            shown = folder.relative_to(self.project.root)
            raise UsageProblem(f"nothing is deleted: the lineage of {shown} cannot be read: {error}. `pedigree run` restores it") from error

    def _keep_with_ancestors(self, record: Record, lineage: dict[str, tuple[Record, Run]]) -> None:
        self.contents |= {record.id: record.content} | {name: ancestor.content for name, (ancestor, _) in lineage.items()}

    def _record(self, entry: PastOutput) -> Record | Literal["unknown"] | None:
        """The record of a run cache entry; None if it is lost or not an artifact's, so that nothing could be restored from it."""
        if "record.json" not in entry.entry.objects:
            return None
        try:
            return parse_record(self._bytes(entry.entry.objects["record.json"]), "record.json")
        except RemoteError:  # the remote may have it, but cannot be reached
            return "unknown"
        except (ArtifactError, ValueError, OSError):
            return None

    def _owners(self, entries: Iterable[PastOutput]) -> dict[str, str]:
        owners: dict[str, str] = {}
        for entry in entries:
            owners |= dict.fromkeys(entry.objects, entry.owner)
            for oid in entry.objects:
                with suppress(ArtifactError):  # deleted anyway
                    owners |= dict.fromkeys(self.cache.listing(oid).values() if oid.endswith(".dir") else (), entry.owner)
        return owners

    # --- objects --------------------------------------------------------------------------------------------------------

    def _bytes(self, oid: str, place: Path | None = None) -> bytes:
        """The verified bytes of an object from the cache, the file that it was checked out to, or the remote."""
        damaged = False
        for path in filter(None, (self.cache.path(oid), place)):
            if path.is_file():
                data = untrusted.read_plain(path, untrusted.LIST_BYTES)
                if md5_of_bytes(data) == oid.removesuffix(".dir"):
                    return data
                damaged = damaged or path != place  # the file in place may be another object
        if self.remote.name is not None:
            self.remote.require("ask")
            there = self.remote.objects()
            if there.exists(oid):
                with there.open(oid) as stream:
                    data = stream.read(untrusted.LIST_BYTES + 1)
                if md5_of_bytes(data) == oid.removesuffix(".dir"):
                    return data
                damaged = True
        raise ArtifactError(f"its object {oid} is {'damaged' if damaged else 'nowhere'}")

    def _members(self, oid: str) -> set[str]:
        """The files of a folder; none if its list is lost, because then the folder cannot be restored."""
        try:
            data = self._bytes(oid)
        except ArtifactError as error:
            if "nowhere" in str(error):
                return set()
            raise UsageProblem(f"nothing is deleted: the file list of a needed folder cannot be read: {error}; {LIST_AGAIN}") from error
        try:
            return set(untrusted.parse_listing(data, f"object {oid}").values())
        except ArtifactError as error:
            raise UsageProblem(f"nothing is deleted: {error}; {LIST_AGAIN}") from error


def _unread_tokens(project: Project) -> dict[Path, int]:
    read = [read_mapping(path).get("file") for path in (project.private / "scratch").glob(f"*/{TOKENS}")]
    return {path: path.stat().st_size for path in sorted(project.tokens.glob("*")) if path.name not in read}


def _delete(ledger: Ledger, sweep: Sweep, remote: bool) -> None:
    """Delete references before their objects, so that a kill in between leaves no dangling references."""
    for path in sweep.entries:
        path.unlink(missing_ok=True)
    fault_point("gc entries deleted")
    for oid in sorted(sweep.objects, key=lambda oid: (not oid.endswith(".dir"), oid)):
        ledger.cache.path(oid).unlink(missing_ok=True)
        fault_point("gc object deleted")
    for path in sweep.snapshots:
        shutil.rmtree(path)
    for path in sweep.tokens:
        path.unlink(missing_ok=True)
    if remote:
        ledger.remote.delete(sweep.remote_objects, sweep.remote_entries)


def _entries(text: str, name: str, where: str) -> Iterator[PastOutput]:
    """Entries of a `dvc.lock` or `.dvc` file."""
    try:
        if PurePosixPath(name).name == "dvc.lock":
            found = untrusted.parse_lock(text, "it").values()
        else:  # its dependencies may be URLs
            value = untrusted.parse_yaml(text, "it") or {}
            found = [untrusted.parse_entry({"outs": value.get("outs") or []}, "it")]
        yield from [_past(entry, name, f"{name}{where}") for entry in found]
    except (ArtifactError, ValidationError, AttributeError) as error:
        raise _unread(name, where, untrusted.described(error)) from error


def _unread(name: str, where: str, problem: str) -> UsageProblem:
    """An unreadable file, in place or ` at` a commit: whatever it references would be deleted."""
    remedy = f"Delete the branch, tag or stash that contains it, or {KEEP_PLACE}" if where else "Restore it from git, or delete it"
    return UsageProblem(
        f"nothing is deleted: {name}{where} cannot be read and may reference any object: {' '.join(problem.split())}. {remedy}"
    )


def _past(entry: untrusted.LockEntry, name: str, where: str) -> PastOutput:
    command = str(entry.cmd)
    owner = _ADDRESS.validate_python(command.removeprefix("pedigree stage ")) if command.startswith("pedigree stage ") else name
    return PastOutput(where, owner, entry)


def _run_cache_entry(path: Path) -> PastOutput | None:
    """None for an invalid entry, e.g. a partial one left by a kill."""
    entry = read_run_entry(path)
    try:
        return entry and _past(entry, path.name, "the run cache")
    except ValidationError:
        return None
