"""A score that fell: its mean lies below the 95 % interval of the one before, on the same items."""

from pathlib import Path
from typing import Any

from configs.project import Project
from pipelines.publish.falls import Fall, fallen, remember, remembered


def scores(mean: float, low: float, high: float, suites: list[str] | None = None) -> dict[str, Any]:
    return {"evaluate": {"suites": suites or ["a"], "policies": {"rlvr": {"gsm8k": {"mean": mean, "low": low, "high": high, "n": 100}}}}}


def test_a_score_below_the_interval_of_the_one_before_fell():
    before = scores(0.50, 0.45, 0.55)
    (fall,) = fallen(before, scores(0.44, 0.39, 0.49))
    assert fall == Fall("evaluate", "rlvr", "gsm8k", mean=0.44, before=0.50, before_low=0.45)
    assert str(fall) == "rlvr on gsm8k: 0.440, below 0.450, where the interval of 0.500 ends"


def test_a_score_within_the_interval_or_above_did_not_fall():
    before = scores(0.50, 0.45, 0.55)
    assert not fallen(before, scores(0.45, 0.40, 0.50)) and not fallen(before, scores(0.9, 0.8, 1.0))


def test_other_items_make_another_score_and_a_new_policy_has_nothing_to_fall_from():
    before = scores(0.50, 0.45, 0.55)
    assert not fallen(before, scores(0.1, 0.0, 0.2, suites=["b"]))
    assert not fallen({}, scores(0.1, 0.0, 0.2))
    assert not fallen({"evaluate": {"suites": ["a"], "policies": {}}}, scores(0.1, 0.0, 0.2))


def test_what_was_measured_is_remembered_for_the_next_run(tmp_path: Path):
    project = Project(tmp_path)
    assert remembered(project, "tiny") is None
    remember(project, "tiny", scores(0.5, 0.4, 0.6))
    assert remembered(project, "tiny") == scores(0.5, 0.4, 0.6) and remembered(project, "tiny+1a2b3c4d") is None
    (tmp_path / ".pedigree/scores/tiny.json").write_text("[]")
    assert remembered(project, "tiny") is None
