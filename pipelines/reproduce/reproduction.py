"""`pedigree reproduce`: rebuild an artifact from its records and compare.

1. Read the records of the whole ancestry; reject contradictory ones.
2. Check out the recorded code (commit and patch) in separate work trees, or use the current code (`--here`).
3. Write a small project with the recipe in the records, the recorded numerics, and its own cache.
4. Compile it with that code and compare the result with every record before anything runs.
5. Run every stage with `pedigree run` of that code, or take ancestors from the cache or the remote (`--from-cache`).
6. Compare every artifact with its record and write a report.
"""

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from pedigree.configs.base.document import ConfigError
from pedigree.configs.base.frozen import digest
from pedigree.configs.base.paths import place_of
from pedigree.configs.base.problems import UsageProblem
from pedigree.configs.base.project import Project
from pedigree.configs.language.execution import profile_path
from pedigree.configs.language.recipe import load_recipes
from pedigree.configs.language.recipe_files import score_tolerance
from pedigree.data.artifacts import provenance
from pedigree.data.artifacts.artifacts import (
    Artifact,
    ArtifactError,
    intact,
    parse_lineage,
    parse_patches,
    parse_record,
    parse_run,
    read_lineage,
    read_run,
    write_json,
)
from pedigree.data.artifacts.exports import RECORDS
from pedigree.data.artifacts.run_record import Environment
from pedigree.data.store.untrusted import inside, parse_json, plain_files, read_plain
from pedigree.pipelines.jobs.lease import lease
from pedigree.pipelines.ledger import raw_inputs
from pedigree.pipelines.ledger.by_id import bring
from pedigree.pipelines.ledger.identity import HASHES
from pedigree.pipelines.ledger.ledger import Ledger
from pedigree.pipelines.ledger.transfers import RemoteError
from pedigree.pipelines.lineage.ancestry import find_artifact, is_exported
from pedigree.pipelines.lineage.find import bring_committed
from pedigree.pipelines.lineage.git_state import code_state
from pedigree.pipelines.lineage.named_models import find_named, named_models
from pedigree.pipelines.quantities import counted
from pedigree.pipelines.reproduce import rebuild, work_tree
from pedigree.pipelines.reproduce.rebuild import RECIPE, RebuiltStage
from pedigree.pipelines.reproduce.trust import REFUSED, is_own, review
from pedigree.pipelines.reproduce.verdicts import Finding, Original, environment_differences, judge, passes
from pedigree.pipelines.reproduce.work_tree import RecordedCode
from pedigree.pipelines.run.opening import compiled_request

SCHEMA = 1
FINISHED = "finished"
"""Marks a completed work folder; the next reproduction starts over."""
ABOVE_FAILED = "an upstream stage failed"
Action = Literal["run", "restore", "restore or run", "leave out"]


@dataclass(frozen=True)
class ReproductionRequest:
    """Options of a reproduction."""

    model: str
    """`RECIPE/STAGE`, an id prefix, an artifact folder, or an exported folder."""
    from_cache: bool = False
    """Take ancestors from the project, the cache, or the remote if available; the model itself is always run."""
    only_data: bool = False
    """Run only data stages without a model upstream."""
    stage: str | None = None
    """Run only this stage of the ancestry, from its recorded inputs."""
    here: bool = False
    """Use the current code instead of the recorded code."""
    strict: bool = False
    """Require the recorded environment."""
    execution: str | None = None
    """Name or path of a profile whose numerics replace the recorded ones."""
    trust: bool = False
    """Run artifacts of other projects without asking."""


@dataclass(frozen=True)
class Subject:
    """The model to reproduce, from its records."""

    records: Path
    """Folder with record.json, run.json, and lineage.json."""
    payload: Path | None
    evidence: Path | None
    members: dict[str, RebuiltStage]
    inherited: tuple[str, ...]
    """Addresses of the stages of other projects, from which models were adopted."""
    md5: Mapping[str, str]
    """File name → md5 of the three record files as read."""

    @property
    def root(self) -> RebuiltStage:
        return list(self.members.values())[-1]

    def inherited_text(self) -> str:
        """What is not rebuilt here, on one line; empty if everything is."""
        if not self.inherited:
            return ""
        return (
            f"{counted(len(self.inherited), 'stage')} of the project that a base model was exported from ({', '.join(self.inherited[:3])}"
            f"{', ...' * (len(self.inherited) > 3)}) can be reproduced only there; here the export is imported again"
        )


@dataclass(frozen=True)
class Intent:
    """Planned action for one artifact of the ancestry."""

    member: RebuiltStage
    action: Action


@dataclass(frozen=True)
class Outcome:
    """A finished reproduction."""

    findings: tuple[Finding, ...]
    differences: tuple[str, ...]
    """Environment differences, recorded -> now."""
    report: Path
    """Path of the reproduction report."""

    @property
    def passed(self) -> bool:
        return passes(self.findings)


def read_subject(project: Project, name: str) -> Subject:
    """Find the records of a model, fetching them from the cache or the remote if not in the project.

    Raises:
        ArtifactError: there is no such artifact.
        UsageProblem: its records are unreadable or contradictory.
    """
    folder = Path(name)
    if is_exported(folder):
        return _subject(folder / "pedigree", folder, None)
    try:
        found = find_artifact(project, name)
    except ArtifactError:
        fetched = project.private / "reproduce" / "records" / digest(name)[:16]
        shutil.rmtree(fetched, ignore_errors=True)
        if folder.exists():
            raise
        if "@" in name:
            bring_committed(Ledger(project), name, fetched, RECORDS)
            return _subject(fetched, None, None)
        model = find_named(named_models(project), name)
        address = model.address if model else name
        if "/" not in address or not bring(Ledger(project), address, fetched, parts=RECORDS):
            raise
        return _subject(fetched, None, None)
    return _subject(found.path, found.payload, found.evidence)


def intents(subject: Subject, request: ReproductionRequest) -> list[Intent]:
    """Planned actions for every artifact of the ancestry, parents first.

    Raises:
        UsageProblem: `--stage` is ambiguous or unknown, options conflict, or nothing is left to run.
    """
    members = subject.members
    target = rebuild.find_member(members, request.stage) if request.stage else None
    data = rebuild.data_only(members)

    def action(member: RebuiltStage) -> Action:
        if target:
            return "run" if member is target else "restore" if member.id in target.parents else "leave out"
        if request.only_data and member.id not in data:
            return "leave out"
        return "restore or run" if request.from_cache and member is not subject.root else "run"

    found = [Intent(member, action(member)) for member in members.values()]
    if request.stage and (request.only_data or request.from_cache):
        raise UsageProblem("--stage always takes its inputs from the cache; omit --only and --from-cache")
    if all(intent.action == "leave out" for intent in found):
        raise UsageProblem(f"--only data leaves nothing to run: {subject.root.address} has no data stage upstream")
    return found


def environment_changes(wanted: Sequence[Intent]) -> list[str]:
    """Distinct differences between the recorded environments and the current one."""
    now = Environment.model_validate(provenance.environment())
    found: dict[str, None] = {}
    for intent in wanted:
        if intent.action != "leave out":
            found |= dict.fromkeys(environment_differences(intent.member.run.environment, now))
    return sorted(found)


def environment_text(differences: Sequence[str]) -> str:
    if not differences:
        return "environment: as recorded"
    return "\n".join(["environment, recorded -> here:", *(f"  {line}" for line in differences)])


def reproduce(
    project: Project, request: ReproductionRequest, note: Callable[[str], None] = print, ask: Callable[[], bool] | None = None
) -> Outcome:
    """Reproduce a model; the project's private folder holds the work folder.

    `ask` asks the user, after a review of what would run, whether to run a model of another project; None if not interactive.

    Raises:
        UsageProblem: it cannot start (see `rebuild`), `strict` is set and the environment differs, the model is not trusted, or the
            recorded code is unavailable.
        ArtifactError: there is no such artifact.
    """
    subject = read_subject(project, request.model)
    wanted = intents(subject, request)
    differences = environment_changes(wanted)
    if request.strict and differences:
        raise UsageProblem(
            f"--strict: this environment differs from the recorded one: {'; '.join(differences)}: install the recorded versions, "
            "or omit --strict"
        )
    note(environment_text(differences))
    if subject.inherited:
        note(subject.inherited_text())
    ledger = Ledger(project)
    if not request.trust and not is_own(ledger, subject.md5):
        note(review([intent.member for intent in wanted if intent.action != "leave out"], here=request.here, show_patch=False))
        if ask is None or not ask():
            raise UsageProblem(REFUSED if ask is None else "nothing was run")
    options = [request.from_cache, request.only_data, request.stage, request.here, request.execution]
    work = project.private / "reproduce" / f"{subject.root.id[:12]}-{digest(options)[:6]}"
    started = _now()
    with lease(project.lease(f"reproduce--{work.name}"), f"pedigree reproduce {request.model}"):
        if (work / FINISHED).exists():
            _discard(work)
        attempt = _Attempt(project, subject, request, work, ledger, note)
        findings = attempt.findings(wanted)
        report = attempt.report(findings, differences, started)
        (work / FINISHED).touch()
        if passes(findings):
            _discard(work)
    return Outcome(tuple(findings), tuple(differences), report)


@dataclass
class _Attempt:
    """A reproduction in its work folder."""

    project: Project
    subject: Subject
    request: ReproductionRequest
    work: Path
    ledger: Ledger
    note: Callable[[str], None]

    def __post_init__(self) -> None:
        self.trees: dict[RecordedCode, Path] = {}
        self.home = Project(self.work / "project")

    def findings(self, wanted: Sequence[Intent]) -> list[Finding]:
        """Check out, compile, restore, run, and compare."""
        self.home.root.mkdir(parents=True, exist_ok=True)
        restored = {intent.member.id for intent in wanted if intent.action.startswith("restore") and self._restore(intent)}
        run = [intent.member for intent in wanted if intent.action != "leave out" and intent.member.id not in restored]
        for code in dict.fromkeys(self._code(member) for member in run):
            self.trees[code] = self._tree(code)
        places = [*self.trees.values(), self.project.root]
        needed = {member.id for member in run}
        rebuild.write_project(self.home.root, self.subject.members, places, needed, here=self.request.here, bring=self._bring_source)
        changed = self._changed(run)
        ended = {} if changed else self._run_all(run, restored)
        found = []
        for intent in wanted:
            member = intent.member
            if member.id in restored:
                found.append(_finding(member, "restored", "recorded files, all hashes verified", member.record.content))
            elif member.id in changed:
                found.append(_finding(member, "different", f"the code compiles it to a different stage: {', '.join(changed[member.id])}"))
            elif intent.action != "leave out":
                found.append(self._compare(member, ended.get(member.id, "")))
        return found

    def _code(self, member: RebuiltStage) -> RecordedCode:
        return RecordedCode(None) if self.request.here else member.code

    def _tree(self, code: RecordedCode) -> Path:
        if self.request.here:
            return provenance.CODE_ROOT
        self.note(f"code: {code}")
        return work_tree.check_out(code, self.work / "code" / code.folder, self.ledger.remote.get)

    def _restore(self, intent: Intent) -> bool:
        """Copy the recorded artifact from the project, the cache, or the remote into the new project."""
        member, target = intent.member, self.home.artifact(f"{RECIPE}/{intent.member.name}")
        self.note(f"restoring {member.address}, verifying all hashes")
        found = _is_recorded(target, member) or self._bring(member, target)
        if not found and intent.action == "restore":
            raise UsageProblem(
                f"{member.address} {member.id[:12]} is an input of the stage, but it is not in this project, its cache, or its remote: "
                "fetch it, or omit --stage"
            )
        return found

    def _bring(self, member: RebuiltStage, target: Path) -> bool:
        shutil.rmtree(target, ignore_errors=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        here = self.project.artifact(member.address)
        if _is_recorded(here, member):
            shutil.copytree(here, target)
        else:
            bring(self.ledger, member.address, target, identifier=member.id)
        if _is_recorded(target, member):
            return True
        shutil.rmtree(target, ignore_errors=True)
        return False

    def _bring_source(self, member: RebuiltStage, name: str, sha256: str, target: Path) -> bool:
        """Copy a source from where a recipe of this project finds it, or fetch it from the remote."""
        for place in self._places(member.address.partition("/")[0], name):
            with suppress(ArtifactError, FileNotFoundError):
                if HASHES.sha256(place) == sha256:
                    shutil.copytree(place, target) if place.is_dir() else shutil.copyfile(place, target)
                    return True
        try:
            return raw_inputs.fetch(self.project, self.ledger.remote, sha256, target)
        except (ArtifactError, RemoteError) as error:
            raise UsageProblem(f"{member.address}, {name}: {error}") from error

    def _places(self, recipe: str, name: str) -> Iterator[Path]:
        """Where the project's own recipe of this name finds a source outside the project."""
        with suppress(ConfigError):
            request = compiled_request(self.project, recipe)
            graph = load_recipes(self.project.recipes, request.recipe, request.overrides)[-1]
            yield from (place_of(self.project.root, file) for node in graph.nodes.values() for file in node.files if file == name)

    def _changed(self, run: Sequence[RebuiltStage]) -> dict[str, list[str]]:
        """Stages whose compiled identity differs from their record, with the differences."""
        found: dict[str, list[str]] = {}
        for code, tree in self.trees.items():
            own = [member for member in run if self._code(member) == code]
            done = self._pedigree(tree, "compile", RECIPE, quiet=True)
            if done.returncode:
                raise UsageProblem(f"the code cannot compile the rebuilt recipe: {(done.stderr or done.stdout).strip()}")
            found |= {member.id: differences for member in own if (differences := rebuild.identity_differences(self.home, member))}
        return found

    def _run_all(self, run: Sequence[RebuiltStage], restored: set[str]) -> dict[str, str]:
        """Run the stages in batches that share the same code; returns id → reason for each stage that failed."""
        done, failed, left = set(restored), dict[str, str](), list(run)
        while left:
            lost = next((member for member in left if failed.keys() & set(member.parents)), None)
            if lost:
                failed[lost.id] = ABOVE_FAILED
                left.remove(lost)
                continue
            code = self._code(left[0])
            batch: list[RebuiltStage] = []
            for member in left:
                inside = done | {other.id for other in batch}
                if self._code(member) == code and set(member.parents) <= inside:
                    batch.append(member)
            only = [word for member in batch for word in ("--only", member.name)]
            ended = self._pedigree(self.trees[code], "run", RECIPE, "--execution", self._profile(), *only)
            for member in batch:
                if self._made(member) is None:
                    above = failed.keys() & set(member.parents)
                    failed[member.id] = ABOVE_FAILED if above else f"its stage failed (exit code {ended.returncode}): see above"
            done |= {member.id for member in batch if member.id not in failed}
            left = [member for member in left if member not in batch]
        return failed

    def _profile(self) -> str:
        folder = self.project.executions if self.request.execution else self.home.executions
        return str(profile_path(folder, self.request.execution or rebuild.PROFILE).resolve())

    def _pedigree(self, tree: Path, *arguments: str, quiet: bool = False) -> subprocess.CompletedProcess[str]:
        """Run a `pedigree` command with the code in `tree` in the new project; `quiet` captures its output."""
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
        environment["PYTHONPATH"] = provenance.python_path(tree)
        if not self.request.here:
            environment.pop(provenance.ADDED_STAGES, None)  # the recorded code contains its own kinds
        environment["PEDIGREE_PREFECT"] = "never"  # not an option, since recorded code may not know it
        pipe = subprocess.PIPE if quiet else None
        module = "pedigree.pipelines.cli" if (tree / "pedigree").is_dir() else "pipelines.cli"  # as it was before 0.2
        command = [sys.executable, "-P", "-m", module, *arguments]
        sys.stdout.flush()
        child = subprocess.Popen(command, cwd=self.home.root, env=environment, text=True, stdout=pipe, stderr=pipe)
        try:
            out, err = child.communicate()
        except BaseException:  # on SIGTERM the child stops its jobs and retains their checkpoints
            child.terminate()
            child.wait()
            raise
        return subprocess.CompletedProcess(command, child.returncode, out, err)

    def _made(self, member: RebuiltStage) -> Artifact | None:
        return intact(self.home.artifact(f"{RECIPE}/{member.name}"), verify=True)

    def _compare(self, member: RebuiltStage, why_not: str) -> Finding:
        self.note(f"comparing {member.address}, verifying all hashes")
        made = self._made(member)
        if made is None or why_not:
            return _finding(member, "failed" if why_not and why_not != ABOVE_FAILED else "not run", why_not)
        original = None if made.record.content == member.record.content else self._original(member)
        verdict, detail, measures, other = judge(member.record, member.run, made, original, self._tolerance(member))
        return _finding(member, verdict, detail, made.record.content, measures=measures, conditions=other)

    def _original(self, member: RebuiltStage) -> Original | None:
        """The recorded artifact's files, from the subject, the project, the cache, or the remote."""
        subject, target = self.subject, self.work / "originals" / member.name
        if member is subject.root and subject.payload:
            return Original(subject.payload, subject.evidence or self._evidence(member, target))
        if _is_recorded(target, member) or self._bring(member, target):
            return Original(target / "payload", target / "evidence")
        return None

    def _evidence(self, member: RebuiltStage, target: Path) -> Path | None:
        """The recorded evidence of an exported artifact, which does not include it."""
        here = self.project.artifact(member.address)
        if _is_recorded(here, member):
            return here / "evidence"
        shutil.rmtree(target, ignore_errors=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        found = bring(self.ledger, member.address, target, identifier=member.id, parts=("evidence",))
        return target / "evidence" if found else None

    def _tolerance(self, member: RebuiltStage) -> float | None:
        """Score tolerance of the recipe in the code that runs, else in this project."""
        tree = self.trees.get(self._code(member), self.project.root)
        for root in (tree, self.project.root):
            try:
                project = Project(root)
                stated = score_tolerance(project.recipes, compiled_request(project, member.address.partition("/")[0]).recipe)
            except ConfigError:
                stated = None
            if stated is not None:
                return stated
        return None

    def report(self, findings: Sequence[Finding], differences: Sequence[str], started: str) -> Path:
        """Write the reproduction report, without user names, host names, or paths outside the project."""
        root, request = self.subject.root, self.request
        options = {"from_cache": request.from_cache, "only_data": request.only_data, "stage": request.stage, "here": request.here}
        code = [{name: value for name, value in code_state().items() if name != "patch"}] if request.here else []
        body = {
            "schema_version": SCHEMA,
            "model": {"address": root.address, "id": root.id, "key": root.record.key, "content": root.record.content},
            "asked": options | {"execution": Path(request.execution).stem if request.execution else None, "strict": request.strict},
            "started_at": started,
            "ended_at": _now(),
            "code": code or [{"commit": each.commit, "patch_sha256": each.patch_sha256} for each in self.trees],
            "recorded": {name: root.run.as_json().get(name) for name in ("environment", "hardware")},
            "here": {"environment": provenance.environment(), "hardware": provenance.hardware()},
            "environment_differences": list(differences),
            "stages": [asdict(finding) for finding in findings],
            "passed": passes(findings),
        }
        path = self.project.private / "reproductions" / f"{started[:19].replace(':', '').replace('-', '')}-{root.id[:12]}.json"
        write_json(path, body)
        return path


def push_code(project: Project, records: Sequence[Path]) -> Iterator[tuple[str, str]]:
    """Store a git bundle in the DVC remote for every commit in the records of these artifact folders and their ancestors.

    Yields (commit, `sent`, `there already`, or the reason why not).
    """
    ledger, seen = Ledger(project), set[str]()
    for folder in records:
        runs = [read_run(folder / "run.json"), *(run for _, run in read_lineage(folder / "lineage.json").values())]
        for commit in dict.fromkeys(code.commit for code in (RecordedCode.of(run, {}) for run in runs) if code.commit):
            if commit not in seen:
                seen.add(commit)
                with work_tree.bundle(commit) as file:
                    sent = file and ledger.remote.put(file, work_tree.bundle_name(commit))
                yield commit, "not in a clone here" if sent is None else "sent" if sent else "there already"


def _subject(records: Path, payload: Path | None, evidence: Path | None) -> Subject:
    try:
        for folder in filter(None, (records, payload, evidence)):
            plain_files(folder)
        data = {name: read_plain(inside(records, name), most) for name, most in RECORDS.items()}
        shown = {name: str(records / name) for name in data}
        record = parse_record(data["record.json"], shown["record.json"])
        parsed = {name: parse_json(data[name], shown[name]) for name in ("run.json", "lineage.json")}
        run = parse_run(parsed["run.json"], shown["run.json"])
        lineage = parse_lineage(parsed["lineage.json"], shown["lineage.json"])
        patches = parse_patches(parsed["run.json"], parsed["lineage.json"], shown["lineage.json"])
    except ArtifactError as error:
        raise UsageProblem(f"the records in {records} cannot be read: {error}; or export it again") from error
    md5 = {name: hashlib.md5(text, usedforsecurity=False).hexdigest() for name, text in data.items()}
    members = rebuild.members_of(record, run, lineage, patches)
    inherited = tuple(run.address or identifier[:12] for identifier, (_, run) in lineage.items() if identifier not in members)
    return Subject(records, payload, evidence, members, inherited, md5)


def _is_recorded(folder: Path, member: RebuiltStage) -> bool:
    """Whether a folder contains exactly this artifact, verifying all hashes."""
    found = intact(folder, verify=True)
    return found is not None and found.record.id == member.id


def _finding(member: RebuiltStage, verdict: Any, detail: str, reproduced: str | None = None, **more: Any) -> Finding:
    return Finding(member.address, member.id, member.record.key, member.record.content, verdict, detail, reproduced, **more)


def _discard(work: Path) -> None:
    trees = work / "code"
    for tree in sorted(trees.iterdir()) if trees.is_dir() else ():
        work_tree.remove(tree)
    shutil.rmtree(work, ignore_errors=True)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
