"""`pedigree pin`, and runs that are refused before they begin: revisions that are still open, repositories that cannot be had."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from commands import InProcessCommand
from hub_child import HubChild
from hub_server import Hub, Repo, hub_server
from huggingface_hub import constants
from in_process import InProcessLauncher
from projects import CODE, fresh_project
from safetensors.numpy import save

from pedigree.configs.base.project import Project
from pedigree.configs.language.recipe import load_recipe
from pedigree.pipelines.run.pins import refuse_unreachable

NOBODY = "http://127.0.0.1:9"
PARENT = """\
description: The whole recipe.   # as published
stages:
  suite: {kind: prepare_data, record: item, task: a, sources: [{type: arithmetic, operations: [add], digits: [1], count: 3, seed: 1}]}
  raw:
    kind: prepare_data
    record: conversation
    sources:
      - {type: hub, repo: lab/rows, revision: pin me, split: train}
  base: {kind: source_model, source: {type: hub, repo: lab/model, revision: "pin me"}}   # 8B
"""
CHILD = """\
description: The same with more rows.
extends: whole
stages:
  # another set
  more: {kind: prepare_data, record: conversation, sources: [{type: hub, repo: lab/more, revision: pin me, split: train}]}
"""
LLAMA = {
    "model_type": "llama",
    "vocab_size": 3,
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}
FILES = {"tokenizer.json": b'{"model": {"vocab": {"a": 0, "b": 1, "c": 2}}}', "chat_template.jinja": b"{{ messages }}"}
FILES |= {"model.safetensors": b"weights", "original/consolidated.pth": b"others"}
MODELS = """\
description: Two models of the hub, one with another's tokenizer and one whose heads have 16 columns.
execution: cpu
stages:
  pool: {kind: prepare_data, record: prompt, sources: [{type: arithmetic, operations: [add], digits: [2], count: 40, seed: 1}]}
  odd: {kind: source_model, source: {type: hub, repo: lab/odd, revision: pin me}}
  narrow: {kind: source_model, source: {type: hub, repo: lab/narrow, revision: pin me}}
  sample:
    {kind: sample, in: {policies: [narrow], prompts: pool}, sampling: {max_tokens: 8}, samples_per_prompt: 1, prompts: {count: 9, index: 0}}
"""
OF_MODELS = (
    "stage odd: hub model lab/odd: the tokenizer has 3 tokens, but the model embeds 9",
    "stage sample: the model's head size is 16, but vLLM on a CPU serves 32, 64",
)
ROWS = b'{"instruction": "Say one.", "output": "one"}\n'


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with hub_server() as hub:
        hub.commit("datasets/lab/rows", {"train.jsonl": ROWS})
        hub.commit("datasets/lab/rows", {"train.jsonl": ROWS * 2})
        hub.commit("datasets/lab/more", {"train.jsonl": ROWS})
        hub.commit("models/lab/model", {"config.json": b"{}"})
        for name, config in (("odd", LLAMA | {"vocab_size": 9}), ("narrow", LLAMA | {"num_attention_heads": 4})):
            hub.commit(f"models/lab/{name}", FILES | {"config.json": json.dumps(config).encode()})
        yield hub


@pytest.fixture
def project(tmp_path: Path) -> Path:
    root = fresh_project(tmp_path / "project")
    (root / "configs" / "recipes" / "whole.yaml").write_text(PARENT)
    (root / "configs" / "recipes" / "child.yaml").write_text(CHILD)
    return root


def read(project: Path, name: str) -> str:
    return (project / "configs" / "recipes" / f"{name}.yaml").read_text()


class Typed(InProcessCommand):
    """Commands in the project, in this process."""

    def __init__(self, root: Path) -> None:
        self.lab: Any = SimpleNamespace(root=root, code=CODE, launcher=InProcessLauncher(Project(root)))
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        self.environment["HF_HUB_CACHE"] = str(root.parent / "home")

    def __call__(self, *arguments: str, url: str = NOBODY, code: int = 0, offline: bool = False, mirror: Path | None = None) -> str:
        """With a hub that `huggingface_hub` would read from the environment when it is imported, or a mirror."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(constants, "ENDPOINT", url)
            patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}")
            patch.setattr(constants, "HF_HUB_OFFLINE", offline)
            patch.setattr(constants, "HF_HUB_CACHE", str(self.lab.root.parent / "home"))
            if mirror:
                patch.setitem(self.environment, "PEDIGREE_HUB", str(mirror))
            return super().__call__(*arguments, code=code)


@pytest.fixture
def typed(project: Path) -> Typed:
    return Typed(project)


def test_every_open_revision_gets_the_newest_commit_and_the_rest_stays(project, typed, hub):
    said = typed("pin", "child", url=hub.url)
    rows, more, model = (hub.repos[name].head for name in ("datasets/lab/rows", "datasets/lab/more", "models/lab/model"))
    assert read(project, "whole") == PARENT.replace("rows, revision: pin me", f"rows, revision: {rows}").replace('"pin me"', model)
    assert read(project, "child") == CHILD.replace("pin me", more)
    for line in (f"configs/recipes/whole.yaml:8: lab/rows: {rows}", f"child.yaml:5: lab/more: {more}", "3 revisions pinned"):
        assert line in said
    assert typed("pin", "child") == "nothing to pin: child specifies a commit for every hub repository\n"  # nobody is asked again


def test_the_commit_of_one_repository_is_never_given_to_another(project, typed, hub):
    """Which a child names without a revision, so that it inherits what is written for its parent's."""
    child = "extends: whole\nstages:\n  raw:\n    sources:\n      - {type: hub, repo: lab/more, revision: pin me, split: train}\n"
    for repo in ("lab/other", "lab/more"):  # which nobody else names, and one that is open elsewhere too
        (project / "configs" / "recipes" / "child.yaml").write_text(f"{child}  base: {{source: {{repo: {repo}}}}}\n")
        (project / "configs" / "recipes" / "whole.yaml").write_text(PARENT.replace("lab/model", "lab/first"))
        said = typed("pin", "child", url=hub.url, code=2)
        assert f"child.yaml:6: {repo} has no revision of its own here" in said
        assert "write `revision: pin me` next to its `repo`" in said and "pin me" in read(project, "whole")


def test_what_cannot_be_told_stays_open_and_the_rest_is_written(project, typed, hub, monkeypatch):
    monkeypatch.setitem(hub.repos, "models/lab/model", Repo(hub.repos["models/lab/model"].commits, gated=True))
    said = typed("pin", "whole", url=hub.url, code=1)
    rows = hub.repos["datasets/lab/rows"].head
    assert read(project, "whole") == PARENT.replace("rows, revision: pin me", f"rows, revision: {rows}")
    assert "lab/model: not pinned: hub model lab/model is gated: request access at" in said
    assert "1 revision pinned, 1 not pinned" in said


@pytest.mark.parametrize(
    ("offline", "says"), [(True, "HF_HUB_OFFLINE disables the hub: unset it"), (False, "http://127.0.0.1:9 cannot be reached")]
)
def test_without_a_hub_it_says_why_and_writes_nothing(project, typed, offline, says):
    said = typed("pin", "whole", offline=offline, code=1)
    assert says in said and "0 revisions pinned, 2 not pinned" in said and read(project, "whole") == PARENT


def test_a_mirror_is_asked_instead_of_the_hub(project, typed, tmp_path):
    for place, commit in (("datasets/lab/rows", "c" * 40), ("models/lab/model", "d" * 40)):
        (tmp_path / "mirror" / place).mkdir(parents=True)
        (tmp_path / "mirror" / place / "REVISION").write_text(commit)
    typed("pin", "whole", mirror=tmp_path / "mirror")
    assert read(project, "whole") == PARENT.replace("rows, revision: pin me", f"rows, revision: {'c' * 40}").replace('"pin me"', "d" * 40)


def test_a_linked_recipe_stays_a_link_and_keeps_its_mode(project, typed, hub, tmp_path):
    place = project / "configs" / "recipes" / "whole.yaml"
    (elsewhere := tmp_path / "shared.yaml").write_text(PARENT)
    elsewhere.chmod(0o640)
    place.unlink()
    place.symlink_to(elsewhere)
    typed("pin", "whole", url=hub.url)
    assert place.is_symlink() and "pin me" not in elsewhere.read_text() and elsewhere.stat().st_mode & 0o777 == 0o640
    assert [path.name for path in place.parent.iterdir() if path.name.startswith(".")] == []


def test_a_recipe_with_open_revisions_is_checked_and_planned_and_not_run(project, typed):
    typed("validate", "child")
    said = typed("plan", "child")
    assert "Not pinned yet: lab/rows, lab/model, lab/more." in said and "Run `pedigree pin child` to write" in said
    said = typed("run", "child", code=2)
    for line in ("raw: hub data set lab/rows has no revision yet (`pin me`); `pedigree pin child` writes", "base: hub model lab/model"):
        assert line in said
    assert not list(project.rglob("scratch/*")) and not list((project / "artifacts").rglob("record.json"))


def test_plain_dvc_and_a_selection_that_needs_it_are_refused_too(project, typed):
    typed("compile", "whole")
    assert "whole: raw: hub data set lab/rows has no revision yet" in typed("stage", "whole/raw", code=2)
    said = typed("run", "whole", "--only", "raw", code=2)
    assert "lab/rows" in said and "lab/model" not in said


def test_what_cannot_be_had_is_told_before_anything_runs(project, typed, hub, monkeypatch):
    """All of it at once, with the stages that need it."""
    typed("pin", "child", url=hub.url)
    monkeypatch.setitem(hub.repos, "datasets/lab/rows", Repo(moved_to="lab/newer"))
    monkeypatch.setitem(hub.repos, "datasets/lab/newer", Repo(hub.repos["datasets/lab/more"].commits | {"e" * 40: {}}))
    monkeypatch.setitem(hub.repos, "datasets/lab/more", Repo(hub.repos["datasets/lab/more"].commits, gated=True))
    monkeypatch.delitem(hub.repos, "models/lab/model")
    said = typed("run", "child", url=hub.url, code=2)
    for line in (
        "child: raw: hub data set lab/rows has no commit",  # which the repository of its new name lacks
        "child: more: hub data set lab/more is gated",
        "child: base: hub model lab/model does not exist",
    ):
        assert line in said
    assert not list((project / "artifacts").rglob("record.json"))


def test_models_of_the_hub_are_checked_by_a_run_before_it_begins_and_by_a_plan_from_then_on(project, typed, hub):
    """By their small files, which `run` fetches; a plan asks nobody."""
    (project / "configs" / "recipes" / "models.yaml").write_text(MODELS)
    typed("pin", "models", url=hub.url)
    hub.requests.clear()
    typed("validate", "models", url=hub.url)
    said = typed("plan", "models", url=hub.url)
    assert "odd: the files of hub model lab/odd are not here: `run` fetches the small ones first to check tokenizer" in said
    assert hub.requests == []
    said = typed("run", "models", url=hub.url, code=2)
    assert all(text in said for text in OF_MODELS)
    assert not any(name in path for path in hub.requests for name in ("model.safetensors", "consolidated"))
    assert not list((project / "artifacts").rglob("record.json"))
    for command, code in (("plan", 1), ("validate", 2), ("run", 2)):
        said = typed(command, "models", code=code)
        assert all(text in said for text in OF_MODELS) and "are not here" not in said
    (place,) = (project.parent / "home" / "models--lab--odd" / "snapshots").glob("*")
    (place / "tokenizer.json").unlink()  # then nothing is known of it
    said = typed("plan", "models", code=1)
    assert OF_MODELS[0] not in said and OF_MODELS[1] in said and "the files of hub model lab/odd are not here" in said


def test_models_that_cannot_be_fetched_now_are_left_to_the_job(project, typed, hub):
    (project / "configs" / "recipes" / "models.yaml").write_text(MODELS)
    typed("pin", "models", url=hub.url)
    graph = load_recipe(Project(project).recipes, "models")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "ENDPOINT", NOBODY)
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        refuse_unreachable(graph, graph.nodes)


def test_models_of_a_mirror_are_checked_like_folders(project, typed, hub, tmp_path):
    (project / "configs" / "recipes" / "models.yaml").write_text(MODELS)
    typed("pin", "models", url=hub.url)
    mirror = tmp_path / "mirror"
    (mirror / "models").mkdir(parents=True)
    said = typed("plan", "models", mirror=mirror, code=1)
    assert f"stage odd: hub model lab/odd: the mirror has no {mirror}/models/lab/odd: download it with" in said
    assert "are not here" not in said
    typed("validate", "models", mirror=mirror)  # which mirror there is, is no matter of a recipe
    for name in ("odd", "narrow"):
        for file, data in hub.repos[f"models/lab/{name}"].commits[hub.repos[f"models/lab/{name}"].head].items():
            (mirror / "models/lab" / name / file).parent.mkdir(parents=True, exist_ok=True)
            (mirror / "models/lab" / name / file).write_bytes(save({}) if file == "model.safetensors" else data)
    for command, code in (("plan", 1), ("validate", 2), ("run", 2)):
        said = typed(command, "models", mirror=mirror, code=code)
        assert all(text in said for text in OF_MODELS) and "are not here" not in said
    (mirror / "models/lab/narrow/REVISION").write_text("a" * 40)
    assert f"is of commit {'a' * 40}, not of" in typed("plan", "models", mirror=mirror, code=1)


@pytest.mark.slow
def test_rows_of_the_hub_go_through_a_run(project, typed, hub, tmp_path):
    """Up to the record, from a hub, a mirror, and a mirror that proves nothing, which the record says."""
    typed("pin", "whole", url=hub.url)
    typed("run", "whole", "--only", "raw", url=hub.url)
    record = project / "artifacts" / "whole" / "raw" / "record.json"
    proved = record.read_text()
    child = HubChild(hub.url, tmp_path / "other")
    mirror = tmp_path / "mirror"
    child.ask("download", "lab/rows", hub.repos["datasets/lab/rows"].head, str(mirror / "datasets/lab/rows"), "dataset")
    child.close()

    def again() -> str:
        typed("run", "whole", "--only", "raw", "--force", "raw", mirror=mirror)
        return record.read_text()

    assert again() == proved  # where it lay is no identity
    shutil.rmtree(mirror / "datasets/lab/rows/.cache")
    assert "was read from a mirror that does not say" not in proved and "was read from a mirror that does not say" in again()
