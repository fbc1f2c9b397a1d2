"""Whose model is this? One that this project did not make runs only what its user has seen and allowed.

A model is this project's own when one `dvc.lock`, in place or in the history of its branches and tags, names all three of its record
files by their hashes; an id alone proves nothing, for the code and its patch stand in `run.json`, outside of every id. The run cache
proves nothing either: what lies there may have come from the remote.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from configs.base.project import Project
from configs.base.texts import shown
from data.artifacts.provenance import CODE_ROOT
from pipelines.ledger.git import git, run_git
from pipelines.ledger.ledger import Ledger, Recorded
from pipelines.ledger.store import LedgerError
from pipelines.reproduce.rebuild import RebuiltStage, ReproduceError
from pipelines.reproduce.work_tree import RecordedCode, has

MOST_COMMITS = 50
"""Commits whose `dvc.lock` files are looked at."""
REFUSED = (
    "this project did not make it, and nobody is here to ask: look at what it would run with --dry-run --show-patch; --trust runs it. "
    "(--here runs the code of this clone, on the recipe that the records spell)"
)


def is_own(ledger: Ledger, records: Mapping[str, str]) -> bool:
    """Whether this project made an artifact.

    Args:
        ledger: of the project.
        records: record.json, run.json and lineage.json → md5 of the bytes that were read.
    """
    if _names(ledger.recorded(), records):
        return True
    return any(_names(recorded, records) for recorded in _history(ledger, records["run.json"]))


def review(members: Sequence[RebuiltStage], *, here: bool, show_patch: bool) -> str:
    """What would run, for a person to judge: code and patches, stages and what they read. Nothing in it obeys a terminal."""
    lines = ["this project did not make it: its records stand in no dvc.lock of its own, also not in the history of its branches and tags."]
    codes: dict[RecordedCode, list[RebuiltStage]] = {}
    for member in members:
        codes.setdefault(member.code, []).append(member)
    if here:
        lines.append("code: this clone's (--here)")
    for code, made in () if here else codes.items():
        lines += ["", f"code {code.commit or 'none'} ({_whose(code)}), runs {', '.join(member.address for member in made)}"]
        lines += _patch_lines(code, show_patch)
    lines += ["", "commands: `pedigree compile` and `pedigree run` of that code, on a recipe with these stages:"]
    for member in members:
        numerics = ", ".join(f"{name} {value}" for name, value in member.run.numerics.items() if name in ("device", "world_size"))
        lines.append(f"  {member.address}: {member.record.kind}{f' ({numerics})' if numerics else ''}")
        lines += [f"    reads {what}" for what in dict.fromkeys(_reads(member.record.config))]
        files = member.record.source_files.items()
        lines += [f"    reads the project's file {name}, if its sha256 is {sha256[:12]}" for name, sha256 in files]
    return shown("\n".join(lines))


def _history(ledger: Ledger, md5: str) -> Iterator[list[Recorded]]:
    """What the `dvc.lock` files named at the commits that brought or took away this md5, the newest first."""
    found = _log(ledger.project, f"-S{md5}")
    for commit in islice(found, MOST_COMMITS):
        for revision in (commit, f"{commit}^"):
            try:
                yield ledger.recorded_at(revision)
            except LedgerError:  # the first commit has no parent; a damaged file names nothing
                continue


def _log(project: Project, what: str) -> list[str]:
    form = ("--format=%H", "--no-ext-diff", "--no-textconv", what)
    places = ("--", "dvc.lock", ":(glob)artifacts/*/dvc.lock")
    return git(project, "log", *form, "--branches", "--tags", "HEAD", *places).stdout.split()


def _names(recorded: Sequence[Recorded], records: Mapping[str, str]) -> bool:
    parts: dict[str, dict[str, str]] = {}
    for entry in recorded:
        parts.setdefault(entry.address, {})[entry.part] = entry.md5
    return any(records.items() <= known.items() for known in parts.values())


def _whose(code: RecordedCode) -> str:
    if code.commit is None:
        return "no commit was recorded"
    return "a commit of this clone" if has(code.commit) else "this clone lacks it; it would be fetched from a git remote or the DVC remote"


def _patch_lines(code: RecordedCode, whole: bool) -> list[str]:
    """Files and counts of lines, as git reads the patch; its text on demand."""
    if code.patch is None:
        return ["  no patch"] if code.patch_sha256 is None else ["  a patch that was not kept"]
    answer = run_git(CODE_ROOT, "apply", "--numstat", "-", given=code.patch.encode())
    if answer.returncode:
        raise ReproduceError(f"the patch of {code} is none that git can read: add --here, which takes no patch, or ask for a sound copy")
    counts = [line.split("\t", 2) for line in answer.stdout.decode(errors="replace").splitlines()]
    lines = [f"  patch of {len(counts)} file{'s' * (len(counts) != 1)}", *(f"    {name} +{new} -{old}" for new, old, name in counts)]
    return lines + ([f"    | {line}" for line in code.patch.splitlines()] if whole else ["    its text: --dry-run --show-patch"])


def _reads(config: Any) -> Iterator[str]:
    """Places outside that a config names."""
    if isinstance(config, Mapping):
        kind = config.get("type")
        if kind == "hub":
            yield f"{config.get('repo')} of the Hugging Face hub at {config.get('revision')}"
        elif kind == "program":
            yield f"what {config.get('function')} of {config.get('path')} gives, which runs in a sandbox"
        elif "url" in config:
            yield f"{config['url']}, with your credentials, if its sha256 is {str(config.get('sha256'))[:12]}"
        for inner in config.values():
            yield from _reads(inner)
    elif isinstance(config, list | tuple):
        for inner in config:
            yield from _reads(inner)
