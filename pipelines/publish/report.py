"""Render the report of a recipe as one self-contained HTML page from the available artifacts.

Missing or damaged artifacts are reported on the page. An artifact whose payload does not match its record shows only its problem.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile, zip_longest
from pathlib import Path
from typing import Any

from pedigree.configs.base.document import ConfigError
from pedigree.configs.base.project import Project
from pedigree.configs.base.texts import shown
from pedigree.configs.language.execution import Execution
from pedigree.configs.language.graph import Graph, Node
from pedigree.configs.language.suites import looks
from pedigree.data.artifacts.artifacts import Run, write_text
from pedigree.pipelines.estimate.reality import UNREADABLE, Outcome, curve_rows, outcomes_of
from pedigree.pipelines.lineage.costs import Cost, costs_of
from pedigree.pipelines.publish import report_data
from pedigree.pipelines.publish.charts import Box, Estimate, curve_svg, graph_svg, intervals_svg
from pedigree.pipelines.publish.comparison import Comparison, comparisons
from pedigree.pipelines.publish.shown_stages import Stage, code_text, metric_lines, report_path, stage_of
from pedigree.pipelines.quantities import duration, size
from pedigree.pipelines.run.opening import load_execution

TEMPLATES = Path(__file__).parent / "templates"
SAMPLES_PER_TASK = 6
LONGEST_ANSWER = 600
"""Maximum characters shown of an answer."""
CURVES_FIRST = (
    "reward", "gold", "proxy", "loss", "held_out_loss", "accuracy", "margin", "kl", "kl_k3", "entropy", "response_length", "grad_norm"
)  # fmt: skip
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


def write_report(project: Project, graph: Graph, current: Collection[str] | None = None) -> Path:
    """Write `artifacts/RECIPE/report.html`; returns its path. `current`: addresses of the stages that the run before has left current."""
    path = report_path(project, graph.recipe)
    page = gather(project, graph, current)
    try:
        text = _render(page)
    except UNREADABLE:  # an evidence field has an unexpected type
        text = _render(_without_undrawable(page))
    write_text(path, text)
    return path


def gather(project: Project, graph: Graph, current: Collection[str] | None = None) -> "Page":
    stages = [stage_of(project, graph, node) for node in graph.nodes.values()]
    problems = [stage.problem for stage in stages if stage.artifact is None and project.artifact(stage.node.address).is_dir()]
    try:
        execution = load_execution(project, graph.execution)
    except ConfigError:  # the profile may be in the middle of an edit
        execution = Execution(slots=1)
    price = execution.machine.slot_hour_price
    costs = costs_of(project, list(graph.nodes), price)
    for stage in stages:
        if stage.scores and current is not None and stage.node.address not in current:
            problems.append(f"{stage.shown}: not measured in the last run; the scores below may be of an earlier version")
    return Page(graph, stages, problems, outcomes_of(project, graph, execution), costs)


def _without_undrawable(page: "Page") -> "Page":
    """The page without the stages that make rendering fail; each is listed as a problem."""
    bare = {stage.shown: Stage(stage.node, stage.shown, None, stage.problem) for stage in page.stages}
    stages, problems = [], list(page.problems)
    for stage in page.stages:
        try:
            _render(Page(page.graph, [stage if other is stage else bare[other.shown] for other in page.stages]))
            stages.append(stage)
        except UNREADABLE as error:
            reason = shown(" ".join(f"{type(error).__name__}: {error}".split()))[:200]
            problems.append(f"{stage.shown}: its metrics or evidence cannot be shown ({reason}); run `pedigree verify`")
            stages.append(Stage(stage.node, stage.shown, None, problems[-1]))
    return Page(page.graph, stages, problems, page.outcomes, page.costs)


def _render(page: "Page") -> str:
    return filled("report.html.jinja", page=page)


def filled(template: str, **given: Any) -> str:
    """Render a template with the report's styles; the template escapes all text from data."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    forms = {"size": size, "duration": duration, "number": "{:,.0f}".format, "hours": "{:,.2f}".format, "percent": "{:.1%}".format}
    environment.filters |= {name: partial(_formatted, form) for name, form in forms.items()} | {"numerics": numerics_text}
    return environment.get_template(template).render(**given, css=(TEMPLATES / "report.css").read_text())


def _formatted(form: Callable[[Any], str], value: Any) -> str:
    return "" if value is None else form(value)


def numerics_text(run: Run | None) -> str:
    """Short summary of device, ranks, and other settings that can change rounding."""
    numerics = run.numerics if run else {}
    if not numerics:
        return ""
    ranks, threads = numerics.get("world_size"), numerics.get("threads")
    spread = f", {ranks} ranks, ZeRO-{numerics.get('zero_stage')}" if ranks != 1 else ""
    return f"{numerics.get('device')}, {threads} thread{'s' * (threads != 1)}{spread}"


def tables(project: Project, graph: Graph, node: Node) -> dict[str, list[dict[str, Any]]]:
    """Tables of a finished stage for dashboards: name → rows."""
    stage = stage_of(project, graph, node)
    found: dict[str, list[dict[str, Any]]] = {}
    found["scores"] = [
        {"policy": label, "task": task, **value}
        for label, policy in stage.scores.get("policies", {}).items()
        for task, value in policy["tasks"].items()
    ]
    if node.declaration.reports_drops and stage.evidence("counts.json"):
        counts = report_data.counts(stage)
        found["counts"] = [{"what": "read", "rows": counts["read"]}]
        found["counts"] += [{"what": f"dropped: {reason}", "rows": count} for reason, count in counts["drops"]]
        found["counts"].append({"what": "kept", "rows": counts["kept"]})
    if node.declaration.removes_overlaps and stage.artifact:
        found["contamination"] = report_data.contamination(stage)["rows"]
    return {name: rows for name, rows in found.items() if rows}


@dataclass(frozen=True)
class Page:
    """Data for the report template, in the order of its sections."""

    graph: Graph
    stages: Sequence[Stage]
    problems: Sequence[str] = ()
    outcomes: Mapping[str, Outcome] = field(default_factory=dict)
    """Address of a finished stage that uses a model → planned and measured resources."""
    costs: Mapping[str, Cost] = field(default_factory=dict)
    """Address of a finished stage → slot-hours and price."""
    sections: Sequence[tuple[str, str]] = SECTIONS

    @property
    def missing(self) -> list[str]:
        return [stage.shown for stage in self.stages if stage.artifact is None]

    @property
    def facts(self) -> list[tuple[str, str]]:
        built = [stage for stage in self.stages if stage.artifact]
        models = [stage for stage in built if stage.node.trains_on]
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
    def evaluations(self) -> list[dict[str, Any]]:
        return [_evaluation(stage, looks(self.graph.nodes)) for stage in self.stages if stage.scores]

    @property
    def published(self) -> list[Comparison]:
        """Published scores paired with measured ones."""
        return list(comparisons(self.graph, {stage.shown: stage.scores for stage in self.stages if stage.scores}))

    @property
    def families(self) -> list[str]:
        return list(dict.fromkeys(stage.node.declaration.family for stage in self.stages))

    @property
    def drawing(self) -> str:
        return graph_svg([_box(stage) for stage in self.stages], f"Graph of the recipe {self.graph.recipe}")

    @property
    def curves(self) -> list[dict[str, Any]]:
        return [_curves(stage) for stage in self.stages if stage.node.declaration.curve]

    @property
    def samples(self) -> list[dict[str, Any]]:
        return [group for stage in self._ran() for group in _samples(stage)]

    @property
    def no_samples(self) -> str:
        return "the evaluation wrote no evidence/samples.jsonl" if self._ran() else "no evaluation has run yet"

    def _ran(self) -> list[Stage]:
        return [stage for stage in self.stages if stage.node.output == "scores" and stage.artifact]

    @property
    def data(self) -> list[dict[str, Any]]:
        return [report_data.counts(stage) for stage in self.stages if stage.node.declaration.reports_drops and stage.artifact]

    @property
    def win_rates(self) -> list[dict[str, Any]]:
        return [table for stage in self.stages if stage.node.output == "judgment" and (table := report_data.win_rates(stage))]

    @property
    def contamination(self) -> list[dict[str, Any]]:
        return [report_data.contamination(stage) for stage in self.stages if stage.node.declaration.removes_overlaps and stage.artifact]

    @property
    def validation(self) -> list[dict[str, Any]]:
        return [verdict for stage in self.stages if (verdict := report_data.validation(stage))]

    @property
    def environment(self) -> list[tuple[tuple[str, str], ...]]:
        """The distinct environments of the artifacts."""
        return [group for group in dict.fromkeys(tuple(_environment(stage.run)) for stage in self.stages if stage.run) if group]


@dataclass(frozen=True)
class Chart:
    title: str
    svg: str
    note: str = ""


# --- scores ------------------------------------------------------------------------------------------------------------


def _evaluation(stage: Stage, looks: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    policies: dict[str, Any] = stage.scores["policies"]
    tasks = sorted({task for policy in policies.values() for task in policy["tasks"]})
    suites = [edge.source for edge in stage.node.edges if edge.port == "suites" and edge.source in looks]
    waived = stage.splits()
    return {
        "name": stage.shown,
        "looks": [{"suite": suite.partition("/")[2], "count": len(looks[suite])} for suite in suites],
        "tasks": tasks,
        "charts": [_task_chart(task, policies, stage.scores.get("tasks", {}).get(task)) for task in tasks],
        "rows": [
            {"label": label, "tasks": [policy["tasks"].get(task) for task in tasks], "mean": policy.get("mean")}
            for label, policy in policies.items()
        ],
        "differences": _differences(stage.scores.get("differences", [])),
        "waived": waived,
        "touched": {(split.policy, split.task) for split in waived},
    }


def _task_chart(task: str, policies: Mapping[str, Any], measure: Mapping[str, Any] | None) -> Chart:
    """Scores on a task. Scores with equal hashes of the task are comparable."""
    measured = {label: policy["tasks"][task] for label, policy in policies.items() if task in policy["tasks"]}
    how = f"{measure['metric']} ({measure['average']} average, task {measure['hash'][:12]})" if measure else "mean score"
    note = f"{min(value['n'] for value in measured.values())} items, {how} with 95% interval"
    return Chart(task, intervals_svg([_estimate(label, value) for label, value in measured.items()], f"Scores on {task}"), note)


def _differences(differences: Sequence[Mapping[str, Any]]) -> list[Chart]:
    """One chart per task, and per further metric: the mean difference and its interval for each compared pair of policies."""
    by_task: dict[str, list[Estimate]] = {}
    for row in differences:
        by_task.setdefault(f"{row['task']} ({row['metric']})" if "metric" in row else str(row["task"]), []).append(
            _estimate(f"{row['candidate']} − {row['baseline']}", row)
        )
    return [
        Chart(task, f'<div class="differences">{intervals_svg(rows, f"Paired differences on {task}", zero_line=True)}</div>')
        for task, rows in sorted(by_task.items())
    ]


def _estimate(label: str, value: Mapping[str, Any]) -> Estimate:
    return Estimate(label, float(value["mean"]), float(value["low"]), float(value["high"]))


# --- recipe and training -----------------------------------------------------------------------------------------------


def _box(stage: Stage) -> Box:
    lines = [f"{stage.shown} ({stage.node.kind} → {stage.node.output})"]
    if stage.artifact is None:
        lines.append(stage.problem)
    else:
        lines.append(f"{size(stage.size)} in {len(stage.artifact.record.files)} files")
        lines += metric_lines(stage.artifact.record)
    note = duration(stage.seconds) if stage.seconds is not None else ""
    missing = stage.artifact is None
    return Box(stage.node.address, stage.shown, stage.node.kind, stage.node.parents, note, "\n".join(lines), missing)


def _curves(stage: Stage) -> dict[str, Any]:
    steps = stage.metrics.get("steps")
    found = {"name": stage.shown, "note": f"{stage.node.kind}, {steps} steps" if steps else stage.node.kind}
    path = stage.artifact.evidence / "curve.csv" if stage.artifact else None
    if path is None or not path.is_file():
        return found | {"charts": [], "more": [], "problem": stage.problem or "the artifact has no evidence/curve.csv"}
    columns = _columns(path)
    found["note"] += idle_shares(columns) + slow_rank(columns, stage.evidence("ranks.json"))
    at = columns.pop("step", [])
    charts = []
    for name in dict.fromkeys([*(name for name in CURVES_FIRST if name in columns), *columns]):
        points = [(x, y) for x, y in zip(at, columns[name], strict=True) if x is not None and y is not None]
        if points:
            charts.append(Chart(name.replace("_", " "), curve_svg(points, f"{name} of {stage.shown}")))
    return found | {"charts": charts[:CURVES_SHOWN], "more": charts[CURVES_SHOWN:], "problem": "evidence/curve.csv is empty"}


def idle_shares(columns: Mapping[str, Sequence[float | None]]) -> str:
    """Mean shares of a step in which trainer and sampler of `rlvr` waited for each other; empty for other curves."""
    idle = {who: [share for share in columns.get(f"{who}_idle", ()) if share is not None] for who in ("trainer", "sampler")}
    means = [f"{who} idle {sum(shares) / len(shares):.0%}" for who, shares in idle.items() if shares]
    return f", {' and '.join(means)} of a step" if means else ""


def slow_rank(columns: Mapping[str, Sequence[float | None]], ranks: Mapping[str, Any]) -> str:
    """Mean slowdown by the slowest rank, and which rank that was most often, since the ranks have their hosts; empty for one rank.

    Args:
        ranks: `evidence/ranks.json`.
    """
    if "slowdown" not in columns:
        return ""
    lines = zip(columns["step"], columns["slowdown"], columns["slowest_rank"], strict=True)
    found = [(slowdown, int(rank)) for step, slowdown, rank in lines if slowdown and rank is not None and (step or 0) > ranks["after_step"]]
    if not found:
        return ""
    ((rank, steps),) = Counter(rank for _, rank in found).most_common(1)
    mean = sum(slowdown for slowdown, _ in found) / len(found)
    return f", slowest rank {mean:.2f} times the mean, in {steps / len(found):.0%} of steps rank {rank} on {ranks['hosts'][rank]}"


def _columns(path: Path) -> dict[str, list[float | None]]:
    """Columns of a CSV file as numbers; None for non-numeric cells."""
    columns: dict[str, list[float | None]] = {}
    for row in curve_rows(path):
        for name, cell in row.items():
            try:
                value = float(cell)
            except (TypeError, ValueError):
                value = None
            columns.setdefault(str(name), []).append(value)
    return columns


# --- samples -----------------------------------------------------------------------------------------------------------


def _samples(stage: Stage) -> Iterator[dict[str, Any]]:
    """By task, items answered by both the first and the last policy: gains, losses, and ties in turn, so that no kind is favored."""
    if len(stage.policies) < 2:
        return
    by_item: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for row in stage.evidence_rows("samples.jsonl"):
        by_item.setdefault((str(row["task"]), str(row["id"])), {})[str(row["policy"])] = row
    ends = stage.policies[0], stage.policies[-1]
    groups: dict[str, tuple[list[Any], ...]] = {}
    for (task, _), answers in by_item.items():
        pair = [answers[label] for label in ends if label in answers and answers[label]["score"] is not None]
        if len(pair) == 2:
            change = pair[1]["score"] - pair[0]["score"]
            sample = {"prompt": _prompt(pair), "answers": [answer | {"text": _shown_answer(_said(answer, pair))} for answer in pair]}
            gains, losses, ties = groups.setdefault(task, ([], [], []))
            (gains if change > 0 else losses if change < 0 else ties).append(sample)
    for task, piles in sorted(groups.items()):
        in_turn = [sample for turn in zip_longest(*piles) for sample in turn if sample is not None]
        yield {"task": f"{task} ({stage.shown})", "before": ends[0], "after": ends[1], "shown": in_turn[:SAMPLES_PER_TASK]}


def _shown_answer(text: str) -> str:
    if not text.strip():
        return "(only whitespace)" if text else "(empty)"
    return text.strip() if len(text) <= LONGEST_ANSWER else f"{text.strip()[:LONGEST_ANSWER]} …"


def _prompt(pair: Sequence[Mapping[str, Any]]) -> str:
    """The messages with which both answers begin: of conversations with an environment, those before the first turn that differs."""
    shared = _shared(pair)
    return "\n".join(f"{message['content']}" for message in shared) if shared else str(pair[0].get("prompt", pair[0]["id"]))


def _said(answer: Mapping[str, Any], pair: Sequence[Mapping[str, Any]]) -> str:
    """What follows the shared messages."""
    messages = answer.get("messages")
    later = messages[len(_shared(pair)) :] if isinstance(messages, list) else []
    return "\n".join([*(f"{message['role']}: {message['content']}" for message in later), answer["text"]])


def _shared(pair: Sequence[Mapping[str, Any]]) -> list[Any]:
    given = [row.get("messages") for row in pair]
    messages = [one if isinstance(one, list) else [] for one in given]
    return [first for first, _ in takewhile(lambda turns: turns[0] == turns[1], zip(*messages, strict=False))]


# --- environment -------------------------------------------------------------------------------------------------------


def _environment(run: Run) -> list[tuple[str, str]]:
    """Code, hardware, and libraries of a run."""
    environment, hardware = run.environment, run.hardware
    shown: list[tuple[str, str]] = []
    if run.code:
        shown.append(("commit", code_text(run.code)))
    shown += [("GPU", ", ".join(hardware.gpus))] if hardware.gpus else []
    shown += [("CPU", f"{hardware.cores} cores, {hardware.cpu}")] if hardware.cpu else []
    shown += [("memory", f"{hardware.memory_gib} GiB")] if hardware.memory_gib else []
    shown += [("python", environment.python)] if environment.python else []
    return shown + sorted(environment.libraries.items())
