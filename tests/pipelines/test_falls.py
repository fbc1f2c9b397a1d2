"""A score that fell: its mean lies below the 95 % interval of the one before, in the same measure."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

import pytest
from handmade import CONTENT, everything, made_at, project_at

from pedigree.configs.base.project import Project
from pedigree.pipelines.prefect.shown import PrefectRun
from pedigree.pipelines.publish.regressions import Fall, fallen, measured, remember, remembered


def scores(mean: float, low: float, high: float, measure: str = "a") -> dict[str, Any]:
    score = {"mean": mean, "low": low, "high": high, "n": 100}
    return {"evaluate": {"hashes": {"gsm8k": measure}, "policies": {"rlvr": {"gsm8k": score}}}}


def test_a_score_below_the_interval_of_the_one_before_fell():
    before = scores(0.50, 0.45, 0.55)
    (fall,) = fallen(before, scores(0.44, 0.39, 0.49))
    assert fall == Fall("evaluate", "rlvr", "gsm8k", mean=0.44, before=0.50, before_low=0.45)
    assert str(fall) == "rlvr on gsm8k: 0.440, previously 0.500 (interval from 0.450)"


def test_a_score_within_the_interval_or_above_did_not_fall():
    before = scores(0.50, 0.45, 0.55)
    assert not fallen(before, scores(0.45, 0.40, 0.50)) and not fallen(before, scores(0.9, 0.8, 1.0))


def test_other_items_or_sampling_make_another_score_and_a_new_policy_has_nothing_to_fall_from():
    before = scores(0.50, 0.45, 0.55)
    assert not fallen(before, scores(0.1, 0.0, 0.2, measure="b"))
    assert not fallen({}, scores(0.1, 0.0, 0.2))
    assert not fallen({"evaluate": {"hashes": {"gsm8k": "a"}, "policies": {}}}, scores(0.1, 0.0, 0.2))


def test_the_measure_of_a_score_is_its_tasks_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It covers items, form, verifiers and sampling; tasks of a suite change one by one."""

    def hashed(node: Any, index: int) -> Any:
        payload, evidence, metrics = plain(node, index)
        told = json.loads(payload["scores.json"]) | {"tasks": {"arithmetic": {"hash": "5a1e", "suite": "s"}}}
        return {"scores.json": json.dumps(told)}, evidence, metrics

    plain = CONTENT["evaluate"]
    monkeypatch.setitem(CONTENT, "evaluate", hashed)
    project = project_at(tmp_path)
    found = measured(project, everything(project))
    assert found and all(evaluation["hashes"] == {"arithmetic": "5a1e"} for evaluation in found.values())


class Heard:
    """A way to Prefect on which requests are noted and go nowhere."""

    def __init__(self) -> None:
        self.paths: list[str] = []

    def request(self, method: str, path: str, **_: Any) -> Any:
        self.paths.append(path)
        return SimpleNamespace(json=lambda: {})

    def read_flow_run(self, flow_run_id: UUID) -> Any:
        return SimpleNamespace(id=flow_run_id, flow_id=uuid4(), deployment_id=None)


@pytest.mark.parametrize(("folder", "alarms"), [("project", 4), (".pedigree/rehearsals/lab", 0)])
def test_scores_of_a_rehearsal_raise_no_alarm(tmp_path: Path, folder: str, alarms: int):
    project, graph = made_at(tmp_path / folder)
    before = measured(project, graph)
    name, evaluation = next((name, one) for name, one in before.items() if len(one["policies"]) >= 4)
    for tasks in list(evaluation["policies"].values())[:4]:
        tasks["arithmetic"] |= {"mean": 0.99, "low": 0.98}
    remember(project, graph.recipe, {name: evaluation})
    client: Any = Heard()
    run: Any = SimpleNamespace(project=project, graph=graph)
    PrefectRun(client, run, [], uuid4())._sum_up()
    assert client.paths.count("/events") == alarms and "/artifacts/" in client.paths
    assert remembered(project, graph.recipe) == measured(project, graph)


def test_what_was_measured_is_remembered_for_the_next_run(tmp_path: Path):
    project = Project(tmp_path)
    assert remembered(project, "tiny") is None
    remember(project, "tiny", scores(0.5, 0.4, 0.6))
    assert remembered(project, "tiny") == scores(0.5, 0.4, 0.6) and remembered(project, "tiny+1a2b3c4d") is None
    (tmp_path / ".pedigree/scores/tiny.json").write_text("[]")
    assert remembered(project, "tiny") is None
