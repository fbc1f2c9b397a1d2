"""The data stages of the flagship's recipes, as they stand: pinned to a mirror of made rows, run to the end.

The mirror has every made row. Where a recipe allows a share of bad rows, the good ones are repeated until the bad ones are that share.
"""

import hashlib
import json
import math
import shutil
from collections.abc import Iterator, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from data_lab import rows_of, run_stage
from projects import fresh_project
from row_reading import load
from typer.testing import CliRunner

from pedigree.configs.base.hub_names import PIN_ME
from pedigree.configs.language.graph import Graph
from pedigree.configs.language.recipe import load_recipe
from pedigree.configs.language.stated_sources import hub_sources
from pedigree.configs.rows.datasets import PrepareData
from pedigree.configs.rows.overlap_criteria import Decontaminate
from pedigree.configs.rows.row_sources import Hub
from pedigree.configs.rows.source_models import HubModel
from pedigree.data.artifacts.artifacts import Artifact
from pedigree.data.sources.sources import Outside
from pedigree.pipelines.cli.main import app
from pedigree.pipelines.run.pins import unpinned
from pedigree.stages.verifiers import check

MADE = Path(__file__).parents[2] / "configs" / "rehearsal" / "hub"
RECIPES = ("olmo2_1b", "tulu3_8b", "tulu31_8b", "tulu3_8b_onpolicy")
LEAK = "A bus has 48 seats."


class Ran(NamedTuple):
    """A recipe with the artifacts of its data stages."""

    graph: Graph
    made: Mapping[str, Artifact]
    folders: Mapping[str, Path]

    def bad(self, stage: str) -> list[dict[str, Any]]:
        lines = (self.folders[self.graph.find(stage).spec] / "evidence" / "bad_rows.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A clone whose recipes `pedigree pin` has pinned to the mirror."""
    root = fresh_project(tmp_path_factory.mktemp("project") / "clone")
    patch = pytest.MonkeyPatch()
    mirror = root.parent / "mirror"
    for name in RECIPES:
        for node in load_recipe(root / "configs" / "recipes", name).nodes.values():
            for source in hub_sources(node.config):
                record = node.config.record if isinstance(node.config, PrepareData) else None
                mirrored(mirror, (Hub if "split" in source else HubModel).model_validate(source), record, patch)
    patch.setenv("PEDIGREE_HUB", str(mirror))
    with pytest.MonkeyPatch.context() as shell:
        shell.chdir(root)
        for name in RECIPES:
            done = CliRunner().invoke(app, ["pin", name])
            assert done.exit_code == 0, done.output
    yield root
    patch.undo()


def mirrored(mirror: Path, source: Any, record: Any, patch: pytest.MonkeyPatch) -> None:
    """A repository in the mirror, at a commit of its own; what several sources name, once."""
    kind = "datasets" if isinstance(source, Hub) else "models"
    folder = mirror / kind / source.repo
    if folder.exists():
        return
    if isinstance(source, Hub):
        shutil.copytree(MADE / kind / source.repo, folder)
        if source.max_bad_rows:
            patch.setenv("PEDIGREE_HUB", str(MADE))
            widen(folder / "data" / "train.jsonl", source, record)
    else:
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
    commit = hashlib.sha1(source.repo.encode()).hexdigest() if source.revision == PIN_ME else source.revision
    (folder / "REVISION").write_text(commit + "\n")


def widen(file: Path, source: Hub, record: Any) -> None:
    """Repeats the good rows until the bad ones are as many as the recipe allows."""
    loaded = load(source.model_copy(update={"revision": "a" * 40, "max_bad_rows": 100}), record, None, Outside(check_verifier=check))
    lines = file.read_text().splitlines()
    bad = [int(row.place.rpartition("[")[2].rstrip("]")) for row in loaded.bad]
    good = [line for number, line in enumerate(lines) if number not in bad]
    wanted = math.ceil(len(bad) / Fraction(str(source.max_bad_rows))) - len(bad)
    repeated = [good[number % len(good)] for number in range(wanted)]
    file.write_text("\n".join([*repeated, *(lines[number] for number in bad)]) + "\n")


@pytest.fixture(scope="module")
def runs(project: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ran]:
    """All recipes; stages that several have run once."""
    made: dict[str, Artifact] = {}
    folders: dict[str, Path] = {}
    graphs = {name: load_recipe(project / "configs" / "recipes", name) for name in RECIPES}
    for graph in graphs.values():
        for node in graph.nodes.values():
            if isinstance(node.config, PrepareData | Decontaminate) and node.spec not in made:
                ports: dict[str, Any] = {}
                for edge in node.edges:
                    ports.setdefault(edge.port, {})[edge.label] = made[graph.nodes[edge.source].spec]
                folder = tmp_path_factory.mktemp(node.name) / "job"
                made[node.spec] = run_stage(folder, node.kind, node.config.model_dump(mode="json", exclude_computed_fields=True), **ports)
                folders[node.spec] = made[node.spec].path
    return {name: Ran(graph, {node.address: made[node.spec] for node in graph.nodes.values() if node.spec in made}, folders)
            for name, graph in graphs.items()}  # fmt: skip


@pytest.mark.parametrize("name", RECIPES)
def test_pinned_recipes_are_the_shipped_ones_with_commits_in_them(project, name):
    shipped = Path(__file__).parents[2] / "configs" / "recipes" / f"{name}.yaml"
    ours, theirs = (project / "configs" / "recipes" / f"{name}.yaml").read_text().splitlines(), shipped.read_text().splitlines()
    changed = [(one, other) for one, other in zip(theirs, ours, strict=True) if one != other]
    assert all("revision: pin me" in one and one.partition("revision:")[0] == other.partition("revision:")[0] for one, other in changed)
    graph = load_recipe(project / "configs" / "recipes", name)
    assert not unpinned(graph, list(graph.nodes))


@pytest.mark.parametrize("name", RECIPES)
def test_every_data_stage_comes_to_its_end(runs, name):
    graph, made, _ = runs[name]
    assert all(node.address in made for node in graph.nodes.values() if node.kind in ("prepare_data", "decontaminate"))
    sizes = {address.partition("/")[2]: artifact.record.metrics["rows"] for address, artifact in made.items()}
    assert (sizes["ifeval"], sizes["humaneval"], sizes["gsm8k"], sizes["minerva_math"], sizes["agieval"]) == (541, 164, 8, 14, 8)
    assert sizes["bbh"] == 27


@pytest.mark.parametrize(
    ("name", "stage", "reasons"),
    [
        ("tulu3_8b", "conversations_raw", {"answer is empty", "there are no messages", "where the assistant's is due", "need an answer"}),
        ("olmo2_1b", "conversations_raw", {"is the tool's", "is the system's", "is the assistant's"}),
        ("tulu3_8b", "preferences_raw", {"same beginning", "two answers are the same", "rejected answer is empty", "only one of"}),
        ("olmo2_1b", "preferences_raw", {"same beginning", "does not end with the assistant's turn"}),
        ("tulu3_8b", "prompts_raw", {"assert nothing", "which math compares with", "is empty"}),
        ("olmo2_1b", "maths_raw", {"which math compares with"}),
    ],
)
def test_bad_rows_are_refused_with_their_reasons(runs, name, stage, reasons):
    bad = runs[name].bad(stage)
    assert bad and all(any(reason in row["reason"] for reason in reasons) for row in bad)
    assert all(any(reason in row["reason"] for row in bad) for reason in reasons)
    source = runs[name].graph.find(stage).config.sources[0]
    assert len(bad) <= source.max_bad_rows * (runs[name].made[runs[name].graph.find(stage).address].record.metrics["rows"] + len(bad))


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        ("olmo2_1b", "conversations"), ("olmo2_1b", "preferences"), ("olmo2_1b", "prompts"), ("tulu3_8b", "conversations"),
        ("tulu3_8b", "preferences"), ("tulu3_8b", "prompts"), ("tulu3_8b_onpolicy", "questions"),
    ],
)  # fmt: skip
def test_a_row_that_repeats_an_item_is_removed_and_named(runs, name, stage):
    graph, made, _ = runs[name]
    clean = made[graph.find(stage).address]
    raw = made[next(edge.source for edge in graph.find(stage).edges if edge.port == "data")]
    assert clean.record.metrics["benchmarks"]["gsm8k"]["rows_removed"] > 0
    assert any(LEAK in json.dumps(row) for row in rows_of(raw)) and not any(LEAK in json.dumps(row) for row in rows_of(clean))
    assert {row["id"] for row in rows_of(raw)} - {row["id"] for row in rows_of(clean)} == {
        row["id"] for row in rows_of(raw) if LEAK in json.dumps(row)
    }  # and nothing else


def test_maths_loses_a_problem_of_the_benchmark(runs):
    graph, made, _ = runs["olmo2_1b"]
    assert made[graph.find("maths").address].record.metrics["benchmarks"]["minerva_math"]["rows_removed"] > 0


def test_configurations_tell_the_parts_of_a_benchmark_apart(runs):
    items = rows_of(runs["tulu3_8b"].made["tulu3_suites/agieval"])
    assert {item["category"] for item in items} == {"aqua_rat", "logiqa-en", "lsat-ar", "lsat-lr", "lsat-rc", "sat-en", "sat-math"}
