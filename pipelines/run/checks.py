"""Checks before the first job of a run, shared by commands and schedules.

Each `refuse_*` raises ConfigError with every problem: the stages, and the remedy.
"""

import json
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

import yaml

from pedigree.configs.base.document import ConfigError, Problem
from pedigree.configs.base.installation import is_clone, missing
from pedigree.configs.base.kind import MODELS
from pedigree.configs.base.problems import UsageProblem
from pedigree.configs.base.project import Project
from pedigree.configs.base.texts import command
from pedigree.configs.language.execution import Execution
from pedigree.configs.language.graph import Graph, Node, shown_name
from pedigree.configs.methods.external import External, missing_program
from pedigree.configs.methods.language_model import endpoints, key_variable
from pedigree.data.artifacts import assets
from pedigree.data.host.machine import has_gpu
from pedigree.pipelines.estimate.estimates import Estimates
from pedigree.pipelines.jobs import checkpoint_store, kubernetes_client, ray_launcher, slurm_client
from pedigree.pipelines.jobs.context import RunContext
from pedigree.pipelines.jobs.kubernetes_manifest import preview
from pedigree.pipelines.jobs.slots import too_few_gpus
from pedigree.pipelines.quantities import counted, size
from pedigree.pipelines.run.foreseen import contradictions, must_fail, of_stages
from pedigree.pipelines.run.needed_assets import missing_assets
from pedigree.pipelines.run.pins import refuse_unpinned, refuse_unreachable
from pedigree.pipelines.run.planning import Sizes
from pedigree.pipelines.run.plans import Plan, plan, restorable

Cached = Callable[[], Collection[str]]
"""The stages that are due and that the cache can restore; they need no job. Looked up on demand."""
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


def checked_plan(run: RunContext, chosen: frozenset[str], forced: frozenset[str]) -> list[Plan]:
    """Plan a run, and check that the jobs it requires can run; ConfigError as from the checks below."""
    refuse_unpinned(run.graph, chosen)
    planned = plan(run, chosen, forced, lenient=True)
    due = {entry.node.address for entry in planned if entry.reasons}
    if due:
        refuse_missing_engines(run.graph, due, run.execution)
        refuse_missing_trackers(run.execution)
        refuse_unreachable(run.graph, due)
        cached = cache(lambda: restorable(run, planned, forced))
        refuse_missing_assets(run.graph, due, run.execution, cached)
        refuse_what_must_fail(run, due, cached)
        refuse_what_cannot_fit(run, planned, cached)
        refuse_what_is_not_there(run, due, cached)
    return planned


def refuse_what_must_fail(run: RunContext, addresses: Collection[str], cached: Cached = frozenset) -> None:
    """Refuse to start if a stage that is due, and not restored from the cache, cannot succeed."""
    estimates = Estimates(run.project, run.graph, run.execution, due=addresses)
    _refuse(run.graph, ((node, text) for node in _of(run.graph, addresses) for text in must_fail(run, node, estimates)), cached)


def refuse_contradictions(project: Project, graph: Graph, execution: Execution, addresses: Collection[str]) -> None:
    """Refuse a recipe whose stages cannot succeed on any machine. Files that are missing here, such as rows, are no reason."""
    estimates = Estimates(project, graph, execution, due=graph.nodes)
    _refuse(graph, ((node, text) for node in _of(graph, addresses) for text in contradictions(node, estimates)))


def _of(graph: Graph, addresses: Collection[str]) -> list[Node]:
    return [node for address, node in graph.nodes.items() if address in addresses]


def refuse_what_is_not_there(run: RunContext, due: Collection[str], cached: Cached = frozenset) -> None:
    """Refuse to start if this machine lacks the GPU or disk for a stage, or its scheduler, server or checkpoint store cannot be used."""
    found, problems = list[tuple[Node, str]](), dict[str, str | None]()
    nodes, ask_slurm, ask_ray = _of(run.graph, due), cache(slurm_client.problem_of), cache(ray_launcher.problem_of)
    ask_kubernetes = cache(kubernetes_client.problem_of)
    for node in nodes:
        (numerics, placement), kind = run.settings(node), node.declaration
        computes = any(plan(node.config) for plan in (kind.training_plan, kind.scoring_plan, kind.sampling_plan))
        if placement.launcher.type == "slurm":
            wanted = tuple(slurm_client.resources(numerics, placement, placement.launcher))
            if node.address not in cached() and (problem := ask_slurm(wanted)):
                found.append((node, f"Slurm would reject this job: {problem}"))
        elif placement.launcher.type == "ray":
            wanted = tuple(ray_launcher.bundle(placement.launcher, numerics, placement.slots).items())
            if node.address not in cached() and (problem := ask_ray(placement.launcher.address, numerics.nodes, wanted)):
                found.append((node, problem))
        elif placement.launcher.type == "kubernetes":
            launcher, job = placement.launcher, preview(run.project, "pedigree/test", numerics, placement)
            if node.address not in cached() and (problem := ask_kubernetes(launcher.context, launcher.namespace, json.dumps(job))):
                found.append((node, f"Kubernetes would reject this job: {problem}"))
        elif isinstance(node.config, External):
            environment = run.project.root / Path(placement.environment).expanduser() if placement.environment else None
            found += [(node, problem)] if (problem := missing_program(node.config, environment)) else []
        elif computes and numerics.device == "cuda" and not has_gpu():
            found.append((node, "the profile's device is cuda, but this machine has no GPU: use another profile, e.g. `--execution cpu`"))
        if placement.launcher.type == "local" and (problem := too_few_gpus(numerics, placement.slots)) and node.address not in cached():
            found.append((node, problem))
        servers = {by.base_url: _unanswering for by in endpoints(node.config)}
        stores = {placement.checkpoint_url: checkpoint_store.problem_of} if placement.checkpoint_url else {}
        for url, problem_of_url in (servers | stores).items():
            if node.address not in cached():
                problems[url] = problems[url] if url in problems else problem_of_url(url)
                found += [(node, problem)] if (problem := problems[url]) else []
    sizes = Sizes(run.project, run.graph, Estimates(run.project, run.graph, run.execution, due=due))
    free = shutil.disk_usage(run.project.root).free
    needs = {node.address: sizes.of(node) or 0 for node in nodes if node.output in MODELS}
    if sum(needs.values()) > free:
        needs = {address: need for address, need in needs.items() if address not in cached()}
        sums = zip(needs, accumulate(needs.values()), strict=True)
        found += [
            (run.graph.nodes[address], f"the models up to here need {size(needed)} of disk, but {size(free)} are free: free some")
            for address, needed in sums
            if needed - needs[address] <= free < needed
        ]
    _refuse(run.graph, found, cached)


def manifests(run: RunContext, chosen: frozenset[str], forced: frozenset[str]) -> str:
    """The Kubernetes manifests of stages that are due, as YAML.

    Raises:
        UsageProblem: there are none.
    """
    due = [(entry.node.address, *run.settings(entry.node)) for entry in plan(run, chosen, forced, lenient=True) if entry.reasons]
    found = [preview(run.project, *stage) for stage in due if stage[2].launcher.type == "kubernetes"]
    if not found:
        raise UsageProblem("--dry-run prints manifests, but no stage that is due has placement.launcher {type: kubernetes}")
    return yaml.safe_dump_all(found, sort_keys=False, width=1000)


def _unanswering(base_url: str) -> str | None:
    """Why no request to a server can succeed: nothing is there, or it rejects the key. None where it answers, or needs time."""
    variable = key_variable(base_url)
    key = os.environ.get(variable, "").strip()
    request = urllib.request.Request(f"{base_url}/models", headers={"User-Agent": "pedigree"})
    if key:
        request.add_unredirected_header("Authorization", f"Bearer {key}")
    try:
        urllib.request.urlopen(request, timeout=PROBE_S).close()
    except urllib.error.HTTPError as error:
        if error.code == HTTPStatus.UNAUTHORIZED:  # a key that may only complete texts is forbidden to list models
            return f"{base_url} rejects {f'the key in {variable}' if key else 'requests without a key'} ({error}): set {variable}"
    except urllib.error.URLError as error:
        if isinstance(error.reason, (ConnectionRefusedError, socket.gaierror)):
            return f"no server is at {base_url} ({error.reason}): start it, or correct base_url"
    except (OSError, ValueError, HTTPException):  # it is busy, or the key cannot be sent, which the job explains
        pass
    return None


def _refuse(graph: Graph, found: Iterable[tuple[Node, str]], cached: Cached = frozenset) -> None:
    """Raise ConfigError for the problems of stages that need a job."""
    problems = of_stages((shown_name(graph, node), text) for node, text in found if node.address not in cached())
    if problems:
        raise ConfigError([Problem(graph.recipe, None, text) for text in problems])


def _packages(node: Node, kernels: str) -> Iterable[str]:
    """Packages that its job imports: vLLM only if a policy of the recipe rates or writes rather than a server."""
    engine, speaks = node.declaration.engine, node.declaration.sampling_plan(node.config) is not None
    if engine == "vllm" and not speaks:
        return ()
    own = (KERNELS[kernels],) if kernels in KERNELS and engine not in ("none", "vllm") else ()
    return dict.fromkeys((*ENGINES[engine], *(("vllm",) if speaks else ()), *own))


def refuse_missing_engines(
    graph: Graph, addresses: Collection[str], execution: Execution, instead: str = ", or stop before them with --until"
) -> None:
    """Refuse to start if packages that the jobs of these stages need are missing; `instead` is a further remedy."""
    needing: dict[str, list[str]] = {}
    for address in addresses:
        node = graph.nodes[address]
        numerics, placement = execution.of(node.kind, node.name)
        if placement.launcher.type == "kubernetes" and placement.launcher.python:
            continue  # the image has packages of its own
        for package in _packages(node, numerics.kernels):
            if find_spec(package) is None:
                needing.setdefault(package, []).append(node.name)
    if needing:
        on_gpus = has_gpu() or execution.numerics.device == "cuda"  # which may be those of a cluster
        remedy = f"{missing('train,serve', gpu=on_gpus)}{instead}"
        raise ConfigError(
            [Problem(graph.recipe, None, f"{', '.join(names)}: needs {p}, not installed: {remedy}") for p, names in needing.items()]
        )


def refuse_missing_assets(graph: Graph, addresses: Collection[str], execution: Execution, cached: Cached = frozenset) -> None:
    """Refuse to start if a stage that is due, and not restored from the cache, opens a packaged asset that this machine lacks."""
    found = [entry for entry in missing_assets(graph, addresses, execution) if entry[0].address not in cached()]
    remedy = assets.remedy(dict.fromkeys(name for _, name, _ in found))
    _refuse(graph, ((node, f"{problem}: {remedy}") for node, _, problem in found))


def refuse_missing_trackers(execution: Execution) -> None:
    """Refuse to start if the library of a tracker is not installed."""
    kinds = sorted({tracker.type for tracker in execution.trackers} - {"prometheus"})
    lacking = [kind for kind in kinds if find_spec(kind) is None]
    if lacking:
        remedy = f"run `pip install {' '.join(lacking)}`" if is_clone() else missing(",".join(lacking))
        text = f"not installed: {', '.join(lacking)}: {remedy}, or remove them from the profile"
        raise ConfigError([Problem("trackers", None, text)])


def refuse_what_cannot_fit(run: RunContext, planned: Collection[Plan], cached: Cached) -> None:
    """Refuse to start if a stage that is due needs more memory than the profile's machine has.

    A stage restored from the cache runs no job. If it must be made after all, `ensure` refuses it through `run.too_large`.
    """
    due = {entry.node.address for entry in planned if entry.reasons}
    estimates = Estimates(run.project, run.graph, run.execution, due=due)
    found = [(node, misfit) for node in _of(run.graph, due) if (misfit := estimates.of(node).misfit)]
    if found:
        run.too_large = {node.address: str(misfit) for node, misfit in found if node.address in cached()}
    _refuse(run.graph, ((node, str(misfit)) for node, misfit in found), cached)


def all_done(count: int, away: int, recipe: str) -> str:
    """Summary line of a recipe that is up to date."""
    text = f"{counted(count, 'stage')} up to date, nothing to do"
    return f"{text}; the files of {away} are only in the remote; {command('pull', recipe)} downloads them" if away else text
