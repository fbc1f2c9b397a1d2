"""A recipe whose raw rows lie in an object store: moved without a second run, and made again elsewhere from the records alone."""

import hashlib
import json
from pathlib import Path

import pytest
from faulty_store import KEYS, s3_server
from reproduction_lab import REPOSITORY, Clone

from pedigree.data.store import storage

ROWS = "".join(json.dumps({"instruction": f"Say {n}.", "output": str(n)}) + "\n" for n in range(20)).encode()


@pytest.mark.slow
def test_where_the_rows_lie_may_change_and_a_fresh_clone_fetches_them_by_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**KEYS, "PEDIGREE_CACHE": str(tmp_path / "cache")}.items():
        monkeypatch.setenv(name, value)
    with s3_server("bucket") as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        storage.write("s3://bucket/raw/rows.jsonl", ROWS)
        made = Clone.first(tmp_path, whole=True)
        made.write("stages/prepare_data/run.py", (REPOSITORY / "stages" / "prepare_data" / "run.py").read_text())
        source = f"{{type: stored, name: sayings, url: s3://bucket/raw/rows.jsonl, sha256: {hashlib.sha256(ROWS).hexdigest()}}}"
        made.edit("configs/recipes/lab.yaml", "{type: arithmetic, operations: [add], digits: [1], count: 5, seed: 2}", source)
        made.commit()
        made.pedigree("run", "lab")
        told = (made.root / "artifacts/lab/raw/run.json").read_bytes()
        assert json.loads((made.root / "artifacts/lab/raw/record.json").read_text())["metrics"]["rows"] == 20

        made.pedigree("export", "lab/clean", str(tmp_path / "exported"))
        storage.write("s3://bucket/other/place.jsonl", ROWS)
        storage.remove("s3://bucket/raw/rows.jsonl")
        made.edit("configs/recipes/lab.yaml", "s3://bucket/raw/rows.jsonl", "s3://bucket/other/place.jsonl")
        made.pedigree("run", "lab")
        assert (made.root / "artifacts/lab/raw/run.json").read_bytes() == told, "it ran again although nothing but the place had changed"
        assert made.pedigree("verify")

        storage.write("s3://bucket/raw/rows.jsonl", ROWS)
        made.commit()
        clone = made.another("clone")
        clone.edit(".dvc/config", "remote = store", "")
        clone.pedigree("reproduce", str(tmp_path / "exported"), PEDIGREE_CACHE=str(tmp_path / "empty"))
        assert clone.verdicts() == {"raw": "identical", "suite": "identical", "clean": "identical"}
        assert list((tmp_path / "empty" / "sources").rglob("*.jsonl"))
