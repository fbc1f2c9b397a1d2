"""Code on its way to another machine: it arrives as it was, and nothing else does."""

import base64
import hashlib
import json
import subprocess

import pytest

from pedigree.configs.base.frozen import digest
from pedigree.data.artifacts import provenance
from pedigree.data.artifacts.artifacts import ArtifactError
from pedigree.data.artifacts.provenance import code_files, code_sha256, packed, unpacked


def sent(files: dict[str, bytes]) -> tuple[bytes, str]:
    """(what somebody has sent, the hash that it has)."""
    sha256 = digest(sorted([name, hashlib.sha256(data).hexdigest()] for name, data in files.items()))
    return json.dumps({name: base64.b64encode(data).decode() for name, data in files.items()}).encode(), sha256


def test_all_of_our_code_arrives_as_it_was() -> None:
    files = code_files()
    found = unpacked(packed(files), code_sha256(files), "code")
    assert found == {name: path.read_bytes() for name, path in files.items()} and "pedigree/stages/sft/run.py" in found


@pytest.mark.parametrize(
    "name",
    ["torch.py", "sitecustomize.py", "pedigree/stages/../torch.py", "/etc/passwd", "pedigree/requirements/cpu.py",
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
