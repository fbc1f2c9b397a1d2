"""Rows that lie outside the project: known by content, and in the remote for those who lack them."""

import hashlib
import json
import os
import shutil
import subprocess
import textwrap
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from handmade import exported
from running_lab import STAGE, Lab, outcomes, read

from pedigree.configs.base.document import ConfigError
from pedigree.data.artifacts.artifacts import ADOPTED, ArtifactError, open_artifact, sha256_path
from pedigree.data.artifacts.source_files import KnownHashes, sha256_of
from pedigree.data.store.hashing import silent
from pedigree.pipelines.jobs.context import RunContext
from pedigree.pipelines.ledger import raw_inputs
from pedigree.pipelines.ledger.ledger import Ledger
from pedigree.pipelines.ledger.transfers import RemoteError
from pedigree.pipelines.reproduce.reproduction import _Attempt
from pedigree.pipelines.run.checks import refuse_what_must_fail
from pedigree.pipelines.run.ensure import Result
from pedigree.pipelines.run.exchange import pull_inputs, push, push_inputs
from pedigree.pipelines.run.runs import run_graph

RECIPE = """
execution: lab
stages:
  suite: {kind: prepare_data, record: item, task: a, sources: [{type: arithmetic, operations: [add], digits: [1], count: 3, seed: 1}]}
  raw: {kind: prepare_data, record: conversation, sources: [{type: files, path: PLACE}]}
  clean: {kind: decontaminate, in: {data: raw, benchmarks: [suite]}}
"""
DONE = {"suite": "unchanged", "raw": "unchanged", "clean": "unchanged"}


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A disk of others."""
    folder = tmp_path / "shared"
    folder.mkdir()
    (folder / "rows.jsonl").write_text("one\ntwo\n")
    return folder


def at(lab: Lab, place: object) -> Lab:
    lab.write("configs/recipes/lab.yaml", RECIPE.replace("PLACE", str(place)))
    return lab


def failure(run: RunContext) -> str:
    return " ".join(str(end) for end in run_graph(run) if not isinstance(end, Result))


def with_remote(lab: Lab) -> Lab:
    lab.edit(".dvc/config", "[core]\n", "[core]\n    remote = store\n")
    lab.write(".dvc/config", (lab.root / ".dvc/config").read_text() + f"['remote \"store\"']\n    url = {lab.root.parent}/store\n")
    return lab


def cloned(lab: Lab) -> Lab:
    lab.shell("git add -A && git -c user.name=l -c user.email=l@example.org commit -qm made")
    clone = object.__new__(Lab)
    clone.code, clone.root, clone.environment = lab.code, lab.root.with_name("clone"), lab.environment
    subprocess.run(["git", "clone", "-q", lab.root, clone.root], check=True)
    (clone.root / ".dvc/config.local").write_text(f"[core]\n    site_cache_dir = {clone.root}-site\n")
    clone.forget_runs()
    return clone


def test_rows_anywhere_are_known_by_content_alone(lab: Lab, shared: Path) -> None:
    assert outcomes(at(lab, shared / "rows.jsonl")) == dict.fromkeys(DONE, "ran")
    assert outcomes(lab) == DONE
    other = shutil.copytree(shared, shared.with_name("moved"))
    assert outcomes(at(lab, os.path.relpath(other / "rows.jsonl", lab.root))) == DONE
    (lab.root / "data").mkdir(exist_ok=True)
    (other / "rows.jsonl").write_text("three\n")
    assert outcomes(lab) == {"suite": "unchanged", "raw": "ran", "clean": "ran"}
    parts = [path for path in (lab.root / "artifacts").rglob("*") if path.is_file()]
    assert len(parts) > 10 and [path for path in parts if str(shared.parent).encode() in path.read_bytes()] == []


def test_a_link_in_the_project_is_what_it_leads_to(lab: Lab, shared: Path) -> None:
    (lab.root / "data").mkdir(exist_ok=True)
    (lab.root / "data/rows.jsonl").symlink_to(shared / "rows.jsonl")
    assert outcomes(at(lab, "data/rows.jsonl"))["raw"] == "ran"
    (lab.root / "data/rows.jsonl").unlink()
    shutil.copyfile(shared / "rows.jsonl", lab.root / "data/rows.jsonl")
    assert outcomes(lab) == DONE


def test_rows_that_are_nowhere_are_named_with_what_is_wanted(lab: Lab, shared: Path) -> None:
    assert outcomes(at(lab, shared / "rows.jsonl"))["raw"] == "ran"
    shutil.rmtree(shared)
    assert outcomes(lab) == DONE, "what was made from them is still what the recipe says"
    lab.edit("configs/recipes/lab.yaml", "record: conversation,", "record: conversation, seed: 3,")
    told = failure(lab.run())
    assert f"{shared}/rows.jsonl with sha256 " in told and "push RECIPE --inputs" in told
    assert f"{shared}/other.jsonl does not exist" in failure(at(lab, shared / "other.jsonl").run())


def test_a_template_of_the_project_is_identity_by_its_content(lab: Lab, shared: Path) -> None:
    llama = "{type: random_llama, layers: 1, hidden: 8, heads: 2, kv_heads: 2, ffn: 8, vocabulary: 300, context: 64, seed: 1}"
    template = "configs/templates/house.jinja"
    lab.write(template, "{{ messages }}")
    model = f"  model: {{kind: source_model, in: {{corpus: [raw]}}, source: {llama}, chat_template: {template}}}\n"
    at(lab, shared / "rows.jsonl").write("configs/recipes/lab.yaml", (lab.root / "configs/recipes/lab.yaml").read_text() + model)
    assert outcomes(lab)["model"] == "ran"
    record = read(lab, "model", "record.json")
    assert record["source_files"] == {template: hashlib.sha256(b"{{ messages }}").hexdigest()}
    assert record["config"]["chat_template"] == template and outcomes(lab)["model"] == "unchanged"
    lab.write(template, "{{ messages[0] }}")
    assert outcomes(lab)["model"] == "ran" and read(lab, "model", "record.json")["key"] != record["key"]


def test_two_files_of_one_name_in_a_stage_are_refused(lab: Lab, shared: Path) -> None:
    other = shutil.copytree(shared, shared.with_name("other"))
    at(lab, f"{shared}/rows.jsonl}}, {{type: files, path: {other}/rows.jsonl")
    with pytest.raises(Exception, match=r"two sources outside the project are named rows\.jsonl"):
        lab.run()


def test_a_clone_rebuilds_from_the_remote_alone(lab: Lab, shared: Path) -> None:
    assert outcomes(at(with_remote(lab), shared / "rows.jsonl"))["raw"] == "ran"
    push(lab.run())
    clone = cloned(lab)
    assert push_inputs(lab.run()).moved == 1 and push_inputs(lab.run()) == push_inputs(lab.run())
    shutil.rmtree(shared)
    assert set(outcomes(clone).values()) == {"remote"}
    (left,) = pull_inputs(clone.run(), clone.run().graph.nodes, fetch=False).left
    assert f"{shared}/rows.jsonl with sha256" in left
    clone.edit("configs/recipes/lab.yaml", "record: conversation,", "record: conversation, seed: 3,")
    assert outcomes(clone) == {"suite": "remote", "raw": "ran", "clean": "remote"}
    assert (clone.root / "outside/rows.jsonl").read_text() == "one\ntwo\n"
    assert "outside" not in clone.shell("git status --short").stdout
    assert push_inputs(clone.run()).left == ()


def test_a_folder_travels_as_it_is_and_damage_there_is_told(finished: Lab, shared: Path) -> None:
    (shared / "more").mkdir()
    (shared / "more/rows.jsonl").write_text("three\n")
    (shared / "link.jsonl").symlink_to("more/rows.jsonl")
    lab, target, hashed = with_remote(finished), finished.root / "outside/shared", KnownHashes().files(shared)
    with closing(Ledger(lab.project)) as ledger:
        assert raw_inputs.send(lab.project, ledger.remote, shared, hashed, silent) == 3  # two different files and their list
        assert raw_inputs.fetch(lab.project, ledger.remote, sha256_of(hashed), target)
        assert sha256_path(target) == sha256_of(hashed) and not (target / "link.jsonl").is_symlink()
        assert not raw_inputs.fetch(lab.project, ledger.remote, "0" * 64, target.with_name("none"))
        store = lab.root.parent / "store/pedigree/inputs"
        for name, damage in ((hashed["link.jsonl"].sha256, "other"), (f"{sha256_of(hashed)}.json", '{"../../evil": "%s"}' % ("0" * 64))):
            good = (store / name).read_text()
            (store / name).write_text(damage)
            with pytest.raises((RemoteError, ArtifactError), match=r"damaged in the remote|not a valid|path inside|normalized"):
                raw_inputs.fetch(lab.project, ledger.remote, sha256_of(hashed), target.with_name("again"))
            (store / name).write_text(good)
        assert sorted(path.name for path in target.parent.iterdir()) == ["shared"]
        (shared / "rows.jsonl").write_text("changed while it is sent\n")
        (store / hashed["rows.jsonl"].sha256).unlink()
        with pytest.raises(RemoteError, match="changed while it was sent"):
            raw_inputs.send(lab.project, ledger.remote, shared, hashed, silent)
        assert [path.name for path in store.iterdir() if "." in path.name.removesuffix(".json")] == []


def test_changed_rows_are_not_sent_as_the_recorded_ones(lab: Lab, shared: Path) -> None:
    assert outcomes(at(with_remote(lab), shared / "rows.jsonl"))["raw"] == "ran"
    (shared / "rows.jsonl").write_text("five\n")
    sent = push_inputs(lab.run())
    assert sent.moved == 0 and "has changed since lab/raw was made" in sent.left[0]
    assert json.loads((lab.root / "artifacts/lab/raw/record.json").read_text())["source_files"].keys() == {"outside/rows.jsonl"}


def test_reproduction_finds_them_by_content_where_the_own_recipe_or_the_remote_has_them(lab: Lab, shared: Path) -> None:
    place, member, target = shared / "rows.jsonl", SimpleNamespace(address="lab/raw"), lab.root / "found"
    at(with_remote(lab), place)
    wanted = sha256_path(place)
    with closing(Ledger(lab.project)) as ledger:
        attempt: Any = _Attempt(lab.project, cast(Any, None), cast(Any, None), lab.root / "work", ledger, print)
        assert attempt._bring_source(member, "outside/rows.jsonl", wanted, target) and target.read_bytes() == place.read_bytes()
        target.unlink()
        assert not attempt._bring_source(member, "outside/rows.jsonl", "0" * 64, target)
        raw_inputs.send(lab.project, ledger.remote, place, KnownHashes().files(place), silent)
        place.unlink()
        assert attempt._bring_source(member, "outside/rows.jsonl", wanted, target) and sha256_path(target) == wanted


ADOPTING = """
execution: lab
stages:
  base: {kind: source_model, source: {type: folder, path: PLACE}}
"""
IMPORT = STAGE + textwrap.dedent("""
    def run(config, inputs, job):
        from pedigree.data.artifacts.exports import checked_records
        from pedigree.data.artifacts.source_files import KnownHashes
        given = job.source_files[config.source.path]
        (job.evidence / "adopted-from/pedigree").mkdir(parents=True)
        for name, data in checked_records(given, KnownHashes().files(given)).items():
            (job.evidence / "adopted-from/pedigree" / name).write_bytes(data)
        return work_model(job, 1.0)
    """)


def test_a_run_publishes_the_lineage_of_an_export_and_finds_it_again_under_another_name(lab: Lab, tmp_path: Path) -> None:
    (lab.code / "stages/source_model/run.py").write_text(IMPORT)
    lab.write("configs/recipes/lab.yaml", ADOPTING.replace("PLACE", str(exported(tmp_path))))
    assert outcomes(lab) == {"base": "ran"} and outcomes(lab) == {"base": "unchanged"}
    record = open_artifact(lab.root / "artifacts/lab/base").record
    assert [(given.port, given.label) for given in record.inputs] == [(ADOPTED, "sft")]
    lab.edit("configs/recipes/lab.yaml", "base:", "policy:")
    assert outcomes(lab) == {"policy": "restored"}
    assert open_artifact(lab.root / "artifacts/lab/policy").record.inputs == record.inputs


def test_a_place_outside_the_project_is_no_missing_file_to_plan_and_run(lab: Lab, shared: Path) -> None:
    (shared / "rows.jsonl").write_text('{"prompt": "one", "completion": "two"}\n')
    refuse_what_must_fail(at(lab, shared / "rows.jsonl").run(), ["lab/raw"])
    assert outcomes(lab) == dict.fromkeys(DONE, "ran")
    (shared / "rows.jsonl").unlink()
    refuse_what_must_fail(lab.run(), ["lab/raw"])  # its hash is recorded, so it may come from the remote
    with pytest.raises(ConfigError, match=f"{shared}/gone does not exist: add it, or change the config that names it"):
        refuse_what_must_fail(at(lab, shared / "gone").run(), ["lab/raw"])


def test_a_pipe_and_a_circle_of_links_are_refused_before_they_are_read(lab: Lab, shared: Path) -> None:
    """A plan waited for the pipe without end, and called the circle a bug."""
    pipe, circle = shared / "pipe.jsonl", shared / "circle"
    os.mkfifo(pipe)
    circle.mkdir()
    (circle / "one").symlink_to(circle / "two")
    (circle / "two").symlink_to(circle / "one")
    for place, says in ((pipe, "is neither a file nor a folder"), (circle, "is a link that leads nowhere")):
        run = at(lab, place).run()
        with closing(run.ledger), pytest.raises(ArtifactError, match=says):
            run.ledger.dependencies(run.graph.nodes["lab/raw"])
