"""YAML 1.2 with line numbers: `1e-4` is a number, `no` a text, `010` ten, and a repeated key an error."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import yaml
from yaml.constructor import ConstructorError
from yaml.reader import ReaderError

from pedigree.configs.base.problems import UsageProblem
from pedigree.configs.base.secrets import find_secrets, secret_variables

Place = tuple[str | int, ...]
LONGEST, DEEPEST, MOST_VALUES = 4 << 20, 64, 100_000
"""Limits for a recipe or profile: bytes, nesting levels, values."""


@dataclass(frozen=True)
class Problem:
    """One error in a file: its location, and a message with value, bound and remedy."""

    file: str
    line: int | None
    message: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.message}" if self.line else f"{self.file}: {self.message}"


class ConfigError(UsageProblem):
    """All problems found in a recipe or profile."""

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = problems
        super().__init__("\n".join(str(problem) for problem in problems))


class Loader(yaml.SafeLoader):
    """YAML loader with recipe semantics."""


class FastLoader(yaml.CSafeLoader):
    """The same on libyaml: ten times as fast, but it rejects some valid YAML (`{key:}`) and its errors are less precise."""


def _integer(loader: Any, node: yaml.ScalarNode) -> int:
    text = loader.construct_scalar(node)
    try:
        return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))
    except ValueError as error:  # too many digits for Python
        raise ConstructorError(None, None, f"an integer has {len(text)} digits", node.start_mark) from error


CORE = {
    "null": r"~|null|Null|NULL|",
    "bool": r"true|True|TRUE|false|False|FALSE",
    "int": r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+",
    "float": r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
    "merge": r"<<",
}
"""Tag → plain scalars: the core schema of YAML 1.2 (section 10.3.2), where `no`, `12:30` and `2024-01-01` are texts, and merge keys."""
PREFIX = "tag:yaml.org,2002:"
KEYS = {f"{PREFIX}str", f"{PREFIX}merge"}
for _loader in (Loader, FastLoader):
    _loader.yaml_implicit_resolvers = {}
    for _tag, _pattern in CORE.items():
        _loader.add_implicit_resolver(f"{PREFIX}{_tag}", re.compile(rf"(?:{_pattern})$"), None)
    _loader.add_constructor(f"{PREFIX}int", _integer)


@dataclass(frozen=True)
class YamlDocument:
    """A YAML mapping and the line of each of its values."""

    file: str
    value: dict[str, Any]
    lines: dict[Place, int]

    def line(self, place: Place) -> int | None:
        """Line of a value, or of the nearest enclosing value."""
        for end in range(len(place), -1, -1):
            if place[:end] in self.lines:
                return self.lines[place[:end]]
        return None

    def problem(self, place: Place, message: str) -> Problem:
        return Problem(self.file, self.line(place), message)


def parse_value(text: str) -> Any:
    """Parse one YAML value, as in `--set a.b=VALUE`.

    Raises:
        ValueError: not YAML, a repeated key, or a number without a JSON form (values are hashed before any field validates them).
        ConfigError: exceeds the size limits.
    """
    try:
        loader, node = _compose(text, "--set", Loader)
        problems = _problems(node, {}, "--set") if node else []
        value = loader.construct_document(node) if node and not problems else None
    except yaml.YAMLError as error:
        raise ValueError(f"not valid YAML: {_why(error)}") from error
    if problems:
        raise ValueError(problems[0].message)
    try:
        json.dumps(value, allow_nan=False)
    except ValueError as error:
        raise ValueError("it has a number that is not finite") from error
    return value


def secret_problem(what: str, text: str, variables: Mapping[str, str] | None = None) -> str | None:
    """Error message for a text that appears to contain a secret, without the text itself; None if it contains none.

    Values of recipes and profiles are copied into `params.yaml`, `dvc.lock` and the records of every descendant model.
    """
    kinds = find_secrets(text, variables)
    if not kinds:
        return None
    remedy = "remove it, revoke it if it was ever committed, and use an environment variable (HF_TOKEN, AWS_PROFILE, ...)"
    return f"{what} appears to contain {' and '.join(kinds)}, which would be recorded permanently: {remedy}"


def read_document(path: Path, shown_as: str | None = None) -> YamlDocument:
    """Read a YAML file that contains a mapping.

    Raises:
        ConfigError: missing, not YAML, not a mapping, a repeated key, or a value that contains a secret.
    """
    name = shown_as or path.name
    text = read_text(path, name)
    lines: dict[Place, int] = {}
    try:
        try:
            loader, node = _compose(text, name, FastLoader)
        except yaml.YAMLError:
            loader, node = _compose(text, name, Loader)
        if node is None:
            raise ConfigError([Problem(name, None, "is empty: write keys and values, or remove the file")])
        if not isinstance(node, yaml.MappingNode):
            raise ConfigError([Problem(name, 1, "must be a mapping of keys to values")])
        problems = _problems(node, lines, name)
        if problems:
            raise ConfigError(problems)
        value = loader.construct_document(node)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        before = text[: error.position] if isinstance(error, ReaderError) else ""
        line = mark.line if mark else before.count("\n")
        raise ConfigError([Problem(name, line + 1, f"not valid YAML: {_why(error)}")]) from error
    return YamlDocument(name, value, lines)


MEANINGS = {
    r"character '\\t'": "indented with a tab; use spaces",
    "mapping values are not allowed": "two `: ` in one value, or a line indented further than the key above: quote it, or align the line",
    "expected ',' or": "a comma is missing, or the bracket opened in line {line} is not closed",
    "expected <block end>": "not aligned with the lines above, or a bracket too many",
    "quoted scalar, found unexpected end": "the quotation mark in line {line} is not closed",
    "simple key": "line {line} has no `: ` after its key",
    "character '(.)' that cannot start": "quote text that begins with {0}",
    "unknown escape": "in double quotes, a backslash begins an escape such as \\n: write single quotes",
}
"""Words of the YAML parser → what the author of the file did."""


def _why(error: yaml.YAMLError) -> str:
    if isinstance(error, ReaderError):
        return f"the character {chr(cast('int', error.character))!a} is not allowed"
    context, problem, opened = (getattr(error, name, None) for name in ("context", "problem", "context_mark"))
    message = ", ".join(filter(None, (context, problem))) or "cannot be parsed"
    for words, meaning in MEANINGS.items():
        if found := re.search(words, message):
            return meaning.format(*found.groups(), line=opened.line + 1 if opened else "")
    return message


def read_text(path: Path, name: str) -> str:
    """The text of a small file of the user.

    Raises:
        ConfigError: missing, not a regular file, too large, or not UTF-8.
    """
    try:
        if path.exists() and not path.is_file():
            raise ConfigError([Problem(name, None, "cannot be read: not a regular file")])
        data = path.read_bytes()
        if len(data) > LONGEST:
            raise ConfigError([Problem(name, None, f"has {len(data)} bytes; the limit for a recipe or profile is {LONGEST}")])
        return data.decode()
    except OSError as error:
        raise ConfigError([Problem(name, None, f"cannot be read: {error.strerror}")]) from error
    except ValueError as error:
        raise ConfigError([Problem(name, None, "cannot be read: the content is not UTF-8, or the file name is invalid")]) from error


def _compose(text: str, name: str, kind: Any) -> tuple[Any, yaml.Node | None]:
    _measure(text, name, kind)
    loader = kind(text)
    return loader, loader.get_single_node()


def _measure(text: str, name: str, loader: Any) -> None:
    """Reject excessive nesting and alias expansion; each alias counts as its full expansion."""
    sizes: dict[str, int] = {}
    open_: list[tuple[str | None, int]] = []
    total = 0
    for event in yaml.parse(text, Loader=loader):
        if isinstance(event, yaml.CollectionStartEvent):
            open_.append((event.anchor, total))
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = open_.pop()
            sizes |= {anchor: total - before + 1} if anchor else {}
        total += sizes.get(event.anchor, 1) if isinstance(event, yaml.AliasEvent) else 1
        if len(open_) > DEEPEST or total > MOST_VALUES:
            line = event.start_mark.line + 1 if event.start_mark else None
            raise ConfigError([Problem(name, line, f"has more than {MOST_VALUES} values or {DEEPEST} levels after alias expansion")])


def _problems(top: yaml.Node, lines: dict[Place, int], file: str) -> list[Problem]:
    """Problems in a node tree; records the line of each value in `lines`."""
    problems: dict[Problem, None] = {}  # an anchor's are found again at each alias
    variables = secret_variables()

    def problem(line: int, message: str) -> None:
        problems[Problem(file, line, message)] = None

    def no_secret(scalar: yaml.Node, place: Place) -> None:
        found = secret_problem(".".join(map(str, place)) or "a key", str(scalar.value), variables)
        if found:
            problem(_line(scalar), found)

    def walk(node: yaml.Node, place: Place, above: tuple[yaml.Node, ...]) -> None:
        if node in above:
            problem(_line(node), "alias refers to its own anchor")
            return
        above = (*above, node)
        lines.setdefault(place, _line(node))
        if wrong_tag := _tag_problem(node):
            problem(_line(node), f"not valid YAML: {wrong_tag}")
        elif isinstance(node, yaml.MappingNode):
            keys: dict[str, list[int]] = {}
            for key, value in node.value:
                if key.tag not in KEYS:
                    is_scalar = isinstance(key, yaml.ScalarNode)
                    what, remedy = (
                        (repr(key.value), "quote it") if is_scalar else ("a list or a mapping", "quote text that begins with { or [")
                    )
                    problem(_line(key), f"key is {what}, not a string: {remedy}")
                    continue
                no_secret(key, place)
                keys.setdefault(key.value, []).append(_line(key))
                inner = (*place, key.value)
                lines[inner] = _line(key)
                walk(value, inner, above)
            for name, found in keys.items():
                if len(found) > 1:
                    problem(found[-1], f"duplicate key {name!r}: {_setters(found)}; keep one")
        elif isinstance(node, yaml.SequenceNode):
            for index, value in enumerate(node.value):
                walk(value, (*place, index), above)
        else:
            no_secret(node, place)

    walk(top, (), ())
    return list(problems)


def _tag_problem(node: yaml.Node) -> str | None:
    """Why a value with an explicit tag is none of the core schema of YAML 1.2."""
    kind = node.tag.removeprefix(PREFIX)
    if kind == {yaml.MappingNode: "map", yaml.SequenceNode: "seq", yaml.ScalarNode: "str"}[type(node)]:
        return None
    if not isinstance(node, yaml.ScalarNode) or kind not in CORE or kind == "merge":
        return f"{node.value!r} is a key" if kind == "merge" else f"the tag {node.tag} is not known: remove it"
    return None if re.fullmatch(CORE[kind], node.value) else f"{node.value!r:.40} is not of the type {kind}"


def _line(node: yaml.Node) -> int:
    return node.start_mark.line + 1


def _setters(lines: list[int]) -> str:
    """The lines that set one key, as a clause."""
    distinct = [str(line) for line in sorted(set(lines))]
    if len(distinct) == 1:
        return f"line {distinct[0]} sets it twice"
    return f"lines {', '.join(distinct[:-1])} and {distinct[-1]} {'both' if len(distinct) == 2 else 'all'} set it"
