"""The format of `lineage.json`: values shared by several records are stored once, under their hash.

    schema_version   2
    artifacts        id → {record, run}; in a run, `{"shared": HASH}` refers to a value in `shared`
    shared           hash → environment, hardware, fingerprint, code, numerics or placement of one or more runs
    patches          sha256 → text for `git apply`, of the ancestors and of the artifact itself

Schema 1 had all values inline, and the text of a patch in each attempt of each run.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

from pedigree.configs.base.frozen import canonical_json, digest

SHARED = ("environment", "hardware", "fingerprint", "code", "numerics", "placement")
"""Fields of runs and attempts that are stored as shared values."""
REFERENCE = "shared"
UNFOLDED_BYTES = 1 << 30
"""Maximum total size of shared values, counting every reference, so that a short lineage cannot fill the memory."""


def split(run: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Separate a run, of any schema or from a scratch folder, from the patch texts in its attempts' code.

    Returns (run as in `run.json`, sha256 → text).
    """
    patches: dict[str, str] = {}
    attempts = []
    for attempt in run.get("attempts", []):
        code = attempt.get("code")
        if isinstance(code, Mapping) and "patch" in code:
            text = str(code["patch"])
            sha256 = text_sha256(text)
            patches[sha256] = text
            rest = {name: value for name, value in code.items() if name != "patch"}
            attempt = {**attempt, "code": rest | {"patch_sha256": sha256}}
        attempts.append(attempt)
    return {**run, **({"attempts": attempts} if "attempts" in run else {})}, patches


def text_sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def folded(artifacts: Mapping[str, Mapping[str, Any]], patches: Mapping[str, str]) -> dict[str, Any]:
    """Build the fields of a lineage except its schema version, from entries with inline values."""
    shared: dict[str, Any] = {}

    def fold(fields: Mapping[str, Any]) -> dict[str, Any]:
        found = dict(fields)
        for name in SHARED:
            if isinstance(found.get(name), Mapping) and found[name]:
                sha256 = digest(found[name])
                shared[sha256] = found[name]
                found[name] = {REFERENCE: sha256}
        if isinstance(found.get("attempts"), list):
            found["attempts"] = [fold(attempt) for attempt in found["attempts"]]
        return found

    entries = {identifier: {**entry, "run": fold(entry["run"])} for identifier, entry in sorted(artifacts.items())}
    return {"artifacts": entries, "shared": shared, "patches": dict(patches)}


def unfolded(raw: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The entries of a lineage of the current schema with inline values; equal values are one object.

    Raises ValueError if a shared value or patch does not match its hash, a reference is dangling, or the shared values are too large, and
    AttributeError, KeyError or TypeError if it is malformed.
    """
    shared: Mapping[str, Any] = raw["shared"]
    for sha256, value in shared.items():
        if digest(value) != sha256:
            raise ValueError(f"the shared value {sha256[:12]} does not match its hash: it has been changed")
    patches_of(raw)

    sizes = {sha256: len(canonical_json(value)) for sha256, value in shared.items()}
    unfolded_bytes = 0

    def value_of(value: Mapping[str, Any]) -> Any:
        nonlocal unfolded_bytes
        if value[REFERENCE] not in shared:
            raise ValueError(f"a run refers to the shared value {str(value[REFERENCE])[:12]}, which is missing")
        unfolded_bytes += sizes[value[REFERENCE]]
        if unfolded_bytes > UNFOLDED_BYTES:
            raise ValueError(f"its shared values are too large (more than {UNFOLDED_BYTES} bytes) for a Pedigree lineage")
        return shared[value[REFERENCE]]

    def unfold(fields: Mapping[str, Any]) -> dict[str, Any]:
        found = dict(fields)
        for name in SHARED:
            if isinstance(found.get(name), Mapping) and found[name].keys() == {REFERENCE}:
                found[name] = value_of(found[name])
        if "attempts" in found:
            found["attempts"] = [unfold(attempt) for attempt in found["attempts"]]
        return found

    return {identifier: {**entry, "run": unfold(entry["run"])} for identifier, entry in raw["artifacts"].items()}


def patches_of(raw: Mapping[str, Any]) -> dict[str, str]:
    """The patches in a lineage of the current schema. Raises ValueError if one does not match its hash."""
    for sha256, text in raw["patches"].items():
        if text_sha256(text) != sha256:
            raise ValueError(f"the patch under {str(sha256)[:12]} has sha256 {text_sha256(text)[:12]}: it has been changed")
    return dict(raw["patches"])


# --- schema 1 ----------------------------------------------------------------------------------------------------------


def second_run(run: Mapping[str, Any]) -> dict[str, Any]:
    """Migrate a run from schema 1 to 2.

    Patches move out, and `patch_sha256`, which was a hash of the whole working tree, becomes that of the patch text, or null if there is
    no text.
    """
    if "attempts" not in run:
        return dict(run)
    attempts = []
    for attempt in run["attempts"]:
        code = attempt.get("code")
        if isinstance(code, Mapping) and code.get("patch_sha256") and "patch" not in code:
            attempt = {**attempt, "code": {"patch_left_out": "it was not kept", **code, "patch_sha256": None}}
        attempts.append(attempt)
    return split({**run, "attempts": attempts})[0]


def second_lineage(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Migrate a lineage from schema 1 to 2; its runs have their own schema and stay unchanged."""
    patches: dict[str, str] = {}
    for entry in raw["artifacts"].values():
        patches |= split(entry["run"])[1]
    return {"artifacts": raw["artifacts"], "shared": {}, "patches": patches}
