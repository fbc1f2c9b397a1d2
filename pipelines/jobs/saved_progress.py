"""Chunks and append-only response logs in a scratch folder; the next attempt neither recomputes nor re-requests their contents."""

from dataclasses import dataclass
from pathlib import Path

REWARDS = "rewards-"
"""File name prefix of chunks that hold rewards (`stages.sampling.rewards`)."""


@dataclass(frozen=True)
class SavedProgress:
    """The stored files, none of them empty."""

    chunks: tuple[Path, ...]
    """Finished chunks of generation, likelihoods or rewards."""
    answers: Path | None
    """Append-only log of single answers."""
    replies: Path | None
    """Append-only log of an endpoint's replies."""

    def __bool__(self) -> bool:
        return bool(self.chunks or self.answers or self.replies)

    @property
    def size(self) -> int:
        """In bytes."""
        return sum(_size(path) for path in (*self.chunks, self.answers, self.replies) if path)

    def description(self) -> str:
        """A phrase for what is resumed."""
        held = {"finished chunks": self.chunks, "kept answers": self.answers, "kept replies": self.replies}
        return " and ".join(words for words, files in held.items() if files)

    def number_of_replies(self) -> int:
        """Complete lines in the log of replies."""
        if self.replies is None:
            return 0
        try:
            with self.replies.open("rb") as lines:
                return sum(line.endswith(b"\n") for line in lines)
        except FileNotFoundError:  # its job has just ended
            return 0


def saved_progress(scratch: Path) -> SavedProgress:
    """Stored progress in a scratch folder.

    Names that begin with a dot are temporary files whose writer may have been killed. Next to a log, all chunks except rewards are parts of
    the log, written for other machines (`stages.sampling.response_log`).
    """
    folder = scratch / "chunks"
    answers, replies = (log if _size(log) else None for log in (folder / "answers.jsonl", scratch / "replies.jsonl"))
    names = f"{REWARDS}*.json" if answers or replies else "[!.]*.json"
    return SavedProgress(tuple(chunk for chunk in folder.glob(names) if _size(chunk)), answers, replies)


def _size(path: Path) -> int:
    """File size; zero if the file is gone, because a job may be running."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
