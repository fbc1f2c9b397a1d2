"""Two-pass dataset builder: workers parse rows into draft files, the parent selects, workers write the artifact.

The parent selects by an index of a few hundred bytes per row. Rows are in memory only a block or a file at a time. The result does not
depend on the number of processes or the block size.
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

from pedigree.configs.base.frozen import digest
from pedigree.configs.rows.filters import Filter
from pedigree.configs.rows.mixing import By, Order, When
from pedigree.configs.rows.row_sources import RecordType
from pedigree.data.expectations import row_facts, row_statistics
from pedigree.data.expectations.validation import facts_of
from pedigree.data.filters import filtering
from pedigree.data.filters.filtering import KEY, Facts, RowContext
from pedigree.data.filters.token_counts import TokenCounter
from pedigree.data.host.parallel import mapped
from pedigree.data.records import columns, records
from pedigree.data.records.scattered import Numbers, Scattered
from pedigree.data.sources import shares
from pedigree.data.sources.row_files import Block, RowBlock
from pedigree.data.sources.sources import USABLE, BadRow, OpenSource

ORDERED_BY = {"length": ["size"], "turns": [row_statistics.TURNS_OF["user"], row_statistics.TURNS_OF["assistant"]]}
"""Sort key → its columns in the index, which are summed."""
KEPT = "rows that the filters keep"
FEW = 4
"""Number of blocks up to which one process is used."""
PLACES = ".places"


class BlockIndex(NamedTuple):
    """The index of one block."""

    index: pa.Table
    """One line per row: id (equal rows share it), source, sizes, facts for expectations, and statistics."""
    keys: tuple[NDArray[np.void], ...]
    """Hash keys of the rows for the two seeds."""
    facts: list[Facts]
    """One per filter."""
    columns: frozenset[str]
    """Further columns, requested by filters, that some row has."""
    bad: list[BadRow]
    path: Path
    """The rows' file; a file with suffix `PLACES` has the place of each."""


@dataclass
class SourceRows:
    """The rows of one source."""

    source: OpenSource
    drafts: list[BlockIndex]

    @property
    def bad(self) -> list[BadRow]:
        return [*self.source.bad, *(row for draft in self.drafts for row in draft.bad)]

    @property
    def rows(self) -> int:
        return sum(len(draft.index) for draft in self.drafts)


@dataclass(frozen=True)
class RowIndex:
    """Index of all drafted rows of all sources: position → row."""

    index: pa.Table
    """See `BlockIndex`; ids are unique."""
    order: NDArray[np.void]
    """Sort keys that shuffle the rows."""
    facts: list[Facts]
    """One per filter."""
    sources: NDArray[np.int16]
    """Source number of each row."""
    rows: Scattered
    seed: int
    """Seed of `order`."""
    draws: NDArray[np.void]
    """Sort keys that put a source's rows into draw order."""
    bases: pa.ChunkedArray
    """Ids before deduplication by number."""
    read: int
    """Number of rows that were read; later rows are repeats."""

    def __len__(self) -> int:
        return len(self.index)

    @property
    def ids(self) -> pa.ChunkedArray:
        return self.index["id"]

    def shuffled(self, places: Numbers) -> Numbers:
        """These positions, shuffled by hash of seed and id."""
        return _sorted(self.order, places)

    def ordered(self, places: Numbers, order: Order) -> Numbers:
        """These positions in an order; ties are shuffled."""
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

    def drawn(self, taken: Sequence[SourceRows], kept: Numbers) -> Numbers:
        """Draw all sources' portions from the kept rows; positions may repeat.

        Raises:
            PedigreeError: a portion exceeds the available rows.
        """
        found = []
        for number, part in enumerate(taken):
            mine = kept[self.sources[kept] == number]
            ranked = mine if part.source.portion.takes_all else _sorted(self.draws, mine)
            sources = self.index["source"].take(pa.array(ranked))
            found.append(shares.drawn(part.source.name, part.source.portion, ranked, sources, KEPT))
        return np.concatenate(found)

    def repeated(self, places: Numbers) -> "tuple[RowIndex, Numbers]":
        """(rows with each repeat in `places` as a separate row, distinct positions). Ids continue the numbers of equal rows."""
        again = np.flatnonzero(shares.ranks(places))
        if not len(again):
            return self, places
        more = places[again]
        ids, _ = _numbered(pa.chunked_array([*self.bases.chunks, *self.bases.take(pa.array(more)).chunks]))
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
        """The rows at these positions, in that order."""
        return self._named(self.rows.table(places), places)

    def places_read(self, places: Numbers) -> list[str]:
        """Where the rows at these positions were read, e.g. `chat.jsonl:17`, or their ids in another stage; empty for generated rows."""
        files, lines = self.rows.file[places].tolist(), self.rows.line[places].tolist()
        read = {file: json.loads(self.rows.files[file].with_suffix(PLACES).read_text()) for file in set(files)}
        return [read[file][line] for file, line in zip(files, lines, strict=True)]

    def write(self, payload: Path, places: Numbers, workers: int) -> Iterator[int]:
        """See `Scattered.write`."""
        return self.rows.write(payload, places, workers, self._named)

    def _named(self, rows: pa.Table, places: Numbers) -> pa.Table:
        return rows.set_column(0, "id", self.ids.take(pa.array(places)))


@dataclass
class DatasetBuilder:
    """A folder of draft files with their index."""

    folder: Path
    record: RecordType
    filters: Sequence[Filter]
    seed: int
    """Seed of the row order."""
    check_verifier: Callable[[Any], None]
    workers: int
    looks: Sequence[str] = ()
    """Names of further facts for the index, see `data/expectations/row_facts.py`."""
    counter: TokenCounter | None = None
    """Counts each row's tokens for the index and for filters."""
    taken: list[SourceRows] = field(default_factory=list)

    def __enter__(self) -> "DatasetBuilder":
        shutil.rmtree(self.folder, ignore_errors=True)  # left by a killed attempt
        self.folder.mkdir(parents=True)
        return self

    def __exit__(self, *_: Any) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def take(self, source: OpenSource) -> Iterator[int]:
        """Parse a source's rows into draft files; yields the number of rows so far after each block.

        Raises:
            PedigreeError: too many bad rows, or too few usable ones.
        """
        taken = SourceRows(source, [])
        number = len(self.taken)
        self.taken.append(taken)

        def work(given: tuple[int, Block]) -> BlockIndex:
            place, block = given
            return self._draft(source, number, block, self.folder / f"{number}-{place}.arrow")

        for draft in _spread(work, enumerate(source.blocks), self.workers):
            taken.drafts.append(draft)
            yield taken.rows
        if not taken.drafts:  # an empty file
            taken.drafts.append(work((0, RowBlock(()))))
        source.refuse(taken.rows, taken.bad)

    @property
    def columns(self) -> frozenset[str]:
        """Further columns, requested by filters, that some row has."""
        return frozenset(chain.from_iterable(draft.columns for taken in self.taken for draft in taken.drafts))

    def _draft(self, source: OpenSource, number: int, block: Block, path: Path) -> BlockIndex:
        rows, bad, places, further = source.parse(block)
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
        facts = filtering.look(self.filters, rows, RowContext(counts or (), further, number))
        return BlockIndex(index, keys, facts, frozenset(chain.from_iterable(further)), bad, path)

    def table(self, when: When = "before_filters") -> RowIndex:
        """Index of all drafted rows, or only of the drawn ones if drawing comes before filters. Equal ids get numbers.

        Raises:
            PedigreeError: a portion exceeds the available rows.
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
                ids, repeated = _numbered(index["id"].slice(start, taken.rows))
                draws[start + repeated] = _keys(portion.seed, ids.take(pa.array(repeated)).to_pylist())
                if when == "before_filters":
                    ranked = _sorted(draws, places)
                    places = shares.drawn(taken.source.name, portion, ranked, index["source"].take(pa.array(ranked)), USABLE)
            drawn.append(places)
        places = np.concatenate(drawn)
        index, order = index.take(pa.array(places)), order[places]
        ids, repeated = _numbered(index["id"])
        order[repeated] = _keys(self.seed, ids.take(pa.array(repeated)).to_pylist())
        return RowIndex(
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


def _spread(work: Callable[[Any], BlockIndex], blocks: Iterable[Any], workers: int) -> Iterator[BlockIndex]:
    """Apply `work` to each block, in several processes if there are many blocks."""
    rest = iter(blocks)
    first = list(islice(rest, FEW + 1))
    return mapped(work, chain(first, rest), workers if len(first) > FEW else 1)


def _keys(seed: int, ids: Sequence[str]) -> NDArray[np.void]:
    """Hashes of the seed and each id; they sort like their hexadecimal digits."""
    return np.frombuffer(b"".join(bytes.fromhex(digest([seed, name])[:32]) for name in ids), KEY.newbyteorder(">")).astype(KEY)


def _sorted(keys: NDArray[np.void], places: Numbers) -> Numbers:
    """Positions sorted by their keys."""
    keys = keys[places]
    return places[np.lexsort((keys["low"], keys["high"]))]


def _numbered(ids: pa.ChunkedArray) -> tuple[pa.ChunkedArray, Numbers]:
    """(ids with suffix -2 for the second of equal ones, -3 for the third, ...; positions of these)."""
    ranks = shares.ranks(np.asarray(ids.combine_chunks().dictionary_encode().indices))
    repeated = np.flatnonzero(ranks)
    if not len(repeated):
        return ids, repeated
    named = [f"{name}-{rank + 1}" for name, rank in zip(ids.take(pa.array(repeated)).to_pylist(), ranks[repeated].tolist(), strict=True)]
    unique = call_function("replace_with_mask", [ids.combine_chunks(), pa.array(ranks > 0), pa.array(named)])
    return pa.chunked_array([unique]), repeated


def _moved(facts: Facts, places: Numbers) -> Facts:
    """The facts of the rows at these positions, reindexed from 0."""
    if not isinstance(facts, dict):
        return facts[places]
    return {new: facts[old] for new, old in enumerate(places.tolist()) if old in facts}
