"""A project of its own in a folder, as a fresh clone would be, and the command line in it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

CODE = Path(__file__).parents[1]
BIN = Path(sys.executable).parent


def fresh_project(root: Path) -> Path:
    """The files of the repository that make a project, in a git repository without history."""
    for folder in ("configs", ".dvc"):
        (root / folder).mkdir(parents=True)
    shutil.copytree(CODE / "configs" / "recipes", root / "configs" / "recipes")
    shutil.copytree(CODE / "configs" / "execution", root / "configs" / "execution")
    pin_threads(root, 1)  # tests run beside others, and threads that wait for each other cost more than they compute
    for name in (".dvc/config", ".dvc/.gitignore", ".dvcignore", ".gitignore"):
        shutil.copy(CODE / name, root / name)
    for command in ("init -q", "add -A", "-c user.name=t -c user.email=t@t commit -qm start"):
        subprocess.run(["git", *command.split()], cwd=root, check=True)
    return root


def pin_threads(root: Path, threads: int = 2) -> None:
    """Two cores, whatever this machine has: with other threads other bits come out, and other stages run side by side.

    Args:
        root: the project.
        threads: of a job that computes, which takes as many slots.
    """
    for name in ("cpu", "slurm", "ray"):
        profile = root / "configs" / "execution" / f"{name}.yaml"
        text = profile.read_text().replace("\nslots: auto", "\nslots: 2")
        profile.write_text(text.replace(": auto", f": {threads}"))


def environment() -> dict[str, str]:
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    return {"PEDIGREE_PREFECT": "never", **os.environ, "PATH": path, "COLUMNS": "160"}


def call(project: Path, *command: str, check: bool = True) -> str:
    """Runs a command of the environment in the project; returns what it printed."""
    done = subprocess.run([str(BIN / command[0]), *command[1:]], cwd=project, env=environment(), capture_output=True, text=True)
    assert not check or done.returncode == 0, f"{command} ended with {done.returncode}\n{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
    return done.stdout + done.stderr


def contents(project: Path, recipe: str = "tiny") -> dict[str, str]:
    """Stage → content hash, of all that is published."""
    records = (project / "artifacts" / recipe).glob("*/record.json")
    return {path.parent.name: json.loads(path.read_text())["content"] for path in records}
