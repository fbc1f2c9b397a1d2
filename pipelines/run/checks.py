"""Checks before the first job of a run, shared by commands and schedules."""

import os
import shutil
import socket
import urllib.error
import urllib.request
from collections.abc import Callable, Collection, Iterable
from functools import cache
from http import HTTPStatus
from http.client import HTTPException
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path

from pedigree.configs.base.document import ConfigError, Problem
from pedigree.configs.base.installation import missing
from pedigree.configs.base.kind import MODELS
from pedigree.configs.base.paths import written_of
from pedigree.configs.base.project import Project
from pedigree.configs.base.texts import command
from pedigree.configs.judging.language_model import endpoints, key_variable
from pedigree.configs.language.execution import Execution
from pedigree.configs.language.graph import Graph, Node
from pedigree.configs.rows.source_models import FolderModel, SourceModel
from pedigree.data.artifacts.artifacts import ArtifactError
from pedigree.data.artifacts.exports import checked_records, is_export
from pedigree.data.host.machine import has_gpu
from pedigree.data.sources.model_folders import problem_of
from pedigree.pipelines.estimate.estimates import Estimates, refusals
from pedigree.pipelines.estimate.facts import folder_of
from pedigree.pipelines.jobs import checkpoint_store
from pedigree.pipelines.jobs.context import RunContext
from pedigree.pipelines.ledger.identity import HASHES
from pedigree.pipelines.quantities import counted, size
from pedigree.pipelines.run.foreseen import must_fail
from pedigree.pipelines.run.pins import refuse_missing_assets, refuse_unpinned, refuse_unreachable
from pedigree.pipelines.run.planning import Sizes
from pedigree.pipelines.run.plans import Plan, plan, restorable

Cached = Callable[[], Collection[str]]
"""The stages that are due and that the cache can restore; they need no job. Looked up on demand."""


def checked_plan(run: RunContext, chosen: frozenset[str], forced: frozenset[str]) -> list[Plan]:
    """Plan a run, and check that the jobs it requires can run.

    Raises:
        ConfigError: a revision is not pinned; a package, GPU, repository, asset, server or store is unavailable; the files of a model do
            not belong together; a stage cannot succeed; memory or disk do not suffice. The message names the stages.
    """
    refuse_unpinned(run.graph, chosen)
    planned = plan(run, chosen, forced, lenient=True)
    due = {entry.node.address for entry in planned if entry.reasons}
    if due:
        refuse_unusable_models(run.project, run.graph, due)
        refuse_missing_engines(run.graph, due, run.execution)
        refuse_unreachable(run.graph, due)
        refuse_missing_assets(run.graph, due)
        cached = cache(lambda: restorable(run, planned, forced))
        refuse_what_must_fail(run, due, cached)
        refuse_what_cannot_fit(run, planned, cached)
        refuse_what_is_not_there(run, due, cached)
    return planned


def refuse_what_must_fail(run: RunContext, addresses: Collection[str], cached: Cached = frozenset) -> None:
    """Refuse to start if a stage that is due, and not restored from the cache, cannot succeed.

    Raises:
        ConfigError: every such stage, with the remedy.
    """
    estimates, nodes = Estimates(run.project, run.graph, run.execution, due=addresses), run.graph.nodes
    found = [
        (nodes[address], text) for address in nodes if address in addresses for text in must_fail(run, nodes[address], addresses, estimates)
    ]
    _refuse(run, found, cached)


def refuse_what_is_not_there(run: RunContext, due: Collection[str], cached: Cached = frozenset) -> None:
    """Refuse to start if this machine lacks the GPU or the disk for a stage, or its server or checkpoint store cannot be used.

    Raises:
        ConfigError: every such stage, with the remedy.
    """
    found, said = list[tuple[Node, str]](), dict[str, str | None]()
    nodes = [node for address, node in run.graph.nodes.items() if address in due]
    for node in nodes:
        numerics, placement = run.execution.of(node.kind, node.name)
        kind = node.declaration
        computes = any(plan(node.config) for plan in (kind.training_plan, kind.scoring_plan, kind.sampling_plan))
        if computes and numerics.device == "cuda" and not has_gpu():
            found.append((node, "the profile's device is cuda, but this machine has no GPU: use another profile, e.g. `--execution cpu`"))
        servers = {by.base_url: _unanswering for by in endpoints(node.config)}
        stores = {placement.checkpoint_url: checkpoint_store.problem_of} if placement.checkpoint_url else {}
        for url, problem_of_url in (servers | stores).items():
            if node.address not in cached():
                said[url] = said[url] if url in said else problem_of_url(url)
                found += [(node, problem)] if (problem := said[url]) else []
    sizes, free = Sizes(run.project, run.graph, Estimates(run.project, run.graph, run.execution, due=due)), _free(run)
    needs = {node.address: sizes.of(node) or 0 for node in nodes if node.output in MODELS}
    if sum(needs.values()) > free:
        needs = {address: need for address, need in needs.items() if address not in cached()}
        sums = zip(needs, accumulate(needs.values()), strict=True)
        found += [
            (run.graph.nodes[address], f"the models up to here need {size(needed)} of disk, but {size(free)} are free: free some")
            for address, needed in sums
            if needed - needs[address] <= free < needed
        ]
    _refuse(run, found, cached)


def _free(run: RunContext) -> int:
    return shutil.disk_usage(run.project.root).free


def _unanswering(base_url: str) -> str | None:
    """Why no request to a server can succeed: nothing is there, or it rejects the key. None where it answers, or needs time."""
    variable = key_variable(base_url)
    key = os.environ.get(variable, "").strip()
    asked = urllib.request.Request(f"{base_url}/models", headers={"User-Agent": "pedigree"})
    if key:
        asked.add_unredirected_header("Authorization", f"Bearer {key}")
    try:
        urllib.request.urlopen(asked, timeout=PROBE_S).close()
    except urllib.error.HTTPError as error:
        if error.code == HTTPStatus.UNAUTHORIZED:  # a key that may only complete texts is forbidden to list models
            return f"{base_url} rejects {f'the key in {variable}' if key else 'requests without a key'} ({error}): set {variable}"
    except urllib.error.URLError as error:
        if isinstance(error.reason, (ConnectionRefusedError, socket.gaierror)):
            return f"no server is at {base_url} ({error.reason}): start it, or correct base_url"
    except (OSError, ValueError, HTTPException):  # it is busy, or the key cannot be sent, which the job explains
        pass
    return None


def _refuse(run: RunContext, found: Collection[tuple[Node, str]], cached: Cached) -> None:
    """Raise ConfigError for the problems of stages that need a job."""
    named: dict[str, list[str]] = {}
    for node, text in found:
        if node.address not in cached():
            named.setdefault(text, []).append(node.name)
    if named:
        stages = {text: f"{'stages' if len(names) > 1 else 'stage'} {', '.join(names)}" for text, names in named.items()}
        raise ConfigError([Problem(run.graph.recipe, None, f"{which}: {text}") for text, which in stages.items()])


PROBE_S = 10.0
"""Patience with a server before a run."""
ENGINES = {
    "none": (),
    "torch": ("torch", "transformers"),
    "deepspeed": ("torch", "transformers", "deepspeed"),
    "vllm": ("torch", "transformers", "vllm"),
    "deepspeed+vllm": ("torch", "transformers", "deepspeed", "vllm"),
}
"""Packages that a stage's job imports, by engine; the local launcher runs jobs in this environment."""


KERNELS = {"liger": "liger_kernel"}
"""Package required by a value of `Numerics.kernels`, in stages that load a model into torch themselves."""


def _packages(node: Node, kernels: str) -> Iterable[str]:
    """Packages that its job imports: vLLM only if a policy of the recipe rates or writes rather than a server."""
    engine, speaks = node.declaration.engine, node.declaration.sampling_plan(node.config) is not None
    if engine == "vllm" and not speaks:
        return ()
    own = (KERNELS[kernels],) if kernels in KERNELS and engine not in ("none", "vllm") else ()
    return dict.fromkeys((*ENGINES[engine], *(("vllm",) if speaks else ()), *own))


def refuse_missing_engines(graph: Graph, addresses: Collection[str], execution: Execution) -> None:
    """Refuse to start if packages that the jobs of these stages need are missing.

    Raises:
        ConfigError: a package is not installed; the stages that need it are named.
    """
    needing: dict[str, list[str]] = {}
    for address in addresses:
        node = graph.nodes[address]
        for package in _packages(node, execution.of(node.kind, node.name)[0].kernels):
            if find_spec(package) is None:
                needing.setdefault(package, []).append(node.name)
    if needing:
        remedy = f"{missing('train,serve')}, or stop before them with --until"
        raise ConfigError(
            [Problem(graph.recipe, None, f"{', '.join(names)}: needs {p}, not installed: {remedy}") for p, names in needing.items()]
        )


def refuse_unusable_models(project: Project, graph: Graph, addresses: Collection[str]) -> None:
    """Refuse to start if the files of an imported model folder do not belong together.

    Raises:
        ConfigError: what is missing or does not match, for each stage.
    """
    problems = []
    for address in sorted(addresses):
        config = graph.nodes[address].config
        if isinstance(config, SourceModel) and isinstance(config.source, FolderModel):
            folder = folder_of(project, config.source)
            problem = _problem_of_model(folder, config) if folder.is_dir() else None  # a missing folder has an error of its own
            if problem:
                where = f"stage {graph.nodes[address].name}: {written_of(config.source.path)}"
                problems.append(Problem(graph.recipe, None, f"{where}: {problem}"))
    if problems:
        raise ConfigError(problems)


def _problem_of_model(folder: Path, config: SourceModel) -> str | None:
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
    return problem_of(folder, config)


def refuse_what_cannot_fit(run: RunContext, planned: Collection[Plan], cached: Cached) -> None:
    """Refuse to start if a stage that is due needs more memory than the profile's machine has.

    A stage restored from the cache runs no job. If it must be made after all, `ensure` refuses it through `run.too_large`.

    Raises:
        ConfigError: each such stage, what it lacks, by how much, and the settings that would make it fit.
    """
    found = refusals(run.project, run.graph, run.execution, {entry.node.address for entry in planned if entry.reasons})
    if not found:
        return
    run.too_large = {node.address: str(misfit) for node, misfit in found if node.address in cached()}
    problems = [Problem(run.graph.recipe, None, f"stage {node.name}: {misfit}") for node, misfit in found if node.address not in cached()]
    if problems:
        raise ConfigError(problems)


def all_done(count: int, away: int, recipe: str) -> str:
    """Summary line of a recipe that is up to date."""
    text = f"{counted(count, 'stage')} up to date, nothing to do"
    return f"{text}; the files of {away} are only in the remote; {command('pull', recipe)} downloads them" if away else text
