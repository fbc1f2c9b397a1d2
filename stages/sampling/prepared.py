"""Requests stored on disk until an engine takes them, because all of a stage's requests may not fit into memory."""

from array import array
from collections.abc import Iterable, Sequence
from copy import copy
from math import isnan, nan
from mmap import ACCESS_READ, mmap
from pathlib import Path
from tempfile import TemporaryFile
from typing import overload

from pedigree.stages.sampling.sampler import Request


class Prepared(Sequence[Request]):
    """Requests whose tokens are in an unnamed temporary file that vanishes with the process. Consecutive requests with the same prompt
    share it; each takes about 30 bytes of memory. Slices are views."""

    def __init__(self, requests: Iterable[Request], folder: Path) -> None:
        """
        Args:
            requests: consumed one by one.
            folder: on a disk with room for the tokens, 4 bytes each.
        """
        self._ends, self._prompts = array("q", [0]), array("q")
        self._seeds, self._temperatures = array("q"), array("d")
        last: list[int] | None = None
        with TemporaryFile(dir=folder) as file:
            for request in requests:
                if request.prompt_ids != last:
                    last = request.prompt_ids
                    file.write(array("i", last))
                    self._ends.append(self._ends[-1] + len(last))
                self._prompts.append(len(self._ends) - 2)
                self._seeds.append(request.seed)
                self._temperatures.append(nan if request.temperature is None else request.temperature)
            file.flush()
            mapped = mmap(file.fileno(), 0, access=ACCESS_READ) if self._ends[-1] else b""
        self._ids = memoryview(mapped).cast("i")
        self._places = range(len(self._seeds))

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, place: int) -> Request: ...
    @overload
    def __getitem__(self, place: slice) -> "Prepared": ...
    def __getitem__(self, place: int | slice) -> "Request | Prepared":
        if isinstance(place, slice):
            part = copy(self)
            part._places = self._places[place]
            return part
        number = self._places[place]
        prompt, temperature = self._prompts[number], self._temperatures[number]
        ids = self._ids[self._ends[prompt] : self._ends[prompt + 1]].tolist()
        return Request(ids, self._seeds[number], None if isnan(temperature) else temperature)
