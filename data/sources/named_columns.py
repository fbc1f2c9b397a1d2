"""Column selection, `columns: {ground_truth: reward_model.ground_truth}`: our name → the source's name or dotted path."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple


class SelectedRow(NamedTuple):
    """A row as layouts read it, along with further columns."""

    row: Any
    values: Mapping[str, Any]
    """Column or path → value, for the requested columns that the row has."""


def select_columns(row: Any, columns: Mapping[str, str], beside: Sequence[str]) -> SelectedRow:
    """Select a row's chosen columns (by default all), together with the original columns in `beside`."""
    if isinstance(row, SelectedRow):
        return row
    if not isinstance(row, Mapping):
        return SelectedRow(row, {})
    chosen = {ours: _at(row, theirs)[0] for ours, theirs in columns.items()} if columns else row
    further = {way: _at(row, way) for way in beside}
    return SelectedRow(chosen, {way: value for way, (value, is_there) in further.items() if is_there is not False})


def lacking(rows: Iterable[Any], columns: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """(chosen columns that no row has, columns of the first row).

    Reads rows until each column was seen. A path that ends at null in every row may exist and is not rejected.
    """
    unseen, missed, instead = set(columns.values()), set(), []
    for row in rows:
        if isinstance(row, Mapping):
            instead = instead or list(_ways(row))
            found = {way: _at(row, way)[1] for way in unseen}
            missed |= {way for way in unseen if found[way] is False}
            unseen = {way for way in unseen if not found[way]}
        if not unseen:
            break
    return sorted(unseen & missed), instead


def _at(row: Mapping[str, Any], way: str) -> tuple[Any, bool | None]:
    """(value of the column with this name or, failing that, at this path; whether it is there, None if the path to it ends at null)."""
    if way in row:
        return row[way], True
    found: Any = row
    for name in way.split("."):
        if found is None:
            return None, None
        if not isinstance(found, Mapping) or name not in found:
            return None, False
        found = found[name]
    return found, True


def _ways(row: Mapping[str, Any]) -> Iterable[str]:
    for name, value in row.items():
        yield from (f"{name}.{inner}" for inner in value) if isinstance(value, Mapping) and value else (name,)
