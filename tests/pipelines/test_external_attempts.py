"""A command of other software over several attempts: what counts as progress, and what is kept."""

import json
from pathlib import Path
from typing import Any

import pytest
from running_lab import Lab, read

from pedigree.pipelines.jobs import attempts
from pedigree.pipelines.jobs.context import StageFailed
from pedigree.pipelines.run.ensure import ensure

pytestmark = pytest.mark.nightly
SAVES = "n=$(ls {output} | wc -l); new={output}/checkpoint-$((n + 1)); mkdir $new; touch $new/trainer_state.json; "
REPORTS = "echo '{\"checkpoints\": '$n'}' > {output}/metrics.json"


def lab_with(folder: Path, script: str) -> Lab:
    lab = Lab(folder, whole=True)
    stage = {"kind": "external", "command": ["bash", "-c", script], "output": "report", "resume": ["{checkpoint}"]}
    lab.write("configs/recipes/lab.yaml", json.dumps({"execution": "lab", "stages": {"made": stage}}))
    return lab


def test_a_command_that_gets_further_is_tried_again_however_often_it_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "BACKOFF_S", (0.0,))
    lab = lab_with(tmp_path, f"{SAVES} if [ $n = 3 ]; then {REPORTS}; else kill -9 $$; fi")
    run = lab.run()
    ensure(run, run.graph.find("made"))
    made = read(lab, "made", "run.json")["attempts"]
    assert [one["cause"] for one in made] == ["crashed"] * 3 + ["succeeded"]  # with one retry
    assert made[-1]["resumed_from"] == "output/checkpoint-3 of an earlier attempt"


@pytest.mark.parametrize("choice", ["keep", "rerun"])
def test_a_command_starts_over_with_other_code_only_if_asked_to(tmp_path: Path, choice: Any) -> None:
    lab = lab_with(tmp_path, f"{SAVES} [ -e {tmp_path}/go ] && {REPORTS}")
    run = lab.run()
    with pytest.raises(StageFailed, match="exit code 1"):
        ensure(run, run.graph.find("made"))
    (tmp_path / "go").touch()
    code = lab.code / "stages/external/run.py"
    code.write_text(code.read_text() + "MORE = 1\n")
    run = lab.run()
    run.on_code_change = choice
    ensure(run, run.graph.find("made"))
    assert read(lab, "made", "record.json")["metrics"]["measured"] == {"checkpoints": 1 if choice == "keep" else 0}
