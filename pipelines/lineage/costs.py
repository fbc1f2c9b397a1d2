"""What an artifact cost: slot-hours of its job, and of the jobs of all that it was made from."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated

from pedigree.configs.base.project import Project
from pedigree.data.artifacts.artifacts import ArtifactError, Run, open_artifact, read_run
from pedigree.pipelines.json_documents import rounded
from pedigree.pipelines.lineage.ancestry import Pedigree, read_pedigree


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


def costs_of(project: Project, addresses: Sequence[str], price: float | None) -> dict[str, Cost]:
    """Address → cost of its artifact; those that are missing or have damaged records are left out. `addresses` are in graph order: the
    records of a descendant include those of its ancestors, so that few files are parsed.
    """
    found: dict[str, Cost] = {}
    known: list[Pedigree] = []
    for address in reversed(addresses):
        folder = project.artifact(address)
        with suppress(ArtifactError):
            identifier, run = open_artifact(folder).record.id, read_run(folder / "run.json")
            whole = next((pedigree.of(identifier) for pedigree in known if identifier in pedigree.entries), None)
            if whole is None:
                known.append(whole := read_pedigree(folder))
            own, inherited = slot_hours(run), sum(slot_hours(one.run) for one in whole.parents_first()[:-1])
            hours = own, own + inherited
            found[address] = Cost(*hours, *(None if price is None else spent * price for spent in hours))
    return found


def slot_hours(run: Run) -> float:
    """Time of all attempts, times the slots that the job held on all its nodes; 0 if not recorded."""
    slots, nodes = run.placement.get("slots"), run.numerics.get("nodes", 1)
    held = slots * nodes if isinstance(slots, int) and isinstance(nodes, int) else 0
    return (run.seconds or 0.0) * held / 3600
