"""The ledger in git: `run --commit` commits what holds the recipe's results, nothing else, or says why it cannot."""

import os
from pathlib import Path

import pytest
from commands import InProcessCommand
from handmade import made_at, project_at
from running_lab import Lab

from pedigree.configs.base.problems import UsageProblem
from pedigree.pipelines.ledger.git import git
from pedigree.pipelines.publish.commits import check_commit, ledger_files, message

LEDGER = {"artifacts/lab/dvc.yaml", "artifacts/lab/dvc.lock", "artifacts/lab/params.yaml"}


@pytest.fixture
def made(finished: Lab) -> Lab:
    """Its recipe has been run, and not committed, by somebody whom git knows."""
    finished.shell("git config user.name Somebody && git config user.email somebody@example.org && echo runs.log >> .git/info/exclude")
    return finished


@pytest.fixture
def pedigree(made: Lab) -> InProcessCommand:
    command = InProcessCommand(made)
    command.environment["GIT_CONFIG_GLOBAL"] = os.devnull
    return command


def files_of(lab: Lab) -> set[str]:
    return set(lab.shell("git show --format= --name-only HEAD").stdout.split())


def head(lab: Lab) -> str:
    return lab.shell("git rev-parse HEAD").stdout


def test_a_finished_recipe_becomes_one_commit_of_its_ledger_and_of_nothing_else(made: Lab, pedigree: InProcessCommand) -> None:
    said = pedigree("status", "lab")
    assert all(name in said for name in LEDGER) and "pedigree run lab --commit" in said
    made.write("notes.txt", "staged by somebody")
    made.shell("git add notes.txt && git checkout -q --detach")
    made.edit("configs/execution/lab.yaml", "slots: 2", "slots: 3")
    said = pedigree("run", "lab", "--commit")
    assert "committed" in said and "lab: 4 stages" in said
    assert files_of(made) == LEDGER and "Not committed" not in pedigree("status", "lab")
    after = made.shell("git status --porcelain").stdout
    assert set(after.splitlines()) == {"A  notes.txt", " M configs/execution/lab.yaml"}
    title, body = made.shell("git log -1 --format=%B").stdout.split("\n\n", 1)
    assert title == "lab: 4 stages"
    rows = [line.split() for line in body.strip().splitlines()]
    assert [(name, kind) for name, kind, _ in rows] == [
        ("suite", "prepare_data"), ("raw", "prepare_data"), ("clean", "decontaminate"), ("cleaner", "decontaminate"),
    ]  # fmt: skip
    assert pedigree("lineage", rows[-1][2]).startswith("lab/cleaner ")
    commit = head(made)
    assert "nothing to commit" in pedigree("run", "lab", "--commit") and head(made) == commit


def test_a_variant_is_committed_with_what_it_shares(made: Lab, pedigree: InProcessCommand) -> None:
    pedigree("run", "lab", "--commit", "--set", "cleaner.ngram=7")
    (variant,) = {name.split("/")[1] for name in files_of(made)} - {"lab"}
    names = {f"artifacts/{variant}/{name}" for name in ("dvc.yaml", "dvc.lock", "params.yaml", "source.json")}
    assert files_of(made) == LEDGER | names
    assert made.shell("git log -1 --format=%s").stdout.strip() == f"{variant}: 4 stages"


def test_a_failed_stage_means_no_commit(made: Lab, pedigree: InProcessCommand) -> None:
    made.knobs(cleaner={"fail": "no"})
    commit = head(made)
    said = pedigree("run", "lab", "--commit", "--force", "cleaner", code=1)
    assert "not committed" in said and head(made) == commit


def test_a_hook_that_refuses_leaves_the_index_as_it_was(made: Lab, pedigree: InProcessCommand) -> None:
    hook = made.root / ".git/hooks/pre-commit"
    hook.write_text("#!/bin/sh\necho only on weekdays >&2\nexit 1\n")
    hook.chmod(0o755)
    before, commit = made.shell("git status --porcelain").stdout, head(made)
    said = pedigree("run", "lab", "--commit", code=2)
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
def test_what_would_stop_the_commit_is_said_before_anything_runs(made: Lab, pedigree: InProcessCommand, why: str) -> None:
    made.shell(REFUSALS[why])
    made.forget_runs()
    said = pedigree("run", "lab", "--commit", "--force", "cleaner", code=2)
    assert why in said and made.runs() == []


IGNORED = {
    "artifacts/lab/dvc.lock (.gitignore:1: *.lock)": "echo '*.lock' > .gitignore",
    "artifacts/lab/dvc.yaml, artifacts/lab/params.yaml, artifacts/lab/dvc.lock (.git/info/exclude:1: artifacts/)": (
        "echo artifacts/ > .git/info/exclude"
    ),
    "is beyond a symbolic link": "mv artifacts ../elsewhere && ln -s ../elsewhere artifacts",
}


@pytest.mark.parametrize("why", IGNORED)
def test_results_that_git_would_not_add_are_refused_before_anything_runs(made: Lab, pedigree: InProcessCommand, why: str) -> None:
    for name in LEDGER:
        (made.root / name).unlink()  # as before the first run
    made.shell(IGNORED[why])
    made.forget_runs()
    commit = head(made)
    said = pedigree("run", "lab", "--commit", code=2)
    assert why in said and "remove the rule or link, or omit --commit" in said
    assert made.runs() == [] and head(made) == commit


def test_status_lists_results_that_git_ignores_and_a_file_added_by_force_is_committed(made: Lab, pedigree: InProcessCommand) -> None:
    made.shell("echo '*.lock' > .gitignore && git add -f artifacts/lab/dvc.lock && git commit -qm forced && echo artifacts > .gitignore")
    said = pedigree("status", "lab")
    assert "Not committed to git: artifacts/lab/dvc.yaml, artifacts/lab/params.yaml." in said
    made.shell("echo '*.lock' > .gitignore && echo '# changed' >> artifacts/lab/dvc.lock")
    pedigree("run", "lab", "--commit")
    assert files_of(made) == LEDGER and "Not committed" not in pedigree("status", "lab")


def test_a_message_gives_the_scores_with_their_intervals(tmp_path: Path) -> None:
    project, graph = made_at(tmp_path)
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
