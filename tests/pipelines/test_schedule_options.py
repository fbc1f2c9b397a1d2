"""What options of `deploy` say of times and parameters, before a server is asked."""

import re

import pytest

from pedigree.configs.base.problems import UsageProblem
from pedigree.pipelines import deployments
from pedigree.pipelines.deployments import describe, schedule_of


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("cron", "0 3 31 2 *"),
        ("rrule", "FREQ=DAILY;UNTIL=20200101"),
        ("rrule", "EXRULE:FREQ=DAILY"),
        ("rrule", "FREQ=DAILY;INTERVAL=0"),
        ("rrule", "FREQ=MINUTELY;interval=00;BYHOUR=3"),
        ("rrule", "FREQ=MINUTELY;INTERVAL=0_0"),
        ("rrule", "FREQ=DAILY;INTERVAL=-1"),
        ("interval", "9000000d"),  # once, and then Prefect's calendar has ended
    ],
)
def test_a_schedule_that_never_fires_is_refused(option: str, text: str) -> None:
    given = dict.fromkeys(("cron", "interval", "rrule"), None) | {option: text}
    with pytest.raises(UsageProblem, match=rf"--{option} {re.escape(repr(text))} never fires \(.+\)"):
        schedule_of(given["cron"], given["interval"], given["rrule"], None)


def test_a_rule_whose_next_date_is_not_found_in_time_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """No second holds two: Prefect would look at each to the year 9999, which takes days, and do nothing else meanwhile."""
    monkeypatch.setattr(deployments, "SEARCH_S", 1)
    with pytest.raises(UsageProblem, match=r"never fires .computing its next dates takes more than 1 s"):
        schedule_of(None, None, "FREQ=SECONDLY;BYSETPOS=2", None)


@pytest.mark.parametrize(
    ("option", "text", "words"),
    [
        ("cron", "0 3 29 2 *", "cron 0 3 29 2 * (Europe/Berlin)"),  # years away
        ("interval", "36500d", "every 36500 d"),
        ("rrule", "FREQ=MINUTELY", "rrule FREQ=MINUTELY (Europe/Berlin)"),
        ("rrule", "FREQ=WEEKLY;INTERVAL=02;BYDAY=MO", "rrule FREQ=WEEKLY;INTERVAL=02;BYDAY=MO (Europe/Berlin)"),
    ],
)
def test_a_schedule_that_fires_however_seldom_or_often_is_taken(option: str, text: str, words: str) -> None:
    given = dict.fromkeys(("cron", "interval", "rrule"), None) | {option: text}
    assert describe(schedule_of(given["cron"], given["interval"], given["rrule"], "Europe/Berlin")) == words


@pytest.mark.parametrize("text", ["99999999999d", "1000000000d", "1" + "0" * 400 + "d", "0d"])
def test_an_interval_beyond_all_bounds_cannot_be_read(text: str) -> None:
    with pytest.raises(UsageProblem, match=r"is invalid\. Expected a positive number with a unit"):
        schedule_of(None, text, None, None)
