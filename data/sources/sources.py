"""Row sources: rules, programs, packaged files, project files, object stores, the hub, and deliberately planted leaks.

Each source yields `Example`s, which `data/sources/examples.py` turns into records. An id is the source's name plus the hash of
the row, so it depends on the row alone.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from pedigree.configs.base.problems import PedigreeError
from pedigree.configs.rows.datasets import PrepareData, Shots
from pedigree.configs.rows.row_sources import (
    Arithmetic,
    Constraints,
    DataSource,
    Files,
    Hub,
    Leaks,
    Packaged,
    Read,
    RecordType,
    RowProgram,
    RowSource,
    StageRows,
    Stored,
    Written,
)
from pedigree.configs.rows.suite_forms import Form
from pedigree.data.artifacts import assets
from pedigree.data.artifacts.artifacts import Artifact, sha256_file
from pedigree.data.chat.turns import Dropped
from pedigree.data.expectations.validation import row_problem
from pedigree.data.records import records
from pedigree.data.records.records import Item, RowGroup
from pedigree.data.sources import forms, hub, layouts, leaks, named_columns, procedural, row_files
from pedigree.data.sources.attributes import grouped
from pedigree.data.sources.examples import Example, example_in, record_of
from pedigree.data.sources.named_columns import select_columns
from pedigree.data.sources.near_layouts import hint
from pedigree.data.sources.row_files import BadRow, Block, listed
from pedigree.data.sources.shares import ALL, Portion
from pedigree.data.sources.verifiable import instructions_of
from pedigree.data.store import storage
from pedigree.data.store.storage import ContentChanged, Missing

USABLE = "usable rows"
NOTHING: Mapping[str, Any] = {}
"""Further columns of rows that have none."""


@dataclass(frozen=True)
class Outside:
    """Inputs of sources that are not in their config."""

    suites: Sequence[Item] = ()
    """Items to plant as leaks."""
    files: Mapping[str, Path] = field(default_factory=dict)
    """Project path → file."""
    artifacts: Mapping[str, Artifact] = field(default_factory=dict)
    """Label → another stage's rows."""
    beat: Callable[[], None] = lambda: None
    """Called periodically during large downloads."""
    mark: Callable[[str], None] = lambda mark: None
    """Records a caveat about the origin of the rows."""
    check_verifier: Callable[[Any], None] = lambda verifier: None
    """Raises a user-facing error for a malformed verifier (`stages.verifiers.check`)."""
    run: Callable[[RowProgram, Path], Iterator[tuple[str, Any]]] = lambda program, file: iter(())
    """Yields (place, row) for each row that a program generates (`stages.verifiers.row_programs`)."""


class Parsed(NamedTuple):
    """The parsed rows of a block."""

    rows: list[dict[str, Any]]
    """Records without ids."""
    bad: list[BadRow]
    places: list[str]
    """Where each record was read; its id there if it is from another stage; empty if it was generated."""
    columns: list[Mapping[str, Any]]
    """Requested further columns of each record."""
    out_of_turn: Mapping[str, int] = NOTHING
    """Fault and rule → rows that were cut, joined or kept."""


@dataclass(frozen=True)
class OpenSource:
    """A source whose blocks can be parsed in any process."""

    name: str
    blocks: Iterable[Block]
    parse: Callable[[Block], Parsed]
    portion: Portion = ALL
    """How many of its rows to take."""
    max_bad_rows: int | float = 0
    """A number, or a share of all rows read."""
    left_out: Mapping[str, int] = field(default_factory=dict)
    """Reason → number of rows omitted before parsing."""
    bad: tuple[BadRow, ...] = ()
    """Rows rejected before parsing."""
    record: RecordType | None = None
    """The type whose layouts its rows are read by."""

    def refuse(self, usable: int, bad: Sequence[BadRow]) -> None:
        """Raise PedigreeError for a source without a row, too many bad rows or too few usable ones."""
        read, limit = usable + len(bad), self.max_bad_rows
        if not (read or self.left_out):
            raise PedigreeError(f"{self.name}: empty, without any row: add rows, or name another source")
        bad = [row for row in bad if not row.out_of_turn]
        allowed = limit if isinstance(limit, int) else int(Fraction(str(limit)) * read)
        if len(bad) > allowed:
            counts = f"{len(bad)} malformed rows of {read}, and max_bad_rows {limit} allows {allowed}"
            remedy = (
                f"fix or remove them{', or raise it' if 2 * len(bad) < read else ''}" if usable else "fix the rows, or how they are read"
            )
            seen = next((f"\n  {row.place}: {hint(row.columns, self.record)}" for row in bad if row.columns), "")
            raise PedigreeError(f"{self.name}: {counts}: {remedy}:\n  {listed(bad)}{seen}")
        self.portion.refuse(f"{self.name}: {self.portion.wording}", self.portion.rows, usable, USABLE)


def opened(source: DataSource, record: RecordType, task: str | None, outside: Outside, beside: Sequence[str] = ()) -> OpenSource:
    """Open a source whose rows become records of one type, in a fixed order, with their columns in `beside` next to them.

    Raises PedigreeError if the source cannot provide this type of record, or StoreError if its data cannot be fetched.
    """
    match source:
        case Arithmetic():
            return _opened_examples("arithmetic", procedural.arithmetic(source), record, task)
        case Constraints():
            return _opened_examples("constraints", procedural.constraints(source), record, task)
        case Leaks():
            return _opened_examples("leak", leaks.plant(source, record, outside.suites), record, task)
        case StageRows():
            return _opened_rows(source, record, outside)
    name, blocks = _blocks(source, outside, beside)
    verifier, attributes, columns = None, {}, {}
    rules = source.out_of_turn if isinstance(source, Written) else layouts.IN_TURN
    if isinstance(source, Read):
        verifier, attributes, columns = source.verifier, source.attributes, {} if isinstance(source, Hub) else source.columns
    if attributes:  # adjacent rows are grouped across block boundaries
        blocks = row_files.in_blocks(grouped(_chosen((row for block in blocks for row in block()), columns), attributes))
        columns = {}

    def parse(block: Block) -> Parsed:
        met = Counter[str]()

        def made(row: Any) -> dict[str, Any]:
            example = layouts.example_of(row, verifier, rules, record)
            if isinstance(source, Read) and "hints" in source.columns:  # other rows may have a column of this name
                example = layouts.with_hints(example, row)
            if not isinstance(source, Read) or not source.columns:
                layouts.refuse_beside(row)
            valid = _valid(example, record, task, name, outside)
            met.update(f"{fault}: {getattr(rules, fault)}" for fault in example.out_of_turn)
            return valid

        def rows() -> Iterator[tuple[str, Any, Mapping[str, Any]]]:
            for place, row in block():
                given = select_columns(row, columns, beside)
                yield from ((*part, given.values) for part in layouts.unfolded(place, given.row, record))

        return _parsed(rows(), made)._replace(out_of_turn=met)

    return OpenSource(name, blocks, parse, _portion_of(source), _allowed_of(source), record=record)


def problem_of_first_rows(config: PrepareData, source: Files, outside: Outside) -> str | None:
    """Why the first rows of a file already make their stage fail, before any job reads them; None where they do not.

    Large JSON files, which are parsed whole, are left to the job, and so are worked examples of a form.
    """
    path, form = outside.files[source.path], config.the_form
    if path.suffix == ".json" and path.is_file() and path.stat().st_size > row_files.COUNTED_BYTES:
        return None
    try:
        given = opened(source, config.record, config.task, outside) if form is None else _opened_by(form, source, str(config.task), outside)
        blocks = iter(given.blocks)
        first = (part for part in map(given.parse, blocks) if part.rows or part.bad)  # the first file of a folder may be empty
        parsed = next(first, Parsed([], [], [], []))
        if not isinstance(source.max_bad_rows, int) and (parsed.rows or parsed.bad):
            return None
        name = given.name if next(blocks, None) is None else f"the first rows of {given.name}"
        replace(given, name=name, portion=ALL).refuse(len(parsed.rows), parsed.bad)
        there = row_files.rows_at_most(path)
        if source.count and not source.repeat and there is not None and source.count > there:
            return f"{given.name}: {given.portion.wording} > {there} rows: {given.portion.remedy}"
    except (PedigreeError, OSError) as error:
        return str(error)
    return None


def _opened_examples(name: str, examples: Sequence[Example], record: RecordType, task: str | None) -> OpenSource:
    """Open a generated source."""

    def made(example: Example) -> dict[str, Any]:
        try:
            return record_of(example, record, task, example.source or name)
        except ValueError as error:
            raise PedigreeError(f"{name}: {error}") from error

    return OpenSource(name, row_files.in_blocks(("", made(example)) for example in examples), _as_they_are)


def _opened_rows(source: StageRows, record: RecordType, outside: Outside) -> OpenSource:
    """Open another stage's rows, each group read by the process that parses it."""

    def parse(block: Block) -> Parsed:
        rows = ((place, row, NOTHING) for place, row in block())
        return _parsed(rows, lambda row: _valid(example_in(row), record, None, source.input, outside))

    blocks = (partial(_rows_in, group) for group in records.groups(outside.artifacts[source.input]))
    return OpenSource(source.input, blocks, parse, _portion_of(source))


def _rows_in(group: RowGroup) -> Iterator[tuple[str, Any]]:
    yield from ((row["id"], row) for row in group.read())


def _parsed(rows: Iterable[tuple[str, Any, Mapping[str, Any]]], make: Callable[[Any], dict[str, Any]]) -> Parsed:
    made, bad, places, columns = [], [], [], []
    for place, row, beside in rows:
        try:
            made.append(make(row))
            places.append(place)
            columns.append(beside)
        except Dropped as fault:
            bad.append(BadRow.of(place, f"dropped by `out_of_turn.{fault}`", row)._replace(out_of_turn=str(fault)))
        except ValueError as error:
            bad.append(BadRow.of(place, str(error), row))
    return Parsed(made, bad, places, columns)


def _portion_of(source: RowSource | RowProgram | StageRows) -> Portion:
    """The portion of a source without its share, whose total only the stage knows."""
    return Portion.of(source, source.count, None)


def _as_they_are(block: Block) -> Parsed:
    given = list(block())
    return Parsed([row for _, row in given], [], [place for place, _ in given], [NOTHING] * len(given))


def _blocks(source: RowSource | RowProgram, outside: Outside, beside: Sequence[str] = ()) -> tuple[str, Iterator[Block]]:
    """(source name, blocks) of an external source. Hub rows already have their columns selected."""
    match source:
        case Packaged(asset="ifeval"):
            return "ifeval", row_files.in_blocks(_ifeval(assets.path("ifeval")))
        case Packaged(asset=asset):
            return asset, row_files.blocks(assets.path(asset))
        case Files(path=path):
            return _in_file(Path(path).name.removesuffix(row_files.ending(Path(path))), outside.files[path], source.columns)
        case RowProgram(path=path):
            return Path(path).stem, row_files.in_blocks(outside.run(source, outside.files[path]))
        case Stored(name=name):
            return _in_file(name, fetched(source, outside.beat), source.columns)
        case Hub():
            return source.repo.rpartition("/")[2], row_files.in_blocks(hub.rows(source, outside.beat, outside.mark, beside))


def _in_file(name: str, path: Path, columns: Mapping[str, str]) -> tuple[str, Iterator[Block]]:
    """(source name, blocks) of a file. Raises PedigreeError if no row has one of the chosen columns."""
    unknown, instead = named_columns.lacking((row for _, row in row_files.read(path)), columns) if columns else ([], [])
    if unknown:
        raise PedigreeError(f"{name} has no column {', '.join(unknown)}: its first row has {', '.join(instead)}")
    return name, row_files.blocks(path)


def raw(source: RowSource, outside: Outside) -> tuple[str, Iterator[tuple[str, Any]]]:
    """(source name, iterator of (place, row) in the source's own columns)."""
    if isinstance(source, Packaged):
        return source.asset, row_files.read(assets.path(source.asset))
    name, blocks = _blocks(source, outside)
    columns = source.columns if isinstance(source, (Files, Stored)) else {}
    return name, _chosen((row for block in blocks for row in block()), columns)


def _chosen(rows: Iterator[tuple[str, Any]], columns: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
    """The rows with the chosen columns only, under the names that layouts use."""
    for place, row in rows:
        yield place, select_columns(row, columns, ()).row


def opened_items(source: RowSource, form: Form, task: str, shots: Shots | None, outside: Outside) -> OpenSource:
    """Open a benchmark whose rows become items by a form. All rows are parsed here, because items depend on each other.

    Raises PedigreeError if worked examples are too few or malformed, or StoreError if its data cannot be fetched.
    """
    name, rows = raw(source, outside)
    examples = list(raw(shots.source, outside)[1]) if shots else None

    def problem(item: dict[str, Any]) -> str | None:
        return row_problem(item, "item", outside.check_verifier)

    made = forms.make(form, rows, task=task, source=name, shots=examples, seed=shots.seed if shots else None, problem=problem)
    items = row_files.in_blocks(("", item) for item in made.items)
    return OpenSource(name, items, _as_they_are, _portion_of(source), _allowed_of(source), made.left_out, made.bad)


def _opened_by(form: Form, source: Files, task: str, outside: Outside) -> OpenSource:
    """Open a benchmark as `opened_items` does, but block by block and without worked examples."""
    alone = form.model_copy(update={"prompt": form.prompt.model_copy(update={"shots": 0})})
    name, blocks = _blocks(source, outside)

    def parse(block: Block) -> Parsed:
        rows = _chosen(iter(block()), source.columns)
        made = forms.make(alone, rows, task=task, source=name, problem=lambda item: row_problem(item, "item", outside.check_verifier))
        return Parsed(list(made.items), list(made.bad), [], [])

    return OpenSource(name, blocks, parse, _portion_of(source), _allowed_of(source))


def _allowed_of(source: RowSource | RowProgram) -> int | float:
    return source.max_bad_rows if isinstance(source, Written) else 0


def fetched(source: Stored, beat: Callable[[], None] = lambda: None) -> Path:
    """The source's file in the machine-wide cache; downloaded if missing.

    Raises StoreError if it cannot be fetched, or the file at its URL has another hash, with both hashes.
    """
    file = row_files.cached_at(source, source.sha256)
    if file.is_file() and sha256_file(file) != source.sha256:
        print(f"{file} is damaged; fetching it again", flush=True)
        file.unlink()
    if not file.is_file():
        print(f"source {source.name}: fetching {source.url} ...", flush=True)
        try:
            storage.download(source.url, file, source.sha256, beat)
        except ContentChanged as error:
            raise ContentChanged(f"source {source.name}: {error}, or correct `sha256` to use the new file") from error
        except Missing as error:
            raise Missing(f"source {source.name}: {error}: correct `url`, or put the file with this hash at {file}") from error
    return file


def _ifeval(file: Path) -> Iterator[tuple[str, Any]]:
    """IFEval's prompts with their instructions."""
    for place, row in row_files.read(file):
        instructions = instructions_of(row["instruction_id_list"], row["kwargs"])
        yield place, {"prompt": row["prompt"], "verifier": {"name": "ifeval", "instructions": instructions}}


def _valid(example: Example, record: RecordType, task: str | None, name: str, outside: Outside) -> dict[str, Any]:
    """An external example as a valid row of one type, without its id.

    Raises ValueError, one sentence, if it lacks a part that the type requires, or violates an expectation.
    """
    made = record_of(example, record, task, example.source or name)
    if problem := row_problem(made, record, outside.check_verifier):
        raise ValueError(problem)
    return made
