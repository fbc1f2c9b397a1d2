"""The whole chain on `tiny`, as a user types it: begun by plain DVC, finished by `pedigree run`, then damaged and killed."""

import json
import re
import shutil
from collections import Counter
from pathlib import Path

import chaos as disturbing
import pytest
from chaos import chaos, disturbances
from projects import call, contents, fresh_project

from pedigree.configs.base.document import read_document
from pedigree.configs.base.project import Project
from pedigree.configs.language.compile import yaml_text
from pedigree.data.records import records
from pedigree.pipelines.publish.export import export

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


@pytest.fixture(scope="session")
def project(tmp_path_factory) -> Path:
    """Without what starts another engine: a round's samples of its own and a second evaluation. The wheel runs all of `tiny` at night."""
    root = fresh_project(tmp_path_factory.mktemp("project") / "clone")
    path = root / "configs/recipes/tiny.yaml"
    recipe = read_document(path).value
    stages = recipe["stages"]
    judge, pair, dpo = (stages["online"]["stages"][name] for name in ("judge", "pair", "dpo"))
    del stages["online"], stages["unseen"]
    stages["judge_1"] = judge | {"in": {"completions": "sample_0", "reward_models": ["reward"]}}
    stages["pair_1"] = pair | {"in": {"judgments": "judge_1"}}
    stages["dpo_1"] = dpo | {"in": {"policy": "sft", "preferences": ["pair_1"], "reference": "sft"}}
    stages["rlvr"]["in"]["policy"] = "dpo_1"
    stages["scores"]["in"]["policies"] = stages["best"]["in"]["candidates"] = ["sft", "rlvr"]
    path.write_text(yaml_text(recipe))
    return root


def started_jobs(project: Path) -> int:
    """Attempts of all jobs ever started, from the runs of the artifacts that exist."""
    runs = (project / "artifacts").glob("*/*/run.json")
    return sum(len(json.loads(path.read_text())["attempts"]) for path in runs)


@pytest.fixture(scope="session")
def chain(project: Path) -> dict[str, str]:
    """The first stages by `dvc repro`, the rest by `pedigree run`; the content of every artifact."""
    call(project, "pedigree", "compile", "tiny")
    call(project, "dvc", "repro", "artifacts/tiny/dvc.yaml:chat_raw")
    assert contents(project).keys() == {"arithmetic_suite", "chat_raw"}
    before = {path: path.stat().st_mtime_ns for path in (project / "artifacts" / "tiny").glob("*/record.json")}
    assert "best" in call(project, "pedigree", "run", "tiny")
    assert all(path.stat().st_mtime_ns == stamp for path, stamp in before.items()), "a stage that DVC built was built again"
    return contents(project)


def test_half_by_dvc_and_half_by_pedigree_is_one_clean_state(project, chain):
    assert "up to date" in call(project, "dvc", "status")


def test_dvc_shows_the_graph_and_the_metrics(project, chain):
    file = "artifacts/tiny/dvc.yaml"
    graph = call(project, "dvc", "dag", "--dot", file)
    assert {stage for stage in chain if f"{file}:{stage}" in graph} == chain.keys()
    for command in ("show", "diff"):
        assert "artifacts/tiny/scores/evidence/metrics.json" in call(project, "dvc", "metrics", command, "--json")


def test_the_leaks_that_were_planted_are_gone(project, chain):
    def leaks(stage):
        return [row for row in records.stream(project / f"artifacts/tiny/{stage}/payload") if row["source"].startswith("leak")]

    assert leaks("chat_raw") and not leaks("chat")


def test_the_rows_are_read_as_the_docs_say(project, chain, tmp_path, monkeypatch):
    page = (Path(__file__).parents[1] / "docs" / "data.md").read_text()
    (example,) = [code for code in re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL) if "load_dataset" in code]
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    shown = call(project, "python", "-c", f"{example}\nprint(len(rows), rows.column_names)")
    rows = len(list(records.stream(project / "artifacts/tiny/chat_raw/payload")))
    assert f"{rows} ['id', 'source', 'messages', 'template_arguments']" in shown


def test_every_stage_has_its_whole_ancestry(project, chain):
    lineage = json.loads((project / "artifacts/tiny/rlvr/lineage.json").read_text())
    kinds = {entry["record"]["kind"] for entry in lineage["artifacts"].values()}
    assert {"prepare_data", "decontaminate", "source_model", "sft", "sample", "judge", "pair", "reward_model", "preference_train"} <= kinds


def test_every_model_that_takes_part_has_the_template_that_the_chain_began_with(project, chain):
    records = [json.loads((project / f"artifacts/tiny/{stage}/record.json").read_text()) for stage in chain]
    named = {record["kind"]: record["metrics"]["chat_templates"] for record in records if "chat_templates" in record["metrics"]}
    base = json.loads((project / "artifacts/tiny/base/record.json").read_text())["metrics"]["chat_template_sha256"]
    assert {sha256 for templates in named.values() for sha256 in templates.values()} == {base}
    assert {"source_model", "sft", "sample", "judge", "reward_model", "preference_train", "rlvr", "evaluate", "select"} <= named.keys()
    assert named["preference_train"].keys() == {"policy/sft", "reference/sft", "out"}


def test_deleted_artifacts_come_back_from_the_cache(project, chain):
    jobs = started_jobs(project)
    for stage in ("best", "scores"):
        shutil.rmtree(project / "artifacts/tiny" / stage)
    shown = call(project, "pedigree", "run", "tiny")
    assert "restored" in shown
    assert contents(project) == chain and started_jobs(project) == jobs


@pytest.mark.nightly
def test_without_the_cache_too_they_are_built_again_with_the_same_content(project, chain):
    for stage in ("dpo_1", "scores"):
        shutil.rmtree(project / "artifacts/tiny" / stage)
    shutil.rmtree(project / ".dvc/cache")
    call(project, "pedigree", "run", "tiny")
    assert contents(project) == chain
    assert "up to date" in call(project, "dvc", "status")


A_FEW = ["point: checkpoint renamed", "instant: everything"]


@pytest.mark.parametrize("planned", [A_FEW, pytest.param(disturbances(20, "sft"), marks=pytest.mark.nightly)], ids=["a few", "each once"])
def test_kills_at_named_points_and_random_instants_change_nothing(chain, tmp_path, monkeypatch, planned):
    """A few: of a job between two states, and of everything; `test_running` kills runners at the points that they come by."""
    monkeypatch.setattr(disturbing, "LONGEST_S", 5.0 if planned is A_FEW else disturbing.LONGEST_S)
    said: list[str] = []
    tally = chaos(tmp_path, planned, seed=2, until="sft", quiet=chain, say=said.append)
    assert not tally.different, "\n".join(said)
    assert set(tally.left_out) <= {"change: full disk"}, "\n".join(said)  # which needs a file system of its own
    assert tally.kills + tally.left_out == Counter(planned), "\n".join(said)


def test_the_report_of_a_run_is_one_page_that_needs_nothing_else(project, chain):
    page = (project / "artifacts/tiny/report.html").read_text()
    for stage in chain:
        assert stage in page
    assert not re.search(r"""(?:src|href)=["']https?:""", page)


def test_an_exported_model_loads_and_carries_its_records(project, chain, tmp_path):
    from transformers import AutoModelForCausalLM

    export(Project(project).artifact("tiny/rlvr"), "tiny/rlvr", tmp_path / "model")
    names = {path.name for path in (tmp_path / "model").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= names
    lineage = next((tmp_path / "model").rglob("lineage.json"))
    assert json.loads(lineage.read_text())["artifacts"]
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model").num_parameters() > 1e6
