"""Whether the training engine is right and fast on this GPU, on a machine with little more than torch and transformers.

    python -m benchmarks.gpu_check FOLDER [--device cuda|cpu] [--only NAME,NAME] [--peak TFLOPS]

writes FOLDER/gpu_check.json, prints a table, and exits 1 if a check failed. What cannot be had here (no DeepSpeed, no GPU memory) is
named and skipped. On a CPU everything is tiny: it shows that the checks run, and claims nothing. Models are Llama-shaped with made
weights and go through the modules that the stages train with (`stages/training/logprobs.py`, `stages/core/batches.py`,
`stages/training/feed.py`, `stages/training/kernels.py`, `stages/training/recomputation.py`).
"""

import argparse
import gc
import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks.gpu_engine import engine_memory, engine_weights
from benchmarks.gpu_models import SHAPES, TINY, Failed, Setting, Shape, Skip, made_ids, made_policy
from pedigree.configs.language.execution import Numerics
from pedigree.data.artifacts.provenance import hardware
from pedigree.stages.core.batches import Unit, collate, document
from pedigree.stages.training import attention
from pedigree.stages.training.feed import GlobalBatch, PreparedMicroBatch, feed
from pedigree.stages.training.kernels import fuse
from pedigree.stages.training.logprobs import PolicyModule
from pedigree.stages.training.recomputation import recompute_layers

PEAK_TFLOPS = {"H200": 989.0, "H100 NVL": 835.0, "H100 PCIe": 756.0, "H100": 989.0, "A100": 312.0, "L40S": 362.0, "B200": 2250.0}
"""Dense bf16 without sparsity, as the vendor states it; the first name found in the device's decides."""
PACKAGES = ("torch", "transformers", "deepspeed", "vllm", "peft", "liger_kernel")


Kernels = Literal["torch", "compiled", "liger"]


@dataclass(frozen=True)
class Outcome:
    """Result of one check."""

    check: str
    status: str
    """`passed`, `failed` or `skipped`."""
    why: str = ""
    numbers: dict[str, Any] = field(default_factory=dict)


def numerics_of(kernel: str) -> Numerics:
    return Numerics.model_validate({"attention": kernel, "micro_batch_tokens": 1 << 20})


def made_units(lengths: Sequence[tuple[int, int, int]], vocabulary: int) -> list[Unit]:
    """(tokens of the prompt, tokens of an answer, number of answers) each."""
    units = []
    for number, (prompt, answer, count) in enumerate(lengths):
        asked = made_ids(prompt, number, vocabulary)
        units.append(tuple(document(asked, made_ids(answer + place, 1000 * number + place + 1, vocabulary)) for place in range(count)))
    return units


def log_probs(policy: PolicyModule, units: Sequence[Unit], numerics: Numerics, device: torch.device) -> torch.Tensor:
    with torch.no_grad():
        return policy(collate(units, numerics, 0).to(device))[0].double().cpu()


def packing(setting: Setting) -> dict[str, Any]:
    """Packed bf16 log-probs, with prompts shared or not, are as near to fp32 as those of each document alone."""
    size = 8 if setting.on_gpu else 1
    units = made_units([(40 * size, 60 * size, 1), (30 * size, 20 * size, 4), (11 * size, 90 * size, 2)], setting.shape.vocabulary)
    alone = [(doc,) for unit in units for doc in unit]
    exact = made_policy(setting.shape, setting.device, torch.float32, "sdpa")
    truth = torch.cat([log_probs(exact, [unit], numerics_of("sdpa"), setting.device) for unit in alone])
    del exact
    numbers = {}
    for kernel in ("varlen", "sdpa"):
        policy = made_policy(setting.shape, setting.device, torch.bfloat16, kernel)
        numerics = numerics_of(kernel)
        single = torch.cat([log_probs(policy, [unit], numerics, setting.device) for unit in alone])
        for name, found in (("alone", single), ("packed", log_probs(policy, units, numerics, setting.device))):
            numbers[f"{kernel}_{name}_mean_error"] = float((found - truth).abs().mean())
            numbers[f"{kernel}_{name}_largest_error"] = float((found - truth).abs().max())
    for kernel in ("varlen", "sdpa"):
        packed, lone = numbers[f"{kernel}_packed_mean_error"], numbers["sdpa_alone_mean_error"]
        if not packed <= 1.5 * lone + 1e-4:
            raise Failed(f"{kernel}: packed log-probs are {packed:.3g} from fp32 on average, single documents {lone:.3g}")
    return numbers


def fp32_head(setting: Setting) -> dict[str, Any]:
    """Log-probs through an fp32 head are those of exact products of its bf16 operands; seconds forward and backward beside a bf16 head."""
    units = made_units([(1, 4096 if setting.on_gpu else 96, 1)], setting.shape.vocabulary)
    numerics, numbers = numerics_of("varlen"), {}
    policy = made_policy(setting.shape, setting.device, torch.bfloat16, "varlen")
    batch = collate(units, numerics, 0).to(setting.device)
    with torch.no_grad():
        hidden_NH = policy.model.model(
            input_ids=batch.input_ids_BT, position_ids=batch.position_ids_BT, spans=batch.spans, use_cache=False
        ).last_hidden_state[0, batch.places_N]
        logits_NV = hidden_NH.double() @ policy.model.lm_head.weight.double().t()
        truth = logits_NV.log_softmax(-1).gather(-1, batch.targets_N[:, None])[:, 0]
        del logits_NV
    for head in ("model", "fp32"):
        policy.head = head
        numbers[f"{head}_mean_error"] = float((log_probs(policy, units, numerics, setting.device) - truth.cpu()).abs().mean())
        numbers[f"{head}_seconds"] = timed(lambda: policy(batch)[0].sum().backward(), setting, 5)
    if not numbers["fp32_mean_error"] <= 1e-4:
        raise Failed(f"log-probs through an fp32 head are {numbers['fp32_mean_error']:.3g} from exact ones on average: expected 1e-4")
    return {**numbers, "ratio": numbers["fp32_seconds"] / numbers["model_seconds"]}


def chunked_loss(setting: Setting) -> dict[str, Any]:
    """The loss over chunks of the vocabulary projection has the gradient of the whole one, and far less memory."""
    tokens, chunk = (16384, 1024) if setting.on_gpu else (96, 16)
    shape = SHAPES[3] if setting.on_gpu else TINY
    shape = Shape(**{**asdict(shape), "layers": 1, "hidden": min(1024, shape.hidden), "heads": 4, "kv_heads": 4, "head_dim": 16})
    units = made_units([(1, tokens - 1, 1)], shape.vocabulary)
    numerics, peaks, gradients = numerics_of("varlen"), [], []
    for size in (chunk, tokens):
        policy = made_policy(shape, setting.device, torch.bfloat16 if setting.on_gpu else torch.float32, "varlen", size)
        batch = collate(units, numerics, 0).to(setting.device)
        before = 0
        if setting.on_gpu:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        (-policy(batch)[0].sum() / tokens).backward()
        setting.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before if setting.on_gpu else None)
        gradients.append(torch.cat([parameter.grad.float().flatten() for parameter in policy.parameters()]))
        del policy, batch
    apart = float((gradients[0] - gradients[1]).norm() / gradients[1].norm())
    if not apart < (0.02 if setting.on_gpu else 1e-5):
        raise Failed(f"the gradient of the chunked loss is {apart:.3g} (relative) from that of the whole")
    numbers = {"tokens": tokens, "vocabulary": shape.vocabulary, "gradient_apart": apart}
    if peaks[0] is None or peaks[1] is None:
        return {**numbers, "memory": "measured on GPUs only"}
    numbers |= {"chunked_gib": peaks[0] / 2**30, "whole_gib": peaks[1] / 2**30, "ratio": peaks[1] / peaks[0]}
    if not peaks[0] < 0.5 * peaks[1]:
        raise Failed(f"chunked {numbers['chunked_gib']:.2f} GiB, whole {numbers['whole_gib']:.2f} GiB: expected less than half")
    return numbers


def variable_length_attention(setting: Setting) -> dict[str, Any]:
    """Time attention of a packed row document by document, forward and backward, against sdpa under a mask."""
    count, length = (16, 1024) if setting.on_gpu else (4, 24)
    shape = setting.shape
    units = made_units([(length // 2, length - length // 2, 1)] * count, shape.vocabulary)
    seconds = {}
    for kernel in ("varlen", "sdpa"):
        policy = made_policy(shape, setting.device, torch.bfloat16, kernel)
        batch = collate(units, numerics_of(kernel), 0).to(setting.device)
        seconds[kernel] = timed(lambda policy=policy, batch=batch: policy(batch)[0].sum().backward(), setting, 5)
        del policy, batch
    ratio = seconds["sdpa"] / seconds["varlen"]
    if setting.on_gpu and ratio < 1:
        raise Failed(f"variable-length attention is slower than sdpa under a mask: ratio {ratio:.2f}")
    return {"documents": count, "length": length, "varlen_s": seconds["varlen"], "sdpa_s": seconds["sdpa"], "ratio": ratio}


def kinds_of_attention(setting: Setting) -> dict[str, Any]:
    """Windows, soft caps and sinks in a packed row with shared prompts, in bf16 on the device, beside fp32 on the CPU."""
    shape, size = setting.shape, 16 if setting.on_gpu else 1
    rows = made_units([(30 * size, 20 * size, 3), (11 * size, 40 * size, 1)], shape.vocabulary)
    spans = collate(rows, numerics_of("varlen"), 0).spans
    assert spans is not None
    tokens, random = sum(span.length for span in spans.all), torch.Generator().manual_seed(0)
    made = [torch.randn(tokens, heads, shape.head_dim, generator=random) for heads in (shape.heads, shape.kv_heads, shape.kv_heads)]
    exact = [tensor.to(torch.bfloat16).float().requires_grad_() for tensor in made]
    given = [tensor.detach().to(setting.device, torch.bfloat16).requires_grad_() for tensor in exact]
    sinks = torch.randn(shape.heads, generator=random)
    numbers = {}
    for name, asked in {
        "plain": {}, "window": {"window": 7 * size}, "softcap": {"softcap": 5.0}, "sinks": {"sinks_H": sinks},
        "all": {"window": 7 * size, "softcap": 5.0, "sinks_H": sinks},
    }.items():  # fmt: skip
        there = {key: value.to(setting.device) if isinstance(value, torch.Tensor) else value for key, value in asked.items()}
        truth = attention.attend(*exact, spans, attention.Rule(shape.head_dim**-0.5, **asked))
        moved = spans.each(lambda tensor: tensor.to(setting.device))
        found = attention.attend(*given, moved, attention.Rule(shape.head_dim**-0.5, **there))
        wanted = [truth.detach(), *torch.autograd.grad(truth.square().sum(), exact)]
        results = [found.detach(), *torch.autograd.grad(found.float().square().sum(), given)]
        errors = [float((one.float().cpu() - other).norm() / other.norm()) for one, other in zip(results, wanted, strict=True)]
        numbers[f"{name}_error"], numbers[f"{name}_gradient_error"] = errors[0], max(errors[1:])
        if not max(errors) < 0.03:
            raise Failed(f"{name}: attention or its gradient is {max(errors):.3g} (relative) from fp32")
    return numbers


def soft_caps_and_sinks(setting: Setting) -> dict[str, Any]:
    """Heads of Gemma 2 and gpt-oss in bf16: results and gradients beside whole matrices of fp32 scores, without their memory."""
    size = 64 if setting.on_gpu else 1
    spans = collate(made_units([(16 * size, 16 * size, 3), (1, 64 * size - 1, 1)], 100), numerics_of("varlen"), 0).spans
    assert spans is not None
    spans, random = spans.each(lambda tensor: tensor.to(setting.device)), torch.Generator().manual_seed(0)
    tokens, numbers = sum(span.length for span in spans.all), {}
    for name, heads, key_heads, width, window, softcap in (("gemma2", 8, 4, 256, 24 * size, 50.0), ("gpt_oss", 64, 8, 64, 2 * size, None)):
        sizes = [(tokens, count, width) for count in (heads, key_heads, key_heads)] + ([] if softcap else [(heads,)])
        given = [torch.randn(*each, generator=random).to(setting.device, torch.bfloat16).requires_grad_() for each in sizes]
        rule, results = attention.Rule(width**-0.5, window, softcap, None if softcap else given[3]), []
        for kind, attention_of in (("flex", attention.attend), ("whole", attention._call_by_call)):

            def step(attention_of: Any = attention_of, rule: Any = rule, given: Any = given) -> list[torch.Tensor]:
                found = attention_of(*given[:3], spans, rule)
                return [found, *torch.autograd.grad(found.float().square().sum(), given)]

            numbers[f"{name}_{kind}_s"] = timed(step, setting, 3)
            if setting.on_gpu:
                torch.cuda.reset_peak_memory_stats()
            results.append([one.detach().float().cpu() for one in step()])
            numbers[f"{name}_{kind}_gib"] = torch.cuda.max_memory_allocated() / 2**30 if setting.on_gpu else None
        error = max(float((one - other).norm() / other.norm()) for one, other in zip(*results, strict=True))
        numbers[f"{name}_error"] = error
        if not error < 0.03:
            raise Failed(f"{name}: attention or its gradient is {error:.3g} (relative) from fp32")
        if setting.on_gpu and not numbers[f"{name}_flex_gib"] < 0.5 * numbers[f"{name}_whole_gib"]:
            raise Failed(f"{name}: {numbers[f'{name}_flex_gib']:.2f} GiB, whole scores {numbers[f'{name}_whole_gib']:.2f}: expected half")
    return numbers


def timed(step: Callable[[], object], setting: Setting, rounds: int) -> float:
    """Median seconds after two rounds of warming up."""
    taken = []
    for number in range(rounds + 2):
        setting.synchronize()
        began = time.perf_counter()
        step()
        setting.synchronize()
        if number >= 2:
            taken.append(time.perf_counter() - began)
    return sorted(taken)[len(taken) // 2]


class Master:
    """AdamW on fp32 copies of bf16 weights, or on the weights themselves if the copies do not fit."""

    def __init__(self, policy: PolicyModule, copies: bool) -> None:
        self.weights = [parameter for parameter in policy.parameters() if parameter.requires_grad]
        self.copies = [weight.detach().float() for weight in self.weights] if copies else self.weights
        self.adamw = torch.optim.AdamW(self.copies, lr=1e-5, fused=True)

    def step(self) -> None:
        if self.copies is not self.weights:
            for copy, weight in zip(self.copies, self.weights, strict=True):
                copy.grad, weight.grad = weight.grad.float() if weight.grad is not None else None, None
        self.adamw.step()
        self.adamw.zero_grad(set_to_none=True)
        if self.copies is not self.weights:
            with torch.no_grad():
                torch._foreach_copy_(self.weights, self.copies)

    def state(self) -> dict[str, Any]:
        return {"copies": self.copies, "adamw": self.adamw.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        with torch.no_grad():
            torch._foreach_copy_(self.copies, state["copies"])
            torch._foreach_copy_(self.weights, self.copies)
        self.adamw.load_state_dict(state["adamw"])


def checkpoint_exactness(setting: Setting) -> dict[str, Any]:
    """Two steps, a checkpoint and two more steps give the same bits as loading the checkpoint and taking the last two."""
    units = made_units([(16, 48, 1)] * 4, setting.shape.vocabulary)
    numerics = numerics_of("varlen")

    def begin() -> tuple[PolicyModule, Master]:
        policy = made_policy(setting.shape, setting.device, torch.bfloat16, "varlen")
        return policy, Master(policy, copies=True)

    def train(policy: PolicyModule, optimizer: Master, steps: Sequence[int]) -> None:
        for step in steps:
            (-policy(collate([units[step]], numerics, 0).to(setting.device))[0].mean()).backward()
            optimizer.step()

    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        policy, optimizer = begin()
        train(policy, optimizer, [0, 1])
        path = setting.folder / "checkpoint.pt"
        torch.save(optimizer.state(), path)
        train(policy, optimizer, [2, 3])
        expected = [copy.clone() for copy in optimizer.copies]
        del policy, optimizer
        policy, optimizer = begin()
        optimizer.load(torch.load(path, map_location=setting.device, weights_only=True))
        train(policy, optimizer, [2, 3])
    finally:
        torch.use_deterministic_algorithms(deterministic)
        (setting.folder / "checkpoint.pt").unlink(missing_ok=True)
    wrong = sum(not torch.equal(first, second) for first, second in zip(expected, optimizer.copies, strict=True))
    if wrong:
        raise Failed(f"{wrong} of {len(expected)} tensors differ after resuming")
    return {"tensors": len(expected)}


def no_waiting(setting: Setting) -> dict[str, Any]:
    """Between the first pass of a step and the last, the host never waits for the device, and passes are prepared ahead."""
    size, steps = (64, 4) if setting.on_gpu else (1, 2)
    numerics = Numerics.model_validate({"micro_batch_tokens": 256 * size})
    lengths = [(40 * size, 24 * size, 2), (1, 200 * size, 1), (90 * size, 30 * size, 3)]
    policy = made_policy(setting.shape, setting.device, torch.bfloat16, "varlen", 64 * size).train()
    units, seconds = made_units(lengths, setting.shape.vocabulary), []
    began = time.perf_counter()
    collate([unit for unit in units if len(unit) > 1], numerics, 0)
    prepared_s = time.perf_counter() - began
    batches = [GlobalBatch(units, lambda indices: {"labels": torch.ones(len(indices))})] * steps
    with feed(batches, 0, 1, numerics, 0, setting.device) as fed:
        for number in range(steps):
            setting.synchronize()
            began = time.perf_counter()
            if setting.on_gpu and number:  # the first step loads kernels
                torch.cuda.set_sync_debug_mode("error")
            try:
                sums = [trained_pass(policy, micro_batch) for micro_batch in fed.micro_batches()]
            except RuntimeError as error:
                raise Failed(f"a pass waits for the device: {error}") from error
            finally:
                if setting.on_gpu:
                    torch.cuda.set_sync_debug_mode("default")
            asked_s = time.perf_counter() - began
            total = float(torch.stack(sums).sum())
            seconds.append((asked_s, time.perf_counter() - began))
    if not math.isfinite(total):
        raise Failed(f"the sum of log-probs is {total}")
    asked_s, whole_s = seconds[-1]
    return {"passes": len(sums), "step_s": whole_s, "asked_after_s": asked_s, "collate_s": prepared_s}


def trained_pass(policy: PolicyModule, micro_batch: PreparedMicroBatch) -> torch.Tensor:
    logps_N, entropy_N = policy(micro_batch.batch, entropy=True)
    weights_N = micro_batch.extras["labels"].sum().expand(len(logps_N))
    (-(weights_N * logps_N).sum() * micro_batch.weight).backward()
    return (logps_N.detach() + 0 * entropy_N).sum().double()


def deepspeed_zero(setting: Setting) -> dict[str, Any]:
    """Three steps under ZeRO 1, 2 and 3 through our `Trainer` give one curve."""
    if importlib.util.find_spec("deepspeed") is None:
        raise Skip("deepspeed is not installed")
    curves = {}
    for stage in (1, 2, 3):
        command = [sys.executable, "-m", "benchmarks.gpu_check", str(setting.folder), "--device", setting.device.type, "--zero", str(stage)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise Failed(f"ZeRO {stage} ended with {done.returncode}: {done.stderr[-600:]}")
        curves[stage] = json.loads(done.stdout.splitlines()[-1])
    apart = max(abs(curves[stage][step] - curves[1][step]) for stage in (2, 3) for step in range(3))
    if not apart < 0.02:
        raise Failed(f"losses differ by {apart:.3g} between ZeRO stages: {curves}")
    return {"losses": curves, "largest_difference": apart}


def zero_curve(setting: Setting, stage: int) -> list[float]:
    """Losses of three steps under one ZeRO stage, in this process."""
    from pedigree.configs.methods.training import Optimizer
    from pedigree.stages.training.trainer import Trainer

    numerics = Numerics.model_validate({"device": setting.device.type, "zero_stage": stage, "threads": 1})
    policy = made_policy(setting.shape, torch.device("cpu"), torch.float32, numerics.attention)
    trainer = Trainer(policy, optimizer=Optimizer(learning_rate=1e-4), total_steps=3, dtype="bf16", numerics=numerics, seed=0)
    losses = []
    for step in range(3):
        batch = collate(made_units([(16, 48 + step, 1)], setting.shape.vocabulary), numerics, 0).to(trainer.device)
        loss = -trainer.module(batch)[0].mean()
        trainer.backward(loss)
        trainer.step()
        losses.append(loss.item())
    return losses


def parameters_of(shape: Shape) -> int:
    """Parameters without the input embedding; a tied one counts as the output's."""
    width, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    layer = shape.hidden * (2 * width + 2 * kv) + 3 * shape.hidden * shape.ffn + 2 * shape.hidden
    return shape.layers * layer + shape.hidden + shape.hidden * shape.vocabulary


def flops_per_token(shape: Shape, length: int) -> float:
    """6 N + 6 L d s: matrix products forward and backward, and causal attention over documents of `length` tokens (half of 12 L d s);
    d is heads × their size. What is computed twice because of gradient checkpointing does not count."""
    return 6 * parameters_of(shape) + 6 * shape.layers * shape.heads * shape.head_dim * length


def utilisation(setting: Setting) -> dict[str, Any]:
    """Model FLOP utilisation (MFU) of full training steps: tok/s × (6 N + 6 L d s) / peak."""
    cases = [(shape, length) for shape in SHAPES for length in (4096, 16384)] if setting.on_gpu else [(TINY, 32)]
    numbers: dict[str, Any] = {"formula": "tok/s * (6 N + 6 L d s) / peak", "peak_tflops": setting.peak_tflops, "cases": []}
    for shape, length in cases:
        numbers["cases"].append(measured_case(setting, shape, length))
        print("  ", json.dumps(numbers["cases"][-1]), flush=True)
    if setting.on_gpu and not any("tokens_per_second" in case for case in numbers["cases"]):
        raise Failed("no model could be trained")
    return numbers


def measured_case(setting: Setting, shape: Shape, length: int) -> dict[str, Any]:
    """One model at one document length, with as little recomputation as fits."""
    case: dict[str, Any] = {"model": shape.name, "length": length, "parameters": parameters_of(shape)}
    copies = True
    if setting.on_gpu:  # weights, gradients, fp32 gradients and copies, two moments
        copies = 20 * parameters_of(shape) < 0.8 * torch.cuda.get_device_properties(setting.device).total_memory
    for recompute in (False, True):
        try:
            speed = trained_tokens_per_second(setting, shape, length, copies, recompute)
        except torch.cuda.OutOfMemoryError:
            continue
        finally:
            gc.collect()
            if setting.on_gpu:
                torch.cuda.empty_cache()
        tflops = speed * flops_per_token(shape, length) / 1e12
        mfu = tflops / setting.peak_tflops if setting.peak_tflops else None
        adamw = "fp32 copies" if copies else "bf16 weights"
        return {**case, "tokens_per_second": speed, "tflops": tflops, "mfu": mfu, "gradient_checkpointing": recompute, "adamw": adamw}
    return {**case, "skipped": "out of memory even with gradient checkpointing"}


def trained_tokens_per_second(
    setting: Setting, shape: Shape, length: int, copies: bool, recompute: bool, kernels: Kernels = "torch"
) -> float:
    """Time whole steps: forward, backward, optimizer."""
    tokens = 16384 if setting.on_gpu else 64
    units = made_units([(1, length - 1, 1)] * (tokens // length), shape.vocabulary)
    policy = fused_policy(setting, shape, kernels).eval()
    if recompute:
        recompute_layers(policy.model)
    optimizer = Master(policy, copies)
    batch = collate(units, numerics_of("varlen"), 0).to(setting.device)

    def step() -> None:
        (-policy(batch)[0].sum() / tokens).backward()
        optimizer.step()

    return tokens / timed(step, setting, 5)


def fused_policy(setting: Setting, shape: Shape, kernels: Kernels) -> PolicyModule:
    """A policy in bf16 whose norms, rotary embeddings and MLPs use these kernels."""
    policy = made_policy(shape, setting.device, torch.bfloat16, "varlen")
    fuse(policy, Numerics.model_validate({"device": setting.device.type, "kernels": kernels}))
    return policy


def compiled_kernels(setting: Setting) -> dict[str, Any]:
    """Numerics `kernels: compiled` against `torch`."""
    return against_torch(setting, "compiled")


def liger_kernels(setting: Setting) -> dict[str, Any]:
    """Numerics `kernels: liger` against `torch`."""
    if not setting.on_gpu:
        raise Skip("kernels liger run on GPUs only")
    if importlib.util.find_spec("liger_kernel") is None:
        raise Skip("liger-kernel is not installed")
    return against_torch(setting, "liger")


def against_torch(setting: Setting, kernels: Kernels) -> dict[str, Any]:
    """Log-probs and gradients in bf16 are as near to fp32 as with torch's own kernels; and the ratio of trained tokens per second."""
    size, length = (8, 2048) if setting.on_gpu else (1, 32)
    units = made_units([(40 * size, 60 * size, 1), (30 * size, 20 * size, 4), (11 * size, 90 * size, 2)], setting.shape.vocabulary)
    batch = collate(units, numerics_of("varlen"), 0).to(setting.device)

    def computed(policy: PolicyModule) -> tuple[torch.Tensor, torch.Tensor]:
        logps = policy(batch)[0]
        total = (logps * torch.linspace(-1, 2, len(logps), device=setting.device)).sum()
        slopes = torch.autograd.grad(total, tuple(policy.parameters()))
        return logps.detach().double(), torch.cat([slope.float().flatten() for slope in slopes])

    logps, gradient = computed(made_policy(setting.shape, setting.device, torch.float32, "varlen"))
    chosen: tuple[Kernels, ...] = ("torch", kernels)
    numbers: dict[str, Any] = {}
    for name in chosen:
        found, slope = computed(fused_policy(setting, setting.shape, name))
        numbers[f"{name}_mean_error"] = float((found - logps).abs().mean())
        numbers[f"{name}_gradient_apart"] = float((slope - gradient).norm() / gradient.norm())
        numbers[f"{name}_tokens_per_second"] = trained_tokens_per_second(setting, setting.shape, length, True, False, name)
    for what in ("mean_error", "gradient_apart"):
        if not numbers[f"{kernels}_{what}"] <= 1.5 * numbers[f"torch_{what}"] + 1e-4:
            raise Failed(f"{what}: {numbers[f'{kernels}_{what}']:.3g} from fp32, torch's kernels {numbers[f'torch_{what}']:.3g}")
    return {**numbers, "ratio": numbers[f"{kernels}_tokens_per_second"] / numbers["torch_tokens_per_second"]}


CHECKS: dict[str, Callable[[Setting], dict[str, Any]]] = {
    check.__name__: check
    for check in (
        packing,
        fp32_head,
        chunked_loss,
        variable_length_attention,
        kinds_of_attention,
        soft_caps_and_sinks,
        compiled_kernels,
        liger_kernels,
        checkpoint_exactness,
        no_waiting,
        deepspeed_zero,
        engine_memory,
        engine_weights,
        utilisation,
    )
}


def outcome(name: str, setting: Setting) -> Outcome:
    try:
        return Outcome(name, "passed", numbers=CHECKS[name](setting))
    except Skip as error:
        return Outcome(name, "skipped", str(error))
    except Failed as error:
        return Outcome(name, "failed", str(error))
    except Exception as error:  # the boundary of a check: the others are made all the same
        return Outcome(name, "failed", f"{type(error).__name__}: {error}")
    finally:
        gc.collect()
        if setting.on_gpu:
            torch.cuda.empty_cache()


def peak_of(device: torch.device) -> float | None:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((peak for part, peak in PEAK_TFLOPS.items() if all(word in name for word in part.split())), None)


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def report(outcomes: Sequence[Outcome], setting: Setting) -> None:
    """Write the JSON file and print a table."""
    versions = {package: installed(package) for package in PACKAGES}
    print(f"\n{'check':28} {'status':8} numbers")
    for found in outcomes:
        short = {name: round(value, 5) for name, value in found.numbers.items() if isinstance(value, float) and math.isfinite(value)}
        print(f"{found.check:28} {found.status:8} {found.why or ', '.join(f'{name} {value}' for name, value in short.items())}")
    absent = [package for package, found in versions.items() if found is None]
    print(f"not installed: {', '.join(absent) or 'nothing'}")
    made = {"hardware": hardware(), "versions": versions, "date": datetime.now(UTC).date().isoformat(), "device": str(setting.device)}
    path = setting.folder / "gpu_check.json"
    path.write_text(json.dumps({**made, "outcomes": [asdict(found) for found in outcomes]}, indent=1) + "\n")
    print(f"written to {path}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check")
    parser.add_argument("folder", type=Path, nargs="?", help="where gpu_check.json goes")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", default="", help=f"checks, comma-separated: {', '.join(CHECKS)}")
    parser.add_argument("--peak", type=float, help="dense bf16 TFLOP/s of the device, where it is not known here")
    parser.add_argument("--zero", type=int, choices=(1, 2, 3), help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device: give --device cpu to try the checks' code on a CPU")
    names = [name for name in given.only.split(",") if name] or list(CHECKS)
    unknown = sorted(set(names) - set(CHECKS))
    if unknown:
        parser.error(f"there is no check {', '.join(unknown)}: choose from {', '.join(CHECKS)}")
    device = torch.device(given.device)
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # as jobs have it
    folder = given.folder or Path(tempfile.mkdtemp(prefix="gpu-check-"))
    folder.mkdir(parents=True, exist_ok=True)
    setting = Setting(device, given.peak or peak_of(device), folder)
    if given.zero:
        print(json.dumps(zero_curve(setting, given.zero)))
        return 0
    outcomes = []
    for name in names:
        print(f"{name} ...", flush=True)
        outcomes.append(outcome(name, setting))
    report(outcomes, setting)
    return int(any(found.status == "failed" for found in outcomes))


if __name__ == "__main__":
    sys.exit(main())
