"""A stage that was made under another name is not made again: renamed stages, copied recipes, variants, and a clone with a remote."""

import json
import shutil

import pytest
from running_lab import CLEAN, RECIPE, Lab, outcomes, read, status

from pedigree.data.artifacts.artifacts import read_lineage, read_run
from pedigree.pipelines.jobs.context import RunContext
from pedigree.pipelines.lineage.verify import verify_project
from pedigree.pipelines.run.ensure import Result
from pedigree.pipelines.run.opening import Request, open_run
from pedigree.pipelines.run.planning import rows_of
from pedigree.pipelines.run.plans import plan
from pedigree.pipelines.run.runs import run_graph

RENAMED = RECIPE.replace("  raw:", "  rows:").replace("data: raw", "data: rows").replace("  clean:", "  kept:").replace("clean,", "kept,")


def copied(lab: Lab, text: str = RECIPE, name: str = "copy") -> RunContext:
    lab.write(f"configs/recipes/{name}.yaml", text)
    run = open_run(lab.project, Request(name))
    run.code_root, run.launcher = lab.code, lab.launcher
    return run


def ended(run: RunContext) -> dict[str, str]:
    return {end.address: end.outcome if isinstance(end, Result) else type(end).__name__ for end in run_graph(run)}


@pytest.fixture
def made(finished: Lab) -> Lab:
    finished.forget_runs()
    return finished


def test_renamed_stages_are_not_made_again_nor_is_what_reads_them(made: Lab) -> None:
    before = made.contents()
    made.write("configs/recipes/lab.yaml", RENAMED)
    looking = made.run()
    assert {row.node.name: row.state for row in rows_of(looking, plan(looking))} == {
        "suite": "up to date", "rows": "cached", "kept": "cached", "cleaner": "cached",
    }  # fmt: skip
    assert outcomes(made) == {"suite": "unchanged", "rows": "restored", "kept": "restored", "cleaner": "restored"}
    assert made.runs() == [] and made.contents() == before | {"rows": before["raw"], "kept": before["clean"]}
    assert read_run(made.root / "artifacts/lab/rows/run.json").address == "lab/rows"
    assert {given["port"]: given["label"] for given in read(made, "kept", "record.json")["inputs"]} == {
        "data": "rows",
        "benchmarks": "suite",
    }
    assert set(outcomes(made).values()) == {"unchanged"} and status(made) == CLEAN
    assert verify_project(made.project).problems == []


def test_a_copied_recipe_makes_nothing(made: Lab) -> None:
    assert set(ended(copied(made)).values()) == {"restored"} and made.runs() == []
    folder = made.root / "artifacts/copy/cleaner"
    assert (folder / "record.json").read_bytes() == (made.root / "artifacts/lab/cleaner/record.json").read_bytes()
    record = json.loads((folder / "record.json").read_text())
    assert {given["producer"] for given in record["inputs"]} <= read_lineage(folder / "lineage.json").keys()
    assert verify_project(made.project).problems == []


def test_what_was_made_before_the_last_change_is_found_too(made: Lab) -> None:
    made.edit("configs/recipes/lab.yaml", "ngram: 5", "ngram: 6")
    assert outcomes(made)["cleaner"] == "ran"
    made.forget_runs()
    assert ended(copied(made))["copy/cleaner"] == "restored" and made.runs() == []


def test_a_difference_that_means_something_is_made(made: Lab) -> None:
    text = RECIPE.replace("  suite:", "  exam:").replace("[suite]", "[exam]")  # the names of suites are in manifests
    assert ended(copied(made, text)) == {"copy/exam": "restored", "copy/raw": "restored", "copy/clean": "ran", "copy/cleaner": "ran"}


def test_a_damaged_equal_is_made_again(made: Lab) -> None:
    payload = made.root / "artifacts/lab/raw/payload/rows.jsonl"
    good = payload.read_bytes()
    for path in (made.root / ".dvc/cache").rglob("*"):
        if path.is_file() and path.read_bytes() == good:
            path.chmod(0o644)
            path.write_bytes(b"x" + good[1:])
    assert ended(copied(made))["copy/raw"] == "ran" and made.runs() == ["copy/raw"]
    assert (made.root / "artifacts/copy/raw/payload/rows.jsonl").read_bytes() == good


def test_forced_stages_are_made(made: Lab) -> None:
    run = copied(made)
    assert {end.address: getattr(end, "outcome", "") for end in run_graph(run, forced={"copy/raw"})}["copy/raw"] == "ran"


def test_a_stage_renamed_after_its_folder_was_deleted_is_found(made: Lab) -> None:
    shutil.rmtree(made.root / "artifacts/lab/raw")
    assert ended(copied(made))["copy/raw"] == "restored" and made.runs() == []
