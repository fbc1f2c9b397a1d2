"""Checks of `gpu_check.py` that start vLLM."""

import importlib.util
import threading
import time
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.gpu_models import SERVABLE, Failed, Setting, Skip, made_ids, made_policy
from pedigree.configs.language.execution import ENGINE_OVERHEAD, Numerics, Placement
from pedigree.configs.methods.training import Sampling
from pedigree.stages.sampling.engines import open_sampler
from pedigree.stages.sampling.sampler import Request, Sampler, write_version


def engine_memory(setting: Setting) -> dict[str, Any]:
    """vLLM takes no more than its share while another process allocates and frees beside it, frees all but `ENGINE_OVERHEAD` when it
    sleeps, and wakes with the weights that it had (level 1) or that were loaded (level 2): equal answers, of the version loaded."""
    if importlib.util.find_spec("vllm") is None:
        raise Skip("vllm is not installed")
    shape = setting.shape if setting.on_gpu else SERVABLE
    first, second = setting.folder / "engine", setting.folder / "engine-updated"
    for folder in (first, second):
        made_policy(shape, torch.device("cpu"), torch.bfloat16, "sdpa").model.save_pretrained(folder)
    write_version(second, 1)
    ranks = 2 if setting.on_gpu and torch.cuda.device_count() > 1 else 1
    numerics = Numerics.model_validate({"device": setting.device.type, "threads": 1, "tensor_parallel": ranks})
    placement = Placement(gpu_memory_utilization=0.3, sampler_memory_gb=0.1)
    requests = [Request(made_ids(40, number, shape.vocabulary), number) for number in range(8)]
    before, ready, marks = free_bytes(setting), threading.Event(), {}
    neighbor = threading.Thread(target=come_and_go, args=(setting, ready), daemon=True)
    with open_sampler(first, dtype="bf16", context=256, numerics=numerics, placement=placement, inline=False, sleeps=True) as sampler:
        neighbor.start()
        try:
            sampler.ready()
        finally:
            ready.set()
            neighbor.join()
        marks["awake"] = before - free_bytes(setting)
        answers = [sampler.generate(requests, Sampling(max_tokens=16), [])]
        sampler.sleep(1)
        marks["asleep"] = before - free_bytes(setting)
        sampler.wake()
        answers.append(sampler.generate(requests, Sampling(max_tokens=16), []))
        sampler.sleep(2)
        sampler.load(second)
        sampler.wake()
        answers.append(sampler.generate(requests, Sampling(max_tokens=16), []))
    told = [[(one.response_ids, one.logprobs) for one in some] for some in answers]
    if not told[0] == told[1] == told[2]:
        raise Failed("answers after sleep differ from those before")
    if [{one.version for one in some} for some in answers] != [{0}, {0}, {1}]:
        raise Failed("answers do not bear the version of the weights that were loaded")
    if not setting.on_gpu:
        return {"memory": "measured on GPUs only"}
    share = int(0.3 * torch.cuda.mem_get_info()[1])
    numbers = {f"{name}_gib": count / 2**30 for name, count in marks.items()} | {"share_gib": share / 2**30}
    if marks["awake"] > share or marks["asleep"] > ENGINE_OVERHEAD:
        raise Failed(f"vLLM takes more than its share awake, or than {ENGINE_OVERHEAD / 2**30:.0f} GiB asleep: {numbers}")
    return numbers


def free_bytes(setting: Setting) -> int:
    return torch.cuda.mem_get_info()[0] if setting.on_gpu else 0


def come_and_go(setting: Setting, ended: threading.Event) -> None:
    """Allocate and free 2 GiB of the GPU again and again."""
    while setting.on_gpu and not ended.wait(0.2):
        torch.empty(2 << 30, dtype=torch.uint8, device=setting.device)
        torch.cuda.empty_cache()


def engine_weights(setting: Setting) -> dict[str, Any]:
    """An engine that dropped its weights gets new ones from this process through memory, of the GPU and of the host: answers are those
    with the same weights from a folder, with the version that was sent."""
    if importlib.util.find_spec("vllm") is None:
        raise Skip("vllm is not installed")
    from pedigree.stages.rlvr.weight_transfer import GpuMemory, HostMemory, parts

    shape = setting.shape if setting.on_gpu else SERVABLE
    policy = made_policy(shape, setting.device, torch.bfloat16, "sdpa").model
    policy.save_pretrained(setting.folder / "weights")
    for parameter in policy.parameters():
        parameter.data.mul_(0.5)
    policy.save_pretrained(setting.folder / "weights-updated")
    sent = [(name, parameter.detach()) for name, parameter in policy.named_parameters()]
    trainer: Any = SimpleNamespace(rank=0, device=setting.device, from_all_ranks=lambda value: [value], weights=lambda: iter(sent))
    memories = {"gpu": partial(GpuMemory, opened=True), "host": HostMemory} if setting.on_gpu else {"host": HostMemory}
    requests = [Request(made_ids(40, number, shape.vocabulary), number) for number in range(8)]
    placement = Placement(gpu_memory_utilization=0.3, sampler_memory_gb=0.1)
    numerics = Numerics.model_validate({"device": setting.device.type, "threads": 1})
    given: dict[str, Any] = {"dtype": "bf16", "context": 256, "numerics": numerics, "placement": placement}
    with open_sampler(setting.folder / "weights", inline=False, sleeps=True, **given) as sampler:
        began = time.perf_counter()
        sampler.load(setting.folder / "weights-updated")
        numbers = {"folder_s": time.perf_counter() - began}
        expected = _told(sampler, requests)
        for number, (name, kind) in enumerate(memories.items(), 1):
            sampler.load(setting.folder / "weights")
            if _told(sampler, requests) == expected:
                raise Failed("other weights give the same answers")
            sampler.sleep(2)
            began = time.perf_counter()
            memory = kind(trainer)
            for part in parts(trainer, memory, number):
                sampler.update(part)
            memory.close()
            numbers[f"{name}_s"] = time.perf_counter() - began
            sampler.wake()
            if _told(sampler, requests) != expected:
                raise Failed(f"answers with weights through memory of the {name} differ from those with the same weights of a folder")
            if {one.version for one in sampler.generate(requests, Sampling(max_tokens=1), [])} != {number}:
                raise Failed("answers do not bear the version of the weights that were sent")
    return numbers


def _told(sampler: Sampler, requests: Sequence[Request]) -> list[tuple[list[int], list[float]]]:
    return [(one.response_ids, one.logprobs) for one in sampler.generate(requests, Sampling(max_tokens=16), [])]
