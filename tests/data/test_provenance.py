"""Code on its way to another machine: it arrives as it was, and nothing else does."""

import base64
import hashlib
import json
import subprocess

import pytest

from pedigree.configs.base.frozen import digest
from pedigree.data.artifacts import provenance
from pedigree.data.artifacts.artifacts import ArtifactError
from pedigree.data.artifacts.provenance import CODE_ROOT, PACKAGES, code_files, code_sha256, packed, unpacked


def sent(files: dict[str, bytes]) -> tuple[bytes, str]:
    """(what somebody has sent, the hash that it has)."""
    sha256 = digest(sorted([name, hashlib.sha256(data).hexdigest()] for name, data in files.items()))
    return json.dumps({name: base64.b64encode(data).decode() for name, data in files.items()}).encode(), sha256


def test_all_of_our_code_arrives_as_it_was() -> None:
    files = code_files()
    found = unpacked(packed(files), code_sha256(files), "code")
    assert found == {name: path.read_bytes() for name, path in files.items()} and "pedigree/stages/sft/run.py" in found


@pytest.mark.integration
def test_all_files_of_a_clone_that_jobs_may_read_are_code():
    listed = subprocess.run(["git", "ls-files", "--", *PACKAGES, "requirements/*.txt"], cwd=CODE_ROOT, capture_output=True, text=True)
    tracked = {f"pedigree/{name}" for name in listed.stdout.split() if name.endswith(".txt") or not name.startswith("requirements/")}
    assert len(tracked) > 500 and tracked | {"pedigree/__init__.py"} <= code_files().keys()


ROWS = (
    "data/rows.jsonl", "data/rows.json", "data/mine/rows.parquet", "data/mine/notes.md", "data/.x.py", "configs/notes.md",
    "configs/rows.jsonl", "configs/recipes/notes.md", "configs/recipes/.mine.yaml", "configs/axolotl/sft.yaml", "configs/rubrics/old.yaml~",
)  # fmt: skip


def test_rows_and_notes_of_the_user_of_a_clone_are_no_code(tmp_path):
    """Rows as code would be copied into every snapshot, hashed by every rank, and uploaded with the checkpoints."""
    files = {name: path.read_bytes() for name, path in code_files().items()}
    for name, data in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    before = code_sha256(code_files(tmp_path))
    assert before == code_sha256(code_files()) and code_files(tmp_path).keys() == files.keys()
    for name in ROWS:
        (tmp_path / "pedigree" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "pedigree" / name).write_text("x")
    assert code_sha256(code_files(tmp_path)) == before and code_files(tmp_path).keys() == files.keys()
    for name in ("stages/mine/kind.py", "stages/mine/prompt.txt", "data/filters/mine.py", "configs/templates/mine.jinja"):
        (tmp_path / "pedigree" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "pedigree" / name).write_text("x")
        assert f"pedigree/{name}" in code_files(tmp_path), name


@pytest.mark.parametrize(
    "name",
    [*(f"pedigree/{name}" for name in ROWS),
     "torch.py", "sitecustomize.py", "pedigree/stages/../torch.py", "/etc/passwd", "pedigree/requirements/cpu.py",
     "pedigree/requirements/a/b.txt", "pedigree/stages/__pycache__/sft.cpython-311.pyc", "pedigree/stages", "pedigree/other.py",
     "stages/sft/run.py", "pedigree/pipelines/run/ensure.py"],
)  # fmt: skip
def test_a_file_that_is_none_of_our_code_is_refused_though_the_hash_is_right(name: str) -> None:
    with pytest.raises(ArtifactError, match="the store is not a valid code archive"):
        unpacked(*sent({name: b"x", "pedigree/stages/sft/run.py": b"y"}), "the store")


def test_other_bytes_are_refused() -> None:
    data, sha256 = sent({"pedigree/stages/sft/run.py": b"x"})
    assert unpacked(data, sha256, "it") == {"pedigree/stages/sft/run.py": b"x"}
    with pytest.raises(ArtifactError, match="it is not the code 000000000000"):
        unpacked(data, "0" * 64, "it")
    for other in (b"{", b"[]", b'{"pedigree/stages/sft/run.py": "%"}', b'{"pedigree/stages/sft/run.py": 1}', b"[" * 200_000):
        with pytest.raises(ArtifactError, match="it "):
            unpacked(other, sha256, "it")


@pytest.mark.integration
def test_a_driver_that_hangs_costs_no_finished_job_its_result(tmp_path, monkeypatch):
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nsleep 60\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    real = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda *given, **options: real(*given, **options | {"timeout": 0.2}))
    assert provenance.gpus() == [] and provenance.hardware.__wrapped__()["gpus"] == []
