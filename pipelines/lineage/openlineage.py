"""Convert a pedigree to OpenLineage 2-0-2 run events and send them to a server.

Each artifact is a dataset, each stage that produced one is a run, and the recipe is the run's parent. Run ids are derived from artifact
ids, so sending is idempotent. https://openlineage.io/spec/2-0-2/OpenLineage.json
"""

import os
import ssl
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from pedigree.configs.base.problems import PedigreeError
from pedigree.pipelines.lineage.ancestry import Pedigree

PRODUCER = "urn:pedigree:lineage"
SPECIFICATION = "https://openlineage.io/spec/2-0-2/OpenLineage.json#/$defs"
FACETS = "https://openlineage.io/spec/facets"
NAMESPACE = "pedigree"
TIMEOUT_S = 20.0
ENDPOINT = "api/v1/lineage"
"""Default path, overridden by OPENLINEAGE_ENDPOINT."""


def events(pedigree: Pedigree) -> list[dict[str, Any]]:
    """START and COMPLETE events of every run in the ancestry, parents first.

    A run without recorded attempts has no times and therefore no events; its dataset is still an input of its children.
    """
    found = []
    for made in pedigree.parents_first():
        attempts = [attempt for attempt in made.run.attempts if attempt.started_at and attempt.ended_at]
        if attempts:
            body = _body(made, pedigree)
            found.append({**body, "eventType": "START", "eventTime": attempts[0].started_at, "outputs": []})
            found.append({**body, "eventType": "COMPLETE", "eventTime": attempts[-1].ended_at})
    return found


def send(found: Sequence[Mapping[str, Any]], environment: Mapping[str, str] = os.environ) -> str:
    """Post the events in order to OPENLINEAGE_URL with the key OPENLINEAGE_API_KEY; return the address of the endpoint.

    Raises:
        PedigreeError: with the server's response and the number of accepted events.
    """
    address = f"{environment['OPENLINEAGE_URL'].rstrip('/')}/{environment.get('OPENLINEAGE_ENDPOINT', ENDPOINT).lstrip('/')}"
    if not address.startswith(("http://", "https://")):
        raise PedigreeError(f"OPENLINEAGE_URL is {environment['OPENLINEAGE_URL']!r}: it must begin with http:// or https://")
    import httpx  # 0.1 s, which other formats need not wait for

    key = environment.get("OPENLINEAGE_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    trusted = ssl.create_default_context()  # the system's certificates, those of a company included
    for number, event in enumerate(found):
        try:  # a redirect is an error: the request would be repeated without its event, and the key sent to another server
            answer = httpx.post(address, json=event, headers=headers, timeout=TIMEOUT_S, verify=trusted, follow_redirects=False)
            if answer.is_success:
                continue
            body = answer.text[:300].strip()
            problem = f"returned {answer.status_code} {answer.reason_phrase}{f' ({body})' if body else ''}"
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            problem = f"could not be reached within {TIMEOUT_S:.0f} s ({error})"
        remedy = "check OPENLINEAGE_URL and OPENLINEAGE_API_KEY and retry; resending is safe"
        raise PedigreeError(f"{address} {problem} after accepting {number} of {len(found)} events: {remedy}")
    return address


def run_id(*what: str) -> str:
    """Deterministic UUID."""
    return str(uuid.uuid5(uuid.NAMESPACE_URL, ":".join((PRODUCER, *what))))


def _body(made: Pedigree, whole: Pedigree) -> dict[str, Any]:
    """Common fields of both events of a run."""
    inputs = dict.fromkeys(given.producer for given in made.record.inputs)
    return {
        "producer": PRODUCER,
        "schemaURL": f"{SPECIFICATION}/RunEvent",
        "run": {"runId": run_id(made.id), "facets": _run_facets(made, whole)},
        "job": {"namespace": NAMESPACE, "name": made.address, "facets": _job_facets(made)},
        "inputs": [_dataset(whole.of(identifier)) for identifier in inputs],
        "outputs": [_dataset(made)],
    }


def _run_facets(made: Pedigree, whole: Pedigree) -> dict[str, Any]:
    recipe = whole.address.partition("/")[0]
    parent = {"run": {"runId": run_id("recipe", recipe, whole.id)}, "job": {"namespace": NAMESPACE, "name": recipe}}
    run = made.run.as_json()
    return {
        "parent": _facet(f"{FACETS}/1-0-1/ParentRunFacet.json#/$defs/ParentRunFacet", **parent),
        "pedigree_config": _custom(kind=made.record.kind, version=made.record.version, config=made.record.config),
        "pedigree_numerics": _custom(numerics=run.get("numerics", {}), marks=list(made.record.marks)),
        "pedigree_environment": _custom(environment=run.get("environment", {}), hardware=run.get("hardware", {})),
        "pedigree_attempts": _custom(attempts=run.get("attempts", []), fingerprint=run.get("fingerprint", {}).get("sha256")),
    }


def _job_facets(made: Pedigree) -> dict[str, Any]:
    """Code of the last attempt, addressed by SWHID because a record names no git server."""
    code = made.run.code
    if code is None or not code.commit:
        return {}
    location = {"type": "git", "url": f"swh:1:rev:{code.commit}", "version": code.commit, "path": f"stages/{made.record.kind}/run.py"}
    schema = f"{FACETS}/1-0-1/SourceCodeLocationJobFacet.json#/$defs/SourceCodeLocationJobFacet"
    return {
        "sourceCodeLocation": _facet(schema, **location),
        "pedigree_code": _custom("JobFacet", dirty=code.dirty, patch_sha256=code.patch_sha256),
    }


def _dataset(made: Pedigree) -> dict[str, Any]:
    record = made.record
    version = _facet(f"{FACETS}/1-0-1/DatasetVersionDatasetFacet.json#/$defs/DatasetVersionDatasetFacet", datasetVersion=record.content)
    artifact = _custom("DatasetFacet", type=record.type, id=record.id, key=record.key, content=record.content)
    return {"namespace": NAMESPACE, "name": made.address, "facets": {"version": version, "pedigree_artifact": artifact}}


def _facet(schema: str, **values: Any) -> dict[str, Any]:
    return {"_producer": PRODUCER, "_schemaURL": schema, **values}


def _custom(base: str = "RunFacet", /, **values: Any) -> dict[str, Any]:
    """A custom facet; the specification requires the schema of the base facet."""
    return _facet(f"{SPECIFICATION}/{base}", **values)
