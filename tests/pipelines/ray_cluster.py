"""A real Ray of its own: a head with its dashboard and a second node, both on this machine.

Its packages are in a folder of their own, which neither Pedigree nor the jobs see.
"""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from free_ports import free_ports
from waiting import until

from pedigree.pipelines.jobs import ray_launcher

PACKAGES = (
    "ray==2.60.0", "aiohttp-cors==0.8.1", "colorful==0.5.8", "google-api-core==2.44.0", "google-auth==2.63.0", "opencensus==0.11.4",
    "opencensus-context==0.1.3", "opentelemetry-exporter-prometheus==0.66b2", "proto-plus==1.29.0", "pyasn1==0.6.5",
    "pyasn1-modules==0.4.2", "smart-open==9.0.2",
)  # fmt: skip
"""Of `ray[default]`, what the lock does not have."""
SECOND = "second"
CPUS = 2


def _packages() -> Path:
    """The folder of Ray and what it needs."""
    root = Path(sys.prefix) / "opt" / "ray"
    root.mkdir(parents=True, exist_ok=True)
    with (root / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (root / "whole").exists():
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade", "--target", str(root), *PACKAGES]
            try:
                subprocess.run(pip, check=True, capture_output=True, text=True)
            except subprocess.CalledProcessError as error:
                pytest.skip(f"Ray cannot be installed: {error.stderr}")
            (root / "whole").touch()
    return root


@dataclass
class Cluster:
    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="ray-")))  # sockets need a short path
    _nodes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    _wanted: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Name → arguments of `ray start`."""

    def start(self) -> None:
        self._environment = os.environ | {
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "PYTHONPATH": str(_packages()),
        }
        gcs, dashboard, clients = free_ports(3)
        self.address, self._gcs = f"http://127.0.0.1:{dashboard}", f"127.0.0.1:{gcs}"
        self._wanted["head"] = (
            "--head", f"--port={gcs}", "--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}",
            f"--ray-client-server-port={clients}", f"--temp-dir={self.folder}", "--disable-usage-stats",
        )  # fmt: skip
        until(self._has_joined, 120)
        self.start_second()

    def start_second(self) -> None:
        self._wanted[SECOND] = (f"--address={self._gcs}",)
        until(self._has_joined, 120)

    def _has_joined(self) -> bool:
        """Whether all nodes are there. On a busy machine Ray gives up after 30 s, and is started again."""
        for name, arguments in self._wanted.items():
            if name not in self._nodes or self._nodes[name].poll() is not None:
                self._node(name, *arguments)
        return self.nodes() == len(self._wanted)

    def kill(self, node: str) -> None:
        os.killpg(self._nodes[node].pid, signal.SIGKILL)
        self._nodes.pop(node).wait()
        del self._wanted[node]

    @contextmanager
    def away(self) -> Iterator[None]:
        """The dashboard does not answer."""
        dashboard = self.dashboard()
        os.kill(dashboard, signal.SIGSTOP)
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(ray_launcher, "ANSWER_S", 1.0)
                yield
        finally:
            os.kill(dashboard, signal.SIGCONT)

    @contextmanager
    def busy(self) -> Iterator[list[str]]:
        """Foreign jobs, of these IDs, have all cores that no other job has."""

        def taken() -> int:
            groups = self.ask("/api/v0/placement_groups?limit=10000")["data"]["result"]["result"]
            others = sum(job["status"] == "RUNNING" and not job["metadata"] for job in self.ask("/api/jobs/"))
            return others + sum(group["state"] == "CREATED" for group in groups)

        foreign = self._foreign(2 * CPUS - taken())
        until(lambda: taken() == 2 * CPUS)
        try:
            yield foreign
        finally:
            for job in foreign:
                self.stop_job(job)

    def occupy_head(self) -> list[str]:
        """Foreign jobs take all cores of the head node; return their IDs."""
        jobs = self._foreign(CPUS, entrypoint_resources={"node:__internal_head__": 0.1})  # every head node has 1 of it
        until(lambda: all(self.jobs()[job] == "RUNNING" for job in jobs))
        return jobs

    def _foreign(self, count: int, **where: Any) -> list[str]:
        """Submit jobs of one core each; return their IDs."""
        job = {"entrypoint": "sleep 600", "entrypoint_num_cpus": 1, **where}
        return [self.ask("/api/jobs/", job)["submission_id"] for _ in range(count)]

    def nodes(self) -> int:
        """Number of nodes that are alive."""
        with suppress(OSError):
            return sum(node["state"] == "ALIVE" for node in self.ask("/api/v0/nodes")["data"]["result"]["result"])
        return 0

    def jobs(self) -> dict[str, str]:
        """Name of each job → its status."""
        return {(job["metadata"] or {}).get("job_name", job["submission_id"]): job["status"] for job in self.ask("/api/jobs/")}

    def stop_job(self, name: str) -> None:
        self.ask(f"/api/jobs/{name}/stop", {})

    def ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.address + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    def dashboard(self) -> int:
        """PID of the process that serves the Jobs API."""
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                line = (folder / "cmdline").read_bytes()
                if b"dashboard/dashboard.py" in line and str(self.folder).encode() in line:
                    return int(folder.name)
        raise AssertionError("the dashboard does not run")

    def stop(self) -> None:
        for node in [*self._nodes]:
            with suppress(OSError):
                self.kill(node)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _node(self, name: str, *arguments: str) -> None:
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", f"--num-cpus={CPUS}", "--num-gpus=0",
                   "--node-ip-address=127.0.0.1", "--object-store-memory=80000000", "--dashboard-agent-listen-port=0"]  # fmt: skip
        with (self.folder / f"{name}.out").open("ab") as log:
            self._nodes[name] = subprocess.Popen(
                [*command, *arguments], env=self._environment, stdout=log, stderr=log, start_new_session=True
            )
