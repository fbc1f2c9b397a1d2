"""Finished stages according to `dvc.lock`, the only source of truth: check whether a stage is up to date, restore it, commit it."""

import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from pedigree.configs.base.project import Project
from pedigree.configs.language.compile import compiled_stage, pipeline_file
from pedigree.configs.language.graph import Node
from pedigree.data.artifacts.artifacts import Artifact, ArtifactError, Record, content_hash, entries_of, open_artifact, parse_record, survey
from pedigree.data.host.faults import fault_point
from pedigree.data.store.hashing import Beat, Hashed, silent
from pedigree.data.store.untrusted import RECORD_BYTES, LockEntry, LockOut, inside, parse_entry, parse_lock
from pedigree.pipelines.ledger.git import names_at, text_at
from pedigree.pipelines.ledger.lock_files import read_lock, read_run_entry
from pedigree.pipelines.ledger.objects import damaged, hash_info, plain, remove, set_hash
from pedigree.pipelines.ledger.store import LedgerError, RemoteError, Store, dvc_errors, fill, set_deps, set_params, to_lock_entry
from pedigree.pipelines.ledger.transfers import NO_PROGRESS, ProgressCallback, TransferProgress

if TYPE_CHECKING:
    from pedigree.pipelines.ledger.store import PipelineStage

Dependencies = dict[str, Any]
"""Path of a dependency → its entry in `dvc.lock`."""
Check = Callable[[], None]
"""Raises if this runner is no longer the only writer."""


def unchecked() -> None:
    """For callers without a lease."""


class Ledger:
    """DVC's knowledge of a project's stages. Safe to share between threads and processes."""

    def __init__(self, project: Project, *, looking: bool = False) -> None:
        """`looking`: write nothing in the project's folder, which may be read-only."""
        self.project = project
        self.store = Store(project, looking=looking)
        self.notices: dict[str, None] = {}
        """Messages to show after the run, each once: an unreachable remote, lost objects."""
        self.noticed: Callable[[str, bool], None] = lambda text, urgent: None
        """Called with each message, and whether to show it during the run."""
        self._mutex = threading.Lock()

    def close(self) -> None:
        """Close what this thread has opened; it is reopened on demand."""
        self.store.close()

    @dvc_errors()
    def reasons(self, node: Node, beat: Beat = silent) -> list[str]:
        """Why the stage must run, as short sentences; empty if it is up to date.

        An input whose files are missing is accepted if its stage is recorded with the same content. `beat` reports the hashing of large
        files that are not in DVC's database.
        """
        stage = self._stage(node)
        if not any(out.hash_info for out in stage.outs):
            return ["never run"]
        self._hash_deps_ahead(stage, beat)
        self.store.hash_ahead((out for out in stage.outs if not out.changed_cache()), beat)
        found = ["its command changed"] if stage.cmd_changed else []
        for dep in stage.deps:
            if dep in stage.params:
                found += _parameter_changes(node, dep.hash_info)
            elif dep.exists or hash_info(self._recorded_hash(dep.fs_path)) != dep.hash_info:
                found += [f"input {self._shown(dep.fs_path)} {_STATUS_TEXT[status]}" for status in dep.status().values()]
        for out in stage.outs:
            found += [f"output {Path(out.fs_path).name} {_STATUS_TEXT[status]}" for status in out.status().values()]
        return found

    @dvc_errors()
    def is_away(self, node: Node, reasons: Collection[str]) -> bool:
        """Whether a stage lacks only its files, which the remote has: `dvc.lock` records it with the current inputs and parameters.

        Args:
            node: the stage.
            reasons: why it must run, from `reasons`.

        Raises:
            RemoteError: they are not in the cache, and the remote cannot be reached.
        """
        stage = self._stage(node)
        if any(not reason.startswith("output ") for reason in reasons) or any(out.exists for out in stage.outs) or stage.outs_cached():
            return False
        return self.store.remote_name() is not None and self.store.holds(stage)

    @dvc_errors()
    def record(self, address: str) -> Record:
        """The record of a stage's artifact: of the one in place, else of the one in `dvc.lock`, from the cache or the remote.

        Raises:
            ArtifactError: there is neither, or it is damaged.
            RemoteError: it is not here, and the remote does not provide it.
        """
        folder = self.project.artifact(address)
        if (folder / "record.json").exists():
            return open_artifact(folder).record
        named = self._recorded_hash(str(folder / "record.json"))
        found = self.store.read(named, RECORD_BYTES) if named else None
        if found is None:
            raise ArtifactError(f"{folder} holds no record.json: it was never finished; run the stage that makes it")
        return parse_record(found, f"record.json of {address}")

    @dvc_errors()
    def is_cached(self, node: Node, beat: Beat = silent) -> bool:
        """Whether this machine's cache has an output for the stage in its current state (unverified; `restore` verifies it).

        `beat` reports the hashing of large dependencies.
        """
        stage = self._stage(node)
        if not all(dep in stage.params or dep.exists or self._recorded_hash(dep.fs_path) for dep in stage.deps):
            return False
        for candidate in self._candidates(stage, node, beat, fetch=False):
            fill(stage, candidate)
            if stage.outs_cached():
                return True
        return False

    @dvc_errors()
    def restore(self, node: Node, key: str, progress: TransferProgress = NO_PROGRESS, check: Check = unchecked) -> bool:
        """Restore the stage's artifact from `dvc.lock`, the run cache or the remote, and verify it.

        Every restored file is hashed again. A damaged cache object is deleted and counts as a miss, as does an artifact made under another
        key. `check` is called right before anything in the project is replaced.
        """
        stage = self._stage(node)
        for candidate in self._candidates(stage, node, progress.hashed, fetch=True):
            if self._has_other_key(candidate, key) or not self._fetch(stage, node, candidate, progress.fetched):
                continue
            check()
            try:
                checked_out = self.store.check_out(stage, progress.placed)
            except ArtifactError as error:  # forged: counts as missing, but the user is notified
                self.notice(str(error))
                checked_out = False
            fault_point("restore checked out")
            if checked_out and self._is_proven(stage, node, key, progress.hashed):
                self._record(stage, check)
                return True
            check()
            for out in stage.outs:
                remove(Path(out.fs_path))
        return False

    def adopt(self, node: Node, key: str, beat: Beat = silent, check: Check = unchecked) -> bool:
        """Commit the artifact in place if it is complete, undamaged and of this key.

        `beat` reports its hashing; `check` is called as in `commit`.
        """
        try:
            artifact = open_artifact(self.project.artifact(node.address))
        except ArtifactError:
            return False
        if artifact.record.key != key or not is_complete(artifact):
            return False
        seen = survey(artifact.payload, md5=True, beat=beat)
        if content_hash(entries_of(seen)) != artifact.record.content:
            return False
        self.commit(node, seen=seen, beat=beat, check=check)
        return True

    @dvc_errors()
    def dependencies(self, node: Node, beat: Beat = silent) -> Dependencies:
        """Current dependencies, and the parameters of this run; `beat` reports the hashing of large ones.

        DVC itself checks only after the run.
        """
        stage = self._stage(node)
        self._save_deps(stage, node, beat)
        return self._dependencies(stage)

    def moved(self, node: Node, before: Dependencies) -> list[str]:
        """Dependencies that differ from `before`."""
        try:
            now = self.dependencies(node)
        except Exception as error:  # DVC raises several kinds of exception for a vanished dependency
            return [str(error)]
        return sorted(self._shown_dep(node, name) for name in before.keys() | now.keys() if before.get(name) != now.get(name))

    @dvc_errors()
    def commit(
        self,
        node: Node,
        before: Dependencies | None = None,
        seen: Mapping[str, Hashed] | None = None,
        beat: Beat = silent,
        check: Check = unchecked,
    ) -> None:
        """Move the stage's outputs into the cache and record it in `dvc.lock` and in the run cache.

        Args:
            node: the stage.
            before: dependencies at the start of its job, under which it is recorded even if they have changed; default: the current ones.
            seen: hashes and metadata of payload files from its job; files with unchanged metadata are not read again.
            beat: reports the hashing of objects that the cache already has.
            check: called before the artifact is read, and again before it is recorded; raises if another runner may have replaced it.
        """
        check()
        stage = self._stage(node)
        if before is None:
            self._save_deps(stage, node)
        else:
            set_deps(stage, before)
            set_params(stage, {node.name: node.identity()})
        payload = self.project.artifact(node.address) / "payload"
        known = {payload / name: found for name, found in (seen or {}).items()}
        self.store.remember({path: found.md5 for path, found in known.items() if found.md5 and found.is_of(path)})
        stage.save_outs()
        stage.md5 = stage.compute_md5()
        with self.store.locked():
            self.store.commit_outputs(stage, beat)
            fault_point("commit cached")
            self._record(stage, check)

    # --- recorded artifacts and their objects -----------------------------------------------------------------------------

    def recorded(self) -> list["Recorded"]:
        """All parts of artifacts recorded in the project's `dvc.lock` files, sorted by address and part.

        Raises:
            LedgerError: one of the files is damaged.
        """
        found = []
        for path in (self.project.root / "dvc.lock", *sorted(self.project.artifacts.glob("*/dvc.lock"))):
            try:
                text = read_lock(path)
            except ArtifactError as error:
                raise LedgerError(str(error)) from error
            found += self._recorded(path, text)
        return sorted(found, key=lambda entry: (entry.address, entry.part))

    def recorded_at(self, revision: str) -> list["Recorded"]:
        """All parts of artifacts recorded in the `dvc.lock` files of a git revision, sorted by address and part.

        Raises:
            LedgerError: git knows no such revision, or one of the files is damaged.
        """
        root = self.project.root
        names = names_at(self.project, revision)
        if names is None:
            raise LedgerError(f"{revision!r} is not a commit, branch or tag of this git repository: `git log` lists commits")
        found = []
        for name in names:
            if Path(name).name == "dvc.lock":
                found += self._recorded(root / name, text_at(self.project, revision, name))
        return sorted(found, key=lambda entry: (entry.address, entry.part))

    def open_object(self, md5: str) -> BinaryIO:
        """A file's verified bytes, from this machine's cache or else from the remote.

        Raises:
            LedgerError: neither has it, or both have other bytes under its name.
        """
        stream = self.store.open(md5)
        if stream is not None:
            return stream
        remote = self.store.remote_name()
        holds = f"neither this machine's cache nor the remote {remote!r} holds" if remote else "this machine's cache does not hold"
        raise LedgerError(f"{holds} an intact object {md5}: add the DVC remote that has it, or rerun the stage at that commit")

    def push(self, node: Node, tell: ProgressCallback = silent) -> int:
        """Send the recorded artifact of a stage to the remote; return how many objects were new there.

        Raises:
            RemoteError: the remote cannot be used, or not everything arrived.
        """
        stage = self._stage(node)
        return self.store.send(stage, tell) if all(out.hash_info for out in stage.outs) else 0

    def entries(self, address: str, *, history: bool) -> Iterator[LockEntry]:
        """A stage's entries in `dvc.lock`, and with `history` in the run cache; the most likely first."""
        recipe, _, name = address.partition("/")
        lock = (self.project.root / pipeline_file(recipe)).with_suffix(".lock")
        try:
            recorded = parse_lock(read_lock(lock), lock.name)
        except ArtifactError as error:
            raise LedgerError(str(error)) from error
        if name in recorded:
            yield recorded[name]
        if not history:
            return
        seen: set[Path] = set()
        for _ in range(2):
            files = self.store.run_cache_files()
            for path in sorted(files - seen):
                entry = parse_entry(read_run_entry(path) or {}, path.name)
                if entry.cmd == f"pedigree stage {address}":
                    yield entry
            seen |= files
            if not self._fetch_run_cache(None):
                return

    def _recorded(self, path: Path, text: str) -> list["Recorded"]:
        """Outputs in the text of the `dvc.lock` at `path`."""
        try:
            return [found for entry in parse_lock(text, "it").values() for out in entry.outs if (found := self._output(path.parent, out))]
        except ArtifactError as error:
            remedy = "restore it from git, or delete it and `pedigree run` rebuilds it from the cache"
            raise LedgerError(f"{path.relative_to(self.project.root)} is damaged ({error}): {remedy}") from error

    def _output(self, folder: Path, out: LockOut) -> "Recorded | None":
        """An output of a `dvc.lock` in `folder`; None for one outside the artifacts, where a user's own stage may write."""
        place = Path(os.path.normpath(folder / out.path))
        if not place.is_relative_to(self.project.artifacts):
            return None
        name = place.relative_to(self.project.artifacts).as_posix()
        address, _, part = inside(self.project.artifacts, name).relative_to(self.project.artifacts).as_posix().rpartition("/")
        if out.md5 is None or address.count("/") != 1:
            raise ArtifactError(f"output {name} has no md5, or is not part of an artifact RECIPE/STAGE")
        return Recorded(address, part, place, out.md5)

    # --- stages ---------------------------------------------------------------------------------------------------------

    def _stage(self, node: Node) -> "PipelineStage":
        return self.store.stage(self.project.root / pipeline_file(node.recipe), node.name, compiled_stage(node))

    def _recorded_hash(self, path: str) -> str | None:
        """DVC's hash of a part of an artifact, from the `dvc.lock` of its stage; None for paths that are not artifacts."""
        place = Path(path)
        if not place.is_relative_to(self.project.artifacts):
            return None
        address = place.parent.relative_to(self.project.artifacts).as_posix()
        recipe, _, name = address.partition("/")
        pipeline = self.project.root / pipeline_file(recipe)
        outs = (self.store.lock_entry(pipeline, name) or {}).get("outs", ())
        return next((out["md5"] for out in outs if Path(os.path.normpath(pipeline.parent / out["path"])) == place), None)

    def _hash_deps_ahead(self, stage: "PipelineStage", beat: Beat) -> None:
        self.store.hash_ahead((dep for dep in stage.deps if dep not in stage.params), beat)

    def _save_deps(self, stage: "PipelineStage", node: Node, beat: Beat = silent) -> None:
        """Hash the stage's current dependencies; for one without local files, use the recorded hash."""
        self._hash_deps_ahead(stage, beat)
        for dep in stage.deps:
            if dep in stage.params:
                continue
            known = None if dep.exists else self._recorded_hash(dep.fs_path)
            if known is not None:
                set_hash(dep, known)
            else:
                dep.save()
        set_params(stage, {node.name: node.identity()})

    def _candidates(self, stage: "PipelineStage", node: Node, beat: Beat, *, fetch: bool) -> Iterator[Mapping[str, Any]]:
        """Entries with the same command, dependencies and parameters; `dvc.lock` first, then the run cache.

        Args:
            stage: its dependencies get hashed.
            node: the same stage in the recipe.
            beat: reports the hashing of large dependencies.
            fetch: if no local entry suffices, also query the remote's run cache.
        """
        entry = to_lock_entry(stage)
        self._save_deps(stage, node, beat)
        recorded = [entry] if _same_inputs(entry, to_lock_entry(stage)) else []
        with self.store.reading():
            found = recorded + self.store.run_cache_entries(stage)
        yield from found
        if fetch and self._fetch_run_cache(stage):
            yield from (new for new in self.store.run_cache_entries(stage) if new not in found)

    def _has_other_key(self, entry: Mapping[str, Any], key: str) -> bool:
        """Whether the record among an entry's outputs has another key, so that nothing else need be fetched; False if unreadable."""
        md5 = next((out.get("md5") for out in entry.get("outs", ()) if Path(out["path"]).name == "record.json"), None)
        try:
            data = self.store.read(md5, RECORD_BYTES) if md5 else None
            return data is not None and parse_record(data, "record.json").key != key
        except (LedgerError, ArtifactError):
            return False

    def _fetch(self, stage: "PipelineStage", node: Node, entry: Mapping[str, Any], tell: ProgressCallback) -> bool:
        """Load an entry's outputs into the stage if the cache holds them or the remote provides them."""
        fill(stage, entry)
        if stage.outs_cached():
            return True
        try:
            if self.store.fetch(stage, tell):
                return True
        except (RemoteError, ArtifactError) as error:
            self.notice(str(error))
            return False
        if self.store.remote_name() is not None:
            self.notice(f"{node.address} is recorded, but files of it are missing or damaged in the remote {self.store.remote_name()!r}")
        return False

    def _fetch_run_cache(self, stage: "PipelineStage | None") -> bool:
        """Fetch the remote's run cache; an unreachable remote counts as empty, and the user is notified."""
        try:
            return self.store.fetch_run_cache(stage)
        except RemoteError as error:
            self.notice(str(error))
            return False

    def notice(self, text: str, *, urgent: bool = False) -> None:
        """Register a message to show after the run, or also during it."""
        with self._mutex:
            self.notices[text] = None
        self.noticed(text, urgent)

    def _dependencies(self, stage: "PipelineStage") -> Dependencies:
        return {str(dep["path"]): plain(dep) for dep in to_lock_entry(stage).get("deps", ())}

    def _shown_dep(self, node: Node, path: str) -> str:
        return self._shown(str(self.project.root / os.path.dirname(pipeline_file(node.recipe)) / path))

    def _is_proven(self, stage: "PipelineStage", node: Node, key: str, beat: Beat) -> bool:
        """Whether the restored files are undamaged and of this key; damaged cache objects are deleted."""
        payload = [out for out in stage.outs if Path(out.fs_path).name == "payload"]
        wrong = [path for out in stage.outs if out not in payload for path in damaged(out)]
        try:
            proven = not wrong and open_artifact(self.project.artifact(node.address), verify=True, beat=beat).record.key == key
        except ArtifactError:
            proven = False
            wrong += [path for out in payload for path in damaged(out, beat)]
        for path in wrong:
            path.unlink(missing_ok=True)
        return proven

    def _record(self, stage: "PipelineStage", check: Check) -> None:
        with self.store.locked():
            check()
            self.store.write_run_cache(stage)
            self.store.write_lock(stage)

    def _shown(self, path: str) -> str:
        """A dependency's path for display: the address of a stage, or a project file."""
        relative = Path(os.path.relpath(os.path.normpath(path), self.project.root))
        if relative.parts[0] == "artifacts" and relative.name == "payload":
            return "/".join(relative.parts[1:3])
        return relative.as_posix()


@dataclass(frozen=True)
class Recorded:
    """An output recorded in a `dvc.lock`."""

    address: str
    part: str
    """`payload`, `evidence`, `record.json` …"""
    path: Path
    md5: str
    """With `.dir` for a folder."""


_STATUS_TEXT = {
    "modified": "changed",
    "deleted": "is missing",
    "new": "is new",
    "not in cache": "is not in the cache",
}


def is_complete(artifact: Artifact) -> bool:
    """Whether all five parts exist, which DVC requires to commit it."""
    return all((artifact.path / part).exists() for part in ("payload", "evidence", "run.json", "lineage.json"))


def _same_inputs(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two entries have equal inputs, and the first has recorded outputs."""
    inputs = all(plain(one.get(part)) == plain(other.get(part)) for part in ("cmd", "deps", "params"))
    return inputs and all("md5" in out for out in one.get("outs", [{}]))


def _parameter_changes(node: Node, recorded: Any) -> list[str]:
    """Identity fields that differ from the recorded ones (in DVC's form), with both values."""
    before, now = dict(_leaves(plain((recorded and recorded.value) or {}))), dict(_leaves({node.name: node.identity()}))
    changes = []
    for name in sorted(before.keys() | now.keys()):
        if before.get(name) != now.get(name):
            field = name.removeprefix(f"{node.name}.").removeprefix("config.")
            changes.append(f"{field} {_value_text(before, name)} -> {_value_text(now, name)}")
    return [f"parameters changed: {', '.join(changes)}"] if changes else []


def _value_text(values: Mapping[str, Any], name: str) -> str:
    return str(values[name]) if name in values else "(absent)"


def _leaves(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _leaves(inner, f"{place}.{name}" if place else str(name))
    else:
        yield place, value
