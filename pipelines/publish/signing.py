"""Signatures of exported folders, in the form of OpenSSF's model signing: a Sigstore bundle, in it a DSSE envelope around an in-toto
statement that names every file of the folder by its sha256. Made with a private key on an elliptic curve, checked with its public key.

A signature says who vouches for a folder; the records in it say what it was made from. The library loads when it is used.
"""

import base64
import os
from pathlib import Path
from typing import Any

from configs.base.problems import PedigreeError, UsageProblem
from data.artifacts.artifacts import SIGNATURE, ArtifactError, sha256_file
from data.store.untrusted import inside, parse_json, plain_files, read_plain

PASSWORD = "PEDIGREE_SIGN_PASSWORD"
"""Environment variable with the password of an encrypted private key."""
LARGEST = 2**25
"""Bytes of a signature that is read: about two hundred thousand files."""
MAKE_KEYS = "`openssl ecparam -name prime256v1 -genkey -noout -out key.pem` and `openssl ec -in key.pem -pubout -out key.pub` make a pair"


class SigningError(UsageProblem):
    """A folder cannot be signed with this key."""


class NotSigned(PedigreeError):
    """A folder is not what its signature and this key vouch for; the message says why."""


class Signer:
    """A private key, proven to be one before anything is written."""

    def __init__(self, key: Path) -> None:
        """Args: key: PEM file with a private key on P-256, P-384 or P-521.

        Raises:
            SigningError: there is no such key, it is of another kind, or encrypted under another password.
        """
        from model_signing import signing

        password = os.environ.get(PASSWORD)
        try:
            secret: Any = password.encode() if password else None  # the library hands it to `cryptography`, which wants bytes
            self.config = signing.Config().use_elliptic_key_signer(private_key=key, password=secret)
        except Exception as error:  # each kind of wrong file raises its own
            remedy = f"put its password into {PASSWORD}" if "encrypted" in str(error) else MAKE_KEYS
            raise SigningError(f"{key} cannot be read as a private key on P-256, P-384 or P-521 ({_said(error)}): {remedy}") from error

    def sign(self, folder: Path) -> None:
        """Writes the signature of everything that stands in a folder now."""
        self.config.set_hashing_config(_everything()).sign(folder, folder / SIGNATURE)


def is_signed(folder: Path) -> bool:
    return (folder / SIGNATURE).is_file()


def check(folder: Path, public_key: Path) -> int:
    """Hashes an exported folder and compares it with its signature; returns how many files that vouches for.

    Args:
        folder: what was exported.
        public_key: PEM file with the signer's public key.

    Raises:
        SigningError: there is no such key.
        NotSigned: there is no signature, it was made by another key, or the folder is another one than was signed.
    """
    from model_signing import verifying

    if not public_key.is_file():
        raise SigningError(f"{public_key} is no file: --signer takes the signer's public key, PEM")
    if not is_signed(folder):
        raise NotSigned("it is unsigned: `pedigree export --sign KEY` signs")
    try:
        bundle, there = read_plain(inside(folder, SIGNATURE), LARGEST), set(plain_files(folder)) - {SIGNATURE}
    except ArtifactError as error:
        raise NotSigned(str(error)) from error
    try:
        verifier = verifying.Config().use_elliptic_key_verifier(public_key=public_key)
    except Exception as error:  # each kind of wrong file raises its own
        raise SigningError(f"{public_key} is no public key on P-256, P-384 or P-521 ({_said(error)}): {MAKE_KEYS}") from error
    try:
        verifier.set_hashing_config(_everything()).verify(folder, folder / SIGNATURE)
        signed = _digests(bundle)
    except Exception as error:  # a stranger's file may be anything: whatever cannot be verified is not signed
        differing = _differing(folder, bundle, there) if "Signature mismatch" in str(error) else []
        why = f"not as signed: {', '.join(differing[:3])}" if differing else _said(error)
        raise NotSigned(f"its signature and {public_key.name} do not vouch for it ({why})") from error
    left_out = sorted(there - signed.keys())
    if left_out:
        raise NotSigned(f"its signature leaves out {', '.join(left_out[:3])}")
    return len(signed)


def _everything() -> Any:
    """Every file but the signature itself; the library would leave out git's."""
    from model_signing import hashing

    return hashing.Config().set_ignored_paths(paths=[SIGNATURE], ignore_git_paths=False)


def _digests(bundle: bytes) -> dict[str, str]:
    """File → sha256, as a signature says; the signer may have said which files to ignore, and we ignore none.

    Raises:
        NotSigned: it has another form.
    """
    try:
        payload = base64.b64decode(parse_json(bundle, SIGNATURE, LARGEST)["dsseEnvelope"]["payload"])
        resources = parse_json(payload, f"the statement in {SIGNATURE}", LARGEST)["predicate"]["resources"]
        return {str(resource["name"]): str(resource["digest"]) for resource in resources}
    except (ArtifactError, AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise NotSigned(f"{SIGNATURE} is no signature that Pedigree writes ({_said(error)})") from error


def _differing(folder: Path, bundle: bytes, there: set[str]) -> list[str]:
    """Files that are not as they were signed, one more or one less; the library shows both hashes as bytes."""
    signed = _digests(bundle)
    return sorted(name for name in signed.keys() | there if name not in there or signed.get(name) != sha256_file(folder / name))


def _said(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
