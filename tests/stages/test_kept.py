"""What a job is told bit by bit lasts: in its log, and at another machine."""

import pytest
from models import a_job

from pedigree.data.artifacts.mirror import Mirror
from pedigree.data.store.storage import StoreError
from pedigree.pipelines.jobs.attempts import _reached, resumable
from pedigree.pipelines.jobs.scratch_state import ANSWERS
from pedigree.stages.job.job import Job
from pedigree.stages.sampling.answer_log import PART, AnswerLog


def test_a_log_that_was_torn_goes_on_after_its_whole_lines(tmp_path):
    with AnswerLog(a_job(tmp_path)) as log:
        log.keep({"one": 1})
        log.keep({"two": 2})
    text = (tmp_path / ANSWERS).read_text()
    (tmp_path / ANSWERS).write_text(text[:-5])
    with AnswerLog(a_job(tmp_path)) as log:
        assert "one" in log and "two" not in log
        log.keep({"three": 3, "four": "\u2028é"})
    with AnswerLog(a_job(tmp_path)) as log:
        assert (log["one"], log["three"], log["four"]) == (1, 3, "\u2028é") and "two" not in log


def test_values_that_belong_together_are_computed_again_unless_all_are_known(tmp_path):
    with AnswerLog(a_job(tmp_path)) as log:
        log.keep({"one": 1})
        assert log.together(["one", "two"], lambda: [3, 4]) == [3, 4]
    with AnswerLog(a_job(tmp_path)) as log:
        assert log.together(["two", "one"], lambda: []) == [4, 3]


@pytest.mark.parametrize("line", ["", "5", "[1]", '["a"]', "[1, 2]", '{"a": 1, "b": 2}', "\udcff"])
def test_a_line_that_holds_no_value_is_none(tmp_path, line):
    (tmp_path / ANSWERS).parent.mkdir()
    (tmp_path / ANSWERS).write_text(f'["one", 1]\n{line}\n["two", 2]\n', errors="surrogateescape")
    with AnswerLog(a_job(tmp_path)) as log:
        assert (log["one"], log["two"]) == (1, 2)


def test_another_machine_has_what_was_kept_and_is_told_nothing_twice(tmp_path):
    url = f"file://{tmp_path}/shared"
    with pytest.raises(KeyboardInterrupt), a_job(tmp_path / "lost", checkpoint_url=url) as job, AnswerLog(job) as log:
        for number in range(PART + 3):
            log.keep({f"n{number}": number})
        raise KeyboardInterrupt
    for _ in range(2):
        with a_job(tmp_path / "elsewhere", checkpoint_url=url) as job, AnswerLog(job) as log:
            assert [log[f"n{number}"] for number in range(PART + 3)] == list(range(PART + 3))
        assert len(set((tmp_path / "elsewhere" / ANSWERS).read_text().splitlines())) == PART + 3
        assert len(list((tmp_path / "elsewhere" / "chunks").glob("*.json"))) == 2  # nothing was sent a second time
    with AnswerLog(a_job(tmp_path / "elsewhere")) as log:  # nobody mirrors any more
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
        log = AnswerLog(job)
        for number in range(count):
            log.keep({f"n{number}": number})
        killed(job, log)
    assert not list(tmp_path.glob("shared/k/chunks/*"))
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt), a_job(tmp_path / "a", checkpoint_url=url) as job, AnswerLog(job):
            raise KeyboardInterrupt
    assert len(list(tmp_path.glob("shared/k/chunks/*"))) == 3
    with a_job(tmp_path / "elsewhere", checkpoint_url=url) as job, AnswerLog(job) as log:
        assert [log[f"n{number}"] for number in range(count)] == list(range(count))


def test_while_a_long_log_is_read_the_job_says_how_far_it_is(tmp_path, monkeypatch):
    """Gigabytes take minutes, and a job that is silent for so long is taken for hung."""
    with a_job(tmp_path, checkpoint_url=f"file://{tmp_path}/shared") as job, AnswerLog(job) as log:
        for number in range(3 * PART):
            log.keep({f"n{number}": number})
    told = []
    monkeypatch.setattr(Job, "doing", lambda job, what, done=0, of=0, unit="": told.append((what, done, of, unit)))
    with AnswerLog(a_job(tmp_path)) as log:
        assert log["n7"] == 7
    lines, parts = ([one for one in told if one[3] == unit] for unit in ("MB", "parts"))
    size = (tmp_path / ANSWERS).stat().st_size / 1e6
    assert len(lines) == 3 * PART and {of for _, _, of, _ in lines} == {size} and 0.9 * size < lines[-1][1] < size
    assert [(done, of) for _, done, of, _ in parts] == [(0, 3), (1, 3), (2, 3)]
    assert {what for what, *_ in told} == {"reading the response log"}


@pytest.mark.parametrize("text", ['[{"text": "a"}, {"text": "b"}]', "[[-0.5, -0.25], [-1.0]]", "{}", "3", "["])
def test_what_another_version_kept_beside_it_is_no_part_of_it(tmp_path, text):
    """Whole chunks of answers, or of likelihoods."""
    (tmp_path / "chunks").mkdir()
    (tmp_path / "chunks" / f"{'0a' * 16}.json").write_text(text)
    (tmp_path / "chunks" / f"{'0b' * 16}.json").write_text('[["two", 2]]')
    with AnswerLog(a_job(tmp_path)) as log:
        assert log["two"] == 2
    assert (tmp_path / ANSWERS).read_text() == '["two",2]\n'


def test_answers_that_were_kept_are_something_to_go_on_from(tmp_path):
    """A further attempt that they make possible is counted as one that got further. An engine that fails at its start leaves none: the
    next run is to take the code that was repaired."""
    reached = _reached(tmp_path)
    with AnswerLog(a_job(tmp_path)) as log:
        assert _reached(tmp_path) == reached and not resumable(tmp_path)
        log.keep({"one": 1})
    assert _reached(tmp_path) != reached and resumable(tmp_path)
