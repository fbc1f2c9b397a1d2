"""What `forget` says would be made again is what a plan shows once the row is left out, and nothing is changed by asking."""

import json
import shutil
import textwrap

import pytest
import yaml
from handmade import RUN, build, in_lines, made_of, project_at
from running_lab import RANKS, STAGE, Lab, outcomes
from typer.testing import CliRunner

from pedigree.configs.base.frozen import Frozen, Many
from pedigree.configs.base.kind import Kind, gives
from pedigree.configs.language import kinds
from pedigree.configs.language.compile import write_compiled
from pedigree.configs.language.recipe import load_recipe, load_recipes
from pedigree.configs.rows.datasets import PrepareData
from pedigree.configs.rows.filters import Filter, without
from pedigree.data.artifacts.artifacts import Run, read_run
from pedigree.pipelines.cli.main import app
from pedigree.pipelines.lineage.trace import RowQuery, trace
from pedigree.pipelines.maintain.every_graph import every_graph
from pedigree.pipelines.maintain.forget import forget, gpu_hours
from pedigree.pipelines.run.plans import plan

ROWS = """
    def run(config, inputs, job):
        return work(job, [{"id": f"{config.record}-{n:016x}"} for n in range(config.sources[0].count)])
"""
CHILD = """
extends: lab
stages:
  again: {kind: sft, in: {policy: base, data: [clean]}, global_batch: 4, max_length: 8, optimizer: {learning_rate: 0.2}}
"""


WANTED = f"shared-{1:016x}"


def one_row(name):
    return {"id": name, "messages": [{"role": "user", "content": "Hi."}]}


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """Rows with ids, and models that only stand for such; all is made but one recipe's stage below."""
    lab = Lab(tmp_path_factory.mktemp("forget"))
    (lab.code / "stages/prepare_data/run.py").write_text(STAGE + textwrap.dedent(ROWS))
    lab.write("configs/recipes/lab.yaml", "description: Rows and a model.\n" + RANKS)
    lab.write("configs/recipes/child.yaml", "description: One more.\nexecution: lab" + CHILD)
    assert set(outcomes(lab).values()) == {"ran"}
    return lab


def state(lab):
    return {path: path.stat().st_mtime_ns for path in lab.root.rglob("*") if path.is_file() and ".pedigree" not in path.parts}


def test_forget_names_what_a_plan_shows_after_the_change(lab):
    rows = [json.loads(line) for line in (lab.root / "artifacts/lab/clean/payload/rows.jsonl").read_text().splitlines()]
    wanted = rows[0]["id"]
    before = state(lab)
    found = forget(lab.project, trace(lab.project, RowQuery(id=wanted)))
    assert state(lab) == before
    assert [(one.address, one.part, one.why) for one in found.again] == [
        ("lab/raw", "data", "holds it"),
        ("lab/clean", "data", "holds it"),
        ("lab/base", "models", "goes back to it"),  # its tokenizer
        ("lab/sft", "models", "trained on it"),
    ]
    assert found.unmade == ("child/again",) and not found.strays and not found.unread
    assert all(one.seconds is not None and one.gpu_hours is None for one in found.again)
    assert [one.names for one in found.again if one.part == "models"] == [("artifacts/lab:base",), ("artifacts/lab:sft",)]
    (change,) = found.changes
    assert (change.recipe, change.stage, change.text) == ("lab", "raw", f"filters: [{{type: ids, ids: [{wanted}]}}]")
    recipe = lab.root / "configs/recipes/lab.yaml"
    value = yaml.safe_load(recipe.read_text())
    value["stages"]["raw"] |= yaml.safe_load(change.text)
    kept = recipe.read_text()
    try:
        recipe.write_text(yaml.safe_dump(value))
        planned = [entry.node.address for entry in plan(lab.run()) if entry.reasons]
    finally:
        recipe.write_text(kept)
    assert planned == [one.address for one in found.again]


def test_what_no_recipe_makes_any_more_and_what_cannot_be_read_is_said(lab):
    wanted = json.loads((lab.root / "artifacts/lab/clean/payload/rows.jsonl").read_text().splitlines()[0])["id"]
    recipe = lab.root / "configs/recipes/lab.yaml"
    kept = recipe.read_text()
    try:
        recipe.write_text(kept.replace("  sft: {kind: sft", "  other: {kind: sft"))
        lab.write("configs/recipes/broken.yaml", "stages: 3\n")
        found = forget(lab.project, trace(lab.project, RowQuery(id=wanted)))
    finally:
        recipe.write_text(kept)
        (lab.root / "configs/recipes/broken.yaml").unlink()
    assert found.strays == ("lab/sft",) and "lab/other" in found.unmade and list(found.unread) == ["broken"]


def test_gpu_hours_are_those_of_all_ranks_and_of_stages_that_use_them(lab):
    run = read_run(lab.root / "artifacts/lab/sft/run.json")
    attempt = run.attempts[0].model_copy(update={"started_at": "2026-01-02T03:00:00+00:00", "ended_at": "2026-01-02T03:30:00+00:00"})
    nodes = lab.run().graph.nodes
    on_gpus = run.model_copy(update={"attempts": (attempt, attempt), "numerics": {"device": "cuda", "world_size": 8}})
    assert gpu_hours(nodes["lab/sft"], on_gpus) == 8.0  # two tries of half an hour
    assert gpu_hours(nodes["lab/raw"], on_gpus) is None


ASKED = """
description: Stages that ask a policy, or a server.
execution: cpu
stages:
  asked: {kind: prepare_data, record: prompt, sources: [{type: files, path: asked.jsonl}]}
  prompts: {kind: decontaminate, in: {data: asked, benchmarks: [suite]}}
  suite: {kind: prepare_data, record: item, task: t, sources: [{type: files, path: suite.jsonl}]}
  base: {kind: source_model, source: {type: hub, repo: lab/model, revision: REVISION}}
  sample: {kind: sample, in: {policies: [base], prompts: prompts}, sampling: {max_tokens: 4}, samples_per_prompt: 2, prompts: {count: 2}}
  judge: {kind: judge, in: {completions: sample, judge: base}, rating: {rubrics: [honesty], by: {type: policy}}, rating_weight: 1.0}
  served:
    kind: judge
    in: {completions: sample}
    rating: {rubrics: [honesty], by: {type: endpoint, base_url: "http://localhost:8000/v1", model: m}}
    rating_weight: 1.0
  pairs: {kind: pair, in: {judgments: judge}}
  rewards:
    kind: reward_model
    in: {policy: base, preferences: [pairs]}
    global_batch: 8
    max_length: 64
    optimizer: {learning_rate: 1e-3}
  rewarded: {kind: judge, in: {completions: sample, reward_models: rewards}, reward_weight: 1.0}
  taught:
    kind: rlvr
    in: {policy: base, prompts: prompts}
    algorithm: {type: grpo}
    steps: 1
    prompts_per_step: 1
    samples_per_prompt: 2
    sampling: {max_tokens: 4}
    max_prompt_length: 8
    optimizer: {learning_rate: 1e-5}
""".replace("REVISION", "a" * 40)


@pytest.mark.parametrize(("stage", "hours"), [("sample", 8.0), ("judge", 8.0), ("taught", 8.0), ("served", None), ("rewarded", 8.0)])
def test_gpu_hours_are_those_of_all_engines_that_a_stage_opened(tmp_path, stage, hours):
    project = project_at(tmp_path)
    (project.recipes / "asked.yaml").write_text(ASKED)
    hour = {"started_at": "2026-01-02T03:00:00+00:00", "ended_at": "2026-01-02T04:00:00+00:00"}
    numerics = {"device": "cuda", "world_size": 3 if stage == "taught" else 1, "tensor_parallel": 2}
    placement = {"engines": 4}
    run = Run.model_validate({**RUN, "numerics": numerics, "placement": placement, "attempts": [{**RUN["attempts"][0], **hour}]})
    assert gpu_hours(load_recipe(project.recipes, "asked").nodes[f"asked/{stage}"], run) == hours


def test_ids_join_those_that_a_filter_has_and_stand_last():
    source = {"type": "arithmetic", "operations": ["add"], "digits": [1], "count": 3, "seed": 1}
    licences = {"type": "licences", "allow": ["mit"], "columns": []}
    filters = [{"type": "ids", "ids": ["b"]}, {"type": "exact_duplicates"}, licences]
    config = PrepareData.model_validate({"record": "prompt", "sources": [source], "filters": filters})
    assert without(config.filters, {"c", "a"}) == ({"type": "exact_duplicates"}, licences, {"type": "ids", "ids": ["a", "b", "c"]})


WRITTEN = (
    {"type": "refusals"},
    {"type": "refusals", "languages": ["en", "de"]},
    {"type": "refusals", "phrases": ["no way"]},
    {"type": "identity", "allow": ["Kimi"], "languages": ["zh-cn"]},
    {"type": "identity", "names": ["Ours"], "languages": ["de"]},
    {"type": "identity", "claims": ["(?i)i am {name}"], "languages": ["fr"]},
    {"type": "turns", "max": 8},
    {"type": "values", "column": "day", "min": "2024-03-01"},
    {"type": "control_tokens"},
    {"type": "cutoff_dates"},
    {"type": "near_duplicates", "threshold": 0.7},
)


def test_filters_stand_as_their_recipe_writes_them_and_mean_the_same(tmp_path):
    project = project_at(tmp_path)
    stage = {"kind": "prepare_data", "record": "conversation", "sources": [{"type": "files", "path": "own.jsonl"}]}

    def config(filters):
        recipe = {"description": "Rows.", "execution": "cpu", "stages": {"raw": stage | {"filters": list(filters)}}}
        (project.recipes / "written.yaml").write_text(yaml.safe_dump(recipe))
        found = load_recipe(project.recipes, "written").nodes["written/raw"].config
        assert isinstance(found, PrepareData)
        return found

    ours = {"type": "ids", "ids": [f"own-{1:016x}"]}
    said = without(config(WRITTEN).filters, ours["ids"])
    assert said == (*WRITTEN, ours)
    assert config(said).model_dump() == config((*WRITTEN, ours)).model_dump()


MIXED = """
description: Rows of a stage beside rows of one's own.
execution: cpu
stages:
  raw: {kind: prepare_data, record: conversation, sources: [{type: files, path: shared.jsonl}]}
  mixed:
    kind: prepare_data
    in: {rows: [raw]}
    record: conversation
    sources: [{type: artifact, input: raw}, {type: files, path: own.jsonl}]
    filters: [{type: exact_duplicates}]
"""


def test_of_a_stage_with_rows_of_others_beside_its_own_only_its_own_are_left_out_there(tmp_path):
    """An id that a filter names and no row has any more would end the stage."""
    handed, twice, own, both, once, other = (f"shared-{number:016x}" for number in range(6))
    dropped = {f"{once}-2": once, f"{twice}-2": twice, other: once}
    drops = [{"id": name, "reason": "exact_duplicates", "evidence": f"same text as {kept}", "text": ""} for name, kept in dropped.items()]
    rows = {"raw": [handed, twice, f"{twice}-2", both, once], "mixed": [handed, twice, both, f"{both}-2", once, own]}
    project, _ = made_of(tmp_path, MIXED, {name: map(one_row, ids) for name, ids in rows.items()}, {"mixed": {"drops.jsonl": drops}})
    left_out = {}
    for wanted in (handed, twice, own, both, once):
        row = trace(project, RowQuery(id=wanted))
        found = forget(project, row)
        left_out[wanted] = {change.stage: change.filters[-1]["ids"] for change in found.changes}
        assert [one.address for one in found.again] == (["lab/mixed"] if wanted == own else ["lab/raw", "lab/mixed"])
        assert not row.copies  # one that has its id goes with it
    in_both = {"raw": [both], "mixed": [both]}
    assert left_out == {
        handed: {"raw": [handed]}, twice: {"raw": [twice]}, own: {"mixed": [own]}, both: in_both, once: {"raw": [once], "mixed": [once]},
    }  # fmt: skip
    assert trace(project, RowQuery(id=other)).copies == [f"same text as {once}"]
    assert trace(project, RowQuery(id=handed)).sources() == [("lab/raw", "shared")]


HANDED_ON = """
description: Rows that go from one stage to the next.
execution: cpu
stages:
  raw: {kind: prepare_data, record: conversation, sources: [{type: files, path: shared.jsonl}]}
  suite: {kind: prepare_data, record: item, task: t, sources: [{type: files, path: suite.jsonl}]}
  clean: {kind: decontaminate, in: {data: raw, benchmarks: [suite]}}
  mixed: {kind: prepare_data, in: {rows: [clean]}, record: conversation, sources: [{type: artifact, input: clean}]}
"""
NOTHING = "nothing needs a rebuild"
CRAWLED = """
description: Rows that a kind of somebody else brings in.
execution: cpu
stages:
  crawled: {kind: crawl, filters: [{type: exact_duplicates}]}
  suite: {kind: prepare_data, record: item, task: t, sources: [{type: files, path: suite.jsonl}]}
  clean: {kind: decontaminate, in: {data: crawled, benchmarks: [suite]}}
"""


class Crawl(Frozen):
    """Brings in pages."""

    filters: Many[Filter] = ()


CRAWL = Kind(
    name="crawl", version=1, config=Crawl, inputs={}, output=gives("conversation"), sources=lambda config: [],
    without=lambda config, ids: without(config.filters, ids),
)  # fmt: skip


def test_a_row_that_an_added_kind_brought_in_is_left_out_there(tmp_path, monkeypatch):
    monkeypatch.setitem(kinds.KINDS, "crawl", CRAWL)
    monkeypatch.setitem(kinds._OF_CONFIGS, Crawl, CRAWL)
    rows = {"suite": [one_row(f"suite-{2:016x}")], "crawled": [one_row(WANTED)], "clean": [one_row(WANTED)]}
    project, _ = made_of(tmp_path, CRAWLED, rows)
    found = trace(project, RowQuery(id=WANTED))
    assert found.sources() == [("lab/crawled", "shared")]
    (change,) = forget(project, found).changes
    assert (change.stage, change.text) == ("crawled", f"filters: [{{type: exact_duplicates}}, {{type: ids, ids: [{WANTED}]}}]")
    shutil.rmtree(project.artifact("lab/crawled"))
    assert forget(project, trace(project, RowQuery(id=WANTED))).missing == ("lab/crawled",)


@pytest.fixture
def handed_on(tmp_path):
    """Project and graph of the recipe `HANDED_ON`, in which all stages but the suite hold one row."""
    rows = {name: [one_row(WANTED)] for name in ("raw", "clean", "mixed")}
    return made_of(tmp_path, HANDED_ON, {**rows, "suite": [one_row(f"suite-{2:016x}")]})


def forgotten(project, monkeypatch):
    monkeypatch.chdir(project.root)
    return CliRunner().invoke(app, ["forget", WANTED]).stdout


@pytest.mark.parametrize("gone", [("raw",), ("raw", "clean"), ("raw", "mixed"), ()], ids=" and ".join)
def test_where_what_brought_a_row_in_is_not_here_it_is_said_how_to_bring_it(handed_on, monkeypatch, gone):
    """And not that nothing would be made again, above a table of what would, or that no recipe makes what holds it."""
    project, _ = handed_on
    for name in gone:
        shutil.rmtree(project.artifact(f"lab/{name}"))
    pull = "The artifact that imported it is missing or damaged: run `pedigree pull lab`, then retry."
    said, found = forgotten(project, monkeypatch), forget(project, trace(project, RowQuery(id=WANTED)))
    assert (pull in said) == bool(gone) and NOTHING not in said and "belong to no current recipe" not in said
    assert [one.address for one in found.again] == [f"lab/{name}" for name in ("raw", "clean", "mixed") if name not in gone]
    assert found.missing == (("lab/raw",) if gone else ())
    (project.recipes / "lab.yaml").unlink()
    said = forgotten(project, monkeypatch)
    assert NOTHING in said and pull not in said and "belong to no current recipe" in said


def test_of_what_is_stale_and_alone_still_holds_a_row_no_pull_is_said(handed_on, monkeypatch):
    project, graph = handed_on
    shutil.rmtree(project.artifact("lab/raw"))
    build(project, graph, graph.nodes["lab/raw"], {"rows.jsonl": in_lines([one_row(f"shared-{3:016x}")])}, {}, {})
    shutil.rmtree(project.artifact("lab/suite"))
    said = forgotten(project, monkeypatch)
    assert "pull" not in said and NOTHING not in said and "No stage imports it" in said


def test_a_recipe_from_outside_its_folder_is_read_wherever_the_command_is_typed(handed_on, monkeypatch):
    project, _ = handed_on
    (project.recipes / "lab.yaml").rename(project.root / "lab.yaml")
    (project.artifacts / "lab" / "source.json").write_text('{"recipe": "lab.yaml", "set": []}')
    monkeypatch.chdir(project.recipes)
    found = forget(project, trace(project, RowQuery(id=WANTED)))
    assert not found.unread and [change.stage for change in found.changes] == ["raw"]


def test_of_a_recipe_that_another_one_was_compiled_over_only_the_other_one_is_read(handed_on):
    project, _ = handed_on
    shutil.copy(project.recipes / "lab.yaml", project.root / "lab.yaml")
    (project.artifacts / "lab" / "source.json").write_text('{"recipe": "lab.yaml", "set": []}')
    assert [graph.recipe for graph in every_graph(project, both=False)[0]] == ["lab"]
    (project.recipes / "lab.yaml").write_text("stages: 3\n")
    found = forget(project, trace(project, RowQuery(id=WANTED)))
    assert not found.unread and [change.stage for change in found.changes] == ["raw"]
    graphs, unread = every_graph(project, both=True)  # the folder of a job of either one may be resumed
    assert len(graphs) == 1 and list(unread) == ["lab"]


def test_a_variant_does_not_lend_its_filters_to_the_recipe(tmp_path):
    """An ablation without the recipe's filters; edits from it would remove them from the recipe."""
    recipe = HANDED_ON.replace("shared.jsonl}]}", "shared.jsonl}], filters: [{type: exact_duplicates}]}")
    row = {"rows.jsonl": in_lines([one_row(WANTED)])}
    project, _ = made_of(tmp_path, recipe, {"raw": [one_row(WANTED)], "suite": [one_row(f"suite-{2:016x}")]})
    variants = [load_recipes(project.recipes, "lab", [override])[-1] for override in ("raw.filters=[]", "raw.seed=3")]
    for variant in variants:
        write_compiled(project.root, [variant])
        build(project, variant, variant.find("raw"), row, {}, {})
    ids = {"type": "ids", "ids": [WANTED]}
    with_those = ("lab", ({"type": "exact_duplicates"}, ids))
    changes = {change.recipe: change.filters for change in forget(project, trace(project, RowQuery(id=WANTED))).changes}
    assert changes == dict([with_those, (variants[0].recipe, (ids,))])
    shutil.rmtree(project.artifact("lab/raw"))
    changes = {change.recipe: change.filters for change in forget(project, trace(project, RowQuery(id=WANTED))).changes}
    assert changes == dict([with_those, (variants[0].recipe, (ids,))])  # the second variant takes its filters from the recipe
