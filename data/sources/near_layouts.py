"""Which layouts come near the columns of a row that no layout fits, for error messages."""

import json
import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches

from pedigree.configs.rows.row_sources import RecordType
from pedigree.data.sources.row_files import NULL

CHATS = (("messages",), ("prompt", "completion"), ("instruction", "output"))
VERIFIED = (("prompt", "ground_truth"), ("prompt", "dataset", "ground_truth"), ("prompt", "verifier"))
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
SAME = {
    "messages": ("conversations", "conversation", "context_messages"), "prompt": ("instruction",), "completion": ("response",),
    "output": ("response",), "label": ("score",),
}  # fmt: skip
"""Column → names that are read alike."""
OTHERS = {
    "prompt": ("question", "query", "problem", "input", "user", "instruction", "human"),
    "completion": ("answer", "reply", "output", "target", "solution", "assistant", "text"),
    "messages": ("dialogue", "dialog", "chat", "turns"),
    "instruction": ("question", "query"),
    "output": ("answer", "reply", "response", "target"),
    "label": ("kto_tag", "desirable", "good"),
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
    found = [_fit(layout, columns) for layout in LAYOUTS[record]]
    if any(all(name == ours for ours, name in fit.values()) for fit in found):
        return has
    lacks = [(fit, [column for column, (_, name) in fit.items() if name is None]) for fit in found]
    near = sorted((one for one in lacks if len(one[1]) < len(one[0])), key=lambda one: len(one[1]))
    near = [one for one in near if len(one[1]) == len(near[0][1]) <= 1][:2]
    if not near:
        known = " or ".join(f"`{', '.join(layout)}`" for layout in LAYOUTS[record])
        return f"{has}; {record} rows have {known} (docs/layouts.md)"
    system = next((name for name in ("system", "system_prompt") if name in columns), None)
    return f"{has}; near is {' or '.join(_shown(*one, system) for one in near)}"


def _fit(layout: Sequence[str], columns: Sequence[str]) -> dict[str, tuple[str, str | None]]:
    """Column of the layout → (the name that is read, the row's likely name of it; None if nothing resembles it)."""
    fit: dict[str, tuple[str, str | None]] = {}
    free = {name.lower(): name for name in columns if name not in layout and not name.endswith(NULL)}
    for column in layout:
        read = next((name for name in (column, *SAME.get(column, ())) if name in columns), None)
        likely = [name for name in OTHERS.get(column, ()) if name in free] + get_close_matches(column, free, 1, 0.75)
        if read and free.get(read.lower()) == read:
            del free[read.lower()]
        fit[column] = (read, read) if read else (column, free.pop(likely[0]) if likely else None)
    lacking = [column for column, (_, name) in fit.items() if name is None]
    if len(lacking) == len(free) == 1 < len(layout) and lacking != ["verifier"] and not KNOWN & free.keys():  # the only column left
        fit[lacking[0]] = (lacking[0], free.popitem()[1])
    return fit


def _shown(fit: Mapping[str, tuple[str, str | None]], lacking: Sequence[str], system: str | None) -> str:
    chosen = [f"{ours}: {_quoted(name)}" for ours, name in [*fit.values(), ("system", system)] if name]
    is_renamed = any(name not in (None, ours) for ours, name in fit.values())
    verifier = "`verifier: exact_match` or another" if set(fit) == {"prompt", "ground_truth"} else ""
    how = [f"write `columns: {{{', '.join(chosen)}}}`{verifier and ' and '}{verifier} in the source"] if is_renamed else []
    lacks = [f"{lacking[0]} is missing"] if lacking else []
    return f"`{', '.join(fit)}` ({'; '.join(how + lacks)})"


def _quoted(name: str) -> str:
    """The name as YAML reads it as text."""
    return name if re.fullmatch(r"[A-Za-z_][\w.-]*", name) else json.dumps(name)
