"""Checkpoint store of a job (`placement.checkpoint_url`): checked before the job, cleared after it."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pedigree.configs.language.execution import Placement
from pedigree.configs.language.graph import Node
from pedigree.data.artifacts.mirror import Mirror, Producer, saved_token
from pedigree.data.store import storage
from pedigree.data.store.storage import ContentChanged, StoreError
from pedigree.data.store.untrusted import ArtifactError
from pedigree.pipelines.jobs.context import StageFailed


def prove(node: Node, placement: Placement) -> None:
    """Write and remove a small object before expensive work starts.

    Raises:
        StageFailed: the store cannot be used; with the remedy.
    """
    problem = None if placement.checkpoint_url is None else problem_of(placement.checkpoint_url)
    if problem:
        raise StageFailed(node.address, "refused", problem)


def problem_of(url: str) -> str | None:
    """Why a store cannot be used, with the remedy, by writing and removing a small object; None if it can."""
    try:
        storage.check(url)
    except StoreError as error:
        return _remedied(error)
    return None


def _remedied(error: StoreError) -> str:
    return f"placement.checkpoint_url {error}; or remove it from the profile"


@dataclass(frozen=True)
class RemoteProgress:
    """Work in the store that is ahead of the local work; the job resumes from it."""

    mirror: Mirror
    reached: str
    """Name of a checkpoint; empty for chunks."""
    producer: Producer | None
    """The code that produced it; None if unknown."""
    problem: str
    """Why the code is unknown."""


def ahead(node: Node, placement: Placement, scratch: Path, here: Sequence[str]) -> RemoteProgress | None:
    """Work of another machine that is ahead of the local checkpoints `here` and chunks.

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
            made, problem = mirror.producer(), "its version was not recorded"
        except ContentChanged as error:
            made, problem = None, str(error)
    except StoreError as error:
        raise StageFailed(node.address, "refused", _remedied(error)) from error
    return RemoteProgress(mirror, there[-1] if newer else "", made, problem)


def has_work(placement: Placement, key: str) -> bool:
    """Whether another machine has left work to resume from."""
    if placement.checkpoint_url is None:
        return False
    mirror = Mirror.of(placement.checkpoint_url, key)
    try:
        return bool(mirror.checkpoints() or mirror.chunks())
    except StoreError:  # `prove` reports it before the job starts
        return False


def clear(url: str | None, scratch: Path) -> None:
    """Remove what the job of a scratch folder has uploaded, unless another machine is using it. Failures are logged, not raised."""
    if url is None:
        return
    mirror = Mirror.of(url, scratch.name)
    try:
        problem = None if mirror.clear(saved_token(scratch)) else f"{mirror.url} was not cleared: another machine is using it"
    except (StoreError, ArtifactError) as error:
        problem = f"{mirror.url} could not be cleared, remove it manually: {error}"
    if problem is not None:
        logging.getLogger(__name__).warning(problem)
