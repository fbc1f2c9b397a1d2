"""The code that decides what a stage keeps and how it scores: verifiers, filters, decontamination, the scores of an evaluation.

`run.json` records it by name (`decided_by`). Where the code is the one listed in `configs/reviewed_code.json`, it stands for its version,
so that a release may rewrite it without making anything stale; after any other edit, for the hash of its syntax, so that only comments,
docstrings and formatting do not count. What differs from the record makes the stage stale. Other code does not.
"""

import ast
import functools
import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pedigree.configs.base.frozen import digest
from pedigree.configs.language.graph import Node
from pedigree.data.artifacts.artifacts import Run
from pedigree.data.artifacts.provenance import CODE_ROOT, added_kinds, imported, syntax_tree
from pedigree.data.records import records

T = TypeVar("T")
REVIEWED = "configs/reviewed_code.json"
VERIFIERS = "stages/verifiers/__init__.py"
VERIFIER = "verifier "
RELEASED = "as released"
OWN = frozenset({"data", "judging", "measuring"})
"""Families in which the code of an added kind decides."""
LEFT_OUT = ("configs/", "data/artifacts/", "data/host/", "data/store/")
"""What verifiers import from here decides no score."""
BEFORE_RECORDS = {"constraint": 2, "python": 2, "strict_math": 2}
"""Versions of the verifiers behind records without `decided_by`; of all others 1."""
BEFORE_RENAMED = {
    "data/chat/chat_template.py": ("data/chat/chat.py",),
    "stages/sampling/conversations.py": ("stages/rlvr/conversations.py",),
    "stages/rlvr/group_selection.py": ("stages/rlvr/resampling.py", "stages/rlvr/kept_answers.py"),
    "stages/verifiers/project_programs.py": ("stages/verifiers/reward_programs.py",),
}
"""Files → those that had their code before; earlier records name only the latter."""
MODULE = re.compile(r"(pedigree(?:\.\w+)+)(?::\w+)?|(\w+)\.py")
"""Names of modules in texts, by which verifiers start other processes."""


def _cached(read: Callable[[Path], T]) -> Callable[[Path], T]:
    """Keep what was read from a file until the file changes."""
    kept = functools.lru_cache(maxsize=512)(lambda path, modified: read(path))
    return lambda path: kept(path, path.stat().st_mtime_ns)


def decided_by(node: Node, folders: Iterable[tuple[str, Path]], root: Path) -> dict[str, dict[str, str]]:
    """The entry of `run.json` for a result of the code at `root`; empty where that is of a version without reviewed code, or gone."""
    there = (root / "pedigree" / REVIEWED).exists()
    return {"decided_by": deciding_code(node, named_verifiers(node, folders), root)} if there else {}


def deciding_code(node: Node, verifiers: Iterable[str], root: Path = CODE_ROOT) -> dict[str, str]:
    """Name → version or hash, of the code at `root` that decides the result of a stage whose rows name these verifiers."""
    found = {f"{VERIFIER}{name}": _verifier(name, root) for name in sorted(set(verifiers))}
    for part in node.declaration.decided_by(node.config):
        found[part] = _identity(part, _hash(_part_files(part, root)), root, RELEASED)
    if _decides_itself(node):
        own = f"stages/{node.kind}"
        there = [path for name, path in added_kinds(root).items() if name.startswith(f"{own}/")] or _part_files(own, root)
        found[own] = _identity(own, _hash(sorted(path for path in there if path.suffix == ".py" and path.name != "kind.py")), root, "")
    return found


def has_deciding_code(node: Node) -> bool:
    """Whether any code but that of its version decides a stage's result."""
    return bool(node.declaration.verified(node.config) or node.declaration.decided_by(node.config)) or _decides_itself(node)


def _decides_itself(node: Node) -> bool:
    """Whether it is of an added kind that keeps or scores rows."""
    return node.declaration.family in OWN and not (CODE_ROOT / "pedigree" / "stages" / node.kind).is_dir()


def named_verifiers(node: Node, folders: Iterable[tuple[str, Path]]) -> set[str]:
    """The verifiers that the rows of a stage's inputs name, as (port, folder of the artifact); of those that are here."""
    found: set[str] = set()
    for port, folder in folders:
        if port in node.declaration.verified(node.config) and (folder / "payload").is_dir():
            for row in records.stream(folder / "payload", ("verifier", "others")):
                named = (row["verifier"], *(row.get("others") or {}).values())
                found.update(str(one["name"]) for one in named if one)
    return found


def changes(node: Node, run: Run, folders: Iterable[tuple[str, Path]], root: Path = CODE_ROOT) -> list[str]:
    """What decides a stage's result and has changed since its artifact was made, as one reason or none."""
    then = run.decided_by if run.decided_by is not None else _assumed(node, folders, root)
    now = deciding_code(node, [name.removeprefix(VERIFIER) for name in then if name.startswith(VERIFIER)], root)
    then = _before_renamed(then) | then
    found = [f"{name} ({then[name]} -> {one})" for name, one in now.items() if name in then and then[name] != one]
    return [f"deciding code changed: {', '.join(found)}"] if found else []


def _before_renamed(then: Mapping[str, str]) -> dict[str, str]:
    """What a record states about the code of renamed files: that of all of them was as released, or one of them was edited."""
    found: dict[str, str] = {}
    for name, earlier in BEFORE_RENAMED.items():
        stated = [then[one] for one in earlier if one in then]
        if stated:
            found[name] = next((one for one in stated if one != RELEASED), RELEASED)
    return found


def hashes(root: Path = CODE_ROOT) -> dict[str, str]:
    """What `reviewed_code.json` would list if all code at `root` were reviewed: every verifier, and the files and folders listed now."""
    verifiers = {f"{VERIFIER}{name}": _verifier_hash(name, root) for name in _table(root)}
    parts = {part: _hash(_part_files(part, root)) for part in _reviewed(root) if not part.startswith(VERIFIER)}
    return dict(sorted((verifiers | parts).items()))


def _identity(name: str, found: str, root: Path, version: str) -> str:
    return version if _reviewed(root).get(name) == found else f"edited, {found[:12]}"


def _hash(files: Iterable[Path], *more: str) -> str:
    return digest([*more, *([path.name, _syntax(path)[0]] for path in files)])


def _part_files(part: str, root: Path) -> list[Path]:
    place = root / "pedigree" / part
    return sorted(place.rglob("*.py")) if place.is_dir() else [place]


# --- verifiers ---------------------------------------------------------------------------------------------------------


def _verifier(name: str, root: Path) -> str:
    if name not in _table(root):
        return "missing"
    return _identity(f"{VERIFIER}{name}", _verifier_hash(name, root), root, f"version {_table(root)[name].version}")


def _verifier_hash(name: str, root: Path) -> str:
    return _hash(_verifier_files(name, root), *_table(root)[name].functions)


class _Entry(NamedTuple):
    """A verifier in the table of `stages/verifiers/__init__.py`, which is read as text: importing it takes a tenth of a second, and a
    snapshot has its own."""

    functions: tuple[str, ...]
    version: int


def _table(root: Path) -> Mapping[str, _Entry]:
    return _read_table(root / "pedigree" / VERIFIERS)


@_cached
def _read_table(path: Path) -> Mapping[str, _Entry]:
    found: dict[str, _Entry] = {}
    for node in syntax_tree(path.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_VERIFIERS" and isinstance(node.value, ast.Dict):
            for name, call in zip(node.value.keys, node.value.values, strict=True):
                assert isinstance(name, ast.Constant) and isinstance(call, ast.Call)
                version = next((ast.literal_eval(word.value) for word in call.keywords if word.arg == "version"), 1)
                found[str(name.value)] = _Entry(tuple(map(ast.unparse, call.args)), version)
    return found


def _verifier_files(name: str, root: Path) -> list[Path]:
    """The modules of a verifier and those that they import or start."""
    package, found = root / "pedigree", dict[Path, None]()
    waiting = [package / "stages/verifiers" / f"{function.partition('.')[0]}.py" for function in _table(root)[name].functions]
    while waiting:
        path = waiting.pop()
        if path not in found and path.is_file() and not path.relative_to(package).as_posix().startswith(LEFT_OUT):
            found[path] = None
            named = _syntax(path)[1]
            waiting += [package / f"{one.removeprefix('pedigree/')}.py" if "/" in one else path.with_name(f"{one}.py") for one in named]
    return sorted(found)


# --- files -------------------------------------------------------------------------------------------------------------


def _reviewed(root: Path) -> Mapping[str, str]:
    return _read_reviewed(root / "pedigree" / REVIEWED)


@_cached
def _read_reviewed(path: Path) -> Mapping[str, str]:
    return json.loads(path.read_text())


@_cached
def _syntax(path: Path) -> tuple[str, frozenset[str]]:
    """(hash of a module's syntax that all versions of Python agree on, modules that it names: `pedigree/data/x`, or `x` next to it)."""
    text = path.read_text()
    try:
        tree = syntax_tree(text)
    except SyntaxError:  # being written
        return digest(text), frozenset()
    named = {name.replace(".", "/") for name in imported(tree) if name.startswith("pedigree.")}
    for node in ast.walk(tree):
        match = MODULE.fullmatch(node.value) if isinstance(node, ast.Constant) and isinstance(node.value, str) else None
        if match:
            named.add(match[2] or match[1].replace(".", "/"))
    parts: list[str] = []
    _flat(tree, parts)
    return digest("".join(parts)), frozenset(named)


def _flat(value: Any, into: list[str]) -> None:
    """A syntax tree as text, without empty fields, whose number differs between versions of Python."""
    if isinstance(value, ast.AST):
        into.append(f"{type(value).__name__}(")
        for name, inner in ast.iter_fields(value):
            if inner is not None and inner != []:
                into.append(f"{name}=")
                _flat(inner, into)
        into.append(")")
    elif isinstance(value, list):
        for inner in value:
            _flat(inner, into)
            into.append(",")
    else:
        into.append(repr(value))


def _assumed(node: Node, folders: Iterable[tuple[str, Path]], root: Path) -> dict[str, str]:
    """What decided a result whose record does not state it: the versions before records did."""
    before = {name: BEFORE_RECORDS.get(name, 1) for name in _table(root)}
    raised = {name for name, version in before.items() if _verifier(name, root) != f"version {version}"}
    found = {f"{VERIFIER}{name}": f"version {before[name]}" for name in (named_verifiers(node, folders) & raised if raised else ())}
    return found | dict.fromkeys(node.declaration.decided_by(node.config), RELEASED)
