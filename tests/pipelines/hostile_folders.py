"""The corpus: what a stranger may have done to a folder that he hands over."""

import json
import os
import pickle
import socket
from collections.abc import Callable
from pathlib import Path

from hostile_lab import COMMIT, CONFIG, ROWS, Folder, record_of, sha256

from pedigree.configs.base.frozen import digest

SECRET = "private canary".upper()
"""What stands in the files of somebody else."""
Change = Callable[[Folder, Path], object]
"""What a stranger does to a sound folder; the path is somebody's own folder that he knows of."""
CORPUS: dict[str, Change] = {}


def hostile(change: Change) -> Change:
    CORPUS[change.__name__.replace("_", "-")] = change
    return change


def files_source(path: str) -> dict:
    return CONFIG | {"sources": [{"type": "files", "path": path, "count": None, "seed": 0}]}


def lead(folder: Folder, path: str) -> Folder:
    """A stage that reads a project file of this name."""
    return folder.reseal(config=files_source(path), source_files={path: "0" * 64})


def files(folder: Folder, *names: str) -> Folder:
    return folder.reseal(files=[{"path": name, "size": len(ROWS), "sha256": sha256(ROWS)} for name in names])


@hostile
def socket_in_the_payload(folder, canary):
    def bind(path: Path) -> None:
        here = os.getcwd()
        os.chdir(path)  # the names of sockets are short
        socket.socket(socket.AF_UNIX).bind("door")
        os.chdir(here)

    folder.after.append(bind)


@hostile
def deep_nesting_inside_a_config(folder, canary):
    deep = '{"a":' * 900 + "1" + "}" * 900
    folder.raw["run.json"] = json.dumps(folder.run).replace('"threads": 1', f'"threads": {deep}').encode()


@hostile
def parent_that_is_missing(folder, canary):
    edge = {"port": "leak_from", "label": "suite", "content": "1" * 64, "producer": "2" * 64}
    folder.reseal(inputs=[edge])


@hostile
def its_own_parent(folder, canary):
    own = {"port": "leak_from", "label": "me", "content": folder.record["content"], "producer": "0" * 64}
    folder.reseal(inputs=[own])
    folder.record["inputs"][0]["producer"] = identifier(folder.record)


@hostile
def parents_in_a_circle(folder, canary):
    other = record_of({"rows.jsonl": b'{"id":"other"}\n'}, config=CONFIG | {"seed": 7})
    for child, parent in ((folder.record, other), (other, folder.record)):
        child["inputs"] = [{"port": "leak_from", "label": "x", "content": parent["content"], "producer": "0" * 64}]
    mine, theirs = (
        record_of(folder.files, inputs=folder.record["inputs"]),
        record_of({"rows.jsonl": b'{"id":"other"}\n'}, config=CONFIG | {"seed": 7}, inputs=other["inputs"]),
    )
    mine["inputs"][0]["producer"], theirs["inputs"][0]["producer"] = identifier(theirs), identifier(mine)
    folder.record = mine
    folder.lineage["artifacts"][identifier(theirs)] = {"record": theirs, "run": folder.run}


@hostile
def ancestor_under_another_id(folder, canary):
    parent = record_of({"rows.jsonl": b'{"id":"other"}\n'})
    folder.lineage["artifacts"]["3" * 64] = {"record": parent, "run": folder.run}
    folder.reseal(inputs=[{"port": "leak_from", "label": "x", "content": parent["content"], "producer": "3" * 64}])


def second(folder, **changes):
    """A lineage of today's form, in which runs name what they share by its hash."""
    return {"schema_version": 2, "artifacts": {}, "shared": {}, "patches": {}} | changes


@hostile
def shared_value_that_is_not_there(folder, canary):
    run = folder.run | {"environment": {"shared": "0" * 64}}
    folder.lineage = second(folder, artifacts={"3" * 64: {"record": folder.record, "run": run}})


@hostile
def shared_values_that_fill_the_memory(folder, canary):
    large = {"python": "3.11.7", "libraries": {f"a{number}": "1" * 1000 for number in range(400)}}
    run = {"schema_version": 2, "environment": {"shared": digest(large)}}
    entries = {f"{number:064x}": {"record": folder.record, "run": run} for number in range(9000)}
    folder.lineage = second(folder, artifacts=entries, shared={digest(large): large})


@hostile
def patch_that_is_too_long(folder, canary):
    text = "+" * ((2 << 20) + 1)
    folder.lineage = second(folder, patches={sha256(text.encode()): text})


@hostile
def patch_in_a_run_of_today(folder, canary):
    code = folder.run["attempts"][-1]["code"] | {"patch": "diff --git a/x b/x\n"}
    folder.run = folder.run | {"schema_version": 2, "attempts": [{"code": code}]}


@hostile
def processes_without_end(folder, canary):
    folder.run["numerics"]["world_size"] = 10**12
    folder.record["metrics"] = {"rows": -1, "\x1b[2J": 1}


def swap(path: Path, target: Path) -> None:
    path.unlink()
    path.symlink_to(target)


def identifier(record: dict) -> str:
    from pedigree.configs.base.frozen import digest

    return digest([record["key"], record["content"]])


CORPUS |= {
    "source-file-by-absolute-path": lambda folder, canary: lead(folder, str(canary / "diary.jsonl")),
    "source-file-above": lambda folder, canary: lead(folder, "../../../../canary/diary.jsonl"),
    "source-file-in-the-middle": lambda folder, canary: lead(folder, "data/../../../../../canary/diary.jsonl"),
    "source-file-with-doubled-slash": lambda folder, canary: lead(folder, "data//rows.jsonl"),
    "source-file-with-backslashes": lambda folder, canary: lead(folder, "..\\..\\canary\\diary.jsonl"),
    "source-file-with-nul": lambda folder, canary: lead(folder, "rows.jsonl\x00.txt"),
    "source-file-of-the-whole-project": lambda folder, canary: lead(folder, "."),
    "payload-file-by-absolute-path": lambda folder, canary: files(folder, str(canary / "diary.jsonl")),
    "payload-file-above": lambda folder, canary: files(folder, "../canary/diary.jsonl"),
    "payload-file-in-a-thousand-folders": lambda folder, canary: files(folder, "a/" * 1000 + "rows.jsonl"),
    "payload-file-of-a-very-long-name": lambda folder, canary: files(folder, "a" * 5000),
    "payload-file-twice": lambda folder, canary: files(folder, "rows.jsonl", "rows.jsonl"),
    "payload-files-that-differ-in-case": lambda folder, canary: files(folder, "rows.jsonl", "ROWS.jsonl"),
    "payload-file-that-is-a-folder-too": lambda folder, canary: files(folder, "rows.jsonl", "rows.jsonl/more"),
    "file-is-a-link": lambda folder, canary: folder.after.append(
        lambda path: (path / "rows.jsonl").unlink() or (path / "rows.jsonl").symlink_to(canary / "diary.jsonl")
    ),
    "record-is-a-link": lambda folder, canary: folder.after.append(
        lambda path: swap(path / "pedigree/record.json", canary / "diary.jsonl")
    ),
    "run-is-a-link": lambda folder, canary: folder.after.append(lambda path: swap(path / "pedigree/run.json", canary / "diary.jsonl")),
    "folder-is-a-link": lambda folder, canary: folder.after.append(lambda path: (path / "deep").symlink_to(canary / "deep")),
    "link-to-a-parent": lambda folder, canary: folder.after.append(lambda path: (path / "again").symlink_to("..")),
    "link-to-itself": lambda folder, canary: folder.after.append(lambda path: (path / "again").symlink_to("again")),
    "dangling-link": lambda folder, canary: folder.after.append(lambda path: (path / "gone").symlink_to(canary / "gone")),
    "link-to-a-device": lambda folder, canary: folder.after.append(lambda path: swap(path / "rows.jsonl", Path("/dev/zero"))),
    "pipe-for-a-payload-file": lambda folder, canary: folder.after.append(
        lambda path: (path / "rows.jsonl").unlink() or os.mkfifo(path / "rows.jsonl")
    ),
    "pipe-for-a-run": lambda folder, canary: folder.after.append(
        lambda path: (path / "pedigree/run.json").unlink() or os.mkfifo(path / "pedigree/run.json")
    ),
    "git-option-for-a-commit": lambda folder, canary: folder.run["attempts"][0]["code"].update(commit=f"--output={canary}/diary.jsonl"),
    "branch-for-a-commit": lambda folder, canary: folder.run["attempts"][0]["code"].update(commit="HEAD"),
    "short-commit": lambda folder, canary: folder.run["attempts"][0]["code"].update(commit=COMMIT[:12]),
    "commit-with-a-line-end": lambda folder, canary: folder.run["attempts"][0]["code"].update(commit=f"{COMMIT}\n"),
    "patch-without-end": lambda folder, canary: folder.run["attempts"][0]["code"].update(
        {"dirty": True, "patch_sha256": "0" * 64, "patch": "x" * (3 << 20)}
    ),
    "checkpoints-of-a-strangers-store": lambda folder, canary: folder.run["placement"].update(checkpoint_url=f"file://{canary}"),
    "address-above": lambda folder, canary: folder.run.update(address="../../canary"),
    "fingerprint-of-a-file-above": lambda folder, canary: folder.run.update(
        fingerprint={"sha256": "0" * 64, "files": {"../../canary/diary.jsonl": "0" * 64}}
    ),
    "time-that-is-none": lambda folder, canary: folder.run["attempts"][0].update(ended_at="2026-13-41T99:99:99+00:00"),
    "attempts-of-another-type": lambda folder, canary: folder.run.update(attempts={"0": "none"}),
    "run-with-a-surprise": lambda folder, canary: folder.run.update(hook=f"rm -rf {canary}"),
    "record-with-a-surprise": lambda folder, canary: folder.record.update(hook=f"rm -rf {canary}"),
    "record-that-is-a-list": lambda folder, canary: setattr(folder, "record", [folder.record]),
    "huge-number": lambda folder, canary: folder.raw.update(
        {"record.json": json.dumps(folder.record).replace('"rows": 3', f'"rows": {"9" * 6000}').encode()}
    ),
    "not-a-number": lambda folder, canary: folder.raw.update(
        {"record.json": json.dumps(folder.record).replace('"rows": 3', '"rows": NaN').encode()}
    ),
    "infinite-number": lambda folder, canary: folder.raw.update(
        {"record.json": json.dumps(folder.record).replace('"rows": 3', '"rows": 1e999').encode()}
    ),
    "negative-size": lambda folder, canary: folder.record["files"][0].update(size=-1),
    "size-as-text": lambda folder, canary: folder.record["files"][0].update(size="100"),
    "hash-of-another-length": lambda folder, canary: folder.record["files"][0].update(sha256="0" * 63),
    "hash-in-capitals": lambda folder, canary: folder.record.update(content=folder.record["content"].upper()),
    "deep-nesting": lambda folder, canary: folder.raw.update({"record.json": b"[" * 500_000 + b"]" * 500_000}),
    "huge-json": lambda folder, canary: folder.raw.update({"run.json": b'{"schema_version": 1, "address": "' + b"a" * (17 << 20) + b'"}'}),
    "values-without-end": lambda folder, canary: folder.raw.update(
        {"lineage.json": b'{"schema_version":1,"artifacts":{"a":[' + b"[]," * 2_100_000 + b"[]]}}"}
    ),
    "text-without-end-quote": lambda folder, canary: folder.raw.update({"record.json": b'{"a": "' + b'\\"' * 1_000_000}),
    "duplicate-keys": lambda folder, canary: folder.raw.update(
        {"record.json": json.dumps(folder.record).replace('"version"', '"kind": "sft", "version"').encode()}
    ),
    "not-utf8": lambda folder, canary: folder.raw.update({"lineage.json": b'{"schema_version": 1, "artifacts": {"\xff": 1}}'}),
    "half-a-character": lambda folder, canary: folder.raw.update(
        {"record.json": json.dumps(folder.record).replace('"marks": []', '"marks": ["\\ud800"]').encode()}
    ),
    "empty-record": lambda folder, canary: folder.raw.update({"record.json": b""}),
    "forged-key": lambda folder, canary: folder.record.update(key="0" * 64),
    "forged-content": lambda folder, canary: folder.record.update(content="0" * 64),
    "lineage-that-is-a-list": lambda folder, canary: setattr(folder, "lineage", []),
    "ancestor-without-a-record": lambda folder, canary: folder.lineage["artifacts"].update({"3" * 64: {"run": folder.run}}),
    "shared-value-under-another-hash": lambda folder, canary: setattr(
        folder, "lineage", second(folder, shared={"0" * 64: {"python": "3"}})
    ),
    "patch-under-another-hash": lambda folder, canary: setattr(
        folder, "lineage", second(folder, patches={"0" * 64: "diff --git a/x b/x\n"})
    ),
    "lineage-with-a-field-too-many": lambda folder, canary: setattr(folder, "lineage", second(folder, extra={})),
    "old-run-that-migrates-into-nothing": lambda folder, canary: setattr(folder, "run", {"schema_version": 1, "attempts": 3}),
    "escapes-for-the-terminal": lambda folder, canary: folder.reseal(marks=["\x1b]0;owned\x07\x1b[2J\x1b[31mall as recorded"]),
    "escapes-of-eight-bits": lambda folder, canary: folder.reseal(kind="prepare\u009b2Jdata"),
    "text-that-runs-backwards": lambda folder, canary: folder.reseal(
        inputs=[{"port": "data", "label": "\u202egpj.exe", "content": "1" * 64, "producer": "2" * 64}]
    ),
    "markup-for-the-terminal": lambda folder, canary: folder.run.update(address="[link=file:///etc/passwd]lab[/link]/[blink]raw"),
    "script-for-the-page": lambda folder, canary: folder.reseal(type="</script><script>alert(1)</script>"),
    "sums-of-files-outside": lambda folder, canary: setattr(
        folder, "sums", f"{sha256(ROWS)} rows.jsonl\n{'0' * 64} ../canary/diary.jsonl\n{'0' * 64} {canary}/deep/key.pem\n"
    ),
    "sums-that-are-a-link": lambda folder, canary: folder.after.append(
        lambda path: swap(path / "pedigree/SHA256SUMS", canary / "diary.jsonl")
    ),
    "pickle-in-a-model": lambda folder, canary: folder.hold(model__safetensors=pickle.dumps({"weights": 1})).reseal(
        kind="sft", type="policy"
    ),
    "pickle-by-its-name": lambda folder, canary: folder.hold(pytorch_model__bin=b"weights").reseal(kind="sft", type="policy"),
    "code-in-a-model": lambda folder, canary: folder.hold(modeling_llama__py=b"import os\n").reseal(kind="sft", type="policy"),
    "unknown-kind": lambda folder, canary: folder.reseal(kind="magic", config={"command": f"rm -rf {canary}"}),
    "schema-of-the-future": lambda folder, canary: folder.record.update(schema_version=99),
    "file-names-that-are-no-text": lambda folder, canary: folder.after.append(
        lambda path: (Path(os.fsdecode(os.fsencode(path) + b"/\xff\xfe")).write_text("x"),)
    ),
    "file-name-with-escapes": lambda folder, canary: folder.after.append(
        lambda path: (path / "\x1b[2J\x1b[1;1Hall as recorded").write_text("x")
    ),
}
