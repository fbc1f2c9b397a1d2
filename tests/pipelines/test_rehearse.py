"""Rehearsals as commands: apart from all that is real, the same after a kill, and said what they proved."""

import gzip
import json
import os
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from commands import InProcessCommand
from pyarrow import Table, parquet
from running_lab import Lab, running_scratch
from typer.testing import CliRunner
from waiting import until

from pedigree.configs.base.document import ConfigError
from pedigree.configs.base.problems import PedigreeError
from pedigree.configs.base.project import Project
from pedigree.configs.language.recipe import load_recipe
from pedigree.data.sources import row_files
from pedigree.pipelines.cli.main import app
from pedigree.pipelines.jobs.processes import kill_all
from pedigree.pipelines.rehearsal.preparing import create_project, not_only_sampled, prepare

pytestmark = pytest.mark.slow


class Rehearsed(InProcessCommand):
    """A lab and its rehearsal."""

    def __init__(self, folder: Path) -> None:
        super().__init__(Lab(folder, whole=True))
        self.environment |= {"PEDIGREE_PREFECT": "never", "PEDIGREE_CACHE": str(folder / "cache"), "COLUMNS": "200"}
        self.project = self.lab.project.rehearsal("lab")
        self.knobs()

    def knobs(self, **stages: dict[str, Any]) -> None:
        """Of the stages of the rehearsal, before it is there too."""
        self.project.root.mkdir(parents=True, exist_ok=True)
        (self.project.root / "knobs.json").write_text(json.dumps({f"lab/{name}": knobs for name, knobs in stages.items()}))

    def document(self, *arguments: str) -> dict[str, Any]:
        return json.loads(self.said(*arguments, "--json")[0])

    def contents(self) -> dict[str, str]:
        found = sorted(self.project.root.glob("artifacts/lab/*/record.json"))
        return {path.parent.name: json.loads(path.read_text())["content"] for path in found}

    def runs(self) -> list[str]:
        log = self.project.root / "runs.log"
        return [line.removeprefix("lab/") for line in log.read_text().split()] if log.exists() else []


def everything(folder: Path) -> dict[str, bytes]:
    """All files of a project but those of its rehearsals and of git."""
    left_out = {folder / ".git", folder / ".pedigree" / "rehearsals"}
    files = (path for path in folder.rglob("*") if path.is_file() and not left_out & set(path.parents))
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Rehearsed, dict[str, Any], dict[str, bytes]]:
    """(a rehearsal that nothing has disturbed, what it said, the real project before)."""
    lab = Rehearsed(tmp_path_factory.mktemp("rehearsed"))
    before = everything(lab.lab.root)
    return lab, lab.document("rehearse", "lab"), before


def test_nothing_of_a_rehearsal_is_in_the_real_project(rehearsed):
    lab, _, before = rehearsed
    assert everything(lab.lab.root) == before
    assert lab.lab.shell("git status --short").stdout == ""
    status = lab.document("status", "lab")
    assert {stage["state"] for stage in status["stages"]} == {"not_built"}
    assert not (lab.lab.root / "artifacts").exists() and not (lab.lab.root / ".dvc" / "cache").exists()


def test_it_says_what_ran_what_was_changed_and_what_that_leaves_unproved(rehearsed):
    lab, document, _ = rehearsed
    assert document["command"] == "rehearse" and document["recipe"] == "lab" and document["outcome"] == "done"
    assert {stage["outcome"] for stage in document["stages"]} == {"ran"} and len(document["stages"]) == 4
    assert document["project"] == str(lab.project.root) and document["profile"] == "lab"
    changes = {(change["where"], change["setting"]) for entry in document["proved"]["not_proved"] for change in entry["changes"]}
    assert ("lab/clean", "max_contaminated_share") not in changes  # 1.0 already
    assert any("scores of a rehearsal" in entry["what"] or "scores come out" in entry["what"] for entry in document["proved"]["not_proved"])


def test_its_folder_is_a_project_for_every_other_command(rehearsed):
    lab = rehearsed[0].lab
    there: Any = SimpleNamespace(root=rehearsed[0].project.root, code=lab.code, launcher=lab.launcher, environment=lab.environment)
    command = InProcessCommand(there)
    assert {line.split()[2] for line in command("status", "lab").splitlines()[1:5]} == {"done"}
    assert "up to date" in command("plan", "lab")


def test_the_second_time_there_is_nothing_to_do_until_code_changes(rehearsed):
    lab, _, _ = rehearsed
    before, contents = lab.runs(), lab.contents()
    assert "4 stages up to date" in lab("rehearse", "lab") and lab.runs() == before
    stage = lab.lab.code / "stages" / "decontaminate" / "run.py"
    stage.write_text(stage.read_text() + "\n\nCHANGED = True\n")
    lab("rehearse", "lab")
    assert sorted(lab.runs()[len(before) :]) == ["clean", "cleaner"] and lab.contents() == contents


@pytest.mark.parametrize("stage", ["clean", pytest.param("suite", marks=pytest.mark.nightly)])
def test_killed_anywhere_and_typed_again_it_ends_in_the_same_bytes(rehearsed, tmp_path, stage):
    quiet, _, _ = rehearsed
    lab = Rehearsed(tmp_path)
    lab.knobs(**{stage: {"seconds": 60}})
    process = lab.start("rehearse", "lab")

    scratch = until(lambda: running_scratch(lab.project, stage), 120)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    kill_all(scratch)
    lab.knobs()
    lab("rehearse", "lab")
    assert lab.contents() == quiet.contents()


def test_a_kill_while_it_is_prepared_is_harmless(tmp_path):
    project = Project(tmp_path / "p" / ".pedigree" / "rehearsals" / "cpu")
    create_project(project)
    (project.root / ".dvc" / "config").write_text("[co")  # as of a machine that went down
    create_project(project)
    assert "no_scm = true" in (project.root / ".dvc" / "config").read_text() and project.is_rehearsal
    assert Project.find(project.root) == project


def test_models_of_a_pool_are_told_from_those_that_are_trained_or_judge():
    recipes = Path(__file__).parents[2] / "configs" / "recipes"
    nodes = [node for name in ("tulu3_8b", "tulu3_8b_onpolicy") for node in load_recipe(recipes, name).nodes.values()]
    models = {node.address for node in nodes if node.kind == "source_model"}
    assert {address.partition("/")[2] for address in models - not_only_sampled(nodes)} == {
        "llama_3_8b", "llama_31_8b", "qwen_25_7b", "qwen_25_14b",
    }  # fmt: skip


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    root = tmp_path / "bare"
    for folder in ("configs/recipes", "configs/execution", ".dvc"):
        (root / folder).mkdir(parents=True)
    shutil.copy(Path(__file__).parents[2] / "configs" / "execution" / "cpu.yaml", root / "configs" / "execution" / "cpu.yaml")
    return root


@pytest.mark.parametrize(
    ("stage", "said"),
    [
        (
            "rows: {kind: prepare_data, record: prompt, sources: [{type: hub, repo: some/set, revision: pin me, split: train}]}",
            "stage rows: dataset some/set has no rehearsal rows",
        ),
        (
            "base: {kind: source_model, source: {type: hub, repo: some/model, revision: pin me}, chat_template: tulu}",
            "stage base: the model some/model has no description",
        ),
    ],
)
def test_what_has_no_stand_in_is_named_with_the_place_where_it_belongs(bare, monkeypatch, stage, said):
    (bare / "configs" / "recipes" / "open.yaml").write_text(f"execution: cpu\nstages:\n  {stage}\n")
    monkeypatch.chdir(bare)
    done = CliRunner().invoke(app, ["rehearse", "open"])
    assert isinstance(done.exception, PedigreeError) and done.exception.exit_code == 2
    assert said in str(done.exception) and str(bare / "configs" / "rehearsal") in str(done.exception)
    assert not (bare / ".pedigree").exists() and "PEDIGREE_HUB" not in os.environ


@pytest.mark.parametrize("kind", [".jsonl", ".jsonl.gz", ".json", ".parquet", "/"])
def test_files_of_the_project_are_cut_and_it_is_said(bare, monkeypatch, kind):
    """Whatever they are packed in; a damaged file beyond the first rows is left for the stage to say."""
    monkeypatch.setenv("PEDIGREE_CACHE", str(bare / "cache"))
    rows = [{"prompt": f"Question {number}?", "completion": "Yes."} for number in range(100)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    path = f"data/folder{kind}" if kind == "/" else f"data/rows{kind}"
    (bare / path if kind == "/" else bare / "data").mkdir(parents=True, exist_ok=True)
    match kind:
        case ".jsonl":
            (bare / path).write_text(lines)
        case ".jsonl.gz":
            (bare / path).write_bytes(gzip.compress(lines.encode()))
        case ".json":
            (bare / path).write_text(json.dumps(rows))
        case ".parquet":
            parquet.write_table(Table.from_pylist(rows), bare / path)
        case _:
            for name in ("more.jsonl", "rows.jsonl"):
                (bare / path / name).write_text(lines)
            (bare / path / "then.parquet").write_bytes(b"PAR1")
    source = f"{{type: files, path: {path.removesuffix('/')}, max_bad_rows: 0.5}}"
    stage = f"rows: {{kind: prepare_data, record: conversation, sources: [{source}]}}"
    (bare / "configs" / "recipes" / "filed.yaml").write_text(f"execution: cpu\nstages:\n  {stage}\n")
    made = prepare(Project(bare), "filed")
    cut = made.project.root / path
    assert [row for _, row in row_files.read(cut / "rows.jsonl" if kind == "/" else cut)] == rows[:16]
    assert kind != "/" or (cut / "then.parquet").read_bytes() == b"PAR1"
    (change,) = (change for change in made.changes if change.setting == "sources.0.path")
    assert (change.where, change.reason) == ("filed/rows", "data") and "the first 16 rows of data/" in change.rehearsed


def test_a_reward_function_is_taken_as_it_is(bare):
    shutil.copy(Path(__file__).parents[2] / "configs" / "recipes" / "tiny.yaml", bare / "configs" / "recipes" / "tiny.yaml")
    stages = "  rlvr: {reward: {terms: [{type: program, path: mine.py}, {type: overlong, buffer: 8}]}}\n"
    stages += "  judge_0: {programs: [{type: program, path: judging.py}]}\n  scores: {programs: [{type: program, path: judging.py}]}\n"
    (bare / "configs" / "recipes" / "mine.yaml").write_text(f"extends: tiny\nexecution: cpu\nstages:\n{stages}")
    (bare / "judging.py").write_text("def reward(completions):\n    return [1.0] * len(completions)\n")
    with pytest.raises(ConfigError, match=r"stage rlvr: mine.py does not exist: add it"):
        prepare(Project(bare), "mine")
    (bare / "mine.py").write_text("def reward(completions):\n    return [1.0] * len(completions)\n")
    made = prepare(Project(bare), "mine")
    for name in ("mine.py", "judging.py"):
        assert (made.project.root / name).read_bytes() == (bare / name).read_bytes()


def test_templates_and_rubrics_of_the_project_are_taken_as_they_are(bare):
    shutil.copy(Path(__file__).parents[2] / "configs" / "recipes" / "tiny.yaml", bare / "configs" / "recipes" / "tiny.yaml")
    by = "{type: endpoint, base_url: 'https://judge.example/v1', model: m}"
    stages = "  base: {chat_template: mine/house.jinja}\n"
    stages += f"  judge_0: {{rating: {{rubrics: [mine/brevity.yaml], by: {by}}}, rating_weight: 1.0}}\n"
    (bare / "configs" / "recipes" / "mine.yaml").write_text(f"extends: tiny\nexecution: cpu\nstages:\n{stages}")
    with pytest.raises(ConfigError, match=r"stage base: mine/house.jinja does not exist: add it"):
        prepare(Project(bare), "mine")
    (bare / "mine").mkdir()
    root = Path(__file__).parents[2] / "configs"
    shutil.copy(root / "templates" / "chatml.jinja", bare / "mine" / "house.jinja")
    shutil.copy(root / "rubrics" / "honesty.yaml", bare / "mine" / "brevity.yaml")
    made = prepare(Project(bare), "mine")
    for name in ("house.jinja", "brevity.yaml"):
        assert (made.project.root / "mine" / name).read_bytes() == (bare / "mine" / name).read_bytes()
    assert load_recipe(made.project.recipes, "mine").find("base").files == ("mine/house.jinja",)


def test_a_command_gets_all_of_its_files(bare):
    stage = "made: {kind: external, command: [sh, more/a.sh, '{output}'], files: [more, b.yaml], output: report, rehearse: [quick]}"
    (bare / "configs" / "recipes" / "made.yaml").write_text(f"execution: cpu\nstages:\n  {stage}\n")
    for name in ("more/a.sh", "b.yaml"):
        (bare / name).parent.mkdir(exist_ok=True)
        (bare / name).write_text("a: 1\n")
    made = prepare(Project(bare), "made")
    assert all((made.project.root / name).read_bytes() == (bare / name).read_bytes() for name in ("more/a.sh", "b.yaml"))
    assert load_recipe(made.project.recipes, "made").find("made").config.command[-1] == "quick"


def test_a_file_of_few_rows_is_taken_as_it_is_and_one_that_lacks_is_named(bare, monkeypatch):
    monkeypatch.setenv("PEDIGREE_CACHE", str(bare / "cache"))
    stage = "rows: {kind: prepare_data, record: conversation, sources: [{type: files, path: few.json}]}"
    (bare / "configs" / "recipes" / "few.yaml").write_text(f"execution: cpu\nstages:\n  {stage}\n")
    with pytest.raises(ConfigError, match=r"stage rows: few.json does not exist: add it"):
        prepare(Project(bare), "few")
    (bare / "few.json").write_text('[{"prompt":   "Yes?", "completion": "Yes."}]')
    made = prepare(Project(bare), "few")
    assert (made.project.root / "few.json").read_bytes() == (bare / "few.json").read_bytes()
    assert not any(change.setting.endswith("path") for change in made.changes)
