"""Rows and models by path: what is read, what is refused before anything is opened, and how often files are hashed."""

import os
import threading
from pathlib import Path

import pytest

from pedigree.configs.base.paths import OutsidePath, place_of, source_path
from pedigree.configs.language.building import _files
from pedigree.configs.rows.row_sources import Files
from pedigree.data.artifacts import source_files as module
from pedigree.data.artifacts.artifacts import sha256_path
from pedigree.data.artifacts.source_files import KnownHashes, source_files
from pedigree.data.store.untrusted import ArtifactError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs/one").write_text("1")
    model = tmp_path / "model"
    (model / "inner").mkdir(parents=True)
    (model / "config.json").write_text("{}")
    (model / "inner/two").write_text("2")
    return model


def test_links_are_followed_and_hashed_as_what_they_lead_to(folder: Path, tmp_path: Path) -> None:
    (folder / "one").symlink_to("../blobs/one")  # as in the cache of the hub
    plain = tmp_path / "plain"
    (plain / "inner").mkdir(parents=True)
    for name, text in (("config.json", "{}"), ("inner/two", "2"), ("one", "1")):
        (plain / name).write_text(text)
    (tmp_path / "link").symlink_to(folder)
    assert list(source_files(folder)) == ["config.json", "inner/two", "one"]
    assert KnownHashes().sha256(tmp_path / "link") == KnownHashes().sha256(folder) == sha256_path(plain)
    assert KnownHashes().sha256(folder / "one") == sha256_path(plain / "one")


@pytest.mark.parametrize(("name", "problem"), [("pipe", "neither a file nor a folder"), ("gone", "leads nowhere"), ("loop", "contains it")])
def test_what_could_hang_or_vanish_is_refused_by_name(folder: Path, name: str, problem: str) -> None:
    place = folder / "inner" / name
    if name == "pipe":
        os.mkfifo(place)
    else:
        place.symlink_to("nowhere" if name == "gone" else "..")
    with pytest.raises(ArtifactError, match=problem) as refused:
        KnownHashes().sha256(folder)
    assert name in str(refused.value)
    if name == "pipe":
        with pytest.raises(ArtifactError, match="a pipe, a socket or a device"):
            KnownHashes().sha256(place)


def test_devices_are_not_read() -> None:
    with pytest.raises(ArtifactError, match="/dev/zero is neither"):
        KnownHashes().sha256(Path("/dev/zero"))


def test_large_files_are_hashed_once_by_all_processes_until_they_change(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []

    def counting(paths, **more):
        paths = list(paths)
        read.extend(path.name for path in paths)
        return hash_files(paths, **more)

    hash_files = module.hash_files
    monkeypatch.setattr(module, "hash_files", counting)
    monkeypatch.setattr(module, "REMEMBERED_BYTES", 1)
    monkeypatch.setattr(module, "SETTLED_NS", 3600 * 10**9)
    memory = tmp_path / "memory"
    first = KnownHashes().sha256(folder, memory=memory)
    assert len(read) == 2
    KnownHashes().sha256(folder, memory=memory)
    assert len(read) == 4, "files that have just changed could change again within the same time"
    monkeypatch.setattr(module, "SETTLED_NS", -1_000_000_000)
    KnownHashes().sha256(folder, memory=memory)
    assert KnownHashes().sha256(folder, memory=memory) == first and len(read) == 6
    (folder / "config.json").write_text('{"a": 1}')  # its time alone may be that of before
    assert KnownHashes().sha256(folder, memory=memory) != first and read[6:] == ["config.json"]
    next(memory.iterdir()).write_text("{")
    KnownHashes().sha256(folder, memory=memory)
    assert len(read) == 9


def test_a_path_outside_is_known_by_its_last_name_alone(tmp_path: Path) -> None:
    dumped = set()
    for written in ("/data/mine/rows.jsonl", "~/rows.jsonl", "../else/rows.jsonl"):
        made = Files.model_validate({"type": "files", "path": written})
        (name,) = _files(made.model_dump())
        assert isinstance(name, OutsidePath) and name.written == written
        dumped.add(made.model_dump_json())
    assert len(dumped) == 1 and "/data" not in dumped.pop()
    assert place_of(tmp_path, source_path("../else/rows.jsonl")) == tmp_path / "outside/rows.jsonl"
    assert place_of(tmp_path / "x", source_path(str(tmp_path))) == tmp_path


@pytest.mark.parametrize("bad", ["/", "~", "..", "data/..", "/data/a\nb", "../" + "x" * 300, "", "a//b"])
def test_paths_without_a_usable_name_are_refused(bad: str) -> None:
    with pytest.raises(ValueError, match=r"path|name|control|long"):
        source_path(bad)


def test_threads_hash_the_same_file_alike(folder: Path) -> None:
    known, found = KnownHashes(), set[str]()
    threads = [threading.Thread(target=lambda: found.add(known.sha256(folder))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 1
