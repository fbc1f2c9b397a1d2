"""Lazy sequences, for rows that do not fit into memory."""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any, TypeVar, overload

T = TypeVar("T")


class Mapped(Sequence[T]):
    """Applies a function to the items of a sequence or NumPy array on access."""

    def __init__(self, items: Any, make: Callable[[Any], T]) -> None:
        self._items, self._make = items, make

    def __len__(self) -> int:
        return len(self._items)

    @overload
    def __getitem__(self, place: int) -> T: ...
    @overload
    def __getitem__(self, place: slice) -> "Mapped[T]": ...
    def __getitem__(self, place: int | slice) -> "T | Mapped[T]":
        if isinstance(place, slice):
            return Mapped(self._items[place], self._make)
        return self._make(self._items[place])

    def __iter__(self) -> Iterator[T]:
        return map(self._make, self._items)


class InParts(Sequence[T]):
    """Concatenation of parts that are read whole; the last accessed part stays in memory.

    In-order access reads each part once. Safe to share between threads.
    """

    def __init__(self, lengths: Iterable[int], read: Callable[[int], Sequence[T]]) -> None:
        """`lengths` are the numbers of items per part; `read` returns those of one."""
        self._ends, self._read = list(accumulate(lengths)), read
        self._held: tuple[int, Sequence[T]] = (-1, ())

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @overload
    def __getitem__(self, place: int) -> T: ...
    @overload
    def __getitem__(self, place: slice) -> list[T]: ...
    def __getitem__(self, place: int | slice) -> T | list[T]:
        if isinstance(place, slice):
            return [self[number] for number in range(len(self))[place]]
        number = range(len(self))[place]
        part, held = bisect_right(self._ends, number), self._held
        if held[0] != part:
            held = self._held = (part, self._read(part))
        return held[1][number - self._ends[part]]  # a negative index, from the part's end

    def __iter__(self) -> Iterator[T]:
        """Holds one part in memory at a time, and none afterwards."""
        for part in range(len(self._ends)):
            yield from self._read(part)


def chained(parts: Sequence[Sequence[T]]) -> Sequence[T]:
    """Concatenation of sequences."""
    return InParts(map(len, parts), parts.__getitem__)
