"""Inputs that `prepare_data` requires, and checks that they fit its config."""

from pedigree.configs.base.frozen import Arrived
from pedigree.configs.rows.datasets import ROWS, TOKENIZER, PrepareData
from pedigree.configs.rows.row_sources import StageRows
from pedigree.configs.rows.source_models import SourceModel

FROM = {"conversation": ("conversation", "preference"), "prompt": ("prompt", "conversation", "preference"), "preference": ("preference",)}
"""Record → types that convert to it."""


def needs_of(config: PrepareData) -> frozenset[str]:
    """Inputs that the sources and filters require."""
    types = {part.type for part in (*config.sources, *config.filters)}
    return frozenset(port for kind, port in (("leaks", "leak_from"), ("artifact", ROWS), ("tokens", TOKENIZER)) if kind in types)


def inputs_problem(config: PrepareData, arrived: Arrived) -> str | None:
    """Error message if the inputs do not match the config, else None."""
    return rows_problem(config, arrived) or tokenizer_problem(config, arrived)


def tokenizer_problem(config: PrepareData, arrived: Arrived) -> str | None:
    """Error message if tokens cannot be counted, or the tokenizer's model is needlessly a trained one, else None."""
    for name, given in arrived.get(TOKENIZER, {}).items():
        if config.record == "item":
            return f"`{TOKENIZER}` counts tokens as in training, which a suite is not used for: remove it"
        if not isinstance(given.config, SourceModel):
            return f"{name} has the tokenizer of its base model: use that `source_model` as `{TOKENIZER}` instead"
    return None


def rows_problem(config: PrepareData, arrived: Arrived) -> str | None:
    """Error message if the rows of other stages are not those that the sources name, or cannot become this record, else None."""
    given = arrived.get(ROWS, {})
    named = [source.input for source in config.sources if isinstance(source, StageRows)]
    for name in named:
        if name not in given:
            return f"a source reads the input {name!r}, but `rows` has {', '.join(given)}: use one of them, or add it to `rows`"
        if given[name].type not in FROM.get(config.record, ()):
            what = " or ".join(FROM.get(config.record, ())) or "no rows of other stages"
            return f"{name} is of type {given[name].type}, but record {config.record} requires {what}: change the record or the input"
    idle = [name for name in given if name not in named]
    if idle:
        return f"`rows` has {idle[0]}, which no source reads: add {{type: artifact, input: {idle[0]}}} to sources, or remove it"
    return None
