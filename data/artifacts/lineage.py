"""The form of `lineage.json`: what many records of an ancestry repeat stands in it once, under its hash.

    schema_version   2
    artifacts        id → {record, run}; in a run `{"shared": HASH}` stands for a value of `shared`
    shared           hash → environment, hardware, fingerprint, code, numerics or placement of one or many runs
    patches          sha256 → text: what `git apply` makes of a commit; of the ancestors and of the artifact itself

Schema 1 had every value where it belongs, and the text of a patch in each attempt of each run.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

from configs.base.frozen import canonical_json, digest

SHARED = ("environment", "hardware", "fingerprint", "code", "numerics", "placement")
"""Fields of a run and of its attempts whose values are the same in many runs."""
REFERENCE = "shared"
UNFOLDED_BYTES = 1 << 30
"""Of shared values, each counted as often as it is named: a short lineage must not become one that fills the memory."""


class LineageError(ValueError):
    """A lineage contradicts itself."""


def split(run: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """A run as `run.json` holds it, and the texts of the patches that its attempts carry, by sha256.

    Args:
        run: of any schema, or as a scratch folder tells it: the text of a patch may stand in an attempt's code.
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
    """What a lineage holds beside its schema, from entries of records and runs in which every value stands where it belongs."""
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
    """The entries of a lineage of today's schema, every value where it belongs; equal values are one object.

    Raises:
        LineageError: a shared value or a patch is not what its hash says, a run names one that is not there, or all is too much.
        AttributeError, KeyError, TypeError: it has another form.
    """
    shared: Mapping[str, Any] = raw["shared"]
    for sha256, value in shared.items():
        if digest(value) != sha256:
            raise LineageError(f"the value that runs share under {sha256[:12]} is another one: it has been changed")
    patches_of(raw)

    sizes = {sha256: len(canonical_json(value)) for sha256, value in shared.items()}
    unfolded_bytes = 0

    def value_of(value: Mapping[str, Any]) -> Any:
        nonlocal unfolded_bytes
        if value[REFERENCE] not in shared:
            raise LineageError(f"a run names the shared value {str(value[REFERENCE])[:12]}, which is not there")
        unfolded_bytes += sizes[value[REFERENCE]]
        if unfolded_bytes > UNFOLDED_BYTES:
            raise LineageError(f"its runs share more than {UNFOLDED_BYTES} bytes: no Pedigree wrote it")
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
    """The patches in a lineage of today's schema.

    Raises:
        LineageError: one has another sha256 than the one it stands under.
    """
    for sha256, text in raw["patches"].items():
        if text_sha256(text) != sha256:
            raise LineageError(f"the patch under {str(sha256)[:12]} has sha256 {text_sha256(text)[:12]}: it has been changed")
    return dict(raw["patches"])


# --- schema 1 ----------------------------------------------------------------------------------------------------------


def second_run(run: Mapping[str, Any]) -> dict[str, Any]:
    """A run of schema 1 in schema 2. Its patches stand elsewhere, and `patch_sha256`, once a hash over the whole working tree, is that of
    the text, or null where none was kept."""
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
    """A lineage of schema 1 in schema 2; its runs are of a schema of their own, and stay as they are."""
    patches: dict[str, str] = {}
    for entry in raw["artifacts"].values():
        patches |= split(entry["run"])[1]
    return {"artifacts": raw["artifacts"], "shared": {}, "patches": patches}
