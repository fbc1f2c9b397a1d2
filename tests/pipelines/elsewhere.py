"""Processes of "another machine" on the same disk: a PID namespace of their own, in which our process numbers mean other processes."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from running_lab import Lab
from waiting import deadline, until

from pedigree.data.store import heartbeat

_UNSHARE = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc", "--kill-child"]


def can_be_elsewhere() -> bool:
    return shutil.which("unshare") is not None and subprocess.run([*_UNSHARE, "true"], capture_output=True, check=False).returncode == 0


needs_elsewhere = pytest.mark.skipif(not can_be_elsewhere(), reason="unprivileged PID namespaces are not allowed here")


def python_elsewhere(code: str, cwd: Path, **options: Any) -> "subprocess.Popen[str]":
    """Runs Python code on the other machine. Its end ends all that it has started."""
    return subprocess.Popen([*_UNSHARE, sys.executable, "-c", code], cwd=cwd, text=True, **options)


def hasty(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence is over after two seconds, here and in all processes that the lab starts; on a slow machine later, where beats come late."""
    silence = deadline(2.0)
    path = lab.code / "data" / "store" / "heartbeat.py"
    text = path.read_text().replace("BEAT_S = 2.0", "BEAT_S = 0.2").replace("SILENCE_S = 90.0", f"SILENCE_S = {silence}")
    path.write_text(text)
    monkeypatch.setattr(heartbeat, "BEAT_S", 0.2)
    monkeypatch.setattr(heartbeat, "SILENCE_S", silence)


def next_beat(path: Path) -> None:
    """Waits until a heartbeat has changed."""
    before = heartbeat.sign(path)
    until(lambda: heartbeat.sign(path) != before)


class ListenersClock:
    """Time as the listeners of this process measure it. It passes as the test says: whoever beats late on a busy machine is not taken for
    dead, and nobody waits. Made before they begin to listen."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self._looks, look = 0.0, 0, heartbeat.Listener.silent_s

        def counted(listener: heartbeat.Listener, sign: object) -> float:
            silent = look(listener, sign)
            self._looks += 1
            return silent

        monkeypatch.setattr(heartbeat.Listener, "silent_s", counted)
        monkeypatch.setattr(heartbeat, "time", SimpleNamespace(monotonic=lambda: self.now))

    def beating(self, beat: Callable[[], object]) -> None:
        """Lets pass twice the time of silence, with beats all the while, and lets listeners look after each."""
        end = self.now + 2 * heartbeat.SILENCE_S
        while self.now < end:
            beat()
            self.now += min(heartbeat.SILENCE_S / 4, heartbeat.LONGEST_GAP_S)
            before = self._looks
            until(lambda: self._looks > before + 1)  # noqa: B023

    def silent(self, condition: Callable[[], object]) -> None:
        """Lets time pass until a condition is met."""

        def passed() -> object:
            self.now += heartbeat.LONGEST_GAP_S
            return condition()

        until(passed)
