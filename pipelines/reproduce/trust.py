"""Decide whether a model was made by this project; the code of other models runs only with the user's consent.

A model is the project's own if one `dvc.lock`, current or in the history of its branches and tags, lists the hashes of all three record
files. An id is not sufficient, since the code and its patch are recorded in `run.json`, which no id covers. The run cache is not
evidence either, since its entries may come from the remote.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

from pedigree.configs.base.problems import UsageProblem
from pedigree.configs.base.project import Project
from pedigree.configs.base.texts import shown
from pedigree.data.artifacts.provenance import CODE_ROOT
from pedigree.pipelines.ledger.git import git, is_work_tree, run_git
from pedigree.pipelines.ledger.ledger import Ledger
from pedigree.pipelines.ledger.lock_files import Recorded, recorded, recorded_at
from pedigree.pipelines.ledger.transfers import LedgerError
from pedigree.pipelines.quantities import counted
from pedigree.pipelines.reproduce.rebuild import RebuiltStage
from pedigree.pipelines.reproduce.work_tree import RecordedCode, has, obstacle

MOST_COMMITS = 50
"""Maximum commits whose `dvc.lock` files are searched."""
REFUSED = (
    "this project did not make it, and the session is not interactive: review what it would run with --dry-run --show-patch, "
    "then use --trust to run it (--here runs the current code instead)"
)


def is_own(ledger: Ledger, records: Mapping[str, str]) -> bool:
    """Whether this project made an artifact; `records`: record.json, run.json, and lineage.json → md5 of the bytes read."""
    for entries in chain([recorded(ledger.project)], _history(ledger.project, records["run.json"])):
        parts: dict[str, dict[str, str]] = {}
        for entry in entries:
            parts.setdefault(entry.address, {})[entry.part] = entry.md5
        if any(records.items() <= known.items() for known in parts.values()):
            return True
    return False


def review(members: Sequence[RebuiltStage], *, here: bool, show_patch: bool) -> str:
    """Describe what would run: code, patches, stages, and their sources. Terminal control sequences are escaped."""
    lines = ["this project did not make it: its records are not in dvc.lock, neither now nor in the history of branches and tags."]
    codes: dict[RecordedCode, list[RebuiltStage]] = {}
    for member in members:
        codes.setdefault(member.code, []).append(member)
    if here:
        lines.append("code: the current one (--here)")
    for code, made in () if here else codes.items():
        lines += ["", f"code {code.commit or code} ({_whose(code)}), runs {', '.join(member.address for member in made)}"]
        lines += _patch_lines(code, show_patch)
    lines += ["", "commands: `pedigree compile` and `pedigree run` with that code, on a recipe with these stages:"]
    for member in members:
        numerics = ", ".join(f"{name} {value}" for name, value in member.run.numerics.items() if name in ("device", "world_size"))
        lines.append(f"  {member.address}: {member.record.kind}{f' ({numerics})' if numerics else ''}")
        lines += [f"    reads {what}" for what in dict.fromkeys(_reads(member.record.config))]
        files = member.record.source_files.items()
        lines += [f"    reads the project file {name} if its sha256 is {sha256[:12]}" for name, sha256 in files]
    return shown("\n".join(lines))


def _history(project: Project, md5: str) -> Iterator[list[Recorded]]:
    """Contents of `dvc.lock` files around the commits that added or removed this md5, newest first."""
    form = ("--format=%H", "--no-ext-diff", "--no-textconv", f"-S{md5}")
    places = ("--", "dvc.lock", ":(glob)artifacts/*/dvc.lock")
    for commit in git(project, "log", *form, "--branches", "--tags", "HEAD", *places).stdout.split()[:MOST_COMMITS]:
        for revision in (commit, f"{commit}^"):
            with suppress(LedgerError):  # no parent commit, or a damaged file
                yield recorded_at(project, revision)


def _whose(code: RecordedCode) -> str:
    if code.commit is None or not is_work_tree(CODE_ROOT):
        return "not available" if obstacle(code) else "the current code"
    return "a commit of this clone" if has(code.commit) else "not in this clone; would be fetched from a git remote or the DVC remote"


def _patch_lines(code: RecordedCode, whole: bool) -> list[str]:
    """Changed files and line counts of a patch according to git; `whole` adds its text."""
    if code.patch is None:
        return ["  no patch"] if code.patch_sha256 is None else ["  a patch that was not stored"]
    top = Path(CODE_ROOT.anchor)  # below the top of a repository, git would leave out files outside the folder
    answer = run_git(top, "apply", "--numstat", "-", given=code.patch.encode())
    if answer.returncode:
        raise UsageProblem(f"git cannot read the patch of {code}: use --here, which ignores it, or request a valid copy")
    counts = [line.split("\t", 2) for line in answer.stdout.decode(errors="replace").splitlines()]
    lines = [f"  patch of {counted(len(counts), 'file')}", *(f"    {name} +{new} -{old}" for new, old, name in counts)]
    return lines + ([f"    | {line}" for line in code.patch.splitlines()] if whole else ["    show its text with --dry-run --show-patch"])


def _reads(config: Any) -> Iterator[str]:
    """External sources in a config."""
    if isinstance(config, Mapping):
        kind = config.get("type")
        if kind == "hub":
            yield f"{config.get('repo')} from the Hugging Face hub at {config.get('revision')}"
        elif kind == "program":
            where = "WITHOUT A SANDBOX, with your permissions" if config.get("trusted") else "in a sandbox"
            yield f"the output of {config.get('function')} in {config.get('path')}, run {where}"
        elif isinstance(config.get("command"), list):
            yield f"the output of the command `{' '.join(map(str, config['command']))}`, run WITHOUT A SANDBOX, with your permissions"
        elif "url" in config:
            yield f"{config['url']} with your credentials, if its sha256 is {str(config.get('sha256'))[:12]}"
        for inner in config.values():
            yield from _reads(inner)
    elif isinstance(config, list | tuple):
        for inner in config:
            yield from _reads(inner)
