"""The benchmark of growth measures whole jobs on as many rows as it says."""

import pytest

from benchmarks import growth
from pedigree.data.artifacts.artifacts import open_artifact
from pedigree.data.records import records


@pytest.mark.slow
@pytest.mark.nightly
def test_a_job_is_measured_with_all_that_it_holds(tmp_path, monkeypatch):
    monkeypatch.setattr(growth, "SUITES", 2)
    costs = {stage: cost for run in growth.JOBS.values() for stage, cost in run(tmp_path / "jobs", 300)}
    assert list(costs) == ["prepare_data", "decontaminate", "judge", "best_answers", "select_prompts", "constrain", "pair"]
    assert all(cost.seconds > 0 and cost.cpu_seconds > 0 and cost.mib > 50 for cost in costs.values()), costs
    assert len(records.load(open_artifact(tmp_path / "jobs" / "prepare_data" / "out"))) == 300
    assert len(list(records.stream(tmp_path / "jobs" / "pair" / "out" / "payload"))) == 300 // growth.ANSWERS
    for stage, rows in {"judge": 300, "constrain": 300, "best_answers": 300 // growth.ANSWERS}.items():
        assert len(list(records.stream(tmp_path / "jobs" / stage / "out" / "payload"))) == rows
