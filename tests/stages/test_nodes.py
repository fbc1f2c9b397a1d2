"""A job whose ranks run on several nodes, here two agents on one machine: same bits, and nobody waits for a node that is gone."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import models
import pytest
from waiting import deadline, until

from pedigree.configs.language.execution import Numerics
from pedigree.pipelines.jobs.processes import MARK, processes_of, send
from pedigree.stages.job.job import checkpoint_names

pytestmark = pytest.mark.slow
SFT = {"global_batch": 8, "epochs": 30, "max_length": 64, "dtype": "fp32", "optimizer": {"learning_rate": 1e-3}}
ENDS_S = 30
"""In which a job ends that has lost a node, next to the minutes that a collective may wait."""


@contextmanager
def started(folder, *roles):
    """An agent for each role, each the first process of a session, as on nodes of their own."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": models.IMPORTS, MARK: str(folder)}
    agents = []
    with (folder / "log.txt").open("a") as log:
        for role in roles:
            command = [sys.executable, "-m", "pedigree.stages.training.nodes", str(folder), role]
            agents.append(subprocess.Popen(command, cwd=folder, env=env, stdout=log, stderr=log, start_new_session=True))
    try:
        yield agents
    finally:
        models.kill_all(folder)
        for agent in agents:
            agent.wait()


@pytest.fixture(scope="module")
def args(policy, conversations):
    inputs = {"policy": {"policy": policy}, "data": {"data": conversations}}

    def of(nodes):
        return "sft", SFT, inputs, Numerics(threads=1, world_size=2, zero_stage=2, nodes=nodes)

    return of


def lose_a_node(folder, args, lose):
    """Two nodes train until `lose` is called with the agent of the second; the first ends soon, although collectives wait for minutes."""
    models.write_spec(folder, *args(2), checkpoint_every_steps=5)
    with started(folder, "lead", "join") as (lead, second):
        until(lambda: max(checkpoint_names(folder), default="") >= "step-000010", alive=lambda: lead.poll() is None)
        gone = lose(second)
        began = time.monotonic()
        until(lambda: lead.poll() is not None and not set(processes_of(folder)) - gone, ENDS_S)
        assert lead.wait() and time.monotonic() - began < deadline(ENDS_S)
    (folder / "done.json").unlink(missing_ok=True)


def freeze(agent):
    """Its connections stay open and nothing answers, as where a machine lost its power."""
    gone = {agent.pid, *(int(pid) for pid in children_of(agent.pid))}
    assert len(gone) == 2
    for pid in gone:
        send(pid, signal.SIGSTOP)
    return gone


def kill_alone(agent):
    """As by the kernel for lack of memory; its rank would live on."""
    os.kill(agent.pid, signal.SIGKILL)
    agent.wait()
    return set()


def kill_the_rank(agent):
    """As by the kernel for lack of memory; its agent lives on."""
    (rank,) = children_of(agent.pid)
    os.kill(int(rank), signal.SIGKILL)
    return set()


def children_of(pid):
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def losses(folder):
    return [json.loads(line)["loss"] for line in (folder / "curve.jsonl").read_text().splitlines()]


@pytest.mark.nightly  # by day, `test_every_launcher.py` loses a node, and `test_launcher.py` trains on two
def test_a_job_that_lost_a_node_goes_on_with_two_which_train_as_one_and_a_third_finds_no_place(tmp_path, args):
    lose_a_node(tmp_path / "job", args, freeze)
    assert "node 1 has been silent for" in (tmp_path / "job/log.txt").read_text()
    with started(tmp_path / "job", "lead") as (lead,):
        report = tmp_path / "job/progress.json"
        until(lambda: "waiting for" in str(json.loads(report.read_text())["doing"]))
        with started(tmp_path / "job", "join", "join") as others:
            assert lead.wait(deadline(120)) == 0
            assert sorted(other.wait(deadline(60)) for other in others) == [0, 3]
    done = models.told(tmp_path / "job")
    assert done["ok"] and done["resumed_from"] >= "step-000010" and not (tmp_path / "job/meeting.json").exists()
    kind, config, inputs, _ = args(1)
    assert models.run(tmp_path / "alone", kind, config, inputs, Numerics(threads=1))["ok"]
    assert losses(tmp_path / "job") == pytest.approx(losses(tmp_path / "alone"), rel=1e-3)


@pytest.mark.nightly
def test_a_rank_that_was_killed_on_one_node_ends_the_job_on_both(tmp_path, args):
    lose_a_node(tmp_path / "job", args, kill_the_rank)


@pytest.mark.nightly
def test_a_job_whose_agent_was_killed_goes_on_with_another_number_of_nodes(tmp_path, args):
    lose_a_node(tmp_path / "job", args, kill_alone)
    models.write_spec(tmp_path / "job", *args(1), {"allow_numerics_change": True})
    models.write_spec(tmp_path / "whole", *args(1))
    done, undisturbed = models.run_written([tmp_path / "job", tmp_path / "whole"])
    assert done["ok"] and done["resumed_from"] >= "step-000010" and done["content"] == undisturbed["content"]
    assert any(mark.startswith("numerics changed at step") and "nodes 2 -> 1" in mark for mark in done["marks"])
