"""A byte changed anywhere is found and named, and never served."""

import errno
import json
import os
import shutil
import subprocess
from copy import copy
from pathlib import Path
from typing import Any, BinaryIO

import handmade
import pytest
from commands import InProcessCommand
from running_lab import Lab

from pedigree.data.artifacts import artifacts
from pedigree.data.artifacts.artifacts import ArtifactError, Record, open_artifact, read_record
from pedigree.data.artifacts.lineage import unfolded
from pedigree.pipelines.lineage import verify
from pedigree.pipelines.lineage.ancestry import read_pedigree, walk
from pedigree.pipelines.lineage.verify import Verification, verify_folders, verify_project
from pedigree.pipelines.publish.export import export
from pedigree.pipelines.run.ensure import Result
from pedigree.pipelines.run.runs import run_graph

STAGES = ("suite", "raw", "clean", "cleaner")


@pytest.fixture(scope="module")
def built(template: Lab, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """A lab whose recipe has run and was pushed to a remote."""
    folder = tmp_path_factory.mktemp("verify")
    lab = template.twin(folder)
    with (lab.root / ".dvc/config.local").open("a") as stream:
        stream.write(f"    remote = store\n['remote \"store\"']\n    url = {folder / 'remote'}\n")
    lab.shell("dvc push -q --run-cache")
    return lab


@pytest.fixture
def lab(built: Lab, tmp_path: Path) -> Lab:
    """A copy that a test may damage, remote included."""
    twin = copy(built)
    twin.root = tmp_path / "project"
    shutil.copytree(built.root, twin.root)
    shutil.copytree(built.root.parent / "remote", tmp_path / "remote")
    config = twin.root / ".dvc/config.local"
    config.write_text(config.read_text().replace(str(built.root.parent), str(tmp_path)))
    return twin


def flip(path: Path) -> None:
    """Changes one byte and hides it: size, mode and time stamp stay."""
    before = path.stat()
    path.chmod(0o644)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    path.chmod(before.st_mode)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def said(verdict: Verification) -> list[str]:
    return [str(problem) for problem in verdict.problems]


def test_a_sound_project_is_read_whole(lab: Lab) -> None:
    verdict = verify_project(lab.project)
    assert said(verdict) == [] and verdict.artifacts == 4
    objects = len(list((lab.root / ".dvc/cache/files/md5").glob("??/*")))
    remote = len(list((lab.root.parent / "remote/files/md5").glob("??/*")))
    assert objects == remote > 10
    parts = [path for name in STAGES for path in (lab.root / "artifacts/lab" / name).rglob("*") if path.is_file()]
    assert verdict.files == len(parts) + objects + remote and verdict.absent == 0


@pytest.mark.parametrize("part", ["payload/rows.jsonl", "evidence/metrics.json"])
def test_a_flipped_byte_of_an_artifact_is_named(lab: Lab, part: str) -> None:
    flip(lab.root / "artifacts/lab/clean" / part)
    verdict = verify_project(lab.project)
    assert any(line.startswith(f"artifacts/lab/clean/{part} ") for line in said(verdict)), said(verdict)
    assert all("lab/clean/" in line for line in said(verdict))


def test_a_missing_and_a_foreign_file_are_named(lab: Lab) -> None:
    payload = lab.root / "artifacts/lab/clean/payload"
    (payload / "rows.jsonl").rename(payload / "other.jsonl")
    lines = said(verify_project(lab.project, ["lab/clean"]))
    assert [line.split(":")[0] for line in lines] == [
        "artifacts/lab/clean/payload/other.jsonl is not in the record",
        "artifacts/lab/clean/payload/rows.jsonl is missing",
    ]


@pytest.mark.parametrize(("store", "named"), [(".dvc/cache", "cache object "), ("../remote", "remote object store/")])
def test_a_flipped_byte_in_the_cache_or_the_remote_is_named_and_never_served(lab: Lab, store: str, named: str) -> None:
    """Of a file, and of the list of a folder with other files."""
    objects = sorted((lab.root / store / "files/md5").glob("??/*"))
    good = (lab.root / "artifacts/lab/suite/payload/rows.jsonl").read_bytes()
    file = next(path for path in objects if path.read_bytes() == good)
    own = (file.parent.name + file.name).encode()
    lists = [path for path in objects if path.suffix == ".dir" and b"rows.jsonl" in path.read_bytes() and own not in path.read_bytes()]
    victims = [file, lists[0]]
    for victim in victims:
        flip(victim)
    lines = said(verify_project(lab.project))
    assert sorted(line.split(" of ")[0] for line in lines) == sorted(f"{named}{path.parent.name}{path.name}" for path in victims)
    before = lab.contents()
    if store == "../remote":
        shutil.rmtree(lab.root / ".dvc/cache")
    for name in STAGES:
        shutil.rmtree(lab.root / "artifacts/lab" / name)
    lab.forget_runs()
    run = lab.run()
    run.fetch = True  # the files are wanted, not only known to be in the remote
    assert all(isinstance(end, Result) for end in run_graph(run))
    assert lab.contents() == before and said(verify_project(lab.project, remote=False)) == []


def test_an_exported_folder_is_verified_anywhere(lab: Lab, tmp_path: Path) -> None:
    folder = export(lab.root / "artifacts/lab/clean", "lab/clean", tmp_path / "out")
    assert said(verify_folders([folder])) == []
    flip(folder / "rows.jsonl")
    (line,) = said(verify_folders([folder]))
    assert line.startswith("out/rows.jsonl has a different sha256")
    with pytest.raises(ArtifactError, match="neither an artifact nor an export"):
        verify_folders([tmp_path])


def test_a_forged_ancestor_breaks_the_chain(lab: Lab, tmp_path: Path) -> None:
    """Its record is changed and all its own hashes are made right again: the child's record still says what it read."""
    copied = tmp_path / "cleaner"
    shutil.copytree(lab.root / "artifacts/lab/cleaner", copied)
    path = copied / "lineage.json"
    lineage = json.loads(path.read_text())
    (old,) = [name for name, entry in lineage["artifacts"].items() if entry["run"]["address"] == "lab/raw"]
    entry = lineage["artifacts"][old]
    entry["record"]["config"]["sources"][0]["count"] = 6
    path.write_text(json.dumps(lineage))
    assert any("the record of lab/raw: its key is not the hash" in line for line in said(verify_folders([copied])))
    forged = Record.model_validate(entry["record"])
    edges = [(given.port, given.label, given.content) for given in forged.inputs]
    key = artifacts.stage_key(forged.kind, forged.version, forged.config, edges, forged.source_files)
    forged = forged.model_copy(update={"key": key})
    del lineage["artifacts"][old]
    lineage["artifacts"][forged.id] = {**entry, "record": forged.model_dump(mode="json")}
    path.write_text(json.dumps(lineage))
    lines = said(verify_folders([copied]))
    assert any(f"it lacks {old[:12]}, the data of a decontaminate" in line for line in lines)
    assert any(f"{forged.id[:12]} is not an ancestor" in line for line in lines)


def test_the_command_names_what_is_wrong_and_fails(lab: Lab) -> None:
    pedigree = InProcessCommand(lab)
    assert "all as recorded: 4 artifacts" in pedigree("verify", "--no-remote")
    flip(lab.root / "artifacts/lab/raw/payload/rows.jsonl")
    (problem,) = json.loads(pedigree("verify", "lab/raw", "--json", code=1))["problems"]
    assert problem["file"] == "artifacts/lab/raw/payload/rows.jsonl" and "pedigree run" in problem["remedy"]


def test_records_of_an_earlier_schema_are_migrated_wherever_they_are_read(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Schema 0, had there been one, called `marks` `notes`; key, content and id are what they were."""
    copied = tmp_path / "cleaner"
    shutil.copytree(lab.root / "artifacts/lab/cleaner", copied)
    now = open_artifact(copied).record

    def aged(record: dict[str, Any]) -> dict[str, Any]:
        return {**{name: value for name, value in record.items() if name != "marks"}, "notes": record["marks"], "schema_version": 0}

    def migrate(raw: dict[str, Any]) -> dict[str, Any]:
        return {**{name: value for name, value in raw.items() if name != "notes"}, "marks": raw["notes"]}

    record, lineage = copied / "record.json", copied / "lineage.json"
    record.write_text(json.dumps(aged(json.loads(record.read_text()))))
    known = json.loads(lineage.read_text())
    for entry in known["artifacts"].values():
        entry["record"] = aged(entry["record"])
    lineage.write_text(json.dumps(known))
    with pytest.raises(ArtifactError, match="record schema 0, which cannot be migrated to 1"):
        open_artifact(copied)
    monkeypatch.setitem(artifacts.MIGRATIONS["record"], 0, migrate)
    assert open_artifact(copied).record == now
    assert [found.address.partition("/")[2] for found in walk(read_pedigree(copied))] == ["cleaner", "clean", "raw", "suite", "suite"]
    assert said(verify_folders([copied])) == []
    with pytest.raises(ArtifactError, match="record schema 2, this version reads up to 1: use the later version that wrote it"):
        read_record({**now.model_dump(mode="json"), "schema_version": 2}, "record.json")


@pytest.fixture(scope="module")
def exported(built: Lab, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(built.root / "artifacts/lab/cleaner", "lab/cleaner", tmp_path_factory.mktemp("exported") / "out")


@pytest.mark.parametrize(
    "name", ["rows.jsonl", "README.md", "pedigree/record.json", "pedigree/run.json", "pedigree/lineage.json", "pedigree/SHA256SUMS"]
)
def test_any_flipped_byte_of_an_exported_folder_is_named(exported: Path, tmp_path: Path, name: str) -> None:
    """A score in record.json is in no hash of the record's own, and the code's commit in run.json in none at all."""
    folder = tmp_path / "out"
    shutil.copytree(exported, folder)
    sound = (folder / name).read_bytes()
    for place in range(0, len(sound), max(1, len(sound) // 10)):
        (folder / name).write_bytes(sound[:place] + bytes([sound[place] ^ 1]) + sound[place + 1 :])
        lines = said(verify_folders([folder]))
        assert any(name in line for line in lines), (place, lines)
    (folder / name).unlink()
    if name != "pedigree/record.json":
        assert any(line.startswith(f"out/{name}") for line in said(verify_folders([folder])))


def test_an_exported_folder_is_checked_where_there_is_no_pedigree(exported: Path) -> None:
    done = subprocess.run(["sha256sum", "-c", "--quiet", "pedigree/SHA256SUMS"], cwd=exported, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_file_that_was_laid_into_an_exported_folder_is_named(exported: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    shutil.copytree(exported, folder)
    (folder / "pedigree/more.json").write_text("{}")
    (folder / "modeling.py").write_text("")
    assert [line.split(":")[0] for line in said(verify_folders([folder]))] == [
        "out/modeling.py is in neither the record nor pedigree/SHA256SUMS",
        "out/pedigree/more.json is in neither the record nor pedigree/SHA256SUMS",
    ]


def test_missing_and_foreign_evidence_is_named_and_without_the_cache_at_least_its_folder(lab: Lab) -> None:
    evidence = lab.root / "artifacts/lab/clean/evidence"
    (evidence / "metrics.json").rename(evidence / "other.json")
    lines = [line.split(":")[0] for line in said(verify_project(lab.project, ["lab/clean"], remote=False))]
    assert lines == ["artifacts/lab/clean/evidence/metrics.json is missing", "artifacts/lab/clean/evidence/other.json is not in dvc.lock"]
    shutil.rmtree(lab.root / ".dvc/cache")
    lines = [line.split(":")[0] for line in said(verify_project(lab.project, ["lab/clean"], remote=False))]
    assert lines == ["artifacts/lab/clean/evidence has different files than in dvc.lock"]


@pytest.mark.parametrize("part", ["payload", "evidence", "record.json", "run.json", "lineage.json"])
def test_a_part_that_has_gone_is_named(lab: Lab, part: str) -> None:
    gone = lab.root / "artifacts/lab/clean" / part
    shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
    assert any(line.startswith(f"artifacts/lab/clean/{part}") for line in said(verify_project(lab.project, remote=False)))


def test_an_artifact_that_is_not_checked_out_is_no_problem(lab: Lab) -> None:
    shutil.rmtree(lab.root / "artifacts/lab/clean")
    verdict = verify_project(lab.project)
    assert said(verdict) == [] and verdict.artifacts == 3


def test_an_artifact_that_no_lock_names_yet_is_read_too(lab: Lab) -> None:
    (lab.root / "artifacts/lab/dvc.lock").unlink()
    flip(lab.root / "artifacts/lab/clean/payload/rows.jsonl")
    (line,) = said(verify_project(lab.project))
    assert line.startswith("artifacts/lab/clean/payload/rows.jsonl has a different sha256")


def test_a_remote_that_cannot_be_reached_is_one_problem_and_hides_no_other(lab: Lab) -> None:
    flip(lab.root / "artifacts/lab/clean/payload/rows.jsonl")
    shutil.rmtree(lab.root.parent / "remote")
    (lab.root.parent / "remote").write_text("no folder: what lies below cannot be asked for")
    lines = said(verify_project(lab.project))
    assert [line.split(" ")[0] for line in lines] == ["artifacts/lab/clean/payload/rows.jsonl", "remote"]
    assert "remote store cannot be read" in lines[1] and "--no-remote" in lines[1]


def test_what_was_never_pushed_is_counted_and_no_problem(lab: Lab) -> None:
    shutil.rmtree(lab.root.parent / "remote")
    verdict = verify_project(lab.project)
    assert said(verdict) == [] and verdict.unpushed > 10 and f"{verdict.unpushed} objects are not in the remote" in verdict.summary()


def test_a_damaged_lock_is_named_with_its_remedy(lab: Lab) -> None:
    pedigree = InProcessCommand(lab)
    for text in ("{", "stages: 3", "stages: {a: {outs: [{path: payload}]}}", "stages: {a: {outs: [{path: clean/payload}]}}"):
        lab.write("artifacts/lab/dvc.lock", text)
        assert pedigree("verify", code=1).startswith("artifacts/lab/dvc.lock is damaged"), text


def test_a_folder_of_the_project_is_held_against_lock_and_cache_too(lab: Lab, tmp_path: Path) -> None:
    """Beside a folder from elsewhere; the place from which the command is typed does not matter."""
    folder = export(lab.root / "artifacts/lab/raw", "lab/raw", tmp_path / "out")
    inside = copy(lab)
    inside.root = lab.root / "artifacts"
    pedigree = InProcessCommand(inside)
    assert "all as recorded: 2 artifacts" in pedigree("verify", "lab/clean", str(folder))
    flip(lab.root / "artifacts/lab/clean/run.json")
    flip(folder / "rows.jsonl")
    told = pedigree("verify", "lab/clean", str(folder), code=1)
    assert "lab/clean/run.json has a different md5" in told and "out/rows.jsonl has" in told


@pytest.mark.parametrize("part", ["record.json", "lineage.json", "run.json"])
def test_any_flipped_bit_of_a_record_is_a_finding_and_no_crash(lab: Lab, part: str) -> None:
    path = lab.root / "artifacts/lab/clean" / part
    sound = path.read_bytes()
    for place in range(0, len(sound), max(1, len(sound) // 12)):
        path.write_bytes(sound[:place] + bytes([sound[place] ^ (1 << place % 8)]) + sound[place + 1 :])
        lines = said(verify_project(lab.project, ["lab/clean"], remote=False))
        assert any(part in line for line in lines) and all("artifacts/lab/clean/" in line for line in lines), (place, lines)
    for text in ("[]", "{}", "null", '{"artifacts": 3}', '{"artifacts": {"a": 3}}', '{"schema_version": true}'):
        path.write_text(text)
        assert any(part in line for line in said(verify_project(lab.project, ["lab/clean"], remote=False)))


def test_runs_and_lineages_of_an_earlier_schema_are_migrated_and_later_ones_refused(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Schema 0, had there been one, called a run's `address` `stage`, and a lineage's `artifacts` `records`."""
    copied = tmp_path / "cleaner"
    shutil.copytree(lab.root / "artifacts/lab/cleaner", copied)
    now = read_pedigree(copied).entries

    def renamed(raw: dict[str, Any], old: str, new: str, schema: int) -> dict[str, Any]:
        return {**{name: value for name, value in raw.items() if name != old}, new: raw[old], "schema_version": schema}

    run, lineage = json.loads((copied / "run.json").read_text()), json.loads((copied / "lineage.json").read_text())
    lineage["artifacts"] = unfolded(lineage)
    for entry in lineage["artifacts"].values():
        entry["run"] = renamed(entry["run"], "address", "stage", 0)
    (copied / "run.json").write_text(json.dumps(renamed(run, "address", "stage", 0)))
    (copied / "lineage.json").write_text(json.dumps(renamed(lineage, "artifacts", "records", 0)))
    with pytest.raises(ArtifactError, match=r"lineage schema 0, which cannot be migrated to 2"):
        read_pedigree(copied)
    assert any("cannot be migrated to 2" in line for line in said(verify_folders([copied])))
    monkeypatch.setitem(artifacts.MIGRATIONS["run"], 1, lambda raw: raw)  # these hold their patches as schema 2 does
    monkeypatch.setitem(artifacts.MIGRATIONS["run"], 0, lambda raw: renamed(raw, "stage", "address", 0))
    monkeypatch.setitem(artifacts.MIGRATIONS["lineage"], 0, lambda raw: renamed(raw, "records", "artifacts", 0))
    assert read_pedigree(copied).entries == now and said(verify_folders([copied])) == []
    (copied / "run.json").write_text(json.dumps(run | {"schema_version": 3}))
    with pytest.raises(ArtifactError, match="run schema 3, this version reads up to 2: use the later version that wrote it"):
        read_pedigree(copied)


def test_a_model_file_on_a_damaged_disk_is_named_and_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = handmade.exported(tmp_path)
    (folder / "config.json").unlink()
    real = verify.open_plain

    def damaged(path: Path, *limit: int) -> BinaryIO:
        if path.name == "model.safetensors":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(path, *limit)

    monkeypatch.setattr(verify, "open_plain", damaged)
    lines = said(verify_folders([folder]))
    assert [line.partition(" ")[0].partition("/")[2] for line in lines] == ["config.json", "model.safetensors"], lines
    assert "cannot be read (Input/output error)" in lines[1]
