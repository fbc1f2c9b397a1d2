"""Pedigrees in the words of other tools: golden files, and a real server that takes them.

The goldens hold the arithmetic chain of `handmade.py`; after a wanted change run `python tests/pipelines/test_standards.py`.
"""

import json
import sys
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import yaml
from handmade import build, made_at, project_at

from pedigree.configs.base.problems import PedigreeError, UsageProblem
from pedigree.configs.base.project import Project
from pedigree.configs.language.recipe import load_recipe
from pedigree.data.artifacts.artifacts import ArtifactError
from pedigree.pipelines.lineage import openlineage
from pedigree.pipelines.lineage.ancestry import Pedigree, read_pedigree
from pedigree.pipelines.lineage.evaluations import evaluations_of
from pedigree.pipelines.lineage.standards import croissant, slsa
from pedigree.pipelines.lineage.verify import verify_folders
from pedigree.pipelines.publish.card import card, datasets_of
from pedigree.pipelines.publish.export import data_card, export, in_standard
from pedigree.pipelines.publish.page import lineage_page

GOLDEN = Path(__file__).parent / "golden"
RECIPE = """
description: Two.
execution: cpu
stages:
  suite:
    kind: prepare_data
    record: item
    task: arithmetic
    sources: [{type: arithmetic, operations: [add], digits: [1], count: 3, seed: 1}]
  clean:
    kind: decontaminate
    in: {data: raw, benchmarks: [suite]}
  raw:
    kind: prepare_data
    record: prompt
    sources: [{type: arithmetic, operations: [add], digits: [1], count: 5, seed: 2}]
"""
ROWS = [
    {"id": "a", "source": "arithmetic", "margin": None, "messages": [{"role": "user", "content": "1 + 1?"}], "n": 1, "whole": True},
    {"id": "b", "source": "arithmetic", "margin": 0.5, "messages": [], "n": 2, "whole": False, "logprobs": [-0.5, -1]},
]


def small(folder: Path) -> Pedigree:
    """`clean`, made from `raw` and `suite`."""
    project = project_at(folder)
    (project.recipes / "small.yaml").write_text(RECIPE)
    graph = load_recipe(project.recipes, "small")
    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    for node in graph.nodes.values():
        build(project, graph, node, {"rows.jsonl": lines}, {}, {"rows": 2})
        run = project.artifact(node.address) / "run.json"
        run.write_text(json.dumps({**json.loads(run.read_text()), "address": node.address}))
    return read_pedigree(project.artifact("small/clean"))


def made(folder: Path) -> dict[str, str]:
    pedigree = small(folder)
    return {
        "openlineage.jsonl": in_standard(pedigree, "openlineage", None),
        "slsa.json": json.dumps(slsa(pedigree), indent=1) + "\n",
        "croissant.json": json.dumps(croissant(pedigree, ROWS, ["Apache-2.0"]), indent=1) + "\n",
    }


@pytest.fixture(scope="module")
def pedigree(tmp_path_factory) -> Pedigree:
    return small(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def demo(tmp_path_factory) -> Project:
    project, _ = made_at(tmp_path_factory.mktemp("demo"), "demo")
    return project


@pytest.mark.parametrize("name", ["openlineage.jsonl", "slsa.json", "croissant.json"])
def test_exports_are_what_they_were(tmp_path, name):
    assert made(tmp_path)[name] == (GOLDEN / name).read_text()


# --- OpenLineage -------------------------------------------------------------------------------------------------------


def test_every_ancestor_has_a_start_and_a_completion_parents_first(pedigree):
    events = openlineage.events(pedigree)
    assert [(event["eventType"], event["job"]["name"]) for event in events] == [
        ("START", "small/raw"), ("COMPLETE", "small/raw"), ("START", "small/suite"), ("COMPLETE", "small/suite"),
        ("START", "small/clean"), ("COMPLETE", "small/clean"),
    ]  # fmt: skip
    start, end = events[-2:]
    assert (start["eventTime"], end["eventTime"]) == ("2026-01-02T03:04:05+00:00", "2026-01-02T03:06:10+00:00")
    assert start["run"] == end["run"] and start["outputs"] == []
    assert end["outputs"][0]["facets"]["version"]["datasetVersion"] == pedigree.record.content
    assert [given["name"] for given in end["inputs"]] == ["small/raw", "small/suite"]
    assert len({event["run"]["runId"] for event in events}) == 3
    assert len({event["run"]["facets"]["parent"]["run"]["runId"] for event in events}) == 1


def test_every_facet_names_its_producer_and_schema_and_ours_begin_with_our_name(pedigree):
    known = {"parent", "sourceCodeLocation", "version"}
    for event in openlineage.events(pedigree):
        holders = [event["run"], event["job"], *event["inputs"], *event["outputs"]]
        for name, facet in [item for holder in holders for item in holder["facets"].items()]:
            assert facet["_producer"] and facet["_schemaURL"].startswith("https://openlineage.io/spec/")
            assert name in known or name.startswith("pedigree_")


class Server:
    """A lineage server on this machine that keeps what it is sent, and answers as it is told."""

    def __init__(self, answers: list[int]) -> None:
        self.got: list[tuple[str, str | None, dict]] = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(handler):
                body = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
                self.got.append((handler.path, handler.headers["Authorization"], body))
                handler.send_response(answers[min(len(self.got), len(answers)) - 1])
                handler.end_headers()
                handler.wfile.write(b"no room")

            def log_message(self, *_: object) -> None:
                pass

        self.http = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()


def test_events_are_posted_in_order_with_the_key(pedigree, monkeypatch):
    server = Server([201])
    monkeypatch.setenv("OPENLINEAGE_URL", server.url + "/")
    monkeypatch.setenv("OPENLINEAGE_API_KEY", "s3cret")
    said = in_standard(pedigree, "openlineage", None)
    server.close()
    assert said == f"sent 6 events to {server.url}/api/v1/lineage\n"
    assert [body for _, _, body in server.got] == openlineage.events(pedigree)
    assert {(path, key) for path, key, _ in server.got} == {("/api/v1/lineage", "Bearer s3cret")}


def test_a_refusing_or_absent_server_is_named_with_what_it_had_taken(pedigree):
    server = Server([201, 201, 507])
    with pytest.raises(PedigreeError, match=r"returned 507 .*\(no room\) after accepting 2 of 6 events") as error:
        openlineage.send(openlineage.events(pedigree), {"OPENLINEAGE_URL": server.url, "OPENLINEAGE_API_KEY": "s3cret"})
    server.close()
    assert "s3cret" not in str(error.value)
    with pytest.raises(PedigreeError, match=r"could not be reached .* after accepting 0 of 6"):
        openlineage.send(openlineage.events(pedigree), {"OPENLINEAGE_URL": server.url})
    with pytest.raises(PedigreeError, match="must begin with http"):
        openlineage.send(openlineage.events(pedigree), {"OPENLINEAGE_URL": "file:///etc"})


# --- SLSA, Croissant, card ---------------------------------------------------------------------------------------------


def test_provenance_names_every_file_and_every_input(pedigree):
    statement = slsa(pedigree)
    assert statement["subject"] == [{"name": "rows.jsonl", "digest": {"sha256": pedigree.record.files[0].sha256}}]
    build_ = statement["predicate"]["buildDefinition"]
    assert build_["externalParameters"]["config"] == pedigree.record.config
    inputs = [entry for entry in build_["resolvedDependencies"] if entry.get("uri", "").startswith("urn:pedigree:artifact:")]
    assert [(entry["name"], entry["digest"]["pedigreeContent"]) for entry in inputs] == [
        (f"{given.port}/{given.label}", given.content) for given in pedigree.record.inputs
    ]
    (code,) = [entry for entry in build_["resolvedDependencies"] if entry["name"] == "code"]
    assert code["digest"] == {"gitCommit": "0123456789abcdef0123456789abcdef01234567"}
    assert statement["predicate"]["runDetails"]["metadata"]["startedOn"] == "2026-01-02T03:04:05Z"


def test_croissant_fields_are_those_of_the_rows(pedigree):
    (record_set,) = croissant(pedigree, ROWS)["recordSet"]
    types = {field["name"]: (field.get("dataType"), field.get("repeated", False)) for field in record_set["field"]}
    assert types == {
        "id": ("sc:Text", False), "source": ("sc:Text", False), "margin": ("sc:Float", False), "messages": (None, True),
        "n": ("sc:Integer", False), "whole": ("sc:Boolean", False), "logprobs": ("sc:Float", True),
    }  # fmt: skip
    (messages,) = [field for field in record_set["field"] if field["name"] == "messages"]
    assert [(field["source"]["extract"], field["source"]["transform"]) for field in messages["subField"]] == [
        ({"column": "messages"}, {"jsonPath": "content"}),
        ({"column": "messages"}, {"jsonPath": "role"}),
    ]


def test_an_exported_data_set_describes_itself_and_a_model_brings_its_provenance(demo, tmp_path):
    data = export(demo.artifact("demo/conversations"), "demo/conversations", tmp_path / "data")
    described = json.loads((data / "croissant.json").read_text())
    assert described["distribution"][0]["sha256"] == read_pedigree(data).record.files[0].sha256
    assert len(described["license"]) == 1 and not (data / "pedigree" / "provenance.slsa.json").exists()
    model = export(demo.artifact("demo/sft"), "demo/sft", tmp_path / "model")
    statement = json.loads((model / "pedigree" / "provenance.slsa.json").read_text())
    assert {entry["name"] for entry in statement["subject"]} == {"model.safetensors", "config.json"}
    assert not (model / "croissant.json").exists()
    assert verify_folders([data, model]).problems == []
    with pytest.raises(ArtifactError, match="has type policy: Croissant describes only datasets"):
        data_card(read_pedigree(model))


def test_the_card_names_data_and_scores(demo):
    pedigree = read_pedigree(demo.artifact("demo/sft"))
    text = card(pedigree, "demo/sft", evaluations_of(demo, pedigree.record.content))
    metadata = yaml.safe_load(text.split("---\n")[1])
    assert not metadata.keys() & {"base_model", "base_model_relation", "datasets"}  # neither is a repository of the hub
    (index,) = metadata["model-index"]
    assert index["results"][0] == {
        "task": {"type": "text-generation"},
        "dataset": {"name": "arithmetic", "type": "arithmetic"},
        "metrics": [{"type": "score", "name": "mean score of 40 items", "value": pytest.approx(0.25)}],  # the second policy
    }
    assert "model-index" not in card(pedigree, "demo/sft")


def test_what_a_model_is_measured_on_is_no_data_set_of_it(demo):
    record = read_pedigree(demo.artifact("demo/conversations_raw")).record
    (source,) = [one for one in record.config["sources"] if one["type"] == "packaged"]
    record = record.model_copy(update={"config": {**record.config, "sources": [{**source, "type": "hub", "repo": "lab/rows"}]}})
    assert datasets_of([record]) == ["lab/rows"]
    assert datasets_of([record.model_copy(update={"type": "item"})]) == []


def test_an_unknown_standard_names_those_there_are(pedigree):
    with pytest.raises(UsageProblem, match="unknown --format 'prov'; choose from openlineage, slsa, card, croissant"):
        in_standard(pedigree, "prov", None)


# --- the page ----------------------------------------------------------------------------------------------------------


def test_the_page_shows_every_ancestor_and_loads_nothing(demo):
    pedigree = read_pedigree(demo.artifact("demo/rlvr"))
    page = lineage_page(pedigree)
    for found in pedigree.parents_first():
        assert page.count(f'title="{found.id}"') >= 1 and f'title="{found.record.content}"' in page
    assert "<svg" in page and not any(word in page for word in ("http://", "https://", "<script", "<link", "src="))


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for name, text in made(Path(folder)).items():
            (GOLDEN / name).write_text(text)
            print(name, len(text), file=sys.stderr)
