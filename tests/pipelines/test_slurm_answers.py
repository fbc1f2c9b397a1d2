"""What answers of Slurm's programs mean. The programs are small scripts here; `test_slurm.py` has a Slurm."""

import os
from pathlib import Path

import pytest

from pedigree.configs.base.problems import PedigreeError
from pedigree.configs.base.project import Project
from pedigree.configs.language.execution import Numerics, Placement, Slurm
from pedigree.data.artifacts.artifacts import write_json
from pedigree.pipelines.jobs import attempts, slurm
from pedigree.pipelines.jobs.launcher import Deferred
from pedigree.pipelines.jobs.scratch_state import JOB, Handle, write_spec
from pedigree.pipelines.jobs.slurm import SlurmLauncher
from pedigree.pipelines.jobs.slurm_client import resources
from pedigree.stages.job.spec import JobSpec

ACCEPTS = 'for word in "$@"; do case $word in --comment=*) echo "7|PENDING||None|${word#--comment=}" > queue;; esac; done'
ZERO_BYTES = "sbatch: error: Batch job submission failed: Zero Bytes were transmitted or received"
BUSY = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"


class Site:
    """A launcher, and a Slurm whose queue is a file."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.scratch, self.launcher = folder, folder / "scratch", SlurmLauncher(Project(folder))
        self.scratch.mkdir()
        self.program("squeue", "cat queue")
        self.program("scontrol", "echo ExitCode=0:125")
        self.queue("")
        spec = JobSpec(address="lab/raw", kind="prepare_data", version=1, key="k", config={}, inputs={}, source_files={}, code="c",
                       numerics=Numerics(), placement=Placement())  # fmt: skip
        write_spec(self.scratch, spec)

    def program(self, name: str, *lines: str) -> None:
        path = self.folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("\n".join(["#!/bin/bash", f"cd {self.folder}", *lines, ""]))
        path.chmod(0o755)

    def queue(self, text: str) -> None:
        (self.folder / "queue").write_text(text)

    def submit(self, numerics: Numerics | None = None) -> Handle:
        return self.launcher.submit(self.scratch, numerics or Numerics(), 1, Slurm(type="slurm"))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(slurm, "ARRIVAL_S", 0.0)
    monkeypatch.setattr(slurm, "ASK_S", 0.0)
    return Site(tmp_path)


@pytest.mark.parametrize("answer", [f"echo '{ZERO_BYTES}' >&2; exit 1", f"echo '{BUSY}' >&2; exit 1", "kill -INT $$"])
def test_a_job_whose_acceptance_got_lost_is_found_in_the_queue_and_else_submitted_again(site: Site, answer: str) -> None:
    """The last: Ctrl-C in the terminal ended `sbatch`."""
    site.program("sbatch", ACCEPTS, answer)
    assert site.launcher.poll(site.submit()).waiting == "in Slurm's queue as job 7"
    site.queue("")
    site.program("sbatch", answer)
    with pytest.raises(Deferred, match="for Slurm to accept its job: "):
        site.submit()
    assert not (site.scratch / JOB).exists()


def test_a_listing_does_not_know_the_queue_from_before_the_job_was_submitted(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process has submitted it, and this one asked for another job a moment ago."""
    monkeypatch.setattr(slurm, "ASK_S", 3600.0)
    other, job = (Handle(launcher="slurm", scratch=str(site.scratch), attempt=1, told={"token": token}) for token in ("a" * 32, "b" * 32))
    assert site.launcher.poll(other).state == "unknown"
    site.queue(f"7|PENDING||None|{job.token}\n")
    assert SlurmLauncher(Project(site.folder)).poll(job).waiting == "in Slurm's queue as job 7"


def test_ctrl_c_does_not_reach_a_submission_that_waits_for_its_answer(site: Site) -> None:
    site.program("sbatch", ACCEPTS, "ps -o sid= -p $$ > session")
    site.submit()
    assert int((site.folder / "session").read_text()) != os.getsid(0)


def test_a_machine_that_cannot_start_a_process_now_says_nothing_about_a_job(site: Site) -> None:
    site.program("sbatch", ACCEPTS)
    handle = site.submit()
    for name in ("squeue", "sbatch"):
        (site.folder / "bin" / name).write_bytes(b"\x7fELF")
    assert site.launcher.poll(handle).state == "queued"
    with pytest.raises(Deferred, match="sbatch is temporarily unavailable: "):
        site.submit()


def test_a_rejection_is_one(site: Site) -> None:
    site.program("sbatch", "echo 'sbatch: error: invalid partition specified: nowhere' >&2; exit 1")
    with pytest.raises(PedigreeError, match="Slurm rejects the job of lab/raw: invalid partition specified: nowhere"):
        site.submit()


@pytest.mark.parametrize(("reported", "cause"), [("collective", "out_of_memory"), ("lost_engine", "out_of_memory"), ("bug", "bug")])
def test_a_rank_killed_for_its_memory_is_no_broken_collective(site: Site, reported: str, cause: str) -> None:
    """Another rank reports what it saw of the end of the one that was killed."""
    site.program("sbatch", ACCEPTS)
    handle = site.submit()
    write_json(site.scratch / "done.json", {"ok": False, "cause": reported, "message": "gloo: Connection closed by peer"})
    site.queue(f"7|OUT_OF_MEMORY|n1|OutOfMemory|{handle.token}\n")
    failure = attempts._failure(site.launcher.poll(handle), handle)
    assert failure and failure[0] == cause
    assert cause == "bug" or failure[1] == "the job exceeded the memory that Slurm gave it (job 7)"


def test_a_job_is_no_step_of_the_allocation_in_which_the_run_is(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """`srun` would give it one core, as the run's own allocation has, and refuse memory stated twice."""
    for name in ("SLURM_CPUS_PER_TASK", "SLURM_MEM_PER_CPU", "PMI_RANK", "SLURM_CLUSTERS", "SBATCH_ACCOUNT"):
        monkeypatch.setenv(name, "1")
    site.program("sbatch", ACCEPTS, "env > given")
    site.submit()
    given = {line.partition("=")[0] for line in (site.folder / "given").read_text().splitlines()}
    assert {name for name in given if name.startswith(("SLURM_", "SBATCH_", "PMI"))} == {"SLURM_CLUSTERS", "SBATCH_ACCOUNT"}


def test_nodes_that_are_done_wait_for_the_first_one_whatever_the_site_allows(site: Site) -> None:
    site.program("sbatch", ACCEPTS)
    site.submit(Numerics(nodes=2, world_size=2))
    assert "exec srun --wait=0 --kill-on-bad-exit=1 " in (site.scratch / "job.sh").read_text()


@pytest.mark.parametrize(
    ("numerics", "placement", "options", "taken"),
    [
        ({"device": "cuda", "world_size": 8, "threads": 8}, {"slots": 8}, (), ["--gpus-per-node=8", "--cpus-per-task=64"]),
        ({"device": "cuda", "world_size": 8, "nodes": 4, "threads": 3}, {"slots": 2}, (), ["--gpus-per-node=2", "--cpus-per-task=6"]),
        ({"device": "cuda", "threads": 5}, {"slots": 4, "engines": 4}, (), ["--gpus-per-node=4", "--cpus-per-task=20"]),
        ({"threads": 2}, {"slots": 3}, (), ["--cpus-per-task=3"]),
        ({"device": "cuda", "threads": 5}, {}, ("--cpus-per-task=9",), ["--gpus-per-node=1", "--cpus-per-task=5", "--cpus-per-task=9"]),
        ({"device": "cuda"}, {}, ("--cpus-per-gpu=12",), ["--gpus-per-node=1", "--cpus-per-gpu=12"]),
    ],
)
def test_the_threads_of_all_ranks_and_engines_have_cores(
    numerics: dict[str, object], placement: dict[str, object], options: tuple[str, ...], taken: list[str]
) -> None:
    """A task has one core where none are asked for. The last of two equal options counts; `--cpus-per-gpu` excludes the other."""
    launcher = Slurm(type="slurm", options=options)
    assert resources(Numerics.model_validate(numerics), Placement.model_validate(placement), launcher)[2:] == taken
