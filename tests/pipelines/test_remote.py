"""Artifacts by way of a remote: what a clone without data knows, what it downloads, and what faults of a real S3 server do.

Nothing is lost, nothing half-written or damaged is served, and every error says what to do.
"""

import filecmp
import hashlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import boto3
import pytest
import yaml
from faulty_store import KEYS, FaultyStore, faulty_store, s3_server
from reproduction_lab import Clone
from running_lab import CLEAN, Lab, status

from pedigree.pipelines.jobs.context import RunContext, StageFailed
from pedigree.pipelines.ledger.ledger import Ledger
from pedigree.pipelines.ledger.transfers import RemoteError
from pedigree.pipelines.lineage.verify import verify_project
from pedigree.pipelines.run.ensure import Result
from pedigree.pipelines.run.exchange import pull, push
from pedigree.pipelines.run.opening import Request, open_run
from pedigree.pipelines.run.planning import rows_of
from pedigree.pipelines.run.plans import plan
from pedigree.pipelines.run.runs import run_graph

BUCKET = "pedigree-test"
ALL = {"suite", "raw", "clean", "cleaner"}


@pytest.fixture(scope="module")
def store() -> Iterator[FaultyStore]:
    """A server behind a proxy that can fail; keys are in the environment alone."""
    with pytest.MonkeyPatch.context() as patch, s3_server(BUCKET) as url, faulty_store(url) as found:
        for name, value in KEYS.items():
            patch.setenv(name, value)
        yield found


def with_remote(lab: Lab, url: str, *settings: str) -> Lab:
    """The lab, whose four stages are made, with a remote: pushed and committed."""
    lab.edit(".dvc/config", "[core]\n", "[core]\n    remote = store\n")
    lab.write(
        ".dvc/config", "\n    ".join([f"{(lab.root / '.dvc/config').read_text()}['remote \"store\"']", f"url = {url}", *settings, ""])
    )
    push(lab.run())
    lab.shell("git add -A && git -c user.name=l -c user.email=l@example.org commit -qm made")
    return lab


@pytest.fixture(scope="module")
def lab(template: Lab, store: FaultyStore, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """With the bucket as its remote; tests leave both as they are."""
    return with_remote(template.twin(tmp_path_factory.mktemp("made")), f"s3://{BUCKET}/artifacts", f"endpointurl = {store.url}")


@pytest.fixture(scope="module")
def plain(template: Lab, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """With a folder as its remote, for what is the same with any; tests leave both as they are."""
    folder = tmp_path_factory.mktemp("plain")
    return with_remote(template.twin(folder), str(folder / "store"))


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients give up at once: for faults that do not pass, where only pauses would be longer."""
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")


def object_of(lab: Lab, file: str) -> Path:
    """The object of a lab's folder behind a file of its artifacts."""
    md5 = hashlib.md5((lab.root / "artifacts/lab" / file).read_bytes(), usedforsecurity=False).hexdigest()
    return lab.root.parent / "store/files/md5" / md5[:2] / md5[2:]


@contextmanager
def changed(path: Path, body: bytes | None) -> Iterator[None]:
    """An object with other bytes, or none; afterwards as it was."""
    before = path.read_bytes()
    path.unlink()
    if body is not None:
        path.write_bytes(body)
    yield
    path.unlink(missing_ok=True)
    path.write_bytes(before)


def cloned(lab: Lab, folder: Path) -> Lab:
    """A fresh clone: what git has, and nothing else."""
    clone = object.__new__(Lab)
    clone.code, clone.root, clone.environment = lab.code, folder, lab.environment
    subprocess.run(["git", "clone", "-q", lab.root, clone.root], check=True)
    (clone.root / ".dvc/config.local").write_text(f"[core]\n    site_cache_dir = {folder}-site\n")
    clone.forget_runs()
    return clone


def outcomes(run: RunContext, ends: Any = None) -> dict[str, str]:
    """Stage → outcome, or the cause of its failure."""
    ends = run_graph(run) if ends is None else ends
    said = {end.address: end.outcome if isinstance(end, Result) else getattr(end, "cause", "not run") for end in ends}
    return {address.partition("/")[2]: word for address, word in said.items()}


def downloads(store: FaultyStore) -> list[str]:
    """Objects that were read since the requests were last forgotten."""
    found = [request for request in store.requests if request.startswith("GET ") and "list-type" not in request]
    store.requests.clear()
    return found


def test_a_clone_without_data_knows_what_is_done_and_reads_records_alone(lab: Lab, store: FaultyStore, tmp_path: Path) -> None:
    clone = cloned(lab, tmp_path / "two")
    stages = yaml.safe_load((clone.root / "artifacts/lab/dvc.lock").read_text())["stages"]
    outs = {(stage, Path(out["path"]).name): out["md5"] for stage, entry in stages.items() for out in entry["outs"]}
    decided = [(stage, "run.json") for stage in stages if "clean" in stage]  # it names the code that decided which rows were kept
    records = {md5 for (stage, name), md5 in outs.items() if name == "record.json" or (stage, name) in decided}
    downloads(store)
    looking = open_run(clone.project, Request("lab"), looking=True)
    assert {row.state for row in rows_of(looking, plan(looking))} == {"in the remote"}
    read = downloads(store)
    assert {"".join(name.split("/")[-2:]) for name in read} == records and len(read) == len(records) == 6
    assert outcomes(clone.run()) == dict.fromkeys(ALL, "remote")
    assert len(downloads(store)) == 6 and clone.contents() == {} and clone.runs() == []


def test_what_must_run_brings_its_inputs_and_nothing_else(plain: Lab, tmp_path: Path) -> None:
    clone = cloned(plain, tmp_path / "two")
    clone.edit("configs/recipes/lab.yaml", "ngram: 5", "ngram: 6")
    assert outcomes(clone.run()) == {"suite": "remote", "raw": "remote", "clean": "remote", "cleaner": "ran"}
    assert clone.contents().keys() == {"suite", "clean", "cleaner"} and clone.runs() == ["cleaner"]
    assert verify_project(clone.project).problems == []


def test_pull_brings_finished_stages_and_runs_nothing(plain: Lab, tmp_path: Path) -> None:
    clone = cloned(plain, tmp_path / "two")
    clone.edit("configs/recipes/lab.yaml", "ngram: 5", "ngram: 6")
    found = pull(clone.run())
    assert outcomes(clone.run(), found) == {"suite": "restored", "raw": "restored", "clean": "restored", "cleaner": "not_finished"}
    assert clone.runs() == []
    clone.edit("configs/recipes/lab.yaml", "ngram: 6", "ngram: 5")
    assert outcomes(clone.run(), pull(clone.run()))["cleaner"] == "restored"
    assert clone.contents() == plain.contents() and status(clone) == CLEAN


def test_the_run_cache_travels(plain: Lab, tmp_path: Path) -> None:
    clone = cloned(plain, tmp_path / "two")
    (clone.root / "artifacts/lab/dvc.lock").unlink()
    assert outcomes(clone.run()) == dict.fromkeys(ALL, "restored")
    assert clone.runs() == [] and clone.contents() == plain.contents()


def test_push_sends_each_thing_once(lab: Lab, store: FaultyStore) -> None:
    store.requests.clear()
    assert push(lab.run()) == (0, 0)
    assert [request for request in store.requests if request.startswith("PUT")] == []


def test_push_sends_again_what_the_remote_has_lost(plain: Lab) -> None:
    lost = object_of(plain, "raw/record.json")
    lost.unlink()
    assert push(plain.run())[0] == 1 and lost.stat().st_size > 0


def test_a_damaged_object_is_neither_served_nor_silent(plain: Lab, tmp_path: Path) -> None:
    clone = cloned(plain, tmp_path / "two")
    good = (plain.root / "artifacts/lab/suite/payload/rows.jsonl").read_bytes()
    with changed(object_of(plain, "suite/payload/rows.jsonl"), bytes([good[0] ^ 1]) + good[1:]):
        (problem,) = verify_project(clone.project).problems
        assert problem.file.startswith("remote object store/") and "lab/suite" in problem.file
        clone.edit("configs/recipes/lab.yaml", "ngram: 5", "ngram: 6")
        run = clone.run()
        assert outcomes(run)["cleaner"] == "ran" and clone.runs() == ["suite", "cleaner"]
    (notice,) = run.ledger.notices
    assert "lab/suite" in notice and "damaged" in notice
    assert clone.contents()["suite"] == plain.contents()["suite"]


def test_a_lost_object_makes_its_stage_run_again(plain: Lab, tmp_path: Path) -> None:
    clone = cloned(plain, tmp_path / "two")
    with changed(object_of(plain, "raw/record.json"), None):
        assert outcomes(clone.run()) == {"suite": "remote", "raw": "ran", "clean": "remote", "cleaner": "remote"}


@pytest.mark.nightly
def test_throttling_and_cut_connections_are_survived(lab: Lab, store: FaultyStore, tmp_path: Path) -> None:
    clone = cloned(lab, tmp_path / "two")
    store.throttle(3)
    store.cut_downloads(2, matching="files/md5")
    assert outcomes(clone.run(), pull(clone.run())) == dict.fromkeys(ALL, "restored")
    assert store.pending == 0 and clone.contents() == lab.contents()


@pytest.mark.usefixtures("impatient")
def test_a_push_cut_in_the_middle_is_gone_on_with(lab: Lab, store: FaultyStore, tmp_path: Path) -> None:
    one, two = cloned(lab, tmp_path / "one"), cloned(lab, tmp_path / "two")
    for clone in (one, two):
        clone.edit("configs/recipes/lab.yaml", "count: 5", "count: 6000")
    assert outcomes(one.run())["raw"] == "ran"
    store.cut_uploads(1000, matching="PUT", at_least=100_000)
    with pytest.raises(RemoteError, match="run the command again"):
        push(one.run())
    store.forget()
    assert outcomes(two.run(), pull(two.run()))["raw"] == "not_finished"
    push(one.run())
    assert set(outcomes(two.run(), pull(two.run())).values()) == {"restored", "unchanged"} and two.contents() == one.contents()


@pytest.mark.nightly
@pytest.mark.usefixtures("impatient")
def test_of_an_upload_in_parts_nothing_is_there_before_all_is(lab: Lab, store: FaultyStore, tmp_path: Path) -> None:
    big, back, ours = tmp_path / "big", tmp_path / "back", Ledger(lab.project).remote
    with big.open("wb") as stream:
        stream.truncate(101 << 20)  # s3fs sends more than 100 MiB in parts
    store.cut_uploads(1000, matching="partNumber=2")
    with pytest.raises(RemoteError, match="cannot be used"):
        ours.put(big, "some/big")
    store.forget()
    assert not Ledger(lab.project).remote.get("some/big", back) and not back.exists()
    store.cut_uploads(1, matching="partNumber=2")
    assert Ledger(lab.project).remote.put(big, "some/big") and store.pending == 0
    assert Ledger(lab.project).remote.get("some/big", back) and filecmp.cmp(big, back, shallow=False)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("fault", ["bucket", "keys", "network"])
def test_a_remote_that_cannot_be_used_is_named_with_its_remedy(
    fault: str, lab: Lab, store: FaultyStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clone = cloned(lab, tmp_path / "two")
    said = {"bucket": ("bucket", "Create the bucket"), "keys": ("store", "credentials"), "network": ("connect", "network")}[fault]
    if fault == "bucket":
        clone.edit(".dvc/config", f"s3://{BUCKET}/", "s3://no-such-bucket/")
    elif fault == "network":
        clone.edit(".dvc/config", store.url, "http://127.0.0.1:9")
    else:
        for name in KEYS:
            monkeypatch.delenv(name)
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(RemoteError) as raised:
        pull(clone.run())
    assert all(word in str(raised.value) for word in said)
    ends = [end for end in run_graph(clone.run(), {"lab/raw"}) if isinstance(end, StageFailed)]
    assert "cannot be used" in str(ends[0]) and "--force" in str(ends[0]) and clone.runs() == []
    run = clone.run()
    assert {row.state for row in rows_of(run, plan(run, {"lab/raw"}))} == {"will run"}
    clone.edit("configs/recipes/lab.yaml", "seed: 2", "seed: 9")
    run = clone.run()
    assert outcomes(run)["raw"] == "ran"
    assert any("cannot be used" in notice for notice in run.ledger.notices)


@pytest.mark.nightly
def test_a_model_is_reproduced_from_an_s3_remote_whose_bundle_has_its_commit(store: FaultyStore, tmp_path: Path) -> None:
    made = Clone.first(tmp_path)
    made.shell(f"{sys.executable} -m dvc remote modify -q store url s3://{BUCKET}/store")
    made.shell(f"{sys.executable} -m dvc remote modify -q store endpointurl {store.url}")
    made.edit("stages/decontaminate/run.py", "save(job.out", 'rows.append({"id": "lost"})\n    save(job.out')
    commit = made.commit()
    made.pedigree("run", "lab")
    assert f"code {commit[:12]}: sent" in made.pedigree("push", "lab")
    assert f"code {commit[:12]}: there already" in made.pedigree("push", "lab")
    s3: Any = boto3.resource("s3", endpoint_url=store.upstream.geturl())
    assert [entry.key for entry in s3.Bucket(BUCKET).objects.all() if "pedigree" in entry.key] == [f"store/pedigree/code/{commit}.bundle"]
    made.ran()
    made.shell("git add -A && git -c user.name=l -c user.email=l@example.org commit -qm made")
    made.shell("git checkout -q --orphan other && git -c user.name=l -c user.email=l@example.org commit -qm other && git branch -qD main")
    clone = made.another("clone")
    clone.shell("git remote remove origin")
    clone.pedigree("reproduce", "lab/cleaner", "--from-cache")
    assert clone.ran() == ["cleaner"] and clone.verdicts() == {
        "raw": "restored",
        "suite": "restored",
        "clean": "restored",
        "cleaner": "identical",
    }


def test_a_message_names_no_password(finished: Lab) -> None:
    with pytest.raises(RemoteError) as raised:
        with_remote(finished, "http://somebody:hunter2@127.0.0.1:9/store")
    assert "127.0.0.1:9/store" in str(raised.value) and "hunter2" not in str(raised.value)


@pytest.mark.nightly
def test_no_cache_is_needed_beside_the_remote(plain: Lab, tmp_path: Path) -> None:
    clone = cloned(plain, tmp_path / "two")
    assert set(outcomes(clone.run(), pull(clone.run())).values()) == {"restored"}
    shutil.rmtree(clone.root / ".dvc/cache")
    shutil.rmtree(clone.root / "artifacts/lab/raw")
    assert outcomes(clone.run())["raw"] == "remote"
    assert outcomes(clone.run(), pull(clone.run()))["raw"] == "restored" and clone.runs() == []
