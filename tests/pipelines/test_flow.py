"""Runs and schedules on a real Prefect server, worked off by a real worker: real jobs, real kills. One server for all tests."""

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from uuid import UUID, uuid4

import pytest
from chaos_prefect import PREFECT
from commands import InProcessCommand, step_of
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.schedules import IntervalSchedule
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect_lab import PATIENCE_S, POOL, Deployed, Listener, Server, Shown, flow_process, seen, until_seen
from running_lab import Lab
from waiting import deadline, until

from pedigree.pipelines.deployments import cancel_runs, deployments, remove
from pedigree.pipelines.prefect.shown import connected
from pedigree.pipelines.publish.regressions import Fall

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
UNWORKED = "unworked"
"""A pool that nobody works off."""
QUICK = {"PREFECT_WORKER_QUERY_SECONDS": "1", "PREFECT_WORKER_PREFETCH_SECONDS": "1"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    made = Server(tmp_path_factory.mktemp("prefect") / "home")
    for pool in (POOL, UNWORKED):
        made.post("work_pools/", {"name": pool, "type": "process"})
    yield made
    made.stop()


@pytest.fixture
def command(tmp_path: Path, server: Server) -> Shown:
    return Shown(tmp_path, server)


def show_progress_at_once(lab: Lab) -> None:
    """Otherwise only a stage that runs for long has its progress shown."""
    shown = lab.code / "pipelines/prefect/shown.py"
    text, count = re.subn(r"^ARTIFACT_INTERVAL_S = .*$", "ARTIFACT_INTERVAL_S = 0.1", shown.read_text(), flags=re.MULTILINE)
    assert count == 1
    shown.write_text(text)


def test_a_failed_stage_fails_the_flow_says_why_and_lets_the_others_finish(command, server):
    stage = command.lab.code / "stages" / "prepare_data" / "run.py"
    counting = '(job.evidence / "counts.json").write_text(json.dumps({"read": 9, "kept": 9}))'
    stage.write_text(stage.read_text().replace("    hold(job)\n", f"    hold(job)\n    {counting}\n"))
    command.lab.knobs(raw={"fail": "these rows are bad"})
    text = command("run", "lab", code=1)
    assert "lab/raw failed (refused): these rows are bad" in text
    run = server.last_run(command)
    assert run["name"] == "lab" and run["state_type"] == "FAILED" and "these rows are bad" in run["state"]["message"]
    assert server.states(run) == {"suite": "Completed", "raw": "Failed", "clean": "NotReady", "cleaner": "NotReady"}
    until_seen(lambda: "last lines of its log" in (log := server.messages(run["id"])) and "refused: these rows are bad" in log)

    show_progress_at_once(command.lab)
    command.lab.knobs(clean={"hold": "go"})
    process = command.until("run", "lab", ready=lambda: seen(lambda: "lab-clean" in server.artifacts(command)))
    command.go()
    out, err = process.communicate(timeout=deadline(120))
    assert process.returncode == 0, out + err
    run = server.last_run(command)
    assert run["state_type"] == "COMPLETED"
    assert server.states(run) == {"suite": "Cached", "raw": "Completed", "clean": "Completed", "cleaner": "Completed"}
    artifacts = server.artifacts(command)
    assert artifacts["lab-clean"]["type"] == "progress" and float(artifacts["lab-clean"]["data"]) == 100.0
    assert artifacts["lab-raw-counts"]["type"] == "table"
    here = InProcessCommand(command.lab)
    here.environment = command.environment
    assert "nothing to do" in here("run", "lab")
    assert server.last_run(command)["id"] == run["id"]  # nothing to do is no flow run


@pytest.mark.nightly
def test_a_retry_is_told_with_its_reason(command, server):
    command.lab.knobs(raw={"crash": 1})
    text = command("run", "lab", "--until", "raw")
    assert "attempt 2 after: the job was killed by signal 9" in text
    until_seen(lambda: "attempt 2 after: the job was killed by signal 9" in server.messages(server.last_run(command)["id"]))


@pytest.mark.nightly
def test_cancelling_in_prefect_ends_the_jobs(command, server):
    command.lab.knobs(clean={"seconds": 60})
    process = command.until("run", "lab", ready=lambda: step_of(command.lab, "clean") > 1)
    run = server.last_run(command)
    server.cancel(run["id"])
    _, err = process.communicate(timeout=deadline(60))
    assert process.returncode == 1 and "lab/clean failed (cancelled)" in err
    assert not command.jobs() and server.last_run(command)["state_type"] == "CANCELLED"


@pytest.mark.nightly
def test_a_run_that_was_killed_is_told_to_have_crashed_and_its_job_is_taken_over(command, server):
    command.lab.knobs(clean={"hold": "go"})
    process = command.until("run", "lab", ready=command.is_waiting)
    killed = server.last_run(command)
    process.kill()
    process.communicate()
    assert killed["state_type"] == "RUNNING" and command.jobs()
    command.go()
    assert "job of an earlier run" in command("run", "lab")
    assert command.lab.runs().count("clean") == 1
    (found,) = server.ask("flow_runs", flow_runs=killed["id"])
    assert found["state_type"] == "CRASHED" and "died unexpectedly" in found["state"]["message"]
    assert server.last_run(command)["state_type"] == "COMPLETED"


# --- a server that goes away --------------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_a_server_that_hangs_holds_nothing_up_and_the_next_run_tells_it_the_end(command, server):
    command.lab.knobs(clean={"seconds": 10})
    process = command.until("run", "lab", ready=lambda: step_of(command.lab, "clean") > 1)
    run = server.last_run(command)
    until_seen(lambda: len(server.ask("task_runs", flow_runs=run["id"])) == 4)
    server.signal(signal.SIGSTOP)
    try:
        out, err = process.communicate(timeout=deadline(90))
    finally:
        server.kill()  # with the requests that it has not read
        server.start()
    assert process.returncode == 0 and out.count("✓") == 4, out + err
    assert "the end of this run could not be reported to Prefect; the next run will report it" in out + err
    assert server.state(run["id"])["type"] == "RUNNING"
    command("run", "lab", "--force", "cleaner")
    assert server.state(run["id"])["type"] == "COMPLETED" and set(server.states(run).values()) == {"Completed"}
    assert not list((command.lab.root / ".pedigree" / "flows").glob("*.json"))


@pytest.mark.nightly
def test_a_server_that_has_lost_its_memory_is_told_the_run_anew(command, server):
    command.lab.knobs(clean={"hold": "go"})
    process = command.until("run", "lab", ready=command.is_waiting)
    lost = server.last_run(command)["id"]
    server.call("DELETE", f"flow_runs/{lost}")
    until(lambda: server.last_run(command)["id"] != lost)
    command.go()
    out, err = process.communicate(timeout=deadline(120))
    assert process.returncode == 0, out + err
    run = server.last_run(command)
    assert run["id"] != lost and run["state_type"] == "COMPLETED" and set(server.states(run).values()) == {"Completed"}


# --- schedules ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def workers(server: Server) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Those of the pool that have been started, the last one last."""
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for process in started:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture
def worker(server: Server, workers: list[subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
    if not workers or workers[-1].poll() is not None:  # a test has killed it
        arguments = [PREFECT, "worker", "start", "--pool", POOL, "--type", "process"]
        silent: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        environment = {**os.environ, **server.environment, **QUICK}
        workers.append(subprocess.Popen(arguments, env=environment, start_new_session=True, **silent))
    return workers[-1]


@pytest.fixture
def lab(tmp_path: Path, server: Server) -> Iterator[Deployed]:
    made = Deployed(tmp_path, server)
    yield made
    with suppress(HTTPError):  # nothing is deployed
        server.call("DELETE", f"deployments/{made.deployment['id']}")


@pytest.mark.nightly
def test_a_server_that_is_killed_under_a_flow_run_ends_no_job_and_is_told_all_when_it_is_back(lab, server):
    """The process of the worker and that of the flow run lose it; a stage ends and another begins meanwhile."""
    lab.lab.knobs(clean={"hold": "clean goes"}, cleaner={"hold": "go"})
    lab.deploy_here(UNWORKED)
    run = lab.start_run()
    execute = [PREFECT, "flow-run", "execute", run]
    process = subprocess.Popen(execute, env=lab.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
    until((lab.lab.root / "clean goes.waiting").exists, PATIENCE_S, alive=lambda: process.poll() is None)
    server.kill()
    try:
        (lab.lab.root / "clean goes").touch()
        until(lab.is_waiting)
        assert process.poll() is None and lab.jobs()
    finally:
        server.start()
    lab.go()
    said = process.communicate(timeout=deadline(120))[0].decode()
    assert process.returncode == 0 and "Prefect does not answer" in said and "Prefect is reachable again" in said, said
    assert server.state(run)["type"] == "COMPLETED" and set(server.states({"id": run}).values()) == {"Completed"}
    assert sorted(lab.lab.runs()) == ["clean", "cleaner", "raw", "suite"]  # each once


def test_a_schedule_fires_and_what_has_not_changed_is_not_run_again(lab: Deployed, worker: object) -> None:
    said = lab("deploy", "lab", "--work-pool", POOL, "--name", lab.name, "--interval", "10s")
    assert f"deployed {lab.name}: every 10 s, on work pool here; recipe:lab, commit:" in said
    until_seen(lambda: lab.flow_runs("COMPLETED"))
    lab.here("schedules", "pause", lab.name)
    first = lab.flow_runs("COMPLETED")[0]
    assert first["name"] == "lab" and first["state"]["message"] == "4 stages are up to date"
    assert sorted(lab.lab.runs()) == ["clean", "cleaner", "raw", "suite"]  # each once
    assert set(lab.server.states(first).values()) == {"Completed"}
    until_seen(lambda: not lab.flow_runs("RUNNING", "PENDING"))
    table = lab.here("schedules", "list")
    assert lab.name in table and "every 10 s" in table and "paused" in table
    # a second run may have been done before the pause
    assert "Completed: 4 stages are up to date" in table or "Completed: 4 stages up to date, nothing to do" in table

    before, done = len(lab.flow_runs()), len(lab.flow_runs("COMPLETED"))
    assert not lab.flow_runs("SCHEDULED")
    lab.lab.edit("configs/recipes/lab.yaml", "ngram: 5", "ngram: 6")
    lab.lab.shell("git -c user.name=lab -c user.email=lab@example.org commit -qam changed")
    commit = lab.lab.shell("git rev-parse --short=12 HEAD").stdout.strip()
    lab.lab.forget_runs()
    assert len(lab.flow_runs()) == before  # nothing was started while it was paused

    lab.here("schedules", "resume", lab.name)
    until_seen(lambda: len(lab.flow_runs("COMPLETED")) > done)
    changed = lab.flow_runs("COMPLETED")[done]
    assert lab.lab.runs() == ["cleaner"]  # the one that the commit touches
    assert {"pedigree", "recipe:lab", f"commit:{commit}"} == set(changed["tags"]) and f"commit:{commit}" not in first["tags"]
    assert "no longer deployed" in lab.here("schedules", "remove", lab.name)
    with pytest.raises(HTTPError):
        print(lab.deployment)


@pytest.mark.nightly
def test_a_schedule_fires_rehearsals_which_touch_nothing_real(lab: Deployed, worker: object) -> None:
    rehearsal = lab.lab.project.rehearsal("lab").root
    rehearsal.mkdir(parents=True)
    (rehearsal / "knobs.json").write_text("{}")
    said = lab("deploy", "lab", "--work-pool", POOL, "--name", lab.name, "--rehearse", "--interval", "10s")
    assert f"deployed {lab.name}: every 10 s" in said and lab.deployment["parameters"]["rehearse"] is True
    until_seen(lambda: len(lab.flow_runs("COMPLETED")) >= 2)
    first, second = lab.flow_runs("COMPLETED")[:2]
    assert first["state"]["message"] == "4 stages are up to date"
    assert second["state"]["message"] == "4 stages up to date, nothing to do"
    assert first["name"] == "lab-rehearsal" and {"pedigree", "rehearsal", "recipe:lab"} <= set(first["tags"])
    assert sorted((rehearsal / "runs.log").read_text().split()) == ["lab/clean", "lab/cleaner", "lab/raw", "lab/suite"]
    assert not lab.lab.runs() and not (lab.lab.root / "artifacts").exists()
    lab.here("schedules", "pause", lab.name)


@pytest.mark.nightly
def test_a_run_waits_for_its_gpu_pool_and_is_cancelled_with_its_jobs_and_not_started_again(lab: Deployed, worker: object) -> None:
    lab.lab.knobs(clean={"hold": "go"})
    lab.deploy_here(gpu_pool="a100", gpu_slots=1)
    taken = lab.server.post("v2/concurrency_limits/increment", {"names": ["a100"], "slots": 1})
    run = lab.start_run()
    until_seen(lambda: "Waiting for a slot of a100" in lab.server.messages(run))
    assert not lab.lab.runs()
    assert taken and lab.server.call("POST", "v2/concurrency_limits/decrement", b'{"names": ["a100"], "slots": 1}')
    until(lab.is_waiting, PATIENCE_S)
    assert "Acquired a slot of a100" in lab.server.messages(run)

    said = lab.here("cancel", lab.name)
    assert f"canceled 1 scheduled run of {lab.name}" in said
    assert lab.ended(run)["type"] == "CANCELLED"
    until(lambda: not lab.jobs())
    assert sorted(lab.lab.runs()) == ["raw", "suite"] and len(lab.flow_runs()) == 1
    until_seen(lambda: lab.server.get("v2/concurrency_limits/a100")["active_slots"] == 0)


def test_the_api_takes_what_the_form_offers_and_nothing_else(lab: Deployed, server: Server) -> None:
    twice = ("--until", "clean", "--set", "cleaner.ngram = 7") * 2
    said = lab.here("deploy", "lab", "--work-pool", UNWORKED, "--name", lab.name, *twice)
    assert "variant:" in said and lab.deployment["parameters"]["until"] == ["clean"]
    form = lab.deployment["parameter_openapi_schema"]["properties"]
    assert form["start"]["items"]["enum"] == ["suite", "raw", "clean", "cleaner"] and form["start"]["title"] == "from"
    profiles = form["profile"]["anyOf"][0]["enum"]
    assert profiles == ["cpu", "gpu", "gpu8", "lab", "ray", "slurm"] and "Execution profile" in form["profile"]["description"]
    bad: dict[str, dict[str, Any]] = {
        "cleen": {"until": ["cleen"]}, "nowhere": {"profile": "nowhere"}, "tiny": {"recipe": "tiny"}, "oops": {"oops": 1},
        "ngram=3": {"overrides": "ngram=3"}, "ngram 3": {"overrides": ["ngram 3"]},
    }  # fmt: skip
    for word, parameters in bad.items():
        with pytest.raises(HTTPError) as refused:
            lab.start_run(**parameters)
        assert refused.value.code == 409 and word in refused.value.read().decode(), parameters
    lab.start_run(until=["raw"], force=["raw"], profile="lab", overrides=["cleaner.ngram=3", " cleaner.ngram = 4"])


def wait_for_slot(lab: Deployed) -> str:
    """A run whose time has come while another one runs; returns its id."""
    run = lab.start_run()
    assert lab.server.set_state(run, "PENDING")["state"]["name"] == "AwaitingConcurrencySlot"
    return run


@pytest.fixture
def unworked(lab: Deployed) -> Deployed:
    """A lab that is deployed on a pool that nobody works off."""
    lab.deploy_here(UNWORKED, when_busy="wait", schedule=IntervalSchedule(interval=timedelta(hours=1)))
    return lab


def test_nothing_that_waits_for_its_turn_begins_after_a_pause_or_a_cancellation(unworked: Deployed, server: Server) -> None:
    running, waiting = unworked.begin(), wait_for_slot(unworked)
    later = {"type": "SCHEDULED", "state_details": {"scheduled_time": (datetime.now(UTC) + timedelta(days=2)).isoformat()}}
    by_hand = server.post(f"deployments/{unworked.deployment['id']}/create_flow_run", {"state": later})
    said = unworked.here("schedules", "pause", unworked.name)
    assert f"{unworked.name} is paused" in said and server.state(waiting)["type"] == "CANCELLED"
    assert f"{by_hand['name']} was planned manually and will still start" in said and f"`prefect flow-run cancel {by_hand['id']}`" in said
    assert server.state(running)["type"] == "RUNNING" and server.state(by_hand["id"])["type"] == "SCHEDULED"

    waiting = wait_for_slot(unworked)
    assert f"of {unworked.name}; `pedigree schedules pause" in unworked.here("cancel", unworked.name)
    assert server.state(running)["type"] == "CANCELLING" and server.state(waiting)["type"] == "CANCELLED"
    assert server.state(by_hand["id"])["type"] == "SCHEDULED"


def test_a_run_that_ends_while_it_is_being_cancelled_has_ended(unworked: Deployed, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    run, read = unworked.begin(), SyncPrefectClient.read_flow_runs

    def read_too_early(*arguments: Any, **options: Any) -> Any:
        found = read(*arguments, **options)
        server.set_state(run, "COMPLETED")
        return found

    monkeypatch.setattr(SyncPrefectClient, "read_flow_runs", read_too_early)
    with temporary_settings({PREFECT_API_URL: server.url}):
        assert cancel_runs(unworked.lab.project, unworked.name) == 0
    assert server.state(run)["type"] == "COMPLETED"


def test_deployments_are_listed_however_many_there_are(unworked: Deployed, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pedigree.pipelines.deployments.PAGE", 2)
    name, names = unworked.name, [f"{unworked.name}-{number}" for number in range(4)]
    for unworked.name in names:
        unworked.deploy_here(UNWORKED)
    unworked.name = name
    with temporary_settings({PREFECT_API_URL: server.url}):
        assert [one.name for one in deployments(unworked.lab.project)] == [name, *names]
        for one in names:
            remove(unworked.lab.project, one)
        assert [one.name for one in deployments(unworked.lab.project)] == [name]


@pytest.fixture(scope="module")
def listener(server: Server) -> Iterator[Listener]:
    made = Listener(server)
    yield made
    made.server.shutdown()


@pytest.mark.nightly
def test_a_failure_and_a_score_that_fell_are_told_to_the_block_that_was_named(lab: Deployed, worker: object, listener: Listener) -> None:
    lab.lab.knobs(raw={"fail": "these rows are bad"})
    lab.deploy_here(notify="custom-webhook/team")
    run = lab.start_run()
    assert lab.ended(run)["type"] == "FAILED" and "these rows are bad" in lab.server.state(run)["message"]
    assert "these rows are bad" in listener.until_heard("lab: Failed")

    context = lab.lab.run()
    with temporary_settings({PREFECT_API_URL: lab.server.url}), connected(context, [], UUID(run)) as shown:
        shown._tell_fall(Fall("evaluate", "rlvr", "gsm8k", 0.4, 0.5, 0.45))
    listener.until_heard("lab: rlvr on gsm8k: 0.400, previously 0.500 (interval from 0.450)")
    (report,) = lab.server.post("artifacts/filter", {"artifacts": {"flow_run_id": {"any_": [run]}, "type": {"any_": ["markdown"]}}})
    assert "artifacts/lab/report.html" in report["data"] and "`pedigree logs lab/raw`" in report["data"]
    assert (lab.lab.root / "artifacts/lab/report.html").exists()


def test_a_schedule_that_the_dashboard_switched_off_is_paused_until_it_is_resumed(lab: Deployed, server: Server) -> None:
    """Its switch is the schedule's own, beside the pause of the deployment."""

    def switched_on() -> bool:
        return lab.deployment["schedules"][0]["active"]

    hourly = IntervalSchedule(interval=timedelta(hours=1))
    lab.deploy_here(schedule=hourly)
    assert switched_on() and "paused" not in lab.here("schedules", "list")
    place = f"deployments/{lab.deployment['id']}/schedules/{lab.deployment['schedules'][0]['id']}"
    server.call("PATCH", place, json.dumps({"active": False}).encode())
    assert "paused" in lab.here("schedules", "list")
    lab.deploy_here(schedule=hourly)
    assert not switched_on() and "paused" in lab.here("schedules", "list")
    lab.here("schedules", "resume", lab.name)
    assert switched_on() and "paused" not in lab.here("schedules", "list")


@pytest.mark.nightly
def test_a_run_that_dies_in_silence_is_taken_for_crashed_and_frees_its_slot(
    lab: Deployed, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody is left to say that it died: its worker died with it."""
    monkeypatch.setattr("pedigree.pipelines.deployments.SILENCE", timedelta(seconds=10))
    lab.deploy_here(UNWORKED)
    run, deployment = lab.begin(), lab.deployment
    limit = f"v2/concurrency_limits/{deployment['global_concurrency_limit']['id']}"
    assert server.get(limit)["active_slots"] == 1
    sign = {
        "event": "prefect.flow-run.heartbeat", "occurred": datetime.now(UTC).isoformat(), "id": str(uuid4()),
        "resource": {"prefect.resource.id": f"prefect.flow-run.{run}"},
        "related": [{"prefect.resource.id": f"prefect.deployment.{deployment['id']}", "prefect.resource.role": "deployment"}],
    }  # fmt: skip
    server.call("POST", "events", json.dumps([sign]).encode())
    until_seen(lambda: server.state(run)["type"] == "CRASHED")
    assert "no heartbeat" in server.state(run)["message"]
    until_seen(lambda: server.get(limit)["active_slots"] == 0)


@pytest.mark.nightly
def test_what_cannot_be_deployed_is_said_with_its_remedy(lab: Deployed, server: Server, tmp_path_factory: pytest.TempPathFactory) -> None:
    wrong = {
        ("--cron", "61 * * * *"): "--cron '61 * * * *' is invalid",
        ("--cron", "0 3 * * *", "--timezone", "Europe/Berln"): "unknown time zone",
        ("--interval", "3 weeks"): "--interval '3 weeks' is invalid",
        ("--rrule", "FREQ=DAILY;INTERVAL=0"): "never fires",
        ("--interval", "1h", "--timezone", "X/Y"): "unknown time zone",
        ("--rrule", "FREQ=NEVER"): "--rrule 'FREQ=NEVER' is invalid",
        ("--cron", "0 3 * * *", "--interval", "1h"): "a deployment has one schedule",
        ("--timezone", "Europe/Berlin"): "requires --cron, --interval or --rrule",
        ("--notify", "slack-webhook/nobody"): "no such notification block",
        ("--gpu-pool", "nowhere"): "--gpu-pool nowhere=N creates one",
        ("--gpu-pool", "a=0"): "N at least 1",
        ("--until", "cleen"): "cleen",
        ("--name", "a/b"): "names cannot contain /",
    }
    for options, words in wrong.items():
        assert words in lab.here("deploy", "lab", "--work-pool", POOL, *options, code=2), options
    assert "create it with `prefect work-pool create --type process nowhere`" in lab.here("deploy", "lab", "--work-pool", "nowhere", code=2)
    server.post("work_pools/", {"name": "pods", "type": "kubernetes"})
    assert "of type kubernetes" in lab.here("deploy", "lab", "--work-pool", "pods", code=2)
    assert "--work-pool is required" in lab.here("deploy", "lab", code=2)
    open_one = "{type: hub, repo: some/set, revision: pin me, split: train}"
    stages = f"stages:\n  rows: {{kind: prepare_data, record: prompt, sources: [{open_one}]}}\n"
    (lab.lab.root / "configs" / "recipes" / "open.yaml").write_text(f"execution: lab\n{stages}")
    said = lab.here("deploy", "open", "--work-pool", POOL, code=2)
    assert "some/set has no revision yet" in said and "pedigree pin open" in said
    (lab.lab.root / "configs" / "recipes" / "open.yaml").unlink()
    assert "lab is not deployed for this project (deployed: none)" in lab.here("schedules", "pause", "lab", code=2)
    assert "no worker of unworked is online" in lab.here("deploy", "lab", "--work-pool", UNWORKED, "--name", lab.name)
    assert "(no worker)" in lab.here("schedules", "list")
    other = Deployed(tmp_path_factory.mktemp("other"), server)
    other.name = lab.name
    said = other.here("deploy", "lab", "--work-pool", POOL, "--name", lab.name, code=2)
    assert f"{lab.name} is already deployed on this server for {lab.lab.root}" in said


@pytest.mark.nightly
def test_serving_works_runs_off_until_ctrl_c_and_pauses_the_schedule(lab: Deployed) -> None:
    lab.environment |= QUICK
    options = ("--interval", "10s", "--name", lab.name, "--until", "suite")
    process = lab.until("serve", "lab", *options, ready=lambda: seen(lambda: lab.flow_runs("COMPLETED")))
    assert lab.lab.runs() == ["suite"] and not lab.deployment["paused"]
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=deadline(PATIENCE_S))
    assert process.returncode == 0 and f"The schedule of {lab.name} is paused" in out, out + err
    assert lab.deployment["paused"]
    until_seen(lambda: not lab.flow_runs("SCHEDULED"))


def ended(pid: int) -> bool:
    try:
        return "State:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.mark.nightly
@pytest.mark.parametrize("end", [signal.SIGHUP, signal.SIGKILL])
def test_a_worker_ends_with_the_command_that_serves_by_it(lab: Deployed, end: signal.Signals) -> None:
    """A closed terminal tells only the command, as the worker is in a session of its own; a kill tells nobody."""

    def workers() -> list[dict[str, Any]]:
        with suppress(HTTPError):
            return lab.server.post(f"work_pools/{lab.deployment['work_pool_name']}/workers/filter", {})
        return []

    process = lab.until("serve", "lab", "--interval", "1h", "--name", lab.name, ready=lambda: seen(workers))
    (worker,) = (int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split())
    process.send_signal(end)
    out, err = process.communicate(timeout=deadline(PATIENCE_S))
    until(lambda: ended(worker), PATIENCE_S)
    if end == signal.SIGHUP:
        assert process.returncode == 0 and lab.deployment["paused"], out + err


@pytest.mark.nightly
def test_a_flow_that_is_killed_is_started_again_and_takes_its_job_over_and_a_killed_worker_ends_nothing(
    lab: Deployed, worker: subprocess.Popen[bytes]
) -> None:
    lab.lab.knobs(clean={"hold": "go"})
    lab.deploy_here()
    run = lab.start_run()
    until(lab.is_waiting, PATIENCE_S)
    job = lab.jobs()
    os.kill(flow_process(run), signal.SIGKILL)
    until_seen(lambda: lab.server.ask("flow_runs", flow_runs=run)[0]["run_count"] == 2)
    until_seen(lambda: "job of an earlier run" in lab.server.messages(run))
    assert lab.jobs() == job
    worker.kill()
    worker.wait()
    assert lab.jobs() == job and flow_process(run)
    lab.go()
    assert lab.ended(run)["message"] == "4 stages are up to date"
    assert sorted(lab.lab.runs()) == ["clean", "cleaner", "raw", "suite"]  # each once


def test_the_last_run_is_found_behind_many_that_were_skipped(lab: Deployed) -> None:
    lab.deploy_here(UNWORKED)
    lab.begin()
    for _ in range(25):  # as a schedule does whose runs are skipped while one takes a day
        lab.server.set_state(lab.start_run(), "CANCELLED")
    assert "Running" in lab.here("schedules", "list")
