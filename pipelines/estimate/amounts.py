"""Estimate rows, tokens, and steps of a stage from upstream artifacts, or else upper bounds from configs."""

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from configs.base.project import Project
from configs.judging.answers import Evaluate, Judge, Sample, Scorers
from configs.judging.asking import ByPolicy
from configs.judging.constraining import Constrain
from configs.judging.keeping import AllAbove, BestAnswers, SelectPrompts, SelectRows, TopShare
from configs.judging.pairing import AllPairs, Pair
from configs.judging.rephrasing import FindRephrased
from configs.judging.synthesis import SelfInstruct, Synthesize
from configs.language.graph import Graph, Node
from configs.methods.preference import Kto
from configs.methods.training import PreferenceTrain, ReferenceLogprobs, RewardModel, Rlvr, Sft, Training
from configs.rows.datasets import ROWS, Arithmetic, Constraints, Hub, Leaks, MadeRows, Packaged, PrepareData
from configs.rows.decontamination import Decontaminate
from configs.rows.filters import MaxCharacters
from configs.rows.suite_forms import Form
from data.artifacts import assets
from data.artifacts.artifacts import Artifact
from data.chat.tools import OFFERED
from data.records.records import row_files, rows_in
from data.store.untrusted import ArtifactError, open_plain
from pipelines.estimate.sampling_plan import (
    COMPARING_TOKENS,
    RUBRIC_TOKENS,
    WRITING_TOKENS,
    Drawing,
    answers_of_prompt,
    drawing_of,
    requests_of_item,
)
from pipelines.lineage.ancestry import opened

How = Literal["counted", "estimated", "at most"]
WEAKEST: tuple[How, ...] = ("at most", "estimated", "counted")
"""Kinds of knowledge, weakest first; a product has the weakest kind of its factors."""
LOOKED_AT = 200
"""Rows of a dataset sampled for token counts; datasets are shuffled, so the first rows are used."""
CHARACTERS = 4.0
"""Characters per token of text without digits, for English with a large vocabulary."""
TURN = 5.0
"""Tokens that a template adds to a message."""
PROMPT_TOKENS = 256
"""Assumed tokens of a prompt if its dataset does not exist yet and no config bounds it."""
SHARE_OF_A_BOUND = 0.5
"""Assumed average share of an upper bound: answers end before their limit, and ties make no pairs."""
TOKENS_OF_MADE_ROWS = {"item": 11.0, "prompt": 11.0, "conversation": 18.0, "preference": 25.0}
"""Record type → tokens of a row with a sum of two numbers, by `tokens_of`."""
ROWS_OF_THE_HUB = {
    "allenai/tulu-3-sft-mixture": 939_343,
    "allenai/tulu-3-sft-olmo-2-mixture-0225": 866_138,
    "allenai/llama-3.1-tulu-3-8b-preference-mixture": 271_409,
    "allenai/RLVR-GSM-MATH-IF-Mixed-Constraints": 29_946,
    "allenai/RLVR-GSM": 7_473,
    "allenai/RLVR-MATH": 7_500,
    "allenai/RLVR-IFeval": 14_973,
}
"""Row counts of hub datasets, used when a recipe takes a dataset whole."""
ITEMS_OF_FORMS = {
    "agieval": 2_340, "bbh": 6_511, "deepmind_math": 5_600, "drop": 9_536, "gpqa": 448, "gsm8k": 1_319, "humaneval": 164,
    "humanevalplus": 164, "ifeval": 541, "minerva_math": 5_000, "mmlu": 14_042, "mmlu_mc": 14_042, "mmlu_pro": 12_032, "popqa": 14_267,
    "truthfulqa": 817,
}  # fmt: skip
"""Form → items of the benchmark, used for suites that take it whole and do not exist yet."""


@dataclass(frozen=True)
class Amount:
    """A number and its basis: counted by a finished stage, estimated from rows, or an upper bound from configs."""

    value: float
    how: How

    def times(self, factor: "float | Amount") -> "Amount":
        other = factor if isinstance(factor, Amount) else Amount(factor, "counted")
        weaker = other if WEAKEST.index(other.how) < WEAKEST.index(self.how) else self
        return Amount(self.value * other.value, weaker.how)

    def at_most(self, bound: float) -> "Amount":
        return self if self.value <= bound else Amount(bound, self.how)


@dataclass(frozen=True)
class Amounts:
    """Workload of a stage; None where unknown."""

    rows: Amount | None = None
    """Input rows: conversations, pairs, or prompts."""
    document: Amount | None = None
    """Tokens per row, including the prompt and all answers."""
    steps: Amount | None = None
    """Optimizer steps; for `rlvr`, rollout batches."""
    tokens: Amount | None = None
    """Tokens that pass through the model in the whole stage."""
    prompt: Amount | None = None
    """Tokens per prompt, if answers are generated."""
    requests: Amount | None = None
    """Answers to generate in the whole stage."""
    drawing: Drawing | None = None
    """Sampling plan of the requests."""
    answer: float = 0.0
    """Maximum tokens per answer, averaged over all requests."""


def amounts_of(project: Project, graph: Graph, node: Node) -> Amounts:
    """Workload of one stage."""
    config = node.config
    match config:
        case Rlvr():
            return _rlvr(project, graph, node, config)
        case Training():
            return _training(project, graph, node, config)
        case ReferenceLogprobs():
            rows, document = _at_ports(project, graph, node, ("preferences",), 2 * config.max_length)
            return Amounts(rows=rows, document=document, tokens=rows.times(document) if rows and document else None)
        case Sample():
            requests = config.prompts.count * answers_of_prompt(config, _edges(node, "policies"))
            _, prompt = _at_ports(project, graph, node, ("prompts",), None)
            return _generation(Amount(requests, "counted"), prompt, drawing_of(config))
        case Synthesize() if isinstance(config.by, ByPolicy):
            asked, shown = _asked(project, graph, node, config)
            return _generation(asked, Amount(shown + WRITING_TOKENS, "estimated"), drawing_of(config))
        case FindRephrased() if isinstance(config.by, ByPolicy):
            rows, document = _at_ports(project, graph, node, ("data",), None)
            pairs = _bound(rows.times(config.neighbours * (2 if config.waivers else 1))) if rows else None
            prompt = Amount((document.value if document else PROMPT_TOKENS) + COMPARING_TOKENS, "estimated")
            return _generation(pairs, prompt, drawing_of(config))
        case Evaluate():
            return _evaluation(project, graph, node, config)
        case Scorers():
            rows, document = _at_ports(project, graph, node, ("completions", "data"), None)
            if config.rating is not None and config.rated_by_policy:
                asked = rows.times(len(config.rating.rubrics)) if rows else None
                prompt = Amount((document.value if document else _answered(graph, node)) + RUBRIC_TOKENS, "estimated")
                return _generation(asked, prompt, drawing_of(config))
            models = max(1, _edges(node, "reward_models"))
            return Amounts(rows=rows, document=document, tokens=rows.times(document).times(models) if rows and document else None)
    return Amounts(rows=_rows(project, graph, node))


def _asked(project: Project, graph: Graph, node: Node, config: Synthesize) -> tuple[Amount | None, float]:
    """(requests to a writer, tokens of material shown in each)."""
    material = graph.nodes[next(edge.source for edge in node.edges if edge.port == "prompts")]
    tokens = _row_tokens(project, graph, material) or PROMPT_TOKENS
    if isinstance(config.method, SelfInstruct):
        return Amount(config.method.requests, "counted"), tokens * config.method.shots
    return _rows(project, graph, material), tokens


def _training(project: Project, graph: Graph, node: Node, config: Training) -> Amounts:
    single = isinstance(config, Sft)
    rows, document = _at_ports(project, graph, node, tuple(node.declaration.trains_on), (1 if single else 2) * config.max_length)
    if isinstance(config, RewardModel) and rows:
        rows = rows.times(1 - config.holdout)
    steps = None
    if rows:
        answers = 2 if isinstance(config, PreferenceTrain) and isinstance(config.loss, Kto) else 1
        steps = Amount(math.ceil(rows.value * answers / config.global_batch) * config.epochs, rows.how if answers == 1 else "at most")
    tokens = rows.times(document).times(config.epochs) if rows and document else None
    return Amounts(rows=rows, document=document, steps=steps, tokens=tokens)


def _rlvr(project: Project, graph: Graph, node: Node, config: Rlvr) -> Amounts:
    rows, prompt = _at_ports(project, graph, node, ("prompts",), config.max_prompt_length)
    prompt = prompt or Amount(config.max_prompt_length, "at most")
    a_step = config.prompts_per_step * config.samples_per_prompt
    requests = Amount(config.steps * a_step, "counted")
    if config.algorithm.advantage == "greedy":
        requests = requests.times(1 + 1 / config.samples_per_prompt)
    document = prompt.times(1 / config.samples_per_prompt)
    document = Amount(document.value + config.sampling.max_tokens, "at most")
    return Amounts(
        rows=rows, document=document, steps=Amount(config.steps, "counted"), prompt=prompt, requests=requests, drawing=drawing_of(config),
        tokens=document.times(config.steps * a_step), answer=config.sampling.max_tokens,
    )  # fmt: skip


def _generation(requests: Amount | None, prompt: Amount | None, drawing: Drawing | None) -> Amounts:
    assert drawing is not None
    prompt = prompt or Amount(PROMPT_TOKENS, "estimated")
    tokens = requests.times(Amount(prompt.value + drawing.answer, "at most")) if requests else None
    return Amounts(rows=requests, prompt=prompt, requests=requests, drawing=drawing, tokens=tokens, answer=drawing.answer)


def _evaluation(project: Project, graph: Graph, node: Node, config: Evaluate) -> Amounts:
    """Workload of all policies on all suites, with the requests and lengths of each suite's form."""
    drawing, requests, prompts, answers = drawing_of(config, forms_of(graph, node)), Amount(0, "counted"), 0.0, 0.0
    for suite in (graph.nodes[edge.source] for edge in node.edges if edge.port == "suites"):
        items, form = _rows(project, graph, suite), form_of(suite)
        if items is None:
            return Amounts(drawing=drawing)
        asked = items.times(requests_of_item(form) * _edges(node, "policies"))
        requests = Amount(requests.value + asked.value, requests.times(asked).how)
        prompts += asked.value * (_row_tokens(project, graph, suite) or PROMPT_TOKENS * (1 + (form.prompt.shots if form else 0)))
        sampling = config.sampling_of(form)
        answers += asked.value * (sampling.max_tokens if sampling else 0)
    if not requests.value:
        return Amounts(drawing=drawing)
    return Amounts(
        rows=requests, prompt=Amount(prompts / requests.value, "estimated"), requests=requests, drawing=drawing,
        tokens=Amount(prompts + answers, "at most"), answer=answers / requests.value,
    )  # fmt: skip


def form_of(suite: Node) -> Form | None:
    """The form that determines how a suite is prompted and scored; None if its items are prompts with verifiers."""
    return suite.config.the_form if isinstance(suite.config, PrepareData) else None


def forms_of(graph: Graph, node: Node) -> tuple[Form | None, ...]:
    """Forms of the suites that a stage evaluates."""
    return tuple(form_of(graph.nodes[edge.source]) for edge in node.edges if edge.port == "suites")


def _answered(graph: Graph, judge: Node) -> int:
    """Maximum tokens of a question with its answer, before any exist."""
    made = graph.nodes[next(edge.source for edge in judge.edges if edge.port in ("completions", "data"))].config
    return PROMPT_TOKENS + (made.sampling.max_tokens if isinstance(made, Sample) else PROMPT_TOKENS)


def _edges(node: Node, port: str) -> int:
    return sum(edge.port == port for edge in node.edges)


def _at_ports(
    project: Project, graph: Graph, node: Node, ports: tuple[str, ...], longest: int | None
) -> tuple[Amount | None, Amount | None]:
    """(rows, tokens per row) of all inputs at these ports; a row has at most `longest` tokens."""
    rows, tokens, known = Amount(0, "counted"), 0.0, True
    for edge in node.edges:
        if edge.port in ports:
            source = graph.nodes[edge.source]
            count, mean = _rows(project, graph, source), _row_tokens(project, graph, source)
            if count is None:
                return None, Amount(longest, "at most") if longest else None
            known = known and mean is not None
            rows = Amount(rows.value + count.value, rows.times(count).how)
            tokens += count.value * (mean or 0)
    if known and rows.value:
        document = Amount(tokens / rows.value, "estimated")
        return rows, document.at_most(longest) if longest else document
    return rows, Amount(longest, "at most") if longest else None


def _rows(project: Project, graph: Graph, node: Node) -> Amount | None:
    """Output rows of a stage, from its record, or else bounded by its inputs."""
    artifact = opened(project, node)
    counted = count_of(artifact.record.metrics) if artifact else None
    if counted is not None:
        return Amount(counted, "counted")
    config = node.config
    above = {edge.port: graph.nodes[edge.source] for edge in node.edges}
    match config:
        case PrepareData(total=int(total)):
            return Amount(total, "at most")
        case PrepareData(form=str(form)) if all(getattr(source, "count", None) is None for source in config.sources):
            return Amount(ITEMS_OF_FORMS[form], "estimated") if form in ITEMS_OF_FORMS else None
        case PrepareData():
            counts = [_source_rows(project, graph, node, source, _most_characters(config)) for source in config.sources]
            known = [count for count in counts if count is not None]
            return Amount(sum(known), "at most") if len(known) == len(counts) else None
        case Decontaminate() | FindRephrased():
            return _bound(_rows(project, graph, above["data"]))
        case Synthesize():
            asked, _ = _asked(project, graph, node, config)
            return Amount(asked.value * config.method.prompts, "at most") if asked else None
        case Constrain():
            return _bound(_rows(project, graph, above["prompts"]))
        case Sample():
            return Amount(config.prompts.count * answers_of_prompt(config, _edges(node, "policies")), "counted")
        case Judge():
            return _rows(project, graph, above["completions"])
        case Pair():
            return _pairs(graph, above.get("judgments") or above["completions"], config)
        case BestAnswers():
            prompts, answers = _sampled(graph, above["judgments"])
            most = config.keep.max_per_prompt if isinstance(config.keep, AllAbove) else 1
            return Amount(prompts * min(answers, most or answers), "at most")
        case SelectRows(keep=TopShare(share=share, per_source=False)):  # the share of each source is rounded up
            rows = _rows(project, graph, above["data"])
            return Amount(math.ceil(rows.value * share), "at most") if rows else None
        case SelectRows():
            return _bound(_rows(project, graph, above["data"]))
        case SelectPrompts():
            return Amount(_sampled(graph, above["judgments"])[0], "at most")
    return None


def _pairs(graph: Graph, answered: Node, config: Pair) -> Amount:
    prompts, answers = _sampled(graph, answered)
    each = 1
    if isinstance(config.strategy, AllPairs):
        each = min(math.comb(answers, 2), config.strategy.per_prompt or math.inf)
    return Amount(min(prompts * each, config.budget.pairs if config.budget else math.inf), "at most")


def _sampled(graph: Graph, node: Node) -> tuple[int, int]:
    """(prompts, answers per prompt) of completions, or of judgments of them."""
    drawn, config = _drawn(graph, node)
    return config.prompts.count, answers_of_prompt(config, _edges(drawn, "policies"))


def _drawn(graph: Graph, node: Node) -> tuple[Node, Sample]:
    """The stage that sampled the answers, with its config."""
    while not isinstance(node.config, Sample):
        node = graph.nodes[next(edge.source for edge in node.edges if edge.port == "completions")]
    return node, node.config


def _bound(rows: Amount | None) -> Amount | None:
    return Amount(rows.value, "at most") if rows else None


def _source_rows(project: Project, graph: Graph, node: Node, source: Any, longest: int | None = None) -> int | None:
    """Maximum rows of a source, None if unknown; for a packaged file, rows of at most `longest` characters."""
    if isinstance(source, Packaged) and (rows := packaged_rows(source.asset)):
        passing = sum(longest is None or len(text) <= longest for text in rows)
        return passing if source.count is None else min(source.count, passing)
    if source.count is not None:
        return source.count
    there = None
    if isinstance(source, Hub):
        there = ROWS_OF_THE_HUB.get(source.repo)
    elif isinstance(source, MadeRows):
        made = next(edge.source for edge in node.edges if (edge.port, edge.label) == (ROWS, source.input))
        known = _rows(project, graph, graph.nodes[made])
        there = int(known.value) if known else None
    epochs = getattr(source, "epochs", None)
    return there if there is None or epochs is None else int(there * epochs)


def _most_characters(config: PrepareData) -> int | None:
    """Maximum characters of a row according to the filters."""
    return min((one.limit for one in config.filters if isinstance(one, MaxCharacters)), default=None)


def packaged_rows(asset: str) -> tuple[str, ...]:
    """The text of each row of a packaged file; empty if the file is missing or not a JSON list."""
    try:
        return _texts(assets.path(asset))
    except (assets.AssetError, OSError, ValueError):
        return ()


@lru_cache(maxsize=8)
def _texts(path: Path) -> tuple[str, ...]:
    rows = json.loads(path.read_bytes())
    return tuple("".join(_strings(row)) for row in rows) if isinstance(rows, list) else ()


def _strings(value: Any) -> Iterable[str]:
    """All strings in a JSON value except field names."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _strings(inner)


def _row_tokens(project: Project, graph: Graph, node: Node) -> float | None:
    """Tokens per output row of a stage, from its rows if they exist, else from its inputs; None if unknown."""
    found = _mean_tokens(opened(project, node))
    if found is not None:
        return found
    config, above = node.config, {edge.port: graph.nodes[edge.source] for edge in node.edges}

    def of(port: str, more: float = 0.0) -> float | None:
        tokens = _row_tokens(project, graph, above[port]) if port in above else None
        return None if tokens is None else tokens + more

    match config:
        case PrepareData():
            return _expected_tokens(project, graph, node, config)
        case Decontaminate() | FindRephrased() | SelectRows():
            return of("data")
        case Constrain():
            return of("prompts")
        case Sample():
            return of("prompts", _answer_tokens(config))
        case Judge():
            return of("completions")
        case BestAnswers():
            return of("judgments")
        case Pair():
            answered = above.get("judgments") or above["completions"]
            second = _answer_tokens(_drawn(graph, answered)[1])
            return of("judgments" if "judgments" in above else "completions", second)
    return None


def _answer_tokens(config: Sample) -> float:
    return SHARE_OF_A_BOUND * config.sampling.max_tokens + TURN


def _expected_tokens(project: Project, graph: Graph, node: Node, config: PrepareData) -> float | None:
    """Tokens per row of generated and packaged sources; None if there are others."""
    longest = _most_characters(config)
    rows = tokens = 0.0
    for source in config.sources:
        count, mean = _source_rows(project, graph, node, source, longest), None
        if isinstance(source, Arithmetic | Constraints):
            mean = TOKENS_OF_MADE_ROWS.get(config.record)
        elif isinstance(source, Leaks):
            continue  # only a few planted rows
        elif isinstance(source, Packaged):
            lengths = [len(text) for text in packaged_rows(source.asset) if longest is None or len(text) <= longest]
            mean = sum(lengths) / len(lengths) / CHARACTERS + 2 * TURN if lengths else None
        if count is None or mean is None:
            return None
        rows, tokens = rows + count, tokens + count * mean
    return tokens / rows if rows else None


def count_of(metrics: Mapping[str, Any]) -> int | None:
    """Rows of an artifact, from its metrics."""
    rows = metrics.get("rows", metrics.get("pairs"))
    return rows if isinstance(rows, int) and not isinstance(rows, bool) else None


def _mean_tokens(artifact: Artifact | None) -> float | None:
    """Tokens per row, estimated from the text of the first rows."""
    names = row_files(entry.path for entry in artifact.record.files) if artifact else []
    if artifact is None or not names:
        return None
    try:
        path = artifact.payload / names[0]
        return _tokens_in(path, path.stat().st_mtime_ns)
    except (ArtifactError, OSError, AttributeError, TypeError):
        return None


@lru_cache(maxsize=512)
def _tokens_in(path: Path, modified: int) -> float | None:
    """Tokens per row of a file; `modified` is part of the cache key, since many stages read the same rows."""
    with open_plain(path) as stream:
        found = [tokens_of(row) for row in islice(rows_in(stream, path.name), LOOKED_AT)]
    return sum(found) / len(found) if found else None


def tokens_of(row: Mapping[str, Any]) -> float:
    """Estimated tokens of a row: one per digit, one per `CHARACTERS` other characters, and `TURN` per message, answer, and tool list."""
    texts = [str(message.get("content", "")) for message in row.get("messages") or ()]
    texts += [str(answer.get("text", "")) for answer in row.get("answers") or ()]
    texts += [row["text"]] if isinstance(row.get("text"), str) else []
    texts += [str(given) for name, given in (row.get("template_arguments") or {}).items() if name == OFFERED]
    return sum(_text_tokens(texts))


def _text_tokens(texts: Iterable[str]) -> Iterable[float]:
    for text in texts:
        digits = len(re.findall(r"\d", text))
        yield digits + (len(text) - digits) / CHARACTERS + TURN
