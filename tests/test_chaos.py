"""What `tests/chaos.py` says of a chain must be able to be bad, and what it draws must be everything that there is."""

from pathlib import Path

import chaos
import pytest
from projects import fresh_project


@pytest.mark.parametrize(("until", "count", "missing"), [("sft", 21, {"answers kept"}), (None, 22, set())])
def test_every_disturbance_comes_once_before_any_comes_again(until: str | None, count: int, missing: set[str]) -> None:
    every = {f"point: {name}" for name in chaos.POINTS if name not in missing}
    every |= {f"instant: {name}" for name in chaos.VICTIMS} | {f"change: {name}" for name in chaos.CHANGES}
    assert sorted(chaos.disturbances(count, until)) == sorted(every)
    assert set(chaos.disturbances(count + 1, until)) == every


def test_a_chain_comes_by_no_checkpoint_before_it_trains() -> None:
    assert set(chaos.POINTS) - set(chaos.points_before("chat")) == {"checkpoint written", "checkpoint renamed", "answers kept"}


def test_a_stage_that_is_stale_for_dvc_counts(tmp_path: Path) -> None:
    project = fresh_project(tmp_path / "project")
    made = project / "artifacts" / chaos.RECIPE
    made.mkdir(parents=True)
    stages = [
        f"  {name}: {{cmd: cp {name}.in {name}.out, deps: [{name}.in], outs: [{name}.out]}}" for name in ("changed", "sound", "unmade")
    ]
    (made / "dvc.yaml").write_text("\n".join(["stages:", *stages, ""]))
    for name in ("changed", "sound", "unmade"):
        (made / f"{name}.in").write_text(name)
    targets = [f"artifacts/{chaos.RECIPE}/dvc.yaml:{name}" for name in ("changed", "sound")]
    chaos.call(project, "dvc", "repro", *targets)
    assert chaos.stale_stages(project, ["changed", "sound"]) == []
    (made / "changed.in").write_text("other")
    assert chaos.stale_stages(project, ["changed", "sound", "unmade"]) == ["changed", "unmade"]
