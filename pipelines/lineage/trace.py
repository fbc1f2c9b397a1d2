"""Trace a row through the artifacts of a project: which contain it, which dropped it, and which models were trained on it.

A row is traced by its id, and by the ids of the rows made from it (`row_parents.py`). `prepare_data` derives an id from the source and a
hash of the row, with a number for rows of equal content. Artifacts without rows, such as models, are traced through the records by the
content of their inputs.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Any

from pedigree.configs.base.kind import MODELS
from pedigree.configs.base.problems import UsageProblem
from pedigree.configs.base.project import Project
from pedigree.configs.base.texts import command
from pedigree.configs.language.kinds import brings_in, imports_rows
from pedigree.configs.rows.datasets import ROWS
from pedigree.configs.rows.filters import base_id
from pedigree.data.artifacts.artifacts import Artifact, ArtifactError, open_artifact
from pedigree.data.chat.tools import texts_called, texts_offered
from pedigree.data.filters.row_filters import spaced
from pedigree.data.records import parents, records
from pedigree.data.store.untrusted import RESTORE, open_plain, read_lines
from pedigree.pipelines.ledger.lock_files import recorded
from pedigree.pipelines.lineage.ancestry import addresses, find_artifact
from pedigree.pipelines.lineage.descendants import Descendant, Known, descendants, has_rows, known_records, renamed
from pedigree.pipelines.lineage.row_parents import RowParents, ids_of, spelled_artifacts

SHORTEST = 20
"""Minimum characters for a substring search."""
MOST = 1000
"""Maximum rows in one trace."""
SHOWN = 5
"""Maximum ids in an error message."""
EXCERPT = 200
"""Maximum characters of a dropped row stored as evidence."""
FULL_ID = re.compile(r".*-[0-9a-f]{16}", re.DOTALL)
NAMED = re.compile(r"-[0-9a-f]{16}\b")
"""An id in filter evidence."""
BY_WAY = ", by way of "
"""In filter evidence, separates the kept row from the duplicate that links to it (`data.filters.near_duplicates.evidence`)."""
FOUND = {"embedded": "cosine {} with", "rephrased": "judged by a language model as a rephrasing (cosine {}) of"}
"""Detection method of an overlap → description with its score; otherwise the score is a share."""


@dataclass(frozen=True)
class Author:
    """A policy that gave answers."""

    label: str
    address: str
    """Empty if unknown."""
    content: str


@dataclass(frozen=True)
class ItemScore:
    """Score of a policy on an item."""

    task: str
    policy: str
    score: int | float | None
    """Null if unknown."""


@dataclass(frozen=True)
class Place:
    """A dataset artifact that contains the row or answers to it."""

    address: str
    kind: str
    type: str
    content: str
    ids: tuple[str, ...]
    """Ids of the matching rows."""
    policies: tuple[Author, ...] = ()
    """Authors of the answers."""
    scores: tuple[ItemScore, ...] = ()
    """Of an evaluation."""
    handed_on: bool = False
    """All its rows come from other stages."""
    given: tuple[str, ...] = ()
    """Contents of the datasets it takes rows from."""


@dataclass(frozen=True)
class Drop:
    """A row dropped by a stage: the traced row, or another row dropped because of it."""

    address: str
    kind: str
    id: str
    """Empty if the row was dropped before it got an id."""
    reason: str
    detail: str
    by: str = ""
    """The traced benchmark item or kept copy that caused the drop; empty if the traced row itself was dropped."""


@dataclass(frozen=True)
class Trace:
    """Result of tracing rows."""

    ids: tuple[str, ...]
    """Ids, without copy numbers, of the rows from which they were made; empty if a text was found only in rows dropped before they got an
    id."""
    looked_in: int
    """Number of dataset artifacts searched."""
    places: tuple[Place, ...]
    dropped: tuple[Drop, ...]
    reached: tuple[Descendant, ...]
    not_looked_in: Mapping[str, str]
    """Address → why it could not be searched."""

    @property
    def models(self) -> list[Descendant]:
        return [found for found in self.reached if found.type in MODELS]

    @property
    def found(self) -> bool:
        return bool(self.places or self.dropped)

    @property
    def copies(self) -> list[str]:
        """Evidence of other rows that were kept in place of these."""
        mine = (drop.detail for drop in self._dropped_first())
        return sorted({detail for detail in mine if NAMED.search(detail) and not self._kept_itself(detail)})

    def _dropped_first(self) -> list[Drop]:
        """These rows as dropped by the stages that imported them, without the rows made from them."""
        return [drop for drop in self.dropped if brings_in(drop.kind) and not drop.by and base_id(drop.id) in self.ids]

    def _kept_itself(self, detail: str) -> bool:
        """Whether the kept row, named before `BY_WAY` in the evidence, has one of these ids."""
        kept = base_id(detail.partition(BY_WAY)[0])
        return any(kept.endswith(f" {name}") for name in self.ids)

    def imported_in(self, place: Place) -> list[str]:
        """Ids, without copy numbers, of rows that an artifact imported from its own sources.

        A row counts as imported if the artifact has more copies of it than its input datasets together. Copies that it dropped are
        included, since a dropped copy would remain if the other were removed. If it repeats input rows or reads an input twice, input
        rows may be counted as imported.
        """
        if not brings_in(place.kind) or place.handed_on:
            return []
        others = [one for one in self.places if one.content in place.given]
        given = Counter(base_id(name) for one in {one.content: one for one in others}.values() for name in one.ids)
        dropped = [drop.id for drop in self._dropped_first() if drop.address == place.address]
        return sorted(name for name in Counter(map(base_id, [*place.ids, *dropped])) - given if name in self.ids)

    def sources(self) -> list[tuple[str, str]]:
        """(address of the stage that imported it, name of its source there)."""
        made = [(place.address, name) for place in self.places for name in self.imported_in(place)]
        made += [(drop.address, base_id(drop.id)) for drop in self._dropped_first()]
        return sorted({(address, name[:-17]) for address, name in made if FULL_ID.fullmatch(name)})


@dataclass(frozen=True)
class RowQuery:
    """Query for a row by id prefix or by text."""

    id: str = ""
    text: str = ""
    contains: bool = False
    """Match `text` as a substring."""

    def __post_init__(self) -> None:
        if not self.id and not self.folded:
            raise UsageProblem("specify a row id, or a --text that contains words")
        if self.contains and len(self.folded) < SHORTEST:
            raise UsageProblem(f"--contains needs at least {SHORTEST} characters, but the text has {len(self.folded)}: use a longer text")

    @cached_property
    def folded(self) -> str:
        return spaced(self.text)

    def is_in(self, row: Mapping[str, Any]) -> bool:
        """Whether one text of the row matches, or all texts joined."""
        if self.id:
            return str(row.get("id", "")).startswith(self.id)
        try:
            of_tools = (*texts_called(row), *texts_offered(row))
            parts = [spaced(part) for part in [*records.texts(row), *of_tools, *filter(None, (row.get("question"), row.get("text")))]]
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise ArtifactError(f"row {str(row.get('id'))[:80]!r} has texts in an unknown format; {RESTORE}") from error
        parts.append(" ".join(parts))
        return any(self.folded in part for part in parts) if self.contains else self.folded in parts

    def began(self, excerpt: str) -> bool:
        """Whether a dropped row may match, given the stored first characters of its joined texts."""
        parts = excerpt.split("\n")
        cut = len(excerpt) >= EXCERPT
        if self.contains:
            return self.folded in spaced(excerpt)
        tails = [spaced("\n".join(parts[start:])) for start in range(len(parts))] if cut else []
        if any(len(tail) >= SHORTEST and self.folded.startswith(tail) for tail in tails):
            return True
        runs = combinations(range(len(parts) + 1), 2)
        return any(spaced("\n".join(parts[start:end])) == self.folded for start, end in runs)


Entry = tuple[str, Artifact]
"""An artifact with its address."""


def trace(project: Project, wanted: RowQuery, within: Sequence[str] = (), report: Callable[[str], None] = lambda words: None) -> Trace:
    """Trace a row through all recipes and variants of a project, or only the artifacts named in `within`.

    Raises:
        UsageProblem: the row is ambiguous.
        ArtifactError: a name in `within` matches no artifact, or lineages are damaged.
        LedgerError: a `dvc.lock` cannot be read.
    """
    here, broken = _available(project)
    known = known_records(here)
    order = {identifier: number for number, identifier in enumerate(known)}
    here.sort(key=lambda entry: order[entry[1].record.id])
    chosen = {find_artifact(project, name).path for name in within}
    with_rows = [(address, found) for address, found in here if has_rows(found.record)]
    search = Search([entry for entry in with_rows if not chosen or entry[1].path in chosen], known, report)

    relations = RowParents(with_rows, spelled_artifacts(known, with_rows), search.noting)
    roots = relations.roots(search.named(wanted))
    _refuse_many(wanted, roots)
    ids, blended = relations.family(roots)
    places, dropped = tuple(search.places(ids)), tuple(search.drops(wanted, ids))

    reached = descendants(known, _holds(known, with_rows, search, places), blended)
    missing = {} if within else broken | _gone(known, here, broken)
    looked_in = sum(address not in search.unread for address, _ in search.artifacts)
    return Trace(tuple(sorted(roots)), looked_in, places, dropped, tuple(_everywhere(reached, here)), search.unread | missing)


def _available(project: Project) -> tuple[list[Entry], dict[str, str]]:
    """All available artifacts, and for the others address → reason why not."""
    here, broken = [], {}
    present = set(addresses(project))
    for address in sorted(present | {entry.address for entry in recorded(project) if entry.part == "payload"}):
        try:
            here.append((address, open_artifact(project.artifact(address))))
        except ArtifactError as error:
            recipe = address.partition("/")[0]
            remedy = "not available locally" + ("" if "+" in recipe else f": try {command('pull', recipe)}")
            broken[address] = str(error).replace(f"{project.root}/", "") if address in present else remedy
    return here, broken


def _refuse_many(wanted: RowQuery, roots: Collection[str]) -> None:
    some = f"{', '.join(sorted(roots)[:SHOWN])}{' ...' if len(roots) > SHOWN else ''}"
    if len(roots) > MOST:
        raise UsageProblem(f"more than {MOST} rows match, e.g. {some}: use a longer id or text")
    if wanted.id and len(roots) > 1:
        raise UsageProblem(f"{wanted.id!r} is a prefix of {len(roots)} ids: {some}")


def _holds(known: Known, with_rows: Sequence[Entry], search: "Search", places: Sequence[Place]) -> dict[str, bool]:
    """Content → whether the row is in it, of all artifacts of which that is certain."""
    linked = {found.record.id for address, found in with_rows if parents.named(found.evidence) and address not in search.unread}
    doubtful = renamed(known, linked)
    read = [found.record for address, found in search.artifacts if address not in search.unread]
    holding = {place.content for place in places if place.type != "scores"}
    return {record.content: False for record in read if record.id not in doubtful} | dict.fromkeys(holding, True)


def _everywhere(reached: Sequence[Descendant], here: Sequence[Entry]) -> Iterator[Descendant]:
    """Each descendant once for each address at which it is available."""
    addresses: dict[str, list[str]] = {}
    for address, found in here:
        addresses.setdefault(found.record.id, []).append(address)
    for one in reached:
        yield from (replace(one, address=address) for address in addresses.get(one.id, [one.address]))


def _gone(known: Known, here: Sequence[Entry], broken: Collection[str]) -> dict[str, str]:
    """Dataset artifacts of which only records remain: address and content → reason."""
    contents = {found.record.content for _, found in here}
    return {
        f"{address} {record.content[:12]}": "replaced, deleted, or of another project; only its records are here"
        for record, address in known.values()
        if has_rows(record) and record.content not in contents and address not in broken
    }


# --- search ------------------------------------------------------------------------------------------------------------


FIELDS_OF_TEXT = ("id", "prompt_id", "messages", "question", "answers", "text", "template_arguments")
FIELDS = ("id", "prompt_id", "task", "policy", "policy_content", "score")


@dataclass
class Search:
    """Search of a project's dataset artifacts."""

    artifacts: Sequence[Entry]
    known: Known
    """All records."""
    report: Callable[[str], None]
    """Receives progress messages."""
    unread: dict[str, str] = field(default_factory=dict)
    """Address of an unreadable artifact → error."""

    @cached_property
    def makers(self) -> dict[str, str]:
        """Content → address of its producer; a stage that passes an input on whole made nothing."""
        return {
            record.content: address
            for record, address in self.known.values()
            if record.content not in {given.content for given in record.inputs}
        }

    def named(self, wanted: RowQuery) -> set[str]:
        """Ids, without copy numbers, of the matching rows, or of the prompts of matching answers."""
        if FULL_ID.fullmatch(base_id(wanted.id)):
            return {base_id(wanted.id)}
        found = {base_id(name) for name in self._named(wanted)}
        return {wanted.id} if wanted.id in found else found

    def _named(self, wanted: RowQuery) -> Iterator[str]:
        for address, artifact in self.artifacts:
            self.report(f"searching {address}")
            with self.noting(address):
                if wanted.id or artifact.type in records.RECORDS:  # texts of scores are answers; items are found by id
                    rows = records.stream(artifact.payload, ("id", "prompt_id") if wanted.id else FIELDS_OF_TEXT)
                    yield from (str(row.get("prompt_id") or row.get("id", "")) for row in rows if wanted.is_in(row))
                for line in lines(artifact.evidence / "drops.jsonl", [wanted.id] if wanted.id else []):
                    if wanted.is_in(line) if wanted.id else wanted.began(str(line.get("text", ""))):
                        yield str(line.get("id", ""))

    def places(self, ids: Collection[str]) -> Iterator[Place]:
        """Artifacts that contain rows with these ids or answers to them."""
        for address, artifact in self.artifacts if ids else ():
            self.report(f"tracing in {address}")
            with self.noting(address):
                rows = [row for row in records.stream(artifact.payload, FIELDS) if not ids_of(row).isdisjoint(ids)]
                if rows:
                    yield self._place(address, artifact, rows)

    def drops(self, wanted: RowQuery, ids: Collection[str]) -> Iterator[Drop]:
        """Dropped rows from the evidence."""
        words = shortest(ids)
        for address, artifact in self.artifacts:
            with self.noting(address):
                if ids:
                    yield from _filtered(address, artifact, ids, words)
                    yield from _overlapping(address, artifact, ids, words)
                if len(wanted.folded) >= SHORTEST:
                    yield from _malformed(address, artifact, wanted)

    @contextmanager
    def noting(self, address: str) -> Iterator[None]:
        """Record an unreadable artifact in `unread` and continue."""
        try:
            yield
        except ArtifactError as error:
            self.unread[address] = str(error)

    def _place(self, address: str, artifact: Artifact, rows: Sequence[Mapping[str, Any]]) -> Place:
        record = artifact.record
        labelled = {given.label: given.content for given in record.inputs if given.port == "policies"}
        labels = [(str(row["policy"]), row.get("policy_content")) for row in rows if "policy" in row]
        answered = dict.fromkeys((label, str(content or labelled.get(label, ""))) for label, content in labels)
        policies = tuple(Author(label, self.makers.get(content, ""), content) for label, content in answered)
        names = tuple(dict.fromkeys(str(row.get("id")) for row in rows))
        scores = (
            tuple(ItemScore(str(row.get("task")), str(row.get("policy")), row.get("score")) for row in rows)
            if record.type == "scores"
            else ()
        )
        handed_on = brings_in(record.kind) and not imports_rows(record.kind, record.config)
        given = tuple(one.content for one in record.inputs if one.port == ROWS)
        return Place(address, record.kind, record.type, record.content, names, policies, scores, handed_on, given)


def _filtered(address: str, artifact: Artifact, ids: Collection[str], words: Sequence[str]) -> Iterator[Drop]:
    for line in lines(artifact.evidence / "drops.jsonl", words):
        detail, mine = str(line.get("evidence", "")), not ids_of(line).isdisjoint(ids)
        kept = "" if mine else next((name for name in words if name in detail), "")
        if mine or kept:
            yield Drop(address, artifact.record.kind, str(line.get("id")), str(line.get("reason")), detail, kept)


def _overlapping(address: str, artifact: Artifact, ids: Collection[str], words: Sequence[str]) -> Iterator[Drop]:
    for line in lines(artifact.evidence / "manifest.jsonl", words):
        item, mine = str(line.get("item")), not ids_of(line).isdisjoint(ids)
        if line.get("verdict", "removed") == "removed" and (mine or base_id(item) in ids):
            how = FOUND.get(str(line.get("pass")), "{} of")
            detail = f"{how.format(line.get('score'))} item {item} of {line.get('benchmark')}"
            yield Drop(address, artifact.record.kind, str(line.get("id")), "overlap", detail, "" if mine else item)


def _malformed(address: str, artifact: Artifact, wanted: RowQuery) -> Iterator[Drop]:
    """Evidence has only the beginning of a malformed row in its original columns, so the text is matched as a substring."""
    for line in lines(artifact.evidence / "bad_rows.jsonl", []):
        if wanted.folded in spaced(str(line.get("text", ""))):
            yield Drop(address, artifact.record.kind, "", "malformed", f"{line.get('place')}: {line.get('reason')}")


def shortest(names: Collection[str]) -> list[str]:
    """These names without those that contain another one: a text with any of them has one of the result."""
    found: list[str] = []
    for name in sorted(names, key=lambda name: (len(name), name)):
        if not any(other in name for other in found):
            found.append(name)
    return found


def lines(path: Path, words: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Lines of an evidence file that contain one of these words; all lines if there are no words."""
    if path.is_file():
        with open_plain(path) as stream:
            written = [json.dumps(word, ensure_ascii=False)[1:-1].encode(errors="replace") for word in words]
            yield from read_lines(stream, path.name, written)
