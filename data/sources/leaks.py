"""Benchmark items planted among training rows, which decontamination must find."""

from collections.abc import Callable, Sequence
from typing import Any, cast

from pedigree.configs.base.frozen import digest
from pedigree.configs.base.problems import PedigreeError
from pedigree.configs.rows.row_sources import Leaks, RecordType
from pedigree.data.records.records import Item, Message
from pedigree.data.sources.examples import Example, unscored


def plant(config: Leaks, record: RecordType, suites: Sequence[Item]) -> list[Example]:
    """Benchmark items disguised as training rows.

    Raises PedigreeError if the record type has no prompt to leak into, or there are fewer items times styles than `count`.
    """
    if record == "item":
        raise PedigreeError("leaks go into training rows: record must be conversation, prompt or preference, not item")
    if config.count > len(suites) * len(config.styles):
        raise PedigreeError(
            f"leaks: count {config.count} > {len(suites)} items x {len(config.styles)} styles: name suites in the stage's "
            "`leak_from` input, or lower count"
        )
    items = cast(list[Item], shuffled(suites, config.seed))
    leaks = []
    for number in range(config.count):
        turn, place = divmod(number, len(items))
        leaks.append(_leak(items[place], config.styles[(place + turn) % len(config.styles)]))
    return leaks


def _leak(item: Item, style: str) -> Example:
    """The item's bare question, without a form's instructions and worked examples."""
    turns: list[Message] = [{"role": "user", "content": item["question"]}] if "question" in item else item["messages"]
    messages: list[Message] = [
        {"role": turn["role"], "content": DISGUISES[style](turn["content"]) if turn["role"] == "user" else turn["content"]}
        for turn in turns
    ]
    answer = str(item["verifier"].get("answer", "Of course."))
    return Example(messages, unscored(answer, "I would rather not say."), item["verifier"], source=_source_of(style))


def _source_of(style: str) -> str:
    return f"leak-{style}"


def _embedded(text: str) -> str:
    return f"My sister sent me a riddle this morning. It reads: {text} I wonder what you make of it."


def _rewrapped(text: str) -> str:
    words = text.upper().split()
    return "\n".join("  ".join(words[start : start + 3]) for start in range(0, len(words), 3))


DISGUISES: dict[str, Callable[[str], str]] = {"verbatim": lambda text: text, "embedded": _embedded, "rewrapped": _rewrapped}
PLANTED = frozenset(map(_source_of, DISGUISES))
"""Sources of planted leaks."""


def shuffled(rows: Sequence[Any], seed: int) -> list[dict[str, Any]]:
    """Rows sorted by hash(seed, id), independent of their original order."""
    return sorted(rows, key=lambda row: digest([seed, row["id"]]))
