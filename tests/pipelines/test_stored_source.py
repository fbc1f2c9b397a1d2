"""A recipe whose raw rows lie in an object store: moved without a second run, and made again elsewhere from the records alone."""

import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import InProcessCommand
from faulty_store import KEYS, s3_server
from reproduction_lab import REPOSITORY, Clone
from running_lab import Lab, outcomes

from pedigree.data.store import storage

ROWS = "".join(json.dumps({"instruction": f"Say {n}.", "output": str(n)}) + "\n" for n in range(20)).encode()
SUMS = "{type: arithmetic, operations: [add], digits: [1], count: 5, seed: 2}"
FIRST, OTHER = "s3://bucket/raw/rows.jsonl", "s3://bucket/other/place.jsonl"
SOURCE = f"{{type: stored, name: sayings, url: {FIRST}, sha256: {hashlib.sha256(ROWS).hexdigest()}}}"


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Holds the rows at the first place."""
    for name, value in {**KEYS, "PEDIGREE_CACHE": str(tmp_path / "cache")}.items():
        monkeypatch.setenv(name, value)
    with s3_server("bucket") as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        storage.write(FIRST, ROWS)
        yield


def test_where_the_rows_lie_may_change_and_they_are_fetched_by_hash_again(tmp_path: Path) -> None:
    lab = Lab(tmp_path / "lab")
    shutil.copy(REPOSITORY / "stages/prepare_data/run.py", lab.code / "stages/prepare_data/run.py")
    lab.edit("configs/recipes/lab.yaml", SUMS, SOURCE)
    assert outcomes(lab)["raw"] == "ran"
    told = (lab.root / "artifacts/lab/raw/run.json").read_bytes()
    record = json.loads((lab.root / "artifacts/lab/raw/record.json").read_text())
    assert record["metrics"]["rows"] == 20

    storage.write(OTHER, ROWS)
    storage.remove(FIRST)
    lab.edit("configs/recipes/lab.yaml", FIRST, OTHER)
    assert "ran" not in outcomes(lab).values()
    assert (lab.root / "artifacts/lab/raw/run.json").read_bytes() == told, "it ran again although nothing but the place had changed"
    assert InProcessCommand(lab)("verify")

    shutil.rmtree(tmp_path / "cache")
    assert outcomes(lab, forced=("raw",))["raw"] == "ran" and list((tmp_path / "cache" / "sources").rglob("*.jsonl"))
    assert json.loads((lab.root / "artifacts/lab/raw/record.json").read_text())["content"] == record["content"]


@pytest.mark.slow
@pytest.mark.nightly
def test_a_fresh_clone_makes_them_again_from_an_export(tmp_path: Path) -> None:
    made = Clone.first(tmp_path, whole=True)
    made.write("stages/prepare_data/run.py", (REPOSITORY / "stages" / "prepare_data" / "run.py").read_text())
    made.edit("configs/recipes/lab.yaml", SUMS, SOURCE)
    made.commit()
    made.pedigree("run", "lab")
    made.commit()
    made.pedigree("export", "lab/clean", str(tmp_path / "exported"))
    clone = made.another("clone")
    clone.edit(".dvc/config", "remote = store", "")
    clone.pedigree("reproduce", str(tmp_path / "exported"), PEDIGREE_CACHE=str(tmp_path / "empty"))
    assert clone.verdicts() == {"raw": "identical", "suite": "identical", "clean": "identical"}
    assert list((tmp_path / "empty" / "sources").rglob("*.jsonl"))
