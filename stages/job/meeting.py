"""Where the nodes of a job meet: written by the first one into the scratch folder, read by those that join it."""

import socket
from contextlib import suppress
from pathlib import Path
from typing import Annotated

from pydantic import Field

from pedigree.configs.base.frozen import Frozen
from pedigree.data.store.untrusted import Line, read_as

MEETING = "meeting.json"
REACHED_S = 5.0
"""Longest wait for an answer of the first node."""


class Meeting(Frozen):
    """The store that the first node hosts."""

    host: Line
    port: Annotated[int, Field(ge=1, lt=1 << 16)]
    fence: Line | None = None
    """Path of the submission's fencing token."""

    @classmethod
    def read(cls, scratch: Path) -> "Meeting | None":
        """The meeting of a job; None if it has not begun, or no node can join it."""
        return read_as(cls.model_validate, scratch / MEETING)

    @property
    def is_open(self) -> bool:
        """Whether the first node is still there."""
        with suppress(OSError):
            socket.create_connection((self.host, self.port), REACHED_S).close()
            return True
        return False


def end_meeting(scratch: Path, fence: str | None) -> None:
    """Remove the meeting of the submission with this fencing token; that of a later submission stays."""
    meeting = Meeting.read(scratch)
    if meeting is not None and meeting.fence == fence:
        (scratch / MEETING).unlink(missing_ok=True)
