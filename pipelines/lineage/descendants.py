"""What derives from a row: the artifacts made from those that hold it, followed through the records of all known artifacts."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter

from pedigree.configs.base.kind import MODELS
from pedigree.configs.language.graph import postorder
from pedigree.configs.language.kinds import measures, recorded_kind
from pedigree.data.artifacts.artifacts import Artifact, ArtifactError, Record
from pedigree.data.records import records
from pedigree.pipelines.lineage.ancestry import read_pedigree
from pedigree.pipelines.lineage.row_parents import NAMED_TYPES

HELD, TRAINED, BELOW = "holds it", "trained on it", "goes back to it"
HOWS = (HELD, TRAINED, BELOW)
"""Relations to a row, the closest first."""
Known = Mapping[str, tuple[Record, str]]
"""Id → record and address of all known artifacts, also of deleted ones, parents first."""


@dataclass(frozen=True)
class Descendant:
    """An artifact derived from the row, directly or through `way`."""

    id: str
    address: str
    kind: str
    type: str
    content: str
    how: str
    """`trained on it`, or `goes back to it` if derived from such a model or from its outputs."""
    way: tuple[str, ...]
    """Addresses from the first artifact that contains the row to this one."""
    certain: bool
    """False if an artifact on the way is unavailable and may or may not contain the row."""


def has_rows(record: Record) -> bool:
    return record.type in (*records.RECORDS, "scores")


def known_records(here: Sequence[tuple[str, Artifact]]) -> Known:
    """Records of the available artifacts, by address, and of their ancestors.

    Raises:
        ArtifactError: a lineage is damaged, or records form a cycle.
    """
    ids = {artifact.record.id for _, artifact in here}
    found: dict[str, tuple[Record, str]] = {}
    for address, artifact in here:
        if not ids.issuperset(given.producer for given in artifact.record.inputs):  # otherwise its lineage adds nothing
            pedigree = read_pedigree(artifact.path)
            found |= {one.id: (one.record, one.address) for one in pedigree.parents_first() if one.id not in found}
        found[artifact.record.id] = (artifact.record, address)
    graph = {identifier: [given.producer for given in record.inputs] for identifier, (record, _) in found.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise ArtifactError("the records of this project have a cycle: run `pedigree verify` to find the forged ones") from error
    order = postorder(sorted(graph, key=lambda identifier: (found[identifier][1], identifier)), graph.__getitem__)
    return {identifier: found[identifier] for identifier in order}


def descendants(known: Known, holds: Mapping[str, bool], blended: Mapping[str, bool]) -> list[Descendant]:
    """Artifacts derived from the row that do not contain it, parents first.

    `holds`: content → whether it contains the row, without artifacts that could not be searched; `blended`: content → whether it has rows
    written from several rows, one of them this, without artifacts that name no parents.
    """
    reached: dict[str, Descendant] = {}
    for identifier, (record, address) in known.items():
        held = holds.get(record.content)
        parents = [(given.port, reached[given.producer]) for given in record.inputs if given.producer in reached]
        steps = [(step, parent) for port, parent in parents if (step := _step(record, port, parent, holds, blended))]
        how = HELD if held else min((step for step, _ in steps), key=HOWS.index, default=None)
        if how is None:
            continue
        through = [parent for step, parent in steps if step == how]
        nearest = min(through, key=lambda parent: (not parent.certain, len(parent.way)), default=None)
        certain = held is not None if how == HELD or nearest is None else nearest.certain
        way = (*(nearest.way if nearest else ()), address)
        reached[identifier] = Descendant(identifier, address, record.kind, record.type, record.content, how, way, certain)
    return [found for found in reached.values() if found.how != HELD]


def _step(record: Record, port: str, parent: Descendant, holds: Mapping[str, bool], blended: Mapping[str, bool]) -> str | None:
    """Relation of an artifact to the row through one of its inputs."""
    if measures(record.kind, port) or parent.type == "item":  # items are only evaluated on; their scores are searched directly
        return None
    if parent.how != HELD:
        return BELOW
    if record.type in MODELS and port in recorded_kind(record.kind).trains_on:
        return TRAINED
    if record.type not in records.RECORDS:
        return BELOW
    if blended.get(record.content, record.config.get("method", {}).get("type") == "self_instruct"):
        return BELOW
    return HELD if holds.get(record.content, True) else None


def renamed(known: Known, linked: Collection[str]) -> set[str]:
    """Ids of artifacts whose rows may have other ids than in their inputs, and of dataset artifacts derived from these. Those in `linked`
    name the parents of their rows.
    """
    found: set[str] = set()
    for identifier, (record, _) in known.items():
        rows = {given.producer for given in record.inputs if known[given.producer][0].type != "item"}
        if (identifier not in linked and _may_rename(record, known)) or (has_rows(record) and not found.isdisjoint(rows)):
            found.add(identifier)
    return found


def _may_rename(record: Record, known: Known) -> bool:
    """Whether rows from other stages may have new ids in an artifact that does not name their parents."""
    if record.type not in records.RECORDS or record.type in NAMED_TYPES:
        return False
    kind = recorded_kind(record.kind)
    if kind.ids == "kept within kind":
        inputs = [known[given.producer][0] for given in record.inputs]
        makers = [_maker(given, known) for given in inputs if given.type in records.RECORDS and given.type != "item"]
        return any(maker is None or (maker.kind, maker.type) != (record.kind, record.type) for maker in makers)
    return bool(record.inputs) and kind.ids != "kept" and kind.subset_of is None


def _maker(record: Record, known: Known) -> Record | None:
    """The artifact of these rows above all stages that only leave some out; None if one of these lacks its input."""
    while port := recorded_kind(record.kind).subset_of:
        above = next((known[given.producer][0] for given in record.inputs if given.port == port), None)
        if above is None:
            return None
        record = above
    return record
