"""What one stage needs at the same time, from what is known of its models and its work: pure, so that a remedy can be tried out."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from configs.base.frozen import Dtype, Frozen
from configs.base.work import SamplingPlan
from configs.judging.answers import Evaluate, Sample, Scorers
from configs.judging.rephrasing import FindRephrased
from configs.judging.synthesis import Synthesize
from configs.language.execution import Numerics, Placement
from configs.methods.merging import Merge
from configs.methods.policy_gradient import Ppo
from configs.methods.training import Lora, PreferenceTrain, ReferenceLogprobs, RewardModel, Rlvr, Sft, Training
from configs.rows.suite_forms import Form
from data.host.machine import settled
from pipelines.estimate import memory
from pipelines.estimate.memory import GIB, SIZES, Trained
from pipelines.estimate.sampling_plan import sampling_plan_of
from pipelines.estimate.shapes import Shape

ROLLOUT_CHUNK = 256
"""Requests that `rlvr` submits together (`stages.rlvr.run.ROLLOUT_CHUNK`)."""


@dataclass(frozen=True)
class Facts:
    """A stage with what is known of its models."""

    config: Frozen
    policy: Shape
    """The model that is trained, asked or judges; the largest where there are several; not a language model that rates beside others."""
    reference: Shape | None = None
    """Held in memory beside it."""
    value: Shape | None = None
    """PPO's value model."""
    finer: bool = False
    """Whether the policy's stored weights are finer than bf16."""
    document: float | None = None
    """Tokens of a row with all its answers; None where no row is there."""
    prompt: float | None = None
    """Tokens of a prompt, where one is there."""
    requests: float | None = None
    """Answers to generate."""
    suites: tuple[Form | None, ...] = ()
    """Forms of the suites that it asks."""
    judge: Shape | None = None
    """A language model that rates."""

    @property
    def plan(self) -> SamplingPlan | None:
        return sampling_plan_of(self.config, self.suites)


@dataclass(frozen=True)
class Engine:
    """vLLM, on each of its ranks; of several that work side by side, one."""

    ranks: int
    weights: int
    overhead: int
    cache: int
    """KV cache of a chunk whose prompts are as long as they are known or may be; of one request where requests queue."""
    least_cache: int
    """The same with prompts of one token: with less it cannot run."""
    share: int | None
    """Bytes that it may take in all; None where the GPU's memory is unknown."""
    room: int | None
    """Bytes that are left for its KV cache."""
    width: int = 1
    """On a CPU, how many times as many bytes weights, cache and room take: 2 where vLLM computes in fp32 in place of bf16."""

    @property
    def terms(self) -> dict[str, int]:
        return {"weights": self.width * self.weights, "overhead": self.overhead, "kv_cache": self.width * self.cache}


@dataclass(frozen=True)
class Needs:
    """Of one stage. Bytes."""

    device: dict[str, int] = field(default_factory=dict)
    """Per rank while it computes: the terms of `memory.FORMULAS`. On a CPU host memory of the rank."""
    loading: dict[str, int] = field(default_factory=dict)
    """Per rank while models arrive."""
    engine: Engine | None = None
    host: int = 0
    """Of host memory per rank, where the device is a GPU."""
    ranks: int = 1
    tokens_a_pass: int = 0
    lesser: "Needs | None" = None
    """What it needs at another time, in other processes: less memory of a GPU, or of a machine without one."""

    @property
    def peak(self) -> int:
        return max(memory.total(self.device), memory.total(self.loading))

    @property
    def together(self) -> int:
        """Of all ranks on one machine; only the first has the sampler."""
        return max(_of_all_ranks(self.device, self.ranks), _of_all_ranks(self.loading, self.ranks))

    @property
    def gpus(self) -> int:
        own = max(self.ranks if self.device else 0, self.engine.ranks if self.engine else 0)
        return max(own, self.lesser.gpus) if self.lesser else own

    def host_of(self, most: int) -> int:
        """Of the host memory of a machine that has at most so many of the ranks."""
        own = min(self.ranks, most) * self.host
        return max(own, self.lesser.host_of(most)) if self.lesser else own


def _of_all_ranks(terms: Mapping[str, int], ranks: int) -> int:
    sampler = terms.get("sampler", 0)
    return ranks * (memory.total(terms) - sampler) + sampler


def needs_of(facts: Facts, numerics: Numerics, placement: Placement, gpu_bytes: int | None = None) -> Needs:
    """What the stage needs under a profile.

    Args:
        facts: of the stage.
        numerics: of the profile.
        placement: of the profile.
        gpu_bytes: memory of one GPU, where it is known; vLLM takes a share of it.
    """
    config = facts.config
    plan = facts.plan
    if plan is not None and isinstance(config, Sample | Evaluate | Synthesize | FindRephrased):
        engine = _engine(facts, facts.policy, plan, numerics, placement, gpu_bytes)
        return Needs(device=_engine_on(engine, numerics), engine=engine, ranks=engine.ranks * placement.engines)
    if isinstance(config, Sft | RewardModel | PreferenceTrain | Rlvr):
        return _training(facts, config, numerics, placement, gpu_bytes)
    if isinstance(config, ReferenceLogprobs | Scorers):
        size, tokens = SIZES[config.dtype], tokens_of_a_frozen_pass(facts, config, numerics)
        terms = memory.inference(facts.policy, numerics, size, tokens, scores=isinstance(config, Scorers))
        host = 0 if numerics.device == "cpu" else 4 * facts.policy.parameters
        found = Needs(device=terms | _runtime(numerics), loading=_arriving(facts.policy, numerics), host=host, tokens_a_pass=tokens)
        if not isinstance(config, Scorers) or plan is None or facts.judge is None:
            return found
        engine = _engine(facts, facts.judge, plan, numerics, placement, gpu_bytes)
        rating = Needs(device=_engine_on(engine, numerics), engine=engine, ranks=engine.ranks * placement.engines)
        return _one_after_the_other(found, rating, numerics) if config.reward_weight else rating
    if isinstance(config, Merge):
        return Needs()
    return Needs(device={"weights": 4 * facts.policy.parameters} | _runtime(numerics))  # source_model: in fp32, on the host


def _one_after_the_other(scoring: Needs, rating: Needs, numerics: Numerics) -> Needs:
    """Of one process with reward models, then of the engines of a language model."""
    on_cpu = numerics.device == "cpu"
    lesser, larger = sorted((rating, scoring), key=lambda needs: needs.together if on_cpu else needs.peak)
    return replace(larger, engine=rating.engine, tokens_a_pass=scoring.tokens_a_pass, lesser=lesser)


def _training(facts: Facts, config: Training | Rlvr, numerics: Numerics, placement: Placement, gpu_bytes: int | None) -> Needs:
    scores, tokens = isinstance(config, RewardModel), tokens_of_a_pass(facts, config, numerics)
    shape = scored(facts.policy) if scores else facts.policy
    model = Trained(shape, config.dtype, trained_parameters(shape, config.lora, scores), facts.finer)
    terms = memory.training(model, numerics, tokens, scores)
    loading = {"weights": memory.loading(model, numerics)}
    host = memory.host(model, numerics)
    if facts.reference is not None:
        terms["reference"] = SIZES[config.dtype] * facts.reference.parameters
    engine = None
    if isinstance(config, Rlvr):
        if isinstance(config.algorithm, Ppo) and facts.value is not None:
            critic = Trained(scored(facts.value), config.dtype, scored(facts.value).parameters)
            terms["value_model"] = _at_rest(critic, numerics)
            host += memory.host(critic, numerics) if numerics.offload_optimizer else 0
        plan = facts.plan
        assert plan is not None
        engine = _engine(facts, facts.policy, plan, numerics, placement, gpu_bytes)
        taken = _engine_on(engine, numerics)
        terms["sampler"] = memory.total(taken) if numerics.device == "cpu" else engine.share or memory.total(engine.terms)
        loading["sampler"] = terms["sampler"]
    if numerics.device == "cpu":
        loading["weights"], host = max(loading["weights"], host), 0
    return Needs(
        device=terms | _runtime(numerics), loading=loading | _runtime(numerics), engine=engine, host=host, ranks=numerics.world_size,
        tokens_a_pass=tokens,
    )  # fmt: skip


def _at_rest(model: Trained, numerics: Numerics) -> int:
    """A model under its optimizer while another one computes."""
    return sum(part(model, numerics) for part in (memory.weights, memory.gradients, memory.optimizer, memory.buckets))


def tokens_of_a_pass(facts: Facts, config: Training | Rlvr, numerics: Numerics) -> int:
    """Tokens of a forward pass of one rank: what the profile allows, one unit that is longer alone, and no more than a step has.

    A unit (a conversation, a pair, the answers to a prompt) is cut nowhere.
    """
    if isinstance(config, Rlvr):
        longest = config.max_prompt_length + config.sampling.max_tokens
        a_step = config.prompts_per_step * config.samples_per_prompt * (facts.document or longest)
        unit, answers = longest, 1
    else:
        answers = 1 if isinstance(config, Sft) else 2
        unit = min(answers * config.max_length, facts.document * 4) if facts.document else answers * config.max_length
        a_step = config.global_batch * (facts.document or unit)
    if numerics.packing:
        found = max(numerics.micro_batch_tokens, unit)
    else:
        found = numerics.micro_batch_sequences * unit
    return max(1, int(min(found, max(unit, a_step / numerics.world_size))))


def tokens_of_a_frozen_pass(facts: Facts, config: ReferenceLogprobs | Scorers, numerics: Numerics) -> int:
    """Tokens of a forward pass without a backward pass: what the profile allows, or a longer document alone; padded, rows of the longest.

    Answers share a pass only where they fit, so that a unit is one document. What is scored has no bound before it is there.
    """
    longest = 4 * facts.document if facts.document else None
    if isinstance(config, ReferenceLogprobs):
        longest = min(config.max_length, longest or config.max_length)
    if longest is None:
        return numerics.micro_batch_tokens
    return int(max(numerics.micro_batch_tokens, longest) if numerics.packing else numerics.micro_batch_sequences * longest)


def trained_parameters(shape: Shape, lora: Lora | None, scores: bool) -> int:
    """Ψ_t; a scalar head is trained beside adapters."""
    if lora is None:
        return shape.parameters
    found = shape.adapters(lora.rank)
    if lora.targets != "all-linear":
        found = found * min(len(lora.targets), 7) // 7
    return found + (shape.hidden if scores else 0)


def scored(shape: Shape) -> Shape:
    """The same body with a scalar head in place of the vocabulary's."""
    headless = shape.parameters if shape.tied else shape.parameters - shape.embedding
    return replace(shape, tied=True, stated=headless + shape.hidden)


def _engine(facts: Facts, shape: Shape, plan: SamplingPlan, numerics: Numerics, placement: Placement, gpu_bytes: int | None) -> Engine:
    size, ranks, config = SIZES[plan.dtype], numerics.tensor_parallel, facts.config
    width = SIZES[engine_dtype(plan, numerics)] // size
    chunk, prompt = 1 if plan.queues else plan.together, facts.prompt or 1.0
    if isinstance(config, Rlvr):
        chunk, prompt = min(ROLLOUT_CHUNK, chunk), min(float(config.max_prompt_length), facts.prompt or math.inf)
    if facts.requests:
        chunk = max(1, min(chunk, int(facts.requests)))
    weights = size * shape.parameters // ranks
    cuda = numerics.device == "cuda"
    overhead = memory.ENGINE_OVERHEAD if cuda else memory.RUNTIME["cpu"]
    caches = [memory.kv_cache(shape, size, chunk, int(tokens) + plan.answer, ranks) for tokens in (prompt, 1)]
    share = int(gpu_bytes * placement.gpu_memory_utilization) if cuda and gpu_bytes else None
    room = int(placement.sampler_memory_gb * GIB) if not cuda else max(0, share - weights - overhead) if share is not None else None
    return Engine(ranks, weights, overhead, caches[0], caches[1], share, room, width)


def engine_dtype(plan: SamplingPlan, numerics: Numerics) -> Dtype:
    """In which vLLM computes: it has no other way than fp32 to multiply bf16 through fp32."""
    return "fp32" if settled(numerics).bf16_products == "fp32" else plan.dtype


def _engine_on(engine: Engine, numerics: Numerics) -> dict[str, int]:
    """Memory that vLLM takes: on a GPU all of its share, on a CPU the cache that the profile gives it."""
    if numerics.device == "cpu":
        cache = engine.room or 0
        return {"weights": engine.width * engine.weights, "kv_cache": engine.width * cache, "overhead": engine.overhead}
    if engine.share is None:
        return engine.terms
    return {"weights": engine.weights, "overhead": engine.overhead, "kv_cache": max(0, engine.share - engine.weights - engine.overhead)}


def _arriving(shape: Shape, numerics: Numerics) -> dict[str, int]:
    """A frozen model is read in fp32 on the host."""
    return {"weights": 4 * shape.parameters} | _runtime(numerics) if numerics.device == "cpu" else {}


def _runtime(numerics: Numerics) -> dict[str, int]:
    return {"runtime": memory.RUNTIME[numerics.device]}


def dtype_of(config: Frozen) -> Dtype:
    """Compute dtype of a stage."""
    return getattr(config, "dtype", "bf16")
