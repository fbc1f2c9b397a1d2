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
def source_file_by_absolute_path(folder, canary):
    lead(folder, str(canary / "diary.jsonl"))


@hostile
def source_file_above(folder, canary):
    lead(folder, "../../../../canary/diary.jsonl")


@hostile
def source_file_in_the_middle(folder, canary):
    lead(folder, "data/../../../../../canary/diary.jsonl")


@hostile
def source_file_with_doubled_slash(folder, canary):
    lead(folder, "data//rows.jsonl")


@hostile
def source_file_with_backslashes(folder, canary):
    lead(folder, "..\\..\\canary\\diary.jsonl")


@hostile
def source_file_with_nul(folder, canary):
    lead(folder, "rows.jsonl\x00.txt")


@hostile
def source_file_of_the_whole_project(folder, canary):
    lead(folder, ".")


@hostile
def payload_file_by_absolute_path(folder, canary):
    files(folder, str(canary / "diary.jsonl"))


@hostile
def payload_file_above(folder, canary):
    files(folder, "../canary/diary.jsonl")


@hostile
def payload_file_in_a_thousand_folders(folder, canary):
    files(folder, "a/" * 1000 + "rows.jsonl")


@hostile
def payload_file_of_a_very_long_name(folder, canary):
    files(folder, "a" * 5000)


@hostile
def payload_file_twice(folder, canary):
    files(folder, "rows.jsonl", "rows.jsonl")


@hostile
def payload_files_that_differ_in_case(folder, canary):
    files(folder, "rows.jsonl", "ROWS.jsonl")


@hostile
def payload_file_that_is_a_folder_too(folder, canary):
    files(folder, "rows.jsonl", "rows.jsonl/more")


@hostile
def file_is_a_link(folder, canary):
    folder.after.append(lambda path: (path / "rows.jsonl").unlink() or (path / "rows.jsonl").symlink_to(canary / "diary.jsonl"))


@hostile
def record_is_a_link(folder, canary):
    folder.after.append(lambda path: swap(path / "pedigree/record.json", canary / "diary.jsonl"))


@hostile
def run_is_a_link(folder, canary):
    folder.after.append(lambda path: swap(path / "pedigree/run.json", canary / "diary.jsonl"))


@hostile
def folder_is_a_link(folder, canary):
    folder.after.append(lambda path: (path / "deep").symlink_to(canary / "deep"))


@hostile
def link_to_a_parent(folder, canary):
    folder.after.append(lambda path: (path / "again").symlink_to(".."))


@hostile
def link_to_itself(folder, canary):
    folder.after.append(lambda path: (path / "again").symlink_to("again"))


@hostile
def dangling_link(folder, canary):
    folder.after.append(lambda path: (path / "gone").symlink_to(canary / "gone"))


@hostile
def link_to_a_device(folder, canary):
    folder.after.append(lambda path: swap(path / "rows.jsonl", Path("/dev/zero")))


@hostile
def pipe_for_a_payload_file(folder, canary):
    folder.after.append(lambda path: (path / "rows.jsonl").unlink() or os.mkfifo(path / "rows.jsonl"))


@hostile
def pipe_for_a_run(folder, canary):
    folder.after.append(lambda path: (path / "pedigree/run.json").unlink() or os.mkfifo(path / "pedigree/run.json"))


@hostile
def socket_in_the_payload(folder, canary):
    def bind(path: Path) -> None:
        here = os.getcwd()
        os.chdir(path)  # the names of sockets are short
        socket.socket(socket.AF_UNIX).bind("door")
        os.chdir(here)

    folder.after.append(bind)


@hostile
def git_option_for_a_commit(folder, canary):
    folder.run["attempts"][0]["code"]["commit"] = f"--output={canary}/diary.jsonl"


@hostile
def branch_for_a_commit(folder, canary):
    folder.run["attempts"][0]["code"]["commit"] = "HEAD"


@hostile
def short_commit(folder, canary):
    folder.run["attempts"][0]["code"]["commit"] = COMMIT[:12]


@hostile
def commit_with_a_line_end(folder, canary):
    folder.run["attempts"][0]["code"]["commit"] = f"{COMMIT}\n"


@hostile
def patch_without_end(folder, canary):
    folder.run["attempts"][0]["code"] |= {"dirty": True, "patch_sha256": "0" * 64, "patch": "x" * (3 << 20)}


@hostile
def checkpoints_of_a_strangers_store(folder, canary):
    folder.run["placement"]["checkpoint_url"] = f"file://{canary}"


@hostile
def address_above(folder, canary):
    folder.run["address"] = "../../canary"


@hostile
def fingerprint_of_a_file_above(folder, canary):
    folder.run["fingerprint"] = {"sha256": "0" * 64, "files": {"../../canary/diary.jsonl": "0" * 64}}


@hostile
def time_that_is_none(folder, canary):
    folder.run["attempts"][0]["ended_at"] = "2026-13-41T99:99:99+00:00"


@hostile
def attempts_of_another_type(folder, canary):
    folder.run["attempts"] = {"0": "none"}


@hostile
def run_with_a_surprise(folder, canary):
    folder.run["hook"] = f"rm -rf {canary}"


@hostile
def record_with_a_surprise(folder, canary):
    folder.record["hook"] = f"rm -rf {canary}"


@hostile
def record_that_is_a_list(folder, canary):
    folder.record = [folder.record]


@hostile
def huge_number(folder, canary):
    folder.raw["record.json"] = json.dumps(folder.record).replace('"rows": 3', f'"rows": {"9" * 6000}').encode()


@hostile
def not_a_number(folder, canary):
    folder.raw["record.json"] = json.dumps(folder.record).replace('"rows": 3', '"rows": NaN').encode()


@hostile
def infinite_number(folder, canary):
    folder.raw["record.json"] = json.dumps(folder.record).replace('"rows": 3', '"rows": 1e999').encode()


@hostile
def negative_size(folder, canary):
    folder.record["files"][0]["size"] = -1


@hostile
def size_as_text(folder, canary):
    folder.record["files"][0]["size"] = "100"


@hostile
def hash_of_another_length(folder, canary):
    folder.record["files"][0]["sha256"] = "0" * 63


@hostile
def hash_in_capitals(folder, canary):
    folder.record["content"] = folder.record["content"].upper()


@hostile
def deep_nesting(folder, canary):
    folder.raw["record.json"] = b"[" * 500_000 + b"]" * 500_000


@hostile
def deep_nesting_inside_a_config(folder, canary):
    deep = '{"a":' * 900 + "1" + "}" * 900
    folder.raw["run.json"] = json.dumps(folder.run).replace('"threads": 1', f'"threads": {deep}').encode()


@hostile
def huge_json(folder, canary):
    folder.raw["run.json"] = b'{"schema_version": 1, "address": "' + b"a" * (17 << 20) + b'"}'


@hostile
def values_without_end(folder, canary):
    folder.raw["lineage.json"] = b'{"schema_version":1,"artifacts":{"a":[' + b"[]," * 2_100_000 + b"[]]}}"


@hostile
def text_without_end_quote(folder, canary):
    folder.raw["record.json"] = b'{"a": "' + b'\\"' * 1_000_000


@hostile
def duplicate_keys(folder, canary):
    folder.raw["record.json"] = json.dumps(folder.record).replace('"version"', '"kind": "sft", "version"').encode()


@hostile
def not_utf8(folder, canary):
    folder.raw["lineage.json"] = b'{"schema_version": 1, "artifacts": {"\xff": 1}}'


@hostile
def half_a_character(folder, canary):
    folder.raw["record.json"] = json.dumps(folder.record).replace('"marks": []', '"marks": ["\\ud800"]').encode()


@hostile
def empty_record(folder, canary):
    folder.raw["record.json"] = b""


@hostile
def forged_key(folder, canary):
    folder.record["key"] = "0" * 64


@hostile
def forged_content(folder, canary):
    folder.record["content"] = "0" * 64


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


@hostile
def lineage_that_is_a_list(folder, canary):
    folder.lineage = []


@hostile
def ancestor_without_a_record(folder, canary):
    folder.lineage["artifacts"]["3" * 64] = {"run": folder.run}


def second(folder, **changes):
    """A lineage of today's form, in which runs name what they share by its hash."""
    return {"schema_version": 2, "artifacts": {}, "shared": {}, "patches": {}} | changes


@hostile
def shared_value_under_another_hash(folder, canary):
    folder.lineage = second(folder, shared={"0" * 64: {"python": "3"}})


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
def patch_under_another_hash(folder, canary):
    folder.lineage = second(folder, patches={"0" * 64: "diff --git a/x b/x\n"})


@hostile
def patch_that_is_too_long(folder, canary):
    text = "+" * ((2 << 20) + 1)
    folder.lineage = second(folder, patches={sha256(text.encode()): text})


@hostile
def lineage_with_a_field_too_many(folder, canary):
    folder.lineage = second(folder, extra={})


@hostile
def patch_in_a_run_of_today(folder, canary):
    code = folder.run["attempts"][-1]["code"] | {"patch": "diff --git a/x b/x\n"}
    folder.run = folder.run | {"schema_version": 2, "attempts": [{"code": code}]}


@hostile
def old_run_that_migrates_into_nothing(folder, canary):
    folder.run = {"schema_version": 1, "attempts": 3}


@hostile
def escapes_for_the_terminal(folder, canary):
    folder.reseal(marks=["\x1b]0;owned\x07\x1b[2J\x1b[31mall as recorded"])


@hostile
def escapes_of_eight_bits(folder, canary):
    folder.reseal(kind="prepare\u009b2Jdata")


@hostile
def text_that_runs_backwards(folder, canary):
    folder.reseal(inputs=[{"port": "data", "label": "\u202egpj.exe", "content": "1" * 64, "producer": "2" * 64}])


@hostile
def markup_for_the_terminal(folder, canary):
    folder.run["address"] = "[link=file:///etc/passwd]lab[/link]/[blink]raw"


@hostile
def script_for_the_page(folder, canary):
    folder.reseal(type="</script><script>alert(1)</script>")


@hostile
def sums_of_files_outside(folder, canary):
    folder.sums = f"{sha256(ROWS)}  rows.jsonl\n{'0' * 64}  ../canary/diary.jsonl\n{'0' * 64}  {canary}/deep/key.pem\n"


@hostile
def sums_that_are_a_link(folder, canary):
    folder.after.append(lambda path: swap(path / "pedigree/SHA256SUMS", canary / "diary.jsonl"))


@hostile
def pickle_in_a_model(folder, canary):
    folder.hold(model__safetensors=pickle.dumps({"weights": 1})).reseal(kind="sft", type="policy")


@hostile
def pickle_by_its_name(folder, canary):
    folder.hold(pytorch_model__bin=b"weights").reseal(kind="sft", type="policy")


@hostile
def code_in_a_model(folder, canary):
    folder.hold(modeling_llama__py=b"import os\n").reseal(kind="sft", type="policy")


@hostile
def unknown_kind(folder, canary):
    folder.reseal(kind="external", config={"command": f"rm -rf {canary}"})


@hostile
def processes_without_end(folder, canary):
    folder.run["numerics"]["world_size"] = 10**12
    folder.record["metrics"] = {"rows": -1, "\x1b[2J": 1}


@hostile
def schema_of_the_future(folder, canary):
    folder.record["schema_version"] = 99


@hostile
def file_names_that_are_no_text(folder, canary):
    folder.after.append(lambda path: (Path(os.fsdecode(os.fsencode(path) + b"/\xff\xfe")).write_text("x"),))


@hostile
def file_name_with_escapes(folder, canary):
    folder.after.append(lambda path: (path / "\x1b[2J\x1b[1;1Hall as recorded").write_text("x"))


def swap(path: Path, target: Path) -> None:
    path.unlink()
    path.symlink_to(target)


def identifier(record: dict) -> str:
    from pedigree.configs.base.frozen import digest

    return digest([record["key"], record["content"]])
