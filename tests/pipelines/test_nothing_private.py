"""An artifact is handed on: nothing that is kept with it tells who made it, where, or with which credentials."""

import platform
import re
import sys
from pathlib import Path

import pytest
from running_lab import REPOSITORY, Lab

from pedigree.configs.base.secrets import find_secrets
from pedigree.pipelines.publish.export import export
from pedigree.pipelines.run.ensure import Result
from pedigree.pipelines.run.runs import run_graph

ABSOLUTE = re.compile(r"(?<![\w.:/])/[\w.-]+/[\w./-]+")


def test_no_user_host_path_or_secret_is_kept_with_artifacts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    private = {
        "HOME": str(tmp_path / "home-of-somebody"),
        "LOGNAME": "somebody-4711",
        "USER": "somebody-4711",
        "HOSTNAME": "host-of-somebody",
        "STORE_TOKEN": "looks-like-nothing",
        "AWS_SECRET_ACCESS_KEY": "also-like-nothing",
    }
    for name, value in private.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "home-of-somebody").mkdir()
    lab = Lab(tmp_path / "lab")
    lab.write("configs/loose.txt", "an uncommitted file")  # so that the state of the code has something to tell
    ends = run_graph(lab.run())
    assert all(isinstance(end, Result) for end in ends), ends
    export(lab.root / "artifacts/lab/cleaner", "lab/cleaner", lab.root / "artifacts/exported")
    kept = [path for path in sorted([*lab.root.glob("artifacts/**/*"), *lab.root.glob("dvc.*")]) if path.is_file()]
    assert len(kept) > 4 * 6 + 3
    for path in kept:
        text, name = path.read_text(), path.relative_to(lab.root).as_posix()
        places = {str(tmp_path), str(REPOSITORY), sys.prefix, *private.values()}
        assert [place for place in places if place in text] == [], name
        assert not platform.node() or not re.search(rf"(?<![\w-]){re.escape(platform.node())}(?![\w-])", text), name
        assert ABSOLUTE.findall(text) == [] and find_secrets(text) == [], name
