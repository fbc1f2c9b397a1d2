"""`lineage.json`: what many runs repeat stands in it once, and what schema 1 held comes through."""

import copy

import pytest

from pedigree.data.artifacts.artifacts import ArtifactError, Record, migrated, parse_lineage, parse_patches
from pedigree.data.artifacts.lineage import folded, split, text_sha256, unfolded

PATCH = "diff --git a/a.py b/a.py\n+two\n"
CODE = {"commit": "c" * 40, "dirty": True, "patch_sha256": "0" * 64, "patch": PATCH}
LOST = {"commit": "c" * 40, "dirty": True, "patch_sha256": "1" * 64, "patch_left_out": "it is not UTF-8"}
RECORD = Record(kind="pair", version=1, type="preference", config={}, inputs=(), key="e" * 64, content="f" * 64, files=(), metrics={})


def first_run(*codes):
    """Of schema 1: the text of the patch in each attempt, under a hash of the whole tree."""
    attempts = [{"started_at": "2026-01-02T03:04:05+00:00", "code": code} for code in codes]
    return {"schema_version": 1, "address": "a/b", "attempts": attempts, "environment": {"python": "3.11.7"}, "hardware": {}}


def test_runs_and_lineages_of_schema_1_keep_their_patches_and_ids():
    old = {"schema_version": 1, "artifacts": {RECORD.id: {"record": RECORD.model_dump(mode="json"), "run": first_run(CODE, LOST)}}}
    before, own = copy.deepcopy(old), first_run(CODE, {**CODE, "patch": PATCH + "+three\n"})
    ((record, run),) = parse_lineage(old, "lineage.json").values()
    assert record == RECORD and record.id == RECORD.id
    sha256 = text_sha256(PATCH)
    assert [attempt["code"] for attempt in run.as_json()["attempts"]] == [
        {"commit": "c" * 40, "dirty": True, "patch_sha256": sha256},
        {"commit": "c" * 40, "dirty": True, "patch_sha256": None, "patch_left_out": "it is not UTF-8"},
    ]
    assert parse_patches(own, old, "lineage.json") == {sha256: PATCH, text_sha256(PATCH + "+three\n"): PATCH + "+three\n"}
    assert migrated(own, "run", "run.json")["attempts"][0]["code"] == run.as_json()["attempts"][0]["code"]
    assert old == before, "what was read is left as it was"


def test_what_runs_repeat_is_written_once_and_comes_back_as_it_was():
    run, patches = split(first_run(CODE, CODE))
    entries = {name: {"record": {}, "run": copy.deepcopy(run)} for name in ("one", "other")}
    raw = folded(entries, patches)
    assert str(raw).count("3.11.7") == 1 and str(raw).count("two") == 1 and len(raw["shared"]) == 2
    assert raw["artifacts"]["one"]["run"]["hardware"] == {}, "nothing to share"
    found = unfolded(raw)
    assert found == entries
    assert found["one"]["run"]["environment"] is found["other"]["run"]["environment"]


@pytest.mark.parametrize(
    "damage",
    [{"patches": {"0" * 64: PATCH}}, {"patches": {"0" * 64: 3}}, {"patches": []}, {"shared": {"0" * 64: {"python": "3"}}}, {"shared": 3}],
)
def test_a_lineage_whose_hashes_are_not_those_of_its_texts_and_values_is_damaged(damage):
    with pytest.raises(ArtifactError, match=r"lineage\.json is damaged"):
        parse_lineage({"schema_version": 2, "artifacts": {}, "shared": {}, "patches": {}} | damage, "lineage.json")
