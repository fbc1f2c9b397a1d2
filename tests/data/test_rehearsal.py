"""What stands for the hub in a rehearsal: made data sets and models as a mirror that is whole or not there."""

import gzip
import json
import os
import time
from pathlib import Path

import pytest
from row_reading import load, write_file

from pedigree.configs.base.hub_names import COMMIT
from pedigree.configs.rows.row_sources import Arithmetic, Hub, Stored
from pedigree.data.sources import hub, rehearsal_hub
from pedigree.data.sources.hub import Repository
from pedigree.data.sources.sources import Outside, fetched
from pedigree.data.store.storage import StoreError
from pedigree.stages.core.rating import parse_rating
from pedigree.stages.verifiers import check, verify

SET = "allenai/RLVR-GSM"


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PEDIGREE_CACHE", str(tmp_path / "cache"))


def test_the_mirror_has_every_byte_of_the_made_rows_under_a_commit_that_follows_from_them_and_stays_as_it_is(monkeypatch):
    made = rehearsal_hub.data_set(SET, [rehearsal_hub.SHIPPED])
    mirror = rehearsal_hub.mirror({f"datasets/{SET}": made})
    for file in (path for path in made.rglob("*") if path.is_file()):
        assert (mirror / "datasets" / SET / file.relative_to(made)).read_bytes() == file.read_bytes()
    monkeypatch.setenv("PEDIGREE_HUB", str(mirror))
    commit = hub.newest(Repository("dataset", SET, "pin me"))
    assert COMMIT.fullmatch(commit) and commit == rehearsal_hub.commit_of(made)
    assert rehearsal_hub.mirror({f"datasets/{SET}": made}) == mirror
    marks: list[str] = []
    source = {"type": "hub", "repo": SET, "revision": commit, "split": "train", "max_bad_rows": 0.75}
    loaded = load(Hub.model_validate(source), "prompt", None, Outside(check_verifier=check, mark=marks.append))
    assert len(loaded.rows) == 4 and len(loaded.bad) == 2 and not marks
    with (mirror / "datasets" / SET / "data" / "train.jsonl").open("a") as stream:
        stream.write("{}\n")
    with pytest.raises(StoreError, match="was changed after the download"):
        load(Hub.model_validate(source), "prompt", None, Outside())


def test_other_rows_are_another_commit_and_another_mirror(tmp_path):
    made = rehearsal_hub.data_set(SET, [rehearsal_hub.SHIPPED])
    own = tmp_path / "own" / "hub" / "datasets" / SET
    own.mkdir(parents=True)
    (own / "train.jsonl").write_text('{"prompt": "Hello?", "completion": "Yes."}\n')
    assert rehearsal_hub.data_set(SET, [tmp_path / "own", rehearsal_hub.SHIPPED]) == own  # the project's go before ours
    assert rehearsal_hub.commit_of(own) != rehearsal_hub.commit_of(made)
    assert rehearsal_hub.mirror({f"datasets/{SET}": own}) != rehearsal_hub.mirror({f"datasets/{SET}": made})


def test_a_kill_while_something_is_made_leaves_nothing_that_could_be_taken_for_it():
    names = ["models/some", "models/other"]

    def killed(building: dict[str, Path]) -> None:
        assert list(building) == names
        building["models/some"].mkdir()
        (building["models/some"] / "half").touch()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rehearsal_hub.build_once(names, killed)
    assert list((rehearsal_hub.cache() / "models").iterdir()) == []

    def whole(building: dict[str, Path]) -> None:
        for folder in building.values():
            folder.mkdir()
            (folder / "all").touch()

    made = rehearsal_hub.build_once(names, whole)
    assert made == {name: rehearsal_hub.cache() / name for name in names}
    assert [[path.name for path in folder.iterdir()] for folder in made.values()] == [["all"], ["all"]]
    assert rehearsal_hub.build_once(names, killed) == made  # they are not made again


def test_what_a_killed_process_has_begun_is_removed_a_day_later():
    begun, left = ((rehearsal_hub.cache() / "models" / f"{rehearsal_hub.MAKING}{name}") for name in ("begun", "left"))
    for folder in (begun, left):
        (folder / "made").mkdir(parents=True)
    os.utime(left, (time.time() - rehearsal_hub.MAKING_SECONDS - 60,) * 2)
    rehearsal_hub.build_once(["models/some"], lambda building: building["models/some"].mkdir())
    assert begun.is_dir() and not left.exists()


def test_what_nobody_has_made_is_named_with_the_folder_where_it_belongs(tmp_path):
    with pytest.raises(StoreError, match=rf"dataset some/set has no rehearsal rows.* {tmp_path}/hub/datasets/some/set"):
        rehearsal_hub.data_set("some/set", [tmp_path, rehearsal_hub.SHIPPED])
    stored = Stored.model_validate({"type": "stored", "name": "logs", "url": "s3://bucket/some.jsonl", "sha256": "a" * 64})
    with pytest.raises(StoreError, match=rf"source logs has no rehearsal rows.* {tmp_path}/stored/logs.jsonl"):
        rehearsal_hub.stored_rows(stored, [tmp_path])


def test_a_stored_source_is_found_without_its_store(tmp_path):
    stored = Stored.model_validate({"type": "stored", "name": "logs", "url": "s3://nowhere/some.jsonl", "sha256": "a" * 64})
    (tmp_path / "stored").mkdir()
    (tmp_path / "stored" / "logs.jsonl").write_text('{"prompt": "Hello?", "completion": "Yes."}\n')
    sha256 = rehearsal_hub.place_stored(stored, rehearsal_hub.stored_rows(stored, [tmp_path]))
    assert fetched(stored.model_copy(update={"sha256": sha256})).read_text().startswith('{"prompt"')


def test_made_models_learn_right_answers_and_others_so_that_rewards_differ():
    texts, dialogues = rehearsal_hub.texts_and_dialogues([rehearsal_hub.SHIPPED], [])
    assert texts == rehearsal_hub.texts_and_dialogues([rehearsal_hub.SHIPPED], [])[0]
    sums = Arithmetic.model_validate({"type": "arithmetic", "operations": ["add"], "digits": [1], "count": 5, "seed": 1})
    assert len(rehearsal_hub.texts_and_dialogues([rehearsal_hub.SHIPPED], [sums])[1]) == len(dialogues) + 10
    rows = (rehearsal_hub.SHIPPED / "hub" / "datasets" / SET / "data" / "train.jsonl").read_text().splitlines()
    first = json.loads(rows[0])
    said = [one["answer"] for one in dialogues if one["messages"] == first["messages"]]
    assert sorted(verify({"name": "gsm8k", "answer": first["ground_truth"]}, answer).score or 0.0 for answer in said) == (
        rehearsal_hub.TIMES * [0.0] + rehearsal_hub.TIMES * [1.0, 1.0]
    )


@pytest.mark.parametrize("ending", [".jsonl", ".jsonl.gz", ".json", ".parquet"])
def test_made_models_learn_rows_of_stored_sources_too(tmp_path, ending):
    (tmp_path / "stored").mkdir()
    file = write_file(tmp_path / "stored" / f"logs{ending}", [{"prompt": "Hullo?", "completion": "Yes, quite."}])
    if ending == ".jsonl.gz":
        file.write_bytes(gzip.compress(file.read_bytes()))
    texts, dialogues = rehearsal_hub.texts_and_dialogues([tmp_path, rehearsal_hub.SHIPPED], [])
    assert {"messages": [{"role": "user", "content": "Hullo?"}], "answer": "Yes, quite."} in dialogues
    assert any("Hullo?" in text and "Yes, quite." in text for text in texts)


def test_made_models_learn_no_turns_that_a_template_may_have_no_form_for(tmp_path):
    (tmp_path / "stored").mkdir()
    asked = {"role": "user", "content": "Hullo?"}
    called = {"role": "assistant", "tool_calls": [{"name": "look", "arguments": {}}]}
    rows = [[asked, called], [asked, called, {"role": "tool", "content": "x"}, {"role": "assistant", "content": "Yes."}]]
    write_file(tmp_path / "stored" / "logs.json", [{"messages": messages} for messages in rows])
    assert rehearsal_hub.texts_and_dialogues([tmp_path], [])[1] == []


def test_a_made_judge_learns_all_ratings_in_the_form_that_is_read():
    assert [parse_rating(one["answer"]) for one in rehearsal_hub.judging()] == [1, 2, 3, 4, 5]
