"""Exchange a recipe's artifacts and raw inputs with the remote: `pedigree pull` and `pedigree push`."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass

from pedigree.configs.base.paths import place_of, written_of
from pedigree.configs.language.graph import Node
from pedigree.data.artifacts.artifacts import ArtifactError
from pedigree.data.artifacts.source_files import sha256_of
from pedigree.pipelines.jobs.context import RunContext
from pedigree.pipelines.jobs.events import StageEnded
from pedigree.pipelines.ledger import raw_inputs
from pedigree.pipelines.ledger.identity import HASHES
from pedigree.pipelines.ledger.transfers import RemoteError
from pedigree.pipelines.quantities import counted
from pedigree.pipelines.run.runs import StageEnd, run_graph


def pull(run: RunContext, selection: Collection[str] | None = None) -> list[StageEnd]:
    """Fetch the files of all finished stages from the cache and the remote without running any; unfinished stages fail."""
    run.ledger.remote.require("pull from")
    run.fetch, run.make = True, False
    run.ledger.any_code = True
    return run_graph(run, selection)


def push(run: RunContext) -> tuple[int, int]:
    """Send a recipe's recorded artifacts and the run cache to the remote; return how many objects and entries were new there."""
    with closing(run.ledger):
        run.ledger.remote.require("push to")
        objects = 0
        for node in run.graph.nodes.values():
            sent = run.ledger.push(node, run.transferring(node.address, "sending"))
            if run.ledger.locks.entry(node.address) is None:
                run.watch(StageEnded(node.address, "skipped", "there is no result to send"))
            else:
                run.watch(StageEnded(node.address, "sent", f"{sent} objects were new there" if sent else "nothing new"))
            objects += sent
        return objects, run.ledger.remote.send_past()


@dataclass(frozen=True)
class RawInputs:
    """What became of the raw inputs of finished stages."""

    moved: int
    """Number of files that were sent or fetched."""
    left: tuple[str, ...]
    """One line for each of the others that are not on both sides: what it is, and why."""


def push_inputs(run: RunContext) -> RawInputs:
    """Send the raw inputs of a recipe's finished stages to the remote."""
    sent, left = 0, dict[str, None]()
    with closing(run.ledger):
        run.ledger.remote.require("push to")
        for node, recorded in _finished(run, run.graph.nodes):
            before = sent
            for file in node.files:
                place, progress = place_of(run.project.root, file), run.transferring(node.address, "sending")
                if not place.exists():
                    left[f"{written_of(file)} is not on this machine"] = None
                    continue
                hashed = HASHES.files(place, run.transfer_progress(node.address).hashed)
                if sha256_of(hashed) != recorded.get(file):
                    left[f"{written_of(file)} has changed since {node.address} was made: run it, then push again"] = None
                else:
                    sent += raw_inputs.send(run.project, run.ledger.remote, place, hashed, progress)
            new = f"{counted(sent - before, 'file')} of raw inputs were new there" if sent > before else "raw inputs: nothing new"
            run.watch(StageEnded(node.address, "sent", new))
    return RawInputs(sent, tuple(left))


def pull_inputs(run: RunContext, selection: Collection[str], *, fetch: bool) -> RawInputs:
    """Fetch, or only list, the raw inputs of finished stages that are not on this machine."""
    found, left = 0, dict[str, None]()
    with closing(run.ledger):
        for node, recorded in _finished(run, selection):
            for raw in raw_inputs.lacking(run.project, node, recorded):
                if fetch and raw_inputs.fetch(run.project, run.ledger.remote, raw.sha256, raw.target):
                    found += 1
                else:
                    where = f"nor in the remote: {raw_inputs.REMEDY}" if fetch else "which a stage that must run again needs"
                    left[f"{raw} is not on this machine, {where}"] = None
    return RawInputs(found, tuple(left))


def _finished(run: RunContext, selection: Collection[str]) -> Iterator[tuple[Node, Mapping[str, str]]]:
    """Stages with raw inputs that have a record, with the hashes there."""
    for address, node in run.graph.nodes.items():
        if node.files and address in selection:
            with suppress(ArtifactError, RemoteError):
                yield node, run.ledger.record(address).source_files
