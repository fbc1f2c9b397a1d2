"""What must fail although nothing has run yet: files, rows, prompts and models that a stage that is due cannot use."""

from collections.abc import Collection, Iterator
from math import inf
from pathlib import Path

from pedigree.configs.base.paths import place_of, written_of
from pedigree.configs.base.project import Project
from pedigree.configs.base.work import only, unservable
from pedigree.configs.judging.measuring import Evaluate, Select
from pedigree.configs.judging.pairing import Pair, Relaxed
from pedigree.configs.judging.pools import Sample
from pedigree.configs.judging.scoring import Overoptimization, answers_of_prompt, sampled
from pedigree.configs.language.execution import Numerics
from pedigree.configs.language.graph import Graph, Node
from pedigree.configs.methods.training import Rlvr
from pedigree.configs.rows.datasets import PrepareData
from pedigree.configs.rows.row_sources import Files, RowProgram
from pedigree.pipelines.estimate.amounts import Planned
from pedigree.pipelines.estimate.estimates import Estimates
from pedigree.pipelines.estimate.needs import Facts
from pedigree.pipelines.jobs.context import RunContext

ADDED_TOKENS = 64
"""By which the vocabularies of two imports of one model may differ: their templates may add control tokens."""


def must_fail(run: RunContext, node: Node, due: Collection[str], estimates: Estimates) -> Iterator[str]:
    """Why a stage cannot succeed, with remedies."""
    missing = [name for name in node.files if not place_of(run.project.root, name).exists()]
    recorded = run.ledger.source_files(node.address)  # those in the remote are fetched by their hashes
    lacking = [written_of(name) for name in missing if name not in recorded]
    if lacking:
        yield f"{', '.join(lacking)} does not exist: add it, or change the config that names it"
    if not missing:
        yield from _unreadable(run.project, node)
    yield from _too_few(Planned(run.project, run.graph, node, due))
    if isinstance(node.config, Select):
        yield from _unscored(run.graph, node, node.config)
    facts = estimates.of(node).facts
    if facts:
        yield from _unfit(facts, node, run.execution.of(node.kind, node.name)[0])


def hints(graph: Graph, node: Node, estimates: Estimates) -> Iterator[str]:
    """What a stage can do, but probably should not."""
    facts = estimates.of(node).facts
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


def _unreadable(project: Project, node: Node) -> Iterator[str]:
    """Project files whose first rows cannot be used, and programs without their function."""
    if not isinstance(config := node.config, PrepareData):
        return
    for source in config.sources:
        problem = None
        if isinstance(source, Files):
            from pedigree.data.sources.sources import problem_of_first_rows  # loads what parses rows

            path = place_of(project.root, source.path)
            problem = problem_of_first_rows(source, path, config.record, config.task, by_form=config.form is not None)
        elif isinstance(source, RowProgram):
            problem = _problem_of_program(source, project.root / source.path)
        yield from [problem] if problem else []


def _problem_of_program(source: RowProgram, file: Path) -> str | None:
    try:
        text = file.read_bytes()
        code = compile(text, source.path, "exec", dont_inherit=True)
    except (OSError, SyntaxError, ValueError) as error:
        return f"{source.path} is not Python: {error}"
    lacks = source.function not in code.co_names and b"import *" not in text
    return f"{source.path} has no function {source.function}: define it, or set `function`" if lacks else None


def _too_few(stage: Planned) -> Iterator[str]:
    """More prompts, or answers to one, than there are."""
    config = stage.config
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


def _unfit(facts: Facts, node: Node, numerics: Numerics) -> Iterator[str]:
    """Models that an engine refuses."""
    served, asked, lora = facts.served, facts.sampling, getattr(node.config, "lora", None)
    if served and asked:
        shape = (served.heads, served.kv_heads, served.head_dim, 0 if served.experts else served.ffn)
        problem = unservable(*shape, numerics.device, numerics.tensor_parallel)
        yield from [problem] if problem else []
        prompt = asked.max_prompt or 1
        if served.context and prompt + asked.answer > served.context:
            what = f"max_prompt_length {prompt} and" if asked.max_prompt else "a prompt and"
            yield (
                f"{what} max_tokens {asked.answer} exceed the model's context of {served.context} tokens: lower "
                f"{'one of them' if asked.max_prompt else 'max_tokens'}, or use a model with a longer context"
            )
    for port, other in (("reference", facts.reference), ("value", facts.value)):
        if other and abs(other.vocabulary - facts.policy.vocabulary) > ADDED_TOKENS:
            yield (
                f"the {port} has a vocabulary of {other.vocabulary} and the policy one of {facts.policy.vocabulary}: use one of the "
                "same base model"
            )
    if lora and lora.targets != "all-linear" and not facts.policy.experts:
        unknown = [name for name in lora.targets if name.rpartition(".")[2] not in facts.policy.linear]
        if unknown:
            yield f"lora.targets: the model has no linear layer {unknown[0]!r}; it has {', '.join(facts.policy.linear)}"
