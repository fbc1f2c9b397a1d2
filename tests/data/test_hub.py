"""Data sets and models of the hub: exactly those of the pinned commit, from a hub on loopback, its cache, or a mirror's folder."""

import io
import json
import re
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hub_child import HubChild
from hub_server import Hub, Repo, hub_server
from pyarrow import Table, parquet

pytestmark = pytest.mark.integration
CARD = """---
configs:
- config_name: main
  default: true
  data_files:
  - {split: train, path: main/train-*.parquet}
  - {split: test, path: main/test.parquet}
- config_name: other
  data_files: other.parquet
---
"""


def jsonl(*rows: Any) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def table(*rows: Any) -> bytes:
    stream = io.BytesIO()
    parquet.write_table(Table.from_pylist(list(rows)), stream)
    return stream.getvalue()


def question(text: str) -> dict[str, str]:
    return {"question": text, "answer": f"to {text}"}


FILES = {
    "README.md": CARD.encode(),
    "main/train-00000-of-00002.parquet": table(question("a"), question("b")),
    "main/train-00001-of-00002.parquet": table(question("c")),
    "main/test.parquet": table(question("d")),
    "other.parquet": table(question("e")),
}
CHANGED = FILES | {"main/train-00001-of-00002.parquet": table(question("changed"))}
MODEL = {
    "config.json": b"{}",
    "model.safetensors": b"weights",
    "pytorch_model.bin": b"pickled",
    "tokenizer.json": b"{}",
    "original/params.json": b"{}",
    "pedigree/record.json": b"{}",
    "pedigree/lineage.json": b"{}",
    "pedigree/run.json": b"{}",
}


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with hub_server() as hub:
        hub.commit("datasets/lab/sums", FILES)
        hub.commit("datasets/lab/sums", CHANGED)
        hub.commit("datasets/lab/away", FILES)
        hub.commit("datasets/lab/away", CHANGED)
        hub.commit("datasets/lab/plain", {"data/train.jsonl": jsonl(question("f"))})
        hub.commit("models/lab/tiny", MODEL)
        hub.commit("datasets/lab/gated", FILES)
        hub.repos["datasets/lab/gated"].gated = True
        hub.commit("datasets/lab/forbidden", FILES)
        hub.repos["datasets/lab/forbidden"].gated = True
        hub.repos["datasets/lab/forbidden"].forbids = "Enable gated repositories in the settings of your token."
        hub.repos["datasets/lab/former"] = Repo(moved_to="lab/sums")
        yield hub


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def online(hub: Hub, home: Path) -> Iterator[HubChild]:
    child = HubChild(hub.url, home)
    yield child
    child.close()


def commits(hub: Hub, repo: str = "datasets/lab/sums") -> list[str]:
    return list(hub.repos[repo].commits)


def source(hub: Hub, **changes: Any) -> dict[str, Any]:
    return {"repo": "lab/sums", "revision": commits(hub)[0], "split": "train", **changes}


def questions(answer: dict[str, Any]) -> list[str]:
    return [row["question"] for _, row in answer["value"]["rows"]]


def test_rows_of_a_commit_come_in_order_and_are_fetched_once(hub, online):
    hub.requests.clear()
    answer = online.ask("rows", source(hub))
    assert questions(answer) == ["a", "b", "c"] and answer["value"]["marks"] == []
    assert [place for place, _ in answer["value"]["rows"]] == ["lab/sums/train[0]", "lab/sums/train[1]", "lab/sums/train[2]"]
    assert not any("test.parquet" in path or "other.parquet" in path for path in hub.requests)  # of which nobody wanted anything
    hub.requests.clear()
    assert online.ask("rows", source(hub)) == answer and hub.requests == []


def test_configurations_splits_and_columns_are_chosen(hub, online):
    assert questions(online.ask("rows", source(hub, split=["test", "train"]))) == ["d", "a", "b", "c"]
    assert questions(online.ask("rows", source(hub, config="other"))) == ["e"]
    assert questions(online.ask("rows", source(hub, repo="lab/plain", revision=commits(hub, "datasets/lab/plain")[0]))) == ["f"]
    chosen = online.ask("rows", source(hub, split="test", columns={"prompt": "question"}))
    assert chosen["value"]["rows"] == [["lab/sums/test[0]", {"prompt": "d"}]]


def test_several_configurations_follow_each_other_and_give_their_names(hub, online):
    """Through the hub, whose files are fetched for one configuration after the other."""
    both = online.ask("rows", source(hub, config=["other", "main"], config_as="part"))
    assert [(row["part"], row["question"]) for _, row in both["value"]["rows"]] == [("other", "e"), *(("main", one) for one in "abc")]
    assert [place for place, _ in both["value"]["rows"]][:2] == ["lab/sums/other/train[0]", "lab/sums/main/train[0]"]
    chosen = online.ask("rows", source(hub, config="other", config_as="part", columns={"prompt": "question"}))
    assert chosen["value"]["rows"] == [["lab/sums/train[0]", {"prompt": "e", "part": "other"}]]
    chosen = online.ask("rows", source(hub, config="other", config_as="answer", columns={"prompt": "question"}))
    assert chosen["value"]["rows"] == [["lab/sums/train[0]", {"prompt": "e", "answer": "other"}]]  # theirs was not chosen

    both = online.ask("rows", source(hub, split=["test", "train"], columns={"prompt": "question"}, split_as="source"))
    assert [(row["source"], row["prompt"]) for _, row in both["value"]["rows"]] == [("test", "d"), *(("train", one) for one in "abc")]


def test_columns_that_are_not_chosen_are_told_beside_a_row_where_somebody_asks_for_them(hub, online):
    given = source(hub, config="other", config_as="part", columns={"prompt": "question"})
    ((place, (row, said)),) = online.ask("rows", given, ["answer", "part", "rating"])["value"]["rows"]
    assert place == "lab/sums/train[0]" and row == {"prompt": "e", "part": "other"} and said == {"part": "other", "answer": "to e"}


def test_rows_are_those_that_the_library_gives(hub, online):
    """It asks the hub by itself here."""
    there = online.ask("load_dataset", "lab/sums", "main", "train", commits(hub)[1])
    ours = online.ask("rows", source(hub, config="main", revision=commits(hub)[1]))
    assert [row for _, row in ours["value"]["rows"]] == there["value"] != []


WRONG = [
    ({"split": "dev"}, r"hub data set lab/sums: there is no split dev: it has train, test"),
    ({"config": "mian"}, r"hub data set lab/sums: BuilderConfig 'mian' not found. Available: \['main', 'other'\]"),
    ({"config": ["main", "mian"]}, r"hub data set lab/sums: BuilderConfig 'mian' not found"),
    ({"config": "main", "config_as": "answer"}, r"hub data set lab/sums: train already has a column answer: omit config_as"),
    ({"columns": {"prompt": "text"}}, r"hub data set lab/sums: train has no column text: it has question, answer"),
    ({"columns": {"prompt": "question", "ground_truth": "answer.text"}}, r"sums: train has no column answer.text: it has question, answer"),
    ({"split_as": "answer"}, r"hub data set lab/sums: train already has a column answer: omit split_as, or use another name"),
    ({"revision": "a" * 40}, r"hub data set lab/sums has no commit a{40}: correct `revision`, or write `pin me` and run `pedigree pin"),
    ({"revision": "pin me"}, r"hub data set lab/sums: its revision is not pinned: `pedigree pin RECIPE`"),
    ({"repo": "lab/none"}, r"hub data set lab/none does not exist on http://.*, or is private: correct `repo`, or log in with `hf auth"),
    ({"repo": "lab/gated"}, r"hub data set lab/gated is gated: request access at http://.*/datasets/lab/gated, and log in"),
    (
        {"repo": "lab/forbidden"},
        r"hub data set lab/forbidden: http://.* forbids this to the access token \(.*Enable gated repositories.*\): allow it to read",
    ),
    ({"repo": "lab/former"}, r"hub data set lab/former has moved to lab/sums: write that as its `repo`"),
]


@pytest.mark.parametrize(("changes", "says"), WRONG)
def test_what_cannot_be_had_is_told_by_name_with_the_remedy(hub, online, changes, says):
    if changes.get("repo") in ("lab/gated", "lab/forbidden"):
        changes = changes | {"revision": commits(hub, f"datasets/{changes['repo']}")[0]}
    answer = online.ask("rows", source(hub, **changes))
    assert answer["kind"] == "StoreError" and answer["passing"] is False  # so that nobody tries again
    assert re.search(says, answer["error"]), answer["error"]


def test_a_look_before_the_run_finds_it_too(hub, online):
    for name in ("none", "gated", "forbidden", "former"):
        repo = hub.repos.get(f"datasets/lab/{name}")
        revision = repo.head if repo and repo.commits else commits(hub)[0]
        assert online.ask("check", "dataset", f"lab/{name}", revision)["kind"] == "StoreError"
    assert online.ask("check", "dataset", "lab/sums", commits(hub)[0]) == {"value": None}
    assert "has no commit" in online.ask("check", "model", "lab/tiny", "b" * 40)["error"]


def test_neither_another_commit_nor_an_empty_table_stands_in_for_rows_of_a_hub_that_is_away(hub, home, online):
    """`datasets` gives the newest that it has cached, whatever revision it is asked for. Reading rows loads no torch."""
    old, new = commits(hub, "datasets/lab/away")
    away = {"repo": "lab/away", "revision": old, "split": "train"}
    assert questions(online.ask("rows", away)) == ["a", "b", "c"]
    assert len(online.ask("load_dataset", "lab/away", "main", "train", old)["value"]) == 3
    offline = HubChild(hub.url, home, HF_HUB_OFFLINE="1")
    assert questions(offline.ask("rows", away)) == ["a", "b", "c"]
    assert offline.ask("loaded", ["datasets", "torch"])["value"] == ["datasets"]
    assert [row["question"] for row in offline.ask("load_dataset", "lab/away", "main", "train", new)["value"]] == ["a", "b", "c"]
    refused = offline.ask("rows", away | {"revision": new})
    assert refused["passing"] is False
    assert "not all files of commit" in refused["error"] and "HF_HUB_OFFLINE disables the hub: unset it" in refused["error"]
    assert "not in its cache" in offline.ask("check", "dataset", "lab/away", new)["error"]
    assert "not all files of commit" in offline.ask("rows", away | {"config": "other"})["error"]  # of which none was ever fetched
    offline.close()


def test_a_hub_that_is_away_is_worth_another_try(tmp_path):
    commit = "0" * 40
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused
        child = HubChild(f"http://127.0.0.1:{taken.getsockname()[1]}", tmp_path)
        answer = child.ask("rows", {"repo": "lab/sums", "revision": commit, "split": "train"})
        assert answer["passing"] is True and "cannot be reached" in answer["error"] and "correct HF_ENDPOINT" in answer["error"]
        assert child.ask("check", "dataset", "lab/sums", commit) == {"value": None}  # the job waits for it
        assert "cannot be reached" in child.ask("newest", "dataset", "lab/sums")["error"]
        child.close()


@pytest.mark.parametrize("file", ["main/train-00001-of-00002.parquet", "README.md"])
def test_a_file_that_was_changed_in_the_cache_is_refused(hub, home, online, file):
    online.ask("rows", source(hub, split=["train", "test"]))
    (cached,) = home.rglob(f"snapshots/{commits(hub)[0]}/{file}")
    cached.resolve().write_bytes(CHANGED[file] + b"\n")
    answer = online.ask("rows", source(hub, split=["train", "test"]))
    assert "is damaged, it does not hash to its name: delete it" in answer["error"]
    cached.resolve().unlink()
    assert questions(online.ask("rows", source(hub, split=["train", "test"]))) == ["a", "b", "c", "d"]


def test_of_a_model_come_the_files_that_are_read_and_the_records_of_an_export(hub, online):
    answer = online.ask("model", "lab/tiny", commits(hub, "models/lab/tiny")[0])
    records = [f"pedigree/{name}.json" for name in ("lineage", "record", "run")]
    assert answer["value"]["files"] == ["config.json", "model.safetensors", *records, "tokenizer.json"]
    assert "hub model lab/sums does not exist" in online.ask("model", "lab/sums", commits(hub)[0])["error"]


def test_the_newest_commit_is_that_of_the_main_branch(hub, online):
    assert online.ask("newest", "dataset", "lab/sums") == {"value": commits(hub)[1]}
    assert online.ask("newest", "model", "lab/tiny") == {"value": commits(hub, "models/lab/tiny")[0]}
    assert "has moved to lab/sums" in online.ask("newest", "dataset", "lab/former")["error"]
    assert "is gated" in online.ask("newest", "dataset", "lab/gated")["error"]


# --- mirrors


@pytest.fixture
def mirror(online: HubChild, tmp_path: Path) -> Iterator[Path]:
    """A mirror's folder that the child reads instead of the hub."""
    online.ask("set_mirror", str(tmp_path))
    yield tmp_path
    online.ask("set_mirror", None)


def lay(mirror: Path, files: dict[str, bytes] = FILES, place: str = "datasets/lab/sums") -> Path:
    for name, content in files.items():
        (mirror / place / name).parent.mkdir(parents=True, exist_ok=True)
        (mirror / place / name).write_bytes(content)
    return mirror / place


def test_a_mirror_is_read_instead_of_the_hub_and_gives_the_same_rows(hub, online, mirror):
    online.ask("set_mirror", None)
    wanted = source(hub, split=["test", "train"])
    there = online.ask("rows", wanted)["value"]["rows"]
    online.ask("set_mirror", str(mirror))
    lay(mirror)
    hub.requests.clear()
    assert online.ask("rows", wanted)["value"]["rows"] == there and hub.requests == []
    refused = online.ask("rows", source(hub, repo="lab/plain"))
    assert "hub data set lab/plain: the mirror has no" in refused["error"] and "or unset PEDIGREE_HUB" in refused["error"]
    assert f"hf download lab/plain --repo-type dataset --revision {commits(hub)[0]}" in refused["error"] and hub.requests == []


def test_what_nothing_proves_is_marked(hub, online, mirror):
    folder = lay(mirror)
    assert "does not record its commit" in online.ask("newest", "dataset", "lab/sums")["error"]
    (mark,) = online.ask("rows", source(hub))["value"]["marks"]
    assert online.ask("rows", source(hub, config=["main", "other"]))["value"]["marks"] == [mark]
    assert mark.startswith("hub data set lab/sums was read from a mirror that does not say that it is of commit")
    (folder / "REVISION").write_text(commits(hub)[0] + "\n")
    (mark,) = online.ask("rows", source(hub))["value"]["marks"]
    assert "that says that it is of commit" in mark and "no hashes to prove it" in mark


def test_a_mirror_of_another_commit_is_refused(hub, online, mirror):
    folder = lay(mirror)
    (folder / "REVISION").write_text(commits(hub)[1])
    for what in (online.ask("rows", source(hub)), online.ask("check", "dataset", "lab/sums", commits(hub)[0])):
        assert f"REVISION is of commit {commits(hub)[1]}, not of {commits(hub)[0]}: download it with `hf download" in what["error"]
    assert online.ask("newest", "dataset", "lab/sums") == {"value": commits(hub)[1]}
    (folder / "REVISION").write_text("main")
    assert "records commit 'main' for REVISION, which is not a commit hash" in online.ask("rows", source(hub))["error"]


@pytest.mark.parametrize("kind", ["dataset", "model"])
def test_what_hf_download_has_laid_there_is_proved_by_its_notes(hub, online, mirror, kind):
    place = {"dataset": "datasets/lab/sums", "model": "models/lab/tiny"}[kind]
    commit = commits(hub, place)[0]
    online.ask("download", place.partition("/")[2], commit, str(mirror / place), kind)

    def read() -> dict[str, Any]:
        return online.ask("rows", source(hub)) if kind == "dataset" else online.ask("model", "lab/tiny", commit)

    answer = read()["value"]
    assert answer["marks"] == [] if kind == "dataset" else answer["unproved"] is None
    assert online.ask("newest", kind, place.partition("/")[2]) == {"value": commit}
    if kind == "model":
        (mirror / place / "chat_template.jinja").write_bytes(b"another's")
        assert "holds no hashes to prove it" in read()["value"]["unproved"]
    changed = mirror / place / {"dataset": "main/train-00001-of-00002.parquet", "model": "tokenizer.json"}[kind]
    changed.write_bytes(changed.read_bytes() + b" ")
    assert f"{changed} was changed after the download" in read()["error"]
    other = next(other for other in ("a" * 40, commits(hub)[1]) if other != commit)
    assert f"is of commit {commit}, not of {other}" in online.ask("check", kind, place.partition("/")[2], other)["error"]


def test_a_mirror_of_two_commits_is_none(hub, online, mirror):
    for commit in commits(hub):
        online.ask("download", "lab/sums", commit, str(mirror / commit), "dataset")
    shutil.copytree(mirror / commits(hub)[0], mirror / "datasets" / "lab" / "sums")
    for name in ("main/train-00001-of-00002.parquet", ".cache/huggingface/download/main/train-00001-of-00002.parquet.metadata"):
        shutil.copy(mirror / commits(hub)[1] / name, mirror / "datasets" / "lab" / "sums" / name)
    assert f"train-00001-of-00002.parquet is of commit {commits(hub)[1]}, not of" in online.ask("rows", source(hub))["error"]
    assert "has files of 2 commits" in online.ask("newest", "dataset", "lab/sums")["error"]


def leading_to(path: str) -> dict[str, bytes]:
    """A repository whose card has this file for its rows."""
    return {"README.md": f"---\nconfigs:\n- config_name: main\n  data_files:\n  - {{split: train, path: '{path}'}}\n---\n".encode()}


@pytest.mark.parametrize("way", ["up", "absolute", "down and up"])
@pytest.mark.parametrize("place", ["hub", "mirror"])
def test_a_card_reaches_no_file_outside_of_its_repository(hub, online, mirror, tmp_path, way, place):
    victim = tmp_path / "victim.jsonl"
    victim.write_bytes(jsonl(question("secret")))
    up = "../" * 30 + str(victim)[1:]
    files = leading_to({"up": up, "absolute": str(victim), "down and up": f"data/{up}"}[way]) | {"data/train.jsonl": jsonl(question("f"))}
    if place == "mirror":
        lay(mirror, files, "datasets/lab/hostile")
        commit = "c" * 40
    else:
        online.ask("set_mirror", None)
        commit = hub.commit("datasets/lab/hostile", files)
    answer = online.ask("rows", {"repo": "lab/hostile", "revision": commit, "split": "train"})
    assert answer.get("kind") == "StoreError" and "victim.jsonl', which is not one of its files" in answer["error"], answer
    assert victim.read_bytes() == jsonl(question("secret")) and not victim.is_symlink()


def test_links_of_a_mirror_stay_in_its_folder(hub, online, mirror, tmp_path):
    folder = lay(mirror, leading_to("data.jsonl") | {"kept/rows.jsonl": jsonl(question("f"))}, "datasets/lab/linked")
    (tmp_path / "victim.jsonl").write_bytes(jsonl(question("secret")))
    wanted = {"repo": "lab/linked", "revision": "c" * 40, "split": "train"}
    (folder / "data.jsonl").symlink_to("kept/rows.jsonl")
    assert questions(online.ask("rows", wanted)) == ["f"]
    (folder / "data.jsonl").unlink()
    (folder / "data.jsonl").symlink_to(tmp_path / "victim.jsonl")
    assert "data.jsonl', which is not one of its files" in online.ask("rows", wanted)["error"]


def test_a_mirror_that_cannot_be_one_is_refused(hub, online, mirror):
    for given, says in (("some/folder", "is relative, but jobs run in other folders"), ("/none", "is not a folder")):
        online.ask("set_mirror", given)
        assert says in online.ask("rows", source(hub))["error"]
