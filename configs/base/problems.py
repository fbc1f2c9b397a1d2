"""User-facing errors. Any other exception that leaves a command is a bug in Pedigree and is reported as one."""

from typing import ClassVar


class PedigreeError(Exception):
    """An expected failure, shown without a traceback. The message states what failed, why, and what to do."""

    exit_code: ClassVar[int] = 1


class UsageProblem(PedigreeError):
    """Invalid command-line input, or an invalid user-written file."""

    exit_code: ClassVar[int] = 2
