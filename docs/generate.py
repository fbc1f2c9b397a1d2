"""Reference pages from the code: `python -m docs.generate` writes `stages.md`, `profiles.md`, `methods.md`, `cli.md`, `plan.md` and
`flagship.md` in `docs/`."""

import ast
import inspect
import textwrap
import types
import typing
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, Union

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from configs.base.frozen import Frozen
from configs.judging.rephrasing import FindRephrased
from configs.language.execution import Execution, Machine, Numerics, Placement
from configs.language.kinds import KINDS, Kind
from configs.methods.policy_gradient import AGGREGATIONS, AdaptiveKl
from docs import commands, flagship, planning

DOCS = Path(__file__).resolve().parents[1] / "docs"
HEAD = """# Stages

<!-- Written by `python -m docs.generate`; do not edit. -->

A stage is a kind of work with a version. It takes artifacts at named ports, and its result has a type; a recipe connects types
that fit. Everything in the configuration says what the result is: a change of any field makes another artifact. How and where a
stage runs is not here but in `configs/execution/`.
"""
PROFILES_HEAD = """# Execution profiles

<!-- Written by `python -m docs.generate`; do not edit. -->

`configs/execution/NAME.yaml` says how and where stages run: by default for all of them, under `kinds` for a kind of stage, under `stages`
for one stage; the later wins. Nothing here is part of what a result is. `numerics` can change how numbers are rounded, so they are
recorded, and a checkpoint made under others is not resumed unless asked; `placement` changes no bit,
except in a stage with `chunk_size: continuous`, where memory and engines decide which requests are computed together.

The tests show each field by its effect: passes, tokens, calls, bytes, exchanges between ranks, processes, files. What these fields do to
training is told in [training.md](training.md), how jobs end and go on in [resume.md](resume.md), what stages need in [plan.md](plan.md).
"""
METHODS_HEAD = """# Methods

<!-- Written by `python -m docs.generate`; do not edit. -->

Every method of the stages that train, judge and merge, and of `find_rephrased`, with the formula that its function computes and where
that comes from. The first column is what a recipe writes: a `type`, the name of a field, or the kind itself; the links lead to all
fields. Defaults are the paper's where it gives any. Who knows TRL finds its arguments in [from-trl.md](from-trl.md).

Symbols: π_θ is the policy, π₀ its reference, σ the logistic function, ℓ(z) = -log σ(z). y is an answer of n trained tokens (its
end-of-turn token included, its prompt not), S(y) = Σ_t log π_θ(y_t), S₀ the same under the reference, r = S - S₀; w is the better
answer of a pair and l the worse. In preference losses s is what the divergence makes of r, by default r itself; for a reward model
it is the score. In policy gradients ρ_t = π_θ(y_t) / π_old(y_t), A is the advantage, R an answer's reward and
C(ρ, A) = min(ρA, clip(ρ, 1 - ε_low, 1 + ε_high)A); `dual_clip` c bounds it from below by cA where A < 0 (arXiv 1912.09729, eq. 5).
"""
AGGREGATION_HEAD = """`aggregation` names how the losses of all tokens make one; D answers are kept, |y_i| is the length of the i-th.
Every denominator is that of the whole update over all ranks.

| `aggregation` | what it means | formula |
|---|---|---|"""
FIELDS: dict[type[Frozen], str] = {AdaptiveKl: "adaptive", FindRephrased: "find_rephrased"}
"""Methods that are written by the name of their field or kind, where that is not the name of the class."""


def pages() -> dict[str, str]:
    """File name in `docs/` → text."""
    return {"stages.md": page(), "profiles.md": profiles_page(), "methods.md": methods_page(), "cli.md": commands.page(),
            "plan.md": planning.page(), "flagship.md": flagship.page()}  # fmt: skip


def profiles_page() -> str:
    """All fields of an execution profile."""
    return "\n".join([PROFILES_HEAD, *(_config(part) for part in (Execution, Machine, Numerics, Placement))]).rstrip() + "\n"


def methods() -> dict[str, list[type[Frozen]]]:
    """Kind of stage → the methods that its config can name, in the order of their unions."""
    found: dict[str, list[type[Frozen]]] = {}
    for declaration in KINDS.values():
        reachable = [declaration.config, *parts_of(declaration.config)]
        own = [config for config in reachable if "formula" in vars(config)]
        if own:
            found[declaration.name] = own
    return found


def sections() -> dict[str, list[type[Frozen]]]:
    """The methods page: each method once, those of several kinds of stage at the end."""
    kinds_of: dict[type[Frozen], list[str]] = {}
    for kind, configs in methods().items():
        for config in configs:
            kinds_of.setdefault(config, []).append(kind)
    found: dict[str, list[type[Frozen]]] = {}
    for config, kinds in sorted(kinds_of.items(), key=lambda entry: len(entry[1])):
        everywhere = len(kinds) > 1 and all(KINDS[kind].trains for kind in kinds)
        found.setdefault("every stage that trains" if everywhere else " and ".join(kinds), []).append(config)
    return found


def methods_page() -> str:
    """One table for each kind of stage that has methods."""
    lines = [METHODS_HEAD]
    for title, configs in sections().items():
        lines += [f"## {title}", "", "| name | what it is | formula | source |", "|---|---|---|---|"]
        lines += [_method(config) for config in configs]
        lines.append("")
        if title == "rlvr":
            lines += [AGGREGATION_HEAD, *(_row(f"`{name}`", text, f"`{formula}`") for name, (formula, text) in AGGREGATIONS.items()), ""]
    return "\n".join(lines).rstrip() + "\n"


def _method(config: type[Frozen]) -> str:
    kind = config.model_fields.get("type")
    name = typing.get_args(kind.annotation)[0] if kind else FIELDS.get(config, config.__name__.lower())
    formula, source = getattr(config, "formula"), getattr(config, "source")  # noqa: B009 - `Frozen` itself has none
    return _row(f"[`{name}`](stages.md#{_anchor(config)})", _text(config).split("\n\n")[0], f"`{formula}`", source)


def _row(*cells: str) -> str:
    return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |"


def _anchor(config: type[Frozen]) -> str:
    return next((kind for kind, declaration in KINDS.items() if declaration.config is config), config.__name__.lower())


def page() -> str:
    """All kinds, then the configs that their fields are made of."""
    parts = [HEAD, _overview()]
    parts += [_stage(declaration) for declaration in KINDS.values()]
    parts.append("## Parts of configurations\n")
    parts += [_config(config) for config in _parts()]
    return "\n".join(parts).rstrip() + "\n"


def _overview() -> str:
    lines = ["| kind | takes | gives | runs on |", "|---|---|---|---|"]
    for declaration in KINDS.values():
        takes = ", ".join(f"{name}{'?' if port.optional else ''}" for name, port in declaration.inputs.items())
        lines.append(f"| [`{declaration.name}`](#{declaration.name}) | {takes} | {_gives(declaration)} | {_engine(declaration)} |")
    return "\n".join([*lines, "", "`?` marks a port that may stay empty.", ""])


def _stage(declaration: Kind) -> str:
    lines = [f"## {declaration.name}", "", _text(declaration.config), "", *_formula(declaration.config)]
    for name, port in declaration.inputs.items():
        facts = [_or(sorted(port.types)), *(["one or more"] if port.many else []), *(["may stay empty"] if port.optional else [])]
        facts += ["rows are only measured by it"] if port.measures else []
        gate = "; its rows must have passed decontamination" if name in declaration.trains_on else ""
        lines.append(f"- input `{name}`: {', '.join(facts)}{gate}")
    lines += [f"- output: {_gives(declaration)}", f"- version {declaration.version}", "", *_fields(declaration.config)]
    return "\n".join(lines)


def _config(config: type[Frozen]) -> str:
    return "\n".join([f"### {config.__name__}", "", _text(config), "", *_formula(config), *_fields(config)])


def _formula(config: type[Frozen]) -> list[str]:
    """What a method computes, and where that comes from."""
    if "formula" not in vars(config):
        return []
    formula, source = getattr(config, "formula"), getattr(config, "source")  # noqa: B009 - `Frozen` itself has none
    return [f"`{' '.join(formula.split())}` ({source})", ""]


def _fields(config: type[Frozen]) -> list[str]:
    lines, texts = ["| field | value | default | meaning |", "|---|---|---|---|"], meanings(config)
    for name, field in config.model_fields.items():
        meaning = " ".join(texts.get(name, "").split()).replace("|", "\\|")
        lines.append(f"| `{name}` | {_type(field.annotation, field)} | {_default(field)} | {meaning} |")
    return [*lines, ""] if len(lines) > 2 else []


def meanings(config: type[BaseModel]) -> dict[str, str]:
    """The text below each field of a class and its bases. Pydantic's `use_attribute_docstrings` would read all sources at every start."""
    found: dict[str, str] = {}
    for base in reversed(config.__mro__):
        if issubclass(base, BaseModel) and base is not BaseModel:
            (tree,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
            assert isinstance(tree, ast.ClassDef)
            for field, below in pairwise(tree.body):
                match field, below:
                    case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                        found[name] = text
    return found


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is None or value == {}:
        return "none"
    if isinstance(value, tuple) and field.default_factory is not None:
        return f"{len(value)} in `configs/wordings.yaml`"
    if isinstance(value, tuple):
        return f"`[{', '.join(map(str, value))}]`"
    if isinstance(value, Frozen):
        return f"`{{{', '.join(f'{key}: {inner}' for key, inner in value.model_dump(exclude_computed_fields=True).items())}}}`"
    return f"`{value}`"


def _type(annotation: Any, field: FieldInfo | None = None) -> str:
    """A type as a reader of YAML thinks of it, with its bounds."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return _type(arguments[0])
    if origin is Literal:
        return " \\| ".join(f"`{value}`" for value in arguments)
    if origin in (Union, types.UnionType):
        parts = [part for part in arguments if part is not type(None)]
        return " \\| ".join(_type(part, field if len(parts) == 1 else None) for part in parts)
    if origin is tuple:
        return f"list of {_type(arguments[0])}"
    if origin is dict:
        return f"mapping of {_type(arguments[0])} to {_type(arguments[1])}"
    if inspect.isclass(annotation) and issubclass(annotation, Frozen):
        return f"[{annotation.__name__}](#{annotation.__name__.lower()})"
    name = {"str": "text", "int": "whole number", "float": "number", "bool": "true \\| false"}.get(annotation.__name__, annotation.__name__)
    return name + (_bounds(field) if field else "")


def _bounds(field: FieldInfo) -> str:
    signs = (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<"))
    found = [f"{sign} {getattr(rule, name):g}" for name, sign in signs for rule in field.metadata if getattr(rule, name, None) is not None]
    return " " + ", ".join(found) if found else ""


def _parts() -> list[type[Frozen]]:
    """Config classes inside the stages' configs, each once, in order of first use."""
    return _reachable([declaration.config for declaration in KINDS.values()])


def parts_of(config: type[Frozen]) -> list[type[Frozen]]:
    """Config classes inside one, each once, in order of first use."""
    return _reachable([config])


def _reachable(configs: list[type[Frozen]]) -> list[type[Frozen]]:
    """Config classes inside others, each once, in order of first use."""
    found: dict[type[Frozen], None] = {}
    waiting = list(configs)
    while waiting:
        config = waiting.pop(0)
        for field in config.model_fields.values():
            for inner in _inside(field.annotation):
                if inner not in found and inner not in configs:
                    found[inner] = None
                    waiting.append(inner)
    return list(found)


def _inside(annotation: Any) -> Iterator[type[Frozen]]:
    if inspect.isclass(annotation) and issubclass(annotation, Frozen):
        yield annotation
    for argument in typing.get_args(annotation):
        yield from _inside(argument)


def _gives(declaration: Kind) -> str:
    try:
        return f"`{declaration.output(declaration.config.model_construct(), {})}`"
    except (AttributeError, KeyError):  # it depends on the config, or on what arrives
        return "the type of its `data`" if "data" in declaration.inputs else "its `record`"


def _engine(declaration: Kind) -> str:
    return {"none": "CPU", "torch": "torch"}.get(declaration.engine, declaration.engine.replace("+", " and "))


def _text(config: type[Frozen]) -> str:
    return inspect.cleandoc(config.__doc__ or "")


def _or(names: list[str]) -> str:
    return " or ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    for name, text in pages().items():
        (DOCS / name).write_text(text)
