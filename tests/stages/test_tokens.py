"""Rows are tokenised once: by one process, for all ranks and later jobs; whole or not at all; and nothing but time is saved."""

import ast
import json
import multiprocessing
import os
import random
import signal
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import models
import numpy as np
import pytest
from waiting import deadline, until

from pedigree.data.chat.chat import Chat
from pedigree.data.chat.chat_template import ChatError
from pedigree.data.chat.documents import Conversations, schema
from pedigree.data.chat.token_files import TokenFile, written
from pedigree.data.host.faults import FAULTS
from pedigree.data.store.untrusted import ArtifactError
from pedigree.stages.job import job as jobs
from pedigree.stages.job.job import Job
from pedigree.stages.training import token_cache
from pedigree.stages.training.token_cache import Units, units_of

KEY = "ab" * 32


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return models.tiny_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def chat(policy):
    return Chat(policy.payload)


@pytest.fixture
def counted(monkeypatch):
    """Rows that were tokenised, in this process."""
    found, real = [], token_cache.tokenized

    def count(rows, *args):
        found.extend(row["id"] for row in rows)
        return real(rows, *args)

    monkeypatch.setattr(token_cache, "tokenized", count)
    return found


@pytest.fixture
def data(tmp_path):
    return models.dataset(tmp_path / "data", "conversation", models.arithmetic(200))


def sharing(folder: Path, shared: Path, rank: int = 0) -> Job:
    return replace(models.a_job(folder), tokens=shared, rank=rank)


ASSISTANT = Conversations("assistant")


def read(job, chat, policy, *data, rows=None, documents=ASSISTANT) -> Units:
    rows = models.arithmetic(200) if rows is None else rows
    return units_of(rows, documents, chat, job, policy, data)


def numbers(units: Units) -> list[list[tuple[list[int], list[bool]]]]:
    return [[(doc.ids.tolist(), doc.trained.tolist()) for doc in unit] for unit in units]


# --- what is read ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("train_on", ["assistant", "all"])
def test_documents_are_those_of_the_chat_up_to_their_last_trained_token(tmp_path, chat, policy, data, train_on):
    rows = models.arithmetic(200)
    for row, (doc,) in zip(rows, read(models.a_job(tmp_path), chat, policy, data, documents=Conversations(train_on)), strict=True):
        ids, mask = chat.training(row["messages"], train_on)
        end = len(mask) - mask[::-1].index(True)
        assert (doc.ids.tolist(), doc.trained.tolist()) == (ids[:end], mask[:end])
        assert (len(doc), doc.num_trained) == (end, sum(mask[1:end]))


def test_counts_come_from_the_index_alone_and_ids_are_views_into_the_map_that_cannot_be_written(tmp_path, chat, policy, data, monkeypatch):
    units = read(models.a_job(tmp_path), chat, policy, data)
    ids = units[0][0].ids
    assert ids.dtype == np.uint16 and not ids.flags.owndata and not ids.flags.writeable
    expected = [[(len(doc), doc.num_trained) for doc in unit] for unit in units]
    monkeypatch.setattr(TokenFile, "document", None)
    assert np.stack([units.lengths_RD, units.trained_RD], axis=-1).tolist() == [[list(pair) for pair in unit] for unit in expected]


@pytest.mark.parametrize(("highest", "most"), [((1 << 16) - 1, 2.2), (1 << 18, 4.2)])
def test_a_token_takes_two_bytes_and_a_bit_or_four(tmp_path, highest, most):
    draw = random.Random(0)
    lengths = [draw.randrange(1, 838) for _ in range(512)]
    given = [([draw.randrange(highest + 1) for _ in range(n)], [draw.random() < 0.5 for _ in range(n)]) for n in lengths]
    path, form, size = tmp_path / "x.arrow", schema(highest), token_cache.CHUNK_ROWS
    with written(path, tmp_path / "x.unfinished", form) as file:
        for start in range(0, 512, size):
            file.write_batch(models.batch_of(given[start : start + size], form))
    assert path.stat().st_size / sum(lengths) <= most
    opened = TokenFile(path)
    for number, (ids, trained) in enumerate(given):
        found, bits = opened.document(number)
        assert (found.tolist(), np.unpackbits(bits, count=len(ids)).astype(bool).tolist()) == (ids, trained)
        assert opened.trained_D[number] == sum(trained[1:])


def test_a_large_vocabulary_takes_four_bytes(tmp_path, chat, policy, data, monkeypatch):
    monkeypatch.setattr(Chat, "highest_id", 1 << 16)
    assert read(models.a_job(tmp_path), chat, policy, data)[0][0].ids.dtype == np.uint32


# --- made once ---------------------------------------------------------------------------------------------------------


def test_a_resume_another_job_and_another_max_length_tokenise_nothing(tmp_path, chat, policy, data, counted):
    first = read(sharing(tmp_path / "a", tmp_path / "shared"), chat, policy, data)
    assert counted == [row["id"] for row in models.arithmetic(200)]
    counted.clear()
    again = read(sharing(tmp_path / "b", tmp_path / "shared", rank=1), chat, policy, data)
    assert counted == [] and numbers(again) == numbers(first)
    assert [path.suffix for path in (tmp_path / "shared").iterdir()] == [".arrow"]


def test_whatever_decides_the_tokens_is_in_the_key(tmp_path, policy, data, counted, monkeypatch):
    shared, chat = tmp_path / "shared", Chat(policy.payload)

    def made(name, *args, **kwargs):
        counted.clear()
        read(sharing(tmp_path / name, shared), chat, *args, **kwargs)
        return bool(counted)

    assert made("first", policy, data) and not made("same", policy, data)
    assert made("train_on", policy, data, documents=Conversations("last_turn"))
    assert made("rows", policy, models.dataset(tmp_path / "other", "conversation", models.arithmetic(199)), rows=models.arithmetic(199))
    assert made("twice", policy, data, data, rows=models.arithmetic(200) * 2)

    def with_file(name):
        files = [entry.model_copy(update={"sha256": "0" * 64}) if entry.path == name else entry for entry in policy.record.files]
        assert files != list(policy.record.files)
        return replace(policy, record=policy.record.model_copy(update={"files": tuple(files)}))

    assert made("template", with_file("chat_template.jinja"), data)
    assert made("tokenizer", with_file("tokenizer.json"), data)
    assert not made("weights", with_file("model.safetensors"), data)
    monkeypatch.setattr(token_cache, "_code", lambda: {"data/chat/chat.py": "changed"})
    assert made("code", policy, data)
    monkeypatch.setattr(token_cache.importlib.metadata, "version", lambda name: "0")
    assert made("libraries", policy, data)


ROOT = Path(__file__).parents[2]
DECIDES_NOTHING = {
    "data/artifacts/artifacts.py": "says where rows lie; what they are is in the key",
    "data/store/durable.py": "has files reach the disk",
    "data/host/faults.py": "kills processes in tests",
    "data/store/hashing.py": "hashes files",
    "data/artifacts/lineage.py": "is the form of records",
    "data/host/process.py": "starts and ends processes",
    "data/artifacts/run_record.py": "is the form of records",
    "data/store/untrusted.py": "refuses what is not sound, or reads it as it stands",
}
"""Files that take part in no document, each with the reason."""


def imported_by(name: str, seen: set[str]) -> set[str]:
    """Files of `data` that a file of ours imports, those that these import, and so on, with itself; inside functions, too."""
    if name not in seen:
        seen.add(name)
        for node in ast.walk(ast.parse((ROOT / name).read_text())):
            modules = []
            if isinstance(node, ast.ImportFrom):
                modules = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            elif isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            for file in (f"{module.removeprefix('pedigree.').replace('.', '/')}.py" for module in modules if module):
                if file.startswith("data/") and (ROOT / file).is_file():
                    imported_by(file, seen)
    return seen


def test_all_code_that_decides_what_rows_become_is_in_the_key():
    """Where a file is not, a mend of it changes nothing: the old tokens are found, and trained on."""
    files: set[str] = set()
    for name in ("chat", "documents"):
        imported_by(f"data/chat/{name}.py", files)
    assert {"data/chat/tools.py", "data/records/messages.py", "data/records/columns.py"} < files
    assert files - set(token_cache.CODE) == set(DECIDES_NOTHING)


def test_a_row_that_cannot_be_trained_on_ends_the_job_and_leaves_no_file(tmp_path, chat, policy, data):
    rows = models.arithmetic(200)
    for number in (150, 70):
        rows[number] = {**rows[number], "messages": [{"role": "user", "content": f"<|im_end|> {number}"}]}
    with pytest.raises(ChatError, match=r"spells out the control token '<\|im_end\|>' .*70"):
        read(sharing(tmp_path / "job", tmp_path / "shared"), chat, policy, data, rows=rows)
    assert not list((tmp_path / "shared").glob("*.arrow")) and not list((tmp_path / "shared").glob("*.unfinished"))


def test_a_job_says_which_file_it_reads_and_how_far_it_is(tmp_path, chat, policy, data, monkeypatch):
    told = []
    monkeypatch.setattr(Job, "doing", lambda job, what, done=0, of=0, unit="": told.append((what, done, of, unit)))
    job = sharing(tmp_path / "job", tmp_path / "shared")
    read(job, chat, policy, data)
    assert told == [("tokenizing", done, 200, "rows") for done in (*range(0, 200, token_cache.CHUNK_ROWS), 200)]
    (path,) = (tmp_path / "shared").iterdir()
    assert json.loads((job.folder / "tokens.json").read_text()) == {"file": path.name}
    told.clear()
    read(job, chat, policy, data)
    assert told == []


# --- whole or not at all -----------------------------------------------------------------------------------------------


def whole(tmp_path) -> Path:
    path, form = tmp_path / "whole.arrow", schema(300)
    with written(path, tmp_path / "whole.unfinished", form) as file:
        file.write_batch(models.batch_of([(range(size), [False] + [True] * (size - 1)) for size in range(3, 23)], form))
    return path


def test_every_damage_is_noticed_when_the_file_is_opened(tmp_path):
    """One bit anywhere, a file that was cut or has grown."""
    path = whole(tmp_path)
    sound = path.read_bytes()
    damaged = [sound[:place] + bytes([sound[place] ^ 1]) + sound[place + 1 :] for place in range(len(sound))]
    for data in (*damaged, *(sound[:size] for size in (0, 3, 4, 300, -1)), sound + b"\0"):
        path.write_bytes(data)
        with pytest.raises(ArtifactError):
            TokenFile(path)


def test_another_file_under_the_name_is_not_taken(tmp_path):
    path = whole(tmp_path)
    link = tmp_path / "link.arrow"
    link.symlink_to(path)
    with pytest.raises(ArtifactError, match="links are not followed"):
        TokenFile(link)
    with pytest.raises(ArtifactError, match="another file"):
        TokenFile(path.rename(tmp_path / "other.arrow"))
    with pytest.raises(FileNotFoundError):
        TokenFile(tmp_path / "none")


def test_a_damaged_file_is_made_again_and_one_that_is_deleted_too(tmp_path, chat, policy, data, counted):
    expected = numbers(read(sharing(tmp_path / "a", tmp_path / "shared"), chat, policy, data))
    (path,) = (tmp_path / "shared").iterdir()
    sound = path.read_bytes()
    path.write_bytes(sound[:-2])
    counted.clear()
    units = read(sharing(tmp_path / "b", tmp_path / "shared"), chat, policy, data)
    assert len(counted) == 200 and path.read_bytes() == sound
    path.unlink()
    assert numbers(units) == expected, "who has it open keeps it"
    read(sharing(tmp_path / "c", tmp_path / "shared"), chat, policy, data)
    assert path.read_bytes() == sound


# --- several processes -------------------------------------------------------------------------------------------------


@pytest.fixture
def forked():
    """Forks a process, since all imports take seconds. None outlives its test: at exit, multiprocessing would wait for it."""
    processes = []

    def start(target, *args):
        process = multiprocessing.get_context("fork").Process(target=target, args=args)
        process.start()
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.join()


class Maker:
    """A process that makes the file, or waits for who does."""

    def __init__(self, forked, folder: Path, policy, data, name: str, stop: bool = False, rank: int = 0) -> None:
        """
        Args:
            forked: starts the process.
            folder: of all jobs, with what they share.
            policy: whose tokenizer is used.
            data: the rows.
            name: of the job.
            stop: whether it stops before it tokenises, until it is told to `go`.
            rank: in its job.
        """
        self._pipe, theirs = multiprocessing.Pipe()
        self._process = forked(_make, theirs, folder, policy, data, name, stop, rank)
        theirs.close()

    def said(self):
        assert self._pipe.poll(deadline(60))
        return self._pipe.recv()

    def go(self) -> int | None:
        """Lets it go on to its end, which has this exit code."""
        self._pipe.send("go")
        self._process.join()
        return self._process.exitcode

    def lives(self) -> bool:
        return self._process.is_alive()

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


@pytest.fixture
def maker(forked, tmp_path, policy, data):
    return partial(Maker, forked, tmp_path, policy, data)


def _make(pipe, folder, policy, data, name, stop, rank):
    real, made = token_cache.tokenized, []

    def slowly(rows, *args):
        first = not made
        made.extend(rows)
        if stop and first:
            pipe.send("making")
            pipe.recv()
        return real(rows, *args)

    token_cache.tokenized = slowly
    units = read(sharing(folder / name, folder / "shared", rank), Chat(policy.payload), policy, data)
    pipe.send((len(made), sum(len(doc) for unit in units for doc in unit)))


def waits(tmp_path, name) -> bool:
    """Whether the job of `name` has come to where the file is locked, and passes on how far its maker is."""
    path = tmp_path / name / "progress.json"
    return path.exists() and json.loads(path.read_text()).get("doing", {}) == {"what": "tokenizing", "done": 0, "of": 200, "unit": "rows"}


def test_one_of_two_processes_makes_the_file_and_the_other_waits_and_says_so(tmp_path, maker, monkeypatch):
    """While the first hangs, the progress of both stands still: whoever watches heartbeats ends them."""
    monkeypatch.setattr(jobs, "HEARTBEAT_INTERVAL_S", 0.05)
    first = maker("a", stop=True, rank=1)
    assert first.said() == "making"
    second = maker("b")
    until(lambda: waits(tmp_path, "b"), alive=second.lives)
    before = (tmp_path / "b" / "progress.json").read_text()
    time.sleep(0.5)  # nothing is to happen, in the time of ten heartbeats
    assert (tmp_path / "b" / "progress.json").read_text() == before
    assert first.go() == 0
    rows, length = second.said()
    assert rows == 0 and length > 200


@pytest.mark.parametrize("fault", [None, "tokens written"])
def test_where_the_maker_dies_the_one_who_waits_takes_its_place_and_what_it_left_is_swept(tmp_path, maker, fault, monkeypatch):
    (tmp_path / "faults").mkdir()
    if fault:
        (tmp_path / "faults" / fault).write_text("0")
    with monkeypatch.context() as dying:
        dying.setenv(FAULTS, str(tmp_path / "faults"))
        first = maker("a", stop=True)
    assert first.said() == "making"
    second = maker("b")
    until(lambda: waits(tmp_path, "b"), alive=second.lives)
    if fault:
        assert first.go() == -signal.SIGKILL
    else:
        first.kill()
    rows, length = second.said()
    assert rows == 200 and length > 200
    assert [path.suffix for path in (tmp_path / "shared").iterdir()] == [".arrow"]


def test_without_locks_two_makers_do_not_disturb_each_other(tmp_path, chat, policy, data, monkeypatch):
    """As on a file system that knows none, or on two machines: both make it, and it is whole at each moment."""

    def refuse(*_):
        raise OSError(38, "no locks here")

    monkeypatch.setattr(token_cache.fcntl, "flock", refuse)
    monkeypatch.setattr(token_cache, "CHUNK_ROWS", 200)
    both, one, results, real = threading.Barrier(2), threading.Lock(), [], token_cache.tokenized

    def together(*args):
        both.wait(timeout=deadline(60))
        with one:  # Jinja renders for one thread at a time
            return real(*args)

    monkeypatch.setattr(token_cache, "tokenized", together)

    def make(name):
        results.append(numbers(read(sharing(tmp_path / name, tmp_path / "shared"), chat, policy, data)))

    threads = [threading.Thread(target=make, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 2 and results[0] == results[1]
    assert len(list((tmp_path / "shared").glob("*.arrow"))) == 1 and not list((tmp_path / "shared").glob("*.unfinished"))


# --- several cores -----------------------------------------------------------------------------------------------------


def test_the_bytes_do_not_depend_on_how_many_processes_there_are(tmp_path, chat, policy, monkeypatch):
    rows = models.arithmetic(1500)
    data, made = models.dataset(tmp_path / "data", "conversation", rows), {}
    for processes in (1, 2, 3):
        monkeypatch.setattr(token_cache, "processes_for", lambda _, count=processes: count)
        read(sharing(tmp_path / f"{processes}", tmp_path / f"shared-{processes}"), chat, policy, data, rows=rows)
        (path,) = (tmp_path / f"shared-{processes}").iterdir()
        made[processes] = path.read_bytes()
    assert made[1] == made[2] == made[3]


def test_few_rows_start_no_process():
    assert [token_cache.processes_for(rows) for rows in (0, 1, 1999)] == [1, 1, 1]
    assert token_cache.processes_for(10**6) == min(len(os.sched_getaffinity(0)), 16)


def test_the_first_bad_row_is_told_by_two_processes_too(tmp_path, chat, policy, monkeypatch):
    monkeypatch.setattr(token_cache, "processes_for", lambda _: 2)
    rows = models.arithmetic(500)
    for number in (100, 140, 480):
        rows[number] = {**rows[number], "messages": [{"role": "user", "content": f"<|im_end|> {number}"}]}
    with pytest.raises(ChatError, match="100"):
        read(models.a_job(tmp_path), chat, policy, rows=rows)
