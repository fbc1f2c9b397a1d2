"""What must fail although nothing has run yet: files, rows, prompts and models that a stage that is due cannot use."""

import os
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from math import inf
from pathlib import Path, PurePosixPath

from pedigree.configs.base.kind import MODELS
from pedigree.configs.base.paths import place_of, written_of
from pedigree.configs.base.project import Project
from pedigree.configs.base.python_files import problem_of_program
from pedigree.configs.base.work import only, unservable
from pedigree.configs.judging.measuring import Evaluate, Select
from pedigree.configs.judging.pairing import Pair, Relaxed
from pedigree.configs.judging.pools import Sample
from pedigree.configs.judging.scoring import Overoptimization, answers_of_prompt, sampled
from pedigree.configs.judging.synthesis import SelfInstruct, Synthesize
from pedigree.configs.language.execution import Numerics
from pedigree.configs.language.graph import Graph, Node
from pedigree.configs.methods.environment_programs import programs_of
from pedigree.configs.methods.external import External
from pedigree.configs.methods.merging import Merge
from pedigree.configs.methods.rubrics import own_rubrics, rubrics_of
from pedigree.configs.methods.training import NO_SCORES, Rlvr
from pedigree.configs.rows.datasets import PrepareData
from pedigree.configs.rows.row_sources import Files, RowProgram
from pedigree.configs.rows.source_models import FolderModel, HubModel, SourceModel, template_text
from pedigree.data.artifacts.exports import checked_records, is_export
from pedigree.data.sources import hub
from pedigree.data.sources.model_folders import DESCRIBING, SAME_BASE, problem_of, unlike_tokens
from pedigree.data.store.storage import StoreError
from pedigree.data.store.untrusted import ArtifactError
from pedigree.pipelines.estimate.amounts import Planned
from pedigree.pipelines.estimate.estimates import Estimates
from pedigree.pipelines.estimate.facts import files_of, folder_of, shape_of
from pedigree.pipelines.estimate.needs import Facts
from pedigree.pipelines.jobs.context import RunContext
from pedigree.pipelines.ledger.identity import HASHES
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
    project, graph = estimates.project, estimates.graph
    if isinstance(node.config, SourceModel):
        yield from _unusable(project, node.config)
    yield from _unreadable(project, node)
    yield from _misworded(project, node)
    yield from _too_few(Planned(project, graph, node, estimates.due))
    if isinstance(node.config, External):
        yield from _not_given(project, node, node.config)
    if isinstance(node.config, Select):
        yield from _unscored(graph, node, node.config)
    if isinstance(node.config, Merge):
        yield from _unlike(estimates, node)
    yield from _unlike_tokens(estimates, node)
    facts, (numerics, placement) = estimates.of(node).facts, estimates.execution.of(node.kind, node.name)
    if isinstance(node.config, Rlvr) and placement.sampler_process == "inline" and numerics.world_size > 1:
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
    graph, facts = estimates.graph, estimates.of(node).facts
    config = node.config
    if isinstance(config, SourceModel) and isinstance(config.source, HubModel) and not os.environ.get(hub.FOLDER):
        yield from [] if _model_files(estimates.project, config) else [UNCHECKED.format(config.source.repo)]
    if isinstance(config, External):
        yield "its time, memory and tokens are unknown: what a command of other software needs is not estimated"
    limit = getattr(node.config, "max_length", None)
    if facts and facts.training and limit and facts.policy.context and limit > facts.policy.context:
        yield f"max_length {limit} exceeds the model's context of {facts.policy.context} tokens: longer rows train positions unknown to it"
    if isinstance(node.config, Sample):
        (pool,) = (edge.source for edge in node.edges if edge.port == "prompts")
        readers = [graph.nodes[address] for address in graph.children[pool]]
        begins = [other.config.prompts.index for other in readers if isinstance(other.config, Sample)]
        if len(begins) == len(readers) and min(begins) == node.config.prompts.index > 0:
            unused = node.config.prompts.index * node.config.prompts.count
            yield f"no stage uses the first {unused} prompts: windows count from 0, so that rounds begin with `index: $round-1`"


def _not_mirrored(node: Node) -> Iterator[str]:
    """Repositories that the folder of a mirror, which replaces the hub, lacks or has of another commit."""
    if not os.environ.get(hub.FOLDER):
        return
    for repo in repositories_of(node):
        try:
            hub.check(repo)
        except StoreError as error:
            yield str(error)


def _unusable(project: Project, config: SourceModel) -> Iterator[str]:
    """Models whose files do not belong together, as far as they are here."""
    source, known = config.source, _model_files(project, config)
    if known and isinstance(source, FolderModel | HubModel):
        folder, names = known
        problem = (_problem_of_export(folder) if isinstance(source, FolderModel) else None) or problem_of(folder, config, names)
        where = written_of(source.path) if isinstance(source, FolderModel) else f"hub model {source.repo}"
        yield from [f"{where}: {problem}"] if problem else []


def _not_given(project: Project, node: Node, config: External) -> Iterator[str]:
    """Files of the project that a command names, and that would not be where it runs."""
    for word in config.command:
        path = PurePosixPath(word)
        if len(path.parts) > 1 and not path.is_absolute() and os.path.isfile(project.root / path):
            if not any(path.is_relative_to(name) for name in node.files):
                yield f"its command names {word}, which it does not get: add it to files"


def _model_files(project: Project, config: SourceModel) -> tuple[Path, Collection[str]] | None:
    """(folder, names of all files it will have) of a model from outside whose small files are here."""
    source = config.source
    if not isinstance(source, FolderModel | HubModel) or not (folder := folder_of(project, source)).exists():
        return None
    if isinstance(source, FolderModel) or os.environ.get(hub.FOLDER):
        return folder, ()
    names = hub.listed(hub.Repository("model", source.repo, source.revision))
    return (folder, names) if names and all((folder / name).exists() for name in DESCRIBING if name in names) else None


def _problem_of_export(folder: Path) -> str | None:
    for artifact in (folder, folder.resolve().parent):
        if (artifact / "record.json").exists() and (artifact / "payload").exists():
            return (
                "it is an artifact of a Pedigree project, whose lineage would be lost: name the folder that `pedigree export` writes there"
            )
    if is_export(folder):
        try:
            checked_records(folder, HASHES.files(folder))
        except ArtifactError as error:
            return str(error)
    return None


def _unreadable(project: Project, node: Node) -> Iterator[str]:
    """Project files whose first rows cannot be used, and programs without their function."""
    sources = node.config.sources if isinstance(node.config, PrepareData) else ()
    programs = (*programs_of(node.config), *(one for one in sources if isinstance(one, RowProgram)))
    for source in (*programs, *(one for one in sources if isinstance(one, Files))):
        if not (place := place_of(project.root, source.path)).exists():
            continue
        if isinstance(source, Files):
            from pedigree.data.sources.sources import Outside, problem_of_first_rows  # loads what parses rows
            from pedigree.stages.verifiers import check

            assert isinstance(node.config, PrepareData)
            problem = problem_of_first_rows(node.config, source, Outside(files={source.path: place}, check_verifier=check))
        else:
            problem = problem_of_program(project.root, source.path, source.function)
        yield from [problem] if problem else []


def _misworded(project: Project, node: Node) -> Iterator[str]:
    """Templates and rubrics of the project that are none."""
    files = {name: project.root / name for name in node.files}
    for name in (*(node.config.files if isinstance(node.config, SourceModel) else ()), *own_rubrics(node.config.model_dump())):
        try:
            if files[name].is_file():
                template_text(name, files) if isinstance(node.config, SourceModel) else rubrics_of([name], files)
        except ValueError as error:
            yield str(error)


def _too_few(stage: Planned) -> Iterator[str]:
    """More prompts, answers to one, or rows, than there are."""
    config, bound = stage.config, stage.rows
    for name in ("min_rows", "min_pairs"):
        if bound and bound.how != "estimated" and getattr(config, name, 0) > bound.value:
            yield f"{name} is {getattr(config, name)}, but it can have at most {bound.value:.0f}: lower {name}, or give it more"
    if isinstance(config, Synthesize) and isinstance(config.method, SelfInstruct):
        rows = only(stage, "prompts").rows
        if rows and rows.how != "estimated" and config.method.shots > rows.value:
            yield f"shots is {config.method.shots}, but there are at most {rows.value:.0f} prompts: lower it, or add prompts"
    if isinstance(config, Sample | Rlvr):
        rows = only(stage, "prompts").rows
        most = rows.value if rows and rows.how != "estimated" else inf
        there = f"the pool has {'at most ' if rows and rows.how == 'at most' else ''}{most:.0f}"
        if isinstance(config, Rlvr) and config.prompts_per_step > most:
            yield f"a step requires {config.prompts_per_step} prompts, but {there}: lower prompts_per_step, or add prompts"
        elif isinstance(config, Sample) and (end := (config.prompts.index + 1) * config.prompts.count) > most:
            yield (
                f"prompts {end - config.prompts.count} to {end} are configured (count {config.prompts.count}, index "
                f"{config.prompts.index}), but {there}: lower prompts.count or prompts.index, or add prompts"
            )
    elif isinstance(config, Pair | Overoptimization):
        sample, wanted = sampled(only(stage, "judgments", "completions")), 2
        if isinstance(config, Overoptimization):
            wanted = config.max_n or 2
        elif isinstance(config.strategy, Relaxed):
            wanted = 1
        if (answers := answers_of_prompt(sample)) < wanted:
            yield f"it compares {wanted} answers to a prompt, but there is {answers}: raise samples_per_prompt or add policies there"
        if isinstance(config, Pair) and config.budget and config.budget.choose == "disagreement":
            models = len(only(stage, "judgments", "completions").inputs.get("reward_models", ()))
            if models < 2:
                yield f"budget.choose disagreement requires two or more reward models, but its answers have {models}: add some to the judge"
        labels = sample.inputs["policies"]
        for name in ("strong", "weak"):
            label = getattr(getattr(config, "strategy", None), name, None)
            if label and label not in labels:
                yield f"strategy.{name} is {label!r}, but the completions are from {', '.join(labels)}: use one of them"


def _unscored(graph: Graph, node: Node, config: Select) -> Iterator[str]:
    """Candidates and tasks without a score."""
    (evaluation,) = (graph.nodes[edge.source] for edge in node.edges if edge.port == "scores")
    if not isinstance(evaluation.config, Evaluate):
        return
    scored = {port: [edge.source for edge in evaluation.edges if edge.port == port] for port in ("policies", "suites")}
    for candidate in (edge.source for edge in node.edges if edge.port == "candidates"):
        if candidate not in scored["policies"] and not graph.nodes[candidate].declaration.frozen:  # a copy may equal another model
            yield f"{evaluation.name} does not evaluate the candidate {candidate}: add it to the policies there, or remove it"
    suites = [graph.nodes[suite].config for suite in scored["suites"]]
    tasks = [str(suite.task) for suite in suites if isinstance(suite, PrepareData)]
    for task in [config.task] if isinstance(config.task, str) else config.task or ():
        if len(tasks) == len(suites) and task not in tasks:
            yield f"{evaluation.name} does not score the task {task!r}; its suites have the tasks {', '.join(tasks)}"


def _unlike(estimates: Estimates, node: Node) -> Iterator[str]:
    """Policies of different shapes to merge."""
    sources = ((edge.label, estimates.graph.nodes[edge.source]) for edge in node.edges)
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
    served, sampling, lora = facts.served, facts.sampling, getattr(node.config, "lora", None)
    if served and sampling:
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
