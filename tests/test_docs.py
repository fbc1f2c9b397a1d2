"""The documentation says what is true: commands exist and run, files exist, generated pages are current, examples work."""

import ast
import asyncio
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import typing
from collections.abc import Iterator, Sequence
from html import unescape
from inspect import signature
from pathlib import Path
from typing import Any

import markdown
import pytest
import yaml
from markdown_it import MarkdownIt
from projects import fresh_project
from pydantic import ValidationError
from typer.core import TyperGroup
from typer.main import get_command

import pedigree
from benchmarks import table as benchmarks
from docs import generate, site_hooks
from pedigree.configs.base.document import parse_value
from pedigree.configs.base.frozen import Frozen
from pedigree.configs.base.naming import Model
from pedigree.configs.base.project import Project
from pedigree.configs.base.published import Published
from pedigree.configs.base.python_files import problem_of_program
from pedigree.configs.judging.scoring import Judge
from pedigree.configs.language.execution import Execution, Numerics, Placement
from pedigree.configs.language.graph import Graph
from pedigree.configs.language.kinds import KINDS
from pedigree.configs.language.recipe import load_recipe
from pedigree.configs.language.recipe_files import Reproduce, recipe_names
from pedigree.configs.methods.environment_programs import EnvironmentProgram, SimulatedUser
from pedigree.configs.methods.language_model import ByEndpoint, ServedPolicy, key_variable
from pedigree.configs.methods.rubrics import Rubric
from pedigree.configs.methods.training import Rlvr
from pedigree.configs.rehearsal.families import ModelFamily
from pedigree.configs.rows.datasets import PrepareData
from pedigree.configs.rows.overlap_criteria import Decontaminate
from pedigree.configs.rows.row_sources import LAYOUT_COLUMNS
from pedigree.configs.rows.suite_forms import Form
from pedigree.data.sources.layouts import example_of
from pedigree.pipelines.cli.main import app, main
from pedigree.pipelines.estimate.estimates import Estimates
from pedigree.pipelines.jobs.attempts import RESUMED
from pedigree.pipelines.run.foreseen import contradictions
from pedigree.pipelines.run.opening import load_execution

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
NAMES = [path.relative_to(ROOT).as_posix() for path in PAGES]
CHEAP = ("recipes", "plan", "compile", "status", "jobs", "report", "validate", "show", "variants", "scratch")
"""Commands that start no job and need no artifact."""


def blocks(name: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / name).read_text(), re.MULTILINE | re.DOTALL)


def example(name: str, part: str, language: str = "yaml") -> str:
    """The block of a page that has this part."""
    return next(block for block in blocks(name, language) if part in block)


def commands() -> list[tuple[str, str]]:
    """(page, command line) of every `$` line of every console block."""
    return [
        (name, line[2:].strip())
        for name in NAMES
        for block in blocks(name, "console")
        for line in block.splitlines()
        if line.startswith("$ ")
    ]


PEDIGREE = [(name, line[line.index("pedigree ") :]) for name, line in commands() if "pedigree " in line]


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("clone")
    shutil.copytree(ROOT / "configs" / "recipes", root / "configs" / "recipes")
    shutil.copytree(ROOT / "configs" / "execution", root / "configs" / "execution")
    (root / "configs" / "recipes" / "mine.yaml").write_text(example("docs/first-recipe.md", "stages:"))
    (root / "rows").mkdir()
    (root / "rows" / "rows.jsonl").write_text(example("docs/first-recipe.md", "completion", "json"))
    (root / ".dvc").mkdir()
    shutil.copy(ROOT / ".dvc" / "config", root / ".dvc" / "config")
    shutil.copy(ROOT / ".gitignore", root / ".gitignore")
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    return root


def test_the_commands_are_found():
    assert len(PEDIGREE) >= 12 and {line.split()[1] for _, line in PEDIGREE} >= {"run", "plan", "lineage", "export", "report", "doctor"}


@pytest.mark.parametrize(("name", "line"), PEDIGREE)
def test_every_command_exists_with_its_options(name, line):
    words = shlex.split(line)[1:]
    command = get_command(app)
    while isinstance(command, TyperGroup):
        name, *words = words
        command = command.commands[name]
    with command.make_context(name, words, resilient_parsing=False) as context:
        assert context.params or name in ("recipes", "doctor", "jobs", "list")


@pytest.mark.integration
@pytest.mark.parametrize("line", dict.fromkeys(line for _, line in PEDIGREE if line.split()[1] in CHEAP))
def test_commands_that_start_nothing_run(clone, line, monkeypatch, capsys):
    monkeypatch.chdir(clone)
    monkeypatch.setattr(sys, "argv", shlex.split(line))
    polite = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as end:
        main()
    signal.signal(signal.SIGTERM, polite)
    assert not end.value.code, capsys.readouterr()


@pytest.mark.parametrize("name", NAMES)
def test_files_that_are_named_exist(name):
    text = (ROOT / name).read_text()
    paths = re.findall(r"`((?:configs|data|stages|pipelines|tests|docs)/[\w./-]+\.(?:py|yaml|md))`", text)
    links = [target for target in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in target]
    missing = [path for path in paths if not (ROOT / path).exists()]
    missing += [target for target in links if not (ROOT / name).parent.joinpath(target).exists()]
    assert not [path for path in missing if "NAME" not in path]


def test_each_function_of_the_main_path_calls_the_next_one():
    """Typer calls the second, and the launcher starts the process of the ninth."""
    rows = re.findall(r"^\| (\d+) \|.*\| `([\w.]+)` in `([\w/.]+)` \|$", (ROOT / "docs/how-it-works.md").read_text(), re.MULTILINE)
    names = [name.rpartition(".")[2] for _, name, _ in rows]
    assert len(rows) == int(rows[-1][0]) == 12
    for (number, _, file), name, called in zip(rows, names, names[1:], strict=False):
        *_, function = (
            node for node in ast.walk(ast.parse((ROOT / file).read_text())) if isinstance(node, ast.FunctionDef) and node.name == name
        )
        used = {getattr(node, "id", getattr(node, "attr", None)) for node in ast.walk(function)}
        assert called in used or number in ("1", "8"), f"{name} does not call {called}"


def causes_of_failures() -> set[str]:
    """The words that a stage may have failed with, as `failed (WORD)` shows them."""
    found: set[str] = set()
    files = [*(ROOT / "pipelines/jobs").glob("*.py"), *(ROOT / "pipelines/run").glob("*.py")]
    for file in [*files, ROOT / "stages/__main__.py", ROOT / "stages/job/failures.py"]:
        for node in ast.walk(ast.parse(file.read_text())):
            given: Sequence[ast.AST] = []
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "StageFailed":
                given = node.args[1:2]
            elif isinstance(node, ast.Call):
                given = [keyword.value for keyword in node.keywords if keyword.arg == "cause"]
            elif isinstance(node, ast.FunctionDef) and node.returns and "tuple[str, str]" in ast.unparse(node.returns):
                given = [pair.elts[0] for pair in ast.walk(node) if isinstance(pair, ast.Tuple) and len(pair.elts) == 2]
            elif isinstance(node, ast.FunctionDef) and node.name in ("cause_of", "storage_cause"):
                given = [part for back in ast.walk(node) if isinstance(back, ast.Return) and back.value for part in branches(back.value)]
            found |= {value.value for value in given if isinstance(value, ast.Constant) and isinstance(value.value, str)}
    return found - {"lingers"}  # a job that has a result: it has not failed


def branches(value: ast.expr) -> list[ast.expr]:
    return [*branches(value.body), *branches(value.orelse)] if isinstance(value, ast.IfExp) else [value]


def test_every_cause_of_a_failed_stage_is_explained_with_what_follows():
    text = (ROOT / "docs/failures.md").read_text()
    rows = [row.split(" | ") for row in re.findall(r"^\| .*", text[text.index("| cause | result |") :], re.MULTILINE)[1:]]
    results = {cause: row[1] for row in rows for cause in re.findall(r"`([a-z_]+)`", row[0].partition(":")[0])}
    causes = causes_of_failures()
    assert causes >= RESUMED | {"cancelled", "remote", "not_finished", "inputs_moved", "overtaken", "bug", "timeout", "not_writable"}
    assert results.keys() >= causes
    again = {cause for cause, result in results.items() if re.search("is restarted|retried", result)}
    assert again == RESUMED


def test_make_targets_that_are_named_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    pages = [*NAMES, ".github/workflows/checks.yml", ".devcontainer/devcontainer.json"]
    named = {target for name in pages for target in re.findall(r"""(?:[`"]|\$ |run: )make ([a-z-]+)""", (ROOT / name).read_text())}
    assert named >= {"setup", "quick", "test", "test-all", "demo"} and named <= targets


GENERATED = generate.pages()


@pytest.mark.parametrize("name", GENERATED)
def test_generated_pages_are_current(name):
    assert (ROOT / "docs" / name).read_text() == GENERATED[name], "run `python -m docs.generate`"


def test_every_choice_of_a_stage_that_makes_a_model_is_a_method_with_formula_and_source():
    listed = {config for configs in generate.methods().values() for config in configs}
    for kind in ("reward_model", "preference_train", "rlvr", "merge"):
        for config in {*generate.parts_of(KINDS[kind].config)} - {ByEndpoint, ServedPolicy}:  # who answers is no method
            assert "type" not in config.model_fields or config in listed, f"{kind}: {config.__name__} has no `formula` of its own"
    for config in listed:
        assert isinstance(getattr(config, "source", None), str) and (config.__doc__ or "").strip(), config.__name__


REQUIRED = {
    "rlvr": {
        "algorithm": {"type": "dapo"},
        "steps": 1,
        "prompts_per_step": 4,
        "samples_per_prompt": 2,
        "sampling": {"max_tokens": 256},
        "max_prompt_length": 8,
    },
    "preference_train": {"loss": {"type": "dpo"}, "global_batch": 2, "max_length": 8},
    "reward_model": {"global_batch": 1, "max_length": 8},
    "sft": {"global_batch": 1, "max_length": 8},
}


def test_what_stands_beside_the_arguments_of_trl_is_valid():
    checked = 0
    for section in (ROOT / "docs" / "from-trl.md").read_text().split("\n## ")[1:]:
        title = section.splitlines()[0]
        if title in ("Not here", "Names of other trainers"):
            continue
        for row in re.findall(r"^\| .*", section, re.MULTILINE)[1:]:
            for given in re.findall(r"`(.*?)`", row.split(" | ")[1]):
                fields = yaml.safe_load(given)
                if title == "Execution profile":
                    Numerics.model_validate(fields)
                else:
                    kind = "sft" if title == "Every trainer" else title
                    common = {**REQUIRED[kind], "optimizer": {"learning_rate": 1e-6}}
                    KINDS[kind].config.model_validate({**common, **{name: given for name, given in fields.items() if name != "in"}})
                checked += 1
    assert checked > 40


def test_the_pages_of_benchmarks_are_current():
    readme = (ROOT / "README.md").read_text()
    assert (ROOT / "docs" / "benchmarks.md").read_text() == benchmarks.page(), "run `python -m benchmarks.table`"
    assert readme == benchmarks.with_lines(readme) and benchmarks.BEGIN in readme, "run `python -m benchmarks.table`"


@pytest.mark.parametrize("kind", KINDS)
def test_the_page_of_a_kind_names_its_ports_and_fields(kind):
    text, declaration = GENERATED[f"stages/{kind}.md"], KINDS[kind]
    assert all(f"`{field}`" in text for field in declaration.config.model_fields)
    assert all(f"input `{port}`" in text for port in declaration.inputs)
    assert f"(stages/{kind}.md)" in GENERATED["stages.md"]


def test_every_part_of_a_configuration_is_described_once():
    texts = [text for name, text in GENERATED.items() if name.startswith(("stages/", "forms"))]
    headings = [line for text in texts for line in re.findall("^## .*", text, re.MULTILINE)]
    parts = {part for declaration in KINDS.values() for part in generate.parts_of(declaration.config)}
    assert sorted(headings) == sorted(f"## {part.__name__}" for part in parts)


def test_every_part_of_a_profile_is_described_on_its_page():
    headings = re.findall("^## (.*)", GENERATED["profiles.md"], re.MULTILINE)
    assert headings[0] == "Execution" and {"TensorBoard", "Slurm"} < {*headings}
    assert sorted(headings[1:]) == sorted(part.__name__ for part in generate.parts_of(Execution))


def test_no_page_of_a_kind_is_left_over():
    assert {f"docs/{name}" for name in GENERATED} >= {name for name in NAMES if name.startswith("docs/stages/")}


def links_of(page: Path) -> set[Path]:
    return {(page.parent / target).resolve() for target in re.findall(r"\]\(([\w./-]+\.md)", page.read_text())}


def test_every_page_is_two_clicks_from_the_first():
    first = links_of(ROOT / "docs" / "index.md")
    reached = first.union(*map(links_of, first))
    assert not [page for page in (ROOT / "docs").rglob("*.md") if page not in reached and page.name != "index.md"]
    assert ROOT / "docs" / "index.md" in links_of(ROOT / "README.md")


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("docs/") and name.count("/") == 1])
def test_a_page_that_uses_our_terms_links_to_them(name):
    text = (ROOT / name).read_text()
    bare = re.sub("`.*?`", "", text)
    uses = re.search("`(evidence|payload)/", text) or re.search(r"\b(identity|lease|fencing token|stage's key)\b", bare)
    assert not uses or "how-it-works.md" in text or name == "docs/how-it-works.md"


def shape(html: str) -> str:
    """Texts, tables, lists and blocks of a page in HTML, without attributes, white space and markup that readers do not see."""
    tags = "|".join(("table", "tr", "td", "th", "li", "ul", "ol", "pre", "h[1-6]", "strong"))
    html = re.sub(rf"<(/?(?:{tags}))(?: [^>]*)?>|<[^>]*>|\s+", lambda tag: f"<{tag[1]}>" if tag[1] else "", html)
    return re.sub("</(?!ul|ol|table).*?>", "", unescape(html))


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("docs/")])
def test_a_page_reads_the_same_on_github_and_on_the_site(name):
    """GitHub is more lenient about lists, and reads a table's code differently."""
    text = (ROOT / name).read_text()
    on_github = MarkdownIt("commonmark").enable("table").render(text)
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    on_site = markdown.markdown(site_hooks.on_page_markdown(text), extensions=settings["markdown_extensions"][:-1])
    assert shape(on_site) == shape(on_github)


@pytest.mark.integration
def test_the_site_builds_without_a_broken_link_or_anchor(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", ROOT / "mkdocs.yml", "--site-dir", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = {entry["location"] for entry in json.loads((tmp_path / "search" / "search_index.json").read_text())["docs"]}
    assert found >= {"stages/sft/", "decontamination/#waivers", "failures/#messages"}


BLOCKS = [(name, number) for name in NAMES for number in range(len(blocks(name, "yaml")))]


def said_in(value: Any) -> Iterator[tuple[type[Frozen], dict[str, Any]]]:
    """What a block of YAML says of recipes, forms, profiles and models: each a config class, and what it is given."""
    match value:
        case {"trackers": _}:
            yield Execution, value
        case {"kind": str(kind)}:
            yield KINDS[kind].config, {name: given for name, given in value.items() if name not in ("kind", "in")}
        case {"stages": stages}:
            yield from said_in(stages)
        case {"sources": _} | {"filters": _}:
            yield PrepareData, {"record": "conversation", "sources": [{"type": "files", "path": "a.jsonl"}], **value}
        case {"waivers": _}:
            yield Decontaminate, value
        case {"repos": _}:
            yield ModelFamily, value
        case {"metrics": _}:
            yield Form, value
        case {"aspect": _}:
            yield Rubric, value
        case {"models": models}:
            yield from ((Model, model) for model in models.values())
        case {"placement": placement}:
            yield Placement, placement
        case {"numerics": numerics}:
            yield Numerics, numerics
        case {"published": published}:
            yield Published, published
        case {"reproduce": reproduce}:
            yield Reproduce, reproduce
        case dict():
            for stage in value.values():
                yield from said_in(stage)


@pytest.mark.parametrize(("name", "number"), BLOCKS)
def test_what_stands_in_a_block_of_yaml_may_stand_in_a_recipe(name, number):
    """The README abridges."""
    text = blocks(name, "yaml")[number].replace("$round-1", "0").replace("$round", "1")
    found = list(said_in(parse_value(text)))
    assert found or text.startswith("description: The demo with a longer RLVR stage"), "nothing of it is known"
    for config, given in found:
        try:
            config.model_validate(given)
        except ValidationError as error:
            wrong = [f"{one['loc']}: {one['msg']}" for one in error.errors() if name != "README.md" or one["type"] != "missing"]
            assert not wrong


@pytest.mark.parametrize(
    ("name", "number"), [one for one in BLOCKS if re.match("description:(?s:.*)^stages:", blocks(one[0], "yaml")[one[1]], re.MULTILINE)]
)
def test_whole_recipes_load(name, number, tmp_path):
    for extended in ("demo.yaml", "tiny.yaml"):
        shutil.copy(ROOT / "configs" / "recipes" / extended, tmp_path / extended)
    (tmp_path / "whole.yaml").write_text(blocks(name, "yaml")[number])
    assert load_recipe(tmp_path, "whole").own


def test_the_row_with_tools_of_the_manual_is_read():
    (block,) = blocks("docs/layouts.md", "json")
    example = example_of(json.loads(block))
    assert [message["role"] for message in example.messages] == ["user", "call", "tool"] and example.answer == "No."
    assert example.template_arguments and "weather" in example.template_arguments["tools"]


@pytest.mark.parametrize("block", [block for name in NAMES for block in blocks(name, "python")])
def test_programs_are_of_python(block):
    assert compile(block, "block", "exec")
    for recipe, stage in re.findall(r'"artifacts/(\w+)/(\w+)/payload', block):
        assert load_recipe(ROOT / "configs" / "recipes", recipe).find(stage)


def rows(name: str, record: str) -> str:
    """A stage of synthetic rows."""
    return f"  {name}: {{kind: prepare_data, record: {record}, sources: [{SUMS}]}}\n"


SUMS = "{type: arithmetic, operations: [add], digits: [1], count: 50, seed: 7}"
PROMPTS = rows("prompts_raw", "prompt") + "  prompts: {kind: decontaminate, in: {data: prompts_raw, benchmarks: [suite]}}\n"
PAIRS = rows("pairs_raw", "preference") + "  pairs: {kind: decontaminate, in: {data: pairs_raw, benchmarks: [suite]}}\n"


def stages(block: str) -> str:
    return block.removeprefix("stages:\n")


def manual(folder: Path, added: str = "", old: str = "", new: str = "") -> Graph:
    """The first recipe of the manual, with other stages and words."""
    (folder / "manual.yaml").write_text(blocks("docs/recipes.md", "yaml")[0].replace(old, new) + added)
    return load_recipe(folder, "manual")


def extension(folder: Path, text: str, extended: str = "tiny") -> Graph:
    """A recipe of the manual that extends one that is shipped."""
    shutil.copy(ROOT / "configs" / "recipes" / f"{extended}.yaml", folder / f"{extended}.yaml")
    (folder / "mine.yaml").write_text(text)
    return load_recipe(folder, "mine")


def test_the_first_recipe_of_the_manual_loads(tmp_path):
    assert list(manual(tmp_path).nodes) == [f"manual/{name}" for name in ("suite", "raw", "clean", "base", "sft", "scores")]


def test_the_rounds_of_the_manual_unroll_as_it_says(tmp_path):
    graph = manual(tmp_path, PROMPTS + stages(blocks("docs/recipes.md", "yaml")[1]))
    assert {"manual/sample_1", "manual/judge_1", "manual/pair_1", "manual/dpo_1", "manual/sample_2"} <= set(graph.nodes)
    assert "manual/dpo_1" in graph.nodes["manual/sample_2"].parents


def test_the_cached_reference_of_the_manual_is_one(tmp_path):
    graph = manual(tmp_path, PAIRS + stages(example("docs/preferences.md", "kind: reference_logprobs")))
    assert "manual/cached" in graph.nodes["manual/dpo"].parents and graph.nodes["manual/cached"].output == "logprobs"


def test_the_soup_of_the_manual_is_a_reference(tmp_path):
    graph = manual(tmp_path, PAIRS + stages(example("docs/models.md", "kind: merge")))
    assert graph.nodes["manual/soup"].parents == ("manual/sft", "manual/sft_2", "manual/sft_3")
    assert [edge.source for edge in graph.nodes["manual/dpo"].edges if edge.port == "reference"] == ["manual/soup"]
    assert graph.nodes["manual/sft_3"].config.model_dump()["seed"] == 3


def test_the_pool_of_the_manual_is_sampled_rated_and_paired(tmp_path):
    small = "{type: packaged, asset: smollm2-135m-instruct}"
    models = "".join(f"  {name}: {{kind: source_model, source: {small}, chat_template: tulu}}\n" for name in ("first", "second", "third"))
    pool = models + PROMPTS + stages(example("docs/judging.md", "best_vs_random_lower"))
    graph = manual(tmp_path, pool)
    assert [graph.find(name).output for name in ("pool", "rated", "pairs")] == ["completion", "judgment", "preference"]
    config = graph.find("rated").config
    assert isinstance(config, Judge) and config.rating is not None and config.rating.by.type == "endpoint"
    assert key_variable(config.rating.by.base_url) in (ROOT / "docs" / "judging.md").read_text()
    parts = (("preferences", "type: delta"), ("synthetic-data", "kind: best_answers"))  # which continue from there
    graph = manual(tmp_path, pool + "".join(stages(example(f"docs/{page}.md", part)) for page, part in parts))
    made = {"brief": "preference", "delta": "preference", "right_3": "conversation", "imitate_3": "policy", "hard": "prompt"}
    assert {name: graph.find(name).output for name in made} == made


def test_the_rows_of_the_manual_that_models_select_are_conversations(tmp_path):
    trained = "global_batch: 4, max_length: 32, optimizer: {learning_rate: 1e-5}"
    reward = f"{{kind: reward_model, in: {{policy: base, preferences: [pairs]}}, {trained}, seed: "
    models = "".join(f"  reward_{seed}: {reward}{seed}}}\n" for seed in (1, 2, 3))
    graph = manual(tmp_path, PAIRS + models + example("docs/filters.md", "kind: select_rows"))
    assert [graph.find(name).output for name in ("liked", "rated")] == ["conversation", "conversation"]


def test_the_rows_of_the_manual_that_a_model_compares_are_trained_on(tmp_path):
    suites = rows("gsm8k", "item, task: sums") + rows("mmlu", "item, task: sums")
    graph = manual(tmp_path, suites + example("docs/decontamination.md", "kind: find_rephrased"), "[clean]", "[asked]")
    assert graph.find("sft").parents == ("manual/base", "manual/asked")


def test_the_program_of_the_manual_makes_the_rows_that_its_source_asks_for():
    block = example("docs/data.md", "type: program")
    (source,) = PrepareData.model_validate({"record": "conversation", **parse_value(block)}).sources
    assert source.type == "program"
    namespace: dict[str, Any] = {}
    exec(example("docs/data.md", "def rows", "python"), namespace)
    made = list(namespace[source.function](count=source.count, seed=source.seed, **source.arguments))
    assert len(made) == source.count and all(set(row) <= set(LAYOUT_COLUMNS) for row in made)


def test_the_reward_of_the_manual_is_a_file_of_four_stages(tmp_path):
    graph = extension(tmp_path, example("docs/own-reward.md", "type: program"))
    assert {node.name for node in graph.own if node.files == ("rewards/mine.py",)} == {"boxed", "rlvr", "judged", "scores"}
    config = graph.find("rlvr").config
    assert isinstance(config, Rlvr) and not config.reward.verifies
    assert [term.called for term in config.reward.terms] == ["mine", "overlong"]


def test_the_environment_of_the_manual_is_a_file_of_its_stage_and_plays(tmp_path):
    node = extension(tmp_path, example("docs/own-environment.md", "environment: {path")).find("rlvr")
    assert isinstance(node.config, Rlvr) and node.files == ("environments/guess.py",) and node.config.longest_answer == 3 * 8 + 2 * 24
    namespace: dict[str, Any] = {}
    exec(example("docs/own-environment.md", "def reset(self, seed, highest)", "python"), namespace)
    game = namespace["Environment"]()
    assert game.reset(5, 9) == " I have thought of a number from 1 to 9." and game.step("perhaps")[1:] == (-0.1, False)
    assert game.step(f"{game.number}") == ("Right!", 1.0, True) and game.step(f"It is {game.number - 1}")[0] == "Larger."


def test_the_environment_of_the_manual_is_evaluated_and_sampled(tmp_path):
    graph = extension(tmp_path, example("docs/own-environment.md", "kind: best_answers"))
    assert {node.name for node in graph.own if node.files == ("environments/guess.py",)} == {"game_scores", "played"}
    assert [graph.find(name).output for name in ("game_scores", "played", "won")] == ["scores", "judgment", "conversation"]


def test_the_simulated_user_of_the_manual_is_a_policy_and_no_file(tmp_path):
    graph = extension(tmp_path, example("docs/own-environment.md", "type: user"), "demo")
    node, project = graph.find("rlvr"), Project(ROOT)
    execution = load_execution(project, "cpu")
    assert not [*contradictions(node, Estimates(project, graph, execution))]  # its models have room for the turns
    text = example("docs/own-environment.md", "type: user").replace("extends: demo", "extends: tiny")
    smaller = extension(tmp_path, text)
    found = [*contradictions(smaller.find("rlvr"), Estimates(project, smaller, execution))]
    assert [one.partition("context of")[0] for one in found] == [
        "max_prompt_length 128 and max_tokens 640 exceed the model's ",
        "a prompt and max_tokens 256 exceed the model's ",
    ]
    assert isinstance(node.config, Rlvr) and isinstance(user := node.config.environment, SimulatedUser) and not node.files
    assert "user" in {edge.port for edge in node.edges} and isinstance(user.by, ServedPolicy)
    assert "task: 2 + 2?\n" in user.system_text({"id": "a", "verifier": None, "messages": [{"role": "user", "content": "2 + 2?"}]})


def test_the_player_of_verifiers_in_the_manual_is_a_program_that_a_stage_accepts(tmp_path):
    """The library is no dependency: the page states the version that it was tried with."""
    (tmp_path / "mine.py").write_text(example("docs/own-environment.md", "import verifiers\n\n    logging", "python"))
    assert problem_of_program(tmp_path, "mine.py", "Environment") is None
    written = parse_value(example("docs/own-environment.md", "arguments: {environment: wordle}"))["stages"]["wordle"]
    config = Rlvr.model_validate({name: value for name, value in written.items() if name not in ("kind", "in")})
    assert isinstance(config.environment, EnvironmentProgram) and config.environment.trusted
    namespace: dict[str, Any] = {}
    exec((tmp_path / "mine.py").read_text(), namespace)
    assert [*signature(namespace["Environment"].reset).parameters] == ["self", *config.environment.arguments, "row"]


def test_the_overoptimisation_of_the_manual_is_a_curve_of_an_ensemble(tmp_path):
    graph = extension(tmp_path, example("docs/rewards.md", "kind: overoptimization"), "demo")
    assert [node.output for node in graph.own][-1] == "report" and graph.find("curve").parents == ("mine/judged",)
    assert [graph.find(f"reward_{seed}").config.model_dump()["seed"] for seed in (1, 2, 3)] == [1, 2, 3]
    assert {"mine/reward_1", "mine/reward_2", "mine/reward_3", "mine/many"} == set(graph.find("judged").parents)


def test_the_extension_of_the_manual_trains_one_stage_and_what_is_below(tmp_path):
    graph = extension(tmp_path, blocks("docs/recipes.md", "yaml")[2], "demo")
    assert {node.name for node in graph.own} == {"rlvr", "scores", "best", "unseen"}


def test_the_names_of_models_in_the_manual_are_those_of_a_recipe(tmp_path):
    model = extension(tmp_path, "extends: tiny\n" + blocks("docs/git.md", "yaml")[0]).models["final"]
    assert (model.stage, model.labels) == ("tiny/rlvr", ("small",))


def test_the_examples_of_stores_are_valid():
    sources = parse_value(next(block for block in blocks("docs/data.md", "yaml") if "type: stored" in block))
    assert PrepareData.model_validate({"record": "conversation", **sources}).sources[0].type == "stored"
    assert Placement.model_validate(parse_value(blocks("docs/resume.md", "yaml")[0])["placement"]).checkpoint_url


def test_the_example_of_published_work_is_valid():
    block = example("docs/recipes.md", "published:")
    assert Published.model_validate(parse_value(block)["published"]).hardware["sft"].gpu_hours == 72


@pytest.mark.integration
def test_the_examples_of_a_stage_test_and_of_a_method_pass(tmp_path):
    examples = [example for example in blocks("CONTRIBUTING.md", "python") if "def test_" in example]
    for number, example in enumerate(examples):
        (tmp_path / f"test_example_{number}.py").write_text(example)
    own = ["--rootdir", str(tmp_path), "--basetemp", str(tmp_path / "made")]  # by default it would remove the folders of earlier sessions
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *own, *map(str, tmp_path.glob("*.py"))]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'stages'}", "PYTEST_ADDOPTS": ""}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and f"{len(examples)} passed" in done.stdout, done.stdout + done.stderr


def test_the_results_table_has_its_place():
    text = (ROOT / "README.md").read_text()
    assert text.index("<!-- results -->") < text.index("<!-- /results -->")


def types_in(value: object) -> set[str]:
    """Every `type` that a config names, at any depth."""
    if isinstance(value, dict):
        own = {value["type"]} if isinstance(value.get("type"), str) else set()
        return own.union(*map(types_in, value.values()))
    return set().union(*map(types_in, value)) if isinstance(value, list | tuple) else set()


@pytest.mark.slow
def test_the_tour_of_the_python_interface(tmp_path, monkeypatch):
    """Below a running event loop, as in a notebook."""
    monkeypatch.chdir(fresh_project(tmp_path))

    async def notebook() -> dict[str, Any]:
        namespace: dict[str, Any] = {}
        for block in blocks("docs/python.md", "python"):
            exec(block, namespace)
        return namespace

    found = asyncio.run(notebook())
    assert found["first"]["messages"][0]["role"] == "user" and found["clean"].metrics["rows"] > 100
    assert [row.state for row in pedigree.plan(found["project"], found["variant"])] == ["up to date", "up to date", "will run"]


def test_every_kind_of_stage_is_in_a_recipe_that_is_shipped():
    recipes = ROOT / "configs" / "recipes"
    used = {node.kind for name in recipe_names(recipes) for node in load_recipe(recipes, name).nodes.values()}
    assert used == set(KINDS)


def test_the_recipe_of_all_methods_has_all_methods():
    graph = load_recipe(ROOT / "configs" / "recipes", "methods")
    for kind, configs in generate.methods().items():
        used = set().union(*(types_in(node.config.model_dump(mode="json")) for node in graph.nodes.values() if node.kind == kind))
        listed = {typing.get_args(config.model_fields["type"].annotation)[0] for config in configs if "type" in config.model_fields}
        listed -= {"program", "environment", "rating", "user"}  # files of the user's project, and servers
        assert listed <= used, f"{kind}: configs/recipes/methods.yaml lacks {sorted(listed - used)}"
