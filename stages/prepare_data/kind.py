"""`prepare_data` as recipes, plans, rehearsals and reports see it."""

from typing import Any

from pedigree.configs.base.kind import Kind, port
from pedigree.configs.base.shrink import RULE_ROWS, Cut
from pedigree.configs.base.work import CHARACTERS, TURN, Amount, PlannedStage
from pedigree.configs.rows.datasets import ROWS, TOKENIZER, PrepareData, inputs_problem, needs_of
from pedigree.configs.rows.filters import MaxCharacters, without
from pedigree.configs.rows.mixing import Drawn
from pedigree.configs.rows.row_sources import Arithmetic, Constraints, DataSource, Files, Hub, Leaks, Packaged, StageRows, Stored

ROWS_OF_A_FILE, ROWS_OF_THE_HUB, LEAKED = 8, 3, 2
"""Rows kept of a file or packaged source, of a hub source with a count, and of planted leaks."""
ITEMS, ITEMS_SAMPLED = 3, 1
"""Items kept of a suite, and of a suite whose items are answered several times."""
BAD_ROWS = 0.75
OF_REAL_ROWS = ("ids", "values")
"""Filters by ids and column values, which generated rows lack."""


def shrink(cut: Cut) -> None:
    config = cut.config
    assert isinstance(config, PrepareData)
    for number, source in enumerate(config.sources):
        place = f"sources.{number}"
        _shrink_source(cut, place, source)
        if isinstance(source, Drawn):
            _take_all(cut, place, source)
        most = _most_rows(config, source)
        if source.type == "packaged" or _samples(config) > 1:  # other sources have few rows anyway
            cut.set(f"{place}.count", min(source.count or most, most), "data")
        else:
            cut.most(f"{place}.count", most, "data")
        if config.draw == "after_filters" and isinstance(source, Drawn) and cut.get(f"{place}.count") is not None:
            cut.set(f"{place}.repeat", True, "data")
    cut.set("total", None, "data")
    if config.shots is not None:
        _shrink_source(cut, "shots.source", config.shots.source)
    filters = [one for one in cut.get("filters") if one["type"] not in OF_REAL_ROWS]
    any_tokens = {"min": 1, "max": None}  # a tiny model has another number of tokens
    cut.set("filters", [one | any_tokens if one["type"] == "tokens" else one for one in filters], "data")
    for number in range(len(config.expectations)):  # the rows are few and generated
        cut.set(f"expectations.{number}.severity", "warn", "thresholds")


def _take_all(cut: Cut, place: str, source: Drawn) -> None:
    """Take all rows of a source, since there are few, whatever its share of the mixture."""
    bare: dict[str, Any] = {"share": None, "weights": {}}
    if isinstance(source, StageRows):  # few, and their number is unknown
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
        return ITEMS_SAMPLED
    match source.type:
        case "leaks":
            return LEAKED
        case "hub":
            return ROWS_OF_THE_HUB
        case "arithmetic" | "constraints" | "program" if not suite:
            return RULE_ROWS
        case _:
            return ITEMS if suite else ROWS_OF_A_FILE


def _samples(config: PrepareData) -> int:
    """Answers to each item of a suite, as set by its form."""
    return config.the_form.draw.samples if config.the_form and config.the_form.draw else 1


def _shrink_source(cut: Cut, place: str, source: Any) -> None:
    match source:
        case Hub():
            cut.set(f"{place}.revision", cut.stand_ins.commits["dataset", source.repo], "data")
        case Stored():
            cut.set(f"{place}.sha256", cut.stand_ins.files[source.name], "data")
    if source.type in ("hub", "files", "stored", "program"):
        cut.set(f"{place}.max_bad_rows", BAD_ROWS, "thresholds")


HUB_SIZES = {
    "allenai/tulu-3-sft-mixture": 939_343,
    "allenai/tulu-3-sft-olmo-2-mixture-0225": 866_138,
    "allenai/llama-3.1-tulu-3-8b-preference-mixture": 271_409,
    "allenai/RLVR-GSM-MATH-IF-Mixed-Constraints": 29_946,
    "allenai/RLVR-GSM": 7_473,
    "allenai/RLVR-MATH": 7_500,
    "allenai/RLVR-IFeval": 14_973,
}
"""Rows of hub datasets, for recipes that take all of them."""
RULE_TOKENS = {"item": 11.0, "prompt": 11.0, "conversation": 18.0, "preference": 25.0}
"""Record → tokens of a generated row with a sum of two numbers."""


def rows(stage: PlannedStage) -> Amount | None:
    config: PrepareData = stage.config
    if config.total is not None:
        return Amount(config.total, "at most")
    if config.the_form and all(getattr(source, "count", None) is None for source in config.sources):
        return Amount(config.the_form.items, "estimated") if config.the_form.items else None
    counts = [_source_rows(stage, source) for source in config.sources]
    known = [count for count in counts if count is not None]
    return Amount(sum(known), "at most") if len(known) == len(counts) else None


def row_tokens(stage: PlannedStage) -> float | None:
    """Mean tokens of generated and packaged rows; None if there is another source."""
    count = tokens = 0.0
    for source in stage.config.sources:
        if isinstance(source, Leaks):
            continue  # a few, planted to be found
        mine, mean = _source_rows(stage, source), None
        if isinstance(source, Arithmetic | Constraints):
            mean = RULE_TOKENS.get(stage.config.record)
        elif isinstance(source, Packaged) and (texts := _passing(stage, source)):
            mean = sum(map(len, texts)) / len(texts) / CHARACTERS + 2 * TURN
        if mine is None or mean is None:
            return None
        count, tokens = count + mine, tokens + mine * mean
    return tokens / count if count else None


def _source_rows(stage: PlannedStage, source: Any) -> int | None:
    """Maximum rows of a source; None if unknown."""
    if isinstance(source, Packaged) and stage.packaged_texts(source.asset):
        passing = len(_passing(stage, source))
        return passing if source.count is None else min(source.count, passing)
    if source.count is not None:
        return source.count
    there = None
    if isinstance(source, Hub):
        there = HUB_SIZES.get(source.repo)
    elif isinstance(source, Files):
        there = stage.rows_in(source.path)
    elif isinstance(source, StageRows):
        known = stage.inputs[ROWS][source.input].rows
        there = int(known.value) if known else None
    epochs = getattr(source, "epochs", None)
    return there if there is None or epochs is None else int(there * epochs)


def _passing(stage: PlannedStage, source: Packaged) -> list[str]:
    """Rows of a packaged file that are not too long for the filters."""
    longest = min((one.limit for one in stage.config.filters if isinstance(one, MaxCharacters)), default=None)
    return [text for text in stage.packaged_texts(source.asset) if longest is None or len(text) <= longest]


KIND = Kind(
    name="prepare_data",
    version=8,
    config=PrepareData,
    inputs={
        "leak_from": port("item", pooled=True, optional=True),
        ROWS: port("conversation", "prompt", "preference", many=True, optional=True),
        TOKENIZER: port("policy", optional=True, measures=True),
    },
    output=lambda config, inputs: config.record,
    decided_by=lambda config: ("data/filters",) if config.filters else (),
    needs=needs_of,
    problem=inputs_problem,
    preflight=lambda stage: filter(None, map(stage.problem_of, stage.config.sources)),
    sources=lambda config: config.get("sources", ()),
    ids="kept within kind",
    without=lambda config, ids: without(config.filters, ids),
    rows=rows,
    row_tokens=row_tokens,
    shrink=shrink,
    family="data",
    reports_drops=True,
)
