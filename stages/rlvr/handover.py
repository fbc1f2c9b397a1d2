"""Engines beside a trainer, and the GPUs that both share: whose memory it is, and when.

    rank 0:  start vLLM · sleep(1) ─┐                       wake · roll out · sleep(level) ─┐            ┌─ load · wake …
    all:                            └─ meet · build trainer · …                             └─ update ·  └─ export · release

vLLM sizes its memory and fills it before any rank touches its GPU. It sleeps while the trainer computes; before it wakes, all ranks return
the memory that torch caches. On a CPU none of this happens: both allocate host memory as they need it, and start at the same time.
"""

import gc
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
from torch.distributed.rendezvous import rendezvous

from pedigree.configs.language.execution import Numerics
from pedigree.configs.methods.policy_gradient import Ppo
from pedigree.configs.methods.training import Rlvr
from pedigree.stages.job.job import Job
from pedigree.stages.sampling.engines import Fleet, WarmEngines, open_engines, open_sampler
from pedigree.stages.sampling.sampler import Sampler, engine_settings
from pedigree.stages.training.trainer import Trainer

UNLIMITED = timedelta(days=365)
"""A rank that dies ends the wait of the others, by torchrun."""
MEETING = "rlvr/sampler-ready"


def shares_gpus(numerics: Numerics) -> bool:
    """Whether sampler and trainer take turns with GPU memory."""
    return numerics.device == "cuda"


def takes_turns(config: Rlvr, numerics: Numerics) -> bool:
    """As `shares_gpus`, unless engines have GPUs of their own."""
    return shares_gpus(numerics) and config.asynchronous is None


@contextmanager
def rollout_sampler(model_folder: Path, config: Rlvr, job: Job) -> Iterator[Fleet | None]:
    """The engines on rank 0, None elsewhere. On GPUs they are ready and asleep."""
    if job.rank != 0:
        if takes_turns(config, job.numerics):
            start_before_trainer(None, job)
        yield None
        return
    placement = job.placement
    settings: dict[str, Any] = {
        "dtype": config.dtype,
        "context": config.max_prompt_length + config.longest_answer,
        "numerics": job.numerics,
        "placement": placement,
        "adapter_rank": config.lora.rank if config.lora else None,
        "sleeps": takes_turns(config, job.numerics),
        "head": config.head,
        "in_flight": config.asynchronous is not None and config.asynchronous.in_flight,
    }
    with ExitStack() as opened:
        if placement.engines == 1 and config.asynchronous is None:
            inline = placement.sampler_process == "inline"
            engines: Sequence[Sampler] = [opened.enter_context(open_sampler(model_folder, inline=inline, **settings))]
        else:
            ranks = job.numerics.ranks_per_node if config.asynchronous else 0
            ahead = opened.enter_context(WarmEngines(job.numerics, placement.engines, ranks))
            engines = opened.enter_context(open_engines(engine_settings(model_folder, **settings), placement.engines, ahead))
        fleet = Fleet(engines)
        if takes_turns(config, job.numerics):
            start_before_trainer(fleet, job)
        yield fleet


def start_before_trainer(sampler: Fleet | None, job: Job) -> None:
    """Before any rank touches its GPU: wait until the sampler is ready, and put it to sleep; called on all ranks."""
    if shares_gpus(job.numerics):
        if sampler:
            job.doing("starting vLLM")
            sampler.ready()
            sampler.sleep(1)
        meet_rank_0(job.rank)


def meet_rank_0(rank: int) -> None:
    """Wait until rank 0 calls this too. No process group exists yet, and building one has a limit of minutes: a store does without."""
    if "RANK" not in os.environ:
        return
    store, *_ = next(rendezvous("env://", timeout=UNLIMITED))
    if rank == 0:
        store.set(MEETING, "")
    else:
        store.wait([MEETING], UNLIMITED)


def release(trainer: Trainer) -> None:
    """Return the memory that torch caches, and wait until all ranks have; called on all ranks before the sampler allocates memory."""
    if shares_gpus(trainer.numerics):
        gc.collect()
        torch.cuda.empty_cache()
        trainer.barrier()


@contextmanager
def awake(sampler: Fleet | None, trainer: Trainer, level: Literal[1, 2]) -> Iterator[None]:
    """Lend the sampler the memory for a block; called on all ranks, of which only rank 0 has a sampler."""
    release(trainer)
    shared = sampler if shares_gpus(trainer.numerics) else None
    if shared:
        shared.wake()
    yield
    if shared:
        shared.sleep(level)


def sleep_level(config: Rlvr, step: int) -> Literal[1, 2]:
    """Level of `Sampler.sleep` during a step's update: 2 drops the weights if new ones follow; 1 keeps them in host memory if only adapters
    or the value model change."""
    warmup = config.algorithm.critic.warmup_steps if isinstance(config.algorithm, Ppo) else 0
    return 1 if config.lora is not None or step < warmup else 2
