"""Records on their way into an artifact, however many: processes parse them and lay them down, one decides, processes write what stays.

What is decided by is an index with a few hundred bytes of each row. The rows themselves are in memory a block or a file at a time, and the
result is the same for any number of processes and any size of block.
"""

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow.compute import call_function

from configs.base.frozen import digest
from configs.rows.datasets import RecordType
from configs.rows.filters import Filter
from configs.rows.mixing import By, Order, When
from data.expectations import row_facts, row_statistics
from data.expectations.validation import facts_of
from data.filters import filtering
from data.filters.filtering import KEY, Beside, Facts
from data.filters.token_counts import TokenCounter
from data.host.parallel import mapped
from data.records import columns, records
from data.records.scattered import Numbers, Scattered
from data.sources import shares
from data.sources.row_files import Block, Handed
from data.sources.sources import USABLE, BadRow, Opened

ORDERED_BY = {"length": ["size"], "turns": [row_statistics.TURNS_OF["user"], row_statistics.TURNS_OF["assistant"]]}
"""What rows may be ordered by → its columns in the index, whose sum counts."""
KEPT = "rows that the filters keep"
FEW = 4
"""So many blocks are not worth further processes."""
PLACES = ".places"


class Draft(NamedTuple):
    """What the index knows of one block."""

    index: pa.Table
    """A line for each row: its id, unless another has the same content; what it counts as; what the expectations look at,
    and the statistics."""
    keys: tuple[NDArray[np.void], ...]
    """The rows' places in the orders of the two seeds, by hash."""
    facts: list[Facts]
    """By filter."""
    columns: frozenset[str]
    """Of those that filters go by, the ones that some row has."""
    bad: list[BadRow]
    path: Path
    """Where the rows lie; beside them, `PLACES`, where each was read."""


@dataclass
class Taken:
    """The rows of one source."""

    source: Opened
    drafts: list[Draft]

    @property
    def bad(self) -> list[BadRow]:
        return [*self.source.bad, *(row for draft in self.drafts for row in draft.bad)]

    @property
    def rows(self) -> int:
        return sum(len(draft.index) for draft in self.drafts)


@dataclass(frozen=True)
class Laid:
    """All rows of all sources, laid down, as the index knows them: place → row."""

    index: pa.Table
    """See `Draft`; ids are unique."""
    order: NDArray[np.void]
    """Sorted by it, rows are shuffled."""
    facts: list[Facts]
    """By filter."""
    sources: NDArray[np.int16]
    """Number of the row's source."""
    rows: Scattered
    seed: int
    """Of the order."""
    draws: NDArray[np.void]
    """Sorted by it, the rows of a source are in the order in which they are drawn."""
    bases: pa.ChunkedArray
    """Ids before equal ones were told apart."""
    read: int
    """So many of these rows were read; those after them repeat some."""

    def __len__(self) -> int:
        return len(self.index)

    @property
    def ids(self) -> pa.ChunkedArray:
        return self.index["id"]

    def shuffled(self, places: Numbers) -> Numbers:
        """These places in the order that hashes of the seed and the ids decide."""
        return _sorted(self.order, places)

    def ordered(self, places: Numbers, order: Order) -> Numbers:
        """These places in an order; those that it leaves equal are shuffled."""
        places = self.shuffled(places)
        match order:
            case "shuffled":
                return places
            case "by_source":
                keys = self.sources[places]
            case "interleaved":
                keys = shares.positions(self.sources[places])
            case By(by=by, direction=direction):
                keys = sum(np.asarray(self.index[name])[places] for name in ORDERED_BY[by]) * (1 if direction == "ascending" else -1)
        return places[np.argsort(keys, kind="stable")]

    def drawn(self, taken: Sequence[Taken], kept: Numbers) -> Numbers:
        """The portions of all sources, of the rows that were kept; some places may stand there several times.

        Raises:
            SourceError: a portion is more than there is.
        """
        found = []
        for number, part in enumerate(taken):
            mine = kept[self.sources[kept] == number]
            ranked = mine if part.source.portion.takes_all else _sorted(self.draws, mine)
            sources = self.index["source"].take(pa.array(ranked))
            found.append(shares.drawn(part.source.name, part.source.portion, ranked, sources, KEPT))
        return np.concatenate(found)

    def repeated(self, places: Numbers) -> "tuple[Laid, Numbers]":
        """(these rows, and those that `places` names again, as rows of their own; all places once). Ids go on where equal rows' end."""
        again = np.flatnonzero(shares.ranks(places))
        if not len(again):
            return self, places
        more = places[again]
        ids, _ = _told_apart(pa.chunked_array([*self.bases.chunks, *self.bases.take(pa.array(more)).chunks]))
        everything = np.concatenate([np.arange(len(self)), more])
        index = self.index.take(pa.array(everything))
        order = np.concatenate([self.order, _keys(self.seed, ids.slice(len(self)).to_pylist())])
        places = places.copy()
        places[again] = len(self) + np.arange(len(again))
        rows = replace(self.rows, file=self.rows.file[everything], line=self.rows.line[everything], sizes=self.rows.sizes[everything])
        laid = replace(
            self,
            index=index.set_column(index.schema.get_field_index("id"), "id", ids),
            order=order,
            facts=[_moved(facts, everything) for facts in self.facts],
            sources=self.sources[everything],
            rows=rows,
            draws=self.draws[everything],
            bases=self.bases.take(pa.array(everything)),
        )
        return laid, places

    def table(self, places: Numbers) -> pa.Table:
        """The rows at some places, in that order."""
        return self._named(self.rows.table(places), places)

    def places_read(self, places: Numbers) -> list[str]:
        """Where the rows at some places were read, e.g. `chat.jsonl:17`; empty where they were made."""
        files, lines = self.rows.file[places].tolist(), self.rows.line[places].tolist()
        read = {file: json.loads(self.rows.files[file].with_suffix(PLACES).read_text()) for file in set(files)}
        return [read[file][line] for file, line in zip(files, lines, strict=True)]

    def write(self, payload: Path, places: Numbers, workers: int) -> Iterator[int]:
        """See `Scattered.write`."""
        return self.rows.write(payload, places, workers, self._named)

    def _named(self, rows: pa.Table, places: Numbers) -> pa.Table:
        return rows.set_column(0, "id", self.ids.take(pa.array(places)))


@dataclass
class Drafts:
    """A folder where rows are laid down, and what is noted of each on the way."""

    folder: Path
    record: RecordType
    filters: Sequence[Filter]
    seed: int
    """Of the order of the rows."""
    check_verifier: Callable[[Any], None]
    workers: int
    looks: Sequence[str] = ()
    """Names of further facts that the index has of each row, see `data/expectations/row_facts.py`."""
    counter: TokenCounter | None = None
    """Counts the tokens of each row, for the index and for filters."""
    taken: list[Taken] = field(default_factory=list)

    def __enter__(self) -> "Drafts":
        shutil.rmtree(self.folder, ignore_errors=True)  # of an attempt that was killed
        self.folder.mkdir(parents=True)
        return self

    def __exit__(self, *_: Any) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def take(self, source: Opened) -> Iterator[int]:
        """Parses a source's rows and lays them down; yields how many there are so far, block after block.

        Raises:
            SourceError: too many bad rows, or too few good ones.
        """
        taken = Taken(source, [])
        number = len(self.taken)
        self.taken.append(taken)

        def work(given: tuple[int, Block]) -> Draft:
            place, block = given
            return self._draft(source, number, block, self.folder / f"{number}-{place}.arrow")

        for draft in _spread(work, enumerate(source.blocks), self.workers):
            taken.drafts.append(draft)
            yield taken.rows
        if not taken.drafts:  # an empty file
            taken.drafts.append(work((0, Handed(()))))
        source.refuse(taken.rows, taken.bad)

    @property
    def columns(self) -> frozenset[str]:
        """Of those that filters go by, the ones that some row has."""
        return frozenset(chain.from_iterable(draft.columns for taken in self.taken for draft in taken.drafts))

    def _draft(self, source: Opened, number: int, block: Block, path: Path) -> Draft:
        rows, bad, places, said = source.parse(block)
        rows = [{"id": f"{row['source']}-{digest(row)[:16]}", **row} for row in rows]
        table = columns.to_table(rows, records.RECORDS[self.record])
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
        path.with_suffix(PLACES).write_text(json.dumps(places))
        index = facts_of(rows, self.record, self.check_verifier)
        for name, fact in row_facts.look(self.looks, rows).items():
            index = index.append_column(name, fact)
        for name, size_of in (("size", records.size_of), ("bulk", records.bulk_of)):
            index = index.append_column(name, pa.array([size_of(row) for row in rows], pa.int64()))
        counts = self.counter.counts(rows) if self.counter else None
        for name, column in row_statistics.noted(rows, counts):
            index = index.append_column(name, column)
        keys = tuple(_keys(seed, [row["id"] for row in rows]) for seed in (self.seed, source.portion.seed))
        facts = filtering.look(self.filters, rows, Beside(counts or (), said, number))
        return Draft(index, keys, facts, frozenset(chain.from_iterable(said)), bad, path)

    def laid(self, when: When = "before_filters") -> Laid:
        """All rows that were taken; where rows are drawn before filters look at them, those alone that are in the portion of their source.
        Ids are told apart by a number.

        Raises:
            SourceError: a portion is more than there is.
        """
        drafts = [draft for taken in self.taken for draft in taken.drafts]
        sizes = [len(draft.index) for draft in drafts]
        starts = np.cumsum([0, *(taken.rows for taken in self.taken)]).tolist()
        index = pa.concat_tables([draft.index for draft in drafts]).combine_chunks()
        order, draws = (np.concatenate([draft.keys[which] for draft in drafts]) for which in (0, 1))
        drawn = []
        for taken, start in zip(self.taken, starts, strict=False):
            places, portion = np.arange(start, start + taken.rows), taken.source.portion
            if not portion.takes_all:
                ids, repeated = _told_apart(index["id"].slice(start, taken.rows))
                draws[start + repeated] = _keys(portion.seed, ids.take(pa.array(repeated)).to_pylist())
                if when == "before_filters":
                    ranked = _sorted(draws, places)
                    places = shares.drawn(taken.source.name, portion, ranked, index["source"].take(pa.array(ranked)), USABLE)
            drawn.append(places)
        places = np.concatenate(drawn)
        index, order = index.take(pa.array(places)), order[places]
        ids, repeated = _told_apart(index["id"])
        order[repeated] = _keys(self.seed, ids.take(pa.array(repeated)).to_pylist())
        return Laid(
            index=index.set_column(index.schema.get_field_index("id"), "id", ids),
            order=order,
            facts=[
                _moved(filtering.joined([draft.facts[number] for draft in drafts], sizes), places) for number in range(len(self.filters))
            ],
            sources=np.repeat(np.arange(len(drawn), dtype=np.int16), [len(part) for part in drawn]),
            rows=Scattered(
                files=[draft.path for draft in drafts],
                file=np.repeat(np.arange(len(drafts), dtype=np.int32), sizes)[places],
                line=np.concatenate([np.arange(size, dtype=np.int32) for size in sizes])[places],
                sizes=np.asarray(index["bulk"]),
            ),
            seed=self.seed,
            draws=draws[places],
            bases=index["id"],
            read=len(index),
        )


def _spread(work: Callable[[Any], Draft], blocks: Iterable[Any], workers: int) -> Iterator[Draft]:
    """What `work` makes of each block; further processes are begun where there are many."""
    rest = iter(blocks)
    first = list(islice(rest, FEW + 1))
    return mapped(work, chain(first, rest), workers if len(first) > FEW else 1)


def _keys(seed: int, ids: Sequence[str]) -> NDArray[np.void]:
    """Hashes of the seed and each id, which sort as their hexadecimal digits do."""
    return np.frombuffer(b"".join(bytes.fromhex(digest([seed, name])[:32]) for name in ids), KEY.newbyteorder(">")).astype(KEY)


def _sorted(keys: NDArray[np.void], places: Numbers) -> Numbers:
    """Places in the order of their keys."""
    keys = keys[places]
    return places[np.lexsort((keys["low"], keys["high"]))]


def _told_apart(ids: pa.ChunkedArray) -> tuple[pa.ChunkedArray, Numbers]:
    """(ids in which the second of two equal ones ends with -2, the third with -3, ...; the places of these)."""
    ranks = shares.ranks(np.asarray(ids.combine_chunks().dictionary_encode().indices))
    repeated = np.flatnonzero(ranks)
    if not len(repeated):
        return ids, repeated
    named = [f"{name}-{rank + 1}" for name, rank in zip(ids.take(pa.array(repeated)).to_pylist(), ranks[repeated].tolist(), strict=True)]
    told = call_function("replace_with_mask", [ids.combine_chunks(), pa.array(ranks > 0), pa.array(named)])
    return pa.chunked_array([told]), repeated


def _moved(facts: Facts, places: Numbers) -> Facts:
    """The facts of the rows at some places, as facts of places from 0 on."""
    if not isinstance(facts, dict):
        return facts[places]
    return {new: facts[old] for new, old in enumerate(places.tolist()) if old in facts}
