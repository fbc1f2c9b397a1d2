import hashlib
import io
import zipfile

import pytest

from pedigree.configs.base.packaged import Asset
from pedigree.configs.base.problems import PedigreeError
from pedigree.data.artifacts import assets

pytestmark = pytest.mark.integration


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def wheel(content: bytes) -> bytes:
    """A wheel that pip accepts, with one data file."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("pedigree_test_asset/data.txt", content)
        archive.writestr("pedigree_test_asset-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: pedigree-test-asset\nVersion: 1.0\n")
        archive.writestr(
            "pedigree_test_asset-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("pedigree_test_asset-1.0.dist-info/RECORD", "")
    return buffer.getvalue()


@pytest.fixture
def publish(tmp_path, monkeypatch):
    """Offers an archive in a local folder, which pip is told to use, and declares it as the only asset."""
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
    monkeypatch.setenv("PEDIGREE_CACHE", str(tmp_path / "cache"))
    assets.verified.cache_clear()

    def declare(content: bytes = b"data", archive_sha256: str | None = None, member_sha256: str | None = None):
        packed = wheel(content)
        (shelf / "pedigree_test_asset-1.0-py3-none-any.whl").write_bytes(packed)
        asset = Asset(
            requirement="pedigree-test-asset==1.0",
            archive_sha256=archive_sha256 or sha256(packed),
            member="pedigree_test_asset/data.txt",
            sha256=member_sha256 or sha256(content),
            licence="none",
        )
        monkeypatch.setattr(assets, "ASSETS", {"test": asset})

    yield declare
    assets.verified.cache_clear()


def test_fetching_gives_the_file_once_and_a_damaged_one_is_not_handed_out(publish, tmp_path, monkeypatch, capsys):
    publish(b"data")
    with pytest.raises(PedigreeError, match="run `make setup`"):
        assets.path("test")
    assets.fetch()
    assert assets.path("test").read_bytes() == b"data"
    assert "downloading pedigree-test-asset==1.0" in capsys.readouterr().out
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))
    assets.fetch()
    assert "present" in capsys.readouterr().out
    assert not list((tmp_path / "cache").rglob(".download-*"))
    assets.path("test").write_bytes(b"dat@")
    assets.verified.cache_clear()
    with pytest.raises(PedigreeError, match="is damaged"):
        assets.path("test")


def test_another_archive_or_member_than_the_pinned_one_is_refused(publish, tmp_path):
    publish(archive_sha256=sha256(b"another"))
    with pytest.raises(PedigreeError, match="HASHES"):
        assets.fetch()
    publish(member_sha256=sha256(b"another"))
    with pytest.raises(PedigreeError, match="not the pinned"):
        assets.fetch()
    assert not any(path.is_file() for path in (tmp_path / "cache").rglob("*"))


def test_an_environment_without_pip_is_told_how_to_get_it(publish, monkeypatch):
    """Those of `uv venv` have none."""
    publish()
    monkeypatch.setattr(assets, "find_spec", lambda name: None)
    with pytest.raises(PedigreeError, match="pip, which downloads packaged data, is not installed here: run `python -m ensurepip`"):
        assets.fetch()


def test_a_registry_that_lacks_it_is_named_by_pips_own_words(publish, monkeypatch, tmp_path):
    publish()
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(PedigreeError, match=r"(?s)could not download pedigree-test-asset==1\.0.*No matching distribution"):
        assets.fetch()
