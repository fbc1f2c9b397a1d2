"""Interface to DeepSpeed: gradients over ranks and micro-batches, optimizer steps, exact state, export.

Contract for every loss: `backward(loss)` with loss = (sum over this rank's micro-batch) / (count of the GLOBAL
batch) makes the step's gradient the SUM over micro-batches and ranks. DeepSpeed averages over ranks, so the loss is multiplied
by their number; accumulation is ours (`managed_gradient_accumulation: false`), in fp32.
"""

import argparse
import atexit
import math
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_SKIP_CUDA_CHECK", "1")

import torch
from torch import Tensor, nn

from pedigree.configs.base.frozen import Dtype
from pedigree.configs.language.execution import Numerics
from pedigree.configs.methods.training import Lora, Optimizer
from pedigree.data.chat.chat import Chat
from pedigree.stages.job.failures import NotFinite, StageError
from pedigree.stages.training.adapters import adapter_weights, plain_weights, write_adapters
from pedigree.stages.training.feed import Feed, GlobalBatch, feed
from pedigree.stages.training.kernels import settle
from pedigree.stages.training.logprobs import PolicyModule, RewardModule
from pedigree.stages.training.models import frozen
from pedigree.stages.training.paces import Paces
from pedigree.stages.training.ranks import PATIENCE
from pedigree.stages.training.recomputation import recompute_layers

TORCH_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
FORWARD_SETTINGS = ("train_micro_batch_size_per_gpu", "bf16", "zero_optimization", "steps_per_print")
"""DeepSpeed settings of an engine without optimizer."""
REDUCE_BUCKET = 500_000_000
"""Elements that ranks reduce at a time, DeepSpeed's default."""


@dataclass(frozen=True)
class StepStats:
    learning_rate: float
    grad_norm: Tensor | float
    """Global L2 norm before clipping, on the device; `Trainer.totals` reads it along with the other metrics."""


class MetricSums:
    """Metrics summed over micro-batches. The sums stay on the device, because reading one would wait for all queued work."""

    def __init__(self) -> None:
        self._names: tuple[str, ...] = ()
        self._sums_K: Tensor | None = None

    def add(self, values: Mapping[str, Tensor], weight: float = 1.0) -> None:
        """Add scalars, in fp64; every micro-batch must have the same names."""
        if not values:
            return
        row_K = torch.stack(list(values.values())).detach().double() * weight
        assert self._names in ((), tuple(values)), f"{list(values)} after {list(self._names)}"
        self._names, self._sums_K = tuple(values), row_K if self._sums_K is None else self._sums_K + row_K

    def sums(self) -> dict[str, Tensor]:
        return {} if self._sums_K is None else dict(zip(self._names, self._sums_K, strict=True))


def learning_rate(step: int, total_steps: int, optimizer: Optimizer) -> float:
    """Learning rate of a 0-based step, as transformers computes it (`optimization.py`): linear warm-up from 0 over w = `warmup_steps` or
    ⌈ratio · total⌉ steps, η · step/w, then the schedule, which would reach 0 after the last step."""
    given = optimizer.warmup_steps
    warmup = math.ceil(optimizer.warmup_ratio * total_steps) if given is None else given
    decay = max(1, total_steps - warmup)
    if step < warmup:
        share = step / warmup
    elif optimizer.schedule == "linear":
        share = (total_steps - step) / decay
    else:
        share = 1.0 if optimizer.schedule == "constant" else 0.5 * (1 + math.cos(math.pi * ((step - warmup) / decay)))
    return optimizer.learning_rate * share


class Trainer:
    """One model under DeepSpeed on this rank."""

    def __init__(
        self,
        module: PolicyModule | RewardModule,
        *,
        optimizer: Optimizer,
        total_steps: int,
        dtype: Dtype,
        numerics: Numerics,
        seed: int,
        name: str = "engine",
    ) -> None:
        """Take ownership of `module` (whose `.model` is a transformers model): dtype, device, optimizer state.

        `name` is the folder of its state in a checkpoint, unique among the job's models.

        Raises:
            StageError: the numerics are not available: no GPU, or bf16 with ZeRO 0 (where DeepSpeed has no fp32 accumulation); or warm-up
                leaves nothing to train.
        """
        if numerics.device == "cuda" and not torch.cuda.is_available():
            raise StageError("device is cuda, but torch finds no GPU: use another execution profile")
        if dtype == "bf16" and numerics.zero_stage == 0:
            raise StageError("bf16 with zero_stage 0 has no fp32 gradient accumulation: set zero_stage to 1, 2 or 3")
        if total_steps == 1 and learning_rate(0, 1, optimizer) == 0:
            raise StageError("the only update is in warm-up, with learning rate 0: plan more updates, or set warmup_steps: 0")
        backend = "nccl" if numerics.device == "cuda" else "gloo"
        os.environ["DS_ACCELERATOR"] = numerics.device
        alone = "RANK" not in os.environ
        with _distributed_environment():
            deepspeed = _deepspeed()
            if not torch.distributed.is_initialized():
                atexit.register(_leave)
                if alone:  # without a port: another starting job could take it between check and use
                    store = torch.distributed.HashStore()  # pyright: ignore[reportPrivateImportUsage]
                    torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
            deepspeed.init_distributed(dist_backend=backend, timeout=PATIENCE, verbose=False)
        self.rank, self.world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        if self.world_size != numerics.world_size:
            raise StageError(f"{self.world_size} ranks are running, but the execution profile specifies {numerics.world_size}")
        _waiting_group()
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.device = torch.device("cuda", local_rank) if numerics.device == "cuda" else torch.device("cpu")
        if numerics.device == "cpu":
            torch.set_num_threads(numerics.threads)
        torch.manual_seed(seed * 1000003 + self.rank)
        torch.use_deterministic_algorithms(numerics.deterministic)  # an operation without a deterministic form raises
        self.optimizer_config, self.total_steps, self.dtype = optimizer, total_steps, TORCH_DTYPES[dtype]
        self.numerics, self.name = numerics, name
        self.steps = 0
        """Planned updates so far, performed or skipped: the position in the learning-rate schedule."""
        self._grad_norm: Tensor | float = 0.0
        module.eval()  # no dropout or router noise: policy and reference must be the same function of their weights
        if numerics.gradient_checkpointing:
            recompute_layers(module.model)
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self.has_frozen = len(trained) < len(list(module.parameters()))
        adamw = torch.optim.AdamW(
            parameter_groups(trained, optimizer),
            lr=optimizer.learning_rate,
            betas=(optimizer.beta1, optimizer.beta2),
            eps=optimizer.epsilon,
            fused=True,
        )
        plain = numerics.zero_stage == 0
        if plain:  # DeepSpeed reports no norm for stage 0
            adamw.register_step_pre_hook(self._clip)
        largest = max(parameter.numel() for parameter in trained)
        finer = finer_than_bf16(module) if self.dtype == torch.bfloat16 else {}
        self.engine = self._engine_of(module, self._config(numerics, plain, largest), adamw)
        for parameter in module.parameters():  # DeepSpeed derives fp32 master weights from the bf16 ones: restore the lost precision
            if id(parameter) in finer:
                set_master_weight(parameter, finer[id(parameter)])
        self.module = self.engine
        settle(self.engine.module, trained, numerics, self.device)
        self.paces = Paces(self.engine.module, numerics)

    def fixed(self, module: PolicyModule) -> Any:
        """A model for use without gradient next to the trained one, in the same dtype; ZeRO-3 partitions it over the ranks, too."""
        module = frozen(module, torch.device("cpu"), self.dtype)
        if self.numerics.zero_stage < 3:
            return module.to(self.device)
        config = self._config(self.numerics.model_copy(update={"offload_optimizer": False}), False, 0)
        return self._engine_of(module, {name: config[name] for name in FORWARD_SETTINGS})

    def _engine_of(self, module: nn.Module, config: dict[str, Any], optimizer: torch.optim.Optimizer | None = None) -> Any:
        """DeepSpeed's engine for a module on the host, whose parameters get our dtype; for ZeRO-3, they move to the device one by one, and
        each rank keeps its share."""
        deepspeed = _deepspeed()
        for parameter in module.parameters():
            parameter.data = parameter.data.to(self.dtype)
        with _distributed_environment(), _uncompiled():
            if self.numerics.zero_stage == 3:
                deepspeed.zero.Init(module=module, config_dict_or_path=config, dtype=self.dtype)
                for buffer in module.buffers():  # DeepSpeed moves parameters alone
                    buffer.data = buffer.data.to(self.device)
            return deepspeed.initialize(model=module, optimizer=optimizer, config=config)[0]

    def _config(self, numerics: Numerics, plain: bool, largest: int) -> dict[str, Any]:
        """`largest`: elements of the largest trained weight."""
        overlaps = numerics.device == "cuda" and numerics.zero_stage >= 2  # at 1, DeepSpeed requires accumulation of its own
        # ZeRO-2 frees a gradient beyond its bucket while the stream that reduces it may still read it
        bucket = max(REDUCE_BUCKET, largest) if overlaps and numerics.zero_stage == 2 else REDUCE_BUCKET
        return {
            "train_micro_batch_size_per_gpu": 1,
            "managed_gradient_accumulation": False,
            "gradient_clipping": 0.0 if plain else self.optimizer_config.max_grad_norm or 0.0,  # 0 disables DeepSpeed's clipping
            # each bf16 gradient is added to the fp32 one and freed as soon as it is computed
            "bf16": {"enabled": self.dtype == torch.bfloat16, "immediate_grad_update": True},
            "data_types": {"grad_accum_dtype": "fp32"},
            "communication_data_type": "fp32",  # the default, bf16, would round the sum
            "zero_optimization": {
                "stage": numerics.zero_stage,
                "overlap_comm": overlaps,
                "reduce_bucket_size": bucket,
                "contiguous_gradients": True,
                "reduce_scatter": True,
                **({"offload_optimizer": {"device": "cpu", "pin_memory": numerics.device == "cuda"}} if numerics.offload_optimizer else {}),
            },
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,  # torch's fused AdamW works on CPUs too, and needs no compiler
            "steps_per_print": 10**9,
        }

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradient of this micro-batch's part of the global loss; see the module's contract."""
        self.engine.backward(loss * self.world_size, scale_wrt_gas=False)

    def go_to(self, step: int) -> None:
        """Set the index of the next planned update, so that the learning rate follows the plan when updates are skipped."""
        self.steps = step

    def step(self) -> StepStats:
        """Reduce, clip and apply the gradient accumulated since the last step."""
        rate = learning_rate(self.steps, self.total_steps, self.optimizer_config)
        for group in self.engine.optimizer.param_groups:
            group["lr"] = rate
        self.engine.step()
        self.steps += 1
        norm = self.engine.get_global_grad_norm()
        return StepStats(rate, norm if norm is not None else self._grad_norm)

    def _clip(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._grad_norm = nn.utils.clip_grad_norm_(parameters, self.optimizer_config.max_grad_norm or math.inf)

    def refuse_not_finite(self, step: int, loss: float, grad_norm: float = 0.0) -> None:
        """End the job before NaN or infinite weights reach a checkpoint.

        Raises:
            NotFinite: the step's loss or gradient norm is NaN or infinite.
        """
        for name, value in (("loss", loss), ("norm of the gradient", grad_norm)):
            if not math.isfinite(value):
                rate = self.optimizer_config.learning_rate
                raise NotFinite(f"the {name} of step {step} is {value}: lower optimizer.learning_rate ({rate})")

    def feed(self, batches: Iterable[GlobalBatch], pad_id: int) -> AbstractContextManager[Feed]:
        """This rank's micro-batches, prefetched; pass the same global batches on all ranks."""
        return feed(batches, self.rank, self.world_size, self.numerics, pad_id, self.device)

    def totals(self, sums: Mapping[str, Tensor | float], largest: Mapping[str, Tensor | float] | None = None) -> dict[str, float]:
        """All-reduce metrics, sums and maxima, in one exchange and one wait for the device. Pass values that are equal on all ranks as
        maxima. Ranks that compute rows together each have the sums of these rows, which count once. The ranks' paces come along."""
        largest = largest or {}
        names = [*sums, *largest]
        every_RK = self._every(torch.stack([self._scalar(value) for value in (*sums.values(), *largest.values(), self.paces.own)]))
        sums_RK, largest_RK, paces_R1 = every_RK.split([len(sums), len(largest), 1], 1)
        found = torch.cat([sums_RK.sum(0) / self.numerics.sequence_parallel, largest_RK.amax(0), paces_R1[:, 0]]).tolist()
        self.paces.exchanged(found[len(names) :])
        return dict(zip(names, found, strict=False))

    def summed(self, values_K: Tensor) -> Tensor:
        """Values summed over ranks, left on the device."""
        found_K = self._every(values_K).sum(0)
        return found_K if self.numerics.sequence_parallel == 1 else found_K / self.numerics.sequence_parallel

    def gathered(self, values_N: Tensor) -> Tensor:
        """The values of all ranks, which may have different numbers of them."""
        counts = [int(count) for count in self._every(torch.full((1,), len(values_N), device=self.device))]
        every_RN = self._every(torch.nn.functional.pad(values_N, (0, max(counts) - len(values_N))))
        return torch.cat([own_N[:count] for own_N, count in zip(every_RN, counts, strict=True)])

    def sum(self, *values: float) -> list[float]:
        """Each host value summed over ranks."""
        return list(self.totals({str(place): value for place, value in enumerate(values)}).values()) if self.world_size > 1 else [*values]

    def _scalar(self, value: Tensor | float) -> Tensor:
        """On the device, without a copy of a host tensor, which would wait for a GPU."""
        if isinstance(value, Tensor):
            return value.detach().double()
        return torch.full((), value, dtype=torch.float64, device=self.device)

    def _every(self, values_K: Tensor) -> Tensor:
        """The values of all ranks, one row each."""
        if self.world_size == 1:
            return values_K[None]
        every = values_K.new_empty(self.world_size * len(values_K))
        torch.distributed.all_gather_into_tensor(every, values_K.contiguous())
        return every.view(self.world_size, -1)

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value, on every rank. The others wait for it as long as it takes, without using the GPU."""
        box = [value]
        torch.distributed.broadcast_object_list(box, src=0, group=_waiting_group())
        return box[0]

    def from_all_ranks(self, value: Any) -> list[Any]:
        """The value of every rank, on every rank."""
        every = [value] * self.world_size
        torch.distributed.all_gather_object(every, value, group=_waiting_group())
        return every

    def barrier(self) -> None:
        """Wait for all ranks, like `broadcast`."""
        torch.distributed.barrier(_waiting_group())

    def save_state(self, folder: Path) -> None:
        """Write trained weights, optimizer and this rank's random state into `folder`; called on all ranks.

        Frozen weights are omitted; a resumed job reads them from its inputs.
        """
        self.engine.save_checkpoint(
            str(folder), tag=self.name, client_state={"steps": self.steps}, save_latest=False, exclude_frozen_parameters=self.has_frozen
        )
        state = {"torch": torch.get_rng_state()} | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})
        torch.save(state, folder / f"random_{self.rank}.pt")

    def load_state(self, folder: Path, resharded: bool = False) -> None:
        """Restore the state from `save_state`. The caller must have verified the files, which are pickles.

        `resharded`: it was written with another number of ranks or ZeRO stage.
        """
        if resharded:
            folder = self._universal(folder)
        _, client = self.engine.load_checkpoint(str(folder), tag=self.name, load_module_strict=not self.has_frozen)
        if client is None:
            raise StageError(f"DeepSpeed cannot load the checkpoint {folder.name}: delete it to resume from the previous one")
        self.steps = client["steps"]
        if resharded:
            self.barrier()
            if self.rank == 0:
                shutil.rmtree(folder)
        else:
            state = torch.load(folder / f"random_{self.rank}.pt", weights_only=False)
            torch.set_rng_state(state["torch"])
            if "cuda" in state:
                torch.cuda.set_rng_state(state["cuda"])

    def _universal(self, folder: Path) -> Path:
        """Convert the checkpoint to DeepSpeed's universal format, one file per parameter, which any number of ranks can load."""
        universal = folder.parent / f".universal-{folder.name}-{self.name}"
        if self.rank == 0:
            shutil.rmtree(universal, ignore_errors=True)
            convert_to_universal(folder / self.name, universal / self.name)
        self.barrier()
        self.engine._config.load_universal_checkpoint = True
        return universal

    def export(self, folder: Path, chat: Chat) -> None:
        """Write a folder that transformers and vLLM load, in the compute dtype and with buffers in theirs; called on all ranks, written by
        rank 0."""
        model = self.engine.module.model
        state: dict[str, Tensor] = {}
        for name, whole in self._whole_weights():
            if self.rank == 0:
                state[name] = whole().to("cpu").clone().contiguous()
        if self.rank == 0:
            refuse_incomplete(model, state.keys())
            folder.mkdir(parents=True, exist_ok=True)
            model.config.dtype = self.dtype
            model.save_pretrained(folder, state_dict=state)
            chat.tokenizer.save_pretrained(folder)
        self.barrier()

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of all that `export` writes, in its dtypes; called on all ranks, and of the same order on each.

        A tensor is valid until the next is drawn: under ZeRO-3 no rank holds more than one whole parameter.
        """
        from transformers.core_model_loading import WeightConverter, revert_weight_conversion

        model = self.engine.module.model
        conversions = getattr(model, "_weight_conversions", None) or ()
        if any(isinstance(one, WeightConverter) and len(one.target_patterns) > 1 for one in conversions):
            # A file's tensor is made of several parameters
            state = {name: whole().to("cpu").clone() for name, whole in self._whole_weights()}
            yield from revert_weight_conversion(model, state).items()
            return
        for name, whole in self._whole_weights():
            yield from revert_weight_conversion(model, {name: whole()}).items()

    def _whole_weights(self) -> Iterator[tuple[str, Callable[[], Tensor]]]:
        """(name in a plain model, function that gives it in the compute dtype, or a buffer in its own) of each weight while it is
        gathered."""
        for name, parts, whole in plain_weights(self.engine.module.model):
            with _gathered(parts):
                yield name, (lambda whole=whole: whole().detach().to(self.dtype)) if parts else whole

    def export_adapters(self, folder: Path, lora: Lora) -> None:
        """Write only the adapters, bitwise as this trainer uses them; called on all ranks, written by rank 0."""
        state: dict[str, Tensor] = {}
        for name, parameter in adapter_weights(self.engine.module.model):
            with _gathered([parameter]):
                if self.rank == 0:
                    state[name] = parameter.detach().to("cpu", self.dtype).clone().contiguous()
        if self.rank == 0:
            write_adapters(folder, lora, state)
        self.barrier()

    def close(self) -> None:
        """Free the engine. The process group lives as long as the process, because DeepSpeed cannot join a second one."""
        self.engine.destroy()


def parameter_groups(trained: Iterable[nn.Parameter], optimizer: Optimizer) -> list[dict[str, Any]]:
    """Parameters grouped by weight decay; a single group if nothing decays."""
    by_decay: dict[float, list[nn.Parameter]] = {}
    for parameter in trained:
        decays = optimizer.decayed == "all" or parameter.ndim >= 2
        by_decay.setdefault(optimizer.weight_decay if decays else 0.0, []).append(parameter)
    return [{"params": parameters, "weight_decay": decay} for decay, parameters in by_decay.items()]


@torch.no_grad()
def finer_than_bf16(module: nn.Module) -> dict[int, Tensor]:
    """id of each trained parameter that bf16 would round → its fp32 values."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad and parameter.dtype == torch.float32]
    return {id(parameter): parameter.detach() for parameter in trained if not torch.equal(parameter, parameter.bfloat16().float())}


def set_master_weight(parameter: Any, value: Tensor) -> None:
    """Set the fp32 value that the optimizer updates, equal on all ranks.

    DeepSpeed 0.19 (`stage3.py`, `set_full_hp_param`) reads beyond the value on the last rank if ZeRO-3 pads the parameter, because
    the number of ranks does not divide its size; so that each rank gets its padded share here.
    """
    from deepspeed.utils import safe_set_full_fp32_param, safe_set_local_fp32_param

    if not hasattr(parameter, "ds_id"):
        safe_set_full_fp32_param(parameter, value)
        return
    share, rank = parameter.ds_tensor.numel(), torch.distributed.get_rank(parameter.ds_process_group)
    own = value.flatten()[share * rank : share * (rank + 1)]
    safe_set_local_fp32_param(parameter, nn.functional.pad(own, (0, share - len(own))))


def refuse_incomplete(model: nn.Module, saved: Collection[str]) -> None:
    """Refuse to save a model without all of its state: transformers would load the rest as zeros, or as random numbers.

    Raises:
        StageError: a weight or persistent buffer is not in `saved`, under none of its names.
    """
    named = [(name.replace(".base_layer.", "."), tensor) for name, tensor in model.state_dict(keep_vars=True).items()]
    found = {id(tensor) for name, tensor in named if name in saved}
    missing = [name for name, tensor in named if id(tensor) not in found and ".lora_" not in name]
    if missing:
        raise StageError(f"the trained {type(model).__name__} would be saved without {', '.join(missing[:3])}: use another base model")


def convert_to_universal(source: Path, target: Path) -> None:
    """Run DeepSpeed's converter in this process."""
    from deepspeed.checkpoint import ds_to_universal

    settings = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True, "inject_missing_state": True}
    ds_to_universal.main(argparse.Namespace(input_folder=str(source), output_folder=str(target), **settings))


@cache
def _waiting_group() -> Any:
    """All ranks on CPUs: a wait within NCCL is a kernel that polls on the GPU, where an engine may be decoding."""
    return torch.distributed.new_group(backend="gloo", timeout=PATIENCE)


def _leave() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _deepspeed() -> Any:
    import logging

    import deepspeed

    # Otherwise it compiles an operation for inference on several CPUs, which training does not use.
    deepspeed.ops.__dict__["__compatible_ops__"] = {}
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    return deepspeed


@contextmanager
def _uncompiled() -> Iterator[None]:
    """Disable `torch.compile` during DeepSpeed's setup. DeepSpeed uses it on optimizers that are not used here, and loading the compiler
    takes a quarter of a job's startup time."""
    compiling = torch.compile
    setattr(torch, "compile", lambda model=None, **_: model if model is not None else lambda function: function)  # noqa: B010
    try:
        yield
    finally:
        setattr(torch, "compile", compiling)  # noqa: B010


@contextmanager
def _gathered(parameters: list[nn.Parameter]) -> Iterator[None]:
    """Gather parameters that ZeRO-3 partitions over ranks."""
    if any(hasattr(one, "ds_id") for one in parameters):
        import deepspeed

        with deepspeed.zero.GatheredParameters(parameters):
            yield
    else:
        yield


@contextmanager
def _distributed_environment() -> Iterator[None]:
    """Set the variables of torchrun for a single process without it; removed afterwards, so that no child inherits them."""
    if "RANK" in os.environ:
        yield
        return
    added = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ |= added
    try:
        yield
    finally:
        for name in added.keys() - {"LOCAL_RANK"}:  # ZeRO-3 reads LOCAL_RANK at every step
            os.environ.pop(name, None)
