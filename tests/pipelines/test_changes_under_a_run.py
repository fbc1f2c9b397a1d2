"""Somebody edits, checks out, replaces or looks while a run works: what is recorded is what ran, and nothing is made from a mixture."""

import errno
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import InProcessCommand
from running_lab import CLEAN, Lab, outcomes, read, running_scratch, status
from sweeps import nightly_after
from waiting import InThread, deadline, until

from pedigree.configs.base.problems import PedigreeError
from pedigree.configs.language.compile import write_compiled
from pedigree.configs.language.execution import Numerics
from pedigree.configs.language.recipe import load_recipes
from pedigree.data.artifacts.artifacts import sha256_path
from pedigree.data.artifacts.provenance import code_files, code_sha256
from pedigree.pipelines.jobs import attempts, preparation
from pedigree.pipelines.jobs.code import snapshot
from pedigree.pipelines.jobs.context import RunContext, StageFailed
from pedigree.pipelines.jobs.events import StageStarted
from pedigree.pipelines.jobs.lease import lease
from pedigree.pipelines.jobs.preparation import prepare
from pedigree.pipelines.jobs.processes import kill_all
from pedigree.pipelines.jobs.scratch_state import read_spec
from pedigree.pipelines.jobs.slots import Pool, slots
from pedigree.pipelines.ledger import ledger as ledger_module
from pedigree.pipelines.lineage.verify import verify_project
from pedigree.pipelines.run import ensure as ensure_module
from pedigree.pipelines.run.ensure import Result, ensure, identify
from pedigree.pipelines.run.opening import Request, open_run
from pedigree.pipelines.run.plans import plan
from pedigree.pipelines.run.runs import run_graph
from pedigree.pipelines.tracking.tracked_stage import TrackedStage

RECIPE = "configs/recipes/lab.yaml"


@contextmanager
def working(lab: Lab, name: str, run: RunContext | None = None) -> Iterator[list[Any]]:
    """A run in the background, in the block at the moment when a stage's code has begun; the list gets its ends."""
    ends: list[Any] = []
    chosen = run or lab.run()
    thread = InThread(run_graph, chosen)
    try:
        until(lambda: running_scratch(lab, name) or (lab.root / "go.waiting").exists(), alive=thread.alive)
        yield ends
    finally:
        (lab.root / "go").touch()
        ends.extend(thread.join(90))


def made(ends: list[Any]) -> dict[str, str]:
    return {end.address.partition("/")[2]: end.outcome if isinstance(end, Result) else type(end).__name__ for end in ends}


def stale(lab: Lab) -> dict[str, tuple[str, ...]]:
    return {entry.node.name: entry.reasons for entry in plan(open_run(lab.project, Request("lab"), looking=True)) if entry.reasons}


def no_mixture(lab: Lab) -> None:
    """Every record's key is that of its own config and inputs, every input is the content of an ancestor in its lineage, and the
    ledger names no other parameters than the record."""
    from pedigree.pipelines.ledger.ledger import Ledger

    assert not verify_project(lab.project).problems
    for record in lab.root.glob("artifacts/lab/*/record.json"):
        name = record.parent.name
        entry: Any = Ledger(lab.project).locks.entry(f"lab/{name}")
        assert entry.params["params.yaml"][name]["config"] == json.loads(record.read_text())["config"]


def test_a_recipe_and_a_profile_edited_under_a_run_are_not_what_its_results_are_recorded_under(lab: Lab) -> None:
    """Neither of the stage that runs nor of one to come: `cleaner` was once made with the old value and recorded with the new one."""
    lab.knobs(raw={"hold": "go"})
    with working(lab, "raw") as ends:
        lab.edit(RECIPE, "count: 5", "count: 6")
        lab.edit(RECIPE, "ngram: 5", "ngram: 6")
        lab.edit("configs/execution/lab.yaml", "threads: 1", "threads: 2")
        write_compiled(lab.root, load_recipes(lab.project.recipes, "lab"))  # as `pedigree run` and `compile` do, and `plan` did
    assert set(made(ends).values()) == {"ran"}
    assert read(lab, "raw", "record.json")["metrics"] == {"rows": 5} and read(lab, "cleaner", "record.json")["config"]["ngram"] == 5
    assert {read(lab, name, "run.json")["numerics"]["threads"] for name in made(ends)} == {1}
    assert set(stale(lab)) == {"raw", "clean", "cleaner"} and "parameters changed: ngram 5 -> 6" in stale(lab)["cleaner"]
    assert "cleaner" in status(lab) and "changed" in status(lab)
    no_mixture(lab)
    assert outcomes(lab) == {"suite": "unchanged", "raw": "ran", "clean": "ran", "cleaner": "ran"}  # threads are no part of an identity
    assert read(lab, "cleaner", "record.json")["metrics"] == {"rows": 6} and read(lab, "cleaner", "record.json")["config"]["ngram"] == 6
    assert read(lab, "cleaner", "run.json")["numerics"]["threads"] == 2 and status(lab) == CLEAN
    no_mixture(lab)
    lab.edit(RECIPE, "ngram: 6", "ngram: 5")
    lab.edit(RECIPE, "count: 6", "count: 5")
    assert outcomes(lab)["cleaner"] == "restored"


@pytest.mark.nightly
def test_a_template_edited_under_a_run_is_not_what_its_results_are_recorded_under(lab: Lab) -> None:
    """The run is a process of the lab's code, whose template this is. The ledger named the edited one beside the other's result."""
    llama = "{type: random_llama, layers: 1, hidden: 8, heads: 2, kv_heads: 2, ffn: 8, vocabulary: 300, context: 64, seed: 1}"
    raw = "{kind: prepare_data, record: conversation, sources: [{type: arithmetic, operations: [add], digits: [1], count: 5, seed: 2}]}"
    lab.write(RECIPE, f"execution: lab\nstages:\n  raw: {raw}\n  model: {{kind: source_model, in: {{corpus: [raw]}}, source: {llama}}}\n")
    template = lab.code / "configs/templates/chatml.jinja"
    before = sha256_path(template)
    lab.knobs(model={"hold": "go"})
    orchestrator = lab.orchestrator("print(sorted(type(end).__name__ for end in run_graph(run)))")
    until((lab.root / "go.waiting").exists, alive=lambda: orchestrator.poll() is None)
    template.write_text(template.read_text() + "{# edited #}")
    (lab.root / "go").touch()
    said, _ = orchestrator.communicate(timeout=deadline(90))
    assert "StageFailed" not in said and read(lab, "model", "record.json")["config"]["chat_template_sha256"] == before, said
    no_mixture(lab)
    lab.orchestrator("run_graph(run)").communicate(timeout=deadline(90))
    assert read(lab, "model", "record.json")["config"]["chat_template_sha256"] == sha256_path(template)
    assert lab.runs() == ["raw", "model", "model"]


def test_two_runs_of_two_versions_of_a_recipe_side_by_side_mix_nothing(lab: Lab) -> None:
    lab.knobs(clean={"seconds": 1.0})
    first = lab.run()
    with working(lab, "clean", first) as ends:
        lab.edit(RECIPE, "count: 5", "count: 6")
        second = run_graph(lab.run())
    assert set(made(second).values()) <= {"unchanged", "ran"}
    for end in ends:
        assert isinstance(end, Result) or "another version of the recipe" in str(end) or "failed" in str(end)
    no_mixture(lab)
    assert set(outcomes(lab).values()) <= {"unchanged", "ran", "restored"}
    assert read(lab, "cleaner", "record.json")["metrics"] == {"rows": 6} and status(lab) == CLEAN


def test_what_dvc_takes_for_current_is_made_again_where_its_key_says_otherwise(lab: Lab) -> None:
    """A ledger that names the recipe's parameters beside an artifact of others, as an edit under an earlier version left it."""
    outcomes(lab)
    lab.edit(RECIPE, "ngram: 5", "ngram: 6")
    lab.run()
    lock = lab.root / "artifacts/lab/dvc.lock"
    lock.write_text(lock.read_text().replace("ngram: 5", "ngram: 6"))
    assert status(lab) == CLEAN  # all that DVC can see
    (problem,) = verify_project(lab.project, remote=False).problems
    assert problem.file == "artifacts/lab/dvc.lock" and "different parameters for cleaner" in problem.what
    assert list(stale(lab)) == ["cleaner"] and "was made under key" in stale(lab)["cleaner"][0]
    assert outcomes(lab)["cleaner"] == "ran" and read(lab, "cleaner", "record.json")["config"]["ngram"] == 6
    assert stale(lab) == {} and status(lab) == CLEAN


def test_an_input_that_is_replaced_and_put_back_reaches_no_job(lab: Lab) -> None:
    """The job reads late; what lies in the place of its input by then is another artifact, and afterwards the old one again."""
    lab.knobs(clean={"hold": "go"})
    raw = lab.root / "artifacts/lab/raw"
    with working(lab, "clean") as ends:
        raw.rename(lab.root / "away")
        shutil.copytree(lab.root / "away", raw)
        (raw / "payload/rows.jsonl").chmod(0o644)
        (raw / "payload/rows.jsonl").write_text('{"n": 666}\n')
        (lab.root / "go").touch()
        until(lambda: lab.runs().count("clean") == 1)
        shutil.rmtree(raw)
        (lab.root / "away").rename(raw)
    assert set(made(ends).values()) == {"ran"}
    assert "666" not in (lab.root / "artifacts/lab/clean/payload/rows.jsonl").read_text()
    no_mixture(lab)


def test_an_input_that_is_written_to_in_place_is_noticed_also_where_the_old_bytes_are_put_back(lab: Lab) -> None:
    lab.knobs(clean={"hold": "go"})
    rows = lab.root / "artifacts/lab/raw/payload/rows.jsonl"
    with working(lab, "clean") as ends:
        good = rows.read_bytes()
        rows.chmod(0o644)
        rows.write_bytes(good.replace(b"0", b"7"))  # the same file, to which the job holds a link
        (lab.root / "go").touch()
        until(lambda: lab.runs().count("clean") == 1)
        rows.write_bytes(good)
    assert made(ends)["clean"] == "StageFailed" and "was modified or removed during the run" in str(ends[2])
    assert not (lab.root / "artifacts/lab/clean").exists()
    scratch = next(path.parent for path in lab.root.glob(".pedigree/scratch/*/inputs.json"))
    (scratch / "checkpoints/step-9").mkdir(parents=True)
    assert outcomes(lab)["clean"] == "StageFailed"  # what an attempt goes on from may hold what was there in between
    assert outcomes(lab, forced=("clean",))["clean"] == "ran"


def test_an_artifact_that_is_removed_under_a_job_does_not_end_it(lab: Lab) -> None:
    lab.knobs(clean={"hold": "go"})
    with working(lab, "clean") as ends:
        shutil.rmtree(lab.root / "artifacts/lab/raw")
    assert made(ends)["clean"] == "ran"
    assert set(outcomes(lab).values()) <= {"unchanged", "restored", "ran"} and status(lab) == CLEAN
    no_mixture(lab)


FILE_RECIPE = """
execution: lab
stages:
  raw: {kind: prepare_data, record: conversation, sources: [{type: files, path: rows.jsonl}]}
  suite: {kind: prepare_data, record: item, task: a, sources: [{type: arithmetic, operations: [add], digits: [1], count: 3, seed: 1}]}
"""


def file_lab(lab: Lab) -> None:
    """`raw` is the text of a project file, read late."""
    code = lab.code / "stages/prepare_data/run.py"
    text = code.read_text()
    body = text[text.index("def run(config, inputs, job):") :]
    late = """def run(config, inputs, job):
    hold(job)
    texts = [path.read_text() for path in job.source_files.values()]
    return work(job, [{"text": text} for text in texts] or [{"n": 1}])
"""
    code.write_text(text.replace(body, late))
    lab.write("rows.jsonl", "one\n")
    lab.write(RECIPE, FILE_RECIPE)


def test_a_source_file_that_is_edited_under_a_job_is_read_as_it_was(lab: Lab) -> None:
    file_lab(lab)
    lab.knobs(raw={"hold": "go"})
    with working(lab, "raw") as ends:
        lab.write("rows.jsonl", "two\n")
    assert made(ends)["raw"] == "ran"
    assert json.loads((lab.root / "artifacts/lab/raw/payload/rows.jsonl").read_text()) == {"text": "one\n"}
    assert list(stale(lab)) == ["raw"]
    no_mixture(lab)
    assert outcomes(lab)["raw"] == "ran"
    record = read(lab, "raw", "record.json")
    assert record["source_files"] == {"rows.jsonl": sha256_path(lab.root / "rows.jsonl")}


def test_a_source_file_that_is_saved_while_its_job_is_prepared_does_not_stay_with_it(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was copied is not what the key names, and nobody is at fault: the edit is made, and later taken back."""
    file_lab(lab)
    give = preparation._give_file  # pyright: ignore[reportPrivateUsage]

    def saved_just_before(source: Path, target: Path) -> None:
        monkeypatch.setattr(preparation, "_give_file", give)
        source.write_text("two\n")
        give(source, target)

    monkeypatch.setattr(preparation, "_give_file", saved_just_before)
    for text in ("two\n", "one\n"):
        lab.write("rows.jsonl", text if lab.runs() else "one\n")
        assert outcomes(lab)["raw"] == "ran"
        assert json.loads((lab.root / "artifacts/lab/raw/payload/rows.jsonl").read_text()) == {"text": text}
    no_mixture(lab)


def edited_while_it_waits(lab: Lab, waiting_for: AbstractContextManager[Any], text: str) -> list[Any]:
    """Ends of a run whose `raw` waits for what somebody else holds, and whose source file is edited meanwhile."""
    with ExitStack() as held:
        held.enter_context(waiting_for)

        def watch(address: str, state: str, *_: Any, **__: Any) -> None:
            if address == "lab/raw" and state == "waiting":
                lab.write("rows.jsonl", text)
                held.close()

        return run_graph(lab.run(watch=watch))


def text_of_raw(lab: Lab) -> str:
    return json.loads((lab.root / "artifacts/lab/raw/payload/rows.jsonl").read_text())["text"]


def test_a_source_file_that_is_edited_while_its_stage_waits_for_its_lease(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """A finished job of the file as it was before the wait is not taken for one of now."""
    file_lab(lab)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "no room to publish")

    with monkeypatch.context() as patch:
        patch.setattr(ensure_module, "_publish", full)
        assert outcomes(lab)["raw"] == "StageFailed"
    ends = edited_while_it_waits(lab, lease(lab.project.lease("lab--raw"), "somebody"), "two\n")
    assert made(ends)["raw"] == "ran" and text_of_raw(lab) == "two\n"
    no_mixture(lab)


def test_a_source_file_that_is_edited_while_its_stage_waits_for_slots(lab: Lab) -> None:
    """Nothing is prepared for the file as it was before the wait."""
    file_lab(lab)
    others = slots(Pool.of(Numerics(), 2), 2, job=lab.root / "other" / "job.json")
    ends = edited_while_it_waits(lab, others, "two\n")
    assert made(ends)["raw"] == "ran" and text_of_raw(lab) == "two\n"
    assert not list(lab.root.glob(".pedigree/scratch/*"))
    no_mixture(lab)


def test_a_source_file_that_is_edited_once_its_job_has_been_given_it(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between that and the note of what the job's result will be recorded under: it would be recorded under what it was not made from."""
    file_lab(lab)
    give = preparation._give_inputs  # pyright: ignore[reportPrivateUsage]

    def saved_just_after(run: RunContext, node: Any, need: Any, scratch: Path) -> Any:
        given = give(run, node, need, scratch)
        if need.source_files:
            monkeypatch.setattr(preparation, "_give_inputs", give)
            lab.write("rows.jsonl", "two\n")
        return given

    monkeypatch.setattr(preparation, "_give_inputs", saved_just_after)
    assert outcomes(lab)["raw"] == "ran" and text_of_raw(lab) == "two\n" and not stale(lab)
    no_mixture(lab)


def test_a_source_file_that_is_edited_while_an_artifact_in_place_is_hashed_for_the_ledger(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock file was lost, and the artifact would be recorded under the edited file."""
    file_lab(lab)
    outcomes(lab)
    (lab.root / "artifacts/lab/dvc.lock").unlink()
    shutil.rmtree(lab.root / ".dvc/cache")
    survey = ledger_module.survey

    def saved_meanwhile(*given: Any, **more: Any) -> Any:
        monkeypatch.setattr(ledger_module, "survey", survey)
        lab.write("rows.jsonl", "two\n")
        return survey(*given, **more)

    monkeypatch.setattr(ledger_module, "survey", saved_meanwhile)
    assert outcomes(lab, forced=("suite",))["raw"] == "ran" and text_of_raw(lab) == "two\n" and not stale(lab)
    no_mixture(lab)


def test_commands_that_look_write_nothing(lab: Lab) -> None:
    def files() -> dict[str, tuple[int, bytes]]:
        found = [path for path in lab.root.rglob("*") if path.is_file() and not path.is_relative_to(lab.root / ".dvc")]
        return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in found if ".git/" not in str(path)}

    outcomes(lab)
    lab.edit(RECIPE, "ngram: 5", "ngram: 6")
    before = files()
    looks = ("plan lab", "plan lab --set cleaner.ngram=7", "status lab", "lineage lab/cleaner", "diff lab/clean lab/cleaner", "jobs")
    typed = InProcessCommand(lab)
    for command in looks:
        typed(*command.split(), code=int(command.startswith("diff")))
        assert files() == before, command
    typed("report", "lab")
    assert files().keys() - before.keys() == {str(lab.root / "artifacts/lab/report.html")} and before.items() <= files().items()


# --- work that goes on under another address ----------------------------------------------------------------------------


@contextmanager
def left_behind(lab: Lab, *overrides: str) -> Iterator[Path]:
    """A job of `clean` whose runner is gone; the job ends when the block does, or when there is a file `go`."""
    path = lab.code / "stages/decontaminate/run.py"
    path.write_text(path.read_text().replace("get(job.address, {})", "get(job.address.partition('/')[2], {})"))
    lab.write("knobs.json", json.dumps({"clean": {"hold": "go"}}))
    runner = lab.run(*overrides)
    runner.keep_jobs = True
    thread = InThread(run_graph, runner)
    try:
        until((lab.root / "go.waiting").exists, alive=thread.alive)
        runner.cancelled.set()
        thread.join()
        (scratch,) = [spec.parent for spec in lab.root.glob(".pedigree/scratch/*/spec.json") if '/clean"' in spec.read_text()]
        yield scratch
    finally:
        (lab.root / "go").touch()


def let_end(lab: Lab, scratch: Path) -> None:
    """Let the job that was left behind end."""
    (lab.root / "go").touch()
    until(lambda: (scratch / "done.json").exists() and attempts.working(lab.launcher, scratch) is None)


def clean_ran_once(lab: Lab) -> bool:
    return [line.partition("/")[2] for line in (lab.root / "runs.log").read_text().split()].count("clean") == 1


@pytest.mark.parametrize("ended", [False, True], ids=["running", "ended"])
def test_work_of_a_variant_is_taken_when_the_recipe_becomes_what_the_variant_was(lab: Lab, ended: bool) -> None:
    six = "raw.sources=[{type: arithmetic, operations: [add], digits: [1], count: 6, seed: 2}]"
    with left_behind(lab, six) as scratch:
        if ended:
            let_end(lab, scratch)
        lab.edit(RECIPE, "count: 5", "count: 6")
        with working(lab, "clean") as ends:
            if not ended:
                until(lambda: json.loads((scratch / "spec.json").read_text())["address"] == "lab/clean")  # as `jobs` and `cancel` see it
    assert made(ends)["clean"] == "attached" and clean_ran_once(lab)
    assert read(lab, "clean", "run.json")["address"] == "lab/clean" and not stale(lab)
    no_mixture(lab)


def test_work_of_a_recipe_that_was_renamed_is_recorded_under_its_new_name(lab: Lab) -> None:
    with left_behind(lab):
        (lab.root / RECIPE).rename(lab.root / "configs/recipes/lab2.yaml")
        (lab.root / "go").touch()
        run = open_run(lab.project, Request("lab2"))
        run.code_root, run.launcher = lab.code, lab.launcher
        ends = run_graph(run)
    assert made(ends)["clean"] == "attached" and clean_ran_once(lab)
    artifact = lab.root / "artifacts/lab2"
    assert json.loads((artifact / "clean/run.json").read_text())["address"] == "lab2/clean"
    deps = [dep["path"] for dep in yaml.safe_load((artifact / "dvc.lock").read_text())["stages"]["clean"]["deps"]]
    assert deps and not [path for path in deps if "lab/" in path] and not verify_project(lab.project).problems


# --- code --------------------------------------------------------------------------------------------------------------

STAGE = "stages/decontaminate/run.py"


def other_code(lab: Lab) -> None:
    """The stage's code as somebody edits it: it would write rows that are wrong."""
    path = lab.code / STAGE
    path.write_text(path.read_text().replace('load(only(inputs, "data"))', '[{"edited": True}]'))


def test_an_edit_reaches_no_job_that_has_been_submitted(lab: Lab) -> None:
    lab.knobs(clean={"hold": "go"})
    run_graph(lab.run(), ["lab/suite", "lab/raw"])
    lab.processes = True
    run = lab.run()
    with working(lab, "clean", run):
        files = {name: path.read_bytes() for name, path in code_files(lab.code).items()}
        scratch = next(path.parent for path in lab.root.glob(".pedigree/scratch/*/inputs.json"))
        kill_all(scratch)  # its next attempt imports everything anew
        other_code(lab)
    assert "edited" not in (lab.root / "artifacts/lab/clean/payload/rows.jsonl").read_text()
    recorded = read(lab, "clean", "run.json")
    assert [attempt["cause"] for attempt in recorded["attempts"]] == ["crashed", "succeeded"]
    snapshots = {attempt["code"]["snapshot"] for attempt in recorded["attempts"]}
    (kept,) = [lab.project.code(sha256) for sha256 in snapshots]
    assert {name: path.read_bytes() for name, path in code_files(kept).items()} == files
    then = recorded["fingerprint"]["files"][STAGE]
    assert then != read(lab, "cleaner", "run.json")["fingerprint"]["files"][STAGE], "the stage below began with the edited code"


@pytest.fixture(scope="module")
def interrupted_once(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    lab = Lab(tmp_path_factory.mktemp("interrupted"))
    lab.knobs(clean={"seconds": 0.3, "errors": [5, 5]})
    assert outcomes(lab)["clean"] == "StageFailed"
    lab.knobs()
    other_code(lab)
    (scratch_of_clean(lab) / "checkpoints/step-7").mkdir(parents=True)
    return lab


@pytest.fixture
def interrupted(interrupted_once: Lab, tmp_path: Path) -> Lab:
    """A lab whose `clean` has a checkpoint and no job, and whose code was edited since."""
    return interrupted_once.twin(tmp_path)


def scratch_of_clean(lab: Lab) -> Path:
    return next(path.parent for path in lab.root.glob(".pedigree/scratch/*/inputs.json"))


@pytest.mark.parametrize("choice", ["keep", "take", "rerun"])
def test_an_interrupted_stage_whose_code_has_changed(interrupted: Lab, choice: Any) -> None:
    run, followed = interrupted.run(), [TrackedStage.read(scratch_of_clean(interrupted)).id]
    run.on_code_change = choice
    run.watch = lambda event: followed.append(TrackedStage.read(event.folder).id) if isinstance(event, StageStarted) else None
    ends = run_graph(run)
    assert made(ends)["clean"] == "ran"
    assert (followed[0] == followed[1]) == (choice != "rerun")  # trackers drop the steps that they have
    rows, record = (interrupted.root / "artifacts/lab/clean/payload/rows.jsonl").read_text(), read(interrupted, "clean", "record.json")
    made_by = read(interrupted, "clean", "run.json")["attempts"]
    assert ("edited" in rows) == (choice != "keep")
    assert record["marks"] == ([f"code changed at step 7: {STAGE}"] if choice == "take" else [])
    assert (f"lab/clean: code changed at step 7: {STAGE}" in run.ledger.notices) == (choice == "take")  # and is told at once
    assert (made_by[-1]["resumed_from"] == "step-7") == (choice != "rerun")
    assert (made_by[-1]["code"]["snapshot"] == made_by[0]["code"]["snapshot"]) == (choice == "keep")
    said = [notice for notice in run.ledger.notices if "the working tree has changed since" in notice]
    assert bool(said) == (choice == "keep") and all(STAGE in notice and "--on-code-change take" in notice for notice in said)


@pytest.mark.parametrize("choice", nightly_after(1, ["keep", "take", "rerun"]))
def test_answers_that_were_kept_are_told_as_what_they_are(interrupted: Lab, choice: Any) -> None:
    scratch = scratch_of_clean(interrupted)
    shutil.rmtree(scratch / "checkpoints")
    log = scratch / "chunks" / "answers.jsonl"
    log.parent.mkdir()
    log.write_text('["0123", {}]\n')
    run = interrupted.run()
    run.on_code_change = choice
    prepare(run, node := run.graph.find("clean"), identify(run, node, run.identities()), *run.execution.of(node.kind, node.name))
    assert read_spec(scratch).marks == ((f"code changed at kept answers: {STAGE}",) if choice == "take" else ())
    assert any("lab/clean resumes from kept answers with its original code" in notice for notice in run.ledger.notices) == (
        choice == "keep"
    )
    assert log.exists() == (choice != "rerun"), "what begins again goes on from nothing"


def test_a_log_that_holds_nothing_leaves_the_code_of_now(interrupted: Lab) -> None:
    """The engine had failed at its start, by a bug that was repaired then."""
    scratch = scratch_of_clean(interrupted)
    shutil.rmtree(scratch / "checkpoints")
    (scratch / "chunks").mkdir()
    (scratch / "chunks/answers.jsonl").touch()
    run = interrupted.run()
    assert made(run_graph(run))["clean"] == "ran" and not run.ledger.notices
    assert "edited" in (interrupted.root / "artifacts/lab/clean/payload/rows.jsonl").read_text()


@pytest.mark.parametrize("choice", ["keep", "rerun"])
def test_a_result_that_nobody_took_before_the_code_was_edited(lab: Lab, choice: Any) -> None:
    with left_behind(lab) as scratch:
        let_end(lab, scratch)
    other_code(lab)
    run = lab.run()
    run.on_code_change = choice
    assert made(run_graph(run))["clean"] == ("attached" if choice == "keep" else "ran")
    causes = [attempt.get("cause") for attempt in read(lab, "clean", "run.json")["attempts"]]
    assert causes[-1] == "succeeded" and (choice == "rerun" or len(causes) == 1)
    assert ("edited" in (lab.root / "artifacts/lab/clean/payload/rows.jsonl").read_text()) == (choice == "rerun")


def test_a_comment_changes_no_code(interrupted: Lab) -> None:
    path = interrupted.code / STAGE
    path.write_text(path.read_text().replace('[{"edited": True}])', 'load(only(inputs, "data")))  # as it was'))
    run = interrupted.run()
    assert made(run_graph(run))["clean"] == "ran" and not run.ledger.notices


def test_a_snapshot_that_is_gone_is_named_before_work_is_lost(interrupted: Lab) -> None:
    shutil.rmtree(interrupted.root / ".pedigree/code")
    run = interrupted.run()
    clean = run.graph.find("clean")
    with pytest.raises(StageFailed, match="has been deleted: resume with the current code with --on-code-change take"):
        ensure(run, clean)
    run.on_code_change = "take"
    assert ensure(run, clean).outcome == "ran"


def test_a_job_refuses_a_snapshot_that_was_changed(lab: Lab) -> None:
    lab.processes = True
    taken = snapshot(lab.project, lab.code)
    path = taken.folder / "pedigree" / STAGE
    path.chmod(0o644)
    path.write_text(path.read_text() + "\nX = 1\n")
    (end,) = run_graph(lab.run(), ["lab/suite"])
    assert isinstance(end, StageFailed) and "the running code differs from the job's snapshot" in end.message


def test_snapshots_are_shared_and_whole_or_absent(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = snapshot(lab.project, lab.code), snapshot(lab.project, lab.code)
    assert one == other and code_sha256(code_files(one.folder)) == one.sha256 and len(list(lab.root.glob(".pedigree/code/*"))) == 1
    run_graph(lab.run(), ["lab/raw"])
    assert read(lab, "raw", "run.json")["attempts"][0]["code"]["snapshot"] == one.sha256
    assert len(list(lab.root.glob(".pedigree/code/*"))) == 1
    from pedigree.pipelines.jobs import code as snapshots

    counter = iter(range(1000))

    def busy(root: Path) -> dict[str, Path]:
        (lab.code / STAGE).write_text(f"X = {next(counter)}\n")
        return code_files(root)

    monkeypatch.setattr(snapshots, "code_files", busy)
    with pytest.raises(PedigreeError, match="changed 20 times while being copied"):
        snapshot(lab.project, lab.code)


def test_snapshots_go_with_gc_unless_an_unfinished_job_began_with_them(interrupted: Lab) -> None:
    (kept,) = interrupted.root.glob(".pedigree/code/*")
    snapshot(interrupted.project, interrupted.code)  # of the edited code, for nobody
    assert "1 code snapshot" in InProcessCommand(interrupted)("gc")
    InProcessCommand(interrupted)("gc", "--yes")
    assert list(interrupted.root.glob(".pedigree/code/*")) == [kept]
    assert outcomes(interrupted)["clean"] == "ran"
    InProcessCommand(interrupted)("gc", "--yes")
    assert list(interrupted.root.glob(".pedigree/code/*")) == []


def test_jobs_share_a_folder_of_tokens_and_gc_deletes_what_no_unfinished_one_reads(interrupted: Lab) -> None:
    (scratch,) = [path.parent for path in interrupted.root.glob(".pedigree/scratch/*/checkpoints")]
    assert (scratch / json.loads((scratch / "spec.json").read_text())["tokens"]).resolve() == interrupted.project.tokens
    interrupted.project.tokens.mkdir()
    for name in ("read.tokens", "unread.tokens", ".half.unfinished"):
        (interrupted.project.tokens / name).write_bytes(b"x")
    (scratch / "tokens.json").write_text('{"file": "read.tokens"}')
    assert "2 tokenized files, 2 bytes" in InProcessCommand(interrupted)("gc")
    InProcessCommand(interrupted)("gc", "--yes")
    assert [path.name for path in interrupted.project.tokens.iterdir()] == ["read.tokens"]


def test_machine_and_environment_are_those_of_the_job(lab: Lab) -> None:
    """The job sees one core and another lock; the orchestrator has all cores and its own."""
    lab.processes = True
    path = lab.code / "stages/prepare_data/run.py"
    path.write_text(path.read_text() + "\n\nos.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n")
    (lab.code / "requirements").mkdir()
    (lab.code / "requirements/cpu.txt").write_text("torch==0\n")
    run_graph(lab.run(), ["lab/raw"])
    recorded = read(lab, "raw", "run.json")
    assert recorded["hardware"]["cores"] == 1 and len(os.sched_getaffinity(0)) > 1
    assert recorded["environment"]["locks"] == {"cpu.txt": sha256_path(lab.code / "requirements/cpu.txt")}
