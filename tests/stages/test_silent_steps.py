"""No stretch of training is as long as a job may be silent: it reports between micro-batches."""

import json
from dataclasses import replace

import policy_lab
import pytest
from models import a_job, arithmetic, config_of, dataset, sums_or_not_known

from pedigree.configs.language.execution import Numerics
from pedigree.stages.job import job as jobs
from pedigree.stages.job.job import checkpoint_names
from pedigree.stages.preference_train import run as preference_train
from pedigree.stages.reward_model import run as reward_model
from pedigree.stages.sft import run as sft
from pedigree.stages.training.models import load_policy

pytestmark = pytest.mark.slow
FIELDS = {"global_batch": 8, "max_steps": 1, "max_length": 64, "dtype": "fp32", "optimizer": {"learning_rate": 1e-4}}
SMALL = Numerics(threads=1, micro_batch_tokens=32)


@pytest.fixture
def reports(monkeypatch):
    """What jobs report beside their steps, were every moment the next one to do so."""
    found, doing = [], jobs.Job.doing
    monkeypatch.setattr(jobs, "HEARTBEAT_INTERVAL_S", 0.0)
    monkeypatch.setattr(jobs.Job, "doing", lambda job, what, *more: (found.append((what, *more)), doing(job, what, *more))[1])
    return found


@pytest.mark.parametrize(("module", "kind", "more"), [
    (sft, "sft", {}),
    (preference_train, "preference_train", {"loss": {"type": "dpo"}}),
    (preference_train, "preference_train", {"loss": {"type": "kto"}}),
    (reward_model, "reward_model", {"holdout": 0.3}),
], ids=["sft", "dpo", "kto", "reward_model"])  # fmt: skip
def test_a_step_of_many_micro_batches_reports_between_them(tmp_path, policy, reports, module, kind, more):
    rows = arithmetic(32) if kind == "sft" else sums_or_not_known(32)
    data = dataset(tmp_path / "data", "conversation" if kind == "sft" else "preference", rows)
    job = a_job(tmp_path / "job", SMALL, checkpoint_every_steps=1)
    port = "data" if kind == "sft" else "preferences"
    module.run(config_of(kind, **FIELDS, **more), {"policy": {"p": policy}, port: {"d": data}}, job)
    assert sum(what == "training" for what, *_ in reports) >= 4
    if kind == "reward_model":
        scored = [report[1] for report in reports if report[0] == "scoring pairs"]
        assert len(scored) >= 3 and scored == sorted(scored) and scored[0] == 0
        assert checkpoint_names(job.folder) == ["step-000001"]  # what follows the last step takes long, too
        assert json.loads((job.checkpoints / "step-000001" / "state.json").read_text())["state"]["step"] == 1


@pytest.mark.parametrize("algorithm", [{"type": "grpo"}, {"type": "ppo"}], ids=["grpo", "ppo"])
def test_an_update_of_many_micro_batches_reports_between_them(policy, algorithm):
    seen = []

    def steady(micro_batches):
        for one in micro_batches:
            seen.append(one)
            yield one

    made = replace(policy_lab.learner(policy_lab.algorithm(algorithm["type"]), policy, SMALL), steady=steady)
    made.router_loss._steady = steady
    try:
        policy_lab.steps(made, policy_lab.made_answers(load_policy(policy, SMALL)), 1)
    finally:
        policy_lab.close(made)
    micro_batches = {id(one) for one in seen}
    assert len(micro_batches) > 4 and len(seen) >= 2 * 4
