"""Every name of an artifact leads to its pedigree: today's, that of a commit, that of an ancestor that is gone."""

import shutil
from pathlib import Path

import pytest
from running_lab import Lab

from pedigree.data.artifacts.artifacts import ArtifactError
from pedigree.pipelines.ledger.lock_files import recorded_at
from pedigree.pipelines.lineage.ancestry import Pedigree, read_pedigree, walk
from pedigree.pipelines.lineage.difference import compare
from pedigree.pipelines.lineage.find import find_pedigree
from pedigree.pipelines.publish.export import export
from pedigree.pipelines.run.ensure import Result
from pedigree.pipelines.run.runs import run_graph

COMMIT = "git -c user.name=t -c user.email=t@t commit -qm"


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """Two commits: `raw` has five rows in the first, six in the second; `first` tags the first."""
    lab = Lab(tmp_path_factory.mktemp("names"))
    for tag in ("first", "second"):
        ends = run_graph(lab.run())
        assert all(isinstance(end, Result) for end in ends), ends
        lab.shell(f"git add -A && {COMMIT} {tag} && git tag {tag}")
        if tag == "first":
            lab.edit("configs/recipes/lab.yaml", "count: 5", "count: 6")
    return lab


def rows(pedigree: Pedigree) -> int:
    with pedigree.open_file("rows.jsonl") as stream:
        return len(stream.readlines())


def test_today_and_the_commit_have_a_pedigree_each(lab: Lab) -> None:
    now, before = find_pedigree(lab.project, "lab/cleaner"), find_pedigree(lab.project, "lab/cleaner@first")
    assert now.id != before.id and find_pedigree(lab.project, "cleaner@HEAD").id == now.id
    assert (rows(now), rows(before)) == (6, 5)
    names, others = ([found.address.partition("/")[2] for found in walk(pedigree)] for pedigree in (before, now))
    assert names == others == ["cleaner", "clean", "raw", "suite", "suite"]
    found = compare(before, now)
    assert found.rows and (found.rows.by, found.rows.added, found.rows.removed, found.rows.kept) == ("", 1, 0, 5)
    assert [(origin.path, origin.why) for origin in found.origins] == [("data < data", ["sources[0].count: 5 -> 6"])]


def test_stage_names_ids_and_contents_do(lab: Lab) -> None:
    now = find_pedigree(lab.project, "lab/clean")
    assert find_pedigree(lab.project, "clean").id == find_pedigree(lab.project, now.id[:10]).id == now.id


def test_a_revision_or_stage_that_is_not_there_is_named(lab: Lab) -> None:
    with pytest.raises(ArtifactError, match=r"'nowhere' is not a commit, branch or tag"):
        find_pedigree(lab.project, "lab/clean@nowhere")
    with pytest.raises(ArtifactError, match=r"'lab/sft' is not in any dvc.lock; recorded: lab/clean, lab/cleaner, lab/raw, lab/suite"):
        find_pedigree(lab.project, "lab/sft@first")


def test_an_export_leads_to_the_pedigree_inside(lab: Lab, tmp_path: Path) -> None:
    artifact = lab.project.artifact("lab/cleaner")
    folder = export(artifact, "lab/cleaner", tmp_path / "travelled")
    pedigree = find_pedigree(None, str(folder))
    assert pedigree.id == read_pedigree(artifact).id and rows(pedigree) == 6
    assert pedigree.as_lineage() == read_pedigree(artifact).as_lineage()


def test_an_ancestor_that_was_replaced_is_known_by_its_id(lab: Lab) -> None:
    old = find_pedigree(lab.project, "lab/raw@first")
    with pytest.raises(ArtifactError, match="not an artifact folder"):
        find_pedigree(lab.project, old.id[:12])
    target = lab.root / "artifacts/other/cleaner"
    target.mkdir(parents=True)
    before = find_pedigree(lab.project, "lab/cleaner@first")
    ledger = lab.run().ledger
    for entry in recorded_at(lab.project, "first"):
        if entry.address == "lab/cleaner" and entry.part.endswith(".json"):
            with ledger.open_object(entry.md5) as stream:
                (target / entry.part).write_bytes(stream.read())
    (target / "payload").mkdir()
    with before.open_file("rows.jsonl") as stream:
        (target / "payload" / "rows.jsonl").write_bytes(stream.read())
    try:
        found = find_pedigree(lab.project, old.id[:12])
        assert (found.id, found.address) == (old.id, "lab/raw")
        with pytest.raises(ArtifactError, match="only the records"):
            found.open_file("rows.jsonl")
    finally:
        shutil.rmtree(lab.root / "artifacts/other")


def test_a_cache_that_lacks_it_or_is_damaged_says_so(lab: Lab, tmp_path: Path) -> None:
    ledger = lab.run().ledger
    entry = next(e for e in recorded_at(lab.project, "first") if (e.address, e.part) == ("lab/raw", "record.json"))
    place = ledger.cache.path(entry.md5)
    whole = place.read_bytes()
    try:
        place.chmod(0o644)
        place.write_bytes(whole.replace(b"1", b"2", 1))
        with pytest.raises(ArtifactError, match=rf"this machine's cache does not hold an intact object {entry.md5}: add the DVC remote"):
            find_pedigree(lab.project, "lab/raw@first")
        lab.shell(f"dvc remote add -d away {tmp_path / 'remote'}")
        with pytest.raises(ArtifactError, match=rf"neither this machine's cache nor the remote 'away' holds an intact object {entry.md5}"):
            find_pedigree(lab.project, "lab/raw@first")
        kept = tmp_path / "remote/files/md5" / entry.md5[:2] / entry.md5[2:]
        kept.parent.mkdir(parents=True)
        kept.write_bytes(whole)
        assert find_pedigree(lab.project, "lab/raw@first").address == "lab/raw"
        kept.write_bytes(whole[:-2])
        with pytest.raises(ArtifactError, match=f"object {entry.md5} of the remote 'away' does not match its hash"):
            find_pedigree(lab.project, "lab/raw@first")
    finally:
        place.unlink(missing_ok=True)
        place.write_bytes(whole)
        lab.shell("dvc remote remove away", check=False)
