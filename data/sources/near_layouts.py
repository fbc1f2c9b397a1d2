"""Which layouts come near the columns of a row that no layout fits, for error messages."""

from collections.abc import Sequence
from difflib import get_close_matches

from pedigree.configs.rows.row_sources import RecordType

CHATS = (("messages",), ("prompt", "completion"), ("instruction", "output"))
VERIFIED = (("prompt", "verifier"), ("prompt", "dataset", "ground_truth"))
LAYOUTS: dict[RecordType, tuple[tuple[str, ...], ...]] = {
    "conversation": CHATS,
    "prompt": (("prompt",), ("messages",), *VERIFIED),
    "item": VERIFIED,
    "preference": (
        ("prompt", "chosen", "rejected"), ("prompt", "completion", "label"), ("prompt", "answers"), ("prompt", "responses", "rewards"),
        ("context", "response1", "response2", "overall_preference"),
    ),
}  # fmt: skip
"""Record type → the columns of its layouts, common ones first; `docs/layouts.md` has all."""
KNOWN = {column for layouts in LAYOUTS.values() for layout in layouts for column in layout}
SAME = {"messages": ("conversations", "conversation", "context_messages"), "completion": ("response",), "label": ("score",)}
"""Column → names that are read alike."""
OTHERS = {
    "prompt": ("question", "query", "problem", "input", "user", "instruction", "human"),
    "completion": ("answer", "reply", "output", "target", "solution", "assistant", "text"),
    "messages": ("dialogue", "dialog", "chat", "turns"),
    "instruction": ("question", "query"),
    "output": ("answer", "reply", "response", "target"),
    "chosen": ("better", "preferred", "accepted", "winner"),
    "rejected": ("worse", "dispreferred", "refused", "loser"),
    "ground_truth": ("answer", "solution", "gold", "target", "label"),
}
"""Column → names that other datasets give it."""
MOST = 12
"""Columns shown."""


def hint(columns: Sequence[str], record: RecordType | None) -> str:
    """A row's columns, and the layouts of a record type that come nearest unless one fits."""
    more = f" and {len(columns) - MOST} more" if len(columns) > MOST else ""
    has = f"it has the columns {', '.join(columns[:MOST])}{more}" if columns else "it has no named columns"
    if record is None:
        return has
    found = [(layout, *_fit(layout, columns)) for layout in LAYOUTS[record]]
    if any(not renamed and not lacking for _, renamed, lacking in found):
        return has
    near = sorted((one for one in found if len(one[2]) < len(one[0])), key=lambda one: len(one[2]))
    near = [one for one in near if len(one[2]) == len(near[0][2]) <= 1][:2]
    if not near:
        known = " or ".join(f"`{', '.join(layout)}`" for layout in LAYOUTS[record])
        return f"{has}; {record} rows have {known} (docs/layouts.md)"
    return f"{has}; near is {' or '.join(_shown(*one) for one in near)}"


def _fit(layout: Sequence[str], columns: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """(column of the layout → the row's likely name of it, columns that nothing resembles)."""
    renamed, lacking = {}, []
    free = {name.lower(): name for name in columns if name not in layout}
    for column in layout:
        if {column, *SAME.get(column, ())} & set(columns):
            continue
        likely = [name for name in OTHERS.get(column, ()) if name in free] + get_close_matches(column, free, 1, 0.75)
        if likely:
            renamed[column] = free.pop(likely[0])
        else:
            lacking.append(column)
    if len(lacking) == len(free) == 1 < len(layout) and not KNOWN & free.keys():  # the only column left
        renamed[lacking.pop()] = free.popitem()[1]
    return renamed, lacking


def _shown(layout: Sequence[str], renamed: dict[str, str], lacking: list[str]) -> str:
    names = {column: renamed.get(column, column) for column in layout}
    chosen = ", ".join(f"{column}: {name}" for column, name in names.items() if column not in lacking)
    how = [f"write `columns: {{{chosen}}}` in the source"] if renamed else []
    lacks = [f"{lacking[0]} is missing"] if lacking else []
    return f"`{', '.join(layout)}` ({'; '.join(how + lacks)})"
