"""Tables of the fields of `--json` documents, generated from the results of the commands."""

import ast
import inspect
import re
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import BaseModel, PlainSerializer
from pydantic.fields import FieldInfo

from pedigree.pipelines.cli.run_results import RehearsalResult, RunResult
from pedigree.pipelines.cli.running_jobs import Jobs
from pedigree.pipelines.cli.status import RecipeStatus
from pedigree.pipelines.json_documents import ONE_WORD
from pedigree.pipelines.maintain.forget import Forgetting
from pedigree.pipelines.publish.attribution import TraceResult
from pedigree.pipelines.run.planning import RunPlan

RESULTS: Mapping[str, type] = {
    "plan": RunPlan, "status": RecipeStatus, "jobs": Jobs, "run": RunResult, "rehearse": RehearsalResult, "trace": TraceResult,
    "forget": Forgetting,
}  # fmt: skip
NAMES = {str: "string", int: "integer", float: "number", bool: "true or false", type(None): "null"}


def tables() -> Iterator[str]:
    """Lines of Markdown: a table per command."""
    for command, result in RESULTS.items():
        yield from (f"| `{command}` | | |", "|---|---|---|")
        known = set(typing.get_type_hints(RunResult)) if command == "rehearse" else set()
        yield from dict.fromkeys(row for row in _rows(result, "") if re.split(r"[`\[.]", row)[1] not in known)
        yield ""


def meanings(of: type) -> dict[str, str]:
    """Field → docstring, including base classes. Pydantic's `use_attribute_docstrings` would read all sources at every start."""
    found: dict[str, str] = {}
    for base in reversed(of.__mro__):
        if base.__module__.startswith("pedigree.") and base is not BaseModel:
            (tree,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
            assert isinstance(tree, ast.ClassDef)
            for field, below in pairwise(tree.body):
                match field, below:
                    case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                        found[name] = text
    return found


def _rows(of: type, prefix: str) -> Iterator[str]:
    texts = meanings(of)
    for name, annotation in typing.get_type_hints(of, include_extras=True).items():
        if not any(isinstance(mark, FieldInfo) and mark.exclude for mark in getattr(annotation, "__metadata__", ())):
            kind, inner, many = _type(annotation)
            yield f"| `{prefix}{name}` | {kind} | {' '.join(texts.get(name, '').split())} |"
            for part in inner:
                yield from _rows(part, f"{prefix}{name}{many}.")


def _type(annotation: Any) -> tuple[str, list[type], str]:
    """What to call a type, the types whose fields it has, and the way from its name to theirs."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        (serializer,) = [mark for mark in arguments if isinstance(mark, PlainSerializer)]
        written: Any = typing.get_type_hints(serializer.func).get("return") if serializer is not ONE_WORD else None
        kind, inner, many = _type(written or arguments[0])
        return (kind.replace(" ", "_").replace(",_", ", ") if serializer is ONE_WORD else kind), inner, many
    if origin in (typing.Union, types.UnionType):
        parts = [_type(part) for part in arguments if part is not int or float not in arguments]
        return " or ".join(dict.fromkeys(kind for kind, _, _ in parts)), [one for _, inner, _ in parts for one in inner], ""
    if origin is Literal:
        return ", ".join(f"`{value}`" if isinstance(value, str) else str(value).lower() for value in arguments), [], ""
    if origin in (tuple, list):
        kind, inner, _ = _type(arguments[0])
        return f"list of {kind}s" if kind in NAMES.values() else "list", inner, "[]"
    if inspect.isclass(annotation) and is_dataclass(annotation):
        return "object", [annotation], ""
    if origin is not None and arguments and arguments[0] is str:  # a mapping
        kind, inner, many = _type(arguments[1])
        return "object", inner, f".*{many}"
    return NAMES.get(annotation, "object"), [], ""
