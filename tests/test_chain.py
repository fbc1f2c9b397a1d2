"""The whole chain on `tiny`, as a user types it: half by plain DVC, half by a Prefect flow, then again, damaged, and varied."""

import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import chaos as disturbing
import pytest
from chaos import chaos, disturbances
from projects import call, contents, fresh_project

from pedigree.data.records import records

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


@pytest.fixture(scope="session")
def project(tmp_path_factory) -> Path:
    """With one round of preferences; the wheel runs both at night."""
    root = fresh_project(tmp_path_factory.mktemp("project") / "clone")
    recipe = root / "configs/recipes/tiny.yaml"
    text = recipe.read_text()
    for two, one in (("rounds: 2", "rounds: 1"), ("dpo_1, dpo_2, rlvr", "dpo_1, rlvr"), ("sft, dpo_2, rlvr", "sft, dpo_1, rlvr")):
        assert text.count(two) == 1
        text = text.replace(two, one)
    recipe.write_text(text)
    return root


def started_jobs(project: Path) -> int:
    """Attempts of all jobs ever started, from the runs of the artifacts that exist."""
    runs = (project / "artifacts").glob("*/*/run.json")
    return sum(len(json.loads(path.read_text())["attempts"]) for path in runs)


@pytest.fixture(scope="session")
def chain(project: Path) -> dict[str, str]:
    """The first stages by `dvc repro`, the rest by `pedigree run`; the content of every artifact."""
    call(project, "pedigree", "compile", "tiny")
    call(project, "dvc", "repro", "artifacts/tiny/dvc.yaml:sft")
    built = set(contents(project))
    assert {"chat", "base", "sft"} <= built and "sample_0" not in built
    before = {path: path.stat().st_mtime_ns for path in (project / "artifacts" / "tiny").glob("*/record.json")}
    shown = call(project, "pedigree", "run", "tiny")
    assert all(path.stat().st_mtime_ns == stamp for path, stamp in before.items()), "a stage that DVC built was built again"
    assert "unseen_arithmetic" in shown and "arithmetic" in shown
    return contents(project)


def test_half_by_dvc_and_half_by_pedigree_is_one_clean_state(project, chain):
    assert "up to date" in call(project, "dvc", "status")
    assert "tiny:sft" in call(project, "dvc", "dag") or "sft" in call(project, "dvc", "dag", "artifacts/tiny/dvc.yaml")


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


def test_the_same_command_again_does_nothing(project, chain):
    jobs = started_jobs(project)
    shown = call(project, "pedigree", "run", "tiny")
    assert re.search(r"up to date", shown)
    assert started_jobs(project) == jobs and contents(project) == chain


def test_deleted_artifacts_come_back_from_the_cache(project, chain):
    jobs = started_jobs(project)
    for stage in ("best", "unseen"):
        shutil.rmtree(project / "artifacts/tiny" / stage)
    shown = call(project, "pedigree", "run", "tiny")
    assert "restored" in shown
    assert contents(project) == chain and started_jobs(project) == jobs


@pytest.mark.nightly
def test_without_the_cache_too_they_are_built_again_with_the_same_content(project, chain):
    for stage in ("dpo_1", "unseen"):
        shutil.rmtree(project / "artifacts/tiny" / stage)
    shutil.rmtree(project / ".dvc/cache")
    call(project, "pedigree", "run", "tiny")
    assert contents(project) == chain
    assert "up to date" in call(project, "dvc", "status")


def test_a_variant_trains_what_lies_below_the_change_and_shares_the_rest(project, chain):
    lock = (project / "artifacts/tiny/dvc.lock").read_bytes()
    call(project, "pedigree", "run", "tiny", "--set", "dpo_1.loss.beta=2.0", "--until", "dpo_1")
    (variant,) = (project / "artifacts").glob("tiny+*")
    assert [path.parent.name for path in variant.glob("*/record.json")] == ["dpo_1"]
    record = json.loads((variant / "dpo_1/record.json").read_text())
    assert record["config"]["loss"]["beta"] == 2.0 and record["content"] != chain["dpo_1"]
    assert (project / "artifacts/tiny/dvc.lock").read_bytes() == lock and contents(project) == chain


A_FEW = ["point: record.json written", "point: publish renamed", "point: lock replaced", "point: checkpoint renamed", "instant: everything"]


@pytest.mark.parametrize("planned", [A_FEW, pytest.param(disturbances(20, "sft"), marks=pytest.mark.nightly)], ids=["a few", "each once"])
def test_kills_at_named_points_and_random_instants_change_nothing(chain, tmp_path, monkeypatch, planned):
    """But for a kill after a chunk: chains that generate would cost minutes more. All of a few have room in one chain."""
    monkeypatch.setattr(disturbing, "LONGEST_S", 5.0 if planned is A_FEW else disturbing.LONGEST_S)
    said: list[str] = []
    tally = chaos(tmp_path, planned, seed=2, until="sft", quiet=chain, say=said.append)
    assert not tally.different, "\n".join(said)
    assert set(tally.left_out) <= {"change: full disk"}, "\n".join(said)  # which needs a file system of its own
    assert tally.kills + tally.left_out == Counter(planned), "\n".join(said)


def test_the_report_is_one_page_that_needs_nothing_else(project, chain):
    call(project, "pedigree", "report", "tiny")
    page = (project / "artifacts/tiny/report.html").read_text()
    for stage in chain:
        assert stage in page
    assert not re.search(r"""(?:src|href)=["']https?:""", page)


def test_an_exported_model_loads_and_carries_its_records(project, chain, tmp_path):
    call(project, "pedigree", "export", "tiny/rlvr", str(tmp_path / "model"))
    names = {path.name for path in (tmp_path / "model").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= names
    lineage = next((tmp_path / "model").rglob("lineage.json"))
    assert json.loads(lineage.read_text())["artifacts"]
    check = "import sys, transformers as t; m = t.AutoModelForCausalLM.from_pretrained(sys.argv[1]); print(m.num_parameters())"
    subprocess.run([sys.executable, "-c", check, str(tmp_path / "model")], check=True, capture_output=True)
