"""What a job is told bit by bit lasts: in its log, and at another machine."""

import pytest
from models import a_job

from pedigree.data.artifacts.mirror import Mirror
from pedigree.data.store.storage import StoreError
from pedigree.pipelines.jobs.attempts import _reached, resumable
from pedigree.pipelines.jobs.saved_progress import REWARDS, saved_progress
from pedigree.stages.job.job import Job
from pedigree.stages.sampling import rewards
from pedigree.stages.sampling.response_log import PART, ResponseLog


def kept(job):
    return ResponseLog(job, job.folder / "log.jsonl", "number", lambda number: {"number": number}, lambda told: the(**told))


def the(number):
    return number


def test_a_log_that_was_torn_goes_on_after_its_whole_lines(tmp_path):
    with kept(a_job(tmp_path)) as log:
        log.keep("one", 1)
        log.keep("two", 2)
    text = (tmp_path / "log.jsonl").read_text()
    (tmp_path / "log.jsonl").write_text(text[:-5])
    with kept(a_job(tmp_path)) as log:
        assert "one" in log and "two" not in log
        log.keep("three", 3)
    with kept(a_job(tmp_path)) as log:
        assert (log["one"], log.get("two"), log["three"]) == (1, None, 3)


@pytest.mark.parametrize("line", ["", "5", "[1]", '["a"]', '["a", {}]', '["a", 5]', "\udcff"])
def test_a_line_that_holds_no_value_is_none(tmp_path, line):
    (tmp_path / "log.jsonl").write_text(f'["one", {{"number": 1}}]\n{line}\n["two", {{"number": 2}}]\n', errors="surrogateescape")
    with kept(a_job(tmp_path)) as log:
        assert (log["one"], log["two"]) == (1, 2)


def test_another_machine_has_what_was_kept_and_is_told_nothing_twice(tmp_path):
    url = f"file://{tmp_path}/shared"
    with pytest.raises(KeyboardInterrupt), a_job(tmp_path / "lost", checkpoint_url=url) as job, kept(job) as log:
        for number in range(PART + 3):
            log.keep(f"n{number}", number)
        raise KeyboardInterrupt
    for _ in range(2):
        with a_job(tmp_path / "elsewhere", checkpoint_url=url) as job, kept(job) as log:
            assert [log[f"n{number}"] for number in range(PART + 3)] == list(range(PART + 3))
        assert len(set((tmp_path / "elsewhere" / "log.jsonl").read_text().splitlines())) == PART + 3
        assert len(list((tmp_path / "elsewhere" / "chunks").iterdir())) == 2  # nothing was sent a second time
    with kept(a_job(tmp_path / "elsewhere")) as log:  # nobody mirrors any more
        assert [log[f"n{number}"] for number in range(PART + 3)] == list(range(PART + 3))


def killed(job, log):
    """The end of its threads, as a kill leaves them: what was not sent stays here."""
    log._stream.close()
    if job.mirror is not None:
        job.mirror.close(finished=True)


@pytest.mark.parametrize("mirrored", [True, False])
def test_what_was_kept_and_not_sent_when_a_kill_came_is_sent_by_the_next_attempt(tmp_path, monkeypatch, mirrored):
    """Of the log what no part has, and the parts that the store lacks: the machine may be gone before there is more to send. A job may
    also have had no store before."""
    url, count = f"file://{tmp_path}/shared", 2 * PART + 3

    def fail(*_):
        raise StoreError("busy")

    with monkeypatch.context() as failing:
        failing.setattr(Mirror, "upload_chunk", fail)
        job = a_job(tmp_path / "a", checkpoint_url=url if mirrored else None)
        log = kept(job)
        for number in range(count):
            log.keep(f"n{number}", number)
        killed(job, log)
    assert not list(tmp_path.glob("shared/k/chunks/*"))
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt), a_job(tmp_path / "a", checkpoint_url=url) as job, kept(job):
            raise KeyboardInterrupt
    assert len(list(tmp_path.glob("shared/k/chunks/*"))) == 3
    with a_job(tmp_path / "elsewhere", checkpoint_url=url) as job, kept(job) as log:
        assert [log[f"n{number}"] for number in range(count)] == list(range(count))


def test_while_a_long_log_is_read_the_job_says_how_far_it_is(tmp_path, monkeypatch):
    """Gigabytes take minutes, and a job that is silent for so long is taken for hung."""
    with a_job(tmp_path, checkpoint_url=f"file://{tmp_path}/shared") as job, kept(job) as log:
        for number in range(3 * PART):
            log.keep(f"n{number}", number)
    told = []
    monkeypatch.setattr(Job, "doing", lambda job, what, done=0, of=0, unit="": told.append((what, done, of, unit)))
    with kept(a_job(tmp_path)) as log:
        assert log["n7"] == 7
    lines, parts = ([one for one in told if one[3] == unit] for unit in ("MB", "parts"))
    size = (tmp_path / "log.jsonl").stat().st_size / 1e6
    assert len(lines) == 3 * PART and {of for _, _, of, _ in lines} == {size} and 0.9 * size < lines[-1][1] < size
    assert [(done, of) for _, done, of, _ in parts] == [(0, 3), (1, 3), (2, 3)]
    assert {what for what, *_ in told} == {"reading the response log"}


@pytest.mark.parametrize("text", ['[{"text": "a"}, {"text": "b"}]', "[[-0.5, -0.25], [-1.0]]", "{}", "3", "[", '[["one", {}]]'])
def test_what_others_keep_beside_it_is_no_part_of_it(tmp_path, text):
    """Whole chunks of answers, or of likelihoods."""
    (tmp_path / "chunks").mkdir()
    (tmp_path / "chunks" / f"{'0a' * 16}.json").write_text(text)
    (tmp_path / "chunks" / f"{'0b' * 16}.json").write_text('[["two", {"number": 2}]]')
    with kept(a_job(tmp_path)) as log:
        assert log["two"] == 2 and "one" not in log


def test_answers_that_were_kept_are_something_to_go_on_from(tmp_path):
    """A further attempt that they make possible is counted as one that got further."""
    (tmp_path / "chunks").mkdir()
    assert not resumable(tmp_path)
    (tmp_path / "chunks" / "answers.jsonl").write_text('["0123", {}]\n')
    assert resumable(tmp_path)


def test_a_reply_that_was_kept_is_further_than_before(tmp_path):
    reached = _reached(tmp_path)
    (tmp_path / "replies.jsonl").write_text('["0123", {}]\n')
    assert _reached(tmp_path) != reached and resumable(tmp_path)


@pytest.mark.parametrize("log", ["chunks/answers.jsonl", "replies.jsonl"])
def test_a_log_that_was_opened_and_holds_nothing_is_nothing_to_go_on_from(tmp_path, log):
    """An engine that fails at its start has left one: the next run is to take the code that was repaired."""
    job = a_job(tmp_path)
    with ResponseLog(job, tmp_path / log, "number", lambda number: {"number": number}, lambda told: the(**told)) as opened:
        assert not resumable(tmp_path)
        opened.keep("one", 1)
        assert resumable(tmp_path)


@pytest.mark.parametrize("ending", ["tmp", "part"])
def test_what_a_killed_writer_has_left_of_a_chunk_is_no_progress(tmp_path, ending):
    """Else a job that dies while it writes would be tried again for ever."""
    chunk = tmp_path / "chunks" / f"{'0a' * 16}.json"
    chunk.parent.mkdir()
    reached = _reached(tmp_path)
    for number in range(2):
        (chunk.parent / f".{chunk.name}.{number}.7.{ending}").write_text("[[-0.5")
        assert _reached(tmp_path) == reached and not resumable(tmp_path)
    chunk.write_text("[[-0.5]]")
    assert _reached(tmp_path) != reached and resumable(tmp_path)


ANSWERS, REPLIES = "chunks/answers.jsonl", "replies.jsonl"
CHUNK, PART_OR_CHUNK = f"chunks/{REWARDS}{'0a' * 16}.json", f"chunks/{'0b' * 16}.json"


@pytest.mark.parametrize(
    ("files", "said", "chunks"),
    [
        ([PART_OR_CHUNK], "finished chunks", 1),
        ([PART_OR_CHUNK, CHUNK], "finished chunks", 2),
        ([ANSWERS], "kept answers", 0),
        ([ANSWERS, PART_OR_CHUNK], "kept answers", 0),  # sent to another machine
        ([REPLIES, PART_OR_CHUNK], "kept replies", 0),
        ([REPLIES, PART_OR_CHUNK, CHUNK], "finished chunks and kept replies", 1),
        ([], "", 0),
    ],
)
def test_what_is_gone_on_from_is_called_what_it_is(tmp_path, files, said, chunks):
    (tmp_path / "chunks").mkdir()
    for name in files:
        (tmp_path / name).write_text('[["0123", {}]]\n')
    found = saved_progress(tmp_path)
    assert (found.description(), len(found.chunks), bool(found)) == (said, chunks, bool(files))
    assert rewards.KEPT == REWARDS
