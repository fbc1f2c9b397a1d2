"""The rows that stages exchange. On disk they lie in columns, in `payload/rows-00000.parquet` and so on (`data/records/columns.py`); the
scores of answers and other results, which people read too, are lines of `payload/rows.jsonl`.

Messages are `{"role": "system" | "user" | "assistant" | "call" | "tool", "content": str}`; a call is the assistant's, and a tool's content
is what came of one (`data/chat/tools.py`). An assistant's may have a mark `"train": true | false`, which all data stages keep. A verifier
is a name and its arguments, e.g. `{"name": "arithmetic", "answer": "42"}` (see `stages/verifiers/__init__.py`), or null where nothing can
be checked.

An answer that was cut off by its length limit has the `finish_reason` `length` in every record that it goes through, up to its tokens:
no end-of-turn token is added to what did not end, so that nothing is taught to stop there.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, NotRequired, TypedDict

from configs.base.frozen import canonical_json
from configs.base.problems import PedigreeError
from configs.rows.suite_forms import Form
from data.artifacts.artifacts import Artifact, write_rows
from data.records.sequences import InParts
from data.store.untrusted import RESTORE, ArtifactError, read_lines

if TYPE_CHECKING:
    from pyarrow import Table

FinishReason = Literal["stop", "length"]
"""How an answer ended: by its end token, or cut off by the length limit."""


class Message(TypedDict):
    role: str
    content: str
    train: NotRequired[bool]
    """Of the assistant's turns, calls among them: whether SFT with `train_on: marked` trains it."""
    finish_reason: NotRequired[FinishReason]
    """Of the last turn, where it is the assistant's; `stop` where it is absent."""


class Conversation(TypedDict):
    """{"id": "arithmetic-3f2a", "source": "arithmetic", "messages": [user, assistant, ...]}; the last turn is the
    assistant's, which may end with calls."""

    id: str
    source: str
    messages: list[Message]
    template_arguments: NotRequired[dict[str, Any]]
    """Variables of the chat template → their values, e.g. {"enable_thinking": false}, in this record and all that are made of it."""


class Prompt(TypedDict):
    """A conversation that ends with the user's turn or with results, and how to check an answer."""

    id: str
    """Of one that was made of another prompt: the other's with what was made of it behind a slash, see `made_id`."""
    source: str
    messages: list[Message]
    verifier: dict[str, Any] | None
    template_arguments: NotRequired[dict[str, Any]]


class Item(TypedDict):
    """A prompt of a benchmark. What a form adds (`configs/rows/suite_forms.py`) is there only where the form has it."""

    id: str
    source: str
    task: str
    messages: list[Message]
    """With instructions and worked examples."""
    verifier: dict[str, Any]
    """Of the primary metric."""
    question: NotRequired[str]
    """The question alone: what decontamination compares; the turns of the user where it is absent."""
    category: NotRequired[str]
    prefix: NotRequired[str]
    """How the assistant's turn begins."""
    choices: NotRequired[list[str]]
    """What the assistant might say, to be compared by likelihood."""
    others: NotRequired[dict[str, dict[str, Any]]]
    """Metric → its verifier, where that is not the primary one's."""
    weights: NotRequired[dict[str, float]]
    """Metric → how much the item counts in its average."""


class Answer(TypedDict):
    """What was said to a prompt, and how good it was found; null where nobody gave a number."""

    text: str
    score: float | None
    finish_reason: NotRequired[FinishReason]
    """`stop` where it is absent."""
    win_rate: NotRequired[float | None]
    """P(it is better than an answer that the sampled policies give to the prompt), see `stages.judge.win_rates`."""
    policy: NotRequired[str]
    """Of a sampled answer: the label of the policy that gave it,"""
    policy_content: NotRequired[str]
    """its content hash,"""
    on_policy: NotRequired[bool]
    """and whether it is the one to be trained."""


class Preference(TypedDict):
    """Answers to one prompt, best first: two are a pair, more a ranked list, one is a scored single (1 good, 0 bad)."""

    id: str
    source: str
    messages: list[Message]
    answers: list[Answer]
    strength: float | None
    """P(the first answer is better than the second), of pairs only; null means certain."""
    template_arguments: NotRequired[dict[str, Any]]


class Completion(TypedDict):
    """One sampled answer and all that says where it came from."""

    id: str
    """`PROMPT_ID/POLICY_LABEL/INDEX`."""
    prompt_id: str
    source: str
    messages: list[Message]
    verifier: dict[str, Any] | None
    policy: str
    """Label of the policy at the stage's input."""
    policy_content: str
    """Content hash of that policy."""
    on_policy: bool
    """Whether that policy is the one to be trained, as the recipe says (`on_policy`)."""
    index: int
    seed: int
    temperature: NotRequired[float]
    """At which it was drawn, where the answers to a prompt have several."""
    prompt_ids: list[int]
    response_ids: list[int]
    logprobs: list[float]
    """Of each response token under the sampling distribution."""
    text: str
    finish_reason: FinishReason
    """`stop`: the end token was drawn, and is the last of `response_ids`."""
    template_arguments: NotRequired[dict[str, Any]]


class AspectRating(TypedDict):
    """What a language model said of one answer and one aspect."""

    rating: int | None
    """1 to 5; null where it gave none that can be told for certain."""
    text: str | None
    """All that it said; null where it said nothing."""


class Judgment(TypedDict):
    """One answer and its scores; a judge that could not score leaves null, never a number."""

    id: str
    prompt_id: str
    source: str
    messages: list[Message]
    policy: str
    policy_content: str
    on_policy: bool
    text: str
    finish_reason: FinishReason
    temperature: NotRequired[float]
    """The completion's."""
    response_length: int
    verifier_score: float | None
    rewards: dict[str, float | None]
    """Label of a reward model → its score, raw; empty where none was asked."""
    reward: float | None
    """What the ensemble makes of them: in standard deviations of the members' held-out answers."""
    disagreement: float | None
    """Standard deviation of the normalised rewards over the members, of two or more."""
    ratings: dict[str, AspectRating]
    """Name of a rubric → what a language model made of the answer; empty where none was asked."""
    rating: float | None
    """Mean of `ratings`; null unless all of them are there."""
    score: float | None
    win_rate: float | None
    """Of the scored answers: P(it is better than one of them, itself included, drawn at random), see `stages.judge.win_rates`."""
    template_arguments: NotRequired[dict[str, Any]]


class AnswerScore(TypedDict):
    """One of several answers to a benchmark item."""

    text: str
    answer: str | None
    """What the primary verifier extracted."""
    scores: dict[str, float | None]
    """Metric → score; null where nobody can say."""
    reason: str


class ItemScore(TypedDict):
    """One policy's answer to one benchmark item, or its answers."""

    id: str
    task: str
    policy: str
    text: str
    """Of several answers the first."""
    answer: str | None
    """What the verifier extracted from it."""
    score: float | None
    """By the primary metric; null where it is unknown, which is not the same as wrong."""
    reason: str
    scores: dict[str, float | None]
    """Every metric → score."""
    category: NotRequired[str]
    """The item's, where the task's score is an average over categories."""
    answers: NotRequired[list[AnswerScore]]
    """All of several answers."""
    logprobs: NotRequired[list[float]]
    """Of choices that were compared: Σ log P over the tokens of each."""


class Context(TypedDict):
    """What is rendered with the messages of a record."""

    template_arguments: NotRequired[dict[str, Any]]


def context_of(row: Mapping[str, Any]) -> Context:
    """For the record that is made of a row."""
    return {"template_arguments": row["template_arguments"]} if "template_arguments" in row else {}


def made_id(prompt_id: str, part: str) -> str:
    """The id of a prompt that is made of another one, e.g. `chat-3f2a/constrained`: all that is made of it in turn names it, and so the
    one that it was made of, as completions and judgments name their prompt."""
    return f"{prompt_id}/{part}"


def made_of(prompt_id: str, part: str) -> str | None:
    """The id of the prompt that one was made of in this way; None where it was not."""
    return prompt_id.removesuffix(f"/{part}") if prompt_id.endswith(f"/{part}") else None


def texts_within(value: Any) -> Iterator[str]:
    """Every text of a value of JSON, names of fields included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield name
            yield from texts_within(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from texts_within(inner)


def ended(row: Mapping[str, Any]) -> bool:
    """Whether an answer, completion, judgment or message came to its end."""
    return row.get("finish_reason") != "length"


FORM_FILE = "form.json"
"""In the payload of a suite with a form: the form, with its name."""


def form_of(suite: Artifact) -> Form | None:
    """How a suite is asked and scored; None where its items are prompts with verifiers and no more."""
    file = suite.payload / FORM_FILE
    if not file.is_file():
        return None
    given = json.loads(file.read_text())
    name = given.pop("name")
    return Form.model_validate({"description": name, "origin": f"configs/forms/{name}.yaml", **given})


def check_ids(ids: Iterable[str]) -> None:
    """No id stands there twice.

    Raises:
        PedigreeError: one does, e.g. because a part was read twice: its answer would count twice.
    """
    twice = [name for name, count in Counter(ids).items() if count > 1]
    if twice:
        raise PedigreeError(f"{len(twice)} ids stand in the rows more than once, e.g. {twice[0]!r}: make the stage before this one again")


RECORDS: dict[str, type] = {
    "conversation": Conversation,
    "prompt": Prompt,
    "item": Item,
    "preference": Preference,
    "completion": Completion,
    "judgment": Judgment,
}
"""Type of artifact → type of its rows, which lie in columns."""
ROW_FILE = re.compile(r"rows\.jsonl|rows-[0-9]{5}\.parquet")


def row_files(names: Iterable[str]) -> list[str]:
    """The names of those files of a payload that hold its rows, in their order; none where it is no data."""
    return sorted(name for name in names if ROW_FILE.fullmatch(name))


def file_name(number: int) -> str:
    return f"rows-{number:05d}.parquet"


def rows_in(stream: BinaryIO, name: str, fields: Sequence[str] | None = None) -> Iterator[dict[str, Any]]:
    """The rows of one file of an artifact, whoever made it.

    Args:
        stream: of the file.
        name: of the file.
        fields: to read of each row, where it has them; None: all. Few of them take a small part of the time.

    Raises:
        ArtifactError: it holds no rows, or not those of a known type.
    """
    if name.endswith(".jsonl"):
        rows = read_lines(stream, name)
        yield from rows if fields is None else ({field: row[field] for field in fields if field in row} for row in rows)
        return
    from data.records import columns

    for table in columns.read(stream, name, fields):
        yield from _rows(table, name, fields)


def _rows(table: "Table", name: str, fields: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """The rows of a table that was read from a file of this name."""
    from data.records import columns

    record = columns.type_of(table)
    if record not in RECORDS or table.schema != columns.schema_of(RECORDS[record], fields):
        raise ArtifactError(f"{name} has other columns than rows of type {record!r:.80} have here: another version wrote it; {RESTORE}")
    try:
        return columns.to_rows(table, RECORDS[record])
    except (ValueError, RecursionError) as error:  # JSON within
        raise ArtifactError(f"{name} cannot be read ({error!s:.300}); {RESTORE}") from error


def count(file: Path) -> int:
    """How many rows a file holds, by its own word where it has columns."""
    if file.suffix == ".jsonl":
        with file.open("rb") as stream:
            return sum(1 for _ in stream)
    from data.records import columns

    return columns.count(file, file.name)


def stream(payload: Path, fields: Sequence[str] | None = None) -> Iterator[dict[str, Any]]:
    """The rows of a data artifact's payload, one after another; `fields` as in `rows_in`.

    Raises:
        ArtifactError: it has none, or they cannot be read.
    """
    files = row_files(path.name for path in payload.iterdir())
    if not files:
        raise ArtifactError(f"{payload} holds no rows; {RESTORE}")
    for name in files:
        with (payload / name).open("rb") as file:
            yield from rows_in(file, name, fields)


def load(artifact: Artifact) -> list[dict[str, Any]]:
    """All rows of a data artifact, in memory."""
    return list(stream(artifact.payload))


def opened(artifact: Artifact) -> Sequence[dict[str, Any]]:
    """The rows of a data artifact, read when they are asked for; results, which lie in lines, all at once.

    Raises:
        ArtifactError: it has none, or they cannot be read.
    """
    files = [artifact.payload / name for name in row_files(path.name for path in artifact.payload.iterdir())]
    return InGroups(files) if files and all(file.suffix == ".parquet" for file in files) else load(artifact)


class InGroups(InParts[dict[str, Any]]):
    """The rows of files, those that were written together being a part."""

    def __init__(self, files: Sequence[Path]) -> None:
        from data.records import columns

        found = [(file, number, rows) for file in files for number, rows in enumerate(columns.groups(file))]
        self._groups = [(file, number) for file, number, _ in found]
        super().__init__(rows for *_, rows in found)

    def _read(self, part: int) -> list[dict[str, Any]]:
        from data.records import columns

        file, number = self._groups[part]
        return _rows(columns.read_group(file, number), file.name)


def save(out: Path, artifact_type: str, rows: Iterable[Mapping[str, Any]]) -> None:
    """Writes the rows of a data artifact as its payload, below its output folder: records in columns, results as lines.

    Records are taken as they come: no more than those of one file are in memory, and as objects only a block.
    """
    payload = out / "payload"
    payload.mkdir(parents=True, exist_ok=True)
    if artifact_type not in RECORDS:
        write_rows(payload / "rows.jsonl", rows)
        return
    from data.records import columns

    files = 0
    for table, sizes in columns.in_files(rows, RECORDS[artifact_type], bulk_of):
        columns.write(payload / file_name(files), table, sizes)
        files += 1
    remove_others(payload, files)


def remove_others(payload: Path, files: int) -> None:
    """Removes the files of an earlier attempt that wrote more of them."""
    for name in row_files(path.name for path in payload.iterdir())[files:]:
        (payload / name).unlink()


def size_of(row: Mapping[str, Any]) -> int:
    """Characters of a row's texts, and as many for its tokens as they take. What rows are ordered by and told by; for what decides how many
    of them are in memory together see `bulk_of`."""
    texts = [message["content"] for message in row["messages"]] + [answer["text"] for answer in row.get("answers", ())]
    texts += texts_within(row.get("template_arguments"))
    return sum(map(len, texts)) + len(row.get("text", "")) + TOKEN * sum(len(row.get(name, ())) for name in ("prompt_ids", "response_ids"))


def bulk_of(row: Mapping[str, Any]) -> int:
    """What files, groups and blocks are cut by: the characters of a row with all that stands beside its texts (verifier, ratings, choices),
    of that as much as is beyond `FREE`."""
    beside = characters_in([value for name, value in row.items() if name not in SIZED])
    return size_of(row) + max(0, beside - FREE)


def characters_in(value: Any) -> int:
    """Of a value of JSON, names of fields included and its numbers for as many as a token takes, however deep they stand."""
    found, left = 0, [value]
    while left:
        one = left.pop()
        if isinstance(one, str | bytes):
            found += len(one)
        elif isinstance(one, Mapping):
            left += [*one, *one.values()]
        elif isinstance(one, list | tuple):
            left += one
        else:
            found += TOKEN
    return found


TOKEN = 8
"""Bytes of an id, or of its log-probability."""
SIZED = frozenset({"id", "messages", "answers", "text", "template_arguments", "prompt_ids", "response_ids", "logprobs"})
"""Fields that do not stand beside the texts: `size_of` has counted them. An id is short, and another one where equal ids are told apart."""
FREE = 1 << 13
"""Characters beside its texts that a row has for nothing, so that files of ordinary rows end where their texts alone end them. A file with
as many rows as it may have becomes no more than twice as large by that."""


def digest_of(rows: Iterable[Mapping[str, Any]]) -> str:
    """sha256 of rows, whatever the file that they lie in."""
    found = hashlib.sha256()
    for row in rows:
        found.update(canonical_json(row).encode() + b"\n")
    return found.hexdigest()
