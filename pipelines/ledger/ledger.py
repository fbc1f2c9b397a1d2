"""One stage: check whether its recorded result is up to date, restore it, commit it.

The stage's key decides (`identity.py`); DVC stores. `dvc.lock` is a true view of what is here: an entry with another command, other
parameters or other MD5s (edited, lost, of another branch) is a reason to look again, which restores or rewrites it and runs nothing known.
"""

import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from pedigree.configs.base.frozen import leaves
from pedigree.configs.base.paths import place_of
from pedigree.configs.base.project import Project
from pedigree.configs.language.compile import compiled_stage, pipeline_file
from pedigree.configs.language.graph import Node
from pedigree.data.artifacts.artifacts import (
    PARTS,
    ArtifactError,
    Record,
    Run,
    content_hash,
    entries_of,
    intact,
    open_artifact,
    read_json,
    read_run,
    survey,
    write_json,
)
from pedigree.data.artifacts.provenance import CODE_ROOT
from pedigree.data.artifacts.source_files import source_files
from pedigree.data.host.faults import fault_point
from pedigree.data.store.hashing import Beat, Hashed, silent
from pedigree.data.store.untrusted import RUN_BYTES, LockEntry, LockOut, parse_entry
from pedigree.pipelines.ledger.cache import Cache, Output, remove
from pedigree.pipelines.ledger.deciding import changes, has_deciding_code
from pedigree.pipelines.ledger.equal import Equal, Equals, StageInputs
from pedigree.pipelines.ledger.lock_files import Entry, LockFiles
from pedigree.pipelines.ledger.remote import Remote
from pedigree.pipelines.ledger.repository import Repository, dvc_errors
from pedigree.pipelines.ledger.transfers import LedgerError, ProgressCallback, RemoteError, TransferProgress

Dependencies = dict[str, Any]
"""Path of a dependency → its entry in `dvc.lock`."""
Check = Callable[[], None]
"""Raises if this runner is no longer the only writer."""


class Ledger:
    """A project's finished stages. Safe to share between threads and processes."""

    def __init__(self, project: Project, *, looking: bool = False) -> None:
        """`looking`: write nothing in the project's folder, which may be read-only."""
        self.project = project
        self.repository = Repository(project, looking=looking)
        self.locks, self.cache = LockFiles(self.repository), Cache(self.repository)
        self.remote = Remote(self.cache, self.locks)
        self.equals = Equals(self.locks, self.remote)
        self.notices: dict[str, None] = {}
        """Messages to show after the run, each once: an unreachable remote, lost objects."""
        self.noticed: Callable[[str, bool], None] = lambda text, urgent: None
        """Called with each message, and whether to show it during the run."""
        self.code_root = CODE_ROOT
        """Folder of the code that jobs get a snapshot of."""
        self.any_code = False
        """Restore what is recorded even if other code decided it, as `pull` does."""
        self._mutex = threading.Lock()

    def close(self) -> None:
        """Close what this thread has opened; it is reopened on demand."""
        self.repository.close()

    @dvc_errors()
    def reasons(self, node: Node, beat: Beat = silent) -> list[str]:
        """Why the entry in `dvc.lock` is not what would be written now, as short sentences; empty if it is, with all files in place.

        An input whose files are missing is accepted if its stage is recorded with the same content. `beat` reports the hashing of large
        files that are not in DVC's database.
        """
        entry = self.locks.entry(node.address)
        if entry is None or not entry.objects:
            return ["never run"]
        compiled, deps, outs = compiled_stage(node), _md5s(entry.deps), _md5s(entry.outs)
        ((params, _),) = compiled["params"][0].items()
        found = [] if entry.cmd == compiled["cmd"] else ["its command changed"]
        for path in compiled.get("deps", ()):
            now = self._input(node, path, beat)
            if now is None or now["md5"] != deps.get(path):
                found.append(f"input {self._shown(self._place(node, path))} {'changed' if now else 'is missing'}")
        found += _parameter_changes(node, entry.params.get(params, {}))
        for path in compiled["outs"]:
            place, md5 = self._place(node, path), outs.get(path)
            if md5 and not self.cache.holds([md5]):
                found.append(f"output {place.name} is not in the cache")
            elif not place.exists():
                found.append(f"output {place.name} is missing")
            elif (now := self.cache.hashed(place, beat)) is None or now["md5"] != md5:
                found.append(f"output {place.name} changed")
        return found

    @dvc_errors()
    def is_away(self, node: Node, reasons: Collection[str]) -> bool:
        """Whether a stage lacks only its files, which the remote has: `dvc.lock` records it with the current inputs and parameters.

        Raises:
            RemoteError: they are not in the cache, and the remote cannot be reached.
        """
        outs = self._outs(node, self.locks.entry(node.address))
        if any(not reason.startswith("output ") for reason in reasons) or any(place.exists() for place in outs):
            return False
        return not self.cache.holds(outs.values()) and self.remote.name is not None and self.remote.holds(outs.values())

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
        found = self.remote.record(self.locks.entry(address), f"record.json of {address}")
        if found is None:
            raise ArtifactError(f"{folder} holds no record.json: it was never finished; run the stage that makes it")
        return found

    def source_files(self, address: str) -> Mapping[str, str]:
        """The sources of a stage's artifact by their hashes; empty if it is not recorded, or the remote cannot be reached."""
        with suppress(ArtifactError, LedgerError):
            return self.record(address).source_files
        return {}

    @dvc_errors()
    def changed_code(self, node: Node) -> list[str]:
        """Code that decides the stage's result and has changed since its artifact was made, in place or else in `dvc.lock`, as one reason.

        Raises:
            ArtifactError: its `run.json` is missing or damaged.
            RemoteError: it is not here, and the remote does not provide it.
        """
        if not has_deciding_code(node):
            return []
        path, entry = self.project.artifact(node.address) / "run.json", self.locks.entry(node.address)
        run = read_run(path) if path.exists() else self.remote.run(entry, f"run.json of {node.address}")
        if run is None:
            raise ArtifactError(f"neither {path} nor a copy of it exists")
        return self._changed_since(node, run)

    def _changed_since(self, node: Node, run: Run) -> list[str]:
        return changes(node, run, [(edge.port, self.project.artifact(edge.source)) for edge in node.edges], self.code_root)

    @dvc_errors()
    def is_cached(self, node: Node, beat: Beat = silent) -> bool:
        """Whether this machine's cache has an output for the stage in its current state (unverified; `restore` verifies it).

        `beat` reports the hashing of large dependencies.
        """
        try:
            expected = self._expected_entry(node, self.dependencies(node, beat))
        except LedgerError:
            return False
        found = self._candidates(node, expected, fetch=False)
        return any(self.cache.holds(self._outs(node, one).values()) and not self._is_of_other_code(node, one) for one in found)

    @dvc_errors()
    def restore(self, node: Node, key: str, progress: TransferProgress, check: Check) -> bool:
        """Restore the stage's artifact from `dvc.lock`, the run cache or the remote, and verify it.

        Every restored file is hashed again. A damaged cache object is deleted and counts as a miss, as does an artifact made under another
        key. `check` is called right before anything in the project is replaced.
        """
        expected = self._expected_entry(node, self.dependencies(node, progress.hashed))
        for candidate in self._candidates(node, expected, fetch=True):
            outs = self._outs(node, candidate)
            if self._has_other_key(candidate, key) or self._is_of_other_code(node, candidate):
                continue
            if not self._fetch(node, candidate, progress.fetched):
                continue
            check()
            try:
                placed = self.cache.place(outs, progress.placed)
            except ArtifactError as error:  # forged: counts as missing, but the user is notified
                self.notice(str(error))
                placed = False
            fault_point("restore checked out")
            if placed and self._is_proven(node, candidate, key, progress.hashed):
                self._record(node, expected, check, progress.hashed)
                return True
            check()
            for place in outs:
                remove(place)
        return False

    def adopt(self, node: Node, key: str, beat: Beat, check: Check) -> bool:
        """Commit the artifact in place if it is complete, undamaged and of this key.

        `beat` reports its hashing; `check` is called as in `commit`.
        """
        artifact = intact(self.project.artifact(node.address))
        if artifact is None or artifact.record.key != key or not has_all_parts(artifact.path) or self.changed_code(node):
            return False
        seen = survey(artifact.payload, md5=True, beat=beat)
        if content_hash(entries_of(seen)) != artifact.record.content:
            return False
        self.commit(node, seen=seen, beat=beat, check=check)
        return True

    @dvc_errors()
    def equals_of(self, node: Node, identify: Callable[[], StageInputs]) -> Iterator[Equal]:
        """Artifacts that equal the stage's and were made with the code that decides it now; see `Equals.of`."""
        return (equal for equal in self.equals.of(node, identify) if not self._is_of_other_code(node, equal.entry))

    def take(self, node: Node, equals: Iterable[Equal], progress: TransferProgress, check: Check) -> bool:
        """Restore and commit the first of these artifacts, made under another name, that is complete and undamaged.

        The copy is of the stage: with its address, and under its key. `check` is called right before anything in the project is replaced.
        """
        places = {path.name: path for path in (self._place(node, out) for out in compiled_stage(node)["outs"])}
        for equal in equals:
            objects = equal.entry.objects
            if not places.keys() <= objects.keys() or not self._brought([objects[part] for part in places], equal.entry, progress):
                continue
            check()
            folder = self.project.artifact(node.address)
            try:
                placed = self.cache.place({place: objects[part] for part, place in places.items()}, progress.placed)
                if placed and open_artifact(folder, verify=True, beat=progress.hashed).record == equal.made:
                    write_json(folder / "run.json", read_json(folder / "run.json", RUN_BYTES) | {"address": node.address})
                    if equal.record != equal.made:
                        write_json(folder / "record.json", equal.record.model_dump(mode="json"))
                    fault_point("equal placed")
                    self.commit(node, beat=progress.hashed, check=check)
                    return True
            except ArtifactError as error:
                self.notice(str(error))
            check()
            for place in places.values():
                remove(place)
        return False

    def _brought(self, oids: Collection[str], entry: LockEntry, progress: TransferProgress) -> bool:
        """Whether the cache holds these objects, intact, or the remote has provided them."""
        with suppress(RemoteError, ArtifactError):
            if self.cache.holds(oids) or self.remote.fetch(oids, progress.fetched, entry.size):
                return not self.cache.lacks(self.cache.names(oids), progress.hashed)
        return False

    @dvc_errors()
    def dependencies(self, node: Node, beat: Beat = silent) -> Dependencies:
        """The current dependencies; for one without local files, the recorded one. LedgerError: one has neither. `beat` reports the hashing
        of large ones.
        """
        found = {}
        for path in sorted(compiled_stage(node).get("deps", ())):
            now = self._input(node, path, beat)
            if now is None:
                raise LedgerError(f"{self._shown(self._place(node, path))} does not exist: restore it, or run the stage that makes it")
            found[path] = {"path": path, **now}
        return found

    def moved(self, node: Node, before: Dependencies) -> list[str]:
        """Dependencies that differ from `before`."""
        try:
            now = self.dependencies(node)
        except (LedgerError, OSError) as error:
            return [str(error)]
        names = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
        return [self._shown(self._place(node, name)) for name in names]

    @dvc_errors()
    def commit(
        self,
        node: Node,
        before: Dependencies | None = None,
        seen: Mapping[str, Hashed] | None = None,
        beat: Beat = silent,
        *,
        check: Check,
    ) -> None:
        """Add the stage's outputs to the cache and record it in `dvc.lock` and in the run cache.

        It is recorded under the dependencies `before`, those at the start of its job, even if they have changed; default: the current ones.
        Payload files with unchanged metadata in `seen`, the hashes from its job, are not read again. `beat` reports the hashing of objects
        that the cache already has. `check` is called before the artifact is read, and again before it is recorded.
        """
        check()
        entry = self._expected_entry(node, self.dependencies(node) if before is None else before)
        payload = self.project.artifact(node.address) / "payload"
        known = {payload / name: found for name, found in (seen or {}).items()}
        self.cache.remember({path: found.md5 for path, found in known.items() if found.md5 and found.is_of(path)})
        places = [self._place(node, out["path"]) for out in entry["outs"]]
        for place in places:  # before the lock is taken
            self.cache.hashed(place, beat)
        with self.repository.locked():
            for place in places:
                self.cache.add(place, beat)
            fault_point("commit cached")
            self._record(node, entry, check)

    def open_object(self, md5: str) -> BinaryIO:
        """A file's verified bytes, from this machine's cache or else from the remote.

        Raises:
            LedgerError: neither has it, or both have other bytes under its name.
        """
        stream = self.remote.open(md5)
        if stream is not None:
            return stream
        remote = self.remote.name
        holds = f"neither this machine's cache nor the remote {remote!r} holds" if remote else "this machine's cache does not hold"
        raise LedgerError(f"{holds} an intact object {md5}: add the DVC remote that has it, or rerun the stage at that commit")

    def push(self, node: Node, progress: ProgressCallback = silent) -> int:
        """Send the recorded artifact of a stage to the remote; return how many objects were new there."""
        entry = self.locks.entry(node.address)
        outs = self._outs(node, entry)
        return self.remote.send(outs.values(), node.address, progress, entry.size) if entry and outs else 0

    def fetch_past(self, entry: Entry | None = None) -> bool:
        """Fetch the remote's run cache; an unreachable remote counts as empty, and the user is notified."""
        try:
            return self.remote.fetch_past(entry)
        except RemoteError as error:
            self.notice(str(error))
            return False

    def notice(self, text: str, *, urgent: bool = False) -> None:
        """Register a message to show after the run, or also during it."""
        with self._mutex:
            self.notices[text] = None
        self.noticed(text, urgent)

    # --- stages ---------------------------------------------------------------------------------------------------------

    def _place(self, node: Node, path: str) -> Path:
        """A path of a stage's entry, which is relative to its `dvc.yaml`."""
        return Path(os.path.normpath(self.project.root / os.path.dirname(pipeline_file(node.recipe)) / path))

    def _input(self, node: Node, path: str, beat: Beat) -> Output | None:
        """The current state of a dependency; without local files, the recorded one; None if there is neither."""
        place = self._place(node, path)
        source = next((file for file in node.files if self.project.root / file == place), None)
        if source is not None:
            here = place_of(self.project.root, source)
            if not here.exists():
                entry = self.locks.entry(node.address)
                return next((_output(dep) for dep in entry.deps if dep.path == path and dep.md5), None) if entry else None
            source_files(here)  # DVC would wait for a pipe, and fail at a circle of links
            return self.cache.hashed(here, beat)
        return self.cache.hashed(place, beat) if os.path.lexists(place) else self._recorded_output(place)

    def _recorded_output(self, place: Path) -> Output | None:
        """A part of an artifact as the `dvc.lock` of its stage records it; None for paths that are not artifacts."""
        if not place.is_relative_to(self.project.artifacts):
            return None
        address = place.parent.relative_to(self.project.artifacts).as_posix()
        entry, base = self.locks.entry(address), (self.project.root / pipeline_file(address.partition("/")[0])).parent
        found = next((out for out in entry.outs if Path(os.path.normpath(base / out.path)) == place), None) if entry else None
        return None if found is None or found.md5 is None else _output(found)

    def _expected_entry(self, node: Node, dependencies: Dependencies) -> dict[str, Any]:
        """The stage's entry in `dvc.lock`, as DVC writes it, without the hashes of its outputs."""
        compiled = compiled_stage(node)
        deps = [dependencies[path] for path in sorted(compiled.get("deps", ()))]
        entry = {
            "cmd": compiled["cmd"],
            "deps": [{name: dep[name] for name in ("path", "hash", "md5", "size", "nfiles", "isexec") if name in dep} for dep in deps],
            "params": {path: {node.name: node.identity()} for param in compiled["params"] for path in param},
            "outs": [{"path": path} for path in sorted(compiled["outs"])],
        }
        return {name: part for name, part in entry.items() if part}

    def _outs(self, node: Node, entry: LockEntry | None) -> dict[Path, str]:
        """The objects of the stage's outputs in an entry, by place; none if it does not have all of them."""
        found = {out.path: out.md5 for out in entry.outs if out.md5} if entry else {}
        paths = compiled_stage(node)["outs"]
        return {self._place(node, path): found[path] for path in paths} if found.keys() >= set(paths) else {}

    def _candidates(self, node: Node, expected: Entry, *, fetch: bool) -> Iterator[LockEntry]:
        """Entries with the same command, dependencies, parameters and outputs; `dvc.lock` first, then the run cache.

        `fetch`: if no local entry suffices, also query the remote's run cache.
        """
        recorded, wanted = self.locks.entry(node.address), parse_entry(expected, node.address)
        same = recorded and (recorded.cmd, recorded.params, _md5s(recorded.deps)) == (wanted.cmd, wanted.params, _md5s(wanted.deps))
        with self.repository.reading():
            found = ([recorded] if recorded and same else []) + self.locks.past(expected)
        yield from (entry for entry in found if self._outs(node, entry))
        if fetch and self.fetch_past(expected):
            yield from (new for new in self.locks.past(expected) if new not in found and self._outs(node, new))

    def _has_other_key(self, entry: LockEntry, key: str) -> bool:
        """Whether the record among an entry's outputs has another key, so that nothing else need be fetched; False if unreadable."""
        with suppress(LedgerError, ArtifactError):
            record = self.remote.record(entry)
            return record is not None and record.key != key
        return False

    def _is_of_other_code(self, node: Node, entry: LockEntry) -> bool:
        """Whether the code that decided an entry's result has changed; False if its `run.json` is unreadable."""
        if self.any_code or not has_deciding_code(node):
            return False
        with suppress(LedgerError, ArtifactError):
            run = self.remote.run(entry)
            return run is not None and bool(self._changed_since(node, run))
        return False

    def _fetch(self, node: Node, entry: LockEntry, progress: ProgressCallback) -> bool:
        """Whether the cache holds an entry's outputs, or the remote has provided them."""
        oids = self._outs(node, entry).values()
        if self.cache.holds(oids):
            return True
        try:
            if self.remote.fetch(oids, progress, entry.size):
                return True
        except (RemoteError, ArtifactError) as error:
            self.notice(str(error))
            return False
        if self.remote.name is not None:
            self.notice(f"{node.address} is recorded, but files of it are missing or damaged in the remote {self.remote.name!r}")
        return False

    def _is_proven(self, node: Node, entry: LockEntry, key: str, beat: Beat) -> bool:
        """Whether the restored files are undamaged and of this key; damaged cache objects are deleted."""
        parts = entry.objects
        payload = [parts.pop("payload")]
        damaged = self.cache.lacks(self.cache.names(parts.values()))
        artifact = intact(self.project.artifact(node.address), verify=True, beat=beat)
        if artifact is None:
            self.cache.lacks(self.cache.names(payload), beat)
        return artifact is not None and artifact.record.key == key and not damaged

    def _record(self, node: Node, expected: Entry, check: Check, beat: Beat = silent) -> None:
        """Record the stage with the outputs in place."""
        places = {out["path"]: self._place(node, out["path"]) for out in expected["outs"]}
        outs = [{"path": path, **(self.cache.hashed(place, beat) or {})} for path, place in places.items()]
        with self.repository.locked():
            check()
            self.locks.write(node.address, {**expected, "outs": outs})

    def _shown(self, place: Path) -> str:
        """A dependency for display: the address of a stage, or a project file."""
        relative = Path(os.path.relpath(place, self.project.root))
        if relative.parts[0] == "artifacts" and relative.name == "payload":
            return "/".join(relative.parts[1:3])
        return relative.as_posix()


def has_all_parts(artifact: Path) -> bool:
    """Whether all five parts of an artifact exist, which a commit requires and a kill during a restore may prevent."""
    return all((artifact / part).exists() for part in PARTS)


def _output(recorded: LockOut) -> Output:
    return {"hash": "md5"} | recorded.model_dump(include={"md5", "size", "nfiles"}, exclude_none=True)


def _md5s(parts: Iterable[LockOut]) -> dict[str, str | None]:
    return {part.path: part.md5 for part in parts}


def _parameter_changes(node: Node, recorded: Mapping[str, Any]) -> list[str]:
    """Identity fields that differ from the recorded ones, with both values."""
    before, now = dict(leaves(recorded)), dict(leaves({node.name: node.identity()}))
    changes = [
        f"{name.removeprefix(f'{node.name}.').removeprefix('config.')} {before.get(name, '(absent)')} -> {now.get(name, '(absent)')}"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name)
    ]
    return [f"parameters changed: {', '.join(changes)}"] if changes else []
