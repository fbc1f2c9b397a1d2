"""How and where a stage runs. Nothing here is identity: `Placement` never changes a bit of the result (but where a recipe asks for
`chunk_size: continuous`, which lets memory and engines decide what is computed together), `Numerics` may change bits but not meaning;
numerics are recorded, and a checkpoint made under other numerics is not resumed.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import Field, field_validator, model_validator

from configs.base.frozen import Frozen
from configs.base.stores import StoreUrl
from configs.language.kinds import KINDS
from configs.methods.training import Rlvr, Training

SMALLEST_TOKENS = 64
"""A packed micro-batch is not halved below it: one document is as long."""


AUTO = "auto"
"""In a profile, as `slots` or `threads`: what the machine has (`fitted`)."""
MOST_THREADS = 8
"""That `auto` gives a job: training a small model is no longer much faster with more, and further jobs run beside it instead."""
SLOT_BYTES = 2 << 30
"""Memory that `auto` keeps for each slot: SFT of a model of 135M parameters takes five GiB, on two slots or more."""
PARTS = ("numerics", "placement")
DIVIDE_THREADS = ("threads", "world_size", "engines", "tensor_parallel")
"""A block of a profile that has one of these works out `threads: auto` for itself."""


class Gpu(NamedTuple):
    """A GPU by its maker's data sheet."""

    memory_gb: float
    """GiB, as the driver tells it."""
    peak_tflops: float
    """Dense, in bf16."""
    bandwidth_gbs: float


GPUS: dict[str, Gpu] = {
    "a100-40gb": Gpu(40, 312, 1555),
    "a100-80gb": Gpu(80, 312, 2039),
    "h100": Gpu(79.6, 989, 3350),
    "h100-pcie": Gpu(79.6, 756, 2000),
    "h200": Gpu(140.4, 989, 4800),
    "b200": Gpu(178.4, 2250, 8000),
    "l40s": Gpu(45, 362, 864),
    "a10g": Gpu(22.5, 70, 600),
    "l4": Gpu(22.5, 121, 300),
    "rtx4090": Gpu(24, 165, 1008),
}
"""By the name that a profile gives."""


FORMERLY = {"bf16_products": "units"}
"""Numerics of records and checkpoints that do not name them: those of the code that made them."""


class Numerics(Frozen):
    """What can change rounding."""

    device: Literal["cpu", "cuda"] = "cpu"
    """Where training and vLLM compute; `cuda` without a GPU is refused."""
    world_size: int = Field(default=1, ge=1)
    """Ranks of a training job."""
    packing: bool = True
    """Documents side by side in one row without padding, isolated from each other; otherwise padded rows."""
    micro_batch_tokens: int = Field(default=1024, ge=8)
    """Packed: most tokens in one forward pass (one longer document may exceed it alone)."""
    micro_batch_sequences: int = Field(default=8, ge=1)
    """Padded: sequences in one forward pass per rank."""
    zero_stage: Literal[0, 1, 2, 3] = 1
    """DeepSpeed ZeRO stage: ranks share the optimizer's state from 1 on, gradients from 2 on, weights with 3. Up to 1 gradients are
    exchanged once a step, above after each micro-batch."""
    offload_optimizer: bool = False
    """On GPUs: the optimizer's state and the gradients lie in host memory, and the update is computed there; slower, for models that a
    GPU cannot hold otherwise."""
    gradient_checkpointing: bool = False
    """Each layer is computed a second time in the backward pass instead of keeping what it has computed: less memory, about a third more
    time."""
    attention: Literal["varlen", "sdpa", "flash_attention_2", "eager"] = "varlen"
    """`varlen`: packed documents one by one, their common prompts once, and `sdpa` for padded rows; the others are transformers' own."""
    kernels: Literal["torch", "compiled", "liger"] = "torch"
    """How norms, rotary embeddings, gated MLPs and what lies between them are computed: as `torch` does; `compiled` into fused code by
    torch's compiler, with the log-softmax; or by the Triton kernels of `liger`, on GPUs."""
    threads: int = Field(default=2, ge=1)
    """OpenMP threads per rank on CPU; processes of stages that read rows (`prepare_data`, `decontaminate`, `find_rephrased`). `auto`:
    the physical cores that may be used, at most 8 and at most the profile's `slots` where those are a number, divided among ranks or
    `engines`."""
    bf16_products: Literal["auto", "units", "fp32"] = "auto"
    """How a CPU multiplies bf16 matrices: by its bf16 `units` (AMX, AVX-512 BF16, Arm's BF16), or through `fp32` (operands widened, sums
    in fp32, results rounded to bf16), which is many times faster on a CPU without such units; vLLM then computes in fp32 with the bf16
    weights. `auto`: by its units where the machine that runs the job has them; `run.json` says which."""
    logprob_chunk: int = Field(default=1024, ge=1)
    """Tokens whose logits exist at one time."""
    tensor_parallel: int = Field(default=1, ge=1)
    """Ranks of one vLLM engine."""
    deterministic: bool = False
    """On GPUs: kernels and reductions whose sums depend on no timing, for training and vLLM; slower. On CPUs they are so anyway."""

    @model_validator(mode="after")
    def kernels_can_be_had(self) -> "Numerics":
        if self.kernels == "liger" and self.device == "cpu":
            raise ValueError("kernels liger run on GPUs only, and device is cpu: set kernels to compiled or torch, or device to cuda")
        if self.kernels == "compiled" and self.zero_stage == 3:
            raise ValueError(
                "kernels compiled need weights that are whole, and zero_stage 3 parts them: set zero_stage to 2 or less, or kernels to "
                "liger or torch"
            )
        return self

    @model_validator(mode="after")
    def there_is_somewhere_to_offload_to(self) -> "Numerics":
        if self.offload_optimizer and self.device == "cpu":
            raise ValueError("offload_optimizer moves state from the GPU to host memory, and device is cpu: leave it out")
        if self.offload_optimizer and self.zero_stage == 0:
            raise ValueError("offload_optimizer needs a state that ZeRO manages, and zero_stage is 0: set zero_stage to 1, 2 or 3")
        return self

    @property
    def shares_prompts(self) -> bool:
        """Whether answers to one prompt share its forward pass."""
        return self.packing and self.attention == "varlen"

    def smaller(self, config: Frozen) -> "Numerics | None":
        """Half the micro-batch for a stage, whose global batch it still cuts exactly; None when it cannot be halved."""
        if self.packing:
            tokens = self.micro_batch_tokens // 2
            return self.model_copy(update={"micro_batch_tokens": tokens}) if tokens >= SMALLEST_TOKENS else None
        for sequences in range(self.micro_batch_sequences // 2, 0, -1):
            found = self.model_copy(update={"micro_batch_sequences": sequences})
            if batch_problem(config, found) is None:
                return found
        return None


class Placement(Frozen):
    """Where it runs and how it is watched."""

    slots: int = Field(default=1, ge=1)
    """Slots of the machine that the stage takes while it runs. `auto`: as many as `threads: auto` gives all ranks or engines together, but
    no more than the profile has."""
    sampler_process: Literal["own", "inline"] = "own"
    """RLVR: vLLM in a child process of its own, or inside the trainer's."""
    engines: int = Field(default=1, ge=1)
    """Of `sample`, `evaluate` and a policy that judges or writes: vLLM engines that answer side by side, each with `tensor_parallel` GPUs
    or `threads` cores of its own, for all of which `slots` must do. A chunk goes to whoever is idle, and has the same bits on any."""
    sampler_memory_gb: float = Field(default=1.0, gt=0)
    """KV-cache of a vLLM engine on CPU, in GiB; it takes twice as much where bf16 is computed through fp32, for as many tokens."""
    gpu_memory_utilization: float = Field(default=0.85, gt=0, le=1)
    """Share of GPU memory that vLLM may take."""
    retries: int = Field(default=2, ge=0)
    """Further attempts after a failure that may pass by itself, without getting further in between; each goes on from the last
    checkpoint."""
    heartbeat_timeout_s: float = Field(default=600, gt=0)
    """A job whose work has not gone on for longer is killed."""
    timeout_s: float | None = Field(default=None, gt=0)
    """A job that runs for longer is killed, and has failed."""
    checkpoint_every_s: float = Field(default=300, gt=0)
    """After the first step that ends so long after the last checkpoint, another is written."""
    checkpoint_every_steps: int | None = Field(default=None, ge=1)
    """Also after every so many steps."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """The newest ones; older ones are deleted."""
    endpoint_concurrency: int = Field(default=16, ge=1)
    """Most requests that an endpoint is working on at one time."""
    endpoint_timeout_s: float = Field(default=120, gt=0)
    """A request that an endpoint has not answered after so long has failed; at most nine tenths of `heartbeat_timeout_s` count."""
    endpoint_retries: int = Field(default=5, ge=0)
    """Further tries of a request to an endpoint that fails for a reason that may pass. The pauses between them double from a second up to
    a minute, or are as long as the server asks for."""
    checkpoint_url: StoreUrl | None = None
    """`s3://BUCKET/PREFIX` or `file:///FOLDER` (one that other machines see): the checkpoints and chunks of running jobs go there too,
    so that another machine goes on when this one is gone."""


class Machine(Frozen):
    """What a profile runs on, for `pedigree plan`: nothing that runs is changed by it, and a run that cannot fit is refused."""

    gpu: str | None = None
    """One of the GPUs that docs/plan.md lists, e.g. `h100`: its memory, speed and bandwidth. Where nothing is said the driver is asked."""
    gpu_memory_gb: float | None = Field(default=None, gt=0)
    """Memory of one GPU, in GiB, where it is another than the GPU's usual one."""
    peak_tflops: float | None = Field(default=None, gt=0)
    """Most operations of a GPU, in 10¹² a second: dense, in bf16."""
    bandwidth_gbs: float | None = Field(default=None, gt=0)
    """How fast a GPU reads its memory, in 10⁹ bytes a second."""
    gpus_per_node: int = Field(default=8, ge=1)
    """GPUs that share the host memory of one machine."""
    host_memory_gb: float | None = Field(default=None, gt=0)
    """Memory of one machine, in GiB. With device cpu, and nothing said, it is that of the machine that plans."""
    utilization: float = Field(default=0.3, gt=0, le=1)
    """Share of the peak that training reaches, recomputed layers counted. 0.4 and more is good for long, full passes, 0.2 usual for short
    ones; on CPUs 0.6 of the measured rate, where nothing is said. Where finished stages of the same kind ran on such a machine, their
    speed is taken instead."""
    bandwidth_utilization: float = Field(default=0.5, gt=0, le=1)
    """Share of the bandwidth that generation reaches; on CPUs all that was measured, where nothing is said."""

    @field_validator("gpu")
    @classmethod
    def known(cls, value: str | None) -> str | None:
        if value is not None and value not in GPUS:
            raise ValueError(f"gpu {value!r} is none of {', '.join(GPUS)}: name one of them, or give gpu_memory_gb and peak_tflops instead")
        return value


class Execution(Frozen):
    """A profile: defaults for all stages, and overrides by kind and by stage name (the later wins)."""

    slots: int = Field(ge=1)
    """How many slots the machine has, for all clones of projects on it: stages run side by side while their slots fit. `auto`: one for each
    physical core that may be used, and no more than one for every 2 GiB of memory."""
    machine: Machine = Machine()
    """What it runs on, as far as plans need to know."""
    numerics: Numerics = Numerics()
    placement: Placement = Placement()
    kinds: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """`KIND: {numerics: {...}, placement: {...}}`"""
    stages: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """`STAGE: {numerics: {...}, placement: {...}}`"""

    @model_validator(mode="after")
    def overrides_are_valid(self) -> "Execution":
        unknown = sorted(set(self.kinds) - set(KINDS))
        if unknown:
            raise ValueError(f"kinds {', '.join(unknown)}: there are {', '.join(KINDS)}")
        for name in ("", *self.kinds, *self.stages):
            self.of(name, name)
        return self

    def of(self, kind: str, stage: str) -> tuple[Numerics, Placement]:
        """Numerics and placement of one stage.

        Raises:
            ValueError: its placement asks for more slots than the profile has.
        """
        numerics, placement = self.numerics.model_dump(), self.placement.model_dump()
        for override in (self.kinds.get(kind, {}), self.stages.get(stage, {})):
            unknown = set(override) - {"numerics", "placement"}
            if unknown:
                raise ValueError(f"{stage}: {sorted(unknown)} is neither `numerics` nor `placement`")
            for part, settings in override.items():
                if not isinstance(settings, dict):
                    raise ValueError(f"{stage}: `{part}: {settings}` must be a mapping of settings to values")
            numerics |= override.get("numerics", {})
            placement |= override.get("placement", {})
        resolved = Numerics.model_validate(numerics), Placement.model_validate(placement)
        if resolved[1].slots > self.slots:
            raise ValueError(f"{stage}: slots {resolved[1].slots} > {self.slots} of the profile: lower one or raise the other")
        return resolved


def fitted(profile: Any, cores: int, memory: int | None) -> Any:
    """A profile as it was read, with numbers for this machine in place of `auto`.

    Args:
        profile: the document; what is wrong in it is left for `Execution` to refuse.
        cores: physical cores that jobs may use.
        memory: bytes that they may use; None where nobody knows.
    """
    if not isinstance(profile, dict):
        return profile
    room = max(1, min(cores, memory // SLOT_BYTES if memory else cores))
    slots = _count(profile, "slots", room)
    threads = min(cores, MOST_THREADS, _count(profile, "slots", cores))
    taken = min(slots, threads)

    def filled(block: Any, below: Mapping[str, Any]) -> Any:
        """The settings of a profile, or of a kind or stage over those of the profile."""
        own = _settings(block)
        said = {**below, **own}
        parts = {part: dict(block[part]) for part in PARTS if isinstance(block.get(part), dict)} if isinstance(block, dict) else {}
        if said.get("threads") == AUTO and not own.keys().isdisjoint(DIVIDE_THREADS):
            parts.setdefault("numerics", {})["threads"] = _share(said, threads, taken)
        if parts.get("placement", {}).get("slots") == AUTO:
            parts["placement"]["slots"] = taken
        return {**block, **parts} if parts else block

    found = filled(profile, {})
    for name in ("kinds", "stages"):
        if isinstance(profile.get(name), dict):
            found = found | {name: {key: filled(block, _settings(profile)) for key, block in profile[name].items()}}
    return found | ({"slots": room} if profile.get("slots") == AUTO else {})


def _settings(block: Any) -> dict[str, Any]:
    """Numerics and placement of a block together; no name is in both."""
    parts = [block.get(part) for part in PARTS] if isinstance(block, dict) else []
    return {name: value for part in parts if isinstance(part, dict) for name, value in part.items()}


def _share(said: Mapping[str, Any], threads: int, taken: int) -> int:
    """Threads of each rank or engine; engines must find room in the slots of their stage."""
    engines = _count(said, "engines", 1)
    ranks = max(_count(said, "world_size", 1), engines * _count(said, "tensor_parallel", 1))
    return max(1, (min(threads, _count(said, "slots", taken)) if engines > 1 else threads) // ranks)


def _count(settings: Mapping[str, Any], name: str, otherwise: int) -> int:
    value = settings.get(name)
    return value if isinstance(value, int) and value > 0 else otherwise


def engines_problem(numerics: Numerics, placement: Placement) -> str | None:
    """Why the engines that a stage opens would share GPUs or cores, or None."""
    each = numerics.tensor_parallel * (numerics.threads if numerics.device == "cpu" else 1)
    if placement.engines == 1 or placement.engines * each <= placement.slots:
        return None
    ranks = f"tensor_parallel {numerics.tensor_parallel}" + (f" and threads {numerics.threads}" if numerics.device == "cpu" else "")
    return (
        f"engines {placement.engines}, each of {ranks}, need {placement.engines * each} slots, and placement.slots is {placement.slots}: "
        "raise it, or lower engines"
    )


def batch_problem(config: Frozen, numerics: Numerics) -> str | None:
    """Why a training stage's global batch cannot be cut exactly and evenly into ranks and padded micro-batches, or None.

    Packed micro-batches need no second condition: they are filled by tokens, and the loss is divided by the global count.
    """
    ranks, size = numerics.world_size, numerics.micro_batch_sequences
    if isinstance(config, Rlvr):
        batch, name = config.prompts_per_step * config.samples_per_prompt, "prompts_per_step * samples_per_prompt"
    elif isinstance(config, Training):
        batch, name = config.global_batch, "global_batch"
    else:
        return None
    if batch % ranks:
        return f"{name} {batch} cannot be split over {ranks} ranks: make it a multiple of {ranks}, or change world_size"
    share = batch // ranks
    if not numerics.packing and share > size and share % size:
        return (
            f"{name} {batch} over {ranks} ranks leaves {share} sequences each, which micro-batches of {size} do not divide: "
            f"set micro_batch_sequences to a divisor of {share}, or `packing: true`"
        )
    return None


def profile_path(folder: Path, name: str) -> Path:
    """A profile's file, by name in `configs/execution/` or by path."""
    return Path(name) if name.endswith((".yaml", ".yml")) else folder / f"{name}.yaml"
