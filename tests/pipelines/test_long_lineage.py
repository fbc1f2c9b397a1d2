"""Ancestries of hundreds of stages: their size, and that nothing on the way recurses or takes every path of a lattice."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from long_chain import PATCH, record_of, run_of, shape, two_latest
from typer.testing import CliRunner

from pedigree.configs.language.recipe import load_recipe
from pedigree.data.artifacts.artifacts import ArtifactError, read_json, read_lineage
from pedigree.pipelines.cli.main import app
from pedigree.pipelines.lineage import openlineage
from pedigree.pipelines.lineage.ancestry import Pedigree, parents_first, read_pedigree, walk
from pedigree.pipelines.lineage.difference import compare
from pedigree.pipelines.lineage.verify import lineage_problems
from pedigree.pipelines.publish.export import card
from pedigree.pipelines.publish.page import lineage_page
from pedigree.pipelines.reproduce.rebuild import data_only, members_of, profile, recipe

FRAMES, DEEP = 500, 600
"""Python's limit here, half of its own, and more stages than that."""


@pytest.fixture(scope="module", autouse=True)
def frames() -> Iterator[None]:
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(FRAMES)
    yield
    sys.setrecursionlimit(before)


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return two_latest(tmp_path_factory.mktemp("deep"), shape(DEEP), files=(6, 7))[-1]


@pytest.mark.parametrize(
    ("width", "mebibytes"), [(1, 3.2), pytest.param(4, 3.4, marks=pytest.mark.nightly)], ids=["chain", "layers of four"]
)
def test_the_lineage_of_400_models_stays_in_megabytes_and_holds_a_patch_once(tmp_path, width, mebibytes):
    """31.8 MiB in schema 1, which had the patch in each attempt of each ancestor, and every environment as often as it was used."""
    latest = two_latest(tmp_path, shape(400, width))[-1]
    text = (latest / "lineage.json").read_text()
    assert len(text.encode()) < mebibytes * 2**20
    assert text.count(json.dumps(PATCH)[1:-1]) == 1 and 'patch":' not in text
    raw = read_json(latest / "lineage.json")
    assert len(raw["artifacts"]) == (399 if width == 1 else 396)
    eras, kinds = 4, 6
    assert len(raw["shared"]) == eras * (kinds + 2) + 3  # fingerprint of each kind, environment, code; hardware, numerics, placement
    (_, run) = next(iter(read_lineage(latest / "lineage.json").values()))
    assert run.environment.python == "3.11.7" and "patch" not in run.as_json()["attempts"][0]["code"]


def without_root(pedigree):
    return {name: entry for name, entry in pedigree.entries.items() if name != pedigree.id}


def test_a_chain_longer_than_the_stack_is_opened_shown_compared_and_rebuilt(deep):
    pedigree = read_pedigree(deep)
    assert [found.address for found in pedigree.parents_first()] == [f"long/s{number}" for number in range(DEEP)]
    assert [found.depth for found in walk(pedigree)] == list(range(DEEP))
    assert len(pedigree.as_lineage()["artifacts"]) == DEEP - 1
    assert len(openlineage.events(pedigree)) == 2 * DEEP
    assert f"long/s{DEEP - 1}" in lineage_page(pedigree) and card(pedigree, pedigree.address)
    above = pedigree.of(pedigree.record.inputs[0].producer)
    assert compare(pedigree, above).origins
    ancestors = without_root(pedigree)
    assert lineage_problems(pedigree.record, ancestors) == []
    members = members_of(pedigree.record, pedigree.run, ancestors, pedigree.patches)
    assert len(recipe(members)["stages"]) == len(profile(members)["stages"]) == DEEP and data_only(members) == set()
    shown = CliRunner().invoke(app, ["lineage", str(deep)])
    assert shown.exit_code == 0 and shown.stdout.count("\n") == DEEP


def test_a_lattice_is_walked_by_artifact_and_not_by_path(tmp_path):
    """Two stages a layer, each reading both above: 2^30 paths from the last to the first."""
    latest = two_latest(tmp_path, shape(60, 2), files=(6, 6), kinds=("pair",))[-1]
    pedigree = read_pedigree(latest)
    assert len(pedigree.parents_first()) == 59
    lines = [found.repeated for found in walk(pedigree)]
    assert lines.count(False) == 59 and lines.count(True) == 56
    assert len(data_only(members_of(pedigree.record, pedigree.run, without_root(pedigree), {}))) == 59
    assert not compare(pedigree, pedigree).origins


def test_a_lineage_that_leads_in_a_circle_is_refused(tmp_path):
    """Who made an input is no part of a key, so that two records which name each other contradict no hash."""
    one, other = record_of(0, [], 6), record_of(1, [], 6)
    made = [record_of(0, [other], 6), record_of(1, [one], 6)]
    made = [made[0], record_of(1, [made[0]], 6)]
    looped = made[0].inputs[0].model_copy(update={"producer": made[1].id, "content": made[1].content})
    first = made[0].model_copy(update={"inputs": (looped,)})
    assert first.id == made[0].id and first.inputs[0].content == other.content
    records = {first.id: first, made[1].id: made[1]}
    with pytest.raises(ArtifactError, match="the lineage has a cycle"):
        parents_first(first.id, records)
    with pytest.raises(ArtifactError, match="forged"):
        Pedigree(first.id, {name: (record, run_of(0, record)) for name, record in records.items()}).parents_first()


def test_a_patch_or_a_shared_value_that_is_not_what_its_hash_says_is_refused(tmp_path):
    latest = two_latest(tmp_path, shape(3), files=(6, 6))[-1]
    path = latest / "lineage.json"
    whole = path.read_text()
    path.write_text(whole.replace("a change that nobody committed", "a change that nobody has seen", 1))
    with pytest.raises(ArtifactError, match=r"the patch under [0-9a-f]{12} has sha256 [0-9a-f]{12}: it has been changed"):
        read_pedigree(latest)
    path.write_text(whole.replace('"python": "3.11.7"', '"python": "3.11.8"', 1))
    with pytest.raises(ArtifactError, match="does not match its hash: it has been changed"):
        read_pedigree(latest)
    raw = json.loads(whole)
    raw["shared"].popitem()
    path.write_text(json.dumps(raw))
    with pytest.raises(ArtifactError, match="which is missing"):
        read_pedigree(latest)


STAGES = """
description: Long.
execution: cpu
stages:
  suite: {kind: prepare_data, record: item, task: t, sources: [{type: arithmetic, operations: [add], digits: [1], count: 3, seed: 1}]}
  s0: {kind: prepare_data, record: conversation, sources: [{type: arithmetic, operations: [add], digits: [1], count: 3, seed: 2}]}
"""


def test_a_recipe_of_more_stages_than_the_stack_has_frames_loads(tmp_path):
    lines = [f"  s{n}: {{kind: decontaminate, in: {{data: s{n - 1}, benchmarks: [suite]}}}}" for n in range(1, DEEP)]
    base = ["  base: {kind: source_model, source: {type: packaged, asset: smollm2-135m-instruct}}"]
    sizes = "global_batch: 2, max_length: 8, optimizer: {learning_rate: 1e-4}"
    train = [f"  sft: {{kind: sft, in: {{policy: base, data: [s{DEEP - 1}]}}, {sizes}}}",
             "  scores: {kind: evaluate, in: {policies: [sft], suites: [suite]}, sampling: {max_tokens: 4}}"]  # fmt: skip
    (tmp_path / "long.yaml").write_text(STAGES + "\n".join([*base, *train, *reversed(lines)]) + "\n")
    graph = load_recipe(tmp_path, "long")
    assert len(graph.nodes) == DEEP + 4 and list(graph.nodes)[2:5] == ["long/base", "long/s1", "long/s2"]
    (tmp_path / "after.yaml").write_text("description: After.\nstages:\n  more: {kind: decontaminate, in: "
                                         f"{{data: long/s{DEEP - 1}, benchmarks: [long/suite]}}}}\n")  # fmt: skip
    assert len(load_recipe(tmp_path, "after").nodes) == DEEP + 2
    text = (tmp_path / "long.yaml").read_text().replace("data: s0,", f"data: s{DEEP - 1},")
    (tmp_path / "long.yaml").write_text(text)
    with pytest.raises(Exception, match="form a cycle"):
        load_recipe(tmp_path, "long")
