"""What a person sees while a recipe runs."""

import io
import time
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from waiting import until

from pedigree.data.store.untrusted import ArtifactError
from pedigree.pipelines.cli.progress import (
    Board,
    Display,
    Row,
    StatusLine,
    doing,
    eta_seconds,
    numbers_text,
    render,
    time_left,
    took,
)
from pedigree.pipelines.estimate.schedule import TimeLeft
from pedigree.pipelines.jobs.context import StageFailed
from pedigree.pipelines.jobs.events import StageEnded, StageProgressed, StageStarted, StageWaiting
from pedigree.pipelines.quantities import duration, number, rough

SFT = "tiny/sft"
RUNNING = Row("running", name="sft", started=1000.0)


def shown(views, now=1000.0, note="", height=50) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(render("tiny", views, now, note, height))
    return console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]


def beat(step, total, **numbers):
    return StageProgressed(SFT, step, total, numbers)


def rows(*names):
    return {f"tiny/{name}": Row(name=name) for name in names}


def test_eta_is_measured_from_the_first_counted_step_not_from_the_start_of_the_job():
    # the job starts at 1000 and loads its model for 90 s; steps 1..5 take 2 s each: 45 left * 2 s
    view = RUNNING.at(beat(0, 50), 1030.0)
    view = view.at(beat(1, 50), 1090.0)
    assert eta_seconds(view) is None
    view = view.at(beat(5, 50), 1098.0)
    assert eta_seconds(view) == pytest.approx(45 * 2.0)


def test_eta_starts_afresh_when_a_new_attempt_begins_at_an_earlier_step():
    view = RUNNING.at(beat(30, 50), 1000.0).at(beat(40, 50), 1010.0)
    view = view.at(beat(20, 50), 1100.0)
    assert eta_seconds(view) is None
    assert eta_seconds(view.at(beat(22, 50), 1110.0)) == pytest.approx(28 * 5.0)


@pytest.mark.parametrize(("seconds", "text"), [(0.2, "0s"), (59.4, "59s"), (59.6, "1m 00s"), (3599.7, "1h 00m"), (7620, "2h 07m")])
def test_durations(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (20, "less than a minute"),
        (50, "about 1 minute"),
        (840, "about 14 minutes"),
        (5970, "about 1.7 hours"),
        (9000, "about 2.5 hours"),
        (90_000, "about 25 hours"),
        (1e6, "about 12 days"),
        (1e8, "about 3.2 years"),
        (1e11, "about 3,171 years"),
    ],
)
def test_rough_times(seconds, text):
    assert rough(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (1e-4, "1e-4"), (-2.5e-7, "-2.5e-7"), (0.123456, "0.123"), (12.345, "12.3"), (1234.5, "1234"), (56_789.0, "57k"),
     (float("nan"), "nan")],
)  # fmt: skip
def test_numbers_stay_short(value, text):
    assert number(value) == text


def test_loss_or_reward_comes_first_and_the_rate_last():
    assert numbers_text({"tokens_per_second": 1500.0, "grad_norm": 2.0, "loss": 0.5}) == "loss 0.5  grad norm 2  1500 tok/s"


def test_a_stage_that_only_loads_says_so_and_a_long_step_for_how_long_it_goes_on():
    assert doing(RUNNING, 1010.0).startswith("starting")
    view = replace(RUNNING, timeout=600.0).at(beat(3, 10, loss=1.5), 1010.0)
    assert "step 3/10" in doing(view, 1011.0) and "into this step" not in doing(view, 1011.0)
    assert "1m 10s into this step" in doing(view, 1080.0) and "heartbeat" not in doing(view, 1080.0)


def test_silence_is_a_warning_only_where_the_job_may_soon_be_ended_for_it():
    view = replace(RUNNING, timeout=600.0).at(beat(3, 10), 1000.0)
    assert "heartbeat" not in doing(view, 1400.0)
    assert "no heartbeat for 7m 10s; the job is terminated after 10m 00s" in doing(view, 1430.0)


def test_the_time_left_of_a_stage_is_measured_and_before_that_estimated():
    view = RUNNING.at(beat(1, 50), 1090.0).at(beat(5, 50), 1098.0)  # two seconds a step
    assert time_left(view, 500.0, 1099.0) == pytest.approx(45 * 2.0 - 1.0)
    assert time_left(RUNNING, 500.0, 1020.0) == 480.0
    assert time_left(RUNNING, 10.0, 1020.0) == 0.0  # it should be over
    assert time_left(RUNNING, None, 1020.0) is None
    assert time_left(replace(RUNNING, state="pending"), 500.0, 1020.0) is None


def test_the_time_that_a_stage_waits_for_its_slots_is_none_of_its_own(monkeypatch, tmp_path):
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    board = Board("tiny", rows("sft"))
    board.update(StageWaiting(SFT, "for 2 slots of 2"))
    now[0] = 1060.0
    assert took(board.rows["tiny/sft"], 1060.0) == "1m 00s"
    board.update(StageStarted(SFT, tmp_path))
    assert took(board.rows["tiny/sft"], 1065.0) == "5s"
    now[0] = 1070.0
    board.update(StageStarted(SFT, tmp_path, "attempt 2"))
    now[0] = 1090.0
    board.update(StageEnded("tiny/sft", "ran", seconds=90.0))
    assert took(board.rows["tiny/sft"], 1100.0) == "30s"


class Told:
    """A forecast that adds up what it is told, and counts how often stages have ended."""

    def __init__(self) -> None:
        self.ended: list[frozenset[str]] = []

    def left(self, ended, due, left):
        self.ended.append(ended)
        return TimeLeft(sum(left(address, 600.0) or 600.0 for address in due), how="a test")


def test_the_head_of_the_tree_and_a_line_now_and_then_tell_the_time_left_of_the_whole_run(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    forecast = Told()
    board = Board("tiny", rows("base", "sft", "eval"), forecast, ["tiny/sft", "tiny/eval"])  # pyright: ignore[reportArgumentType]
    display = Display(board, io.StringIO(), interval_s=15)
    assert board.left(1000.0) == ""  # it may be that all is up to date
    board.update(StageStarted(SFT, Path("scratch")))
    assert display.lines(1000.0)[0] == "tiny: about 20 minutes left"
    assert not any("left" in line for line in display.lines(1030.0))
    assert display.lines(1300.0)[0] == "tiny: about 15 minutes left"
    board.update(StageEnded("tiny/sft", "ran", seconds=330.0))
    assert board.left(1330.0) == "about 10 minutes left" and forecast.ended[-1] == {"tiny/sft"}  # that `base` is not here is no matter
    assert "tiny  1/3 stages  about 10 minutes left" in shown_with(board.left(1330.0), list(board.rows.values()))
    board.update(StageEnded("tiny/eval", "ran", seconds=1.0))
    assert board.left(1400.0) == ""


def shown_with(left: str, views) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(render("tiny", views, 1000.0, left=left))
    return console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("error", [ArtifactError("it was moved"), KeyError("somebody else made it")])
def test_a_forecast_that_cannot_be_made_leaves_the_display_alone(error):
    class Broken:
        def left(self, *_):
            raise error

    board = Board("tiny", rows("sft"), Broken(), ["tiny/sft"])  # pyright: ignore[reportArgumentType]
    board.update(StageStarted(SFT, Path("scratch")))
    assert board.left(1e9) == ""


def test_the_tree_shows_every_state():
    views = [
        replace(RUNNING, name="a", state="unchanged"),
        replace(RUNNING, name="b", state="failed", detail="no rows"),
        replace(RUNNING, name="c").at(beat(3, 10, reward=0.25), 1000.0),
        Row("skipped", name="d"),
        Row(name="e"),
    ]
    text = shown(views, note="starting Prefect")
    for part in ("tiny  1/5 stages", "starting Prefect", "a  up to date", "b  no rows", "step 3/10  reward 0.25", "e"):
        assert part in " ".join(text.split("\u2003")) or part in text
    assert [line[0] for line in text.splitlines()[1:]] == ["✓", "✗", "●", "–", "·"]


def test_a_tree_higher_than_the_screen_folds_around_what_runs():
    done = [Row("unchanged", name=f"a{i}") for i in range(20)]
    coming = [Row(name=f"z{i}") for i in range(20)]
    views = [*done, replace(RUNNING, name="now"), *coming]
    assert len(shown(views, height=50).splitlines()) == 42
    lines = shown(views, height=30).splitlines()
    assert len(lines) == 23 and "20 stages  done" in lines[1] and "now" in lines[2] and "z0" in lines[3]
    lines = shown(views, height=10).splitlines()
    assert len(lines) == 4 and "now" in lines[2] and "20 stages  to come" in lines[3]


def test_a_failed_stage_shows_the_first_line_and_the_end_of_the_run_all_of_them():
    message = "rows: 3 malformed rows of 4:\n  rows.jsonl:1: is not JSON\n  rows.jsonl:2: is not JSON"
    row = RUNNING.at(StageEnded(SFT, "failed", message, "refused"), 1001.0)
    assert row.detail == "rows: 3 malformed rows of 4"
    said = str(StageFailed(SFT, "refused", message, "log.txt"))
    assert said == f"tiny/sft failed (refused): {message}\nits log is log.txt, `pedigree logs tiny/sft` prints it"


def test_what_was_never_made_or_was_canceled_has_not_failed():
    for cause in ("not_finished", "cancelled"):
        row = RUNNING.at(StageEnded(SFT, "failed", "canceled while waiting", cause), 1001.0)
        assert (row.state, row.detail) == ("skipped", "canceled while waiting")


def test_markup_in_a_message_is_shown_not_interpreted():
    assert "[/red] [bold]" in shown([replace(RUNNING, state="failed", detail="[/red] [bold]")])


def test_plain_lines_come_with_every_change_and_every_fifteen_seconds(monkeypatch):
    now = [50.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    board = Board("tiny", rows("sft", "eval"))
    display = Display(board, io.StringIO(), interval_s=15)
    assert display.lines(0.0) == []
    board.update(StageStarted(SFT, Path("scratch")))
    (line,) = display.lines(100.0)
    assert line.startswith("● sft") and "running" in line
    assert display.lines(110.0) == []
    assert len(display.lines(115.0)) == 1
    now[0] = 115.0
    board.update(StageEnded("tiny/sft", "ran", seconds=65.0))
    board.update(StageEnded("tiny/eval", "failed", "no suite", "refused"))
    done, failed = display.lines(116.0)
    assert done.startswith("✓ sft") and "1m 05s" in done
    assert failed.startswith("✗ eval") and "no suite" in failed
    assert display.lines(200.0) == []


def test_a_stage_that_begins_to_wait_while_the_time_left_is_computed_has_not_waited_a_negative_time(monkeypatch):
    board = Board("tiny", rows("sft"))

    def slow_forecast(now):
        monkeypatch.setattr(time, "monotonic", lambda: now + 3.0)
        board.update(StageWaiting(SFT, "for 1 slot of 2"))
        return ""

    monkeypatch.setattr(board, "left", slow_forecast)
    display = Display(board, io.StringIO())
    assert display.lines(1000.0) == []
    assert display.lines(1004.0) == ["◌ sft                waiting  for 1 slot of 2  (1s)"]


def test_the_silence_of_a_job_is_timed_from_the_arrival_of_its_heartbeat(tmp_path, monkeypatch):
    stream, board, now = io.StringIO(), Board("tiny", rows("sft")), [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(Display, "_print_until_ended", lambda display: None)  # so that nothing is printed before the end
    board.update(StageStarted(SFT, tmp_path))
    with Display(board, stream, interval_s=60):
        for step in (4, 5):
            now[0] += 20.0
            board.update(beat(step, 8))
    assert "step 5/8" in stream.getvalue() and "into this step" not in stream.getvalue()
    stream = io.StringIO()
    with Display(board, stream, interval_s=60):
        now[0] += 70.0
    assert "1m 10s into this step" in stream.getvalue()


def test_without_a_terminal_nothing_but_lines_is_written():
    stream = io.StringIO()
    board = Board("tiny", rows("sft"))
    with Display(board, stream, interval_s=0.05):
        board.update(StageStarted(SFT, Path("scratch")))
        until(stream.getvalue)
        board.update(StageEnded("tiny/sft", "ran", seconds=1.0))
    assert "\x1b" not in stream.getvalue()
    assert stream.getvalue().splitlines()[-1].startswith("✓ sft")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("variable", "value", "kind"), [("TERM", "dumb", Terminal), ("FORCE_COLOR", "1", io.StringIO)])
def test_what_cannot_be_redrawn_gets_lines_while_the_run_lasts(variable, value, kind, monkeypatch):
    """A terminal of Emacs is dumb; CI sets FORCE_COLOR where stdout is a file."""
    monkeypatch.setenv(variable, value)
    stream, told, board = kind(), kind(), Board("tiny", rows("sft"))
    with Display(board, stream, interval_s=0.05), StatusLine(told, interval_s=0.05) as telling:
        telling("hashing 12 of 100 GB")
        board.update(StageStarted(SFT, Path("scratch")))
        until(lambda: "● sft" in stream.getvalue() and told.getvalue() == "hashing 12 of 100 GB\n")
    assert "\x1b" not in stream.getvalue() + told.getvalue()
