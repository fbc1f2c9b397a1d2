"""What options of `deploy` mean before a server is asked, and how runs and commands do where there is no server."""

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from commands import Command, InProcessCommand
from prefect._internal.concurrency.cancellation import WatcherThreadCancelScope
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect_lab import processes_with
from running_lab import REPOSITORY, Lab
from typer.testing import CliRunner
from waiting import deadline

from pedigree.configs.base.problems import PedigreeError, UsageProblem
from pedigree.pipelines import deployments
from pedigree.pipelines.cli.main import app
from pedigree.pipelines.cli.schedules import WORKER
from pedigree.pipelines.flow import _undisturbed
from pedigree.pipelines.prefect import recurrence
from pedigree.pipelines.prefect.recurrence import describe, schedule_of


def test_a_worker_can_be_interrupted_though_a_script_has_put_its_command_into_the_background() -> None:
    """Its shell lets such a command ignore SIGINT, and so its processes: `serve` would wait for its worker forever."""
    code = WORKER.partition("runpy.run_module")[0] + "os.kill(os.getpid(), signal.SIGINT)"
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        worker = subprocess.run([sys.executable, "-c", code, str(os.getpid())], capture_output=True, timeout=deadline(30))
    finally:
        signal.signal(signal.SIGINT, before)
    assert b"KeyboardInterrupt" in worker.stderr


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("cron", "0 3 31 2 *"),
        ("rrule", "FREQ=DAILY;UNTIL=20200101"),
        ("rrule", "EXRULE:FREQ=DAILY"),
        ("rrule", "FREQ=MINUTELY;interval=00;BYHOUR=3"),
        ("rrule", "FREQ=MINUTELY;INTERVAL=0_0"),
        ("rrule", "FREQ=DAILY;INTERVAL=-1"),
        ("interval", "9000000d"),  # once, and then Prefect's calendar has ended
    ],
)
def test_a_schedule_that_never_fires_is_refused(option: str, text: str) -> None:
    with pytest.raises(UsageProblem, match=rf"--{option} {re.escape(repr(text))} never fires \(.+\)"):
        schedule_of(**{option: text})


def test_a_rule_whose_next_date_is_not_found_in_time_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """No second holds two: Prefect would look at each to the year 9999, which takes days, and do nothing else meanwhile."""
    monkeypatch.setattr(recurrence, "SEARCH_S", 1)
    with pytest.raises(UsageProblem, match=r"never fires .computing its next dates takes more than 1 s"):
        schedule_of(rrule="FREQ=SECONDLY;BYSETPOS=2")


@pytest.mark.parametrize(
    ("option", "text", "words"),
    [
        ("cron", "0 3 29 2 *", "cron 0 3 29 2 * (Europe/Berlin)"),  # years away
        ("interval", "36500d", "every 36500 d"),
        ("rrule", "FREQ=MINUTELY", "rrule FREQ=MINUTELY (Europe/Berlin)"),
        ("rrule", "FREQ=WEEKLY;INTERVAL=02;BYDAY=MO", "rrule FREQ=WEEKLY;INTERVAL=02;BYDAY=MO (Europe/Berlin)"),
    ],
)
def test_a_schedule_that_fires_however_seldom_or_often_is_taken(option: str, text: str, words: str) -> None:
    assert describe(schedule_of(**{option: text}, timezone="Europe/Berlin")) == words


@pytest.mark.parametrize("text", ["99999999999d", "1000000000d", "1" + "0" * 400 + "d", "0d"])
def test_an_interval_beyond_all_bounds_cannot_be_read(text: str) -> None:
    with pytest.raises(UsageProblem, match=r"is invalid\. Expected a positive number with a unit"):
        schedule_of(interval=text)


def test_without_a_server_schedules_say_so(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(lab.root)
        patch.setenv("PREFECT_HOME", str(lab.root / "no-prefect"))
        for words in (
            "deploy lab --work-pool here", "serve lab", "schedules list", "schedules pause lab", "schedules resume lab",
        ):  # fmt: skip
            said = str(CliRunner().invoke(app, words.split()).exception)
            assert "schedules need a Prefect server" in said and "prefect config set PREFECT_API_URL" in said


def test_a_server_that_does_not_answer_is_said(tmp_path: Path) -> None:
    nobody = temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"})
    with nobody, pytest.raises(PedigreeError, match=r"127\.0\.0\.1:9/api does not respond"):
        deployments.deployments(Lab(tmp_path).project)


def test_a_lost_lease_of_prefect_ends_no_run(tmp_path: Path) -> None:
    """What Prefect does when it cannot renew the slot of a deployment: its server was away, or has been started anew."""
    begun, go = threading.Event(), threading.Event()

    def work() -> str:
        begun.set()
        assert go.wait(deadline(20))
        return "done"

    def lose(scope: WatcherThreadCancelScope) -> None:
        assert begun.wait(deadline(20))
        scope.cancel()
        go.set()

    context = Lab(tmp_path).run()
    with WatcherThreadCancelScope() as scope:
        thread = threading.Thread(target=lose, args=(scope,))
        thread.start()
        assert _undisturbed(context, work) == "done"
        thread.join()
    assert scope.cancelled() and not context.cancelled.is_set()


@pytest.mark.slow
@pytest.mark.nightly
def test_no_server_there_at_all_is_said_once_and_the_run_is_made(tmp_path):
    command = Command(Lab(tmp_path))
    command.environment |= {"PREFECT_API_URL": "http://127.0.0.1:9/api", "PEDIGREE_PREFECT": "auto", "PREFECT_HOME": str(tmp_path / "home")}
    text = command("run", "lab", "--until", "suite")
    assert "note: Prefect does not answer ([Errno 111] Connection refused); the run continues without it (http://127.0.0.1:9/api)" in text


@pytest.mark.slow
def test_without_a_server_no_server_is_started_and_prefect_is_not_imported(tmp_path):
    command = Command(Lab(tmp_path))
    for name in [name for name in command.environment if name.startswith(("PREFECT_", "PEDIGREE_PREFECT"))]:
        del command.environment[name]
    command.environment |= {"HOME": str(tmp_path / "home"), "PYTHONPROFILEIMPORTTIME": "1"}
    command.lab.knobs(clean={"hold": "go"})
    with (tmp_path / "imports").open("w") as imports:  # more than fits into a pipe that nobody reads
        process = command.until("run", "lab", ready=(command.lab.root / "go.waiting").exists, stderr=imports)
        ours = [line for line in processes_with(str(command.lab.code)) if " -m " in line]
        assert sorted(line.split(" -m ")[1].split()[0] for line in ours) == ["pedigree.pipelines.cli", "pedigree.stages"]
        (command.lab.root / "go").touch()
        out, _ = process.communicate(timeout=deadline(60))
    lines = (tmp_path / "imports").read_text().splitlines()
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in lines if line.startswith("import time:")}
    assert process.returncode == 0 and out.count("✓") == 4
    assert "pedigree" in imported and not imported & {"prefect", "httpx", "sqlalchemy", "fastapi"}
    here = InProcessCommand(command.lab)
    here.environment = command.environment
    text = here("run", "lab", "--prefect", "always", "--force", "cleaner", code=2)
    assert "no Prefect server is configured" in text and "prefect config set PREFECT_API_URL" in text


WAYS: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "nothing": ({}, {}),
    "environment": ({"PREFECT_API_URL": "http://a/api"}, {".env": "PREFECT_API_URL=http://b/api"}),
    "dotenv": ({}, {".env": 'PREFECT_API_URL="http://b/api"', "prefect.toml": '[api]\nurl = "http://c/api"'}),
    "toml": ({}, {"prefect.toml": '[api]\nurl = "http://c/api"', "pyproject.toml": '[tool.prefect.api]\nurl = "http://d/api"'}),
    "pyproject": ({}, {"pyproject.toml": '[tool.prefect.api]\nurl = "http://d/api"'}),
    "profile": ({}, {"home/profiles.toml": 'active = "x"\n[profiles.x]\nPREFECT_API_URL = "http://e/api"'}),
    "another profile": (
        {"PREFECT_PROFILE": "y"},
        {"home/profiles.toml": 'active = "x"\n[profiles.x]\nPREFECT_API_URL = "http://e/api"\n[profiles.y]'},
    ),
    "no such profile": ({"PREFECT_PROFILE": "z"}, {"home/profiles.toml": '[profiles.x]\nPREFECT_API_URL = "http://e/api"'}),
}


@pytest.mark.nightly
def test_a_configured_server_is_found_where_prefect_finds_it(tmp_path):
    script = (
        "from pedigree.pipelines.cli.quiet import prefect_server; ours = prefect_server()\n"
        "from prefect.settings import get_current_settings; theirs = get_current_settings().api.url\n"
        "print(ours, theirs)"
    )
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    found = {}
    for name, (environment, files) in WAYS.items():
        folder = tmp_path / name
        for file, text in files.items():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_text(text + "\n")
        (folder / "home").mkdir(parents=True, exist_ok=True)
        paths = {"PYTHONPATH": str(REPOSITORY), "PREFECT_HOME": str(folder / "home")}
        command = [sys.executable, "-c", script]
        done = subprocess.run(command, cwd=folder, env=kept | paths | environment, capture_output=True, text=True, check=True)
        ours, theirs = done.stdout.split()
        assert ours == theirs, name
        found[name] = ours[-5] if ours != "None" else None
    assert found == dict(zip(WAYS, [None, "a", "b", "c", "d", "e", None, None], strict=True))
