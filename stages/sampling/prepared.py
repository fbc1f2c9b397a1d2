"""Requests stored on disk until an engine takes them, because all of a stage's requests may not fit into memory."""

from array import array
from collections.abc import Iterable
from math import isnan, nan
from mmap import ACCESS_READ, mmap
from pathlib import Path
from tempfile import TemporaryFile

from pedigree.data.records.sequences import Mapped
from pedigree.stages.sampling.sampler import Request


def prepared(requests: Iterable[Request], folder: Path) -> Mapped[Request]:
    """Requests whose tokens, 4 bytes each, are in an unnamed temporary file in `folder` that vanishes with the process. Consecutive
    requests with the same prompt share it; each takes about 30 bytes of memory.
    """
    ends, prompts, seeds, temperatures = array("q", [0]), array("q"), array("q"), array("d")
    last: list[int] | None = None
    with TemporaryFile(dir=folder) as file:
        for request in requests:
            if request.prompt_ids != last:
                last = request.prompt_ids
                file.write(array("i", last))
                ends.append(ends[-1] + len(last))
            prompts.append(len(ends) - 2)
            seeds.append(request.seed)
            temperatures.append(nan if request.temperature is None else request.temperature)
        file.flush()
        tokens = memoryview(mmap(file.fileno(), 0, access=ACCESS_READ) if ends[-1] else b"").cast("i")

    def request_at(number: int) -> Request:
        start, end = ends[prompts[number]], ends[prompts[number] + 1]
        temperature = temperatures[number]
        return Request(tokens[start:end].tolist(), seeds[number], None if isnan(temperature) else temperature)

    return Mapped(range(len(seeds)), request_at)
