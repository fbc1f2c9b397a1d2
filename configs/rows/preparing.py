"""What has to arrive at the inputs of `prepare_data`, and why it may be of no use."""

from configs.base.frozen import Arrived
from configs.rows.datasets import ROWS, TOKENIZER, MadeRows, PrepareData, SourceModel

FROM = {"conversation": ("conversation", "preference"), "prompt": ("prompt", "conversation", "preference"), "preference": ("preference",)}
"""Record → what it can be made of."""


def needs_of(config: PrepareData) -> frozenset[str]:
    """Inputs that sources and filters make necessary."""
    types = {part.type for part in (*config.sources, *config.filters)}
    return frozenset(port for kind, port in (("leaks", "leak_from"), ("artifact", ROWS), ("tokens", TOKENIZER)) if kind in types)


def inputs_problem(config: PrepareData, arrived: Arrived) -> str | None:
    """Why what arrives is not what the config takes, or is of no use to it."""
    return rows_problem(config, arrived) or tokenizer_problem(config, arrived)


def tokenizer_problem(config: PrepareData, arrived: Arrived) -> str | None:
    """Why tokens cannot be counted, or why they would be by way of a training that changes none of them."""
    for name, given in arrived.get(TOKENIZER, {}).items():
        if config.record == "item":
            return f"`{TOKENIZER}` counts what training sees of rows, and a suite is asked as each evaluation says: leave it out"
        if not isinstance(given.config, SourceModel):
            return f"{name} has the tokenizer of the model that it was trained from: name that `source_model` as `{TOKENIZER}`"
    return None


def rows_problem(config: PrepareData, arrived: Arrived) -> str | None:
    """Why the rows of other stages are not those that the sources name, or are of no use for this record."""
    given = arrived.get(ROWS, {})
    named = [source.input for source in config.sources if isinstance(source, MadeRows)]
    for name in named:
        if name not in given:
            return f"a source takes the input {name!r}, and `rows` has {', '.join(given)}: name one of them, or add it to `rows`"
        if given[name].type not in FROM.get(config.record, ()):
            what = " or ".join(FROM.get(config.record, ())) or "no rows of other stages"
            return f"{name} is a {given[name].type}, and a {config.record} is made of {what}: take another record, or another input"
    idle = [name for name in given if name not in named]
    if idle:
        return f"`rows` has {idle[0]}, which no source takes: add {{type: artifact, input: {idle[0]}}} to sources, or leave it out"
    return None
