"""YAML with line numbers, without YAML 1.1's surprises (`1e-4` is a number here, repeated keys are an error)."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from configs.base.problems import UsageProblem
from configs.base.secrets import find_secrets, secret_variables

Place = tuple[str | int, ...]
LONGEST, DEEPEST, MOST_VALUES = 4 << 20, 64, 100_000
"""Bytes, levels and values of a recipe or profile."""
TOO_DEEP = "its lists or mappings are nested too deeply to be read: write it flatter"


@dataclass(frozen=True)
class Problem:
    """One thing wrong in a file: where, and a message with value, bound and remedy."""

    file: str
    line: int | None
    message: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.message}" if self.line else f"{self.file}: {self.message}"


class ConfigError(UsageProblem):
    """All problems of a recipe or profile at once."""

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = problems
        super().__init__("\n".join(str(problem) for problem in problems))


class Loader(yaml.SafeLoader):
    """Reads YAML as recipes mean it."""


class FastLoader(yaml.CSafeLoader):
    """The same, by libyaml: ten times as fast, but it refuses some of YAML (`{key:}`) and says less of a mistake."""


for _loader in (Loader, FastLoader):
    _loader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:float"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    _loader.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"[-+]?(?:\d+\.\d*(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?|\d+[eE][-+]?\d+|\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"),
        list("-+0123456789."),
    )


@dataclass(frozen=True)
class YamlDocument:
    """A YAML mapping and the line of each of its values."""

    file: str
    value: dict[str, Any]
    lines: dict[Place, int]

    def line(self, place: Place) -> int | None:
        """The line of a value, or of the nearest thing around it."""
        for end in range(len(place), -1, -1):
            if place[:end] in self.lines:
                return self.lines[place[:end]]
        return None

    def problem(self, place: Place, message: str) -> Problem:
        return Problem(self.file, self.line(place), message)


def parse_value(text: str) -> Any:
    """One YAML value, as in `--set a.b=VALUE`.

    Raises:
        ValueError: not YAML, or what no recipe can hold: hashes are made of it before a field is asked whether it takes it.
        ConfigError: it would grow without end.
    """
    try:
        value = yaml.load(text, Loader=Loader)
    except RecursionError as error:
        raise ValueError(TOO_DEEP) from error
    except yaml.YAMLError as error:
        raise ValueError(f"not valid YAML: {getattr(error, 'problem', None) or 'cannot be parsed'}") from error
    _measure(text, "--set", Loader)
    _refuse_formless(value)
    return value


def _refuse_formless(value: Any, above: tuple[int, ...] = ()) -> None:
    """Refuses what has no form in canonical JSON, of which identities are hashed."""
    if id(value) in above:
        raise ValueError("an alias stands inside its own anchor")
    above = (*above, id(value))
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise ValueError(f"the key {key!r} is no text: write it in quotes")
        value = list(value.values())
    if isinstance(value, list):
        for inner in value:
            _refuse_formless(inner, above)
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value} is no finite number")
    elif value is not None and not isinstance(value, (str, int, float)):
        raise ValueError(f"{str(value)[:40]} is a {type(value).__name__}, which no field takes: write it in quotes where a text is meant")


def secret_problem(what: str, text: str, variables: Mapping[str, str] | None = None) -> str | None:
    """Why a text may not stand in a recipe or profile, without the text itself, or None.

    What stands there goes into `params.yaml`, `dvc.lock` and the records of every model below.
    """
    kinds = find_secrets(text, variables)
    if not kinds:
        return None
    remedy = "take it out, withdraw it if it was ever committed, and give it in an environment variable (HF_TOKEN, AWS_PROFILE, ...)"
    return f"{what} holds what looks like {' and '.join(kinds)}, and would be recorded for ever: {remedy}"


def read_document(path: Path, shown_as: str | None = None) -> YamlDocument:
    """Reads a YAML file whose top is a mapping.

    Raises:
        ConfigError: missing, not YAML, not a mapping, a key given twice, or a value that holds a secret.
    """
    name = shown_as or path.name
    text = _text(path, name)
    lines: dict[Place, int] = {}
    try:
        try:
            loader, node = _compose(text, name, FastLoader)
        except yaml.YAMLError:
            loader, node = _compose(text, name, Loader)
        if not isinstance(node, yaml.MappingNode):
            raise ConfigError([Problem(name, 1, "must be a mapping of keys to values")])
        problems = _problems(node, lines, name)
        if problems:
            raise ConfigError(problems)
        value = loader.construct_document(node)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or "cannot be parsed"
        raise ConfigError([Problem(name, mark.line + 1 if mark else None, f"not valid YAML: {problem}")]) from error
    except (ValueError, TypeError) as error:  # a number or a key that Python has no form for
        raise ConfigError([Problem(name, None, f"not valid YAML: {error}")]) from error
    return YamlDocument(name, value, lines)


def _text(path: Path, name: str) -> str:
    try:
        if path.exists() and not path.is_file():
            raise ConfigError([Problem(name, None, "cannot be read: it is no file")])
        data = path.read_bytes()
        if len(data) > LONGEST:
            raise ConfigError([Problem(name, None, f"has {len(data)} bytes: a recipe or profile has at most {LONGEST}")])
        return data.decode()
    except OSError as error:
        raise ConfigError([Problem(name, None, f"cannot be read: {error.strerror}")]) from error
    except ValueError as error:
        raise ConfigError([Problem(name, None, "cannot be read: it is not UTF-8, or its name is none")]) from error


def _compose(text: str, name: str, kind: Any) -> tuple[Any, yaml.Node | None]:
    _measure(text, name, kind)
    loader = kind(text)
    return loader, loader.get_single_node()


def _measure(text: str, name: str, loader: Any) -> None:
    """Refuses what would grow without end: deep nesting, and aliases of aliases. Each alias counts as all that it stands for."""
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
            raise ConfigError([Problem(name, line, f"holds more than {MOST_VALUES} values or {DEEPEST} levels, aliases written out")])


def _problems(top: yaml.Node, lines: dict[Place, int], file: str) -> list[Problem]:
    """What is wrong in a tree of nodes; notes the line of each value in `lines`."""
    problems: list[Problem] = []
    variables = secret_variables()

    def problem(node: yaml.Node, message: str) -> None:
        problems.append(Problem(file, node.start_mark.line + 1, message))

    def no_secret(scalar: yaml.Node, place: Place) -> None:
        found = secret_problem(".".join(map(str, place)) or "a key", str(scalar.value), variables)
        if found:
            problem(scalar, found)

    def walk(node: yaml.Node, place: Place, above: tuple[yaml.Node, ...]) -> None:
        if node in above:
            problem(node, "an alias stands inside its own anchor")
            return
        above = (*above, node)
        lines.setdefault(place, node.start_mark.line + 1)
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                if not isinstance(key, yaml.ScalarNode):
                    problem(key, "a key is a list or a mapping: write a text")
                    continue
                inner = (*place, key.value)
                no_secret(key, place)
                if inner in lines:
                    problem(key, f"key {key.value!r} stands here twice")
                lines[inner] = key.start_mark.line + 1
                walk(value, inner, above)
        elif isinstance(node, yaml.SequenceNode):
            for index, value in enumerate(node.value):
                walk(value, (*place, index), above)
        else:
            no_secret(node, place)

    walk(top, (), ())
    return problems
