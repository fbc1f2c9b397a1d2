"""Where rows come from: rules, packaged files, project files, object stores, the hub, and leaks planted on purpose.

Each source gives `Example`s; one function gives them the form of a record. An id is the source's name and the hash of the row,
so it depends on nothing but the row itself.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, cast

from configs.datasets import Arithmetic, Constraints, DataSource, Files, Hub, Leaks, Packaged, RecordType, Stored
from configs.frozen import digest
from data import assets, layouts, procedural, storage
from data.artifacts import sha256_file
from data.procedural import Example, SourceError, unscored
from data.records import Item, Message, ended
from data.storage import ContentChanged, Missing

LEAK = "leak-"
"""The sources of planted leaks begin with it."""


class Loaded(NamedTuple):
    """The rows of one source, and how many of its rows were not taken, by reason."""

    name: str
    rows: list[dict[str, Any]]
    left_out: dict[str, int]


@dataclass(frozen=True)
class Outside:
    """What sources read that is not in their config."""

    suites: Sequence[Item] = ()
    """Items to plant leaks of."""
    files: Mapping[str, Path] = field(default_factory=dict)
    """Project path → where it lies."""
    beat: Callable[[], None] = lambda: None
    """Called now and then while something large is fetched."""


def load(source: DataSource, record: RecordType, task: str | None, outside: Outside) -> Loaded:
    """All rows of a source as records of one type, in a fixed order.

    Raises:
        SourceError: malformed rows (file and line of the first five, and how many there are), a source that cannot give this
            type of record, or fewer rows than `count`.
    """
    name, examples, left_out = _examples(source, record, outside)
    rows = with_ids([_record(example, record, task, example.source or name) for example in examples])
    count = getattr(source, "count", None)
    if isinstance(source, (Packaged, Files, Stored, Hub)) and count is not None:
        if count > len(rows):
            raise SourceError(f"{name}: count {count} > {len(rows)} usable rows: lower count, or leave it out to take all")
        left_out = left_out | {"not drawn": len(rows) - count}
        rows = shuffled(rows, source.seed)[:count]
    return Loaded(name, rows, {reason: number for reason, number in left_out.items() if number})


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


def _examples(source: DataSource, record: RecordType, outside: Outside) -> tuple[str, list[Example], dict[str, int]]:
    """(name of the source, its examples, rows it does not offer by reason)."""
    match source:
        case Arithmetic():
            return "arithmetic", procedural.arithmetic(source), {}
        case Constraints():
            return "constraints", procedural.constraints(source), {}
        case Leaks():
            return "leak", plant(source, record, outside.suites), {}
        case Packaged(asset="ifeval"):
            return "ifeval", *_ifeval(assets.path("ifeval"))
        case Packaged(asset=asset):
            return asset, layouts.parse(layouts.read(assets.path(asset))), {}
        case Files(path=path):
            return Path(path).stem, layouts.parse(layouts.read(outside.files[path])), {}
        case Stored(name=name):
            return name, layouts.parse(layouts.read(fetched(source, outside.beat))), {}
        case Hub():
            return source.repo.rpartition("/")[2], layouts.parse(_read_hub(source)), {}


def fetched(source: Stored, beat: Callable[[], None] = lambda: None) -> Path:
    """The source's file in the cache that all clones on this machine share; downloaded where it is not there yet.

    Raises:
        StoreError: it cannot be fetched, or another file lies at its URL; the message says both hashes.
    """
    file = assets.cache_folder() / "sources" / source.sha256 / f"{source.name}{PurePosixPath(source.url).suffix}"
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


def _read_hub(source: Hub) -> Iterator[tuple[str, Any]]:
    import datasets

    if Path(source.repo).exists():  # the library would take the folder instead
        raise SourceError(f"hub source {source.repo}: a file or folder of that name lies here, and would be read instead: rename it")
    try:
        rows: Any = datasets.load_dataset(source.repo, split=source.split, revision=source.revision)
    except ValueError as error:  # e.g. a split that it does not have
        raise SourceError(f"hub source {source.repo}: {error}") from error
    yield from ((f"{source.repo}/{source.split}[{number}]", dict(row)) for number, row in enumerate(rows))


IFEVAL_CHECKS = {
    "change_case:english_lowercase": "lowercase",
    "punctuation:no_comma": "no_comma",
    "startend:quotation": "quotation",
    "detectable_format:title": "title",
    "length_constraints:number_words": "word_count",
}


def _ifeval(file: Path) -> tuple[list[Example], dict[str, int]]:
    """The prompts of IFEval whose instructions are all among our checks."""
    examples, others = [], 0
    for _, row in layouts.read_jsonl(file):
        if not set(row["instruction_id_list"]) <= set(IFEVAL_CHECKS):
            others += 1
            continue
        checks = [_ifeval_check(name, given) for name, given in zip(row["instruction_id_list"], row["kwargs"], strict=True)]
        verifier = {"name": "ifeval", "checks": checks}
        examples.append(Example([{"role": "user", "content": row["prompt"]}], verifier=verifier))
    return examples, {"checks that we lack": others}


def _ifeval_check(name: str, given: dict[str, Any]) -> dict[str, Any]:
    if IFEVAL_CHECKS[name] != "word_count":
        return {"name": IFEVAL_CHECKS[name]}
    if given["relation"] == "at least":
        return {"name": "word_count", "relation": "at least", "words": given["num_words"]}
    return {"name": "word_count", "relation": "at most", "words": given["num_words"] - 1}  # "less than"


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
    messages: list[Message] = [
        {"role": turn["role"], "content": DISGUISES[style](turn["content"]) if turn["role"] == "user" else turn["content"]}
        for turn in item["messages"]
    ]
    answer = item["verifier"].get("answer", "Of course.")
    return Example(messages, unscored(answer, "I would rather not say."), item["verifier"], source=f"{LEAK}{style}")


def _embedded(text: str) -> str:
    return f"My sister sent me a riddle this morning. It reads: {text} I wonder what you make of it."


def _rewrapped(text: str) -> str:
    words = text.upper().split()
    return "\n".join("  ".join(words[start : start + 3]) for start in range(0, len(words), 3))


DISGUISES: dict[str, Callable[[str], str]] = {"verbatim": lambda text: text, "embedded": _embedded, "rewrapped": _rewrapped}


def _record(example: Example, record: RecordType, task: str | None, source: str) -> dict[str, Any]:
    """The example as a row of one type, without its id.

    Raises:
        SourceError: the example lacks what the type needs.
    """
    lacks, need = NEEDS.get(record, (lambda example: False, ""))
    if lacks(example):
        question = example.messages[-1]["content"][:80]
        raise SourceError(f"{source}: {record} rows need {need}, which the row {question!r} lacks")
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
