"""The log of answers in a scratch folder (`stages.sampling.answer_log`); the next attempt neither recomputes nor re-requests them."""

from pathlib import Path

LOG = "chunks/answers.jsonl"


def answers_size(scratch: Path) -> int:
    """Size of the log in bytes; zero if there is none. A running job may write to it."""
    try:
        return (scratch / LOG).stat().st_size
    except FileNotFoundError:
        return 0


def number_of_answers(scratch: Path) -> int:
    """Complete lines in the log."""
    try:
        with (scratch / LOG).open("rb") as lines:
            return sum(line.endswith(b"\n") for line in lines)
    except FileNotFoundError:
        return 0
