"""Peak resource needs of a stage from its models and workload, as pure functions so that remedies can be tried."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from pedigree.configs.base.frozen import Dtype
from pedigree.configs.base.work import Adapters, SamplingPlan, ScoringPlan, TrainingPlan
from pedigree.configs.language.execution import ENGINE_OVERHEAD, Numerics, Placement, kv_cache_bytes
from pedigree.configs.methods.training import served_rank
from pedigree.data.host.machine import settled
from pedigree.pipelines.estimate import peak_memory
from pedigree.pipelines.estimate.peak_memory import GIB, SIZES, Trained
from pedigree.pipelines.estimate.shapes import Shape


@dataclass(frozen=True)
class Facts:
    """What a stage does with models, and their shapes."""

    policy: Shape
    """The largest model that is trained or scores; else the largest that is sampled or read."""
    training: TrainingPlan | None = None
    scoring: ScoringPlan | None = None
    sampling: SamplingPlan | None = None
    served: Shape | None = None
    """The largest model that an engine loads."""
    queried: tuple[tuple[SamplingPlan, Shape], ...] = ()
    """Policies that are queried while the stage works, each in an engine of its own."""
    reference: Shape | None = None
    """Reference model."""
    reference_is_policy: bool = False
    """Whether it is the policy before training, which with adapters is the trained model with its adapters switched off."""
    teacher: Shape | None = None
    value: Shape | None = None
    """PPO's value model."""
    rewarding: Shape | None = None
    """The largest of the reward models that score next to a training."""
    rewarding_models: int = 0
    """Their number."""
    finer: bool = False
    """Whether the policy's stored weights have more precision than bf16."""
    document: float | None = None
    """Tokens per row with all its answers; None until rows exist."""
    prompt: float | None = None
    """Tokens per prompt; None until prompts exist."""
    requests: float | None = None
    """Answers to generate."""
    dtype: Dtype = "bf16"
    """Compute dtype, or that of an imported model."""
    imported: bool = False
    """Whether the model comes from outside the recipe."""

    @property
    def computes(self) -> bool:
        """Whether tokens pass through a model."""
        return bool(self.training or self.scoring or self.sampling)


@dataclass(frozen=True)
class Engine:
    """Bytes of one vLLM engine per rank."""

    ranks: int
    weights: int
    overhead: int
    cache: int
    """KV cache of a chunk with prompts of the known or maximum length; of one request if requests queue."""
    least_cache: int
    """KV cache with prompts of one token, the minimum to run."""
    share: int | None
    """Maximum total bytes; None if the GPU's memory is unknown."""
    room: int | None
    """Bytes available for the KV cache."""
    width: int = 1
    """Multiplier for weights, cache, and room on a CPU: 2 if vLLM computes in fp32 instead of bf16."""

    @property
    def terms(self) -> dict[str, int]:
        return {"weights": self.width * self.weights, "overhead": self.overhead, "kv_cache": self.width * self.cache}


@dataclass(frozen=True)
class Needs:
    """Memory needs of one stage, in bytes."""

    device: dict[str, int] = field(default_factory=dict)
    """Per rank during computation: the terms of `formulas.md`. On a CPU, host memory of the rank."""
    loading: dict[str, int] = field(default_factory=dict)
    """Per rank while loading models."""
    rollouts: dict[str, int] = field(default_factory=dict)
    """Per rank while a sampler generates on the trainer's GPUs."""
    engine: Engine | None = None
    host: int = 0
    """Host memory per rank if the device is a GPU."""
    asleep: int = 0
    """Host memory of one node for the weights of a sleeping engine, and of reward models."""
    ranks: int = 1
    beside: int = 0
    """GPUs of engines that generate while the ranks train."""
    queried: Mapping[str, Engine] = field(default_factory=dict)
    """Port → engine of a policy that is queried while the stage works, on GPUs of its own."""
    nodes: int = 1
    tokens_a_pass: int = 0
    lesser: "Needs | None" = None
    """Smaller needs of another phase, in separate processes."""

    @property
    def peak(self) -> int:
        return max(map(peak_memory.total, self.phases.values()))

    @property
    def phases(self) -> dict[str, dict[str, int]]:
        """What happens → the terms."""
        return {"": self.device, "loading the model": self.loading, "generating rollouts": self.rollouts}

    @property
    def together(self) -> int:
        """Total of all ranks on one machine; only rank 0 has the sampler, reward models and further engines."""
        once = ("sampler", "reward_models", *self.queried)
        return max(_of_all_ranks(terms, self.ranks // self.nodes, once) for terms in (self.device, self.loading))

    @property
    def gpus(self) -> int:
        own = self.beside + max(self.ranks if self.device else 0, self.engine.ranks if self.engine else 0)
        return max(own, self.lesser.gpus if self.lesser else 0) + sum(engine.ranks for engine in self.queried.values())

    def host_of(self, most: int) -> int:
        """Host memory of a node with at most `most` ranks."""
        own = min(self.ranks // self.nodes, most) * self.host + self.asleep
        return max(own, self.lesser.host_of(most)) if self.lesser else own


def _of_all_ranks(terms: Mapping[str, int], ranks: int, once: Iterable[str]) -> int:
    single = sum(terms.get(name, 0) for name in once)
    return ranks * (peak_memory.total(terms) - single) + single


def needs_of(facts: Facts, numerics: Numerics, placement: Placement, gpu_bytes: int | None = None) -> Needs:
    """Needs of a stage under a profile; `gpu_bytes`: memory of one GPU if known, of which vLLM reserves a share."""
    needs, queried = _own_needs(facts, numerics, placement, gpu_bytes), dict[str, Engine]()
    for plan, shape in facts.queried:
        longest = max(1, shape.context - plan.answer) if shape.context else None
        alone = Facts(shape, sampling=replace(plan, max_prompt=longest), served=shape)
        if (engine := _engine(alone, numerics, placement, gpu_bytes)) is not None:
            queried[plan.port] = engine
    needs = replace(needs, queried=queried)
    if numerics.device == "cuda":
        return needs
    memory = {port: peak_memory.total(_engine_on(engine, numerics)) for port, engine in queried.items()}
    return replace(needs, device=needs.device | memory, loading=needs.loading | memory if needs.loading else {})


def _own_needs(facts: Facts, numerics: Numerics, placement: Placement, gpu_bytes: int | None) -> Needs:
    """Needs without further engines."""
    engine = _engine(facts, numerics, placement, gpu_bytes)
    if facts.training is not None:
        return _rewarded(_training(facts, facts.training, engine, numerics, placement.engines), facts, numerics, placement)
    scoring = _scoring(facts, facts.scoring, numerics, placement) if facts.scoring else None
    if engine is not None:
        sampling = Needs(device=_engine_on(engine, numerics), engine=engine, ranks=engine.ranks * placement.engines)
        return _one_after_the_other(scoring, sampling, numerics) if scoring else sampling
    if scoring is not None:
        return scoring
    if facts.imported:  # in fp32, on the host
        return Needs(device={"weights": 4 * facts.policy.parameters} | _runtime(numerics))
    return Needs()


def _scoring(facts: Facts, plan: ScoringPlan, numerics: Numerics, placement: Placement) -> Needs:
    tokens = tokens_of_a_frozen_pass(facts, plan, numerics)
    terms = peak_memory.inference(facts.policy, numerics, SIZES[plan.dtype], tokens, plan.scalar_head, plan.head)
    terms |= peak_memory.score_matrices(facts.policy, numerics, SIZES[plan.dtype], tokens, _longest(facts, plan), trained=False)
    read = peak_memory.read(facts.policy.parameters, plan.dtype, facts.finer)
    on_cpu = numerics.device == "cpu"
    loading = {"weights": read} | _runtime(numerics) if on_cpu else {}
    copies, host = placement.engines * numerics.tensor_parallel, 0 if on_cpu else read
    return Needs(device=terms | _runtime(numerics), loading=loading, host=host, ranks=copies, tokens_a_pass=tokens)


def _one_after_the_other(scoring: Needs, rating: Needs, numerics: Numerics) -> Needs:
    """Needs of scoring models, followed by the engines of a language model."""
    on_cpu = numerics.device == "cpu"
    lesser, larger = sorted((rating, scoring), key=lambda needs: needs.together if on_cpu else needs.peak)
    return replace(larger, engine=rating.engine, tokens_a_pass=scoring.tokens_a_pass, lesser=lesser)


def _frozen(shape: Shape, plan: TrainingPlan, numerics: Numerics) -> int:
    """Bytes of a frozen model next to the trained one, per rank."""
    return SIZES[plan.dtype] * -(-shape.parameters // (numerics.world_size if numerics.zero_stage == 3 else 1))


def _training(facts: Facts, plan: TrainingPlan, engine: Engine | None, numerics: Numerics, engines: int) -> Needs:
    scores, tokens = plan.scalar_head, tokens_of_a_pass(facts, plan, numerics)
    shape = scored(facts.policy) if scores else facts.policy
    model = Trained(shape, plan.dtype, trained_parameters(shape, plan.adapters, scores), facts.finer)
    terms = peak_memory.training(model, numerics, tokens, scores, plan.head)
    terms |= peak_memory.score_matrices(shape, numerics, model.size, tokens, _longest(facts, plan))
    loading = {"weights": peak_memory.loading(model, numerics)}
    host = peak_memory.host(model, numerics)
    if facts.reference is not None and not (facts.reference_is_policy and plan.adapters):
        terms["reference"] = _frozen(facts.reference, plan, numerics)
    if facts.teacher is not None:
        terms["teacher"] = _frozen(facts.teacher, plan, numerics)
    critic = None
    if facts.value is not None:
        critic = Trained(scored(facts.value), plan.dtype, scored(facts.value).parameters)
        states = (peak_memory.weights, peak_memory.gradients, peak_memory.optimizer, peak_memory.buckets)
        terms["value_model"] = sum(part(critic, numerics) for part in states)  # at rest while the policy computes
        host += peak_memory.host(critic, numerics) if numerics.offload_optimizer else 0
    rollouts: dict[str, int] = {}
    beside = engine is not None and facts.sampling is not None and facts.sampling.beside and numerics.device == "cuda"
    if engine is not None and beside:
        rollouts = _engine_on(engine, numerics)
    elif engine is not None:
        awake = peak_memory.total(_engine_on(engine, numerics))
        terms["sampler"] = loading["sampler"] = engines * awake if numerics.device == "cpu" else engine.overhead  # asleep
        if numerics.device == "cuda":
            rollouts = peak_memory.at_rest(model, numerics) | {name: terms[name] for name in ("reference", "teacher") if name in terms}
            if critic is not None:
                rollouts["value_model"] = peak_memory.total(peak_memory.at_rest(critic, numerics))
            rollouts |= {"sampler": awake} | _runtime(numerics)
    if numerics.device == "cpu":
        loading["weights"], host = max(loading["weights"], host), 0
    return Needs(
        device=terms | _runtime(numerics), loading=loading | _runtime(numerics), rollouts=rollouts, engine=engine, host=host,
        asleep=engine.weights * engine.ranks * engines if rollouts and engine and not beside else 0,
        beside=engine.ranks * engines if engine and beside else 0, ranks=numerics.world_size, nodes=numerics.nodes, tokens_a_pass=tokens,
    )  # fmt: skip


def _rewarded(training: Needs, facts: Facts, numerics: Numerics, placement: Placement) -> Needs:
    """Needs of a training with reward models, which take turns in GPU memory during rollouts; on a CPU all stay in memory."""
    plan, shape = facts.scoring, facts.rewarding
    if plan is None or shape is None:
        return training
    copies, models = placement.engines * numerics.tensor_parallel, facts.rewarding_models
    tokens = tokens_of_a_frozen_pass(facts, plan, numerics)
    terms = peak_memory.inference(scored(shape), numerics, SIZES[plan.dtype], tokens, plan.scalar_head)
    terms |= peak_memory.score_matrices(shape, numerics, SIZES[plan.dtype], tokens, _longest(facts, plan), trained=False)
    contexts = models * _runtime(numerics)["runtime"] if copies > 1 else 0  # each in its own process
    if numerics.device == "cpu":
        own = copies * (peak_memory.total(terms) + (models - 1) * terms["weights"] + contexts)
        return replace(training, device=training.device | {"reward_models": own})
    between = {"reward_models": contexts} if contexts else {}
    return replace(
        training,
        device=training.device | between,
        loading=training.loading | between,
        rollouts=training.rollouts | {"reward_models": peak_memory.total(terms) + contexts},
        asleep=training.asleep + models * copies * peak_memory.read(shape.parameters, plan.dtype, facts.finer),
    )


def tokens_of_a_pass(facts: Facts, plan: TrainingPlan, numerics: Numerics) -> int:
    """Tokens of a forward pass of one rank: the profile's limit or one longer row, but no more than a step has."""
    row = _longest(facts, plan)
    a_step = plan.batch * (facts.document or row)
    found = max(numerics.micro_batch_tokens, row) if numerics.packing else numerics.micro_batch_sequences * row
    return max(1, math.ceil(int(min(found, max(row, a_step / numerics.teams))) / numerics.sequence_parallel))


def _longest(facts: Facts, plan: TrainingPlan | ScoringPlan) -> float:
    """Tokens of the longest document; documents to score have no bound until they exist."""
    return min(4 * facts.document if facts.document else math.inf, plan.longest or math.inf)


def tokens_of_a_frozen_pass(facts: Facts, plan: ScoringPlan, numerics: Numerics) -> int:
    """Tokens of an inference pass: the profile's limit or one longer document; without packing, rows padded to the longest.

    Answers share a pass only if they fit, so a unit is one document.
    """
    longest = _longest(facts, plan)
    if longest == math.inf:
        return numerics.micro_batch_tokens
    return int(max(numerics.micro_batch_tokens, longest) if numerics.packing else numerics.micro_batch_sequences * longest)


def trained_parameters(shape: Shape, adapters: Adapters | None, scores: bool) -> int:
    """Ψ_t, including a scalar head trained with adapters."""
    if adapters is None:
        return shape.parameters
    return shape.adapters(adapters.rank) * adapters.matrices // 7 + (shape.hidden if scores else 0)


def scored(shape: Shape) -> Shape:
    """The same body with a scalar head instead of the vocabulary head."""
    headless = shape.parameters if shape.tied else shape.parameters - shape.embedding
    return replace(shape, tied=True, stated=headless + shape.hidden)


def _engine(facts: Facts, numerics: Numerics, placement: Placement, gpu_bytes: int | None) -> Engine | None:
    plan, shape = facts.sampling, facts.served
    if plan is None or shape is None:
        return None
    size, ranks = SIZES[plan.dtype], numerics.tensor_parallel
    width = SIZES[engine_dtype(plan, numerics)] // size
    chunk = plan.chunk or plan.together
    prompt = min(plan.max_prompt or math.inf, facts.prompt or plan.max_prompt or 1.0)
    if facts.requests:
        chunk = max(1, min(chunk, int(facts.requests)))
    adapters = facts.training.adapters if facts.training else None
    weights = size * (shape.parameters // ranks + (shape.adapters(served_rank(adapters.rank)) if adapters else 0))
    cuda = numerics.device == "cuda"
    overhead = ENGINE_OVERHEAD if cuda else peak_memory.RUNTIME["cpu"]
    caches = [peak_memory.kv_cache(shape, size, chunk, int(tokens) + plan.answer, ranks) for tokens in (prompt, 1)]
    share = int(gpu_bytes * placement.gpu_memory_utilization) if cuda and gpu_bytes else None
    room = max(0, kv_cache_bytes(gpu_bytes, placement, weights)) if cuda and gpu_bytes else None
    room = room if cuda else int(placement.sampler_memory_gb * GIB)
    return Engine(ranks, weights, overhead, caches[0], caches[1], share, room, width)


def engine_dtype(plan: SamplingPlan, numerics: Numerics) -> Dtype:
    """Compute dtype of vLLM, which supports bf16 products through fp32 only by running in fp32."""
    return "fp32" if settled(numerics).bf16_products == "fp32" else plan.dtype


def _engine_on(engine: Engine, numerics: Numerics) -> dict[str, int]:
    """Memory reserved by vLLM: on a GPU its whole share, on a CPU the cache configured in the profile."""
    if numerics.device == "cpu":
        cache = engine.room or 0
        return {"weights": engine.width * engine.weights, "kv_cache": engine.width * cache, "overhead": engine.overhead}
    return engine.terms if engine.room is None else engine.terms | {"kv_cache": engine.room}


def _runtime(numerics: Numerics) -> dict[str, int]:
    return {"runtime": peak_memory.RUNTIME[numerics.device]}
