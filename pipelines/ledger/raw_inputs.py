"""Raw inputs in the remote: files and folders that recipes name, by their sha256, so that a clone can rebuild from the remote alone.

    pedigree/inputs/SHA256         a file
    pedigree/inputs/SHA256.json    a folder: the sha256 of each of its files, by path

Records name a raw input by the same hash, so that `run`, `pull` and `reproduce` find it whatever its path was.
"""

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pedigree.configs.base.paths import place_of, written_of
from pedigree.configs.base.project import Project
from pedigree.configs.language.graph import Node
from pedigree.data.artifacts.artifacts import write_json
from pedigree.data.artifacts.source_files import sha256_of
from pedigree.data.store.durable import rename, sync_tree
from pedigree.data.store.hashing import Hashed, hash_files
from pedigree.data.store.untrusted import LIST_BYTES, inside, parse_manifest, read_plain
from pedigree.pipelines.ledger.remote import Remote
from pedigree.pipelines.ledger.transfers import ProgressCallback, RemoteError

FOLDER = "pedigree/inputs"
LARGEST_INPUT = 1 << 40
"""Maximum size in bytes of a file that is fetched."""


REMEDY = "put it there, or send it from a machine that has it with `pedigree push RECIPE --inputs`"


@dataclass(frozen=True)
class RawInput:
    """A raw input of a finished stage."""

    name: str
    """As its recipe writes it."""
    sha256: str
    target: Path
    """Where a copy belongs in the project."""

    def __str__(self) -> str:
        return f"{self.name} with sha256 {self.sha256[:12]}"


def lacking(project: Project, node: Node, recorded: Mapping[str, str]) -> Iterator[RawInput]:
    """The raw inputs of a stage that are not on this machine, by their recorded hashes."""
    for file in node.files:
        if file in recorded and not place_of(project.root, file).exists():
            yield RawInput(written_of(file), recorded[file], inside(project.root, file))


def send(project: Project, remote: Remote, place: Path, hashed: Mapping[str, Hashed], progress: ProgressCallback) -> int:
    """Send a file or folder with these hashes, unchanged since; return how many files were new there."""
    new, done, total = 0, 0, sum(found.size for found in hashed.values())
    for name, found in hashed.items():
        progress(done, total)
        new += remote.put(place / name, f"{FOLDER}/{found.sha256}", found)
        done += found.size
    if "" not in hashed:
        project.private.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=project.private, prefix="sending-") as folder:
            listing = Path(folder) / "listing.json"
            write_json(listing, {name: found.sha256 for name, found in hashed.items()})
            new += remote.put(listing, f"{FOLDER}/{sha256_of(hashed)}.json")
    return new


def fetch(project: Project, remote: Remote, sha256: str, target: Path) -> bool:
    """Fetch the file or folder with this hash to a new place in a project, atomically; False if the remote does not have it.

    Raises:
        RemoteError: the remote cannot be used, or what it has does not match the hash.
        ArtifactError: its list of files names a path outside.
    """
    project.private.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=project.private, prefix="fetching-") as folder:
        built = Path(folder) / "input"
        if not _get(remote, sha256, built):
            listing = Path(folder) / "listing.json"
            if not remote.get(f"{FOLDER}/{sha256}.json", listing):
                return False
            files = parse_manifest(read_plain(listing, LIST_BYTES), f"the list of {sha256[:12]}")
            if sha256_of({name: Hashed(0, 0, 0, member) for name, member in files.items()}) != sha256:
                again = f"delete {FOLDER}/{sha256}.json there, and push it again with --inputs"
                raise RemoteError(f"the list of files of the raw input {sha256[:12]} is damaged in the remote: {again}")
            for name, member in files.items():
                file = inside(built, name)
                file.parent.mkdir(parents=True, exist_ok=True)
                if not _get(remote, member, file):
                    return False
            sync_tree(built)
        target.parent.mkdir(parents=True, exist_ok=True)
        rename(built, target)
    return True


def _get(remote: Remote, sha256: str, target: Path) -> bool:
    if not remote.get(f"{FOLDER}/{sha256}", target, LARGEST_INPUT):
        return False
    if hash_files([target])[target].sha256 != sha256:
        again = f"delete {FOLDER}/{sha256} there, and push it again with --inputs"
        raise RemoteError(f"the raw input {sha256[:12]} is damaged in the remote: {again}")
    return True
