"""A real Slurm of its own: munged, a controller and two nodes, all on this machine, as the user who runs the tests.

The programs are those in PATH, or Debian's packages unpacked into `.venv`: nothing is installed.
"""

import fcntl
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from free_ports import free_ports
from waiting import until

PACKAGES = ("slurmctld", "slurmd", "slurm-client", "slurm-wlm-basic-plugins", "munge", "libmunge2", "libhwloc15", "liblua5.1-0")
NODES = ("n1", "n2")
CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
{plugins}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
SchedulerParameters=sched_interval=1,bf_interval=1
ReturnToService=2
SlurmdTimeout=300
KillWait=5
OverTimeLimit=0
SlurmdParameters=config_overrides
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 RealMemory=4000
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 RealMemory=4000
PartitionName=main Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP PriorityTier=1
PartitionName=urgent Nodes=n1,n2 MaxTime=INFINITE State=UP PriorityTier=2
PreemptType=preempt/partition_prio
PreemptMode=CANCEL
JobSubmitPlugins=lua
"""
LIMIT = """
function slurm_job_submit(job, partitions, user)
  local full = io.open("{folder}/full")
  if not full then return slurm.SUCCESS end
  full:close()
  slurm.log_user("QOSMaxSubmitJobPerUserLimit")
  return 2050
end
function slurm_job_modify(job, record, partitions, user)
  return slurm.SUCCESS
end
"""
"""While the file `full` exists, a submission gets the answer that a limit of accounting gives, which takes a database."""


def _programs() -> tuple[Path, dict[str, str]]:
    """The folder above Slurm's programs, and variables of theirs."""
    if shutil.which("slurmctld") and shutil.which("munged"):
        return Path("/usr"), {}
    root = Path(sys.prefix) / "opt" / "slurm"
    root.mkdir(parents=True, exist_ok=True)
    with (root / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (root / "whole").exists():
            try:
                subprocess.run(["apt-get", "--quiet=2", "download", *PACKAGES], cwd=root, check=True, capture_output=True, text=True)
            except (OSError, subprocess.CalledProcessError) as error:
                pytest.skip(f"Slurm is not installed, and its packages cannot be had: {error}")
            for package in root.glob("*.deb"):
                subprocess.run(["dpkg-deb", "--extract", package, root], check=True)
                package.unlink()
            (root / "whole").touch()
    libraries = next((root / "usr" / "lib").glob("*/slurm-wlm"))
    return root / "usr", {"LD_LIBRARY_PATH": f"{libraries.parent}:{libraries}", "PLUGINS": str(libraries)}


@dataclass
class Cluster:
    folder: Path
    environment: dict[str, str] = field(default_factory=dict)
    """For Slurm's clients."""
    _daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self) -> None:
        self._root, given = _programs()
        plugins = given.pop("PLUGINS", None)
        path = os.pathsep.join([str(self._root / "bin"), str(self._root / "sbin"), os.environ["PATH"]])
        self.environment = given | {"SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": path}
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        self.folder.chmod(0o755)
        for name in ("state", *(f"spool-{node}" for node in NODES)):
            (self.folder / name).mkdir()
        text = CONFIG.format(
            host=socket.gethostname().partition(".")[0], ports=free_ports(3), folder=self.folder,
            user=subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout.strip(),
            plugins=f"PluginDir={plugins}" if plugins else "",
        )  # fmt: skip
        (self.folder / "slurm.conf").write_text(text)
        (self.folder / "job_submit.lua").write_text(LIMIT.format(folder=self.folder))
        names = {"socket": "sock", "key-file": "key", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        files = [f"--{option}={self.folder / 'munge'}.{end}" for option, end in names.items()]
        self._daemon("munged", "munged", "--force", "--foreground", *files)
        until((self.folder / "munge.sock").exists)
        self.start_controller()
        for node in NODES:
            self.start_node(node)
        until(self.is_idle)

    def is_idle(self) -> bool:
        return set(self.ask("sinfo", "--noheader", "--format=%T").split()) == {"idle"}

    @contextmanager
    def drained(self, *nodes: str) -> Iterator[None]:
        """The nodes, by default all, take no job."""
        names = ",".join(nodes or NODES)
        self.ask("scontrol", "update", f"nodename={names}", "state=drain", "reason=test")
        try:
            yield
        finally:
            self.ask("scontrol", "update", f"nodename={names}", "state=resume")
            until(lambda: "drain" not in self.ask("sinfo", "--noheader", "--format=%T"))

    @contextmanager
    def closed(self) -> Iterator[None]:
        """The partition takes no further jobs."""
        self.ask("scontrol", "update", "partition=main", "state=drain")
        try:
            yield
        finally:
            self.ask("scontrol", "update", "partition=main", "state=up")

    @contextmanager
    def full(self) -> Iterator[None]:
        """The user may submit no further jobs."""
        (self.folder / "full").touch()
        try:
            yield
        finally:
            (self.folder / "full").unlink()

    @contextmanager
    def without_controller(self) -> Iterator[None]:
        self.kill("controller")
        try:
            yield
        finally:
            self.start_controller()

    @contextmanager
    def configured(self, lines: str) -> Iterator[None]:
        """With further lines in its configuration."""
        path = self.folder / "slurm.conf"
        before = path.read_text()

        def configure(text: str) -> None:
            with self.without_controller():
                path.write_text(text)

        configure(before + lines)
        try:
            yield
        finally:
            configure(before)

    @contextmanager
    def lost_node(self, node: str) -> Iterator[None]:
        """The node is silent, and Slurm is told that it is lost; what runs there goes on. It would find out itself after `SlurmdTimeout`,
        which no node of a busy machine is to exceed."""
        self.kill(node)
        self.ask("scontrol", "update", f"nodename={node}", "state=down", "reason=silent")
        try:
            yield
        finally:
            self.start_node(node)
            until(lambda: self.ask("sinfo", "--noheader", f"--nodes={node}", "--format=%t").split()[:1] in (["idle"], ["mix"], ["alloc"]))

    def start_controller(self) -> None:
        self._daemon("controller", self._name("slurmctld"), "-D")
        until(lambda: self.ask("sinfo", "--noheader"))  # a node that does not reach it tries again after half a minute

    def start_node(self, node: str, without: Path | None = None) -> None:
        """`without`: a folder that the node does not have."""
        self._daemon(
            node, self._name("slurmd"), "-D", "-N", node, "-d", str(self._root / "sbin" / self._name("slurmstepd")), without=without
        )

    def kill(self, daemon: str) -> None:
        if process := self._daemons.pop(daemon, None):  # none where it could not be started again
            process.kill()
            process.wait()

    def ask(self, *arguments: str) -> str:
        """What one of Slurm's clients prints; empty while the controller starts."""
        return subprocess.run(arguments, env=os.environ | self.environment, capture_output=True, text=True).stdout.strip()

    def job(self, name: str, field: str) -> str:
        """A field, in the letters of squeue, of the job of this name that is not over."""
        return self.ask("squeue", "--noheader", "--me", f"--name={name}", f"--format={field}")

    def has_saved(self, token: str) -> bool:
        """Whether a controller that is started anew will know the job."""
        with suppress(FileNotFoundError):
            return token.encode() in (self.folder / "state" / "job_state").read_bytes()
        return False

    def stop(self) -> None:
        for daemon in [*self._daemons]:
            with suppress(OSError):
                self.kill(daemon)

    def _name(self, program: str) -> str:
        return program if (self._root / "sbin" / program).exists() else f"{program}-wlm"

    def _daemon(self, name: str, program: str, *arguments: str, without: Path | None = None) -> None:
        hidden = ["bwrap", "--die-with-parent", "--dev-bind", "/", "/", "--tmpfs", str(without)] if without else []
        with (self.folder / f"{name}.out").open("ab") as log:
            self._daemons[name] = subprocess.Popen(
                [*hidden, str(self._root / "sbin" / program), *arguments], env=os.environ | self.environment, stdout=log, stderr=log
            )
