"""What a job is started with, how it is ended, and what is said of it, on this machine."""

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from running_lab import RANKS, Lab, goes_on, outcomes, read, running_scratch
from waiting import InThread, deadline, until

from pedigree.configs.base.problems import PedigreeError
from pedigree.configs.language.execution import Numerics, Placement
from pedigree.data.artifacts.artifacts import write_json
from pedigree.pipelines.jobs import ray_launcher
from pedigree.pipelines.jobs.context import StageFailed
from pedigree.pipelines.jobs.job_environment import job_environment
from pedigree.pipelines.jobs.joining import join
from pedigree.pipelines.jobs.launcher import LocalLauncher, Status, job_command
from pedigree.pipelines.jobs.processes import Process, processes_of
from pedigree.pipelines.jobs.scratch_state import JOB, Handle, write_spec
from pedigree.pipelines.jobs.slots import Pool, slots
from pedigree.pipelines.run.runs import run_graph
from pedigree.stages.job.meeting import MEETING, Meeting
from pedigree.stages.job.spec import JobSpec


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path, processes=True)


def only_sft_is_left(lab: Lab, numerics: str) -> None:
    """A lab under a profile with these numerics, whose `sft` is the only job to come."""
    lab.write("configs/recipes/lab.yaml", RANKS)
    lab.edit("configs/execution/lab.yaml", "threads: 1", f"threads: 1, {numerics}")
    lab.processes = False
    run_graph(lab.run(), ["lab/suite", "lab/raw", "lab/clean", "lab/base"])
    lab.processes = True


def test_launcher_ends_a_group_that_ignores_sigterm(lab: Lab, tmp_path: Path) -> None:
    scratch = lab.root / ".pedigree" / "scratch" / "x"
    scratch.mkdir(parents=True)
    launcher = LocalLauncher(lab.project)
    child = subprocess.Popen(
        ["python3", "-c", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"],
        env=lab.environment | {"PEDIGREE_JOB": str(scratch)}, start_new_session=True,
    )  # fmt: skip
    until(lambda: list(processes_of(scratch)))
    run = lab.run()
    numerics, _ = run.execution.of("prepare_data", "raw")
    (scratch / "spec.json").write_text('{"code": "none"}')
    with slots(Pool(tmp_path / "pool", ("0",)), 1, job=scratch / "job.json") as held:
        handle = launcher.submit(scratch, numerics, 1, held)  # sweeps what an earlier attempt has left
    assert child.wait(deadline(30)) == -9
    until(lambda: launcher.poll(handle).state != "running")
    assert launcher.poll(handle).state == "failed"  # there is no such code


def test_torchrun_gives_its_ranks_the_grace_of_the_profile(tmp_path: Path) -> None:
    """By its own 30 seconds, it would kill ranks while they write a checkpoint of 100 GB."""
    from torch.distributed.run import config_from_args, parse_args

    command = job_command(tmp_path, Numerics(world_size=2), 600)
    given = parse_args(command[command.index("pedigree.stages.training.ranks") + 1 :])
    assert config_from_args(given)[0].shutdown_timeout == 600


def test_a_job_that_is_dying_runs_until_it_is_known_how_it_died(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first thread is gone and others are not: to `/proc` a zombie already, and no exit code yet."""
    code = "import ctypes, threading, time; threading.Thread(target=time.sleep, args=[60]).start(); ctypes.CDLL(None).pthread_exit(None)"
    monkeypatch.setattr("pedigree.pipelines.jobs.launcher.job_command", lambda scratch, numerics, grace_s: [sys.executable, "-c", code])
    scratch = lab.root / ".pedigree" / "scratch" / "x"
    scratch.mkdir(parents=True)
    (scratch / "spec.json").write_text('{"code": "none"}')
    launcher = LocalLauncher(lab.project)
    numerics, _ = lab.run().execution.of("prepare_data", "raw")
    with slots(Pool(tmp_path / "pool", ("0",)), 1, job=scratch / "job.json") as held:
        handle = launcher.submit(scratch, numerics, 1, held)
    pid = handle.told["process"]["pid"]
    until(lambda: Process.of(pid) is None)
    assert launcher.poll(handle).state == "running"
    os.kill(pid, signal.SIGKILL)
    until(lambda: launcher.poll(handle).state != "running")
    assert launcher.poll(handle).exit_code == -signal.SIGKILL


@pytest.mark.proves("numerics.world_size")
@pytest.mark.slow
def test_two_ranks_run_under_torchrun_and_cancel_reaches_them(lab: Lab) -> None:
    """torchrun gives every rank a session of its own: a signal to the job's process group does not reach them."""
    only_sft_is_left(lab, "world_size: 2")
    lab.knobs(sft={"seconds": 60})
    cancelled = threading.Event()
    run = lab.run(cancelled=cancelled)
    thread = InThread(run_graph, run)
    until(lambda: lab.runs().count("sft") == 2 and running_scratch(lab, "sft"), 90, alive=thread.alive)
    scratch = running_scratch(lab, "sft")
    assert scratch and len(list(processes_of(scratch))) == 3
    cancelled.set()
    ends = thread.join(60)
    assert not list(processes_of(scratch)) and isinstance(ends[-1], StageFailed)
    assert read(lab, "raw", "run.json")["numerics"]["world_size"] == 1  # data stages have one rank whatever the profile


@pytest.mark.proves("numerics.nodes")
@pytest.mark.slow
def test_a_job_on_two_nodes_has_half_of_its_ranks_where_pedigree_join_runs(lab: Lab) -> None:
    only_sft_is_left(lab, "world_size: 2, nodes: 2")
    heard: list[str] = []

    def hears(text: str) -> None:
        heard.append(text)
        if len(heard) == 2:
            raise KeyboardInterrupt  # by which it ends

    thread = InThread(join, lab.project, hears)
    assert outcomes(lab)["sft"] == "ran" and lab.runs().count("sft") == 2
    with pytest.raises(KeyboardInterrupt):
        thread.join(60)
    assert (lab.project.private / "logs" / "lab" / f"sft-{os.uname().nodename}.txt").exists()
    assert heard[0].startswith("lab/sft: a node of the job that ") and heard[1] == "lab/sft: the node ended with exit code 0"


def test_a_job_on_two_nodes_runs_until_both_have_ended(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first node is gone at once; the other one would be killed as a process that was left behind."""
    monkeypatch.setattr("pedigree.pipelines.jobs.launcher.job_command", lambda scratch, numerics, grace_s: [sys.executable, "-c", ""])
    monkeypatch.setattr("pedigree.pipelines.jobs.launcher.read_done", lambda scratch: SimpleNamespace(ok=True))
    scratch = lab.root / ".pedigree" / "scratch" / "x"
    scratch.mkdir(parents=True)
    write_json(scratch / "spec.json", {"code": "none", "numerics": {"nodes": 2}})
    launcher = LocalLauncher(lab.project)
    numerics, _ = lab.run().execution.of("prepare_data", "raw")
    with slots(Pool(tmp_path / "pool", ("0",)), 1, job=scratch / "job.json") as held:
        handle = launcher.submit(scratch, numerics, 1, held)
    marked = lab.environment | {"PEDIGREE_JOB": str(scratch)}
    with subprocess.Popen([sys.executable, "-c", "input()"], env=marked, stdin=subprocess.PIPE, start_new_session=True) as other:
        until(lambda: list(processes_of(scratch)) == [other.pid])
        assert launcher.poll(handle).state == "running"
        other.communicate(b"\n")
    assert launcher.poll(handle).state == "succeeded" and other.returncode == 0


def test_pedigree_join_leaves_jobs_of_a_scheduler_to_its_nodes(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that joined would take the place of one of them. The second job is that of a machine, and needs more GPUs than are here."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    for key, launcher, server in zip(("0" * 64, "1" * 64), ("slurm", "local"), servers, strict=True):
        scratch = lab.project.scratch(key)
        spec = JobSpec(address="lab/sft", kind="sft", version=1, key=key, config={}, inputs={}, source_files={}, code="c",
                       numerics=Numerics(device="cuda", world_size=2, nodes=2), placement=Placement(slots=2))  # fmt: skip
        scratch.mkdir(parents=True)
        write_spec(scratch, spec)
        write_json(scratch / JOB, Handle(launcher=launcher, scratch=str(scratch), attempt=1, told={}).model_dump())
        write_json(scratch / MEETING, Meeting(host="127.0.0.1", port=server.getsockname()[1]).model_dump())
    with pytest.raises(PedigreeError, match=r"placement\.slots is 2"):
        join(lab.project, print)
    for server in servers:
        server.setblocking(False)
    servers[1].accept()
    with pytest.raises(BlockingIOError):
        servers[0].accept()


@pytest.mark.proves("numerics.deterministic")
def test_deterministic_gpu_jobs_are_told_so(tmp_path: Path) -> None:
    for device, deterministic, told in (("cuda", True, "1"), ("cuda", False, None), ("cpu", True, None)):
        numerics = Numerics.model_validate({"device": device, "deterministic": deterministic})
        environment = job_environment(tmp_path, numerics, tmp_path, [])
        assert environment.get("VLLM_BATCH_INVARIANT") == environment.get("FLASH_ATTENTION_DETERMINISTIC") == told


def test_gpu_jobs_find_the_compiler_of_the_lock_and_leave_no_holes_in_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The wheel's files are in `nvidia/cu13`, next to torch's."""
    ours = {"CUDA_HOME": None, "CUDA_PATH": None, "PYTORCH_ALLOC_CONF": None, "PYTORCH_CUDA_ALLOC_CONF": None}
    for name in ours:
        monkeypatch.delenv(name, raising=False)

    def told(device: str = "cuda") -> dict[str, str | None]:
        environment = job_environment(tmp_path, Numerics.model_validate({"device": device}), tmp_path, [])
        assert device == "cpu" or environment["PATH"].split(":")[0] == str(Path(sys.executable).parent)
        return {name: environment.get(name) for name in ours}

    assert told() == ours | {"PYTORCH_ALLOC_CONF": "expandable_segments:True"} and told("cpu") == ours
    installed = tmp_path / "nvidia_cuda_nvcc-13.0.88.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: nvidia-cuda-nvcc\nVersion: 13.0.88\n")
    (installed / "RECORD").write_text("nvidia/cu13/bin/nvcc.profile,,\nnvidia/cu13/bin/nvcc,,\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert told()["CUDA_HOME"] is None  # kernels would be compiled for minutes and not be linked
    (tmp_path / "nvidia" / "cu13" / "lib64").mkdir(parents=True)
    (tmp_path / "nvidia" / "cu13" / "lib64" / "libcudart.so").touch()
    assert told()["CUDA_HOME"] == str(tmp_path / "nvidia" / "cu13") and told("cpu") == ours
    monkeypatch.setenv("CUDA_PATH", "/usr/local/cuda")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    assert told() == ours | {"CUDA_PATH": "/usr/local/cuda", "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}


def test_a_job_on_a_cpu_takes_its_memory_from_the_kernel_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Page faults of blocks that are taken and given back again: 16384 of 4 KiB each for every one of 64 MiB, were they fresh."""
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.arena_max=3")  # what was asked for stays
    environment = job_environment(tmp_path, Numerics(), tmp_path, [])
    assert environment["GLIBC_TUNABLES"].startswith("glibc.malloc.arena_max=3:")
    taken = "bytes([120]) * (1 << 26)"
    faults = "__import__('resource').getrusage(0).ru_minflt"
    code = f"{taken}; before = {faults}; [{taken} and None for _ in range(8)]; print({faults} - before)"
    answer = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert int(answer.stdout) < 1000


@pytest.mark.proves("numerics.device")
def test_gpu_jobs_see_the_gpus_of_their_slots(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    numerics = Numerics(device="cuda")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")  # what a scheduler left us
    names = Pool.of(numerics, 4).names
    assert job_environment(tmp_path, numerics, tmp_path, [names[1], names[3]])["CUDA_VISIBLE_DEVICES"] == "5,7"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    names = Pool.of(numerics, 4).names
    assert job_environment(tmp_path, numerics, tmp_path, [names[1], names[3]])["CUDA_VISIBLE_DEVICES"] == "1,3"


@pytest.mark.proves("numerics.threads")
def test_a_job_on_a_cpu_starts_as_many_threads_as_it_may(tmp_path: Path) -> None:
    """Of torch, in a sum over more numbers than one thread would take."""
    code = "import os, torch; before = len(os.listdir('/proc/self/task')); torch.ones(1 << 22).exp().sum(); "
    code += "print(1 + len(os.listdir('/proc/self/task')) - before)"
    threads = 2 if os.cpu_count() == 1 else 1  # torch takes all cores by itself
    environment = job_environment(tmp_path, Numerics(threads=threads), tmp_path, [])
    answer = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert int(answer.stdout) == threads


@pytest.mark.proves("placement.slots")
def test_stages_run_side_by_side_while_their_slots_fit(lab: Lab) -> None:
    """`raw` and `suite` need nothing of each other, and the machine has two slots."""
    lab.processes = False
    lab.knobs(raw={"seconds": 0.5}, suite={"seconds": 0.5})
    waited: list[str] = []

    def watch(address: str, state: str, message: str = "", *_: object, **__: object) -> None:
        if state == "waiting":
            waited.append(message)
            (lab.root / "go").touch()

    run_graph(lab.run(watch=watch))
    assert not waited
    lab.edit("configs/execution/lab.yaml", "placement: {slots: 1,", "placement: {slots: 2,")
    lab.knobs(raw={"hold": "go"}, suite={"hold": "go"})  # whichever begins is at work until the other one waits
    with goes_on(lab):
        run_graph(lab.run(watch=watch), forced={"lab/raw", "lab/suite"})
    assert waited == ["for 2 slots of 2; 1 job of this project running"]


def test_a_job_is_no_rank_of_the_process_group_in_which_it_was_started(tmp_path, monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "KEPT"):
        monkeypatch.setenv(name, "7")
    environment = job_environment(tmp_path, Numerics(), tmp_path, [])
    left = {name for name in environment if "RANK" in name or name.startswith(("WORLD", "MASTER", "TORCHELASTIC"))}
    assert not left and environment["KEPT"] == "7"


def test_a_ray_that_does_not_answer_is_refused_before_a_run_and_says_nothing_about_a_job(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nowhere = "http://127.0.0.1:1"
    said = ray_launcher.problem_of(nowhere, 1, (("CPU", 1),))
    assert said and said.startswith(f"no Ray answers at {nowhere} (") and "correct placement.launcher.address" in said
    told = {"token": "0" * 32, "address": nowhere}
    handle = Handle(launcher="ray", scratch=str(tmp_path), attempt=1, told=told)
    assert lab.launcher.poll(handle) == Status("unknown", waiting=f"for Ray to answer at {nowhere}")
    monkeypatch.setattr(ray_launcher, "AWAY_S", 0)
    with pytest.raises(PedigreeError, match=rf"Ray does not answer at {nowhere}, so its job in .* may go on"):
        lab.launcher.cancel(handle)
