"""Sign and verify exported folders with OpenSSF model signing.

The signature is a Sigstore bundle with a DSSE envelope around an in-toto statement that lists the SHA-256 of every file. It is created
with an elliptic-curve private key and verified with the public key. It proves who signed the folder; the records in the folder state what
it was made from. The library is imported on use.
"""

import base64
import os
from pathlib import Path
from typing import Any

from pedigree.configs.base.problems import UsageProblem
from pedigree.data.artifacts.artifacts import SIGNATURE, ArtifactError, sha256_file
from pedigree.data.store.untrusted import inside, parse_json, plain_files, read_plain

PASSWORD = "PEDIGREE_SIGN_PASSWORD"
"""Environment variable with the password of an encrypted private key."""
LARGEST = 2**25
"""Maximum signature size in bytes, enough for about 200,000 files."""
MAKE_KEYS = (
    "create a key pair with `openssl ecparam -name prime256v1 -genkey -noout -out key.pem` "
    "and `openssl ec -in key.pem -pubout -out key.pub`"
)


class Signer:
    """A private key, validated before anything is written."""

    def __init__(self, key: Path) -> None:
        """`key` is a PEM file with a private key on P-256, P-384, or P-521; UsageProblem if it cannot be read."""
        from model_signing import signing

        password = os.environ.get(PASSWORD)
        try:
            secret: Any = password.encode() if password else None  # `cryptography` requires bytes
            self.config = signing.Config().use_elliptic_key_signer(private_key=key, password=secret)
        except Exception as error:  # the exception type depends on what is wrong with the file
            remedy = f"set {PASSWORD} to its password" if "encrypted" in str(error) else MAKE_KEYS
            raise UsageProblem(f"{key} cannot be read as a private key on P-256, P-384, or P-521 ({_text(error)}): {remedy}") from error

    def sign(self, folder: Path) -> None:
        self.config.set_hashing_config(_everything()).sign(folder, folder / SIGNATURE)


def is_signed(folder: Path) -> bool:
    return (folder / SIGNATURE).is_file()


def check(folder: Path, public_key: Path) -> int:
    """Verify the signature of an exported folder with the signer's public key in PEM format; returns the number of signed files.

    Raises:
        UsageProblem: the key is missing or unreadable.
        ArtifactError: the signature is missing, was made with another key, or does not match the folder.
    """
    from model_signing import verifying

    if not public_key.is_file():
        raise UsageProblem(f"{public_key} is not a file: --signer takes the signer's public key in PEM format")
    if not is_signed(folder):
        raise ArtifactError("it is unsigned: use `pedigree export --sign KEY` to sign")
    bundle, there = read_plain(inside(folder, SIGNATURE), LARGEST), set(plain_files(folder)) - {SIGNATURE}
    try:
        verifier = verifying.Config().use_elliptic_key_verifier(public_key=public_key)
    except Exception as error:  # the exception type depends on what is wrong with the file
        raise UsageProblem(f"{public_key} is not a public key on P-256, P-384, or P-521 ({_text(error)}): {MAKE_KEYS}") from error
    try:
        verifier.set_hashing_config(_everything()).verify(folder, folder / SIGNATURE)
        signed = _digests(bundle)
    except Exception as error:  # the file is untrusted: treat any failure as unsigned
        differing = _differing(folder, bundle, there) if "Signature mismatch" in str(error) else []
        why = f"changed since signing: {', '.join(differing[:3])}" if differing else _text(error)
        raise ArtifactError(f"its signature cannot be verified with {public_key.name} ({why})") from error
    left_out = sorted(there - signed.keys())
    if left_out:
        raise ArtifactError(f"its signature does not cover {', '.join(left_out[:3])}")
    return len(signed)


def _everything() -> Any:
    """Hash every file but the signature itself; by default the library skips git files."""
    from model_signing import hashing

    return hashing.Config().set_ignored_paths(paths=[SIGNATURE], ignore_git_paths=False)


def _digests(bundle: bytes) -> dict[str, str]:
    """File → SHA-256 in a signature. Any ignore list of the signer is disregarded."""
    try:
        payload = base64.b64decode(parse_json(bundle, SIGNATURE, LARGEST)["dsseEnvelope"]["payload"])
        resources = parse_json(payload, f"the statement in {SIGNATURE}", LARGEST)["predicate"]["resources"]
        return {str(resource["name"]): str(resource["digest"]) for resource in resources}
    except (ArtifactError, AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise ArtifactError(f"{SIGNATURE} is not in Pedigree's signature format ({_text(error)})") from error


def _differing(folder: Path, bundle: bytes, there: set[str]) -> list[str]:
    """Files changed, added, or removed since signing; the library's message shows only raw hashes."""
    signed = _digests(bundle)
    return sorted(name for name in signed.keys() | there if name not in there or signed.get(name) != sha256_file(folder / name))


def _text(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
