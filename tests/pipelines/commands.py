"""The command `pedigree` in a lab, typed into a shell or in this process."""

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from in_process import InProcessLauncher
from projects import environment
from running_lab import Lab
from waiting import deadline, until

from pedigree.configs.base.project import Project
from pedigree.data.artifacts.provenance import CODE_ROOT
from pedigree.pipelines.cli.main import main
from pedigree.pipelines.jobs.context import RunContext


class Command:
    """`pedigree` in a lab, as processes."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.environment = {**lab.environment, "COLUMNS": "160"}

    def start(self, *arguments: str, stdout: Any = subprocess.PIPE, stderr: Any = subprocess.PIPE) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "pedigree.pipelines.cli", *arguments],
            cwd=self.lab.root,
            env=self.environment,
            stdout=stdout,
            stderr=stderr,
            text=True,
        )

    def __call__(self, *arguments: str, code: int = 0) -> str:
        process = self.start(*arguments)
        out, err = process.communicate(timeout=deadline(120))
        assert process.returncode == code, f"{arguments} ended with {process.returncode}\n{out}\n{err}"
        assert "Traceback" not in err
        return out + err

    def until(self, *arguments: str, ready: Callable[[], object], **streams: Any) -> subprocess.Popen[str]:
        """Starts the command and waits until `ready()`."""
        process = self.start(*arguments, **streams)
        try:
            until(ready, 120, alive=lambda: process.poll() is None)  # Prefect alone may take a minute to be imported beside other tests
        except AssertionError as error:
            process.kill()
            raise AssertionError(*process.communicate()) from error
        return process

    def jobs(self) -> list[int]:
        """Processes that carry this lab's scratch folder in their command line."""
        mark = str(self.lab.root / ".pedigree").encode()
        found = []
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit():
                try:
                    if mark in (folder / "cmdline").read_bytes():
                        found.append(int(folder.name))
                except OSError:
                    continue
        return found


class InProcessCommand(Command):
    """The same in this process, where everything has been imported already; jobs are what the lab's runs start."""

    def __call__(self, *arguments: str, code: int = 0) -> str:
        return "".join(self.said(*arguments, code=code))

    def said(self, *arguments: str, code: int = 0) -> tuple[str, str]:
        """What the command prints on stdout and on stderr."""
        out, err = io.StringIO(), io.StringIO()
        with self._shell(*arguments), redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as end:
            main()
        assert (end.value.code or 0) == code, f"{arguments} ended with {end.value.code}\n{out.getvalue()}\n{err.getvalue()}"
        assert "Traceback" not in err.getvalue()
        return out.getvalue(), err.getvalue()

    @contextmanager
    def _shell(self, *arguments: str) -> Iterator[None]:
        create, polite = RunContext.__init__, signal.getsignal(signal.SIGTERM)

        def in_lab(run: RunContext, *given: Any, **options: Any) -> None:
            create(run, *given, **options)
            run.code_root = self.lab.code
            run.launcher = run.launcher or type(self.lab.launcher)(run.project)  # which is that of a rehearsal, for one

        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(self.lab.root)
            patch.setattr(sys, "argv", ["pedigree", *arguments])
            patch.setattr(RunContext, "__init__", in_lab)
            for name in os.environ.keys() - self.environment.keys():
                patch.delenv(name)
            for name, value in self.environment.items():
                patch.setenv(name, value)
            try:
                yield
            finally:
                signal.signal(signal.SIGTERM, polite)
                for name in os.environ.keys() - self.environment.keys():  # as a command's own process takes with it
                    del os.environ[name]


def in_project(root: Path) -> InProcessCommand:
    """The command in a project that is no lab, whose jobs run the code of this repository."""
    lab: Any = SimpleNamespace(root=root, code=CODE_ROOT, launcher=InProcessLauncher(Project(root)), environment=environment())
    return InProcessCommand(lab)


def step_of(lab: Lab, stage: str) -> int:
    for path in (lab.root / ".pedigree" / "scratch").glob("*/progress.json"):
        try:
            if json.loads((path.parent / "spec.json").read_text())["address"] == f"lab/{stage}":
                return json.loads(path.read_text())["step"]
        except (OSError, ValueError):
            continue
    return 0
