"""What a shell and a terminal get: version, completion, tables of texts that others wrote."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from projects import fresh_project
from rich.cells import cell_len
from typer._completion_classes import BashComplete
from typer.main import get_command

from pedigree.pipelines.cli.console import print_table
from pedigree.pipelines.cli.main import app

REPOSITORY = Path(__file__).resolve().parents[2]
MAIN = "import sys; sys.argv[0] = 'pedigree'; from pedigree.pipelines.cli.main import main\ntry: main()\nexcept SystemExit: pass\n"
LOADED = "import json; print(json.dumps(sorted({name.split('.')[0] for name in sys.modules})), file=sys.stderr)"
HEAVY = {"data", "stages", "torch", "transformers", "dvc", "prefect", "yaml", "numpy"}
"""Typer itself loads pydantic and rich to complete or to parse a command; nothing else may come on top."""


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    return fresh_project(tmp_path_factory.mktemp("shell") / "clone")


def called(folder: Path, *arguments: str, **variables: str) -> tuple[str, set[str]]:
    """What the command prints, and the modules that it has loaded."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), **variables}
    command = [sys.executable, "-c", MAIN + LOADED, *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True)
    return done.stdout, set(json.loads(done.stderr.splitlines()[-1]))


@pytest.fixture
def offered(project, monkeypatch):
    """What a shell is offered for a line whose last word is incomplete."""
    monkeypatch.chdir(project)
    shell = BashComplete(get_command(app), {}, "pedigree", "_PEDIGREE_COMPLETE")
    return lambda line: [one.value for one in shell.get_completions(line.split(" ")[1:-1], line.split(" ")[-1])]


def test_the_version_is_told_without_loading_anything(project):
    out, loaded = called(project, "--version")
    assert re.fullmatch(r"pedigree \S+(, commit [0-9a-f]{12})?, Python 3\.11\.\d+\n", out)
    assert not loaded & (HEAVY | {"pydantic", "rich"})


def test_a_shell_is_offered_names_and_loads_nothing_for_them(project):
    variables = {"_PEDIGREE_COMPLETE": "complete_bash", "COMP_WORDS": "pedigree run tiny --only sf", "COMP_CWORD": "4"}
    out, loaded = called(project, **variables)
    assert out.split() == ["sft"] and not loaded & HEAVY


def test_names_are_completed_from_folders_alone(offered):
    assert offered("pedigree run ti") == ["tiny"] and offered("pedigree plan de") == ["demo"]
    assert offered("pedigree show tiny rl") == offered("pedigree run tiny --force sft --until rl") == ["rlvr"]
    assert offered("pedigree run tiny --execution gp") == ["gpu", "gpu8"]
    assert offered("pedigree scr") == ["scratch"]
    assert offered("pedigree run nothing --only s") == []


def test_what_has_been_made_is_completed_too(project, offered):
    (project / "artifacts" / "tiny+0badf00d" / "sft").mkdir(parents=True, exist_ok=True)
    (project / "artifacts" / "tiny+0badf00d" / "source.json").write_text("{}")
    (project / "artifacts" / "tiny+0badf00d" / "params.yaml").write_text("# Compiled\nsft:\n  kind: sft\ndpo_2:\n  kind: x\n")
    (project / "artifacts" / "tiny+0badf00d" / "sft" / "record.json").write_text("{}")
    assert offered("pedigree variants --remove tiny") == ["tiny+0badf00d"]
    assert offered("pedigree plan tiny") == ["tiny"]
    (project / "artifacts" / "tiny").mkdir()
    (project / "artifacts" / "tiny+0badf00d" / "params.yaml").rename(project / "artifacts" / "tiny" / "params.yaml")
    assert offered("pedigree show tiny dpo") == ["dpo_2"]  # rounds are known once it is compiled
    assert offered("pedigree lineage tiny+") == ["tiny+0badf00d/sft"]


def test_tables_show_markup_and_control_characters_and_obey_neither(capsys):
    texts = ("[red]x[/red]", "[link=file:///etc]y[/link]", "\x1b[2J\x1b]0;title\x07z", "a\nb", "[/]")
    print_table(("[bold]stage", "b", "c", "d", "e"), [texts])
    out = capsys.readouterr().out
    assert "\x1b" not in out and "\x07" not in out and out.count("\n") == 2
    for shown in ("[bold]stage", "[red]x[/red]", "[link=file:///etc]y[/link]", r"\u001b[2J\u001b]0;title\u0007z", r"a\nb", "[/]"):
        assert shown in out


MADE = [
    ("start", "demo/base", "current", "0123456789ab", "", ""),
    ("the-end-of-a-longer-name", "a_long_recipe_of_somebody/train_further_2", "no recipe", "ba9876543210",
     "arithmetic_held_out 0.412, gsm8k 0.233 (waiver), minerva_math 0.051, popqa 0.100", "v1.0.0, v1.9.0, v1.10.0"),
    ("名前のあるモデル", "demo/rlvr_1", "stale", "aaaaaaaaaaaa", "gsm8k 0.5", "v2.0.0"),
]  # fmt: skip
NAMES = ("model", "artifact", "state", "id", "scores", "versions")


@pytest.mark.parametrize("width", [60, 80, 100, 200, 300])
def test_a_table_of_models_has_a_line_for_each_that_fits_the_terminal_and_ids_in_one_piece(width, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    print_table(NAMES, MADE, whole=("model", "id"))
    lines = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out).splitlines()
    assert len(lines) == 1 + len(MADE) and max(cell_len(line.rstrip()) for line in lines) <= width
    for line, row in zip(lines[1:], MADE, strict=True):
        assert line.startswith(row[0]) and row[3] in line
        assert all(cell in line for cell in row) if width >= 200 else "…" in line or row is not MADE[1]


@pytest.mark.parametrize("colored", [False, True])
def test_a_table_of_models_in_a_pipe_is_cut_nowhere(colored, monkeypatch, capsys):
    if colored:  # as CI does
        monkeypatch.setenv("FORCE_COLOR", "1")
    print_table(NAMES, MADE, whole=("model", "id"))
    out = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out)
    for line, row in zip(out.splitlines()[1:], MADE, strict=True):
        assert [cell for cell in re.split(r" {2,}", line.rstrip()) if cell] == [cell for cell in row if cell]


def test_every_command_that_takes_an_execution_profile_takes_it_by_both_names():
    commands = get_command(app).commands  # pyright: ignore[reportAttributeAccessIssue]
    options = {name: {text for option in command.params for text in option.opts} for name, command in commands.items()}
    takers = {name for name, texts in options.items() if texts & {"--execution", "--profile"}}
    assert {"plan", "run", "rehearse", "deploy", "serve"} <= takers
    assert all(options[name] >= {"--execution", "--profile"} for name in takers), takers
