"""All launchers as one: the placement of a job says where it is submitted, its handle where it is."""

from contextlib import suppress
from pathlib import Path
from typing import Any

from pedigree.configs.base.project import Project
from pedigree.configs.language.execution import Numerics, Scheduler
from pedigree.data.store.fence import Fence
from pedigree.pipelines.jobs.kubernetes_launcher import KubernetesLauncher
from pedigree.pipelines.jobs.launcher import Away, LocalLauncher, Status
from pedigree.pipelines.jobs.ray_launcher import RayLauncher
from pedigree.pipelines.jobs.scratch_state import JOB, Handle, read_job
from pedigree.pipelines.jobs.slots import HeldSlots
from pedigree.pipelines.jobs.slurm import SlurmLauncher


class Launchers:
    """Starts, polls and ends jobs. Has no state of its own: the scratch folder holds all that is needed to find a job again."""

    def __init__(self, project: Project, local: LocalLauncher | None = None) -> None:
        self.local = local or LocalLauncher(project)
        self._schedulers = {each.name: each for each in (SlurmLauncher(project), RayLauncher(project), KubernetesLauncher(project))}

    def submit(self, scratch: Path, numerics: Numerics, attempt: int, place: HeldSlots | Scheduler, fence: Fence | None = None) -> Handle:
        """Start the job of a scratch folder in slots of this machine, or queue it."""
        before = read_job(scratch)
        if before is not None and self._of(before) is not self.local:
            with suppress(Away):  # it has been silent for long; if it comes back, the fence stops it
                self._of(before).cancel(before, grace_s=0.0)
            (scratch / JOB).unlink()
        if isinstance(place, HeldSlots):
            return self.local.submit(scratch, numerics, attempt, place, fence)
        launcher: Any = self._schedulers[place.type]
        return launcher.submit(scratch, numerics, attempt, place, fence)

    def poll(self, handle: Handle) -> Status:
        return self._of(handle).poll(handle)

    def cancel(self, handle: Handle, grace_s: float | None = None, stacks: bool = False) -> list[int]:
        """End a job; return its processes on this machine that have survived."""
        return self._of(handle).cancel(handle, grace_s, stacks)

    def find(self, scratch: Path) -> Handle | None:
        """The last job submitted for a scratch folder, even if its submitter died while submitting it."""
        known = read_job(scratch)
        if known is not None and self._of(known) is not self.local:
            return known.model_copy(update={"scratch": str(scratch)})  # its folder may have been moved since
        return self.local.find(scratch)

    def _of(self, handle: Handle) -> LocalLauncher | SlurmLauncher | RayLauncher | KubernetesLauncher:
        return self._schedulers.get(handle.launcher, self.local)
