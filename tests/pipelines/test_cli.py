"""The command as a user types it, in a small project; in processes of its own where it is interrupted or ended from elsewhere."""

import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
from contextlib import suppress

import pytest
from commands import InProcessCommand, step_of
from running_lab import Lab
from typer.main import get_command
from typer.testing import CliRunner
from waiting import deadline, until

from pedigree.pipelines.cli.main import GROUPS, app
from pedigree.pipelines.jobs.processes import catches


@pytest.fixture(scope="module")
def shared(template: Lab, tmp_path_factory) -> InProcessCommand:
    """A lab whose recipe has been run once."""
    command = InProcessCommand(template.twin(tmp_path_factory.mktemp("cli")))
    command("report", "lab")
    return command


@pytest.fixture
def fresh(tmp_path) -> InProcessCommand:
    return InProcessCommand(Lab(tmp_path))


@pytest.fixture
def done(finished: Lab) -> InProcessCommand:
    """The same, when its recipe has run."""
    return InProcessCommand(finished)


@pytest.fixture
def due(done: InProcessCommand) -> InProcessCommand:
    """The same, when its last two stages must run again."""
    done.lab.edit("configs/recipes/lab.yaml", "in: {data: raw, benchmarks: [suite]}", "in: {data: raw, benchmarks: [suite]}\n    ngram: 9")
    done.lab.forget_runs()
    return done


def test_what_a_job_notes_is_told_at_the_end_of_the_run_and_only_then(fresh):
    fresh.lab.knobs(raw={"note": "75 of 300 rows were dropped (longer than max_length 8)"})
    _, said = fresh.said("run", "lab", "--only", "raw")
    assert said.splitlines()[-1] == "note: lab/raw: 75 of 300 rows were dropped (longer than max_length 8)"
    _, said = fresh.said("run", "lab", "--only", "raw")
    assert "note:" not in said


# --- help and errors ---------------------------------------------------------------------------------------------------


def test_the_help_has_a_section_for_every_command():
    commands = get_command(app).commands  # pyright: ignore[reportAttributeAccessIssue]
    assert sorted(name for names in GROUPS.values() for name in names) == sorted(n for n, command in commands.items() if not command.hidden)
    assert commands["stage"].hidden  # the command of dvc.yaml
    shown = CliRunner().invoke(app, ["--help"], terminal_width=80).stdout.split("Start:")[1]
    assert "..." not in shown  # a line that is cut


def test_all_problems_of_a_recipe_come_at_once_with_their_lines(shared):
    shared.lab.write(
        "configs/recipes/bad.yaml", "description: bad\nstages:\n  a: {kind: nonsense}\n  b: {kind: pair, in: {judgments: c}}\n"
    )
    text = shared("plan", "bad", code=2)
    assert re.search(r"bad.yaml:3: .*nonsense", text) and re.search(r"bad.yaml:4: .*'c'", text)
    listed = shared("recipes")
    assert "Four tiny stages" in listed and re.search(r"bad .*invalid: bad.yaml:3.*1 more", listed)
    (shared.lab.root / "configs/recipes/bad.yaml").unlink()


def test_a_stage_that_does_not_exist_is_named_with_those_that_do(shared):
    assert "has no stage 'sft': it has suite, raw, clean, cleaner" in shared("run", "lab", "--only", "sft", code=2)
    assert "did you mean clean?" in shared("run", "lab", "--only", "claen", code=2)
    wrong = shared("run", "lab", "--prefect", "maybe", code=2)
    assert "'maybe' is not one of 'auto', 'always', 'never'" in wrong and "Value error" not in wrong
    assert "--force names lab/clean, which" in shared("run", "lab", "--only", "raw", "--force", "clean", code=2)


# --- running -----------------------------------------------------------------------------------------------------------


def test_nothing_to_do_is_said_at_once_and_loads_neither_prefect_nor_an_engine(shared):
    script = (
        "import sys; sys.argv[1:] = ['run', 'lab']\n"
        "from pedigree.pipelines.cli.main import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print(sorted({'prefect', 'torch', 'transformers', 'vllm', 'great_expectations', 'jinja2', 'pyarrow'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=shared.lab.root, env=shared.environment, capture_output=True, text=True, check=True
    )
    assert "4 stages up to date, nothing to do" in done.stdout and "report: artifacts/lab/report.html" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_failed_stage_ends_with_one_line_why_and_the_rest_finishes(fresh):
    fresh.lab.knobs(raw={"fail": "these rows are bad: use others"})
    text = fresh("run", "lab", code=1)
    assert re.search(r"lab/raw failed \(refused\): these rows are bad: use others; its log is \.pedigree/", text)
    assert "1 of 4 stages are up to date" in text and "✓ suite" in text and "– cleaner" in text
    assert "these rows are bad" in fresh("logs", "raw")
    fresh.lab.knobs()
    assert "up to date" in fresh("run", "lab", "--until", "clean")
    assert "Four" not in fresh("status", "lab") and "not built" in fresh("status", "lab")


def test_ctrl_c_ends_the_jobs_and_the_same_command_goes_on(due):
    due.lab.knobs(clean={"seconds": 60})
    process = due.until("run", "lab", ready=lambda: step_of(due.lab, "clean") > 5)
    assert due.jobs()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=deadline(30))
    assert process.returncode == 130 and "Run the same command again to resume" in out and "Traceback" not in err
    assert not due.jobs()
    due.lab.knobs()
    for command in ("status", "plan"):
        assert due(command, "lab").count("its job is unfinished") == 1
    due("run", "lab")
    assert "unfinished" not in due("plan", "lab")
    assert due.lab.runs() == ["clean", "clean"]  # to the same content, so that nothing follows


def test_jobs_that_were_kept_go_on_and_the_next_run_re_attaches(due):
    due.lab.knobs(clean={"hold": "go"})
    process = due.until("run", "lab", "--keep-jobs", ready=(due.lab.root / "go.waiting").exists)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=deadline(30))
    assert process.returncode == 130 and "the same command re-attaches" in out
    assert len(due.jobs()) == 1 and "no command; `pedigree run lab` takes over" in due("jobs")
    (due.lab.root / "go").touch()
    assert "job of an earlier run" in due("run", "lab") and due.lab.runs() == ["clean"]
    assert due("jobs") == "no job is running\n"


def test_cancel_ends_a_job_for_good_and_that_of_a_recipe_the_run_too(due):
    due.lab.knobs(clean={"seconds": 60, "child": True})
    process = due.until("run", "lab", ready=lambda: step_of(due.lab, "clean") > 1)
    assert re.search(r"lab/clean +decontaminate +\d+ +\d+/600 .*pedigree run lab", due("jobs"))
    assert "running, step" in due("status", "lab")
    assert due("cancel", "clean").startswith("ended lab/clean; `pedigree run lab` resumes")
    _, err = process.communicate(timeout=deadline(30))
    assert process.returncode == 1 and "lab/clean failed (cancelled)" in err
    assert due.lab.runs() == ["clean"] and not due.jobs()
    assert "no running job matches 'clean'" in due("cancel", "clean", code=2)

    process = due.until("run", "lab", ready=lambda: due.lab.runs() == ["clean"] * 2 and step_of(due.lab, "clean") > 1)
    due("cancel", "lab")
    process.communicate(timeout=deadline(30))
    assert process.returncode in (1, 130) and not due.jobs() and due.lab.runs() == ["clean"] * 2


def test_cancel_interrupts_a_run_that_a_script_has_put_into_the_background(fresh):
    """Its shell starts it with SIGINT ignored. Two stages wait for one slot: the second would start when the first is canceled."""
    fresh.lab.edit("configs/execution/lab.yaml", "slots: 2", "slots: 1")
    fresh.lab.knobs(raw={"seconds": 60}, suite={"seconds": 60})
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        process = fresh.until("run", "lab", ready=lambda: step_of(fresh.lab, "raw") + step_of(fresh.lab, "suite") > 1)
    finally:
        signal.signal(signal.SIGINT, before)
    fresh("cancel", "lab")
    process.communicate(timeout=deadline(30))
    assert process.returncode in (1, 130) and len(fresh.lab.runs()) == 1 and not fresh.jobs()


def test_sigterm_interrupts_every_command_as_ctrl_c_does(fresh):
    """One that has barely begun, and one at work."""
    fresh.lab.knobs(raw={"seconds": 60})
    run = fresh.until("run", "lab", "--only", "raw", ready=lambda: step_of(fresh.lab, "raw") > 1)
    logs = fresh.start("logs", "-f", "raw")
    until(lambda: catches(logs.pid, signal.SIGTERM), alive=lambda: logs.poll() is None)
    for process in (logs, run):
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=deadline(30))
        assert process.returncode == 130 and "Traceback" not in err


def test_a_run_whose_output_nobody_reads_goes_on_to_its_report(fresh):
    """As `ssh HOST pedigree run` whose connection drops; stderr breaks with stdout."""
    fresh.lab.knobs(raw={"hold": "go"})
    reader, writer = os.pipe()
    process = fresh.start("run", "lab", stdout=writer, stderr=writer)
    os.close(writer)
    with open(reader, "rb", buffering=0) as stream:
        said = b""
        while "● raw".encode() not in said:
            said += stream.read(4096)
    fresh.lab.write("go", "")
    assert process.wait(deadline(120)) == 0
    assert (fresh.lab.root / "artifacts/lab/report.html").exists()


@pytest.mark.parametrize("terminal", [False, True])
def test_icons_that_an_encoding_lacks_end_no_run(fresh, terminal):
    fresh.environment |= {"PYTHONIOENCODING": "ascii", "TERM": "dumb"}
    reader, writer = pty.openpty() if terminal else os.pipe()
    process = fresh.start("run", "lab", stdout=writer)
    os.close(writer)
    assert "Traceback" not in process.communicate(timeout=deadline(120))[1] and process.returncode == 0
    said = b""
    with suppress(OSError), open(reader, "rb", buffering=0) as stream:  # a terminal ends with an error
        while part := stream.read(4096):
            said += part
    assert (rb"\u2713 clean" if terminal else "✓ clean".encode()) in said and b"report: " in said


def test_logs_follow_a_job_to_its_end(fresh):
    fresh.lab.knobs(clean={"errors": [5]})
    fresh.lab.edit("configs/execution/lab.yaml", "retries: 1", "retries: 0")
    fresh("run", "lab", code=1)
    fresh.lab.knobs()
    fresh("run", "lab")
    assert fresh("logs", "-f", "lab/clean") == fresh("logs", "lab/clean")
    assert "no log of 'sft'" in fresh("logs", "sft", code=2)


# --- looking -----------------------------------------------------------------------------------------------------------


def test_plan_says_what_runs_and_why(shared):
    assert "4 stages up to date, nothing to do" in shared("plan", "lab")
    text = shared("plan", "lab", "--force", "clean")
    assert re.search(r"raw +prepare_data +up to date", text)
    assert re.search(r"clean +decontaminate +will run +forced", text)
    assert re.search(r"cleaner +decontaminate +depends +waits for clean", text)
    assert "2 of 4 stages to run" in text and " free." in text
    changed = shared("plan", "lab", "--set", "raw.sources=[{type: arithmetic, operations: [add], digits: [1], count: 6, seed: 2}]")
    assert re.search(r"raw +prepare_data +will run +never run", changed)


def test_plan_knows_what_the_cache_holds(done):
    subprocess.run(["rm", "-r", done.lab.root / "artifacts/lab/cleaner"], check=True)
    text = done("plan", "lab")
    assert re.search(r"cleaner +decontaminate +cached +its artifact is missing", text)
    assert "restored" in done("run", "lab")


def test_what_lies_in_the_remote_is_done_and_comes_when_asked_for(done, tmp_path):
    done.lab.shell(f"dvc remote add -q -d store {tmp_path / 'store'}")
    assert "sent 0" not in done("push", "lab")
    assert "sent 0 objects and 0 run-cache entries" in done("push", "lab")
    shutil.rmtree(done.lab.root / "artifacts/lab/raw")
    shutil.rmtree(done.lab.root / ".dvc/cache")
    assert "in the remote" in done("status", "lab") and "in the remote" in done("plan", "lab")
    assert "done; files are in the remote" in done("run", "lab")
    assert "the files of 1 are only in the remote; `pedigree pull lab` downloads them" in done("run", "lab")
    assert "1 of 1 stages are available locally" in done("pull", "lab", "--only", "raw")
    assert "4 of 4 stages are available locally" in done("pull", "lab")


def test_pull_without_a_remote_says_how_to_name_one(shared):
    assert "there is no remote to pull from: add one with `dvc remote add" in shared("pull", "lab", code=1)


def test_status_counts_stages_whose_code_has_changed_and_json_lists_the_files(done):
    assert "The code of" not in done("status", "lab")
    path = done.lab.code / "stages" / "decontaminate" / "run.py"
    path.write_text(path.read_text() + "\n\n# a comment is no change\n")
    assert "The code of" not in done("status", "lab")
    path.write_text(path.read_text() + "\n\nANSWER = 42\n")
    text = done("status", "lab")
    assert (
        "The code of 2 stages changed since they were built; `pedigree status lab --json` lists the files." in text and "run.py" not in text
    )
    changed = {stage["address"]: stage["changed_code"] for stage in json.loads(done.said("status", "lab", "--json")[0])["stages"]}
    files = ["stages/decontaminate/run.py"]
    assert changed == {"lab/suite": [], "lab/raw": [], "lab/clean": files, "lab/cleaner": files}
    assert "nothing to do" in done("run", "lab")


def test_rerun_makes_finished_stages_again_whose_code_has_changed_and_no_others(done):
    path = done.lab.code / "stages" / "decontaminate" / "run.py"
    path.write_text(path.read_text() + "\n\nANSWER = 42\n")
    done.lab.forget_runs()
    assert "nothing to do" in done("run", "lab", "--on-code-change", "take") and done.lab.runs() == []
    done("run", "lab", "--on-code-change", "rerun", "--only", "cleaner")
    assert done.lab.runs() == ["cleaner"]
    done("run", "lab", "--on-code-change", "rerun")
    assert done.lab.runs() == ["cleaner", "clean"]
    assert "The code of" not in done("status", "lab") and "nothing to do" in done("run", "lab", "--on-code-change", "rerun")


def test_status_asks_for_results_to_be_committed(shared):
    assert re.search(r"Not committed to git: .*artifacts/lab/dvc\.lock", shared("status", "lab"))


def test_lineage_goes_back_to_the_sources(shared):
    text = shared("lineage", "lab/cleaner")
    assert re.match(r"lab/cleaner decontaminate v\d+ ", text)
    assert "data: lab/raw prepare_data" in text and "benchmarks: lab/suite" in text and "shown above" in text
    entries = json.loads(shared("lineage", "lab/cleaner", "--json"))["artifacts"]
    assert {entry["run"]["address"] for entry in entries.values()} == {"lab/raw", "lab/suite", "lab/clean"}
    assert "available artifacts: lab" in shared("lineage", "lab/nothing", code=1)


def test_lineage_speaks_standards_and_writes_a_page(shared, tmp_path):
    events = [json.loads(line) for line in shared("lineage", "lab/cleaner", "--format", "openlineage").splitlines()]
    assert [event["job"]["name"] for event in events][-2:] == ["lab/cleaner", "lab/cleaner"] and len(events) == 8
    assert json.loads(shared("lineage", "lab/raw", "--format", "croissant"))["distribution"][0]["@id"] == "rows.jsonl"
    assert json.loads(shared("lineage", "lab/raw", "--format", "slsa"))["subject"][0]["name"] == "rows.jsonl"
    assert "# lab/raw" in shared("lineage", "lab/raw", "--format", "card")
    assert "choose from openlineage, slsa, card, croissant" in shared("lineage", "lab/raw", "--format", "prov", code=2)
    page = tmp_path / "page.html"
    assert shared("lineage", "lab/cleaner", "--html", str(page)) == f"{page}\n" and "lab/cleaner" in page.read_text()


def test_diff_says_how_and_its_exit_code_whether(shared):
    assert shared("diff", "lab/raw", "raw").startswith("identical: lab/raw and raw are ")
    text = shared("diff", "lab/clean", "lab/cleaner", code=1)
    assert "same content" in text and "config\n  ngram: 8 -> 5" in text
    found = json.loads(shared("diff", "lab/raw", "lab/suite", "--json", code=1))
    assert not found["same"] and (found["rows"]["before"], found["rows"]["after"]) == (5, 3)
    assert "available artifacts: lab" in shared("diff", "lab/raw", "lab/nothing", code=1)


def test_report_is_written_where_it_says(shared):
    assert shared("report", "lab") == "artifacts/lab/report.html\n"
    assert (shared.lab.root / "artifacts/lab/report.html").read_text().startswith("<!doctype html>")


def test_export_travels_and_refuses_to_mix(shared, tmp_path):
    target = tmp_path / "out"
    assert "all hashes verified" in shared("export", "lab/cleaner", str(target))
    names = {path.relative_to(target).as_posix() for path in target.rglob("*") if path.is_file()}
    records = {f"pedigree/{name}" for name in ("record.json", "run.json", "lineage.json", "SHA256SUMS")}
    assert names == {"rows.jsonl", "README.md", "croissant.json"} | records
    assert "is not an empty folder" in shared("export", "lab/cleaner", str(target), code=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_what_is_offered_to_be_typed_can_be_typed_whatever_the_names(shared):
    """And no terminal obeys what somebody has put into a name."""
    recipe = "a [red]\x1b[2J/copy.yaml"
    shared.lab.write(recipe, (shared.lab.root / "configs/recipes/lab.yaml").read_text())
    for command in ("plan", "status"):
        text = shared(command, recipe)
        assert "`pedigree run 'a [red]\\u001b[2J/copy.yaml'`" in text and "\x1b" not in text
    text = shared("export", "lab/raw", "out/a [red]\x1bb")
    assert "`pedigree verify 'out/a [red]\\u001bb'`" in text and "\x1b" not in text
    assert shared("lineage", "lab/raw", "--html", "out/\x1b[2J.html") == "out/\\u001b[2J.html\n"
