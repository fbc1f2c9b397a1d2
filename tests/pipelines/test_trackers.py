"""Trackers get every step once and the lineage, over interrupted runs too, and what fails in them leaves the run alone."""

import json
import os
import re
import signal
import sqlite3
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from running_lab import RANKS, Lab, outcomes, read
from sweeps import nightly_after
from waiting import InThread, deadline, until

from pedigree.configs.base.document import ConfigError
from pedigree.configs.language.execution import Execution
from pedigree.pipelines.jobs.processes import command_line
from pedigree.pipelines.run import checks
from pedigree.pipelines.run.runs import run_graph
from pedigree.pipelines.tracking import tracking
from pedigree.pipelines.tracking.follower import Curves, follow
from pedigree.pipelines.tracking.tracked_stage import Curve, numbers_in

PROFILE = "slots: 2\nnumerics: {threads: 1}\nplacement: {slots: 1, retries: 0, heartbeat_timeout_s: 120}\ntrackers:\n"
TRACKERS = {
    "tensorboard": "{type: tensorboard, folder: boards}",
    "wandb": "{type: wandb, project: lab, mode: offline}",
    "mlflow": "{type: mlflow, uri: 'sqlite:///runs.db'}",
    "trackio": "{type: trackio, project: lab}",
}


@pytest.fixture(autouse=True)
def _a_run_waits_for_its_trackers(monkeypatch: pytest.MonkeyPatch) -> None:
    """However late their processes start on a busy machine."""
    monkeypatch.setattr(tracking, "END_S", deadline(60))


def lab_with(folder: Path, *trackers: str) -> Lab:
    lab = Lab(folder)
    lab.write("configs/recipes/lab.yaml", RANKS)
    lab.write("configs/execution/lab.yaml", PROFILE + "".join(f"- {tracker}\n" for tracker in trackers))
    return lab


def boards(root: Path) -> tuple[list[list[int]], str]:
    """(steps of `rows` of each run, all texts)."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    steps, texts = [], ""
    for folder in sorted((root / "boards/lab/sft").iterdir()):
        found = EventAccumulator(str(folder)).Reload()
        steps.append([event.step for event in found.Scalars("rows")])
        for tag in found.Tags()["tensors"]:
            texts += "".join(event.tensor_proto.string_val[0].decode() for event in found.Tensors(tag))
    return steps, texts


def wandb_records(path: Path) -> Iterator[Any]:
    """Records of an offline run, stored like LevelDB's log: blocks of 32 KiB, each fragment with checksum, length and type."""
    from wandb.proto.wandb_internal_pb2 import Record  # pyright: ignore[reportMissingImports]

    stored, place, record = path.read_bytes(), 7, b""
    while place + 7 <= len(stored):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
        _, length, kind = struct.unpack_from("<IHB", stored, place)
        record += stored[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            yield Record.FromString(record)
            record = b""


def wandb_runs(root: Path) -> tuple[list[list[int]], str]:
    """Offline folders of one run have one ID, by which `wandb sync` joins them."""
    steps, texts = dict[str, list[int]](), ""
    for path in sorted((root / ".pedigree/wandb").glob("offline-run-*/*.wandb")):
        for record in wandb_records(path):
            if any("rows" in (item.key, *item.nested_key) for item in record.history.item):
                steps.setdefault(path.stem, []).append(record.history.step.num)
            texts += str(record.run.config)
    return [*steps.values()], texts.replace("\\", "")


def mlflow_runs(root: Path) -> tuple[list[list[int]], str]:
    from mlflow import MlflowClient  # pyright: ignore[reportMissingImports]

    client = MlflowClient(tracking_uri=f"sqlite:///{root}/runs.db")
    found = client.search_runs([client.get_experiment_by_name("pedigree").experiment_id])
    assert all(run.info.status == "FINISHED" for run in found)
    steps = [[metric.step for metric in client.get_metric_history(run.info.run_id, "rows")] for run in found]
    return steps, json.dumps([run.data.params | run.data.tags for run in found])


def trackio_runs(root: Path) -> tuple[list[list[int]], str]:
    """Read without trackio, whose folder is fixed when it is imported."""
    with closing(sqlite3.connect(root / "trackio/lab.db")) as database:
        rows = database.execute("SELECT run_id, step, metrics FROM metrics ORDER BY id").fetchall()
        ((config,),) = database.execute("SELECT config FROM configs")
    steps, results = dict[str, list[int]](), 0
    for run, step, metrics in rows:
        if "rows" in json.loads(metrics):
            steps.setdefault(run, []).append(step)
        results += "result/rows" in json.loads(metrics)
    assert results == 1 and json.loads(config)["outcome"] == "done"
    return [*steps.values()], config.decode()


READ = {"tensorboard": boards, "wandb": wandb_runs, "mlflow": mlflow_runs, "trackio": trackio_runs}


@pytest.fixture
def installed(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library of a tracker, in this process and those it starts, from the folder of `make test-all`."""
    folder = str(Path(sys.prefix) / "trackers")
    monkeypatch.setattr(sys, "path", [*sys.path, folder])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), folder]))
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "project/trackio"))
    if find_spec(kind) is None:
        pytest.skip(f"{kind} is not in the lock: `make test-all` installs it")


@pytest.mark.parametrize("kind", nightly_after(1, TRACKERS))
def test_an_interrupted_stage_continues_its_run_without_doubled_steps(tmp_path: Path, kind: str, installed: None) -> None:
    lab, stop = lab_with(tmp_path, TRACKERS[kind]), threading.Event()
    lab.write("knobs.json", '{"lab/sft": {"seconds": 600}}')
    run = lab.run(cancelled=stop)
    thread = InThread(run_graph, run)
    (logged,) = until(lambda: list((lab.root / ".pedigree/trackers").glob(f"{kind}-*/[!.]*")), alive=thread.alive)
    stop.set()
    thread.join()
    reached = int(logged.read_text())
    # Steps 1 to `reached` are written again with the curve of the second attempt
    lab.write("knobs.json", json.dumps({"lab/sft": {"seconds": (reached + 3) / 10}}))
    assert outcomes(lab)["sft"] == "ran"
    steps, texts = READ[kind](lab.root)
    assert steps == [[*range(1, reached + 4)]]
    record = read(lab, "sft", "record.json")
    schedule = record["config"]["optimizer"]["schedule"]
    for expected in (record["key"], record["inputs"][0]["producer"], schedule):
        assert expected in texts
    assert not logged.exists()
    assert re.search(f"^{kind}: ", (lab.root / ".pedigree/logs/lab/sft.log").read_text(), re.MULTILINE)


def test_a_job_that_ended_while_nobody_watched_is_told_to_its_end(tmp_path: Path) -> None:
    """`--keep-jobs` and Ctrl-C in the middle: the next run publishes it without having seen it end."""
    lab, stop = lab_with(tmp_path, TRACKERS["tensorboard"]), threading.Event()
    lab.knobs(sft={"seconds": 1, "pause": "go"})
    run = lab.run(cancelled=stop)
    run.keep_jobs = True
    thread = threading.Thread(target=run_graph, args=(run,))
    thread.start()
    until(lambda: list((lab.root / ".pedigree/trackers").glob("tensorboard-*/[!.]*")), alive=thread.is_alive)
    stop.set()
    thread.join()
    (lab.root / "go").touch()
    until(lambda: list(lab.root.glob(".pedigree/scratch/*/done.json")))
    assert outcomes(lab)["sft"] == "attached"
    steps, texts = boards(lab.root)
    assert steps == [[*range(1, 11)]] and read(lab, "sft", "record.json")["key"] in texts
    assert '"artifact"' in texts and not list((lab.root / ".pedigree/trackers").glob("tensorboard-*/[!.]*"))


def test_a_tracker_that_fails_is_a_notice_and_another_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking, "END_S", 0.0)
    lab = lab_with(tmp_path, TRACKERS["tensorboard"])
    lab.write("boards", "a file where the folder should be")
    lab.knobs(sft={"hold": "go"})
    run = lab.run()
    thread = InThread(run_graph, run)
    until(lambda: any("tracker" in notice for notice in [*run.ledger.notices]), alive=thread.alive)
    (lab.root / "go").touch()
    thread.join()
    assert (lab.root / "artifacts/lab/sft/record.json").exists()
    notices = [notice for notice in run.ledger.notices if "tracker" in notice]
    assert notices[0].startswith("tracker tensorboard: ") and "the run continues without it" in notices[0]
    assert len(notices) == 2 and "did not end within 0 s of the run, so it may lack metrics" in notices[1]


def test_a_tracker_that_cannot_start_is_a_notice(tmp_path: Path) -> None:
    lab = lab_with(tmp_path, "{type: prometheus, folder: metrics}", "{type: json, file: log.jsonl}")
    (lab.root / ".pedigree/trackers/lab/prometheus.log").mkdir(parents=True)
    lab.write("knobs.json", '{"lab/clean": {"fail": "no rows"}}')
    run = lab.run()
    run_graph(run)
    (notice,) = [notice for notice in run.ledger.notices if "tracker" in notice]
    assert notice.startswith("tracker prometheus cannot start ([Errno 21] ") and notice.endswith("the run continues without it")
    found = [json.loads(line) for line in (lab.root / "log.jsonl").read_text().splitlines()]
    (failed,) = [line for line in found if line["state"] == "failed"]
    assert (failed["stage"], failed["cause"]) == ("clean", "refused") and "no rows" in failed["detail"]


def test_a_tracker_that_hangs_is_ended_after_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking, "END_S", 0.0)
    lab = lab_with(tmp_path, "{type: prometheus, folder: metrics}")
    run = lab.run()
    follower = []

    def suspend(event: object) -> None:
        if not follower:
            pids = map(int, filter(str.isdigit, os.listdir("/proc")))
            (found,) = [pid for pid in pids if any(str(lab.root) in word for word in command_line(pid))]
            os.kill(found, signal.SIGSTOP)
            follower.append(found)

    run.watch = suspend
    run_graph(run)
    assert (lab.root / "artifacts/lab/sft/record.json").exists()
    assert "tracker prometheus did not end" in [*run.ledger.notices][-1]
    with pytest.raises(ProcessLookupError):
        os.kill(follower[0], 0)


class Followed:
    """A follower of one tracker in this process, and the run that it follows."""

    def __init__(self, folder: Path, tracker: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
        self.events, self.said, self.asleep = folder / "events.jsonl", list[str](), list[float]()
        header = {"process": os.getppid(), "recipe": "lab", "slots": 1, "stages": {"lab/sft": [1, 15]}, "trackers": [tracker]}
        self.tell(header)
        monkeypatch.chdir(folder)
        monkeypatch.setattr(time, "monotonic", lambda: sum(self.asleep))
        monkeypatch.setattr(time, "sleep", self._sleep)

    def tell(self, *lines: dict[str, Any]) -> None:
        with self.events.open("a") as stream:
            stream.writelines(f"{json.dumps(line)}\n" for line in lines)

    def _sleep(self, seconds: float) -> None:
        self.asleep.append(seconds)
        self.then()

    def follow(self, then: Callable[[], object] = lambda: None) -> None:
        """`then` happens between any two looks at the events."""
        self.then = then
        with self.events.open("rb") as stream:
            follow(stream, 0, self.said.append)


def state(name: str, cause: str = "", detail: str = "") -> dict[str, Any]:
    return {"address": "lab/sft", "state": name, "cause": cause, "detail": detail, "time": 0.0}


def test_only_jobs_of_this_machine_hold_its_slots(tmp_path: Path) -> None:
    lab = lab_with(tmp_path)
    cluster = "{placement: {slots: 8, launcher: {type: slurm}}, numerics: {nodes: 2, world_size: 2}}"
    lab.edit("configs/execution/lab.yaml", "trackers:\n", f"kinds: {{sft: {cluster}}}\n")
    run = lab.run()
    assert [tracking._slots(run, run.graph.find(name)) for name in ("sft", "clean")] == [(0, 16), (1, 0)]


def test_a_tracker_that_is_away_at_the_end_gets_what_it_lacks_within_half_a_minute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Followed(tmp_path, {"type": "prometheus", "folder": "metrics"}, monkeypatch)
    run.tell(state("ran"), {"ended": True})
    place = tmp_path / "metrics"
    place.write_text("a file where the folder should be")
    run.follow(lambda: place.unlink() if sum(run.asleep) == 20 else None)
    assert 'state="ran"} 1' in (place / "pedigree_lab.prom").read_text() and len(run.said) == 1
    place.rename(tmp_path / "before")
    place.write_text("again")
    run.asleep.clear()
    run.follow()
    assert sum(run.asleep) == 30


def test_the_prometheus_file_of_a_run_that_was_killed_stays_active(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It grows old, which is what an alert looks for."""
    run = Followed(tmp_path, {"type": "prometheus", "folder": "metrics"}, monkeypatch)
    run.tell(state("running"))
    run.follow(lambda: monkeypatch.setattr(os, "getppid", lambda: -1))
    text = (tmp_path / "metrics/pedigree_lab.prom").read_text()
    assert 'pedigree_run_active{recipe="lab"} 1' in text and 'state="running"} 1' in text
    assert 'pedigree_slots_busy{recipe="lab"} 1' in text and 'pedigree_slots_busy_elsewhere{recipe="lab"} 15' in text
    run.tell({"ended": True})
    run.follow()
    assert 'pedigree_run_active{recipe="lab"} 0' in (tmp_path / "metrics/pedigree_lab.prom").read_text()


@pytest.mark.parametrize(("cause", "outcome"), [("cancelled", "interrupted"), ("overtaken", "interrupted"), ("out_of_memory", "failed")])
def test_a_stage_that_was_interrupted_has_not_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cause: str, outcome: str) -> None:
    told: list[str] = []
    seen: Any = SimpleNamespace(place="there", log=print, finish=lambda outcome, results: told.append(outcome))
    monkeypatch.setattr(Curves, "_opened", lambda curves, stage: seen)
    work = {"id": "1", "address": "lab/sft", "kind": "sft", "config": {"key": "k", "recipe": "lab"}}
    for name, tracker in (("board", {"type": "tensorboard", "folder": "t"}), ("file", {"type": "prometheus", "folder": "metrics"})):
        (tmp_path / name).mkdir()
        run = Followed(tmp_path / name, tracker, monkeypatch)
        run.tell(state("running") | {"work": work}, state("failed", cause), {"ended": True})
        run.follow()
    assert told == [outcome]
    text = (tmp_path / "file/metrics/pedigree_lab.prom").read_text()
    assert f'pedigree_stages{{recipe="lab",state="{outcome}"}} 1' in text
    assert ("pedigree_stage_failed{" in text) == (outcome == "failed")


def test_the_states_of_stages_are_lines_of_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):  # a later run appends
        run = Followed(tmp_path, {"type": "json", "file": "logs/run.jsonl"}, monkeypatch)
        run.tell(state("running") | {"time": 1.5}, state("failed", "out_of_memory", "too large") | {"time": 2.0}, {"ended": True})
        run.follow()
        run.events.unlink()
    lines = [json.loads(line) for line in (tmp_path / "logs/run.jsonl").read_text().splitlines()]
    stage = {"recipe": "lab", "stage": "sft"}
    assert lines == 2 * [
        {"time": "1970-01-01T00:00:01.500000+00:00", **stage, "state": "running"},
        {"time": "1970-01-01T00:00:02+00:00", **stage, "state": "failed", "cause": "out_of_memory", "detail": "too large"},
    ]


def test_prometheus_reads_states_causes_and_seconds(tmp_path: Path) -> None:
    lab = lab_with(tmp_path, "{type: prometheus, folder: metrics}", "{type: prometheus, folder: more}")
    lab.write("knobs.json", '{"lab/clean": {"fail": "no rows"}}')
    assert outcomes(lab)["clean"] == "StageFailed"
    text = (lab.root / "metrics/pedigree_lab.prom").read_text()
    samples = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert all(re.fullmatch(r'[a-z_]+\{recipe="lab"(,[a-z]+="[\w/]+")*\}', name) for name in samples)
    assert samples['pedigree_stages{recipe="lab",state="ran"}'] == "2"
    assert samples['pedigree_stages{recipe="lab",state="skipped"}'] == "2"
    assert samples['pedigree_stage_failed{recipe="lab",stage="lab/clean",cause="refused"}'] == "1"
    assert float(samples['pedigree_stage_running_seconds{recipe="lab",stage="lab/raw"}']) > 0
    assert (samples['pedigree_run_active{recipe="lab"}'], samples['pedigree_slots_busy{recipe="lab"}']) == ("0", "0")
    assert {path.name for path in (lab.root / ".pedigree/trackers/lab").iterdir()} == {"prometheus.log", "prometheus-2.log"}


def test_a_run_is_refused_before_it_starts_if_the_library_of_a_tracker_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "find_spec", lambda name: None)
    trackers = [{"type": "wandb", "project": "p"}, {"type": "prometheus", "folder": "f"}]
    execution = Execution.model_validate({"slots": 1, "trackers": trackers})
    with pytest.raises(ConfigError, match=r"not installed: wandb: run `pip install wandb`"):
        checks.refuse_missing_trackers(execution)


def test_a_curve_that_a_resumed_job_replaces_is_read_from_its_start(tmp_path: Path) -> None:
    path = tmp_path / "curve.jsonl"
    path.write_text('{"step": 1, "loss": 3.0}\n{"step": 2, "loss": NaN}\n{"step": 3, "lo')
    curve = Curve(path)
    assert [*curve.rows()] == [(1, {"loss": 3.0}), (2, {})]
    (tmp_path / "new").write_text('{"step": 1, "loss": 3.0}\n{"step": 2, "loss": 2.0}\n')
    os.replace(tmp_path / "new", path)
    assert [*curve.rows()] == [(1, {"loss": 3.0}), (2, {"loss": 2.0})]
    assert [*curve.rows()] == []


def test_results_are_the_numbers_of_nested_metrics() -> None:
    assert numbers_in({"policies": {"sft": {"mean": 0.5, "n": 3}}, "suite": "dev", "loss": float("nan")}) == {
        "policies/sft/mean": 0.5, "policies/sft/n": 3.0,
    }  # fmt: skip
