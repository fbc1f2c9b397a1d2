"""Schedules of deployments: parsed from the options of `pedigree deploy`, refused if they never fire, and described."""

import asyncio
import re
import signal
from datetime import timedelta
from typing import Any

from prefect.client.schemas.schedules import CronSchedule, IntervalSchedule, RRuleSchedule
from pydantic import ValidationError

from pedigree.configs.base.problems import UsageProblem

Schedule = CronSchedule | IntervalSchedule | RRuleSchedule
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
FORMS = {
    "--cron": 'five fields: minute, hour, day, month, weekday; for example "0 3 * * *" for 3:00 every night',
    "--interval": "a positive number with a unit: 90s, 15m, 6h, 1d",
    "--rrule": 'an RFC 5545 rule such as "FREQ=WEEKLY;BYDAY=MO;BYHOUR=3;BYMINUTE=0"',
}
SEARCH_S = 10
"""CPU seconds allowed to compute the next dates of a schedule, because the computation blocks Prefect's server."""


def schedule_of(
    cron: str | None = None, interval: str | None = None, rrule: str | None = None, timezone: str | None = None
) -> Schedule | None:
    """Build the schedule from command-line options.

    Raises:
        UsageProblem: several schedules, an invalid schedule, one that never fires, an unknown time zone, or a time zone without a schedule.
    """
    given = {"--cron": cron, "--interval": interval, "--rrule": rrule}
    used = [name for name, value in given.items() if value is not None]
    if len(used) > 1:
        raise UsageProblem(f"{' and '.join(used)} are mutually exclusive: a deployment has one schedule")
    if not used:
        if timezone is not None:
            raise UsageProblem(f"--timezone {timezone} requires --cron, --interval or --rrule")
        return None
    option = used[0]
    if rrule is not None and re.search(r"INTERVAL=[+-]?0+\b", rrule, re.IGNORECASE):
        raise UsageProblem(f"--rrule {rrule!r} never fires (INTERVAL is 0). Expected {FORMS['--rrule']}")
    try:
        if cron is not None:
            schedule = CronSchedule(cron=cron, timezone=timezone or "UTC")
        elif interval is not None:
            schedule = IntervalSchedule(interval=_span(interval), timezone=timezone or "UTC")
        else:
            assert rrule is not None
            schedule = RRuleSchedule(rrule=rrule, timezone=timezone or "UTC")
    except ValidationError as error:
        if "timezone" in str(error).lower() and timezone is not None:
            remedy = "use an IANA name such as Europe/Berlin, America/New_York or UTC"
            raise UsageProblem(f"--timezone {timezone}: unknown time zone; {remedy}") from error
        why = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise UsageProblem(f"{option} {given[option]!r} is invalid ({why}). Expected {FORMS[option]}") from error
    why = _why_never(schedule)
    if why:
        raise UsageProblem(f"{option} {given[option]!r} never fires ({why}). Expected {FORMS[option]}")
    return schedule


def _why_never(schedule: Schedule) -> str:
    """Return why a schedule would not fire on the server, or an empty string. Use it only in the main thread.

    The server's code computes as many dates as its scheduler requests at least, and for some rules it never ends.
    """
    from prefect.server.schemas.actions import DeploymentScheduleCreate as Stored  # adds a start date if the rule has none

    def stop(*_: object) -> None:
        raise TimeoutError(f"computing its next dates takes more than {SEARCH_S} s and would block Prefect's server")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, SEARCH_S)
    try:
        stored = Stored.model_validate({"schedule": schedule.model_dump(mode="json")}).schedule
        return "" if asyncio.run(stored.get_dates(n=3)) else "it matches no date"
    except Exception as error:  # boundary: the server would fail in the same way
        return str(error)
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def _span(text: str) -> timedelta:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhd]?)", text.strip())
    seconds = float(match[1]) * UNITS[match[2] or "s"] if match else 0.0
    if not 0 < seconds < timedelta.max.total_seconds():
        raise UsageProblem(f"--interval {text!r} is invalid. Expected {FORMS['--interval']}")
    return timedelta(seconds=seconds)


def describe(schedule: Any) -> str:
    zone = getattr(schedule, "timezone", None) or "UTC"
    if isinstance(schedule, CronSchedule):
        return f"cron {schedule.cron} ({zone})"
    if isinstance(schedule, IntervalSchedule):
        seconds = schedule.interval.total_seconds()
        unit, size = next((unit, size) for unit, size in reversed(UNITS.items()) if seconds % size == 0 or size == 1)
        return f"every {seconds / size:g} {unit}"
    return f"rrule {schedule.rrule} ({zone})" if isinstance(schedule, RRuleSchedule) else "manual"
