"""Hazards of making stages current, with real git, DVC and jobs."""

import errno
import hashlib
import json
import re
import shlex
import shutil
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import InProcessCommand
from dvc.repo import Repo
from running_lab import CLEAN, PROFILE, RANKS, Died, Lab, goes_on, outcomes, read, status
from waiting import deadline, until

from pedigree.configs.base.document import ConfigError
from pedigree.configs.base.problems import UsageProblem
from pedigree.data.artifacts import artifacts
from pedigree.data.artifacts.artifacts import PARTS
from pedigree.pipelines.cli.plan import needs_cells
from pedigree.pipelines.cli.running import run_what_is_due
from pedigree.pipelines.jobs import launcher
from pedigree.pipelines.jobs.context import StageFailed
from pedigree.pipelines.jobs.events import RunEnded, RunEvent, StageBusy, StageDue, StageEnded, StageProgressed, StageStarted
from pedigree.pipelines.jobs.preparation import InputsGone
from pedigree.pipelines.ledger import ledger, lock_files
from pedigree.pipelines.ledger.cache import Cache
from pedigree.pipelines.ledger.ledger import Ledger
from pedigree.pipelines.ledger.transfers import LedgerError, RemoteError, RemoteObjects
from pedigree.pipelines.run import ensure as ensure_module
from pedigree.pipelines.run import publication
from pedigree.pipelines.run.checks import checked_plan
from pedigree.pipelines.run.ensure import Result, ensure, identify, run_under_dvc
from pedigree.pipelines.run.exchange import pull, push
from pedigree.pipelines.run.opening import Request, compiled_request, open_run
from pedigree.pipelines.run.planning import rows_of, run_plan
from pedigree.pipelines.run.plans import plan, selection
from pedigree.pipelines.run.publication import log_file
from pedigree.pipelines.run.runs import NotRun, run_graph, settled, stage_under_dvc


@pytest.fixture(scope="module")
def built(template: Lab, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """A lab whose recipe has run; for tests that only look, or that leave it built."""
    return template.twin(tmp_path_factory.mktemp("built"))


def test_second_run_does_nothing_and_dvc_agrees(built: Lab) -> None:
    before = built.runs()
    assert set(outcomes(built).values()) == {"unchanged"}
    assert built.runs() == before
    assert status(built) == CLEAN
    ignored = built.shell("git status --short --untracked-files=all").stdout
    files = {"dvc.lock", "dvc.yaml", "params.yaml"}
    assert {line.removeprefix("?? artifacts/lab/") for line in ignored.splitlines() if "artifacts" in line} == files
    assert not (built.root / ".pedigree" / "scratch").exists() or not list((built.root / ".pedigree" / "scratch").iterdir())
    assert log_file(built.project, "lab/clean").exists()


def test_artifact_carries_run_evidence_and_lineage_without_machine(built: Lab) -> None:
    folder = built.root / "artifacts" / "lab" / "cleaner"
    assert json.loads((folder / "evidence" / "metrics.json").read_text()) == {"rows": 5}
    assert (folder / "evidence" / "curve.csv").read_text().splitlines() == ["step,rows", "1,5"]
    run = json.loads((folder / "run.json").read_text())
    assert [attempt["cause"] for attempt in run["attempts"]] == ["succeeded"]
    assert run["numerics"]["threads"] == 1 and "pydantic" in run["environment"]["libraries"]
    assert run["licences"] == run["generators"] == {} and all("patch" not in attempt["code"] for attempt in run["attempts"])
    lineage = json.loads((folder / "lineage.json").read_text())["artifacts"]
    assert sorted(entry["run"]["address"] for entry in lineage.values()) == ["lab/clean", "lab/raw", "lab/suite"]
    for part in ("record.json", "run.json", "lineage.json"):
        assert str(built.root) not in (folder / part).read_text() and str(built.code) not in (folder / part).read_text()


def test_numbers_with_an_exponent_stay_numbers_on_their_way_through_the_run_cache(lab: Lab) -> None:
    """DVC writes 1e-05, which is a text to whoever reads YAML 1.1: a stage would have other parameters than its recipe ever after."""
    lab.edit("configs/recipes/lab.yaml", "count: 5, seed: 2}]", "count: 5, seed: 2}]\n    filters: [{type: repetition, lines: 1e-5}]")
    assert set(outcomes(lab).values()) == {"ran"}
    shutil.rmtree(lab.root / "artifacts/lab/raw")
    (lab.root / "artifacts/lab/dvc.lock").unlink()
    assert set(outcomes(lab).values()) == {"restored"}
    assert set(outcomes(lab).values()) == {"unchanged"} and status(lab) == CLEAN


def test_a_stage_with_one_more_input_is_found_again_in_the_run_cache(finished: Lab) -> None:
    """DVC takes an input that the stage's entry in `dvc.lock` does not have yet for one of DVC 2."""
    lab = finished
    before, with_one_more = "in: {data: clean, benchmarks: [suite]}", "in: {data: clean, benchmarks: [suite, other]}"
    source = "{type: arithmetic, operations: [add], digits: [1], count: 3, seed: 9}"
    other = f"  other: {{kind: prepare_data, record: item, task: b, sources: [{source}]}}\n"
    lab.edit("configs/recipes/lab.yaml", "  suite:\n", f"{other}  suite:\n")
    lab.edit("configs/recipes/lab.yaml", before, with_one_more)
    assert outcomes(lab)["cleaner"] == "ran" and status(lab) == CLEAN
    lock = yaml.safe_load((lab.root / "artifacts/lab/dvc.lock").read_text())["stages"]["cleaner"]
    assert all(dep["hash"] == "md5" for dep in lock["deps"])
    for here, there in ((with_one_more, before), (before, with_one_more)):
        lab.edit("configs/recipes/lab.yaml", here, there)
        assert outcomes(lab)["cleaner"] == "restored" and status(lab) == CLEAN


def test_a_bug_met_by_one_stage_is_its_end_and_leaves_the_others_running(lab: Lab) -> None:
    """The bug is in whoever watches, which is told by each stage on its way; all below the stage is given up, all beside it goes on."""

    def broken(address: str, state: str, *_: Any, **__: Any) -> None:
        if address == "lab/raw" and state != "pending":  # which is said of all before any begins
            if state == "failed":
                (lab.root / "go").touch()
            else:
                until((lab.root / "go.waiting").exists)
            raise ZeroDivisionError("an answer to nothing")

    lab.knobs(suite={"hold": "go"})
    run = lab.run(watch=broken)
    ends = {end.address: end for end in run_graph(run)}
    failed = ends["lab/raw"]
    assert isinstance(failed, StageFailed) and failed.cause == "bug" and "ZeroDivisionError: an answer to nothing" in failed.message
    assert failed.log is not None and "in broken" in (lab.root / failed.log).read_text()
    assert isinstance(ends["lab/suite"], Result) and ends["lab/suite"].outcome == "ran"
    assert ends["lab/clean"] == NotRun("lab/clean", "lab/raw failed") and not run.cancelled.is_set()
    assert lab.runs() == ["suite"] and set(outcomes(lab).values()) == {"unchanged", "ran"}


def test_the_heartbeats_of_a_job_are_events_of_the_run_between_its_start_and_its_end(lab: Lab) -> None:
    """The job lasts until the listener has its heartbeat."""
    lab.knobs(raw={"hold": "go"})
    events: list[RunEvent] = []

    def listen(event: RunEvent) -> None:
        events.append(event)
        if event == StageProgressed("lab/raw", 0, 0, {}):
            (lab.root / "go").touch()

    run = lab.run()
    run.watch = listen
    with goes_on(lab):
        (end,) = run_graph(run, ["lab/raw"])
    kinds = [type(event) for event in events if getattr(event, "address", "lab/raw") == "lab/raw"]
    assert list(dict.fromkeys(kinds)) == [StageDue, StageBusy, StageStarted, StageProgressed, StageEnded, RunEnded]
    assert isinstance(end, Result) and events[-2:] == [StageEnded("lab/raw", "ran", seconds=end.seconds), RunEnded("completed")]


def test_deleted_artifacts_come_back_from_the_cache(built: Lab) -> None:
    before, runs = built.contents(), built.runs()
    for name in ("clean", "cleaner"):
        shutil.rmtree(built.root / "artifacts" / "lab" / name)
    assert outcomes(built) == {"suite": "unchanged", "raw": "unchanged", "clean": "restored", "cleaner": "restored"}
    assert built.contents() == before and built.runs() == runs and status(built) == CLEAN


def test_a_run_states_the_time_of_jobs_alone_as_its_plan_does(built: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    """Not of what the cache gives back."""
    run = built.run()
    chosen = frozenset(run.graph.nodes)
    stated = f"{run.graph.source}: less than a minute on this machine"
    shutil.rmtree(built.root / "artifacts" / "lab" / "cleaner")
    run_what_is_due(run, chosen, frozenset(), "never")
    assert stated not in capsys.readouterr().out
    run_what_is_due(built.run(), chosen, frozenset({"lab/cleaner"}), "never")
    assert stated in capsys.readouterr().out


def test_lost_lock_is_written_again_without_a_run(built: Lab) -> None:
    runs = built.runs()
    (built.root / "artifacts" / "lab" / "dvc.lock").unlink()
    assert set(outcomes(built).values()) == {"restored"}
    assert built.runs() == runs and status(built) == CLEAN


def test_deleted_cache_rebuilds_the_same_content(finished: Lab) -> None:
    before = finished.contents()
    shutil.rmtree(finished.root / ".dvc" / "cache")
    for name in ("clean", "cleaner"):
        shutil.rmtree(finished.root / "artifacts" / "lab" / name)
    assert outcomes(finished) == {"suite": "restored", "raw": "restored", "clean": "ran", "cleaner": "ran"}
    assert finished.contents() == before and status(finished) == CLEAN


def test_two_stages_never_add_to_the_cache_at_once(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """DVC tries a reflink first, which truncates the object of that name: equal files of two stages, e.g. the empty `lineage.json`
    of two sources that end together, would be lost in one commit while the other puts them into place."""
    adding, most, add = [0], [0], Cache.add

    def slow(*given: Any) -> None:
        adding[0] += 1
        most[0] = max(most[0], adding[0])
        time.sleep(0.05)  # time for another stage to come along
        add(*given)
        adding[0] -= 1

    monkeypatch.setattr(Cache, "add", slow)
    outcomes(lab)
    assert most == [1]


@pytest.mark.parametrize("part", ["payload/rows.jsonl", "evidence/metrics.json"])
def test_flipped_byte_in_the_cache_is_not_served(finished: Lab, part: str) -> None:
    folder = finished.root / "artifacts" / "lab" / "clean"
    before, good = finished.contents(), (folder / part).read_bytes()
    (damaged,) = [path for path in finished.root.glob(".dvc/cache/files/md5/??/*") if path.read_bytes() == good][:1]
    shared = part.startswith("payload")  # raw, clean and cleaner hold the same rows
    damaged.chmod(0o644)
    damaged.write_bytes(bytes([good[0] ^ 1]) + good[1:])
    damaged.chmod(0o444)
    shutil.rmtree(folder)
    assert outcomes(finished)["clean"] == "ran"
    assert (folder / part).read_bytes() == good and finished.contents() == before
    assert status(finished) == CLEAN
    assert not shared or damaged.read_bytes() == good


def test_a_model_that_the_cache_gives_back_needs_no_memory(lab: Lab) -> None:
    """Until the cache cannot: then its job is refused just before it would start."""
    lab.write("configs/recipes/lab.yaml", RANKS)
    assert set(outcomes(lab).values()) == {"ran"}
    lab.write("configs/execution/lab.yaml", PROFILE + "machine: {host_memory_gb: 0.25}\n")
    run = lab.run()
    chosen = frozenset(run.graph.nodes)
    with pytest.raises(ConfigError, match="stage sft: memory needs"):
        checked_plan(run, chosen, frozenset({"lab/sft"}))
    objects = {path.read_bytes(): path for path in lab.root.glob(".dvc/cache/files/md5/??/*") if path.is_file()}
    weights = lab.root / "artifacts/lab/sft/payload/model.safetensors"
    damaged, good = objects[weights.read_bytes()], weights.read_bytes()
    for name in ("base", "sft"):
        shutil.rmtree(lab.root / "artifacts/lab" / name)
    rows = {row.node.name: row for row in rows_of(run, plan(run))}
    assert (rows["base"].state, rows["sft"].state) == ("cached", "cached") and needs_cells(rows["sft"]) is None
    found = run_plan(run, list(rows.values()))
    assert found.fits and (found.time.seconds, found.time.gpu_hours, found.time.stages_of_unknown_time) == (0, 0, 0)
    assert len(settled(checked_plan(run, chosen, frozenset()))) < len(chosen)
    ends = outcomes(lab)
    assert (ends["base"], ends["sft"]) == ("restored", "restored")
    shutil.rmtree(lab.root / "artifacts/lab/sft")
    damaged.chmod(0o644)
    damaged.write_bytes(good[:-1] + b"?")
    damaged.chmod(0o444)
    run = lab.run()
    assert len(settled(checked_plan(run, chosen, frozenset()))) < len(chosen)
    (failed,) = [end for end in run_graph(run) if isinstance(end, StageFailed)]
    assert failed.address == "lab/sft" and "its cached result is unusable, and its job needs more memory" in failed.message


def test_changed_parameter_names_the_field_and_equal_content_stops_there(lab: Lab) -> None:
    lab.knobs(raw={"constant": True})
    outcomes(lab)
    lab.edit("configs/recipes/lab.yaml", "count: 5, seed: 2", "count: 6, seed: 2")
    run = lab.run()
    (reason,) = run.ledger.reasons(run.graph.nodes["lab/raw"])
    assert reason == "parameters changed: sources[0].count 5 -> 6"
    assert [(p.node.name, p.reasons) for p in plan(run)][2] == ("clean", ("waits for lab/raw",))
    assert outcomes(lab) == {"suite": "unchanged", "raw": "ran", "clean": "unchanged", "cleaner": "unchanged"}
    assert status(lab) == CLEAN


def test_changed_content_runs_what_is_below(finished: Lab) -> None:
    finished.edit("configs/recipes/lab.yaml", "count: 5", "count: 6")
    assert outcomes(finished) == {"suite": "unchanged", "raw": "ran", "clean": "ran", "cleaner": "ran"}
    finished.edit("configs/recipes/lab.yaml", "count: 6", "count: 5")
    assert outcomes(finished) == {"suite": "unchanged", "raw": "restored", "clean": "restored", "cleaner": "restored"}


def test_variant_runs_what_differs_and_shares_the_rest(built: Lab) -> None:
    run = built.run("cleaner.ngram=6")
    ends = run_graph(run)
    assert [(end.address.partition("/")[2], end.outcome) for end in ends if isinstance(end, Result)] == [
        ("suite", "unchanged"), ("raw", "unchanged"), ("clean", "unchanged"), ("cleaner", "ran"),
    ]  # fmt: skip
    assert run.graph.recipe.startswith("lab+") and status(built) == CLEAN
    under_dvc = open_run(built.project, compiled_request(built.project, run.graph.recipe))  # which finds the overrides again
    assert under_dvc.graph.nodes == run.graph.nodes


def test_forced_stage_runs_again_with_the_same_content(built: Lab) -> None:
    before, runs = built.contents(), len(built.runs())
    assert outcomes(built, forced=("clean",)) == {"suite": "unchanged", "raw": "unchanged", "clean": "ran", "cleaner": "unchanged"}
    assert built.contents() == before and len(built.runs()) == runs + 1 and status(built) == CLEAN


@pytest.mark.parametrize("lost", [False, True])
def test_entries_of_the_lock_that_are_not_true_are_written_again_without_a_run(
    finished: Lab, lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after an edit, a merge or the checkout of another branch; and what is written is to the byte what DVC writes."""
    path, runs = finished.root / "artifacts/lab/dvc.lock", finished.runs()
    before = path.read_bytes()
    lock = yaml.safe_load(before)
    stages = lock["stages"]
    if lost:
        del stages["clean"]
    else:
        stages["suite"]["cmd"] += " "
        stages["cleaner"]["params"]["params.yaml"]["cleaner"]["version"] += 1
        for wrong in (stages["raw"]["outs"][0], stages["clean"]["deps"][0]):
            wrong["md5"] = f"{'0' * 32}{'.dir' * wrong['md5'].endswith('.dir')}"
    path.write_text(yaml.safe_dump(lock, sort_keys=False))
    assert outcomes(finished) == {name: "unchanged" if lost and name != "clean" else "restored" for name in finished.contents()}
    assert finished.runs() == runs and status(finished) == CLEAN
    ours = path.read_bytes()
    assert yaml.safe_load(ours) == yaml.safe_load(before)
    monkeypatch.chdir(finished.root)  # as DVC requires
    with closing(Repo()) as repo:
        repo.commit(force=True)
    assert path.read_bytes() == ours


def test_dvc_repro_refuses_params_that_the_recipe_does_not_say(lab: Lab) -> None:
    lab.run()
    lab.edit("artifacts/lab/params.yaml", "count: 3", "count: 4")
    with pytest.raises(StageFailed, match=r"artifacts/lab/params\.yaml does not match the current recipe"):
        stage_under_dvc(lab.project, "lab/suite")


@pytest.mark.parametrize("overrides", [(), ("suite.task=sums",)])
def test_what_dvc_repro_suggests_for_an_edited_recipe_recompiles_it(lab: Lab, overrides: tuple[str, ...]) -> None:
    recipe = lab.run(*overrides).graph.recipe
    lab.edit("configs/recipes/lab.yaml", "count: 3, seed: 1", "count: 4, seed: 1")
    with pytest.raises(StageFailed, match=r"does not match the current recipe; recompile it with `pedigree .*`") as refused:
        stage_under_dvc(lab.project, f"{recipe}/suite")
    (remedy,) = re.findall("`pedigree (.*)`", refused.value.message)
    assert f"artifacts/{recipe}/params.yaml" in InProcessCommand(lab)(*shlex.split(remedy))
    assert yaml.safe_load((lab.root / f"artifacts/{recipe}/params.yaml").read_text())["suite"]["config"]["sources"][0]["count"] == 4


def test_dvc_repro_of_what_changes_while_it_waits_says_so(finished: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """DVC has asked about what was there before."""
    lab, real = finished, ensure_module.prepare
    run = lab.run()
    shutil.rmtree(lab.root / "artifacts/lab/clean")

    def replaced(*given: Any) -> None:
        real(*given)
        raise InputsGone("data raw")

    monkeypatch.setattr(ensure_module, "prepare", replaced)
    with pytest.raises(StageFailed, match="changed while it waited; run the command again") as failed:
        run_under_dvc(run, run.graph.find("clean"))
    assert failed.value.cause == "inputs_moved"
    monkeypatch.undo()
    assert outcomes(lab)["clean"] == "restored" and status(lab) == CLEAN


POINTS = ("publish set aside", "lock written", "restore checked out")
NIGHTLY_POINTS = ("job started", "record.json written", "publish renamed", "commit cached", "lock replaced")
"""By day, an exception ends a runner at each of these: in `test_a_job_runs_once_wherever_its_runner_dies`."""


@pytest.mark.parametrize("point", [*POINTS, *(pytest.param(point, marks=pytest.mark.nightly) for point in NIGHTLY_POINTS)])
def test_a_kill_at_any_point_of_making_a_stage_current_loses_nothing(finished: Lab, tmp_path: Path, point: str) -> None:
    """The first run is whole; the second, which must run or restore `cleaner` again, dies at the point; the third puts all right."""
    before, restoring = finished.contents(), point == "restore checked out"
    if restoring:
        shutil.rmtree(finished.root / "artifacts/lab/cleaner")
    else:
        finished.edit("configs/recipes/lab.yaml", "ngram: 5", "ngram: 6")
    faults = tmp_path / "faults"
    faults.mkdir()
    (faults / point).write_text("0")
    finished.forget_runs()
    finished.environment["PEDIGREE_FAULTS"] = str(faults)
    orchestrator = finished.orchestrator("run_graph(run)")
    assert orchestrator.wait(deadline(60)) == -9, orchestrator.communicate()[0]
    assert (faults / "died.log").read_text() == f"{point}\n"
    assert set(outcomes(finished).values()) <= {"unchanged", "restored", "ran", "attached"}
    assert status(finished) == CLEAN and not any(entry.reasons for entry in plan(finished.run()))
    assert finished.runs() == ([] if restoring else ["cleaner"])
    if not restoring:
        finished.edit("configs/recipes/lab.yaml", "ngram: 6", "ngram: 5")
        assert set(outcomes(finished).values()) <= {"unchanged", "restored"}
    assert finished.contents() == before


def test_a_job_runs_once_wherever_its_runner_dies(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """It dies at the first point that it comes by, the next one at the first new point, and so on, until nothing is left to do."""
    lab.processes = True  # the job comes by points of its own
    died: list[str] = []

    def dies(name: str) -> None:
        if name not in died:
            died.append(name)
            raise Died(name)

    for module in (artifacts, launcher, publication, ledger, lock_files):
        monkeypatch.setattr(module, "fault_point", dies)
    outcome = None
    while outcome is None:
        with suppress(Died):
            run = lab.run()
            outcome = ensure(run, run.graph.find("raw")).outcome
    own = [f"{name} written" for name in ("metrics.json", "run.json", "lineage.json", "record.json")]
    assert [name for name in died if name in own] == own
    assert {"spec.json written", "attempts.json written", "job started", "publish renamed", "commit cached", "lock replaced"} <= set(died)
    assert outcome == "unchanged" and lab.runs() == ["raw"]
    folder = lab.root / "artifacts/lab/raw"
    assert sorted(path.name for path in folder.iterdir()) == sorted(PARTS)
    assert sorted(path.name for path in (folder / "evidence").iterdir()) == ["curve.csv", "metrics.json"]


def test_recording_a_result_touches_none_of_its_files(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """DVC would remove them to put links there: who is killed or reads in between finds an artifact without a record."""
    real, before = Cache.add, dict[Path, tuple[int, int]]()

    def looks() -> dict[Path, tuple[int, int]]:
        files = (path for path in (lab.root / "artifacts/lab/raw").rglob("*") if path.is_file())
        return {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in files}

    def add(*given: Any) -> None:
        before.update(looks())
        real(*given)

    monkeypatch.setattr(Cache, "add", add)
    run = lab.run()
    assert ensure(run, run.graph.find("raw")).outcome == "ran"
    assert before and looks() == before
    for name in ("dvc.yaml", "dvc.lock"):  # as in a commit that has no such stage
        (lab.root / "artifacts/lab" / name).unlink()
    lab.shell("dvc checkout")
    assert looks() == {}


def test_an_output_that_git_tracks_is_not_recorded(finished: Lab) -> None:
    finished.shell("git add -f artifacts/lab/raw/payload")
    run = finished.run()
    with pytest.raises(StageFailed, match="git tracks artifacts/lab/raw/payload, which DVC stores: run `git rm -r --cached"):
        ensure(run, run.graph.find("raw"), force=True)
    finished.shell("git rm -q -r --cached artifacts/lab/raw/payload")
    assert ensure(run, run.graph.find("raw")).outcome == "restored" and status(finished) == CLEAN


def test_kill_between_the_renames_of_a_publication_loses_nothing(built: Lab) -> None:
    folder = built.root / "artifacts" / "lab" / "clean"
    aside = built.root / ".pedigree" / "aside" / "lab" / "clean"
    aside.parent.mkdir(parents=True, exist_ok=True)
    folder.rename(aside)
    runs = built.runs()
    assert set(outcomes(built).values()) <= {"unchanged", "restored"}
    assert folder.exists() and not aside.exists() and built.runs() == runs and status(built) == CLEAN


def test_edited_artifact_is_put_right(built: Lab) -> None:
    path = built.root / "artifacts" / "lab" / "clean" / "payload" / "rows.jsonl"
    good = path.read_bytes()
    path.chmod(0o644)
    path.write_bytes(good + b"{}\n")
    run = built.run()
    assert run.ledger.reasons(run.graph.find("clean")) == ["output payload changed"]
    assert run.ledger.reasons(run.graph.find("cleaner")) == ["input lab/clean changed"]
    assert outcomes(built)["clean"] == "restored" and path.read_bytes() == good and status(built) == CLEAN


def test_selection(built: Lab) -> None:
    run = built.run()

    def selected(**options: tuple[str, ...]) -> frozenset[str]:
        return selection(run, Request("lab", **options))[0]

    assert selected() == frozenset(run.graph.nodes)
    assert selected(until=("clean",)) == {"lab/raw", "lab/suite", "lab/clean"}
    assert selected(start=("clean",)) == {"lab/clean", "lab/cleaner"}
    assert selected(only=("raw",)) == {"lab/raw"}
    with pytest.raises(UsageProblem, match="nonsense"):
        selected(only=("nonsense",))


def test_selected_stage_without_its_input_says_so(lab: Lab) -> None:
    (end,) = run_graph(lab.run(), {"lab/clean"})
    assert isinstance(end, StageFailed) and "input lab/raw" in end.message and "artifacts/lab/raw holds no record.json" in end.message


def test_an_input_that_no_artifact_may_be_is_named_and_is_no_bug(lab: Lab) -> None:
    run = lab.run()
    assert ensure(run, run.graph.find("suite")).outcome == ensure(run, run.graph.find("raw")).outcome == "ran"
    (lab.root / "artifacts/lab/raw/payload/link").symlink_to("/etc/passwd")
    with pytest.raises(StageFailed, match=r"input lab/raw: .*link"):
        identify(run, run.graph.find("clean"), run.identities())


def test_malformed_dvc_file_elsewhere_is_named(lab: Lab) -> None:
    lab.run()
    lab.write("artifacts/lab/dvc.lock", "stages: [")
    run = lab.run()
    with pytest.raises(StageFailed, match=r"artifacts/lab/dvc\.lock cannot be read .*: restore it from git"):
        ensure(run, run.graph.find("raw"))


def test_remote_serves_a_fresh_clone(finished: Lab, tmp_path: Path) -> None:
    finished.configure_dvc(tmp_path / "remote")
    finished.shell("dvc push -q --run-cache")
    before, runs = finished.contents(), finished.runs()
    shutil.rmtree(finished.root / ".dvc" / "cache")
    for name in before:
        shutil.rmtree(finished.root / "artifacts" / "lab" / name)
    assert set(outcomes(finished).values()) == {"remote"} and finished.contents() == {}
    assert {end.outcome for end in pull(finished.run()) if isinstance(end, Result)} == {"restored"}
    assert finished.contents() == before and finished.runs() == runs and status(finished) == CLEAN


@pytest.fixture(scope="module")
def sent(template: Lab, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """A lab whose artifacts lie in the remote alone: those of two versions of its recipe, the second of which is recorded."""
    lab = template.twin(tmp_path_factory.mktemp("sent"))
    lab.configure_dvc(lab.root.parent / "remote")
    push(lab.run())
    lab.shell("cp artifacts/lab/dvc.lock before.lock")
    lab.edit("configs/recipes/lab.yaml", "ngram: 5", "ngram: 7")
    assert outcomes(lab)["cleaner"] == "ran"
    push(lab.run())
    lab.shell("rm -r .dvc/cache artifacts/lab/*/")
    return lab


@pytest.fixture
def away(sent: Lab, tmp_path: Path) -> Lab:
    """The same, for a test that changes something."""
    lab = sent.twin(tmp_path)
    shutil.copytree(sent.root.parent / "remote", tmp_path / "remote")
    lab.configure_dvc(tmp_path / "remote")
    return lab


def test_what_the_remote_has_under_another_key_is_not_up_to_date(away: Lab) -> None:
    assert set(outcomes(away).values()) == {"remote"}
    lock = away.root / "artifacts/lab/dvc.lock"
    before, now = (yaml.safe_load(path.read_text()) for path in (away.root / "before.lock", lock))
    now["stages"]["cleaner"]["outs"] = before["stages"]["cleaner"]["outs"]  # DVC takes it: command, parameters and inputs are those of now
    lock.write_text(yaml.safe_dump(now))
    (row,) = [row for row in plan(away.run()) if row.reasons]
    assert row.node.name == "cleaner" and "was made under key" in row.reasons[0]
    away.forget_runs()
    assert outcomes(away) == {"suite": "remote", "raw": "remote", "clean": "remote", "cleaner": "restored"}
    assert read(away, "cleaner", "record.json")["config"]["ngram"] == 7 and away.runs() == []


def test_a_remote_that_does_not_give_a_record_is_no_reason_to_make_anything_again(away: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EIO, "503 Slow Down")

    monkeypatch.setattr(RemoteObjects, "open", busy)
    (reason,) = plan(open_run(away.project, Request("lab"), looking=True), {"lab/suite"})[0].reasons
    assert re.match(r"cannot determine whether it is up to date: the remote 'store' .* 503 Slow Down", reason), reason
    run = away.run()
    monkeypatch.setattr(type(run.ledger.repository.repo.cloud), "transfer", busy)
    away.forget_runs()
    end = run_graph(run)[0]
    assert isinstance(end, StageFailed) and "503 Slow Down" in end.message and "--force suite" in end.message
    assert away.runs() == []


@pytest.mark.parametrize("bytes_there", [b"{}", b"["])
def test_a_damaged_record_of_the_remote_is_named(away: Lab, tmp_path: Path, bytes_there: bytes) -> None:
    remote = Ledger(away.project, looking=True).remote
    md5 = hashlib.md5(b"as it was", usedforsecurity=False).hexdigest()
    (tmp_path / "remote/files/md5" / md5[:2]).mkdir(exist_ok=True)
    (tmp_path / "remote/files/md5" / md5[:2] / md5[2:]).write_bytes(bytes_there)
    with pytest.raises(RemoteError, match=f"object {md5} of the remote 'store' does not match its hash"):
        remote.read(md5, 1000)
    assert remote.read("0" * 32, 1000) is None


def test_an_object_that_claims_to_be_a_record_and_is_huge_is_not_fetched(away: Lab, tmp_path: Path) -> None:
    large = b" " * (1 << 20)
    md5 = hashlib.md5(large, usedforsecurity=False).hexdigest()
    (tmp_path / "remote/files/md5" / md5[:2]).mkdir(exist_ok=True)
    (tmp_path / "remote/files/md5" / md5[:2] / md5[2:]).write_bytes(large)
    remote = Ledger(away.project, looking=True).remote
    with pytest.raises(RemoteError, match="is too large \(> 1000 bytes\)"):
        remote.read(md5, 1000)
    assert remote.read(md5, 1 << 20) == large and not (away.root / ".dvc/cache").exists()


def test_no_op_loads_no_heavy_library(built: Lab) -> None:
    code = "ends = run_graph(run)\nimport sys\n"
    code += "print([m for m in ('torch', 'transformers', 'vllm', 'deepspeed', 'prefect', 'great_expectations') if m in sys.modules])"
    process = built.orchestrator(code)
    assert process.communicate(timeout=deadline(60))[0] == "[]\n"


def test_what_is_settled_ends_at_the_first_stale_stage(built: Lab) -> None:
    run = built.run()
    assert [end.address for end in settled(plan(run, forced={"lab/clean"}))] == ["lab/suite", "lab/raw"]


def test_files_that_a_full_disk_left_empty_heal_and_nothing_runs_again(finished: Lab) -> None:
    """A crash while the disk was full: the ledger, what DVC reads, and an artifact's own records."""
    for name in ("dvc.lock", "dvc.yaml", "params.yaml", "clean/run.json", "raw/record.json", "cleaner/lineage.json"):
        path = finished.root / "artifacts/lab" / name
        path.unlink()  # it may be a link to the cache
        path.write_text("")
    finished.forget_runs()
    assert set(outcomes(finished)) == {"suite", "raw", "clean", "cleaner"} and finished.runs() == [] and status(finished) == CLEAN


@pytest.mark.parametrize("left", ["\0" * 64, "schema: '2.0'\nstages:\n  raw:\n    cmd: pedigree stage lab/raw\n    outs:\n    - pa"])
def test_a_damaged_lock_names_the_command_that_heals_it_and_nothing_runs_again(finished: Lab, left: str) -> None:
    path = finished.root / "artifacts/lab/dvc.lock"
    path.write_text(left)
    finished.forget_runs()
    with pytest.raises(LedgerError, match=r"`rm artifacts/lab/dvc\.lock`, and `pedigree run` rebuilds it"):
        plan(finished.run())
    finished.shell("rm artifacts/lab/dvc.lock")
    assert set(outcomes(finished)) == {"suite", "raw", "clean", "cleaner"} and finished.runs() == [] and status(finished) == CLEAN
