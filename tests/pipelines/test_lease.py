"""One writer, wherever the runners are: leases whose number only grows, and slots that belong to the machine."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import stale_view
from elsewhere import ListenersClock, needs_elsewhere, next_beat, python_elsewhere
from waiting import InThread, deadline, until

from pedigree.configs.base.problems import PedigreeError
from pedigree.configs.base.project import Project
from pedigree.configs.language.execution import Numerics
from pedigree.data.store import fence as fences
from pedigree.data.store import heartbeat
from pedigree.data.store.fence import Fence, Superseded
from pedigree.data.store.heartbeat import Listener, Pulse
from pedigree.pipelines.jobs import lease as leases
from pedigree.pipelines.jobs import slots as machine
from pedigree.pipelines.jobs.launcher import LocalLauncher
from pedigree.pipelines.jobs.lease import Cancelled, LeaseLost, holder_of, lease
from pedigree.pipelines.jobs.processes import Process
from pedigree.pipelines.jobs.slots import Pool, machine_folder, slots, taken_slots

ROOT = Path(__file__).parents[2]
JOBS = LocalLauncher(Project(ROOT))
HOLD = "import sys, time; from pathlib import Path; from pedigree.pipelines.jobs.lease import lease\n"


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence is over after three seconds."""
    monkeypatch.setattr(heartbeat, "SILENCE_S", deadline(3.0))  # whoever beats may have to wait for a busy machine
    monkeypatch.setattr(heartbeat, "BEAT_S", 0.1)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> ListenersClock:
    monkeypatch.setattr(heartbeat, "SILENCE_S", 8.0)
    monkeypatch.setattr(heartbeat, "BEAT_S", 0.1)
    monkeypatch.setattr(leases, "POLL_S", 0.02)
    return ListenersClock(monkeypatch)


def claim(folder: Path, number: int, **process: object) -> Path:
    """A claim as a process of elsewhere leaves it."""
    folder.mkdir(parents=True, exist_ok=True)
    told = Process.here().model_dump() | {"machine": "another"} | process
    path = folder / f"{number:06d}.json"
    path.write_text(json.dumps({"number": number, "process": told, "since": 0.0, "what": "x", "token": "t"}))
    return path


def test_second_holder_waits_and_learns_who_holds(tmp_path: Path) -> None:
    order, seen = [], []

    def second() -> None:
        with lease(tmp_path / "a", "second", waiting=lambda holder: seen.append(str(holder))) as hold:
            order.append(("second", hold.waited, hold.number))

    with lease(tmp_path / "a", "first") as hold:
        thread = threading.Thread(target=second)
        thread.start()
        until(lambda: seen)
        order.append(("first", hold.waited, hold.number))
    thread.join()
    assert order == [("first", False, 1), ("second", True, 2)]
    assert len(seen) == 1 and seen[0].startswith(f"held by process {os.getpid()} since ") and seen[0].endswith("(first)")
    assert holder_of(tmp_path / "a") is None


def test_lease_of_a_killed_process_is_taken_over_at_once(tmp_path: Path) -> None:
    code = f"{HOLD}with lease(Path({str(tmp_path / 'a')!r}), 'x'): print(1, flush=True); time.sleep(60)"
    child = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE)
    assert child.stdout and child.stdout.readline()
    assert holder_of(tmp_path / "a") is not None
    child.kill()
    child.wait()
    assert holder_of(tmp_path / "a") is None
    with lease(tmp_path / "a", "mine") as hold:
        assert (hold.waited, hold.number) == (False, 2)


def test_reused_process_number_is_not_the_holder() -> None:
    here = Process.here()
    assert here.alive and not here.model_copy(update={"started": here.started + 1}).alive
    assert not here.model_copy(update={"machine": "another machine"}).alive


def test_many_who_want_it_have_it_one_at_a_time_under_growing_numbers(tmp_path: Path) -> None:
    """Twelve threads and a process more; who has it must be alone, and no number is used twice."""
    inside, numbers, guard = [0], [], threading.Lock()

    def work() -> None:
        with lease(tmp_path / "a", "x") as hold:
            with guard:
                inside[0] += 1
                assert inside[0] == 1
                numbers.append(hold.number)
            hold.check()
            with guard:
                inside[0] -= 1

    for thread in [InThread(work) for _ in range(12)]:
        thread.join()
    assert sorted(numbers) == list(range(1, 13)) and numbers == sorted(numbers)
    assert len(list((tmp_path / "a").iterdir())) <= 8  # what was held long ago is tidied away


@pytest.mark.parametrize("hours", [1000, *(pytest.param(hours, marks=pytest.mark.nightly) for hours in (-1000, 0))])
def test_a_holder_elsewhere_lives_by_its_pulse_whatever_the_clocks_say(tmp_path: Path, clock: ListenersClock, hours: int) -> None:
    """Its machine's clock, and so the time of its files, may be anything: today an hour's difference takes a living one's lease away."""
    path = claim(tmp_path / "a", 1)

    def live() -> None:
        path.with_suffix(".beat").write_text(str(clock.now))
        for file in (path.with_suffix(".beat"), path):
            os.utime(file, (0, time.time() + 3600 * hours))

    live()
    seen: list[str] = []
    thread = InThread(take, tmp_path / "a", seen)
    until(lambda: seen, alive=thread.alive)
    clock.beating(live)
    assert holder_of(tmp_path / "a") is not None and len(seen) == 1, "taken from a holder that lives"
    clock.silent(lambda: not thread.alive())
    assert seen[1:] == ["held 2"]


def test_a_clock_that_jumps_takes_nothing_away_and_a_cancelled_wait_ends(
    tmp_path: Path, soon: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with lease(tmp_path / "a", "first") as hold:
        real = time.time
        monkeypatch.setattr(time, "time", lambda: real() + 1e6)
        cancelled = threading.Event()
        threading.Timer(0.5, cancelled.set).start()
        with pytest.raises(Cancelled), lease(tmp_path / "a", "second", cancelled=cancelled):
            pass
        hold.check()


def test_a_listener_that_was_stopped_itself_has_not_heard_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(heartbeat.time, "monotonic", lambda: now[0])
    listener = Listener()
    assert listener.silent_s("a") == 0
    now[0] += 2
    assert listener.silent_s("a") == 2
    now[0] += 7200  # a laptop's lid
    assert listener.silent_s("a") == 2 + heartbeat.LONGEST_GAP_S
    now[0] += 1
    assert listener.silent_s("b") == 0


def test_who_was_overtaken_learns_of_it_and_an_old_number_never_counts_again(tmp_path: Path) -> None:
    with lease(tmp_path / "a", "old") as hold:
        hold.check()
        claim(tmp_path / "a", 2)
        with pytest.raises(LeaseLost, match=r"has number 1, but the latest is 2.*it writes nothing more"):
            hold.check()
    assert (tmp_path / "a" / "000001.released").exists()
    assert holder_of(tmp_path / "a") is not None  # what the old one has given back is not the new one's
    (tmp_path / "a" / "000002.released").touch()
    (tmp_path / "a" / "000001.json").unlink()
    with lease(tmp_path / "a", "new") as hold:
        assert hold.number == 3
        shutil.rmtree(tmp_path / "a")
        with pytest.raises(LeaseLost, match="its folder is gone"):
            hold.check()


@needs_elsewhere
def test_two_machines_on_one_disk_and_the_one_that_was_stopped_comes_back(tmp_path: Path, clock: ListenersClock) -> None:
    """The other machine holds it and is stopped; it is taken over after silence, and when it goes on it must see that."""
    code = f"""{HOLD}from pedigree.data.store import heartbeat; heartbeat.BEAT_S = 0.2
with lease(Path({str(tmp_path / "a")!r}), 'elsewhere') as hold:
    print('holds', flush=True)
    sys.stdin.readline()
    hold.check()
"""
    other = python_elsewhere(code, ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert other.stdout and other.stdout.readline() == "holds\n"
    seen: list[str] = []
    thread = InThread(take, tmp_path / "a", seen)
    until(lambda: seen, alive=thread.alive)
    clock.beating(lambda: next_beat(tmp_path / "a/000001.beat"))
    assert thread.alive() and len(seen) == 1
    children = subprocess.run(["pgrep", "-P", str(other.pid)], capture_output=True, text=True, check=True).stdout.split()
    for pid in children:
        os.kill(int(pid), signal.SIGSTOP)
    clock.silent(lambda: not thread.alive())
    assert seen[1:] == ["held 2"]
    for pid in children:
        os.kill(int(pid), signal.SIGCONT)
    _, said = other.communicate("\n", timeout=deadline(20))
    assert other.returncode != 0 and "LeaseLost" in said and "has number 1, but the latest is 2" in said


@pytest.fixture
def other_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Types a command in the lease's folder on a machine whose changes this one does not see for a minute."""
    folder = tmp_path / "a"
    folder.mkdir()
    stale_view.install(monkeypatch, 60.0, tmp_path)
    return lambda command: subprocess.run(command, shell=True, cwd=folder, check=True) and None


def test_a_listing_of_a_minute_ago_gives_no_number_that_was_used_before(tmp_path: Path, other_machine: Callable[[str], None]) -> None:
    claim(tmp_path / "a", 3)
    other_machine("touch 000003.released")
    assert holder_of(tmp_path / "a") is None
    claimed = json.dumps(json.loads((tmp_path / "a/000003.json").read_text()) | {"number": 7})
    other_machine(f"rm 000003.*; echo '{claimed}' > 000007.json; touch 000006.released")
    assert holder_of(tmp_path / "a") is None, "what this test needs: the view is an old one"
    cancelled, seen = threading.Event(), []
    with pytest.raises(Cancelled), lease(tmp_path / "a", "x", waiting=lambda who: (seen.append(who), cancelled.set()), cancelled=cancelled):
        pass
    assert [who.number for who in seen] == [7]


def test_who_was_overtaken_learns_of_it_in_spite_of_a_listing_of_a_minute_ago(tmp_path: Path, other_machine: Callable[[str], None]) -> None:
    with lease(tmp_path / "a", "x") as hold:
        hold.check()
        fence = Fence.raised(tmp_path / "a", hold.number)
        assert "000002.json" not in os.listdir(tmp_path / "a")
        other_machine("cp 000001.json 000002.json; touch fence-000002-0001")
        assert "000002.json" not in os.listdir(tmp_path / "a"), "what this test needs: the view is an old one"
        with pytest.raises(LeaseLost, match="has number 1, but the latest is 2"):
            hold.check()
        os.listdir(tmp_path / "a")
        other_machine("touch fence-000003-0001")
        with pytest.raises(Superseded, match=r"the latest is 3\.1"):
            fence.check()


# --- fencing tokens --------------------------------------------------------------------------------------------------


def test_only_the_latest_submission_may_write(tmp_path: Path) -> None:
    first = Fence.raised(tmp_path, 3)
    again = Fence.raised(tmp_path, 3)
    again.check()
    with pytest.raises(Superseded, match=r"submission 3\.1 of its job, and the latest is 3\.2"):
        first.check()
    later = Fence.raised(tmp_path, 7)
    for old in (first, again):
        with pytest.raises(Superseded):
            old.check()
    with pytest.raises(Superseded):
        Fence.raised(tmp_path, 3)
    later.check()
    shutil.rmtree(tmp_path)
    with pytest.raises(Superseded, match="gone with its folder"):
        later.check()


def test_who_has_not_looked_for_a_while_looks_before_it_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = fences._now()
    monkeypatch.setattr(fences, "_now", lambda: now)
    fence = Fence.raised(tmp_path, 1)
    Fence.raised(tmp_path, 2)
    fence.check_after_pause()  # it has looked a moment ago
    fence.looked -= 60
    with pytest.raises(Superseded):
        fence.check_after_pause()


# --- signs of life ---------------------------------------------------------------------------------------------------


def test_a_pulse_goes_on_where_the_disk_takes_no_new_file(tmp_path: Path, soon: None) -> None:
    """It overwrites the blocks that it has, also with a text that has become shorter."""
    words = iter(["long " * 20])
    with Pulse(tmp_path / "x", extra=lambda: {"word": next(words, "")}):
        file, before = (tmp_path / "x").stat().st_ino, heartbeat.sign(tmp_path / "x")
        until(lambda: heartbeat.sign(tmp_path / "x") != before)
        assert (tmp_path / "x").stat().st_ino == file
        until(lambda: [beat["word"] for beat in heartbeat.read_heartbeats(tmp_path / "x")] == [""])
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_a_disk_that_stumbles_ends_no_pulse(tmp_path: Path, soon: None) -> None:
    """An NFS server that fails over answers with ESTALE or EIO for a moment: whoever then falls silent is taken over while it lives."""
    failing = [OSError(errno.ESTALE, "Stale file handle")] * 3

    def stumble() -> None:
        if failing:
            raise failing.pop()

    def told() -> dict[str, int]:
        stumble()
        return {"pid": 1}

    for pulsing in (Pulse(tmp_path / "x", look=stumble), Pulse(tmp_path / "y", extra=told)):
        with pulsing:
            until(lambda: not failing)  # noqa: B023
            before = heartbeat.sign(pulsing.path)
            until(lambda: heartbeat.sign(pulsing.path) != before)  # noqa: B023
        failing += [OSError(errno.EIO, "Input/output error")] * 3


def test_a_later_submission_is_seen_after_the_disk_has_stumbled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that cannot be listed says nothing of later submissions: nobody is overtaken by it, and nobody may go on sealing."""
    fence, real = Fence.raised(tmp_path, 1), os.listdir

    def stale(*_: object) -> list[str]:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(os, "listdir", stale)
    with pytest.raises(OSError, match="Stale"):
        fence.check()
    monkeypatch.setattr(os, "listdir", real)
    Fence.raised(tmp_path, 2)
    with pytest.raises(Superseded):
        fence.check()


# --- what others have left in a lease ----------------------------------------------------------------------------------


STRANGE_CLAIMS = {
    "since": '{"number": 1, "process": PROCESS, "since": 1e30, "what": "x", "token": "t"}',
    "since text": '{"number": 1, "process": PROCESS, "since": "x", "what": "x", "token": "t"}',
    "another field": '{"number": 1, "process": PROCESS, "since": 0.0, "what": "x", "token": "t", "new": 1}',
    "process": '{"number": 1, "process": {"pid": -1}, "since": 0.0, "what": "x", "token": "t"}',
    "list": "[]",
    "empty": "",
    "deep": "[" * 5000,
}


@pytest.mark.parametrize(
    "what", [what if what == "since text" else pytest.param(what, marks=pytest.mark.nightly) for what in STRANGE_CLAIMS]
)
def test_a_claim_of_another_form_is_somebody_elses_as_long_as_it_beats(tmp_path: Path, clock: ListenersClock, what: str) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    (folder / "000001.json").write_text(STRANGE_CLAIMS[what].replace("PROCESS", json.dumps(Process.here().model_dump())))
    seen: list[str] = []
    with Pulse(folder / "000001.beat"):
        thread = InThread(take, folder, seen)
        until(lambda: seen)
        assert holder_of(folder) is not None and "000001.json" in seen[0] and "without a heartbeat" in seen[0]
        clock.beating(lambda: next_beat(folder / "000001.beat"))
        assert thread.alive() and len(seen) == 1
    clock.silent(lambda: not thread.alive())
    assert seen[1:] == ["held 2"]


def take(folder: Path, seen: list[str]) -> None:
    with lease(folder, "mine", waiting=lambda holder: seen.append(str(holder))) as hold:
        seen.append(f"held {hold.number}")


def test_strange_names_in_a_lease_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, seen = tmp_path / "a", []
    monkeypatch.setattr(heartbeat, "SILENCE_S", 0.1)  # nobody beats
    (folder / "000001.json").mkdir(parents=True)  # a claim that is a folder
    for name in ("0x.json", "1.2.json", "7.txt"):
        (folder / name).touch()
    for number in (2, 3, 4):
        take(folder, seen)
        assert seen[-1] == f"held {number}"
    assert not (folder / "000001.json").exists() and (folder / "0x.json").exists()


def test_a_lease_that_is_a_file_is_named_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "leases").touch()
    for folder in (tmp_path / "leases", tmp_path / "leases" / "a"):
        assert holder_of(folder) is None
        with pytest.raises(PedigreeError, match=r"leases is a file.*remove it and run the command again"), lease(folder, "mine"):
            pass


# --- slots -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["{}", '{"a": 1}', "[]", "", '{"slots": 3, "process": null, "job": 1, "token": "t"}'])
def test_an_entry_that_nobody_keeps_alive_costs_nothing(tmp_path: Path, form: str) -> None:
    folder = tmp_path / "cores"
    folder.mkdir()
    (folder / "strange.json").write_text(form)
    with slots(pool(folder, 1), 1, job=tmp_path / "job" / "job.json") as held:
        assert held.names == ["0"] and not (folder / "strange.json").exists()


def test_slots_of_the_version_before_are_held_by_its_runner_and_by_the_job_that_outlives_it(tmp_path: Path, soon: None) -> None:
    """It had a heartbeat next to its entry, and locked nothing."""
    folder, scratch = tmp_path / "cores", tmp_path / "other"
    folder.mkdir()
    scratch.mkdir()
    entry = {"process": Process.here().model_dump(), "job": str(scratch / "job.json"), "token": "t", "slots": ["0"]}
    (folder / "other.json").write_text(json.dumps(entry))
    with Pulse(folder / "other.beat"), slots(pool(folder, 2), 1, job=tmp_path / "job" / "job.json") as held:
        assert held.names == ["1"]
    job = subprocess.Popen(["sleep", "60"], env={"PEDIGREE_JOB": str(scratch)})
    os.utime(folder / "other.beat", (0, 0))
    assert taken_slots(folder) == {"other": ["0"]}
    job.kill()
    job.wait()
    assert taken_slots(folder) == {} and list(folder.glob("[!.]*")) == []


def test_a_folder_that_cannot_hold_slots_is_named_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    for chosen in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/nowhere")):
        monkeypatch.setenv("PEDIGREE_SLOTS", str(chosen))
        with pytest.raises(PedigreeError, match=rf"^{chosen} cannot hold .*: set PEDIGREE_SLOTS to a folder of your own"):
            machine_folder()
    monkeypatch.setenv("PEDIGREE_SLOTS", str(tmp_path / "x"))
    machine_folder()
    (tmp_path / "x" / "cores").touch()
    with pytest.raises(PedigreeError, match="set PEDIGREE_SLOTS"), slots(Pool.of(Numerics(), 1), 1, job=tmp_path / "job.json"):
        pass


def test_who_holds_slots_ends_well_when_their_folder_is_cleaned_away(tmp_path: Path) -> None:
    with slots(pool(tmp_path / "cores", 1), 1, job=tmp_path / "job.json"):
        shutil.rmtree(tmp_path / "cores")


def test_shells_with_different_folders_for_temporary_files_share_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PEDIGREE_SLOTS")
    monkeypatch.setattr(machine, "MACHINE", tmp_path / "system")
    (tmp_path / "system").mkdir()
    found = set()
    for name in ("a", "b"):
        monkeypatch.setenv("TMPDIR", str(tmp_path / name))
        monkeypatch.setattr(tempfile, "tempdir", None)
        found.add(machine_folder())
    assert found == {tmp_path / "system" / f"pedigree-slots-{os.getuid()}"}


def pool(folder: Path, count: int) -> Pool:
    return Pool(folder, tuple(map(str, range(count))))


def test_slots_are_never_oversold(tmp_path: Path) -> None:
    most, now, guard = 0, 0, threading.Lock()
    held: set[str] = set()

    def work(name: str, count: int) -> None:
        nonlocal most, now
        with slots(pool(tmp_path, 3), count, job=tmp_path / "jobs" / name / "job.json") as slot:
            names = slot.names
            with guard:
                assert len(names) == count and not held & set(names), "two holders of one slot"
                held.update(names)
                now += count
                most = max(most, now)
            time.sleep(0.05)  # time for another one to be let in by mistake
            with guard:
                held.difference_update(names)
                now -= count

    for thread in [InThread(work, str(n), 1 + n % 3) for n in range(8)]:
        thread.join()
    assert most == 3 and taken_slots(tmp_path) == {} and not list(tmp_path.glob("*.json"))


def test_slots_of_a_dead_orchestrator_belong_to_its_living_job(tmp_path: Path) -> None:
    file = tmp_path / "job" / "job.json"
    code = f"""
import os, subprocess; from pathlib import Path; from pedigree.pipelines.jobs.slots import Pool, slots
with slots(Pool(Path({str(tmp_path / "pool")!r}), ("0", "1", "2")), 2, job=Path({str(file)!r})) as held, held.for_job() as lock:
    print(subprocess.Popen(["sleep", "60"], pass_fds=[lock], stdout=subprocess.DEVNULL).pid, flush=True)
    os._exit(0)
"""
    job = int(subprocess.run([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout)
    assert list(taken_slots(tmp_path / "pool").values()) == [["0", "1"]]
    with slots(pool(tmp_path / "pool", 3), 1, job=tmp_path / "other" / "job.json") as held:
        assert held.names == ["2"]
    with slots(pool(tmp_path / "pool", 3), 2, job=file) as held:
        assert held.names == ["0", "1"]  # those of the job that is re-attached to
        os.kill(job, signal.SIGKILL)
        until(lambda: Process.of(job) is None)
        assert list(taken_slots(tmp_path / "pool").values()) == [["0", "1"]]  # kept for its next attempt
    assert taken_slots(tmp_path / "pool") == {}


def test_who_joins_a_job_never_touches_its_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk, or a kill between two writes, would leave the slots of a live job to others."""
    job = tmp_path / "job.json"
    with slots(pool(tmp_path / "pool", 2), 2, job=job):
        (entry,) = (tmp_path / "pool").glob("*.json")
        before = entry.read_bytes()
        monkeypatch.setattr(os, "ftruncate", lambda *_: pytest.fail("the entry was empty for a moment"))
        with slots(pool(tmp_path / "pool", 2), 2, job=job) as again:
            assert again.names == ["0", "1"] and entry.read_bytes() == before


def test_an_entry_that_cannot_be_written_holds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as broken, pytest.raises(OSError, match="No space left"):
        broken.setattr(os, "pwrite", full)
        with slots(pool(tmp_path / "pool", 1), 1, job=tmp_path / "job.json"):
            pass
    with slots(pool(tmp_path / "pool", 1), 1, job=tmp_path / "job.json") as held:
        assert held.names == ["0"]


def test_a_process_that_was_forked_from_a_runner_keeps_no_slots(tmp_path: Path) -> None:
    with slots(pool(tmp_path, 1), 1, job=tmp_path / "job.json") as held:
        forked = subprocess.Popen(["sleep", "60"], pass_fds=[held.lock])
    assert taken_slots(tmp_path) == {}
    forked.kill()
    forked.wait()


def test_a_job_of_processes_holds_the_slots_of_its_runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pedigree.pipelines.jobs.launcher.job_command", lambda *_: ["sleep", "60"])
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    (scratch / "spec.json").write_text('{"code": "none"}')
    with slots(pool(tmp_path / "pool", 1), 1, job=scratch / "job.json") as held:
        handle = JOBS.submit(scratch, Numerics(), 1, held)
    assert list(taken_slots(tmp_path / "pool").values()) == [["0"]]
    JOBS.cancel(handle)
    assert taken_slots(tmp_path / "pool") == {}


def test_two_clones_share_the_slots_of_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same stage in two clones has the same key: their jobs are told apart, and the second one waits."""
    monkeypatch.setenv("PEDIGREE_SLOTS", str(tmp_path / "machine"))
    cpu, small, seen = Numerics(), threading.Event(), []
    clones = [tmp_path / name / ".pedigree" / "scratch" / "key" / "job.json" for name in ("a", "b")]
    with slots(Pool.of(cpu, 2), 2, job=clones[0]):

        def second() -> None:
            with slots(Pool.of(cpu, 2), 1, job=clones[1], waiting=seen.append):
                small.set()

        thread = InThread(second)
        until(lambda: seen)
        assert seen == [[str(clones[0])]] and not small.wait(0.5)
        with slots(Pool.of(cpu, 4), 1, job=tmp_path / "c" / "job.json") as held:  # this clone's profile knows of more cores
            assert held.names == ["2"]
    thread.join()
    assert small.is_set()


def test_gpus_are_held_by_name_and_apart_from_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEDIGREE_SLOTS", str(tmp_path / "machine"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    cuda = Numerics(device="cuda")
    cores = slots(Pool.of(Numerics(), 2), 2, job=tmp_path / "b" / "job.json")
    with slots(Pool.of(cuda, 2), 1, job=tmp_path / "a" / "job.json") as held, cores:
        assert held.names == ["2"]
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
        with slots(Pool.of(cuda, 4), 3, job=tmp_path / "c" / "job.json") as others:
            assert others.names == ["0", "1", "3"]


def test_a_job_that_needs_more_slots_than_the_pool_has_waits_for_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But one that holds its slots already is joined, whichever GPUs its new runner sees."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    cuda, job = Numerics(device="cuda"), tmp_path / "a" / "job.json"
    with slots(Pool.of(cuda, 8), 3, job=job):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
        with slots(Pool.of(cuda, 8), 3, job=job) as joined:
            assert joined.names == ["0", "1", "2"]
    with pytest.raises(PedigreeError, match=r"slots is 3, but CUDA_VISIBLE_DEVICES lists 2 GPUs \(2,3\)"):
        slots(Pool.of(cuda, 8), 3, job=job).__enter__()


def test_the_machines_folder_is_ours_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEDIGREE_SLOTS", str(tmp_path / "x"))
    assert machine_folder().stat().st_mode & 0o777 == 0o700
    (tmp_path / "x").rmdir()
    (tmp_path / "x").symlink_to(tmp_path)
    with pytest.raises(PedigreeError, match="set PEDIGREE_SLOTS to a folder of your own"):
        machine_folder()


@needs_elsewhere
def test_a_container_on_the_same_machine_keeps_its_slots_until_it_ends(tmp_path: Path) -> None:
    code = f"""
import time; from pathlib import Path; from pedigree.pipelines.jobs.slots import Pool, slots
with slots(Pool(Path({str(tmp_path)!r}), ("0",)), 1, job=Path("/nowhere/job.json")): print(1, flush=True); time.sleep(60)
"""
    other = python_elsewhere(code, ROOT, stdout=subprocess.PIPE)
    assert other.stdout and other.stdout.readline()
    assert list(taken_slots(tmp_path).values()) == [["0"]]
    other.kill()
    other.wait()
    until(lambda: not taken_slots(tmp_path))
