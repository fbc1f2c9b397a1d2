"""What numerics do on several ranks, measured: `python effects_lab.py POLICY CASES.json` prints one line of numbers per case.

As a script it runs on as many ranks as it is started with, and prints on the first.
"""

import gc
import hashlib
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import accumulate, count
from pathlib import Path
from typing import Any
from unittest import mock

import router_lab
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile

from pedigree.configs.language.execution import Numerics
from pedigree.configs.methods.optimizer import Optimizer
from pedigree.configs.methods.training import Lora
from pedigree.data.artifacts.artifacts import Artifact, open_artifact
from pedigree.stages.__main__ import main as run_stage
from pedigree.stages.core.batches import collate, document
from pedigree.stages.training import paces
from pedigree.stages.training.models import frozen, load_policy
from pedigree.stages.training.trainer import Trainer

DOCUMENTS = [(document([5, 6, 7], [8 + number, 9, 2]),) for number in range(4)]


@contextmanager
def kept_for_backward(weights: Iterator[nn.Parameter]) -> Iterator[Counter[str]]:
    """Bytes that autograd keeps between forward and backward, each storage once, weights left out."""
    found: Counter[str] = Counter()
    seen = {weight.untyped_storage().data_ptr() for weight in weights}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            found["bytes"] += storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        yield found


def trainer_of(
    policy: Artifact,
    fields: dict[str, Any],
    lora: bool = False,
    dtype: Any = "fp32",
    offload: bool = False,
    kind: type[Trainer] = Trainer,
    **optimizer: Any,
) -> Trainer:
    """`offload` is refused on CPUs, where all memory is the host's; DeepSpeed goes the same way there as with a GPU."""
    numerics = Numerics.model_validate({"threads": 1, **fields}).model_copy(update={"offload_optimizer": offload})
    module = load_policy(policy, numerics, Lora(rank=4) if lora else None)
    settings = Optimizer.model_validate({"learning_rate": 1e-3, "schedule": "constant", **optimizer})
    return kind(module, optimizer=settings, total_steps=3, dtype=dtype, numerics=numerics, seed=0)


def weights_of(trainer: Trainer) -> dict[str, Tensor]:
    """Name → trained weight in fp32, whole."""
    from deepspeed.utils import safe_get_full_fp32_param

    named = {name: parameter for name, parameter in trainer.engine.module.named_parameters() if parameter.requires_grad}
    if trainer.numerics.zero_stage == 0:
        return {name: parameter.detach().clone() for name, parameter in named.items()}
    return {name: safe_get_full_fp32_param(parameter).clone() for name, parameter in named.items()}


def digest(tensors: dict[str, Tensor]) -> str:
    return hashlib.sha256(b"".join(tensor.float().numpy().tobytes() for tensor in tensors.values())).hexdigest()


def decay(policy: Artifact, lora: bool = False, decayed: str = "matrices", **fields: Any) -> dict[str, Any]:
    """What is left of vectors and of matrices after a step with zero gradient, learning rate 0.5 and decay 0.1: 0.95 of what decays."""
    trainer = trainer_of(policy, fields, lora, learning_rate=0.5, weight_decay=0.1, decayed=decayed)
    before = weights_of(trainer)
    trainer.backward(0 * trainer.module(collate(DOCUMENTS, trainer.numerics, 0))[0].sum())
    trainer.step()
    left: dict[str, set[float]] = {"vectors": set(), "matrices": set()}
    for name, after in weights_of(trainer).items():
        shares = (after / before[name])[before[name] != 0]
        left["vectors" if after.ndim < 2 else "matrices"] |= set(shares.double().round(decimals=5).unique().tolist())
    trainer.close()
    return {kind: sorted(shares) for kind, shares in left.items()}


def parts(policy: Artifact, **fields: Any) -> dict[str, Any]:
    """Shares of gradients, moments and weights that this rank holds after two micro-batches and the step, and the exchanges in each."""
    trainer = trainer_of(policy, fields)
    optimizer, model = trainer.engine.optimizer, trainer.engine.module
    backward = []
    for _ in range(2):
        loss = -trainer.module(collate(DOCUMENTS, trainer.numerics, 0))[0].sum()
        backward.append(exchanges(lambda loss=loss: trainer.backward(loss)))
    parameters = list(model.parameters())
    by_group = {2: "all_grad_tensors", 3: "averaged_gradients"}.get(trainer.numerics.zero_stage)
    partitioned = [part for group in getattr(optimizer, by_group).values() for part in group or ()] if by_group else []
    gradients = [gradient for gradient in (*partitioned, *(parameter.grad for parameter in parameters)) if gradient is not None]
    held = {"gradients": elements(gradients)}
    step = exchanges(trainer.step)
    moments = [state["exp_avg"] for state in getattr(optimizer, "optimizer", optimizer).state.values()]
    whole = [parameter for parameter in parameters if not hasattr(parameter, "ds_tensor")]
    shares = [parameter.ds_tensor for parameter in parameters if hasattr(parameter, "ds_tensor")]
    gathered = [parameter for parameter in parameters if hasattr(parameter, "ds_tensor") and parameter.numel() and not parameter.ds_persist]
    held |= {"moments": elements(moments), "weights": elements(whole) + elements(shares) + elements(gathered)}
    all_elements = sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in parameters)
    trainer.close()
    return {"held": {part: count / all_elements for part, count in held.items()}, "exchanges": {"backward": backward, "step": step}}


def arriving(policy: Artifact, **fields: Any) -> dict[str, Any]:
    """A policy and its reference: what DeepSpeed is given whole, what this rank holds of the reference after use, and its results."""
    import deepspeed

    numerics = Numerics.model_validate({"threads": 1, **fields})
    whole: list[int] = []
    start = deepspeed.initialize

    def initialize(model: nn.Module, **given: Any) -> Any:
        whole.append(elements(parameter for parameter in model.parameters() if not hasattr(parameter, "ds_tensor")))
        return start(model=model, **given)

    with mock.patch.object(deepspeed, "initialize", initialize):
        trainer = trainer_of(policy, fields, dtype="bf16")
        reference = trainer.fixed(load_policy(policy, numerics))
    batch = collate(DOCUMENTS, numerics, 0)
    with torch.no_grad():
        found, expected = (module(batch)[0] for module in (reference, frozen(load_policy(policy, numerics), trainer.device, trainer.dtype)))
    parameters = list(getattr(reference, "module", reference).parameters())
    held = elements(getattr(parameter, "ds_tensor", parameter) for parameter in parameters)
    every = elements(load_policy(policy, numerics).parameters())
    trainer.close()
    return {"whole": [count / every for count in whole], "held": held / every, "equal": torch.equal(found, expected)}


def elements(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)


class LikeOnGpus(Trainer):
    """DeepSpeed reduces as with GPUs, in buckets as small as the largest weight allows. A CPU has no streams that could run at once."""

    def _config(self, numerics: Numerics, plain: bool, largest: int) -> dict[str, Any]:
        found = super()._config(numerics.model_copy(update={"device": "cuda"}), plain, largest)
        found["zero_optimization"]["reduce_bucket_size"] = largest
        return found


def updating(policy: Artifact, offload: bool = False, like_on_gpus: bool = False, **fields: Any) -> dict[str, Any]:
    """Two steps of two micro-batches in bf16, each rank with its own: gradient norms, the weights' hash, and how DeepSpeed works."""
    trainer = trainer_of(policy, fields, dtype="bf16", offload=offload, kind=LikeOnGpus if like_on_gpus else Trainer)
    norms = []
    for step in range(2):
        for number in range(2):
            units = [(document([5, 6, 7], [8 + 3 * trainer.rank + 2 * step + number, 9, 2]),)]
            trainer.backward(-trainer.module(collate(units, trainer.numerics, 0))[0].sum())
        norms.append(float(trainer.step().grad_norm))
    optimizer = trainer.engine.optimizer
    on_host = any(getattr(optimizer, name, False) is True for name in ("cpu_offload", "offload_optimizer"))
    found = {"norms": norms, "weights": digest(weights_of(trainer)), "on_host": on_host, "overlaps": trainer.engine.zero_overlap_comm()}
    trainer.close()
    return found


def footprint(policy: Artifact, dtype: str, documents: int = 16, length: int = 64, **fields: Any) -> dict[str, int]:
    """Bytes of all tensors: between steps, and at most within one, by torch's own account; tokens of a pass."""
    gc.collect()
    before = living_bytes()  # what earlier cases have left behind
    trainer = trainer_of(policy, fields, dtype=dtype)
    units = [(document([5, 6, 7], [8 + number % 9] * (length - 3)),) for number in range(documents)]
    gc.disable()

    def step() -> None:
        for _ in range(2):
            trainer.backward(-trainer.module(collate(units, trainer.numerics, 0))[0].mean())
        trainer.step()

    step()
    gc.collect()
    between = living_bytes() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        step()
    gc.enable()
    assert seen.profiler is not None
    events: Any = seen.profiler.kineto_results.events()
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()) if event.name() == "[memory]"]
    trainer.close()
    return {"between": between, "most": between + max(accumulate(changes)), "tokens": documents * length}


def living_bytes() -> int:
    """Of all tensors that Python knows, each storage once."""
    storages = (thing.untyped_storage() for thing in gc.get_objects() if isinstance(thing, Tensor))
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def waits(policy: Artifact, **fields: Any) -> dict[str, Any]:
    """Rank 0 works longer than the default group allows a collective, and the other waits for its word and its end."""
    trainer = trainer_of(policy, fields)
    group: Any = torch.distributed.distributed_c10d._get_default_group()
    timeout = group._get_backend(torch.device("cpu")).options._timeout
    torch.distributed.distributed_c10d._set_pg_timeout(timedelta(seconds=0.5), group)

    def work() -> Any:
        time.sleep(1.5 * (trainer.rank == 0))  # only time ends a collective of the default group
        return {"rolled": "out"} if trainer.rank == 0 else None

    before = group._get_sequence_number_for_group()
    heard = [trainer.broadcast(work()), trainer.broadcast(work())]
    work()
    trainer.barrier()
    used = group._get_sequence_number_for_group() - before
    torch.distributed.distributed_c10d._set_pg_timeout(timeout, group)
    (other,) = trainer.sum(float(trainer.rank == 1 and heard == [{"rolled": "out"}] * 2))
    trainer.close()
    return {"heard": other, "collectives": used, "timeout_s": timeout.total_seconds()}


def slowed(policy: Artifact, **fields: Any) -> dict[str, Any]:
    """Two micro-batches with a second between any two looks at the clock on rank 0, and two on rank 1: what the ranks learn of it, and the
    collectives of each exchange of metrics."""
    trainer, ticks = trainer_of(policy, fields), count()
    with mock.patch.object(paces, "perf_counter", lambda: float(next(ticks) * (1 + trainer.rank))):
        for _ in range(2):
            trainer.backward(-trainer.module(collate(DOCUMENTS, trainer.numerics, 0))[0].sum())
    made = [exchanges(lambda: trainer.totals({"loss": 1.0}, {"norm": trainer.rank})) for _ in range(2)]
    found, totals = trainer.paces.slowest(), trainer.totals({"loss": 1.0}, {"norm": trainer.rank})
    trainer.step()
    trainer.close()
    return {"found": found, "totals": totals, "exchanges": made}


def head_gathers(policy: Artifact, **fields: Any) -> dict[str, list[Any]]:
    """Passes over answers of varying lengths: how often each gathers the output head, and whether DeepSpeed knew its modules in advance."""
    trainer = trainer_of(policy, fields)
    model, coordinator = trainer.engine.module.model, trainer.engine.optimizer.parameter_offload.get_param_coordinator()
    head, gathered = model.get_output_embeddings().weight, Counter[int]()
    for parameter in model.parameters():

        def gather(parameters: list[nn.Parameter], own: Callable[..., Any] = parameter.all_gather_coalesced, **settings: Any) -> Any:
            gathered.update(map(id, parameters))
            return own(parameters, **settings)

        parameter.all_gather_coalesced = gather
    found: dict[str, list[Any]] = {"head": [], "complete": []}
    for number in range(12):
        batch = collate([(document([5, 6, 7], [8 + number] * (20 + 9 * (number % 5))),)], trainer.numerics, 0)
        gathered.clear()
        loss = -trainer.module(batch)[0].sum()
        trainer.backward(loss)
        found["complete"].append(coordinator.is_complete_trace())
        found["head"].append(gathered[id(head)])
        trainer.step()
    trainer.close()
    return found


def shared_rows(policy: Artifact, **fields: Any) -> dict[str, float]:
    """A row that ranks compute together, against the same row on each of them: largest differences of log-probabilities and of gradients,
    each relative to the largest, and the share of what a rank keeps for the backward pass. Of 83 tokens, with a prompt that answers share;
    the loss couples the tokens of a document."""
    prompt = [5 + number % 7 for number in range(20)]
    answers = tuple(document(prompt, [9 + (number * factor) % 90 for number in range(length)]) for factor, length in ((3, 11), (7, 17)))
    units = [answers, (document([6, 7], [8 + number for number in range(33)]),)]
    found = []
    for size in (1, 2):
        trainer = trainer_of(policy, {**fields, "sequence_parallel": size})
        batch = collate(units, trainer.numerics, 0)
        with kept_for_backward(trainer.engine.module.parameters()) as kept:
            logps_N = trainer.module(batch)[0]
        loss = nn.functional.softplus(-batch.sum_by_document(logps_N) / 50).sum()
        gradients: dict[str, Tensor] = {}
        for name, part in trainer.engine.module.named_parameters():
            part.register_hook(lambda gradient, name=name, into=gradients: into.update({name: gradient.clone()}))
        trainer.backward(loss * size / 2)  # ranks that compute alone both count the row
        for gradient in gradients.values():
            torch.distributed.all_reduce(gradient)
        norm = torch.as_tensor(float(trainer.step().grad_norm))
        found.append(({"logps": logps_N.detach()}, {**gradients, "norm": norm}, kept["bytes"]))
        trainer.close()
    (alone, whole, most), (together, shared, share) = found
    assert len(whole) > 10

    def difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
        return max(((one[name] - other[name]).abs().max() / other[name].abs().max()).item() for name in other)

    return {"logps": difference(together, alone), "gradients": difference(shared, whole), "kept": share / most}


def exchanges(work: Callable[[], Any]) -> int:
    """Collectives of torch that a call makes in any thread."""
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        work()
    return sum(event.count for event in seen.key_averages() if event.key.startswith("c10d::"))


def routers(policy: Artifact, mixture: str, **fields: Any) -> dict[str, Any]:
    """A step of a mixture of experts in place of the policy: what it counts, and a sketch of its gradient."""
    found = router_lab.trained(open_artifact(Path(mixture)), Numerics.model_validate({"threads": 1, **fields}))
    return {**found, "gradient": router_lab.sketch(found["gradient"])}


def job(policy: Artifact, folder: str) -> str:
    """Runs the job that `write_spec` has written into a folder; returns the folder."""
    run_stage(Path(folder))
    return folder


if __name__ == "__main__":
    policy = open_artifact(Path(sys.argv[1]))
    for name, fields in json.loads(Path(sys.argv[2]).read_text()):
        found = globals()[name](policy, **fields)
        if torch.distributed.get_rank() == 0:
            print("numbers " + json.dumps(found), flush=True)
