"""Whether the records of an artifact and its ancestors are one chain of hashes, and in what order they were made."""

from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter

from pedigree.configs.language.graph import postorder
from pedigree.data.artifacts.artifacts import ArtifactError, Record, Run, content_hash, stage_key


def record_problems(record: Record) -> list[str]:
    """Check a record's key and content against the fields they are hashes of."""
    found = []
    if stage_key(record.kind, record.version, record.config, record.edges, record.source_files) != record.key:
        found.append("its key is not the hash of its kind, version, config, inputs, and source files")
    if content_hash(record.files) != record.content:
        found.append("its content is not the hash of its files")
    return found


def lineage_problems(record: Record, lineage: Mapping[str, tuple[Record, Run]]) -> list[str]:
    """Check that the records of an artifact and its ancestors form one hash chain down to the raw sources."""
    known = {identifier: ancestor for identifier, (ancestor, _) in lineage.items()}
    found: list[str] = []
    for identifier, (ancestor, run) in lineage.items():
        name = run.address or identifier[:12]
        found += [f"the record of {name}: {problem}" for problem in record_problems(ancestor)]
        if ancestor.id != identifier:
            found.append(f"the record of {name} has id {ancestor.id[:12]} but is stored under {identifier[:12]}")
    reached: set[str] = set()
    waiting = [record]
    while waiting:
        child = waiting.pop()
        for given in child.inputs:
            parent = known.get(given.producer)
            if parent is None:
                found.append(f"it lacks {given.producer[:12]}, the {given.port} of a {child.kind}")
            elif parent.content != given.content:
                read = f"{given.port} with content {given.content[:12]}"
                found.append(f"a {child.kind} read {read}, but its producer wrote {parent.content[:12]}")
            elif given.producer not in reached:
                reached.add(given.producer)
                waiting.append(parent)
    found += [f"{identifier[:12]} is not an ancestor" for identifier in sorted(known.keys() - reached)]
    if not found:
        parents_first(record.id, known | {record.id: record})
    return found


def parents_first(root: str, records: Mapping[str, Record]) -> list[str]:
    """Ids of an artifact and its ancestors in topological order, the artifact itself last.

    Args:
        root: id of the artifact.
        records: by id; must include every id that an edge references.

    Raises:
        ArtifactError: the edges form a cycle. Hashes do not rule that out, since a key does not include the producers of its inputs.
    """
    graph: dict[str, list[str]] = {}
    waiting = [root]
    while waiting:
        identifier = waiting.pop()
        if identifier not in graph:
            graph[identifier] = [given.producer for given in records[identifier].inputs]
            waiting.extend(graph[identifier])
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        circle = " <- ".join(identifier[:12] for identifier in error.args[1])
        raise ArtifactError(f"the lineage has a cycle ({circle}), so it is forged: request a valid copy from its source") from error
    return postorder([root], graph.__getitem__)
