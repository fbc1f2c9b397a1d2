"""Split scores by whether decontamination waivers let the items into training.

A score is split into items that overlap with training rows of the policy's ancestors under a waiver, and all others. Both parts are
computed from stored item scores without rerunning the evaluation.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pedigree.configs.language.kinds import recorded_kind
from pedigree.data.artifacts.artifacts import ArtifactError
from pedigree.pipelines.json_documents import Hidden
from pedigree.pipelines.lineage.ancestry import Pedigree
from pedigree.pipelines.lineage.evaluations import Evaluation, labels_of
from pedigree.pipelines.quantities import counted

Item = tuple[str, str]
"""(task, item id)."""


@dataclass(frozen=True)
class Waived:
    """Rows that a waiver kept in the training data of a policy."""

    stage: str
    """Address of the stage that applied the waiver."""
    benchmark: str
    because: str
    rows: int
    suite: Hidden[str]
    """Content hash of the benchmark."""
    items: Hidden[frozenset[Item]]
    """Items that the rows overlap with."""


@dataclass(frozen=True)
class Split:
    """A policy's score on a task, split in two; a part without items is None."""

    policy: str
    task: str
    contaminated: Mapping[str, int | float] | None
    """n, mean, and 95% interval."""
    clean: Mapping[str, int | float] | None
    """The same."""
    waivers: tuple[Waived, ...]


def waived_of(policy: Pedigree) -> list[Waived]:
    """The waivers in the ancestry of a policy that have kept rows, parents first."""
    return [found for ancestor in policy.material() if recorded_kind(ancestor.record.kind).removes_overlaps for found in _waived(ancestor)]


def splits_of(evaluation: Pedigree) -> list[Split]:
    """Split scores of each policy and task affected by a waiver; ArtifactError if the evaluation's rows are unavailable."""
    touching, found = touched(evaluation), []
    for one in labels_of(evaluation):
        tasks = {task: waivers for (label, task), waivers in touching.items() if label == one.label}
        found += _splits(one, tasks) if tasks else ()
    return found


def touched(evaluation: Pedigree) -> dict[tuple[str, str], tuple[Waived, ...]]:
    """(policy label, task) of every score affected by waivers → the waivers; reads only records."""
    policies = {given.label: given.producer for given in evaluation.record.inputs if given.port == "policies"}
    suites = {given.content for given in evaluation.record.inputs if given.port == "suites"}
    found: dict[tuple[str, str], tuple[Waived, ...]] = {}
    for one in labels_of(evaluation):
        waivers = [waiver for waiver in waived_of(evaluation.of(policies[one.label])) if waiver.suite in suites]
        for task in sorted({task for waiver in waivers for task, _ in waiver.items}):
            found[one.label, task] = tuple(waiver for waiver in waivers if any(item[0] == task for item in waiver.items))
    return found


def in_words(split: Split) -> str:
    """One line for the terminal."""
    kept = "; ".join(f"{counted(one.rows, 'row')} at {one.stage}, reason: {' '.join(one.because.split())}" for one in split.waivers)
    parts = (("overlapping items", split.contaminated), ("other items", split.clean))
    scores = ", ".join(f"{one['mean']:.3f} [{one['low']:.3f}, {one['high']:.3f}] on {one['n']} {which}" for which, one in parts if one)
    return f"waiver: {split.policy}, {split.task}: {scores or 'nothing measured'}; kept {kept}"


def _waived(stage: Pedigree) -> Iterator[Waived]:
    contents = {given.label: given.content for given in stage.record.inputs if given.port == "benchmarks"}
    for found in stage.record.metrics.get("waivers", ()):
        try:
            items = frozenset((str(task), str(name)) for task, names in found["items"].items() for name in names)
            if int(found["rows"]):
                yield Waived(stage.address, found["benchmark"], found["because"], found["rows"], contents[found["benchmark"]], items)
        except (AttributeError, KeyError, TypeError) as error:
            raise ArtifactError(f"metrics.waivers of {stage.address} is not in the format of a {stage.record.kind} stage") from error


def _splits(evaluation: Evaluation, tasks: Mapping[str, tuple[Waived, ...]]) -> Iterator[Split]:
    scores = evaluation.scores()
    kept = {item for waivers in tasks.values() for waiver in waivers for item in waiver.items}
    for task, waivers in tasks.items():
        own = {item: score for item, score in scores.items() if item[0] == task}
        parts = [{item: score for item, score in own.items() if (item in kept) == inside} for inside in (True, False)]
        contaminated, clean = ({"n": len(part), **evaluation.estimate(part)._asdict()} if part else None for part in parts)
        yield Split(evaluation.label, task, contaminated, clean, waivers)
