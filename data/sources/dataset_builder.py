"""Two-pass dataset builder: workers parse rows into draft files, the parent selects, workers write the artifact.

The parent selects by an index of a few hundred bytes per row. Rows are in memory only a block or a file at a time. The result does not
depend on the number of processes or the block size.
"""

import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from pyarrow.compute import call_function

from pedigree.configs.base.frozen import digest
from pedigree.configs.rows.filters import Filter
from pedigree.configs.rows.mixing import By, Order, When
from pedigree.configs.rows.row_sources import RecordType
from pedigree.data.expectations import row_facts, row_statistics
from pedigree.data.expectations.validation import facts_of
from pedigree.data.filters import filtering
from pedigree.data.filters.filtering import Facts, RowContext
from pedigree.data.filters.token_counts import TokenCounter
from pedigree.data.host.parallel import mapped
from pedigree.data.records import columns, records
from pedigree.data.records.scattered import Numbers, Scattered
from pedigree.data.sources import shares
from pedigree.data.sources.row_files import BadRow, Block, writable
from pedigree.data.sources.sources import USABLE, OpenSource

ORDERED_BY = {"length": ["size"], "turns": [row_statistics.TURNS_OF["user"], row_statistics.TURNS_OF["assistant"]]}
"""Sort key → its columns in the index, which are summed."""
KEPT = "rows that the filters keep"
FEW = 4
"""Number of blocks up to which one process is used."""
PLACE = "place"
"""Column of a draft: where each row was read."""
KEY = pa.binary(16)


class BlockIndex(NamedTuple):
    """The index of one block."""

    index: pa.Table
    """One line per row: a part of `RowIndex.index`."""
    facts: list[Facts]
    """One per filter."""
    columns: frozenset[str]
    """Further columns, requested by filters, that some row has."""
    bad: list[BadRow]
    path: Path
    """The rows' file."""
    out_of_turn: Mapping[str, int]
    """As in `Parsed`."""


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

    @property
    def out_of_turn(self) -> Counter[str]:
        """Fault and rule → rows that were cut, joined or kept."""
        return sum((Counter(draft.out_of_turn) for draft in self.drafts), Counter[str]())


@dataclass(frozen=True)
class RowIndex:
    """Index of all drafted rows of all sources: position → row."""

    index: pa.Table
    """One line per row: `id`, and `base`, the id that equal rows share; `source`, and `number`, the place of its source in the recipe;
    `size` and `bulk`; `file` and `line` of its draft; hashes for sorting, `order` to shuffle and `draw` to draw; facts for expectations;
    statistics."""
    facts: list[Facts]
    """One per filter."""
    files: Sequence[Path]
    """The drafts."""
    seed: int
    """Seed of `order`."""
    read: int
    """Number of rows that were read; later rows are repeats."""

    def __len__(self) -> int:
        return len(self.index)

    @property
    def ids(self) -> pa.ChunkedArray:
        return self.index["id"]

    @cached_property
    def sources(self) -> Numbers:
        """Source number of each row."""
        return np.asarray(self.index["number"])

    @cached_property
    def rows(self) -> Scattered:
        return Scattered(self.files, *(np.asarray(self.index[name]) for name in ("file", "line", "bulk")))

    def shuffled(self, places: Numbers) -> Numbers:
        """These positions, shuffled by hash of seed and id."""
        return _sorted(self.index["order"], places)

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
        """Draw all sources' portions from the kept rows; positions may repeat. Raises PedigreeError as `Portion.refuse`."""
        found = []
        for number, part in enumerate(taken):
            mine = kept[self.sources[kept] == number]
            ranked = mine if part.source.portion.takes_all else _sorted(self.index["draw"], mine)
            sources = self.index["source"].take(pa.array(ranked))
            found.append(shares.drawn(part.source.name, part.source.portion, ranked, sources, KEPT))
        return np.concatenate(found)

    def repeated(self, places: Numbers) -> "tuple[RowIndex, Numbers]":
        """(rows with each repeat in `places` as a separate row, distinct positions). Ids continue the numbers of equal rows."""
        again = np.flatnonzero(shares.ranks(places))
        if not len(again):
            return self, places
        everything = np.concatenate([np.arange(len(self)), places[again]])
        places = places.copy()
        places[again] = len(self) + np.arange(len(again))
        index = _numbered(self.index.take(pa.array(everything)), "order", self.seed)
        return replace(self, index=index, facts=[facts[everything] for facts in self.facts]), places

    def table(self, places: Numbers) -> pa.Table:
        """The rows at these positions, in that order."""
        return self._named(self.rows.table(places), places)

    def places_read(self, places: Numbers) -> list[str]:
        """Where the rows at these positions were read, e.g. `chat.jsonl:17`, or their ids in another stage; empty for generated rows."""
        return self.rows.table(places, (PLACE,))[PLACE].to_pylist()

    def write(self, payload: Path, places: Numbers, workers: int) -> Iterator[int]:
        """See `Scattered.write`."""
        return self.rows.write(payload, places, workers, self._named)

    def _named(self, rows: pa.Table, places: Numbers) -> pa.Table:
        return rows.drop_columns(PLACE).set_column(0, "id", self.ids.take(pa.array(places)))


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

        Raises PedigreeError for too many bad rows, or too few usable ones.
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
            taken.drafts.append(work((0, list)))
        source.refuse(taken.rows, taken.bad)

    @property
    def columns(self) -> frozenset[str]:
        """Further columns, requested by filters, that some row has."""
        return frozenset(chain.from_iterable(draft.columns for taken in self.taken for draft in taken.drafts))

    def _draft(self, source: OpenSource, number: int, block: Block, path: Path) -> BlockIndex:
        rows, bad, places, further, out_of_turn = source.parse(block)
        rows = [{"id": f"{row['source']}-{digest(row)[:16]}", **row} for row in rows]
        draft = columns.to_table(rows, records.RECORDS[self.record]).append_column(PLACE, pa.array(map(writable, places), pa.string()))
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, draft.schema) as writer:
            writer.write_table(draft)
        index, counts = facts_of(rows, self.record, self.check_verifier), self.counter.counts(rows) if self.counter else None
        ids = [row["id"] for row in rows]
        noted = {
            **row_facts.look(self.looks, rows),
            "base": pa.array(ids, pa.string()),
            "number": pa.array([number] * len(rows), pa.int16()),
            "size": pa.array(map(records.size_of, rows), pa.int64()),
            "bulk": pa.array(map(records.bulk_of, rows), pa.int64()),
            "line": pa.array(range(len(rows)), pa.int32()),
            "order": _keys(self.seed, ids),
            "draw": _keys(source.portion.seed, ids),
            **row_statistics.noted(rows, counts),
        }
        for name, column in noted.items():
            index = index.append_column(name, column)
        facts = filtering.look(self.filters, rows, RowContext(counts or (), further, number))
        return BlockIndex(index, facts, frozenset(chain.from_iterable(further)), bad, path, out_of_turn)

    def table(self, when: When = "before_filters") -> RowIndex:
        """Index of all drafted rows, or only of the drawn ones if drawing comes before filters. Equal ids get numbers.

        Raises PedigreeError as `Portion.refuse`.
        """
        drafts = [draft for taken in self.taken for draft in taken.drafts]
        sizes = [len(draft.index) for draft in drafts]
        file = pa.array(np.repeat(np.arange(len(drafts), dtype=np.int32), sizes))
        index = pa.concat_tables([draft.index for draft in drafts]).combine_chunks().append_column("file", file)
        parts, drawn, start = [], [], 0
        for taken in self.taken:
            part, places, portion = index.slice(start, taken.rows), np.arange(taken.rows), taken.source.portion
            if not portion.takes_all:
                part = _numbered(part, "draw", portion.seed)
                if when == "before_filters":
                    ranked = _sorted(part["draw"], places)
                    places = shares.drawn(taken.source.name, portion, ranked, part["source"].take(pa.array(ranked)), USABLE)
                    part = part.take(pa.array(places))
            parts.append(part)
            drawn.append(start + places)
            start += taken.rows
        index, places = pa.concat_tables(parts).combine_chunks(), np.concatenate(drawn)
        return RowIndex(
            index=_numbered(index, "order", self.seed),
            facts=[np.concatenate(noted)[places] for noted in zip(*(draft.facts for draft in drafts), strict=True)],
            files=[draft.path for draft in drafts],
            seed=self.seed,
            read=len(index),
        )


def _spread(work: Callable[[Any], BlockIndex], blocks: Iterable[Any], workers: int) -> Iterator[BlockIndex]:
    """Apply `work` to each block, in several processes if there are many blocks."""
    rest = iter(blocks)
    first = list(islice(rest, FEW + 1))
    return mapped(work, chain(first, rest), workers if len(first) > FEW else 1)


def _keys(seed: int, ids: Sequence[str]) -> pa.Array:
    """Hashes of the seed and each id."""
    return pa.array([bytes.fromhex(digest([seed, name])[:32]) for name in ids], KEY)


def _sorted(keys: pa.ChunkedArray, places: Numbers) -> Numbers:
    """Positions sorted by their keys."""
    return places[np.asarray(call_function("array_sort_indices", [keys.take(pa.array(places))]))]


def _numbered(index: pa.Table, key: str, seed: int) -> pa.Table:
    """The index with distinct ids (suffix -2 for the second of equal rows, -3 for the third, ...) and with their hashes as `key`."""
    ranks = shares.ranks(np.asarray(index["base"].combine_chunks().dictionary_encode().indices))
    bases = index["base"].take(pa.array(np.flatnonzero(ranks))).to_pylist()
    ids = [f"{base}-{rank + 1}" for base, rank in zip(bases, ranks[ranks > 0].tolist(), strict=True)]
    for name, old, new in (("id", "base", pa.array(ids, pa.string())), (key, key, _keys(seed, ids))):
        column = call_function("replace_with_mask", [index[old].combine_chunks(), pa.array(ranks > 0), new])
        index = index.set_column(index.schema.get_field_index(name), name, column)
    return index
