"""Hashes of files: both right for any size, and no longer believed once the file looks different."""

import hashlib
import os
from pathlib import Path

import pytest

from pedigree.data.store.hashing import PIECE_BYTES, SMALL_BYTES, Hashed, hash_files


@pytest.mark.parametrize("size", [0, 1, SMALL_BYTES, SMALL_BYTES + 1, PIECE_BYTES, PIECE_BYTES + 1, 2 * PIECE_BYTES + SMALL_BYTES + 7])
def test_both_hashes_are_those_of_hashlib(tmp_path: Path, size: int) -> None:
    raw = os.urandom(size)
    (tmp_path / "file").write_bytes(raw)
    found = hash_files([tmp_path / "file"], md5=True)[tmp_path / "file"]
    assert (found.size, found.sha256) == (size, hashlib.sha256(raw).hexdigest())
    assert found.md5 == hashlib.md5(raw, usedforsecurity=False).hexdigest()


def test_many_files_keep_their_own_hashes(tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}" for number in range(20)]
    for number, path in enumerate(paths):
        path.write_bytes(bytes([number]) * (number * 100_003))
    found = hash_files(paths, md5=True)
    assert list(found) == paths
    for path in paths:
        assert found[path].sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
        assert found[path].md5 == hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()


def replaced(path: Path) -> None:
    (path.parent / "other").write_text("one")
    os.utime(path.parent / "other", ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
    os.replace(path.parent / "other", path)


@pytest.mark.parametrize("change", [lambda path: path.write_text("other"), lambda path: os.utime(path, ns=(1, 1)), replaced, Path.unlink])
def test_a_file_that_looks_different_is_not_the_one_that_was_hashed(tmp_path: Path, change) -> None:
    path = tmp_path / "file"
    path.write_text("one")
    found: Hashed = hash_files([path])[path]
    assert found.is_of(path)
    change(path)
    assert not found.is_of(path)


class ReplacedWhenOpened(type(Path())):
    """A file that another process replaces just before it is opened."""

    def open(self, *arguments, **more):
        other = Path(f"{self}.new")
        other.write_text("longer")
        os.replace(other, self)
        return super().open(*arguments, **more)


def test_size_and_inode_are_those_of_the_file_that_was_read(tmp_path: Path) -> None:
    path = ReplacedWhenOpened(tmp_path / "file")
    (tmp_path / "file").write_text("one")
    found = hash_files([path])[path]
    assert found.sha256 == hashlib.sha256(b"longer").hexdigest()
    assert found.size == len("longer") and found.is_of(tmp_path / "file")
