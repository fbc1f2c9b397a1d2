"""What must fail although nothing has run yet: files, rows, prompts and models that a stage that is due cannot use."""

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress

from pedigree.configs.base.kind import MODELS
from pedigree.configs.base.paths import place_of, written_of
from pedigree.configs.base.project import Project
from pedigree.configs.base.work import unservable
from pedigree.configs.language.execution import Numerics
from pedigree.configs.language.graph import Node
from pedigree.configs.methods.environment_programs import programs_of
from pedigree.configs.methods.rubrics import own_rubrics, rubrics_of
from pedigree.configs.methods.training import NO_SCORES
from pedigree.configs.rows.source_models import template_text
from pedigree.data.sources import hub
from pedigree.data.sources.model_folders import SAME_BASE, unlike_tokens
from pedigree.data.store.storage import StoreError
from pedigree.data.store.untrusted import ArtifactError
from pedigree.pipelines.estimate.amounts import Planned
from pedigree.pipelines.estimate.estimates import Estimates
from pedigree.pipelines.estimate.facts import files_of, shape_of
from pedigree.pipelines.estimate.needs import Facts
from pedigree.pipelines.estimate.outside import fetched
from pedigree.pipelines.jobs.context import RunContext
from pedigree.pipelines.run.pins import repositories_of

UNCHECKED = (
    "the files of hub model {} are not here: `run` fetches the small ones first to check tokenizer, template and engine; without the hub, "
    "the job does"
)
SIZES = ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "experts")
"""What policies to merge have in common."""
ADDED_TOKENS = 64
"""By which the vocabularies of two imports of one model may differ: their templates may add control tokens."""


def must_fail(run: RunContext, node: Node, estimates: Estimates) -> Iterator[str]:
    """Why a stage cannot succeed here, with remedies."""
    recorded = run.ledger.source_files(node.address)  # those in the remote are fetched by their hashes
    lacking = [written_of(name) for name in missing_files(run.project, node) if name not in recorded]
    if lacking:
        yield f"{', '.join(lacking)} does not exist: add it, or change the config that names it"
    yield from _not_mirrored(node)
    yield from contradictions(node, estimates)


def contradictions(node: Node, estimates: Estimates) -> Iterator[str]:
    """Why a stage cannot succeed on any machine, by its recipe, its profile, and those of its files that are here; with remedies."""
    stage = Planned(estimates.project, estimates.graph, node, estimates.due)
    yield from node.declaration.preflight(stage)
    yield from _unusable(estimates.project, node, stage)
    yield from _too_few(stage)
    yield from _unlike(estimates, node)
    yield from _unlike_tokens(estimates, node)
    facts, (numerics, placement) = estimates.of(node).facts, estimates.execution.of(node.kind, node.name)
    if node.declaration.engine == "deepspeed+vllm" and placement.sampler_process == "inline" and numerics.world_size > 1:
        yield f"sampler_process inline requires world_size 1, not {numerics.world_size}: set `sampler_process: own`"
    if facts:
        yield from _unfit(facts, node, numerics)


def of_stages(found: Iterable[tuple[str, str]]) -> list[str]:
    """Each sentence once, after the names of the stages that it is about."""
    named: dict[str, list[str]] = {}
    for name, text in found:
        named.setdefault(text, []).append(name)
    return [f"{'stages' if len(names) > 1 else 'stage'} {', '.join(names)}: {text}" for text, names in named.items()]


def missing_files(project: Project, node: Node) -> list[str]:
    """Files and folders that a stage reads, and that are not on this machine."""
    return [name for name in node.files if not place_of(project.root, name).exists()]


def hints(node: Node, estimates: Estimates) -> Iterator[str]:
    """What a stage can do, but probably should not, and what is not known yet."""
    yield from node.declaration.warnings(Planned(estimates.project, estimates.graph, node, estimates.due))
    if not os.environ.get(hub.FOLDER):
        models = (repo for repo in repositories_of(node) if repo.kind == "model")
        yield from (UNCHECKED.format(repo.name) for repo in models if fetched(repo) is None)
    facts, limit = estimates.of(node).facts, getattr(node.config, "max_length", None)
    if facts and facts.training and limit and facts.policy.context and limit > facts.policy.context:
        yield f"max_length {limit} exceeds the model's context of {facts.policy.context} tokens: longer rows train positions unknown to it"


def _not_mirrored(node: Node) -> Iterator[str]:
    """Repositories that the folder of a mirror, which replaces the hub, lacks or has of another commit."""
    if not os.environ.get(hub.FOLDER):
        return
    for repo in repositories_of(node):
        try:
            hub.check(repo)
        except StoreError as error:
            yield str(error)


def _unusable(project: Project, node: Node, stage: Planned) -> Iterator[str]:
    """Programs without their function, and templates and rubrics of the project that are none."""
    yield from filter(None, map(stage.problem_of, programs_of(node.config)))
    files, template = {name: project.root / name for name in node.files}, getattr(node.config, "chat_template", None)
    for name in (name for name in (template, *own_rubrics(node.config.model_dump())) if name in files):
        try:
            if files[name].is_file():
                template_text(name, files) if name == template else rubrics_of([name], files)
        except ValueError as error:
            yield str(error)


def _too_few(stage: Planned) -> Iterator[str]:
    """More rows than there can be."""
    for name in ("min_rows", "min_pairs"):
        bound, least = stage.rows, getattr(stage.config, name, 0)
        if bound and bound.how != "estimated" and least > bound.value:
            yield f"{name} is {least}, but it can have at most {bound.value:.0f}: lower {name}, or give it more"


def _unlike(estimates: Estimates, node: Node) -> Iterator[str]:
    """Policies of different shapes to merge."""
    merged = {name for name, port in node.declaration.inputs.items() if port.merged}
    sources = ((edge.label, estimates.graph.nodes[edge.source]) for edge in node.edges if edge.port in merged)
    shapes = [(label, shape_of(estimates.project, estimates.graph, source, estimates.due)) for label, source in sources]
    (first, shape), *others = [known for known in shapes if known[1]] or [("", None)]
    for label, other in others:
        unequal = [name for name in SIZES if getattr(shape, name) != getattr(other, name)]
        if unequal:
            sizes = f"{unequal[0]} is {getattr(shape, unequal[0])} and {getattr(other, unequal[0])}"
            yield f"{first} and {label} cannot be merged: {sizes}; merge policies with a common base model"


def _unlike_tokens(estimates: Estimates, node: Node) -> Iterator[str]:
    """Models that take a policy's tokens for others, by their shapes and the files that are here."""
    project, graph, due = estimates.project, estimates.graph, estimates.due
    given = {edge.port: graph.nodes[edge.source] for edge in node.edges}
    plan = node.declaration.training_plan(node.config)
    for port in ("reference", "teacher", "value"):
        if not (plan and getattr(plan, port) and port in given and given[port].output in MODELS):
            continue
        policy, other = (shape_of(project, graph, given[name], due) for name in ("policy", port))
        if policy and other and other.vocabulary + ADDED_TOKENS < policy.vocabulary:
            yield f"the {port} has a vocabulary of {other.vocabulary} and the policy one of {policy.vocabulary}: {SAME_BASE}"
            continue
        ours, theirs = (files_of(project, graph, given[name], due) for name in ("policy", port))
        if ours is None or theirs is None or ours == theirs:
            continue
        with suppress(ArtifactError, OSError):  # told of the model itself
            if problem := unlike_tokens(ours[0], theirs[0], ADDED_TOKENS if theirs[1] else 0):
                yield f"the {port} {problem}: {SAME_BASE}"


def _unfit(facts: Facts, node: Node, numerics: Numerics) -> Iterator[str]:
    """Models that an engine refuses."""
    lora = getattr(node.config, "lora", None)
    own = [(facts.sampling, facts.served)] if facts.sampling and facts.served else []
    for sampling, served in (*own, *facts.queried):
        problem = unservable(*served.divided, numerics.device, numerics.tensor_parallel)
        yield from [problem] if problem else []
        prompt = sampling.max_prompt or 1
        if served.context and prompt + sampling.answer > served.context:
            what = f"max_prompt_length {prompt} and" if sampling.max_prompt else "a prompt and"
            yield (
                f"{what} max_tokens {sampling.answer} exceed the model's context of {served.context} tokens: lower "
                f"{'one of them' if sampling.max_prompt else 'max_tokens'}, or use a model with a longer context"
            )
    trained = facts.value or facts.policy
    if trained.unscored and facts.training and (facts.training.scalar_head or facts.training.value):
        yield NO_SCORES.format(trained.unscored)
    if lora and lora.targets != "all-linear" and not facts.policy.experts:
        unknown = [name for name in lora.targets if name.rpartition(".")[2] not in facts.policy.linear]
        if unknown:
            yield f"lora.targets: the model has no linear layer {unknown[0]!r}; it has {', '.join(facts.policy.linear)}"
    together = numerics.sequence_parallel
    if facts.training and facts.policy.kv_heads % together:
        yield f"sequence_parallel {together} does not divide the model's {facts.policy.kv_heads} key heads: set it to a divisor"
    if facts.training and together > 1 and facts.policy.experts:
        yield f"sequence_parallel is {together}, but the model has experts, which are balanced over whole rows: set it to 1"
    balanced = getattr(node.config, "router_aux_loss_coef", None)
    if balanced is not None and not facts.policy.experts:
        yield f"router_aux_loss_coef is {balanced}, but the model has no experts: remove the field"
