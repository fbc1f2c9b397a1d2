"""Validation errors in the words of recipes and profiles: the keys that are wrong, each once, with the nearest valid name."""

import json
import re
import types
from collections import defaultdict
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, Union, cast, get_args, get_origin

from pydantic import BaseModel, ValidationError

from pedigree.configs.base.document import ConfigError, Place, YamlDocument, read_document
from pedigree.configs.base.other_names import ELSEWHERE

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

M = TypeVar("M", bound=BaseModel)
TRUTH = {"yes": "true", "on": "true", "y": "true", "true": "true", "no": "false", "off": "false", "n": "false", "false": "false"}
"""What YAML 1.1, or a quoted text, means as a truth value → how YAML 1.2 spells it."""
LONGEST = 80
"""Characters shown of a value."""
MUST = {
    "bool_type": "true or false",
    "dict_type": "a mapping",
    "finite_number": "a finite number",
    "float_type": "a number",
    "greater_than": "greater than {gt}",
    "greater_than_equal": "at least {ge}",
    "int_type": "a whole number",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "literal_error": "{expected}",
    "model_attributes_type": "a mapping",
    "model_type": "a mapping",
    "none_required": "null",
    "string_too_long": "at most {max_length} in length",
    "string_too_short": "at least {min_length} in length",
    "string_type": "text",
    "too_long": "at most {max_length} in length",
    "too_short": "at least {min_length} in length",
    "tuple_type": "a list",
    "union": "{expected}",
}
"""Type of an error → what the value must be."""


class Mistakes(ValueError):
    """Wrong keys below a value, found by its validator: (place, message) of each."""

    def __init__(self, found: list[tuple[Place, str]]) -> None:
        self.found = found
        super().__init__("; ".join(message for _, message in found))


def mistakes(error: ValidationError, model: type[BaseModel], value: Any, name: str = "", within: Place = ()) -> list[tuple[Place, str]]:
    """(place in the value, message) of each wrong key; `name` of the whole is for lists of its fields, `within` for messages."""
    details = _without_other_members(error.errors(include_url=False), value)
    for detail in details:  # a model with validators is a member of a union without a name
        detail["loc"] = tuple(part for part in detail["loc"] if not str(part).startswith("function-"))
    unknown: dict[int, str] = {}
    renamed: set[Place] = set()
    for number, detail in enumerate(details):
        above, key = detail["loc"][:-1], str(detail["loc"][-1:][0] if detail["loc"] else "")
        if detail["type"] == "extra_forbidden" and (known := _fields(model, above)):
            required = [str(one["loc"][-1]) for one in details if one["type"] == "missing" and one["loc"][:-1] == above]
            unknown[number] = unknown_key(key, known, f"fields of {name}" if name and not above else "its fields", required)
            renamed |= {(*above, word) for word in _words(unknown[number])}
    found: list[tuple[Place, str]] = []
    for number, detail in enumerate(details):
        loc, of_value = detail["loc"], set(_parts_of_value(detail["loc"], value))
        place = tuple(loc[depth] for depth in sorted(of_value))
        several = detail.get("ctx", {}).get("error")
        if isinstance(several, Mistakes):
            found += [((*place, *inner), message) for inner, message in several.found]
        elif detail["type"] != "missing" or loc not in renamed:
            message = unknown.get(number) or _message(detail, tags(model, loc))
            named = [
                part for depth, part in enumerate(loc) if depth in of_value or depth == len(loc) - 1 or part in tags(model, loc[:depth])
            ]
            found.append((place, ": ".join([".".join(map(str, (*within, *named))), message] if within or named else [message])))
    return found


def _words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text))


def validated(model: type[M], document: YamlDocument, place: Place, value: Any, name: str = "") -> M:
    """Validate a value in a file.

    Raises:
        ConfigError: lists every wrong key with its line.
    """
    try:
        return model.model_validate(value)
    except ValidationError as error:
        found = mistakes(error, model, value, name, place)
        raise ConfigError([document.problem((*place, *inner), message) for inner, message in found]) from error


def read_packaged(model: type[M], path: Path, shown_as: str) -> M:
    """The content of a YAML file that Pedigree ships, or that a stage names.

    Raises:
        ValueError: the file is invalid.
    """
    try:
        document = read_document(path, shown_as)
        return validated(model, document, (), document.value)
    except ConfigError as error:
        raise ValueError("; ".join(map(str, error.problems))) from error


def unknown_key(name: str, known: Sequence[str], of: str, required: Sequence[str] = ()) -> str:
    """What to write instead of an unknown key: its name here, the nearest one, or one of all, of which some are required."""
    listed = f"; {of}: {', '.join(f'{one} (required)' if one in required else one for one in known)}"
    if name not in ELSEWHERE:
        return f"unknown key{nearest(name, known) or listed}"
    there = ELSEWHERE[name]
    if there.startswith("`") and not _words(there) & {*known}:
        return f"unknown key{listed}; {name} of other trainers is {there} in a stage that has it"
    return f"unknown key; instead of {name} write {there}"


def nearest(name: str, known: Sequence[str]) -> str:
    """The nearest known name, as the end of a message."""
    near = _nearest(name, known)
    return f"; did you mean {near}?" if near else ""


def not_one_of(given: Any, known: Sequence[str], remedy: str = "") -> str:
    """That a value is none of the known ones, with the nearest or, failing that, another remedy; as the end of a message."""
    near = nearest(given, known) if isinstance(given, str) else ""
    return f"{_shown(given)} is not one of {', '.join(known)}{near or (remedy and f': {remedy}')}"


def _nearest(name: str, known: Sequence[str]) -> str | None:
    plain = {one.lower(): one for one in known}
    return next((plain[near] for near in get_close_matches(name.lower(), plain, 1, 0.66)), None)


def _without_other_members(details: list["ErrorDetails"], value: Any) -> list["ErrorDetails"]:
    """The errors without those of members of a union that the value was not meant for, and without follow-up errors of lists."""
    members: dict[Place, dict[Any, list[ErrorDetails]]] = defaultdict(dict)
    for detail in details:
        loc = detail["loc"]
        named = range(len(loc) - (detail["type"] in ("missing", "extra_forbidden")))
        for depth in set(named) - set(_parts_of_value(loc, value)):
            members[loc[:depth]].setdefault(loc[depth], []).append(detail)
    left = list(details)
    for union in members.values():
        if len(union) < 2:
            continue
        depths = {name: max(len(one["loc"]) for one in errors) for name, errors in union.items()}
        meant = max(union, key=lambda name: (depths[name], -len(union[name])))
        others = [one for name, errors in union.items() if name != meant for one in errors]
        if len(set(depths.values())) == 1 and all(len(errors) == 1 for errors in union.values()):  # no member fits better than another
            both = union[meant][0]
            texts = dict.fromkeys(_must(one) for errors in union.values() for one in errors)
            if MUST["float_type"] in texts:
                texts.pop(MUST["int_type"], None)
            left[left.index(both)] = {**both, "loc": both["loc"][:-1], "type": "union", "ctx": {"expected": " or ".join(texts)}}
        left = [one for one in left if one not in others]
    lists = [one["loc"] for one in left if one["type"] == "too_short"]
    follow = [loc for loc in lists if any(one["loc"][: len(loc)] == loc != one["loc"] for one in left)]
    return [one for one in left if one["type"] != "too_short" or one["loc"] not in follow]


def _parts_of_value(loc: Place, value: Any) -> Iterator[int]:
    """The positions in a location of keys and indices of the value; other parts are members of unions, or missing."""
    inner: Any = value
    for depth, part in enumerate(loc):
        indices = range(len(inner)) if isinstance(inner, (list, tuple)) else ()
        if part in (inner if isinstance(inner, dict) else indices):
            inner = cast("Any", inner)[part]
            yield depth


def _fields(model: Any, loc: Place) -> tuple[str, ...]:
    """Names of the fields at a location."""
    return tuple(dict.fromkeys(name for one in _models(model, loc) for name in one.model_fields))


def tags(model: Any, loc: Place) -> tuple[str, ...]:
    """Types of the members of a union at a location."""
    return tuple(tag for one in _models(model, loc) if (tag := _tag(one)))


def _models(model: Any, loc: Place) -> list[type[BaseModel]]:
    found = [model]
    for part in loc:
        found = [inner for one in found for inner in _inside(one, part)]
    return [each for one in found for each in _members(one) if _is_model(each)]


def _inside(annotation: Any, part: str | int) -> Iterator[Any]:
    """The types below one part of a location: of a field, an element, or a member of a union."""
    models = [one for one in _members(annotation) if _is_model(one)]
    for one in _members(annotation):
        if isinstance(part, int):
            yield from (inner for inner in get_args(one) if inner is not Ellipsis)
        elif one in models and part in one.model_fields and not (len(models) > 1 and part in map(_tag, models)):
            yield one.model_fields[part].annotation
        elif one in models and part in (_tag(one), one.__name__):
            yield one
        elif get_origin(one) is dict:
            yield get_args(one)[1]


def _members(annotation: Any) -> Iterator[Any]:
    if get_origin(annotation) is Annotated:
        yield from _members(get_args(annotation)[0])
    elif get_origin(annotation) in (Union, types.UnionType):
        for one in get_args(annotation):
            yield from _members(one)
    else:
        yield annotation


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _tag(model: type[BaseModel]) -> str | None:
    field = model.model_fields.get("type")
    return next(iter(get_args(field.annotation)), None) if field and get_origin(field.annotation) is Literal else None


def _message(detail: "ErrorDetails", types: Sequence[str]) -> str:
    given, listed = detail["input"], ", ".join(types)
    match detail["type"]:
        case "missing":
            return "required, but missing: add it"
        case "value_error":
            return detail["msg"].removeprefix("Value error, ")
        case "union_tag_invalid":
            return f"type {not_one_of(given['type'], types)}"
        case "union_tag_not_found":
            return f"`type` is missing: write {{type: ...}} with one of {listed}"
        case "model_type" | "model_attributes_type":
            near = _nearest(given, types) if isinstance(given, str) else None
            remedy = f"{{type: {near}, ...}}" if near else f"{{type: ...}} with one of {listed}" if types else "its fields in braces"
            return f"must be a mapping, not {_shown(given)}: write {remedy}"
    return f"must be {_must(detail)}, not {detail.get('ctx', {}).get('actual_length', _shown(given))}{_instead(detail)}"


def _must(detail: "ErrorDetails") -> str:
    bounds = {
        name: int(bound) if isinstance(bound, float) and bound.is_integer() else bound for name, bound in detail.get("ctx", {}).items()
    }
    return MUST[detail["type"]].format(**bounds) if detail["type"] in MUST else detail["msg"].removeprefix("Input should be ")


def _shown(given: Any) -> str:
    """A value as in YAML, on one line."""
    if isinstance(given, (bool, type(None), dict, list, tuple)):
        text = json.dumps(given, ensure_ascii=False, default=str)
        return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
    return repr(given)


def _instead(detail: "ErrorDetails") -> str:
    """How to write a scalar of another type or spelling."""
    kind, given = detail["type"], detail["input"]
    if kind == "literal_error" and isinstance(given, str):
        return nearest(given, re.findall(r"'([^']*)'", detail.get("ctx", {})["expected"]))
    if kind == "bool_type" and str(given).lower() in TRUTH:
        return f": write {TRUTH[str(given).lower()]}"
    if kind == "tuple_type" and given:
        return ": write it in brackets"
    if kind == "string_type" and isinstance(given, (bool, int, float)):
        return ": quote it"
    if kind not in ("int_type", "float_type") or isinstance(given, bool):
        return ""
    try:
        number = float(str(given))
    except ValueError:
        return ""
    return f": write {str(given).strip() if kind == 'float_type' else int(number)}" if kind == "float_type" or number.is_integer() else ""
