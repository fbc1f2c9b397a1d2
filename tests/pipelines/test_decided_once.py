"""A run decides once for each stage whether it is current, and computes its key once at each moment when its inputs may have changed."""

from collections import Counter
from typing import Any

import pytest
from commands import InProcessCommand
from running_lab import Lab, outcomes

from pedigree.pipelines.ledger import identity
from pedigree.pipelines.ledger.ledger import Ledger
from pedigree.pipelines.run.ensure import Result
from pedigree.pipelines.run.plans import plan
from pedigree.pipelines.run.runs import run_graph

RECIPE = "configs/recipes/lab.yaml"
STAGES = ("suite", "raw", "clean", "cleaner")


class Counted:
    """What a command does with each stage of a lab."""

    def __init__(self, lab: Lab, patch: pytest.MonkeyPatch) -> None:
        self.lab = lab
        self.decided: Counter[str] = Counter()
        """Checks against `dvc.lock`."""
        self.keys: Counter[str] = Counter()
        """Computations of a key, by the seed or n-gram that distinguishes the stages."""
        self._reasons, self._key = Ledger.reasons, identity.stage_key
        patch.setattr(Ledger, "reasons", self.reasons())
        patch.setattr(identity, "stage_key", self.stage_key)

    def reasons(self) -> Any:
        def counted(ledger: Ledger, node: Any, *given: Any) -> list[str]:
            self.decided[node.name] += 1
            return self._reasons(ledger, node, *given)

        return counted

    def stage_key(self, kind: str, version: int, config: dict[str, Any], *given: Any) -> str:
        of = (
            {1: "suite", 2: "raw"}[config["sources"][0]["seed"]]
            if kind == "prepare_data"
            else "cleaner"
            if config["ngram"] in (5, 6)
            else "clean"
        )
        self.keys[of] += 1
        return self._key(kind, version, config, *given)

    def run(self, *options: str) -> str:
        self.decided.clear()
        self.keys.clear()
        return InProcessCommand(self.lab)("run", "lab", *options)


@pytest.fixture
def counted(finished: Lab, monkeypatch: pytest.MonkeyPatch) -> Counted:
    return Counted(finished, monkeypatch)


def test_a_run_without_work_checks_each_stage_once(counted: Counted) -> None:
    assert "4 stages up to date" in counted.run()
    assert counted.decided == counted.keys == dict.fromkeys(STAGES, 1)


def test_of_a_run_with_one_stage_due_nothing_above_it_is_checked_twice(counted: Counted) -> None:
    counted.lab.edit(RECIPE, "ngram: 5", "ngram: 6")
    counted.run()
    assert counted.lab.runs()[4:] == ["cleaner"]
    assert counted.decided == dict.fromkeys(STAGES, 1)
    # the plan, which looks for an unfinished job by the key; the beginning of the stage's turn; and after its inputs were given to its job
    assert counted.keys == dict.fromkeys(STAGES, 3)


def test_a_stage_below_is_decided_when_its_turn_comes(counted: Counted) -> None:
    """The plan states only what DVC sees of it."""
    counted.lab.knobs(clean={"constant": True})
    counted.run("--force", "clean")
    assert counted.decided == {"suite": 1, "raw": 1, "cleaner": 2}
    counted.lab.knobs(clean={"constant": True})
    counted.run("--force", "clean")  # with the same result
    assert counted.lab.runs()[4:] == ["clean", "cleaner", "clean"]
    # `clean`: at its turn and after its inputs were given; `cleaner`: at its turn, together with all above it
    assert counted.keys == {"suite": 4, "raw": 4, "clean": 3, "cleaner": 1}


def test_a_stage_that_another_run_has_made_meanwhile_is_not_made_again(finished: Lab) -> None:
    """Between the plan and the stage's turn."""
    lab = finished
    lab.edit(RECIPE, "ngram: 5", "ngram: 6")
    run = lab.run()
    planned = plan(run)
    assert outcomes(lab)["cleaner"] == "ran"
    assert [end.outcome for end in run_graph(run, planned=planned) if isinstance(end, Result)] == ["unchanged"] * 4
    assert lab.runs()[4:] == ["cleaner"]
