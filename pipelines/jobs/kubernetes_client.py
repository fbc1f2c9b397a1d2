"""The Kubernetes API through kubectl, with the user's configuration and credentials."""

import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple
from urllib.parse import quote, urlencode

from pedigree.configs.base.problems import PedigreeError

ANSWER_S = 30
REFUSALS = ("AlreadyExists", "BadRequest", "Forbidden", "Invalid", "NotFound", "RequestEntityTooLarge")
"""Reasons of the API for which the same request fails again. With any other one, or none, it says nothing about a job."""
GROUPS = {"Job": "/apis/batch/v1", "JobSet": "/apis/jobset.x-k8s.io/v1alpha2", "Pod": "/api/v1", "Event": "/api/v1"}
_REASON = re.compile(r"Error from server \((\w+)\): (.*)", re.DOTALL)


class Place(NamedTuple):
    """Where jobs are."""

    context: str
    """Of kubectl; empty in a pod, whose service account is used."""
    namespace: str


@dataclass(frozen=True)
class Answer:
    """What the API answers."""

    body: Any = None
    reason: str | None = ""
    """Of an error; None if the API did not answer."""
    message: str = ""

    @property
    def ok(self) -> bool:
        return self.reason == ""

    @property
    def is_refusal(self) -> bool:
        """Whether the same request would fail again. Admission webhooks give reasons of their own."""
        return (self.reason in REFUSALS and "exceeded quota" not in self.message) or "denied the request" in self.message


def is_installed() -> bool:
    return shutil.which("kubectl") is not None


def place_of(context: str | None, namespace: str | None) -> Place:
    """The context and namespace of a profile; those that kubectl uses now where it states none.

    Raises:
        PedigreeError: kubectl is not installed or has no such context.
    """
    code, found, error = _kubectl("config", "view", "--minify", "--output=json", context=context or "")
    if code and namespace and not context:
        return Place("", namespace)
    if code:
        raise PedigreeError(
            f"kubectl has no context ({error}): set placement.launcher.context to one of `kubectl config get-contexts` or, in a pod of the "
            "cluster, placement.launcher.namespace"
        )
    chosen = json.loads(found)["contexts"][0]
    return Place(chosen["name"], namespace or chosen["context"].get("namespace", "default"))


def path(place: Place, kind: str, name: str = "", **query: str) -> str:
    """Path of all objects of a kind, or of one, in the API."""
    parts = [GROUPS[kind], "namespaces", quote(place.namespace, safe=""), f"{kind.lower()}s", *([quote(name, safe="")] if name else [])]
    return "/".join(parts) + (f"?{urlencode(query)}" if query else "")


def ask(context: str, verb: Literal["get", "create", "delete"], where: str, body: Any = None) -> Answer:
    """The answer of the API.

    Raises:
        PedigreeError: kubectl is not installed.
    """
    given = ("--filename=-",) if body is not None else ()
    code, found, error = _kubectl(verb, f"--raw={where}", *given, context=context, stdin=json.dumps(body) if given else "")
    if code:
        match = _REASON.search(error)
        return Answer(None, *match.groups()) if match else Answer(None, None, error)
    try:
        return Answer(json.loads(found))
    except ValueError:  # a log
        return Answer(found)


def create(place: Place, manifest: dict[str, Any], **query: str) -> Answer:
    """Create an object; fields that the cluster does not know are refused."""
    answer = ask(place.context, "create", path(place, manifest["kind"], fieldValidation="Strict", **query), manifest)
    if answer.reason == "NotFound" and manifest["kind"] == "JobSet":
        return Answer(None, answer.reason, f"{answer.message}: several nodes need JobSet in the cluster (jobset.sigs.k8s.io)")
    return answer


def problem_of(context: str | None, namespace: str | None, manifest: str) -> str | None:
    """Why the cluster would refuse a job, by its manifest as JSON; None also if it cannot tell now."""
    try:
        answer = create(place_of(context, namespace), json.loads(manifest), dryRun="All")
    except PedigreeError as error:
        return str(error)
    return answer.message if answer.is_refusal else None


def _kubectl(*arguments: str, context: str = "", stdin: str = "") -> tuple[int, str, str]:
    """Exit code, output, and the error on one line."""
    chosen = (f"--context={context}",) if context else ()
    command = ["kubectl", *chosen, f"--request-timeout={ANSWER_S}s", *arguments]
    try:
        answer = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=2 * ANSWER_S, start_new_session=True)
    except subprocess.TimeoutExpired:
        return 1, "", "kubectl timed out"
    except FileNotFoundError as error:
        raise PedigreeError("kubectl is not in PATH: install it, or remove placement.launcher from the profile") from error
    except OSError as error:  # this machine cannot start a process now
        return 1, "", f"kubectl cannot start: {error}"
    return answer.returncode, answer.stdout, "; ".join(filter(None, map(str.strip, answer.stderr.splitlines())))
