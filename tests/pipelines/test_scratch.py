"""`pedigree scratch`: work that a run of today would resume is kept, abandoned work goes, nothing goes under a live job."""

import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from running_lab import Lab
from waiting import deadline

from pedigree.pipelines.cli import scratch
from pedigree.pipelines.jobs.context import StageFailed
from pedigree.pipelines.jobs.lease import lease
from pedigree.pipelines.run.runs import run_graph


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    lab = Lab(tmp_path_factory.mktemp("failed"))
    lab.knobs(clean={"seconds": 0.5, "errors": [5, 5]})
    assert any(isinstance(end, StageFailed) for end in run_graph(lab.run()))
    (lab.project.private / "scratch" / key_of(lab) / "checkpoints" / "step-3").mkdir(parents=True)
    (lab.project.private / "scratch" / key_of(lab) / "checkpoints" / "step-3" / "w").write_bytes(bytes(5000))
    lab.knobs()
    return lab


@pytest.fixture
def lab(failed: Lab, tmp_path: Path) -> Lab:
    """A lab whose stage `clean` has failed after a few checkpoints."""
    return failed.twin(tmp_path)


def key_of(lab: Lab) -> str:
    (folder,) = (lab.project.private / "scratch").iterdir()
    return folder.name


def states(lab: Lab) -> list[tuple[str, str, str | None]]:
    return [(one.address, one.state, one.recipe) for one in scratch.survey(lab.project)[0]]


def test_work_that_a_run_of_today_would_resume_is_shown_and_kept(lab: Lab, type_):
    assert states(lab) == [("lab/clean", "would be resumed", "lab")]
    code, out, _ = type_("scratch")
    assert code == 0 and re.search(rf"clean/{key_of(lab)[:12]} +lab/clean +step-3 +\d+\.\d kB", out)
    assert "No folder is abandoned" in out
    assert "deleted 0 folders" in type_("scratch", "--clean")[1] and states(lab)
    lab.edit("configs/recipes/lab.yaml", "  clean:\n", "  # a comment\n  clean:\n")
    assert states(lab)[0][1] == "would be resumed"


@pytest.mark.parametrize(
    ("files", "held"),
    [
        ({"chunks/answers.jsonl": '["a", {}]\n["b", {}]\n["to'}, "2 answers"),
        ({"chunks/answers.jsonl": '["a", {}]\n', f"chunks/{'0a' * 16}.json": '[["a", {}]]'}, "1 answer"),  # sent to another machine
        ({"chunks/answers.jsonl": "", f"chunks/.{'0a' * 16}.json.7.7.tmp": "[["}, "no checkpoint"),
    ],
)
def test_what_was_kept_without_a_checkpoint_is_shown(lab: Lab, type_, files, held):
    """Replies of an endpoint were paid for: who cleans is to know."""
    folder = lab.project.private / "scratch" / key_of(lab)
    shutil.rmtree(folder / "checkpoints")
    (folder / "chunks").mkdir()
    for name, text in files.items():
        (folder / name).write_text(text)
    assert re.search(rf" lab/clean +{held} +\d", type_("scratch")[1])


def test_abandoned_work_is_shown_first_and_cleaned_when_asked(lab: Lab, type_):
    lab.edit("configs/recipes/lab.yaml", "in: {data: raw, benchmarks: [suite]}\n", "in: {data: raw, benchmarks: [suite]}\n    ngram: 9\n")
    assert states(lab) == [("lab/clean", "abandoned", None)]
    size = scratch.survey(lab.project)[0][0].size
    code, out, _ = type_("scratch")
    assert code == 0 and f"`pedigree scratch --clean` would delete 1 folder, {size / 1000:.1f} kB" in out and states(lab)
    code, out, _ = type_("scratch", "--clean")
    assert code == 0 and f"deleted 1 folder, {size / 1000:.1f} kB" in out
    assert states(lab) == [] and not (lab.project.private / "removed").exists()
    assert type_("scratch")[1].startswith("no scratch folders")


def test_the_age_of_work_is_told_by_the_clock_of_the_disk(lab: Lab, monkeypatch: pytest.MonkeyPatch):
    """That of a file server may be an hour apart from ours."""
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 3600)
    assert scratch.survey(lab.project)[0][0].age_s < 1800


def test_work_of_a_variant_is_kept_while_the_variant_is_there(lab: Lab, type_):
    lab.edit("configs/recipes/lab.yaml", "in: {data: raw, benchmarks: [suite]}\n", "in: {data: raw, benchmarks: [suite]}\n    ngram: 9\n")
    default = json.loads((lab.project.private / "scratch" / key_of(lab) / "spec.json").read_text())["config"]["ngram"]
    lab.run(f"clean.ngram={default}")  # compiles the variant whose stage has that key
    ((address, state, recipe),) = states(lab)
    assert (address, state) == ("lab/clean", "would be resumed") and recipe and recipe.startswith("lab+")


def test_work_whose_inputs_are_not_made_now_is_kept(lab: Lab):
    for path in (lab.root / "artifacts/lab/raw").glob("*.json"):
        path.unlink()
    (lab.root / "artifacts/lab/dvc.lock").unlink()
    assert states(lab) == [("lab/clean", "inputs not made", "lab")]


def test_work_is_listed_while_the_remote_that_has_its_inputs_cannot_be_reached(lab: Lab, monkeypatch: pytest.MonkeyPatch, type_):
    store = {"ENDPOINT_URL": "http://127.0.0.1:9", "ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "b", "MAX_ATTEMPTS": "1"}
    for name, value in store.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    lab.configure_dvc("s3://bucket/remote")
    for folder in ("artifacts/lab/raw", ".dvc/cache"):
        shutil.rmtree(lab.root / folder)
    assert states(lab) == [("lab/clean", "inputs not made", "lab")]
    code, out, _ = type_("scratch")
    assert code == 0 and "lab/clean" in out


def test_nothing_is_cleaned_while_a_recipe_cannot_be_read(lab: Lab, type_):
    lab.edit("configs/recipes/lab.yaml", "in: {data: raw, benchmarks: [suite]}\n", "in: {data: raw, benchmarks: [suite]}\n    ngram: 9\n")
    lab.write("configs/recipes/bad.yaml", "stages: 3\n")
    assert "recipe bad cannot be read" in type_("scratch")[1]
    code, _, err = type_("scratch", "--clean")
    assert code == 2 and "nothing deleted: recipe bad cannot be read" in err and "pedigree validate bad" in err and states(lab)
    code, out, _ = type_("scratch", f"clean/{key_of(lab)[:8]}", "--clean")  # by name it may go
    assert code == 0 and "deleted 1 folder" in out and states(lab) == []


def test_under_a_live_job_or_a_held_lease_nothing_goes(lab: Lab, type_):
    name = f"clean/{key_of(lab)[:8]}"
    with lease(lab.project.lease("lab--clean"), "pedigree run lab"):
        assert states(lab)[0][1] == "in use"
        code, _, err = type_("scratch", name, "--clean")
        assert code == 2 and "in use by another command" in err
    lab.knobs(clean={"hold": "nothing that comes"})
    arguments = [sys.executable, "-m", "pedigree.pipelines.cli", "run", "lab", "--keep-jobs"]
    with subprocess.Popen(arguments, cwd=lab.root, env=lab.environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        for line in process.stdout:
            if "running" in line and "clean" in line:
                break
        assert states(lab)[0][1] == "running"
        code, _, err = type_("scratch", name, "--clean")
        assert code == 2 and "`pedigree cancel` ends it" in err
        assert type_("cancel", "clean")[0] == 0
        process.communicate(timeout=deadline(30))
    assert Path(lab.project.private / "scratch" / key_of(lab)).is_dir()
