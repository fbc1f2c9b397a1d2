"""Licences travel with the records, are no identity, and a card says what all of them together ask for."""

import json
import re
from pathlib import Path

import pytest
import yaml
from handmade import build, everything, project_at

from pedigree.configs.base.document import ConfigError
from pedigree.configs.base.frozen import Frozen, Many
from pedigree.configs.base.kind import Kind, gives
from pedigree.configs.base.licenses import CONDITIONS, TABLE, conditions, licence
from pedigree.configs.base.problems import UsageProblem
from pedigree.configs.language import kinds
from pedigree.configs.language.compile import compile_recipe
from pedigree.configs.language.recipe import load_recipe
from pedigree.configs.language.stated_sources import generators_of, hub_sources, licences_of
from pedigree.configs.rows.datasets import PrepareData
from pedigree.configs.rows.row_sources import Hub, Licensed
from pedigree.configs.rows.source_models import HubModel
from pedigree.data.artifacts.artifacts import Record
from pedigree.pipelines.lineage.ancestry import read_pedigree
from pedigree.pipelines.publish.attribution import Origin, all_licences, brought, origins, rows_of, section
from pedigree.pipelines.publish.card import card
from pedigree.pipelines.publish.export import data_card, export, in_standard
from pedigree.pipelines.publish.report import write_report

STARTERS = Path(__file__).resolve().parents[2] / "configs" / "starters"

RECIPE = """
description: Rows of others.
execution: cpu
stages:
  suite: {kind: prepare_data, record: item, task: t, sources: [{type: files, path: suite.jsonl LICENCE_0}]}
  ours: {kind: prepare_data, record: conversation, sources: [{type: arithmetic, operations: [add], digits: [1], count: 3, seed: 2}]}
  theirs:
    kind: prepare_data
    record: conversation
    sources:
      - {type: hub, repo: lab/rows, revision: REVISION, split: train LICENCE_1}
      - {type: stored, name: sayings, url: "s3://bucket/sayings.jsonl", sha256: SHA256 LICENCE_2}
  clean: {kind: decontaminate, in: {data: theirs, benchmarks: [suite]}}
  base: {kind: source_model, source: {type: hub, repo: lab/model, revision: REVISION LICENCE_3}}
  sft: {kind: sft, in: {policy: base, data: [clean]}, global_batch: 2, max_length: 8, optimizer: {learning_rate: 1e-4}}
"""
PAYLOADS = {"source_model": {"model.safetensors": "w", "config.json": "{}"}, "sft": {"model.safetensors": "v", "config.json": "{}"}}


def recipe(*licences):
    text = RECIPE.replace("REVISION", "a" * 40).replace("SHA256", "b" * 64)
    for number in range(4):
        stated = licences[number] if number < len(licences) else None
        text = text.replace(f" LICENCE_{number}", f", licence: {stated}" if stated else "")
    return text


def made(folder, *licences, metrics=None, text=None):
    """A project in which the recipe has run."""
    project = project_at(folder)
    (project.recipes / "lab.yaml").write_text(text or recipe(*licences))
    graph = load_recipe(project.recipes, "lab")
    for node in graph.nodes.values():
        build(project, graph, node, PAYLOADS.get(node.kind, {"rows.jsonl": '{"id": "a"}\n'}), {}, (metrics or {}).get(node.name, {}))
        run = project.artifact(node.address) / "run.json"
        stated = {"licences": licences_of(node.config), "generators": generators_of(node.config)}
        run.write_text(json.dumps({**json.loads(run.read_text()), "address": node.address, **stated}))
    return project


def test_identifiers_are_those_of_spdx_and_the_hub_and_what_cannot_be_one_is_refused():
    written = {
        "Apache-2.0": "apache-2.0", "llama3.1": "llama3.1", "MIT AND cc-by-4.0": "MIT AND CC-BY-4.0", "ODC-By-1.0": "odc-by-1.0",
        "LicenseRef-ours": "LicenseRef-ours", "terms-of-x": "terms-of-x", "UNKNOWN": "unknown",
    }  # fmt: skip
    for given, expected in written.items():
        assert licence(given) == expected == licence(expected)
    for wrong in ("", "a | b", "cc-by\n4.0", "x" * 101, "see the file", "<b>"):
        with pytest.raises(ValueError, match="is not a license: write an SPDX identifier"):
            licence(wrong)
    assert conditions("cc-by-nc-sa-4.0") == ("attribution", "share-alike", "non-commercial")
    assert conditions("cc0-1.0") == () and conditions("terms-of-x") is None and conditions("unknown") is None
    assert conditions("MIT AND CC-BY-NC-4.0") == ("notice", "attribution", "non-commercial")
    assert conditions("GPL-3.0-only WITH Classpath-exception-2.0") == ("notice", "share-alike")
    assert {condition for asked in TABLE.values() for condition in asked} == CONDITIONS.keys()


def test_a_licence_is_read_with_the_recipe_and_is_no_identity(tmp_path):
    for name, licences in (("silent", ()), ("stated", ("odc-by", "cc-by-nc-4.0", "MIT", "llama3.1"))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "lab.yaml").write_text(recipe(*licences))
    silent, stated = (load_recipe(tmp_path / name, "lab") for name in ("silent", "stated"))
    assert compile_recipe(silent) == compile_recipe(stated)
    assert [node.spec for node in silent.nodes.values()] == [node.spec for node in stated.nodes.values()]
    assert licences_of(stated.nodes["lab/theirs"].config) == {"lab/rows": ["cc-by-nc-4.0"], "sayings": ["mit"]}
    assert licences_of(silent.nodes["lab/theirs"].config) == {"lab/rows": ["unknown"], "sayings": ["unknown"]}
    assert licences_of(stated.nodes["lab/ours"].config) == {}
    (tmp_path / "lab.yaml").write_text(recipe("free for all"))
    with pytest.raises(ConfigError, match="'free for all' is not a license"):
        load_recipe(tmp_path, "lab")


class Fetch(Frozen):
    """Config of a kind from outside the repository."""

    given: Many[Hub | HubModel]
    notes: Licensed
    name: str


def test_a_kind_from_elsewhere_states_licences_writers_and_pins_through_its_hook(monkeypatch):
    def sources(config):
        return [*config["given"], {**config["notes"], "name": config["name"]}]

    kind = Kind(name="fetch", version=1, config=Fetch, inputs={}, output=gives("conversation"), sources=sources)
    monkeypatch.setitem(kinds._OF_CONFIGS, Fetch, kind)
    hub = {"type": "hub", "revision": "a" * 40}
    data = {**hub, "repo": "lab/rows", "split": "train", "licence": "mit", "generator": ["gpt-4o"]}
    config = Fetch.model_validate({"given": [data, {**hub, "repo": "lab/model"}], "notes": {"licence": "odc-by"}, "name": "notes"})
    assert licences_of(config) == {"lab/model": ["unknown"], "lab/rows": ["mit"], "notes": ["odc-by"]}
    assert generators_of(config) == {"lab/rows": ["gpt-4o"]}
    assert [(source["repo"], "split" in source) for source in hub_sources(config)] == [("lab/rows", True), ("lab/model", False)]


def test_sources_that_a_kind_from_elsewhere_declares_badly_are_named_or_unknown(monkeypatch):
    declared = [{"type": "hub", "repo": "lab/rows", "licence": None}, {"type": "hub", "repo": "lab/rows", "licence": "mit"}, "no mapping"]
    kind = Kind(name="fetch", version=1, config=Fetch, inputs={}, output=gives("conversation"), sources=lambda config: declared)
    monkeypatch.setitem(kinds._OF_CONFIGS, Fetch, kind)
    monkeypatch.setitem(kinds.KINDS, "fetch", kind)
    config = Fetch.model_validate({"given": [], "notes": {"licence": "odc-by"}, "name": "notes"})
    assert kinds.sources_of("fetch", {}) == declared[:2]
    assert licences_of(config) == {"lab/rows": ["mit", "unknown"]}
    with pytest.raises(UsageProblem, match=r"kind fetch declares a source of type hub without revision"):
        hub_sources(config)


def test_a_record_without_sources_imports_rows():
    assert kinds.imports_rows("prepare_data", {})


def test_two_licences_for_one_source_are_both_kept():
    hub = Hub(type="hub", repo="lab/rows", revision="a" * 40, split="train", licence="mit")
    config = PrepareData(record="conversation", sources=(hub, hub.model_copy(update={"licence": "cc-by-4.0"})))
    assert licences_of(config) == {"lab/rows": ["cc-by-4.0", "mit"]}


def test_rows_that_another_stage_may_have_made_are_not_said_to_be_of_a_source(tmp_path):
    sources = [{"type": "artifact", "input": "clean"}, {"type": "hub", "repo": "org/foo"}]
    assert [source["repo"] for source in brought(sources, "foo")] == ["org/foo"] and brought(sources, "alpaca") == []
    assert brought(sources[1:], "alpaca") == sources[1:]
    planted = [{"type": "leaks"}, sources[1]]
    assert brought(planted, "leak-verbatim") == [] and brought(planted, "leak-detection") == sources[1:]


def test_licences_travel_in_the_records_and_the_card_says_what_all_of_them_ask(tmp_path):
    project = made(tmp_path / "project", "odc-by", "cc-by-nc-4.0", None, "llama3.1")
    folder = export(project.artifact("lab/sft"), "lab/sft", tmp_path / "out")
    found = origins(read_pedigree(folder))
    assert found == [
        Origin("lab/model", "model", ("llama3.1",)),
        Origin("lab/rows", "data", ("cc-by-nc-4.0",)),
        Origin("sayings", "data", ("unknown",)),
        Origin("suite.jsonl", "benchmark", ("odc-by",)),
    ]
    text = (folder / "README.md").read_text()
    head = yaml.safe_load(text.split("---\n")[1])
    assert head["base_model"] == "lab/model" and head["base_model_relation"] == "finetune" and head["datasets"] == ["lab/rows"]
    assert head["license"] == "other" and head["license_name"] == "cc-by-nc-4.0 AND llama3.1 AND unknown"
    assert "not legal advice" in text and "no commercial use (lab/rows)" in text and "Built with Llama" in text
    assert "the conditions of unknown or unlisted licenses: sayings" in text
    assert "| suite.jsonl | evaluation only | odc-by |  |" in text
    assert data_card(read_pedigree(project.artifact("lab/clean")))["license"] == ["cc-by-nc-4.0", "unknown"]


def test_a_model_that_only_counted_tokens_is_nothing_that_rows_are_made_from(tmp_path):
    ruler = "  ruler: {kind: source_model, source: {type: hub, repo: lab/ruler, revision: REVISION, licence: llama3.1}}\n"
    text = (RECIPE + ruler).replace("    kind: prepare_data\n", "    kind: prepare_data\n    in: {tokenizer: ruler}\n")
    project = made(tmp_path, text=re.sub(" LICENCE_[0-3]", "", text.replace("REVISION", "a" * 40).replace("SHA256", "b" * 64)))
    pedigree = read_pedigree(project.artifact("lab/sft"))
    assert {origin.name for origin in origins(pedigree)} == {"lab/model", "lab/rows", "sayings", "suite.jsonl"}
    assert yaml.safe_load(card(pedigree, "sft").split("---")[1])["base_model"] == "lab/model"
    assert "lab/ruler" in (project.artifact("lab/sft") / "lineage.json").read_text()  # its record stays


def test_who_wrote_the_rows_of_a_source_is_no_identity_and_travels_with_its_rows_and_its_licence(tmp_path):
    plain, told = recipe("odc-by"), recipe("odc-by").replace("split: train", "split: train, generator: [gpt-4o, o1 (preview)]")
    for name, text in (("plain", plain), ("told", told)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "lab.yaml").write_text(text)
    first, second = (load_recipe(tmp_path / name, "lab") for name in ("plain", "told"))
    assert compile_recipe(first) == compile_recipe(second)
    assert (
        generators_of(second.nodes["lab/theirs"].config) == {"lab/rows": ["gpt-4o", "o1 (preview)"]}
        and generators_of(first.nodes["lab/theirs"].config) == {}
    )
    project = made(tmp_path / "project", "odc-by", metrics={"theirs": {"sources": {"rows": 1200, "sayings": 30}}}, text=told)
    folder = export(project.artifact("lab/sft"), "lab/sft", tmp_path / "out")
    found = {origin.name: (origin.rows, origin.generators) for origin in origins(read_pedigree(folder))}
    assert found["lab/rows"] == (1200, ("gpt-4o", "o1 (preview)")) and found["sayings"] == (30, ())
    text = (folder / "README.md").read_text()
    assert "| lab/rows | rows | unknown | **unknown**: find out before you redistribute this | 1,200 | gpt-4o, o1 (preview) |" in text
    counts = {"read": 1230, "kept": 1230, "drops": {}, "sources": {"rows": 1200, "sayings": 30}, "per_source": []}
    (project.artifact("lab/theirs") / "evidence/counts.json").write_text(json.dumps(counts))
    page = write_report(project, second).read_text()
    assert "1200 rows (unknown; written by gpt-4o, o1 (preview)), 30 sayings (unknown)" in page
    (tmp_path / "told/lab.yaml").write_text(told.replace("gpt-4o", '"<script>"'))
    with pytest.raises(ConfigError, match="generator"):
        load_recipe(tmp_path / "told", "lab")


def test_rows_are_counted_for_a_source_only_where_their_names_tell_which_it_was():
    hub = {"type": "hub", "repo": "lab/rows"}
    rules = {"type": "arithmetic"}

    def counted(sources, **rows):
        given = {"kind": "prepare_data", "version": 1, "type": "prompt", "config": {"sources": sources}, "inputs": [], "files": []}
        return rows_of(Record(**given, key="0" * 64, content="0" * 64, metrics={"sources": rows}))

    assert counted([hub, rules], arithmetic=4, gsm8k=2, math=1) == {"lab/rows": 3}  # rows that say themselves what they are called
    assert counted([hub, {"type": "files", "path": "a/b.jsonl.gz"}], b=2, rows=3) == {"a/b.jsonl.gz": 2, "lab/rows": 3}
    assert counted([hub, {"type": "files", "path": "a/b.jsonl"}], b=2, gsm8k=3) == {}
    assert counted([hub, {"type": "hub", "repo": "other/rows"}], rows=5) == {}
    assert counted([{"type": "leaks"}, hub], **{"leak-verbatim": 2, "rows": 1}) == {"lab/rows": 1}


def test_what_the_recipe_says_later_counts_beside_what_was_recorded(tmp_path):
    project = made(tmp_path)
    pedigree = read_pedigree(project.artifact("lab/sft"))
    assert all_licences(origins(pedigree)) == ["unknown"]
    (project.recipes / "lab.yaml").write_text(recipe("mit", "mit", "MIT", "mit"))
    assert all_licences(origins(pedigree)) == ["unknown"] and all_licences(origins(pedigree, project)) == ["mit"]
    assert "\nlicense: mit\n" in in_standard(pedigree, "card", project)
    again = made(tmp_path / "again", "mit", "mit", "mit", "mit")
    (again.recipes / "lab.yaml").write_text(recipe("mit", "cc-by-nc-4.0", "mit", "mit"))
    found = origins(read_pedigree(again.artifact("lab/sft")), again)
    assert all_licences(found) == ["cc-by-nc-4.0", "mit"]
    assert "| lab/rows | rows | cc-by-nc-4.0, mit | conflicting licenses are stated: find out which one applies |" in section(found)
    assert "no commercial use (lab/rows)" in section(found)


def test_records_of_before_name_what_packages_hold_and_nothing_is_guessed(tmp_path):
    project = project_at(tmp_path)
    (project.recipes / "dpo.yaml").write_text(STARTERS.joinpath("dpo.yaml").read_text())
    everything(project, "dpo")
    found = {origin.name: origin.licences for origin in origins(read_pedigree(project.artifact("dpo/dpo")))}
    assert found == {"smollm2-135m-instruct": ("apache-2.0",), "alpaca-en-demo": ("cc-by-nc-4.0",), "dpo-en-demo": ("unknown",)}


def test_texts_of_records_cannot_break_the_table():
    assert "\n| a \\| b &lt;script> \\`c\\` | rows |" in section([Origin("a | b\n<script> `c`", "data", ("mit",))])
    assert "are generated procedurally" in section([])
