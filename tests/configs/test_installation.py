"""Remedies fit how Pedigree was installed: `make setup` would build a second environment beside any but a clone's own."""

import json
import sys
from pathlib import Path

import pytest

from pedigree.configs.base import installation

CLONE = {"url": "file:///clones/my%20clone", "dir_info": {"editable": True}}
GIT = {"url": "https://host.example/pedigree", "vcs_info": {"vcs": "git", "commit_id": "c0ffee"}}


def installed(monkeypatch: pytest.MonkeyPatch, folder: Path, origin: dict, prefix: str) -> None:
    """An environment that holds Pedigree alone, from this origin."""
    info = folder / "pedigree-0.2.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: pedigree\nVersion: 0.2.0\n")
    (info / "INSTALLER").write_text("pip\n")
    (info / "direct_url.json").write_text(json.dumps(origin))
    monkeypatch.setattr(sys, "path", [str(folder)])
    monkeypatch.setattr(sys, "prefix", prefix)
    installation.is_clone.cache_clear()


@pytest.fixture(autouse=True)
def forget():
    yield
    installation.is_clone.cache_clear()


@pytest.mark.parametrize(
    ("origin", "prefix", "packages", "other"),
    [
        (CLONE, "/clones/my clone/.venv", "run `make setup`", "run `make setup`"),
        (CLONE, "/venv", "run `pip install --editable '/clones/my clone[train]'`", "run `fetch`"),
        (GIT, "/venv", "run `pip install 'pedigree[train] @ git+https://host.example/pedigree@c0ffee'`", "run `fetch`"),
        ({}, "/venv", "run `pip install 'pedigree[train]==0.2.0'`", "run `fetch`"),
    ],
    ids=["clone", "image", "git", "wheel"],
)
def test_the_remedy_installs_into_this_environment(monkeypatch, tmp_path, origin, prefix, packages, other):
    installed(monkeypatch, tmp_path, origin, prefix)
    assert installation.missing("train") == packages and installation.set_up("fetch") == other


@pytest.mark.parametrize(("origin", "folder"), [(CLONE, "/clones/my clone"), (GIT, "SITE/pedigree")], ids=["image", "git"])
def test_a_machine_without_a_gpu_gets_the_lock_for_the_cpu(monkeypatch, tmp_path, origin, folder):
    installed(monkeypatch, tmp_path, origin, "/venv")
    lock = f"{folder.replace('SITE', str(tmp_path))}/requirements/cpu.txt"
    said = installation.missing("train,serve", gpu=False)
    assert said == f"run `pip install --no-deps -r '{lock}'` after installing the CPU build of torch (docs/install.md)"
