import json

from configs.execution import Numerics, Placement
from stages.job import Job


def job(folder):
    return Job(folder=folder, address="r/s", key="k", numerics=Numerics(), placement=Placement(), source_files={})


def test_a_resumed_curve_has_no_repeats_and_no_gaps(tmp_path):
    first = job(tmp_path)
    for step in (1, 2, 3, 4):
        first.log(step, loss=float(step))
    resumed = job(tmp_path)
    resumed.rewind(2)  # the checkpoint was written after step 2
    for step in (3, 4, 5):
        resumed.log(step, loss=10.0 + step)
    rows = [json.loads(line) for line in (tmp_path / "curve.jsonl").read_text().splitlines()]
    assert [(row["step"], row["loss"]) for row in rows] == [(1, 1.0), (2, 2.0), (3, 13.0), (4, 14.0), (5, 15.0)]


def test_only_rank_zero_reports(tmp_path):
    other = Job(folder=tmp_path, address="r/s", key="k", numerics=Numerics(), placement=Placement(), source_files={}, rank=1)
    other.log(1, loss=1.0)
    other.progress(1, 1)
    assert list(tmp_path.iterdir()) == []
