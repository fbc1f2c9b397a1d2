"""Rows exchanged between stages. Records are stored in columns, in `payload/rows-00000.parquet` and so on (`data/records/columns.py`);
scores of answers and other results, which people read too, are lines of `payload/rows.jsonl`.

Messages are `{"role": "system" | "user" | "assistant" | "call" | "tool", "content": str}`; a call is made by the assistant, and a tool
message is its result (`data/chat/tools.py`). Assistant messages may have `"train": true | false`, which all data stages keep. A verifier
is a name and its arguments, e.g. `{"name": "arithmetic", "answer": "42"}` (see `stages/verifiers/__init__.py`), or null if an answer
cannot be checked.

An answer cut off by its length limit has `finish_reason: length` in every record that it passes through, down to its tokens: it gets no
end-of-turn token, so that no model learns to stop there.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, NamedTuple, NotRequired, TypedDict

from pedigree.configs.base.frozen import canonical_json
from pedigree.configs.base.problems import PedigreeError
from pedigree.configs.rows.suite_forms import Form
from pedigree.data.artifacts.artifacts import Artifact, write_rows
from pedigree.data.records.sequences import InParts
from pedigree.data.store.untrusted import RESTORE, ArtifactError, read_lines

if TYPE_CHECKING:
    from pyarrow import Table

FinishReason = Literal["stop", "length"]
"""Whether an answer ended with its end token or was cut off by the length limit."""


class Message(TypedDict):
    role: str
    content: str
    train: NotRequired[bool]
    """For assistant turns and calls: whether SFT with `train_on: marked` trains the turn."""
    finish_reason: NotRequired[FinishReason]
    """For a last turn of the assistant; `stop` by default."""


class Conversation(TypedDict):
    """{"id": "arithmetic-3f2a", "source": "arithmetic", "messages": [user, assistant, ...]}; ends with a turn of the assistant, which may
    end with calls."""

    id: str
    source: str
    messages: list[Message]
    template_arguments: NotRequired[dict[str, Any]]
    """Chat template variables → values, e.g. {"enable_thinking": false}, in this record and all records derived from it."""


class Prompt(TypedDict):
    """A conversation that ends with a user turn or tool results, and a verifier for answers."""

    id: str
    """A derived prompt has the original's id, a slash and a suffix, see `derived_id`."""
    source: str
    messages: list[Message]
    verifier: dict[str, Any] | None
    template_arguments: NotRequired[dict[str, Any]]


class Item(TypedDict):
    """A benchmark prompt. The optional fields come from its form (`configs/rows/suite_forms.py`)."""

    id: str
    source: str
    task: str
    messages: list[Message]
    """Prompt including instructions and worked examples."""
    verifier: dict[str, Any]
    """Verifier of the primary metric."""
    question: NotRequired[str]
    """Bare question, which decontamination compares; by default the user's turns."""
    category: NotRequired[str]
    prefix: NotRequired[str]
    """Beginning of the assistant's turn."""
    choices: NotRequired[list[str]]
    """Continuations to compare by likelihood."""
    others: NotRequired[dict[str, dict[str, Any]]]
    """Metric → its verifier, if it differs from the primary metric's."""
    weights: NotRequired[dict[str, float]]
    """Metric → weight of the item in the average."""


class Answer(TypedDict):
    """An answer to a prompt and its score; null if not scored."""

    text: str
    score: float | None
    finish_reason: NotRequired[FinishReason]
    """`stop` by default."""
    win_rate: NotRequired[float | None]
    """P(it is better than an answer of the sampled policies to the prompt), see `stages.judge.win_rates`."""
    policy: NotRequired[str]
    """Label of the policy that sampled it."""
    policy_content: NotRequired[str]
    """Content hash of that policy."""
    on_policy: NotRequired[bool]
    """Whether that policy is the one to be trained."""


class Preference(TypedDict):
    """Answers to one prompt, best first: a pair, a longer ranked list, or a single scored answer (1 good, 0 bad)."""

    id: str
    source: str
    messages: list[Message]
    answers: list[Answer]
    strength: float | None
    """P(the first answer is better than the second), for pairs only; null means certain."""
    template_arguments: NotRequired[dict[str, Any]]


class Completion(TypedDict):
    """One sampled answer with its provenance."""

    id: str
    """`PROMPT_ID/POLICY_LABEL/INDEX`."""
    prompt_id: str
    source: str
    messages: list[Message]
    verifier: dict[str, Any] | None
    policy: str
    """Label of the policy in the stage's input."""
    policy_content: str
    """Content hash of that policy."""
    on_policy: bool
    """Whether the recipe declares that policy as the one to be trained (`on_policy`)."""
    index: int
    seed: int
    temperature: NotRequired[float]
    """Sampling temperature, if it varies between the answers to a prompt."""
    prompt_ids: list[int]
    response_ids: list[int]
    logprobs: list[float]
    """Log-probability of each response token under the sampling distribution."""
    text: str
    finish_reason: FinishReason
    """`stop`: the end token was sampled, and is the last of `response_ids`."""
    template_arguments: NotRequired[dict[str, Any]]


class AspectRating(TypedDict):
    """A language model's rating of one aspect of an answer."""

    rating: int | None
    """1 to 5; null if it cannot be parsed with certainty."""
    text: str | None
    """The complete response; null if there is none."""


class Judgment(TypedDict):
    """One answer and its scores; null where a judge could not score."""

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
    """As in the completion."""
    response_length: int
    verifier_score: float | None
    rewards: dict[str, float | None]
    """Label of a reward model → its raw score; empty if there is no reward model."""
    reward: float | None
    """Ensemble reward, in standard deviations of the members' held-out answers."""
    disagreement: float | None
    """Standard deviation of the normalized rewards over the members, if there are at least two."""
    ratings: dict[str, AspectRating]
    """Name of a rubric → a language model's rating; empty if there is no judge."""
    rating: float | None
    """Mean of `ratings`; null unless all of them exist."""
    programs: NotRequired[dict[str, float | None]]
    """Name of a function of the project → its number; null where it left the answer out, or could not score it."""
    score: float | None
    win_rate: float | None
    """P(it is better than a random one of the scored answers, itself included), see `stages.judge.win_rates`."""
    template_arguments: NotRequired[dict[str, Any]]


class AnswerScore(TypedDict):
    """One of several answers to a benchmark item."""

    text: str
    answer: str | None
    """Answer extracted by the primary verifier."""
    scores: dict[str, float | None]
    """Metric → score; null if unknown."""
    reason: str
    messages: NotRequired[list[Message]]
    """As in `ItemScore`."""


class ItemScore(TypedDict):
    """One policy's answer or answers to one benchmark item."""

    id: str
    task: str
    policy: str
    text: str
    """The answer, or the first of several."""
    answer: str | None
    """Answer extracted by the verifier."""
    score: float | None
    """Score by the primary metric; null if unknown, which is not the same as wrong."""
    reason: str
    scores: dict[str, float | None]
    """Metric → score."""
    category: NotRequired[str]
    """The item's category, if the task's score is an average over categories."""
    answers: NotRequired[list[AnswerScore]]
    """All answers, if there are several."""
    messages: NotRequired[list[Message]]
    """With an environment: the conversation before the answer."""
    logprobs: NotRequired[list[float]]
    """For compared choices: Σ log P over the tokens of each."""


class Context(TypedDict):
    """Template arguments of a record."""

    template_arguments: NotRequired[dict[str, Any]]


def context_of(row: Mapping[str, Any]) -> Context:
    """The context for a record derived from a row."""
    return {"template_arguments": row["template_arguments"]} if "template_arguments" in row else {}


def derived_id(prompt_id: str, part: str) -> str:
    """The id of a prompt derived from another one, e.g. `chat-3f2a/constrained`.

    Completions and judgments refer to it, and so to the original prompt.
    """
    return f"{prompt_id}/{part}"


def derived_from(prompt_id: str, part: str) -> str | None:
    """The id of the original of a prompt derived as `part`; None if it was not."""
    return prompt_id.removesuffix(f"/{part}") if prompt_id.endswith(f"/{part}") else None


def texts_within(value: Any) -> Iterator[str]:
    """All strings in a JSON value, including field names."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield name
            yield from texts_within(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from texts_within(inner)


def hints_of(row: Mapping[str, Any]) -> list[str]:
    """Hints of a prompt, weakest first: an argument of its verifier that no verifier reads. `facts` may mean something else by it."""
    verifier = row.get("verifier") or {}
    return [] if verifier.get("name") == "facts" else verifier.get("hints", [])


def turns_and_answers(row: Mapping[str, Any]) -> list[str]:
    """The texts of a row's messages and of a preference's answers."""
    return [message["content"] for message in row["messages"]] + [answer["text"] for answer in row.get("answers", ())]


def texts(row: Mapping[str, Any]) -> list[str]:
    """All texts of a row: messages, a preference's answers, and texts in template arguments."""
    return turns_and_answers(row) + list(texts_within(row.get("template_arguments")))


def ended(row: Mapping[str, Any]) -> bool:
    """Whether an answer, completion, judgment or message is complete, i.e. not cut off."""
    return row.get("finish_reason") != "length"


FORM_FILE = "form.json"
"""File with the form and its name, in the payload of a suite with a form."""


def form_of(suite: Artifact) -> Form | None:
    """A suite's form; None if its items are plain prompts with verifiers."""
    file = suite.payload / FORM_FILE
    if not file.is_file():
        return None
    given = json.loads(file.read_text())
    name = given.pop("name")
    return Form.model_validate({"description": name, "origin": f"configs/forms/{name}.yaml", **given})


def check_ids(ids: Iterable[str]) -> None:
    """Raise PedigreeError if an id repeats, e.g. because a part was read twice; its answer would count twice."""
    twice = [name for name, count in Counter(ids).items() if count > 1]
    if twice:
        raise PedigreeError(f"the rows have {len(twice)} duplicate ids, e.g. {twice[0]!r}: run the stage before this one again")


RECORDS: dict[str, type] = {
    "conversation": Conversation,
    "prompt": Prompt,
    "item": Item,
    "preference": Preference,
    "completion": Completion,
    "judgment": Judgment,
}
"""Type of artifact → type of its rows, for rows stored in columns."""
ROW_FILE = re.compile(r"rows\.jsonl|rows-[0-9]{5}\.parquet")


def row_files(names: Iterable[str]) -> list[str]:
    """Names of a payload's row files, in order; empty if it has no rows."""
    return sorted(name for name in names if ROW_FILE.fullmatch(name))


def files(payload: Path) -> list[Path]:
    """A payload's row files, in order.

    Raises:
        ArtifactError: there are none.
    """
    found = [payload / name for name in row_files(path.name for path in payload.iterdir())]
    if not found:
        raise ArtifactError(f"{payload} holds no rows; {RESTORE}")
    return found


def file_name(number: int) -> str:
    return f"rows-{number:05d}.parquet"


def rows_in(stream: BinaryIO, name: str, fields: Sequence[str] | None = None) -> Iterator[dict[str, Any]]:
    """Iterate over the rows of one file of an untrusted artifact: those of `fields` that a row has, which is much faster, or all.

    Raises:
        ArtifactError: the file has no rows of a known type.
    """
    if name.endswith(".jsonl"):
        rows = read_lines(stream, name)
        yield from rows if fields is None else ({field: row[field] for field in fields if field in row} for row in rows)
        return
    from pedigree.data.records import columns

    for table in columns.read(stream, name, fields):
        yield from _rows(table, name, fields)


def _rows(table: "Table", name: str, fields: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """The rows of a table read from the file `name`."""
    from pedigree.data.records import columns

    record = columns.type_of(table)
    if record not in RECORDS or table.schema != columns.schema_of(RECORDS[record], fields):
        raise ArtifactError(f"{name} does not have this version's columns for rows of type {record!r:.80}; {RESTORE}")
    try:
        return columns.to_rows(table, RECORDS[record])
    except (ValueError, RecursionError) as error:  # invalid JSON in a column
        raise ArtifactError(f"{name} cannot be read ({error!s:.300}); {RESTORE}") from error


def count(file: Path) -> int:
    """Number of rows of a file; for Parquet, from its metadata."""
    if file.suffix == ".jsonl":
        with file.open("rb") as stream:
            return sum(1 for _ in stream)
    from pedigree.data.records import columns

    return sum(columns.groups(file))


def stream(payload: Path, fields: Sequence[str] | None = None) -> Iterator[dict[str, Any]]:
    """Iterate over the rows of a data artifact's payload; `fields` as in `rows_in`.

    Raises:
        ArtifactError: there are no rows, or they cannot be read.
    """
    for path in files(payload):
        with path.open("rb") as file:
            yield from rows_in(file, path.name, fields)


def load(artifact: Artifact) -> list[dict[str, Any]]:
    """Load all rows of a data artifact into memory."""
    return list(stream(artifact.payload))


class RowGroup(NamedTuple):
    """One row group of an artifact."""

    file: Path
    number: int
    """Its place in the file."""
    rows: int

    def read(self) -> list[dict[str, Any]]:
        """Its rows."""
        from pedigree.data.records import columns

        return _rows(columns.read_group(self.file, self.number), self.file.name)


def groups(artifact: Artifact) -> list[RowGroup]:
    """All row groups of a data artifact in columns."""
    from pedigree.data.records import columns

    return [RowGroup(file, *group) for file in files(artifact.payload) for group in enumerate(columns.groups(file))]


def opened(artifact: Artifact) -> Sequence[dict[str, Any]]:
    """The rows of a data artifact as a lazy sequence; results in JSONL are loaded whole.

    Raises:
        ArtifactError: there are no rows, or they cannot be read.
    """
    if any(file.suffix == ".jsonl" for file in files(artifact.payload)):
        return load(artifact)
    parts = groups(artifact)
    return InParts([part.rows for part in parts], lambda number: parts[number].read())


def save(out: Path, artifact_type: str, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows as a data artifact's payload in the output folder: records in columns, results as JSONL.

    Records are streamed: at most one file of them is in memory, and one block as objects.
    """
    payload = out / "payload"
    payload.mkdir(parents=True, exist_ok=True)
    if artifact_type not in RECORDS:
        write_rows(payload / "rows.jsonl", rows)
        return
    from pedigree.data.records import columns

    number = 0
    for table, sizes in columns.in_files(rows, RECORDS[artifact_type], bulk_of):
        columns.write(payload / file_name(number), table, sizes)
        number += 1
    remove_others(payload, number)


def remove_others(payload: Path, files: int) -> None:
    """Remove surplus files of an earlier attempt."""
    for name in row_files(path.name for path in payload.iterdir())[files:]:
        (payload / name).unlink()


def size_of(row: Mapping[str, Any]) -> int:
    """Characters of a row's texts, plus bytes for its tokens. Used for ordering and statistics; see `bulk_of` for memory."""
    tokens = sum(len(row.get(name, ())) for name in ("prompt_ids", "response_ids"))
    return sum(map(len, texts(row))) + len(row.get("text", "")) + TOKEN * tokens


def bulk_of(row: Mapping[str, Any]) -> int:
    """Size by which files, groups and blocks are cut: `size_of`, plus the other fields (verifier, ratings, choices) beyond `FREE`."""
    others = characters_in([value for name, value in row.items() if name not in SIZED])
    return size_of(row) + max(0, others - FREE)


def characters_in(value: Any) -> int:
    """Characters in a JSON value of any depth, including field names; each number counts `TOKEN`."""
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
"""Bytes of a token id, or of its log-probability."""
SIZED = frozenset({"id", "messages", "answers", "text", "template_arguments", "prompt_ids", "response_ids", "logprobs"})
"""Fields counted by `size_of`, and the id, which is short and may get a number."""
FREE = 1 << 13
"""Characters of other fields that do not count, so that only the texts decide where files of ordinary rows end. This at most doubles the
size of a file with the maximum number of rows."""


def digest_of(rows: Iterable[Mapping[str, Any]]) -> str:
    """SHA-256 of rows, independent of their file."""
    found = hashlib.sha256()
    for row in rows:
        found.update(canonical_json(row).encode() + b"\n")
    return found.hexdigest()
