"""Errors that people meet. Any other exception that leaves a command is a bug of ours, and is reported as one."""

from typing import ClassVar


class PedigreeError(Exception):
    """Something went wrong for a reason outside our code. The message says what, why and what to type; no traceback is shown."""

    exit_code: ClassVar[int] = 1


class UsageProblem(PedigreeError):
    """What was typed, or what stands in a file that the user wrote, cannot work as it is."""

    exit_code: ClassVar[int] = 2
