"""A message ends with what to do next."""

import json
from pathlib import Path

import pytest
from dvc.exceptions import DvcException
from handmade import project_at
from hostile_lab import COMMIT, Folder, record_of

from pedigree.configs.base.problems import PedigreeError
from pedigree.configs.language.recipe import load_recipe
from pedigree.data.artifacts.artifacts import parse_record
from pedigree.data.store.untrusted import ArtifactError
from pedigree.pipelines.ledger.identity import Identities
from pedigree.pipelines.ledger.ledger import Ledger
from pedigree.pipelines.ledger.repository import dvc_errors
from pedigree.pipelines.lineage.ancestry import find_artifact, parents_first
from pedigree.pipelines.reproduce.reproduction import ReproductionRequest, reproduce
from pedigree.pipelines.reproduce.trust import _patch_lines
from pedigree.pipelines.reproduce.work_tree import RecordedCode

FILES = "stages:\n  raw:\n    kind: prepare_data\n    record: conversation\n    sources: [{type: files, path: gone.jsonl}]\n"


def test_a_circle_says_where_a_sound_copy_is_to_be_had() -> None:
    record = parse_record(json.dumps(record_of({})).encode(), "record.json")
    given = record_of({}, inputs=[{"port": "leak_from", "label": "x", "content": record.content, "producer": "1" * 64}])
    own = parse_record(json.dumps(given).encode(), "record.json")
    with pytest.raises(PedigreeError, match="it is forged: request a valid copy from its source"):
        parents_first("1" * 64, {"1" * 64: own})


def test_outside_of_a_project_it_says_to_go_into_one() -> None:
    with pytest.raises(PedigreeError, match="specify an artifact folder, or run the command in a project"):
        find_artifact(None, "nothing")


def test_what_dvc_says_comes_with_where_to_look() -> None:
    with pytest.raises(PedigreeError, match=r"DVC reports: no: .*`dvc status -v` gives details"), dvc_errors():
        raise DvcException("no")


def test_a_patch_that_git_cannot_read_can_be_done_without() -> None:
    with pytest.raises(PedigreeError, match="use --here, which ignores it"):
        _patch_lines(RecordedCode(COMMIT, "0" * 64, "no patch"), whole=False)


def test_strict_says_how_to_go_on(tmp_path: Path) -> None:
    gift = Folder().write(tmp_path / "gift")
    with pytest.raises(PedigreeError, match="install the recorded versions, or omit --strict"):
        reproduce(project_at(tmp_path / "project"), ReproductionRequest(str(gift), strict=True))


def test_a_file_that_a_config_names_and_nobody_has(tmp_path: Path) -> None:
    project = project_at(tmp_path / "project")
    (project.recipes / "lab.yaml").write_text("description: x\nexecution: cpu\n" + FILES)
    graph = load_recipe(project.recipes, "lab")
    with pytest.raises(ArtifactError, match=r"gone\.jsonl does not exist: add it, or change the config that names it"):
        Identities(project, graph, Ledger(project)).need(graph.nodes["lab/raw"])
