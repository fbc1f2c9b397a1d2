"""Shrink a recipe for rehearsal on a CPU in minutes: the same graph, with few rows, few steps, short answers and tiny models.

Every reduction is defined in this file and reported; all other settings are those of the recipe.
"""

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from configs.base.naming import Model
from configs.judging.answers import Evaluate, Judge, Sample, Scorers
from configs.judging.asking import ByEndpoint
from configs.judging.keeping import BestAnswers, SelectPrompts, SelectRows
from configs.judging.pairing import Pair
from configs.judging.rephrasing import FindRephrased
from configs.judging.synthesis import Synthesize
from configs.language.compile import yaml_text
from configs.language.declarations import DECLARATIONS
from configs.language.execution import Execution
from configs.language.graph import Edge, Graph, Node
from configs.methods.policy_gradient import Ppo
from configs.methods.training import Rlvr, Training
from configs.rows.datasets import DataSource, Hub, MadeRows, Packaged, PrepareData, SourceModel, Stored
from configs.rows.mixing import Drawn

BATCH, EPOCHS, STEPS, LEARNING_RATE = 4, 2, 2, 1e-5
"""Training. With a lower rate, a few steps change less than bf16 can represent; a higher one makes a tiny model so confident that rewards
no longer differ."""
PROMPTS, SAMPLES, TOKENS = 4, 8, 24
"""RLVR: prompts per step, answers per prompt, tokens per answer (the last for any stage)."""
ROWS, HUB_ROWS, MADE_ROWS, LEAKS, WINDOW = 8, 3, 48, 2, 3
"""Training rows from a file or a package, from the Hub if the recipe sets a count, and from a generator; planted leaks; prompts of a
window."""
SUITE_ROWS, SAMPLED_ROWS = 3, 1
"""Items of a suite, and of a suite with several answers per item."""
FILE_ROWS = 16
"""Rows of a project file, some of which may be bad."""
REQUESTS, SHOTS = 8, 2
"""Requests of a stage that synthesizes prompts, and examples in each."""
RESAMPLES, BAD_ROWS, MAX_UNKNOWN, KEPT_SHARE = 200, 0.75, 0.5, 0.75
LOWEST, HIGHEST = -1e6, 1e6
"""Replacement for score bounds, which the output of rehearsal models need not meet."""
MOST_SLOTS = 4
OF_REAL_ROWS = ("ids", "values")
"""Filters by properties that synthetic rows lack: ids, and column values."""
INPUT = "in."
"""Prefix of a setting that is an input, removed in the rehearsal, rather than a field."""
Reason = Literal["weights", "data", "batches", "lengths", "samples", "thresholds", "judges", "machine"]
"""The aspect of the real run that the change leaves untested."""


class Reduced(NamedTuple):
    """One setting that differs between the rehearsal and the recipe or profile."""

    where: str
    """Address of the stage, or name of the profile."""
    setting: str
    """Dotted path of the field."""
    real: Any
    rehearsed: Any
    reason: Reason


@dataclass(frozen=True)
class Stand:
    """Replacements for external resources."""

    commits: Mapping[tuple[str, str], str] = field(default_factory=dict)
    """(`dataset` or `model`, repository) → commit of the synthetic one."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Name of a stored source → sha256 of the synthetic file."""
    judge_url: str = ""
    """URL of the mock judge, which replaces every endpoint."""


Given = Mapping[str, Node]
"""The graph's stages, by address."""


def model_repo(node: Node) -> str:
    """Repository that replaces a model source: its own name on the Hub, or a name derived from the stage."""
    assert isinstance(node.config, SourceModel)
    source = node.config.source
    return source.repo if source.type == "hub" else f"rehearsal/{rehearsed_name(node.recipe)}-{node.name}"


def rehearsed_name(recipe: str) -> str:
    """File name of the recipe in a rehearsal, where a variant is a separate recipe."""
    return recipe.replace("+", "-")


# --- stages ------------------------------------------------------------------------------------------------------------


class _Cut:
    """The values of one config, with a record of changes."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.full: dict[str, Any] = node.config.model_dump(mode="json", exclude_computed_fields=True)
        self.written: dict[str, Any] = node.config.model_dump(mode="json", exclude_computed_fields=True, exclude_unset=True)
        self.changes: list[Reduced] = []

    def get(self, place: str) -> Any:
        value: Any = self.full
        for part in place.split("."):
            value = value[int(part)] if isinstance(value, list) else value.get(part) if isinstance(value, dict) else None
        return value

    def set(self, place: str, value: Any, reason: Reason) -> None:
        real = self.get(place)
        if real == value:
            return
        self.changes.append(Reduced(self.node.address, place, real, value, reason))
        parts: list[Any] = [int(part) if part.isdigit() else part for part in place.split(".")]
        full: Any = self.full
        written: Any = self.written
        for part in parts[:-1]:
            full = full[part]
            if isinstance(written, dict):  # an unwritten field is a whole default, so copy it before changing a part
                written.setdefault(part, copy.deepcopy(full))
            written = written[part]
        full[parts[-1]] = written[parts[-1]] = value

    def most(self, place: str, bound: float, reason: Reason) -> None:
        """Limit to at most `bound`; unset values stay unset."""
        value = self.get(place)
        if value is not None and value > bound:
            self.set(place, bound, reason)


def reduced(node: Node, nodes: Given, stand: Stand) -> tuple[dict[str, Any], list[Reduced]]:
    """(config fields of a stage as a recipe would write them, the changes made)."""
    cut = _Cut(node)
    match node.config:
        case SourceModel():
            _source_model(cut, stand)
        case PrepareData():
            _rows(cut, stand)
        case Training():
            _training(cut)
        case Rlvr():
            _rlvr(cut, node.config)
        case Sample():
            _sample(cut, node.config)
        case Judge():
            _scorers(cut, node.config, stand)
        case Synthesize():
            _synthesize(cut, stand)
        case FindRephrased():
            _compared(cut)
            _find_rephrased(cut, stand)
        case Evaluate():
            _evaluate(cut, node, nodes)
        case Pair():
            _pair(cut)
        case BestAnswers():
            _best_answers(cut)
        case SelectPrompts():
            _select_prompts(cut)
        case SelectRows():
            _scorers(cut, node.config, stand)
            _select_rows(cut)
        case _:
            for place, bound, reason in BOUNDS.get(node.kind, ()):
                cut.most(place, bound, reason)
            if node.kind == "decontaminate":
                _compared(cut)
    return cut.written, cut.changes


BOUNDS: dict[str, Sequence[tuple[str, int, Reason]]] = {
    "constrain": (("min_rows", 1, "thresholds"),),
    "overoptimization": (("max_n", 2, "samples"), ("resamples", RESAMPLES, "samples")),
}
"""Kind → (field, maximum, aspect left untested)."""


def _source_model(cut: _Cut, stand: Stand) -> None:
    repo = model_repo(cut.node)
    made = {"type": "hub", "repo": repo, "revision": stand.commits["model", repo]}
    licence = (cut.get("source") or {}).get("licence")
    cut.set("source", made | ({"licence": licence} if licence else {}), "weights")


def _rows(cut: _Cut, stand: Stand) -> None:
    config = cut.node.config
    assert isinstance(config, PrepareData)
    for number, source in enumerate(config.sources):
        _source(cut, f"sources.{number}", source, stand)
        if isinstance(source, Drawn):
            _unmixed(cut, f"sources.{number}", source)
        most = _most_rows(config, source)
        if source.type == "packaged" or _samples(config) > 1:  # other sources have few rows
            cut.set(f"sources.{number}.count", min(source.count or most, most), "data")
        else:
            cut.most(f"sources.{number}.count", most, "data")
        if config.draw == "after_filters" and isinstance(source, Drawn) and cut.get(f"sources.{number}.count") is not None:
            cut.set(f"sources.{number}.repeat", True, "data")
    cut.set("total", None, "data")
    if config.shots is not None:
        _source(cut, "shots.source", config.shots.source, stand)
    cut.set("filters", [_loosened(one) for one in cut.get("filters") if one["type"] not in OF_REAL_ROWS], "data")
    for number in range(len(config.expectations)):  # few, synthetic rows
        cut.set(f"expectations.{number}.severity", "warn", "thresholds")


def _loosened(given: dict[str, Any]) -> dict[str, Any]:
    """A filter that synthetic rows can pass: a tiny model's tokenizer yields different token counts."""
    return {**given, "min": 1, "max": None} if given["type"] == "tokens" else given


def _unmixed(cut: _Cut, place: str, source: Drawn) -> None:
    """Take all rows, because there are few; mixture proportions do not apply."""
    bare: dict[str, Any] = {"share": None, "weights": {}}
    if isinstance(source, MadeRows):  # few, of unknown number
        bare |= {"count": None}
    if isinstance(source, Packaged):
        bare |= {"epochs": None}
    for name, value in bare.items():
        cut.set(f"{place}.{name}", value, "data")
    if source.repeat and cut.get(f"{place}.count") is None:
        cut.set(f"{place}.repeat", False, "data")


def _most_rows(config: PrepareData, source: DataSource) -> int:
    suite = config.record == "item"
    if _samples(config) > 1:
        return SAMPLED_ROWS
    match source.type:
        case "leaks":
            return LEAKS
        case "hub":
            return HUB_ROWS
        case "arithmetic" | "constraints" | "program" if not suite:
            return MADE_ROWS
        case _:
            return SUITE_ROWS if suite else ROWS


def _samples(config: PrepareData) -> int:
    """Answers per item of a suite, as set by its form."""
    return config.the_form.draw.samples if config.the_form and config.the_form.draw else 1


def _source(cut: _Cut, place: str, source: Any, stand: Stand) -> None:
    match source:
        case Hub():
            cut.set(f"{place}.revision", stand.commits["dataset", source.repo], "data")
        case Stored():
            cut.set(f"{place}.sha256", stand.files[source.name], "data")
    if source.type in ("hub", "files", "stored", "program"):
        cut.set(f"{place}.max_bad_rows", BAD_ROWS, "thresholds")


def _learning_rate(cut: _Cut, place: str) -> None:
    """Raise low rates: a few steps at a real rate would change less than bf16 can represent."""
    rate = cut.get(place)
    if rate is not None and rate < LEARNING_RATE:
        cut.set(place, LEARNING_RATE, "batches")


def _even(number: int) -> int:
    """Round up to a number that two ranks can share."""
    return number + number % 2


def _training(cut: _Cut) -> None:
    cut.set("global_batch", _even(min(cut.get("global_batch"), BATCH)), "batches")
    cut.most("epochs", EPOCHS, "batches")
    _learning_rate(cut, "optimizer.learning_rate")
    if cut.get("loss.margin_weight"):  # unverified relaxed pairs have no scores
        cut.set("loss.margin_weight", 0.0, "thresholds")


def _rlvr(cut: _Cut, config: Rlvr) -> None:
    warmup = 0
    if isinstance(config.algorithm, Ppo):
        warmup = min(config.algorithm.critic.warmup_steps, 1)
        cut.most("algorithm.critic.warmup_steps", 1, "batches")
        _learning_rate(cut, "algorithm.critic.optimizer.learning_rate")
    cut.most("steps", STEPS + warmup, "batches")
    _learning_rate(cut, "optimizer.learning_rate")
    alone = config.samples_per_prompt == 1
    prompts = min(config.prompts_per_step, PROMPTS)
    cut.set("prompts_per_step", _even(max(config.algorithm.mini_batches, prompts)), "batches")
    if not alone:
        cut.set("samples_per_prompt", _even(min(config.samples_per_prompt, SAMPLES)), "samples")
    cut.most("sampling.max_tokens", TOKENS, "lengths")


def _sample(cut: _Cut, config: Sample) -> None:
    cut.most("sampling.max_tokens", TOKENS, "lengths")
    cut.most("samples_per_prompt", max(2, len(config.sampling.temperatures)), "samples")
    cut.most("prompts.count", WINDOW, "data")


def _scorers(cut: _Cut, config: Scorers, stand: Stand) -> None:
    if config.rating is None:
        return
    cut.most("rating.sampling.max_tokens", TOKENS, "lengths")
    if cut.get("max_unscored_share") < MAX_UNKNOWN:
        cut.set("max_unscored_share", MAX_UNKNOWN, "thresholds")
    if config.rated_by_policy:  # a rehearsal model has no opinion: sample its ratings
        cut.set("rating.sampling.temperature", 1.0, "judges")
    if isinstance(config.rating.by, ByEndpoint):
        cut.set("rating.by.base_url", stand.judge_url, "judges")


def _synthesize(cut: _Cut, stand: Stand) -> None:
    cut.most("method.requests", REQUESTS, "data")
    cut.most("method.shots", SHOTS, "data")
    cut.most("min_rows", 1, "thresholds")
    _use_mock_endpoint(cut, "writer", stand)


def _use_mock_endpoint(cut: _Cut, port: str, stand: Stand) -> None:
    """Use the mock endpoint, whichever model the recipe uses: a model trained in seconds does not follow a format."""
    if cut.get("by.type") == "endpoint":
        cut.set("by.base_url", stand.judge_url, "judges")
        return
    (speaker,) = (edge.source for edge in cut.node.edges if edge.port == port)
    cut.changes.append(Reduced(cut.node.address, f"{INPUT}{port}", speaker, None, "judges"))
    cut.set("by", {"type": "endpoint", "base_url": stand.judge_url, "model": "made"}, "judges")


def _compared(cut: _Cut) -> None:
    """Loosen limits: many of the few items may be found, and synthetic items have different ids."""
    cut.set("max_contaminated_share", 1.0, "thresholds")
    cut.set("waivers", [one for one in cut.get("waivers") if one["items"] == "all"], "data")


def _find_rephrased(cut: _Cut, stand: Stand) -> None:
    cut.most("sampling.max_tokens", TOKENS, "lengths")
    _use_mock_endpoint(cut, "judge", stand)


def _pair(cut: _Cut) -> None:
    cut.most("min_pairs", 1, "thresholds")
    cut.most("min_gap", 0, "thresholds")
    cut.most("min_best", LOWEST, "thresholds")
    if cut.get("max_gap") is not None:
        cut.set("max_gap", HIGHEST, "thresholds")
    cut.set("truncated", "keep", "thresholds")
    if cut.get("strategy.verified"):
        cut.set("strategy.verified", False, "thresholds")


def _select_prompts(cut: _Cut) -> None:
    cut.most("min_answers", 1, "thresholds")
    cut.most("min_rows", 1, "thresholds")
    cut.most("min_mean", LOWEST, "thresholds")
    if cut.get("max_mean") is not None:
        cut.set("max_mean", HIGHEST, "thresholds")


def _select_rows(cut: _Cut) -> None:
    cut.most("min_rows", 1, "thresholds")
    cut.most("keep.min_score", LOWEST, "thresholds")
    if (cut.get("keep.share") or 1) < KEPT_SHARE:  # leave enough of the few rows to train on
        cut.set("keep.share", KEPT_SHARE, "thresholds")


def _best_answers(cut: _Cut) -> None:
    """A rehearsal model's answers are wrong and mostly truncated."""
    cut.most("keep.min_score", LOWEST, "thresholds")
    cut.most("min_rows", 1, "thresholds")
    cut.set("truncated", "keep", "thresholds")


def _evaluate(cut: _Cut, node: Node, nodes: Given) -> None:
    suites = [nodes[edge.source].config for edge in node.edges if edge.port == "suites"]
    if any(isinstance(suite, PrepareData) and suite.form for suite in suites):
        cut.set("max_tokens", min(cut.get("max_tokens") or TOKENS, TOKENS), "lengths")
    cut.most("sampling.max_tokens", TOKENS, "lengths")
    cut.most("resamples", RESAMPLES, "samples")
    cut.set("max_unknown", MAX_UNKNOWN, "thresholds")


# --- recipes -----------------------------------------------------------------------------------------------------------


def rehearsed(graph: Graph, profile: str, stand: Stand, inherited: Collection[str] = ()) -> tuple[str, list[Reduced]]:
    """(text of the rehearsal recipe, changes in the stages that the recipe owns).

    Args:
        graph: the loaded recipe.
        profile: name of the rehearsal's execution profile.
        stand: replacements for external resources.
        inherited: names of the stages of the recipe that it extends.
    """
    stages: dict[str, Any] = {name: None for name in inherited if name not in graph.written}
    changes: list[Reduced] = []
    for node in graph.own:
        body, changed = reduced(node, graph.nodes, stand)
        left_out = {change.setting.removeprefix(INPUT) for change in changed if change.setting.startswith(INPUT)}
        inputs = {"in": _inputs(node, left_out)} if node.edges else {}
        stages[node.name] = {"kind": node.kind} | inputs | body
        changes += changed
    recipe: dict[str, Any] = {"description": f"Rehearsal of {graph.recipe}: {graph.description}", "execution": profile}
    if graph.extends:
        recipe["extends"] = rehearsed_name(graph.extends)
    models = {name: _named(model) for name, model in graph.models.items() if model.stage.startswith(f"{graph.recipe}/")}
    text = yaml_text(recipe | ({"models": models} if models else {}) | ({"stages": stages} if stages else {}))
    return text, changes


def _named(model: Model) -> dict[str, Any]:
    body = {"stage": model.stage.partition("/")[2]}
    return body | ({"desc": model.desc} if model.desc else {}) | ({"labels": list(model.labels)} if model.labels else {})


def _inputs(node: Node, left_out: Collection[str]) -> dict[str, Any]:
    """The inputs of a stage as written in a recipe, without those at the given ports."""
    ports: dict[str, list[Edge]] = {}
    for edge in (edge for edge in node.edges if edge.port not in left_out):
        ports.setdefault(edge.port, []).append(edge)
    return {port: _at_port(node, edges, node.declaration.inputs[port].many) for port, edges in ports.items()}


def _at_port(node: Node, edges: Sequence[Edge], many: bool) -> Any:
    named = {edge.label: _reference(node, edge) for edge in edges}
    if all(edge.label == edge.source.partition("/")[2] for edge in edges):
        return list(named.values()) if many else next(iter(named.values()))
    return named


def _reference(node: Node, edge: Edge) -> str:
    recipe, _, stage = edge.source.partition("/")
    return stage if recipe == node.recipe else f"{rehearsed_name(recipe)}/{stage}"


# --- profiles ----------------------------------------------------------------------------------------------------------


RANKS, MICRO_TOKENS, MICRO_SEQUENCES = 2, 512, 2
NUMERICS: dict[str, Callable[[Any], Any]] = {
    "device": lambda _: "cpu",
    "world_size": lambda ranks: min(ranks, RANKS),
    "micro_batch_tokens": lambda tokens: min(tokens, MICRO_TOKENS),
    "micro_batch_sequences": lambda sequences: min(sequences, MICRO_SEQUENCES),
    "offload_optimizer": lambda _: False,
    "kernels": lambda kernels: "torch" if kernels == "liger" else kernels,
    "attention": lambda attention: "varlen" if attention == "flash_attention_2" else attention,
    "threads": lambda _: 1,
    "tensor_parallel": lambda _: 1,
    "deterministic": lambda _: False,
}
"""Setting → its value on a two-core CPU; all others are unchanged: ZeRO stage, packing, recomputation, chunks of log-probabilities."""
PLACEMENT = {"engines": 1, "sampler_memory_gb": 0.5, "checkpoint_every_steps": 1}
"""Placement settings that are the same in all rehearsals, which also exercise checkpoints."""
OF_MACHINE = ("slots", "gpu_memory_utilization")
"""Placement settings that depend on this machine."""


def rehearsed_profile(execution: Execution, name: str, cores: int) -> tuple[str, list[Reduced]]:
    """(text of the profile for a CPU, the changes made).

    Args:
        execution: the real profile.
        name: its name.
        cores: cores of this machine.
    """
    changes: list[Reduced] = []
    numerics = execution.numerics.model_dump(mode="json", exclude_defaults=True)
    placement = execution.placement.model_dump(mode="json", exclude_defaults=True)
    numerics |= {"threads": execution.numerics.threads}  # changed even if it is the default
    placement |= {setting: getattr(execution.placement, setting) for setting in PLACEMENT}
    found: dict[str, Any] = {
        "slots": max(RANKS, min(cores, MOST_SLOTS)),
        "numerics": _on_cpu(numerics, name, changes),
        "placement": _placed(placement, name, changes) | PLACEMENT,
    }
    for part, overrides in (("kinds", execution.kinds), ("stages", execution.stages)):
        found[part] = {}
        for key, override in overrides.items():
            where = f"{name}: {key}"
            found[part][key] = {
                "numerics": _on_cpu(override.get("numerics", {}), where, changes),
                "placement": _placed(override.get("placement", {}), where, changes),
            }
    for kind, declaration in DECLARATIONS.items():
        ranks = (found["numerics"] | found["kinds"].get(kind, {}).get("numerics", {})).get("world_size", 1)
        if declaration.engine.startswith("deepspeed"):  # one core per rank; other jobs have one process
            found["kinds"].setdefault(kind, {}).setdefault("placement", {})["slots"] = ranks
    for override in found["stages"].values():
        if "world_size" in override["numerics"]:
            override["placement"]["slots"] = override["numerics"]["world_size"]
    for part in ("kinds", "stages"):
        found[part] = {key: {inner: given for inner, given in one.items() if given} for key, one in found[part].items()}
    for part in ("kinds", "stages"):
        found[part] = {key: one for key, one in found[part].items() if one}
    return yaml_text({part: value for part, value in found.items() if value}), changes


def _on_cpu(given: Mapping[str, Any], where: str, changes: list[Reduced]) -> dict[str, Any]:
    made = dict(given)
    for setting, rule in NUMERICS.items():
        if setting in made and rule(made[setting]) != made[setting]:
            changes.append(Reduced(where, setting, made[setting], rule(made[setting]), "machine"))
            made[setting] = rule(made[setting])
    return made


def _placed(given: Mapping[str, Any], where: str, changes: list[Reduced]) -> dict[str, Any]:
    for setting, value in PLACEMENT.items():
        if given.get(setting, value) != value:
            changes.append(Reduced(where, setting, given[setting], value, "machine"))
    return {setting: value for setting, value in given.items() if setting not in (*PLACEMENT, *OF_MACHINE)}
