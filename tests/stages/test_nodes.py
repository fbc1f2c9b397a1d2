"""A job whose ranks run on several nodes, here two agents on one machine: same bits, and nobody waits for a node that is gone."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

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


@pytest.fixture(scope="module")
def on_one_node(tmp_path_factory, args):
    return models.run(tmp_path_factory.mktemp("one"), *args(1))


def test_a_job_that_lost_a_node_ends_soon_and_goes_on_with_another_number_of_nodes(tmp_path, args, on_one_node):
    """The agent of the second node is killed alone, as by the kernel for lack of memory; its rank would live on."""
    models.write_spec(tmp_path, *args(2), checkpoint_every_steps=5)
    with started(tmp_path, "lead", "join") as (lead, second):
        until(lambda: max(checkpoint_names(tmp_path), default="") >= "step-000010", alive=lambda: lead.poll() is None)
        os.kill(second.pid, signal.SIGKILL)
        second.wait()
        began = time.monotonic()
        until(lambda: second.poll() is not None and lead.poll() is not None and not list(processes_of(tmp_path)), ENDS_S)
        assert time.monotonic() - began < deadline(ENDS_S)
    (tmp_path / "done.json").unlink(missing_ok=True)
    done = models.run(tmp_path, *args(1), {"allow_numerics_change": True})
    assert done["ok"] and done["resumed_from"] and done["content"] == on_one_node["content"]
    assert any(mark.startswith("numerics changed at step") and "nodes 2 -> 1" in mark for mark in done["marks"])


def test_two_nodes_train_as_one_and_a_third_finds_no_place(tmp_path, args, on_one_node):
    models.write_spec(tmp_path, *args(2))
    with started(tmp_path, "lead") as (lead,):
        report = tmp_path / "progress.json"
        until(lambda: report.exists() and "waiting for" in str(json.loads(report.read_text())["doing"]))
        with started(tmp_path, "join", "join") as others:
            assert lead.wait(deadline(120)) == 0
            assert sorted(other.wait(deadline(60)) for other in others) == [0, 3]
    assert models.told(tmp_path)["content"] == on_one_node["content"]


def test_a_frozen_node_is_gone(tmp_path, args):
    """Its connections stay open and nothing answers, as where a machine lost its power."""
    models.write_spec(tmp_path, *args(2))
    with started(tmp_path, "lead", "join") as (lead, second):
        until(lambda: (tmp_path / "curve.jsonl").exists(), alive=lambda: lead.poll() is None)
        theirs = [second.pid, *(pid for pid in processes_of(tmp_path) if os.getppid() and _parent(pid) == second.pid)]
        for pid in theirs:
            send(pid, signal.SIGSTOP)
        assert len(theirs) == 2 and lead.wait(deadline(ENDS_S)) == 1
        until(lambda: not set(processes_of(tmp_path)) - set(theirs))
    assert "node 1 has not been heard for" in (tmp_path / "log.txt").read_text()


def _parent(pid):
    with open(f"/proc/{pid}/stat") as stream:
        return int(stream.read().rpartition(")")[2].split()[1])
