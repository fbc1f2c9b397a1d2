"""Render the report of a recipe as one self-contained HTML page from the available artifacts.

Missing or damaged artifacts are reported on the page. An artifact whose payload does not match its record shows only its problem.
"""

import csv
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from pedigree.configs.base.document import ConfigError
from pedigree.configs.base.frozen import Frozen
from pedigree.configs.base.project import Project
from pedigree.configs.base.texts import shown
from pedigree.configs.language.execution import Execution
from pedigree.configs.language.graph import Graph, Node
from pedigree.configs.language.kinds import generators_of, kind_of, licences_of, sources_of
from pedigree.configs.language.suites import looks
from pedigree.configs.rows.datasets import title
from pedigree.data.artifacts.artifacts import Artifact, ArtifactError, Run, open_artifact, read_json, read_run, write_text
from pedigree.data.expectations import results
from pedigree.data.expectations.results import finding
from pedigree.data.store.untrusted import open_plain, read_lines
from pedigree.pipelines.estimate.reality import Outcome, outcomes_of
from pedigree.pipelines.lineage.ancestry import read_pedigree
from pedigree.pipelines.lineage.waivers import Split, splits_of
from pedigree.pipelines.publish.attribution import brought
from pedigree.pipelines.publish.charts import Box, Estimate, curve_svg, graph_svg, intervals_svg
from pedigree.pipelines.publish.comparison import Comparison, comparisons
from pedigree.pipelines.quantities import duration, size
from pedigree.pipelines.run.opening import load_execution

TEMPLATES = Path(__file__).parent / "templates"
MOST_POLICIES = 12
"""Maximum policies in one win-rate table."""
SAMPLES_PER_TASK = 6
LONGEST_ANSWER = 600
"""Maximum characters shown of an answer."""
CURVES_FIRST = ("reward", "gold", "proxy", "loss", "accuracy", "margin", "kl", "kl_k3", "entropy", "response_length", "grad_norm")
UNDRAWABLE = (ArtifactError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError, csv.Error)
EXAMPLES_SHOWN = 5
"""Failing rows shown per expectation; the evidence has more."""
CURVES_SHOWN = 4
"""Curves of a stage shown initially; the others are collapsed."""
SECTIONS = (
    ("scores", "Scores"),
    ("recipe", "Recipe"),
    ("training", "Training"),
    ("samples", "Before and after"),
    ("data", "Data"),
    ("contamination", "Contamination"),
    ("validation", "Validation"),
    ("plan", "Plan and run"),
    ("lineage", "Lineage"),
    ("environment", "Environment"),
)


@dataclass(frozen=True)
class Stage:
    """A node with its artifact, or the reason why there is none."""

    node: Node
    shown: str
    """Name in this recipe; for stages of other recipes, the address."""
    artifact: Artifact | None
    problem: str

    @cached_property
    def run(self) -> Run | None:
        try:
            return read_run(self.artifact.path / "run.json") if self.artifact else None
        except ArtifactError:  # the report shows what is readable
            return None

    @cached_property
    def metrics(self) -> dict[str, Any]:
        return self.artifact.record.metrics if self.artifact else {}

    @property
    def seconds(self) -> float | None:
        """Total wall time of all attempts of its job; None if none was recorded."""
        return self.run.seconds if self.run else None

    @property
    def size(self) -> int:
        return sum(entry.size for entry in self.artifact.record.files) if self.artifact else 0

    @staticmethod
    def json(path: Path) -> Any:
        """Parse a JSON file; empty if missing or unreadable, since evidence is optional."""
        try:
            return read_json(path)
        except ArtifactError:
            return {}

    def evidence(self, name: str) -> Any:
        return self.json(self.artifact.evidence / name) if self.artifact else {}

    def evidence_rows(self, name: str) -> list[dict[str, Any]]:
        path = self.artifact.evidence / name if self.artifact else None
        if path is None or not path.is_file():
            return []
        with open_plain(path) as stream:
            return list(read_lines(stream, path.name))


@dataclass(frozen=True)
class Chart:
    title: str
    svg: str
    note: str = ""


@dataclass(frozen=True)
class Page:
    """Data for the report template."""

    graph: Graph
    stages: Sequence[Stage]
    sections: Sequence[tuple[str, str]] = SECTIONS
    problems: list[str] = field(default_factory=list)
    outcomes: Mapping[str, Outcome] = field(default_factory=dict)
    """Address of a finished stage that uses a model → planned and measured resources."""

    @property
    def missing(self) -> list[str]:
        return [stage.shown for stage in self.stages if stage.artifact is None]

    @property
    def facts(self) -> list[tuple[str, str]]:
        built = [stage for stage in self.stages if stage.artifact]
        models = [stage for stage in built if stage.node.declaration.trains_on]
        seconds = [stage.seconds for stage in built if stage.seconds is not None]
        rows = sum(int(stage.metrics.get("rows", 0) or 0) for stage in self._cleaned(built))
        facts = [("stages built", f"{len(built)} of {len(self.stages)}"), ("models trained", str(len(models)))]
        facts += [("training rows after decontamination", f"{rows:,}")] if rows else []
        facts += [("total job wall time", duration(sum(seconds)))] if seconds else []
        return [*facts, ("on disk", size(sum(stage.size for stage in built)))]

    def _cleaned(self, built: Sequence[Stage]) -> list[Stage]:
        """The last decontamination stage of each data path."""
        looking = [stage for stage in built if stage.node.declaration.removes_overlaps]
        before = {address for stage in looking for address in self._data_of(stage.node)}
        return [stage for stage in looking if stage.node.address not in before]

    def _data_of(self, node: Node) -> set[str]:
        """Addresses of the stages upstream along `data` edges."""
        sources = {edge.source for edge in node.edges if edge.port == "data"}
        return sources.union(*(self._data_of(self.graph.nodes[source]) for source in sources))

    @property
    def families(self) -> list[str]:
        return list(dict.fromkeys(stage.node.declaration.family for stage in self.stages))

    @property
    def drawing(self) -> str:
        boxes = [
            Box(
                id=stage.node.address,
                name=stage.shown,
                kind=stage.node.kind,
                parents=stage.node.parents,
                note=duration(stage.seconds) if stage.seconds is not None else "",
                hover=_hover(stage),
                missing=stage.artifact is None,
            )
            for stage in self.stages
        ]
        return graph_svg(boxes, f"Graph of the recipe {self.graph.recipe}")

    @cached_property
    def evaluations(self) -> list[dict[str, Any]]:
        return [_evaluation(stage, looks(self.graph.nodes)) for stage in self.stages if stage.node.output == "scores" and _scores(stage)]

    @property
    def curves(self) -> list[dict[str, Any]]:
        return [_curves(stage) for stage in self.stages if stage.node.declaration.curve]

    @cached_property
    def samples(self) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = []
        for stage in self.stages:
            if stage.node.output == "scores" and stage.artifact:
                groups += _samples(stage)
        return groups

    @property
    def no_samples(self) -> str:
        ran = any(stage.node.output == "scores" and stage.artifact for stage in self.stages)
        return "the evaluation wrote no evidence/samples.jsonl" if ran else "no evaluation has run yet"

    @property
    def data(self) -> list[dict[str, Any]]:
        return [_counts(stage) for stage in self.stages if stage.node.declaration.reports_drops and stage.artifact]

    @property
    def win_rates(self) -> list[dict[str, Any]]:
        """Pairwise win rates of judgments with at most `MOST_POLICIES` policies."""
        return [table for stage in self.stages if stage.node.output == "judgment" and (table := _win_rates(stage))]

    @property
    def contamination(self) -> list[dict[str, Any]]:
        return [_contamination(stage) for stage in self.stages if stage.node.declaration.removes_overlaps and stage.artifact]

    @property
    def validation(self) -> list[dict[str, Any]]:
        return [verdict for stage in self.stages if (verdict := _verdict(stage))]

    @property
    def published(self) -> list[Comparison]:
        """Published scores paired with measured ones."""
        evaluations = {stage.shown: scores for stage in self.stages if stage.node.output == "scores" and (scores := _scores(stage))}
        return list(comparisons(self.graph, evaluations))

    @property
    def environment(self) -> list[list[tuple[str, str]]]:
        """The distinct environments of the artifacts."""
        found = [_environment(stage.run) for stage in self.stages if stage.run]
        return [list(group) for group in dict.fromkeys(tuple(group) for group in found if group)]


def write_report(project: Project, graph: Graph) -> Path:
    """Write `artifacts/RECIPE/report.html`; returns its path."""
    path = report_path(project, graph.recipe)
    page = gather(project, graph)
    try:
        text = render(page)
    except UNDRAWABLE:  # an evidence field has an unexpected type
        text = render(_without_undrawable(page))
    write_text(path, text)
    return path


def _without_undrawable(page: Page) -> Page:
    """The page without the stages that make rendering fail; each is listed as a problem."""
    bare = {stage.shown: Stage(stage.node, stage.shown, None, stage.problem) for stage in page.stages}
    stages, problems = [], list(page.problems)
    for stage in page.stages:
        try:
            render(Page(page.graph, [stage if other is stage else bare[other.shown] for other in page.stages]))
            stages.append(stage)
        except UNDRAWABLE as error:
            reason = shown(" ".join(f"{type(error).__name__}: {error}".split()))[:200]
            problems.append(f"{stage.shown}: its metrics or evidence cannot be shown ({reason}); run `pedigree verify`")
            stages.append(Stage(stage.node, stage.shown, None, problems[-1]))
    return Page(page.graph, stages, problems=problems, outcomes=page.outcomes)


def report_path(project: Project, recipe: str) -> Path:
    return project.recipe_folder(recipe) / "report.html"


def gather(project: Project, graph: Graph) -> Page:
    stages = [_stage(project, graph, node) for node in graph.nodes.values()]
    damaged = [stage.problem for stage in stages if stage.artifact is None and project.artifact(stage.node.address).is_dir()]
    return Page(graph, stages, problems=damaged, outcomes=outcomes(project, graph))


def outcomes(project: Project, graph: Graph) -> dict[str, Outcome]:
    """Address → planned and measured resources, of finished stages that use a model."""
    try:
        execution = load_execution(project, graph.execution)
    except ConfigError:  # the profile may be in the middle of an edit
        execution = Execution(slots=1)
    return outcomes_of(project, graph, execution)


def render(page: Page) -> str:
    """The page as HTML."""
    return filled("report.html.jinja", page=page)


def filled(template: str, **given: Any) -> str:
    """Render a template with the report's styles; the template escapes all text from data."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    forms = {"size": size, "duration": duration, "number": "{:,.0f}".format}
    environment.filters |= {name: partial(_formatted, form) for name, form in forms.items()} | {"numerics": numerics_text}
    return environment.get_template(template).render(**given, css=(TEMPLATES / "report.css").read_text())


def _formatted(form: Callable[[Any], str], value: Any) -> str:
    return "" if value is None else form(value)


def scores_of(project: Project, graph: Graph) -> dict[str, dict[str, Any]]:
    """Name → scores of the recipe's finished evaluations."""
    stages = [_stage(project, graph, node) for node in graph.nodes.values() if node.output == "scores"]
    return {stage.shown: scores for stage in stages if (scores := _scores(stage))}


def waived_in(project: Project, graph: Graph) -> dict[str, list[Split]]:
    """Name of an evaluation → its scores affected by waivers, split into contaminated and clean items.

    Damaged evaluations are omitted; the report describes their problems.
    """
    stages = [_stage(project, graph, node) for node in graph.nodes.values() if node.output == "scores"]
    found: dict[str, list[Split]] = {}
    for stage in stages:
        with suppress(ArtifactError):
            found |= {stage.shown: splits} if (splits := _splits(stage)) else {}
    return found


def tables(project: Project, graph: Graph, node: Node) -> dict[str, list[dict[str, Any]]]:
    """Tables of a finished stage for dashboards: name → rows."""
    stage = _stage(project, graph, node)
    found: dict[str, list[dict[str, Any]]] = {}
    scores = _scores(stage)
    if node.output == "scores" and scores:
        found["scores"] = [
            {"policy": label, "task": task, **value}
            for label, policy in scores["policies"].items()
            for task, value in policy["tasks"].items()
        ]
    if node.declaration.reports_drops and stage.evidence("counts.json"):
        counts = _counts(stage)
        found["counts"] = [{"what": "read", "rows": counts["read"]}]
        found["counts"] += [{"what": f"dropped: {reason}", "rows": count} for reason, count in counts["drops"]]
        found["counts"].append({"what": "kept", "rows": counts["kept"]})
    if node.declaration.removes_overlaps and stage.artifact:
        gate = _contamination(stage)
        found["contamination"] = [dict(zip(gate["columns"], row, strict=True)) for row in gate["rows"]]
    return {name: rows for name, rows in found.items() if rows}


def numerics_text(run: Run | None) -> str:
    """Short summary of device, ranks, and other settings that can change rounding."""
    numerics = run.numerics if run else {}
    if not numerics:
        return ""
    ranks, threads = numerics.get("world_size"), numerics.get("threads")
    parts = [str(numerics.get("device")), f"{threads} thread{'s' * (threads != 1)}"]
    return ", ".join([*parts, *([f"{ranks} ranks, ZeRO-{numerics.get('zero_stage')}"] if ranks != 1 else [])])


def _stage(project: Project, graph: Graph, node: Node) -> Stage:
    shown = node.name if node.recipe == graph.recipe else node.address
    try:
        return Stage(node, shown, open_artifact(project.artifact(node.address)), "")
    except ArtifactError as error:
        missing = not project.artifact(node.address).exists()
        text = str(error).replace(f"{project.root}/", "")
        return Stage(node, shown, None, "not built yet" if missing else text)


def _hover(stage: Stage) -> str:
    lines = [f"{stage.shown} ({stage.node.kind} → {stage.node.output})"]
    if stage.artifact is None:
        return "\n".join([*lines, stage.problem])
    lines.append(f"{size(stage.size)} in {len(stage.artifact.record.files)} files")
    lines += [f"{name}: {value}" for name, value in sorted(stage.metrics.items()) if isinstance(value, int | float | str)][:8]
    return "\n".join([*lines, f"content {stage.artifact.record.content[:12]}"])


def _scores(stage: Stage) -> dict[str, Any]:
    """Scores of an evaluation, with policies in recipe order."""
    scores = stage.json(stage.artifact.payload / "scores.json") if stage.artifact else {}
    if scores:
        order = [edge.label for edge in stage.node.edges if edge.port == "policies"]
        scores["policies"] = {label: scores["policies"][label] for label in order if label in scores["policies"]}
    return scores


def _splits(stage: Stage) -> list[Split]:
    return splits_of(read_pedigree(stage.artifact.path)) if stage.artifact else []


def _estimate(label: str, value: Mapping[str, Any]) -> Estimate:
    return Estimate(label, float(value["mean"]), float(value["low"]), float(value["high"]))


def _how(task: Mapping[str, Any] | None) -> str:
    """Metric, average, and hash of a task; scores with equal hashes are comparable."""
    return f"{task['metric']} ({task['average']} average, task {task['hash'][:12]})" if task else "mean score"


def _evaluation(stage: Stage, looks: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    scores = _scores(stage)
    policies: dict[str, Any] = scores["policies"]
    tasks = sorted({task for policy in policies.values() for task in policy["tasks"]})
    labels = list(policies)
    charts = []
    for task in tasks:
        measured = [(label, policies[label]["tasks"][task]) for label in labels if task in policies[label]["tasks"]]
        counts = {value["n"] for _, value in measured}
        note = f"{min(counts)} items, {_how(scores.get('tasks', {}).get(task))} with 95% interval" if counts else ""
        charts.append(Chart(task, intervals_svg([_estimate(label, value) for label, value in measured], f"Scores on {task}"), note))
    waived = _splits(stage)
    return {
        "name": stage.shown,
        "looks": [
            {"suite": edge.source.partition("/")[2], "count": len(looks[edge.source])}
            for edge in stage.node.edges
            if edge.port == "suites" and edge.source in looks
        ],
        "tasks": tasks,
        "charts": charts,
        "rows": [
            {"label": label, "tasks": [policies[label]["tasks"].get(task) for task in tasks], "mean": policies[label].get("mean")}
            for label in labels
        ],
        "differences": _differences(scores.get("differences", [])),
        "waived": waived,
        "touched": {(split.policy, split.task) for split in waived},
    }


def _differences(differences: Sequence[Mapping[str, Any]]) -> list[Chart]:
    """One chart per task: the mean difference and its interval for each compared pair of policies."""
    by_task: dict[str, list[Estimate]] = {}
    for row in differences:
        name = f"{row['candidate']} − {row['baseline']}"
        by_task.setdefault(str(row["task"]), []).append(_estimate(name, row))
    return [
        Chart(task, f'<div class="differences">{intervals_svg(rows, f"Paired differences on {task}", zero_line=True)}</div>')
        for task, rows in sorted(by_task.items())
    ]


def _curves(stage: Stage) -> dict[str, Any]:
    steps = stage.metrics.get("steps")
    note = f"{stage.node.kind}, {steps} steps" if steps else stage.node.kind
    path = stage.artifact.evidence / "curve.csv" if stage.artifact else None
    if path is None or not path.is_file():
        return {
            "name": stage.shown,
            "note": note,
            "charts": [],
            "more": [],
            "problem": stage.problem or "the artifact has no evidence/curve.csv",
        }
    columns = _columns(path)
    steps_column = columns.pop("step", [])
    names = [name for name in CURVES_FIRST if name in columns] + [name for name in columns if name not in CURVES_FIRST]
    charts = []
    for name in names:
        points = [(x, y) for x, y in zip(steps_column, columns[name], strict=True) if x is not None and y is not None]
        if points:
            charts.append(Chart(name.replace("_", " "), curve_svg(points, f"{name} of {stage.shown}")))
    shown, more = charts[:CURVES_SHOWN], charts[CURVES_SHOWN:]
    return {"name": stage.shown, "note": note, "charts": shown, "more": more, "problem": "evidence/curve.csv is empty"}


def _columns(path: Path) -> dict[str, list[float | None]]:
    """Columns of a CSV file as numbers; None for non-numeric cells."""
    columns: dict[str, list[float | None]] = {}
    with path.open(newline="") as stream:
        for row in csv.DictReader(stream):
            for name, cell in row.items():
                try:
                    value = float(cell)
                except (TypeError, ValueError):
                    value = None
                columns.setdefault(str(name), []).append(value)
    return columns


def _samples(stage: Stage) -> list[dict[str, Any]]:
    """Items answered by both the first and the last policy, with gains and losses among the first."""
    rows = stage.evidence_rows("samples.jsonl")
    order = [edge.label for edge in stage.node.edges if edge.port == "policies"]
    if not rows or len(order) < 2:
        return []
    before, after = order[0], order[-1]
    by_item: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for row in rows:
        by_item.setdefault((str(row["task"]), str(row["id"])), {})[str(row["policy"])] = row
    groups: dict[str, list[dict[str, Any]]] = {}
    for (task, _), answers in by_item.items():
        if before in answers and after in answers and None not in (answers[before]["score"], answers[after]["score"]):
            pair = [answers[before], answers[after]]
            pair = [answer | {"text": _shown_answer(answer["text"])} for answer in pair]
            groups.setdefault(task, []).append({"prompt": _prompt(pair[0]), "answers": pair, "change": pair[1]["score"] - pair[0]["score"]})
    return [
        {
            "task": f"{task} ({stage.shown})",
            "before": before,
            "after": after,
            "shown": _telling(items),
        }
        for task, items in sorted(groups.items())
    ]


def _telling(items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Pick gains, losses, and ties in turn, so that the selection is not biased toward gains."""
    piles = [
        [item for item in items if item["change"] > 0],
        [item for item in items if item["change"] < 0],
        [item for item in items if item["change"] == 0],
    ]
    shown: list[dict[str, Any]] = []
    while len(shown) < SAMPLES_PER_TASK and any(piles):
        for pile in piles:
            if pile and len(shown) < SAMPLES_PER_TASK:
                shown.append(pile.pop(0))
    return shown


def _shown_answer(text: str) -> str:
    if not text.strip():
        return "(only whitespace)" if text else "(empty)"
    return text.strip() if len(text) <= LONGEST_ANSWER else f"{text.strip()[:LONGEST_ANSWER]} …"


def _prompt(row: Mapping[str, Any]) -> str:
    messages = row.get("messages")
    if isinstance(messages, list):
        return "\n".join(f"{message['content']}" for message in messages)
    return str(row.get("prompt", row["id"]))


def _counts(stage: Stage) -> dict[str, Any]:
    counts = stage.evidence("counts.json")
    drops: dict[str, int] = dict(counts.get("drops", {}))
    for source in counts.get("per_source", []):
        for reason, count in source.get("left_out", {}).items():
            drops[reason] = drops.get(reason, 0) + count
    return {
        "name": stage.shown,
        "type": stage.node.output,
        "read": _read_text(counts),
        "drops": sorted(drops.items(), key=lambda pair: (-pair[1], pair[0])),
        "kept": counts.get("kept", stage.metrics.get("rows", "")),
        "sources": ", ".join(f"{count} {name}{_origin(stage.node.config, name)}" for name, count in counts.get("sources", {}).items()),
        "lengths": {unit: _lengths_text(stage.evidence("statistics.json"), unit) for unit in ("characters", "tokens")},
    }


def _win_rates(stage: Stage) -> dict[str, Any] | None:
    """Win-rate matrix with one row and one column per policy; None if there are no or too many policies."""
    found = stage.evidence("win_rates.json") or []
    cells = {(one["policy"], one["against"]): one for one in found}
    policies = list(dict.fromkeys(policy for one in found for policy in (one["policy"], one["against"])))
    if not 2 <= len(policies) <= MOST_POLICIES:
        return None
    rows = [{"policy": one, "cells": [cells.get((one, other)) for other in policies]} for one in policies]
    return {"name": stage.shown, "policies": policies, "rows": rows}


def _lengths_text(statistics: Mapping[str, Any], unit: str) -> str:
    """Median, 99th percentile, and maximum characters or tokens per row; empty if not counted."""
    found = statistics.get("all", {}).get(unit, {})
    return f"{found['p50']:,} / {found['p99']:,} / {found['max']:,}" if "p50" in found else ""


def _origin(config: Frozen, name: str) -> str:
    """License and generators of the rows with one source name, in parentheses; empty for procedural rows."""
    sources = sources_of(kind_of(config).name, config.model_dump(mode="json"))
    titles = sorted({str(title(source)) for source in brought(sources, name)})
    licences, generators = licences_of(config), generators_of(config)
    stated = sorted({licence for one in titles for licence in licences.get(one, ())})
    writers = sorted({writer for one in titles for writer in generators.get(one, ())})
    return f" ({' or '.join(stated)}{'; written by ' if writers else ''}{', '.join(writers)})" if stated else ""


def _read_text(counts: Mapping[str, Any]) -> str:
    if not counts:
        return "not recorded"
    return f"{counts['read']:,}" + (f" answers to {counts['prompts']:,} prompts" if "prompts" in counts else "")


def _contamination(stage: Stage) -> dict[str, Any]:
    """Overlap counts per benchmark, and the removed rows with their matching text."""
    report = stage.evidence("report.json")
    rows = [
        [
            label,
            found["items"],
            found["items_overlapped"],
            f"{found['share_overlapped']:.1%}",
            found["rows_removed"],
            found.get("items_waived", 0),
        ]
        for label, found in report.get("benchmarks", {}).items()
    ]
    examples = [{"verdict": "removed", **row} for row in stage.evidence_rows("manifest.jsonl")]
    note = f"{report['removed']} of {report['read']} rows removed" if report else "evidence/report.json is missing"
    if report.get("planted_leaks"):
        note += f"; {report['leaks_found']} of {report['planted_leaks']} planted leaks found"
    if "paraphrases" in report:
        alike = sum(found["rows"] for found in report["paraphrases"].values())
        note += f"; {alike} rows resemble an item by embedding and may not be copies (evidence/paraphrases.jsonl)"
    if "questions" in report:
        note += f"; a judge compared {report['pairs']} row-item pairs in {report['questions']} questions"
        note += f", {sum(report['unanswered'].values())} of them without a verdict (evidence/rephrased.jsonl)"
    return {
        "name": stage.shown,
        "note": note,
        "columns": ["benchmark", "items", "items overlapped", "share", "rows removed", "items waived"],
        "rows": rows,
        "examples": sorted(examples, key=lambda row: row["verdict"] not in ("removed", "waived")),
    }


def _verdict(stage: Stage) -> dict[str, Any] | None:
    verdict = stage.metrics.get("validation")
    if not isinstance(verdict, dict):
        return None
    results = verdict.get("expectations", verdict.get("results", []))
    failed = [str(result.get("expectation", result.get("type"))) for result in results if not result.get("success")]
    of_recipe = [_held(entry) for entry in stage.evidence("validation.json").get("expectations", []) if "severity" in entry]
    return {
        "name": stage.shown,
        "success": bool(verdict.get("success")),
        "count": len(results),
        "failed": ", ".join(failed),
        "of_recipe": of_recipe,
        "warned": any(not entry["success"] for entry in of_recipe),
    }


def _held(entry: Mapping[str, Any]) -> dict[str, Any]:
    """An expectation of a recipe, its result, and examples of failing rows."""
    examples = [[example["id"], example["place"], example["value"]] for example in entry.get("examples", [])]
    return {"title": results.title(entry), "found": finding(entry), "success": entry["success"], "examples": examples[:EXAMPLES_SHOWN]}


def _environment(run: Run) -> list[tuple[str, str]]:
    """Code, hardware, and libraries of a run."""
    environment, hardware = run.environment, run.hardware
    shown: list[tuple[str, str]] = []
    if run.code:
        shown.append(("commit", f"{(run.code.commit or 'none')[:12]}{' with local changes' if run.code.dirty else ''}"))
    shown += [("GPU", ", ".join(hardware.gpus))] if hardware.gpus else []
    shown += [("CPU", f"{hardware.cores} cores, {hardware.cpu}")] if hardware.cpu else []
    shown += [("memory", f"{hardware.memory_gib} GiB")] if hardware.memory_gib else []
    shown += [("python", environment.python)] if environment.python else []
    return shown + sorted(environment.libraries.items())
