"""Sequences that hold little and make their items when they are asked for: rows may be more than fit into memory."""

from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, chain
from typing import Any, Generic, Protocol, TypeVar, overload

T = TypeVar("T")


class Indexed(Protocol):
    """A sequence, or an array of numpy's."""

    def __len__(self) -> int: ...
    def __getitem__(self, place: Any, /) -> Any: ...
    def __iter__(self) -> Iterator[Any]: ...


class Mapped(Sequence[T]):
    """What a function makes of each item of another sequence, at each look."""

    def __init__(self, items: Indexed, make: Callable[[Any], T]) -> None:
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


class Chained(Sequence[T], Generic[T]):
    """Several sequences, one after the other."""

    def __init__(self, parts: Sequence[Sequence[T]]) -> None:
        self._parts, self._ends = parts, list(accumulate(map(len, parts)))

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
        part = bisect_right(self._ends, number)
        return self._parts[part][number - self._ends[part]]

    def __iter__(self) -> Iterator[T]:
        return chain.from_iterable(self._parts)


class InParts(Sequence[T]):
    """Items that lie in parts, each of which is read whole; the one that was asked for last is in memory.

    Whoever goes through them in their order reads each part once. Threads may share them.
    """

    def __init__(self, lengths: Iterable[int]) -> None:
        """Args: how many items each part has."""
        self._ends = list(accumulate(lengths))
        self._held: tuple[int, Sequence[T]] = (-1, ())

    @abstractmethod
    def _read(self, part: int) -> Sequence[T]:
        """All items of a part."""

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
        part = bisect_right(self._ends, number)
        held = self._held
        if held[0] != part:
            held = self._held = (part, self._read(part))
        return held[1][number - self._ends[part]]

    def __iter__(self) -> Iterator[T]:
        for part in range(len(self._ends)):
            yield from self._read(part)
