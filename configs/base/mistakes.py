"""Validation errors in the words of recipes and profiles: the keys that are wrong, each once, with the nearest valid name."""

import re
import types
from collections import defaultdict
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, cast, get_args, get_origin

from pydantic import BaseModel, ValidationError

from pedigree.configs.base.document import Place
from pedigree.configs.base.other_names import ELSEWHERE

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

TRUTH = {"yes": "true", "on": "true", "y": "true", "no": "false", "off": "false", "n": "false"}
"""What YAML 1.1 read as a truth value → how YAML 1.2 spells it."""


def mistakes(error: ValidationError, model: type[BaseModel], value: Any, name: str = "") -> list[tuple[Place, str]]:
    """(place in the value, message) of each wrong key; `name` of the whole is for lists of its fields."""
    details = _without_other_members(error.errors(include_url=False), value)
    for detail in details:  # a model with validators is a member of a union without a name
        detail["loc"] = tuple(part for part in detail["loc"] if not str(part).startswith("function-"))
    places = [tuple(detail["loc"][depth] for depth in _parts_of_value(detail["loc"], value)) for detail in details]
    fields = [_fields(model, detail["loc"][:-1]) if detail["type"] == "extra_forbidden" else () for detail in details]
    names = [str(detail["loc"][-1]) if known else "" for detail, known in zip(details, fields, strict=True)]
    meant = [_nearest(one, known) or _elsewhere(one) for one, known in zip(names, fields, strict=True)]
    written = {(*detail["loc"][:-1], near) for detail, near in zip(details, meant, strict=True) if near}
    found = []
    for detail, place, known in zip(details, places, fields, strict=True):
        if detail["type"] == "missing" and detail["loc"] in written:
            continue  # it is there, under another name
        of = f"fields of {name}" if name and len(detail["loc"]) == 1 else "its fields"
        message = unknown_key(str(detail["loc"][-1]), known, of) if known else _message(detail)
        shown = ".".join(map(str, detail["loc"]))
        found.append((place, f"{shown}: {message}" if shown else message))
    return found


def unknown_key(name: str, known: Sequence[str], of: str) -> str:
    """What to write instead of an unknown key: its name here, the nearest one, or one of all."""
    if name in ELSEWHERE:
        return f"unknown key; instead of {name} write {ELSEWHERE[name]}"
    return f"unknown key{nearest(name, known) or '; ' + of + ': ' + ', '.join(known)}"


def nearest(name: str, known: Sequence[str]) -> str:
    """The nearest known name, as the end of a message."""
    near = _nearest(name, known)
    return f"; did you mean {near}?" if near else ""


def _nearest(name: str, known: Sequence[str]) -> str | None:
    return next(iter(get_close_matches(name, known, 1, 0.7)), None) if name not in ELSEWHERE else None


def _elsewhere(name: str) -> str | None:
    """The field that another project's name stands for, if it has one of its own here."""
    found = re.match(r"`(\w+)`", ELSEWHERE.get(name, ""))
    return found[1] if found else None


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
            texts = dict.fromkeys(one["msg"].removeprefix("Input should be ") for errors in union.values() for one in errors)
            left[left.index(both)] = {**both, "loc": both["loc"][:-1], "type": "union", "msg": f"Input should be {' or '.join(texts)}"}
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
    found = [model]
    for part in loc:
        found = [inner for one in found for inner in _inside(one, part)]
    return tuple(dict.fromkeys(name for one in found for each in _members(one) if _is_model(each) for name in each.model_fields))


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


def _message(detail: "ErrorDetails") -> str:
    given = detail["input"]
    match detail["type"]:
        case "union_tag_invalid":
            tag, expected = detail.get("ctx", {})["tag"], detail.get("ctx", {})["expected_tags"].replace("'", "").split(", ")
            return f"type {tag!r} is not one of {', '.join(expected)}{nearest(tag, expected)}"
        case "union_tag_not_found":
            return "`type` is missing: write {type: ...}"
        case "model_type" | "model_attributes_type" if isinstance(given, str):
            return f"expected a mapping, not {given!r}: write {{type: {given}, ...}}, or its fields"
        case "model_type" | "model_attributes_type":
            return f"expected a mapping, not {given!r}: write its fields in braces, or remove it"
    message = detail["msg"].removeprefix("Value error, ").replace("a valid tuple", "a list").replace("a valid dictionary", "a mapping")
    if detail["type"] == "missing" or isinstance(given, dict):
        return message
    return f"{message} (it is {given!r}{_instead(detail['type'], given)})"


def _instead(kind: str, given: Any) -> str:
    """How to write a scalar that YAML 1.2 reads as another type."""
    if kind == "bool_type" and str(given).lower() in TRUTH:
        return f": write {TRUTH[str(given).lower()]}"
    text = given.replace("_", "") if isinstance(given, str) else ""
    whole = isinstance(given, float) and given.is_integer()
    if kind == "int_type" and (whole or (text.isdigit() and text != given)):
        return f": write {int(text or given)}"
    return ""
