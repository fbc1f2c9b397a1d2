"""Signs of life that need no common clock: a counter that its owner raises, and a listener who times its rests on a clock of his own.

No time stamp of another machine, and no file's time, decides anything: clocks of two machines may be apart by minutes, and a clock
may jump. What counts is whether the counter has changed since the last look, and how long the reader himself has looked in vain.

A pulse proves that a process lives. That its work goes on is another matter: `progress.json` says that (`stages/job/job.py`).
"""

import json
import os
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

BEAT_S = 2.0
"""Seconds between two beats."""
SILENCE_S = 90.0
"""Who has not been heard for so long is gone. Longer than a shared file system may show an old file: NFS caches attributes for 60 s."""
LONGEST_GAP_S = 5.0
"""A listener who was stopped himself (SIGSTOP, a laptop's lid) counts no more than this for the time in which he did not listen."""


class Pulse:
    """A file that changes every two seconds while this block runs, in a thread of its own."""

    def __init__(self, path: Path, *, told: Callable[[], Mapping[str, Any]] = dict, look: Callable[[], None] = lambda: None) -> None:
        """
        Args:
            path: the file; its folder is made.
            told: what else stands in it.
            look: called at each beat, e.g. to see whether the work is still ours.
        """
        self.path, self._told, self._look = path, told, look
        self._life, self._began, self._beats = uuid.uuid4().hex, time.monotonic(), 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, daemon=True, name=f"pulse {path.name}")

    def __enter__(self) -> "Pulse":
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._beat()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _loop(self) -> None:
        while not self._stop.wait(BEAT_S):
            with suppress(OSError):  # a disk that stumbles (ESTALE, EIO) says nothing; whoever fell silent for it would be taken over
                self._look()
            self._beat()

    def _beat(self) -> None:
        self._beats += 1
        said: dict[str, Any] = {"beat": self._beats, "life": self._life, "seconds": round(time.monotonic() - self._began, 1)}
        with suppress(OSError):  # without it the beat counts as much
            said |= self._told()
        text = json.dumps(said).encode()
        temporary = self.path.with_name(f".{self.path.name}.{self._life}")
        try:
            temporary.write_bytes(text)
            os.replace(temporary, self.path)
        except OSError:  # the disk is full, or the file system stumbles: any change of the file is as good a sign of life
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            self._overwrite(text)

    def _overwrite(self, text: bytes) -> None:
        try:
            with self.path.open("r+b") as stream:
                stream.write(text)
        except OSError:
            return  # the next beat may succeed; silence costs only that somebody may take over


class Listener:
    """How long a sign of life has not changed, counted in this process's own listening time. One per thing that is listened to."""

    def __init__(self) -> None:
        self.heard = False
        """Whether the sign has changed since the first look: its owner was alive then."""
        self._sign: object = self
        self._looked = 0.0
        self._silent = 0.0

    def silent_s(self, sign: object) -> float:
        """Seconds since the sign last changed, as far as this listener has seen: 0 at its first look. Call it every second or so."""
        now = time.monotonic()
        if sign != self._sign:
            self.heard = self._sign is not self
            self._sign, self._silent = sign, 0.0
        else:
            self._silent += min(now - self._looked, LONGEST_GAP_S)
        self._looked = now
        return self._silent


def sign(path: Path) -> tuple[str, ...]:
    """What a listener compares: the text of a file, or of all files of a folder; empty where there is nothing."""
    try:
        paths = sorted(entry for entry in path.iterdir() if not entry.name.startswith(".")) if path.is_dir() else [path]
        return tuple(entry.read_text(errors="replace") for entry in paths)
    except OSError:  # replaced just now, or not there
        return ()


def told(path: Path) -> list[dict[str, Any]]:
    """What the pulses at a path, a file or a folder of files, say at this moment."""
    found = []
    for text in sign(path):
        try:
            found.append(json.loads(text))
        except (ValueError, RecursionError):  # overwritten just now
            continue
    return [entry for entry in found if isinstance(entry, dict)]
