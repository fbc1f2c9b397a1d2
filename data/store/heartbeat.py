"""Heartbeats that do not depend on synchronized clocks.

The owner increments a counter; a listener measures on its own monotonic clock how long the counter has not changed. No timestamp of
another machine and no file time is used, because clocks may differ by minutes and may jump.

A heartbeat proves liveness, not progress; progress is in `progress.json` (`stages/job/job.py`).
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
"""Timeout after which an owner counts as dead. Longer than NFS caches attributes (60 s)."""
WIDTH = 512
"""Bytes of a heartbeat file: a shorter beat must cover the one before."""
LONGEST_GAP_S = 5.0
"""Most silence counted between two looks, so that time during which the listener itself was suspended does not count."""


class Pulse:
    """Heartbeat file, rewritten by a thread every `BEAT_S` seconds while the context is open."""

    def __init__(self, path: Path, *, extra: Callable[[], Mapping[str, Any]] = dict, look: Callable[[], None] = lambda: None) -> None:
        """
        Args:
            path: the file; its folder is created.
            extra: returns further fields to write.
            look: called at each beat, e.g. to check that the lease is still held.
        """
        self.path, self._extra, self._look = path, extra, look
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
            with suppress(OSError):  # a transient disk error (ESTALE, EIO) must not stop the heartbeat
                self._look()
            self._beat()

    def _beat(self) -> None:
        self._beats += 1
        fields: dict[str, Any] = {"beat": self._beats, "life": self._life, "seconds": round(time.monotonic() - self._began, 1)}
        with suppress(OSError):  # the beat counts without them
            fields |= self._extra()
        with suppress(OSError):  # the next beat may succeed; continued silence only lets another process take over
            file = os.open(self.path, os.O_WRONLY | os.O_CREAT, 0o666)  # in place: a full disk takes no new file
            try:
                os.write(file, json.dumps(fields).ljust(WIDTH).encode())
            finally:
                os.close(file)


class Listener:
    """Measures how long one heartbeat has not changed, in this process's own listening time."""

    def __init__(self) -> None:
        self.seen_alive = False
        """Whether the sign has changed since the first look, i.e. its owner was alive."""
        self._sign: object = self
        self._looked = 0.0
        self._silent = 0.0

    def silent_s(self, sign: object) -> float:
        """Observed seconds since the sign last changed; 0 at the first look. Call it about once a second."""
        now = time.monotonic()
        if sign != self._sign:
            self.seen_alive = self._sign is not self
            self._sign, self._silent = sign, 0.0
        else:
            self._silent += min(now - self._looked, LONGEST_GAP_S)
        self._looked = now
        return self._silent


def sign(path: Path) -> tuple[str, ...]:
    """The text of a file, or of all files of a folder, for a listener to compare; empty if there is none."""
    try:
        paths = sorted(entry for entry in path.iterdir() if not entry.name.startswith(".")) if path.is_dir() else [path]
        return tuple(entry.read_text(errors="replace") for entry in paths)
    except OSError:  # missing, or being replaced
        return ()


def read_heartbeats(path: Path) -> list[dict[str, Any]]:
    """The current contents of the heartbeats at a path, a file or a folder of files."""
    found = []
    for text in sign(path):
        try:
            found.append(json.loads(text))
        except (ValueError, RecursionError):  # being overwritten
            continue
    return [entry for entry in found if isinstance(entry, dict)]
