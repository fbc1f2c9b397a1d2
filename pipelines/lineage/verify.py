"""Verify every file against its record, and every record against its ancestors.

All bytes are rehashed. DVC's hash database is not used, since it identifies files by time stamps and would miss a change that preserves
them.
"""

import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import BinaryIO

from pedigree.configs.base.kind import MODELS
from pedigree.configs.base.project import Project
from pedigree.configs.language.compile import pipeline_file
from pedigree.configs.language.kinds import KINDS
from pedigree.data.artifacts.artifacts import (
    SIGNATURE,
    SUMS,
    ArtifactError,
    Record,
    intact,
    load_record,
    read_lineage,
    read_patches,
    read_run,
    without_places,
)
from pedigree.data.artifacts.chain import lineage_problems, record_problems
from pedigree.data.store.untrusted import LIST_BYTES, MIB, NotPlain, inside, open_plain, parse_listing, plain_files, read_plain
from pedigree.pipelines.ledger.cache import md5_of_bytes
from pedigree.pipelines.ledger.ledger import Ledger
from pedigree.pipelines.ledger.lock_files import Recorded, recorded
from pedigree.pipelines.ledger.remote import Remote
from pedigree.pipelines.lineage import ancestry
from pedigree.pipelines.quantities import counted, size

PIECE_BYTES = 1 << 20
SUMS_BYTES = 256 * MIB
CODE = (".py", ".pyc", ".so", ".dll", ".sh")
PICKLES = (".bin", ".ckpt", ".joblib", ".pickle", ".pkl", ".pt", ".pth")


@dataclass(frozen=True)
class Discrepancy:
    """A deviation from a record."""

    file: str
    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.file} {self.what}: {self.remedy}"


@dataclass
class Verification:
    """Problems found by a verification, and the amount of data read."""

    problems: list[Discrepancy] = field(default_factory=list)
    artifacts: int = 0
    files: int = 0
    read_bytes: int = 0
    seconds: float = 0.0
    absent: int = 0
    """Objects recorded in a lock but missing from the cache, which is not a problem."""
    unpushed: int = 0
    """Objects recorded in a lock but missing from the remote, which is not a problem."""
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    report: Callable[[int], None] = field(default=lambda count: None, repr=False)
    """Receives the number of bytes read so far."""

    def summary(self) -> str:
        speed = self.read_bytes / self.seconds if self.seconds else 0.0
        found = counted(len(self.problems), "problem") if self.problems else "all as recorded"
        read = f"{self.files} files and objects, {size(self.read_bytes)} at {size(int(speed))}/s"
        absent = f"; {self.absent} objects are not in the cache" if self.absent else ""
        unpushed = f"; {self.unpushed} objects are not in the remote" if self.unpushed else ""
        return f"{found}: {self.artifacts} artifacts, {read}{absent}{unpushed}"


Check = Callable[[Verification], Iterable[Discrepancy]]
"""Checks one file or object; runs in any thread."""


def verify_folders(folders: Iterable[Path], report: Callable[[int], None] = lambda count: None) -> Verification:
    """Verify artifact folders and exported folders, without a project. `report` receives the number of bytes read so far.

    Raises:
        ArtifactError: a folder has no record.
    """
    verdict = Verification(report=report)
    checks: list[Check] = []
    for folder in folders:
        checks += _folder_checks(folder, folder.name, verdict)
    return _run(checks, verdict)


def verify_project(
    project: Project,
    addresses: Iterable[str] | None = None,
    *,
    folders: Iterable[Path] = (),
    remote: bool = True,
    report: Callable[[int], None] = lambda count: None,
) -> Verification:
    """Verify artifacts (default: all that exist or are recorded in a `dvc.lock`), their objects in the cache and, if configured, in the
    remote.

    `folders` are additional artifact or export folders; `report` receives the number of bytes read so far.

    Raises:
        ArtifactError: one of `folders` has no record.
        LedgerError: a `dvc.lock` cannot be read.
    """
    verdict = Verification(report=report)
    with closing(Ledger(project, looking=True)) as ledger:
        entries = recorded(project)
        chosen = {*ancestry.addresses(project), *(entry.address for entry in entries)} if addresses is None else set(addresses)
        checks: list[Check] = [check for folder in folders for check in _folder_checks(folder, folder.name, verdict)]
        for address in sorted(chosen):
            if (project.artifact(address) / "record.json").is_file():
                checks += _folder_checks(project.artifact(address), address, verdict)
                checks.append(_parameters_check(ledger, address))
        owners: dict[str, str] = {}
        for entry in entries:
            if entry.address in chosen:
                owners.setdefault(entry.md5, entry.address)
                if entry.part != "payload" and project.artifact(entry.address).is_dir():  # the payload is checked by sha256
                    checks.append(_lock_check(entry, ledger.cache.path(entry.md5)))
        for md5, owner in _objects(owners, lambda md5: _read_bytes(ledger.cache.path(md5))):
            path, remedy = ledger.cache.path(md5), "`pedigree run` deletes it and rebuilds the stage when needed"
            checks.append(_object_check(partial(path.open, "rb"), path.exists, md5, f"cache object {md5} of {owner}", remedy))
        if remote:
            checks += _remote_checks(ledger.remote, owners, verdict)
        return _run(checks, verdict)


def _run(checks: list[Check], verdict: Verification) -> Verification:
    began = time.monotonic()
    with ThreadPoolExecutor(min(32, 2 * len(os.sched_getaffinity(0)))) as pool:  # hashing releases the GIL
        for problems in pool.map(lambda check: list(check(verdict)), checks):
            verdict.problems += problems
    verdict.seconds = time.monotonic() - began
    verdict.problems = sorted(set(verdict.problems), key=lambda problem: (problem.file, problem.what))
    return verdict


# --- folders -----------------------------------------------------------------------------------------------------------


def _folder_checks(folder: Path, name: str, verdict: Verification) -> Iterator[Check]:
    """One check per payload file, and one for the records; problems that need no hash are added to `verdict`."""
    exported = ancestry.is_exported(folder)
    records, payload = (folder / "pedigree", folder) if exported else (folder, folder / "payload")
    remedy = "export it again" if exported else "`pedigree run` restores or rebuilds it"
    shown = name if exported else f"artifacts/{name}" if "/" in name else name
    if not (records / "record.json").is_file():
        raise ArtifactError(f"{folder} is neither an artifact nor an export: it has no record.json")
    verdict.artifacts += 1
    found = verdict.problems
    try:
        record = load_record(inside(folder, "pedigree/record.json" if exported else "record.json"))
    except (OSError, ArtifactError) as error:
        found.append(Discrepancy(f"{shown}/{records.relative_to(folder) / 'record.json'}", f"cannot be read ({error})", remedy))
        return
    place = shown if exported else f"{shown}/payload"
    try:
        present = plain_files(payload)
    except (OSError, ArtifactError) as error:
        found.append(_unreadable(error, payload, place, remedy))
        return
    yield lambda verdict: _record_check(records, record, f"{shown}/{records.relative_to(folder)}".removesuffix("/."), remedy)
    promised = recorded = {entry.path: entry.sha256 for entry in record.files}
    if exported:
        sums = _sums(folder / SUMS)  # entries of absent files outside the payload are ignored
        wrong = sorted(path for path, sha256 in recorded.items() if sums.get(path) != sha256)
        if wrong:
            found.append(Discrepancy(f"{shown}/{SUMS}", f"is missing, damaged, or contradicts the record on {wrong[0]}", remedy))
        promised = {name: sha256 for name, sha256 in sums.items() if name in present or _is_inside(payload, name)} | recorded
        strange = sorted(sums.keys() - promised.keys())
        if strange:
            found.append(Discrepancy(f"{shown}/{SUMS}", f"names {strange[0][:80]!r}, which is outside the folder", remedy))
    yield lambda verdict: _meaning(record, present, place)
    for relative in present:
        if relative not in promised and not (exported and relative in (SUMS, SIGNATURE)):
            nowhere = f"is in neither the record nor {SUMS}" if exported else "is not in the record"
            found.append(Discrepancy(f"{place}/{relative}", nowhere, remedy))
    for relative, sha256 in promised.items():
        witness = "the record" if relative in recorded else SUMS
        yield _file_check(payload / relative, "sha256", sha256, f"{place}/{relative}", remedy, witness)


def _unreadable(error: Exception, folder: Path, shown: str, remedy: str) -> Discrepancy:
    """Why a folder's files cannot be listed, naming the file that an artifact must not contain if that is the cause."""
    if isinstance(error, NotPlain):
        return Discrepancy(os.path.normpath(f"{shown}/{error.path.relative_to(folder).as_posix()}"), error.what, remedy)
    return Discrepancy(shown, f"cannot be read ({error})", remedy)


def _sums(path: Path) -> dict[str, str]:
    """File → sha256 from `sha256sum` output; empty if unreadable."""
    try:
        lines = [line.partition("  ") for line in read_plain(path, SUMS_BYTES).decode().split("\n")]
    except (ArtifactError, ValueError):
        return {}
    return {name: sha256 for sha256, _, name in lines if name}


def _is_inside(folder: Path, name: str) -> bool:
    try:
        inside(folder, name)
    except ArtifactError:
        return False
    return True


def _meaning(record: Record, present: Mapping[str, Path], place: str) -> list[Discrepancy]:
    """Problems that hashes do not reveal: an unknown stage kind, and model files that execute code when loaded."""
    found = []
    if record.kind not in KINDS:
        unknown = f"has stage kind {record.kind!r}, which this version does not know"
        found.append(Discrepancy(place, unknown, "verify it with the version that made it"))
    for name, path in present.items() if record.type in MODELS else ():
        what = "is code" if name.endswith(CODE) else "is a pickle and may execute code" if _is_pickle(name, path) else ""
        if what:
            found.append(Discrepancy(f"{place}/{name}", what, "do not load it unless you trust its author; weights should be safetensors"))
    return found


def _is_pickle(name: str, path: Path) -> bool:
    """Detect a pickle by file name or by its header (protocol 2 or later); torch stores one in a zip file."""
    try:
        with open_plain(path) as stream:
            start = stream.read(512)
    except (OSError, ArtifactError):  # which the check of its hash reports
        start = b""
    return name.endswith(PICKLES) or (start[:1] == b"\x80" and start[1:2] in b"\x02\x03\x04\x05") or b"data.pkl" in start


def _record_check(records: Path, record: Record, shown: str, remedy: str) -> list[Discrepancy]:
    found = []
    try:
        found += [Discrepancy(f"{shown}/record.json", f"contradicts itself ({problem})", remedy) for problem in record_problems(record)]
        lineage = read_lineage(records / "lineage.json")
        found += [Discrepancy(f"{shown}/lineage.json", f"is broken ({problem})", remedy) for problem in lineage_problems(record, lineage)]
        read_run(records / "run.json")
        read_patches(records)
    except (ValueError, ArtifactError) as error:
        found.append(Discrepancy(f"{shown}: lineage.json, run.json or record.json", f"cannot be read ({error})", remedy))
    return found


def _file_check(path: Path, algorithm: str, promised: str, shown: str, remedy: str, witness: str = "the record") -> Check:
    def check(verdict: Verification) -> list[Discrepancy]:
        try:
            with open_plain(path) as stream:
                found = _hash(stream, algorithm, verdict)
        except FileNotFoundError:
            return [Discrepancy(shown, "is missing", remedy)]
        except (OSError, ArtifactError) as error:
            return [Discrepancy(shown, f"cannot be read ({getattr(error, 'strerror', None) or error})", remedy)]
        return [] if found == promised else [Discrepancy(shown, f"has a different {algorithm} than in {witness}", remedy)]

    return check


def _hash(stream: BinaryIO, algorithm: str, verdict: Verification) -> str:
    digest = hashlib.new(algorithm, usedforsecurity=algorithm != "md5")
    while piece := stream.read(PIECE_BYTES):
        digest.update(piece)
        with verdict.lock:
            verdict.read_bytes += len(piece)
            verdict.report(verdict.read_bytes)
    with verdict.lock:
        verdict.files += 1
    return digest.hexdigest()


# --- DVC storage -------------------------------------------------------------------------------------------------------


def _parameters_check(ledger: Ledger, address: str) -> Check:
    """Check a stage's parameters in `dvc.lock` against its record."""
    recipe, _, name = address.partition("/")
    file = pipeline_file(recipe).removesuffix(".yaml") + ".lock"
    entry = ledger.locks.entry(address)

    def check(verdict: Verification) -> list[Discrepancy]:
        artifact = intact(ledger.project.artifact(address))
        if artifact is None or record_problems(artifact.record):
            return []  # reported by other checks
        record = artifact.record
        named = [without_places(values[name]) for values in (entry.params if entry else {}).values() if name in values]
        made = {"kind": record.kind, "version": record.version, "config": without_places(record.config)}
        if all({field: values.get(field) for field in made} == made for values in named):
            return []
        return [Discrepancy(file, f"has different parameters for {name} than its record", "`pedigree run` rebuilds it")]

    return check


def _lock_check(entry: Recorded, listing: Path) -> Check:
    """Check a part of an artifact against `dvc.lock`, which identifies a folder by the md5 of its file list in the cache."""
    shown, remedy = f"artifacts/{entry.address}/{entry.part}", "`pedigree run` restores it"
    if not entry.md5.endswith(".dir"):
        return _file_check(entry.path, "md5", entry.md5, shown, remedy, "dvc.lock")

    def check(verdict: Verification) -> list[Discrepancy]:
        found = {}
        try:
            there = plain_files(entry.path)
        except (OSError, ArtifactError) as error:
            return [_unreadable(error, entry.path, shown, remedy)]
        for name, member in there.items():
            try:
                with open_plain(member) as stream:
                    found[name] = _hash(stream, "md5", verdict)
            except OSError as error:
                return [Discrepancy(f"{shown}/{name}", f"cannot be read ({error.strerror or error})", remedy)]
        members = [{"md5": md5, "relpath": name} for name, md5 in sorted(found.items())]
        if f"{md5_of_bytes(json.dumps(members).encode())}.dir" == entry.md5:
            return []
        raw = _read_bytes(listing) or b""
        if md5_of_bytes(raw) != entry.md5.removesuffix(".dir"):  # without the list, the differing file is unknown
            return [Discrepancy(shown, "has different files than in dvc.lock", remedy)]
        try:
            promised = parse_listing(raw, f"object {entry.md5}")
        except ArtifactError as error:
            return [Discrepancy(shown, f"has an invalid file list ({error})", "restore dvc.lock from git")]
        differing = sorted(name for name in promised.keys() | found.keys() if promised.get(name) != found.get(name))
        return [Discrepancy(f"{shown}/{name}", _difference(name, promised, found), remedy) for name in differing]

    return check


def _difference(name: str, promised: dict[str, str], found: dict[str, str]) -> str:
    if name not in found:
        return "is missing"
    return "has a different md5 than in dvc.lock" if name in promised else "is not in dvc.lock"


def _remote_checks(remote: Remote, owners: dict[str, str], verdict: Verification) -> list[Check]:
    """Check the objects in the remote; an unreachable remote is reported once."""
    name = remote.name
    if name is None:
        return []
    if refusal := remote.refusal():
        verdict.problems.append(Discrepancy(f"remote {name}", "cannot be read", f"{refusal}; or skip it with --no-remote"))
        return []
    try:
        there = remote.objects()

        def read(md5: str) -> bytes | None:
            if not there.exists(md5):
                return _read_bytes(remote.cache.path(md5))
            with there.open(md5) as stream:
                return stream.read()

        objects = _objects(owners, read)
    except Exception as error:  # each storage backend has its own exceptions
        remedy = "check its URL and credentials, or skip it with --no-remote"
        verdict.problems.append(Discrepancy(f"remote {name}", f"cannot be read ({error})", remedy))
        return []
    remedy = "delete it there and `dvc push` a valid copy"
    named = [(md5, f"remote object {name}/{md5} of {owner}") for md5, owner in objects]
    return [_object_check(partial(there.open, md5), partial(there.exists, md5), md5, shown, remedy, away=True) for md5, shown in named]


def _objects(owners: dict[str, str], read: Callable[[str], bytes | None]) -> list[tuple[str, str]]:
    """Deduplicated (md5, stage) of every object, including members listed by folder objects."""
    found = dict(owners)
    for md5, owner in owners.items():
        if md5.endswith(".dir"):
            try:
                for name, member in parse_listing(read(md5) or b"[]", f"object {md5}").items():
                    found.setdefault(member, f"{owner} ({name})")
            except ArtifactError:  # damaged; its own check reports it
                continue
    return sorted(found.items())


def _object_check(
    open_object: Callable[[], BinaryIO], exists: Callable[[], bool], md5: str, shown: str, remedy: str, *, away: bool = False
) -> Check:
    def check(verdict: Verification) -> list[Discrepancy]:
        try:
            if not exists():
                with verdict.lock:
                    verdict.absent += not away
                    verdict.unpushed += away
                return []
            with open_object() as stream:
                found = _hash(stream, "md5", verdict)
            if md5.endswith(".dir") and found == md5.removesuffix(".dir"):
                with open_object() as stream:
                    parse_listing(stream.read(LIST_BYTES + 1), "it")
        except ArtifactError as error:
            return [Discrepancy(shown, f"has an invalid file list ({error})", remedy)]
        except Exception as error:  # from any storage backend; the other objects are still checked
            return [Discrepancy(shown, f"cannot be read ({error})", "retry; if it persists, " + remedy)]
        return [] if found == md5.removesuffix(".dir") else [Discrepancy(shown, "does not match the hash in its name", remedy)]

    return check


def _read_bytes(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
