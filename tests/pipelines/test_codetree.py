"""The code that made an artifact: kept as commit and patch, and checked out again."""

import subprocess
from pathlib import Path

import pytest

from pedigree.configs.base.problems import UsageProblem
from pedigree.data.artifacts.artifacts import Run
from pedigree.data.artifacts.lineage import text_sha256
from pedigree.data.artifacts.provenance import code_files, code_sha256
from pedigree.pipelines.ledger.git import git_environment
from pedigree.pipelines.lineage import git_state
from pedigree.pipelines.lineage.git_state import code_state
from pedigree.pipelines.lineage.inheritance import split_run
from pedigree.pipelines.reproduce.work_tree import RecordedCode, bundle, check_out, has, remove


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=lab", "-c", "user.email=lab@example.org")
    environment = git_environment()
    done = subprocess.run(["git", *identity, *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path) -> Path:
    root = tmp_path / "repository"
    root.mkdir()
    git(root, "init", "-q")
    for name, text in {"a.py": "one\ntwo\n", "gone.py": "x\n", "dvc.lock": "{}\n", ".gitignore": "*.tmp\n"}.items():
        (root / name).write_text(text)
    git(root, "add", "-A")
    git(root, "commit", "-qm", "first")
    return root


def code(root: Path, *, new_files: bool = True) -> RecordedCode:
    """As it comes out of the records of an artifact."""
    run, patches = split_run({"attempts": [{"code": code_state(root, new_files=new_files)}]})
    return RecordedCode.of(Run.model_validate(run), patches)


def nowhere(name: str, target: Path) -> bool:
    return False


def test_a_clean_tree_needs_no_patch_and_generated_files_do_not_count(repository):
    (repository / "dvc.lock").write_text("{stages: {}}\n")
    (repository / "ignored.tmp").write_text("x")
    assert code_state(repository) == {"commit": git(repository, "rev-parse", "HEAD"), "dirty": False, "patch_sha256": None}


def test_a_changed_tree_comes_back_byte_for_byte(repository, tmp_path):
    git(repository, "config", "diff.noprefix", "true")
    (repository / "a.py").write_text("one\nzwei ü   \r\n")
    (repository / "gone.py").unlink()
    (repository / "new folder").mkdir()
    (repository / "new folder" / "b.bin").write_bytes(bytes(range(256)))
    (repository / "no_newline.py").write_text("end")
    recorded = code(repository)
    tree = check_out(recorded, tmp_path / "tree", nowhere, repository)
    assert (tree / "a.py").read_bytes() == (repository / "a.py").read_bytes()
    assert (tree / "new folder" / "b.bin").read_bytes() == bytes(range(256))
    assert (tree / "no_newline.py").read_text() == "end" and not (tree / "gone.py").exists()
    assert code_state(tree, new_files=True)["patch_sha256"] == recorded.patch_sha256 == text_sha256(str(recorded.patch))
    (tree / "a.py").write_text("another")  # somebody was in it: it is made afresh
    check_out(recorded, tree, nowhere, repository)
    assert (tree / "a.py").read_bytes() == (repository / "a.py").read_bytes()
    remove(tree, repository)
    assert not tree.exists() and git(repository, "worktree", "list").count("\n") == 0


def test_a_patch_that_is_not_the_recorded_one_is_refused(repository, tmp_path):
    (repository / "a.py").write_text("one\nthree\n")
    recorded = code(repository)
    forged = RecordedCode(recorded.commit, recorded.patch_sha256, str(recorded.patch).replace("+three", "+seven"))
    with pytest.raises(UsageProblem, match=f"differs from the recorded {str(recorded.patch_sha256)[:12]}"):
        check_out(forged, tmp_path / "tree", nowhere, repository)
    assert not (tmp_path / "tree").exists()


def test_new_files_are_counted_and_neither_named_nor_kept_unless_asked(repository, tmp_path):
    (repository / "diary.txt").write_text("of the author\n")
    (repository / "notes.md").write_text("dear diary\n")
    state = code_state(repository)
    assert state == {"commit": git(repository, "rev-parse", "HEAD"), "dirty": False, "patch_sha256": None, "new_files": 2}
    assert str(code(repository, new_files=False)).endswith("without 2 unrecorded new files")
    (repository / "a.py").write_text("one\n")
    state = code_state(repository)
    assert "diary" not in str(state) and "notes" not in str(state) and state["dirty"] and state["new_files"] == 2
    tree = check_out(code(repository, new_files=False), tmp_path / "tree", nowhere, repository)
    assert (tree / "a.py").read_text() == "one\n" and not (tree / "diary.txt").exists()
    asked = code_state(repository, new_files=True)
    assert "+dear diary" in asked["patch"] and "new_files" not in asked and asked["patch_sha256"] != state["patch_sha256"]


def test_a_password_in_a_file_of_settings_stays_out_of_the_patch(repository):
    (repository / ".env").write_text("PREFECT_PORT=4200\nPREFECT_DB_PASSWORD=correct-horse-9\n")
    state = code_state(repository, new_files=True)
    assert "correct-horse" not in str(state) and "a password or key in a file of settings" in state["patch_left_out"]
    (repository / ".env").write_text("export PREFECT_SERVER_API_AUTH_STRING='admin:correct-horse'\n")
    assert "correct-horse" not in str(code_state(repository, new_files=True))
    (repository / ".env").write_text("PREFECT_DB_PASSWORD=${OF_THE_DATABASE}\nPAD_TOKEN=<|endoftext|>\nSSH_KEY=/keys/of/somebody\n")
    assert "+PAD_TOKEN" in code_state(repository, new_files=True)["patch"]


def test_equal_trees_have_equal_patches_under_any_settings_of_git(repository):
    (repository / "a.py").write_text("\n".join(map(str, range(30))) + "\n")
    git(repository, "commit", "-qam", "long")
    (repository / "a.py").write_text("\n".join(str(number) for number in range(30) if number % 9) + "\n")
    before = code_state(repository)["patch_sha256"]
    order = repository / "order.tmp"
    order.write_text("*.txt\n")
    settings = {"context": "9", "algorithm": "patience", "indentHeuristic": "false", "relative": "true", "noprefix": "true",
                "interHunkContext": "7", "orderFile": str(order), "mnemonicPrefix": "true"}  # fmt: skip
    for name, value in settings.items():
        git(repository, "config", f"diff.{name}", value)
    git(repository, "config", "core.quotePath", "false")
    assert code_state(repository)["patch_sha256"] == before


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"x" * (git_state.PATCH_LIMIT + 1), "more than 1048576"),
        (b"key = 'AKIA" + b"A1B2" * 4 + b"'\n", "AWS"),
        (b"caf\xe9\n", "UTF-8"),
    ],
    ids=["large", "secret", "bytes"],
)
def test_a_patch_that_is_too_large_or_secret_or_no_text_is_left_out_and_says_why(repository, tmp_path, content, why):
    (repository / "b.py").write_bytes(content)
    git(repository, "add", "-N", "b.py")
    state = code_state(repository)
    assert why in state["patch_left_out"] and "patch" not in state and state["patch_sha256"] is None and state["dirty"]
    with pytest.raises(UsageProblem, match="--here"):
        check_out(code(repository), tmp_path / "tree", nowhere, repository)


def test_a_commit_comes_from_the_git_remote_or_a_bundle_or_is_missing_with_a_remedy(repository, tmp_path):
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "-q", "--no-local", str(repository), str(clone))
    (repository / "a.py").write_text("second\n")
    git(repository, "commit", "-qam", "second")
    second = code(repository)
    assert (check_out(second, tmp_path / "second", nowhere, clone) / "a.py").read_text() == "second\n"

    (repository / "a.py").write_text("third\n")
    git(repository, "commit", "-qam", "third")
    third = code(repository)
    git(clone, "remote", "remove", "origin")
    with pytest.raises(UsageProblem, match="pedigree push"):
        check_out(third, tmp_path / "third", nowhere, clone)

    def fetch(name: str, target: Path) -> bool:
        assert name == f"pedigree/code/{third.commit}.bundle"
        with bundle(str(third.commit), repository) as file:
            assert file is not None
            target.write_bytes(file.read_bytes())
        return True

    assert (check_out(third, tmp_path / "third", fetch, clone) / "a.py").read_text() == "third\n"


@pytest.fixture
def package(repository) -> Path:
    """`site-packages` in the repository of a user."""
    site = repository / ".venv" / "site-packages"
    for name in ("pedigree/__init__.py", "pedigree/stages/__init__.py", "pedigree-0.2.0.dist-info/METADATA"):
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text("Name: pedigree\nVersion: 0.2.0\n" if name.endswith("METADATA") else "")
    return site


def test_the_repository_of_a_user_is_not_that_of_the_installed_code(repository, package):
    (repository / "a.py").write_text("changed\n")
    assert code_state(package) == {"commit": None, "dirty": False, "patch_sha256": None, "version": "0.2.0"}
    assert has(git(repository, "rev-parse", "HEAD"), repository) and not has(git(repository, "rev-parse", "HEAD"), package)


def test_installed_code_runs_what_it_made_and_what_a_clone_with_the_same_files_made(package, tmp_path):
    snapshot = code_sha256(code_files(package))
    for made in (RecordedCode(None, snapshot=snapshot, version="0.2.0"), RecordedCode("c" * 40, snapshot=snapshot)):
        assert check_out(made, tmp_path / "tree", nowhere, package) == package
    for other, said in (
        (RecordedCode(None, snapshot="0" * 64, version="0.1.9"), "made by pedigree 0.1.9, whose files differ .*: install that version, or"),
        (RecordedCode("c" * 40, snapshot="0" * 64), "made at cccccccccccc, not by this installed package: reproduce it in a clone"),
        (RecordedCode(None), "the record has no commit"),
    ):
        with pytest.raises(UsageProblem, match=said):
            check_out(other, tmp_path / "tree", nowhere, package)


def test_installed_code_with_the_recorded_kinds_is_the_recorded_code_or_refused(repository, package, tmp_path, monkeypatch):
    """Below the repository of a user, where `git apply` leaves out what is not in the current folder, with success."""
    kind = tmp_path / "kinds" / "mine" / "kind.py"
    kind.parent.mkdir(parents=True)
    kind.write_text("KIND = 1\n")
    monkeypatch.setenv("PEDIGREE_STAGES", str(kind.parents[1]))
    monkeypatch.setattr("pedigree.data.artifacts.provenance.CODE_ROOT", package)
    state = code_state(package) | {"snapshot": code_sha256(code_files(package))}
    monkeypatch.delenv("PEDIGREE_STAGES")
    run, patches = split_run({"attempts": [{"code": state}]})
    recorded = RecordedCode.of(Run.model_validate(run), patches)
    tree = check_out(recorded, repository / ".pedigree" / "tree", nowhere, package)
    assert (tree / "pedigree/stages/mine/kind.py").read_text() == "KIND = 1\n" and not (tree / ".git").exists()
    (package / "pedigree" / "stages" / "__init__.py").write_text("changed = True\n")
    with pytest.raises(UsageProblem, match=r"made by pedigree 0\.2\.0, whose files differ"):
        check_out(recorded, tree, nowhere, package)
    assert not tree.exists()
