"""What the job of a scratch folder keeps bit by bit, beside checkpoints: its next attempt neither makes it nor asks for it again."""

from dataclasses import dataclass
from pathlib import Path

REWARDS = "rewards-"
"""How chunks begin that hold rewards (`stages.sampling.rewards`)."""


@dataclass(frozen=True)
class Kept:
    """The files; none of them is empty."""

    chunks: tuple[Path, ...]
    """Finished chunks of generation, likelihoods or rewards."""
    answers: Path | None
    """The log of answers that were kept one by one."""
    replies: Path | None
    """That of an endpoint's replies."""

    def __bool__(self) -> bool:
        return bool(self.chunks or self.answers or self.replies)

    @property
    def size(self) -> int:
        """In bytes."""
        return sum(_size(path) for path in (*self.chunks, self.answers, self.replies) if path)

    def said(self) -> str:
        """What is gone on from, in words."""
        held = {"finished chunks": self.chunks, "kept answers": self.answers, "kept replies": self.replies}
        return " and ".join(words for words, files in held.items() if files)

    def number_of_replies(self) -> int:
        """Whole lines of their log."""
        if self.replies is None:
            return 0
        try:
            with self.replies.open("rb") as lines:
                return sum(line.endswith(b"\n") for line in lines)
        except FileNotFoundError:  # its job has just ended
            return 0


def kept_here(scratch: Path) -> Kept:
    """What is kept in a scratch folder.

    A name that begins with a dot is that of a temporary file, whose writer may have been killed. Beside a log, chunks other than those
    of rewards are parts of it, written for other machines (`stages.sampling.response_log`).
    """
    folder = scratch / "chunks"
    answers, replies = (log if _size(log) else None for log in (folder / "answers.jsonl", scratch / "replies.jsonl"))
    names = f"{REWARDS}*.json" if answers or replies else "[!.]*.json"
    return Kept(tuple(chunk for chunk in folder.glob(names) if _size(chunk)), answers, replies)


def _size(path: Path) -> int:
    """Zero also of a file that is gone: a job may be at work."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
