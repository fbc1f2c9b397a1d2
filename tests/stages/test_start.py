"""What a job loads before its first step: libraries that it does not need cost seconds of every start."""

import json
import os
import subprocess
import sys
from pathlib import Path

import models
import pytest

from pedigree.configs.language.kinds import KINDS

ROOT = Path(__file__).resolve().parents[2]
DATA_STAGES = [kind for kind, declaration in KINDS.items() if declaration.engine == "none"]
COUNTING = {"overoptimization", "prepare_data", "decontaminate", "pair", "best_answers", "select_prompts", "constrain"}
"""Data stages that compute with arrays: bootstrap samples, the order of rows, hashes of n-grams, where rows lie."""


def loaded_after(script: str) -> set[str]:
    """All modules of a fresh process after `script`."""
    command = [sys.executable, "-c", f"{script}\nimport json, sys; print(json.dumps(sorted(sys.modules)))"]
    environment = {**os.environ, "PYTHONPATH": models.IMPORTS, "OMP_NUM_THREADS": "1"}
    answer = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr[-3000:]
    return set(json.loads(answer.stdout.splitlines()[-1]))


@pytest.mark.parametrize("counting", [False, True])
def test_jobs_that_handle_rows_load_no_engine(counting):
    modules = [f"pedigree.stages.{kind}.run" for kind in DATA_STAGES if (kind in COUNTING) == counting]
    heavy = {"torch", "transformers", "datasets", "s3fs"} | (set() if counting else {"numpy"})
    assert modules and not loaded_after(f"import pedigree.stages.__main__, {', '.join(modules)}") & heavy


@pytest.mark.parametrize("kind", ["sample", "evaluate", "judge", "synthesize"])
def test_a_job_that_asks_an_engine_leaves_torch_to_the_engine(kind, policy):
    loaded = loaded_after(f"""
from pathlib import Path
import pedigree.stages.__main__, pedigree.stages.{kind}.run
from pedigree.data.chat.chat import Chat
from pedigree.stages.sampling.sampler import model_context
folder = Path({str(policy.payload)!r})
assert Chat(folder).prompt([{{"role": "user", "content": "What is 1 + 1?"}}]) and model_context(folder) == 128
""")
    assert "transformers" in loaded and not loaded & {"torch", "vllm", "accelerate", "great_expectations", "s3fs"}


@pytest.mark.slow
def test_a_job_that_trains_loads_no_compiler_no_sampler_and_no_hub(tmp_path):
    """torch's compiler alone is a quarter of the start; DeepSpeed would load it for an optimizer that nobody asked for."""
    folder = models.tiny_policy(tmp_path).path
    loaded = loaded_after(f"""
from pathlib import Path
import pedigree.stages.__main__, pedigree.stages.sft.run, pedigree.stages.preference_train.run, pedigree.stages.reward_model.run, torch
from pedigree.configs.language.execution import Numerics
from pedigree.configs.methods.training import Optimizer
from pedigree.data.artifacts.artifacts import open_artifact
from pedigree.data.chat.chat import Chat
from pedigree.stages.training.models import load_policy
from pedigree.stages.training.trainer import Trainer
policy, numerics = open_artifact(Path({str(folder)!r})), Numerics(threads=1)
Chat(policy.payload)
Trainer(load_policy(policy, numerics), optimizer=Optimizer(learning_rate=1e-4), total_steps=1, dtype="bf16", numerics=numerics, seed=0)
assert torch.compile.__module__ == "torch"
import deepspeed
assert deepspeed.comm.comm.cdb.shm_comm_op is None  # else the first job on a machine would compile it for minutes
""")
    assert "deepspeed" in loaded and "transformers" in loaded
    assert not loaded & {"torch._inductor.compile_fx", "vllm", "datasets", "redis", "great_expectations", "s3fs"}
