"""What goes on beside a job with a mirror: newest first, failures said once and tried again, one writer."""

import json
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import s3fs
from faulty_store import KEYS, FaultyStore, faulty_store, s3_server
from models import a_job
from waiting import until

from pedigree.data.artifacts.artifacts import scan, write_json
from pedigree.data.artifacts.mirror import ELSEWHERE, Lease, Mirror
from pedigree.data.artifacts.provenance import code_files, code_sha256
from pedigree.data.store import storage
from pedigree.data.store.storage import ContentChanged, StoreError
from pedigree.data.store.untrusted import RUN_BYTES
from pedigree.stages.job import mirroring
from pedigree.stages.job.failures import StageError
from pedigree.stages.job.job import Job, checkpoint_names
from pedigree.stages.job.mirroring import Mirroring, open_mirror

URL = "s3://bucket/runs"


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyStore]:
    monkeypatch.setattr(storage, "PAUSES_S", (0.05,))
    monkeypatch.setattr(mirroring, "AGAIN_S", 0.3)
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)  # with pauses that take seconds
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    with s3_server("bucket") as url, faulty_store(url) as store:
        monkeypatch.setenv("AWS_ENDPOINT_URL", store.url)
        yield store


@pytest.fixture
def plain_store(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A store that never fails, in a folder: `URL` is its own."""
    monkeypatch.setitem(globals(), "URL", f"file://{tmp_path_factory.mktemp('store')}")


def job_in(folder: Path, **placement: Any) -> Job:
    return a_job(folder, **{"checkpoint_url": URL, **placement})


def mirror_of(job: Job) -> Mirroring:
    found = open_mirror(job)
    assert found is not None and open_mirror(job) is found
    return found


def checkpoint(job: Job, step: int) -> Path:
    path = job.checkpoints / f"step-{step:06d}"
    path.mkdir(parents=True)
    (path / "state.json").write_text(json.dumps({"step": step}))
    write_json(path / "manifest.json", {entry.path: entry.sha256 for entry in scan(path)})
    return path


def test_only_the_first_rank_of_a_job_with_a_place_for_it_has_a_mirror(tmp_path):
    assert open_mirror(a_job(tmp_path)) is None
    job = job_in(tmp_path)
    job.rank = 1
    assert open_mirror(job) is None


def test_nobody_waits_and_the_newest_is_sent_when_the_one_before_has_arrived(plain_store, tmp_path, monkeypatch):
    arriving, upload = threading.Event(), Mirror.upload_checkpoint
    monkeypatch.setattr(Mirror, "upload_checkpoint", lambda *given: (arriving.wait(), upload(*given))[1])
    job = job_in(tmp_path, keep_checkpoints=9)
    with job:
        mirror = mirror_of(job)
        mirror.offer(checkpoint(job, 5))
        until(lambda: mirror.busy == "step-000005")
        for step in (10, 15, 20):
            mirror.offer(checkpoint(job, step))
        assert mirror.busy == "step-000005" and mirror.mirror.checkpoints() == []
        arriving.set()
        mirror.flush()
        assert mirror.mirror.checkpoints() == ["step-000005", "step-000020"]
    assert job.checkpoint_cost["mirrored"] == 2 and job.checkpoint_cost["mirror_bytes"] > 0
    assert [entry.name for entry in storage.entries(f"{URL}/k/lease")] == ["000001.json", "000001.released"]


def test_a_failure_is_said_once_counted_and_tried_again(store, tmp_path, capsys):
    job = job_in(tmp_path)
    with job:
        mirror = mirror_of(job)
        store.throttle(100_000, matching="state.json")
        mirror.offer(checkpoint(job, 5))
        until(lambda: job.checkpoint_cost.get("mirror_failures", 0) >= 2)
        said = capsys.readouterr().out
        assert said.count("WARNING: step-000005 could not be mirrored; the job continues") == 1 and "busy" in said
        store.forget()
        mirror.flush()
        assert mirror.mirror.checkpoints() == ["step-000005"] and "the store works again" in capsys.readouterr().out


def test_an_upload_cut_in_the_middle_is_no_checkpoint_until_it_is_whole(store, tmp_path, monkeypatch):
    """The store refuses the manifest alone: everything else lies there, and nobody takes it."""
    monkeypatch.setattr(mirroring, "AGAIN_S", 60.0)
    job = job_in(tmp_path / "a")
    mirror = mirror_of(job)
    store.cut_uploads(100_000, matching="manifest.json")
    mirror.offer(checkpoint(job, 5))
    until(lambda: job.checkpoint_cost.get("mirror_failures"))
    assert "step-000005/state.json" in [entry.name for entry in storage.entries(f"{URL}/k")]
    assert mirror.fetch_newer(None, tmp_path / "b") is None
    store.forget()
    job.__exit__(None)


def test_a_machine_that_was_silent_for_too_long_sends_nothing_more(plain_store, tmp_path, capsys):
    job = job_in(tmp_path, heartbeat_timeout_s=2.0)
    mirror = mirror_of(job)
    storage.write(f"{URL}/k/lease/000002.json", json.dumps({"token": "other", "what": "another", "silence_s": 60.0}).encode())
    until(lambda: "another machine took over" in capsys.readouterr().out)
    mirror.offer(checkpoint(job, 5))
    (tmp_path / "abc.json").write_text("[]")
    mirror.offer_chunk(tmp_path / "abc.json")
    mirror.flush(1.0)
    assert mirror.mirror.checkpoints() == [] and mirror.mirror.chunks() == {}
    job.__exit__(None)
    assert Mirror(f"{URL}/k").clear("other")  # whose lease it still is


def test_while_another_lives_a_job_is_refused(plain_store, tmp_path):
    other = Lease(f"{URL}/k", "other", "process 7 on elsewhere", 60.0)
    other.acquire(print)
    ended = threading.Event()

    def live() -> None:
        while not ended.wait(0.05):
            other.beat()

    heart = threading.Thread(target=live)
    heart.start()
    with pytest.raises(StageError, match="process 7 on elsewhere is running the same stage"):
        open_mirror(job_in(tmp_path))
    ended.set()
    heart.join()


def test_a_first_attempt_needs_the_store_and_a_further_one_goes_on_without(store, tmp_path, capsys):
    with job_in(tmp_path / "a") as job:
        mirror_of(job)
    store.throttle(100_000)
    with pytest.raises(StoreError):
        open_mirror(job_in(tmp_path / "b"))
    job = job_in(tmp_path / "a")
    (job.checkpoints / "step-000005").mkdir(parents=True)
    assert mirror_of(job).fetch_newer("step-000005", job.checkpoints) is None
    mirror_of(job).fetch_chunks(tmp_path / "a" / "chunks")
    said = capsys.readouterr().out
    assert "store unavailable, continuing with local files" in said and "continuing from step-000005" in said
    store.forget()
    job.__exit__(None)


def test_a_damaged_checkpoint_and_chunk_are_named_and_only_what_is_damaged_is_left_aside(plain_store, tmp_path, capsys):
    with job_in(tmp_path / "a") as job:
        for step in (5, 10):
            mirror_of(job).offer(checkpoint(job, step))
            mirror_of(job).flush()
        for name in ("x", "y"):
            (tmp_path / f"{name}.json").write_text(f'["{name}"]')
            mirror_of(job).offer_chunk(tmp_path / f"{name}.json")
        mirror_of(job).flush()
    storage.write(f"{URL}/k/step-000010/state.json", b"{}")
    (chunk,) = [entry.name for entry in storage.entries(f"{URL}/k/chunks") if entry.name.startswith("x.")]
    storage.write(f"{URL}/k/chunks/{chunk}", b"[]")
    with job_in(tmp_path / "b") as job:
        mirror_of(job).fetch_chunks(job.folder / "chunks")
        assert [file.name for file in (job.folder / "chunks").iterdir()] == ["y.json"]
        assert mirror_of(job).fetch_newer(None, job.checkpoints) == "step-000005"
        assert mirror_of(job).mirror.checkpoints() == ["step-000005"]
    said = capsys.readouterr().out
    assert "step-000010 is damaged" in said and "using the previous one" in said and "a mirrored chunk is damaged" in said
    assert [path.name for path in job.checkpoints.iterdir()] == ["step-000005"]


def test_chunks_that_a_killed_attempt_had_no_time_to_send_are_sent_by_the_next_one(store, tmp_path, capsys):
    """Those alone, also where the store fails at first; another machine could not go on from them."""
    folder = tmp_path / "a" / "chunks"
    folder.mkdir(parents=True)
    for name in ("x", "y", "z"):
        (folder / f"{name}.json").write_text(f'["{name}"]')
    (folder / ".y.json.1.tmp").write_text("[")
    (folder / "answers.jsonl").write_text("")
    Mirror(f"{URL}/k").upload_chunk(folder / "x.json")
    store.throttle(100_000, matching="chunks")
    with job_in(tmp_path / "a") as job:
        mirror = mirror_of(job)
        until(lambda: job.checkpoint_cost.get("mirror_failures"))
        store.forget()
        mirror.flush()
        assert set(mirror.mirror.chunks()) == {"x", "y", "z"} and job.checkpoint_cost["mirrored"] == 2
        (folder / "x.json").write_text("[]")  # made again, since that in the store was damaged
        mirror.offer_chunk(folder / "x.json")
        mirror.flush()
        assert job.checkpoint_cost["mirrored"] == 3
    assert "the store works again" in capsys.readouterr().out


def test_a_checkpoint_that_cannot_be_fetched_is_not_taken_for_a_damaged_one(store, tmp_path):
    with job_in(tmp_path / "a") as job:
        mirror_of(job).offer(checkpoint(job, 5))
        mirror_of(job).flush()
    with job_in(tmp_path / "b") as job:
        mirror = mirror_of(job)
        store.throttle(100_000, matching="GET /bucket/runs/k/step-")
        with pytest.raises(StoreError, match="busy"):
            mirror.fetch_newer(None, job.checkpoints)
        store.forget()
        assert mirror.fetch_newer(None, job.checkpoints) == "step-000005"


def test_attempts_travel_with_the_work(plain_store, tmp_path):
    one, two, three, four = ({"started_at": f"2026-01-01T00:00:0{second}+00:00"} for second in range(1, 5))

    def known(attempts):
        return [{name: value for name, value in attempt.items() if name == "started_at"} for attempt in attempts]

    for name, attempts in (("a", [one]), ("b", [two]), ("c", [three]), ("c", [three, four])):
        (tmp_path / name).mkdir(exist_ok=True)
        write_json(tmp_path / name / "attempts.json", attempts)
        with job_in(tmp_path / name) as job:
            mirror_of(job)
    assert not (tmp_path / "a" / ELSEWHERE).exists()
    assert known(json.loads((tmp_path / "c" / ELSEWHERE).read_text())) == [one, two]
    assert known(Mirror(f"{URL}/k").attempts()) == [one, two, three, four]


def test_attempts_that_a_copied_folder_has_already_are_not_counted_twice(plain_store, tmp_path):
    one, two = ({"started_at": f"2026-01-01T00:00:0{second}+00:00"} for second in range(1, 3))
    (tmp_path / "a").mkdir()
    write_json(tmp_path / "a" / "attempts.json", [one])
    with job_in(tmp_path / "a") as job:
        mirror_of(job)
    subprocess.run(["cp", "-a", tmp_path / "a", tmp_path / "b"], check=True)
    write_json(tmp_path / "b" / "attempts.json", [one, two])
    with job_in(tmp_path / "b") as job:
        mirror_of(job)
    assert json.loads((tmp_path / "b" / ELSEWHERE).read_text()) == []
    assert [attempt["started_at"] for attempt in Mirror(f"{URL}/k").attempts()] == [one["started_at"], two["started_at"]]


@pytest.mark.parametrize("torn", ["[{", '[{"cause": 1}]', "{}", "7"])
def test_attempts_that_cannot_be_read_here_or_there_are_forgotten(plain_store, tmp_path, torn):
    (tmp_path / "attempts.json").write_text(torn)
    storage.write(f"{URL}/k/attempts.json", torn.encode())
    with job_in(tmp_path) as job:
        mirror_of(job)
    assert Mirror(f"{URL}/k").attempts() == []
    storage.write(f"{URL}/k/attempts.json", b"[" + b" " * RUN_BYTES + b"]")
    assert Mirror(f"{URL}/k").attempts() == []


def test_the_curve_is_on_the_disk_before_a_checkpoint_that_goes_on_behind_its_lines(tmp_path, monkeypatch):
    from pedigree.stages.training import checkpoints

    done, sync, rename = [], checkpoints.sync_file, checkpoints.rename
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr(checkpoints, "sync_file", lambda path: (done.append(path.name), sync(path)))
    monkeypatch.setattr(checkpoints, "rename", lambda old, new: (done.append(new.name), rename(old, new)))
    job = a_job(tmp_path)
    told: Any = type("Told", (), {"rank": 0, "barrier": lambda _: None, "save_state": lambda *_: None, "broadcast": lambda _, it: it})()
    job.log(1, loss=1.0)
    writes = checkpoints.Checkpoints(job, told)
    writes.write(1, {})
    writes._settle()
    assert done == ["curve.jsonl", "step-000001"]


def test_a_job_that_fails_keeps_the_checkpoint_that_was_being_sealed(tmp_path, monkeypatch, capsys):
    """The next attempt resumes from it, here or elsewhere; and what fails with it is not what is reported."""
    from pedigree.stages.training import checkpoints

    url, failing, sync = f"file://{tmp_path}/store", list[OSError](), checkpoints.sync_tree
    monkeypatch.setattr("signal.signal", lambda *_: None)

    def slowly(folder: Path) -> None:
        time.sleep(0.5)  # the job fails meanwhile
        if failing:
            raise failing.pop()
        sync(folder)

    monkeypatch.setattr(checkpoints, "sync_tree", slowly)
    alone: Any = type("Alone", (), {"rank": 0, "barrier": lambda _: None, "save_state": lambda *_: None})()
    for step, sealed in ((1, ["step-000001"]), (2, ["step-000001"])):
        with pytest.raises(StageError, match="lost engine"), job_in(tmp_path / "a", checkpoint_url=url) as job:
            checkpoints.Checkpoints(job, alone).write(step, {})
            raise StageError("lost engine")
        assert checkpoint_names(job.folder) == sealed == Mirror(f"{url}/k").checkpoints()
        failing.append(OSError("full"))
    assert "the last checkpoint could not be written: full" in capsys.readouterr().out


def test_work_that_was_sent_by_other_code_after_a_job_was_prepared_marks_its_result(plain_store, tmp_path, capsys):
    """Its runner had found nothing there, and could not ask which code is to go on."""
    with job_in(tmp_path / "a") as job:
        job.code = code_sha256(code_files())
        (tmp_path / "x.json").write_text("[1]")
        mirror_of(job).offer_chunk(tmp_path / "x.json")
        mirror_of(job).flush()
    with job_in(tmp_path / "b") as same:
        same.code = job.code
        mirror_of(same).fetch_chunks(same.folder / "chunks")
        assert same.marks == []
    with job_in(tmp_path / "c") as other:
        other.code = "f" * 64
        mirror_of(other).fetch_chunks(other.folder / "chunks")
        assert other.marks == [f"code changed at finished chunks: {job.code[:12]} -> {'f' * 12}"]
        assert other.marks[0] in capsys.readouterr().out
    assert set(Mirror(f"{URL}/k").code(job.code)) == set(code_files())


def test_what_says_by_which_code_work_was_made_is_read_strictly(plain_store):
    mirror = Mirror(f"{URL}/k")
    assert mirror.producer() is None
    for text in (b"{", b'{"code": "../x"}', b'{"code": "' + b"0" * 64 + b'", "run": "me"}', b"[" * 1000):
        storage.write(f"{mirror.url}/made.json", text)
        with pytest.raises(ContentChanged, match=r"made\.json"):
            mirror.producer()


def test_a_checkpoint_that_other_code_has_written_marks_the_result_with_the_step_and_both_hashes(tmp_path, monkeypatch):
    from pedigree.stages.training.checkpoints import Checkpoints

    monkeypatch.setattr("signal.signal", lambda *_: None)
    for said, marks in ((["a"], []), (["a"], ["code changed at step 7: stages/sft/run.py"])):
        job = a_job(tmp_path / str(len(marks)))
        job.code, job.marks = "b" * 64, list(marks)
        path = job.checkpoints / "step-000005"
        path.mkdir(parents=True)
        guard = {"key": job.key, **job.numerics.model_dump(mode="json")}
        write_json(path / "state.json", {"step": 5, "guard": guard, "code": "a" * 64, "marks": said, "state": {"step": 5}})
        write_json(path / "manifest.json", {entry.path: entry.sha256 for entry in scan(path)})
        still: Any = type("Still", (), {"rank": 0, "broadcast": lambda self, value: value, "load_state": lambda self, *_, **__: None})()
        assert Checkpoints(job, still).resume() == {"step": 5}
        assert job.marks == ["a", *(marks or [f"code changed at step 5: {'a' * 12} -> {'b' * 12}"])]
