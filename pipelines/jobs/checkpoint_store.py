"""What the orchestrator does for a job with `placement.checkpoint_url`: proves it before, clears it away afterwards."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from configs.language.execution import Placement
from configs.language.graph import Node
from data.artifacts.mirror import Made, Mirror, kept_token
from data.store import storage
from data.store.storage import ContentChanged, StoreError
from data.store.untrusted import ArtifactError
from pipelines.jobs.context import StageFailed
from pipelines.jobs.scratch_state import known_spec


def prove(node: Node, placement: Placement) -> None:
    """Writes a small object and removes it, before anything expensive begins.

    Raises:
        StageFailed: the store cannot be used; with the remedy.
    """
    if placement.checkpoint_url is not None:
        try:
            storage.check(placement.checkpoint_url)
        except StoreError as error:
            raise StageFailed(node.address, "refused", f"placement.checkpoint_url {error}; or take it out of the profile") from error


@dataclass(frozen=True)
class Ahead:
    """Work in the store that goes further than what lies here: the job will go on from it."""

    mirror: Mirror
    reached: str
    """Name of a checkpoint; empty for chunks."""
    made: Made | None
    """None: nobody can tell by which code."""
    problem: str
    """Why not."""


def ahead(node: Node, placement: Placement, scratch: Path, here: Sequence[str]) -> Ahead | None:
    """What another machine has left for the job of a scratch folder, beyond its own checkpoints `here` and its chunks.

    Raises:
        StageFailed: the store cannot be used.
    """
    if placement.checkpoint_url is None:
        return None
    mirror = Mirror.of(placement.checkpoint_url, scratch.name)
    try:
        there, chunks = mirror.checkpoints(), mirror.chunks().keys() - {path.stem for path in (scratch / "chunks").glob("*.json")}
        newer = bool(there) and (not here or int(there[-1][5:]) > int(here[-1][5:]))
        if not (newer or chunks):
            return None
        try:
            made, problem = mirror.made(), "nobody has said which it was"
        except ContentChanged as error:
            made, problem = None, str(error)
    except StoreError as error:
        raise StageFailed(node.address, "refused", f"placement.checkpoint_url {error}; or take it out of the profile") from error
    return Ahead(mirror, there[-1] if newer else "", made, problem)


def has_work(placement: Placement, key: str) -> bool:
    """Whether another machine has left something to go on from."""
    if placement.checkpoint_url is None:
        return False
    mirror = Mirror.of(placement.checkpoint_url, key)
    try:
        return bool(mirror.checkpoints() or mirror.chunks())
    except StoreError:  # it is proved, and the mistake told, before the job begins
        return False


def clear(url: str | None, scratch: Path) -> None:
    """Removes what the job of a scratch folder has sent, unless another machine is at work on it; a failure is told, not raised."""
    if url is None:
        return
    mirror = Mirror.of(url, scratch.name)
    try:
        said = None if mirror.clear(kept_token(scratch)) else f"{mirror.url} is left alone: another machine is at work there"
    except (StoreError, ArtifactError) as error:
        said = f"{mirror.url} could not be cleared away, remove it yourself: {error}"
    if said is not None:
        logging.getLogger(__name__).warning(said)


def clear_after(scratch: Path) -> None:
    """The same for a stage that is done, by what its job was told."""
    spec = known_spec(scratch)
    if spec is not None:
        clear(spec.placement.checkpoint_url, scratch)
