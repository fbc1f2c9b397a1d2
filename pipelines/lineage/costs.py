"""What an artifact cost: slot-hours of its job, and of the jobs of all that it was made from."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pedigree.data.artifacts.artifacts import ArtifactError, Run
from pedigree.pipelines.json_documents import rounded
from pedigree.pipelines.lineage.ancestry import read_pedigree


@dataclass(frozen=True)
class Cost:
    """Slot-hours of an artifact, and their price."""

    slot_hours: Annotated[float, rounded(3)]
    """Of all attempts of its job, including failed ones."""
    total_slot_hours: Annotated[float, rounded(3)]
    """With those of all ancestors."""
    cost: Annotated[float | None, rounded(2)]
    """Slot-hours times the profile's `machine.slot_hour_price`; null without one."""
    total_cost: Annotated[float | None, rounded(2)]
    """With that of all ancestors."""


def cost_of(artifact: Path, price: float | None) -> Cost | None:
    """The cost of an artifact; None if there is none, or its records are damaged."""
    try:
        pedigree = read_pedigree(artifact)
        own, total = slot_hours(pedigree.run), sum(slot_hours(one.run) for one in pedigree.parents_first())
    except ArtifactError:
        return None
    return Cost(own, total, own * price if price is not None else None, total * price if price is not None else None)


def slot_hours(run: Run) -> float:
    """Time of all attempts, times the slots that the job held on all its nodes; 0 if not recorded."""
    slots, nodes = run.placement.get("slots"), run.numerics.get("nodes", 1)
    held = slots * nodes if isinstance(slots, int) and isinstance(nodes, int) else 0
    return (run.seconds or 0.0) * held / 3600
