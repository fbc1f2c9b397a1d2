"""GPUs that trainer and sampler share, on a CPU, where vLLM frees nothing: the order of what is asked of it."""

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from typing import Any

import pytest
from models import IMPORTS, a_job, config_of, curve, dataset, run
from rollout_lab import engine
from test_rlvr import FIELDS, ONE_THREAD, PPO, inputs, policy, prompt  # noqa: F401  fixtures
from waiting import deadline

from pedigree.stages.rlvr import handover
from pedigree.stages.rlvr import run as rlvr
from pedigree.stages.rlvr.handover import shares_gpus, sleep_level
from pedigree.stages.sampling.sampler import Child, Generation


@pytest.fixture
def shared(monkeypatch):
    """As on a GPU."""
    monkeypatch.setattr(handover, "shares_gpus", lambda numerics: True)


@pytest.mark.slow
def test_the_sampler_sleeps_while_the_trainer_computes_and_wakes_with_its_weights(inputs, tmp_path, monkeypatch, shared):  # noqa: F811
    """Its first sleep is before the trainer is built; weights are awake before the KV cache."""
    orders: list[Any] = []
    ask, make_learner = Child._ask, rlvr.make_learner

    def asked(self, order, *given):
        orders.append((order["do"], order["level"]) if "level" in order else order["do"])
        return ask(self, order, *given)

    def made(*given):
        orders.append("trainer")
        return make_learner(*given)

    monkeypatch.setattr(Child, "_ask", asked)
    monkeypatch.setattr(rlvr, "make_learner", made)
    fields = FIELDS | {"steps": 2}
    assert run(tmp_path / "job", "rlvr", fields, inputs, ONE_THREAD)["ok"]
    a_step = ["wake", "stream", ("sleep", 2)]
    assert orders == [("sleep", 1), "trainer", *a_step, "update", *a_step]
    assert all(row["logprob_gap"] < 1e-4 for row in curve(a_job(tmp_path / "job")))


def test_weights_that_were_dropped_are_loaded_again_also_after_a_step_without_update(inputs, tmp_path, monkeypatch, shared):  # noqa: F811
    """All rewards are equal and there is no KL: no gradient. A sampler that wakes without weights refuses."""
    done: list[Any] = []
    asked: list[Any] = []
    always = engine(
        lambda *_: Generation([5, 2], [-5.0, -5.0], "stop"),
        asked,
        ready=lambda: done.append("ready"),
        wake=lambda: done.append("wake"),
        sleep=lambda level: done.append(("sleep", level)),
        update=lambda part: done.append(("load", part.version)),
    )
    monkeypatch.setattr(handover, "open_sampler", lambda *_, **__: nullcontext(always))
    hopeless = [prompt(number, verifier={"name": "arithmetic", "answer": "123456789"}) for number in range(8)]
    given = inputs | {"prompts": {"pool": dataset(tmp_path / "pool", "prompt", hopeless)}}
    fields = FIELDS | {"steps": 2, "algorithm": {"type": "grpo", "kl": None}, "max_logprob_gap": 100.0}
    told = run(tmp_path / "job", "rlvr", fields, given, ONE_THREAD)
    assert "none of 2 steps had a group with unequal rewards" in told["message"]
    a_step = ["wake", ("sleep", 2)]
    assert done == ["ready", ("sleep", 1), *a_step, ("load", 0), *a_step] and len(asked) == 2


def test_weights_that_no_step_replaces_stay_in_host_memory():
    ppo = config_of("rlvr", **PPO)  # the policy is trained from the second step on
    assert [sleep_level(ppo, step) for step in (0, 1, 2)] == [1, 2, 2]
    assert sleep_level(config_of("rlvr", **FIELDS), 0) == 2
    assert sleep_level(config_of("rlvr", **FIELDS | {"lora": {"rank": 4}}), 0) == 1
    assert not shares_gpus(ONE_THREAD)


@pytest.mark.slow
def test_ranks_wait_for_the_first_without_a_process_group_and_build_one_afterwards(tmp_path):
    script = tmp_path / "meeting.py"
    script.write_text(
        """
import json, os, sys, time
from pathlib import Path
import torch
from pedigree.stages.rlvr.handover import meet_rank_0
ready, rank = Path(sys.argv[1]), int(os.environ["RANK"])
if rank == 0:
    time.sleep(2)  # in which another rank that did not wait would go on
    ready.touch()
meet_rank_0(rank)
found = [rank, ready.exists(), torch.distributed.is_initialized()]
torch.distributed.init_process_group("gloo")
torch.distributed.barrier()
Path(f"{ready}-{rank}").write_text(json.dumps(found))
"""
    )
    command = [sys.executable, "-m", "pedigree.stages.training.ranks", "--standalone", "--nproc-per-node", "2", str(script)]
    environment = os.environ | {"PYTHONPATH": IMPORTS, "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, str(tmp_path / "ready")], check=True, env=environment, cwd=tmp_path, timeout=deadline(120))
    assert [json.loads((tmp_path / f"ready-{rank}").read_text()) for rank in (0, 1)] == [[0, True, False], [1, True, False]]
