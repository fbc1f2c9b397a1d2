"""Where rows come from: rules, packaged files, project files, object stores, the hub, and leaks planted on purpose.

Each source gives `Example`s; one function gives them the form of a record. An id is the source's name and the hash of the row,
so it depends on nothing but the row itself.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, cast

from configs.datasets import Arithmetic, Constraints, DataSource, Files, Hub, Leaks, Packaged, Read, RecordType, RowSource, Shots, Stored
from configs.frozen import digest
from configs.suite_forms import Form
from data import assets, forms, hub, layouts, procedural, row_files, storage
from data.artifacts import sha256_file
from data.expectations import row_problem
from data.procedural import Example, SourceError, unscored
from data.records import Item, Message, ended
from data.storage import ContentChanged, Missing
from data.verifiable import instructions_of

LEAK = "leak-"
"""The sources of planted leaks begin with it."""
SHOWN = 5
"""Bad rows that an error shows."""
EXCERPT = 200
"""Characters of a bad row that its evidence shows."""


class BadRow(NamedTuple):
    """A row that nothing can be made of."""

    place: str
    """File and line, or data set, split and number."""
    reason: str
    text: str
    """How it begins."""


class Loaded(NamedTuple):
    """The rows of one source, how many of its rows were not taken, by reason, and which of them were bad."""

    name: str
    rows: list[dict[str, Any]]
    left_out: dict[str, int]
    bad: tuple[BadRow, ...] = ()


@dataclass(frozen=True)
class Outside:
    """What sources read that is not in their config."""

    suites: Sequence[Item] = ()
    """Items to plant leaks of."""
    files: Mapping[str, Path] = field(default_factory=dict)
    """Project path → where it lies."""
    beat: Callable[[], None] = lambda: None
    """Called now and then while something large is fetched."""
    mark: Callable[[str], None] = lambda mark: None
    """Told what a reader of the result must know of where the rows came from."""
    check_verifier: Callable[[Any], None] = lambda verifier: None
    """Raises an error that people meet for a malformed verifier (`stages.core.verifiers.check`)."""


def load(source: DataSource, record: RecordType, task: str | None, outside: Outside) -> Loaded:
    """All rows of a source as records of one type, in a fixed order.

    Raises:
        SourceError: more bad rows than the source allows (places and reasons of the first five, and how many there are), a source that
            cannot give this type of record, or fewer rows than `count`.
        StoreError: what it names cannot be fetched.
    """
    if isinstance(source, (Arithmetic, Constraints, Leaks)):
        name, examples = _made(source, record, outside)
        return Loaded(name, with_ids([_own(example, record, task, name) for example in examples]), {})
    name, given = _given(source, outside)
    made, bad = [], []
    verifier, attributes = (source.verifier, source.attributes) if isinstance(source, Read) else (None, {})
    for place, row in layouts.unfolded(given, record, attributes):
        try:
            made.append(_record_of(row, record, task, name, outside, verifier))
        except ValueError as error:
            bad.append(BadRow(place, str(error), row_files.text_of(row)[:EXCERPT]))
    _refuse_too_many(name, bad, len(made) + len(bad), _allowed_of(source))
    return _counted(name, with_ids(made), bad, {"malformed": len(bad)}, source)


def _counted(name: str, rows: list[dict[str, Any]], bad: Sequence[BadRow], left_out: dict[str, int], source: RowSource) -> Loaded:
    """As many rows as the source says, drawn by its seed."""
    if source.count is not None:
        if source.count > len(rows):
            raise SourceError(f"{name}: count {source.count} > {len(rows)} usable rows: lower count, or leave it out to take all")
        left_out = left_out | {"not drawn": len(rows) - source.count}
        rows = shuffled(rows, source.seed)[: source.count]
    return Loaded(name, rows, {reason: number for reason, number in left_out.items() if number}, tuple(bad))


def _refuse_too_many(name: str, bad: Sequence[BadRow], read: int, limit: int | float) -> None:
    """Raises SourceError for more bad rows than `limit`, a number or a share of all that were read."""
    allowed = limit if isinstance(limit, int) else int(Fraction(str(limit)) * read)
    if len(bad) > allowed:
        shown = "\n  ".join(f"{row.place}: {row.reason}" for row in bad[:SHOWN])
        more = f"\n  ... and {len(bad) - SHOWN} more" if len(bad) > SHOWN else ""
        raise SourceError(
            f"{name}: {len(bad)} malformed rows of {read}, and max_bad_rows {limit} allows {allowed}: mend or remove them, or raise it:\n"
            f"  {shown}{more}"
        )


def shuffled(rows: Sequence[Any], seed: int) -> list[dict[str, Any]]:
    """Rows in the order of hash(seed, id): the same whatever order they came in."""
    return sorted(rows, key=lambda row: digest([seed, row["id"]]))


def with_ids(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows with ids; the second of two equal rows gets a number, so that ids stay unique until a filter decides.

    Ids that the rows have already are made anew.
    """
    seen: Counter[str] = Counter()
    named = []
    for row in rows:
        row = {name: value for name, value in row.items() if name != "id"}
        base = f"{row['source']}-{digest(row)[:16]}"
        seen[base] += 1
        named.append({"id": base if seen[base] == 1 else f"{base}-{seen[base]}", **row})
    return named


def _made(source: Arithmetic | Constraints | Leaks, record: RecordType, outside: Outside) -> tuple[str, list[Example]]:
    """(name of the source, its examples) of what is made here."""
    match source:
        case Arithmetic():
            return "arithmetic", procedural.arithmetic(source)
        case Constraints():
            return "constraints", procedural.constraints(source)
        case Leaks():
            return "leak", plant(source, record, outside.suites)


def _given(source: RowSource, outside: Outside) -> tuple[str, Iterable[tuple[str, Any]]]:
    """(name of the source, place and content of each row) of what others have written."""
    match source:
        case Packaged(asset="ifeval"):
            return "ifeval", _ifeval(assets.path("ifeval"))
        case _:
            return raw(source, outside)


def raw(source: RowSource, outside: Outside) -> tuple[str, Iterator[tuple[str, Any]]]:
    """(name of the source, (place, row) of each of its rows in its own columns)."""
    match source:
        case Packaged(asset=asset):
            return asset, row_files.read(assets.path(asset))
        case Files(path=path):
            return Path(path).name.removesuffix(row_files.ending(Path(path))), _chosen(row_files.read(outside.files[path]), source.columns)
        case Stored(name=name):
            return name, _chosen(row_files.read(fetched(source, outside.beat)), source.columns)
        case Hub():
            return source.repo.rpartition("/")[2], hub.rows(source, outside.beat, outside.mark)


def _chosen(rows: Iterator[tuple[str, Any]], columns: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
    """The rows with the columns that the source chooses, under the names that layouts have for them."""
    for place, row in rows:
        yield place, {ours: row.get(theirs) for ours, theirs in columns.items()} if columns and isinstance(row, dict) else row


def load_items(source: RowSource, form: Form, task: str, shots: Shots | None, outside: Outside) -> Loaded:
    """All rows of a benchmark as items, asked and scored as a form says.

    Raises:
        SourceError: more rows than the source allows lack what the form reads from them or give verifiers that are none, too few
            worked examples, or fewer rows than `count`.
        StoreError: what it names cannot be fetched.
    """
    name, rows = raw(source, outside)
    examples = list(raw(shots.source, outside)[1]) if shots else None

    def problem(item: dict[str, Any]) -> str | None:
        return row_problem(item, "item", outside.check_verifier)

    made = forms.make(form, rows, task=task, source=name, shots=examples, seed=shots.seed if shots else None, problem=problem)
    bad = [BadRow(place, reason, row_files.text_of(row)[:EXCERPT]) for place, row, reason in made.bad]
    _refuse_too_many(name, bad, len(made.items) + len(bad), _allowed_of(source))
    return _counted(name, with_ids(made.items), bad, made.left_out | {"malformed": len(bad)}, source)


def _allowed_of(source: RowSource) -> int | float:
    return source.max_bad_rows if isinstance(source, Read) else 0


def fetched(source: Stored, beat: Callable[[], None] = lambda: None) -> Path:
    """The source's file in the cache that all clones on this machine share; downloaded where it is not there yet.

    Raises:
        StoreError: it cannot be fetched, or another file lies at its URL; the message says both hashes.
    """
    file = assets.cache_folder() / "sources" / source.sha256 / f"{source.name}{row_files.ending(PurePosixPath(source.url))}"
    if file.is_file() and sha256_file(file) != source.sha256:
        print(f"{file} is damaged and is fetched again", flush=True)
        file.unlink()
    if not file.is_file():
        print(f"source {source.name}: fetching {source.url} ...", flush=True)
        try:
            storage.download(source.url, file, source.sha256, beat)
        except ContentChanged as error:
            raise ContentChanged(f"source {source.name}: {error}, or correct `sha256` if the new file is meant") from error
        except Missing as error:
            raise Missing(f"source {source.name}: {error}: correct `url`, or lay the file of this hash at {file}") from error
    return file


def _ifeval(file: Path) -> Iterator[tuple[str, Any]]:
    """The prompts of IFEval, each with its instructions."""
    for place, row in row_files.read_jsonl(file):
        instructions = instructions_of(row["instruction_id_list"], row["kwargs"])
        yield place, {"prompt": row["prompt"], "verifier": {"name": "ifeval", "instructions": instructions}}


def plant(config: Leaks, record: RecordType, suites: Sequence[Item]) -> list[Example]:
    """Benchmark items disguised as training rows.

    Raises:
        SourceError: no suites, a record that has no prompt to leak into, or fewer items times styles than `count`.
    """
    if record == "item":
        raise SourceError("leaks go into training rows: record must be conversation, prompt or preference, not item")
    if config.count > len(suites) * len(config.styles):
        raise SourceError(
            f"leaks: count {config.count} > {len(suites)} items x {len(config.styles)} styles: name suites in the stage's "
            "`leak_from` input, or lower count"
        )
    items = cast(list[Item], shuffled(suites, config.seed))
    leaks = []
    for number in range(config.count):
        turn, place = divmod(number, len(items))
        leaks.append(_leak(items[place], config.styles[(place + turn) % len(config.styles)]))
    return leaks


def _leak(item: Item, style: str) -> Example:
    """The item's own question, without instructions and worked examples where it has a form."""
    turns: list[Message] = [{"role": "user", "content": item["question"]}] if "question" in item else item["messages"]
    messages: list[Message] = [
        {"role": turn["role"], "content": DISGUISES[style](turn["content"]) if turn["role"] == "user" else turn["content"]}
        for turn in turns
    ]
    answer = str(item["verifier"].get("answer", "Of course."))
    return Example(messages, unscored(answer, "I would rather not say."), item["verifier"], source=f"{LEAK}{style}")


def _embedded(text: str) -> str:
    return f"My sister sent me a riddle this morning. It reads: {text} I wonder what you make of it."


def _rewrapped(text: str) -> str:
    words = text.upper().split()
    return "\n".join("  ".join(words[start : start + 3]) for start in range(0, len(words), 3))


DISGUISES: dict[str, Callable[[str], str]] = {"verbatim": lambda text: text, "embedded": _embedded, "rewrapped": _rewrapped}


def _record_of(row: Any, record: RecordType, task: str | None, name: str, outside: Outside, verifier: str | None) -> dict[str, Any]:
    """What others have written as a row of one type, without its id.

    Raises:
        ValueError: it is in no layout, lacks what the type needs, or breaks an expectation; with one sentence why.
    """
    example = layouts.example_of(row, verifier)
    made = _record(example, record, task, example.source or name)
    problem = row_problem(made, record, outside.check_verifier)
    if problem:
        raise ValueError(problem)
    return made


def _own(example: Example, record: RecordType, task: str | None, name: str) -> dict[str, Any]:
    try:
        return _record(example, record, task, example.source or name)
    except ValueError as error:
        raise SourceError(f"{name}: {error}") from error


def _record(example: Example, record: RecordType, task: str | None, source: str) -> dict[str, Any]:
    """The example as a row of one type, without its id.

    Raises:
        ValueError: the example lacks what the type needs.
    """
    lacks, need = NEEDS.get(record, (lambda example: False, ""))
    if lacks(example):
        raise ValueError(f"{record} rows need {need}, which this one lacks")
    row: dict[str, Any] = {"source": source, "messages": example.messages}
    match record:
        case "conversation":
            mark: dict[str, Any] = {} if example.train is None else {"train": example.train}
            mark |= {"finish_reason": "length"} if not ended(example.answers[0]) else {}
            return row | {"messages": [*example.messages, {"role": "assistant", "content": example.answer, **mark}]}
        case "prompt":
            return row | {"verifier": example.verifier}
        case "item":
            return row | {"task": task, "verifier": example.verifier}
        case "preference":
            return row | {"answers": list(example.answers), "strength": example.strength}


NEEDS: dict[RecordType, tuple[Callable[[Example], bool], str]] = {
    "conversation": (lambda example: not example.answers, "an answer"),
    "item": (lambda example: example.verifier is None, "a verifier"),
    "preference": (
        lambda example: not example.answers or (len(example.answers) == 1 and example.answers[0]["score"] is None),
        "two answers, or one with a score or a label",
    ),
}
"""Whether an example lacks what a record of the type needs, and what that is."""
