"""The benchmark of growth measures whole jobs on as many rows as it says."""

from benchmarks import growth
from data import records
from data.artifacts import open_artifact


def test_a_job_is_measured_with_all_that_it_holds(tmp_path, monkeypatch):
    monkeypatch.setattr(growth, "SUITES", 2)
    rows = growth.rows_in(tmp_path / "rows.jsonl", 300)
    costs = dict(growth.run(tmp_path / "jobs", rows))
    assert list(costs) == ["prepare_data", "decontaminate"]
    assert all(cost.seconds > 0 and cost.cpu_seconds > 0 and cost.mib > 50 for cost in costs.values()), costs
    assert len(records.load(open_artifact(tmp_path / "jobs" / "prepare_data" / "out"))) == 300
