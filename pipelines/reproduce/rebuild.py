"""From the records of an ancestry back to a recipe, a profile and a small project that makes it again.

Nothing is taken from today's recipe: kinds, configs, inputs and labels stand in the records, numerics and placement in the runs.
"""

import json
import os
import re
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from configs.base.problems import UsageProblem
from configs.base.project import Project
from configs.language.compile import params_file
from configs.language.execution import FORMERLY
from configs.language.kinds import KINDS
from data.artifacts import provenance
from data.artifacts.artifacts import ArtifactError, Record, Run, sha256_path, stage_key, write_text
from data.store.untrusted import inside
from pipelines.lineage.ancestry import parents_first
from pipelines.reproduce.work_tree import RecordedCode

RECIPE = "reproduction"
"""The recipe that is written from the records."""
PROFILE = "recorded"
PROCESSES = ("world_size", "threads", "tensor_parallel")
MOST_PROCESSES = 4096
"""Of each: a record must not make a machine start processes without end."""
OURS = ("artifacts", "configs", "dvc.lock", "dvc.yaml")
"""Where the rebuilt project has files of its own; no source file is laid there, nor under a name that begins with a dot."""
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


class ReproduceError(UsageProblem):
    """The reproduction cannot begin: the records, the sources or the request do not allow it."""


@dataclass(frozen=True)
class RebuiltStage:
    """One artifact of the ancestry, as a stage of the rebuilt recipe."""

    name: str
    """Of the stage in the rebuilt recipe."""
    record: Record
    run: Run
    patches: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Those of the whole ancestry, by sha256."""

    @property
    def id(self) -> str:
        return self.record.id

    @property
    def address(self) -> str:
        """Where it was made: `RECIPE/STAGE`."""
        return self.run.address or f"unknown/{self.id[:12]}"

    @property
    def code(self) -> RecordedCode:
        return RecordedCode.of(self.run, self.patches)

    @property
    def parents(self) -> tuple[str, ...]:
        """Ids of the artifacts that it read, each once."""
        return tuple(dict.fromkeys(given.producer for given in self.record.inputs))


def members_of(root: Record, run: Run, lineage: Mapping[str, tuple[Record, Run]], patches: Mapping[str, str]) -> dict[str, RebuiltStage]:
    """All artifacts of an ancestry by id, parents before children, the root last.

    Args:
        root: record of the artifact itself.
        run: its `run.json`.
        lineage: id → record and run of its ancestors.
        patches: sha256 → text, of itself and its ancestors.

    Raises:
        ReproduceError: a record contradicts itself or its children; each is named.
    """
    known = {**lineage, root.id: (root, run)}
    problems = [problem for identifier, entry in known.items() for problem in _contradictions(identifier, *entry, known)]
    if problems:
        raise ReproduceError("the records have been changed after they were written: " + "; ".join(problems))
    try:
        order = parents_first(root.id, {identifier: record for identifier, (record, _) in known.items()})
    except ArtifactError as error:
        raise ReproduceError(str(error)) from error
    names = _names({identifier: known[identifier][1].address or "" for identifier in order})
    return {identifier: RebuiltStage(names[identifier], *known[identifier], patches) for identifier in order}


def data_alone(members: Mapping[str, RebuiltStage]) -> set[str]:
    """Ids of those that are data stages, and made from data stages alone: no model and no engine has touched them."""
    found: set[str] = set()
    for member in members.values():  # parents come first
        declaration = KINDS.get(member.record.kind)
        if declaration is not None and declaration.engine == "none" and found.issuperset(member.parents):
            found.add(member.id)
    return found


def find_member(members: Mapping[str, RebuiltStage], name: str) -> RebuiltStage:
    """A stage of the ancestry by address, stage name, or the start of its id.

    Raises:
        ReproduceError: none or several; the message lists them.
    """
    for matches in (
        [member for member in members.values() if name in (member.address, member.id)],
        [member for member in members.values() if name in (member.name, member.address.partition("/")[2])],
        [member for member in members.values() if len(name) >= 4 and member.id.startswith(name)],
    ):
        if len(matches) == 1:
            return matches[0]
    known = ", ".join(member.address for member in members.values())
    raise ReproduceError(f"--stage {name} names no one stage of the ancestry: there are {known}")


def write_project(
    home: Path, members: Mapping[str, RebuiltStage], places: Sequence[Path], wanted: Collection[str], *, here: bool = False
) -> Project:
    """A project with the rebuilt recipe, the recorded profile, the source files, and a DVC cache of its own.

    Args:
        home: its folder; what is there is kept, so that an interrupted reproduction goes on.
        members: the ancestry.
        places: where source files may lie, the likeliest first; only a file of the recorded hash is taken.
        wanted: ids of those that will run.
        here: with the code of this clone, not the recorded one.

    Raises:
        ReproduceError: a source file is nowhere with its recorded hash.
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
        write_text(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")  # in this order: that of inputs counts
    for member in members.values():
        if member.id in wanted:
            for name, sha256 in member.record.source_files.items():
                _take_source(home, name, sha256, places, member)
    return project


def recipe(members: Mapping[str, RebuiltStage]) -> dict[str, Any]:
    """The recipe that the records spell: every field of every config is written out, every input has its label."""
    stages = {}
    for member in members.values():
        ports: dict[str, dict[str, str]] = {}
        for given in member.record.inputs:
            ports.setdefault(given.port, {})[given.label] = members[given.producer].name
        stages[member.name] = {**member.record.config, "kind": member.record.kind, "in": ports}
    return {"description": "Rebuilt from records.", "execution": PROFILE, "stages": stages}


def profile(members: Mapping[str, RebuiltStage], *, here: bool = False) -> dict[str, Any]:
    """The recorded numerics and placement of every stage; as many slots as this machine has, of cores also as many as were asked for:
    engines that may share them need a slot for each of their threads. `here`: for the code of this clone."""
    hardware = provenance.hardware()
    on_gpu = any(member.run.numerics.get("device") == "cuda" for member in members.values())
    asked = {address: _slots(member.run.placement.get("slots")) for address, member in members.items()}
    slots = max(1, len(hardware.get("gpus", ()))) if on_gpu else max(hardware["cores"], *asked.values())
    stages = {}
    for address, member in members.items():
        for name in PROCESSES:
            count = member.run.numerics.get(name, 1)
            if not isinstance(count, int) or not 0 < count <= MOST_PROCESSES:
                raise ReproduceError(f"the run of {member.address} says {name} {count!r}, which is not from 1 to {MOST_PROCESSES}")
        placement = {**member.run.placement, "slots": min(asked[address], slots)}
        numerics = {**(FORMERLY if here else {}), **member.run.numerics}  # older code is given no setting that it does not know
        if numerics.get("bf16_products") == "units" and member.run.hardware.cpu != hardware.get("cpu"):
            numerics["bf16_products"] = "auto"  # a CPU without units would need days for what took another one minutes
        stages[member.name] = {"numerics": numerics, "placement": placement}
    return {"slots": slots, "stages": stages}


def _slots(recorded: object) -> int:
    return max(1, min(recorded, MOST_PROCESSES)) if isinstance(recorded, int) else 1


def identity_differences(project: Project, member: RebuiltStage) -> list[str]:
    """What the code makes of a stage, once compiled, that is not what the record says: version, fields, labels."""
    compiled = yaml.safe_load((project.root / params_file(RECIPE)).read_text())[member.name]
    labels: dict[str, list[str]] = {}
    for given in member.record.inputs:
        labels.setdefault(given.port, []).append(given.label)
    recorded = {"kind": member.record.kind, "version": member.record.version, "config": member.record.config, "inputs": labels}
    before, now = dict(_leaves(recorded)), dict(_leaves(compiled))
    names = sorted(before.keys() | now.keys())
    return [
        f"{name.removeprefix('config.')} {before.get(name, '(absent)')} -> {now.get(name, '(absent)')}"
        for name in names
        if before.get(name) != now.get(name)
    ]


def _contradictions(identifier: str, record: Record, run: Run, known: Mapping[str, tuple[Record, Run]]) -> Iterator[str]:
    shown = run.address or identifier[:12]
    if record.id != identifier:
        yield f"{shown} stands under id {identifier[:12]}, but its record has {record.id[:12]}"
    inputs = [(given.port, given.label, given.content) for given in record.inputs]
    if stage_key(record.kind, record.version, record.config, inputs, record.source_files) != record.key:
        yield f"the key of {shown} is not that of its kind, version, config, inputs and source files"
    for given in record.inputs:
        if given.producer not in known:
            yield f"the {given.port} {given.label} of {shown}, {given.producer[:12]}, is missing"
        elif known[given.producer][0].content != given.content:
            yield f"{shown} read another content as {given.port} {given.label} than that of {given.producer[:12]}"


def _names(addresses: Mapping[str, str]) -> dict[str, str]:
    """A stage name per id: that of its address where only one has it, else with its recipe, else with its id."""
    short = {identifier: address.partition("/")[2] for identifier, address in addresses.items()}
    found = {}
    for identifier, address in addresses.items():
        choices = (short[identifier], re.sub(r"\W", "_", address), f"s_{identifier[:16]}")
        counts = (list(short.values()), [re.sub(r"\W", "_", other) for other in addresses.values()], [])
        found[identifier] = next(
            choice
            for choice, others in zip(choices, counts, strict=True)
            if others.count(choice) <= 1 and re.fullmatch("[a-z][a-z0-9_]*", choice)
        )
    return found


def _take_source(home: Path, name: str, sha256: str, places: Sequence[Path], member: RebuiltStage) -> None:
    """Lays a source file of the recorded hash into the project; nothing outside of it is written or removed, and no link is followed.

    Raises:
        ReproduceError: the name is none that a source file may have, or the file is nowhere with this hash.
    """
    first = name.split("/")[0]
    if first in OURS or first.startswith("."):
        problem = f"{member.address} names {name} among its source_files, where the project itself has its files: it is forged"
        raise ReproduceError(f"{problem}, and cannot be reproduced; ask whoever gave it to you for a sound copy")
    try:
        target = inside(home, name)
        if _has(target, sha256):
            return
        source = next((source for place in places if _has(source := inside(place, name), sha256)), None)
    except ArtifactError as error:
        raise ReproduceError(f"{member.address}, source_files: {error}") from error
    if source is None:
        raise ReproduceError(
            f"{member.address} was made from {name} with sha256 {sha256[:12]}, which is neither in its commit nor in this project: "
            f"put that file at {name}, or take its result with --from-cache"
        )
    if target.exists():
        shutil.rmtree(target) if target.is_dir() else os.unlink(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, symlinks=True)
    else:
        shutil.copyfile(source, target, follow_symlinks=False)


def _has(path: Path, sha256: str) -> bool:
    return (path.is_file() or path.is_dir()) and sha256_path(path) == sha256


def _leaves(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _leaves(inner, f"{place}.{name}" if place else str(name))
    elif isinstance(value, (list, tuple)) and value:
        for index, inner in enumerate(value):
            yield from _leaves(inner, f"{place}.{index}")
    else:
        yield place, json.dumps(value)
