"""Commit a recipe's compiled files and `dvc.lock` to git, with ids and scores in the message."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pedigree.configs.base.problems import UsageProblem
from pedigree.configs.base.project import Project
from pedigree.configs.language.compile import params_file, pipeline_file, source_file
from pedigree.configs.language.graph import Graph, Node, shown_name
from pedigree.pipelines.ledger.git import git, in_repository, refused
from pedigree.pipelines.lineage.ancestry import opened
from pedigree.pipelines.lineage.waivers import in_words
from pedigree.pipelines.publish.shown_stages import scores_of, waived_in
from pedigree.pipelines.quantities import counted

UNDER_WAY = {
    "MERGE_HEAD": "merge",
    "CHERRY_PICK_HEAD": "cherry-pick",
    "REVERT_HEAD": "revert",
    "rebase-merge": "rebase",
    "rebase-apply": "rebase",
}
"""File in the git folder during an unfinished operation → name of the operation."""
LONGEST_TITLE = 100


@dataclass(frozen=True)
class Commit:
    """A created commit."""

    id: str
    title: str


def check_commit(project: Project) -> None:
    """Refuse before a run if git could not commit now."""
    if not in_repository(project.root):
        raise UsageProblem("--commit needs a git repository: run `git init`, or omit --commit")
    for name, what in UNDER_WAY.items():
        if (project.root / git(project, "rev-parse", "--git-path", name).stdout.strip()).exists():
            raise UsageProblem(f"--commit: a {what} is in progress: run `git {what} --continue` or `git {what} --abort`, then retry")
    unmerged = sorted({line.partition("\t")[2] for line in git(project, "ls-files", "--unmerged").stdout.splitlines()})
    if unmerged:
        raise UsageProblem(f"--commit: unmerged files: {', '.join(unmerged)}; resolve and `git add` them, then retry")
    for who in ("GIT_AUTHOR_IDENT", "GIT_COMMITTER_IDENT"):
        if git(project, "var", who).returncode:
            remedy = "`git config user.name NAME` and `git config user.email ADDRESS`"
            raise UsageProblem(f"--commit: git has no user name or email: run {remedy}, then retry")


def check_ledger(project: Project, graph: Graph) -> None:
    """Refuse before a run of a compiled recipe if git would not add a file that records its results, such as one that it ignores."""
    files = ledger_files(project, graph)
    locks = [Path(name).with_suffix(".lock").as_posix() for name in files if Path(name).name == "dvc.yaml"]
    why = refused(project, [*files, *locks])
    if why:
        raise UsageProblem(f"--commit: git would not add {with_reasons(why)}: remove the rule or link, or omit --commit")


def with_reasons(why: dict[str, str]) -> str:
    """Files that git would not add, with the reason after all that share it."""
    return "; ".join(f"{', '.join(name for name in why if why[name] == reason)} ({reason})" for reason in dict.fromkeys(why.values()))


def ledger_names(recipe: str) -> list[str]:
    """Paths, relative to the root, of the files that a run of a recipe writes for git."""
    pipeline = Path(pipeline_file(recipe))
    return [pipeline.as_posix(), pipeline.with_suffix(".lock").as_posix(), params_file(recipe), source_file(recipe)]


def _recipes(graph: Graph) -> list[str]:
    return list(dict.fromkeys([graph.recipe, *(node.recipe for node in graph.nodes.values())]))


def ledger_files(project: Project, graph: Graph) -> list[str]:
    """Paths, relative to the root, of the files that record a recipe's results, including those of other recipes it uses."""
    found = []
    for recipe in _recipes(graph):
        names = ledger_names(recipe)
        ignores = sorted([*project.recipe_folder(recipe).glob(".gitignore"), *project.recipe_folder(recipe).glob("*/.gitignore")])
        found += [*names, *(path.relative_to(project.root).as_posix() for path in ignores)]
    return [name for name in found if (project.root / name).exists()]


def uncommitted(project: Project, graph: Graph) -> list[str]:
    """Files of `ledger_files` with uncommitted changes, also those that git ignores; empty without git."""
    # --no-optional-locks keeps git from refreshing its index: read-only commands must not write
    look = ("--no-optional-locks", "status", "--porcelain=v1", "-z", "--untracked-files=no", "--no-renames")
    names = ledger_files(project, graph)
    answer = git(project, *look, "--", *names) if names else None
    if answer is None or answer.returncode:
        return []
    prefix = git(project, "rev-parse", "--show-prefix").stdout.strip()
    changed = {line[3:].removeprefix(prefix) for line in answer.stdout.split("\0")}
    new = _untracked(project, names)
    return [name for name in names if name in changed or name in new]


def _untracked(project: Project, names: Sequence[str]) -> list[str]:
    tracked = set(git(project, "ls-files", "-z", "--", *names).stdout.split("\0"))
    return [name for name in names if name not in tracked]


def commit(project: Project, graph: Graph, selection: Collection[str]) -> Commit | None:
    """Commit a recipe's `ledger_files` and no other changed or staged file, if any has changed; all selected stages must be current.

    Raises:
        UsageProblem: git or a hook refuses; the index is restored.
    """
    names = uncommitted(project, graph)
    if not names:
        return None
    text = message(project, graph, selection)
    new = _untracked(project, names)
    added = git(project, "add", "--intent-to-add", "--", *new) if new else None
    made = added
    if not (added and added.returncode):  # no timeout: hooks may be slow
        made = git(project, "commit", "--quiet", "--file=-", "--only", "--", *names, given=text, timeout_s=None)
    if made is None or made.returncode:
        if new:
            git(project, "update-index", "--force-remove", "--", *new)
        reason = (made.stderr or made.stdout).strip() if made else ""
        raise UsageProblem(f"all results are stored, but git did not commit {', '.join(names)}: {reason or 'no reason given'}")
    return Commit(git(project, "rev-parse", "HEAD").stdout.strip(), text.partition("\n")[0])


def message(project: Project, graph: Graph, selection: Collection[str]) -> str:
    """Commit message: title, one line per stage with kind and short id, then the scores."""
    nodes = [node for node in graph.nodes.values() if node.address in selection]
    scores, waived = scores_of(project, graph, selection), waived_in(project, graph, selection)
    count = f"{graph.recipe}: {counted(len(nodes), 'stage')}"
    title = ", ".join([count, *(_best(name, found["policies"]) for name, found in scores.items())])
    body = [_columns([(shown_name(graph, node), node.kind, _identifier(project, node)) for node in nodes])]
    for name, found in scores.items():
        rows = [
            (label, task, f"{score['mean']:.3f} [{score['low']:.3f}, {score['high']:.3f}]")
            for label, policy in found["policies"].items()
            for task, score in policy["tasks"].items()
        ]
        body.append("\n".join([name, _columns(rows), *map(in_words, waived.get(name, []))]))
    return "\n\n".join([title if len(title) <= LONGEST_TITLE else count, *body]) + "\n"


def _identifier(project: Project, node: Node) -> str:
    artifact = opened(project, node)
    return artifact.record.id[:12] if artifact else "(not here)"


def _best(name: str, policies: dict[str, Any]) -> str:
    label, policy = max(policies.items(), key=lambda entry: entry[1]["mean"])
    return f"best of {name} {label} {policy['mean']:.3f}"


def _columns(rows: list[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
