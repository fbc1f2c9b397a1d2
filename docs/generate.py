"""Generate reference pages from the code: `python -m docs.generate` writes `stages.md`, a page per kind in `stages/`, `profiles.md`,
`forms.md`, `methods.md`, `cli.md`, `plan.md`, `flagship.md` and `several-nodes.md` in `docs/`."""

import functools
import inspect
import json
import re
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union

from pydantic.fields import FieldInfo

from docs import commands, flagship, planning, several_nodes
from docs.results import meanings
from pedigree.configs.base.frozen import Frozen
from pedigree.configs.judging.rephrased import FindRephrased
from pedigree.configs.language.execution import Execution
from pedigree.configs.language.kinds import KINDS, Kind
from pedigree.configs.methods.policy_gradient import AdaptiveKl, Aggregation
from pedigree.configs.rows.suite_forms import Form
from pedigree.data.sources.golds import FUNCTIONS

DOCS = Path(__file__).resolve().parents[1] / "docs"
HEAD = """# Stages

<!-- Written by `python -m docs.generate`; do not edit. -->

A stage is a versioned kind of work. It takes artifacts at named ports and produces an artifact of one type; a recipe connects matching
types. The whole configuration is part of the result's [identity](how-it-works.md#identity): changing any field makes a different artifact.
How and where a stage runs is configured separately, in `configs/execution/` ([profiles.md](profiles.md)).

Each kind has a page with its fields. [Shared parts](stages/shared.md) are configurations that several kinds use, such as the optimizer.
"""
SHARED_HEAD = """# Shared parts

<!-- Written by `python -m docs.generate`; do not edit. -->

Parts of configurations that several [kinds of stages](../stages.md) use.
"""
PROFILES_HEAD = """# Execution profiles

<!-- Written by `python -m docs.generate`; do not edit. -->

`configs/execution/NAME.yaml` specifies how and where stages run: at the top for all stages, under `kinds` for a kind, under `stages` for
one stage; the more specific setting wins. None of it is part of a result's [identity](how-it-works.md#identity). `numerics` can change
rounding, so they are recorded, and a checkpoint made under other numerics is resumed only on request. `placement` never changes a bit,
except in a stage with `chunk_size: continuous`, where memory and engines decide which requests are computed together.

The tests verify each field by its effect: passes, tokens, calls, bytes, exchanges between ranks, processes, files. See
[training.md](training.md) for the effect on training, [resume.md](resume.md) for how jobs end and resume, and [plan.md](plan.md) for
resource estimates.
"""
FORMS_HEAD = """# Fields of forms

<!-- Written by `python -m docs.generate`; do not edit. -->

`configs/forms/NAME.yaml` defines how a benchmark is asked and scored; [suites.md](suites.md) describes the forms that exist. A form of your
own needs no file there: write its fields in the recipe, as `form: {description: ..., rows: ...}` of the suite. This one asks for capitals
and requires the name alone:

```yaml
description: Capitals, 0-shot, the name alone
origin: our own
split: dev
rows: {question: "What is the capital of {{ country }}?", answer: "[capital] + also_known_as"}
prompt: {ask: "{{ question }} Answer with its name alone."}
draw: {max_tokens: 16, stop: ["\\n"]}
metrics:
  exact_match: {verifier: exact_match, options: {ignore_case: true, ignore_punctuation: true}}
  mentioned: {verifier: mentions, fields: {answers: answer}}
```

*Templates* are texts with `{{ ... }}`, and *expressions* are what stands between such braces. Both see the columns of the row, the whole
row as `row`, and the functions below; and once known, `question`, `answer`, `choices`, `labels` (A, B, ...), `letter` (the answer's),
`options` (the formatted choices) and `category`. A template for one choice also sees its `label` and `text`. The
[verifiers](rewards.md#prompts-with-verifiers) define the `fields` and `options` of a metric.

| function | result |
|---|---|
"""
METHODS_HEAD = """# Methods

<!-- Written by `python -m docs.generate`; do not edit. -->

Every method of the stages that train, judge and merge, and of `find_rephrased`, with its formula and source. The first column is the name
used in a recipe: a `type`, a field, or the kind itself; it links to all fields. Defaults are the paper's if it gives any.
[from-trl.md](from-trl.md) maps TRL's arguments to these methods.

Symbols: π_θ is the policy, π₀ its reference, σ the logistic function, ℓ(z) = -log σ(z). y is an answer of n trained tokens (including its
end-of-turn token, excluding its prompt), S(y) = Σ_t log π_θ(y_t), S₀ the same under the reference, r = S - S₀; w is the better answer of a
pair and l the worse. In preference losses, s is r transformed by the divergence, by default r itself; for a reward model it is the score.
In policy gradients, ρ_t = π_θ(y_t) / π_old(y_t), A is the advantage, R an answer's reward and
C(ρ, A) = min(ρA, clip(ρ, 1 - ε_low, 1 + ε_high)A); `dual_clip` c bounds it from below by cA if A < 0 (arXiv 1912.09729, eq. 5).
"""
AGGREGATIONS: dict[Aggregation, tuple[str, str]] = {
    "token-mean": ("1 / Σ_i |y_i| · Σ_i Σ_t", "every token has the same weight, so long answers weigh more"),
    "seq-mean-token-mean": ("1 / D · Σ_i 1 / |y_i| Σ_t", "every answer has the same weight, so tokens of long answers weigh less"),
    "seq-mean-token-sum": ("1 / D · Σ_i Σ_t", "the mean over answers of token sums: long answers weigh more"),
    "seq-mean-token-sum-norm": ("1 / D · Σ_i 1 / max_tokens Σ_t", "the same, divided by the constant maximum answer length"),
    "token-sum": ("Σ_i Σ_t", "no denominator: the gradient grows with the batch"),
}
"""Name → (formula, meaning)."""
AGGREGATION_HEAD = """`aggregation` specifies how token losses are combined; D answers are kept, |y_i| is the length of the i-th.
Every denominator is that of the whole update over all ranks.

| `aggregation` | meaning | formula |
|---|---|---|"""
FIELDS: dict[type[Frozen], str] = {AdaptiveKl: "adaptive", FindRephrased: "find_rephrased"}
"""Methods named by a field or kind instead of by their class."""


def pages() -> dict[str, str]:
    """File name in `docs/` → text."""
    return {"stages.md": stages_page(), **{f"stages/{name}.md": kind_page(declaration) for name, declaration in KINDS.items()},
            "stages/shared.md": shared_page(), "profiles.md": profiles_page(), "forms.md": forms_page(), "methods.md": methods_page(),
            "cli.md": commands.page(), "plan.md": planning.page(), "flagship.md": flagship.page(),
            "several-nodes.md": several_nodes.page()}  # fmt: skip


def profiles_page() -> str:
    """The page of execution profile fields."""
    return "\n".join([PROFILES_HEAD, *(_config(part) for part in (Execution, *parts_of(Execution)))]).rstrip() + "\n"


def forms_page() -> str:
    """The page of the fields of a form."""
    functions = [_row(f"`{name}`", inspect.cleandoc(function.__doc__ or "").split("\n\n")[0]) for name, function in FUNCTIONS.items()]
    return FORMS_HEAD + "\n".join([*functions, "", *(_config(part) for part in (Form, *parts_of(Form)))]).rstrip() + "\n"


def methods() -> dict[str, list[type[Frozen]]]:
    """Kind of stage → methods its config can name, in the order of their unions."""
    found: dict[str, list[type[Frozen]]] = {}
    for declaration in KINDS.values():
        reachable = [declaration.config, *parts_of(declaration.config)]
        own = [config for config in reachable if "formula" in vars(config)]
        if own:
            found[declaration.name] = own
    return found


def sections() -> dict[str, list[type[Frozen]]]:
    """Title → methods. Each method appears once; methods shared by several kinds come last."""
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
    """The page of methods, one table per section."""
    lines = [METHODS_HEAD]
    for title, configs in sections().items():
        lines += [f"## {title}", "", "| name | description | formula | source |", "|---|---|---|---|"]
        lines += [_method(config) for config in configs]
        lines.append("")
        if title == "rlvr":
            lines += [AGGREGATION_HEAD, *(_row(f"`{name}`", text, f"`{formula}`") for name, (formula, text) in AGGREGATIONS.items()), ""]
    return "\n".join(lines).rstrip() + "\n"


def _method(config: type[Frozen]) -> str:
    kind = config.model_fields.get("type")
    name = typing.get_args(kind.annotation)[0] if kind else FIELDS.get(config, config.__name__.lower())
    formula, source = getattr(config, "formula"), getattr(config, "source")  # noqa: B009 - `Frozen` itself has none
    return _row(f"[`{name}`](stages/{_place(config)})", _text(config).split("\n\n")[0], f"`{formula}`", source)


def _row(*cells: str) -> str:
    return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |"


def stages_page() -> str:
    """The page of all kinds of stages, with links to theirs."""
    lines = [HEAD, "| kind | what it does | inputs | output | engine |", "|---|---|---|---|---|"]
    for name, declaration in KINDS.items():
        takes = ", ".join(f"{port}{'?' if facts.optional else ''}" for port, facts in declaration.inputs.items())
        does = re.split(r"(?<! al)(?<!i\.e)[.:](?:\s|$)", _text(declaration.config))[0]
        lines.append(_row(f"[`{name}`](stages/{name}.md)", does, takes, _gives(declaration), _engine(declaration)))
    return "\n".join([*lines, "", "`?` marks an optional port.", ""])


def kind_page(declaration: Kind) -> str:
    """The page of a kind: its ports and fields, and the parts of its configuration that no other kind has."""
    lines = [f"# {declaration.name}", "", "<!-- Written by `python -m docs.generate`; do not edit. -->", ""]
    lines += [_text(declaration.config), "", *_formula(declaration.config)]
    for name, port in declaration.inputs.items():
        facts = [_or(sorted(port.types)), *(["one or more"] if port.many else []), *(["optional"] if port.optional else [])]
        facts += ["used only to measure rows"] if port.measures else []
        gate = "; rows must have passed decontamination" if name in declaration.trains_on else ""
        lines.append(f"- input `{name}`: {', '.join(facts)}{gate}")
    lines += [f"- output: {_gives(declaration)}", f"- version {declaration.version}", ""]
    lines += [*_examples(declaration.name), *_fields(declaration.config)]
    lines += [_config(part) for part, page in _homes().items() if page == f"{declaration.name}.md" and part is not declaration.config]
    return "\n".join(lines).rstrip() + "\n"


def _examples(kind: str) -> list[str]:
    """Links to the pages with a recipe that has such a stage."""
    texts = {page.name: page.read_text() for page in sorted(DOCS.glob("*.md"))}
    names = [name for name, text in texts.items() if re.search(rf"^ +(\w+: {{)?kind: {kind}\b", text, re.MULTILINE)]
    links = [f"[{texts[name].splitlines()[0].removeprefix('# ')}](../{name})" for name in names]
    return [f"Examples: {', '.join(links)}.", ""] if links else []


def shared_page() -> str:
    """The page of the parts that several kinds have."""
    return "\n".join([SHARED_HEAD, *(_config(part) for part, page in _homes().items() if page == "shared.md")]).rstrip() + "\n"


@functools.cache
def _homes() -> dict[type[Frozen], str]:
    """Config class → its page in `stages/`, in order of first use: that of the only kind which has it, or the shared one."""
    found: dict[type[Frozen], str] = {}
    for name, declaration in KINDS.items():
        for config in (declaration.config, *parts_of(declaration.config)):
            found[config] = "shared.md" if config in found else f"{name}.md"
    return {config: page for config, page in found.items() if config not in parts_of(Form)} | {Form: "../forms.md"}


def _place(config: type[Frozen]) -> str:
    """Where a config class is described, seen from `stages/` or, of a profile, from its page."""
    page, kind = _homes().get(config, ""), config in {declaration.config for declaration in KINDS.values()}
    return page if kind else f"{page}#{config.__name__.lower()}"


def _config(config: type[Frozen]) -> str:
    return "\n".join([f"## {config.__name__}", "", _text(config), "", *_formula(config), *_fields(config)])


def _formula(config: type[Frozen]) -> list[str]:
    """A method's formula and source."""
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
    if isinstance(value, str) and (not value or "\n" in value):
        return f"`{json.dumps(value)}`"
    if isinstance(value, dict):
        return f"`{{{', '.join(f'{key}: {inner}' for key, inner in value.items())}}}`"
    if isinstance(value, Frozen):
        return f"`{{{', '.join(f'{key}: {inner}' for key, inner in value.model_dump(exclude_computed_fields=True).items())}}}`"
    return f"`{value}`"


def _type(annotation: Any, field: FieldInfo | None = None) -> str:
    """A type in YAML terms, with its bounds."""
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
        return f"[{annotation.__name__}]({_place(annotation)})"
    name = {"str": "string", "int": "integer", "float": "number", "bool": "true \\| false"}.get(annotation.__name__, annotation.__name__)
    return name + (_bounds(field) if field else "")


def _bounds(field: FieldInfo) -> str:
    signs = (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<"))
    found = [f"{sign} {getattr(rule, name):g}" for name, sign in signs for rule in field.metadata if getattr(rule, name, None) is not None]
    return " " + ", ".join(found) if found else ""


def parts_of(config: type[Frozen]) -> list[type[Frozen]]:
    """Config classes nested in a config, each once, in order of first use."""
    found: dict[type[Frozen], None] = {}
    waiting = [config]
    while waiting:
        for field in waiting.pop(0).model_fields.values():
            for inner in _inside(field.annotation):
                if inner not in found and inner is not config:
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
    except (AttributeError, KeyError):  # depends on the config or the inputs
        if "output" in declaration.config.model_fields:
            return "its `output`"
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
