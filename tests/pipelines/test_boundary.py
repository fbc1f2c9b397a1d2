"""Where the command ends: wrong usage is one clean message with exit code 2, a bug of ours is never taken for it."""

import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from projects import fresh_project

from pedigree.configs.base.problems import PedigreeError, UsageProblem
from pedigree.pipelines.cli import main as cli


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    root = fresh_project(tmp_path_factory.mktemp("boundary") / "clone")
    recipes = root / "configs" / "recipes"
    (recipes / "binary.yaml").write_bytes(b"\xff\xfe\x00description: x")
    (recipes / "deep.yaml").write_text("stages: " + "[" * 5000 + "]" * 5000)
    (recipes / "notamap.yaml").write_text("- 1\n")
    return root


@pytest.fixture
def project(clone, monkeypatch) -> Iterator[Path]:
    monkeypatch.chdir(clone)
    monkeypatch.setenv("COLUMNS", "160")
    yield clone
    shutil.rmtree(clone / ".pedigree" / "bugs", ignore_errors=True)


def typed(monkeypatch, *arguments: str) -> int:
    """Exit code of the command in this process."""
    monkeypatch.setattr(sys, "argv", ["pedigree", *arguments])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert isinstance(end.value.code, int)
    return end.value.code


# --- bugs --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [KeyError("sft"), FileNotFoundError(2, "gone", "x")])
def test_a_bug_is_called_one_and_its_traceback_is_kept(project, monkeypatch, capsys, error):
    def broken(*_):
        raise error

    monkeypatch.setattr("pedigree.configs.language.recipe_files.recipe_names", broken)
    assert typed(monkeypatch, "recipes") == 70
    out, err = capsys.readouterr()
    assert out == "" and "Traceback" not in err
    assert "This is a bug in Pedigree" in err and type(error).__name__ in err
    (kept,) = (project / ".pedigree" / "bugs").iterdir()
    assert f".pedigree/bugs/{kept.name}" in err
    text = kept.read_text()
    assert "Traceback" in text and "in broken" in text and "pedigree recipes" in text and "Python 3.11" in text


def test_a_bug_outside_a_project_is_kept_too(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)

    def broken(*_):
        raise ZeroDivisionError

    monkeypatch.setattr("pedigree.configs.base.project.Project.find", broken)
    assert typed(monkeypatch, "recipes") == 70
    (kept,) = tmp_path.glob("pedigree-bug-*")
    assert str(kept) in capsys.readouterr().err and "ZeroDivisionError" in kept.read_text()


def test_only_our_own_errors_become_a_clean_message_of_which_no_terminal_obeys_anything(monkeypatch, project, capsys):
    class Refused(UsageProblem):
        pass

    def refusing(*_):
        raise Refused("one\x1b[2J\nand two\x07")

    monkeypatch.setattr("pedigree.configs.language.recipe_files.recipe_names", refusing)
    assert typed(monkeypatch, "recipes") == 2
    assert capsys.readouterr() == ("", "one\\u001b[2J\nand two\\u0007\n")
    assert not (project / ".pedigree" / "bugs").exists()


def test_every_error_that_people_meet_carries_its_exit_code():
    from pedigree.configs.base.document import ConfigError
    from pedigree.data.artifacts.artifacts import ArtifactError
    from pedigree.pipelines.jobs.context import StageFailed
    from pedigree.pipelines.ledger.transfers import LedgerError, RemoteError

    wrong = (ConfigError, UsageProblem)
    failed = (ArtifactError, LedgerError, RemoteError, StageFailed)
    assert [kind.exit_code for kind in wrong] == [2] * len(wrong) and [kind.exit_code for kind in failed] == [1] * len(failed)
    assert all(issubclass(kind, PedigreeError) for kind in (*wrong, *failed))


# --- wrong usage -------------------------------------------------------------------------------------------------------

WRONG = [
    "run lob", "run tiny --only nothing", "run tiny --from nothing", "run tiny --until nothing", "run tiny --force nothing",
    "run tiny --execution nowhere", "run tiny --execution /nowhere.yaml", "run tiny --dry-run --commit",
    "run tiny --only sft --force rlvr", "run tiny --require-checkpoint nothing", "run tiny --only sft --require-checkpoint rlvr",
    "run tiny --set x", "run tiny --set x=1", "run tiny --set sft.nothing=1", "run tiny --set sft.global_batch=[", "run tiny --set =",
    "run tiny --set .=1", "run tiny --set sft.=1", "run tiny --set sft..x=1", "run tiny --set online.rounds=x", "run tiny --set online.x=1",
    "run configs/recipes", "run configs/recipes/none.yaml", "run binary", "run deep", "run notamap", "plan ../tiny", "plan /",
    "plan tiny --set sft.global_batch=7 --execution gpu8", "plan", "status lob", "status ''", "report lob", "compile lob", "push lob",
    "pull lob", "logs nothing", "logs ../../x", "cancel nothing", "lineage nothing", "lineage ''", "lineage tiny/sft --format x",
    "lineage tiny/../../x", "lineage @", "lineage x@y", "diff a b", "export nothing out", "export tiny/sft README.md", "verify nothing",
    "verify tiny/nothing", "reproduce nothing", "reproduce tiny/sft --only x", "reproduce . --dry-run", "gc --workspace --nothing",
    "validate lob", "validate", "show lob", "show tiny nothing", "show tiny --set x", "variants lob", "variants --remove nothing",
    "variants --remove tiny", "variants --remove ../x", "scratch nothing", "scratch sft/12345678 --clean", "nonsense", "run tiny --reshard",
    "run tiny --prefect always", "run " + "a" * 300, "validate " + "a" * 300 + ".yaml",
    "run tiny --prefect sometimes", "run tiny --on-code-change x",
]  # fmt: skip


@pytest.mark.parametrize("line", WRONG)
def test_wrong_usage_is_no_bug_and_says_what_to_do(project, monkeypatch, capsys, line):
    code = typed(monkeypatch, *(word.strip("'") for word in line.split()))
    _, err = capsys.readouterr()
    assert code in (1, 2), err
    assert err.strip() and "Traceback" not in err and not re.search(r"\b(KeyError|ValueError|NoneType)\b", err)
    assert not (project / ".pedigree" / "bugs").exists()


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("sft.epochs=.nan", "it has a number that is not finite"),
        ("sft.epochs=1e400", "it has a number that is not finite"),
        ("sft.optimizer.learning_rate=-.inf", "it has a number that is not finite"),
        ("sft.optimizer={learning_rate: [.nan]}", "it has a number that is not finite"),
        ("sft.epochs=!!binary aGk=", "the tag tag:yaml.org,2002:binary is not known: remove it"),
        ("sft.epochs={a: 1, 2: 3}", "key is '2', not a string: quote it"),
        ("sft.epochs=&a [*a]", "alias refers to its own anchor"),
        ("sft.epochs=&a {b: *a}", "alias refers to its own anchor"),
    ],
)
def test_a_value_that_no_recipe_can_hold_is_refused_before_anything_is_hashed(project, monkeypatch, capsys, override, said):
    assert typed(monkeypatch, "plan", "tiny", "--set", override) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"--set: {override!r}: ") and said in err


def test_outside_a_project_a_message_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert typed(monkeypatch, "plan", "x") == 2
    said = capsys.readouterr().err
    assert said.startswith("no Pedigree project at or above") and "`pedigree init`" in said
