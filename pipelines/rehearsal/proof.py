"""Summarize what a rehearsal proved, from the records of its stages, and what it could not prove."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pedigree.configs.base.kind import MODELS
from pedigree.configs.base.project import Project
from pedigree.configs.base.shrink import Reason, Reduced
from pedigree.configs.language.graph import Graph, Node, shown_name
from pedigree.configs.rows.datasets import PrepareData
from pedigree.data.artifacts.artifacts import Artifact, read_run
from pedigree.data.records.records import row_files, rows_in
from pedigree.data.store.untrusted import ArtifactError, open_plain
from pedigree.pipelines.jobs.scratch_state import read_mapping
from pedigree.pipelines.lineage.ancestry import opened

TEMPLATE = "chat_template.jinja"
UNPROVED: dict[Reason, str] = {
    "weights": "the real models' weights and token ids, and that their files match the description of their family",
    "data": "that the real data has no quirks beyond those of the generated rows, and that there is enough of it",
    "batches": "that the recipe learns: batches, steps, and learning rates differ",
    "lengths": "long answers",
    "samples": "sample counts: statistics and shares are based on very few samples",
    "thresholds": "that the real data stays within the limits for bad, unknown, or contaminated rows and meets the recipe's expectations",
    "judges": "the real judges' answers, and that they are reachable",
    "machine": "GPU behavior: kernels, NCCL, tensor-parallel engines, offloading, and whether everything fits in memory",
}
"""Reason for a change → what remains unproved because of it."""
ALWAYS = "model quality: the scores of a rehearsal are meaningless"


def proof_of(project: Project, graph: Graph, changes: Sequence[Reduced]) -> dict[str, Any]:
    """Collect the results of a rehearsal's stages; failed stages are omitted.

    Returns:
        JSON values. `rows`, `decontamination`, `models` and `training` have an entry per stage, `suites` one per task. `verifiers`: name →
        counts of `right`, `wrong`, and `unknown` answers in RLVR and suites. `not_proved`: statements, each with the changes that cause it.
    """
    made = [(node, artifact) for node in graph.nodes.values() if (artifact := opened(project, node)) is not None]
    verifiers: dict[str, Counter[str]] = {}
    for node, artifact in made:
        for name, outcome in _verified(project, graph, node, artifact):
            verifiers.setdefault(name, Counter())[outcome] += 1
    unproved: dict[str, list[dict[str, Any]]] = {}
    for change in changes:
        unproved.setdefault(UNPROVED[change.reason], []).append(change._asdict())
    return {
        "rows": [_rows(graph, node, artifact) for node, artifact in made if isinstance(node.config, PrepareData)],
        "decontamination": [_removed(graph, node, artifact) for node, artifact in made if node.declaration.removes_overlaps],
        "models": [_model(graph, node, artifact) for node, artifact in made if node.output in MODELS],
        "training": [_trained(graph, node, artifact) for node, artifact in made if node.declaration.trains],
        "verifiers": {name: dict(counts) for name, counts in sorted(verifiers.items())},
        "suites": [suite for node, artifact in made if node.output == "scores" for suite in _suites(artifact)],
        "not_proved": [{"what": what, "changes": caused} for what, caused in (unproved | {ALWAYS: []}).items()],
    }


def _rows(graph: Graph, node: Node, artifact: Artifact) -> dict[str, Any]:
    counts = read_mapping(artifact.path / "evidence" / "counts.json")
    reasons = Counter(str(row.get("reason")) for row in _rows_in(artifact, "evidence/bad_rows.jsonl") if not row.get("out_of_turn"))
    dropped = {str(reason): int(count) for reason, count in dict(counts.get("drops") or {}).items()}
    left = Counter[str]()
    for source in counts.get("per_source") or ():
        left.update({reason: count for reason, count in source["left_out"].items() if reason != "malformed"})
    read = int(counts.get("read") or 0) + sum(reasons.values()) + sum(left.values())
    return {"stage": shown_name(graph, node), "read": read, "kept": int(counts.get("kept") or 0), "refused": dict(reasons),
            "dropped": dropped | dict(left)}  # fmt: skip


def _removed(graph: Graph, node: Node, artifact: Artifact) -> dict[str, Any]:
    suites: Any = artifact.record.metrics.get("benchmarks") or {}
    by = {name: one["rows_removed"] for name, one in suites.items() if one["rows_removed"]}
    return {"stage": shown_name(graph, node), "suites": len(suites), "rows": artifact.record.metrics.get("removed"), "by": by}


def _model(graph: Graph, node: Node, artifact: Artifact) -> dict[str, Any]:
    template = next((entry.sha256 for entry in artifact.record.files if entry.path == TEMPLATE), None)
    return {"stage": shown_name(graph, node), "kind": node.kind, "template": template,
            "added_tokens": artifact.record.metrics.get("added_tokens", [])}  # fmt: skip


def _trained(graph: Graph, node: Node, artifact: Artifact) -> dict[str, Any]:
    numerics = read_run(artifact.path / "run.json").numerics
    metrics = artifact.record.metrics
    return {
        "stage": shown_name(graph, node),
        "kind": node.kind,
        "steps": metrics.get("steps"),
        "tokens": metrics.get("trained_tokens"),
        "ranks": numerics.get("world_size"),
        "zero_stage": numerics.get("zero_stage"),
    }


def _suites(artifact: Artifact) -> Iterator[dict[str, Any]]:
    metrics = artifact.record.metrics
    items = Counter(task for task, _ in {(str(row.get("task")), row.get("id")) for row in _payload(artifact)})
    hashes: Any = metrics.get("hashes") or {}
    yield from ({"task": task, "hash": value, "items": items[task], "split": metrics.get("split")} for task, value in hashes.items())


def _verified(project: Project, graph: Graph, node: Node, artifact: Artifact) -> Iterator[tuple[str, str]]:
    """(verifier name, outcome) of every rollout shown in the evidence and every suite item."""
    if "prompts" in node.declaration.trains_on:
        names = _verifiers(project, graph, node, "prompts")
        for row in _rows_in(artifact, "evidence/rollouts.jsonl"):
            yield from ((names.get(str(row.get("id")), "unknown"), _outcome(reward)) for reward in row.get("rewards") or ())
    elif node.output == "scores":
        names = _verifiers(project, graph, node, "suites")
        yield from ((names.get(str(row.get("id")), "unknown"), _outcome(row.get("score"))) for row in _payload(artifact))


def _outcome(score: Any) -> str:
    return "unknown" if score is None else "right" if score > 0 else "wrong"


def _verifiers(project: Project, graph: Graph, node: Node, port: str) -> dict[str, str]:
    """Prompt or item id → verifier name."""
    found: dict[str, str] = {}
    for edge in node.edges:
        source = opened(project, graph.nodes[edge.source]) if edge.port == port else None
        for row in _payload(source) if source else ():
            found[str(row.get("id"))] = str((row.get("verifier") or {}).get("name"))
    return found


def _payload(artifact: Artifact) -> list[dict[str, Any]]:
    names = row_files(entry.path for entry in artifact.record.files)
    return [row for name in names for row in _rows_in(artifact, f"payload/{name}")]


def _rows_in(artifact: Artifact, name: str) -> list[dict[str, Any]]:
    try:
        with open_plain(artifact.path / name) as stream:
            return list(rows_in(stream, name))
    except (ArtifactError, FileNotFoundError):
        return []


def sentences(proof: Mapping[str, Any]) -> Iterator[str]:
    """The proof as lines of text."""
    yield "Proved:"
    yield from (f"  {line}" for line in _proved_lines(proof))
    yield "Not proved:"
    for one in proof["not_proved"]:
        fields = Counter(change["setting"].rpartition(".")[2] for change in one["changes"])
        shown = ", ".join(f"{name} ({count})" if count > 1 else name for name, count in fields.items())
        yield f"  {one['what']}" + (f"; changed: {shown}" if shown else "")


def _proved_lines(proof: Mapping[str, Any]) -> Iterator[str]:
    refused = Counter[str]()
    for one in proof["rows"]:
        refused.update(one["refused"])
    read, kept = sum(one["read"] for one in proof["rows"]), sum(one["kept"] for one in proof["rows"])
    yield f"rows: {len(proof['rows'])} datasets, {read} rows read, {kept} kept, {sum(refused.values())} rejected"
    yield from (f"  {count} rejected: {reason}" for reason, count in refused.most_common())
    for one in proof["decontamination"]:
        by = ", ".join(f"{count} by {suite}" for suite, count in one["by"].items())
        yield f"decontamination: {one['stage']} against {one['suites']} suites, {one['rows']} rows removed" + (f" ({by})" if by else "")
    if models := proof["models"]:
        templates = sorted({str(one["template"])[:12] for one in models})
        added = sorted({token for one in models for token in one["added_tokens"]})
        same = "one chat template" if len(templates) == 1 else f"{len(templates)} chat templates"
        yield f"models: {len(models)} with {same} ({', '.join(templates)})" + (f"; tokens added: {', '.join(added)}" if added else "")
    for one in proof["training"]:
        yield f"training: {one['stage']} ({one['kind']}), {one['steps']} steps on {one['ranks']} ranks at ZeRO stage {one['zero_stage']}"
    for name, counts in proof["verifiers"].items():
        yield f"verifier {name}: " + ", ".join(f"{counts.get(outcome, 0)} {outcome}" for outcome in ("right", "wrong", "unknown"))
    for one in proof["suites"]:
        yield f"suite {one['task']} ({one['split']}): {one['items']} items, task {str(one['hash'])[:12]}"
