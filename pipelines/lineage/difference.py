"""Compare two artifacts by records, rows, and scores, and find where their ancestries diverge."""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pedigree.configs.base.frozen import canonical_json, leaves
from pedigree.configs.base.project import Project
from pedigree.data.artifacts.artifacts import ArtifactError, Input
from pedigree.data.records.records import row_files
from pedigree.pipelines.lineage.ancestry import Pedigree
from pedigree.pipelines.lineage.evaluations import Evaluation, evaluations_of, labels_of

ABSENT = "(absent)"
SHOWN = 5
"""Maximum examples shown per kind of change; all are counted."""
MOST = 15
"""Maximum changes shown per section of metrics, files, and code."""
LONGEST = 100
"""Maximum characters shown of a value."""


@dataclass(frozen=True)
class Change:
    """A named value on both sides, `(absent)` on a side that lacks it."""

    name: str
    first: Any
    second: Any

    def __str__(self) -> str:
        if self.first == ABSENT:
            return f"{self.name} added: {_value(self.second)}"
        if self.second == ABSENT:
            return f"{self.name} removed: {_value(self.first)}"
        if _is_hash(self.first) and _is_hash(self.second) and self.name.startswith("file "):
            return f"{self.name} differs"
        return f"{self.name}: {_value(self.first)} -> {_value(self.second)}"


@dataclass(frozen=True)
class RowChanges:
    """Row differences, by key if every row has a unique key, else as multisets."""

    by: str
    """The key's fields; empty for a multiset comparison, where no row counts as changed."""
    before: int
    after: int
    added: int
    removed: int
    changed: int
    kept: int
    examples: dict[str, list[str]]
    """`added`, `removed`, `changed` → the first rows of each: the key, with the changed fields if any, or the row itself."""


@dataclass(frozen=True)
class Divergence:
    """A point where the ancestries diverge: its inputs are equal, or it differs in more than its inputs."""

    path: str
    """Ports from the artifact back to this point, e.g. `data < data`."""
    first: str
    second: str
    why: list[str]


@dataclass(frozen=True)
class ScoreChange:
    """Mean score difference (second minus first) of two policies on the same items, with a 95% paired bootstrap interval."""

    task: str
    policies: str
    items: int
    first: float
    second: float
    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Comparison:
    """All differences; an empty part is equal on both sides."""

    same: bool
    """Equal ids, i.e. equal keys and equal contents."""
    same_content: bool
    ids: tuple[str, str]
    contents: tuple[str, str]
    what: list[Change]
    """Kind, version, type, metrics, and marks."""
    config: list[Change]
    files: list[Change]
    rows: RowChanges | None
    rows_problem: str
    """Why rows could not be compared."""
    code: list[Change]
    environment: list[Change]
    numerics: list[Change]
    parents: list[Change]
    """Direct inputs by port and label: contents."""
    origins: list[Divergence]
    scores: list[ScoreChange]


def compare(first: Pedigree, second: Pedigree, project: Project | None = None) -> Comparison:
    """Compare an artifact with a baseline, `first`. If both are policies, the project is searched for their evaluations."""
    one, other = first.record, second.record
    same_content = one.content == other.content
    rows, problem = (None, "") if same_content else _rows(first, second)
    return Comparison(
        same=first.id == second.id,
        same_content=same_content,
        ids=(first.id, second.id),
        contents=(one.content, other.content),
        what=changes(_about(first), _about(second)),
        config=changes(one.config, other.config) + changes(one.source_files, other.source_files, "file "),
        files=changes({entry.path: entry.sha256 for entry in one.files}, {entry.path: entry.sha256 for entry in other.files}),
        rows=rows,
        rows_problem=problem,
        code=changes(_code(first), _code(second)),
        environment=changes(_environment(first), _environment(second)),
        numerics=changes(first.run.numerics, second.run.numerics),
        parents=_parents(first, second),
        origins=_origins(first, second),
        scores=_scores(first, second, project),
    )


# --- fields ------------------------------------------------------------------------------------------------------------


def changes(first: Any, second: Any, prefix: str = "") -> list[Change]:
    """Differing nested values, by name; `prefix` begins each name."""
    before, after = dict(leaves(first)), dict(leaves(second))
    names = [name for name in sorted(before.keys() | after.keys()) if before.get(name, ABSENT) != after.get(name, ABSENT)]
    return [Change(prefix + name, before.get(name, ABSENT), after.get(name, ABSENT)) for name in names if name]


def _about(made: Pedigree) -> dict[str, Any]:
    record = made.record
    marks = {f"mark {mark!r}": True for mark in record.marks}
    return {"kind": record.kind, "version": record.version, "type": record.type, "metrics": record.metrics, **marks}


def _code(made: Pedigree) -> dict[str, Any]:
    """Commit and patch of the last attempt, and the stage's code files."""
    code = made.run.code
    files = {f"file {name}": found for name, found in made.run.fingerprint.files.items()}
    return {name: getattr(code, name, None) for name in ("commit", "patch_sha256")} | files


def _environment(made: Pedigree) -> dict[str, Any]:
    environment = made.run.environment
    libraries: dict[str, Any] = {f"library {name}": found for name, found in environment.libraries.items()}
    locks = {f"lock {name}": found for name, found in environment.locks.items()}
    hardware = {f"hardware {name}": found for name, found in made.run.as_json().get("hardware", {}).items()}
    if command := made.run.command_environment:
        libraries |= {"command python": command.python, **{f"command library {name}": found for name, found in command.libraries.items()}}
    return {"python": environment.python, **libraries, **locks, **hardware}


# --- ancestry ----------------------------------------------------------------------------------------------------------


def _parents(first: Pedigree, second: Pedigree) -> list[Change]:
    """Inputs with different content."""
    found = []
    for given, taken in _pairs(first, second):
        labels = list(dict.fromkeys(side.label for side in (given, taken) if side))
        before, after = (side.content if side else ABSENT for side in (given, taken))
        if before != after:
            found.append(Change(f"{(given or taken).port} {' -> '.join(labels)}", before, after))  # pyright: ignore[reportOptionalMemberAccess]
    return found


def _origins(first: Pedigree, second: Pedigree) -> list[Divergence]:
    """Points where the inputs' ancestries diverge, nearest to the sources first; stops at stages of different kinds."""
    found: dict[tuple[str, str], Divergence] = {}
    seen: set[tuple[str, str]] = set()
    waiting = _below(first, second, ())
    while waiting:  # iterative, since an ancestry may exceed Python's recursion limit
        one, other, path, done = waiting.pop()
        if done:
            below = bool(_parting(one, other))
            why = _why(one, other, whole=not below)
            if why or not below:
                nothing = ["nothing recorded: different content from the same inputs, config, code, and numerics"]
                found[one.id, other.id] = Divergence(" < ".join(path), one.address, other.address, why or nothing)
        elif (one.id, other.id) not in seen:
            seen.add((one.id, other.id))
            if one.record.kind == other.record.kind:
                waiting += [(one, other, path, True), *_below(one, other, path)]
            else:
                kinds = f"different stage kinds: {one.record.kind} -> {other.record.kind}"
                found[one.id, other.id] = Divergence(" < ".join(path), one.address, other.address, [kinds])
    return list(found.values())


def _parting(one: Pedigree, other: Pedigree) -> list[tuple[Input | None, Input | None]]:
    """Inputs with different content or missing on one side."""
    return [(given, taken) for given, taken in _pairs(one, other) if not (given and taken and given.content == taken.content)]


def _below(one: Pedigree, other: Pedigree, path: tuple[str, ...]) -> list[tuple[Pedigree, Pedigree, tuple[str, ...], bool]]:
    """Producers of the differing inputs, in reverse order for use as a stack."""
    pairs = [(given, taken) for given, taken in reversed(_parting(one, other)) if given and taken]
    return [(one.of(given.producer), other.of(taken.producer), (*path, given.port), False) for given, taken in pairs]


def _pairs(one: Pedigree, other: Pedigree) -> list[tuple[Input | None, Input | None]]:
    """Pair inputs by port and label, then the remaining ones by order within their port."""
    left = list(other.record.inputs)
    pairs: list[tuple[Input | None, Input | None]] = []
    unmatched: list[Input] = []
    for given in one.record.inputs:
        taken = next((found for found in left if (found.port, found.label) == (given.port, given.label)), None)
        if taken is None:
            unmatched.append(given)
        else:
            left.remove(taken)
            pairs.append((given, taken))
    for given in unmatched:
        taken = next((found for found in left if found.port == given.port), None)
        if taken is not None:
            left.remove(taken)
        pairs.append((given, taken))
    return pairs + [(None, taken) for taken in left]


def _why(one: Pedigree, other: Pedigree, *, whole: bool) -> list[str]:
    """Inputs of one side only and differences of the request; if all inputs are equal (`whole`), also of numerics, code, environment."""
    pairs = _pairs(one, other)
    removed = [f"input {given.port} {given.label} removed" for given, taken in pairs if given and not taken]
    added = [f"input {taken.port} {taken.label} added" for given, taken in pairs if taken and not given]
    found = changes({"version": one.record.version}, {"version": other.record.version})
    found += changes(one.record.config, other.record.config) + changes(one.record.source_files, other.record.source_files, "file ")
    if whole and not found:
        found = changes(one.run.numerics, other.run.numerics, "numerics ")
        found += changes(_code(one), _code(other), "code ") + changes(_environment(one), _environment(other))
    return [*removed, *added, *map(str, found)]


# --- rows --------------------------------------------------------------------------------------------------------------


def _rows(first: Pedigree, second: Pedigree) -> tuple[RowChanges | None, str]:
    if not (first.row_files() and second.row_files()):
        return None, ""
    try:
        return row_changes(first.rows, second.rows), ""
    except ArtifactError as error:  # the other comparisons need only records
        return None, str(error)


Rows = Callable[[], Iterator[dict[str, Any]]]
KEYS = (("task", "policy", "id"), ("id",))


def row_changes(first: Rows, second: Rows) -> RowChanges:
    """Compare two sets of rows, which are read several times, regardless of order, holding one hash per row in memory."""
    for fields in KEYS:
        before, after = _by_key(first, fields), _by_key(second, fields)
        if before is not None and after is not None:
            return _keyed(first, second, before, after, fields)
    one, other = Counter(map(_digest, first())), Counter(map(_digest, second()))
    examples = {"added": _surplus(second, other - one), "removed": _surplus(first, one - other), "changed": []}
    added, removed, kept = (other - one).total(), (one - other).total(), (one & other).total()
    return RowChanges("", one.total(), other.total(), added, removed, 0, kept, examples)


def _keyed(first: Rows, second: Rows, before: dict[str, bytes], after: dict[str, bytes], fields: tuple[str, ...]) -> RowChanges:
    changed = [key for key in before if key in after and before[key] != after[key]]
    added, removed = [key for key in after if key not in before], [key for key in before if key not in after]
    wanted = set(changed[:SHOWN])
    old = {key: row for row in first() if (key := _key(row, fields)) in wanted}
    new = {key: row for row in second() if (key := _key(row, fields)) in wanted}
    details = [f"{key}: {', '.join(map(str, changes(old[key], new[key])))}" for key in changed[:SHOWN]]
    examples = {"added": added[:SHOWN], "removed": removed[:SHOWN], "changed": details}
    kept = len(before) - len(removed) - len(changed)
    return RowChanges("/".join(fields), len(before), len(after), len(added), len(removed), len(changed), kept, examples)


def _by_key(rows: Rows, fields: tuple[str, ...]) -> dict[str, bytes] | None:
    """Key → hash of the row; None if a key is missing or not unique."""
    found: dict[str, bytes] = {}
    for row in rows():
        if not all(isinstance(row.get(field), str) for field in fields):
            return None
        key = _key(row, fields)
        if key in found:
            return None
        found[key] = _digest(row)
    return found


def _key(row: Mapping[str, Any], fields: tuple[str, ...]) -> str:
    return "/".join(row[field] for field in fields)


def _digest(row: Mapping[str, Any]) -> bytes:
    return hashlib.sha256(canonical_json(row).encode()).digest()


def _surplus(rows: Rows, wanted: Counter[bytes]) -> list[str]:
    left, found = Counter(wanted), []
    for row in rows() if wanted else ():
        if len(found) < SHOWN and left[_digest(row)] > 0:
            left[_digest(row)] -= 1
            found.append(_short(canonical_json(row)))
    return found


# --- scores ------------------------------------------------------------------------------------------------------------


def _scores(first: Pedigree, second: Pedigree, project: Project | None) -> list[ScoreChange]:
    if first.record.content == second.record.content:
        return []
    if first.record.type == second.record.type == "scores":
        return score_changes(first, second)
    if first.record.type == second.record.type == "policy":
        here, there = (evaluations_of(project, made.record.content) for made in (first, second))
        best: dict[tuple[Any, ...], tuple[Evaluation, Evaluation]] = {}
        for one in here:
            for other in there:
                if one.measure == other.measure and (one.measure not in best or one.pedigree.id == other.pedigree.id):
                    best[one.measure] = (one, other)
        return [change for one, other in best.values() for change in _paired(one, other)]
    return []


def score_changes(first: Pedigree, second: Pedigree) -> list[ScoreChange]:
    """Score changes per policy and task of two evaluations; none if only records are available."""
    return [change for one, other in _same_labels(labels_of(first), labels_of(second)) for change in _paired(one, other)]


def _same_labels(first: list[Evaluation], second: list[Evaluation]) -> list[tuple[Evaluation, Evaluation]]:
    """Pair policies by label; if both evaluations have a single policy, pair those regardless of label."""
    if len(first) == len(second) == 1:
        return [(first[0], second[0])]
    by_label = {found.label: found for found in second}
    return [(found, by_label[found.label]) for found in first if found.label in by_label]


def _paired(one: Evaluation, other: Evaluation) -> list[ScoreChange]:
    """Score changes per task over shared items, with the bootstrap settings of the first evaluation's config."""
    try:
        before, after = one.scores(), other.scores()
    except ArtifactError:  # only the records of an evaluation are available
        return []
    policies, found = one.label if one.label == other.label else f"{one.label} -> {other.label}", []
    shared = before.keys() & after.keys()
    for task in sorted({task for task, _ in shared}):
        items = [item for item in shared if item[0] == task]
        first, second = (one.estimate({item: side[item] for item in items}).mean for side in (before, after))
        mean, low, high = one.estimate({item: after[item] - before[item] for item in items})
        found.append(ScoreChange(task, policies, len(items), first, second, mean, low, high))
    return found


# --- for people --------------------------------------------------------------------------------------------------------


def text(found: Comparison, first: str, second: str) -> str:
    """Format the comparison for the terminal, omitting parts without differences."""
    if found.same:
        run = [name for name in ("code", "environment", "numerics") if getattr(found, name)]
        different = f" (made with different {' and '.join(filter(None, [', '.join(run[:-1]), run[-1]]))})" if run else ""
        return f"identical: {first} and {second} are {found.ids[0][:12]}{different}"
    head = f"content {found.contents[0][:12]} -> {found.contents[1][:12]}"
    lines = [f"{first} -> {second}", f"same content {found.contents[0][:12]}, different key" if found.same_content else head]
    sections: list[tuple[str, list[str]]] = [
        ("record", _limited(found.what)),
        ("config", [*map(str, found.config)]),
        ("rows", _row_lines(found)),
        ("files", _limited([change for change in found.files if not (found.rows and row_files([change.name]))])),
        ("inputs", [*map(str, found.parents)]),
        ("where the ancestries diverge", [line for origin in found.origins for line in _origin_lines(origin)]),
        ("code", _limited(found.code)),
        ("environment", [*map(str, found.environment)]),
        ("numerics", [*map(str, found.numerics)]),
        ("paired scores, second minus first", [_score_line(change) for change in found.scores]),
    ]
    for title, body in sections:
        lines += ["", title, *(f"  {line}" for line in body)] if body else []
    return "\n".join(lines)


def _value(value: Any) -> str:
    return value[:12] if _is_hash(value) else _short(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


def _is_hash(value: Any) -> bool:
    return isinstance(value, str) and len(value) in (40, 64) and set(value) <= set("0123456789abcdef")


def _short(value: str) -> str:
    return value if len(value) <= LONGEST else f"{value[: LONGEST - 2]} …"


def _limited(found: list[Change]) -> list[str]:
    more = [f"and {len(found) - MOST} more"] if len(found) > MOST else []
    return [*map(str, found[:MOST]), *more]


def _row_lines(found: Comparison) -> list[str]:
    rows = found.rows
    if rows is None:
        return [f"not compared: {found.rows_problem}"] if found.rows_problem else []
    how = f"by {rows.by}" if rows.by else "as multisets (rows have no unique key)"
    lines = [f"{rows.before} -> {rows.after}, {how}: {rows.added} added, {rows.removed} removed, {rows.changed} changed, {rows.kept} equal"]
    if not rows.added + rows.removed + rows.changed:
        return [*lines, "the same rows in a different order"]
    for name, total in (("added", rows.added), ("removed", rows.removed), ("changed", rows.changed)):
        lines += [f"{name}: {example}" for example in rows.examples[name]]
        lines += [f"and {total - SHOWN} more {name}"] if total > SHOWN else []
    return lines


def _origin_lines(origin: Divergence) -> list[str]:
    where = origin.first if origin.first == origin.second else f"{origin.first} -> {origin.second}"
    return [f"{origin.path}: {where}", *(f"  {why}" for why in origin.why[:SHOWN])] + (
        [f"  and {len(origin.why) - SHOWN} more"] if len(origin.why) > SHOWN else []
    )


def _score_line(change: ScoreChange) -> str:
    verdict = "" if change.low <= 0 <= change.high else ", the interval excludes 0"
    numbers = f"{change.first:.3f} -> {change.second:.3f}, {change.mean:+.3f} [{change.low:+.3f}, {change.high:+.3f}]"
    return f"{change.task}, {change.policies}: {numbers} over {change.items} items{verdict}"
