"""Artifacts by way of a real S3 server: pushed from one clone, served to another, and a damaged object neither served nor silent."""

import hashlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto.server import ThreadedMotoServer
from reproduction_lab import Clone
from running_lab import Lab

from pipelines.ensure import Result
from pipelines.runs import run_graph
from pipelines.verify import verify_project


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A bucket; keys are in the environment alone."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    url = "http://{}:{}".format(*server.get_host_and_port())
    found = boto3.resource("s3", endpoint_url=url).create_bucket(Bucket="pedigree-test")
    yield found
    server.stop()


def outcomes(lab: Lab) -> dict[str, str]:
    ends = run_graph(lab.run())
    assert all(isinstance(end, Result) for end in ends), ends
    return {end.address.partition("/")[2]: end.outcome for end in ends if isinstance(end, Result)}


def test_a_fresh_clone_with_the_remote_alone_runs_nothing_and_a_damaged_object_is_made_again(bucket: Any, tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    lab = Lab(tmp_path / "one")
    url = bucket.meta.client.meta.endpoint_url
    for command in (f"dvc remote add -q --default store s3://{bucket.name}/artifacts", f"dvc remote modify -q store endpointurl {url}"):
        lab.shell(command)
    outcomes(lab)
    lab.shell("dvc push -q --run-cache && git add -A && git -c user.name=l -c user.email=l@example.org commit -qm made")
    assert verify_project(lab.project).problems == []

    clone = object.__new__(Lab)
    clone.code, clone.root, clone.environment = lab.code, tmp_path / "two", lab.environment
    subprocess.run(["git", "clone", "-q", lab.root, clone.root], check=True)
    (clone.root / ".dvc/config.local").write_text(f"[core]\n    site_cache_dir = {tmp_path / 'site'}\n")
    clone.forget_runs()
    assert set(outcomes(clone).values()) == {"restored"} and clone.contents() == lab.contents() and clone.runs() == []

    good = (lab.root / "artifacts/lab/suite/payload/rows.jsonl").read_bytes()
    md5 = hashlib.md5(good, usedforsecurity=False).hexdigest()
    (victim,) = [entry for entry in bucket.objects.all() if entry.key.endswith(f"{md5[:2]}/{md5[2:]}")]
    victim.put(Body=bytes([good[0] ^ 1]) + good[1:])
    (problem,) = verify_project(clone.project).problems
    assert problem.file.startswith(f"remote object store/{md5} of lab/suite")
    shutil.rmtree(clone.root / ".dvc/cache")
    shutil.rmtree(clone.root / "artifacts/lab/suite")
    assert outcomes(clone)["suite"] == "ran" and clone.runs() == ["suite"] and clone.contents() == lab.contents()


@pytest.mark.slow
def test_a_model_is_reproduced_from_an_s3_remote_whose_bundle_has_its_commit(bucket: Any, tmp_path: Path) -> None:
    made = Clone.first(tmp_path)
    url = bucket.meta.client.meta.endpoint_url
    made.shell(f"{sys.executable} -m dvc remote modify -q store url s3://{bucket.name}/store")
    made.shell(f"{sys.executable} -m dvc remote modify -q store endpointurl {url}")
    made.edit("stages/decontaminate.py", "save(job.out", 'rows.append("lost")\n    save(job.out')
    commit = made.commit()
    made.pedigree("run", "lab", "--no-prefect")
    assert f"code {commit[:12]}: sent" in made.pedigree("push", "lab")
    assert f"code {commit[:12]}: there already" in made.pedigree("push", "lab")
    assert [entry.key for entry in bucket.objects.all() if "pedigree" in entry.key] == [f"store/pedigree/code/{commit}.bundle"]
    made.ran()
    made.shell("git add -A && git -c user.name=l -c user.email=l@example.org commit -qm made")
    made.shell("git checkout -q --orphan other && git -c user.name=l -c user.email=l@example.org commit -qm other && git branch -qD main")
    clone = made.another("clone")
    clone.shell("git remote remove origin")
    clone.pedigree("reproduce", "lab/cleaner", "--from-cache")
    assert clone.ran() == ["cleaner"] and clone.verdicts() == {
        "raw": "restored",
        "suite": "restored",
        "clean": "restored",
        "cleaner": "identical",
    }
