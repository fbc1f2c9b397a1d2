"""`--json`: one document on stdout, all else on stderr, a schema that stays."""

import json
import signal
from typing import Any

import pytest
from commands import InProcessCommand
from running_lab import Lab
from waiting import deadline, until

HEAD = {"schema_version", "command", "recipe", "source", "overrides"}


class Programs(InProcessCommand):
    """A program that calls `pedigree` and reads what it prints."""

    def document(self, *arguments: str, code: int = 0) -> tuple[Any, str]:
        out, err = self.said(*arguments, "--json", code=code)
        return json.loads(out, parse_constant=not_json) if out else None, err


def not_json(name: str) -> None:
    """Python reads NaN and Infinity too; no other program does."""
    raise AssertionError(f"{name} is not JSON")


@pytest.fixture(scope="module")
def made(template: Lab, tmp_path_factory) -> Programs:
    return Programs(template.twin(tmp_path_factory.mktemp("json")))


@pytest.fixture
def fresh(tmp_path) -> Programs:
    return Programs(Lab(tmp_path))


def test_a_run_ends_with_one_document_and_tells_its_progress_elsewhere(fresh: Programs):
    found, err = fresh.document("run", "lab")
    assert set(found) == HEAD | {"outcome", "seconds", "stages", "scores", "waived", "report", "commit", "notes"}
    assert (found["schema_version"], found["command"], found["recipe"], found["outcome"]) == (1, "run", "lab", "done")
    assert [stage["address"] for stage in found["stages"]] == ["lab/suite", "lab/raw", "lab/clean", "lab/cleaner"]
    assert {stage["outcome"] for stage in found["stages"]} == {"ran"} and found["report"] == "artifacts/lab/report.html"
    recorded = {f"lab/{name}": content for name, content in fresh.lab.contents().items()}
    assert {stage["address"]: stage["content"] for stage in found["stages"]} == recorded
    assert "✓ clean" in err
    again, _ = fresh.document("run", "lab", "--set", "cleaner.ngram=7")
    assert again["recipe"].startswith("lab+") and again["overrides"] == ["cleaner.ngram=7"] and again["source"] == "lab"
    assert [stage["outcome"] for stage in again["stages"]] == ["unchanged"] * 3 + ["ran"]


def test_a_failed_run_says_which_stage_and_why_with_the_same_exit_code(fresh: Programs):
    fresh.lab.knobs(raw={"fail": "these rows are bad"})
    found, err = fresh.document("run", "lab", code=1)
    ends = {stage["address"]: stage for stage in found["stages"]}
    assert found["outcome"] == "failed" and ends["lab/suite"]["outcome"] == "ran"
    assert (ends["lab/raw"]["outcome"], ends["lab/raw"]["cause"], ends["lab/raw"]["message"]) == ("failed", "refused", "these rows are bad")
    assert ends["lab/raw"]["log"].startswith(".pedigree/scratch/") and ends["lab/cleaner"]["outcome"] == "not_run"
    assert "lab/raw failed (refused)" in err


def test_an_interrupted_run_says_so_and_numbers_that_are_none_are_null(fresh: Programs):
    """In documents, and in what jobs write."""
    fresh.lab.knobs(suite={"seconds": 60, "nan": True})
    process = fresh.start("run", "lab", "--only", "suite", "--json")
    written = (fresh.lab.root / ".pedigree").glob
    until(lambda: any('"rows"' in path.read_text() for path in written("scratch/*/progress.json")), alive=lambda: process.poll() is None)
    try:
        (told,) = fresh.document("jobs")[0]["jobs"]
        assert set(told) == {
            "address", "kind", "pid", "elsewhere", "host", "alive", "step", "total_steps", "numbers", "seconds_since_heartbeat",
            "waited_for_by", "waiting",
        }  # fmt: skip
        assert told["address"] == "lab/suite" and told["numbers"] == {"rows": None} and told["step"] > 0
        assert {stage["job"]["numbers"]["rows"] for stage in fresh.document("status", "lab")[0]["stages"] if stage["job"]} == {None}
        assert "rows nan" in fresh("jobs")
        (path,) = written("scratch/*/progress.json")
        assert json.loads(path.read_text(), parse_constant=not_json)["numbers"] == {"rows": None}
    finally:
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=deadline(30))
    assert process.returncode == 130 and "interrupted;" in err and "Traceback" not in err
    assert json.loads(out, parse_constant=not_json)["outcome"] == "interrupted"


def test_a_plan_as_a_document(made: Programs):
    found, _ = made.document("plan", "lab", "--force", "clean")
    assert set(found) == HEAD | {"stages", "to_run", "disk", "time", "slots", "fits", "published"}
    assert found["to_run"] == 2 and found["fits"]
    assert found["published"] is None  # it follows nothing
    assert set(found["disk"]) == {"needed_bytes", "stages_of_unknown_size", "free_bytes"}
    assert set(found["time"]) == {"seconds", "wall_seconds", "gpu_hours", "stages_of_unknown_time"}
    own = {"address", "kind", "state", "reasons", "disk_bytes", "batch", "estimate", "problems", "warnings", "faster"}
    assert set(found["stages"][0]) == own and found["stages"][0]["faster"] is None  # not asked for
    assert [stage["state"] for stage in found["stages"]] == ["up_to_date", "up_to_date", "will_run", "depends"]
    assert [stage["reasons"] for stage in found["stages"]][2:] == [["forced"], ["waits for lab/clean"]]


def test_status_and_jobs_as_documents(made: Programs):
    found, _ = made.document("status", "lab")
    assert set(found) == HEAD | {"stages", "uncommitted"} and "artifacts/lab/dvc.lock" in found["uncommitted"]
    assert set(found["stages"][0]) == {"address", "kind", "state", "reasons", "changed_code", "job", "cost"}
    assert all(stage["cost"]["total_slot_hours"] >= stage["cost"]["slot_hours"] and not stage["cost"]["cost"] for stage in found["stages"])
    assert {stage["state"] for stage in found["stages"]} == {"done"}
    assert made.document("jobs")[0] == {"schema_version": 1, "command": "jobs", "jobs": []}


def test_wrong_usage_prints_nothing_on_stdout(made: Programs):
    found, err = made.document("plan", "lob", code=2)
    assert found is None and "there is no recipe 'lob'" in err
