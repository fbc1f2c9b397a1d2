"""Rebuild a recipe, a profile, and a small project from the records of an ancestry.

The current recipe is not used: kinds, configs, inputs, and labels come from the records, numerics and placement from the runs.
"""

import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from pedigree.configs.base.frozen import leaves
from pedigree.configs.base.paths import OutsidePath, source_path
from pedigree.configs.base.problems import UsageProblem
from pedigree.configs.base.project import Project
from pedigree.configs.language.compile import params_file
from pedigree.configs.language.execution import FORMERLY
from pedigree.configs.language.kinds import KINDS
from pedigree.data.artifacts import provenance
from pedigree.data.artifacts.artifacts import ADOPTED, ArtifactError, Record, Run, sha256_path, write_text
from pedigree.data.artifacts.chain import lineage_problems, parents_first, record_problems
from pedigree.data.store.untrusted import inside
from pedigree.pipelines.lineage.difference import changes
from pedigree.pipelines.reproduce.work_tree import RecordedCode

RECIPE = "reproduction"
"""Name of the rebuilt recipe."""
PROFILE = "recorded"
PROCESSES = ("world_size", "nodes", "threads", "tensor_parallel")
MOST_PROCESSES = 4096
"""Upper bound for each of `PROCESSES`, so that a malicious record cannot start unlimited processes."""
OURS = (".dvc", ".dvcignore", ".env", ".git", ".pedigree", "artifacts", "configs/execution", "configs/recipes", "dvc.lock", "dvc.yaml")
"""Places of the rebuilt project's own files, and of settings that DVC, git and Prefect read there; source files take none of them."""
DVC_CONFIG = """\
[core]
    analytics = false
    autostage = false
    check_update = false
    no_scm = true
    site_cache_dir = {site}
[cache]
    dir = {cache}
    type = "reflink,copy"
    slow_link_warning = false
"""


@dataclass(frozen=True)
class RebuiltStage:
    """An artifact of the ancestry as a stage of the rebuilt recipe."""

    name: str
    """Name in the rebuilt recipe."""
    record: Record
    run: Run
    patches: Mapping[str, str] = field(default_factory=dict, repr=False)
    """sha256 → patch, for the whole ancestry."""

    @property
    def id(self) -> str:
        return self.record.id

    @property
    def address(self) -> str:
        """`RECIPE/STAGE` that produced it."""
        return self.run.address or f"unknown/{self.id[:12]}"

    @property
    def code(self) -> RecordedCode:
        return RecordedCode.of(self.run, self.patches)

    @property
    def parents(self) -> tuple[str, ...]:
        """Distinct ids of its input artifacts."""
        return tuple(dict.fromkeys(given.producer for given in self.record.inputs))


def members_of(root: Record, run: Run, lineage: Mapping[str, tuple[Record, Run]], patches: Mapping[str, str]) -> dict[str, RebuiltStage]:
    """All artifacts of an ancestry by id in topological order, the root last, except those of the projects that models were adopted from.

    `run` is the root's, `lineage` has the ancestors by id, and `patches` the texts of all patches by sha256.

    Raises:
        UsageProblem: records contradict themselves or each other, or name a path outside their project; the message lists all problems.
    """
    known = {**lineage, root.id: (root, run)}
    try:
        problems = [*record_problems(root), *lineage_problems(root, lineage)]
    except ArtifactError as error:  # a cycle
        raise UsageProblem(str(error)) from error
    for record, made in known.values():
        for path in filter(_is_outside, _paths(record.config)):
            problem = f"names the path {path!r}, and records name none outside their project"
            problems.append(f"the config of {made.address or record.id[:12]} {problem}")
    if problems:
        raise UsageProblem("the records were modified after they were written: " + "; ".join(problems))
    known = {identifier: (record.without(ADOPTED.__eq__), run) for identifier, (record, run) in known.items()}
    order = parents_first(root.id, {identifier: record for identifier, (record, _) in known.items()})
    names = _names({identifier: known[identifier][1].address or "" for identifier in order})
    return {identifier: RebuiltStage(names[identifier], *known[identifier], patches) for identifier in order}


def data_only(members: Mapping[str, RebuiltStage]) -> set[str]:
    """Ids of data stages whose ancestors are all data stages, so that no model or engine is involved."""
    found: set[str] = set()
    for member in members.values():  # parents come first
        declaration = KINDS.get(member.record.kind)
        if declaration is not None and declaration.engine == "none" and found.issuperset(member.parents):
            found.add(member.id)
    return found


def find_member(members: Mapping[str, RebuiltStage], name: str) -> RebuiltStage:
    """Find a stage of the ancestry by address, stage name, or id prefix; UsageProblem lists all if none or several match."""
    for matches in (
        [member for member in members.values() if name in (member.address, member.id)],
        [member for member in members.values() if name in (member.name, member.address.partition("/")[2])],
        [member for member in members.values() if len(name) >= 4 and member.id.startswith(name)],
    ):
        if len(matches) == 1:
            return matches[0]
    known = ", ".join(member.address for member in members.values())
    raise UsageProblem(f"--stage {name} does not match exactly one stage of the ancestry; its stages are {known}")


Bring = Callable[[RebuiltStage, str, str, Path], bool]
"""Brings a source file or folder of a stage, by its name and sha256, to a new place; False if it has none."""


def write_project(
    home: Path,
    members: Mapping[str, RebuiltStage],
    places: Sequence[Path],
    wanted: Collection[str],
    *,
    here: bool = False,
    bring: Bring = lambda member, name, sha256, target: False,
) -> Project:
    """Write a project in `home` with the rebuilt recipe, the recorded profile, the source files, and its own DVC cache.

    Existing files are retained, so that an interrupted reproduction resumes. Source files of the stages with a `wanted` id are taken from
    the first of `places` that has one with the recorded hash, else from `bring`. `here`: the current code will run, not the recorded code.

    Raises:
        UsageProblem: no file with the recorded hash of a source file exists.
    """
    project = Project(home)
    config = home / ".dvc" / "config"
    if not config.exists():
        write_text(config, DVC_CONFIG.format(site=home / ".dvc" / "site", cache=home / ".dvc" / "cache"))
    write_text(home / ".dvcignore", "/.pedigree\n")
    for path, value in (
        (project.recipes / f"{RECIPE}.yaml", recipe(members)),
        (project.executions / f"{PROFILE}.yaml", profile(members, here=here)),
    ):
        write_text(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")  # preserve the order of inputs
    for member in members.values():
        if member.id in wanted:
            for name, sha256 in member.record.source_files.items():
                _take_source(home, name, sha256, places, member, bring)
    return project


def recipe(members: Mapping[str, RebuiltStage]) -> dict[str, Any]:
    """The recipe in the records, with every config field and input label explicit."""
    stages = {}
    for member in members.values():
        ports: dict[str, dict[str, str]] = {}
        for given in member.record.inputs:
            ports.setdefault(given.port, {})[given.label] = members[given.producer].name
        stages[member.name] = {**member.record.config, "kind": member.record.kind, "in": ports}
    return {"description": "Rebuilt from records.", "execution": PROFILE, "stages": stages}


def profile(members: Mapping[str, RebuiltStage], *, here: bool = False) -> dict[str, Any]:
    """Profile with the recorded numerics and placement of every stage, and the slots of this machine.

    On a CPU, slots are at least the recorded number, since engines that share cores need a slot for each of their threads.
    `here`: for the current code.
    """
    hardware = provenance.hardware()
    on_gpu = any(member.run.numerics.get("device") == "cuda" for member in members.values())
    recorded = {address: member.run.placement.get("slots") for address, member in members.items()}
    asked = {address: max(1, min(count, MOST_PROCESSES)) if isinstance(count, int) else 1 for address, count in recorded.items()}
    slots = max(1, len(hardware.get("gpus", ()))) if on_gpu else max(hardware["cores"], *asked.values())
    stages = {}
    for address, member in members.items():
        for name in PROCESSES:
            count = member.run.numerics.get(name, 1)
            if not isinstance(count, int) or not 0 < count <= MOST_PROCESSES:
                raise UsageProblem(f"the run of {member.address} has {name} {count!r}; it must be from 1 to {MOST_PROCESSES}")
        placement = {**member.run.placement, "slots": min(asked[address], slots)}
        numerics = {**(FORMERLY if here else {}), **member.run.numerics}  # recorded code may not know newer settings
        ran = member.run.hardware
        same = ran.cpu == hardware.get("cpu") and ran.instruction_sets in (None, tuple(hardware.get("instruction_sets", ())))
        if numerics.get("bf16_products") == "units" and not same:
            numerics["bf16_products"] = "auto"  # emulating bf16 units on another CPU would be prohibitively slow
        stages[member.name] = {"numerics": numerics, "placement": placement}
    return {"slots": slots, "stages": stages}


def identity_differences(project: Project, member: RebuiltStage) -> list[str]:
    """Differences in version, config fields, and labels between a compiled stage and its record."""
    compiled = yaml.safe_load((project.root / params_file(RECIPE)).read_text())[member.name]
    labels: dict[str, list[str]] = {}
    for given in member.record.inputs:
        labels.setdefault(given.port, []).append(given.label)
    recorded = {"kind": member.record.kind, "version": member.record.version, "config": member.record.config, "inputs": labels}
    # as JSON, since keys hash it and Python's 1 equals 1.0 and True
    before, now = ({name: json.dumps(value, ensure_ascii=False) for name, value in leaves(side)} for side in (recorded, compiled))
    return [str(change).removeprefix("config.") for change in changes(before, now)]


def _paths(config: Any) -> Iterator[str]:
    """The values of all fields named `path`."""
    for name, inner in config.items() if isinstance(config, dict) else enumerate(config) if isinstance(config, list) else ():
        if name == "path" and isinstance(inner, str):
            yield inner
        yield from _paths(inner)


def _is_outside(path: str) -> bool:
    try:
        return isinstance(source_path(path), OutsidePath)
    except ValueError:  # the recipe is refused
        return False


def _names(addresses: Mapping[str, str]) -> dict[str, str]:
    """A unique stage name per id: the stage name of its address if unique, else the whole address, else one from the id."""
    choices = {key: (address.partition("/")[2], re.sub(r"\W", "_", address), f"s_{key[:16]}") for key, address in addresses.items()}
    counts = [Counter(names) for names in zip(*choices.values(), strict=True)]
    return {
        identifier: next(
            name
            for name, count in zip(names, counts, strict=True)
            if name == names[-1] or (count[name] == 1 and re.fullmatch("[a-z][a-z0-9_]*", name))
        )
        for identifier, names in choices.items()
    }


def _take_source(home: Path, name: str, sha256: str, places: Sequence[Path], member: RebuiltStage, bring: Bring) -> None:
    """Copy a source file with the recorded hash into the project, without following links or writing outside it."""
    if any(f"{name}/".startswith(f"{own}/") or own.startswith(f"{name}/") for own in OURS):
        problem = f"{member.address} lists {name} in source_files, a name reserved by the rebuilt project, so it cannot run there"
        raise UsageProblem(f"{problem}: take its artifact with --from-cache, and keep source files elsewhere")
    try:
        target = inside(home, name)
        if _has(target, sha256):
            return
        source = next((source for place in places if _has(source := inside(place, name), sha256)), None)
    except ArtifactError as error:
        raise UsageProblem(f"{member.address}, source_files: {error}") from error
    if target.exists():
        shutil.rmtree(target) if target.is_dir() else os.unlink(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    if source is None and not (bring(member, name, sha256, target) and _has(target, sha256)):
        raise UsageProblem(
            f"{member.address} was made from {name} with sha256 {sha256[:12]}, which is in neither its commit nor this project nor the "
            f"remote: place that file at {name}, send it with `pedigree push RECIPE --inputs` from where it is, or use --from-cache"
        )
    if source is None:
        return
    if source.is_dir():
        shutil.copytree(source, target, symlinks=True)
    else:
        shutil.copyfile(source, target, follow_symlinks=False)


def _has(path: Path, sha256: str) -> bool:
    return (path.is_file() or path.is_dir()) and sha256_path(path) == sha256
