"""`rlvr` as recipes, plans, rehearsals and reports see it."""

from collections.abc import Iterator

from pedigree.configs.base.kind import CONVERSATIONS, FUNCTIONS, RENDERING, REWARDING, Kind, gives, port
from pedigree.configs.base.shrink import MAX_UNKNOWN, TOKENS, Cut, even
from pedigree.configs.base.work import Amount, Amounts, PlannedStage, SamplingPlan, ScoringPlan, TrainingPlan, at_ports, fewer_at
from pedigree.configs.methods.environment_programs import served_user, shrink_environment
from pedigree.configs.methods.language_model import served_plan, shrink_asking, unserved_problem
from pedigree.configs.methods.policy_gradient import Ppo
from pedigree.configs.methods.reward_terms import Majority, ModelReward, Overlong, RatedReward, RewardProgram, Term
from pedigree.configs.methods.training import Rlvr, rlvr_problem

STEPS, PROMPTS, SAMPLES = 2, 4, 8
"""Prompts of a step, answers to each."""
BATCHES = 2
"""Batches of rollouts per step, where prompts without a signal are replaced, and its multiples in the first one."""
VOTING = ("maths", "numbers", "algebra", "expressions", "tokens", "units")
"""Verifiers' modules that find and compare results for a vote."""
ROLLOUT_CHUNK = 256
"""Requests submitted together, unless answers are recorded."""


def shrink(cut: Cut) -> None:
    config = cut.config
    assert isinstance(config, Rlvr)
    warmup = 0
    if isinstance(config.algorithm, Ppo):
        warmup = min(config.algorithm.critic.warmup_steps, 1)
        cut.most("algorithm.critic.warmup_steps", 1, "batches")
        cut.optimizer("algorithm.critic.optimizer")
    cut.most("steps", STEPS + warmup, "batches")
    cut.set("refuse_dropped", 1.0, "thresholds")  # a tiny model's tokens are more
    cut.set("router_aux_loss_coef", None, "weights")  # tiny models have no experts
    cut.optimizer("optimizer")
    prompts = min(config.prompts_per_step, PROMPTS)
    cut.set("prompts_per_step", even(max(config.algorithm.mini_batches, prompts)), "batches")
    if config.samples_per_prompt > 1:
        cut.set("samples_per_prompt", even(min(config.samples_per_prompt, SAMPLES)), "samples")
    cut.most("sampling.max_tokens", TOKENS, "lengths")
    for number, term in enumerate(config.reward.terms):
        place = f"reward.terms.{number}"
        if isinstance(term, Overlong):
            cut.most(f"{place}.buffer", cut.get("sampling.max_tokens"), "lengths")
        if isinstance(term, RatedReward):
            shrink_asking(cut, "judge", f"{place}.by")
            cut.most(f"{place}.sampling.max_tokens", TOKENS, "lengths")
            cut.set(f"{place}.max_unanswered_share", max(term.max_unanswered_share, MAX_UNKNOWN), "thresholds")
    if config.algorithm.keep:
        cut.most("algorithm.keep.answers", max(2, cut.get("samples_per_prompt") // 2), "samples")
    shrink_environment(cut)
    if config.algorithm.resampling:
        cut.most("algorithm.resampling.max_batches", BATCHES, "batches")  # a tiny model's answers seldom differ
        cut.most("algorithm.resampling.batch_multiplier", BATCHES, "batches")


DECIDING: dict[type[Term], tuple[str, ...]] = {
    RewardProgram: FUNCTIONS,
    ModelReward: ("stages/rlvr/model_rewards.py", "stages/core/ensembles.py"),
    RatedReward: ("stages/rlvr/model_rewards.py", "stages/core/rating.py"),
    Majority: ("stages/rlvr/majority.py", *(f"stages/verifiers/{name}.py" for name in VOTING)),
}
"""The code of terms that are not in `rewarding.py`."""


def decided_by(config: Rlvr) -> tuple[str, ...]:
    terms = dict.fromkeys(part for term in config.reward.terms for part in DECIDING.get(type(term), ()))
    chosen = ("stages/core/advantages.py", "stages/rlvr/rewarding.py", "stages/rlvr/group_selection.py")
    hints = ("stages/rlvr/hints.py",) if config.hints else ()
    environment = CONVERSATIONS if config.environment else ()
    return (*RENDERING, *REWARDING, *chosen, *hints, *dict.fromkeys((*terms, *environment)))


def scoring_plan(config: Rlvr) -> ScoringPlan | None:
    if not (terms := config.reward.by_models):
        return None
    dtype = "fp32" if any(term.dtype == "fp32" for term in terms) else "bf16"
    return ScoringPlan("reward_models", dtype, config.max_prompt_length + config.longest_answer, scalar_head=True)


def sampling_plan(config: Rlvr) -> SamplingPlan:
    together, samples = config.first_batch * config.samples_per_prompt, config.samples_per_prompt
    chunk, answer = min(ROLLOUT_CHUNK, together) if config.replay == "exact" else 1, config.longest_answer
    return SamplingPlan(
        "policy", config.dtype, together, answer, samples, chunk, queued_by="replay: recorded", max_prompt=config.max_prompt_length,
        beside=config.asynchronous is not None,
    )  # fmt: skip


def served(config: Rlvr) -> tuple[SamplingPlan, ...]:
    """One engine for the judge of all terms, one for the user."""
    judges = [plan for term in config.reward.ratings for plan in served_plan(term.by, "judge", config.dtype, term.sampling.max_tokens)]
    return (*judges[:1], *served_user(config))


def training_plan(config: Rlvr) -> TrainingPlan:
    algorithm = config.algorithm
    answers = algorithm.keep.answers if algorithm.keep else config.samples_per_prompt
    batch, longest = config.prompts_per_step * answers, config.max_prompt_length + config.longest_answer
    name = f"prompts_per_step * {'algorithm.keep.answers' if algorithm.keep else 'samples_per_prompt'}"
    return TrainingPlan(
        config.dtype, batch, name, "rollouts", longest, made_of=f"{config.prompts_per_step} prompts x {answers} answers",
        steps=config.steps, adapters=config.lora and config.lora.adapters, adaptable=True, reference=algorithm.refers,
        teacher=algorithm.teacher is not None,
        value=isinstance(algorithm, Ppo), updates=getattr(algorithm, "inner_epochs", 1), looks=int(algorithm.looks), head=config.head,
    )  # fmt: skip


def preflight(stage: PlannedStage) -> Iterator[str]:
    needed = stage.config.prompts_per_step
    if there := fewer_at(stage, "prompts", needed):
        yield f"a step requires {needed} prompts, but the pool has {there}: lower prompts_per_step, or add prompts"


def work(stage: PlannedStage) -> Amounts:
    config: Rlvr = stage.config
    rows, prompt = at_ports(stage, ("prompts",), config.max_prompt_length)
    if prompt is None or config.hints:
        prompt = Amount(config.max_prompt_length, "at most")
    first = config.first_batch * config.samples_per_prompt
    requests = Amount(config.steps * first, "at least" if config.algorithm.resampling or config.hints else "counted")
    if config.algorithm.advantage == "greedy":
        requests = requests.times(1 + 1 / config.samples_per_prompt)
    document = Amount(prompt.times(1 / config.samples_per_prompt).value + config.longest_answer, "at most")
    found = Amounts(
        rows=rows, document=document, steps=Amount(config.steps, "counted"), prompt=prompt, requests=requests,
        plan=sampling_plan(config), tokens=document.times(config.steps * training_plan(config).batch), answer=config.longest_answer,
    )  # fmt: skip
    return found.in_turns(config.turns, config.sampling.max_tokens) if config.turns > 1 else found


KIND = Kind(
    name="rlvr",
    version=4,
    config=Rlvr,
    inputs={
        "policy": port("policy"),
        "prompts": port("prompt"),
        "reference": port("policy", optional=True),
        "teacher": port("policy", optional=True),
        "value": port("reward_model", optional=True),
        "reward_models": port("reward_model", many=True, optional=True),
        "judge": port("policy", optional=True),
        "user": port("policy", optional=True),
    },
    output=gives("policy"),
    engine="deepspeed+vllm",
    trains_on=frozenset({"prompts"}),
    verified=lambda config: frozenset({"prompts"}),
    decided_by=decided_by,
    needs=lambda config: frozenset({"reward_models"} if config.reward.by_models else ()),
    problem=lambda config, arrived: rlvr_problem(config, arrived) or unserved_problem(served(config), arrived, "judge", "user"),
    preflight=preflight,
    work=work,
    training_plan=training_plan,
    scoring_plan=scoring_plan,
    sampling_plan=sampling_plan,
    served=served,
    shrink=shrink,
    family="training",
    curve="reward",
)
