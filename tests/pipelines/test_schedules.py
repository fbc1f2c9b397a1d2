"""Schedules on a real Prefect server, worked off by a real worker: real jobs, real kills. One server and one worker for all tests."""

import http.server
import json
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from uuid import UUID, uuid4

import pytest
from chaos_prefect import PREFECT
from commands import Command
from prefect._internal.concurrency.cancellation import WatcherThreadCancelScope
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.schedules import IntervalSchedule
from prefect.settings import PREFECT_API_URL, temporary_settings
from running_lab import Lab
from test_flow import Server, flow_process, seen
from typer.testing import CliRunner
from waiting import deadline, until

from pedigree.configs.base.problems import PedigreeError
from pedigree.pipelines.cli.main import app
from pedigree.pipelines.deployments import Terms, cancel_runs, deploy, deployments, remove
from pedigree.pipelines.flow import _undisturbed
from pedigree.pipelines.prefect.shown import connected
from pedigree.pipelines.publish.regressions import Fall
from pedigree.pipelines.run.opening import Request, open_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
POOL = "here"
PATIENCE_S = 120.0
QUICK = {"PREFECT_WORKER_QUERY_SECONDS": "1", "PREFECT_WORKER_PREFETCH_SECONDS": "1"}


def until_seen(condition: Callable[[], bool]) -> None:
    """Waits until the server answers yes."""
    until(lambda: seen(condition), PATIENCE_S)


class Deployed(Command):
    """A lab whose recipe is deployed on the server of these tests.

    Calling it types a command into a shell of its own, `here` types one in this process, which has imported Prefect already.
    """

    def __init__(self, folder: Path, server: Server) -> None:
        super().__init__(Lab(folder))
        self.server = server
        self.environment |= server.environment
        self.name = folder.name
        """Of the deployment: labs share a server."""

    def deploy(self, *options: str) -> str:
        return self("deploy", "lab", "--work-pool", POOL, "--name", self.name, *options)

    def deploy_here(self, pool: str = POOL, **terms: Any) -> None:
        """The same without a shell."""
        request, project = Request("lab"), self.lab.project
        with temporary_settings({PREFECT_API_URL: self.server.url}):
            graph = open_run(project, request, looking=True).graph
            deploy(project, graph, request, Terms(pool, name=self.name, **terms), self.lab.code)

    def here(self, *arguments: str, code: int = 0) -> str:
        with pytest.MonkeyPatch.context() as patch, temporary_settings({PREFECT_API_URL: self.server.url}):
            patch.chdir(self.lab.root)
            patch.setenv("PREFECT_API_URL", self.server.url)
            patch.setenv("COLUMNS", "200")
            done = CliRunner().invoke(app, arguments)
        problem = done.exception if isinstance(done.exception, PedigreeError) else None
        assert problem or isinstance(done.exception, SystemExit | None), done.exc_info
        assert (problem.exit_code if problem else done.exit_code) == code, done.output
        return f"{done.output}{problem or ''}"

    @property
    def deployment(self) -> dict[str, Any]:
        return json.loads(self.server.call("GET", f"deployments/name/post-train/{self.name}"))

    def start_run(self, **parameters: Any) -> str:
        """As somebody does who clicks on Run; returns its id."""
        return self.server.post(f"deployments/{self.deployment['id']}/create_flow_run", {"parameters": parameters})["id"]

    def flow_runs(self, *states: str) -> list[dict[str, Any]]:
        """The oldest first."""
        wanted = {"deployments": {"name": {"any_": [self.name]}}, "sort": "EXPECTED_START_TIME_ASC"}
        found = self.server.post("flow_runs/filter", wanted)
        return [run for run in found if run["state_type"] in states] if states else found

    def ended(self, run: str) -> dict[str, Any]:
        """The state in which a flow run ends."""
        final = ("COMPLETED", "FAILED", "CANCELLED")  # crashed ones are started again
        until_seen(lambda: self.server.state(run)["type"] in final)
        return self.server.state(run)

    def is_waiting(self) -> bool:
        """Whether its job holds at `go`."""
        return (self.lab.root / "go.waiting").exists()

    def go(self) -> None:
        (self.lab.root / "go").touch()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    made = Server(tmp_path_factory.mktemp("prefect") / "home")
    made.post("work_pools/", {"name": POOL, "type": "process"})
    yield made
    made.stop()


@pytest.fixture(scope="module")
def start_worker(server: Server) -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        arguments = [PREFECT, "worker", "start", "--pool", POOL, "--type", "process"]
        environment = {**os.environ, **server.environment, **QUICK}
        silent: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        process = subprocess.Popen(arguments, env=environment, start_new_session=True, **silent)
        started.append(process)
        return process

    yield start
    for process in started:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def worker(start_worker: Callable[[], subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
    return start_worker()


@pytest.fixture
def lab(tmp_path: Path, server: Server) -> Iterator[Deployed]:
    made = Deployed(tmp_path, server)
    yield made
    with suppress(HTTPError):  # nothing is deployed
        server.call("DELETE", f"deployments/{made.deployment['id']}")


def test_a_schedule_fires_and_what_has_not_changed_is_not_run_again(lab: Deployed, worker: object) -> None:
    said = lab.deploy("--interval", "10s")
    assert f"deployed {lab.name}: every 10 s, on work pool here; recipe:lab, commit:" in said
    until_seen(lambda: len(lab.flow_runs("COMPLETED")) >= 2)
    first, second = lab.flow_runs("COMPLETED")[:2]
    assert first["state"]["message"] == "4 stages are up to date"
    assert second["state"]["message"] == "4 stages up to date, nothing to do"
    assert sorted(lab.lab.runs()) == ["clean", "cleaner", "raw", "suite"]  # each once
    assert first["name"] == second["name"] == "lab" and set(lab.server.states(first).values()) == {"Completed"}
    table = lab.here("schedules", "list")
    assert lab.name in table and "every 10 s" in table and "nothing to do" in table

    lab.here("schedules", "pause", lab.name)
    until_seen(lambda: not lab.flow_runs("RUNNING", "PENDING"))
    before, done = len(lab.flow_runs()), len(lab.flow_runs("COMPLETED"))
    assert not lab.flow_runs("SCHEDULED") and "paused" in lab.here("schedules", "list")
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
    said = lab.deploy("--rehearse", "--interval", "10s")
    assert f"deployed {lab.name}: every 10 s" in said and lab.deployment["parameters"]["rehearse"] is True
    until_seen(lambda: len(lab.flow_runs("COMPLETED")) >= 2)
    first, second = lab.flow_runs("COMPLETED")[:2]
    assert first["state"]["message"] == "4 stages are up to date"
    assert second["state"]["message"] == "4 stages up to date, nothing to do"
    assert first["name"] == "lab-rehearsal" and {"pedigree", "rehearsal", "recipe:lab"} <= set(first["tags"])
    assert sorted((rehearsal / "runs.log").read_text().split()) == ["lab/clean", "lab/cleaner", "lab/raw", "lab/suite"]
    assert not lab.lab.runs() and not (lab.lab.root / "artifacts").exists()
    lab.here("schedules", "pause", lab.name)


def test_a_run_waits_for_its_gpu_pool_and_is_cancelled_with_its_jobs_and_not_started_again(lab: Deployed, worker: object) -> None:
    lab.lab.knobs(clean={"hold": "go"})
    lab.deploy_here(gpu_pool="a100", gpu_slots=1)
    taken = lab.server.post("v2/concurrency_limits/increment", {"names": ["a100"], "slots": 1})
    run = lab.start_run()
    until_seen(lambda: "Waiting for a slot of a100" in lab.server.messages({"id": run}))
    assert not lab.lab.runs()
    assert taken and lab.server.call("POST", "v2/concurrency_limits/decrement", b'{"names": ["a100"], "slots": 1}')
    until(lab.is_waiting, PATIENCE_S)
    assert "Acquired a slot of a100" in lab.server.messages({"id": run})

    said = lab.here("cancel", lab.name)
    assert f"canceled 1 scheduled run of {lab.name}" in said
    assert lab.ended(run)["type"] == "CANCELLED"
    until(lambda: not lab.jobs())
    assert sorted(lab.lab.runs()) == ["raw", "suite"] and len(lab.flow_runs()) == 1
    until_seen(lambda: json.loads(lab.server.call("GET", "v2/concurrency_limits/a100"))["active_slots"] == 0)


def test_the_api_takes_what_the_form_offers_and_nothing_else(lab: Deployed, server: Server) -> None:
    said = lab.deploy("--until", "clean", "--until", "clean", "--set", "cleaner.ngram = 7", "--set", "cleaner.ngram = 7")
    assert "variant:" in said and lab.deployment["parameters"]["until"] == ["clean"]
    server.call("POST", f"deployments/{lab.deployment['id']}/pause_deployment")
    form = lab.deployment["parameter_openapi_schema"]["properties"]
    assert form["start"]["items"]["enum"] == ["suite", "raw", "clean", "cleaner"] and form["start"]["title"] == "from"
    assert form["profile"]["anyOf"][0]["enum"] == ["cpu", "gpu", "gpu8", "lab"] and "Execution profile" in form["profile"]["description"]
    bad: dict[str, dict[str, Any]] = {
        "cleen": {"until": ["cleen"]}, "nowhere": {"profile": "nowhere"}, "tiny": {"recipe": "tiny"}, "oops": {"oops": 1},
        "ngram=3": {"overrides": "ngram=3"}, "ngram 3": {"overrides": ["ngram 3"]},
    }  # fmt: skip
    for word, parameters in bad.items():
        with pytest.raises(HTTPError) as refused:
            lab.start_run(**parameters)
        assert refused.value.code == 409 and word in refused.value.read().decode(), parameters
    lab.start_run(until=["raw"], force=["raw"], profile="lab", overrides=["cleaner.ngram=3", " cleaner.ngram = 4"])


def begin(lab: Deployed) -> str:
    """A run that takes the slot of its deployment, as a worker would start it; returns its id."""
    run = lab.start_run()
    for state in ("PENDING", "RUNNING"):
        assert lab.server.post(f"flow_runs/{run}/set_state", {"state": {"type": state}})["status"] == "ACCEPT"
    return run


def wait_for_slot(lab: Deployed) -> str:
    """A run whose time has come while another one runs; returns its id."""
    run = lab.start_run()
    answer = lab.server.post(f"flow_runs/{run}/set_state", {"state": {"type": "PENDING"}})
    assert answer["state"]["name"] == "AwaitingConcurrencySlot"
    return run


@pytest.fixture
def unworked(lab: Deployed, server: Server) -> Deployed:
    """A lab that is deployed on a pool that nobody works off."""
    with suppress(HTTPError):  # of the test before
        server.post("work_pools/", {"name": "unworked", "type": "process"})
    lab.deploy_here("unworked", when_busy="wait", schedule=IntervalSchedule(interval=timedelta(hours=1)))
    return lab


def test_nothing_that_waits_for_its_turn_begins_after_a_pause_or_a_cancellation(unworked: Deployed, server: Server) -> None:
    running, waiting = begin(unworked), wait_for_slot(unworked)
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
    run, read = begin(unworked), SyncPrefectClient.read_flow_runs

    def read_too_early(*arguments: Any, **options: Any) -> Any:
        found = read(*arguments, **options)
        server.post(f"flow_runs/{run}/set_state", {"state": {"type": "COMPLETED"}})
        return found

    monkeypatch.setattr(SyncPrefectClient, "read_flow_runs", read_too_early)
    with temporary_settings({PREFECT_API_URL: server.url}):
        assert cancel_runs(unworked.lab.project, unworked.name) == 0
    assert server.state(run)["type"] == "COMPLETED"


def test_deployments_are_listed_however_many_there_are(unworked: Deployed, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pedigree.pipelines.deployments.PAGE", 2)
    name, names = unworked.name, [f"{unworked.name}-{number}" for number in range(4)]
    for unworked.name in names:
        unworked.deploy_here("unworked")
    unworked.name = name
    with temporary_settings({PREFECT_API_URL: server.url}):
        assert [one.name for one in deployments(unworked.lab.project)] == [name, *names]
        for one in names:
            remove(unworked.lab.project, one)
        assert [one.name for one in deployments(unworked.lab.project)] == [name]


class Listener:
    """Somebody who is notified: a web server on loopback, and the Prefect block that names it."""

    def __init__(self, server: Server) -> None:
        self.heard: queue.Queue[str] = queue.Queue()
        heard = self.heard

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                heard.put(self.rfile.read(int(self.headers["Content-Length"])).decode())
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None: ...

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        kind = json.loads(server.call("GET", "block_types/slug/custom-webhook"))
        schema = server.post("block_schemas/filter", {"block_schemas": {"block_type_id": {"any_": [kind["id"]]}}})[0]
        url = f"http://127.0.0.1:{self.server.server_address[1]}/"
        data = {"name": "team", "url": url, "method": "POST", "json_data": {"subject": "{{subject}}", "body": "{{body}}"}}
        made = {"name": "team", "data": data, "block_type_id": kind["id"], "block_schema_id": schema["id"]}
        server.post("block_documents/", made)

    def until_heard(self, text: str) -> str:
        """The next call with this text; Prefect may make a call twice."""
        while text not in (heard := self.heard.get(timeout=deadline(PATIENCE_S))):
            pass
        return heard


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
    server.post("work_pools/", {"name": "nobody", "type": "process"})
    monkeypatch.setattr("pedigree.pipelines.deployments.SILENCE", timedelta(seconds=10))
    lab.deploy_here("nobody")
    run, deployment = lab.start_run(), lab.deployment
    for state in ("PENDING", "RUNNING"):
        assert server.post(f"flow_runs/{run}/set_state", {"state": {"type": state}})["status"] == "ACCEPT"
    limit = f"v2/concurrency_limits/{deployment['global_concurrency_limit']['id']}"
    assert json.loads(server.call("GET", limit))["active_slots"] == 1
    sign = {
        "event": "prefect.flow-run.heartbeat", "occurred": datetime.now(UTC).isoformat(), "id": str(uuid4()),
        "resource": {"prefect.resource.id": f"prefect.flow-run.{run}"},
        "related": [{"prefect.resource.id": f"prefect.deployment.{deployment['id']}", "prefect.resource.role": "deployment"}],
    }  # fmt: skip
    server.call("POST", "events", json.dumps([sign]).encode())
    until_seen(lambda: server.state(run)["type"] == "CRASHED")
    assert "no heartbeat" in server.state(run)["message"]
    until_seen(lambda: json.loads(server.call("GET", limit))["active_slots"] == 0)


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
    server.post("work_pools/", {"name": "empty", "type": "process"})
    assert "no worker of empty is online" in lab.here("deploy", "lab", "--work-pool", "empty", "--name", lab.name)
    assert "(no worker)" in lab.here("schedules", "list")
    other = Deployed(tmp_path_factory.mktemp("other"), server)
    other.name = lab.name
    said = other.here("deploy", "lab", "--work-pool", POOL, "--name", lab.name, code=2)
    assert f"{lab.name} is already deployed on this server for {lab.lab.root}" in said


def test_without_a_server_schedules_say_so(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(lab.root)
        patch.setenv("PREFECT_HOME", str(lab.root / "no-prefect"))
        for words in (
            ["deploy", "lab", "--work-pool", POOL],
            ["serve", "lab"],
            ["schedules", "list"],
            ["schedules", "pause", "lab"],
            ["schedules", "resume", "lab"],
        ):
            said = str(CliRunner().invoke(app, words).exception)
            assert "schedules need a Prefect server" in said and "prefect config set PREFECT_API_URL" in said


def test_a_server_that_does_not_answer_is_said(tmp_path: Path) -> None:
    nobody = temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"})
    with nobody, pytest.raises(PedigreeError, match=r"127\.0\.0\.1:9/api does not respond"):
        deployments(Lab(tmp_path).project)


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


@pytest.mark.nightly
def test_serving_works_runs_off_until_ctrl_c_and_pauses_the_schedule(lab: Deployed) -> None:
    lab.environment |= QUICK
    options = ("--interval", "10s", "--name", lab.name, "--until", "suite")
    process = lab.until("serve", "lab", *options, ready=lambda: seen(lambda: bool(lab.flow_runs("COMPLETED"))))
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

    process = lab.until("serve", "lab", "--interval", "1h", "--name", lab.name, ready=lambda: seen(lambda: bool(workers())))
    (worker,) = (int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split())
    process.send_signal(end)
    out, err = process.communicate(timeout=deadline(PATIENCE_S))
    until(lambda: ended(worker), PATIENCE_S)
    if end == signal.SIGHUP:
        assert process.returncode == 0 and lab.deployment["paused"], out + err


def test_a_flow_that_is_killed_is_started_again_and_takes_its_job_over_and_a_killed_worker_ends_nothing(
    lab: Deployed, worker: subprocess.Popen[bytes], start_worker: Callable[[], subprocess.Popen[bytes]]
) -> None:
    lab.lab.knobs(clean={"hold": "go"})
    lab.deploy_here()
    run = lab.start_run()
    until(lab.is_waiting, PATIENCE_S)
    job = lab.jobs()
    os.kill(flow_process(run), signal.SIGKILL)
    until_seen(lambda: lab.server.ask("flow_runs", flow_runs=run)[0]["run_count"] == 2)
    until_seen(lambda: "job of an earlier run" in lab.server.messages({"id": run}))
    assert lab.jobs() == job
    worker.kill()
    worker.wait()
    assert lab.jobs() == job and flow_process(run)
    lab.go()
    assert lab.ended(run)["message"] == "4 stages are up to date"
    assert sorted(lab.lab.runs()) == ["clean", "cleaner", "raw", "suite"]  # each once
    start_worker()
