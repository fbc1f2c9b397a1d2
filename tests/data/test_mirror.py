"""What a job keeps in a store: complete or not there, damaged or refused, and written by one machine at a time."""

import hashlib
import json
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from faulty_store import KEYS, emptied, s3_server
from waiting import deadline

from pedigree.data.artifacts import mirror as mirrors
from pedigree.data.artifacts.artifacts import scan, write_json
from pedigree.data.artifacts.mirror import Lease, LeaseTaken, Mirror, save_token, saved_token
from pedigree.data.store import storage
from pedigree.data.store.storage import ContentChanged, Missing, StoreError

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module", autouse=True)
def server() -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch, s3_server() as url:
        for name, value in {**KEYS, "AWS_ENDPOINT_URL": url}.items():
            patch.setenv(name, value)
        yield url


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirrors, "POLL_S", 0.05)


@pytest.fixture
def folder_mirror(tmp_path: Path) -> Mirror:
    return Mirror.of(f"file://{tmp_path}/store", "key")


@pytest.fixture(params=["s3", "folder"])
def mirror(request: pytest.FixtureRequest, server: str, folder_mirror: Mirror) -> Mirror:
    if request.param == "folder":
        return folder_mirror
    emptied(server, "bucket")
    return Mirror.of("s3://bucket/prefix", "key")


def checkpoint(folder: Path, step: int) -> Path:
    """As the sealing leaves it."""
    path = folder / f"step-{step:06d}"
    (path / "engine").mkdir(parents=True)
    (path / "engine" / "weights.pt").write_bytes(bytes([step]) * 1000)
    (path / "state.json").write_text(json.dumps({"step": step}))
    write_json(path / "manifest.json", {entry.path: entry.sha256 for entry in scan(path)})
    return path


def send(mirror: Mirror, folder: Path, *steps: int) -> None:
    for step in steps:
        mirror.upload_checkpoint(checkpoint(folder, step), lambda: True)


def lease(mirror: Mirror, token: str, silence_s: float = 60.0) -> Lease:
    return Lease(mirror.url, token, f"the job {token}", silence_s)


def quiet(text: str) -> None:
    pass


def test_a_checkpoint_comes_back_as_it_was(mirror, tmp_path):
    send(mirror, tmp_path / "a", 5, 10)
    assert mirror.checkpoints() == ["step-000005", "step-000010"]
    mirror.download_checkpoint("step-000010", tmp_path / "b", lambda: None)
    assert scan(tmp_path / "b") == scan(tmp_path / "a" / "step-000010")


def test_one_without_its_manifest_does_not_exist(folder_mirror, tmp_path):
    send(folder_mirror, tmp_path, 5)
    answers = iter([True, True, False])  # weights and state are sent, the manifest is not
    with pytest.raises(InterruptedError):
        folder_mirror.upload_checkpoint(checkpoint(tmp_path, 10), lambda: next(answers))
    sent = [entry.name for entry in storage.entries(folder_mirror.url)]
    assert "step-000010/state.json" in sent and folder_mirror.checkpoints() == ["step-000005"]
    with pytest.raises(InterruptedError):  # nor while an older one of the same step is overwritten
        folder_mirror.upload_checkpoint(tmp_path / "step-000005", lambda: False)
    assert folder_mirror.checkpoints() == []


def test_retention_keeps_the_latest_complete_ones_and_removes_leftovers(mirror, tmp_path):
    send(mirror, tmp_path, 5, 10, 15)
    storage.write(f"{mirror.url}/step-000012/state.json", b"left by a kill")
    storage.write(f"{mirror.url}/step-000020/state.json", b"on its way")
    mirror.keep_latest(2)
    assert mirror.checkpoints() == ["step-000010", "step-000015"]
    steps = {entry.name.partition("/")[0] for entry in storage.entries(mirror.url)}
    assert steps == {"step-000010", "step-000015", "step-000020"}


def test_a_changed_byte_a_missing_file_a_path_that_leads_outside_and_a_manifest_without_end_are_refused(mirror, tmp_path, monkeypatch):
    send(mirror, tmp_path / "a", 5)
    weights = f"{mirror.url}/step-000005/engine/weights.pt"
    storage.write(weights, bytes([5]) * 999 + b"x")
    with pytest.raises(ContentChanged, match=r"weights\.pt has sha256"):
        mirror.download_checkpoint("step-000005", tmp_path / "b", lambda: None)
    storage.remove(weights)
    with pytest.raises(Missing):
        mirror.download_checkpoint("step-000005", tmp_path / "b", lambda: None)
    storage.write(f"{mirror.url}/step-000005/manifest.json", b'{"../../evil": "00"}')
    with pytest.raises(ContentChanged, match="must be a normalized path"):
        mirror.download_checkpoint("step-000005", tmp_path / "b", lambda: None)
    monkeypatch.setattr(mirrors, "LIST_BYTES", 10)
    with pytest.raises(ContentChanged, match="is too large"):
        mirror.download_checkpoint("step-000005", tmp_path / "b", lambda: None)


def test_chunks_come_back_by_the_hash_in_their_name(mirror, tmp_path):
    (tmp_path / "abc.json").write_text("[1]")
    mirror.upload_chunk(tmp_path / "abc.json")
    sha256 = hashlib.sha256(b"[1]").hexdigest()
    assert mirror.chunks() == {"abc": sha256}
    mirror.download_chunk(tmp_path / "got" / "abc.json", sha256)
    assert (tmp_path / "got" / "abc.json").read_text() == "[1]"
    storage.write(f"{mirror.url}/chunks/abc.{sha256}.json", b"[2]")
    with pytest.raises(ContentChanged):
        mirror.download_chunk(tmp_path / "got" / "abc.json", sha256)


def test_a_lease_is_held_through_attempts_and_given_back(mirror):
    first = lease(mirror, "a")
    first.acquire(quiet)
    lease(mirror, "a").acquire(quiet)  # a further attempt in the same scratch folder
    assert first.still_ours()
    first.release()
    assert [entry.name for entry in storage.entries(f"{mirror.url}/lease")] == ["000001.json", "000001.released"]
    second = lease(mirror, "b")
    second.acquire(quiet)
    assert second.number == 2 and not first.still_ours()


def test_who_was_overtaken_never_writes_again_even_where_everything_was_cleared_away(folder_mirror):
    """It was silent while another machine finished the stage: today it takes the empty folder for its own and sends on."""
    first = lease(folder_mirror, "a")
    first.acquire(quiet)
    storage.remove(folder_mirror.url)
    assert not first.still_ours()


@pytest.mark.parametrize("hours", [-1000, 1000])
def test_no_clock_decides_who_lives(folder_mirror, tmp_path, hours):
    """The store's times may be anything: today a holder whose files are old is taken over from while it lives."""
    first, aged, ended = lease(folder_mirror, "a", silence_s=3600.0), threading.Event(), threading.Event()
    first.acquire(quiet)
    folder = tmp_path / "store" / "key" / "lease"

    def age() -> None:
        for path in folder.iterdir():
            if path.name.endswith("a") or path.suffix == ".json":
                os.utime(path, (0, time.time() + 3600 * hours))

    def live() -> None:
        while not ended.wait(0.1):
            first.beat()
            age()
            aged.set()

    heart = threading.Thread(target=live)
    heart.start()
    assert aged.wait(deadline(60))
    with pytest.raises(LeaseTaken):
        lease(folder_mirror, "b").acquire(quiet)
    assert not folder_mirror.clear("c")
    ended.set()
    heart.join()
    claim = folder / "000001.json"
    claim.write_text(claim.read_text().replace("3600.0", "0.01"))  # which nobody waits for; while it lived, a busy machine had all the time
    age()
    lease(folder_mirror, "b").acquire(quiet)


@contextmanager
def alive(holder: Lease) -> Iterator[None]:
    ended = threading.Event()
    heart = threading.Thread(target=lambda: [holder.beat() for _ in iter(lambda: ended.wait(0.1), True)])
    heart.start()
    yield
    ended.set()
    heart.join()


def test_a_copied_folder_is_not_the_holder_and_a_moved_one_is(folder_mirror, tmp_path):
    """The copy's job would write beside that of the original, and the one that ends first would delete what both have sent."""
    original, copy = tmp_path / "original", tmp_path / "copy"
    original.mkdir()
    save_token(original, "mine")
    holder = lease(folder_mirror, "mine", silence_s=30)
    holder.acquire(quiet)
    send(folder_mirror, tmp_path, 5)
    subprocess.run(["cp", "-a", original, copy], check=True)
    with alive(holder):
        assert saved_token(copy) is None and not folder_mirror.clear(saved_token(copy))
    assert holder.still_ours() and folder_mirror.checkpoints() == ["step-000005"]
    original.rename(tmp_path / "moved")
    assert saved_token(tmp_path / "moved") == "mine"
    assert folder_mirror.clear(saved_token(tmp_path / "moved")) and storage.entries(folder_mirror.url) == []


def test_a_token_that_an_earlier_version_has_stored_keeps_the_lease(tmp_path):
    write_json(tmp_path / "mirror.json", {"token": "mine"})
    assert saved_token(tmp_path) == "mine"


def test_a_living_holder_is_named_and_neither_taken_from_nor_cleared(mirror, tmp_path):
    send(mirror, tmp_path, 5)
    first, said = lease(mirror, "a", silence_s=30), []
    first.acquire(quiet)
    with alive(first):
        with pytest.raises(LeaseTaken, match="the job a is running the same stage"):
            lease(mirror, "b").acquire(said.append)
        assert not mirror.clear("mine") and mirror.checkpoints() == ["step-000005"]
    assert first.still_ours() and len(said) == 1 and "waits: the job a" in said[0]
    assert mirror.clear("a") and storage.entries(mirror.url) == []
    lease(mirror, "gone", silence_s=0.01).acquire(quiet)
    assert mirror.clear("mine") and storage.entries(mirror.url) == []


def test_a_silent_holder_is_taken_over_from_and_learns_of_it(mirror):
    first, second = lease(mirror, "a", silence_s=1.5), lease(mirror, "b")
    first.acquire(quiet)
    said: list[str] = []
    began = time.monotonic()
    second.acquire(said.append)
    assert time.monotonic() - began > 0.4 and "takes over from the job a" in said[-1]
    assert not first.still_ours() and second.still_ours()


def test_the_claim_before_the_last_stays_for_those_who_list_the_folder_just_then(folder_mirror):
    """A listing during a take-over may hold neither the new claim nor, were it removed, the old one: the lease would look free."""
    for token in ("a", "b", "c"):
        one = lease(folder_mirror, token, silence_s=0.01)
        one.acquire(quiet)
        one.release()
    claims = {entry.name for entry in storage.entries(f"{folder_mirror.url}/lease") if entry.name.endswith(".json")}
    assert claims == {"000002.json", "000003.json"}


def test_of_many_who_find_a_silent_holder_one_takes_over(folder_mirror):
    lease(folder_mirror, "gone", silence_s=0.01).acquire(quiet)
    ends: list[str] = []
    ended = threading.Event()

    def want(token: str) -> None:
        mine = lease(folder_mirror, token)
        try:
            mine.acquire(quiet)
            ends.append("holds")
            while len(ends) < 4 and not ended.wait(0.02):
                mine.beat()
        except LeaseTaken:
            ends.append("refused")
        if len(ends) == 4:
            ended.set()

    threads = [threading.Thread(target=want, args=(f"t{number}",)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(ends) == ["holds", "refused", "refused", "refused"]


@pytest.mark.parametrize(
    ("claim", "named"),
    [
        (b"{", "cannot be read"),
        (b'{"token": "x"}', "what"),
        (b'{"token": "../../x", "what": "a job", "silence_s": 60.0}', "token"),
        (b'{"token": "x", "what": "a job\\u001b[2J", "silence_s": 60.0}', "what"),
        (b'{"token": "x", "what": "a job", "silence_s": 1e12}', "silence_s"),
        (b'{"token": "x", "what": "a job", "silence_s": 60.0, "run": "me"}', "run"),
        (b'"' + b"x" * 100_000 + b'"', "bytes"),
    ],
)
def test_a_claim_that_no_job_writes_is_named_and_nothing_is_taken_over_or_removed(folder_mirror, tmp_path, claim, named):
    mirror = folder_mirror
    send(mirror, tmp_path, 5)
    storage.write(f"{mirror.url}/lease/000007.json", claim)
    for use in (lambda: lease(mirror, "b").acquire(quiet), lambda: mirror.clear("b")):
        with pytest.raises(StoreError, match=rf"lease/000007\.json is not a valid lease claim.*{named}.*remove .*/lease"):
            use()
    assert mirror.checkpoints() == ["step-000005"]
    storage.remove(f"{mirror.url}/lease")
    lease(mirror, "b").acquire(quiet)


def test_strange_names_beside_claims_claim_nothing(mirror):
    for name in ("7.json", "0000001.json", "\u00b2.json", "9" * 5000, f"{'9' * 200}.json", "000009.json.part"):
        if len(name) < 250:  # what a file system allows
            storage.write(f"{mirror.url}/lease/{name}", b"{}")
    mine = lease(mirror, "a")
    mine.acquire(quiet)
    assert mine.number == 1 and mine.still_ours()


def test_attempts_are_kept_and_what_cannot_be_read_is_nothing(folder_mirror):
    assert folder_mirror.attempts() == []
    folder_mirror.note_attempts([{"started_at": "2026-01-01T00:00:00+00:00"}])
    assert folder_mirror.attempts() == [{"started_at": "2026-01-01T00:00:00+00:00"}]
    storage.write(f"{folder_mirror.url}/attempts.json", b"{")
    assert folder_mirror.attempts() == []
