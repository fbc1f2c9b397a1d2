"""Decide once what a run will do with each stage, and choose the stages."""

import re
from collections.abc import Collection, Iterable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Annotated, Any, Self

from pedigree.configs.base.problems import UsageProblem
from pedigree.configs.language.graph import Graph, Node, shown_name
from pedigree.data.artifacts import provenance
from pedigree.data.artifacts.artifacts import read_run
from pedigree.data.store.untrusted import ArtifactError
from pedigree.pipelines.jobs.context import RunContext
from pedigree.pipelines.jobs.events import StageDue
from pedigree.pipelines.json_documents import ONE_WORD, Hidden
from pedigree.pipelines.ledger.equal import Equal
from pedigree.pipelines.ledger.identity import Identities, InputReplaced
from pedigree.pipelines.ledger.transfers import RemoteError
from pedigree.pipelines.run.opening import Request

NAMED = 3
"""Maximum number of stages named in a reason."""
UNFINISHED = "its job is unfinished"
OUTPUT = re.compile(r"output (\S+) (.+)")


@dataclass(frozen=True)
class Plan:
    """What a run will do with a stage."""

    node: Node
    reasons: tuple[str, ...]
    """Why it must run; empty if up to date. Descendants of a stale stage may still be skipped: only content counts."""
    remote: bool = False
    """Whether it is up to date with its files in the remote."""
    decided: bool = True
    """Whether it is up to date or stale for certain, and is not checked again when its turn comes."""


@dataclass(frozen=True, kw_only=True)
class StageSummary:
    """A stage of a recipe before a run: what it is, and why it is not up to date."""

    node: Hidden[Node]
    shown: Hidden[str]
    """Name in this recipe; for stages of other recipes, the address."""
    why: Hidden[str]
    """The reasons on one line."""
    address: str
    kind: str
    state: Annotated[str, ONE_WORD]
    reasons: tuple[str, ...]
    """Why it is not up to date."""

    @classmethod
    def of(cls, graph: Graph, entry: Plan, state: str, **more: Any) -> Self:
        """A stage of the graph by its plan; `more` are the fields of a subclass."""
        node, reasons = entry.node, entry.reasons
        named = {"shown": shown_name(graph, node), "why": why(reasons, graph.recipe), "address": node.address, "kind": node.kind}
        return cls(node=node, state=state, reasons=reasons, **named, **more)


def why(reasons: Sequence[str], recipe: str) -> str:
    """Join reasons on one line, without the recipe prefix and with equal reasons of an artifact's parts merged."""
    by_state: dict[str, list[str]] = {}
    others = []
    for reason in (reason.replace(f"{recipe}/", "") for reason in reasons):
        match = OUTPUT.fullmatch(reason)
        if match:
            by_state.setdefault(match[2], []).append(match[1])
        else:
            others.append(_shortened(reason))
    merged = [f"its artifact {state}" if len(parts) > 2 else f"{', '.join(parts)} {state}" for state, parts in by_state.items()]
    return "; ".join([*others, *merged])


def _shortened(reason: str) -> str:
    """Shorten a long list of awaited stages; the JSON output has the full list."""
    stages = reason.removeprefix("waits for ").split(", ")
    if not reason.startswith("waits for ") or len(stages) <= NAMED + 1:
        return reason
    return f"waits for {', '.join(stages[:NAMED])} and {len(stages) - NAMED} more"


def selection(run: RunContext, request: Request) -> tuple[frozenset[str], frozenset[str]]:
    """Return the addresses of the selected stages and of the stages to rerun; UsageProblem if one does not exist or is not selected.

    `on_code_change="rerun"` also reruns finished stages whose code has changed.
    """
    graph, chosen = run.graph, set(run.graph.nodes)
    if request.only:
        chosen &= {graph.find(name).address for name in request.only}
    if request.start:
        chosen &= graph.descendants(graph.find(name).address for name in request.start)
    if request.until:
        chosen &= graph.ancestors(graph.find(name).address for name in request.until)
    forced = named("--force", graph, request.force, chosen)
    if run.on_code_change == "rerun":
        forced |= {address for address in chosen if drift(run, graph.nodes[address])}
    return frozenset(chosen), forced


def named(option: str, graph: Graph, names: Sequence[str], chosen: Collection[str]) -> frozenset[str]:
    """Return the addresses of the stages named by an option; UsageProblem if one does not exist or is not selected."""
    found = frozenset(graph.find(name).address for name in names)
    left = sorted(found - set(chosen))
    if left:
        remedy = f"drop {option} or widen the selection"
        raise UsageProblem(f"{option} names {', '.join(left)}, which --only, --from and --until exclude: {remedy}")
    return found


def plan(run: RunContext, selection: Collection[str] | None = None, forced: Collection[str] = (), *, lenient: bool = False) -> list[Plan]:
    """What a run will do, in order. Runs and changes nothing; each stage is checked, and its key computed, once.

    `selection` are addresses, all when None; those in `forced` run even if current. `lenient`: leave a stage that cannot be checked
    undecided, because the run that follows reports it with its stage.
    """
    found: list[Plan] = []
    stale: set[str] = set()
    now = run.identities()
    with closing(run.ledger):
        for address, node in run.graph.nodes.items():
            if selection is not None and address not in selection:
                continue
            above = [parent for parent in node.parents if parent in stale]
            try:
                entry = Plan(node, ("forced",)) if address in forced else _planned(run, node, now, above)
            except Exception as error:  # the run meets it again and reports it with its stage
                if not lenient:
                    raise
                entry = Plan(node, (f"cannot be checked: {error}",), decided=False)
            if above:
                reasons = (reason for reason in entry.reasons if not reason.startswith("input "))
                entry = Plan(node, (*reasons, f"waits for {', '.join(above)}"), decided=False)
            if entry.reasons:
                stale.add(address)
                with suppress(Exception):  # a bug in the watcher must not end the run
                    run.watch(StageDue(address))
            found.append(entry)
    return found


def _planned(run: RunContext, node: Node, now: Identities, above: Sequence[str]) -> Plan:
    beat = run.transfer_progress(node.address).hashed
    if above:  # its parents decide
        return Plan(node, tuple(run.ledger.reasons(node, beat)))
    try:
        reasons, remote = now.standing(node, beat)
    except RemoteError as error:
        return Plan(node, (f"cannot determine whether it is up to date: {error}",), decided=False)
    if reasons and not remote and _is_unfinished(run, node, now):
        reasons = [*reasons, UNFINISHED]
    again = (remote and run.fetch) or node.address in run.require_checkpoint
    return Plan(node, tuple(reasons), remote, decided=bool(reasons) or not again)


def _is_unfinished(run: RunContext, node: Node, now: Identities) -> bool:
    """Whether a job that would make the stage's artifact began; unknown where its key requires hashes of raw files."""
    with suppress(ArtifactError, InputReplaced, RemoteError):
        return not node.files and run.project.scratch(now.need(node).key).exists()
    return False


def restorable(run: RunContext, planned: Iterable[Plan], forced: Collection[str] = ()) -> frozenset[str]:
    """Addresses of planned stages that are due and that this machine's cache can restore, also from artifacts of other names.

    Below a stage that is due, a stage counts only if its inputs are known: all stages due above it have merely lost their files, or equal
    another artifact.
    """
    found: set[str] = set()
    due: set[str] = set()
    known: set[str] = set()
    now = run.identities()
    for entry in planned:
        node = entry.node
        if not entry.reasons:
            continue
        if node.address not in forced and known.issuperset(due.intersection(node.parents)):
            if run.ledger.is_cached(node, run.transfer_progress(node.address).hashed):
                found.add(node.address)
                if all(reason.startswith(("output ", "waits for ")) for reason in entry.reasons):
                    known.add(node.address)
            elif equal := _equal(run, now, node):
                found.add(node.address)
                known.add(node.address)
                now.assume(node.address, equal.record)
        due.add(node.address)
    return frozenset(found)


def _equal(run: RunContext, now: Identities, node: Node) -> Equal | None:
    """An artifact of another name that is what the stage would make, if its files are in the cache."""
    with suppress(ArtifactError, InputReplaced, RemoteError):
        found = run.ledger.equals_of(node, lambda: now.need(node, run.transfer_progress(node.address).hashed))
        return next((equal for equal in found if run.ledger.cache.holds(equal.entry.objects.values())), None)
    return None


def drift(run: RunContext, node: Node) -> list[str]:
    """Source files of Pedigree that changed since the stage's artifact was made, except for comments and formatting."""
    try:
        recorded = read_run(run.project.artifact(node.address) / "run.json").fingerprint.files
    except ArtifactError:  # `verify` reports it
        return []
    now = provenance.fingerprint(node.kind, run.code_root)["files"]
    return sorted(name for name in recorded.keys() | now.keys() if recorded.get(name) != now.get(name)) if recorded else []
