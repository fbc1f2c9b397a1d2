"""The ledger in git: `run --commit` commits what holds the recipe's results, nothing else, or says why it cannot."""

from pathlib import Path

import pytest
from handmade import everything, project_at
from reproduction_lab import Clone

from pedigree.configs.base.problems import UsageProblem
from pedigree.pipelines.ledger.git import git
from pedigree.pipelines.publish.commits import check_commit, ledger_files, message

LEDGER = {"artifacts/lab/dvc.yaml", "artifacts/lab/dvc.lock", "artifacts/lab/params.yaml"}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Clone:
    """A clone whose recipe has been run, and not committed."""
    clone = Clone.first(tmp_path_factory.mktemp("git"))
    clone.pedigree("run", "lab")
    return clone


@pytest.fixture
def made(finished: Clone, tmp_path: Path) -> Clone:
    """A copy of it, by somebody whom git knows."""
    clone = finished.another("made" + tmp_path.name)
    clone.shell(f"cp -r {finished.root}/artifacts . && cp -r {finished.root}/.dvc/cache .dvc/")
    clone.shell("git config user.name Somebody && git config user.email somebody@example.org")
    return clone


def files_of(clone: Clone, revision: str = "HEAD") -> set[str]:
    return set(clone.shell(f"git show --format= --name-only {revision}").stdout.split())


def head(clone: Clone) -> str:
    return clone.shell("git rev-parse HEAD").stdout


def test_a_finished_recipe_becomes_one_commit_of_its_ledger_and_of_nothing_else(made: Clone) -> None:
    made.write("notes.txt", "staged by somebody")
    made.shell("git add notes.txt")
    made.edit("configs/execution/lab.yaml", "slots: 2", "slots: 3")
    before = made.shell("git status --porcelain").stdout
    said = made.pedigree("run", "lab", "--commit")
    assert "committed" in said and "lab: 4 stages" in said
    assert files_of(made) == LEDGER
    after = made.shell("git status --porcelain").stdout
    assert (
        set(after.splitlines())
        == {line for line in before.splitlines() if "artifacts" not in line}
        == {
            "A  notes.txt",
            " M configs/execution/lab.yaml",
        }
    )
    title, body = made.shell("git log -1 --format=%B").stdout.split("\n\n", 1)
    assert title == "lab: 4 stages"
    rows = [line.split() for line in body.strip().splitlines()]
    assert [(name, kind) for name, kind, _ in rows] == [
        ("suite", "prepare_data"), ("raw", "prepare_data"), ("clean", "decontaminate"), ("cleaner", "decontaminate"),
    ]  # fmt: skip
    assert made.pedigree("lineage", rows[-1][2]).startswith("lab/cleaner ")
    commit = head(made)
    assert "nothing to commit" in made.pedigree("run", "lab", "--commit") and head(made) == commit


def test_a_variant_is_committed_with_what_it_shares(made: Clone) -> None:
    made.pedigree("run", "lab", "--commit", "--set", "cleaner.ngram=7")
    (variant,) = {name.split("/")[1] for name in files_of(made)} - {"lab"}
    names = {f"artifacts/{variant}/{name}" for name in ("dvc.yaml", "dvc.lock", "params.yaml", "source.json")}
    assert files_of(made) == LEDGER | names
    assert made.shell("git log -1 --format=%s").stdout.strip() == f"{variant}: 4 stages"


def test_a_failed_stage_means_no_commit(made: Clone) -> None:
    made.edit("stages/decontaminate/run.py", "rows = ", 'raise RuntimeError("no")\n    rows = ')
    commit = head(made)
    said = made.pedigree("run", "lab", "--commit", "--force", "cleaner", code=1)
    assert "not committed" in said and head(made) == commit


def test_a_hook_that_refuses_leaves_the_index_as_it_was(made: Clone) -> None:
    hook = made.root / ".git/hooks/pre-commit"
    hook.write_text("#!/bin/sh\necho only on weekdays >&2\nexit 1\n")
    hook.chmod(0o755)
    before, commit = made.shell("git status --porcelain").stdout, head(made)
    said = made.pedigree("run", "lab", "--commit", code=2)
    assert "only on weekdays" in said and "results are stored" in said
    assert made.shell("git status --porcelain").stdout == before and head(made) == commit


REFUSALS = {
    "git has no user name or email": "git config user.useConfigOnly true && git config --unset user.name && git config --unset user.email",
    "a merge is in progress": "git rev-parse HEAD > .git/MERGE_HEAD",
    "a rebase is in progress": "mkdir .git/rebase-merge",
    "unmerged files: configs/recipes/lab.yaml": "B=$(git rev-parse :configs/recipes/lab.yaml) && "
    'for s in 1 2 3; do printf "100644 $B $s\\tconfigs/recipes/lab.yaml\\n"; done | '
    "(git rm -q --cached configs/recipes/lab.yaml && git update-index --index-info)",
    "needs a git repository": "rm -rf .git",
}


@pytest.mark.parametrize("why", REFUSALS)
def test_what_would_stop_the_commit_is_said_before_anything_runs(made: Clone, why: str) -> None:
    made.shell(REFUSALS[why])
    made.ran()
    said = made.pedigree("run", "lab", "--commit", "--force", "cleaner", code=2)
    assert why in said and made.ran() == []


def test_a_detached_head_is_no_obstacle(made: Clone) -> None:
    made.shell("git checkout -q --detach")
    made.pedigree("run", "lab", "--commit")
    assert files_of(made) == LEDGER


def test_status_names_what_is_not_committed_and_how_to_commit_it(made: Clone) -> None:
    said = made.pedigree("status", "lab")
    assert all(name in said for name in LEDGER) and "pedigree run lab --commit" in said
    made.pedigree("run", "lab", "--commit")
    assert "Not committed" not in made.pedigree("status", "lab")


def test_a_message_gives_the_scores_with_their_intervals(tmp_path: Path) -> None:
    project = project_at(tmp_path)
    graph = everything(project)
    text = message(project, graph, graph.nodes.keys())
    title = text.partition("\n")[0]
    scores = [node for node in graph.nodes.values() if node.kind == "evaluate"]
    last = [edge.label for edge in scores[0].edges if edge.port == "policies"][-1]
    count = sum(edge.port == "policies" for edge in scores[0].edges)
    # handmade scores rise by 0.15 from 0.1 per policy; the interval is [mean - 0.05, mean + 0.1]
    best = 0.1 + 0.15 * (count - 1)
    assert title.startswith(f"tiny: {len(graph.nodes)} stages, best of {scores[0].name} {last} {best:.3f}")
    assert [*f"{last} arithmetic {best:.3f} [{best - 0.05:.3f}, {best + 0.1:.3f}]".split()] in [line.split() for line in text.splitlines()]
    alone = message(project, graph, {"tiny/sft"})
    assert alone.startswith("tiny: 1 stage\n") and "best" not in alone and len(alone.strip().splitlines()) == 3


def test_the_ledger_of_a_recipe_is_that_of_those_it_shares_stages_with(tmp_path: Path) -> None:
    from pedigree.configs.language.compile import write_compiled
    from pedigree.configs.language.recipe import load_recipes

    project = project_at(tmp_path)
    (project.recipes / "longer.yaml").write_text("description: more\nextends: tiny\nstages: {rlvr: {steps: 5}}\n")
    graphs = load_recipes(project.recipes, "longer")
    write_compiled(project.root, graphs)
    names = {name.rpartition("/")[0] for name in ledger_files(project, graphs[-1])}
    assert names == {"artifacts/longer", "artifacts/tiny"}


def test_without_git_there_is_no_commit(tmp_path: Path) -> None:
    project = project_at(tmp_path)
    assert git(project, "rev-parse", "--git-dir").returncode
    with pytest.raises(UsageProblem, match="git init"):
        check_commit(project)
