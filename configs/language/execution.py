"""Execution profiles: how and where a stage runs. Nothing here is part of a stage's identity.

`Placement` never changes a bit of the result, except under a recipe's `chunk_size: continuous` or `replay: recorded`, where memory and
engines decide which requests are batched together. `Numerics` may change rounding but not meaning; numerics are recorded, and a checkpoint
is not resumed under different ones.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, ValidationError, field_validator, model_validator

from pedigree.configs.base.document import Place
from pedigree.configs.base.frozen import Frozen
from pedigree.configs.base.mistakes import Mistakes, mistakes, not_one_of
from pedigree.configs.base.project import PACKAGED
from pedigree.configs.base.stores import StoreUrl
from pedigree.configs.language.kinds import KINDS, kind_of
from pedigree.configs.language.trackers import Tracker

SMALLEST_TOKENS = 64
"""Lower bound for halving packed micro-batches: one document can be this long."""


AUTO = "auto"
"""`slots` or `threads` in a profile: derive the value from the machine (`fitted`)."""
MOST_THREADS = 8
"""Maximum threads per job under `auto`: more hardly speed up training of a small model, and the cores are better used by other jobs."""
ENGINE_OVERHEAD = 2 << 30
"""Bytes of vLLM on a GPU besides weights and KV cache: its context, activations of its largest batch and graphs (an assumption, which
`make gpu-check` measures)."""
SLOT_BYTES = 2 << 30
"""Memory per slot under `auto`: SFT of a model with 135M parameters takes five GiB, on two slots or more."""
PARTS = ("numerics", "placement")
DIVIDE_THREADS = ("threads", "world_size", "nodes", "engines", "tensor_parallel")
DIVIDE_CORES = ("threads", "world_size", "nodes", "engines", "slots")
"""A block of a profile that sets one of these resolves `threads: auto` itself; the second is for GPUs."""


class Gpu(NamedTuple):
    """GPU specifications from the vendor's data sheet."""

    memory_gb: float
    """GiB, as reported by the driver."""
    peak_tflops: float
    """Dense bf16."""
    bandwidth_gbs: float
    link_gbs: float
    """To another GPU of the node, in one direction: NVLink, else PCI Express."""


GPUS: dict[str, Gpu] = {
    "a100-40gb": Gpu(40, 312, 1555, 300),
    "a100-80gb": Gpu(80, 312, 2039, 300),
    "h100": Gpu(79.6, 989, 3350, 450),
    "h100-pcie": Gpu(79.6, 756, 2000, 64),
    "h200": Gpu(140.4, 989, 4800, 450),
    "b200": Gpu(178.4, 2250, 8000, 900),
    "l40s": Gpu(45, 362, 864, 32),
    "a10g": Gpu(22.5, 70, 600, 32),
    "l4": Gpu(22.5, 121, 300, 32),
    "rtx4090": Gpu(24, 165, 1008, 32),
}
"""Profile name → specifications."""


FORMERLY = {"bf16_products": "units", "nodes": 1, "sequence_parallel": 1}
"""Values of numerics missing from older records and checkpoints: the behavior of the code that wrote them."""


ONE_PROCESS = {"world_size": 1, "nodes": 1, "sequence_parallel": 1}
"""Numerics of stages that do not train, whatever the profile."""


class Numerics(Frozen):
    """Settings that can change rounding."""

    device: Literal["cpu", "cuda"] = "cpu"
    """Device for training and vLLM; `cuda` without a GPU is an error."""
    world_size: int = Field(default=1, ge=1)
    """Ranks of a training job."""
    nodes: int = Field(default=1, ge=1)
    """Machines among which the ranks of a training job are divided. The job starts on one of them and waits until `pedigree join` runs on
    the others (docs/several-nodes.md)."""
    sequence_parallel: int = Field(default=1, ge=1)
    """Ranks of `sft`, `preference_train` and `reward_model` that compute each packed row together, each a slice of its tokens, for rows
    whose activations one GPU cannot hold. Divides `world_size` and the model's key heads; `micro_batch_tokens` are those of the row."""
    packing: bool = True
    """Pack documents into one row without padding, isolated from each other by attention; false: padded rows."""
    micro_batch_tokens: int = Field(default=1024, ge=8)
    """With packing: maximum tokens per forward pass (a single longer document may exceed it)."""
    micro_batch_sequences: int = Field(default=8, ge=1)
    """Without packing: sequences per forward pass and rank."""
    zero_stage: Literal[0, 1, 2, 3] = 1
    """DeepSpeed ZeRO stage: ranks shard the optimizer state from 1, gradients from 2, weights at 3. Up to 1, gradients are reduced once per
    step; above, after each micro-batch."""
    offload_optimizer: bool = False
    """On GPUs: keep the optimizer state and gradients in host memory and compute the update there. Slower; for models that otherwise do not
    fit on the GPU."""
    gradient_checkpointing: bool = False
    """Recompute each layer in the backward pass instead of storing its activations: less memory, about a third more time."""
    attention: Literal["varlen", "sdpa", "eager"] = "varlen"
    """`varlen`: variable-length attention over packed documents (on GPUs, torch's flash attention), with shared prompts computed once, and
    `sdpa` for padded rows; the other values are the implementations in transformers."""
    kernels: Literal["torch", "compiled", "liger"] = "torch"
    """Kernels for norms, rotary embeddings, gated MLPs and the operations between them: plain `torch`; `compiled`, fused by torch.compile
    together with the log-softmax; or `liger`, Triton kernels on GPUs."""
    threads: int = Field(default=2, ge=1)
    """OpenMP threads per rank on CPU, and processes of stages that read rows (`prepare_data`, `decontaminate`, `find_rephrased`). `auto`:
    the available physical cores, at most 8 and at most the profile's `slots` if those are a number, divided among ranks or `engines`; on
    GPUs, without these limits, the stage's share of the cores by `slots`, divided likewise. On GPUs, checkpoints resume under any number of
    threads, except with `offload_optimizer`."""
    bf16_products: Literal["auto", "units", "fp32"] = "auto"
    """How a CPU multiplies bf16 matrices. `units`: with its bf16 instructions (AMX, AVX-512 BF16, Arm BF16). `fp32`: operands widened, sums
    in fp32, results rounded to bf16, which is many times faster on a CPU without such instructions; vLLM then computes in fp32 with the
    bf16 weights. `auto`: `units` if the machine that runs the job has them and they are faster than fp32 (not AVX-512 BF16 of an Intel
    processor without AMX), else `fp32`; `run.json` records the choice."""
    logprob_chunk: int = Field(default=1024, ge=1)
    """Maximum number of tokens whose logits are materialized at a time."""
    tensor_parallel: int = Field(default=1, ge=1)
    """Ranks per vLLM engine."""
    deterministic: bool = False
    """On GPUs: use kernels and reductions whose order of summation does not depend on timing, for training and vLLM; slower. CPU runs are
    always deterministic."""

    @model_validator(mode="after")
    def _check_together(self) -> "Numerics":
        if self.world_size % self.nodes:
            raise ValueError(f"world_size {self.world_size} is not divisible by {self.nodes} nodes: make it a multiple, or change nodes")
        if self.world_size % self.sequence_parallel:
            raise ValueError(
                f"sequence_parallel {self.sequence_parallel} does not divide world_size {self.world_size}: make it a divisor, or 1"
            )
        if self.sequence_parallel > 1 and (not self.shares_prompts or self.kernels == "compiled"):
            raise ValueError(
                f"sequence_parallel {self.sequence_parallel} requires `packing: true`, `attention: varlen` and kernels other than "
                "compiled: set those, or sequence_parallel: 1"
            )
        if self.kernels == "liger" and self.device == "cpu":
            raise ValueError("kernels liger requires a GPU, but device is cpu: set kernels to compiled or torch, or device to cuda")
        if self.kernels == "compiled" and self.zero_stage == 3:
            raise ValueError(
                "kernels compiled requires unsharded weights, but zero_stage is 3: set zero_stage to 2 or less, or kernels to liger "
                "or torch"
            )
        if self.offload_optimizer and self.device == "cpu":
            raise ValueError("offload_optimizer moves state from the GPU to host memory, but device is cpu: remove it")
        if self.offload_optimizer and self.zero_stage == 0:
            raise ValueError("offload_optimizer requires ZeRO, but zero_stage is 0: set zero_stage to 1, 2 or 3")
        return self

    def deciding(self) -> dict[str, Any]:
        """The settings that may change a bit. On GPUs, threads do not, except where the optimizer runs on the host."""
        idle = {"threads"} if self.device == "cuda" and not self.offload_optimizer else None
        return self.model_dump(mode="json", exclude=idle)

    @property
    def ranks_per_node(self) -> int:
        return self.world_size // self.nodes

    @property
    def teams(self) -> int:
        """Groups of ranks that each compute rows of their own."""
        return self.world_size // self.sequence_parallel

    @property
    def shares_prompts(self) -> bool:
        """Whether answers to the same prompt share its forward pass."""
        return self.packing and self.attention == "varlen"

    def smaller(self, config: Frozen) -> "Numerics | None":
        """Numerics with half the micro-batch that still divides the stage's global batch exactly; None if it cannot be halved."""
        if self.packing:
            tokens = self.micro_batch_tokens // 2
            return self.model_copy(update={"micro_batch_tokens": tokens}) if tokens >= SMALLEST_TOKENS else None
        for sequences in range(self.micro_batch_sequences // 2, 0, -1):
            found = self.model_copy(update={"micro_batch_sequences": sequences})
            if batch_problem(config, found) is None:
                return found
        return None


SET_BY_LAUNCHER = frozenset(
    ("array", "chdir", "comment", "error", "export", "export-file", "gpus-per-node", "job-name", "no-requeue", "nodes", "open-mode",
     "output", "parsable", "requeue", "signal", "test-only", "wait", "wrap")
)  # fmt: skip
"""Options of `sbatch` that decide how a job is found, stopped and resumed, and on how many nodes and GPUs it runs."""


GPU_RESOURCE = "nvidia.com/gpu"
"""Kubernetes's name of a GPU."""


class Local(Frozen):
    """Jobs are processes of this machine and share its slots."""

    type: Literal["local"] = "local"


class Slurm(Frozen):
    """Jobs are allocations of a Slurm cluster, each of `numerics.nodes` nodes with `placement.slots` GPUs or, with `device: cpu`, cores."""

    type: Literal["slurm"]
    options: tuple[Annotated[str, Field(pattern="^--[a-z]", max_length=1000)], ...] = Field(default=(), strict=False)
    """Further options of `sbatch`, e.g. `[--partition=gpu, --account=lab, --time=12:00:00, --mem=200G]`."""
    setup: tuple[str, ...] = Field(default=(), strict=False)
    """Lines of bash that run on the first node before the job, e.g. `[module load cuda]`. One that fails ends the job."""

    @field_validator("options")
    @classmethod
    def _check_options(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for option in value:
            name = option[2:].partition("=")[0]
            if name == "clusters":
                raise ValueError("--clusters would hide jobs from squeue and scancel: set SLURM_CLUSTERS, which all programs obey")
            if name in SET_BY_LAUNCHER or name.startswith("ntasks"):
                raise ValueError(f"--{name} is set for every job: remove it")
        return value


class Ray(Frozen):
    """Jobs of a Ray cluster, which take `placement.slots` GPUs or, with `device: cpu`, cores on each of `numerics.nodes` nodes."""

    type: Literal["ray"]
    address: str = Field(pattern=r"^https?://[^@?#\s]*[^@?#\s/]$", max_length=1000)
    """Of Ray's dashboard, which serves its Jobs API, e.g. `http://head:8265`."""
    resources: dict[Annotated[str, Field(min_length=1)], Annotated[float, Field(gt=0)]] = Field(default_factory=dict)
    """Further resources on each node, e.g. `{memory: 200000000000}`."""

    @field_validator("resources")
    @classmethod
    def _check_resources(cls, value: dict[str, float]) -> dict[str, float]:
        if {"CPU", "GPU"} & value.keys():
            raise ValueError("CPU and GPU are set by placement.slots: remove them")
        return value


class Kubernetes(Frozen):
    """Jobs of a Kubernetes cluster: each a Job of one pod or, for several `numerics.nodes`, a JobSet of as many pods. A pod has
    `placement.slots` GPUs or, with `device: cpu`, cores."""

    type: Literal["kubernetes"]
    image: str = Field(min_length=1, max_length=1000)
    """Container image of the pods. It needs `sh`, and the Python of `python`."""
    python: str | None = Field(default=None, pattern="^/")
    """Python of the pods, with Pedigree's dependencies, e.g. `/venv/bin/python`; by default the one that runs Pedigree here, which must
    then be on a volume."""
    volumes: dict[Annotated[str, Field(min_length=1)], Annotated[str, Field(pattern="^/")]] = Field(default_factory=dict)
    """Persistent volume claim → where it is mounted, e.g. `{shared: /shared}`. The project must be on one, under the same path as here."""
    context: str | None = Field(default=None, min_length=1)
    """Context of `kubectl`, i.e. the cluster and the user; by default its current one."""
    namespace: str | None = Field(default=None, pattern="^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=63)
    """By default that of the context."""
    queue: str | None = Field(default=None, min_length=1)
    """Kueue's local queue that admits the jobs."""
    resources: dict[Annotated[str, Field(min_length=1)], str | int] = Field(default_factory=dict)
    """Further requests and limits of each pod, e.g. `{memory: 900Gi, cpu: 96}`; `cpu` applies with `device: cuda`."""
    node_selector: dict[str, str] = Field(default_factory=dict)
    """Labels that nodes must have."""
    tolerations: tuple[dict[str, str | int], ...] = Field(default=(), strict=False)
    """Taints of nodes that pods tolerate, e.g. `[{key: nvidia.com/gpu, operator: Exists}]`."""
    priority_class: str | None = Field(default=None, min_length=1)
    """Priority class of the pods."""
    service_account: str | None = Field(default=None, min_length=1)
    """Service account of the pods."""
    labels: dict[str, str] = Field(default_factory=dict)
    """Further labels of jobs and pods."""
    env: dict[str, str] = Field(default_factory=dict)
    """Further environment variables of the pods. Everybody who may read the cluster's jobs sees them."""
    secrets: tuple[Annotated[str, Field(min_length=1)], ...] = Field(default=(), strict=False)
    """Names of secrets whose keys become environment variables of the pods, e.g. one with `HF_TOKEN`."""

    @field_validator("resources")
    @classmethod
    def _check_resources(cls, value: dict[str, str | int]) -> dict[str, str | int]:
        if GPU_RESOURCE in value:
            raise ValueError(f"{GPU_RESOURCE} is set by placement.slots: remove it")
        return value


Scheduler = Slurm | Ray | Kubernetes
"""Launchers that queue jobs elsewhere."""


class Placement(Frozen):
    """Where a stage runs and how it is supervised."""

    slots: int = Field(default=1, ge=1)
    """Machine slots that the stage occupies while it runs, on each of its `nodes`. `auto`: the total threads that `threads: auto` gives its
    ranks or engines, at most the profile's slots."""
    sampler_process: Literal["own", "inline"] = "own"
    """RLVR: run vLLM in its `own` child process, or `inline` in the trainer's."""
    engines: int = Field(default=1, ge=1)
    """Parallel vLLM engines of `rlvr`, `sample`, `evaluate` and policies that judge or write, each with its own `tensor_parallel` GPUs or
    `threads` cores; `slots` must cover all of them, and in `rlvr` with `asynchronous` also the GPUs of the ranks, which come first. Reward
    models and `reference_logprobs` have a process with a copy of the model on each of these GPUs. Each chunk goes to an idle engine or
    process; its bits are the same on any."""
    sampler_memory_gb: float = Field(default=1.0, gt=0)
    """KV cache of a vLLM engine on CPU, in GiB; doubled, for the same number of tokens, where bf16 is computed through fp32."""
    gpu_memory_utilization: float = Field(default=0.85, gt=0, le=1)
    """Fraction of each of its GPUs' memory that vLLM may use: for weights, 2 GiB of activations and graphs, and its KV cache, which gets
    the rest. In `rlvr` without `asynchronous` it has this memory while it generates; the trainer has it in between."""
    retries: int = Field(default=2, ge=0)
    """Consecutive retries without progress after a transient failure; each resumes from the last checkpoint."""
    heartbeat_timeout_s: float = Field(default=600, gt=0)
    """Kill a job that has made no progress for this long."""
    timeout_s: float | None = Field(default=None, gt=0)
    """Kill a job that runs longer than this; it counts as failed."""
    grace_s: int = Field(default=30, ge=1)
    """Seconds from the request to stop until a job is killed: enough for a training step and a checkpoint. A job that has made no progress
    for `heartbeat_timeout_s` gets at most 30."""
    checkpoint_every_s: float = Field(default=300, gt=0)
    """Checkpoint after the first step that ends at least this long after the last checkpoint, or 32 times as long as training paused for
    that one, if this is more: pauses take at most 3 % of the time."""
    checkpoint_every_steps: int | None = Field(default=None, ge=1)
    """Additionally checkpoint every N steps."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """Number of most recent checkpoints to retain; older ones are deleted."""
    endpoint_concurrency: int = Field(default=16, ge=1)
    """Maximum concurrent requests to an endpoint."""
    endpoint_timeout_s: float = Field(default=120, gt=0)
    """Timeout of a request to an endpoint, capped at nine tenths of `heartbeat_timeout_s`."""
    endpoint_retries: int = Field(default=5, ge=0)
    """Retries of a request to an endpoint after a transient failure. The delay doubles from one second up to a minute, or follows the
    server's `Retry-After`, up to a minute too."""
    environment: str | None = Field(default=None, min_length=1)
    """Folder of the Python environment whose programs `external` stages run, e.g. `~/envs/axolotl` or, relative to the project,
    `.venv-trl`; by default that of Pedigree. The packages that it has are recorded, the path is not."""
    launcher: Annotated[Local | Slurm | Ray | Kubernetes, Field(discriminator="type")] = Local()
    """Where jobs start: `{type: local}`, `{type: slurm, options: [...]}` (docs/slurm.md), `{type: ray, address: ...}` (docs/ray.md) or
    `{type: kubernetes, image: ...}` (docs/kubernetes.md)."""
    checkpoint_url: StoreUrl | None = None
    """`s3://BUCKET/PREFIX` or `file:///FOLDER` (a folder shared between machines): checkpoints and chunks of running jobs are mirrored
    there, so that another machine can resume if this one is lost."""


class Machine(Frozen):
    """Hardware of a profile, for `pedigree plan`. It does not change how stages run, but a run that cannot fit is rejected."""

    gpu: str | None = None
    """A GPU listed in docs/plan.md, e.g. `h100`, which sets memory, peak and bandwidth. By default the driver is queried."""
    gpu_memory_gb: float | None = Field(default=None, gt=0)
    """Memory per GPU in GiB, if it differs from the model's usual size."""
    peak_tflops: float | None = Field(default=None, gt=0)
    """Peak dense bf16 throughput of one GPU, in 10¹² operations per second."""
    bandwidth_gbs: float | None = Field(default=None, gt=0)
    """Memory bandwidth of one GPU, in 10⁹ bytes per second."""
    gpus_per_node: int = Field(default=8, ge=1)
    """GPUs that share one machine's host memory."""
    host_memory_gb: float | None = Field(default=None, gt=0)
    """Memory of one machine, in GiB. With `device: cpu` the default is the memory of the planning machine."""
    utilization: float = Field(default=0.3, gt=0, le=1)
    """Fraction of peak throughput that training reaches, counting recomputed layers: 0.4 or more for long, full passes, usually 0.2 for
    short ones. On CPUs the default is 0.6 of the measured rate. The speed of finished stages of the same kind on such a machine takes
    precedence."""
    bandwidth_utilization: float = Field(default=0.5, gt=0, le=1)
    """Fraction of bandwidth that generation reaches. On CPUs the default is the full measured bandwidth."""
    slot_hour_price: float | None = Field(default=None, ge=0)
    """Price of one slot for one hour, in any currency: `pedigree status` and the report then show costs."""

    @field_validator("gpu")
    @classmethod
    def _check_gpu(cls, value: str | None) -> str | None:
        if value is not None and value not in GPUS:
            raise ValueError(f"gpu {not_one_of(value, [*GPUS], 'use one of them, or set gpu_memory_gb and peak_tflops instead')}")
        return value


class Override(Frozen):
    """Settings that replace the profile's for a kind or a stage."""

    numerics: dict[str, Any] = Field(default_factory=dict)
    """Settings of [numerics](#numerics)."""
    placement: dict[str, Any] = Field(default_factory=dict)
    """Settings of [placement](#placement)."""


class Execution(Frozen):
    """A profile: defaults for all stages, overrides by kind, and overrides by stage name. Later ones win."""

    slots: int = Field(ge=1)
    """Slots of the machine, shared by all clones of projects on it; stages run in parallel while their slots fit. `auto`: one per available
    physical core, and at most one per 2 GiB of memory."""
    machine: Machine = Machine()
    """Hardware, for planning."""
    numerics: Numerics = Numerics()
    """Defaults for all stages."""
    placement: Placement = Placement()
    """Defaults for all stages."""
    kinds: dict[str, Override] = Field(default_factory=dict)
    """`KIND: {numerics: {...}, placement: {...}}`"""
    stages: dict[str, Override] = Field(default_factory=dict)
    """`STAGE: {numerics: {...}, placement: {...}}`"""
    trackers: tuple[Tracker, ...] = Field(default=(), strict=False)
    """Where runs report metrics and states, e.g. `[{type: tensorboard, folder: tensorboard}]` (docs/trackers.md)."""

    @model_validator(mode="after")
    def _check_overrides(self) -> "Execution":
        found: list[tuple[Place, str]] = [
            (("kinds", name), f"kinds: {not_one_of(name, [*KINDS])}") for name in self.kinds if name not in KINDS
        ]
        places: list[Place] = [(), *(("kinds", name) for name in self.kinds), *(("stages", name) for name in self.stages)]
        for place in places:
            name = str(place[-1]) if place else ""
            try:
                self.of(name, name)
            except Mistakes as error:
                found += [((*place, *inner), ".".join([*map(str, place), message])) for inner, message in error.found]
        if found:
            raise Mistakes(found)
        return self

    def of(self, kind: str, stage: str) -> tuple[Numerics, Placement]:
        """Numerics and placement of one stage.

        Raises:
            Mistakes: a setting is invalid, or it needs more slots than the profile has.
        """
        numerics, placement = self.numerics.model_dump(), self.placement.model_dump()
        for override in (self.kinds.get(kind, Override()), self.stages.get(stage, Override())):
            numerics |= override.numerics
            placement |= override.placement
        try:
            resolved = Numerics.model_validate(numerics), Placement.model_validate(placement)
        except ValidationError as error:
            part = "numerics" if error.title == Numerics.__name__ else "placement"
            model, given = (Numerics, numerics) if part == "numerics" else (Placement, placement)
            raise Mistakes([((part, *inner), f"{part}.{message}") for inner, message in mistakes(error, model, given)]) from error
        if resolved[1].slots > self.slots and resolved[1].launcher.type == "local":
            message = f"slots {resolved[1].slots} exceeds the profile's {self.slots}: lower it, or raise the profile's"
            raise Mistakes([(("placement", "slots"), f"placement.{message}")])
        return resolved


def fitted(profile: Any, cores: int, memory: int | None) -> Any:
    """Replace `auto` in a parsed profile by numbers for this machine."""
    if not isinstance(profile, dict):
        return profile
    room = max(1, min(cores, memory // SLOT_BYTES if memory else cores))
    slots = _count(profile, "slots", room)
    threads = min(cores, MOST_THREADS, _count(profile, "slots", cores))
    taken = min(slots, threads)

    def filled(block: Any, below: Mapping[str, Any]) -> Any:
        """Resolve a profile's settings, or those of a kind or stage on top of the profile's."""
        own = _settings(block)
        combined = {**below, **own}
        parts = {part: dict(block[part]) for part in PARTS if isinstance(block.get(part), dict)} if isinstance(block, dict) else {}
        on_gpus = combined.get("device") == "cuda"
        if combined.get("threads") == AUTO and not own.keys().isdisjoint(DIVIDE_CORES if on_gpus else DIVIDE_THREADS):
            share = _share_of_node(combined, cores, slots) if on_gpus else _share(combined, threads, taken)
            parts.setdefault("numerics", {})["threads"] = share
        if parts.get("placement", {}).get("slots") == AUTO:
            parts["placement"]["slots"] = taken
        return {**block, **parts} if parts else block

    found = filled(profile, {})
    for name in ("kinds", "stages"):
        if isinstance(profile.get(name), dict):
            found = found | {name: {key: filled(block, _settings(profile)) for key, block in profile[name].items()}}
    return found | ({"slots": room} if profile.get("slots") == AUTO else {})


def _settings(block: Any) -> dict[str, Any]:
    """Merged numerics and placement of a block; their names are disjoint."""
    parts = [block.get(part) for part in PARTS] if isinstance(block, dict) else []
    return {name: value for part in parts if isinstance(part, dict) for name, value in part.items()}


def _share(combined: Mapping[str, Any], threads: int, taken: int) -> int:
    """Threads per rank or engine; engines must fit into the stage's slots."""
    engines = _count(combined, "engines", 1)
    ranks = max(_ranks_per_node(combined), engines * _count(combined, "tensor_parallel", 1))
    return max(1, (min(threads, _count(combined, "slots", taken)) if engines > 1 else threads) // ranks)


def _share_of_node(combined: Mapping[str, Any], cores: int, slots: int) -> int:
    """Threads per rank or engine of a stage on GPUs, whose cores are those of its slots."""
    return max(1, cores * _count(combined, "slots", 1) // slots // max(_ranks_per_node(combined), _count(combined, "engines", 1)))


def _ranks_per_node(combined: Mapping[str, Any]) -> int:
    return _count(combined, "world_size", 1) // _count(combined, "nodes", 1)


def _count(settings: Mapping[str, Any], name: str, otherwise: int) -> int:
    value = settings.get(name)
    return value if isinstance(value, int) and value > 0 else otherwise


def kv_cache_bytes(gpu_bytes: int, placement: Placement, weights: int) -> int:
    """KV cache of a vLLM engine on each of its GPUs, of `gpu_bytes`, next to so many bytes of weights; at most 0 if there is no room."""
    return int(gpu_bytes * placement.gpu_memory_utilization) - weights - ENGINE_OVERHEAD


def gpus_taken(numerics: Numerics, placement: Placement, *, beside: bool = False) -> int:
    """GPUs of a machine for the ranks and engines of a stage, which take turns unless the engines are `beside` training."""
    engines = placement.engines * numerics.tensor_parallel
    return numerics.ranks_per_node + engines if beside else max(numerics.ranks_per_node, engines)


def served_problem(numerics: Numerics, placement: Placement, ports: Sequence[str], *, beside: bool = False) -> str | None:
    """Error message if the policies at these ports, which are queried while the stage works, have no GPUs of their own; else None."""
    taken = gpus_taken(numerics, placement, beside=beside)
    needed = taken + len(ports) * numerics.tensor_parallel
    if not ports or numerics.device == "cpu" or needed <= placement.slots:
        return None
    return (
        f"policies at {' and '.join(ports)} need GPUs of their own: {taken} of the stage and {needed - taken} with tensor_parallel "
        f"{numerics.tensor_parallel} need {needed} slots, but placement.slots is {placement.slots}: raise slots, or lower world_size or "
        "engines"
    )


def engines_problem(numerics: Numerics, placement: Placement, *, beside: bool = False) -> str | None:
    """Error message if the stage's engines would share GPUs or cores or, `beside` training, GPUs with its ranks; else None."""
    each = numerics.tensor_parallel * (numerics.threads if numerics.device == "cpu" else 1)
    together = numerics.ranks_per_node + placement.engines * each
    if beside and numerics.device == "cuda" and together > placement.slots:
        return (
            f"asynchronous engines need separate GPUs: {numerics.ranks_per_node} ranks of the trainer and engines {placement.engines} with "
            f"tensor_parallel {numerics.tensor_parallel} need {together} slots, but placement.slots is {placement.slots}: lower world_size "
            "or engines, or raise slots"
        )
    if placement.engines == 1 or placement.engines * each <= placement.slots:
        return None
    ranks = f"tensor_parallel {numerics.tensor_parallel}" + (f" and threads {numerics.threads}" if numerics.device == "cpu" else "")
    return (
        f"engines {placement.engines}, each with {ranks}, need {placement.engines * each} slots, but placement.slots is {placement.slots}: "
        "raise it, or lower engines"
    )


def ranks_problem(numerics: Numerics, placement: Placement) -> str | None:
    """Error message if a training stage has more ranks on a machine than GPUs, else None."""
    each = numerics.ranks_per_node
    if numerics.device == "cpu" or each <= placement.slots:
        return None
    return (
        f"world_size {numerics.world_size} on nodes {numerics.nodes} is {each} ranks on each, but placement.slots gives it "
        f"{placement.slots} GPUs there: lower world_size, or raise slots or nodes"
    )


def batch_problem(config: Frozen, numerics: Numerics) -> str | None:
    """Error message if a training stage's global batch does not divide evenly into ranks and padded micro-batches, else None.

    Packed micro-batches need no second condition: they are filled by tokens, and the loss is divided by the global count.
    """
    ranks, size = numerics.teams, numerics.micro_batch_sequences
    plan = kind_of(config).training_plan(config)
    if plan is None:
        return None
    if numerics.sequence_parallel > 1 and kind_of(config).opens_engines(config):
        return f"sequence_parallel is {numerics.sequence_parallel}, but a stage with rollouts computes whole rows on each rank: set it to 1"
    batch, name = plan.batch, plan.batch_of
    if batch % ranks:
        return f"{name} {batch} is not divisible by {ranks} ranks: make it a multiple of {ranks}, or change world_size"
    share = batch // ranks
    if not numerics.packing and share > size and share % size:
        return (
            f"{name} {batch} over {ranks} ranks is {share} sequences per rank, not a multiple of micro_batch_sequences {size}: "
            f"set micro_batch_sequences to a divisor of {share}, or `packing: true`"
        )
    return None


def profile_path(folder: Path, name: str) -> Path:
    """File of a profile: by path, or by name in the project's `configs/execution/`, else among those that Pedigree ships."""
    if name.endswith((".yaml", ".yml")):
        return Path(name)
    own, packaged = folder / f"{name}.yaml", PACKAGED.executions / f"{name}.yaml"
    return packaged if packaged.exists() and not own.exists() else own


def profile_names(folder: Path) -> list[str]:
    """Names of the project's profiles and of those that Pedigree ships."""
    return sorted({path.stem for each in (folder, PACKAGED.executions) for path in each.glob("*.yaml")})
