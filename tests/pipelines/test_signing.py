"""Signatures of exported folders: who vouches for them, and that nothing of them can be changed unseen."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from handmade import made_at
from typer.testing import CliRunner

from pedigree.configs.base.problems import UsageProblem
from pedigree.data.artifacts.artifacts import SIGNATURE
from pedigree.data.store.untrusted import ArtifactError
from pedigree.pipelines.cli.main import app
from pedigree.pipelines.lineage.verify import verify_folders
from pedigree.pipelines.publish.export import export
from pedigree.pipelines.publish.signing import PASSWORD, Signer, check


def keys(folder: Path, name: str, password: bytes | None = None) -> tuple[Path, Path]:
    """A pair of PEM files."""
    key = ec.generate_private_key(ec.SECP256R1())
    hidden = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
    private, public = folder / f"{name}.pem", folder / f"{name}.pub"
    private.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, hidden))
    public.write_bytes(key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo))
    return private, public


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """A folder with a pair of keys and a signed export `model`."""
    folder = tmp_path_factory.mktemp("signing")
    project, _ = made_at(folder / "project")
    private, _ = keys(folder, "ours")
    export(project.artifact("tiny/sft"), "tiny/sft", folder / "model", signer=Signer(private))
    export(project.artifact("tiny/sft"), "tiny/sft", folder / "unsigned")
    return folder


@pytest.fixture
def model(lab, tmp_path):
    """A copy under another name, as it travels."""
    return Path(shutil.copytree(lab / "model", tmp_path / "copied"))


def test_a_signed_export_is_whole_and_vouched_for_by_its_key_alone(lab, model, tmp_path):
    files = {path for path in model.rglob("*") if path.is_file()}
    assert check(model, lab / "ours.pub") == len(files) - 1
    assert verify_folders([model]).problems == []
    assert not list(lab.glob(".model*")), "nothing is left behind"
    assert str(os.getpid()) not in (model / SIGNATURE).read_text(), "it was signed under its own name"
    _, other = keys(tmp_path, "other")
    with pytest.raises(ArtifactError, match=r"cannot be verified with other\.pub"):
        check(model, other)


@pytest.mark.parametrize(
    "name", ["model.safetensors", "README.md", "pedigree/record.json", "pedigree/run.json", "pedigree/lineage.json", "pedigree/SHA256SUMS"]
)
def test_a_flipped_byte_is_refused(lab, model, name):
    data = bytearray((model / name).read_bytes())
    data[len(data) // 2] ^= 1
    (model / name).write_bytes(bytes(data))
    with pytest.raises(ArtifactError, match=rf"\(changed since signing: {name}\)"):
        check(model, lab / "ours.pub")


@pytest.mark.parametrize("name", ["modeling.py", ".gitattributes", "pedigree/more.json"])
def test_a_file_more_or_less_is_refused(lab, model, name):
    (model / name).write_text("x")
    with pytest.raises(ArtifactError, match=name):
        check(model, lab / "ours.pub")
    (model / name).unlink()
    (model / "config.json").unlink()
    with pytest.raises(ArtifactError, match=r"config\.json"):
        check(model, lab / "ours.pub")


def test_a_signature_that_leaves_files_out_does_not_count(lab, model):
    """The library lets the signer say which files to ignore."""
    from model_signing import hashing, signing

    config = signing.Config().use_elliptic_key_signer(private_key=lab / "ours.pem")
    config.set_hashing_config(hashing.Config().set_ignored_paths(paths=[SIGNATURE, "model.safetensors"])).sign(model, model / SIGNATURE)
    (model / "model.safetensors").write_text("poison")
    with pytest.raises(ArtifactError, match=r"does not cover model\.safetensors"):
        check(model, lab / "ours.pub")


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", '{"dsseEnvelope": 3}', "\u0000", "[" * 5000])
def test_a_signature_that_is_none_is_refused(lab, model, text):
    (model / SIGNATURE).write_text(text)
    with pytest.raises(ArtifactError, match="cannot be verified"):
        check(model, lab / "ours.pub")


def test_a_signature_of_another_folder_is_refused(lab, model, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text("{}")
    (tmp_path / "other" / "pedigree").mkdir()
    Signer(lab / "ours.pem").sign(tmp_path / "other")
    shutil.copyfile(tmp_path / "other" / SIGNATURE, model / SIGNATURE)
    with pytest.raises(ArtifactError, match=r"changed since signing: README\.md, "):
        check(model, lab / "ours.pub")


def test_a_key_that_cannot_sign_is_refused_before_anything_is_written(lab, tmp_path, monkeypatch):
    secret, _ = keys(tmp_path, "secret", b"of three words")
    strange = rsa.generate_private_key(65537, 2048)
    pem = strange.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (tmp_path / "rsa.pem").write_bytes(pem)
    for wrong in (tmp_path / "nothing.pem", lab / "ours.pub", tmp_path / "rsa.pem", lab / "model" / "README.md"):
        with pytest.raises(UsageProblem, match="openssl ecparam"):
            Signer(wrong)
        with pytest.raises(UsageProblem, match=r"public key"):
            check(lab / "model", lab / "ours.pem" if wrong == lab / "ours.pub" else wrong)
    with pytest.raises(UsageProblem, match=PASSWORD):
        Signer(secret)
    monkeypatch.setenv(PASSWORD, "of three words")
    Signer(secret)


def test_the_commands_sign_verify_and_say_what_is_unsigned(lab, model, tmp_path, monkeypatch):
    def said(*arguments: object, code: int = 0) -> str:
        result = CliRunner().invoke(app, [str(argument) for argument in arguments])
        assert result.exit_code == code, result.output
        return result.output

    monkeypatch.chdir(lab / "project")
    assert f"signature: {SIGNATURE}" in said("export", "tiny/rlvr", tmp_path / "out", "--sign", lab / "ours.pem")
    assert "; unsigned." in said("export", "tiny/rlvr", tmp_path / "plain")
    monkeypatch.chdir(tmp_path)
    assert ": unsigned" in said("verify", tmp_path / "plain")
    assert "signed; use --signer KEY to verify the signer" in said("verify", tmp_path / "out")
    assert "signature matches ours.pub" in said("verify", tmp_path / "out", model, "--signer", lab / "ours.pub")
    refused = said("verify", tmp_path / "out", tmp_path / "plain", "--signer", lab / "ours.pub", code=1)
    assert "REFUSED: it is unsigned" in refused and "signature matches ours.pub" in refused
    (tmp_path / "out" / "README.md").write_text("mine")
    told = json.loads(said("verify", tmp_path / "out", "--signer", lab / "ours.pub", "--json", code=1))
    assert told["signatures"][str(tmp_path / "out")].startswith("REFUSED: ") and told["problems"]


def test_the_library_loads_only_when_something_is_signed_or_checked():
    loaded = "print('model_signing' in sys.modules, 'cryptography' in sys.modules)"
    script = f"import sys, pedigree.pipelines.publish.export, pedigree.pipelines.lineage.verify; {loaded}"
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert answer.stdout.split() == ["False", "False"]
