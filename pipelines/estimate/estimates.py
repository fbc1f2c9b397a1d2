"""Estimate each stage of a recipe under a profile: memory, tokens, steps, time, disk, and whether it fits."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import median
from typing import Any

from pedigree.configs.base.kind import MODELS
from pedigree.configs.base.project import Project
from pedigree.configs.base.work import SHARE_OF_A_BOUND, Amounts
from pedigree.configs.language.execution import FORMERLY, Execution, Numerics, Placement
from pedigree.configs.language.graph import Graph, Node
from pedigree.configs.methods.language_model import asks_endpoint
from pedigree.configs.rows.source_models import PackagedModel, RandomLlama
from pedigree.data.artifacts.artifacts import Run, read_run
from pedigree.data.host.machine import settled
from pedigree.data.store.untrusted import ArtifactError
from pedigree.pipelines.estimate import flops
from pedigree.pipelines.estimate.amounts import amounts_of
from pedigree.pipelines.estimate.facts import facts_of
from pedigree.pipelines.estimate.fit import FitProblem, Trial, misfit
from pedigree.pipelines.estimate.machines import Hardware, gpu_named, hardware_of
from pedigree.pipelines.estimate.needs import Facts, Needs, engine_dtype, trained_parameters
from pedigree.pipelines.estimate.peak_memory import SIZES
from pedigree.pipelines.estimate.rates import Rates, known
from pedigree.pipelines.lineage.ancestry import opened

START_S = 60.0
"""Assumed seconds to load libraries and models on GPUs, for stages that have not run yet."""
CPU_START_S = {"none": 5.0, "torch": 12.0, "deepspeed": 20.0, "vllm": 20.0, "deepspeed+vllm": 35.0}
"""Engine → the same on a CPU, for a model of 135M parameters."""
ROWS_A_SECOND = 5000.0
"""Throughput of stages without a model; a low value from docs/benchmarks.md."""
DECIDE_SPEED = (
    "device",
    "world_size",
    "nodes",
    "sequence_parallel",
    "tensor_parallel",
    "kernels",
    "packing",
    "offload_optimizer",
    "deterministic",
)
"""Numerics that, together with `bf16_products`, must be equal for a finished stage to predict another one's time."""
MEASURED = "this machine's measured matmul speed"


@dataclass(frozen=True)
class Time:
    """Seconds, and the basis of the estimate."""

    seconds: float
    how: str


@dataclass(frozen=True)
class Seconds:
    """Estimated seconds of a stage's work."""

    generating: float
    training: float
    """Or scoring."""
    beside: bool
    """Whether engines and trainer work at the same time, each on its own GPUs: the slower one decides."""

    @property
    def total(self) -> float:
        return max(self.generating, self.training) if self.beside else self.generating + self.training

    @property
    def busy(self) -> str:
        """Shares of the time in which trainer and engines work, where there are both."""
        if not self.generating or not self.training:
            return ""
        return f"; trainer busy {self.training / self.total:.0%}, engines {self.generating / self.total:.0%}"


@dataclass(frozen=True)
class Estimate:
    """Estimate of one stage."""

    node: Node
    hardware: Hardware
    amounts: Amounts
    facts: Facts | None
    needs: Needs | None
    unknown: str = ""
    """Why its memory is unknown, if it uses a model."""
    time: Time | None = None
    artifact: int | None = None
    """Bytes of the model it produces; None if it produces none."""
    scratch: int = 0
    """Bytes of checkpoints while it runs."""
    misfit: FitProblem | None = None

    @property
    def gpus(self) -> int:
        return self.needs.gpus if self.needs and self.hardware.device == "cuda" else 0

    @property
    def gpu_hours(self) -> float | None:
        return self.time.seconds / 3600 * self.gpus if self.time else None


@dataclass(frozen=True)
class Setting:
    """Settings under which a stage is estimated."""

    numerics: Numerics
    engines: int
    """Engines, or copies of a frozen model, that run in parallel; 1 if none is started."""
    hardware: Hardware


@dataclass
class Estimates:
    """Cached estimates of a recipe's stages under a profile."""

    project: Project
    graph: Graph
    execution: Execution
    rates: Callable[[], Rates | None] = known
    """Rates of this machine's cores, for CPU stages that have not run. `measured` takes seconds if no measurement is cached."""
    due: Collection[str] = ()
    """Addresses of stages whose artifacts will be replaced, so that no shape is read from them."""
    _made: dict[str, Estimate] = field(default_factory=dict)
    _known: dict[str, tuple[Amounts, Facts | str | None]] = field(default_factory=dict)

    def of(self, node: Node) -> Estimate:
        """Estimate under the profile; a finished stage takes as long as its last run."""
        if node.address not in self._made:
            numerics, placement = self.execution.of(node.kind, node.name)
            self._made[node.address] = self.under(node, numerics, placement)
        return self._made[node.address]

    def from_scratch(self, node: Node) -> Estimate:
        """Estimate under the profile, ignoring the stage's own last run."""
        return self.under(node, *self.execution.of(node.kind, node.name), new=True)

    def under(self, node: Node, numerics: Numerics, placement: Placement, new: bool = False) -> Estimate:
        """Estimate under other settings; `new` ignores the stage's own last run."""
        engines = placement.engines if node.declaration.opens_engines(node.config) else 1
        setting = Setting(numerics, engines, hardware_of(numerics.device, self.execution.machine))
        amounts, facts = self.work_of(node)
        time = self._time(node, setting, new)
        if not isinstance(facts, Facts):
            return Estimate(node, setting.hardware, amounts, None, None, facts or "", time)
        hardware = setting.hardware
        artifact = SIZES[facts.dtype] * facts.policy.parameters if facts.training or facts.imported else None
        if facts.imported and hardware.device == "cuda":  # it uses only host memory
            return Estimate(node, hardware, amounts, facts, None, time=time, artifact=artifact)
        trial = Trial(facts, numerics, placement, hardware)
        return Estimate(
            node, hardware, amounts, facts, trial.needs,
            time=time,
            artifact=artifact,
            scratch=checkpoint_bytes(facts, placement.keep_checkpoints),
            misfit=misfit(trial),
        )  # fmt: skip

    def work_of(self, node: Node) -> tuple[Amounts, Facts | str | None]:
        """How much work a stage has, and with which models; a text says why the latter are unknown, None that there are none."""
        if node.address not in self._known:
            amounts = amounts_of(self.project, self.graph, node)
            self._known[node.address] = amounts, facts_of(self.project, self.graph, node, amounts, self.due)
        return self._known[node.address]

    def _operations(self, node: Node, checkpointing: bool) -> float | None:
        amounts, facts = self.work_of(node)
        return operations(amounts, facts if isinstance(facts, Facts) else None, checkpointing)

    def _time(self, node: Node, setting: Setting, new: bool) -> Time | None:
        size = self._operations(node, setting.numerics.gradient_checkpointing)
        amounts, facts = self.work_of(node)
        own = None if new else self._finished.get(node.address)
        if own is not None and own.alike(setting):
            return Time(own.seconds * (size / own.operations if size and own.operations else 1), "its last run")
        others = [past for past in self._finished.values() if past.node.kind == node.kind and past.node.address != node.address]
        of_models = isinstance(facts, Facts)  # the work of a judge without a model is measured in rows
        rates = [past.rate for past in others if past.rate and past.of_models == of_models and past.alike(setting)]
        if rates and size:
            return Time(size / median(rates), f"finished {node.kind} stages on the same hardware")
        if asks_endpoint(node.config):
            return None
        if setting.hardware.device == "cpu":
            return self._on_this_cpu(node, setting, size)
        found = assumed(amounts, facts, setting, size) if isinstance(facts, Facts) and size else None
        how = f"utilization {setting.hardware.utilization:g} of the GPU's peak"
        return Time(START_S + found.total, how + found.busy) if found and found.total else None

    def _on_this_cpu(self, node: Node, setting: Setting, size: float | None) -> Time | None:
        """Time from this machine's measured matmul speed; None if that or the workload is unknown."""
        amounts, facts = self.work_of(node)
        start = CPU_START_S[node.declaration.engine]
        only_names = node.output in MODELS and node.declaration.engine == "none"
        if only_names or isinstance(getattr(node.config, "source", None), PackagedModel | RandomLlama):  # no download of unknown duration
            return Time(start, "the startup time")
        if facts is None:
            return Time(start + amounts.rows.value / ROWS_A_SECOND, "the number of rows") if amounts.rows else None
        rates = self._rates if isinstance(facts, Facts) and size and facts.computes else None
        if rates is None or not isinstance(facts, Facts) or size is None:
            return None
        dtype = engine_dtype(facts.sampling, setting.numerics) if facts.sampling else facts.dtype
        ranks = setting.numerics.ranks_per_node if facts.training else setting.numerics.tensor_parallel * setting.engines
        hardware = setting.hardware.at(rates, dtype, setting.numerics, ranks)
        seconds = assumed(amounts, facts, replace(setting, hardware=hardware), size)
        bounded = amounts.tokens is not None and amounts.tokens.how == "at most"
        return Time(start + seconds.total * (SHARE_OF_A_BOUND if bounded else 1), MEASURED) if seconds and seconds.total else None

    @cached_property
    def _rates(self) -> Rates | None:
        """Cached, since even a failed measurement takes time."""
        return self.rates()

    @cached_property
    def _finished(self) -> Mapping[str, "Past"]:
        """Finished stages of the recipe."""
        found = {}
        for node in self.graph.nodes.values():
            run = run_of(self.project, node)
            seconds = run_seconds(run)
            if run is not None and seconds:
                checkpointing = bool(run.numerics.get("gradient_checkpointing"))
                of_models = isinstance(self.work_of(node)[1], Facts)
                found[node.address] = Past(node, run, seconds, self._operations(node, checkpointing), of_models)
        return found


@dataclass(frozen=True)
class Past:
    """A finished stage."""

    node: Node
    run: Run
    seconds: float
    operations: float | None
    of_models: bool
    """Whether `operations` counts model operations rather than rows."""

    @property
    def rate(self) -> float:
        return (self.operations or 0) / self.seconds

    def alike(self, setting: Setting) -> bool:
        """Whether it ran on the same hardware with the same ranks, engines, and kernels."""
        hardware, ran = setting.hardware, self.run.hardware
        numerics = FORMERLY | self.run.numerics
        if self.node.declaration.engine != "none" and numerics["bf16_products"] != settled(setting.numerics).bf16_products:
            return False
        if any(numerics.get(name) != getattr(setting.numerics, name) for name in DECIDE_SPEED):
            return False
        engines = self.run.placement.get("engines", 1) if self.node.declaration.opens_engines(self.node.config) else 1
        if engines != setting.engines:
            return False
        if hardware.device == "cuda":
            return bool(ran.gpus) and hardware.gpu is not None and gpu_named(ran.gpus[0])[0] == hardware.gpu
        threads = self.run.numerics.get("threads") == setting.numerics.threads
        return threads and (ran.cpu, ran.cores) == (hardware.cpu, hardware.cores)


def assumed(amounts: Amounts, facts: Facts, setting: Setting, size: float) -> Seconds | None:
    """Time of a stage's work from the speed of the hardware, None if that or the work is unknown."""
    hardware, numerics, generating, training = setting.hardware, setting.numerics, 0.0, 0.0
    if hardware.peak is None or not facts.computes:
        return None
    plan = facts.sampling
    if plan is not None:
        if hardware.bandwidth is None or amounts.requests is None or amounts.prompt is None:
            return None
        dtype, workers, prompt = engine_dtype(plan, numerics), numerics.tensor_parallel, amounts.prompt.value
        block = flops.block_size(numerics.device, dtype, prompt + amounts.answer, workers)
        alone = min(amounts.requests.value, plan.chunk or plan.together)  # a chunk is not split across engines
        generating = flops.generation(
            facts.served or facts.policy,
            requests=max(amounts.requests.value / setting.engines, alone),
            together=plan.together,
            prompt=prompt,
            computed=flops.unshared(prompt, plan.samples, block),
            answer=amounts.answer,
            size=SIZES[dtype],
            ranks=workers,
            peak=hardware.peak,
            utilization=hardware.utilization,
            bandwidth=hardware.bandwidth * hardware.bandwidth_utilization,
        )
    if plan is None or facts.training:
        ranks = numerics.world_size if facts.training else setting.engines * numerics.tensor_parallel
        training = flops.seconds(size, ranks, hardware.peak, hardware.utilization)
    return Seconds(generating, training, plan is not None and plan.beside and hardware.device == "cuda")


def operations(amounts: Amounts, facts: Facts | None, checkpointing: bool) -> float | None:
    """Floating-point operations of a whole stage; for a stage that generates, those of its tokens; without a model, its rows."""
    if facts is None:
        return amounts.rows.value if amounts.rows else None
    if not facts.computes:
        return float(facts.policy.parameters)
    if amounts.tokens is None:
        return None
    document = amounts.document.value if amounts.document else (amounts.prompt.value if amounts.prompt else 0)
    plan = facts.training
    if plan is None:
        return flops.forward(facts.served or facts.policy, document) * amounts.tokens.value
    trained = flops.training(facts.policy, document, checkpointing=checkpointing, adapters=plan.adapters is not None)
    a_token = plan.updates * trained + plan.looks * flops.forward(facts.policy, document)
    a_token += sum(flops.forward(shape, document) for shape in (facts.reference, facts.teacher) if shape is not None)
    if facts.value is not None:  # one forward pass per token, and full training
        a_token += flops.forward(facts.value, document) + plan.updates * flops.training(facts.value, document, checkpointing=checkpointing)
    if facts.rewarding is not None:
        a_token += facts.rewarding_models * flops.forward(facts.rewarding, document)
    return a_token * amounts.tokens.value


def checkpoint_bytes(facts: Facts, kept: int) -> int:
    """Maximum bytes of checkpoints during training: `kept` + 1 copies of weights, fp32 weights, and two moments."""
    plan = facts.training
    if plan is None:
        return 0
    size, trained = SIZES[plan.dtype], trained_parameters(facts.policy, plan.adapters, False)
    critic = facts.value.parameters if facts.value is not None else 0
    return (kept + 1) * (12 + size) * (trained + critic)


def run_of(project: Project, node: Node) -> Run | None:
    """Run record of a stage's artifact; None if missing or unreadable."""
    artifact = opened(project, node)
    try:
        return read_run(artifact.path / "run.json") if artifact else None
    except (ArtifactError, OSError):
        return None


def run_seconds(run: Run | None) -> float | None:
    """Wall time of a job, without that in a queue; None unless exactly one attempt is recorded."""
    return run.attempts[0].seconds if run is not None and len(run.attempts) == 1 else None


def document_of(estimate: Estimate) -> dict[str, Any]:
    """All terms of an estimate, for `--json`."""
    needs, amounts = estimate.needs, estimate.amounts
    document: dict[str, Any] = {"unknown": estimate.unknown or None}
    if needs is not None:
        document["memory"] = {
            "per_rank": needs.device,
            "loading": needs.loading,
            "rollouts": needs.rollouts or None,
            "peak_bytes": needs.peak,
            "bound_bytes": estimate.hardware.bytes_per_rank,
            "ranks": needs.ranks,
            "host_bytes_per_rank": needs.host_of(1),
            "tokens_a_pass": needs.tokens_a_pass or None,
        }
        if needs.engine is not None:
            engine = needs.engine
            document["memory"]["engine"] = {
                "ranks": engine.ranks, **engine.terms, "least_kv_cache": engine.width * engine.least_cache, "share_bytes": engine.share,
                "room_for_kv_cache": engine.width * engine.room if engine.room is not None else None,
            }  # fmt: skip
    named = {"rows": amounts.rows, "document_tokens": amounts.document, "steps": amounts.steps, "tokens": amounts.tokens}
    document["parameters"] = estimate.facts.policy.parameters if estimate.facts else None
    document["amounts"] = {
        name: {"value": round(amount.value, 3), "how": amount.how.replace(" ", "_")} if amount else None for name, amount in named.items()
    }
    document["time"] = {"seconds": round(estimate.time.seconds, 1), "how": estimate.time.how} if estimate.time else None
    document["gpus"] = estimate.gpus or None
    document["gpu_hours"] = round(estimate.gpu_hours, 3) if estimate.gpu_hours is not None and estimate.gpus else None
    document["checkpoint_bytes"] = estimate.scratch
    found = estimate.misfit
    document["misfit"] = found and {
        "lacks": [{"resource": lack.resource, "needed_bytes": lack.needed, "bound_bytes": lack.bound} for lack in found.lacks],
        "remedies": list(found.remedies),
    }
    return document
