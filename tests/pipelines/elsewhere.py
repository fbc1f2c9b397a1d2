"""Processes of "another machine" on the same disk: a PID namespace of their own, in which our process numbers mean other processes."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from running_lab import Lab
from waiting import deadline

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
