"""What it costs to track an artifact: bytes are hashed once, by the job that wrote them, and never believed when they look changed."""

import errno
import gc
import hashlib
import importlib
import json
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from running_lab import Lab

from pedigree.data.artifacts.artifacts import ArtifactError, content_hash, entries_of, survey, write_json
from pedigree.data.store import hashing, untrusted
from pedigree.pipelines.jobs import attempts, context
from pedigree.pipelines.ledger.cache import md5_of
from pedigree.pipelines.ledger.ledger import Ledger
from pedigree.pipelines.lineage.verify import verify_project
from pedigree.pipelines.maintain.gc import collect
from pedigree.pipelines.run.ensure import Result
from pedigree.pipelines.run.plans import plan
from pedigree.pipelines.run.runs import run_graph


def test_a_payload_is_read_by_its_job_and_by_nobody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build: Any = importlib.import_module("dvc_data.hashfile.build")
    lab, read, hash_file = Lab(tmp_path), [], build.hash_file

    def noted(path: str, *others: Any, **more: Any) -> Any:
        read.append(Path(path).relative_to(lab.root / "artifacts").as_posix())
        return hash_file(path, *others, **more)

    monkeypatch.setattr(build, "hash_file", noted)
    monkeypatch.setattr(attempts, "scan", lambda folder: pytest.fail(f"{folder} is hashed again"))
    assert all(isinstance(end, Result) for end in run_graph(lab.run()))
    assert "lab/raw/record.json" in read and not [path for path in read if "/payload" in path]
    lock = yaml.safe_load((lab.root / "artifacts/lab/dvc.lock").read_text())["stages"]["raw"]["outs"]
    (listed,) = json.loads((Ledger(lab.project).cache.path(next(o["md5"] for o in lock if "payload" in o["path"]))).read_text())
    rows = (lab.root / "artifacts/lab/raw/payload/rows.jsonl").read_bytes()
    assert listed == {"md5": hashlib.md5(rows, usedforsecurity=False).hexdigest(), "relpath": "rows.jsonl"}


def test_an_output_that_changed_after_its_report_is_not_published(tmp_path: Path) -> None:
    rows = tmp_path / "out" / "payload" / "rows.jsonl"
    rows.parent.mkdir(parents=True)
    rows.write_text("one")
    seen = survey(rows.parent, md5=True)
    files = entries_of(seen)
    done = {"ok": True, "metrics": {}, "made_by": {}, "content": content_hash(files), "files": [entry.model_dump() for entry in files]}
    write_json(tmp_path / "done.json", done | {"seen": {name: found.as_json() for name, found in seen.items()}})
    assert attempts.unproven(tmp_path) is None and attempts.unproven(tmp_path, thorough=True) is None
    before = rows.stat()
    rows.write_text("two")
    assert attempts.unproven(tmp_path) == ("storage", "the job's output changed after it was reported")
    os.utime(rows, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert attempts.unproven(tmp_path, thorough=True) == ("storage", "the job's output changed after it was reported")
    (rows.parent / "more").write_text("")
    assert attempts.unproven(tmp_path) is not None


@pytest.mark.parametrize("how", ["restored from the cache", "adopted"])
def test_hashing_what_comes_back_is_shown_piece_by_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """100 GB take minutes to hash: who waits sees how far it is, and no byte is read without a word."""
    monkeypatch.setattr(hashing, "PIECE_BYTES", 4 << 10)
    monkeypatch.setattr(context, "LONG_BYTES", 100 << 10)
    build: Any = importlib.import_module("dvc_data.hashfile.build")
    hash_file, silently = build.hash_file, []
    lab = Lab(tmp_path)
    lab.knobs(raw={"bytes": 200 << 10})
    only_raw = {"lab/raw"}
    assert all(isinstance(end, Result) for end in run_graph(lab.run(), only_raw))

    def noted(path: str, *others: Any, **more: Any) -> Any:
        silently.append(Path(path).relative_to(lab.root).as_posix())
        return hash_file(path, *others, **more)

    monkeypatch.setattr(build, "hash_file", noted)
    if how == "adopted":
        (lab.root / "artifacts/lab/dvc.lock").unlink()
        shutil.rmtree(lab.root / ".dvc/cache/runs", ignore_errors=True)
        shutil.rmtree(Ledger(lab.project).locks.runs, ignore_errors=True)
    else:
        shutil.rmtree(lab.root / "artifacts/lab/raw")
    shown: list[str] = []
    run = lab.run(watch=lambda address, state, detail="", **more: shown.append(f"{state} {detail}"))
    (end,) = run_graph(run, only_raw)
    assert isinstance(end, Result) and end.outcome == "restored" and lab.runs() == ["raw"]
    pieces = [line for line in shown if line.startswith("hashing ")]
    assert len(pieces) >= 50 and "hashing 204.9 kB of 204.9 kB" in pieces, shown[-5:]
    assert not [path for path in silently if "/payload" in path]


def test_a_list_of_files_that_cannot_be_read_now_stays_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab(tmp_path)
    run_graph(lab.run())
    cache = Ledger(lab.project).cache
    (oid,) = [oid for out in Ledger(lab.project).locks.entry("lab/raw").outs if (oid := out.md5 or "").endswith(".dir")][:1]  # type: ignore

    def no_more_files(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as broken, pytest.raises(ArtifactError, match="Too many open files"):
        broken.setattr(untrusted, "open_plain", no_more_files)
        cache.names([oid])
    assert oid in cache.objects() and oid in cache.names([oid])


def test_an_edited_input_is_noticed_beside_a_broken_link(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    run_graph(lab.run())
    payload = lab.root / "artifacts/lab/raw/payload"
    shutil.copy(payload / "rows.jsonl", payload / "new")
    (payload / "new").rename(payload / "rows.jsonl")
    (payload / "rows.jsonl").write_text((payload / "rows.jsonl").read_text() + "\n")
    (payload / "link").symlink_to("nowhere")
    (child,) = [node for node in lab.run().graph.nodes.values() if "lab/raw" in node.parents][:1]
    assert Ledger(lab.project).reasons(child)


def test_a_damaged_object_is_looked_for_with_a_sign_of_every_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashing, "PIECE_BYTES", 4 << 10)
    (tmp_path / "object").write_bytes(b"x" * (10 << 10))
    told: list[int] = []
    assert md5_of(tmp_path / "object", told.append) == hashlib.md5(b"x" * (10 << 10), usedforsecurity=False).hexdigest()
    assert told == [4096, 4096, 2048]


def test_what_dvc_opens_is_closed_with_the_run(tmp_path: Path) -> None:
    """Its databases lie in circles: those of every thread would stay open until all garbage is collected."""
    lab = Lab(tmp_path / "project")
    run_graph(lab.run())
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            plan(lab.run())
            assert all(isinstance(end, Result) for end in run_graph(lab.run(), forced={"lab/raw"}))
            assert verify_project(lab.project).problems == []
            collect(lab.project)
        assert _open_databases(tmp_path) == []
    finally:
        gc.enable()


def _open_databases(below: Path) -> list[str]:
    """Files of SQLite below a folder that this process holds open."""
    found = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            found.append(os.readlink(descriptor))
    return sorted(name for name in found if ".db" in Path(name).name and Path(name).is_relative_to(below))
