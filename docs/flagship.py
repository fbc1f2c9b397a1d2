"""Generate docs/flagship.md: the recipes that follow published work, with their settings, sources, published results and differences."""

import re
from pathlib import Path

from pedigree.configs.base.published import Published
from pedigree.configs.language.graph import Graph
from pedigree.configs.language.recipe import load_recipe
from pedigree.pipelines.publish import comparison

RECIPES = Path(__file__).resolve().parents[1] / "configs" / "recipes"
FLAGSHIP = ("olmo2_1b", "tulu3_8b", "tulu31_8b", "tulu3_8b_onpolicy")
HEAD = """# Recipes of published work

<!-- Written by `python -m docs.generate`; do not edit. -->

Four recipes follow AI2 models from the base model to the last stage. Each is one file in `configs/recipes/` with the source of every number
next to it; the shared suites are in `tulu3_suites.yaml`. If a commit is not known for certain, the hub dataset or model is marked `pin me`:
the recipes validate and plan as they are, and `pedigree pin` writes the newest commits into them before a run.

```console
$ pedigree plan tulu3_8b
$ pedigree plan olmo2_1b --json
```

Expected scores, hardware and differences come from the block `published` of a recipe (`configs/base/published.py`), which is not part of
any stage's [identity](how-it-works.md#identity). `plan` shows them next to its own estimates, and the report next to measured
scores; a recipe that extends another inherits the fields it does not set. Because published scores have no intervals, a tolerance is two
standard errors of a difference, 2 √(2 p (1 - p) / n), at the stage where they are largest.

Each row of the settings tables is a line of the recipe; its source is a line of the first document that the recipe's introduction names, a
table of the paper, or as stated.
"""


def page() -> str:
    return "\n".join([HEAD, *(_recipe(name) for name in FLAGSHIP)]).rstrip() + "\n"


def _recipe(name: str) -> str:
    graph = load_recipe(RECIPES, name)
    published = graph.published
    assert published is not None
    lines = [f"## {name}", "", f"{graph.description}. {_about(name)}", ""]
    lines += [f"- [{source.title}]({source.url})" for source in published.sources]
    lines += ["", "| stage | setting | source |", "|---|---|---|", *(_row(*number) for number in numbers(name)), ""]
    lines += [*_scores(graph, published), *_hardware(published)]
    lines += _list("What differs:", published.differs) + _list("What it cannot express yet:", published.lacks)
    return "\n".join(lines)


def numbers(name: str) -> list[tuple[str, str, str]]:
    """(stage, setting, source) of every line under `stages` that gives a source."""
    found: list[tuple[str, str, str]] = []
    above: list[tuple[int, str]] = []  # (indentation, key) of the enclosing lines
    for line in (RECIPES / f"{name}.yaml").read_text().partition("\nstages:\n")[2].partition("\npublished:")[0].splitlines():
        setting, _, source = line.partition("  # ")
        indentation, entry = len(setting) - len(setting.lstrip()), setting.strip()
        if not entry or entry.startswith("#"):
            continue
        above = [(depth, key) for depth, key in above if depth < indentation]
        key, colon, value = entry.partition(":")
        if entry.startswith("- "):
            value = entry.removeprefix("- ")
        elif colon:
            above.append((indentation, key))
        stage, *path = (key for _, key in above)
        if source and value:
            setting = re.sub(r"revision: (pin me|[0-9a-f]{40}), ", "", value.strip())
            found.append((stage, f"`{'.'.join(path)}: {setting}`" if path else f"`{setting}`", source))
    return found


def _about(name: str) -> str:
    """The file's leading comment, which describes the sources of its numbers."""
    lines = [line[1:].strip() for line in (RECIPES / f"{name}.yaml").read_text().splitlines()[1:5] if line.startswith("#")]
    return " ".join(lines)


def _scores(graph: Graph, published: Published) -> list[str]:
    columns, rows = comparison.score_cells(graph)
    if not rows:
        return []
    head = [f"Expected scores, in percent ({published.harness}):", "", _row(*columns), "|" + "---|" * len(columns)]
    return [*head, *(_row(*row) for row in rows), ""]


def _hardware(published: Published) -> list[str]:
    rows = [_row(stage, f"{one.gpus} {one.gpu}", f"{one.hours:g}", f"{one.gpu_hours:.0f}") for stage, one in published.hardware.items()]
    return ["| stage | hardware | hours | GPU-hours |", "|---|---|---|---|", *rows, ""] if rows else []


def _list(title: str, sentences: tuple[str, ...]) -> list[str]:
    return [title, "", *(f"- {sentence}" for sentence in sentences), ""] if sentences else []


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
