"""Pedigrees and provenance of real artifacts, built by real jobs in a lab."""

import json
import shutil
from pathlib import Path

import pytest
from running_lab import Lab

from pedigree.data.artifacts.artifacts import ArtifactError
from pedigree.data.artifacts.provenance import fingerprint
from pedigree.pipelines.lineage.ancestry import find_artifact, published, read_pedigree, walk


@pytest.fixture
def lab(template: Lab) -> Lab:
    """Tests leave it as it is."""
    return template


def test_a_folder_alone_holds_its_ancestry(lab: Lab, tmp_path: Path) -> None:
    copied = tmp_path / "anywhere"
    shutil.copytree(lab.root / "artifacts/lab/cleaner", copied)
    lines = [(found.depth, found.address, found.role, found.repeated) for found in walk(read_pedigree(copied))]
    assert lines == [
        (0, "lab/cleaner", "", False),
        (1, "lab/clean", "data", False),
        (2, "lab/raw", "data", False),
        (2, "lab/suite", "benchmarks", False),
        (1, "lab/suite", "benchmarks", True),
    ]


def test_artifacts_are_found_by_folder_address_name_id_and_content(lab: Lab) -> None:
    project = lab.project
    clean = find_artifact(project, "lab/clean")
    assert find_artifact(project, "clean") == clean
    assert find_artifact(None, str(clean.path)) == clean
    assert find_artifact(project, clean.record.id[:12]) == clean
    assert len(list(published(project))) == 4
    with pytest.raises(ArtifactError, match="matches several artifacts: lab/clean, lab/cleaner, lab/raw"):
        find_artifact(project, clean.record.content[:12])  # the stages pass the same rows on
    with pytest.raises(ArtifactError, match="not an artifact folder"):
        find_artifact(project, "zzzz")


def test_damaged_lineage_is_named(lab: Lab, tmp_path: Path) -> None:
    copied = tmp_path / "x"
    shutil.copytree(lab.root / "artifacts/lab/clean", copied)
    lineage = json.loads((copied / "lineage.json").read_text())
    gone = next(iter(lineage["artifacts"]))
    del lineage["artifacts"][gone]
    (copied / "lineage.json").write_text(json.dumps(lineage))
    with pytest.raises(ArtifactError, match=f"lacks {gone[:12]}"):
        read_pedigree(copied)


def test_fingerprint_sees_code_and_no_comments(tmp_path: Path) -> None:
    package = tmp_path / "pedigree"
    (package / "stages" / "count").mkdir(parents=True)
    (package / "data").mkdir()
    (package / "data" / "rows.py").write_text('"""Rows."""\nONE = 1\n')
    (package / "data" / "other.py").write_text("TWO = 2\n")
    stage = package / "stages" / "count" / "run.py"
    stage.write_text("import json\nfrom pedigree.data.rows import ONE\n\ndef run():\n    return ONE\n")
    before = fingerprint("count", tmp_path)
    assert sorted(before["files"]) == ["data/rows.py", "stages/count/run.py"]
    stage.write_text('import json\nfrom pedigree.data.rows import ONE\n\n\ndef run():  # one\n    """One."""\n    return (ONE)\n')
    assert fingerprint("count", tmp_path) == before
    (package / "data" / "rows.py").write_text("ONE = 2\n")
    after = fingerprint("count", tmp_path)
    assert [name for name in after["files"] if after["files"][name] != before["files"][name]] == ["data/rows.py"]


def test_the_fingerprint_of_training_holds_no_code_that_only_prepares_rows() -> None:
    prepared = {"configs/rows/filters.py", "configs/rows/row_sources.py", "configs/base/licenses.py"}
    assert prepared <= fingerprint("prepare_data")["files"].keys()
    assert not prepared & fingerprint("sft")["files"].keys()
