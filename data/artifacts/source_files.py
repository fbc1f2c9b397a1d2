"""Rows and models that a recipe names by path, in the project or anywhere on this machine: what files they are, and their hashes.

Links are followed, because the user of the recipe chose the path; what leaves the machine has names and hashes only. Artifacts, which may
come from others, are read by `data/store/untrusted.py`, which follows none.
"""

import os
import stat
import time
from collections.abc import Mapping
from pathlib import Path

from pydantic import TypeAdapter

from pedigree.configs.base.frozen import digest
from pedigree.configs.base.paths import relative_path
from pedigree.data.artifacts.artifacts import content_hash, entries_of, write_json
from pedigree.data.store.hashing import Beat, Hashed, hash_files, silent
from pedigree.data.store.untrusted import LIST_BYTES, MOST_FILES, ArtifactError, NotPlain, read_as

REMEMBERED_BYTES = 64 << 20
"""Hashes of smaller files and folders are not stored: reading those again takes a moment."""
SETTLED_NS = 2_000_000_000
"""A file that changed less than this before it was read could change again without a new time, so its hash is not stored."""
_STORED = TypeAdapter(dict[str, tuple[int, Hashed]])


def source_files(path: Path) -> dict[str, Path]:
    """Relative path → file, sorted, of all files below a folder; of a file, `""` → the file. Links are followed.

    Raises:
        NotPlain: something is neither a file nor a folder, a link that leads nowhere or in a circle, or has an invalid name.
        ArtifactError: there are too many files.
    """
    found: dict[str, Path] = {}
    waiting: list[tuple[Path, str, frozenset[tuple[int, int]]]] = [(path, "", frozenset())]
    while waiting:
        place, name, above = waiting.pop()
        try:
            status = place.stat()
            if name:
                relative_path(name)
        except ValueError as error:
            raise NotPlain(place, f"has an invalid name ({error})") from error
        except OSError as error:
            if name and place.is_symlink():
                raise NotPlain(place, f"is a link that leads nowhere ({error.strerror}): remove it, or restore what it names") from error
            raise
        if stat.S_ISDIR(status.st_mode):
            here = (status.st_dev, status.st_ino)
            if here in above:
                raise NotPlain(place, "is a link to a folder that contains it: remove it")
            waiting += [(place / inner, f"{name}/{inner}" if name else inner, above | {here}) for inner in os.listdir(place)]
        elif stat.S_ISREG(status.st_mode):
            found[name] = place
        else:
            raise NotPlain(place, "is neither a file nor a folder (a pipe, a socket or a device): name a file or a folder of files")
        if len(found) + len(waiting) > MOST_FILES:
            raise ArtifactError(f"{path} holds more than {MOST_FILES} files")
    return dict(sorted(found.items()))


class KnownHashes:
    """Cached hashes as of `sha256_path`: a file is read again only if its stat fields change, including ctime, which cannot be reset."""

    def __init__(self) -> None:
        self._seen: dict[Path, tuple[int, Hashed]] = {}
        """File → (ctime in ns just before it was read, hashes)."""

    def sha256(self, path: Path, beat: Beat = silent, memory: Path | None = None) -> str:
        """SHA-256 of a file or folder, as in `sha256_path`, with links followed; arguments and errors as in `files`."""
        return sha256_of(self.files(path, beat, memory))

    def files(self, path: Path, beat: Beat = silent, memory: Path | None = None) -> dict[str, Hashed]:
        """The hashes of `source_files`.

        Args:
            path: the file or folder.
            beat: receives bytes hashed and total bytes.
            memory: folder that stores the hashes of large ones for other processes.

        Raises:
            ArtifactError: as in `source_files`.
        """
        files = source_files(path)
        changed = {file: file.stat().st_ctime_ns for file in files.values()}
        stored = memory and memory / f"{digest(str(path))[:32]}.json"
        if stored and any(file not in self._seen for file in changed):
            self._seen = _read(stored) | self._seen
        known = {file: self._seen[file] for file in changed if file in self._seen}
        new = [file for file, ctime in changed.items() if file not in known or known[file][0] != ctime or not known[file][1].is_of(file)]
        began = time.time_ns()
        known |= {file: (changed[file], found) for file, found in hash_files(new, beat=beat).items()}
        self._seen |= known
        if stored and new and sum(found.size for _, found in known.values()) >= REMEMBERED_BYTES:
            settled = {file: (ctime, found.as_json()) for file, (ctime, found) in known.items() if began - ctime > SETTLED_NS}
            write_json(stored, {str(file): entry for file, entry in settled.items()})
        return {name: known[file][1] for name, file in files.items()}


def sha256_of(files: Mapping[str, Hashed]) -> str:
    """SHA-256 of a source by the hashes of its files."""
    return files[""].sha256 if "" in files else content_hash(entries_of(files))


def _read(stored: Path) -> dict[Path, tuple[int, Hashed]]:
    """Stored hashes; none if there are none, or the file is damaged."""
    return {Path(name): found for name, found in (read_as(_STORED.validate_python, stored, LIST_BYTES) or {}).items()}
